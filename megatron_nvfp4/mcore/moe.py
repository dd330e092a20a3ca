"""Megatron's MoE layer on the fused expert dataflow, and on Megatron's own where that does not apply.

Fused, the layer's router, shared experts, recomputation and hooks stay Megatron's; from the routing map to
the combined tokens it is `modules.moe`, and the token dispatcher stands idle. Parameters, their names and
their checkpoints are those of TEGroupedMLP in both cases.
"""

from dataclasses import dataclass

from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_size
from torch import Tensor

from megatron_nvfp4.modules import GroupedLinear
from megatron_nvfp4.modules.expert_matmul import ExpertMatmul, is_quantized_once, keeps_packed
from megatron_nvfp4.modules.moe import ExpertDataflow, row_kernels
from megatron_nvfp4.modules.moe_exchange import ExpertExchange
from megatron_nvfp4.recipes import Recipe

from .arguments import moe_dataflow_of, policy_of
from .experts import MiniTEColumnParallelGroupedLinear, MiniTERowParallelGroupedLinear
from .moe_support import ACTIVATIONS, unfused_reasons


@dataclass(frozen=True)
class _Ask:
    """In place of a linear's input: rows like `like` are about to be multiplied elsewhere."""

    like: Tensor


@dataclass(frozen=True)
class _Routed:
    """In place of the number of tokens of every expert: tokens in their own order, and their experts."""

    routing_map: Tensor
    top_k: int
    dataflow: ExpertDataflow
    exchange: ExpertExchange | None


class _LendsProduct(GroupedLinear):
    """A grouped linear that, asked, tells its product instead of computing it.

    Asked through a call, so that what Megatron hooks onto calls (the gather of sharded parameters) has run.
    """

    def forward(self, inp, m_splits=None, is_first_microbatch: bool | None = None):
        """As GroupedLinear, or (ExpertMatmul, None) for an _Ask."""
        if isinstance(inp, _Ask):
            return ExpertMatmul.of(self, inp.like, is_first_microbatch)
        return super().forward(inp, m_splits, is_first_microbatch)


class MiniTEExpertsFC1(MiniTEColumnParallelGroupedLinear, _LendsProduct):
    """fc1 of the experts, by itself or inside the dataflow."""


class MiniTEExpertsFC2(MiniTERowParallelGroupedLinear, _LendsProduct):
    """fc2 of the experts, by itself or inside the dataflow."""


class MiniTEGroupedMLP(TEGroupedMLP):
    """TEGroupedMLP, which also takes tokens in their own order and computes them by the dataflow."""

    def forward(self, tokens: Tensor, tokens_per_expert, probs: Tensor, *args, **kwargs):
        """As TEGroupedMLP; for _Routed tokens (T, H) and probs FP32 (T, E), (combined (T, H), None)."""
        routed = tokens_per_expert
        if not isinstance(routed, _Routed):
            return super().forward(tokens, tokens_per_expert, probs, *args, **kwargs)
        fc1, fc2 = (linear(_Ask(tokens))[0] for linear in (self.linear_fc1, self.linear_fc2))
        out = routed.dataflow(
            tokens,
            routed.routing_map,
            probs,
            fc1,
            fc2,
            top_k=routed.top_k,
            exchange=routed.exchange,
        )
        return out, None


class MiniTEMoELayer(MoELayer):
    """MoELayer whose dispatch, experts and combination are the fused dataflow where that can be.

    unfused_reasons: why not, empty if it is. Decided by the configuration, once, at construction.
    Fused, hooks on `experts` see tokens; the experts' linears are asked for their product only, so forward
    hooks on them see no rows and backward hooks do not fire.
    """

    def __init__(self, config, *args, **kwargs) -> None:
        super().__init__(config, *args, **kwargs)
        self.layer_name = type(self).__name__  # until MiniTETransformerLayer tells it
        choice, reasons = moe_dataflow_of(config), unfused_reasons(config)
        if type(self.router) is not TopKRouter:
            reasons.append(
                f"{type(self.router).__name__} may choose more than top_k experts a token"
            )
        self.unfused_reasons = tuple(reasons)
        if choice == "fused" and self.unfused_reasons:
            listed = "\n".join(f"  - {reason}" for reason in self.unfused_reasons)
            raise ValueError(f"--minite-moe-dataflow fused cannot run:\n{listed}")
        if choice == "unfused":
            self.unfused_reasons = ("--minite-moe-dataflow unfused", *self.unfused_reasons)
        self.dataflow = None if self.unfused_reasons else dataflow_of(config)
        self.exchange = None
        if self.dataflow is not None and get_pg_size(self.ep_group) > 1:
            self.exchange = ExpertExchange(self.ep_group, config.num_moe_experts)

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor):
        """Fused: tokens (T, H) and FP32 probabilities (T, E), both where they are."""
        if self.dataflow is None:
            return super().preprocess(hidden_states, probs, routing_map)
        self._hidden_shape, self._routing_map = hidden_states.shape, routing_map
        return hidden_states.reshape(-1, hidden_states.shape[-1]), probs.float()

    def dispatch(self, hidden_states: Tensor, probs: Tensor):
        """Fused: nothing; the dataflow dispatches what it has quantised."""
        if self.dataflow is None:
            return super().dispatch(hidden_states, probs)
        return hidden_states, probs

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor):
        """Fused: the combined outputs of the tokens' experts, (T, H)."""
        if self.dataflow is None:
            return super().routed_experts_compute(hidden_states, probs)
        top_k = self.config.moe_router_topk
        routed = _Routed(self._routing_map, top_k, self.dataflow, self.exchange)
        self._routing_map = None
        return self.experts(hidden_states, routed, probs)

    def combine(self, output: Tensor):
        """Fused: nothing; the outputs are combined."""
        return super().combine(output) if self.dataflow is None else output

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None):
        """Fused: the shape of the hidden states, and the shared experts' output added."""
        if self.dataflow is None:
            return super().postprocess(output, shared_expert_output)
        output = output.view(self._hidden_shape)
        return output if shared_expert_output is None else output + shared_expert_output

    def describe_dataflow(self) -> dict:
        """What runs between router and combination, as plain data for run_meta.json."""
        if self.dataflow is None:
            return {"dataflow": "unfused", "reasons": list(self.unfused_reasons)}
        params = self.experts.linear_fc1.qlinear_params
        recipe = params.recipe if params else policy_of(self.config).recipe
        return {
            "dataflow": "fused",
            "kernels": row_kernels(self.experts.linear_fc1.weights[0].device),
            "quantized": _how_quantized(recipe),
            "travels": _what_travels(recipe) if self.exchange else "nothing",
            "router_weight": self.dataflow.router_weight,
            "recompute": self.dataflow.recompute,
        }


def dataflow_of(config: TransformerConfig) -> ExpertDataflow:
    """The dataflow of a configuration that unfused_reasons says nothing against."""
    return ExpertDataflow(
        activation=ACTIVATIONS[config.activation_func],
        recompute=config.recompute_granularity == "selective"
        and "moe_act" in (config.recompute_modules or ()),
    )


def _how_quantized(recipe: Recipe) -> str:
    return "once per token" if is_quantized_once(recipe) else "rows of experts"


def _what_travels(recipe: Recipe) -> str:
    if keeps_packed(recipe):
        return "packed rows"
    if is_quantized_once(recipe):
        return "packed rows; while training originals, which wgrad reads"
    return "originals: the format is not a token's own"
