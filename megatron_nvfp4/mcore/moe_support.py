"""Which MoE configurations the fused expert dataflow computes, and why not the others."""

import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.transformer_config import TransformerConfig

ACTIVATIONS = {F.silu: "swiglu", F.gelu: "geglu", quick_gelu: "quick_geglu"}

# (attribute of TransformerConfig, values that run fused, flag, reason)
_UNFUSED = (
    ("moe_grouped_gemm", (True,), "--moe-grouped-gemm", "experts are separate modules without it"),
    (
        "moe_token_dispatcher_type",
        ("allgather", "alltoall"),
        "--moe-token-dispatcher-type",
        "its own kernels dispatch tokens (DeepEP, HybridEP, NCCL-EP)",
    ),
    ("add_bias_linear", (False, None), "--disable-bias-linear", "experts have biases without it"),
    ("gated_linear_unit", (True,), "--swiglu", "the activation is not gated"),
    (
        "activation_func_clamp_value",
        (None,),
        "--activation-func-clamp-value",
        "no kernel clamps the gate",
    ),
    ("glu_linear_offset", (0.0, None), "--glu-linear-offset", "no kernel adds it"),
    (
        "moe_mlp_glu_interleave_size",
        (None,),
        "--moe-mlp-glu-interleave-size",
        "gates and ups are interleaved",
    ),
    (
        "activation_func_fp8_input_store",
        (False, None),
        "activation_func_fp8_input_store",
        "FC1's output is kept in 16 bits",
    ),
    (
        "moe_apply_probs_on_input",
        (False, None),
        "--moe-apply-probs-on-input",
        "every copy of a token would differ",
    ),
    (
        "moe_router_dtype",
        (None, "fp32"),
        "--moe-router-dtype",
        "probabilities are FP32 in the dataflow",
    ),
    (
        "moe_pad_expert_input_to_capacity",
        (False, None),
        "--moe-pad-expert-input-to-capacity",
        "experts take the rows they have",
    ),
    (
        "moe_shared_expert_overlap",
        (False, None),
        "--moe-shared-expert-overlap",
        "the dispatcher starts the shared experts, and is not run",
    ),
    ("moe_latent_size", (None,), "--moe-latent-size", "tokens are projected before dispatch"),
    (
        "overlap_moe_expert_parallel_comm",
        (False, None),
        "--overlap-moe-expert-parallel-comm",
        "its schedule runs dispatch, experts and combine apart",
    ),
    (
        "moe_expert_rank_capacity_factor",
        (None,),
        "--moe-expert-rank-capacity-factor",
        "a rank's rows are not bounded",
    ),
    ("moe_paged_stash", (False, None), "--moe-paged-stash", "it stashes what TE's experts keep"),
    (
        "moe_pad_experts_for_cuda_graph_inference",
        (False, None),
        "--moe-pad-experts-for-cuda-graph-inference",
        "it changes the dispatcher, which is not run",
    ),
    ("cuda_graph_impl", (None, "none"), "--cuda-graph-impl", "its graphs end inside the MoE layer"),
)


def unfused_reasons(config: TransformerConfig) -> list[str]:
    """Everything in `config` that keeps its MoE layers from the fused dataflow; empty if nothing does."""
    reasons = []
    for name, fused, flag, reason in _UNFUSED:
        value = getattr(config, name, fused[0])
        if value not in fused:
            reasons.append(f"{flag} ({name}={value!r}): {reason}")
    if config.gated_linear_unit and config.activation_func not in ACTIVATIONS:
        name = getattr(config.activation_func, "__name__", str(config.activation_func))
        reasons.append(f"activation_func={name}: kernels exist for silu, gelu and quick_gelu")
    for flag, size in (
        ("--hidden-size", config.hidden_size),
        ("--moe-ffn-hidden-size", config.moe_ffn_hidden_size or config.ffn_hidden_size),
    ):
        if size % 8:
            reasons.append(f"{flag} ({size}): its kernels move 8 columns at once")
    tp = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    if tp > 1:
        reasons.append(
            f"--expert-tensor-parallel-size ({tp}): the dataflow takes whole experts; set it to 1"
        )
    ep = config.expert_model_parallel_size
    if ep > 1 and config.moe_token_dispatcher_type == "allgather":
        reasons.append(
            f"--moe-token-dispatcher-type (allgather) with {ep} expert-parallel ranks: rows travel by "
            "all-to-all; use alltoall"
        )
    return reasons
