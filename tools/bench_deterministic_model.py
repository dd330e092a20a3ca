"""Whole models of `bench.py deterministic`: Megatron's GPTModel with a profile beside one without."""

import csv
import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from bench_deterministic import (
    EPS,
    EXPERTS,
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    NO_FA3,
    TOP_K,
    VOCABULARY,
    error_line,
    has_fa3,
    ratios,
    sdpa,
)
from torch import Tensor

from megatron_nvfp4.recipes import RECIPES, LayerRule, Policy

LAYERS = 4
REPEATS, WARM_UP, NUM_KERNELS = 9, 3, 40
PROCESS_GROUP = "nccl"
# Mean difference of losses that two arithmetics of one model may have.
LOSS_ERROR = 0.05


@dataclass(frozen=True)
class ModelCase:
    """input_ids of `shape`, of which each row's first `prompt` tokens were prefilled."""

    shape: tuple[int, int]
    prompt: int
    profile: str
    attention: str
    recipe: str

    @property
    def name(self) -> str:
        share = 1 - self.prompt / self.shape[1]
        return f"{self.profile}, {self.attention}, {self.shape[0]} x {self.shape[1]}, {share:.0%} decoded"


LAYOUTS = (((1, 4096), 4096), ((1, 4096), 1024), ((4, 1024), 1024), ((4, 1024), 256))
MODEL_CASES = (
    *(ModelCase(s, p, "sglang_det_bf16", "triton", "bf16") for s, p in LAYOUTS),
    *(ModelCase(s, s[1], "sglang_det_bf16", "fa3", "bf16") for s in ((1, 4096), (4, 1024))),
    *(
        ModelCase(s, p, "sglang_minite_nvfp4", "triton", "nvfp4_per_token")
        for s, p in (LAYOUTS[0], LAYOUTS[3])
    ),
)
GOAL = round(1 / 1.15, 2)


class Side:
    """A GPTModel in Megatron's DDP, by its policy with a profile or without."""

    def __init__(self, policy: Policy, source: "Side | None" = None) -> None:
        """source: the side whose weights it shares."""
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )

        self.model = build_model(policy).to(_device())
        if source is not None:
            ours = self.model.named_parameters()
            for (name, parameter), other in zip(ours, source.model.parameters(), strict=True):
                assert parameter.shape == other.shape, name
                parameter.data = other.data
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.wrapped = DistributedDataParallel(self.model.config, config, self.model)

    def losses(self, tokens: Tensor, labels: Tensor, prompt: int) -> Tensor:
        from megatron_nvfp4.mcore.deterministic_run import sampled

        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        with sampled([prompt] * len(tokens)):
            return self.wrapped(tokens, positions, None, labels=labels)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"


def ordinary_policy(recipe: str) -> Policy:
    """`recipe` with a BF16 backward where the profile quantises too: in the experts alone."""
    if recipe == "bf16":
        return Policy(recipe=RECIPES["bf16"])
    rule = LayerRule(recipe=RECIPES[recipe].with_bypass(), match="**.experts.**")
    return Policy(recipe=RECIPES["bf16"], rules=(rule,))


def profile_policy(case: ModelCase) -> Policy:
    return Policy(
        recipe=RECIPES["bf16"],
        deterministic=case.profile,
        deterministic_attention=case.attention,
    )


def build_model(policy: Policy) -> torch.nn.Module:
    """Qwen3-30B-A3B with LAYERS layers, random weights."""
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_nvfp4.mcore.layer_specs import get_minite_block_spec

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        kv_channels=HEAD_DIM,
        ffn_hidden_size=FFN,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_ffn_hidden_size=FFN,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=EPS,
        qk_layernorm=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=True,
        cross_entropy_loss_fusion=policy.deterministic is None,
        masked_softmax_fusion=False,
        apply_rope_fusion=HAVE_TE and policy.deterministic is None,
        transformer_impl="minite",
    )
    config.minite_policy = policy
    spec = get_minite_block_spec(config)
    if not HAVE_TE:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = torch_attention_class()
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=4096,
        position_embedding_type="rope",
        rotary_base=1_000_000,
        share_embeddings_and_output_weights=False,
    )


