"""What a sampler must be started with, so that a profile holds: its environment and its command line.

Stdlib only. Reads text that the sampler's machine gave, never this process's environment. Effects of
the settings: SGLang 0.5.23, srt/environ.py, srt/arg_groups and srt/batch_invariant_ops.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from .profiles import TREE, Profile, SamplerRanks, sampler_rank_faults

PLUGIN = "megatron_nvfp4"  # the name of our entry point in SGLang's group
# Arguments whose default, under deterministic inference, is the profile's value.
DEFAULTED = ("sampling_backend", "dtype", "moe_runner_backend")
# Names of the arguments that say over how many ranks the sampler is spread.
TENSOR_PARALLEL = ("tp_size", "tensor_parallel_size", "tp")
EXPERT_PARALLEL = ("ep_size", "expert_parallel_size", "ep")
# (argument, values that change nothing, why the sum of two ranks is another with any other)
_OF_TWO_RANKS = (
    ("enable_symm_mem", ("false",), "sums run in other kernels"),
    ("enable_nccl_nvls", ("false",), "sums run in the switch"),
    ("enable_mscclpp", ("false",), "sums run in other kernels"),
    ("enable_quant_communications", ("false",), "partial sums are rounded to 8 bits"),
    ("enable_layernorm_sp", ("false",), "rows of the stream are spread over ranks"),
    ("enable_attn_tp_input_scattered", ("false",), "the residual is added before the sum"),
    ("enable_dp_attention", ("false",), "attention is whole on each rank"),
    ("attn_dp_size", ("1",), "attention is whole on each rank"),
    ("attn_cp_size", ("1",), "keys are spread over ranks"),
    ("moe_dp_size", ("1",), "experts are spread otherwise"),
    ("moe_a2a_backend", ("none",), "experts' sums run elsewhere"),
    ("ep_num_redundant_experts", ("0",), "experts stand on other ranks"),
    ("enable_eplb", ("false",), "experts move between ranks"),
    ("pp_size", ("1",), "layers are spread over ranks"),
)
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)")


@dataclass(frozen=True)
class SamplerSettings:
    """environment: by name; arguments: by SGLang's name with underscores, "true" for a bare flag."""

    environment: Mapping[str, str]
    arguments: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> "SamplerSettings":
        """From lines NAME=VALUE (what `env` prints) and lines of the sampler's command line, in any order."""
        environment, words = {}, []
        for line in text.splitlines():
            found = _VARIABLE.fullmatch(line.strip())
            if found:
                environment[found[1]] = found[2]
            elif not line.lstrip().startswith("#"):
                words += shlex.split(line)
        arguments = {}
        for word, following in zip(words, [*words[1:], "--"], strict=True):
            if word.startswith("--") and word != "--":
                name, _, value = word[2:].partition("=")
                bare = "true" if following.startswith("--") else following
                arguments[name.replace("-", "_")] = value or bare
        return cls(environment, arguments)


def sampler_faults(
    profile: Profile, settings: SamplerSettings, ranks: SamplerRanks | str = "tp1"
) -> list[str]:
    """Every setting under which the sampler's bits are not the profile's, each with its remedy.

    ranks: what the learner is told of the sampler, its deterministic_sampler.
    """
    return [
        *_argument_faults(profile, settings.arguments),
        *_variable_faults(profile, settings),
        *_parallel_faults(settings, SamplerRanks.parse(ranks)),
    ]


def _argument_faults(profile: Profile, arguments: Mapping[str, str]) -> list[str]:
    found = []
    for name, right in profile.sampler:
        value, flag = arguments.get(name), f"--{name.replace('_', '-')}"
        if value is None and name not in DEFAULTED:
            found.append(
                f"{flag} is not given; give {flag}{'' if right == 'true' else ' ' + right}"
            )
        elif value not in (None, right):
            found.append(f"{flag}={value}: {profile.name} has {right}; give that")
    attention = arguments.get("attention_backend")
    if attention not in profile.attention:
        found.append(
            f"--attention-backend={attention}; give {' or '.join(profile.attention)}, and the learner "
            "the same"
        )
    quantization = arguments.get("quantization")
    if quantization and "quantization" not in dict(profile.sampler):
        found.append(
            f"--quantization={quantization}: other kernels and roundings than {profile.name}'s; leave it "
            "out or choose another profile"
        )
    unknown = (
        ("kv_cache_dtype", ("auto", "bfloat16", "bf16"), "keys and values are rounded again"),
        ("speculative_algorithm", (), "tokens are scored in other batches of rows"),
        ("enable_lora", ("false",), "adapters add other products"),
        ("enable_fp32_lm_head", ("false",), "logits are not rounded to BF16"),
        ("enable_fused_moe_sum_all_reduce", ("false",), "slots are added as they come"),
    )
    return found + _refused(arguments, unknown)


def _refused(arguments: Mapping[str, str], rules: tuple) -> list[str]:
    """A fault for every (argument, harmless values, reason) that is given another value."""
    return [
        f"--{name.replace('_', '-')}={arguments[name]}: {reason}; leave it out"
        for name, harmless, reason in rules
        if name in arguments and arguments[name] not in harmless
    ]


def _variable_faults(profile: Profile, settings: SamplerSettings) -> list[str]:
    environment = settings.environment
    found = [
        f"{name} is not 0: DeepGEMM's bits were not compared; set {name}=0"
        for name in (
            "SGLANG_ENABLE_JIT_DEEPGEMM",
            "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM",
        )
        if environment.get(name) not in ("0", "false", "False")
    ]
    tile = environment.get("SGLANG_TRITON_DECODE_SPLIT_TILE_SIZE", "256")
    if settings.arguments.get("attention_backend") == "triton" and tile != "256":
        found.append(
            f"SGLANG_TRITON_DECODE_SPLIT_TILE_SIZE={tile}: response rows are split elsewhere; unset it"
        )
    original = environment.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "0")
    if original not in ("0", "false", "False"):
        found.append(
            f"SGLANG_RETURN_ORIGINAL_LOGPROB={original}: log-probabilities are those before the "
            "temperature; unset it"
        )
    allowed = environment.get("SGLANG_PLUGINS")
    needs_plugin = "quantization" in dict(profile.sampler)
    if needs_plugin and allowed and PLUGIN not in allowed.split(","):
        found.append(f"SGLANG_PLUGINS={allowed} leaves the plugin out; add {PLUGIN} to it")
    return found


def _parallel_faults(settings: SamplerSettings, told: SamplerRanks) -> list[str]:
    arguments = settings.arguments
    sizes = [
        next((arguments[name] for name in names if name in arguments), "1")
        for names in (TENSOR_PARALLEL, EXPERT_PARALLEL)
    ]
    try:
        ranks = SamplerRanks.parse("tp{}ep{}".format(*sizes))
    except ValueError:
        return ["--tp-size={} --ep-size={}: give numbers".format(*sizes)]
    found = sampler_rank_faults(ranks)
    if ranks != told and not found:
        found.append(
            f"--tp-size={sizes[0]} --ep-size={sizes[1]}: the learner computes what a sampler of {told} does; "
            f"give it deterministic_sampler: {ranks} (here --sampler-ranks {ranks}), or start one of {told}"
        )
    if ranks.tensor_parallel > 1:
        if settings.environment.get("NCCL_ALGO") != TREE:
            found.append(
                f"--tp-size={sizes[0]} without NCCL_ALGO={TREE}; set it on both sides, or use 1"
            )
        found += _refused(arguments, _OF_TWO_RANKS)
    return found
