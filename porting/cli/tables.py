"""``tables``: the tables that ship with the library."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from porting.cli import options
from porting.cli.output import Screen
from porting.printable import safe_lines

if TYPE_CHECKING:
    from porting.notation.table import Table

TableArgument = Annotated[
    str | None,
    typer.Argument(metavar="TABLE", help="A shipped table's name, or a TOML file.", show_default="list all"),
]

Rules = Annotated[bool, typer.Option("--rules", help="The rules as they were understood, with their place.")]


def tables(
    table: TableArgument = None,
    rules: Rules = False,
    as_json: options.Json = False,
) -> None:
    """The tables that ship with the library, or one of them.

    A table says in TOML which tensor of a checkpoint goes where in a module. With a name, its file is printed as it
    is: a good beginning for a table of your own.

    \b
    Examples:
      porting tables
      porting tables bert > my_table.toml
      porting tables bert --rules
      porting tables my_table.toml --rules
    """
    with Screen("tables", as_json=as_json) as screen:
        from porting.notation.sections import read_file
        from porting.notation.table import read_table
        from porting.tables import shipped, table_file

        if table is None:
            found = [read_table(path) for path in shipped()]
            screen.document(lambda: [_described(one) for one in found])
            _list(screen, found)
            screen.next("tables", found[0].name if found else "--help")
            return
        file = table_file(table)
        one = read_table(file)
        screen.document({**_described(one), "rules": [{"rule": str(rule), "where": rule.where} for rule in one.rules]})
        if as_json:
            return
        if rules:
            screen.rows(["rule", "at"], [(str(rule), rule.where) for rule in one.rules])
            screen.next("tables", table)
        else:
            screen.text(safe_lines(read_file(file)))
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
