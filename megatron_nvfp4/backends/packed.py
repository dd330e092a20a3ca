"""Weights of several groups in one operand: their order, and the form in which a GEMM kernel reads them."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from megatron_nvfp4.recipes import NVFP4Spec


@dataclass(frozen=True)
class PackedWeights:
    """G NVFP4 weights (N, K) with one outer scale each, 4.5 bits a value as in canonical form.

    packed: uint8 (G, ceil(K/64), ceil(N/64), 2304), 64x64 chunks of codes and block scales in the order of
        tensor core fragments (csrc/cuda/pack_weights.cu); `cuda_gemm.unpack_weights` is the exact inverse.
    amax: FP32 (G,). outer_scale: its S_dec.
    num_rows, num_cols: N and K.
    """

    packed: Tensor
    amax: Tensor
    outer_scale: Tensor
    spec: NVFP4Spec
    num_rows: int
    num_cols: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.packed.shape[0] * self.num_rows, self.num_cols)

    @property
    def device(self) -> torch.device:
        return self.packed.device


def reverse_groups(weights, num_groups: int):
    """A quantised operand (G*N, K) with its groups in the opposite order, copied."""
    turned = {}
    for field in fields(weights):
        value = getattr(weights, field.name)
        if isinstance(value, Tensor) and "offsets" not in field.name:
            parts = value.view(torch.uint8).reshape(num_groups, -1).flip(0)
            turned[field.name] = parts.reshape(-1).view(value.dtype).reshape(value.shape)
    return replace(weights, **turned)
