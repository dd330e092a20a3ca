"""What a kernel is for, and the bytes and FLOPs of one call as far as its recorded inputs tell.

Bytes count every operand and result once, as if caches held nothing else; FLOPs of a product of (M, K) and
(K, N) are 2*M*N*K. Rows past the last group's offset are counted, for offsets live on the device. What is not
derivable (fused kernels without an operator, attention, reductions) has no figure rather than a guess.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

COMPUTATION, PREPARATION, COMMUNICATION, OPTIMIZER, GAPS = CLASSES = (
    "computation",
    "preparation",
    "communication",
    "optimizer",
    "gaps",
)

_COMMUNICATION = re.compile(r"nccl|gloo|c10d::|record_param_comms|all_?reduce|all_?gather", re.I)
_PREPARING = (
    "copy_ _copy_from to _to_copy contiguous clone cat stack pad constant_pad_nd "
    "reflection_pad fill_ zero_ zeros ones full zeros_like ones_like full_like arange index "
    "index_select index_put_ _index_put_impl_ index_copy_ gather scatter scatter_ "
    "scatter_add_ masked_select masked_fill masked_fill_ where sort argsort topk nonzero "
    "cumsum bincount histc repeat_interleave repeat flip roll tril triu _local_scalar_dense "
    "item "
    # Views and allocations: no time on a GPU, a little of a CPU's.
    "empty empty_like empty_strided new_empty view _unsafe_view reshape as_strided expand "
    "expand_as t transpose permute slice narrow select split split_with_sizes chunk unbind "
    "unsqueeze squeeze detach alias resolve_conj resolve_neg view_as lift_fresh resize_ set_ "
    "is_nonzero result_type "
).split()
_PREPARATION_OPERATOR = re.compile(
    r"megatron_nvfp4::(?!\w*(?:gemm|wgrad|activation|combine|glu|epilogue))\w+"
    r"|aten::(?:" + "|".join(_PREPARING) + ")"
)
# Only asked where no operator of a library launched the kernel. `cast` must not find `broadcast`.
_PREPARATION_KERNEL = re.compile(
    r"^mem(?:cpy|set)|quantize|(?<!broad)cast_|_cast|transpose_kernel|permute|padding|swizzle"
    r"|catarray|copy_kernel",
    re.I,
)
_BYTES = {
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
    "c10::Float8_e8m0fnu": 1,
    "short": 2,
    "short int": 2,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "int": 4,
    "float": 4,
    "long": 8,
    "long int": 8,
    "double": 8,
}
_BYTES_OF_SCALAR_TYPE = {"5": 2, "6": 4, "15": 2}  # c10::ScalarType: Half, Float, BFloat16


def classify(kernel: str, operator: str | None, *, in_optimizer: bool) -> str:
    """One of CLASSES but `gaps` for a kernel (CPU: an operator) that `operator` launched.

    Preparation is quantising, packing, permuting, casting, copying, padding and filling. An activation that
    also quantises is computation, for it has to be computed anyway; so is the sum that combines experts.
    """
    if _COMMUNICATION.search(kernel) or (operator and _COMMUNICATION.search(operator)):
        return COMMUNICATION
    if in_optimizer:
        return OPTIMIZER
    if operator is not None and is_library_operator(operator):
        return PREPARATION if _PREPARATION_OPERATOR.fullmatch(operator) else COMPUTATION
    return PREPARATION if _PREPARATION_KERNEL.search(kernel) else COMPUTATION


def is_library_operator(name: str) -> bool:
    """Whether a recorded operator is one of a library (aten::mm), and not a node of autograd's graph."""
    return "::" in name and not name.startswith(("autograd::", "torch::autograd::"))


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes of one call; None where its inputs do not tell."""

    flops: int | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Inputs:
    """The recorded inputs of one operator call, as a Chrome trace of torch.profiler holds them.

    dims: shape of each tensor, a list of shapes for a list of tensors, [] for scalars; types: C++ names;
    values: scalars as text, "" for tensors.
    """

    dims: Sequence
    types: Sequence[str]
    values: Sequence[str]

    def numel(self, index: int) -> int:
        return math.prod(self.dims[index])

    def has(self, index: int) -> bool:
        return index < len(self.dims) and bool(self.dims[index])

    def width(self, index: int) -> int:
        """Bytes of an element; KeyError for a type without one."""
        return _BYTES[self.types[index]]

    def nbytes(self, *indices: int) -> int:
        """Bytes of these inputs; an absent optional one has none."""
        return sum(self.numel(i) * self.width(i) for i in indices if self.has(i))

    def out_width(self, index: int) -> int:
        """Bytes of an element of the ScalarType given as input `index`."""
        return _BYTES_OF_SCALAR_TYPE[self.values[index]]


def cost_of(operator: str, dims: Sequence, types: Sequence[str], values: Sequence[str]) -> Cost:
    """Cost of one call of `operator`; Cost() where it is not derivable."""
    rule = _RULES.get(operator)
    if rule is None:
        return Cost()
    try:
        return rule(Inputs(dims, types, values))
    except (KeyError, IndexError, ValueError, TypeError):  # recorded in a form that tells nothing
        return Cost()


def _product(i: Inputs, a: int, b: int, *, batch: int = 1, extra: int = 0) -> Cost:
    """(.., M, K) times (.., K, N); the result has the type of a; extra: bytes of other inputs."""
    (m, k), n = i.dims[a][-2:], i.dims[b][-1]
    out = batch * m * n * i.width(a)
    return Cost(2 * batch * m * n * k, i.nbytes(a, b) + out + extra)


def _batched(a: int, b: int) -> Callable[[Inputs], Cost]:
    return lambda i: _product(i, a, b, batch=i.dims[a][0], extra=i.nbytes(0) if a else 0)


def _torch_grouped(i: Inputs) -> Cost:
    """torch._grouped_mm of 2D rows and 3D weights: every row meets one weight."""
    if len(i.dims[0]) != 2 or len(i.dims[1]) != 3:
        return Cost()
    return _product(i, 0, 1)


def _elementwise(i: Inputs) -> Cost:
    """Every input read, one result of the widest type and broadcast shape written."""
    tensors = [t for t in range(len(i.dims)) if i.types[t] in _BYTES and i.has(t)]
    widest = max(tensors, key=i.numel)
    width = max(i.width(t) for t in tensors)
    return Cost(bytes=i.nbytes(*tensors) + i.numel(widest) * width)


def _quantize(bits: float) -> Callable[[Inputs], Cost]:
    """x (M, K) read once, codes and block scales of `bits` a value written."""
    return lambda i: Cost(bytes=i.nbytes(0) + int(i.numel(0) * bits / 8))


def _dequantize(per_byte: int, out: int | None) -> Callable[[Inputs], Cost]:
    """Codes, scales and row scales read; values of BF16, or of the type given as input `out`, written."""

    def rule(i: Inputs) -> Cost:
        width = 2 if out is None else i.out_width(out)
        return Cost(bytes=i.nbytes(0, 1, 2) + i.numel(0) * per_byte * width)

    return rule


def _gather(index: int) -> Callable[[Inputs], Cost]:
    """Rows of the inputs before `index` read as often as `index` names them, and written."""

    def rule(i: Inputs) -> Cost:
        row = sum(i.nbytes(t) // i.dims[t][0] for t in range(index))
        return Cost(bytes=2 * i.numel(index) * row + i.nbytes(index))

    return rule


def _combine(i: Inputs) -> Cost:
    """Every choice's row (N,) read, one row a token written."""
    row = i.dims[0][1] * i.width(0)
    return Cost(bytes=(i.numel(1) + i.dims[1][0]) * row + i.nbytes(1, 2))


