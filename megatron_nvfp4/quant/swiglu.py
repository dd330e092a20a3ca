"""SwiGLU times a routing probability, the definition, and its NVFP4 form per token.

    s = bf16(g / (1 + exp(-g)))     FP64 inside; g = max(gate, -87)
    h = bf16(s * up)
    y = bf16(fp32(h) * prob)

The steps and their dtypes are those of Megatron's `weighted_bias_swiglu` for BF16 activations and FP32
probabilities (megatron/core/fusions/fused_bias_swiglu.py). Every finite gate whose silu is normal gets the
nearest BF16 value, which does not depend on how it is computed; torch's silu on a CPU agrees for all gates of
-87 and above. The bound keeps exp within FP32 and replaces only values below 2^-118; a gate of -Inf counts as
-87.
"""

import torch
from torch import Tensor

from megatron_nvfp4.recipes import NVFP4Spec

from .nvfp4 import QuantizedTensor, quantize

GATE_MIN = -87.0
TOKEN = NVFP4Spec(outer="token")


def swiglu(gate_up: Tensor, probs: Tensor) -> Tensor:
    """Weighted SwiGLU of the rows of gate_up.

    gate_up: BF16 (M, 2K), gates left of ups. probs: FP32 (M,). Returns BF16 (M, K).
    Has no gradient of its own: the silu is computed in FP64. Raises ValueError for other shapes or dtypes.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 32 or gate_up.dtype != torch.bfloat16:
        raise ValueError(
            f"swiglu: gate_up is {gate_up.dtype} {tuple(gate_up.shape)}; "
            "give BF16 (M, 2K), K a multiple of 16"
        )
    if probs.shape != gate_up.shape[:1] or probs.dtype != torch.float32:
        raise ValueError(
            f"swiglu: probs are {probs.dtype} {tuple(probs.shape)}; "
            f"give float32 ({gate_up.shape[0]},)"
        )
    gate, up = gate_up.chunk(2, dim=1)
    return ((silu(gate) * up).float() * probs[:, None]).bfloat16()


def silu(gate: Tensor) -> Tensor:
    """g / (1 + exp(-g)) of BF16 gates, in BF16; +Inf stays, NaN stays NaN."""
    g = gate.double().clamp_min(GATE_MIN)
    return (g / (1 + torch.exp(-g))).bfloat16()


def swiglu_quantize(gate_up: Tensor, probs: Tensor, spec: NVFP4Spec = TOKEN) -> QuantizedTensor:
    """quantize(swiglu(gate_up, probs), spec); spec as check_spec takes it."""
    check_spec(spec)
    return quantize(swiglu(gate_up, probs), spec)


def check_spec(spec: NVFP4Spec) -> None:
    """Raises ValueError for a spec that swiglu_quantize lacks: it has 1x16 blocks, per token, to nearest."""
    plain = spec.four_over_six is None and spec.rounding == "nearest"
    if spec.block != (1, 16) or spec.outer != "token" or not plain:
        raise ValueError(
            f"swiglu_quantize: {spec}; use NVFP4Spec(outer='token') without four-over-six, to "
            "nearest, or quantize(swiglu(...), spec)"
        )
