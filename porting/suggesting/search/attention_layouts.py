"""Query, key and value: how three projections may lie in fewer tensors, in any order, grouped, or turned in pairs.

A fused tensor has them one after the other, *blocks*; side by side within each head, or each group of heads that share
a key, *groups*; or as the fastest index, *innermost*.  Rotary embeddings pair a feature with the one half a head
further, or with its neighbour: the rows of queries and keys then lie ``(s r)`` on one side and ``(r s)`` on the other.
Heads that share a key lie next to each other, ``(g q d)``, or every n-th head shares a key, ``(q g d)``.

The indices, all of which [sizes] gives: ``h`` heads, ``g`` groups; ``q``, ``k`` and ``v``, how many queries, keys and
values a group has; ``s`` and ``y``, the two features of a pair; ``r`` and ``z``, how many pairs a head has; ``u`` and
``w``, how many of its features are not rotated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product

from porting.suggesting.search.feature_permutation import FeatureOrder
from porting.suggesting.search.layouts import CandidateRule, Matrix, Ways, single_term
from porting.suggesting.search.name_similarity import similarity

ROLES = {"q": "query", "k": "key", "v": "value"}


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
        form: of its fused tensors: ``"blocks"``, ``"groups"`` or ``"innermost"``; empty where it has none.
        pairs: how the features of a rotated head lie, ``"s r"``, ``"r s"`` or ``"(s r|u)"``; empty where both sides
            have them alike.
        shared: the letter of the groups, where some tensor of either side has these as an axis; else empty.
        apart: nothing is fused on either side.
        equal: as many keys as queries.
        queries: the axes of the heads of queries, ``"g q"`` or ``"q g"``; empty where both sides have them alike.
    """

    form: str
    pairs: str
    shared: str
    apart: bool
    equal: bool
    queries: str = ""

    def inner(self, role: str) -> str:
        """The features of one head."""
        if not self.pairs or role == "v":
            return "d"
        return self.pairs if role == "q" or self.apart else self.pairs.translate(_KEYS)

    def rows(self, roles: Sequence[str]) -> str:
        """The axis that comes out of a tensor of these projections."""
        if len(roles) == 1:
            return self._alone(roles[0])
        if self.form == "innermost":
            return f"({self.shared} d ({'|'.join(roles)}))"
        if self.form == "groups":
            if not self.pairs:
                return f"({self.shared} ({'|'.join(roles)}) d)"
            return f"({self.shared} ({'|'.join(f'{role} {self.inner(role)}' for role in roles)}))"
        if not self.pairs:
            return f"(({'|'.join(roles)}) {f'{self.shared} d' if self.shared else 'o'})"
        parts = {"q": f"h {self.inner('q')}", "k": f"g {self.inner('k')}", "v": "f"}
        return f"({'|'.join(parts[role] for role in roles)})"

    def _alone(self, role: str) -> str:
        if self.shared:
            return f"({self.shared} {role} {self.inner(role)})"
        if self.queries and role == "q":
            return f"({self.queries} {self.inner(role)})"
        if self.pairs:
            heads = "h" if role == "q" or (self.apart and self.equal) else "g"
            return "f" if role == "v" else f"({heads} {self.inner(role)})"
        return f"({role} o)"


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
        ours, theirs: the matrices that are given one activation, all of attention's.
        heads: how many there are.
        order: of the features of the heads that are rotated.
    """
    if any(len(one.shape) != 2 or len(one.weights) > 1 for one in (*ours, *theirs)):
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
    forms = ("blocks", "groups", "innermost") if equal and not order.theirs else ("blocks", "groups")
    both = [(theirs, mine, "") for theirs, mine in product(*(forms if some else ("",) for some in fused))]
    if not any(fused) and 1 < heads.groups < heads.count:
        both.append(("", "", "g q"))
    for their_form, our_form, queries in both:
        if not order.theirs and (their_form, our_form, queries) == ("", "", ""):
            continue  # each by itself, as it is
        within = {"groups", "innermost"} & {their_form, our_form}
        if within and "blocks" in {their_form, our_form} and (order.theirs or not equal):
            continue  # a block's queries are not a box over a group's
        shared = ("h" if equal else "g") if within else ""
        ways = [
            _Way(form=form, pairs=lie, shared=shared, apart=not any(fused), equal=equal, queries=heads_of)
            for form, lie, heads_of in (
                (their_form, order.theirs, queries),
                (our_form, order.ours, " ".join(reversed(queries.split()))),
            )
        ]
        for turned in _turned(target):
            moves = [
                move
                for theirs, mine in _connected(source, target)
                for move in _moves(theirs, mine, ways[0], ways[1], turned=turned)
            ]
            yield tuple(moves)


def _turned(target: Sequence[Holder]) -> tuple[bool, ...]:
    """Whether what goes in is the first axis of ours; both where that did not show."""
    known = {one.matrix.into_first for one in target} - {None}
    return (bool(next(iter(known))),) if len(known) == 1 else (False, True)


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
    source: Sequence[Holder], target: Sequence[Holder], theirs: _Way, ours: _Way, *, turned: bool
) -> Iterator[CandidateRule]:
    alone = len(source) == len(target) == 1 and len(source[0].roles) == 1
    turned_heads = theirs.queries and "q" in source[0].roles
    plain = alone and not turned_heads and (not theirs.pairs or source[0].roles == ("v",))
    left = [(one.matrix, "o" if plain else theirs.rows(one.roles), bool(one.matrix.into_first)) for one in source]
    right = [(one.matrix, "o" if plain else ours.rows(one.roles), turned) for one in target]
    bare = plain and left[0][2] == turned and left[0][0].shape == right[0][0].shape
    weights = [
        tuple(one.term("" if bare else axes, into_first=first) for one, axes, first in side) for side in (left, right)
    ]
    yield CandidateRule(weights[0], weights[1])
    if all(one.biases for one, _, _ in (*left, *right)):
        biases = [
            tuple(single_term(one.biases[0], "" if plain else axes) for one, axes, _ in side) for side in (left, right)
        ]
        yield CandidateRule(biases[0], biases[1])


def sizes(heads: Heads) -> Mapping[str, int]:
    """The indices of this module's rules, with their sizes."""
    rotated = heads.rotated or heads.width
    pairs, rest = rotated // 2, heads.width - rotated
    shared = heads.count // heads.groups
    found = {"g": heads.groups, "q": shared, "k": 1, "v": 1, "s": 2, "y": 2, "r": pairs, "z": pairs}
    return {**found, "u": rest, "w": rest} if rest else found
