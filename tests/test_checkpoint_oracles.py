"""NVFP4 export against ModelOpt's own export and compressed-tensors' own reader, on a CPU."""

import json

import pytest
import torch
from checkpoint_small import CONFIGS
from export_small import checkpoint, exported, stored_weight

from megatron_nvfp4 import quant
from megatron_nvfp4.checkpoint import formats
from megatron_nvfp4.checkpoint.export_plan import plan_export
from megatron_nvfp4.checkpoint.formats import COMPRESSED_TENSORS, MODELOPT
from megatron_nvfp4.checkpoint.hf import HFReader
from megatron_nvfp4.checkpoint.verify import verify


@pytest.fixture(scope="module")
def modelopt():
    pytest.importorskip("modelopt.torch.quantization", reason="nvidia-modelopt is not installed")
    import modelopt.torch.quantization as mtq

    return mtq


def test_modelopt_formula_bit_for_bit(modelopt):
    # Prevents: "modelopt" rounding that is only nearly ModelOpt's: floor, zero blocks, signs of zeros.
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    mixed = normal(32, 64)
    mixed[3, 16:32] = 0
    mixed[5] *= 1e-6
    mixed[6] *= 1e4
    mixed[7, ::2] = -0.0
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(4, 8) * 448
    for x in (
        normal(64, 256).bfloat16(),
        normal(300, 1024) * 1e-3,
        mixed,
        -mixed,
        ties,
        normal(8, 16) * 1e30,
    ):
        theirs, scales, outer = NVFP4QTensor.quantize(x.clone(), 16)
        ours = formats.quantize_modelopt(x, x.float().abs().max().reshape(1))
        assert torch.equal(ours.codes, theirs._quantized_data)
        bytes_of = [
            s.reshape(ours.block_scales.shape).view(torch.uint8)
            for s in (ours.block_scales, scales)
        ]
        assert torch.equal(*bytes_of)
        assert torch.equal(ours.multiplier, outer.reshape(()))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_whole_modelopt_export_is_reproduced(tmp_path, modelopt, name):
    # Prevents: names, shapes, shared scales or configuration that only resemble a ModelOpt checkpoint.
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from modelopt.torch.export import export_hf_checkpoint

    kind = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}[name]
    config = getattr(transformers, f"{kind}Config")(**CONFIGS[name])
    config.architectures = [f"{kind}ForCausalLM"]
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16().eval()
    model.save_pretrained(tmp_path / "in")
    ids = torch.randint(0, 250, (4, 32))
    modelopt.quantize(model, modelopt.NVFP4_DEFAULT_CFG, lambda m: m(ids))
    with torch.inference_mode():
        export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=tmp_path / "theirs")
    theirs = HFReader(tmp_path / "theirs")
    # Their amax of each input; ours are written from it, so the numbers must come out equal as well.
    scales = [n for n in theirs.names() if n.endswith(".input_scale")]
    amax = {n.removesuffix(".input_scale"): theirs.read(n).item() * 2688 for n in scales}
    source = HFReader(tmp_path / "in")
    _, ours = exported(source, tmp_path / "ours", recipe="modelopt", input_amax=amax)
    assert ours.names() == theirs.names()
    for tensor in theirs.names():
        a, b = ours.read(tensor), theirs.read(tensor)
        assert ours.meta(tensor) == theirs.meta(tensor), tensor
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), tensor
    a, b = (r.config["quantization_config"] for r in (ours, theirs))
    assert set(a["ignore"]) == set(b["ignore"])
    assert a["config_groups"] == b["config_groups"]
    second = [json.loads((r.folder / "hf_quant_config.json").read_text()) for r in (ours, theirs)]
    for entry in second:
        entry["quantization"]["exclude_modules"].sort()
        del entry["producer"]
    assert second[0] == second[1]
    assert verify(tmp_path / "theirs", tmp_path / "in").errors == []


def _decompressed(stored: formats.PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """compressed-tensors' order of operations: q * (s_b / divisor) in FP32, rounded once."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((values, -values))[quant.unpack_codes(stored.codes).int()]
    scale = stored.block_scales.float() / stored.divisor
    return (values.unflatten(1, (-1, 16)) * scale[..., None]).flatten(1).to(dtype)


@pytest.mark.parametrize("recipe", ["te", "modelopt", "nvfp4_online"])
def test_compressed_tensors_decompresses_it(tmp_path, recipe):
    # Prevents: packing order, scale direction or shapes that its own reader takes otherwise.
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme

    source = checkpoint(tmp_path / "in", "qwen3_moe")
    _, found = exported(source, tmp_path / "out", COMPRESSED_TENSORS, recipe)
    group = found.config["quantization_config"]["config_groups"]["group_0"]
    scheme = QuantizationScheme(**group)
    modules = formats.modules_of(COMPRESSED_TENSORS, found.names())
    assert len(modules) == 4 * (4 + 3 * 4)
    for module in modules:
        state = {s: found.read(f"{module}.{s}") for s in COMPRESSED_TENSORS.suffixes[:3]}
        theirs = NVFP4PackedCompressor.decompress(dict(state), scheme)["weight"]
        stored = stored_weight(found, COMPRESSED_TENSORS, module)
        assert torch.equal(theirs, _decompressed(stored, theirs.dtype)), module
        ours = stored.dequantize(theirs.dtype).float()
        assert torch.allclose(theirs.float(), ours, rtol=2**-7, atol=0), module


@pytest.mark.parametrize("static", [False, True])
def test_transformers_loads_a_compressed_tensors_file(tmp_path, static):
    # Prevents: a configuration its loader refuses, names it drops, or a head it believes quantised.
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    config = {**CONFIGS["qwen3"], "architectures": ["Qwen3ForCausalLM"]}
    source = checkpoint(tmp_path / "in", config)
    options = {}
    if static:
        options["input_amax"] = dict.fromkeys(plan_export(source, MODELOPT, "te").quantized, 5.0)
    _, found = exported(source, tmp_path / "out", COMPRESSED_TENSORS, "te", **options)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        dtype=torch.bfloat16,
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
        output_loading_info=True,
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    loaded = model.state_dict()
    for name in source.names():
        module = name.removesuffix(".weight")
        wanted = source.read(name)
        if f"{module}.weight_packed" in found.names():
            wanted = _decompressed(stored_weight(found, COMPRESSED_TENSORS, module), torch.bfloat16)
        assert torch.equal(loaded[name], wanted), name
    with torch.inference_mode():
        assert torch.isfinite(model(torch.arange(8)[None]).logits).all()
