"""GGUF, the container of llama.cpp: settings, then the descriptions of the tensors, then their elements.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.  Settings (the vocabulary among them) are walked over and
not kept.  Sizes stand with the fastest axis first, the other way round than here.  Elements of the floating-point and
integer types lie in the file as torch has them.  Quantised types are blocks of several numbers each, which the package
gguf (``pip install porting[gguf]``) unpacks to float32 as they are read, a few rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from porting.checkpoint.container import Container, FileKind, Promises, UnrecognisedError
from porting.checkpoint.errors import checkpoint_error, quote
from porting.checkpoint.files import ByteSource, Decoded, LocalFile
from porting.checkpoint.header import FETCH_AGAIN, HeaderReader, TensorList
from porting.checkpoint.layout import Contents, ElementType
from porting.checkpoint.names import LONGEST_TENSOR_NAME
from porting.errors import Code, Fault
from porting.limits import charge, reading

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"

DTYPES: Mapping[int, ElementType] = {
    0: ElementType.FLOAT32, 1: ElementType.FLOAT16, 24: ElementType.INT8, 25: ElementType.INT16,
    26: ElementType.INT32, 27: ElementType.INT64, 28: ElementType.FLOAT64, 30: ElementType.BFLOAT16,
}  # fmt: skip
"""The types that torch has, by number."""

BLOCKS: Mapping[int, tuple[str, int, int]] = {
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}  # fmt: skip
"""Quantised types by number: the name, the numbers of a block, and its bytes (``GGML_QUANT_SIZES`` of gguf)."""

NEVER_STORED: Mapping[int, str] = {9: "Q8_1", 15: "Q8_K"}
"""Types of results on the way, which gguf does not unpack."""

INSTALL = "pip install 'porting[gguf]'"

SIZES: Mapping[int, int] = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a setting, by the number of its type."""

UINT32, STRING, ARRAY = 4, 8, 9

LEAST_SETTING, LEAST_TENSOR = 13, 25
"""The smallest number of bytes of a setting, and of a tensor's description."""

FLOAT32 = 4
"""Bytes of a number that was unpacked."""

MOST_AXES = 8
"""Dimensions; ggml has four."""

STEP = 1 << 12
"""Strings of a list that are charged at once."""

TAKE_FLOATS = "take the weights in float32, float16 or bfloat16"


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
    header = _Header(source, Code.GGUF_FILE)
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
    alignments: dict[str, int] = {}
    for _ in range(settings):
        key, found = header.setting()
        if key in alignments:  # of two, readers take one or the other, or refuse the file
            raise header.error(f"{quote(key)} is there twice")
        alignments[key] = found
    alignment = alignments.get(ALIGNMENT, 32)
    described = [header.tensor() for _ in range(count)]
    begin = -(-header.position // alignment) * alignment
    tensors = TensorList(source, Code.GGUF_FILE, name=name, format=Gguf.name)
    quantised: dict[str, None] = {}
    for tensor, kind, shape, offset in sorted(described, key=lambda entry: entry[3]):
        element = DTYPES.get(kind)
        if offset % alignment:
            tensors.refuse(tensor, f"its place, {offset}, is no multiple of {alignment}", FETCH_AGAIN)
        elif element is not None:
            tensors.add(tensor, shape, element, start=begin + offset)
        elif kind in BLOCKS:
            _add_blocks(tensors, tensor, shape, kind, begin + offset)
            quantised.setdefault(BLOCKS[kind][0])
        else:
            which = f"the type {NEVER_STORED[kind]}" if kind in NEVER_STORED else f"the unknown type {kind}"
            tensors.refuse(tensor, f"it has {which}, which is not read", TAKE_FLOATS)
    message = f"quantised tensors ({', '.join(sorted(quantised))}) are read as float32"
    hint = "they are not packed again on the way back"
    notes = (Fault(code=Code.GGUF_FILE, where=source.where, message=message, hint=hint),) if quantised else ()
    return tensors.contents(notes=notes)


def _add_blocks(tensors: TensorList, name: str, shape: tuple[int, ...], kind: int, start: int) -> None:
    """Add a tensor that is stored in blocks, or note why it cannot be read."""
    title, numbers, size = BLOCKS[kind]
    if not shape or shape[-1] % numbers:
        row = shape[-1] if shape else 1
        reason = f"its rows of {row} are no whole number of blocks of {numbers}, as the type {title} has them"
        tensors.refuse(name, reason, FETCH_AGAIN)
        return
    stored = math.prod(shape) // numbers * size
    if start + stored > tensors.size:
        reason = f"its {stored} bytes from byte {start} on do not lie in the file's {tensors.size}"
        tensors.refuse(name, reason, FETCH_AGAIN)
        return
    decode = partial(_Unpacked, start=start, kind=kind, count=math.prod(shape))
    tensors.claim(name, start, start + stored)
    tensors.add(name, shape, ElementType.FLOAT32, start=0, decode=decode)


class _Unpacked(Decoded):
    """The elements of a quantised tensor, in float32.

    Args:
        file: the file.
        start: the first byte of its blocks.
        kind: the number of its type.
        count: how many numbers it has.
    """

    def __init__(self, file: LocalFile, *, start: int, kind: int, count: int) -> None:
        super().__init__(file, FLOAT32 * count)
        self._start, self._kind = start, kind

    def pread(self, offset: int, count: int) -> bytes:
        """Exactly ``count`` bytes of elements."""
        try:
            import gguf  # noqa: PLC0415  # an extra
            import numpy as np  # noqa: PLC0415  # gguf has it
        except ImportError as error:
            message = "unpacking quantised tensors needs the package gguf, which is not installed"
            raise checkpoint_error(Code.GGUF_FILE, self.where, message, INSTALL) from error
        _, numbers, size = BLOCKS[self._kind]
        width = FLOAT32 * numbers
        first, last = offset // width, -(-(offset + count) // width)
        raw = self._file.pread(self._start + first * size, (last - first) * size)
        with np.errstate(all="ignore"):  # whatever a damaged file holds
            blocks = np.frombuffer(raw, dtype=np.uint8).reshape(last - first, size)
            values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(self._kind))
        unpacked = values.astype("<f4", copy=False).tobytes()
        return bytes(unpacked[offset - first * width :][:count])


class _Header(HeaderReader):
    """The header in front of the elements, read from the first byte on."""

    def string(self, limit: int) -> str:
        """The next string of at most so many bytes."""
        return self.text(self.number("<Q"), limit=limit)

    def setting(self) -> tuple[str, int]:
        """Skip a setting; returns its name, and the alignment if it is that setting, else 0."""
        key, kind = self.string(1 << 16), self.number("<I")
        if key == ALIGNMENT:
            alignment = self.number("<I") if kind == UINT32 else 0
            if not 8 <= alignment <= 1 << 16 or alignment.bit_count() != 1:
                raise self.error(f"{ALIGNMENT} is no power of two from 8 to 65536")
        else:
            alignment = 0
            of_array = kind == ARRAY
            self._go_over(self.number("<I") if of_array else kind, self.number("<Q") if of_array else 1)
        return key, alignment

    def _go_over(self, kind: int, count: int) -> None:
        if kind in SIZES:
            self.skip(count * SIZES[kind])
            return
        if kind != STRING:
            raise self.error(f"a setting of the type {kind}, before byte {self.position}")
        self.require(8 * count)
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
