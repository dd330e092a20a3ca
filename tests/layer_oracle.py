"""What a linear layer must compute, in FP64 from decoded operands, one expert at a time.

Shares no code with the modules or the backends: only the quantisers, which test_golden and
test_mxfp8 hold to their bits, are the library's. Products of decoded values have few bits, so FP64
sums are exact (asserted) and every later rounding is known: one to FP32, the outer scales, the
bias, one to the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_nvfp4.modules import QLinearParams
from megatron_nvfp4.quant import (
    MXFP8Tensor,
    QuantizedTensor,
    SimulatedTensor,
    quantize,
    quantize_grouped,
    quantize_mxfp8,
    quantize_simulated,
    rht,
)
from megatron_nvfp4.recipes import BF16, FORWARD, MXFP8, RECIPES, FloatSpec, Format, Recipe

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate((E2M1, -E2M1))
E4M3 = np.array(
    [b % 8 * 2.0**-9 if b < 8 else (8 + b % 8) * 2.0 ** (b // 8 - 10) for b in range(127)]
)
NAMES = (
    "bf16",
    "nvfp4_per_token",
    "nvfp4_per_token_bf16_bwd",
    "nvfp4_per_token_dequant_bwd",
    "nvfp4_per_token_4over6",
    "nvfp4_per_tensor",
    "nvfp4_w4a16",
    "nvfp4_w4a8",
    "mxfp8",
    "nvfp4_pretrain",
    "sweep_e2m1",
    "sweep_e5m4",
)
# Every recipe, two for all sweeps, and the quantised forward with the BF16 layer bypass.
BUILDABLE = {name: RECIPES[name] for name in NAMES}
BUILDABLE["nvfp4_per_token+bypass"] = RECIPES["nvfp4_per_token"].with_bypass()
# What torch.manual_seed gets before a layer's call, and what the layer then draws from the generator.
SEED = 1234
DRAWN = int(torch.randint(2**63 - 1, (), generator=torch.Generator().manual_seed(SEED)))
# The `offset` of the random bits of the output gradient's two forms (modules/matmul.py).
DGRAD_LEFT, WGRAD_LEFT = 2, 4


@dataclass(frozen=True)
class Decoded:
    """values: exact, FP64 (M, K). scale: FP32 (M,) still to be multiplied, or None."""

    values: np.ndarray
    scale: np.ndarray | None = None


@dataclass(frozen=True)
class Expected:
    """Results in the layer's dtype (weight gradients in FP32), and the sums of |a||b| behind."""

    y: torch.Tensor
    dx: torch.Tensor
    dws: list[torch.Tensor]
    y_size: torch.Tensor
    dx_size: torch.Tensor
    dw_sizes: list[torch.Tensor]


def params_of(recipe: Recipe | str, **fields) -> QLinearParams:
    """Parameters on the reference backend, whose summation is exact."""
    recipe = BUILDABLE[recipe] if isinstance(recipe, str) else recipe
    return QLinearParams(recipe=recipe, backend="reference", **fields)


