"""What doctor makes of a backend's claims and of the machine."""

import json
import sys
import tomllib
import types
from pathlib import Path

import pytest

from megatron_nvfp4.__main__ import main
from megatron_nvfp4.recipes import RECIPES, resolve

ROOT = Path(__file__).parents[1]
SELECTORS = ("MINITE_RECIPE", "MINITE_CONFIG", "MINITE_BACKEND", "DISABLE_BACKWARD_QUANT")


@pytest.fixture(autouse=True)
def _no_selectors(monkeypatch):
    for name in SELECTORS:
        monkeypatch.delenv(name, raising=False)


def _write(folder, text: str) -> str:
    path = folder / "policy.yaml"
    path.write_text(text)
    return str(path)


def _claims_all(op, formats, shape=None, device=None, dtype=None):
    return None


@pytest.fixture
def fake(monkeypatch):
    """A backend "fake" that is preferred to the reference and computes what the reference does."""
    pytest.importorskip("torch", reason="torch is not installed")
    from megatron_nvfp4 import backends

    reference = backends.get("reference")
    backend = types.SimpleNamespace(name="fake", why_not=_claims_all)
    for op in ("quantize", "gemm", "grouped_gemm", "grouped_wgrad"):
        setattr(backend, op, getattr(reference, op))
    module = types.ModuleType("fake_backend")
    module.BACKEND = backend
    monkeypatch.setitem(sys.modules, "fake_backend", module)
    monkeypatch.setitem(backends._MODULES, "fake", "fake_backend")
    monkeypatch.setattr(backends, "PREFERENCE", ("fake", "reference"))
    return backend


def _doctor(capsys, *words: str) -> tuple[int, str]:
    status = main(["doctor", "--device", "cpu", *words])
    return status, capsys.readouterr().out


def _at_128(function):
    def fails_at_128(a, *args, **kwargs):
        if a.shape[1] == 128:
            raise RuntimeError("CUDA error: invalid argument")
        return function(a, *args, **kwargs)

    return fails_at_128


@pytest.mark.parametrize("op", ["quantize", "gemm", "grouped_gemm", "grouped_wgrad"])
def test_doctor_reports_a_claim_that_fails_at_one_size(fake, capsys, op):
    # Prevents: "available" where every layer with K % 128 == 0 fails (TransformerEngine 2956).
    setattr(fake, op, _at_128(getattr(fake, op)))
    status, text = _doctor(capsys, "--recipe", "nvfp4_per_token")
    assert status == 1
    assert "fake: claimed, failed: K=128: RuntimeError: CUDA error: invalid argument" in text
    assert "K=192: RuntimeError" not in text
    assert "reference: ok" in text
    assert "doctor: FAILED" in text


def _off_by_one_code(function):
    def wrong(*args, **kwargs):
        out = function(*args, **kwargs)
        if hasattr(out, "codes"):
            import torch

            out.codes.view(torch.uint8)[0, 0] ^= 1
        return out

    return wrong


def _nan_somewhere(function):
    def wrong(*args, **kwargs):
        out = function(*args, **kwargs)
        out[3, 5] = float("nan")
        return out

    return wrong


def _without_bias(function):
    return lambda *args, bias=None, **kwargs: function(*args, bias=None, **kwargs)


def _never_accumulates(function):
    return lambda *args, accumulate, **kwargs: function(*args, accumulate=False, **kwargs)


def _leaves_empty_groups(function):
    def wrong(a, b, offsets, *, out, accumulate):
        kept = [t.clone() for t in out]
        function(a, b, offsets, out=out, accumulate=accumulate)
        for start, stop, target, before in zip(offsets, offsets[1:], out, kept, strict=False):
            if start == stop:
                target.copy_(before)

    return wrong


@pytest.mark.parametrize(
    ("op", "damage", "message"),
    [
        ("quantize", _off_by_one_code, "codes: 1 of 3072 bytes differ"),
        ("gemm", _nan_somewhere, "outputs exceed the bound"),
        ("gemm", _without_bias, "outputs exceed the bound"),
        ("grouped_gemm", _without_bias, "outputs exceed the bound"),
        ("grouped_wgrad", _never_accumulates, "outputs exceed the bound"),
        ("grouped_wgrad", _leaves_empty_groups, "outputs exceed the bound"),
    ],
)
def test_doctor_compares_what_came_out(fake, capsys, op, damage, message):
    # Prevents: "ok" for a kernel that runs and computes something else.
    setattr(fake, op, damage(getattr(fake, op)))
    status, text = _doctor(capsys, "--recipe", "nvfp4_per_token")
    assert status == 1
    assert "fake: claimed, failed: K=128: RuntimeError: " in text
    assert message in text


