"""The catalogue is complete, documented, and the page is what it says."""

from __future__ import annotations

from collections import Counter

from porting.causes.catalogue import CATALOGUE, ROUNDING
from scripts.causes import PAGE
from scripts.causes_page import page


def test_there_are_many_and_each_has_its_own_name() -> None:
    assert len(CATALOGUE) >= 40
    assert [name for name, count in Counter(cause.name for cause in CATALOGUE).items() if count > 1] == []


def test_each_says_what_it_is_how_it_looks_and_what_to_do() -> None:
    for cause in CATALOGUE:
        assert all(
            len(text) > 3 and text.strip(" .") == text for text in (cause.name, cause.what, cause.looks, cause.fix)
        )


def test_causes_of_rounding_are_marked() -> None:
    assert {cause.name for cause in ROUNDING} >= {"mask precedence", "half-precision linear layer", "bfloat16 softmax"}


def test_the_page_is_what_the_catalogue_gives() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m scripts.causes --write"
