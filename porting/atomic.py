"""Files and directories that appear whole or not at all.

Everything is written to a temporary sibling, flushed to the disk, and renamed; the rename is the moment at
which it comes into being.  A process that dies before leaves a sibling that the next writer sweeps away; one
that is still alive holds a lock on its sibling and is left in peace.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from porting.errors import CheckpointError, Code, Fault, Message, Option
from porting.opening import MORE_FILES, READING, RESERVE, Folder, descriptors_kept, remove_directory
from porting.printable import quote, shell_word
from porting.write_failure import described, longest_name

MARK = ".porting-"
"""Temporary siblings of ``name`` are named ``.name.porting-<random>``."""


SHARED = f"{MARK}convert"
"""The ending of the sibling in which a conversion is made, by one process or several."""


SIBLING = re.compile(rf"\{MARK}([0-9a-f]{{8}}|convert)")
"""The ending that is added to the destination's name."""

ADDED = len(f".{MARK}01234567")
"""Bytes that the name of a temporary sibling has more than its destination's."""

UNFINISHED = "files"
"""The folder of a conversion's temporary directory that becomes the destination."""


def check_destination(path: Path, *, overwrite: bool, sources: Iterable[Path] = (), file: bool = False) -> None:
    """Refuse a destination before anything is written.

    Args:
        overwrite: whether something that stands there may be replaced.
        sources: what the new files are made from; they are never overwritten, and nothing is written into
            them.
        file: a file is to be made, and no directory.

    Raises:
        CheckpointError: the destination exists, is a link, a device, a pipe or a socket, touches a source, or its
            parent does not exist; or it cannot be examined.
    """
    try:
        _check(path, overwrite=overwrite, sources=sources, file=file)
    except OSError as error:  # what stands there is exchanged meanwhile, or may not be looked at
        hint = f"check what `ls -ld {shell_word(path)} {shell_word(path.parent)}` shows"
        raise refused(path, f"cannot be examined: {error.strerror or error}", hint) from error


def _check(path: Path, *, overwrite: bool, sources: Iterable[Path], file: bool) -> None:
    _require_short(path)
    place = Path(os.path.realpath(path.parent), path.name)
    for source in sources:
        home = Path(os.path.realpath(source))
        if place == home or place.is_relative_to(home):
            raise refused(path, f"is or lies inside the source {quote(str(source))}", "choose another destination")
        if home.is_relative_to(place):
            raise refused(path, f"holds the source {quote(str(source))}", "choose another destination")
    if path.is_symlink():
        raise refused(path, f"is a link to {quote(os.readlink(path))}", "remove the link, or pass what it leads to")
    if not path.parent.is_dir():
        raise refused(path, "lies in a directory that does not exist", f"run `mkdir -p {shell_word(path.parent)}`")
    if file and path.is_dir():
        raise refused(path, "is a directory", "pass the path of a file")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise refused(path, "is a device, a pipe or a socket", "choose another destination")
    if path.exists() and not overwrite:
        raise refused(
            path, "exists already", Message("choose another destination, or pass ", Option("overwrite", True))
        )


def _require_short(path: Path) -> None:
    """Refuse a name that is too long, also with what the temporary sibling adds to it."""
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise _too_long(path) from error
    longest, used = longest_name(path.parent), len(os.fsencode(path.name)) + ADDED
    if longest and used > longest:
        message = f"has a name of {used - ADDED} bytes; while it is written, its temporary name has {ADDED} more"
        message += f" (.NAME{MARK}…), and the file system takes names of {longest}"
        raise refused(path, message, f"choose a name of at most {longest - ADDED} bytes")


def _too_long(path: Path) -> CheckpointError:
    """The error for a path that the system does not take."""
    parts, longest = [os.fsencode(part) for part in path.parts], 0
    for parent in path.parents:  # the nearest that is there tells
        longest = longest or longest_name(parent)
    worst = max(parts, key=len)
    if longest and len(worst) > longest:
        message = f"has a name of {len(worst)} bytes, and the file system takes names of {longest}"
        return refused(path, message, "choose a shorter name")
    message = f"has a path of {len(os.fsencode(path))} bytes, which is more than the system takes"
    return refused(path, message, "change into a folder nearer to it, and pass a relative path")


