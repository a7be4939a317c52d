"""The last line of a command is a command: it can be pasted, and it works."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Run
from tests.cli.modules import OWN_TABLE, write_own

pytestmark = pytest.mark.few(2)

OWN = ("--table", "own.toml", "--into", "own_model.py:build")

# Words, and the exit code of the command that is advised: 1 where it is one that shows a difference.
GOOD = [
    ("inspect c", 0),
    ("inspect one.safetensors", 0),
    ("tables", 0),
    ("tables bert", 0),
    ("tables marian", 0),
    ("tables bert --rules", 0),
    ("explain", 0),
    ("explain no-target", 0),
    ("check c", 0),
    (f"check c {' '.join(OWN)}", 0),
    ("check c --table bare.toml --into own_model.py:build", 0),
    ("load c", 0),
    ("load c --table bare.toml --into own_model.py:build", 0),
    (f"verify c {' '.join(OWN)}", 0),
    ("verify c --architecture BertModel --all", 0),
    ("verify c --longest 9 --stream", 0),
    ("verify c --reference c.recorded.safetensors", 0),
    ("verify c --table own.toml --into wrong.py:build", 1),
    ("verify c --table own.toml --into wrong.py:build --all", 1),
    ("export c back", 0),
    ("export c back --table bare.toml --into own_model.py:build", 0),
    ("convert c ported --table bert_into_fused", 0),
    ("verify-files done", 0),
    ("diff c c", 0),
    ("diff c done --table bert_into_fused", 0),
    ("diff c other", 1),
    ("diff c other --all", 0),
    ("hash c", 0),
    ("hash c --table bert", 0),
    ("record c --out golden.safetensors --longest 9 --case 0 --meaning-only", 0),
    ("record c --out golden.safetensors --table own.toml --longest 9 --case 0 --meaning-only", 0),
    ("record --reference plain.py:build --inputs batch.safetensors --out golden.safetensors --meaning-only", 0),
    ("fill-mask '[MASK] it.' --source c", 0),
    ("next-sentence 'Open it.' 'Read it.' --source c", 0),
    ("generate 'the bank' --source c --architecture BertForMaskedLM --next", 0),
    ("generate 'the bank' --source c --architecture BertForMaskedLM --max-length 6", 0),
    ("attention 'the bank' --source c", 0),
    ("attention 'the bank' --source c --html page.html", 0),
    (f"attention 'the bank' --source c {' '.join(OWN)} --html page.html", 0),
]

# Words of commands that fail, and what is advised.
BAD = [
    ("inspect nowhere.safetensors", "explain checkpoint-not-found"),
    ("load c --table bret", "tables"),
    ("check c --into own_model.py:build", "suggest c --into own_model.py:build"),
    ("check c --into own_model.py:biuld --table own.toml", "explain bad-target"),
    ("verify c --table wrong.toml --into own_model.py:build", "explain unread-tensor no-source"),
    ("verify c --html no/report.html", "explain destination-refused"),
    ("export c c", "explain destination-refused"),
    ("convert c back --like c", "explain option-refused"),
    ("fill-mask nothing --source c", "explain no-mask"),
]

PLAIN = """
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)).eval()
"""


@pytest.fixture
def workbench(run: Run, checkpoint: Path) -> Path:
    """A folder with what the commands name."""
    write_own(Path())
    Path("bare.toml").write_text(OWN_TABLE.partition("[inputs]")[0])
    Path("wrong.toml").write_text(OWN_TABLE.replace("bert.embeddings.LayerNorm", "bert.embedings.LayerNorm"))
    Path("wrong.py").write_text(Path("own_model.py").read_text().replace("GELU(self", "torch.relu(self"))
    Path("plain.py").write_text(PLAIN)
    torch.manual_seed(1)
    save_file({"input": torch.randn(3, 6)}, "batch.safetensors")
    save_file({"a.weight": torch.randn(3, 6)}, "one.safetensors")
    return Path()


def advised(output: str) -> list[str]:
    """The words of the command in the last line."""
    last = output.splitlines()[-1]
    assert last.startswith("next: porting "), last
    return shlex.split(last.removeprefix("next: porting "))


@pytest.mark.few(1)
@pytest.mark.parametrize(("words", "code"), GOOD)
def test_what_is_advised_works(run: Run, workbench: Path, words: str, code: int) -> None:
    if "c.recorded" in words:
        run("record", "c", "--out", "c.recorded.safetensors", "--longest", "9", "--meaning-only")
    if "done" in words:
        run("convert", "c", "done", "--table", "bert_into_fused")
    if "other" in words:
        run("export", "c", "other", "--dtype", "bfloat16")
    first = run(*shlex.split(words))
    assert first.exit_code in {0, 1}, first.stderr
    second = run(*advised(first.stdout if "next: " in first.stdout else first.stderr))
    assert second.exit_code == code, second.output


@pytest.mark.parametrize(("words", "advice"), BAD)
def test_what_is_advised_after_an_error_works(run: Run, workbench: Path, words: str, advice: str) -> None:
    first = run(*shlex.split(words))
    assert first.exit_code == 2
    assert shlex.join(advised(first.stderr)) == advice
    assert run(*shlex.split(advice)).exit_code == 0


@pytest.mark.slow
def test_a_suggestion_that_was_printed_is_to_be_written(run: Run, workbench: Path) -> None:
    first = run("suggest", "c", "--into", "own_model.py:build")
    words = advised(first.stderr)
    assert words == ["suggest", "c", "--into", "own_model.py:build", "--output", "./my_table.toml"]
    assert "next:" not in first.stdout
    written = run(*words)
    assert run(*advised(written.stdout)).exit_code == written.exit_code == 0


@pytest.mark.slow
def test_a_destination_that_exists_is_not_advised(run: Run, workbench: Path) -> None:
    Path("exported").mkdir()
    first = run("verify", "c", "--longest", "9")
    assert advised(first.stdout) == ["export", "c", "./exported-2"]
