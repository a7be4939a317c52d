"""HDF5 files, in which Keras and TensorFlow models of transformers keep their weights.

The structure is read by h5py (``pip install porting[hdf5]``) in a process of its own, since HDF5's library crashes on
some damaged files (:mod:`porting.checkpoint.hdf5_walk`).  The path of a dataset is the tensor's name.  Where HDF5 has
the elements in a row and uncompressed, they are mapped and read by ranges.  Chunks are decoded here, since HDF5
inflates them to whatever size they have; those that were never written cost nothing.  What a file names elsewhere
(links to other files, external storage, virtual datasets) is not followed.
"""

from __future__ import annotations

import base64
import json
import math
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from porting.checkpoint import hdf5_walk
from porting.checkpoint.container import Container, FileKind, Promises, UnrecognisedError
from porting.checkpoint.errors import CheckpointError, checkpoint_error, quote
from porting.checkpoint.files import PIECE, ByteSource, LocalFile, Stream, charge_decoding
from porting.checkpoint.hdf5_walk import BLOCK
from porting.checkpoint.header import FETCH_AGAIN, TensorList
from porting.checkpoint.layout import Contents
from porting.checkpoint.names import LONGEST_TENSOR_NAME
from porting.checkpoint.state_dict import SHOWN, not_read
from porting.errors import Code, Fault
from porting.limits import charge, charge_name, grant_tensors, reading, spending
from porting.printable import first_few

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"\x89HDF\r\n\x1a\n"
INSTALL = "pip install 'porting[hdf5]'"

NAME_ONCE = "save the weights under one name each; if it was saved so, the file is damaged: fetch it again"

STEP, PART = 32, 8
"""Values that a dataset, a group or a link is charged as, and a stored chunk."""

DEFLATE, SHUFFLE, FLETCHER32 = 1, 2, 3
"""The numbers of filters that are undone here."""

LONGEST_LINE = 1 << 20
"""Bytes of a line at most: names are shorter, and so are elements in a header."""

LONGEST_TIME = 1 << 30
"""Seconds."""

FIRST_BLOCK = 128
"""Bytes in which the first block lies that says where the file ends, with the widest addresses."""

CHECKSUM = 4
"""Bytes of a checksum behind a chunk."""

BAND = 1 << 26
"""Bytes of rows that are put together of the chunks that they lie in; wider rows of chunks are decoded in turns."""


class Hdf5(Container):
    """An HDF5 file."""

    name = "hdf5"
    title = "an HDF5 file"
    endings = (".h5", ".hdf5")
    main = "tf_model.h5"
    also = ("model.weights.h5",)
    separator = "/"
    promises = Promises(writes=False)

    def sniff(self, source: ByteSource) -> FileKind | None:
        """Whether the file begins with the format's signature."""
        begins = source.pread(0, min(len(MAGIC), source.size)) == MAGIC
        return FileKind(self.title, "rename it to end in .h5") if begins else None

    def read(self, source: ByteSource, *, name: str, locate: bool = True) -> Contents:
        """Go through all groups; no elements are read."""
        if self.sniff(source) is None:
            message = "this does not begin as an HDF5 file does"
            fault = Fault(code=Code.FORMAT_WRONG, where=source.where, message=message, hint=FETCH_AGAIN)
            raise UnrecognisedError(fault, source, self.title)
        tensors = TensorList(source, Code.HDF5_FILE, name=name, format=self.name)
        others: list[str] = []
        links = _Links(source.where)
        end = min(_stated_end(source), source.size)
        with reading(source.where) as budget:
            seconds = min(max(math.ceil(budget.left), 1), LONGEST_TIME) if budget.left < math.inf else LONGEST_TIME
            with _Walk(source, seconds) as walk:
                for count, (path, described, stored) in enumerate(_datasets(walk, others, links, source.where), 1):
                    grant_tensors(count, where=source.where)
                    _add(tensors, path, described, stored, end)
        return tensors.contents(notes=(*not_read(others, source.where), *links.notes()))


