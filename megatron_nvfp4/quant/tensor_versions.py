"""Whether tensors still hold the values they had: autograd's own check, for those that it does not save."""

import operator
from collections.abc import Sequence

from torch import Tensor

_VERSION = operator.attrgetter("_version")


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """What changes with each tensor's values, but not through `.data`; 0 of an inference tensor."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:  # a tensor made under inference_mode has none
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def require_versions(name: str, tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """RuntimeError in a backward whose forward saw other versions; name: whose weights these are."""
    if versions_of(tensors) != list(versions):
        raise RuntimeError(
            f"{name}: a weight was modified in place between forward and backward; "
            "run the backward before the optimizer's step"
        )
