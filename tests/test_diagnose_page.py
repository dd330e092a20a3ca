"""The page of `diagnose`: its rules give Python's numbers, in a bare JavaScript engine and in a browser."""

import base64
import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import chromium_page
import diagnose_cases as cases
import pytest
import rl_oracle as oracle
import torch

from megatron_nvfp4.diagnostics import report_html, report_whatif
from megatron_nvfp4.diagnostics.mismatch import Gaps, Settings
from megatron_nvfp4.diagnostics.report import diagnose
from megatron_nvfp4.rl import TriageConfig

ASSETS = Path(report_html.__file__).parent / "assets"
# Positions of the sliders: as reported, stricter, laxer, on a segment's own value, off.
POSITIONS = [
    ({}, 2.0),
    ({"mild_mean": -0.1, "deep_mean": -0.4, "tail_gap": -2.0, "tail_count": 5}, 1.25),
    ({"mild_mean": 0.0, "deep_mean": 0.0, "tail_gap": -0.5, "tail_count": 8}, 1.0),
    ({"mild_mean": -1.0, "deep_mean": -4.0, "tail_gap": -7.0, "tail_count": 1}, 5.0),
    ({"mild_mean": -2.0, "deep_mean": -4.0, "tail_gap": -12.0, "tail_count": 8}, 10.0),
]


def gaps_of(batch, **kwargs) -> Gaps:
    """Gaps of a batch of rl_oracle, masks included."""
    record = cases.of_gaps(*((delta, advantages) for delta, advantages, _ in batch))
    mask = torch.tensor([m for _, _, ms in batch for m in ms], dtype=torch.bool)
    return Gaps(replace(record, mask=mask), Settings(**kwargs))


def batches():
    # A mean gap of exactly the threshold, tails of exactly the gap and count, mixed signs of A, empty ones.
    on_the_edge = [
        *oracle.one_segment(-1.0),
        *oracle.one_segment(-0.5, deep=[-7.0, -7.0]),
        *oracle.one_segment(-1.5, deep=[-6.0, -2.0, -0.5]),
        *oracle.one_segment(-0.25, advantage=1.0),
        ([], [], []),
        ([-1.0, -9.0], [-1.0, -1.0], [0, 0]),
        ([-9.0] * 20, [-1.0] * 20, [1] * 20),
    ]
    return {
        "random": oracle.random_batch(1),
        "mixed": oracle.random_batch(2, mixed=True),
        "edge": on_the_edge,
    }


BATCHES = batches()


def settings_of(config: TriageConfig, cap: float, gaps: Gaps) -> dict:
    return report_html.settings_of(config, cap, report_whatif.caps(gaps))


def decoded(packed: dict) -> list:
    raw = base64.b64decode(packed["base64"])
    form = {"Int32": "i", "Uint8": "B", "Float64": "d"}[packed["type"]]
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(form)}{form}", raw))


def script_data(gaps: Gaps) -> dict:
    """What the page's scripts hold behind decoding."""
    packed = report_html.payload(gaps)["whatif"]
    return {
        name: decoded(value) if isinstance(value, dict) else value for name, value in packed.items()
    }


