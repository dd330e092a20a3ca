"""Converted checkpoints in Megatron itself: its logits are the Hugging Face model's, its files load."""

import dataclasses
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoint_small import CONFIGS, architecture, random_weights, write_hf
from megatron_runs import (
    MINITE,
    Outcomes,
    World,
    every_check,
    require_megatron,
    run_world,
    train,
)

from megatron_nvfp4.checkpoint import convert
from megatron_nvfp4.checkpoint.arguments import megatron_arguments
from megatron_nvfp4.checkpoint.as_megatron import ParametersOfHF
from megatron_nvfp4.checkpoint.dcp import TorchDistReader, TorchDistWriter
from megatron_nvfp4.checkpoint.hf import HFReader
from megatron_nvfp4.checkpoint.names import from_local_name
from megatron_nvfp4.checkpoint.plan import Architecture, copies, hf_tensors
from megatron_nvfp4.modules import base

require_megatron()
KINDS = (
    "qwen3",
    "qwen3_tied",
    "qwen3_moe",
    "llama",
    "qwen2",
    "qwen2_moe",
    "deepseek_v3",
    "glm4_moe",
)
# FP32 on both sides; the largest difference seen is 5.3e-6 at logits up to 5.7.
TOLERANCE = 2e-5


def _config(arguments, impl: str):
    """Megatron's config of a tiny model in FP32, from the arguments that its checkpoint would carry."""
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    config = MLATransformerConfig if arguments.multi_latent_attention else TransformerConfig
    fields = {field.name for field in dataclasses.fields(config)}
    values = {name: value for name, value in vars(arguments).items() if name in fields}
    if arguments.num_experts is not None:
        values |= {
            "num_moe_experts": arguments.num_experts,
            "moe_grouped_gemm": impl != "local",
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
        }
    if arguments.multi_latent_attention:
        values |= {"rope_type": "rope"}
    return config(
        **values,
        layernorm_epsilon=arguments.norm_epsilon,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        transformer_impl=impl,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )


