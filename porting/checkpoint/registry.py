"""The list of all containers, in the order in which a directory is searched for them.

All that opens, writes, compares or checks weights asks here which container is meant.  A new one is a file with a
subclass of :class:`~porting.checkpoint.container.Container` and its entry in :data:`CONTAINERS`.
"""

from __future__ import annotations

from collections.abc import Collection

from porting.checkpoint.bin_file import Bin
from porting.checkpoint.container import Container, FileKind, Place, UnrecognisedError
from porting.checkpoint.dcp import Distributed
from porting.checkpoint.errors import CheckpointError, checkpoint_error
from porting.checkpoint.files import ByteSource
from porting.checkpoint.gguf import Gguf
from porting.checkpoint.index import INDEX
from porting.checkpoint.layout import Contents
from porting.checkpoint.npz import Npz
from porting.checkpoint.safetensors_file import Safetensors
from porting.checkpoint.sharded import ShardedIndex
from porting.checkpoint.sniff import foreign
from porting.errors import Code, Fault, Message, Option

SAFETENSORS = Safetensors()
"""The default container to write."""

BIN = Bin()

CONTAINERS: tuple[Container, ...] = (
    ShardedIndex(SAFETENSORS),
    SAFETENSORS,
    ShardedIndex(BIN),
    BIN,
    Distributed(),
    Npz(),
    Gguf(),
)

ENDINGS = tuple(ending for container in CONTAINERS for ending in container.endings)
"""Endings of files of weights."""

MARKS = tuple(container.endings[0] for container in CONTAINERS)
"""File endings that show that a directory holds a checkpoint."""

MAINS = tuple(name for container in CONTAINERS for name in container.mains)
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

    Raises:
        CheckpointError: it says something else.

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


def choose(names: Collection[str], place: Place) -> str:
    """Choose the main file of a checkpoint's weights.

    Args:
        names: the files that are there.
        place: where they lie.

    Raises:
        CheckpointError: there are none, or two sets of weights that could both be meant.
    """
    where = place.location
    found = [(container, main) for container in CONTAINERS for main in container.mains if main in names]
    if found:
        container, main = found[0]
        single = main.removesuffix(INDEX)
        usual = main == container.main
        rival = next((name for other, name in found if (name == other.main) != usual), "")
        if container.single and single in names and container.others(place, main) != (single,):
            rival = single
        if rival:
            message = f"{rival} and {main} are both here, two sets of weights"
            hint = "pass the path of the one you mean, or remove the one that an older save left"
            raise checkpoint_error(Code.CHECKPOINT_AMBIGUOUS, where, message, hint)
        return main
    for container in CONTAINERS:
        fault = container.incomplete(names, where=where)
        if fault is not None:
            raise CheckpointError(fault)
    candidates = sorted(name for name in names if name.endswith(ENDINGS))
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
    """The fault of a file that is of another kind than ``expected``.

    Args:
        source: the file.
        kind: its kind.
        expected: what was expected, in words.
    """
    message = f"this is {kind.what}, not {expected}"
    return Fault(code=Code.FORMAT_WRONG, where=source.where, message=message, hint=kind.hint)


def read(container: Container, source: ByteSource, *, name: str) -> Contents:
    """Read the headers of one file; an error says which kind of file it is instead.

    Raises:
        CheckpointError: with every fault found.
    """
    try:
        return container.read(source, name=name)
    except UnrecognisedError as error:
        raise explained(error) from error
