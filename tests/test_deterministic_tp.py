"""A sampler of two ranks: what each of them computes, and the learner that holds the shares of both."""

import types
from dataclasses import replace

import pytest
import sglang_stand_in
import torch
from deterministic_small import DENSE, MOE, random_weights
from torch import Tensor

from megatron_nvfp4.__main__ import main
from megatron_nvfp4.deterministic import parity
from megatron_nvfp4.deterministic.model import Model, run_facts
from megatron_nvfp4.deterministic.ops.activation import silu_and_mul
from megatron_nvfp4.deterministic.ops.attention import PackedBatch, attention
from megatron_nvfp4.deterministic.ops.experts import experts
from megatron_nvfp4.deterministic.ops.linear import Prepared, add_partials, linear
from megatron_nvfp4.deterministic.ops.logprobs import token_logprobs
from megatron_nvfp4.deterministic.ops.norm import add_rms_norm, rms_norm
from megatron_nvfp4.deterministic.ops.rope import apply_rope, rope_table
from megatron_nvfp4.deterministic.ops.router import route
from megatron_nvfp4.deterministic.profiles import PROFILES, SamplerRanks, faults
from megatron_nvfp4.deterministic.sampler import SamplerSettings, sampler_faults
from megatron_nvfp4.recipes import RECIPES, Operands
from megatron_nvfp4.rollout import sglang_methods
from megatron_nvfp4.rollout.method import mix

EPS = 1e-6
BF16, NVFP4 = PROFILES["sglang_det_bf16"], PROFILES["sglang_minite_nvfp4"]
W4A4 = RECIPES["nvfp4_per_token"].fprop
ALL_NVFP4 = replace(NVFP4, dense=W4A4)  # as a policy of the plugin has it
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 96, "head_dim": 64}
SMALL = {
    "dense": DENSE | SIZES | {"intermediate_size": 96},
    "moe": MOE | SIZES | {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 96},
}
MIXED = {"mlp_only_layers": [1], "intermediate_size": 80}  # one layer without experts
PROMPTS, RESPONSES = [[1, 2, 3], [5], [9, 9]], [[7, 95], [0, 1, 2], [4]]
CASES = [
    ("dense", BF16, "tp2"),
    ("dense", ALL_NVFP4, "tp2"),
    ("moe", BF16, "tp2"),
    ("moe", BF16, "tp2ep2"),
    ("moe", NVFP4, "tp2"),
    ("moe", NVFP4, "tp2ep2"),
]


def _id(case) -> str:
    return f"{case[0]}-{case[1].name}-{case[2]}-{'nvfp4' if case[1].dense == W4A4 else 'bf16'}"


each_case = pytest.mark.parametrize("case", CASES, ids=_id)


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape, scale=1.0: (torch.randn(*shape, generator=generator) * scale).to(
        torch.bfloat16
    )


class _Rank:
    """What one process of the sampler loads and computes, from the rules of SGLang's layers alone."""

    def __init__(self, number: int, weights: dict[str, Tensor], config: dict, profile, ranks):
        self.number, self.config, self.profile, self.ranks = number, config, profile, ranks
        self.weights = {name: self._own(name, weight) for name, weight in weights.items()}

    def _own(self, name: str, weight: Tensor) -> Tensor | None:
        """This rank's part of a weight: rows of q, k, v, gate and up, columns of o and down."""
        part = name.split(".")[-2]
        if ".experts." in name and self.ranks.expert_parallel > 1:
            per_rank = self.config["num_experts"] // self.ranks.expert_parallel
            return weight if int(name.split(".")[5]) // per_rank == self.number else None
        axis = {"o_proj": 1, "down_proj": 1}.get(part, 0 if part.endswith("_proj") else None)
        if axis is None:
            return weight
        length = weight.shape[axis] // self.ranks.tensor_parallel
        return weight.narrow(axis, self.number * length, length).contiguous()

    def attend(self, prefix: str, h: Tensor, batch: PackedBatch, table: Tensor) -> Tensor:
        w, size = self.weights, self.config["head_dim"]
        qkv = torch.cat([w[f"{prefix}{name}_proj.weight"] for name in "qkv"])
        sizes = [len(w[f"{prefix}{name}_proj.weight"]) for name in "qkv"]
        split = linear(h, qkv, self.profile.dense).split(sizes, 1)
        q, k, v = (t.unflatten(1, (-1, size)) for t in split)
        q = apply_rope(rms_norm(q, w[prefix + "q_norm.weight"], EPS), table, batch.positions)
        k = apply_rope(rms_norm(k, w[prefix + "k_norm.weight"], EPS), table, batch.positions)
        out = attention(q, k, v.contiguous(), batch, "triton").flatten(1)
        return linear(out, w[prefix + "o_proj.weight"], self.profile.dense)

    def mlp(self, prefix: str, h: Tensor) -> Tensor:
        if prefix + "gate.weight" not in self.weights:
            gate_up = self._gate_up(prefix)
            h = silu_and_mul(linear(h, gate_up, self.profile.dense))
            return linear(h, self.weights[prefix + "down_proj.weight"], self.profile.dense)
        weights, ids = route(
            linear(h, self.weights[prefix + "gate.weight"]),
            self.config["num_experts_per_tok"],
            True,
        )
        names = [f"{prefix}experts.{e}." for e in range(self.config["num_experts"])]
        here = [name for name in names if self.weights[name + "up_proj.weight"] is not None]
        local = torch.full((len(names),), -1)  # as the dispatcher maps ids
        local[[names.index(name) for name in here]] = torch.arange(len(here))
        w13 = torch.stack([self._gate_up(name) for name in here])
        w2 = torch.stack([self.weights[name + "down_proj.weight"] for name in here])
        prepared = (Prepared.of(w, self.profile.experts) for w in (w13, w2))
        return mix(h, weights, local[ids.long()], *prepared)

    def _gate_up(self, prefix: str) -> Tensor:
        return torch.cat([self.weights[f"{prefix}{name}_proj.weight"] for name in ("gate", "up")])