def refused(path: Path, message: str, hint: str | Message) -> CheckpointError:
    """The error for a destination that cannot be written."""
    fault = Fault(code=Code.DESTINATION_REFUSED, where=str(path), message=f"the destination {message}", hint=hint)
    return CheckpointError(fault)


@dataclass
class Writing:
    """The progress of writing.

    Attributes:
        complete: it stands at its path.
    """

    complete: bool = False


@contextmanager
def explained(path: Path, needed: int) -> Iterator[Writing]:
    """Turn a system error while ``path`` is written into an error that says what to do.

    Yields:
        What the block marks as complete once it is: a failure after that has another message.
    """
    writing = Writing()
    try:
        with descriptors_kept(3 * RESERVE):
            pass  # as many are free: whatever is made can be removed
        with descriptors_kept():
            yield writing
    except OSError as error:
        reason, hint = described(error, path.parent, needed)
        if error.errno == errno.EFAULT:  # what is written is mapped from a file, whose end came nearer
            reason, hint = "a file that the values are read from was cut short meanwhile", "restore it, and try again"
        elif error.errno in {errno.EMFILE, errno.ENFILE}:
            hint = MORE_FILES
        left = _abandoned_siblings(path)
        message = f"writing failed{'' if left is None else ', and nothing was left behind'}: {reason}"
        names = ", ".join(map(quote, left or ()))
        if left:
            message = f"writing failed, and {names} was left behind in {path.parent}: {reason}"
            hint += "; the next attempt removes it or goes on from it"
        if writing.complete:
            message = f"it is complete, but its name may not survive a power cut: {reason}"
            message += f"; {names} was left behind in {path.parent}" if left else ""
            hint = "run `sync` once the disk is well, and compare it after the next start (porting verify-files)"
        raise CheckpointError(Fault(code=Code.WRITE_FAILED, where=str(path), message=message, hint=hint)) from error


def _abandoned_siblings(path: Path) -> list[str] | None:
    """The temporary siblings of ``path`` of this user that no writer has locked; None if they cannot be listed."""
    try:
        parent = Folder(path.parent)
        names = [name for name in parent.names() if name.startswith(f".{path.name}{MARK}")]
    except CheckpointError:
        return None
    return sorted(name for name in names if _is_abandoned(parent, name))


def _is_abandoned(parent: Folder, name: str) -> bool:
    try:
        handle = os.open(name, READING | os.O_NOFOLLOW, dir_fd=parent.descriptor)
    except OSError:
        return False
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return name.endswith(SHARED)  # the first process of several holds it for all
    finally:
        os.close(handle)
    return True


@contextmanager
def new_directory(path: Path, *, needed: int, overwrite: bool) -> Iterator[Folder]:
    """Make a temporary directory: it becomes ``path`` when the block succeeds and is removed when it fails.

    Args:
        path: the directory to be made; :func:`check_destination` has approved it.
        needed: bytes that will be written; a disk without room for them fails at once.
        overwrite: whether it may take the place of what stands there.
    """
    with explained(path, needed) as writing:
        sweep(path)
        if shutil.disk_usage(path.parent).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        parent = Folder(path.parent)
        made, lock = _locked_sibling(parent, path)
        name = made.path.name
        own_status: list[os.stat_result] = []
        try:
            own_status.append(os.fstat(lock))
            with descriptors_kept():
                yield made
            _require_same(parent, name, lock, path)
            with suppress(OSError):  # after an exchange this is at the name, and goes last
                own_status.append(parent.status(path.name))
            publish(name, parent, parent, path, overwrite=overwrite, writing=writing)
        finally:
            with suppress(OSError):
                if any(os.path.samestat(parent.status(name), status) for status in own_status):
                    remove_directory(name, parent.descriptor)
            os.close(lock)


def publish(made: str, folder: Folder, parent: Folder, path: Path, *, overwrite: bool, writing: Writing) -> None:
    """Move a complete directory to ``path`` in one step.

    Args:
        made: the directory, by its name in ``folder``; all of it is on the disk.
        folder: the folder that it was made in.
        parent: the folder that ``path`` lies in, as it was opened before anything was written.
        overwrite: whether it may take the place of what stands there, which is then where ``made`` was.  Else what
            appeared there meanwhile is left as it is.
        writing: what :func:`explained` gave; marked as complete.

    Raises:
        CheckpointError: something appeared there meanwhile; or the folder is not at its path any more.
        OSError: it cannot be renamed; or it is complete, and its name may not be on the disk yet.
    """
    sync(Folder(folder.path / made, inside=folder))
    _require_at_its_path(parent, path)
    to = {"src_dir_fd": folder.descriptor, "dst_dir_fd": parent.descriptor}
    try:
        os.rename(made, path.name, **to)  # never onto a directory that holds anything
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            raise
        if not overwrite:
            raise _appeared(path) from error
        _exchange(made, folder, parent, path.name)
    writing.complete = True
    sync(parent)


