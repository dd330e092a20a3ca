"""What `diagnose` makes of damaged dumps, doubled data, hopeless options and outputs in the wrong place."""

import json
import os
import re
import shutil
import threading

import diagnose_cases as cases
import pytest
import torch

from megatron_nvfp4.__main__ import main
from megatron_nvfp4.diagnostics import readers_rows
from megatron_nvfp4.diagnostics.mismatch import Gaps, Settings
from megatron_nvfp4.diagnostics.readers import Response, join, read, save
from megatron_nvfp4.diagnostics.report import diagnose
from megatron_nvfp4.diagnostics.report_html import page


def own(**changes: object) -> dict:
    """A mismatch/1 file of 4 responses of 5 tokens."""
    content = {
        "format": "mismatch/1",
        "learner": -torch.rand(20),
        "sampler": -torch.rand(20),
        "mask": torch.ones(20),
        "offsets": 5 * torch.arange(5),
        "step": torch.arange(4),
    }
    return content | changes


def slime(top: dict | None = None, **changes: object) -> dict:
    """A train_data file of one response of 4 tokens."""
    sample = {
        "rollout_position": 0,
        "tokens": torch.arange(6),
        "response_lengths": 4,
        "rewards": 1.0,
        "loss_masks": torch.ones(4),
        "rollout_log_probs": -torch.rand(4),
        "log_probs": -torch.rand(4),
        "advantages": torch.ones(4),
    }
    return {"format_version": 2, "rollout_id": 0, "samples": [sample | changes]} | (top or {})


def miles(top: dict | None = None, num: int = 1, **changes: object) -> dict:
    """A rank's train_data of responses of 4 tokens."""
    columns = {
        "sample_indices": list(range(num)),
        "response_lengths": [4] * num,
        "total_lengths": [6] * num,
        "loss_masks": [torch.ones(4)] * num,
        "log_probs": [-torch.rand(4)] * num,
        "rollout_log_probs": [-torch.rand(4)] * num,
        "advantages": [torch.ones(4)] * num,
    }
    return {"rollout_id": 0, "rank": 0, "rollout_data": columns | changes} | (top or {})


def nemo(**changes: object) -> dict:
    """A row of 6 tokens, the last 4 the response."""
    values = [-0.1 * i for i in range(6)]
    row = {
        "generation_logprobs": [values],
        "prev_logprobs": [values],
        "token_loss_mask": [[0, 0, 1, 1, 1, 1]],
        "sample_loss_mask": [1.0],
        "input_lengths": [6],
    }
    return row | changes


def triage(**changes: object) -> dict:
    return {"rollout_id": 0, "response_id": 1, "delta": [0.5, 0.25], "advantage": -1} | changes


