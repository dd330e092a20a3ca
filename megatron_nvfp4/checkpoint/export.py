"""A BF16 checkpoint to an NVFP4 file that samplers load, with the bits the trainer computes.

Layers are chosen by the policy that training used; weights are rounded by the recipe's own quantiser, under
one amax for what a sampler fuses (q/k/v, gate/up, q_a/kv_a). Router, embedding and head stay as they are,
and so does the KV cache unless it is asked for. One Megatron parameter is in memory at a time.
"""

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_nvfp4 import __version__, backends
from megatron_nvfp4.checkpoint.as_hf import companions
from megatron_nvfp4.checkpoint.atomic import check_apart
from megatron_nvfp4.checkpoint.convert import open_megatron
from megatron_nvfp4.checkpoint.export_plan import (
    ROUNDINGS,
    ExportPlan,
    Layer,
    Source,
    module_of,
    plan_export,
    read_input_amax,
)
from megatron_nvfp4.checkpoint.formats import (
    FORMATS,
    MODELOPT,
    PackedWeight,
    ServingFormat,
    hf_quant_config,
    pack_quantized,
    quantization_config,
    quantize_modelopt,
)
from megatron_nvfp4.checkpoint.hf import HFReader, HFWriter
from megatron_nvfp4.checkpoint.plan import sources
from megatron_nvfp4.checkpoint.progress import Progress
from megatron_nvfp4.checkpoint.values import is_finite


def export(
    source: Source,
    out: str | Path,
    plan: ExportPlan,
    *,
    input_amax: Mapping[str, float] | None = None,
    fp8_kv_cache: bool = False,
    backend: str = "auto",
    files_from: str | Path | None = None,
    max_shard_bytes: float = 5e9,
    force: bool = False,
) -> dict[str, Any]:
    """Write the NVFP4 checkpoint that `plan` describes; it appears whole or not at all.

    input_amax: max |input| of every quantised module, with static activations. files_from: a folder whose
    other files (tokenizer, generation config) go along. backend: who quantises, as backends.select.
    Returns the record: recipe, counts, bytes, notes.
    ValueError naming a weight with a NaN or an Inf, and as HFWriter.
    """
    assert (plan.activations == "static") == (input_amax is not None)
    producer = _producer(plan)
    config = dict(source.config) | {
        "quantization_config": quantization_config(
            plan.form,
            activations=plan.activations,
            ignore=plan.ignore,
            fp8_kv_cache=fp8_kv_cache,
            producer=producer,
        )
    }
    with (
        HFWriter(
            out,
            config=config,
            max_shard_bytes=max_shard_bytes,
            metadata={"format": "pt", "recipe": plan.recipe, "producer": "megatron_nvfp4"},
            force=force,
            needed_bytes=_num_bytes(source, plan),
        ) as writer,
        Progress("export", sum(_source_bytes(source, layer) for layer in plan.layers)) as progress,
    ):
        counts = _write(writer, source, plan, input_amax or {}, backend, progress)
        if plan.form is MODELOPT:
            writer.write_json(
                "hf_quant_config.json", hf_quant_config(config["quantization_config"])
            )
        for path in companions(Path(files_from)) if files_from else ():
            if path.name != "hf_quant_config.json":
                writer.copy_file(path)
    return {
        "out": str(out),
        "format": plan.form.name,
        **producer,
        "kv_cache": "fp8" if fp8_kv_cache else "not declared",
        "num_quantized": len(plan.quantized),
        "num_kept": len(plan.kept),
        **counts,
        "bits_per_weight": 8 * counts["quantized_bytes"] / counts["quantized_values"],
        "notes": plan.notes,
    }


def _producer(plan: ExportPlan) -> dict[str, str]:
    return {
        "name": "megatron_nvfp4",
        "version": __version__,
        "recipe": plan.recipe,
        "weights": plan.weights,
        "activations": plan.activations,
    }


