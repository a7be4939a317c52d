"""The archive of ``torch.save`` around a tensor in a distributed checkpoint, without the elements.

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
from typing import TYPE_CHECKING

from porting.checkpoint.layout import ElementType
from porting.checkpoint.state_pickle import STORAGES
from porting.checkpoint.zip_file import Directory, local_header
from porting.printable import dtype_name

if TYPE_CHECKING:
    import torch

ALIGNED = 64
"""Bytes: the largest alignment that a processor needs."""

ROOT = "archive"


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
    """The archive of a contiguous tensor, without its elements.

    Args:
        at: where in its file the archive begins; the elements begin at a multiple of :data:`ALIGNED` there.
    """
    numel = 1
    for size in shape:
        numel *= size
    nbytes = numel * dtype.itemsize
    front = b""
    directory = Directory()
    for name, raw in (("data.pkl", _pickle(dtype, shape)), ("byteorder", b"little"), ("version", b"3\n")):
        directory.add(_name(name), at=len(front), nbytes=len(raw), crc=zlib.crc32(raw))
        front += local_header(_name(name), nbytes=len(raw), crc=zlib.crc32(raw)) + raw
    begun, last = len(front), _name("data/0")
    bare = len(local_header(last, nbytes=nbytes, crc=0, extra=_padding(0)))
    front += local_header(last, nbytes=nbytes, crc=0, extra=_padding((-at - begun - bare) % ALIGNED))
    end = len(front) + nbytes
    seals = (begun + 14, end + directory.add(last, at=begun, nbytes=nbytes, crc=0))
    back = directory.end(end)
    return Frame(front=front, back=back, seals=seals, size=end + len(back))


def _name(name: str) -> bytes:
    return f"{ROOT}/{name}".encode()


def _padding(count: int) -> bytes:
    """An extra field that fills ``count`` bytes more than its own four, by the name that torch gives to it."""
    return b"FB" + struct.pack("<H", count) + b"Z" * count


# --------------------------------------------------------------------------------------------------- the pickle


def _pickle(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """``data.pkl``: how the tensor is made of its storage (protocol 2)."""
    strides: list[int] = []
    numel = 1
    for size in reversed(shape):
        strides.insert(0, numel)
        numel *= max(size, 1)
    count = 0 if 0 in shape else numel
    kind = next((name for name, element in STORAGES.items() if element is ElementType.of(dtype)), "")
    storage = f"ctorch\n{kind}\n" if kind else "ctorch.storage\nUntypedStorage\n"
    call = "_rebuild_tensor_v2" if kind else "_rebuild_tensor_v3"  # the third names the dtype of an untyped storage
    behind = b"" if kind else f"ctorch\n{dtype_name(dtype)}\n".encode()
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
