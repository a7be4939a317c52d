"""The bytes of a file: read by position, as a private mapping, or as a copy.

A file that changed since it was opened is not read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import weakref
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Protocol

import xxhash

from porting.checkpoint.errors import CheckpointError
from porting.errors import Code, Fault, Message, Wording
from porting.opening import LINKED, Opened, open_file

if TYPE_CHECKING:
    import torch

MOST_ROWS = 1024
"""The most buffers that one call of the system fills (IOV_MAX)."""


PIECE = 1 << 18
"""Bytes that are compared at a time."""

MOST_OPEN, MOST_RUNS = 16, 1 << 16
"""Runs of bytes that are being read, and that were read, of which digests are kept; beyond, none are added."""

KEY = secrets.randbits(64)


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


class Readable(ByteSource, Protocol):
    """A source of tensors' elements: a file, or the decoded bytes of a part of one."""

    path: Path

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a writable buffer with the bytes of elements from ``offset`` on.

        Raises:
            CheckpointError: they cannot be read, or are damaged.
        """
        ...  # pragma: no cover

    def read_rows(self, rows: Sequence[memoryview], offset: int) -> None:
        """Fill several writable buffers with the bytes from ``offset`` on, one after the other."""
        ...  # pragma: no cover

    def view(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """The elements from byte ``start`` to ``stop``, 1-D; for a file, a view of its private mapping."""
        ...  # pragma: no cover

    def copy(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """The elements from byte ``start`` to ``stop`` in memory of their own."""
        ...  # pragma: no cover

    def require_unchanged(self) -> None:
        """Raises: CheckpointError when the file is not the one whose header was read."""
        ...  # pragma: no cover


class _Read:
    """The runs of bytes that were read of a file, with their digests, to compare them later.

    Attributes:
        lock: held while something is remembered or compared.
        unknown: a view was given of it, or there are too many runs: what was read is not known.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.unknown = self._full = False
        self._open: dict[int, tuple[int, xxhash.xxh3_64]] = {}  # by their ends
        self._done = array("Q")

    def add(self, start: int, rows: Sequence[memoryview | bytes]) -> None:
        """Record consecutive bytes from ``start`` on."""
        begun, state = self._open.pop(start, (start, None))
        state = xxhash.xxh3_64(seed=KEY) if state is None else state
        for row in rows:
            state.update(row)
        end = start + sum(map(len, rows))
        if end in self._open:
            self._close(end)
        self._open[end] = begun, state
        if len(self._open) > MOST_OPEN:
            self._close(next(iter(self._open)))

    def _close(self, end: int) -> None:
        begun, state = self._open.pop(end)
        self._full = self._full or len(self._done) >= 3 * MOST_RUNS
        if not self._full:
            self._done.extend((begun, end, state.intdigest()))

    def holds(self, descriptor: int, gone: bool) -> bool:
        """Whether a file still has the bytes that were read; after views were given, only for a deleted file."""
        with self.lock:
            if self._full or (self.unknown and not gone):
                return False
            runs = [(begun, end, state.intdigest()) for end, (begun, state) in self._open.items()]
            runs += zip(self._done[::3], self._done[1::3], self._done[2::3], strict=True)
            return all(_digest(descriptor, begun, end) == digest for begun, end, digest in runs)


def _digest(descriptor: int, start: int, stop: int) -> int:
    state = xxhash.xxh3_64(seed=KEY)
    while start < stop and (piece := os.pread(descriptor, min(PIECE, stop - start), start)):
        state.update(piece)
        start += len(piece)
    return int(state.intdigest())


