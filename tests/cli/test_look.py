"""``inspect`` and ``tables``."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from porting.embedded import embedded_checkpoint
from porting.notation.table import read_table
from porting.tables import shipped
from tests.cli.conftest import Run
from tests.hub_server import Hub, hub
from tests.small_checkpoint import CONFIG, tensors

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
    nbytes = sum(one.nbytes for one in tensors().values())
    assert any(row[:2] == ["tensors", "64,"] and f"{nbytes / 1000:.3g}" in row for row in rows)
    assert result.stdout.splitlines()[-1] == "next: porting check c"


def test_inspect_json_says_the_same(run: Run, checkpoint: Path) -> None:
    found = json.loads(run("inspect", checkpoint, "--json").stdout)
    assert found["count"] == len(tensors())
    assert found["parameters"] == sum(one.numel() for one in tensors().values())
    (row,) = [one for one in found["groups"] if one["pattern"] == "bert.encoder.layer.{0..2}.output.dense.weight"]
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


def test_tables_lists_what_ships(run: Run) -> None:
    result = run("tables")
    assert result.exit_code == 0
    for path in shipped():
        table = read_table(path)
        assert f"{table.name}  {table.description}" in result.stdout
        assert str(len(table.rules)) in result.stdout
    assert result.stdout.splitlines()[-1].startswith("next: porting tables ")


def test_a_table_is_printed_as_it_is(run: Run) -> None:
    (path,) = [one for one in shipped() if one.stem == "bert"]
    result = run("tables", "bert")
    assert result.stdout == path.read_text(encoding="utf-8")
    assert tomllib.loads(result.stdout)
    assert result.stderr == "next: porting tables bert --rules\n"


def test_the_rules_of_a_table_stand_with_their_places(run: Run) -> None:
    table = read_table(next(one for one in shipped() if one.stem == "bert"))
    lines = run("tables", "bert", "--rules").stdout.splitlines()
    assert lines[0].split() == ["rule", "at"]
    for rule, line in zip(table.rules, lines[1:], strict=False):
        assert line.startswith(str(rule))
        assert line.endswith(rule.where)


def test_a_table_of_ones_own_is_listed_too(run: Run, checkpoint: Path) -> None:
    Path("own.toml").write_text('[mapping]\nname = "own"\n[tensors]\n"a.{i}" = "b.{i}"\n')
    assert "a.{i} = b.{i}" in run("tables", "own.toml", "--rules").stdout
    assert json.loads(run("tables", "own.toml", "--json").stdout)["rules"] == [
        {"rule": "a.{i} = b.{i}", "where": "own.toml:4:1"}
    ]


def test_tables_json(run: Run) -> None:
    listed = json.loads(run("tables", "--json").stdout)
    assert [one["name"] for one in listed] == [path.stem for path in shipped()]
    (bert,) = [one for one in listed if one["name"] == "bert"]
    assert bert["model_types"] == [CONFIG["model_type"]]
    assert "BertForPreTraining" in [one["name"] for one in bert["architectures"]]


def test_a_table_that_does_not_exist(run: Run) -> None:
    result = run("tables", "bret")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "(did you mean 'bert'?) [no-table]" in result.stderr


@pytest.mark.parametrize("command", ["inspect", "check", "load"])
def test_without_a_source_the_embedded_checkpoint_is_meant(run: Run, command: str) -> None:
    result = run(command)
    assert result.exit_code == 0, result.stderr
    assert str(embedded_checkpoint()) in result.stdout
    assert result.stdout.splitlines()[-1] in ("next: porting check", "next: porting verify")
