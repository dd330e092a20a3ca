"""The tokens that a sensitivity tool runs a model on: from plain text, or token ids as JSON."""

import json
from pathlib import Path

import torch
from torch import Tensor


def read_segments(path: Path, model: Path, length: int, count: int) -> list[Tensor]:
    """At most `count` sequences of at most `length` + 1 tokens, int64: `length` are scored of each.

    path: *.json with a list of token ids, or with a list of such lists, which are sequences of their own; any
    other file is text, for the tokenizer of the folder `model`. One list or text is cut from its start, and a
    remainder is dropped unless it is all there is. No token is put in front but what the tokenizer does.
    ValueError: a file that holds neither, no tokens, or text without what is needed to tokenise it.
    """
    for name, value in (("--length", length), ("--segments", count)):
        if value < 1:
            raise ValueError(f"{name} {value}: give 1 or more")
    if path.is_dir():
        raise ValueError(f"--text {path}: is a folder; give a file with text, or with ids as JSON")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: is no UTF-8 text ({error}); give text, or ids as JSON"
        ) from error
    found = _ids(path, text) if path.suffix == ".json" else [_tokenize(path, text, model)]
    if len(found) == 1:
        (ids,) = found
        starts = range(0, max(len(ids) - length, 1), length)
        found = [ids[start : start + length + 1] for start in starts]
    segments = [torch.tensor(ids[: length + 1], dtype=torch.int64) for ids in found[:count]]
    short = next((number for number, ids in enumerate(segments) if len(ids) < 2), None)
    if short is not None:
        raise ValueError(
            f"{path}: sequence {short} has {len(segments[short])} tokens; give two or more"
        )
    return segments


def _ids(path: Path, text: str) -> list[list[int]]:
    remedy = "give [1, 2, ...], or a list of such lists, one a sequence"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: is no JSON ({error}); {remedy}, or text under another ending"
        ) from error
    if found and _is_ids(found):
        return [found]
    if found and isinstance(found, list) and all(_is_ids(part) for part in found):
        return found
    raise ValueError(f"{path}: is no list of token ids; {remedy}")


def _is_ids(part: object) -> bool:
    in_range = range(-(2**63), 2**63)  # int64
    return isinstance(part, list) and all(type(x) is int and x in in_range for x in part)


def _tokenize(path: Path, text: str, model: Path) -> list[int]:
    file = model / "tokenizer.json"
    instead = f"or give {path} as token ids in JSON"
    if not file.is_file():
        raise ValueError(f"{file}: is not there, and {path} is text; copy it there, {instead}")
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path}: is text, which takes the package tokenizers: pip install tokenizers, {instead}"
        ) from error
    return Tokenizer.from_file(str(file)).encode(text).ids
