"""The header of a ``pytorch_model.bin``: a zip archive of ``torch.save``, every part of it checked.

The archive holds ``data.pkl``, the structure, and one record of raw bytes per storage
(https://pytorch.org/docs/stable/notes/serialization.html).  Its own table of contents is checked first
(:mod:`porting.checkpoint.zip_file`), then the pickle is read by a machine that can only describe tensors
(:mod:`porting.checkpoint.state_pickle`), then each tensor's extent is checked against the record that it lies in.
``torch.load`` does neither check of the records' sizes when it maps a file.

Before torch 1.6 the file was pickles in a row, then raw storages: a magic number, a protocol number, facts about the
machine, the structure, the storages' keys; then for each key the number of its elements in eight bytes, and the
elements.  Nothing in it is checksummed.
"""

from __future__ import annotations

import re
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from porting.checkpoint.container import (
    Container,
    FileKind,
    Found,
    Outline,
    Place,
    Promises,
    UnrecognisedError,
    WriteOptions,
    open_all,
)
from porting.checkpoint.dcp_archive import state_dict_shard
from porting.checkpoint.errors import CheckpointError, FaultList, checkpoint_error, quote
from porting.checkpoint.files import ByteSource, InMemory
from porting.checkpoint.inert import InertMachine, Stub
from porting.checkpoint.inner_path import InnerPathNeededError, Tree
from porting.checkpoint.layout import ChecksummedRange, Contents, Described, ElementType, Extent
from porting.checkpoint.state_dict import read_tensors, require_flat, require_stored
from porting.checkpoint.state_pickle import StateMachine, TensorSpec, describe
from porting.checkpoint.zip_file import (
    DEFLATED,
    FETCH_AGAIN,
    MAX_DIRECTORY,
    STORED,
    Archive,
    Writer,
    ZipEntry,
    bad_archive,
    first_name,
    is_archive,
    locate_all,
    read_archive,
)
from porting.checkpoint.zip_file import locate as locate_entry
from porting.errors import Code, Fault
from porting.limits import LimitError, charge, grant_tensors

SAVE_AGAIN = "save the state dict again with torch.save"
SAVED_AGAIN = "the checkpoint is damaged: fetch it, or save it, again"

SMALL = {
    "byteorder": re.compile(rb"little"),  # torch before 2.1 wrote none, on the machines of that time
    "version": re.compile(rb"[1-9]\n?|10\n?"),
    ".data/serialization_id": re.compile(rb"[ -~]{0,256}"),
    ".storage_alignment": re.compile(rb"[0-9]{1,6}"),
}
"""The records that torch reads besides the pickle, and their required content."""

KNOWN = re.compile(
    r"data\.pkl|version|byteorder|data/[^/]+|\.data/serialization_id|\.format_version|\.storage_alignment"
)
"""The entries that torch.save puts into the folder of an archive."""

SCRIPT_MARK = "constants.pkl"
"""The entry by which torch knows TorchScript."""

CLASS = re.compile(r"class (\w+)\(")
ATTRIBUTE = re.compile(r"""  (?:(\w+) : (?!Final\[)|__annotations__\["([^"\\]+)"\] = )""")
"""How the program of TorchScript declares a class, and an attribute of it that is not a constant."""

SCRIPT = re.compile(r"(code|constants|traced_inputs|extra)/.+|(constants|traced_inputs)\.pkl")
"""More entries of torch.jit.save: code, which may be compressed, and its data.  None is run."""

TORCH = Writer(name="torch.save", code=Code.BIN_ARCHIVE, again=SAVE_AGAIN, one_case=True, unchecked=True)


def read_bin(source: ByteSource, *, name: str, locate: bool = True, part: str | None = None) -> Contents:
    """Read the tensors' names, shapes and places from a ``.bin`` file, each checked against the archive.

    Args:
        source: the file's bytes; the table of contents, ``data.pkl`` and the records' small headers are read.
        locate: find where each record's bytes begin.  Without it the extents stay empty, and a remote file is
            not asked for one small range per storage.
        part: the inner path of the state dict that is meant (:mod:`porting.checkpoint.inner_path`); empty for all that
            is in the file, None where the file should be a state dict.
    """
    read = _read_legacy if is_legacy(source) else _read_archive
    whole = _state_dict(source, read, locate=locate) if part is None else None
    if isinstance(whole, Loaded):
        contents = read_tensors(whole.value, whole.records, source, name=name)
        whole.machine.require_used(whole.value, whole.records)
    else:
        contents = _read_inside(source, read, part, whole, name=name, locate=locate)
    return contents if locate else replace(contents, extents={})


Kind = TypeVar("Kind", bound=StateMachine)


