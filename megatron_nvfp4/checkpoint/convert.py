"""Conversions between Hugging Face and Megatron: one pass over the files, a parameter at a time."""

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nvfp4.checkpoint.architecture import Architecture
from megatron_nvfp4.checkpoint.arguments import megatron_arguments
from megatron_nvfp4.checkpoint.as_hf import TensorsOfMegatron, companions
from megatron_nvfp4.checkpoint.as_megatron import ParametersOfHF
from megatron_nvfp4.checkpoint.atomic import check_apart
from megatron_nvfp4.checkpoint.dcp import TorchDistWriter
from megatron_nvfp4.checkpoint.hf import MAX_SHARD_BYTES, HFReader, HFWriter
from megatron_nvfp4.checkpoint.hf_files import OriginalFiles, read_config
from megatron_nvfp4.checkpoint.legacy import LegacyWriter
from megatron_nvfp4.checkpoint.names import distributed_address
from megatron_nvfp4.checkpoint.plan import HF_EMBEDDING, Parameter
from megatron_nvfp4.checkpoint.progress import Progress
from megatron_nvfp4.checkpoint.rows import Rows
from megatron_nvfp4.checkpoint.stored import open_parameters
from megatron_nvfp4.checkpoint.values import is_finite

logger = logging.getLogger(__name__)
FORMATS = ("torch_dist", "torch")


@dataclass(frozen=True)
class ParallelSizes:
    """Into how many ranks the `torch` format cuts a model; etp None: as tp."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int = 1

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={size}" for name, size in vars(self).items() if size is not None and size < 1
        ]
        if wrong:
            raise ValueError(f"parallel sizes {', '.join(wrong)}: give numbers of ranks, 1 or more")

    def arguments(self, num_layers: int) -> dict[str, int | None]:
        """The sizes as Megatron's arguments."""
        is_virtual = self.vpp > 1
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.tp if self.etp is None else self.etp,
            "virtual_pipeline_model_parallel_size": self.vpp if is_virtual else None,
            "num_layers_per_virtual_pipeline_stage": (
                num_layers // (self.pp * self.vpp) if is_virtual else None
            ),
        }


