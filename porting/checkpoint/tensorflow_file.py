"""Checkpoints of TensorFlow: an ``.index`` file, and the files with the elements beside it.

``tf.train.Saver`` and ``tf.train.Checkpoint`` write ``NAME.index`` and ``NAME.data-00000-of-00001``.  The index is a
table of LevelDB (https://github.com/google/leveldb/blob/main/doc/table_format.md) whose keys are the tensors' names and
whose values are messages of protocol buffers (BundleEntryProto, tensorflow/core/protobuf/tensor_bundle.proto).  The
elements lie in the files as torch has them.  A variable that was partitioned has an entry without elements and one for
each slice, whose key is the name and the slice in an order-preserving encoding (tensorflow/core/lib/strings/
ordered_code.cc).  Blocks of the index and elements have checksums, CRC-32C, which are stored masked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from porting.checkpoint.container import Container, FileKind, Found, Place, Promises, UnrecognisedError, open_all
from porting.checkpoint.crc32c import crc32c
from porting.checkpoint.dcp_metadata import TangledError, overlapping
from porting.checkpoint.errors import CheckpointError, checkpoint_error
from porting.checkpoint.files import ByteSource, LocalFile
from porting.checkpoint.header import FETCH_AGAIN, HeaderReader, TensorList, message_fields
from porting.checkpoint.layout import ChecksummedRange, Chunk, Contents, ElementType, Extent, TensorInfo, shape_fault
from porting.checkpoint.names import LONGEST_TENSOR_NAME
from porting.checkpoint.state_dict import not_read
from porting.errors import Code
from porting.limits import charge, charge_name, reading

MAGIC = 0xDB4775248B80FB57
FOOTER, TRAILER = 48, 5
"""Bytes of the end of a table, and of what follows each of its blocks: the compression and a checksum."""

SHAPE, CRC, SLICES = 2, 6, 7
NUMBERS = {1: "dtype", 3: "shard", 4: "offset", 5: "size"}
"""Fields of BundleEntryProto."""

SHARDS, ENDIANNESS = 1, 2
"""Fields of BundleHeaderProto, whose key is empty."""

SLICE = b"\0"
"""How the keys of slices begin, which belong to a variable with a key of its own."""

FULL = -1
"""The length of a slice along an axis of which it has all."""

MASK = 0xA282EAD8
"""The number that is added to a checksum that was rotated by 15 bits."""

MOST_SHARDS = 99_999
"""The largest number that the names of five digits hold."""

DTYPES: Mapping[int, ElementType] = {
    1: ElementType.FLOAT32, 2: ElementType.FLOAT64, 3: ElementType.INT32, 4: ElementType.UINT8, 5: ElementType.INT16,
    6: ElementType.INT8, 8: ElementType.COMPLEX64, 9: ElementType.INT64, 10: ElementType.BOOL,
    14: ElementType.BFLOAT16, 17: ElementType.UINT16, 18: ElementType.COMPLEX128, 19: ElementType.FLOAT16,
    22: ElementType.UINT32, 23: ElementType.UINT64, 24: ElementType.FLOAT8_E5M2, 25: ElementType.FLOAT8_E4M3FN,
}  # fmt: skip
"""The types that torch has, by their numbers in tensorflow's DataType."""

NO_NUMBERS = {7, 20, 21}
"""Text, resources and variants: what a checkpoint of objects stores beside its tensors."""

STEP = 16
"""Values that an entry is charged as."""


