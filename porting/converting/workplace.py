"""The temporary directory in which a conversion is made, beside the destination, and its becoming the destination.

``.NAME.porting-convert`` holds the new directory as ``files``, and beside it the journal.  Whoever works in it holds
a lock on it.  A process that dies leaves it behind, and the next conversion to the same destination goes on from there
or, when it is another conversion, begins anew.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from porting.checkpoint.atomic import MARK, reserve, sweep
from porting.checkpoint.errors import CheckpointError
from porting.converting.positioned import write_at
from porting.converting.team import TeamError
from porting.errors import Code, Fault

OWNER = "owner"


class Workplace:
    """A temporary directory that this process has locked.

    Attributes:
        root: the directory.
        files: the directory that is to become the destination.
        journals: the folder of the journals.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = root / "files"
        self.journals = root / "journals"

    def clear(self) -> None:
        """Begin anew."""
        for place in (self.files, self.journals):
            if place.exists():
                shutil.rmtree(place)
            place.mkdir()

    def open(self, name: str, size: int) -> int:
        """A descriptor of a file of that many bytes, whose room on the disk is reserved."""
        descriptor = os.open(self.files / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if os.fstat(descriptor).st_size != size:
                os.ftruncate(descriptor, size)
            reserve(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def write(self, name: str, raw: bytes) -> None:
        """Write a small file, and see it reach the disk."""
        descriptor = os.open(self.files / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            write_at(descriptor, raw, 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def root_of(path: Path) -> Path:
    """The temporary directory of a destination."""
    return path.parent / f".{path.name}{MARK}convert"


@contextmanager
def workplace(path: Path, *, first: bool = True) -> Iterator[Workplace]:
    """The locked temporary directory of a destination; removed afterwards, except when the user interrupts.

    What dead processes left beside the destination is swept first.

    Args:
        path: the destination.
        first: whether this process is the first of those that work there together, and holds the lock for all.

    Raises:
        CheckpointError: another process is at work on the same destination: which.
    """
    root = root_of(path)
    if not first:
        yield Workplace(root)
        return
    lock = _locked(root, path)
    try:
        sweep(path)
        yield Workplace(root)
    except (KeyboardInterrupt, TeamError):
        raise  # the same command goes on from here
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    else:
        shutil.rmtree(root, ignore_errors=True)
    finally:
        os.close(lock)


def _locked(root: Path, path: Path) -> int:
    while True:
        with suppress(FileExistsError):
            root.mkdir()
        try:
            lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # swept by another process meanwhile
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise _busy(root, path) from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(root, follow_symlinks=False)):
                break
        os.close(lock)
    try:
        (root / OWNER).write_text(f"process {os.getpid()}\n", encoding="utf-8")
        for name in ("files", "journals"):
            (root / name).mkdir(exist_ok=True)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        os.close(lock)
        raise
    return lock


def _busy(root: Path, path: Path) -> CheckpointError:
    try:
        who = (root / OWNER).read_text(encoding="utf-8", errors="replace").strip()[:40]
    except OSError:
        who = ""
    return CheckpointError(
        Fault(
            code=Code.DESTINATION_BUSY,
            where=str(path),
            message=f"{who or 'another process'} is converting into this destination",
            hint="wait until it has finished, or choose another destination",
        )
    )


def require_room(root: Path, needed: int) -> None:
    """See that the disk has room for ``needed`` more bytes.

    Raises:
        OSError: it has not.
    """
    if shutil.disk_usage(root).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
