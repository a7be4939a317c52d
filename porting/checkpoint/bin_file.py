"""The header of a ``pytorch_model.bin``: a zip archive of ``torch.save``, looked at before it is believed.

The archive holds ``data.pkl``, the structure, and one record of raw bytes per storage
(https://pytorch.org/docs/stable/notes/serialization.html).  Its own table of contents is checked first, then
the pickle is read by a machine that can only describe tensors (:mod:`porting.checkpoint.state_pickle`), then
each tensor's extent is checked against the record that it lies in.  ``torch.load`` does neither check of the
records' sizes when it maps a file.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import IO, cast

import torch

from porting.checkpoint.errors import CheckpointError, FaultList, quote
from porting.checkpoint.files import ByteSource
from porting.checkpoint.layout import Contents, Extent, Record
from porting.checkpoint.legacy_bin import is_legacy, read_legacy
from porting.checkpoint.sniff import wrong_format
from porting.checkpoint.state_dict import read_tensors
from porting.checkpoint.state_pickle import StateMachine
from porting.checkpoint.state_values import TensorSpec, describe
from porting.errors import Code, Fault

MAX_DIRECTORY = 1 << 26
"""The longest table of contents and the longest ``data.pkl``, in bytes: a million storages need less."""

SAVE_AGAIN = "save the state dict again with torch.save"
SAVED_AGAIN = "the checkpoint is damaged: fetch it, or save it, again"
FETCH_AGAIN = "the file is damaged: fetch it again"


def read_bin(source: ByteSource, *, name: str, locate: bool = True) -> Contents:
    """What a ``.bin`` file says of its tensors, each checked against the archive.

    Args:
        source: the file's bytes; the table of contents, ``data.pkl`` and the records' small headers are read.
        name: the file's name inside the checkpoint.
        locate: find where each record's bytes begin.  Without it the extents stay empty, and a remote file is
            not asked for one small range per storage.

    Raises:
        CheckpointError: with every fault found.
    """
    if is_legacy(source):
        return read_legacy(source, name=name)
    value, records = _read_archive(source, locate=locate)
    contents = read_tensors(value, records, source, name=name)
    return (
        contents
        if locate
        else Contents(file=contents.file, tensors=contents.tensors, extents={}, shared=contents.shared)
    )


def locate_tensor(source: ByteSource, *, dtype: torch.dtype, shape: tuple[int, ...]) -> Extent:
    """Where in an archive of ``torch.save`` the elements of the one tensor lie that it holds.

    Args:
        source: the archive's bytes, and no others.
        dtype, shape: what the tensor is said to be.

    Raises:
        CheckpointError: it is no such archive, or holds something else.
    """
    value, records = _read_archive(source, locate=True)
    if not isinstance(value, TensorSpec):
        raise CheckpointError(
            Fault(
                code=Code.DCP_CHUNK,
                where=source.where,
                message=f"it holds {describe(value)} where a tensor is expected",
                hint=SAVED_AGAIN,
            )
        )
    contents = read_tensors({ONE: value}, records, source, name=ONE)
    if (value.dtype, value.size) != (dtype, shape):
        found, said = (
            f"{list(sizes)} of {str(kind).removeprefix('torch.')}"
            for kind, sizes in ((value.dtype, value.size), (dtype, shape))
        )
        raise CheckpointError(
            Fault(
                code=Code.DCP_CHUNK,
                where=source.where,
                message=f"it holds a tensor {found}, and .metadata says {said}",
                hint=SAVED_AGAIN,
            )
        )
    return contents.extents[ONE]


ONE = "tensor"
"""What the only tensor of an archive is called in messages."""


def _read_archive(source: ByteSource, *, locate: bool) -> tuple[object, dict[str, Record]]:
    """What the pickle of an archive describes, and where its storages lie."""
    entries, root = _table_of_contents(source)
    _require_little_endian(source, entries, root)
    structure = _record_bytes(source, entries[f"{root}/data.pkl"])
    machine = StateMachine(_Bytes(structure, source.where), 0, len(structure))
    prefix = f"{root}/data/"
    checksums = any(entry.CRC for entry in entries.values())
    faults = FaultList(source.where)
    if locate:
        records = {
            path.removeprefix(prefix): _locate(source, entry, faults, checksums=checksums)
            for path, entry in entries.items()
            if path.startswith(prefix)
        }
        _check_overlaps(records, faults)
        faults.raise_if_any()
    else:
        records = {
            path.removeprefix(prefix): Record(start=0, stop=entry.file_size, crc=None, name=path)
            for path, entry in entries.items()
            if path.startswith(prefix)
        }
    value = machine.load()
    if machine.position != len(structure):
        behind = len(structure) - machine.position
        raise machine.error(f"{behind} bytes behind its end, which torch.save does not write", Code.BIN_UNSAFE)
    return value, records


def _table_of_contents(source: ByteSource) -> tuple[dict[str, zipfile.ZipInfo], str]:
    """The archive's entries by name, and the folder that all of them lie in."""
    if source.pread(0, min(4, source.size)) != b"PK\x03\x04":
        raise CheckpointError(
            wrong_format(source, "a state dict that torch.save wrote")
            or Fault(
                code=Code.FORMAT_WRONG,
                where=source.where,
                message="this is neither a zip archive nor an older file of torch.save",
                hint=FETCH_AGAIN,
            )
        )
    try:
        with zipfile.ZipFile(cast("IO[bytes]", _Seekable(source))) as archive:
            infos = archive.infolist()
    except (
        zipfile.BadZipFile,
        ValueError,
        struct.error,
        NotImplementedError,
        EOFError,
        OverflowError,
    ) as error:
        raise _bad_archive(
            source, f"its table of contents cannot be read: {error}", "it was cut short: fetch it again"
        ) from error
    faults = FaultList(source.where)
    entries: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        _check_entry(info, source.size, faults)
        if info.filename in entries:
            faults.add(
                Code.BIN_ARCHIVE,
                f"the entry {quote(info.filename)} stands twice in the archive",
                hint=FETCH_AGAIN,
            )
        entries[info.filename] = info
    faults.raise_if_any()
    structures = [name for name in entries if name.endswith("/data.pkl")]
    if len(structures) != 1:
        found = "no data.pkl" if not structures else f"{len(structures)} entries named data.pkl"
        raise _bad_archive(source, f"a zip archive with {found}, so not one that torch.save wrote", SAVE_AGAIN)
    root = structures[0].removesuffix("/data.pkl")
    if f"{root}/constants.pkl" in entries:
        raise _bad_archive(
            source,
            "a TorchScript program, which would have to be run to be read",
            "save the model's state dict instead",
        )
    return entries, root


