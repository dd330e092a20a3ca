"""What the framework adapters share: settings, refusals, gathering over context parallelism, the loss hooks.

A framework calls its loss on one micro-batch, so two of TRIAGE's forms are out of reach there:
norm="token" and repair_norm="segment" need sums over the whole update. The adapters therefore run
norm="response" and repair_norm="token", of which every micro-batch computes its own share exactly.

The response form keeps each response's sum of coefficients (sum of w * norm = sum of m). That is why it
is right under both reductions of these frameworks: a mean over responses, and a mean over all tokens.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from .corrections import icepop_weights, tis_weights
from .layout import compute_dtype
from .triage import GateCalibration, TriageConfig, triage_advantages, triage_gate

PREFIX = "triage_"
TOKEN_METRICS = tuple(
    f"triage/{name}"
    for name in ("gate_weight", "gated", "deep_tail", "shift_negative", "shift_positive")
)


def refuse(framework: str, what: str, why: str, remedy: str) -> NoReturn:
    """Raises ValueError that names the framework, the setting, the reason and the remedy."""
    raise ValueError(f"TRIAGE with {framework}: {what} is not supported: {why}; {remedy}")


def read_config(settings: Mapping[str, Any], framework: str) -> TriageConfig:
    """A TriageConfig from settings named as its fields, e.g. {"repair_weight": 0.0}.

    What is not given keeps the reported setting, except repair_norm, which is "token". calibration is a
    mapping of GateCalibration's fields. ValueError names an unknown setting, a value of the wrong type or
    out of range, and a form that a micro-batch cannot compute.
    """
    known = {field.name: field.default for field in fields(TriageConfig)}
    values: dict[str, Any] = {"repair_norm": "token"}
    for name, value in settings.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"TRIAGE with {framework}: unknown setting {name}={value!r}; {hint}")
        values[name] = _typed(framework, name, value, known[name])
    config = TriageConfig(**values)
    check_config(config, framework)
    return config


def _typed(framework: str, name: str, value: Any, default: Any) -> Any:
    """The value in the type of the setting; YAML reads 0 as an integer and 1e-3 as a string."""
    if name == "calibration":
        if value is None or isinstance(value, GateCalibration):
            return value
        names = {field.name for field in fields(GateCalibration)}
        if isinstance(value, Mapping) and set(value) == names:
            return GateCalibration(**{key: float(number) for key, number in value.items()})
        raise ValueError(
            f"TRIAGE with {framework}: calibration={value!r} is not a mapping of {sorted(names)}; "
            "take them from calibrate_gate"
        )
    wanted = type(default)
    if isinstance(value, wanted) and not isinstance(value, bool):
        return value
    if wanted is float and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    raise ValueError(
        f"TRIAGE with {framework}: {name}={value!r} is a {type(value).__name__}; "
        f"give a {wanted.__name__} such as {default!r}"
    )


def check_config(config: TriageConfig, framework: str) -> None:
    """Raises ValueError for forms that need more than a micro-batch or the number of the update."""
    if config.norm != "response":
        refuse(
            framework,
            f"norm={config.norm!r}",
            "the token form divides by a sum over the whole update and the loss sees one micro-batch",
            "use norm='response', which is right under a mean over tokens too",
        )
    if config.repair_norm != "token" and config.repair_weight:
        refuse(
            framework,
            f"repair_norm={config.repair_norm!r}",
            "it divides by the number of segments of the whole update and the loss sees one micro-batch",
            "use repair_norm='token', which is equal where all segments are full",
        )
    if config.repair_start and config.repair_weight:
        refuse(
            framework,
            f"repair_start={config.repair_start}",
            "the loss is not told the number of the update",
            "start with repair_weight=0 and resume without it at that update",
        )


class Part(NamedTuple):
    """The responses of one micro-batch as one context-parallel rank holds them."""

    lengths: list[int]  # of the whole responses
    positions: (
        Tensor | None
    )  # int64: where each token held lies among the whole responses; None: all are held
    local_lengths: list[int]
    group: Any  # process group of the ranks that hold the rest

    def split(self, whole: Tensor) -> list[Tensor]:
        """What this rank holds of a value per token of the whole responses, a tensor per response."""
        return list(self.local(whole).split(self.local_lengths))

    def local(self, whole: Tensor) -> Tensor:
        """The same in one tensor."""
        return whole if self.positions is None else whole[self.positions]


def place_responses(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    spans: Callable[[int], Sequence[tuple[int, int]]] | None,
    group: Any,
    device: torch.device,
) -> Part:
    """Where a rank's tokens lie. spans(i): the ranges of logits of sample i that the rank holds.

    Logits count from the start of the prompt; the one at prompt length - 1 predicts the first response token.
    spans None: the rank holds everything.
    """
    lengths = [int(length) for length in response_lengths]
    if spans is None:
        return Part(lengths, None, lengths, None)
    pieces, local_lengths, base = [], [], 0
    for i, (total, length) in enumerate(zip(total_lengths, lengths, strict=True)):
        first = base - (int(total) - length - 1)
        held = [torch.arange(first + lo, first + hi) for lo, hi in spans(i) if lo < hi]
        local_lengths.append(sum(len(piece) for piece in held))
        pieces += held
        base += length
    positions = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)
    return Part(lengths, positions.to(device, non_blocking=True), local_lengths, group)


def gather_responses(columns: Sequence[Tensor], part: Part) -> list[Tensor]:
    """Values per token held (L,) to values per token of the whole responses (T,), bit for bit on every rank.

    One all-reduce for all columns, which share a dtype. It adds the bits as integers, each to zeros:
    nothing is rounded, and infinities, NaN and -0 pass. Detached.
    """
    if part.positions is None:
        return [column.detach() for column in columns]
    local = torch.stack([column.detach() for column in columns])
    whole = local.new_zeros(len(columns), sum(part.lengths))
    whole[:, part.positions] = local
    bits = whole.view(torch.int64 if whole.dtype == torch.float64 else torch.int32)
    dist.all_reduce(bits, group=part.group)
    return list(whole)


def token_metrics(
    weights: Tensor, advantages: Tensor, changed: Tensor, delta: Tensor, mask: Tensor, tail: float
) -> dict[str, Tensor]:
    """TOKEN_METRICS per token, 0 at masked ones, to be averaged as the framework averages its own.

    gate_weight: w. gated: w < 1. deep_tail: delta below the tail gap. shift_negative, shift_positive:
    |A' - A| where A < 0 (the gate and its renormalisation) and where A > 0 (Repair; the renormalisation too
    in a response that also has negative advantages).
    """
    valid = mask != 0
    shift = (changed - advantages).abs()
    columns = (
        weights,
        (weights < 1).to(weights.dtype),
        (delta < tail).to(weights.dtype),
        torch.where(advantages < 0, shift, 0),
        torch.where(advantages > 0, shift, 0),
    )
    return {name: torch.where(valid, x, 0) for name, x in zip(TOKEN_METRICS, columns, strict=True)}


@dataclass(frozen=True)
class Hooks:
    """What slime and miles do differently for the same two hooks."""

    name: str
    policy_loss: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    tis: Callable[..., tuple[Tensor, list[Tensor], dict[str, Tensor]]]
    place: Callable[..., Part]  # (args, batch, device) -> Part


def policy_loss(
    hooks: Hooks,
    args: Namespace,
    batch: Mapping[str, Any],
    logits: Tensor,
    sum_of_sample_mean: Callable[[Tensor], Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """The framework's own policy loss on TRIAGE's advantages, and its metrics with TRIAGE's.

    batch: log_probs, rollout_log_probs and advantages are lists of what this rank holds of each response;
    loss_masks are whole. Metrics are reduced by sum_of_sample_mean like the framework's own.
    """
    config = read_config(_settings(args), hooks.name)
    _check_policy_loss(hooks, args, batch, config)
    part = hooks.place(args, batch, logits.device)
    gap, advantages = _columns(hooks, batch, part)
    delta, whole = gather_responses([gap, advantages], part)
    mask, offsets = torch.cat(list(batch["loss_masks"])), _offsets(part)
    tis = _stock_weights(args, delta, mask, offsets) if config.repair_weight else None
    changed, _ = triage_advantages(
        delta, whole, mask, offsets=offsets, config=config, tis_weights=tis
    )
    metrics = _reduce_ready(delta, whole, changed, mask, offsets, config)
    loss, reported = hooks.policy_loss(
        args,
        {**batch, "advantages": part.split(changed.to(batch["advantages"][0].dtype))},
        logits,
        sum_of_sample_mean,
    )
    reduced = {name: sum_of_sample_mean(part.local(x)).detach() for name, x in metrics.items()}
    return loss, {**reported, **reduced}


def tis_triage(
    hooks: Hooks,
    args: Namespace,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: list[Tensor],
    rest: Mapping[str, Any],
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """The framework's own TIS, then the gate on the token losses. No Repair: it needs the advantages.

    pg_loss is -ratio * A, clipped, so its sign is minus that of A; its size stands in for |A|, which is exact
    with one update per rollout and irrelevant where A is constant in a response (GRPO). Metrics are per
    token, as the framework expects them from this hook.
    """
    config = _gate_config(hooks, args)
    part = hooks.place(args, rest, pg_loss.device)
    batch = {"log_probs": train_log_probs, "rollout_log_probs": rollout_log_probs}
    _require_log_probs(hooks, batch)
    gap = _gap(hooks, batch, part)
    dtype = compute_dtype(gap, pg_loss)
    delta, advantages = gather_responses([gap.to(dtype), -pg_loss.detach().to(dtype)], part)
    mask, offsets = torch.cat(loss_masks), _offsets(part)
    changed, _ = triage_advantages(delta, advantages, mask, offsets=offsets, config=config)
    act = advantages != 0
    coefficient = torch.where(act, changed / torch.where(act, advantages, 1), 1)
    metrics = _reduce_ready(delta, advantages, changed, mask, offsets, config)
    loss, masks, reported = hooks.tis(
        args,
        pg_loss=pg_loss,
        train_log_probs=train_log_probs,
        rollout_log_probs=rollout_log_probs,
        loss_masks=loss_masks,
        **rest,
    )
    loss = loss * part.local(coefficient).to(loss.dtype)
    return loss, masks, {**reported, **{name: part.local(x) for name, x in metrics.items()}}


def _settings(args: Namespace) -> dict[str, Any]:
    """The keys of --custom-config-path that begin with triage_, without that prefix."""
    return {
        name.removeprefix(PREFIX): value
        for name, value in vars(args).items()
        if name.startswith(PREFIX)
    }


def _gate_config(hooks: Hooks, args: Namespace) -> TriageConfig:
    settings = _settings(args)
    if settings.get("repair_weight"):
        refuse(
            hooks.name,
            f"triage_repair_weight={settings['repair_weight']} in tis_triage",
            "the TIS hook is not given the advantages that Repair adds to",
            "use the policy_loss hook, or leave the key out",
        )
    config = read_config({**settings, "repair_weight": 0.0}, hooks.name)
    estimator, num = args.advantage_estimator, updates_per_rollout(args)
    if estimator == "cispo":
        refuse(
            hooks.name,
            "--advantage-estimator cispo in tis_triage",
            "its token loss is multiplied by the log-prob, so that its sign is not that of the advantage",
            "use the policy_loss hook, which reads the advantages themselves",
        )
    _refuse_sequence_ratio(hooks.name, estimator)
    if estimator != "grpo" and num > 1:
        refuse(
            hooks.name,
            f"--advantage-estimator {estimator} in tis_triage with {num} updates per rollout",
            "the advantages may change within a response and the token loss has them times the ratio",
            "use the policy_loss hook with triage_repair_weight: 0, or one update per rollout",
        )
    return config


def _check_policy_loss(
    hooks: Hooks, args: Namespace, batch: Mapping[str, Any], config: TriageConfig
) -> None:
    if args.use_rollout_logprobs:
        refuse(
            hooks.name,
            "--use-rollout-logprobs",
            "the gap needs the learner's own log-probs before the update, which are then not computed",
            "drop the flag; use --use-tis to correct for the sampler",
        )
    _require_log_probs(hooks, batch)
    _refuse_sequence_ratio(hooks.name, args.advantage_estimator)
    if _weighted(args) and (args.custom_tis_function_path or "").endswith(".tis_triage"):
        refuse(
            hooks.name,
            "tis_triage together with policy_loss",
            "the gate would be applied twice",
            "drop --custom-tis-function-path; policy_loss works with plain --use-tis",
        )
    if not config.repair_weight:
        return
    if (num := updates_per_rollout(args)) > 1:
        refuse(
            hooks.name,
            f"Repair with {num} updates per rollout",
            "it is added to the advantages, which is exact at the ratio 1 of the first update only",
            f"set {PREFIX}repair_weight: 0 (the gate is exact at any ratio) or make one update per rollout",
        )
    if _weighted(args) and args.custom_tis_function_path not in (None, _icepop_path(hooks)):
        refuse(
            hooks.name,
            f"Repair with --custom-tis-function-path {args.custom_tis_function_path}",
            "Repair is divided by the weight that the loss multiplies with, and this one is unknown",
            f"set {PREFIX}repair_weight: 0, or drop the function",
        )


def _refuse_sequence_ratio(framework: str, estimator: str) -> None:
    if estimator == "gspo":
        refuse(
            framework,
            "--advantage-estimator gspo",
            "its ratio is one per response, through which the renormalised gate cancels out",
            "use grpo",
        )


def _require_log_probs(hooks: Hooks, batch: Mapping[str, Any]) -> None:
    for name, remedy in (
        ("rollout_log_probs", "let the rollout return log-probs (SGLang's return_logprob)"),
        ("log_probs", "let the actor's log-prob pass run"),
    ):
        values = batch.get(name)
        if not values or any(value is None for value in values):
            refuse(hooks.name, f"a batch without {name}", "the gap needs them", remedy)


def updates_per_rollout(args: Namespace) -> int:
    """Optimizer updates made of one rollout's samples, from the framework's arguments."""
    if getattr(args, "num_steps_per_rollout", None):
        return args.num_steps_per_rollout
    if getattr(args, "use_dynamic_global_batch_size", False) or not args.global_batch_size:
        return 1
    return max(1, -(-args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size))


def _weighted(args: Namespace) -> bool:
    """Whether the loss calls its TIS function; for --get-mismatch-metrics it does so without --use-tis."""
    return bool(args.use_tis or args.get_mismatch_metrics)


def _icepop_path(hooks: Hooks) -> str:
    """The framework's own IcePop, whose weights are known."""
    return f"{hooks.tis.__module__}.icepop_function"


