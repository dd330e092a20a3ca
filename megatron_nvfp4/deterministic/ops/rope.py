"""Rotary position embedding in halves (NeoX), FP32 angles, one rounding.

    a' = bf16(fma(a, cos, -(b * sin)))      b' = bf16(fma(b, cos, a * sin))      (a, b) the halves of a head

cos and sin come from FP32 angles p / base^(2i/D). Two paths of SGLang 0.5.23 have this formula:

- kernels/jit/csrc/elementwise/rope.cuh, from BF16 heads, with frequencies of the GPU;
- with --rl-on-policy-target forward_native, layers/rotary_embedding/base.py 264, from the FP32 heads
  that the norms before return, with frequencies of the host (158) and its apply_rotary_emb
  (layers/rotary_embedding/utils.py 36) through torch.compile, whose Triton kernel (torch 2.11, Triton
  3.6, sm_90) contracts each first product into the sum, for every block size; models/qwen3.py 354 then
  rounds. A compiler that contracts otherwise has other last bits; none was asked but this one.

Powers differ by device in their last bits, and between hosts whose vector instructions differ.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rope_table(
    head_dim: int,
    base: float,
    num_positions: int,
    device: torch.device | str,
    frequency_device: torch.device | str | None = None,
) -> Tensor:
    """Cosines, then sines, of all positions: FP32 (num_positions, head_dim) on `device`; no scaled rope.

    frequency_device: where the powers are computed, None for `device`.
    """
    at = frequency_device or device
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=at) / head_dim
    frequencies = (1.0 / (base**exponents)).to(device)
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def apply_rope(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """x (T, heads, D), BF16 or FP32, rotated by `table` (rope_table) at positions (T,), integers: BF16.

    Raises ValueError where they do not fit; positions are trusted, reading them would wait for the GPU.
    """
    is_float = x.dtype in (torch.bfloat16, torch.float32)
    if x.dim() != 3 or not is_float or x.shape[-1] != table.shape[-1]:
        raise ValueError(
            f"apply_rope: x is {x.dtype} {tuple(x.shape)}, the table has {table.shape[-1]} columns; "
            f"give BF16 or FP32 (T, heads, {table.shape[-1]})"
        )
    if positions.shape != x.shape[:1]:
        raise ValueError(f"apply_rope: positions {tuple(positions.shape)}; give ({x.shape[0]},)")
    return _Rope.apply(x, table, positions)


def _rotated(
    x: Tensor,
    table: Tensor,
    positions: Tensor,
    sign: float,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    if x.device.type == "cuda":
        from megatron_nvfp4.deterministic.kernels import rope

        dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
        return rope.rotate(x if dense else x.contiguous(), table, positions, sign, out_dtype)
    # FP64 holds a product of two FP32 exactly: the sum rounds like a fused multiply-add, but for rare ties.
    cos, sin = table[positions][:, None].chunk(2, dim=-1)
    first, second = (half.float() for half in x.chunk(2, dim=-1))
    sin = sin * sign
    low = (first.double() * cos - (second * sin).double()).float()
    high = (second.double() * cos + (first * sin).double()).float()
    return torch.cat([low, high], dim=-1).to(out_dtype)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(table, positions)
        ctx.dtype = x.dtype
        return _rotated(x, table, positions, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        table, positions = ctx.saved_tensors
        # The inverse rotation.
        return _rotated(grad, table, positions, -1.0, ctx.dtype), None, None