def _all_reduce(first: Tensor, second: Tensor) -> Tensor:
    """The sum of two BF16 tensors, exact and then rounded once."""
    return (first.double() + second.double()).to(torch.bfloat16)


def _sampled(weights, config, profile, ranks, prompt, response) -> Tensor:
    """Log-probabilities of a response by two ranks that meet in all-reduces only."""
    two = [_Rank(number, weights, config, profile, ranks) for number in range(2)]
    tokens = torch.tensor([*prompt, *response])
    batch = PackedBatch.of((len(prompt),), (len(tokens) - 1,), "cpu")
    table = rope_table(config["head_dim"], config["rope_theta"], 64, "cpu")
    stream, h = weights["model.embed_tokens.weight"][tokens[:-1]], None
    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}."
        gamma = weights[at + "input_layernorm.weight"]
        if h is None:
            h = rms_norm(stream, gamma, EPS)
        else:
            h, stream = add_rms_norm(h, stream, gamma, EPS)
        h = _all_reduce(*(rank.attend(at + "self_attn.", h, batch, table) for rank in two))
        h, stream = add_rms_norm(h, stream, weights[at + "post_attention_layernorm.weight"], EPS)
        h = _all_reduce(*(rank.mlp(at + "mlp.", h) for rank in two))
    h, _ = add_rms_norm(h, stream, weights["model.norm.weight"], EPS)
    scored = h[len(prompt) - 1 :]
    return token_logprobs(scored, weights["lm_head.weight"], tokens[len(prompt) :], 0.8)


@each_case
def test_the_learner_computes_what_two_ranks_compute(case):
    # Prevents: a share of another rank's heads or columns, a sum without its roundings, a joint amax.
    kind, profile, sampler = case
    weights, ranks = random_weights(SMALL[kind]), SamplerRanks.parse(sampler)
    got = Model(weights, SMALL[kind], profile, sampler=sampler).logprobs(PROMPTS, RESPONSES, 0.8)
    for prompt, response, each in zip(PROMPTS, RESPONSES, got, strict=True):
        want = _sampled(weights, SMALL[kind], profile, ranks, prompt, response)
        assert torch.equal(each, want)
    one = Model(weights, SMALL[kind], profile).logprobs(PROMPTS, RESPONSES, 0.8)
    assert not torch.equal(torch.cat(got), torch.cat(one))
    if profile is BF16:  # a code of NVFP4 that rounds to its neighbour moves more
        assert torch.allclose(torch.cat(got), torch.cat(one), atol=0.1)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(("kind", "sampler"), [("dense", "tp2"), ("moe", "tp2"), ("moe", "tp2ep2")])
