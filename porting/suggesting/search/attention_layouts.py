"""Query, key and value: how three projections may lie in fewer tensors, in any order, grouped, or turned in pairs.

A fused tensor has them one after the other, *blocks*; side by side within each head, or each group of heads that share
a key, *groups*; or as the fastest index, *innermost*.  Rotary embeddings pair a feature with the one half a head
further, or with its neighbour: the rows of queries and keys then lie ``(s r)`` on one side and ``(r s)`` on the other.
Heads that share a key lie next to each other, ``(g q d)``, or every n-th head shares a key, ``(q g d)``.  A module may
have heads and features as axes of their own, in any order, as JAX code has them: ``e h d``, ``h d e``.

The indices, all of which [sizes] or a shape gives: ``h`` heads, ``g`` groups, ``f`` as many for the values; ``q``,
``k`` and ``v``, how many queries, keys and values a group has; ``s`` and ``y``, the two features of a pair; ``r`` and
``z``, how many pairs a head has; ``u`` and ``w``, how many of its features are not rotated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product

from porting.suggesting.search.feature_permutation import FeatureOrder
from porting.suggesting.search.layouts import CandidateRule, Matrix, RuleTerm, Ways, factorings, single_term
from porting.suggesting.search.name_similarity import similarity

ROLES = {"q": "query", "k": "key", "v": "value"}

BEHIND = "behind"
"""The form of projections, each in a tensor of its own, whose heads stand behind their features: ``(d h)``."""


@dataclass(frozen=True)
class Heads:
    """How attention is cut up.

    Attributes:
        count: heads of queries.
        groups: heads of keys and values; as many, or fewer.
        width: features of a head.
        rotated: so many of them are rotated, the first ones; 0 for all.
    """

    count: int
    groups: int
    width: int
    rotated: int = 0

    @property
    def partly(self) -> bool:
        """Whether some features of a head are not rotated."""
        return 0 < self.rotated < self.width

    def out(self, role: str) -> int:
        """Features of a projection."""
        return self.width * (self.count if role == "q" else self.groups)


@dataclass(frozen=True)
class Holder:
    """A tensor and the projections in it, in order."""

    matrix: Matrix
    roles: tuple[str, ...]


@dataclass(frozen=True)
class _Way:
    """How one side writes its rows.

    Attributes:
        form: of its fused tensors: ``"blocks"``, ``"groups"`` or ``"innermost"``; empty where it has none; or
            ``"behind"`` where nothing is fused, and the heads are the fastest index of each projection.
        pairs: how the features of a rotated head lie, ``"s r"``, ``"r s"`` or ``"(s r|u)"``; empty where both sides
            have them alike.
        shared: the letter of the groups, where some tensor of either side has these as an axis; else empty.
        apart: nothing is fused on either side.
        equal: as many keys as queries.
        queries: the axes of the heads of queries, ``"g q"`` or ``"q g"``; empty where both sides have them alike.
        deep: some tensor of either side has more axes than two, so that heads and features have to be told apart.
        divided: the heads of either side are behind their features, so that they have to be told apart as well.
    """

    form: str
    pairs: str
    shared: str
    apart: bool
    equal: bool
    queries: str = ""
    deep: bool = False
    divided: bool = False

    def inner(self, role: str) -> str:
        """The features of one head."""
        if not self.pairs or role == "v":
            return "d"
        return self.pairs if role == "q" or self.apart else self.pairs.translate(_KEYS)

    def rows(self, roles: Sequence[str]) -> tuple[str, ...]:
        """The parts of what comes out of a tensor of these projections, the slowest first."""
        if len(roles) == 1:
            return self._alone(roles[0])
        return self._blocks(roles) if self.form not in {"innermost", "groups"} else self._within(roles)

    def _within(self, roles: Sequence[str]) -> tuple[str, ...]:
        every = f"({'|'.join(roles)})"
        if self.form == "innermost":
            return (self.shared, "d", every)
        if not self.pairs:
            return (self.shared, every, "d")
        return (self.shared, f"({'|'.join(f'{role} {self.inner(role)}' for role in roles)})")

    def _blocks(self, roles: Sequence[str]) -> tuple[str, ...]:
        every = f"({'|'.join(roles)})"
        if self.pairs:
            parts = {"q": f"h {self.inner('q')}", "k": f"g {self.inner('k')}", "v": "f d" if self.deep else "f"}
            return ("|".join(parts[role] for role in roles),)
        if self.shared:
            return (every, self.shared, "d")
        return (f"({'|'.join(_HEADS[role] for role in roles)})", "d") if self.deep else (every, "o")

    def _alone(self, role: str) -> tuple[str, ...]:
        if self.divided:
            parts = ("h" if role == "q" or self.equal else "g", self.inner(role))
            return parts[::-1] if self.form == BEHIND else parts
        if self.shared:
            return (self.shared, role, self.inner(role))
        if self.queries and role == "q":
            return (*self.queries.split(), self.inner(role))
        if self.pairs and role != "v":
            return ("h" if role == "q" or (self.apart and self.equal) else "g", self.inner(role))
        if self.deep:
            return (_HEADS[role], "d")
        return ("f",) if self.pairs else (role, "o")


_HEADS = {"q": "h", "k": "g", "v": "f"}
"""The index of the heads of each projection."""

_KEYS = str.maketrans("sru", "yzw")
"""The indices of a key's pairs, where a query's stand in the same rule."""


def orders(heads: Heads) -> tuple[FeatureOrder, ...]:
    """The orders that a head's features may have besides the reference's: halves for neighbours, and the reverse."""
    one = ("(s r|u)", "(r s|u)") if heads.partly else ("s r", "r s")
    return tuple(FeatureOrder(*both, width=heads.width, moved=heads.rotated) for both in (one, one[::-1]))


def gain_axes(shape: Sequence[int], heads: Heads) -> str:
    """The axes of a norm's gain over the features of a head, ``e``; empty where it has none of a head's."""
    known: dict[tuple[int, ...], str] = {}
    for count, name in ((heads.groups, "g"), (heads.count, "h")):
        known |= {(count * heads.width,): f"({name} e)", (count, heads.width): f"{name} e"}
    return {**known, (heads.width,): "e"}.get(tuple(shape), "")


def arrangements(ours: Sequence[Matrix], theirs: Sequence[Matrix], heads: Heads, order: FeatureOrder) -> Ways:
    """The ways in which the projections of one attention may lie in ours and in theirs.

    Args:
        ours, theirs: the matrices that are given one activation, all of attention's; ours of any number of axes.
        heads: how many there are.
        order: of the features of the heads that are rotated.
    """
    if any(len(one.shape) != 2 for one in theirs) or any(len(one.weights) > 1 for one in (*ours, *theirs)):
        return
    left = list(holders(theirs, heads, fixed=True))
    right = list(holders(ours, heads, fixed=False))
    found = sorted(product(left, right), key=lambda both: -_affinity(*both))
    for source, target in found:
        yield from _written(source, target, heads, order)


def holders(some: Sequence[Matrix], heads: Heads, *, fixed: bool) -> Iterator[tuple[Holder, ...]]:
    """Ways of telling which of these hold which projections.

    Args:
        some: the tensors.
        heads: how many features each projection has.
        fixed: only with queries, keys and values in this order within a tensor.
    """
    seen = set()
    for order in permutations(ROLES):
        rest = list(order)
        found = []
        for one in some:
            taken: list[str] = []
            while rest and sum(heads.out(role) for role in taken) < one.out:
                taken.append(rest.pop(0))
            if sum(heads.out(role) for role in taken) == one.out and taken:
                found.append(Holder(one, tuple(taken)))
        usual = all(one.roles == tuple(role for role in ROLES if role in one.roles) for one in found)
        key = tuple(one.roles for one in found)
        if len(found) == len(some) and not rest and (usual or not fixed) and key not in seen:
            seen.add(key)
            yield tuple(found)


def _affinity(source: Sequence[Holder], target: Sequence[Holder]) -> float:
    """How much the names speak for these roles."""
    named = [
        similarity(one.matrix.weights[0], ROLES[one.roles[0]]) for one in (*source, *target) if len(one.roles) == 1
    ]
    ordered = [tuple(role for role in ROLES if role in one.roles) == one.roles for one in target if len(one.roles) > 1]
    return sum(named) + sum(ordered)


def _written(source: Sequence[Holder], target: Sequence[Holder], heads: Heads, order: FeatureOrder) -> Ways:
    """The rules, for each form that fused tensors may have."""
    equal = heads.count == heads.groups
    fused = [any(len(one.roles) > 1 for one in side) for side in (source, target)]
    deep = any(len(one.matrix.shape) > 2 for one in target)
    forms = ("blocks", "groups", "innermost") if equal and not order.theirs else ("blocks", "groups")
    both = [(theirs, mine, "") for theirs, mine in product(*(forms if some else ("",) for some in fused))]
    if not any(fused) and 1 < heads.groups < heads.count:
        both.append(("", "", "g q"))
    if not any(fused) and (order.theirs or not equal):  # else the layouts of each by itself have it
        both.append(("", BEHIND, ""))
    for their_form, our_form, queries in both:
        if not order.theirs and (their_form, our_form, queries) == ("", "", ""):
            continue  # each by itself, as it is
        within = {"groups", "innermost"} & {their_form, our_form}
        if within and "blocks" in {their_form, our_form} and (order.theirs or not equal):
            continue  # a block's queries are not a box over a group's
        shared = ("h" if equal else "g") if within else ""
        ways = [
            _Way(
                form=form,
                pairs=lie,
                shared=shared,
                apart=not any(fused),
                equal=equal,
                queries=heads_of,
                deep=deep,
                divided=our_form == BEHIND,
            )
            for form, lie, heads_of in (
                (their_form, order.theirs, queries),
                (our_form, order.ours, " ".join(reversed(queries.split()))),
            )
        ]
        for turned in _turned(target):
            pieces = [
                list(_moves(theirs, mine, ways[0], ways[1], heads, turned=turned))
                for theirs, mine in _connected(source, target)
            ]
            for number in range(max(map(len, pieces)) if all(pieces) else 0):  # what is done to one is done to all
                yield tuple(move for piece in pieces for move in piece[min(number, len(piece) - 1)])


def _turned(target: Sequence[Holder]) -> tuple[bool, ...]:
    """Whether what goes in is the first axis of ours; both where that did not show."""
    flat = [one.matrix.into_first for one in target if len(one.matrix.shape) == 2]
    known = {*flat} - {None}
    return (bool(next(iter(known), False)),) if len(known) == 1 or not flat else (False, True)


def _connected(
    source: Sequence[Holder], target: Sequence[Holder]
) -> Iterator[tuple[tuple[Holder, ...], tuple[Holder, ...]]]:
    """The tensors that share projections, which one rule has to carry."""
    rest = list(source)
    while rest:
        left = [rest.pop(0)]
        roles = set(left[0].roles)
        while True:
            right = [one for one in target if set(one.roles) & roles]
            roles |= {role for one in right for role in one.roles}
            more = [one for one in rest if set(one.roles) & roles]
            if not more:
                break
            left += more
            rest = [one for one in rest if one not in more]
            roles |= {role for one in more for role in one.roles}
        yield tuple(left), tuple(right)


def _moves(
    source: Sequence[Holder], target: Sequence[Holder], theirs: _Way, ours: _Way, heads: Heads, *, turned: bool
) -> Iterator[tuple[CandidateRule, ...]]:
    """The rules of the tensors of some projections, for each way in which ours may have their parts as axes."""
    alone = len(source) == len(target) == 1 and len(source[0].roles) == 1
    turned_heads = theirs.queries and "q" in source[0].roles
    plain = alone and not turned_heads and (not theirs.pairs or source[0].roles == ("v",))
    plain = plain and len(target[0].matrix.shape) == 2 and ours.form != BEHIND
    rows = ["o" if plain else _joined(theirs.rows(one.roles)) for one in source]
    first = bool(source[0].matrix.into_first)
    bare = plain and first == turned and source[0].matrix.shape == target[0].matrix.shape
    left = [
        one.matrix.term("" if bare else axes, into_first=bool(one.matrix.into_first))
        for one, axes in zip(source, rows, strict=True)
    ]
    biased = all(one.matrix.biases for one in (*source, *target))
    known = {**sizes(heads), "h": heads.count, "f": heads.groups, "d": heads.width}
    spread = [list(_spread(one.matrix, ours.rows(one.roles), known, bare=plain, turned=turned)) for one in target]
    for number in range(max(map(len, spread)) if all(spread) else 0):
        right = [some[min(number, len(some) - 1)] for some in spread]
        rules = [CandidateRule(tuple(left), tuple(RuleTerm(one.weights[0], one.weights, "" if bare else axes)
                 for one, (axes, _) in zip((each.matrix for each in target), right, strict=True)))]  # fmt: skip
        if biased:
            shifts = [
                tuple(single_term(one.matrix.biases[0], "" if plain else axes) for one, axes in side)
                for side in (
                    zip(source, rows, strict=True),
                    [(one, axes) for one, (_, axes) in zip(target, right, strict=True)],
                )
            ]
            rules.append(CandidateRule(shifts[0], shifts[1]))
        yield tuple(rules)


def _spread(
    one: Matrix, parts: Sequence[str], known: Mapping[str, int], *, bare: bool, turned: bool
) -> Iterator[tuple[str, str]]:
    """The axes of a tensor of ours and of its bias, in each way in which these parts may be their axes.

    Args:
        parts: of what comes out, the slowest first.
        known: the sizes of indices.
        bare: nothing is known of what comes out but that it is one axis.
        turned: whether what goes in is the first of two axes.
    """
    if len(one.shape) == 2:
        rows = "o" if bare else _joined(parts)
        yield f"e {rows}" if turned else f"{rows} e", rows
        return
    merged: list[str] = []
    for part in parts:
        if merged and _extent(part, known) == 1:  # one key of each group: no axis of its own
            merged[-1] += f" {part}"
        else:
            merged.append(part)
    extents = {part: _extent(part, known) for part in merged}
    for layout in factorings({**extents, "e": one.summed}, one.shape):
        if any("e" in axis and len(axis) > 1 for axis in layout):
            continue
        wanted = [part for axis in layout for part in axis if part in extents]
        shifts = list(factorings(extents, one.bias_shape or ()))
        shifts = sorted(shifts, key=lambda axes: [part for axis in axes for part in axis] != wanted)
        if shifts or not one.biases:
            yield _axes(layout), _axes(shifts[0]) if shifts else ""


def _axes(layout: Sequence[Sequence[str]]) -> str:
    """Axes of parts as the notation writes them."""
    return " ".join(_joined(axis) if axis else "1" for axis in layout)


def _joined(parts: Sequence[str]) -> str:
    """One axis of these parts, the slowest first."""
    if len(parts) == 1 and (parts[0].isalpha() or re.fullmatch(r"\([^()]*\)", parts[0])):
        return parts[0]
    return f"({' '.join(parts)})"


def _extent(part: str, known: Mapping[str, int]) -> int:
    """How many elements a part has.

    >>> _extent("(q (s r|u)|v d)", {"q": 3, "s": 2, "r": 4, "u": 1, "v": 1, "d": 9})
    36
    """

    def total(text: str) -> int:
        segments = (segment.split() for segment in text.split("|"))
        return sum(math.prod(known.get(one) or int(one) for one in segment) for segment in segments)

    while "(" in part:
        part = re.sub(r"\(([^()]*)\)", lambda found: str(total(found[1])), part)
    return total(part)


def sizes(heads: Heads) -> Mapping[str, int]:
    """The indices of this module's rules, with their sizes."""
    rotated = heads.rotated or heads.width
    pairs, rest = rotated // 2, heads.width - rotated
    shared = heads.count // heads.groups
    found = {"g": heads.groups, "q": shared, "k": 1, "v": 1, "s": 2, "y": 2, "r": pairs, "z": pairs}
    return {**found, "u": rest, "w": rest} if rest else found
