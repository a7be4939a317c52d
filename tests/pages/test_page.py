"""One file that needs nothing beside itself, whatever is put into it."""

from __future__ import annotations

import re

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from porting.pages import page
from porting.pages.page import render_page, render_part
from tests.browser import opened

RUN = "document.body.dataset.ran = 'yes'"
HOSTILE = f'</p><script>{RUN}</script><img src=x onerror="{RUN}">\'\u202ereversed\x1b[2J\0'
FILES = {
    "base.html": page.read("base.html"),
    "style.css": page.read("style.css"),
    "plain.html": """{% extends "base.html" %}{% block title %}{{ title }}{% endblock %}
{% block main %}<p id="shown" title="{{ text }}">{{ text }}</p><b>{{ made }}</b>{% endblock %}""",
    "set.js": RUN + " // </b> < & ' \"",
}


@pytest.fixture(autouse=True)
def some_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "read", FILES.__getitem__)


def rendered(text: str = "a text", **scripts: list[str]) -> str:
    return render_page("plain.html", {"title": "Plain", "text": text, "made": Markup("<i>markup</i>")}, **scripts)


def test_a_hostile_text_is_only_text() -> None:
    with opened() as browser:
        browser.set_content(rendered(HOSTILE))
        assert browser.get_attribute("body", "data-ran") is None
        assert browser.locator("script, img").count() == 0
        seen = HOSTILE.replace("\u202e", "\\u202e").replace("\x1b", "\\x1b").replace("\0", "\\x00")
        assert browser.inner_text("#shown") == seen
        assert browser.get_attribute("#shown", "title") == seen
        assert browser.inner_html("b") == "<i>markup</i>"


def test_only_the_scripts_of_the_page_run() -> None:
    with opened() as browser:
        browser.set_content(rendered(scripts=["set.js"]))
        assert browser.get_attribute("body", "data-ran") == "yes"
        browser.set_content(rendered())
        assert browser.get_attribute("body", "data-ran") is None


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "smuggled",
    [
        f"<script>{RUN}</script>",
        f"<img src='data:,' onerror=\"{RUN}\">",
        "<img src='https://example.org/x.png'><link rel='stylesheet' href='https://example.org/x.css'>",
        "<iframe src='https://example.org/'></iframe>",
    ],
)
def test_the_policy_stops_what_slips_through(smuggled: str) -> None:
    """Nothing runs and nothing is sent; the browser says so on its console, which `opened` takes for a failure."""
    found = render_page("plain.html", {"title": "", "text": "", "made": Markup(smuggled)})  # noqa: S704  # on purpose
    with pytest.raises(AssertionError, match="Content Security Policy"):
        open_and_see_that_nothing_runs(found)


def open_and_see_that_nothing_runs(found: str) -> None:
    with opened() as browser:
        browser.set_content(found)
        browser.wait_for_timeout(50)
        if browser.get_attribute("body", "data-ran") is not None:
            pytest.fail("it ran")


def test_a_page_is_one_file_without_addresses() -> None:
    found = rendered(scripts=["set.js"])
    assert re.findall(r"(?:src|href)=|url\(|@import|https?:", found) == []
    assert found == rendered(scripts=["set.js"])


def test_what_a_template_names_and_nobody_gave_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'text' is undefined"):
        render_page("plain.html", {"title": "Plain"})


def test_a_part_is_escaped_as_a_page_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILES, "part.html", "<b>{{ text }}</b>")
    assert render_part("part.html", {"text": "<i>\u202e"}) == "<b>&lt;i&gt;\\u202e</b>"


@pytest.mark.few(1)
@pytest.mark.parametrize("dark", [False, True])
def test_ink_and_paper_follow_the_reader(dark: bool) -> None:
    with opened(dark=dark, width=375) as browser:
        browser.set_content(rendered("a_name_without_any_place_to_break_it" * 9))
        light = browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert light is not dark
        assert browser.evaluate("document.documentElement.scrollWidth") == 375
