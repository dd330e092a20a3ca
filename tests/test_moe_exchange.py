"""Experts shared by two ranks beside one rank that has them all, without Megatron: gloo or NCCL.

The checks run in child processes, one per rank; their docstrings say what they prevent.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron_runs import ROOT, TESTS, run_ranks

from megatron_nvfp4.modules import GroupedLinear, QLinearParams
from megatron_nvfp4.modules.expert_matmul import ExpertMatmul
from megatron_nvfp4.modules.moe import ExpertDataflow
from megatron_nvfp4.modules.moe_exchange import ExpertExchange
from megatron_nvfp4.recipes import RECIPES

HIDDEN, FFN, NUM_EXPERTS, TOP_K = 128, 64, 6, 3
TOKENS = ((21, 13), (0, 9), (5, 0))  # of each rank
# All whose scales belong to a token or a block of it: company then changes nothing.
NAMES = (
    "bf16",
    "nvfp4_per_token",
    "nvfp4_per_token_dequant_bwd",
    "nvfp4_per_token_4over6",
    "mxfp8",
)


def _experts_of(first: int, last: int, name: str, device: str) -> list[GroupedLinear]:
    params, made = QLinearParams(recipe=RECIPES[name]), []
    for k, n in ((HIDDEN, 2 * FFN), (FFN, HIDDEN)):
        layer = GroupedLinear(
            last - first, k, n, bias=False, params_dtype=torch.bfloat16, device=device,
            qlinear_params=params,
        )  # fmt: skip
        with torch.no_grad():
            for expert, weight in zip(range(first, last), layer.weights, strict=True):
                generator = torch.Generator().manual_seed(expert)
                weight.copy_(torch.randn(n, k, generator=generator) * 0.2 * (1 + expert))
        made.append(layer)
    return made


def _tokens(sizes, seed: int, device: str) -> list[tuple[torch.Tensor, ...]]:
    """(tokens, experts, probabilities, output gradient) of every rank; some choices are dropped."""
    generator, made = torch.Generator().manual_seed(seed), []
    for size in sizes:
        x, dy = (torch.randn(size, HIDDEN, generator=generator).bfloat16() for _ in range(2))
        experts = torch.rand(size, NUM_EXPERTS, generator=generator).topk(TOP_K).indices
        experts = experts.masked_fill(torch.rand(size, TOP_K, generator=generator) < 0.2, -1)
        probs = torch.rand(size, TOP_K, generator=generator)
        made.append(tuple(part.to(device) for part in (x, experts, probs, dy)))
    return made


def _step(batch, linears, exchange=None, recompute=False) -> list[torch.Tensor]:
    x, experts, probs, dy = batch
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    matmuls = (ExpertMatmul.of(linear, x) for linear in linears)
    y = ExpertDataflow(recompute=recompute)(x, experts, probs, *matmuls, exchange=exchange)
    y.backward(dy)
    return [y.detach(), x.grad, probs.grad]


def check_rank(device: str) -> None:
    """Prevents: rows that reach another expert or come back to another token, scales that change on the way,
    gradients of the other rank's tokens that are lost."""
    rank = dist.get_rank()
    exchange = ExpertExchange(dist.group.WORLD, NUM_EXPERTS)
    half = NUM_EXPERTS // 2
    for name in NAMES:
        for seed, sizes in enumerate(TOKENS):
            batches = _tokens(sizes, seed, device)
            everyone = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
            all_experts = _experts_of(0, NUM_EXPERTS, name, device)
            own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
            expected = [part[own] for part in _step(everyone, all_experts)]
            for recompute in (False, True):
                mine = _experts_of(rank * half, (rank + 1) * half, name, device)
                found = _step(batches[rank], mine, exchange, recompute)
                for part, wanted in zip(found, expected, strict=True):
                    assert torch.equal(part, wanted), (name, sizes, recompute)
                for linear, whole in zip(mine, all_experts, strict=True):
                    wanted = whole.weights[rank * half : (rank + 1) * half]
                    for weight, reference in zip(linear.weights, wanted, strict=True):
                        assert torch.equal(weight.grad, reference.grad), (name, sizes, recompute)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(2))])
def test_two_ranks_equal_one(device):
    """What check_rank's docstring says."""
    run_ranks((Path(__file__), device), 2, PYTHONPATH=os.pathsep.join((str(ROOT), str(TESTS))))


if __name__ == "__main__":
    if sys.argv[1] == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group({"cpu": "gloo", "cuda": "nccl"}[sys.argv[1]])
    check_rank(sys.argv[1])
    dist.barrier()
    dist.destroy_process_group()
