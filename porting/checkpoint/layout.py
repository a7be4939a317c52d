"""The parts of a checkpoint: tensors, their files, and their places in these."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from porting.checkpoint.errors import CheckpointError
from porting.errors import Code, Fault
from porting.printable import dtype_name, shown

if TYPE_CHECKING:  # torch is imported where tensors are made: reading headers does not wait for it
    import torch

    from porting.checkpoint.files import LocalFile, Readable


class ElementType(Enum):
    """The type of a tensor's elements, known without torch: its name, the bytes of an element and its kind."""

    BOOL = "bool", 1, "bool"
    UINT8 = "uint8", 1, "int"
    INT8 = "int8", 1, "int"
    UINT16 = "uint16", 2, "int"
    INT16 = "int16", 2, "int"
    FLOAT16 = "float16", 2, "float"
    BFLOAT16 = "bfloat16", 2, "float"
    UINT32 = "uint32", 4, "int"
    INT32 = "int32", 4, "int"
    FLOAT32 = "float32", 4, "float"
    UINT64 = "uint64", 8, "int"
    INT64 = "int64", 8, "int"
    FLOAT64 = "float64", 8, "float"
    COMPLEX64 = "complex64", 8, "complex"
    COMPLEX128 = "complex128", 16, "complex"
    FLOAT8_E4M3FN = "float8_e4m3fn", 1, "float"
    FLOAT8_E5M2 = "float8_e5m2", 1, "float"
    FLOAT8_E4M3FNUZ = "float8_e4m3fnuz", 1, "float"
    FLOAT8_E5M2FNUZ = "float8_e5m2fnuz", 1, "float"
    FLOAT8_E8M0FNU = "float8_e8m0fnu", 1, "float"

    def __init__(self, title: str, itemsize: int, kind: str) -> None:
        self.title = title
        self.itemsize = itemsize
        self.kind = kind

    def __str__(self) -> str:
        return self.title

    @property
    def dtype(self) -> torch.dtype:
        """Torch's dtype of that name."""
        found = _DTYPES.get(self)
        if found is None:
            import torch  # noqa: PLC0415  # headers are read without torch, which takes seconds to import

            found = getattr(torch, self.title, None)
            if not isinstance(found, torch.dtype):
                message = f"torch {torch.__version__} has no dtype {self}, and it is needed to read the values"
                raise CheckpointError(Fault(code=Code.TENSOR_UNWRITABLE, message=message, hint="install a newer torch"))
            _DTYPES[self] = found
        return found

    @classmethod
    def of(cls, dtype: torch.dtype) -> ElementType:
        """The element type of one of torch's dtypes."""
        found = _BY_TITLE.get(dtype_name(dtype))
        if found is None:
            raise CheckpointError(
                Fault(code=Code.TENSOR_UNWRITABLE, message=f"no file has a name for the dtype {dtype}")
            )
        return found


_DTYPES: dict[ElementType, torch.dtype] = {}
_BY_TITLE = {one.title: one for one in ElementType}

SAFETENSORS_DTYPES: Mapping[str, ElementType] = {
    "BOOL": ElementType.BOOL,
    "U8": ElementType.UINT8,
    "I8": ElementType.INT8,
    "U16": ElementType.UINT16,
    "I16": ElementType.INT16,
    "F16": ElementType.FLOAT16,
    "BF16": ElementType.BFLOAT16,
    "U32": ElementType.UINT32,
    "I32": ElementType.INT32,
    "F32": ElementType.FLOAT32,
    "U64": ElementType.UINT64,
    "I64": ElementType.INT64,
    "F64": ElementType.FLOAT64,
    "C64": ElementType.COMPLEX64,
    "F8_E4M3": ElementType.FLOAT8_E4M3FN,
    "F8_E5M2": ElementType.FLOAT8_E5M2,
    "F8_E4M3FNUZ": ElementType.FLOAT8_E4M3FNUZ,
    "F8_E5M2FNUZ": ElementType.FLOAT8_E5M2FNUZ,
    "F8_E8M0": ElementType.FLOAT8_E8M0FNU,
}
"""The format's names for the dtypes that torch can hold, one element in whole bytes."""

