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
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from porting.errors import CheckpointError, Code, Fault, Message, Option, PortingWarning
from porting.opening import MORE_FILES, READING, RESERVE, Folder, close, descriptors_kept, remove_directory
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
    """Refuse a destination before anything is written; commands call it before they begin to work.

    Args:
        sources: what the new files are made from; they are never overwritten, and nothing is written into
            them.
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
    try:
        _require_writable(path)
    except OSError as error:
        reason, hint = described(error, path.parent)
        raise refused(path, f"cannot be written: {reason}", hint) from error


def check_page(path: Path | None, ending: str) -> None:
    """Refuse the destination of a page or a picture, which replaces what is there, before the work that it shows.

    Args:
        path: None for no page.
        ending: of its name, so that a mistyped path replaces no weights.
    """
    if path is None:
        return
    if path.suffix.lower() != ending:
        raise refused(path, f"does not end in {ending}", f"name it {quote(path.stem + ending)}, for one")
    check_destination(path, overwrite=True, file=True)


def _require_writable(path: Path) -> None:
    """Make a file beside a path and remove it; without a name, where the file system can.

    Permissions, attributes, quotas and mounts are more than ``os.access`` knows of.  Whatever takes the folder's name
    meanwhile, nothing is made or removed in another one.
    """
    folder = os.open(os.fspath(path.parent), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        nameless = getattr(os, "O_TMPFILE", 0)  # Linux
        if nameless:
            try:
                close(os.open(".", nameless | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=folder))
            except OSError as error:
                if error.errno not in {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}:
                    raise
            else:
                return
        name = f".{path.name}{MARK}{secrets.token_hex(4)}"  # the next writer removes it, if this one dies
        close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder))
        os.unlink(name, dir_fd=folder)
    finally:
        close(folder)


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
        parent: the folder that its path lies in, opened once: whatever takes the folder's name later, nothing else
            is written to.
        complete: it stands at its path.
        temporary: the name in ``parent`` of the file or directory in which it is made; empty while there is none, and
            where it is to stay.
        own: what may stand at that name; empty where it could not be examined.
    """

    parent: Folder
    complete: bool = False
    temporary: str = ""
    own: list[os.stat_result] = field(default_factory=list)


@contextmanager
def explained(path: Path, needed: int) -> Iterator[Writing]:
    """Turn a system error while ``path`` is written into an error that says what to do.

    Temporary files that could not be removed are named by that error, or else by a warning.

    Yields:
        What the block marks as complete once it is: a failure after that has another message.
    """
    writing = Writing(Folder(path.parent))
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
        left = _abandoned_siblings(writing.parent, path.name)
        remains = f", and {', '.join(map(quote, left))} was left behind in {path.parent}" if left else ""
        if left is None and writing.temporary:
            remains = f", and {quote(writing.temporary)} may have been left behind in {path.parent}"
        message = f"writing failed{', and nothing was left behind' if left == [] else remains}: {reason}"
        hint += "; the next attempt removes it or goes on from it" if remains else ""
        if writing.complete:
            message = f"it is complete, but its name may not survive a power cut: {reason}{remains}"
            hint = "run `sync` once the disk is well, and compare it after the next start (porting verify-files)"
        raise CheckpointError(Fault(code=Code.WRITE_FAILED, where=str(path), message=message, hint=hint)) from error
    except BaseException:
        _warn_of_remains(writing, path)
        raise
    _warn_of_remains(writing, path)


def _warn_of_remains(writing: Writing, path: Path) -> None:
    """Warn of a temporary file or directory that could not be removed."""
    said = ""
    try:
        if writing.temporary:
            status = writing.parent.status(writing.temporary)
            own = not writing.own or any(os.path.samestat(status, one) for one in writing.own)
            said = "was left behind" if own else ""
    except FileNotFoundError:
        return
    except OSError:
        said = "may have been left behind"
    if said:
        state = "is complete" if writing.complete else "was not written"
        message = f"{path} {state}, and {quote(writing.temporary)} {said} in {path.parent}"
        warnings.warn(f"{message}; the next attempt removes it", PortingWarning, stacklevel=2)


def _abandoned_siblings(parent: Folder, destination: str) -> list[str] | None:
    """The temporary siblings of a destination of this user that no writer has locked; None if that is not known."""
    try:
        names = [name for name in parent.names() if name.startswith(f".{destination}{MARK}")]
        return sorted(name for name in names if _is_abandoned(parent, name))
    except (CheckpointError, OSError):
        return None


def _is_abandoned(parent: Folder, name: str) -> bool:
    """Whether this user's temporary file or directory is locked by no writer."""
    try:
        if parent.status(name).st_uid != os.geteuid():
            return False
        handle = os.open(name, READING | os.O_NOFOLLOW, dir_fd=parent.descriptor)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ELOOP, errno.ENXIO}:  # gone; or a link or a socket, which is no sibling
            return False
        raise
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return name.endswith(SHARED)  # the first process of several holds it for all
    finally:
        close(handle)
    return True


