"""The only way to open an untrusted file, or one in a directory that others can write to.

All checks are made on the open file.  A file of a directory is opened by its name relative to the directory's
descriptor, so that the directory cannot be exchanged in between.  A link is not followed, except to places where a
checkpoint's links may lead.  A FIFO does not block.  The open file must be a regular one of an allowed size.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from porting.errors import CheckpointError, Code, Fault, Message, Wording
from porting.printable import quote, shell_word

KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe (FIFO)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISLNK, "a link"),
)

READING = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Flags for opening without waiting: a FIFO is opened at once, and then refused."""

DIRECTORY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
"""Flags for opening a directory to open files in it, which needs no permission to list it."""


MORE_FILES = "run `ulimit -n 4096`: files that may be open at once"

LINKED = "it gained or lost a hard link since, and may have been written to as well"

ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""Errors that mean that nothing has a name; after any other one that is not known."""

MOST_LINKED = 8
"""How often the names of an open file may change; each time, what was read is read again."""


@dataclass(kw_only=True)
class Opened:
    """A regular file that was opened for reading; the owner closes the descriptor.

    Attributes:
        where: its name in messages.
        status: the state of the file that all its bytes were read in.
        holds: whether the file at a descriptor still has the bytes that were read; the second argument says that it
            has no name any more.  None where that is not known.
        linked: how often its names changed.
    """

    path: Path
    where: str
    descriptor: int
    status: os.stat_result
    holds: Callable[[int, bool], bool] | None = None
    linked: int = 0

    def change(self, descriptor: int) -> str:
        """How a file differs from the opened one; empty if it does not.

        The time of the last write can be set back, but not that of the last change of any kind (ctime).  A file that
        gains or loses a name changes its ctime too: then what was read of it is read again and compared.
        """
        now = os.fstat(descriptor)
        if (found := difference(self.status, now)) != LINKED:
            return found
        self.linked += 1
        if self.linked > MOST_LINKED or self.holds is None or not self.holds(descriptor, now.st_nlink == 0):
            return LINKED
        if difference(now, os.fstat(descriptor)):
            return LINKED
        self.status = now
        return ""


def open_file(path: Path, *, where: str = "", limit: int | None = None) -> Opened:
    """Open a file that the user named: links to it are followed.

    Args:
        where: its name in messages; the path if empty.
    """
    return _open_checked(path, where or str(path), limit, str(path), None)


def read_file(path: Path, *, where: str = "", limit: int | None) -> bytes:
    """Read a file that the user named; arguments and errors as of :func:`open_file`."""
    return read_opened(open_file(path, where=where, limit=limit))


class Folder:
    """A directory that is held open.

    Args:
        path: the directory; it may be a link itself.
        follow_links: follow links of its files to anywhere.  Otherwise a link may lead anywhere inside of the
            directory; outside of it only into the ``blobs`` of the hub cache that it is a snapshot in.
        inside: the folder that it lies directly in, or that it is itself; it is then opened by its name there, and may
            be no link.

    Attributes:
        descriptor: what its files are opened relative to.

    Raises:
        CheckpointError: it is not a directory, or may not be read.
    """

    def __init__(self, path: Path, *, follow_links: bool = False, inside: Folder | None = None) -> None:
        self.path = path
        self._follow_links = follow_links
        self._seen: dict[str, Opened] = {}
        try:
            if inside is None:
                self.descriptor = os.open(path, DIRECTORY)
            else:
                name = "." if path == inside.path else path.name
                self.descriptor = os.open(name, DIRECTORY | os.O_NOFOLLOW, dir_fd=inside.descriptor)
        except (OSError, ValueError) as error:
            if inside is not None and inside.kind(path.name) == "a link":
                raise _link_refused(path, "a link where a directory should be", "the directory") from error
            raise open_error(error, path, where=str(path)) from error
        weakref.finalize(self, close, self.descriptor)

    def again(self) -> Folder:
        """The same directory, with files of its own for :meth:`require_in_place`."""
        return Folder(self.path, follow_links=self._follow_links, inside=self)

    def inner(self, name: str) -> Folder:
        """Open a directory in it, which may be a link only with ``follow_links``."""
        if self._follow_links:
            return Folder(self.path / name, follow_links=True)
        return Folder(self.path / name, inside=self)

    def leads_to_directory(self, name: str) -> bool:
        """Whether a name is a directory, or a link to one if links are followed."""
        if self._follow_links:
            return (self.path / name).is_dir()
        return self.kind(name) == "a directory"

    def listing(self) -> int:
        """Open a descriptor for listing, locking and flushing it, which the caller closes."""
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.descriptor)

    def names(self) -> list[str]:
        """The names in it, in no order."""
        try:
            listing = self.listing()
        except OSError as error:
            raise open_error(error, self.path, where=str(self.path)) from error
        try:
            return os.listdir(listing)
        finally:
            close(listing)

    def status(self, name: str) -> os.stat_result:
        """The status of what has a name; of a link, that of the link."""
        return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)

    def kind(self, name: str) -> str:
        """The kind of what has a name, by :data:`KINDS`; ``"a file"``, or empty if there is nothing."""
        try:
            status = self.status(name)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in ABSENT:
                raise open_error(error, self.path / name, where=str(self.path / name)) from error
            return ""
        return "a file" if stat.S_ISREG(status.st_mode) else kind_of(status)

    def open(self, name: str, *, limit: int | None = None) -> Opened:
        """Open a file in it."""
        opened = self._open(name, limit)
        self.remember(name, opened)
        return opened

    def remember(self, name: str, opened: Opened) -> None:
        """Record which file was opened at a name, for :meth:`require_in_place`; the first one counts."""
        self._seen.setdefault(name, opened)

    def require_in_place(self, names: Iterable[str] = ()) -> None:
        """Require that the opened files still have their names, and have not changed.

        If they are, there was a moment at which all of them stood there: so that what was read is one state of the
        directory, and no mix of two.  Where all are gone, the directory was removed, which mixes nothing.

        Args:
            names: those that are meant; empty for all.
        """
        changed: list[Fault] = []
        gone = 0
        seen = {name: self._seen[name] for name in names or self._seen if name in self._seen}
        for name, opened in seen.items():
            try:
                found = self._change(name, opened)
            except OSError:
                gone += 1
                found = "nothing stands there any more"
            if not found:
                continue
            changed.append(_changed(self.path / name, found))
        if changed and gone < len(seen):
            raise CheckpointError(changed)

    def reopen(self, name: str, *, limit: int | None = None) -> Opened:
        """Open a file in it that was opened before, and has to be as it was then."""
        opened = self.open(name, limit=limit)
        first = self._seen[name]
        same = os.path.samestat(first.status, opened.status)
        found = first.change(opened.descriptor) if same else "another file stands there now"
        if found:
            close(opened.descriptor)
            raise CheckpointError(_changed(self.path / name, found))
        return opened

    def _change(self, name: str, opened: Opened) -> str:
        """How a name's file differs from the one that was opened there; empty if it does not."""
        now = os.stat(name, dir_fd=self.descriptor)
        if not os.path.samestat(opened.status, now):
            return "another file stands there now"
        if (found := difference(opened.status, now)) != LINKED:
            return found
        descriptor = os.open(name, READING, dir_fd=self.descriptor)
        try:
            return opened.change(descriptor)
        finally:
            close(descriptor)

    def _open(self, name: str, limit: int | None) -> Opened:
        path = self.path / name
        where = str(path)
        if not is_plain(name):
            message = f"{quote(name)} is not a plain file name"
            raise CheckpointError(Fault(code=Code.FILE_MISSING, where=str(self.path), message=message))
        if self.kind(name) != "a link":
            return _open_checked(path, where, limit, name, self.descriptor)
        if self._follow_links:
            return _open_checked(path, where, limit, where, None)
        try:  # where it leads is only asked; what lies there is opened below without following any link
            home, target = Path(os.path.realpath(self.path)), Path(os.path.realpath(path))
        except OSError as error:  # it is no link any more
            raise open_error(error, path, where=where) from error
        if target.is_relative_to(home):
            return _open_below(self.descriptor, target.relative_to(home).parts, path, limit)
        cache = next((parent.parent for parent in home.parents if parent.name == "snapshots"), None)
        blobs = (cache or home) / "blobs"
        if cache is not None and target.is_relative_to(blobs):
            with ExitStack() as stack:
                descriptor = _directory(str(blobs), None, path, stack)
                return _open_below(descriptor, target.relative_to(blobs).parts, path, limit)
        raise _link_refused(path, f"a link to {quote(str(target))}, outside the checkpoint", "the file")

    def read(self, name: str, *, limit: int) -> bytes:
        """Read a file in it; arguments and errors as of :meth:`open`."""
        return read_opened(self.open(name, limit=limit))

    def write(self, name: str) -> int:
        """Open or make a file in it for reading and writing; the caller closes the descriptor."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o666, dir_fd=self.descriptor)
        try:
            status = os.fstat(descriptor)
            require_regular(status, str(self.path / name))
            _require_one_name(status, str(self.path / name))
        except BaseException:
            close(descriptor)
            raise
        return descriptor

    def clear(self) -> None:
        """Remove its content as far as possible; no link is followed."""
        for name in self.names():
            with suppress(OSError):
                if stat.S_ISDIR(self.status(name).st_mode):
                    remove_directory(name, self.descriptor)
                else:
                    os.unlink(name, dir_fd=self.descriptor)


RESERVE = 6
"""Descriptors that cleaning up needs: of two folders, and for removing one."""


@contextmanager
def descriptors_kept(count: int = RESERVE) -> Iterator[None]:
    """Keep some descriptors back during the block, so that what follows it can clean up when no other are left."""
    with ExitStack() as kept:
        for _ in range(count):
            kept.callback(close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        yield


def remove_directory(name: str, folder: int) -> None:
    """Remove a directory and its content as far as possible; no link is followed.

    Directories may lie in each other more deeply than any stack goes, and than files may be open.  So one that is not
    empty is emptied into the outermost one: what lay in it is removed from there.
    """
    outermost = os.open(name, DIRECTORY | os.O_NOFOLLOW | os.O_RDONLY, dir_fd=folder)
    try:
        waiting = _names_in(outermost)
        while waiting:
            with suppress(OSError):
                waiting += _remove_entry(waiting.pop(), outermost)
    finally:
        close(outermost)
    os.rmdir(name, dir_fd=folder)


def _remove_entry(name: str, outermost: int) -> list[str]:
    """Remove what has a name; the directories in it are moved beside it first, and their names returned."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=outermost, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=outermost)
        return []
    moved = []
    inner = os.open(name, DIRECTORY | os.O_NOFOLLOW, dir_fd=outermost)
    try:
        for inner_name in _names_in(inner):
            with suppress(OSError):
                if stat.S_ISDIR(os.stat(inner_name, dir_fd=inner, follow_symlinks=False).st_mode):
                    fresh = f"removed-{secrets.token_hex(8)}"
                    os.rename(inner_name, fresh, src_dir_fd=inner, dst_dir_fd=outermost)
                    moved.append(fresh)
                else:
                    os.unlink(inner_name, dir_fd=inner)
    finally:
        close(inner)
    with suppress(OSError):
        os.rmdir(name, dir_fd=outermost)
    return moved


