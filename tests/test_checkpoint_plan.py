"""Which rows go where between Hugging Face and Megatron, and under which names."""

import dataclasses
import json

import pytest
import torch
from checkpoint_small import CONFIGS, MOE, architecture, fused_names

from megatron_nvfp4.checkpoint import names, plan
from megatron_nvfp4.checkpoint.plan import Architecture

CASES = [*((name, False) for name in CONFIGS), *((name, True) for name in MOE)]


def _hf_names(name: str, fused: bool) -> list[str] | None:
    return fused_names(architecture(name)) if fused else None


def _tags(arch: Architecture, hf_names) -> dict[str, torch.Tensor]:
    """Every element of every Hugging Face tensor gets a number of its own, from 1 on."""
    tags, at = {}, 1
    copies = plan.copies(arch, hf_names=hf_names)
    for name, shape in plan.hf_tensors(arch, hf_names=hf_names).items():
        if name in copies:
            continue
        size = torch.Size(shape).numel()
        tags[name] = torch.arange(at, at + size).view(shape)
        at += size
    return tags


def _assemble(parameter: plan.Parameter, tags, rows: tuple[int, int]) -> torch.Tensor:
    parts = []
    for source in plan.sources(parameter, *rows):
        if isinstance(source, int):
            parts.append(torch.zeros(source, *parameter.shape[1:], dtype=torch.int64))
            continue
        tensor = tags[source.hf_name]
        tensor = tensor if source.index is None else tensor[source.index]
        parts.append(tensor[source.start : source.stop])
    return torch.cat(parts)


@pytest.mark.parametrize(("name", "fused"), CASES)
def test_every_row_lies_in_one_place(name, fused):
    # Prevents: a row lost, doubled or swapped on the way there and back.
    arch, hf_names = architecture(name), _hf_names(name, fused)
    tags = _tags(arch, hf_names)
    found = plan.parameters(arch, hf_names=hf_names, vocab_size_padded=256)
    whole = {p.key: _assemble(p, tags, (0, p.shape[0])) for p in found}
    assert [p.key for p in found if whole[p.key].shape != p.shape] == []
    everything = torch.cat([tensor.flatten() for tensor in whole.values()])
    padding = sum(p.padding * arch.hidden_size for p in found)
    assert (everything == 0).sum() == padding
    assert torch.equal(everything[everything > 0].sort().values, torch.arange(1, _last(tags) + 1))
    back = {name: torch.zeros_like(tensor) for name, tensor in tags.items()}
    for hf_name, found_pieces in plan.pieces(found).items():
        for piece in found_pieces:
            target = back[hf_name] if piece.index is None else back[hf_name][piece.index]
            rows = slice(piece.at, piece.at + piece.stop - piece.start)
            target[piece.start : piece.stop] = whole[piece.parameter.key][rows]
    assert back.keys() == tags.keys()
    assert all(torch.equal(back[name], tags[name]) for name in tags)


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_any_range_of_rows_is_that_part_of_the_whole(name):
    # Prevents: ranges that start or end inside of a piece, or in the padding, shifted by its start.
    arch = architecture(name)
    tags = _tags(arch, None)
    for parameter in plan.parameters(arch, vocab_size_padded=256):
        num_rows = parameter.shape[0]
        whole = _assemble(parameter, tags, (0, num_rows))
        for start, stop in ((0, 1), (5, 23), (num_rows - 7, num_rows), (num_rows // 2, num_rows)):
            start, stop = max(start, 0), min(stop, num_rows)
            if start < stop:
                part = _assemble(parameter, tags, (start, stop))
                assert torch.equal(part, whole[start:stop]), parameter.key


def _last(tags: dict[str, torch.Tensor]) -> int:
    return max(int(tensor.max()) for tensor in tags.values())


def test_qkv_is_interleaved_by_group():
    # Prevents: [Q; K; V] one after another, whose shapes fit and whose model is silently broken.
    arch = architecture("qwen3")
    tags = _tags(arch, None)
    by_key = {p.key: p for p in plan.parameters(arch)}
    qkv = by_key["decoder.layers.2.self_attention.linear_qkv.weight"]
    q, k, v = (tags[f"model.layers.2.self_attn.{n}_proj.weight"] for n in "qkv")
    groups = [part.view(4, -1, 64) for part in (q, k, v)]
    expected = torch.cat(groups, dim=1).reshape(-1, 64)
    assert torch.equal(_assemble(qkv, tags, (0, qkv.shape[0])), expected)
    assert not torch.equal(expected, torch.cat([q, k, v]))


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes_are_those_of_transformers(name, tmp_path):
    # Prevents: a tensor that the plan invents, forgets or shapes otherwise than the model's own code.
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from safetensors import safe_open

    config = transformers.AutoConfig.for_model(**CONFIGS[name])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert Architecture.from_hf_config(saved) == architecture(name)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    # transformers has no prediction layers and drops them.
    arch = dataclasses.replace(architecture(name), num_mtp_layers=0)
    assert plan.hf_tensors(arch) == shapes


def test_prediction_layers_repeat_the_embedding_and_the_head():
    # Prevents: published DeepSeek and GLM checkpoints refused for names that repeat another tensor.
    arch = architecture("deepseek_v3")
    expected = {
        "model.layers.4.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.4.shared_head.head.weight": "lm_head.weight",
    }
    assert plan.copies(arch) == expected
    tensors = plan.hf_tensors(arch)
    assert expected.keys() <= tensors.keys()
    without = [name for name in tensors if not name.startswith("model.layers.4.")]
    assert plan.copies(arch, hf_names=without) == {}
    assert not [p.key for p in plan.parameters(arch, hf_names=without) if p.key.startswith("mtp")]


def test_tied_embeddings_have_no_head():
    # Prevents: an lm_head.weight or output_layer.weight made up for a model that has none.
    arch = architecture("qwen3_tied")
    assert "lm_head.weight" not in plan.hf_tensors(arch)
    assert "output_layer.weight" not in [p.key for p in plan.parameters(arch)]
    redundant = [*plan.hf_tensors(arch), "lm_head.weight"]
    assert plan.copies(arch, hf_names=redundant) == {"lm_head.weight": "model.embed_tokens.weight"}


def test_stacked_layers_are_told_from_mixed_ones():
    # Prevents: layers with different tensors written under one stacked key.
    uniform = {name: architecture(name).is_uniform for name in CONFIGS}
    assert {name for name, value in uniform.items() if not value} == {
        "qwen2_moe",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "mamba"},
            "model_type='mamba' is not converted; take a model of llama, qwen2,",
        ),
        ({"model_type": None}, "model_type=None is not converted"),
        ({"num_experts": None}, "num_experts is missing; model_type='qwen3_moe' needs it"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"attention_bias": True}, "attention_bias=true adds biases"),
        ({"mlp_bias": True}, "mlp_bias=true adds biases"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method='fp8'; convert the unq"),
    ],
)
def test_configs_that_cannot_be_converted_are_refused_by_name(changes, message):
    # Prevents: a KeyError, or a model converted without the part that its config asks for.
    config = {
        key: value for key, value in (CONFIGS["qwen3_moe"] | changes).items() if value is not None
    }
    with pytest.raises(ValueError, match=message):
        Architecture.from_hf_config(config)