class _Walk:
    """The process that goes over a file; see :mod:`porting.checkpoint.hdf5_walk`.

    Args:
        source: the file, of which it gets what it asks for.
        seconds: the processor time that it may take.
    """

    def __init__(self, source: ByteSource, seconds: int) -> None:
        from porting.checkpoint.npz import DTYPES  # noqa: PLC0415  # numpy's types

        specs = [find_spec(package) for package in ("h5py", "numpy")]
        if None in specs:
            message = "reading an HDF5 file needs the package h5py, which is not installed"
            raise checkpoint_error(Code.HDF5_FILE, source.where, message, INSTALL)
        self._source = source
        self.taken = 0.0
        folders = [str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin]
        given = json.dumps([source.size, seconds, sorted(DTYPES), folders])
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-I", hdf5_walk.__file__, given]
        self._process = subprocess.Popen(  # noqa: S603  # our own program
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )

    def __enter__(self) -> _Walk:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def messages(self) -> Iterator[list[Any]]:  # of what JSON has
        """The reader's output, line by line; requests for bytes are answered and not returned."""
        requests, answers = self._process.stdout, self._process.stdin
        if requests is None or answers is None:
            raise ValueError("the process has no pipes")  # a bug of ours
        while line := requests.readline(LONGEST_LINE):
            try:
                said = json.loads(line) if line.endswith(b"\n") else None
            except (ValueError, RecursionError):
                said = None
            match said:
                case ["read", int(offset), int(count), int(used)] if (
                    0 <= offset <= offset + count <= self._source.size and used >= 0 and count <= max(used, BLOCK)
                ):
                    charge("metadata", used, where=self._source.where)
                    answer = self._source.pread(offset, count)
                    with suppress(BrokenPipeError):  # what it says tells why it ended
                        answers.write(answer)
                        answers.flush()
                case ["failed", str(told)]:
                    raise self._failed(f"h5py cannot read it: {told}")
                case ["end"]:
                    self._ended()
                    return
                case [str(), *_] as message:
                    yield message
                case _:
                    break
        os.kill(self._process.pid, signal.SIGKILL)  # it has ended, or does not say what it should
        self._ended()
        raise self._failed("the HDF5 library crashed on it")

    def _ended(self) -> None:
        """Wait for the end, and charge its processor time."""
        _, status, used = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        with spending() as budget:
            if self._process.returncode == -signal.SIGXCPU:
                raise budget.exceeded("seconds", self._source.where)
            budget.spend(used.ru_utime + used.ru_stime, self._source.where)

    def _failed(self, message: str) -> CheckpointError:
        return checkpoint_error(Code.HDF5_FILE, self._source.where, message, FETCH_AGAIN)


LINKS = {
    "links inside the file": "tensors are read under the names that the links lead to",
    "links to other files": "for safety no other file is opened: copy the tensors into this one",
}
"""The kinds of links that are not followed, with what to do about each."""


