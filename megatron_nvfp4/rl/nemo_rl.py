"""TRIAGE in NeMo-RL: TriageLossFn, to be given where ClippedPGLossFn was. Nothing of NeMo-RL is patched.

setup() of nemo_rl.algorithms.grpo returns the loss function it built; a run script replaces it:
    loss_fn = TriageLossFn(config.loss_fn, use_fused_linear_logprobs=loss_fn.use_fused_linear_logprobs)
Settings: the mapping loss_fn.triage of the YAML file (fields of TriageConfig), or the argument triage.

Written against https://github.com/NVIDIA-NeMo/RL at 7ea279abfbeb698b092856d0dab61e7cf39bc909:
nemo_rl/algorithms/loss/loss_functions.py and interfaces.py. Importing this module imports no NeMo-RL; the
class, which derives from NeMo-RL's, is made when it is first asked for.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import adapter
from .triage import TriageConfig, triage_advantages, triage_gate, triage_repair_loss


def __getattr__(name: str) -> type:
    if name == "TriageLossFn":
        globals()[name] = _make_class()  # pickle finds the class by module and name, in any process
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Batch(NamedTuple):
    """TRIAGE's inputs with each response moved to the front of its row (B, S - 1), and the way back."""

    learner: Tensor  # live
    sampler: Tensor
    delta: Tensor
    advantages: Tensor
    mask: Tensor  # bool
    place: Tensor  # int64: where a token of the original row stands in the moved one; negative in front of it


def _move(next_token_logprobs: Tensor, data: Any, force_on_policy_ratio: bool) -> _Batch:
    """Rows begin with the prompt, whose length differs; segments count from the first token in the loss."""
    if data.get("generation_logprobs") is None:
        adapter.refuse(
            "NeMo-RL",
            "data without generation_logprobs",
            "the gap needs the sampler's log-probs",
            "let the generation return log-probs",
        )
    mask = (data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)) != 0
    width = mask.shape[1]
    column = torch.arange(width, device=mask.device)
    first = (
        torch.where(mask, column, width).amin(1, keepdim=True)
        if width
        else mask.new_zeros(mask.shape)
    )
    source = (column + first).clamp_max(max(width - 1, 0))

    def move(values: Tensor) -> Tensor:
        return values.gather(1, source)

    live, sampler = move(next_token_logprobs), move(data["generation_logprobs"][:, 1:])
    learner = live if force_on_policy_ratio else move(data["prev_logprobs"][:, 1:])
    return _Batch(
        learner=live,
        sampler=sampler,
        delta=learner.detach() - sampler,
        advantages=move(data["advantages"][:, 1:]),
        mask=move(mask) & (column + first < width),
        place=column - first,
    )


def _with_advantages(data: Any, moved: Tensor, place: Tensor) -> Any:
    """The data with other advantages, given as _move left them; 0 in front of a response."""
    old = data["advantages"]
    back = torch.where(place >= 0, moved.gather(1, place.clamp_min(0)), 0)
    changed = data.copy()
    changed["advantages"] = torch.cat([old[:, :1], back.to(old.dtype)], 1)
    return changed


def _make_class() -> type:
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossFn

    class TriageLossFn(ClippedPGLossFn):
        """ClippedPGLossFn on the gated advantages, plus the live Repair loss.

        The gap is prev_logprobs - generation_logprobs, or that of the live log-probs with
        force_on_policy_ratio. A response begins at its first token in the loss. Repair is averaged as the
        policy loss is: over tokens, or over sequences with token_level_loss=False. Right for any number of
        updates per rollout, with and without importance-sampling correction. Metrics triage/* are token sums
        over global_valid_toks (repair_loss: over what the loss is divided by), which NeMo-RL adds over
        micro-batches.

        ValueError names what is not supported: sequence_level_importance_ratios, data without
        generation_logprobs.
        """

        def __init__(
            self,
            cfg: Any,
            use_fused_linear_logprobs: bool = False,
            triage: TriageConfig | None = None,
        ) -> None:
            super().__init__(cfg, use_fused_linear_logprobs=use_fused_linear_logprobs)
            self.triage = _settings(cfg, triage)
            self.metric_normalizations = _normalizations(self)

        def __call__(
            self,
            next_token_logprobs: Tensor,
            data: Any,
            global_valid_seqs: Tensor,
            global_valid_toks: Tensor,
        ) -> tuple[Tensor, dict[str, Any]]:
            counts = {
                "global_valid_seqs": global_valid_seqs,
                "global_valid_toks": global_valid_toks,
            }
            return _loss(self, super().__call__, next_token_logprobs, data, counts)

    TriageLossFn.__module__, TriageLossFn.__qualname__ = __name__, "TriageLossFn"
    return TriageLossFn


