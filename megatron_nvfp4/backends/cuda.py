"""The CUDA backend: what the compiled extension offers on this GPU."""

from collections.abc import Sequence

import torch

from megatron_nvfp4.recipes import Format

from .extension import why_not_cuda


class CudaBackend:
    """See `Backend`."""

    name = "cuda"
    features: frozenset[str] = frozenset()

    def why_not(
        self,
        op: str,
        formats: Sequence[Format],
        shape: Sequence[int] | None = None,
        device: torch.device | str | None = None,
    ) -> str | None:
        return why_not_cuda() or f"the extension has no kernel for {op}"


BACKEND = CudaBackend()
