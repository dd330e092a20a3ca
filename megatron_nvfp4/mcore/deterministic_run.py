"""`deterministic: PROFILE` of a run: GPTModel's own call computes what the sampler computes.

A GPTModel on minite layers gets another `forward` as soon as it stands. Megatron's training, and the
frameworks around it, call it as before: logits, rounded to BF16, without labels, losses of tokens with
them, gradients by the hooks of Megatron's DDP. The modules of the model hold its weights and are not
run; their recipes, recomputation inside them and their own losses (of the router) do not exist here.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_nvfp4.deterministic.model import Model
from megatron_nvfp4.deterministic.ops.attention import PackedBatch
from megatron_nvfp4.deterministic.profiles import (
    PROFILES,
    Profile,
    SamplerRanks,
    recipe_faults,
    require,
)
from megatron_nvfp4.recipes import Policy

from . import cpu_device
from .arguments import vocab_size_of
from .deterministic_forward import build, config_faults, require_model, run_facts
from .layer_numerics import MegatronLinear

logger = logging.getLogger(__name__)

# (Megatron argument outside TransformerConfig, values the forward computes, remedy)
NEEDED_ARGUMENTS = (
    ("position_embedding_type", ("rope",), "use --position-embedding-type rope"),
    ("rotary_percent", (1.0,), "use --rotary-percent 1"),
    ("use_rope_scaling", (False,), "drop --use-rope-scaling"),
    ("rotary_seq_len_interpolation_factor", (None,), "leave it unset"),
    ("reset_position_ids", (False,), "give packed sequences by packed_seq_params, drop it"),
    ("reset_attention_mask", (False,), "give packed sequences by packed_seq_params, drop it"),
    ("overlap_param_gather", (False,), "modules that would wait for it are not run, drop it"),
    ("use_megatron_fsdp", (False,), "the forward reads whole parameters, drop it"),
    ("use_torch_fsdp2", (False,), "the forward reads whole parameters, drop it"),
)
_SIGNATURE = inspect.signature(GPTModel.forward)
_READ = {"self", "input_ids", "labels", "packed_seq_params", "runtime_gather_output"}
# Rows are causal by position, masks weigh losses outside, or the router's own.
_UNREAD = {"position_ids", "attention_mask", "loss_mask", "padding_mask"}


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a call were sampled: prompt lengths of its first sequences, temperature."""

    prompt_lengths: tuple[int, ...] = ()
    temperature: float = 1.0


_UNSAMPLED = Sampling()
_sampling: ContextVar[Sampling] = ContextVar("sampling", default=_UNSAMPLED)


@contextmanager
def sampled(
    prompt_lengths: Sequence[int] | Tensor = (), temperature: float = 1.0
) -> Iterator[Sampling]:
    """Inside the block, calls of the model score tokens that were sampled so.

    prompt_lengths: integers, for each sequence of the call in order (a row of input_ids, or an entry of
        cu_seqlens) how many of its tokens were prefilled; those behind were decoded, which the order of
        Triton attention depends on. Sequences without a number are prompts to their end, and so are all
        outside such a block. A tensor on a GPU is waited for.
    temperature: what logits are divided by before the losses of labels; not those that are returned.
    Blocks nest, the inner one alone counts; leaving any restores the one around it.
    """
    if isinstance(prompt_lengths, Tensor):
        prompt_lengths = prompt_lengths.tolist()
    token = _sampling.set(Sampling(tuple(prompt_lengths), temperature))
    try:
        yield _sampling.get()
    finally:
        _sampling.reset(token)


def require_config(policy: Policy, config: TransformerConfig, given: Mapping[str, object]) -> None:
    """ValueError with all reasons why a run of this configuration cannot honour the policy's profile.

    given: values of NEEDED_ARGUMENTS, None for one that is not known.
    """
    on_gpu = torch.cuda.is_available() and not cpu_device.is_installed()
    device = torch.device("cuda" if on_gpu else "cpu")
    reasons = config_faults(config)
    for name, computed, remedy in NEEDED_ARGUMENTS:
        value = given.get(name)
        if value is not None and value not in computed:
            reasons.append(f"{name}={value}: {remedy}")
    if policy.deterministic in PROFILES:
        reasons += recipe_faults(policy, PROFILES[policy.deterministic])
    try:
        sampler = SamplerRanks.parse(policy.deterministic_sampler)
    except ValueError as error:
        sampler = SamplerRanks()
        reasons.append(str(error))
    facts = run_facts(config, policy.deterministic_attention, sampler, device)
    require(policy.deterministic, facts, reasons)


def install() -> None:
    """Let GPTModels whose policy names a profile take its forward; others stay as they are.

    At the end of its constructor GPTModel calls `finish_init` of every module that has one, itself too.
    """
    GPTModel.finish_init = _finish_init


