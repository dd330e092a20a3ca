"""The RMSNorms of SGLang's deterministic forwards, which differ in their last bits.

    rms_norm        y = bf16(x * (1 / sqrt(mean(x^2) + eps)) * w)
    rms_norm_fp32   y = dtype of x(x * rsqrt(mean(x^2) + eps)) * w, an FP32 tensor
    add_rms_norm    s = fp32(x) + fp32(residual);  y = bf16((s * rsqrt(mean(s^2) + eps)) * w);
                    residual' = s in the dtype of the residual

All in FP32. A mean is the sum over chunks of 1024 columns in order, divided by the number of columns;
add_rms_norm takes it of the sum before its rounding, where the residual is BF16. The first norm of the
model and the norms of queries and keys are rms_norm, or rms_norm_fp32 where weights are FP32;
add_rms_norm serves all others. Formulas: SGLang 0.5.23, srt/batch_invariant_ops/batch_invariant_ops.py
(mean_kernel 430, _rms_norm_kernel 852) and RMSNorm.forward_native, layers/layernorm.py 828; with
--rl-on-policy-target its weights and its residual are FP32 (models/qwen3.py 184, 413).
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., N) normalised over its last axis and scaled by weight (N,); BF16 in and out.

    Raises ValueError for other dtypes or a weight that does not fit.
    """
    _check("rms_norm", x, weight)
    return _RMSNorm.apply(x, weight, eps)


def rms_norm_fp32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., N), BF16 or FP32, normalised over its last axis, rounded to its dtype and scaled by
    weight FP32 (N,): FP32 (..., N).

    Raises ValueError for other dtypes or a weight that does not fit.
    """
    if x.dtype not in (torch.bfloat16, torch.float32) or weight.dtype != torch.float32:
        raise ValueError(
            f"rms_norm_fp32: x is {x.dtype}, weight {weight.dtype}; give x in torch.bfloat16 or "
            "torch.float32, the weight in torch.float32"
        )
    _check_shape("rms_norm_fp32", x, weight)
    return _RMSNormFP32.apply(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, BF16, and that sum in the residual's dtype: (..., N) each.

    x BF16 (..., N); residual (..., N) and weight (N,) both BF16 or both FP32. Raises ValueError for
    other dtypes or shapes that do not fit.
    """
    if residual.dtype == torch.float32:
        if x.dtype != torch.bfloat16 or weight.dtype != torch.float32:
            raise ValueError(
                f"add_rms_norm: x is {x.dtype}, weight {weight.dtype}; beside an FP32 residual give "
                "torch.bfloat16 and torch.float32"
            )
        _check_shape("add_rms_norm", x, weight)
    else:
        _check("add_rms_norm", x, weight)
    if residual.shape != x.shape or residual.dtype not in (x.dtype, torch.float32):
        raise ValueError(
            f"add_rms_norm: residual {residual.dtype} {tuple(residual.shape)} and x {x.dtype} "
            f"{tuple(x.shape)} differ; carry the residual that the norm before returned"
        )
    return _AddRMSNorm.apply(x, residual, weight, eps)


def _check(op: str, x: Tensor, weight: Tensor) -> None:
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise ValueError(
            f"{op}: x is {x.dtype}, weight {weight.dtype}; give both in torch.bfloat16"
        )
    _check_shape(op, x, weight)


def _check_shape(op: str, x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}; give ({x.shape[-1]},)"
        )


def _mean(squares: Tensor) -> Tensor:
    total = squares.new_zeros(squares.shape[:-1])
    for chunk in squares.split(CHUNK, dim=-1):
        total = total + chunk.sum(-1)
    return (total / squares.shape[-1])[..., None]


def _gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    grad_stream: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, the residual and the weight, each in its tensor's dtype, from that of a norm of x, or
    of x + residual, and from grad_stream, that of the sum itself."""
    if x.device.type == "cuda":
        from megatron_nvfp4.deterministic.kernels import norm

        others = [t if t is None else t.contiguous() for t in (residual, grad_stream)]
        x = norm.dense_heads(x)
        *grads, grad_weight = norm.norm_gradients(grad.contiguous(), x, weight, eps, *others)
        return *grads, grad_weight.to(weight.dtype)
    grad, gamma, value = grad.float(), weight.float(), x.float()
    if residual is not None:
        value = value + residual.float()
    inverse = torch.rsqrt(_mean(value * value) + eps)
    normed, scaled = value * inverse, grad * gamma
    result = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    if grad_stream is not None:
        result = result + grad_stream.float()
    grad_x = result.to(x.dtype)
    grad_residual = grad_x if residual is None else result.to(residual.dtype)
    return grad_x, grad_residual, (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        if x.device.type == "cuda":
            from megatron_nvfp4.deterministic.kernels import norm

            return norm.rms_norm(norm.dense_heads(x), weight.contiguous(), eps)
        value = x.float()
        inverse = 1.0 / torch.sqrt(_mean(value * value) + eps)
        return (value * inverse * weight.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        grad_x, _, grad_weight = _gradients(grad, x, weight, ctx.eps)
        return grad_x, grad_weight, None


class _RMSNormFP32(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        if x.device.type == "cuda":
            from megatron_nvfp4.deterministic.kernels import norm

            rows = x.reshape(-1, x.shape[-1]).contiguous()
            return norm.rms_norm_fp32(rows, weight.contiguous(), eps).view(x.shape)
        value = x.float()
        inverse = torch.rsqrt(_mean(value * value) + eps)
        return (value * inverse).to(x.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        grad_x, _, grad_weight = _gradients(grad, x, weight, ctx.eps)
        return grad_x, grad_weight, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, residual: Tensor, weight: Tensor, eps: float):
        # The sum is made anew in the backward: its rounded form would be another input.
        ctx.save_for_backward(x, residual, weight)
        ctx.eps = eps
        if x.device.type == "cuda":
            from megatron_nvfp4.deterministic.kernels import norm

            rows, others = (t.reshape(-1, x.shape[-1]).contiguous() for t in (x, residual))
            y, stream = norm.add_rms_norm(rows, others, weight.contiguous(), eps)
            return y.view(x.shape), stream.view(x.shape)
        total = x.float() + residual.float()
        inverse = torch.rsqrt(_mean(total * total) + eps)
        return (total * inverse * weight.float()).to(x.dtype), total.to(residual.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, grad_stream: Tensor):
        x, residual, weight = ctx.saved_tensors
        return *_gradients(grad, x, weight, ctx.eps, residual, grad_stream), None
