"""``.msgpack`` files of Flax: nested dictionaries of arrays, in one MessagePack value.

https://github.com/msgpack/msgpack/blob/master/spec.md; arrays are as ``flax.serialization`` writes them: an extension
of type 1 that holds the shape, the name of the dtype and the elements in row-major order, or, beyond 1 GiB, a
dictionary of such pieces.  The keys that lead to an array, joined by dots, are the tensor's name.  Nothing of the
elements is read until a tensor is; no library of either project is needed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from porting.checkpoint.container import Container, FileKind, Promises, UnrecognisedError
from porting.checkpoint.errors import quote
from porting.checkpoint.files import ByteSource, Decoded, LocalFile
from porting.checkpoint.header import HeaderReader, TensorList
from porting.checkpoint.layout import Contents, ElementType
from porting.checkpoint.names import LONGEST_TENSOR_NAME
from porting.checkpoint.state_dict import not_read
from porting.errors import Code
from porting.limits import charge, charge_name, reading

DEEPEST = 100
"""Levels of nesting."""

ARRAY, SCALAR = 1, 3
"""Flax's types of extensions: an array, and a scalar of numpy, which is written as an array without axes."""

TIME, TIMES = -1, (4, 8, 12)
"""MessagePack's own type of extensions, and how many bytes it has."""

PIECES = "__msgpack_chunked_array__"
"""The key that marks an array in pieces."""

DTYPES: Mapping[str, ElementType] = {element.title: element for element in ElementType}
"""The types by numpy's names, which are torch's."""

STEP = 4
"""Values that an entry of a dictionary or a list is charged as."""


class FlaxMsgpack(Container):
    """A file that ``flax.serialization`` wrote."""

    name = "flax"
    title = "a .msgpack file of Flax"
    endings = (".msgpack",)
    main = "flax_model.msgpack"
    separator = "."
    promises = Promises(writes=False)

    def sniff(self, source: ByteSource) -> FileKind | None:
        """Return None: many files begin with the same byte."""
        return None

    def read(self, source: ByteSource, *, name: str, locate: bool = True) -> Contents:
        """Walk over the dictionaries; the elements of the arrays are skipped."""
        with reading(source.where):
            return _Walk(source, name).contents()


@dataclass(frozen=True, kw_only=True)
class _Array:
    """An array as the file describes it.

    Attributes:
        start, stored: where its elements begin, and how many bytes they have.
    """

    shape: tuple[int, ...]
    dtype: str
    start: int
    stored: int