def _check_entry(info: zipfile.ZipInfo, size: int, faults: FaultList) -> None:
    """Entries are stored as they are, by a name that stays inside the archive, inside the file."""
    entry = quote(info.filename)
    parts = info.orig_filename.split("/")
    if ".." in parts or not parts[0] or "\\" in info.orig_filename or ":" in parts[0] or "\0" in info.orig_filename:
        faults.add(
            Code.BIN_ARCHIVE,
            f"the entry {quote(info.orig_filename)} climbs out of the archive",
            hint="do not use this file",
        )
    if info.flag_bits & 0x1:
        faults.add(Code.BIN_ARCHIVE, f"the entry {entry} is encrypted", hint=SAVE_AGAIN)
    if info.compress_type != zipfile.ZIP_STORED:
        faults.add(
            Code.BIN_ARCHIVE,
            f"the entry {entry} is compressed ({info.compress_size} bytes for {info.file_size}); "
            "torch.save stores them as they are",
            hint=SAVE_AGAIN,
        )
    elif info.compress_size != info.file_size or info.header_offset < 0 or info.header_offset + info.file_size > size:
        faults.add(
            Code.BIN_ARCHIVE,
            f"the entry {entry} of {info.file_size} bytes does not lie inside the file's {size}",
            hint=FETCH_AGAIN,
        )


