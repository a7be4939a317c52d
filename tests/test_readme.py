"""README.md is executed: its Python runs, its commands do what it shows, its table is read."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertModel

import porting
from porting.embedded import embedded_checkpoint
from porting.notation.table import parse_table
from porting.verification import Case
from tests.cli.conftest import Run, run
from tests.guards.tree import ROOT

__all__ = ["run"]

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)  # (language, text)
PAGE = (ROOT / "docs" / "your-own-model.md").read_text(encoding="utf-8")
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
FILES = dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))

NUMBER = re.compile(r"\d[\d,.]*(?:e[+-]\d+)?")
REPORT, MAKE = "FAITHFUL", "make verify"
"""How the two blocks begin that are no commands of ours: what Python prints, and what CI runs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader types: the files of docs/your-own-model.md, bad.toml as README.md describes it, a checkpoint."""
    made = tmp_path_factory.mktemp("reader")
    for name, text in FILES.items():
        (made / name).write_text(text, encoding="utf-8")
    slips = {"{p:query,key,value}.bias": "{p:query,key,valu}.bias", '"blocks.{i}.up.': '"blocks.{i}.upp.'}
    table = FILES["my_bert.toml"]
    for right, wrong in slips.items():
        assert table.count(right) == 1
        table = table.replace(right, wrong)
    (made / "bad.toml").write_text(table, encoding="utf-8")
    shutil.copytree(embedded_checkpoint(), made / "my-checkpoint")
    return made


def same_lines(shown: str, printed: str) -> None:
    """Each line that is shown stands in what was printed, in this order; ``...`` stands for any lines, or a line's end.

    Numbers may be others: they vary with the machine, the time and the version.
    """
    printed = printed.replace(str(embedded_checkpoint()), "porting/demo")
    left = [NUMBER.sub("0", line.rstrip()) for line in printed.splitlines()]
    skipping = False
    for line in shown.splitlines():
        if line == "...":
            skipping = True
            continue
        wanted = NUMBER.sub("0", line.rstrip())
        while skipping and left and not matches(left[0], wanted):
            left.pop(0)
        assert left, f"nothing is like {line!r} in\n{printed}"
        assert matches(left[0], wanted), f"{line!r} is shown, and this was printed:\n{left[0]}"
        left.pop(0)
        skipping = False
    assert skipping or not left, f"not shown: {left}"


def matches(line: str, wanted: str) -> bool:
    if wanted.endswith("..."):
        return line.startswith(wanted.removesuffix("..."))
    return " ".join(line.split()) == " ".join(wanted.split())  # columns are as wide as their numbers


def test_every_block_is_of_a_kind_that_is_executed() -> None:
    kinds = [language or text.split(maxsplit=1)[0] for language, text in BLOCKS]
    assert set(kinds) == {"python", "console", "toml", "porting", "make", REPORT}
    assert kinds.count("python") == 2  # the second goes on from the first
    assert kinds.count(REPORT) == kinds.count("make") == kinds.count("toml") == 1


@pytest.mark.slow
def test_a_module_of_your_own_is_filled_proven_and_exported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop("my_bert", None)
    (shown,) = [text for language, text in BLOCKS if not language and text.startswith(REPORT)]
    names: dict[str, Any] = {"__name__": "__main__"}
    first, second = PROGRAMS
    exec(compile(first, "README.md", "exec"), names)  # noqa: S102 - the project's own example
    same_lines(shown, capsys.readouterr().out)
    exec(compile(second, "README.md", "exec"), names)  # noqa: S102 - as above
    original = (embedded_checkpoint() / "model.safetensors").read_bytes()
    assert (folder / "exported" / "model.safetensors").read_bytes() == original


def test_how_many_references_pass_is_what_their_page_says() -> None:
    page = (ROOT / "docs" / "references.md").read_text(encoding="utf-8")
    ((classes, passing),) = re.findall(
        r"^Of (\d+) classes \d+ were built, and (\d+) of these pass\.$", page, re.MULTILINE
    )
    assert f"of its {classes} model classes [{passing} pass]" in " ".join(README.split())


@pytest.mark.parametrize(
    "wrong", [{"layer_norm_eps": 1e-5}, {"hidden_act": "gelu_new"}, {"mask": "no token is hidden"}], ids=str
)
def test_the_usual_test_passes_what_the_proof_does_not(wrong: dict[str, Any]) -> None:
    """On a freshly initialised model, and for a mask in rows without padding."""
    torch.manual_seed(0)
    fields: dict[str, Any] = {
        "vocab_size": 99,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
    }
    config = BertConfig(**fields)
    right: Any = BertModel(config)
    right.eval()
    other: Any = Unmasked(config) if "mask" in wrong else BertModel(BertConfig(**fields, **wrong))
    other.eval()
    other.load_state_dict(right.state_dict())
    given = {"input_ids": torch.randint(0, 99, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    with torch.no_grad():
        ours, theirs = (model(**given).last_hidden_state for model in (other, right))
    assert torch.allclose(ours, theirs, atol=1e-3)
    given["attention_mask"] = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    report = porting.verify(reference=right, into=other, loaded=True, inputs=[Case("padded", given)], causes=False)
    assert report.verdict == "different"


class Unmasked(BertModel):  # type: ignore[no-untyped-call]  # transformers has no types
    """BERT that is told of no padding."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:  # what the model returns
        return super().forward(input_ids=input_ids)