def _write(
    writer: HFWriter,
    source: Source,
    plan: ExportPlan,
    input_amax: Mapping[str, float],
    backend: str,
    progress: Progress,
) -> dict[str, int]:
    """All tensors of the plan; how many bytes and values of which kind they were."""
    counts = {"quantized_bytes": 0, "quantized_values": 0, "kept_bytes": 0}
    for group in _groups(plan.layers):
        for name, tensor in _stored(source, group, plan.form, input_amax, backend):
            writer.write(name, tensor)
            kind = "quantized_bytes" if group[0].quantized else "kept_bytes"
            counts[kind] += tensor.nbytes
        for layer in group:
            counts["quantized_values"] += layer.quantized * math.prod(layer.target.shape)
            progress.advance(_source_bytes(source, layer))
    for name in plan.copied:
        writer.write(*_kept(name, source.read(name)))
    return counts


def _groups(layers: Sequence[Layer]) -> list[list[Layer]]:
    """Layers in order; together those whose weights share an amax beyond their own parameter."""
    found: dict[str, list[Layer]] = {}
    for layer in layers:
        key = layer.target.key
        if layer.quantized:  # samplers fuse the two down-projections of latent attention
            key = re.sub(r"linear_(q|kv)_down_proj", "linear_qkv_down_proj", key)
        found.setdefault(key, []).append(layer)
    return list(found.values())


