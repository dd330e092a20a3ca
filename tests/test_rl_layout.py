"""TRIAGE over layouts, in parts, at its edges: bits, cost, refusals, names."""

import dataclasses
import gc
import math
import re
import subprocess
import sys
import weakref
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from rl_cases import FORMS, INF, NAN, REPORTED, form, gate_of
from rl_oracle import (
    as_padded,
    as_ragged,
    random_batch,
    unpadded,
)
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_nvfp4 import rl
from megatron_nvfp4.rl import (
    TriageConfig,
    UpdateTotals,
    check_finite,
    tis_weights,
    triage_advantages,
    triage_gate,
    triage_repair_loss,
    triage_totals,
)
from megatron_nvfp4.rl.layout import Layout, fold

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    torch.manual_seed(0)


# --- layouts and bits -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("norm", "repair_norm"), FORMS)
@pytest.mark.parametrize("width", [None, 320, 1000])
def test_padded_equals_ragged_bit_for_bit(dtype, norm, repair_norm, width):
    # Prevents: padding, or the length it goes to, changing a loss; NaN of the padding leaking.
    config, batch = form(norm, repair_norm), random_batch(11)
    (delta, advantages, mask), offsets = as_ragged(batch, dtype)
    flat = {"offsets": offsets, "config": config}
    wide = as_padded(batch, dtype, NAN, width)
    assert torch.equal(
        triage_gate(delta, advantages, mask, **flat),
        unpadded(triage_gate(*wide, config=config), batch),
    )
    tis = tis_weights(delta, mask, offsets=offsets)
    got, metrics = triage_advantages(delta, advantages, mask, tis_weights=tis, **flat)
    tis = tis_weights(wide[0], wide[2])
    other, others = triage_advantages(*wide, config=config, tis_weights=tis)
    assert torch.equal(got, unpadded(other, batch))
    assert torch.isfinite(other).all()
    assert metrics == others
    grads = []
    for tensors, more in (((delta, advantages, mask), {"offsets": offsets}), (wide, {})):
        learner = tensors[0].clone().requires_grad_()
        sampler = torch.zeros_like(learner)
        loss = triage_repair_loss(learner, sampler, *tensors[1:], config=config, step=0, **more)
        loss.backward()
        grads.append((loss, learner.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], unpadded(grads[1][1], batch))
    assert not torch.count_nonzero(grads[1][1][~wide[2]])


def test_a_response_has_the_same_bits_alone():
    # Prevents: results that depend on which responses share a micro-batch.
    config = TriageConfig(repair_weight=0.0)
    batch = random_batch(5)
    (delta, advantages, mask), offsets = as_ragged(batch, torch.float32)
    together, _ = triage_advantages(delta, advantages, mask, offsets=offsets, config=config)
    for i, (begin, end) in enumerate(pairwise(offsets)):
        part = slice(begin, end)
        alone, _ = triage_advantages(
            delta[None, part], advantages[None, part], mask[None, part], config=config
        )
        assert torch.equal(alone[0], together[part]), i


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
def test_masked_tokens_have_no_effect(garbage):
    # Prevents: a mask by multiplication, where 0 * inf is NaN.
    batch = random_batch(2)
    (delta, advantages, mask), offsets = as_ragged(batch, torch.float32)
    flat = {"offsets": offsets, "config": REPORTED}
    dirty = [torch.where(mask, x, garbage) for x in (delta, advantages)]
    tis = torch.where(mask, tis_weights(delta, mask, offsets=offsets), garbage)
    clean, metrics = triage_advantages(delta, advantages, mask, **flat, tis_weights=tis)
    got, others = triage_advantages(*dirty, mask, **flat, tis_weights=tis)
    assert torch.equal(got, clean)
    assert metrics == others
    assert not torch.count_nonzero(got[~mask])
    assert torch.equal(
        triage_gate(*dirty, mask, **flat), triage_gate(delta, advantages, mask, **flat)
    )
    losses = []
    for learner, sampler in (
        (delta, torch.zeros_like(delta)),
        (dirty[0], torch.where(mask, 0, garbage)),
    ):
        live = learner.clone().requires_grad_()
        loss = triage_repair_loss(live, sampler, dirty[1], mask, **flat, step=0)
        loss.backward()
        losses.append((loss, live.grad))
    assert torch.equal(losses[0][0], losses[1][0])
    assert torch.equal(losses[0][1], losses[1][1])
    assert not torch.count_nonzero(losses[1][1][~mask])


