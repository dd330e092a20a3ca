"""A capture of a learner under a deterministic profile beside SGLang's own dump of what it sampled.

The learner computes whole sequences in one forward, SGLang a prompt first and then one token of every
sequence a pass. Both become sides with the same keys, whose rows are known by their tokens.

SGLang's files do not say which sequence a decoded row belongs to. The rule, of managers/schedule_batch.py
(0.5.23): a batch that decodes holds the sequences in the order in which their prompts ended, those that
have ended are taken out, and a row's position is the length of its sequence. Which have ended is said by
the learner's sequences, which SGLang is taken to have sampled; a row that this leaves open is left out.

Modules without submodules alone are dumped, so in BF16 the experts, whose quant_method is one, are not. All
layers share one rotary embedding, whose dump holds the last layer's: the learner's are on one side alone.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .align import Batch
from .compare_sides import Key, Piece, Side
from .dump import load_ordered
from .dump_sglang import BATCH_INFO, ascending, choices, load_pass, require_first_rank

Rename = Callable[[str], str | None]


@dataclass(frozen=True)
class _Output:
    """Where SGLang has what the learner records. module: as SGLang calls it. name: as Megatron does, where
    `rename` knows none. index: in the module's list, the fused norms' (normed, residual) say.

    is_by_head: rows are a token's heads. is_read_in_bf16: FP32 under --rl-on-policy-target, and rounded by
    all that read it; the learner's is rounded.
    """

    module: str
    name: str = ""
    what: str = "output"
    index: int = 0
    is_by_head: bool = False
    is_read_in_bf16: bool = False

    def key(self, prefix: str, rename: Rename) -> Key:
        ours = prefix.replace("model.layers.", "decoder.layers.").removeprefix("model.")
        return Key(rename(prefix + self.module) or ours + self.name, self.what)


# By the names of deterministic.model, in a layer and outside.
_OF_LAYER = {
    "input_norm": _Output("input_layernorm", "input_layernorm", is_read_in_bf16=True),
    "qkv": _Output("self_attn.qkv_proj"),
    "q_norm": _Output("self_attn.q_norm", "self_attention.q_layernorm", is_by_head=True),
    "k_norm": _Output("self_attn.k_norm", "self_attention.k_layernorm", is_by_head=True),
    "attention": _Output("self_attn.attn", "self_attention.core_attention"),
    "output": _Output("self_attn.o_proj"),
    "post_norm": _Output("post_attention_layernorm", "pre_mlp_layernorm", is_read_in_bf16=True),
    "fc1": _Output("mlp.gate_up_proj"),
    "activation": _Output("mlp.act_fn", "mlp.activation_func"),
    "fc2": _Output("mlp.down_proj"),
    "router_logits": _Output("mlp.gate", what="logits"),
    "router_weights": _Output("mlp.topk", "mlp.router", "routing.weights"),
    "router_ids": _Output("mlp.topk", "mlp.router", "routing.ids", 1),
    "experts": _Output("mlp.experts"),
}
_OF_MODEL = {
    "embedding": _Output("embed_tokens", "embedding.word_embeddings"),
    "norm": _Output("norm", "decoder.final_layernorm", is_read_in_bf16=True),
}
_RECORD = re.compile(r"layers\.(\d+)\.(\w+)")
_SHARE = re.compile(r"layers\.\d+\.rank\d+\..+")
_MODULE = re.compile(r"(model\.layers\.\d+\.|model\.)(.+)")


def read_learner(path: Path, rename: Rename) -> Side:
    """What deterministic.parity.save_dump wrote, with keys and rows to compare with SGLang's.

    What SGLang has no module for keeps its own name. rename: as compare_sides.read_side. ValueError for a
    file that does not say what its rows are, and for shares of a sampler's ranks, of which no dump of
    SGLang's holds the sum.
    """
    outputs = load_ordered(path)
    shares = [name for name in outputs if _SHARE.fullmatch(name)]
    if shares:
        raise ValueError(
            f"{path}: {shares[0]} is the share of one of a sampler's ranks, and SGLang's dump of a rank "
            "holds no sums; dump an engine on one rank and a learner with sampler tp1"
        )
    batch = _learner_batch(path, outputs)
    side, rows = Side(str(path), "learner", batches=[batch]), torch.arange(len(batch.ids))
    for order, (name, tensor) in enumerate(_by_expert(path, outputs).items()):
        found = _record(name)
        if name in ("tokens", "positions"):
            continue
        if found is None:
            side.add(Key(name, ""), _piece(tensor, order, "actual", None))
            continue
        if tensor.dim() < 2 or len(tensor) != len(rows) or tensor.is_complex():
            raise ValueError(
                f"{path}: {name} is {tensor.dtype} {tuple(tensor.shape)} of {len(rows)} tokens; capture it "
                "again"
            )
        prefix, output = found
        side.add(output.key(prefix, rename), _piece(tensor, order, "actual", rows))
    return side


def _learner_batch(path: Path, outputs: Mapping[str, Tensor]) -> Batch:
    if not {"tokens", "positions"} <= outputs.keys():
        raise ValueError(
            f"{path}: holds no tokens and positions, by which its rows are paired with SGLang's; capture "
            "the forward of a deterministic Model again, with this version"
        )
    parts = outputs["tokens"], outputs["positions"]
    if any(each.is_floating_point() or each.is_complex() for each in parts):
        raise ValueError(f"{path}: tokens and positions are no integers; capture the forward again")
    batch = Batch(0, *(each.long() for each in parts))
    if batch.ids.dim() != 1 or batch.ids.shape != batch.positions.shape or not batch.prefixes():
        raise ValueError(
            f"{path}: tokens {tuple(batch.ids.shape)} at positions {tuple(batch.positions.shape)} are no "
            "sequences from position 0 on; capture the forward again"
        )
    return batch


def _record(name: str) -> tuple[str, _Output] | None:
    """(SGLang's prefix, what stands there) of a record's name."""
    layer = _RECORD.fullmatch(name)
    if layer is None:
        return ("model.", _OF_MODEL[name]) if name in _OF_MODEL else None
    output = _OF_LAYER.get(layer[2])
    return output and (f"model.layers.{layer[1]}.", output)


def _by_expert(path: Path, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A token's choices with its experts ascending, as a capture has them."""
    result = dict(outputs)
    for name in outputs:
        weights = name.removesuffix("ids") + "weights"
        if name.endswith(".router_ids") and weights in outputs:
            pair = outputs[weights], outputs[name]
            if pair[0].dim() != 2 or pair[0].shape != pair[1].shape:
                raise ValueError(
                    f"{path}: {name} and {weights} are no (T, top_k); capture it again"
                )
            result[weights], result[name] = ascending(*pair)
    return result


def _piece(tensor: Tensor, order: int, provenance: str, rows: Tensor | None) -> Piece:
    return Piece(
        lambda: tensor,
        (0, 0),
        order,
        provenance,
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        None if rows is None else lambda: rows,
    )


def read_sampler(path: Path, passes: Sequence[Path], rename: Rename, learner: Side) -> Side:
    """SGLang's passes, prompts and decoded tokens, as one batch of whole sequences.

    rename: as compare_sides.read_side. learner: what read_learner made. ValueError for other files, another
    rank, and where no sequence begins.
    """
    require_first_rank(path, passes)
    side, sequences = Side(str(path), "sglang"), _Sequences(learner.batches[0])
    found: list[tuple[Tensor, list[tuple[Key, int, Tensor]]]] = []
    order = 0
    for file in passes:
        tensors = load_pass(file)
        rows = sequences.add(*(_batch_info(file, tensors, name) for name in _OF_BATCH))
        kept = []
        for name, value in tensors.items():
            order += 1
            kept += [
                (key, order, t) for key, t in _quantities(file, name, value, len(rows), rename)
            ]
        if (rows[:, 0] >= 0).any():
            found.append((rows, kept))
    if not sequences.ids:
        raise ValueError(
            f"{path}: no pass begins its sequences at position 0; dump whole requests, with "
            "--disable-radix-cache"
        )
    batch, first_rows = sequences.batch()
    twofold = sequences.twofold()
    side.batches, side.notes = [batch], [*sequences.notes(int(twofold.sum())), *_gaps(found)]
    for rows, kept in found:
        number, position = rows.unbind(1)
        places = torch.where(number < 0, -1, first_rows[number] + position)
        places = torch.where(twofold[places.clamp_min(0)], -1, places)
        for key, at, tensor in kept:
            side.add(key, _piece(tensor, at, "hook", places))
    return side


def _gaps(found: Sequence[tuple[Tensor, list[tuple[Key, int, Tensor]]]]) -> list[str]:
    """Notes on what only some of the passes hold."""
    counts = Counter(key for _, kept in found for key in {each[0] for each in kept})
    return [
        f"{key} is missing in {len(found) - count} of {len(found)} passes of SGLang's"
        for key, count in counts.items()
        if count < len(found)
    ]


_OF_BATCH = ("input_ids", "positions", "seq_lens")


def _batch_info(file: Path, tensors: Mapping[str, Any], name: str) -> list[int]:
    value = tensors.get(BATCH_INFO + name)
    if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex():
        raise ValueError(
            f"{file}: no pass of SGLang's: {BATCH_INFO}{name} is no tensor of integers"
        )
    return value.flatten().tolist()


def _quantities(
    file: Path, name: str, value: Any, num_rows: int, rename: Rename
) -> Iterable[tuple[Key, Tensor]]:
    """What of a module's output the learner has too, one row a token."""
    module = _MODULE.fullmatch(name)
    if module is None or not num_rows:
        return
    outputs = _OF_MODEL if module[1] == "model." else _OF_LAYER
    if module[2] == "mlp.topk":
        value = choices(file, name, value)
    for output in outputs.values():
        if output.module != module[2]:
            continue
        tensor = value[output.index] if isinstance(value, list | tuple) and value else value
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else ()
        num_heads = shape[0] // num_rows if output.is_by_head and shape else 1
        if len(shape) < 2 or shape[0] != num_heads * num_rows:
            what = shape if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{file}: {name} is {what} of {num_rows} rows; dump it again")
        if output.is_read_in_bf16 and tensor.dtype == torch.float32:
            tensor = tensor.to(torch.bfloat16)
        yield output.key(module[1], rename), tensor.reshape(num_rows, -1)


@dataclass(eq=False)
class _Sequence:
    """One of SGLang's. number: among all, None where its beginning is not known. length: rows so far.

    node: the place in the learner's sequences that these rows lead to, None where they leave them.
    """

    number: int | None
    length: int
    node: int | None = None


@dataclass
class _Sequences:
    """All sequences of a dump, and which row of a pass is whose.

    ids, decoded: of every sequence its tokens so far, and which of them were decoded. running: those that may
    decode, in SGLang's order. last: of the latest pass of prompts, which alone may be cut. num_unknown:
    rows that could not be told.
    """

    learner: Batch
    ids: list[list[int]] = field(default_factory=list)
    decoded: list[list[bool]] = field(default_factory=list)
    running: list[_Sequence] = field(default_factory=list)
    last: _Sequence | None = None
    num_unknown: int = 0

    def __post_init__(self) -> None:
        # A tree: by the node of what came before, the learner's next tokens and their nodes.
        self.following: dict[int | None, dict[int, int]] = {}
        ids, positions, node = self.learner.ids.tolist(), self.learner.positions.tolist(), 0
        for number, (token, position) in enumerate(zip(ids, positions, strict=True), 1):
            node = self.following.setdefault(node if position else 0, {}).setdefault(token, number)

    def add(self, ids: list[int], positions: list[int], lengths: list[int]) -> Tensor:
        """(number of the sequence, position) of every row of the next pass, (T, 2), -1 for an unknown one."""
        if not ids:  # an idle pass, in which no sequence goes on or ends
            return torch.full((len(positions), 2), -1)
        cuts = _cuts(positions, lengths) if len(ids) == len(positions) else []
        parts = [ids[at:stop] for at, stop in cuts]
        starts = [positions[at] for at, _ in cuts]
        is_prompt = any(s == 0 or len(part) > 1 for s, part in zip(starts, parts, strict=True))
        if is_prompt:
            owners = self._prompts(starts, parts)
            self.running = [each for each in self.running if each not in owners] + owners
            self.last = owners[-1]
        else:
            owners = self._decoding(starts, [part[0] for part in parts])
            self.running = owners
        rows = torch.full((len(positions), 2), -1)
        rows[:, 1] = torch.tensor(positions, dtype=torch.int64)
        for owner, part, (at, stop) in zip(owners, parts, cuts, strict=True):
            self._extend(owner, part, not is_prompt)
            rows[at:stop, 0] = -1 if owner.number is None else owner.number
        self.num_unknown += int((rows[:, 0] < 0).sum())
        return rows

    def _prompts(self, starts: list[int], parts: list[list[int]]) -> list[_Sequence]:
        """A prompt begins at 0, or is the rest of the one that was cut."""
        owners = []
        for start, part in zip(starts, parts, strict=True):
            if start == 0:
                owners.append(_Sequence(len(self.ids), 0, 0))
                self.ids.append([])
                self.decoded.append([])
            elif not owners and self._is_cut(start, part[0]):
                owners.append(self.last)
            else:
                owners.append(_Sequence(None, start))
        return owners

    def _is_cut(self, start: int, token: int) -> bool:
        """Whether the last prompt goes on here, by its length and the learner's tokens."""
        if self.last is None or self.last.length != start:
            return False
        return token in self.following.get(self.last.node, {token})

    def _decoding(self, starts: list[int], tokens: list[int]) -> list[_Sequence]:
        """Whose every row is: in the order of those that run, each as long as the row's position says."""
        lengths = {each.length for each in self.running}
        rows = list(zip(starts, tokens, strict=True))
        found = iter(self._in_order([row for row in rows if row[0] in lengths]))
        return [(start in lengths and next(found)) or _Sequence(None, start) for start in starts]

    def _in_order(self, rows: list[tuple[int, int]]) -> list[_Sequence | None]:
        """Every row's owner, None where the ways that contradict the learner least disagree on it.

        A way gives each row a sequence of `running` of its length, behind that of the row before, and passes
        over those that have ended. It contradicts the learner where a sequence goes on with another token
        than there, or has ended where that goes on.
        """
        running, num_ended = self.running, len(self.running) - len(rows)
        if num_ended < 0:
            return [None] * len(rows)
        goes_on = [each.node in self.following for each in running]

        def cost(n: int, skipped: int) -> float:  # of row n as that of running[n + skipped]
            owner, (start, token) = running[n + skipped], rows[n]
            if owner.length != start:
                return math.inf
            return goes_on[n + skipped] and token not in self.following[owner.node]

        table = [[cost(n, k) for k in range(num_ended + 1)] for n in range(len(rows))]
        before = _least(table, goes_on)
        behind = _least([row[::-1] for row in reversed(table)], goes_on[::-1])
        total, owners = before[-1][-1], []
        for n, costs in enumerate(table):
            rest = behind[len(rows) - 1 - n]
            ways = [before[n][k] + c + rest[num_ended - k] for k, c in enumerate(costs)]
            found = [running[n + k] for k, way in enumerate(ways) if way == total < math.inf]
            owners.append(self._only(found))
        return owners

    def _only(self, owners: list[_Sequence]) -> _Sequence | None:
        """The first of those that are one, or hold the same tokens; None where they differ."""
        if len(owners) == 1:
            return owners[0]
        if not owners or any(each.number is None for each in owners):
            return None
        same = all(self.ids[each.number] == self.ids[owners[0].number] for each in owners)
        return owners[0] if same else None

    def _extend(self, owner: _Sequence, tokens: list[int], is_decoded: bool) -> None:
        owner.length += len(tokens)
        if owner.number is None:
            return
        self.ids[owner.number] += tokens
        self.decoded[owner.number] += [is_decoded] * len(tokens)
        for token in tokens:
            owner.node = self.following.get(owner.node, {}).get(token)

    def batch(self) -> tuple[Batch, Tensor]:
        """All sequences one after the other, and the first row of each."""
        lengths = torch.tensor([len(ids) for ids in self.ids])
        ids = torch.tensor([token for ids in self.ids for token in ids])
        positions = torch.cat([torch.arange(len(ids)) for ids in self.ids])
        return Batch(0, ids, positions), lengths.cumsum(0) - lengths

    def twofold(self) -> Tensor:
        """Of every row whether its tokens so far are a prompt's in one place and decoded in another: the two
        may have other bits, and the learner does not say which it computed.
        """
        nodes, kinds, paths = {}, {}, []
        for ids, decoded in zip(self.ids, self.decoded, strict=True):
            node, path = 0, []
            for token, is_decoded in zip(ids, decoded, strict=True):
                node = nodes.setdefault((node, token), len(nodes) + 1)
                kinds.setdefault(node, set()).add(is_decoded)
                path.append(node)
            paths += path
        return torch.tensor([len(kinds[node]) > 1 for node in paths], dtype=torch.bool)

    def notes(self, num_twofold: int) -> list[str]:
        found = []
        if self.num_unknown:
            found.append(
                f"{self.num_unknown} rows of SGLang's whose sequence could not be told were left out; dump "
                "with --disable-radix-cache, and fewer requests at once"
            )
        if num_twofold:
            found.append(
                f"{num_twofold} rows of SGLang's were left out: the same tokens were decoded and computed as "
                "a prompt too; dump the turns of a conversation apart"
            )
        return found


def _cuts(positions: list[int], lengths: list[int]) -> list[tuple[int, int]]:
    """First and last row, one behind it, of every sequence of a pass; none where seq_lens do not fit."""
    cuts, at = [], 0
    for length in lengths:
        stop = at + length - positions[at] if at < len(positions) else at
        if not at < stop <= len(positions) or positions[at:stop] != list(
            range(positions[at], length)
        ):
            return []
        cuts.append((at, stop))
        at = stop
    return cuts if at == len(positions) else []


def _least(table: list[list[float]], skip_costs: list[bool]) -> list[list[float]]:
    """Of the first n rows, k sequences passed over among theirs or right behind: the least cost, [n][k]."""
    sums = [0.0]
    for k in range(len(skip_costs) - len(table)):
        sums.append(sums[-1] + skip_costs[k])
    found = [sums]
    for n, costs in enumerate(table):
        sums = []
        for k, cost in enumerate(costs):
            least = found[n][k] + cost
            sums.append(min(least, sums[-1] + skip_costs[n + k]) if sums else least)
        found.append(sums)
    return found