def torch_attention_class() -> type:
    """Megatron's attention without Transformer Engine forms every score; this one calls torch's kernels."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class TorchAttention(DotProductAttention):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, *_, **__) -> Tensor:
            out = sdpa(*(t.permute(1, 2, 0, 3) for t in (query, key, value)))
            return out.permute(2, 0, 1, 3).flatten(2)

    return TorchAttention


def model_rows(only: str, kernels: csv.DictWriter | None) -> Iterator[dict[str, object]]:
    """Rows of every model whose op or name contains `only`; its kernels to the second table."""
    cases = [case for case in MODEL_CASES if only in f"model {case.name}"]
    if not cases:
        return
    sides: dict[object, Side] = {}
    for case in cases:
        if case.attention == "fa3" and not has_fa3():
            yield {"op": "model", "case": case.name, "note": NO_FA3}
            continue
        failure = ""
        try:
            yield from _measured(case, sides, kernels)
        except Exception as error:
            failure = error_line(error)
        if failure:
            yield {"op": "model", "case": case.name, "note": f"FAILED: {failure}"}


def _measured(
    case: ModelCase, sides: dict[object, Side], kernels: csv.DictWriter | None
) -> Iterator[dict[str, object]]:
    start()
    needed = {
        (case.profile, case.attention): profile_policy(case),
        case.recipe: ordinary_policy(case.recipe),
    }
    forget_others(sides, needed)
    pair = [side_of(sides, key, policy) for key, policy in needed.items()]
    batch = (*random_tokens(case.shape), case.prompt)
    error = check_model(*pair, *batch)
    for first in (True, False):
        times = take_turns(pair, batch, first)
        moment = "first" if first else "later"
        for number, op in enumerate(("model forward", "model forward + backward")):
            row = {"us": round(times[0][number], 1), "ordinary_us": round(times[1][number], 1)}
            note = f"{moment} microbatch of a step; losses differ by {error:.1e}"
            goal = GOAL if number else ""
            yield {"op": op, "case": case.name, "goal": goal, "note": note} | row | ratios(row)
    if kernels is not None:
        for name, side in zip(("deterministic", "ordinary"), pair, strict=True):
            for row in kernel_table(side, batch):
                kernels.writerow({"op": "model", "case": case.name, "side": name} | row)


def start() -> None:
    """A world of one rank and Megatron's groups, where none are."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(PROCESS_GROUP, store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1234)


def side_of(sides: dict[object, Side], key: object, policy: Policy) -> Side:
    if key not in sides:
        sides[key] = Side(policy, next(iter(sides.values()), None))
    return sides[key]


def forget_others(sides: dict[object, Side], needed: Collection[object]) -> None:
    """Give back the memory of the sides not needed now, but for the first, whose weights all have."""
    for key in list(sides)[1:]:
        if key not in needed:
            del sides[key]


def random_tokens(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (shape[0], shape[1] + 1), generator=generator)
    tokens = tokens.to(_device())
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def check_model(ours: Side, ordinary: Side, tokens: Tensor, labels: Tensor, prompt: int) -> float:
    """Mean difference of losses; RuntimeError where it is no rounding's, or where ours do not repeat."""
    with torch.no_grad():
        losses = ours.losses(tokens, labels, prompt)
        again = ours.losses(tokens, labels, prompt)
        others = ordinary.losses(tokens, labels, prompt)
    if not torch.equal(losses, again):
        raise RuntimeError(
            f"{int((losses != again).sum())} losses differ the second time; not timed"
        )
    error = float((losses - others).abs().mean())
    if not error < LOSS_ERROR:
        raise RuntimeError(f"losses differ by {error:.1e} from the ordinary path's; not timed")
    return error


def take_turns(sides: Sequence[Side], batch: tuple, first: bool) -> list[tuple[float, float]]:
    """Median microseconds of each side's forward, and of forward and backward."""
    times: list[list[tuple[float, float]]] = [[] for _ in sides]
    for repeat in range(WARM_UP + REPEATS):
        for side, found in zip(sides, times, strict=True):
            measured = step_us(side, batch, first)
            if repeat >= WARM_UP:
                found.append(measured)
    return [tuple(map(statistics.median, zip(*found, strict=True))) for found in times]


def step_us(side: Side, batch: tuple, first: bool) -> tuple[float, float]:
    prepare_step(side, first)
    begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize()
    begin.record()
    losses = side.losses(*batch)
    middle.record()
    losses.mean().backward()
    end.record()
    end.synchronize()
    return begin.elapsed_time(middle) * 1e3, begin.elapsed_time(end) * 1e3


def prepare_step(side: Side, first: bool) -> None:
    from megatron_nvfp4.mcore.layer_numerics import reset_first_microbatch

    side.wrapped.zero_grad_buffer()
    if first:
        reset_first_microbatch(side.model)


def kernel_table(side: Side, batch: tuple) -> list[dict[str, object]]:
    """The kernels of one forward and backward that take most of the GPU's time, the rest in one line."""
    from torch.profiler import ProfilerActivity, profile

    prepare_step(side, False)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        side.losses(*batch).mean().backward()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.setdefault(event.name, []).append(event.time_range.elapsed_us())
    return kernel_lines(kernels)


def kernel_lines(kernels: dict[str, list[float]]) -> list[dict[str, object]]:
    whole = sum(map(sum, kernels.values())) or 1.0
    ordered = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    rest = [us for _, times in ordered[NUM_KERNELS:] for us in times]
    lines = [*ordered[:NUM_KERNELS], *([("others", rest)] if rest else [])]
    return [
        {
            "kernel": name[:120],
            "calls": len(times),
            "us": round(sum(times), 1),
            "share": round(sum(times) / whole, 4),
        }
        for name, times in lines
    ]
