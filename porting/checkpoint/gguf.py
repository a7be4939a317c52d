"""GGUF, the container of llama.cpp: settings, then the descriptions of the tensors, then their elements.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.  Settings (the vocabulary among them) are walked over and
not kept.  Sizes stand with the fastest axis first, the other way round than here.  Elements of the floating-point and
integer types lie in the file as torch has them; quantised types are blocks of several numbers each, and are refused by
name.
"""

from __future__ import annotations

from collections.abc import Mapping

from porting.checkpoint.container import Container, FileKind, Promises, UnrecognisedError
from porting.checkpoint.files import ByteSource
from porting.checkpoint.header import FETCH_AGAIN, HeaderReader, TensorList
from porting.checkpoint.layout import Contents, ElementType
from porting.checkpoint.names import LONGEST_TENSOR_NAME
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
    alignment = 0
    for _ in range(settings):
        found = header.setting()
        if alignment and found:  # of two, readers take one or the other
            raise header.error(f"{ALIGNMENT} is there twice")
        alignment = alignment or found
    alignment = alignment or 32
    described = [header.tensor() for _ in range(count)]
    begin = -(-header.position // alignment) * alignment
    tensors = TensorList(source, Code.GGUF_FILE, name=name, format=Gguf.name)
    for tensor, kind, shape, offset in sorted(described, key=lambda entry: entry[3]):
        element = DTYPES.get(kind)
        if element is None:
            quantisation = f"the quantised type {QUANTISED[kind]}" if kind in QUANTISED else f"the unknown type {kind}"
            tensors.refuse(tensor, f"it has {quantisation}, which is not read", TAKE_FLOATS)
        elif offset % alignment:
            tensors.refuse(tensor, f"its place, {offset}, is no multiple of {alignment}", FETCH_AGAIN)
        else:
            tensors.add(tensor, shape, element, start=begin + offset)
    return tensors.contents()


class _Header(HeaderReader):
    """The header in front of the elements, read from the first byte on."""

    def string(self, limit: int) -> str:
        """The next string of at most so many bytes."""
        return self.text(self.number("<Q"), limit=limit)

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
