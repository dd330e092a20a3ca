"""TRIAGE in miles: the functions to name on its command line. Nothing of miles is patched.

Gate and Repair, with or without --use-tis:
    --loss-type custom_loss --custom-loss-function-path megatron_nvfp4.rl.miles.policy_loss
TIS and the gate alone:
    --use-tis --custom-tis-function-path megatron_nvfp4.rl.miles.tis_triage
Settings are keys triage_<field of TriageConfig> of the YAML file given with --custom-config-path.

Written against https://github.com/radixark/miles at 31f1ca961a94cb860cec3b2dea34ec332bfa8f76: loss_hub/ and
cp_utils.py under miles/backends/training_utils. Importing this module imports no miles.
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
    """miles' policy_loss_function on TRIAGE's advantages (its LossFunction protocol).

    The gap is log_probs - rollout_log_probs, gathered over context parallelism, so that segments are those
    of the whole response on every rank. PPO clip, TIS, OPSM, KL, entropy and dumps are miles' own. Adds
    metrics triage/*, reduced like miles' own: means over a response (over the samples of a rollout, where
    miles counts those as one), averaged over them, or means over tokens with --calculate-per-token-loss.

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
    """miles' vanilla_tis_function, then the gate on its token losses; no Repair.

    Works with --skip-actor-forward-only too, where train_log_probs are the detached live ones. ValueError
    names what is not supported: cispo, gspo, a Repair weight, estimators other than grpo with several
    updates per rollout.
    """
    rest |= {"total_lengths": total_lengths, "response_lengths": response_lengths}
    return adapter.tis_triage(
        _hooks(), args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, rest
    )


def _hooks() -> adapter.Hooks:
    from miles.backends.training_utils.loss_hub.corrections import vanilla_tis_function
    from miles.backends.training_utils.loss_hub.losses import policy_loss_function

    return adapter.Hooks("miles", policy_loss_function, vanilla_tis_function, _place)


def _place(args: Namespace, batch: Mapping[str, Any], device: torch.device) -> adapter.Part:
    from miles.backends.training_utils.cp_utils import get_logits_and_tokens_offset_with_cp
    from miles.backends.training_utils.parallel import get_parallel_state

    totals, lengths = batch["total_lengths"], batch["response_lengths"]
    padded = batch.get("max_seq_lens")

    def spans(i: int) -> tuple[tuple[int, int], ...]:
        longest = padded[i] if padded is not None else None
        return get_logits_and_tokens_offset_with_cp(
            totals[i], lengths[i], args.qkv_format, longest
        )[2]

    cp = get_parallel_state().cp
    return adapter.place_responses(
        totals, lengths, spans if cp.size > 1 else None, cp.group, device
    )
