"""Number formats a GEMM operand can take, as data.

Stdlib only, so that a recipe can be read without torch. `quant/` gives each format its meaning.
"""

from dataclasses import dataclass

ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True, kw_only=True)
class BF16Spec:
    """The operand as it is, unquantised."""

    @property
    def bits(self) -> float:
        return 16.0

    def __str__(self) -> str:
        return "bf16"


@dataclass(frozen=True, kw_only=True)
class ForwardSpec:
    """The operand the forward GEMM used, decoded to BF16 (backward only)."""

    @property
    def bits(self) -> float:
        return 4.5

    def __str__(self) -> str:
        return "bf16(dequantized forward operand)"


@dataclass(frozen=True, kw_only=True)
class NVFP4Spec:
    """NVFP4: E2M1 codes, one E4M3 scale per block of 16, one FP32 outer scale.

    block: (1, 16) rows, or (16, 16) tiles whose scale serves the matrix and its transpose.
    outer: the domain of the outer amax, "tensor" (or expert) or "token" (row).
    e4m3_max: largest block scale aimed at, 448 or 256 (256 leaves room for four-over-six).
    four_over_six: None, "mae" or "mse": map each block's amax to 6 or to 4, whichever errs less.
    error: how that error is computed, "strict" (FP32 of the decoded value) or "fast" (FP16).
    rounding: "nearest" (even) or "stochastic".
    """

    block: tuple[int, int] = (1, 16)
    outer: str = "tensor"
    e4m3_max: int = 448
    four_over_six: str | None = None
    error: str = "strict"
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        allowed = {
            "block": ((1, 16), (16, 16)),
            "outer": ("tensor", "token"),
            "e4m3_max": (448, 256),
            "four_over_six": (None, "mae", "mse"),
            "error": ("strict", "fast"),
            "rounding": ROUNDINGS,
        }
        wrong = [
            f"{field}={getattr(self, field)!r} (one of {', '.join(map(repr, values))})"
            for field, values in allowed.items()
            if getattr(self, field) not in values
        ]
        if self.block == (16, 16) and self.outer == "token":
            wrong.append(
                "block=(16, 16) with outer='token' (a tile spans rows; use outer='tensor')"
            )
        if self.four_over_six and self.rounding == "stochastic":
            wrong.append("four_over_six with rounding='stochastic' (choose one)")
        if wrong:
            raise ValueError("NVFP4Spec: " + "; ".join(wrong))

    @property
    def bits(self) -> float:
        return 4.5

    def __str__(self) -> str:
        parts = [f"{self.block[0]}x{self.block[1]}", f"per-{self.outer}"]
        if self.four_over_six:
            parts.append(f"4/6 {self.four_over_six} {self.error} {self.e4m3_max}")
        elif self.e4m3_max != 448:
            parts.append(f"e4m3_max {self.e4m3_max}")
        if self.rounding != "nearest":
            parts.append(self.rounding)
        return f"nvfp4({', '.join(parts)})"


@dataclass(frozen=True, kw_only=True)
class MXFP8Spec:
    """MXFP8: E4M3 codes, one E8M0 scale per 32 elements along the contraction, no outer scale."""

    @property
    def bits(self) -> float:
        return 8.25

    def __str__(self) -> str:
        return "mxfp8(1x32)"


@dataclass(frozen=True, kw_only=True)
class FloatSpec:
    """A simulated float ExMy with E4M3 block scales per 16, for sensitivity studies."""

    exponent: int
    mantissa: int

    @property
    def bits(self) -> float:
        return 1 + self.exponent + self.mantissa + 0.5

    def __str__(self) -> str:
        return f"e{self.exponent}m{self.mantissa}(1x16, per-token)"


Format = BF16Spec | ForwardSpec | NVFP4Spec | MXFP8Spec | FloatSpec
BF16 = BF16Spec()
FORWARD = ForwardSpec()
MXFP8 = MXFP8Spec()


def depends_on_token_alone(spec: Format) -> bool:
    """Whether rows are packed NVFP4 whose bits no other row changes, so that they can be gathered packed."""
    return isinstance(spec, NVFP4Spec) and spec.outer == "token" and spec.rounding == "nearest"
