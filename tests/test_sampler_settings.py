"""What `doctor --sampler` makes of launch scripts as people have them, and what it says of them."""

import json

import pytest

from megatron_nvfp4.__main__ import main
from megatron_nvfp4.deterministic.profiles import PROFILES
from megatron_nvfp4.deterministic.sampler import SamplerSettings, launch_command, sampler_faults

BF16, RL = PROFILES["sglang_det_bf16"], PROFILES["sglang_rl_fsdp"]
ZEROS = "SGLANG_ENABLE_JIT_DEEPGEMM=0 SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM=0"
FLAGS = "--enable-deterministic-inference --attention-backend triton"
SERVER = "python -m sglang.launch_server --model-path M"
PRINTED = f"{ZEROS.replace(' ', chr(10))}\n"


def _faults(text: str, profile=BF16) -> list[str]:
    return sampler_faults(profile, SamplerSettings.parse(text))


# --- wrong samplers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--rl-on-policy-target fsdp", "--rl-on-policy-target=fsdp: other kernels and roundings"),
        ("--enable-torch-compile", "a compiler fuses operators"),
        ("--pp-size 2", "layers are spread over ranks"),
        ("--moe-a2a-backend deepep", "experts' sums run elsewhere"),
        ("--json-model-override-args '{\"rope_theta\": 1}'", "not its config.json's"),
        ("--model-impl transformers", "the model has other operators"),
        ("--enable-mixed-chunk", "decoded rows take a prompt's order"),
        ("--enable-fused-qk-norm-rope", "not rounded between norm and rotation"),
        ("--bf16-gemm-backend gemv", "products of few rows"),
        ("--dtype half", "--dtype=half"),
        ("--kv-cache-dtype fp8_e5m2", "rounded again"),
        ("--speculative-algorithm EAGLE", "other batches of rows"),
    ],
)
def test_what_breaks_the_claim_is_a_fault(arguments, words):
    # Prevents: "ok" for a sampler of one rank that computes something else.
    (fault,) = _faults(f"{PRINTED}{SERVER} {FLAGS} {arguments}")
    assert words in fault


def test_defaults_given_by_name_are_no_faults():
    # Prevents: a refusal of what SGLang does by itself; --model taken for an abbreviation of --model-impl.
    more = "--dtype auto --moe-runner-backend auto --pp-size 1 --json-model-override-args '{}'"
    assert _faults(f"{PRINTED}python -m sglang.launch_server --model M {FLAGS} {more}") == []
    assert (
        _faults(f"{PRINTED}{SERVER} --rl-on-policy-target fsdp --attention-backend fa3", RL) == []
    )


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (f"{SERVER} {FLAGS}\n\n{SERVER} --port 2", ("line 1 (python -m", "line 3 (python -m")),
        (f"{SERVER} {FLAGS} & {SERVER}", ("line 1", "line 1")),
        (f"{SERVER}\n{FLAGS}", ("line 1", "line 2 (--enable-det")),
        (f"{SERVER} \\\n --port 1\nserve\nsglang serve {FLAGS}", ("line 1", "line 4")),
        (f"start {FLAGS}\nstart --b 1", ("line 1 (start", "line 2 (start")),
    ],
)
def test_two_servers_in_one_file_are_refused(text, lines):
    # Prevents: a server without the flags that takes those of another.
    with pytest.raises(ValueError, match="arguments of two commands") as caught:
        SamplerSettings.parse(PRINTED.replace("\n", ";") + text)
    first, second = lines
    assert f"in {first}" in str(caught.value)
    assert f"and {second}" in str(caught.value)


def test_other_commands_arguments_are_not_the_servers():
    # Prevents: flags of git, curl or docker judged, or missed, as SGLang's.
    text = f"git clone --depth 1 X\nset -e\n{ZEROS} {SERVER} {FLAGS} 2>&1 | tee --append log\n"
    settings = SamplerSettings.parse(text)
    assert settings.arguments.keys() == {
        "model_path", "enable_deterministic_inference", "attention_backend",
    }  # fmt: skip
    assert sampler_faults(BF16, settings) == []


@pytest.mark.parametrize(
    "text",
    [
        f"export {ZEROS}\nunset SGLANG_ENABLE_JIT_DEEPGEMM\n{SERVER} {FLAGS}",
        f"export {ZEROS}; unset SGLANG_ENABLE_JIT_DEEPGEMM; {SERVER} {FLAGS}",
        f"export {ZEROS}\nenv -u SGLANG_ENABLE_JIT_DEEPGEMM {SERVER} {FLAGS}",
        f"export {ZEROS.split()[1]}\n{ZEROS} python warm.py --quick\n{SERVER} {FLAGS}",
        f"export {ZEROS}\nenv -uSGLANG_ENABLE_JIT_DEEPGEMM {SERVER} {FLAGS}",
        f"export {ZEROS}\nenv --unset=SGLANG_ENABLE_JIT_DEEPGEMM {SERVER} {FLAGS}",
        f"export {ZEROS}\nenv -i {ZEROS.split()[1]} {SERVER} {FLAGS}",
        f"export {ZEROS}\nsudo {ZEROS.split()[1]} {SERVER} {FLAGS}",
        f"export {ZEROS}\n/usr/bin/docker run -e {ZEROS.split()[1]} img {SERVER} {FLAGS}",
    ],
)
def test_variables_that_the_server_does_not_get(text):
    # Prevents: "ok" for a variable that was unset, or set for another command alone.
    (fault,) = _faults(text)
    assert "SGLANG_ENABLE_JIT_DEEPGEMM is not set" in fault
    assert fault.endswith("SGLANG_ENABLE_JIT_DEEPGEMM=0")


