"""GroupedLinear: one weight per expert over contiguous rows, any number of rows per expert."""

import operator
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nvfp4.backends import cuda_gemm, dispatch
from megatron_nvfp4.quant import offsets_from_splits

from .base import (
    QLinearBase,
    default_device,
    default_init,
    mark_partition,
    new_parameter,
    refuse,
)
from .matmul import MatmulSetup, hides_gradients
from .params import QLinearParams


class GroupedLinear(QLinearBase):
    """y_g = x_g W_g^T + b_g; constructor and names of TE 2.20's `GroupedLinear`.

    Parameters: weight0..weight{n-1} (out, in), bias0.. (out,) when bias=True; `_extra_state` (empty). A
    state dict with one stacked `weight` (n, out, in) loads too. Experts may have no rows at all.
    The caller splits and communicates: tensor parallelism here only marks the parameters.
    Not supported, and refused: user-buffer overlap, delayed weight gradients, a single grouped parameter,
    sequence parallelism, parallel_mode with tp_size > 1.
    """

    def __init__(
        self,
        num_gemms: int,
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
        device: torch.device | str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
        *,
        qlinear_params: QLinearParams | None = None,
        amax_group: dist.ProcessGroup | None = None,
    ) -> None:
        """amax_group: ranks that hold shards of every weight, so that a sharded expert has one amax."""
        super().__init__(name or ub_name or type(self).__name__)
        refuse(
            self.layer_name,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_ag=ub_overlap_ag,
            delay_wgrad_compute=delay_wgrad_compute,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
            sequence_parallel=sequence_parallel and tp_size > 1,
            parallel_mode=parallel_mode if tp_size > 1 else None,
        )
        if num_gemms < 1:
            raise ValueError(f"{self.layer_name}: num_gemms={num_gemms}; give one or more experts")
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.fuse_wgrad_accumulation, self.return_bias, self.use_bias = (
            fuse_wgrad_accumulation,
            return_bias,
            bias,
        )
        self.parallel_mode, self.tp_size, self.amax_group = parallel_mode, tp_size, amax_group
        dtype = params_dtype or torch.get_default_dtype()
        device = device if device is not None else default_device()
        # One block of memory: the GEMMs read all experts as one matrix, without a copy.
        memory = torch.empty(num_gemms, out_features, in_features, dtype=dtype, device=device)
        for index in range(num_gemms):
            weight = new_parameter(
                memory[index],
                init_method or default_init,
                rng=get_rng_state_tracker,
                rng_name=rng_tracker_name,
            )
            mark_partition(weight, parallel_mode)
            self.register_parameter(f"weight{index}", weight)
            if bias:
                empty = torch.empty(out_features, dtype=dtype, device=device)
                zeros = new_parameter(empty, torch.nn.init.zeros_)
                mark_partition(zeros, parallel_mode, is_bias=True)
                self.register_parameter(f"bias{index}", zeros)
        self._get_weights = operator.itemgetter(*(f"weight{index}" for index in range(num_gemms)))
        self.register_load_state_dict_pre_hook(_unstack_parameters)
        self.set_qlinear_params(qlinear_params)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The experts' weights in order."""
        try:
            found = self._get_weights(self._parameters)  # torch's attribute lookup is slow for many
        except KeyError:  # a parametrised weight is an attribute, no parameter
            return tuple(getattr(self, f"weight{index}") for index in range(self.num_gemms))
        return found if self.num_gemms > 1 else (found,)

    @property
    def biases(self) -> tuple[Tensor, ...]:
        """The experts' biases in order; empty without bias."""
        return tuple(
            getattr(self, f"bias{index}") for index in range(self.num_gemms * self.use_bias)
        )

    def forward(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """inp (M, in_features), m_splits rows per expert (their sum is M): (M, out_features).

        Returns (y, biases) without adding them when return_bias.
        """
        # A view of the same shape would be one more node for autograd.
        rows = inp if inp.dim() == 2 else inp.reshape(-1, inp.shape[-1])
        splits = self._splits(rows, m_splits)
        x = rows.to(self.activation_dtype(inp))
        is_launched = splits is not None and x.is_cuda and dispatch.kernels_of(x.device) == "cuda"
        offsets = (
            cuda_gemm.row_offsets(x, splits)
            if is_launched and len(splits) <= cuda_gemm.MAX_GROUPS
            else offsets_from_splits(m_splits, x.device)
        )
        weights = self.weights
        setup = MatmulSetup(
            params=self.qlinear_params,
            name=self.layer_name,
            dtype=x.dtype,
            input_amax_group=self.amax_group if self.parallel_mode == "row" else None,
            weight_amax_group=self.amax_group,
            splits=splits,
            fuse_wgrad=self.fuse_wgrad_accumulation,
            hides_wgrad=self.hides_wgrad(weights),
            seed=self.rounding_seed(x.device),
            # Inside the function's forward the gradient mode is always off.
            keep_for_backward=torch.is_grad_enabled(),
        )
        fused_bias = self.use_bias and not self.return_bias
        bias = torch.stack(self.biases).to(x.dtype) if fused_bias else None
        y = self.matmul(x, offsets, weights, bias, setup, is_first_microbatch)
        y = y if inp.dim() == 2 else y.reshape(*inp.shape[:-1], self.out_features)
        return (y, list(self.biases)) if self.return_bias else y

    def hides_wgrad(self, weights: tuple[Tensor, ...]) -> bool:
        """MatmulSetup.hides_wgrad of a call with these weights."""
        return (
            self.fuse_wgrad_accumulation
            and torch.is_grad_enabled()
            and not self.gradients_are_awaited()
            and hides_gradients(weights)
        )

    def gradients_are_awaited(self) -> bool:
        """Whether somebody hooks onto the accumulation of the weights' gradients, which cannot be seen."""
        return True

    def _splits(self, rows: Tensor, m_splits: Sequence[int] | Tensor) -> tuple[int, ...] | None:
        """Rows of every expert where the host knows them, checked."""
        if rows.shape[1] != self.in_features:
            raise ValueError(
                f"{self.layer_name}: input has {rows.shape[1]} features, the weights {self.in_features}"
            )
        if len(m_splits) != self.num_gemms:
            raise ValueError(
                f"{self.layer_name}: {len(m_splits)} m_splits for {self.num_gemms} experts"
            )
        if isinstance(m_splits, Tensor) and m_splits.device.type != "cpu":
            return None  # device-side splits are trusted: reading them would synchronise
        sizes = m_splits.tolist() if isinstance(m_splits, Tensor) else m_splits
        try:
            splits = tuple(map(operator.index, sizes))
        except TypeError as error:
            raise ValueError(
                f"{self.layer_name}: m_splits={m_splits} are not whole numbers of rows"
            ) from error
        if min(splits) < 0 or sum(splits) != rows.shape[0]:
            raise ValueError(
                f"{self.layer_name}: m_splits={list(splits)} do not sum to the {rows.shape[0]} rows of the "
                "input"
            )
        return splits

    def backward_dw(self) -> None:
        """TE's hook for delayed weight gradients, which are refused here: nothing is left to do."""

    def extra_repr(self) -> str:
        recipe = self.qlinear_params.recipe.name if self.qlinear_params else "unresolved"
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.use_bias}, recipe={recipe}"
        )


def _unstack_parameters(module: GroupedLinear, state_dict, prefix, *_) -> None:
    """Accept one stacked `weight` (n, out, in) or `bias` (n, out) in place of the numbered ones."""
    for kind in ("weight", "bias"):
        stacked = state_dict.get(prefix + kind)
        if stacked is None:
            continue
        if stacked.shape[0] != module.num_gemms:
            raise ValueError(
                f"{prefix}{kind}: {stacked.shape[0]} stacked experts for num_gemms={module.num_gemms}"
            )
        del state_dict[prefix + kind]
        for index, tensor in enumerate(stacked.unbind(0)):
            state_dict.setdefault(f"{prefix}{kind}{index}", tensor)