def _stock_weights(args: Namespace, delta: Tensor, mask: Tensor, offsets: Tensor) -> Tensor | None:
    """The weights that the framework's loss is going to multiply each token with."""
    if not _weighted(args):
        return None
    low, high = args.tis_clip_low, args.tis_clip
    if args.custom_tis_function_path is None:
        return tis_weights(delta, mask, offsets=offsets, cap=high, floor=low)
    return icepop_weights(delta, mask, offsets=offsets, low=low, high=high)


def _columns(hooks: Hooks, batch: Mapping[str, Any], part: Part) -> tuple[Tensor, Tensor]:
    """Gap and advantages of the tokens held, in one dtype."""
    gap = _gap(hooks, batch, part)
    advantages = torch.cat(list(batch["advantages"])).detach()
    _check_held(hooks, "advantages", batch["advantages"], part)
    dtype = compute_dtype(gap, advantages)
    return gap.to(dtype), advantages.to(dtype)


def _gap(hooks: Hooks, batch: Mapping[str, Any], part: Part) -> Tensor:
    for name in ("log_probs", "rollout_log_probs"):
        _check_held(hooks, name, batch[name], part)
    learner, sampler = (torch.cat(list(batch[n])) for n in ("log_probs", "rollout_log_probs"))
    return learner.detach() - sampler.detach()


def _check_held(hooks: Hooks, name: str, values: Sequence[Tensor], part: Part) -> None:
    held = [value.numel() for value in values]
    if held != part.local_lengths:
        i = next((i for i, n in enumerate(part.local_lengths) if held[i : i + 1] != [n]), 0)
        raise ValueError(
            f"TRIAGE with {hooks.name}: {name} of sample {i} holds {held[i : i + 1]} values where this "
            f"rank's part of the response has {part.local_lengths[i]}; give one value a response token"
        )


def _offsets(part: Part) -> Tensor:
    return torch.tensor([0, *part.lengths]).cumsum(0)


def _reduce_ready(
    delta: Tensor,
    advantages: Tensor,
    changed: Tensor,
    mask: Tensor,
    offsets: Tensor,
    config: TriageConfig,
) -> dict[str, Tensor]:
    weights = triage_gate(delta, advantages, mask, offsets=offsets, config=config)
    return token_metrics(weights, advantages, changed, delta, mask, config.tail_gap)
