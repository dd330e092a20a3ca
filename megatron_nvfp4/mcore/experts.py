"""Grouped expert linears for Megatron's TEGroupedMLP, which needs Transformer Engine in name only."""

from collections.abc import Callable

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import get_pg_rank, get_pg_size

from megatron_nvfp4.modules import GroupedLinear
from megatron_nvfp4.modules.base import EXTRA_STATE

from .arguments import gradients_are_awaited
from .layer_numerics import MegatronLinear
from .parallel import (
    conditional_init,
    divide_exactly,
    mark_expert_parameters,
    module_device,
    rng_tracker,
)


class _ExpertLinear(MegatronLinear, GroupedLinear):
    """A GroupedLinear with Megatron's constructor; the token dispatcher does all communication."""

    mode: str

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        if not is_expert:
            raise ValueError("grouped linears hold experts: is_expert must be True")
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        tp_group = pg_collection.expt_tp
        tp_size = get_pg_size(tp_group)
        if self.mode == "column":
            output_size = divide_exactly("output_size", output_size, tp_size)
        else:
            input_size = divide_exactly("input_size", input_size, tp_size)
        super().__init__(
            num_gemms,
            input_size,
            output_size,
            fuse_wgrad_accumulation=config.gradient_accumulation_fusion,
            get_rng_state_tracker=rng_tracker(),
            rng_tracker_name=get_expert_parallel_rng_tracker_name(),
            init_method=conditional_init(config, init_method),
            bias=bias,
            return_bias=skip_bias_add and bias,
            params_dtype=config.params_dtype,
            parallel_mode=self.mode,
            device=module_device(config),
            name=name or tp_comm_buffer_name,
            amax_group=tp_group if tp_size > 1 else None,
        )
        self.config, self._tp_group, self._pg_collection = config, tp_group, pg_collection
        mark_expert_parameters(self, config, self.mode)

    def gradients_are_awaited(self) -> bool:
        """As arguments.gradients_are_awaited: Megatron's DDP hooks onto every weight, mostly for nothing."""
        return gradients_are_awaited(self.config)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """One entry per local expert under keys shared by all experts, the expert as an axis of its own.

        Equal to TEGroupedLinear's: local keys weight{i} and `_extra_state`, `_extra_state1`..
        """
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        groups = self._pg_collection
        num_global = get_pg_size(groups.ep) * self.num_gemms
        first_global = get_pg_rank(groups.ep) * self.num_gemms
        singletons = metadata.get("singleton_local_shards", False)
        state = self.state_dict(prefix="", keep_vars=True)
        sharded: ShardedStateDict = {}
        for index in range(self.num_gemms):
            expert = first_global + index
            local = {
                f"{index}.weight": state[f"weight{index}"],
                f"{index}.{EXTRA_STATE}": state[EXTRA_STATE],
            }
            if self.use_bias:
                local[f"{index}.bias"] = state[f"bias{index}"]
            offsets = sharded_offsets
            if not singletons:
                offsets = (*sharded_offsets, (len(sharded_offsets), expert, num_global))
            entries = make_sharded_tensors_for_checkpoint(
                local,
                "",
                self._split_axes(index),
                offsets,
                tp_group=self._tp_group,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(
                entries, f"{index}.", f"{expert}.{prefix}" if singletons else prefix
            )
            suffix = str(index) if index else ""
            sharded[f"{prefix}weight{index}"] = entries[f"{index}.weight"]
            sharded[f"{prefix}{EXTRA_STATE}{suffix}"] = entries[f"{index}.{EXTRA_STATE}"]
            if self.use_bias:
                sharded[f"{prefix}bias{index}"] = entries[f"{index}.bias"]
        for entry in sharded.values():
            self._set_expert_replica(entry)
        return sharded

    def _split_axes(self, index: int) -> dict[str, int]:
        if self.mode == "column":
            return {f"{index}.weight": 0, f"{index}.bias": 0}
        return {f"{index}.weight": 1}

    def _set_expert_replica(self, entry) -> None:
        """Experts are replicated over the expert data-parallel group, not over the dense one."""
        if getattr(entry, "is_data_parallel_fully_shard", False):
            rank = 0
        elif isinstance(entry, ShardedObject):
            group = getattr(self._pg_collection, "expt_dp_gtp_remat", None)
            rank = get_pg_rank(group or self._pg_collection.expt_dp)
        else:
            rank = get_pg_rank(self._pg_collection.expt_dp)
        entry.replica_id = (*entry.replica_id[:2], rank)


class MiniTEColumnParallelGroupedLinear(_ExpertLinear):
    """Experts' fc1, split along the output under expert tensor parallelism."""

    mode = "column"


class MiniTERowParallelGroupedLinear(_ExpertLinear):
    """Experts' fc2, split along the input under expert tensor parallelism."""

    mode = "row"
