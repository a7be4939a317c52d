"""The examples of docs/attention.md run, and its console blocks are what the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import Run, run
from tests.guards.tree import ROOT

__all__ = ["run"]

PAGE = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    exec(compile("".join(blocks), "attention.md", "exec"), {"__name__": "__main__"})  # noqa: S102 - the project's own example
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attention.html", "attention.png"]


def test_the_output_is_the_command_s(run: Run) -> None:
    (first, *_) = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    said = [part.split("\n", 1) for part in re.split(r"^\$ porting ", first, flags=re.MULTILINE)[1:]]
    assert len(said) == 2
    for words, output in said:
        assert run(*shlex.split(words)).stdout == output