def test_the_table_is_read() -> None:
    (text,) = [text for language, text in BLOCKS if language == "toml"]
    table = parse_table(f'[mapping]\nname = "shown"\n{text}', where="README.md")
    assert (len(table.rules), len(table.probes)) == (3, 2)


@pytest.mark.few(1)
@pytest.mark.timeout(400)  # one of them trains a model
@pytest.mark.parametrize("text", [text for language, text in BLOCKS if language == "console"])
def test_the_commands_print_what_is_shown(text: str, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    parts = re.split(r"^\$ (porting|python) ", text, flags=re.MULTILINE)[1:]
    assert parts
    untrained = False
    for program, part in zip(parts[::2], parts[1::2], strict=True):
        words, shown = part.split("\n", 1)
        if program == "python":
            script = shlex.split(words)
            untrained = "writer" in script
            printed = of_a_script(*script, *(("--steps", "2") if untrained else ()))
            if not untrained:
                same_lines(shown, printed)
            continue
        if untrained:  # some minutes of training are spared, so that other words are written
            result = run(*shlex.split(words))
            assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, shown.splitlines()[-1]), result.stderr
            continue
        wrong = shown.startswith("DIFFERENT")
        if wrong:
            before, after = "F.gelu(self.up(x))", 'F.gelu(self.up(x), approximate="tanh")'
            assert f"`{after}`" in README
            Path("my_bert.py").write_text(FILES["my_bert.py"].replace(before, after), encoding="utf-8")
        sys.modules.pop("my_bert", None)  # each command is a process of its own for a reader
        result = run(*shlex.split(words))
        Path("my_bert.py").write_text(FILES["my_bert.py"], encoding="utf-8")
        assert result.exit_code == (1 if wrong else 2 if shown.startswith("error: ") else 0), result.stderr
        same_lines(shown, result.stdout + result.stderr)


def of_a_script(*words: str) -> str:
    """What a script of the repository prints, in the current folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("text", [text for language, text in BLOCKS if not language and text.startswith("porting ")])
def test_the_other_commands_work(text: str, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    if "./my-port " in text:
        made = run("convert", "my-checkpoint", "my-port", "--table", "my_bert.toml", "--into", "my_bert.py:build")
        assert made.exit_code == 0, made.stderr
    for line in text.splitlines():
        program, *words = shlex.split(line, comments=True)
        assert program == "porting"
        result = run(*words)
        assert result.exit_code == 0, result.stderr


def test_every_command_and_every_name_of_python_in_the_text_is_there(run: Run) -> None:
    listed = run("--help").stdout
    for command in re.findall(r"`porting ([a-z-]+)", README):
        assert f"\n  {command} " in listed, command
    for name in re.findall(r"`porting\.(\w+)[(`]", README):
        assert hasattr(porting, name), name
