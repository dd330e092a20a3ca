"""What a layer needs to know: its recipe, and who computes it."""

from dataclasses import dataclass

import torch

from megatron_nvfp4 import backends
from megatron_nvfp4.recipes import BF16, FORWARD, MXFP8, NVFP4Spec, Recipe, resolve


@dataclass(frozen=True, kw_only=True)
class QLinearParams:
    """The numerics of one linear layer.

    backend: "auto", or the name of the one backend that may compute it.
    strict: raise on a NaN or Inf in an activation (costs a host synchronisation).
    """

    recipe: Recipe
    backend: str = "auto"
    strict: bool = False

    @property
    def gemm_backend(self) -> str | tuple[str, ...]:
        """Backend of the unquantised GEMMs; of a bypass our CUDA kernels, if any may, or the framework's."""
        if not self.recipe.bypass:
            return self.backend
        return ("cuda", "torch") if self.backend in ("auto", "cuda") else "torch"


def get_qlinear_params(
    name: str | None = None,
    *,
    backend: str | None = None,
    config: str | None = None,
    device: torch.device | str | None = None,
) -> QLinearParams:
    """Parameters of the recipe `name`, or of the one the environment or the policy file names.

    Raises ValueError for an unknown name or a faulty environment, RuntimeError that lists what is missing
    when no backend can compute the recipe (on `device`, when given).
    """
    policy = resolve(name, config, backend=backend)
    params = QLinearParams(recipe=policy.recipe, backend=policy.backend, strict=policy.strict)
    require_backend(params, device)
    return params


def require_backend(params: QLinearParams, device: torch.device | str | None = None) -> None:
    """Raise RuntimeError unless every quantiser and GEMM of the recipe has a backend."""
    recipe, faults = params.recipe, {}
    for label, operands in (
        ("fprop", recipe.fprop),
        ("dgrad", recipe.dgrad),
        ("wgrad", recipe.wgrad),
    ):
        formats = tuple(
            BF16 if spec == FORWARD else spec for spec in (operands.left, operands.right)
        )
        quantize = "quantize_rotated" if operands.hadamard else "quantize"
        for spec in formats:
            if spec != BF16:
                faults |= _faults(quantize, (spec,), params.backend, device)
        op = "grouped_wgrad" if label == "wgrad" else "grouped_gemm"
        backend = params.gemm_backend if formats == (BF16, BF16) else params.backend
        faults |= _faults(op, formats, backend, device)
    if faults:
        raise RuntimeError(
            f"recipe {recipe.name} needs {', '.join(recipe.requires)} and cannot be built:\n"
            + "\n".join(faults)
            + "\nchoose another recipe: python -m megatron_nvfp4 recipes"
        )


def _faults(op: str, formats: tuple, backend: str, device) -> dict[str, None]:
    try:
        backends.find(op, formats, device=device, backend=backend)
    except RuntimeError as error:
        return {str(error): None}
    return {}


def shape_faults(recipe: Recipe, in_features: int, out_features: int) -> list[str]:
    """Why a weight (out_features, in_features) cannot take the recipe, each with its dimension and value.

    K of the forward and N of dgrad must be whole blocks, N whole 8-column output tiles; tokens, the
    contraction of wgrad, are padded and may be any number.
    """
    faults = []
    for label, dimension, value, operands in (
        ("in_features", "K", in_features, recipe.fprop),
        ("out_features", "N", out_features, recipe.dgrad),
    ):
        multiple = max(_block_of(operands.left), _block_of(operands.right))
        if dimension == "N" and recipe.quantized:
            multiple = max(multiple, 8)
        if value % multiple:
            faults.append(f"{label}: {dimension}={value} is not a multiple of {multiple}")
    if _has_tiles(recipe) and out_features % 16:
        faults.append(f"out_features: N={out_features} is not a multiple of 16, the weight tile")
    return faults


def _block_of(spec) -> int:
    return {NVFP4Spec: 16, type(MXFP8): 32}.get(type(spec), 1 if spec in (BF16, FORWARD) else 16)


def _has_tiles(recipe: Recipe) -> bool:
    specs = (recipe.fprop.right, recipe.dgrad.right)
    return any(isinstance(spec, NVFP4Spec) and spec.block == (16, 16) for spec in specs)