PACKED_DTYPES: Mapping[str, str] = {"F4": "4-bit", "F6_E2M3": "6-bit", "F6_E3M2": "6-bit"}
"""Dtypes of the format whose elements are not whole bytes: known by name, so that they are refused by name."""

RECORD = "provenance.json"
"""The record that a conversion writes beside the weights."""

MAX_RANK = 64
"""torch iterates over at most 64 dimensions."""

MAX_BYTES = 2**63 - 1
"""torch counts elements, strides and bytes in signed 64-bit integers."""


def shape_fault(shape: Sequence[int], element: ElementType) -> str:
    """The reason why no tensor can have a shape; empty if one can.

    >>> shape_fault([1 << 40, 0, 1 << 40], ElementType.FLOAT32)
    'its shape [1099511627776, 0, 1099511627776] overflows 64 bits'
    """
    if len(shape) > MAX_RANK:
        return f"{len(shape)} dimensions; torch handles {MAX_RANK}"
    span = element.itemsize
    for size in shape:
        span *= size or 1  # torch computes strides from the other sizes even when one is 0
        if span > MAX_BYTES:
            return f"its shape {shown_sizes(shape)} overflows 64 bits"
    return ""


def shown_sizes(sizes: Sequence[int]) -> str:
    """A list of sizes for messages."""
    return f"[{', '.join(map(shown, sizes[:8]))}{', …' if len(sizes) > 8 else ''}]"


class Described(Protocol):
    """The shape and dtype of a tensor, known before it is read or written."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """A tensor as its file's header describes it.

    Attributes:
        name: the on-disk key.
        file: the name, inside the checkpoint, of the file that it lies in.
        repeated: how many of its elements are not stored, since they repeat others (stride 0).
    """

    name: str
    shape: tuple[int, ...]
    element: ElementType
    nbytes: int
    file: str
    repeated: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements on disk; asking for it imports torch."""
        return self.element.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class ChecksummedRange:
    """A range of a file that carries a checksum.

    Attributes:
        start: the first byte, counted from the beginning of the file.
        stop: one past the last byte.
        crc: the checksum of its bytes, as the archive's table of contents says; None when it says nothing.
        name: the record's name, for messages.
        checksum: computes it, of some bytes and the checksum of those in front of them.
    """

    start: int
    stop: int
    crc: int | None
    name: str
    checksum: Callable[[bytes, int], int] = zlib.crc32


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
        shared: groups of names that stand for one and the same range of a storage.
        chunks: of the tensors of a distributed checkpoint, which have no extent, the boxes that make them up.
        locate: finds where the elements of a chunk lie, once its file is open.
        require_unchanged: compares files that no source stands for, when a command has read all of it.
        notes: what should be known and changes no value.
        config: what the file says of the model, in the place of a ``config.json``.
    """

    file: WeightFile
    tensors: Mapping[str, TensorInfo]
    extents: Mapping[str, Extent] = field(repr=False)
    shared: tuple[frozenset[str], ...] = ()
    chunks: Mapping[str, tuple[Chunk, ...]] = field(default_factory=dict, repr=False)
    locate: Callable[[LocalFile, Chunk, TensorInfo], Extent] = field(default=_nowhere, repr=False)
    require_unchanged: Callable[[], None] = field(default=lambda: None, repr=False)
    notes: tuple[Fault, ...] = ()
    config: Mapping[str, object] = field(default_factory=dict, repr=False)

    def renamed(self, front: str, label: str) -> Contents:
        """The same with a text in front of the names of all tensors, and one in front of those of files."""

        def info(tensor: TensorInfo) -> TensorInfo:
            return replace(tensor, name=front + tensor.name, file=label + tensor.file)

        def chunk(part: Chunk) -> Chunk:
            return replace(part, file=label + part.file)

        names = tuple(front + name for name in self.file.names)
        return replace(
            self,
            file=replace(self.file, name=label + self.file.name, names=names, header=None),
            tensors={front + name: info(tensor) for name, tensor in self.tensors.items()},
            extents={front + name: extent for name, extent in self.extents.items()},
            shared=tuple(frozenset(front + name for name in group) for group in self.shared),
            chunks={front + name: tuple(map(chunk, parts)) for name, parts in self.chunks.items()},
        )
