"""numpy's archive of arrays: a zip file of ``.npy`` files, which are stored or deflated.

Each member begins with a magic number, a version and the text of a Python dictionary of dtype, order and shape
(https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html); the elements follow to its end.  Stored
members are read by ranges, like any file.  Deflated ones are decompressed from their beginning, in memory that does not
depend on their size (:class:`~porting.checkpoint.files.Stream`).  Arrays of objects are pickles, and are never read.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from porting.checkpoint.container import (
    Container,
    FileKind,
    Outline,
    Promises,
    Seal,
    Shard,
    UnrecognisedError,
    WriteOptions,
    nbytes,
)
from porting.checkpoint.errors import CheckpointError, FaultList, checkpoint_error, quote
from porting.checkpoint.files import ByteSource, LocalFile, Stream, charge_decoding
from porting.checkpoint.layout import (
    ChecksummedRange,
    Contents,
    Described,
    ElementType,
    Extent,
    TensorInfo,
    WeightFile,
    shape_fault,
    shown_sizes,
)
from porting.checkpoint.names import check_names
from porting.checkpoint.zip_file import (
    DEFLATED,
    FETCH_AGAIN,
    STORED,
    UTF8,
    Directory,
    Writer,
    first_name,
    is_archive,
    local_header,
    locate_all,
    read_archive,
)
from porting.errors import Code, Fault, Message, Wording
from porting.limits import charge, reading
from porting.printable import dtype_name

if TYPE_CHECKING:
    import torch

SAVE_AGAIN = "save the arrays again with numpy.savez"
NUMPY = Writer(name="numpy.savez", code=Code.NPZ_FILE, again=SAVE_AGAIN, methods=frozenset({STORED, DEFLATED}))

MAGIC = b"\x93NUMPY"
LONGEST = 10_000
"""Bytes of an array's header; numpy reads no longer one either."""

DTYPES: Mapping[str, ElementType] = {
    "b1": ElementType.BOOL, "u1": ElementType.UINT8, "i1": ElementType.INT8, "u2": ElementType.UINT16,
    "i2": ElementType.INT16, "f2": ElementType.FLOAT16, "u4": ElementType.UINT32, "i4": ElementType.INT32,
    "f4": ElementType.FLOAT32, "u8": ElementType.UINT64, "i8": ElementType.INT64, "f8": ElementType.FLOAT64,
    "c8": ElementType.COMPLEX64, "c16": ElementType.COMPLEX128,
}  # fmt: skip
"""The dtypes of both numpy and torch, by numpy's kind and size."""

NAMES = {element: name for name, element in DTYPES.items()}

NO_NUMBERS = {
    "O": ("Python objects, which are pickles; none is read, since that could run code", "save arrays of numbers"),
    "V": (
        "bytes without a type, as numpy writes bfloat16 and float8 of ml_dtypes: which of these it was is lost",
        "save it as float32, which holds every value of these types",
    ),
    "S": ("text", "save arrays of numbers"),
    "U": ("text", "save arrays of numbers"),
    "M": ("dates", "save arrays of numbers"),
    "m": ("spans of time", "save arrays of numbers"),
}
"""Contents of arrays that are not tensors, by numpy's kind, each with a hint."""

ALIGNED = 64
"""Bytes that elements are aligned to in written files, as numpy aligns them within a member."""

PIECE = 1 << 16
"""Bytes of a compressed member that are read at a time."""


