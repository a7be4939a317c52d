"""What a command imports: those that only read text do not wait for torch, which takes longer than all that they do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from porting.embedded import embedded_checkpoint
from tests.guards.tree import ROOT

WITHOUT_TORCH = (
    "--help",
    "--version",
    "verify --help",
    "explain",
    "explain no-target missing-member",
    "tables",
    "tables bert",
    "tables bert --rules",
    "tables --json",
    "tables no-such-table",
    "report-bug --out {tmp}/report.md",
)

PROGRAM = """
import sys
from porting.cli import main

sys.argv = ["porting", *sys.argv[1:]]
try:
    main()
finally:
    found = {"torch", "transformers", "numpy", "matplotlib", "huggingface_hub"} & set(sys.modules)
    sys.stderr.write(f"imported: {sorted(found)}")
"""


@pytest.mark.parametrize("words", WITHOUT_TORCH)
def test_a_command_that_reads_only_text_imports_no_torch(words: str, tmp_path: object) -> None:
    command = [sys.executable, "-c", PROGRAM, *words.format(tmp=tmp_path).split()]
    run = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert run.returncode == (2 if "no-such" in words else 0), run.stderr
    assert run.stderr.endswith("imported: []")


def test_inspect_imports_nothing_that_converts() -> None:
    """A checkpoint that no conversion made has no record to be read."""
    program = PROGRAM.replace('{"torch", "transformers"', '{"porting.converting", "porting.sharding", "transformers"')
    program = program.replace('"numpy", "matplotlib", "huggingface_hub"', '"matplotlib"')
    command = [sys.executable, "-c", program, "inspect", str(embedded_checkpoint())]
    run = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "imported: []")
