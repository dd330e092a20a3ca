"""Reads what SGLang writes by itself with --debug-tensor-dump-output-folder (0.5.23).

Format, from srt/debug_utils/tensor_dump_forward_hook.py: FOLDER/TP{t}_PP{p}_Rank{r}_pid{n}/Pass{i}.pt, a
dictionary from the name of a module without submodules to its output (a list where it has several), in the
order of execution, and model.forward_batch_info.{input_ids, positions, seq_lens}. The model's own output and
what runs behind it stand in the next pass's file and are left out.

Taken are passes whose sequences begin at position 0 (prefill without a cached prefix: --disable-radix-cache,
and a chunk size above the prompt). One rank: of several the files hold shards whose axis they do not tell.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .align import Batch
from .compare_sides import Key, Piece, Side

_FOLDER = re.compile(r"TP(\d+)_PP(\d+)_Rank(\d+)_pid\d+")
BATCH_INFO = "model.forward_batch_info."
_TOPK = re.compile(r"(model\.layers\.\d+\.mlp)\.topk")


def sglang_passes(path: Path) -> list[Path]:
    """Files of passes in a dump of SGLang's, in order; empty where `path` is none. ValueError for several
    ranks or runs."""
    if _FOLDER.fullmatch(path.name):
        return sorted(path.glob("Pass*.pt"))
    folders = sorted(each for each in path.iterdir() if _FOLDER.fullmatch(each.name))
    if len(folders) > 1:
        names = ", ".join(each.name for each in folders[:3])
        raise ValueError(f"{path}: holds several ranks or runs ({names}); name one of them")
    return sorted(folders[0].glob("Pass*.pt")) if folders else []


def read_sglang(path: Path, passes: list[Path], rename: Callable[[str], str | None]) -> Side:
    """The passes as microbatches. rename: as compare_sides.read_side."""
    side = Side(str(path), "sglang")
    require_first_rank(path, passes)
    order, skipped = 0, 0
    for file in passes:
        tensors = load_pass(file)
        ids, positions = (tensors.get(BATCH_INFO + name) for name in ("input_ids", "positions"))
        number = len(side.batches)
        if not isinstance(ids, Tensor) or not isinstance(positions, Tensor):
            raise ValueError(f"{file}: no pass of SGLang's: {BATCH_INFO}input_ids is missing")
        if (
            ids.numel() != positions.numel()
            or ids.is_floating_point()
            or positions.is_floating_point()
        ):
            texts = [f"{each.dtype} {tuple(each.shape)}" for each in (ids, positions)]
            raise ValueError(f"{file}: input_ids {texts[0]}, positions {texts[1]}; dump it again")
        batch = Batch(number, ids.long().flatten(), positions.long().flatten())
        if batch.prefixes() is None:
            skipped += 1
            continue
        side.batches.append(batch)
        for name, value in tensors.items():
            order += 1
            for key, tensor in _quantities(file, name, value, rename):
                if len(tensor) == len(batch.ids):
                    side.add(key, _piece(tensor, number, order))
    if skipped:
        side.notes.append(f"{skipped} passes do not begin at position 0 and were left out")
    if not side.batches:
        raise ValueError(
            f"{path}: no pass begins its sequences at position 0; prefill whole sequences, with "
            "--disable-radix-cache"
        )
    return side


def require_first_rank(path: Path, passes: Sequence[Path]) -> None:
    """ValueError for passes of another rank than the first, whose outputs are shards."""
    found = _FOLDER.fullmatch(passes[0].parent.name)
    if found and (int(found[1]) or int(found[2])):
        raise ValueError(f"{path}: rank TP{found[1]} PP{found[2]}; dump a run on one rank")


def load_pass(file: Path) -> dict[str, Any]:
    """Outputs of one pass, by module; ValueError for a damaged file and for another's."""
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle fails in as many ways as there are opcodes
        said = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{file}: cannot be read: {said}; dump it again") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        what = f"a {type(found).__name__}" + (" of other keys than names" if found else "")
        raise ValueError(f"{file}: holds {what}; give a pass of SGLang's dump")
    return found


def _quantities(file: Path, name: str, value: Any, rename) -> list[tuple[Key, Tensor]]:
    """What of a module's output has a counterpart here."""
    layer = _TOPK.fullmatch(name)
    if layer and isinstance(value, list) and len(value) >= 2:
        weights, ids = choices(file, name, value)
        router = rename(f"{layer[1]}.gate")
        return [(Key(router, "routing.ids"), ids), (Key(router, "routing.weights"), weights)]
    module = None if name.endswith(".gate") else rename(name)  # logits; a router's output is not
    first = value[0] if isinstance(value, list) and value else value
    if module is None or not isinstance(first, Tensor) or first.dim() < 2:
        return []
    return [(Key(module, "output"), first)]


def choices(file: Path, name: str, value: Any) -> tuple[Tensor, Tensor]:
    """Weights FP32 and experts int64 (T, top_k) of a router, experts ascending; ValueError for none."""
    pair = value[:2] if isinstance(value, list) else []
    shapes = {each.shape if isinstance(each, Tensor) else None for each in pair}
    if len(pair) != 2 or len(shapes) != 1 or None in shapes or pair[0].dim() != 2:
        raise ValueError(f"{file}: {name} holds no weights and ids (T, top_k); dump it again")
    return ascending(*pair)


def ascending(weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """A token's choices (T, top_k) in the order of their experts, as FP32 and int64."""
    ids, order = ids.long().sort(dim=1)
    return weights.float().gather(1, order), ids


def _piece(tensor: Tensor, number: int, order: int) -> Piece:
    dtype = str(tensor.dtype).removeprefix("torch.")
    rows = torch.arange(len(tensor))
    shape = tuple(tensor.shape)
    return Piece(lambda: tensor, (0, number), order, "hook", shape, dtype, lambda: rows)
