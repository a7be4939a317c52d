"""The initialisers of an ONNX model: the weights of its graph, in the file or in files beside it.

https://github.com/onnx/onnx/blob/main/onnx/onnx.proto3, in the wire format of protocol buffers
(https://protobuf.dev/programming-guides/encoding).  Of the model only the graph's initialisers are read: names, sizes
and places.  Nodes, attributes and subgraphs are skipped.  Most weights are raw bytes, which are mapped and read by
ranges; the numbers of a small tensor may be listed one by one, and are decoded then.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from porting.checkpoint.container import Container, FileKind, Found, Place, Promises, UnrecognisedError, open_all
from porting.checkpoint.errors import CheckpointError, checkpoint_error, quote
from porting.checkpoint.files import ByteSource, Decoded, LocalFile
from porting.checkpoint.header import FETCH_AGAIN, VARINT, HeaderReader, TensorList, message_fields, signed
from porting.checkpoint.layout import Contents, ElementType
from porting.checkpoint.names import LONGEST_TENSOR_NAME
from porting.errors import Code
from porting.limits import charge, reading

if TYPE_CHECKING:
    import numpy as np

MODEL_GRAPH, GRAPH_INITIALIZER, GRAPH_SPARSE = 7, 5, 15
"""The fields that lead to initialisers: of ModelProto and of GraphProto."""

DIMS, DATA_TYPE, SEGMENT, NAME, RAW, EXTERNAL, LOCATION = 1, 2, 3, 8, 9, 13, 14
"""Fields of TensorProto."""

FLOATS, INT32S, INT64S, DOUBLES, UINT64S = 4, 5, 7, 10, 11
"""The fields of TensorProto that list numbers: floats of their own width, integers of a variable one (LEB128)."""

LISTED: Mapping[ElementType, int] = {
    ElementType.FLOAT32: FLOATS, ElementType.COMPLEX64: FLOATS, ElementType.FLOAT64: DOUBLES,
    ElementType.COMPLEX128: DOUBLES, ElementType.INT64: INT64S, ElementType.UINT32: UINT64S,
    ElementType.UINT64: UINT64S,
}  # fmt: skip
"""The field that lists the elements of a type; :data:`INT32S` for every other, of floating-point types their bits."""

STRINGS = 6
"""The field that lists texts."""

DTYPES: Mapping[int, ElementType] = {
    1: ElementType.FLOAT32, 2: ElementType.UINT8, 3: ElementType.INT8, 4: ElementType.UINT16, 5: ElementType.INT16,
    6: ElementType.INT32, 7: ElementType.INT64, 9: ElementType.BOOL, 10: ElementType.FLOAT16, 11: ElementType.FLOAT64,
    12: ElementType.UINT32, 13: ElementType.UINT64, 14: ElementType.COMPLEX64, 15: ElementType.COMPLEX128,
    16: ElementType.BFLOAT16, 17: ElementType.FLOAT8_E4M3FN, 18: ElementType.FLOAT8_E4M3FNUZ,
    19: ElementType.FLOAT8_E5M2, 20: ElementType.FLOAT8_E5M2FNUZ, 24: ElementType.FLOAT8_E8M0FNU,
}  # fmt: skip
"""The types that torch has, by their numbers in TensorProto.DataType."""

OTHERS: Mapping[int, str] = {8: "text", 21: "uint4", 22: "int4", 23: "float4e2m1", 25: "uint2", 26: "int2"}
"""The names of types that are not read."""

PIECE = 1 << 18
"""Bytes of a list of numbers that are decoded at a time, which takes fifty times as many."""

STEP = 16
"""Values that an initialiser is charged as."""


class Onnx(Container):
    """An ONNX model."""

    name = "onnx"
    title = "an ONNX model"
    endings = (".onnx",)
    main = "model.onnx"
    surroundings = "its graph"
    promises = Promises(writes=False)

    def sniff(self, source: ByteSource) -> FileKind | None:
        """Return None: other messages of protocol buffers begin with the same bytes."""
        return None

    def read(self, source: ByteSource, *, name: str, locate: bool = True) -> Contents:
        """Read a model whose initialisers all lie in its file."""
        with reading(source.where):
            found = _initialisers(source)
        tensors = TensorList(source, Code.ONNX_FILE, name=name, format=self.name)
        for one in found:
            if one.outside:
                tensors.refuse(one.name, f"it lies in the file {quote(one.outside.get('location', ''))}")
            else:
                one.add_to(tensors)
        return tensors.contents()

    def open(self, place: Place, main: str, *, part: str | None = None, locate: bool = True) -> Found:
        """Open a model with the files beside it that hold initialisers."""
        self.require_no_part(part, where=place.location)
        sources = open_all(place, [main])
        with reading(sources[main].where):
            found = _initialisers(sources[main])
        sources |= open_all(place, _files(found, sources[main]))
        lists = {
            name: TensorList(source, Code.ONNX_FILE, name=name, format=self.name) for name, source in sources.items()
        }
        for one in found:
            one.add_to(lists[one.file or main])
        faults = [fault for tensors in lists.values() for fault in tensors.faults.faults()]
        if faults:
            raise CheckpointError(faults)
        return Found(contents=tuple(tensors.contents() for tensors in lists.values()), sources=sources)

    def others(self, place: Place, main: str) -> tuple[str, ...]:
        """The files beside the model that hold initialisers."""
        source = place.open(main)
        with reading(source.where):
            return _files(_initialisers(source), source)


@dataclass
class _Initialiser:
    """A tensor as the graph describes it.

    Attributes:
        kind: the number of its type.
        fields: the fields that hold numbers, each with its first byte and its length.
        outside: the entries of ``external_data``: ``location``, ``offset`` and ``length`` of the bytes in another file.
        external: the bytes are in another file.
        reason: why it is not read.
    """

    name: str = ""
    shape: list[int] = field(default_factory=list)
    kind: int = 0
    fields: list[tuple[int, int, int]] = field(default_factory=list)
    outside: dict[str, str] = field(default_factory=dict)
    external: bool = False
    reason: str = ""

    @property
    def file(self) -> str:
        """The file beside the model that holds its bytes; empty for the model itself."""
        return os.path.normpath(self.outside.get("location", "")) if self.external else ""

    def add_to(self, tensors: TensorList) -> None:
        """Add it to the tensors of the file that its bytes lie in."""
        element = DTYPES.get(self.kind)
        if element is None:
            title = OTHERS.get(self.kind, f"the unknown type {self.kind}")
            self.reason = self.reason or f"its elements are {title}, which is not read"
        if not self.external and len(self.fields) > 1:
            self.reason = self.reason or "its values are stored in more than one field"
        if element is None or self.reason:
            tensors.refuse(self.name, self.reason, "export the model again, with raw data in float32")
            return
        shape = tuple(self.shape)
        if self.external:
            offset, length = (_number(self.outside.get(key)) for key in ("offset", "length"))
            if offset is None or length is None:
                tensors.refuse(self.name, "offset or length in a file beside the model is not a number", FETCH_AGAIN)
            else:
                stored = length if "length" in self.outside else tensors.size - offset  # the rest of the file
                tensors.add(self.name, shape, element, start=offset, stored=stored)
            return
        number, start, length = self.fields[0] if self.fields else (RAW, 0, 0)
        if number in {RAW, FLOATS, DOUBLES} and number in {RAW, LISTED.get(element)}:
            tensors.add(self.name, shape, element, start=start, stored=length)
        elif number != LISTED.get(element, INT32S):
            tensors.refuse(self.name, f"its {element} elements are listed as numbers of another type", FETCH_AGAIN)
        else:
            charge("made", length * element.itemsize, where=tensors.faults.where)
            listed = partial(_Listed, start=start, length=length, element=element, shape=shape)
            tensors.add(self.name, shape, element, start=0, decode=listed)


def _number(text: str | None) -> int | None:
    if text is None:
        return 0
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _files(found: list[_Initialiser], source: ByteSource) -> tuple[str, ...]:
    """The other files that hold initialisers, each in the model's own directory."""
    names = dict.fromkeys(one.file for one in found if one.external)
    for name in names:
        if name != os.path.basename(name) or name in {"", ".", ".."} or "\\" in name or not name.isprintable():
            message = f"weights lie in {quote(name)}, and only files in the model's own directory are read"
            raise checkpoint_error(
                Code.ONNX_FILE, source.where, message, "save the model again with one file beside it"
            )
    return tuple(names)