class _Walk:
    """Goes over a file from its first byte on."""

    def __init__(self, source: ByteSource, name: str) -> None:
        self._source = source
        self._header = HeaderReader(source, Code.FLAX_FILE)
        self._tensors = TensorList(source, Code.FLAX_FILE, name=name, format=FlaxMsgpack.name)
        self._others: list[str] = []

    def contents(self) -> Contents:
        """The contents of the file."""
        kind, count = self._begin()
        if kind != "map":
            fault = self._header.error("this does not begin with a dictionary, as a file of Flax does").faults[0]
            raise UnrecognisedError(fault, self._source, FlaxMsgpack.title)
        self._dictionary(count, "", 0)
        if self._header:
            behind = self._source.size - self._header.position
            raise self._header.error(f"{behind} bytes behind its end")
        return self._tensors.contents(notes=not_read(self._others, self._source.where))

    def _dictionary(self, count: int, prefix: str, depth: int) -> None:
        """Go over the entries of a dictionary."""
        self._charge(count, depth)
        if depth >= DEEPEST:
            raise self._header.error(f"more than {DEEPEST} dictionaries in one another")
        seen: set[str] = set()
        for _ in range(count):
            key = self._key(len(prefix))
            if key in seen:
                raise self._header.error(f"the key {quote(prefix + key)} is there twice")
            if key == PIECES:
                if seen or not prefix:
                    raise self._header.error(f"{quote(prefix[:-1])} is marked as an array in pieces, not as Flax does")
                self._in_pieces(count, prefix[:-1], depth)
                return
            seen.add(key)
            name = prefix + key
            charge_name(name, where=self._source.where)
            self._value(name, depth)

    def _value(self, name: str, depth: int) -> None:
        kind, count = self._begin()
        if kind == "map":
            self._dictionary(count, f"{name}.", depth + 1)
        elif kind == "ext":
            array = self._array(count, name)
            if array is not None:
                self._add(name, array)
        else:
            self._others.append(name)
            self._skip(kind, count, depth + 1)

    def _add(self, name: str, array: _Array) -> None:
        element = DTYPES.get(array.dtype)
        if element is None:
            hint = "save it as float32 or int32"
            self._tensors.refuse(name, f"its dtype {quote(array.dtype)} is none that torch has", hint)
        else:
            self._tensors.add(name, array.shape, element, start=array.start, stored=array.stored)

    def _in_pieces(self, count: int, name: str, depth: int) -> None:
        """Read an array in pieces: ``shape`` and ``chunks``, each a dictionary whose keys count from 0."""
        if self._begin() != ("true", 0) or count != 3:  # the mark, the shape and the pieces
            raise self._header.error(f"{quote(name)} is marked as an array in pieces and has no shape and chunks")
        found: dict[str, list[object]] = {}
        for expected in ("shape", "chunks"):
            key, (kind, entries) = self._key(0), self._begin()
            if key != expected or kind != "map":
                raise self._header.error(f"{quote(name)} in pieces has {quote(key)} where {expected} is expected")
            self._charge(entries, depth)
            found[expected] = [self._numbered(number, name) for number in range(entries)]
        shape = tuple(size for size in found["shape"] if isinstance(size, int))
        pieces = [piece for piece in found["chunks"] if isinstance(piece, _Array)]
        if (len(shape), len(pieces)) != (len(found["shape"]), len(found["chunks"])) or not pieces:
            raise self._header.error(f"{quote(name)} in pieces has values that are neither sizes nor arrays")
        element = DTYPES.get(pieces[0].dtype)
        if element is None or any(piece.dtype != pieces[0].dtype for piece in pieces):
            self._tensors.refuse(name, f"its pieces are of the dtype {quote(pieces[0].dtype)}, which is not read")
            return
        if any(piece.stored != math.prod(piece.shape) * element.itemsize for piece in pieces):
            self._tensors.refuse(name, "a piece of it has another number of bytes than its shape needs")
            return
        if any(not piece.shape or piece.shape[1:] != pieces[0].shape[1:] for piece in pieces):
            self._tensors.refuse(name, "its pieces have shapes that cannot be joined along their first axis")
            return
        ranges = tuple((piece.start, piece.stored) for piece in pieces)
        stored = sum(count for _, count in ranges)
        self._tensors.add(name, shape, element, start=0, stored=stored, decode=partial(_Joined, ranges=ranges))

    def _numbered(self, number: int, name: str) -> object:
        """An entry of an array in pieces: a size or a piece, whose key has to be its number."""
        key = self._key(0)
        if key != str(number):
            raise self._header.error(f"{quote(name)} in pieces has {quote(key)} where {number} is expected")
        kind, count = self._begin()
        if kind == "int":
            return count
        return self._array(count, name) if kind == "ext" else None

    def _array(self, count: int, name: str) -> _Array | None:
        """The array of an extension of ``count`` bytes; None for an extension of another type, which is skipped."""
        kind = self._header.number("<b")
        inside = self._header.within(count)
        if kind not in {ARRAY, SCALAR}:
            self._require_time(kind, count)
            self._others.append(name)
            return None
        outer, self._header = self._header, inside
        try:
            if self._begin() != ("array", 3):
                raise inside.error(f"{quote(name)} is not a Flax array")
            kind_of_shape, axes = self._begin()
            if kind_of_shape != "array" or axes > DEEPEST:
                raise inside.error(f"{quote(name)} has no shape")
            sizes = [self._begin() for _ in range(axes)]
            text, length = self._begin()
            dtype = inside.text(length) if text in {"str", "bin"} else ""
            binary, stored = self._begin()
            start = inside.position
            inside.skip(stored if binary == "bin" else 0)
            if not dtype or binary != "bin" or inside or any(size != "int" for size, _ in sizes):
                raise inside.error(f"{quote(name)} is not a Flax array")
            return _Array(shape=tuple(size for _, size in sizes), dtype=dtype, start=start, stored=stored)
        finally:
            self._header = outer

    def _key(self, before: int) -> str:
        kind, count = self._begin()
        if kind != "str":
            raise self._header.error(f"a key that is not text before byte {self._header.position}")
        return self._header.text(count, limit=LONGEST_TENSOR_NAME - before)

    def _skip(self, kind: str, count: int, depth: int) -> None:
        """Skip the rest of a value; what a list holds has no name.  What msgpack refuses in it is refused."""
        if kind == "str":
            self._header.skip_text(count)
        elif kind == "ext":
            self._require_time(self._header.number("<b"), count)
            self._header.skip(count)
        elif kind == "bin":
            self._header.skip(count)
        elif kind in {"array", "map"}:
            self._charge(count, depth)
            if depth >= DEEPEST:
                raise self._header.error(f"more than {DEEPEST} lists in one another")
            for _ in range(count):
                if kind == "map":
                    key, length = self._begin()
                    if key not in {"str", "bin"}:
                        raise self._header.error(f"a key that is not text before byte {self._header.position}")
                    self._skip(key, length, depth + 1)
                self._skip(*self._begin(), depth + 1)

    def _require_time(self, kind: int, count: int) -> None:
        """Require that an extension that msgpack takes for a time is one."""
        if kind == TIME and count not in TIMES:
            raise self._header.error(f"a time of {count} bytes before byte {self._header.position}")

    def _charge(self, count: int, depth: int) -> None:
        self._header.require(count)  # each has at least a byte
        charge("objects", STEP * count + depth, where=self._source.where)

    def _begin(self) -> tuple[str, int]:
        """The kind of the next value, and its number of entries or bytes, or a number's value."""
        first = self._header.take(1)[0]
        for kind, (low, high) in SHORT.items():
            if low <= first <= high:
                return kind, first - low if kind != "negative" else first - 256
        if first not in LONG:
            raise self._header.error(f"a value of the unknown type {first:#04x} before byte {self._header.position}")
        kind, layout = LONG[first]
        if not layout:
            return kind, 0
        if kind == "skipped":
            self._header.skip(int(layout))
            return kind, 0
        if layout.isdigit():
            return kind, int(layout)
        return kind, self._header.number(layout)


