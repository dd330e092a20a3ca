"""RMSNorm and LayerNorm in FP32, rounded once to the input's dtype."""

import torch
from torch import Tensor
from torch.nn import functional

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


def normalize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    normalization: str,
    zero_centered_gamma: bool = False,
) -> Tensor:
    """Normalise the last axis of x; weight (and bias) of its size, gamma = weight + 1 if zero-centred."""
    gamma = weight.float() + 1 if zero_centered_gamma else weight.float()
    shape = (x.shape[-1],)
    if normalization == "RMSNorm":
        return functional.rms_norm(x.float(), shape, gamma, eps).to(x.dtype)
    beta = None if bias is None else bias.float()
    return functional.layer_norm(x.float(), shape, gamma, beta, eps).to(x.dtype)


def check_normalization(layer: str, normalization: str) -> None:
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"{layer}: normalization={normalization!r}; use LayerNorm or RMSNorm")


def new_gamma(
    size: int, zero_centered_gamma: bool, dtype: torch.dtype, device: torch.device | str
) -> torch.nn.Parameter:
    """The norm's weight: ones, or zeros when the stored value is gamma - 1."""
    fill = torch.zeros if zero_centered_gamma else torch.ones
    return torch.nn.Parameter(fill(size, dtype=dtype, device=device))
