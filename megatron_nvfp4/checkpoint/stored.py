"""Whole parameters out of a Megatron checkpoint folder, by their canonical names, in any format."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_nvfp4.checkpoint.architecture import Architecture
from megatron_nvfp4.checkpoint.dcp import TorchDistReader, iteration_folder
from megatron_nvfp4.checkpoint.legacy import LegacyReader
from megatron_nvfp4.checkpoint.names import Address, from_local_name, is_weight, stored_parameters
from megatron_nvfp4.checkpoint.plan import EMBEDDING, OUTPUT, Parameter, parameters
from megatron_nvfp4.checkpoint.rows import Split


class DistributedParameters:
    """The parameters of a torch_dist checkpoint of any key layout.

    arch: tells how many layers a stacked key holds and which norm is whose. Optimizer, extra and
    random states are passed over. ValueError: a parameter that is stored under two keys.
    """

    def __init__(self, reader: TorchDistReader, arch: Architecture) -> None:
        self.reader, self.folder = reader, reader.folder
        self.arguments: dict[str, Any] = reader.common["args"]
        self._places: dict[str, list[Address]] = {}
        for key in filter(is_weight, reader.keys()):
            for name, address in stored_parameters(key, reader.meta(key)[1], arch):
                self._add(name, address)

    def _add(self, name: str, address: Address) -> None:
        places = self._places.setdefault(name, [])
        if any(place.half == address.half for place in places):
            raise ValueError(
                f"{name}: stored twice in {self.folder}, as {places[0].key} and {address.key}; "
                "save it without one of them"
            )
        places.append(address)
        places.sort(key=lambda place: place.half or "")  # gate before up

    def keys(self) -> list[str]:
        """Canonical names of all parameters."""
        return list(self._places)

    def meta(self, key: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """A parameter's dtype and shape."""
        places = self._places[key]
        dtype, shape = self.reader.meta(places[0].key)
        shape = shape[sum(i is not None for i in (places[0].layer, places[0].expert)) :]
        if places[0].half is not None:
            shape = (shape[0] * len(places), *shape[1:])
        return dtype, shape

    def read(self, parameter: Parameter, start: int, stop: int) -> Tensor:
        """Rows start..stop of a parameter."""
        places = self._places[parameter.key]
        if places[0].half is None:
            return self._read(places[0], start, stop)
        half = self.meta(parameter.key)[1][0] // len(places)
        parts = [
            self._read(place, max(start - at, 0), min(stop - at, half))
            for at, place in zip((0, half), places, strict=False)
            if start < at + half and stop > at
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(self, place: Address, start: int, stop: int) -> Tensor:
        return self.reader.read(
            place.key, layer=place.layer, expert=place.expert, rows=(start, stop)
        )


class LegacyParameters:
    """The parameters of a `torch` checkpoint, put together from its ranks' files.

    arch: tells how tensor parallelism cuts each parameter and which norm is whose. ValueError: a
    parameter that is stored under two names.
    """

    def __init__(self, reader: LegacyReader, arch: Architecture) -> None:
        self.reader, self.folder = reader, reader.folder
        self.arguments: dict[str, Any] = reader.common["args"]
        expected = {parameter.key: parameter for parameter in parameters(arch)}
        # A pipeline's last stage keeps a copy of tied embeddings.
        expected.setdefault(OUTPUT, expected[EMBEDDING])
        self._places: dict[str, tuple[str, Split]] = {}
        for name in filter(is_weight, reader.keys()):
            key = from_local_name(name, arch)
            if key in self._places:
                raise ValueError(
                    f"{key}: stored twice in {self.folder}, as {self._places[key][0]} and {name}; "
                    "save it without one of them"
                )
            self._places[key] = name, self._split(name, expected.get(key))

    def _split(self, name: str, parameter: Parameter | None) -> Split:
        if parameter is None or parameter.split is not None:
            return None if parameter is None else parameter.split
        # The local spec cuts the low-rank projections that Transformer Engine's keeps whole.
        is_part = self.reader.meta(name)[1] != parameter.shape
        return "rows" if is_part and self.reader.meta(name, "rows")[1] == parameter.shape else None

    def keys(self) -> list[str]:
        """Canonical names of all parameters."""
        return list(self._places)

    def meta(self, key: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """A whole parameter's dtype and shape."""
        return self.reader.meta(*self._places[key])

    def read(self, parameter: Parameter, start: int, stop: int) -> Tensor:
        """Rows start..stop of a parameter."""
        return self.reader.read(*self._places[parameter.key], rows=(start, stop))


def open_parameters(
    megatron: Path | str, arch: Architecture
) -> DistributedParameters | LegacyParameters:
    """The parameters of a checkpoint folder or of one of its iterations, whatever its format."""
    folder = iteration_folder(megatron)
    if any(folder.glob("mp_rank_*")):
        return LegacyParameters(LegacyReader(folder), arch)
    return DistributedParameters(TorchDistReader(folder), arch)