def _activation(bits: float) -> Callable[[Inputs], Cost]:
    """h (M, 2F) and probabilities read, F values of `bits` written; a kept BF16 result is not counted."""
    return lambda i: Cost(bytes=i.nbytes(0, 1) + int(i.numel(0) / 2 * bits / 8))


def _gemm(m: int, n: int, k: int, read: int, out_width: int) -> Cost:
    return Cost(2 * m * n * k, read + m * n * out_width)


def _gemm_w4(i: Inputs) -> Cost:
    rows = i.dims[8][0] if i.has(8) else i.dims[0][0]
    k = i.dims[0][1] * (2 if i.has(1) else 1)
    return _gemm(rows, int(i.values[4]), k, i.nbytes(0, 1, 2, 3, 5, 6, 7, 8), i.out_width(9))


def _gemm_bf16(i: Inputs) -> Cost:
    weights, transposed = i.dims[1], i.values[2] == "True"
    n = weights[0][-1 if transposed else -2]
    read = i.nbytes(0, 3, 4, 5, 6, 7) + 2 * sum(math.prod(w) for w in weights)
    return _gemm(*i.dims[0][:1], n, i.dims[0][1], read, i.out_width(8))


def _gemm_decoded(i: Inputs) -> Cost:
    n = i.dims[1][0] // (i.dims[2][0] - 1)
    read = i.nbytes(0, 1, 2, 3, 4, 5, 6)
    return _gemm(i.dims[0][0], n, i.dims[0][1], read, i.out_width(7))