class TensorFlow(Container):
    """A checkpoint of TensorFlow."""

    name = "tensorflow"
    title = "the index of a TensorFlow checkpoint"
    endings = (".index",)
    main = "model.ckpt.index"
    surroundings = "what stands around its tensors"
    together = True
    stem = True
    separator = "/"
    promises = Promises(writes=False, checksums=True)

    def sniff(self, source: ByteSource) -> FileKind | None:
        """Whether the file ends as a table does."""
        end = source.pread(max(source.size - 8, 0), min(source.size, 8))
        table = end == MAGIC.to_bytes(8, "little")
        return FileKind(self.title, "rename it to end in .index") if table else None

    def read(self, source: ByteSource, *, name: str, locate: bool = True) -> Contents:
        """Refuse: an index holds no elements."""
        raise checkpoint_error(Code.TENSORFLOW_FILE, source.where, "an index holds no tensor itself", FETCH_AGAIN)

    def open(self, place: Place, main: str, *, part: str | None = None, locate: bool = True) -> Found:
        """Open an index and the files that it stands for."""
        index = open_all(place, [main])[main]
        with reading(index.where):
            table = _Index(index)
            entries = table.entries()
        names = _data_files(main, [*entries, *table.slices.values()])
        sources = {main: index, **open_all(place, names.values())}
        lists = {name: TensorList(sources[name], Code.TENSORFLOW_FILE, name=name, format=self.name) for name in sources}
        others = []
        crcs: dict[Chunk, int | None] = {}
        for entry in entries:
            element, tensors = DTYPES.get(entry.dtype), lists[names.get(entry.shard, main)]
            if entry.dtype in NO_NUMBERS:
                others.append(entry.name)
            elif element is None:
                tensors.refuse(entry.name, f"its type, number {entry.dtype}, is none that torch has")
            elif entry.slices:
                _add_slices(lists, names, entry, element, table.slices, crcs)
            else:
                stop = entry.offset + entry.size
                record = _range(entry.offset, stop, entry.crc, entry.name)
                tensors.add(entry.name, entry.shape, element, start=entry.offset, stored=entry.size, record=record)
        faults = [fault for tensors in lists.values() for fault in tensors.faults.faults()]
        if faults:
            raise CheckpointError(faults)

        def located(_: LocalFile, chunk: Chunk, info: TensorInfo) -> Extent:
            record = _range(chunk.start, chunk.stop, crcs[chunk], info.name)
            return Extent(start=chunk.start, stop=chunk.stop, record=record)

        contents = tuple(tensors.contents(locate=located) for tensors in lists.values())
        return self.below(Found(contents=contents, sources=sources, notes=not_read(others, index.where)), part, place)

    def others(self, place: Place, main: str) -> tuple[str, ...]:
        """The files with the elements."""
        index = place.open(main)
        with reading(index.where):
            table = _Index(index)
            entries = table.entries()
            return tuple(_data_files(main, [*entries, *table.slices.values()]).values())


@dataclass(kw_only=True)
class _Entry:
    """An entry of the index.

    Attributes:
        dtype: the number of its type.
        shard: the number of the file that it lies in.
        offset, size: its first byte there, and how many bytes it has.
        crc: the checksum of these bytes; None without one.
        slices: the parts that the entry stands for, which have entries of their own: where each begins along each
            axis, and how long it is there.
        shards: how many files there are.
    """

    name: str
    dtype: int = 0
    shape: tuple[int, ...] = ()
    shard: int = 0
    offset: int = 0
    size: int = 0
    crc: int | None = None
    slices: list[list[tuple[int, int]]] = field(default_factory=list)
    shards: int = 0


def _data_files(main: str, entries: list[_Entry]) -> dict[int, str]:
    """The names of the files with elements, by their numbers."""
    stem = main.removesuffix(TensorFlow.endings[0])
    numbers = sorted({entry.shard for entry in entries if not entry.slices})
    return {number: f"{stem}.data-{number:05d}-of-{entries[0].shards:05d}" for number in numbers if entries}


def _range(start: int, stop: int, crc: int | None, name: str) -> ChecksummedRange:
    return ChecksummedRange(start=start, stop=stop, crc=crc, name=name, checksum=crc32c)


