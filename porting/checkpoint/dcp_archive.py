"""The archive of ``torch.save`` around a tensor of a distributed checkpoint, or a state dict, without the elements.

The archive is a zip file of stored entries (PKWARE's APPNOTE.TXT, section 4.3): the pickle that describes the tensors,
the byte order, a version, and then the elements.  All of it follows from names, dtypes and shapes but for the CRC-32 of
the elements, for which two places are left.  The pickle is written here opcode by opcode: it names
``_rebuild_tensor_v2`` and storages, as the one of ``torch.save`` does, and holds nothing of a user's but names.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from porting.checkpoint.container import Seal, Shard
from porting.checkpoint.layout import Described, ElementType
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
    pickled = b"\x80\x02" + _tensor(dtype, shape, "0") + b"."
    (front, back), _, ((first, second),), size = _archive(pickled, [math.prod(shape) * dtype.itemsize], at=at)
    return Frame(front=front, back=back, seals=(first, second), size=size)


def state_dict_shard(name: str, tensors: Mapping[str, Described], tied: Mapping[str, str]) -> Shard:
    """A file with a state dict of contiguous tensors, without their elements."""
    keys = {tensor: str(number) for number, tensor in enumerate(tensors)}
    stored = {tensor: tensor for tensor in tensors} | {other: own for other, own in tied.items() if own in tensors}
    entries = (_text(one) + _tensor(tensors[own].dtype, tensors[own].shape, keys[own]) for one, own in stored.items())
    pickled = b"\x80\x02}(" + b"".join(entries) + b"u."
    sizes = [math.prod(one.shape) * one.dtype.itemsize for one in tensors.values()]
    pieces, places, seals, size = _archive(pickled, sizes, at=0)
    begins = [0, *(place + count for place, count in zip(places, sizes, strict=True))]
    return Shard(
        name=name,
        size=size,
        frame=tuple(zip(begins, pieces, strict=True)),
        offsets=dict(zip(tensors, places, strict=True)),
        tensors=tuple(tensors),
        seals={tensor: Seal(places=pair) for tensor, pair in zip(tensors, seals, strict=True)},
    )


def _archive(
    pickled: bytes, sizes: Sequence[int], *, at: int
) -> tuple[list[bytes], list[int], list[tuple[int, int]], int]:
    """An archive without the elements of its storages.

    Returns:
        The bytes in front of each storage and those behind the last; where each storage begins; the two places of its
        CRC-32; and the bytes of the archive.
    """
    front = b""
    directory = Directory()
    for name, raw in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")):
        directory.add(_name(name), at=len(front), nbytes=len(raw), crc=zlib.crc32(raw))
        front += local_header(_name(name), nbytes=len(raw), crc=zlib.crc32(raw)) + raw
    pieces, places, begins, marks, end = [], [], [], [], 0
    for number, nbytes in enumerate(sizes):
        begun, last = end + len(front), _name(f"data/{number}")
        bare = len(local_header(last, nbytes=nbytes, crc=0, extra=_padding(0)))
        front += local_header(last, nbytes=nbytes, crc=0, extra=_padding((-at - begun - bare) % ALIGNED))
        pieces.append(front)
        places.append(end + len(front))
        begins.append(begun)
        marks.append(directory.add(last, at=begun, nbytes=nbytes, crc=0))
        end, front = places[-1] + nbytes, b""
    back = front + directory.end(end + len(front))
    end += len(front)
    seals = [(begun + 14, end + mark) for begun, mark in zip(begins, marks, strict=True)]
    return [*pieces, back], places, seals, end + len(back) - len(front)


def _name(name: str) -> bytes:
    return f"{ROOT}/{name}".encode()


def _padding(count: int) -> bytes:
    """An extra field that fills ``count`` bytes more than its own four, by the name that torch gives to it."""
    return b"FB" + struct.pack("<H", count) + b"Z" * count


# --------------------------------------------------------------------------------------------------- the pickle


def _tensor(dtype: torch.dtype, shape: Sequence[int], key: str) -> bytes:
    """How a tensor is made of the storage of this key (protocol 2)."""
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
            f"ctorch._utils\n{call}\n((".encode(),
            _text("storage") + storage.encode() + _text(key) + _text("cpu"),
            _whole(count if kind else count * dtype.itemsize) + b"tQ",
            _whole(0) + _tuple(shape) + _tuple(strides),
            b"\x89ccollections\nOrderedDict\n)R" + behind + b"tR",
        ]
    )


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def _whole(number: int) -> bytes:
    if number < 1 << 8:
        return struct.pack("<cB", b"K", number)
    if number < 1 << 31:
        return struct.pack("<ci", b"J", number)
    raw = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def _tuple(numbers: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_whole, numbers)) + b"t"
