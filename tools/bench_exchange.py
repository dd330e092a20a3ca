"""`bench.py exchange`: rows of experts between GPUs, packed in NVFP4 beside BF16; needs two GPUs or more.

Every GPU holds 4096 tokens of 2048 that choose 8 of 128 experts, and an equal share of the experts. Timed is
the way there of one layer: rows gathered, sent and received with their probabilities; "send" is the
all-to-all alone. Packed rows are quantised once a token, in the time. Bytes: sent to other ranks, the mean.
"""

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from bench import TOKEN, machine

from megatron_nvfp4.backends import dispatch, ops
from megatron_nvfp4.modules.autograd import flatten
from megatron_nvfp4.modules.moe_exchange import ExpertExchange

TOKENS, HIDDEN, EXPERTS, TOP_K = 4096, 2048, 128, 8
FIELDS = (
    *("gpu", "torch", "cuda", "driver", "commit", "ranks", "rows", "what"),
    *("bytes", "us", "gb_per_s", "bf16_bytes", "bf16_us", "ratio"),
)


def measurements() -> Iterator[dict]:
    """Lines of the table, from rank 0 of as many processes as there are GPUs."""
    num_ranks = torch.cuda.device_count()
    if num_ranks < 2:
        raise RuntimeError(f"bench exchange: {num_ranks} GPUs; it needs two or more")
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    done = subprocess.run(
        (*command, str(num_ranks), __file__), text=True, stdout=subprocess.PIPE, check=True
    )
    for line in done.stdout.splitlines():
        if line.startswith("row "):
            values = [value.replace("_", " ") for value in line.split()[1:]]
            yield machine() | dict(zip(FIELDS[5:], values, strict=True))


def seconds(call: Callable[[], object], runs: int = 20) -> float:
    """Median time of a call that all ranks make together, by this rank's clock; the slowest rank's."""
    times = []
    for number in range(runs + 5):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        if number >= 5:
            times.append(begin.elapsed_time(end) / 1e3)
    slowest = torch.tensor([statistics.median(times)], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def rank() -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_node_local_rank())
    torch.manual_seed(dist.get_rank())
    x = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()
    routing = dispatch.route(
        torch.rand(TOKENS, EXPERTS, device="cuda").topk(TOP_K).indices, EXPERTS
    )
    index, probs = routing.token_of_row, torch.rand(TOKENS * TOP_K, device="cuda")
    trip = ExpertExchange(dist.group.WORLD, EXPERTS).plan(routing)

    def bf16() -> Sequence[torch.Tensor]:
        return dispatch.gather_rows(x, index), probs

    def packed() -> Sequence[torch.Tensor]:
        rows = dispatch.gather_rows(ops.quantize_nvfp4(x, TOKEN), index)
        return *flatten(rows)[0], probs

    others = 1 - trip.sent[dist.get_rank()] / sum(trip.sent)
    sizes, times = [], []
    for make in (packed, bf16):
        columns = make()
        sizes.append(sum(part[0].nbytes for part in columns) * len(probs) * others)
        times.append(
            (
                seconds(lambda columns=columns: trip.there(*columns)),
                seconds(lambda make=make: trip.there(*make())),
            )
        )
    if dist.get_rank() == 0:
        for what, ours, peer in zip(("send", "quantise, gather, send"), *times, strict=True):
            print(
                *("row", dist.get_world_size(), len(probs), what.replace(" ", "_")),
                *(round(sizes[0]), round(ours * 1e6, 1), round(sizes[0] / ours / 1e9, 1)),
                *(round(sizes[1]), round(peer * 1e6, 1), round(peer / ours, 2)),
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    rank()