INF, NAN = float("inf"), float("nan")
NOTHING = [None] * 4


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (own(note="hi"), "note is no column of mismatch/1; leave it out"),
        (own(advantage=[1.0] * 20), "advantage is a list; give a tensor"),
        (own(offsets=torch.tensor(0)), r"offsets is torch.int64 of shape \(\)"),
        (own(offsets=5.0 * torch.arange(5)), "offsets is torch.float32"),
        (own(step=torch.full((4,), INF)), r"step holds \[inf, .*give whole numbers"),
        (own(step=torch.arange(4) / 2), r"step holds \[0.0, 0.5"),
        (own(weight_version=torch.full((4,), NAN)), "weight_version holds .*give whole numbers"),
        (own(mask=torch.full((20,), NAN)), "a mask holds NaN; give 1 for a token in the loss"),
        (own(learner=torch.zeros(20, dtype=torch.complex64)), "complex numbers; give real"),
        (slime(response_lengths=None), "cannot be read .TypeError"),
        (slime(response_lengths="x"), "invalid literal"),
        (slime(response_lengths=-5), "a length of -5; give the number of tokens"),
        (
            slime(response_lengths=10**12, loss_masks=None),
            r"has shape \(4,\) and its mask 10000000",
        ),
        (slime(log_probs="abc"), "cannot be read .TypeError"),
        (slime(log_probs=NOTHING), "cannot be read .(TypeError|RuntimeError)"),
        (slime(log_probs=torch.zeros(4, dtype=torch.complex64)), "complex numbers; give real"),
        (slime(loss_masks="aaaa"), "cannot be read .TypeError"),
        (slime(loss_masks=torch.full((4,), NAN)), "a mask holds NaN"),
        (slime({"rollout_id": None}), "cannot be read .TypeError"),
        (slime({"rollout_id": 10**30}), "is beyond 64 bits"),
        (miles(log_probs=[]), "log_probs has 0 entries for the 1 of sample_indices"),
        (miles(sample_indices=3), "cannot be read .TypeError"),
        (miles(sample_indices=[[0]]), "cannot be read .TypeError"),
        (miles(response_lengths=[None]), "cannot be read .TypeError"),
        (miles({"rollout_id": None}), "cannot be read .TypeError"),
        (miles({"cp_size": 1, "cp_rank": 5}), "cp_rank=5 is no context-parallel rank of cp_size=1"),
        (
            miles({"cp_size": 10**9}),
            r"lacks the context-parallel ranks \[1, 2, 3.*\] of 1000000000",
        ),
        (miles({"cp_size": "a"}), "invalid literal"),
        (miles(num=2, sample_indices=[7, 7]), "sample_indices has 7 more than once"),
        (nemo(input_lengths=[INF]), "line 1: OverflowError"),
        (nemo(input_lengths=[-3]), "line 1: a length of -3"),
        (nemo(sample_loss_mask=[NAN]), "line 1: a mask holds NaN"),
        (nemo(token_loss_mask=[[0, 0, NAN, 1, 1, 1]]), "line 1: a mask holds NaN"),
        (nemo(generation_logprobs="abc"), "line 1: TypeError"),
        (triage(rollout_id=INF), "line 1: OverflowError"),
        (triage(delta=[10**400]), "line 1: Overflow"),
        (triage(loss_mask=[1, NAN]), "line 1: a mask holds NaN"),
        (triage(rollout_id=10**30), "is beyond 64 bits"),
        (b"", "x.pt: is no complete file of torch.save"),
        (b"PK", "x.pt: "),
        (b"[" * 100_000, "x.jsonl: is no complete JSON .maximum recursion"),
        (b"[" + b"1" * 5000, "x.jsonl: is no complete JSON .Exceeds the limit"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, match):
    # Prevents: a traceback, torch's words without a file, memory for a length that lies, and an imaginary
    # part or a NaN in a mask that is dropped without a word.
    is_rows = isinstance(content, dict) and {"delta", "prev_logprobs"} & content.keys()
    path = tmp_path / ("x.jsonl" if is_rows or str(match).startswith("x.jsonl") else "x.pt")
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif is_rows:
        path.write_text(json.dumps(content) + "\n")
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=match) as caught:
        read([path])
    assert str(path) in str(caught.value)


