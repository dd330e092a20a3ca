"""Gated activations times a routing probability, their gradients, and their NVFP4 form per token.

    s = act(gate)                   nearest in h's dtype
    y = rn(s * up)                  rn: to h's dtype
    y = rn(fp32(y) * prob)          without probabilities this step is absent

| kind | act(x) |
|---|---|
| swiglu | rn(x / (1 + exp(-x))) |
| quick_geglu | rn(x * rn(1 / (1 + exp(-rn(1.702 * x))))) |
| geglu | rn(x * Phi(x)), Phi the normal distribution |

The steps, their order and dtypes are those that Megatron takes for BF16 activations and FP32 probabilities
when they are run eagerly (megatron/core/fusions/fused_bias_swiglu.py: weighted_swiglu, weighted_swiglu_back;
fused_bias_geglu.py: weighted_quick_geglu, weighted_quick_geglu_back with linear_offset=0). For geglu they are
those of its layer without fusion, F.gelu(gate) * up, and the backward has geglu_back's order with the
derivative of the exact gelu, rounded to h's dtype.

Exponentials are taken in FP64, so that every finite gate whose result is normal gets the nearest value, which
does not depend on how it is computed; torch's silu on a CPU agrees for all gates of -87 and above. Its gelu
loses digits below -2, by the sum 1 + erf in FP32. Arguments of exp count as -87 below that, gates of gelu as
-12.5 below that: this replaces only values below 2^-113; -Inf counts as the bound.
"""

import math

import torch
from torch import Tensor

from megatron_nvfp4.recipes import NVFP4Spec

from .dispatch import check_grad, check_rows, ordered_sum
from .nvfp4 import QuantizedTensor, quantize

GATE_MIN = -87.0
GELU_MIN = -12.5
QUICK = 1.702
TOKEN = NVFP4Spec(outer="token")
KINDS = ("swiglu", "geglu", "quick_geglu")


def weighted_activation(h: Tensor, probs: Tensor | None, kind: str = "swiglu") -> Tensor:
    """act(gate) * up * prob of the rows of h, in the module's steps.

    h: BF16, FP16 or FP32 (M, 2F), gates left of ups, F a multiple of 8. probs: FP32 (M,), or None for no
    factor. kind: one of KINDS. Returns (M, F) in h's dtype. Clamps, offsets and biases are left out.
    Has no gradient of its own: see weighted_activation_backward. Raises ValueError for anything else.
    """
    check_activation("weighted_activation", h, probs, kind)
    gate, up = h.chunk(2, dim=1)
    y = activation(gate, kind) * up
    return y if probs is None else (y.float() * probs[:, None]).to(h.dtype)


def weighted_activation_backward(
    grad_y: Tensor, h: Tensor, probs: Tensor | None, kind: str = "swiglu"
) -> tuple[Tensor, Tensor | None]:
    """Gradients of weighted_activation: (M, 2F) in h's dtype and FP32 (M,), or None without probs.

    grad_y: (M, F) in h's dtype. With g = fp32(grad_y) * prob, all in FP32 and rounded once at the end
    (without probs every step is rounded to h's dtype), factors from the left:
        swiglu        grad gate = g * sigmoid * rn(1 + rn(gate * rn(1 - sigmoid))) * up;  grad up = g * act
        quick_geglu   grad gate = g * sigmoid * rn(1 + rn(rn(1.702 * gate) * rn(1 - sigmoid))) * up, the
                      sigmoid of rn(1.702 * gate);  grad up = g * gate * sigmoid
        geglu         grad gate = g * up * rn(Phi(gate) + gate * phi(gate));  grad up = g * act
    grad prob = ordered_sum(fp32(rn(act * up)) * fp32(grad_y)).
    """
    check_activation("weighted_activation_backward", h, probs, kind)
    num_rows, num_cols = h.shape[0], h.shape[1] // 2
    check_grad("weighted_activation_backward", grad_y, (num_rows, num_cols), h.dtype)
    gate, up = h.chunk(2, dim=1)
    g = grad_y if probs is None else grad_y * probs[:, None]
    if kind == "geglu":
        grads = (g * up * gelu_slope(gate), g * activation(gate, kind))
    else:
        scaled = gate if kind == "swiglu" else QUICK * gate
        s = sigmoid(scaled)
        grad_gate = g * s * (1 + scaled * (1 - s)) * up
        grads = (grad_gate, g * silu(gate) if kind == "swiglu" else g * gate * s)
    grad_h = torch.cat(grads, dim=1).to(h.dtype)
    if probs is None:
        return grad_h, None
    return grad_h, ordered_sum((activation(gate, kind) * up).float() * grad_y.float())


