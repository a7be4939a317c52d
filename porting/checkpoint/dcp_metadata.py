"""The ``.metadata`` of a distributed checkpoint: its tensors, the chunks of each, and where every chunk lies.

The classes are those of ``torch.distributed.checkpoint.metadata``: a tensor has a dtype, a size and chunks, which are
boxes of it.  For each chunk the storage data names a file, an offset and a length: an archive of ``torch.save`` with
that box.  torch does not check this.  Here a tensor is refused unless its chunks cover it once, and lie in plain files
beside the ``.metadata``.

The ``.metadata`` is a pickle of these classes, which torch unpickles without restrictions, so that it can run any code.
Here it is read by the machine of :mod:`porting.checkpoint.state_pickle`, which knows the names of those classes only:
each becomes a :class:`Node` with the arguments that the pickle gives it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from porting.checkpoint.errors import CheckpointError, FaultList, checkpoint_error, quote
from porting.checkpoint.files import ByteSource
from porting.checkpoint.index import shard_fault
from porting.checkpoint.layout import MAX_BYTES, MAX_RANK, Chunk, TensorInfo
from porting.checkpoint.names import DCP_METADATA, check_names
from porting.checkpoint.state_pickle import DTYPES, Global, StateMachine, describe, is_shape, is_whole
from porting.errors import Code
from porting.limits import charge

METADATA = "torch.distributed.checkpoint.metadata"
CLASSES = {
    (METADATA, "BytesStorageMetadata"),
    (METADATA, "ChunkStorageMetadata"),
    (METADATA, "Metadata"),
    (METADATA, "MetadataIndex"),
    (METADATA, "StorageMeta"),
    (METADATA, "TensorProperties"),
    (METADATA, "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
"""Classes that may be made without arguments and given their fields."""

ENUM = "_MEM_FORMAT_ENCODING"

CALLED = {
    (METADATA, ENUM),
    ("builtins", "getattr"),  # how the first Pythons 3.11 write a member of an enumeration: of that one alone
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}
"""Functions that may be called; only sizes, layouts and dictionaries are kept."""

MAX_METADATA = 1 << 29
"""Bytes at most; a million chunks need a fifth."""


@dataclass(eq=False, slots=True)
class Node:
    """An object that the pickle describes.

    Attributes:
        kind: the name of its class.
        fields: what was given to it: a dictionary by names, or a tuple; None before that.
    """

    kind: str
    fields: object = None


class MetadataMachine(StateMachine):
    """A pickle machine for a ``.metadata``; see :class:`StateMachine` for the arguments."""

    needed_by: ClassVar[str] = "distributed checkpoint"
    otherwise: ClassVar[str] = "nothing was run; save the model again with torch.distributed.checkpoint.save"
    unsafe: ClassVar[Code] = Code.DCP_UNSAFE
    damaged: ClassVar[Code] = Code.DCP_METADATA

    def _global(self, module: str, name: str) -> None:
        known = (module, name) in CLASSES or (module, name) in CALLED or (module == "torch" and name in DTYPES)
        if not known:
            raise self._uncalled(module, name)
        self._push(Global(module, name))

    def _persistent(self) -> None:
        raise self._unknown(b"Q")

    def _new(self) -> None:
        args, kind = self._pop(), self._pop()
        if not isinstance(kind, Global) or (kind.module, kind.name) not in CLASSES or args != ():
            name = f"{kind.module}.{kind.name}" if isinstance(kind, Global) else describe(kind)
            raise self.error(f"a new object of {name}", self.unsafe)
        self._push(Node(kind.name))

    def _build(self) -> None:
        fields, target = self._pop(), self._pop()
        if isinstance(target, Node) and target.fields is None and isinstance(fields, dict | tuple):
            target.fields = fields
        elif not isinstance(target, dict):  # an ordered dictionary's attributes say nothing
            raise self.error(f"attributes for {describe(target)}", self.unsafe)
        self._push(target)

    def _reduce(self) -> None:
        args, function = self._pop(), self._pop()
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise self.error(f"a call of {describe(function)}", self.unsafe)
        if (function.module, function.name) not in CALLED:
            raise self.error(f"a call of {function.module}.{function.name}", self.unsafe)
        match function.name, args:
            case "Size", (tuple() | list() as sizes,) if is_whole(sizes):
                if len(sizes) > MAX_RANK:
                    charge("objects", len(sizes), where=self.source.where)  # one list may be given to many calls
                self._push(tuple(sizes))
            case "_get_layout", (str() as layout,):
                self._push(layout)
            case "OrderedDict", ():
                self._push({})
            case ("_MEM_FORMAT_ENCODING", (int(),)) | ("Path" | "PosixPath" | "WindowsPath", _):
                self._push(None)  # where it was written, and how it lay in memory: of no use
            case "getattr", (Global() as kind, str()) if kind == Global(METADATA, ENUM):
                self._push(None)  # the same
            case "getattr", _:
                raise self.error("a call of builtins.getattr", self.unsafe)
            case _:
                raise self.error(f"a call of {function.module}.{function.name} with unknown arguments")

    def _set_items(self, values: list[object]) -> None:
        target = self._top()
        if not isinstance(target, dict) or len(values) % 2:
            raise self.error(f"items for {describe(target)} at byte {self.position}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, Node):
                self._require_key(key)
            if key in target:
                raise self.error(f"the key {quote(key)} twice in a dictionary")
            target[key] = value


Corner = tuple[int, ...]

MOST_IN_PAIRS = 4096
"""The number of boxes that are compared in pairs if no axis divides them into rows."""

COMPARISONS_PER_BOX = 16
"""How often a box is visited on average; nested grids need a few visits per axis."""


class TangledError(ValueError):
    """There are too many boxes in too little order to compare them all."""


def overlapping(boxes: Sequence[tuple[Corner, Corner]]) -> tuple[int, int] | None:
    """Find two boxes that share an element; returns their numbers, or None.

    What processes cut is a grid, or grids in the cells of one: along some axis the boxes then fall into rows, and each
    row is looked at by itself.  Where there is no such axis all pairs are compared.

    Args:
        boxes: where each begins, and its sizes, axis by axis; none of the sizes is 0.

    >>> overlapping([((0, 0), (2, 3)), ((2, 0), (2, 3)), ((0, 3), (4, 1))])
    >>> overlapping([((0, 0), (2, 3)), ((1, 2), (2, 3))])
    (0, 1)
    """
    pending = [list(range(len(boxes)))]
    left = COMPARISONS_PER_BOX * max(len(boxes), MOST_IN_PAIRS)
    while pending:
        row = pending.pop()
        left -= len(row)
        if left < 0:
            raise TangledError
        if len(row) < 2:
            continue
        rows = _rows(boxes, row)
        if rows is not None:
            pending += rows
            continue
        found = _pair(boxes, row)
        if found is not None:
            return found
    return None


def _rows(boxes: Sequence[tuple[Corner, Corner]], row: Sequence[int]) -> list[list[int]] | None:
    """Divide boxes into rows along an axis that do not touch each other; None if no axis has such rows."""
    for axis in range(len(boxes[row[0]][0])):
        ordered = sorted(row, key=lambda number: boxes[number][0][axis])
        rows: list[list[int]] = []
        end = -1
        for number in ordered:
            start, size = boxes[number][0][axis], boxes[number][1][axis]
            if start >= end:
                rows.append([])
            rows[-1].append(number)
            end = max(end, start + size)
        if len(rows) > 1:
            return rows
    return None


def _pair(boxes: Sequence[tuple[Corner, Corner]], row: Sequence[int]) -> tuple[int, int] | None:
    if len(row) > MOST_IN_PAIRS:
        raise TangledError
    for place, first in enumerate(row):
        for second in row[place + 1 :]:
            if all(
                start < other_start + other_size and other_start < start + size
                for start, size, other_start, other_size in zip(*boxes[first], *boxes[second], strict=True)
            ):
                return min(first, second), max(first, second)
    return None


SAVE_AGAIN = "save it again with torch.distributed.checkpoint.save"


@dataclass(frozen=True, kw_only=True)
class DistributedContents:
    """The content of a distributed checkpoint.

    Attributes:
        tensors: its tensors, in the order of the ``.metadata``.
        chunks: the boxes of each that hold elements.
        entries: the names of entries that are not tensors: numbers, lists and the like, each a pickle that is not
            read.
        parts: the state dicts that were nested in what was saved, as far as the ``.metadata`` says, by what they were
            saved under, and how many tensors each has.
    """

    tensors: Mapping[str, TensorInfo]
    chunks: Mapping[str, tuple[Chunk, ...]]
    entries: tuple[str, ...]
    parts: Mapping[str, int]


Key = tuple[str, tuple[int, ...]]
"""A chunk: its tensor, and where in it the box begins."""


def read_metadata(source: ByteSource) -> DistributedContents:
    """Read a ``.metadata``, and check that the chunks of each tensor cover it once."""
    if source.size > MAX_METADATA:
        raise _invalid(source, f"it has {source.size} bytes, at most {MAX_METADATA} can be meant")
    machine = MetadataMachine(source, 0, source.size)
    value = machine.load()
    if machine.position != source.size:
        raise machine.error(f"{source.size - machine.position} bytes behind its end, which torch does not write")
    fields = _fields(value, "Metadata")
    state, storage = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(state, dict) or not isinstance(storage, dict):
        raise _invalid(source, "it describes no state dict with its storage")
    try:
        found = _Reading(source.where).described(state, storage)
        return replace(found, parts=_nested(found.tensors, fields.get("planner_data")))
    except RecursionError as error:  # what is wrong is shown, and tuples can be nested as deeply as the file is long
        raise _invalid(source, "its values are nested too deeply") from error


class _Reading:
    """Reads the objects of a pickle and collects their faults."""

    def __init__(self, where: str) -> None:
        self.faults = FaultList(where)
        self._lists: set[int] = set()

    def described(self, state: dict[object, object], storage: dict[object, object]) -> DistributedContents:
        """All tensors and entries."""
        places = self._places(storage)
        tensors: dict[str, TensorInfo] = {}
        chunks: dict[str, tuple[Chunk, ...]] = {}
        entries: list[str] = []
        for name, value in state.items():
            if not isinstance(name, str):
                self._wrong(None, f"the key {quote(name)} is {describe(name)} where a name is expected")
            elif isinstance(value, Node) and value.kind == "BytesStorageMetadata":
                entries.append(name)
            else:
                self._tensor(name, value, places, tensors, chunks)
        check_names(state_names := [name for name in state if isinstance(name, str)], self.faults)
        if not state_names:
            self._wrong(None, "it describes nothing")
        self.faults.raise_if_any()
        return DistributedContents(tensors=tensors, chunks=chunks, entries=tuple(entries), parts={})

    def _wrong(self, tensor: str | None, message: str, code: Code = Code.DCP_METADATA) -> None:
        self.faults.add(code, message, tensor=tensor, hint=SAVE_AGAIN)

    # ------------------------------------------------------------------------------------------ where chunks lie

    def _places(self, storage: dict[object, object]) -> dict[Key, tuple[str, int, int]]:
        """The file and the range of every chunk; entries that are not tensors have none."""
        found: dict[Key, tuple[str, int, int]] = {}
        seen: dict[str, str] = {}
        for key, value in storage.items():
            index, info = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
            name, starts = index.get("fqn"), index.get("offset")
            if not isinstance(name, str) or not (starts is None or (isinstance(starts, tuple) and is_shape(starts))):
                self._wrong(None, "the storage of something without a name and a place")
                continue
            path, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
            if not isinstance(path, str) or type(start) is not int or type(length) is not int:
                self._wrong(name, "its storage has no file, offset and length")
                continue
            if path not in seen:
                seen[path] = shard_fault(path)
            if seen[path]:
                message = f"the file {quote(path)} {seen[path]}; it has to be a plain file name beside {DCP_METADATA}"
                self.faults.add(Code.DCP_METADATA, message, tensor=name, hint="do not use this checkpoint")
            elif start < 0 or length < 0 or start + length > MAX_BYTES:
                self._wrong(name, f"its storage of {length} bytes at offset {start} is not a range", Code.DCP_CHUNK)
            elif info.get("transform_descriptors"):
                self._wrong(name, "its storage is transformed (compressed, say), which this library does not undo")
            elif starts is not None:
                if (name, starts) in found:
                    self._wrong(name, f"its chunk at {list(starts)} has two places", Code.DCP_CHUNK)
                found[name, starts] = path, start, start + length
        return found

    # ------------------------------------------------------------------------------------------ one tensor

    def _tensor(
        self,
        name: str,
        value: object,
        places: Mapping[Key, tuple[str, int, int]],
        tensors: dict[str, TensorInfo],
        chunks: dict[str, tuple[Chunk, ...]],
    ) -> None:
        fields = _fields(value, "TensorStorageMetadata")
        size, parts = fields.get("size"), fields.get("chunks")
        properties = fields.get("properties")
        given = properties.fields if isinstance(properties, Node) else None
        element = DTYPES.get(kind.name) if isinstance(kind := _first(given), Global) else None
        if not isinstance(size, tuple) or not isinstance(parts, list) or element is None:
            return self._wrong(name, "it is not a tensor with a dtype, a size and chunks")
        if isinstance(given, tuple) and given[1:2] != ("torch.strided",):
            return self._wrong(name, f"its layout is {quote(given[1])[1:-1]}, and only dense tensors are read")
        reason = _size_fault(size, element.itemsize)
        if reason:
            return self._wrong(name, reason)
        if id(parts) in self._lists:
            return self._wrong(name, "its chunks are those of another tensor", Code.DCP_CHUNK)
        self._lists.add(id(parts))
        nbytes = math.prod(size) * element.itemsize
        made = tuple(self._chunks(name, size, parts, places))
        tensors[name] = TensorInfo(
            name=name, shape=size, element=element, nbytes=nbytes, file=made[0].file if made else DCP_METADATA
        )
        chunks[name] = made
        return None

    def _chunks(
        self, name: str, size: tuple[int, ...], parts: list[object], places: Mapping[Key, tuple[str, int, int]]
    ) -> Iterator[Chunk]:
        """The chunks that hold elements; checks that they cover the tensor."""
        found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for part in parts:
            fields = _fields(part, "ChunkStorageMetadata")
            starts, sizes = fields.get("offsets"), fields.get("sizes")
            if not isinstance(starts, tuple) or not isinstance(sizes, tuple) or not _inside(starts, sizes, size):
                return self._wrong(name, f"a chunk at {_shown(starts)} of {_shown(sizes)} is not part of {list(size)}",
                                   Code.DCP_CHUNK)  # fmt: skip
            if math.prod(sizes):
                found.append((starts, sizes))
        missing = math.prod(size) - sum(math.prod(sizes) for _, sizes in found)
        try:
            twice = overlapping(found)
        except TangledError:
            return self._wrong(name, f"its {len(found)} chunks lie in no rows along any axis", Code.DCP_CHUNK)
        if twice is not None:
            first, second = (list(found[number][0]) for number in twice)
            return self._wrong(name, f"its chunks at {first} and {second} overlap", Code.DCP_CHUNK)
        if missing:
            return self._wrong(name, f"{missing} of its elements are in no chunk", Code.DCP_CHUNK)
        lost = [starts for starts, _ in found if (name, starts) not in places]
        if lost:
            return self._wrong(name, f"its chunk at {list(lost[0])} lies in no file", Code.DCP_CHUNK)
        for starts, sizes in found:
            file, start, stop = places[name, starts]
            yield Chunk(starts=starts, sizes=sizes, file=file, start=start, stop=stop)


def _nested(names: Iterable[str], paths: object) -> dict[str, int]:
    """The number of tensors under each name, by the paths that torch records to restore nested names."""
    found: dict[str, int] = {}
    for name in names:
        path = paths.get(name) if isinstance(paths, dict) else None
        if isinstance(path, tuple) and len(path) > 1 and isinstance(path[0], str) and name.startswith(f"{path[0]}."):
            found[path[0]] = found.get(path[0], 0) + 1
    return found


def _fields(value: object, kind: str) -> Mapping[str, object]:
    """The arguments of an object of this kind; empty for any other value."""
    if not isinstance(value, Node) or value.kind != kind or not isinstance(value.fields, dict):
        return {}
    return value.fields


def _first(fields: object) -> object:
    """The first of a tensor's properties, its dtype."""
    return fields[0] if isinstance(fields, tuple) and fields else None


def _size_fault(size: tuple[object, ...], itemsize: int) -> str:
    if len(size) > MAX_RANK:
        return f"{len(size)} dimensions; torch handles {MAX_RANK}"
    span = itemsize
    for length in size:
        if type(length) is not int or length < 0:
            return f"its size holds {quote(length)}"
        span *= length or 1
        if span > MAX_BYTES:
            return "its size overflows 64 bits"
    return ""


def _inside(starts: tuple[object, ...], sizes: tuple[object, ...], size: tuple[int, ...]) -> bool:
    if not len(starts) == len(sizes) == len(size):
        return False
    return all(
        type(start) is int and type(count) is int and start >= 0 and count >= 0 and start + count <= whole
        for start, count, whole in zip(starts, sizes, size, strict=True)
    )


def _shown(sizes: object) -> str:
    return quote(list(sizes))[1:-1] if isinstance(sizes, tuple) and len(sizes) <= MAX_RANK else describe(sizes)


def _invalid(source: ByteSource, message: str) -> CheckpointError:
    return checkpoint_error(Code.DCP_METADATA, source.where, message, SAVE_AGAIN)
