"""A checkpoint of ``torch.distributed.checkpoint`` as a directory: its ``.metadata``, and the files with the chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch

from porting.checkpoint.bin_file import locate_tensor
from porting.checkpoint.dcp_metadata import SAVE_AGAIN, DistributedContents, read_metadata
from porting.checkpoint.errors import CheckpointError, FaultList, quote
from porting.checkpoint.files import ByteSource, LocalFile
from porting.checkpoint.layout import ChecksummedRange, Chunk, Contents, Extent, TensorInfo, WeightFile
from porting.checkpoint.names import DCP_METADATA
from porting.checkpoint.state_dict import SHARED
from porting.errors import Code, Fault, nearest
from porting.limits import charge

SHOWN = 3
"""Entries that are named of those that are no tensors."""


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """What was opened.

    Attributes:
        contents: all tensors with the ``.metadata``, and the other files.
        sources: the files.
        notes: what should be known.
    """

    contents: tuple[Contents, ...]
    sources: Mapping[str, ByteSource]
    notes: tuple[Fault, ...]


def read_distributed(
    open_all: Callable[[Collection[str]], dict[str, ByteSource]], *, part: str, location: str
) -> Distributed:
    """Open a distributed checkpoint; each chunk lies inside of its file, and no two share a byte but those of ties.

    Args:
        open_all: opens files of the directory by their names.
        part: the state dict that is meant, of those that are nested in it: ``model`` takes the tensors whose names
            begin with ``model.``, without that.  Empty for all, as they are.
        location: what the user passed, for messages.

    Raises:
        CheckpointError: with every fault found.
    """
    sources = open_all([DCP_METADATA])
    metadata = sources[DCP_METADATA]
    found = read_metadata(metadata)
    notes = _notes(found, part=part, location=location, where=metadata.where)
    if part:
        found = _part(found, part, metadata.where)
    first = {chunk.file: None for chunks in found.chunks.values() for chunk in chunks}
    sources |= open_all(first)
    shared = _check_ranges(found, sources, metadata.where)
    described = WeightFile(name=DCP_METADATA, size=metadata.size, format="dcp", metadata={}, names=())
    contents = [Contents(file=described, tensors=found.tensors, extents={}, shared=shared, chunks=found.chunks)]
    held: dict[str, list[str]] = {name: [] for name in first}
    for name, info in found.tensors.items():
        held.setdefault(info.file, []).append(name)
    for name in first:
        file = WeightFile(name=name, size=sources[name].size, format="dcp", metadata={}, names=tuple(held[name]))
        contents.append(Contents(file=file, tensors={}, extents={}))
    return Distributed(contents=tuple(contents), sources=sources, notes=notes)


def locate(source: LocalFile, chunk: Chunk, info: TensorInfo) -> Extent:
    """Where the elements of a chunk lie in its file, once the archive around them is seen to hold them.

    Raises:
        CheckpointError: it is no archive of ``torch.save``, or holds something else.
    """
    where = f"{source.where}: tensor {quote(info.name)}, chunk at {list(chunk.starts)}"
    try:
        extent = locate_tensor(_Part(source, chunk, where), dtype=info.dtype, shape=chunk.sizes)
    except CheckpointError as error:
        # What a state dict would be told to do about itself, a chunk is not.
        raise CheckpointError([replace(one, hint=SAVE_AGAIN) for one in error.faults]) from error
    record = extent.record
    if record is not None:
        record = ChecksummedRange(
            start=record.start + chunk.start, stop=record.stop + chunk.start, crc=record.crc, name=record.name
        )
    return Extent(start=extent.start + chunk.start, stop=extent.stop + chunk.start, stride=extent.stride, record=record)


class _Part:
    """A range of a file as a source of bytes."""

    def __init__(self, source: LocalFile, chunk: Chunk, where: str) -> None:
        self.where = where
        self.size = chunk.stop - chunk.start
        self._source = source
        self._start = chunk.start

    def pread(self, offset: int, count: int) -> bytes:
        return self._source.pread(self._start + offset, count)


def _part(found: DistributedContents, part: str, where: str) -> DistributedContents:
    prefix = f"{part}."
    names = {name: name.removeprefix(prefix) for name in found.tensors if name.startswith(prefix)}
    if not names:
        message = f"it has no tensor whose name begins with {quote(prefix)}"
        hint = nearest(part, list(_parts(found))) or "pass the directory itself for all of it"
        raise CheckpointError(Fault(code=Code.CHECKPOINT_NOT_FOUND, where=where, message=message, hint=hint))
    return DistributedContents(
        tensors={new: replace(found.tensors[old], name=new) for old, new in names.items()},
        chunks={new: found.chunks[old] for old, new in names.items()},
        entries=(),
        parts={},
    )


def _parts(found: DistributedContents) -> dict[str, int]:
    """What the first parts of the names are, and how many tensors have each."""
    parts: dict[str, int] = {}
    for name in found.tensors:
        part = name.partition(".")[0]
        parts[part] = parts.get(part, 0) + 1
    return parts


def _notes(found: DistributedContents, *, part: str, location: str, where: str) -> tuple[Fault, ...]:
    """What is in it beside a model's tensors, and under which names these were saved."""
    if part or not (found.entries or found.parts):
        return ()
    several = ", ".join(f"{quote(one)} ({_counted(count)})" for one, count in list(found.parts.items())[:SHOWN])
    named = ", ".join(quote(one) for one in found.entries[:SHOWN])
    more = f" and {len(found.entries) - SHOWN} more" if len(found.entries) > SHOWN else ""
    if not found.entries:
        message = f"what was saved has {several} in it"
    elif len(found.entries) == 1:
        message = f"one entry is no tensor and is not read: {named}"
    else:
        message = f"{len(found.entries)} entries are no tensors and are not read: {named}{more}"
    hint = ""
    if found.parts:
        first = next(iter(found.parts))
        hint = f"{location.rstrip('/')}/{first} is what was saved under {quote(first)}, by its own names"
        if found.entries:
            hint = f"it has {several}; {hint}"
    return (Fault(code=Code.DCP_PARTS, where=where, message=message, hint=hint),)


