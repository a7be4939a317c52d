"""The documents say what is so."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from porting.errors import Code
from tests.guards.tree import ROOT, files

ERRORS = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", ERRORS, re.MULTILINE)  # (title, text)
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = re.findall(r"^([a-z][\w-]*):(?!=)", MAKEFILE, re.MULTILINE)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_code_is_documented_and_every_documented_code_exists() -> None:
    assert sorted(title for title, _ in SECTIONS) == sorted(code.value for code in Code)


def test_every_code_is_explained() -> None:
    """What it means, why it is an error, how it looks, how to mend it: in this order."""
    parts = {title: re.findall(r"\*\*(What|Why|Example|Fix)\b", text) for title, text in SECTIONS}
    complete = ["What", "Why", "Example", "Fix"]
    assert {title: found for title, found in parts.items() if found != complete} == {}


def test_the_first_example_of_the_readme_has_five_lines() -> None:
    """``tests/test_readme.py`` runs it."""
    (first, *_) = re.findall(r"^```python\n(.*?)^```", read("README.md"), re.MULTILINE | re.DOTALL)
    assert len([line for line in first.splitlines() if line.strip()]) == 5


def test_the_changelog_has_a_section_for_what_is_there_now() -> None:
    version = tomllib.loads(read("pyproject.toml"))["project"]["version"]
    headings = re.findall(r"^## \[(.+?)\]", read("CHANGELOG.md"), re.MULTILINE)
    assert headings
    assert headings[0] in {"Unreleased", version}


def test_make_help_lists_every_target() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout  # noqa: S607 - whichever make the user has
    assert re.findall(r"^  make ([\w-]+) +\S", shown, re.MULTILINE) == TARGETS
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony.split() == TARGETS


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "help"])
def test_every_target_is_used_by_ci_or_told_to_contributors(target: str) -> None:
    assert re.search(rf"\bmake {target}\b", read(".ci/run") + read("CONTRIBUTING.md"))


def test_ci_runs_every_check() -> None:
    called = re.findall(r"^make ([\w-]+)", read(".ci/run"), re.MULTILINE)
    assert called == ["test", "test-slow", "lint", "types", "docs", "verify", "wheel", "sbom", "audit"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_no_file_names_a_place_that_only_one_machine_has() -> None:
    """No absolute path of a checkout or a home, and no address of a package index: installers know theirs."""
    here = [rf"(?<![\w.]){re.escape(str(folder))}/" for folder in (ROOT, Path.home()) if folder.name]
    index = [r"--(?:extra-)?index-url[ =]", r"--find-links[ =]", r"pypi[.]org", r"pythonhosted[.]org"]
    pattern = re.compile("|".join([*here, *index]))
    texts = list(files("porting", "models", "mappings", "tests", "scripts", "docs", "notebooks", ".ci", ".github"))
    texts += [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    wrong = [
        f"{path.relative_to(ROOT)}: {found.group()}"
        for path in texts
        if (found := pattern.search(path.read_text(encoding="utf-8", errors="ignore")))
    ]
    assert wrong == []


def test_the_figures_of_suggest_are_the_sums_of_all_draws() -> None:
    """``docs/suggest.md`` sums up the rows of ``docs/measured.md``, one for each draw."""
    row = r"^\| \d+ \| 2026-\S+ \w+ \| (\d+) \| \d+ \|[^|]*\| (\d+) \| \*\*(\d+)\*\*"
    rows = re.findall(row, read("docs/measured.md"), re.MULTILINE)
    page = read("docs/suggest.md")
    for some, name in ((rows[-3:], f"the last three of {len(rows)} draws"), (rows, f"all {len(rows)} draws")):
        models, right, false = (sum(map(int, column)) for column in zip(*some, strict=True))
        share = f"{right / models * 100:.0f} %"
        assert re.search(rf"first contact, {name}[^|]*\| {models} \| {right} \({share}\) \| \*\*{false}\*\*", page)
