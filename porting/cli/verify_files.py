"""``verify-files``: compare the files that ``convert`` wrote with the recorded digests."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from porting.cli import options
from porting.cli.output import DIFFERENT, Screen, file_list, size
from porting.printable import counted


def verify_files(
    folder: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="A directory that porting convert made.")],
    sha256: Annotated[
        bool, typer.Option("--sha256", help="Compare the SHA-256 as well, where it was recorded.")
    ] = False,
    threads: options.Threads = 2,
    as_json: options.Json = False,
) -> None:
    """Read every file that convert wrote, and compare it with the recorded digest.

    Exit code 1: something changed; there is a line for each tensor or file.

    \b
    Examples:
      porting verify-files ./ported
      porting verify-files ./ported --sha256 --json
    """
    with Screen("verify-files", as_json=as_json) as screen:
        from porting.converting.integrity import verify_files as compare

        report = compare(folder, sha256=sha256, threads=threads)
        screen.document({**asdict(report), "path": str(report.path), "same": report.same})
        for problem in report.problems:
            screen.line(("differs: ", "bold red"), problem)
        screen.facts(
            {
                "files": f"{report.files}, {counted(report.tensors, 'tensor')}, {size(report.bytes)}",
                "made by": report.command,
                "not in the record": file_list(report.strangers),
            }
        )
        if report.same:
            screen.line(("every byte is as it was written", "bold green"))
            screen.next("hash", str(folder))
        else:
            screen.next("convert", "--help")  # what was lost has to be made again: the record says how it was made
            raise typer.Exit(DIFFERENT)
