"""Several processes that convert together, forked from one so that torch is imported once.

    python -m tests.converting.ranks SOURCE DESTINATION TABLE SIZE VICTIM HOW [TO]

Each writes a line: its rank, how many tensors and bytes it saw to, and ``done`` or its error.  The process of rank
``VICTIM`` is killed when it has made three tensors (``HOW`` is ``killed``), or cannot read any more (``fails``), or has
another source (``strays``), or finds another folder where the destination's was (``led``), or cannot write its journal
while the others are slower (``early``), or is ended there by what is no Exception (``exits``).
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from porting.converting import writing
from porting.converting.conversion import convert
from porting.converting.journal import Journal
from porting.converting.making import Made, Maker
from porting.converting.workplace import JOURNALS, Workplace
from porting.errors import PortingError
from porting.notation.table import parse_table
from porting.opening import Folder
from porting.plan.recipe import Recipe


def main(source: Path, destination: Path, table: Path, size: int, victim: int, how: str, to: str | None) -> int:
    """Fork, convert and wait: the number of processes that did not end well."""
    meeting = destination.parent / f"{destination.name}.meeting"
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = work(source, destination, table, rank, size, how if victim == rank else "", to, meeting, how)
            finally:
                sys.stdout.flush()
                os._exit(status)
        children.append(child)
    failed = sum(os.waitpid(child, 0)[1] != 0 for child in children)
    meeting.unlink(missing_ok=True)
    return failed


def fail_early(how: str, destination: Path, *, first: bool) -> None:
    """Let the first process fail before the others open the folder of the journals, or the one that it lies in."""
    if how not in {"early", "exits"}:
        return

    def journal(*_: object) -> Journal:
        if how == "exits":
            raise SystemExit(0)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = destination.with_name(f".{destination.name}.porting-convert")

    def wait(seconds: int) -> None:
        """Wait until the first process has removed the folder; if it waits for this one, it does not."""
        for _ in range(10 * seconds):
            if not folder.exists():
                break
            time.sleep(0.1)

    def inode(place: Workplace) -> int:
        wait(1)
        return os.fstat(place.folder.descriptor).st_ino

    def journals(place: Workplace) -> Folder:
        wait(5)
        return Folder(place.root / JOURNALS, inside=place.folder)

    if first:
        writing.Journal = journal  # type: ignore[assignment, attr-defined]  # in a process of its own
    else:
        Workplace.inode = property(inode)  # type: ignore[assignment, method-assign]  # as above
        Workplace.journals = property(journals)  # type: ignore[assignment]  # as above


def work(
    source: Path,
    destination: Path,
    table: Path,
    rank: int,
    size: int,
    how: str,
    to: str | None,
    meeting: Path,
    slowed: str,
) -> int:
    """What one process does."""
    meet = f"file://{meeting}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=size, timeout=timedelta(minutes=30))
    made: list[int] = []
    real = Maker.make

    def make(self: Maker, recipe: Recipe, target: int, at: int) -> Made:
        if how == "killed" and len(made) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "fails" and len(made) == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        made.append(recipe.nbytes)
        return real(self, recipe, target, at)

    Maker.make = make  # type: ignore[method-assign]  # in a process of its own
    fail_early(slowed, destination, first=rank == 0)
    try:
        place = source.parent / "nowhere" if how == "strays" else source
        destination = destination.parent / "elsewhere" / destination.name if how == "led" else destination
        done = convert(place, destination, parse_table(table.read_text()), shard_size=40_000, threads=1, to=to)
        sys.stdout.write(f"{rank} {len(made)} {sum(made)} done {done.tensors}\n")
    except PortingError as error:
        sys.stdout.write(f"{rank} {len(made)} {sum(made)} {error}\n")
        return 2
    except SystemExit as error:
        sys.stdout.write(f"{rank} {len(made)} {sum(made)} exit {error.code}\n")
        return 2
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    given = sys.argv[1:]
    first, second, third = map(Path, given[:3])
    sys.exit(main(first, second, third, int(given[3]), int(given[4]), given[5], given[6] if given[6:] else None))
