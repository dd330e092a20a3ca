"""Column- and row-parallel linears, the norm and the attention core that Megatron's layers are built of.

Names, sharded keys and parameter attributes are those of megatron/core/extensions/transformer_engine.py at
core_v0.19.0, so that checkpoints of either load in the other.
"""

from collections.abc import Callable

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import get_pg_rank, get_pg_size, get_tensor_model_parallel_group_if_none
from torch import Tensor

from megatron_nvfp4.modules import LayerNormLinear, Linear
from megatron_nvfp4.modules.base import ExtraStateModule
from megatron_nvfp4.modules.norm import check_normalization, new_gamma, normalize

from .layer_numerics import MegatronLinear


def module_device(config: TransformerConfig) -> torch.device:
    """Where Megatron wants new parameters."""
    if config.use_cpu_initialization:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def rng_tracker() -> Callable | None:
    """Megatron's random state tracker, once it is seeded."""
    return get_cuda_rng_tracker if get_cuda_rng_tracker().is_initialized() else None


def conditional_init(config: TransformerConfig, init_method: Callable) -> Callable:
    """init_method, or nothing when a checkpoint will fill the weights (--no-initialization)."""
    return init_method if config.perform_initialization else lambda weight: None


def uses_expert_groups(config: TransformerConfig) -> bool:
    """Whether expert parameters reduce over their own data-parallel group."""
    return (
        config.expert_model_parallel_size > 1
        or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
    )


def mark_expert_parameters(module: torch.nn.Module, config: TransformerConfig, mode: str) -> None:
    """Set `allreduce` and the partition attributes of expert parameters (numbered or not)."""
    for name, parameter in module.named_parameters(recurse=False):
        is_bias = name.startswith("bias")
        parameter.allreduce = not uses_expert_groups(config)
        parameter.tensor_model_parallel = mode == "column" or not is_bias
        if parameter.tensor_model_parallel:
            parameter.partition_dim = 1 if mode == "row" else 0
            parameter.partition_stride = 1


class _ParallelLinear(MegatronLinear, Linear):
    """A Linear with Megatron's constructor; `mode` is the axis it is split along."""

    mode: str

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: torch.distributed.ProcessGroup | None = None,
        stride: int = 1,
        name: str | None = None,
    ) -> None:
        tp_group = get_tensor_model_parallel_group_if_none(tp_group, is_expert=is_expert)
        tp_size = get_pg_size(tp_group)
        # Experts: the token dispatcher communicates, the layer only holds its slice.
        explicit_comm = is_expert and (tp_size > 1 or config.expert_model_parallel_size > 1)
        if explicit_comm:
            if self.mode == "column":
                output_size = divide_exactly("output_size", output_size, tp_size)
            else:
                input_size = divide_exactly("input_size", input_size, tp_size)
        on_cpu = config.use_cpu_initialization and not is_expert
        super().__init__(
            input_size,
            output_size,
            sequence_parallel=config.sequence_parallel,
            fuse_wgrad_accumulation=config.gradient_accumulation_fusion,
            tp_group=None if explicit_comm else tp_group,
            get_rng_state_tracker=rng_tracker(),
            rng_tracker_name=get_expert_parallel_rng_tracker_name() if is_expert else None,
            init_method=(lambda weight: None) if on_cpu else conditional_init(config, init_method),
            bias=bias,
            return_bias=skip_bias_add and bias,
            params_dtype=config.params_dtype,
            parallel_mode=None if explicit_comm else self.mode,
            device=module_device(config),
            name=name or tp_comm_buffer_name,
        )
        self.config, self._tp_group = config, tp_group
        if on_cpu:
            init_affine_on_cpu(self, input_size, output_size, self.mode, init_method, stride)
        self.weight.partition_stride = stride
        if bias and self.mode == "column":
            self.bias.partition_stride = stride
        if is_expert:  # TE's wrappers give every expert stride 1, gated ones too
            mark_expert_parameters(self, config, self.mode)
        else:
            for parameter in self.parameters():
                parameter.allreduce = True

    def _amax_group(self) -> tuple[torch.distributed.ProcessGroup | None, str | None]:
        """Megatron's group, also for experts, which are split without communicating themselves."""
        return (self._tp_group if get_pg_size(self._tp_group) > 1 else None), self.mode

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Weight (and a column-parallel bias) sharded along the split axis."""
        axes = {"weight": 0, "bias": 0} if self.mode == "column" else {"weight": 1}
        return sharded_parameters(self, axes, prefix, sharded_offsets, metadata)


class MiniTEColumnParallelLinear(_ParallelLinear):
    """Column-parallel Linear."""

    mode = "column"

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        gather_output: bool,
        skip_weight_param_allocation: bool = False,
        **kwargs,
    ) -> None:
        refuse_column_options(gather_output, skip_weight_param_allocation)
        super().__init__(input_size, output_size, **kwargs)


class MiniTERowParallelLinear(_ParallelLinear):
    """Row-parallel Linear; its input is always split already."""

    mode = "row"

    def __init__(
        self, input_size: int, output_size: int, *, input_is_parallel: bool, **kwargs
    ) -> None:
        if not input_is_parallel:
            raise ValueError(
                "MiniTERowParallelLinear: input_is_parallel=False is not supported; split it"
            )
        super().__init__(input_size, output_size, **kwargs)


class MiniTELayerNormColumnParallelLinear(MegatronLinear, LayerNormLinear):
    """Norm and column-parallel Linear in one module (qkv and a dense fc1)."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable,
        gather_output: bool,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: torch.distributed.ProcessGroup | None = None,
        stride: int = 1,
        name: str | None = None,
    ) -> None:
        refuse_column_options(gather_output, skip_weight_param_allocation)
        if is_expert:
            raise ValueError(
                "MiniTELayerNormColumnParallelLinear: experts have no norm of their own"
            )
        tp_group = get_tensor_model_parallel_group_if_none(tp_group, is_expert=False)
        on_cpu = config.use_cpu_initialization
        super().__init__(
            input_size,
            output_size,
            eps=config.layernorm_epsilon,
            sequence_parallel=config.sequence_parallel,
            fuse_wgrad_accumulation=config.gradient_accumulation_fusion,
            tp_group=tp_group,
            get_rng_state_tracker=rng_tracker(),
            init_method=(lambda weight: None) if on_cpu else conditional_init(config, init_method),
            bias=bias,
            normalization=config.normalization,
            return_bias=skip_bias_add and bias,
            params_dtype=config.params_dtype,
            parallel_mode="column",
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            device=module_device(config),
            name=name or tp_comm_buffer_name,
        )
        self.config, self._tp_group = config, tp_group
        if on_cpu:
            init_affine_on_cpu(self, input_size, output_size, "column", init_method, stride)
        for parameter in self.parameters():
            parameter.allreduce = True
        self.weight.partition_stride = stride
        if bias:
            self.bias.partition_stride = stride

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Weight and bias sharded along axis 0; the norm is replicated."""
        axes = {"weight": 0, "bias": 0}
        return sharded_parameters(self, axes, prefix, sharded_offsets, metadata)


class MiniTENorm(ExtraStateModule):
    """RMSNorm or LayerNorm with TE's keys; works with sequence parallelism and zero-centred gamma."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        check_normalization("MiniTENorm", config.normalization)
        self.eps, self.normalization = eps, config.normalization
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        dtype, device = config.params_dtype, module_device(config)
        self.weight = new_gamma(hidden_size, self.zero_centered_gamma, dtype, device)
        self.weight.sequence_parallel = config.sequence_parallel
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=dtype, device=device))
            self.bias.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """The last axis of x normalised, in x's dtype."""
        return normalize(
            x,
            self.weight,
            self.bias,
            self.eps,
            normalization=self.normalization,
            zero_centered_gamma=self.zero_centered_gamma,
        )


