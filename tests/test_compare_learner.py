"""A learner's capture beside SGLang's own dump: files in its format, made by hand of what the learner has.

No SGLang runs here; which modules it dumps, and when, is read from its source (0.5.23):
srt/debug_utils/tensor_dump_forward_hook.py, srt/models/{qwen3,qwen3_moe}.py, srt/managers/schedule_batch.py.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from deterministic_small import DENSE, MOE, random_weights
from torch import Tensor

from megatron_nvfp4.__main__ import main
from megatron_nvfp4.cli.compare import _megatron_name
from megatron_nvfp4.deterministic import capture
from megatron_nvfp4.deterministic.model import Model
from megatron_nvfp4.deterministic.parity import save_dump
from megatron_nvfp4.diagnostics.align import Batch
from megatron_nvfp4.diagnostics.compare import Comparison, compare_sides
from megatron_nvfp4.diagnostics.compare_sides import read_sides
from megatron_nvfp4.diagnostics.dump_learner import _Sequences

pytest.importorskip("safetensors", reason="safetensors is not installed")
FOLDER = "TP0_PP0_Rank0_pid17"
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 96, "head_dim": 64}
CONFIGS = {
    "dense": DENSE | SIZES | {"intermediate_size": 96},
    "moe": MOE | SIZES | {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 96},
}
CASES = {
    "dense": ("dense", "sglang_det_bf16", "triton"),
    "moe": ("moe", "sglang_minite_nvfp4", "triton"),
    "fp32": ("dense", "sglang_rl_fsdp", "fa3"),
}
# Three prompts of one length: only the order of the batch tells their decoded rows apart.
PROMPTS = [[1, 2, 3], [5, 6, 7], [9, 9, 8], [4]]
RESPONSES = [[10, 11, 12], [10, 11, 13, 14], [20], [30, 31, 32]]
WAVES = [[2, 0], [1, 3]]  # prompts that SGLang takes in together
NUM_ROWS = sum(len(p) + len(r) - 1 for p, r in zip(PROMPTS, RESPONSES, strict=True))


def _captured(case: str, sampler: str = "tp1") -> dict[str, Tensor]:
    kind, profile, attention = CASES[case]
    model = Model(
        random_weights(CONFIGS[kind]),
        CONFIGS[kind],
        profile,
        attention_kind=attention,
        sampler=sampler,
    )
    with torch.no_grad(), capture() as outputs:
        model.logprobs(PROMPTS, RESPONSES)
    return outputs


@pytest.fixture(scope="module")
def captures() -> dict[str, dict[str, Tensor]]:
    return {case: _captured(case) for case in CASES}


def _layer(outputs: dict[str, Tensor], number: int, rows: Tensor) -> dict[str, object]:
    """What one layer's modules return for these rows, in the order in which they run."""
    has_fp32_norms = outputs["embedding"].dtype == torch.float32
    of = {
        name.removeprefix(f"layers.{number}."): t[rows]
        for name, t in outputs.items()
        if name.startswith(f"layers.{number}.")
    }

    def normed(name: str) -> Tensor:  # what its readers round to the learner's
        return of[name].float() * (1 + 2**-12) if has_fp32_norms else of[name]

    residual = torch.full_like(normed("post_norm"), 7.0)
    first = normed("input_norm")
    found = {
        "input_layernorm": first if number == 0 else [first, residual],
        "self_attn.qkv_proj": of["qkv"],
        "self_attn.q_norm": of["q_norm"].flatten(0, 1),
        "self_attn.k_norm": of["k_norm"].flatten(0, 1),
        "self_attn.rotary_emb": [torch.zeros(len(rows), 9), torch.zeros(len(rows), 5)],
        "self_attn.attn": of["attention"].flatten(1),
        "self_attn.o_proj": of["output"],
        "post_attention_layernorm": [normed("post_norm"), residual],
    }
    if "fc1" in of:
        found |= {
            "mlp.gate_up_proj": of["fc1"],
            "mlp.act_fn": of["activation"],
            "mlp.down_proj": of["fc2"],
        }
    else:
        weights, order = of["router_weights"].sort(
            dim=1
        )  # slots in another order than the learner's
        ids = of["router_ids"].gather(1, order).int()
        found |= {
            "mlp.gate": of["router_logits"],
            "mlp.topk": [weights, ids, of["router_logits"]],
            "mlp.experts": of["experts"],
        }
    return {f"model.layers.{number}.{name}": value for name, value in found.items()}


