"""Two context-parallel ranks over gloo compute what one rank computes, through the hooks of miles and slime.

One pair of processes runs every case, with one rank and with two, on stand-ins and on the real losses where
miles and slime can be imported, and records losses, metrics, gradients and advantages; each test reads one
record.
"""

import datetime
import importlib
import importlib.util
from types import SimpleNamespace
from unittest import mock

import pytest
import rl_stand_in as stand_in
import torch
import torch.distributed as dist
import torch.multiprocessing

from megatron_nvfp4.rl import adapter

FRAMEWORKS = ("miles", "slime")
VOCABULARY = 11
# Responses across chunk borders, inside one rank's chunks (rank 1 has nothing of the second), of one token.
LENGTHS, PROMPTS, SIGNS = (210, 40, 130, 1, 90), (7, 300, 64, 5, 2), (-1.0, -1.0, 1.0, -0.5, 1.0)


def make_batch(dtype=torch.float64):
    """Whole responses with gaps of every tier."""
    generator = torch.Generator().manual_seed(4)

    def draw(n):
        return torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)

    masks = [(draw(n) > -1.0).int() for n in LENGTHS]
    gap = [draw(n) * 0.7 - 0.7 for n in LENGTHS]
    for g in gap:
        g[5::40] = -7.0
    learner = [-draw(n).abs() - 2 for n in LENGTHS]
    sampler = [z - g for z, g in zip(learner, gap, strict=True)]
    return {
        "log_probs": learner,
        "rollout_log_probs": sampler,
        "advantages": [
            torch.full((n,), a, dtype=dtype) for n, a in zip(LENGTHS, SIGNS, strict=True)
        ],
        "loss_masks": masks,
        "rollout_mask_sums": torch.stack([m.sum() for m in masks]).to(dtype),
        "total_lengths": [n + p for n, p in zip(LENGTHS, PROMPTS, strict=True)],
        "response_lengths": list(LENGTHS),
    }


def poison(batch):
    """Puts what filler log-probs may hold at masked tokens of the sampler."""
    for values, m in zip(batch["rollout_log_probs"], batch["loss_masks"], strict=True):
        values[m == 0] = torch.tensor([torch.inf, torch.nan, -0.0] * len(m)).to(values)[
            : int((m == 0).sum())
        ]


def part_of(batch, rank, size):
    """The batch as a rank is given it."""
    local = dict(batch)
    for name in ("log_probs", "rollout_log_probs", "advantages"):
        pairs = zip(batch[name], batch["total_lengths"], strict=True)
        local[name] = [stand_in.held(x, t, rank, size) for x, t in pairs]
    return local


def back(flat, batch, rank, size):
    """A rank's value per response token at its places in the whole responses, 0 elsewhere."""
    total = sum(batch["response_lengths"])
    index = torch.arange(total).split(batch["response_lengths"])
    pairs = zip(index, batch["total_lengths"], strict=True)
    places = torch.cat([stand_in.held(i, t, rank, size) for i, t in pairs])
    whole = flat.new_zeros(total)
    whole[places] = flat
    return whole


def hook_args(framework, hook, **changed):
    """Arguments that make the framework call the hook, TIS included."""
    path = f"megatron_nvfp4.rl.{framework}.tis_triage" if hook == "tis_triage" else None
    return stand_in.default_args(use_tis=True, custom_tis_function_path=path, **changed)


def run_stand_in(framework, hook, rank, size, group, aware=True):
    """(loss, metrics, gradient, advantages) of one rank, the last two placed in the whole responses."""
    batch = make_batch()
    local, seen = part_of(batch, rank, size), {}

    def watch(args, given, *rest):
        seen["advantages"] = torch.cat(given["advantages"])
        return stand_in.policy_loss_function(args, given, *rest)

    args = hook_args(framework, hook)
    with pytest.MonkeyPatch.context() as patch:
        stand_in.install_megatron_style(patch, rank, size, group)
        for name in (
            "miles.backends.training_utils.loss_hub.losses",
            "slime.backends.megatron_utils.loss",
        ):
            patch.setattr(importlib.import_module(name), "policy_loss_function", watch)
        if not aware:
            patch.setattr(dist, "all_reduce", lambda *args, **kwargs: None)
        ours = importlib.import_module(f"megatron_nvfp4.rl.{framework}").policy_loss
        function = ours if hook == "policy_loss" else watch
        live = torch.cat(local["log_probs"]).requires_grad_()
        reducer = stand_in.sample_mean_sum(args, batch, rank, size)
        loss, metrics = function(args, local, live, reducer)
        (grad,) = torch.autograd.grad(loss, live)
    places = back(grad, batch, rank, size), back(seen["advantages"], batch, rank, size)
    return loss.detach(), metrics, *places


def real_args(framework, hook):
    return hook_args(
        framework,
        hook,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        log_probs_chunk_size=-1,
        true_on_policy_mode=False,
        allgather_cp=False,
        use_opsm=False,
        use_kl_loss=False,
        entropy_coef=0.0,
        observe_training_entropy=False,
        eps_clip_c=None,
        skip_actor_forward_only=False,
        calculate_per_token_loss=False,
        custom_pg_loss_reducer_function_path=None,
        dump_details=None,
        true_on_policy=False,
    )


