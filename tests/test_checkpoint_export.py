"""NVFP4 export: the trainer's bits, ModelOpt and compressed-tensors as oracles, what a file declares."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_small import CONFIGS, architecture, fused_names, write_hf
from export_small import MLA, checkpoint, exported, policy_file, stored_weight

from megatron_nvfp4 import quant
from megatron_nvfp4.__main__ import main as cli
from megatron_nvfp4.checkpoint import formats, plan
from megatron_nvfp4.checkpoint.convert import megatron_from_hf
from megatron_nvfp4.checkpoint.export import add_arguments, main
from megatron_nvfp4.checkpoint.export_plan import plan_export
from megatron_nvfp4.checkpoint.formats import FORMATS, MODELOPT
from megatron_nvfp4.checkpoint.hf import HFReader
from megatron_nvfp4.checkpoint.verify import verify
from megatron_nvfp4.recipes import RECIPES, NVFP4Spec

ROOT = Path(__file__).parents[1]
NVFP4_RECIPES = [
    name
    for name, recipe in RECIPES.items()
    if isinstance(recipe.fprop.right, NVFP4Spec) and name != "nvfp4_w4a8"
]


def _same(a: formats.PackedWeight, b: formats.PackedWeight) -> bool:
    return (
        torch.equal(a.codes, b.codes)
        and torch.equal(a.block_scales.view(torch.uint8), b.block_scales.view(torch.uint8))
        and torch.equal(a.multiplier.float(), b.multiplier.float())
    )


# --- bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("recipe", NVFP4_RECIPES)
def test_bits_are_the_trainers(tmp_path, recipe, form):
    # Prevents: a file that serves other weights than the ones trained: own rounding, an amax of q alone,
    # tiles of 16 rows cut where Hugging Face's tensors end and not where Megatron's lie.
    source = checkpoint(tmp_path / "in", "qwen3_moe")
    _, found = exported(source, tmp_path / "out", form, recipe)
    spec = RECIPES[recipe].fprop.right
    read = source.read
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp.experts.2."
    q, k, v = (read(f"{attention}{name}_proj.weight") for name in "qkv")
    # By hand: 4 groups of 2 query heads, one key and one value head of 16 rows each.
    groups = [(q, 32), (k, 16), (v, 16)]
    qkv = torch.cat([t[g * n : (g + 1) * n] for g in range(4) for t, n in groups])
    gate, up = read(f"{mlp}gate_proj.weight"), read(f"{mlp}up_proj.weight")
    trained = quant.quantize(qkv, spec)
    for index, (name, num) in enumerate((("q", 32), ("k", 16), ("v", 16))):
        stored = stored_weight(found, form, f"{attention}{name}_proj")
        at = sum(n for _, n in groups[:index])
        rows = torch.cat([torch.arange(at, at + num) + 64 * g for g in range(4)])
        assert torch.equal(stored.codes, trained.codes[rows]), name
        assert torch.equal(stored.block_scales.float(), trained.block_scales[rows].float()), name
        assert stored.multiplier == trained.outer_scale[0], name
    trained = quant.quantize(torch.cat((gate, up)), spec)
    for name, rows in (("gate", slice(0, 32)), ("up", slice(32, 64))):
        stored = stored_weight(found, form, f"{mlp}{name}_proj")
        assert torch.equal(stored.codes, trained.codes[rows])
        assert torch.equal(stored.block_scales.float(), trained.block_scales[rows].float())
    trained = quant.quantize(read(f"{mlp}down_proj.weight"), spec)
    assert torch.equal(stored_weight(found, form, f"{mlp}down_proj").codes, trained.codes)


def test_tiles_lie_where_megatrons_rows_do(tmp_path):
    # Prevents: 16x16 tiles cut at the ends of q, k and v where a head is no multiple of 16 rows.
    config = {
        **CONFIGS["qwen3"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "num_hidden_layers": 1,
    }
    source = checkpoint(tmp_path / "in", config)
    _, found = exported(source, tmp_path / "out", recipe="nvfp4_pretrain")
    stem = "model.layers.0.self_attn."
    q, k, v = (source.read(f"{stem}{name}_proj.weight") for name in "qkv")
    qkv = torch.cat((q[:48], k[:24], v[:24], q[48:], k[24:], v[24:]))
    trained = quant.quantize(qkv, RECIPES["nvfp4_pretrain"].fprop.right)
    for name, at, num in (("q", 0, 48), ("k", 48, 24), ("v", 72, 24)):
        stored = stored_weight(found, MODELOPT, f"{stem}{name}_proj")
        rows = torch.cat([torch.arange(at, at + num) + 96 * group for group in (0, 1)])
        assert torch.equal(stored.codes, trained.codes[rows]), name
        assert torch.equal(stored.block_scales.float(), trained.block_scales[rows].float()), name


def test_named_roundings_are_what_they_say(tmp_path):
    # Prevents: `te` drifting from Transformer Engine's per-tensor 1x16; `nvfp4_online` from 448, MSE, fast.
    source = checkpoint(tmp_path / "in", "qwen3")
    for name, spec in (
        ("te", NVFP4Spec()),
        ("nvfp4_online", NVFP4Spec(four_over_six="mse", error="fast", e4m3_max=448)),
    ):
        record, found = exported(source, tmp_path / name, recipe=name)
        x = source.read("model.layers.0.self_attn.o_proj.weight")
        trained = quant.quantize(x, spec)
        stored = stored_weight(found, MODELOPT, "model.layers.0.self_attn.o_proj")
        assert torch.equal(stored.codes, trained.codes)
        assert record["recipe"] == name
        assert record["weights"] == str(spec)


def test_backends_write_the_same_file(tmp_path):
    # Prevents: a file that depends on whether kernels were built.
    source = checkpoint(tmp_path / "in", "qwen3")
    files = []
    for backend in ("auto", "reference"):
        exported(source, tmp_path / backend, recipe="nvfp4_pretrain", backend=backend)
        files.append((tmp_path / backend / "model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_both_conventions_read_to_the_same_values(tmp_path):
    # Prevents: divisor and multiplier mixed up (cases: outer scale upside down).
    source = checkpoint(tmp_path / "in", "qwen3")
    readers = [exported(source, tmp_path / form.name, form, "te")[1] for form in FORMATS.values()]
    module = "model.layers.2.mlp.up_proj"
    a, b = (stored_weight(r, f, module) for r, f in zip(readers, FORMATS.values(), strict=True))
    assert _same(a, b)
    multiplier = readers[0].read(f"{module}.weight_scale_2")
    divisor = readers[1].read(f"{module}.weight_global_scale")
    assert multiplier.shape == ()
    assert divisor.shape == (1,)
    assert multiplier < 1e-2
    assert divisor > 1e3
    assert torch.equal(torch.reciprocal(divisor)[0], multiplier)


def test_sizes_and_dtypes(tmp_path):
    # Prevents: a file that says NVFP4 and holds FP8, at 6 bits a weight.
    record, found = exported(checkpoint(tmp_path / "in", "qwen3"), tmp_path / "out")
    module, bits = "model.layers.0.mlp.down_proj", 0
    wanted = {
        "weight": (torch.uint8, (64, 48)),
        "weight_scale": (torch.float8_e4m3fn, (64, 6)),
        "weight_scale_2": (torch.float32, ()),
    }
    for suffix, meta in wanted.items():
        assert found.meta(f"{module}.{suffix}") == meta
        bits += 8 * found.num_bytes(f"{module}.{suffix}")
    assert bits == 64 * 96 * 4.5 + 32
    assert record["bits_per_weight"] == pytest.approx(4.5, abs=0.02)


@pytest.mark.parametrize("recipe", ["te", "nvfp4_online", "nvfp4_pretrain", "modelopt"])
def test_zero_blocks_have_no_nan_scale(tmp_path, recipe):
    # Prevents: an all-zero block or weight whose scale byte is NaN (ModelOpt's own does that).
    weight = torch.randn(64, 96) * 0.1
    weight[3, 16:32] = 0
    tensors = {
        "model.layers.0.mlp.down_proj.weight": weight.bfloat16(),
        "model.layers.1.mlp.down_proj.weight": torch.zeros(64, 96, dtype=torch.bfloat16),
    }
    source = checkpoint(tmp_path / "in", "qwen3", tensors=tensors)
    _, found = exported(source, tmp_path / "out", recipe=recipe)
    for layer in (0, 1):
        module = f"model.layers.{layer}.mlp.down_proj"
        stored = stored_weight(found, MODELOPT, module)
        assert not ((stored.block_scales.view(torch.uint8) & 0x7F) == 0x7F).any()
        assert torch.isfinite(stored.multiplier)
        assert stored.multiplier > 0
        decoded = stored.dequantize()
        assert (decoded[3, 16:32] == 0).all()
        assert layer == 0 or (decoded == 0).all()
    assert verify(tmp_path / "out", tmp_path / "in").errors == []


def test_one_amax_where_samplers_fuse(tmp_path):
    # Prevents: gate and up, or q, k and v, under outer scales of their own: a sampler uses one for all.
    # Also of shards: the largest value may lie on any rank's rows.
    tensors = {}
    for name, shape in {
        "self_attn.q_a_proj": (48, 64),
        "self_attn.kv_a_proj_with_mqa": (40, 64),
        "mlp.experts.1.gate_proj": (32, 64),
        "mlp.experts.1.up_proj": (32, 64),
    }.items():
        tensors[f"model.layers.1.{name}.weight"] = torch.full(shape, 0.2).bfloat16()
    tensors["model.layers.1.mlp.experts.1.up_proj.weight"][31, 5] = 0.9
    tensors["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"][39, 63] = -0.9
    source = checkpoint(tmp_path / "in", MLA, tensors=tensors)
    _, found = exported(source, tmp_path / "out")
    amax = torch.tensor(0.9).bfloat16().float()
    for pair in (
        ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        ("mlp.experts.1.gate_proj", "mlp.experts.1.up_proj"),
    ):
        scales = [found.read(f"model.layers.1.{name}.weight_scale_2") for name in pair]
        assert scales[0] == scales[1] == 1 / (torch.tensor(2688.0) / amax)
    assert verify(tmp_path / "out").errors == []


# --- input ----------------------------------------------------------------------------------------


def test_fused_experts_export_as_single_ones(tmp_path):
    # Prevents: samplers that find no expert of theirs in a file whose source had them fused.
    arch = architecture("qwen3_moe")
    single = checkpoint(tmp_path / "single", "qwen3_moe")
    weights = {name: single.read(name) for name in single.names() if ".experts." not in name}
    for layer in range(arch.num_layers):
        stem = f"model.layers.{layer}.mlp.experts."
        parts = {
            n: torch.stack([single.read(f"{stem}{e}.{n}_proj.weight") for e in range(4)])
            for n in ("gate", "up", "down")
        }
        weights[f"{stem}gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), dim=1)
        weights[f"{stem}down_proj"] = parts["down"]
    assert set(fused_names(arch)) - set(weights) == set()
    write_hf(tmp_path / "fused", CONFIGS["qwen3_moe"], weights)
    text = "recipe: nvfp4_pretrain\nlast_layers_bf16: 0.3\n"
    policy = policy_file(tmp_path / "p.yaml", text)
    exported(single, tmp_path / "a", policy=policy)
    exported(HFReader(tmp_path / "fused"), tmp_path / "b", policy=policy)
    a, b = ((tmp_path / out / "model.safetensors").read_bytes() for out in "ab")
    assert a == b
    assert verify(tmp_path / "b", tmp_path / "fused").errors == []


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_megatron_input_gives_the_same_file(tmp_path, name, capsys):
    # Prevents: an export of a trained checkpoint that differs from one of its Hugging Face conversion.
    source = checkpoint(tmp_path / "in", name)
    megatron_from_hf(tmp_path / "in", tmp_path / "megatron")
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.json").write_text(json.dumps(source.config))
    for kind, words in (
        ("in", ["--in", tmp_path / "in"]),
        ("megatron", ["--in", tmp_path / "megatron", "--hf-config", tmp_path / "config"]),
    ):
        assert _main([*words, "--out", tmp_path / f"out_{kind}"]) == 0
    files = [tmp_path / f"out_{kind}/model.safetensors" for kind in ("in", "megatron")]
    assert files[0].read_bytes() == files[1].read_bytes()
    with pytest.raises(ValueError, match="give --hf-config"):
        _main(["--in", tmp_path / "megatron", "--out", tmp_path / "none"])


def _main(words: list) -> int:
    import argparse

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_args([str(word) for word in words]))


O_PROJ = "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({O_PROJ: None}, rf"{O_PROJ}: is missing"),
        ({"model.layers.9.x.weight": torch.ones(2)}, r"model\.layers\.9\.x\.weight: is no tensor"),
        ({O_PROJ: torch.ones(64, 64)}, rf"{O_PROJ}: shape \(64, 64\)"),
        ({O_PROJ: torch.ones(64, 128).to(torch.float8_e4m3fn)}, rf"{O_PROJ}: holds float8"),
    ],
)
def test_a_wrong_source_is_refused_by_name(tmp_path, tensors, named):
    # Prevents: an FP8, incomplete or foreign checkpoint exported as if it were whole and BF16.
    source = checkpoint(tmp_path / "in", "qwen3", tensors=tensors)
    with pytest.raises(ValueError, match=named):
        plan_export(source, MODELOPT)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weights_are_refused_and_nothing_appears(tmp_path, value):
    # Prevents: NaN laundered to 6 in a file; half a folder that looks complete.
    weight = torch.zeros(64, 128, dtype=torch.bfloat16)
    weight[7, 9] = value
    name = "model.layers.3.self_attn.o_proj.weight"
    source = checkpoint(tmp_path / "in", "qwen3", tensors={name: weight})
    for recipe in ("te", "modelopt"):
        with pytest.raises(ValueError, match=f"{name}: holds a NaN or an Inf"):
            exported(source, tmp_path / "out", recipe=recipe)
        assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_contraction_that_is_no_multiple_of_16_is_refused(tmp_path):
    # Prevents: blocks that run over a row's end; the message says what to write into the policy.
    config = {**CONFIGS["qwen3"], "intermediate_size": 40}
    source = checkpoint(tmp_path / "in", config)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down_proj\.weight: K=40 .*linear_fc2"):
        plan_export(source, MODELOPT)
    text = "recipe: te\nlayers:\n  - match: '**.linear_fc2'\n    recipe: bf16\n".replace(
        "te", "4over6", 1
    )
    chosen = plan_export(source, MODELOPT, policy=policy_file(tmp_path / "p.yaml", text))
    assert not [name for name in chosen.quantized if "down_proj" in name]


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        ("mxfp8", "recipe mxfp8 has mxfp8.* weights, which an NVFP4 file cannot hold"),
        ("nvfp4_w4a8", "no serving format declares mxfp8.* activations"),
        ("bf16", "leaves every layer in BF16"),
        ("modelop", "unknown recipe 'modelop'"),
    ],
)
def test_recipes_without_a_serving_format_are_refused(tmp_path, recipe, named):
    # Prevents: a file in another number format than its recipe.
    source = checkpoint(tmp_path / "in", "qwen3")
    with pytest.raises(ValueError, match=named):
        plan_export(source, MODELOPT, recipe)


def test_activations_of_two_kinds_are_refused(tmp_path):
    # Prevents: one declaration for layers that were trained with different activations.
    text = "recipe: nvfp4_per_token\nlayers:\n  - layer_numbers: [1]\n    recipe: nvfp4_w4a16\n"
    source = checkpoint(tmp_path / "in", "qwen3")
    with pytest.raises(
        ValueError, match=r"token: decoder\.layers\.1\S+ .*none: decoder|none: dec.*token: dec"
    ):
        plan_export(source, MODELOPT, policy=policy_file(tmp_path / "p.yaml", text))


# --- again, and interrupted -----------------------------------------------------------------------


def test_a_second_export_holds_nothing_of_the_first(tmp_path):
    # Prevents: scales or shared amax of step 1 in the file of step 2; names or order that change.
    for step in (1, 2):
        generator = torch.Generator().manual_seed(step)
        shapes = plan.hf_tensors(architecture("qwen3_moe"))
        weights = {
            n: torch.randn(s, generator=generator).bfloat16() * step for n, s in shapes.items()
        }
        write_hf(tmp_path / f"in{step}", CONFIGS["qwen3_moe"], weights)
    for step in (1, 2):
        exported(HFReader(tmp_path / f"in{step}"), tmp_path / "out", force=True)
        if step == 1:
            first = (tmp_path / "out/model.safetensors").read_bytes()
    second = (tmp_path / "out/model.safetensors").read_bytes()
    exported(HFReader(tmp_path / "in2"), tmp_path / "fresh")
    assert second == (tmp_path / "fresh/model.safetensors").read_bytes()
    size = int.from_bytes(first[:8], "little")
    assert first[: 8 + size] == second[: 8 + size], "names, dtypes, shapes and order"
    assert first != second


def test_rows_keep_their_order(tmp_path):
    # Prevents: gate and up, or the rows of q, k and v, exchanged on the way through Megatron's layout.
    def coded(start, rows, columns):
        # One power of two per row, exact in NVFP4: the row number survives quantisation.
        values = 2.0 ** (torch.arange(start, start + rows) % 7 - 3).float()
        return values[:, None].expand(rows, columns).contiguous().bfloat16()

    stem = "model.layers.0."
    tensors = {
        f"{stem}mlp.gate_proj.weight": coded(0, 96, 64),
        f"{stem}mlp.up_proj.weight": coded(3, 96, 64),
        f"{stem}self_attn.q_proj.weight": coded(1, 128, 64),
        f"{stem}self_attn.k_proj.weight": coded(5, 64, 64),
        f"{stem}self_attn.v_proj.weight": coded(2, 64, 64),
    }
    source = checkpoint(tmp_path / "in", "qwen3", tensors=tensors)
    _, found = exported(source, tmp_path / "out", recipe="te")
    for name, tensor in tensors.items():
        decoded = stored_weight(found, MODELOPT, name.removesuffix(".weight")).dequantize()
        assert torch.allclose(decoded, tensor.float(), rtol=0.1), name


def test_other_files_go_along(tmp_path):
    # Prevents: an export without its tokenizer; old weights or configurations beside the new ones.
    source = checkpoint(tmp_path / "in", "qwen3")
    for name in ("tokenizer.json", "generation_config.json", "pytorch_model.bin"):
        (tmp_path / "in" / name).write_text("{}")
    exported(source, tmp_path / "out", files_from=tmp_path / "in")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "hf_quant_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]


def test_a_killed_export_leaves_no_folder(tmp_path):
    # Prevents: kill -9 in the middle and a folder that looks complete; leftovers in the next run's way.
    checkpoint(tmp_path / "in", "qwen3")
    program = (
        "import os, signal, sys\n"
        "from megatron_nvfp4.checkpoint import export\n"
        "from megatron_nvfp4.checkpoint.export_plan import plan_export\n"
        "from megatron_nvfp4.checkpoint.formats import MODELOPT\n"
        "from megatron_nvfp4.checkpoint.hf import HFReader, HFWriter\n"
        "write, count = HFWriter.write, 0\n"
        "def dying(self, name, tensor):\n"
        "    global count\n"
        "    count += 1\n"
        "    if count == 20:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    write(self, name, tensor)\n"
        "HFWriter.write = dying\n"
        "source = HFReader(sys.argv[1])\n"
        "export.export(source, sys.argv[2], plan_export(source, MODELOPT))\n"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "in"), str(tmp_path / "out")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "out").exists()
    exported(HFReader(tmp_path / "in"), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    assert verify(tmp_path / "out", tmp_path / "in").errors == []


def test_the_script_and_the_verb(tmp_path, capsys):
    # Prevents: a script whose arguments or exit status differ from what its help says.
    checkpoint(tmp_path / "in", "qwen3")
    words = [
        "--in",
        str(tmp_path / "in"),
        "--out",
        str(tmp_path / "out"),
        "--recipe",
        "te",
        "--json",
    ]
    tool = [sys.executable, str(ROOT / "tools/export_nvfp4.py")]
    done = subprocess.run([*tool, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["activations"] == "none"
    assert "--input-amax" in record["notes"][0]
    again = subprocess.run([*tool, *words], capture_output=True, text=True)
    assert again.returncode == 2
    assert again.stderr.startswith("error: ")
    assert "--force" in again.stderr
    assert "Traceback" not in again.stderr
    assert cli(["verify-checkpoint", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    assert cli(["export-nvfp4", *words]) == 2
    assert "--force" in capsys.readouterr().err