@pytest.mark.parametrize(("norm", "repair_norm"), FORMS)
def test_a_fully_masked_response_contributes_nothing(norm, repair_norm):
    # Prevents: a division by its 0 tokens; a stale denominator that shrinks the others.
    config = form(norm, repair_norm)
    batch = random_batch(4)
    masked = ([NAN] * 70, [-1.0] * 70, [0] * 70)
    with_it = [*batch[:3], masked, *batch[3:]]
    results = []
    for one in (batch, with_it):
        (delta, advantages, mask), offsets = as_ragged(one)
        flat = {"offsets": offsets, "config": config}
        got, metrics = triage_advantages(delta, advantages, mask, **flat)
        loss = triage_repair_loss(delta, torch.zeros_like(delta), advantages, mask, **flat, step=0)
        results.append((got[mask], loss, metrics["num_responses"], got))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:3] == results[1][1:3]
    assert torch.isfinite(results[1][3]).all()


def test_all_masked():
    # Prevents: 0 / 0 in an update that a filter has emptied.
    delta = torch.full((3, 70), NAN, requires_grad=True)
    mask = torch.zeros(3, 70)
    for norm, repair_norm in FORMS:
        config = form(norm, repair_norm)
        got, metrics = triage_advantages(delta, -torch.ones(3, 70), mask, config=config)
        assert torch.equal(got, torch.zeros(3, 70))
        assert all(torch.isfinite(value) for value in metrics.values())
        loss = triage_repair_loss(
            delta, torch.zeros(3, 70), torch.ones(3, 70), mask, config=config, step=0
        )
        (grad,) = torch.autograd.grad(loss, delta)
        assert loss == 0
        assert not torch.count_nonzero(grad)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), None, "three empty"])
def test_nothing_at_all(shape):
    # Prevents: an index into an empty tensor, or the maximum of nothing.
    offsets = None
    if not isinstance(shape, tuple):
        offsets, shape = torch.zeros(4 if shape else 1, dtype=torch.int64), (0,)
    empty = torch.zeros(shape)
    for norm, repair_norm in FORMS:
        more = {"offsets": offsets, "config": form(norm, repair_norm)}
        assert triage_gate(empty, empty, empty, **more).shape == shape
        got, metrics = triage_advantages(empty, empty, empty, **more, tis_weights=empty)
        assert got.shape == shape
        assert not any(metrics.values())
        assert triage_repair_loss(empty, empty, empty, empty, **more, step=0) == 0


def test_mask_and_offset_dtypes():
    # Prevents: float or integer masks that select by index; int32 offsets that overflow or fail.
    batch = random_batch(6)
    (delta, advantages, mask), offsets = as_ragged(batch)
    expected = gate_of(batch)
    for dtype in (torch.float32, torch.int64, torch.uint8, torch.bfloat16):
        got = triage_gate(delta, advantages, mask.to(dtype), offsets=offsets.int(), config=REPORTED)
        assert torch.equal(got, expected)


def test_tokens_of_no_response():
    # Prevents: room behind the last response, as device offsets may leave it, taken for its tokens.
    layout = Layout((10,), torch.tensor([0, 3, 7]), complete=False)
    assert layout.valid(torch.ones(10)).tolist() == [True] * 7 + [False] * 3
    segments = layout.segments(2)
    grid = segments.gather(torch.arange(10.0))
    assert segments.scatter(grid, -1.0).tolist() == [0, 1, 2, 3, 4, 5, 6, -1, -1, -1]
    assert layout.sum_responses(torch.arange(10.0)).tolist() == [3.0, 18.0]


@pytest.mark.parametrize("width", [0, 1, 2, 3, 5, 63, 64, 100])
def test_fold_sums(width):
    # Prevents: a dropped middle where the width is odd.
    x = torch.arange(3 * width, dtype=torch.float64).reshape(3, width)
    assert torch.equal(fold(x), x.sum(-1))


