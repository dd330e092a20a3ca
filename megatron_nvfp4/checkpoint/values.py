"""What a weight's values may be: the dtypes that are converted and quantised, and finite numbers."""

from collections.abc import Collection

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
CONVERTED = (*FLOATS, torch.float64)


def check_float(name: str, dtype: torch.dtype, allowed: Collection[torch.dtype] = FLOATS) -> None:
    """ValueError naming a tensor of another dtype: that of a weight whose scales would be lost, or are."""
    if dtype not in allowed:
        word = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{name}: holds {word}, and config.json declares no quantization; decode it with its scales to"
            " BF16, FP16 or FP32 first"
        )


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is a NaN or an Inf; one pass, without a copy for the dtypes of FLOATS."""
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    if tensor.dtype not in FLOATS:
        tensor = tensor.float()
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))
