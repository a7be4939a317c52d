"""A real browser for tests of pages: the Chromium that is on the machine, driven without a window."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = ("--no-sandbox", "--disable-quic", "--disable-background-networking", "--disable-component-update")


@contextmanager
def opened(*, dark: bool = False, width: int = 1280, height: int = 900) -> Iterator[Page]:
    """An empty page; a console error or an uncaught exception in it fails the test, and so does a request to a network.

    Args:
        dark: whether the reader prefers dark colours.
        width, height: of the window, in CSS pixels.
    """
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        words = "no Chromium on this machine: install your system's package 'chromium'"
        if os.environ.get("CI"):
            pytest.fail(words)
        pytest.skip(words)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        context = browser.new_context(
            color_scheme="dark" if dark else "light", viewport={"width": width, "height": height}, offline=True
        )
        page = context.new_page()
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith(("file:", "data:", "about:")) else complaints.append(request.url)
            ),
        )
        try:
            yield page
        finally:
            browser.close()
        assert not complaints, complaints


CONTRASTS = """() => {
  const parts = (text) => {
    const found = text.match(/[\\d.]+(?:e-?\\d+)?/g).slice(0, 4).map(Number);
    const [r, g, b] = text.startsWith("rgb") ? found.slice(0, 3).map((v) => v / 255) : found;
    return [r, g, b, found[3] ?? 1];
  };
  const light = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (one) => {
    const colour = parts(getComputedStyle(one).backgroundColor);
    return colour[3] === 0 && one.parentElement ? ground(one.parentElement) : colour;
  };
  const low = [];
  for (const one of document.querySelectorAll("main *")) {
    const text = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!text || !one.checkVisibility() || one.closest("svg")) continue;
    const style = getComputedStyle(one);
    const [a, b] = [light(parts(style.color)), light(ground(one))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) low.push(`contrast ${ratio.toFixed(2)}: ${one.outerHTML.slice(0, 120)}`);
  }
  return low;
}"""
"""Texts whose contrast with what is behind them is below WCAG 2.2 AA: 4.5 to 1, 3 to 1 for large text."""

NAMED = {"article", "button", "checkbox", "image", "link", "radio", "region", "table"}
"""Roles that a screen reader announces by name."""


def accessibility_faults(page: Page) -> list[str]:
    """What WCAG 2.2 AA asks and the page as it is shown does not have, from the browser's own accessibility tree.

    Controls, pictures, tables and regions have names, no two tables or pictures the same one; every table has headers,
    whose names differ; headings skip no level; text has contrast; the page scrolls in one direction; every control that
    Tab reaches shows that it has the focus.
    """
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    children = {node["nodeId"]: node.get("childIds", []) for node in nodes}
    seen = {node["nodeId"]: node for node in nodes if not node.get("ignored")}

    def role(node: dict[str, Any]) -> str:
        return str(node.get("role", {}).get("value", ""))

    def name(node: dict[str, Any]) -> str:
        return str(node.get("name", {}).get("value", "")).strip()

    def within(number: str) -> Iterator[dict[str, Any]]:
        for child in children[number]:
            if child in seen:
                yield seen[child]
            yield from within(child) if child in children else ()

    def called(kind: str) -> list[str]:
        return [name(node) for node in seen.values() if role(node) == kind]

    faults = list(page.evaluate(CONTRASTS))
    faults += [f"a {kind} has no name" for kind in sorted(NAMED) for one in called(kind) if not one]
    for kind in ("table", "image"):
        faults += [f"{count} {kind}s are called {one!r}" for one, count in Counter(called(kind)).items() if count > 1]
    for number, node in seen.items():
        if role(node) == "table":
            inside = list(within(number))
            columns = [name(one) for one in inside if role(one) == "columnheader"]
            rows = [name(one) for one in inside if role(one) == "rowheader"]
            faults += [] if columns or rows else [f"the table {name(node)!r} has no headers"]
            faults += [f"a header of the table {name(node)!r} is empty" for one in columns + rows if not one]
            twice = [one for one, count in Counter(columns).items() if count > 1]
            faults += [f"two columns of {name(node)!r} are called {one!r}" for one in twice]
    levels = [int(one) for one in page.locator("h1:visible, h2:visible, h3:visible").evaluate_all(HEADINGS)]
    if levels.count(1) != 1 or any(later > before + 1 for before, later in pairwise([0, *levels])):
        faults.append(f"the levels of the headings are {levels}")
    if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
        faults.append("the page scrolls sideways")
    return faults + _unfocused(page)


def _unfocused(page: Page) -> list[str]:
    """The first controls that Tab reaches and that do not show it."""
    faults: list[str] = []
    page.evaluate("document.body.tabIndex = -1; document.body.focus()")
    for _ in range(12):
        page.keyboard.press("Tab")
        faults += page.evaluate(UNFOCUSED)
    return faults


HEADINGS = "all => all.map((one) => one.tagName[1])"
UNFOCUSED = """() => {
  const one = document.activeElement;
  const style = getComputedStyle(one);
  if (one.matches("html, body") || (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2)) return [];
  return [`no focus is seen on ${one.outerHTML.slice(0, 90)}`];
}"""