@dataclass(frozen=True, kw_only=True)
class Loaded(Generic[Kind]):
    """The contents that a pickle describes.

    Attributes:
        records: where the storages lie, by their keys.
    """

    machine: Kind
    value: object
    records: Mapping[str, ChecksummedRange]


class Reader(Protocol):
    """A function that reads the pickle of a file with a given machine."""

    def __call__(self, source: ByteSource, kind: type[Kind], *, locate: bool) -> Loaded[Kind]:
        """Read the contents; ``locate`` as in :func:`read_bin`."""
        ...  # pragma: no cover


MORE = {Code.BIN_UNSAFE, Code.BIN_PICKLE, Code.BIN_TENSOR}
"""The faults of a pickle that may hold more than a state dict, whose tensors need an inner path."""


def _state_dict(source: ByteSource, read: Reader, *, locate: bool) -> Loaded[StateMachine] | CheckpointError:
    """Take a file's pickle for a state dict, or raise why it is none."""
    try:
        loaded = read(source, StateMachine, locate=locate)
        require_flat(loaded.value, source)
    except CheckpointError as error:
        if not {fault.code for fault in error.faults} & MORE:
            raise
        return error
    return loaded


def _read_inside(
    source: ByteSource, read: Reader, part: str | None, refused: CheckpointError | None, *, name: str, locate: bool
) -> Contents:
    """Read the state dict at an inner path, or that of a module."""
    try:
        loaded = read(source, InertMachine, locate=locate)
        tree = Tree(loaded.value, loaded.machine)
        places = tree.places() if refused is not None and not tree.is_module else ()
    except (CheckpointError, LimitError) as error:
        raise refused or error from error
    if refused is not None and not tree.is_module:
        inside = places and not tree.is_state_dict  # else a tensor is why, and no path leads around it
        raise InnerPathNeededError(source, places, notes=tree.notes()) if inside else refused
    tensors, notes = tree.state_dict(part or "")
    contents = read_tensors(tensors, loaded.records, source, name=name)
    machine = loaded.machine
    require_stored(machine.tensors, machine.storages.values(), loaded.records, source)
    classes = tree.notes() if tree.is_module else ()
    return replace(contents, notes=(*contents.notes, *notes, *classes), config=tree.settings())


def locate_tensor(source: ByteSource, *, element: ElementType, shape: tuple[int, ...]) -> Extent:
    """Find the elements of the only tensor in an archive of ``torch.save``."""
    loaded = _read_archive(source, StateMachine, locate=True)
    value, records = loaded.value, loaded.records
    if not isinstance(value, TensorSpec):
        raise checkpoint_error(
            Code.DCP_CHUNK, source.where, f"it holds {describe(value)} where a tensor is expected", SAVED_AGAIN
        )
    contents = read_tensors({ONE: value}, records, source, name=ONE)
    loaded.machine.require_used(value, records)
    if (value.element, value.size) != (element, shape):
        found, expected = (
            f"{list(sizes)} of {kind}" for kind, sizes in ((value.element, value.size), (element, shape))
        )
        raise checkpoint_error(
            Code.DCP_CHUNK, source.where, f"it holds a tensor {found}, and .metadata says {expected}", SAVED_AGAIN
        )
    return contents.extents[ONE]


ONE = "tensor"
"""The name, for messages, of the only tensor of an archive."""


def _read_archive(source: ByteSource, kind: type[Kind], *, locate: bool) -> Loaded[Kind]:
    """Read the pickle of an archive, and where its storages lie."""
    archive = _open_archive(source)
    entries = archive.entries
    grant_tensors(len(entries), where=source.where)  # each storage is one
    for name, expected in SMALL.items():
        if name in entries:
            raw = _record_bytes(source, entries[name])
            if raw == b"big":
                message = "its numbers are 'big'-endian; only little-endian is read"
                raise _bad_archive(source, message, "save it again on a little-endian machine")
            if not expected.fullmatch(raw):
                raise _bad_archive(source, f"its {name} is {quote(raw.decode('latin-1'))}", FETCH_AGAIN)
    structure = _record_bytes(source, entries["data.pkl"])
    machine = kind(InMemory(structure, source.where), 0, len(structure))
    if isinstance(machine, InertMachine) and SCRIPT_MARK in entries:
        machine.declared = _declared(source, entries)
    if locate:
        placed = locate_all(source, archive)
    else:
        placed = {
            name: ChecksummedRange(start=0, stop=entry.size, crc=None, name=entry.name)
            for name, entry in entries.items()
        }
    records = {name.removeprefix("data/"): record for name, record in placed.items() if name.startswith("data/")}
    value = machine.load()
    if "version" not in entries:
        raise _bad_archive(source, "a zip archive with no version, so not one that torch.save wrote", SAVE_AGAIN)
    if machine.position != len(structure):
        behind = len(structure) - machine.position
        raise machine.error(f"{behind} bytes behind its end, which torch.save does not write", Code.BIN_UNSAFE)
    if SCRIPT_MARK in entries and not (isinstance(value, Stub) and value.is_script):
        message = f"it has {SCRIPT_MARK} and holds no module, so it is not one that torch.jit.save wrote"
        raise _bad_archive(source, message, SAVE_AGAIN)
    return Loaded(machine=machine, value=value, records=records)


