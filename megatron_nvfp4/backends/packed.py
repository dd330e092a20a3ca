"""NVFP4 weights in the order in which a GEMM kernel reads them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_nvfp4.quant.nvfp4 import decode_scale, encode_scale
from megatron_nvfp4.recipes import NVFP4Spec


@dataclass(frozen=True)
class PackedWeights:
    """G NVFP4 weights (N, K) with one outer scale each, 4.5 bits a value as in canonical form.

    packed: uint8 (G, ceil(K/64), ceil(N/64), 2304), 64x64 chunks of codes and block scales in the order of
        tensor core fragments (csrc/cuda/pack_weights.cu); `cuda_gemm.unpack_weights` is the exact inverse.
    amax: FP32 (G,).
    num_rows, num_cols: N and K.
    """

    packed: Tensor
    amax: Tensor
    spec: NVFP4Spec
    num_rows: int
    num_cols: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.packed.shape[0] * self.num_rows, self.num_cols)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def outer_scale(self) -> Tensor:
        """FP32 decode scale S_dec of every weight, (G,)."""
        return decode_scale(encode_scale(self.amax, self.spec.e4m3_max))