class Copying(ABC):
    """Reads elements into new memory; a base of what elements are read from."""

    @abstractmethod
    def read_into(self, buffer: memoryview, offset: int) -> None:
        """As of :class:`Readable`."""

    @abstractmethod
    def require_unchanged(self) -> None:
        """As of :class:`Readable`."""

    def copy(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """The elements from byte ``start`` to ``stop`` in memory that no later change of the file reaches."""
        self.require_unchanged()
        import torch  # noqa: PLC0415  # headers are read without torch, which takes seconds to import

        tensor = torch.empty((stop - start) // dtype.itemsize, dtype=dtype)
        if stop > start:
            buffer = memoryview((ctypes.c_char * (stop - start)).from_address(tensor.data_ptr())).cast("B")
            self.read_into(buffer, start)
        self.require_unchanged()
        return tensor


class LocalFile(Copying):
    """A regular file, opened for reading; closed when it is garbage-collected.

    Views of it stay valid after that, and after the file is deleted: the mapping keeps the file alive.

    Args:
        source: the file, as it was opened; or the path of one that the user named.

    Raises:
        CheckpointError: it is missing, no regular file, or may not be read.
    """

    def __init__(self, source: Opened | Path) -> None:
        opened = open_file(source) if isinstance(source, Path) else source
        self.path = opened.path
        self.where = opened.where
        self._fd = opened.descriptor
        weakref.finalize(self, os.close, self._fd)
        self.size = opened.status.st_size
        self._opened, self._first = opened, opened.status
        self._read = _Read()
        opened.holds = self._read.holds
        self._mapping: mmap.mmap | None = None

    def pread(self, offset: int, count: int) -> bytes:
        """Exactly ``count`` bytes from ``offset`` on."""
        pieces, start, linked = [], offset, self._opened.linked
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
        self._remember(start, pieces, linked)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a writable buffer with the bytes from ``offset`` on."""
        whole, start, linked = buffer, offset, self._opened.linked
        while len(buffer):
            try:
                count = os.preadv(self._fd, [buffer], offset)
            except OSError as error:
                raise self._failed(error) from error
            if not count:
                raise self._changed("it was truncated: it ended early while it was being read")
            buffer = buffer[count:]
            offset += count
        self._remember(start, [whole], linked)

    def read_rows(self, rows: Sequence[memoryview], offset: int) -> None:
        """Fill several writable buffers with the bytes from ``offset`` on, one after the other, in as few calls."""
        for start in range(0, len(rows), MOST_ROWS):
            batch = rows[start : start + MOST_ROWS]
            wanted, linked = sum(map(len, batch)), self._opened.linked
            try:
                count = os.preadv(self._fd, batch, offset) if len(batch) > 1 else 0
            except OSError as error:
                raise self._failed(error) from error
            if count < wanted:  # a call may stop early; so does the file, and then this says so
                for row in batch:
                    self.read_into(row, offset)
                    offset += len(row)
            else:
                self._remember(offset, batch, linked)
                offset += count

    def _remember(self, offset: int, rows: Sequence[memoryview | bytes], linked: int) -> None:
        """Record bytes that were read, with the number of changes of names at the beginning of the read."""
        with self._read.lock:
            self._read.add(offset, rows)
        if self._opened.linked != linked and not self._read.holds(self._fd, False):
            raise self._changed(LINKED)

    def same_bytes(self, other: LocalFile) -> bool:
        """Whether another file has the same bytes."""
        return self.size == other.size and self.same_range(0, self.size, other, 0)

    def same_range(self, start: int, stop: int, other: LocalFile, begin: int) -> bool:
        """Whether the bytes from ``start`` to ``stop`` are those of another file from ``begin`` on.

        They are read, not mapped, so that no pages stay; and what is one file, whatever its names, is not read.
        """
        if self.inode == other.inode and start == begin:
            return True
        return all(
            self.pread(at, min(PIECE, stop - at)) == other.pread(at - start + begin, min(PIECE, stop - at))
            for at in range(start, stop, PIECE)
        )

    def fileno(self) -> int:
        """The descriptor, for system calls that copy between files; this object closes it."""
        return self._fd

    @property
    def identity(self) -> tuple[int, ...]:
        """The file's identity and state when it was opened.

        Device, inode, time of the last change of any kind, time of the last write, and size.  The first three cannot be
        set by whoever unpacks or copies a file, as the last two can.
        """
        status = self._first
        return status.st_dev, status.st_ino, status.st_ctime_ns, status.st_mtime_ns, status.st_size

    @property
    def inode(self) -> str:
        """The file's identity under any of its names."""
        return f"inode {self._first.st_dev}:{self._first.st_ino}"

    def view(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """The bytes from ``start`` to ``stop`` as a 1-D tensor over a private mapping of the file.

        Writing to the tensor never reaches the file; two views of the same bytes share what is written.
        Every view has a storage of its own, so that nothing takes two tensors for tied because they come from
        one file.  Bytes that do not lie on a multiple of the element size are copied.
        """
        self.require_unchanged()
        import torch  # noqa: PLC0415  # headers are read without torch, which takes seconds to import

        if start == stop:
            return torch.empty(0, dtype=dtype)
        if start % dtype.itemsize:
            return self.copy(start, stop, dtype)
        self._read.unknown = True
        if self._mapping is None:
            try:
                self._mapping = mmap.mmap(self._fd, self.size, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise self._failed(error) from error
        count = (stop - start) // dtype.itemsize
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=start)

    @property
    def mapped(self) -> tuple[int, int] | None:
        """The addresses between which the file is mapped: a change of the file may change tensors there."""
        if self._mapping is None:
            return None
        import torch  # noqa: PLC0415  # headers are read without torch, which takes seconds to import

        first = torch.frombuffer(self._mapping, dtype=torch.uint8, count=1).data_ptr()
        return first, first + self.size

    def require_unchanged(self) -> None:
        """Raises: CheckpointError when the file is not the one whose header was read.

        A mapped read past the end of a file that was truncated meanwhile would kill the process (SIGBUS).
        """
        now, then = os.fstat(self._fd), self._opened.status
        sizes = f"it had {then.st_size} bytes when it was opened and has {now.st_size} now"
        if now.st_size < then.st_size:
            raise self._changed(f"it was truncated: {sizes}")
        if now.st_size > then.st_size:
            raise self._changed(sizes)
        if found := self._opened.change(self._fd):
            raise self._changed(f"{sizes}, but {found}")

    def _changed(self, found: str) -> CheckpointError:
        hint = "open the checkpoint again once nothing writes to it"
        if self._read.unknown:
            hint += Message(
                Wording(python="; with own=True its values are copies, which no later change reaches", command="")
            )
        fault = Fault(
            code=Code.FILE_CHANGED,
            where=self.where,
            message=f"the file changed after it was opened: {found}",
            hint=hint,
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


class Decoded(Copying):
    """The elements of a part of a file that has them in another form: compressed, in pieces, or with other bytes.

    Args:
        size: bytes of the elements.

    Attributes:
        piece: how many bytes are asked for at a time.
    """

    piece = PIECE

    def __init__(self, file: LocalFile, size: int) -> None:
        self.where, self.path, self.size = file.where, file.path, size
        self._file = file

    @abstractmethod
    def pread(self, offset: int, count: int) -> bytes:
        """Exactly ``count`` bytes of elements, little-endian, from ``offset`` on."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a writable buffer with elements."""
        for start in range(0, len(buffer), self.piece):
            piece = buffer[start : start + self.piece]
            piece[:] = self.pread(offset + start, len(piece))

    def read_rows(self, rows: Sequence[memoryview], offset: int) -> None:
        """Fill several writable buffers with elements, one after the other."""
        for row in rows:
            self.read_into(row, offset)
            offset += len(row)

    def view(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """The elements in memory of their own, since decoded bytes cannot be mapped."""
        return self.copy(start, stop, dtype)

    def require_unchanged(self) -> None:
        """Raises: CheckpointError when the file is not the one whose header was read."""
        self._file.require_unchanged()