def assert_equal(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        got = math.nan if found[name] is None else found[name]
        if name.startswith("gated") and name != "gated_share":
            assert got == value, name
        else:
            assert got == pytest.approx(value, rel=1e-9, nan_ok=True), name


# --- the rules without a browser --------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine():
    racer = pytest.importorskip("py_mini_racer", reason="mini-racer is not installed")
    context = racer.MiniRacer()
    context.eval((ASSETS / "whatif.js").read_text())
    return context


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("position", range(len(POSITIONS)))
def test_the_scripts_rules_are_pythons(engine, name, position):
    # Prevents: a slider that shows what no gate would do.
    changes, cap = POSITIONS[position]
    gaps, config = gaps_of(BATCHES[name]), TriageConfig(**changes)
    expected = cases.what_if(gaps, config, cap)
    arguments = json.dumps([script_data(gaps), settings_of(config, cap, gaps)])
    text = engine.eval(
        f"(() => {{ const [data, settings] = {arguments}; const found = whatIf(data, settings);"
        "return JSON.stringify(found, (k, v) => v === Infinity ? 'inf' : v); })()"
    )
    found = {k: math.inf if v == "inf" else v for k, v in json.loads(text).items()}
    assert_equal(found, expected)


def test_the_positions_differ():
    # Prevents: a comparison at positions that all gate the same segments.
    gaps = gaps_of(BATCHES["random"])
    found = [cases.what_if(gaps, TriageConfig(**c), cap) for c, cap in POSITIONS]
    for name in ("gated", "mean_weight", "rho_gate", "rho_tis", "tis_above"):
        assert len({each[name] for each in found}) >= 4, name


def test_many_responses_are_thinned_and_the_page_says_so(monkeypatch):
    # Prevents: a page of a gigabyte, or a sample shown as the whole.
    monkeypatch.setattr(report_whatif, "MAX_SEGMENTS", 20)
    record = cases.record(num=24, length=200)
    diagnosis, gaps = diagnose(record)
    data = report_html.payload(gaps)
    stride = data["whatif"]["stride"]
    assert stride > 1
    assert decoded(data["whatif"]["number"]) == list(range(0, 24, stride))
    # The maps are of all tokens.
    assert sum(data["quadrants"]["tokens"]) == diagnosis["gap"]["tokens"]
    shown = script_data(gaps)
    thinned = record.select(torch.arange(0, 24, stride))
    assert sum(shown["num_valid"]) == int(thinned.mask.sum())


# --- the page ---------------------------------------------------------------------------------------


def write_page(folder: Path, record) -> tuple[Path, Gaps, dict]:
    diagnosis, gaps = diagnose(record)
    path = folder / "page.html"
    path.write_text(report_html.page(diagnosis, gaps), encoding="utf-8")
    return path, gaps, diagnosis


def test_the_page_loads_nothing_and_escapes_what_it_is_given(tmp_path):
    # Prevents: a page that needs the network, or a file name that becomes markup.
    record = replace(cases.record(), sources=(("</script><b>x&y", "slime", 3),))
    text = write_page(tmp_path, record)[0].read_text()
    for part in ("http:", "https:", "src=", "@import", "url(", "<b>"):
        assert part not in text
    assert "&lt;/script&gt;&lt;b&gt;x&amp;y" in text
    assert text.count("</script>") == 4
    assert "<" not in text.split('id="data">')[1].split("</script>")[0]
    assert not any(f"@{name}@" in text for name in ("DATA", "STYLE", "PAGE", "WHATIF", "CHARTS"))


def test_a_page_without_gaps_or_advantages(tmp_path):
    # Prevents: no page just where the checks have something to say.
    made = [replace(x, learner=None) for x in cases.responses()]
    text = write_page(tmp_path, cases.join(made))[0].read_text()
    assert "no log-probs of the learner" in text
    text = write_page(tmp_path, replace(cases.record(), advantages=None))[0].read_text()
    assert '"tails"' in text
    assert '"whatif"' not in text


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    browser = chromium_page.find_browser()
    if browser is None:
        pytest.skip(f"no browser on PATH ({', '.join(chromium_page.NAMES)})")
    folder = tmp_path_factory.mktemp("page")
    record = replace(gaps_of(BATCHES["random"]).responses, sources=(("run.pt", "mismatch/1", 8),))
    path, gaps, _ = write_page(folder, record)
    page = chromium_page.Page(browser, path, folder / "profile", (1250, 900))
    yield page, gaps
    page.close()


def outcome(page) -> dict:
    keys = (
        "gated gated_share gated_tokens mean_weight max_coefficient rho rho_gate rho_tis rho_both"
    )
    names = [*keys.split(), "tis_above", "tis_weight"]
    script = f"{json.dumps(names)}.map(k => document.getElementById('out-' + k).dataset.exact)"
    return {name: float(text) for name, text in zip(names, page.run(script), strict=True)}


def test_a_slider_moved_by_keys_gives_pythons_numbers(opened):
    # Prevents: numbers that stay when a slider moves; a page that only a mouse can use.
    page, gaps = opened
    page.run("document.getElementById('reset').click()")
    assert_equal(outcome(page), cases.what_if(gaps, TriageConfig(), 2.0))
    page.run("document.getElementById('slider-mildMean').focus()")
    page.press("ArrowRight", 8)  # eight steps of 0.05 nats up from -0.5
    assert float(page.run("document.getElementById('slider-mildMean').value")) == -0.1
    page.run("document.getElementById('slider-capIndex').focus()")
    page.press("ArrowLeft", 3)  # 2 -> 1.75 -> 1.5 -> 1.25
    assert page.run("document.getElementById('value-capIndex').textContent") == "1.25"
    expected = cases.what_if(gaps, TriageConfig(mild_mean=-0.1), 1.25)
    assert_equal(outcome(page), expected)
    changed = cases.what_if(gaps, TriageConfig(), 2.0)
    assert expected["gated"] > changed["gated"]
    shown = page.run("document.getElementById('out-gated').textContent")
    assert shown == f"{int(expected['gated']):,}"


def test_the_tiers_stay_in_order(opened):
    # Prevents: settings that no TriageConfig takes.
    page, gaps = opened
    page.run("document.getElementById('reset').click()")
    script = (
        "(() => { const s = document.getElementById('slider-deepMean'); s.value = -0.2;"
        "s.dispatchEvent(new Event('input')); return document.getElementById('slider-mildMean').value; })()"
    )
    assert float(page.run(script)) == -0.2
    config = TriageConfig(mild_mean=-0.2, deep_mean=-0.2)
    assert_equal(outcome(page), cases.what_if(gaps, config, 2.0))


def test_the_segment_map_is_read_by_keys(opened):
    # Prevents: a map whose values only a pointer can read.
    page, gaps = opened
    page.run("document.getElementById('reset').click()")
    page.run("document.getElementById('segment-map').focus()")
    page.press("ArrowDown")
    page.press("ArrowRight")
    row = int(gaps.gate.segments.rows.offsets[1])
    num = int(gaps.gate.num_valid[row])
    text = page.run("document.getElementById('segment-read').textContent")
    assert text.startswith("response 1, step 0, tokens 0 to 63") == (
        gaps.gate.segments.rows.offsets[2] - row == 1
    )
    assert f"{num} tokens in the loss" in text


def test_nothing_is_requested_and_nothing_fails(opened, tmp_path):
    # Prevents: a call home; an exception that leaves half of the page empty.
    page, _ = opened
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
    assert page.errors == []
    page.screenshot(tmp_path / "light.png")
    page.emulate_dark()
    page.screenshot(tmp_path / "dark.png")
    light, dark = ((tmp_path / f"{name}.png").read_bytes() for name in ("light", "dark"))
    assert light.startswith(b"\x89PNG")
    assert light != dark
    blank = (
        "[...document.querySelectorAll('canvas')].filter(c => c.offsetParent !== null && "
        "new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size < 4)"
        ".map(c => c.id)"
    )
    assert page.run(blank) == []
