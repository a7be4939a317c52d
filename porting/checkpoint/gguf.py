"""GGUF, the container of llama.cpp: settings, then the descriptions of the tensors, then their elements.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.  Settings (the vocabulary among them) are walked over and
not kept.  Sizes stand with the fastest axis first, the other way round than here.  Elements of the floating-point and
integer types lie in the file as torch has them; quantised types are blocks of several numbers each, and are refused by
name.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

from porting.checkpoint.container import Container, FileKind, Promises, UnrecognisedError
from porting.checkpoint.errors import CheckpointError, FaultList, checkpoint_error, quote
from porting.checkpoint.files import ByteSource
from porting.checkpoint.layout import Contents, ElementType, Extent, TensorInfo, WeightFile, shape_fault
from porting.checkpoint.names import LONGEST_TENSOR_NAME, check_names
from porting.errors import Code
from porting.limits import charge, reading

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"

DTYPES: Mapping[int, ElementType] = {
    0: ElementType.FLOAT32, 1: ElementType.FLOAT16, 24: ElementType.INT8, 25: ElementType.INT16,
    26: ElementType.INT32, 27: ElementType.INT64, 28: ElementType.FLOAT64, 30: ElementType.BFLOAT16,
}  # fmt: skip
"""The types that torch has, by number."""

QUANTISED: Mapping[int, str] = {
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K",
    14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""The names of types that are not read, by number."""

SIZES: Mapping[int, int] = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a setting, by the number of its type."""

UINT32, STRING, ARRAY = 4, 8, 9

LEAST_SETTING, LEAST_TENSOR = 13, 25
"""The smallest number of bytes of a setting, and of a tensor's description."""

MOST_AXES = 8
"""Dimensions; ggml has four."""

STEP = 1 << 12
"""Strings of a list that are charged at once."""

FETCH_AGAIN = "the file is damaged: fetch it again"


class Gguf(Container):
    """A GGUF file."""

    name = "gguf"
    title = "a GGUF file"
    endings = (".gguf",)
    main = "model.gguf"
    promises = Promises(writes=False)

    def sniff(self, source: ByteSource) -> FileKind | None:
        """Whether the file begins with the format's magic."""
        begins = source.pread(0, min(len(MAGIC), source.size)) == MAGIC
        return FileKind(self.title, "rename it to end in .gguf") if begins else None

    def read(self, source: ByteSource, *, name: str, locate: bool = True) -> Contents:
        """Read the tensors' descriptions from the header."""
        with reading(source.where):
            return _read(source, name)


