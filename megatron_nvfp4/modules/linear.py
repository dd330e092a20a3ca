"""Linear, and LayerNormLinear: a norm in front of it."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nvfp4.quant.layout import dense_offsets

from .base import (
    QLinearBase,
    default_device,
    default_init,
    mark_partition,
    new_parameter,
    refuse,
)
from .matmul import MatmulSetup
from .params import QLinearParams
from .tensor_parallel import copy_to_ranks, gather_rows, reduce_from_ranks, reduce_scatter_rows

PARALLEL_MODES = (None, "column", "row")


class Linear(QLinearBase):
    """y = x W^T + b in the recipe's numerics; constructor and names of TE 2.20's `Linear`.

    Parameters: weight (out, in), bias (out,) when bias=True; `_extra_state` (empty). With parallel_mode
    "column" or "row" the sizes given are the whole layer's and each rank of tp_group holds its slice.
    qlinear_params: the layer's numerics; None asks the environment (get_qlinear_params).
    Not supported, and refused: user-buffer overlap, delayed weight gradients, parameters_split, FP8 output.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split=None,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
        *,
        qlinear_params: QLinearParams | None = None,
    ) -> None:
        super().__init__(name or ub_name or type(self).__name__)
        refuse(
            self.layer_name,
            parameters_split=parameters_split,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            delay_wgrad_compute=delay_wgrad_compute,
            symmetric_ar_type=symmetric_ar_type,
        )
        if parallel_mode not in PARALLEL_MODES:
            raise ValueError(
                f"{self.layer_name}: parallel_mode={parallel_mode!r}; use column, row or None"
            )
        self.tp_group, self.tp_size = tp_group, tp_group.size() if tp_group else tp_size
        self.parallel_mode, self.sequence_parallel = (
            parallel_mode,
            sequence_parallel and self.tp_size > 1,
        )
        self.in_features = self._share("in_features", in_features, "row")
        self.out_features = self._share("out_features", out_features, "column")
        self.fuse_wgrad_accumulation, self.return_bias, self.use_bias = (
            fuse_wgrad_accumulation,
            return_bias,
            bias,
        )
        dtype = params_dtype or torch.get_default_dtype()
        device = device if device is not None else default_device()
        memory = {"dtype": dtype, "device": device}
        self.weight = new_parameter(
            torch.empty(self.out_features, self.in_features, **memory),
            init_method or default_init,
            rng=get_rng_state_tracker,
            rng_name=rng_tracker_name,
        )
        mark_partition(self.weight, parallel_mode)
        if bias:
            empty = torch.empty(self.out_features, **memory)
            self.bias = new_parameter(empty, torch.nn.init.zeros_)
            mark_partition(self.bias, parallel_mode, is_bias=True)
            self.bias.sequence_parallel = self.sequence_parallel and parallel_mode == "row"
        else:
            self.bias = torch.empty(0, **memory)
        self.set_qlinear_params(qlinear_params)

    def _share(self, label: str, size: int, mode: str) -> int:
        if self.parallel_mode != mode or self.tp_size == 1:
            return size
        if size % self.tp_size:
            raise ValueError(
                f"{self.layer_name}: {label}={size} does not divide over tp_size={self.tp_size}"
            )
        return size // self.tp_size

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """TE's late binding of the tensor-parallel group; its size must be the constructor's tp_size."""
        if tp_group is not None and tp_group.size() != self.tp_size:
            raise ValueError(
                f"{self.layer_name}: a group of {tp_group.size()} ranks for tp_size={self.tp_size}"
            )
        self.tp_group = tp_group

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """inp (..., in_features) to (..., out_features), in inp's dtype (autocast's inside autocast).

        Returns (y, bias) without adding the bias when return_bias.
        """
        refuse(self.layer_name, fp8_output=fp8_output, fp8_grad=fp8_grad)
        group = self._communicating_group()
        x = inp.to(self.activation_dtype(inp))
        if self.parallel_mode == "column":
            x = gather_rows(x, group) if self.sequence_parallel else copy_to_ranks(x, group)
        row_parallel = self.parallel_mode == "row" and group is not None
        fused_bias = self.use_bias and not self.return_bias and not row_parallel
        y = self._multiply(x, self.bias if fused_bias else None, is_first_microbatch)
        if row_parallel:
            y = (
                reduce_scatter_rows(y, group)
                if self.sequence_parallel
                else reduce_from_ranks(y, group)
            )
            if self.use_bias and not self.return_bias:
                y = y + self.bias.to(y.dtype)
        return (y, self.bias) if self.return_bias else y

    def _multiply(self, x: Tensor, bias: Tensor | None, is_first_microbatch: bool | None) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(
                f"{self.layer_name}: input has {x.shape[-1]} features, the weight {self.in_features}"
            )
        rows = x.reshape(-1, self.in_features)
        offsets = dense_offsets(rows.shape[0], rows.device)
        amax_group, split = self._amax_group()
        setup = MatmulSetup(
            params=self.qlinear_params,
            name=self.layer_name,
            dtype=x.dtype,
            input_amax_group=amax_group if split == "row" else None,
            weight_amax_group=amax_group,
            splits=(rows.shape[0],),
            fuse_wgrad=self.fuse_wgrad_accumulation,
            seed=self.rounding_seed(x.device),
            # Inside the function's forward the gradient mode is always off.
            keep_for_backward=torch.is_grad_enabled(),
        )
        bias = None if bias is None else bias[None].to(x.dtype)
        y = self.matmul(rows, offsets, (self.weight,), bias, setup, is_first_microbatch)
        return y.reshape(*x.shape[:-1], self.out_features)

    def _amax_group(self) -> tuple[dist.ProcessGroup | None, str | None]:
        """Ranks that hold shards of this layer, and how it is split; a subclass may communicate elsewhere."""
        return self._communicating_group(), self.parallel_mode

    def _communicating_group(self) -> dist.ProcessGroup | None:
        if self.tp_size == 1 or self.parallel_mode is None:
            return None
        if self.tp_group is None:
            raise RuntimeError(
                f"{self.layer_name}: tp_size={self.tp_size} without a tensor-parallel group; "
                "pass tp_group or call set_tensor_parallel_group"
            )
        return self.tp_group

    def backward_dw(self) -> None:
        """TE's hook for delayed weight gradients, which are refused here: nothing is left to do."""

    def extra_repr(self) -> str:
        recipe = self.qlinear_params.recipe.name if self.qlinear_params else "unresolved"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"TP={self.tp_size}, recipe={recipe}"
        )
