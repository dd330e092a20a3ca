"""Stand-ins for the RL frameworks: the functions the adapters call, with their signatures and little else.

SIGNATURES is what was recorded from the sources; a test holds the stand-ins to it, another holds it to the
sources where they can be found. The stand-ins' "logits" are the live log-probs themselves.
"""

import importlib
import sys
from argparse import Namespace
from types import ModuleType, SimpleNamespace

import torch

SIGNATURES = {
    "miles": {
        "origin": "https://github.com/radixark/miles",
        "commit": "31f1ca961a94cb860cec3b2dea34ec332bfa8f76",
        "functions": {
            "miles/backends/training_utils/loss_hub/losses.py": {
                "policy_loss_function": "args batch logits sum_of_sample_mean",
            },
            "miles/backends/training_utils/loss_hub/corrections.py": {
                "vanilla_tis_function": "args pg_loss train_log_probs rollout_log_probs loss_masks kwargs",
                "icepop_function": "args pg_loss train_log_probs rollout_log_probs loss_masks kwargs",
            },
            "miles/backends/training_utils/cp_utils.py": {
                "get_logits_and_tokens_offset_with_cp": "total_length response_length qkv_format max_seq_len "
                "cp_rank cp_size",
            },
            "miles/backends/training_utils/parallel.py": {"get_parallel_state": ""},
        },
    },
    "slime": {
        "origin": "https://github.com/THUDM/slime",
        "commit": "624b824a898ab0ec1fcb4d373004c7f3852bf515",
        "functions": {
            "slime/backends/megatron_utils/loss.py": {
                "policy_loss_function": "args batch logits sum_of_sample_mean",
                "vanilla_tis_function": "args pg_loss train_log_probs rollout_log_probs loss_masks kwargs",
                "icepop_function": "args pg_loss train_log_probs rollout_log_probs loss_masks kwargs",
            },
            "slime/backends/megatron_utils/cp_utils.py": {
                "get_logits_and_tokens_offset_with_cp": "total_length response_length",
            },
        },
    },
    "verl": {
        "origin": "https://github.com/verl-project/verl",
        "commit": "0.9.1, the wheel",
        "functions": {
            "verl/trainer/ppo/core_algos.py": {
                "register_policy_loss": "name",
                "agg_loss": "loss_mat loss_mask loss_agg_mode dp_size batch_num_tokens global_batch_size "
                "loss_scale_factor",
                "compute_policy_loss_vanilla": "old_log_prob log_prob advantages response_mask loss_agg_mode "
                "config rollout_is_weights",
            },
        },
    },
    "nemo_rl": {
        "origin": "https://github.com/NVIDIA-NeMo/RL",
        "commit": "7ea279abfbeb698b092856d0dab61e7cf39bc909",
        "functions": {
            "nemo_rl/algorithms/loss/loss_functions.py": {
                "ClippedPGLossFn.__init__": "self cfg use_fused_linear_logprobs",
                "ClippedPGLossFn.__call__": "self next_token_logprobs data global_valid_seqs "
                "global_valid_toks",
            },
            "nemo_rl/algorithms/utils.py": {
                "masked_mean": "values mask dim global_normalization_factor",
            },
        },
    },
}

# What the frameworks pass to the hooks by keyword, at the same commits.
TIS_KEYWORDS = {
    "miles": "args pg_loss train_log_probs rollout_log_probs loss_masks total_lengths response_lengths "
    "parallel_state max_seq_lens",
    "slime": "args pg_loss train_log_probs rollout_log_probs loss_masks total_lengths response_lengths",
}


