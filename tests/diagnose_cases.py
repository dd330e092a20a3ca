"""Responses for the tests of `diagnose`, and the same ones as each framework would have dumped them."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from megatron_nvfp4.diagnostics.mismatch import Gaps, amplifying, divide
from megatron_nvfp4.diagnostics.readers import Response, Responses, join
from megatron_nvfp4.diagnostics.readers_torch import zigzag
from megatron_nvfp4.rl import TriageConfig, tis_weights, triage_advantages


def responses(
    num: int = 24, length: int = 200, steps: int = 4, noise: float = 0.02, seed: int = 0
) -> list[Response]:
    """Responses whose sides agree up to noise, of different lengths, a tenth of the tokens masked."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for i in range(num):
        size = int(torch.randint(length // 2, length + 1, (1,), generator=draw))
        sampler = -6 * torch.rand(size, generator=draw) ** 3 - 0.1
        gap = noise * torch.randn(size, generator=draw)
        advantage = float(torch.randn(1, generator=draw))
        made.append(
            Response(
                step=i * steps // num,
                mask=torch.rand(size, generator=draw) < 0.9,
                learner=(sampler + gap).clamp_max(0),
                sampler=sampler,
                advantages=torch.full((size,), advantage),
                tokens=torch.randint(1000, (size,), generator=draw),
                reward=float(advantage > 0),
                versions=(str(i * steps // num),),
            )
        )
    return made


def record(*args: object, **kwargs: object) -> Responses:
    """The record of `responses`."""
    return join(responses(*args, **kwargs))


def of_gaps(*parts: tuple[list[float], list[float]], step: int = 0) -> Responses:
    """A record of (gaps, advantages) of each response, all tokens in the loss."""
    return join(
        [
            Response(
                step=step,
                mask=torch.ones(len(gaps), dtype=torch.bool),
                delta=torch.tensor(gaps, dtype=torch.float64),
                advantages=torch.tensor(advantages, dtype=torch.float64),
            )
            for gaps, advantages in parts
        ]
    )


def with_prompt(response: Response, num: int = 3) -> list[int]:
    """Token ids of prompt and response."""
    return [*range(num), *response.tokens.tolist()]


@contextmanager
def no_room() -> Iterator[None]:
    """No file can grow beyond 100 bytes, as on a disk that is full: writes fail with OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- what the sliders must show -------------------------------------------------------------------


def what_if(gaps: Gaps, config: TriageConfig, cap: float) -> dict[str, float]:
    """What gate and TIS would do with these settings, by the rules of rl/ on every token.

    gated: segments. gated_share: of the eligible ones. gated_tokens, mean_weight: of all tokens.
    max_coefficient: the largest factor of an advantage. rho, rho_gate, rho_tis, rho_both: |A| mass of A < 0,
    delta < 0 over that of A > 0, delta > 0, of the advantages as they are, gated, times the importance
    weight, and both. tis_above: share of tokens beyond the cap; tis_weight: mean importance weight.
    """
    config, responses = replace(config, repair_weight=0.0), gaps.responses
    gated, metrics = triage_advantages(
        responses.delta, responses.advantages, gaps.valid, offsets=responses.offsets, config=config
    )
    metrics = {name: float(value) for name, value in metrics.items()}
    weights = tis_weights(responses.delta, gaps.valid, offsets=responses.offsets, cap=cap)
    gated, weights = gated[gaps.valid], weights[gaps.valid]
    low, high = amplifying(gaps.delta, gaps.advantages)

    def rho(advantages: torch.Tensor) -> float:
        return divide(float(advantages[low].abs().sum()), float(advantages[high].abs().sum()))

    num = metrics["num_tokens"]
    return {
        "gated": metrics["num_gated_segments"],
        "gated_share": divide(metrics["num_gated_segments"], metrics["num_eligible_segments"]),
        "gated_tokens": metrics["num_gated_tokens"],
        "mean_weight": divide(metrics["weight_sum"], num),
        "max_coefficient": metrics["max_coefficient"],
        "rho": rho(gaps.advantages),
        "rho_gate": rho(gated),
        "rho_tis": rho(gaps.advantages * weights),
        "rho_both": rho(gated * weights),
        "tis_above": divide(float((gaps.delta.exp() > cap).sum()), num),
        "tis_weight": float(weights.mean()),
    }


# --- as the frameworks write them -------------------------------------------------------------------


def write_slime(folder: Path, made: list[Response], *, learner: bool = True) -> Path:
    """train_data/ID.pt in format 2, and rollout_data/ID.pt with weight versions."""
    for name in ("train_data", "rollout_data"):
        (folder / name).mkdir(parents=True)
    for step in sorted({response.step for response in made}):
        of_step = [response for response in made if response.step == step]
        samples = [
            {
                "data_parallel_rank": position % 2,
                "rollout_position": position,
                "sample_index": 1000 + position,
                "tokens": torch.tensor(with_prompt(x)),
                "response_lengths": x.mask.numel(),
                "total_lengths": x.mask.numel() + 3,
                "rewards": x.reward,
                "loss_masks": x.mask.int(),
                "rollout_log_probs": x.sampler,
                "advantages": x.advantages,
            }
            | ({"log_probs": x.learner} if learner else {})
            for position, x in enumerate(of_step)
        ]
        dump = {"format_version": 2, "rollout_id": step, "rank": 0, "samples": samples}
        torch.save(dump | {"dp_shards": [], "raw_reward": []}, folder / "train_data" / f"{step}.pt")
        write_rollout(folder / "rollout_data" / f"{step}.pt", step, of_step)
    return folder


def write_rollout(path: Path, step: int, made: list[Response]) -> None:
    """rollout_data/ID.pt: samples as the sampler left them."""
    samples = [
        {
            "group_index": 0,
            "index": position,
            "prompt": "a prompt",
            "tokens": with_prompt(x),
            "response": "a response",
            "response_length": x.mask.numel(),
            "reward": x.reward,
            "loss_mask": x.mask.int().tolist(),
            "weight_versions": list(x.versions),
            "rollout_log_probs": x.sampler.tolist(),
            "status": "completed",
            "metadata": {},
        }
        for position, x in enumerate(made)
    ]
    torch.save({"rollout_id": step, "metadata": {}, "samples": samples}, path)


def write_miles(folder: Path, made: list[Response], *, cp_size: int = 1, tp_size: int = 1) -> Path:
    """train_data/ID_RANK.pt of every rank: tensor-parallel ones alike, context-parallel ones sliced."""
    (folder / "train_data").mkdir(parents=True)
    for step in sorted({response.step for response in made}):
        of_step = [response for response in made if response.step == step]
        for rank in range(cp_size * tp_size + 1):
            columns: dict = {
                "sample_indices": list(range(len(of_step))),
                "tokens": [torch.tensor(with_prompt(x)) for x in of_step],
                "response_lengths": [x.mask.numel() for x in of_step],
                "total_lengths": [x.mask.numel() + 3 for x in of_step],
                "rewards": [x.reward for x in of_step],
                "loss_masks": [x.mask.int() for x in of_step],
                "weight_versions": [list(x.versions) for x in of_step],
                "raw_reward": [x.reward for x in of_step],
            }
            cp_rank = rank // tp_size if rank < cp_size * tp_size else 0
            if rank < cp_size * tp_size:  # the one behind them is an earlier pipeline stage
                for name, column in (
                    ("log_probs", "learner"),
                    ("rollout_log_probs", "sampler"),
                    ("advantages", "advantages"),
                ):
                    columns[name] = [_slice(getattr(x, column), cp_rank, cp_size) for x in of_step]
            content = {"rollout_id": step, "rank": rank, "rollout_data": columns}
            content |= {"cp_rank": cp_rank, "cp_size": cp_size, "qkv_format": "thd"}
            torch.save(content, folder / "train_data" / f"{step}_{rank}.pt")
    return folder


def _slice(values: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    if size == 1:
        return values
    length = values.numel()
    return values[zigzag(rank, size, length + 3, length, length + 3)]


def write_policy_loss(folder: Path, made: list[Response]) -> Path:
    """policy_loss_debug/rank_R_call_C.pt."""
    (folder / "policy_loss_debug").mkdir(parents=True)
    samples = [
        {
            "index": i,
            "total_length": x.mask.numel() + 3,
            "response_length": x.mask.numel(),
            "train_log_probs": x.learner + 1,
            "old_log_probs": x.learner,
            "advantages": x.advantages,
            "local_loss_mask": x.mask.float(),
            "rollout_log_probs": x.sampler,
        }
        for i, x in enumerate(made)
    ]
    content = {"rank": 0, "call": 7, "samples": samples, "ppo_kl": torch.zeros(())}
    torch.save(content, folder / "policy_loss_debug" / "rank_0_call_7.pt")
    return folder


def write_nemo(folder: Path, made: list[Response], *, padding: int = 4) -> Path:
    """train_data_stepN.jsonl: rows of prompt, response and padding, every value a batch of one."""
    folder.mkdir(parents=True, exist_ok=True)
    for step in sorted({response.step for response in made}):
        lines = []
        for i, x in enumerate(response for response in made if response.step == step):
            row = {
                "content": ["text"],
                "rewards": [x.reward],
                "input_lengths": [x.mask.numel() + 3],
                "token_ids": [[*with_prompt(x), *[0] * padding]],
                "token_loss_mask": [_row(x.mask.int(), padding)],
                "sample_loss_mask": [1.0],
                "advantages": [_row(x.advantages, padding)],
                "generation_logprobs": [_row(x.sampler, padding)],
                "prev_logprobs": [_row(x.learner, padding)],
                "idx": i,
            }
            lines.append(json.dumps(row) + "\n")
        (folder / f"train_data_step{step}.jsonl").write_text("".join(lines))
    return folder


def _row(values: torch.Tensor, padding: int) -> list[float]:
    return [0, 0, 0, *values.tolist(), *[0] * padding]


def write_triage(folder: Path, made: list[Response]) -> Path:
    """rollout_ID_rank_R.jsonl: gaps alone."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, x in enumerate(made):
        row = {
            "rollout_id": x.step,
            "response_id": i,
            "delta": (x.learner.double() - x.sampler.double()).tolist(),
            "advantage": float(x.advantages[0]) if i % 2 else x.advantages.tolist(),
            "loss_mask": x.mask.int().tolist(),
        }
        with (folder / f"rollout_{x.step}_rank_{i % 2}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    return folder
