"""Blackwell's block-scaled GEMM: machine code, build, and who may call it with what.

The GEMM is compiled here and never run: that takes a GPU of compute capability 10.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest
import te_stand_in
import torch
from blackwell_oracle import gemm_operands, grouped_gemm_ref, swizzle_groups_ref

from megatron_nvfp4 import backends, quant
from megatron_nvfp4.backends import blackwell, reference, te
from megatron_nvfp4.recipes import BF16, MXFP8, NVFP4Spec

ROOT = Path(__file__).parents[1]
TOKEN, TENSOR = NVFP4Spec(outer="token"), NVFP4Spec()
TILES = NVFP4Spec(block=(16, 16))


def _load_setup() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("setup_under_test", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SETUP = _load_setup()

# --- machine code ----------------------------------------------------------------------------


def _cutlass() -> str | None:
    """CUTLASS's headers: as the build finds them, or where `make venv` put them."""
    ours = f"{sys.prefix}/cutlass/cutlass_library/source"
    env = {"MEGATRON_NVFP4_BLACKWELL": "1", "CUTLASS_HOME": os.environ.get("CUTLASS_HOME", ours)}
    try:
        return SETUP.find_cutlass(env, None)
    except SystemExit:
        return None


def _disassembler() -> str | None:
    wheel = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/nvdisasm"))
    return str(wheel[-1]) if wheel else shutil.which("nvdisasm")


def _compile(nvcc: str, cutlass: str) -> tuple[Path, str]:
    """One instance's cubin for 10.0 and what ptxas said, made once for each state of the sources."""
    source = ROOT / "csrc/blackwell/grouped_gemm_bf16.cu"
    parts = [source, *sorted(source.parent.glob("*.*h")), ROOT / "csrc/numerics.h"]
    seen = [path.read_bytes() for path in parts]
    flags = [flag for flag in SETUP.NVCC.split() if not flag.startswith("--compress")]
    flags += [*SETUP.gencode("10.0a"), "--expt-relaxed-constexpr", "-std=c++17", f"-I{cutlass}"]
    seen += [Path(cutlass, "cutlass/version.h").read_bytes(), " ".join(flags).encode()]
    seen.append(subprocess.check_output([nvcc, "--version"]))
    folder = ROOT / "build/blackwell_sass"
    folder.mkdir(parents=True, exist_ok=True)
    cubin = folder / f"{hashlib.sha256(b''.join(seen)).hexdigest()[:16]}.cubin"
    log = cubin.with_suffix(".log")
    if not log.exists():
        for old in folder.iterdir():
            old.unlink()
        command = [nvcc, "-cubin", "-Xptxas=-v", *flags, str(source), "-o", str(cubin)]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-4000:]
        log.write_text(run.stderr)
    return cubin, log.read_text()


def _faults(sass: str, log: str) -> list[str]:
    """What is wrong with the kernel's machine code."""
    faults, label = [], ""
    if not re.search(r"\bUTCOMMA\.(?:2CTA\.)?(?:4X|BLOCK16)\b", sass):
        faults.append("no block-scaled MMA with a scale for each 16 elements")
    for line in sass.splitlines():
        label = line if re.match(r"\S+:$", line) else label
        # ptxas guards the allocation of tensor memory by traps in functions of its own.
        if "BPT.TRAP" in line and "tcgen05_guardrail_trap" not in label:
            faults.append(f"a trap in {label[:100]}")
    if re.search(r"\bFFMA", sass):
        faults.append("a fused multiply-add, which rounds once where the contract rounds twice")
    for instruction in ("FMUL", "FADD"):
        if not re.search(rf"\b{instruction}\b", sass):
            faults.append(f"no {instruction}: the epilogue is not there")
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if len(spills) != 2 or set(spills) != {("0", "0")}:
        faults.append(f"spills of the two kernels: {spills}")
    return faults


@pytest.mark.timeout(1200)
def test_machine_code_has_the_block_scaled_mma():
    # Prevents: a file compiled for another target, which CUTLASS turns into a kernel that traps; a
    # main loop that spills; an epilogue that rounds otherwise than its function says.
    home, cutlass, disassembler = SETUP.find_cuda_home(os.environ), _cutlass(), _disassembler()
    if home is None:
        pytest.skip("no nvcc")
    if cutlass is None:
        pytest.skip("no CUTLASS headers (make venv brings them)")
    if disassembler is None:
        pytest.skip("no nvdisasm (make venv brings it)")
    cubin, log = _compile(f"{home}/bin/nvcc", cutlass)
    sass = subprocess.check_output([disassembler, str(cubin)], text=True)
    assert not _faults(sass, log)


