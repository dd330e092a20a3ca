"""MiniTESpecProvider: which class stands where in a Megatron layer."""

from functools import partial

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, SequentialMLP

from .moe import MiniTEExpertsFC1, MiniTEExpertsFC2, MiniTEGroupedMLP
from .parallel import (
    MiniTEColumnParallelLinear,
    MiniTEDotProductAttention,
    MiniTELayerNormColumnParallelLinear,
    MiniTENorm,
    MiniTERowParallelLinear,
)


class MiniTESpecProvider(BackendSpecProvider):
    """Our linears and experts; norm and attention of the fallback, or torch ones of our own.

    fallback: a provider whose layer_norm and core_attention are used; default TESpecProvider when
        Transformer Engine is installed, else none.
    """

    def __init__(self, fallback: BackendSpecProvider | None = None) -> None:
        if fallback is None and HAVE_TE:
            from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

            fallback = TESpecProvider()
        self.fallback = fallback

    def column_parallel_linear(self) -> type:
        return MiniTEColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return MiniTERowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return MiniTELayerNormColumnParallelLinear

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> type:
        """The norm class; which norm it is, the config says."""
        if self.fallback is None:
            return MiniTENorm
        return self.fallback.layer_norm(rms_norm=rms_norm, for_qk=for_qk, has_residual=has_residual)

    def core_attention(self) -> type:
        return (
            MiniTEDotProductAttention if self.fallback is None else self.fallback.core_attention()
        )

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool):
        """TEGroupedMLP on grouped linears, fused or not, or SequentialMLP on one linear per expert."""
        if moe_use_grouped_gemm:
            return partial(
                MiniTEGroupedMLP,
                submodules=GroupedMLPSubmodules(
                    linear_fc1=MiniTEExpertsFC1,
                    linear_fc2=MiniTEExpertsFC2,
                    activation_func=self.activation_func(),
                ),
            )
        return partial(
            SequentialMLP,
            submodules=MLPSubmodules(
                linear_fc1=MiniTEColumnParallelLinear,
                linear_fc2=MiniTERowParallelLinear,
                activation_func=self.activation_func(),
            ),
        )

    def activation_func(self) -> None:
        """None, Megatron's own activation: --use-te-activation-func is refused."""