def _names_in(directory: int) -> list[str]:
    listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return os.listdir(listing)
    finally:
        close(listing)


@dataclass(frozen=True)
class Member:
    """A file of a folder that is opened when it is needed, each time as it was when it was opened first."""

    folder: Folder
    name: str

    def open(self, *, limit: int | None = None) -> Opened:
        """Open the file as :meth:`Folder.reopen` does."""
        return self.folder.reopen(self.name, limit=limit)

    def read(self, *, limit: int) -> bytes:
        """Read the file; arguments and errors as of :meth:`open`."""
        return read_opened(self.open(limit=limit))


def _changed(path: Path, found: str) -> Fault:
    """The fault of a file that is not as it was when it was opened."""
    hint = "open the checkpoint again once nothing writes to it"
    message = f"the file changed after it was opened: {found}"
    return Fault(code=Code.FILE_CHANGED, where=str(path), message=message, hint=hint)


def difference(then: os.stat_result, now: os.stat_result) -> str:
    """How two states of a file differ; empty if they do not, :data:`LINKED` if perhaps only its names changed."""
    states = [(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns) for status in (then, now)]
    if states[0] != states[1]:
        return "it was written to since"
    if then.st_ctime_ns == now.st_ctime_ns:
        return ""
    return "it was written to since" if then.st_nlink == now.st_nlink else LINKED


