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
    attention,
    attention_backward,
    experts,
    logprobs,
    norm,
    rope,
    router,
)
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
    y, weights, places = torch.randn(12, 64), torch.rand(3, 4), torch.randperm(12).view(3, 4)
    agree("combine", experts.combine(y, weights, places), experts_op._combine(y, weights, places))
    agree("combine", experts.combine(y, None, places), experts_op._combine(y, None, places))
    logits, tokens = torch.randn(3, 2500), torch.tensor([0, 2499, 1024])
    parts = (logprobs.token_logprobs(logits, tokens), logprobs_op._logprobs_ref(logits, tokens))
    for got, want in zip(*parts, strict=True):
        agree("logprobs", got, want, 1e-6)


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
print("9 kernels agree")
