"""What stands in the files: dtypes without their scales, NaN and Inf, flipped bits, rules without a layer."""

import ast
import re
import zipfile
from pathlib import Path

import pytest
import torch
from checkpoint_small import CONFIGS
from export_small import checkpoint, exported, policy_file
from safetensors.torch import load_file, save_file

from megatron_nvfp4.__main__ import main
from megatron_nvfp4.checkpoint import unpickle
from megatron_nvfp4.checkpoint.convert import ParallelSizes, hf_from_megatron, megatron_from_hf
from megatron_nvfp4.checkpoint.export import export
from megatron_nvfp4.checkpoint.export_plan import plan_export
from megatron_nvfp4.checkpoint.formats import MODELOPT
from megatron_nvfp4.checkpoint.hf import HFReader

PACKAGE = Path(__file__).parents[1] / "megatron_nvfp4" / "checkpoint"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32])
@pytest.mark.parametrize("name", [O_PROJ, EXPERT, "lm_head.weight", "model.norm.weight"])
def test_quantised_weights_without_a_declaration_are_refused(name, dtype, tmp_path):
    """Prevents: codes of another tool converted and exported as if they were weights."""
    shape = checkpoint(tmp_path / "plain", "qwen3_moe").meta(name)[1]
    folder = tmp_path / "hf"
    reader = checkpoint(folder, "qwen3_moe", tensors={name: torch.ones(shape).to(dtype)})
    word = str(dtype).removeprefix("torch.")
    part = f"{name}: holds {word}, and config.json declares no quantization; decode it"
    with pytest.raises(ValueError, match=re.escape(part)):
        megatron_from_hf(folder, tmp_path / "out")
    with pytest.raises(ValueError, match=re.escape(part)):
        plan_export(reader, MODELOPT, "te")
    assert not (tmp_path / "out").exists()


# --- NaN and Inf ----------------------------------------------------------------------------------


@pytest.fixture
def spoiled(tmp_path):
    """A checkpoint with one value replaced, by tensor."""

    def make(name: str, value: float, model: str = "qwen3_moe") -> Path:
        checkpoint(tmp_path / "hf", model)
        path = tmp_path / "hf" / "model.safetensors"
        weights = load_file(path)
        weights[name].view(-1)[-1] = value
        save_file(weights, path, metadata={"format": "pt"})
        return tmp_path / "hf"

    return make


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name",
    [O_PROJ, EXPERT, "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"],
)
def test_an_export_refuses_what_is_not_finite(name, value, spoiled, tmp_path):
    """Prevents: a sampler that answers NaN to every prompt; kept tensors count like quantised ones."""
    reader = HFReader(spoiled(name, value))
    plan = plan_export(reader, MODELOPT, "nvfp4_per_token")
    with pytest.raises(ValueError, match=f"{name}: holds a NaN or an Inf; .* earlier checkpoint"):
        export(reader, tmp_path / "out", plan)
    assert not (tmp_path / "out").exists()


def test_a_copied_head_is_looked_at_too(tmp_path):
    """Prevents: a NaN in a head beside tied embeddings, which belongs to no parameter."""
    reader = checkpoint(tmp_path / "hf", CONFIGS["qwen3_tied"])
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    head[0, 0] = float("nan")
    save_file(weights | {"lm_head.weight": head}, tmp_path / "hf" / "model.safetensors")
    reader = HFReader(tmp_path / "hf")
    with pytest.raises(ValueError, match=r"lm_head\.weight: holds a NaN"):
        export(reader, tmp_path / "out", plan_export(reader, MODELOPT, "te"))


@pytest.mark.parametrize("format", ["torch_dist", "torch"])
@pytest.mark.parametrize("name", [O_PROJ, EXPERT, "model.layers.0.self_attn.k_proj.weight"])
def test_a_conversion_keeps_it_and_says_so(name, format, spoiled, tmp_path, caplog):
    """Prevents: a broken checkpoint passed on without a word, or one that cannot be looked at at all."""
    folder = spoiled(name, float("nan"))
    megatron_from_hf(folder, tmp_path / "megatron", format=format)
    hf_from_megatron(tmp_path / "megatron", folder, tmp_path / "back")
    words = f"warning: {name}: holds a NaN or an Inf; its bytes are kept, an export refuses it"
    assert [record.getMessage() for record in caplog.records] == [words, words]
    found, expected = (HFReader(f).read(name) for f in (tmp_path / "back", folder))
    assert _bytes(found) == _bytes(expected)


