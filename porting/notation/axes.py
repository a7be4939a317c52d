"""Axes of a tensor: ``[v e]``, ``[(h d) e]``, ``[(_2|t) e]``, ``[(g (m|1|1) d) e]``.

An axis is a tree: an index, a product of factors (row-major, the first slowest) or a concatenation of segments.  With
every size known, a term falls into *pieces*: boxes over indices, each an offset and one stride per index into the
tensor's row-major elements.  All that a rule does to a tensor is then arithmetic on offsets and strides.

An index may stand in several segments of one concatenation, ``[(g m d|g d|g d) e]``: each piece has it once.
``f'`` is an index of its own that has the size of ``f``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import product

from porting.errors import Code
from porting.notation.faults import NotationError

DEEPEST = 16
"""Products and concatenations may be nested this deep."""

LONGEST = 1000
"""The axes of a term are written in at most this many characters."""

MOST_PIECES = 1024
"""Concatenations multiply: a term may fall into at most this many pieces."""

MOST_AXES = 64
"""torch iterates over at most this many dimensions."""

_TOKEN = re.compile(
    r"[ \t]*(?:((?:(?:[A-Za-z][A-Za-z0-9]*=)?[0-9]{1,9}|_?[A-Za-z][A-Za-z0-9]*'{0,3}|_[0-9]{1,9})"
    r"(?![A-Za-z0-9_=']))|([()|]))"
)

Sizes = Mapping[str, int]


class Mismatch(ValueError):  # noqa: N818  # what is wrong is the sizes, and whoever solves them says where
    """The sizes of an axis contradict what is given."""


@dataclass(frozen=True)
class Index:
    """An index; one whose name starts with ``_`` has no counterpart on the other side."""

    name: str

    @property
    def sized(self) -> str:
        """The index whose size it has: ``f`` for ``f'``."""
        return sized(self.name)

    @property
    def given(self) -> int | None:
        """The size that the name itself gives: 2 for ``_2``."""
        return int(self.name[1:]) if self.name.startswith("_") and self.name[1:].isdigit() else None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class One:
    """``1``: an axis of one element."""

    def __str__(self) -> str:
        return "1"


@dataclass(frozen=True)
class Row:
    """One row of an axis in a fold, ``0``, ``1``, ...; ``k=0`` where the rows have an index."""

    row: int
    index: str = ""

    def __str__(self) -> str:
        return f"{self.index}={self.row}" if self.index else str(self.row)


@dataclass(frozen=True)
class Product:
    """``(h d)``: factors in row-major order."""

    factors: tuple[Axis, ...]

    def __str__(self) -> str:
        return f"({' '.join(str(factor) for factor in self.factors)})"


@dataclass(frozen=True)
class Concatenation:
    """``(m|1|1)``: segments one after the other."""

    segments: tuple[Axis, ...]

    def __str__(self) -> str:
        inside = (" ".join(map(str, one.factors)) if isinstance(one, Product) else str(one) for one in self.segments)
        return f"({'|'.join(inside)})"


Axis = Index | One | Row | Product | Concatenation


@dataclass(frozen=True)
class Piece:
    """A box of a tensor: element ``offset + sum(strides[i] * i)`` for every value of its indices.

    Attributes:
        offset: where the box begins, in elements of the row-major tensor.
        strides: the stride of each index, in elements.
    """

    offset: int
    strides: Mapping[str, int]

    @property
    def dropped(self) -> bool:
        """Whether this piece has no counterpart on the other side."""
        return any(index.startswith("_") for index in self.strides)


def parse_axes(text: str, offset: int = 0, *, rows: bool = False, named: bool = False) -> tuple[Axis, ...]:
    """Parse what stands between the brackets.

    Args:
        offset: where ``text`` begins in the string that faults refer to.
        rows: a number that is an axis of its own is a :class:`Row` (in a fold).
        named: only one that has an index is, ``p=0`` (in a formula).
    """
    if len(text) > LONGEST:
        raise NotationError(Code.BAD_AXES, f"axes of {len(text)} characters, at most {LONGEST} are read", offset)
    tokens = _tokens(text, offset)
    axes, rest = _sequence(tokens, 0, 0, rows=rows, named=named)
    if rest < len(tokens):
        raise NotationError(Code.BAD_AXES, f"{tokens[rest][0]!r} is not expected here", tokens[rest][1])
    if len(axes) > MOST_AXES:
        raise NotationError(Code.BAD_AXES, f"{len(axes)} axes; torch handles {MOST_AXES}", offset)
    recurring = _recurring(axes)
    if recurring:
        at = [position for token, position in tokens if token.partition("=")[0] == recurring]
        message = f"index {recurring!r} stands twice among the axes"
        hint = f"{recurring}' is another index of the same size"
        raise NotationError(Code.INDEX_TWICE, message, at[-1], hint)
    count = math.prod(_count(axis) for axis in axes)
    if count > MOST_PIECES:
        raise NotationError(
            Code.BAD_AXES, f"these axes fall into {count} pieces, at most {MOST_PIECES} are kept", offset
        )
    return axes


