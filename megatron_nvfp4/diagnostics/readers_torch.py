"""The dumps of slime and miles.

Layouts as these revisions write them:

slime 624b824a898ab0ec1fcb4d373004c7f3852bf515 (https://github.com/THUDM/slime),
slime/observability/train_data_utils.py and rollout_data_utils.py; miles
31f1ca961a94cb860cec3b2dea34ec332bfa8f76 (https://github.com/radixark/miles), miles/utils/train_dump_utils.py,
miles/backends/training_utils/debug_dump.py and cp_utils.py, miles/ray/rollout/debug_data.py.

A response's last n tokens of `tokens` are its own. In train_data `log_probs` are the learner's before the
update. miles writes a file for every rank: tensor-parallel ranks repeat each other, pipeline stages but the
last lack the log-probs, context-parallel ranks hold two slices each, which are put together here.
"""

import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .readers import FAULTS, Response, in_loss, num_tokens, numbers, said, unknown

SLICED = ("log_probs", "rollout_log_probs", "advantages")  # per context-parallel rank in miles


def load(path: Path) -> Any:
    """What a .pt file holds, by torch's loader of plain data; ValueError if it holds more than that."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path}: not loaded, since it holds Python objects beside tensors and plain values, or is no "
            "file of torch.save; write tensors, numbers, strings, lists and dictionaries"
        ) from error
    except FAULTS as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise  # of the file system
        raise ValueError(f"{path}: is no complete file of torch.save ({said(error)})") from error


def read_samples(path: Path, content: Any) -> tuple[str, list[Response]]:
    """(format, responses) of a file with one dictionary a sample; ValueError for any other content."""
    samples = content.get("samples") if isinstance(content, dict) else None
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise unknown(path, content)
    try:
        if "call" in content:
            call = int(content["call"])
            return "miles policy_loss_debug", [_policy_loss(path, call, x) for x in samples]
        step = int(content["rollout_id"])
        if "format_version" in content:
            versions = _rollout_versions(path, step)
            return "slime train_data", [_slime(step, sample, versions) for sample in samples]
        return "rollout_data", [_rollout(step, sample) for sample in samples]
    except KeyError as error:
        keys = sorted(map(str, samples[0])) if samples else sorted(map(str, content))
        raise ValueError(f"{path}: a sample without {error}; the first one has {keys}") from error


def _column(values: Any, dtype: torch.dtype = torch.float64) -> Tensor | None:
    return None if values is None else numbers(values, dtype)


def _last(values: Any, length: int) -> Tensor | None:
    """The response's tokens of prompt and response."""
    tokens = _column(values, torch.int64)
    return None if tokens is None else tokens[tokens.numel() - length :]


def _mask(values: Any, length: int) -> Tensor:
    """No mask means that every token counts; the length, which may lie, takes no memory."""
    if values is None:
        return torch.ones(1, dtype=torch.bool).expand(length)
    return in_loss(numbers(values))


