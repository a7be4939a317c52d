"""``inspect`` and ``tables``."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from porting.notation.table import read_table
from porting.tables import shipped
from tests.cli.conftest import Run
from tests.small_checkpoint import CONFIG


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
    assert "BertForPreTraining" in [architecture["name"] for architecture in bert["architectures"]]


def test_a_table_that_does_not_exist(run: Run) -> None:
    result = run("tables", "bret")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "(did you mean 'bert'?) [no-table]" in result.stderr


def test_the_registry_of_transformers_is_listed_and_shown(run: Run) -> None:
    listed = run("tables", "--transformers").stdout.splitlines()
    assert "transformers:mixtral" in listed
    assert len(listed) > 200
    assert "porting tables --transformers" in run("tables").stdout
    shown = run("tables", "transformers:mixtral")
    assert tomllib.loads(shown.stdout)["mapping"]["name"] == "transformers:mixtral"
    assert shown.stderr.endswith("next: porting convert ./my-checkpoint ./ported --table transformers:mixtral\n")
    rules = json.loads(run("tables", "transformers:mixtral", "--json").stdout)["rules"]
    assert len(rules) == 12


def test_a_table_is_given_back_in_another_notation(run: Run, checkpoint: Path) -> None:
    text = '[tensors]\n"h.{i}.ln.weight" = "layers.{i}.norm.weight"\n"h.{i}.fc [a b]" = "layers.{i}.up [b a]"\n'
    Path("own.toml").write_text(text)
    given = run("tables", "own.toml", "--as", "weight-converter")
    assert "Transpose(dim0=0, dim1=1)" in given.stdout
    compile(given.stdout, "given", "exec")
    refused = run("tables", "own.toml", "--as", "weights-mapper")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert (
        "own.toml:3:1: 'h.{i}.fc [a b] = layers.{i}.up [b a]' cannot be said as vLLM's WeightsMapper" in refused.stderr
    )
    assert run("tables", "--as", "weights-mapper").exit_code == 2
