"""Readers of RL dumps: every layout gives the same record, and a file that cannot be used says why."""

import json
from dataclasses import replace

import diagnose_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nvfp4.diagnostics.readers import Response, join, read, save
from megatron_nvfp4.diagnostics.readers_torch import zigzag


def same(found, wanted, *columns):
    for name in columns or ("learner", "sampler", "advantages", "tokens", "rewards"):
        got, expected = getattr(found, name), getattr(wanted, name)
        assert torch.equal(got[used(found, got)], expected[used(wanted, expected)]), name
    assert torch.equal(found.steps, wanted.steps)


def used(found, values):
    """Tokens in the loss: what stands at masked ones is not part of any layout."""
    return found.mask if values.shape == found.mask.shape else slice(None)


@pytest.fixture
def made():
    return cases.responses(num=6, length=40, steps=2)


# --- layouts ----------------------------------------------------------------------------------------


def test_slime(tmp_path, made):
    # Prevents: prompt tokens in the response; weight versions of another sample.
    found = read([cases.write_slime(tmp_path / "dump", made)])
    same(found, join(made))
    assert found.versions == tuple(x.versions for x in made)
    assert [name for _, name, _ in found.sources] == ["slime train_data"] * 2


def test_slime_rollout_has_no_learner(tmp_path, made):
    # Prevents: a rollout dump taken for a train dump with gaps of 0.
    cases.write_rollout(tmp_path / "0.pt", 0, made)
    found = read([tmp_path / "0.pt"])
    assert found.learner is None
    assert found.delta is None
    assert torch.equal(found.sampler, torch.cat([x.sampler for x in made]).double())


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_miles(tmp_path, made, cp_size, tp_size):
    # Prevents: tensor-parallel copies counted as responses; slices put together in a wrong order; an
    # earlier pipeline stage's file, which has no log-probs, hiding those of the last one.
    found = read([cases.write_miles(tmp_path / "dump", made, cp_size=cp_size, tp_size=tp_size)])
    same(found, join(made))
    assert found.versions == tuple(x.versions for x in made)


def test_miles_without_a_rank(tmp_path, made):
    # Prevents: gaps computed from half of the sequence.
    folder = cases.write_miles(tmp_path / "dump", made, cp_size=2)
    (folder / "train_data" / "0_1.pt").unlink()
    with pytest.raises(ValueError, match=r"lacks the context-parallel ranks \[1\] of 2"):
        read([folder])


def test_miles_sliced_without_a_rank_number(tmp_path, made):
    # Prevents: a slice of an old dump read as the whole response.
    folder = cases.write_miles(tmp_path / "dump", made, cp_size=2)
    for path in (folder / "train_data").iterdir():
        content = torch.load(path, weights_only=True)
        del content["cp_rank"], content["cp_size"]
        torch.save(content, path)
    with pytest.raises(ValueError, match="names no context-parallel rank"):
        read([folder])


def test_miles_policy_loss(tmp_path, made):
    # Prevents: the live log-probs taken for those before the update.
    found = read([cases.write_policy_loss(tmp_path / "dump", made)])
    same(replace(found, steps=join(made).steps), join(made), "learner", "sampler", "advantages")
    assert set(found.steps.tolist()) == {7}


def test_nemo(tmp_path, made):
    # Prevents: prompt and padding inside responses, a batch of one read as one token.
    found = read([cases.write_nemo(tmp_path / "logs", made)])
    same(found, join(made))


