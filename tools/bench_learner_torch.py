"""`pretrain` whose experts are multiplied by torch._grouped_mm: the framework's side of `bench.py learner`.

    python tools/bench_learner_torch.py MEGATRON'S FLAGS --transformer-impl minite --minite-config FILE

For recipe bf16 on the fused expert dataflow. Routing, gathers, activation, combination, attention, output
layer and optimizer are the project's and Megatron's as in `pretrain`; the experts' products alone change:

    forward  rows (M, K), weights (G, N, K)    _grouped_mm(rows, weights^T)
    dgrad    grad (M, N), weights (G, N, K)    _grouped_mm(grad, weights)
    wgrad    grad (M, N), rows (M, K)          main_grad (G, N, K) FP32 += _grouped_mm(grad^T, rows) in BF16

The group boundaries stay on the device. Nothing is stacked: Megatron's buffers hold parameters last first, so
the experts are registered last first, and their weights and their main_grads are one (G, N, K) each, read and
written where they lie; RuntimeError where they are not. Rows that belong to no expert, as after dropped
choices, are left unwritten by _grouped_mm: not for such runs.

An empty expert's gradient must be zero, which _grouped_mm gets wrong on some GPUs
(https://github.com/pytorch/pytorch/issues/172439): RuntimeError there, before training. Ends with
RuntimeError if a kind of product was never computed, so that no other dataflow is measured under this name.
In run_meta.json the products stand under the backend whose place this one takes.
"""

import sys
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_nvfp4.backends import Backend, Matrices
from megatron_nvfp4.modules import GroupedLinear, matmul
from megatron_nvfp4.recipes import BF16, FORWARD

KINDS = ("forward", "dgrad", "wgrad")
# Rows of three experts, the first and the last empty, and an expert of the benchmark's model.
EMPTY_SPLITS, EMPTY_SHAPE = (0, 64, 0), (1536, 2048)


class GroupedMM:
    """A backend whose products of several BF16 groups are torch._grouped_mm's; all else is `backend`'s."""

    def __init__(self, backend: Backend, calls: Counter) -> None:
        self._backend, self._calls = backend, calls
        self._offsets: Tensor | None = None
        self._ends: Tensor | None = None

    def __getattr__(self, name: str):
        return getattr(self._backend, name)

    def grouped_gemm(
        self,
        a: Tensor,
        b: Matrices,
        offsets: Tensor,
        *,
        bias: Tensor | None = None,
        out_dtype: torch.dtype,
        transposed: bool = False,
    ) -> Tensor:
        """See Backend; a and b BF16."""
        assert bias is None, "the expert dataflow has no biases"
        self._calls["dgrad" if transposed else "forward"] += 1
        weights = block_of(b)
        weights = weights if transposed else weights.transpose(1, 2)
        return torch._grouped_mm(a, weights, offs=self._ends_of(offsets)).to(out_dtype)

    def grouped_wgrad(
        self, a: Tensor, b: Tensor, offsets: Tensor, *, out: Matrices, accumulate: bool
    ) -> None:
        """See Backend; a and b BF16. A dense layer's, one group, stays `backend`'s."""
        if offsets.numel() == 2:
            self._backend.grouped_wgrad(a, b, offsets, out=out, accumulate=accumulate)
            return
        self._calls["wgrad"] += 1
        grad = torch._grouped_mm(a, b.t(), offs=self._ends_of(offsets))
        target = block_of(out)
        if accumulate:
            target.add_(grad)
        else:
            target.copy_(grad)

    def _ends_of(self, offsets: Tensor) -> Tensor:
        """The int32 ends of the groups, made once for the products that share `offsets`."""
        if self._offsets is not offsets:
            self._offsets, self._ends = offsets, offsets[1:].to(torch.int32)
        return self._ends


def block_of(matrices: Matrices) -> Tensor:
    """G matrices (N, K) that follow each other in one storage as one (G, N, K), or RuntimeError."""
    if isinstance(matrices, Tensor):
        return matrices
    first, num_bytes = matrices[0], matrices[0].numel() * matrices[0].element_size()
    begin = first.data_ptr()
    ends = begin - first.untyped_storage().data_ptr() + len(matrices) * num_bytes
    fits = first.is_contiguous() and ends <= first.untyped_storage().nbytes()
    addresses = [matrix.data_ptr() for matrix in matrices]
    if not fits or addresses != [begin + i * num_bytes for i in range(len(matrices))]:
        raise RuntimeError(
            f"{len(matrices)} experts' matrices {tuple(first.shape)} do not follow each other in memory; "
            "train without frozen experts and without overlapped gradient reduction"
        )
    return first.as_strided((len(matrices), *first.shape), (first.numel(), *first.stride()))


def install() -> Counter:
    """From now on this process multiplies experts by torch._grouped_mm; returns its calls by KINDS."""
    calls: Counter = Counter()
    backends: dict[str, GroupedMM] = {}
    selected, built = matmul.select_gemm, GroupedLinear.__init__

    def select_gemm(op, formats, shape, device, params, dtype):
        backend = selected(op, formats, shape, device, params, dtype)
        is_plain = all(spec in (BF16, FORWARD) for spec in formats) and dtype == torch.bfloat16
        if not is_plain or op not in ("grouped_gemm", "grouped_wgrad"):
            return backend
        return backends.setdefault(backend.name, GroupedMM(backend, calls))

    def build(self, *args, **kwargs) -> None:
        built(self, *args, **kwargs)
        parameters = list(self._parameters.items())
        self._parameters.clear()
        self._parameters.update(reversed(parameters))

    matmul.select_gemm, GroupedLinear.__init__ = select_gemm, build
    return calls


def check_empty_groups(device: torch.device | str) -> None:
    """RuntimeError if torch._grouped_mm gives an empty group a weight gradient other than zero."""
    (num_rows, num_cols), num_groups = EMPTY_SHAPE, len(EMPTY_SPLITS)
    ends = torch.tensor(EMPTY_SPLITS, device=device).cumsum(0).to(torch.int32)
    options = {"dtype": torch.bfloat16, "device": device}
    grad, rows = (torch.ones(sum(EMPTY_SPLITS), size, **options) for size in EMPTY_SHAPE)
    # Freed at once: the allocator gives this memory to the product, so that what is not written shows.
    torch.full((num_groups, num_rows, num_cols), float("nan"), **options)
    found = torch._grouped_mm(grad.t(), rows, offs=ends)
    expected = torch.tensor(EMPTY_SPLITS, **options)[:, None, None].expand_as(found)
    if not torch.equal(found, expected):
        raise RuntimeError(
            f"torch._grouped_mm of torch {torch.__version__} on {device}: weight gradients of groups of "
            f"{EMPTY_SPLITS} rows are wrong; measure on another GPU or with another torch"
        )


def check_calls(calls: Counter) -> None:
    """RuntimeError unless every kind of product was computed here."""
    if missing := [kind for kind in KINDS if not calls[kind]]:
        raise RuntimeError(
            f"torch._grouped_mm computed no {', '.join(missing)}: train several experts with recipe bf16 "
            "on the fused dataflow, see --minite-moe-dataflow"
        )


def main(argv: list[str]) -> None:
    if torch.cuda.is_available():
        check_empty_groups("cuda")
        torch.cuda.empty_cache()
    calls = install()
    from megatron_nvfp4.mcore.launcher import pretrain

    pretrain(argv)
    check_calls(calls)
    counted = ", ".join(f"{calls[kind]} {kind}" for kind in KINDS)
    print(f"torch._grouped_mm calls: {counted}")


if __name__ == "__main__":
    main(sys.argv[1:])
