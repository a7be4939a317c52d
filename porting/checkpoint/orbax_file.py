"""Checkpoints of Orbax: a directory with ``_METADATA`` and the arrays in the formats of TensorStore.

``_METADATA`` is JSON that lists the tree: the keys that lead to each value, joined by dots, are the tensor's name.  The
arrays are in zarr or zarr3, each in a folder of its own or all of them in one OCDBT database; their chunks are
compressed.  Both are read by tensorstore (``pip install porting[orbax]``), which opens files by itself: it is given a
private folder of links to the files that were opened here.  Neither JAX nor Orbax is needed.  https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html
"""

from __future__ import annotations

import math
import os
import resource
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from porting.checkpoint.container import Container, Found, Place, Promises, open_all
from porting.checkpoint.errors import CheckpointError, checkpoint_error, quote
from porting.checkpoint.files import PIECE, ByteSource, LocalFile, Stream, charge_decoding
from porting.checkpoint.header import FETCH_AGAIN, TensorList
from porting.checkpoint.layout import Contents, ElementType
from porting.checkpoint.state_dict import not_read
from porting.checkpoint.strict_json import JsonError, parse
from porting.errors import Code, Fault
from porting.limits import charge, grant, reading
from porting.opening import Folder, difference, open_error
from porting.printable import shell_word
from porting.scratch import Scratch

if TYPE_CHECKING:
    from porting.checkpoint.strict_json import Json

INSTALL = "pip install 'porting[orbax]'"
MANIFEST = "manifest.ocdbt"
LARGEST = 256 * 1024 * 1024
"""Bytes of ``_METADATA``."""

CACHE = 1 << 26
"""Bytes of chunks that tensorstore keeps: a chunk is read in several pieces."""

DTYPES: Mapping[str, ElementType] = {element.title: element for element in ElementType}
"""The types by numpy's names, which are torch's."""

NO_ARRAYS = {"string", "None", "Dict", "List", "Tuple", "NamedTuple"}
"""Types of values that have no array: texts, and containers without entries."""

SETTINGS_OF = {"zarr": ".zarray", "zarr3": "zarr.json"}
"""The file that describes how an array is stored, by tensorstore's name of the format."""

SETTINGS = {*SETTINGS_OF.values(), ".zgroup", ".zattrs", ".zmetadata"}

LARGEST_SETTINGS = 1 << 20
"""Bytes of one of these."""

MOST_HELD = 4096
"""Files that are held open; and at most a quarter of what the system allows."""

DEEPEST = 100
"""Folders in one another."""

BAND = 1 << 26
"""Bytes of rows that are read together for the sake of the chunks that they lie in."""

FEW = 64
"""Files that are compared after each read."""

STEP = 32
"""Values that an array or a file is charged as."""