def _finish_init(model: GPTModel, quantization_config: object) -> None:
    policy: Policy | None = getattr(model.config, "minite_policy", None)
    if policy is None or policy.deterministic is None:
        return
    attention_kind = policy.deterministic_attention
    sampler = SamplerRanks.parse(policy.deterministic_sampler)
    profile = require_model(model, policy.deterministic, attention_kind, sampler)
    model.forward = DeterministicForward(
        model, profile, attention_kind, sampler, vocab_size_of(model.vocab_size)
    )
    logger.info(
        "deterministic: the model computes %s, %s, %s", profile.name, attention_kind, sampler
    )
    if next(model.parameters()).device.type == "cpu":
        logger.warning(
            "deterministic: on a CPU the formulas of %s run in torch: no sampler has these bits",
            profile.name,
        )


def run_of(model: torch.nn.Module) -> "DeterministicForward | None":
    """The forward of a profile that `model`, or a module in it, has; None without one."""
    forwards = (vars(module).get("forward") for module in model.modules())
    return next((f for f in forwards if isinstance(f, DeterministicForward)), None)


class _Recomputing(Model):
    """Keeps the stream between the halves of a layer alone; the backward computes these again, equally."""

    def _attend(self, *args) -> Tensor:
        return _recomputed(super()._attend, *args)

    def _mlp(self, *args) -> Tensor:
        return _recomputed(super()._mlp, *args)


def _recomputed(function: Callable[..., Tensor], *args) -> Tensor:
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


class _Kept:
    """A forward for sequences of up to num_positions tokens, and which values of the parameters it has."""

    def __init__(self, model: GPTModel, num_positions: int, forward: Model) -> None:
        self.num_positions, self.forward = num_positions, forward
        # Walking through the modules takes longer than looking at their parameters.
        self._modules = [module for module in model.modules() if module._parameters]
        self._layers = model.decoder.layers
        self.key = self.present()

    def present(self) -> list[tuple]:
        """What changes with the layers and their parameters: objects, memory, versions, who trains."""
        parameters = [
            (id(parameter), parameter.data_ptr(), parameter._version, parameter.requires_grad)
            for module in self._modules
            for parameter in module._parameters.values()
            if parameter is not None
        ]
        return [*((id(layer),) for layer in self._layers), *parameters]


class DeterministicForward:
    """GPTModel.forward by a profile; its arguments are those of Megatron's."""

    def __init__(
        self,
        model: GPTModel,
        profile: Profile,
        attention_kind: str,
        sampler: SamplerRanks,
        vocab_size: int,
    ) -> None:
        self.model, self.profile, self.attention_kind = model, profile, attention_kind
        self.sampler, self.vocab_size = sampler, vocab_size
        self._kept: _Kept | None = None

    def __call__(self, *args, **kwargs) -> Tensor:
        """Losses FP32 of labels (B, S), or logits BF16 (B, S, vocabulary without padding).

        input_ids (B, S), of which every row is a sequence, causal from position 0; or (1, T) with
        packed_seq_params of format thd, whose cu_seqlens are read on the host: rows outside every
        sequence get zeros. A loss is the token's negative log-probability, 0 for a negative label,
        infinite for one outside the vocabulary, whatever masks say: times 0 it is NaN. position_ids and
        masks are not read. Tensor-parallel ranks get equal losses, and as Megatron has it logits of their
        own columns, or whole ones with runtime_gather_output. Raises ValueError for an argument
        that asks for anything else.
        """
        given = _SIGNATURE.bind(None, *args, **kwargs).arguments
        others = [n for n in given if n not in _READ | _UNREAD and not _is_empty(given[n])]
        if others:
            raise ValueError(
                f"deterministic: {', '.join(others)} of the model's call: {self.profile.name} computes "
                "logits and losses of whole sequences alone; leave it out"
            )
        tokens, labels = given["input_ids"], given.get("labels")
        sampling = _sampling.get()
        rows = _Rows.of(tokens, given.get("packed_seq_params"), sampling.prompt_lengths)
        forward = self._prepared(max(rows.batch.lengths, default=1))
        hidden = forward.hidden(rows.pick(tokens), rows.batch)
        if labels is None:
            is_whole = given.get("runtime_gather_output")
            if is_whole is None:
                is_whole = not self.model.parallel_output
            return rows.spread(forward.logits(hidden, is_whole))
        return rows.spread(_losses(forward, hidden, rows.pick(labels), sampling.temperature))

    def describe(self) -> dict[str, object]:
        """What is computed, as plain data for run_meta.json."""
        return {
            "profile": self.profile.name,
            "attention": self.attention_kind,
            "sampler": str(self.sampler),
            "dense": [str(self.profile.dense.left), str(self.profile.dense.right)],
            "experts": [str(self.profile.experts.left), str(self.profile.experts.right)],
            "vocab_size": self.vocab_size,
            "recompute": self._kind is _Recomputing,
        }

    @property
    def _kind(self) -> type[Model]:
        return _Recomputing if self.model.config.recompute_granularity == "full" else Model

    def _prepared(self, num_positions: int) -> Model:
        """The forward on the present weights; kept for a step, as the layers keep quantised weights.

        Megatron's schedule tells the layers of every step's first microbatch. Weights may change without a
        new version (through `.data`): hence only its explicit False, while training, reuses what was kept.
        """
        layer = next(m for m in self.model.modules() if isinstance(m, MegatronLinear))
        first = layer.is_first_microbatch
        if self.model.config.disable_parameter_transpose_cache:
            first = None
        if first:
            self._kept, layer.is_first_microbatch = None, False
        num_positions = max(num_positions, self.model.max_sequence_length)
        if first is None or not torch.is_grad_enabled():
            return self._build(num_positions)
        kept = self._kept
        if kept is None or kept.num_positions < num_positions or kept.key != kept.present():
            # Its graph copies and casts, which saves no tensor: every microbatch's backward passes it.
            self._kept = kept = _Kept(self.model, num_positions, self._build(num_positions))
        return kept.forward

    def _build(self, num_positions: int) -> Model:
        for name, module in self.model.named_modules():
            if (
                name
                and module._forward_pre_hooks
                and next(module.parameters(False), None) is not None
            ):
                raise ValueError(
                    f"deterministic: {name} has hooks before its forward, which is not run; drop "
                    "--overlap-param-gather, or the tool that has set them"
                )
        head = getattr(self.model.output_layer, "weight", None)
        num_ranks = self.model.config.tensor_model_parallel_size
        if head is not None and head.shape[0] * num_ranks != self.model.vocab_size:
            raise ValueError(
                f"deterministic: the output layer has {head.shape[0]} rows for {self.model.vocab_size} "
                "tokens; a model with another head, such as a critic, is built without the profile"
            )
        return build(
            self.model,
            self.profile,
            self.attention_kind,
            self.sampler,
            self.vocab_size,
            num_positions,
            self._kind,
        )


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, dict) and not value)


