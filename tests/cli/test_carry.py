"""``load`` and ``export``."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

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


def test_export_gives_the_same_bytes_back(run: Run, checkpoint: Path) -> None:
    result = run("export", checkpoint, "back")
    assert result.exit_code == 0, result.stderr
    assert "byte for byte those of the checkpoint" in result.stdout
    assert filecmp.cmp(checkpoint / "model.safetensors", "back/model.safetensors", shallow=False)
    assert Path("back/tokenizer.json").is_file()
    assert result.stdout.splitlines()[-1] == "next: porting verify back"


def test_export_with_a_cast_says_that_the_bytes_differ(run: Run, checkpoint: Path) -> None:
    result = run("export", checkpoint, "half", "--dtype", "float16", "--json")
    found = json.loads(result.stdout)
    assert found["differing"] == ["model.safetensors"]
    exported = load_file("half/model.safetensors")
    assert all(exported[name].equal(tensor.half()) for name, tensor in tensors().items())


def test_a_destination_that_exists_is_kept(run: Run, checkpoint: Path) -> None:
    assert run("export", checkpoint, "back").exit_code == 0
    (Path("back") / "model.safetensors").write_bytes(b"mine")
    result = run("export", checkpoint, "back")
    assert result.exit_code == 2
    assert "[destination-refused]" in result.stderr
    assert (Path("back") / "model.safetensors").read_bytes() == b"mine"


def test_export_from_a_module_of_ones_own(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    write_own(Path())
    own = ("--table", "own.toml", "--into", "own_model.py:build")
    result = run("export", checkpoint, "back", *own)
    assert result.exit_code == 0, result.stderr
    exported = load_file("back/model.safetensors")
    assert all(exported[name].equal(tensor) for name, tensor in tensors().items() if name in exported)
    assert any("query" in name for name in exported)
