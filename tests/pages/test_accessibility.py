"""The pages against WCAG 2.2 AA, in Chromium's accessibility tree: three widths, light and dark, keys alone."""

from __future__ import annotations

import pytest

import porting
from porting.answers import Guess
from porting.causes.finding import Finding
from porting.seeing import Classification
from porting.tracing.measure import ErrorProfile
from porting.verification import Probe, Report, View
from tests.browser import accessibility_faults, opened
from tests.reporting.test_report import small


def report() -> Report:
    """A report in which one module is at fault, one rounds worse and one passes the difference on."""
    spreads = tuple(
        ErrorProfile(case=case, shape=(2, 3, 4), positions=((1e-3,) * 3,) * 2, channels=(1e-3,) * 4) for case in (0, 1)
    )
    views = {
        "layers.0.norm": (View(end_to_end=1e-15, isolated=1e-15), View(end_to_end=9.0, isolated=9.0)),
        "layers.0.up": (View(end_to_end=1e-3, isolated=1e-3), View(end_to_end=50.0, isolated=50.0)),
        "layers.1.up": (View(end_to_end=1e-3, isolated=1e-15), View(end_to_end=50.0, isolated=1.0)),
    }
    probes = tuple(
        Probe(
            reference=f"model.{name}",
            port=name,
            meaning=meaning,
            rounding={"float32": rounding},
            count=10_000,
            spreads=spreads,
        )
        for name, (meaning, rounding) in views.items()
    )
    cause = Finding(
        probes=("layers.0.up",), difference=1e-3, residual=0.0, name="wrong GELU", what="it is", fix="F.gelu(x)"
    )
    return small(probes=probes, causes=(cause,), warnings=("something is worth knowing",), call="porting verify")


def pages() -> dict[str, str]:
    seen = porting.attention("Return the name of the file.")
    guesses = tuple(Guess(token=name, probability=share) for name, share in (("good", 0.9), ("bad", 0.1)))
    answer = Classification(words=(), model="a model", guesses=guesses, logits=(2.0, 0.0), attention=seen)
    return {
        "report": report().to_html(),
        "attention": seen.to_html(layer=1, head=2),
        "classification": answer.to_html(),
        "masks": porting.fill_mask("Return the [MASK] of the [MASK].").to_html(),
    }


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return pages()


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("width", "dark"), [(1280, False), (320, True), (768, True), (320, False), (768, False), (1280, True)]
)
@pytest.mark.parametrize("name", ["report", "attention", "classification", "masks"])
def test_a_page_has_no_fault(made: dict[str, str], name: str, width: int, dark: bool) -> None:
    with opened(width=width, dark=dark) as page:
        page.set_content(made[name])
        assert accessibility_faults(page) == []


def test_every_cell_of_a_report_says_its_state(made: dict[str, str]) -> None:
    with opened() as page:
        page.set_content(made["report"])
        names = page.locator("#heat button").evaluate_all("all => all.map((one) => one.getAttribute('aria-label'))")
        assert names == [
            "layer 0, norm: 1e-15, rounds worse itself",
            "layer 0, up: 1e-3, above its bound, at fault itself",
            "layer 1, up: 1e-15",
        ]


def test_the_checks_see_what_they_are_for() -> None:
    broken = """<main><h1 style="color: #999">faint</h1><h3>skipped</h3><table><tr><td>a</td></tr></table>
    <button style="outline: none"></button><img src="data:," alt="x"><img src="data:," alt="x">
    <div style="width: 5000px">wide</div></main>"""
    with opened() as page:
        page.set_content(f"<html lang=en><body style='background: #fff'>{broken}</body></html>")
        found = " ".join(accessibility_faults(page))
    for fault in (
        "contrast 2.8",
        "a button has no name",
        "levels of the headings are [1, 3]",
        "scrolls sideways",
        "2 images",
        "no focus",
    ):
        assert fault in found, (fault, found)
