"""`describe`, `recipes` and `doctor` of a deterministic profile, named by itself or by a policy."""

import dataclasses
import json
import math

import pytest

pytest.importorskip("torch", reason="torch is not installed")
import torch

from megatron_nvfp4.__main__ import main
from megatron_nvfp4.deterministic.profiles import PROFILES

BF16, NVFP4 = PROFILES["sglang_det_bf16"], PROFILES["sglang_minite_nvfp4"]


def test_a_described_policy_names_its_profile(tmp_path, capsys):
    # Prevents: a check of names that refuses a policy which can run.
    file = tmp_path / "policy.yaml"
    file.write_text(f"deterministic: {NVFP4.name}\ndeterministic_sampler: tp2ep2\n")
    assert main(["describe", "--config", str(file)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"deterministic profile {NVFP4.name}: ")
    assert "experts    nvfp4(1x16, per-token) x nvfp4(1x16, per-tensor)" in text
    assert "--minite-deterministic-sampler tp2ep2" in text
    assert "--attention-backend triton --tp-size 2 --ep-size 2\n" in text
    assert (
        "recipe" not in text.split("variables that change numbers here")[0]
    )  # its default's is not run
    assert main(["describe", "--config", str(file), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["profile"]["sampler"] == "tp2ep2"
    assert "fprop" not in described


def test_a_profile_is_described_by_its_name(tmp_path, capsys):
    # Prevents: a profile that only a policy file can ask about, attention that it has not.
    for name, attention in ((BF16.name, "triton or fa3"), ("sglang_rl_fsdp", "fa3")):
        assert main(["describe", name]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"deterministic profile {name}: {PROFILES[name].summary}\n")
        assert f"(the profile has {attention})" in text
        assert main(["describe", name, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["name"] == name
    assert main(["describe", BF16.name, "--config", str(tmp_path / "policy.yaml")]) == 2
    assert "give one of them" in capsys.readouterr().err
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(profile.summary in listed for profile in PROFILES.values())


@pytest.mark.parametrize("name", PROFILES)
def test_doctor_runs_the_profile_of_a_policy(tmp_path, capsys, name):
    # Prevents: a report of the default recipe's paths, which no layer takes under a profile.
    file = tmp_path / "policy.yaml"
    attention = PROFILES[name].attention[-1]
    file.write_text(f"deterministic: {name}\ndeterministic_attention: {attention}\n")
    argv = ["doctor", "--device", "cpu", "--config", str(file)]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert f"profile {name}, {attention} attention, a sampler of tp1, on cpu\n  can run" in text
    assert "no sampler has these bits" in text
    assert "nvfp4_per_token" not in text
    assert main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["recipes"] == []
    assert report["profiles"][0]["profile"] == name


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda *_, **__: [torch.tensor([math.nan], requires_grad=True)], "not finite"),
        (lambda *_, **__: 1 / 0, "claimed, failed: ZeroDivisionError"),
    ],
)
def test_doctor_says_that_a_profile_failed(tmp_path, capsys, monkeypatch, damage, words):
    # Prevents: "can run" for a profile that was not run, or that computes NaN.
    from megatron_nvfp4.deterministic.model import Model

    monkeypatch.setattr(Model, "logprobs", damage)
    file = tmp_path / "policy.yaml"
    file.write_text(f"deterministic: {BF16.name}\n")
    assert main(["doctor", "--device", "cpu", "--config", str(file)]) == 1
    text = capsys.readouterr().out
    assert words in text
    assert "can run" not in text


def test_doctor_says_that_a_machine_has_not_the_profile(tmp_path, capsys, monkeypatch):
    # Prevents: a refusal by the GPU's generation that only a run's start shows.
    from megatron_nvfp4.deterministic import model

    original = model.run_facts
    monkeypatch.setattr(
        model, "run_facts", lambda *args: dataclasses.replace(original(*args), capability=(8, 0))
    )
    file = tmp_path / "policy.yaml"
    file.write_text(f"deterministic: {BF16.name}\n")
    assert main(["doctor", "--device", "cpu", "--config", str(file)]) == 1
    assert "cannot run: deterministic: this run cannot honour" in capsys.readouterr().out


def test_a_profile_is_no_recipe(capsys):
    # Prevents: a profile's name called unknown, where it is one of another kind.
    assert main(["doctor", "--recipe", "sglang_det_bf16"]) == 2
    assert "sglang_det_bf16 is a profile of the deterministic mode" in capsys.readouterr().err
