"""`bench.py moe_layer`: Megatron's MoE layer from router to combination, forward and backward, beside TE's.

The layer of Qwen3-30B-A3B on 4096 tokens: hidden size 2048, 128 experts of 768, 8 a token. Every side has the
same weights, the same router and the same choices, which fixed logits make: exactly balanced, or with a given
coefficient of variation (CV) of rows per expert, the widest with experts that have no tokens. Sides take
turns, so that clocks drift alike; times are medians between events and include the host's, as in training.
Weight gradients are added to FP32 main_grad on every side. Every output is compared with our unfused BF16
layer's. Weights kept for the backward in another form, which a few tokens show, are no activations.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from bench import machine
from torch import Tensor

from megatron_nvfp4.recipes import RECIPES, Policy

TOKENS, HIDDEN, EXPERTS, TOP_K, FFN = 4096, 2048, 128, 8, 768
NUM_EMPTY = 8
FEW = 16  # tokens
REPEATS = 15
PROCESS_GROUP = "nccl"
FIELDS = (
    *("gpu", "torch", "cuda", "driver", "commit"),
    *(
        "routing",
        "cv",
        "empty_experts",
        "side",
        "weights",
        "forward_us",
        "us",
        "kept_mib",
        "weights_mib",
    ),
    *("to_te", "to_bf16", "kept_to_te", "kept_to_bf16", "error"),
)
# Relative error of the output that a side may have: 4-bit operands twice, or BF16 sums in another order.
QUANTIZED_ERROR, BF16_ERROR = 0.3, 0.02


@dataclass
class Side:
    """One layer. recipe: None for TE. kept_weights: quantised once, as in a step of several microbatches."""

    name: str
    recipe: str | None
    dataflow: str = "fused"
    bypass: bool = False
    recompute: bool = False
    kept_weights: bool = False
    layer: torch.nn.Module = field(init=False)

    def first_microbatch(self, first: bool) -> None:
        if self.recipe is None:
            return
        for linear in (self.layer.experts.linear_fc1, self.layer.experts.linear_fc2):
            linear.is_first_microbatch = first if self.kept_weights else None


SIDES = (
    Side("TE BF16", None),
    Side("bf16 unfused", "bf16", dataflow="unfused"),
    Side("bf16", "bf16"),
    Side("nvfp4_per_token, bypass", "nvfp4_per_token", bypass=True),
    Side("nvfp4_per_token, bypass", "nvfp4_per_token", bypass=True, kept_weights=True),
    Side("nvfp4_per_token_dequant_bwd", "nvfp4_per_token_dequant_bwd"),
    Side("nvfp4_per_token_dequant_bwd", "nvfp4_per_token_dequant_bwd", kept_weights=True),
    Side("nvfp4_per_token_dequant_bwd, moe_act", "nvfp4_per_token_dequant_bwd", recompute=True),
)


def rows(only: str) -> Iterator[dict[str, object]]:
    """A row for every routing and every side whose name contains `only`, the peers among them."""
    sides = [side for side in SIDES if only in side.name or side in SIDES[:2]]
    sides = [side for side in sides if side.recipe is not None or _has_te()]
    _start()
    for side in sides:
        side.layer = build(side)
        copy_weights(sides[0].layer, side.layer)
    x = torch.randn(TOKENS, 1, HIDDEN, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn_like(x)
    for routing, cv in (("balanced", 0.0), ("real-like", 0.19), ("concentrated", 0.66)):
        logits = logits_of(cv, NUM_EMPTY if cv > 0.5 else 0)
        for side in sides:
            side.layer.router.gating = _fixed(side.layer.router, logits)
        yield from measure(routing, logits, sides, x, grad)


def _has_te() -> bool:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return HAVE_TE


def _start() -> None:
    """A world of one rank, and Megatron's groups."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        dist.init_process_group(PROCESS_GROUP, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)


