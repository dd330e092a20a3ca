"""What SGLang computes in its deterministic modes, as data, and why a run cannot compute the same.

Stdlib and recipes only. A profile names formulas and orders; ../deterministic/ops implements those of
the profiles whose `missing` is empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_nvfp4.recipes import RECIPES, Operands

TREE = "allreduce:tree"  # what SGLang sets NCCL_ALGO to in deterministic mode
UNQUANTIZED = Operands()


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


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a profile has to know of a run. Defaults are those of a run that honours every profile.

    capability: the GPU's, None where it is not known yet. nccl_algo: the value of NCCL_ALGO on both sides.
    router_dtype: Megatron's moe_router_dtype. fused_loss: the loss computes log-probabilities by itself.
    """

    model_type: str
    attention: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    capability: tuple[int, int] | None = None
    params_dtype: str = "bfloat16"
    tensor_parallel: int = 1
    expert_parallel: int = 1
    context_parallel: int = 1
    sequence_parallel: bool = False
    nccl_algo: str | None = None
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
        *_parallel_faults(facts),
        *_setting_faults(profile, facts),
    ]


def require(profile: str | Profile, facts: RunFacts, more: Sequence[str] = ()) -> Profile:
    """The profile, or ValueError with all faults at once, or for an unknown name.

    more: reasons that the caller found in what the facts do not hold.
    """
    if isinstance(profile, str):
        if profile not in PROFILES:
            raise ValueError(
                f"deterministic: {profile!r} is no profile; use one of {', '.join(PROFILES)}"
            )
        profile = PROFILES[profile]
    reasons = [*faults(profile, facts), *more]
    if reasons:
        listed = "\n".join(f"  - {reason}" for reason in reasons)
        raise ValueError(f"deterministic: this run cannot honour {profile.name}:\n{listed}")
    return profile


def reduce_order(facts: RunFacts) -> str:
    """How partial sums of tensor-parallel ranks are added; both sides must report the same words.

    Raises ValueError where nothing fixes it.
    """
    if facts.tensor_parallel == 1:
        return "one rank, no sum"
    if facts.nccl_algo != TREE:
        raise ValueError(_tree_fault(facts))
    return f"BF16 partial sums of {facts.tensor_parallel} ranks by NCCL's tree"


def _tree_fault(facts: RunFacts) -> str:
    return (
        f"tensor parallelism of {facts.tensor_parallel} with NCCL_ALGO={facts.nccl_algo}: partial sums "
        f"are added in an order that depends on sizes; set NCCL_ALGO={TREE} on both sides, or use 1"
    )


def _model_faults(profile: Profile, facts: RunFacts) -> list[str]:
    found = [f"{name} is not implemented; use sglang_det_bf16" for name in profile.missing]
    if facts.model_type not in profile.families:
        found.append(
            f"model_type={facts.model_type}: it is defined for {', '.join(profile.families)}; use "
            "another profile, or a model with experts or without, as these have"
        )
    if facts.attention not in profile.attention:
        found.append(
            f"attention={facts.attention}: its order is unknown; use "
            f"{' or '.join(profile.attention)} on both sides"
        )
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


def _parallel_faults(facts: RunFacts) -> list[str]:
    found = []
    if facts.tensor_parallel > 1 and facts.nccl_algo != TREE:
        found.append(_tree_fault(facts))
    if facts.tensor_parallel > 1:
        found.append(
            f"tensor parallelism of {facts.tensor_parallel}: the operators hold whole weights; use 1 on "
            "both sides"
        )
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