class _PlainAttention(torch.nn.Module):
    """Causal attention with heads of two sizes, which Megatron has in Transformer Engine alone."""

    def __init__(self, softmax_scale: float, **kwargs) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query, key, value, *args, **kwargs) -> torch.Tensor:
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def _model(kind: str, impl: str, *, with_mtp: bool = False, vocab_size: int = 250):
    """Megatron's model of a tiny config, FP32. impl: local, minite or transformer_engine."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron_small import block_spec

    arch = architecture(kind)
    if not with_mtp:
        arch = dataclasses.replace(arch, num_mtp_layers=0)
    arguments = megatron_arguments(arch, CONFIGS[kind], vocab_size_padded=vocab_size)
    config = _config(arguments, impl)
    if impl == "local":
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        if arch.latent is not None:
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = _PlainAttention
    else:
        spec = block_spec(config)
    mtp = None
    if arch.num_mtp_layers:
        use_te = impl == "transformer_engine"
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=use_te)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=mtp,
        vocab_size=vocab_size,
        max_sequence_length=128,
        position_embedding_type=arguments.position_embedding_type,
        rotary_percent=arguments.rotary_percent,
        rotary_base=arguments.rotary_base,
        share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
    ).eval()


def _load(model, weights: ParametersOfHF) -> None:
    """Every parameter of the model, by its name there; fails when one has no counterpart."""
    found = {parameter.key: parameter for parameter in weights.parameters}
    state = {
        name: None
        if value is None
        else weights.read(found.pop(from_local_name(name, weights.arch)))
        for name, value in model.state_dict().items()
        if "_extra_state" not in name
    }
    assert not found
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert not [name for name in missing if "_extra_state" not in name]


def _logits(model, tokens: torch.Tensor) -> torch.Tensor:
    length = tokens.shape[1]
    positions = torch.arange(length).expand(tokens.shape[0], -1)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return model(tokens, positions, mask).float()


def _difference(model, folder: Path, kind: str) -> float:
    expected = torch.load(folder / f"{kind}.logits.pt")
    found = _logits(model, expected["tokens"])[..., : expected["logits"].shape[-1]]
    return (found - expected["logits"]).abs().max().item()


def check_logits_are_those_of_transformers(folder):
    # Prevents: rows, experts or norms in a wrong place that shapes do not give away.
    differences = {}
    for kind in KINDS:
        model = _model(kind, "local")
        _load(model, ParametersOfHF(HFReader(folder / kind)))
        differences[kind] = _difference(model, folder, kind)
    assert max(differences.values()) < TOLERANCE, differences


def check_plain_qkv_order_is_caught(folder):
    # Prevents: a comparison of logits too weak to see the classic mistake, [Q; K; V] without groups.
    model = _model("qwen3", "local")
    weights = ParametersOfHF(HFReader(folder / "qwen3"))
    _load(model, weights)
    for layer in range(weights.arch.num_layers):
        parts = [
            weights.reader.read(f"model.layers.{layer}.self_attn.{name}_proj.weight")
            for name in "qkv"
        ]
        qkv = model.decoder.layers[layer].self_attention.linear_qkv.weight
        qkv.data.copy_(torch.cat(parts))
    assert _difference(model, folder, "qwen3") > 1000 * TOLERANCE


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What is logged meanwhile, by whomever, as a warning or worse."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger().removeHandler(handler)


def _check_loads(kind: str, model, hf: Path, out: Path) -> None:
    """Megatron loads `hf`, converted to `out`, with nothing left over, no word, and every value right."""
    from megatron.core import dist_checkpointing
    from megatron_small import sharded

    convert.megatron_from_hf(hf, out)
    entries = {"model": sharded(model)}
    base._warned.clear()
    with _warnings() as said:
        state, missing, unexpected = dist_checkpointing.load(
            entries, str(out / "release"), strict="return_all"
        )
        # Neither Transformer Engine nor our layers keep attention's state in such a checkpoint.
        for name in model.state_dict():
            if name.endswith("core_attention._extra_state"):
                state["model"].setdefault(name, None)
        model.load_state_dict(state["model"])
    assert said == [], (kind, said)
    assert (missing, unexpected) == (set(), set()), kind
    states = [
        value
        for name, value in state["model"].items()
        if "_extra_state" in name and "core_attention" not in name and "output_layer" not in name
    ]
    assert states
    for found in states:
        assert (found.dtype, found.numel()) == (torch.uint8, 0), (kind, found)
    weights = ParametersOfHF(HFReader(hf), vocab_size_padded=256)
    expected = {parameter.key: weights.read(parameter) for parameter in weights.parameters}
    found = {
        name.replace(".mtp_model_layer.", ".transformer_layer."): value
        for name, value in model.state_dict().items()
        if "_extra_state" not in name
    }
    assert found.keys() == expected.keys(), kind
    assert [name for name in found if not torch.equal(found[name], expected[name])] == [], kind


def check_own_model_loads_what_is_written(folder):
    # Prevents: keys, shapes or chunks that Megatron misses or does not expect in our layers.
    for kind in ("qwen3", "qwen3_tied", "qwen3_moe", "glm4_moe"):
        model = _model(kind, "minite", vocab_size=256)
        _check_loads(kind, model, folder / kind, folder / f"{kind}.minite")
        assert _difference(model, folder, kind) < TOLERANCE, kind


def check_what_megatron_saves_comes_back(folder):
    # Prevents: a layout of keys, or the local spec's place for a norm, read as something else.
    from megatron.core import dist_checkpointing, parallel_state

    layouts = {
        "plain": {},
        "mixed": {"non_homogeneous_layers": True},
        "single": {"singleton_local_shards": True},
    }
    for kind in ("qwen3_tied", "qwen3_moe", "qwen2_moe"):
        hf = folder / f"{kind}.random"
        for impl in ("local", "minite"):
            model = _model(kind, impl, vocab_size=250)
            _load(model, ParametersOfHF(HFReader(hf)))
            for name, layout in layouts.items():
                group = parallel_state.get_data_parallel_group(with_context_parallel=True)
                metadata = {"dp_cp_group": group, "singleton_local_shards": False, **layout}
                out = folder / f"{kind}.{impl}.{name}"
                out.mkdir()
                dist_checkpointing.save(model.sharded_state_dict(metadata=metadata), str(out))
                convert.hf_from_megatron(out, hf, folder / f"{kind}.{impl}.{name}.back")
                found, expected = HFReader(folder / f"{kind}.{impl}.{name}.back"), HFReader(hf)
                assert found.names() == expected.names(), out
                for tensor in found.names():
                    assert torch.equal(found.read(tensor), expected.read(tensor)), (out, tensor)


def check_written_single_experts_load(folder):
    """Prevents: the third layout, a key an expert and gate and up apart, that only our reader can read."""
    from megatron.core import dist_checkpointing, parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group, "singleton_local_shards": True}
    for kind in ("qwen3_moe", "qwen2_moe"):
        hf, out = folder / f"{kind}.random", folder / f"{kind}.written_single"
        model = _model(kind, "minite", vocab_size=250)
        entries = model.sharded_state_dict(metadata=metadata)
        weights = ParametersOfHF(HFReader(hf))
        with TorchDistWriter(
            out,
            common={"content_metadata": {"singleton_local_shards": True}},
            num_layers=weights.arch.num_layers,
            num_experts=weights.arch.experts.num_experts,
        ) as writer:
            for parameter in weights.parameters:
                for key, tensor in _single(parameter.key, weights.read(parameter), parameter.split):
                    writer.write(key, tensor)
        assert TorchDistReader(out).layout == "singleton"
        state, missing, unexpected = dist_checkpointing.load(
            {"model": entries}, str(out / "release"), strict="return_all"
        )
        assert (missing, unexpected) == (set(), set()), kind
        model.load_state_dict(state["model"])
        expected = _model(kind, "minite", vocab_size=250)
        _load(expected, weights)
        found = model.state_dict()
        for name, value in expected.state_dict().items():
            assert value is None or torch.equal(found[name], value), (kind, name)
        convert.hf_from_megatron(out, hf, folder / f"{kind}.written_single.back")
        back = HFReader(folder / f"{kind}.written_single.back")
        for name in back.names():
            assert torch.equal(back.read(name), HFReader(hf).read(name)), (kind, name)


def _single(key: str, tensor: torch.Tensor, split: str | None) -> list[tuple[str, torch.Tensor]]:
    """The keys of one parameter in the layout of single shards."""
    if found := re.fullmatch(r"(.*\.experts)\.(linear_fc\d)\.weight(\d+)", key):
        key = f"{found[1]}.experts.{found[3]}.{found[2]}.weight"
    if split != "halves":
        return [(key, tensor)]
    return list(zip((f"{key}_w", f"{key}_v"), tensor.chunk(2), strict=True))


def check_te_model_loads_what_is_written(folder):
    # Prevents: the same under Transformer Engine's names, prediction layers and latent attention included.
    for kind in ("qwen3", "qwen2", "qwen2_moe", "glm4_moe", "deepseek_v3"):
        model = _model(kind, "transformer_engine", with_mtp=True, vocab_size=256)
        _check_loads(kind, model, folder / f"{kind}.random", folder / f"{kind}.te")


WORLDS = {
    "single": World(
        (
            check_logits_are_those_of_transformers,
            check_plain_qkv_order_is_caught,
            check_own_model_loads_what_is_written,
            check_what_megatron_saves_comes_back,
            check_written_single_experts_load,
        )
    ),
    "te": World((check_te_model_loads_what_is_written,), te=True),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    """Checkpoints and logits of transformers in a folder, and the worlds that read them."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = tmp_path_factory.mktemp("checkpoints")
    for kind in KINDS:
        torch.manual_seed(1)
        config = transformers.AutoConfig.for_model(**CONFIGS[kind])
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape)
                parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else 0.15 * noise)
            for name, buffer in model.named_buffers():
                if "correction_bias" in name:
                    buffer.copy_(0.1 * torch.randn(buffer.shape))
        model.save_pretrained(folder / kind)
        tokens = torch.randint(0, 250, (2, 32))
        with torch.no_grad():
            logits = model(tokens).logits
        torch.save({"tokens": tokens, "logits": logits}, folder / f"{kind}.logits.pt")
    for kind, config in CONFIGS.items():
        arch = architecture(kind)
        weights = random_weights(hf_tensors(arch), torch.float32)
        weights |= {name: weights[source].clone() for name, source in copies(arch).items()}
        write_hf(folder / f"{kind}.random", config, weights)
    return Outcomes(Path(__file__), WORLDS, folder, MINITE_RECIPE="bf16")


