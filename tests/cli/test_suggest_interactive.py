"""Questions of a command: asked on standard error, answered a line each, with a default for all."""

from __future__ import annotations

import errno
import io
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from porting.cli.output import Screen
from porting.cli.progress import Prompt
from porting.suggesting import Question, Suggestion
from tests.cli.conftest import Run
from tests.cli.modules import write_own
from tests.guards.tree import ROOT

INTO = ("--into", "own_model.py:build")


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test imports its own ``own_model``."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_model", raising=False)


def questions(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if "? (" in line]


@pytest.mark.usefixtures("suggested")
def test_of_a_table_that_was_found_the_same_is_asked(run: Run, checkpoint: Path) -> None:
    assert_asked(run, checkpoint)


@pytest.mark.slow
def test_with_nobody_to_ask_the_defaults_are_taken_and_said(run: Run, checkpoint: Path) -> None:
    assert_asked(run, checkpoint)


def assert_asked(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    result = run("suggest", checkpoint, *INTO, "--interactive")
    assert result.exit_code == 0, result.stderr
    assert questions(result.stderr) == [
        "Write a table that is trunk only? (what it maps is proven, and some parts have no counterpart)",
        "To which file? (none was named; - writes none and shows it here)",
    ]
    lines = result.stderr.splitlines()
    assert "  1  yes (default)" in lines
    assert "taken: yes" in result.stderr
    assert "taken: own_model.toml" in result.stderr
    assert Path("own_model.toml").read_text().startswith("# ")
    assert result.stdout.splitlines()[-1] == "next: porting verify c --table own_model.toml --into own_model.py:build"
    again = run("suggest", checkpoint, *INTO, "--interactive", "--yes", typed="no\n")
    assert questions(again.stderr)[-1] == "own_model.toml exists: write over it? (what is in it would be lost)"
    assert again.stderr.splitlines()[-1] == "own_model.toml is left as it is"
    assert again.stdout.splitlines()[0].startswith("TRUNK ONLY  ")


def _closed() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


class _Nothing(io.RawIOBase):
    """What ``0> file`` gives."""

    def writable(self) -> bool:
        return True


class _Directory(io.RawIOBase):
    """What ``< /`` gives."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        raise IsADirectoryError(errno.EISDIR, "Is a directory")


UNREADABLE: dict[str, Callable[[], TextIO | None]] = {
    "closed by the shell": lambda: None,
    "closed": _closed,
    "for writing only": lambda: io.TextIOWrapper(io.BufferedWriter(_Nothing())),
    "a directory": lambda: io.TextIOWrapper(io.BufferedReader(_Directory())),
    "no text": lambda: io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_an_input_that_cannot_be_read_takes_the_defaults(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = Question(about="accept", said="Write it?", why="w", choices={"yes": "", "no": ""}, default="no")
    monkeypatch.setattr(sys, "stdin", UNREADABLE[kind]())
    with Screen("suggest") as screen:
        dialogue = Prompt(screen)
        assert dialogue.ask(asked) == "no"
        assert dialogue.silent
    assert capsys.readouterr().err.endswith("taken: no\n")


@pytest.mark.slow
def test_what_is_typed_is_done(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    Path("there.toml").write_text("by hand")
    answers = "perhaps\n3\n1\nthere.toml\nno\nnew.toml\n"
    result = run("suggest", checkpoint, *INTO, "--interactive", typed=answers)
    assert result.exit_code == 0, result.stderr
    assert "'perhaps' is not one of them: type a number from 1 to 2, or a name" in result.stderr
    assert "'3' is not one of them" in result.stderr
    assert Path("there.toml").read_text() == "by hand"
    assert "[tensors]" in Path("new.toml").read_text()


@pytest.mark.slow
def test_no_is_no(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    result = run("suggest", checkpoint, *INTO, "--interactive", "-o", "mine.toml", typed="2\n")
    assert result.exit_code == 0
    assert not Path("mine.toml").exists()
    assert "next: " not in result.stdout
    shown = run("suggest", checkpoint, *INTO, "--interactive", typed="yes\n-\n")
    assert "[tensors]" in shown.stdout
    assert not list(Path().glob("own_model*.toml"))


@pytest.mark.slow
def test_on_a_terminal_the_bar_rests_while_somebody_is_asked(checkpoint: Path) -> None:
    """As it is typed: the bar is drawn, then the question, then the answer is taken."""
    write_own(Path())
    own = Path("own_model.py")
    own.write_text(
        own.read_text().replace(
            "def forward(self, ids, mask, kinds):", "def forward(self, ids, zzz, kinds):\n        mask = zzz"
        )
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
    for name in ("NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "porting", "suggest", "c", *INTO, "--interactive", "--limit", "1200"]
    waiting = [("[none] > ", "attention_mask"), ("[yes] > ", ""), ("[own_model.toml] > ", "typed.toml")]
    shown, seen = "", 0
    with subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        while True:
            try:
                shown += os.read(ours, 4096).decode(errors="replace")
            except OSError:  # the other end was closed
                break
            if waiting and waiting[0][0] in shown[seen:]:
                seen = len(shown)
                os.write(ours, f"{waiting.pop(0)[1]}\n".encode())
    os.close(ours)
    assert waiting == [], shown
    assert process.returncode == 0
    assert "What is 'zzz' of Encoder.forward? (its name says nothing)" in shown
    assert "of 0:20:00 at most" in shown  # as the time that went by is written
    assert Path("typed.toml").exists()
    assert shown.rstrip().endswith("porting verify c --table typed.toml --into own_model.py:build")


def test_a_file_that_cannot_be_written_is_asked_for_again(run: Run, checkpoint: Path, suggested: Suggestion) -> None:
    """What was found in minutes is not lost."""
    write_own(Path())
    answers = "yes\nnowhere/mine.toml\nmine.toml\n"
    result = run("suggest", checkpoint, *INTO, "--interactive", typed=answers)
    assert "nowhere/mine.toml: the destination lies in a directory that does not exist" in result.stderr
    assert Path("mine.toml").read_text() == suggested.text
    Path("own_model.toml").mkdir()
    result = run("suggest", checkpoint, *INTO, "--interactive", "--yes")
    assert suggested.text.strip() in result.stdout, result.stderr
