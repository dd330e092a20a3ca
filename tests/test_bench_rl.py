"""The measurement of the cost of TRIAGE: its arithmetic, and that nothing wrong is timed."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import bench_rl  # noqa: E402

TINY = {
    "LAYERS": 2,
    "HIDDEN": 64,
    "FFN": 96,
    "HEADS": 2,
    "KV_HEADS": 1,
    "HEAD_DIM": 32,
    "VOCABULARY": 64,
    "MICRO_BATCH": {"cpu": (1, 16), "cuda": (1, 16)},
}


@pytest.fixture
def tiny(monkeypatch):
    for name, value in TINY.items():
        monkeypatch.setattr(bench_rl, name, value)
    kept = torch.get_num_threads()
    yield
    torch.set_num_threads(kept)


def test_share_of_an_update_by_hand():
    # Prevents: a per cent that is a fraction, and microseconds that are milliseconds.
    row = bench_rl.with_share({"extra_ms": 500.0, "tokens": 10_000_000}, 200_000.0)
    # The update takes 50 s, of which half a second is 1 %.
    assert row["share_percent"] == pytest.approx(1.0)
    assert row["rate_at_1_percent"] == pytest.approx(200_000)
    assert "share_percent" not in bench_rl.with_share({"extra_ms": 0.0, "tokens": 1}, 1.0)


def test_every_row_has_its_share_of_the_faster_update(tiny):
    # Prevents: a share of another update than the one in the table.
    rows = list(bench_rl.rows("none", num_runs=1, num=4, longest=300))
    assert all(set(row) <= set(bench_rl.FIELDS) for row in rows)
    learners, losses = rows[:2], rows[2:]
    assert [row["computes"] for row in learners] == [
        "learner update, bf16",
        "learner update, nvfp4_per_token",
    ]
    fastest = max(row["tokens_per_s"] for row in learners)
    for row in learners:
        assert row["update_ms"] == pytest.approx(4 * 300 / row["tokens_per_s"] * 1e3, rel=0.05)
    assert len(losses) == 8
    for row in losses:
        if row["extra_ms"]:
            expected = row["extra_ms"] / (row["tokens"] / fastest * 1e3) * 100
            assert row["share_percent"] == pytest.approx(expected, rel=0.01)


def test_the_learner_learns(tiny):
    # Prevents: the time of a backward or of a step that changes nothing.
    torch.manual_seed(0)
    learner = bench_rl.Learner("bf16", "cpu")
    before = [parameter.detach().clone() for parameter in learner.masters]
    learner.micro_batch()
    learner.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, learner.masters, strict=True))


def test_two_forms_that_differ_are_not_timed():
    # Prevents: a fast time of a wrong result.
    data = bench_rl.update("padded", "cpu", 4, 300)
    calls = bench_rl.contenders(data)
    bench_rl.check(data, calls)
    name = "stock loss, gate, live repair"
    right = calls[name]
    with pytest.raises(RuntimeError, match="not timed"):
        bench_rl.check(data, calls | {name: lambda: right() * 1.00001})
    with pytest.raises(RuntimeError, match="not timed"):
        bench_rl.check(data, calls | {"stock loss, gate and repair": lambda: right() + 1e-9})
