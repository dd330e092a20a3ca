"""Rows of experts and gated activations, by the kernels of the device at hand, with the definition's bits.

Every function is its namesake of quant.dispatch or quant.swiglu, where shapes, dtypes and meanings stand.
On CUDA nothing waits for the GPU, so that everything can be captured in a graph and no index is looked at:
one outside its tensor is an invalid read, an expert that does not exist counts as dropped. On a CPU both are
ValueErrors. Gradients are functions of their own.
"""

import functools

import torch
from torch import Tensor

from megatron_nvfp4.quant import QuantizedTensor, dispatch, swiglu
from megatron_nvfp4.quant.dispatch import Routing
from megatron_nvfp4.recipes import NVFP4Spec

from . import extension

_OPS = torch.ops.megatron_nvfp4
# The widest activation that weighted_activation_quantize takes on CUDA.
MAX_QUANTIZED_COLS = 12288


def kernels_of(device: torch.device | str) -> str:
    """Who computes on tensors of this device: "cuda", "cpu", or "reference" where no kernels are installed.

    The activations have kernels for BF16; other dtypes take the reference's operations on the same device.
    """
    kind = torch.device(device).type
    return kind if kind in ("cpu", "cuda") and why_not(kind) is None else "reference"


# torch.compile takes the answer as it is: loading an extension cannot be traced.
@torch.compiler.assume_constant_result
def why_not(kind: str) -> str | None:
    """Why the kernels for "cpu" or "cuda" cannot be used, or None."""
    return _why_not(kind)


@functools.cache
def _why_not(kind: str) -> str | None:
    reason = extension.why_not_cuda() if kind == "cuda" else extension.why_not_cpu()
    if reason is None and not hasattr(torch.ops.megatron_nvfp4, "gather_rows"):
        return "the extension is older than these operators; build it again"
    if reason is None:
        _register_fakes()
    return reason


def route(
    chosen: Tensor, num_experts: int, multiple: int = 1, *, top_k: int | None = None
) -> Routing:
    """quant.dispatch.route."""
    chosen = dispatch.check_chosen(chosen, num_experts, multiple, top_k)
    if kernels_of(chosen.device) == "reference":
        return dispatch.route(chosen, num_experts, multiple, top_k=top_k)
    slots = top_k if chosen.dtype == torch.bool else chosen.shape[1]
    return Routing(*_OPS.route(chosen, num_experts, multiple, slots))


def gather_rows(x: Tensor | QuantizedTensor, index: Tensor) -> Tensor | QuantizedTensor:
    """quant.dispatch.gather_rows; codes, scales and amax of a quantised x in one pass."""
    if kernels_of(x.device) == "reference":
        return dispatch.gather_rows(x, index)
    if isinstance(x, QuantizedTensor):
        dispatch.check_per_token(x)
        parts = _OPS.gather_rows_nvfp4(x.codes, x.block_scales, x.amax, index)
        return QuantizedTensor(*parts, x.spec)
    return _OPS.gather_rows(x, index)


