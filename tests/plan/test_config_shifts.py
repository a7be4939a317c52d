"""[config] with a shift: ``max_position_embeddings = "positions + 2"``, read from both sides."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from porting.notation.faults import TableError
from porting.notation.table import parse_table
from porting.plan.config import arguments, original

TEXT = '[config]\nmax_position_embeddings = "positions + 2"\nlayers = "depth-1"\nhidden_size = "width"\n'


def test_a_shift_is_taken_off_on_the_way_in_and_added_on_the_way_back() -> None:
    table = parse_table(TEXT)
    assert table.config == {"max_position_embeddings": "positions", "layers": "depth", "hidden_size": "width"}
    assert table.shifts == {"max_position_embeddings": 2, "layers": -1}
    theirs = {"max_position_embeddings": 514, "layers": 5, "hidden_size": 64}
    ours = arguments(table, theirs)
    assert ours == {"positions": 512, "depth": 6, "width": 64}
    assert original(table, SimpleNamespace(**ours)) == theirs


@pytest.mark.parametrize("value", [None, "514", True, 2.5])
def test_what_is_no_whole_number_is_left_for_the_target_to_refuse(value: object) -> None:
    assert arguments(parse_table(TEXT), {"max_position_embeddings": value}) == {"positions": value}


@pytest.mark.parametrize("value", ["positions * 2", "2 + positions", "positions + ", "positions + two", "a..b", ""])
def test_what_is_no_field_with_a_shift_is_refused(value: str) -> None:
    expected = 'expected a field of the target, several as "dim/width", or one with a shift such as "positions + 2"'
    with pytest.raises(TableError) as caught:
        parse_table(f'[config]\na = "{value}"', where="t.toml")
    assert [str(fault) for fault in caught.value.faults] == [f"t.toml:2:5: 'a' is {value!r}, {expected} [wrong-type]"]
