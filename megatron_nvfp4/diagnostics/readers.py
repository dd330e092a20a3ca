"""Log-probs of sampler and learner from the dumps of RL frameworks, as one ragged record.

read() takes files and folders and recognises each by what it holds. Nothing of a framework is imported, and
pickles are loaded with weights_only=True. readers_torch.py has the dumps of slime and miles,
readers_rows.py those of NeMo-RL and TRIAGE; the format of this package, mismatch/1, is here:

    format           "mismatch/1"
    learner, sampler f32 (T,)  log-probs of the response tokens; or delta f32 (T,) in place of both
    mask             u8 (T,)   1 where a token is in the loss
    offsets          i64 (N+1) response i holds tokens offsets[i]:offsets[i+1]
    step             i64 (N,)  the update the response belongs to
    advantage f32 (T,), token i64 (T,), reward f64 (N,), weight_version i64 (N,): optional

as a dictionary of tensors in a .pt file, or as a .safetensors file with the format in its metadata.
"""

import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OWN_FORMAT = "mismatch/1"
SUFFIXES = (".pt", ".safetensors", ".jsonl", ".json")
KNOWN = (
    "slime train_data/ID.pt, slime and miles rollout_data/ID.pt, miles train_data/ID_RANK.pt and "
    "policy_loss_debug/rank_R_call_C.pt, NeMo-RL train_data_stepN.jsonl, TRIAGE rollout_ID_rank_R.jsonl, "
    f"{OWN_FORMAT} (.pt, .safetensors)"
)
# What a file's content can raise in a reader.
FAULTS = (
    TypeError,
    ValueError,
    IndexError,
    KeyError,
    OverflowError,
    AttributeError,
    RuntimeError,
    EOFError,
    OSError,
)


@dataclass(kw_only=True)
class Response:
    """One response as a reader found it. Tensors (n,) of response tokens, or None where there are none."""

    step: int
    mask: Tensor
    learner: Tensor | None = None
    sampler: Tensor | None = None
    delta: Tensor | None = None  # where the file holds the gaps alone
    advantages: Tensor | None = None
    tokens: Tensor | None = None
    reward: float | None = None
    versions: tuple[str, ...] = ()  # of the weights that sampled it, in order


@dataclass(frozen=True, kw_only=True)
class Responses:
    """Responses of one or more updates, ragged, in the order of their steps.

    learner, sampler: float64 (T,) log-probs, or None if any file has none. delta: float64 (T,), learner minus
    sampler, or None. mask: bool (T,). advantages: float64 (T,), tokens: int64 (T,), rewards: float64 (N,),
    or None if any file has none. offsets: int64 (N + 1). steps: int64 (N,), ascending. versions: for each
    response the weight versions that sampled it; empty where unknown. sources: (file, format, number of
    responses). NaN stays NaN.
    """

    learner: Tensor | None
    sampler: Tensor | None
    delta: Tensor | None
    mask: Tensor
    offsets: Tensor
    steps: Tensor
    advantages: Tensor | None = None
    tokens: Tensor | None = None
    rewards: Tensor | None = None
    versions: tuple[tuple[str, ...], ...] = ()
    sources: tuple[tuple[str, str, int], ...] = field(default=())

    @property
    def num_responses(self) -> int:
        return self.steps.numel()

    def response_of_token(self) -> Tensor:
        """int64 (T,): the response each token belongs to."""
        return torch.repeat_interleave(torch.arange(self.num_responses), self.offsets.diff())

    def select(self, kept: Tensor) -> "Responses":
        """The responses at the ascending positions int64 (K,)."""
        lengths = self.offsets.diff()[kept]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        shift = torch.repeat_interleave(self.offsets[kept] - offsets[:-1], lengths)
        place = torch.arange(int(offsets[-1])) + shift

        def at(values: Tensor | None, where: Tensor) -> Tensor | None:
            return None if values is None else values[where]

        return Responses(
            learner=at(self.learner, place),
            sampler=at(self.sampler, place),
            delta=at(self.delta, place),
            mask=self.mask[place],
            offsets=offsets,
            steps=self.steps[kept],
            advantages=at(self.advantages, place),
            tokens=at(self.tokens, place),
            rewards=at(self.rewards, kept),
            versions=tuple(self.versions[i] for i in kept.tolist()) if self.versions else (),
            sources=self.sources,
        )