# --- updates in parts -----------------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "repair_norm"), FORMS)
def test_parts_of_an_update_add_up(norm, repair_norm):
    # Prevents: micro-batches or ranks that each normalise by themselves.
    config, batch = form(norm, repair_norm), random_batch(13)
    (delta, advantages, mask), offsets = as_ragged(batch)
    whole, metrics = triage_advantages(delta, advantages, mask, offsets=offsets, config=config)
    zero = torch.zeros_like(delta)
    whole_loss = triage_repair_loss(
        delta, zero, advantages, mask, offsets=offsets, config=config, step=0
    )
    parts = [as_ragged(batch[:3]), as_ragged(batch[3:4]), as_ragged(batch[4:])]
    counted = [triage_totals(*tensors, offsets=o, config=config) for tensors, o in parts]
    totals = UpdateTotals(*(torch.stack(column).sum() for column in zip(*counted, strict=True)))
    assert totals.num_tokens == mask.sum()
    pieces, losses, sums = [], [], Counter()
    for tensors, part in parts:
        more = {"offsets": part, "config": config, "totals": totals}
        piece, own = triage_advantages(*tensors, **more)
        pieces.append(piece)
        sums.update({name: value.item() for name, value in own.items()})
        losses.append(
            triage_repair_loss(
                tensors[0], torch.zeros_like(tensors[0]), *tensors[1:], **more, step=0
            )
        )
    assert torch.allclose(torch.cat(pieces), whole, rtol=1e-14, atol=1e-16)
    assert sum(losses).item() == pytest.approx(whole_loss.item(), rel=1e-13)
    for name in set(metrics) - {"max_coefficient"}:
        assert sums[name] == pytest.approx(metrics[name].item(), rel=1e-12), name


# --- cost -----------------------------------------------------------------------------------------


class CountOps(TorchDispatchMode):
    """Counts the operators that run inside."""

    def __init__(self):
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += 1
        return func(*args, **(kwargs or {}))


def test_the_work_does_not_loop_over_responses_or_tokens():
    # Prevents: a Python loop, which costs seconds at 512 responses of 20k tokens.
    counts = []
    for lengths in ([4000, 96], [1] * 1952 + [2] * 1072):
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        x = torch.randn(4096)
        mode = CountOps()
        with mode:
            triage_gate(x, x, torch.ones(4096), offsets=offsets, config=REPORTED)
            triage_advantages(
                x, x, torch.ones(4096), offsets=offsets, config=REPORTED, tis_weights=x
            )
            triage_repair_loss(x, x, x, torch.ones(4096), offsets=offsets, config=REPORTED, step=0)
        counts.append(mode.num)
    # 2 and 3024 responses; what is summed over responses in halves grows with the logarithm.
    assert 0 < counts[1] < 1.5 * counts[0]


def test_an_update_leaves_nothing_behind():
    # Prevents: an index of every token that stays on the device until the collector runs.
    layout = Layout((300,), torch.tensor([0, 100, 300]))
    layout.sum_responses(torch.ones(300))
    index = weakref.ref(layout.segments(64))
    gc.disable()
    try:
        del layout
        assert index() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_the_host_reads_no_tensor(layout):
    # Prevents: a synchronisation in the gate. Meta tensors have no values: reading one raises.
    shape, offsets = (4, 200), None
    if layout == "ragged":
        shape, offsets = (800,), torch.zeros(5, dtype=torch.int64, device="meta")
    x = torch.zeros(shape, device="meta", requires_grad=True)
    more = {"offsets": offsets, "config": TriageConfig(repair_start=1)}
    triage_gate(x, x, x, **more)
    triage_totals(x, x, x, **more)
    triage_advantages(x, x, x, **more, tis_weights=x, step=1)
    triage_repair_loss(x, x, x, x, **more, step=1).backward()
    with pytest.raises(RuntimeError, match="meta"):
        check_finite(x, offsets=offsets, x=x)


