"""The tables that ship with the library, and finding the one for a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from porting.errors import Code, Fault, Message, Option, PortingError, closest, nearest
from porting.notation.extends import SHIPPED
from porting.notation.faults import TableError
from porting.notation.table import Table, parse_table, read_table
from porting.printable import shown
from porting.registries import REGISTRY

if TYPE_CHECKING:
    from porting.plan.recipe import Described


def shipped() -> Iterator[Path]:
    """The files of the bundled tables, in order of name."""
    yield from sorted(SHIPPED.glob("*.toml"))


def find_table(
    table: Table | str | Path | None,
    config: Mapping[str, object],
    tensors: Mapping[str, Described] | None = None,
    *,
    ported: Mapping[str, Described] | None = None,
) -> Table:
    """Find the table: the given one, or the one for the config's ``model_type``.

    Args:
        table: a table, a file, the name of a bundled table, the text of a table (a string of several lines), an entry
            of transformers' registry (``"transformers:mixtral"``), or None to choose by the config.
        tensors: the checkpoint's tensors, by which an entry of transformers' registry becomes a table; None for those
            that transformers itself would save.
        ported: the tensors that such a table writes, where only they are there.
    """
    if isinstance(table, Table):
        return table
    if isinstance(table, str) and table.startswith(REGISTRY):
        from porting.registries.wording import imported  # noqa: PLC0415  # it waits for torch and for transformers

        return imported(table, config, tensors, ported=ported)
    if isinstance(table, str) and "\n" in table:
        return parse_table(table)
    return _for_config(config) if table is None else read_table(table_file(table))


def table_file(table: str | Path) -> Path:
    """The file of a table: a path, or the bundled table of that name."""
    path = Path(table)
    if os.path.isfile(path) or (path.suffix == ".toml" and os.path.lexists(path)):  # Path's own raises for a long name
        return path
    found = {path.stem: path for path in shipped()}
    if str(table) in found:
        return found[str(table)]
    beside: dict[str, str] = {}
    with suppress(OSError, ValueError):
        beside = {one.stem: str(one) for one in path.parent.glob("*.toml")}
    mine, ours = beside.get(closest(path.stem, beside)), closest(path.stem, found)
    near = " or ".join(repr(one) for one in (mine, ours) if one)
    hint = f"did you mean {near}?" if near else ""
    if path.suffix == ".toml":
        raise TableError(
            Fault(code=Code.NO_TABLE, where=str(path), message="not a file, expected a TOML table", hint=hint)
        )
    message = f"{str(table)!r} is neither a file nor a bundled table"
    raise TableError(Fault(code=Code.NO_TABLE, message=message, hint=hint or f"bundled: {', '.join(found)}"))


def _for_config(config: Mapping[str, object]) -> Table:
    model_type = config.get("model_type")
    paths = list(shipped())
    asked: list[str] = []
    for path in sorted(paths, key=lambda path: path.stem != model_type):  # most tables are called what they are for
        table = read_table(path)
        if model_type in table.model_types and not table.by_name:
            return table
        if model_type in table.model_types:
            asked.append(path.stem)
    names = [path.stem for path in paths]
    beside = "" if config else ", or put the model's config.json beside its weights"
    hint = nearest(str(model_type), names) or Message("pass ", Option("table"), f"; suggest writes one{beside}")
    if asked:
        hint = Message("it takes one that is asked for: ", Option("table", asked[0]))
    message = (
        f"no bundled table is for model_type {shown(model_type)}"
        if model_type is not None
        else f"{'config.json names no model_type' if config else 'no config.json'}, so no bundled table can be chosen"
    )
    raise TableError(Fault(code=Code.UNKNOWN_ARCHITECTURE, message=message, hint=hint))


@contextmanager
def chosen_for(table: Table | str | Path | None, into: object, chosen: Table) -> Iterator[None]:
    """Add a fault to those of a user's own module if the table was chosen automatically, which may be the cause.

    Args:
        table: the table that the user gave; None if it was chosen.
        into: the user's module; None for the table's own.
    """
    try:
        yield
    except PortingError as error:
        if table is not None or into is None:
            raise
        message = f"'{chosen.name}' was chosen by config.json's model_type, and is for its own handwritten models"
        hint = Message("a module of your own needs a table of its own: ", Option("table"))
        fault = Fault(code=Code.NO_TABLE, where=chosen.where, message=message, hint=hint)
        raise type(error)([*error.faults, fault]) from error
