"""Finding a table: the one that was asked for, or the one for a checkpoint."""

from __future__ import annotations

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
            assert model_type in find_table(None, {"model_type": model_type}).model_types


def test_a_table_and_a_file_are_taken_as_they_are(tmp_path: Path) -> None:
    table = parse_table('[tensors]\n"a" = "b"\n')
    assert find_table(table, {"model_type": "anything"}) is table
    (tmp_path / "mine.toml").write_text('[tensors]\n"a" = "b"\n')
    assert find_table(tmp_path / "mine.toml", {}).rules[0].where == "mine.toml:2:1"


@pytest.mark.parametrize(
    ("asked", "config", "message"),
    [
        ("brt", {}, "'brt' is no file and no shipped table (did you mean 'bert'?) [no-table]"),
        ("nowhere.toml", {}, "nowhere.toml: no file, expected a TOML table [no-table]"),
        (None, {}, "config.json has no model_type, and no shipped table is for it; shipped: "),
        (None, {"model_type": "brt"}, "config.json has model_type 'brt', and no shipped table is for it; shipped: "),
        (None, {"model_type": ["bert"]}, "config.json has model_type ['bert'], and no shipped table is for it; "),
    ],
)
def test_what_cannot_be_found_says_so(asked: str | None, config: dict[str, object], message: str) -> None:
    with pytest.raises(TableError) as caught:
        find_table(asked, config)
    assert str(caught.value).startswith(message)
