"""The documentation site: every public name has its entry, every page its place, and links lead into the site."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from mkdocs.config import load_config

import porting
from scripts.docs_site import DOCS, LINK, PAGES, ROOT, cause_pages, led, respelled


def test_the_reference_has_every_public_name_once() -> None:
    listed = re.findall(r"^::: porting[.](\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(porting.__all__)


def pages(nav: object) -> list[str]:
    match nav:
        case str():
            return [nav]
        case dict():
            return [page for value in nav.values() for page in pages(value)]
        case list():
            return [page for value in nav for page in pages(value)]
    return []


def test_every_page_has_its_place_and_nothing_is_fetched_from_elsewhere() -> None:
    config = load_config(str(ROOT / "mkdocs.yml"))
    assert sorted(pages(config.nav)) == sorted([*(path.name for path in DOCS.glob("*.md")), *PAGES.values()])
    assert config.theme["font"] is False
    assert [str(one) for one in (*config.extra_javascript, *config.extra_css) if "//" in str(one)] == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_from_outside_leads_into_the_site(name: str) -> None:
    known = {*PAGES.values(), *(path.name for path in DOCS.iterdir())}
    text = led(ROOT / name)
    for found in LINK.finditer(text):
        path = found["path"].removeprefix("source/")
        assert path in known or (path != found["path"] and (ROOT / path).is_file()), found[0]
    if name == "README.md":
        assert "](notation.md)" in text
        assert 'src="attention.png"' in text
        assert "](source/notebooks/your_own_bert.ipynb)" in text


def test_every_cause_of_the_catalogue_has_a_page_of_its_own() -> None:
    catalogue = (DOCS / "causes.md").read_text(encoding="utf-8")
    pages = cause_pages(catalogue)
    assert len(pages) == len(re.findall(r"[*]Fix:[*]", catalogue)) > 100
    (entry,) = re.findall(r"^- [*]{2}LayerNorm eps[*]{2}: (.*)$", catalogue, re.MULTILINE)
    what, looks, fix = re.split(r"[.] [*](?:Looks|Fix):[*] ", entry)
    page = pages["causes/layernorm-eps.md"]
    assert page.startswith(f"# LayerNorm eps\n\n**What.** {what[0].upper()}{what[1:]}.\n\n")
    assert f"\n\n**How it looks.** {looks[0].upper()}{looks[1:]}.\n\n**Fix.** {fix}\n\n" in page
    assert "[Norms](../causes.md#norms)" in page


def test_docstrings_are_respelled() -> None:
    text = """Do :func:`~porting.load` it.

Args:
    source, target: names
        and shapes.
    table: as of :class:`Table`.

>>> load()[0]
1
"""
    expected = """Do `porting.load` it.

Args:
    source: names
        and shapes.
    target: names
        and shapes.
    table: as of `Table`.

```pycon
>>> load()[0]
1
```"""
    assert respelled(text) == expected


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_finds_every_name(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir"]
    run = subprocess.run([*build, str(tmp_path / "site")], cwd=ROOT, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    index = (tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8")
    assert all(f"porting.{name}" in index for name in porting.__all__)
    assert "source, target" not in (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