class _Links:
    """The soft and external links of a file, which are not followed."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._found: dict[str, list[str]] = {kind: [] for kind in LINKS}

    def add(self, path: str, target: str, file: str | None) -> None:
        """Note where a link leads: to a path, in this file or in another."""
        charge("metadata", len(target) + len(file or ""), where=self._where)
        inside, outside = self._found.values()
        place = "" if file is None else f" in {quote(file)}"
        (inside if file is None else outside).append(f"{quote(path)} leads to {quote(target)}{place}")

    def notes(self) -> tuple[Fault, ...]:
        """A note for each kind of link that there is."""
        said = {kind: first_few(links, SHOWN, between="; ") for kind, links in self._found.items() if links}
        return tuple(
            Fault(code=Code.NOT_READ, where=self._where, message=f"{kind} are not followed: {links}", hint=LINKS[kind])
            for kind, links in said.items()
        )


def _datasets(
    walk: _Walk, others: list[str], links: _Links, where: str
) -> Iterator[tuple[str, Mapping[str, Any], list[_Stored]]]:
    """The datasets of a file: paths, descriptions, stored parts."""
    path, stored = "", list[_Stored]()
    for message in walk.messages():
        match message:
            case ["link", str(path)]:
                stored = []
                charge("objects", STEP, where=where)
                if len(path) > LONGEST_TENSOR_NAME:
                    raise checkpoint_error(Code.HDF5_FILE, where, f"a name of {len(path)} characters", FETCH_AGAIN)
                charge_name(path, where=where)
            case ["damaged"]:
                raise checkpoint_error(Code.HDF5_FILE, where, f"the link of {quote(path)} is damaged", FETCH_AGAIN)
            case ["leads", str(target), str() | None as file]:
                links.add(path, target, file)
            case ["again", str(first), str(kind)]:
                twice = f"{quote(first)} and {quote(path)} are names of the same {kind} (hard links)"
                if not first or path.startswith(f"{first}/"):
                    twice = f"the group {quote(first or '/')} contains itself, as {quote(path)}"
                raise checkpoint_error(Code.HDF5_FILE, where, twice, NAME_ONCE)
            case ["stored", [*starts], int(skipped), int(start), int(size)]:
                charge("objects", PART, where=where)
                stored.append(_Stored(tuple(starts), skipped, start, size))
            case ["dataset", None]:
                others.append(path)
            case ["dataset", dict(described)]:
                yield path, described, stored


def _stated_end(source: ByteSource) -> int:
    """Where the file ends, as its first block says: HDF5 reads no elements behind that."""
    block = source.pread(0, min(source.size, FIRST_BLOCK)).ljust(FIRST_BLOCK, b"\0")
    version = block[len(MAGIC)]
    starts, width = ({0: 24, 1: 28}[version], block[13]) if version <= 1 else (12, block[9])
    base, _, end = (int.from_bytes(block[starts + width * at :][:width], "little") for at in range(3))
    return end - base  # addresses count from the first block, whatever the base is


def _add(tensors: TensorList, path: str, described: Mapping[str, Any], stored: list[_Stored], end: int) -> None:
    """Add a dataset to the tensors, or note why it is none.

    Args:
        end: where the file ends.
    """
    import numpy as np  # noqa: PLC0415  # takes time to import

    from porting.checkpoint.npz import DTYPES  # noqa: PLC0415  # numpy's types

    element = DTYPES.get(described["kind"])
    if element is None:
        tensors.refuse(path, f"its type {described['title']} is none that torch has", "save it as float32")
        return
    if not described["same"]:  # numpy's type says nothing of unused bits
        message = f"its numbers are stored in another form than those of {described['title']}"
        tensors.refuse(path, message, "save it as float32")
        return
    if described["elsewhere"]:
        tensors.refuse(path, "its elements lie in other files, which are not read", "save the weights in one file")
        return
    dtype, shape, start = np.dtype(described["dtype"]), tuple(described["shape"]), described["start"]
    nbytes = math.prod(shape) * dtype.itemsize
    if start is not None and dtype.newbyteorder("<") == dtype and described["storage"] == nbytes:
        tensors.add(path, shape, element, start=start)
        return
    chunks = described["chunks"]
    filters = tuple(number for number, _ in described["filters"])
    reason = _unreadable_filters(filters)
    if any(number == SHUFFLE and values != [dtype.itemsize] for number, values in described["filters"]):
        reason = reason or f"its bytes are shuffled as those of other numbers than {dtype}"
    whole = math.prod(chunks) * dtype.itemsize if chunks else nbytes
    other = next((part.size for part in stored if part.size != whole), None)
    if other is not None and not filters:
        reason = reason or f"a part of its elements has {other} bytes, expected {whole}"
    ordered = tuple(sorted(stored, key=lambda part: part.starts))
    if any(part.starts == other.starts for part, other in pairwise(ordered)):
        reason = reason or "two parts of its elements have one place"
    if any(not 0 <= part.start <= end - part.size for part in stored):
        reason = reason or f"a part of its elements does not lie in the file's {end} bytes"
    if reason:
        tensors.refuse(path, reason, "save it with gzip, or without compression")
        return
    for part in stored:
        tensors.claim(path, part.start, part.start + part.size)
    charge_decoding(
        nbytes,
        itemsize=dtype.itemsize,
        stored=sum(part.size for part in stored),
        where=tensors.faults.where,
        largest=whole if chunks and stored else 0,
    )
    fill = np.frombuffer(base64.b64decode(described["fill"]), dtype)
    layout = _Layout(
        shape=shape,
        dtype=dtype,
        chunk=tuple(chunks or shape),
        stored=ordered,
        filters=filters,
        fill=fill.reshape(() if fill.size == 1 else shape),
    )
    tensors.add(path, shape, element, start=0, decode=partial(_Elements, name=path, layout=layout))


@dataclass(frozen=True)
class _Stored:
    """A stored part of a dataset: a chunk, or all of it.

    Attributes:
        starts: where it begins along each axis.
        skipped: the filters that were not applied to it, as bits.
        start: its first byte in the file.
        size: how many bytes it has there.
    """

    starts: tuple[int, ...]
    skipped: int
    start: int
    size: int


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """How the elements of a dataset are stored.

    Attributes:
        dtype: their type in the file.
        chunk: the sizes of a stored part.
        stored: those that there are, in order.
        filters: the numbers of what was applied to each, first to last.
        fill: the value of elements that are not stored; or all elements, of a dataset that its header holds.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...]
    stored: tuple[_Stored, ...]
    filters: tuple[int, ...]
    fill: Any


def _unreadable_filters(filters: tuple[int, ...]) -> str:
    """The reason why what filters made cannot be read; empty if it can."""
    other = next((one for one in filters if one not in {DEFLATE, SHUFFLE, FLETCHER32}), None)
    if other is not None:
        return f"it is compressed with the filter {other} of HDF5, which is not read"
    return "it is compressed more than once, which is not read" if len({*filters}) < len(filters) else ""


