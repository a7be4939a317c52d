"""The notebooks run from their first cell to their last, and what they show is what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from scripts.run_notebooks import FOLDER, executed, tidied
from tests.guards.tree import ROOT

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

# What differs from run to run and from machine to machine: the last digits.
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")


def outputs(notebook: Any) -> list[str]:  # nbformat's nodes have no types
    """What the cells show, as text, numbers left out."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            text = output.get("text") or data.get("text/html") or data.get("text/plain")
            found.append(NUMBER.sub("0", text))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_shows_what_is_kept_in_it(path: Path, tmp_path: Path) -> None:
    kept = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]  # nbformat types none of its functions
    run = executed(path, tmp_path)
    assert outputs(run) == outputs(kept)
    streams = {output.name for cell in run.cells for output in cell.get("outputs", ()) if "name" in output}
    assert streams == {"stdout"}  # no warning


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_tidy(path: Path) -> None:
    kept = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]  # as above
    nbformat.validate(kept)
    assert tidied(nbformat.read(path, as_version=4)) == kept  # type: ignore[no-untyped-call]  # as above
    cells = [cell for cell in kept.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert path.stat().st_size < 100_000
    for folder in (str(ROOT), str(Path.home())):
        assert f"{folder}/" not in path.read_text(encoding="utf-8")


def test_the_planted_bug_is_named() -> None:
    """What the reader is promised: allclose sees nothing, the report names the module and the mistake."""
    shown = "\n".join(
        output.get("text") or output["data"].get("text/html", "")
        for cell in nbformat.read(FOLDER / "your_own_bert.ipynb", as_version=4).cells  # type: ignore[no-untyped-call]  # as above
        for output in cell.get("outputs", ())
    )
    assert shown.count('class="porting-part"') == 3  # the plan and two reports
    assert "<pre" not in shown
    assert "allclose says: True" in shown
    assert "FAITHFUL" in shown
    assert "DIFFERENT" in shown
    assert "first wrong module: blocks.1.gelu" in shown
    assert "cause: tanh GELU" in shown
    assert "the same bytes: True" in shown
