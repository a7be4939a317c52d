"""The report as a page: what it shows, that a reader can use it, and that nothing in it can do harm."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Page

from porting.loading import load
from porting.models.bert_heads import BertForPreTraining
from porting.reporting.outcome import Unseen
from porting.tracing.measure import ErrorProfile
from porting.verification import Probe, Report, View, verify
from tests.browser import CONTRASTS, opened
from tests.reporting.test_report import small
from tests.verification.planted import BUGS, ROUNDS_WORSE, Bug

HOSTILE = (
    "</td><script>document.body.dataset.ran = 'yes'</script>\"'><img src=x onerror=alert(1)>\u202egnp\x1b[2J $x^2$ 层"
)
SEEN = HOSTILE.replace("\u202e", "\\u202e").replace("\x1b", "\\x1b")


def with_bug(checkpoint: Path, bug: Bug) -> Report:
    model = load(checkpoint)
    assert isinstance(model, BertForPreTraining)
    bug.plant(model)
    return verify(checkpoint, model, loaded=True, dtypes=(torch.float32, torch.bfloat16))


@pytest.fixture(scope="module")
def guilty(checkpoint: Path) -> Report:
    return with_bug(checkpoint, next(bug for bug in BUGS if bug.name == "tanh GELU"))


@pytest.fixture(scope="module")
def page(guilty: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return guilty.save_html(tmp_path_factory.mktemp("page") / "report.html")


@contextmanager
def shown(page: Path, **window: int) -> Iterator[Page]:
    with opened(dark="dark" in window, width=window.get("width", 1280)) as browser:
        browser.goto(page.as_uri())
        yield browser


def test_the_verdict_and_the_culprit_come_first(guilty: Report, page: Path) -> None:
    with shown(page) as browser:
        assert browser.title() == "DIFFERENT: porting.models.bert_heads.BertForPreTraining"
        assert browser.inner_text("h1") == "DIFFERENT"
        assert "does not compute what transformers.BertForPreTraining computes" in browser.inner_text("header")
        assert "first wrong module: bert.layers.1.activation" in browser.inner_text("section >> nth=0")
        assert browser.locator("article:visible").count() == 1
        assert "bert.layers.1.activation" in browser.inner_text("article:visible")
        assert "at fault" in browser.inner_text("article:visible")
        (cause,) = guilty.causes
        assert f"cause: {cause.name} ({cause.detail})" in browser.inner_text("article:visible")
        assert f"cause: {cause.name} ({cause.detail}), explains all but" in browser.inner_text(".cause")
        assert f"fix: {cause.fix}" in browser.inner_text(".cause")
        assert "seed" in browser.inner_text(".facts")
        assert guilty.environment["torch"] in browser.inner_text(".facts")
        assert browser.inner_text("pre") == f"porting.verify({guilty.source!r}, {CALLED}"


CALLED = "porting.models.bert_heads.BertForPreTraining(...), dtypes=(torch.float32, torch.bfloat16), loaded=True)"


@pytest.mark.slow
def test_a_click_on_a_cell_shows_its_details(guilty: Report, page: Path) -> None:
    with shown(page) as browser:
        cell = browser.get_by_role("button", name="layer 2, attention.key")
        assert cell.get_attribute("aria-expanded") == "false"
        cell.click()
        assert cell.get_attribute("aria-expanded") == "true"
        assert browser.locator("#heat [aria-expanded=true]").count() == 1
        details = browser.inner_text("article:visible")
        probe = next(probe for probe in guilty.probes if probe.port == "bert.layers.2.attention.key")
        assert probe.reference in details
        assert "what is off comes from before" in details
        assert "code run since the last matching probe: bert.layers.2.attention.key" in details
        assert f"{probe.count:,} numbers were compared" in details
        assert f"{probe.rounding['float32'].end_to_end:.0f}\N{MULTIPLICATION SIGN}" in details


@pytest.mark.slow
def test_it_can_be_read_with_the_keyboard_alone(guilty: Report, page: Path) -> None:
    with shown(page) as browser:
        browser.focus("input[name=view]:checked")
        browser.keyboard.press("Tab")  # one stop for the whole map: the cell that is open
        focused = "document.activeElement.getAttribute('aria-label')"
        assert browser.evaluate(focused).startswith("layer 1, activation: ")
        for key in ("ArrowDown", "ArrowLeft", "Enter"):
            browser.keyboard.press(key)
        assert browser.evaluate(focused).startswith("layer 2, intermediate: ")
        assert "bert.layers.2.intermediate" in browser.inner_text("article:visible")
        browser.keyboard.press("ArrowUp")
        browser.keyboard.press("ArrowUp")
        browser.keyboard.press("ArrowUp")  # the embeddings have no such cell: it stays
        browser.keyboard.press("Space")
        assert "bert.layers.0.intermediate" in browser.inner_text("article:visible")


@pytest.mark.slow
def test_the_switches_change_the_numbers(guilty: Report, page: Path) -> None:
    (probe,) = guilty.guilty
    with shown(page) as browser:
        cell = browser.get_by_role("button", name="layer 1, activation")
        assert float(cell.inner_text()) == pytest.approx(probe.meaning.isolated, rel=0.5)
        browser.get_by_label("float32: rounding").check()
        assert cell.inner_text() == f"{probe.rounding['float32'].isolated:.0f}"
        browser.get_by_role("radio", name="end to end").check()
        assert cell.inner_text() == f"{probe.rounding['float32'].end_to_end:.0f}"
        name = cell.get_attribute("aria-label")
        assert name == f"layer 1, activation: {cell.inner_text()}, above its bound, at fault itself"
        later = browser.get_by_role("button", name="layer 2, output")
        assert "above its bound" in (later.get_attribute("aria-label") or "")
        browser.get_by_label("isolated", exact=True).check()
        assert "above its bound" not in (later.get_attribute("aria-label") or "")
        assert [cell.get_attribute("aria-label") for cell in browser.locator("#heat .guilty").all()] == [
            f"layer 1, activation: {cell.inner_text()}, above its bound, at fault itself"
        ]


@pytest.mark.slow
@pytest.mark.parametrize("window", [{"width": 375}, {"width": 375, "dark": 1}, {"width": 1280, "dark": 1}])
def test_it_fits_a_phone_and_reads_well_in_the_dark(window: dict[str, int], tmp_path: Path) -> None:
    """The names are long and the numbers of every level are there; WCAG 2.1 asks for a contrast of 4.5."""
    probes = [
        Probe(
            reference=f"model.{number}.{'very_long_name_' * 5}",
            port=f"layers.{number}.{'very_long_name_' * 5}",
            meaning=View(end_to_end=size, isolated=size),
            rounding={"float32": View(end_to_end=size * 1e12, isolated=1.0)},
            count=1000,
            span=("layers." + "x" * 80,),
        )
        for number, size in enumerate((1e-16, 4e-13, 9e-13, 5e-12, 5e-10, 5e-8, 5e-3, math.inf))
    ]
    unseen = (Unseen("the mask", "none is given"),)
    report = small(probes=tuple(probes), call="porting verify " + "x" * 90, unseen=unseen, warnings=("w" * 90,))
    with shown(report.save_html(tmp_path / "report.html"), **window) as browser:
        assert browser.evaluate("document.documentElement.scrollWidth") == window["width"]
        assert len({cell.get_attribute("class") for cell in browser.locator("#heat button").all()}) >= 7
        assert browser.evaluate(CONTRASTS) == []
        assert browser.evaluate("getComputedStyle(document.querySelector('svg text')).fill") == browser.evaluate(
            "getComputedStyle(document.body).color"
        )


CLIPPED = """() => [...document.querySelectorAll("article")].filter((one) => {
  one.hidden = false;
  return one.scrollWidth > one.clientWidth;
}).length"""


@pytest.mark.slow
@pytest.mark.parametrize("columns", [1, 4, 7])
def test_details_are_whole_beside_maps_of_all_widths(columns: int, tmp_path: Path) -> None:
    view = View(end_to_end=12.3, isolated=12.3)
    probes = [
        Probe(
            reference=f"layers.0.{name}",
            port=f"layers.0.{name}",
            meaning=View(end_to_end=1.2e-5, isolated=4.4e-6),
            rounding={"float32": view, "bfloat16": view},
            count=1000,
        )
        for name in "abcdefg"[:columns]
    ]
    page = small(probes=tuple(probes), noise={"float32": 1e-6, "bfloat16": 1e-2}).save_html(tmp_path / "report.html")
    with shown(page) as browser:
        for width in range(360, 1281, 40):
            browser.set_viewport_size({"width": width, "height": 900})
            assert browser.evaluate(CLIPPED) == 0, width


@pytest.mark.slow
def test_what_is_in_a_name_can_do_nothing(tmp_path: Path) -> None:
    probe = Probe(
        reference=HOSTILE,
        port=HOSTILE,
        meaning=View(end_to_end=1.0, isolated=1.0),
        span=(HOSTILE,),
        lowered=(HOSTILE,),
        spreads=(ErrorProfile(case=0, shape=(1, 2, 3), positions=((0.0, 1.0),), channels=(1.0, math.inf, 0.0)),),
    )
    fields = dict.fromkeys(("source", "reference", "port", "table", "call"), HOSTILE)
    lists = dict.fromkeys(("skipped", "cases", "warnings"), (HOSTILE,))
    report = small(probes=(probe,), noise={}, unseen=(Unseen(HOSTILE, HOSTILE),), **fields, **lists)
    report = dataclasses.replace(
        report,
        environment={HOSTILE: HOSTILE},
        shown=dataclasses.replace(report.shown, copy=(HOSTILE,), nothing=(HOSTILE,), differing=(HOSTILE,)),
    )
    with shown(report.save_html(tmp_path / "report.html")) as browser:
        assert browser.get_attribute("body", "data-ran") is None
        assert browser.locator("main script, main img").count() == 0
        assert browser.inner_text("article h3") == SEEN
        assert browser.inner_text("pre") == SEEN
        assert SEEN[-25:] in browser.inner_html("svg >> nth=0").replace("&lt;", "<").replace("&gt;", ">")
        found = browser.content()
        assert "\u202e" not in found
        assert "\x1b" not in found
        browser.set_content(f"<p id='here'>{report._repr_html_()}</p>")
        assert browser.get_attribute("body", "data-ran") is None
        assert browser.locator("script, img").count() == 0


@pytest.mark.slow
def test_it_is_one_small_file_that_needs_nothing(guilty: Report, page: Path) -> None:
    text = page.read_text()
    assert text == guilty.to_html()
    addresses = {one for one in re.findall(r"https?://[^\s\"'<>]+", text) if "www.w3.org" not in one}
    assert addresses == set()
    assert re.findall(r"(?:src|href)=\"(?!#|data:image/png)[^\"]*", text) == []
    names = ("query", "key", "value", "core -> scores", "core -> probabilities", "core -> 0", "norm", "activation", "")
    probes = [
        dataclasses.replace(guilty.probes[1], port=f"bert.layers.{layer}.{name}".rstrip("."))
        for layer in range(24)
        for name in names
    ]
    guilty_ones = [dataclasses.replace(guilty.guilty[0], port=f"bert.layers.{layer}.x") for layer in range(24)]
    assert len(dataclasses.replace(guilty, probes=(*probes, *guilty_ones)).to_html()) < 500_000


@pytest.mark.slow
def test_every_verdict_has_its_page(checkpoint: Path, tmp_path: Path) -> None:
    imprecise = with_bug(checkpoint, ROUNDS_WORSE)
    with shown(imprecise.save_html(tmp_path / "imprecise.html")) as browser:
        assert browser.inner_text("h1") == "IMPRECISE"
        assert browser.is_checked("input[value=bfloat16]") or browser.is_checked("input[value=float32]")
        assert browser.locator("#heat .imprecise").count() == len(imprecise.imprecise)
        browser.goto(verify(checkpoint, dtypes=()).save_html(tmp_path / "faithful.html").as_uri())
        assert browser.inner_text("h1") == "FAITHFUL"
        assert browser.locator("article:visible").count() == 0
        browser.goto(small(probes=(), noise={}).save_html(tmp_path / "empty.html").as_uri())
        assert browser.inner_text("h1") == "FAITHFUL"


@pytest.mark.slow
def test_it_is_the_page_that_is_printed(guilty: Report, page: Path) -> None:
    with shown(page) as browser:
        browser.emulate_media(media="print")
        assert not browser.is_visible("#switches")
        assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert len(browser.pdf()) > 10_000


def test_a_notebook_shows_the_verdict_and_a_row_for_each_layer(guilty: Report) -> None:
    with opened(width=900) as browser:
        outside = "<table id='other'><tr><th>other</th></tr></table><code id='code'>x</code>"
        style = "el => JSON.stringify(Object.fromEntries(Object.entries(getComputedStyle(el))))"
        browser.set_content(outside)
        before = [browser.eval_on_selector(one, style) for one in ("#other th", "#code")]
        browser.set_content(f"<div style='color: #ddd; background: #111'>{guilty._repr_html_()}</div>{outside}")
        after = [browser.eval_on_selector(one, style) for one in ("#other th", "#code")]
        assert [re.sub(r'"\d[^"]*"', "", one) for one in before] == [re.sub(r'"\d[^"]*"', "", one) for one in after]
        rows = [" ".join(row.split()) for row in browser.inner_text(".porting-part table").splitlines()]
        assert any(row.startswith("layer 1 ") and row.endswith("<- activation") for row in rows)
        assert browser.inner_text(".porting-word") == "DIFFERENT"
        assert "first wrong module: bert.layers.1.activation" in browser.inner_text(".porting-part")
        assert browser.eval_on_selector(".porting-part td", "el => getComputedStyle(el).color") == "rgb(221, 221, 221)"
