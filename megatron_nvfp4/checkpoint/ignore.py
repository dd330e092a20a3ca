"""Which modules a sampler leaves unquantised, from the list in a checkpoint's configuration.

Every sampler matches that list by rules of its own, against names of its own: q/k/v, gate/up and the experts
of a layer are one module there. The lists written here hold full names, which all of them read alike; lists
of other tools are read by each one's rules, restated below:

- SGLang 0.5.23, srt/layers/quantization/utils.py `is_layer_skipped` and modelopt_quant.py
  `is_layer_excluded`; compressed_tensors/utils.py `should_ignore_layer`.
- vLLM, model_executor/layers/quantization/modelopt.py `is_layer_excluded` (00155cde) with
  utils/quant_utils.py `is_layer_skipped` (01693a61); compressed_tensors/utils.py `should_ignore_layer`
  (008014e8).
- miles 08dfba1f, backends/megatron_utils/megatron_to_hf/processors/quantizer_nvfp4.py `_is_ignored`.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

Reader = Callable[[str, Sequence[str]], bool | None]
# Last part of a sampler's module: the last parts it is fused from. The two samplers call the joint
# down-projection of latent attention differently.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.[^.]+")
# SGLang compares only the last part of a listed name with these; the layer does not count.
_BY_LAST_PART = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


@dataclass(frozen=True)
class Difference:
    """A module that `reader` takes for something else than the file holds.

    stored, read: "nvfp4", "unquantised", or "both" for a fused module of both kinds.
    """

    reader: str
    module: str
    stored: str
    read: str

    def __str__(self) -> str:
        return f"{self.module}: {self.stored} in the file, {self.reader} reads {self.read}"


def expert_container(module: str) -> str | None:
    """`...mlp.experts` of a routed expert's linear `...mlp.experts.3.up_proj`, else None."""
    found = _EXPERT.fullmatch(module)
    return found[1] if found else None


def fused_with(modules: Collection[str]) -> dict[str, str]:
    """Module -> the linear a sampler makes of it and its neighbours, or itself.

    What shares one has one outer scale and one input. q_proj of latent attention has no such neighbours.
    """
    present = set(modules)
    found = {}
    for module in modules:
        stem, _, last = module.rpartition(".")
        found[module] = module
        for fused, parts in FUSED.items():
            if last in parts and all(f"{stem}.{part}" in present for part in parts):
                found[module] = f"{stem}.{fused}"
    return found


def group_of(modules: Collection[str]) -> dict[str, str]:
    """Module -> the sampler's module that holds it: a fused linear, a layer's routed experts, or itself."""
    fused = fused_with(modules)
    return {module: expert_container(module) or fused[module] for module in modules}


def ignore_list(
    kept: Collection[str], quantized: Collection[str], *, each_expert: bool
) -> list[str]:
    """Full names of the unquantised modules, in natural order.

    Experts of a layer without a quantised one stand as their container `...mlp.experts`, the name samplers
    ask for; each_expert: every one of them by name too, which compressed-tensors compares. `lm_head` is
    always there: a sampler may build it where embeddings are tied.
    """
    with_quantized = {expert_container(module) for module in quantized}
    found = {"lm_head"}
    for module in kept:
        container = expert_container(module)
        if container is not None and container not in with_quantized:
            found.add(container)
            if not each_expert:
                continue
        found.add(module)
    return sorted(found, key=natural_order)


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key under which layers.2 stands before layers.10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"[.]", name)]


def differences(
    method: str, quantized: Iterable[str], kept: Iterable[str], patterns: Sequence[str]
) -> list[Difference]:
    """What the samplers would read otherwise than stored, over all modules; empty is right.

    method: "modelopt" or "compressed-tensors"; quantized, kept: Hugging Face module names.
    """
    patterns = tuple(patterns)
    stored = dict.fromkeys(quantized, "nvfp4") | dict.fromkeys(kept, "unquantised")
    groups: dict[str, set[str]] = {}
    for module, group in group_of(stored).items():
        groups.setdefault(group, set()).add(stored[module])
    found = []
    for group, kinds in groups.items():
        holds = kinds.pop() if len(kinds) == 1 else "both"
        for name, reader in READERS[method].items():
            excluded = reader(group, patterns)
            reads = {None: "both", True: "unquantised", False: "nvfp4"}[excluded]
            if reads != holds or holds == "both":
                found.append(Difference(name, group, holds, reads))
    for module, holds in stored.items() if method == "modelopt" else ():
        # miles asks with a weight's name, of which it quantises only those in experts.
        if expert_container(module) and miles(module, patterns) != (holds == "unquantised"):
            reads = "unquantised" if holds == "nvfp4" else "nvfp4"
            found.append(Difference("miles", module, holds, reads))
    return found


