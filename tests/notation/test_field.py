"""Fields of config.json: inside another, and in other spellings."""

from __future__ import annotations

import pytest

from porting.notation.faults import TableError
from porting.notation.field import held, value_of, with_field
from porting.notation.table import parse_table
from porting.plan.config import arguments, effective, original, refused, sizes

THETA = "rope.full.theta/global_theta"


@pytest.mark.parametrize(
    ("config", "spelling", "value"),
    [
        ({"rope": {"full": {"theta": 7.0}}}, "rope.full.theta", 7.0),
        ({"global_theta": 8.0}, "global_theta", 8.0),
        ({"rope": {"full": {"theta": 7.0}}, "global_theta": 8.0}, "rope.full.theta", 7.0),  # the first that is there
        ({"rope": {"full": {"theta": None}}}, "rope.full.theta", None),  # null is there
        ({"rope": None}, "", None),
        ({"rope": {"full": 3}}, "", None),
        ({"rope.full.theta": 9.0}, "", None),  # a key with dots in it is no path
    ],
)
def test_a_field_is_found_under_the_first_spelling_that_is_there(
    config: dict[str, object], spelling: str, value: object
) -> None:
    assert (held(config, THETA), value_of(config, THETA)) == (spelling, value)


def test_a_field_is_written_where_it_stands_and_nothing_else_is_touched() -> None:
    config = {"rope": {"full": {"theta": 7.0, "type": "default"}, "local": {"theta": 1.0}}, "depth": 2}
    changed = with_field(config, THETA, 9.0)
    assert changed == {"rope": {"full": {"theta": 9.0, "type": "default"}, "local": {"theta": 1.0}}, "depth": 2}
    assert config["rope"] == {"full": {"theta": 7.0, "type": "default"}, "local": {"theta": 1.0}}
    assert with_field({"global_theta": 7.0}, THETA, 9.0) == {"global_theta": 9.0}
    assert with_field({}, THETA, 9.0) == {"rope": {"full": {"theta": 9.0}}}


def test_a_table_reads_reckons_and_writes_in_any_spelling() -> None:
    text = f'[config]\n"{THETA}" = "theta"\n"hidden_size/n_embd" = "width"\n"positions/n_positions" = "places + 2"\n'
    text += '[sizes]\nd = "hidden_size // 4"\n[require]\n"rope.full.type" = ["default"]\n'
    text += '[defaults]\n"rope.full.type" = "default"\n[tensors]\n"w [(h d)]" = "w [(d h)]"\n'
    table = parse_table(text)
    old = {"n_embd": 64, "global_theta": 5.0, "n_positions": 514}
    assert arguments(table, old) == {"theta": 5.0, "width": 64, "places": 512}
    assert sizes(table, old) == ({"d": 16}, [])
    assert refused(table, old) == []
    assert effective(table, old)["rope"] == {"full": {"type": "default"}}
    (fault,) = refused(table, {**old, "rope": {"full": {"type": "linear"}}})
    assert "config.json has rope.full.type = 'linear'" in str(fault)

    class Config:
        theta, width, places = 6.0, 32, 10

    assert original(table, Config()) == {THETA: 6.0, "hidden_size/n_embd": 32, "positions/n_positions": 12}


@pytest.mark.parametrize("field", ["a..b", ".a", "a/", "a b", "a/b.", "", "a" * 201, "a[0]", "[a", "[]", "[a, b.]"])
@pytest.mark.parametrize("section", ["config", "require"])
def test_what_names_no_field_is_refused_with_its_place(field: str, section: str) -> None:
    value = '"a"' if section == "config" else '["a"]'
    with pytest.raises(TableError) as caught:
        parse_table(f'[{section}]\n"{field}" = {value}', where="t.toml")
    (fault,) = caught.value.faults
    assert str(fault).startswith("t.toml:2:1: ")
    assert (
        "names no field of the config (fields are written name, outer.name, new_name/old_name, or [height, width])"
        in str(fault)
    )
