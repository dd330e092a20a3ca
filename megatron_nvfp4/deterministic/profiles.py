"""What SGLang computes in its deterministic modes, as data, and why a run cannot compute the same.

Stdlib and recipes only. A profile names formulas and orders; ../deterministic/ops implements those of
the profiles whose `missing` is empty.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_nvfp4.recipes import RECIPES, Operands, Policy

TREE = "allreduce:tree"  # what SGLang sets NCCL_ALGO to in deterministic mode
UNQUANTIZED = Operands()
BESIDE_PROFILE = "the deterministic profile"  # the source of the recipe of layers that it computes
# Settings of a policy that say what is quantised, beside its rules.
_RECIPE_SETTINGS = ("recipe", "shared_experts", "last_layers_bf16", "disable_backward_quant")
# Products walk K in steps of 16 and NVFP4 has blocks of 16: a rank's share of a width is whole steps.
STEP = 16


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One arithmetic of both sides.

    families: Hugging Face's model_type of the models it is defined for. attention: backends whose order
    is known; the run and the sampler take the same one.
    residual, norm_weight, logits, logprobs: dtypes of the stream between layers, and of the embedding that
        starts it; of the norms' weights as they multiply; of the logits before the temperature; of the
        values of the result, and of the logits behind the temperature.
    rope_frequencies: the device that computes them, None for the one that rotates.
    silu_roundings: 1 where silu(gate) * up rounds once, 2 where silu rounds by itself.
    router_weight: where the weight of an expert is multiplied, None without experts.
    dense, experts: formats of the forward operands of dense linears and of expert products; the router, the
        embedding and the head stay BF16.
    missing: operators it needs that are not implemented.
    sampler: SGLang's arguments, by name with underscores; "true" for a bare flag.
    """

    name: str
    summary: str
    families: tuple[str, ...]
    attention: tuple[str, ...]
    residual: str = "bfloat16"
    norm_weight: str = "bfloat16"
    logits: str = "bfloat16"
    logprobs: str = "float32"
    rope_frequencies: str | None = None
    silu_roundings: int = 1
    router_weight: str | None = "fc2_accumulator"
    dense: Operands = UNQUANTIZED
    experts: Operands = UNQUANTIZED
    missing: tuple[str, ...] = ()
    sampler: tuple[tuple[str, str], ...] = ()


sglang_det_bf16 = Profile(
    name="sglang_det_bf16",
    summary="SGLang --enable-deterministic-inference in BF16, log-probabilities in FP32",
    families=("qwen3", "qwen3_moe"),
    attention=("triton", "fa3"),
    sampler=(
        ("enable_deterministic_inference", "true"),
        ("sampling_backend", "pytorch"),
        ("dtype", "bfloat16"),
        ("moe_runner_backend", "triton"),
    ),
)
sglang_rl_fsdp = Profile(
    name="sglang_rl_fsdp",
    summary="SGLang --rl-on-policy-target fsdp, dense models, log-probabilities in BF16",
    families=("qwen3",),
    attention=("fa3",),
    residual="float32",
    norm_weight="float32",
    logprobs="bfloat16",
    rope_frequencies="cpu",
    silu_roundings=2,
    router_weight=None,
    sampler=(
        ("rl_on_policy_target", "fsdp"),
        ("sampling_backend", "pytorch"),
        ("dtype", "bfloat16"),
    ),
)
sglang_minite_nvfp4 = replace(
    sglang_det_bf16,
    name="sglang_minite_nvfp4",
    summary="sglang_det_bf16 with NVFP4 experts, by --quantization minite_nvfp4 on the sampler",
    experts=RECIPES["nvfp4_per_token"].fprop,
    sampler=(*sglang_det_bf16.sampler, ("quantization", "minite_nvfp4")),
)
PROFILES = {p.name: p for p in (sglang_det_bf16, sglang_rl_fsdp, sglang_minite_nvfp4)}