def _reward(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _slime(step: int, sample: dict[str, Any], versions: list[tuple[str, ...]]) -> Response:
    length = num_tokens(sample["response_lengths"])
    return Response(
        step=step,
        mask=_mask(sample["loss_masks"], length),
        learner=_column(sample.get("log_probs")),
        sampler=_column(sample.get("rollout_log_probs")),
        advantages=_column(sample.get("advantages")),
        tokens=_last(sample.get("tokens"), length),
        reward=_reward(sample.get("rewards")),
        versions=_beside(versions, sample.get("rollout_position")),
    )


def _rollout(step: int, sample: dict[str, Any]) -> Response:
    length = num_tokens(sample["response_length"])
    return Response(
        step=step,
        mask=_mask(sample.get("loss_mask"), length),
        sampler=_column(sample.get("rollout_log_probs")),
        tokens=_last(sample.get("tokens"), length),
        reward=_reward(sample.get("reward")),
        versions=_versions(sample),
    )


def _versions(sample: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(map(str, sample.get("weight_versions") or ()))


def _beside(versions: Sequence[tuple[str, ...]], position: Any) -> tuple[str, ...]:
    """The weight versions of a sample of the rollout dump; none of one that is not in it."""
    known = isinstance(position, int) and 0 <= position < len(versions)
    return versions[position] if known else ()


@lru_cache(maxsize=2)
def _rollout_versions(path: Path, step: int) -> list[tuple[str, ...]]:
    """Weight versions of the samples of the rollout dump beside a train dump; none if it is not there."""
    beside = path.parent.parent / "rollout_data" / f"{step}.pt"
    if not beside.is_file():
        return []
    content = load(beside)
    samples = content.get("samples", []) if isinstance(content, dict) else []
    return [_versions(sample) for sample in samples]


def _policy_loss(path: Path, call: int, sample: dict[str, Any]) -> Response:
    learner, length = _column(sample["old_log_probs"]), num_tokens(sample["response_length"])
    if learner is not None and learner.numel() != length:
        raise ValueError(
            f"{path}: sample {sample.get('index')} has {learner.numel()} of {length} response tokens, a "
            "context-parallel slice that does not say which; give the folder train_data instead"
        )
    return Response(
        step=call,
        mask=_mask(sample["local_loss_mask"], length),
        learner=learner,
        sampler=_column(sample.get("rollout_log_probs")),
        advantages=_column(sample["advantages"]),
    )


# --- one file a rank ------------------------------------------------------------------------------


def is_rank_file(content: Any) -> bool:
    """Whether this is miles' train_data of one rank."""
    return isinstance(content, dict) and isinstance(content.get("rollout_data"), dict)


class _Row(NamedTuple):
    path: Path
    content: dict[str, Any]
    number: int

    def get(self, name: str) -> Any:
        column = self.content["rollout_data"].get(name)
        return None if column is None else column[self.number]


class RankFiles:
    """Collects miles' files of all ranks; a sample's columns can lie in several of them."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Path, int], dict[Any, list[_Row]]] = {}

    def add(self, path: Path, content: dict[str, Any]) -> None:
        """Takes one file; ValueError if it does not say which samples it holds."""
        columns = content["rollout_data"]
        needed = ("sample_indices", "response_lengths", "total_lengths", "loss_masks")
        missing = [name for name in needed if columns.get(name) is None]
        if missing or "rollout_id" not in content:
            raise ValueError(
                f"{path}: a dump of one rank without {', '.join(missing) or 'rollout_id'}; "
                f"its columns are {sorted(map(str, columns))}"
            )
        rows = self._rows.setdefault((path.parent, int(content["rollout_id"])), {})
        indices = columns["sample_indices"]
        indices = indices.tolist() if isinstance(indices, Tensor) else indices
        if None in indices:
            raise ValueError(
                f"{path}: sample_indices has None, so that the files of its ranks cannot be put together; "
                "set Sample.index in the rollout function"
            )
        repeated = [index for index, times in Counter(indices).items() if times > 1]
        if repeated:
            raise ValueError(
                f"{path}: sample_indices has {repeated[0]} more than once, so that the files of its ranks "
                "cannot be put together; give every sample an index of its own"
            )
        for name in (*needed, *SLICED, "tokens", "rewards", "weight_versions", "max_seq_lens"):
            column = columns.get(name)
            if column is not None and len(column) < len(indices):
                raise ValueError(
                    f"{path}: {name} has {len(column)} entries for the {len(indices)} of sample_indices; "
                    "write the dump again"
                )
        for number, index in enumerate(indices):
            rows.setdefault(index, []).append(_Row(path, content, number))

    def rollouts(self) -> Iterator[tuple[Path, Callable[[], list[Response]]]]:
        """(first file, what makes the responses) of each rollout."""
        for (_, step), samples in self._rows.items():
            if samples:
                first = next(iter(samples.values()))[0].path
                yield first, partial(_all_joined, first, step, samples)


def _all_joined(path: Path, step: int, samples: dict[Any, list[_Row]]) -> list[Response]:
    versions = _rollout_versions(path, step)
    return [_joined(step, index, rows, versions) for index, rows in samples.items()]


def _joined(step: int, index: Any, rows: list[_Row], versions: list[tuple[str, ...]]) -> Response:
    first = rows[0]
    total, length = (num_tokens(first.get(f"{name}_lengths")) for name in ("total", "response"))
    for row in rows:
        if (row.get("total_lengths"), row.get("response_lengths")) != (total, length):
            raise ValueError(
                f"{row.path}: sample {index} has other lengths than in {first.path}; the files are of "
                "different runs"
            )
    columns = {name: _assemble(name, rows, total, length) for name in SLICED}
    own = first.get("weight_versions")
    return Response(
        step=step,
        mask=_mask(first.get("loss_masks"), length),
        learner=columns["log_probs"],
        sampler=columns["rollout_log_probs"],
        advantages=columns["advantages"],
        tokens=_last(first.get("tokens"), length),
        reward=_reward(first.get("rewards")),
        versions=_beside(versions, index) if own is None else tuple(map(str, own)),
    )


def _assemble(name: str, rows: list[_Row], total: int, length: int) -> Tensor | None:
    """A column of one sample from the ranks that hold it; None if no rank does."""
    slices: dict[int, Tensor] = {}
    size = 1
    for row in rows:
        values = _column(row.get(name))
        if values is None:
            continue
        size, rank = (
            int(row.content.get(key) or other) for key, other in (("cp_size", 1), ("cp_rank", 0))
        )
        if not 0 <= rank < size:
            raise ValueError(
                f"{row.path}: cp_rank={rank} is no context-parallel rank of cp_size={size}; write the dump "
                "again"
            )
        slices.setdefault(rank, values)
    if not slices:
        return None
    if size == 1:
        values = slices[0]
        if values.numel() != length:
            raise ValueError(
                f"{rows[0].path}: {name} has {values.numel()} of {length} response tokens and the file "
                "names no context-parallel rank; write the dump again with a miles that records cp_rank"
            )
        return values
    if len(slices) < size:
        missing = list(islice((rank for rank in range(size) if rank not in slices), 8))
        raise ValueError(
            f"{rows[0].path}: {name} of a sample lacks the context-parallel ranks {missing} of {size}; "
            "give the files of all ranks"
        )
    num = sum(values.numel() for values in slices.values())
    if num != length:
        raise ValueError(
            f"{rows[0].path}: {name} has {num} of {length} response tokens in all ranks; the files are of "
            "different runs"
        )
    padded = rows[0].get("max_seq_lens")
    spanned = total if rows[0].content.get("qkv_format", "thd") == "thd" else int(padded)
    result = torch.empty(length, dtype=torch.float64)
    for rank, values in slices.items():
        place = zigzag(rank, size, total, length, spanned)
        if place.numel() != values.numel():
            raise ValueError(
                f"{rows[0].path}: {name} of rank {rank} of {size} has {values.numel()} values where "
                f"{place.numel()} belong; the files are of different runs"
            )
        result[place] = values
    return result


def zigzag(rank: int, size: int, total: int, length: int, spanned: int) -> Tensor:
    """int64: the response positions whose log-probs a context-parallel rank holds, in its order.

    The sequence, filled up to `spanned`, is cut into 2 * size chunks; rank r has chunks r and 2 * size - 1 -
    r. The log-prob of a token comes from the position before it.
    """
    chunk = -(-spanned // (2 * size))
    prompt = total - length
    parts = []
    for number in (rank, 2 * size - 1 - rank):
        low = max(number * chunk, prompt - 1)
        high = min((number + 1) * chunk, total - 1)
        parts.append(torch.arange(low, max(low, high)) - (prompt - 1))
    return torch.cat(parts)
