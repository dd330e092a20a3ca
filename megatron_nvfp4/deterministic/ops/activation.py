"""silu(gate) * up with one rounding.

    y = bf16(up * (gate * rcp(1 + ex2(gate * -log2(e)))))

On the GPU rcp and ex2 are the approximate instructions, subnormals flushed, every product rounded to
FP32; the CPU takes exact ones. Formula: SGLang 0.5.23, kernels/jit/csrc/elementwise/activation.cuh,
which is built with fast math.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def silu_and_mul(x: Tensor) -> Tensor:
    """x BF16 (M, 2F), gates left of ups: BF16 (M, F). Raises ValueError for anything else."""
    if x.dim() != 2 or x.dtype != torch.bfloat16 or x.shape[1] % 2:
        raise ValueError(
            f"silu_and_mul: x is {x.dtype} {tuple(x.shape)}; give BF16 (M, 2F), gates left of ups"
        )
    return _SiluAndMul.apply(x)


def silu_and_mul_forward(x: Tensor) -> Tensor:
    """silu_and_mul without checks and without a gradient."""
    if x.device.type == "cuda":
        from megatron_nvfp4.deterministic.kernels import activation

        return activation.silu_and_mul(x.contiguous())
    gate, up = x.float().chunk(2, dim=1)
    return (up * (gate / (1.0 + torch.exp(-gate)))).to(x.dtype)


def silu_and_mul_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, BF16 (M, 2F), in FP32 and rounded once, from that of the result, (M, F)."""
    gate, up = x.float().chunk(2, dim=1)
    grad = grad.float()
    sigmoid = torch.sigmoid(gate)
    grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return torch.cat([grad_gate, grad * gate * sigmoid], dim=1).to(x.dtype)


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return silu_and_mul_forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        return silu_and_mul_backward(grad, ctx.saved_tensors[0])
