"""What an exported file declares: the layers of the training policy, as SGLang, vLLM and miles read them,
activations, KV cache and producer."""

import itertools
import json
import re
from fnmatch import fnmatch

import pytest
import torch
from checkpoint_small import CONFIGS
from export_small import MLA, checkpoint, exported, policy_file

from megatron_nvfp4.checkpoint import ignore
from megatron_nvfp4.checkpoint.export import export
from megatron_nvfp4.checkpoint.export_plan import plan_export, read_input_amax
from megatron_nvfp4.checkpoint.formats import FORMATS, MODELOPT
from megatron_nvfp4.checkpoint.hf import HFReader
from megatron_nvfp4.checkpoint.verify import verify


def _matches_sglang(prefix: str, names: list[str]) -> bool:
    """SGLang 0.5.23 (github.com/sgl-project/sglang), quantization/utils.py and modelopt_quant.py."""

    def on_path(ignored, name):
        return ignored == name or name.startswith(f"{ignored}.") or f".{ignored}." in f".{name}."

    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    excluded = False
    for pattern in names:
        regex = re.compile(pattern.replace(".", r"\.").replace("*", r".*"))
        excluded |= any(regex.fullmatch(x) is not None for x in (prefix, *prefix.split(".")))
        tail = pattern.rsplit(".", 1)[-1]
        if tail in {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}:
            excluded |= tail in prefix.rsplit(".", 1)[-1]
    if prefix.endswith(".experts"):
        return excluded
    last = prefix.split(".")[-1]
    shards = [prefix.replace(last, shard) for shard in fused.get(last, [last])]
    answers = [any(on_path(ignored, shard) for ignored in names) for shard in shards]
    assert len(set(answers)) == 1, "SGLang refuses a fused linear of two kinds"
    inside = "experts" in prefix and any(prefix in n for n in names if "experts" in n)
    return answers[0] or inside or excluded


def _matches_vllm(prefix: str, names: list[str]) -> bool:
    """vLLM (github.com/vllm-project/vllm): modelopt.py at 00155cde, utils/quant_utils.py at 01693a61."""
    fused = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
        "fused_qkv_a_proj_with_mqa": ["q_a_proj", "kv_a_proj_with_mqa"],
    }
    last = prefix.split(".")[-1]
    if last in fused:
        answers = {prefix.replace(last, shard) in names for shard in fused[last]}
        assert len(answers) == 1, "vLLM refuses a fused linear of two kinds"
        skipped = answers.pop()
    elif "experts" in prefix:
        skipped = any(prefix in name for name in names if "experts" in name)
    else:
        skipped = prefix in names
    return skipped or any(n in prefix or fnmatch(prefix, n) for n in names)


def _matches_miles(weight: str, names: list[str]) -> bool:
    """miles (github.com/radixark/miles) 08dfba1f, megatron_to_hf/processors/quantizer_nvfp4.py."""
    return any(weight == name or weight.startswith(f"{name}.") for name in names)


def _matches_compressed_tensors(name: str, names: list[str]) -> bool:
    """vLLM 008014e8, compressed_tensors/utils.py, for plain names."""
    return name in names


POLICIES = {
    "all": "recipe: nvfp4_per_token\n",
    "last": "recipe: nvfp4_per_token\nlast_layers_bf16: 0.15\n",
    "shared": "recipe: nvfp4_per_token\nshared_experts: bf16\nlast_layers_bf16: 0.5\n",
    "experts": (
        "recipe: bf16\nlayers:\n  - match: '**.mlp.experts.*'\n    recipe: nvfp4_per_token_4over6\n"
    ),
    "attention": (
        "recipe: nvfp4_per_token\nlayers:\n  - match: '**.self_attention.**'\n    recipe: bf16\n"
        "  - layer_numbers: [2]\n    recipe: bf16\n"
    ),
}
TWELVE = {
    "qwen3": {**CONFIGS["qwen3"], "num_hidden_layers": 12},
    "qwen3_moe": {**CONFIGS["qwen3_moe"], "num_hidden_layers": 12},
    "qwen2_moe": CONFIGS["qwen2_moe"],
    "glm4_moe": CONFIGS["glm4_moe"],
}


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(
    ("name", "policy"),
    # A dense model has no experts to choose.
    [case for case in itertools.product(TWELVE, POLICIES) if case != ("qwen3", "experts")],
)
def test_every_reader_sees_the_same_layers(tmp_path, name, policy, form):
    # Prevents: layers BF16 in the learner and NVFP4 in the sampler (layers.1 against layers.10, mlp.gate
    # against mlp.gate_up_proj, experts of a BF16 layer), by the readers' rules restated above.
    source = checkpoint(tmp_path / "in", TWELVE[name])
    chosen = plan_export(
        source, form, policy=policy_file(tmp_path / "policy.yaml", POLICIES[policy])
    )
    quantized, kept, names = set(chosen.quantized), set(chosen.kept), chosen.ignore
    assert quantized
    assert kept
    assert not quantized & kept
    assert not any(re.search(r"[*?\[]|^re:", name) for name in names), "full names only"
    fused = ignore.group_of(quantized | kept)
    for module in quantized | kept:
        wanted = module in kept
        if form is MODELOPT:
            assert _matches_sglang(fused[module], names) == wanted, module
            assert _matches_vllm(fused[module], names) == wanted, module
            assert _matches_miles(f"{module}.weight", names) == wanted, module
        else:
            assert _matches_compressed_tensors(module, names) == wanted, module
    assert ignore.differences(form.name, quantized, kept, names) == []