def logit_rows(batch, rank, size):
    """For each row of a rank's logits its row in the whole packed batch; -1 for padding."""
    rows, base = [], 0
    for total in batch["total_lengths"]:
        whole = torch.arange(total)
        if size > 1:
            chunk = -(-total // (2 * size))
            whole = torch.cat([whole, torch.full((2 * size * chunk - total,), -base - 1)])
            chunks = whole.split(chunk)
            whole = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
        rows.append(whole + base)
        base += total
    return torch.cat(rows)


def run_real(framework, hook, rank, size):
    """(loss, metrics, gradient of the logits placed in the whole batch) through the real stock loss."""
    batch = make_batch(torch.float32)
    generator = torch.Generator().manual_seed(9)
    total = sum(batch["total_lengths"])
    whole = torch.randn(total, VOCABULARY, generator=generator)
    batch["unconcat_tokens"] = [
        torch.randint(VOCABULARY, (n,), generator=generator) for n in batch["total_lengths"]
    ]
    scores = whole.log_softmax(-1)
    base, gap = 0, []
    for i, (n, r) in enumerate(zip(batch["total_lengths"], LENGTHS, strict=True)):
        gap.append(batch["log_probs"][i] - batch["rollout_log_probs"][i])
        taken = batch["unconcat_tokens"][i][n - r :]
        batch["log_probs"][i] = scores[base + n - r - 1 : base + n - 1].gather(1, taken[:, None])[
            :, 0
        ]
        batch["rollout_log_probs"][i] = batch["log_probs"][i] - gap[i]
        base += n
    args, local = real_args(framework, hook), part_of(batch, rank, size)
    rows = logit_rows(batch, rank, size)
    logits = torch.where(rows[:, None] >= 0, whole[rows.clamp_min(0)], 0)[None].requires_grad_()
    loss_hub = {
        "miles": "miles.backends.training_utils.loss_hub.losses",
        "slime": "slime.backends.megatron_utils.loss",
    }[framework]
    stock = importlib.import_module(loss_hub)
    lists = local["total_lengths"], local["response_lengths"], local["loss_masks"]
    reducer = stock.get_sum_of_sample_mean(*lists)
    ours = importlib.import_module(f"megatron_nvfp4.rl.{framework}").policy_loss
    function = ours if hook == "policy_loss" else stock.policy_loss_function
    loss, metrics = function(args, local, logits, reducer)
    (grad,) = torch.autograd.grad(loss, logits)
    placed = torch.zeros(total, VOCABULARY)
    placed[rows[rows >= 0]] = grad[0, rows >= 0]
    return loss.detach(), {k: torch.as_tensor(v) for k, v in metrics.items()}, placed


def real_world(framework, rank, size):
    """The framework's parallel state for one rank of `size`; the processes are two in any case."""
    from megatron.core import mpu

    if framework == "miles":
        from miles.backends.training_utils.parallel import set_parallel_state

        cp = SimpleNamespace(rank=rank, size=size, group=dist.group.WORLD)
        tp = SimpleNamespace(rank=0, size=1, group=mpu.get_tensor_model_parallel_group())
        set_parallel_state(SimpleNamespace(cp=cp, tp=tp))
    return mock.patch.multiple(
        mpu,
        get_context_parallel_world_size=lambda: size,
        get_context_parallel_rank=lambda: rank,
        get_context_parallel_group=lambda: dist.group.WORLD,
    )


def summed(result):
    """A rank's result added over the ranks."""
    loss, *places = (value.clone() for value in (result[0], *result[2:]))
    metrics = {name: value.clone() for name, value in result[1].items()}
    for tensor in (loss, *metrics.values(), *places):
        dist.all_reduce(tensor)
    return loss, metrics, *places


def run_rank(rank, folder):
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    timeout = datetime.timedelta(seconds=120)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=2, timeout=timeout
    )
    records = {}
    for framework in FRAMEWORKS:
        for hook in ("policy_loss", "tis_triage"):
            one = run_stand_in(framework, hook, 0, 1, None)
            two = summed(run_stand_in(framework, hook, rank, 2, dist.group.WORLD))
            blind = run_stand_in(framework, hook, rank, 2, dist.group.WORLD, aware=False)
            records["stand-in", framework, hook] = one, two, summed(blind)
    records["gather"] = run_gather(rank)
    if all(importlib.util.find_spec(name) for name in (*FRAMEWORKS, "megatron", "ray")):
        from megatron.core import mpu

        mpu.initialize_model_parallel(context_parallel_size=2)
        for framework in FRAMEWORKS:
            for hook in ("policy_loss", "tis_triage"):
                with real_world(framework, 0, 1):
                    one = run_real(framework, hook, 0, 1)
                with real_world(framework, rank, 2):
                    two = summed(run_real(framework, hook, rank, 2))
                records["package", framework, hook] = one, two
    if rank == 0:
        torch.save(records, f"{folder}/records.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_gather(rank):
    """Two columns, one with special values, through gather_responses, and what they were, per dtype."""
    records = []
    for dtype in (torch.float32, torch.float64):
        batch = make_batch(dtype)
        poison(batch)
        whole = [torch.cat(batch[name]) for name in ("rollout_log_probs", "log_probs")]
        local = part_of(batch, rank, 2)
        part = adapter.place_responses(
            batch["total_lengths"],
            batch["response_lengths"],
            lambda i, b=batch: stand_in.zigzag(b["total_lengths"][i], LENGTHS[i], rank, 2),
            dist.group.WORLD,
            torch.device("cpu"),
        )
        columns = [torch.cat(local[name]) for name in ("rollout_log_probs", "log_probs")]
        cut = [torch.cat(part.split(column)) for column in whole]
        records.append((whole, adapter.gather_responses(columns, part), columns, cut))
    return records


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(run_rank, args=(str(folder),), nprocs=2)
    return torch.load(folder / "records.pt", weights_only=True)


def bits(x):
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int64)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_advantages_have_the_same_bits(records, framework):
    """A segment cut at a chunk border would be gated by half of its tokens."""
    one, two, blind = records["stand-in", framework, "policy_loss"]
    assert torch.equal(bits(one[3]), bits(two[3]))
    assert not torch.equal(
        one[3], blind[3]
    )  # a rank that does not gather is told apart by this data


