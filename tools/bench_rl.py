"""TRIAGE on an update of 512 responses of 20,000 tokens, beside the PPO-clip loss it goes with.

What is timed takes its log-probabilities as given: the loss and its gradient with respect to them, nothing of
the model. The share of a learner update is `extra_ms` over that update's time.
"""

import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_nvfp4.rl import TriageConfig, tis_weights, triage_advantages, triage_repair_loss

NUM_RESPONSES, LONGEST = 512, 20_000
CLIP = (0.2, 0.28)
CONFIG = TriageConfig()
GATE_ONLY = TriageConfig(repair_weight=0.0)
FIELDS = (
    "device",
    "torch",
    "commit",
    "threads",
    "responses",
    "tokens",
    "layout",
    "dtype",
    "computes",
    "runs",
    "median_ms",
    "min_ms",
    "extra_ms",
    "times_stock",
    "peak_mb",
)


def update(layout: str, device: str, num: int, longest: int) -> dict[str, Tensor]:
    """Log-probs, advantages and mask of one update; ragged lengths are from half the longest on."""
    generator = torch.Generator().manual_seed(0)
    offsets, shape = None, (num, longest)
    advantage = torch.randn(num, generator=generator)
    if layout == "ragged":
        lengths = torch.randint(longest // 2, longest + 1, (num,), generator=generator)
        lengths[0] = longest
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        shape = (int(offsets[-1]),)
        advantages = torch.repeat_interleave(advantage, lengths)
        response = torch.repeat_interleave(torch.arange(num), lengths)
    else:
        advantages = advantage[:, None].expand(shape).contiguous()
        response = torch.arange(num)[:, None].expand(shape)
    sampler = -torch.rand(shape, generator=generator)
    tensors = {
        "sampler": sampler,
        "old": sampler + 0.3 * torch.randn(shape, generator=generator) - 0.1,
        "advantages": advantages,
        "mask": torch.rand(shape, generator=generator) < 0.9,
        "response": response,
    }
    if offsets is not None:
        tensors["offsets"] = offsets
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def stock(data: dict[str, Tensor], advantages: Tensor, live: Tensor, tis: Tensor) -> Tensor:
    """PPO-clip with importance weights, mean over responses of token means, as frameworks compute it."""
    mask = data["mask"]
    ratio = torch.exp(live - data["old"])
    clipped = ratio.clamp(1 - CLIP[0], 1 + CLIP[1])
    losses = torch.maximum(-advantages * ratio, -advantages * clipped) * tis
    losses = torch.where(mask, losses, 0)
    if losses.dim() == 2:
        return (losses.sum(1) / mask.sum(1).clamp_min(1)).mean()
    num = data["offsets"].numel() - 1
    zeros = losses.new_zeros(num)
    total = zeros.index_add(0, data["response"], losses)
    return (total / zeros.index_add(0, data["response"], mask.float()).clamp_min(1)).mean()


def contenders(data: dict[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
    """By what is computed: a call that returns the gradient with respect to the live log-probs."""
    offsets, mask, advantages = data.get("offsets"), data["mask"], data["advantages"]

    def run(config: TriageConfig | None, live_repair: bool = False) -> Tensor:
        live = data["old"].clone().requires_grad_()
        delta = data["old"] - data["sampler"]
        tis = tis_weights(delta, mask, offsets=offsets)
        used = advantages
        if config is not None:
            transform = GATE_ONLY if live_repair else config
            used, _ = triage_advantages(
                delta, advantages, mask, offsets=offsets, config=transform, tis_weights=tis
            )
        loss = stock(data, used, live, tis)
        if live_repair:
            loss = loss + triage_repair_loss(
                live, data["sampler"], advantages, mask, offsets=offsets, config=config, step=0
            )
        loss.backward()
        return live.grad

    return {
        "stock loss": lambda: run(None),
        "stock loss, gate": lambda: run(GATE_ONLY),
        "stock loss, gate and repair": lambda: run(CONFIG),
        "stock loss, gate, live repair": lambda: run(CONFIG, live_repair=True),
    }


def check(data: dict[str, Tensor], calls: dict[str, Callable[[], Tensor]]) -> None:
    """RuntimeError unless both forms of Repair give one gradient and masked tokens get none."""
    transformed = calls["stock loss, gate and repair"]()
    live = calls["stock loss, gate, live repair"]()
    difference = ((transformed - live).norm() / live.norm()).item()
    if not difference < 1e-6 or bool(transformed[~data["mask"]].any()):
        raise RuntimeError(f"the two forms of Repair differ by {difference}; not timed")


def measure(call: Callable[[], Tensor], device: str) -> float:
    """Milliseconds of one call: of CPU time, which other work disturbs least, or between events of a GPU."""
    if device == "cpu":
        begin = time.process_time()
        call()
        return (time.process_time() - begin) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def rows(
    commit: str, num_runs: int = 5, num: int = NUM_RESPONSES, longest: int = LONGEST
) -> Iterator[dict[str, object]]:
    """One row per layout and contender, on the GPU if there is one, else on one CPU thread.

    The contenders take turns, so that other work on the machine slows them alike; extra_ms and times_stock
    compare the quickest runs.
    """
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu"
    for layout in ("padded", "ragged"):
        data = update(layout, device, num, longest)
        calls = contenders(data)
        check(data, calls)
        times: dict[str, list[float]] = {computes: [] for computes in calls}
        peaks = dict.fromkeys(calls, "")
        for _ in range(num_runs):
            for computes, call in calls.items():
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                times[computes].append(measure(call, device))
                if device == "cuda":
                    peaks[computes] = torch.cuda.max_memory_allocated() >> 20
        base = min(times["stock loss"])
        for computes, values in times.items():
            yield {
                "device": name,
                "torch": torch.__version__,
                "commit": commit,
                "threads": torch.get_num_threads(),
                "responses": num,
                "tokens": data["mask"].numel(),
                "layout": layout,
                "dtype": "float32",
                "computes": computes,
                "runs": num_runs,
                "median_ms": round(statistics.median(values), 2),
                "min_ms": round(min(values), 2),
                "extra_ms": round(min(values) - base, 2),
                "times_stock": round(min(values) / base, 3),
                "peak_mb": peaks[computes],
            }
