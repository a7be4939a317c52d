"""``verify_files``: compare the files of a directory with its record."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from porting.checkpoint import CheckpointError
from porting.checkpoint.container import Container
from porting.checkpoint.errors import checkpoint_error, quote
from porting.checkpoint.files import LocalFile
from porting.checkpoint.layout import RECORD
from porting.checkpoint.registry import container_of, read
from porting.checkpoint.source import LocalPlace, open_weights
from porting.comparing.jobs import work
from porting.converting.digests import PIECE, of_bytes, of_framed, of_range, sha256_of
from porting.converting.record import Record, read_record
from porting.errors import Code, PortingError, grouped_lines
from porting.export_files import chosen_writer
from porting.limits import charge, grant, grant_tensors, reading, spending
from porting.opening import Folder, is_plain
from porting.printable import shown


@dataclass(frozen=True, kw_only=True)
class FilesReport:
    """The result of comparing files with their record.

    Attributes:
        files: how many files the record names.
        tensors: how many tensors were read.
        bytes: how many bytes were read.
        problems: a line for each thing that is not as it was written, of many grouped; empty when all is.
        strangers: the files that the record does not name.
        command: the command that made the files, as the record says.
    """

    path: Path
    files: int
    tensors: int
    bytes: int
    problems: tuple[str, ...]
    strangers: tuple[str, ...]
    command: str

    @property
    def same(self) -> bool:
        """Whether every byte is as it was written."""
        return not self.problems


OBJECTS_EACH = 16
"""Values that a file or a lost tensor of a record is charged as, beside those of the record."""


@spending()
def verify_files(folder: str | os.PathLike[str], *, sha256: bool = False, threads: int = 2) -> FilesReport:
    """Read every file that :func:`porting.convert` wrote, and compare it with its recorded digest.

    A single bit that differs is found, and said where: in which tensor, in a header, in the index, in the config or in
    the record itself.

    Args:
        folder: the directory.
        sha256: compare the SHA-256 of the files as well, where it was recorded.
        threads: how many threads read.

    Raises:
        CheckpointError: there is no record, a file cannot be read, or one changed while the others were read.

    >>> import porting
    >>> source = porting.embedded_checkpoint()
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     made = porting.convert(source, f"{folder}/ported", "bert_into_fused")
    ...     verify_files(made.path).same
    True
    """
    root = Folder(Path(folder))
    problems: list[str] = []
    try:
        record = read_record(root)
    except CheckpointError as error:
        record = Record(content={}, damage=error.faults[0].message)
    if record is None:
        message = f"holds no {RECORD}, so that nothing says what its files should be"
        hint = "porting convert writes one; for two checkpoints without one, compare them with each other"
        raise checkpoint_error(Code.FILE_MISSING, str(root.path), message, hint)
    if record.damage:
        problems.append(f"{RECORD}: {record.damage}")
    elif not record.section("files") or not record.tensors:
        problems.append(f"{RECORD}: it names no {'tensors' if record.section('files') else 'files'}")
    chunks = _Chunks(root, record)
    files = record.section("files")
    charge("objects", OBJECTS_EACH * len(files), where=str(root.path / RECORD))
    grant_tensors(len(record.tensors), where=str(root.path / RECORD))
    digests = _Digests()
    with reading(str(root.path / RECORD)):
        checked = [_CheckedFile(root, name, entry, record, chunks, digests) for name, entry in files.items()]
    jobs = [job for file in checked for job in file.jobs()]
    work(jobs, [lambda: memoryview(bytearray(PIECE))] * threads)
    for file in checked:
        problems += file.problems(sha256=sha256)
    found = {name for file in checked for name in file.ranges}
    if not any(file.unreadable for file in checked):
        empty = of_bytes(b"")  # a distributed checkpoint gives such a tensor no place
        lost = [name for name, of_it in record.tensors.items() if name not in found and of_it != empty]
        charge("objects", OBJECTS_EACH * len(lost), where=str(root.path / RECORD))
        problems += [f"{RECORD}: no file holds its tensor {quote(name)}" for name in lost]
    named = {RECORD, *(file.name for file in checked)}
    strangers = sorted(set(root.names()) - named)
    problems += [
        f"{name}: it is not in the record, and programs that read the directory may look for it"
        for name in strangers
        if _is_looked_for(root, name)
    ]
    root.require_in_place()
    return FilesReport(
        path=root.path,
        files=len(checked),
        tensors=sum(len(file.ranges) for file in checked),
        bytes=sum(file.bytes for file in checked),
        problems=grouped_lines(problems),
        strangers=tuple(strangers),
        command=record.text("command"),
    )


NOTES = (".bib", ".cff", ".gif", ".jpeg", ".jpg", ".log", ".md", ".pdf", ".png", ".rst", ".svg", ".webp")
"""Endings of files for people, which no program reads when it loads a model."""

NAMED = (
    *("authors", "changelog", "citation", "copying", "credits", "license", "licence", "notes", "notice", "readme"),
    *(".git", ".gitattributes", ".gitignore", ".gitkeep", ".cache", ".ds_store", "thumbs.db"),
)
"""Other such files, by their names, with or without the ending ``.txt``; and what version control leaves behind."""


def _is_looked_for(root: Folder, name: str) -> bool:
    """Whether a file that the record does not name may change what a program reads from the directory.

    Which files some loader looks for cannot be listed: ``dict.txt``, ``setup.cfg`` and ``1_Pooling/config.json`` are
    read by one each.  So all are, but for notes.
    """
    lower = name.lower()
    if lower.removesuffix(".txt") in NAMED:
        return False
    return not lower.endswith(NOTES) or root.kind(name) != "a file"


class _Chunks:
    """The places of the tensors of a container whose files are read together, such as a distributed checkpoint."""

    def __init__(self, root: Folder, record: Record) -> None:
        self._root = root
        self._to = record.text("options", "to")
        self._names = record.tensors
        self._found: dict[str, dict[str, tuple[int, int]]] = {}
        self._opened = False

    def of(self, file: str) -> Mapping[str, tuple[int, int]]:
        """The tensors of a file, and the ranges of their bytes."""
        if not self._opened:
            container, part = chosen_writer(self._to or None)
            place = LocalPlace(self._root, location=str(self._root.path))
            checkpoint = open_weights(place, container.main, part=part)
            with reading(place.location):
                for name in checkpoint.tensors:
                    if name not in self._names:  # another name of one that is
                        continue
                    for piece in checkpoint.pieces(name, verify=False):
                        places = self._found.setdefault(piece.file.path.name, {})
                        places[name] = piece.extent.start, piece.extent.stop
            self._opened = True
        return self._found.get(file, {})


def _holds_tensors(container: Container, name: str) -> bool:
    """Whether a file is one in which ``convert`` wrote tensors: no index, and no other description of them."""
    described = container.single or (container.together and name == container.main)
    return container.promises.writes and not described


class _Digests:
    """Digests of ranges of files; a file with several names is read once."""

    def __init__(self) -> None:
        self._ranges: dict[Range, str] = {}
        self._sha256: dict[str, str] = {}

    def job(self, file: LocalFile, start: int, stop: int) -> Iterator[tuple[int, partial[None]]]:
        """The job that takes the digest of a range; nothing if there is one already."""
        key = file.inode, start, stop
        if key not in self._ranges:
            self._ranges[key] = ""
            yield stop - start, partial(self._read, key, file)

    def _read(self, key: Range, file: LocalFile, buffer: memoryview) -> None:
        self._ranges[key] = of_range(file, *key[1:], buffer)

    def of(self, file: LocalFile, start: int, stop: int) -> str:
        """The digest of a range, once its job is done."""
        return self._ranges[file.inode, start, stop]

    def sha256(self, file: LocalFile) -> str:
        """The SHA-256 of a file."""
        if file.inode not in self._sha256:
            self._sha256[file.inode] = sha256_of(file)
        return self._sha256[file.inode]


Range = tuple[str, int, int]
"""A file, and the begin and end of a range in it."""


class _CheckedFile:
    """A file that the record names.

    Attributes:
        ranges: the tensors that were read, and where they lie.
        unreadable: why its tensors could not be read; empty if they could.
    """

    def __init__(
        self, root: Folder, name: str, entry: object, record: Record, chunks: _Chunks, digests: _Digests
    ) -> None:
        self.name = name
        self._chunks = chunks
        self._digests = digests
        self.ranges: Mapping[str, tuple[int, int]] = {}
        self._entry: Mapping[str, object] = entry if isinstance(entry, Mapping) else {}
        self._tensors = record.tensors
        self.unreadable = ""
        self._front = b""
        self._order: list[str] = []
        self._file: LocalFile | None = None
        if not is_plain(name):
            self.unreadable = "it is not a plain file name"
        elif not root.kind(name):
            self.unreadable = "it is missing"
        else:
            try:
                self._file = LocalFile(root.open(name))
            except CheckpointError as error:
                self.unreadable = error.faults[0].message
            else:
                grant(self._file.size, where=self._file.inode)
                if self._file.size != self._entry.get("size"):
                    self.unreadable = (
                        f"it has {self._file.size} bytes, and {shown(self._entry.get('size'))} were written"
                    )
        self.bytes = self._file.size if self._file is not None else 0
        self._container = container_of(name)
        if self._container is not None and not _holds_tensors(self._container, name):
            self._container = None

    def jobs(self) -> Iterator[tuple[int, partial[None]]]:
        """The jobs that read a file: one for each tensor, or one for all; what is between tensors is read at once."""
        if self._file is None or self.unreadable:
            return
        if self._container is None:
            yield from self._digests.job(self._file, 0, self._file.size)
            return
        places = self._places(self._container, self._file)
        if places is None:
            return
        self._order = sorted(places, key=lambda tensor: places[tensor][0])
        end = 0
        between: list[bytes] = []
        with reading(self._file.where):
            for tensor in self._order:
                start, stop = places[tensor]
                between.append(self._file.pread(end, start - end))
                end = stop
        self._front = b"".join([*between, self._file.pread(end, self._file.size - end)])
        self.ranges = places
        for start, stop in places.values():
            yield from self._digests.job(self._file, start, stop)

    def _places(self, container: Container, file: LocalFile) -> Mapping[str, tuple[int, int]] | None:
        """The ranges of the tensors of a file of weights; None if they cannot be found, which is noted."""
        try:
            if container.together:
                return self._chunks.of(self.name)
            extents = read(container, file, name=self.name).extents
        except PortingError as error:
            problem = "its tensors cannot be found" if container.together else "its header is damaged"
            self.unreadable = f"{problem}: {error.faults[0].message}"
            return None
        if any(extent.decode is not None for extent in extents.values()):
            self.unreadable = "its tensors are stored in another form than they were written in"
            return None
        return {name: (extent.start, extent.stop) for name, extent in extents.items()}

    @property
    def _surroundings(self) -> str:
        """The name, for messages, of the part of the file that is outside of tensors."""
        return self._container.surroundings if self._container is not None and self._front else "it"

    def problems(self, *, sha256: bool) -> Iterator[str]:
        """The differences from the record, one a line."""
        if self.unreadable or self._file is None:
            yield f"{self.name}: {self.unreadable}"
            return
        found = {tensor: self._digests.of(self._file, *self.ranges[tensor]) for tensor in self._order}
        differing = [tensor for tensor in self._order if found[tensor] != self._tensors.get(tensor)]
        for tensor in differing:
            yield f"{self.name}: tensor {quote(tensor)} is not as it was written"
        file = self._file
        framed = self._front or self._container is not None
        whole = of_framed(self._front, list(found.values())) if framed else self._digests.of(file, 0, file.size)
        if whole != self._entry.get("digest") and not differing:
            yield f"{self.name}: {self._surroundings} is not as it was written"
        recorded = self._entry.get("sha256")
        if sha256 and recorded is not None and recorded != self._digests.sha256(file):
            yield f"{self.name}: its SHA-256 is not the one that was recorded"
