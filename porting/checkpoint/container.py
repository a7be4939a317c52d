"""The interface of a container of tensors: how its files are recognised, read and laid out, and what it promises.

A container is one file with a subclass of :class:`Container`, and one entry in :mod:`porting.checkpoint.registry`.
Where its files lie, on this machine or on the hub, it does not know: a :class:`Place` gives it their bytes.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from porting.checkpoint.errors import CheckpointError, FaultList, checkpoint_error, quote
from porting.checkpoint.files import ByteSource, LocalFile
from porting.checkpoint.index import ShardIndex
from porting.checkpoint.layout import SAFETENSORS_DTYPES, Contents, Described, ElementType
from porting.checkpoint.names import check_names
from porting.errors import Code, Fault, Message, Option, Wording, nearest
from porting.limits import grant
from porting.printable import dtype_name

if TYPE_CHECKING:
    import torch

ENOUGH = 1000
"""The number of files that cannot be opened after which no other is tried."""

DTYPES = frozenset(SAFETENSORS_DTYPES.values())
"""The dtypes that the library carries from container to container."""


@dataclass(frozen=True, kw_only=True)
class Promises:
    """The properties of every file of a container; ``docs/containers.md`` has them as a table.

    Attributes:
        writes: ``convert`` and ``export`` write it.  The next four are about that.
        dtypes: the dtypes that it stores exactly; others are refused.
        metadata: the strings of a safetensors header are kept.
        shards: the tensors can be divided among several files.
        deterministic: the same tensors give the same bytes at any time and on any machine.
        resumable: a conversion that was killed goes on where it stopped.
        ranges: a part of a tensor is read without the rest of the file; ``"stored"`` when that holds for members that
            are not compressed.
        checksums: it has checksums of the elements, which are compared when they are read.
        headers: of a model on the hub, names and shapes are read without downloading the weights.
        transformers: ``from_pretrained`` reads it.
    """

    writes: bool
    dtypes: frozenset[ElementType] = DTYPES
    metadata: bool = False
    shards: bool = False
    deterministic: bool = True
    resumable: bool = True
    ranges: str = "always"
    checksums: bool = False
    headers: bool = True
    transformers: bool = False


class FileKind(NamedTuple):
    """The kind of a file that cannot be read as it is, and what to do about it."""

    what: str
    hint: str


class UnrecognisedError(CheckpointError):
    """A file does not begin or end as its container's files do, so it may be of another kind."""

    def __init__(self, fault: Fault, source: ByteSource, title: str) -> None:
        super().__init__(fault)
        self.source = source
        self.title = title


class Place(Protocol):
    """The location of a checkpoint's files: a directory, or a model on the hub."""

    @property
    def location(self) -> str:
        """The path that the user passed, for messages."""
        ...  # pragma: no cover

    def open(self, name: str) -> ByteSource:
        """Open one of the files.

        Raises:
            CheckpointError: they cannot be had.
        """
        ...  # pragma: no cover

    def read(self, name: str, *, limit: int) -> tuple[bytes, str]:
        """Read a small file; returns its bytes, and its name for messages.

        Raises:
            CheckpointError: it cannot be had, or is larger than ``limit``.
        """
        ...  # pragma: no cover


