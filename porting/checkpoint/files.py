"""The bytes of a file: read by position, as a private mapping, or as a copy.

A file that changed since it was opened is not read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import tempfile
import weakref
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from porting.checkpoint.errors import CheckpointError
from porting.errors import Code, Fault, Message, Wording
from porting.limits import charge
from porting.opening import LINKED, Opened, close, open_file

if TYPE_CHECKING:
    import numpy as np
    import torch
    import xxhash

MOST_ROWS = 1024
"""The most buffers that one call of the system fills (IOV_MAX)."""


PIECE = 1 << 18
"""Bytes that are compared at a time."""

MOST_OPEN, MOST_RUNS = 16, 1 << 16
"""Runs of bytes that are being read, and that were read, of which digests are kept; beyond, none are added."""

KEY = secrets.randbits(64)

PASSES = 2
"""How often a tensor is decoded before its elements are kept: for its checksum, and for its values."""

IN_MEMORY = 1 << 20
"""Bytes of elements that are kept in memory; more are kept in a temporary file."""

MOST_KEPT = 8
"""Tensors of a file whose elements are kept at a time; the next one takes the place of the one used longest ago."""

COMPRESSED = 1.25
"""The usual ratio of decoded bytes to stored ones; more is charged as what it may be cast to."""

WIDEST = 8
"""Bytes that an element may be cast to."""

HELD = 3
"""Copies of a part that a decoder may hold at once: decompressed, on the way there, and as elements."""

HONEST_PART = 1 << 12
"""Stored bytes for which a part that is decoded by itself is not charged: files of larger parts take no longer."""

STEP = 32
"""Values that a part is charged as: its entry in a decoder's tables takes about a kilobyte."""


