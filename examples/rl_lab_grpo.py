"""GRPO on the laboratory's task: the supervised steps before it, one update, what is measured of it."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from rl_lab_policy import (
    Policy,
    Sampler,
    Size,
    problems,
    quantized_linears,
    response_logprobs,
    rewards,
    valid_tokens,
)
from torch import Tensor

from megatron_nvfp4.diagnostics.mismatch import amplifying
from megatron_nvfp4.rl import TriageConfig, calibrate_gate, tis_weights, triage_advantages
from megatron_nvfp4.rl.triage import diagnose

CLIP = (0.2, 0.28)
CALIBRATION_UPDATES = 10  # before the calibrated gate acts
RIGHT_ANSWERS = 0.1  # expected share at which the supervised steps end
SUPERVISED_LIMIT = 4000


def generator_of(device: str, *numbers: int) -> torch.Generator:
    """A generator for a place in the experiment, the same in every arm."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % 2**63
    return torch.Generator(device).manual_seed(seed)


class Learner:
    """A BF16 policy and Adam on float32 copies of its weights."""

    def __init__(self, size: Size, recipe: str, device: str, lr: float) -> None:
        linear = quantized_linears(recipe, device)
        self.policy = Policy(size, linear, torch.bfloat16, device)
        self.parameters = list(self.policy.parameters())
        self.masters = [parameter.detach().float() for parameter in self.parameters]
        self.optimizer = torch.optim.Adam(self.masters, lr=lr, betas=(0.9, 0.95), foreach=True)

    def load(self, masters: Sequence[Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.masters, list(masters))
            torch._foreach_copy_(self.parameters, self.masters)

    def step(self, loss: Tensor, warm_up: float = 1.0) -> Tensor:
        """One optimizer step, gradient norm at most 1; the norm before. warm_up: factor of the rate."""
        loss.backward()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        (group,) = self.optimizer.param_groups
        rate, group["lr"] = group["lr"], group["lr"] * warm_up
        self.optimizer.step()
        group["lr"] = rate
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)
        return norm


def supervised(size: Size, device: str, seed: int) -> Learner:
    learner = Learner(size, "bf16", device, size.supervised_lr)
    learner.policy.initialize(seed)
    learner.load(learner.parameters)
    generator = generator_of(device, seed)
    expected = torch.zeros((), device=device)
    for step in range(SUPERVISED_LIMIT):
        prompts, answers = problems(size, size.supervised_batch, generator)
        logp = response_logprobs(learner.policy, prompts, answers)
        logp = torch.where(valid_tokens(answers), logp, 0)
        # Of fresh prompts, before they are learned: the chance that the sampler writes the whole answer.
        expected = 0.8 * expected + 0.2 * logp.detach().sum(1).exp().mean()
        if expected >= RIGHT_ANSWERS:
            return learner
        learner.step(-logp.sum() / valid_tokens(answers).sum(), min(1.0, (step + 1) / 50))
    raise RuntimeError(
        f"seed {seed}: after {step + 1} supervised steps {expected:.3f} of the answers are right, "
        f"not {RIGHT_ANSWERS}; choose another seed or size"
    )


def triage_config(size: Size) -> TriageConfig:
    return TriageConfig(gate_width=size.gate_width, repair_width=2 * size.gate_width)


def group_advantages(reward: Tensor, group: int) -> Tensor:
    """GRPO: each reward minus its prompt's mean over its prompt's standard deviation; 0 where that is 0."""
    reward = reward.view(-1, group)
    centred = reward - reward.mean(1, keepdim=True)
    return (centred / (reward.std(1, keepdim=True) + 1e-6)).flatten()


def policy_loss(logp: Tensor, advantages: Tensor, mask: Tensor, tis: Tensor) -> Tensor:
    """PPO-clip times importance weights, mean over responses of token means; one update per rollout."""
    ratio = torch.exp(logp - logp.detach())
    clipped = ratio.clamp(1 - CLIP[0], 1 + CLIP[1])
    losses = torch.maximum(-advantages * ratio, -advantages * clipped) * tis
    return (torch.where(mask, losses, 0).sum(1) / mask.sum(1)).mean()


