"""Which rows of which Hugging Face tensors make up each Megatron parameter, and how ranks cut it.

Every parameter is a stack of row ranges: q, k and v interleaved by group, gate above up, an embedding
above zero rows, one expert of a fused tensor. Reading the stack from the other side gives every Hugging
Face tensor from Megatron's parameters. Tensor parallelism cuts rows, rows of each half, or columns.
No tensor is touched here.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from megatron_nvfp4.checkpoint.architecture import Architecture, Experts, Indexer, LatentAttention

__all__ = [
    "Architecture",
    "Parameter",
    "Piece",
    "RowRange",
    "as_saved",
    "copies",
    "hf_tensors",
    "parameters",
    "pieces",
    "sources",
]

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
HF_EMBEDDING = "model.embed_tokens.weight"
HF_OUTPUT = "lm_head.weight"


@dataclass(frozen=True)
class RowRange:
    """Rows start..stop of a Hugging Face tensor; index: the expert in a fused (E, ...) tensor."""

    hf_name: str
    index: int | None
    start: int
    stop: int


@dataclass(frozen=True)
class Parameter:
    """One Megatron parameter, whole: as a single rank without tensor parallelism holds it.

    key: Transformer Engine's name with model-wide layer and expert numbers, without a prefix.
    rows: what lies in it from top to bottom, above `padding` rows of zeros.
    split: what a tensor parallel rank holds of it; None: all of it. Routed experts are cut by the expert
        tensor parallel size, everything else by the tensor parallel size.
    """

    key: str
    shape: tuple[int, ...]
    rows: tuple[RowRange, ...]
    split: Literal["rows", "halves", "columns"] | None = None
    padding: int = 0

    @property
    def is_routed_expert(self) -> bool:
        """Whether expert parallelism places it."""
        return ".mlp.experts." in self.key


@dataclass(frozen=True)
class Piece:
    """Rows start..stop of one Hugging Face tensor, found in `parameter` from row `at` on."""

    index: int | None
    start: int
    stop: int
    parameter: Parameter
    at: int


def parameters(
    arch: Architecture,
    *,
    hf_names: Collection[str] | None = None,
    vocab_size_padded: int | None = None,
) -> list[Parameter]:
    """All parameters of the model, in the order of its layers.

    hf_names: names in the Hugging Face checkpoint, which tell fused experts from one tensor per expert
        and whether multi-token prediction layers are there; None: one per expert, all layers.
    vocab_size_padded: rows of Megatron's embedding; None: no padding.
    ValueError: vocab_size_padded below the model's vocabulary.
    """
    if hf_names is not None:
        hf_names = frozenset(hf_names)
        arch = as_saved(arch, hf_names)
    vocab = arch.vocab_size if vocab_size_padded is None else vocab_size_padded
    if vocab < arch.vocab_size:
        raise ValueError(
            f"{EMBEDDING}: {vocab} rows cannot hold vocab_size={arch.vocab_size} of config.json;"
            " the two are of different models: give the right --hf-config"
        )

    def vocabulary(key: str, hf_name: str) -> Parameter:
        rows = (RowRange(hf_name, None, 0, arch.vocab_size),)
        shape = (vocab, arch.hidden_size)
        return Parameter(key, shape, rows, "rows", vocab - arch.vocab_size)

    found = [vocabulary(EMBEDDING, HF_EMBEDDING)]
    for layer in range(arch.num_layers):
        found += _layer(arch, f"decoder.layers.{layer}.", layer, arch.moe_layers[layer], hf_names)
    found.append(_whole("decoder.final_layernorm.weight", "model.norm.weight", arch.hidden_size))
    if not arch.tied:
        found.append(vocabulary(OUTPUT, HF_OUTPUT))
    for depth in range(arch.num_mtp_layers):
        found += _mtp_layer(arch, depth, hf_names)
    return found


def hf_tensors(
    arch: Architecture, *, hf_names: Collection[str] | None = None
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a Hugging Face checkpoint of the model holds.

    hf_names: as in `parameters`. Of multi-token prediction layers the repeated embedding and head are
    named too; lm_head.weight is not where embeddings are tied.
    """
    shapes = {
        name: _hf_shape(found)
        for name, found in pieces(parameters(arch, hf_names=hf_names)).items()
    }
    shapes |= {copy: shapes[name] for copy, name in copies(arch, hf_names=hf_names).items()}
    return shapes


