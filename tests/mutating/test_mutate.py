"""A weak test misses mistakes, a strong one does not; each run is a real process, and no file changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from porting.cli.app import app
from porting.mutating import MutationError, mutate
from tests.small_checkpoint import write_checkpoint

ROOT = Path(__file__).parents[2]

MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.norm = nn.LayerNorm(8, eps=1e-12)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        nn.init.zeros_(self.up.bias)
        nn.init.zeros_(self.down.bias)

    def forward(self, input_ids):
        hidden = self.norm(self.words(input_ids))
        return hidden + self.down(nn.functional.gelu(self.up(hidden)))


def build():
    torch.manual_seed(0)
    return Model().eval()
"""

WEAK = """
import torch
from mine import Model, build


def test_close_enough():
    port, again = build(), build.__wrapped__() if hasattr(build, "__wrapped__") else build()
    ids = torch.arange(6)[None]
    assert torch.allclose(port(ids), again(ids), atol=1e-3)
"""

STRONG = """
import porting
from tests.verification.user_bert import FUSED_TABLE, MyBert
from porting.notation.table import parse_table
from mine import build


def test_faithful():
    assert porting.verify("c", build, parse_table(FUSED_TABLE), architecture="BertModel", longest=24).faithful
"""

PORT = """
from tests.small_checkpoint import CONFIG
from tests.verification.user_bert import MyBert


def build():
    return MyBert(vocabulary=CONFIG["vocab_size"])
"""

BIAS, EPS, GELU = "linear layer bias missing", "LayerNorm eps", "tanh GELU for another activation"
RESIDUAL = "residual missing"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the user's tests run in a process of their own, with this porting
    (tmp_path / "mine.py").write_text(MODEL, encoding="utf-8")
    (tmp_path / "test_weak.py").write_text(WEAK, encoding="utf-8")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_what_a_weak_test_misses_is_listed(folder: Path) -> None:
    before = contents(folder)
    score = mutate(["test_weak.py"], "mine:build", only=[EPS, BIAS, RESIDUAL])
    assert {mutation.name: mutation.outcome for mutation in score.mutations} == {
        EPS: "survived",
        BIAS: "survived",
        RESIDUAL: "caught",
    }
    assert [survivor.name for survivor in score.survivors] == [EPS, BIAS]
    assert "whose biases are 0" in score.survivors[1].looks
    assert (score.caught, round(score.share, 2)) == (1, 0.33)
    assert "padding mask ignored" in score.absent
    assert contents(folder) == before


@pytest.mark.slow
@pytest.mark.timeout(300)  # two processes that import transformers
def test_a_proof_catches_what_closeness_does_not(folder: Path) -> None:
    write_checkpoint(folder / "c")
    (folder / "mine.py").write_text(PORT, encoding="utf-8")
    (folder / "test_strong.py").write_text(STRONG, encoding="utf-8")
    score = mutate(["test_strong.py"], "mine.py:build", only=[BIAS])
    assert [(mutation.name, mutation.outcome) for mutation in score.mutations] == [(BIAS, "caught")]


@pytest.mark.slow
def test_the_command_says_what_survived_and_how_it_looks(folder: Path) -> None:
    runner = CliRunner()
    result = runner.invoke(app, ["mutate", "test_weak.py", "--into", "mine:Model", "--only", GELU])
    assert result.exit_code == 1
    assert "survived" in result.stdout
    assert f"{GELU}  a difference of up to 5e-4 where the reference has the exact GELU" in result.stdout
    assert "would be caught by: torch.testing.assert_close(port(...), expected, rtol=0, atol=1e-0" in result.stdout
    assert "cannot be made in what these tests run: " in result.stdout
    assert "0 of 1 caught, a mutation score of 0 %" in result.stdout
    assert result.stdout.splitlines()[-1] == "next: porting mutate --help"  # no line that was just typed


@pytest.mark.slow
def test_a_file_beside_the_port_does_not_replace_a_module_of_python(folder: Path) -> None:
    (folder / "colorsys.py").write_text("raise SystemExit('planted')\n", encoding="utf-8")
    (folder / "tests").mkdir()
    text = "import colorsys, mine\n\ndef test_it():\n    assert colorsys.rgb_to_hsv and mine.build()\n"
    (folder / "tests" / "test_colour.py").write_text(text, encoding="utf-8")
    with pytest.raises(MutationError, match=r"the tests never run what mine:build builds"):  # they pass
        mutate(["tests"], "mine:build", only=["LayerNorm eps"])


def test_wrong_use_is_refused(folder: Path) -> None:
    with pytest.raises(MutationError, match=r"no mistake called 'LayerNorm epz' \(did you mean 'LayerNorm eps'\?\)"):
        mutate(["test_weak.py"], "mine:build", only=["LayerNorm epz"])
    (folder / "test_failing.py").write_text("def test_it():\n    assert 1 == 2\n", encoding="utf-8")
    with pytest.raises(MutationError, match=r"test_failing.py: the tests fail as they are: .*1 failed"):
        mutate(["test_failing.py"], "mine:build")
    (folder / "test_elsewhere.py").write_text("def test_it():\n    assert True\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["mutate", "test_elsewhere.py", "--into", "mine:build", "--json"])
    assert result.exit_code == 2
    (fault,) = json.loads(result.stdout)["faults"]
    assert fault["code"] == "nothing-to-mutate"
    assert fault["message"] == "the tests never import mine"
    (folder / "test_unbuilt.py").write_text("import mine\n\ndef test_it():\n    assert mine.build\n", encoding="utf-8")
    with pytest.raises(MutationError, match=r"test_unbuilt.py: the tests never call mine:build \(build the port by it"):
        mutate(["test_unbuilt.py"], "mine:build")
    with pytest.raises(MutationError, match=r"pytest cannot run them: file or directory not found: test_nowhere.py"):
        mutate(["test_nowhere.py"], "mine:build")
    (folder / "test_none.py").write_text("import mine\n", encoding="utf-8")
    with pytest.raises(MutationError, match=r"test_none.py: pytest found no tests"):
        mutate(["test_none.py"], "mine:build")
