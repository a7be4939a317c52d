"""Boxes cut to size: moves in parts small enough to be read at once.

Everything here is arithmetic on :class:`~porting.plan.copies.Copy`: no file is touched.  A target is written from its
first byte to its last in blocks; a block needs those parts of each move that land in it
(:func:`porting.plan.copies.window`); and a part is read as a few runs of the source's bytes, laid one after the other
into a buffer in which the part is a strided view.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from porting.plan.copies import Copy

DENSE = 2
"""A span of the source is read as a whole when at most so many bytes are read for each that is wanted."""

WIDE, LINE = 1024, 64
"""Bytes: rows of so many or more that are read as columns lie so far apart in the buffer.  Rows of a power of two would
all fall on the same few lines of a processor's cache, and a column would be read four times as slowly."""

SMALL = 4096
"""Bytes: shorter spans are read as a whole in any case, for a call of the system costs as much as these."""


SHORT = 64
"""Bytes of a run below which a sparing reader reads what lies between two of them, where that is little."""

NEAR = 512
"""Bytes between two short runs up to which it does."""


def _range(copy: Copy, direction: int, start: int, stop: int) -> Copy:
    """The part of a move from ``start`` to ``stop`` of one direction."""
    sizes = (*copy.sizes[:direction], stop - start, *copy.sizes[direction + 1 :])
    return replace(
        copy,
        sizes=sizes,
        source_offset=copy.source_offset + start * copy.source_strides[direction],
        target_offset=copy.target_offset + start * copy.target_strides[direction],
    )


@dataclass(frozen=True, slots=True)
class Reading:
    """How a box of the source is read into a buffer.

    Attributes:
        starts: the elements of the source at which runs begin; they lie one after the other in the buffer.
        length: elements of each run.
        pitch: elements of the buffer from the beginning of one run to that of the next.
        strides: steps of the box's indices in the buffer, in the order of its sizes.
    """

    starts: Sequence[int]
    length: int
    pitch: int
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return len(self.starts) * self.pitch

    @property
    def count(self) -> int:
        """How many groups :meth:`calls` gives."""
        if isinstance(self.starts, range):
            return 1 if self.starts.step == self.length else len(self.starts)
        return sum(1 for _ in self.calls())

    def calls(self) -> Iterator[tuple[int, int]]:
        """The runs in groups, from one number to another, that follow each other in the source without a gap."""
        if isinstance(self.starts, range) and self.starts.step == self.length:
            yield 0, len(self.starts)
            return
        if isinstance(self.starts, range):
            yield from ((number, number + 1) for number in range(len(self.starts)))
            return
        begun = 0
        for number in range(1, len(self.starts) + 1):
            if number == len(self.starts) or self.starts[number] != self.starts[number - 1] + self.length:
                yield begun, number
                begun = number


@dataclass(frozen=True, slots=True)
class _Shape:
    """The indices of a box that lie inside of one run, and those that step from run to run; as places in its sizes."""

    inside: tuple[int, ...]
    between: tuple[int, ...]
    run: int
    length: int
    pitch: int


def _shape(copy: Copy, itemsize: int, most: int, *, sparing: bool) -> _Shape:
    """Runs of the source that hold the box: as long as they are dense, and no longer than ``most`` elements."""
    order = sorted(range(len(copy.sizes)), key=lambda one: copy.source_strides[one])
    columns = (
        len(copy.sizes) > 1 and copy.source_strides[-1] * itemsize >= WIDE
    )  # the target's neighbours are far apart
    inside, wanted, length, run = [], 1, 1, 1
    between: tuple[int, ...] = ()
    for number, one in enumerate(order):
        size, step = copy.sizes[one], copy.source_strides[one]
        if step == 0 or size == 1:  # said again and again: read once
            continue
        longer, more = length + (size - 1) * step, wanted * size
        apart = columns and length * itemsize >= WIDE
        if apart or longer > most or not _dense(longer, more, run, step - length, itemsize, sparing=sparing):
            between = tuple(one for one in order[number:] if copy.sizes[one] > 1 and copy.source_strides[one])
            break
        inside.append(one)
        wanted, length, run = more, longer, longer if longer == more else run
    padding = LINE // itemsize if between and length * itemsize >= WIDE else 0
    return _Shape(tuple(inside), between[::-1], run, length, length + padding if length + padding <= most else length)


def run_length(copy: Copy, itemsize: int, most: int) -> int:
    """The elements of each run with which a box is read that :func:`parts` gave for the same arguments."""
    return _shape(copy, itemsize, most, sparing=False).length


def reading(copy: Copy, itemsize: int, most: int, *, sparing: bool = False) -> Reading:
    """How to read a box that :func:`parts` gave for the same arguments."""
    shape = _shape(copy, itemsize, most, sparing=sparing)
    strides = [0] * len(copy.sizes)
    for one in shape.inside:
        strides[one] = copy.source_strides[one]
    step = shape.pitch
    for one in reversed(shape.between):
        strides[one] = step
        step *= copy.sizes[one]
    jumps = [range(0, copy.sizes[one] * copy.source_strides[one], copy.source_strides[one]) for one in shape.between]
    first = copy.source_offset
    starts: Sequence[int]
    if len(jumps) == 1:
        starts = range(first, first + jumps[0].stop, jumps[0].step)
    else:
        starts = [first + sum(jump) for jump in product(*jumps)]
    return Reading(starts, shape.length, shape.pitch, tuple(strides))


def parts(copy: Copy, itemsize: int, most: int, *, sparing: bool = False) -> Iterator[Copy]:
    """A move in parts, each of which is read into a buffer of at most ``most`` elements.

    Args:
        itemsize: bytes of an element.
        most: elements, at least 1.
        sparing: read no more than what is wanted, and what lies between short runs near each other.
    """
    shape = _shape(copy, itemsize, most, sparing=sparing)
    needed = shape.pitch * math.prod(copy.sizes[one] for one in shape.between)
    if needed <= most:
        yield copy
        return
    fitting = shape.pitch
    for one in reversed(shape.between):
        if fitting * copy.sizes[one] > most:
            joined = _steps_of_a_run(copy, shape, one, itemsize, most, sparing=sparing)
            steps = min(joined or max(1, most // fitting), copy.sizes[one] - 1)
            for start in range(0, copy.sizes[one], steps):
                cut = _range(copy, one, start, min(start + steps, copy.sizes[one]))
                yield from parts(cut, itemsize, most, sparing=sparing)
            return
        fitting *= copy.sizes[one]


def _steps_of_a_run(copy: Copy, shape: _Shape, direction: int, itemsize: int, most: int, *, sparing: bool) -> int:
    """How many steps of the next index make one long run; 0 when they would not be dense."""
    if direction != shape.between[-1] or shape.pitch > shape.length:
        return 0
    step = copy.source_strides[direction]
    steps = min((most - shape.length) // step + 1, copy.sizes[direction])
    length = shape.length + (steps - 1) * step
    wanted = steps * math.prod(copy.sizes[one] for one in shape.inside)
    dense = _dense(length, wanted, shape.run, step - shape.length, itemsize, sparing=sparing)
    return steps if steps > 1 and dense else 0


def _dense(span: int, wanted: int, run: int, gap: int, itemsize: int, *, sparing: bool) -> bool:
    """Whether a span of so many elements, of which some are wanted, in runs with a gap between, is read as a whole."""
    if sparing:
        return span == wanted or (run * itemsize < SHORT and gap * itemsize <= NEAR)
    return span <= DENSE * wanted or span * itemsize <= SMALL
