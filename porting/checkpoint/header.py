"""The shared parts of containers with a header before the elements: reading it, and placing the tensors."""

from __future__ import annotations

import math
import struct
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from porting.checkpoint.errors import CheckpointError, FaultList, checkpoint_error, quote
from porting.checkpoint.files import ByteSource, LocalFile, Readable
from porting.checkpoint.layout import (
    ChecksummedRange,
    Chunk,
    Contents,
    ElementType,
    Extent,
    TensorInfo,
    WeightFile,
    shape_fault,
    shown_sizes,
)
from porting.checkpoint.names import LONGEST_TENSOR_NAME, check_names
from porting.errors import Code, Fault
from porting.limits import charge

FETCH_AGAIN = "the file is damaged: fetch it again"

BUFFER = 1 << 12
"""Bytes that are read at a time: between two tensors' elements there are few."""

TEXT = 1 << 16
"""Bytes of a text that are looked at together."""

VARINT = 10
"""Bytes of the longest number of a variable length: 7 bits in each."""


class HeaderReader:
    """Reads a header from its first byte on.  The bytes that are used are charged, whatever lies between them.

    Args:
        start, stop: where the header lies; to the end of the file where ``stop`` is None.

    Attributes:
        position: the next byte.
        stop: one past the last byte.
    """

    def __init__(self, source: ByteSource, code: Code, *, start: int = 0, stop: int | None = None) -> None:
        self.source = source
        self.position = start
        self.stop = source.size if stop is None else stop
        self._code = code
        self._buffer = b""
        self._start = start
        self._used = 0

    def within(self, count: int) -> HeaderReader:
        """A reader of the next ``count`` bytes alone, which this one skips."""
        start = self.position
        self.skip(count)
        return HeaderReader(self.source, self._code, start=start, stop=self.position)

    def __bool__(self) -> bool:
        return self.position < self.stop

    def take(self, count: int) -> bytes:
        """The next bytes."""
        self.require(count)
        begin = self.position - self._start
        if begin + count > len(self._buffer) or begin < 0:
            length = min(max(count, BUFFER), self.stop - self.position)
            charge("metadata", self._used + count, where=self.source.where)
            self._used = -count
            self._buffer = self.source.pread(self.position, length)
            self._start, begin = self.position, 0
        self.position += count
        self._used += count
        return self._buffer[begin : begin + count]

    def skip(self, count: int) -> None:
        """Skip bytes."""
        self.require(count)
        self.position += count

    def skip_text(self, count: int) -> None:
        """Skip a text, which has to be UTF-8, in memory that does not depend on its length."""
        self.require(count)
        decoder, end = getincrementaldecoder("utf-8")(), self.position + count
        try:
            for start in range(self.position, end, TEXT):
                decoder.decode(self.source.pread(start, min(TEXT, end - start)))
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise self.error(f"a text that is not UTF-8 before byte {end}") from error
        self.position = end

    def number(self, layout: str) -> int:
        """The next whole number, of a layout of :mod:`struct`."""
        value: int
        (value,) = struct.unpack(layout, self.take(struct.calcsize(layout)))
        return value

    def varint(self) -> int:
        """The next number of a variable length (LEB128), below 2^64."""
        value = 0
        for place in range(VARINT):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                break
        else:
            raise self.error(f"a number of more than {VARINT} bytes before byte {self.position}")
        return value & (1 << 64) - 1

    def text(self, count: int, *, limit: int = LONGEST_TENSOR_NAME) -> str:
        """The next ``count`` bytes as text, of at most ``limit`` bytes."""
        if count > limit:
            raise self.error(f"a name of {count} bytes")
        try:
            return self.take(count).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"a name that is not UTF-8 before byte {self.position}") from error

    def require(self, count: int) -> None:
        """Raises: CheckpointError when fewer bytes are left."""
        if count > self.stop - self.position:
            raise self.error("it ends in the middle of its header")

    def error(self, message: str, hint: str = FETCH_AGAIN) -> CheckpointError:
        """The error for a header that cannot be read."""
        return checkpoint_error(self._code, self.source.where, message, hint)