def test_the_policy_of_training_chooses_the_layers(tmp_path):
    # Prevents: a policy that names Megatron's layers and is applied to other ones, or not at all.
    source = checkpoint(tmp_path / "in", TWELVE["qwen3_moe"])
    chosen = plan_export(
        source, MODELOPT, policy=policy_file(tmp_path / "p.yaml", POLICIES["last"])
    )
    layers = {int(name.split(".")[2]) for name in chosen.quantized}
    assert layers == set(range(10))  # the last 15 % of 12, rounded up, are 2
    chosen = plan_export(
        source, MODELOPT, policy=policy_file(tmp_path / "p.yaml", POLICIES["experts"])
    )
    assert all(".mlp.experts." in name for name in chosen.quantized)
    assert len(chosen.quantized) == 12 * 4 * 3
    assert chosen.recipe == "bf16"
    assert "4/6 mse fast" in chosen.weights
    # A name of a rounding says how, the policy still says which.
    policy = policy_file(tmp_path / "p.yaml", POLICIES["attention"])
    chosen = plan_export(source, MODELOPT, "modelopt", policy)
    assert not any("self_attn" in name or ".layers.1." in name for name in chosen.quantized)
    assert len(chosen.quantized) == 11 * 4 * 3


@pytest.mark.parametrize("name", CONFIGS)
def test_router_embedding_and_head_are_never_quantised(tmp_path, name):
    # Prevents: a quantised router, shared gate, embedding or head, of any architecture, tied or not.
    config = MLA if name.startswith("deepseek") else CONFIGS[name]
    chosen = plan_export(checkpoint(tmp_path / "in", config), MODELOPT)
    ends = ("embed_tokens", "lm_head", ".mlp.gate", "shared_expert_gate", "eh_proj", "head")
    assert not [module for module in chosen.quantized if module.endswith(ends)]
    assert "lm_head" in chosen.ignore
    norms = [name for name in chosen.quantized if "norm" in name]
    assert not norms


def test_tied_head_is_not_invented(tmp_path):
    # Prevents: a lm_head.weight that the original does not have.
    source = checkpoint(tmp_path / "in", "qwen3_tied")
    _, found = exported(source, tmp_path / "out")
    assert "lm_head.weight" not in found.names()
    embedding = "model.embed_tokens.weight"
    assert torch.equal(found.read(embedding), source.read(embedding))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "recipe: nvfp4_per_token\nlayers:\n  - match: '**.mlp.experts.linear_fc2'\n    recipe: bf16\n",
            r"model\.layers\.1\.mlp\.experts: both in the file",
        ),
        (
            "recipe: nvfp4_per_token\nlayers:\n  - match: '**.linear_q_down_proj'\n    recipe: bf16\n",
            r"fused_qkv_a_proj_with_mqa: both in the file",
        ),
        (
            "recipe: nvfp4_per_token\nlast_layers_bf16: 0.25\n",
            r"model\.layers\.\d\.self_attn\.\w+: nvfp4 in the file, SGLang reads unquantised",
        ),
    ],
)
def test_a_policy_no_sampler_can_be_told_is_refused(tmp_path, text, named):
    # Prevents: half a fused module in BF16; and in latent attention, SGLang's habit of comparing q_b_proj
    # and the like by their last part, which takes them out of every layer once one layer lists them.
    source = checkpoint(tmp_path / "in", MLA)
    with pytest.raises(ValueError, match=named):
        plan_export(source, MODELOPT, policy=policy_file(tmp_path / "p.yaml", text))


# --- what the file says ---------------------------------------------------------------------------