@dataclass
class Engine:
    """Writes passes. outputs: a capture, of which every row is one token's."""

    outputs: dict[str, Tensor]
    folder: Path
    num_passes: int = 0
    running: list[tuple[int, int]] = field(default_factory=list)  # (sequence, rows so far)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def run(self, parts: Sequence[tuple[int, int, int]]) -> Path:
        """One pass of rows `first` to `stop` of every sequence."""
        starts = (self.outputs["positions"] == 0).nonzero().flatten().tolist()
        rows = [starts[s] + n for s, first, stop in parts for n in range(first, stop)]
        rows = torch.tensor(rows, dtype=torch.int64)
        layers = [_layer(self.outputs, number, rows) for number in range(2)]
        info = {
            "input_ids": self.outputs["tokens"][rows],
            "positions": self.outputs["positions"][rows],
            "seq_lens": torch.tensor([stop for _, _, stop in parts], dtype=torch.int64),
        }
        last = self.outputs["norm"][rows]
        tensors = {
            "model": torch.zeros(2, 64),  # of the pass before
            "logits_processor": torch.zeros(2, 96),
            "model.embed_tokens": self.outputs["embedding"][rows],
            **layers[0],
            **layers[1],
            "model.norm": [last, torch.full_like(last, 7.0)],
            **{f"model.forward_batch_info.{key}": value for key, value in info.items()},
        }
        file = self.folder / f"Pass{self.num_passes:05d}.pt"
        torch.save(tensors, file)
        self.num_passes += 1
        return file

    def prefill(self, sequences: Sequence[int]) -> Path:
        self.running += [(s, len(PROMPTS[s])) for s in sequences]
        return self.run([(s, 0, len(PROMPTS[s])) for s in sequences])

    def decode(self) -> Path | None:
        """One more token of all that have not ended."""
        lengths = [len(p) + len(r) - 1 for p, r in zip(PROMPTS, RESPONSES, strict=True)]
        self.running = [(s, n + 1) for s, n in self.running if n < lengths[s]]
        return self.run([(s, n - 1, n) for s, n in self.running]) if self.running else None


def _dump(outputs: dict[str, Tensor], folder: Path) -> Path:
    engine = Engine(outputs, folder / FOLDER)
    for wave in WAVES:
        engine.prefill(wave)
        engine.decode()
    while engine.decode():
        pass
    return folder


def _learner(outputs: dict[str, Tensor], folder: Path) -> Path:
    save_dump(outputs, folder / "learner.safetensors")
    return folder / "learner.safetensors"


def _compared(left: Path, right: Path) -> Comparison:
    return compare_sides(*read_sides(left, right, _megatron_name))


def _change(file: Path, name: str, index: tuple[int, int], number: int | None = None) -> None:
    tensors = torch.load(file, weights_only=True)
    value = tensors[name] if number is None else tensors[name][number]
    value[index] += 1
    torch.save(tensors, file)


@pytest.mark.parametrize("case", CASES)
def test_every_pass_beside_the_one_forward(captures, case, tmp_path, capsys):
    # Prevents: decoded rows left out or given to another sequence of their length, heads and fused norms that
    # look like other shapes, experts in another order, FP32 norms that differ from what is read of them.
    learner, sampler = (
        _learner(captures[case], tmp_path),
        _dump(captures[case], tmp_path / "sampler"),
    )
    for sides in ((learner, sampler), (sampler, learner)):
        result = _compared(*sides)
        assert result.first is None
        assert {each.num_rows for each in result.operators} == {NUM_ROWS}
        assert (result.tokens.num_both, result.tokens.num_left, result.tokens.num_right) == (
            NUM_ROWS,
            0,
            0,
        )
        assert len(result.operators) == 2 + 2 * {"moe": 11}.get(case, 10)
        assert main(["compare", *map(str, sides), "--common"]) == 0
        assert "note" not in capsys.readouterr().out
        assert main(["compare", *map(str, sides)]) == 1
    alone = {str(key) for key in _compared(learner, sampler).only_left}
    assert alone == {"logprobs"} | {f"layers.{n}.{x}_rope" for n in range(2) for x in "qk"}
    assert not _compared(learner, sampler).only_right
    files = [tmp_path / name for name in ("page", "data")]
    options = ["--html", str(files[0]), "--json", str(files[1]), "--replay", "--common"]
    assert main(["compare", str(learner), str(sampler), *options]) == 0
    keys = [
        (each["module"], each["what"]) for each in json.loads(files[1].read_text())["operators"]
    ]
    assert keys[:3] == [
        ("embedding.word_embeddings", "output"),
        ("decoder.layers.0.input_layernorm", "output"),
        ("decoder.layers.0.self_attention.linear_qkv", "output"),
    ]
    assert keys[-1] == ("decoder.final_layernorm", "output")