def _link_refused(path: Path, message: str, subject: str) -> CheckpointError:
    """The error for a link that leads out of a checkpoint."""
    hint = Message(f"copy {subject} here", Wording(python=", or pass follow_links=True if you trust it", command=""))
    return CheckpointError(Fault(code=Code.LINK_LEAVES_CHECKPOINT, where=str(path), message=message, hint=hint))


def close(descriptor: int) -> None:
    """Close what was only read; a failure, as of a network file system, loses nothing."""
    with suppress(OSError):
        os.close(descriptor)


def is_plain(name: str) -> bool:
    """Whether a name names something directly inside of a directory.

    >>> is_plain("model.safetensors"), is_plain("../x"), is_plain("")
    (True, False, False)
    """
    return name not in {"", ".", ".."} and "/" not in name and "\0" not in name


def kind_of(status: os.stat_result) -> str:
    """The kind of something that is not a regular file."""
    return next((name for test, name in KINDS if test(status.st_mode)), "not a regular file")


def _open_checked(path: Path, where: str, limit: int | None, name: str, folder: int | None) -> Opened:
    """Open ``name``, without following links if it is relative to a directory; the open file is then checked."""
    follow = folder is None
    descriptor = -1
    try:
        # Opening a device may do something.  This keeps from that; what it says decides nothing else.
        require_regular(os.stat(name, dir_fd=folder, follow_symlinks=follow), where)
        descriptor = os.open(name, READING if follow else READING | os.O_NOFOLLOW, dir_fd=folder)
        status = os.fstat(descriptor)
        require_regular(status, where)
        _require_size(status, where, limit)
    except BaseException as error:
        if descriptor >= 0:
            close(descriptor)
        if isinstance(error, OSError | ValueError):  # ValueError: a NUL in the name
            raise open_error(error, path, where=where) from error
        raise
    return Opened(path=path, where=where, descriptor=descriptor, status=status)