def gather_rows_amax(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """quant.dispatch.gather_rows_amax, one pass."""
    if kernels_of(x.device) == "reference":
        return dispatch.gather_rows_amax(x, index)
    return _OPS.gather_rows_amax(x, index)


def combine_rows(rows: Tensor, rows_of_token: Tensor, weights: Tensor | None = None) -> Tensor:
    """quant.dispatch.combine_rows."""
    if kernels_of(rows.device) == "reference":
        return dispatch.combine_rows(rows, rows_of_token, weights)
    return _OPS.combine_rows(rows, rows_of_token, weights)


def combine_rows_backward(
    grad: Tensor,
    rows: Tensor,
    rows_of_token: Tensor,
    weights: Tensor,
    *,
    token_of_row: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """quant.dispatch.combine_rows_backward; without token_of_row it is derived first, in several steps."""
    if kernels_of(rows.device) == "reference":
        return dispatch.combine_rows_backward(grad, rows, rows_of_token, weights)
    if token_of_row is None:
        token_of_row = dispatch.rows_to_tokens(rows_of_token, rows.shape[0])
    return _OPS.combine_rows_backward(grad, rows, rows_of_token, weights, token_of_row)


def weighted_activation(h: Tensor, probs: Tensor | None, kind: str = "swiglu") -> Tensor:
    """quant.swiglu.weighted_activation."""
    if not _has_activation(h):
        return swiglu.weighted_activation(h, probs, kind)
    return _OPS.weighted_activation(h, probs, _number("weighted_activation", kind))


def weighted_activation_backward(
    grad_y: Tensor, h: Tensor, probs: Tensor | None, kind: str = "swiglu"
) -> tuple[Tensor, Tensor | None]:
    """quant.swiglu.weighted_activation_backward, one pass."""
    if not _has_activation(h):
        return swiglu.weighted_activation_backward(grad_y, h, probs, kind)
    number = _number("weighted_activation_backward", kind)
    grad_h, grad_probs = _OPS.weighted_activation_backward(grad_y, h, probs, number)
    return grad_h, None if probs is None else grad_probs


def weighted_activation_quantize(
    h: Tensor,
    probs: Tensor | None,
    spec: NVFP4Spec = swiglu.TOKEN,
    kind: str = "swiglu",
    keep: bool = False,
    *,
    fast_math: bool | None = None,
) -> tuple[Tensor | None, QuantizedTensor]:
    """quant.swiglu.weighted_activation_quantize, one pass; F up to MAX_QUANTIZED_COLS on CUDA.

    fast_math: sigmoids by the GPU's exponential and reciprocal, whose bits CUDA does not define. None takes
    them on compute capability 9.0, where they give the definition's activation for every finite gate.
    """
    if not _has_activation(h):
        return swiglu.weighted_activation_quantize(h, probs, spec, kind, keep)
    swiglu.check_spec(spec)
    number = _number("weighted_activation_quantize", kind)
    fast = _is_hopper(h.device) if fast_math is None else fast_math
    *parts, y = _OPS.weighted_activation_quantize(h, probs, number, spec.e4m3_max, fast, keep)
    return y if keep else None, QuantizedTensor(*parts, spec)


def _has_activation(h: Tensor) -> bool:
    return h.dtype == torch.bfloat16 and kernels_of(h.device) != "reference"


def _number(op: str, kind: str) -> int:
    if kind not in swiglu.KINDS:
        raise ValueError(f"{op}: kind={kind!r}; use one of {', '.join(swiglu.KINDS)}")
    return swiglu.KINDS.index(kind)


@torch.compiler.assume_constant_result
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def _register_fakes() -> None:
    fakes = {
        "route": _fake_route,
        "gather_rows": lambda x, index: x.new_empty(index.shape[0], x.shape[1]),
        "gather_rows_nvfp4": _fake_gather_rows_nvfp4,
        "gather_rows_amax": _fake_gather_rows_amax,
        "combine_rows": lambda rows, slots, weights: rows.new_empty(slots.shape[0], rows.shape[1]),
        "combine_rows_backward": _fake_combine_rows_backward,
        "weighted_activation": lambda h, probs, kind: h.new_empty(h.shape[0], h.shape[1] // 2),
        "weighted_activation_backward": _fake_weighted_activation_backward,
        "weighted_activation_quantize": _fake_weighted_activation_quantize,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"megatron_nvfp4::{name}", fake)


def _fake_route(chosen, num_experts, multiple, top_k):
    num_tokens = chosen.shape[0]
    size = dispatch.num_rows(num_tokens * top_k, num_experts, multiple)
    shapes = ((size,), (size,), (num_tokens, top_k), (num_experts + 1,))
    return tuple(chosen.new_empty(shape, dtype=torch.int64) for shape in shapes)


def _fake_gather_rows_nvfp4(codes, block_scales, amax, index):
    num_rows = index.shape[0]
    return (
        codes.new_empty(num_rows, codes.shape[1]),
        block_scales.new_empty(num_rows, block_scales.shape[1]),
        amax.new_empty(num_rows),
    )


def _fake_gather_rows_amax(x, index):
    num_rows = index.shape[0]
    return x.new_empty(num_rows, x.shape[1]), x.new_empty(num_rows, dtype=torch.float32)


def _fake_combine_rows_backward(grad, rows, rows_of_token, weights, token_of_row):
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def _fake_weighted_activation_backward(grad_y, h, probs, kind):
    num_probs = 0 if probs is None else h.shape[0]
    return h.new_empty(h.shape), h.new_empty(num_probs, dtype=torch.float32)


def _fake_weighted_activation_quantize(h, probs, kind, e4m3_max, fast_math, keep):
    num_rows, num_cols = h.shape[0], h.shape[1] // 2
    return (
        h.new_empty(num_rows, num_cols // 2, dtype=torch.uint8),
        h.new_empty(num_rows, num_cols // 16, dtype=torch.float8_e4m3fn),
        h.new_empty(num_rows, dtype=torch.float32),
        h.new_empty(num_rows if keep else 0, num_cols),
    )
