"""A checkpoint of ``torch.distributed.checkpoint`` as a directory: its ``.metadata``, and the files with the chunks.

It is read and written.  The ``.metadata`` is a pickle, the only one that is ever written here, because that is what
torch reads.  It is made of torch's own classes with names, sizes and numbers in them, and holds no weight.  Without a
memo (``fast``) its bytes follow from these alone, and not from which of them happened to be one object.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from porting.checkpoint.bin_file import locate_tensor
from porting.checkpoint.container import (
    Container,
    Found,
    Outline,
    Place,
    Promises,
    Seal,
    Shard,
    UnrecognisedError,
    WriteOptions,
    divided,
    foreign,
    open_all,
)
from porting.checkpoint.dcp_archive import frame
from porting.checkpoint.dcp_metadata import SAVE_AGAIN, DistributedContents, read_metadata
from porting.checkpoint.errors import CheckpointError, FaultList, checkpoint_error, quote
from porting.checkpoint.files import ByteSource, LocalFile
from porting.checkpoint.layout import (
    ChecksummedRange,
    Chunk,
    Contents,
    Described,
    ElementType,
    Extent,
    TensorInfo,
    WeightFile,
)
from porting.checkpoint.names import DCP_METADATA
from porting.checkpoint.state_dict import SHARED
from porting.errors import Code, Fault, nearest
from porting.limits import charge
from porting.printable import counted, first_few, shell_word

UNCONSOLIDATED = re.compile(r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors")
"""The names of ``HuggingFaceStorageWriter`` for the files of one process, if they are not consolidated."""

PUT_TOGETHER = "save it again with enable_consolidation of torch's HuggingFaceStorageWriter switched on"

SHOWN = 3
"""The number of entries without tensors that a message names."""


class Distributed(Container):
    """The format of ``torch.distributed.checkpoint``: a directory."""

    name = "dcp"
    title = "a distributed checkpoint"
    endings = (".distcp",)
    main = DCP_METADATA
    surroundings = "what stands around its tensors"
    parts = True
    together = True
    promises = Promises(writes=True, shards=True, checksums=True)

    def read(self, source: ByteSource, *, name: str, locate: bool = True) -> Contents:
        """Refuse: a file of a distributed checkpoint cannot be read alone."""
        fault = self.fragment(name, where=source.where)
        raise CheckpointError(fault or Fault(code=Code.FORMAT_WRONG, where=source.where, message=f"not {self.title}"))

    def open(self, place: Place, main: str, *, part: str | None = None, locate: bool = True) -> Found:
        """Open a distributed checkpoint; each chunk lies inside of its file, and no two share a byte but those of ties.

        ``part`` is the state dict that is meant, of those that are nested in it: ``model`` takes the tensors whose
        names begin with ``model.``, without that.
        """
        sources = open_all(place, [main])
        metadata = sources[main]
        found = read_metadata(metadata)
        notes = _notes(found, part=part, location=place.location, where=metadata.where)
        if part:
            found = _part(found, part, metadata.where)
        first = _files(found)
        sources |= open_all(place, first)
        shared = _check_ranges(found, sources, metadata.where)
        described = WeightFile(name=main, size=metadata.size, format=self.name, metadata={}, names=())
        whole = Contents(
            file=described, tensors=found.tensors, extents={}, shared=shared, chunks=found.chunks, locate=_locate_chunk
        )
        contents = [whole]
        names_of: dict[str, list[str]] = {name: [] for name in first}
        for name, info in found.tensors.items():
            names_of.setdefault(info.file, []).append(name)
        for name in first:
            file = WeightFile(
                name=name, size=sources[name].size, format=self.name, metadata={}, names=tuple(names_of[name])
            )
            contents.append(Contents(file=file, tensors={}, extents={}))
        return Found(contents=tuple(contents), sources=sources, notes=notes)

    def others(self, place: Place, main: str) -> tuple[str, ...]:
        """The files with the chunks."""
        return tuple(_files(read_metadata(place.open(main))))

    def fragment(self, name: str, *, where: str) -> Fault | None:
        """The fault of a file that one of several processes wrote."""
        if UNCONSOLIDATED.fullmatch(name):
            message = "this is what one process saved of a distributed model, with parts of tensors in it"
            return Fault(code=Code.FORMAT_WRONG, where=where, message=message, hint=PUT_TOGETHER)
        if name != self.main and not name.endswith(self.endings):
            return None
        message = "this is one file of a distributed checkpoint"
        hint = f"pass its directory, {shell_word(Path(where).parent)}"
        return Fault(code=Code.FORMAT_WRONG, where=where, message=message, hint=hint)

    def incomplete(self, names: Collection[str], *, where: str) -> Fault | None:
        """The fault of an incomplete save, or of one whose parts were not consolidated."""
        pieces = [name for name in names if name.endswith(self.endings)]
        if pieces:
            message = f"holds {len(pieces)} files of a distributed checkpoint and no {self.main}, which is written last"
            hint = "the save did not come to its end: save it again"
            return Fault(code=Code.CHECKPOINT_NOT_FOUND, where=where, message=message, hint=hint)
        parts = sorted(name for name in names if UNCONSOLIDATED.fullmatch(name))
        if not parts:
            return None
        message = (
            f"holds parts of tensors, as torch saves them unconsolidated ({parts[0]} and {len(parts) - 1} more): "
            "nothing says how large a tensor is, so that a file that is missing would not show"
        )
        return Fault(code=Code.FORMAT_WRONG, where=where, message=message, hint=PUT_TOGETHER)

    def outline(self, tensors: Mapping[str, Described], options: WriteOptions) -> Outline:
        """Lay out every tensor as one chunk, and a ``.metadata``, in which tied names have places as well."""
        self.require_writable(tensors, where=f"{options.where}/{self.main}")
        groups = divided(tensors, options.shard_size)
        laid = [_shard(f"__0_{number}{self.endings[0]}", group) for number, group in enumerate(groups)]
        ranges = {name: place for _, places in laid for name, place in places.items()}
        files = {self.main: _metadata(tensors, options.tied, ranges, options.part)}
        return Outline(shards=tuple(shard for shard, _ in laid), files=files)


def _files(found: DistributedContents) -> dict[str, None]:
    """The files of the chunks, each once."""
    return {chunk.file: None for chunks in found.chunks.values() for chunk in chunks}


def _locate_chunk(source: LocalFile, chunk: Chunk, info: TensorInfo) -> Extent:
    """Locate the elements of a chunk in its file, and check the archive around them."""
    where = f"{source.where}: tensor {quote(info.name)}, chunk at {list(chunk.starts)}"
    try:
        extent = locate_tensor(_FileRange(source, chunk, where), element=info.element, shape=chunk.sizes)
    except CheckpointError as error:
        # The hints for a state dict do not fit a chunk.
        faults = [replace(fault, hint=SAVE_AGAIN) for fault in error.faults]
        kind = foreign(error.source) if isinstance(error, UnrecognisedError) else None
        if kind is not None:
            faults = [
                replace(fault, message=f"this is {kind.what}, not a tensor that torch.save wrote") for fault in faults
            ]
        raise CheckpointError(faults) from error
    record = extent.record
    if record is not None:
        record = ChecksummedRange(
            start=record.start + chunk.start, stop=record.stop + chunk.start, crc=record.crc, name=record.name
        )
    return Extent(start=extent.start + chunk.start, stop=extent.stop + chunk.start, stride=extent.stride, record=record)


class _FileRange:
    """A range of a file, read as a file of its own."""

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
        firsts = list(dict.fromkeys(name.partition(".")[0] for name in found.tensors))
        hint = nearest(part, firsts) or "pass the directory itself for all of it"
        raise checkpoint_error(Code.CHECKPOINT_NOT_FOUND, where, message, hint)
    return DistributedContents(
        tensors={new: replace(found.tensors[old], name=new) for old, new in names.items()},
        chunks={new: found.chunks[old] for old, new in names.items()},
        entries=(),
        parts={},
    )


def _notes(found: DistributedContents, *, part: str | None, location: str, where: str) -> tuple[Fault, ...]:
    """Notes on what it holds beside tensors, and on the names that nest the tensors."""
    if part or not (found.entries or found.parts):
        return ()
    parts = list(found.parts.items())[:SHOWN]
    several = ", ".join(f"{quote(path)} ({counted(count, 'tensor')})" for path, count in parts)
    named = first_few([*map(quote, found.entries)], SHOWN)
    if not found.entries:
        message = f"what was saved has {several} in it"
    elif len(found.entries) == 1:
        message = f"one entry is not a tensor and is not read: {named}"
    else:
        message = f"{len(found.entries)} entries are not tensors and are not read: {named}"
    hint = ""
    if found.parts:
        first = next(iter(found.parts))
        path = shell_word(f"{location.rstrip('/')}/{first}")
        hint = f"{path} is what was saved under {quote(first)}, by its own names"
        if found.entries:
            hint = f"it has {several}; {hint}"
    return (Fault(code=Code.DCP_PARTS, where=where, message=message, hint=hint),)


def _check_ranges(
    found: DistributedContents, sources: Mapping[str, ByteSource], where: str
) -> tuple[frozenset[str], ...]:
    """Check that the chunks lie in their files and do not overlap; returns the groups of tied tensors.

    torch never writes two tensors to one range of a file.  This library's ``convert`` does, for tied tensors: all
    their chunks are the same.  Any other shared byte is a fault, and what ties stand for is charged.

    Returns:
        The groups of names that have the same chunks.
    """
    faults = FaultList(where)
    ranges: dict[str, list[tuple[int, int, str]]] = {}
    ties: dict[tuple[tuple[int, ...], ElementType, tuple[Chunk, ...]], list[str]] = {}
    for name, chunks in found.chunks.items():
        info = found.tensors[name]
        for chunk in chunks:
            size = sources[chunk.file].size
            needed, given = math.prod(chunk.sizes) * info.element.itemsize, chunk.stop - chunk.start
            if given < needed:
                message = f"its chunk at {list(chunk.starts)} needs {needed} bytes and has {given} in {chunk.file}"
                faults.add(Code.DCP_CHUNK, message, tensor=name, hint=SAVE_AGAIN)
            if chunk.stop > size:
                message = (
                    f"its chunk at {list(chunk.starts)} should lie at bytes {chunk.start} to {chunk.stop} "
                    f"of {chunk.file}, which has {size}"
                )
                faults.add(Code.DCP_CHUNK, message, tensor=name, hint=f"the file was cut short, or {SAVE_AGAIN}")
        same = ties.setdefault((info.shape, info.element, chunks), [])
        same.append(name)
        if len(same) == 1 or not chunks:
            for chunk in chunks:
                ranges.setdefault(chunk.file, []).append((chunk.start, chunk.stop, name))
    for file, stored_ranges in ranges.items():
        end, last = 0, ""
        for start, stop, name in sorted(stored_ranges):
            if start < end:
                message = f"its bytes in {file} are also those of {quote(last)}"
                faults.add(Code.DCP_CHUNK, message, tensor=name, hint=SAVE_AGAIN)
            if stop > end:
                end, last = stop, name
    faults.raise_if_any()
    stored = sum(stop - start for stored_ranges in ranges.values() for start, stop, _ in stored_ranges)
    made = sum(info.nbytes for info in found.tensors.values()) - SHARED * stored
    charge("made", max(made, 0), where=where)
    return tuple(frozenset(names) for (_, _, chunks), names in ties.items() if chunks and len(names) > 1)


# --------------------------------------------------------------------------------------------------- writing

Ranges = Mapping[str, tuple[str, int, int]]
"""The file, place and length of each tensor's archive."""


