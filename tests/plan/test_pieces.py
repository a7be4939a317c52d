"""Boxes cut to ranges of the target and to buffers: the parts are the whole, each element once, and fit."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from porting.plan.copies import Copy, make_copy, window
from porting.plan.pieces import parts, reading


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Copy, int, int]:
    """A box of a row-major tensor onto a permuted box of another, and the numbers of elements of the two."""
    rank = draw(st.integers(0, 4))
    names = "abcd"[:rank]
    sizes = {name: draw(st.integers(1, 5)) for name in names}
    sides = []
    for _ in range(2):
        step, strides, offset = 1, {}, 0
        for name in draw(st.permutations(names)):
            before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
            strides[name] = step
            offset += before * step
            step *= before + sizes[name] + after
        sides.append((offset, strides, step))
    (source_offset, source_strides, source), (target_offset, target_strides, target) = sides
    if rank and draw(st.booleans()):
        del source_strides[draw(st.sampled_from(names))]  # broadcast
    copy = make_copy("s", "t", sizes, (source_offset, source_strides), (target_offset, target_strides))
    return copy, source, target


def pairs(copy: Copy) -> set[tuple[int, int]]:
    """Where each element goes from and to."""
    found = [(copy.source_offset, copy.target_offset)]
    for size, theirs, ours in zip(copy.sizes, copy.source_strides, copy.target_strides, strict=True):
        found = [(s + k * theirs, t + k * ours) for s, t in found for k in range(size)]
    assert len(found) == copy.numel
    return set(found)


@settings(max_examples=300)
@given(boxes(), st.data())
def test_a_range_of_the_target_gets_what_lands_in_it(drawn: tuple[Copy, int, int], data: st.DataObject) -> None:
    copy, _, target = drawn
    start = data.draw(st.integers(0, target))
    stop = data.draw(st.integers(start, target))
    found = [pairs(part) for part in window(copy, start, stop)]
    expected = {(s, t - start) for s, t in pairs(copy) if start <= t < stop}
    assert sum(map(len, found)) == len(expected)
    assert set().union(*found) == expected


@settings(max_examples=300)
@given(boxes(), st.integers(1, 40), st.sampled_from([1, 4, 60, 2000]))
def test_parts_fit_and_are_the_whole(drawn: tuple[Copy, int, int], most: int, itemsize: int) -> None:
    copy, source, target = drawn
    values = torch.arange(source)
    found = torch.full((target,), -1)
    count = 0
    for part in parts(copy, itemsize, most):
        how = reading(part, itemsize, most)
        assert how.numel <= most
        runs = [values[start : start + how.length] for start in how.starts]
        assert how.count == len(list(how.calls()))
        assert all(len(run) == how.length for run in runs), "a run reads past the end of the source"
        buffer = torch.cat([torch.cat([run, torch.full((how.pitch - how.length,), -7)]) for run in runs])
        found.as_strided(part.sizes, part.target_strides, part.target_offset).copy_(
            buffer.as_strided(part.sizes, how.strides)
        )
        count += part.numel
    expected = torch.full((target,), -1)
    for s, t in pairs(copy):
        expected[t] = s
    assert count == copy.numel
    assert torch.equal(found, expected)


def test_long_runs_are_read_at_once_and_sparse_ones_row_by_row() -> None:
    most = 1 << 16
    plain = Copy("s", "t", (1 << 20,), 0, (1,), 0, (1,))
    cut = list(parts(plain, 4, most))
    assert [len(reading(one, 4, most).starts) for one in cut] == [1] * 16
    # 100 of every 120 elements: dense enough to read the gaps as well
    gaps = list(parts(Copy("s", "t", (10_000, 100), 0, (120, 1), 0, (100, 1)), 4, most))
    assert {len(reading(gap, 4, most).starts) for gap in gaps} == {1}
    assert max(reading(gap, 4, most).length for gap in gaps) > most * 0.99
    # 2000 columns of a matrix with 16384 of them, transposed: rows of 2000, as many as fit
    columns = list(parts(Copy("s", "t", (2000, 4096), 0, (1, 16384), 0, (4096, 1)), 4, most))
    assert {reading(column, 4, most).length for column in columns} == {2000}
    assert {reading(column, 4, most).pitch for column in columns} == {2016}
    assert {reading(column, 4, most).count for column in columns[:-1]} == {32}
    # all columns of one with 1024, transposed: rows far apart in the buffer, and one call for many of them
    whole = list(parts(Copy("s", "t", (1024, 512), 0, (1, 1024), 0, (512, 1)), 4, most))
    assert {reading(one, 4, most).pitch for one in whole} == {1040}
    assert {reading(one, 4, most).count for one in whole} == {1}
    assert {len(reading(column, 4, most).starts) for column in columns[:-1]} == {32}


def test_an_interleaving_is_read_in_runs() -> None:
    """Of a small inner index every second element is wanted: one run, twice too long, beats a call for each."""
    every_second = Copy("s", "t", (512,), 0, (2,), 0, (1,))
    how = reading(every_second, 4, 1 << 16)
    assert (len(how.starts), how.length) == (1, 1023)
    assert math.isclose(how.numel / every_second.numel, 2, rel_tol=0.01)