def _locate(source: ByteSource, info: zipfile.ZipInfo, faults: FaultList, *, checksums: bool = True) -> Record:
    """Where an entry's bytes lie: behind a small header that has to agree with the table of contents."""
    start, found = 0, b""
    if info.header_offset + 30 <= source.size:
        header = source.pread(info.header_offset, 30)
        name_length, extra_length = struct.unpack("<HH", header[26:])
        start = info.header_offset + 30 + name_length + extra_length
        if header[:4] == b"PK\x03\x04" and info.header_offset + 30 + name_length <= source.size:
            found = source.pread(info.header_offset + 30, name_length)
    stop = start + info.file_size
    if found != info.orig_filename.encode() or stop > source.size:
        faults.add(
            Code.BIN_ARCHIVE,
            f"the entry {quote(info.filename)} is not where the table of contents says",
            hint=FETCH_AGAIN,
        )
    return Record(start=start, stop=stop, crc=info.CRC if checksums else None, name=info.filename)


def _check_overlaps(records: Mapping[str, Record], faults: FaultList) -> None:
    end, last = 0, ""
    for record in sorted(records.values(), key=lambda record: (record.start, record.stop)):
        if record.start < end:
            faults.add(
                Code.BIN_ARCHIVE,
                f"the entries {quote(last)} and {quote(record.name)} overlap",
                hint=FETCH_AGAIN,
            )
        end, last = max(end, record.stop), record.name


def _record_bytes(source: ByteSource, info: zipfile.ZipInfo) -> bytes:
    """The bytes of a small record, its checksum verified."""
    if info.file_size > MAX_DIRECTORY:
        raise _bad_archive(
            source,
            f"the entry {quote(info.filename)} has {info.file_size} bytes, more than any state dict needs",
            SAVE_AGAIN,
        )
    faults = FaultList(source.where)
    record = _locate(source, info, faults)
    faults.raise_if_any()
    raw = source.pread(record.start, record.stop - record.start)
    if info.CRC and zlib.crc32(raw) != info.CRC:  # torch.save can be told to write no checksums; then they are 0
        raise _bad_archive(
            source, f"the checksum of the entry {quote(info.filename)} does not match its bytes", FETCH_AGAIN
        )
    return raw


def _require_little_endian(source: ByteSource, entries: Mapping[str, zipfile.ZipInfo], root: str) -> None:
    info = entries.get(f"{root}/byteorder")
    if info is None:  # written by torch before 2.1, on the machines of that time
        return
    order = _record_bytes(source, info)
    if order.strip() != b"little":
        raise _bad_archive(
            source,
            f"its numbers are {order[:20].decode('latin-1')!a}-endian; only little-endian is read",
            "save it again on a little-endian machine",
        )


def _bad_archive(source: ByteSource, message: str, hint: str) -> CheckpointError:
    return CheckpointError(Fault(code=Code.BIN_ARCHIVE, where=source.where, message=message, hint=hint))


class _Bytes:
    """Bytes in memory as a source."""

    def __init__(self, raw: bytes, where: str) -> None:
        self.where = where
        self.size = len(raw)
        self._raw = raw

    def pread(self, offset: int, count: int) -> bytes:
        return self._raw[offset : offset + count]


class _Seekable(io.RawIOBase):
    """A source as the file object that :mod:`zipfile` wants; it reads at most a table of contents at once."""

    def __init__(self, source: ByteSource) -> None:
        super().__init__()
        self._source = source
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.size}[whence]
        if base + offset < 0:
            raise ValueError("an offset before the file's beginning")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        rest = max(self._source.size - self._position, 0)
        count = rest if size < 0 else min(size, rest)
        if count > MAX_DIRECTORY:
            raise zipfile.BadZipFile(f"it is said to have {count} bytes")
        raw = self._source.pread(self._position, count)
        self._position += count
        return raw
