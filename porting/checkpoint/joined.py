"""Several checkpoints, read as one: the files of all ranks of a training, or a model and its adapter.

With tensor parallelism each rank saves its own file: ``consolidated.00.pth``, ``mp_rank_00_model_states.pt``,
``model_00/model.pt``.  All files have the same names.  A path with ``{r}`` for the number opens all of them; the
names of the tensors of rank 3 begin with ``rank3.``, so that a table can join the ranks by an index.

``./llama+lora=./adapter`` is the checkpoint ``./llama`` with the tensors of ``./adapter`` beside its own, whose names
begin with ``lora.``.  The config of the second is the field ``lora`` of the first one's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from porting.checkpoint.checkpoint import Checkpoint, InPlace
from porting.checkpoint.errors import FaultList, checkpoint_error, quote
from porting.checkpoint.files import ByteSource, LocalFile
from porting.checkpoint.layout import Contents
from porting.checkpoint.names import expanded
from porting.errors import Code
from porting.limits import charge
from porting.opening import Folder


def merged(
    location: str, parts: Iterable[tuple[str, str, Checkpoint]]
) -> tuple[tuple[Contents, ...], dict[str, ByteSource]]:
    """The contents and the files of several checkpoints.

    Args:
        parts: of each checkpoint, what stands in front of the names of its tensors, what stands in front of the names
            of its files, and the checkpoint.

    Returns:
        The contents with these names, and the files by theirs.
    """
    contents: list[Contents] = []
    sources: dict[str, ByteSource] = {}
    faults = FaultList(location)
    for front, label, checkpoint in parts:
        if front or label:
            charge("objects", 4 * len(checkpoint.tensors), where=location)
        contents += [each.renamed(front, label) if front or label else each for each in checkpoint.contents]
        for name, source in checkpoint.sources.items():
            first = sources.setdefault(label + name, source)
            if not _same(first, source):
                message = f"{first.where} and {source.where} would both be the file {quote(label + name)} of the whole"
                faults.add(
                    Code.CHECKPOINT_AMBIGUOUS, message, hint="rename one of them, or pass them under other names"
                )
    faults.raise_if_any()
    return tuple(contents), sources


def _same(one: ByteSource, other: ByteSource) -> bool:
    """Whether both are one file, in one state."""
    if one is other:
        return True
    return isinstance(one, LocalFile) and isinstance(other, LocalFile) and one.identity == other.identity


RANK = "{r}"
"""The placeholder for a rank's number in a path."""

MOST = 4096
"""Ranks of a model at most."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A file, or a directory, of one rank.

    Attributes:
        number: the rank, from 0 on.
        parts: what leads to it from the directory below which the ranks' paths differ.
    """

    number: int
    parts: tuple[str, ...]


def home_of(pattern: str) -> Path:
    """The directory that the paths of all ranks share.

    >>> home_of("run/model_{r}/weights.pt").as_posix()
    'run'
    """
    return expanded(pattern.partition(RANK)[0] + "x").parent


def find_ranks(pattern: str, home: Folder) -> tuple[Rank, ...]:
    """Find the files or directories of the ranks, in their order.

    Args:
        pattern: a path with ``{r}`` in the place of the rank's number, which may have zeros in front.
    """
    before, _, after = pattern.partition(RANK)
    name_after, _, rest = after.partition("/")
    if RANK in after:
        raise checkpoint_error(
            Code.CHECKPOINT_NOT_FOUND,
            pattern,
            f"{RANK} stands in it more than once",
            f"write {RANK} for the number of the rank alone",
        )
    start = os.path.basename(before)  # a Path would drop what stands behind the last slash
    shape = re.compile(rf"{re.escape(start)}([0-9]{{1,9}}){re.escape(name_after)}")
    found: dict[int, list[str]] = {}
    for name in home.names():
        if (match := shape.fullmatch(name)) is not None:
            found.setdefault(int(match[1]), []).append(name)
    if not found:
        raise checkpoint_error(
            Code.CHECKPOINT_NOT_FOUND,
            pattern,
            f"no name in {quote(str(home.path))} has a number in the place of {RANK}",
            "check the path",
        )
    faults = FaultList(pattern)
    if max(found) >= MOST:
        faults.add(Code.CHECKPOINT_NOT_FOUND, f"rank {max(found)}, where at most {MOST} are read")
    for number in range(min(max(found) + 1, MOST)):
        names = sorted(found.get(number, []))
        if len(names) != 1:
            message = (
                f"there is no rank {number}" if not names else f"rank {number} is {' and '.join(map(quote, names))}"
            )
            faults.add(
                Code.CHECKPOINT_NOT_FOUND, message, hint="each rank from 0 on is there once; check how it was saved"
            )
    faults.raise_if_any()
    return tuple(Rank(number=number, parts=Path(names[0], rest).parts) for number, names in sorted(found.items()))


