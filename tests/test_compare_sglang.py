"""SGLang's own tensor dump beside a capture: files in its format, made by hand of what the model computed.

No SGLang is installed here; the format is read from its srt/debug_utils/tensor_dump_forward_hook.py (0.5.23).
"""

from pathlib import Path

import pytest
import torch
from capture_cases import HIDDEN, TOP_K, Edit, Model, batch, captured

from megatron_nvfp4.__main__ import main
from megatron_nvfp4.cli.compare import _megatron_name
from megatron_nvfp4.diagnostics.compare import compare_sides
from megatron_nvfp4.diagnostics.compare_sides import Key, read_side

pytest.importorskip("safetensors", reason="safetensors is not installed")
FOLDER = "TP0_PP0_Rank0_pid17"


def _layer_outputs(folder: Path) -> dict[str, torch.Tensor]:
    """What SGLang would name, token by token of each sequence, of a capture's three layers."""
    with Edit(folder) as edit:
        named = {}
        for number in range(3):
            ours, theirs = f"decoder.layers.{number}", f"model.layers.{number}"
            out = edit.tensor(f"{ours}.mlp.experts", "output")
            ids, weights = (
                edit.tensor(f"{ours}.mlp.router", f"routing.{w}") for w in ("ids", "weights")
            )
            # Slots by falling weight, as SGLang's top-k gives them.
            weights, order = weights.sort(dim=1, descending=True)
            named[f"{theirs}.mlp.gate"] = torch.zeros(len(ids), 4)
            named[f"{theirs}.mlp.topk"] = [weights, ids.gather(1, order).int(), weights]
            named[f"{theirs}.mlp.experts"] = out
        return named


def _by_sequence(value, num_sequences: int, order: list[int]):
    """Rows (S*B) position by position to sequence by sequence, the sequences in another order."""
    if isinstance(value, list):
        return [_by_sequence(each, num_sequences, order) for each in value]
    rows = value.view(-1, num_sequences, value.shape[-1]).transpose(0, 1)[order]
    return rows.reshape(-1, value.shape[-1]).contiguous()


def _pass(folder: Path, number: int, tensors: dict, ids: torch.Tensor, first: int = 0) -> None:
    positions = torch.arange(first, first + ids.shape[1]).repeat(len(ids))
    info = {"input_ids": ids.flatten(), "positions": positions, "seq_lens": torch.tensor([1])}
    batch_info = {f"model.forward_batch_info.{key}": value for key, value in info.items()}
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    torch.save(tensors | batch_info, folder / FOLDER / f"Pass{number:05d}.pt")


@pytest.fixture
def ours(tmp_path) -> Path:
    return captured(tmp_path / "ours", Model(), batch())


@pytest.fixture
def theirs(tmp_path, ours) -> Path:
    outputs = {name: _by_sequence(value, 2, [1, 0]) for name, value in _layer_outputs(ours).items()}
    _pass(tmp_path / "theirs", 0, outputs, batch().flip(0))
    _pass(tmp_path / "theirs", 1, {"model": torch.zeros(10, HIDDEN)}, batch()[:, :1], first=5)
    return tmp_path / "theirs"


def _sides(ours: Path, theirs: Path):
    return compare_sides(*(read_side(path, _megatron_name) for path in (ours, theirs)))


def test_the_sampler_beside_the_learner(ours, theirs, capsys):
    # Prevents: slots in another order, rows sequence by sequence, or a decoding pass found as differences.
    result = _sides(ours, theirs)
    assert result.first is None
    compared = {str(each.key) for each in result.operators}
    assert len(compared) == 9
    assert "decoder.layers.2.mlp.router routing.weights" in compared
    assert {each.num_values for each in result.operators} == {10 * HIDDEN, 10 * TOP_K}
    assert main(["compare", str(ours), str(theirs), "--common"]) == 0
    assert "1 passes do not begin at position 0 and were left out" in capsys.readouterr().out
    assert main(["compare", str(ours), str(theirs)]) == 1


def test_a_fault_in_the_sampler(ours, theirs):
    # Prevents: a difference found and given to another token.
    file = theirs / FOLDER / "Pass00000.pt"
    tensors = torch.load(file, weights_only=True)
    tensors["model.layers.1.mlp.experts"][3, 7] += 1  # sequence 0 of the pass is batch()[1]
    torch.save(tensors, file)
    first = _sides(ours, theirs).first
    assert str(first.key) == "decoder.layers.1.mlp.experts output"
    assert (first.place.token.sequence, first.place.token.position, first.place.index) == (
        1,
        3,
        (7,),
    )


def test_fused_projections_have_two_orders(tmp_path):
    # Prevents: every key of a model reported as different for its place.
    from megatron_nvfp4.diagnostics.align import Batch
    from megatron_nvfp4.diagnostics.compare_sides import Piece, Side

    key = Key("decoder.layers.0.self_attention.linear_qkv", "output")
    rows = torch.arange(2)

    def side(kind: str, values: list[float]) -> Side:
        tensor = torch.tensor([values, values])
        piece = Piece(lambda: tensor, (0, 0), 0, "hook", (2, 8), "float32", lambda: rows)
        made = Side(kind, kind, {key: [piece]}, [Batch(0, torch.tensor([1, 2]), torch.arange(2))])
        made.model = {"num_heads": 4, "num_groups": 2, "head_dim": 1} if kind == "capture" else {}
        return made

    sampler = side("sglang", [0, 1, 2, 3, 10, 11, 20, 21])  # queries, keys, values
    learner = side("capture", [0, 1, 10, 20, 2, 3, 11, 21])
    assert compare_sides(learner, sampler).first is None
    assert compare_sides(sampler, learner).first is None
    assert compare_sides(side("capture", [0, 1, 10, 20, 2, 3, 11, 99]), sampler).first is not None


class Foreign:
    """Of a class that nobody has called safe."""


def test_dumps_that_cannot_be_read(ours, theirs, tmp_path, capsys):
    # Prevents: shards of several ranks put together along a guessed axis; a pickle that runs code.
    (theirs / "TP1_PP0_Rank1_pid18").mkdir()
    assert main(["compare", str(ours), str(theirs)]) == 2
    assert "several ranks or runs (TP0_PP0_Rank0_pid17, TP1_PP0" in capsys.readouterr().err
    shard = theirs / "TP1_PP0_Rank1_pid18"
    torch.save({}, shard / "Pass00000.pt")
    assert main(["compare", str(ours), str(shard)]) == 2
    assert "rank TP1 PP0; dump a run on one rank" in capsys.readouterr().err
    bad = tmp_path / "bad.pt"
    torch.save({"x": Foreign()}, bad)
    assert main(["compare", str(ours), str(bad)]) == 2
    assert "cannot be read" in capsys.readouterr().err
    torch.save([1], bad)
    assert main(["compare", str(ours), str(bad)]) == 2
    assert "holds a list" in capsys.readouterr().err
    _pass(tmp_path / "decode", 0, {}, batch()[:, :1], first=5)
    assert main(["compare", str(ours), str(tmp_path / "decode")]) == 2
    assert "--disable-radix-cache" in capsys.readouterr().err
