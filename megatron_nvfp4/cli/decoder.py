"""A Hugging Face folder as a decoder on this package's linears, for the verbs that study recipes."""

from pathlib import Path
from typing import Any

from megatron_nvfp4.recipes import RECIPES, Recipe


def open_decoder(folder: Path, device: str = "cpu", dtype: Any = None) -> Any:
    """The diagnostics.sensitivity_model.Decoder of a folder, held whole, its linears in BF16 numerics.

    dtype: torch's, of parameters and activations; None: BF16.
    ValueError: a folder or an architecture that cannot be read, or a model that is not computed here.
    """
    import torch

    from megatron_nvfp4.checkpoint.as_megatron import ParametersOfHF
    from megatron_nvfp4.checkpoint.hf import HFReader
    from megatron_nvfp4.diagnostics.sensitivity_model import Decoder
    from megatron_nvfp4.modules import GroupedLinear, Linear, QLinearParams

    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch sees no GPU; use --device cpu")
    dtype = dtype or torch.bfloat16
    model = ParametersOfHF(HFReader(folder))
    by_key = {parameter.key: parameter for parameter in model.parameters}
    options = {"params_dtype": dtype, "device": device}
    options["qlinear_params"] = QLinearParams(recipe=RECIPES["bf16"])

    def read(key: str) -> torch.Tensor:
        weight = model.read(by_key[key])
        num_bad = int((~torch.isfinite(weight)).sum())
        if num_bad:
            raise ValueError(
                f"{folder}: {key} holds {num_bad} values that are NaN or infinite; take a sound checkpoint"
            )
        return weight.to(device, dtype)

    def build(name: str, weights: list, bias: Any) -> torch.nn.Module:
        num_rows, num_cols = weights[0].shape
        rest = iter(weights)
        named = options | {"name": name, "init_method": lambda weight: weight.copy_(next(rest))}
        if ".experts." in name:
            module = GroupedLinear(len(weights), num_cols, num_rows, bias=False, **named)
        else:
            module = Linear(num_cols, num_rows, bias=bias is not None, **named)
        if bias is not None:
            module.bias.data.copy_(bias)
        return module.requires_grad_(False).eval()

    return Decoder(model.arch, model.reader.config, read, build)


def set_recipe(module: Any, recipe: Recipe) -> None:
    """Give a linear of the decoder other numerics; ValueError for a shape that the recipe cannot take."""
    from megatron_nvfp4.modules import QLinearParams

    module.set_qlinear_params(QLinearParams(recipe=recipe))
