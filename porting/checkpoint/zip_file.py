"""Zip archives of tensors: read so that every parser agrees on the content, and written deterministically.

A zip file can be read in several ways: by its table of contents at the end or by the headers in front of each entry,
with junk before, between and behind.  ``cat A.bin B.bin`` is A to torch and B to Python's :mod:`zipfile`.
Programs that save tensors make use of none of that freedom, so only this is read (PKWARE's APPNOTE.TXT, section 4.3):
entries that follow each other from the first byte on without a gap, as they are listed; the table of contents right
behind them; its end records; nothing else.  Every byte has one meaning then.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from porting.checkpoint.errors import CheckpointError, FaultList, checkpoint_error, quote
from porting.checkpoint.files import ByteSource
from porting.checkpoint.layout import ChecksummedRange
from porting.errors import Code
from porting.limits import charge

MAX_DIRECTORY = 1 << 26
"""Bytes of an archive's table of contents, and of its pickle, at most; a million storages need less."""

FETCH_AGAIN = "the file is damaged: fetch it again"

END, END64, LOCATOR = struct.Struct("<4s4H2IH"), struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
CENTRAL, LOCAL = struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s5H3I2H")
DESCRIBED = 0x8
"""The flag of an entry with a data descriptor behind its bytes."""

UTF8 = 0x800
"""The flag of an entry whose name is UTF-8."""

FLAGS = DESCRIBED | UTF8
FOLDER = 0xFFFF
"""The DOS attribute of a folder; the upper half is for other systems."""

FULL, FULL_SHORT = 0xFFFF_FFFF, 0xFFFF
"""The value of a number that is stored in the 64-bit extension."""

NEWEST = 63
"""The last version of the format (6.3): no program writes a later one, and Python's zipfile refuses those."""

STORED, DEFLATED = 0, 8
LEVEL = 0x6
"""The flags in which some programs note how hard they compressed."""

DATE = 0x21
"""The format's first day, 1980-01-01, so that the bytes do not depend on the time."""


@dataclass(frozen=True, kw_only=True)
class Writer:
    """The properties of a program's archives: anything that it does not write is a fault.

    Attributes:
        name: what messages call it.
        again: what to do about an archive of another program.
        methods: how it stores entries.
        one_case: names that differ only in case are the same to it.
        unchecked: it can be told to write no checksums; then all of them are 0.
    """

    name: str
    code: Code
    again: str
    methods: frozenset[int] = frozenset({STORED})
    one_case: bool = False
    unchecked: bool = False


class ZipEntry(NamedTuple):
    """An entry as the table of contents lists it.

    Attributes:
        name: its name, with folders in front.
        raw: the bytes of that.
        flags, method, crc: as they stand there.
        packed: the bytes that it takes in the file.
        size: the bytes that it has; as many, unless it is compressed.
        at: where its own header begins.
    """

    name: str
    raw: bytes
    flags: int
    method: int
    crc: int
    packed: int
    size: int
    at: int


@dataclass(frozen=True, kw_only=True)
class Archive:
    """An archive.

    Attributes:
        entries: by their names, in the order of the table of contents.
        contents: where the table of contents begins.
    """

    writer: Writer
    entries: dict[str, ZipEntry]
    contents: int


def is_archive(source: ByteSource) -> bool:
    """Whether a file begins as an archive with entries does."""
    return source.pread(0, min(4, source.size)) == b"PK\x03\x04"


def first_name(source: ByteSource) -> str:
    """The name of the first entry of an archive; empty when the file does not begin as one."""
    head = source.pread(0, min(source.size, LOCAL.size + 512))
    if len(head) < LOCAL.size or not head.startswith(b"PK\x03\x04"):
        return ""
    length = LOCAL.unpack(head[: LOCAL.size])[-2]
    return head[LOCAL.size : LOCAL.size + length].decode("utf-8", "replace")


def read_archive(source: ByteSource, writer: Writer) -> Archive:
    """Read the table of contents of an archive."""
    start, raw, count = _directory(source, writer)
    charge("objects", 8 * count, where=source.where)
    faults = FaultList(source.where)
    entries = list(_listed(raw, count, source, writer, faults))
    faults.raise_if_any()
    spelled: set[str] = set()
    for entry in entries:
        name = entry.name.lower() if writer.one_case else entry.name
        if name in spelled:
            faults.add(writer.code, f"the entry {quote(entry.name)} stands twice in the archive", hint=FETCH_AGAIN)
        spelled.add(name)
    faults.raise_if_any()
    return Archive(writer=writer, entries={entry.name: entry for entry in entries}, contents=start)


