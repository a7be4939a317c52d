"""The temporary directory of a conversion, beside the destination, which it becomes at the end.

``.NAME.porting-convert`` holds the new directory as ``files``, and beside it the journal.  A process that works in it
holds a lock on it.  A process that dies leaves it behind; the next conversion to the same destination continues from
there, or starts again if it is another conversion.

Its name can be predicted, and its parent folder may be shared.  So an existing directory is used only if it belongs to
this user, no other user can write to it, and it holds plain files only.  Everything in it is opened relative to its
descriptor without following links, so that nothing outside of it is written or removed, whatever happens to its name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from porting.atomic import SHARED, UNFINISHED, Writing, reserve, sweep, write_at
from porting.checkpoint.errors import CheckpointError, checkpoint_error
from porting.errors import Code, Fault, RankError
from porting.opening import Folder, close, descriptors_kept, kind_of, remove_directory
from porting.printable import quote

OWNER, FILES, JOURNALS = "owner", UNFINISHED, "journals"

REPLACED = "replaced"
"""The folder with what stood at the destination, once it was exchanged for the new directory."""

EXPECTED = re.compile(rf"{OWNER}|{FILES}/.+|{JOURNALS}/[0-9]+\.jsonl", re.DOTALL)
"""The files that a workplace may have."""


class Workplace:
    """A temporary directory that this process, or another one of its group, has locked.

    Args:
        parent: the folder that it lies in, and the destination.
        root: the directory; None to open it when it is used first.
        untouched: whether it is still as an earlier process left it.

    Attributes:
        path: the destination.
        root: the directory's path.
        untouched: as above; set to False before something is written in it.
    """

    def __init__(self, path: Path, parent: Folder, root: Folder | None = None, *, untouched: bool = False) -> None:
        self.root = root_of(path)
        self._parent = parent
        self.untouched = untouched
        self.path = path
        self._folder = root

    @cached_property
    def folder(self) -> Folder:
        """The directory."""
        if self._folder is None:
            self._folder = Folder(self.root, inside=self._parent)
            _require_ours(self._folder, self.path)
        return self._folder

    @property
    def inode(self) -> int:
        """The directory's inode, which is the same on all machines that share it."""
        return os.fstat(self.folder.descriptor).st_ino

    def was_removed(self) -> bool:
        """Whether the directory was opened, and does not exist any more."""
        return self._folder is not None and os.fstat(self._folder.descriptor).st_nlink == 0

    @cached_property
    def files(self) -> Folder:
        """The directory that is to become the destination."""
        return Folder(self.root / FILES, inside=self.folder)

    @cached_property
    def journals(self) -> Folder:
        """The folder of the journals."""
        return Folder(self.root / JOURNALS, inside=self.folder)

    def clear(self) -> None:
        """Remove all files, to start again."""
        self.untouched = False
        self.files.clear()
        self.journals.clear()

    def open(self, name: str, size: int) -> int:
        """Open a file of that many bytes, and reserve its space on the disk."""
        descriptor = self.files.write(name)
        try:
            if os.fstat(descriptor).st_size != size:
                os.ftruncate(descriptor, size)
            reserve(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def write(self, name: str, raw: bytes) -> None:
        """Write a small file, and flush it to the disk."""
        descriptor = self.files.write(name)
        try:
            os.ftruncate(descriptor, 0)
            write_at(descriptor, raw, 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def root_of(path: Path) -> Path:
    """The temporary directory of a destination."""
    return path.parent / f".{path.name}{SHARED}"


@contextmanager
def workplace(path: Path, writing: Writing, *, first: bool = True) -> Iterator[Workplace]:
    """Lock the temporary directory of a destination; it is removed afterwards.

    It stays when the user interrupts, and after an error while it still is as an earlier process left it: what that
    process did is not lost for a reason that has nothing to do with it.

    What dead processes left beside the destination is swept first.

    Args:
        writing: what :func:`explained` gave, with the folder that the destination lies in.
        first: whether this process is the first of those that work there together, and holds the lock for all.
    """
    if not first:
        place = Workplace(path, writing.parent)
        try:
            yield place
        except (CheckpointError, OSError) as error:
            if place.was_removed():  # what could not be done for that reason is no cause
                message = "rank 0 ended first and removed the temporary files"
                hint = "its own message says why; the same command begins anew"
                raise RankError(Fault(code=Code.RANK_LOST, where=str(path), message=message, hint=hint)) from error
            raise
        return
    parent = writing.parent
    folder, lock, made = _locked(writing, path)
    place = Workplace(path, parent, folder, untouched=not made)
    try:
        with descriptors_kept():
            sweep(parent, path.name)
            yield place
    except (KeyboardInterrupt, RankError):
        raise  # the same command goes on from here
    except BaseException:
        if not place.untouched:
            _remove(folder, writing)
        raise
    else:
        _remove(folder, writing)
    finally:
        close(lock)


def _remove(folder: Folder, writing: Writing) -> None:
    """Remove the directory; another one that took its name meanwhile is removed only if it is empty."""
    writing.temporary = folder.path.name
    with suppress(CheckpointError, OSError):
        writing.own.append(os.fstat(folder.descriptor))
        folder.clear()
        os.rmdir(folder.path.name, dir_fd=writing.parent.descriptor)


def _locked(writing: Writing, path: Path) -> tuple[Folder, int, bool]:
    """Open or make the directory; returns it, the descriptor that holds its lock, and whether it was made."""
    name, parent = root_of(path).name, writing.parent.descriptor
    while True:
        made = False
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
            made = True
        try:
            entered = _entered(writing, path, made=made)
        except BaseException:
            if made:
                writing.temporary = name
                with suppress(OSError):
                    os.rmdir(name, dir_fd=parent)
            raise
        if entered is not None:
            return (*entered, made)


def _entered(writing: Writing, path: Path, *, made: bool) -> tuple[Folder, int] | None:
    """Open, lock and prepare the directory; None if another process removed it meanwhile."""
    root, parent = root_of(path), writing.parent
    kind = parent.kind(root.name)
    if not kind:
        return None
    if kind != "a directory":
        raise _not_ours(path, f"is {kind}")
    try:
        folder = Folder(root, inside=parent)
        lock = folder.listing()
    except (CheckpointError, OSError):
        if parent.kind(root.name) != kind:
            return None
        raise
    try:
        if not made:
            _require_ours(folder, path)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), parent.status(root.name)):
                _prepare(folder, writing, path, made=made)
                return folder, lock
    except BlockingIOError as error:
        close(lock)
        raise _busy(folder, path) from error
    except BaseException:
        close(lock)
        raise
    close(lock)
    return None