def zigzag(
    total: int, response: int, rank: int, size: int, padded: int | None = None
) -> list[tuple[int, int]]:
    """Logit ranges of a rank: of 2 * size chunks of the (padded) sequence, number rank and its mirror."""
    chunk = -(-(padded or total) // (2 * size))
    ranges = []
    for number in (rank, 2 * size - 1 - rank):
        lo = max(number * chunk, total - response - 1)
        hi = min((number + 1) * chunk, total - 1)
        ranges.append((lo, hi) if lo < hi else (0, 0))
    return ranges


def held(values: torch.Tensor, total: int, rank: int, size: int) -> torch.Tensor:
    """What a rank holds of a value per response token."""
    if size == 1:
        return values
    base = total - len(values) - 1
    ranges = zigzag(total, len(values), rank, size)
    return torch.cat(
        [values[lo - base : hi - base] for lo, hi in ranges if lo < hi] or [values[:0]]
    )


def make_batch(lengths=(200, 70, 130, 1), signs=(-1.0, 1.0, -0.5, 1.0), seed=0):
    """Ragged float64 responses with gaps of every tier, in both directions."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n):
        return torch.randn(n, generator=generator, dtype=torch.float64)

    sampler = [-draw(n).abs() - 1 for n in lengths]
    gap = [draw(n) * 0.7 - 0.6 for n in lengths]
    for g in gap:
        g[3::50] = -7.0
    masks = [(draw(n) > -1.2).int() for n in lengths]
    return {
        "log_probs": [s + g for s, g in zip(sampler, gap, strict=True)],
        "rollout_log_probs": sampler,
        "advantages": [
            torch.full((n,), a, dtype=torch.float64) for n, a in zip(lengths, signs, strict=True)
        ],
        "loss_masks": masks,
        "total_lengths": [n + 5 + i for i, n in enumerate(lengths)],
        "response_lengths": list(lengths),
    }


def default_args(**changed) -> Namespace:
    """The arguments of slime and miles that their losses and the adapters read."""
    args = {
        "advantage_estimator": "grpo",
        "use_rollout_logprobs": False,
        "use_tis": False,
        "get_mismatch_metrics": False,
        "custom_tis_function_path": None,
        "tis_clip": 2.0,
        "tis_clip_low": 0.0,
        "eps_clip": 0.2,
        "eps_clip_high": 0.28,
        "qkv_format": "thd",
        "num_steps_per_rollout": None,
        "global_batch_size": 4,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
    }
    return Namespace(**args | changed)


def sample_mean_sum(args, batch, rank: int = 0, size: int = 1):
    """The frameworks' reducer: a sum over samples of means, or over tokens with calculate_per_token_loss."""
    masks, totals = batch["loss_masks"], batch["total_lengths"]
    pieces = [held(m, t, rank, size) for m, t in zip(masks, totals, strict=True)]
    per_token = getattr(args, "calculate_per_token_loss", False)

    def reduce(flat):
        total = flat.new_zeros(())
        for x, piece, mask in zip(flat.split([len(p) for p in pieces]), pieces, masks, strict=True):
            total = total + (x * piece).sum() / (1 if per_token else mask.sum().clamp_min(1))
        return total

    return reduce


def vanilla_tis_function(
    args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs
):
    ratio = torch.exp(torch.cat(list(train_log_probs)) - torch.cat(list(rollout_log_probs)))
    weights = ratio.clamp(args.tis_clip_low, args.tis_clip)
    return pg_loss * weights, loss_masks, {"tis": ratio}


def icepop_function(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    ratio = torch.exp(torch.cat(list(train_log_probs)) - torch.cat(list(rollout_log_probs)))
    kept = (ratio >= args.tis_clip_low) & (ratio <= args.tis_clip)
    return pg_loss * torch.where(kept, ratio, 0), loss_masks, {"tis": ratio}


def load_tis(path):
    """The TIS function of a path, found as the frameworks find it."""
    known = {None: vanilla_tis_function, "stand_in.icepop_function": icepop_function}
    if path in known:
        return known[path]
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def policy_loss_function(args, batch, logits, sum_of_sample_mean):
    """PPO-clip (or CISPO), then the TIS function, then the reducer."""
    advantages = torch.cat(list(batch["advantages"]))
    ratio = torch.exp(logits - torch.cat(list(batch["log_probs"])))
    clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
    pg_loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    if args.advantage_estimator == "cispo":
        pg_loss = -clipped.detach() * advantages * logits
    metrics = {}
    if args.use_tis:
        keys = ("loss_masks", "total_lengths", "response_lengths")
        pg_loss, _, metrics = load_tis(args.custom_tis_function_path)(
            args=args,
            pg_loss=pg_loss,
            train_log_probs=batch["log_probs"],
            rollout_log_probs=batch["rollout_log_probs"],
            **{key: batch[key] for key in keys},
        )
        metrics = {name: sum_of_sample_mean(x) for name, x in metrics.items()}
    loss = sum_of_sample_mean(pg_loss)
    return loss, {"loss": loss.detach(), **metrics}


def install_megatron_style(monkeypatch, rank: int = 0, size: int = 1, group=None) -> None:
    """Puts stand-ins of miles, slime and megatron.core.mpu where the adapters import them."""
    for function in (vanilla_tis_function, icepop_function):
        monkeypatch.setattr(function, "__module__", "stand_in")
    losses = {
        "policy_loss_function": policy_loss_function,
        "vanilla_tis_function": vanilla_tis_function,
        "icepop_function": icepop_function,
    }

    def miles_offsets(
        total_length,
        response_length,
        qkv_format="thd",
        max_seq_len=None,
        cp_rank=None,
        cp_size=None,
    ):
        padded = {"thd": None, "bshd": max_seq_len}[qkv_format]
        return None, None, zigzag(total_length, response_length, rank, size, padded), None

    def slime_offsets(total_length, response_length):
        return None, None, zigzag(total_length, response_length, rank, size), None

    def get_parallel_state():
        return SimpleNamespace(cp=SimpleNamespace(rank=rank, size=size, group=group))

    mpu = SimpleNamespace(
        get_context_parallel_world_size=lambda: size, get_context_parallel_group=lambda: group
    )
    miles = "miles.backends.training_utils"
    install(monkeypatch, "megatron.core", mpu=mpu)
    install(monkeypatch, f"{miles}.loss_hub.losses", **losses)
    install(monkeypatch, f"{miles}.loss_hub.corrections", **losses)
    install(monkeypatch, f"{miles}.cp_utils", get_logits_and_tokens_offset_with_cp=miles_offsets)
    install(monkeypatch, f"{miles}.parallel", get_parallel_state=get_parallel_state)
    slime = "slime.backends.megatron_utils"
    install(monkeypatch, f"{slime}.loss", **losses)
    install(monkeypatch, f"{slime}.cp_utils", get_logits_and_tokens_offset_with_cp=slime_offsets)


def install(monkeypatch, name: str, **attributes) -> ModuleType:
    """A module of that name with those attributes, and packages above it."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        parent = ".".join(parts[:end])
        if parent not in sys.modules or parent == "megatron":
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def agg_loss(
    loss_mat,
    loss_mask,
    loss_agg_mode,
    dp_size=1,
    batch_num_tokens=None,
    global_batch_size=None,
    loss_scale_factor=None,
):
    num = loss_mask.sum(-1)
    total = torch.where(loss_mask != 0, loss_mat, 0).sum(-1)
    if loss_agg_mode == "token-mean":
        return total.sum() / (batch_num_tokens or num.sum()) * dp_size
    assert loss_agg_mode == "seq-mean-token-mean"
    rows = global_batch_size or (num > 0).sum()
    return (total / num.clamp_min(1)).sum() / rows * dp_size


def compute_policy_loss_vanilla(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = ratio.clamp(1 - config.clip_ratio, 1 + config.clip_ratio)
    losses = torch.maximum(-ratio * advantages, -clipped * advantages)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    return loss, {"actor/pg_clipfrac": 0.0}


def install_verl(monkeypatch) -> ModuleType:
    registry = {}

    def register_policy_loss(name):
        return lambda function: registry.setdefault(name, function)

    return install(
        monkeypatch,
        "verl.trainer.ppo.core_algos",
        POLICY_LOSS_REGISTRY=registry,
        register_policy_loss=register_policy_loss,
        agg_loss=agg_loss,
        compute_policy_loss_vanilla=compute_policy_loss_vanilla,
    )


def masked_mean(values, mask, dim=None, global_normalization_factor=None):
    divisor = mask.sum(dim) if global_normalization_factor is None else global_normalization_factor
    return (values * mask).sum(dim) / (divisor + 1e-8)


class ClippedPGLossFn:
    """PPO-clip with token-level importance weights, over tokens or over sequences."""

    def __init__(self, cfg, use_fused_linear_logprobs=False):
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        self.force_on_policy_ratio = cfg.force_on_policy_ratio
        self.sequence_level_importance_ratios = cfg.sequence_level_importance_ratios
        self.loss_type = "token_level" if cfg.token_level_loss else "sequence_level"
        self.metric_normalizations = {"loss": "tokens" if cfg.token_level_loss else "sequences"}

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        token_mask, sample_mask = data["token_mask"][:, 1:], data["sample_mask"]
        advantages = data["advantages"][:, 1:]
        live = next_token_logprobs
        old = live.detach() if self.force_on_policy_ratio else data["prev_logprobs"][:, 1:]
        ratio = torch.exp(live - old)
        losses = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
        losses = losses * torch.exp(old - data["generation_logprobs"][:, 1:])
        if self.loss_type == "token_level":
            mask = token_mask * sample_mask.unsqueeze(-1)
            loss = masked_mean(losses, mask, global_normalization_factor=global_valid_toks)
        else:
            rows = masked_mean(losses, token_mask, dim=-1)
            loss = masked_mean(rows, sample_mask, global_normalization_factor=global_valid_seqs)
        return loss, {"loss": loss.item()}


def install_nemo_rl(monkeypatch) -> None:
    loss = "nemo_rl.algorithms.loss"
    kinds = SimpleNamespace(TOKENS="tokens", SEQUENCES="sequences", NONE="none")
    levels = SimpleNamespace(TOKEN_LEVEL="token_level", SEQUENCE_LEVEL="sequence_level")
    install(monkeypatch, f"{loss}.interfaces", LossType=levels, MetricNormalizer=kinds)
    install(monkeypatch, f"{loss}.loss_functions", ClippedPGLossFn=ClippedPGLossFn)
    install(monkeypatch, "nemo_rl.algorithms.utils", masked_mean=masked_mean)