def _directory(source: ByteSource, writer: Writer) -> tuple[int, bytes, int]:
    """The offset of the table of contents, its bytes, and its number of entries."""
    if source.size < END.size:
        raise _unreadable(source, writer, "the file is too short")
    end = source.size - END.size
    magic, disk, first, on_disk, count, length, start, comment = END.unpack(source.pread(end, END.size))
    if magic != b"PK\5\6" or comment or disk or first or on_disk != count:
        raise _unreadable(source, writer, "the file does not end with its end record")
    if end >= LOCATOR.size + END64.size:
        locator, disk, at, disks = LOCATOR.unpack(source.pread(end - LOCATOR.size, LOCATOR.size))
        if locator == b"PK\6\7":
            end -= LOCATOR.size + END64.size
            magic, size, _, _, disk64, first, on_disk, count64, length64, start64 = END64.unpack(
                source.pread(end, END64.size)
            )
            short = (min(count64, FULL_SHORT), min(length64, FULL), min(start64, FULL))
            expected = (b"PK\6\6", 44, 0, 0, count64)
            if (magic, size, disk64, first, on_disk) != expected or (at, disk, disks) != (end, 0, 1):
                raise _unreadable(source, writer, "its end record of 64 bits is not where it should be")
            if short != (count, length, start):
                raise _unreadable(source, writer, "its two end records disagree")
            count, length, start = count64, length64, start64
    if start + length != end or length > MAX_DIRECTORY or count * CENTRAL.size > length:
        message = f"the directory has {length} bytes at byte {start}, and the end record begins at byte {end}"
        raise _unreadable(source, writer, message)
    charge("metadata", length, where=source.where)
    return start, source.pread(start, length), count


def _listed(raw: bytes, count: int, source: ByteSource, writer: Writer, faults: FaultList) -> Iterator[ZipEntry]:
    position = 0
    for _ in range(count):
        if position + CENTRAL.size > len(raw):
            raise _unreadable(source, writer, "it ends in the middle of an entry")
        (magic, _, needed, flags, method, _, _, crc, packed, size, named, extra, comment, disk, _, kind, at) = (
            CENTRAL.unpack(raw[position : position + CENTRAL.size])
        )
        begin = position + CENTRAL.size
        name, position = raw[begin : begin + named], begin + named + extra + comment
        if magic != b"PK\1\2" or position > len(raw):
            raise _unreadable(source, writer, "an entry is none")
        packed, size, at = _zip64_fields(packed, size, at, raw[begin + named : begin + named + extra], source, writer)
        entry = ZipEntry(name.decode("utf-8", "replace"), name, flags, method, crc, packed, size, at)
        _check_entry(entry, bool(comment or disk or kind & FOLDER or needed > NEWEST), source.size, writer, faults)
        yield entry
    if position != len(raw):
        raise _unreadable(source, writer, "bytes are left behind its last entry")


def _zip64_fields(
    packed: int, size: int, at: int, extra: bytes, source: ByteSource, writer: Writer
) -> tuple[int, int, int]:
    """The sizes and the place of an entry, from the 64-bit extension if needed."""
    position, values = 0, b""
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        if kind == 1 and not values:
            values = extra[position + 4 : position + 4 + length]
        position += 4 + length
    wanted = [field for field in (size, packed, at) if field == FULL]
    if position != len(extra) or len(values) < 8 * len(wanted):
        raise _unreadable(source, writer, "the extension of an entry is none")
    wide = iter(struct.unpack_from(f"<{len(wanted)}Q", values))
    size, packed, at = (next(wide) if field == FULL else field for field in (size, packed, at))
    return packed, size, at


def _check_entry(entry: ZipEntry, odd: bool, whole: int, writer: Writer, faults: FaultList) -> None:
    """Check that an entry is stored as the program stores it, inside the file, under a name inside the archive."""
    shown = quote(entry.name)
    parts = entry.name.split("/")
    if ".." in parts or not parts[0] or "\\" in entry.name or ":" in parts[0] or "\0" in entry.name:
        faults.add(writer.code, f"the entry {shown} climbs out of the archive", hint="do not use this file")
    if entry.flags & 0x1:
        faults.add(writer.code, f"the entry {shown} is encrypted", hint=writer.again)
    elif entry.flags & ~(FLAGS | (LEVEL if entry.method == DEFLATED else 0)) or odd:
        faults.add(writer.code, f"the entry {shown} has a form that {writer.name} does not write", hint=writer.again)
    if entry.method not in writer.methods:
        usual = "stores them as they are" if writer.methods == {STORED} else "stores or deflates them"
        message = f"the entry {shown} is compressed ({entry.packed} bytes for {entry.size}); {writer.name} {usual}"
        faults.add(writer.code, message, hint=writer.again)
    elif (entry.method == STORED and entry.packed != entry.size) or entry.at + entry.packed > whole:
        faults.add(
            writer.code,
            f"the entry {shown} of {entry.packed} bytes does not lie inside the file's {whole}",
            hint=FETCH_AGAIN,
        )


