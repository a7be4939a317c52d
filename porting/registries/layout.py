"""Layouts of tensors whose axes share indices, and what reshaping, splitting and joining make of them.

An axis is a product of factors, the first the slowest.  A factor is a :class:`Part`: an index of its own or, once
something took it apart, a product of smaller parts or a concatenation of segments.  Parts are shared between the
tensors of one conversion, so that taking one apart does so in all of them: what remains are the axes of a rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


class LayoutError(ValueError):
    """A change to a tensor that the axes of a rule cannot express."""


class Part:
    """A factor of an axis.

    Args:
        size: how many values it has.

    Attributes:
        factors: the product that it was taken apart into; None while it was not.
        segments: the concatenation that it was taken apart into; None while it was not.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.factors: Axis | None = None
        self.segments: tuple[Axis, ...] | None = None

    def multiply(self, *sizes: int) -> tuple[Part, ...]:
        """Take an index apart into a product of these sizes, and return its factors."""
        made = tuple(Part(size) for size in sizes)
        self.factors = made
        return made

    def divide(self, sizes: Sequence[int]) -> tuple[Part, ...]:
        """Take an index apart into segments of these sizes, and return them."""
        made = tuple(Part(size) for size in sizes)
        self.segments = tuple((one,) for one in made)
        return made


Axis: TypeAlias = tuple[Part, ...]
"""A product of factors; an axis of one element has none."""


def concatenated(segments: Sequence[Axis]) -> Part:
    """A factor that consists of segments; a segment that is itself a concatenation becomes several."""
    flat: list[Axis] = []
    for segment in segments:
        parts = factors(segment)
        inner = parts[0].segments if len(parts) == 1 else None
        flat += [segment] if inner is None else inner
    made = Part(sum(size(one) for one in flat))
    made.segments = tuple(flat)
    return made


def size(axis: Axis) -> int:
    """How many elements an axis has.

    >>> size((Part(2), Part(3))), size(())
    (6, 1)
    """
    found = 1
    for part in axis:
        found *= part.size
    return found


def factors(axis: Axis) -> Axis:
    """The factors of an axis, each an index or a concatenation; those of one element are left out.

    >>> part = Part(6)
    >>> _ = part.multiply(2, 3)
    >>> [one.size for one in factors((part, Part(1)))]
    [2, 3]
    """
    found: list[Part] = []
    for part in axis:
        if part.factors is not None:
            found += factors(part.factors)
        elif part.size != 1 or part.segments is not None:
            found.append(part)
    return tuple(found)


def reshaped(axes: Sequence[Axis], shape: Sequence[int]) -> tuple[Axis, ...]:
    """The axes of a tensor whose elements stay in their order and get another shape."""
    waiting = [part for axis in axes for part in factors(axis)][::-1]
    made: list[Axis] = []
    for wanted in shape:
        axis: list[Part] = []
        rest = wanted
        while rest > 1:
            part = waiting.pop()
            if rest % part.size:
                if part.size % rest or part.segments is not None:
                    message = f"an axis of {part.size} cannot be taken apart into parts of {rest}"
                    raise LayoutError(message)
                part, behind = part.multiply(rest, part.size // rest)
                waiting.append(behind)
            axis.append(part)
            rest //= part.size
        made.append(tuple(axis))
    return tuple(made)


def divided(axis: Axis, sizes: Sequence[int]) -> tuple[Axis, ...]:
    """The pieces of an axis that is cut into pieces of these sizes."""
    if len(sizes) == 1:
        return (axis,)
    parts = factors(axis)
    if not parts:
        message = "an axis of one element cannot be cut"
        raise LayoutError(message)
    first, rest = parts[0], parts[1:]
    inner = size(rest)
    if any(one % inner for one in sizes):
        message = f"a cut into {list(sizes)} falls inside of a part of {inner}"
        raise LayoutError(message)
    wanted = [one // inner for one in sizes]
    if first.segments is None:
        pieces: list[Axis] = [(one,) for one in first.divide(wanted)]
    else:
        pieces = _gathered(first.segments, wanted)
    return tuple((*piece, *rest) for piece in pieces)


def _gathered(segments: Sequence[Axis], wanted: Sequence[int]) -> list[Axis]:
    """The segments of a concatenation, so many together as each piece has elements."""
    waiting, made = list(segments)[::-1], list[Axis]()
    for count in wanted:
        group: list[Axis] = []
        while sum(size(one) for one in group) < count:
            group.append(waiting.pop())
        if sum(size(one) for one in group) != count:
            message = f"a cut falls inside of a segment of {size(group[-1])}"
            raise LayoutError(message)
        made.append(group[0] if len(group) == 1 else (concatenated(group),))
    return made


def unify(first: Axis, second: Axis) -> None:
    """Make the indices of two axes the same, since the elements along them belong together."""
    ours, theirs = list(factors(first))[::-1], list(factors(second))[::-1]
    while ours and theirs:
        one, other = ours.pop(), theirs.pop()
        if one is other:
            continue
        if one.size == other.size:
            _same(one, other)
        elif one.size > other.size and one.size % other.size == 0 and one.segments is None:
            ours += one.multiply(other.size, one.size // other.size)[::-1]
            theirs.append(other)
        elif other.size % one.size == 0 and other.segments is None:
            theirs += other.multiply(one.size, other.size // one.size)[::-1]
            ours.append(one)
        else:
            message = f"axes of {one.size} and of {other.size} are joined along others"
            raise LayoutError(message)
    if ours or theirs:
        message = f"axes of {size(first)} and of {size(second)} are joined along others"
        raise LayoutError(message)


def _same(one: Part, other: Part) -> None:
    if one.segments is None:
        one.factors = (other,)
    elif other.segments is None:
        other.factors = (one,)
    elif len(one.segments) == len(other.segments):
        for mine, theirs in zip(one.segments, other.segments, strict=True):
            unify(mine, theirs)
    else:
        message = f"concatenations of {len(one.segments)} and of {len(other.segments)} segments are joined along others"
        raise LayoutError(message)


@dataclass(eq=False)
class Source:
    """Tensors of a file that one term of a rule names: one, or those that an index of the name counts.

    Attributes:
        count: the index of the name; None for one tensor.
        whole: the source that this one became a member of; None while it is on its own.
    """

    names: list[str]
    axes: tuple[Axis, ...]
    count: Part | None = None
    whole: Source | None = None


def stacked(tensors: Sequence[tuple[Axis, ...]], sources: Sequence[Source | None]) -> tuple[Part, tuple[Axis, ...]]:
    """The new axis of tensors that are stacked, and the axes that they share.

    Where each is one tensor of the file as it is there, the new axis is an index of their names; else it is a
    concatenation of single rows.

    Args:
        sources: the tensor of the file that each is, as a whole; None where it is made of something else.
    """
    for other in tensors[1:]:
        for mine, theirs in zip(tensors[0], other, strict=True):
            unify(theirs, mine)
    members = [one for one in sources if one is not None and one.whole is None and one.count is None]
    if len(members) != len(tensors) or len({id(one) for one in members}) != len(members) or len(members) < 2:
        return concatenated([()] * len(tensors)), tensors[0]
    count = Part(len(members))
    whole = Source(names=[one.names[0] for one in members], axes=members[0].axes, count=count)
    for member in members:
        member.whole = whole
    return count, tensors[0]