def _tokens(text: str, offset: int) -> list[tuple[str, int]]:
    tokens: list[tuple[str, int]] = []
    position, end = 0, len(text.rstrip(" \t"))
    while position < end:
        found = _TOKEN.match(text, position)
        if found is None:
            at = next(place for place in range(position, end) if text[place] not in " \t")
            raise NotationError(Code.BAD_AXES, f"{text[at]!r} cannot stand among axes", offset + at)
        tokens.append((found.group(found.lastindex or 0), offset + found.start(found.lastindex or 0)))
        position = found.end()
    return tokens


def _count(axis: Axis) -> int:
    """Into how many pieces an axis falls."""
    match axis:
        case Product(factors=inner):
            return math.prod(_count(one) for one in inner)
        case Concatenation(segments=inner):
            return sum(_count(one) for one in inner)
    return 1


def _recurring(axes: Sequence[Axis]) -> str:
    """An index that some piece would have twice; empty when there is none."""
    found: set[str] = set()
    for axis in axes:
        match axis:
            case Concatenation(segments=segments):
                twice = next((index for segment in segments if (index := _recurring((segment,)))), "")
            case Product(factors=factors):
                twice = _recurring(factors)
            case _:
                twice = ""
        # sized parts, _2, may recur: they name nothing
        mine = {name for name in (*leaves((axis,)), *row_indices((axis,))) if Index(name).given is None}
        twice = twice or min(mine & found, default="")
        if twice:
            return twice
        found |= mine
    return ""


def _sequence(
    tokens: list[tuple[str, int]], at: int, depth: int, *, rows: bool = False, named: bool = False
) -> tuple[tuple[Axis, ...], int]:
    axes: list[Axis] = []
    while at < len(tokens) and tokens[at][0] not in ")|":
        word, position = tokens[at]
        if word == "(":
            axis, at = _group(tokens, at, depth + 1)
            axes.append(axis)
            continue
        axes.append(_leaf(word, position, rows=rows, named=named))
        at += 1
    return tuple(axes), at


def _group(tokens: list[tuple[str, int]], at: int, depth: int) -> tuple[Axis, int]:
    opened = tokens[at][1]
    if depth > DEEPEST:
        raise NotationError(Code.BAD_AXES, f"parentheses nested deeper than {DEEPEST}", opened)
    segments: list[Axis] = []
    while at < len(tokens) and tokens[at][0] != ")":
        factors, at = _sequence(tokens, at + 1, depth)
        if not factors:
            raise NotationError(Code.BAD_AXES, "an empty part between parentheses", opened)
        segments.append(factors[0] if len(factors) == 1 else Product(factors))
    if at == len(tokens):
        raise NotationError(Code.BAD_AXES, "a parenthesis is not closed", opened)
    if len(segments) > 1:
        return Concatenation(tuple(segments)), at + 1
    only = segments[0]
    return (only if isinstance(only, Product) else Product((only,))), at + 1


def _leaf(word: str, position: int, *, rows: bool, named: bool) -> Axis:
    name, equals, number = word.partition("=")
    if equals:
        if not rows and not named:
            raise NotationError(
                Code.BAD_AXES, f"{word}: one row can be taken of a whole axis, in a fold only", position
            )
        return Row(int(number), name)
    if word.isdigit():
        if rows:
            return Row(int(word))
        if word != "1":
            hint = f"_{word} is a part of that size without a counterpart; [sizes] gives an index its size"
            raise NotationError(Code.BAD_AXES, f"the number {word} cannot stand among axes", position, hint)
        return One()
    index = Index(word)
    if index.given == 0:
        raise NotationError(Code.BAD_AXES, f"{word} is a part of no elements", position)
    return index


def leaves(axes: tuple[Axis, ...]) -> Iterator[str]:
    """The indices in order of reading."""
    for axis in axes:
        match axis:
            case Index(name=name):
                yield name
            case Product(factors=inner) | Concatenation(segments=inner):
                yield from leaves(inner)


def whole(axes: tuple[Axis, ...]) -> set[str]:
    """The indices that are an axis of their own, so that their size is read and not deduced."""
    return {axis.sized for axis in axes if isinstance(axis, Index)}


def sized(index: str) -> str:
    """The index whose size an index has: ``f`` for ``f'``, else itself."""
    return index.rstrip("'")


def row_indices(axes: tuple[Axis, ...]) -> Iterator[str]:
    """The indices of rows: they have a size, and only one of their values is used."""
    yield from (axis.index for axis in axes if isinstance(axis, Row) and axis.index)