@pytest.mark.parametrize(
    ("case", "module", "number", "column", "name", "index"),
    [
        ("dense", "self_attn.qkv_proj", None, 70, "self_attention.linear_qkv output", (70,)),
        ("dense", "self_attn.attn", None, 70, "self_attention.core_attention output", (1, 6)),
        ("dense", "input_layernorm", 0, 3, "input_layernorm output", (3,)),
        ("dense", "mlp.down_proj", None, 3, "mlp.linear_fc2 output", (3,)),
        ("moe", "post_attention_layernorm", 0, 3, "pre_mlp_layernorm output", (3,)),
        ("moe", "mlp.gate", None, 3, "mlp.router logits", (3,)),
        ("moe", "mlp.experts", None, 3, "mlp.experts output", (3,)),
        ("fp32", "post_attention_layernorm", 0, 3, "pre_mlp_layernorm output", (3,)),
        ("dense", "input_layernorm", 1, 3, None, None),
        ("dense", "self_attn.rotary_emb", 0, 3, None, None),
    ],
)
def test_one_value_of_one_decoding_pass(
    captures, case, module, number, column, name, index, tmp_path, capsys
):
    # Prevents: the difference at another token, operator or column; the residual taken for the norm.
    learner, sampler = (
        _learner(captures[case], tmp_path),
        _dump(captures[case], tmp_path / "sampler"),
    )
    # Pass 3 decodes the third token of sequence 0, then the second of 1 and of 3.
    _change(sampler / FOLDER / "Pass00003.pt", f"model.layers.1.{module}", (1, column), number)
    if name is None:
        assert main(["compare", str(learner), str(sampler), "--common"]) == 0
        return
    # Behind it in the execution, before it in the file's passes and in the batch.
    _change(sampler / FOLDER / "Pass00000.pt", "model.norm", (0, 0), 0)
    assert main(["compare", str(learner), str(sampler), "--common"]) == 1
    column = ", ".join(map(str, index))
    said = f"decoder.layers.1.{name} differs at [microbatch 0, sequence 1, position 3, token id 10"
    assert f"compare: {said}, column {column}]: " in capsys.readouterr().out
    first = _compared(sampler, learner).first
    assert str(first.key) == f"decoder.layers.1.{name}"
    assert (first.place.token.position, first.place.token.id) == (3, 10)


def test_the_routers_choice(captures, tmp_path):
    # Prevents: experts that follow from another choice named as the first to differ where routing agrees.
    sampler = _dump(captures["moe"], tmp_path / "sampler")
    learner, file = _learner(captures["moe"], tmp_path), sampler / FOLDER / "Pass00003.pt"
    tensors = torch.load(file, weights_only=True)
    ids = tensors["model.layers.0.mlp.topk"][1]
    ids[1, 0] = next(n for n in range(8) if n not in ids[1].tolist())
    tensors["model.layers.0.mlp.experts"][1, 0] += 1
    torch.save(tensors, file)
    result = _compared(learner, sampler)
    assert str(result.first.key).startswith("decoder.layers.0.mlp.router routing.")
    experts = next(each for each in result.operators if each.key.module.endswith("0.mlp.experts"))
    assert experts.differs
    assert experts.conditioned_rows == NUM_ROWS - 1
    assert result.first_conditioned is None


