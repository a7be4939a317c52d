"""The picture of README: it needs nothing from elsewhere, and shows what the commands print today."""

from __future__ import annotations

import html
import re

import pytest

from scripts.terminal_picture import PICTURE, SUGGEST, VERIFY, draw, record


def lines_of(picture: str) -> list[str]:
    """The text of a picture, one line for each height, its numbers blanked."""
    rows: dict[float, str] = {}
    for attributes, text in re.findall(r"<text ([^>]*)>(.*?)</text>", picture):
        (height,) = re.findall(r'\by="([\d.]+)"', attributes)
        rows[float(height)] = rows.get(float(height), "") + html.unescape(text).replace("\xa0", " ")
    return [re.sub(r"\d[\d.]*(?:e[+-]\d+)?", "0", rows[height]).rstrip() for height in sorted(rows)]


def test_it_is_a_terminal_with_the_text_that_was_printed() -> None:
    picture = draw([("porting load", "\x1b[31mred\x1b[0m & <plain>\n"), ("true", "")])
    assert lines_of(picture) == ["$ porting load", "red & <plain>", "$ true"]
    assert picture.startswith("<svg ")


def test_the_picture_in_the_repository_fetches_nothing() -> None:
    picture = PICTURE.read_text(encoding="utf-8")
    assert re.findall(r"(?:https?:)?//[\w.]+", picture) == ["http://www.w3.org"]
    shown = lines_of(picture)
    assert f"$ {SUGGEST}" in shown
    assert f"$ {VERIFY}" in shown


@pytest.mark.slow
@pytest.mark.timeout(300)  # suggest and verify, each a process of its own
def test_the_commands_still_print_what_it_shows() -> None:
    now, shown = (lines_of(picture) for picture in (draw(record()), PICTURE.read_text(encoding="utf-8")))
    assert now == shown
