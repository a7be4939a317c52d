"""``hash``: one digest for the values of a checkpoint."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from porting.cli import options
from porting.cli.output import Screen, size
from porting.printable import counted


class TableSide(StrEnum):
    """A side of a table."""

    left = "left"
    right = "right"


def hash_(
    source: options.Source = None,
    table: options.TableForNames = None,
    side: Annotated[
        TableSide | None,
        typer.Option("--side", help="The table's side that SOURCE is on.", show_default="the one whose names it has"),
    ] = None,
    values: Annotated[bool, typer.Option("--values", help="Hash the values only, whatever their dtype.")] = False,
    threads: options.Threads = 2,
    tensors: Annotated[bool, typer.Option("--tensors", help="Print the text that is hashed.")] = False,
    as_json: options.Json = False,
) -> None:
    """Compute one digest of a checkpoint's values, whatever files they are stored in.

    Names, dtypes, shapes and values are hashed; shards, order, metadata and file format are not. With a table, the
    names and layouts of its left side are hashed, so a checkpoint and its port have the same digest.

    \b
    Examples:
      porting hash ./my-checkpoint
      porting hash ./my-port --table my_table.toml
      porting hash ./my-checkpoint --tensors | sha256sum
    """
    with Screen("hash", as_json=as_json) as screen:
        from porting.checkpoint import open_checkpoint
        from porting.comparing.digests import digest
        from porting.errors import Code

        checkpoint = open_checkpoint(options.checkpoint_source(source))
        with screen.working("reading") as tell:
            found = digest(
                checkpoint,
                table,
                side=None if side is None else side.value,
                values=values,
                threads=threads,
                progress=tell,
            )
        screen.document(
            {
                "digest": str(found),
                "values": found.values,
                "bytes": found.nbytes,
                "left_out": found.left_out,
                "tensors": [vars(one) for one in found.tensors],
            }
        )
        for warning in checkpoint.warnings:
            if warning.code is Code.NOT_READ:
                screen.warn(warning.line)
        if tensors and not as_json:
            screen.text(found.text)
            return
        screen.line((str(found), "bold"), "  ", f"{counted(len(found.tensors), 'tensor')}, {size(found.nbytes)}")
        for name, reason in found.left_out.items():
            screen.warn(f"{name} has no part in it: {reason}")
        screen.next("diff", "--help")
