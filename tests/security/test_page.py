from __future__ import annotations

from scripts.security_page import PAGE, cell, written


def test_the_list_on_the_page_is_the_list_of_the_tests() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "run `python -m scripts.security_page`"


def test_a_cell_stays_in_its_column() -> None:
    assert cell("a|b <i> *c* d_e") == "a\\|b &lt;i> \\*c\\* d\\_e"