def grid(*shape: int, seed: int) -> torch.Tensor:
    """BF16 multiples of 1/32 in [-2, 2]: their sums are exact in FP32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-64, 65, shape, generator=generator).div(32).bfloat16()


def outliers(num_rows: int, num_cols: int, seed: int) -> torch.Tensor:
    """BF16 activations with large quantisation error: a few columns 30 times the rest."""
    x = torch.randn(num_rows, num_cols, generator=torch.Generator().manual_seed(seed))
    x[:, ::13] *= 30
    return x.bfloat16()


def quantized(
    x: torch.Tensor, spec: Format
) -> torch.Tensor | QuantizedTensor | MXFP8Tensor | SimulatedTensor:
    """x as an operand of that format."""
    if spec in (BF16, FORWARD):
        return x
    if isinstance(spec, FloatSpec):
        return quantize_simulated(x, spec)
    return quantize_mxfp8(x) if spec == MXFP8 else quantize(x, spec)


def decoded(
    operand: torch.Tensor | QuantizedTensor | MXFP8Tensor | SimulatedTensor,
) -> Decoded:
    """The operand's values by the tables above."""
    if isinstance(operand, QuantizedTensor):
        packed = operand.codes.numpy()
        codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(
            packed.shape[0], packed.shape[1] * 2
        )
        scales = E4M3[operand.block_scales.view(torch.uint8).numpy()]
        values = E2M1[codes] * np.repeat(scales, 16, axis=1)
        scale = s_dec(operand.amax.numpy(), operand.spec.e4m3_max * 6)
        return Decoded(values, np.broadcast_to(scale, packed.shape[:1]))
    if isinstance(operand, SimulatedTensor):
        scales = E4M3[operand.block_scales.view(torch.uint8).numpy()]
        values = operand.values.double().numpy() * np.repeat(scales, 16, axis=1)
        e, m = operand.spec.exponent, operand.spec.mantissa
        largest = (2 - 2.0**-m) * 2.0 ** (2 ** (e - 1))
        return Decoded(values, s_dec(operand.amax.numpy(), 448 * largest))
    if isinstance(operand, MXFP8Tensor):
        codes = operand.codes.view(torch.uint8).numpy()
        values = E4M3[codes & 127] * np.where(codes > 127, -1.0, 1.0)
        exponents = np.repeat(operand.block_scales.numpy().astype(int) - 127, 32, axis=1)
        return Decoded(np.ldexp(values, exponents))
    return Decoded(operand.detach().double().numpy())


def s_dec(amax: np.ndarray, target: float) -> np.ndarray:
    """1 / min(target / amax, FLT_MAX) in FP32; 1 for amax 0."""
    largest = np.finfo(np.float32).max
    with np.errstate(divide="ignore", over="ignore"):
        s_enc = np.minimum(np.float32(target) / amax, largest)
    return np.float32(1) / np.where(amax == 0, np.float32(1), s_enc)


def dequantized(x: torch.Tensor, spec: Format, dtype: torch.dtype) -> torch.Tensor:
    """The forward operand's values rounded to `dtype`: FP32 product of values and scale, then
    dtype.
    """
    operand = decoded(quantized(x, spec))
    values = operand.values.astype(np.float32)
    if operand.scale is not None:
        values = values * operand.scale[:, None]
    return torch.from_numpy(values).to(dtype)