def test_nemo_sample_mask_and_filtered_rows(tmp_path, made):
    # Prevents: samples out of the loss counted; rows behind the filtered ones, which are empty, failing.
    path = cases.write_nemo(tmp_path, made) / "train_data_step0.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["sample_loss_mask"] = [0.0]
    rows[1]["filtered_rewards"] = [0.25]
    rows.append({name: [] for name in rows[0]} | {"rewards": [1.0]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read([path])
    assert found.num_responses == 3
    assert not found.mask[: found.offsets[1]].any()
    assert found.rewards[1] == 0.25


def test_nemo_row_whose_first_token_is_in_the_loss(tmp_path, made):
    # Prevents: a gap made of the place in front of the first log-prob.
    path = cases.write_nemo(tmp_path, made) / "train_data_step0.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["token_loss_mask"] = [[1] * len(rows[0]["token_loss_mask"][0])]
    path.write_text(json.dumps(rows[0]) + "\n")
    found = read([path])
    assert found.mask.numel() == rows[0]["input_lengths"][0] - 1


def test_triage(tmp_path, made):
    # Prevents: a scalar advantage refused; lines of other ranks lost.
    found = read([cases.write_triage(tmp_path / "window", made)])
    wanted = join(made)
    assert found.learner is None
    assert found.num_responses == wanted.num_responses
    assert torch.equal(found.delta.sort().values, wanted.delta.sort().values)
    assert torch.equal(found.advantages.sort().values, wanted.advantages.sort().values)


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_own_format(tmp_path, made, ending):
    # Prevents: a record that does not survive its own file.
    save(join(made), tmp_path / f"run{ending}")
    found = read([tmp_path / f"run{ending}"])
    same(found, join(made))
    assert found.versions == tuple(x.versions for x in made)


def test_gaps_alone_survive(tmp_path):
    # Prevents: a file of gaps that gets log-probs nobody recorded.
    save(cases.of_gaps(([0.5, -0.25], [1.0, -1.0])), tmp_path / "gaps.pt")
    found = read([tmp_path / "gaps.pt"])
    assert found.learner is None
    assert found.delta.tolist() == [0.5, -0.25]


def test_several_paths_are_sorted_by_step(tmp_path, made):
    # Prevents: trends over steps in the order of file names.
    late, early = ([replace(x, step=step) for x in made] for step in (10, 9))
    save(join(late), tmp_path / "a.pt")
    save(join(early), tmp_path / "b.pt")
    found = read([tmp_path / "a.pt", tmp_path / "b.pt"])
    assert found.steps.tolist() == [9] * 6 + [10] * 6


@given(st.integers(1, 60), st.integers(1, 200), st.integers(2, 8), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_zigzag_covers_every_token_once(prompt, length, size, padding):
    # Prevents: a token in two slices or in none, for any lengths and padding.
    total = prompt + length
    parts = [zigzag(rank, size, total, length, total + padding) for rank in range(size)]
    assert torch.cat(parts).sort().values.tolist() == list(range(length))


# --- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "write", "match"),
    [
        ("x.pt", lambda p: torch.save({"weights": 1}, p), r"keys \['weights'\].*known are slime"),
        ("x.pt", lambda p: torch.save([1], p), "holds a list, which is no format"),
        ("x.pt", lambda p: p.write_bytes(b"PK\x03\x04cut"), "no complete file of torch.save"),
        ("x.pt", lambda p: torch.save({"a": Response}, p), "holds Python objects"),
        ("x.jsonl", lambda p: p.write_text('{"a": 1}\n'), r"keys \['a'\].*TRIAGE"),
        ("x.jsonl", lambda p: p.write_text('{"a": 1'), "no complete JSON"),
        (
            "x.jsonl",
            lambda p: p.write_text('{"input": "", "output": "", "score": 1}\n'),
            "verl's rollout dump holds text and scores",
        ),
        (
            "x.jsonl",
            lambda p: p.write_text('{"rollout_id": 0, "delta": [1], "advantage": [1, 2]}\n'),
            r"advantages of response 0 of step 0 has shape \(2,\)",
        ),
        ("x.npz", lambda p: p.write_bytes(b""), "ending '.npz' is none of"),
        ("x.safetensors", lambda p: p.write_bytes(b"\x00" * 4), "no complete safetensors file"),
        (
            "x.pt",
            lambda p: torch.save({"format": "mismatch/1", "mask": torch.ones(3)}, p),
            "without the tensors offsets, step, learner, sampler",
        ),
        (
            "x.pt",
            lambda p: torch.save({"rollout_id": 0, "samples": [{"prompt": ""}]}, p),
            "a sample without 'response_length'",
        ),
    ],
)
def test_refusals_name_file_content_and_formats(tmp_path, name, write, match):
    # Prevents: a KeyError or a pickle's traceback as the only word about a wrong file.
    write(tmp_path / name)
    with pytest.raises(ValueError, match=match) as caught:
        read([tmp_path / name])
    assert str(tmp_path / name) in str(caught.value)


def test_a_pickle_is_not_run(tmp_path):
    # Prevents: code in a dump being executed.
    class Evil:
        def __reduce__(self):
            return (exec, ("raise SystemExit",))

    torch.save({"rollout_id": 0, "samples": [Evil()]}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="holds Python objects"):
        read([tmp_path / "x.pt"])


def test_empty_folder_and_missing_path(tmp_path):
    # Prevents: no file read as no finding.
    with pytest.raises(ValueError, match="no file ends in"):
        read([tmp_path])
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        read([tmp_path / "absent"])


def test_repeated_response(tmp_path):
    # Prevents: a window that holds a shard twice counting its tokens twice.
    line = '{"rollout_id": 0, "response_id": 1, "delta": [0.5], "advantage": 1}\n'
    (tmp_path / "x.jsonl").write_text(line * 2)
    with pytest.raises(ValueError, match="line 2 repeats response 1 of rollout 0"):
        read([tmp_path / "x.jsonl"])


def test_select_keeps_what_belongs_together(made):
    # Prevents: tokens of other responses behind a selection.
    found = join(made).select(torch.tensor([1, 4]))
    same(found, join([made[1], made[4]]))


def test_evaluation_dumps_are_not_read(tmp_path, made):
    # Prevents: evaluation dumps, which no update saw, among the responses.
    cases.write_rollout(tmp_path / "eval_0.pt", 0, made)
    with pytest.raises(ValueError, match="no file ends in"):
        read([tmp_path])