# --- flipped bits ---------------------------------------------------------------------------------


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def _records(path: Path) -> dict[str, int]:
    """Name -> where its bytes begin, of a file that is one archive."""
    with zipfile.ZipFile(path) as archive:
        places = {}
        for entry in archive.infolist():
            header = path.read_bytes()[entry.header_offset : entry.header_offset + 30]
            names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:], "little")
            places[entry.filename] = entry.header_offset + 30 + names
    return places


@pytest.mark.parametrize("who", ["ours", "torch"])
def test_flipped_bytes_of_rank_files_are_found(who, tmp_path):
    """Prevents: a bad disk's or a bad copy's bytes trained on for weeks."""
    folder = tmp_path / "hf"
    checkpoint(folder, "qwen3_moe")
    sizes = ParallelSizes(tp=2)
    megatron_from_hf(folder, tmp_path / "megatron", format="torch", sizes=sizes)
    path = tmp_path / "megatron" / "release" / "mp_rank_01" / "model_optim_rng.pt"
    if who == "torch":
        torch.save(torch.load(path, weights_only=False), path)
    hf_from_megatron(tmp_path / "megatron", folder, tmp_path / "sound")
    records = _records(path)
    data = path.read_bytes()
    with zipfile.ZipFile(
        path
    ) as archive:  # the embedding's rows of this rank; copies may go unread
        largest = max(archive.infolist(), key=lambda entry: entry.file_size).filename
    for name in (largest, next(name for name in records if "pkl" in name)):
        path.write_bytes(data)
        _flip(path, records[name] + 5)
        with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
            hf_from_megatron(tmp_path / "megatron", folder, tmp_path / "out")
        assert name in str(caught.value)
        assert "CRC-32" in str(caught.value)
        assert "copy it again" in str(caught.value)
        assert not (tmp_path / "out").exists()


def test_flipped_bytes_of_distributed_files_are_found(tmp_path):
    """Prevents: the same in torch_dist, whose own reader does not look at the sums either."""
    folder = tmp_path / "hf"
    checkpoint(folder, "qwen3")
    megatron_from_hf(folder, tmp_path / "megatron")
    path = tmp_path / "megatron" / "release" / "__0_0.distcp"
    data = path.read_bytes()
    value = _bytes(HFReader(folder).read(O_PROJ)[:4])
    for at in (data.index(value) + 3, data.rindex(b"untie_embeddings") + 2):
        path.write_bytes(data)
        _flip(path, at)
        with pytest.raises(ValueError, match=rf"{re.escape(str(path))}.*CRC-32"):
            hf_from_megatron(tmp_path / "megatron", folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_sums_that_were_not_computed_are_not_compared(tmp_path):
    """Prevents: refusing files of torch.serialization.set_crc32_options(False), which hold zeros."""
    tensor = torch.arange(8.0)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": tensor, "empty": torch.empty(0)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(unpickle.load_saved(tmp_path / "x.pt")["a"].read(), tensor)


# --- rules of a policy ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "parts"),
    [
        (
            "match: 'decoder.layers.*.mlp.linear_fc1'",
            ["match 'decoder.layers.*.mlp.linear_fc1'", "decoder.layers.3.mlp.experts.linear_fc1"],
        ),
        ("match: 'model.layers.1.self_attn.o_proj'", ["names are like decoder.layers."]),
        ("layer_numbers: [5]", ["layer_numbers [5] selects none of the model's 4 layers"]),
        ("match: '**.router'", ["match '**.router' selects none"]),
        (
            "match: '**.linear_proj'\n    layer_numbers: [9]",
            ["match '**.linear_proj' and layer_numbers [9]"],
        ),
    ],
)
def test_a_rule_that_selects_nothing_is_refused(rule, parts, tmp_path):
    """Prevents: a mistyped pattern that leaves a layer in NVFP4 which was trained in BF16."""
    source = checkpoint(tmp_path / "hf", "qwen3_moe")
    text = f"recipe: nvfp4_per_token\nlayers:\n  - {rule}\n    recipe: bf16\n"
    policy = policy_file(tmp_path / "policy.yaml", text)
    with pytest.raises(ValueError, match="policy: the rule with") as caught:
        plan_export(source, MODELOPT, None, policy)
    for part in parts:
        assert part in str(caught.value)
    right = text.replace(rule, "match: '**.linear_proj'")
    policy_file(tmp_path / "policy.yaml", right)
    assert plan_export(source, MODELOPT, None, policy).quantized


