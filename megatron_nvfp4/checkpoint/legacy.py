"""Megatron's older `torch` format: one torch.save file per model-parallel rank, read and written lazily.

mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt holds one rank's tensors under local layer and expert numbers,
one state dict for each virtual pipeline stage (github.com/NVIDIA/Megatron-LM,
megatron/training/checkpointing.py). Keys here carry the numbers of the whole model.
"""

import argparse
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_nvfp4.checkpoint.archive import ArchiveWriter
from megatron_nvfp4.checkpoint.atomic import AtomicFolder, FolderWriter, OutputFile, write_bytes
from megatron_nvfp4.checkpoint.dcp import TRACKER, has_extra_state, iteration_folder
from megatron_nvfp4.checkpoint.rows import Rows, Split, part_of, split_rows
from megatron_nvfp4.checkpoint.stored_tensor import StoredTensor
from megatron_nvfp4.checkpoint.unpickle import load_saved, plain

_FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3}))?(?:_(\d{3}))?")
_LAYER = re.compile(r"((?:^|\.)decoder\.layers\.)(\d+)\.")
_GROUPED = re.compile(r"(\.mlp\.experts\.linear_fc\d\.(?:weight|bias))(\d+)$")
_SEQUENTIAL = re.compile(r"(\.mlp\.experts\.local_experts\.)(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.")


class _Rank(NamedTuple):
    tp: int
    pp: int
    ep: int


# --- reading --------------------------------------------------------------------------------------


