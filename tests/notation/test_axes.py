"""Axes: parsing, solving sizes, and the boxes that follow."""

from __future__ import annotations

import pytest
import torch

from porting.errors import Code
from porting.notation.axes import Mismatch, leaves, parse_axes, pieces, size_of, solve_all
from porting.notation.faults import NotationError


@pytest.mark.parametrize(
    "text",
    [
        "v",
        "v e",
        "(h d) e",
        "(p o) e",
        "(h (a b) d)",
        "(_2|t) e",
        "(_pad|t|_1) e",
        "(g (m|1|1) d) e",
        "1 b 1",
        "((a|b) c|d)",
    ],
)
def test_axes_are_written_as_they_were_read(text: str) -> None:
    assert " ".join(map(str, parse_axes(text))) == text


def test_blanks_mean_nothing() -> None:
    assert parse_axes("  ( h   d )e ") == parse_axes("(h d) e")
    assert parse_axes("") == ()


@pytest.mark.parametrize(
    ("text", "code", "message", "offset"),
    [
        ("a {b}", Code.BAD_AXES, "'{' cannot stand among axes", 2),
        ("a_b", Code.BAD_AXES, "'a' cannot stand among axes", 0),
        ("a 2d", Code.BAD_AXES, "'2' cannot stand among axes", 2),
        ("a ...", Code.BAD_AXES, "'.' cannot stand among axes", 2),
        ("a é", Code.BAD_AXES, "'é' cannot stand among axes", 2),
        ("a 1234567890", Code.BAD_AXES, "'1' cannot stand among axes", 2),
        ("a 3", Code.BAD_AXES, "the number 3 cannot stand among axes", 2),
        ("a 0", Code.BAD_AXES, "the number 0 cannot stand among axes", 2),
        ("(_0|t)", Code.BAD_AXES, "_0 is a part of no elements", 1),
        ("(a b", Code.BAD_AXES, "a parenthesis is not closed", 0),
        ("a b)", Code.BAD_AXES, "')' is not expected here", 3),
        ("a|b", Code.BAD_AXES, "'|' is not expected here", 1),
        ("x ()", Code.BAD_AXES, "an empty part between parentheses", 2),
        ("x (a|)", Code.BAD_AXES, "an empty part between parentheses", 2),
        ("(|a)", Code.BAD_AXES, "an empty part between parentheses", 0),
        ("a b a", Code.INDEX_TWICE, "index 'a' stands twice among the axes", 4),
        ("(a|b) a", Code.INDEX_TWICE, "index 'a' stands twice among the axes", 6),
        ("(a|(b c) b)", Code.INDEX_TWICE, "index 'b' stands twice among the axes", 9),
        ("f''''", Code.BAD_AXES, "'f' cannot stand among axes", 0),
        ("f'a", Code.BAD_AXES, "'f' cannot stand among axes", 0),
        ("(_p|a) (_p|b)", Code.INDEX_TWICE, "index '_p' stands twice among the axes", 8),
        ("(" * 17 + "a" + ")" * 17, Code.BAD_AXES, "parentheses nested deeper than 16", 16),
        ("1 " * 65, Code.BAD_AXES, "65 axes; torch handles 64", 0),
        ("a" * 1001, Code.BAD_AXES, "axes of 1001 characters, at most 1000 are read", 0),
        (
            " ".join(f"(a{n}|b{n})" for n in range(30)),
            Code.BAD_AXES,
            f"these axes fall into {2**30} pieces, at most 1024 are kept",
            0,
        ),
    ],
)
def test_what_are_no_axes_is_refused_at_its_place(text: str, code: Code, message: str, offset: int) -> None:
    with pytest.raises(NotationError) as caught:
        parse_axes(text)
    assert (caught.value.code, str(caught.value), caught.value.offset) == (code, message, offset)


def test_parts_of_a_known_size_may_recur() -> None:
    assert [str(axis) for axis in parse_axes("(_1|t|_1) (_1|e)")] == ["(_1|t|_1)", "(_1|e)"]


def test_a_number_is_a_row_where_rows_may_be_taken() -> None:
    (axis, _) = parse_axes("3 e", rows=True)
    assert str(axis) == "3"
    assert size_of(axis, {}) is None


def test_a_row_of_an_index_has_its_size() -> None:
    (axis, _) = parse_axes("r=3 e", rows=True)
    assert str(axis) == "r=3"
    assert list(leaves((axis,))) == []  # it stands on one side only
    assert [size_of(axis, sizes) for sizes in ({}, {"r": 5})] == [None, 5]
    found: dict[str, int] = {}
    solve_all([(axis, 4)], found)
    assert found == {"r": 4}
    for total, sizes, message in ((3, {}, "row 3 of 3 rows"), (4, {"r": 5}, "r=3 is 5 and 4")):
        with pytest.raises(Mismatch, match=message):
            solve_all([(axis, total)], dict(sizes))