def _read(source: ByteSource, name: str) -> Contents:
    header = _Header(source)
    if source.size < len(MAGIC) or header.take(len(MAGIC)) != MAGIC:
        fault = header.error("this does not begin as a GGUF file does").faults[0]
        raise UnrecognisedError(fault, source, Gguf.title)
    version, count, settings = header.number("<I"), header.number("<Q"), header.number("<Q")
    if version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        raise header.error(f"version {version}, where little-endian files of the versions {known} are read")
    if count * LEAST_TENSOR + settings * LEAST_SETTING > source.size:
        raise header.error(f"{count} tensors and {settings} settings do not fit into {source.size} bytes")
    charge("objects", 16 * count + 4 * settings, where=source.where)
    alignment = 0
    for _ in range(settings):
        found = header.setting()
        if alignment and found:  # of two, readers take one or the other
            raise header.error(f"{ALIGNMENT} is there twice")
        alignment = alignment or found
    alignment = alignment or 32
    described = [header.tensor() for _ in range(count)]
    begin = -(-header.position // alignment) * alignment
    faults = FaultList(source.where)
    tensors: dict[str, TensorInfo] = {}
    extents: dict[str, Extent] = {}
    end, last = 0, ""
    for tensor, kind, shape, offset in sorted(described, key=lambda entry: entry[3]):
        element = DTYPES.get(kind)
        if element is None:
            quantisation = f"the quantised type {QUANTISED[kind]}" if kind in QUANTISED else f"the unknown type {kind}"
            hint = "take the weights in float32, float16 or bfloat16"
            faults.add(Code.GGUF_FILE, f"it has {quantisation}, which is not read", tensor=tensor, hint=hint)
            continue
        reason = shape_fault(shape, element) or ("it is there twice" if tensor in tensors else "")
        nbytes = math.prod(shape) * element.itemsize if not reason else 0
        if not reason and (offset % alignment or begin + offset + nbytes > source.size):
            reason = f"its {nbytes} bytes from byte {begin + offset} on do not lie in the file's {source.size}"
        elif not reason and nbytes and offset < end:
            reason = f"its bytes are also those of {quote(last)}"
        if reason:
            faults.add(Code.GGUF_FILE, reason, tensor=tensor, hint=FETCH_AGAIN)
            continue
        end, last = max(end, offset + nbytes), tensor
        tensors[tensor] = TensorInfo(name=tensor, shape=shape, element=element, nbytes=nbytes, file=name)
        extents[tensor] = Extent(start=begin + offset, stop=begin + offset + nbytes)
    check_names(tensors, faults)
    faults.raise_if_any()
    file = WeightFile(name=name, size=source.size, format=Gguf.name, metadata={}, names=tuple(tensors))
    return Contents(file=file, tensors=tensors, extents=extents)


class _Header:
    """The header in front of the elements, read from the first byte on.

    Args:
        source: the file.
    """

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.position = 0
        self._buffer = b""
        self._start = 0

    def take(self, count: int) -> bytes:
        """The next bytes."""
        self._require(count)
        begin = self.position - self._start
        if begin + count > len(self._buffer):
            length = min(max(count, 1 << 16), self.source.size - self.position)
            charge("metadata", length, where=self.source.where)
            self._buffer = self.source.pread(self.position, length)
            self._start, begin = self.position, 0
        self.position += count
        return self._buffer[begin : begin + count]

    def skip(self, count: int) -> None:
        """Skip bytes."""
        self._require(count)
        self.position += count

    def number(self, layout: str) -> int:
        """The next whole number."""
        value: int
        (value,) = struct.unpack(layout, self.take(struct.calcsize(layout)))
        return value

    def string(self, limit: int) -> str:
        """The next string of at most so many bytes."""
        count = self.number("<Q")
        if count > limit:
            raise self.error(f"a name of {count} bytes")
        try:
            return self.take(count).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"a name that is not UTF-8 before byte {self.position}") from error

    def setting(self) -> int:
        """Skip a setting; returns the alignment if it is that setting, else 0."""
        key, kind = self.string(1 << 16), self.number("<I")
        if key == ALIGNMENT:
            alignment = self.number("<I") if kind == UINT32 else 0
            if alignment <= 0 or alignment % 8 or alignment > 1 << 16:
                raise self.error(f"{ALIGNMENT} is no multiple of 8 up to 65536")
            return alignment
        if kind != ARRAY:
            self._go_over(kind, 1)
            return 0
        self._go_over(self.number("<I"), self.number("<Q"))
        return 0

    def _go_over(self, kind: int, count: int) -> None:
        if kind in SIZES:
            self.skip(count * SIZES[kind])
            return
        if kind != STRING:
            raise self.error(f"a setting of the type {kind}, before byte {self.position}")
        self._require(8 * count)
        for number in range(count):
            if number % STEP == 0:
                charge("objects", STEP, where=self.source.where)
            self.skip(self.number("<Q"))

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        """Read the description of the next tensor: its name, type, sizes and place."""
        name, axes = self.string(LONGEST_TENSOR_NAME), self.number("<I")
        if axes > MOST_AXES:
            raise self.error(f"a tensor of {axes} dimensions")
        sizes = tuple(self.number("<Q") for _ in range(axes))
        return name, self.number("<I"), sizes[::-1], self.number("<Q")

    def _require(self, count: int) -> None:
        if count > self.source.size - self.position:
            raise self.error("it ends in the middle of its header")

    def error(self, message: str) -> CheckpointError:
        """The error for a header that cannot be read."""
        return checkpoint_error(Code.GGUF_FILE, self.source.where, message, FETCH_AGAIN)