def _add_slices(
    lists: Mapping[str, TensorList],
    names: Mapping[int, str],
    entry: _Entry,
    element: ElementType,
    slices: Mapping[bytes, _Entry],
    crcs: dict[Chunk, int | None],
) -> None:
    """Add a variable that is stored in slices, or note why it cannot be read."""
    chunks: list[Chunk] = []
    reason = shape_fault(entry.shape, element)
    for place in entry.slices:
        full = [(start, entry.shape[axis] if length == FULL else length) for axis, (start, length) in enumerate(place)]
        part = slices.get(_slice_key(entry.name, place))
        starts, sizes = tuple(start for start, _ in full), tuple(length for _, length in full)
        if part is None:
            reason = reason or f"its slice at {list(starts)} is missing"
            continue
        inside = all(
            start >= 0 and 0 <= length <= size - start
            for start, length, size in zip(starts, sizes, entry.shape, strict=True)
        )
        nbytes = math.prod(sizes) * element.itemsize
        if part.slices:
            reason = reason or f"its slice at {list(starts)} is in slices itself"
            continue
        file = names[part.shard]
        if not inside:
            reason = reason or f"its slice at {list(starts)} of the shape {list(sizes)} is not in {list(entry.shape)}"
        elif part.dtype != entry.dtype:
            reason = reason or f"its slice at {list(starts)} has the type {part.dtype}, expected {entry.dtype}"
        elif part.shape != sizes:
            reason = reason or f"its slice at {list(starts)} has the shape {list(part.shape)}, expected {list(sizes)}"
        elif part.size != nbytes:
            reason = reason or f"its slice at {list(starts)} has {part.size} bytes, and {list(sizes)} needs {nbytes}"
        elif part.offset + nbytes > lists[file].size:
            reason = reason or f"its slice at {list(starts)} does not lie in the {lists[file].size} bytes of {file}"
        elif nbytes:
            lists[file].claim(entry.name, part.offset, part.offset + nbytes)
            chunk = Chunk(starts=starts, sizes=sizes, file=file, start=part.offset, stop=part.offset + nbytes)
            chunks.append(chunk)
            crcs[chunk] = part.crc
    home = lists[chunks[0].file if chunks else next(iter(lists))]
    if not reason:
        reason = _uncovered(entry.shape, chunks)
    if reason:
        home.refuse(entry.name, reason, FETCH_AGAIN)
    else:
        home.add_in_parts(entry.name, entry.shape, element, chunks)