class LegacyReader:
    """A `torch` checkpoint of any TP, PP, EP, expert TP and virtual PP size.

    `folder` is that of the iteration; `common` the state beside the model, with "args" as a dict.
    Keys are the checkpoint's spelling with model-wide numbers of layers and experts. Layers are
    numbered by the stages' contents, so uneven stages are right too. How tensor parallelism cuts a
    parameter is not in the files: `split` says it, "rows", "halves" (rows of gate and of up), "columns"
    or None for copies. Errors: ValueError naming the folder or key for missing ranks, unlike parts,
    formats before megatron-core, and pickles that ask for more than data. No tensor is read yet.
    """

    def __init__(self, folder: Path | str):
        self.folder = iteration_folder(folder)
        files = self._rank_files()
        self.common = plain(_load(files[min(files)]))
        self.common.setdefault("args", {})
        for name in [name for name in self.common if re.fullmatch(r"model\d*", name)]:
            del self.common[name]
        ranks = self._ranks(files)
        sizes = self._sizes(ranks)
        self._num_parts = {False: sizes["tp"], True: sizes["etp"]}
        self._parts: dict[str, dict[int, StoredTensor]] = {}
        self._owner: dict[str, int] = {}
        states = {rank: self._models(path) for rank, path in ranks.items()}
        first_layers = self._first_layers(states)
        for rank, models in sorted(states.items()):
            for stage, model in enumerate(models):
                self._add(rank, model, first_layers[stage, rank.pp], sizes)
        self._check_parts()

    def keys(self) -> list[str]:
        """Every parameter's key, sorted; extra state is left out."""
        return sorted(self._parts)

    def meta(self, key: str, split: Split = None) -> tuple[torch.dtype, tuple[int, ...]]:
        """The (dtype, shape) of a whole parameter. ValueError: an absent key."""
        parts = self._whole(key)
        shape = list(parts[0].shape)
        if split is not None:
            axis = 1 if split == "columns" else 0
            if len(shape) <= axis or (split == "halves" and shape[0] % 2):
                raise ValueError(
                    f"{key}: parts of {parts[0].shape} were not cut by {split}; give the split of its model"
                )
            shape[axis] *= len(parts)
        return parts[0].dtype, tuple(shape)

    def read(
        self, key: str, split: Split = None, *, rows: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """A whole parameter, or its rows [start, stop): a view of the file where it is in one piece."""
        shape = self.meta(key, split)[1]
        parts = self._whole(key)
        start, stop = (0, shape[0] if shape else 0) if rows is None else rows
        if rows is not None and not (shape and 0 <= start <= stop <= shape[0]):
            raise ValueError(f"{key}: rows [{start}, {stop}) of shape {shape}; give rows inside")
        if not shape:
            return parts[0].read()
        if split == "columns" and len(parts) > 1:
            whole = [_rows(parts[rank], start, stop) for rank in range(len(parts))]
            return torch.cat(whole, dim=1)
        found, at = [], 0
        for rank, first, last in split_rows(parts[0].shape[0], len(parts), split):
            low, high = max(start, at), min(stop, at + last - first)
            if low < high:
                found.append(_rows(parts[rank], first + low - at, first + high - at))
            at += last - first
        if not found:
            return torch.empty((0, *shape[1:]), dtype=parts[0].dtype)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _whole(self, key: str) -> dict[int, StoredTensor]:
        if key not in self._parts:
            raise ValueError(f"{self.folder}: holds no parameter {key}; take one of `keys`")
        return self._parts[key]

    def _rank_files(self) -> dict[tuple[str, ...], Path]:
        found = {}
        for path in sorted(self.folder.glob("mp_rank_*")):
            match = _RANK.fullmatch(path.name)
            if match is None:
                raise ValueError(f"{path}: is not named as a rank's folder; remove it")
            if not (path / _FILE).is_file():
                raise ValueError(f"{path / _FILE}: is missing; copy it again")
            found[tuple(part for part in match.groups() if part is not None)] = path / _FILE
        if not found:
            raise ValueError(f"{self.folder}: holds no mp_rank_* folders; name what --save named")
        if len({len(name) for name in found}) > 1:
            raise ValueError(
                f"{self.folder}: rank folders of two runs, {sorted(found)}; remove one's"
            )
        return found

    def _ranks(self, files: Mapping[tuple[str, ...], Path]) -> dict[_Rank, Path]:
        """Which rank each file is. One suffix may be a pipeline's or an expert's: the args tell."""
        args = self.common["args"]
        has_stages = (args.get("pipeline_model_parallel_size") or 1) > 1
        ranks = {}
        for name, path in files.items():
            numbers = [int(part) for part in name]
            if len(numbers) == 2:
                numbers = [numbers[0], numbers[1], 0] if has_stages else [numbers[0], 0, numbers[1]]
            ranks[_Rank(*numbers, *(0,) * (3 - len(numbers)))] = path
        return ranks

    def _sizes(self, ranks: Mapping[_Rank, Path]) -> dict[str, int]:
        args = self.common["args"]
        sizes = {}
        for axis, name in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
            found = {getattr(rank, axis) for rank in ranks}
            size = args.get(f"{name}_model_parallel_size") or max(found) + 1
            missing = sorted(set(range(size)) - found)
            if missing or max(found) >= size:
                raise ValueError(
                    f"{self.folder}: the args say {name}_model_parallel_size={size}; "
                    + (
                        f"ranks {missing} are missing, copy them again"
                        if missing
                        else "there are more ranks, remove those of another run"
                    )
                )
            sizes[axis] = size
        sizes["etp"] = args.get("expert_tensor_parallel_size") or sizes["tp"]
        if sizes["tp"] % sizes["etp"]:
            raise ValueError(
                f"{self.folder}: expert_tensor_parallel_size={sizes['etp']} does not divide "
                f"tensor_model_parallel_size={sizes['tp']}; this format cannot hold its ranks: save it as "
                "torch_dist"
            )
        return sizes

    def _models(self, path: Path) -> list[dict[str, StoredTensor]]:
        state = _load(path)
        names = ["model"]
        if "model" not in state:
            names = sorted(
                (n for n in state if re.fullmatch(r"model\d+", n)), key=lambda n: int(n[5:])
            )
        if not names or any(not isinstance(state.get(name), dict) for name in names):
            raise ValueError(f"{path}: holds no model; take a checkpoint of training")
        for name in names:
            nested = [key for key, value in state[name].items() if isinstance(value, dict)]
            if nested:
                raise ValueError(
                    f"{path}: {nested[0]} is nested: a format before megatron-core; convert it with "
                    "Megatron's own tools first"
                )
        return [
            {
                key: value
                for key, value in state[name].items()
                if isinstance(value, StoredTensor) and "_extra_state" not in key
            }
            for name in names
        ]

    def _first_layers(
        self, states: Mapping[_Rank, list[dict[str, StoredTensor]]]
    ) -> dict[tuple[int, int], int]:
        """(virtual stage, pipeline rank) -> the model-wide number of its first layer."""
        counts: dict[tuple[int, int], int] = {}
        for rank, models in states.items():
            for stage, model in enumerate(models):
                numbers = {int(m[2]) for key in model if (m := _LAYER.search(key))}
                if numbers != set(range(len(numbers))):
                    raise ValueError(
                        f"{self.folder}: {rank} holds layers {sorted(numbers)}; copy it again"
                    )
                if counts.setdefault((stage, rank.pp), len(numbers)) != len(numbers):
                    raise ValueError(
                        f"{self.folder}: ranks of stage {rank.pp} differ in layers; copy them again"
                    )
        order = sorted(counts)
        total = itertools.accumulate((counts[place] for place in order), initial=0)
        first = dict(zip(order, total, strict=False))
        num_layers = self.common["args"].get("num_layers")
        if num_layers and sum(counts.values()) != num_layers:
            raise ValueError(
                f"{self.folder}: its stages hold {sum(counts.values())} layers, the args say "
                f"num_layers={num_layers}; copy all ranks' folders again"
            )
        return first

    def _add(
        self,
        rank: _Rank,
        model: Mapping[str, StoredTensor],
        first_layer: int,
        sizes: Mapping[str, int],
    ) -> None:
        experts: dict[str, int] = {}
        for key in model:
            if number := _expert_number(key):
                layer = key[: number[0]]
                experts[layer] = max(experts.get(layer, 0), number[2] + 1)
        for key, tensor in model.items():
            part, name = rank.tp, key
            if number := _expert_number(key):
                at, end, local = number
                expert = rank.ep * experts[key[:at]] + local
                part, name = rank.tp % sizes["etp"], f"{key[:at]}{expert}{key[end:]}"
            name = _LAYER.sub(lambda m: f"{m[1]}{int(m[2]) + first_layer}.", name)
            # Later stages repeat embeddings; experts' ranks repeat everything else.
            if self._owner.setdefault(name, rank.pp) == rank.pp:
                self._parts.setdefault(name, {}).setdefault(part, tensor)

    def _check_parts(self) -> None:
        for key, parts in self._parts.items():
            num_parts = self._num_parts[_EXPERT.search(key) is not None]
            missing = sorted(set(range(num_parts)) - set(parts))
            if missing:
                raise ValueError(
                    f"{self.folder}: {key}: parts of tensor parallel ranks {missing} are missing; copy "
                    "them again"
                )
            kinds = {(part.dtype, part.shape) for part in parts.values()}
            if len(kinds) > 1:
                raise ValueError(
                    f"{self.folder}: {key}: its parts differ: {sorted(map(str, kinds))}; the ranks are "
                    "of different runs, copy them again"
                )


def _load(path: Path) -> dict[str, Any]:
    state = load_saved(path)
    if not isinstance(state, dict):
        raise ValueError(f"{path}: holds a {type(state).__name__}, not a checkpoint; copy it again")
    return state


def _expert_number(key: str) -> tuple[int, int, int] | None:
    """(start, end, value) of a routed expert's number in a key; None in every other key."""
    match = _GROUPED.search(key) or _SEQUENTIAL.search(key)
    return None if match is None else (match.start(2), match.end(2), int(match[2]))


def _rows(part: StoredTensor, start: int, stop: int) -> torch.Tensor:
    return part.slice(start, stop).read() if part.stride is None else part.read()[start:stop]


# --- writing --------------------------------------------------------------------------------------


class LegacyWriter(FolderWriter):
    """Streams whole parameters into the files of all ranks; a context manager, complete or absent.

    The result is `folder` with a tracker file and one iteration ("release" where `iteration` is None).
    `etp` None: as `tp`. `common` is the state beside the model, with "args" a dict or Namespace. Layers
    are dealt evenly over pp * vpp stages. `tied`: the last stage gets its copy of the embedding, as it
    does for multi-token prediction layers. `extra_state` adds the empty entries of Transformer Engine's
    modules. All files are open at once. Errors: ValueError for sizes that do not divide the model, a
    used folder (unless `force`), a key written twice and layers never written; RuntimeError for a full
    disk.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        common: Mapping[str, Any],
        num_layers: int,
        num_experts: int = 0,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        vpp: int = 1,
        tied: bool = False,
        iteration: int | None = None,
        extra_state: bool = True,
        force: bool = False,
        needed_bytes: int = 0,
    ):
        self._tp, self._pp, self._ep, self._vpp = tp, pp, ep, vpp
        self._etp = tp if etp is None else etp
        self._num_layers, self._num_experts = num_layers, num_experts
        self._check_sizes()
        self._common, self._iteration, self._tied = dict(common), iteration, tied
        self._extra_state = extra_state
        self._seen: set[str] = set()
        self._files: dict[_Rank, OutputFile] = {}
        self._archives: dict[_Rank, ArchiveWriter] = {}
        self._models: dict[_Rank, list[dict[str, Any]]] = {}
        self._output = AtomicFolder(folder, force=force, needed_bytes=needed_bytes)
        name = "release" if iteration is None else f"iter_{iteration:07d}"
        try:
            for rank in itertools.starmap(
                _Rank, itertools.product(range(tp), range(pp), range(ep))
            ):
                path = self._output.path / name / self._folder_name(rank)
                path.mkdir(parents=True)
                self._files[rank] = OutputFile(path / _FILE)
                self._archives[rank] = ArchiveWriter(self._files[rank])
                self._models[rank] = [{} for _ in range(vpp)]
        except BaseException:
            self._abandon()
            self._output.discard()
            raise

    def _check_sizes(self) -> None:
        stages = self._pp * self._vpp
        if self._num_layers % stages:
            raise ValueError(
                f"num_layers={self._num_layers} is no multiple of pp * vpp = {stages}; choose other sizes"
            )
        if self._vpp > 1 and self._pp == 1:
            raise ValueError(f"vpp={self._vpp} needs pp > 1; leave one of them out, or raise pp")
        if self._num_experts % self._ep or (self._ep > 1 and not self._num_experts):
            raise ValueError(
                f"num_experts={self._num_experts} is no multiple of ep={self._ep}; choose another ep"
            )
        if self._tp % self._etp:
            raise ValueError(
                f"etp={self._etp} does not divide tp={self._tp}; the torch format has no names for "
                "such ranks: write torch_dist, which any sizes load"
            )

    def _folder_name(self, rank: _Rank) -> str:
        stage = f"_{rank.pp:03d}" if self._pp > 1 else ""
        return f"mp_rank_{rank.tp:02d}{stage}" + (f"_{rank.ep:03d}" if self._ep > 1 else "")

    def write(self, key: str, tensor: torch.Tensor | Rows, split: Split = None) -> None:
        """Append a whole parameter, or its pieces, under its canonical key; `split` as in LegacyReader."""
        if key in self._seen:
            raise ValueError(f"{key}: written twice; write each parameter once")
        self._seen.add(key)
        rows = Rows.of(tensor)
        number = _expert_number(key)
        num_ranks = self._tp if number is None else self._etp
        parts = [part_of(key, rows, split, rank, num_ranks) for rank in range(num_ranks)]
        for stage, pp, name in self._stages(key):
            for tp, ep in itertools.product(range(self._tp), range(self._ep)):
                local = name
                if number is not None:
                    per_rank = self._num_experts // self._ep
                    if number[2] // per_rank != ep:
                        continue
                    local = _expert_local(name, number[2] % per_rank)
                self._save(_Rank(tp, pp, ep), stage, local, parts[tp % num_ranks])

    def _stages(self, key: str) -> Iterator[tuple[int, int, str]]:
        """(virtual stage, pipeline rank, local key) of every place of a key."""
        last = (self._vpp - 1, self._pp - 1)
        match = _LAYER.search(key)
        if match is not None:
            layer, per_stage = int(match[2]), self._num_layers // (self._pp * self._vpp)
            if layer >= self._num_layers:
                raise ValueError(
                    f"{key}: layer {layer} of {self._num_layers}; give the model's num_layers"
                )
            stage, pp = divmod(layer // per_stage, self._pp)
            yield stage, pp, _LAYER.sub(lambda m: f"{m[1]}{layer % per_stage}.", key)
        elif key.startswith("embedding."):
            yield 0, 0, key
            has_prediction = bool(_argument(self._common, "mtp_num_layers"))
            if last != (0, 0) and has_prediction:
                yield *last, key
            if last != (0, 0) and self._tied:
                yield *last, key.replace("embedding.word_embeddings", "output_layer")
        else:
            yield *last, key

    def _save(self, rank: _Rank, stage: int, key: str, tensor: Rows) -> None:
        file, model = self._archives[rank], self._models[rank][stage]
        model[key] = file.save(tensor)
        if not self._extra_state:
            return
        module = key.rpartition(".")[0]
        if module == "output_layer":
            model["output_layer._extra_state"] = None
        elif has_extra_state(key):
            modules = [module]
            if module.endswith("self_attention.linear_proj"):
                modules.append(f"{module.removesuffix('linear_proj')}core_attention")
            for name in modules:
                if f"{name}._extra_state" not in model:
                    model[f"{name}._extra_state"] = file.save(torch.empty(0, dtype=torch.uint8))

    def _finish(self) -> None:
        layers = {int(match[2]) for key in self._seen if (match := _LAYER.search(key))}
        missing = sorted(set(range(self._num_layers)) - layers)
        if missing:
            raise ValueError(
                f"{self._output.target}: layers {missing} were never written; write all"
            )
        args = self._common.get("args", {})
        args = argparse.Namespace(**args) if isinstance(args, Mapping) else args
        defaults = {"checkpoint_version": 3.0, "iteration": self._iteration or 0}
        for rank, archive in self._archives.items():
            models = self._models[rank]
            named = {"model" if len(models) == 1 else f"model{i}": m for i, m in enumerate(models)}
            archive.finish({**defaults, **self._common, "args": args, **named})
            self._files[rank].close()
        tracker = "release" if self._iteration is None else str(self._iteration)
        write_bytes(self._output.path / TRACKER, tracker.encode())
        self._output.publish()

    def _abandon(self) -> None:
        for archive in self._archives.values():
            archive.abandon()
        for file in self._files.values():
            file.abandon()


def _expert_local(key: str, expert: int) -> str:
    number = _expert_number(key)
    assert number is not None
    return f"{key[: number[0]]}{expert}{key[number[1] :]}"


def _argument(common: Mapping[str, Any], name: str) -> Any:
    args = common.get("args", {})
    return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)
