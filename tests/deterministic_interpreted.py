"""Runs the Triton kernels in Triton's interpreter on a CPU and compares them with the torch definitions.

A script of its own: the interpreter is chosen before triton is imported. It truncates to BF16, so values are
compared to that; attention runs in FP32, which it multiplies right.
"""

import builtins
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.runtime.interpreter as interpreter
from torch import Tensor


class _Integers(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, builtins.int)


class _Integer(builtins.int, metaclass=_Integers):
    """int that takes an array of one element, as numpy before 2.4 let it."""

    def __new__(cls, value=0):
        return builtins.int(value.item() if hasattr(value, "item") else value)


interpreter.int = _Integer

from megatron_nvfp4.deterministic.kernels import (  # noqa: E402
    activation,
    attention,
    attention_backward,
    experts,
    logprobs,
    norm,
    rope,
    router,
)
from megatron_nvfp4.deterministic.ops import activation as activation_op  # noqa: E402
from megatron_nvfp4.deterministic.ops import attention as attention_op  # noqa: E402
from megatron_nvfp4.deterministic.ops import experts as experts_op  # noqa: E402
from megatron_nvfp4.deterministic.ops import logprobs as logprobs_op  # noqa: E402
from megatron_nvfp4.deterministic.ops import norm as norm_op  # noqa: E402
from megatron_nvfp4.deterministic.ops import rope as rope_op  # noqa: E402
from megatron_nvfp4.deterministic.ops import router as router_op  # noqa: E402

generator = torch.Generator().manual_seed(0)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).bfloat16()


def agree(name: str, got: Tensor, want: Tensor, tolerance: float = 1e-2) -> None:
    error = (got.float() - want.float()).norm() / want.float().norm()
    assert error < tolerance, f"{name} is off by {error:.2e}"


def check_norm_gradients() -> None:
    weight, wide = draw(128), draw(70, 3, 128)
    heads = draw(70, 9, 128)[:, 2:5]  # a slice, as of queries, keys and values side by side
    agree(
        "rms_norm of heads",
        norm.rms_norm(heads, weight, 1e-6),
        norm_op.rms_norm(heads, weight, 1e-6),
    )
    got = norm.norm_gradients(wide, heads, weight, 1e-6)
    for a, b in zip(got, norm_op._gradients(wide, heads, weight, 1e-6), strict=True):
        agree("gradients of rms_norm", a, b)
    x, residual, weight, grad, stream = (
        draw(*s) for s in ((600, 96),) * 2 + ((96,),) + ((600, 96),) * 2
    )
    for dtype in (torch.bfloat16, torch.float32):
        args = (grad, x, weight, 1e-6, residual.to(dtype), stream.to(dtype))
        got, want = norm.norm_gradients(*args), norm_op._gradients(*args)
        assert got[1].dtype == dtype
        for a, b in zip(got, want, strict=True):
            agree("gradients of add_rms_norm", a, b)


def check_logprobs(rounding: torch.dtype) -> None:
    """Logits in FP32, which the interpreter rounds right, and those that the kernel rounds by itself."""
    is_rounded = rounding == torch.bfloat16
    logits = torch.randn(3, 5500).bfloat16().float()
    tokens, temperature = torch.tensor([0, 5499, 1024]), torch.tensor([1.0, 0.7, 2.0])
    rescaled = logprobs_op._rescaled(logits, temperature, rounding)
    want = logprobs_op._logprobs_ref(rescaled, tokens)
    got = logprobs.token_logprobs(logits, temperature, tokens, is_rounded)
    for a, b in zip(got, want, strict=True):
        agree("logprobs", a, b, 1e-2 if is_rounded else 1e-6)
    args = (logits, temperature, tokens, *want[1:], torch.randn(3))
    slope = logprobs.grad_logits(*args, is_rounded)
    agree("gradients of logits", slope, logprobs_op._grad_logits_ref(*args, rounding), 1e-2)
    if is_rounded:
        assert torch.equal(got[0], got[0].bfloat16().float()), "FP32 log-probabilities"


def check_gradients_of_experts() -> None:
    x, grad = draw(5, 2 * 1100), draw(5, 1100)
    want = activation_op.silu_and_mul_backward(grad, x)
    agree("gradient of silu_and_mul", activation.silu_and_mul_backward(grad, x), want)
    ids = torch.tensor([[3, 0], [9, 3], [1, 0]])  # 9: an expert that stands elsewhere
    order, weights = experts_op._Order.of(ids, 4), torch.rand(3, 2)
    assert order.tokens.tolist() == [0, 2, 2, 0, 1, -1]
    inner, h = draw(6, 1100), draw(6, 2200)
    want = experts_op._activation_backward(inner, h, weights, order)
    got = experts.activation_backward(inner, h, weights, order.tokens, order.slots)
    assert got[2][1, 0] == 0
    for a, b in zip(got, want, strict=True):
        rows = slice(0, 5) if a.shape[0] == 6 else slice(None)
        agree("gradients between the products of experts", a[rows], b[rows])


def check_rows() -> None:
    x, residual, weight = draw(3, 1536), draw(3, 1536), draw(1536)
    agree("rms_norm", norm.rms_norm(x, weight, 1e-6), norm_op.rms_norm(x, weight, 1e-6))
    sums = zip(
        norm.add_rms_norm(x, residual, weight, 1e-6),
        norm_op.add_rms_norm(x, residual, weight, 1e-6),
        strict=False,
    )
    for got, want in sums:
        agree("add_rms_norm", got, want)
    check_norm_gradients()
    table, positions = rope_op.rope_table(64, 1e4, 64, "cpu"), torch.tensor([0, 1, 63, 5])
    x = draw(4, 3, 64)
    for sign in (1.0, -1.0):
        want = rope_op._rotated(x, table, positions, sign)
        agree("rope", rope.rotate(x, table, positions, sign), want)
    logits = draw(5, 12)
    logits[0], logits[1, 3] = 0, logits[1, 7]
    for renormalize in (True, False):
        weights, ids = router.route(logits, 4, renormalize)
        want_weights, want_ids = router_op._route_ref(logits, 4, renormalize)
        assert torch.equal(ids, want_ids), "route chooses other experts"
        agree("route", weights, want_weights, 1e-6)
    check_logprobs(torch.float32)
    check_gradients_of_experts()


def check_attention() -> None:
    batch = attention_op.PackedBatch.of((3, 70, 255), (3, 72, 258), "cpu")
    q, grad = draw(333, 4, 64).float(), draw(333, 4, 64).float()
    k, v = draw(333, 2, 64).float(), draw(333, 2, 64).float()
    out, lse = attention.attend(q, k, v, batch, 0.125)
    want, want_lse = attention_op._attend_ref(q, k, v, batch, 0.125)
    agree("attention", out, want, 1e-6)
    agree("log-sum-exp", lse, want_lse, 1e-6)
    got = attention_backward.attend_backward(q, k, v, out, lse, grad, batch, 0.125)
    want = attention_op._attend_backward_ref(q, k, v, out, lse, grad, batch, 0.125)
    for a, b in zip(got, want, strict=True):
        agree("attention's gradients", a, b, 1e-6)


check_rows()
check_attention()
print("14 kernels agree")
