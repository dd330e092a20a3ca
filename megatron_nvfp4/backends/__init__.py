"""Who computes: the backend protocol and the choice of one. No path falls back in silence.

A backend answers `why_not` before anything is launched: None, or one sentence that says what is missing and
what to do. `select` takes the first of PREFERENCE that can, or raises with every answer.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_nvfp4.quant import MXFP8Tensor, QuantizedTensor, SimulatedTensor
from megatron_nvfp4.recipes import Format

from .packed import PackedWeights

Operand = Tensor | QuantizedTensor | MXFP8Tensor | SimulatedTensor | PackedWeights
# G matrices of one shape, unquantised: G tensors, or one (G, N, K).
Matrices = Sequence[Tensor] | Tensor
# "quantize_rotated" is quantize with rotated=True.
OPS = ("quantize", "quantize_rotated", "gemm", "grouped_gemm", "grouped_wgrad")
# Fastest first; "reference" can do everything, slowly. By name only: "torch", the framework's own GEMMs for
# unquantised operands, which a recipe that bypasses our operators asks for, "blackwell", which has never run,
# and "te", to compare with.
PREFERENCE = ("cuda", "cpu", "reference")
_MODULES = {name: f"megatron_nvfp4.backends.{name}" for name in (*PREFERENCE, "blackwell", "te")}
_MODULES["torch"] = "megatron_nvfp4.backends.torch_gemm"
_used: dict[tuple[str, str], set[str]] = {}
_selected: dict[tuple, "Backend"] = {}
_remembered: list = []
SHAPE_PERIOD = 128


class Backend(Protocol):
    """Quantisers and GEMMs of one implementation. All GEMMs contract the last axis of both operands.

    Every backend's codes, scales and amax equal the reference's bit for bit.
    """

    name: str
    features: frozenset[str]

    def why_not(
        self,
        op: str,
        formats: Sequence[Format],
        shape: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> str | None:
        """None if `op` (one of OPS) runs on operands of these formats, else the reason and the remedy.

        shape: (M, K) of a quantiser, (M, N, K) of a GEMM; None asks in general. The answer depends on
        sizes from SHAPE_PERIOD on only modulo it. dtype: of operands that are not quantised, BF16 if None.
        """
        ...

    def quantize(
        self,
        x: Tensor,
        spec: Format,
        *,
        amax: Tensor | None = None,
        offsets: Tensor | None = None,
        column_offsets: Tensor | None = None,
        rotated: bool = False,
        seed: int | None = None,
        offset: int = 0,
    ) -> Operand:
        """x (M, K), of any strides, in format `spec`; with offsets (G+1,), every row group as if alone.

        column_offsets (G+1,): the same of groups of columns, of whole blocks each. rotated: quantise rht(x).
        seed, offset: see quant.random_bits; a format that rounds stochastically needs a seed.
        """
        ...

    def pack_weights(
        self, weights: Operand, num_groups: int, *, is_reversed: bool = False
    ) -> Operand:
        """Weights (G*N, K) in the form this backend's GEMMs read fastest; the same values.

        is_reversed: `weights` holds the last group first, the result the first.
        """
        ...

    def round_along_rows(self, weights: Tensor, spec: Format) -> Matrices | None:
        """Weights (G, N, K) quantised along N and decoded, as they lie; None where that is not exact or slow.

        What `grouped_gemm` with transposed=True then multiplies; the other way is to quantise the transpose.
        """
        ...

    def dequantize(self, operand: Operand, dtype: torch.dtype) -> Tensor:
        """A quantised operand's values (M, K) in `dtype`, outer scale included, rounded once."""
        ...

    def gemm(
        self,
        a: Operand,
        b: Operand | Matrices,
        *,
        bias: Tensor | None = None,
        out_dtype: torch.dtype,
        transposed: bool = False,
    ) -> Tensor:
        """a (M, K) times b (N, K) transposed, plus bias (N,): (M, N) in out_dtype, rounded once.

        b: an operand, or one unquantised matrix as Matrices; transposed: that matrix lies as (K, N).
        """
        ...

    def grouped_gemm(
        self,
        a: Operand,
        b: Operand | Matrices,
        offsets: Tensor,
        *,
        bias: Tensor | None = None,
        out_dtype: torch.dtype,
        transposed: bool = False,
        row_factors: Tensor | None = None,
    ) -> Tensor:
        """Row group g of a (M, K) times b_g: b is (G*N, K), offsets (G+1,), bias (G, N); (M, N).

        b: an operand, or G unquantised matrices (N, K); transposed: the matrices lie as (K, N).
        row_factors: FP32 (M,), multiply the rows' own outer scales, or the sums of rows in BF16, in FP32
        before bias and rounding; only "cuda", "cpu" and "reference" take them.
        """
        ...

    def grouped_wgrad(
        self,
        a: Operand,
        b: Operand,
        offsets: Tensor,
        *,
        out: Matrices,
        accumulate: bool,
    ) -> None:
        """out[g] (N, K) = or += a[:, g] times b[:, g] transposed; a (N, M), b (K, M), offsets cut M.

        An empty group writes exact zeros, or with accumulate leaves out[g] as it is.
        """
        ...