def sglang(module: str, patterns: Sequence[str]) -> bool | None:
    """Whether SGLang's modelopt reader leaves `module` unquantised; None: it refuses a mixed one."""
    excluded = any(_glob_or_part(pattern, module) for pattern in patterns)
    tail = module.rpartition(".")[2]
    excluded = excluded or any(
        last in tail for last in _BY_LAST_PART for p in patterns if p.rpartition(".")[2] == last
    )
    if module.endswith(".experts"):
        return excluded
    answers = {any(_on_dots(p, shard) for p in patterns) for shard in _shards(module)}
    if len(answers) == 2:
        return None
    inside = "experts" in module and any(module in p for p in patterns if "experts" in p)
    return answers.pop() or inside or excluded


def vllm(module: str, patterns: Sequence[str]) -> bool | None:
    """The same of vLLM's modelopt reader, which also takes any listed name as a substring."""
    if "experts" in module and len(_shards(module)) == 1:
        skipped = any(module in p for p in patterns if "experts" in p)
    else:
        answers = {shard in patterns for shard in _shards(module)}
        if len(answers) == 2:
            return None
        skipped = answers.pop()
    return skipped or any(p in module or fnmatchcase(module, p) for p in patterns)


def miles(module: str, patterns: Sequence[str]) -> bool:
    """Whether miles' weight sync leaves the weight of a Hugging Face module unquantised.

    It asks with every weight's name: one listed name, or what stands before one of its dots.
    """
    names, expressions = _listed(tuple(patterns))
    parts = module.split(".")
    if any(".".join(parts[:count]) in names for count in range(1, len(parts) + 1)):
        return True
    return any(expression.match(f"{module}.weight") for expression in expressions)


def sglang_compressed_tensors(module: str, patterns: Sequence[str]) -> bool | None:
    """SGLang's compressed-tensors reader: a listed name may be the end of a module's name."""
    return _all_shards(module, patterns, lambda p, name: name == p or name.endswith(f".{p}"))


def vllm_compressed_tensors(module: str, patterns: Sequence[str]) -> bool | None:
    """vLLM's compressed-tensors reader, and that of compressed-tensors itself: equal names."""
    return _all_shards(module, patterns, lambda p, name: name == p)


READERS: dict[str, dict[str, Reader]] = {
    "modelopt": {"SGLang": sglang, "vLLM": vllm},
    "compressed-tensors": {"SGLang": sglang_compressed_tensors, "vLLM": vllm_compressed_tensors},
}


def reader_names(method: str) -> list[str]:
    """Whose rules `differences` asks for lists of `method`."""
    return [*READERS[method], *(["miles"] if method == "modelopt" else [])]


def _all_shards(
    module: str, patterns: Sequence[str], equal: Callable[[str, str], bool]
) -> bool | None:
    # A fused MoE layer asks with the name of its first expert's projections.
    names = (
        [f"{module}.0.gate_proj", f"{module}.0.up_proj"]
        if module.endswith(".experts")
        else [module]
        if module in patterns
        else _shards(module)
    )
    answers = {
        any(
            re.match(p[3:], name) is not None if p.startswith("re:") else equal(p, name)
            for p in patterns
        )
        for name in names
    }
    return None if len(answers) == 2 else answers.pop()


def _shards(module: str) -> list[str]:
    stem, _, last = module.rpartition(".")
    return [f"{stem}.{part}" for part in FUSED[last]] if last in FUSED else [module]


def _on_dots(pattern: str, module: str) -> bool:
    """Whether a listed name stands in a module's name between dots."""
    return f".{pattern.rstrip('.')}." in f".{module}."


@cache
def _listed(patterns: tuple[str, ...]) -> tuple[frozenset[str], list[re.Pattern[str]]]:
    expressions = [re.compile(p.removeprefix("re:")) for p in patterns if p.startswith("re:")]
    return frozenset(p for p in patterns if not p.startswith("re:")), expressions


@cache
def _glob(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace(".", r"\.").replace("*", ".*"))


def _glob_or_part(pattern: str, module: str) -> bool:
    expression = _glob(pattern)
    return any(expression.fullmatch(name) for name in (module, *module.split(".")))