TRAINED = CONFIGS["qwen3"] | {  # what megatron_runs.MODEL trains
    "vocab_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}


def test_training_starts_from_converted_checkpoints(tmp_path):
    """Prevents: files that only a test's loader takes: Megatron's --load, its tracker, --use-checkpoint-args.

    One rank loads torch_dist and two ranks load files cut for them; both start at the same loss, which is
    not that of fresh weights.
    """
    weights = random_weights(hf_tensors(Architecture.from_hf_config(TRAINED)))
    write_hf(tmp_path / "hf", TRAINED, {name: 3 * value for name, value in weights.items()})
    convert.megatron_from_hf(tmp_path / "hf", tmp_path / "torch_dist")
    convert.megatron_from_hf(
        tmp_path / "hf", tmp_path / "torch", format="torch", sizes=convert.ParallelSizes(tp=2)
    )

    def first_loss(name: str, *arguments, num_ranks: int = 1) -> float:
        arguments = (*MINITE, "--tensor-model-parallel-size", num_ranks, *arguments)
        run = train(
            tmp_path / f"{name}.run", *arguments, steps=1, num_ranks=num_ranks, MINITE_RECIPE="bf16"
        )
        return run.losses[0]

    fresh = first_loss("fresh")
    given = ("--use-checkpoint-args", "--load")
    distributed = first_loss("torch_dist", *given, tmp_path / "torch_dist")
    ranks = first_loss("torch", "--ckpt-format", "torch", *given, tmp_path / "torch", num_ranks=2)
    assert abs(distributed - ranks) < 2e-3
    assert abs(distributed - fresh) > 0.05


@every_check(WORLDS)
def test_in_child(outcomes, world, check):
    outcomes.require(world, check)


if __name__ == "__main__":
    run_world(WORLDS)
    sys.exit(0)
