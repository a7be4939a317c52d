"""Proving, piece by piece, that the tensors that are left out have the values that the table states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from porting.checkpoint import Checkpoint
from porting.checkpoint.checkpoint import StoredBox
from porting.converting.digests import PIECE
from porting.errors import alike
from porting.loading import same_bits
from porting.ops import Content
from porting.plan.leftovers import differs
from porting.plan.plan import LeftOut, PlanError


def prove_same(pairs: Iterable[LeftOut], checkpoint: Checkpoint) -> None:
    """Compare each tensor with the value that the table states, bit for bit.

    Args:
        pairs: the tensors, each with what it equals.
        checkpoint: the checkpoint that has them.

    Raises:
        PlanError: some differ; carries all faults.
        CheckpointError: the checkpoint cannot be read.
    """
    buffers = memoryview(bytearray(PIECE)), memoryview(bytearray(PIECE))
    faults = []
    for pair in pairs:
        if any({pair.name, pair.equals} <= names for names in checkpoint.shared):
            continue
        if not _has_stated_value(pair, checkpoint, *buffers):
            faults.append(differs(pair, checkpoint.tensors))
    if faults:
        raise PlanError(alike(faults))


def _has_stated_value(pair: LeftOut, checkpoint: Checkpoint, buffer: memoryview, second_buffer: memoryview) -> bool:
    info = checkpoint.tensors[pair.name]
    found = _single_piece(checkpoint, pair.name)
    content = None if pair.equals in checkpoint.tensors else Content.parse(pair.equals)
    if content is not None:
        return _has_content(content, pair, checkpoint, buffer)
    if (info.shape, info.dtype) != (checkpoint.tensors[pair.equals].shape, checkpoint.tensors[pair.equals].dtype):
        return False
    second = _single_piece(checkpoint, pair.equals)
    if found is None or second is None:
        return same_bits(checkpoint.read(pair.name), checkpoint.read(pair.equals))
    for start, count in _pieces(info.nbytes):
        found.file.read_into(buffer[:count], found.extent.start + start)
        second.file.read_into(second_buffer[:count], second.extent.start + start)
        if buffer[:count] != second_buffer[:count]:
            return False
    return True


def _single_piece(checkpoint: Checkpoint, name: str) -> StoredBox | None:
    """The only piece of a tensor, in row-major order; None if it has several, or another order."""
    pieces = checkpoint.pieces(name)
    return pieces[0] if len(pieces) == 1 and pieces[0].extent.stride is None else None


def _has_content(content: Content, pair: LeftOut, checkpoint: Checkpoint, buffer: memoryview) -> bool:
    """Whether a tensor has the stated content."""
    info = checkpoint.tensors[pair.name]
    piece = _single_piece(checkpoint, pair.name)
    if piece is None:
        return content.held_by(checkpoint.read(pair.name), rounded=pair.made)
    width = info.dtype.itemsize
    for start, count in _pieces(info.nbytes):
        piece.file.read_into(buffer[:count], piece.extent.start + start)
        found = torch.frombuffer(buffer, dtype=info.dtype, count=count // width)
        expected = content.row(info.shape, start // width, (start + count) // width)
        if not content.held_by(found, expected, rounded=pair.made):
            return False
    return True


def _pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, nbytes, PIECE):
        yield start, min(PIECE, nbytes - start)
