"""Runs what sglang_rl_fsdp takes of the Triton kernels in Triton's interpreter, beside those of
deterministic_interpreted, which sets it up and is checked first."""

import torch
from deterministic_interpreted import agree, check_logprobs, draw

from megatron_nvfp4.deterministic.kernels import norm, rope
from megatron_nvfp4.deterministic.ops import norm as norm_op
from megatron_nvfp4.deterministic.ops import rope as rope_op

weight = draw(1536).float() * 1.001
for x in (draw(3, 1536), draw(3, 1536).float() * 1.001):
    y = norm.rms_norm_fp32(x, weight, 1e-6)
    want = norm_op.rms_norm_fp32(x, weight, 1e-6)
    assert y.dtype == want.dtype == torch.float32
    # FP32 throughout, or the interpreter's truncation to BF16 of the heads.
    agree("rms_norm_fp32", y, want, 1e-6 if x.dtype == torch.float32 else 1e-2)

y = norm.rms_norm_fp32(draw(3, 1536), torch.ones(1536), 1e-6)
assert torch.equal(y, y.bfloat16().float()), "heads are not rounded before the weight"

x, residual = draw(3, 1536), draw(3, 1536).float() * 1.001
y, stream = norm.add_rms_norm(x, residual, weight, 1e-6)
want, want_stream = norm_op.add_rms_norm(x, residual, weight, 1e-6)
assert torch.equal(stream, want_stream), "the FP32 stream is rounded"
agree("add_rms_norm", y, want)

table, positions = rope_op.rope_table(64, 1e4, 64, "cpu"), torch.tensor([0, 1, 63, 5])
x = draw(4, 3, 64).float() * 1.001
for sign, dtype in ((1.0, torch.float32), (1.0, torch.bfloat16), (-1.0, torch.float32)):
    got = rope.rotate(x, table, positions, sign, dtype)
    assert got.dtype == dtype
    want = rope_op._rotated(x, table, positions, sign, dtype)
    agree("rope", got, want, 1e-6 if dtype == torch.float32 else 1e-2)

check_logprobs(torch.bfloat16)
print("4 forms agree")
