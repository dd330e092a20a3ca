"""Every bit of quantize() against vectors of Transformer Engine's and FlashInfer's references."""

import json
import struct
from pathlib import Path

import pytest
import torch

from megatron_nvfp4 import backends
from megatron_nvfp4.quant import NVFP4Spec, dequantize, quantize, rht, unpack_codes

FOLDER = Path(__file__).parent / "golden"
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "U8": torch.uint8,
}
# The references write 0 where a scaled value is -0.0; no other input holds a -0.0.
NEGATIVE_ZEROS = {"neg_zeros_16x64": 1024, "mixed_neg_zeros_16x64": 352}


def read_golden(name: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file: length of the JSON header, header, then the bytes."""
    content = (FOLDER / name).read_bytes()
    (size,) = struct.unpack_from("<Q", content)
    header, body = json.loads(content[8 : 8 + size]), bytearray(content[8 + size :])
    header.pop("__metadata__", None)
    tensors = {}
    for key, entry in header.items():
        start, stop = entry["data_offsets"]
        flat = torch.frombuffer(body[start:stop], dtype=DTYPES[entry["dtype"]])
        tensors[key] = flat.reshape(entry["shape"])
    return tensors


# Where the reference's BF16 matrix product on a CPU flushes subnormals to zero.
FLUSHED = "subnormal_bf16_16x64"

TE = read_golden("te_ref.safetensors")
TE_COLUMNWISE = read_golden("te_ref_colwise.safetensors")
FLASHINFER = read_golden("flashinfer_ref.safetensors")


def _entries(tensors: dict[str, torch.Tensor], field: str) -> list[str]:
    """Keys without their field, in file order, of everything but the Hadamard entries."""
    suffix = "/" + field
    keys = [key.removesuffix(suffix) for key in tensors if key.endswith(suffix)]
    return [key for key in keys if not key.endswith("/rht")]


def _spec(key: str) -> NVFP4Spec:
    """The spec that `<case>/<mode>[/<variant>]` names; "2d46_..." joins mode and variant."""
    mode, _, variant = key.split("/", 1)[1].replace("2d46", "2d/46").partition("/")
    fields = {"tensor": {}, "token": {"outer": "token"}, "2d": {"block": (16, 16)}}[mode]
    if variant:
        _, e4m3_max, four_over_six, error = variant.split("_")
        fields |= {"e4m3_max": int(e4m3_max), "four_over_six": four_over_six.lower()}
        fields |= {"error": error}
    return NVFP4Spec(**fields)


def _assert_codes(case: str, x: torch.Tensor, codes: torch.Tensor, golden: torch.Tensor) -> None:
    """Equal codes, but for 8 instead of 0 exactly where x is -0.0."""
    ours, theirs = unpack_codes(codes), unpack_codes(golden)
    negative_zero = (x == 0) & torch.signbit(x)
    assert int(negative_zero.sum()) == NEGATIVE_ZEROS.get(case, 0)
    assert torch.equal(ours[~negative_zero], theirs[~negative_zero])
    assert (ours[negative_zero] == 8).all()
    assert (theirs[negative_zero] == 0).all()


def test_nothing_is_left_out():
    # Prevents: a truncated file or a changed key turning the tests below into none.
    assert len(_entries(TE, "codes")) == 31 * 3 * 9
    assert len(_entries(TE_COLUMNWISE, "codes_t")) == 28 * 4
    assert sum(key.endswith("/rht/codes_t") for key in TE_COLUMNWISE) == 25
    assert len(_entries(FLASHINFER, "codes")) == 11 * 2 * 2
    assert NEGATIVE_ZEROS.keys() <= {key.split("/")[0] for key in TE}


@pytest.mark.parametrize("key", _entries(TE, "codes"))
def test_te_rowwise(key):
    # Prevents: training weights that TE, or a sampler fed by TE, would read as others.
    case, mode, *_ = key.split("/")
    x = TE[f"{case}/x"]
    qt = quantize(x, _spec(key))
    _assert_codes(case, x, qt.codes, TE[f"{key}/codes"])
    assert torch.equal(qt.block_scales.view(torch.uint8), TE[f"{key}/scales"])
    assert torch.equal(qt.amax, TE[f"{case}/{mode}/amax"])


@pytest.mark.parametrize("key", _entries(TE_COLUMNWISE, "codes_t"))
def test_te_columnwise(key):
    # Prevents: a transposed operand that is not quantize(x.t()), for which there is no other code.
    case = key.split("/")[0]
    x = TE_COLUMNWISE[f"{case}/x"].t()
    qt = quantize(x, _spec(key))
    _assert_codes(case, x, qt.codes, TE_COLUMNWISE[f"{key}/codes_t"])
    assert torch.equal(qt.block_scales.view(torch.uint8), TE_COLUMNWISE[f"{key}/scales_t"])
    assert torch.equal(qt.amax, TE_COLUMNWISE[f"{key}/amax_col"])


@pytest.mark.parametrize("key", [key for key in TE_COLUMNWISE if key.endswith("/rht/codes_t")])
def test_te_columnwise_after_hadamard(key):
    # Prevents: another matrix, other signs, a rotation along the wrong axis or without its rounding.
    case, rotated = key.split("/")[0], key.removesuffix("/codes_t")
    qt = quantize(rht(TE_COLUMNWISE[f"{case}/x"].t()))
    ours, theirs = unpack_codes(qt.codes), unpack_codes(TE_COLUMNWISE[key])
    if case == FLUSHED:
        assert TE_COLUMNWISE[f"{rotated}/amax_col"] == 0
        assert qt.amax > 0
        return
    if case in NEGATIVE_ZEROS:  # a sum of negative zeros keeps its sign here
        differ = ours != theirs
        assert differ.any()
        assert (ours[differ] == 8).all()
        assert (theirs[differ] == 0).all()
    else:
        assert torch.equal(ours, theirs)
    assert torch.equal(qt.block_scales.view(torch.uint8), TE_COLUMNWISE[f"{rotated}/scales_t"])
    assert torch.equal(qt.amax, TE_COLUMNWISE[f"{rotated}/amax_col"])


@pytest.mark.parametrize("key", _entries(FLASHINFER, "codes"))
def test_flashinfer_exact_mode(key):
    # Prevents: a sampler in exact mode that quantises the learner's activations to other bits.
    case = key.split("/")[0]
    x = TE[f"{case}/x"]
    qt = quantize(x, _spec(key))
    _assert_codes(case, x, qt.codes, FLASHINFER[f"{key}/codes"])
    assert torch.equal(qt.block_scales.view(torch.uint8), FLASHINFER[f"{key}/scales"])
    theirs = FLASHINFER[f"{key}/decode_scale"].reshape(-1)
    used = qt.amax != 0  # FlashInfer has no rule of its own for the scale of an all-zero row
    assert torch.equal(qt.outer_scale[used], theirs[used])
    assert (dequantize(qt)[~used.expand(x.shape[0])] == 0).all()


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_compiled_backends_equal_every_entry(name, direction):
    # Prevents: kernels that agree with this project's own reference on random inputs and not with TE.
    tensors, suffix = (TE, "") if direction == "rowwise" else (TE_COLUMNWISE, "_t")
    backend = backends.get(name)
    keys = _entries(tensors, f"codes{suffix}")
    reason = backend.why_not("quantize", [_spec(keys[0])], device=name)
    if reason:
        pytest.skip(f"{name}: {reason}")
    for key in keys:
        case = key.split("/")[0]
        x = tensors[f"{case}/x"] if direction == "rowwise" else tensors[f"{case}/x"].t()
        qt = backend.quantize(x.to(name).contiguous(), _spec(key))
        _assert_codes(case, x, qt.codes.cpu(), tensors[f"{key}/codes{suffix}"])
        scales = qt.block_scales.view(torch.uint8).cpu()
        assert torch.equal(scales, tensors[f"{key}/scales{suffix}"]), key


def test_four_over_six_changes_bits():
    # Prevents: the variants above passing because the option is ignored on both sides.
    x = TE["four_six_patterns_32x128/x"]
    plain = quantize(x, NVFP4Spec(e4m3_max=256))
    adaptive = quantize(x, NVFP4Spec(e4m3_max=256, four_over_six="mse"))
    assert not torch.equal(plain.codes, adaptive.codes)
