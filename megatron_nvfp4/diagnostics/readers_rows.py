"""Dumps with one JSON object a response: NeMo-RL's and TRIAGE's.

NeMo-RL (https://github.com/NVIDIA-NeMo/RL, 7ea279abfbeb698b092856d0dab61e7cf39bc909,
nemo_rl/algorithms/grpo.py): train_data_stepN.jsonl, rows of prompt and response with padding; the value at
position t belongs to token t, every value a batch of one. TRIAGE (https://github.com/EthanLI24/TRIAGE,
b31788850663df2fa869ed7af375e96055e1d110, its page on calibration): rollout_ID_rank_R.jsonl with rollout_id,
response_id, delta, advantage (a number or one a token) and optionally loss_mask.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .readers import FAULTS, Response, in_loss, num_tokens, numbers, said, unknown

NEMO = ("generation_logprobs", "prev_logprobs", "token_loss_mask", "sample_loss_mask")
TRIAGE = ("rollout_id", "delta", "advantage")
VERL = ("input", "output", "score")


class Rows(NamedTuple):
    """What a file gave."""

    format: str
    responses: list[Response]


def load(path: Path, seen: dict[str, Path]) -> Rows:
    """The responses of a .jsonl file, or of a .json file with a list of the same objects.

    seen: the responses of the files before it, of those that have an identity, and where each was; this
    file's join them. ValueError names the file, the line and what it holds.
    """
    responses: list[Response] = []
    name = "empty"
    for number, row in _rows(path):
        if not isinstance(row, dict):
            raise unknown(path, row)
        if row.keys() >= {*NEMO}:
            name, read = "NeMo-RL train_data", _nemo
        elif row.keys() >= {*TRIAGE}:
            name, read = "TRIAGE", _triage
        elif row.keys() >= {*VERL}:
            raise ValueError(
                f"{path}: verl's rollout dump holds text and scores, no log-probs; write the tensors of the "
                "trainer with megatron_nvfp4.diagnostics.readers.save instead"
            )
        else:
            raise unknown(path, row)
        identity = (row.get("rollout_id"), row.get("response_id"))
        if None not in identity:
            first = seen.get(repr(identity))
            if first is not None:
                where = "" if first == path else f", which {first} holds"
                raise ValueError(
                    f"{path}: line {number} repeats response {identity[1]} of rollout {identity[0]}{where}; "
                    "give each response once"
                )
            seen[repr(identity)] = path
        if name.startswith("NeMo") and _of_row(row, "token_loss_mask") is None:
            continue
        try:
            responses.append(read(path, row))
        except FAULTS as error:
            raise ValueError(f"{path}: line {number}: {said(error)}") from error
    return Rows(name, responses)


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        if path.suffix == ".json":
            content = json.loads(path.read_text())
            yield from enumerate(content if isinstance(content, list) else [content], 1)
            return
        with path.open() as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is no complete JSON ({error})") from error


def _of_row(row: dict[str, Any], name: str) -> Any:
    """A row is written as a batch of one; None where the batch is empty, as behind filtered samples."""
    value = row.get(name)
    if isinstance(value, list) and len(value) <= 1:
        return value[0] if value else None
    return value


def _nemo(path: Path, row: dict[str, Any]) -> Response:
    columns = {name: _of_row(row, name) for name in row}
    step = re.search(r"step(\d+)", path.stem)
    mask = in_loss(numbers(columns["token_loss_mask"]))
    length = num_tokens(columns.get("input_lengths") or mask.numel())
    mask = mask[:length]
    mask[:1] = False  # the first token of a sequence has no log-prob
    first = int(mask.nonzero()[0]) if mask.any() else length  # where the response begins
    used = in_loss(numbers(columns["sample_loss_mask"] or 0))

    def response(name: str) -> Tensor | None:
        if columns.get(name) is None:
            return None
        values = numbers(columns[name])
        return (values.expand(length) if values.numel() == 1 else values)[first:length]

    tokens, filtered = response("token_ids"), columns.get("filtered_rewards")
    return Response(
        step=int(step[1]) if step else 0,
        mask=mask[first:] & bool(used.any()),
        learner=response("prev_logprobs"),
        sampler=response("generation_logprobs"),
        advantages=response("advantages"),
        tokens=None if tokens is None else tokens.long(),
        reward=_reward(columns.get("rewards") if filtered is None else filtered),
    )


def _triage(path: Path, row: dict[str, Any]) -> Response:
    delta = numbers(row["delta"])
    advantages = numbers(row["advantage"])
    mask = row.get("loss_mask")
    return Response(
        step=int(row["rollout_id"]),
        mask=torch.ones(delta.numel(), dtype=torch.bool)
        if mask is None
        else in_loss(numbers(mask)),
        delta=delta,
        advantages=advantages.expand(delta.shape) if advantages.numel() == 1 else advantages,
    )


def _reward(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
