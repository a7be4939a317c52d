"""``diff``: compare two checkpoints value by value, through a table if their layouts differ."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path

from porting.checkpoint import Checkpoint, open_checkpoint
from porting.comparing.counterparts import Counterpart, Counterparts, by_name, by_table
from porting.comparing.jobs import SPAN, THREADS, map_jobs, spans
from porting.comparing.numbers import Difference, Odd, compare_pieces
from porting.comparing.streaming import Reader, Readers
from porting.limits import reading, spending
from porting.notation.table import Table
from porting.plan.recipe import Recipe, as_it_is, unravel
from porting.printable import dtype_name
from porting.staging import PIECE
from porting.tables import find_table


class Verdict(StrEnum):
    """The result of comparing two tensors."""

    EQUAL = "equal"
    EQUAL_VALUES = "equal values"
    CLOSE = "close"
    DIFFERENT = "different"
    OTHER_SHAPE = "other shape"


@dataclass(frozen=True, kw_only=True)
class Place:
    """An element of a tensor.

    Attributes:
        tensor: the tensor's name on disk.
    """

    tensor: str
    index: tuple[int, ...]
    value: float | complex | int | None


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Two tensors that should be equal.

    Attributes:
        a, b: their names, those of ``a`` several where a table puts several together.
        shapes, dtypes: of the two; the first in the layout of the second.
        largest_at: where the largest difference is, in each of the two; None where nothing differs.
        note: why two tensors of one checkpoint are compared with each other; empty for most.
    """

    a: tuple[str, ...]
    b: str
    verdict: Verdict
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    difference: Difference
    largest_at: tuple[Place, Place] | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The differences of two checkpoints.

    Attributes:
        a, b: what they are called.
        tensors: what was compared.
        only_a, only_b: names that the other side lacks, with the number of NaN and infinities in them.
        left_out: names of ``a`` that the table leaves out, with its reason.
        nbytes: how many bytes were read.

    >>> import porting
    >>> source = porting.embedded_checkpoint()
    >>> print(porting.diff(source, source).summary)
    equal: 62 with equal bytes
    """

    a: str
    b: str
    tensors: tuple[Compared, ...]
    only_a: Mapping[str, Odd]
    only_b: Mapping[str, Odd]
    left_out: Mapping[str, str]
    nbytes: int

    @property
    def counts(self) -> Mapping[Verdict, int]:
        """The number of tensors with each verdict."""
        return Counter(tensor.verdict for tensor in self.tensors)

    @property
    def equal(self) -> bool:
        """Whether no value differs by more than is allowed, and neither side lacks a tensor."""
        fine = (Verdict.EQUAL, Verdict.EQUAL_VALUES, Verdict.CLOSE)
        return not self.only_a and not self.only_b and all(tensor.verdict in fine for tensor in self.tensors)

    @property
    def odd(self) -> tuple[Odd, Odd]:
        """The numbers of NaN and infinities on both sides, in compared tensors and in those that the other lacks."""
        a, b = sum(self.only_a.values(), Odd()), sum(self.only_b.values(), Odd())
        for tensor in self.tensors:
            if not tensor.note:
                a, b = a + tensor.difference.odd[0], b + tensor.difference.odd[1]
        return a, b

    @property
    def summary(self) -> str:
        """The result in one line."""
        counts = self.counts
        parts = [f"{counts[verdict]} {_WORDS[verdict]}" for verdict in Verdict if counts[verdict]]
        parts += [f"{len(self.only_a)} only in A"] if self.only_a else []
        parts += [f"{len(self.only_b)} only in B"] if self.only_b else []
        parts += [f"{len(self.left_out)} left out by the table"] if self.left_out else []
        odd = [
            f"{count.nan} NaN and {count.inf} infinite in {name}"
            for name, count in zip("AB", self.odd, strict=True)
            if count
        ]
        return f"{'equal' if self.equal else 'different'}: {', '.join(parts + odd)}"


_WORDS = {
    Verdict.EQUAL: "with equal bytes",
    Verdict.EQUAL_VALUES: "with equal values in other bytes",
    Verdict.CLOSE: "within the tolerance",
    Verdict.DIFFERENT: "different",
    Verdict.OTHER_SHAPE: "of another shape",
}

Progress = Callable[[str, int, int], None]
"""Called with the tensor's name, the amount done and the total: elements for a diff, bytes for a digest."""