def _locked_sibling(parent: Folder, path: Path) -> tuple[Folder, int]:
    """Make a temporary directory beside ``path``; returns it, and the descriptor that holds its lock."""
    while True:
        name = f".{path.name}{MARK}{secrets.token_hex(4)}"
        os.mkdir(name, dir_fd=parent.descriptor)
        with suppress(FileNotFoundError):  # swept by another process before it could be locked
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(name, flags, dir_fd=parent.descriptor)
            if _locked(lock):
                try:
                    return _opened_sibling(parent, name, lock, path), lock
                except BaseException:
                    os.close(lock)  # else it would seem to be in use
                    raise


def _opened_sibling(parent: Folder, name: str, lock: int, path: Path) -> Folder:
    """Open a temporary directory that was made and locked.

    Raises:
        CheckpointError: another one stands at its name.
    """
    if os.fstat(lock).st_uid != os.geteuid():
        raise _moved_by_others(path)
    made = Folder(parent.path / name, inside=parent)
    _require_same(parent, name, lock, path, opened=made.descriptor)
    return made


def _require_same(parent: Folder, name: str, lock: int, path: Path, *, opened: int | None = None) -> None:
    """Refuse to go on where another file or directory was put at the name of a temporary one.

    Args:
        lock: a descriptor of what was made, which holds the lock.
        opened: a descriptor of what was opened by the name; None for what stands there now.
    """
    status = parent.status(name) if opened is None else os.fstat(opened)
    if not os.path.samestat(status, os.fstat(lock)):
        raise _moved_by_others(path)


def _moved_by_others(path: Path) -> CheckpointError:
    hint = "choose a destination in a directory that only you can write to"
    return refused(path, "lies in a directory in which another user moved the temporary files", hint)


def _locked(descriptor: int) -> bool:
    """Lock a new sibling; False, and the descriptor closed, if another process is removing it already."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return True
    except BlockingIOError:
        pass
    except BaseException:
        os.close(descriptor)  # else it would seem to be in use
        raise
    os.close(descriptor)
    return False


def sweep(path: Path) -> None:
    """Remove the temporary siblings of ``path`` whose writers have died; interrupted conversions stay.

    That may be hours of work; the next conversion to the same destination goes on from it, and removes it in the end.
    """
    parent = Folder(path.parent)
    for name in parent.names():
        if name.startswith(f".{path.name}{MARK}") and SIBLING.fullmatch(name, len(path.name) + 1):
            with suppress(OSError):
                _sweep_one(parent, name)


def _sweep_one(parent: Folder, name: str) -> None:
    """Remove a temporary sibling if it is this user's directory or file and nobody holds its lock.

    It is checked and emptied through its descriptor: a FIFO does not block, and what takes the name meanwhile stays.
    """
    handle = os.open(name, READING | os.O_NOFOLLOW, dir_fd=parent.descriptor)
    try:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid():
            return
        if stat.S_ISREG(status.st_mode):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=parent.descriptor)
        elif stat.S_ISDIR(status.st_mode):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder = Folder(parent.path / name, inside=parent)
            if _is_unfinished(folder):
                return
            if os.path.samestat(os.stat(".", dir_fd=folder.descriptor), status):
                folder.clear()
                os.rmdir(name, dir_fd=parent.descriptor)
    finally:
        os.close(handle)


def _is_unfinished(folder: Folder) -> bool:
    """Whether a temporary directory holds what an interrupted conversion has written."""
    if not folder.path.name.endswith(SHARED) or folder.kind(UNFINISHED) != "a directory":
        return False
    return bool(Folder(folder.path / UNFINISHED, inside=folder).names())


def _exchange(made: str, folder: Folder, parent: Folder, name: str) -> None:
    """Exchange a directory with the one that has a name in another folder."""
    if _exchanged(made, folder, parent, name):
        return
    into, back = {"dst_dir_fd": parent.descriptor}, {"src_dir_fd": parent.descriptor}
    aside = f".{name}{MARK}{secrets.token_hex(4)}"
    os.rename(name, aside, **into, **back)
    try:
        os.rename(made, name, src_dir_fd=folder.descriptor, **into)
    except OSError:
        os.rename(aside, name, **into, **back)
        raise
    os.rename(aside, made, **back, dst_dir_fd=folder.descriptor)


def _exchanged(made: str, folder: Folder, parent: Folder, name: str) -> bool:
    """Swap two directories in one step, where the system can (Linux: renameat2, RENAME_EXCHANGE)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    exchange, old, new = 2, os.fsencode(made), os.fsencode(name)
    return bool(libc.renameat2(folder.descriptor, old, parent.descriptor, new, exchange) == 0)