def test_gradients_are_those_of_one_rank_and_repeat(kind, sampler, recomputed, monkeypatch):
    # Prevents: a share whose gradient is dropped or doubled, an order of its own each time.
    def gradients(sampler: str) -> dict[str, Tensor]:
        leaves = {n: t.requires_grad_() for n, t in random_weights(SMALL[kind]).items()}
        model = Model(leaves, SMALL[kind], BF16, sampler=sampler)
        if recomputed:
            for name in ("_attend", "_mlp"):
                plain = getattr(model, name)
                monkeypatch.setattr(model, name, lambda *a, f=plain: _checkpointed(f, *a))
        torch.cat(model.logprobs(PROMPTS, RESPONSES)).sum().backward()
        return {name: leaf.grad for name, leaf in leaves.items()}

    one, two, again = gradients("tp1"), gradients(sampler), gradients(sampler)
    for name, want in one.items():
        assert (two[name] is None) == (want is None)
        if want is None or not want.any():
            continue
        assert torch.equal(two[name], again[name])
        error = (two[name].double() - want.double()).norm() / want.double().norm()
        assert error < 0.05, f"{name}: relative error {error:.2e}"


def _checkpointed(function, *args):
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def test_operators_of_two_ranks_agree_with_fp64(draw):
    # Prevents: a backward that is not that of the shared forward.
    ids = torch.tensor([[3, 0], [1, 3], [3, 1], [0, 1], [3, 0]], dtype=torch.int32)
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(1))

    def exact_experts(x, weights, w13, w2):
        gate, up = torch.einsum("th,tkfh->tkf", x, w13[ids.long()]).chunk(2, dim=2)
        y = torch.einsum("tkf,tkhf->tkh", torch.nn.functional.silu(gate) * up, w2[ids.long()])
        return (y * weights[..., None]).sum(1)

    cases = (
        (
            lambda x, w, w13, w2: experts(x, w, ids, w13, w2, num_ranks=2),
            exact_experts,
            (draw(5, 32), weights, draw(4, 48, 32, scale=0.2), draw(4, 32, 24, scale=0.2)),
        ),
        (
            lambda x, w: add_partials([linear(*s) for s in zip(x.chunk(2, 1), w.chunk(2, 1))]),  # noqa: B905
            lambda x, w: x @ w.T,
            (draw(5, 64), draw(48, 64)),
        ),
    )
    for operator, exact, inputs in cases:
        inputs = [t.requires_grad_() for t in inputs]
        doubles = [t.detach().double().requires_grad_() for t in inputs]
        result, right = operator(*inputs), exact(*doubles)
        grad = draw(*right.shape)
        grads = torch.autograd.grad(result, inputs, grad)
        wants = torch.autograd.grad(right, doubles, grad.double())
        for got, want in zip((result, *grads), (right, *wants), strict=True):
            assert (got.double() - want).norm() / want.norm() < 1e-2


def test_a_sum_of_more_than_two_is_refused():
    # Prevents: an order that is made up here.
    one = torch.ones(1)
    assert add_partials([one]) is one
    with pytest.raises(ValueError, match="3 products; the order of more than 2 is unknown"):
        add_partials([one] * 3)


def test_outputs_of_both_ranks_have_names(draw):
    # Prevents: one rank's output compared with the whole, a dump that lacks the sum.
    with parity.capture() as outputs:
        weights = random_weights(SMALL["dense"])
        weights["model.embed_tokens.weight"][1] = -0.0
        Model(weights, SMALL["dense"], BF16, sampler="tp2").logprobs(PROMPTS, RESPONSES)
    assert not outputs["embedding"][0].signbit().any()  # another rank has added zero
    for kind in ("output", "fc2"):
        parts = [outputs[f"layers.1.rank{rank}.{kind}"] for rank in range(2)]
        assert torch.equal(outputs[f"layers.1.{kind}"], _all_reduce(*parts))
    assert outputs["layers.0.rank1.qkv"].shape[1] == (8 + 2 * 2) * 64 // 2
    assert "layers.0.qkv" not in outputs