NUMBER, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types of protocol buffers."""

LARGEST_FIELD = (1 << 29) - 1
"""The largest number of a field."""

TOGETHER = 16
"""Fields that are charged at once."""


def message_fields(
    message: HeaderReader, fixed: frozenset[int] = frozenset()
) -> Iterator[tuple[int, int | None, HeaderReader | None]]:
    """The fields of a message of protocol buffers (https://protobuf.dev/programming-guides/encoding).

    Args:
        message: its bytes.
        fixed: the fields that are numbers of 4 bytes.

    Yields:
        The number of each field; its value if that is a number of a variable length, or of 4 bytes and one of
        ``fixed``, else None; and a reader of the bytes of a text, a list or a message, else None.  A known field of
        another wire type is to be ignored.
    """
    count = 0
    while message:
        if count % TOGETHER == 0:
            charge("objects", TOGETHER, where=message.source.where)
        count += 1
        key = message.varint()
        number, kind = key >> 3, key & 7
        if not 0 < number <= LARGEST_FIELD:
            raise message.error(f"a field of the number {number} before byte {message.position}")
        if kind == NUMBER:
            content = signed(message.varint())
            yield number, None if number in fixed else content, None
        elif kind == BYTES:
            yield number, None, message.within(message.varint())
        elif kind == FIXED32:
            value = message.number("<I")
            yield number, value if number in fixed else None, None
        elif kind == FIXED64:
            message.skip(8)
            yield number, None, None
        else:
            raise message.error(f"a field of the unknown type {kind} before byte {message.position}")


def signed(value: int) -> int:
    """A number below 2^64 as one of 64 bits with a sign."""
    return value - (1 << 64) if value >> 63 else value


class TensorList:
    """The tensors of a file as its header describes them, each checked against the file.

    Args:
        format: the name of its container.
    """

    def __init__(self, source: ByteSource, code: Code, *, name: str, format: str) -> None:  # noqa: A002  # as of WeightFile
        self.faults = FaultList(source.where)
        self._source, self._code, self._name, self._format = source, code, name, format
        self._tensors: dict[str, TensorInfo] = {}
        self._extents: dict[str, Extent] = {}
        self._chunks: dict[str, tuple[Chunk, ...]] = {}
        self._claimed: list[tuple[int, int, str]] = []

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._source.size

    def refuse(self, tensor: str, reason: str, hint: str = "") -> None:
        """Note that a tensor cannot be read."""
        self.faults.add(self._code, reason, tensor=tensor, hint=hint)

    def add(
        self,
        tensor: str,
        shape: tuple[int, ...],
        element: ElementType,
        *,
        start: int,
        stored: int | None = None,
        decode: Callable[[LocalFile], Readable] | None = None,
        record: ChecksummedRange | None = None,
    ) -> None:
        """Add a tensor, or note why it cannot be read.

        Args:
            stored: how many bytes the file has for it; None where the header does not say.
        """
        reason = "" if tensor not in self._tensors else "it is there twice"
        if not reason and any(size < 0 for size in shape):
            reason = f"its shape {shown_sizes(shape)} has a negative size"
        reason = reason or shape_fault(shape, element)
        nbytes = math.prod(shape) * element.itemsize if not reason else 0
        if not reason and stored is not None and stored != nbytes:
            reason = f"it has {stored} bytes, and shape {shown_sizes(shape)} of {element} needs {nbytes}"
        elif not reason and decode is None and start + nbytes > self._source.size:
            reason = f"its {nbytes} bytes from byte {start} on do not lie in the file's {self._source.size}"
        if reason:
            self.refuse(tensor, reason, FETCH_AGAIN)
            return
        self._tensors[tensor] = TensorInfo(name=tensor, shape=shape, element=element, nbytes=nbytes, file=self._name)
        self._extents[tensor] = Extent(start=start, stop=start + nbytes, decode=decode, record=record)
        if decode is None:
            self.claim(tensor, start, start + nbytes)

    def add_in_parts(self, tensor: str, shape: tuple[int, ...], element: ElementType, parts: Sequence[Chunk]) -> None:
        """Add a tensor that is stored in several boxes, each of which was :meth:`claimed <claim>` of its file."""
        nbytes = math.prod(shape) * element.itemsize
        self._tensors[tensor] = TensorInfo(name=tensor, shape=shape, element=element, nbytes=nbytes, file=self._name)
        self._chunks[tensor] = tuple(parts)

    def claim(self, tensor: str, start: int, stop: int) -> None:
        """Note that bytes of the file are those of a tensor: no other may have them."""
        self._claimed.append((start, stop, tensor))

    def contents(
        self,
        *,
        notes: tuple[Fault, ...] = (),
        locate: Callable[[LocalFile, Chunk, TensorInfo], Extent] | None = None,
    ) -> Contents:
        """The tensors and their places."""
        end, last = 0, ""
        for start, stop, tensor in sorted(self._claimed, key=lambda entry: entry[0]):
            if stop > start and start < end:
                self.refuse(tensor, f"its bytes are also those of {quote(last)}", FETCH_AGAIN)
            if stop > end:
                end, last = stop, tensor
        check_names(self._tensors, self.faults)
        self.faults.raise_if_any()
        size, names = self._source.size, tuple(self._tensors)
        file = WeightFile(name=self._name, size=size, format=self._format, metadata={}, names=names)
        found = Contents(file=file, tensors=self._tensors, extents=self._extents, chunks=self._chunks, notes=notes)
        return found if locate is None else replace(found, locate=locate)