def charge_decoding(
    made: int, *, itemsize: int, stored: int, where: str, copies: int = 1, largest: int = 0, parts: int = 1
) -> None:
    """Charge what decoding elements takes beyond the bytes that are stored of them, before any is decoded.

    Args:
        made: bytes of the elements.
        itemsize: bytes of one of them.
        stored: bytes of the file that they are decoded from; each byte of a file is stored once.
        copies: how many of the elements are held at once when all are read: two where their axes are put in order.
        largest: bytes of the largest part that can only be decoded whole.
        parts: the number of such parts, those that are not stored included.
    """
    widened = max(made - int(COMPRESSED * stored), 0) * max(WIDEST // itemsize - 1, 0)
    charge("made", copies * max(made - stored, 0) + widened + HELD * max(largest - stored, 0), where=where)
    charge("objects", STEP * max(parts - stored // HONEST_PART, 0), where=where)


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


class InMemory:
    """Bytes in memory as a source."""

    def __init__(self, raw: bytes, where: str) -> None:
        self.where = where
        self.size = len(raw)
        self._raw = raw

    def pread(self, offset: int, count: int) -> bytes:
        """Read as :meth:`ByteSource.pread` does."""
        return self._raw[offset : offset + count]


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
        import xxhash  # noqa: PLC0415  # recordings are read where only numpy is installed

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
    import xxhash  # noqa: PLC0415  # as above

    state = xxhash.xxh3_64(seed=KEY)
    while start < stop and (piece := os.pread(descriptor, min(PIECE, stop - start), start)):
        state.update(piece)
        start += len(piece)
    return int(state.intdigest())


class Copying(ABC):
    """Reads elements into new memory; a base of what elements are read from."""

    @abstractmethod
    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Read as :meth:`Readable.read_into` does."""

    @abstractmethod
    def require_unchanged(self) -> None:
        """Check as :meth:`Readable.require_unchanged` does."""

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
        weakref.finalize(self, close, self._fd)
        self.size = opened.status.st_size
        self._opened, self._first = opened, opened.status
        self._read = _Read()
        self.kept = Kept()
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
    """The elements of a part of a file that has them in another form: in pieces, or packed in blocks.

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


class Stream(Decoded):
    """Elements that can only be decoded from some places on, one after the other, as compressed ones.

    Each is decoded at most about ``PASSES + 1`` times, in whatever order they are read: then all of them are kept, in a
    temporary file if they are many.

    Attributes:
        order: numpy's kind and size of elements that are big-endian; empty for little-endian ones.
    """

    order = ""

    def __init__(self, file: LocalFile, size: int) -> None:
        super().__init__(file, size)
        self._lock = Lock()
        self._stream: Iterator[bytes | memoryview] | None = None
        self._piece: bytes | memoryview = b""
        self._start = 0  # of the piece
        self._decoded = 0

    @abstractmethod
    def decoded(self, start: int) -> Iterator[bytes | memoryview]:
        """Decode all elements from byte ``start`` on, little-endian, in pieces of any length."""

    def before(self, offset: int) -> int:
        """The last byte up to ``offset`` that decoding can begin with."""
        return 0

    def pread(self, offset: int, count: int) -> bytes:
        """Exactly ``count`` bytes of elements from ``offset`` on."""
        if not count:
            return b""
        with self._lock:
            kept = self._file.kept.get(self)
            if kept is None and not self._follows(offset):
                if self._decoded >= PASSES * self.size:
                    kept = self._keep()
                else:
                    self._begin(self.before(offset))
            return self._streamed(offset, count) if kept is None else kept.pread(offset, count)

    def gather(self, start: int, sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> np.ndarray:
        """Elements that lie apart, in memory of their own; all elements are kept for it.

        Args:
            start: the byte of the first one.
            sizes, strides: the shape of what is gathered, and the steps of its axes in elements.
            itemsize: bytes of an element.

        Returns:
            The elements, little-endian, as whole numbers of their width where nothing else is known of them.
        """
        import numpy as np  # noqa: PLC0415  # what decodes elements has it

        with self._lock:
            memory = (self._file.kept.get(self) or self._keep()).memory()
        dtype = np.dtype(f">{self.order}") if self.order else np.dtype("c16" if itemsize == 16 else f"<u{itemsize}")
        steps = [stride * itemsize for stride in strides]
        found = np.ndarray(tuple(sizes), dtype, memory, start, steps)
        return found.astype(dtype.newbyteorder("<"), order="C", copy=True)

    def _follows(self, offset: int) -> bool:
        """Whether a place is in the piece, or is reached by going on."""
        return self._stream is not None and self._start <= offset and self.before(offset) <= self._end_of_piece

    @property
    def _end_of_piece(self) -> int:
        return self._start + len(self._piece)

    def _streamed(self, offset: int, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            begin = offset + len(found) - self._start
            if begin < len(self._piece):
                found += memoryview(self._piece)[begin : begin + count - len(found)]
            else:
                self._next()
        if offset + count == self.size:
            self._end()
        return bytes(found)

    def _begin(self, start: int) -> None:
        self._stream, self._piece, self._start = self.decoded(start), b"", start

    def _next(self) -> None:
        """Go on to the next piece."""
        assert self._stream is not None  # noqa: S101  # for mypy: it was begun
        self._start = self._end_of_piece
        self._piece = next(self._stream, b"")
        self._decoded += len(self._piece)
        if not self._piece or self._end_of_piece > self.size:
            raise ValueError(f"{type(self).__name__} gave another number of bytes than {self.size}")  # a bug of ours

    def _end(self) -> None:
        """See that nothing follows the last piece, and let it go: there may be as many of them as tensors."""
        if self._stream is not None and next(self._stream, b""):
            raise ValueError(f"{type(self).__name__} gave more than {self.size} bytes")  # a bug of ours
        self._stream, self._piece, self._start = None, b"", self.size

    def _keep(self) -> Elements:
        """Decode all elements once more, and keep them."""
        kept = Elements()
        self._begin(0)
        try:
            while self._end_of_piece < self.size:
                self._next()
                kept.add(self._piece)
        except OSError as error:
            message = f"its decoded elements, {self.size} bytes, cannot be kept in {tempfile.gettempdir()}: {error}"
            hint = "set TMPDIR to a folder with more room"
            fault = Fault(code=Code.FILE_UNREADABLE, where=self.where, message=message, hint=hint)
            raise CheckpointError(fault) from error
        self._end()
        self._file.kept.add(self, kept)
        return kept


class Elements:
    """Decoded elements, in memory or in a temporary file without a name."""

    def __init__(self) -> None:
        self._memory = bytearray()
        self._fd: int | None = None
        self._mapped: memoryview | None = None

    def add(self, piece: bytes | memoryview) -> None:
        """Add a piece behind the others."""
        self._memory += piece
        if self._fd is None and len(self._memory) > IN_MEMORY:
            with tempfile.TemporaryFile(prefix="porting-") as file:
                self._fd = os.dup(file.fileno())
            weakref.finalize(self, close, self._fd)
        if self._fd is not None:
            left = memoryview(bytes(self._memory))
            while left:
                left = left[os.write(self._fd, left) :]
            self._memory.clear()

    def memory(self) -> memoryview:
        """All of them; a file is mapped, which nothing else can write to."""
        if self._mapped is None:
            whole = self._memory if self._fd is None else mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
            self._mapped = memoryview(whole)
        return self._mapped

    def pread(self, offset: int, count: int) -> bytes:
        """The ``count`` bytes from ``offset`` on."""
        return bytes(self.memory()[offset : offset + count])


class Kept:
    """The decoded elements that are kept of a file, each with what decodes them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Stream, Elements] = OrderedDict()
        self._lock = Lock()

    def get(self, stream: Stream) -> Elements | None:
        """The elements of a stream; None when they are not kept."""
        with self._lock:
            if stream in self._kept:
                self._kept.move_to_end(stream)
            return self._kept.get(stream)

    def add(self, stream: Stream, kept: Elements) -> None:
        """Keep those of a stream, in the place of those that were used longest ago."""
        with self._lock:
            self._kept[stream] = kept
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
