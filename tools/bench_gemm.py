"""`bench.py gemm` and `bench.py module`: GEMMs beside the framework's best, and modules beside TE's.

Both sides of a GEMM run as CUDA graphs in one process, over weights that no cache holds; every result is
compared with the peer's on decoded operands before it is timed. Rows are split over experts at random in
0.5 to 1.5 of the mean.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from bench import CACHE_BYTES, TENSOR, TOKEN, graph_us, machine
from torch import Tensor

from megatron_nvfp4.backends import PackedWeights, cuda, cuda_gemm
from megatron_nvfp4.modules import GroupedLinear, QLinearParams
from megatron_nvfp4.quant import QuantizedTensor
from megatron_nvfp4.recipes import RECIPES

FC1, FC2 = (1536, 2048), (2048, 768)
FIELDS = (
    *("gpu", "torch", "cuda", "driver", "commit"),
    *("op", "groups", "rows", "n", "k", "us", "tflops", "peer", "peer_us", "ratio", "goal"),
)
MODULE_FIELDS = (
    *("gpu", "torch", "cuda", "driver", "commit"),
    *("op", "recipe", "weights", "groups", "rows", "n", "k", "us", "peer", "peer_us", "ratio"),
)
MODULE_RECIPES = (("bf16", "-"), ("nvfp4_per_token", "kept"), ("nvfp4_per_token", "new"))
Calls = list[Callable[[], object]]


@dataclass(frozen=True)
class Case:
    """One product: `groups` experts share `rows` rows; weights (N, K) = shape. goal: wanted ratio."""

    op: str
    groups: int
    rows: int
    shape: tuple[int, int]
    goal: float | None = None


CASES = (
    *(
        Case("forward", 128, m, s, g)
        for m, g in ((1024, 3.6), (4096, 2.8), (8192, 2.0))
        for s in (FC1, FC2)
    ),
    *(Case("forward", 32, 8192, s, 1.35) for s in (FC1, FC2)),
    *(Case("forward", 128, 32768, s, 1.2) for s in (FC1, FC2)),
    *(Case("forward", g, m, s, 1.0) for g, m in ((128, 131072), (32, 32768)) for s in (FC1, FC2)),
    Case("forward", 1, 4096, (6144, 2048), 1.0),
    Case("forward", 1, 256, (6144, 2048), 0.8),
    Case("forward", 1, 32, (6144, 2048), 0.8),
    Case("forward w4a16", 128, 32768, FC1),
    Case("forward bf16", 128, 32768, FC1),
    *(Case("dgrad", 128, 32768, s, 1.2) for s in (FC1, FC2)),
    Case("dgrad", 128, 131072, FC1),
    Case("dgrad", 32, 32768, FC1),
    *(Case("wgrad", 128, 32768, s, 1.3) for s in (FC1, FC2)),
    Case("wgrad", 128, 131072, FC1),
    *(Case("wgrad main_grad", 128, 32768, s, 2.0) for s in (FC1, FC2)),
    Case("wgrad main_grad", 128, 131072, FC1),
    Case("expert forward", 128, 32768, FC1, 1.15),
    Case("expert forward", 128, 4096, FC1, 2.5),
)
TOP_K = 8
MODULE_CELLS = tuple(
    (groups, rows, shape)
    for groups, rows in ((32, 8192), (32, 32768), (128, 8192), (128, 32768), (128, 131072))
    for shape in (FC1, FC2)
)


def random_splits(groups: int, rows: int) -> Tensor:
    """Rows of every group: 0.5 to 1.5 of the mean, multiples of 16 where the mean allows it."""
    weight = torch.rand(groups, generator=torch.Generator().manual_seed(groups + rows)) + 0.5
    unit = 16 if rows // groups >= 32 else 1
    exact = weight / weight.sum() * (rows // unit)
    sizes = exact.floor().long()
    sizes[: rows // unit - int(sizes.sum())] += 1
    return sizes * unit


def offsets_of(splits: Tensor) -> Tensor:
    return torch.nn.functional.pad(splits.cumsum(0), (1, 0)).cuda()


def num_sets(num_bytes: int) -> int:
    return max(1, min(16, CACHE_BYTES // num_bytes + 1))


def random_weights(groups: int, shape: tuple[int, int]) -> Tensor:
    return torch.randn(groups, *shape, dtype=torch.bfloat16, device="cuda")


def packed(weights: Tensor) -> PackedWeights:
    groups, num_rows, _ = weights.shape
    offsets = torch.arange(groups + 1, device="cuda") * num_rows
    quantized = cuda.BACKEND.quantize(weights.flatten(0, 1), TENSOR, offsets=offsets)
    return cuda_gemm.pack_weights(quantized, groups)


def bf16_calls(x: Tensor, weights: list[Tensor], offsets: Tensor) -> dict[str, Calls]:
    """The framework's products x w^T: grouped, and where there is one group also plain."""
    ends = offsets[1:].int()
    calls = {
        "torch._grouped_mm": [
            lambda w=w: torch._grouped_mm(x, w.transpose(1, 2), offs=ends) for w in weights
        ]
    }
    if len(ends) == 1:
        calls["torch.mm"] = [lambda w=w: torch.mm(x, w[0].t()) for w in weights]
    return calls


