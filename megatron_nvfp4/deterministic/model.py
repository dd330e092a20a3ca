"""Qwen3 and Qwen3-MoE assembled from the deterministic operators, in SGLang's order, from weights with
HF's names.

    first layer   residual = embedding;  h = rms_norm(residual)
    other layers  h, residual = add_rms_norm(h, residual)
    attention     q, k, v = h wqkv;  q, k = rope(rms_norm per head);  h = attention(q, k, v) wo
    then          h, residual = add_rms_norm(h, residual);  h = MLP or experts(h)
    at the end    h, _ = add_rms_norm(h, residual);  log-probabilities of the tokens by the head

Order: SGLang 0.5.23, models/qwen3.py and models/qwen3_moe.py with --enable-deterministic-inference, and
models/qwen3.py with --rl-on-policy-target. The profile says which norms, dtypes and roundings.

A sampler of two ranks (--tp-size 2) adds otherwise where K is shared, and only there. A learner of one rank
holds all shares and adds as the two do; of two ranks each holds those of the sampler's rank of its number,
and they meet where the sampler's do. Its rules, all of SGLang 0.5.23 under srt/:

    models/qwen3.py, qwen3_moe.py       a rank has half of the query and of the key heads, of an MLP's and of
                                        each expert's width: the first halves are rank 0's. Router and norms
                                        are whole on each.
    layers/linear.py,                   output and down projections and the sum over a token's slots are
    layers/moe/fused_moe_triton         BF16 on each rank, of its own share
    layers/layer_boundary/prepare.py    the next norm's input: one all-reduce of these for attention, one for
                                        the MLP or the experts, then the addition to the residual; the kernels
                                        that fuse it with the norm are off (arg_groups/overrides.py,
                                        _deterministic_allreduce_fusion_disable)
    arg_groups/attention_hook.py,       the all-reduce is NCCL's in BF16, custom, symmetric-memory and PCIe
    distributed/parallel_state.py       ones are off: for two ranks one rounded sum of two, in either order
    layers/moe/token_dispatcher/        --ep-size 2: a rank has half of the experts, whole; ids of the others
    standard.py, moe_runner/triton.py   are -1, their slots exact zeros; the kernel and the sum are the same
    layers/vocab_parallel_embedding.py  a token's row, plus zero from the rank that has it not
    layers/logits_processor.py          logits of half the vocabulary each, BF16, put side by side

Columns of a product, heads and logits do not depend on each other: sharing these changes no bit, except
that NVFP4 operands are quantised share by share, each with an amax of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from .ops.activation import silu_and_mul
from .ops.attention import PackedBatch, attention
from .ops.collectives import gather_columns, shared_input, sum_partials
from .ops.experts import experts
from .ops.linear import Weights, add_partials, linear
from .ops.logprobs import token_logprobs
from .ops.norm import add_rms_norm, rms_norm, rms_norm_fp32
from .ops.parallel_logprobs import parallel_token_logprobs
from .ops.rope import apply_rope, rope_table
from .ops.router import route
from .parity import record
from .profiles import Profile, RunFacts, SamplerRanks, require


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, those that a rank of the sampler has a share of as one share after the other.

    attention: (projections of q, k and v stacked, output projection). mlp: (gate and up projections stacked,
    down projection), or of all experts; one share where ranks have whole experts. gate: None where the MLP
    is dense.
    """

    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor
    k_norm: Tensor
    attention: tuple["Share", ...]
    gate: Weights | None
    mlp: tuple["Share", ...]

    @classmethod
    def of(
        cls,
        weights: Mapping[str, "Tensor | Weights"],
        number: int,
        profile: Profile,
        sampler: SamplerRanks,
    ) -> "Layer":
        """The tensors of model.layers.`number`, cut into the shares of the sampler's ranks; norms' weights as
        `profile` multiplies them.
        """
        prefix = f"model.layers.{number}."
        attn, mlp = prefix + "self_attn.", prefix + "mlp."
        gate, num_ranks = weights.get(mlp + "gate.weight"), sampler.tensor_parallel
        if gate is None:
            shares = _shares(weights, mlp, "gate_up", ("gate", "up"), "down", num_ranks)
        else:
            gate, num_ranks = Weights.of(gate), num_ranks // sampler.expert_parallel
            shares = _expert_shares(weights, mlp + "experts.", gate.shape[1], num_ranks)
        norms = (
            prefix + "input_layernorm.weight",
            prefix + "post_attention_layernorm.weight",
            attn + "q_norm.weight",
            attn + "k_norm.weight",
        )
        return cls(
            *(_widened(weights[name], profile.norm_weight) for name in norms),
            tuple(_shares(weights, attn, "qkv", "qkv", "o", sampler.tensor_parallel)),
            gate,
            tuple(shares),
        )


