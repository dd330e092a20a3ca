"""One update audited: what the gradient predicts of the mismatch, and what the update does to it.

D = half the sum of delta^2 over the tokens of a rollout, the sampler's log-probabilities held fixed. To first
order an update changes D by the gradient of D times the change of the weights. Where the learner is smooth,
in float64 without quantisation, the prediction has to hold, up to remainders that half a step and a step
back measure without it. Where the learner rounds, its gradient is that of the function before rounding; then
prediction and outcome are shown side by side and nothing is promised.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rl_lab_grpo import generator_of, group_advantages, policy_loss, supervised
from rl_lab_policy import (
    Policy,
    Sampler,
    Size,
    exact_linears,
    problems,
    quantized_linears,
    response_logprobs,
    rewards,
    valid_tokens,
)
from rl_lab_report import write
from torch import Tensor

from megatron_nvfp4.rl import TriageConfig, tis_weights, triage_advantages, triage_gate

SIZE = Size(
    width=32,
    heads=2,
    layers=2,
    digits=4,
    lines=(3, 8),
    prompts=24,
    group=8,
    updates=1,
    lr=3e-4,
    gate_width=8,
    supervised_batch=48,
    supervised_lr=4e-3,
)
SAMPLER = "nvfp4_per_token_bf16_bwd"
LEARNERS = ("bf16", "nvfp4_per_token_bf16_bwd", "nvfp4_per_tensor")
STEP = 1e-4  # norm of the audited change over that of the weights
REPORTED = TriageConfig(
    gate_width=SIZE.gate_width, repair_width=2 * SIZE.gate_width, repair_weight=0.0
)
# For gaps a tenth of those the reported thresholds were set for.
SCALED = TriageConfig(
    gate_width=SIZE.gate_width,
    repair_width=2 * SIZE.gate_width,
    repair_weight=0.0,
    mild_mean=-0.05,
    deep_mean=-0.15,
    tail_gap=-0.6,
)
METHODS = {"none": None, "gate": REPORTED, "gate, thresholds / 10": SCALED}


class Rollout(NamedTuple):
    """A batch and its sampler's log-probabilities, (N, R) but for the prompts; its mean reward."""

    prompts: Tensor
    responses: Tensor
    sampled: Tensor
    advantages: Tensor
    mask: Tensor
    reward: float


class Change(NamedTuple):
    """The change of D along an update: predicted, and realised at multiples of it."""

    predicted: float
    whole: float
    half: float
    back: float
    half_back: float
    energy: float  # D before
    num_tokens: int

    @property
    def odd(self) -> float:
        """The central difference: the first-order change, but for a remainder of third order."""
        return (self.whole - self.back) / 2

    @property
    def remainder(self) -> float:
        """Bound of that remainder, from the central difference at half the step, which has 1/8 of it.

        Twice the estimate, for the fifth order, and the rounding of the sums in float64.
        """
        third = abs(self.odd - (self.half - self.half_back)) * 4 / 3
        return 2 * third + self.num_tokens * 2**-52 * self.energy

    @property
    def tolerance(self) -> float:
        """Bound of |realised / predicted - 1|: curvature and the remainder over the first-order change."""
        curvature = abs(self.whole + self.back) / 2
        return (curvature + self.remainder) / (abs(self.odd) - self.remainder)

    def faults(self) -> list[str]:
        """What is wrong with the prediction; none of the bounds was computed from it."""
        faults = []
        if not abs(self.odd - self.predicted) <= self.remainder:
            faults.append(
                f"predicted {self.predicted:.9g} is not the central difference {self.odd:.9g} "
                f"within {self.remainder:.2g}"
            )
        if not 0 <= self.tolerance < 0.5:
            faults.append(f"the step is not small: tolerance {self.tolerance:.3g}")
        elif not abs(self.whole / self.predicted - 1) <= self.tolerance:
            faults.append(
                f"realised / predicted is {self.whole / self.predicted:.6g}, "
                f"not 1 within {self.tolerance:.3g}"
            )
        return faults


def run(out: Path) -> int:
    """Audit, print, write audit.json; 1 if the smooth learner contradicts its prediction."""
    result = audit()
    out.mkdir(parents=True, exist_ok=True)
    write(out / "audit.json", json.dumps(result, indent=1))
    print(describe(result))
    return 1 if any(row["faults"] for row in result["smooth"]) else 0