def _prepare(folder: Folder, writing: Writing, path: Path, *, made: bool) -> None:
    """Prepare the directory's folders; of an existing one, all content is checked before anything is written."""
    if not made:
        if folder.kind(REPLACED) == "a directory":  # a process died behind the exchange; it may hold links, or anything
            remove_directory(REPLACED, folder.descriptor)
        _require_plain(folder, path)
    try:
        with descriptors_kept():
            for name in (FILES, JOURNALS):
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=folder.descriptor)
            descriptor = folder.write(OWNER)
            try:
                os.ftruncate(descriptor, 0)
                write_at(descriptor, f"process {os.getpid()}\n".encode(), 0)
            finally:
                os.close(descriptor)
    except BaseException:
        if made:
            _remove(folder, writing)
        raise


def _require_ours(folder: Folder, path: Path) -> None:
    """Raises: CheckpointError if another user made the directory, or can write to it."""
    status = os.stat(".", dir_fd=folder.descriptor)
    if status.st_uid != os.geteuid():
        raise _not_ours(path, f"belongs to the user {status.st_uid}, and you are {os.geteuid()}")
    if status.st_mode & 0o022:
        raise _not_ours(path, "can be written to by other users")


def _require_plain(folder: Folder, path: Path) -> None:
    """Raises: CheckpointError when the directory holds something that a conversion does not put there."""
    own = os.geteuid()
    reachable = os.stat(".", dir_fd=folder.descriptor).st_mode & 0o077
    for name in folder.names():
        status = folder.status(name)
        if name in {FILES, JOURNALS} and stat.S_ISDIR(status.st_mode):
            if status.st_uid != own or (reachable and status.st_mode & 0o022):
                raise _not_ours(path, f"holds {quote(name)}, which other users can write to")
            inside = Folder(folder.path / name, inside=folder)
            strange = {f"{name}/{inner}": inside.status(inner) for inner in inside.names()}
        else:
            strange = {name: status}
        for shown, entry in strange.items():
            if not stat.S_ISREG(entry.st_mode):
                raise _not_ours(path, f"holds {kind_of(entry)}, {quote(shown)}")
            if entry.st_nlink != 1 or entry.st_uid != own:
                raise _not_ours(path, f"holds {quote(shown)}, which is another file as well or another user's")
            if not EXPECTED.fullmatch(shown):
                raise _not_ours(path, f"holds a file {quote(shown)}, which no conversion puts there")


def _not_ours(path: Path, message: str) -> CheckpointError:
    return checkpoint_error(
        Code.DESTINATION_REFUSED,
        str(path),
        f"the directory that it would be made in, {root_of(path)}, {message}",
        "see who made it, and remove it; or choose a destination in a folder that only you can write to",
    )


def _busy(folder: Folder, path: Path) -> CheckpointError:
    try:
        owner = folder.read(OWNER, limit=1000).decode(errors="replace").strip()[:40]
    except CheckpointError:
        owner = ""
    return checkpoint_error(
        Code.DESTINATION_BUSY,
        str(path),
        f"{owner or 'another process'} is converting into this destination",
        "wait until it has finished, or choose another destination",
    )


def require_room(folder: Folder, needed: int) -> None:
    """Require that the disk of a folder has room for ``needed`` more bytes."""
    if shutil.disk_usage(folder.descriptor).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