def locate(
    source: ByteSource, entry: ZipEntry, writer: Writer, faults: FaultList, *, checksums: bool = True
) -> tuple[ChecksummedRange, int]:
    """Locate an entry's bytes; returns them, and where the next entry begins.

    Its own small header has to agree with the table of contents, and so has what stands behind its bytes.

    Args:
        entry: the entry, from the table of contents.
        writer: the program whose archives are accepted.
        faults: collects what is wrong.
        checksums: whether the entry's CRC-32 is checked when it is read.
    """
    start = stop = 0
    agrees = False
    if entry.at + LOCAL.size + len(entry.raw) <= source.size:
        header = source.pread(entry.at, LOCAL.size + len(entry.raw))
        magic, _, flags, method, _, _, crc, packed, size, named, extra = LOCAL.unpack(header[: LOCAL.size])
        start = entry.at + LOCAL.size + named + extra
        stop = start + entry.packed
        agrees = (magic, flags, method, header[LOCAL.size :]) == (b"PK\3\4", entry.flags, entry.method, entry.raw)
        agrees &= named == len(entry.raw) and stop <= source.size
        if entry.flags & DESCRIBED:
            agrees &= crc == 0 and size in (0, FULL)
        else:
            agrees &= crc == entry.crc and size in (entry.size, FULL) and packed in (entry.packed, FULL)
    behind = _descriptor_end(source, entry, stop) if agrees and entry.flags & DESCRIBED else stop
    if not agrees or behind < 0:
        message = f"the entry {quote(entry.name)} is not where the table of contents says"
        faults.add(writer.code, message, hint=FETCH_AGAIN)
    return ChecksummedRange(start=start, stop=stop, crc=entry.crc if checksums else None, name=entry.name), behind


def _descriptor_end(source: ByteSource, entry: ZipEntry, stop: int) -> int:
    """The end of the data descriptor after an entry; -1 if it is another entry's."""
    for layout in ("<4s3I", "<4sI2Q"):
        size = struct.calcsize(layout)
        if stop + size <= source.size and (entry.size < FULL or layout == "<4sI2Q"):
            magic, crc, packed, plain = struct.unpack(layout, source.pread(stop, size))
            if (magic, crc, packed, plain) == (b"PK\7\x08", entry.crc, entry.packed, entry.size):
                return stop + size
    return -1


def locate_all(source: ByteSource, archive: Archive) -> dict[str, ChecksummedRange]:
    """Locate the bytes of every entry: they must fill the file up to the table of contents."""
    faults = FaultList(source.where)
    code = archive.writer.code
    checksums = not archive.writer.unchecked or any(entry.crc for entry in archive.entries.values())
    found: dict[str, ChecksummedRange] = {}
    end, last = 0, ""
    for name, entry in archive.entries.items():
        if entry.at != end:
            problem = (
                f"overlaps {quote(last)}" if entry.at < end else f"begins {entry.at - end} bytes behind {quote(last)}"
            )
            faults.add(code, f"the entry {quote(entry.name)} {problem}", hint=FETCH_AGAIN)
        found[name], end = locate(source, entry, archive.writer, faults, checksums=checksums)
        last = entry.name
        faults.raise_if_any()  # what follows would only follow from it
    if end != archive.contents:
        faults.add(code, f"{archive.contents - end} bytes behind {quote(last)}", hint=FETCH_AGAIN)
    faults.raise_if_any()
    return found


def _unreadable(source: ByteSource, writer: Writer, message: str) -> CheckpointError:
    message = f"its table of contents cannot be read: {message}"
    return bad_archive(source, writer, message, "it was cut short: fetch it again")


def bad_archive(source: ByteSource, writer: Writer, message: str, hint: str) -> CheckpointError:
    """The error for an archive that cannot be read, or could be read in two ways."""
    return checkpoint_error(writer.code, source.where, message, hint)


# --------------------------------------------------------------------------------------------------- writing


@dataclass
class Directory:
    """The table of contents of an archive that is being written.

    Attributes:
        raw: its entries so far.
    """

    raw: bytearray = field(default_factory=bytearray, repr=False)
    entries: int = 0

    def add(self, name: bytes, *, at: int, nbytes: int, crc: int) -> int:
        """List an entry.

        Returns:
            Where in :attr:`raw` its CRC-32 stands.
        """
        wide = [number for number in (nbytes, nbytes, at) if number >= FULL]
        extension = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        version, size = (45 if wide else 20), min(nbytes, FULL)
        place = len(self.raw) + 16
        self.raw += CENTRAL.pack(
            b"PK\1\2", version, version, UTF8, STORED, 0, DATE, crc, size, size,
            len(name), len(extension), 0, 0, 0, 0, min(at, FULL),
        )  # fmt: skip
        self.raw += name + extension
        self.entries += 1
        return place

    def end(self, at: int) -> bytes:
        """The bytes of the table of contents, which begins at ``at``."""
        count, length, wide = self.entries, len(self.raw), b""
        if at >= FULL or count >= FULL_SHORT or length >= FULL:
            wide = END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, length, at)
            wide += LOCATOR.pack(b"PK\6\7", 0, at + length, 1)
        short = min(count, FULL_SHORT)
        return bytes(self.raw) + wide + END.pack(b"PK\5\6", 0, 0, short, short, min(length, FULL), min(at, FULL), 0)


def local_header(name: bytes, *, nbytes: int, crc: int, extra: bytes = b"") -> bytes:
    """The header of a stored entry; its CRC-32 is at byte 14."""
    extension = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if nbytes >= FULL else b""
    version, size, fields = (45 if extension else 20), min(nbytes, FULL), extension + extra
    head = LOCAL.pack(b"PK\3\4", version, UTF8, STORED, 0, DATE, crc, size, size, len(name), len(fields))
    return head + name + fields