class Orbax(Container):
    """A checkpoint of Orbax."""

    name = "orbax"
    title = "the metadata of an Orbax checkpoint"
    endings = (".ocdbt",)
    main = "_METADATA"
    surroundings = "what stands around its tensors"
    together = True
    separator = "."
    promises = Promises(writes=False, headers=False)

    def read(self, source: ByteSource, *, name: str, locate: bool = True) -> Contents:
        """Refuse: the metadata holds no elements."""
        raise checkpoint_error(Code.ORBAX_FILE, source.where, "the metadata holds no tensor itself", FETCH_AGAIN)

    def open(self, place: Place, main: str, *, part: str | None = None, locate: bool = True) -> Found:
        """Open the metadata and all arrays; no elements are read."""
        folder = getattr(place, "folder", None)
        if not isinstance(folder, Folder):
            raise _only_here(place)
        source = open_all(place, [main])[main]
        raw, where = place.read(main, limit=LARGEST)
        with reading(where):
            tree, database, spec = _tree(raw, where)
            files = _Files(folder.again())
            grant(files.size, where=where)
            tensors = TensorList(source, Code.ORBAX_FILE, name=main, format=self.name)
            others = [name for name, kind in tree.items() if kind in NO_ARRAYS]
            arrays = _opened([name for name in tree if name not in others], files, database, spec, where)
            left = files.size
            for name, array in arrays.items():
                left -= _add(tensors, name, array, files, left)
        sources = {main: source, **(open_all(place, [MANIFEST]) if database else {})}
        contents = replace(tensors.contents(notes=not_read(others, where)), require_unchanged=files.require_unchanged)
        return self.below(Found(contents=(contents,), sources=sources, notes=contents.notes), part, place)

    def fragment(self, name: str, *, where: str) -> Fault | None:
        """The fault of a database, which does not say what it holds."""
        if not name.endswith(self.endings):
            return None
        hint = f"pass its directory, {shell_word(Path(where).parent)}"
        return Fault(code=Code.FORMAT_WRONG, where=where, message="this is one file of an Orbax checkpoint", hint=hint)

    def incomplete(self, names: Collection[str], *, where: str) -> Fault | None:
        """The fault of a directory with a database alone."""
        if not any(name.endswith(self.endings) for name in names):
            return None
        message = f"holds a database of an Orbax checkpoint and no {self.main}, which lists what is in it"
        return Fault(code=Code.CHECKPOINT_NOT_FOUND, where=where, message=message, hint="save it with a newer Orbax")

    def others(self, place: Place, main: str) -> tuple[str, ...]:
        """Refuse: the metadata does not name the files of the arrays."""
        raise _only_here(place)


def _only_here(place: Place) -> CheckpointError:
    message = "an Orbax checkpoint is a directory of files that nothing lists, and is read on this machine only"
    hint = "download the directory, and pass its path"
    return checkpoint_error(Code.ORBAX_FILE, place.location, message, hint)


def _tree(raw: bytes, where: str) -> tuple[dict[str, str], bool, dict[str, Any]]:
    """The names of all values with their types, whether they are in one database, and how tensorstore opens an array.

    A chunk that is not stored has the fill value.  Newer versions of Orbax store all chunks and say so: then one that
    is not there is lost.
    """
    try:
        content = parse(raw, where=where, allow_nan=True)
    except JsonError as error:
        raise checkpoint_error(Code.ORBAX_FILE, where, f"not valid JSON: {error}", FETCH_AGAIN) from error
    tree = content.get("tree_metadata") if isinstance(content, dict) else None
    if not isinstance(content, dict) or not isinstance(tree, dict):
        message = "it has no tree_metadata, as what Orbax writes for a tree of arrays has"
        raise checkpoint_error(Code.ORBAX_FILE, where, message, "pass the folder of an item, such as STEP/state")
    found: dict[str, str] = {}
    for key, entry in tree.items():
        name, kind = _entry(entry)
        if not name or name in found:
            reason = "has no key_metadata and value_metadata" if not name else f"is named as another one, {quote(name)}"
            raise checkpoint_error(Code.ORBAX_FILE, where, f"the entry {quote(key)} {reason}", FETCH_AGAIN)
        found[name] = kind
    driver = "zarr3" if content.get("use_zarr3") is True else "zarr"
    sparse = content.get("store_array_data_equal_to_fill_value") is not True
    return found, content.get("use_ocdbt") is True, {"driver": driver, "fill_missing_data_reads": sparse}


def _entry(entry: Json) -> tuple[str, str]:
    """The name and the type of a value; two empty texts where the entry does not say."""
    keys = entry.get("key_metadata") if isinstance(entry, dict) else None
    value = entry.get("value_metadata") if isinstance(entry, dict) else None
    if not isinstance(keys, list) or not isinstance(value, dict):
        return "", ""
    parts = [str(key["key"]) for key in keys if isinstance(key, dict) and isinstance(key.get("key"), str | int)]
    if len(parts) != len(keys) or any(part in {"", ".", ".."} or "/" in part or "\0" in part for part in parts):
        return "", ""
    kind = value.get("value_type")
    skipped = value.get("skip_deserialize") is True or not isinstance(kind, str)
    return ".".join(parts), "None" if skipped else str(kind)