def activation(gate: Tensor, kind: str) -> Tensor:
    """act(gate) of the module, in gate's dtype."""
    if kind == "swiglu":
        return silu(gate)
    return gelu(gate) if kind == "geglu" else gate * sigmoid(QUICK * gate)


def silu(gate: Tensor) -> Tensor:
    """g / (1 + exp(-g)) in the gate's dtype; +Inf stays, NaN stays NaN."""
    g = gate.double().clamp_min(GATE_MIN)
    return (g / (1 + torch.exp(-g))).to(gate.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in x's dtype; NaN stays NaN."""
    return (1 / (1 + torch.exp(-x.double().clamp_min(GATE_MIN)))).to(x.dtype)


def gelu(gate: Tensor) -> Tensor:
    """g * Phi(g) in the gate's dtype; +Inf stays, NaN stays NaN."""
    g = gate.double().clamp_min(GELU_MIN)
    return (g * _phi(g)).to(gate.dtype)


def gelu_slope(gate: Tensor) -> Tensor:
    """Phi(g) + g * phi(g), gelu's derivative, in the gate's dtype; 1 at +Inf, NaN stays NaN."""
    g = gate.double().clamp(GELU_MIN, 40.0)  # from 9 on it is 1
    density = torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)
    return (_phi(g) + g * density).to(gate.dtype)


def _phi(g: Tensor) -> Tensor:
    return 0.5 * torch.special.erfc(-g / math.sqrt(2))


def weighted_activation_quantize(
    h: Tensor,
    probs: Tensor | None,
    spec: NVFP4Spec = TOKEN,
    kind: str = "swiglu",
    keep: bool = False,
) -> tuple[Tensor | None, QuantizedTensor]:
    """(y if `keep` else None, quantize(y, spec)) of y = weighted_activation(h, probs, kind).

    F a multiple of 16; spec as check_spec takes it.
    """
    check_spec(spec)
    y = weighted_activation(h, probs, kind)
    return y if keep else None, quantize(y, spec)


def swiglu(gate_up: Tensor, probs: Tensor) -> Tensor:
    """weighted_activation of kind swiglu: BF16 (M, 2K), K a multiple of 16, and FP32 (M,) to BF16 (M, K)."""
    check_swiglu(gate_up)
    return weighted_activation(gate_up, probs)


def swiglu_quantize(gate_up: Tensor, probs: Tensor, spec: NVFP4Spec = TOKEN) -> QuantizedTensor:
    """quantize(swiglu(gate_up, probs), spec); spec as check_spec takes it."""
    check_spec(spec)
    return quantize(swiglu(gate_up, probs), spec)


def check_spec(spec: NVFP4Spec) -> None:
    """ValueError for a spec that the fused kernel lacks: it has 1x16 blocks, per token, to nearest."""
    plain = spec.four_over_six is None and spec.rounding == "nearest"
    if spec.block != (1, 16) or spec.outer != "token" or not plain:
        raise ValueError(
            f"weighted_activation_quantize: {spec}; use NVFP4Spec(outer='token') without "
            "four-over-six, to nearest, or quantize(weighted_activation(...), spec)"
        )


def check_swiglu(gate_up: Tensor) -> None:
    """ValueError unless gate_up is BF16 (M, 2K), K a multiple of 16."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 32 or gate_up.dtype != torch.bfloat16:
        raise ValueError(
            f"swiglu: gate_up is {gate_up.dtype} {tuple(gate_up.shape)}; "
            "give BF16 (M, 2K), K a multiple of 16"
        )


def check_activation(op: str, h: Tensor, probs: Tensor | None, kind: str) -> None:
    """ValueError unless op takes these operands."""
    if kind not in KINDS:
        raise ValueError(f"{op}: kind={kind!r}; use one of {', '.join(KINDS)}")
    check_rows(op, "h", h)
    if h.shape[1] % 16:
        raise ValueError(f"{op}: h is {tuple(h.shape)}; give (M, 2F), F a multiple of 8")
    if probs is not None and (probs.shape != h.shape[:1] or probs.dtype != torch.float32):
        raise ValueError(
            f"{op}: probs are {probs.dtype} {tuple(probs.shape)}; give float32 ({h.shape[0]},)"
        )