@pytest.mark.parametrize(
    ("sampler", "change", "words"),
    [
        ("tp4", {}, "in an order that NCCL's topology decides"),
        ("tp2ep4", {}, "a sampler of tp2ep4: its ranks cannot hold"),
        ("tp1ep2", {}, "a sampler of tp1ep2: its ranks cannot hold"),
        ("tp2", {"num_key_value_heads": 1}, "1 key and value heads on a sampler of tp2"),
        ("tp2", {"moe_intermediate_size": 48}, "48 columns of an MLP.*multiple of 32"),
        ("tp2", MIXED, "80 columns of a dense layer's MLP on a sampler of tp2: .*multiple of 32"),
        ("tp2ep2", MIXED, "80 columns of a dense layer's MLP on a sampler of tp2ep2"),
        ("tp2ep2", {"num_experts": 7}, "7 experts on a sampler of tp2ep2"),
        ("tp2ep2", DENSE, "0 experts on a sampler of tp2ep2"),
    ],
)
def test_what_two_ranks_cannot_share_is_refused(sampler, change, words):
    # Prevents: a run that is called bitwise on an order that nobody knows.
    config = SMALL["moe"] | {"num_experts": 8} | change
    if change is DENSE:
        config.pop("num_experts")
    found = faults(BF16, run_facts(config, "triton", "cpu", sampler))
    assert len(found) == 1
    with pytest.raises(ValueError, match=words):
        raise ValueError(found[0])
    assert faults(BF16, run_facts(SMALL["moe"], "triton", "cpu", "tp2ep2")) == []
    for change in ({"decoder_sparse_step": 2}, MIXED | {"mlp_only_layers": []}):
        config = SMALL["moe"] | {"intermediate_size": 80} | change
        found = faults(BF16, run_facts(config, "triton", "cpu", "tp2"))
        assert bool(found) == ("decoder_sparse_step" in change)


def test_names_of_ranks():
    # Prevents: a misspelt sampler taken for one rank.
    assert [str(SamplerRanks.parse(name)) for name in ("tp1", "tp2", "tp2ep1", "tp2ep2")] == [
        "tp1", "tp2", "tp2", "tp2ep2",
    ]  # fmt: skip
    for name in ("2", "tp", "tp0", "ep2", "tp2 ep2", "", 2, None):
        with pytest.raises(ValueError, match="use tp1, tp2 or tp2ep2"):
            Model(random_weights(SMALL["dense"]), SMALL["dense"], BF16, sampler=name)


# --- the sampler's side ---------------------------------------------------------------------------

SAMPLER = """
SGLANG_ENABLE_JIT_DEEPGEMM=0
SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM=0
NCCL_ALGO=allreduce:tree
python -m sglang.launch_server --enable-deterministic-inference --attention-backend triton
"""


@pytest.mark.parametrize(
    ("arguments", "told", "words"),
    [
        ("--tp-size 2", "tp2", None),
        ("--tensor-parallel-size=2 --ep 2", "tp2ep2", None),
        (
            "--tp-size 2",
            "tp1",
            "--tp-size=2 --ep-size=1: the learner computes what a sampler of tp1",
        ),
        ("", "tp2", "deterministic_sampler: tp1"),
        ("--tp-size 2 --expert-parallel-size 2", "tp2", "deterministic_sampler: tp2ep2"),
        ("--tp-size 4", "tp2", "4 partial sums"),
        ("--tp-size two", "tp2", "give numbers"),
        ("--tp-size 2 --enable-symm-mem", "tp2", "--enable-symm-mem=true: sums run in other"),
        ("--tp-size 2 --moe-a2a-backend deepep", "tp2", "--moe-a2a-backend=deepep"),
        ("--tp-size 2 --pipeline-parallel-size 2", "tp2", "--pp-size=2"),
        ("--tp-size 2 --attention-context-parallel-size 2", "tp2", "--attn-cp-size=2"),
        ("--tp-size 2 --attention-data-parallel-size 2", "tp2", "--attn-dp-size=2"),
        ("--tp-size 2 --moe-data-parallel-size 2", "tp2", "--moe-dp-size=2"),
        ("--enable-fused-moe-sum-all-reduce", "tp1", "slots are added as they come"),
    ],
)
def test_settings_of_two_ranks(arguments, told, words):
    # Prevents: a learner and a sampler that split K differently, or sums in other kernels.
    settings = SamplerSettings.parse(SAMPLER.rstrip() + " " + arguments)
    found = sampler_faults(BF16, settings, told)
    if words is None:
        assert found == []
        unset = replace(settings, environment=dict(settings.environment))
        del unset.environment["NCCL_ALGO"]  # SGLang sets it itself
        assert sampler_faults(BF16, unset, told) == []
        unset.environment["NCCL_ALGO"] = "Ring"
        (fault,) = sampler_faults(BF16, unset, told)
        assert "NCCL_ALGO=Ring with --tp-size=2: SGLang's deterministic mode has" in fault
    else:
        assert len(found) == 1
        assert words in found[0]


