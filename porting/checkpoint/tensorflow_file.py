"""Checkpoints of TensorFlow: an ``.index`` file, and the files with the elements beside it.

``tf.train.Saver`` and ``tf.train.Checkpoint`` write ``NAME.index`` and ``NAME.data-00000-of-00001``.  The index is a
table of LevelDB (https://github.com/google/leveldb/blob/main/doc/table_format.md) whose keys are the tensors' names and
whose values are messages of protocol buffers (BundleEntryProto, tensorflow/core/protobuf/tensor_bundle.proto).  The
elements lie in the files as torch has them.  The checksums (CRC-32C) of the index are compared, those of the elements
are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from porting.checkpoint.container import Container, FileKind, Found, Place, Promises, UnrecognisedError, open_all
from porting.checkpoint.errors import CheckpointError, checkpoint_error
from porting.checkpoint.files import ByteSource
from porting.checkpoint.header import BUFFER, FETCH_AGAIN, HeaderReader, TensorList, message_fields
from porting.checkpoint.layout import Contents, ElementType
from porting.checkpoint.names import LONGEST_TENSOR_NAME
from porting.checkpoint.state_dict import not_read
from porting.errors import Code
from porting.limits import charge, reading

MAGIC = 0xDB4775248B80FB57
FOOTER, TRAILER = 48, 5
"""Bytes of the end of a table, and of what follows each of its blocks: the compression and a checksum."""

SHAPE, SLICES = 2, 7
NUMBERS = {1: "dtype", 3: "shard", 4: "offset", 5: "size"}
"""Fields of BundleEntryProto."""

SHARDS, ENDIANNESS = 1, 2
"""Fields of BundleHeaderProto, whose key is empty."""

SLICE = b"\0"
"""How the keys of slices begin, which belong to a variable with a key of its own."""

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

CRC32C = list(range(256))
for _ in range(8):
    CRC32C = [crc >> 1 ^ (0x82F63B78 if crc & 1 else 0) for crc in CRC32C]
"""The CRC-32C of each byte."""

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
    promises = Promises(writes=False)

    def sniff(self, source: ByteSource) -> FileKind | None:
        """Whether the file ends as a table does."""
        end = source.pread(max(source.size - 8, 0), min(source.size, 8))
        table = end == MAGIC.to_bytes(8, "little")
        return FileKind(self.title, "rename it to end in .index") if table else None

    def read(self, source: ByteSource, *, name: str, locate: bool = True) -> Contents:
        """Refuse: an index holds no elements.

        Raises:
            CheckpointError: always.
        """
        raise checkpoint_error(Code.TENSORFLOW_FILE, source.where, "an index holds no tensor itself", FETCH_AGAIN)

    def open(self, place: Place, main: str, *, part: str | None = None, locate: bool = True) -> Found:
        """Open an index and the files that it stands for."""
        index = open_all(place, [main])[main]
        with reading(index.where):
            entries = _Index(index).entries()
        names = _data_files(main, entries)
        sources = {main: index, **open_all(place, names.values())}
        lists = {name: TensorList(sources[name], Code.TENSORFLOW_FILE, name=name, format=self.name) for name in sources}
        others = []
        for entry in entries:
            element, tensors = DTYPES.get(entry.dtype), lists[names[entry.shard]]
            if entry.dtype in NO_NUMBERS:
                others.append(entry.name)
            elif entry.slices:
                hint = "save the variable again without partitions"
                tensors.refuse(entry.name, "it is stored in slices, which are not read", hint)
            elif element is None:
                tensors.refuse(entry.name, f"its type, number {entry.dtype}, is none that torch has")
            else:
                tensors.add(entry.name, entry.shape, element, start=entry.offset, stored=entry.size)
        faults = [fault for tensors in lists.values() for fault in tensors.faults.faults()]
        if faults:
            raise CheckpointError(faults)
        contents = tuple(tensors.contents() for tensors in lists.values())
        return self.below(Found(contents=contents, sources=sources, notes=not_read(others, index.where)), part, place)

    def others(self, place: Place, main: str) -> tuple[str, ...]:
        """The files with the elements."""
        index = place.open(main)
        with reading(index.where):
            return tuple(_data_files(main, _Index(index).entries()).values())


@dataclass(kw_only=True)
class _Entry:
    """An entry of the index.

    Attributes:
        name: the tensor.
        dtype: the number of its type.
        shape: its sizes.
        shard: the number of the file that it lies in.
        offset, size: its first byte there, and how many bytes it has.
        slices: whether the entry stands for parts that have entries of their own.
        shards: how many files there are.
    """

    name: str
    dtype: int = 0
    shape: tuple[int, ...] = ()
    shard: int = 0
    offset: int = 0
    size: int = 0
    slices: bool = False
    shards: int = 0


def _data_files(main: str, entries: list[_Entry]) -> dict[int, str]:
    """The names of the files with elements, by their numbers."""
    stem = main.removesuffix(TensorFlow.endings[0])
    numbers = sorted({entry.shard for entry in entries})
    return {number: f"{stem}.data-{number:05d}-of-{entries[0].shards:05d}" for number in numbers if entries}


class _Index:
    """The table in an index.

    Args:
        source: the file.
    """

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._whole = HeaderReader(source, Code.TENSORFLOW_FILE)

    def entries(self) -> list[_Entry]:
        """The tensors, in the order of their names.

        Raises:
            UnrecognisedError: it does not end as a table does.
            CheckpointError: it is damaged, compressed or big-endian.
        """
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
                elif not key.startswith(SLICE):  # the variable itself says that it is stored in slices
                    found.append(self._entry(key, value, shards))
        if not shards:
            raise self._whole.error("the entry with the number of files is missing")
        return found

    def _block(self, start: int, size: int) -> Iterator[tuple[bytes, HeaderReader]]:
        """The entries of a block: their keys, and readers of their values."""
        if start + size + TRAILER > self._source.size:
            raise self._whole.error(f"a block of {size} bytes at byte {start} is not in the file")
        trailer = HeaderReader(self._source, Code.TENSORFLOW_FILE, start=start + size, stop=start + size + TRAILER)
        compression, checksum = trailer.take(1)[0], trailer.number("<I")
        if compression:
            raise self._whole.error(f"its blocks are compressed (type {compression}), which TensorFlow never writes")
        self._require_checksum(start, size, checksum)
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

    def _require_checksum(self, start: int, size: int, checksum: int) -> None:
        """Require that a block and its compression have this checksum."""
        block = HeaderReader(self._source, Code.TENSORFLOW_FILE, start=start, stop=start + size + 1)
        if checksum != _masked(crc32c(block)):
            raise self._whole.error(f"the checksum of its block at byte {start} does not match its bytes")

    def _shards(self, value: HeaderReader) -> int:
        shards = 0
        for number, content, _ in message_fields(value):
            if number == SHARDS and content is not None:
                shards = content
            elif number == ENDIANNESS and content:
                raise self._whole.error("its numbers are big-endian, which is not read")
        if not 0 < shards <= MOST_SHARDS:
            raise self._whole.error(f"a checkpoint of {shards} files")
        return shards

    def _entry(self, key: bytes, value: HeaderReader, shards: int) -> _Entry:
        try:
            entry = _Entry(name=key.decode("utf-8"), shards=shards)
        except UnicodeDecodeError as error:
            raise self._whole.error("a name that is not UTF-8") from error
        for number, content, inside in message_fields(value):
            if inside is not None and number == SHAPE:
                entry.shape += _shape(inside)
            elif inside is not None and number == SLICES:
                entry.slices = True
            elif content is not None and number in NUMBERS:
                setattr(entry, NUMBERS[number], content)
        if not 0 <= entry.shard < shards or entry.offset < 0 or entry.size < 0:
            raise self._whole.error(f"a tensor of file {entry.shard} of {shards}, at byte {entry.offset}")
        return entry


def crc32c(reader: HeaderReader) -> int:
    """The CRC-32C of what is left to read; the blocks of an index are small."""
    crc = 0xFFFFFFFF
    while reader:
        for byte in reader.take(min(reader.stop - reader.position, BUFFER)):
            crc = CRC32C[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _masked(crc: int) -> int:
    """A checksum as LevelDB stores it."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _handle(reader: HeaderReader) -> tuple[int, int]:
    return reader.varint(), reader.varint()


def _shape(message: HeaderReader) -> tuple[int, ...]:
    """The sizes of a TensorShapeProto: each is a message with the size in field 1."""
    sizes = []
    for number, _, inside in message_fields(message):
        if number == 2 and inside is not None:  # dim
            sizes.append(0)
            for field, size, _ in message_fields(inside):
                sizes[-1] = size if field == 1 and size is not None else sizes[-1]  # the last one counts
    return tuple(sizes)
