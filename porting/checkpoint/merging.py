"""The files of several checkpoints, put together under names that tell them apart."""

from __future__ import annotations

from collections.abc import Iterable

from porting.checkpoint.checkpoint import Checkpoint
from porting.checkpoint.errors import FaultList, quote
from porting.checkpoint.files import ByteSource, LocalFile
from porting.checkpoint.layout import Contents
from porting.errors import Code
from porting.limits import charge


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
