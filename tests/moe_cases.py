"""Experts by the fused dataflow and by its parts, which the tests of the dataflow hold beside each other."""

import dataclasses

import torch
from layer_oracle import SEED

from megatron_nvfp4.modules import GroupedLinear
from megatron_nvfp4.modules.expert_matmul import ExpertMatmul
from megatron_nvfp4.modules.moe import ExpertDataflow
from megatron_nvfp4.quant import dispatch, swiglu

HIDDEN, FFN, NUM_EXPERTS, TOP_K = 64, 32, 5, 3


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, routing):
        ctx.routing = routing
        return dispatch.gather_rows(x, routing.token_of_row)

    @staticmethod
    def backward(ctx, grad):
        return dispatch.combine_rows(grad, ctx.routing.rows_of_token), None


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, probs, kind):
        ctx.save_for_backward(h, probs)
        ctx.kind = kind
        return swiglu.weighted_activation(h, probs, kind)

    @staticmethod
    def backward(ctx, grad):
        return *swiglu.weighted_activation_backward(grad, *ctx.saved_tensors, ctx.kind), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, routing):
        ctx.routing = routing
        return dispatch.combine_rows(rows, routing.rows_of_token)

    @staticmethod
    def backward(ctx, grad):
        return dispatch.gather_rows(grad, ctx.routing.token_of_row), None


def routing_of(experts: torch.Tensor) -> dispatch.Routing:
    """The definition's, cut to the rows that there are."""
    routing = dispatch.route(experts, NUM_EXPERTS)
    num_rows = int(routing.offsets[-1])
    return dataclasses.replace(
        routing,
        token_of_row=routing.token_of_row[:num_rows],
        slot_of_row=routing.slot_of_row[:num_rows],
    )


def unfused(x, experts, probs, fc1, fc2, kind="swiglu"):
    """The same experts by their parts: rows permuted, then quantised by the layers themselves."""
    routing = routing_of(experts)
    splits = routing.offsets.diff()
    h = fc1(_Gather.apply(x, routing), splits)
    prob_rows = probs[routing.token_of_row, routing.slot_of_row]
    return _Combine.apply(fc2(_Activate.apply(h, prob_rows, kind), splits), routing)


def fused(x, experts, probs, fc1, fc2, top_k=None, **options):
    matmuls = (ExpertMatmul.of(linear, x) for linear in (fc1, fc2))
    return ExpertDataflow(**options)(x, experts, probs, *matmuls, top_k=top_k)


def layers(params, num_experts=NUM_EXPERTS, device="cpu", hidden=HIDDEN, ffn=FFN, **fields):
    """fc1 and fc2 with reproducible weights, some 30 times larger than others."""
    fields = {"params_dtype": torch.bfloat16, "device": device, "bias": False} | fields
    made = []
    for k, n in ((hidden, 2 * ffn), (ffn, hidden)):
        layer = GroupedLinear(num_experts, k, n, qlinear_params=params, **fields)
        generator = torch.Generator().manual_seed(k)
        with torch.no_grad():
            for index, weight in enumerate(layer.weights):
                weight.copy_(torch.randn(n, k, generator=generator) * 0.1 * (1 + index**2))
        made.append(layer)
    return made


def random_experts(num_tokens: int, top_k: int = TOP_K, seed: int = 0) -> torch.Tensor:
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=torch.Generator().manual_seed(seed))
    return scores.topk(top_k).indices


def random_probs(experts: torch.Tensor) -> torch.Tensor:
    return torch.rand(experts.shape, generator=torch.Generator().manual_seed(3))


def step(call, x, experts, probs, linears, **options):
    """Output and all gradients of one step, by name."""
    torch.manual_seed(SEED)
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    for linear in linears:
        linear.zero_grad()
    y = call(x, experts, probs, *linears, **options)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(y)
    y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad}
    for name, linear in zip(("fc1", "fc2"), linears, strict=True):
        found |= {f"{name}.{key}": weight.grad for key, weight in linear.named_parameters()}
    return found


def assert_same_bits(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not wrong