def _declared(source: ByteSource, entries: Mapping[str, ZipEntry]) -> dict[str, set[object]]:
    """The attributes that the program of TorchScript declares, by the full names of its classes."""
    declared: dict[str, set[object]] = {}
    for name, entry in entries.items():
        if not name.startswith("code/"):
            continue
        code = _record_bytes(source, entry)
        words = (b"__setstate__", *((b'"""', b"'''") if name.endswith(".py") else ()))  # others are pickles
        found = next((word for word in words if word in code), None)
        if found is not None:
            what = f"says how objects are read or has a text of several lines ({found.decode()})"
            message = f"the entry {quote(entry.name)} {what}, and no code is run"
            raise checkpoint_error(Code.BIN_UNSAFE, source.where, message, "save module.state_dict() instead")
        module = name.removeprefix("code/").removesuffix(".py").replace("/", ".")
        attributes: set[object] = set()
        for line in code.decode("utf-8", "replace").split("\n"):
            if opened := CLASS.match(line):
                attributes = declared.setdefault(f"{module}.{opened[1]}", set())
            elif line[:1] != " ":
                attributes = set()  # what follows belongs to no class
            elif told := ATTRIBUTE.match(line):
                attributes.add(told[1] or told[2])
    return declared


def _open_archive(source: ByteSource) -> Archive:
    """The archive and its entries by their names in its folder; refused unless torch.save made it."""
    if not is_archive(source):
        message = "this is neither a zip archive nor an older file of torch.save"
        fault = Fault(code=Code.FORMAT_WRONG, where=source.where, message=message, hint=FETCH_AGAIN)
        raise UnrecognisedError(fault, source, Bin.title)
    archive = read_archive(source, replace(TORCH, methods=frozenset({STORED, DEFLATED})))
    root = next(iter(archive.entries), "").partition("/")[0]
    found = {name.removeprefix(f"{root}/"): entry for name, entry in archive.entries.items()}
    script = SCRIPT_MARK in found
    if not script and any(entry.method != STORED for entry in found.values()):
        archive = read_archive(source, TORCH)
    structures = sum(name.endswith("/data.pkl") for name in archive.entries)
    if structures != 1 or "data.pkl" not in found:
        count = f"{structures} entries named data.pkl" if structures > 1 else "no data.pkl"
        raise _bad_archive(source, f"a zip archive with {count}, so not one that torch.save wrote", SAVE_AGAIN)
    faults = FaultList(source.where)
    for name, entry in found.items():
        known = KNOWN.fullmatch(name)
        if known and entry.method != STORED:
            faults.add(Code.BIN_ARCHIVE, f"the entry {quote(entry.name)} is compressed", hint=SAVE_AGAIN)
        if not entry.name.startswith(f"{root}/") or not (known or (script and SCRIPT.fullmatch(name))):
            faults.add(Code.BIN_ARCHIVE, f"the entry {quote(entry.name)} is not one of torch.save's", hint=SAVE_AGAIN)
    faults.raise_if_any()
    return replace(archive, entries=found)


def _record_bytes(source: ByteSource, entry: ZipEntry) -> bytes:
    """The bytes of a small record, its checksum verified."""
    if entry.size > MAX_DIRECTORY:
        raise _bad_archive(
            source, f"the entry {quote(entry.name)} has {entry.size} bytes, more than any state dict needs", SAVE_AGAIN
        )
    charge("metadata", entry.size, where=source.where)
    faults = FaultList(source.where)
    record, _ = locate_entry(source, entry, TORCH, faults)
    faults.raise_if_any()
    raw = source.pread(record.start, record.stop - record.start)
    if entry.method == DEFLATED:
        try:
            raw = zlib.decompressobj(-15).decompress(raw, entry.size + 1)
        except zlib.error:
            raw = b""
        if len(raw) != entry.size:
            raise _bad_archive(source, f"the entry {quote(entry.name)} cannot be inflated to its size", FETCH_AGAIN)
    if entry.crc and zlib.crc32(raw) != entry.crc:  # torch.save can be told to write no checksums; then they are 0
        raise _bad_archive(
            source, f"the checksum of the entry {quote(entry.name)} does not match its bytes", FETCH_AGAIN
        )
    return raw


def _bad_archive(source: ByteSource, message: str, hint: str) -> CheckpointError:
    return bad_archive(source, TORCH, message, hint)