class _Files:
    """The files of a checkpoint as tensorstore finds them: it opens no others, and these as they were opened here.

    Attributes:
        path: a private folder with the same names, each a link to a file that is held open; or, of very many files, to
            its place.
        size: bytes of all files.

    Raises:
        CheckpointError: one is not a file, a link that leads out of it, or the settings of an array and too large.
    """

    def __init__(self, home: Folder) -> None:
        scratch = Scratch()
        self.path = scratch.path
        weakref.finalize(self, scratch.close)
        self.size = 0
        self.home = home.path
        self._most = min(MOST_HELD, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._held: list[LocalFile] = []
        self._others: list[tuple[Folder, str, os.stat_result]] = []
        self._add(home, self.path, 0)

    @property
    def few(self) -> bool:
        """Whether they are so few that all are compared after each read; many are when the command ends."""
        return len(self._held) + len(self._others) <= FEW

    def _add(self, folder: Folder, copy: Path, depth: int) -> None:
        if depth > DEEPEST:
            message = f"more than {DEEPEST} folders in one another"
            raise checkpoint_error(Code.ORBAX_FILE, str(self.home), message, FETCH_AGAIN)
        for name in folder.names():
            charge("objects", STEP, where=str(self.home))
            if folder.kind(name) == "a directory":
                (copy / name).mkdir()
                self._add(folder.inner(name), copy / name, depth + 1)
                continue
            file = LocalFile(folder.open(name, limit=LARGEST_SETTINGS if name in SETTINGS else None))
            self.size += file.size
            if len(self._held) < self._most:
                self._held.append(file)
                (copy / name).symlink_to(f"/dev/fd/{file.fileno()}")
            else:
                self._others.append((folder, name, os.fstat(file.fileno())))
                (copy / name).symlink_to(os.path.realpath(folder.path / name))

    def require_unchanged(self) -> None:
        """Raises: CheckpointError when a file is not the one that was opened, or was written to."""
        for file in self._held:
            file.require_unchanged()
        for folder, name, then in self._others:
            try:
                now = os.stat(name, dir_fd=folder.descriptor)
            except OSError as error:
                raise open_error(error, folder.path / name, where=str(folder.path / name)) from error
            if not os.path.samestat(then, now) or difference(then, now):
                message = "the file changed after it was opened: another one stands there now, or it was written to"
                hint = "open the checkpoint again once nothing writes to it"
                raise checkpoint_error(Code.FILE_CHANGED, str(folder.path / name), message, hint)


def _opened(names: list[str], files: _Files, database: bool, spec: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The arrays of some names, each opened by tensorstore, which has no types."""
    try:
        import tensorstore  # noqa: PLC0415  # an extra
    except ImportError as error:
        message = "reading an Orbax checkpoint needs the package tensorstore, which is not installed"
        raise checkpoint_error(Code.ORBAX_FILE, where, message, INSTALL) from error
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": CACHE}})
    base = str(files.path)
    waiting: dict[str, Any] = {}
    for name in names:
        charge("objects", STEP, where=where)
        store = (
            {"driver": "ocdbt", "base": {"driver": "file", "path": f"{base}/"}, "path": f"{name}/"}
            if database
            else {"driver": "file", "path": f"{base}/{name}/"}
        )
        opening, key = tensorstore.KvStore.open(store, context=context), SETTINGS_OF[spec["driver"]]
        _require_settings(opening, key, files, where, name, database=database)
        waiting[name] = tensorstore.open({**spec, "kvstore": store}, read=True, open=True, context=context)
    found = {}
    for name, future in waiting.items():
        try:
            found[name] = future.result()
        except Exception as error:  # tensorstore raises what its statuses look like to it
            raise _unreadable(files, where, name, error) from error
    return found


def _require_settings(opening: Any, key: str, files: _Files, where: str, name: str, *, database: bool) -> None:
    """Refuse an array whose settings are no JSON of ours: tensorstore follows lists in lists until its stack ends."""
    try:
        found = opening.result().read(key).result()
    except Exception as error:  # as above
        raise _unreadable(files, where, name, error) from error
    if len(found.value) > LARGEST_SETTINGS:
        message = f"tensor {quote(name)}: its {key} has {len(found.value)} bytes, at most {LARGEST_SETTINGS}"
        raise checkpoint_error(Code.ORBAX_FILE, where, message, FETCH_AGAIN)
    try:
        if found.state == "value":
            parse(found.value, where=where, allow_nan=True)
    except JsonError as error:
        inside = f", as {MANIFEST} and the files in d/ hold it," if database else ""
        message = f"tensor {quote(name)}: its {key}{inside} is not valid JSON: {error}"
        hint = "a file of the database is damaged or another's: fetch all of it again" if database else FETCH_AGAIN
        raise checkpoint_error(Code.ORBAX_FILE, where, message, hint) from error


def _unreadable(files: _Files, where: str, name: str, error: Exception) -> CheckpointError:
    text = str(error).replace(str(files.path), str(files.home))
    lines = text.partition(" [tensorstore_spec")[0].splitlines()
    message = f"tensor {quote(name)}: tensorstore cannot read it: {lines[0] if lines else type(error).__name__}"
    return checkpoint_error(Code.ORBAX_FILE, where, message, FETCH_AGAIN)


def _add(tensors: TensorList, name: str, array: Any, files: _Files, left: int) -> int:
    """Add an array, or note why it cannot be read."""
    element = DTYPES.get(array.dtype.name)
    shape: tuple[int, ...] = tuple(array.shape)
    if element is None:
        tensors.refuse(name, f"its type {array.dtype.name} is none that torch has", "save it as float32")
        return 0
    chunk: tuple[int, ...] = tuple(array.chunk_layout.read_chunk.shape or ())
    made, largest = (math.prod(sizes) * element.itemsize for sizes in (shape, chunk))
    stored = min(left, made)
    charge_decoding(
        made,
        itemsize=element.itemsize,
        stored=stored,
        where=tensors.faults.where,
        largest=largest,
        parts=math.prod(-(-size // max(part, 1)) for size, part in zip(shape, chunk, strict=False)),
    )
    rows = partial(_Rows, array=array, name=name, element=element, chunk=chunk, files=files)
    tensors.add(name, shape, element, start=0, decode=rows)
    return stored


class _Rows(Stream):
    """The elements of an array, read by rows of chunks.

    Args:
        file: the metadata.
    """

    def __init__(
        self,
        file: LocalFile,
        *,
        array: Any,
        name: str,
        element: ElementType,
        chunk: tuple[int, ...],
        files: _Files,
    ) -> None:
        super().__init__(file, math.prod(array.shape) * element.itemsize)
        self._array, self._name, self._files = array, name, files
        self._count: int = int(array.shape[0]) if chunk else 1
        self._row: int = max(1, self.size // max(1, self._count))
        edge, together = max(1, chunk[0]) if chunk else 1, max(1, PIECE // self._row)
        # Rows: those of whole chunks, which tensorstore does not keep; wider ones are decoded in turns.
        self._together: int = min(max(edge, together // edge * edge), max(1, BAND // self._row))

    def before(self, offset: int) -> int:
        """The beginning of the rows that are read together."""
        together = self._row * self._together
        return offset // together * together

    def decoded(self, start: int) -> Iterator[memoryview]:
        """The elements by rows."""
        rows, together = self._count, self._together
        for first in range(start // self._row, rows, together):
            part = self._array[first : min(first + together, rows)] if self._array.shape else self._array
            try:
                values = part.read(order="C").result()
            except Exception as error:
                raise _unreadable(self._files, self.where, self._name, error) from error
            if self._files.few:
                self._files.require_unchanged()
            yield values.astype(values.dtype.newbyteorder("<"), copy=False).reshape(-1).view("u1").data
