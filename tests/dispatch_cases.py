"""Operands of the tests of rows of experts, and how their results are compared."""

import torch


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def choices(num_tokens: int, num_experts: int, top_k: int, seed: int = 0, dropped: float = 0.2):
    """Distinct experts of every token, some dropped."""
    scores = torch.rand(num_tokens, num_experts, generator=generator(seed))
    chosen = scores.topk(top_k, dim=1).indices
    lost = torch.rand(num_tokens, top_k, generator=generator(seed + 1)) < dropped
    return torch.where(lost, -1, chosen)


def values(*shape: int, dtype=torch.bfloat16, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    x = torch.randn(*shape, generator=generator(seed)) * spread
    return x.to(dtype)


def assert_bits(got, expected) -> None:
    """Equal bytes; a NaN equals a NaN."""
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        if ours.is_floating_point() and ours.element_size() > 1:
            assert torch.equal(ours.isnan(), theirs.isnan())
            ours, theirs = (torch.where(t.isnan(), 0.0, t) for t in (ours, theirs))
        ours, theirs = (t.contiguous().flatten().view(torch.uint8) for t in (ours, theirs))
        assert torch.equal(ours, theirs)


def every_bf16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
