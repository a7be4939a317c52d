from __future__ import annotations

import re

from scripts.security_page import PAGE, cell, written
from tests.guards.tree import ROOT

SECURITY = ROOT / "docs" / "security.md"


def test_the_list_on_the_page_is_the_list_of_the_tests() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "run `python -m scripts.security_page`"


PROMISE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_each_promise_names_a_test_that_exists() -> None:
    page = SECURITY.read_text(encoding="utf-8")
    promised, _, _ = page.partition("## What is not promised")
    promises = re.split(r"\n(?=[0-9]+\. )", promised)[1:]
    assert len(promises) >= 12
    for promise in promises:
        named = PROMISE.findall(" ".join(promise.split()))
        assert named, promise
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"


def test_the_promises_take_about_a_page() -> None:
    assert len(SECURITY.read_text(encoding="utf-8").split()) < 1000


def test_a_cell_stays_in_its_column() -> None:
    assert cell("a|b <i> *c* d_e") == "a\\|b &lt;i> \\*c\\* d\\_e"