def test_experts_that_sglang_does_not_dump(captures, tmp_path):
    # Prevents: a verdict on BF16 experts, whose module has a submodule and so no hook.
    sampler, learner = (
        _dump(captures["moe"], tmp_path / "sampler"),
        _learner(captures["moe"], tmp_path),
    )
    for file in (sampler / FOLDER).iterdir():
        tensors = torch.load(file, weights_only=True)
        torch.save({n: t for n, t in tensors.items() if not n.endswith(".experts")}, file)
    assert "decoder.layers.1.mlp.experts output" in map(str, _compared(learner, sampler).only_left)
    assert main(["compare", str(learner), str(sampler), "--common"]) == 0


def test_a_sequence_that_ends_beside_others_of_its_length(captures, tmp_path, capsys):
    # Prevents: the row of the sequence that goes on given to the one that has ended.
    learner, engine = (
        _learner(captures["dense"], tmp_path),
        Engine(captures["dense"], tmp_path / FOLDER),
    )
    engine.run([(0, 0, 3), (2, 0, 3), (1, 0, 3)])  # 2 ends with its prompt
    file = engine.run([(0, 3, 4), (1, 3, 4)])
    result = _compared(learner, engine.folder)
    assert result.first is None
    assert result.tokens.num_both == 3 * 3 + 2
    # Both of 0, as of a prompt that is sampled twice, have ended; one is computed once more, beside 1.
    engine = Engine(captures["dense"], tmp_path / "twice" / FOLDER)
    engine.run([(0, 0, 3), (0, 0, 3), (1, 0, 3)])
    for n in (3, 4):
        engine.run([(0, n, n + 1), (0, n, n + 1), (1, n, n + 1)])
    file = engine.run([(1, 5, 6), (1, 5, 6)])
    tensors = torch.load(file, weights_only=True)
    tensors["model.forward_batch_info.input_ids"][0] = 12
    torch.save(tensors, file)
    _change(file, "model.norm", (1, 0), 0)
    result = _compared(learner, engine.folder)
    assert result.tokens.num_both == 5 + 6
    assert (result.first.place.token.sequence, result.first.place.token.position) == (1, 5)
    # One of two equal ones has ended: which, is no matter.
    engine = Engine(captures["dense"], tmp_path / "equal" / FOLDER)
    engine.run([(0, 0, 3), (0, 0, 3), (3, 0, 1)])
    engine.run([(0, 3, 4), (3, 1, 2)])
    result = _compared(learner, engine.folder)
    assert (result.tokens.num_both, result.right.notes) == (4 + 2, [])
    # 0 and 1 both go on with token 10; which of them has ended, nothing says.
    engine = Engine(captures["dense"], tmp_path / "other" / FOLDER)
    engine.run([(0, 0, 3), (1, 0, 3)])
    file = engine.run([(1, 3, 4)])
    _change(file, "model.norm", (0, 0), 0)
    engine.run([(1, 4, 5)])
    result = _compared(learner, engine.folder)
    assert result.first is None
    assert result.tokens.num_both == 2 * 3
    assert "2 rows of SGLang's whose sequence could not be told" in result.right.notes[0]
    assert main(["compare", str(learner), str(engine.folder), "--common"]) == 0
    assert "--disable-radix-cache, and fewer requests at once" in capsys.readouterr().out


def test_tokens_decide_where_the_order_does_not(captures, tmp_path):
    # Prevents: rows left out whose token only one of the learner's sequences has there.
    outputs = dict(captures["dense"])
    # Sequence 1 has another first token of its response.
    outputs["tokens"] = outputs["tokens"].clone()
    outputs["tokens"][(outputs["positions"] == 0).nonzero()[1] + 3] = 50
    learner, engine = _learner(outputs, tmp_path), Engine(outputs, tmp_path / FOLDER)
    engine.run([(0, 0, 3), (1, 0, 3)])
    _change(engine.run([(1, 3, 4)]), "model.norm", (0, 0), 0)
    first = _compared(learner, engine.folder).first
    assert (first.place.token.sequence, first.place.token.position) == (1, 3)
    # Other samples of the same prompts do not stand in the way, whatever the learner has of their tokens.
    first_rows = (outputs["positions"] == 0).nonzero().flatten().tolist()
    for ids, num_both, num_right in (((60, 50), 7, 1), ((50, 60), 6, 2)):
        tokens = outputs["tokens"].clone()
        tokens[first_rows[0] + 3], tokens[first_rows[1] + 3] = ids
        engine = Engine(outputs | {"tokens": tokens}, tmp_path / f"{ids[0]}" / FOLDER)
        engine.run([(0, 0, 3), (1, 0, 3)])
        engine.run([(0, 3, 4), (1, 3, 4)])
        result = _compared(learner, engine.folder)
        assert (result.tokens.num_both, result.tokens.num_right) == (num_both, num_right)
        assert not result.right.notes
    # A prompt that the learner was not given has ended beside one that goes on there.
    tokens = outputs["tokens"].clone()
    tokens[first_rows[1] + 2] = 80
    engine = Engine(outputs | {"tokens": tokens}, tmp_path / "foreign" / FOLDER)
    engine.run([(1, 0, 3), (0, 0, 3)])
    _change(engine.run([(0, 3, 4)]), "model.norm", (0, 0), 0)
    first = _compared(learner, engine.folder).first
    assert (first.place.token.sequence, first.place.token.position) == (0, 3)