def test_a_vocabulary_that_does_not_fit_is_refused():
    # Prevents: the last tokens' rows dropped.
    with pytest.raises(ValueError, match=r"248 rows cannot hold vocab_size=250"):
        plan.parameters(architecture("qwen3"), vocab_size_padded=248)


# --- names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "stored", "expected"),
    [
        ("qwen3", "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("qwen3", "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("qwen3", "self_attention.q_layernorm.weight", "self_attention.q_layernorm.weight"),
        ("qwen3_moe", "pre_mlp_layernorm.weight", "pre_mlp_layernorm.weight"),
        ("qwen3_moe", "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        (
            "qwen3_moe",
            "mlp.experts.local_experts.3.linear_fc2.weight",
            "mlp.experts.linear_fc2.weight3",
        ),
        ("deepseek_v3", "input_layernorm.weight", "input_layernorm.weight"),
        (
            "deepseek_v3",
            "self_attention.linear_qkv_down_proj.layer_norm_weight",
            "input_layernorm.weight",
        ),
        (
            "deepseek_v3",
            "self_attention.q_layernorm.weight",
            "self_attention.linear_q_up_proj.layer_norm_weight",
        ),
        (
            "deepseek_v3",
            "self_attention.kv_layernorm.weight",
            "self_attention.linear_kv_up_proj.layer_norm_weight",
        ),
    ],
)
def test_local_names_become_transformer_engines(kind, stored, expected):
    # Prevents: norms taken for another layer kind's, whose shapes are the same.
    arch = architecture(kind)
    for prefix in ("", "module.", "model.", "module.module."):
        name = names.from_local_name(f"{prefix}decoder.layers.2.{stored}", arch)
        assert name == f"decoder.layers.2.{expected}"
    if arch.num_mtp_layers:
        name = names.from_local_name(f"mtp.layers.0.mtp_model_layer.{stored}", arch)
        assert name == f"mtp.layers.0.transformer_layer.{expected}"


@pytest.mark.parametrize(
    ("kind", "stacked"),
    [
        ("qwen3", False),
        ("qwen3", True),
        ("qwen3_moe", False),
        ("qwen3_moe", True),
        ("deepseek_v3", False),
    ],
)
def test_stored_keys_hold_the_parameters_that_lie_under_them(kind, stacked):
    # Prevents: two parameters in one place, or a place that reads as another parameter.
    arch = architecture(kind)
    shapes, places = {}, {}
    for parameter in plan.parameters(arch):
        place = names.distributed_address(parameter.key, stacked=stacked)
        axes = () if place.layer is None else (arch.num_layers,)
        axes += () if place.expert is None else (arch.experts.num_experts,)
        assert shapes.setdefault(place.key, axes + parameter.shape) == axes + parameter.shape
        places[parameter.key] = place
    found = {}
    for key, shape in shapes.items():
        found |= dict(names.stored_parameters(key, shape, arch))
    assert found == places


def test_states_beside_weights_are_told_from_weights():
    # Prevents: optimizer state reported as unknown parameters, or a parameter passed over.
    states = (
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc1._extra_state",
        "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_0.1_2.4",
        "rotary_pos_emb.inv_freq",
        "decoder.layers.1.mlp.router.local_tokens_per_expert",
        "rng_state",
    )
    assert [name for name in states if names.is_weight(name)] == []
    keys = [p.key for p in plan.parameters(architecture("deepseek_v3"))]
    assert [key for key in keys if not names.is_weight(key)] == []
