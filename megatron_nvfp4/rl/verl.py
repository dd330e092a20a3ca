"""TRIAGE in verl 0.9.1: policy losses named `triage` and `triage_bypass`. Nothing of verl is patched.

The entry point group verl.plugins makes `import verl` import this module in every process, which registers
both names:
    actor_rollout_ref.actor.policy_loss.loss_mode=triage
    actor_rollout_ref.rollout.calculate_log_probs=true
    algorithm.rollout_correction.rollout_is=token
    algorithm.rollout_correction.rollout_is_threshold=1e9
The threshold lets the ratios reach the loss untruncated: they are the only trace of the sampler's log-probs
there, and TIS with its own cap is applied here. With algorithm.rollout_correction.bypass_mode=true give
loss_mode=triage_bypass and no rollout_is (verl's older trainer, main_ppo_v0, replaces the loss mode in that
case). Other settings: register() under a name of your own, in a module that VERL_USE_EXTERNAL_MODULES lists.

verl logs a plugin that fails to load at debug level only; check_registered() says so. Imported without verl,
this module imports none and registers nothing.
"""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import adapter
from .triage import TriageConfig, triage_advantages, triage_gate, triage_repair_loss

DEFAULT = TriageConfig(repair_norm="token")
MODES = ("triage", "triage_bypass")


def register(
    name: str, *, config: TriageConfig = DEFAULT, tis_cap: float = 2.0, bypass: bool = False
) -> None:
    """Registers a policy loss of verl under a name. bypass: for rollout_correction.bypass_mode=true.

    tis_cap: cap of the token ratios exp(z - s) that the loss is multiplied with; unused with bypass, whose
    PPO ratio is that to the sampler. ValueError names a form of TRIAGE that a micro-batch cannot compute.
    """
    from verl.trainer.ppo.core_algos import register_policy_loss

    adapter.check_config(config, "verl")
    loss = partial(policy_loss, triage=config, tis_cap=tis_cap, bypass=bypass)
    register_policy_loss(name)(loss)


def check_registered() -> None:
    """Raises RuntimeError unless `import verl` alone makes verl know the names this module registers.

    Asks a fresh process, as verl's workers are: in this one, importing this module has registered them.
    """
    code = (
        "import sys, verl\n"
        "from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as known\n"
        f"sys.exit(' '.join(name for name in {MODES} if name not in known) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise RuntimeError(
            f"verl does not load TRIAGE's plugin in a fresh process ({last}); install megatron-nvfp4 "
            "there, unset VERL_USE_EXTERNAL_PLUGINS or let it name megatron_nvfp4, and import verl and then "
            "megatron_nvfp4.rl.verl to see an error that verl logs at debug level only"
        )


def policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    *,
    triage: TriageConfig = DEFAULT,
    tis_cap: float = 2.0,
    bypass: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """verl's vanilla loss on the gated advantages, plus the live Repair loss.

    Tensors (B, R), as verl's PolicyLossFn. The gap is log(rollout_is_weights), which verl bounds to +-20, or
    with bypass log_prob - old_log_prob. Both parts are aggregated by verl's agg_loss in the loss_agg_mode
    given, so that micro-batches and ranks add up; the paper's form is seq-mean-token-mean. Right for any
    number of updates per rollout. Metrics actor/triage/* are token means of the micro-batch, which verl
    averages over micro-batches and ranks as it does actor/pg_clipfrac.

    ValueError names what is not supported: no rollout_is_weights, weights per sequence or zeroed by IcePop.
    """
    from verl.trainer.ppo.core_algos import agg_loss, compute_policy_loss_vanilla

    mask = response_mask.bool()
    if bypass:
        delta, weights = log_prob.detach() - old_log_prob, None
    else:
        ratio = _ratio(rollout_is_weights, mask)
        delta, weights = (
            ratio.log(),
            ratio.clamp_max(tis_cap),
        )  # the ratio itself: exp(log) would round
    gated, _ = triage_advantages(delta, advantages, mask, config=replace(triage, repair_weight=0.0))
    loss, reported = compute_policy_loss_vanilla(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=gated.to(advantages.dtype),
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
        rollout_is_weights=weights,
    )
    sampler = old_log_prob if bypass else old_log_prob - delta
    repair = triage_repair_loss(
        log_prob,
        sampler,
        advantages,
        mask,
        config=replace(triage, norm=_repair_form(loss_agg_mode)),
        step=0,
    )
    every = repair.to(loss.dtype).expand(
        mask.shape
    )  # at each token, so that it is scaled like the loss
    loss = loss + agg_loss(every, response_mask, loss_agg_mode, **config.global_batch_info)
    metrics = _metrics(delta, advantages, gated, mask, triage)
    return loss, {**reported, **metrics, "actor/triage/repair_loss": repair.detach().item()}


def _metrics(
    delta: Tensor, advantages: Tensor, gated: Tensor, mask: Tensor, triage: TriageConfig
) -> dict[str, float]:
    """Token means of the micro-batch."""
    weights = triage_gate(delta, advantages, mask, config=triage)
    tokens = adapter.token_metrics(weights, advantages, gated, delta, mask, triage.tail_gap)
    num = mask.sum().clamp_min(1)
    return {f"actor/{name}": (x.sum() / num).item() for name, x in tokens.items()}


def _ratio(weights: Tensor | None, mask: Tensor) -> Tensor:
    """exp(delta), checked to be untruncated token ratios; 1 at masked tokens, where verl leaves 0."""
    if weights is None:
        adapter.refuse(
            "verl",
            "loss_mode=triage without rollout_is_weights",
            "they carry the sampler's log-probs to the loss",
            "set algorithm.rollout_correction.rollout_is=token, rollout_is_threshold=1e9 and "
            "actor_rollout_ref.rollout.calculate_log_probs=true, or loss_mode=triage_bypass with bypass_mode",
        )
    ratio = torch.where(mask, weights, 1)
    if (ratio == 0).any():
        adapter.refuse(
            "verl",
            "rollout_is_weights of 0",
            "IcePop has erased the gap of the tokens outside its bounds",
            "set algorithm.rollout_correction.rollout_is_threshold=1e9",
        )
    low = torch.where(mask, weights, torch.inf).amin(-1, keepdim=True)
    differs = (mask & (weights != low)).any()
    if not differs and ((mask.sum(-1, keepdim=True) > 1) & mask & (weights != 1)).any():
        adapter.refuse(
            "verl",
            "rollout_is_weights that are equal at all tokens of every response",
            "rollout_is=sequence keeps the gap of the response only",
            "set algorithm.rollout_correction.rollout_is=token",
        )
    return ratio


def _repair_form(loss_agg_mode: str) -> str:
    """The norm in which the mean that agg_loss takes of a constant is the Repair loss of the whole update."""
    return "response" if loss_agg_mode == "seq-mean-token-mean" else "token"


if "verl" in sys.modules:  # imported by verl's plugin loader, or after verl
    register("triage")
    register("triage_bypass", bypass=True)
