"""``inspect`` and ``tables``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from porting.embedded import embedded_checkpoint
from tests.checkpoint.test_flax_msgpack import written
from tests.cli.conftest import Run
from tests.hub_server import Hub, hub
from tests.small_checkpoint import tensors

__all__ = ["hub"]


def test_inspect_groups_the_layers_and_ends_with_what_to_type(run: Run, checkpoint: Path) -> None:
    result = run("inspect", checkpoint)
    assert result.exit_code == 0
    assert result.stderr == ""
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["model_type", "bert"] in rows
    assert ["architectures", "BertForPreTraining"] in rows
    name = "bert.encoder.layer.{0..2}.attention.self.query.weight"
    assert [name, "[24,", "24]", "float32", "3", "6.91", "kB"] in rows
    nbytes = sum(tensor.nbytes for tensor in tensors().values())
    assert any(row[:2] == ["tensors", "64,"] and f"{nbytes / 1000:.3g}" in row for row in rows)
    assert result.stdout.splitlines()[-1] == "next: porting check c"


def test_inspect_json_says_the_same(run: Run, checkpoint: Path) -> None:
    found = json.loads(run("inspect", checkpoint, "--json").stdout)
    assert found["count"] == len(tensors())
    assert found["parameters"] == sum(tensor.numel() for tensor in tensors().values())
    (row,) = [group for group in found["groups"] if group["pattern"] == "bert.encoder.layer.{0..2}.output.dense.weight"]
    assert row == {
        "pattern": row["pattern"],
        "shape": [24, 40],
        "dtype": "float32",
        "count": 3,
        "nbytes": 3 * 24 * 40 * 4,
    }


def test_inspect_reads_a_model_on_the_hub_without_its_weights(run: Run, checkpoint: Path, hub: Hub) -> None:
    hub.add("org/small", checkpoint)
    result = run("inspect", "org/small")
    assert result.exit_code == 0, result.stderr
    commit = json.loads(run("inspect", "org/small", "--json").stdout)["commit"]
    assert f"checkpoint     org/small at commit {commit}" in result.stdout
    assert result.stdout.splitlines()[-1] == "next: porting check org/small --headers-only"
    assert not list(Path.cwd().parent.rglob("hf/**/model.safetensors"))


@pytest.mark.parametrize("command", ["inspect", "check", "load"])
def test_without_a_source_the_embedded_checkpoint_is_meant(run: Run, command: str) -> None:
    result = run(command)
    assert result.exit_code == 0, result.stderr
    assert str(embedded_checkpoint()) in result.stdout
    assert result.stdout.splitlines()[-1] in ("next: porting check", "next: porting verify")


def test_inspect_groups_the_files_of_a_sharded_checkpoint(run: Run, tmp_path: Path) -> None:
    names = [f"model-{number:05}-of-00158.safetensors" for number in range(1, 159)]
    weight_map = {}
    for number, name in enumerate(names):
        save_file({f"layer.{number}.weight": torch.randn(2, 3)}, tmp_path / name)
        weight_map[f"layer.{number}.weight"] = name
    index = {"metadata": {"total_size": 158 * 24}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    result = run("inspect", tmp_path)
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("files")]
    nbytes = sum((tmp_path / name).stat().st_size for name in names)
    expected = f"model-{{00001..00158}}-of-00158.safetensors (158 files): safetensors, {nbytes / 1000:.3g} kB"
    assert line.split(maxsplit=1)[1] == expected


def test_inspect_names_the_inner_paths_of_a_file_that_is_read_as_a_whole(run: Run, tmp_path: Path) -> None:
    names = ["params.encoder.norm.weight", "params.encoder.out.weight", "params.head.bias"]
    path = tmp_path / "flax_model.msgpack"
    path.write_bytes(written({name: torch.ones(2) for name in names}))
    shown = run("inspect", str(path)).stdout
    assert "inner paths  #params (3), #params.encoder (2), #params.head (1)" in shown
    for inner, rest in (("params", 3), ("params.encoder", 2), ("params.head", 1)):
        below = json.loads(run("inspect", f"{path}#{inner}", "--json").stdout)
        assert (below["count"], below["inner_paths"]) == (rest, [])