def build(side: Side) -> torch.nn.Module:
    """The side's layer, its main_grad in one block."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
    from megatron.core.transformer.transformer_config import TransformerConfig

    is_ours = side.recipe is not None
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=32,
        ffn_hidden_size=FFN,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_ffn_hidden_size=FFN,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=True,
        moe_permute_fusion=not is_ours,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=True,
        add_bias_linear=False,
        gradient_accumulation_fusion=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        transformer_impl="minite" if is_ours else "transformer_engine",
        **(recompute if side.recompute else {}),
    )
    if is_ours:
        from functools import partial

        from megatron_nvfp4.mcore import MiniTESpecProvider
        from megatron_nvfp4.mcore.moe import MiniTEMoELayer

        recipe = RECIPES[side.recipe]
        config.minite_policy = Policy(recipe=recipe.with_bypass() if side.bypass else recipe)
        config.minite_moe_dataflow = side.dataflow
        spec = get_moe_module_spec_for_backend(MiniTESpecProvider(), EXPERTS, True)
        layer = partial(MiniTEMoELayer, **spec.keywords)(config)
    else:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        layer = get_moe_module_spec_for_backend(TESpecProvider(), EXPERTS, True)(config)
    layer.cuda()
    for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
        weights = [weight for weight in linear.parameters() if weight.dim() == 2]
        memory = torch.zeros(len(weights), *weights[0].shape, device="cuda")
        for weight, main_grad in zip(weights, memory, strict=True):
            weight.main_grad = main_grad
    return layer


def copy_weights(source: torch.nn.Module, target: torch.nn.Module) -> None:
    known = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            parameter.copy_(known[name])


def logits_of(cv: float, num_empty: int) -> Tensor:
    """FP32 (T, E) whose top-k gives experts `cv` of rows: 0 exactly balanced, else to about two digits."""
    generator = torch.Generator().manual_seed(7)
    if cv == 0:
        first = torch.arange(TOKENS)[:, None] * TOP_K
        chosen = (first + torch.arange(TOP_K)) % EXPERTS
        noise = torch.rand(TOKENS, TOP_K, generator=generator)
        return torch.zeros(TOKENS, EXPERTS).scatter_(1, chosen, 8 + noise).cuda()
    uniform = torch.rand(TOKENS, EXPERTS, generator=generator).clamp(1e-6, 1 - 1e-6)
    noise, bias = -torch.log(-torch.log(uniform)), torch.randn(EXPERTS, generator=generator)
    bias[:num_empty] = -1e4
    noise, bias = noise.cuda(), bias.cuda()
    low, high = 0.0, 4.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if _cv(noise + middle * bias) < cv else (low, middle)
    return noise + high * bias


def _rows_per_expert(logits: Tensor) -> Tensor:
    return torch.bincount(logits.topk(TOP_K).indices.flatten(), minlength=EXPERTS).float()


def _cv(logits: Tensor) -> float:
    counts = _rows_per_expert(logits)
    return float(counts.std(correction=0) / counts.mean())


def _fixed(router: torch.nn.Module, logits: Tensor):
    """The router's product, computed as ever, then replaced, so that its gradient flows and is zero."""
    product = type(router).gating

    def gating(x: Tensor) -> Tensor:
        own = product(router, x)
        rows = logits[: own.numel() // EXPERTS].view(own.shape)
        return torch.addcmul(rows, own, torch.zeros((), device=own.device))

    return gating


def measure(
    routing: str, logits: Tensor, sides: list[Side], x: Tensor, grad: Tensor
) -> Iterator[dict[str, object]]:
    counts = _rows_per_expert(logits)
    fixed = machine() | {
        "routing": routing,
        "cv": round(_cv(logits), 3),
        "empty_experts": int((counts == 0).sum()),
    }
    expected = next(side for side in sides if side.name == "bf16 unfused").layer(x)[0].detach()
    errors = [check(side, x, expected) for side in sides]
    of_weights = [kept_bytes(side, x[:FEW]) for side in sides]
    kept = [kept_bytes(side, x) - of_weights[index] for index, side in enumerate(sides)]
    forwards, steps = [[] for _ in sides], [[] for _ in sides]
    for repeat in range(REPEATS + 3):
        for index, side in enumerate(sides):
            forward_us, both_us = step_us(side, x, grad)
            if repeat >= 3:
                forwards[index].append(forward_us)
                steps[index].append(both_us)
    times = [statistics.median(values) for values in steps]
    by_name = {side.name: index for index, side in enumerate(sides)}
    te, bf16 = by_name.get("TE BF16"), by_name["bf16 unfused"]
    for index, side in enumerate(sides):
        yield fixed | {
            "side": side.name,
            "weights": "kept" if side.kept_weights else "new",
            "forward_us": round(statistics.median(forwards[index]), 1),
            "us": round(times[index], 1),
            "kept_mib": round(kept[index] / 2**20, 1),
            "weights_mib": round(of_weights[index] / 2**20, 1),
            "to_te": "" if te is None else round(times[te] / times[index], 2),
            "to_bf16": round(times[bf16] / times[index], 2),
            "kept_to_te": "" if te is None else round(kept[index] / kept[te], 3),
            "kept_to_bf16": round(kept[index] / kept[bf16], 3),
            "error": f"{errors[index]:.1e}",
        }


def step_us(side: Side, x: Tensor, grad: Tensor) -> tuple[float, float]:
    """Microseconds of a forward, and of it and its backward, between events."""
    side.first_microbatch(False)
    side.layer.zero_grad(set_to_none=True)
    x.grad = None
    begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize()
    begin.record()
    y = side.layer(x)[0]
    middle.record()
    y.backward(grad)
    end.record()
    end.synchronize()
    return begin.elapsed_time(middle) * 1e3, begin.elapsed_time(end) * 1e3


def check(side: Side, x: Tensor, expected: Tensor) -> float:
    """Relative error of the side's output; a first pass that quantises its weights."""
    side.first_microbatch(True)
    y = side.layer(x)[0].detach()
    error = float((y - expected).float().norm() / expected.float().norm())
    bound = QUANTIZED_ERROR if "nvfp4" in side.name else BF16_ERROR
    assert error < bound, f"{side.name}: relative error {error:.1e} of the output, at most {bound}"
    return error


def kept_bytes(side: Side, x: Tensor) -> int:
    """Bytes that autograd keeps between forward and backward, each storage once, without weights and x."""
    known = {t.untyped_storage().data_ptr() for t in (x, *side.layer.parameters())}
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage
        return tensor

    side.first_microbatch(False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = side.layer(x)[0]
    del y
    return sum(storage.nbytes() for storage in storages.values())
