"""Profiles and their refusals, parity, captured outputs, and what a sampler must be started with."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
import torch

from megatron_nvfp4.__main__ import main
from megatron_nvfp4.deterministic import parity
from megatron_nvfp4.deterministic.profiles import PROFILES, RunFacts, SamplerRanks, faults, require
from megatron_nvfp4.deterministic.sampler import SamplerSettings, sampler_faults
from megatron_nvfp4.recipes import RECIPES

FACTS = RunFacts(
    model_type="qwen3_moe", attention="triton", num_heads=32, num_kv_heads=4, head_dim=128
)
BF16, NVFP4 = PROFILES["sglang_det_bf16"], PROFILES["sglang_minite_nvfp4"]
SAMPLER = """
SGLANG_ENABLE_JIT_DEEPGEMM=0
SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM=0
# started by:
python -m sglang.launch_server --enable-deterministic-inference --attention-backend triton
"""


# --- profiles -------------------------------------------------------------------------------------


def test_profiles_are_frozen():
    # Prevents: a renamed profile in everybody's scripts, an NVFP4 profile that computes BF16.
    assert list(PROFILES) == ["sglang_det_bf16", "sglang_rl_fsdp", "sglang_minite_nvfp4"]
    assert NVFP4.experts == RECIPES["nvfp4_per_token"].fprop
    assert replace(NVFP4, experts=BF16.experts).dense == BF16.dense == BF16.experts
    assert BF16.logprobs == "float32"
    assert PROFILES["sglang_rl_fsdp"].logprobs == "bfloat16"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, "model_type=llama"),
        ({"attention": "flashinfer"}, "use triton or fa3 on both sides"),
        ({"num_kv_heads": 32}, "32 heads on 32"),
        ({"head_dim": 256}, "of 256 dimensions"),
        ({"capability": (8, 0)}, "compute capability 8.0"),
        ({"params_dtype": "float16"}, "use --bf16"),
        ({"tensor_parallel": 2}, "of 2 for a sampler of tp1: its ranks do not add"),
        ({"tensor_parallel": 2, "sampler": SamplerRanks(2, 2), "num_experts": 8}, "of tp2ep2"),
        ({"tensor_parallel": 4}, "adds 4 partial sums in an order that NCCL's topology decides"),
        ({"expert_tensor_parallel": 2, "num_experts": 8}, "leave --expert-tensor-parallel-size"),
        ({"expert_parallel": 2}, "by slots on one rank"),
        ({"context_parallel": 2}, "all its keys"),
        ({"sequence_parallel": True}, "turn it off"),
        ({"hidden_dropout": 0.1}, "hidden_dropout=0.1"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"fused_loss": True}, "a fused loss"),
        ({"fused_rope": True}, "--no-rope-fusion"),
        ({"fused_swiglu": True}, "--no-bias-swiglu-fusion"),
        ({"router_dtype": "fp32"}, "moe_router_dtype=fp32"),
        ({"capacity_factor": 1.0}, "capacity factor 1.0"),
        ({"shared_experts": True}, "shared experts"),
        ({"sliding_window": True}, "sliding window"),
        ({"rope_scaling": True}, "scaled rope"),
    ],
)
def test_each_fact_that_breaks_a_profile_is_named(change, words):
    # Prevents: a run that is called bitwise and is not.
    assert faults(BF16, FACTS) == []
    found = faults(BF16, replace(FACTS, **change))
    assert len(found) == 1
    assert words in found[0]


def test_all_reasons_at_once():
    # Prevents: one restart per reason.
    bad = replace(FACTS, hidden_dropout=0.1, context_parallel=2, fused_loss=True)
    with pytest.raises(ValueError, match=r"sglang_det_bf16:\n(  - .+\n?){3}$"):
        require("sglang_det_bf16", bad)
    assert require("sglang_minite_nvfp4", FACTS) is NVFP4
    with pytest.raises(ValueError, match="use one of sglang_det_bf16"):
        require("sglang", FACTS)


def test_a_profile_without_its_operators_is_refused():
    # Prevents: a profile computed by the operators of another one.
    assert not any(profile.missing for profile in PROFILES.values())
    found = faults(replace(BF16, missing=("an operator", "another")), FACTS)
    assert found == [
        f"{name} is not implemented; use sglang_det_bf16" for name in ("an operator", "another")
    ]


def test_two_ranks_of_the_learner_are_those_of_the_sampler():
    # Prevents: a learner of two ranks refused, or taken with rows of the stream spread over them.
    both = replace(FACTS, tensor_parallel=2, sampler=SamplerRanks(2))
    for experts in (None, 2):
        shared = {"mlp_width": 64, "num_experts": 8, "expert_tensor_parallel": experts}
        assert faults(BF16, replace(both, **shared)) == []
    (fault,) = faults(BF16, replace(both, sequence_parallel=True))
    assert "norms read whole rows of the stream" in fault


# --- parity ---------------------------------------------------------------------------------------


def test_widths_and_models_that_a_profile_does_not_multiply():
    # Prevents: a layer's first product that fails without its name, and NVFP4 that quantises nothing.
    texts = faults(NVFP4, replace(FACTS, num_experts=0, hidden_size=72, mlp_width=40))
    assert [text.split(":")[0] for text in texts] == [
        "a model without experts",
        "hidden size of 72",
        "MLP width of 40",
    ]
    assert faults(BF16, replace(FACTS, num_experts=0, hidden_size=72, mlp_width=40)) == []
    assert "multiples of 8 in BF16" in faults(BF16, replace(FACTS, hidden_size=68))[0]


def _pair(shape=(2, 3)):
    tokens = torch.arange(6).view(shape)
    logprobs = -torch.arange(1.0, 7.0).view(shape)
    return tokens, logprobs, logprobs.clone()


def test_parity_of_equal_bits_passes():
    parity.check_parity(*_pair())


def test_first_difference_is_named_before_backward():
    # Prevents: a step on a gap that an average hides.
    tokens, sampler, learner = _pair()
    learner[1, 0] = torch.nextafter(learner[1, 0], torch.tensor(0.0))
    learner[1, 2] -= 0.5
    text = (
        r"sequence 1, token 0 \(id 3\): sampler -4\.0, learner -3\.99\d+, 1 ulp apart; "
        r"2 of 6 tokens differ, by up to 0\.5"
    )
    with pytest.raises(parity.ParityError, match=text) as caught:
        parity.check_parity(tokens, sampler, learner)
    assert (caught.value.sequence, caught.value.token, caught.value.num_unequal) == (1, 0, 2)


def test_masked_tokens_do_not_count():
    # Prevents: a prompt's or a pad's log-probability that stops a step.
    tokens, sampler, learner = _pair()
    learner[0, 0] = math.nan
    mask = torch.ones(2, 3, dtype=torch.bool)
    mask[0, 0] = False
    parity.check_parity(tokens, sampler, learner, mask)
    with pytest.raises(parity.ParityError, match="lets no token through"):
        parity.check_parity(tokens, sampler, learner, torch.zeros_like(mask))


def test_sequences_of_unequal_length_are_compared_as_they_come():
    # Prevents: a caller who pads by hand, and a padding that counts.
    tokens, sampler = [[5, 6, 7], [8]], [[-1.0, -2.5, -0.5], [-3.0]]
    learner = [torch.tensor(row, requires_grad=True) for row in sampler]
    parity.check_parity(tokens, sampler, learner)
    sampler[0][1] = -2.25
    with pytest.raises(parity.ParityError, match=r"sequence 0, token 1 \(id 6\).* 1 of 4 tokens"):
        parity.check_parity(tokens, sampler, learner)
    parity.check_parity(tokens, sampler, learner, [[True, False, True], [True]])
    with pytest.raises(
        ValueError, match=r"sampler_logprobs are \[\(3,\)\], of tokens \[\(3,\), \(1,\)\]"
    ):
        parity.check_parity(tokens, sampler[:1], learner)
    rounded = [learner[0].detach(), learner[1].detach().bfloat16()]
    with pytest.raises(ValueError, match=r"learner_logprobs are torch.bfloat16 and torch.float32"):
        parity.check_parity(tokens, sampler, rounded)
    parity.check_parity(tokens, learner, learner, [[True, False, True], [False]])
    parity.check_parity([[], [8]], [[], [-3.0]], [[], [-3.0]], [[], [True]])
    with pytest.raises(ValueError, match=r"a sequence of sampler_logprobs holds .*; give numbers"):
        parity.check_parity([[8]], [[(-3.0, 8, None)]], [[-3.0]])
    with pytest.raises(ValueError, match="tokens are no sequences"):
        parity.check_parity([], [], [])


def test_nan_is_no_parity():
    # Prevents: two NaN that count as agreement.
    tokens, sampler, learner = _pair()
    sampler[0, 1] = learner[0, 1] = math.nan
    with pytest.raises(parity.ParityError, match="nan ulp apart; 1 of 6"):
        parity.check_parity(tokens, sampler, learner)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t, s, n: (t, s.bfloat16(), n), "sampler_logprobs are torch.bfloat16"),
        (lambda t, s, n: (t, s, n.double()), "learner_logprobs are torch.float64"),
        (lambda t, s, n: (t, s[:, :2], n), "differ; give"),
        (lambda t, s, n: (t[0], s[0], n[0]), "give .B, T. each"),
    ],
)
def test_what_cannot_prove_parity_is_refused(change, text):
    # Prevents: equality at BF16 that is reported as equality.
    with pytest.raises(ValueError, match=text):
        parity.check_parity(*change(*_pair()))


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [(1.0, 1.0, 0), (0.0, -0.0, 0), (1.0, 1.0 + 2**-23, 1), (-(2**-149), 2**-149, 2)],
)
def test_ulp_distance(a, b, distance):
    # Prevents: a distance that jumps at zero.
    assert parity.ulp_distance(a, b) == parity.ulp_distance(b, a) == distance


# --- capture and compare --------------------------------------------------------------------------


def _captured_until_it_fails(value: torch.Tensor) -> dict[str, torch.Tensor]:
    try:
        with parity.capture() as inner:
            parity.record("a", value)
            raise KeyError
    except KeyError:
        return inner


def test_captures_nest_and_restore():
    # Prevents: a mode that an inner use, or an exception, leaves changed.
    one = torch.ones(1)
    assert parity.record("outside", one) is one
    with parity.capture() as outer:
        parity.record("a", one)
        inner = _captured_until_it_fails(one)
        parity.record("b", one)
        with pytest.raises(ValueError, match="b is recorded twice"):
            parity.record("b", one)
    parity.record("after", one)
    assert (list(outer), list(inner)) == (["a", "b"], ["a"])


def _dump(path, **changes):
    outputs = {"embedding": torch.arange(6.0).view(2, 3), "layers.0.qkv": torch.ones(2).bfloat16()}
    outputs["logprobs"] = torch.zeros(())
    parity.save_dump(outputs | changes, path)
    return str(path)


def test_compare_finds_the_first_operator(tmp_path, capsys):
    # Prevents: the last difference reported for the first, dumps read in alphabetical order.
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    left = _dump(tmp_path / "a")
    assert main(["compare", left, _dump(tmp_path / "b")]) == 0
    assert "all 3 outputs have the same bits" in capsys.readouterr().out
    other = torch.tensor([1.0, 1.0078125]).bfloat16()
    changed = {"layers.0.qkv": other, "logprobs": torch.ones(())}
    assert main(["compare", left, _dump(tmp_path / "c", **changed)]) == 1
    said = capsys.readouterr().out
    assert "layers.0.qkv differs at [1]: 1.0 against 1.0078125" in said
    assert "1 of 2 values" in said
    assert "the 1 output before it is the same, last embedding" in said
    assert main(["compare", left, _dump(tmp_path / "d", logprobs=-torch.zeros(()))]) == 1
    assert "logprobs differs at []: 0.0 against -0.0" in capsys.readouterr().out
    assert main(["compare", left, _dump(tmp_path / "e", logprobs=torch.zeros(1))]) == 1
    assert "torch.float32 () against torch.float32 (1,)" in capsys.readouterr().out


def test_compare_refuses_other_forwards(tmp_path, capsys):
    # Prevents: "no difference" over the operators that both happen to have.
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    assert main(["compare", _dump(tmp_path / "a"), _dump(tmp_path / "b", more=torch.ones(1))]) == 2
    assert "the first dump lacks more (1 in all)" in capsys.readouterr().err
    safetensors.save_file({"x": torch.ones(1)}, tmp_path / "plain")
    assert main(["compare", _dump(tmp_path / "a"), str(tmp_path / "plain")]) == 2
    assert "no dump of captured outputs" in capsys.readouterr().err


# --- the sampler's settings -----------------------------------------------------------------------


def test_settings_are_read_from_env_and_command_line():
    # Prevents: a bare flag that swallows the next one, a value behind = that is lost.
    settings = SamplerSettings.parse("A=b=c\n# X=1\nserve --one --two-words 2 --three=3\n")
    assert dict(settings.environment) == {"A": "b=c"}
    assert dict(settings.arguments) == {"one": "true", "two_words": "2", "three": "3"}


def test_a_launch_command_as_text():
    # Prevents: the documents' own command read as one variable, or as none.
    text = (
        "export C='0' D=1   # as the server's\nLESSOPEN=| /usr/bin/lesspipe %s\nPS1=it's\nE=\n"
        "A=0 B=x=y \\\n  python -m sglang.launch_server --model-path M \\\n"
        "  --attention-backend triton --tp-size=2 --enable-eplb\nF=1\n"
    )
    settings = SamplerSettings.parse(text)
    assert dict(settings.environment) == {
        "A": "0", "B": "x=y", "C": "0", "D": "1", "E": "", "F": "1",
        "LESSOPEN": "| /usr/bin/lesspipe %s", "PS1": "it's",
    }  # fmt: skip
    assert dict(settings.arguments) == {
        "model_path": "M",
        "attention_backend": "triton",
        "tp_size": "2",
        "enable_eplb": "true",
    }


def test_the_documents_command_agrees():
    # Prevents: a launch command in the documents that their own check does not take.
    text = (Path(__file__).parents[1] / "docs" / "deterministic.md").read_text()
    start = text.index("    export SGLANG_ENABLE_JIT_DEEPGEMM=0 SGLANG")
    command = text[start : text.index("\n\n", start)]
    assert sampler_faults(NVFP4, SamplerSettings.parse(command)) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--tensor-parallel 2", "--tp-size=2 --ep-size=1: the learner computes"),
        ("--tp 1 --tensor-parallel-size 2", "--tp-size=2 --ep-size=1: the learner computes"),
        ("--speculative-algo EAGLE", "--speculative-algorithm=EAGLE"),
        ("--kv-cache fp8_e4m3", "--kv-cache-dtype=fp8_e4m3"),
        ("--quant modelopt_fp4", "--quantization=modelopt_fp4"),
        ("--dcp-size 2", "--dcp-size=2: keys are spread"),
        ("--decode-attention-backend fa3", "--decode-attention-backend=fa3"),
        ("--attention-backend flashinfer", "--attention-backend=flashinfer"),
        ("--config more.yaml", "--config=more.yaml: what it sets is unknown"),
        ("--lora-paths a", "adapters add"),
    ],
)
def test_arguments_by_other_names(arguments, words):
    # Prevents: agreement over an argument that SGLang's parser knows by more than one name.
    (fault,) = sampler_faults(BF16, SamplerSettings.parse(f"{SAMPLER.rstrip()} {arguments}"))
    assert words in fault


def test_the_last_of_an_argument_counts():
    # Prevents: a fault, or none, for a value that the sampler overrides.
    text = SAMPLER.replace(
        "--attention-backend triton", "--attention-backend a --attention-b triton"
    )
    assert sampler_faults(BF16, SamplerSettings.parse(text)) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no command line in it"),
        (b"SGLANG_ENABLE_JIT_DEEPGEMM=0\nHOME=/root\n", "no command line in it"),
        (b"python -m sglang.launch_server --model-path 'M\n", "close the quotes"),
        (b"A=\xff\n", "can't decode byte 0xff"),
    ],
)
def test_files_without_settings(tmp_path, capsys, content, words):
    # Prevents: an error about zip(), or of Python's decoder alone, that names no file.
    file = tmp_path / "sampler.txt"
    file.write_bytes(content)
    assert main(["doctor", "--sampler", str(file)]) == 2
    said = capsys.readouterr().err
    assert f"{file}: " in said
    assert words in said


def test_a_sampler_that_agrees():
    assert sampler_faults(BF16, SamplerSettings.parse(SAMPLER)) == []
    with_plugin = SAMPLER.strip() + " --quantization minite_nvfp4\nSGLANG_PLUGINS=megatron_nvfp4,x"
    assert sampler_faults(NVFP4, SamplerSettings.parse(with_plugin)) == []


@pytest.mark.parametrize(
    ("profile", "old", "new", "words"),
    [
        (BF16, "--enable-deterministic-inference", "", "--enable-deterministic-inference is not"),
        (BF16, "-backend triton", "-backend flashinfer", "give triton or fa3"),
        (BF16, " --attention-backend triton", "", "--attention-backend is not given"),
        (BF16, "SGLANG_ENABLE_JIT_DEEPGEMM=0", "", "set SGLANG_ENABLE_JIT_DEEPGEMM=0"),
        (BF16, "MM_DEEPGEMM=0", "MM_DEEPGEMM=1", "MM_DEEPGEMM is '1' (line 3)"),
        (BF16, "triton\n", "triton --dtype float16\n", "--dtype=float16"),
        (BF16, "triton\n", "triton --tp-size 2\nNCCL_ALGO=allreduce:tree\n", "learner computes"),
        (BF16, "triton\n", "triton --ep-size=2\n", "a sampler of tp1ep2"),
        (BF16, "triton\n", "triton --kv-cache-dtype fp8_e4m3\n", "rounded again"),
        (BF16, "triton\n", "triton --quantization modelopt_fp4\n", "other kernels"),
        (BF16, "# started", "SGLANG_RETURN_ORIGINAL_LOGPROB=1\n#", "before the temperature"),
        (BF16, "# started", "SGLANG_TRITON_DECODE_SPLIT_TILE_SIZE=512\n#", "split elsewhere"),
        (NVFP4, "triton\n", "triton\n", "give --quantization minite_nvfp4"),
        (
            NVFP4,
            "triton\n",
            "triton --quantization minite_nvfp4\nSGLANG_PLUGINS=other\n",
            "leaves the plugin out",
        ),
    ],
)
def test_a_setting_that_changes_the_samplers_bits(profile, old, new, words):
    # Prevents: a gap between two installations that both call themselves deterministic.
    text = SAMPLER.replace(old, new)
    assert new == old or text != SAMPLER
    found = sampler_faults(profile, SamplerSettings.parse(text))
    assert len(found) == 1
    assert words in found[0]


@pytest.mark.parametrize("verb", ["describe", "doctor"])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("deterministic: nosuch", "'nosuch' is no profile; use one of sglang_det_bf16"),
        ("deterministic_attention: fa9", "attention=fa9: its order is unknown"),
        ("deterministic_sampler: foo", "'foo' names no ranks"),
        ("deterministic_sampler: tp4", "a sampler of 4 ranks"),
        ("recipe: nvfp4_per_token", "recipe of the policy: the profile says what is quantised"),
        ("layers: [{layer_numbers: [1], recipe: mxfp8}]", "layers of the policy: the profile"),
    ],
)
def test_names_of_a_policy_are_checked_before_a_run(tmp_path, capsys, verb, settings, words):
    # Prevents: a policy that is described as fine, and refused when its job has waited for its GPUs.
    file = tmp_path / "policy.yaml"
    profile = "" if settings.startswith("deterministic:") else f"deterministic: {BF16.name}\n"
    file.write_text(f"{profile}{settings}\n")
    assert main([verb, "--config", str(file)]) == 2
    assert words in capsys.readouterr().err


def test_doctor_reads_a_samplers_settings(tmp_path, capsys):
    # Prevents: a check that nobody can run.
    file = tmp_path / "sampler.txt"
    file.write_text(SAMPLER)
    assert main(["doctor", "--sampler", str(file)]) == 0
    assert "[ok]   no setting that is judged disagrees" in capsys.readouterr().out
    argv = ["doctor", "--sampler", str(file), "--profile", "sglang_minite_nvfp4"]
    assert main(argv) == 1
    assert "[FAIL] --quantization is not given" in capsys.readouterr().out
    assert main(["doctor", "--sampler", str(file), "--profile", "sglang_rl_fsdp"]) == 1
    assert "give --rl-on-policy-target fsdp" in capsys.readouterr().out
    assert main(["doctor", "--sampler", str(file), "--profile", "sglang"]) == 2
    assert "cannot be run; use one of sglang_det_bf16" in capsys.readouterr().err
    assert main(["doctor", "--sampler", str(tmp_path / "absent")]) == 2
    for option in (["--profile", "foo"], ["--sampler-ranks", "tp2"]):
        assert main(["doctor", *option]) == 2
        said = capsys.readouterr().err
        assert f"doctor {' '.join(option)}: says what a sampler must compute" in said
        assert "by --sampler FILE" in said


def test_doctor_compares_a_sampler_with_the_policys_learner(tmp_path, capsys):
    # Prevents: agreement of a sampler with a profile that the learner does not compute.
    from megatron_nvfp4.cli.sampler import examine_sampler

    sampler, policy = tmp_path / "sampler.txt", tmp_path / "policy.yaml"
    sampler.write_text(
        "SGLANG_ENABLE_JIT_DEEPGEMM=0\nSGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM=0\n"
        "--enable-deterministic-inference --attention-backend triton\n"
    )
    policy.write_text("deterministic: sglang_det_bf16\ndeterministic_attention: fa3\n")
    assert examine_sampler(sampler, config=policy) == 1
    assert "--attention-backend=triton: the policy's learner has fa3" in capsys.readouterr().out
    policy.write_text("deterministic: sglang_minite_nvfp4\n")
    assert examine_sampler(sampler, "sglang_det_bf16", config=policy) == 1
    assert "the policy's learner computes sglang_minite_nvfp4, not" in capsys.readouterr().out
    policy.write_text("deterministic: sglang_det_bf16\n")
    assert examine_sampler(sampler, config=policy) == 0
    wanted = "--minite-deterministic sglang_det_bf16 --minite-deterministic-attention triton"
    assert wanted in capsys.readouterr().out