@pytest.mark.parametrize("op", ["rotated", "stochastic"])
def test_doctor_compares_rotated_and_random_bits(fake, capsys, op):
    # Prevents: "ok" for a quantiser that forgets to rotate, or to round at random.
    original = fake.quantize

    def wrong(x, spec, **options):
        if op == "rotated":
            options["rotated"] = False
        elif spec.rounding == "stochastic":
            options["seed"] += 1
        return original(x, spec, **options)

    fake.quantize = wrong
    status, text = _doctor(capsys, "--recipe", "nvfp4_pretrain")
    assert status == 1
    assert "fake: claimed, failed: K=128: RuntimeError: codes" in text


def test_doctor_says_no_with_the_reason(fake, capsys):
    # Prevents: a missing kernel counted as a failure, or its reason lost.
    fake.why_not = lambda *_: "no kernel on this machine"
    status, text = _doctor(capsys, "--recipe", "nvfp4_per_token")
    assert status == 0
    assert "fake: no: no kernel on this machine" in text
    assert "can run" in text
    assert "doctor: ok" in text


def test_doctor_survives_a_backend_that_cannot_be_imported(fake, capsys, monkeypatch):
    # Prevents: a broken optional package that takes the diagnosis down with it.
    from megatron_nvfp4 import backends

    monkeypatch.setitem(backends._MODULES, "broken", "no_such_module_anywhere")
    monkeypatch.setattr(backends, "PREFERENCE", ("reference", "broken"))
    import torch

    from megatron_nvfp4.cli.probes import paths_of, probe
    from megatron_nvfp4.modules.params import QLinearParams

    path = paths_of(QLinearParams(recipe=RECIPES["mxfp8"]))[0]
    outcomes = probe(path, torch.device("cpu"))
    assert [outcome.status for outcome in outcomes] == ["ok", "ok", "failed", "failed"]
    assert "no_such_module_anywhere" in outcomes[-1].detail


def test_doctor_fails_where_no_backend_runs_the_recipe(fake, capsys, monkeypatch):
    # Prevents: exit status 0 for a recipe that refuses to build.
    from megatron_nvfp4 import backends

    fake.why_not = lambda *_: "no kernel on this machine"
    monkeypatch.setattr(type(backends.get("reference")), "features", frozenset({"nvfp4"}))
    status, text = _doctor(capsys, "--recipe", "nvfp4_per_token")
    assert status == 1
    assert "reference: ok" in text  # the forward
    assert "reference: no: mxfp8 is not implemented" in text
    assert "cannot run: recipe nvfp4_per_token needs mxfp8, nvfp4" in text


def test_doctor_probes_each_operation_of_a_recipe(fake, capsys):
    # Prevents: a path that training takes and doctor does not (and a bypass tried on the reference).
    def found(recipe: str) -> dict[str, set[str]]:
        report = json.loads(_doctor(capsys, "--recipe", recipe, "--json")[1])["recipes"][0]
        paths: dict[str, set[str]] = {}
        for row in report["paths"]:
            paths.setdefault(row["path"], set()).add(row["backend"])
            assert row["K"] in (128, 192)
        return paths

    ours = {"fake", "reference"}
    nvfp4 = "nvfp4(1x16, per-token) x nvfp4(1x16, per-tensor)"
    assert found("nvfp4_per_token") == {
        "quantize nvfp4(1x16, per-token)": ours,
        "quantize nvfp4(1x16, per-tensor)": ours,
        f"gemm {nvfp4}": ours,
        f"grouped_gemm {nvfp4}": ours,
        "quantize mxfp8(1x32)": ours,
        "gemm mxfp8(1x32) x mxfp8(1x32)": ours,
        "grouped_gemm mxfp8(1x32) x mxfp8(1x32)": ours,
        "grouped_wgrad mxfp8(1x32) x mxfp8(1x32)": ours,
    }
    unquantized = {f"{op} bf16 x bf16" for op in ("gemm", "grouped_gemm", "grouped_wgrad")}
    assert found("bf16") == {path: {"cuda", "torch"} for path in unquantized}
    dequantized = found("nvfp4_per_token_dequant_bwd")
    assert all(dequantized[path] == ours for path in unquantized)
    rotated = "quantize_rotated nvfp4(1x16, per-tensor, stochastic)"
    assert found("nvfp4_pretrain")[rotated] == ours
    assert "quantize e3m2(1x16, per-token)" in found("sweep_e3m2")


def test_doctor_examines_every_recipe_of_the_policy(fake, capsys, tmp_path):
    # Prevents: a policy file whose exceptions were never tried.
    text = (
        "recipe: mxfp8\nshared_experts: bf16\nlayers: [{layer_numbers: [1], recipe: nvfp4_w4a16}]"
    )
    report = json.loads(_doctor(capsys, "--config", _write(tmp_path, text), "--json")[1])
    assert [r["recipe"] for r in report["recipes"]] == ["mxfp8", "nvfp4_w4a16", "bf16"]