def _losses(forward: Model, hidden: Tensor, labels: Tensor, temperature: float) -> Tensor:
    vocab_size = forward.vocab_size
    logprobs = forward.score(hidden, labels.clamp(0, vocab_size - 1), temperature)
    losses = torch.where(labels < 0, 0.0, -logprobs)
    return torch.where(labels < vocab_size, losses, torch.inf)


@dataclass(frozen=True)
class _Rows:
    """Which rows of (B, S) are whose: the batch, and their indices in B * S, None for all of them."""

    shape: tuple[int, int]
    batch: PackedBatch
    indices: Tensor | None

    @classmethod
    def of(
        cls, tokens: Tensor, packed: PackedSeqParams | None, prompt_lengths: Sequence[int]
    ) -> "_Rows":
        """ValueError for a layout that is not known, or prompt lengths that do not fit."""
        spans = _spans(tuple(tokens.shape), packed)
        if len(prompt_lengths) > len(spans):
            raise ValueError(
                f"sampled: {len(prompt_lengths)} prompt lengths for {len(spans)} sequences; give one each"
            )
        prompts = [*prompt_lengths, *(length for _, length in spans[len(prompt_lengths) :])]
        used = [(*span, prompt) for span, prompt in zip(spans, prompts, strict=True) if span[1]]
        lengths = [length for _, length, _ in used]
        batch = PackedBatch.of([prompt for *_, prompt in used], lengths, tokens.device)
        indices = None
        if sum(lengths) != tokens.numel():
            ranges = [torch.arange(start, start + length) for start, length, _ in used]
            indices = torch.cat(ranges or [torch.arange(0)]).to(tokens.device)
        return cls(tuple(tokens.shape), batch, indices)

    def pick(self, values: Tensor) -> Tensor:
        """The sequences' rows of values (B, S), one after the other."""
        return values.flatten() if self.indices is None else values.flatten()[self.indices]

    def spread(self, rows: Tensor) -> Tensor:
        """Rows (T, ...) where they came from in (B, S, ...), zeros elsewhere."""
        if self.indices is not None:
            num_rows = self.shape[0] * self.shape[1]
            empty = rows.new_zeros(num_rows, *rows.shape[1:])
            rows = empty.index_copy(0, self.indices, rows)
        return rows.unflatten(0, self.shape)


def _spans(shape: tuple[int, int], packed: PackedSeqParams | None) -> list[tuple[int, int]]:
    """(first row, number of rows) of every sequence."""
    if packed is None:
        return [(number * shape[1], shape[1]) for number in range(shape[0])]
    if packed.qkv_format != "thd" or shape[0] != 1:
        raise ValueError(
            f"deterministic: packed_seq_params of format {packed.qkv_format} with input_ids {shape}; give "
            "thd and (1, T)"
        )
    ends = packed.cu_seqlens_q.tolist()
    padded = packed.cu_seqlens_q_padded
    starts = ends if padded is None else padded.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    spans = list(zip(starts, lengths, strict=False))
    if any(length < 0 or start + length > shape[1] for start, length in spans):
        raise ValueError(
            f"deterministic: cu_seqlens {ends} of packed_seq_params do not fit {shape[1]} tokens; "
            "give the numbers of this batch"
        )
    return spans
