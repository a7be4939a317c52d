"""Moves out of the tensors of a checkpoint, as these lie in its files: in pieces, and in any order of their axes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from porting.checkpoint import Checkpoint
from porting.checkpoint.files import Readable
from porting.checkpoint.layout import Extent
from porting.plan.clipping import clip_source, row_major
from porting.plan.copies import Copy
from porting.plan.strided import through


@dataclass(frozen=True, slots=True)
class Stored:
    """A part of a move that reads from one file.

    Attributes:
        file: the file, or what its bytes are decoded to.
        extent: where in it the piece of the source lies that is read from.
        copy: the part; its source is counted in elements from the beginning of the extent, as they lie there.
    """

    file: Readable
    extent: Extent
    copy: Copy


def stored(copy: Copy, checkpoint: Checkpoint, *, verify: bool = True) -> Iterator[Stored]:
    """A move as parts that each read from one piece of its source.

    Args:
        copy: a move of a plan; or a part of one that went through :func:`by_axes` before it was cut.
        checkpoint: whose tensor is its source.
        verify: see that the checksums of the pieces are right, where they have any; for those that are read whole.

    Raises:
        CheckpointError: the checkpoint has no such tensor, or it is damaged.
    """
    shape = checkpoint.tensors[copy.source].shape
    for piece in checkpoint.pieces(copy.source, verify=verify):
        parts = iter((copy,)) if piece.sizes == shape else clip_source(copy, shape, piece.starts, piece.sizes)
        for part in parts:
            stride = piece.extent.stride
            yield Stored(piece.file, piece.extent, part if stride is None else through(part, piece.sizes, stride))


def by_axes(copy: Copy, checkpoint: Checkpoint) -> Copy:
    """The same move, each direction within one axis of its source: what is cut of it can still be divided by pieces.

    A run over several axes that is cut somewhere is no box of them any more; runs along single axes are.
    """
    pieces = checkpoint.pieces(copy.source, verify=False)
    if len(pieces) == 1 and pieces[0].extent.stride is None:
        return copy
    shape = checkpoint.tensors[copy.source].shape
    return through(copy, shape, row_major(shape))