@contextmanager
def new_directory(path: Path, *, needed: int, overwrite: bool) -> Iterator[Folder]:
    """Make a temporary directory: it becomes ``path`` when the block succeeds and is removed when it fails.

    Args:
        path: the directory to be made; :func:`check_destination` has approved it.
        needed: bytes that will be written; a disk without room for them fails at once.
    """
    with explained(path, needed) as writing:
        parent = writing.parent
        sweep(parent, path.name)
        if shutil.disk_usage(parent.descriptor).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        made, lock = _locked_sibling(writing, path)
        name = made.path.name
        try:
            writing.own.append(os.fstat(lock))
            with descriptors_kept():
                yield made
            _require_same(parent, name, lock, path)
            with suppress(OSError):  # after an exchange this is at the name, and goes last
                writing.own.append(parent.status(path.name))
            publish(name, parent, path, overwrite=overwrite, writing=writing)
        finally:
            with suppress(OSError):
                if any(os.path.samestat(parent.status(name), status) for status in writing.own):
                    remove_directory(name, parent.descriptor)
            close(lock)


def publish(made: str, folder: Folder, path: Path, *, overwrite: bool, writing: Writing, replaced: str = "") -> None:
    """Move a complete directory to ``path`` in one step.

    Args:
        made: the directory, by its name in ``folder``; all of it is on the disk.
        overwrite: whether it may take the place of what stands there, which is then where ``made`` was.  Else what
            appeared there meanwhile is left as it is.
        writing: what :func:`explained` gave, with the folder that ``path`` lies in; marked as complete.
        replaced: the name in ``folder`` that ``made`` gets before an exchange, and so what stood there has after it: a
            process that dies then leaves nothing that could be taken for its work.  Empty for the same name.
    """
    parent = writing.parent
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
        if replaced:
            os.rename(made, replaced, src_dir_fd=folder.descriptor, dst_dir_fd=folder.descriptor)
        _exchange(replaced or made, folder, parent, path.name)
    writing.complete = True
    sync(parent)


def _locked_sibling(writing: Writing, path: Path) -> tuple[Folder, int]:
    """Make a temporary directory beside ``path``; returns it, and the descriptor that holds its lock."""
    parent = writing.parent
    while True:
        writing.temporary = name = f".{path.name}{MARK}{secrets.token_hex(4)}"
        os.mkdir(name, dir_fd=parent.descriptor)
        with suppress(FileNotFoundError):  # swept by another process before it could be locked
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(name, flags, dir_fd=parent.descriptor)
            if _locked(lock):
                try:
                    return _opened_sibling(parent, name, lock, path), lock
                except BaseException:
                    close(lock)  # else it would seem to be in use
                    raise


def _opened_sibling(parent: Folder, name: str, lock: int, path: Path) -> Folder:
    """Open a temporary directory that was made and locked."""
    if os.fstat(lock).st_uid != os.geteuid():
        raise moved_by_others(path)
    made = Folder(parent.path / name, inside=parent)
    _require_same(parent, name, lock, path, opened=made.descriptor)
    return made


def _require_same(parent: Folder, name: str, lock: int, path: Path, *, opened: int | None = None) -> None:
    """Refuse to go on where another file or directory was put at the name of a temporary one."""
    status = parent.status(name) if opened is None else os.fstat(opened)
    if not os.path.samestat(status, os.fstat(lock)):
        raise moved_by_others(path)


def moved_by_others(path: Path) -> CheckpointError:
    """The error for a destination beside which another directory took the place of the temporary one."""
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
        close(descriptor)  # else it would seem to be in use
        raise
    close(descriptor)
    return False


def sweep(parent: Folder, destination: str) -> None:
    """Remove the temporary siblings of a destination whose writers have died; interrupted conversions stay.

    That may be hours of work; the next conversion to the same destination goes on from it, and removes it in the end.
    """
    for name in parent.names():
        if name.startswith(f".{destination}{MARK}") and SIBLING.fullmatch(name, len(destination) + 1):
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
        close(handle)


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
    """
    with explained(path, size) as writing:
        parent = writing.parent
        sweep(parent, path.name)
        temporary, descriptor = _locked_file(writing, path)
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
            with suppress(OSError):
                writing.own.append(os.fstat(descriptor))
                if os.path.samestat(parent.status(temporary), os.fstat(descriptor)):
                    os.unlink(temporary, dir_fd=parent.descriptor)
            close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all; replaces a regular file and follows no link."""
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


def _locked_file(writing: Writing, path: Path) -> tuple[str, int]:
    """The name of a temporary file beside ``path``, and its descriptor, which holds its lock."""
    while True:
        writing.temporary = temporary = f".{path.name}{MARK}{secrets.token_hex(4)}"
        # The mode is less the umask, as for any new file.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o666, dir_fd=writing.parent.descriptor)
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


def read_back(target: int, piece: memoryview, at: int) -> None:
    """Fill a buffer with what was written at a place of a file."""
    while piece:
        done = os.preadv(target, [piece], at)
        if done == 0:
            raise OSError("what was written is not there")
        piece, at = piece[done:], at + done


def sync(directory: Folder) -> None:
    """Flush a directory's entries to the disk."""
    descriptor = directory.listing()
    try:
        os.fsync(descriptor)
    finally:
        close(descriptor)
