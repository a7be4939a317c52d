"""A streamed report as a page and in a notebook: nothing that a report in memory has is missing but what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from porting.reporting.heatmap import heat_map
from porting.verification import Report, verify
from tests.browser import opened
from tests.small_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return verify(write_checkpoint(tmp_path_factory.mktemp("streamed") / "bert"), stream=True)


def test_the_page_opens_with_every_part(streamed: Report, tmp_path: Path) -> None:
    page = streamed.save_html(tmp_path / "report.html")
    with opened() as browser:
        browser.goto(page.as_uri())
        assert browser.inner_text("h1") == "FAITHFUL"
        assert [one.inner_text() for one in browser.query_selector_all("h2")] == [
            "Layers by probes", "How the error grows", "What the inputs could see", "How it was found",
        ]  # fmt: skip
        assert browser.locator("#heat button").count() == len(streamed.probes)
        assert browser.locator("figure svg").count() == 1
        seen = browser.inner_text("section[aria-labelledby=seen]")
        assert "which weights reach a probe (a streamed run does not measure it)" in seen
        assert "if output_attentions:" in seen
        assert "stream=True" in browser.inner_text("pre")
        browser.get_by_role("button", name="layer 2, attention.key").click()
        assert "bert.layers.2.attention.key" in browser.inner_text("article:visible")


def test_columns_stand_in_the_order_of_execution(streamed: Report, tmp_path: Path) -> None:
    columns = list(heat_map(streamed).columns)
    layer = [probe.port.removeprefix("bert.layers.1.") for probe in streamed.probes if ".layers.1." in probe.port]
    assert columns == [*(".output" if one == "output" else one for one in layer), "output"]
    assert layer[:3] == ["attention.query", "attention.key", "attention.value"]
    with opened() as browser:
        browser.goto(streamed.save_html(tmp_path / "report.html").as_uri())
        assert [one.inner_text() for one in browser.query_selector_all("#heat th[scope=col]")] == columns


def test_a_notebook_shows_it(streamed: Report) -> None:
    shown = streamed._repr_html_()
    assert "FAITHFUL" in shown
    assert all(f"layer {number}" in shown for number in range(3))
    assert "which weights reach a probe" in shown