@pytest.mark.gpu
def test_gpu_has_the_bits_of_the_cpu_and_never_waits():
    # Prevents: sums whose order depends on the device; a hidden synchronisation.
    batch = random_batch(17)
    (delta, advantages, mask), offsets = as_ragged(batch, torch.float32)
    tis = tis_weights(delta, mask, offsets=offsets)
    config = TriageConfig(norm="response")
    expected, metrics = triage_advantages(
        delta, advantages, mask, offsets=offsets, config=config, tis_weights=tis
    )
    room = torch.full((37,), NAN)  # behind the last response
    on_gpu = [torch.cat([x, room.to(x.dtype)]).cuda() for x in (delta, advantages, mask, tis)]
    offsets = offsets.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got, others = triage_advantages(
            *on_gpu[:3], offsets=offsets, config=config, tis_weights=on_gpu[3]
        )
        learner = on_gpu[0].requires_grad_()
        loss = triage_repair_loss(
            learner, on_gpu[3], *on_gpu[1:3], offsets=offsets, config=config, step=0
        )
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got.cpu()[: delta.numel()], expected)
    assert not got[delta.numel() :].any()
    assert {name: value.cpu() for name, value in others.items()} == metrics
    assert torch.isfinite(learner.grad).all()


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"gate_width": 0}, "gate_width=0 is not at least 1"),
        ({"mild_mean": 0.5}, "mild_mean=0.5 is not at most 0"),
        ({"deep_mean": -0.1}, "deep_mean=-0.1 is not at most mild_mean"),
        ({"mild_weight": 0.0}, "mild_weight=0.0 is not above 0"),
        ({"deep_weight": 0.4}, "deep_weight=0.4 is not above 0 and at most mild_weight"),
        ({"tail_gap": 0.0}, "tail_gap=0.0 is not below 0"),
        ({"tail_count": 0}, "tail_count=0 is not at least 1"),
        ({"tail_strength": 1.0}, "tail_strength=1.0 is not at least 0 and below 1"),
        ({"norm": "sequence"}, "norm='sequence' is not 'response' or 'token'"),
        ({"repair_width": 100}, "repair_width=100 is not a positive multiple of gate_width"),
        ({"repair_boundary": 0.1}, "repair_boundary=0.1 is not at most 0"),
        ({"repair_beta": 0.0}, "repair_beta=0.0 is not above 0"),
        ({"repair_weight": -1.0}, "repair_weight=-1.0 is not at least 0"),
        ({"repair_weight": NAN}, "repair_weight=nan is not at least 0"),
        ({"repair_start": -1}, "repair_start=-1 is not at least 0"),
        ({"repair_norm": "all"}, "repair_norm='all' is not 'segment' or 'token'"),
    ],
)
def test_settings_out_of_range(setting, text):
    # Prevents: a setting that silently makes the gate a no-op or a loss infinite.
    with pytest.raises(ValueError) as caught:
        TriageConfig(**setting)
    assert text in str(caught.value)
    default = getattr(REPORTED, next(iter(setting)))
    assert f"the reported setting is {default!r}" in str(caught.value)


def test_the_defaults_are_the_reported_settings():
    # Prevents: a default changed in passing.
    assert dataclasses.asdict(REPORTED) == {
        "gate_width": 64,
        "mild_mean": -0.5,
        "mild_weight": 0.3,
        "deep_mean": -1.5,
        "deep_weight": 0.1,
        "tail_gap": -6.0,
        "tail_count": 2,
        "tail_strength": 0.9,
        "norm": "response",
        "repair_width": 128,
        "repair_boundary": -0.03,
        "repair_beta": 0.022360679775,
        "repair_weight": 0.015,
        "repair_start": 0,
        "repair_norm": "segment",
        "calibration": None,
    }
    assert REPORTED.repair_beta == pytest.approx(math.sqrt(0.0005), abs=1e-12)