# --- sizes, and the words of refusals -------------------------------------------------------------


@pytest.mark.parametrize("size", ["inf", "nan", "0", "-1", "-inf"])
def test_sizes_of_shards_are_checked(size, tmp_path, capsys):
    """Prevents: an OverflowError's traceback, and shards that never or always end."""
    checkpoint(tmp_path / "hf", "qwen3")
    megatron_from_hf(tmp_path / "hf", tmp_path / "megatron")
    hf, out = str(tmp_path / "hf"), str(tmp_path / "out")
    for words in (
        ["export-nvfp4", "--in", hf, "--out", out, "--recipe", "te"],
        [
            *["convert-megatron-to-hf", "--megatron", str(tmp_path / "megatron")],
            *["--hf-config", hf, "--out", out],
        ],
    ):
        capsys.readouterr()
        assert main([*words, f"--max-shard-gb={size}"]) == 2
        errors = capsys.readouterr().err
        assert len(errors.splitlines()) == 1
        assert "give a positive, finite size (--max-shard-gb" in errors
    assert not (tmp_path / "out").exists()


_REMEDY = re.compile(
    r"\b(call|cast|change|choose|convert|copy|correct|decode|dequantise|export|free|give|leave|load|make|"
    r"measure|move|name|remove|run|save|say|set|stop|take|train|write|is the copy|is it)\b"
)


def test_every_refusal_says_what_to_do():
    """Prevents: an error that names the fault and leaves the remedy to be guessed."""
    bare = []
    for path in sorted(PACKAGE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            if getattr(node.exc.func, "id", "") not in (
                "ValueError",
                "RuntimeError",
                "WrongUseError",
            ):
                continue
            strings = (each.value for each in ast.walk(node.exc) if isinstance(each, ast.Constant))
            text = "".join(each for each in strings if isinstance(each, str))
            names = {each.id for each in ast.walk(node.exc) if isinstance(each, ast.Name)}
            if not _REMEDY.search(text) and not names & {"again", "error"}:
                bare.append(f"{path.name}:{node.lineno}: {text}")
    assert bare == []


def test_verify_of_what_is_not_quantised_and_of_another_model(tmp_path, capsys):
    """Prevents: faults of a file where the folder or the original was named wrongly."""
    source = checkpoint(tmp_path / "hf", "qwen3_moe")
    exported(source, tmp_path / "serve", recipe="nvfp4_per_token")
    hf, serve = str(tmp_path / "hf"), str(tmp_path / "serve")
    assert main(["verify-checkpoint", hf]) == 2
    errors = capsys.readouterr().err
    assert f"{hf}: is not quantised" in errors
    assert f"export-nvfp4 --in {hf}" in errors
    assert main(["verify-checkpoint", serve, "--against", serve]) == 2
    assert "is quantised itself" in capsys.readouterr().err
    others = {
        "hidden_size": (64, 128),
        "experts.ffn_size": (32, 64),
        "model_type": ("qwen3_moe", "qwen3"),
    }
    changed = {
        "hidden_size": CONFIGS["qwen3_moe"] | {"hidden_size": 128},
        "experts.ffn_size": CONFIGS["qwen3_moe"] | {"moe_intermediate_size": 64},
        "model_type": CONFIGS["qwen3"],
    }
    for name, (here, there) in others.items():
        other = tmp_path / name
        checkpoint(other, changed[name])
        assert main(["verify-checkpoint", serve, "--against", str(other)]) == 2
        found = capsys.readouterr()
        assert found.out == ""
        assert f"is of another model: its {name} is {there!r}, it is {here!r} in" in found.err
    assert main(["verify-checkpoint", serve, "--against", hf]) == 0
