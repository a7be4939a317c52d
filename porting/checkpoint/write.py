"""Writing checkpoints: deterministic bytes, streamed from the tensors, whole or not at all."""

from __future__ import annotations

import ctypes
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from porting.atomic import check_destination, new_directory, new_file, refused, reserve, write_all, write_at
from porting.checkpoint.checkpoint import Checkpoint
from porting.checkpoint.container import Shard
from porting.checkpoint.errors import FaultList, quote
from porting.checkpoint.files import LocalFile
from porting.checkpoint.names import check_names
from porting.checkpoint.registry import MARKS, SAFETENSORS
from porting.checkpoint.safetensors_file import DTYPE_NAMES, Header, new_header, parse_header, shard_of
from porting.errors import Code
from porting.opening import Folder, Member
from porting.printable import dtype_name

if TYPE_CHECKING:
    import torch

WITHOUT_VALUES = "its values are not in memory: it is a fake tensor, or its memory was freed"

PIECE = 1 << 18
"""Bytes copied at a time; pieces above a megabyte are several times slower."""


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """The content of a file of weights: a safetensors file, or a file that a container has laid out.

    Attributes:
        tensors: names to tensors, in the order in which the header is to list them.
        metadata: strings for the header's ``__metadata__``; None for none, and with ``header``.
        header: the header of an earlier file, to be reproduced byte for byte: its names, dtypes and shapes
            have to be those of ``tensors``.
        shard: the file around ``tensors``, as :meth:`Container.outline` gives it; None for a safetensors file.
    """

    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    metadata: Mapping[str, str] | None = None
    header: bytes | None = field(default=None, repr=False)
    shard: Shard | None = field(default=None, repr=False)


Content: TypeAlias = "bytes | Path | Member | TensorFile"
"""A file's content: bytes as they are, a file to copy by its path or out of an open folder, or tensors."""


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    header: bytes | None = None,
    overwrite: bool = False,
) -> None:
    """Write a safetensors file; the same tensors in the same order give the same bytes.

    Args:
        tensors: names to tensors, in the order in which the header is to list them.
        header: the header of an earlier file (:attr:`WeightFile.header`), to be reproduced byte for byte.
    """
    destination = Path(path)
    plan = _plan(TensorFile(tensors=tensors, metadata=metadata, header=header), where=str(destination))
    check_destination(destination, overwrite=overwrite, file=True)
    _write(destination, plan, overwrite=overwrite)


def write_directory(
    path: str | os.PathLike[str],
    files: Mapping[str, Content],
    *,
    overwrite: bool = False,
    sources: Iterable[str | os.PathLike[str]] = (),
    confirm: Callable[[], None] | None = None,
) -> None:
    """Write a directory of files, all of them or none.

    Args:
        overwrite: whether a checkpoint that stands there may be replaced, as a whole.
        sources: what the files are made from; the destination may not touch them.
        confirm: called when all of it is written and before it appears; what it raises takes all of it back.
    """
    destination = Path(path)
    check_directory(destination, overwrite=overwrite, sources=[Path(source) for source in sources])
    plans = {name: _plan_content(name, content, destination) for name, content in files.items()}
    needed = sum(plan.size for plan in plans.values())
    with new_directory(destination, needed=needed, overwrite=overwrite) as temporary:
        for name, plan in plans.items():
            _write_member(temporary, name, plan)
        if confirm is not None:
            confirm()


