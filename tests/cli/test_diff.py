from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Run


@pytest.fixture
def other(checkpoint: Path) -> Path:
    """The checkpoint with one element changed and one tensor less."""
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["bert.encoder.layer.1.attention.self.key.weight"][3, 5] += 0.5
    del tensors["bert.pooler.dense.bias"]
    Path("other").mkdir()
    save_file(tensors, "other/model.safetensors")
    return Path("other")


def test_equal_checkpoints(run: Run, checkpoint: Path) -> None:
    result = run("diff", checkpoint, checkpoint)
    assert result.exit_code == 0
    assert result.stdout == "equal: 64 with equal bytes\nnext: porting hash c\n"


def test_a_difference_is_named_with_its_place(run: Run, checkpoint: Path, other: Path) -> None:
    result = run("diff", checkpoint, other)
    assert result.exit_code == 1
    name = "bert.encoder.layer.1.attention.self.key.weight"
    (line,) = [line for line in result.stdout.splitlines() if line.startswith(name)]
    assert "different" in line
    assert "1 of 576" in line
    assert f"{name}[3, 5] = " in line
    assert line.endswith("all in [3, 5]")
    assert "bert.pooler.dense.bias" in result.stdout
    assert "different: 62 with equal bytes, 1 different, 1 only in A\n" in result.stdout
    assert run("diff", checkpoint, other, "--atol", "1").exit_code == 1, "one is missing still"


def test_through_a_table(run: Run, checkpoint: Path, port: Path) -> None:
    result = run("diff", checkpoint, port, "--table", "bert")
    assert result.exit_code == 0, result.stdout
    assert result.stdout.startswith("equal: 64 with equal bytes\n")
    wrong = run("diff", port, checkpoint, "--table", "bert")
    assert wrong.exit_code == 2
    assert "pass them the other way" in wrong.stderr
    without = run("diff", checkpoint, port)
    assert without.exit_code in (1, 2)


def test_as_json(run: Run, checkpoint: Path, other: Path) -> None:
    result = run("diff", checkpoint, other, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["equal"] is False
    assert document["only_a"] == {"bert.pooler.dense.bias": {"nan": 0, "inf": 0}}
    (one,) = [tensor for tensor in document["tensors"] if tensor["verdict"] != "equal"]
    assert one["largest_at"][1]["index"] == [3, 5]
    assert one["span"] == [[3, 5], [3, 5]]
    assert abs(one["largest"] - 0.5) < 1e-6


def test_odd_numbers_are_told(run: Run, checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["bert.pooler.dense.bias"][2] = float("nan")
    save_file(tensors, checkpoint / "model.safetensors")
    result = run("diff", checkpoint, checkpoint)
    assert result.exit_code == 0
    assert "warning: bert.pooler.dense.bias: A: 1 NaN, 0 infinite; B: 1 NaN, 0 infinite" in result.stderr


def test_what_cannot_be_done(run: Run, checkpoint: Path) -> None:
    assert run("diff", checkpoint, "nothing").exit_code == 2
    assert run("hash", checkpoint, "--table", "nothing").exit_code == 2
    save_file({"x": torch.zeros(1)}, "x.safetensors")
    result = run("diff", checkpoint, "x.safetensors")
    assert result.exit_code == 2
    assert "(pass the table that leads from one layout to the other: --table)" in result.stderr