@pytest.mark.parametrize("hook", ["policy_loss", "tis_triage"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_gradients_have_the_same_bits_and_losses_agree(records, framework, hook):
    """A gradient that depends on the number of context-parallel ranks makes runs incomparable."""
    one, two, blind = records["stand-in", framework, hook]
    assert torch.equal(one[2], two[2])
    assert not torch.equal(one[2], blind[2])
    torch.testing.assert_close(two[0], one[0], rtol=1e-13, atol=0)
    assert torch.isfinite(one[2]).all()


@pytest.mark.parametrize("hook", ["policy_loss", "tis_triage"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_metrics_add_up_over_ranks(records, framework, hook):
    """A metric of whole responses on every rank would be logged cp_size times too large."""
    one, two, _ = records["stand-in", framework, hook]
    assert set(adapter.TOKEN_METRICS) < set(one[1])
    for name in adapter.TOKEN_METRICS:
        torch.testing.assert_close(two[1][name], one[1][name], rtol=1e-13, atol=0)
    assert one[1]["triage/gated"] > 0
    assert one[1]["triage/deep_tail"] > 0


def test_gathering_keeps_every_bit(records):
    """An all-reduce of floats turns -0 into 0; a wrong place would show in any value."""
    for whole, gathered, held, cut in records["gather"]:
        for expected, got in zip(whole, gathered, strict=True):
            assert torch.equal(bits(expected), bits(got))
        for expected, got in zip(held, cut, strict=True):
            assert torch.equal(bits(expected), bits(got))
    sampler = records["gather"][0][0][0]
    assert sampler.isnan().any()
    assert (bits(sampler) == -(2**31)).any()


@pytest.mark.parametrize("hook", ["policy_loss", "tis_triage"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_real_losses_agree(records, framework, hook):
    """The stand-ins share this file's idea of zigzag; the real losses have the frameworks' own."""
    if ("package", framework, hook) not in records:
        pytest.skip(
            f"{framework}'s loss cannot be imported (needs miles, slime, megatron-core, ray)"
        )
    one, two = records["package", framework, hook]
    assert set(adapter.TOKEN_METRICS) < set(one[1])
    assert one[2].abs().max() > 1e-4
    torch.testing.assert_close(two[0], one[0], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(two[2], one[2], rtol=1e-5, atol=1e-9)
    for name in adapter.TOKEN_METRICS:
        torch.testing.assert_close(two[1][name], one[1][name], rtol=1e-5, atol=1e-7)
    assert one[1]["triage/gated"] > 0
    assert one[1]["triage/shift_negative"] > 0


def test_padded_sequences_are_placed_by_their_padded_length(monkeypatch):
    """With qkv_format bshd miles cuts chunks of the padded length; those of the true length are elsewhere."""
    from megatron_nvfp4.rl import miles

    stand_in.install_megatron_style(monkeypatch, rank=0, size=2)
    batch = {"total_lengths": [20], "response_lengths": [15], "max_seq_lens": [32]}
    place = {
        form: miles._place(stand_in.default_args(qkv_format=form), batch, torch.device("cpu"))
        for form in ("bshd", "thd")
    }
    # Chunks of 8: logits 4..7 and 24..31, of which the last response logit is 18; response token = logit - 4.
    assert place["bshd"].positions.tolist() == [0, 1, 2, 3]
    # Chunks of 5: logits 4 and 15..18.
    assert place["thd"].positions.tolist() == [0, 11, 12, 13, 14]
