"""Small checkpoints and texts for the tools that run a checkpoint under several recipes."""

import json
from pathlib import Path

import torch
from checkpoint_small import CONFIGS, hf_tensors, random_weights, write_hf
from torch import Tensor

from megatron_nvfp4.checkpoint.architecture import Architecture
from megatron_nvfp4.cli.decoder import open_decoder

BAD_LAYER = 2  # from 0, of `with_outliers`


def ids(count: int = 200, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 250, (count,), generator=generator).tolist()


def segments(num: int = 2, length: int = 48) -> list[Tensor]:
    return [torch.tensor(ids(length + 1, seed)) for seed in range(num)]


def weights_of(config: dict, gain: float = 2.0) -> dict[str, Tensor]:
    """Random weights, large enough that the layers count beside the embedding."""
    found = random_weights(hf_tensors(Architecture.from_hf_config(config)))
    return {
        name: (1 + tensor.float()).bfloat16() if "norm" in name else (tensor * gain).bfloat16()
        for name, tensor in found.items()
    }


def write(folder: Path, name: str = "llama", weights: dict | None = None, **changes) -> Path:
    """A checkpoint of one of CONFIGS with other entries in its config."""
    config = CONFIGS[name] | changes
    write_hf(folder, config, weights or weights_of(config))
    return folder


def write_ids(path: Path, count: int = 200) -> Path:
    path.write_text(json.dumps(ids(count)))
    return path


def with_outliers(weights: dict[str, Tensor], layer: int = BAD_LAYER) -> dict[str, Tensor]:
    """The same function by other weights: one column in 16 of a layer's FC2 is 64 times as large, and the
    row that it multiplies as much smaller. The rest of each block of 16 then has next to no codes left."""
    down, up = (f"model.layers.{layer}.mlp.{name}_proj.weight" for name in ("down", "up"))
    changed = dict(weights) | {down: weights[down].clone(), up: weights[up].clone()}
    changed[down][:, ::16] *= 64
    changed[up][::16] /= 64
    return changed


def decoder(folder: Path, dtype: torch.dtype = torch.bfloat16):
    return open_decoder(folder, dtype=dtype)