def _widened(x: Tensor, dtype: str) -> Tensor:
    """x in FP32 where dtype is float32, which changes no value; as it is elsewhere."""
    return x.float() if dtype == "float32" else x


# A rank's two matrices of a block: the projections into it, stacked, and the one out of it.
Share = tuple[Weights, Weights]


def _shares(
    weights: Mapping[str, Tensor | Weights],
    prefix: str,
    stacked: str,
    ins: Sequence[str],
    out: str,
    num_ranks: int,
) -> list[Share]:
    """Of each rank its rows of the projections `ins`, one after the other, and its columns of `out`.

    Of one rank without a copy where the projection `stacked` is given.
    """
    out, stacked = (f"{prefix}{name}_proj.weight" for name in (out, stacked))
    if num_ranks == 1 and stacked in weights:
        return [(Weights.of(weights[stacked]), Weights.of(weights[out]))]
    parts = [Weights.of(t) for pair in _parts(weights, prefix, ins, out, num_ranks) for t in pair]
    return list(zip(parts[::2], parts[1::2], strict=True))


def _parts(
    weights: Mapping[str, Tensor], prefix: str, ins: Sequence[str], out: str, num_ranks: int
) -> list[tuple[Tensor, Tensor]]:
    rows = [weights[f"{prefix}{name}_proj.weight"].chunk(num_ranks) for name in ins]
    cols = weights[out].chunk(num_ranks, dim=1)
    return [(torch.cat(own), col.contiguous()) for *own, col in zip(*rows, cols, strict=True)]


def _expert_shares(
    weights: Mapping[str, Tensor | Weights], prefix: str, num_experts: int, num_ranks: int
) -> list[Share]:
    """As _shares, of all experts."""
    whole = [prefix + name for name in ("gate_up_proj", "down_proj")]
    if num_ranks == 1 and whole[0] in weights:
        return [tuple(Weights.of(weights[name]) for name in whole)]
    each = [
        _parts(weights, name, ("gate", "up"), name + "down_proj.weight", num_ranks)
        for name in (f"{prefix}{expert}." for expert in range(num_experts))
    ]
    return [
        tuple(Weights.of(torch.stack(matrices)) for matrices in zip(*rank, strict=True))
        for rank in zip(*each, strict=True)
    ]


def _has_both_kinds(config: Mapping) -> bool:
    """Whether some layers have no experts where others have, by transformers' Qwen3-MoE keys."""
    if not config.get("num_experts"):
        return False
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    return any(n in dense or (n + 1) % step for n in range(config["num_hidden_layers"]))


def run_facts(
    config: Mapping,
    attention_kind: str,
    device: torch.device | str,
    sampler: SamplerRanks | str = "tp1",
) -> RunFacts:
    """What a profile asks of a Hugging Face config (its dictionary) run on one `device`."""
    device = torch.device(device)
    num_experts = config.get("num_experts", 0)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return RunFacts(
        model_type=config["model_type"],
        attention=attention_kind,
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        hidden_size=config["hidden_size"],
        mlp_width=config["moe_intermediate_size" if num_experts else "intermediate_size"],
        num_experts=num_experts,
        dense_width=config["intermediate_size"] if _has_both_kinds(config) else None,
        sampler=SamplerRanks.parse(sampler),
        attention_dropout=config.get("attention_dropout", 0.0),
        sliding_window=bool(config.get("use_sliding_window")),
        rope_scaling=rope.get("rope_type", "default") != "default",
    )


