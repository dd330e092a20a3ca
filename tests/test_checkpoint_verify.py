"""verify-checkpoint: sound files pass, each malformed one is refused by the tensor at fault."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_small import CONFIGS, architecture, random_weights, write_hf
from safetensors.torch import load_file, save_file

from megatron_nvfp4.checkpoint import plan
from megatron_nvfp4.checkpoint.export import export
from megatron_nvfp4.checkpoint.export_plan import plan_export
from megatron_nvfp4.checkpoint.formats import FORMATS
from megatron_nvfp4.checkpoint.hf import INDEX, HFReader
from megatron_nvfp4.checkpoint.verify import verify
from megatron_nvfp4.checkpoint.verify_report import Report, lines_of

ROOT = Path(__file__).parents[1]
EXPERT = "model.layers.1.mlp.experts.2."


class Broken:
    """A sound export of a small model, to be damaged: its tensors and configurations, then `verify`."""

    def __init__(self, folder: Path, name: str, form: str, recipe: str, static: bool):
        self.original, self.folder = folder / "bf16", folder / "nvfp4"
        write_hf(self.original, CONFIGS[name], random_weights(plan.hf_tensors(architecture(name))))
        source = HFReader(self.original)
        chosen = plan_export(source, FORMATS[form], recipe, static_activations=static)
        amax = dict.fromkeys(chosen.quantized, 2.0) if static else None
        export(source, self.folder, chosen, input_amax=amax)
        self.tensors = load_file(self.folder / "model.safetensors")
        self.config = json.loads((self.folder / "config.json").read_text())
        self.quantization = self.config["quantization_config"]

    def verify(self, *, against: bool = False, second: bool = False) -> Report:
        """second: keep hf_quant_config.json, which otherwise goes, as it is not what is tested."""
        save_file(
            {name: tensor.contiguous() for name, tensor in self.tensors.items()},
            self.folder / "model.safetensors",
        )
        (self.folder / INDEX).unlink(missing_ok=True)
        if not second:
            (self.folder / "hf_quant_config.json").unlink(missing_ok=True)
        (self.folder / "config.json").write_text(json.dumps(self.config))
        return verify(self.folder, self.original if against else None)


@pytest.fixture
def broken(tmp_path):
    def make(name="qwen3_moe", form="modelopt", recipe="te", static=True) -> Broken:
        return Broken(tmp_path, name, form, recipe, static)

    return make


def _errors(report: Report) -> dict[str, str]:
    return {finding.name: finding.what for finding in report.errors}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_moe", "qwen2_moe", "glm4_moe"])
def test_a_sound_file_passes(broken, name, form, static):
    # Prevents: a check that cries at every file, which nobody then reads.
    case = broken(name, form, static=static)
    report = case.verify(against=True, second=True)
    assert report.findings == []
    assert report.learner_minus_sampler == []
    assert len(report.comparisons) == report.num_quantized > 0
    assert all(0.99 < found.cosine < 1 for found in report.comparisons)
    assert report.bits_per_weight == pytest.approx(4.5, abs=0.05)
    text = "\n".join(lines_of(report))
    assert "learner minus sampler" in text
    assert "none" in text
    assert text.endswith("no faults")


def test_unequal_scales_of_gate_and_up(broken):
    # Prevents: a sampler that takes the gate's outer scale for both; the report prints the ratio.
    case = broken()
    case.tensors[f"{EXPERT}gate_proj.weight_scale_2"] = torch.tensor(3.85e-5)
    case.tensors[f"{EXPERT}up_proj.weight_scale_2"] = torch.tensor(4.83e-5)
    case.tensors["model.layers.0.self_attn.k_proj.input_scale"] *= 2
    errors = _errors(case.verify())
    (gate,) = [name for name in errors if name.startswith(EXPERT)]
    assert gate.endswith("_proj.weight_scale_2")
    assert "0.7971" in errors[gate]
    assert "3.85" in errors[gate]
    assert "4.83" in errors[gate]
    assert any("self_attn" in name and name.endswith("input_scale") for name in errors)


def test_scales_that_were_never_written(broken):
    # Prevents: an expert without input_scale, which loads as 0 and makes NaN of some prompts.
    case = broken()
    name = "model.layers.3.mlp.experts.2.down_proj.input_scale"
    del case.tensors[name]
    errors = _errors(case.verify())
    assert list(errors) == [name]
    assert "missing" in errors[name]
    for kind in ("weight_scale", "weight_scale_2"):
        del case.tensors[f"{EXPERT}down_proj.{kind}"]
    assert {f"{EXPERT}down_proj.weight_scale", f"{EXPERT}down_proj.weight_scale_2"} < set(
        _errors(case.verify())
    )


def test_a_weight_only_file_is_sound_if_it_says_so(broken):
    # Prevents: W4A16 refused; and W4A4 declared over a file without a single activation scale.
    case = broken(static=False)
    assert case.verify().findings == []
    case.quantization["quant_algo"] = "NVFP4"
    group = case.quantization["config_groups"]["group_0"]
    group["input_activations"] = dict(group["weights"])
    errors = _errors(case.verify())
    assert len(errors) == 4 * (4 + 3 * 4)
    assert f"{EXPERT}down_proj.input_scale" in errors
    case.quantization.pop("config_groups")  # as older converters write it
    assert len(_errors(case.verify())) == 4 * (4 + 3 * 4)


def test_says_nvfp4_and_holds_fp8(broken):
    # Prevents: a file of twice the size, or one that decodes bytes of another format.
    case = broken("qwen3")
    name = "model.layers.2.mlp.up_proj.weight"
    case.tensors[name] = torch.randn(96, 64).to(torch.float8_e4m3fn)
    errors = _errors(case.verify())
    assert list(errors) == [name]
    assert "float8_e4m3fn (96, 64)" in errors[name]
    assert "uint8 (96, 32)" in errors[name]


@pytest.mark.parametrize(
    ("suffix", "tensor", "words"),
    [
        ("weight", torch.zeros(64, 8, dtype=torch.uint8), "uint8 (64, 8)"),
        ("weight", torch.zeros(64, 32, dtype=torch.int8), "int8 (64, 32)"),
        ("weight_scale", torch.ones(64, 4).to(torch.float8_e4m3fn), "float8_e4m3fn (64, 4)"),
        ("weight_scale", torch.ones(64, 2), "float32 (64, 2)"),
        ("weight_scale_2", torch.ones(64), "float32 (64,)"),
        ("weight_scale_2", torch.tensor(1.0).half(), "float16 ()"),
        ("weight_scale_2", torch.tensor(0.0), "is 0.0"),
        ("weight_scale_2", torch.tensor(float("inf")), "is inf"),
        ("input_scale", torch.tensor(float("nan")), "is nan"),
        ("input_scale", torch.tensor(-1.0), "is -1.0"),
    ],
)
def test_dtype_shape_and_scale_of_every_part(broken, suffix, tensor, words):
    # Prevents: a tensor of another layout read as if it were this one.
    case = broken()
    name = f"{EXPERT}down_proj.{suffix}"
    case.tensors[name] = tensor
    errors = _errors(case.verify())
    assert list(errors) == [name]
    assert words in errors[name]


@pytest.mark.parametrize(("byte", "word"), [(0x7F, "NaN"), (0xFF, "NaN"), (0xB8, "negative")])
def test_scale_bytes_no_block_can_have(broken, byte, word):
    # Prevents: one NaN byte (a zero block of some exporters) that turns a whole output row into NaN.
    case = broken()
    name = f"{EXPERT}down_proj.weight_scale"
    case.tensors[name].view(torch.uint8)[5, 1] = byte
    errors = _errors(case.verify())
    assert list(errors) == [name]
    assert word in errors[name]
    assert "row 5, block 1" in errors[name]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_unquantised_tensors_are_finite(broken, value):
    # Prevents: a NaN in a norm or router, which no scale check sees.
    case = broken()
    case.tensors["model.layers.0.mlp.gate.weight"][1, 2] = value
    assert list(_errors(case.verify())) == ["model.layers.0.mlp.gate.weight"]


@pytest.mark.parametrize("form", FORMATS)
def test_divisor_taken_for_multiplier(broken, form):
    # Prevents: compressed-tensors' 1/s in ModelOpt's s, or the reverse: cosine near 1, norm far away.
    case = broken("qwen3", form, static=False)
    suffix = FORMATS[form].outer_scale
    name = f"model.layers.1.self_attn.o_proj.{suffix}"
    case.tensors[name] = 1 / case.tensors[name]
    report = case.verify(against=True)
    errors = _errors(report)
    assert list(errors) == [name]
    assert "norm ratio" in errors[name]
    assert FORMATS[form].convention in errors[name]
    found = {comparison.module: comparison for comparison in report.comparisons}
    assert found["model.layers.1.self_attn.o_proj"].cosine > 0.99
    # Without the original it is a fault where the number is out of all proportion.
    if form == "modelopt":
        assert "is it the reciprocal?" in _errors(case.verify())[name]


def test_other_weights_than_the_original(broken):
    # Prevents: gate and up exchanged, a stale layer, or damaged codes: everything has the right shape.
    case = broken()
    stem = "model.layers.0.mlp.experts.1."
    for suffix in ("weight", "weight_scale"):
        a, b = (f"{stem}{name}_proj.{suffix}" for name in ("gate", "up"))
        case.tensors[a], case.tensors[b] = case.tensors[b], case.tensors[a]
    case.tensors["model.layers.2.input_layernorm.weight"] += 1
    assert case.verify().errors == []
    errors = _errors(case.verify(against=True))
    assert set(errors) == {
        f"{stem}gate_proj.weight",
        f"{stem}up_proj.weight",
        "model.layers.2.input_layernorm.weight",
    }


def test_ignored_gate_and_the_fused_linear_of_a_dense_layer(broken):
    # Prevents: `mlp.gate` taken for a part of `mlp.gate_up_proj` by readers that compare substrings.
    case = broken("qwen3", static=False)
    case.quantization["ignore"] += ["model.layers.0.mlp.gate"]
    report = case.verify()
    name = "model.layers.0.mlp.gate_up_proj"
    assert report.learner_minus_sampler == [name]
    assert "vLLM reads unquantised" in _errors(report)[name]
    # Of a mixture-of-experts layer it is the router, and nothing else.
    assert case.tensors.keys() >= {"model.layers.0.mlp.gate_proj.weight"}


def test_ignored_gate_of_a_moe_layer_excludes_the_router_alone(broken):
    # Prevents: the same list read as more, or as less, where the module exists.
    case = broken(static=False)
    assert "model.layers.0.mlp.gate" in case.quantization["ignore"]
    assert case.verify().errors == []
    case.quantization["ignore"].remove("model.layers.0.mlp.gate")
    assert "model.layers.0.mlp.gate" in _errors(case.verify())


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        ("model.layers.1", "model.layers.1."),  # vLLM's substring: layers 10 and 11 as well
        ("model.layers.0.self_attn*", "model.layers.0.self_attn."),
        ("lm_head", ""),
    ],
)
def test_foreign_lists_are_read_by_each_readers_rules(tmp_path, entry, names):
    # Prevents: layers.1 that swallows layers.10 unnoticed; globs of other exporters not understood.
    config = {**CONFIGS["qwen3"], "num_hidden_layers": 12}
    write_hf(
        tmp_path / "in",
        config,
        random_weights(plan.hf_tensors(plan.Architecture.from_hf_config(config))),
    )
    source = HFReader(tmp_path / "in")
    export(source, tmp_path / "out", plan_export(source, FORMATS["modelopt"], "te"))
    (tmp_path / "out/hf_quant_config.json").unlink()
    config = json.loads((tmp_path / "out/config.json").read_text())
    config["quantization_config"]["ignore"].append(entry)
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    found = verify(tmp_path / "out").learner_minus_sampler
    assert all(name.startswith("model.layers.") for name in found)
    if not names:
        assert found == []
        return
    wanted = {"model.layers.0."} if ".0." in names else {f"model.layers.{i}." for i in (1, 10, 11)}
    assert {".".join(name.split(".")[:3]) + "." for name in found} == wanted


def test_tied_head(broken):
    # Prevents: a head beside tied embeddings that is something else, or quantised.
    case = broken("qwen3_tied", static=False)
    embedding = "model.embed_tokens.weight"
    case.tensors["lm_head.weight"] = case.tensors[embedding].clone()
    assert case.verify().errors == []
    case.tensors["lm_head.weight"] += 1
    assert list(_errors(case.verify())) == ["lm_head.weight"]


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"])
def test_router_embedding_and_head_are_not_quantised(broken, module):
    # Prevents: a quantised router, embedding or head accepted because its tensors look right.
    case = broken(static=False)
    num_rows, num_columns = case.tensors[f"{module}.weight"].shape
    case.tensors[f"{module}.weight"] = torch.zeros(num_rows, num_columns // 2, dtype=torch.uint8)
    scales = torch.ones(num_rows, num_columns // 16).to(torch.float8_e4m3fn)
    case.tensors[f"{module}.weight_scale"] = scales
    case.tensors[f"{module}.weight_scale_2"] = torch.tensor(1e-4)
    case.quantization["ignore"].remove(module)
    assert "never are" in _errors(case.verify())[f"{module}.weight"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model.layers.0.input_layernorm.weight": None}, "model.layers.0.input_layernorm.weight"),
        (
            {"model.layers.0.self_attn.o_proj.weight": None},
            "model.layers.0.self_attn.o_proj.weight",
        ),
        (
            {"model.layers.7.self_attn.o_proj.weight": torch.ones(2)},
            "model.layers.7.self_attn.o_proj.weight",
        ),
        (
            {"decoder.layers._extra_state": torch.zeros(0, dtype=torch.uint8)},
            "decoder.layers._extra_state",
        ),
        ({"model.norm.weight": torch.ones(63).bfloat16()}, "model.norm.weight"),
        (
            {"model.embed_tokens.weight": torch.ones(256, 64).bfloat16()},
            "model.embed_tokens.weight",
        ),
    ],
)
def test_every_expected_tensor_and_no_other(broken, change, named):
    # Prevents: a missing or left-over tensor (padded vocabulary, extra state) that a loader passes over.
    case = broken()
    case.tensors |= change
    case.tensors = {name: tensor for name, tensor in case.tensors.items() if tensor is not None}
    assert list(_errors(case.verify())) == [named]


def test_bf16_beside_nvfp4(broken):
    # Prevents: a layer stored both ways, or BF16 where the list says NVFP4.
    case = broken("qwen3", "compressed-tensors", static=False)
    name = "model.layers.0.mlp.down_proj.weight"
    case.tensors[name] = torch.ones(64, 96).bfloat16()
    assert list(_errors(case.verify())) == [name]
    for suffix in ("weight_packed", "weight_scale", "weight_global_scale"):
        del case.tensors[f"model.layers.0.mlp.down_proj.{suffix}"]
    report = case.verify()
    assert "reads nvfp4" in _errors(report)["model.layers.0.mlp.down_proj"]


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("quant_algo", "FP8", "quant_algo='FP8'"),
        ("quant_method", "awq", "quant_method='awq'"),
        ("quant_algo", None, "quant_algo=None"),
    ],
)
def test_configurations_of_something_else(broken, key, value, named):
    # Prevents: a file judged by rules of a format it does not declare.
    case = broken()
    case.quantization[key] = value
    report = case.verify()
    assert len(report.errors) == 1
    assert named in report.errors[0].what


@pytest.mark.parametrize(
    ("key", "value"),
    [("config_groups", ["group_0"]), ("ignore", "lm_head"), ("producer", "me")],
)
def test_malformed_configurations_are_faults(broken, key, value):
    # Prevents: a traceback where a report was asked for.
    case = broken("qwen3")
    case.quantization[key] = value
    (fault,) = case.verify().errors
    assert "malformed" in fault.what


def test_a_model_configuration_that_lacks_an_entry_is_a_fault(broken):
    # Prevents: missing tensors unnoticed because the shapes could not be computed.
    case = broken("qwen3", static=False)
    del case.config["hidden_size"]
    assert "hidden_size is missing" in _errors(case.verify())["config.json"]
    case.config["model_type"] = "something"
    report = case.verify()
    assert report.errors == []
    assert [finding.name for finding in report.findings] == ["config.json"]


def test_the_two_configurations_agree(broken):
    # Prevents: SGLang and vLLM reading different lists, algorithms or KV caches from one folder.
    case = broken()
    path = case.folder / "hf_quant_config.json"
    second = json.loads(path.read_text())
    second["quantization"]["exclude_modules"].pop()
    second["quantization"]["kv_cache_quant_algo"] = "FP8"
    second["quantization"]["quant_algo"] = "W4A16_NVFP4"
    path.write_text(json.dumps(second))
    faults = [f.what for f in case.verify(second=True).errors if f.name == "hf_quant_config.json"]
    assert len(faults) == 3
    path.write_text("{")
    assert list(_errors(case.verify(second=True))) == ["hf_quant_config.json"]


def test_a_kv_cache_declared_without_scales_is_doubtful(broken):
    # Prevents: an FP8 cache that an exporter switched on unasked; scales nobody declared.
    case = broken("qwen3")
    case.quantization["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    report = case.verify()
    assert [finding.name for finding in report.findings] == ["kv_cache_scheme"]
    assert report.errors == []
    assert "declared" in report.kv_cache
    case.tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(float("nan"))
    assert list(_errors(case.verify())) == ["model.layers.0.self_attn.k_proj.k_scale"]


def test_truncated_and_missing_shards(broken):
    # Prevents: a half-copied folder taken for a checkpoint.
    case = broken()
    case.verify()
    data = (case.folder / "model.safetensors").read_bytes()
    (case.folder / "model.safetensors").write_bytes(data[:-100])
    report = verify(case.folder)
    assert "truncated" in report.errors[0].what
    (case.folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))
    assert "model-2.safetensors" in verify(case.folder).errors[0].what


def test_exit_status_report_and_json(broken):
    # Prevents: a script that cannot tell a faulty file from a mistyped command.
    case = broken()
    case.verify()

    def run(*words) -> subprocess.CompletedProcess:
        tool = [sys.executable, str(ROOT / "tools/verify_checkpoint.py")]
        return subprocess.run([*tool, *map(str, words)], capture_output=True, text=True)

    done = run(case.folder, "--against", case.original)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "model.layers.3" in done.stdout
    del case.tensors[f"{EXPERT}up_proj.weight_scale"]
    case.verify()
    done = run(case.folder, "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert not report["ok"]
    assert f"{EXPERT}up_proj.weight_scale" in [finding["name"] for finding in report["findings"]]
    for words in ([case.folder / "none"], [case.folder, "--against", case.folder / "none"]):
        done = run(*words)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert "no such folder" in done.stderr


def test_the_original_must_hold_the_weights(broken):
    # Prevents: a comparison that passes because there was nothing to compare with.
    case = broken("qwen3")
    weights = load_file(case.original / "model.safetensors")
    del weights["model.layers.0.self_attn.o_proj.weight"]
    save_file(weights, case.original / "model.safetensors")
    errors = _errors(case.verify(against=True))
    assert list(errors) == ["model.layers.0.self_attn.o_proj.weight"]
