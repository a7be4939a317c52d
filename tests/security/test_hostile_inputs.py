"""Every input of the list gets one line, the exit code 2, and nothing else: nothing runs, nothing is written."""

from __future__ import annotations

import ast
import resource
from pathlib import Path

import pytest

from tests.cli.conftest import Run, run
from tests.guards.tree import ROOT
from tests.hub_server import Hub, hub
from tests.security.lists import ALL, ROWS
from tests.security.network import HUB
from tests.security.proofs import PROOFS
from tests.security.rows import HubRow, Proof, Row

pytestmark = pytest.mark.few(5)

__all__ = ["hub", "run"]

MEMORY = 768 << 10
"""Kilobytes by which the process may have grown at its largest: a header may have 100 MB, and JSON takes more."""


@pytest.mark.sampled(1000)  # all: they are short
@pytest.mark.parametrize("row", ROWS, ids=[f"{row.of}: {row.what}" for row in ROWS])
@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")  # zipfile says so while the hostile file is made
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_a_hostile_input_is_told_in_a_line(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: Row) -> None:
    monkeypatch.chdir(tmp_path)
    words = row.make(tmp_path)
    before, held = listing(tmp_path), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = run(*words)
    assert listing(tmp_path) == before, "nothing is written, and nothing ran"
    assert result.exit_code == row.code, result.stderr
    assert row.told in result.stderr
    lines = result.stderr.splitlines()
    assert all(line.isprintable() and len(line) < 2000 for line in lines)
    kinds = ("error: ", "next: ", "warning: ")
    assert all(line.startswith(kinds) for line in lines)
    assert (row.code == 2) == any(line.startswith("error: ") for line in lines)
    assert "Traceback" not in result.stderr
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < MEMORY


@pytest.mark.parametrize("row", HUB, ids=[row.what for row in HUB])
def test_a_hostile_answer_is_told_in_a_line(
    run: Run, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: HubRow
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words = row.make(hub)
    result = run(*words)
    assert result.exit_code == row.code, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert row.told in errors[0]
    assert listing(tmp_path / "here") == []
    kept = [path.read_bytes() for path in tmp_path.rglob("snapshots/*/model.safetensors") if path.exists()]
    assert all(one in hub_files(hub) for one in kept), "no half file goes by the name of the whole one"


@pytest.mark.parametrize("row", PROOFS, ids=[f"{row.of}: {row.what}" for row in PROOFS])
def test_the_test_that_is_named_exists(row: Proof) -> None:
    file, _, function = row.test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_list_has_more_than_a_hundred_inputs_and_none_twice() -> None:
    keys = [(row.of, row.what) for row in ALL]
    assert len(set(keys)) == len(keys) > 100


def hub_files(hub: Hub) -> list[bytes]:
    return [file for model in hub.models.values() for files in model.commits.values() for file in files.values()]


def listing(folder: Path) -> list[tuple[str, int, int]]:
    """What is in a folder, links not followed."""
    return sorted((str(path), path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*"))