@dataclass(frozen=True, kw_only=True)
class Found:
    """The content of opened files.

    Attributes:
        contents: what the headers of the files of weights say.
        notes: what should be known and changes no value.
    """

    contents: tuple[Contents, ...]
    sources: Mapping[str, ByteSource]
    index: ShardIndex | None = None
    notes: tuple[Fault, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Seal:
    """A checksum in a file that depends on a tensor's elements.

    Attributes:
        places: where in the file it stands, 4 bytes each, little-endian.
        before: the CRC-32 of the bytes in front of the elements that it is taken over as well; 0 for none.
    """

    places: tuple[int, ...]
    before: int = 0

    def of(self, crc: int, nbytes: int) -> bytes:
        """The bytes of the checksum."""
        return (_crc_shift(self.before, nbytes) ^ crc).to_bytes(4, "little")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A file of weights to be written: all of its bytes except the tensors' elements.

    Attributes:
        frame: what stands around the tensors, each piece with its place.
        offsets: the place of each tensor's first byte, in the order of the data.
        tensors: its tensors, in the order in which they are listed.
        hidden: tensors whose place no reader learns, since they have no elements.
    """

    name: str
    size: int
    frame: tuple[tuple[int, bytes], ...] = field(repr=False)
    offsets: Mapping[str, int]
    tensors: tuple[str, ...]
    seals: Mapping[str, Seal] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Outline:
    """All files of weights to be written.

    Attributes:
        files: what else belongs to the container, such as an index, by name.
    """

    shards: tuple[Shard, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(shard.size for shard in self.shards) + sum(map(len, self.files.values()))


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """How tensors are laid out in files.

    Attributes:
        metadata: strings that are kept where the container has room for them.
        shard_size: bytes of tensors that one file may hold; a larger tensor has a file of its own.  None for one file.
        part: the state dict that the tensors are nested in; empty for none.
        tied: other names of some of the tensors, each with the name that it equals.
        settings: the model's config, for a container that holds it.
        main: the name of the main file, one of :attr:`Container.mains`; empty for the usual one.
    """

    where: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    shard_size: int | None = None
    part: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    main: str = ""


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """The files of a tokenizer beside a checkpoint.

    Attributes:
        texts: the contents of those that are read.
        unread: why the others that are there are not read, in words.
    """

    where: str
    texts: Mapping[str, bytes]
    unread: Mapping[str, str] = field(default_factory=dict)


class Container(ABC):
    """A file format that holds tensors.

    Attributes:
        name: what ``--to`` and :attr:`WeightFile.format` call it.
        title: what a file of it is called in messages.
        endings: those of the names of its files, the usual one first.
        main: the file that stands for the weights in a directory; it alone is named to open them.
        also: other names of that file, which other libraries than transformers use.
        spare: names of a main file that is looked for where there is none of the others: of adapters, and of libraries
            that put theirs beside that of transformers.
        single: the name of the one file that an index may lead to; empty for what is not an index.
        surroundings: what messages call the bytes that are no tensor's.
        parts: several state dicts may be nested in it; ``DIRECTORY/part`` and ``--to name/part`` mean one.
        together: its files can only be read all together.
        stem: its main file has no usual name: in a directory it is the only one with the ending, and its path may be
            given without that, as the library that wrote it has it.
        settings: the model's config is a part of its file, in the place of a ``config.json``.
        tokenizer_files: the files that :meth:`beside` reads.
        separator: stands between the keys that lead to a tensor; an inner path is the first of them.  Empty where
            tensors have no such keys.
        promises: what it does.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    endings: tuple[str, ...]
    main: str
    also: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()
    single: str = ""
    surroundings: ClassVar[str] = "its header"
    parts: ClassVar[bool] = False
    together: ClassVar[bool] = False
    stem: ClassVar[bool] = False
    settings: ClassVar[bool] = False
    tokenizer_files: ClassVar[tuple[str, ...]] = ()
    separator: ClassVar[str] = ""
    promises: Promises

    @property
    def mains(self) -> tuple[str, ...]:
        """All names that the main file of the weights may have in a directory."""
        return (self.main, *self.also)

    def sniff(self, source: ByteSource) -> FileKind | None:
        """Recognise a file of this container by its bytes: its kind and what to do; None for any other file."""
        return None

    @abstractmethod
    def read(self, source: ByteSource, *, name: str, locate: bool = True) -> Contents:
        """Read the headers of one file, each tensor checked against the file.

        Args:
            source: its bytes; only headers are read.
            name: its name inside of the checkpoint.
            locate: find where the bytes of the tensors lie; without it a remote file is asked for less.

        Raises:
            CheckpointError: with every fault found.
            UnrecognisedError: it may be another kind of file.
        """

    def open(self, place: Place, main: str, *, part: str | None = None, locate: bool = True) -> Found:
        """Open the files that ``main`` stands for.

        Args:
            place: where they lie.
            main: the file that was named or chosen.
            part: the inner path of the state dict that is meant, of those that are nested in it; empty for all of
                them, None when none was given.
            locate: as of :meth:`read`.

        Raises:
            CheckpointError: with every fault found.
        """
        sources = open_all(place, [main])
        contents = self.read(sources[main], name=main, locate=locate)
        return self.below(Found(contents=(contents,), sources=sources, notes=contents.notes), part, place)

    def below(self, found: Found, part: str | None, place: Place) -> Found:
        """The tensors below an inner path, without it in their names; all of them where it is None or empty.

        Raises:
            CheckpointError: it names nothing, or the container has no inner paths.
        """
        if not part or not self.separator:
            self.require_no_part(part or None if self.separator else part, where=place.location)
            return found
        begin = f"{part}{self.separator}"
        contents = tuple(_below(one, begin) for one in found.contents)
        if not any(one.tensors for one in contents):
            firsts = {name.partition(self.separator)[0] for one in found.contents for name in one.tensors}
            message = f"it holds no tensor whose name begins with {quote(begin)}"
            fault = Fault(
                code=Code.INNER_PATH, where=place.location, message=message, hint=nearest(part, sorted(firsts))
            )
            raise CheckpointError([fault, *found.notes])
        return replace(found, contents=contents)

    def require_no_part(self, part: str | None, *, where: str) -> None:
        """Refuse an inner path, in a container that does not nest state dicts.

        Raises:
            CheckpointError: there is one.
        """
        if part is not None:
            message = f"{self.title} has no state dicts inside, and the inner path {quote(part)} was given"
            hint = f"leave {quote('#' + part)} out"
            raise checkpoint_error(Code.INNER_PATH, where, message, hint)

    def others(self, place: Place, main: str) -> tuple[str, ...]:
        """The files that ``main`` needs beside it.

        Raises:
            CheckpointError: ``main`` does not say so.
        """
        return ()

    def fragment(self, name: str, *, where: str) -> Fault | None:
        """The fault of a file that is a part of a checkpoint and cannot be opened alone; None for any other name."""
        return None

    def incomplete(self, names: Collection[str], *, where: str) -> Fault | None:
        """The fault of a directory that has files of this container without the main one; None if it has no such files.

        Args:
            names: the files that are there.
            where: the directory, for messages.
        """
        return None

    def refusal(self, name: str, dtype: torch.dtype) -> tuple[str, str]:
        """The reason why a tensor cannot be written, and a hint; the reason is empty if it can.

        Args:
            name: the tensor.
            dtype: its dtype.
        """
        if dtype_name(dtype) in map(str, self.promises.dtypes):
            return "", ""
        return f"the format has no name for its dtype {dtype}", "convert it before it is written"

    def beside(
        self, settings: Mapping[str, object], tokenizer: TokenizerFiles, tensors: Mapping[str, Described]
    ) -> tuple[dict[str, object], tuple[str, ...]]:
        """The config and tokenizer files that a file's own metadata gives, for a container that holds the config.

        Args:
            settings: the model's config.
            tokenizer: what :attr:`tokenizer_files` names, as far as it is there.
            tensors: what is to be written.

        Returns:
            More settings, and warnings.

        Raises:
            LimitError: reading the tokenizer costs more than the budget has.
        """
        del settings, tokenizer, tensors
        return {}, ()

    def stored(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.dtype:
        """The dtype in which ``convert`` writes a tensor that has another, and loses nothing by it.

        Args:
            shape: its sizes.
            dtype: what it has.
        """
        del shape
        return dtype

    def require_writable(self, tensors: Mapping[str, Described], *, where: str) -> None:
        """Require that every tensor can be written and read back.

        Raises:
            CheckpointError: with every fault.
        """
        faults = FaultList(where)
        check_names(tensors, faults)
        for name, tensor in tensors.items():
            reason, hint = self.refusal(name, tensor.dtype)
            if reason:
                faults.add(Code.TENSOR_UNWRITABLE, reason, tensor=name, hint=hint)
        faults.raise_if_any()

    def outline(self, tensors: Mapping[str, Described], options: WriteOptions) -> Outline:
        """Lay tensors out in files: every byte but those of the elements, and their checksums.

        Args:
            tensors: what is to be written, in its order.
            options: how.

        Raises:
            CheckpointError: a tensor or a name cannot be written.
        """
        raise NotImplementedError(f"{self.name} is not written")  # its promises say so; asking is a bug of ours


def _below(contents: Contents, begin: str) -> Contents:
    """The tensors whose names begin with a text, without it."""
    names = {name: name.removeprefix(begin) for name in contents.tensors if name.startswith(begin)}
    return replace(
        contents,
        file=replace(contents.file, names=tuple(names.values())),
        tensors={short: replace(contents.tensors[name], name=short) for name, short in names.items()},
        extents={short: contents.extents[name] for name, short in names.items() if name in contents.extents},
        chunks={short: contents.chunks[name] for name, short in names.items() if name in contents.chunks},
    )


def open_all(place: Place, names: Iterable[str]) -> dict[str, ByteSource]:
    """Open every file; the error names all that cannot be opened."""
    sources = dict(open_each(place, names))
    allow_time(sources.values())
    return sources


def open_each(place: Place, names: Iterable[str]) -> Iterator[tuple[str, ByteSource]]:
    """Open the files one after the other, and hold one at a time."""
    names = list(names)
    faults: list[Fault] = []
    for name in names:
        try:
            source = place.open(name)
        except CheckpointError as error:
            faults += error.faults
            if error.faults[0].code is Code.HUB_UNREACHABLE:
                break
        else:
            yield name, source
            del source  # it may hold what was read of it
        if len(faults) >= ENOUGH:
            message = f"of {len(names)} files these cannot be opened; the others were not tried"
            faults.append(Fault(code=faults[-1].code, where=str(Path(faults[-1].where).parent), message=message))
            break
    if faults:
        raise CheckpointError(faults)


STATE_DICT = "if it is a state dict that torch.save made, rename it to end in .bin"

MAGIC: tuple[tuple[bytes, str, str], ...] = (
    (b"PK\x03\x04", "a zip archive", "if torch.save made it, rename it to end in .bin"),
    (b"\x1f\x8b", "a gzip archive", "run `gunzip` on it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive", "run `unzstd` on it first"),
    (b"BZh", "a bzip2 archive", "run `bunzip2` on it first"),
    (b"\xfd7zXZ", "an xz archive", "run `unxz` on it first"),
    (b"\x93NUMPY", "a NumPy array", "save the tensors with safetensors"),
    (b"\x7fELF", "a program", "this is not a file of weights: fetch it again"),
    *(
        (
            b"\x80" + bytes([protocol]),
            "a pickle",
            STATE_DICT,
        )
        for protocol in (2, 3, 4, 5)
    ),
)
"""The first bytes of files of other formats, what they are, and a hint."""

_TOML = re.compile(rb"\[\[?[a-z_]+\]\]?\s|[a-z_]+ *= ")


def foreign(source: ByteSource) -> FileKind | None:  # noqa: PLR0911  # a list of kinds, one after the other
    """The kind of a file that no container reads; None if its first bytes do not tell."""
    head = source.pread(0, min(source.size, 1024))
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not head:
        return FileKind("an empty file", "the download or the copy never began: fetch it again")
    if head.startswith(b"version https://git-lfs"):
        return FileKind("a Git-LFS pointer", "run `git lfs pull` in its directory")
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return FileKind("an HTML page", "it is what the server answered instead of the file: log in and fetch it again")
    if head[257:262] == b"ustar":
        return FileKind("a tar archive", "unpack it, or save the weights again with a current torch.save")
    if source.where.endswith(".keras"):
        return FileKind("a Keras archive", "run `unzip` on it and pass its model.weights.h5")
    for magic, title, hint in MAGIC:
        if head.startswith(magic):
            return FileKind(title, hint)
    if _TOML.match(text) or source.where.endswith(".toml"):
        return FileKind("a TOML text", Message("a mapping table is passed as ", Option("table")))
    if source.where.endswith(".py"):
        into = Wording(python="into=", command="--into file.py:NAME")
        return FileKind("a Python file", Message("what builds a module is passed as ", into))
    if text.startswith((b"{", b"[")):
        hint = "the path may name the index or the configuration where the weights are meant"
        return FileKind("a JSON text", hint)
    if not head.strip(b"\0"):
        zeros = f"a file that begins with {len(head)} zero bytes"
        return FileKind(zeros, "an interrupted download left it: fetch it again")
    return None


def allow_time(sources: Iterable[ByteSource]) -> None:
    """Extend the time budget by what files on this machine may take; the hub may claim any size for its own."""
    for source in sources:
        if isinstance(source, LocalFile):
            grant(source.size, where=source.inode)


def divided(tensors: Mapping[str, Described], shard_size: int | None) -> list[dict[str, Described]]:
    """Divide tensors into groups of at most ``shard_size`` bytes; a larger tensor is a group of its own.

    Args:
        shard_size: bytes; None for one group.
    """
    groups: list[dict[str, Described]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        count = nbytes(tensor)
        if groups[-1] and shard_size is not None and filled + count > shard_size:
            groups.append({})
            filled = 0
        groups[-1][name] = tensor
        filled += count
    return groups


def nbytes(tensor: Described) -> int:
    """The bytes of a tensor's elements."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


# ------------------------------------------------------------------------------- CRC-32 of bytes after others

_POLYNOMIAL = 0xEDB88320


def _crc_shift(crc: int, nbytes: int) -> int:
    """The part of a CRC-32 from the bytes before the last ``nbytes``: the product with x to the power of their bits.

    Polynomials over GF(2) modulo that of CRC-32, as of zlib's ``crc32_combine``.

    >>> import zlib
    >>> _crc_shift(zlib.crc32(b"front"), 4) ^ zlib.crc32(b"back") == zlib.crc32(b"frontback")
    True
    """
    power, bits = 1 << 30, 8 * nbytes  # x itself; the highest bit is the constant
    while bits:
        if bits & 1:
            crc = _crc_product(power, crc)
        power = _crc_product(power, power)
        bits >>= 1
    return crc


def _crc_product(left: int, right: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if left >> bit & 1:
            product ^= right
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return product
