"""Wrong uses of the conversions that would cost a checkpoint or publish an empty one."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from megatron_nvfp4.__main__ import main
from megatron_nvfp4.checkpoint.atomic import check_apart
from megatron_nvfp4.checkpoint.convert import ParallelSizes, megatron_from_hf


@pytest.mark.parametrize("out", ["model", "model/..", "."])
def test_an_output_that_holds_the_input_is_refused(out, tmp_path, monkeypatch):
    # Prevents: --force that removes the source of the conversion.
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for verb, source in (
        ("convert-hf-to-megatron", "--hf"),
        ("export-nvfp4", "--in"),
    ):
        assert main([verb, source, "model", "--out", out, "--force"]) == 2
    assert (
        main(["convert-megatron-to-hf", "--megatron", "m", "--hf-config", "model", "--out", out])
        == 2
    )
    assert (folder / "config.json").read_text() == "{}"


def test_folders_beside_each_other_are_fine(tmp_path):
    check_apart(tmp_path / "out", tmp_path / "in", None)
    check_apart(tmp_path / "in" / "out", tmp_path / "in")
    with pytest.raises(ValueError, match="give the name of a folder"):
        check_apart("", tmp_path)


@pytest.mark.parametrize("name", ["tp", "pp", "ep", "etp", "vpp"])
@pytest.mark.parametrize("size", [0, -1])
def test_sizes_below_one_are_refused(name, size):
    # Prevents: a checkpoint without a single rank file that says it is complete.
    with pytest.raises(ValueError, match=f"{name}={size}: give"):
        ParallelSizes(**{name: size})


@pytest.mark.parametrize("size", [0, -128])
def test_a_vocabulary_is_padded_to_a_positive_number(size, tmp_path):
    # Prevents: a ZeroDivisionError's traceback, and an embedding that is cut off.
    with pytest.raises(ValueError, match=f"make_vocab_size_divisible_by={size}: give"):
        megatron_from_hf(tmp_path, tmp_path / "out", vocab_divisible_by=size)


def test_errors_of_the_file_system_are_one_line(tmp_path, capsys):
    # Prevents: forty lines of traceback for a folder that may not be read.
    (tmp_path / "config.json").mkdir()
    assert (
        main(["convert-hf-to-megatron", "--hf", str(tmp_path), "--out", str(tmp_path / "o")]) == 2
    )
    assert len(capsys.readouterr().err.splitlines()) == 1
