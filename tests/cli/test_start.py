"""What a command imports: one that makes no tensor does not wait for torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import porting
from tests.small_checkpoint import write_checkpoint

PROGRAM = """
import sys
from porting.cli.app import main
sys.argv = ["porting", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    code = ended.code or 0
print("torch" if "torch" in sys.modules else "no torch", code)
"""

COMMANDS = {
    "inspect": ("inspect", "c"),
    "inspect as JSON": ("inspect", "c", "--json"),
    "hash": ("hash", "c"),
    "verify-files": ("verify-files", "ported"),
    "tables": ("tables",),
    "a table's rules": ("tables", "bert", "--rules"),
    "explain": ("explain", "missing-file"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint and what was converted from it."""
    folder = tmp_path_factory.mktemp("start")
    write_checkpoint(folder / "c")
    porting.convert(folder / "c", folder / "ported", "bert_into_fused")
    return folder


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS.keys())
def test_torch_is_not_imported_by_what_makes_no_tensor(words: tuple[str, ...], folder: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == f"no torch {2 if words[0] == 'explain' else 0}", done.stdout + done.stderr