@pytest.mark.parametrize("num_given", [40, 6])
def test_rows_of_many_sequences(num_given):
    # Prevents: rows given to another sequence, or lost, where many of one length end beside each other.
    generator, size = torch.Generator().manual_seed(num_given), 10
    ids = torch.randint(0, 1000, (40, 2 * size + 1), generator=generator)
    ends = torch.randint(size, 2 * size, (40,), generator=generator).tolist()
    parts = [ids[s, : ends[s]] for s in range(num_given)]
    positions = [torch.arange(len(part)) for part in parts]
    sequences = _Sequences(Batch(0, torch.cat(parts), torch.cat(positions)))
    sequences.add(ids[:, :size].flatten().tolist(), [*range(size)] * 40, [size] * 40)
    num_lost = 0
    for n in range(size, 2 * size):
        running = [s for s in range(40) if n <= ends[s]]  # one row behind the end, too
        rows = sequences.add(ids[running, n].tolist(), [n] * len(running), [n + 1] * len(running))
        for s, number in zip(running, rows[:, 0].tolist(), strict=True):
            is_given = s < num_given and n < ends[s]
            num_lost += is_given and number < 0
            assert number < 0 or sequences.ids[number][: n + 1] == ids[s, : n + 1].tolist()
    assert num_lost == 0 if num_given == 40 else num_lost < sum(ends[:num_given]) - size * num_given


def test_prompts_in_chunks_and_from_a_cache(captures, tmp_path):
    # Prevents: the rest of a cut prompt lost, a cached prompt's rest given to whatever has that length.
    learner = _learner(captures["dense"], tmp_path)
    engine = Engine(captures["dense"], tmp_path / FOLDER)
    engine.run([(0, 0, 3), (1, 0, 1)])
    engine.run([(1, 1, 3), (3, 0, 1)])
    _change(engine.run([(0, 3, 4), (1, 3, 4), (3, 1, 2)]), "model.norm", (1, 0), 0)
    result = _compared(learner, engine.folder)
    assert result.tokens.num_both == 3 + 3 + 1 + 3
    assert (result.first.place.token.sequence, result.first.place.token.position) == (1, 3)
    engine = Engine(captures["dense"], tmp_path / "other" / FOLDER)
    engine.run([(0, 0, 1)])
    _change(engine.run([(1, 1, 3), (2, 1, 3)]), "model.norm", (0, 0), 0)
    engine.run([(1, 3, 4)])
    result = _compared(learner, engine.folder)
    assert result.first is None
    assert result.tokens.num_both == 1
    assert "5 rows of SGLang's" in result.right.notes[0]


def test_rows_in_another_order(captures, tmp_path):
    # Prevents: rows paired by place where the order is not SGLang's, or more rows run than sequences.
    learner = _learner(captures["dense"], tmp_path)
    for name, begun, parts in (
        ("turned", [(0, 0, 3), (3, 0, 1)], [(3, 1, 2), (0, 3, 4)]),
        ("more", [(0, 0, 3)], [(0, 3, 4), (1, 3, 4)]),
    ):
        engine = Engine(captures["dense"], tmp_path / name / FOLDER)
        engine.run(begun)
        _change(engine.run(parts), "model.norm", (0, 0), 0)
        result = _compared(learner, engine.folder)
        assert result.first is None
        assert "2 rows of SGLang's" in result.right.notes[0]