SHORT = {
    "int": (0x00, 0x7F), "map": (0x80, 0x8F), "array": (0x90, 0x9F), "str": (0xA0, 0xBF), "negative": (0xE0, 0xFF),
}  # fmt: skip
"""Values whose first byte says how many they are."""

LONG: Mapping[int, tuple[str, str]] = {
    0xC0: ("nil", ""), 0xC2: ("false", ""), 0xC3: ("true", ""),
    0xC4: ("bin", ">B"), 0xC5: ("bin", ">H"), 0xC6: ("bin", ">I"),
    0xC7: ("ext", ">B"), 0xC8: ("ext", ">H"), 0xC9: ("ext", ">I"),
    0xCA: ("skipped", "4"), 0xCB: ("skipped", "8"),
    0xCC: ("int", ">B"), 0xCD: ("int", ">H"), 0xCE: ("int", ">I"), 0xCF: ("int", ">Q"),
    0xD0: ("int", ">b"), 0xD1: ("int", ">h"), 0xD2: ("int", ">i"), 0xD3: ("int", ">q"),
    0xD4: ("ext", "1"), 0xD5: ("ext", "2"), 0xD6: ("ext", "4"), 0xD7: ("ext", "8"), 0xD8: ("ext", "16"),
    0xD9: ("str", ">B"), 0xDA: ("str", ">H"), 0xDB: ("str", ">I"),
    0xDC: ("array", ">H"), 0xDD: ("array", ">I"), 0xDE: ("map", ">H"), 0xDF: ("map", ">I"),
}  # fmt: skip
"""The others by their first byte: the kind, and the layout of its count or value, or a number of bytes."""


class _Joined(Decoded):
    """The elements of an array in pieces, one behind the other.

    Args:
        ranges: the first byte of each piece, and how many bytes it has.
    """

    def __init__(self, file: LocalFile, *, ranges: tuple[tuple[int, int], ...]) -> None:
        super().__init__(file, sum(count for _, count in ranges))
        self._ranges = ranges
        self._begins = [0, *accumulate(count for _, count in ranges)]

    def pread(self, offset: int, count: int) -> bytes:
        """Exactly ``count`` bytes of elements."""
        found = bytearray()
        for number in range(bisect_right(self._begins, offset) - 1, len(self._ranges)):
            start, length = self._ranges[number]
            inside = offset + len(found) - self._begins[number]
            found += self._file.pread(start + inside, min(length - inside, count - len(found)))
            if len(found) == count:
                break
        return bytes(found)