def files_like(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> dict[str, Content]:
    """The weight files of a checkpoint with other values, for :func:`write_directory`.

    Tensors that agree with the checkpoint's in names, dtypes and shapes give its very files: shards, headers
    and index byte for byte.  Otherwise, and for other containers than safetensors, they give a single
    ``model.safetensors`` in the mapping's order.
    """
    same = tensors.keys() == checkpoint.tensors.keys() and all(
        (info.dtype, info.shape) == (tensors[name].dtype, tuple(tensors[name].shape))
        for name, info in checkpoint.tensors.items()
    )
    if not same or any(file.header is None for file in checkpoint.files):
        return {SAFETENSORS.main: TensorFile(tensors=tensors, metadata={"format": "pt"})}
    files: dict[str, Content] = {
        file.name: TensorFile(tensors={name: tensors[name] for name in file.names}, header=file.header)
        for file in checkpoint.files
    }
    if checkpoint.index_file is not None:
        files[checkpoint.index_file.name] = checkpoint.index_file.raw
    return files


# ------------------------------------------------------------------------------------------------- what will
# be written


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """A file about to be written: its size, and its bytes in pieces.

    Attributes:
        seals: once all pieces are taken, what is written over some of them, with its place.
    """

    size: int
    pieces: Iterable[memoryview | bytes]
    seals: Callable[[], Iterable[tuple[int, bytes]]] = tuple

    def write(self, descriptor: int) -> None:
        """Write all pieces."""
        for piece in self.pieces:
            write_all(descriptor, piece)
        for at, raw in self.seals():
            write_at(descriptor, raw, at)


def _write(path: Path, plan: _Plan, *, overwrite: bool) -> None:
    with new_file(path, size=plan.size, overwrite=overwrite) as descriptor:
        plan.write(descriptor)


def _write_member(folder: Folder, name: str, plan: _Plan) -> None:
    """Write a file of a new directory, relative to the directory's descriptor."""
    descriptor = folder.write(name)
    try:
        reserve(descriptor, plan.size)
        plan.write(descriptor)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _plan_content(name: str, content: Content, destination: Path) -> _Plan:
    if not name or name in {".", ".."} or "/" in name or "\0" in name:
        raise refused(destination / "…", f"would be named {quote(name)}, which is not a plain file name", "rename it")
    if isinstance(content, bytes):
        return _Plan(size=len(content), pieces=(content,))
    if isinstance(content, Path | Member):
        file = LocalFile(content if isinstance(content, Path) else content.open())
        return _Plan(size=file.size, pieces=_file_pieces(file))
    return _plan(content, where=str(destination / name))


def _file_pieces(file: LocalFile) -> Iterator[bytes]:
    for start in range(0, file.size, PIECE):
        yield file.pread(start, min(PIECE, file.size - start))
    file.require_unchanged()


def _plan(content: TensorFile, *, where: str) -> _Plan:
    """The bytes of a file of tensors."""
    faults = FaultList(where)
    check_names(content.tensors, faults)
    for name, tensor in content.tensors.items():
        reason = _unwritable(tensor)
        if reason:
            faults.add(Code.TENSOR_UNWRITABLE, reason, tensor=name, hint="convert it before it is written")
    if sys.byteorder != "little":
        faults.add(Code.TENSOR_UNWRITABLE, "this machine is big-endian, and the format is little-endian")
    faults.raise_if_any()
    shard = shard_around(content, where=where)
    crcs = dict.fromkeys(shard.seals, 0)

    def pieces() -> Iterator[memoryview | bytes]:
        parts: list[tuple[int, bytes | str]] = [*shard.frame, *((at, name) for name, at in shard.offsets.items())]
        for _, part in sorted(parts, key=itemgetter(0)):
            if isinstance(part, bytes):
                yield part
                continue
            for piece in tensor_bytes(content.tensors[part]):
                if part in crcs:
                    crcs[part] = zlib.crc32(piece, crcs[part])
                yield piece

    def seals() -> Iterator[tuple[int, bytes]]:
        for name, seal in shard.seals.items():
            raw = seal.of(crcs[name], content.tensors[name].nbytes)
            yield from ((at, raw) for at in seal.places)

    return _Plan(size=shard.size, pieces=pieces(), seals=seals)


def shard_around(content: TensorFile, *, where: str) -> Shard:
    """All bytes of a file except its tensors, which need no values."""
    if content.shard is not None:
        return content.shard
    name = Path(where).name
    if content.header is None:
        return shard_of(name, new_header(content.tensors, content.metadata, where=where), content.tensors)
    return shard_of(name, _header_of(content, content.header, where), content.tensors)


def tensor_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's bytes in row-major order; copied only if it is laid out in another order."""
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if tensor.numel():
        raw = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        view = memoryview(raw).cast("B")
        for start in range(0, len(view), PIECE):
            yield view[start : start + PIECE]  # `tensor` lives until the last piece is taken


def holds_values(tensor: torch.Tensor) -> bool:
    """Whether a dense tensor's values lie in memory: not those of a fake tensor, or of one whose memory was freed."""
    if not tensor.numel():
        return True
    try:
        storage = tensor.untyped_storage()
        if (
            storage.device.type == "meta"
            or (tensor.storage_offset() + _span(tensor)) * tensor.itemsize > storage.nbytes()
        ):
            return False
        tensor.data_ptr()
    except RuntimeError:  # a tensor of functorch has no storage, or none with an address
        return False
    return True


def repeated_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a dense tensor's elements beyond those that lie in memory, as of one that was expanded."""
    return max(tensor.numel() - _span(tensor), 0) * tensor.itemsize if tensor.numel() else 0


def _span(tensor: torch.Tensor) -> int:
    """The elements in memory from a tensor's first one to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _unwritable(tensor: torch.Tensor) -> str:
    """The reason why a tensor cannot be stored; empty if it can."""
    if str(tensor.layout) != "torch.strided":
        return f"its layout is {tensor.layout}, and the format stores dense tensors"
    if tensor.is_meta:
        return "it is on the meta device and has no values"
    if tensor.is_quantized or dtype_name(tensor.dtype) not in DTYPE_NAMES:
        return f"the format has no name for its dtype {tensor.dtype}"
    if not holds_values(tensor):
        return WITHOUT_VALUES
    return ""


def _header_of(content: TensorFile, header: bytes, where: str) -> Header:
    """The header of an earlier file; checks that the tensors fit it."""
    tensors = content.tensors
    size = 8 + len(header) + sum(tensor.nbytes for tensor in tensors.values())
    parsed = parse_header(header, where=where, name=Path(where).name)
    faults = FaultList(where)
    hint = "write it without the earlier file's header"
    for name, info in parsed.tensors.items():
        if name not in tensors:
            faults.add(Code.HEADER_MISMATCH, "the header lists it, and it is not given", tensor=name, hint=hint)
        elif (tensors[name].dtype, tuple(tensors[name].shape)) != (info.dtype, info.shape):
            found = f"{tuple(tensors[name].shape)} of {tensors[name].dtype}"
            faults.add(
                Code.HEADER_MISMATCH,
                f"the header says {info.shape} of {info.dtype}, and it is {found}",
                tensor=name,
                hint=hint,
            )
    for name in tensors:
        if name not in parsed.tensors:
            faults.add(Code.HEADER_MISMATCH, "it is given, and the header does not list it", tensor=name, hint=hint)
    if content.metadata is not None and dict(content.metadata) != dict(parsed.file.metadata):
        faults.add(
            Code.HEADER_MISMATCH, "the metadata is not the header's", hint="leave it out: the header has its own"
        )
    faults.raise_if_any()
    if parsed.file.size != size:
        faults.add(Code.HEADER_MISMATCH, f"the header describes {parsed.file.size} bytes, not {size}", hint=hint)
    faults.raise_if_any()
    begin = 8 + len(header)
    order = sorted(tensors, key=lambda name: parsed.extents[name].start)
    offsets = {name: parsed.extents[name].start - begin for name in order}
    return Header(text=header, offsets=offsets, data=size - begin)


def check_directory(destination: Path, *, overwrite: bool, sources: Iterable[Path] = ()) -> None:
    """Refuse the destination of a directory before anything is written; one to be replaced holds a checkpoint alone.

    Args:
        sources: what it is made from.
    """
    check_destination(destination, overwrite=overwrite, sources=sources)
    if not os.path.lexists(destination):
        return
    if not destination.is_dir():
        raise refused(destination, "is a file", "choose another destination")
    folder = Folder(destination)
    names = folder.names()
    folders = sorted(name for name in names if folder.kind(name) == "a directory")
    if folders:
        raise refused(destination, f"holds the folder {quote(folders[0])}, which would be lost", "remove it yourself")
    known = (*MARKS, "config.json")
    if names and not any(name.endswith(known) for name in names):
        raise refused(destination, "holds files and no checkpoint", "choose another destination")
