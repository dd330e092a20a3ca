"""The learner of parity.py: a Megatron GPTModel that scores what was sampled, and is trained on it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import parity_model
import torch

ROWS_AT_ONCE = 16384  # of the learner's forward
LEARNING_RATE = 3e-4
Pair = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Samples:
    """Sequences as the engine gave them: log-probabilities of the responses' tokens, FP32."""

    prompts: list[list[int]]
    responses: list[list[int]]
    logprobs: torch.Tensor
    temperature: float
    rescored: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.logprobs.numel()


class Learner:
    """A Megatron GPTModel with the checkpoint's weights, by default without a profile."""

    def __init__(self, model: Path, max_positions: int, **policy) -> None:
        from megatron_nvfp4.recipes import resolve

        self.model = parity_model.megatron_model(
            model, resolve(environ={}, **policy), max_positions
        )

    def logprobs(self, samples: Samples) -> torch.Tensor:
        """Of the responses' tokens, FP32, on the device, with gradients."""
        from megatron_nvfp4.mcore.deterministic_run import sampled

        found = []
        for batch in _batches(samples):
            tokens, labels, packed = _packed(batch)
            with sampled([len(prompt) for prompt, _ in batch], samples.temperature):
                losses = self.model(tokens, None, None, labels=labels, packed_seq_params=packed)
            found.append(-losses[labels >= 0])
        return torch.cat(found)

    def ordinary_logprobs(self, samples: Samples) -> torch.Tensor:
        """The same of a model without a profile, at temperature 1: one sequence a call."""
        self.model.eval()  # Megatron trains no experts on two ranks without sequence parallelism
        found = []
        for prompt, response in zip(samples.prompts, samples.responses, strict=True):
            sequence = torch.tensor([[*prompt, *response]], device="cuda")
            length = sequence.shape[1] - 1
            mask = torch.ones(1, 1, length, length, dtype=torch.bool, device="cuda").triu(1)
            positions = torch.arange(length, device="cuda")[None]
            losses = self.model(sequence[:, :-1], positions, mask, labels=sequence[:, 1:])
            found.append(-losses[0, -len(response) :].float())
        return torch.cat(found)

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        """As the sampler takes them."""
        from megatron_nvfp4.mcore.deterministic_forward import hf_weights

        return [(name, weight.detach().contiguous()) for name, weight in hf_weights(self.model)]


class Trainer:
    """Megatron's DDP and optimizer around a learner."""

    def __init__(self, learner: Learner) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.learner, self.finalize = learner, finalize_model_grads
        config = learner.model.config
        self.ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), learner.model)
        settings = OptimizerConfig(
            optimizer="adam", lr=LEARNING_RATE, bf16=True, params_dtype=torch.bfloat16
        )
        self.optimizer = get_megatron_optimizer(settings, [self.ddp])
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE

    def step(self, samples: Samples, advantages: torch.Tensor) -> None:
        """One policy-gradient step; advantages: one of each sequence."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        logprobs = self.learner.logprobs(samples)
        lengths = torch.tensor([len(response) for response in samples.responses])
        weights = advantages.repeat_interleave(lengths).to(logprobs)
        (-(weights * logprobs).mean()).backward()
        self.finalize([self.ddp])
        self.optimizer.step()


def _batches(samples: Samples) -> Iterator[list[Pair]]:
    """Lists of (prompt, response) of no more than ROWS_AT_ONCE tokens, or of one sequence."""
    batch, num_rows = [], 0
    for pair in zip(samples.prompts, samples.responses, strict=True):
        length = sum(map(len, pair))
        if batch and num_rows + length > ROWS_AT_ONCE:
            yield batch
            batch, num_rows = [], 0
        batch.append(pair)
        num_rows += length
    yield batch


def _packed(batch: list[Pair]):
    """(tokens, labels, packed_seq_params) of sequences laid one behind the other."""
    from megatron.core.packed_seq_params import PackedSeqParams

    tokens, labels, ends = [], [], [0]
    for prompt, response in batch:
        tokens += [*prompt, *response[:-1]]
        labels += [-100] * (len(prompt) - 1) + response
        ends.append(len(tokens))
    bounds = torch.tensor(ends, dtype=torch.int32, device="cuda")
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    return *(torch.tensor([rows], device="cuda") for rows in (tokens, labels)), packed
