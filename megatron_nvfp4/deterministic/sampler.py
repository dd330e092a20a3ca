"""What a sampler must be started with, so that a profile holds: its environment and its command line.

Stdlib only. Reads text that the sampler's machine gave, never this process's environment. Effects of
the settings: SGLang 0.5.23, srt/environ.py, srt/arg_groups and srt/batch_invariant_ops.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from .profiles import TREE, Profile

PLUGIN = "megatron_nvfp4"  # the name of our entry point in SGLang's group
# Arguments whose default, under deterministic inference, is the profile's value.
DEFAULTED = ("sampling_backend", "dtype", "moe_runner_backend")
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


def sampler_faults(profile: Profile, settings: SamplerSettings) -> list[str]:
    """Every setting under which the sampler's bits are not the profile's, each with its remedy."""
    return [
        *_argument_faults(profile, settings.arguments),
        *_variable_faults(profile, settings),
        *_parallel_faults(settings),
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
    for name, harmless, reason in (
        ("kv_cache_dtype", ("auto", "bfloat16", "bf16"), "keys and values are rounded again"),
        ("speculative_algorithm", (), "tokens are scored in other batches of rows"),
        ("enable_lora", ("false",), "adapters add other products"),
        ("enable_fp32_lm_head", ("false",), "logits are not rounded to BF16"),
    ):
        if name in arguments and arguments[name] not in harmless:
            flag = f"--{name.replace('_', '-')}"
            found.append(f"{flag}={arguments[name]}: {reason}; leave it out")
    return found


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


def _parallel_faults(settings: SamplerSettings) -> list[str]:
    arguments, found = settings.arguments, []
    size = arguments.get("tp_size", arguments.get("tensor_parallel_size", "1"))
    if size != "1" and settings.environment.get("NCCL_ALGO") != TREE:
        found.append(f"--tp-size={size} without NCCL_ALGO={TREE}; set it on both sides, or use 1")
    if arguments.get("ep_size", "1") != "1":
        found.append(f"--ep-size={arguments['ep_size']}: experts are added by ranks; use 1")
    return found
