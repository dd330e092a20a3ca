"""A Hugging Face checkpoint read as Megatron's parameters, after a check of every name and shape."""

import torch
from torch import Tensor

from megatron_nvfp4.checkpoint.hf import HFReader
from megatron_nvfp4.checkpoint.hf_files import few
from megatron_nvfp4.checkpoint.plan import (
    HF_EMBEDDING,
    HF_OUTPUT,
    Architecture,
    Parameter,
    as_saved,
    copies,
    hf_tensors,
    parameters,
    sources,
)
from megatron_nvfp4.checkpoint.rows import Rows
from megatron_nvfp4.checkpoint.values import CONVERTED, check_float, is_finite

COMPARED_ROWS = 4096  # at a time, where two tensors must be equal
# Buffers that old versions of transformers saved and that follow from the config.
_IGNORED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


class ParametersOfHF:
    """Megatron's parameters, read by rows from the tensors of a Hugging Face checkpoint.

    vocab_size_padded: rows of Megatron's embedding; None: the vocabulary itself.
    Errors: ValueError naming the tensors that are missing, unexpected or of another shape than
    config.json implies, parts of one parameter with different dtypes, and a repeated embedding or head
    that differs from the original.
    """

    def __init__(self, reader: HFReader, *, vocab_size_padded: int | None = None) -> None:
        self.reader = reader
        self.names = {name for name in reader.names() if not name.endswith(_IGNORED)}
        self.arch = as_saved(Architecture.from_hf_config(reader.config), self.names)
        self._check_names()
        self.parameters = parameters(
            self.arch, hf_names=self.names, vocab_size_padded=vocab_size_padded
        )
        self._check_copies()

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """The one dtype of everything in the parameter; ValueError where there are two."""
        found = {rows.hf_name: self.reader.meta(rows.hf_name)[0] for rows in parameter.rows}
        if len(set(found.values())) != 1:
            dtypes = ", ".join(f"{name} is {dtype}" for name, dtype in found.items())
            raise ValueError(
                f"{parameter.key}: its parts have different dtypes: {dtypes}; cast them to one"
            )
        return next(iter(found.values()))

    def num_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(
            torch.Size(parameter.shape).numel() * self.dtype(parameter).itemsize
            for parameter in self.parameters
        )

    def read(self, parameter: Parameter, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start..stop of a parameter: a view of the file where they lie in one piece there."""
        stop = parameter.shape[0] if stop is None else stop
        parts = list(sources(parameter, start, stop))
        if len(parts) == 1 and not isinstance(parts[0], int):
            return self._read(parts[0])
        result = torch.empty((stop - start, *parameter.shape[1:]), dtype=self.dtype(parameter))
        at = 0
        for part in parts:
            num_rows = part if isinstance(part, int) else part.stop - part.start
            rows = result[at : at + num_rows]
            rows.zero_() if isinstance(part, int) else rows.copy_(self._read(part))
            at += num_rows
        return result

    def pieces(self, parameter: Parameter) -> Rows:
        """A whole parameter as it lies in the files, without a copy; zero rows, if any, come last."""
        dtype = self.dtype(parameter)
        found = [self._read(rows) for rows in parameter.rows]
        if parameter.padding:
            found.append(torch.zeros(parameter.padding, *parameter.shape[1:], dtype=dtype))
        return Rows.of(found)

    def not_finite(self, parameter: Parameter, rows: Rows) -> list[str]:
        """The Hugging Face tensors of a parameter that hold a NaN or an Inf. rows: what `pieces` gave."""
        both = zip(parameter.rows, rows.pieces, strict=False)
        return list(dict.fromkeys(place.hf_name for place, part in both if not is_finite(part)))

    def _read(self, rows) -> Tensor:
        return self.reader.read(rows.hf_name, rows.start, rows.stop, index=rows.index)

    def _check_names(self) -> None:
        arch = self.arch
        expected = hf_tensors(arch, hf_names=self.names)
        repeated = copies(arch, hf_names=self.names)
        missing = [name for name in expected if name not in self.names]
        unexpected = [n for n in sorted(self.names) if n not in expected and n not in repeated]
        folder = self.reader.folder
        if HF_OUTPUT in missing:
            raise ValueError(
                f"{folder}: {HF_OUTPUT} is missing; if the head is the embedding, set"
                " tie_word_embeddings to true in config.json"
            )
        if any(
            name.endswith(("_scale_inv", "weight_scale", "weight_packed")) for name in unexpected
        ):
            raise ValueError(
                f"{folder}: holds quantised weights ({few(unexpected)}); dequantise it first"
            )
        for name in sorted(self.names):
            check_float(name, self.reader.meta(name)[0], CONVERTED)
        if missing or unexpected:
            raise ValueError(
                f"{folder}: tensors are not those of model_type={arch.model_type!r}:"
                f" {len(missing)} missing ({few(missing)}), {len(unexpected)} unexpected"
                f" ({few(unexpected)}); remove what is too much, copy what is missing, or correct config.json"
            )
        for name, shape in expected.items():
            found = self.reader.meta(name)[1]
            if found != shape:
                raise ValueError(
                    f"{name}: shape {list(found)} is not {list(shape)}, which config.json implies"
                    + _vocabulary_hint(name, arch)
                    + "; correct the config or the tensor"
                )

    def _check_copies(self) -> None:
        for name, original in copies(self.arch, hf_names=self.names).items():
            same = self.reader.meta(name) == self.reader.meta(original)
            num_rows = self.reader.meta(original)[1][0]
            for start in range(0, num_rows if same else 0, COMPARED_ROWS):
                rows = start, min(start + COMPARED_ROWS, num_rows)
                bits = [self.reader.read(n, *rows).view(torch.uint8) for n in (name, original)]
                same = same and torch.equal(*bits)
            if same:
                continue
            if name == HF_OUTPUT:
                raise ValueError(
                    f"{name}: differs from {original} although config.json says"
                    " tie_word_embeddings=true; set it to false to keep the head"
                )
            raise ValueError(
                f"{name}: differs from {original}, and Megatron's prediction layers share it; set"
                " num_nextn_predict_layers to 0 and remove those layers to leave them behind"
            )


def _vocabulary_hint(name: str, arch: Architecture) -> str:
    if name not in (HF_EMBEDDING, HF_OUTPUT):
        return ""
    return f" (vocab_size={arch.vocab_size})"