def size_of(axis: Axis, sizes: Sizes) -> int | None:
    """The size of an axis, or None while a size that it needs is unknown."""
    match axis:
        case Index():
            return sizes.get(axis.sized) if axis.given is None else axis.given
        case One():
            return 1
        case Row(index=index):
            return sizes.get(index)
        case Product(factors=parts) | Concatenation(segments=parts):
            known = [size for part in parts if (size := size_of(part, sizes)) is not None]
            if len(known) < len(parts):
                return None
            return math.prod(known) if isinstance(axis, Product) else sum(known)


def solve_all(axes: Sequence[tuple[Axis, int]], sizes: MutableMapping[str, int]) -> None:
    """Deduce what can be deduced from axes and their totals; what is learnt is put into ``sizes``."""
    while any([solve(axis, total, sizes) for axis, total in axes]):  # noqa: C419  # a list: every axis has its turn
        pass


def solve(axis: Axis, total: int, sizes: MutableMapping[str, int]) -> bool:
    """Deduce one unknown size from the axis's total; True when something new was learnt."""
    match axis:
        case Row(row=row) if row >= total:
            raise Mismatch(f"row {row} of {total} rows")
        case Row(index=""):
            return False
        case Index(sized=name) | Row(index=name) if size_of(axis, sizes) is None:
            sizes[name] = total
            return True
        case Product(factors=parts) | Concatenation(segments=parts):
            several = _solved_together(axis, total, sizes)
            if several is not None:
                sizes[several[0]] = several[1]
                return True
            unknown = [part for part in parts if size_of(part, sizes) is None]
            if len(unknown) == 1:
                known = [size for part in parts if (size := size_of(part, sizes)) is not None]
                left = _divided(axis, total, known) if isinstance(axis, Product) else total - sum(known)
                dropped = isinstance(axis, Concatenation) and str(unknown[0]).startswith("_")  # it may be empty
                if left < (0 if dropped else 1):
                    raise Mismatch(f"nothing is left of {total} for {unknown[0]} in {axis}")
                return solve(unknown[0], left, sizes)
    expected = size_of(axis, sizes)
    if expected not in (None, total):
        raise Mismatch(f"{axis} is {expected} and {total}")
    return False


def _solved_together(axis: Axis, total: int, sizes: Sizes) -> tuple[str, int] | None:
    """The one unknown index of an axis that has it in several segments, and its size; None where that is not so.

    Every piece has an index at most once, so that the axis is ``a + b * x`` elements long.
    """
    unknown = [sized(name) for name in leaves((axis,)) if size_of(Index(name), sizes) is None]
    if len(unknown) < 2 or len(set(unknown)) > 1:
        return None
    first, second = (size_of(axis, {**sizes, unknown[0]: size}) for size in (1, 2))
    if first is None or second is None:
        return None
    each = second - first
    if each == 0 or total < first or (total - first) % each:
        raise Mismatch(f"no size of {unknown[0]} makes {axis} {total} long")
    return unknown[0], (total - first) // each + 1


def _divided(axis: Axis, total: int, known: list[int]) -> int:
    chunk = math.prod(known)
    if chunk == 0 or total % chunk:
        raise Mismatch(f"{total} cannot be divided by {chunk} in {axis}")
    return total // chunk


def pieces(axes: tuple[Axis, ...], shape: tuple[int, ...], sizes: Sizes) -> list[Piece]:
    """The boxes that make up a tensor of ``shape``, in row-major order of their segments.

    Every size must be known and agree with the shape (see :func:`solve`).
    """
    parts: list[list[Piece]] = []
    stride = 1
    for axis, extent in zip(reversed(axes), reversed(shape), strict=True):
        parts.append(_spread(axis, stride, sizes))
        stride *= extent
    return _together(parts[::-1])


def _spread(axis: Axis, stride: int, sizes: Sizes) -> list[Piece]:
    match axis:
        case Index(name=name):
            return [Piece(0, {name: stride})]
        case One():
            return [Piece(0, {})]
        case Row(row=row):
            return [Piece(row * stride, {})]
        case Product(factors=factors):
            parts = []
            for factor in reversed(factors):
                parts.append(_spread(factor, stride, sizes))
                stride *= _known(factor, sizes)
            return _together(parts[::-1])
        case Concatenation(segments=segments):
            spread: list[Piece] = []
            offset = 0
            for segment in segments:
                spread += [Piece(offset + one.offset, one.strides) for one in _spread(segment, stride, sizes)]
                offset += stride * _known(segment, sizes)
            return spread


def _known(axis: Axis, sizes: Sizes) -> int:
    size = size_of(axis, sizes)
    if size is None:
        raise Mismatch(f"the size of {axis} is not known")
    return size


def _together(parts: list[list[Piece]]) -> list[Piece]:
    """The boxes of axes or factors that stand side by side: one of each, their offsets and strides put together."""
    joined = []
    for choice in product(*parts):
        strides: dict[str, int] = {}
        for one in choice:
            strides.update(one.strides)
        joined.append(Piece(sum(one.offset for one in choice), strides))
    return joined