class Npz(Container):
    """An ``.npz`` file of numpy."""

    name = "npz"
    title = "an .npz file of numpy"
    endings = (".npz",)
    main = "model.npz"
    surroundings = "what stands around its tensors"
    promises = Promises(writes=True, dtypes=frozenset(NAMES), ranges="stored", checksums=True)

    def sniff(self, source: ByteSource) -> FileKind | None:
        """Whether the file is a zip archive whose first member is an array."""
        return FileKind(self.title, "rename it to end in .npz") if first_name(source).endswith(".npy") else None

    def read(self, source: ByteSource, *, name: str, locate: bool = True) -> Contents:
        """Read the arrays' headers; the beginning of each member is read, since the shape is stored there."""
        if not is_archive(source):
            message = "this is not a zip archive, so not one that numpy.savez wrote"
            fault = Fault(code=Code.FORMAT_WRONG, where=source.where, message=message, hint=FETCH_AGAIN)
            raise UnrecognisedError(fault, source, self.title)
        archive = read_archive(source, NUMPY)
        placed = locate_all(source, archive)
        faults = FaultList(source.where)
        tensors: dict[str, TensorInfo] = {}
        extents: dict[str, Extent] = {}
        for entry in archive.entries.values():
            member = _Member(entry.name, placed[entry.name], entry.size, deflated=entry.method == DEFLATED)
            if not entry.name.endswith(".npy"):
                faults.add(Code.NPZ_FILE, f"the entry {quote(entry.name)} is no .npy array", hint=SAVE_AGAIN)
                continue
            if not entry.raw.isascii() and (not entry.flags & UTF8 or entry.name.encode() != entry.raw):
                faults.add(Code.NPZ_FILE, f"the name of the entry {quote(entry.name)} is no UTF-8", hint=SAVE_AGAIN)
                continue
            tensor = entry.name.removesuffix(".npy")
            array = _array(_Inflated(source, member), tensor, faults)
            if array is not None:
                width, copies = array.element.itemsize, 2 if array.columns else 1
                charge_decoding(entry.size, itemsize=width, stored=entry.packed, where=source.where, copies=copies)
                tensors[tensor] = TensorInfo(
                    name=tensor, shape=array.shape, element=array.element, nbytes=member.size - array.start, file=name
                )
                extents[tensor] = array.extent(member)
        for tensor in tensors.keys() & archive.entries.keys():  # numpy gives the member of that very name
            faults.add(Code.NPZ_FILE, "another array's file has this name, which numpy reads instead", tensor=tensor)
        check_names(tensors, faults)
        faults.raise_if_any()
        file = WeightFile(name=name, size=source.size, format=self.name, metadata={}, names=tuple(tensors))
        return Contents(file=file, tensors=tensors, extents=extents)

    def refusal(self, name: str, dtype: torch.dtype) -> tuple[str, str]:
        """Refuse dtypes that numpy lacks, and names that leave the archive."""
        parts = name.split("/")
        if ".." in parts or not parts[0] or "\\" in name or ":" in parts[0] or "\0" in name:
            return "an archive's member of that name would lie outside of it", "rename it"
        if name.endswith(".npy"):
            return "numpy takes it for the name of another array's file", "rename it"
        if dtype_name(dtype) in map(str, NAMES):
            return "", ""
        message = f"numpy has no {dtype_name(dtype)}, so that an .npz file cannot hold it"
        if not dtype.is_floating_point:
            return message, ""
        wider = Wording(python="dtype=torch.float32", command="--dtype float32")
        return message, Message("pass ", wider, ", which holds every value of it, or write safetensors")

    def outline(self, tensors: Mapping[str, Described], options: WriteOptions) -> Outline:
        """Lay out one file; every member is stored, dated with the first day that zip knows."""
        self.require_writable(tensors, where=f"{options.where}/{self.main}")
        pieces: list[tuple[int, bytes]] = []
        offsets: dict[str, int] = {}
        seals: dict[str, tuple[int, int, int]] = {}
        directory, at = Directory(), 0
        for tensor, described in tensors.items():
            name, count = f"{tensor}.npy".encode("utf-8", "surrogatepass"), nbytes(described)
            bare = len(local_header(name, nbytes=len(_header(described, 0)) + count, crc=0))
            header = _header(described, at + bare)
            front = local_header(name, nbytes=len(header) + count, crc=0) + header
            seals[tensor] = at + 14, directory.add(name, at=at, nbytes=len(header) + count, crc=0), zlib.crc32(header)
            pieces.append((at, front))
            offsets[tensor] = at + len(front)
            at = offsets[tensor] + count
        end = directory.end(at)
        shard = Shard(
            name=self.main,
            size=at + len(end),
            frame=(*pieces, (at, end)),
            offsets=offsets,
            tensors=tuple(tensors),
            seals={name: Seal(places=(place, at + other), before=crc) for name, (place, other, crc) in seals.items()},
        )
        return Outline(shards=(shard,))


