"""``load`` and ``export``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.modules import write_own
from tests.small_checkpoint import tensors


def facts(output: str) -> dict[str, str]:
    return {line[:12].strip(): line[12:].strip() for line in output.splitlines()}


def parameters() -> int:
    """Of a BertForPreTraining: the decoder is the word embedding and its bias the head's."""
    return sum(one.numel() for name, one in tensors().items() if ".decoder." not in name)


def test_load_says_what_was_built(run: Run, checkpoint: Path) -> None:
    result = run("load", checkpoint)
    assert result.exit_code == 0
    assert result.stderr == ""
    found = facts(result.stdout)
    assert found["module"] == "porting.models.bert_heads.BertForPreTraining"
    assert found["parameters"] == f"{parameters():,} in 62 tensors"
    assert found["dtype"] == "float32"
    assert found["left out"].startswith("2 tensors: equals ")
    assert result.stdout.splitlines()[-1] == "next: porting verify c"


@pytest.mark.parametrize(
    ("options", "mapped", "copied"),
    [((), 4, 0), (("--own",), 0, 4), (("--dtype", "bfloat16"), 0, 2), (("--dtype", "float64"), 0, 8)],
)
def test_load_says_what_memory_it_took(
    run: Run, checkpoint: Path, options: tuple[str, ...], mapped: int, copied: int
) -> None:
    found = json.loads(run("load", checkpoint, "--json", *options).stdout)
    assert found["parameters"] == parameters()
    assert (found["mapped"], found["copied"]) == (mapped * parameters(), copied * parameters())
    assert found["seconds"] > 0


def test_load_into_a_module_of_ones_own(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    write_own(Path())
    result = run("load", checkpoint, "--table", "own.toml", "--into", "own_model:build")
    assert result.exit_code == 0, result.stderr
    assert facts(result.stdout)["module"] == "own_model.Encoder"
    assert "no heads here" in facts(result.stdout)["left out"]


def test_new_parameters_are_a_warning(run: Run, checkpoint: Path) -> None:
    result = run("load", checkpoint, "--architecture", "BertForQuestionAnswering", "--fresh")
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: 2 parameters are new and untrained: ")
    assert facts(result.stdout)["new"] == "span.weight, span.bias"
