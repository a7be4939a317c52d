"""One tensor as it comes about from others, computed a window at a time: what :func:`forward` does, in fixed memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from porting.plan.align import Step
from porting.plan.clipping import window
from porting.plan.copies import Copy
from porting.plan.move import Described

ReadParts = Callable[[Copy, int, int], Iterable[tuple[Tensor, Copy]]]
"""What a move brings into a window of its target: parts of it, each with its elements."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one tensor comes about.

    Attributes:
        name: the tensor.
        shape, dtype: what it holds.
        copies: the moves that fill it; they cover it, except when there is a ``fill``.
        fold: the moves overlap, and are added in float64.
        scale: what the elements are multiplied by, in float64; None for most.
        fill: the value of elements that no move writes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    copies: tuple[Copy, ...]
    fold: bool = False
    scale: float | None = None
    fill: float | None = None

    @property
    def numel(self) -> int:
        """How many elements the tensor has."""
        return math.prod(self.shape)

    def window(self, start: int, stop: int, read: ReadParts, memory: Tensor) -> Tensor:
        """The elements from ``start`` to ``stop`` in row-major order.

        Args:
            start, stop: the window.
            read: gives the parts of a move that land there, their target counted from ``start``, with their elements.
            memory: bytes to hold them; not used for a sum or a product.

        Returns:
            A 1-D tensor of ``dtype``.
        """
        if self.fold:
            result = torch.zeros(stop - start, dtype=torch.float64)
        else:
            result = memory[: (stop - start) * self.dtype.itemsize].view(self.dtype)
            if self.fill is not None:
                result.fill_(self.fill)
        for copy in self.copies:
            for values, part in read(copy, start, stop):
                place = result.as_strided(part.sizes, part.target_strides, part.target_offset)
                if self.fold:
                    place.add_(values)
                else:
                    place.copy_(values)
        result = result.to(self.dtype)  # of a fold one rounding, that of the sum
        return result if self.scale is None else (result.double() * self.scale).to(self.dtype)

    def origin(self, position: int) -> tuple[str, int] | None:
        """The first tensor, and the place in it, that the element at ``position`` is read from; None for a fill."""
        for copy in self.copies:
            for part in window(copy, position, position + 1):
                return part.source, part.source_offset
        return None


def as_it_is(name: str, described: Described) -> Recipe:
    """The recipe of a tensor that is itself."""
    numel = math.prod(described.shape)
    copy = Copy(name, name, (numel,), 0, (1,), 0, (1,))
    return Recipe(name=name, shape=tuple(described.shape), dtype=described.dtype, copies=(copy,))


def recipes(
    step: Step, sources: Mapping[str, Described], targets: Mapping[str, Described], scale: float | None
) -> Iterator[Recipe]:
    """The recipes of a step's targets, in the sources' dtype.

    Args:
        step: the step.
        sources, targets: what its tensors hold.
        scale: the constant that it multiplies by, if any.
    """
    for name in step.targets:
        copies = tuple(copy for copy in step.copies if copy.target == name)
        yield Recipe(
            name=name,
            shape=tuple(targets[name].shape),
            dtype=sources[copies[0].source].dtype,
            copies=copies,
            fold=step.rule.fold,
            scale=scale,
            fill=step.rule.fill,
        )


def unravel(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The coordinates of a place in row-major order.

    >>> unravel(7, (2, 5))
    (1, 2)
    """
    coordinates = []
    for extent in reversed(shape):
        position, coordinate = divmod(position, extent)
        coordinates.append(coordinate)
    return tuple(coordinates[::-1])