def _header(described: Described, at: int) -> bytes:
    """The header of an array (version 1.0), padded with spaces to a multiple of :data:`ALIGNED`."""
    import numpy as np  # noqa: PLC0415  # takes time to import; most commands read headers only

    descr = np.dtype(NAMES[ElementType.of(described.dtype)]).newbyteorder("<").str
    text = repr({"descr": descr, "fortran_order": False, "shape": tuple(described.shape)}).encode()
    padding = -(at + len(MAGIC) + 4 + len(text) + 1) % ALIGNED
    return MAGIC + b"\1\0" + (len(text) + padding + 1).to_bytes(2, "little") + text + b" " * padding + b"\n"


# --------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class _Member:
    """A member of an archive.

    Attributes:
        record: where its bytes lie in the file, and their checksum once they are inflated.
        size: how many bytes it has then.
        deflated: whether it is compressed.
    """

    name: str
    record: ChecksummedRange
    size: int
    deflated: bool


@dataclass(frozen=True)
class _Array:
    """The header of a member's array.

    Attributes:
        start: where in the member the elements begin.
        columns: the first axis is the fastest (Fortran's order).
        swapped: the elements are big-endian.
    """

    shape: tuple[int, ...]
    element: ElementType
    start: int
    columns: bool
    swapped: bool

    def extent(self, member: _Member) -> Extent:
        """Where the elements lie: in the file, or in the decoded member."""
        stride = None
        if self.columns and len(self.shape) > 1:
            stride = tuple(math.prod(self.shape[:axis]) for axis in range(len(self.shape)))
        if not (member.deflated or self.swapped):
            begin = member.record.start
            return Extent(start=begin + self.start, stop=member.record.stop, stride=stride, record=member.record)
        whole = replace(member.record, start=0, stop=member.size)
        decode = partial(_Decoded, member=member, order=NAMES[self.element] if self.swapped else "")
        return Extent(start=self.start, stop=member.size, stride=stride, record=whole, decode=decode)


def _array(source: _Inflated, name: str, faults: FaultList) -> _Array | None:
    """Read the header of a member's array; None if it has a fault, which is noted."""
    try:
        text, start = _text(source, name)
        return _parsed(text, start, source.size)
    except _ArrayError as error:
        faults.add(Code.NPZ_FILE, error.message, tensor=name, hint=error.hint)
        return None


VERSIONS = (b"\1\0", b"\2\0", b"\3\0")
"""The versions of arrays that numpy reads."""


class _ArrayError(Exception):
    """A member is not an array that can be read."""

    def __init__(self, message: str, hint: str = SAVE_AGAIN) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def _text(source: _Inflated, name: str) -> tuple[bytes, int]:
    """The dictionary of an array's header, and where the elements begin."""
    begin = source.head(12)
    if not begin.startswith(MAGIC) or len(begin) < 12 or begin[6:8] not in VERSIONS:
        raise _ArrayError("it does not begin as an .npy file of version 1.0, 2.0 or 3.0 does")
    width = 2 if begin[6] == 1 else 4
    length = int.from_bytes(begin[8 : 8 + width], "little")
    start = 8 + width + length
    if length > LONGEST or start > source.size:
        raise _ArrayError(
            f"its header has {length} bytes by its own account; the member has {source.size}, and {LONGEST} are read"
        )
    charge("metadata", length, where=source.where)
    return source.head(start)[8 + width :], start


