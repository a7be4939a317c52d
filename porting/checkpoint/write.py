"""Writing checkpoints: the same bytes each time, streamed from the tensors, whole or not at all."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch

from porting.checkpoint.atomic import check_destination, new_directory, new_file, refused, reserve, write_all
from porting.checkpoint.checkpoint import Checkpoint
from porting.checkpoint.errors import FaultList, quote
from porting.checkpoint.files import LocalFile
from porting.checkpoint.names import DCP_ENDING, SAFETENSORS, check_names
from porting.checkpoint.safetensors_file import DTYPE_NAMES, new_header, parse_header
from porting.errors import Code
from porting.opening import Folder, Member

PIECE = 1 << 18
"""Bytes copied at a time; pieces above a megabyte are several times slower."""


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """What a safetensors file is to hold.

    Attributes:
        tensors: names to tensors, in the order in which the header is to list them.
        metadata: strings for the header's ``__metadata__``; None for none, and with ``header``.
        header: the header of an earlier file, to be reproduced byte for byte: its names, dtypes and shapes
            have to be those of ``tensors``.
    """

    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    metadata: Mapping[str, str] | None = None
    header: bytes | None = field(default=None, repr=False)


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
    """Writes one safetensors file; the same tensors in the same order give the same bytes.

    Args:
        path: the file to be made.
        tensors: names to tensors, in the order in which the header is to list them.
        metadata: strings for the header's ``__metadata__``, which are sorted.
        header: the header of an earlier file (:attr:`WeightFile.header`), to be reproduced byte for byte.
        overwrite: whether a file that stands there may be replaced.

    Raises:
        CheckpointError: the tensors cannot be stored or do not fit the header, the destination is refused, or
            the system failed; nothing is left behind.
    """
    destination = Path(path)
    plan = _plan(TensorFile(tensors=tensors, metadata=metadata, header=header), where=str(destination))
    if destination.is_dir():
        raise refused(destination, "is a directory", "pass the path of a file")
    check_destination(destination, overwrite=overwrite)
    _write(destination, plan, overwrite=overwrite)


def write_directory(
    path: str | os.PathLike[str],
    files: Mapping[str, Content],
    *,
    overwrite: bool = False,
    sources: Iterable[str | os.PathLike[str]] = (),
    confirm: Callable[[], None] | None = None,
) -> None:
    """Writes a directory of files, all of them or none.

    Args:
        path: the directory to be made.
        files: file names to contents.
        overwrite: whether a checkpoint that stands there may be replaced, as a whole.
        sources: what the files are made from; the destination may not touch them.
        confirm: called when all of it is written and before it appears; what it raises takes all of it back.

    Raises:
        CheckpointError: a content cannot be stored, the destination is refused, or the system failed; what
            stood at the destination before is then untouched.
    """
    destination = Path(path)
    check_destination(destination, overwrite=overwrite, sources=[Path(source) for source in sources])
    check_replaceable(destination)
    plans = {name: _plan_content(name, content, destination) for name, content in files.items()}
    needed = sum(plan.size for plan in plans.values())
    with new_directory(destination, needed=needed, overwrite=overwrite) as temporary:
        for name, plan in plans.items():
            _write_member(temporary, name, plan)
        if confirm is not None:
            confirm()


def files_like(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> dict[str, Content]:
    """The weight files of a checkpoint with other values in them, for :func:`write_directory`.

    Tensors that agree with the checkpoint's in names, dtypes and shapes give its very files: shards, headers
    and index byte for byte.  Otherwise, and for ``.bin`` files, they give a single ``model.safetensors`` in
    the mapping's order.

    Args:
        checkpoint: whose files to follow.
        tensors: every tensor to be written, by its on-disk name.
    """
    same = tensors.keys() == checkpoint.tensors.keys() and all(
        (info.dtype, info.shape) == (tensors[name].dtype, tuple(tensors[name].shape))
        for name, info in checkpoint.tensors.items()
    )
    if not same or any(file.format != "safetensors" for file in checkpoint.files):
        return {SAFETENSORS: TensorFile(tensors=tensors, metadata={"format": "pt"})}
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
    """A file about to be written: its size, and its bytes in pieces."""

    size: int
    pieces: Iterable[memoryview | bytes]


def _write(path: Path, plan: _Plan, *, overwrite: bool) -> None:
    with new_file(path, size=plan.size, overwrite=overwrite) as descriptor:
        for piece in plan.pieces:
            write_all(descriptor, piece)


def _write_member(folder: Folder, name: str, plan: _Plan) -> None:
    """A file of a directory that is being made: by its name relative to the directory's descriptor."""
    descriptor = folder.write(name)
    try:
        reserve(descriptor, plan.size)
        for piece in plan.pieces:
            write_all(descriptor, piece)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _plan_content(name: str, content: Content, destination: Path) -> _Plan:
    if not name or name in {".", ".."} or "/" in name or "\0" in name:
        raise refused(destination / "…", f"would be named {quote(name)}, which is no plain file name", "rename it")
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
    """The header and the order of the tensors' bytes."""
    faults = FaultList(where)
    check_names(content.tensors, faults)
    for name, tensor in content.tensors.items():
        reason = _unwritable(tensor)
        if reason:
            faults.add(Code.TENSOR_UNWRITABLE, reason, tensor=name, hint="convert it before it is written")
    if sys.byteorder != "little":
        faults.add(Code.TENSOR_UNWRITABLE, "this machine is big-endian, and the format is little-endian")
    faults.raise_if_any()
    if content.header is not None:
        header, order = content.header, _order_of(content, content.header, where)
    else:
        fresh = new_header(content.tensors, content.metadata, where=where)
        header, order = fresh.text, list(fresh.offsets)
    size = 8 + len(header) + sum(content.tensors[name].nbytes for name in order)
    return _Plan(size=size, pieces=_pieces(header, content.tensors, order))


