"""SGLang's passes that hold less than they should, or one prefix in two ways, beside a learner's capture."""

from pathlib import Path

import pytest
import torch
from deterministic_small import random_weights
from test_compare_learner import CONFIGS, FOLDER, Engine, _change, _compared, _learner

from megatron_nvfp4.__main__ import main
from megatron_nvfp4.deterministic import capture
from megatron_nvfp4.deterministic.model import Model

QKV = "model.layers.0.self_attn.qkv_proj"
TURNS = [[1, 2, 3], [1, 2, 3, 10, 11, 12, 40]], [[10, 11, 12], [50, 51]]


@pytest.fixture(scope="module")
def outputs():
    model = Model(random_weights(CONFIGS["dense"]), CONFIGS["dense"], "sglang_det_bf16")
    with torch.no_grad(), capture() as found:
        model.logprobs(*TURNS)
    return found


def _passes(outputs, folder: Path) -> list[Path]:
    """Two turns of a conversation, the second prefilled whole."""
    engine = Engine(outputs, folder / FOLDER)
    return [engine.run([part]) for part in ((0, 0, 3), (0, 3, 4), (0, 4, 5), (1, 0, 7), (1, 7, 8))]


def test_a_prefix_that_was_decoded_and_prefilled_is_left_out(outputs, tmp_path, capsys):
    # Prevents: a row that was decoded compared with one of a prompt, which has other bits.
    files = _passes(outputs, tmp_path / "sampler")
    _change(files[1], QKV, (0, 5))
    second = {name: t[5:] for name, t in outputs.items() if name != "logprobs"}
    for learner in (outputs, second):
        sides = _learner(learner, tmp_path), tmp_path / "sampler"
        assert _compared(*sides).first is None
        assert main(["compare", *map(str, sides), "--common"]) == 0
        assert "4 rows of SGLang's were left out: the same tokens" in capsys.readouterr().out
    _change(files[4], QKV, (0, 5))
    assert _compared(*sides).first.key.module.endswith("linear_qkv")


@pytest.mark.parametrize(
    "damage",
    [lambda t: t[:-1] + 1, lambda t: t.flatten() + 1, lambda t: [], lambda t: None],
    ids=["a row lacks", "flat", "empty", "nothing"],
)
def test_a_tensor_that_does_not_fit_its_pass_is_refused(outputs, damage, tmp_path, capsys):
    # Prevents: "the same bits" of values that were not looked at.
    file = _passes(outputs, tmp_path / "sampler")[0]
    tensors = torch.load(file, weights_only=True)
    torch.save(tensors | {QKV: damage(tensors[QKV])}, file)
    sides = _learner(outputs, tmp_path), tmp_path / "sampler"
    assert main(["compare", *map(str, sides), "--common"]) == 2
    assert f"Pass00000.pt: {QKV} is" in capsys.readouterr().err


def test_a_module_that_a_pass_lacks_is_noted(outputs, tmp_path, capsys):
    # Prevents: an operator that was compared in some passes alone, without a word.
    file = _passes(outputs, tmp_path / "sampler")[3]
    tensors = torch.load(file, weights_only=True)
    del tensors[QKV]
    torch.save(tensors, file)
    sides = _learner(outputs, tmp_path), tmp_path / "sampler"
    assert main(["compare", *map(str, sides), "--common"]) == 0
    assert "linear_qkv output is missing in 1 of 5 passes" in capsys.readouterr().out


def test_an_idle_pass_ends_no_sequence(outputs, tmp_path):
    # Prevents: decoded rows behind a pass without rows that belong to nobody.
    engine = Engine(outputs, tmp_path / "sampler" / FOLDER)
    for parts in ([(0, 0, 3)], [], [(0, 3, 4)], [(0, 4, 5)]):
        engine.run(parts)
    found = _compared(_learner(outputs, tmp_path), tmp_path / "sampler")
    assert found.right.notes == []
    assert found.first is None
    assert {each.num_rows for each in found.operators} == {5}
