"""Transformer Engine's own NVFP4 quantiser, to compare bits with and to run on its kernels.

Written against transformer-engine 2.20's API for compute capability 10.0 and up; compiled and read, never
run (its NVFP4 kernels refuse the Hopper GPUs this project is tested on). Offers no GEMM: TE scales by the
product of the amaxes, another last bit than this project's contract.
"""

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_nvfp4.quant import QuantizedTensor
from megatron_nvfp4.recipes import Format, NVFP4Spec, format_needs

from . import Operand


class TransformerEngineBackend:
    """See the module and `Backend`."""

    name = "te"
    features = frozenset({"nvfp4", "four_over_six"})

    def why_not(
        self,
        op: str,
        formats: Sequence[Format],
        shape: Sequence[int] | None = None,
        device: torch.device | str | None = None,
    ) -> str | None:
        if importlib.util.find_spec("transformer_engine") is None:
            return "transformer-engine is not installed (pip install transformer-engine[pytorch])"
        if op == "quantize_rotated":
            return "TE's rotation is not offered: it comes with columnwise kernels only"
        if op != "quantize":
            return "TE's GEMM is not offered: it applies the outer scales in another order"
        missing = set().union(*(format_needs(spec) for spec in formats)) - self.features
        if missing or not all(isinstance(spec, NVFP4Spec) for spec in formats):
            return f"only NVFP4 with rounding to nearest, not {', '.join(map(str, formats))}"
        if torch.device(device or "cuda").type != "cuda" or not torch.cuda.is_available():
            return "needs a CUDA GPU"
        capability = torch.cuda.get_device_capability()
        if capability < (10, 0):
            found = ".".join(map(str, capability))
            return f"TE's NVFP4 kernels need compute capability 10.0, this GPU has {found}"
        if shape is not None and (shape[0] % 16 or shape[1] % 16):
            return f"TE quantises whole 16-row blocks; shape {tuple(shape)} is not"
        return None

    def quantize(
        self,
        x: Tensor,
        spec: Format,
        *,
        amax: Tensor | None = None,
        offsets: Tensor | None = None,
        column_offsets: Tensor | None = None,
        rotated: bool = False,
        seed: int | None = None,
        offset: int = 0,
    ) -> Operand:
        grouped = any(o is not None and o.numel() > 2 for o in (offsets, column_offsets))
        if amax is not None or grouped or rotated:
            raise ValueError(
                "te: no given amax, no groups and no rotation; use backend cuda or reference"
            )
        import transformer_engine_torch as tex
        from transformer_engine.pytorch import NVFP4Quantizer

        quantizer = NVFP4Quantizer(
            fp4_dtype=tex.DType.kFloat4E2M1,
            rowwise=True,
            columnwise=False,
            with_2d_quantization=spec.block == (16, 16),
            row_scaled_nvfp4=spec.outer == "token",
            nvfp4_use_4over6=spec.four_over_six is not None,
            nvfp4_e4m3_max=spec.e4m3_max,
            nvfp4_4over6_err_mode=(spec.four_over_six or "mae").upper(),
        )
        quantized = quantizer(x.contiguous())
        num_rows, num_cols = x.shape
        scales = quantized._rowwise_scale_inv.view(torch.float8_e4m3fn)
        scales = scales[:num_rows, : num_cols // 16].contiguous()
        codes = quantized._rowwise_data.view(torch.uint8)
        return QuantizedTensor(
            codes, scales, quantized._amax_rowwise, spec, offsets, column_offsets
        )


BACKEND = TransformerEngineBackend()