def _parsed(text: bytes, start: int, size: int) -> _Array:
    try:
        with reading(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of "1or 2", which is refused
            found = ast.literal_eval(text.decode("utf-8").strip())
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise _ArrayError("its header is not a dictionary of Python's plain values") from error
    match found:
        case {"descr": descr, "fortran_order": bool(columns), "shape": tuple(shape), **rest} if not rest:
            pass
        case _:
            raise _ArrayError("its header does not say descr, fortran_order and shape, and nothing else")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise _ArrayError(f"its shape {quote(shape)} is not a tuple of sizes")
    element, swapped = _element(descr)
    reason = shape_fault(shape, element)
    if reason:
        raise _ArrayError(reason)
    needed = math.prod(shape) * element.itemsize
    if size - start != needed:
        kind = str(element)
        raise _ArrayError(f"it has {size - start} bytes, and shape {shown_sizes(shape)} of {kind} needs {needed}")
    return _Array(shape=shape, element=element, start=start, columns=columns, swapped=swapped)


def _element(descr: object) -> tuple[ElementType, bool]:
    """The element type of a header, and whether its elements are big-endian."""
    if isinstance(descr, list):
        raise _ArrayError("its elements are records of several fields", "save each field as an array of its own")
    if isinstance(descr, str) and re.fullmatch(r"[<>|][mM]8(\[\w{1,12}\])?", descr):
        raise _ArrayError(f"its descr is {quote(descr)}: dates or durations", "save arrays of numbers")
    parts = re.fullmatch(r"([<>|])([A-Za-z])([0-9]{0,9})", descr) if isinstance(descr, str) else None
    if parts is None:
        raise _ArrayError(f"its descr {quote(descr)} is not one of numpy's")
    order, kind, width = parts.groups()
    if kind in NO_NUMBERS:
        kind_name, hint = NO_NUMBERS[kind]
        raise _ArrayError(f"its descr is {descr!r}: {kind_name}", hint)
    element = DTYPES.get(kind + width)
    if element is None or (order == "|") != (element.itemsize == 1):
        raise _ArrayError(f"its descr {quote(descr)} is not a dtype that torch has", "save it as float64 or int64")
    return element, order == ">"


class _Inflated:
    """The bytes of a member, inflated where it is compressed; without memory of its own."""

    def __init__(self, source: ByteSource, member: _Member) -> None:
        self.where = source.where
        self.size = member.size
        self._source = source
        self._member = member

    def head(self, count: int) -> bytes:
        """The first bytes, as many as there are."""
        count = min(count, self.size)
        if not self._member.deflated:
            return self._source.pread(self._member.record.start, count)
        found = bytearray()
        for piece in self.pieces(min(count, PIECE)):
            found += piece
            if len(found) >= count:
                break
        return bytes(found[:count])

    def pieces(self, most: int = PIECE) -> Iterator[bytes]:
        """All bytes, in pieces of at most ``most``."""
        record = self._member.record
        if not self._member.deflated:
            for start in range(record.start, record.stop, most):
                yield self._source.pread(start, min(most, record.stop - start))
            return
        stream, left, position, given = zlib.decompressobj(-15), b"", record.start, 0
        while not stream.eof:
            if not left and position < record.stop:
                left = self._source.pread(position, min(PIECE, record.stop - position))
                position += len(left)
            ended = not left  # zlib may still have some of what it inflated
            try:
                piece = stream.decompress(left, most)
            except zlib.error as error:
                raise self._damaged(f"cannot be inflated: {error}") from error
            if ended and not piece and not stream.eof:
                raise self._damaged(f"ends after {given} bytes, and has {self.size}")
            left = stream.unconsumed_tail
            given += len(piece)
            if given > self.size:
                raise self._damaged(f"goes on behind its {self.size} bytes")
            if piece:
                yield piece
        if given < self.size:
            raise self._damaged(f"ends after {given} bytes, and has {self.size}")
        if stream.unused_data or left or position != record.stop:
            raise self._damaged("has bytes behind its end")

    def _damaged(self, damage: str) -> CheckpointError:
        message = f"the entry {quote(self._member.name)} {damage}"
        return checkpoint_error(Code.NPZ_FILE, self.where, message, FETCH_AGAIN)


class _Decoded(Stream):
    """The elements of a member that is compressed or big-endian; places are counted from the member's first byte.

    Args:
        order: numpy's kind and size of elements that are big-endian; empty for little-endian ones.
    """

    def __init__(self, file: LocalFile, *, member: _Member, order: str) -> None:
        super().__init__(file, member.size)
        self._inflated = _Inflated(file, member)
        self.order = order

    def decoded(self, start: int) -> Iterator[bytes]:
        """The bytes of the member, which begin at 0."""
        return self._inflated.pieces()

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a writable buffer with elements, in little-endian order."""
        super().read_into(buffer, offset)
        if self.order:
            import numpy as np  # noqa: PLC0415  # as above

            np.frombuffer(buffer, dtype=self.order).byteswap(inplace=True)
