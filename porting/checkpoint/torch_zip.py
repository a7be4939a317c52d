"""The zip archive of ``torch.save``, read so that there is one reading of it.

A zip file can be read in several ways: by its table of contents at the end or by the headers in front of each entry,
with junk before, between and behind.  ``cat A.bin B.bin`` is A to torch and B to Python's :mod:`zipfile`.
``torch.save`` makes use of none of that freedom, so only this is read (PKWARE's APPNOTE.TXT, section 4.3): entries that
follow each other from the first byte on without a gap, as they are listed, stored as they are; the table of contents
right behind them; its end records; nothing else.  Every byte has one meaning then.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from porting.checkpoint.errors import CheckpointError, FaultList, quote
from porting.checkpoint.files import ByteSource
from porting.checkpoint.layout import ChecksummedRange
from porting.checkpoint.sniff import wrong_format
from porting.errors import Code, Fault
from porting.limits import charge

MAX_DIRECTORY = 1 << 26
"""The longest table of contents and the longest ``data.pkl``, in bytes: a million storages need less."""

SAVE_AGAIN = "save the state dict again with torch.save"
FETCH_AGAIN = "the file is damaged: fetch it again"

END, END64, LOCATOR = struct.Struct("<4s4H2IH"), struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
CENTRAL, LOCAL = struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s5H3I2H")
DESCRIBED = 0x8
"""The flag of an entry whose checksum and sizes follow its bytes once more."""

FLAGS = DESCRIBED | 0x800  # and names in UTF-8
FOLDER = 0xFFFF
"""What says of an entry that it is a folder, in the manner of DOS; its upper half is for others."""

FULL, FULL_SHORT = 0xFFFF_FFFF, 0xFFFF

KNOWN = re.compile(
    r"data\.pkl|version|byteorder|data/[^/]+|\.data/serialization_id|\.format_version|\.storage_alignment"
)
"""What torch.save puts into the folder of an archive."""


class ZipEntry(NamedTuple):
    """An entry as the table of contents lists it.

    Attributes:
        name: the folder of the archive, a slash, and its name in there.
        raw: the bytes of that.
        flags, crc, size: as they stand there.
        at: where its own header begins.
    """

    name: str
    raw: bytes
    flags: int
    crc: int
    size: int
    at: int


@dataclass(frozen=True, kw_only=True)
class Archive:
    """An archive.

    Attributes:
        root: the folder that all entries lie in.
        entries: by their names in it.
        contents: where the table of contents begins.
    """

    root: str
    entries: dict[str, ZipEntry]
    contents: int


def read_archive(source: ByteSource) -> Archive:
    """The table of contents of an archive.

    Raises:
        CheckpointError: with every fault found; it is no archive that ``torch.save`` writes.
        LimitError: it lists more than a command may hold.
    """
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
    start, raw, count = _directory(source)
    charge("objects", 8 * count, where=source.where)
    faults = FaultList(source.where)
    entries = list(_listed(raw, count, source, faults))
    faults.raise_if_any()
    return _checked(entries, start, source, faults)


def _directory(source: ByteSource) -> tuple[int, bytes, int]:
    """Where the table of contents begins, its bytes, and how many entries it has."""
    if source.size < END.size:
        raise _unreadable(source, "the file is too short")
    end = source.size - END.size
    magic, disk, first, here, count, length, start, comment = END.unpack(source.pread(end, END.size))
    if magic != b"PK\5\6" or comment or disk or first or here != count:
        raise _unreadable(source, "the file does not end with its end record")
    if end >= LOCATOR.size + END64.size:
        locator, disk, at, disks = LOCATOR.unpack(source.pread(end - LOCATOR.size, LOCATOR.size))
        if locator == b"PK\6\7":
            end -= LOCATOR.size + END64.size
            magic, size, _, _, disk64, first, here, count64, length64, start64 = END64.unpack(
                source.pread(end, END64.size)
            )
            short = (min(count64, FULL_SHORT), min(length64, FULL), min(start64, FULL))
            if (magic, size, disk64, first, here) != (b"PK\6\6", 44, 0, 0, count64) or (at, disk, disks) != (end, 0, 1):
                raise _unreadable(source, "its end record of 64 bits is not where it should be")
            if short != (count, length, start):
                raise _unreadable(source, "its two end records disagree")
            count, length, start = count64, length64, start64
    if start + length != end or length > MAX_DIRECTORY or count * CENTRAL.size > length:
        message = f"it is said to have {length} bytes at byte {start}, and the end record begins at byte {end}"
        raise _unreadable(source, message)
    charge("metadata", length, where=source.where)
    return start, source.pread(start, length), count


def _listed(raw: bytes, count: int, source: ByteSource, faults: FaultList) -> Iterator[ZipEntry]:
    position = 0
    for _ in range(count):
        if position + CENTRAL.size > len(raw):
            raise _unreadable(source, "it ends in the middle of an entry")
        (magic, _, _, flags, method, _, _, crc, packed, size, named, extra, comment, disk, _, kind, at) = (
            CENTRAL.unpack(raw[position : position + CENTRAL.size])
        )
        begin = position + CENTRAL.size
        name, position = raw[begin : begin + named], begin + named + extra + comment
        if magic != b"PK\1\2" or position > len(raw):
            raise _unreadable(source, "an entry is none")
        packed, size, at = _wide(packed, size, at, raw[begin + named : begin + named + extra], source)
        entry = ZipEntry(name.decode("utf-8", "replace"), name, flags, crc, size, at)
        _check_entry(entry, method, packed, bool(comment or disk or kind & FOLDER), source.size, faults)
        yield entry
    if position != len(raw):
        raise _unreadable(source, "bytes are left behind its last entry")


def _wide(packed: int, size: int, at: int, extra: bytes, source: ByteSource) -> tuple[int, int, int]:
    """The sizes and the place of an entry, from the extension of 64 bits where they do not fit otherwise."""
    position, values = 0, b""
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        if kind == 1 and not values:
            values = extra[position + 4 : position + 4 + length]
        position += 4 + length
    wanted = [field for field in (size, packed, at) if field == FULL]
    if position != len(extra) or len(values) < 8 * len(wanted):
        raise _unreadable(source, "the extension of an entry is none")
    wide = iter(struct.unpack_from(f"<{len(wanted)}Q", values))
    size, packed, at = (next(wide) if field == FULL else field for field in (size, packed, at))
    return packed, size, at


def _check_entry(entry: ZipEntry, method: int, packed: int, odd: bool, whole: int, faults: FaultList) -> None:
    """An entry is stored as it is, by a name that stays inside the archive, inside the file."""
    shown = quote(entry.name)
    parts = entry.name.split("/")
    if ".." in parts or not parts[0] or "\\" in entry.name or ":" in parts[0] or "\0" in entry.name:
        faults.add(Code.BIN_ARCHIVE, f"the entry {shown} climbs out of the archive", hint="do not use this file")
    if entry.flags & 0x1:
        faults.add(Code.BIN_ARCHIVE, f"the entry {shown} is encrypted", hint=SAVE_AGAIN)
    elif entry.flags & ~FLAGS or odd:
        faults.add(Code.BIN_ARCHIVE, f"the entry {shown} is written as torch.save writes none", hint=SAVE_AGAIN)
    if method:
        faults.add(
            Code.BIN_ARCHIVE,
            f"the entry {shown} is compressed ({packed} bytes for {entry.size}); torch.save stores them as they are",
            hint=SAVE_AGAIN,
        )
    elif packed != entry.size or entry.at + entry.size > whole:
        faults.add(
            Code.BIN_ARCHIVE,
            f"the entry {shown} of {entry.size} bytes does not lie inside the file's {whole}",
            hint=FETCH_AGAIN,
        )


def _checked(entries: list[ZipEntry], contents: int, source: ByteSource, faults: FaultList) -> Archive:
    """The archive, once its entries are those of torch.save."""
    root = entries[0].name.partition("/")[0] if entries else ""
    found: dict[str, ZipEntry] = {}
    spelled: set[str] = set()
    for entry in entries:
        name = entry.name.removeprefix(f"{root}/")
        if entry.name.lower() in spelled:  # torch finds an entry whatever the case of its name
            faults.add(Code.BIN_ARCHIVE, f"the entry {quote(entry.name)} stands twice in the archive", hint=FETCH_AGAIN)
        spelled.add(entry.name.lower())
        found[name] = entry
    faults.raise_if_any()
    if "constants.pkl" in found:
        what = "a TorchScript program, which would have to be run to be read"
        raise _bad(source, what, "save the model's state dict instead")
    structures = sum(entry.name.endswith("/data.pkl") for entry in entries)
    if structures != 1 or "data.pkl" not in found:
        what = f"{structures} entries named data.pkl" if structures > 1 else "no data.pkl"
        raise _bad(source, f"a zip archive with {what}, so not one that torch.save wrote", SAVE_AGAIN)
    for name, entry in found.items():
        if not entry.name.startswith(f"{root}/") or not KNOWN.fullmatch(name):
            faults.add(Code.BIN_ARCHIVE, f"the entry {quote(entry.name)} is none of torch.save's", hint=SAVE_AGAIN)
    faults.raise_if_any()
    return Archive(root=root, entries=found, contents=contents)


def locate(
    source: ByteSource, entry: ZipEntry, faults: FaultList, *, checksums: bool = True
) -> tuple[ChecksummedRange, int]:
    """Where an entry's bytes lie, and where the next entry begins.

    Its own small header has to agree with the table of contents, and so has what stands behind its bytes.
    """
    start = stop = 0
    agrees = False
    if entry.at + LOCAL.size + len(entry.raw) <= source.size:
        header = source.pread(entry.at, LOCAL.size + len(entry.raw))
        magic, _, flags, method, _, _, crc, _, size, named, extra = LOCAL.unpack(header[: LOCAL.size])
        start = entry.at + LOCAL.size + named + extra
        stop = start + entry.size
        agrees = (magic, flags, method, header[LOCAL.size :]) == (b"PK\3\4", entry.flags, 0, entry.raw)
        agrees &= named == len(entry.raw) and stop <= source.size
        agrees &= (crc, size) == (0, 0) if entry.flags & DESCRIBED else crc == entry.crc and size in (entry.size, FULL)
    behind = _described(source, entry, stop) if agrees and entry.flags & DESCRIBED else stop
    if not agrees or behind < 0:
        faults.add(
            Code.BIN_ARCHIVE,
            f"the entry {quote(entry.name)} is not where the table of contents says",
            hint=FETCH_AGAIN,
        )
    return ChecksummedRange(start=start, stop=stop, crc=entry.crc if checksums else None, name=entry.name), behind


def _described(source: ByteSource, entry: ZipEntry, stop: int) -> int:
    """Where the description behind an entry's bytes ends; -1 when it is another entry's."""
    for layout in ("<4s3I", "<4sI2Q"):
        size = struct.calcsize(layout)
        if stop + size <= source.size and (entry.size < FULL or layout == "<4sI2Q"):
            magic, crc, packed, plain = struct.unpack(layout, source.pread(stop, size))
            if (magic, crc, packed, plain) == (b"PK\7\x08", entry.crc, entry.size, entry.size):
                return stop + size
    return -1


def locate_all(source: ByteSource, archive: Archive) -> dict[str, ChecksummedRange]:
    """Where the bytes of every entry lie: one behind the other, from the first byte to the table of contents.

    Raises:
        CheckpointError: with every fault found.
    """
    faults = FaultList(source.where)
    # torch.save can be told to write no checksums; then all of them are 0.
    checksums = any(entry.crc for entry in archive.entries.values())
    found: dict[str, ChecksummedRange] = {}
    end, last = 0, ""
    for name, entry in archive.entries.items():
        if entry.at != end:
            what = (
                f"overlaps {quote(last)}" if entry.at < end else f"begins {entry.at - end} bytes behind {quote(last)}"
            )
            faults.add(Code.BIN_ARCHIVE, f"the entry {quote(entry.name)} {what}", hint=FETCH_AGAIN)
        found[name], end = locate(source, entry, faults, checksums=checksums)
        last = entry.name
        faults.raise_if_any()  # what follows would only follow from it
    if end != archive.contents:
        faults.add(Code.BIN_ARCHIVE, f"{archive.contents - end} bytes behind {quote(last)}", hint=FETCH_AGAIN)
    faults.raise_if_any()
    return found


def _unreadable(source: ByteSource, message: str) -> CheckpointError:
    return _bad(source, f"its table of contents cannot be read: {message}", "it was cut short: fetch it again")


def _bad(source: ByteSource, message: str, hint: str) -> CheckpointError:
    return CheckpointError(Fault(code=Code.BIN_ARCHIVE, where=source.where, message=message, hint=hint))