def megatron_from_hf(
    hf: Path | str,
    out: Path | str,
    *,
    format: str = FORMATS[0],
    sizes: ParallelSizes | None = None,
    vocab_divisible_by: int = 128,
    force: bool = False,
) -> None:
    """Write a Hugging Face checkpoint as Megatron's.

    out: gets a tracker file and the folder `release`, as Megatron's --load wants it. format: torch_dist,
    which any parallel layout loads, or torch, which only `sizes` does. vocab_divisible_by: Megatron's
    --make-vocab-size-divisible-by. force: replace an existing `out`. NaN and Inf are logged by name and kept.
    Errors: ValueError naming what is missing, unknown or misshapen; `out` appears only when complete.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: choose one of {', '.join(FORMATS)}")
    if format == "torch_dist" and sizes not in (None, ParallelSizes()):
        raise ValueError(f"{sizes}: torch_dist is not cut by ranks; leave the sizes out")
    if vocab_divisible_by < 1:
        raise ValueError(
            f"make_vocab_size_divisible_by={vocab_divisible_by}: give a whole number from 1"
        )
    check_apart(out, hf)
    sizes = sizes or ParallelSizes()
    reader = HFReader(hf)
    vocab_size = Architecture.from_hf_config(reader.config).vocab_size
    vocab_size_padded = _multiple(vocab_size, vocab_divisible_by * sizes.tp)
    weights = ParametersOfHF(reader, vocab_size_padded=vocab_size_padded)
    arch = weights.arch
    if arch.num_heads % sizes.tp:
        raise ValueError(
            f"tp={sizes.tp}: the {arch.num_heads} attention heads do not divide; choose a divisor"
        )
    arguments = megatron_arguments(
        arch,
        reader.config,
        vocab_size_padded=vocab_size_padded,
        make_vocab_size_divisible_by=vocab_divisible_by,
        **sizes.arguments(arch.num_layers),
    )
    settings: dict[str, Any] = {
        "common": {"args": arguments},
        "num_layers": arch.num_layers,
        "num_experts": arch.experts.num_experts if arch.experts else 0,
        "force": force,
        "needed_bytes": weights.num_bytes(),
    }
    with Progress(f"{out}", weights.num_bytes()) as progress:
        if format == "torch":
            with LegacyWriter(out, tied=arch.tied, **settings, **vars(sizes)) as legacy:
                for parameter, rows in _all(weights, progress):
                    legacy.write(parameter.key, rows, parameter.split)
            return
        with TorchDistWriter(out, **settings) as writer:
            for parameter, rows in _all(weights, progress):
                place = distributed_address(parameter.key, stacked=arch.is_uniform)
                at = {"layer": place.layer, "expert": place.expert}
                writer.write(place.key, rows, halves=parameter.split == "halves", **at)


def _all(weights: ParametersOfHF, progress: Progress) -> Iterator[tuple[Parameter, Rows]]:
    """Every parameter and what lies in it; the log says which values are not finite."""
    for parameter in weights.parameters:
        rows = weights.pieces(parameter)
        for name in weights.not_finite(parameter, rows):
            _warn_of_values(name)
        yield parameter, rows
        progress.advance(rows.nbytes)


def _warn_of_values(name: str) -> None:
    logger.warning(
        "warning: %s: holds a NaN or an Inf; its bytes are kept, an export refuses it", name
    )


def open_megatron(megatron: Path | str, hf_config: Path | str) -> TensorsOfMegatron:
    """A Megatron checkpoint as Hugging Face tensors, readable like an HFReader.

    megatron: the folder that Megatron saved to, or that of one iteration. hf_config: a folder with the
    model's config.json; where a checkpoint or its index stands beside it, its names are imitated.
    Errors: ValueError, as of TensorsOfMegatron and the readers.
    """
    original = OriginalFiles.read(Path(hf_config))
    return _open(megatron, hf_config, None if original is None else original.names)


def _open(
    megatron: Path | str, hf_config: Path | str, hf_names: Collection[str] | None
) -> TensorsOfMegatron:
    config = read_config(hf_config)
    stored = open_parameters(megatron, Architecture.from_hf_config(config))
    return TensorsOfMegatron(stored, config, hf_names=hf_names)


def hf_from_megatron(
    megatron: Path | str,
    hf_config: Path | str,
    out: Path | str,
    *,
    max_shard_bytes: float | None = None,
    force: bool = False,
) -> None:
    """Write a Megatron checkpoint as a Hugging Face checkpoint, with the config and the tokenizer.

    The parameters are those of `open_megatron`; padding of the vocabulary is left out. max_shard_bytes
    None: the files of the checkpoint in `hf_config`, so that unchanged weights give the same bytes, and
    shards of 5 GB where it has none, or lacks a tensor. force: replace an existing `out`. A weight with a
    NaN or an Inf is logged by name and kept.
    Errors: ValueError naming what is missing, unknown or misshapen; `out` appears only when complete.
    """
    check_apart(out, megatron, hf_config)
    original = OriginalFiles.read(Path(hf_config))
    tensors = _open(megatron, hf_config, None if original is None else original.names)
    plan = None
    if original is not None and max_shard_bytes is None:
        plan = original.plan({name: tensors.meta(name) for name in tensors.names()})
    num_bytes = tensors.num_bytes()
    dtype = str(tensors.meta(HF_EMBEDDING)[0]).removeprefix("torch.")
    config = tensors.config
    config |= {name: dtype for name in ("dtype", "torch_dtype") if name in config}
    with (
        HFWriter(
            out,
            config=config,
            max_shard_bytes=MAX_SHARD_BYTES if max_shard_bytes is None else max_shard_bytes,
            force=force,
            needed_bytes=num_bytes,
            plan=plan,
            like=Path(hf_config),
        ) as writer,
        Progress(f"{out}", num_bytes) as progress,
    ):
        for path in companions(Path(hf_config)):
            writer.copy_file(path)
        for name in tensors.names() if plan is None else plan.names:
            tensor = tensors.read(name)
            if not is_finite(tensor):
                _warn_of_values(name)
            writer.write(name, tensor)
            progress.advance(tensor.nbytes)


def _multiple(value: int, unit: int) -> int:
    return -(-value // unit) * unit
