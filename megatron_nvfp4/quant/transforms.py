"""What may happen to a value before it is encoded: the random Hadamard transform, and random bits.

Both are defined here down to the bit and mirrored by `csrc/transforms.h`. No state is kept: random bits are a
function of (seed, offset, element index), so that they do not depend on the device, the launch, the number of
threads or the layout in memory.
"""

import torch
from torch import Tensor

BLOCK = 16
# Transformer Engine 2.20's fixed signs (pytorch/tensor/nvfp4_tensor.py), "random" by name only: all ranks and
# both operands of a GEMM must rotate alike.
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
RANDOM_BITS = 16  # per element
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def rht(x: Tensor) -> Tensor:
    """Rotate every 16 consecutive elements of each row by diag(SIGNS) @ H16 / 4, H16 Sylvester's matrix.

    x: (M, K) BF16, FP16 or FP32, K a multiple of 16, of any strides. Returns BF16 (M, K). The matrix is
    orthogonal: rotating both operands along the contraction of a GEMM leaves the product as it is. TE rotates
    columnwise operands only: that is rht(x.t()).
    Order of summation: x * SIGNS / 4 (exact for BF16 and FP16), then a butterfly of four stages with strides
    1, 2, 4, 8, (a, b) -> (a + b, a - b), one FP32 rounding per operation, then one rounding to BF16. Tensor
    cores add in another order: they differ where 24 bits do not hold the sum, by one BF16 step.
    Raises ValueError for another shape.
    """
    if x.dim() != 2 or x.shape[1] % BLOCK:
        raise ValueError(
            f"rht: shape {tuple(x.shape)}; give (M, K) with K a multiple of 16 (pad the tokens)"
        )
    quarter = torch.tensor(SIGNS, dtype=torch.float32, device=x.device) * 0.25
    values = x.float().reshape(x.shape[0], x.shape[1] // BLOCK, BLOCK) * quarter
    for stride in (1, 2, 4, 8):
        pairs = values.reshape(*values.shape[:2], BLOCK // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        values = torch.stack((a + b, a - b), dim=-2).reshape(values.shape)
    return values.reshape(x.shape).to(torch.bfloat16)


def random_bits(
    num_rows: int, num_cols: int, seed: int, offset: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """16 random bits for every element of a matrix (num_rows, num_cols), int32 0..65535.

    Philox4x32-10 (Salmon et al., SC'11) under the key `seed` (64 bits) at the counter (element // 8, offset),
    64 bits each, low word first; element i = row * num_cols + column takes 16 bits, from bit 16 * (i % 2) up,
    of output word (i % 8) // 2. seed and offset are taken modulo 2^64; num_cols must be a multiple of 8.
    """
    if num_cols % 8:
        raise ValueError(f"random_bits: {num_cols} columns are not a multiple of 8")
    groups = torch.arange(num_rows * num_cols // 8, dtype=torch.int64, device=device)
    high, low = (torch.full_like(groups, offset >> shift & _MASK) for shift in (32, 0))
    words = philox((groups & _MASK, groups >> 32, low, high), (seed & _MASK, seed >> 32 & _MASK))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, dim=1).reshape(num_rows, num_cols).to(torch.int32)


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four output words for a counter of four words, all int64 0 .. 2^32 - 1."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The products wrap modulo 2^64, which leaves all their bits in place.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (p1 >> 32 & _MASK) ^ c1 ^ k0, (p0 >> 32 & _MASK) ^ c3 ^ k1
        c1, c3 = p1 & _MASK, p0 & _MASK
        k0, k1 = k0 + _WEYL[0] & _MASK, k1 + _WEYL[1] & _MASK
    return c0, c1, c2, c3
