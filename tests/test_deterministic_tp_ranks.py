"""The learner on two tensor-parallel ranks: it computes what one rank computes for a sampler of two.

Every `check_*` runs in two child processes; its docstring says what it prevents. Gloo on the CPU
(megatron_runs.py), NCCL where there are two GPUs.
"""

import importlib.util
import os
import sys
import zlib
from pathlib import Path

import pytest
from deterministic_sequences import PROMPTS, RESPONSES, padded
from megatron_runs import Outcomes, World, every_check, require_megatron, run_ranks, run_world

HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
PROFILE = "sglang_det_bf16"
UNIT = 2.0**-8  # unit roundoff of BF16
# The gradient of the last hidden states is two roundings and a rounded sum instead of one rounding; what
# follows is linear in it, and adds a few such sums.
CLOSE = 4 * UNIT
# Chunks of 1024 columns cross the ranks' shares, the last of which ends in padding.
VOCABULARY, PADDED = 2500, 2560
ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
COLUMNS = ("o_proj", "down_proj")
SHORT = [[1, 2, 3], [5], [2499, 9]], [[7, 2499], [1279, 1280, 0], [4]]


def _device():
    import torch

    is_gpu = torch.distributed.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")


def _config(kind: str) -> dict:
    from deterministic_small import DENSE, MOE

    config = {"dense": DENSE, "moe": MOE}[kind] | {
        "num_hidden_layers": 2,
        "head_dim": 64,
        "vocab_size": VOCABULARY,
    }
    if _device().type == "cpu":
        narrow = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96}
        config |= narrow | {"num_experts": 8} if kind == "moe" else narrow
    return config


def _weights(kind: str) -> dict:
    from deterministic_small import random_weights

    return {name: w.to(_device()) for name, w in random_weights(_config(kind)).items()}


def _part(name: str, weight, rank: int):
    """A rank's part of a weight by its name, padding behind the vocabulary's rows; None: all of it."""
    import torch

    part = name.split(".")[-2]
    if part in ("embed_tokens", "lm_head"):
        noise = torch.full((PADDED - VOCABULARY, weight.shape[1]), 50.0).to(weight)
        weight = torch.cat([weight, noise])
    if part in ROWS + COLUMNS:
        return weight.chunk(2, dim=int(part in COLUMNS))[rank].contiguous()
    return None


def _both(kind: str, profile=PROFILE, **changes):
    """(leaves, Model) of one rank that holds all, and of this one of two."""
    import torch
    from torch import distributed

    from megatron_nvfp4.deterministic.model import Model

    whole = _weights(kind)
    parts = {name: _part(name, w, distributed.get_rank()) for name, w in whole.items()}
    own = {name: whole[name].clone() if w is None else w for name, w in parts.items()}
    found = []
    for weights, group in ((whole, None), (own, torch.distributed.group.WORLD)):
        leaves = {name: w.requires_grad_() for name, w in weights.items()}
        model = Model(leaves, _config(kind), profile, sampler="tp2", group=group, **changes)
        found += [leaves, model]
    return found


def _cases() -> list[tuple]:
    """(kind, profile, attention) of the bits."""
    from dataclasses import replace

    from megatron_nvfp4.deterministic.profiles import PROFILES

    nvfp4 = PROFILES["sglang_minite_nvfp4"]
    cases = [
        ("dense", PROFILES[PROFILE], "triton"),
        ("dense", replace(nvfp4, dense=nvfp4.experts), "triton"),
        ("moe", PROFILES[PROFILE], "triton"),
        ("moe", nvfp4, "triton"),
    ]
    if _device().type == "cpu":  # on a GPU it needs FlashAttention 3
        cases.append(("dense", PROFILES["sglang_rl_fsdp"], "fa3"))
    return cases


def check_bits_are_those_of_one_rank(folder: Path) -> None:
    """Prevents: a share of another rank's, a sum rounded twice, a softmax over half of the vocabulary."""
    import torch

    from megatron_nvfp4.deterministic.parity import capture

    rank, other = (f"rank{(torch.distributed.get_rank() + n) % 2}." for n in range(2))
    for kind, profile, attention in _cases():
        _, one, _, two = _both(kind, profile, attention_kind=attention)
        for temperature in (1.0, 0.8):
            with torch.no_grad(), capture() as expected:
                one.logprobs(*SHORT, temperature)
            with torch.no_grad(), capture() as found:
                two.logprobs(*SHORT, temperature)
            assert [*found] == [name for name in expected if other not in name]
            assert any(rank in name for name in found)
            unequal = [name for name in found if not torch.equal(found[name], expected[name])]
            assert not unequal, f"{kind} {profile.name} {temperature}: {unequal}"