def _stored(
    source: Source,
    group: Sequence[Layer],
    form: ServingFormat,
    input_amax: Mapping[str, float],
    backend: str,
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors to write for a group."""
    parts = [read_layer(source, layer) for layer in group]
    if not group[0].quantized:
        for tensors in parts:
            yield from (_kept(name, tensor) for name, tensor in tensors.items())
        return
    amax = torch.stack([_amax(name, t) for tensors in parts for name, t in tensors.items()])
    amax = amax.max().reshape(1)
    for layer, tensors in zip(group, parts, strict=True):
        for name, packed in _quantize(layer, tensors, amax, backend).items():
            module = module_of(name)
            yield from form.tensors(module, packed, input_amax.get(module)).items()


def read_layer(source: Source, layer: Layer) -> dict[str, Tensor]:
    """The Hugging Face tensors of a layer, whole; of a fused source, the expert's part of it."""
    if layer.source.rows == layer.target.rows:
        return {name: source.read(name) for name in layer.names}
    found, at = {}, 0
    for rows in layer.target.rows:
        end = at + rows.stop - rows.start
        found[rows.hf_name] = torch.cat(
            [
                source.read(piece.hf_name, piece.start, piece.stop, index=piece.index)
                for piece in sources(layer.source, at, end)
                if not isinstance(piece, int)
            ]
        )
        at = end
    return found


def _amax(name: str, weight: Tensor) -> Tensor:
    """max |weight|, FP32 scalar: quant's, and one pass finds what is not finite."""
    if weight.numel() == 0:
        return torch.zeros(())
    low, high = torch.aminmax(weight)
    amax = torch.maximum(-low.float(), high.float())
    if not torch.isfinite(amax):
        raise _not_finite(name)
    return amax


def _kept(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """A tensor to write as it is."""
    if not is_finite(tensor):
        raise _not_finite(name)
    return name, tensor


def _not_finite(name: str) -> ValueError:
    return ValueError(
        f"{name}: holds a NaN or an Inf; such a weight is not exported, take an earlier checkpoint"
    )


def _quantize(
    layer: Layer, tensors: Mapping[str, Tensor], amax: Tensor, backend: str
) -> dict[str, PackedWeight]:
    """The layer's Hugging Face tensors in NVFP4, as the trainer quantises its one parameter."""
    spec = layer.spec
    if spec is None:
        return {name: quantize_modelopt(tensor, amax) for name, tensor in tensors.items()}
    chosen = backends.select("quantize", (spec,), device="cpu", backend=backend)
    if spec.block[0] == 1:  # rows do not see each other, so their order does not count
        return {
            name: pack_quantized(chosen.quantize(tensor, spec, amax=amax))
            for name, tensor in tensors.items()
        }
    matrix = torch.cat([tensors[r.hf_name][r.start : r.stop] for r in layer.target.rows])
    packed = pack_quantized(chosen.quantize(matrix, spec, amax=amax))
    pieces: dict[str, list[PackedWeight]] = {}
    at = 0
    for rows in layer.target.rows:
        end = at + rows.stop - rows.start
        pieces.setdefault(rows.hf_name, []).append(packed.rows(at, end))
        at = end
    return {
        name: PackedWeight(
            torch.cat([piece.codes for piece in found]),
            torch.cat([piece.block_scales for piece in found]),
            packed.multiplier,
            packed.divisor,
        )
        for name, found in pieces.items()
    }


def _source_bytes(source: Source, layer: Layer) -> int:
    dtype = source.meta(layer.source.rows[0].hf_name)[0]
    return math.prod(layer.target.shape) * dtype.itemsize


def _num_bytes(source: Source, plan: ExportPlan) -> int:
    """About what will be written."""
    return sum(
        math.prod(layer.target.shape) * 9 // 16 if layer.quantized else _source_bytes(source, layer)
        for layer in plan.layers
    )


# --- the command ----------------------------------------------------------------------------------


def open_source(folder: str | Path, hf_config: str | Path | None = None) -> Source:
    """A checkpoint as Hugging Face tensors; a Megatron one needs hf_config, the model's HF folder.

    ValueError: neither of the two, or a Megatron checkpoint without hf_config.
    """
    if (Path(folder) / "config.json").exists():
        return HFReader(folder)
    if hf_config is None:
        raise ValueError(
            f"{folder}: holds no config.json; if it is a Megatron checkpoint, give --hf-config"
        )
    return open_megatron(folder, hf_config)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `main`."""
    parser.add_argument(
        "--in",
        dest="source",
        required=True,
        metavar="DIR",
        help="Hugging Face or Megatron checkpoint",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to create")
    parser.add_argument("--format", choices=FORMATS, default=MODELOPT.name)
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help=f"a training recipe, or {', '.join(ROUNDINGS)}; default: what is selected",
    )
    parser.add_argument("--policy", metavar="FILE", help="the layer policy (YAML) of training")
    parser.add_argument(
        "--input-amax",
        metavar="FILE",
        help="JSON {module: max |input|}, for static activation scales",
    )
    parser.add_argument(
        "--fp8-kv-cache",
        action="store_true",
        help="declare an FP8 KV cache; without it nothing is said and samplers keep theirs",
    )
    parser.add_argument(
        "--hf-config", metavar="DIR", help="with a Megatron checkpoint: the HF model"
    )
    parser.add_argument("--backend", default="auto", metavar="NAME", help="who quantises")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, metavar="GB")
    parser.add_argument("--force", action="store_true", help="replace the output folder")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def main(options: argparse.Namespace) -> int:
    """Export, print the record, and return 0; ValueError or RuntimeError say what is wrong."""
    check_apart(options.out, options.source, options.hf_config)
    source = open_source(options.source, options.hf_config)
    plan = plan_export(
        source,
        FORMATS[options.format],
        options.recipe,
        options.policy,
        static_activations=options.input_amax is not None,
    )
    amax = None
    if options.input_amax is not None:
        amax, num_unseen = read_input_amax(options.input_amax, plan.quantized)
        if num_unseen:
            plan.notes.append(f"{num_unseen} experts without an amax took their layer's largest")
    record = export(
        source,
        options.out,
        plan,
        input_amax=amax,
        fp8_kv_cache=options.fp8_kv_cache,
        backend=options.backend,
        files_from=options.hf_config or options.source,
        max_shard_bytes=options.max_shard_gb * 1e9,
        force=options.force,
    )
    print(json.dumps(record, indent=2) if options.json else "\n".join(_words(record)))
    return 0


def _words(record: Mapping[str, Any]) -> Iterator[str]:
    yield f"{record['out']}: {record['format']}, recipe {record['recipe']}"
    yield f"  weights {record['weights']}; activations {record['activations']}"
    yield (
        f"  {record['num_quantized']} NVFP4 linears, {record['quantized_bytes'] / 1e9:.3f} GB at "
        f"{record['bits_per_weight']:.3f} bits a weight; {record['kept_bytes'] / 1e9:.3f} GB as they were"
    )
    yield f"  KV cache: {record['kv_cache']}"
    yield from (f"  note: {note}" for note in record["notes"])
