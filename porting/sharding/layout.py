"""The elements of a tensor that this process holds, by a DTensor's mesh and placements.

``Shard`` cuts an axis as ``torch.chunk`` does, in pieces of equal size of which the last may be smaller or missing.
``_StridedShard``, which FSDP leaves on parameters that tensor parallelism has cut before, names the cut of the outer
mesh axis although it was made last; so those are taken after the others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any

from torch import Tensor

from porting.errors import Code, Fault
from porting.target import TargetError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Run = tuple[int, int]
"""Consecutive places of an axis: the first, and their number."""


@dataclass(frozen=True)
class Box:
    """A box of elements in the whole tensor and in the shard.

    Attributes:
        starts: where they begin in the whole tensor, axis by axis.
        sizes: how many there are along each axis.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[int, ...]


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, without importing ``torch.distributed.tensor``."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_first(tensor: Tensor, rank: int) -> bool:
    """Whether this process is the first of those that hold the same elements of a tensor."""
    if not is_dtensor(tensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate()  # type: ignore[attr-defined]  # a DTensor has it
    placements = tensor.placements  # type: ignore[attr-defined]  # as above
    return all(place == 0 for place, placement in zip(coordinate, placements, strict=True) if placement.is_replicate())


def runs(size: int, cuts: Sequence[tuple[int, int]]) -> list[Run]:
    """Cut an axis several times, each time into ``count`` pieces of which the ``number``-th is kept.

    >>> runs(7, [(2, 0), (2, 1)])  # 4 and 3, and of the 4 the second half
    [(2, 2)]
    """
    left: list[Run] = [(0, size)]
    for count, number in cuts:
        length = sum(run_length for _, run_length in left)
        piece = -(-length // count)
        left = list(_between(left, min(number * piece, length), min((number + 1) * piece, length)))
    return left


def _between(pieces: Sequence[Run], low: int, high: int) -> Iterator[Run]:
    at = 0
    for start, length in pieces:
        first, last = max(low - at, 0), min(high - at, length)
        if first < last:
            yield start + first, last - first
        at += length


def boxes(tensor: Tensor, *, name: str) -> list[Box]:
    """The elements that this process holds; all of a plain tensor.  Without elements there are no boxes."""
    if not is_dtensor(tensor):
        shape = tuple(tensor.shape)
        return [] if 0 in shape else [Box((0,) * len(shape), shape, (0,) * len(shape))]
    left = _left(tensor, name)  # type: ignore[arg-type]  # it is one
    if any(not sum(length for _, length in axis) for axis in left):
        return []
    offsets = [[0, *accumulate(length for _, length in axis)] for axis in left]
    numbered = [list(enumerate(axis)) for axis in left]
    return [
        Box(
            tuple(start for _, (start, _) in choice),
            tuple(length for _, (_, length) in choice),
            tuple(offsets[axis][number] for axis, (number, _) in enumerate(choice)),
        )
        for choice in product(*numbered)
    ]


def _left(tensor: DTensor, name: str) -> list[list[Run]]:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise _refused(name, "this process is outside of its mesh", "load in the processes of the mesh")
    plain: dict[int, list[tuple[int, int]]] = {}
    strided: dict[int, list[tuple[int, int]]] = {}
    for axis, placement in enumerate(tensor.placements):
        kind: Any = placement  # each kind has attributes of its own
        cut = (tensor.device_mesh.size(axis), coordinate[axis])
        if type(kind).__name__ == "_StridedShard":
            strided.setdefault(kind.dim, []).insert(0, cut)
        elif placement.is_shard():
            plain.setdefault(kind.dim, []).append(cut)
        elif not placement.is_replicate():
            raise _refused(
                name, f"it is placed as {placement}", "take a module whose parameters are sharded or replicated"
            )
    left = [runs(size, [*plain.get(axis, ()), *strided.get(axis, ())]) for axis, size in enumerate(tuple(tensor.shape))]
    expected = [sum(length for _, length in axis) for axis in left]
    found = list(tensor.to_local().shape)
    if found != expected and 0 not in found:
        raise _refused(name, f"its shard is {found}, where its placements say {expected}", "report this layout")
    return left


def _refused(name: str, found: str, hint: str) -> TargetError:
    return TargetError(Fault(code=Code.BAD_TARGET, where=name, message=found, hint=hint))
