"""What is imported when: what only loads does not wait for the reference, and what only reads text not for torch.

Each step is done in one fresh interpreter, after the steps above it, and says what it must not have imported by then.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guards.tree import ROOT, modules
from tests.small_checkpoint import write_checkpoint

STEPS = {
    "import porting": ("import porting", ["torch", "transformers", "rich"]),
    "a list of models": ("from porting import models", ["torch", "porting.models.bert"]),
    "one of the models": ("models.MPNet", ["porting.models.seq2seq", "transformers"]),
    # The first random number on the meta device would import sympy, which takes longer than loading does.
    "build a module": (
        """
import torch
from porting.build import OWN_CODE, build
from porting.models import BertConfig, BertForPreTraining
build(lambda: BertForPreTraining(config=BertConfig(num_hidden_layers=1)), OWN_CODE)
build(lambda: torch.nn.Transformer(8, 2, 1, 1, 16, batch_first=True), OWN_CODE)
""",
        ["sympy", "transformers"],
    ),
    "load and export": (
        """
module = porting.load(source)
assert type(module).__name__ == "BertForPreTraining"
porting.export(module, None, source + "-again")
""",
        ["transformers", "sympy", "networkx", "torch._dynamo"],
    ),
    "fill a mask": ("assert porting.fill_mask('a [MASK]', source)", ["transformers"]),
    "look at attention": ("porting.attention('a')", ["matplotlib", "jinja2", "transformers"]),
    "import what verifies": (
        "import porting.verification.proof, porting.cli.app",
        ["matplotlib", "jinja2", "transformers"],
    ),
    # The reference's import costs more than loading a model does; only what runs it pays for it.
    "import every module": ("import importlib\nfor name in names: importlib.import_module(name)", ["transformers"]),
}

PROGRAM = """
import json, sys
source, names, steps = json.loads(sys.stdin.read())
found = {}
for step, (code, forbidden) in steps.items():
    exec(code)
    found[step] = sorted({*forbidden} & sys.modules.keys())
    if step == "one of the models":
        assert "porting.models.mpnet" in sys.modules
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Which of the forbidden modules were there after each step."""
    source = write_checkpoint(tmp_path_factory.mktemp("imports") / "c")
    given = json.dumps([str(source), sorted(modules()), STEPS])
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True, input=given)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("step", STEPS)
def test_a_step_imports_nothing_that_it_does_not_need(step: str, imported: dict[str, list[str]]) -> None:
    assert imported[step] == []


WITHOUT_TORCH = {
    "--help": 0,
    "--version": 0,
    "verify --help": 0,
    "explain": 0,
    "explain no-target missing-member": 0,
    "tables": 0,
    "tables bert": 0,
    "tables bert --rules": 0,
    "tables --json": 0,
    "tables no-such-table": 2,
    "report-bug --out {folder}/report.md": 0,
}

TYPED = """
import json, sys
from porting.cli import main

found = []
for command in json.loads(sys.stdin.read()):
    sys.argv = ["porting", *command.split()]
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code or 0
    names = {"torch", "transformers", "numpy", "matplotlib", "huggingface_hub"} & sys.modules.keys()
    found.append([code, sorted(names)])
sys.stderr.write("found: " + json.dumps(found))
"""


def test_a_command_that_reads_only_text_imports_no_torch(tmp_path: Path) -> None:
    """Importing torch takes longer than all that they do."""
    given = json.dumps([command.format(folder=tmp_path) for command in WITHOUT_TORCH])
    words = [sys.executable, "-c", TYPED]
    done = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True, input=given)
    found = json.loads(done.stderr.rpartition("found: ")[2])
    assert dict(zip(WITHOUT_TORCH, found, strict=True)) == {
        command: [code, []] for command, code in WITHOUT_TORCH.items()
    }


def test_inspect_imports_nothing_that_converts(tmp_path: Path) -> None:
    """A checkpoint that no conversion made has no record to be read."""
    program = TYPED.replace(
        '"torch", "transformers", "numpy"', '"porting.converting", "porting.sharding", "transformers"'
    )
    program = program.replace(', "matplotlib", "huggingface_hub"', ', "matplotlib"')
    given = json.dumps([f"inspect {write_checkpoint(tmp_path / 'c')}"])
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True, input=given)
    assert done.stderr == "found: [[0, []]]"
