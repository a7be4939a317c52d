"""Opening a file safely, and handing out its bytes: by position, as a private mapping, or as a copy.

Nothing here hangs or follows what it should not: a FIFO, a device or a directory is refused before it is
opened, a link that leaves the checkpoint is refused by name, and a file that changed since it was opened is
not read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from porting.checkpoint.errors import CheckpointError, quote
from porting.errors import Code, Fault, told

MOST_ROWS = 1024
"""The most buffers that one call of the system fills (IOV_MAX)."""

KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe (FIFO)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


class ByteSource(Protocol):
    """Bytes of known length that can be read at any position: a local file, or one read by HTTP ranges."""

    where: str
    size: int

    def pread(self, offset: int, count: int) -> bytes:
        """Exactly ``count`` bytes from ``offset`` on.

        Raises:
            CheckpointError: they cannot be had.
        """
        ...  # pragma: no cover


class LocalFile:
    """A regular file, opened for reading; closed when it is no longer referred to.

    Views of it stay valid after that, and after the file is deleted: the mapping keeps the file alive.

    Args:
        path: the file.
        where: its name in messages; the path when left out.

    Raises:
        CheckpointError: it is missing, no regular file, or may not be read.
    """

    def __init__(self, path: Path, *, where: str | None = None) -> None:
        self.path = path
        self.where = where or str(path)
        try:
            self._require_regular(os.stat(path))
            # O_NONBLOCK: should a FIFO take the file's place between the two calls, opening it does not wait
            # for a writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise open_error(error, path, where=self.where) from error
        weakref.finalize(self, os.close, self._fd)
        status = os.fstat(self._fd)
        self._require_regular(status)
        self.size = status.st_size
        self._opened = status
        self._mapping: mmap.mmap | None = None

    def pread(self, offset: int, count: int) -> bytes:
        """Exactly ``count`` bytes from ``offset`` on."""
        pieces = []
        while count:
            try:
                piece = os.pread(self._fd, count, offset)
            except OSError as error:
                raise self._failed(error) from error
            if not piece:
                raise self._changed("it was truncated: it ended early while it was being read")
            pieces.append(piece)
            offset += len(piece)
            count -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a writable buffer with the bytes from ``offset`` on."""
        while len(buffer):
            try:
                count = os.preadv(self._fd, [buffer], offset)
            except OSError as error:
                raise self._failed(error) from error
            if not count:
                raise self._changed("it was truncated: it ended early while it was being read")
            buffer = buffer[count:]
            offset += count

    def read_rows(self, rows: Sequence[memoryview], offset: int) -> None:
        """Fill several writable buffers with the bytes from ``offset`` on, one after the other, in as few calls."""
        for start in range(0, len(rows), MOST_ROWS):
            some = rows[start : start + MOST_ROWS]
            wanted = sum(map(len, some))
            try:
                count = os.preadv(self._fd, some, offset) if len(some) > 1 else 0
            except OSError as error:
                raise self._failed(error) from error
            if count < wanted:  # a call may stop early; so does the file, and then this says so
                for row in some:
                    self.read_into(row, offset)
                    offset += len(row)
            else:
                offset += count

    def fileno(self) -> int:
        """The descriptor, for calls of the system that copy from file to file; it stays this object's."""
        return self._fd

    @property
    def identity(self) -> tuple[int, ...]:
        """Which file it is and which state of it, as it was when it was opened.

        Device, inode, time of the last change of any kind, time of the last write, and size.  The first three cannot be
        set by whoever unpacks or copies a file, as the last two can.
        """
        status = self._opened
        return status.st_dev, status.st_ino, status.st_ctime_ns, status.st_mtime_ns, status.st_size

    def view(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """The bytes from ``start`` to ``stop`` as a 1-D tensor over a private mapping of the file.

        Writing to the tensor never reaches the file; two views of the same bytes share what is written.
        Every view has a storage of its own, so that nothing takes two tensors for tied because they come from
        one file.  Bytes that do not lie on a multiple of the element size are copied.
        """
        self.require_unchanged()
        if start == stop:
            return torch.empty(0, dtype=dtype)
        if start % dtype.itemsize:
            return self.copy(start, stop, dtype)
        if self._mapping is None:
            try:
                self._mapping = mmap.mmap(self._fd, self.size, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise self._failed(error) from error
        count = (stop - start) // dtype.itemsize
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=start)

    def copy(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """The same in anonymous memory, by reading: nothing that later happens to the file can reach it."""
        self.require_unchanged()
        tensor = torch.empty((stop - start) // dtype.itemsize, dtype=dtype)
        buffer = memoryview((ctypes.c_char * (stop - start)).from_address(tensor.data_ptr()) if stop > start else b"")
        self.read_into(buffer, start)
        self.require_unchanged()
        return tensor

    def require_unchanged(self) -> None:
        """Raises: CheckpointError when the file is not the one whose header was read.

        A mapped read past the end of a file that was truncated meanwhile would kill the process (SIGBUS).
        """
        now, then = os.fstat(self._fd), self._opened
        sizes = f"it had {then.st_size} bytes when it was opened and has {now.st_size} now"
        if now.st_size < then.st_size:
            raise self._changed(f"it was truncated: {sizes}")
        if now.st_size > then.st_size:
            raise self._changed(sizes)
        # The time of a write can be set back, and then the time of the change of that shows it.  A file that is
        # deleted, replaced by a rename, or given another name changes that time as well, and its number of names.
        hidden = now.st_ctime_ns != then.st_ctime_ns and now.st_nlink == then.st_nlink
        if now.st_mtime_ns != then.st_mtime_ns or hidden:
            raise self._changed(f"{sizes}, but it was written to since")

    def _require_regular(self, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            what = next((name for test, name in KINDS if test(status.st_mode)), "no regular file")
            fault = Fault(
                code=Code.FILE_NOT_REGULAR,
                where=self.where,
                message=f"found {what} where a file of weights or settings should be",
                hint="put the file itself there",
            )
            raise CheckpointError(fault)

    def _changed(self, found: str) -> CheckpointError:
        fault = Fault(
            code=Code.FILE_CHANGED,
            where=self.where,
            message=f"the file changed after it was opened: {found}",
            hint="open the checkpoint again once nothing writes to it",
        )
        return CheckpointError(fault)

    def _failed(self, error: OSError | ValueError) -> CheckpointError:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        fault = Fault(
            code=Code.FILE_UNREADABLE,
            where=self.where,
            message=f"reading failed: {reason}",
            hint="check the disk and the memory limit, or copy the file elsewhere and try again",
        )
        return CheckpointError(fault)


def open_error(error: OSError, path: Path, *, where: str) -> CheckpointError:
    """What a failed stat or open means to the person who asked for it."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        if path.is_symlink():
            message, hint = (
                f"a link to {quote(os.readlink(path))}, which does not exist",
                "mend the link or copy the file",
            )
        else:
            message, hint = "no such file", "check the path"
        return CheckpointError(Fault(code=Code.FILE_MISSING, where=where, message=message, hint=hint))
    reason = error.strerror or str(error)
    hint = f"run `chmod u+r {path}`" if isinstance(error, PermissionError) else "check the path"
    return CheckpointError(
        Fault(code=Code.FILE_UNREADABLE, where=where, message=f"cannot be opened: {reason}", hint=hint)
    )


def member(root: Path, name: str, *, follow_links: bool = False) -> Path:
    """The path of a checkpoint's own file, links resolved.

    A link may lead anywhere inside ``root``; outside it only into the ``blobs`` of the hub cache that
    ``root`` is a snapshot in, unless ``follow_links`` says otherwise.

    Raises:
        CheckpointError: the file is a link that leaves the checkpoint.
    """
    path = root / name
    if follow_links or not path.is_symlink():
        return path
    home = root.resolve()
    target = Path(os.path.realpath(path))
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if any(target.is_relative_to(place) for place in allowed):
        return path
    fault = Fault(
        code=Code.LINK_LEAVES_CHECKPOINT,
        where=str(path),
        message=f"a link to {quote(str(target))}, outside the checkpoint",
        hint=told(called="copy the file here, or pass follow_links=True if you trust it", typed="copy the file here"),
    )
    raise CheckpointError(fault)


def read_small(path: Path, *, where: str, limit: int) -> bytes:
    """The whole of a small file, such as a JSON text.

    Raises:
        CheckpointError: it cannot be read, or is longer than ``limit`` bytes.
    """
    file = LocalFile(path, where=where)
    if file.size > limit:
        fault = Fault(
            code=Code.FILE_TOO_LARGE,
            where=where,
            message=f"{file.size} bytes, where at most {limit} can be meant",
            hint="this is not the file that its name says; fetch it again",
        )
        raise CheckpointError(fault)
    return file.pread(0, file.size)