def _counted(tensors: int) -> str:
    """A number of tensors, in words."""
    return f"{tensors} tensor{'' if tensors == 1 else 's'}"


def _check_ranges(
    found: DistributedContents, sources: Mapping[str, ByteSource], where: str
) -> tuple[frozenset[str], ...]:
    """Check where chunks lie.

    torch never writes two tensors to one range of a file.  This library's ``convert`` does, for tied tensors: all
    their chunks are the same.  Any other shared byte is a fault, and what ties stand for is charged.

    Returns:
        The groups of names that have the same chunks.

    Raises:
        CheckpointError: a chunk is not within its file or too short, or shares bytes; the budget ran out.
    """
    faults = FaultList(where)
    ranges: dict[str, list[tuple[int, int, str]]] = {}
    ties: dict[tuple[tuple[int, ...], torch.dtype, tuple[Chunk, ...]], list[str]] = {}
    for name, chunks in found.chunks.items():
        info = found.tensors[name]
        for chunk in chunks:
            size = sources[chunk.file].size
            needed, given = math.prod(chunk.sizes) * info.dtype.itemsize, chunk.stop - chunk.start
            if given < needed:
                message = f"its chunk at {list(chunk.starts)} needs {needed} bytes and has {given} in {chunk.file}"
                faults.add(Code.DCP_CHUNK, message, tensor=name, hint=SAVE_AGAIN)
            if chunk.stop > size:
                message = (
                    f"its chunk at {list(chunk.starts)} is said to lie at bytes {chunk.start} to {chunk.stop} "
                    f"of {chunk.file}, which has {size}"
                )
                faults.add(Code.DCP_CHUNK, message, tensor=name, hint=f"the file was cut short, or {SAVE_AGAIN}")
        same = ties.setdefault((info.shape, info.dtype, chunks), [])
        same.append(name)
        if len(same) == 1 or not chunks:
            for chunk in chunks:
                ranges.setdefault(chunk.file, []).append((chunk.start, chunk.stop, name))
    for file, held in ranges.items():
        end, last = 0, ""
        for start, stop, name in sorted(held):
            if start < end:
                message = f"its bytes in {file} are also those of {quote(last)}"
                faults.add(Code.DCP_CHUNK, message, tensor=name, hint=SAVE_AGAIN)
            if stop > end:
                end, last = stop, name
    faults.raise_if_any()
    stored = sum(stop - start for held in ranges.values() for start, stop, _ in held)
    made = sum(info.nbytes for info in found.tensors.values()) - SHARED * stored
    charge("made", max(made, 0), where=where)
    return tuple(frozenset(names) for (_, _, chunks), names in ties.items() if chunks and len(names) > 1)