@dataclass(frozen=True)
class SamplerRanks:
    """How many ranks one sampler is spread over: its --tp-size, and of these its --ep-size.

    tp ranks share heads, widths and the vocabulary; with ep they share the experts, whole, instead of
    their widths. Printed and read as `tp1`, `tp2`, `tp2ep2`.
    """

    tensor_parallel: int = 1
    expert_parallel: int = 1

    @classmethod
    def parse(cls, text: "str | SamplerRanks") -> "SamplerRanks":
        """From its name; ValueError for what is none. Whether a profile holds for it, `faults` says."""
        if isinstance(text, SamplerRanks):
            return text
        pattern = r"tp([1-9]\d*)(?:ep([1-9]\d*))?"
        found = re.fullmatch(pattern, text) if isinstance(text, str) else None
        if not found:
            raise ValueError(
                f"deterministic_sampler: {text!r} names no ranks; use tp1, tp2 or tp2ep2, as the sampler's "
                "--tp-size and --ep-size"
            )
        return cls(int(found[1]), int(found[2] or 1))

    def __str__(self) -> str:
        experts = f"ep{self.expert_parallel}" if self.expert_parallel > 1 else ""
        return f"tp{self.tensor_parallel}{experts}"


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a profile has to know of a run. Defaults are those of a run that honours every profile.

    capability: the GPU's, None where it is not known yet.
    mlp_width: of the MLP or of one expert, num_experts: 0 without; None where they, or the hidden size, are
        not known.
    dense_width: of the MLP of layers without experts, None where all have them, or none.
    sampler: the ranks of the sampler, whose shares the learner computes; the parallel sizes are the
        learner's own, expert_tensor_parallel None where experts are cut as the rest. router_dtype:
        Megatron's moe_router_dtype. fused_loss: the loss computes log-probabilities by itself.
    """

    model_type: str
    attention: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    capability: tuple[int, int] | None = None
    hidden_size: int | None = None
    mlp_width: int | None = None
    num_experts: int | None = None
    dense_width: int | None = None
    sampler: SamplerRanks = SamplerRanks()
    params_dtype: str = "bfloat16"
    tensor_parallel: int = 1
    expert_tensor_parallel: int | None = None
    expert_parallel: int = 1
    context_parallel: int = 1
    sequence_parallel: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    fused_loss: bool = False
    fused_rope: bool = False
    fused_swiglu: bool = False
    router_dtype: str | None = None
    capacity_factor: float | None = None
    shared_experts: bool = False
    sliding_window: bool = False
    rope_scaling: bool = False


def faults(profile: Profile, facts: RunFacts) -> list[str]:
    """Every reason why the run cannot honour the profile, each with its remedy; empty where it can."""
    return [
        *_model_faults(profile, facts),
        *_product_faults(profile, facts),
        *_parallel_faults(facts),
        *_share_faults(facts),
        *_setting_faults(profile, facts),
    ]


def require(profile: str | Profile, facts: RunFacts, more: Sequence[str] = ()) -> Profile:
    """The profile, or ValueError with all faults at once, or for an unknown name.

    more: reasons that the caller found in what the facts do not hold.
    """
    if isinstance(profile, str):
        profile = _named(profile)
    reasons = [*faults(profile, facts), *more]
    if reasons:
        listed = "\n".join(f"  - {reason}" for reason in reasons)
        raise ValueError(f"deterministic: this run cannot honour {profile.name}:\n{listed}")
    return profile


def _named(name: str) -> Profile:
    if name not in PROFILES:
        raise ValueError(f"deterministic: {name!r} is no profile; use one of {', '.join(PROFILES)}")
    return PROFILES[name]


def require_names(policy: Policy) -> None:
    """ValueError where a policy names a profile, an attention, ranks or a recipe beside it that no run can
    honour.
    """
    if policy.deterministic is None:
        return
    profile = _named(policy.deterministic)
    reasons = [
        *_missing_faults(profile),
        *_attention_faults(profile, policy.deterministic_attention),
        *sampler_rank_faults(SamplerRanks.parse(policy.deterministic_sampler)),
        *recipe_faults(policy, profile),
    ]
    if reasons:
        listed = "\n".join(f"  - {reason}" for reason in reasons)
        raise ValueError(f"deterministic: no run can honour {profile.name}:\n{listed}")


def recipe_faults(policy: Policy, profile: Profile) -> list[str]:
    """Settings of the policy that say something else than the profile about what is quantised."""
    unchosen = ("default", BESIDE_PROFILE)
    chosen = [n for n in _RECIPE_SETTINGS if policy.sources.get(n, "default") not in unchosen]
    if policy.rules:
        chosen.append("layers")
    is_plain = profile.dense == profile.experts == UNQUANTIZED
    if not chosen or (is_plain and {r.name for r in policy.all_recipes} == {"bf16"}):
        return []
    return [f"{', '.join(chosen)} of the policy: the profile says what is quantised; leave it out"]


def _missing_faults(profile: Profile) -> list[str]:
    return [f"{name} is not implemented; use sglang_det_bf16" for name in profile.missing]


def _attention_faults(profile: Profile, attention: str) -> list[str]:
    if attention in profile.attention:
        return []
    return [
        f"attention={attention}: its order is unknown; use {' or '.join(profile.attention)} on both sides"
    ]


def _model_faults(profile: Profile, facts: RunFacts) -> list[str]:
    found = _missing_faults(profile)
    if facts.model_type not in profile.families:
        found.append(
            f"model_type={facts.model_type}: it is defined for {', '.join(profile.families)}; use "
            "another profile, or a model with experts or without, as these have"
        )
    found += _attention_faults(profile, facts.attention)
    if facts.num_heads == facts.num_kv_heads:
        found.append(
            f"{facts.num_heads} heads on {facts.num_kv_heads}: the order is known for grouped queries; use a "
            "model that has them (--group-query-attention --num-query-groups, fewer than the heads)"
        )
    if facts.head_dim not in (64, 128):
        found.append(
            f"heads of {facts.head_dim} dimensions: the order is known for 64 and 128; use a model that has "
            "them (--kv-channels)"
        )
    if facts.shared_experts:
        found.append("shared experts: their place in the sum is unknown; use a model without them")
    if facts.sliding_window:
        found.append("a sliding window: the attention operators have none; turn it off")
    if facts.rope_scaling:
        found.append("scaled rope: the operator has the plain formula; turn rope scaling off")
    return found


def _product_faults(profile: Profile, facts: RunFacts) -> list[str]:
    """Widths that the products do not take, and a profile that would quantise nothing."""
    is_quantised = {profile.dense, profile.experts} != {UNQUANTIZED}
    found = []
    if is_quantised and profile.dense == UNQUANTIZED and facts.num_experts == 0:
        found.append(
            f"a model without experts: {profile.name} quantises experts alone; use sglang_det_bf16, or "
            "layers of experts"
        )
    unit = STEP if is_quantised else STEP // 2
    for name, width in (("hidden size", facts.hidden_size), ("MLP width", facts.mlp_width)):
        if width is not None and width % unit:
            found.append(
                f"{name} of {width}: products take multiples of {unit} in "
                f"{'NVFP4' if is_quantised else 'BF16'}; use a model that has one"
            )
    return found


def _parallel_faults(facts: RunFacts) -> list[str]:
    found = _tensor_parallel_faults(facts)
    if facts.expert_parallel > 1:
        found.append(
            f"expert parallelism of {facts.expert_parallel}: a token's experts are added by slots on one "
            "rank; use 1"
        )
    if facts.context_parallel > 1:
        found.append(
            f"context parallelism of {facts.context_parallel}: a row walks all its keys in order on one "
            "rank; use 1"
        )
    if facts.sequence_parallel:
        found.append("sequence parallelism: norms read whole rows of the stream; turn it off")
    return found


def _tensor_parallel_faults(facts: RunFacts) -> list[str]:
    """Why the learner's ranks cannot add as the sampler's; two add one rounded sum by any NCCL_ALGO."""
    size, experts = facts.tensor_parallel, facts.expert_tensor_parallel
    found = []
    if size > 2:
        found.append(
            f"tensor parallelism of {size}: its all-reduce adds {size} partial sums in an order that NCCL's "
            "topology decides, only the sum of two has one; use 1 or 2"
        )
    elif size == 2 and facts.sampler != SamplerRanks(2):
        found.append(
            f"tensor parallelism of 2 for a sampler of {facts.sampler}: its ranks do not add what the "
            "learner's two have; use 1, which computes every sampler's sums, or a sampler of tp2 "
            "(deterministic_sampler)"
        )
    if facts.num_experts and experts not in (None, size):
        found.append(
            f"expert tensor parallelism of {experts} beside tensor parallelism of {size}: experts are cut as "
            "the rest is; leave --expert-tensor-parallel-size out"
        )
    return found


def sampler_rank_faults(sampler: SamplerRanks) -> list[str]:
    """Why the sums of a sampler of so many ranks are not known; empty where they are."""
    size, experts = sampler.tensor_parallel, sampler.expert_parallel
    if size > 2:
        return [
            f"a sampler of {size} ranks ({sampler}): its all-reduce adds {size} partial sums in an order "
            "that NCCL's topology decides, only the sum of two has one; use tp1 or tp2"
        ]
    if experts not in (1, size):
        return [f"a sampler of {sampler}: its ranks cannot hold the experts so; use tp{size}"]
    return []


def _share_faults(facts: RunFacts) -> list[str]:
    """Why the sampler's ranks do not hold equal shares of which the order is known."""
    sampler, size = facts.sampler, facts.sampler.tensor_parallel
    found = sampler_rank_faults(sampler)
    if found or size == 1:
        return found
    for name, count in (("heads", facts.num_heads), ("key and value heads", facts.num_kv_heads)):
        if count % size:
            found.append(f"{count} {name} on a sampler of {sampler}: no equal shares; use tp1")
    # Ranks that have whole experts cut the MLP of a layer without.
    shares = [(facts.mlp_width, size * STEP, "columns of an MLP")]
    if sampler.expert_parallel > 1:
        shares = [(facts.num_experts, size, "experts")]
    shares.append((facts.dense_width, size * STEP, "columns of a dense layer's MLP"))
    for shared, unit, name in shares:
        if shared == 0 or (shared or 0) % unit:
            found.append(
                f"{shared} {name} on a sampler of {sampler}: give a multiple of {unit}, or use another "
                "number of ranks"
            )
    return found


