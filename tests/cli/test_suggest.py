"""``suggest``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from porting.notation.table import read_table
from porting.suggesting import Suggestion
from tests.cli.conftest import Run
from tests.cli.modules import write_own
from tests.guards.tree import ROOT

INTO = ("--into", "own_model.py:build")


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test imports its own ``own_model``."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_model", raising=False)


def test_a_table_that_was_found_is_written_and_advised(run: Run, checkpoint: Path, suggested: Suggestion) -> None:
    write_own(Path())
    result = run("suggest", checkpoint, *INTO, "-o", "mine.toml", "--explain", "words")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("TRUNK ONLY  Proven in float64")
    meaning = "The table loads what both sides have, and that part computes what the checkpoint's model computes."
    assert result.stdout.splitlines()[1] == meaning
    assert "  your module has no bert.pooler" in result.stdout.splitlines()
    assert "    Tried: nothing else." in result.stdout
    assert result.stdout.splitlines()[-1] == "next: porting verify c --table mine.toml --into own_model.py:build"
    assert Path("mine.toml").read_text() == suggested.text


def test_five_reasons_are_printed_and_the_others_where_they_are_asked_for(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import porting.suggesting
    from porting.suggesting.verdict.suggestion import Evidence, Reason, Verdict

    write_own(Path())
    reasons = tuple(Reason(kind="fit", said=f"reason {n}") for n in range(8))
    lines = tuple(Evidence(line=f'"a.{n}" = "b.{n}"', decided="its place", said=f"Names: {n}.") for n in range(2))
    found = Suggestion(verdict=Verdict.NOT_FOUND, text="", reasons=reasons, evidence=lines)
    monkeypatch.setattr(porting.suggesting, "suggest", lambda *_, **__: found)
    short = run("suggest", checkpoint, *INTO, "-o", "mine.toml").stdout.splitlines()
    assert [line for line in short if line.startswith("  reason ")] == [f"  reason {n}" for n in range(5)]
    assert "  and 3 more: --explain all shows them, and what speaks for each line" in short
    whole = run("suggest", checkpoint, *INTO, "-o", "other.toml", "--explain", "all").stdout.splitlines()
    assert [line for line in whole if line.startswith("  reason ")] == [f"  reason {n}" for n in range(8)]
    assert {"    Names: 0.", "    Names: 1."} < {*whole}


@pytest.mark.slow
def test_the_table_is_written_and_the_next_command_takes_it(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    result = run("suggest", checkpoint, *INTO, "-o", "mine.toml", "--explain", "qkv")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("TRUNK ONLY  Proven in float64 on the checkpoint and on a small random model")
    assert "  your module has no bert.pooler" in result.stdout.splitlines()
    assert "    Tried: nothing else; with it, what meets " in result.stdout
    last = result.stdout.splitlines()[-1]
    assert last == "next: porting verify c --table mine.toml --into own_model.py:build"
    verified = run(*last.removeprefix("next: porting ").split())
    assert verified.exit_code == 0, verified.stdout
    assert verified.stdout.startswith("FAITHFUL")


@pytest.mark.slow
def test_without_a_file_the_table_is_printed(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    result = run("suggest", checkpoint, *INTO)
    assert result.exit_code == 0
    assert '"bert.embeddings.word_embeddings.weight" = "words.weight"' in result.stdout
    document = json.loads(run("suggest", checkpoint, *INTO, "--json").stdout)
    assert document["verdict"] == "trunk only"
    assert document["proven"] is True
    assert document["missing"] == ["bert.pooler", "cls"]


def test_a_wrong_input_line_is_refused(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    result = run("suggest", checkpoint, *INTO, "--input", "attention_mask")
    assert result.exit_code == 2
    assert "--input 'attention_mask' is not of the form REFERENCE=YOURS" in result.stderr


@pytest.mark.parametrize("command", ["suggest", "record"])
@pytest.mark.parametrize("name", ["c", "c/model.safetensors"])
def test_what_is_read_is_not_written_over(run: Run, checkpoint: Path, command: str, name: str) -> None:
    """Not with --overwrite either, and before the work."""
    write_own(Path())
    before = (checkpoint / "model.safetensors").read_bytes()
    words = [*INTO, "-o"] if command == "suggest" else ["--out"]
    result = run(command, checkpoint, *words, name, "--overwrite")
    assert result.exit_code == 2
    assert f"error: {name}: the destination " in result.stderr
    assert (checkpoint / "model.safetensors").read_bytes() == before


@pytest.mark.slow
def test_a_table_whose_name_is_no_text_is_written(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    assert run("suggest", checkpoint, *INTO, "-o", "caf\udce9\x7f.toml").exit_code == 0
    assert read_table(Path("caf\udce9\x7f.toml")).name == "caf\\udce9\x7f"


def test_a_table_that_is_there_is_not_written_over(run: Run, checkpoint: Path) -> None:
    """Before the work, and whatever would have come out of it."""
    Path("mine.toml").write_text("by hand")
    result = run("suggest", checkpoint, "--into", "nowhere.py:build", "-o", "mine.toml")
    assert result.exit_code == 2
    assert (
        "mine.toml: the destination exists already (choose another destination, or pass --overwrite)" in result.stderr
    )
    assert Path("mine.toml").read_text() == "by hand"
    nowhere = run("suggest", checkpoint, "--into", "nowhere.py:build", "-o", "no/mine.toml")
    assert nowhere.exit_code == 2
    assert "no/mine.toml: the destination lies in a directory that does not exist (run `mkdir -p no`)" in nowhere.stderr


def test_where_nothing_was_found_the_exit_code_is_another_one(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    from porting.suggesting import pipeline

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "RESERVE", 2.0)  # no time at all is left for the search
        result = run("suggest", checkpoint, *INTO, "--limit", "100", "-o", "mine.toml")
    assert result.exit_code == 3, result.stderr
    assert "NOT FOUND  nothing could be proven; then nothing fits words.weight." in result.stdout.splitlines()
    bound = "  the limit was met before the search was complete: a larger limit gives it more"
    assert bound in result.stdout.splitlines()
    assert not Path("mine.toml").exists(), "there is nothing to write"
    last = "next: porting suggest c --into own_model.py:build --output mine.toml --limit 500"
    assert result.stdout.splitlines()[-1] == last


@pytest.mark.slow
def test_an_interrupted_command_leaves_nothing_behind(checkpoint: Path, tmp_path: Path) -> None:
    """Whatever it does when somebody presses Ctrl-C: here the builder never ends."""
    Path("endless.py").write_text(
        "import pathlib\n\ndef build(config):\n    pathlib.Path('begun').touch()\n    while True:\n        pass\n"
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)}
    words = [sys.executable, "-m", "porting", "suggest", "c", "--into", "endless.py:build", "-o", "mine.toml"]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not Path("begun").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130, err
    assert (out, err.splitlines()[-1]) == ("", "interrupted")
    assert "Traceback" not in err
    assert sorted(path.name for path in Path().iterdir() if path.name != "__pycache__") == ["begun", "c", "endless.py"]
    assert list(scratch.glob("porting-*")) == []


def test_a_builder_that_fails_is_a_line_with_its_place_and_no_traceback(run: Run, checkpoint: Path) -> None:
    Path("own_model.py").write_text("def build(config):\n    return config['hidden_size'] // 0\n")
    result = run("suggest", checkpoint, *INTO)
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("error: building the module failed: ZeroDivisionError: integer ")
    assert "own_model.py:2) [bad-target]" in lines[0]


@pytest.mark.slow
def test_what_a_builder_prints_does_not_get_into_the_json(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    place = Path("own_model.py")
    place.write_text(place.read_text() + "\n\nprint('hello')\n")
    result = run("suggest", checkpoint, *INTO, "--json")
    assert json.loads(result.stdout)["verdict"] == "trunk only"
    assert "hello" in result.stderr
    assert "shards" not in result.stderr, "transformers' bars"


@pytest.mark.slow
def test_the_next_command_can_be_typed_where_the_module_has_parts_of_its_own(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    place = Path("own_model.py")
    head = "        self.fresh = nn.Linear(e, 7)\n\n    def forward(self, ids, mask, kinds):\n"
    changed = place.read_text().replace("\n    def forward(self, ids, mask, kinds):\n", head)
    place.write_text(changed.replace("        return x\n", "        return self.fresh(x)\n"))
    result = run("suggest", checkpoint, *INTO, "-o", "mine.toml")
    assert result.exit_code == 0, result.stdout
    last = result.stdout.splitlines()[-1]
    assert last == "next: porting verify c --table mine.toml --into own_model.py:build --fresh"
    checked = run(*last.removeprefix("next: porting ").split())
    assert checked.exit_code == 1  # its new head is random, and compared with nothing
    assert checked.stdout.startswith("UNPROVEN")
