"""What a sampler must be started with, so that a profile holds: its environment and its command line.

Stdlib and recipes only. Reads text that the sampler's machine gave, never this process's environment.
Effects of the settings: SGLang 0.5.23, srt/environ.py, srt/arg_groups and srt/batch_invariant_ops.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from .profiles import PROFILES, TREE, Profile, SamplerRanks, sampler_rank_faults

PLUGIN = "megatron_nvfp4"  # the name of our entry point in SGLang's group
# Arguments whose default, under deterministic inference, is the profile's value.
DEFAULTED = ("sampling_backend", "dtype", "moe_runner_backend")
# Second names that SGLang's parser has for arguments judged here.
ALIASES = {
    "tensor_parallel_size": "tp_size",
    "expert_parallel_size": "ep_size",
    "ep": "ep_size",
    "pipeline_parallel_size": "pp_size",
    "decode_context_parallel_size": "dcp_size",
    "attention_data_parallel_size": "attn_dp_size",
    "attention_context_parallel_size": "attn_cp_size",
    "moe_data_parallel_size": "moe_dp_size",
}
# (argument, values that change nothing, why the sampler's bits are others with any other)
_OF_ANY_RANKS = (
    ("kv_cache_dtype", ("auto", "bfloat16", "bf16"), "keys and values are rounded again"),
    ("speculative_algorithm", (), "tokens are scored in other batches of rows"),
    ("enable_lora", ("false",), "adapters add other products"),
    ("lora_paths", (), "adapters add other products"),
    ("enable_fp32_lm_head", ("false",), "logits are not rounded to BF16"),
    ("enable_fused_moe_sum_all_reduce", ("false",), "slots are added as they come"),
    ("dcp_size", ("1",), "keys are spread over ranks"),
)
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
_COMMENT = re.compile(r"(?:^|\s)#.*")
# Words of a shell before NAME=VALUE.
_DECLARING = ("export", "env", "declare", "-x")
_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_RULES = (*_OF_ANY_RANKS, *_OF_TWO_RANKS)
_JUDGED = sorted(
    {"config", "quantization", "tp_size", "ep_size", *_BACKENDS, *ALIASES}
    | {name for profile in PROFILES.values() for name, _ in profile.sampler}
    | {name for name, _, _ in _RULES}
)


def canonical_name(flag: str) -> str:
    """SGLang's name of an argument `--flag`: aliases resolved, and abbreviations of what is judged here."""
    name = flag.replace("-", "_")
    if name not in _JUDGED:
        name = next((judged for judged in _JUDGED if judged.startswith(name)), name)
    return ALIASES.get(name, name)


@dataclass(frozen=True)
class SamplerSettings:
    """environment: by name; arguments: by SGLang's own name with underscores, "true" for a bare flag."""

    environment: Mapping[str, str]
    arguments: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> "SamplerSettings":
        """From what `env` prints, NAME=VALUE a line, and the sampler's command line, in any order.

        Variables may also stand before the command or behind `export`; a backslash continues a line. Of
        an argument given twice the last counts. Raises ValueError for quotes that do not close, and where
        no line has arguments.
        """
        environment, arguments = {}, {}
        for line in re.sub(r"\\\r?\n", " ", text).splitlines():
            assigned, words = _split(line)
            environment |= assigned
            arguments |= _arguments(words)
        if not arguments:
            raise ValueError(
                "no command line in it; add the sampler's, with its --arguments, to its environment"
            )
        return cls(environment, arguments)


def _split(line: str) -> tuple[dict[str, str], list[str]]:
    """Variables that a line sets, and the words of the command behind them."""
    printed = _VARIABLE.fullmatch(line.strip())
    try:
        words = shlex.split(_COMMENT.sub("", line))
    except ValueError as error:
        if printed:  # a value of `env`, which quotes nothing
            return {printed[1]: printed[2]}, []
        raise ValueError(f"{error} in the line {line.strip()[:80]!r}; close the quotes") from error
    while words and words[0] in _DECLARING:
        del words[0]
    assigned = {}
    while words and (found := _VARIABLE.fullmatch(words[0])):
        assigned[found[1]] = found[2]
        del words[0]
    if printed and words and not any(word.startswith("--") for word in words):
        return {printed[1]: printed[2]}, []  # a value of `env` with spaces
    return assigned, words


def _arguments(words: list[str]) -> dict[str, str]:
    found = {}
    for word, following in pairwise([*words, "--"]):
        if not word.startswith("--") or word == "--":
            continue
        flag, _, value = word[2:].partition("=")
        name = canonical_name(flag)
        is_bare = following.startswith("--") or name.startswith("enable_")
        found[name] = value or ("true" if is_bare else following)
    return found


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
    if "config" in arguments:
        found.append(
            f"--config={arguments['config']}: what it sets is unknown here; put its arguments themselves on "
            "the command line in the file"
        )
    others = ((name, (attention,), "its order is not the learner's") for name in _BACKENDS[1:])
    return found + _refused(arguments, (*_OF_ANY_RANKS, *others))


def _refused(
    arguments: Mapping[str, str], rules: tuple[tuple[str, tuple[str | None, ...], str], ...]
) -> list[str]:
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
    sizes = [arguments.get(name, "1") for name in ("tp_size", "ep_size")]
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
        algorithm = settings.environment.get("NCCL_ALGO", TREE)  # SGLang sets it where nobody did
        if algorithm != TREE:
            found.append(
                f"NCCL_ALGO={algorithm} with --tp-size={sizes[0]}: SGLang's deterministic mode has {TREE}; "
                "unset it"
            )
        found += _refused(arguments, _OF_TWO_RANKS)
    return found