@spending()
def diff(
    a: str | os.PathLike[str] | Checkpoint,
    b: str | os.PathLike[str] | Checkpoint,
    table: Table | str | Path | None = None,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    threads: int = THREADS,
    progress: Progress | None = None,
) -> Comparison:
    """Compare two checkpoints, tensor by tensor.

    Their files may differ in all but the values: shards, order, metadata, safetensors or ``.bin``.  Tensors are read in
    pieces of a megabyte, so that memory does not depend on their size.

    Args:
        a, b: directories, weight files, hub ids or open checkpoints.
        table: leads from the names and axes of ``a`` to those of ``b``; None when both have the same.
        atol, rtol: what ``a`` may differ from ``b``, ``atol + rtol * abs(b)``; by default nothing.
        threads: how many tensors are looked at a time.
        progress: called with the progress.

    Returns:
        The comparison; values that are equal in another dtype are equal.

    Raises:
        CheckpointError: one of the two cannot be read.
        TableError: there is no such table, or it has faults.
        PlanError: the table does not fit the two, or they have no name in common.

    >>> import porting
    >>> source = porting.embedded_checkpoint()
    >>> diff(source, source).equal
    True
    """
    first = a if isinstance(a, Checkpoint) else open_checkpoint(a)
    second = b if isinstance(b, Checkpoint) else open_checkpoint(b)
    first.allow_time()
    second.allow_time()
    chosen = None if table is None else find_table(table, first.config, first.tensors)
    with reading(first.location):
        found = by_name(first, second) if chosen is None else by_table(chosen, first, second)
        jobs = list(_jobs(found, first, second))
    total = sum(stop - start for _, start, stop in jobs)
    done = 0
    results: list[tuple[Counterpart, Difference]] = []

    readers = {(id(checkpoint), side): Readers(checkpoint) for checkpoint in (first, second) for side in "lr"}

    def work(job: _Job) -> tuple[Counterpart, Difference]:
        pair = job[0]
        left, right = readers[id(pair.left), "l"].mine, readers[id(pair.right), "r"].mine
        return pair, _compared(*job, left, right, atol=atol, rtol=rtol)

    def nbytes(job: _Job) -> int:
        pair, start, stop = job
        return (stop - start) * pair.recipe.dtype.itemsize

    for (_, start, stop), result in zip(jobs, map_jobs(jobs, work, nbytes, threads=threads), strict=True):
        results.append(result)
        done += stop - start
        if progress is not None:
            progress(result[0].name, done, total)
    first.require_in_place()
    second.require_in_place()
    groups = (list(group) for _, group in groupby(results, key=lambda result: id(result[0])))
    sums = [(group[0][0], sum((found for _, found in group), start=Difference())) for group in groups]
    alone = {id(pair): difference for pair, difference in sums if pair.left is pair.right and not pair.note}
    compared = [_verdict_of(pair, difference) for pair, difference in sums if id(pair) not in alone]
    odd = {(id(pair.left), pair.name): difference.odd[0] for pair, difference in sums if id(pair) in alone}
    return Comparison(
        a=first.location,
        b=second.location,
        tensors=tuple(compared),
        only_a={name: odd[id(first), name] for name in found.only_a},
        only_b={name: odd[id(second), name] for name in found.only_b},
        left_out=found.left_out,
        nbytes=sum(
            info.nbytes for side in {id(first): first, id(second): second}.values() for info in side.tensors.values()
        ),
    )


_Job = tuple[Counterpart, int, int]


def _jobs(found: Counterparts, a: Checkpoint, b: Checkpoint) -> Iterator[_Job]:
    """The jobs of the threads: spans of pairs, and of tensors without a counterpart."""
    alone = [
        Counterpart(recipe=as_it_is(name, side.tensors[name]), left=side, right=side, name=name)
        for side, names in ((a, found.only_a), (b, found.only_b))
        for name in names
    ]
    for pair in (*found.pairs, *alone):
        if pair.recipe.shape != tuple(pair.right.tensors[pair.name].shape):
            yield pair, 0, 0
            continue
        for start, stop in spans(pair.recipe.numel, pair.recipe.dtype.itemsize, SPAN):
            yield pair, start, stop


def _compared(
    pair: Counterpart, start: int, stop: int, left: Reader, right: Reader, *, atol: float, rtol: float
) -> Difference:
    if pair.recipe.shape != tuple(pair.right.tensors[pair.name].shape):
        return Difference(same_bytes=False)
    itself = as_it_is(pair.name, pair.right.tensors[pair.name])
    found = Difference(same_bytes=True)
    width = pair.recipe.dtype.itemsize
    for begun, ended in spans(stop - start, width, left.length(pair.recipe)):
        left_window = left.window(pair.recipe, start + begun, start + ended)
        for low, high in spans(ended - begun, width, PIECE):
            at = start + begun + low
            right_window = right.window(itself, at, start + begun + high)
            found += compare_pieces(
                left_window[low:high], right_window, start=at, shape=pair.recipe.shape, atol=atol, rtol=rtol
            )
    return found


def _verdict_of(pair: Counterpart, difference: Difference) -> Compared:
    info = pair.right.tensors[pair.name]
    recipe = pair.recipe
    if recipe.shape != tuple(info.shape):
        verdict = Verdict.OTHER_SHAPE
    elif difference.same_bytes:
        verdict = Verdict.EQUAL
    elif not difference.unequal:
        verdict = Verdict.EQUAL_VALUES
    else:
        verdict = Verdict.DIFFERENT if difference.beyond else Verdict.CLOSE
    return Compared(
        a=tuple(dict.fromkeys(copy.source for copy in recipe.copies)),
        b=pair.name,
        verdict=verdict,
        shapes=(recipe.shape, tuple(info.shape)),
        dtypes=(dtype_name(recipe.dtype), dtype_name(info.dtype)),
        difference=difference,
        largest_at=_largest_places(pair, recipe, difference),
        note=pair.note,
    )


def _largest_places(pair: Counterpart, recipe: Recipe, difference: Difference) -> tuple[Place, Place] | None:
    """The place of the largest difference: in the first's tensor that the element comes from, and in the second's."""
    if difference.at is None or difference.values is None:
        return None
    in_right = Place(tensor=pair.name, index=unravel(difference.at, recipe.shape), value=difference.values[1])
    origin = recipe.origin(difference.at)
    if origin is None:
        return Place(tensor="", index=(), value=difference.values[0]), in_right
    name, position = origin
    left_index = unravel(position, pair.left.tensors[name].shape)
    return Place(tensor=name, index=left_index, value=difference.values[0]), in_right