class Model:
    """The forward of one profile; every weight's gradient flows to the tensors it was given."""

    def __init__(
        self,
        weights: Mapping[str, Tensor | Weights],
        config: Mapping,
        profile: Profile | str,
        *,
        attention_kind: str = "triton",
        sampler: SamplerRanks | str = "tp1",
        group: ProcessGroup | None = None,
    ) -> None:
        """weights: BF16 under Hugging Face's names on one device; config: config.json's dictionary; sampler:
        the ranks it is spread over, tp1, tp2 or tp2ep2. What these have whole may be given without a copy, as
        self_attn.qkv_proj, mlp.gate_up_proj, and of all experts mlp.experts.gate_up_proj and down_proj.

        group: the learner's tensor-parallel ranks, None for one. Of two, each gives its shares: rows of q, k,
        v, gate and up, columns of o and down, equally many rows of the embedding and the head, padding
        last; all else whole. Both call every method alike. Gradients of whole weights are equal on both,
        but for q_norm and k_norm, where each has its own heads' part, to be summed as Megatron's
        finalize_model_grads does.

        A model has the values that the weights had when it was made: make another when they have changed.
        The embedding and the norms' weights may be FP32 where the profile takes them so. Raises
        ValueError with all reasons where the profile cannot be honoured, or for biases, KeyError for a
        weight that lacks.
        """
        biases = [name for name in weights if name.endswith(".bias")]
        if biases:
            raise ValueError(
                f"{biases[0]}: {len(biases)} biases, which the forward does not add; use a model without them"
            )
        self.embedding = weights["model.embed_tokens.weight"]
        device = self.embedding.device
        self.sampler = SamplerRanks.parse(sampler)
        self.group = group if group is not None and group.size() > 1 else None
        num_ranks = 1 if self.group is None else self.group.size()
        facts = run_facts(config, attention_kind, device, self.sampler)
        self.profile = require(profile, replace(facts, tensor_parallel=num_ranks))
        self.attention_kind, self.config = attention_kind, config
        num_layers = config["num_hidden_layers"]
        held = self.sampler if self.group is None else SamplerRanks()  # cut by who gives them
        self.layers = [
            Layer.of(weights, number, self.profile, held) for number in range(num_layers)
        ]
        self._check_shares(num_ranks)
        self.norm = _widened(weights["model.norm.weight"], self.profile.norm_weight)
        tied = config.get("tie_word_embeddings", False)
        head = self.embedding if tied else weights["lm_head.weight"]
        self.vocab_size = config["vocab_size"]
        num_rows = head.shape[-2]
        if num_rows * num_ranks < self.vocab_size:
            raise ValueError(
                f"the head has {num_rows} rows on each of {num_ranks} ranks for a vocabulary of "
                f"{self.vocab_size}; give them all"
            )
        if self.profile.residual == "float32" and isinstance(head, Tensor):
            head = head.to(torch.bfloat16)  # of an FP32 embedding that is the head too
        if self.group is None and num_rows > self.vocab_size:  # rows behind it are padding
            head = Weights.of(head).first_rows(self.vocab_size)
        self.head = head
        theta = (config.get("rope_parameters") or config)["rope_theta"]
        self.table = rope_table(
            config["head_dim"],
            theta,
            config["max_position_embeddings"],
            device,
            self.profile.rope_frequencies,
        )

    def _check_shares(self, num_ranks: int) -> None:
        """ValueError where the learner's ranks have not given their shares, but whole weights."""
        config = self.config
        num_heads, size = config["num_attention_heads"], config["head_dim"]
        qkv = (num_heads + 2 * config["num_key_value_heads"]) * size
        for number, layer in enumerate(self.layers):
            width = config["intermediate_size" if layer.gate is None else "moe_intermediate_size"]
            ins, outs = zip(*layer.attention, strict=True)
            mlp_ins, mlp_outs = zip(*layer.mlp, strict=True)
            for name, axis, shares, whole in (
                ("q, k and v have {} rows together", -2, ins, qkv),
                ("o has {} columns", -1, outs, num_heads * size),
                ("gate and up have {} rows together", -2, mlp_ins, 2 * width),
                ("down has {} columns", -1, mlp_outs, width),
            ):
                given = sum(share.shape[axis] for share in shares)
                if given != whole // num_ranks:
                    raise ValueError(
                        f"weights of layer {number}: {name.format(given)}; give the {whole // num_ranks} "
                        f"of one of {num_ranks} tensor-parallel ranks"
                    )

    def hidden(self, tokens: Tensor, batch: PackedBatch) -> Tensor:
        """Hidden states after the last norm, BF16 (T, H), of tokens int64 (T,) laid as `batch` says."""
        if tokens.shape != (batch.num_rows,):
            raise ValueError(
                f"hidden: tokens {tuple(tokens.shape)} do not fit the batch; give ({batch.num_rows},)"
            )
        eps = self.config["rms_norm_eps"]
        record("tokens", tokens)
        record("positions", batch.positions)
        residual = record("embedding", _widened(self._embed(tokens), self.profile.residual))
        h = self._norm(residual, self.layers[0].input_norm).to(torch.bfloat16)
        for number, layer in enumerate(self.layers):
            name = f"layers.{number}."
            if number:
                h, residual = add_rms_norm(h, residual, layer.input_norm, eps)
            record(name + "input_norm", h)
            h = self._attend(layer, h, batch, name)
            h, residual = add_rms_norm(h, residual, layer.post_norm, eps)
            record(name + "post_norm", h)
            h = self._mlp(layer, h, name)
        h, _ = add_rms_norm(h, residual, self.norm, eps)
        return record("norm", h)

    def logprobs(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        temperature: float = 1.0,
    ) -> list[Tensor]:
        """Log-probability, FP32, of every response token of every sequence, with gradients.

        Values are those of BF16 where the profile's log-probabilities are.
        """
        self._check_sequences(prompts, responses)
        device = self.embedding.device
        rows = [[*p, *r[:-1]] for p, r in zip(prompts, responses, strict=True)]
        batch = PackedBatch.of([len(p) for p in prompts], [len(r) for r in rows], device)
        tokens = torch.tensor([t for row in rows for t in row]).to(device)
        h = self.hidden(tokens, batch)
        firsts = torch.tensor(batch.lengths).cumsum(0).tolist()
        lengths = [len(r) for r in responses]
        scored = torch.cat([torch.arange(f - n, f) for f, n in zip(firsts, lengths, strict=True)])
        targets = torch.tensor([t for r in responses for t in r]).to(device)
        result = self.score(h[scored.to(device)], targets, temperature)
        return list(record("logprobs", result).split(lengths))

    def _check_sequences(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
    ) -> None:
        if not responses or len(prompts) != len(responses):
            raise ValueError(
                f"logprobs: {len(prompts)} prompts and {len(responses)} responses; give as many of each, and "
                "at least one pair"
            )
        for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            if not response:
                raise ValueError(f"logprobs: response {number} is empty; leave the sequence out")
            outside = next((t for t in (*prompt, *response) if not 0 <= t < self.vocab_size), None)
            if outside is not None:
                raise ValueError(
                    f"logprobs: token {outside} of sequence {number} is outside the vocabulary of "
                    f"{self.vocab_size}"
                )
            length = len(prompt) + len(response) - 1
            if length > len(self.table):
                raise ValueError(
                    f"logprobs: sequence {number} has {length} positions of {len(self.table)}; raise "
                    "max_position_embeddings in the config"
                )

    def score(self, hidden: Tensor, tokens: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        """Log-probability, FP32 (M,), of tokens int64 (M,) after hidden BF16 (M, H); see token_logprobs."""
        rounding = getattr(torch, self.profile.logprobs)
        if self.group is None:
            return token_logprobs(hidden, self.head, tokens, temperature, rounding)
        return parallel_token_logprobs(
            hidden, self.head, tokens, self.vocab_size, self.group, temperature, rounding
        )

    def logits(self, hidden: Tensor, is_whole: bool = True) -> Tensor:
        """Logits, BF16 (M, vocab_size), after hidden BF16 (M, H), before the temperature.

        is_whole: False for this rank's columns alone; ValueError where padding stands among any rank's.
        """
        if self.group is None:
            return linear(hidden, self.head)
        num_padded = self.head.shape[-2] * self.group.size() - self.vocab_size
        if not is_whole and num_padded:
            raise ValueError(
                f"logits: {num_padded} of the last rank's columns are padding, which a softmax over "
                "ranks would count; take whole logits (runtime_gather_output), or losses (labels)"
            )
        own = linear(shared_input(hidden, self.group), self.head)
        return gather_columns(own, self.group)[:, : self.vocab_size] if is_whole else own

    def _embed(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding, as the sampler's ranks add them."""
        if self.sampler.tensor_parallel == 1:
            return functional.embedding(tokens, self.embedding)
        if self.group is None:
            # Another rank adds zero, which -0 does not survive.
            return functional.embedding(tokens, self.embedding) + 0.0
        num_rows = self.embedding.shape[0]
        rows = tokens - self.group.rank() * num_rows
        is_here = (rows >= 0) & (rows < num_rows)
        # A token of the other rank takes any row; one of neither keeps its index, and fails as on one rank.
        is_there = ~is_here & (tokens >= 0) & (tokens < num_rows * self.group.size())
        own = functional.embedding(rows.where(~is_there, 0), self.embedding)
        return sum_partials(own.where(is_here[:, None], 0.0), self.group)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        norm = rms_norm_fp32 if self.profile.norm_weight == "float32" else rms_norm
        return norm(x, weight, self.config["rms_norm_eps"])

    def _attend(self, layer: Layer, h: Tensor, batch: PackedBatch, name: str) -> Tensor:
        h = self._shared(h)
        partials = [
            self._attend_share(layer, share, h, batch, label)
            for label, share in self._labelled(name, layer.attention)
        ]
        return self._summed(partials, name, "output")

    def _attend_share(
        self,
        layer: Layer,
        share: Share,
        h: Tensor,
        batch: PackedBatch,
        name: str,
    ) -> Tensor:
        """What one rank's heads add to the output projection."""
        config, size, (qkv_weight, output) = self.config, self.config["head_dim"], share
        ranks = self.sampler.tensor_parallel
        heads = [config["num_attention_heads"]] + 2 * [config["num_key_value_heads"]]
        qkv = record(name + "qkv", linear(h, qkv_weight, self.profile.dense))
        sizes = [number // ranks * size for number in heads]
        q, k, v = (t.unflatten(1, (-1, size)) for t in qkv.split(sizes, dim=1))
        q = record(name + "q_norm", self._norm(q, layer.q_norm))
        k = record(name + "k_norm", self._norm(k, layer.k_norm))
        q = record(name + "q_rope", apply_rope(q, self.table, batch.positions))
        k = record(name + "k_rope", apply_rope(k, self.table, batch.positions))
        out = record(name + "attention", attention(q, k, v, batch, self.attention_kind))
        return record(name + "output", linear(out.flatten(1), output, self.profile.dense))

    def _mlp(self, layer: Layer, h: Tensor, name: str) -> Tensor:
        shares = self._labelled(name, layer.mlp)
        if layer.gate is None:
            h = self._shared(h)
            partials = [self._mlp_share(share, h, label) for label, share in shares]
            return self._summed(partials, name, "fc2")
        logits = record(name + "router_logits", linear(h, layer.gate))
        top_k, renormalize = self.config["num_experts_per_tok"], self.config["norm_topk_prob"]
        weights, ids = route(logits, top_k, renormalize)
        record(name + "router_weights", weights)
        record(name + "router_ids", ids)
        h, weights = self._shared(h), self._shared(weights)
        operands, num_ranks = self.profile.experts, self.sampler.expert_parallel
        partials = [
            record(label + "experts", experts(h, weights, ids, *share, operands, num_ranks))
            for label, share in shares
        ]
        return self._summed(partials, name, "experts")

    def _mlp_share(self, share: Share, h: Tensor, name: str) -> Tensor:
        h = record(name + "fc1", linear(h, share[0], self.profile.dense))
        h = record(name + "activation", silu_and_mul(h, self.profile.silu_roundings))
        return record(name + "fc2", linear(h, share[1], self.profile.dense))

    def _shared(self, x: Tensor) -> Tensor:
        """What every rank reads whole, and uses for its own share."""
        return x if self.group is None else shared_input(x, self.group)

    def _summed(self, partials: Sequence[Tensor], name: str, output: str) -> Tensor:
        """The sum over ranks of what was recorded as `output` of each."""
        if self.group is not None:
            total = sum_partials(partials[0], self.group)
        elif len(partials) > 1:
            total = add_partials(partials)
        else:
            return partials[0]
        return record(name + output, total)

    def _labelled(self, name: str, shares: Sequence[Share]) -> list[tuple[str, Share]]:
        """Each share here, and what its outputs are called: `name` alone where there is but one."""
        if self.group is not None:
            return [(f"{name}rank{self.group.rank()}.", shares[0])]
        if len(shares) == 1:
            return [(name, shares[0])]
        return [(f"{name}rank{rank}.", share) for rank, share in enumerate(shares)]