def test_the_documented_constants_are_the_defaults():
    # Prevents: a table of constants that lags behind the settings.
    text = (ROOT / "docs" / "rl.md").read_text()
    documented = {}
    for names, values in re.findall(r"^\| (`[\w`, ]+`) \| ([^|]+) \|", text, re.MULTILINE):
        values = [value.split()[0] for value in values.split(", ")]
        documented |= dict(zip(re.findall(r"\w+", names), values, strict=False))
    for field in dataclasses.fields(TriageConfig):
        if isinstance(field.default, float | int):
            assert float(documented[field.name]) == field.default, field.name


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("arguments", "offsets", "text"),
    [
        ((X[0], X[0], X[0]), None, "delta has shape (3,); give (N, T), or (T,) together with"),
        ((X, X, X), torch.tensor([0, 6]), "delta has shape (2, 3); give (T,) with offsets"),
        ((X, X[:, :1], X), None, "advantages has shape (2, 1) and delta (2, 3); give one value"),
        ((X, X, X[0]), None, "mask has shape (3,) and delta (2, 3)"),
        ((X.int(), X, X), None, "delta is torch.int32; give float32, bfloat16 or float64"),
        ((X, X.to("meta"), X), None, "advantages is on meta and delta on cpu; move one"),
        ((X[0],) * 3, torch.tensor([0, 2]), "offsets go from 0 to 2 over 3 tokens"),
        ((X[0],) * 3, torch.tensor([1, 3]), "offsets go from 1 to 3 over 3 tokens"),
        ((X[0],) * 3, torch.tensor([0, 2, 1, 3]), "offsets[2]=1 is below offsets[1]=2"),
        ((X[0],) * 3, torch.tensor([0.0, 3.0]), "offsets are torch.float32 (2,); give int64"),
        ((X[0],) * 3, torch.tensor([[0, 3]]), "offsets are torch.int64 (1, 2); give int64"),
        ((X[0],) * 3, torch.tensor([], dtype=torch.int64), "offsets are torch.int64 (0,)"),
    ],
)
def test_tensors_that_do_not_belong_together(arguments, offsets, text):
    # Prevents: broadcasting that pairs the wrong tokens, and offsets that hide or repeat some.
    for call in (triage_gate, triage_totals, triage_advantages):
        with pytest.raises(ValueError) as caught:
            call(*arguments, offsets=offsets, config=REPORTED)
        assert text in str(caught.value)


def test_other_tensors_are_checked_too():
    # Prevents: TIS weights or sampler log-probs of another shape being broadcast.
    with pytest.raises(ValueError, match=r"tis_weights has shape \(3,\)"):
        triage_advantages(X, X, X, config=REPORTED, tis_weights=X[0])
    with pytest.raises(ValueError, match=r"sampler_logprobs has shape \(3,\)"):
        triage_repair_loss(X, X[0], X, X, config=REPORTED, step=0)


@pytest.mark.parametrize("value", [NAN, -INF])
def test_check_finite_names_the_token(value):
    # Prevents: a NaN log-prob that a JSON file turned into nothing and nobody can find.
    x = torch.zeros(2, 3)
    x[1, 2] = value
    mask = torch.ones(2, 3)
    with pytest.raises(ValueError, match=rf"s of response 1, token 2, is {value} and not masked"):
        check_finite(mask, z=torch.zeros(2, 3), s=x)
    with pytest.raises(ValueError, match="s of response 1, token 2, is"):
        check_finite(mask.flatten(), offsets=torch.tensor([0, 3, 6]), s=x.flatten())
    with pytest.raises(ValueError, match="s of response 2, token 0, is"):  # after an empty response
        check_finite(mask.flatten(), offsets=torch.tensor([0, 5, 5, 6]), s=x.flatten())
    mask[1, 2] = 0
    check_finite(mask, s=x)


def test_public_names_are_frozen_and_load():
    # Prevents: a lazy name that points to nothing; a rename that breaks the adapters' users.
    assert rl.__all__ == [
        "GateCalibration",
        "TriageConfig",
        "UpdateTotals",
        "calibrate_gate",
        "check_finite",
        "geometric_weights",
        "icepop_weights",
        "mis_weights",
        "recenter_lengths",
        "score_centering_term",
        "sequence_mask",
        "sequence_weights",
        "tis_weights",
        "triage_advantages",
        "triage_gate",
        "triage_repair_loss",
        "triage_totals",
    ]
    assert set(rl.__all__) <= set(dir(rl))
    assert all(getattr(rl, name).__name__ == name for name in rl.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'triage_loss'"):
        _ = rl.triage_loss


def test_importing_rl_imports_no_torch():
    # Prevents: a plugin scan of a framework paying for torch, or failing without it.
    code = "import sys, megatron_nvfp4, megatron_nvfp4.rl as rl; rl.__all__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")
