"""What a capture of tensors asks of Megatron: ranks, sizes, its TensorBoard writer, the experts' dataflow.

Megatron is imported when it is asked: the launcher decides first which one, and on which device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_nvfp4.modules import LayerNormLinear
from megatron_nvfp4.modules.moe import observe
from megatron_nvfp4.modules.norm import normalize


class MegatronSeams:
    """Seams of a model that megatron.training trains."""

    def coordinates(self) -> dict[str, Any]:
        """This rank's place in every group of ranks."""
        from megatron.core import parallel_state

        tensor, expert = (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_expert_model_parallel_group(),
        )
        return {
            "rank": torch.distributed.get_rank(),
            "tp_rank": tensor.rank(),
            "tp_size": tensor.size(),
            "pp_rank": parallel_state.get_pipeline_model_parallel_rank(),
            "pp_size": parallel_state.get_pipeline_model_parallel_world_size(),
            "dp_rank": parallel_state.get_data_parallel_rank(),
            "cp_size": parallel_state.get_context_parallel_world_size(),
            "ep_rank": expert.rank(),
            "ep_size": expert.size(),
            "ep_ranks": torch.distributed.get_process_group_ranks(expert),
        }

    def model(self, model: Sequence[torch.nn.Module]) -> dict[str, int]:
        """Sizes by which the columns of fused projections are told apart."""
        config = model[0].config
        return {
            "num_heads": config.num_attention_heads,
            "num_groups": config.num_query_groups or config.num_attention_heads,
            "head_dim": config.kv_channels,
        }

    def bypassed(self, model: Sequence[torch.nn.Module]) -> str | None:
        """Why the modules below `model` run no forward, None where they do."""
        from .deterministic_run import run_of

        if any(run_of(chunk) is not None for chunk in model):
            return "a deterministic profile computes the whole model (deterministic.capture: its operators)"
        return None

    def tensorboard_writer(self) -> Any | None:
        """Megatron's, on the rank that has one."""
        from megatron.training.global_vars import get_tensorboard_writer

        return get_tensorboard_writer()

    def observe_experts(self, observer: Callable[[Any], Any] | None) -> None:
        """See modules.moe.observe."""
        observe(observer)

    def gemm_input(self, module: torch.nn.Module, x: Tensor) -> Tensor:
        """x, after the norm of a linear that has one, in the linear's dtype."""
        x = x.detach().to(module.activation_dtype(x))
        if not isinstance(module, LayerNormLinear):
            return x
        return normalize(
            x,
            module.layer_norm_weight,
            module.layer_norm_bias,
            module.eps,
            normalization=module.normalization,
            zero_centered_gamma=module.zero_centered_gamma,
        )
