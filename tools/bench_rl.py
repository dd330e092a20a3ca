"""TRIAGE on an update of 512 responses of 20,000 tokens, beside the PPO-clip loss and a learner's update.

The loss rows take their log-probabilities as given: the loss and its gradient with respect to them, nothing
of the model. extra_ms is what TRIAGE adds to the stock loss, share_percent that over the time of a learner's
update of as many tokens, and rate_at_1_percent the speed, in tokens a second, of an update of which it would
be 1 %.

The learner's rows: forward, log-probabilities and backward of a decoder of SmolLM2-135M's shape on one
micro-batch, repeated for all tokens, and one step of Adam. That model is small and its sequences are short
of 20,000 tokens, so that a token takes less time than in most updates: the shares are large ones. The share
is taken of the faster recipe.
"""

import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_nvfp4.modules import LayerNormLinear, Linear, get_qlinear_params
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
    "tokens_per_s",
    "update_ms",
    "share_percent",
    "rate_at_1_percent",
)
RECIPES = ("bf16", "nvfp4_per_token")
LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, VOCABULARY = 30, 576, 1536, 9, 3, 49152
HEAD_DIM = HIDDEN // HEADS
# Rows and tokens of a micro-batch.
MICRO_BATCH = {"cpu": (1, 128), "cuda": (4, 4096)}
# On a CPU the framework's BF16 products can be many times slower than its FP32 ones.
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}


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


class Layer(nn.Module):
    """Attention with grouped heads, then SwiGLU, of the package's layers."""

    def __init__(self, **options) -> None:
        super().__init__()
        sizes = {
            "qkv": (LayerNormLinear, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
            "out": (Linear, HIDDEN, HIDDEN),
            "gate_up": (LayerNormLinear, HIDDEN, 2 * FFN),
            "down": (Linear, FFN, HIDDEN),
        }
        for name, (kind, inputs, outputs) in sizes.items():
            more = {"normalization": "RMSNorm"} if kind is LayerNormLinear else {}
            setattr(self, name, kind(inputs, outputs, bias=False, name=name, **more, **options))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Learner:
    """A decoder, its log-probabilities, and Adam on float32 copies of its weights."""

    def __init__(self, recipe: str, device: str) -> None:
        params = get_qlinear_params(recipe, device=device)
        options = {"params_dtype": DTYPE[device], "device": device, "qlinear_params": params}
        self.layers = [Layer(**options) for _ in range(LAYERS)]
        table = torch.empty(VOCABULARY, HIDDEN, dtype=DTYPE[device], device=device)
        self.table = nn.Parameter(nn.init.normal_(table, std=0.02))
        self.parameters = [self.table, *(p for layer in self.layers for p in layer.parameters())]
        self.masters = [p.detach().clone().float() for p in self.parameters]
        self.optimizer = torch.optim.Adam(self.masters, lr=1e-6, foreach=True)
        self.tokens = torch.randint(VOCABULARY, MICRO_BATCH[device], device=device)

    def micro_batch(self) -> None:
        """Forward and backward of one micro-batch; gradients add up."""
        x = F.embedding(self.tokens, self.table)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(F.rms_norm(x, (HIDDEN,)), self.table).flatten(0, 1).float()
        F.cross_entropy(logits, self.tokens.flatten()).backward()

    def step(self) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)


def learner_times(recipe: str, device: str, num_runs: int) -> tuple[list[float], float]:
    """Milliseconds of micro-batches and of an optimizer step, after one of each."""
    learner = Learner(recipe, device)
    learner.micro_batch()
    learner.step()
    return [measure(learner.micro_batch, device) for _ in range(num_runs)], measure(
        learner.step, device
    )


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


def learner_row(recipe: str, device: str, num_tokens: int, num_runs: int) -> dict[str, object]:
    """The time of a learner's update of so many tokens, from a micro-batch and an optimizer step."""
    micro, step = learner_times(recipe, device, num_runs)
    num_rows, length = MICRO_BATCH[device]
    parts = num_tokens / (num_rows * length)
    quickest = parts * min(micro) + step
    return {
        "responses": num_rows,
        "tokens": num_rows * length,
        "layout": f"micro-batch {num_rows} x {length}",
        "dtype": str(DTYPE[device]).removeprefix("torch."),
        "computes": f"learner update, {recipe}",
        "runs": num_runs,
        "median_ms": round(statistics.median(micro), 2),
        "min_ms": round(min(micro), 2),
        "tokens_per_s": round(num_tokens / quickest * 1e3),
        "update_ms": round(quickest, 1),
    }


def loss_rows(
    layout: str, device: str, num: int, longest: int, num_runs: int
) -> Iterator[dict[str, object]]:
    """One row per contender.

    The contenders take turns, so that other work on the machine slows them alike; extra_ms and times_stock
    compare the quickest runs.
    """
    data = update(layout, device, num, longest)
    calls = contenders(data)
    check(data, calls)
    times: dict[str, list[float]] = {computes: [] for computes in calls}
    peaks: dict[str, object] = dict.fromkeys(calls, "")
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


def with_share(row: dict[str, object], tokens_per_s: float) -> dict[str, object]:
    """What a row's extra_ms is of a learner's update of its tokens at that speed, in per cent."""
    if not row["extra_ms"]:
        return row
    per_token = row["extra_ms"] / row["tokens"]
    share = 100 * per_token * tokens_per_s / 1e3
    return row | {
        "share_percent": float(f"{share:.3g}"),
        "rate_at_1_percent": float(f"{10 / per_token:.3g}"),
    }


def rows(
    commit: str, num_runs: int = 5, num: int = NUM_RESPONSES, longest: int = LONGEST
) -> Iterator[dict[str, object]]:
    """The learner's rows, then one per layout and contender.

    On the GPU if there is one, else on one CPU thread, where the learner runs twice only.
    """
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu"
    fixed = {
        "device": name,
        "torch": torch.__version__,
        "commit": commit,
        "threads": torch.get_num_threads(),
    }
    fastest = 0.0
    for recipe in RECIPES:
        row = learner_row(recipe, device, num * longest, num_runs if device == "cuda" else 2)
        fastest = max(fastest, row["tokens_per_s"])
        yield fixed | row
        if device == "cuda":
            torch.cuda.empty_cache()
    for layout in ("padded", "ragged"):
        for row in loss_rows(layout, device, num, longest, num_runs):
            yield fixed | with_share(row, fastest)
