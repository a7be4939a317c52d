"""``--into``: what a user types becomes what builds their module, or a line that says why not."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from porting.cli.app import build_app
from porting.cli.options import builder, flags
from porting.target import TargetError, import_path
from tests.cli.conftest import Run
from tests.cli.modules import OWN_MODEL, OWN_TABLE


@pytest.fixture(autouse=True)
def imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is imported here is forgotten, and the path of imports is as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(name: str, text: str = "class Model: ...\ndef build(): return Model()\nsize = 3\n") -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)


def test_nothing_given_is_nothing() -> None:
    assert builder(None) is None


@pytest.mark.parametrize("text", ["my_model:build", "my_model.py:build", "./my_model.py:build"])
def test_a_module_or_a_file_of_the_current_folder(text: str) -> None:
    write("my_model.py")
    found = builder(text)
    assert found is not None
    assert type(found()).__name__ == "Model"


def test_a_class_and_a_nested_name() -> None:
    write("pack/inner.py", "class Outer:\n    class Model: ...\n")
    write("pack/__init__.py", "")
    found = builder("pack.inner:Outer.Model")
    assert found is not None
    assert found.__name__ == "Model"


def test_a_file_finds_its_neighbours() -> None:
    write("deep/layers.py", "class Layer: ...\n")
    write("deep/net.py", "from layers import Layer\n\ndef build(): return Layer()\n")
    found = builder("deep/net.py:build")
    assert found is not None
    assert type(found()).__name__ == "Layer"


def test_a_file_called_like_a_module_that_is_loaded_is_still_the_file() -> None:
    import json

    write("json.py")
    found = builder("json.py:build")
    assert found is not None
    assert type(found()).__name__ == "Model"
    assert sys.modules["json"] is json


def test_a_table_that_is_trusted_may_name_a_module_of_the_current_folder() -> None:
    write("named_by_a_table.py")
    before = list(sys.path)
    assert builder(None, trust=True) is None
    assert import_path("named_by_a_table:build", trust=True).__module__ == "named_by_a_table"
    assert sys.path == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("my_model", r"'my_model' is not an import path, expected package\.file:name"),
        ("my_model:", "is not an import path"),
        ("my model:build", "is not an import path"),
        ("my_modle.py:build", r"^my_modle\.py: no such file \(did you mean 'my_model\.py'\?\)"),
        ("nowhere/net.py:build", r"^nowhere/net\.py: no such file \(check the path\)"),
        ("missing:build", "importing 'missing' failed: ModuleNotFoundError: No module named 'missing'"),
        ("my_model:biuld", r"'my_model' has no 'biuld' \(did you mean 'build'\?\)"),
        ("my_model.py:size", "is not a class or function"),
        ("my_model.py:size.of.it", "'my_model' has no 'of'"),
        ("broken.py:build", r"^broken\.py: importing it failed: ZeroDivisionError: division by zero"),
        ("broken:build", "importing 'broken' failed: ZeroDivisionError"),
        ("typo.py:build", r"^typo\.py: importing it failed: SyntaxError: "),
    ],
)
def test_what_cannot_be_imported_is_one_line(text: str, message: str) -> None:
    write("my_model.py")
    write("broken.py", "1 / 0\n")
    write("typo.py", "def build(:\n")
    with pytest.raises(TargetError, match=message) as caught:
        builder(text)
    assert "\n" not in str(caught.value)


def test_the_words_of_options_that_were_given() -> None:
    assert flags(table="t.toml", into=None, fresh=True, trust=False, dtype=["a", "b"], seed=0) == [
        "--table", "t.toml", "--fresh", "--dtype", "a", "--dtype", "b", "--seed", "0",
    ]  # fmt: skip


def test_the_config_class_of_a_table_is_imported_when_it_is_trusted(run: Run, checkpoint: Path) -> None:
    model = OWN_MODEL.replace('config["', "config.").replace('"]', "")
    config = "from dataclasses import dataclass\n\n\n@dataclass\nclass Sizes:\n"
    config += "".join(f"    {name}: float\n" for name in ("width", "words", "places", "heads", "inner", "eps", "depth"))
    Path("sized_model.py").write_text(f"{config}\n\n{model}")
    words = ("load", checkpoint, "--table", "sized.toml", "--into", "sized_model.py:build")

    def table(name: str) -> None:
        Path("sized.toml").write_text(OWN_TABLE.replace('name = "own"', f'name = "own"\nconfig = "{name}"'))

    table("sized_model.py:Sizes")
    result = run(*words, "--trust")
    assert "names 'sized_model.py:Sizes', a file" in result.stderr
    assert "(write sized_model:Sizes, as in an import) [bad-target]" in result.stderr
    table("sized_model:Sizes")
    result = run(*words)
    assert result.exit_code == 2
    assert "(pass --trust if you know the table, or let what builds the module make its config)" in result.stderr
    result = run(*words, "--trust")
    assert result.exit_code == 0, result.stderr


WRITING = {"html", "png", "output", "out", "destination"}
"""The parameters of commands that name what is written."""

WRITERS = {
    "suggest": ["suggest", "no-such", "--into", "m.py:build", "--output", "{}/t.toml"],
    "verify": ["verify", "no-such", "--html", "{}/p.html"],
    "export": ["export", "no-such", "{}/d"],
    "attention": ["attention", "a", "--source", "no-such", "--html", "{}/p.html"],
    "attention ": ["attention", "a", "--source", "no-such", "--png", "{}/p.png"],
    "fill-mask": ["fill-mask", "a", "--source", "no-such", "--html", "{}/p.html"],
    "next-sentence": ["next-sentence", "a", "b", "--source", "no-such", "--html", "{}/p.html"],
    "generate": ["generate", "a", "--source", "no-such", "--html", "{}/p.html"],
    "classify": ["classify", "a", "--source", "no-such", "--html", "{}/p.html"],
    "translate": ["translate", "a", "--source", "no-such", "--html", "{}/p.html"],
    "convert": ["convert", "no-such", "{}/d"],
    "record": ["record", "no-such", "--out", "{}/r.safetensors"],
}
"""The commands that write a file or a folder after long work."""


def test_each_command_that_writes_is_known() -> None:
    commands = getattr(get_command(build_app()), "commands", {})
    writing = {name for name, one in commands.items() if WRITING & {parameter.name for parameter in one.params}}
    assert writing - {"report-bug"} == {name.strip() for name in WRITERS}


@pytest.mark.parametrize("command", WRITERS)
@pytest.mark.parametrize("folder", ["missing", "unwritable"])
def test_where_nothing_can_be_written_is_said_before_the_work(
    command: str, folder: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is opened: there is no such checkpoint."""
    write("m.py")
    if folder == "unwritable":
        Path(folder).mkdir()

        def refuse(path: Path) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

        monkeypatch.setattr("porting.atomic._require_writable", refuse)
    result = run(*(word.format(folder) for word in WRITERS[command]))
    assert result.exit_code == 2
    reason = {"missing": "lies in a directory that does not exist", "unwritable": "cannot be written: Permission "}
    assert f"the destination {reason[folder]}" in result.stderr
    assert "no-such" not in result.stderr


@pytest.mark.parametrize("words", [["verify", "--html"], ["attention", "a", "--png"], ["fill-mask", "a", "--html"]])
def test_a_page_takes_the_place_of_no_weights(words: list[str], run: Run, checkpoint: Path) -> None:
    before = (checkpoint / "model.safetensors").read_bytes()
    result = run(*words, checkpoint / "model.safetensors")
    assert (result.exit_code, "does not end in " in result.stderr) == (2, True)
    assert (checkpoint / "model.safetensors").read_bytes() == before
