"""``docs/foreign-references.md`` is followed to the letter: its files are written, its commands and its Python run."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from porting.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "foreign-references.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
CONSOLES = [block.splitlines() for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]
SNIPPETS = [
    block
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    if block not in FILES.values()
]
JAX = "flax_tagger"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the page in the current folder."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    python("prepare.py")
    return tmp_path


def forget() -> None:
    """Each command of the page is a process of its own, and imports the files of this folder anew."""
    for name in [name for name in sys.modules if name.endswith("_tagger") or name == "into_module"]:
        del sys.modules[name]


def python(name: str) -> None:
    forget()
    runpy.run_path(name, run_name="__main__")


def porting(*words: str) -> Result:
    forget()
    return CliRunner().invoke(app, list(words), prog_name="porting", env={"COLUMNS": "200"})


def alone(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, for what changes a process: JAX in float64."""
    words = shlex.split(command)
    module = {"porting": ["-m", "porting"], "python": []}[words[0]]
    environment = {**os.environ, "COLUMNS": "200", "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    program = [sys.executable, *module, *words[1:]]
    return subprocess.run(program, cwd=folder, env=environment, check=False, capture_output=True, text=True)


def begins(output: str, lines: list[str]) -> bool:
    """Whether an output begins as the page shows it."""
    shown = [line.removesuffix(" ...") for line in lines if not line.startswith("$ ")]
    return all(line.startswith(beginning) for line, beginning in zip(output.splitlines(), shown, strict=False))


def test_the_page_has_its_files_and_its_commands() -> None:
    assert list(FILES) == [
        "my_tagger.py", "prepare.py", "numpy_tagger.py", "flax_tagger.py", "flax.toml", "new_tagger.py", "answer.py"
    ]  # fmt: skip
    assert len(CONSOLES) == 6
    assert len(SNIPPETS) == 1


@pytest.mark.timeout(300)  # eight commands
def test_the_commands_of_the_page_do_what_it_says(folder: Path) -> None:
    for lines in CONSOLES:
        if JAX in str(lines):
            continue
        for command in [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]:
            program, *words = shlex.split(command)
            if program == "python":
                python(*words)
                continue
            done = porting(*words)
            assert done.exit_code == 0, f"{command}\n{done.output}"
            assert begins(done.stdout, lines), done.stdout


def test_the_python_of_the_page_runs(folder: Path) -> None:
    (folder / "snippet.py").write_text(SNIPPETS[0], encoding="utf-8")
    python("snippet.py")


@pytest.mark.slow
@pytest.mark.timeout(300)  # three processes, each imports JAX and two of them torch
def test_the_jax_of_the_page_runs(folder: Path) -> None:
    """Both sides of it; and a mistake that is planted into the port is placed by the values of flax."""
    if os.environ.get("CI") != "true" and importlib.util.find_spec("flax") is None:
        pytest.skip("flax is an extra: pip install -c constraints.txt -e '.[dev,jax]'")
    (lines,) = [console for console in CONSOLES if JAX in str(console)]
    for command in (line.removeprefix("$ ") for line in lines if line.startswith("$ ")):
        done = alone(folder, command)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert begins(done.stdout, lines), done.stdout
    written = FILES["my_tagger.py"].replace("x = x + self.out(", "x = x + 1.0001 * self.out(")
    (folder / "wrong_tagger.py").write_text(written, encoding="utf-8")
    wrong = alone(folder, lines[1].removeprefix("$ ").replace("my_tagger.py:", "wrong_tagger.py:"))
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
    assert wrong.stdout.splitlines()[1].startswith("  module: blocks.0"), wrong.stdout


@pytest.mark.parametrize(("old", "new"), [(', approximate="tanh"', ""), (", attn_mask=mask[:, None, None, :]", "")])
def test_a_mistake_in_the_port_is_seen_by_the_numpy_function(folder: Path, old: str, new: str) -> None:
    wrong = FILES["my_tagger.py"]
    assert old in wrong
    (folder / "wrong_tagger.py").write_text(wrong.replace(old, new), encoding="utf-8")
    words = "verify --into wrong_tagger.py:build --reference numpy_tagger.py:forward --inputs batch.npz"
    done = porting(*words.split())
    assert done.exit_code == 1, done.output
    assert done.stdout.splitlines()[1].startswith("  module: blocks.0"), done.stdout


def test_the_numpy_side_imports_neither_torch_nor_transformers(folder: Path) -> None:
    program = (
        "import sys\nfor name in ('torch', 'transformers', 'safetensors'): sys.modules[name] = None\n"
        "import numpy as np\nfrom porting import load_recording, save_recording\n"
        "x = np.ones((2, 3))\n"
        "path = save_recording('alone.safetensors', {'x': x}, {'double': 2 * x})\n"
        "assert (load_recording(path).points['float64'][0]['double'] == 2).all()\n"
    )
    (folder / "program.py").write_text(program, encoding="utf-8")
    done = alone(folder, "python program.py")
    assert done.returncode == 0, done.stderr
