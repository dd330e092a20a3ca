"""silu(gate) * up with one rounding, or with two.

    1:  y = bf16(up * (gate * rcp(1 + ex2(gate * -log2(e)))))
    2:  y = bf16(up * bf16(gate / (1 + exp(-gate))))

On the GPU rcp and ex2 are the approximate instructions, subnormals flushed, every product rounded to
FP32; the CPU takes exact ones. Formula of 1: SGLang 0.5.23, kernels/jit/csrc/elementwise/activation.cuh,
which is built with fast math. 2 is torch's own silu and product, as SiluAndMul.forward_native calls them
with --rl-on-policy-target (layers/activation.py 135, 141): the same bits with the same torch. Both have
one gradient, that of the function before its roundings.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


def silu_and_mul(x: Tensor, roundings: int = 1) -> Tensor:
    """x BF16 (M, 2F), gates left of ups: BF16 (M, F), rounded once, or after silu too for roundings 2.

    Raises ValueError for anything else.
    """
    if x.dim() != 2 or x.dtype != torch.bfloat16 or x.shape[1] % 2:
        raise ValueError(
            f"silu_and_mul: x is {x.dtype} {tuple(x.shape)}; give BF16 (M, 2F), gates left of ups"
        )
    if roundings not in (1, 2):
        raise ValueError(f"silu_and_mul: roundings={roundings}; give 1 or 2")
    return _SiluAndMul.apply(x, roundings)


def silu_and_mul_forward(x: Tensor) -> Tensor:
    """silu_and_mul without checks and without a gradient."""
    if x.device.type == "cuda":
        from megatron_nvfp4.deterministic.kernels import activation

        return activation.silu_and_mul(x.contiguous())
    gate, up = x.float().chunk(2, dim=1)
    return (up * (gate / (1.0 + torch.exp(-gate)))).to(x.dtype)


def silu_and_mul_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, BF16 (M, 2F), in FP32 and rounded once, from that of the result, (M, F)."""
    if x.device.type == "cuda":
        from megatron_nvfp4.deterministic.kernels import activation

        return activation.silu_and_mul_backward(grad.contiguous(), x.contiguous())
    gate, up = x.float().chunk(2, dim=1)
    grad = grad.float()
    sigmoid = torch.sigmoid(gate)
    grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return torch.cat([grad_gate, grad * gate * sigmoid], dim=1).to(x.dtype)


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, roundings: int) -> Tensor:
        ctx.save_for_backward(x)
        if roundings == 1:
            return silu_and_mul_forward(x)
        gate, up = x.chunk(2, dim=1)
        return functional.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return silu_and_mul_backward(grad, ctx.saved_tensors[0]), None
