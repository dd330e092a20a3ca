"""Gradient accumulation fusion of Megatron's own linears (the output layer) without apex.

Megatron asks apex's CUDA extension for `main_grad += grad_output^T input` and refuses
--gradient-accumulation-fusion, its default, where that is missing. Our weight gradient does the same.
"""

import logging

from megatron.core.tensor_parallel import layers
from torch import Tensor

from megatron_nvfp4.modules.matmul import accumulate_weight_gradient

logger = logging.getLogger(__name__)


def install() -> None:
    """Stand in for apex's fused_weight_gradient_mlp_cuda, only where Megatron did not find it."""
    if layers._grad_accum_fusion_available:
        return
    layers.fused_weight_gradient_mlp_cuda = WgradAccumulation
    layers._grad_accum_fusion_available = True
    logger.info("apex is not installed: the output layer accumulates its gradient by our kernel")


class WgradAccumulation:
    """The two functions that Megatron calls, by their names."""

    @staticmethod
    def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        """main_grad (N, K) += grad_output (M, N)^T total_input (M, K)."""
        accumulate_weight_gradient(grad_output, total_input, main_grad)

    # The type of main_grad decides, as everywhere here.
    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
