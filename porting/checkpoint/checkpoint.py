"""An opened checkpoint: the content of its headers, and its tensors on request."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from porting.checkpoint.container import allow_time
from porting.checkpoint.errors import CheckpointError, FaultList, checkpoint_error, quote
from porting.checkpoint.files import ByteSource, LocalFile, Readable
from porting.checkpoint.index import ShardIndex, check_against_shards, total_size_warning
from porting.checkpoint.layout import ChecksummedRange, Chunk, Contents, ElementType, Extent, TensorInfo, WeightFile
from porting.errors import Code, Fault, Message, Wording, nearest
from porting.limits import grant_tensors
from porting.opening import Folder

if TYPE_CHECKING:
    import torch

CHECKSUM_PIECE = 1 << 18
"""Bytes read at a time: larger pieces fall out of the processor's cache and cost several times as much."""


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor that lies together in a file.

    Attributes:
        starts: where the box begins in the tensor, axis by axis.
        file: what it is read from: the file, or what its bytes are decoded to.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Readable
    extent: Extent


class InPlace(Protocol):
    """Directories that are held open."""

    def require_in_place(self, names: Iterable[str] = ()) -> None:
        """Check as :meth:`porting.opening.Folder.require_in_place` does."""
        ...  # pragma: no cover


class Checkpoint:
    """A read-only view of a checkpoint on disk; :func:`porting.checkpoint.open_checkpoint` makes it.

    Attributes:
        location: what the user passed, for messages.
        path: the local directory (of a model on the hub, its snapshot in the cache); of a single file, the
            directory it lies in; None when only headers were fetched.
        commit: the commit of a model on the hub; None for local files.
        tensors: every tensor by its on-disk name, in the files' order, the files in the index's order.
        config: what describes the model: the content of ``config.json``, else what the file of weights says of it
            itself; ``{}`` when there is neither.
        config_name: the file that the config was read from; empty when that is the file of weights, or there is none.
        files: the files of weights.
        index: the index's content when the checkpoint is sharded, else None.
        index_file: the same with its name and its bytes.
        part: the inner path of the state dict that was asked for; None when none was given.
        ranks: of how many ranks it was put together; 0 when it was not.
        joined: the directories of the checkpoints that were joined to it, by the names that their tensors begin with.
        contents: what the headers of its files say.
        sources: the files.
        folder: what they lie in; None when only headers were fetched.
        home: ``path`` as it was opened: what lies beside the weights is read in it, whatever takes its name later.
        shared: groups of names that stand for one range of a storage; only ``.bin`` files can say so.
        warnings: what is wrong without changing any value.

    >>> import porting
    >>> source = porting.embedded_checkpoint()
    >>> porting.open_checkpoint(source).tensors["cls.predictions.bias"].shape
    (4096,)
    """

    part: str | None = None
    ranks: int = 0
    config_name: str = ""

    def __init__(
        self,
        *,
        location: str,
        path: Path | None,
        config: Mapping[str, object],
        contents: Iterable[Contents],
        sources: Mapping[str, ByteSource],
        index: ShardIndex | None,
        commit: str | None = None,
        notes: tuple[Fault, ...] = (),
        folder: InPlace | None = None,
        home: Folder | None = None,
        part: str | None = None,
        ranks: int = 0,
        config_name: str = "",
        joined: Mapping[str, Path | None] | None = None,
    ) -> None:
        contents = tuple(contents)
        self.location = location
        self.path = path
        self.commit = commit
        self.part = part
        self.ranks = ranks
        self.contents = contents
        self.sources = sources
        self.folder = folder
        self.home = home
        self.config_name = config_name
        self.joined = dict(joined or {})
        self.config: Mapping[str, object] = config or next((one.config for one in contents if one.config), {})
        self.files: tuple[WeightFile, ...] = tuple(part.file for part in contents)
        self.index_file = index
        self.index = index.content if index is not None else None
        self.shared: tuple[frozenset[str], ...] = tuple(chain.from_iterable(part.shared for part in contents))
        self._verified: set[tuple[str, str, int]] = set()
        self.tensors: Mapping[str, TensorInfo]
        self._extents: Mapping[str, Extent]
        if len(contents) == 1:
            self.tensors, self._extents = contents[0].tensors, contents[0].extents
        else:
            self.tensors = {name: info for part in contents for name, info in part.tensors.items()}
            self._extents = {name: extent for part in contents for name, extent in part.extents.items()}
        self._chunks = {name: (part, chunks) for part in contents for name, chunks in part.chunks.items()}
        self._located: dict[str, tuple[StoredBox, ...]] = {}
        self._archives: dict[tuple[Chunk, ElementType], Extent] = {}
        self.warnings = (*notes, *self._check(contents, index, notes), *self._remote_code())

    def __repr__(self) -> str:
        return f"Checkpoint({self.location!r}, {len(self.tensors)} tensors in {len(self.files)} files)"

    def allow_time(self) -> None:
        """Extend the open time budget by what going through all of this checkpoint's files and tensors may take."""
        allow_time(self.sources.values())
        for part in self.contents:
            source = self.sources.get(part.file.name)
            where = f"{self.location}: {part.file.name}" if source is None else source.where
            grant_tensors(len(part.tensors), where=where)

    def pieces(self, name: str, *, verify: bool = True) -> tuple[StoredBox, ...]:
        """Where a tensor's bytes lie, for reading it in parts.

        Most tensors lie in one piece.  One of a distributed checkpoint lies in disjoint boxes that cover it.

        Args:
            name: its on-disk name.
            verify: see that the checksums of the records are those of their bytes, which reads all of them once.

        Raises:
            CheckpointError: there is no such tensor, its bytes are damaged, or only headers were fetched.
        """
        info = self.tensors.get(name)
        if info is None:
            message = f"the checkpoint has no tensor {quote(name)}"
            raise checkpoint_error(Code.TENSOR_UNKNOWN, self.location, message, nearest(name, list(self.tensors)))
        found = self._located.get(name)
        if found is None:
            if name in self._chunks:
                part, chunks = self._chunks[name]
                files = [self.file(chunk.file) for chunk in chunks]
                found = tuple(
                    StoredBox(chunk.starts, chunk.sizes, file, self._extent(part, file, chunk, info))
                    for chunk, file in zip(chunks, files, strict=True)
                )
            else:
                file, extent = self.file(info.file, tensor=name), self._extents[name]
                source = extent.decode(file) if extent.decode is not None else file
                found = (StoredBox((0,) * len(info.shape), info.shape, source, extent),)
            self._located[name] = found
        if verify:
            for piece in found:
                self._verify_checksum(piece.file, piece.extent.record)
        return found

    def run(self, name: str) -> StoredBox | None:
        """The bytes of a tensor where they lie together in row-major order and need no check; else None.

        Raises:
            CheckpointError: as of :meth:`pieces`.
        """
        pieces, info = self.pieces(name), self.tensors[name]
        extent = pieces[0].extent if len(pieces) == 1 else None
        if extent is None or extent.stride is not None or info.element is ElementType.BOOL:
            return None
        return pieces[0] if extent.stop - extent.start == info.nbytes else None

    def _extent(self, part: Contents, file: LocalFile, chunk: Chunk, info: TensorInfo) -> Extent:
        """Where a chunk's elements lie; tied tensors have the same chunks, which are located once."""
        key = chunk, info.element
        if key not in self._archives:
            self._archives[key] = part.locate(file, chunk, info)
        return self._archives[key]

    def file(self, name: str, *, tensor: str = "") -> LocalFile:
        """A file of weights.

        Args:
            name: the file's name.
            tensor: the tensor for whose sake it is wanted, for messages.

        Raises:
            CheckpointError: only headers were fetched.
        """
        source = self.sources.get(name)
        if not isinstance(source, LocalFile):
            subject = f"of tensor {quote(tensor)}" if tensor else f"in {quote(name)}"
            message = f"the values {subject} were not fetched, only the headers"
            raise checkpoint_error(
                Code.WEIGHTS_NOT_FETCHED,
                self.location,
                message,
                Message(Wording(python="open the checkpoint with weights=True", command="leave --headers-only out")),
            )
        return source

    @property
    def paths(self) -> list[Path]:
        """The files of weights and their index; none if only headers were fetched."""
        names = [*(file.name for file in self.files), *([self.index_file.name] if self.index_file is not None else [])]
        folders = {**self.joined, "": self.path}
        found: list[Path] = []
        for name in names:
            joined = next((one for one in self.joined if name.startswith(f"{one}/")), "")
            folder = folders[joined]
            found += [folder / (name.removeprefix(f"{joined}/") if joined else name)] if folder is not None else []
        return found

    @property
    def in_chunks(self) -> bool:
        """Whether tensors are stored in chunks, of which a process may need a few (distributed checkpoints)."""
        return bool(self._chunks)

    def maps(self, name: str) -> bool:
        """Whether :meth:`read` returns a view of the mapped file without a copy."""
        pieces = self.pieces(name, verify=False)
        if len(pieces) != 1:
            return False
        extent, info = pieces[0].extent, self.tensors[name]
        aligned = extent.start % info.element.itemsize == 0
        return extent.decode is None and aligned and info.nbytes <= extent.stop - extent.start

    def require_in_place(self) -> None:
        """Require that the files of weights, if several, and their index were not replaced since they were opened.

        Called after going through the whole checkpoint: files that were replaced one by one meanwhile are noticed then.
        A single file that was replaced has been read as it was.

        Raises:
            CheckpointError: another file stands in the place of one, or one is gone and others are not.
        """
        index = [self.index_file.name] if self.index_file is not None else []
        names = [*index, *(file.name for file in self.files)]
        for part in self.contents:
            part.require_unchanged()
        if self.folder is not None and len(names) > 1:
            self.folder.require_in_place(names)

    def require_unchanged(self, tensors: Iterable[torch.Tensor]) -> None:
        """Require that the mapped files that some tensors are views of have not changed.

        Raises:
            CheckpointError: a file that one of them is a view of was written to or truncated in place.
        """
        sources = (source for source in self.sources.values() if isinstance(source, LocalFile))
        mapped = sorted((*place, source) for source in sources if (place := source.mapped) is not None)
        begins, seen = [place[0] for place in mapped], set[int]()
        for tensor in tensors:
            if not tensor.numel() or tensor.device.type != "cpu":
                continue
            address = tensor.untyped_storage().data_ptr()
            number = bisect_right(begins, address) - 1
            if number >= 0 and number not in seen and address < mapped[number][1]:
                mapped[number][2].require_unchanged()
                seen.add(number)

    def read(self, name: str, *, own: bool = False) -> torch.Tensor:
        """Read a tensor.

        Args:
            name: its on-disk name.
            own: a contiguous copy in anonymous memory, which does not care what happens to the file
                afterwards. Otherwise the tensor is a view of the privately mapped file: nothing is read
                before it is touched, and writing to it never reaches the file.  Tensors that are not aligned,
                that repeat their elements (stride 0), or that lie in several pieces, are copied in either case.

        Returns:
            The tensor, with the shape and dtype of ``tensors[name]``.

        Raises:
            CheckpointError: there is no such tensor, its bytes are damaged, the file changed since it was
                opened, or only headers were fetched.
        """
        pieces = self.pieces(name)
        info = self.tensors[name]
        if len(pieces) == 1:
            return self._read(name, pieces[0], own=own)
        import torch  # noqa: PLC0415  # headers are read without torch, which takes seconds to import

        whole = torch.empty(info.shape, dtype=info.dtype)
        for piece in pieces:
            box = tuple(slice(start, start + size) for start, size in zip(piece.starts, piece.sizes, strict=True))
            whole[box] = self._read(name, piece, own=False)
        return whole

    def _read(self, name: str, piece: StoredBox, *, own: bool) -> torch.Tensor:
        info, source, extent = self.tensors[name], piece.file, piece.extent
        is_bool = info.element is ElementType.BOOL
        dtype = (ElementType.UINT8 if is_bool else info.element).dtype
        fetch = source.copy if own else source.view
        flat = fetch(extent.start, extent.stop, dtype)
        if is_bool:
            require_booleans(flat, source, name)
            flat = flat.view(ElementType.BOOL.dtype)
        if extent.stride is None:
            return flat.view(piece.sizes)
        strided = flat.as_strided(piece.sizes, extent.stride)
        return strided.contiguous() if own or strided.numel() > flat.numel() else strided

    def _check(
        self, contents: tuple[Contents, ...], index: ShardIndex | None, notes: tuple[Fault, ...]
    ) -> tuple[Fault, ...]:
        """Check the files against each other; returns the warnings."""
        if not self.tensors:
            message, hint = "it holds no tensor", "check how it was saved"
            fault = Fault(code=Code.CHECKPOINT_EMPTY, where=self.location, message=message, hint=hint)
            raise CheckpointError([fault, *notes])
        if index is None:
            return ()
        where = str(self.path / index.name) if self.path is not None else f"{self.location}: {index.name}"
        faults = check_against_shards(index, {part.file.name: part.tensors for part in contents}, where=where)
        if len(contents) > 1:
            self._check_duplicates(contents, faults)
        faults.raise_if_any()
        warning = total_size_warning(index, self.tensors, where=where)
        return (warning,) if warning is not None else ()

    def _remote_code(self) -> tuple[Fault, ...]:
        """A warning if the config names code of its own, since that code is not run."""
        if "auto_map" not in self.config:
            return ()
        named = self.config["auto_map"]
        classes = ", ".join(quote(path) for path in named.values()) if isinstance(named, Mapping) else quote(named)
        message = f"config.json asks for code of its own (auto_map: {quote(classes)[1:-1]}), which is never run here"
        hint = "nothing is to be done, unless the module that you load into is meant to be that code"
        return (Fault(code=Code.REMOTE_CODE, where=self.location, message=message, hint=hint),)

    def _check_duplicates(self, contents: tuple[Contents, ...], faults: FaultList) -> None:
        """Note the tensors that are stored in two shards: it is unknown which one is valid."""
        home: dict[str, Contents] = {}
        for part in contents:
            for name, info in part.tensors.items():
                first = home.setdefault(name, part)
                if first is not part and faults.full:
                    faults.add(Code.INDEX_TENSOR, "")  # counted
                elif first is not part:
                    same = (
                        self._same_bytes(first, part, name)
                        if info == replace(first.tensors[name], file=info.file)
                        else False
                    )
                    verdict = "with equal bytes" if same else "with different values"
                    faults.add(
                        Code.INDEX_TENSOR,
                        f"it stands in {quote(first.file.name)} and in {quote(part.file.name)}, {verdict}",
                        tensor=name,
                        hint="a shard of another save may be among them: fetch or save the checkpoint again",
                    )

    def _same_bytes(self, first: Contents, second: Contents, name: str) -> bool:
        first_file, second_file = (self.sources.get(part.file.name) for part in (first, second))
        first_extent, second_extent = first.extents.get(name), second.extents.get(name)
        if (
            not isinstance(first_file, LocalFile)
            or not isinstance(second_file, LocalFile)
            or first_extent is None
            or second_extent is None
        ):
            return False
        same = first_extent.stop - first_extent.start == second_extent.stop - second_extent.start
        return same and first_file.same_range(first_extent.start, first_extent.stop, second_file, second_extent.start)

    def _verify_checksum(self, source: ByteSource, record: ChecksummedRange | None) -> None:
        """Read a record once, and compare its checksum with the archive's."""
        if record is None or record.crc is None:
            return
        key = source.where, record.name, record.start
        if key in self._verified:
            return
        crc = 0
        for start in range(record.start, record.stop, CHECKSUM_PIECE):
            crc = record.checksum(source.pread(start, min(CHECKSUM_PIECE, record.stop - start)), crc)
        if crc != record.crc:
            message = f"the checksum of the record {quote(record.name)} does not match its bytes"
            raise checkpoint_error(Code.TENSOR_DAMAGED, source.where, message, "the file is damaged: fetch it again")
        self._verified.add(key)


def require_booleans(raw: torch.Tensor, source: ByteSource, name: str) -> None:
    """Require that the bytes of booleans are 0 and 1: a bool tensor with a 7 in it behaves differently everywhere."""
    if raw.numel() and int(raw.max()) > 1:
        message = f"tensor {quote(name)}: a boolean is stored as the byte {int(raw.max())}; only 0 and 1 are"
        raise checkpoint_error(Code.TENSOR_DAMAGED, source.where, message, "the file is damaged: fetch it again")