def join(responses: Sequence[Response], sources: Sequence[tuple[str, str, int]] = ()) -> Responses:
    """The record of some responses, sorted by step; a column that one of them lacks is None.

    ValueError names the response whose columns differ in length, and a column of complex numbers or a mask
    with NaN.
    """
    ordered = sorted(responses, key=lambda response: response.step)
    _check_columns("responses", ordered)

    def flat(name: str, dtype: torch.dtype) -> Tensor | None:
        columns = [getattr(response, name) for response in ordered]
        if any(column is None for column in columns):
            return None
        return torch.cat([torch.empty(0, dtype=dtype), *(numbers(x, dtype) for x in columns)])

    learner, sampler = flat("learner", torch.float64), flat("sampler", torch.float64)
    delta = flat("delta", torch.float64)
    if delta is None or not ordered:
        gaps = [_gap(response) for response in ordered]
        known = all(gap is not None for gap in gaps)
        delta = torch.cat([torch.empty(0, dtype=torch.float64), *gaps]) if known else None
    rewards = [response.reward for response in ordered]
    lengths = [response.mask.numel() for response in ordered]
    return Responses(
        learner=learner,
        sampler=sampler,
        delta=delta,
        mask=torch.cat([torch.empty(0, dtype=torch.bool), *(in_loss(x.mask) for x in ordered)]),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        steps=torch.tensor([response.step for response in ordered], dtype=torch.int64),
        advantages=flat("advantages", torch.float64),
        tokens=flat("tokens", torch.int64),
        rewards=None if None in rewards else torch.tensor(rewards, dtype=torch.float64),
        versions=tuple(response.versions for response in ordered),
        sources=tuple(sources),
    )


def _gap(response: Response) -> Tensor | None:
    if response.delta is not None:
        return response.delta.double()
    if response.learner is None or response.sampler is None:
        return None
    return response.learner.double() - response.sampler.double()