def _gemm_generic(i: Inputs) -> Cost:
    k = i.dims[0][1] * (2 if i.has(1) else 1)
    read = i.nbytes(0, 1, 2, 3, 5, 7, 8, 9, 10)
    return _gemm(i.dims[0][0], int(i.values[6]), k, read, i.out_width(11))


def _wgrad(token_major: int | None, accumulate: int, out: int) -> Callable[[Inputs], Cost]:
    """Every token meets one group's (N, K); results are FP32 or BF16, read too if accumulated."""

    def rule(i: Inputs) -> Cost:
        by_token = token_major is not None and i.values[token_major] == "True"
        m, n = i.dims[0] if by_token else reversed(i.dims[0])
        k = i.dims[1][1] if by_token else i.dims[1][0]
        # The list's type is not recorded; Megatron accumulates into FP32 main gradients.
        passes, width = (2, 4) if i.values[accumulate] == "True" else (1, 2)
        written = passes * width * sum(math.prod(w) for w in i.dims[out])
        return Cost(2 * m * n * k, i.nbytes(0, 1) + written)

    return rule


_ELEMENTWISE = (
    "add sub mul div silu sigmoid gelu tanh exp rsqrt pow neg clone silu_backward gelu_backward "
    "sigmoid_backward tanh_backward"
).split()
_RULES: dict[str, Callable[[Inputs], Cost]] = {
    "aten::mm": lambda i: _product(i, 0, 1),
    "aten::addmm": lambda i: _product(i, 1, 2, extra=i.nbytes(0)),
    "aten::bmm": _batched(0, 1),
    "aten::baddbmm": _batched(1, 2),
    "aten::_scaled_mm": lambda i: Cost(2 * math.prod(i.dims[0]) * i.dims[1][1]),
    "aten::_grouped_mm": _torch_grouped,
    "aten::copy_": lambda i: Cost(bytes=i.nbytes(0, 1)),
    "aten::fill_": lambda i: Cost(bytes=i.nbytes(0)),
    "aten::zero_": lambda i: Cost(bytes=i.nbytes(0)),
    **{f"aten::{name}": _elementwise for name in _ELEMENTWISE},
    **{f"aten::{name}_": _elementwise for name in ("add", "sub", "mul", "div")},
    "megatron_nvfp4::quantize_nvfp4": _quantize(4.5),
    "megatron_nvfp4::quantize_nvfp4_stochastic": _quantize(4.5),
    "megatron_nvfp4::quantize_nvfp4_columns": _quantize(4.5),
    "megatron_nvfp4::quantize_mxfp8": _quantize(8.25),
    "megatron_nvfp4::quantize_mxfp8_columns": _quantize(8.25),
    "megatron_nvfp4::round_mxfp8_columns": _quantize(16),
    "megatron_nvfp4::gather_rows": _gather(1),
    "megatron_nvfp4::gather_rows_nvfp4": _gather(3),
    "megatron_nvfp4::gather_rows_amax": _gather(1),
    "megatron_nvfp4::combine_rows": _combine,
    "megatron_nvfp4::weighted_activation": _activation(16),
    "megatron_nvfp4::weighted_activation_backward": lambda i: Cost(bytes=i.nbytes(0, 1, 1, 2)),
    "megatron_nvfp4::weighted_activation_quantize": _activation(4.5),
    "megatron_nvfp4::decode_nvfp4": _dequantize(2, None),
    "megatron_nvfp4::dequantize_nvfp4": _dequantize(2, 3),
    "megatron_nvfp4::dequantize_mxfp8": _dequantize(1, 2),
    "megatron_nvfp4::grouped_gemm_decoded": _gemm_decoded,
    "megatron_nvfp4::grouped_gemm_w4": _gemm_w4,
    "megatron_nvfp4::grouped_gemm_bf16": _gemm_bf16,
    "megatron_nvfp4::grouped_gemm_generic": _gemm_generic,
    "megatron_nvfp4::grouped_wgrad_decoded": _wgrad(None, 5, 6),
    "megatron_nvfp4::grouped_wgrad_bf16": _wgrad(2, 5, 6),
    "megatron_nvfp4::grouped_wgrad_generic": _wgrad(2, 5, 6),
}