def get(name: str) -> Backend:
    """The backend called `name`; ValueError for an unknown name. It may still answer why_not to all."""
    if name not in _MODULES:
        raise ValueError(f"unknown backend {name!r}; use one of {', '.join(_MODULES)}")
    return importlib.import_module(_MODULES[name]).BACKEND


def select(
    op: str,
    formats: Sequence[Format],
    *,
    shape: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    backend: str | Sequence[str] = "auto",
) -> Backend:
    """The backend that computes one operation, by policy (`backend`), formats, shape and device.

    backend: "auto" walks PREFERENCE; a name takes that one or none, several the first that can.
    Raises RuntimeError that lists why each candidate cannot. The choice is recorded, see `used`.
    """
    key = (
        op,
        tuple(formats),
        shape and tuple(min(size, SHAPE_PERIOD + size % SHAPE_PERIOD) for size in shape),
        device,
        dtype,
        backend if isinstance(backend, str) else tuple(backend),
    )
    found = _selected.get(key)
    if found is None:
        found = find(op, formats, shape=shape, device=device, dtype=dtype, backend=backend)
        _selected[key] = found
        _used.setdefault((op, " x ".join(map(str, formats))), set()).add(found.name)
    return found


def remembered(function):
    """A function of hashable arguments that is asked once for each; `forget_selected` asks anew.

    For conclusions from `select` that are needed on every call of a layer.
    """
    _remembered.append(found := functools.cache(function))
    return found


def forget_selected() -> None:
    """Ask every backend anew, after a change of what they can do."""
    _selected.clear()
    for function in _remembered:
        function.cache_clear()


def find(
    op: str,
    formats: Sequence[Format],
    *,
    shape: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    backend: str | Sequence[str] = "auto",
) -> Backend:
    """As `select`, for a question only: nothing is recorded."""
    reasons = {}
    for name in candidates(backend):
        candidate = get(name)
        reason = candidate.why_not(op, formats, shape, device, dtype)
        if reason is None:
            return candidate
        reasons[name] = reason
    wanted = " x ".join(map(str, formats))
    at = f" at shape {tuple(shape)}" if shape is not None else ""
    on = f" on {device}" if device is not None else ""
    listed = "\n".join(f"  - {name}: {reason}" for name, reason in reasons.items())
    raise RuntimeError(f"no backend runs {op} of {wanted}{at}{on}:\n{listed}")


def candidates(backend: str | Sequence[str]) -> Sequence[str]:
    """The names that a choice of backend stands for, in order."""
    if backend == "auto":
        return PREFERENCE
    return (backend,) if isinstance(backend, str) else backend


def used() -> list[dict]:
    """Every operation computed so far in this process: its operands' formats and the backends chosen."""
    return [
        {"op": op, "formats": formats, "backends": sorted(names)}
        for (op, formats), names in sorted(_used.items())
    ]
