"""Every conversion of the gallery, against the code that it was written after: ``make conversions``.

python -m scripts.conversions SOURCES                 # all of them, from code that is there
python -m scripts.conversions SOURCES --fetch         # install that code there first
python -m scripts.conversions SOURCES litgpt_falcon   # some, by the names of their tables
python -m scripts.conversions SOURCES --write         # and write docs/conversions.md

SOURCES is a folder of yours.  The packages of ``scripts/conversions/requirements.txt`` are installed there without what
they depend on, and files that no package has are taken from GitHub; only the functions that convert are run.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Annotated
from urllib.request import urlopen

import torch
import typer

from scripts.conversions.case import PINNED, SCRIPTS, Sources
from scripts.conversions.gallery import MAKERS, PAGE, REQUIREMENTS, Row, render
from scripts.conversions.trial import EXACT, try_case

RAW = "https://raw.githubusercontent.com"


def main(
    folder: Annotated[Path, typer.Argument(help="the folder of the projects' code")],
    names: Annotated[list[str] | None, typer.Argument(help="tables")] = None,
    *,
    fetch: Annotated[bool, typer.Option(help="install the code first")] = False,
    write: Annotated[bool, typer.Option(help="write docs/conversions.md")] = False,
    github: Annotated[str, typer.Option(help="the URL of repositories' files")] = RAW,
) -> None:
    """Try conversions."""
    if fetch:
        install(folder)
        take_files(folder, github)
    rows: list[Row] = []
    for maker in MAKERS:
        torch.manual_seed(0)
        try:
            case = maker(Sources(folder))
        except FileNotFoundError:
            if names:  # the code of the others need not be there
                continue
            raise
        if names and case.table not in names:
            continue
        row = Row(case=case, outcome=try_case(case), version=case.version or _version(folder, case.project))
        rows.append(row)
        one = row.outcome
        sys.stdout.write(f"{case.table}: {one.verdict}, {case.lines} lines of theirs, {one.lines} of ours\n")
        for label, found in (("forward", one.forward), ("back", one.back), ("their way back", one.own_back)):
            if found not in ("", EXACT):
                sys.stdout.write(f"  {label}: {found[:600]}\n")
    if left := sorted({*(names or ())} - {row.case.table for row in rows}):
        raise typer.BadParameter(f"{', '.join(left)}: no table of that name, or {folder} lacks its code (--fetch)")
    exact = sum(row.outcome.verdict == EXACT for row in rows)
    sys.stdout.write(f"{exact} of {len(rows)} exact in both directions\n")
    if write:
        PAGE.write_text(render(rows), encoding="utf-8")
    raise typer.Exit(any(row.outcome.forward != EXACT for row in rows))


def install(folder: Path) -> None:
    """Install the projects' packages into the folder, and unpack the release of transformers that has scripts."""
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "install", "--no-deps", "--target", folder, "-r", REQUIREMENTS], check=True)
    release = SCRIPTS.replace("-", "==")
    subprocess.run([*pip, "download", "--no-deps", "-d", folder, release], check=True)
    (wheel,) = folder.glob(f"{SCRIPTS}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / SCRIPTS)


def take_files(folder: Path, github: str) -> None:
    """Take the files of :data:`PINNED` from their repositories.

    Args:
        folder: where they go.
        github: the URL under which files lie, by repository, commit and path.
    """
    for name, pinned in PINNED.items():
        for path, target in pinned.files.items():
            place = folder / name / target
            place.parent.mkdir(parents=True, exist_ok=True)
            with urlopen(f"{github}/{pinned.repository}/{pinned.commit}/{path}") as found:  # noqa: S310  # as asked for
                place.write_bytes(found.read())


def _version(folder: Path, project: str) -> str:
    if project == "transformers":
        return SCRIPTS.rpartition("-")[2]
    found = sorted(folder.glob(f"{project.replace('-', '_')}-*.dist-info"))
    return found[0].name.removesuffix(".dist-info").rpartition("-")[2] if found else ""


if __name__ == "__main__":
    typer.run(main)
