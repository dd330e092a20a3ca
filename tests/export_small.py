"""Small checkpoints to export, and the export in one call."""

from pathlib import Path

from checkpoint_small import CONFIGS, random_weights, write_hf

from megatron_nvfp4.checkpoint import plan
from megatron_nvfp4.checkpoint.export import export
from megatron_nvfp4.checkpoint.export_plan import plan_export
from megatron_nvfp4.checkpoint.formats import MODELOPT, PackedWeight, ServingFormat
from megatron_nvfp4.checkpoint.hf import HFReader

# Latent attention whose every contraction is a multiple of 16.
MLA = {
    **CONFIGS["deepseek_v3"],
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "v_head_dim": 16,
    "num_nextn_predict_layers": 0,
}


def checkpoint(folder: Path, config: str | dict, **changes) -> HFReader:
    """A random checkpoint of a configuration; changes: tensors to use instead, or None to leave out."""
    config = CONFIGS[config] if isinstance(config, str) else config
    weights = random_weights(plan.hf_tensors(plan.Architecture.from_hf_config(config)))
    weights |= changes.get("tensors", {})
    write_hf(folder, config, {n: t for n, t in weights.items() if t is not None})
    return HFReader(folder)


def exported(source: HFReader, out: Path, form=MODELOPT, recipe=None, policy=None, **options):
    chosen = plan_export(source, form, recipe, policy, static_activations="input_amax" in options)
    return export(source, out, chosen, **options), HFReader(out)


def policy_file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def stored_weight(reader: HFReader, form: ServingFormat, module: str) -> PackedWeight:
    """A module as the file holds it."""
    return form.packed(*(reader.read(f"{module}.{suffix}") for suffix in form.suffixes[:3]))