_GOOD_SASS = """
kernel:
  UTCOMMA.4X gdesc[UR8], gdesc[UR10], tmem[UR4] ;
  FMUL R1, R2, R3 ;
  FADD R1, R1, R4 ;
$__internal_0_$__cuda_sm10x_tcgen05_guardrail_trap_x:
  BPT.TRAP 0x1 ;
"""
_GOOD_LOG = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n" * 2


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("", "", None),
        ("UTCOMMA.4X", "UTCOMMA.BLOCK16", None),
        ("UTCOMMA.4X", "UTCOMMA.2CTA.4X", None),
        ("UTCOMMA.4X", "UTCOMMA", "no block-scaled MMA"),
        ("UTCOMMA.4X", "UTCHMMA", "no block-scaled MMA"),
        ("FADD R1", "BPT.TRAP 0x1 ;\n  FADD R1", "a trap in kernel"),
        ("FMUL", "FFMA", "fused multiply-add"),
        ("FADD", "FADD2", "no FADD"),
        ("0 bytes spill stores", "8 bytes spill stores", "spills"),
    ],
)
def test_the_machine_code_check_sees_what_it_should(old, new, fault):
    # Prevents: a check that finds nothing wrong with anything.
    sass, log = (text.replace(old, new, 1) if old else text for text in (_GOOD_SASS, _GOOD_LOG))
    faults = _faults(sass, log)
    assert faults if fault else not faults
    assert not fault or any(fault in found for found in faults)


# --- the build -------------------------------------------------------------------------------


def _home(folder: Path) -> dict[str, str]:
    header = folder / "include/cutlass/cutlass.h"
    header.parent.mkdir(parents=True)
    header.touch()
    return {"CUTLASS_HOME": str(folder), "MEGATRON_NVFP4_BLACKWELL": "1"}


def test_built_only_when_asked_for(tmp_path):
    # Prevents: four minutes and 5 GB of compiling for everyone who has CUTLASS.
    env = _home(tmp_path)
    assert SETUP.find_cutlass(env, None) == f"{tmp_path}/include"
    for mode in ("", "0"):
        assert SETUP.find_cutlass(env | {"MEGATRON_NVFP4_BLACKWELL": mode}, None) is None
    assert SETUP.find_cutlass({}, "no nvcc at install") is None


@pytest.mark.parametrize(
    ("mode", "cuda", "message"),
    [
        ("1", None, "=1: .* has no CUTLASS; set CUTLASS_HOME or pip install --no-deps nvidia"),
        ("1", "no nvcc at install", "=1: no nvcc at install"),
        ("yes", None, "=yes: use 1"),
    ],
)
def test_asked_for_and_impossible_stops_the_build(mode, cuda, message, monkeypatch, tmp_path):
    # Prevents: an install without the kernel that was demanded; an error without a remedy.
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match=f"MEGATRON_NVFP4_BLACKWELL{message}"):
        SETUP.find_cutlass({"MEGATRON_NVFP4_BLACKWELL": mode}, cuda)


def test_a_named_home_is_the_only_one(monkeypatch, tmp_path):
    # Prevents: a release of CUTLASS that nobody asked for, after a typing error.
    _home(tmp_path / "cutlass_library/source")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    env = {"MEGATRON_NVFP4_BLACKWELL": "1"}
    assert SETUP.find_cutlass(env, None) == f"{tmp_path}/cutlass_library/source/include"
    with pytest.raises(SystemExit, match=f"{tmp_path}/typo has no CUTLASS"):
        SETUP.find_cutlass(env | {"CUTLASS_HOME": f"{tmp_path}/typo"}, None)


def test_one_release_of_cutlass_is_named_everywhere():
    # Prevents: an error that asks for another release than the one the machine code was checked with.
    pins = {
        name: set(re.findall(r"nvidia-cutlass==([\d.]+)", (ROOT / name).read_text()))
        for name in ("setup.py", "README.md", "tools/make_venv.sh")
    }
    assert len(set().union(*pins.values())) == 1
    assert all(pins.values()), pins


