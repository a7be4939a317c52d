"""The list of all containers, in the order in which a directory is searched for them.

All that opens, writes, compares or checks weights asks here which container is meant.  A new one is a file with a
subclass of :class:`~porting.checkpoint.container.Container` and its entry in :data:`CONTAINERS`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from porting.checkpoint.bin_file import Bin
from porting.checkpoint.container import (
    Container,
    FileKind,
    Found,
    Place,
    UnrecognisedError,
    foreign,
    open_all,
    open_each,
)
from porting.checkpoint.dcp import Distributed
from porting.checkpoint.errors import CheckpointError, checkpoint_error
from porting.checkpoint.files import ByteSource
from porting.checkpoint.flax_msgpack import FlaxMsgpack
from porting.checkpoint.gguf import Gguf
from porting.checkpoint.hdf5_file import Hdf5
from porting.checkpoint.index import INDEX, MAX_INDEX, WRITE_AGAIN, ShardIndex, parse_index
from porting.checkpoint.layout import RECORD, Contents
from porting.checkpoint.npz import Npz
from porting.checkpoint.onnx_file import Onnx
from porting.checkpoint.orbax_file import Orbax
from porting.checkpoint.safetensors_file import Safetensors
from porting.checkpoint.tensorflow_file import TensorFlow
from porting.errors import Code, Fault, Message, Option

SAFETENSORS = Safetensors()
"""The default container to write."""

BIN = Bin()

SHARDS: Mapping[str, Container] = {container.endings[0]: container for container in (SAFETENSORS, BIN)}
"""The containers of shards, by the endings of :data:`~porting.checkpoint.index.SHARD_ENDINGS`."""

FREE_ENDINGS = tuple(ending for container in SHARDS.values() for ending in container.endings)
"""Endings of files that hold the whole weights under any name, which other libraries give them."""


class ShardedIndex(Container):
    """An index and the shards that it names; shards that an older save left behind are not looked for.

    Args:
        of: what its shards usually are; its name is that of their single file with an ending behind.
    """

    name = "index"
    title = "an index of shards"

    def __init__(self, of: Container) -> None:
        self.endings = (f"{of.endings[0]}{INDEX}",)
        self.main = f"{of.main}{INDEX}"
        self.also = tuple(f"{name}{INDEX}" for name in of.also)
        self.single = of.main
        self.promises = of.promises

    def read(self, source: ByteSource, *, name: str, locate: bool = True) -> Contents:
        """Refuse: an index holds no tensors, its shards do."""
        message = "an index of shards holds no tensor itself"
        raise checkpoint_error(Code.INDEX_INVALID, source.where, message, WRITE_AGAIN)

    def open(self, place: Place, main: str, *, part: str | None = None, locate: bool = True) -> Found:
        """Open every shard, in the container of its file ending."""
        self.require_no_part(part, where=place.location)
        index = _read(place, main)
        # Of a model on the hub only headers are wanted: each file is let go once it was read.
        sources = open_all(place, index.shards) if locate else {}
        contents = tuple(
            SHARDS[os.path.splitext(name)[1]].read(source, name=name, locate=locate)
            for name, source in (sources.items() if locate else open_each(place, index.shards))
        )
        notes = tuple(note for file in contents for note in file.notes)
        return Found(contents=contents, sources=sources, index=index, notes=notes)

    def others(self, place: Place, main: str) -> tuple[str, ...]:
        """The shards."""
        return _read(place, main).shards


def _read(place: Place, name: str) -> ShardIndex:
    raw, where = place.read(name, limit=MAX_INDEX)
    return parse_index(raw, name=name, where=where)


CONTAINERS: tuple[Container, ...] = (
    ShardedIndex(SAFETENSORS),
    SAFETENSORS,
    ShardedIndex(BIN),
    BIN,
    Distributed(),
    Npz(),
    Gguf(),
    FlaxMsgpack(),
    Onnx(),
    TensorFlow(),
    Hdf5(),
    Orbax(),
)

ENDINGS = tuple(ending for container in CONTAINERS for ending in container.endings)
"""Endings of files of weights."""

MARKS = tuple(container.endings[0] for container in CONTAINERS)
"""File endings that show that a directory holds a checkpoint."""

MAINS = tuple(name for container in CONTAINERS for name in (*container.mains, *container.spare))
"""The main files of the weights of a directory."""

ALONE = tuple(
    dict.fromkeys(container.endings[0] for container in CONTAINERS if not (container.together or container.single))
)
EXPECTED = f"a checkpoint ({', '.join(ALONE)}, or an index of shards)"


def named(name: str) -> Container:
    """The container that :attr:`WeightFile.format` names."""
    return next(container for container in CONTAINERS if container.name == name and not container.single)


def container_of(file: str) -> Container | None:
    """The container of a file, by its name; None for any other name."""
    return next(
        (container for container in CONTAINERS if file == container.main or file.endswith(container.endings)), None
    )


def writer_of(to: str | None) -> tuple[Container, str]:
    """Parse the option ``to``: the container to write, and the state dict to nest tensors in (may be empty).

    Args:
        to: its name, for some with a slash and the name of the state dict behind; None for safetensors.

    >>> container, part = writer_of("dcp/model")
    >>> container.name, part
    ('dcp', 'model')
    """
    if to is None:
        return SAFETENSORS, ""
    writers = {
        container.name: container
        for container in CONTAINERS
        if container.promises.writes and container is not SAFETENSORS and not container.single
    }
    kind, slash, part = to.partition("/")
    container = writers.get(kind)
    plain = bool(part) and not set(part) & {"/", "."} and part.isprintable()
    if container is None or (slash and not (container.parts and plain)):
        expected = []
        for name, writer in writers.items():
            expected.append(name)
            expected += [f"{name}/model for what is saved under 'model'"] if writer.parts else []
        message = Message(Option("to", to), f": expected {', or '.join(expected)}")
        raise CheckpointError(Fault(code=Code.OPTION_REFUSED, message=message, hint="leave it out for safetensors"))
    return container, part


def holds_weights(names: Collection[str]) -> bool:
    """Whether a directory with these files holds the weights of a model."""
    stems = tuple(container.endings[0] for container in CONTAINERS if container.stem)
    return any(name in MAINS or name.endswith(stems) for name in names)


def choose(names: Collection[str], place: Place) -> str:
    """Choose the main file of a checkpoint's weights."""
    where = place.location
    found = [(container, main) for container in CONTAINERS for main in container.mains if main in names]
    if found:
        container, main = found[0]
        single = main.removesuffix(INDEX)
        usual = main == container.main
        ours = (name for other, name in found if other.promises.transformers and (name == other.main) != usual)
        rival = next(ours, "")
        if container.single and single in names and container.others(place, main) != (single,):
            rival = single
        if rival:
            message = f"{rival} and {main} are both here, two sets of weights"
            hint = "pass the path of the one you mean, or remove the one that an older save left"
            raise checkpoint_error(Code.CHECKPOINT_AMBIGUOUS, where, message, hint)
        return main
    for container in CONTAINERS:
        ending = [name for name in names if name.endswith(container.endings)] if container.stem else []
        if len(ending) == 1:
            return ending[0]
        fault = container.incomplete(names, where=where)
        if fault is not None:
            raise CheckpointError(fault)
    spare = [name for container in CONTAINERS for name in container.spare if name in names]
    if spare:
        return spare[0]
    candidates = sorted(name for name in names if name.endswith(ENDINGS))
    mains = [name for name in candidates if name.endswith(INDEX)] or candidates
    if RECORD in names and len(mains) == 1:  # a conversion gave it the name that its table says
        return mains[0]
    if candidates:
        hint = f"if {candidates[0]} is meant, pass its path"
    else:
        hint = "these are the names that save_pretrained gives; check the path"
    known = dict.fromkeys(name for container in CONTAINERS for name in (container.single, *container.mains))
    message = f"holds no weights: none of {', '.join(name for name in known if name and not name.startswith('.'))}"
    raise checkpoint_error(Code.CHECKPOINT_NOT_FOUND, where, message, hint)


def sniff(source: ByteSource) -> FileKind | None:
    """The kind of a file by its bytes; None if they do not tell."""
    return next((kind for container in CONTAINERS if (kind := container.sniff(source)) is not None), None) or foreign(
        source
    )


def explained(error: UnrecognisedError) -> CheckpointError:
    """The error with the kind that the file seems to be; the error itself if that is unknown."""
    kind = sniff(error.source)
    if kind is None or kind.what == error.title:
        return error
    return CheckpointError(wrong_kind(error.source, kind, error.title))


def wrong_kind(source: ByteSource, kind: FileKind, expected: str) -> Fault:
    """The fault of a file that is of another kind than ``expected``."""
    message = f"this is {kind.what}, not {expected}"
    return Fault(code=Code.FORMAT_WRONG, where=source.where, message=message, hint=kind.hint)


def read(container: Container, source: ByteSource, *, name: str) -> Contents:
    """Read the headers of one file; an error says which kind of file it is instead."""
    try:
        return container.read(source, name=name)
    except UnrecognisedError as error:
        raise explained(error) from error
