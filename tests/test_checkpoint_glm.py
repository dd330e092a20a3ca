"""GLM's models with latent attention: GLM-4.7-Flash, and GLM-5, whose attention chooses its keys."""

import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from checkpoint_small import CONFIGS, random_weights, write_hf  # noqa: E402
from export_small import checkpoint  # noqa: E402
from megatron_runs import Outcomes, World, every_check, require_megatron, run_world  # noqa: E402

from megatron_nvfp4.checkpoint import names, plan  # noqa: E402
from megatron_nvfp4.checkpoint.arguments import megatron_arguments  # noqa: E402
from megatron_nvfp4.checkpoint.convert import (  # noqa: E402
    ParallelSizes,
    hf_from_megatron,
    megatron_from_hf,
)
from megatron_nvfp4.checkpoint.export_plan import plan_export  # noqa: E402
from megatron_nvfp4.checkpoint.formats import MODELOPT  # noqa: E402
from megatron_nvfp4.checkpoint.plan import Architecture  # noqa: E402

_PUBLISHED = {**CONFIGS["deepseek_v3"], "n_group": 2}
del _PUBLISHED["head_dim"]  # as in the published files
GLM = {
    "glm4_moe_lite": _PUBLISHED | {"model_type": "glm4_moe_lite"},
    "glm_moe_dsa": _PUBLISHED
    | {
        "model_type": "glm_moe_dsa",
        "index_topk": 8,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk_freq": 3,  # F S S F: the prediction layer's place would be S
        "index_skip_topk_offset": 1,
    },
}
SIZES = {"torch_dist": None, "torch": ParallelSizes(tp=2, ep=2)}
INDEXER = "core_attention.indexer."


def _architecture(kind: str, **changes) -> Architecture:
    return Architecture.from_hf_config(GLM[kind] | changes)


def _save(folder: Path, kind: str, dtype: torch.dtype, **changes):
    """A random model, saved by transformers, with no two norms or biases alike."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(**(GLM[kind] | changes))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            noise = torch.randn(tensor.shape)
            if "correction_bias" in name or name.endswith("k_norm.bias"):
                tensor.copy_(0.1 * noise)
            elif "inv_freq" not in name:
                tensor.copy_(1 + 0.1 * noise if tensor.dim() == 1 else 0.15 * noise)
    model.to(dtype).save_pretrained(folder)
    return model


def _sums(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def _check_round_trips(folder: Path, tmp_path: Path) -> None:
    expected = _sums(folder)
    for format, sizes in SIZES.items():
        megatron_from_hf(folder, tmp_path / format, format=format, sizes=sizes)
        hf_from_megatron(tmp_path / format, folder, tmp_path / f"{format}.back")
        assert _sums(tmp_path / f"{format}.back") == expected, format


@pytest.mark.parametrize("kind", GLM)
def test_files_of_transformers_come_back_byte_for_byte(kind, tmp_path):
    """Prevents: dense layers in a list of transformers' own, or layers without an indexer, taken for others.

    The names are compared with the plan's, so that both ways cannot agree on a wrong one.
    """
    from safetensors import safe_open

    kinds = ["dense", "sparse", "dense", "sparse"]
    _save(tmp_path / "hf", kind, torch.bfloat16, mlp_layer_types=kinds)
    saved = json.loads((tmp_path / "hf" / "config.json").read_text())
    arch = Architecture.from_hf_config(saved)
    assert arch.moe_layers == (False, True, False, True)
    first = _architecture(kind)
    assert arch == dataclasses.replace(first, moe_layers=arch.moe_layers)
    assert first.moe_layers == (False, True, True, True)
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert plan.hf_tensors(dataclasses.replace(arch, num_mtp_layers=0)) == shapes
    _check_round_trips(tmp_path / "hf", tmp_path)


@pytest.mark.parametrize("kind", GLM)
def test_published_files_come_back_byte_for_byte(kind, tmp_path):
    """Prevents: prediction layers, which only published files have, lost or without their indexer."""
    arch = _architecture(kind)
    weights = random_weights(plan.hf_tensors(arch))
    weights |= {copy: weights[name].clone() for copy, name in plan.copies(arch).items()}
    assert ("model.layers.4.self_attn.indexer.k_norm.bias" in weights) == (kind == "glm_moe_dsa")
    write_hf(tmp_path / "hf", GLM[kind], weights)
    _check_round_trips(tmp_path / "hf", tmp_path)


@pytest.mark.parametrize(
    ("sharing", "rule"),
    [
        ({"index_topk_freq": 1}, (1, 1)),
        ({}, (3, 1)),
        ({"index_topk_freq": 2}, (2, 1)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 2}, (4, 2)),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 3}, (4, 3)),  # the next is past the end
        ({"index_topk_pattern": "FFSF"}, (2, 2)),
        ({"indexer_types": ["full", "shared", "shared", "full"]}, (3, 1)),
        ({"indexer_types": ["full"] * 4, "index_topk_pattern": "FSSS"}, (1, 1)),
    ],
)
def test_layers_with_an_indexer_are_those_of_transformers(sharing, rule):
    """Prevents: a rule off by one layer, whose tensors are then missing or too many."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = GLM["glm_moe_dsa"] | sharing
    indexer = Architecture.from_hf_config(config).indexer
    assert (indexer.frequency, indexer.offset) == rule
    kinds = transformers.AutoConfig.for_model(**config).indexer_types
    assert [indexer.is_in(layer) for layer in range(4)] == [kind == "full" for kind in kinds]


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries"),
        ("glm4_moe_lite", {"mlp_layer_types": ["moe"] * 4}, r"4 entries of \['moe'\]"),
        ("glm4_moe_lite", {"rope_interleave": False}, "rope_interleave=false pairs"),
        ("glm4_moe_lite", {"attention_bias": True}, "attention_bias=true adds biases"),
        ("glm_moe_dsa", {"attention_bias": True}, "attention_bias=true adds biases"),
        ("glm_moe_dsa", {"q_lora_rank": None}, "q_lora_rank=null"),
        ("glm_moe_dsa", {"indexer_types": ["full"] * 3}, "indexer_types has 3 entries"),
        ("glm_moe_dsa", {"index_topk_pattern": "FXSS"}, "4 entries of .*'X'"),
        ("glm_moe_dsa", {"index_topk_pattern": "SFSF"}, r"without \(S\) are SFSF"),
        ("glm_moe_dsa", {"index_topk_pattern": "FSFF"}, r"without \(S\) are FSFF"),
    ],
)
def test_what_megatron_cannot_have_is_refused_by_name(kind, changes, message):
    """Prevents: weights converted for a model that Megatron would compute otherwise, or cannot build."""
    with pytest.raises(ValueError, match=message):
        _architecture(kind, **changes)


