"""``tables``: the tables that ship with the library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from porting.cli import options
from porting.cli.output import Screen
from porting.printable import safe_lines

if TYPE_CHECKING:
    from porting.notation.table import Table


class Notation(StrEnum):
    """The notations in which a table can be printed."""

    WEIGHT_CONVERTER = "weight-converter"
    WEIGHTS_MAPPER = "weights-mapper"


def tables(
    table: Annotated[
        str | None,
        typer.Argument(metavar="TABLE", help="A bundled table's name, or a TOML file.", show_default="list all"),
    ] = None,
    rules: Annotated[bool, typer.Option("--rules", help="Show how each rule was read, with its line.")] = False,
    into: Annotated[
        Notation | None,
        typer.Option(
            "--as", help="As Python source of transformers' WeightConverter list, or of vLLM's WeightsMapper."
        ),
    ] = None,
    transformers: Annotated[
        bool, typer.Option("--transformers", help="List the tables that transformers' registry of conversions gives.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """List the bundled tables, or print one.

    A table is a TOML file that maps the tensors of a checkpoint to those of a module. A printed table is a good start
    for one of your own. --transformers lists the tables made from transformers' own conversions; --as prints a
    table as such a conversion, or as vLLM's.

    \b
    Examples:
      porting tables
      porting tables bert > my_table.toml
      porting tables bert --rules
      porting tables my_table.toml --rules
      porting tables --transformers
      porting tables transformers:mixtral
      porting tables my_table.toml --as weight-converter
    """
    with Screen("tables", as_json=as_json) as screen:
        from porting.notation.sections import read_file
        from porting.notation.table import read_table
        from porting.registries import REGISTRY
        from porting.tables import shipped, table_file

        if transformers:
            _list_registry(screen)
            return
        if into is not None:
            _translate(screen, table, into)
            return
        if table is not None and table.startswith(REGISTRY):
            _imported(screen, table, rules=rules)
            return
        if table is None:
            found = [read_table(path) for path in shipped()]
            screen.document(lambda: [_described(one) for one in found])
            _list(screen, found)
            screen.line("and the conversions of transformers: porting tables --transformers")
            screen.line()
            screen.next("tables", found[0].name if found else "--help")
            return
        file = table_file(table)
        then = ["check", "--help"] if rules else ["tables", table, "--rules"]
        _show(screen, read_table(file), read_file(file), then, rules=rules)


def _show(screen: Screen, table: Table, text: str, then: Sequence[str], *, rules: bool) -> None:
    """A table's file as it is, or its rules; ``then`` are the words of the next command."""
    described = [{"rule": str(rule), "where": rule.where} for rule in table.rules]
    screen.document({**_described(table), "rules": described})
    if screen.as_json:
        return
    if rules:
        screen.rows(["rule", "at"], [(str(rule), rule.where) for rule in table.rules])
    else:
        screen.text(safe_lines(text))
    screen.next(*then, aside=not rules)


def _list_registry(screen: Screen) -> None:
    """The entries of transformers' registry."""
    from porting.registries import REGISTRY
    from porting.registries.conversions import entries

    names = [REGISTRY + name for name in entries()]
    screen.document(names)
    for name in names:
        screen.line(name)
    screen.next("tables", names[0])


def _imported(screen: Screen, table: str, *, rules: bool) -> None:
    """The table of an entry of transformers' registry, for its usual config."""
    from porting.notation.table import parse_table
    from porting.registries.wording import imported_text

    text = imported_text(table, {})
    then = ["convert", "./my-checkpoint", "./ported", "--table", table]
    _show(screen, parse_table(text, where=table), text, then, rules=rules)


def _translate(screen: Screen, table: str | None, into: Notation) -> None:
    """A table as Python source of another library's notation."""
    from porting.registries.weight_converters import as_weight_converters
    from porting.registries.weights_mapper import as_weights_mapper
    from porting.tables import find_table

    if table is None:
        message = "--as is for one table"
        raise typer.BadParameter(message)
    translate = as_weight_converters if into is Notation.WEIGHT_CONVERTER else as_weights_mapper
    source = translate(find_table(table, {}))
    screen.document({"table": table, "as": into.value, "source": source})
    screen.text(safe_lines(source + "\n"))
    screen.next("tables", table, "--rules", aside=True)


def _described(table: Table) -> dict[str, object]:
    return {
        "name": table.name,
        "description": table.description,
        "model_types": list(table.model_types),
        "by_name": table.by_name,
        "architectures": [asdict(one) for one in table.architectures],
        "rule_count": len(table.rules),
        "file": table.where,
    }


def _list(screen: Screen, tables: list[Table]) -> None:
    for table in tables:
        screen.line((table.name, "bold"), "  ", table.description)
        screen.facts(
            {
                "  model types": ", ".join(table.model_types) + (" (if asked for by name)" if table.by_name else ""),
                "  architectures": ", ".join(one.name for one in table.architectures),
                "  rules": str(len(table.rules)),
            }
        )
        screen.line()