def _shard(name: str, group: Mapping[str, Described]) -> tuple[Shard, Ranges]:
    pieces: list[tuple[int, bytes]] = []
    offsets: dict[str, int] = {}
    seals: dict[str, Seal] = {}
    ranges: dict[str, tuple[str, int, int]] = {}
    at = 0
    for tensor, described in group.items():
        made = frame(described.dtype, described.shape, at=at)
        offsets[tensor] = at + len(made.front)
        seals[tensor] = Seal(places=tuple(at + seal for seal in made.seals))
        ranges[tensor] = name, at, made.size
        pieces += [(at, made.front), (at + made.size - len(made.back), made.back)]
        at += made.size
    # The metadata gives no place to a tensor without elements.
    hidden = frozenset(tensor for tensor, described in group.items() if 0 in described.shape)
    shard = Shard(
        name=name, size=at, frame=tuple(pieces), offsets=offsets, tensors=tuple(group), seals=seals, hidden=hidden
    )
    return shard, ranges


def _metadata(tensors: Mapping[str, Described], tied: Mapping[str, str], ranges: Ranges, part: str) -> bytes:
    """The ``.metadata``: the pickle of torch's objects that describes the checkpoint."""
    import torch  # noqa: PLC0415  # headers are read without torch, which takes seconds to import

    try:
        from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: PLC0415  # takes a second, and only writing needs it
        from torch.distributed.checkpoint.metadata import (  # noqa: PLC0415  # as above
            STORAGE_TYPES,
            ChunkStorageMetadata,
            Metadata,
            MetadataIndex,
            TensorProperties,
            TensorStorageMetadata,
        )
    except ImportError as error:
        message = "this build of torch has no torch.distributed.checkpoint, whose metadata it should be"
        raise CheckpointError(Fault(code=Code.OPTION_REFUSED, message=message)) from error

    before = (part,) if part else ()
    stored = {name: name for name in tensors} | {name: own for name, own in tied.items() if own in tensors}
    state: dict[str, STORAGE_TYPES] = {}
    storage = {}
    planner = {}
    for name, own in stored.items():
        shape, path = torch.Size(tensors[own].shape), (*before, name)
        chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)
        state[".".join(path)] = TensorStorageMetadata(TensorProperties(dtype=tensors[own].dtype), shape, [chunk])
        storage[MetadataIndex(".".join(path), [0] * len(shape), 0)] = _StorageInfo(*ranges[own])
        planner[".".join(path)] = path
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=4)
    pickler.fast = True
    pickler.dump(Metadata(state_dict_metadata=state, planner_data=planner, storage_data=storage, version="1.0.0"))
    return file.getvalue()