@pytest.mark.parametrize(
    ("text", "rows", "message", "offset"),
    [
        ("e r=0", False, "r=0: one row can be taken of a whole axis, in a fold only", 2),
        ("(r=0 e)", True, "r=0: one row can be taken of a whole axis, in a fold only", 1),
        ("r r=0", True, "index 'r' stands twice among the axes", 2),
        ("_r=0 e", True, "'_' cannot stand among axes", 0),
        ("r= 0", True, "'r' cannot stand among axes", 0),
        ("r=0=1", True, "'r' cannot stand among axes", 0),
    ],
)
def test_a_row_of_an_index_is_refused_where_it_cannot_stand(text: str, rows: bool, message: str, offset: int) -> None:
    with pytest.raises(NotationError) as caught:
        parse_axes(text, rows=rows)
    assert (str(caught.value), caught.value.offset) == (message, offset)


def solved(text: str, shape: tuple[int, ...], sizes: dict[str, int] | None = None) -> dict[str, int]:
    found = dict(sizes or {})
    solve_all(list(zip(parse_axes(text), shape, strict=True)), found)
    return found


@pytest.mark.parametrize(
    ("text", "shape", "known", "expected"),
    [
        ("v e", (7, 3), {}, {"v": 7, "e": 3}),
        ("v e", (0, 3), {}, {"v": 0, "e": 3}),
        ("(h d) e", (12, 3), {"h": 4}, {"h": 4, "d": 3, "e": 3}),
        ("(h d) d", (12, 3), {}, None),
        ("(_2|t) e", (7, 3), {}, {"t": 5, "e": 3}),
        ("(_pad|t) e", (7, 3), {"t": 5}, {"t": 5, "e": 3, "_pad": 2}),
        ("(g (m|1|1) d) e", (48, 5), {"g": 2, "d": 4}, {"g": 2, "d": 4, "m": 4, "e": 5}),
        ("(a b) (b c)", (6, 15), {"a": 2}, None),
        ("(h d)", (12,), {}, {}),
        ("(d2 d3)", (12,), {"d2": 4}, {"d2": 4, "d3": 3}),
    ],
)
def test_sizes_follow_from_shapes(
    text: str, shape: tuple[int, ...], known: dict[str, int], expected: dict[str, int] | None
) -> None:
    if expected is None:  # the two axes share an index: not one term, but two sides of a rule
        one, other = (parse_axes(part)[0] for part in (text[: text.index(")") + 1], text[text.index(")") + 1 :]))
        sizes = dict(known)
        solve_all([(one, shape[0]), (other, shape[1])], sizes)
        assert sizes == ({"h": 4, "d": 3} if "h" in text else {"a": 2, "b": 3, "c": 5})
    else:
        assert solved(text, shape, known) == expected


@pytest.mark.parametrize(
    ("text", "shape", "known", "message"),
    [
        ("v", (7,), {"v": 8}, "v is 8 and 7"),
        ("1", (2,), {}, "1 is 1 and 2"),
        ("(h d)", (12,), {"h": 5}, "12 cannot be divided by 5 in (h d)"),
        ("(h d)", (12,), {"h": 0}, "12 cannot be divided by 0 in (h d)"),
        ("(h d)", (12,), {"h": 5, "d": 2}, "(h d) is 10 and 12"),
        ("(_2|t)", (2,), {}, "nothing is left of 2 for t in (_2|t)"),
        ("(_2|t)", (1,), {}, "nothing is left of 1 for t in (_2|t)"),
        ("(a|b)", (5,), {"a": 2, "b": 2}, "(a|b) is 4 and 5"),
        ("(h d)", (0,), {"h": 2}, "nothing is left of 0 for d in (h d)"),
    ],
)
def test_sizes_that_contradict_a_shape_say_so(
    text: str, shape: tuple[int, ...], known: dict[str, int], message: str
) -> None:
    with pytest.raises(Mismatch) as caught:
        solved(text, shape, known)
    assert str(caught.value) == message


def test_a_row_must_be_there() -> None:
    with pytest.raises(Mismatch, match="row 2 of 2 rows"):
        solve_all([(parse_axes("2", rows=True)[0], 2)], {})


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("v e", {"v": 3, "e": 4}),
        ("(h d) e", {"h": 2, "d": 3, "e": 4}),
        ("(a|b c) e", {"a": 2, "b": 3, "c": 2, "e": 2}),
        ("(g (m|1|1) d) e", {"g": 2, "m": 3, "d": 2, "e": 2}),
        ("(_2|t) (x|_1)", {"t": 3, "x": 4}),
        ("1 b ((a|c) d|_3)", {"b": 2, "a": 1, "c": 2, "d": 3}),
    ],
)
def test_the_pieces_of_a_tensor_cover_it_once(text: str, sizes: dict[str, int]) -> None:
    axes = parse_axes(text)
    shape = tuple(size_of(axis, sizes) or 0 for axis in axes)
    seen = torch.zeros(shape, dtype=torch.int64)
    for piece in pieces(axes, shape, sizes):
        extents = [int(index[1:]) if index[1:].isdigit() else sizes[index] for index in piece.strides]
        seen.view(-1).as_strided(extents, list(piece.strides.values()), piece.offset).add_(1)
        assert piece.dropped == any(index.startswith("_") for index in piece.strides)
    assert torch.equal(seen, torch.ones_like(seen))


def test_pieces_need_every_size() -> None:
    with pytest.raises(Mismatch, match="the size of d is not known"):
        pieces(parse_axes("(h d)"), (6,), {"h": 2})


def test_the_indices_come_in_order_of_reading() -> None:
    assert list(leaves(parse_axes("1 (g (m|1|_2) d) e"))) == ["g", "m", "_2", "d", "e"]
