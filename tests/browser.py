"""A real browser for tests of pages: the Chromium that is on the machine, driven without a window."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

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