# --- who says no -----------------------------------------------------------------------------


def test_never_chosen_unasked():
    # Prevents: a kernel that nobody has run computing someone's training.
    assert "blackwell" not in backends.PREFERENCE
    assert "te" not in backends.PREFERENCE


@pytest.mark.parametrize(
    ("formats", "shape", "device", "reason"),
    [
        ((TOKEN, TENSOR), None, "cpu", "these are on cpu; use backend='cpu'"),
        ((TOKEN, TOKEN), None, "cuda", "use outer='tensor' for weights"),
        ((TOKEN, TENSOR), (8, 16, 48), "cuda", "K=48 is not a positive multiple of 32"),
        ((TOKEN, TENSOR), (8, 16, 0), "cuda", "K=0 is not a positive multiple of 32"),
        ((TENSOR, TILES), (8, 12, 64), "cuda", "N=12 is not a positive multiple of 8"),
    ],
)
@pytest.mark.parametrize("op", ["gemm", "grouped_gemm"])
def test_what_the_tensor_cores_cannot_take_is_named(op, formats, shape, device, reason):
    # Prevents: an error from inside CUTLASS, or another kernel running in silence.
    assert reason in blackwell.BACKEND.why_not(op, formats, shape, device)


@pytest.mark.parametrize(
    ("op", "formats"),
    [
        ("quantize", (TOKEN,)),
        ("grouped_wgrad", (TENSOR, TENSOR)),
        ("gemm", (BF16, BF16)),
        ("grouped_gemm", (MXFP8, MXFP8)),
        ("grouped_gemm", (BF16, TENSOR)),
    ],
)
def test_everything_else_is_the_cuda_backends(op, formats):
    # Prevents: a backend that can be named but not trained with; an answer of its own for what it
    # hands on.
    cuda = backends.get("cuda")
    for device in ("cpu", "cuda"):
        ours = blackwell.BACKEND.why_not(op, formats, None, device)
        assert ours == cuda.why_not(op, formats, None, device)