def _initialisers(source: ByteSource) -> list[_Initialiser]:
    """The initialisers of a model's graph."""
    header = HeaderReader(source, Code.ONNX_FILE)
    graphs: list[HeaderReader] = []
    try:
        for number, _, inside in message_fields(header):
            if number == MODEL_GRAPH and inside is not None:
                graphs.append(inside)
    except CheckpointError as error:
        if graphs:
            raise
        raise UnrecognisedError(error.faults[0], source, Onnx.title) from error
    if len(graphs) != 1:
        fault = header.error(f"{len(graphs)} graphs where an ONNX model has one").faults[0]
        raise UnrecognisedError(fault, source, Onnx.title)
    found = []
    for number, _, inside in message_fields(graphs[0]):
        if number == GRAPH_SPARSE:
            raise header.error("sparse initialisers, which are not read", "export the model with dense initialisers")
        if number == GRAPH_INITIALIZER and inside is not None:
            charge("objects", STEP, where=source.where)
            found.append(_initialiser(inside))
    return found


def _initialiser(inside: HeaderReader) -> _Initialiser:
    one = _Initialiser()
    for number, value, content in message_fields(inside):
        if number == DIMS:
            one.shape += _packed(content) if content is not None else [] if value is None else [value]
            if len(one.shape) > LONGEST_TENSOR_NAME:
                raise inside.error(f"a tensor of more than {LONGEST_TENSOR_NAME} dimensions")
        elif number == DATA_TYPE and value is not None:
            one.kind = value
        elif number == NAME and content is not None:
            one.name = content.text(content.stop - content.position)
        elif number == LOCATION and value is not None:
            one.external = _is_external(value, inside) or (one.external and value != 0)  # other numbers mean nothing
        elif number == EXTERNAL and content is not None:
            key, text = _pair(content)
            one.outside[key] = text
        elif number == SEGMENT:
            one.reason = "it is stored in segments, which are not read"
        elif number in {RAW, FLOATS, INT32S, INT64S, DOUBLES, UINT64S}:
            if content is None:  # an old writer lists numbers one by one, each with its field
                one.reason = "its numbers are listed one by one, which is not read"
            else:
                one.fields.append((number, content.position, content.stop - content.position))
        elif number == STRINGS:
            one.reason = "its elements are text, which is not read"
    return one


