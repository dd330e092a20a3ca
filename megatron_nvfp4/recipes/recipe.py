"""What a recipe is, and every recipe there is.

A recipe names the operands of the three GEMMs of a linear layer. Names are public and frozen by a
test.
"""

from dataclasses import dataclass, replace

from .formats import BF16, FORWARD, MXFP8, FloatSpec, Format, NVFP4Spec

GROUPS = ("common", "reference", "experimental")


@dataclass(frozen=True, kw_only=True)
class Operands:
    """The two operands of one GEMM.

    left: activations in fprop, the output gradient in dgrad and wgrad.
    right: the weight in fprop and dgrad, the activations in wgrad.
    hadamard: rotate both by the 16x16 random Hadamard transform along the contraction first.
    """

    left: Format = BF16
    right: Format = BF16
    hadamard: bool = False

    def __str__(self) -> str:
        rotated = " after RHT" if self.hadamard else ""
        return f"{self.left} x {self.right}{rotated}"


ORIGINALS = Operands()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Operands of fprop, dgrad and wgrad, and where the backward GEMMs run.

    bypass: the backward of an unquantised layer on the saved originals, by the framework's own
        GEMMs; False uses our operators (FP32 accumulation straight into `main_grad`).
    """

    name: str
    group: str
    summary: str
    fprop: Operands = ORIGINALS
    dgrad: Operands = ORIGINALS
    wgrad: Operands = ORIGINALS
    bypass: bool = False

    def __post_init__(self) -> None:
        # Quantised wgrad operands are padded to whole blocks of tokens, so both must pad alike; a
        # dequantised one is not padded.
        right = BF16 if self.wgrad.right == FORWARD else self.wgrad.right
        if type(self.wgrad.left) is not type(right):
            raise ValueError(f"recipe {self.name}: wgrad operands {self.wgrad} are of two formats")

    @property
    def quantized(self) -> bool:
        """True unless every operand of every GEMM is BF16."""
        return (self.fprop, self.dgrad, self.wgrad) != (ORIGINALS,) * 3

    @property
    def backward(self) -> str:
        """One word for the backward: bypass, bf16, dequantized, mxfp8 or nvfp4."""
        if self.bypass:
            return "bypass"
        words = {
            type(BF16): "bf16",
            type(FORWARD): "dequantized",
            type(MXFP8): "mxfp8",
            NVFP4Spec: "nvfp4",
        }
        return words[type(self.wgrad.right)]

    @property
    def requires(self) -> tuple[str, ...]:
        """Names of the kernel features a backend must have to build this recipe."""
        needs = set()
        for gemm in (self.fprop, self.dgrad, self.wgrad):
            if gemm.hadamard:
                needs.add("random_hadamard_transform")
            for spec in (gemm.left, gemm.right):
                needs |= format_needs(spec)
        return tuple(sorted(needs))

    @property
    def saved(self) -> dict[str, float]:
        """Bits per element kept for the backward, of the activations and of the weight."""
        return {
            "activations": self.wgrad.right.bits,
            "weight": self.dgrad.right.bits if self.dgrad.right == FORWARD else 0.0,
        }

    def with_bypass(self) -> "Recipe":
        """The same forward with the BF16 layer bypass as backward."""
        if self.bypass:
            return self
        return replace(self, dgrad=ORIGINALS, wgrad=ORIGINALS, bypass=True)


def format_needs(spec: Format) -> frozenset[str]:
    """Names of the kernel features that quantising to `spec` takes."""
    if isinstance(spec, NVFP4Spec):
        needs = {"nvfp4"}
        if spec.four_over_six:
            needs.add("four_over_six")
        if spec.rounding == "stochastic":
            needs.add("stochastic_rounding")
        return frozenset(needs)
    if spec == MXFP8:
        return frozenset({"mxfp8"})
    if isinstance(spec, FloatSpec):
        return frozenset({"simulated_float"})
    return frozenset()


TOKEN = NVFP4Spec(outer="token")
TENSOR = NVFP4Spec(outer="tensor")
TILES = NVFP4Spec(block=(16, 16), outer="tensor")
# What SGLang 0.5.23 pins for `nvfp4_online` weights (model_executor/model_loader), by FlashInfer.
FOUR_OVER_SIX = {"four_over_six": "mse", "error": "fast"}
W4A4 = Operands(left=TOKEN, right=TENSOR)
W4A4_46 = Operands(
    left=NVFP4Spec(outer="token", **FOUR_OVER_SIX), right=NVFP4Spec(outer="tensor", **FOUR_OVER_SIX)
)
BOTH_MXFP8 = Operands(left=MXFP8, right=MXFP8)
SR = NVFP4Spec(outer="tensor", rounding="stochastic")
SWEEP = tuple((e, m) for e in (2, 3, 4, 5) for m in (1, 2, 3, 4))


def _all() -> list[Recipe]:
    dequantized = {
        "dgrad": Operands(left=BF16, right=FORWARD),
        "wgrad": Operands(left=BF16, right=FORWARD),
    }
    table = [
        Recipe(
            name="bf16",
            group="common",
            summary="BF16 everywhere, the baseline",
            bypass=True,
        ),
        Recipe(
            name="nvfp4_per_token",
            group="common",
            summary="W4A4, one activation scale per token, MXFP8 backward",
            fprop=W4A4,
            dgrad=BOTH_MXFP8,
            wgrad=BOTH_MXFP8,
        ),
        Recipe(
            name="nvfp4_per_token_bf16_bwd",
            group="common",
            summary="W4A4 per token, BF16 backward by the dedicated operator",
            fprop=W4A4,
        ),
        Recipe(
            name="nvfp4_per_token_dequant_bwd",
            group="common",
            summary="W4A4 per token, BF16 backward on the dequantised forward operands",
            fprop=W4A4,
            **dequantized,
        ),
        Recipe(
            name="nvfp4_per_token_4over6",
            group="common",
            summary="W4A4 per token with four-over-six (448, MSE, fast), dequantised backward",
            fprop=W4A4_46,
            **dequantized,
        ),
        Recipe(
            name="nvfp4_per_tensor",
            group="reference",
            summary="W4A4, one activation scale per tensor, BF16 backward",
            fprop=Operands(left=TENSOR, right=TENSOR),
        ),
        Recipe(
            name="nvfp4_pretrain",
            group="reference",
            summary="W4A4 with 2D weights; NVFP4 backward with RHT and stochastic rounding",
            fprop=Operands(left=TENSOR, right=TILES),
            dgrad=Operands(left=SR, right=TILES),
            wgrad=Operands(left=SR, right=TENSOR, hadamard=True),
        ),
        Recipe(
            name="nvfp4_w4a16",
            group="reference",
            summary="4-bit weights, BF16 activations, BF16 backward",
            fprop=Operands(left=BF16, right=TENSOR),
        ),
        Recipe(
            name="nvfp4_w4a8",
            group="reference",
            summary="4-bit weights, MXFP8 activations, BF16 backward",
            fprop=Operands(left=MXFP8, right=TENSOR),
        ),
        Recipe(
            name="mxfp8",
            group="reference",
            summary="MXFP8 forward and backward",
            fprop=BOTH_MXFP8,
            dgrad=BOTH_MXFP8,
            wgrad=BOTH_MXFP8,
        ),
    ]
    for exponent, mantissa in SWEEP:
        simulated = FloatSpec(exponent=exponent, mantissa=mantissa)
        table.append(
            Recipe(
                name=f"sweep_e{exponent}m{mantissa}",
                group="experimental",
                summary=f"simulated E{exponent}M{mantissa} forward, BF16 backward",
                fprop=Operands(left=simulated, right=simulated),
            )
        )
    return table


RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _all()}