def test_doctor_is_told_the_ranks(tmp_path, capsys):
    # Prevents: a check of two ranks that nobody can run.
    file = tmp_path / "sampler.txt"
    file.write_text(SAMPLER.rstrip() + " --tp-size 2 --ep-size 2")
    argv = ["doctor", "--sampler", str(file)]
    assert main([*argv, "--sampler-ranks", "tp2ep2"]) == 0
    assert "sampler of sglang_det_bf16, tp2ep2" in capsys.readouterr().out
    assert main(argv) == 1
    assert "here --sampler-ranks tp2ep2" in capsys.readouterr().out
    assert main([*argv, "--sampler-ranks", "two"]) == 2


@pytest.fixture
def methods(monkeypatch):
    made = (sglang_methods.linear_method, sglang_methods.experts_method)
    for each in made:
        each.cache_clear()
    sglang_stand_in.install(monkeypatch)
    yield types.SimpleNamespace(
        linear=lambda packed: made[0]()("model.layers.0.self_attn.o_proj", W4A4, packed),
        experts=lambda packed: made[1]()("model.layers.0.mlp.experts", W4A4, packed),
    )
    for each in made:
        each.cache_clear()


def _linear_layer(method, held: tuple[int, int], whole: tuple[int, int]):
    layer = sglang_stand_in.LinearBase()
    method.create_weights(layer, held[1], [held[0]], whole[1], whole[0], torch.bfloat16)
    return layer


def _experts_layer(method, num_local: int, width: int, whole: int = 64):
    layer = sglang_stand_in.FusedMoE(4)
    method.create_weights(layer, num_local, 32, width, torch.bfloat16, moe_intermediate_size=whole)
    return layer


def test_the_plugin_quantises_each_ranks_share(methods, draw):
    # Prevents: a whole weight's amax on a part, whose products the learner has otherwise.
    weight, x = draw(48, 64), draw(5, 64)
    weight[0, 0] = 30.0  # in one rank's half alone
    parts = []
    for rank in range(2):
        cols = slice(32 * rank, 32 * rank + 32)
        method = methods.linear(False)
        layer = _linear_layer(method, (48, 32), (48, 64))
        layer.weight.data.copy_(weight[:, cols])
        method.process_weights_after_loading(layer)
        parts.append(method.apply(layer, x[:, cols].contiguous()))
        assert torch.equal(parts[rank], linear(x[:, cols], weight[:, cols].contiguous(), W4A4))
    assert not torch.equal(_all_reduce(*parts), linear(x, weight, W4A4))


@pytest.mark.parametrize("operands", [W4A4, Operands()], ids=["nvfp4", "bf16"])
def test_a_rank_adds_zeros_for_experts_of_the_other(draw, operands):
    # Prevents: tokens of other ranks' experts sent to one of ours, with their weights.
    x, w13, w2 = draw(9, 32), draw(4, 128, 32, scale=0.3), draw(4, 32, 64, scale=0.3)
    weights, ids = route(draw(9, 4), 4, True)
    ids[0], ids[1] = torch.tensor([2, 3, 2, 3]), torch.tensor([0, 1, 1, 0])  # of one rank alone
    parts = []
    for rank in range(2):
        own = slice(2 * rank, 2 * rank + 2)
        local = torch.where((ids // 2) == rank, ids - 2 * rank, -1)
        prepared = (Prepared.of(w[own], operands) for w in (w13, w2))
        parts.append(mix(x, weights, local, *prepared))
    assert not parts[0][0].any()
    assert not parts[1][1].any()
    whole = experts(x, weights, ids, w13, w2, operands, num_ranks=2)
    assert torch.equal(_all_reduce(*parts), whole)
    assert not torch.equal(whole, experts(x, weights, ids, w13, w2, operands))


def test_shares_that_the_plugin_takes_and_refuses(methods):
    # Prevents: a quarter of a weight, and codes of a whole matrix cut where the learner quantises parts.
    _experts_layer(methods.experts(False), 2, 64)
    _experts_layer(methods.experts(False), 4, 32)
    _experts_layer(methods.experts(True), 2, 64)
    for num_local, width in ((1, 64), (4, 16), (2, 32), (3, 64)):
        with pytest.raises(ValueError, match=rf"holds \({num_local}, {width}\) of \(4, 64\)"):
            _experts_layer(methods.experts(False), num_local, width)
    with pytest.raises(ValueError, match="cut into 2 keeps the scale of the whole"):
        _experts_layer(methods.experts(True), 4, 32)
    with pytest.raises(ValueError, match="cut into 2 keeps the scale of the whole"):
        _linear_layer(methods.linear(True), (48, 32), (48, 64))
    with pytest.raises(ValueError, match=r"holds \(48, 16\) of \(48, 64\).*tp_size=2"):
        _linear_layer(methods.linear(False), (48, 16), (48, 64))