def _is_external(value: int, inside: HeaderReader) -> bool:
    if value not in range(-(1 << 31), 1 << 31):
        raise inside.error(f"{value} where a number of 32 bits says in which file a tensor lies")
    return value == 1


def _pair(content: HeaderReader) -> tuple[str, str]:
    found = {1: "", 2: ""}
    for number, _, inside in message_fields(content):
        if number in found and inside is not None:
            found[number] = inside.text(inside.stop - inside.position)
    return found[1], found[2]


def _packed(content: HeaderReader) -> list[int]:
    sizes: list[int] = []
    while content and len(sizes) <= LONGEST_TENSOR_NAME:
        sizes.append(signed(content.varint()))
    return sizes


def _varints(raw: np.ndarray) -> tuple[np.ndarray, int]:
    """The numbers of a variable width that end in a piece, and their bytes; none if one is too long."""
    import numpy as np  # noqa: PLC0415  # takes time to import; most commands read headers only

    ends = np.flatnonzero(raw < 0x80)
    widths = np.diff(ends, prepend=-1)
    if widths.max(initial=0) > VARINT:
        return np.zeros(0, dtype=np.uint64), 0
    values = np.zeros(len(ends), dtype=np.uint64)
    begins = ends - widths + 1
    for place in range(int(widths.max(initial=0))):
        here = widths > place
        septets = (raw[begins[here] + place] & 0x7F).astype(np.uint64)
        values[here] |= septets << np.uint64(7 * place)
    return values, int(widths.sum())


class _Listed(Decoded):
    """The elements of a tensor whose numbers are listed with a variable width.

    Args:
        element: the type of the elements; of a floating-point type the numbers are its bits.
    """

    def __init__(
        self, file: LocalFile, *, start: int, length: int, element: ElementType, shape: tuple[int, ...]
    ) -> None:
        import numpy as np  # noqa: PLC0415  # as above

        count = int(np.prod(shape, dtype=object))
        super().__init__(file, count * element.itemsize)
        self._values = np.zeros(min(count, length), dtype=f"<u{min(element.itemsize, 8)}")  # each has at least a byte
        listed = position = 0
        while position < length:
            raw = np.frombuffer(file.pread(start + position, min(PIECE, length - position)), dtype=np.uint8)
            values, used = _varints(raw)
            if not used or listed + len(values) > len(self._values):
                break
            self._values[listed : listed + len(values)] = values
            listed, position = listed + len(values), position + used
        if listed != count or position != length:
            reader = HeaderReader(file, Code.ONNX_FILE, start=start, stop=start + length)
            raise reader.error(f"another number of elements is listed than the {count} that are expected")

    def pread(self, offset: int, count: int) -> bytes:
        """Exactly ``count`` bytes of elements."""
        return bytes(self._values.data.cast("B")[offset : offset + count]) if count else b""
