"""`compare` on dumps in which one fault is planted, under another order of the batch, padding and one more
sequence; and what it is made of, by hand.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from capture_cases import (
    HIDDEN,
    Edit,
    Model,
    batch,
    captured,
    permuted,
)

from megatron_nvfp4.__main__ import main
from megatron_nvfp4.diagnostics import align
from megatron_nvfp4.diagnostics.align import Batch, match_tokens, pair_rows, qkv_columns
from megatron_nvfp4.diagnostics.compare import Comparison, compare_sides
from megatron_nvfp4.diagnostics.compare_sides import read_side
from megatron_nvfp4.diagnostics.compare_values import Numbers, compare_values

pytest.importorskip("safetensors", reason="safetensors is not installed")
FC1, FC2 = (f"decoder.layers.1.mlp.experts.linear_fc{n}" for n in (1, 2))
MLP = "decoder.layers.1.mlp"


@pytest.fixture(scope="module")
def left(tmp_path_factory) -> Path:
    """One side of every comparison, left as it is."""
    return captured(tmp_path_factory.mktemp("left"), Model(), batch())


@pytest.fixture
def right(tmp_path) -> Path:
    """The same sequences behind another one, in reverse order, padded; to be edited."""
    return captured(tmp_path / "right", Model(), permuted(batch()))


def _compare(left: Path, right: Path) -> Comparison:
    return compare_sides(*(read_side(path, lambda name: None) for path in (left, right)))


def _row_of(edit: Edit, module: str, what: str, sequence: int, position: int, expert=None) -> int:
    """Row of a token in a dump of permuted(batch()), of its first or the given expert."""
    table = edit.entry(module, what)["rows"]
    token = edit.tensors[f"rows/{table}.token"]
    length = edit.tensors["tokens/0.ids"].numel() // 3
    wanted = token == (2 - sequence) * length + position
    if expert is not None:
        wanted &= edit.tensors[f"rows/{table}.expert"] == expert
    return int(wanted.nonzero()[0, 0])


def _an_expert_of(edit: Edit, sequence: int, position: int) -> int:
    row = _row_of(edit, f"{MLP}.router", "routing.ids", sequence, position)
    return int(edit.tensor(f"{MLP}.router", "routing.ids")[row, 1])


# --- nothing differs ------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_order_padding_and_permutation_are_no_differences(left, tmp_path, fused, capsys):
    # Prevents: a permutation reported as a numerical error; the fused dataflow's rows taken for others than
    # those of its parts.
    right = captured(tmp_path, Model(fused=fused), permuted(batch()))
    assert main(["compare", str(left), str(right)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"all \d+ outputs have the same bits", said)
    assert "tokens: 10 on both sides, 0 on the left alone, 14 on the right alone" in said
    result = _compare(left, right)
    assert not result.only_left
    assert not result.only_right
    assert len(result.operators) > 150
    of_rows = [each for each in result.operators if each.key.module == FC2 and each.num_right]
    assert {(each.num_rows, each.num_left, each.num_right) for each in of_rows} == {(20, 0, 28)}


def test_microbatches_may_be_cut_differently(left, tmp_path):
    # Prevents: the second microbatch compared with nothing.
    ids = batch()
    right = captured(tmp_path, Model(), ids[1:], ids[:1])
    result = _compare(left, right)
    assert result.first is None
    assert result.tokens.num_both == 10
    assert {each.num_rows for each in result.operators if each.key.module == FC1 and each.num_values
            and "weight" not in each.key.what} == {20}  # fmt: skip


# --- one fault ------------------------------------------------------------------------------------


def test_a_layer(left, tmp_path):
    # Prevents: the last layer named for the first, as all behind it differ, too.
    model = Model()
    with torch.no_grad():
        model.decoder.layers[1].mlp.experts.linear_fc2.weight2[3] *= 1.25
    right = captured(tmp_path, model, permuted(batch()))
    result = _compare(left, right)
    assert str(result.first.key) == f"{FC2} weight2"
    assert result.first.place.expert == 2
    assert result.first.place.index == (3, 0)
    values = [each for each in result.operators if each.differs and "weight" not in each.key.what]
    assert str(values[0].key) == f"{FC2} output"
    assert values[0].place.expert == 2
    assert values[0].place.index == (3,)
    table = {
        each.key for each in result.operators if each.differs and ".layers.0." in each.key.module
    }
    assert not table


@pytest.mark.parametrize(
    ("module", "what", "column"),
    [(f"{MLP}.experts", "output", 5), ("decoder.layers.1.linear_proj", "output", 31)],
)
def test_a_token(left, right, module, what, column):
    # Prevents: a row number of one side's batch given for a token.
    with Edit(right) as edit:
        row = _row_of(edit, module, what, sequence=1, position=3)
        values = edit.tensor(module, what).view(-1, HIDDEN)
        before = values[row, column].clone()
        values[row, column] = -before
    first = _compare(left, right).first
    assert str(first.key) == f"{module} {what}"
    place = first.place
    assert (place.token.sequence, place.token.position, place.index) == (1, 3, (column,))
    assert place.token.id == int(batch()[1, 3])
    assert place.expert is None
    assert (first.natural.left, first.natural.right) == (float(before), -float(before))
    assert (first.natural.num_unequal, first.natural.num_rows) == (1, 1)
    assert first.natural.max_abs == 2 * abs(float(before))


@pytest.mark.parametrize(("what", "columns"), [("block_scales", 2), ("codes", 16), ("amax", 1)])
def test_a_byte_of_an_operand(left, right, what, columns):
    # Prevents: a scale's byte compared as a number that rounds away, two codes of a byte taken for one.
    with Edit(right) as edit:
        expert = _an_expert_of(edit, 0, 2)
        row = _row_of(edit, FC2, f"input.{what}", 0, 2, expert)
        values = edit.tensor(FC2, f"input.{what}")
        part = values.view(torch.uint8).view(len(values), -1)
        part[row, columns - 1 if what != "amax" else 0] ^= 0x10
    first = _compare(left, right).first
    assert str(first.key) == f"{FC2} input.{what}"
    assert (first.place.token.sequence, first.place.token.position) == (0, 2)
    assert first.place.expert == expert
    expected = {"block_scales": 1, "codes": 2 * 15 + 1, "amax": 0}[what]
    assert first.place.index == (expected,)
    assert first.natural.num_unequal == 1


def test_a_permutation(left, right):
    # Prevents: rows that stand in each other's place found as noise in FC1, far from the cause.
    with Edit(right) as edit:
        token = edit.tensors[f"rows/{edit.entry(FC1, 'input')['rows']}.token"]
        other = int((token != token[0]).nonzero()[0, 0])
        token[[0, other]] = token[[other, 0]]
    first = _compare(left, right).first
    assert str(first.key) == f"{MLP}.experts permutation"
    assert re.match(
        r"on the right side row 0 holds token \d+ for expert 0; the router", first.reason
    )


def test_rows_in_each_others_place_where_no_table_tells(left, right):
    # Prevents: the same fault in a kernel, which the table of rows does not know, missed for its norms.
    with Edit(right) as edit:
        rows = [_row_of(edit, FC1, "input", 0, position, _an_expert_of(edit, 0, position))
                for position in (0, 1)]  # fmt: skip
        for what in ("input.codes", "input.block_scales", "input.amax"):
            values = edit.tensor(FC1, what).view(torch.uint8)
            values[rows] = values[rows[::-1]]
    first = _compare(left, right).first
    assert first.key.module == FC1
    assert first.key.what == "input.codes"
    assert first.natural.num_rows == 2


def test_routing(left, tmp_path):
    # Prevents: experts' outputs that differ because their tokens do, reported as numerics.
    model = Model()
    with torch.no_grad():
        model.decoder.layers[1].mlp.router.weight[0] += 0.5
    right = captured(tmp_path, model, permuted(batch()))
    result = _compare(left, right)
    assert str(result.first.key) == f"{MLP}.router weight"
    by_key = {str(each.key): each for each in result.operators}
    ids = by_key[f"{MLP}.router routing.ids"]
    changed = ids.natural.num_rows
    assert 0 < changed < 10
    fc1 = by_key[f"{FC1} output"]
    assert fc1.natural is None  # same tokens, same experts: same rows
    assert fc1.num_left == fc1.num_right - 28 > 0
    assert by_key[f"{MLP}.experts output"].natural is not None
    assert fc1.conditioned_rows == 2 * (10 - changed)
    assert by_key[f"{FC1} input.codes"].conditioned is None
    for name in ("decoder.layers.2.linear_proj output", f"{FC2} output"):
        assert by_key[name].differs, name  # probabilities changed as well
    inside = by_key[f"{MLP}.experts output"]
    assert inside.conditioned_rows == 10 - changed


def test_values_that_are_not_finite(left, right, capsys):
    # Prevents: a NaN that is equal to everything, or to nothing; Inf hidden in a maximum that is NaN.
    with Edit(right) as edit:
        values = edit.tensor(FC2, "output")
        values[_row_of(edit, FC2, "output", 0, 0), 7] = float("nan")
        values[_row_of(edit, FC2, "output", 0, 1), 8] = float("inf")
    first = _compare(left, right).first
    assert str(first.key) == f"{FC2} output"
    assert (first.natural.num_unequal, first.natural.num_nonfinite) == (2, 2)
    assert first.natural.max_abs == 0.0
    assert _compare(right, right).first is None
    assert main(["compare", str(left), str(right), "--json", str(right / "found.json")]) == 1
    assert "2 finite on one side only" in capsys.readouterr().out
    found = json.loads((right / "found.json").read_text(), parse_constant=pytest.fail)
    assert found["first"]["natural"]["right"] == "nan"


def test_missing_tensors(left, right, capsys):
    # Prevents: "no difference" over the quantities that both happen to have.
    with Edit(right) as edit:
        edit.index["entries"].remove(edit.entry(FC2, "output"))
    assert main(["compare", str(left), str(right)]) == 1
    said = capsys.readouterr().out
    assert f"on the left side alone: 1: {FC2} output (--common leaves them out" in said
    assert main(["compare", str(right), str(left)]) == 1
    assert main(["compare", str(left), str(right), "--common"]) == 0


def test_other_shapes_and_dtypes(left, right):
    # Prevents: a reshaped tensor compared value by value with another one.
    with Edit(right) as edit:
        entry = edit.entry(FC2, "output")
        edit.tensors[entry["key"]] = edit.tensors[entry["key"]][:, :16].contiguous()
        entry["shape"][1] = 16
        entry = edit.entry(FC1, "output")
        edit.tensors[entry["key"]] = edit.tensors[entry["key"]].float()
        entry["dtype"] = "float32"
    result = _compare(left, right)
    assert str(result.first.key) == f"{FC1} output"
    assert "torch.bfloat16 (20, 64) against torch.float32 (48, 64)" in result.first.reason
    by_key = {str(each.key): each for each in result.operators}
    assert "against torch.bfloat16 (48, 16)" in by_key[f"{FC2} output"].reason


def test_nothing_in_common(left, tmp_path, capsys):
    # Prevents: two other runs found equal, as nothing of them was compared.
    other = captured(tmp_path, Model(), batch(5))
    assert main(["compare", str(left), str(other)]) == 2
    assert "have no token in common (of 10 and 10)" in capsys.readouterr().err
    assert main(["compare", str(left), str(tmp_path / "absent")]) == 2
    assert "there is no such file or folder" in capsys.readouterr().err
    assert main(["compare", str(left), str(tmp_path / "..")]) == 2
    assert "no dump" in capsys.readouterr().err


# --- replay ---------------------------------------------------------------------------------------


def _replays(left: Path, right: Path, out: Path) -> dict[str, str]:
    main(["compare", str(left), str(right), "--common", "--replay", "--json", str(out)])
    found = json.loads(out.read_text())
    assert {each["provenance"] for each in found["replay"]} == {"replay"}
    return {each["module"]: each["verdict"] for each in found["replay"]} | found["not_replayed"]


def test_replay_tells_operator_weights_and_input_apart(left, right, tmp_path):
    # Prevents: a linear blamed for what it was given; its weights' fault taken for its kernel's.
    with Edit(right) as edit:
        edit.tensor(FC2, "output")[0, 0] += 1
    said = _replays(left, right, tmp_path / "a")
    assert said.pop(FC2) == "the right side's product is not the one computed here"
    assert set(said.values()) == {"passes on its input"}
    assert len(said) == 8
    model = Model()
    with torch.no_grad():
        model.decoder.layers[1].mlp.experts.linear_fc1.weight1 *= 1.5
    other = captured(tmp_path / "other", model, permuted(batch()))
    said = _replays(left, other, tmp_path / "b")
    assert re.fullmatch(r"the weights differ: relative L2 0\.\d+ on a common input", said.pop(FC1))
    assert set(said.values()) == {"passes on its input"}


def test_replay_across_recipes(left, tmp_path):
    # Prevents: one side's codes taken for the other format's.
    other = captured(tmp_path / "other", Model("bf16"), permuted(batch()))
    said = _replays(left, other, tmp_path / "a")
    assert re.fullmatch(r"the formats differ: relative L2 0\.\d+ on a common input", said[FC1])


# --- the page -------------------------------------------------------------------------------------


def test_the_page_is_one_file(left, right, tmp_path):
    # Prevents: a page that needs a network, a name that ends its own tag, the first difference uncoloured.
    with Edit(right) as edit:
        edit.tensor(FC2, "output")[_row_of(edit, FC2, "output", 0, 0), 0] += 1
        for entry in edit.index["entries"]:
            entry["module"] = entry["module"].replace("linear_proj", "<b>linear_proj")
    page = tmp_path / "page.html"
    assert main(["compare", str(left), str(right), "--replay", "--html", str(page)]) == 1
    text = page.read_text()
    assert not re.search(r"https?:|//[a-z]|<script|<link|<img|@import|url\(", text)
    assert "<b>" not in text
    assert "&lt;b&gt;linear_proj" in text
    assert len(re.findall(r'<tr id="o\d+" class="first">', text)) == 1
    assert re.search(rf'class="first"><td class="name">{re.escape(FC2)} ', text)
    assert "<svg" in text


# --- values ---------------------------------------------------------------------------------------


def test_outputs_destroy_nothing(left, right, tmp_path, capsys):
    # Prevents: a page that is overwritten by the figures, or a dump that is replaced by either.
    page, index = tmp_path / "page.html", right / "index.json"
    before = index.read_bytes()
    for json_file, words in ((page, "output of --html"), (right, "a folder"), (index, "an input")):
        options = ["--html", str(page), "--json", str(json_file)]
        assert main(["compare", str(left), str(right), *options]) == 2
        assert words in capsys.readouterr().err
    assert not page.exists()
    assert index.read_bytes() == before


def _numbers(values: list[float], dtype: torch.dtype, what: str = "output") -> Numbers:
    return Numbers.of(what, torch.tensor(values).to(dtype))


@pytest.mark.parametrize(
    ("dtype", "a", "b", "ulp"),
    [
        (torch.float32, 1.0, 1.0 + 2**-23, 1),
        (torch.float32, -(2.0**-149), 2.0**-149, 2),
        (torch.float32, 0.0, -0.0, 0),
        (torch.bfloat16, 1.0, 1.0078125, 1),
        (torch.bfloat16, -2.0, -1.0, 128),
        (torch.float16, 1.0, 1.0 + 2**-10, 1),
        (torch.float8_e4m3fn, 1.0, 1.125, 1),
        (torch.float8_e4m3fn, -1.0, -1.25, 2),
        (torch.float8_e4m3fn, 2.0**-9, -(2.0**-9), 2),
    ],
)
def test_distances(dtype, a, b, ulp):
    # Prevents: a distance that jumps at zero or is that of another dtype; +0 and -0 called the same.
    for pair in ((a, b), (b, a)):
        found = compare_values(*(_numbers([0.5, value], dtype) for value in pair))
        assert (found.index, found.num_unequal, found.max_ulp) == ((1,), 1, ulp)
        assert found.histogram[max(ulp, 1).bit_length() - 1] == 1
        assert sum(found.histogram) == 1


def test_codes_are_compared_one_by_one():
    # Prevents: a byte's two codes as one difference, sixes and minus sixes a step apart.
    left = Numbers.of("input.codes", torch.tensor([[0x27, 0x80]], dtype=torch.uint8))
    right = Numbers.of("input.codes", torch.tensor([[0x3F, 0x00]], dtype=torch.uint8))
    found = compare_values(left, right)
    assert (found.index, found.left, found.right) == ((0, 0), 6.0, -6.0)
    assert (found.num_unequal, found.max_ulp, found.max_abs) == (3, 14, 12.0)


def test_equal_nans_are_equal():
    # Prevents: a difference in every run that has the same NaN.
    values = torch.tensor([float("nan"), 1.0])
    assert compare_values(Numbers.of("", values), Numbers.of("", values.clone())) is None


# --- tokens and rows ------------------------------------------------------------------------------


def _batch(*sequences: list[int], first: int = 0, microbatch: int = 0) -> Batch:
    ids = [token for sequence in sequences for token in sequence]
    positions = [first + n for sequence in sequences for n in range(len(sequence))]
    return Batch(microbatch, torch.tensor(ids), torch.tensor(positions))


def test_tokens_are_known_by_what_is_before_them():
    # Prevents: the same id at the same place of another sequence taken for the same token.
    tokens = match_tokens([_batch([1, 2, 3], [4, 2, 3])], [_batch([4, 2, 9], [1, 2, 3, 0])])
    left, right = tokens.left[0, 0].tolist(), tokens.right[0, 0].tolist()
    assert right[3:6] == left[:3]
    assert right[:2] == left[3:5]
    assert len({*left, *right}) == 6 + 2
    assert (tokens.num_both, tokens.num_left, tokens.num_right) == (5, 1, 2)
    place = tokens.places[left[4]]
    assert (place.sequence, place.position, place.id) == (1, 1, 2)


def test_prompts_that_are_sampled_twice():
    # Prevents: both copies matched with the first, so that the second is never compared.
    tokens = match_tokens([_batch([1, 2], [1, 3])], [_batch([1, 3], [1, 2], [1, 2])])
    left, right = tokens.left[0, 0].tolist(), tokens.right[0, 0].tolist()
    assert len(set(left)) == 4
    assert (right[0], right[2]) == (left[0], left[2])
    assert (right[3], right[1]) == (left[1], left[3])
    assert tokens.num_right == 2


def test_sequences_that_begin_in_the_middle():
    # Prevents: decoded tokens matched by the ids of one step, which tell nothing of what was before.
    one, other = _batch([7, 8], first=3), _batch([7, 8], first=3)
    tokens = match_tokens([one], [other])
    assert torch.equal(tokens.left[0, 0], tokens.right[0, 0])
    assert "taken in order" in tokens.notes[0]


def test_pairs_of_rows():
    # Prevents: padding (-1) paired with padding, a row that is there twice counted twice.
    pairs = pair_rows(torch.tensor([5, -1, 3, 9, 3]), torch.tensor([3, 7, 5, -1, -1]))
    assert (pairs.left.tolist(), pairs.right.tolist()) == ([2, 0], [0, 2])
    assert (pairs.num_left, pairs.num_right, pairs.num_padding) == (1, 1, 3)
    empty = pair_rows(torch.empty(0, dtype=torch.int64), torch.tensor([1]))
    assert (len(empty.left), empty.num_right) == (0, 1)


def test_columns_of_a_fused_projection():
    # Prevents: keys compared with queries between Megatron and SGLang.
    columns = qkv_columns(num_heads=4, num_groups=2, head_dim=1)
    # Megatron's: q0 q1 k0 v0 q2 q3 k1 v1
    assert columns.tolist() == [0, 1, 4, 5, 2, 6, 3, 7]
    assert align.qkv_columns(num_heads=2, num_groups=2, head_dim=2).tolist() == [
        0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11,
    ]  # fmt: skip