def audit(seed: int = 0) -> dict:
    """The whole audit, as plain data; on one machine the same to the bit every time. CPU, one thread."""
    torch.set_num_threads(1)
    start = supervised(SIZE, "cpu", seed).policy
    batch = roll_out(start, seed)
    exact = Policy(SIZE, exact_linears(torch.float64), torch.float64, "cpu")
    exact.copy_from(start)
    smooth = audit_smooth(exact, batch)
    rounded = []
    for recipe in LEARNERS:
        policy = Policy(SIZE, quantized_linears(recipe, "cpu"), torch.bfloat16, "cpu")
        policy.copy_from(start)
        rounded += [{"recipe": recipe} | row for row in audit_rounded(policy, batch)]
    return {"reward": batch.reward, "smooth": smooth, "rounded": rounded}


def roll_out(start: Policy, seed: int) -> Rollout:
    """Responses of the NVFP4 sampler; rewards are turned into GRPO's advantages."""
    generator = generator_of("cpu", seed, 1)
    prompts, answers = problems(SIZE, SIZE.prompts, generator)
    prompts, answers = (x.repeat_interleave(SIZE.group, 0) for x in (prompts, answers))
    sampler = Sampler(SIZE, quantized_linears(SAMPLER, "cpu"), len(prompts), "cpu")
    sampler.policy.copy_from(start)
    responses, sampled = sampler(prompts, generator)
    mask = valid_tokens(responses)
    reward = rewards(responses, answers)
    advantages = group_advantages(reward, SIZE.group)[:, None].expand(mask.shape)
    return Rollout(prompts, responses, sampled, advantages, mask, float(reward.mean()))


def gap(policy: Policy, batch: Rollout) -> Tensor:
    """delta (N, R), 0 at masked tokens; float64 sums follow."""
    logp = response_logprobs(policy, batch.prompts, batch.responses)
    return torch.where(batch.mask, logp - batch.sampled, 0).double()


def energy(policy: Policy, batch: Rollout) -> float:
    with torch.no_grad():
        return float(0.5 * (gap(policy, batch) ** 2).sum())


def gradients(policy: Policy, loss: Callable[[], Tensor]) -> list[Tensor]:
    grads = torch.autograd.grad(loss(), list(policy.parameters()))
    return [grad.double() for grad in grads]


def energy_gradient(policy: Policy, batch: Rollout) -> list[Tensor]:
    return gradients(policy, lambda: 0.5 * (gap(policy, batch) ** 2).sum())


def policy_gradient(
    policy: Policy, batch: Rollout, config: TriageConfig | None
) -> tuple[list[Tensor], int]:
    """Gradient of the loss with importance weights, and with the gate if there is one; tokens gated."""
    with torch.no_grad():
        delta = gap(policy, batch)
    tis = tis_weights(delta, batch.mask)
    advantages, num_gated = batch.advantages, 0
    if config is not None:
        advantages, _ = triage_advantages(
            delta, advantages, batch.mask, config=config, tis_weights=tis
        )
        weights = triage_gate(delta, batch.advantages, batch.mask, config=config)
        num_gated = int((weights != 1).sum())

    def loss() -> Tensor:
        logp = response_logprobs(policy, batch.prompts, batch.responses)
        return policy_loss(logp, advantages, batch.mask, tis)

    return gradients(policy, loss), num_gated


def norm(tensors: Sequence[Tensor]) -> float:
    return float(sum((tensor.double() ** 2).sum() for tensor in tensors) ** 0.5)


def scaled(policy: Policy, direction: Sequence[Tensor]) -> list[Tensor]:
    """The step against a direction whose norm is STEP times that of the weights."""
    factor = -STEP * norm([p.detach() for p in policy.parameters()]) / norm(direction)
    return [factor * tensor for tensor in direction]


