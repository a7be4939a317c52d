"""The parts of a checkpoint: tensors, their files, and their places in these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from porting.errors import Fault

if TYPE_CHECKING:
    from porting.checkpoint.files import LocalFile, Readable

SAFETENSORS_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    **({"F8_E8M0": torch.float8_e8m0fnu} if hasattr(torch, "float8_e8m0fnu") else {}),  # since torch 2.7
}
"""The format's names for the dtypes that torch can hold, one element in whole bytes."""

PACKED_DTYPES: Mapping[str, str] = {"F4": "4-bit", "F6_E2M3": "6-bit", "F6_E3M2": "6-bit"}
"""Dtypes of the format whose elements are no whole bytes: known by name, so that they are refused by name."""

RECORD = "provenance.json"
"""The record that a conversion writes beside the weights."""

MAX_RANK = 64
"""torch iterates over at most 64 dimensions."""

MAX_BYTES = 2**63 - 1
"""torch counts elements, strides and bytes in signed 64-bit integers."""


def shape_fault(shape: Sequence[int], dtype: torch.dtype) -> str:
    """The reason why no tensor can have a shape; empty if one can.

    Args:
        shape: the sizes.
        dtype: the dtype.

    >>> shape_fault([1 << 40, 0, 1 << 40], torch.float32)
    'its shape [1099511627776, 0, 1099511627776] overflows 64 bits'
    """
    if len(shape) > MAX_RANK:
        return f"{len(shape)} dimensions; torch handles {MAX_RANK}"
    span = dtype.itemsize
    for size in shape:
        span *= size or 1  # torch computes strides from the other sizes even when one is 0
        if span > MAX_BYTES:
            return f"its shape {shown_sizes(shape)} overflows 64 bits"
    return ""


def shown_sizes(sizes: Sequence[int]) -> str:
    """A list of sizes for messages."""
    return str(list(sizes)) if len(sizes) <= 8 else f"[{', '.join(map(str, sizes[:8]))}, …]"


class Described(Protocol):
    """The shape and dtype of a tensor, known before it is read or written."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extents."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """A tensor as its file's header describes it.

    Attributes:
        name: the on-disk key.
        shape: its sizes, slowest dimension first; ``()`` for a scalar.
        dtype: the element type on disk.
        nbytes: its elements' bytes.
        file: the name, inside the checkpoint, of the file that it lies in.
        repeated: how many of its elements are not stored, since they repeat others (stride 0).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    file: str
    repeated: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChecksummedRange:
    """A range of a file that carries a checksum.

    Attributes:
        start: the first byte, counted from the beginning of the file.
        stop: one past the last byte.
        crc: the CRC-32 of its bytes, as the archive's table of contents says; None when it says nothing.
        name: the record's name, for messages.
    """

    start: int
    stop: int
    crc: int | None
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """Where a tensor's elements lie in its file.

    Attributes:
        start: the first byte, counted from the beginning of the file.
        stop: one past the last byte.
        stride: steps in elements, as :meth:`torch.Tensor.stride` counts them; None when contiguous.
        record: the checksummed record that it lies in, or None (safetensors has no checksums).
        decode: opens what the elements are read from, and the places are counted in, where the file has them in
            another form: compressed, or with the other byte order.  None when they lie in the file itself.
    """

    start: int
    stop: int
    stride: tuple[int, ...] | None = None
    record: ChecksummedRange | None = None
    decode: Callable[[LocalFile], Readable] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A box of a tensor that a distributed checkpoint stores in an archive of its own.

    Attributes:
        starts: where the box begins in the tensor, axis by axis.
        sizes: its sizes.
        file: the name of the file.
        start: the archive's first byte there.
        stop: one past its last byte.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class WeightFile:
    """A file of weights.

    Attributes:
        name: its name inside the checkpoint, such as ``model-00001-of-00002.safetensors``.
        size: bytes.
        format: the name of its container: ``"safetensors"``, ``"bin"`` (a state dict saved with ``torch.save``),
            ``"dcp"`` (part of a checkpoint of ``torch.distributed.checkpoint``).
        metadata: the ``__metadata__`` of a safetensors file, strings to strings; ``{}`` when it has none.
        names: its tensors, in the order of its header; of a distributed checkpoint, those that begin in it.
        header: the JSON text of a safetensors file with its padding, without the eight bytes of length that
            stand in front of it; None for other containers.  With it a file is written again byte for byte.
    """

    name: str
    size: int
    format: str
    metadata: Mapping[str, str]
    names: tuple[str, ...]
    header: bytes | None = field(default=None, repr=False)


def _nowhere(file: LocalFile, chunk: Chunk, info: TensorInfo) -> Extent:
    raise ValueError(f"{file.where} has no chunks, and one of {info.name!r} is asked for: {chunk}")  # a bug of ours


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The content of a weight file's header.

    Attributes:
        file: the file.
        tensors: its tensors, in the header's order.
        extents: where each lies.
        shared: groups of names that stand for one and the same range of a storage.
        chunks: of the tensors of a distributed checkpoint, which have no extent, the boxes that make them up.
        locate: finds where the elements of a chunk lie, once its file is open.
        notes: what should be known and changes no value.
    """

    file: WeightFile
    tensors: Mapping[str, TensorInfo]
    extents: Mapping[str, Extent] = field(repr=False)
    shared: tuple[frozenset[str], ...] = ()
    chunks: Mapping[str, tuple[Chunk, ...]] = field(default_factory=dict, repr=False)
    locate: Callable[[LocalFile, Chunk, TensorInfo], Extent] = field(default=_nowhere, repr=False)
    notes: tuple[Fault, ...] = ()