def product(a: Decoded, b: Decoded, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """(a b^T scaled and biased in FP32, sums of |a||b|); asserts that the sums are exact."""
    total = a.values @ b.values.T
    backwards = np.ascontiguousarray(a.values[:, ::-1]) @ np.ascontiguousarray(b.values[:, ::-1]).T
    assert np.array_equal(total, backwards), "not exact in FP64: choose operands of fewer bits"
    y, size = total.astype(np.float32), np.abs(a.values) @ np.abs(b.values).T
    scale = None
    if a.scale is not None and b.scale is not None:
        scale = a.scale[:, None] * b.scale[None]
    elif a.scale is not None or b.scale is not None:
        scale = a.scale[:, None] if b.scale is None else b.scale[None]
    if scale is not None:
        y, size = y * scale, size * scale
    if bias is not None:
        y = y + bias.detach().float().numpy()
    return torch.from_numpy(y), torch.from_numpy(size)


def expected(
    recipe: Recipe,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    dy: torch.Tensor,
    *,
    splits: Sequence[int] | None = None,
    biases: Sequence[torch.Tensor] | None = None,
) -> Expected:
    """Forward and backward of every expert alone, in the operands the recipe names.

    Stochastic rounding is that of a call after torch.manual_seed(SEED).
    """
    splits = splits or [x.shape[0]]
    random = _random_operands(recipe, dy, splits)
    per_tensor = [
        (x_g, w, dy_g)
        for x_g, w, dy_g in zip(x.split(splits), weights, dy.split(splits), strict=True)
    ]
    parts = []
    for index, (x_g, weight, dy_g) in enumerate(per_tensor):
        bias = None if biases is None else biases[index]
        parts.append(_expert(recipe, x_g, weight.detach(), dy_g, bias, random.get(index, {})))
    y, y_size, dx, dx_size, dws, dw_sizes = zip(*parts, strict=True)
    dtype = x.dtype
    return Expected(
        torch.cat(y).to(dtype),
        torch.cat(dx).to(dtype),
        list(dws),
        torch.cat(y_size),
        torch.cat(dx_size),
        list(dw_sizes),
    )


def _random_operands(recipe: Recipe, dy: torch.Tensor, splits: Sequence[int]) -> dict:
    """Per expert the output gradient as "dgrad" and "wgrad" operand where it is rounded at random.

    Random bits go by the position in the whole matrix, so that is what is quantised; its parts'
    values are the quantiser's, and the outer scales are each expert's own.
    """
    found: dict[int, dict[str, Decoded]] = {index: {} for index in range(len(splits))}
    if getattr(recipe.dgrad.left, "rounding", "nearest") == "nearest":
        return found
    ends = torch.tensor(splits).cumsum(0)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), ends))
    rows = quantize_grouped(dy, offsets, recipe.dgrad.left, seed=DRAWN, offset=DGRAD_LEFT)
    padded = [torch.cat((t, t.new_zeros(-len(t) % 16, t.shape[1]))) for t in dy.split(splits)]
    bounds = [0]
    for t in padded:
        bounds.append(bounds[-1] + len(t))
    turned = torch.cat(padded).t()
    turned = rht(turned) if recipe.wgrad.hadamard else turned
    random = {"seed": DRAWN, "offset": WGRAD_LEFT}
    columns = quantize(turned, recipe.wgrad.left, column_offsets=torch.tensor(bounds), **random)
    for index in range(len(splits)):
        one = slice(index, index + 1)
        a, b = int(offsets[index]), int(offsets[index + 1])
        part = QuantizedTensor(rows.codes[a:b], rows.block_scales[a:b], rows.amax[one], rows.spec)
        found[index]["dgrad"] = decoded(part)
        a, b = bounds[index], bounds[index + 1]
        codes, scales = (
            columns.codes[:, a // 2 : b // 2],
            columns.block_scales[:, a // 16 : b // 16],
        )
        found[index]["wgrad"] = decoded(
            QuantizedTensor(codes, scales, columns.amax[one], columns.spec)
        )
    return found


def _expert(recipe: Recipe, x, weight, dy, bias, random) -> tuple[torch.Tensor, ...]:
    dtype, fprop = x.dtype, recipe.fprop
    as_activation = weight.to(dtype)
    w_operand = as_activation if fprop.right == BF16 else quantized(weight, fprop.right)
    forward = product(decoded(quantized(x, fprop.left)), decoded(w_operand), bias)
    if recipe.dgrad.right == FORWARD:
        right = dequantized(weight, fprop.right, dtype).t()
    else:
        original = as_activation if recipe.dgrad.right == BF16 else weight
        right = quantized(original.t(), recipe.dgrad.right)
    dy_operand = random.get("dgrad") or decoded(quantized(dy, recipe.dgrad.left))
    dgrad = product(dy_operand, decoded(right))
    saved = dequantized(x, fprop.left, dtype) if recipe.wgrad.right == FORWARD else x
    right = _columns(saved, recipe.wgrad.right, recipe.wgrad.hadamard)
    left = random.get("wgrad") or _columns(dy, recipe.wgrad.left, recipe.wgrad.hadamard)
    return *forward, *dgrad, *product(left, right)


def _columns(x: torch.Tensor, spec: Format, rotated: bool) -> Decoded:
    """x^T as a wgrad operand, zero rows completing the last block of tokens."""
    missing = -x.shape[0] % (16 if rotated else 32)
    turned = torch.cat((x, x.new_zeros(missing, x.shape[1]))).t()
    return decoded(quantized(rht(turned) if rotated else turned, spec))


def assert_close_as_torch(result, value, size, num_terms: int) -> None:
    """|result - exact| within the rounding to BF16 (2^-8) and num_terms FP32 additions in any
    order.
    """
    bound = 2.0**-8 * value.double().abs() + num_terms * 2.0**-23 * size.double()
    # `value` itself may be a BF16 rounding of the exact sum.
    bound += 2.0**-8 * value.double().abs() + 1e-30
    assert ((result.double() - value.double()).abs() <= bound).all()
