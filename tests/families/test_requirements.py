"""Whatever a shipped table requires of a config: another value is refused, and named with its field."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import porting
from porting.errors import PortingError
from porting.tables import find_table, shipped
from tests.families.pairs import PAIRS, Pair
from tests.families.ported import Ported, make

FIRST = {pair.table: pair for pair in reversed(PAIRS)}  # of each table its first pair
REQUIRED = [(path.stem, field) for path in shipped() for field in find_table(path.stem, {}).require]


@pytest.fixture(scope="module")
def ported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Pair], Ported]:
    """Each checkpoint is made once."""

    @cache
    def made(table: str) -> Ported:
        return make(FIRST[table], tmp_path_factory.mktemp(table))

    return lambda pair: made(pair.table)


def other(allowed: Collection[object]) -> object:
    """A value that is not allowed, of the type of those that are."""
    (first, *_) = allowed
    if isinstance(first, bool):
        return not first
    if isinstance(first, int):
        return first + 1
    return next(one for one in ("relu", "gelu", "something else") if one not in allowed)


def changed(config: dict[str, Any], field: str, value: object) -> dict[str, Any]:  # Any: as JSON is
    """The config with another value; a dot leads into an object."""
    first, _, rest = field.partition(".")
    return {**config, first: changed(config.get(first) or {}, rest, value) if rest else value}


@pytest.mark.parametrize(("table", "field"), REQUIRED)
def test_another_value_is_refused(table: str, field: str, ported: Callable[[Pair], Ported], tmp_path: Path) -> None:
    source = ported(FIRST[table]).directory
    value = other(find_table(table, {}).require[field])
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(changed(config, field, value)))
    with pytest.raises(PortingError) as caught:
        porting.load(tmp_path, table=table)
    # An activation that not even the module knows is refused by the module, by its own name of the field.
    told = {f"{field} = {value!r}", f"{field}={value!r}", "hidden_act='something else'"}
    assert any(one in str(caught.value) for one in told), str(caught.value)