def test_commands_that_look_for_the_server_are_none():
    # Prevents: a script refused because it ends the last server first.
    assert _faults(f"pkill -9 -f sglang.launch_server\n{PRINTED}{SERVER} {FLAGS}") == []


def test_ranks_that_are_not_the_policys(tmp_path, capsys):
    # Prevents: "ok" for a sampler of two whose learner computes one.
    sampler, policy = tmp_path / "s", tmp_path / "p.yaml"
    sampler.write_text(f"\ufeff{PRINTED}{SERVER} {FLAGS} --tp-size 2", encoding="utf-8")
    policy.write_text("deterministic: sglang_det_bf16\n")
    argv = ["doctor", "--sampler", str(sampler), "--config", str(policy), "--sampler-ranks", "tp2"]
    assert main(argv) == 1
    assert "computes a sampler of tp1, not of tp2" in capsys.readouterr().out


def test_a_variable_set_again_counts():
    # Prevents: an `unset` that outlives the next export.
    text = f"unset SGLANG_ENABLE_JIT_DEEPGEMM\nexport {ZEROS}\n{SERVER} {FLAGS}"
    assert _faults(text) == []


def test_arguments_that_are_not_judged_are_listed(tmp_path, capsys):
    # Prevents: an "ok" that seems to cover every argument given.
    file = tmp_path / "sampler.txt"
    file.write_text(f"{PRINTED}{SERVER} {FLAGS} --load-format dummy --disaggregation-mode decode")
    assert main(["doctor", "--sampler", str(file)]) == 0
    listed = ["--model-path", "--load-format", "--disaggregation-mode"]
    assert f"not judged: {', '.join(listed)}\n" in capsys.readouterr().out
    assert main(["doctor", "--sampler", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_judged"] == listed
    file.write_text(f"{PRINTED}{FLAGS}")
    assert main(["doctor", "--sampler", str(file)]) == 0
    assert "not judged" not in capsys.readouterr().out


# --- right samplers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"cd /srv && {ZEROS} nohup {SERVER} {FLAGS} &",
        f"+ export {ZEROS}\n++ {SERVER} {FLAGS}",
        f"$ {ZEROS} {SERVER} {FLAGS}",
        f"{PRINTED}sglang serve {FLAGS}",
        f"{PRINTED}A=1 python /opt/launch_server.py {FLAGS}",
        f"docker run --gpus all -e {ZEROS.replace(' ', ' --env ')} --ipc=host img {SERVER} {FLAGS}",
        f"podman run -e{ZEROS.replace(' ', ' --env=')} img {SERVER} {FLAGS}",
        f"export {ZEROS}\ndocker run -e {ZEROS.replace(' ', ' -e ').replace('=0', '')} i {SERVER} {FLAGS}",
        f"{PRINTED.replace('=0', '=False')}{SERVER} {FLAGS}",
    ],
)
def test_a_right_sampler_however_it_is_started(text):
    # Prevents: a false fault for what a shell, docker or SGLang's own parser understands.
    assert _faults(text) == []


def test_a_container_gets_what_it_is_given():
    # Prevents: "ok" for an exported variable that docker keeps outside.
    found = _faults(f"export {ZEROS}\ndocker run -e {ZEROS.split()[0]} img {SERVER} {FLAGS}")
    assert len(found) == 1
    assert "MM_DEEPGEMM is not set" in found[0]
    assert "such as -e SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM=0" in found[0]


SLIME = f"""
export {ZEROS}
MODEL_ARGS=(
   --attention-backend flash
)
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
   --sglang-enable-deterministic-inference
   --sglang-attention-backend triton
)
RUNTIME="{{
  \\"env_vars\\": {{}}
}}"
ray start --head --num-gpus $NUM_GPUS
ray job submit --address=http://a:1 -- python3 train.py ${{MODEL_ARGS[@]}} ${{SGLANG_ARGS[@]}}
"""


