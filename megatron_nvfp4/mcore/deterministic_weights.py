"""A GPTModel's parameters under the names of the deterministic forward: in place, or in Hugging Face's parts.

A sampler loads whole projections of q, k, v, gate and up. The forward multiplies by Megatron's parameters
where they lie: FC1 is gate above up already, experts stay apart. Only q, k and v, which Megatron has side by
side in groups, are copied. Where every parameter has a main_grad, its gradient is added there inside the
product, by the rules of minite's own layers (modules/matmul.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nvfp4.deterministic.ops.linear import Weights
from megatron_nvfp4.deterministic.profiles import SamplerRanks
from megatron_nvfp4.modules.matmul import (
    MatmulSetup,
    hides_gradients,
    leaves,
    main_grads,
    mark_accumulated,
    quantize_weights,
)
from megatron_nvfp4.modules.params import QLinearParams
from megatron_nvfp4.recipes import get_recipe

from .arguments import gradients_are_awaited

_LAYERS = "decoder.layers."
_OUTSIDE = (
    ("model.embed_tokens.weight", "embedding.word_embeddings.weight"),
    ("model.norm.weight", "decoder.final_layernorm.weight"),
    ("lm_head.weight", "output_layer.weight"),
)


@dataclass(frozen=True)
class MainGradients:
    """Megatron's main_grad of parameters, as a GradientStore of the deterministic operators."""

    weights: tuple[Tensor, ...]
    setup: MatmulSetup

    @property
    def leaves(self) -> Sequence[Tensor]:
        return leaves(self.weights, self.setup)

    def targets(self) -> list[Tensor] | None:
        return main_grads(self.weights, self.setup)

    def added(self) -> Sequence[Tensor | None]:
        return mark_accumulated(self.weights, self.setup)


def model_weights(model: torch.nn.Module, held: SamplerRanks) -> dict[str, Tensor | Weights]:
    """What deterministic.model.Model takes, of a GPTModel's own parameters and with gradients to them.

    held: the ranks of the sampler whose shares one rank of the learner has; those of two are cut out of
    Hugging Face's parts, copies.
    """
    config, (outside, layers) = model.config, _by_layer(model)
    found = dict(_outer_weights(outside))
    if "output_layer.weight" in outside:
        found["lm_head.weight"] = _in_place(config, "output_layer", outside["output_layer.weight"])
    for number, layer in enumerate(layers):
        source, target = f"{_LAYERS}{number}.", f"model.layers.{number}."
        is_cut = held.tensor_parallel > 1
        attention = _attention(layer, config) if is_cut else _whole_attention(layer, config, source)
        if "mlp.router.weight" in layer:
            is_cut = held.tensor_parallel > held.expert_parallel
        mlp = _mlp(layer) if is_cut else _whole_mlp(layer, config, source)
        for name, weight in (*attention, *mlp):
            found[target + name] = weight if isinstance(weight, Weights) else _bf16(weight)
    return found


def own_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """This rank's parameters under Hugging Face's names: views, or casts, that carry gradients."""
    outside, layers = _by_layer(model)
    yield from _outer_weights(outside)
    for number, layer in enumerate(layers):
        for name, weight in (*_attention(layer, model.config), *_mlp(layer)):
            yield f"model.layers.{number}.{name}", _bf16(weight)


