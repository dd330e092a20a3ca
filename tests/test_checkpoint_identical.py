"""A round trip through Megatron's formats gives back the files that transformers wrote, byte for byte."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from checkpoint_small import CONFIGS, MOE, architecture, random_weights  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from megatron_nvfp4.checkpoint.convert import (  # noqa: E402
    ParallelSizes,
    hf_from_megatron,
    megatron_from_hf,
)
from megatron_nvfp4.checkpoint.hf import INDEX, HFReader, HFWriter  # noqa: E402
from megatron_nvfp4.checkpoint.hf_files import OriginalFiles  # noqa: E402
from megatron_nvfp4.checkpoint.plan import copies, hf_tensors  # noqa: E402

# transformers 5 writes no prediction layers, and GLM's and DeepSeek-V2's are as V3's.
MODELS = ("llama", "llama_tied", "qwen2", "qwen3", "qwen3_tied", "qwen3_moe", "deepseek_v3")
SIZES = {"tp": 2, "pp": 2}


def _sums(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def _save(folder: Path, name: str, dtype: torch.dtype, **options) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**CONFIGS[name])
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(dtype).save_pretrained(folder, **options)
    (folder / "tokenizer_config.json").write_text('{"a":  1}')


def _round_trip(folder: Path, tmp_path: Path, format: str, config: Path | None = None, **options):
    sizes = ParallelSizes(**SIZES) if format == "torch" else None
    megatron_from_hf(folder, tmp_path / format, format=format, sizes=sizes)
    out = tmp_path / f"back_{format}"
    hf_from_megatron(tmp_path / format, config or folder, out, **options)
    return out


@pytest.mark.parametrize("is_sharded", [False, True], ids=["single", "sharded"])
@pytest.mark.parametrize("name", MODELS)
def test_files_of_transformers_come_back_byte_for_byte(name, is_sharded, tmp_path):
    """Prevents: another order, split, header or spelling of files that hold the same tensors."""
    folder = tmp_path / "hf"
    dtype = torch.float32 if name == "qwen3" else torch.bfloat16
    _save(folder, name, dtype, **({"max_shard_size": "60KB"} if is_sharded else {}))
    expected = _sums(folder)
    assert (INDEX in expected) == is_sharded
    assert sum(file.endswith(".safetensors") for file in expected) == 1 or is_sharded
    for format in ("torch_dist", "torch"):
        assert _sums(_round_trip(folder, tmp_path, format)) == expected


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in MODELS])
def test_files_of_the_safetensors_library_come_back_byte_for_byte(name, tmp_path):
    """Prevents: prediction layers, FP32 router biases or two keys of metadata that move a byte."""
    folder = tmp_path / "hf"
    folder.mkdir()
    weights = random_weights(hf_tensors(architecture(name)))
    for copy, original in copies(architecture(name)).items():
        weights[copy] = weights[original].clone()
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    save_file(weights, folder / "weights.safetensors", metadata={"format": "pt", "by": "\u00e9"})
    expected = _sums(folder)
    assert _sums(_round_trip(folder, tmp_path, "torch_dist")) == expected
    assert list(expected) == ["config.json", "weights.safetensors"]


def test_files_of_other_writers_come_back_byte_for_byte(tmp_path):
    """Prevents: an order of tensors or of header entries that only holds for one library."""
    folder = tmp_path / "hf"
    shapes = hf_tensors(architecture("qwen3_moe"))
    with HFWriter(folder, config=CONFIGS["qwen3_moe"], max_shard_bytes=50_000) as writer:
        for name, tensor in reversed(random_weights(shapes).items()):
            writer.write(name, tensor)
    path = min(folder.glob("*.safetensors"))
    data = path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:length])
    text = json.dumps({name: header[name] for name in reversed(header)}, indent=1).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[length:])
    assert _sums(_round_trip(folder, tmp_path, "torch_dist")) == _sums(folder)


def test_the_index_alone_decides_names_and_split(tmp_path):
    """Prevents: a folder without weights, as --hf-config often is, giving another set of files."""
    folder, bare = tmp_path / "hf", tmp_path / "bare"
    _save(folder, "qwen3_moe", torch.bfloat16, max_shard_size="60KB")
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    assert _sums(_round_trip(folder, tmp_path, "torch_dist", bare)) == _sums(folder)
    shutil.rmtree(tmp_path / "torch_dist")
    shutil.rmtree(tmp_path / "back_torch_dist")
    for path in folder.glob("*.safetensors"):  # as a clone without its large files has them
        (bare / path.name).write_text("version https://git-lfs.github.com/spec/v1\n")
    assert _sums(_round_trip(folder, tmp_path, "torch_dist", bare)) == _sums(folder)


def test_other_values_keep_the_files(tmp_path):
    """Prevents: a trained model in another dtype whose files no longer have the original's names."""
    folder, cast = tmp_path / "hf", tmp_path / "cast"
    _save(folder, "qwen3_moe", torch.bfloat16, max_shard_size="60KB")
    reader = HFReader(folder)
    with HFWriter(cast, config=reader.config) as writer:
        for name in reader.names():
            writer.write(name, reader.read(name).float() * 2)
    back = _round_trip(cast, tmp_path, "torch_dist", folder)
    found = HFReader(back)
    assert found.names() == reader.names()
    assert [path.name for path in sorted(back.iterdir())] == list(_sums(folder))
    for name in reader.names():
        assert torch.equal(found.read(name), reader.read(name).float() * 2)
    index, original = (json.loads((f / INDEX).read_text()) for f in (back, folder))
    assert index["weight_map"] == original["weight_map"]
    assert index["metadata"]["total_size"] == 2 * original["metadata"]["total_size"]
    config = dict(reader.config, dtype="float32")
    assert found.config == config
    transformers.AutoModelForCausalLM.from_pretrained(back)


def test_a_size_or_more_tensors_make_a_new_split(tmp_path):
    """Prevents: --max-shard-gb without effect, and tensors lost that the original did not have."""
    folder = tmp_path / "hf"
    _save(folder, "qwen3_tied", torch.bfloat16)
    back = _round_trip(folder, tmp_path, "torch_dist", max_shard_bytes=60_000)
    assert len(list(back.glob("*.safetensors"))) > 2
    original = OriginalFiles.read(folder)
    tensors = {name: HFReader(folder).meta(name) for name in original.names}
    assert original.plan(tensors) is not None
    assert original.plan(tensors | {"more.weight": (torch.bfloat16, (1,))}) is None
    fewer = {name: meta for name, meta in tensors.items() if "layers.0" not in name}
    (file,) = original.plan(fewer).files
    assert set(file.tensors) == set(fewer)
    assert set(MOE) & set(MODELS)
