"""Commands that look and change nothing: ``inspect``, ``tables`` and ``explain``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from porting.cli import options
from porting.cli.screen import Screen, counted, size
from porting.errors import Code, nearest
from porting.printable import safe_lines

if TYPE_CHECKING:
    from porting.checkpoint import Inspection
    from porting.notation.table import Table

TableArgument = Annotated[
    str | None,
    typer.Argument(metavar="TABLE", help="A shipped table's name, or a TOML file.", show_default="list all"),
]
Codes = Annotated[
    list[str] | None, typer.Argument(metavar="CODE", help="The code of a fault.", show_default="list all")
]
Rules = Annotated[bool, typer.Option("--rules", help="The rules as they were understood, with their place.")]


def inspect(source: options.Source = None, as_json: options.Json = False) -> None:
    """What is in a checkpoint: names, shapes, dtypes and bytes.

    Only headers are read; of a model on the hub only they are fetched, by range requests. Tensors whose names differ
    in numbers only share a line: layer.{0..11}.weight stands for twelve.

    \b
    Examples:
      porting inspect
      porting inspect ./my-checkpoint
      porting inspect google-bert/bert-base-uncased
      porting inspect google-bert/bert-base-uncased@main --json
    """
    with Screen("inspect", as_json=as_json) as screen:
        from porting.checkpoint import inspect_checkpoint

        with screen.working("reading headers"):
            found = inspect_checkpoint(options.where(source))
        screen.document(found.to_dict())
        _show(screen, found)
        for warning in found.warnings:
            screen.warn(warning)
        headers_only = options.given(**{"headers-only": found.commit is not None})  # on the hub: no weight is fetched
        if _is_port(source):
            screen.next("verify-files", *options.again(source))
        else:
            screen.next(*(["check", *options.again(source), *headers_only] if _has_table(found) else ["tables"]))


def _is_port(source: str | None) -> bool:
    """Whether a conversion made it: its names are those of a port, which no table reads."""
    from porting.converting.record import RECORD, read_record
    from porting.opening import Folder

    if source is None or not (Path(source) / RECORD).is_file():
        return False
    record = read_record(Folder(Path(source)))
    return record is not None and not record.content.get("reverse")


def _has_table(found: Inspection) -> bool:
    from porting.notation.faults import TableError
    from porting.tables import find_table

    try:
        find_table(None, {"model_type": found.model_type})
    except TableError:
        return False
    return True


def _show(screen: Screen, found: Inspection) -> None:
    commit = f" at commit {found.commit}" if found.commit else ""
    screen.facts(
        {
            "checkpoint": found.location + commit,
            "model_type": found.model_type or "config.json names none",
            "architectures": ", ".join(found.architectures),
            "files": ", ".join(f"{file.name} ({file.format}, {size(file.size)})" for file in found.files),
            "tensors": f"{found.count:,}, {counted(found.parameters, 'element')}, {size(found.nbytes)}",
        }
    )
    screen.line()
    screen.rows(
        ["tensor", "shape", "dtype", "count", "bytes"],
        [(one.pattern, str(list(one.shape)), one.dtype, f"{one.count:,}", size(one.nbytes)) for one in found.groups],
        right=["count", "bytes"],
    )
    for names in found.shared:
        screen.line(f"one storage: {', '.join(names)}")
    screen.line()


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
            screen.document([_described(one) for one in found])
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


def explain(codes: Codes = None, as_json: options.Json = False) -> None:
    """What a fault means, why it is one, and how to mend it.

    Its code stands in square brackets at the end of the line of an error. Without a code, all of them are listed.

    \b
    Examples:
      porting explain unread-tensor
      porting explain missing-member no-target
      porting explain
    """
    with Screen("explain", as_json=as_json) as screen:
        from porting.explanations import explanation

        known = [one.value for one in Code]
        for one in codes or ():
            if one not in known:
                raise typer.BadParameter(f"no fault has the code {one!r}. {nearest(one, known).capitalize()}".strip())
        found = {code: explanation(Code(code)) for code in codes or known}
        screen.document(found)
        if not codes:
            screen.rows(["", ""], [(code, _first_sentence(text)) for code, text in found.items()])
            screen.next("explain", known[0])
            return
        for code, text in found.items():
            screen.line((code, "bold"))
            for line in _plain(text).splitlines():
                screen.line(f"  {line}" if line else "")
            screen.line()
        screen.next("explain")


def _first_sentence(markdown: str) -> str:
    return _plain(markdown.partition("\n")[0]).partition(". ")[0].removesuffix(".")


def _plain(markdown: str) -> str:
    """A section without its marks."""
    words = markdown.replace("```\n", "").replace("```", "").replace("`", "").replace("**", "")
    return words.removeprefix("What \u2014 ").replace(" \u2014 ", ": ", 3)