class Method:
    """What an arm does about the mismatch: advantages and weights for the loss."""

    def __init__(self, method: str, config: TriageConfig) -> None:
        self.method, self.config = method, config
        self._window: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(
        self, delta: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(advantages, importance weights, metrics); all (N, R)."""
        if not self.method:
            return advantages, torch.ones_like(delta), {}
        tis = tis_weights(delta, mask)
        if self.method == "tis" or not self._ready(delta, advantages, mask):
            return advantages, tis, {}
        result, metrics = triage_advantages(
            delta, advantages, mask, config=self.config, tis_weights=tis
        )
        names = ("num_gated_segments", "num_low_segments", "num_repair_lost", "max_coefficient")
        return result, tis, {f"triage_{name}": metrics[name] for name in names}

    def _ready(self, *update: Tensor) -> bool:
        """Whether the gate may act; the calibrated one first watches some updates."""
        if self.method == "triage" or self.config.calibration is not None:
            return True
        self._window.append(update)
        if len(self._window) == CALIBRATION_UPDATES:
            window = [torch.cat(tensors) for tensors in zip(*self._window, strict=True)]
            measured = calibrate_gate(*window, config=self.config)
            self.config = replace(self.config, calibration=measured)
            self._window.clear()
        return False


def update(
    size: Size, learner: Learner, sampler: Sampler, method: Method, generator: torch.Generator
) -> dict[str, Tensor]:
    """Synchronise, sample, score, step; what was measured before the step, as tensors on the device."""
    sampler.policy.copy_from(learner.policy)
    prompts, answers = problems(size, size.prompts, generator)
    prompts, answers = (x.repeat_interleave(size.group, 0) for x in (prompts, answers))
    responses, sampled = sampler(prompts, generator)
    mask = valid_tokens(responses)
    reward = rewards(responses, answers)
    advantages = group_advantages(reward, size.group)[:, None].expand(mask.shape)
    logp = response_logprobs(learner.policy, prompts, responses)
    delta = torch.where(mask, logp.detach() - sampled, 0)
    used, tis, extra = method(delta, advantages, mask)
    norm = learner.step(policy_loss(logp, used, mask, tis))
    measured = mismatch(delta, advantages, mask, triage_config(size))
    num = mask.sum()
    return (
        measured
        | extra
        | {
            "reward": reward.mean(),
            "right": (reward == 1).float().mean(),
            "length": mask.sum(1).float().mean(),
            "surprise": -torch.where(mask, sampled, 0).sum() / num,
            "grad_norm": norm,
        }
    )


def mismatch(
    delta: Tensor, advantages: Tensor, mask: Tensor, config: TriageConfig
) -> dict[str, Tensor]:
    """The state of the mismatch, tensors (N, R), delta 0 at masked tokens: of every arm alike.

    gap: mean |delta|, over tokens or over responses of their means. q05: the 5 % quantile of delta (the next
    lower sample). energy: half the sum of squares. mass_*: sums of |A| over tokens with A * delta > 0, by
    the sign of delta, every token alike or each by 1 / length; rho is their ratio. num_*: the gate's
    segments at the reported thresholds: eligible ones, and those of each tier and of the tail rule.
    """
    length = mask.sum(1, keepdim=True)
    num = mask.sum()
    size = delta.abs()
    ordered = torch.where(mask, delta, torch.inf).flatten().sort().values
    place = (0.05 * (num - 1)).long()
    widening = amplifying(delta, advantages)
    low, high = (torch.where(mask & inside, advantages.abs(), 0) for inside in widening)
    gate = diagnose(delta, advantages, mask, None, config)
    mean = gate.delta_sum / gate.num_valid.clamp_min(1)
    counted = {
        "eligible": gate.eligible,
        "mild": gate.eligible & (mean < config.mild_mean) & (mean >= config.deep_mean),
        "deep": gate.eligible & (mean < config.deep_mean),
        "tail_one": gate.eligible & (gate.num_deep == 1),
        "tail_full": gate.eligible & (gate.num_deep >= config.tail_count),
        "gated": gate.eligible & (gate.weight != 1),
    }
    return {
        "tokens": num,
        "gap": size.sum() / num,
        "gap_by_response": (size.sum(1) / length[:, 0]).mean(),
        "q05": ordered.gather(0, place[None])[0],
        "small": ((size < 0.05) & mask).sum() / num,
        "energy": 0.5 * (delta.double() ** 2).sum(),
        "mass_low": low.sum(),
        "mass_high": high.sum(),
        "mass_low_by_response": (low / length).sum(),
        "mass_high_by_response": (high / length).sum(),
        "num_deep_tokens": (mask & (delta < config.tail_gap)).sum(),
    } | {f"num_{name}": where.sum() for name, where in counted.items()}