@pytest.mark.parametrize("kind", GLM)
def test_what_a_config_leaves_out_is_as_in_transformers(kind):
    """Prevents: other dense layers, or a head size from hidden_size, where a file is silent."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = {key: value for key, value in GLM[kind].items() if key != "first_k_dense_replace"}
    config["hidden_size"] = 128
    arch, theirs = Architecture.from_hf_config(config), transformers.AutoConfig.for_model(**config)
    dense = [not is_moe for is_moe in arch.moe_layers]
    assert dense == [kind == "dense" for kind in theirs.mlp_layer_types]
    assert arch.head_dim == theirs.head_dim == 8


def test_a_missing_size_is_named():
    """Prevents: a KeyError, or an indexer of a default size."""
    for name in ("index_topk", "index_head_dim", "q_lora_rank"):
        config = {key: value for key, value in GLM["glm_moe_dsa"].items() if key != name}
        with pytest.raises(ValueError, match=f"{name} is missing; model_type='glm_moe_dsa'"):
            Architecture.from_hf_config(config)


def test_norms_beside_an_indexer_are_modules_of_their_own():
    """Prevents: the norms of latent queries and keys under the fused name, where Megatron misses them."""
    arch = _architecture("glm_moe_dsa")
    keys = {parameter.key: parameter for parameter in plan.parameters(arch)}
    for rank in ("q", "kv"):
        norm = f"decoder.layers.2.self_attention.{rank}_layernorm.weight"
        fused = f"decoder.layers.2.self_attention.linear_{rank}_up_proj.layer_norm_weight"
        assert norm in keys
        assert fused not in keys
        assert {names.from_local_name(name, arch) for name in (norm, fused)} == {norm}
    indexers = [parameter for key, parameter in keys.items() if INDEXER in key]
    assert len(indexers) == 5 * 3  # two layers' and the prediction layer's
    assert {parameter.split for parameter in indexers} == {None}
    assert not arch.is_uniform
    assert not _architecture("glm_moe_dsa", first_k_dense_replace=0).is_uniform
    every = _architecture("glm_moe_dsa", first_k_dense_replace=0, index_topk_freq=1)
    assert every.is_uniform


@pytest.mark.parametrize("kind", GLM)
def test_router_head_and_indexer_are_never_quantised(kind, tmp_path):
    """Prevents: a sampler that chooses keys by NVFP4 projections, which no one trained."""
    sizes = {"kv_lora_rank": 32, "q_lora_rank": 48, "v_head_dim": 16, "num_nextn_predict_layers": 0}
    chosen = plan_export(checkpoint(tmp_path / "in", GLM[kind] | sizes), MODELOPT)
    assert "model.layers.3.self_attn.kv_b_proj" in chosen.quantized
    kept = ("lm_head", ".mlp.gate", ".wq_b", ".wk", ".weights_proj")
    assert [module for module in chosen.quantized if module.endswith(kept)] == []
    is_sparse = "model.layers.3.self_attn.indexer.wk" in chosen.ignore
    assert is_sparse == (kind == "glm_moe_dsa")


# --- in Megatron itself -------------------------------------------------------------------------------


def _dsa_model(arch: Architecture, vocab_size: int):
    """Megatron's own model with sparse attention, FP32, on Transformer Engine's layers."""
    import test_checkpoint_megatron as machinery
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    arguments = megatron_arguments(arch, GLM["glm_moe_dsa"], vocab_size_padded=vocab_size)
    config = machinery._config(arguments, "transformer_engine")
    spec = specs.get_transformer_block_with_experimental_attention_variant_spec(config)
    mtp = get_gpt_mtp_block_spec(config, spec, True) if arch.num_mtp_layers else None
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=mtp,
        vocab_size=vocab_size,
        max_sequence_length=128,
        position_embedding_type="rope",
        rotary_base=arguments.rotary_base,
        share_embeddings_and_output_weights=False,
    ).eval()


def check_latent_logits_are_those_of_transformers(folder):
    # Prevents: rows, experts, norms or groups of experts in a wrong place that shapes do not give away.
    import test_checkpoint_megatron as machinery

    from megatron_nvfp4.checkpoint.as_megatron import ParametersOfHF
    from megatron_nvfp4.checkpoint.hf import HFReader

    model = machinery._model("glm4_moe_lite", "local")
    machinery._load(model, ParametersOfHF(HFReader(folder / "glm4_moe_lite")))
    assert machinery._difference(model, folder, "glm4_moe_lite") < machinery.TOLERANCE


def check_sparse_logits_are_those_of_transformers(folder):
    # Prevents: an indexer that chooses other keys: heads, halves of rope or its norm in a wrong place.
    import test_checkpoint_megatron as machinery

    from megatron_nvfp4.checkpoint.as_megatron import ParametersOfHF
    from megatron_nvfp4.checkpoint.hf import HFReader

    arch = dataclasses.replace(_architecture("glm_moe_dsa"), num_mtp_layers=0)
    model = _dsa_model(arch, 250)
    machinery._load(model, ParametersOfHF(HFReader(folder / "glm_moe_dsa")))
    assert machinery._difference(model, folder, "glm_moe_dsa") < machinery.TOLERANCE
    # Prevents: a comparison that the choice of keys cannot change.
    indexer = model.decoder.layers[0].self_attention.core_attention.indexer
    indexer.linear_wq_b.weight.data.copy_(indexer.linear_wq_b.weight.flip(0))
    assert machinery._difference(model, folder, "glm_moe_dsa") > 100 * machinery.TOLERANCE


def check_te_models_load_what_is_written(folder):
    # Prevents: keys or shapes that Megatron misses or does not expect, prediction layers included.
    import test_checkpoint_megatron as machinery

    for kind in GLM:
        if kind == "glm_moe_dsa":
            model = _dsa_model(_architecture(kind), 256)
        else:
            model = machinery._model(kind, "transformer_engine", with_mtp=True, vocab_size=256)
        machinery._check_loads(kind, model, folder / f"{kind}.random", folder / f"{kind}.te")


WORLDS = {
    "te": World(
        (
            check_latent_logits_are_those_of_transformers,
            check_sparse_logits_are_those_of_transformers,
            check_te_models_load_what_is_written,
        ),
        te=True,
    )
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    """Checkpoints and logits of transformers in a folder, and the worlds that read them."""
    require_megatron()
    folder = tmp_path_factory.mktemp("glm")
    for kind, config in GLM.items():
        model = _save(folder / kind, kind, torch.float32)
        tokens = torch.randint(0, 250, (2, 32))
        with torch.no_grad():
            logits = model(tokens).logits
        torch.save({"tokens": tokens, "logits": logits}, folder / f"{kind}.logits.pt")
        arch = _architecture(kind)
        weights = random_weights(plan.hf_tensors(arch), torch.float32)
        weights |= {copy: weights[name].clone() for copy, name in plan.copies(arch).items()}
        write_hf(folder / f"{kind}.random", config, weights)
    return Outcomes(Path(__file__), WORLDS, folder, MINITE_RECIPE="bf16")


@every_check(WORLDS)
def test_in_child(outcomes, world, check):
    outcomes.require(world, check)


if __name__ == "__main__":
    CONFIGS |= GLM  # for the machinery of test_checkpoint_megatron, in this process alone
    run_world(WORLDS)
    sys.exit(0)
