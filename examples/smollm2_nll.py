"""Losses of one model on token segments; smollm2.py runs this once for every row of its table.

    python examples/smollm2_nll.py megatron|transformers CHECKPOINT HF_FOLDER SEGMENTS.json OUT.json

A process of its own, because Megatron's CPU device changes a process for good. CHECKPOINT is what --save
named, or a Hugging Face folder; the recipe of Megatron's layers is that of MINITE_RECIPE. Writes the mean
negative log likelihood of each segment, the seconds it took, and who computed the layers.
"""

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

Losses = Callable[[torch.Tensor], torch.Tensor]  # (1, length + 1) tokens: loss of all but the first


def main(kind: str, checkpoint: Path, hf: Path, segments_file: Path, out: Path) -> None:
    segments = json.loads(segments_file.read_text())
    load = {"megatron": megatron_model, "transformers": transformers_model}[kind]
    losses_of = load(checkpoint, hf, len(segments[0]) - 1)
    values = []
    started = time.perf_counter()
    with torch.no_grad():
        for tokens in segments:
            values.append(losses_of(torch.tensor([tokens])).double().mean().item())
            print(f"segment {len(values)}: {values[-1]:.4f}", file=sys.stderr, flush=True)
    if not all(map(math.isfinite, values)):
        raise SystemExit(f"error: {checkpoint}: a loss is not finite: {values}")
    result = {"nll": values, "seconds": time.perf_counter() - started}
    if kind == "megatron":
        from megatron_nvfp4.modules import used_backends

        result["backends"] = used_backends()
    partial = out.with_name(out.name + ".partial")
    partial.write_text(json.dumps(result))
    os.replace(partial, out)


def transformers_model(checkpoint: Path, hf: Path, length: int) -> Losses:
    """The model in FP32; 4-bit weights are decoded to BF16 first, which is how transformers does it."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    options = {}
    if "quantization_config" in json.loads((checkpoint / "config.json").read_text()):
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, **options)
    model.float().eval()

    def losses_of(tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens[:, :-1]).logits[0]
        return torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")

    return losses_of


def megatron_model(checkpoint: Path, hf: Path, length: int) -> Losses:
    """Megatron's GPT on minite layers in BF16, under the recipe of MINITE_RECIPE."""
    from megatron_nvfp4.mcore import cpu_device

    cpu_device.install()
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    model = new_gpt(json.loads((hf / "config.json").read_text()), length)
    wanted = model.sharded_state_dict(
        metadata={"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    )
    names = set(wanted)
    tracker = (checkpoint / "latest_checkpointed_iteration.txt").read_text().strip()
    folder = tracker if tracker == "release" else f"iter_{int(tracker):07d}"
    loaded = dist_checkpointing.load(wanted, str(checkpoint / folder))
    model.load_state_dict({name: loaded[name] for name in names})
    positions = torch.arange(length)[None]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    return lambda tokens: model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float()


def new_gpt(config: dict, length: int):
    """Megatron's GPTModel of a Hugging Face config, on a CPU without fused kernels."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_nvfp4.checkpoint.architecture import Architecture
    from megatron_nvfp4.checkpoint.arguments import megatron_arguments
    from megatron_nvfp4.mcore.layer_specs import get_minite_block_spec

    arguments = megatron_arguments(
        Architecture.from_hf_config(config), config, vocab_size_padded=config["vocab_size"]
    )
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    values = {name: value for name, value in vars(arguments).items() if name in fields}
    transformer = TransformerConfig(
        **values,
        layernorm_epsilon=arguments.norm_epsilon,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        transformer_impl="minite",
        bf16=True,
        params_dtype=torch.bfloat16,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=get_minite_block_spec(transformer),
        vocab_size=arguments.padded_vocab_size,
        max_sequence_length=length,
        position_embedding_type="rope",
        rotary_base=arguments.rotary_base,
        share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
    )
    return model.bfloat16().eval()


if __name__ == "__main__":
    if len(sys.argv) != 6:
        sys.exit(__doc__)
    main(sys.argv[1], *map(Path, sys.argv[2:]))
