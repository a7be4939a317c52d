"""What stands around a tensor in a distributed checkpoint: an archive of ``torch.save``, without its elements.

The archive is a zip file of stored entries (PKWARE's APPNOTE.TXT, section 4.3): the pickle that describes the tensor,
the byte order, a version, and last the elements.  All of it follows from dtype and shape but for the CRC-32 of the
elements, for which two places are left.  The pickle is written here opcode by opcode: it names ``_rebuild_tensor_v2``
and a storage, as the one of ``torch.save`` does, and holds nothing of a user's.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from porting.checkpoint.state_pickle import STORAGES

LARGE = 0xFFFF_FFFF
"""Where a number needs the zip64 extension."""

ALIGNED = 64
"""Bytes: the largest unit that any processor asks for."""

ROOT = "archive"
DATE = 0x21
"""The first day that the format knows, 1980-01-01: the same bytes at any time."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The bytes in front of a tensor's elements, and those behind.

    Attributes:
        front, back: the bytes.
        seals: where in the archive the CRC-32 of the elements belongs, 4 bytes each, little-endian.
        size: bytes of the archive, the elements among them.
    """

    front: bytes = field(repr=False)
    back: bytes = field(repr=False)
    seals: tuple[int, ...]
    size: int


def frame(dtype: torch.dtype, shape: Sequence[int], *, at: int) -> Frame:
    """The archive of a contiguous tensor.

    Args:
        dtype, shape: the tensor's.
        at: where in its file the archive begins; the elements begin at a multiple of :data:`ALIGNED` there.
    """
    numel = 1
    for size in shape:
        numel *= size
    nbytes = numel * dtype.itemsize
    front = b""
    directory = b""
    entries = 0
    for name, raw in (("data.pkl", _pickle(dtype, shape)), ("byteorder", b"little"), ("version", b"3\n")):
        directory += _central(name, len(front), len(raw), zlib.crc32(raw))
        front += _local(name, len(raw), zlib.crc32(raw), b"") + raw
        entries += 1
    begun = len(front)
    bare = len(_local("data/0", nbytes, 0, _padding(0)))
    front += _local("data/0", nbytes, 0, _padding((-at - begun - bare) % ALIGNED))
    end = len(front) + nbytes
    seals = (begun + 14, end + len(directory) + 16)
    directory += _central("data/0", begun, nbytes, 0)
    back = directory + _end(entries + 1, len(directory), end)
    return Frame(front=front, back=back, seals=seals, size=end + len(back))


def _name(name: str) -> bytes:
    return f"{ROOT}/{name}".encode()


def _sizes(nbytes: int) -> tuple[int, bytes]:
    """What the fields of an entry's size say, and the extension when that is not enough."""
    return (nbytes, b"") if nbytes < LARGE else (LARGE, struct.pack("<HHQQ", 1, 16, nbytes, nbytes))


def _padding(count: int) -> bytes:
    """An extra field that fills ``count`` bytes more than its own four, by the name that torch gives to it."""
    return b"FB" + struct.pack("<H", count) + b"Z" * count


def _local(name: str, nbytes: int, crc: int, padding: bytes) -> bytes:
    size, extension = _sizes(nbytes)
    version, extra = (45 if extension else 20), extension + padding
    head = struct.pack(
        "<4s5H3I2H", b"PK\3\4", version, 0x800, 0, 0, DATE, crc, size, size, len(_name(name)), len(extra)
    )
    return head + _name(name) + extra


def _central(name: str, at: int, nbytes: int, crc: int) -> bytes:
    size, extension = _sizes(nbytes)
    version = 45 if extension else 20
    head = struct.pack(
        "<4s6H3I5H2I", b"PK\1\2", version, version, 0x800, 0, 0, DATE, crc, size, size,
        len(_name(name)), len(extension), 0, 0, 0, 0, at,
    )  # fmt: skip
    return head + _name(name) + extension


def _end(entries: int, length: int, at: int) -> bytes:
    """The end of the central directory; ``at`` is where that begins."""
    wide = b""
    if at >= LARGE:
        wide = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, entries, entries, length, at)
        wide += struct.pack("<4sIQI", b"PK\6\7", 0, at + length, 1)
    return wide + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, entries, entries, length, min(at, LARGE), 0)


# --------------------------------------------------------------------------------------------------- the pickle


def _pickle(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """``data.pkl``: how the tensor is made of its storage (protocol 2)."""
    strides: list[int] = []
    numel = 1
    for size in reversed(shape):
        strides.insert(0, numel)
        numel *= max(size, 1)
    count = 0 if 0 in shape else numel
    kind = next((name for name, one in STORAGES.items() if one == dtype), "")
    storage = f"ctorch\n{kind}\n" if kind else "ctorch.storage\nUntypedStorage\n"
    call = "_rebuild_tensor_v2" if kind else "_rebuild_tensor_v3"  # the third names the dtype of an untyped storage
    behind = b"" if kind else f"ctorch\n{str(dtype).removeprefix('torch.')}\n".encode()
    return b"".join(
        [
            b"\x80\x02" + f"ctorch._utils\n{call}\n((".encode(),
            _text("storage") + storage.encode() + _text("0") + _text("cpu"),
            _whole(count if kind else count * dtype.itemsize) + b"tQ",
            _whole(0) + _tuple(shape) + _tuple(strides),
            b"\x89ccollections\nOrderedDict\n)R" + behind + b"tR.",
        ]
    )


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _whole(number: int) -> bytes:
    if number < 1 << 8:
        return struct.pack("<cB", b"K", number)
    if number < 1 << 31:
        return struct.pack("<ci", b"J", number)
    raw = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def _tuple(numbers: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_whole, numbers)) + b"t"