def _by_layer(model: torch.nn.Module) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Parameters outside of the layers, and those of each layer by their names in it."""
    outside: dict[str, Tensor] = {}
    layers: list[dict[str, Tensor]] = [{} for _ in range(model.config.num_layers)]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        number, _, rest = name.removeprefix(_LAYERS).partition(".")
        if name.startswith(_LAYERS):
            layers[int(number)][rest] = parameter
        else:
            outside[name] = parameter
    return outside, layers


def _bf16(weight: Tensor) -> Tensor:
    return weight.to(torch.bfloat16)


def _outer_weights(outside: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, source in _OUTSIDE:
        if source in outside:
            yield name, _bf16(outside[source])


def _in_place(config: TransformerConfig, name: str, *parameters: Tensor) -> Weights:
    """The parameters, G of (N, K), where they lie; copies of those that are not BF16."""
    setup = MatmulSetup(
        params=QLinearParams(recipe=get_recipe("bf16")),
        name=name,
        dtype=torch.bfloat16,
        fuse_wgrad=config.gradient_accumulation_fusion,
        hides_wgrad=config.gradient_accumulation_fusion
        and torch.is_grad_enabled()
        and not gradients_are_awaited(config)
        and hides_gradients(parameters),
    )
    if any(parameter.dtype != setup.dtype for parameter in parameters):
        casts = tuple(_bf16(parameter) for parameter in parameters)
        return Weights(casts, tuple(cast.detach() for cast in casts))
    store = MainGradients(parameters, setup) if setup.fuse_wgrad else None
    return Weights(parameters, quantize_weights(parameters, setup), store)


class _Ungrouped(torch.autograd.Function):
    """Rows of Megatron's groups, each its queries, then its key, then its value: all q, then all k, all v."""

    @staticmethod
    def forward(ctx, weight: Tensor, num_queries: int, size: int) -> Tensor:
        ctx.sizes = num_queries, size
        out = torch.empty_like(weight)
        for rows, group in _ungrouped_parts(out, weight, *ctx.sizes):
            rows.copy_(group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        out = torch.empty_like(grad)
        for rows, group in _ungrouped_parts(grad, out, *ctx.sizes):
            group.copy_(rows)
        return out, None, None


def _ungrouped_parts(
    rows: Tensor, grouped: Tensor, num_queries: int, size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of q, k and v in the one order and in the other."""
    groups = grouped.view(-1, num_queries + 2, size, grouped.shape[1])
    parts = groups.split([num_queries, 1, 1], dim=1)
    sizes = [len(groups) * part.shape[1] * size for part in parts]
    for own, part in zip(rows.split(sizes), parts, strict=True):
        yield own.view(part.shape), part


def _attention_norms(layer: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield "input_layernorm.weight", layer["self_attention.linear_qkv.layer_norm_weight"]
    yield "self_attn.q_norm.weight", layer["self_attention.q_layernorm.weight"]
    yield "self_attn.k_norm.weight", layer["self_attention.k_layernorm.weight"]


def _whole_attention(
    layer: dict[str, Tensor], config: TransformerConfig, prefix: str
) -> Iterator[tuple[str, Tensor | Weights]]:
    yield from _attention_norms(layer)
    num_queries = config.num_attention_heads // config.num_query_groups
    qkv = _bf16(layer["self_attention.linear_qkv.weight"])
    yield "self_attn.qkv_proj.weight", _Ungrouped.apply(qkv, num_queries, config.kv_channels)
    name = "self_attention.linear_proj"
    yield "self_attn.o_proj.weight", _in_place(config, prefix + name, layer[name + ".weight"])


def _attention(layer: dict[str, Tensor], config: TransformerConfig) -> Iterator[tuple[str, Tensor]]:
    yield from _attention_norms(layer)
    yield "self_attn.o_proj.weight", layer["self_attention.linear_proj.weight"]
    # Each group's queries, then its key, then its value.
    num_heads, num_cols = config.num_attention_heads // config.num_query_groups, config.hidden_size
    qkv = layer["self_attention.linear_qkv.weight"]
    qkv = qkv.view(-1, num_heads + 2, config.kv_channels, num_cols)
    for name, heads in (("q", qkv[:, :-2]), ("k", qkv[:, -2:-1]), ("v", qkv[:, -1:])):
        yield f"self_attn.{name}_proj.weight", heads.reshape(-1, num_cols)


def _whole_mlp(
    layer: dict[str, Tensor], config: TransformerConfig, prefix: str
) -> Iterator[tuple[str, Tensor | Weights]]:
    def in_place(name: str, *sources: str) -> Weights:
        return _in_place(config, prefix + name, *(layer[source] for source in sources))

    if "mlp.router.weight" not in layer:
        yield "post_attention_layernorm.weight", layer["mlp.linear_fc1.layer_norm_weight"]
        yield "mlp.gate_up_proj.weight", in_place("mlp.linear_fc1", "mlp.linear_fc1.weight")
        yield "mlp.down_proj.weight", in_place("mlp.linear_fc2", "mlp.linear_fc2.weight")
        return
    yield "post_attention_layernorm.weight", layer["pre_mlp_layernorm.weight"]
    yield "mlp.gate.weight", in_place("mlp.router", "mlp.router.weight")
    for number, name in ((1, "gate_up_proj"), (2, "down_proj")):
        sources = (names[number - 1] for names in _expert_names(layer))
        yield f"mlp.experts.{name}", in_place(f"mlp.experts.linear_fc{number}", *sources)


def _mlp(layer: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    if "mlp.router.weight" not in layer:
        yield "post_attention_layernorm.weight", layer["mlp.linear_fc1.layer_norm_weight"]
        yield from _gated("mlp.", layer["mlp.linear_fc1.weight"], layer["mlp.linear_fc2.weight"])
        return
    yield "post_attention_layernorm.weight", layer["pre_mlp_layernorm.weight"]
    yield "mlp.gate.weight", layer["mlp.router.weight"]
    for expert, names in enumerate(_expert_names(layer)):
        yield from _gated(f"mlp.experts.{expert}.", *(layer[name] for name in names))


def _expert_names(layer: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Names of every expert's FC1 and FC2, of grouped linears or of one module each."""
    form = "mlp.experts.linear_fc{fc}.weight{expert}"
    if form.format(fc=1, expert=0) not in layer:
        form = "mlp.experts.local_experts.{expert}.linear_fc{fc}.weight"
    for expert in range(len(layer["mlp.router.weight"])):
        yield form.format(fc=1, expert=expert), form.format(fc=2, expert=expert)


def _gated(prefix: str, fc1: Tensor, fc2: Tensor) -> Iterator[tuple[str, Tensor]]:
    gate, up = fc1.chunk(2)
    yield prefix + "gate_proj.weight", gate
    yield prefix + "up_proj.weight", up
    yield prefix + "down_proj.weight", fc2