class _Elements(Stream):
    """The elements of a dataset that HDF5 has in chunks, compressed, big-endian or nowhere."""

    def __init__(self, file: LocalFile, *, name: str, layout: _Layout) -> None:
        super().__init__(file, math.prod(layout.shape) * layout.dtype.itemsize)
        self._name, self._layout = name, layout
        self._row = max(1, math.prod(layout.shape[1:]) * layout.dtype.itemsize)
        self._together = max(1, PIECE // self._row)  # rows
        if layout.filters:
            edge = (layout.chunk or (1,))[0]
            self._together = min(max(edge, self._together // edge * edge), max(1, BAND // self._row))

    def before(self, offset: int) -> int:
        """The beginning of the rows that are put together."""
        together = self._row * self._together
        return offset // together * together

    def decoded(self, start: int) -> Iterator[memoryview]:
        """The elements in rows, little-endian."""
        import numpy as np  # noqa: PLC0415  # h5py has it

        layout, together = self._layout, self._together
        filled = np.broadcast_to(layout.fill, layout.shape or (1,))
        rows, at = len(filled), 0
        for first in range(start // self._row, rows, together):
            count = min(together, rows - first)
            band = np.array(filled[first : first + count], dtype=layout.dtype.newbyteorder("<"))
            at = self._fill(band, first, at)
            yield band.reshape(-1).view(np.uint8).data

    def _fill(self, band: np.ndarray, first: int, at: int) -> int:
        """Fill rows from ``first`` on; returns the number of the first stored part that lies in them or behind."""
        parts, edge = self._layout.stored, self._layout.chunk or (1,)
        while at < len(parts) and first >= (parts[at].starts or (0,))[0] + edge[0]:
            at += 1
        for part in parts[at:]:
            begin, *others = part.starts or (0,)
            if begin >= first + len(band):
                break
            above = max(first - begin, 0)  # rows of the part in front of the band
            below = min(begin + edge[0], first + len(band)) - begin
            place = band[
                max(begin - first, 0) : begin + edge[0] - first,
                *(slice(start, start + size) for start, size in zip(others, edge[1:], strict=True)),
            ]
            place[...] = self._rows(part, above, below)[:, *map(slice, place.shape[1:])]
        return at

    def _rows(self, part: _Stored, above: int, below: int) -> np.ndarray:
        """Read rows of a stored part."""
        import numpy as np  # noqa: PLC0415  # h5py has it

        layout = self._layout
        _, *others = layout.chunk or (1,)
        width, row = layout.dtype.itemsize, math.prod(others) * layout.dtype.itemsize
        if not layout.filters:
            raw = self._file.pread(part.start + above * row, (below - above) * row)
            return np.frombuffer(raw, dtype=layout.dtype).reshape(-1, *others)
        nbytes = math.prod(layout.chunk) * width
        raw = self._file.pread(part.start, part.size)
        for number in reversed(range(len(layout.filters))):
            if part.skipped >> number & 1:
                continue
            if layout.filters[number] == FLETCHER32:
                raw = self._checked(raw)
            elif layout.filters[number] == SHUFFLE:
                whole = len(raw) // width * width  # what was compressed first may have any length
                raw = np.frombuffer(raw[:whole], dtype=np.uint8).reshape(width, -1).T.tobytes() + raw[whole:]
            else:
                raw = self._inflated(raw, nbytes + CHECKSUM)
        if len(raw) != nbytes:
            raise self._damaged(f"has {len(raw)} bytes, expected {nbytes}")
        return np.frombuffer(raw, dtype=layout.dtype).reshape(-1, *others)[above:below]

    def _inflated(self, raw: bytes, most: int) -> bytes:
        """Inflate a chunk, to at most so many bytes."""
        stream = zlib.decompressobj()
        try:
            found = stream.decompress(raw, most)
        except zlib.error as error:
            raise self._damaged(f"cannot be inflated: {error}") from error
        if not stream.eof and len(found) < most:
            raise self._damaged("ends in the middle of its compressed bytes")
        return found

    def _checked(self, raw: bytes) -> bytes:
        """The bytes in front of a checksum, which is compared."""
        import numpy as np  # noqa: PLC0415  # h5py has it

        raw, stored = raw[:-CHECKSUM], int.from_bytes(raw[-CHECKSUM:], "little")
        words = np.frombuffer(raw + bytes(len(raw) % 2), dtype=">u2")
        low = high = 0
        for start in range(0, len(words), PIECE):
            piece = words[start : start + PIECE].astype(np.uint64)
            high += low * len(piece) + int((piece * np.arange(len(piece), 0, -1, dtype=np.uint64)).sum())
            low += int(piece.sum())
        # Sums that are 0 modulo 65535 are written as either of the two.
        if (high % 0xFFFF, low % 0xFFFF) != ((stored >> 16) % 0xFFFF, (stored & 0xFFFF) % 0xFFFF):
            raise self._damaged("does not match its checksum")
        return raw

    def _damaged(self, damage: str) -> CheckpointError:
        message = f"tensor {quote(self._name)}: a chunk {damage}"
        return checkpoint_error(Code.HDF5_FILE, self.where, message, FETCH_AGAIN)