def copies(arch: Architecture, *, hf_names: Collection[str] | None = None) -> dict[str, str]:
    """Tensors that repeat another one, name -> repeated name: those of hf_names, or the usual ones.

    Prediction layers repeat the embedding and the head. A head beside tied embeddings is such a
    repetition as well, but not a usual one.
    """
    head = HF_EMBEDDING if arch.tied else HF_OUTPUT
    found = {}
    for depth in range(arch.num_mtp_layers):
        prefix = f"model.layers.{arch.num_layers + depth}."
        found[f"{prefix}embed_tokens.weight"] = HF_EMBEDDING
        found[f"{prefix}shared_head.head.weight"] = head
    if hf_names is None:
        return found
    if arch.tied:
        found[HF_OUTPUT] = HF_EMBEDDING
    return {name: source for name, source in found.items() if name in hf_names}


def as_saved(arch: Architecture, hf_names: Collection[str]) -> Architecture:
    """The architecture without prediction layers where hf_names has none: transformers drops them."""
    first = f"model.layers.{arch.num_layers}."
    if any(name.startswith(first) for name in hf_names):
        return arch
    return replace(arch, num_mtp_layers=0)


def pieces(found: Collection[Parameter]) -> dict[str, list[Piece]]:
    """The plan from the other side: for each Hugging Face tensor where its rows lie."""
    result: dict[str, list[Piece]] = {}
    for parameter in found:
        at = 0
        for rows in parameter.rows:
            piece = Piece(rows.index, rows.start, rows.stop, parameter, at)
            result.setdefault(rows.hf_name, []).append(piece)
            at += rows.stop - rows.start
    return result


def sources(parameter: Parameter, start: int, stop: int) -> Iterator[RowRange | int]:
    """What lies in rows start..stop from top to bottom; a number stands for that many rows of zeros."""
    at = 0
    for rows in parameter.rows:
        first, last = max(start, at), min(stop, at + rows.stop - rows.start)
        if first < last:
            shift = rows.start - at
            yield RowRange(rows.hf_name, rows.index, first + shift, last + shift)
        at += rows.stop - rows.start
    if stop > max(start, at):
        yield stop - max(start, at)


def _hf_shape(found: list[Piece]) -> tuple[int, ...]:
    shape = (max(piece.stop for piece in found), *found[0].parameter.shape[1:])
    indices = {piece.index for piece in found}
    return shape if indices == {None} else (len(indices), *shape)


def _whole(key: str, hf_name: str, *shape: int, split=None) -> Parameter:
    return Parameter(key, shape, (RowRange(hf_name, None, 0, shape[0]),), split)


def _layer(
    arch: Architecture, prefix: str, layer: int, is_moe: bool, hf_names: Collection[str] | None
) -> list[Parameter]:
    hf = f"model.layers.{layer}."
    if arch.latent is not None:
        found = _latent_attention(arch, arch.latent, prefix, hf)
        # A prediction layer has always an indexer of its own.
        if arch.indexer is not None and (layer >= arch.num_layers or arch.indexer.is_in(layer)):
            found += _indexer(arch, arch.indexer, prefix, hf)
    else:
        found = _attention(arch, prefix, hf)
    norm = "pre_mlp_layernorm.weight" if is_moe else "mlp.linear_fc1.layer_norm_weight"
    found.append(_whole(prefix + norm, f"{hf}post_attention_layernorm.weight", arch.hidden_size))
    if is_moe:
        assert arch.experts is not None
        return found + _moe(arch, arch.experts, f"{prefix}mlp.", f"{hf}mlp.", hf_names)
    return found + _mlp(arch.hidden_size, arch.ffn_size, f"{prefix}mlp.", f"{hf}mlp.")