MAGIC = 0x1950A86A20F9469CFC6C
MAGIC_BYTES = MAGIC.to_bytes(10, "little")
PROTOCOL = 1001


def is_legacy(source: ByteSource) -> bool:
    """Whether the file begins with the magic number of the older format."""
    head = source.pread(0, min(source.size, 32))  # a few opcodes, which differ from protocol to protocol
    return head[:1] == b"\x80" and MAGIC_BYTES in head


def _read_legacy(source: ByteSource, kind: type[Kind], *, locate: bool) -> Loaded[Kind]:
    """Read the pickles of the older format, and where the storages behind them lie."""
    machine = kind(source, 0, source.size, legacy=True)
    if _is_tar_too(source):
        raise _damaged(source, "it begins as a tar archive does as well, which torch would read instead")
    magic, protocol, machine_facts = machine.load(), machine.load(), machine.load()
    if magic != MAGIC or protocol != PROTOCOL:
        raise _damaged(source, f"protocol {quote(protocol)} where {PROTOCOL} is expected")
    if not isinstance(machine_facts, dict) or machine_facts.get("little_endian") is not True:
        raise _damaged(source, "its numbers are not little-endian", "save it again on a little-endian machine")
    value, keys = machine.load(), machine.load()
    if not isinstance(keys, list):
        raise _damaged(source, "no list of storages follows the structure")
    item_sizes = {key: storage.element.itemsize if storage.element else 1 for key, storage in machine.storages.items()}
    return Loaded(machine=machine, value=value, records=_records(source, machine.position, keys, item_sizes))


def _is_tar_too(source: ByteSource) -> bool:
    """Whether the file could be a tar archive, which torch tries first."""
    try:
        tarfile.TarInfo.frombuf(source.pread(0, min(source.size, tarfile.BLOCKSIZE)), "utf-8", "surrogateescape")
    except tarfile.TarError:
        return False
    return True


def _records(
    source: ByteSource, position: int, keys: list[object], item_sizes: dict[str, int]
) -> dict[str, ChecksummedRange]:
    records: dict[str, ChecksummedRange] = {}
    for key in keys:
        if not isinstance(key, str) or key not in item_sizes or key in records:
            raise _damaged(source, f"the storage {quote(key)} belongs to no tensor, or stands twice")
        if position + 8 > source.size:
            raise _damaged(source, f"the storage {quote(key)} is missing", "the file was cut short: fetch it again")
        count = int.from_bytes(source.pread(position, 8), "little", signed=True)
        start = position + 8
        position = start + count * item_sizes[key]
        if count < 0 or position > source.size:
            raise _damaged(
                source,
                f"the storage {quote(key)} of {count} elements ends behind the file's {source.size} bytes",
                "the file was cut short: fetch it again",
            )
        records[key] = ChecksummedRange(start=start, stop=position, crc=None, name=key)
    if position != source.size:
        raise _damaged(source, f"{source.size - position} bytes after the last storage belong to no tensor")
    return records


def _damaged(source: ByteSource, message: str, hint: str = FETCH_AGAIN) -> CheckpointError:
    return checkpoint_error(Code.BIN_ARCHIVE, source.where, message, hint)


class Bin(Container):
    """A file that ``torch.save`` wrote, as a zip archive or as the older pickles in a row."""

    name = "bin"
    title = "a state dict that torch.save wrote"
    endings = (".bin", ".pt", ".pth", ".ckpt")
    main = "pytorch_model.bin"
    also = ("diffusion_pytorch_model.bin",)
    spare = ("adapter_model.bin", "open_clip_pytorch_model.bin", "lit_model.pth")
    promises = Promises(writes=True, checksums=True, transformers=True)

    def sniff(self, source: ByteSource) -> FileKind | None:
        """Whether the file begins with the pickle of an archive, or with the magic number of the older format."""
        if not first_name(source).endswith("/data.pkl") and not is_legacy(source):
            return None
        return FileKind(self.title, "rename it to end in .bin")

    def read(self, source: ByteSource, *, name: str, locate: bool = True) -> Contents:
        """Read as :func:`read_bin` does."""
        return read_bin(source, name=name, locate=locate)

    def open(self, place: Place, main: str, *, part: str | None = None, locate: bool = True) -> Found:
        """Open a file; ``part`` is an inner path, as of :func:`read_bin`."""
        sources = open_all(place, [main])
        contents = read_bin(sources[main], name=main, locate=locate, part=part)
        return Found(contents=(contents,), sources=sources, notes=contents.notes)

    def outline(self, tensors: Mapping[str, Described], options: WriteOptions) -> Outline:
        """Lay out one file, as ``torch.save`` writes a state dict; tied names share a storage."""
        main = options.main or self.main
        self.require_writable(tensors, where=f"{options.where}/{main}")
        return Outline(shards=(state_dict_shard(main, tensors, options.tied),))