def numbers(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """A column, flat. ValueError for complex numbers, which would lose their imaginary part."""
    column = torch.as_tensor(values)
    if column.is_complex():
        raise ValueError("a column holds complex numbers; give real log-probs and advantages")
    return column.to("cpu", dtype).flatten()


def in_loss(mask: Tensor) -> Tensor:
    """bool: the tokens whose mask is not 0. ValueError for NaN, which is not 0 either."""
    if mask.is_floating_point() and bool(mask.isnan().any()):
        raise ValueError("a mask holds NaN; give 1 for a token in the loss and 0 for another")
    return mask != 0


def num_tokens(value: Any) -> int:
    """A length as a file states it. ValueError below 0."""
    if int(value) < 0:
        raise ValueError(f"a length of {value}; give the number of tokens")
    return int(value)


def _check_columns(where: str | Path, responses: Sequence[Response]) -> None:
    for number, response in enumerate(responses):
        if not -(2**63) <= response.step < 2**63:
            raise ValueError(f"{where}: step {response.step} is beyond 64 bits; count from 0")
        length = response.mask.numel()
        for name in ("learner", "sampler", "delta", "advantages", "tokens"):
            column = getattr(response, name)
            if column is not None and column.shape != (length,):
                raise ValueError(
                    f"{where}: {name} of response {number} of step {response.step} has shape "
                    f"{tuple(column.shape)} and its mask {length} tokens; give one value a response token"
                )


# --- files ----------------------------------------------------------------------------------------


def said(error: BaseException) -> str:
    """What an exception says, in a line; its kind, too, where that is not for the user."""
    lines = str(error).splitlines()
    kind = type(error).__name__
    return lines[0] if lines and isinstance(error, ValueError) else ": ".join([kind, *lines[:1]])


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Whatever a file's content raises in a reader becomes a ValueError that names the file."""
    try:
        yield
    except FAULTS as error:
        if isinstance(error, ValueError | OSError) and str(path) in str(error):
            raise
        raise ValueError(f"{path}: cannot be read ({said(error)}); known are {KNOWN}") from error


def read(paths: Sequence[str | Path]) -> Responses:
    """The responses in some files and folders, whatever format each has.

    A folder of a framework's dump (with train_data or policy_loss_debug below it) is read from there;
    another one gives every file in it of a known ending, but for eval_*. FileNotFoundError for a path that
    is not there, ValueError for a file that cannot be used: it names the file, what it holds and the
    formats that are known, or the other file that holds the same responses. A file given twice is read
    once.
    """
    from . import readers_rows, readers_torch

    rows = partial(readers_rows.load, seen={})
    by_suffix: dict[str, Callable[[Path], Any]] = {
        ".jsonl": rows,
        ".json": rows,
        ".pt": readers_torch.load,
        ".safetensors": _load_safetensors,
    }
    responses: list[Response] = []
    sources: list[tuple[str, str, int]] = []

    def add(path: Path, name: str, found: list[Response]) -> None:
        _check_columns(path, found)
        responses.extend(found)
        sources.append((str(path), name, len(found)))

    ranks = readers_torch.RankFiles()
    paths = files(paths)
    twins = _twins(paths)
    for path in paths:
        with _naming(path):
            for name, found in _recognise(path, by_suffix[path.suffix](path), ranks):
                if found and path in twins:
                    raise ValueError(
                        f"{path}: holds the same bytes as {twins[path]}, so that its responses would count "
                        "twice; give one of the two"
                    )
                add(path, name, found)
    for path, made in ranks.rollouts():
        with _naming(path):
            add(path, "miles train_data", made())
    return join(responses, sources)


def _twins(paths: Sequence[Path]) -> dict[Path, Path]:
    """The files with the bytes of an earlier one, and that one."""
    sizes = {path: path.stat().st_size for path in paths}
    of_size = Counter(sizes.values())
    twins: dict[Path, Path] = {}
    first: dict[bytes, Path] = {}
    for path, size in sizes.items():
        if of_size[size] > 1:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").digest()
            if first.setdefault(digest, path) != path:
                twins[path] = first[digest]
    return twins


def _recognise(path: Path, content: Any, ranks: Any) -> Iterator[tuple[str, list[Response]]]:
    from . import readers_rows, readers_torch

    if isinstance(content, dict) and content.get("format") == OWN_FORMAT:
        yield OWN_FORMAT, list(_own(path, content))
    elif isinstance(content, readers_rows.Rows):
        yield content.format, content.responses
    elif readers_torch.is_rank_file(content):
        ranks.add(path, content)
    else:
        yield readers_torch.read_samples(path, content)


def files(paths: Sequence[str | Path]) -> list[Path]:
    """The files that read() opens, each once, whatever its names. Errors of a path: see there."""
    found: list[Path] = []
    for given in map(Path, paths):
        if given.is_dir():
            found += _folder(given)
        elif not given.exists():
            raise FileNotFoundError(f"{given}: no such file or folder")
        elif given.suffix not in SUFFIXES:
            raise ValueError(
                f"{given}: the ending {given.suffix!r} is none of {', '.join(SUFFIXES)}; known are {KNOWN}"
            )
        else:
            found.append(given)
    first: dict[str, Path] = {}
    for path in found:
        first.setdefault(os.path.realpath(path), path)
    return list(first.values())


def _folder(folder: Path) -> list[Path]:
    for name in ("train_data", "policy_loss_debug", "rollout_data"):
        if (folder / name).is_dir() and any((folder / name).iterdir()):
            return _folder(folder / name)
    files = [
        path
        for path in folder.iterdir()
        if path.suffix in SUFFIXES
        and not path.name.startswith("eval_")
        and path.is_file()
        and not _is_report(path)
    ]
    if not files:
        raise ValueError(
            f"{folder}: no file ends in {', '.join(SUFFIXES)}, and there is no folder train_data, "
            f"policy_loss_debug or rollout_data; known are {KNOWN}"
        )
    return sorted(files, key=lambda path: [int(x) for x in re.findall(r"\d+", path.stem)])


def _is_report(path: Path) -> bool:
    """Whether this is the JSON of an earlier diagnosis, which may be written beside the dumps."""
    from .report import SCHEMA

    if path.suffix != ".json":
        return False
    with path.open("rb") as file:
        start = b"".join(file.read(100).split())
    return start.startswith(f'{{"schema":"{SCHEMA}"'.encode())


def unknown(path: Path, content: Any) -> ValueError:
    """The error for a file of no known format."""
    if isinstance(content, dict):
        held = f"a dictionary with the keys {sorted(map(str, content))}"
    else:
        held = f"a {type(content).__name__}"
    return ValueError(
        f"{path}: holds {held}, which is no format that can be read; known are {KNOWN}"
    )


# --- mismatch/1 -----------------------------------------------------------------------------------


def save(responses: Responses, path: str | Path) -> None:
    """Writes a record in the format mismatch/1: a .pt file, or .safetensors, which needs that package.

    Of each response's weight versions the first is kept, where all have one and they are numbers. ValueError
    for another ending.
    """
    path = Path(path)
    content: dict[str, Any] = {"mask": responses.mask.to(torch.uint8), "offsets": responses.offsets}
    content["step"] = responses.steps
    if responses.learner is not None and responses.sampler is not None:
        content |= {"learner": responses.learner.float(), "sampler": responses.sampler.float()}
    elif responses.delta is not None:
        content["delta"] = responses.delta.float()
    optional = {
        "advantage": None if responses.advantages is None else responses.advantages.float(),
        "token": responses.tokens,
        "reward": responses.rewards,
    }
    content |= {name: value for name, value in optional.items() if value is not None}
    first = [versions[:1] for versions in responses.versions]
    if first and all(version and version[0].isdecimal() for version in first):
        content["weight_version"] = torch.tensor([int(version[0]) for version in first])
    if path.suffix == ".safetensors":
        from safetensors.torch import save as encode

        path.write_bytes(encode(content, metadata={"format": OWN_FORMAT}))
    elif path.suffix == ".pt":
        # Written by Python, so that a full disk is an OSError, and the bytes do not hold the file's name.
        # getbuffer()'s view, kept by an exception, crashes the garbage collector (CPython 3.12).
        buffer = io.BytesIO()
        torch.save({"format": OWN_FORMAT, **content}, buffer)
        path.write_bytes(buffer.getvalue())
    else:
        raise ValueError(f"{path}: give a file that ends in .pt or .safetensors")


def _load_safetensors(path: Path) -> dict[str, Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path}: reading it needs the package safetensors; install it, or write a .pt file"
        ) from error
    try:
        with safe_open(path, "pt") as file:
            content: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path}: is no complete safetensors file ({error})") from error
    if metadata.get("format") != OWN_FORMAT:
        raise unknown(path, content)
    return {"format": OWN_FORMAT, **content}