def _gradients(leaves: dict, model) -> dict:
    import torch

    for leaf in leaves.values():
        leaf.grad = None
    torch.cat(model.logprobs(*SHORT, 0.8)).sum().backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def _close(found, expected, name: str) -> None:
    error = (found.double() - expected.double()).norm()
    assert error <= CLOSE * expected.double().norm(), f"{name}: {error / expected.norm():.2e}"


def _same_rows(found, expected) -> None:
    """Of the head's gradient, in which there is no sum over ranks."""
    import torch

    if found.is_cuda:  # one rank's 2500 columns are a library's to multiply, 1280 are not
        _close(found, expected, "lm_head.weight")
    else:
        assert torch.equal(found, expected)


def check_gradients_are_those_of_one_rank(folder: Path) -> None:
    """Prevents: a part that is dropped or doubled, replicas that drift apart, an order of its own."""
    import torch
    from torch import distributed

    for kind in ("dense", "moe"):
        leaves, one, parts, two = _both(kind)
        expected, found, again = (
            _gradients(leaves, one),
            _gradients(parts, two),
            _gradients(parts, two),
        )
        for name, want in expected.items():
            got, part = found[name], _part(name, want, distributed.get_rank())
            assert torch.equal(got, again[name]), name
            if part is not None:
                if part.shape[0] == PADDED // 2:  # of padding there is none
                    part[max(0, VOCABULARY - distributed.get_rank() * part.shape[0]) :] = 0
                want = part
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                got = got.float()
                distributed.all_reduce(got)
            else:
                from_first = got.clone()
                distributed.broadcast(from_first, 0)
                assert torch.equal(got, from_first), name
            _close(got, want, f"{kind} {name}")
            if name == "lm_head.weight":
                _same_rows(got, want)


def check_portions_of_the_vocabulary(folder: Path) -> None:
    """Prevents: rows of one portion scored by another's, logits of a step that are not made anew."""
    import torch

    from megatron_nvfp4.deterministic.ops import parallel_logprobs

    _, _, parts, model = _both("dense")
    expected, whole = model.logprobs(*SHORT), _gradients(parts, model)
    original = parallel_logprobs.PORTION
    parallel_logprobs.PORTION = 4 * VOCABULARY
    try:
        assert torch.equal(torch.cat(model.logprobs(*SHORT)), torch.cat(expected))
        portions = _gradients(parts, model)
    finally:
        parallel_logprobs.PORTION = original
    for name, want in whole.items():
        _close(portions[name], want, name)