def test_a_pass_whose_lengths_do_not_fit(captures, tmp_path):
    # Prevents: rows of a speculative pass, or of one with padding, paired by a guess.
    learner, sampler = (
        _learner(captures["dense"], tmp_path),
        _dump(captures["dense"], tmp_path / "sampler"),
    )
    file = sampler / FOLDER / "Pass00001.pt"
    tensors = torch.load(file, weights_only=True)
    for lengths in ([5], [4, 4], []):
        tensors["model.forward_batch_info.seq_lens"] = torch.tensor(lengths, dtype=torch.int64)
        torch.save(tensors | {"model.norm": torch.zeros(1, 64)}, file)
        result = _compared(learner, sampler)
        assert result.first is None
        # This row and the sequence's next, which begins behind what is known; no other.
        assert result.tokens.num_both == NUM_ROWS - 2
        assert result.right.notes[0].startswith("2 rows of SGLang's")


def test_a_capture_says_what_its_rows_are(captures, tmp_path, capsys):
    # Prevents: a file of another version that is paired row by row; shares compared with sums.
    outputs, sampler = captures["dense"], _dump(captures["dense"], tmp_path / "sampler")
    assert list(outputs)[:3] == ["tokens", "positions", "embedding"]

    def said(changed: dict[str, Tensor], other: Path = sampler) -> str:
        assert main(["compare", str(_learner(changed, tmp_path)), str(other), "--common"]) == 2
        return capsys.readouterr().err

    for lacking in ("tokens", "positions"):
        without = {name: t for name, t in outputs.items() if name != lacking}
        assert "holds no tokens and positions" in said(without)
    assert "again, with this version" in said(without)
    assert "no sequences from position 0 on" in said(
        outputs | {"positions": outputs["positions"] + 1}
    )
    wrong = "layers.0.qkv is torch.bfloat16 (2, 768) of 17 tokens"
    assert wrong in said(outputs | {"layers.0.qkv": outputs["layers.0.qkv"][:2]})
    ranks = said(_captured("dense", sampler="tp2"))
    assert "layers.0.rank0.qkv is the share of one of a sampler's ranks" in ranks
    assert "learner with sampler tp1" in ranks


def test_dumps_of_sglang_that_cannot_be_used(captures, tmp_path, capsys):
    # Prevents: a rank's shard compared with the whole; another file taken for a pass.
    learner = _learner(captures["moe"], tmp_path)

    def said(folder: Path) -> str:
        assert main(["compare", str(folder), str(learner), "--common"]) == 2
        return capsys.readouterr().err

    engine = Engine(captures["moe"], tmp_path / "TP1_PP0_Rank1_pid18")
    engine.prefill([0])
    assert "rank TP1 PP0; dump a run on one rank" in said(engine.folder)
    engine = Engine(captures["moe"], tmp_path / FOLDER)
    file = engine.run([(0, 3, 4)])
    assert "no pass begins its sequences at position 0" in said(engine.folder)
    tensors = torch.load(file, weights_only=True)
    torch.save(tensors | {"model.layers.0.mlp.topk": torch.zeros(1, 4)}, file)
    assert "model.layers.0.mlp.topk holds no weights and ids" in said(engine.folder)
    tensors.pop("model.forward_batch_info.seq_lens")
    torch.save(tensors, file)
    assert "no pass of SGLang's: model.forward_batch_info.seq_lens" in said(file)


def test_two_learners_need_all_names(captures, tmp_path, capsys):
    # Prevents: two files of one forward compared by what they happen to share.
    outputs, left = captures["dense"], tmp_path / "left"
    save_dump(outputs, left)
    assert main(["compare", str(left), str(_learner(outputs, tmp_path))]) == 0
    rest = {name: t for name, t in outputs.items() if name != "layers.1.output"}
    assert main(["compare", str(left), str(_learner(rest, tmp_path)), "--common"]) == 2
    assert "the second dump lacks layers.1.output" in capsys.readouterr().err
    other = outputs | {"tokens": outputs["tokens"] + 1}
    assert main(["compare", str(left), str(_learner(other, tmp_path))]) == 1
    assert "compare: tokens differs at [0]" in capsys.readouterr().out