def _setting_faults(profile: Profile, facts: RunFacts) -> list[str]:
    found = []
    if facts.capability is not None and facts.capability != (9, 0):
        found.append(
            f"a GPU of compute capability {facts.capability[0]}.{facts.capability[1]}: bits were compared "
            "on 9.0 alone; use a Hopper GPU on both sides"
        )
    if facts.params_dtype != "bfloat16":
        found.append(
            f"params_dtype={facts.params_dtype}: the sampler's weights are BF16; use --bf16"
        )
    for name in ("hidden_dropout", "attention_dropout"):
        if getattr(facts, name):
            found.append(f"{name}={getattr(facts, name)}: the sampler drops nothing; set it to 0")
    if facts.fused_loss:
        found.append(
            "a fused loss: log-probabilities come from the profile's own head; turn the fusion off"
        )
    if facts.fused_rope:
        found.append("fused rope rounds cosines to BF16; set --no-rope-fusion")
    if facts.fused_swiglu:
        found.append("fused SwiGLU rounds elsewhere; set --no-bias-swiglu-fusion")
    if profile.router_weight and facts.router_dtype not in (None, "bfloat16"):
        found.append(f"moe_router_dtype={facts.router_dtype}: logits are BF16; leave it unset")
    if facts.capacity_factor is not None:
        found.append(
            f"expert capacity factor {facts.capacity_factor}: the sampler drops no token; leave it unset"
        )
    return found