def product(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return float(sum((a * b).sum() for a, b in zip(left, right, strict=True)))


def audit_smooth(policy: Policy, batch: Rollout) -> list[dict]:
    """Prediction and outcome of the updates of a learner that can be differentiated.

    sgd: along the gradient. adam: along its signs, which is Adam's first step.
    """
    predictor, rows = energy_gradient(policy, batch), []
    for method, config in METHODS.items():
        grads, num_gated = policy_gradient(policy, batch, config)
        for rule, direction in (("sgd", grads), ("adam", [torch.sign(grad) for grad in grads])):
            update = scaled(policy, direction)
            change = change_of_energy(policy, batch, predictor, update)
            row = {"method": method, "rule": rule, "gated_tokens": num_gated}
            row |= change._asdict() | {"tolerance": change.tolerance, "faults": change.faults()}
            rows.append(row | directions(policy, batch, update))
    return rows


def change_of_energy(
    policy: Policy, batch: Rollout, predictor: Sequence[Tensor], update: Sequence[Tensor]
) -> Change:
    """predictor: the gradient of D. The weights are put back."""
    before = energy(policy, batch)
    kept = [parameter.detach().clone() for parameter in policy.parameters()]

    def moved(multiple: float) -> float:
        shift(policy, kept, update, multiple)
        after = energy(policy, batch)
        shift(policy, kept, update, 0.0)
        return after - before

    return Change(
        predicted=product(predictor, update),
        whole=moved(1.0),
        half=moved(0.5),
        back=moved(-1.0),
        half_back=moved(-0.5),
        energy=before,
        num_tokens=int(batch.mask.sum()),
    )


def shift(
    policy: Policy, kept: Sequence[Tensor], update: Sequence[Tensor], multiple: float
) -> None:
    with torch.no_grad():
        for parameter, value, step in zip(policy.parameters(), kept, update, strict=True):
            parameter.copy_(value + multiple * step if multiple else value)


def directions(policy: Policy, batch: Rollout, update: Sequence[Tensor]) -> dict:
    """Token by token: does |delta| grow where A * delta > 0, as the diagonal of D's expansion says?

    agree_low: the share for which it did, of tokens with A < 0 and delta < 0; agree_high, of those with A > 0
    and delta > 0.
    """
    with torch.no_grad():
        kept = [parameter.detach().clone() for parameter in policy.parameters()]
        before = gap(policy, batch)
        shift(policy, kept, update, 1.0)
        grew = gap(policy, batch).abs() > before.abs()
        shift(policy, kept, update, 0.0)
    regions = {
        "low": batch.mask & (batch.advantages < 0) & (before < 0),
        "high": batch.mask & (batch.advantages > 0) & (before > 0),
    }
    return {f"agree_{name}": float(grew[where].double().mean()) for name, where in regions.items()}


def audit_rounded(policy: Policy, batch: Rollout) -> list[dict]:
    """The same of a learner that rounds: Adam's first step at the laboratory's rate, in BF16 weights."""
    predictor, before, rows = energy_gradient(policy, batch), energy(policy, batch), []
    kept = [parameter.detach().double() for parameter in policy.parameters()]
    for method, config in METHODS.items():
        grads, num_gated = policy_gradient(policy, batch, config)
        shift(policy, kept, [-SIZE.lr * torch.sign(grad) for grad in grads], 1.0)
        moved = [
            p.detach().double() - old for p, old in zip(policy.parameters(), kept, strict=True)
        ]
        row = {"method": method, "gated_tokens": num_gated, "energy": before}
        row |= {"predicted": product(predictor, moved), "realised": energy(policy, batch) - before}
        rows.append(row)
        shift(policy, kept, kept, 0.0)
    return rows


def describe(result: dict) -> str:
    """The audit as two tables."""
    lines = [
        f"smooth learner (float64), sampler {SAMPLER}, step {STEP} of the weights:",
        "",
        "| update | method | tokens gated | D | predicted | realised | realised / predicted "
        "| within | A < 0, delta < 0 grew | A > 0, delta > 0 grew |",
        "|---" * 10 + "|",
    ]
    for row in result["smooth"]:
        lines.append(
            f"| {row['rule']} | {row['method']} | {row['gated_tokens']} | {row['energy']:.3f} "
            f"| {row['predicted']:+.5f} | {row['whole']:+.5f} "
            f"| {row['whole'] / row['predicted']:.5f} | {row['tolerance']:.5f} "
            f"| {100 * row['agree_low']:.1f} % | {100 * row['agree_high']:.1f} % |"
        )
        lines += [f"FAULT: {fault}" for fault in row["faults"]]
    lines += [
        "",
        f"learners that round, Adam's first step at rate {SIZE.lr}; nothing is promised:",
        "",
        "| learner | method | tokens gated | D | predicted | realised |",
        "|---" * 6 + "|",
    ]
    lines += [
        f"| {row['recipe']} | {row['method']} | {row['gated_tokens']} | {row['energy']:.3f} "
        f"| {row['predicted']:+.4f} | {row['realised']:+.4f} |"
        for row in result["rounded"]
    ]
    return "\n".join(lines)