def test_reasons_on_other_gpus_and_without_the_build(monkeypatch):
    # Prevents: "not built" on a GPU where building it would not help; a remedy left out.
    monkeypatch.setattr(blackwell.extension, "why_not_cuda", lambda: None)
    info = types.SimpleNamespace(INFO={"blackwell": False})
    monkeypatch.setitem(sys.modules, "megatron_nvfp4._build_info", info)
    blackwell._import_error.cache_clear()
    for capability, reason in {
        (9, 0): "need compute capability 10.0 or 10.3, this GPU has 9.0; use backend='cuda'",
        (12, 0): "this GPU has 12.0",
        (10, 0): "not built; install again: MEGATRON_NVFP4_BLACKWELL=1 pip install",
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        assert reason in blackwell.BACKEND.why_not("gemm", (TOKEN, TENSOR), None, "cuda")
    blackwell._native_ops.cache_clear()
    with pytest.raises(RuntimeError, match="MEGATRON_NVFP4_BLACKWELL=1"):
        blackwell._native_ops()
    blackwell._import_error.cache_clear()


# --- operands of the GEMMs, on any device ----------------------------------------------------


@pytest.fixture
def emulated(monkeypatch) -> None:
    """The Blackwell operators in torch, and Transformer Engine's by its stand-in."""
    native = types.SimpleNamespace(grouped_gemm_nvfp4_blackwell=grouped_gemm_ref)
    monkeypatch.setattr(blackwell, "_native_ops", lambda: native)
    layout = types.SimpleNamespace(swizzle_groups_128x4=swizzle_groups_ref)
    monkeypatch.setattr(blackwell, "_ops", lambda: layout)
    for name, module in te_stand_in.kernel_modules().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("backend", [blackwell.BACKEND, te.BACKEND], ids=["blackwell", "te"])
@pytest.mark.parametrize("a_spec", [TOKEN, TENSOR, NVFP4Spec(e4m3_max=256)])
@pytest.mark.parametrize("b_spec", [TENSOR, TILES, NVFP4Spec(four_over_six="mse", e4m3_max=256)])
def test_native_gemms_get_the_operands_of_the_contract(emulated, backend, a_spec, b_spec):
    # Prevents: scales of the wrong group or maximum, an outer scale applied twice or in two
    # roundings, bias in the wrong place, weights padded once for all groups.
    for splits in ([5, 0, 130, 16], [0, 0, 0]):
        a, b, bias, offsets = gemm_operands(splits, 144, 160, a_spec, b_spec)
        for given, dtype in ((None, torch.bfloat16), (bias, torch.float32), (bias, torch.float16)):
            expected = reference.BACKEND.grouped_gemm(a, b, offsets, bias=given, out_dtype=dtype)
            packed = backend.pack_weights(b, len(splits))
            for weights in (b, packed):
                y = backend.grouped_gemm(a, weights, offsets, bias=given, out_dtype=dtype)
                assert y.dtype == dtype
                assert torch.equal(y, expected)


@pytest.mark.parametrize("backend", [blackwell.BACKEND, te.BACKEND], ids=["blackwell", "te"])
def test_a_dense_gemm_is_one_group(emulated, backend):
    # Prevents: a dense layer that reads another layout than a grouped one.
    for a_spec in (TOKEN, TENSOR):
        a, b, bias, _ = gemm_operands([37], 24, 96, a_spec, TENSOR, dense=True)
        options = {"bias": bias[0], "out_dtype": torch.bfloat16}
        expected = reference.BACKEND.gemm(a, b, **options)
        assert torch.equal(backend.gemm(a, b, **options), expected)


def test_packed_weights_keep_their_canonical_form():
    # Prevents: a backward pass or an export that reads swizzled scales as linear ones.
    _, b, _, _ = gemm_operands([3, 4], 24, 96, TOKEN, TENSOR)
    scales = swizzle_groups_ref(b.block_scales, torch.arange(3) * 24)
    packed = blackwell.SwizzledWeights(**vars(b), scales_128x4=scales)
    assert torch.equal(quant.dequantize(packed), quant.dequantize(b))
    assert packed.shape == b.shape
    assert torch.equal(packed.outer_scale, b.outer_scale)


# --- Transformer Engine ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", [TOKEN, TENSOR, TILES, NVFP4Spec(outer="token", four_over_six="mae", e4m3_max=256)]
)
def test_te_quantises_whole_and_grouped(emulated, spec):
    # Prevents: one amax for all experts; scales with TE's uninitialised padding in them.
    x = torch.randn(96, 80, generator=torch.Generator().manual_seed(2))
    offsets = torch.tensor([0, 32, 32, 96])
    for given in (None, offsets):
        ours = te.BACKEND.quantize(x, spec, offsets=given)
        expected = reference.BACKEND.quantize(x, spec, offsets=given)
        for name in ("codes", "block_scales", "amax"):
            left, right = (getattr(part, name).view(torch.uint8) for part in (ours, expected))
            assert torch.equal(left, right), name
        assert ours.spec == spec


@pytest.mark.parametrize(
    ("op", "formats", "shape", "reason"),
    [
        ("quantize", (NVFP4Spec(e4m3_max=256),), None, "as if e4m3_max were 448"),
        ("quantize", (NVFP4Spec(four_over_six="mae", error="fast"),), None, "use error='strict'"),
        ("quantize", (NVFP4Spec(rounding="stochastic"),), None, "rounding to nearest"),
        ("quantize", (TOKEN,), (24, 64), "whole 16-row blocks"),
        ("quantize", (BF16,), None, "only NVFP4"),
        ("gemm", (TOKEN, BF16), None, "only NVFP4"),
        ("grouped_gemm", (TOKEN, TENSOR), (16, 64, 48), "K=48"),
        ("grouped_wgrad", (TENSOR, TENSOR), None, "use backend='cuda'"),
        ("quantize_rotated", (TENSOR,), None, "use backend='cuda'"),
    ],
)
def test_te_refuses_what_it_would_do_otherwise(emulated, op, formats, shape, reason):
    # Prevents: bits of another maximum or error measure than the operand's spec says it has.
    assert reason in te.BACKEND.why_not(op, formats, shape, "cuda")


def test_te_on_hopper_names_the_capability(emulated, monkeypatch):
    # Prevents: an exception from inside TE on the GPUs most people have.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for op, formats in (("quantize", (TOKEN,)), ("grouped_gemm", (TOKEN, TENSOR))):
        reason = te.BACKEND.why_not(op, formats, None, "cuda")
        assert "compute capability 10.0, this GPU has 9.0" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert te.BACKEND.why_not("grouped_gemm", (TOKEN, TENSOR), (16, 64, 64), "cuda") is None
