"""TRIAGE in slime: the functions to name on its command line. Nothing of slime is patched.

Gate and Repair, with or without --use-tis:
    --loss-type custom_loss --custom-loss-function-path megatron_nvfp4.rl.slime.policy_loss
TIS and the gate alone:
    --use-tis --custom-tis-function-path megatron_nvfp4.rl.slime.tis_triage
Settings are keys triage_<field of TriageConfig> of the YAML file given with --custom-config-path.

Written against https://github.com/THUDM/slime at 624b824a898ab0ec1fcb4d373004c7f3852bf515: loss.py and
cp_utils.py under slime/backends/megatron_utils. Importing this module imports no slime.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import adapter


def policy_loss(
    args: Namespace,
    batch: dict[str, Any],
    logits: Tensor,
    sum_of_sample_mean: Callable[[Tensor], Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """slime's policy_loss_function on TRIAGE's advantages.

    The gap is log_probs - rollout_log_probs, gathered over context parallelism, so that segments are those
    of the whole response on every rank. A custom loss makes slime run its log-prob pass before the update,
    which its stock loss may skip. PPO clip, CISPO, TIS, OPSM, KL, entropy and dumps are slime's own. Adds
    metrics triage/*, reduced like slime's own: means over a response (over the samples of a rollout, where
    slime counts those as one), averaged over them, or means over tokens with --calculate-per-token-loss.

    ValueError names what is not supported: --use-rollout-logprobs, gspo, a batch without log_probs or
    rollout_log_probs, and with Repair more than one update per rollout or a custom TIS function.
    """
    return adapter.policy_loss(_hooks(), args, batch, logits, sum_of_sample_mean)


def tis_triage(
    args: Namespace,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    **rest: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """slime's vanilla_tis_function, then the gate on its token losses; no Repair.

    ValueError names what is not supported: cispo, gspo, a Repair weight, estimators other than grpo with
    several updates per rollout.
    """
    rest |= {"total_lengths": total_lengths, "response_lengths": response_lengths}
    return adapter.tis_triage(
        _hooks(), args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, rest
    )


def _hooks() -> adapter.Hooks:
    from slime.backends.megatron_utils.loss import policy_loss_function, vanilla_tis_function

    return adapter.Hooks("slime", policy_loss_function, vanilla_tis_function, _place)


def _place(args: Namespace, batch: Mapping[str, Any], device: torch.device) -> adapter.Part:
    from megatron.core import mpu
    from slime.backends.megatron_utils.cp_utils import get_logits_and_tokens_offset_with_cp

    totals, lengths = batch["total_lengths"], batch["response_lengths"]
    if mpu.get_context_parallel_world_size() == 1:
        return adapter.place_responses(totals, lengths, None, None, device)
    return adapter.place_responses(
        totals,
        lengths,
        lambda i: get_logits_and_tokens_offset_with_cp(totals[i], lengths[i])[2],
        mpu.get_context_parallel_group(),
        device,
    )