def test_configuration_records_recipe_and_producer(tmp_path):
    # Prevents: a file nobody can tell apart from one of another rounding.
    _, found = exported(checkpoint(tmp_path / "in", "qwen3"), tmp_path / "out", recipe="te")
    config = found.config["quantization_config"]
    assert config["producer"]["name"] == "megatron_nvfp4"
    assert config["producer"]["recipe"] == "te"
    assert config["quant_method"] == "modelopt"
    assert config["group_size"] == 16
    second = json.loads((tmp_path / "out/hf_quant_config.json").read_text())
    assert second["producer"] == config["producer"]
    assert second["quantization"] == {
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": config["ignore"],
    }
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["recipe"] == "te"


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_kv_cache_is_declared_only_on_request(tmp_path, form):
    # Prevents: samplers that quantise the KV cache because an export said so unasked.
    source = checkpoint(tmp_path / "in", "qwen3")
    for asked in (False, True):
        record, found = exported(source, tmp_path / f"{asked}", form, "te", fp8_kv_cache=asked)
        text = (tmp_path / f"{asked}/config.json").read_text()
        assert ("kv_cache" in text) == asked
        assert ("kv_cache_scheme" in found.config["quantization_config"]) == asked
        assert record["kv_cache"] == ("fp8" if asked else "not declared")
        if form is MODELOPT:
            second = json.loads((tmp_path / f"{asked}/hf_quant_config.json").read_text())
            said = second["quantization"]["kv_cache_quant_algo"]
            assert said == ("FP8" if asked else None)
        assert verify(tmp_path / f"{asked}").errors == []


@pytest.mark.parametrize(
    ("form", "recipe", "static", "algo", "inputs"),
    [
        ("modelopt", "nvfp4_per_token", False, "NVFP4", {"dynamic": True}),
        ("modelopt", "nvfp4_online", False, "NVFP4", {"dynamic": True}),
        ("modelopt", "nvfp4_w4a16", False, "W4A16_NVFP4", None),
        ("modelopt", "te", False, "W4A16_NVFP4", None),
        ("modelopt", "te", True, "NVFP4", {"dynamic": False}),
        ("compressed-tensors", "nvfp4_per_token", False, None, None),
        ("compressed-tensors", "te", False, None, None),
        ("compressed-tensors", "te", True, None, {"dynamic": "local"}),
    ],
)
def test_input_scales_are_there_as_declared(tmp_path, form, recipe, static, algo, inputs):
    # Prevents: scales that were never measured: a loader reads a missing one as noise, a made-up one as true.
    form = FORMATS[form]
    source = checkpoint(tmp_path / "in", "qwen3_moe")
    chosen = plan_export(source, form, recipe, static_activations=static)
    options = {"input_amax": dict.fromkeys(chosen.quantized, 3.5)} if static else {}
    export(source, tmp_path / "out", chosen, **options)
    found = HFReader(tmp_path / "out")
    config = found.config["quantization_config"]
    assert config.get("quant_algo") == algo
    said = config["config_groups"]["group_0"].get("input_activations")
    assert (said is None) == (inputs is None)
    assert inputs is None or said["dynamic"] == inputs["dynamic"]
    holding = [n for n in found.names() if n.endswith(f".{form.input_scale}")]
    assert len(holding) == (len(chosen.quantized) if static else 0)
    for name in holding:
        wanted = torch.tensor(2688.0) / 3.5 if form.stores_divisor else torch.tensor(3.5) / 2688
        assert found.read(name).reshape(()) == wanted
    assert verify(tmp_path / "out").errors == []


def test_input_amax_is_shared_and_complete(tmp_path):
    # Prevents: q and k with different input scales; an expert that saw no token left at 0.
    source = checkpoint(tmp_path / "in", "qwen3_moe")
    modules = plan_export(source, MODELOPT, "te").quantized
    given = dict.fromkeys(modules, 1.0)
    given["model.layers.0.self_attn.k_proj"] = 4.0
    given["model.layers.2.mlp.experts.0.down_proj"] = 7.0
    for name in ("gate", "up", "down"):
        del given[f"model.layers.2.mlp.experts.3.{name}_proj"]
    path = tmp_path / "amax.json"
    path.write_text(json.dumps(given))
    found, num_unseen = read_input_amax(path, modules)
    assert {found[f"model.layers.0.self_attn.{n}_proj"] for n in "qkv"} == {4.0}
    assert found["model.layers.2.mlp.experts.3.down_proj"] == 7.0
    assert num_unseen == 2  # its two inputs
    del given["model.layers.1.self_attn.o_proj"]
    path.write_text(json.dumps(given))
    with pytest.raises(ValueError, match=r"no amax of model\.layers\.1\.self_attn\.o_proj"):
        read_input_amax(path, modules)
    given["model.layers.1.self_attn.o_proj"] = 0.0
    path.write_text(json.dumps(given))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.o_proj: 0\.0"):
        read_input_amax(path, modules)
    with pytest.raises(ValueError, match="nvfp4_per_token has no activation scale per tensor"):
        plan_export(source, MODELOPT, "nvfp4_per_token", static_activations=True)