def test_a_file_cut_anywhere_is_named(tmp_path):
    # Prevents: an exception of torch's own kind at some byte.
    save(cases.record(num=2, length=20, steps=1), tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    path = tmp_path / "x.pt"
    for size in (0, 1, 2, 4, 30, 500, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=re.escape(str(path))):
            read([path])


def test_a_row_whose_identity_is_a_list_is_read(tmp_path):
    # Prevents: a traceback for an identity that cannot be hashed.
    (tmp_path / "x.jsonl").write_text(json.dumps(triage(response_id=[1])) + "\n")
    assert read([tmp_path / "x.jsonl"]).num_responses == 1


@pytest.mark.parametrize("position", [-1, 2, "0"])
def test_a_position_outside_of_the_rollout_has_no_versions(tmp_path, position):
    # Prevents: the weight versions of another sample, counted from the end.
    made = cases.responses(num=2, length=8, steps=1)
    folder = cases.write_slime(tmp_path / "slime", made)
    path = folder / "train_data" / "0.pt"
    content = torch.load(path, weights_only=True)
    content["samples"][0]["rollout_position"] = position
    torch.save(content, path)
    assert read([folder]).versions == ((), made[1].versions)


def test_complex_numbers_and_nan_masks_are_refused_in_join():
    # Prevents: `save(join(...))` of a trainer's own tensors that loses half of each number.
    ones = torch.ones(2)
    with pytest.raises(ValueError, match="complex numbers"):
        join([Response(step=0, mask=ones, learner=ones * 1j, sampler=ones)])
    with pytest.raises(ValueError, match="a mask holds NaN"):
        join([Response(step=0, mask=ones * NAN, learner=ones, sampler=ones)])


# --- the same data twice ----------------------------------------------------------------------------


def test_a_file_given_twice_is_read_once(tmp_path, monkeypatch):
    # Prevents: a verdict that another spelling of a path changes, by intervals that are too narrow.
    save(cases.record(num=6), tmp_path / "a.pt")
    (tmp_path / "link.pt").symlink_to(tmp_path / "a.pt")
    monkeypatch.chdir(tmp_path)
    assert read(["a.pt", tmp_path / "a.pt", "link.pt", tmp_path]).num_responses == 6


def test_a_copy_is_refused(tmp_path):
    # Prevents: every token of a forgotten copy counted twice.
    save(cases.record(num=6), tmp_path / "a.pt")
    save(cases.record(num=6, seed=1), tmp_path / "b.pt")
    assert read([tmp_path]).num_responses == 12
    shutil.copy(tmp_path / "a.pt", tmp_path / "c.pt")
    with pytest.raises(ValueError, match=r"c.pt: holds the same bytes as .*a.pt"):
        read([tmp_path])


def test_files_without_responses_are_no_copies(tmp_path):
    # Prevents: empty files of ranks that had nothing to do refused.
    for rank in range(2):
        (tmp_path / f"rollout_0_rank_{rank}.jsonl").write_text("")
    (tmp_path / "rollout_0_rank_2.jsonl").write_text(json.dumps(triage()) + "\n")
    assert read([tmp_path]).num_responses == 1


def test_a_response_in_two_files_is_refused(tmp_path):
    # Prevents: a shard that was written again with another rank's number counting twice.
    for rank, extra in enumerate(("", " ")):
        line = json.dumps(triage()) + extra + "\n"
        (tmp_path / f"rollout_0_rank_{rank}.jsonl").write_text(line)
    with pytest.raises(ValueError, match=r"rank_1.jsonl: line 1 repeats response 1 .*rank_0.jsonl"):
        read([tmp_path])
    seen = {}
    assert readers_rows.load(tmp_path / "rollout_0_rank_1.jsonl", seen).responses
    assert len(seen) == 1


def test_a_report_beside_the_dumps_is_not_read(tmp_path, capsys):
    # Prevents: a command that works once and fails when it is called again.
    save(cases.record(noise=0.01), tmp_path / "a.pt")
    out = tmp_path / "out.json"
    assert main(["diagnose", str(tmp_path), "--json", str(out)]) == 0
    first = out.read_bytes()
    assert main(["diagnose", str(tmp_path), "--json", str(out)]) == 0
    assert out.read_bytes() == first
    assert main(["diagnose", str(out)]) == 2
    assert "holds a dictionary with the keys" in capsys.readouterr().err


# --- advantages and log-probs that are no numbers ---------------------------------------------------


def with_advantage(*values: float) -> list[Response]:
    made = cases.responses(noise=0.02)
    for response, value in zip(made, values, strict=False):
        response.advantages[:] = value
        response.mask[:] = True
    return made


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_an_advantage_that_is_no_number_fails_a_check(tmp_path, value, capsys):
    # Prevents: "sound" for statistics of direction that are NaN, and a page that cannot be written.
    made = with_advantage(value)
    save(join(made), tmp_path / "x.pt")
    assert main(["diagnose", str(tmp_path / "x.pt"), "--html", str(tmp_path / "x.html")]) == 1
    found = json.loads(capsys.readouterr().out)
    check = next(each for each in found["checks"] if each["name"] == "advantages")
    num = made[0].mask.numel()
    assert check["status"] == "failed"
    assert check["values"] == {"advantages_not_finite": num}
    assert f"{num} of " in check["found"]
    assert "advantages" in found["advice"]


def test_statistics_take_such_an_advantage_as_zero():
    # Prevents: one bad token that makes NaN of rho_asym, the gate and the map.
    found, expected = (diagnose(join(with_advantage(value)))[0] for value in (NAN, 0.0))
    for name in ("gap", "regions", "segments", "gate", "steps"):
        assert found[name] == expected[name], name
    assert found["regions"]["rho_asym"]["value"] > 0


def test_advantages_that_are_all_nan_leave_the_gap(tmp_path):
    # Prevents: a crash, or no word about the gap, where a run recorded no usable advantage.
    diagnosis, gaps = diagnose(join(with_advantage(*[NAN] * 24)))
    assert diagnosis["gap"]["mean_abs"]["value"] > 0
    assert diagnosis["regions"]["rho_asym"]["value"] is None
    assert 'id="data"' in page(diagnosis, gaps)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_a_learner_that_is_nowhere_finite(value):
    # Prevents: an error of torch's max over nothing.
    made = cases.responses()
    for response in made:
        response.learner[:] = value
    diagnosis, gaps = diagnose(join(made))
    check = next(each for each in diagnosis["checks"] if each["name"] == "log-probs")
    assert "values of the learner are NaN or infinite" in check["found"]
    assert "above 0" not in check["found"]
    assert gaps is None


def test_infinite_and_positive_log_probs_are_counted_apart():
    # Prevents: infinities among the "log-probs above 0", or hiding them.
    made = cases.responses()
    made[0].mask[:3] = True
    made[0].learner[:3] = torch.tensor([INF, 0.5, 2.0])
    check = next(x for x in diagnose(join(made))[0]["checks"] if x["name"] == "log-probs")
    assert check["values"]["learner_not_finite"] == 1
    assert check["values"]["learner_positive"] == 2
    assert "up to 2;" in check["found"]


# --- options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tis-cap", "inf"], "tis_cap=inf is not above 0 and finite"),
        (["--tis-cap", "nan"], "tis_cap=nan is not above 0 and finite"),
        (["--tau-ana", "-inf"], "tau_ana=-inf is not below 0 and finite"),
        (["--tau-ana", "nan"], "tau_ana=nan is not below 0"),
        (["--seed", "-1"], "seed=-1 is not from 0 to 2"),
        (["--seed", str(10**30)], f"seed={10**30} is not from 0 to 2"),
    ],
)
def test_options_without_a_meaning_are_named(tmp_path, capsys, words, message):
    # Prevents: numpy's or a format string's words for a mistyped option.
    save(cases.record(), tmp_path / "a.pt")
    html = ["--html", str(tmp_path / "a.html")]
    assert main(["diagnose", str(tmp_path / "a.pt"), *words, *html]) == 2
    assert message in capsys.readouterr().err