def _open_below(folder: int, parts: Sequence[str], path: Path, limit: int | None) -> Opened:
    """Open a path below a directory; none of its parts may be a link."""
    with ExitStack() as stack:
        for part in parts[:-1]:
            folder = _directory(part, folder, path, stack)
        return _open_checked(path, str(path), limit, parts[-1] if parts else ".", folder)


def _directory(name: str, folder: int | None, path: Path, stack: ExitStack) -> int:
    try:
        descriptor = os.open(name, DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        raise open_error(error, path, where=str(path)) from error
    stack.callback(close, descriptor)
    return descriptor


def read_opened(opened: Opened) -> bytes:
    """Read all bytes that the file had when it was opened, and close it."""
    try:
        content = _read_up_to(opened.descriptor, opened.status.st_size)
        made = not opened.status.st_size and os.read(opened.descriptor, 1)
    except OSError as error:
        raise open_error(error, opened.path, where=opened.where) from error
    finally:
        close(opened.descriptor)
    if made:  # it is not empty, as its size says
        message = "its content is made when it is read, as of files in /proc, or it was written to meanwhile"
        hint = "copy it to a file"
        raise CheckpointError(Fault(code=Code.FILE_NOT_REGULAR, where=opened.where, message=message, hint=hint))
    if len(content) < opened.status.st_size:
        message = "the file changed after it was opened: it was truncated while it was being read"
        hint = "try again once nothing writes to it"
        raise CheckpointError(Fault(code=Code.FILE_CHANGED, where=opened.where, message=message, hint=hint))
    digest = hash(content)  # with a key of this process
    opened.holds = lambda descriptor, _: hash(_read_up_to(descriptor, len(content))) == digest
    return content


def _read_up_to(descriptor: int, count: int) -> bytes:
    """The first bytes of a file."""
    pieces = []
    while count and (piece := os.read(descriptor, count)):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def require_regular(status: os.stat_result, where: str) -> None:
    """Raises: CheckpointError when it is a directory, a pipe, a socket or a device."""
    if not stat.S_ISREG(status.st_mode):
        message = f"found {kind_of(status)} where a file of weights or settings should be"
        hint = "put the file itself there"
        raise CheckpointError(Fault(code=Code.FILE_NOT_REGULAR, where=where, message=message, hint=hint))


def _require_one_name(status: os.stat_result, where: str) -> None:
    if status.st_nlink != 1:
        message = "found a file that has another name as well, and would be written to under that"
        hint = "remove it, or choose another destination"
        raise CheckpointError(Fault(code=Code.FILE_NOT_REGULAR, where=where, message=message, hint=hint))


def _require_size(status: os.stat_result, where: str, limit: int | None) -> None:
    if limit is not None and status.st_size > limit:
        message = f"{status.st_size} bytes, where at most {limit} can be meant"
        hint = "this is not the file that its name says; fetch it again"
        raise CheckpointError(Fault(code=Code.FILE_TOO_LARGE, where=where, message=message, hint=hint))


def open_error(error: OSError | ValueError, path: Path, *, where: str) -> CheckpointError:
    """The error for a failed stat or open."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        message, hint = "no such file", "check the path"
        with suppress(OSError, ValueError):
            target = quote(os.readlink(path))
            message, hint = f"a link to {target}, which does not exist", "mend the link or copy the file"
        return CheckpointError(Fault(code=Code.FILE_MISSING, where=where, message=message, hint=hint))
    reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
    hint = f"run `chmod u+r {shell_word(path)}`" if isinstance(error, PermissionError) else "check the path"
    hint = MORE_FILES if isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE} else hint
    return CheckpointError(
        Fault(code=Code.FILE_UNREADABLE, where=where, message=f"cannot be opened: {reason}", hint=hint)
    )