COLUMNS = {
    "learner": "learner",
    "sampler": "sampler",
    "delta": "delta",
    "advantages": "advantage",
    "tokens": "token",
}
PER_RESPONSE = ("step", "reward", "weight_version")


def _own(path: Path, content: dict[str, Any]) -> Iterator[Response]:
    gaps_alone = "delta" in content
    needed = ["mask", "offsets", "step", *(["delta"] if gaps_alone else ["learner", "sampler"])]
    missing = [name for name in needed if not isinstance(content.get(name), Tensor)]
    if missing:
        raise ValueError(
            f"{path}: a {OWN_FORMAT} file without the tensors {', '.join(missing)}; it holds "
            f"{sorted(map(str, content))}"
        )
    columns = {name: value for name, value in content.items() if name != "format"}
    ends = _check_own(path, columns)
    tokens = {ours: columns[name] for ours, name in COLUMNS.items() if name in columns}
    tokens = {
        ours: numbers(values, torch.int64 if ours == "tokens" else values.dtype)
        for ours, values in tokens.items()
    }
    mask, steps = in_loss(columns["mask"]), columns["step"].tolist()
    reward, version = (
        columns[name].tolist() if name in columns else None for name in PER_RESPONSE[1:]
    )
    for i, (start, end) in enumerate(pairwise(ends)):
        yield Response(
            step=int(steps[i]),
            mask=mask[start:end],
            reward=None if reward is None else float(reward[i]),
            versions=() if version is None else (str(int(version[i])),),
            **{ours: values[start:end] for ours, values in tokens.items()},
        )


def _check_own(path: Path, columns: dict[str, Any]) -> list[int]:
    """The offsets of a mismatch/1 file, whose columns have the shapes and types of the format."""
    known = ("mask", "offsets", *COLUMNS.values(), *PER_RESPONSE)
    for name, value in columns.items():
        if name not in known:
            raise ValueError(
                f"{path}: {name} is no column of {OWN_FORMAT}; leave it out, its columns are "
                f"{', '.join(known)}"
            )
        if not isinstance(value, Tensor):
            raise ValueError(f"{path}: {name} is a {type(value).__name__}; give a tensor")
    offsets, num = columns["offsets"], columns["mask"].numel()
    if offsets.dim() != 1 or offsets.is_floating_point():
        raise ValueError(
            f"{path}: offsets is {offsets.dtype} of shape {tuple(offsets.shape)}; give int64 (N + 1,)"
        )
    ends = offsets.tolist()
    if not ends or ends[0] != 0 or ends[-1] != num or ends != sorted(ends):
        raise ValueError(
            f"{path}: offsets must rise from 0 to the {num} values of mask; they are "
            f"{json.dumps(ends[:4])[:-1]}, ...]"
        )
    for name, value in columns.items():
        expected = len(ends) - 1 if name in PER_RESPONSE else num
        if name != "offsets" and value.shape != (expected,):
            raise ValueError(f"{path}: {name} has shape {tuple(value.shape)}; give ({expected},)")
    for name in ("step", "weight_version"):
        value = columns.get(name)
        if value is not None and not bool((value.isfinite() & (value == value.trunc())).all()):
            raise ValueError(f"{path}: {name} holds {value.tolist()[:4]}; give whole numbers")
    return ends