def _pieces(header: bytes, tensors: Mapping[str, torch.Tensor], order: list[str]) -> Iterator[memoryview | bytes]:
    yield len(header).to_bytes(8, "little") + header
    for name in order:
        yield from tensor_bytes(tensors[name])


def tensor_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's bytes in row-major order; it is copied only when it is not laid out so."""
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if tensor.numel():
        raw = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        view = memoryview(raw).cast("B")
        for start in range(0, len(view), PIECE):
            yield view[start : start + PIECE]  # `tensor` lives until the last piece is taken


def _unwritable(tensor: torch.Tensor) -> str:
    """Why a tensor cannot be stored; empty when it can."""
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}, and the format stores dense tensors"
    if tensor.is_meta:
        return "it is on the meta device and has no values"
    if tensor.is_quantized or tensor.dtype not in DTYPE_NAMES:
        return f"the format has no name for its dtype {tensor.dtype}"
    return ""


def _order_of(content: TensorFile, header: bytes, where: str) -> list[str]:
    """The order of the data under an earlier file's header, once the tensors are seen to fit it."""
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
            Code.HEADER_MISMATCH,
            "the metadata is not the header's",
            hint="leave it out: the header has its own",
        )
    faults.raise_if_any()
    if parsed.file.size != size:
        faults.add(Code.HEADER_MISMATCH, f"the header describes {parsed.file.size} bytes, not {size}", hint=hint)
    faults.raise_if_any()
    return sorted(tensors, key=lambda name: parsed.extents[name].start)


def check_replaceable(destination: Path) -> None:
    """Only what looks like a checkpoint, and holds nothing else, is ever replaced."""
    if not destination.exists():
        return
    if not destination.is_dir():
        raise refused(destination, "is a file", "choose another destination")
    entries = list(destination.iterdir())
    folders = sorted(entry.name for entry in entries if entry.is_dir())
    if folders:
        raise refused(destination, f"holds the folder {quote(folders[0])}, which would be lost", "remove it yourself")
    known = (".safetensors", ".bin", DCP_ENDING, "config.json")
    if entries and not any(entry.name.endswith(known) for entry in entries):
        raise refused(destination, "holds files and no checkpoint", "choose another destination")