def _uncovered(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> str:
    """The reason why slices do not make up a tensor; empty if they do."""
    covered, wanted = sum(math.prod(chunk.sizes) for chunk in chunks), math.prod(shape)
    try:
        twice = overlapping([(chunk.starts, chunk.sizes) for chunk in chunks])
    except TangledError:
        return f"its {len(chunks)} slices are in no order"
    if twice is not None:
        return f"its slices at {list(chunks[twice[0]].starts)} and {list(chunks[twice[1]].starts)} share elements"
    return "" if covered == wanted else f"its slices hold {covered} of {wanted} elements"


def _slice_key(name: str, place: Sequence[tuple[int, int]]) -> bytes:
    """The key of a slice."""
    escaped = name.encode().replace(b"\xff", b"\xff\0").replace(b"\0", b"\0\xff")
    numbers = b"".join(_ordered(number) for extent in place for number in extent)
    return SLICE + escaped + b"\0\1" + _counted(len(place)) + numbers


def _counted(number: int) -> bytes:
    """A number from 0 on: how many bytes it has, and the bytes."""
    raw = number.to_bytes((number.bit_length() + 7) // 8, "big")
    return bytes([len(raw)]) + raw


def _ordered(number: int) -> bytes:
    """A number with a sign, such that texts are in the order of the numbers: ones in front say how long it is."""
    length = (number if number >= 0 else ~number).bit_length() // 7 + 1
    header = (1 << length) - 1 << 7 * length
    return ((number ^ header) & (1 << 8 * length) - 1).to_bytes(length, "big")


def _unmasked(crc: int) -> int:
    """A checksum as it was before it was stored."""
    rotated = (crc - MASK) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


class _Index:
    """The table in an index.

    Attributes:
        slices: the entries of the slices of partitioned variables, by their keys, once the others were read.
    """

    def __init__(self, source: ByteSource) -> None:
        self.slices: dict[bytes, _Entry] = {}
        self._source = source
        self._whole = HeaderReader(source, Code.TENSORFLOW_FILE)

    def entries(self) -> list[_Entry]:
        """The tensors, in the order of their names."""
        source = self._source
        ends = source.pread(source.size - 8, 8) if source.size >= FOOTER else b""
        if ends != MAGIC.to_bytes(8, "little"):
            fault = self._whole.error("this does not end as the index of a TensorFlow checkpoint does").faults[0]
            raise UnrecognisedError(fault, source, TensorFlow.title)
        footer = HeaderReader(source, Code.TENSORFLOW_FILE, start=source.size - FOOTER)
        _handle(footer)  # of the table's filters, of which this one has none
        found: list[_Entry] = []
        shards, last = 0, b""
        for _, block in self._block(*_handle(footer)):
            handle = _handle(block)
            for key, value in self._block(*handle):
                if key <= last and (found or shards):
                    raise self._whole.error("its names are not in order")
                last = key
                if not key:
                    shards = self._shards(value)
                elif key.startswith(SLICE):  # the variable itself says that it is stored in slices
                    self.slices[key] = self._entry(key, value, shards)
                else:
                    found.append(self._entry(key, value, shards))
        if not shards:
            raise self._whole.error("the entry with the number of files is missing")
        return found

    def _block(self, start: int, size: int) -> Iterator[tuple[bytes, HeaderReader]]:
        """The entries of a block: their keys, and readers of their values."""
        if start + size + TRAILER > self._source.size:
            raise self._whole.error(f"a block of {size} bytes at byte {start} is not in the file")
        trailer = HeaderReader(self._source, Code.TENSORFLOW_FILE, start=start + size, stop=start + size + TRAILER)
        compression, stored = trailer.take(1)[0], trailer.number("<I")
        if compression:
            raise self._whole.error(f"its blocks are compressed (type {compression}), which TensorFlow never writes")
        charge("metadata", size, where=self._source.where)
        if crc32c(self._source.pread(start, size + 1)) != _unmasked(stored):  # of the block and its compression
            raise self._whole.error(f"the checksum of the {size} bytes from byte {start} on does not match them")
        block = HeaderReader(self._source, Code.TENSORFLOW_FILE, start=start, stop=start + size)
        end = HeaderReader(self._source, Code.TENSORFLOW_FILE, start=start + max(size - 4, 0), stop=start + size)
        restarts = end.number("<I")
        if 4 * restarts + 4 > size:
            raise self._whole.error("a block is shorter than its list of restarts")
        block.stop -= 4 * restarts + 4
        key = b""
        while block:
            charge("objects", STEP, where=self._source.where)
            shared, rest, length = (block.varint() for _ in range(3))
            if shared > len(key) or shared + rest > LONGEST_TENSOR_NAME:
                raise self._whole.error(f"a name of {shared + rest} bytes")
            key = key[:shared] + block.take(rest)
            yield key, block.within(length)

    def _shards(self, value: HeaderReader) -> int:
        shards = 0
        for number, content, _ in message_fields(value):
            if number == SHARDS and content is not None:
                shards = content
            elif number == ENDIANNESS and content:
                raise self._whole.error(
                    "its numbers are big-endian, which is not read", "save it again on a little-endian machine"
                )
        if not 0 < shards <= MOST_SHARDS:
            raise self._whole.error(f"a checkpoint of {shards} files")
        return shards

    def _entry(self, key: bytes, value: HeaderReader, shards: int) -> _Entry:
        try:
            entry = _Entry(name="" if key.startswith(SLICE) else key.decode("utf-8"), shards=shards)
        except UnicodeDecodeError as error:
            raise self._whole.error("a name that is not UTF-8") from error
        charge_name(entry.name or key.decode("latin-1"), where=self._source.where)
        for number, content, inside in message_fields(value, frozenset({CRC})):
            if inside is not None and number == SHAPE:
                entry.shape += _shape(inside)
            elif inside is not None and number == SLICES:
                entry.slices.append(_slice(inside))
            elif content is not None and number == CRC:
                entry.crc = _unmasked(content)
            elif content is not None and number in NUMBERS:
                setattr(entry, NUMBERS[number], content)
        if any(len(place) != len(entry.shape) for place in entry.slices):
            raise self._whole.error(f"a slice of {entry.name!r} has another number of axes than that")
        if not 0 <= entry.shard < shards or entry.offset < 0 or entry.size < 0:
            raise self._whole.error(f"a tensor of file {entry.shard} of {shards}, at byte {entry.offset}")
        return entry


def _handle(reader: HeaderReader) -> tuple[int, int]:
    return reader.varint(), reader.varint()


def _slice(message: HeaderReader) -> list[tuple[int, int]]:
    """The start of a TensorSliceProto along each axis, and its length there."""
    found = []
    for number, _, inside in message_fields(message):
        if number == 1 and inside is not None:  # extent
            extent = {field: value for field, value, _ in message_fields(inside) if value is not None}
            found.append((extent.get(1, 0), extent.get(2, FULL)))
    return found


def _shape(message: HeaderReader) -> tuple[int, ...]:
    """The sizes of a TensorShapeProto: each is a message with the size in field 1."""
    sizes = []
    for number, _, inside in message_fields(message):
        if number == 2 and inside is not None:  # dim
            sizes.append(0)
            for field, size, text in message_fields(inside):
                if field == 2 and text is not None:  # the name of the axis, which TensorFlow's parser reads as text
                    text.skip_text(text.stop - text.position)
                sizes[-1] = size if field == 1 and size is not None else sizes[-1]  # the last one counts
    return tuple(sizes)
