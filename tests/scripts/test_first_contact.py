"""A list of models is run and scored: right, refused, crashed and wrongly proven ones are counted apart."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import typer
from typer.testing import CliRunner

from scripts.first_contact import importing, main

CLONE = '''
from torch import nn


class Words(nn.Module):
    """Word and position vectors alone."""

    def __init__(self, vocab_size: int, n_embd: int, n_positions: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab_size, n_embd), nn.Embedding(n_positions, n_embd)
        self.norm = nn.LayerNorm(n_embd)

    def forward(self, ids):
        return self.norm(self.words(ids) + self.places.weight[: ids.shape[1]])
'''

LIST = """
import importlib
from scripts.first_contact import Model
from porting.suggesting import Verdict

FIELDS = {"vocab_size": 61, "n_embd": 24, "n_layer": 0, "n_head": 2, "n_positions": 20}


def words():
    return importlib.import_module("a_public_model").Words


def broken():
    raise ValueError("its own fault")


def apart(filled, reference):
    return 1.0


def failing(filled, reference):
    raise ZeroDivisionError("the list's own fault")


common = dict(folder="clone", architecture="GPT2Model", fields=FIELDS, verdict=Verdict.EXACT)
MODELS = {
    "right": Model(make=words, **common),
    "proven wrongly": Model(make=words, apart=apart, **common),
    "not compared": Model(make=words, apart=failing, **common),
    "broken": Model(make=broken, **common),
    "refused": Model(make=words, options={"config": {"no_such_size": 3}}, **common),
}
"""


def test_a_list_is_scored(tmp_path: Path) -> None:
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone" / "a_public_model.py").write_text(CLONE)
    (tmp_path / "list.py").write_text(LIST)
    app = typer.Typer()
    app.command()(main)
    answer = CliRunner().invoke(app, [str(tmp_path / "list.py"), "--json", str(tmp_path / "scores.json")])
    assert answer.exit_code == 0, answer.output
    scores = {load["name"]: load for load in json.loads((tmp_path / "scores.json").read_text())}
    assert {name: one["ended"] for name, one in scores.items()} == {
        "right": "answered",
        "proven wrongly": "answered",
        "not compared": "answered",
        "broken": "crashed",
        "refused": "refused",
    }
    assert scores["right"]["right"], scores["right"]
    assert {name for name, one in scores.items() if one["false_proof"]} == {"proven wrongly"}
    assert scores["not compared"]["unchecked"] == "ZeroDivisionError: the list's own fault"
    assert scores["broken"]["verdict"] == "ValueError: its own fault"
    assert "60 % right in verdict and reason, of 5 models: verdict 3, reason 3" in answer.output
    assert "false proofs 1, not checked 1, refused 1, crashed 1" in answer.output


def test_the_clone_s_modules_are_forgotten(tmp_path: Path) -> None:
    (tmp_path / "a_public_model.py").write_text("")
    with importing(tmp_path):
        importlib.import_module("a_public_model")
    assert "a_public_model" not in sys.modules
    assert str(tmp_path) not in sys.path