def test_a_number_with_an_exponent_is_a_value(tmp_path, capsys):
    # Prevents: argparse taking -1e-3 for an option.
    save(cases.record(), tmp_path / "a.pt")
    main(["diagnose", str(tmp_path / "a.pt"), "--tau-ana", "-1e-3", "--seed", str(2**63 - 1)])
    assert json.loads(capsys.readouterr().out)["segments"]["tau_ana"] == -0.001


# --- outputs ----------------------------------------------------------------------------------------


@pytest.fixture
def dump(tmp_path):
    save(cases.record(noise=0.01), tmp_path / "a.pt")
    return tmp_path / "a.pt"


def refused(capsys, *words: object) -> str:
    assert main(["diagnose", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_an_output_that_is_an_input_is_refused(dump, capsys):
    # Prevents: a dump that is gone behind its own diagnosis, by its name or by a link's.
    held = dump.read_bytes()
    link = dump.with_name("link.json")
    link.symlink_to(dump)
    for given, out in ((dump, dump), (dump, link), (dump.parent, dump)):
        assert "is an input, which it would replace" in refused(capsys, given, "--json", out)
    assert dump.read_bytes() == held


def test_two_outputs_in_one_file_are_refused(dump, capsys):
    # Prevents: the page replaced by the JSON without a word.
    out, link = dump.with_name("out"), dump.with_name("link")
    link.symlink_to(out)
    for other in (out, link):
        said = refused(capsys, dump, "--html", out, "--json", other)
        assert f"--html {out}: is the output of --json, too; give the name of another" in said
    assert not out.exists()


@pytest.mark.parametrize("out", [".", "/", ""])
def test_an_output_that_is_a_folder_is_refused_before_the_work(dump, capsys, monkeypatch, out):
    # Prevents: half a minute of work thrown away, and a word about a file .partial-x.
    monkeypatch.setattr("megatron_nvfp4.diagnostics.report.diagnose", None)
    assert "is a folder; give the name of a file" in refused(capsys, dump, "--json", out)


def test_a_link_is_written_through(dump):
    # Prevents: a link to a shared place replaced by a file of its own.
    (dump.parent / "there").mkdir()
    link, target = dump.with_name("link.json"), dump.parent / "there" / "out.json"
    link.symlink_to(target)
    for _ in range(2):  # the target is absent first, then there
        assert main(["diagnose", str(dump), "--json", str(link)]) == 0
        assert link.is_symlink()
        assert json.loads(target.read_text())["verdict"] == "sound"
    assert os.listdir(target.parent) == ["out.json"]


def test_a_pipe_is_written_and_stays(dump):
    # Prevents: a pipe or a device replaced by a file, and a reader who waits for ever.
    pipe = dump.with_name("pipe")
    os.mkfifo(pipe)
    got = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()), daemon=True)
    reader.start()
    assert main(["diagnose", str(dump), "--json", str(pipe)]) == 0
    reader.join(30)
    assert json.loads(got[0])["verdict"] == "sound"
    assert pipe.is_fifo()