def check_logits(folder: Path) -> None:
    """Prevents: columns in another order, padding among them, a gradient that ends at the gather."""
    import pytest
    import torch
    from torch import distributed

    leaves, one, parts, two = _both("dense")
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, one.config["hidden_size"], generator=generator).to(
        leaves["lm_head.weight"]
    )
    results = []
    for model in (one, two):
        x = hidden.clone().requires_grad_()
        logits = model.logits(x)
        (logits.float() * torch.arange(VOCABULARY, device=x.device)).sum().backward()
        results.append((logits, x.grad))
    assert torch.equal(results[0][0], results[1][0])
    _close(results[1][1], results[0][1], "hidden")
    want = _part("lm_head.weight", leaves["lm_head.weight"].grad, distributed.get_rank())
    want[max(0, VOCABULARY - distributed.get_rank() * PADDED // 2) :] = 0
    _same_rows(parts["lm_head.weight"].grad, want)
    with pytest.raises(ValueError, match="60 of the last rank's columns are padding"):
        two.logits(hidden, is_whole=False)
    two.vocab_size = PADDED
    own = two.logits(hidden, is_whole=False)
    assert torch.equal(own, two.logits(hidden).chunk(2, dim=1)[distributed.get_rank()])


def check_whole_weights_are_refused(folder: Path) -> None:
    """Prevents: two ranks that add the same whole product."""
    import pytest
    import torch

    from megatron_nvfp4.deterministic.model import Model

    group, config = torch.distributed.group.WORLD, _config("dense")
    with pytest.raises(ValueError, match="768 rows together; give the 384 of one of 2"):
        Model(_weights("dense"), config, PROFILE, sampler="tp2", group=group)
    with pytest.raises(ValueError, match="tensor parallelism of 2 for a sampler of tp1"):
        Model(_weights("dense"), config, PROFILE, group=group)
    rank = torch.distributed.get_rank()
    for kind, names, words in (
        ("dense", ("gate_proj", "up_proj"), "gate and up have 192 rows together; give the 96"),
        ("moe", ("gate_proj", "up_proj"), "gate and up have 192 rows together; give the 96"),
        ("dense", ("down_proj",), "down has 96 columns; give the 48"),
        ("moe", ("o_proj",), "o has 512 columns; give the 256"),
    ):
        if _device().type != "cpu":  # of other sizes
            words = words.split(" ha")[0]
        mixed = {}
        for name, whole in _weights(kind).items():
            part = _part(name, whole, rank)
            is_whole = part is None or (".layers.1." in name and name.split(".")[-2] in names)
            mixed[name] = whole if is_whole else part
        with pytest.raises(ValueError, match=f"weights of layer 1: {words}"):
            Model(mixed, _config(kind), PROFILE, sampler="tp2", group=group)


def check_tokens_outside_the_embedding_are_refused(folder: Path) -> None:
    """Prevents: a token that no rank has taken for one whose row is zero."""
    import pytest
    import torch

    from megatron_nvfp4.deterministic.ops.attention import PackedBatch

    *_, model = _both("dense")
    batch = PackedBatch.of([2], [2], _device())
    for outside in (-1, PADDED, 2 * PADDED):
        with pytest.raises(IndexError):
            model.hidden(torch.tensor([1, outside]), batch)
    assert model.hidden(torch.tensor([1, PADDED - 1]), batch).shape == (2, 64)


# --- Megatron's models ----------------------------------------------------------------------------


def _megatron(kind: str, tp: int, sampler: str = "tp2", **changes):
    """A GPTModel with the profile, on new process groups; its values of no ranks are another's."""
    import megatron_small as small
    import torch

    from megatron_nvfp4.recipes import resolve

    small.parallelise(tp=tp)
    sizes = {"kv_channels": 64, "num_attention_heads": 8, "num_query_groups": 4}
    rest = {"moe_aux_loss_coeff": 0.0, "sequence_parallel": False}
    config = small.new_config(kind, **sizes | rest | changes)
    config.minite_policy = resolve(environ={}, deterministic=PROFILE, deterministic_sampler=sampler)
    model = small.new_model(config).to(_device())  # Megatron makes routers on the CPU
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_split = getattr(parameter, "tensor_model_parallel", False)
            rank = torch.distributed.get_rank() if is_split else 0
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {rank}".encode()))
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else 0.15 * noise)
    return model


def _losses(model):
    from megatron_nvfp4.mcore.deterministic_run import sampled

    tokens, labels = (t.to(_device()) for t in padded())
    with sampled([len(prompt) for prompt in PROMPTS]):
        return model(tokens, None, None, labels=labels)


def _step(model) -> tuple:
    """Losses, and whole gradients under Hugging Face's names, as Megatron's DDP leaves them."""
    import torch
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from megatron_nvfp4.mcore.deterministic_forward import hf_weights

    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(model.config, ddp_config, model)
    wrapped.zero_grad_buffer()
    losses = _losses(wrapped)
    losses.sum().backward()
    finalize_model_grads([wrapped])
    # Gathered as the weights are.
    with torch.no_grad():
        kept = [parameter.clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.copy_(parameter.main_grad)
        gradients = {name: weight.clone() for name, weight in hf_weights(model)}
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.copy_(value)
    return losses.detach(), gradients


def _resharded(model, folder: Path, kind: str):
    """A model of one rank with the values of two, by Megatron's distributed checkpoints."""
    import megatron_small as small
    import torch
    from megatron.core import dist_checkpointing

    if torch.distributed.get_rank() == 0:
        folder.mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(small.sharded(model), str(folder))
    one = _megatron(kind, 1)
    small.load_distributed(one, folder)
    return one


def check_megatrons_two_ranks_are_one(folder: Path) -> None:
    """Prevents: shards read as another's, weights sent in another order than the sampler loads, a q or k
    norm whose gradient is summed twice, replicas that drift apart.
    """
    import torch

    from megatron_nvfp4.mcore.deterministic_forward import deterministic_model, hf_weights

    for kind in ("dense", "moe_grouped", "moe_sequential"):
        model = _megatron(kind, 2)
        whole = {name: weight.clone() for name, weight in hf_weights(model)}
        forward = deterministic_model(model, PROFILE, vocab_size=256, sampler="tp2")
        by_hand = torch.cat(forward.logprobs(PROMPTS, RESPONSES)).detach()
        losses, found = _step(model)
        assert torch.equal(-losses[padded()[1].to(losses.device) >= 0], by_hand)
        one = _resharded(model, folder / f"tp2_{kind}", kind)
        for name, weight in hf_weights(one):
            assert torch.equal(whole.pop(name), weight), name
        assert not whole
        expected_losses, expected = _step(one)
        assert torch.equal(losses, expected_losses), kind
        assert [*found] == [*expected]
        for name, want in expected.items():
            _close(found[name], want, f"{kind} {name}")
            from_first = found[name].clone()
            torch.distributed.broadcast(from_first, 0)
            assert torch.equal(found[name], from_first), name


def check_megatron_recomputes_on_two_ranks(folder: Path) -> None:
    """Prevents: recomputation whose collectives wait for each other, or that changes a bit."""
    import torch

    full = {"recompute_method": "uniform", "recompute_num_layers": 1}
    plain = _step(_megatron("moe_grouped", 2))
    again = _step(_megatron("moe_grouped", 2, recompute_granularity="full", **full))
    assert torch.equal(plain[0], again[0])
    assert all(torch.equal(plain[1][name], again[1][name]) for name in plain[1])


def check_megatrons_logits(folder: Path) -> None:
    """Prevents: whole rows where Megatron's callers take their rank's columns, or the reverse."""
    import pytest
    import torch

    model = _megatron("dense", 2)
    tokens = padded()[0].to(_device())
    with torch.no_grad():
        own = model(tokens, None, None)
        whole = model(tokens, None, None, runtime_gather_output=True)
        assert (own.shape, whole.shape) == ((3, 64, 128), (3, 64, 256))
        assert torch.equal(own, whole.chunk(2, dim=2)[torch.distributed.get_rank()])
        model.forward.vocab_size = 250
        assert torch.equal(model(tokens, None, None, runtime_gather_output=True), whole[..., :250])
        with pytest.raises(ValueError, match="6 of the last rank's columns are padding"):
            model(tokens, None, None)


def check_megatrons_other_ranks_are_refused(folder: Path) -> None:
    """Prevents: a learner whose ranks hold or add something else than the sampler's."""
    import pytest

    for kind, sampler, changes, words in (
        ("dense", "tp1", {}, "of 2 for a sampler of tp1: its ranks do not add"),
        ("moe_grouped", "tp2ep2", {}, "of 2 for a sampler of tp2ep2: its ranks do not add"),
        ("dense", "tp2", {"sequence_parallel": True}, "sequence parallelism: norms read"),
        ("dense", "tp2", {"tensor_model_parallel_size": 4}, "tensor parallelism of 4"),
        (
            "moe_grouped",
            "tp2",
            {"expert_tensor_parallel_size": 1},
            "expert tensor parallelism of 1 beside tensor parallelism of 2",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            _megatron(kind, 2, sampler, **changes)


OF_THE_MODEL = (
    check_bits_are_those_of_one_rank,
    check_gradients_are_those_of_one_rank,
    check_portions_of_the_vocabulary,
    check_logits,
    check_whole_weights_are_refused,
)
OF_MEGATRON = (
    check_megatrons_two_ranks_are_one,
    check_megatron_recomputes_on_two_ranks,
    check_megatrons_logits,
    check_megatrons_other_ranks_are_refused,
)
# A GPU's assertion ends the process.
ON_CPU = (check_tokens_outside_the_embedding_are_refused,)
WORLDS = {"two_ranks": World((*OF_THE_MODEL, *ON_CPU, *OF_MEGATRON), num_ranks=2)}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    require_megatron()
    return Outcomes(Path(__file__), WORLDS, tmp_path_factory.mktemp("deterministic_tp_ranks"))


@every_check(WORLDS)
def test_over_gloo(outcomes, world, check):
    outcomes.require(world, check)


@pytest.mark.gpu(2)
def test_over_nccl(tmp_path):
    # Prevents: a sum that NCCL adds otherwise than the one rank that stands for two. Those of Megatron where
    # it is installed.
    tests = Path(__file__).parent
    path = [str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")]
    outputs = run_ranks(
        (__file__, "nccl", tmp_path), 2, PYTHONPATH=os.pathsep.join(filter(None, path))
    )
    checks = OF_THE_MODEL + OF_MEGATRON if HAS_MEGATRON else OF_THE_MODEL
    assert all(f"passed {check.__name__}" in outputs[0] for check in checks)


def _run_nccl(folder: Path) -> None:
    """In the child: every check on this rank's GPU, to the first that fails."""
    import torch

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", device_id=device)
    for check in OF_THE_MODEL + OF_MEGATRON if HAS_MEGATRON else OF_THE_MODEL:
        check(folder)
        print("passed", check.__name__, flush=True)
    os._exit(0)  # as run_world does, and why


if __name__ == "__main__":
    if sys.argv[1] == "nccl":
        _run_nccl(Path(sys.argv[2]))
    run_world(WORLDS)