def test_doctor_lists_environment_faults_at_once(capsys, monkeypatch):
    # Prevents: one fault per run; a report "ok" beside a variable that means nothing.
    monkeypatch.setenv("MINITE_RECIPES", "bf16")
    monkeypatch.setenv("MINITE_BACKEND", "gpu")
    status, text = _doctor(capsys)
    assert status == 1
    assert "did you mean MINITE_RECIPE?" in text
    assert "MINITE_BACKEND='gpu'" in text


def test_doctor_verbose_has_the_traceback(fake, capsys):
    # Prevents: a finding nobody can trace.
    fake.gemm = _at_128(fake.gemm)
    status, text = _doctor(capsys, "--recipe", "nvfp4_per_token", "--verbose")
    assert status == 1
    assert "fails_at_128" in text
    assert "fails_at_128" not in _doctor(capsys, "--recipe", "nvfp4_per_token")[1]


def test_select_moves_on_or_raises_with_the_reasons(fake):
    # Prevents: a launch on a backend that said no; an error that names only the last candidate.
    from megatron_nvfp4 import backends
    from megatron_nvfp4.recipes import MXFP8

    def not_at_128(op, formats, shape=None, device=None, dtype=None):
        return "K=128 is not supported; use K=192" if shape and shape[-1] == 128 else None

    fake.why_not = not_at_128
    assert backends.select("quantize", (MXFP8,), shape=(1, 192)).name == "fake"
    assert backends.select("quantize", (MXFP8,), shape=(1, 128)).name == "reference"
    with pytest.raises(RuntimeError, match=r"\(1, 128\)(?s:.*)fake: K=128 is not supported; use"):
        backends.select("quantize", (MXFP8,), shape=(1, 128), backend="fake")
    fake.why_not = lambda *_: "not on this machine"
    with pytest.raises(RuntimeError, match=r"fake: not on(?s:.*)reference: K=48 is not a multiple"):
        backends.select("quantize", (MXFP8,), shape=(1, 48))


# --- the machine ----------------------------------------------------------------------------------


def test_doctor_passes_on_the_reason_of_the_install(monkeypatch, capsys):
    # Prevents: "cuda: no" without the step that was skipped; mangled symbols for everybody.
    pytest.importorskip("torch", reason="torch is not installed")
    from megatron_nvfp4.backends import extension

    monkeypatch.setattr(extension, "why_not_cuda", lambda: "not built (no nvcc at install)")
    monkeypatch.setattr(extension, "why_not_cpu", lambda v=False: "_ZN2at" if v else "short")
    assert main(["doctor", "--device", "cpu", "--recipe", "bf16"]) == 0
    text = capsys.readouterr().out
    assert "cuda: not built (no nvcc at install)" in text
    assert "cpu: short" in text
    main(["doctor", "--device", "cpu", "--recipe", "bf16", "--verbose"])
    assert "cpu: _ZN2at" in capsys.readouterr().out


def test_doctor_warns_of_an_untested_megatron(monkeypatch):
    # Prevents: a wrong release passing for the tested one; the tested one drifting from the pin.
    from megatron_nvfp4.cli import doctor

    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"megatron-core=={doctor.TESTED_MEGATRON}" in pins["megatron"]
    for version, status in ((doctor.TESTED_MEGATRON, "ok"), ("0.18.0", "warn"), (None, "warn")):
        monkeypatch.setattr(doctor, "_version", lambda name, v=version: v)
        monkeypatch.setattr(doctor, "_extension_checks", lambda verbose: [])
        (check,) = [c for c in doctor.software_checks(False) if c.name == "megatron-core"]
        assert check.status == status
        assert doctor.TESTED_MEGATRON in check.detail


def test_doctor_asked_for_a_gpu_that_is_not_there(monkeypatch, capsys):
    # Prevents: checking the CPU in its place and reporting success.
    torch = pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--device", "cuda", "--recipe", "bf16"]) == 1
    assert "torch sees no CUDA GPU; use --device cpu" in capsys.readouterr().out


def test_doctor_advises_on_the_sampler(monkeypatch):
    # Prevents: a sampler whose fast math or other scales differ from the learner's bits.
    from megatron_nvfp4.cli.doctor import sampler_notes

    for name in (fast := "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH", "NVTE_USE_FAST_MATH"):
        monkeypatch.delenv(name, raising=False)
    notes = "\n".join(sampler_notes(resolve("nvfp4_per_token_4over6", environ={})))
    assert f"{fast} is not 1" in notes
    assert "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION" in notes
    assert "four-over-six must be the same in the sampler: nvfp4(1x16, per-token" in notes
    assert "TP > 1" in notes
    assert "NVTE" not in notes
    monkeypatch.setenv(fast, "1")
    assert fast not in "\n".join(sampler_notes(resolve("nvfp4_per_token", environ={})))
    notes = "\n".join(sampler_notes(resolve("nvfp4_pretrain", environ={})))
    assert "16x16 tiles" in notes
    assert "PER_TOKEN" not in notes
    assert sampler_notes(resolve("mxfp8", environ={})) == []