def _attention(arch: Architecture, prefix: str, hf: str) -> list[Parameter]:
    hidden, dim = arch.hidden_size, arch.head_dim
    num_rows = (arch.num_heads + 2 * arch.num_groups) * dim
    parts = (("q", arch.num_heads // arch.num_groups * dim), ("k", dim), ("v", dim))

    def interleaved(what: str) -> tuple[RowRange, ...]:
        # Megatron keeps each group's queries beside its key and its value.
        return tuple(
            RowRange(f"{hf}self_attn.{name}_proj.{what}", None, group * num, (group + 1) * num)
            for group in range(arch.num_groups)
            for name, num in parts
        )

    qkv = f"{prefix}self_attention.linear_qkv."
    found = [
        _whole(f"{qkv}layer_norm_weight", f"{hf}input_layernorm.weight", hidden),
        Parameter(f"{qkv}weight", (num_rows, hidden), interleaved("weight"), "rows"),
    ]
    if arch.qkv_bias:
        found.append(Parameter(f"{qkv}bias", (num_rows,), interleaved("bias"), "rows"))
    if arch.qk_norm:
        found += [
            _whole(
                f"{prefix}self_attention.{name}_layernorm.weight",
                f"{hf}self_attn.{name}_norm.weight",
                dim,
            )
            for name in "qk"
        ]
    found.append(_output_projection(prefix, hf, hidden, arch.num_heads * dim))
    return found


def _latent_attention(
    arch: Architecture, latent: LatentAttention, prefix: str, hf: str
) -> list[Parameter]:
    hidden, heads = arch.hidden_size, arch.num_heads
    key, name = f"{prefix}self_attention.linear_", f"{hf}self_attn."
    # The indexer reads what these norms give, so beside one they are modules of their own.
    norms = {
        rank: f"{key}{rank}_up_proj.layer_norm_weight"
        if arch.indexer is None
        else f"{prefix}self_attention.{rank}_layernorm.weight"
        for rank in ("q", "kv")
    }
    query = heads * (latent.nope_dim + latent.rope_dim)
    kv_rank, values = latent.kv_rank, heads * (latent.nope_dim + latent.v_dim)
    found = [_whole(f"{prefix}input_layernorm.weight", f"{hf}input_layernorm.weight", hidden)]
    if latent.q_rank is None:
        q_proj = f"{name}q_proj.weight"
        found.append(_whole(f"{key}q_proj.weight", q_proj, query, hidden, split="rows"))
    else:
        up = f"{key}q_up_proj.weight"
        found += [
            _whole(f"{key}q_down_proj.weight", f"{name}q_a_proj.weight", latent.q_rank, hidden),
            _whole(norms["q"], f"{name}q_a_layernorm.weight", latent.q_rank),
            _whole(up, f"{name}q_b_proj.weight", query, latent.q_rank, split="rows"),
        ]
    down, up = f"{key}kv_down_proj.weight", f"{key}kv_up_proj.weight"
    return [
        *found,
        _whole(down, f"{name}kv_a_proj_with_mqa.weight", kv_rank + latent.rope_dim, hidden),
        _whole(norms["kv"], f"{name}kv_a_layernorm.weight", kv_rank),
        _whole(up, f"{name}kv_b_proj.weight", values, kv_rank, split="rows"),
        _output_projection(prefix, hf, hidden, heads * latent.v_dim),
    ]


def _indexer(arch: Architecture, indexer: Indexer, prefix: str, hf: str) -> list[Parameter]:
    """Every tensor parallel rank holds all of it.

    Names: DSAIndexer in megatron/core/transformer/experimental_attention_variant/dsa.py,
    https://github.com/NVIDIA/Megatron-LM.
    """
    assert arch.latent is not None
    assert arch.latent.q_rank is not None
    key, name = f"{prefix}self_attention.core_attention.indexer.", f"{hf}self_attn.indexer."
    num_rows, dim, hidden = indexer.num_heads * indexer.head_dim, indexer.head_dim, arch.hidden_size
    return [
        _whole(f"{key}linear_wq_b.weight", f"{name}wq_b.weight", num_rows, arch.latent.q_rank),
        _whole(f"{key}linear_wk.weight", f"{name}wk.weight", dim, hidden),
        _whole(f"{key}k_norm.weight", f"{name}k_norm.weight", dim),
        _whole(f"{key}k_norm.bias", f"{name}k_norm.bias", dim),
        _whole(
            f"{key}linear_weights_proj.weight",
            f"{name}weights_proj.weight",
            indexer.num_heads,
            hidden,
        ),
    ]


def _output_projection(prefix: str, hf: str, hidden: int, num_columns: int) -> Parameter:
    key, name = f"{prefix}self_attention.linear_proj.weight", f"{hf}self_attn.o_proj.weight"
    return _whole(key, name, hidden, num_columns, split="columns")


def _mlp(hidden: int, ffn: int, prefix: str, hf: str, expert: str = "") -> list[Parameter]:
    """FC1, gate above up, and FC2. expert: the number behind Megatron's name of an expert's weight."""
    gate_up = tuple(RowRange(f"{hf}{name}_proj.weight", None, 0, ffn) for name in ("gate", "up"))
    fc1, fc2 = (f"{prefix}linear_fc{i}.weight{expert}" for i in (1, 2))
    return [
        Parameter(fc1, (2 * ffn, hidden), gate_up, "halves"),
        _whole(fc2, f"{hf}down_proj.weight", hidden, ffn, split="columns"),
    ]


def _fused_expert(hidden: int, ffn: int, prefix: str, hf: str, expert: int) -> list[Parameter]:
    gate_up = (RowRange(f"{hf}gate_up_proj", expert, 0, 2 * ffn),)
    down = (RowRange(f"{hf}down_proj", expert, 0, hidden),)
    fc1, fc2 = (f"{prefix}linear_fc{i}.weight{expert}" for i in (1, 2))
    return [
        Parameter(fc1, (2 * ffn, hidden), gate_up, "halves"),
        Parameter(fc2, (hidden, ffn), down, "columns"),
    ]


def _moe(
    arch: Architecture, experts: Experts, prefix: str, hf: str, hf_names: Collection[str] | None
) -> list[Parameter]:
    hidden, num = arch.hidden_size, experts.num_experts
    found = [_whole(f"{prefix}router.weight", f"{hf}gate.weight", num, hidden)]
    if experts.has_router_bias:
        name = f"{hf}gate.e_score_correction_bias"
        found.append(_whole(f"{prefix}router.expert_bias", name, num))
    is_fused = hf_names is not None and f"{hf}experts.gate_up_proj" in hf_names
    pairs = []
    for e in range(num):
        key, size = f"{prefix}experts.", experts.ffn_size
        if is_fused:
            pairs.append(_fused_expert(hidden, size, key, f"{hf}experts.", e))
        else:
            pairs.append(_mlp(hidden, size, key, f"{hf}experts.{e}.", str(e)))
    # All of FC1 before all of FC2: whoever assembles a fused tensor then has one open, not two.
    found += [fc1 for fc1, _ in pairs] + [fc2 for _, fc2 in pairs]
    if experts.shared_ffn_size:
        key, name = f"{prefix}shared_experts.", f"{hf}{experts.shared_name}."
        found += _mlp(hidden, experts.shared_ffn_size, key, name)
        if experts.has_shared_gate:
            name = f"{hf}{experts.shared_name}_gate.weight"
            found.append(_whole(f"{key}gate_weight", name, 1, hidden))
    return found


def _mtp_layer(arch: Architecture, depth: int, hf_names: Collection[str] | None) -> list[Parameter]:
    """A prediction layer: two norms, the joining projection, a layer like the decoder's last, a norm."""
    hidden, layer = arch.hidden_size, arch.num_layers + depth
    prefix, hf = f"mtp.layers.{depth}.", f"model.layers.{layer}."
    found = [
        _whole(f"{prefix}{name}.weight", f"{hf}{name}.weight", hidden)
        for name in ("enorm", "hnorm")
    ]
    eh_proj = f"{hf}eh_proj.weight"
    found.append(_whole(f"{prefix}eh_proj.weight", eh_proj, hidden, 2 * hidden, split="rows"))
    inner = f"{prefix}transformer_layer."
    found += _layer(arch, inner, layer, arch.moe_layers[-1], hf_names)
    norm = f"{hf}shared_head.norm.weight"
    found.append(_whole(f"{prefix}final_layernorm.weight", norm, hidden))
    return found
