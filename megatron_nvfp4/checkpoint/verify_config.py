"""What a checkpoint's configuration declares, and whether it can be compared with another at all."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_nvfp4.checkpoint.architecture import Architecture
from megatron_nvfp4.checkpoint.formats import FORMATS
from megatron_nvfp4.checkpoint.hf import HFReader
from megatron_nvfp4.checkpoint.verify_report import Report

_IGNORE_KEYS = ("ignore", "modules_to_not_convert", "exclude_modules")
_SECOND = "hf_quant_config.json"
_SCALES = tuple({f".{suffix}" for form in FORMATS.values() for suffix in form.suffixes[1:]})


class WrongUseError(ValueError):
    """What was asked for cannot be answered; nothing is wrong with the files."""


def architecture_of(reader: HFReader) -> Architecture:
    """The model of a folder, quantised or not. Errors: as Architecture.from_hf_config."""
    config = {key: value for key, value in reader.config.items() if key != "quantization_config"}
    return Architecture.from_hf_config(config)


def refuse_unquantised(reader: HFReader) -> None:
    """WrongUseError for a folder that neither says nor shows that it is quantised."""
    says = reader.config.get("quantization_config") or (reader.folder / _SECOND).exists()
    if not says and not any(name.endswith(_SCALES) for name in reader.names()):
        raise WrongUseError(
            f"{reader.folder}: is not quantised, there is nothing to check; make an NVFP4 checkpoint of it:"
            f" python -m megatron_nvfp4 export-nvfp4 --in {reader.folder} --out DIR --recipe NAME"
        )


def refuse_another_model(reader: HFReader, original: HFReader) -> None:
    """WrongUseError naming the first entry in which two folders' models differ; unknown models pass."""
    if original.config.get("quantization_config"):
        raise WrongUseError(
            f"{original.folder}: is quantised itself; give the checkpoint that was exported to --against"
        )
    try:
        here, there = (asdict(architecture_of(each)) for each in (reader, original))
    except (ValueError, TypeError, ArithmeticError):
        return  # the report says what it makes of such a config
    for name, value in here.items():
        if value != there[name]:
            raise WrongUseError(
                f"{original.folder}: is of another model: {_difference(name, there[name], value)} in"
                f" {reader.folder}; give the checkpoint that was exported to --against"
            )


def _difference(name: str, there: Any, here: Any) -> str:
    if isinstance(there, dict) and isinstance(here, dict):
        name, there, here = next(
            (f"{name}.{key}", there[key], here[key]) for key in there if there[key] != here[key]
        )
    return f"its {name} is {there!r}, it is {here!r}"


def ignored(config: Mapping[str, Any]) -> list[str]:
    """The ignore list of a quantization_config, under any of its names."""
    for key in _IGNORE_KEYS:
        if config.get(key) is not None:
            return [str(pattern) for pattern in config[key]]
    return []


def second_config(folder: Path) -> dict[str, Any] | None:
    """hf_quant_config.json in the form of a quantization_config, None where there is none."""
    path = folder / "hf_quant_config.json"
    if not path.exists():
        return None
    try:
        nested = json.loads(path.read_text())
        config = {
            "quant_method": "modelopt",
            "producer": nested.get("producer"),
            **nested["quantization"],
        }
        _check_form(config)
        return config
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"is no configuration of ModelOpt ({error!r}); export again") from error


def declared(reader: HFReader, report: Report) -> dict[str, Any]:
    """quantization_config of config.json, else hf_quant_config.json; ValueError where neither is there."""
    config = reader.config.get("quantization_config")
    if config:
        _check_form(config)
        return config
    second = second_config(reader.folder)
    if second is None:
        raise ValueError(
            "config.json has no quantization_config, and there is no hf_quant_config.json, beside scales;"
            " copy the config of the export again"
        )
    report.warn("config.json", "has no quantization_config; hf_quant_config.json is read instead")
    return second


def _check_form(config: Any) -> None:
    """ValueError unless a quantization_config has the shape that the checks rely on."""
    groups = config.get("config_groups") if isinstance(config, dict) else None
    shaped = isinstance(config, dict) and isinstance(groups or {}, dict)
    for group in (groups or {}).values() if shaped else ():
        inputs = group.get("input_activations") if isinstance(group, dict) else False
        shaped &= inputs is None or isinstance(inputs, dict)
    for key in _IGNORE_KEYS if shaped else ():
        shaped &= isinstance(config.get(key) or [], list)
    shaped = shaped and isinstance(config.get("producer") or {}, dict)
    if not shaped:
        raise ValueError(
            f"config.json: quantization_config is malformed ({config!r:.200}); export again"
        )
