"""LayerNormLinear: RMSNorm or LayerNorm, then Linear, under TE's names."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .base import default_device, refuse
from .linear import Linear
from .norm import check_normalization, new_gamma, normalize
from .params import QLinearParams


class LayerNormLinear(Linear):
    """y = norm(x) W^T + b; constructor and names of TE 2.20's `LayerNormLinear`.

    Parameters: layer_norm_weight (in,), layer_norm_bias (in,) for LayerNorm only, and Linear's.
    With sequence parallelism the norm runs on each rank's rows and its output is gathered.
    Not supported, and refused: what Linear refuses, and returning the normalised input.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split=None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
        *,
        qlinear_params: QLinearParams | None = None,
    ) -> None:
        layer = name or ub_name or type(self).__name__
        check_normalization(layer, normalization)
        refuse(
            layer,
            return_layernorm_output=return_layernorm_output,
            return_layernorm_output_gathered=return_layernorm_output_gathered,
        )
        if parallel_mode == "row":
            raise ValueError(
                f"{layer}: parallel_mode='row' would split the norm; use column or None"
            )
        device = device if device is not None else default_device()
        super().__init__(
            in_features,
            out_features,
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            tp_group=tp_group,
            tp_size=tp_size,
            get_rng_state_tracker=get_rng_state_tracker,
            init_method=init_method,
            bias=bias,
            return_bias=return_bias,
            params_dtype=params_dtype,
            parallel_mode=parallel_mode,
            parameters_split=parameters_split,
            device=device,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            ub_name=ub_name,
            delay_wgrad_compute=delay_wgrad_compute,
            symmetric_ar_type=symmetric_ar_type,
            name=name,
            qlinear_params=qlinear_params,
        )
        self.eps, self.normalization = eps, normalization
        self.zero_centered_gamma = zero_centered_gamma
        dtype = params_dtype or torch.get_default_dtype()
        self.layer_norm_weight = new_gamma(in_features, zero_centered_gamma, dtype, device)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(
                torch.zeros(in_features, dtype=dtype, device=device)
            )
            self.layer_norm_bias.sequence_parallel = self.sequence_parallel
        else:
            self.layer_norm_bias = None

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As Linear.forward, on the normalised inp."""
        x = normalize(
            inp.to(self.activation_dtype(inp)),
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.eps,
            normalization=self.normalization,
            zero_centered_gamma=self.zero_centered_gamma,
        )
        return super().forward(x, is_first_microbatch, fp8_output, fp8_grad)