def forward(case: Case) -> tuple[Calls, dict[str, Calls]]:
    offsets = offsets_of(random_splits(case.groups, case.rows))
    k, num = case.shape[1], num_sets(case.groups * math.prod(case.shape) // 2)
    x = torch.randn(case.rows, k, dtype=torch.bfloat16, device="cuda")
    originals = [random_weights(case.groups, case.shape) for _ in range(min(num, 4))]
    if case.op == "forward bf16":
        ours = [
            lambda w=w: cuda.BACKEND.grouped_gemm(x, w, offsets, out_dtype=torch.bfloat16)
            for w in originals
        ]
        check(ours[0](), bf16_calls(x, originals, offsets)["torch._grouped_mm"][0]())
        return ours, bf16_calls(x, originals, offsets)
    a = x if case.op.endswith("w4a16") else cuda.BACKEND.quantize(x, TOKEN)
    operands = [packed(originals[i % len(originals)]) for i in range(num)]
    check_forward(a, operands[0], offsets)
    ours = [
        lambda b=b: cuda.BACKEND.grouped_gemm(a, b, offsets, out_dtype=torch.bfloat16)
        for b in operands
    ]
    return ours, bf16_calls(x, originals, offsets)


def check_forward(a: Tensor | QuantizedTensor, b: PackedWeights, offsets: Tensor) -> None:
    """Without outer scales our product is the framework's on the decoded operands, bit for bit."""
    decoded = cuda_gemm.decode(b).reshape(-1, b.num_rows, b.num_cols)
    x = cuda_gemm.decode(a)
    peer = torch._grouped_mm(x, decoded.transpose(1, 2), offs=offsets[1:].int())
    unit = torch.ones_like(b.outer_scale)
    bare = a if isinstance(a, Tensor) else replace(a, amax=torch.full_like(a.amax, 2688.0))
    ours = cuda.BACKEND.grouped_gemm(
        bare, replace(b, outer_scale=unit), offsets, out_dtype=torch.bfloat16
    )
    check(ours, peer)


def check(ours: Tensor, peer: Tensor) -> None:
    if not torch.equal(ours, peer):
        share = (ours != peer).float().mean().item()
        raise RuntimeError(f"{share:.2e} of the outputs differ from the peer's; not timed")


def dgrad(case: Case) -> tuple[Calls, dict[str, Calls]]:
    offsets = offsets_of(random_splits(case.groups, case.rows))
    ends = offsets[1:].int()
    grad = torch.randn(case.rows, case.shape[0], dtype=torch.bfloat16, device="cuda")
    weights = [random_weights(case.groups, case.shape) for _ in range(2)]

    def ours(w: Tensor) -> Tensor:
        return cuda.BACKEND.grouped_gemm(
            grad, w, offsets, out_dtype=torch.bfloat16, transposed=True
        )

    check(ours(weights[0]), torch._grouped_mm(grad, weights[0], offs=ends))
    return [lambda w=w: ours(w) for w in weights], {
        "torch._grouped_mm": [lambda w=w: torch._grouped_mm(grad, w, offs=ends) for w in weights]
    }


def wgrad(case: Case) -> tuple[Calls, dict[str, Calls]]:
    offsets = offsets_of(random_splits(case.groups, case.rows))
    ends, (n, k) = offsets[1:].int(), case.shape
    grad = torch.randn(case.rows, n, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(case.rows, k, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(case.groups, n, k, dtype=torch.bfloat16, device="cuda")
    cuda.BACKEND.grouped_wgrad(grad.t(), x.t(), offsets, out=out.unbind(), accumulate=False)
    check(out, torch._grouped_mm(grad.t(), x, offs=ends))
    if case.op == "wgrad":
        ours = [
            lambda: cuda.BACKEND.grouped_wgrad(
                grad.t(), x.t(), offsets, out=out.unbind(), accumulate=False
            )
        ]
        return ours, {"torch._grouped_mm": [lambda: torch._grouped_mm(grad.t(), x, offs=ends)]}
    main_grad = torch.zeros(case.groups, n, k, device="cuda")
    ours = [
        lambda: cuda.BACKEND.grouped_wgrad(
            grad.t(), x.t(), offsets, out=main_grad.unbind(), accumulate=True
        )
    ]
    peer = [lambda: main_grad.add_(torch._grouped_mm(grad.t(), x, offs=ends))]
    return ours, {"torch._grouped_mm + add_": peer}


def expert_forward(case: Case) -> tuple[Calls, dict[str, Calls]]:
    """Tokens to FC2's output: gather, FC1, SwiGLU with the router's weight, FC2; ours quantises twice."""
    tokens, (n, k) = case.rows // TOP_K, case.shape
    splits = random_splits(case.groups, case.rows)
    offsets, ends = offsets_of(splits), offsets_of(splits)[1:].int()
    x = torch.randn(tokens, k, dtype=torch.bfloat16, device="cuda")
    index = torch.randint(tokens, (case.rows,), device="cuda", dtype=torch.int32)
    probs = torch.rand(case.rows, device="cuda")
    w1, w2 = random_weights(case.groups, case.shape), random_weights(case.groups, (k, n // 2))
    p1, p2 = packed(w1), packed(w2)

    def ours() -> Tensor:
        quantized = cuda.BACKEND.quantize(x, TOKEN)
        h = cuda_gemm.grouped_gemm(
            quantized, p1, offsets, None, torch.bfloat16, False, row_index=index
        )
        return cuda.BACKEND.grouped_gemm(
            cuda.swiglu_quantize(h, probs, fast_math=True), p2, offsets, out_dtype=torch.bfloat16
        )

    @torch.compile
    def swiglu(h: Tensor, probs: Tensor) -> Tensor:
        gate, up = h.float().chunk(2, dim=1)
        return (torch.nn.functional.silu(gate) * up * probs[:, None]).bfloat16()

    def peer() -> Tensor:
        h = torch._grouped_mm(x[index], w1.transpose(1, 2), offs=ends)
        return torch._grouped_mm(swiglu(h, probs), w2.transpose(1, 2), offs=ends)

    return [ours], {"gather + _grouped_mm + SwiGLU + _grouped_mm": [peer]}


_MAKERS = {"dgrad": dgrad, "wgrad": wgrad, "expert": expert_forward, "forward": forward}


def rows(only: str) -> Iterator[dict[str, object]]:
    """A row for every case whose op contains `only`."""
    fixed = machine()
    for case in CASES:
        if only in case.op:
            torch.cuda.empty_cache()
            yield fixed | measure(case)


def measure(case: Case) -> dict[str, object]:
    ours, peers = _MAKERS[case.op.split()[0]](case)
    us = graph_us(ours)
    times = {name: graph_us(calls) for name, calls in peers.items()}
    peer = min(times, key=times.get)
    n, k = case.shape
    work = 2 * case.rows * n * k * (1.5 if case.op.startswith("expert") else 1)
    return {
        "op": case.op,
        "groups": case.groups,
        "rows": case.rows,
        "n": n,
        "k": k,
        "us": round(us, 1),
        "tflops": round(work / us / 1e6),
        "peer": peer,
        "peer_us": round(times[peer], 1),
        "ratio": round(times[peer] / us, 2),
        "goal": case.goal or "",
    }


def module_rows(only: str) -> Iterator[dict[str, object]]:
    """GroupedLinear forward and backward beside TE's in BF16, eager on both sides, and the mean ratio."""
    import transformer_engine.pytorch as te

    fixed, ratios = machine(), {}
    for (groups, num_rows, shape), fused in product(MODULE_CELLS, (False, True)):
        op = "forward + backward" + " into main_grad" * fused
        if only not in op:
            continue
        torch.cuda.empty_cache()
        n, k = shape
        splits = random_splits(groups, num_rows).tolist()
        x = torch.randn(num_rows, k, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        grad = torch.randn(num_rows, n, dtype=torch.bfloat16, device="cuda")
        common = {"params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": fused, "bias": False}
        peer = te.GroupedLinear(groups, k, n, **common)
        peer_us = step_us(peer, x, splits, grad)
        del peer
        for recipe, weights in MODULE_RECIPES:
            params = QLinearParams(recipe=RECIPES[recipe].with_bypass())
            layer = GroupedLinear(groups, k, n, qlinear_params=params, **common)
            if weights == "kept":
                layer(x, splits, is_first_microbatch=True)
            us = step_us(layer, x, splits, grad, False if weights == "kept" else None)
            ratios.setdefault((op, recipe, weights), []).append(peer_us / us)
            yield fixed | {
                "op": op,
                "recipe": f"{recipe}, BF16 backward",
                "weights": weights,
                "groups": groups,
                "rows": num_rows,
                "n": n,
                "k": k,
                "us": round(us, 1),
                "peer": "TE GroupedLinear BF16",
                "peer_us": round(peer_us, 1),
                "ratio": round(peer_us / us, 2),
            }
            del layer
    for (op, recipe, weights), values in ratios.items():
        mean = math.exp(statistics.fmean(map(math.log, values)))
        yield fixed | {
            "op": f"geometric mean, {op}",
            "recipe": recipe,
            "weights": weights,
            "ratio": round(mean, 2),
        }


def step_us(layer, x: Tensor, splits: list[int], grad: Tensor, first: bool | None = None) -> float:
    """Median microseconds of a forward and backward, host time included, gradients left in place.

    With fuse_wgrad_accumulation weight gradients are added to FP32 `main_grad`, in one block as in Megatron.
    """
    weights = [parameter for parameter in layer.parameters() if parameter.dim() == 2]
    if layer.fuse_wgrad_accumulation:
        shape = (len(weights), *weights[0].shape)
        for weight, main_grad in zip(weights, torch.zeros(shape, device="cuda"), strict=True):
            weight.main_grad = main_grad
    times = []
    for _ in range(9):
        layer.zero_grad(set_to_none=True)
        x.grad = None
        torch.cuda.synchronize()
        begin = time.perf_counter()
        y = layer(x, splits, is_first_microbatch=first)
        y.backward(grad)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times[2:])