def test_the_prefix_of_slime_and_miles():
    # Prevents: the trainer's --attention-backend judged as the sampler's, and the sampler's not found.
    settings = SamplerSettings.parse(SLIME)
    assert dict(settings.arguments) == {
        "tp_size": "2",
        "mem_fraction_static": "0.7",
        "enable_deterministic_inference": "true",
        "attention_backend": "triton",
    }
    assert sampler_faults(BF16, settings, "tp2") == []
    words = "--sglang-enable-deterministic-inference --sglang-attention-backend triton"
    traced = f"+ export {ZEROS}\n+ SGLANG_ARGS=({words})\n+ ray job submit -- python3 t.py --lr 1 {words}"
    assert _faults(traced) == []
    assert _faults(f"export {ZEROS}\nSGLANG_ARGS=({words})") == []


# --- what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            f"{PRINTED}\nexport SGLANG_ENABLE_JIT_DEEPGEMM=${{JIT:-0}}\n{SERVER} {FLAGS}",
            "SGLANG_ENABLE_JIT_DEEPGEMM is '${JIT:-0}' (line 4) (variables are not expanded here",
        ),
        (
            f"{PRINTED}SGLANG_ENABLE_JIT_DEEPGEMM=1 \\\n {SERVER} {FLAGS}",
            "SGLANG_ENABLE_JIT_DEEPGEMM is '1' (line 3): DeepGEMM's bits were not compared; give 0",
        ),
        (
            f"{PRINTED}SGLANG_RETURN_ORIGINAL_LOGPROB=yes\n{FLAGS}",
            "SGLANG_RETURN_ORIGINAL_LOGPROB is 'yes' (line 3)",
        ),
        (
            f"{PRINTED}{SERVER} {FLAGS} --attention-backend $BACKEND",
            "--attention-backend=$BACKEND (variables are not expanded here, write the command line as "
            "`set -x` prints it); give triton or fa3",
        ),
        (f"{PRINTED}{SERVER} {FLAGS} --tp-size ${{TP}}", "--tp-size=${TP} (variables are not"),
        (f'{PRINTED}{SERVER} {FLAGS} "${{MORE[@]}}"', "${MORE[@]} in the command line: variables"),
        (f"{PRINTED}{SERVER} {FLAGS} --trust-remote-code $MORE", "$MORE in the command line"),
        (f"{PRINTED}{SERVER} {FLAGS} --enable-$MORE", "--enable-$MORE in the command line"),
        (f"{PRINTED}{SERVER} {FLAGS} --{{a,b}}", "--{a,b} in the command line"),
        (f"{PRINTED}{SERVER} {FLAGS} x${{MORE}}", "x${MORE} in the command line"),
        (
            f"export {ZEROS}\n# {SERVER} \\\nexport SGLANG_ENABLE_JIT_DEEPGEMM=1\n{SERVER} {FLAGS}",
            "SGLANG_ENABLE_JIT_DEEPGEMM is '1' (line 3)",
        ),
        (
            f"export {ZEROS}\nif x; then export SGLANG_ENABLE_JIT_DEEPGEMM=1; fi\n{SERVER} {FLAGS}",
            "SGLANG_ENABLE_JIT_DEEPGEMM is '1' (line 2)",
        ),
        (
            f"{PRINTED}A=(--sglang-enable-deterministic-inference --sglang-attention-backend triton)\n"
            "A+=(--sglang-enable-torch-compile)",
            "a compiler fuses operators",
        ),
    ],
)
def test_a_fault_says_what_was_found_and_where(text, words):
    # Prevents: "is not 0" for a value that a shell would have made 0.
    (fault,) = _faults(text)
    assert words in fault


def test_a_model_path_may_be_a_variable():
    # Prevents: a fault over a value that is not judged.
    assert _faults(f"{PRINTED}{SERVER} --model-path $MODEL {FLAGS}") == []


def test_an_engine_in_python_is_told_apart(tmp_path, capsys):
    # Prevents: "no command line" for a script that has its arguments as keywords.
    file = tmp_path / "sampler.py"
    file.write_text(
        'engine = sgl.Engine(\n    model_path="it\'s",\n    attention_backend="triton")\n'
    )
    assert main(["doctor", "--sampler", str(file)]) == 2
    assert "write the Engine's arguments as flags, one line" in capsys.readouterr().err


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name)
@pytest.mark.parametrize("ranks", ["tp1", "tp2", "tp2ep2"])
def test_the_command_of_a_profile_agrees_with_it(profile, ranks):
    # Prevents: a described command that the check of the same profile refuses.
    for attention in profile.attention:
        settings = SamplerSettings.parse(launch_command(profile, attention, ranks))
        assert sampler_faults(profile, settings, ranks) == []


def test_a_profile_without_a_sampler_is_told_where_it_belongs():
    # Prevents: a profile that is named and not looked at.
    from megatron_nvfp4.cli.sampler import examine_sampler

    with pytest.raises(ValueError, match=r"doctor --profile foo: .* by --sampler FILE"):
        examine_sampler(None, "foo")
    with pytest.raises(ValueError, match=r"doctor --sampler-ranks tp2: .* by --sampler FILE"):
        examine_sampler(None, ranks="tp2")