class MiniTEDotProductAttention(ExtraStateModule, DotProductAttention):
    """Megatron's torch attention with the (empty) state entry that TE's has in the torch format."""

    may_lack_state = True  # see sharded_state_dict

    def sharded_state_dict(self, *args, **kwargs) -> ShardedStateDict:
        """Nothing: TE's attention leaves its state out of distributed checkpoints too."""
        return {}


def refuse_column_options(gather_output: bool, skip_weight_param_allocation: bool) -> None:
    if gather_output or skip_weight_param_allocation:
        raise ValueError(
            f"column-parallel linear: gather_output={gather_output}, skip_weight_param_allocation="
            f"{skip_weight_param_allocation}; neither is supported (use Megatron's ColumnParallelLinear)"
        )


def divide_exactly(label: str, size: int, parts: int) -> int:
    if size % parts:
        raise ValueError(f"{label}={size} does not divide over {parts} tensor-parallel ranks")
    return size // parts


def init_affine_on_cpu(
    module, input_size: int, output_size: int, mode: str, init_method: Callable, stride: int
) -> None:
    """--use-cpu-initialization: the whole weight from one stream of numbers, each rank keeps its slice."""
    config, group = module.config, module._tp_group
    axis = 0 if mode == "column" else 1
    _initialize_affine_weight_cpu(
        module.weight,
        output_size,
        input_size,
        module.weight.shape[axis],
        axis,
        init_method=conditional_init(config, init_method),
        stride=stride,
        return_master_weight=False,
        params_dtype=config.params_dtype,
        rank=get_pg_rank(group),
        world_size=get_pg_size(group),
        skip_set_tensor_parallel_attributes=True,
    )


def sharded_parameters(
    module, axes: dict[str, int], prefix: str, sharded_offsets: tuple, metadata: dict | None
) -> ShardedStateDict:
    """Megatron's sharded tensors of a module's own state, split along `axes`."""
    metadata = ensure_metadata_has_dp_cp_group(metadata)
    return make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        axes,
        sharded_offsets,
        tp_group=module._tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )
