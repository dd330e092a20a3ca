"""A Megatron checkpoint read as the tensors of a Hugging Face checkpoint."""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_nvfp4.checkpoint.as_megatron import COMPARED_ROWS
from megatron_nvfp4.checkpoint.hf_files import few
from megatron_nvfp4.checkpoint.plan import (
    EMBEDDING,
    OUTPUT,
    Architecture,
    Parameter,
    Piece,
    copies,
    hf_tensors,
    parameters,
    pieces,
)

# Arguments of a Megatron run that change what its parameters mean.
_REFUSED = {
    "moe_mlp_glu_interleave_size": "rows of gate and up alternate in the experts' linear_fc1",
    "moe_shared_expert_glu_interleave_size": "rows of gate and up alternate in shared linear_fc1",
    "apply_layernorm_1p": "norms are stored less one",
    "rotary_interleaved": "query and key rows are in another order",
}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".index.json")


class StoredParameters(Protocol):
    """Whole parameters of a Megatron checkpoint by their keys, whatever the files look like."""

    folder: Path
    arguments: dict[str, Any]

    def keys(self) -> Collection[str]: ...

    def meta(self, key: str) -> tuple[torch.dtype, tuple[int, ...]]: ...

    def read(self, parameter: Parameter, start: int, stop: int) -> Tensor: ...


class TensorsOfMegatron:
    """Hugging Face tensors assembled from a Megatron checkpoint; reads like an HFReader.

    config: the parsed config.json of the model. hf_names: names of the checkpoint to imitate, which
        decide whether experts are fused; None: the names under which such models are published.
    Fused q, k and v stay in memory till the next layer's, so that a pass in the order of `names`, or sorted
    by name, reads every matrix once.
    Errors: ValueError naming parameters that are missing, unknown or of another shape than the config
    implies, and a head that contradicts tie_word_embeddings.
    """

    def __init__(
        self,
        stored: StoredParameters,
        config: dict[str, Any],
        *,
        hf_names: Collection[str] | None = None,
    ) -> None:
        self.stored, self.config, self.folder = stored, config, stored.folder
        arch = Architecture.from_hf_config(config)
        self._keys = frozenset(stored.keys())
        if not any(key.startswith("mtp.") for key in self._keys):
            arch = dataclasses.replace(arch, num_mtp_layers=0)
        elif hf_names is not None:
            # The imitated checkpoint may have been written without prediction layers.
            first = f"model.layers.{arch.num_layers}."
            hf_names = {*hf_names, *(name for name in hf_tensors(arch) if name.startswith(first))}
        self.arch = arch
        self._check_arguments()
        self.parameters = self._expected(hf_names)
        self._pieces = pieces(self.parameters)
        self._copies = copies(arch, hf_names=hf_names)
        self._check()
        self._last: tuple[str, Tensor] | None = None

    def names(self) -> list[str]:
        """Every tensor, in the order of the layers."""
        return [*self._pieces, *self._copies]

    def meta(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """A tensor's dtype and shape; ValueError naming an absent tensor."""
        found = self._pieces_of(name)
        shape = (max(p.stop for p in found), *found[0].parameter.shape[1:])
        if found[0].index is not None:
            shape = (len(found), *shape)
        return self.stored.meta(found[0].parameter.key)[0], shape

    def num_bytes(self, name: str | None = None) -> int:
        """Bytes of one tensor, or of all."""
        if name is None:
            return sum(self.num_bytes(each) for each in self.names())
        dtype, shape = self.meta(name)
        return torch.Size(shape).numel() * dtype.itemsize

    def read(
        self,
        name: str,
        start: int | None = None,
        stop: int | None = None,
        *,
        index: int | None = None,
    ) -> Tensor:
        """Rows [start, stop) of a tensor, or of its slice `index` along the leading dimension."""
        found = self._pieces_of(name)
        dtype, shape = self.meta(name)
        if index is not None:
            found, shape = [piece for piece in found if piece.index == index], shape[1:]
            if not found:
                raise ValueError(
                    f"{name}: index {index} of shape {self.meta(name)[1]}; give one within"
                )
        whole = self._whole(found, dtype, shape, is_fused=index is None)
        if start is None and stop is None:
            return whole
        return whole[0 if start is None else start : stop]

    def _whole(
        self, found: list[Piece], dtype: torch.dtype, shape: tuple[int, ...], *, is_fused: bool
    ) -> Tensor:
        if len(found) == 1 and not (is_fused and found[0].index is not None):
            return self._rows(found[0])
        result = torch.empty(shape, dtype=dtype)
        for piece in found:
            target = result[piece.index] if is_fused and piece.index is not None else result
            target[piece.start : piece.stop] = self._rows(piece)
        return result

    def _rows(self, piece: Piece) -> Tensor:
        parameter, stop = piece.parameter, piece.at + piece.stop - piece.start
        if len(parameter.rows) <= 2 or len(parameter.shape) == 1:
            return self.stored.read(parameter, piece.at, stop)
        # Many small pieces for several tensors, as of q, k and v: read once, and kept till the next
        # such matrix. Their biases lie between them in files sorted by name, and are cheap to read.
        if self._last is None or self._last[0] != parameter.key:
            self._last = None
            self._last = parameter.key, self.stored.read(parameter, 0, parameter.shape[0])
        return self._last[1][piece.at : stop]

    def _pieces_of(self, name: str) -> list[Piece]:
        name = self._copies.get(name, name)
        if name not in self._pieces:
            raise ValueError(f"{self.folder}: holds no tensor {name}; take one of `names`")
        return self._pieces[name]

    def _expected(self, hf_names: Collection[str] | None) -> list[Parameter]:
        if EMBEDDING not in self._keys:
            raise ValueError(
                f"{self.folder}: {EMBEDDING} is missing; give a GPT model's checkpoint"
            )
        num_rows = self.stored.meta(EMBEDDING)[1][0]
        found = parameters(self.arch, hf_names=hf_names, vocab_size_padded=num_rows)
        arguments = self.stored.arguments
        unit = arguments.get("make_vocab_size_divisible_by") or 128
        unit *= arguments.get("tensor_model_parallel_size") or 1
        # Where the arguments are unknown, any padding up to 64 ranks' worth passes.
        limit = unit if "make_vocab_size_divisible_by" in arguments else 64 * unit
        if num_rows - self.arch.vocab_size >= limit:
            raise ValueError(
                f"{EMBEDDING}: {num_rows} rows are no padding of vocab_size={self.arch.vocab_size}"
                " of config.json; the two are of different models: give the right --hf-config"
            )
        return found

    def _check_arguments(self) -> None:
        """What the tensors' shapes do not show: other heads of the same total, values stored otherwise."""
        arguments, arch = self.stored.arguments, self.arch
        for name, meaning in _REFUSED.items():
            if arguments.get(name):
                raise ValueError(
                    f"{self.folder}: its arguments say {name}={arguments[name]}, so {meaning};"
                    " Hugging Face's model has no such form: train without it"
                )
        expected = {"num_layers": arch.num_layers, "num_attention_heads": arch.num_heads}
        if arch.latent is None:
            expected["kv_channels"] = arch.head_dim
            if arguments.get("group_query_attention"):
                expected["num_query_groups"] = arch.num_groups
        for name, value in expected.items():
            if arguments.get(name) not in (None, value):
                raise ValueError(
                    f"{self.folder}: its arguments say {name}={arguments[name]}, config.json implies"
                    f" {value}; the two are of different models: give the right --hf-config"
                )

    def _check(self) -> None:
        expected = {parameter.key for parameter in self.parameters}
        missing = [p.key for p in self.parameters if p.key not in self._keys]
        unknown = sorted(self._keys - expected)
        if OUTPUT in missing:
            raise ValueError(
                f"{self.folder}: {OUTPUT} is missing although config.json says"
                " tie_word_embeddings=false; if the embedding is the head, set it to true"
            )
        if OUTPUT in unknown:
            self._check_tied_head()
            unknown.remove(OUTPUT)
        if missing or unknown:
            raise ValueError(
                f"{self.folder}: parameters are not those of"
                f" model_type={self.arch.model_type!r}: {len(missing)} missing ({few(missing)}),"
                f" {len(unknown)} unknown ({few(unknown)}); give the right --hf-config"
            )
        for parameter in self.parameters:
            found = self.stored.meta(parameter.key)[1]
            if found != parameter.shape:
                raise ValueError(
                    f"{parameter.key}: shape {list(found)} is not {list(parameter.shape)}, which"
                    " config.json implies; the two are of different models: give the right --hf-config"
                )

    def _check_tied_head(self) -> None:
        """A pipeline's last stage keeps a copy of tied embeddings."""
        embedding = next(p for p in self.parameters if p.key == EMBEDDING)
        head = dataclasses.replace(embedding, key=OUTPUT)
        for start in range(0, embedding.shape[0], COMPARED_ROWS):
            rows = start, min(start + COMPARED_ROWS, embedding.shape[0])
            parts = [self.stored.read(p, *rows).view(torch.uint8) for p in (head, embedding)]
            if torch.equal(*parts):
                continue
            raise ValueError(
                f"{OUTPUT}: differs from {EMBEDDING} although config.json says"
                " tie_word_embeddings=true; set it to false to keep the head"
            )


def companions(folder: Path) -> list[Path]:
    """What stands beside a checkpoint's weights and config and goes along with it: tokenizer, licence."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_WEIGHTS)
    ]
