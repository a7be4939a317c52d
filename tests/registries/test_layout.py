"""Axes that are reshaped, cut and joined, and what is refused."""

from __future__ import annotations

import pytest

from porting.registries.layout import (
    Axis,
    LayoutError,
    Part,
    Source,
    concatenated,
    divided,
    factors,
    reshaped,
    size,
    stacked,
    unify,
)


def sizes(axis: Axis) -> list[int]:
    return [part.size for part in factors(axis)]


def test_an_axis_is_taken_apart_and_put_together_in_order() -> None:
    heads = Part(12)
    taken = reshaped([(heads,), (Part(5),)], (3, 2, 2, 5))
    assert [size(axis) for axis in taken] == [3, 2, 2, 5]
    swapped = (taken[0], taken[2], taken[1], taken[3])
    whole = reshaped(swapped, (12, 5))
    assert factors(whole[0]) == (*factors(taken[0]), *factors(taken[2]), *factors(taken[1]))
    assert factors((heads,)) == (*factors(taken[0]), *factors(taken[1]), *factors(taken[2]))


def test_a_cut_divides_the_slowest_factor() -> None:
    fused = Part(12)
    first, second = divided((fused,), [8, 4])
    assert (size(first), size(second)) == (8, 4)
    assert fused.segments == (first, second)
    slow, fast = Part(2), Part(3)
    pieces = divided((slow, fast), [3, 3])
    assert [sizes(piece) for piece in pieces] == [[3], [3]]
    assert all(factors(piece)[-1] is fast for piece in pieces)
    slow, fast = Part(4), Part(3)
    assert [sizes(one) for one in divided((slow, fast), [9, 3])] == [[3, 3], [3]]
    slow, fast = Part(4), Part(3)
    assert [sizes(one) for one in divided((slow, fast), [6, 6])] == [[2, 3], [2, 3]]


def test_a_cut_goes_between_segments() -> None:
    parts = [Part(2), Part(3), Part(4)]
    whole = (concatenated([(part,) for part in parts]),)
    first, second = divided(whole, [5, 4])
    assert factors(first)[0].segments == ((parts[0],), (parts[1],))
    assert factors(second) == (parts[2],)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: divided((Part(2), Part(3)), [4, 2]), "falls inside of a part of 3"),
        (lambda: divided((concatenated([(Part(2),), (Part(4),)]),), [3, 3]), "falls inside of a segment of 4"),
        (lambda: divided((), [1, 0]), "an axis of one element cannot be cut"),
        (lambda: reshaped([(concatenated([(Part(2),), (Part(4),)]),)], (2, 3)), "an axis of 6 cannot be taken apart"),
        (lambda: unify((Part(4),), (Part(6),)), "axes of 4 and of 6 are joined along others"),
        (lambda: unify((Part(4),), (Part(4), Part(2))), "axes of 4 and of 8 are joined along others"),
    ],
)
def test_what_no_axes_say_is_refused(wrong: object, message: str) -> None:
    assert callable(wrong)
    with pytest.raises(LayoutError, match=message):
        wrong()


def test_axes_that_belong_together_share_their_parts() -> None:
    whole, outer, inner = Part(6), Part(2), Part(3)
    unify((whole,), (outer, inner))
    assert factors((whole,)) == (outer, inner)
    first, second = (concatenated([(Part(2),), (Part(4),)]) for _ in range(2))
    unify((first,), (second,))
    assert first.segments is not None
    assert second.segments is not None
    assert [factors(segment) for segment in first.segments] == [factors(segment) for segment in second.segments]


def test_tensors_of_a_file_are_stacked_as_a_count_and_others_as_rows() -> None:
    tensors: list[tuple[Axis, ...]] = [((Part(4),), (Part(5),)) for _ in range(3)]
    sources = [Source(names=[f"e.{n}.w"], axes=axes) for n, axes in enumerate(tensors)]
    count, axes = stacked(tensors, list(sources))
    assert count.segments is None
    assert sources[2].whole is sources[0].whole
    assert sources[0].whole is not None
    assert sources[0].whole.names == ["e.0.w", "e.1.w", "e.2.w"]
    assert [factors(axis) for axis in tensors[2]] == [factors(axis) for axis in axes]
    rows, _ = stacked(tensors, [None, None, None])
    assert rows.segments == ((), (), ())