def joined(
    location: str,
    home: Folder,
    ranks: Iterable[Rank],
    opened: Iterable[Checkpoint],
    config_name: str,
    config: Mapping[str, object],
) -> Checkpoint:
    """Join the ranks' checkpoints to one."""
    opened = tuple(opened)
    parts = ((f"rank{rank.number}.", _folder(home.path, one), one) for rank, one in zip(ranks, opened, strict=True))
    contents, sources = merged(location, parts)
    notes = (note for one in opened for note in one.warnings)
    return Checkpoint(
        location=location,
        path=home.path,
        config=config,
        config_name=config_name,
        contents=contents,
        sources=sources,
        index=None,
        notes=tuple(dict.fromkeys(notes)),
        folder=Folders(one.folder for one in opened if one.folder is not None),
        home=home,
        part=opened[-1].part,
        ranks=len(opened),
    )


def _folder(home: Path, checkpoint: Checkpoint) -> str:
    """The directory of a rank's files, as their names begin below the directory that all ranks share."""
    inner = checkpoint.path.relative_to(home).parts if checkpoint.path is not None else ()
    return "".join(f"{name}/" for name in inner)


class Folders:
    """The directories of the ranks, held open."""

    def __init__(self, folders: Iterable[InPlace]) -> None:
        self._folders = tuple(folders)

    def require_in_place(self, names: Iterable[str] = ()) -> None:
        """Check as :meth:`Folder.require_in_place` does, for all files that were opened in each."""
        del names
        for folder in self._folders:
            folder.require_in_place()


def join(location: str, first: Checkpoint, further: Mapping[str, Checkpoint]) -> Checkpoint:
    """Join checkpoints to one.

    Args:
        first: its tensors keep their names; its directory, config and tokenizer are those of the whole.
    """
    faults = FaultList(location)
    for name in further:
        taken = next(_taken(name, first), None)
        if taken is not None:
            message = f"{first.location} has {taken}, so that {quote(name)} cannot stand for {further[name].location}"
            faults.add(
                Code.CHECKPOINT_AMBIGUOUS, message, hint=f"give it another name: +{name}2={further[name].location}"
            )
    faults.raise_if_any()
    others = ((f"{name}.", f"{name}/", one) for name, one in further.items())
    contents, sources = merged(location, [("", "", first), *others])
    every = (first, *further.values())
    whole = Checkpoint(
        location=location,
        path=first.path,
        config={**first.config, **{name: dict(one.config) for name, one in further.items()}},
        config_name=first.config_name,
        contents=contents,
        sources=sources,
        index=None,
        commit=first.commit,
        notes=tuple(dict.fromkeys(note for one in every for note in one.warnings)),
        folder=Folders(one.folder for one in every if one.folder is not None),
        home=first.home,
        part=first.part,
        ranks=first.ranks,
        joined={name: one.path for name, one in further.items()},
    )
    whole.index_file, whole.index = first.index_file, first.index
    return whole


def _taken(name: str, first: Checkpoint) -> Iterator[str]:
    """The tensors of the first checkpoint whose name one of another would get, as text for a message."""
    yield from (f"the tensor {quote(tensor)}" for tensor in first.tensors if tensor.startswith(f"{name}."))
    yield from (f"the file {quote(file)}" for file in first.sources if file.startswith(f"{name}/"))
    yield from (f"the field {quote(name)} in its config" for _ in range(name in first.config))