def _settings(cfg: Any, triage: TriageConfig | None) -> TriageConfig:
    """Settings of the argument or of cfg.triage, checked together with the rest of cfg."""
    if cfg.sequence_level_importance_ratios:
        adapter.refuse(
            "NeMo-RL",
            "sequence_level_importance_ratios=True",
            "the ratio is one per response, through which the renormalised gate cancels out",
            "set it to False",
        )
    given = getattr(cfg, "triage", None)
    if triage is None:
        return adapter.read_config(dict(given or {}), "NeMo-RL")
    if given:
        raise ValueError(
            f"TRIAGE with NeMo-RL: settings in loss_fn.triage={dict(given)} and in the argument "
            "`triage`; give one of them"
        )
    adapter.check_config(triage, "NeMo-RL")
    return triage


def _normalizations(loss_fn: Any) -> dict[str, Any]:
    """What NeMo-RL divides each metric by, with ours."""
    from nemo_rl.algorithms.loss.interfaces import MetricNormalizer

    known = loss_fn.metric_normalizations
    ours = dict.fromkeys(adapter.TOKEN_METRICS, MetricNormalizer.TOKENS)
    return {**known, **ours, "triage/repair_loss": known["loss"]}


def _loss(
    loss_fn: Any,
    stock: Callable[..., tuple[Tensor, dict[str, Any]]],
    next_token_logprobs: Tensor,
    data: Any,
    counts: dict[str, Tensor],
) -> tuple[Tensor, dict[str, Any]]:
    """The stock loss on the gated advantages plus Repair, with the metrics of both."""
    batch = _move(next_token_logprobs, data, loss_fn.force_on_policy_ratio)
    gate = replace(loss_fn.triage, repair_weight=0.0)
    tokens = batch.delta, batch.advantages, batch.mask
    gated, _ = triage_advantages(*tokens, config=gate)
    loss, reported = stock(
        next_token_logprobs=next_token_logprobs,
        data=_with_advantages(data, gated, batch.place),
        **counts,
    )
    repair = _repair(loss_fn, batch, data, **counts)
    weights = triage_gate(*tokens, config=gate)
    metrics = adapter.token_metrics(
        weights, batch.advantages, gated, batch.delta, batch.mask, gate.tail_gap
    )
    sums = {name: (x.sum() / counts["global_valid_toks"]).item() for name, x in metrics.items()}
    return loss + repair, {**reported, **sums, "triage/repair_loss": repair.item()}


def _repair(
    loss_fn: Any, batch: _Batch, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
) -> Tensor:
    """This micro-batch's share of the update's Repair loss: reduced as the policy loss is."""
    from nemo_rl.algorithms.loss.interfaces import LossType
    from nemo_rl.algorithms.utils import masked_mean

    token_level = loss_fn.loss_type == LossType.TOKEN_LEVEL
    repair = triage_repair_loss(
        batch.learner,
        batch.sampler,
        batch.advantages,
        batch.mask,
        config=replace(loss_fn.triage, norm="token" if token_level else "response"),
        step=0,
    )
    token_mask, sample_mask = data["token_mask"][:, 1:], data["sample_mask"]
    every = repair.expand(token_mask.shape)
    if token_level:
        mask = token_mask * sample_mask.unsqueeze(-1)
        return masked_mean(every, mask, global_normalization_factor=global_valid_toks)
    return masked_mean(
        masked_mean(every, token_mask, dim=-1),
        sample_mask,
        global_normalization_factor=global_valid_seqs,
    )