def _require_at_its_path(parent: Folder, path: Path) -> None:
    """Refuse to publish where the folder of ``path`` is not the one that was opened."""
    if not os.path.samestat(os.stat(path.parent), os.fstat(parent.descriptor)):
        message = "lies in a directory that was replaced or moved while it was written"
        raise refused(path, message, "try again once nothing moves it")


@contextmanager
def new_file(path: Path, *, size: int, overwrite: bool) -> Iterator[int]:
    """Open a temporary file: it becomes ``path`` when the block succeeds and is removed when it fails.

    Args:
        size: its bytes; they are reserved first, so that a full disk fails before anything is written.
        overwrite: whether it may take the place of what stands there.
    """
    with explained(path, size) as writing:
        sweep(path)
        parent = Folder(path.parent)
        temporary, descriptor = _locked_file(parent, path)
        try:
            reserve(descriptor, size)
            yield descriptor
            os.fsync(descriptor)
            _require_same(parent, temporary, descriptor, path)
            _require_at_its_path(parent, path)
            if overwrite or not _link(parent, temporary, path):
                os.rename(temporary, path.name, src_dir_fd=parent.descriptor, dst_dir_fd=parent.descriptor)
            writing.complete = True
            sync(parent)
        finally:
            try:
                with suppress(FileNotFoundError):
                    if os.path.samestat(parent.status(temporary), os.fstat(descriptor)):
                        os.unlink(temporary, dir_fd=parent.descriptor)
            finally:
                os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all; replaces a regular file and follows no link.

    Raises:
        CheckpointError: something else stands there, there is no such directory, or it cannot be written.
    """
    check_destination(path, overwrite=True, file=True)
    with new_file(path, size=len(content), overwrite=True) as descriptor:
        write_all(descriptor, content)


def _link(parent: Folder, temporary: str, path: Path) -> bool:
    """Give a file a second name, never that of another file; False where the file system has no hard links."""
    try:
        os.link(temporary, path.name, src_dir_fd=parent.descriptor, dst_dir_fd=parent.descriptor, follow_symlinks=False)
    except FileExistsError as error:
        raise _appeared(path) from error
    except OSError as error:
        if error.errno in {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}:
            return False
        raise
    return True


def _appeared(path: Path) -> CheckpointError:
    hint = "it was left as it is: see what wrote it, or choose another destination"
    return refused(path, "appeared while this was being written", hint)


def _locked_file(parent: Folder, path: Path) -> tuple[str, int]:
    """The name of a temporary file beside ``path``, and its descriptor, which holds its lock."""
    while True:
        temporary = f".{path.name}{MARK}{secrets.token_hex(4)}"
        # The mode is less the umask, as for any new file.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o666, dir_fd=parent.descriptor)
        if _locked(descriptor):
            return temporary, descriptor


def reserve(descriptor: int, size: int) -> None:
    """Reserve the space of a file, so that a full disk fails before anything is written."""
    if size and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL}:  # not every file system can
                raise


def write_all(descriptor: int, data: memoryview | bytes) -> None:
    """Write all bytes to a descriptor."""
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while view:
        view = view[os.write(descriptor, view) :]


def write_at(descriptor: int, data: memoryview | bytes, at: int) -> None:
    """Write all bytes at a place of a file."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written


def sync(directory: Folder) -> None:
    """Flush a directory's entries to the disk."""
    descriptor = directory.listing()
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