def test_a_name_that_cannot_be_names_the_output(dump, capsys):
    # Prevents: words about a file .partial-x that nobody asked for.
    out = dump.with_name("a" * 250)
    said = refused(capsys, dump, "--json", out)
    assert f"error: {out}: could not be written (File name too long)" in said


def test_a_full_disk_names_the_output(dump, capsys):
    # Prevents: an error of the file system without a name or a remedy, or half a file.
    out = dump.with_name("out.json")
    with cases.no_room():
        said = refused(capsys, dump, "--json", out)
    assert f"error: {out}: could not be written (File too large); make room" in said
    assert os.listdir(dump.parent) == ["a.pt"]


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_a_record_on_a_full_disk_is_an_oserror(tmp_path, ending):
    # Prevents: torch's and safetensors' own exceptions, which nobody catches.
    with cases.no_room(), pytest.raises(OSError, match="File too large"):
        save(cases.record(num=2), tmp_path / f"x.{ending}")


def test_a_record_does_not_hold_its_files_name(tmp_path):
    # Prevents: other bytes for the same record, and a copy that passes for another file.
    record = cases.record(num=2)
    save(record, tmp_path / "a.pt")
    save(record, tmp_path / "b.pt")
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_a_file_named_like_a_place_of_the_page(tmp_path):
    # Prevents: data put where a file's name stands, and a page without data.
    save(cases.record(), tmp_path / "@DATA@.pt")
    text = page(*diagnose(read([tmp_path / "@DATA@.pt"])))
    assert "@DATA@.pt" in text
    data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert "tails" in json.loads(data[1])


def test_gaps_hold_no_advantage_that_is_no_number():
    # Prevents: the segment statistics, which read the responses, meeting the NaN that the gaps lack.
    gaps = Gaps(join(with_advantage(NAN, INF)), Settings())
    assert gaps.advantages.isfinite().all()
    assert gaps.responses.advantages.isfinite().all()
