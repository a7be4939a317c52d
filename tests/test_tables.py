"""Finding a table: the one that was asked for, or the one for a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from porting.notation.faults import TableError
from porting.notation.table import parse_table, read_table
from porting.tables import find_table, shipped


def test_every_shipped_table_is_read_and_found_by_its_name_and_by_its_model_types() -> None:
    paths = list(shipped())
    assert paths == sorted(paths)
    for path in paths:
        table = read_table(path)
        assert find_table(path.stem, {}) == table
        for model_type in table.model_types:
            if model_type == "pegasus":  # its table loads a part of it, and has to be named
                with pytest.raises(
                    TableError, match=r"\(it takes one that is asked for: table='pegasus_into_classifier'"
                ):
                    find_table(None, {"model_type": model_type})
                continue
            chosen = find_table(None, {"model_type": model_type})
            assert model_type in chosen.model_types
            assert not chosen.by_name
            assert table.by_name or chosen == table


def test_a_table_that_is_asked_for_by_name_is_never_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[mapping]\nmodel_types = ["toy"]\n{}[tensors]\n"a" = "b"\n'
    monkeypatch.setattr("porting.tables.SHIPPED", tmp_path)
    (tmp_path / "first.toml").write_text(text.format("by_name = true\n"))
    assert find_table("first", {}).model_types == ("toy",)
    with pytest.raises(TableError, match="no bundled table is for model_type 'toy'"):
        find_table(None, {"model_type": "toy"})
    (tmp_path / "second.toml").write_text(text.format(""))
    assert find_table(None, {"model_type": "toy"}).name == "second"
    (tmp_path / "third.toml").write_text(text.format('by_name = "yes"\n'))
    with pytest.raises(TableError, match=r"third\.toml:3:11: 'by_name' is 'yes', expected true or false"):
        find_table("third", {})


def test_a_table_and_a_file_are_taken_as_they_are(tmp_path: Path) -> None:
    table = parse_table('[tensors]\n"a" = "b"\n')
    assert find_table(table, {"model_type": "anything"}) is table
    (tmp_path / "mine.toml").write_text('[tensors]\n"a" = "b"\n')
    assert find_table(tmp_path / "mine.toml", {}).rules[0].where == "mine.toml:2:1"
    text = '[tensors]\n"a" = "b"\n' + "# a long line, longer than a file's name may be\n" * 100
    assert find_table(text, {}).rules == parse_table(text).rules
    with pytest.raises(TableError, match="is neither a file nor a bundled table"):
        find_table("x" * 5000, {})


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("unusaul.toml", "'unusual.toml'"),
        ("./tables/thiers.toml", "'tables/theirs.toml'"),
        ("unusual", "'unusual.toml'"),
        ("bret.toml", "'bert'"),
        ("tables/brt.toml", "'tables/bart.toml' or 'bert'"),
    ],
)
def test_a_table_with_a_near_name_is_named(
    asked: str, near: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tables").mkdir()
    for name in ("unusual.toml", "tables/theirs.toml", "tables/bart.toml"):
        (tmp_path / name).touch()
    with pytest.raises(TableError, match=re.escape(f"(did you mean {near}?) [no-table]")):
        find_table(asked, {})


@pytest.mark.parametrize(
    ("asked", "config", "message"),
    [
        ("brt", {}, "'brt' is neither a file nor a bundled table (did you mean 'bert'?) [no-table]"),
        ("nowhere.toml", {}, "nowhere.toml: not a file, expected a TOML table [no-table]"),
        (None, {}, "no config.json, so no bundled table can be chosen"),
        (None, {"model_type": "brt"}, "no bundled table is for model_type 'brt' (did you mean 'bert'?)"),
        (None, {"model_type": ["bert"]}, "no bundled table is for model_type ['bert'] "),
    ],
)
def test_what_cannot_be_found_says_so(asked: str | None, config: dict[str, object], message: str) -> None:
    with pytest.raises(TableError) as caught:
        find_table(asked, config)
    assert str(caught.value).startswith(message)


def test_a_model_type_of_any_length_is_told_in_a_line() -> None:
    with pytest.raises(TableError) as caught:
        find_table(None, {"model_type": "\x9b" * 1_000_000})
    assert len(str(caught.value)) < 1000
