"""Rotary position embedding in halves (NeoX), FP32 angles, one rounding.

    a' = bf16(fma(a, cos, -(b * sin)))      b' = bf16(fma(b, cos, a * sin))      (a, b) the halves of a head

cos and sin come from FP32 angles p / base^(2i/D), computed on the tensors' own device: another device's
power function has other last bits. Formula: SGLang 0.5.23, kernels/jit/csrc/elementwise/rope.cuh.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rope_table(
    head_dim: int, base: float, num_positions: int, device: torch.device | str
) -> Tensor:
    """Cosines, then sines, of all positions: FP32 (num_positions, head_dim) on `device`; no scaled rope."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / (base**exponents)
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def apply_rope(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """x BF16 (T, heads, D) rotated by `table` (rope_table) at positions (T,), integers; BF16 (T, heads, D).

    Raises ValueError where they do not fit; positions are trusted, reading them would wait for the GPU.
    """
    if x.dim() != 3 or x.dtype != torch.bfloat16 or x.shape[-1] != table.shape[-1]:
        raise ValueError(
            f"apply_rope: x is {x.dtype} {tuple(x.shape)}, the table has {table.shape[-1]} columns; "
            f"give BF16 (T, heads, {table.shape[-1]})"
        )
    if positions.shape != x.shape[:1]:
        raise ValueError(f"apply_rope: positions {tuple(positions.shape)}; give ({x.shape[0]},)")
    return _Rope.apply(x, table, positions)


def _rotated(x: Tensor, table: Tensor, positions: Tensor, sign: float) -> Tensor:
    if x.device.type == "cuda":
        from megatron_nvfp4.deterministic.kernels import rope

        dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
        return rope.rotate(x if dense else x.contiguous(), table, positions, sign)
    # FP64 holds a product of two FP32 exactly: the sum rounds like a fused multiply-add, but for rare ties.
    cos, sin = table[positions][:, None].chunk(2, dim=-1)
    first, second = (half.float() for half in x.chunk(2, dim=-1))
    sin = sin * sign
    low = (first.double() * cos - (second * sin).double()).float()
    high = (second.double() * cos + (first * sin).double()).float()
    return torch.cat([low, high], dim=-1).to(x.dtype)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(table, positions)
        return _rotated(x, table, positions, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        table, positions = ctx.saved_tensors
        return _rotated(grad, table, positions, -1.0), None, None  # the inverse rotation
