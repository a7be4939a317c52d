"""Candidates for which matrix becomes which, among matrices with the same input; the simplest first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

import torch

from porting.notation.name import spelled
from porting.suggesting.search.layouts import (
    CandidateRule,
    Matrix,
    RuleTerm,
    Shapes,
    Ways,
    distance,
    factorings,
    matrix,
    order,
    single_rule,
    single_term,
    written,
)
from porting.suggesting.search.name_similarity import pattern, similarity
from porting.suggesting.subjects.operation_trace import Unit
from porting.suggesting.subjects.traced_model import TracedModel

MOST_MAKERS = 5
"""Up to this many tensors of one fused matrix are tried in any order; more are taken in their own order."""

MOST = 400
"""The most candidates tried for one place."""


def clusters(units: Sequence[Unit], shapes: Shapes) -> Iterator[list[Matrix]]:
    """The units as matrices: each by itself, then with those as one whose names differ in one number only."""
    yield [matrix([one], shapes) for one in units]
    names = [one.weights[0] for one in units]
    places = max((len(re.findall(r"\d+", name)) for name in names), default=0)
    for place in reversed(range(places)):
        groups: dict[str, list[Unit]] = {}
        for one, name in zip(units, names, strict=True):
            numbers = list(re.finditer(r"\d+", name))
            spot = numbers[place] if place < len(numbers) else None
            groups.setdefault(name if spot is None else f"{name[: spot.start()]}#{name[spot.end() :]}", []).append(one)
        if 0 < len(groups) < len(units) and len({len(one) for one in groups.values()}) == 1:
            yield [matrix(one, shapes) for one in groups.values()]


def composed(unit: Unit, mate: Unit, port_shapes: Shapes, reference_shapes: Shapes) -> Ways:
    """Ways in which the tensors that a matrix is made of are the reference's, as a direction and a length are.

    ``torch.nn.utils.weight_norm`` calls them ``weight_v`` and ``weight_g``, the parametrization that replaced it
    ``original1`` and ``original0``.
    """
    if not len(unit.weights) == len(mate.weights) > 1:
        return
    orders = permutations(mate.weights) if len(mate.weights) <= MOST_MAKERS else [mate.weights]
    for names in orders:
        pairs = [*zip(names, unit.weights, strict=True), *zip(mate.biases, unit.biases, strict=False)]
        if all(reference_shapes.get(theirs) == port_shapes.get(ours) for theirs, ours in pairs):
            yield tuple(single_rule(theirs, ours) for theirs, ours in pairs)


def candidates(
    port: Sequence[Unit],
    reference: Sequence[Unit],
    port_shapes: Shapes,
    reference_shapes: Shapes,
    heads: Mapping[str, int],
) -> Ways:
    """Ways in which the port's matrices may be the reference's: all that are given one activation.

    Args:
        heads: index -> how many heads there are; the first of queries, the second of keys where these are fewer.
    """
    theirs = [matrix([one], reference_shapes) for one in reference]
    for ours in clusters(port, port_shapes):
        for pairs in _partitions(ours, theirs):
            yield from _combined([list(_bundle(one, some, heads)) for one, some in pairs])


def _partitions(
    ours: Sequence[Matrix], theirs: Sequence[Matrix]
) -> Iterator[list[tuple[tuple[Matrix, ...], tuple[Matrix, ...]]]]:
    """Ways of telling which of ours are made of which of theirs; those with like names first."""
    found: list[list[tuple[tuple[Matrix, ...], tuple[Matrix, ...]]]] = []
    if len(ours) <= len(theirs) <= 6:
        for arrangement in permutations(theirs):
            groups = _cut(list(ours), list(arrangement))
            if groups is not None:
                found.append([((one,), some) for one, some in groups])
    elif len(theirs) < len(ours) <= 6:
        for turned in permutations(ours):
            groups = _cut(list(theirs), list(turned))
            if groups is not None:
                found.append([(some, (one,)) for one, some in groups])
    unique = {tuple((tuple(m.weights for m in a), tuple(m.weights for m in b)) for a, b in one): one for one in found}
    yield from sorted(unique.values(), key=_unlikeness)


def _cut(whole: list[Matrix], parts: list[Matrix]) -> list[tuple[Matrix, tuple[Matrix, ...]]] | None:
    """The parts in this order, divided among the wholes that they fill; None when they fill none."""
    found = []
    rest = list(parts)
    for one in whole:
        taken: list[Matrix] = []
        while rest and sum(part.out for part in taken) < one.out:
            if rest[0].summed != one.summed:
                return None
            taken.append(rest.pop(0))
        if sum(part.out for part in taken) != one.out:
            return None
        found.append((one, tuple(taken)))
    return found if not rest else None


_TRIPLE = ("query", "key", "value")


def _unlikeness(pairs: Sequence[tuple[tuple[Matrix, ...], tuple[Matrix, ...]]]) -> float:
    """Lower for like names; within one fused tensor, lower for query, key, value in this order."""
    total = 0.0
    for ours, theirs in pairs:
        for one in ours:
            for other in theirs:
                total -= similarity(one.weights[0], other.weights[0])
        several = theirs if len(theirs) > 1 else ours if len(ours) > 1 else ()
        for place, one in enumerate(several):
            if place < len(_TRIPLE):
                total -= 0.1 * similarity(one.weights[0], _TRIPLE[place])
    return total


def _combined(choices: Sequence[Sequence[tuple[CandidateRule, ...]]]) -> Ways:
    """One choice for each bundle, all of the same kind first: what is done to one is mostly done to all."""
    if not choices or not all(choices):
        return
    longest = max(len(one) for one in choices)
    for number in range(longest):
        yield tuple(move for one in choices for move in one[min(number, len(one) - 1)])


def _bundle(ours: Sequence[Matrix], theirs: Sequence[Matrix], heads: Mapping[str, int]) -> Ways:
    """The ways in which these of theirs can lie in these of ours; one side has one."""
    first, other = ours[0], theirs[0]
    if len(ours) == 1 and len(theirs) == 1 and len(first.weights) == 1:
        yield from _alone(first, other, heads)
    elif len({one.out for one in theirs}) == 1 and len({one.out for one in ours}) == 1:
        if is_partial(ours, theirs):
            for moves in _selected(bare(ours), bare(theirs), heads):
                if in_blocks(moves):
                    yield (*moves, *biases(ours, theirs))
        yield from _selected(ours, theirs, heads)
    else:
        yield from _concatenated(ours, theirs)


def _alone(ours: Matrix, theirs: Matrix, heads: Mapping[str, int]) -> Ways:
    """One into one: as it is, transposed, or with heads as axes of their own."""
    same = ours.shape == theirs.shape
    turned = len(ours.shape) == 2 and None not in {ours.into_first, theirs.into_first}
    as_is = same and (not turned or ours.into_first == theirs.into_first)
    bias = _biases(ours, theirs, "", "")
    if as_is and bias is not None:
        yield single_rule(theirs.weights[0], ours.weights[0]), *bias
    made = list(_laid(ours, theirs, 0, heads))
    yield from sorted(made, key=lambda moves: _strange(moves, ours))
    if same and bias is not None:
        yield from ((move, *bias) for move in _regrouped(ours, theirs, heads))
    if same and ours.out % 2 == 0:
        yield from _exchanged(ours, theirs)
    if same and not as_is and bias is not None:
        yield single_rule(theirs.weights[0], ours.weights[0]), *bias
    if len(theirs.shape) > 2:
        yield from _kernels(ours, theirs)


def _regrouped(ours: Matrix, theirs: Matrix, heads: Mapping[str, int]) -> Iterator[CandidateRule]:
    """Inputs by heads, where heads that share a key are next to each other on one side and apart on the other."""
    count, groups = heads.get("h", 0), heads.get("g", 0)
    if len(ours.shape) != 2 or not 1 < groups < count or theirs.summed % count or count % groups:
        return
    for first in (False, True) if ours.into_first is None else (ours.into_first,):
        left = "(g q d) o" if theirs.into_first else "o (g q d)"
        yield single_rule(theirs.weights[0], ours.weights[0], left, "(q g d) o" if first else "o (q g d)")


def _exchanged(ours: Matrix, theirs: Matrix) -> Ways:
    """Outputs in two halves that are exchanged: a gate before or after the values that it multiplies."""
    if len(ours.shape) != 2 or len(ours.weights) > 1 or bool(ours.biases) != bool(theirs.biases):
        return
    biased = zip(theirs.biases, ours.biases, strict=True)
    moved = tuple(single_rule(one, other, "(m|m')", "(m'|m)") for one, other in biased)
    for first in (False, True) if ours.into_first is None else (ours.into_first,):
        left = "e (m|m')" if theirs.into_first else "(m|m') e"
        yield single_rule(theirs.weights[0], ours.weights[0], left, "e (m'|m)" if first else "(m'|m) e"), *moved


def _kernels(ours: Matrix, theirs: Matrix) -> Ways:
    """A kernel of a convolution in other axes: a matrix over patches, [h w i o], or its groups as an axis."""
    names = "oabfe"[: len(theirs.shape)]
    for groups in (1, *dict.fromkeys(size for size in ours.shape if 1 < size < theirs.out)):
        if theirs.out % groups:
            continue
        atoms = {name: size for name, size in zip(names, theirs.shape, strict=True) if size > 1}
        out = "o" if groups == 1 else "(m o)"
        if groups > 1:
            atoms = {"m": groups, **atoms, "o": theirs.out // groups}
        source = " ".join([out, *(name if name in atoms else "1" for name in names[1:])])
        kept = {"m", "o"} & atoms.keys()
        for layout in factorings(atoms, ours.shape):
            inner = _bias_axes(ours, atoms, kept, order(layout, kept))
            bias = _biases(ours, theirs, out, inner)
            if bias is not None:
                yield single_rule(theirs.weights[0], ours.weights[0], source, written(layout)), *bias


def _strange(moves: tuple[CandidateRule, ...], ours: Matrix) -> tuple[bool, bool, int]:
    """A sort key: ways that mix inputs and outputs in an axis last, then those unlike the operation, then by size."""
    axes = re.findall(r"\([^)]*\)|\S+", moves[0].targets[0].axes)
    inside = [re.findall(r"\w+", axis) for axis in axes]
    mixed = any("e" in one and len(one) > 1 for one in inside)
    first = bool(inside) and "e" in inside[0]
    shown = ours.into_first is not None and first != ours.into_first
    return mixed, shown, sum(len(one) for one in inside)


def _selected(ours: Sequence[Matrix], theirs: Sequence[Matrix], heads: Mapping[str, int]) -> Ways:
    """Several of the same size into one, or one into several: an index of the name becomes part of an axis."""
    count = max(len(ours), len(theirs))
    many = theirs if len(theirs) > 1 else ours
    merged = Matrix(
        weights=tuple(name for one in many for name in one.weights),
        biases=tuple(name for one in many for name in one.biases),
        shape=many[0].shape,
        bias_shape=many[0].bias_shape,
        out=sum(one.out for one in many),
        summed=many[0].summed,
        into_first=many[0].into_first,
    )
    if count == 1:
        made = _laid(ours[0], theirs[0], 0, heads)
    elif many is theirs:
        made = _laid(ours[0], merged, count, heads)
    else:
        made = _laid(merged, theirs[0], -count, heads)
    yield from sorted(made, key=lambda moves: _strange(moves, ours[0]))


def _laid(ours: Matrix, theirs: Matrix, count: int, heads: Mapping[str, int]) -> Ways:
    """The layouts of our tensor over the indices of theirs.

    Args:
        ours, theirs: one of them may stand for several tensors.
        count: so many of theirs are one of ours; negative: so many of ours are one of theirs; 0: one to one.
        heads: as in :func:`candidates`.
    """
    per_head = len(ours.weights) // max(-count, 1) if len(ours.weights) > max(-count, 1) else 0
    out = theirs.out // max(abs(count), 1)
    for name, number in [("", 0), *heads.items()]:
        if (number and (number < 2 or out % number)) or (per_head and number != per_head):
            continue
        single = {"o": out} if not number else {name: number, "d": out // number}
        if number and not count and not per_head and out == 3 * theirs.summed and out % (3 * number) == 0:
            single = {"c": 3, name: number, "d": out // (3 * number)}  # c: query, key or value, in one tensor already
        inputs = {"e": theirs.summed}
        yield from _with(ours, theirs, count, per_head, name, single, inputs)
        if number and not count and not per_head and theirs.summed % number == 0:
            yield from _with(ours, theirs, 0, 0, name, {"o": out}, {name: number, "d": theirs.summed // number})


def _with(
    ours: Matrix, theirs: Matrix, count: int, per_head: int, head: str, out: Mapping[str, int], into: Mapping[str, int]
) -> Ways:
    """The layouts with these indices for what comes out and what goes in."""
    if len(theirs.shape) != 2:  # a matrix: what comes out, and what goes in
        return
    named = ({"p"} if count < 0 else set()) | ({head} if per_head else set())
    atoms = {**({"p": abs(count)} if count > 0 else {}), **{k: v for k, v in out.items() if k not in named}, **into}
    kept = set(atoms) - set(into)
    for source_out in _orders(tuple(out), count):
        axes = [tuple(into), source_out] if theirs.into_first else [source_out, tuple(into)]
        sources = _piece(theirs, written(axes), count, 0, head)
        for layout in factorings(atoms, ours.shape):
            target = _piece(ours, written(layout), -count, per_head, head)
            inner = _bias_axes(ours, atoms, kept, order(layout, kept))
            biases = _biases(ours, theirs, written([source_out]), inner, count, per_head, head)
            same = not count and not per_head and sources is not None and target is not None
            if sources is None or target is None or biases is None or (same and sources.axes == target.axes):
                continue
            yield (CandidateRule((sources,), (target,)), *biases)


def _orders(out: tuple[str, ...], count: int) -> list[tuple[str, ...]]:
    """How what comes out of one of theirs may be cut: projection after projection, or all of one head together."""
    if count >= 0:
        return [out]
    return [("p", *out), *([(out[0], "p", *out[1:])] if len(out) > 1 else [])]


def _bias_axes(ours: Matrix, atoms: Mapping[str, int], kept: set[str], wanted: tuple[str, ...]) -> str:
    if ours.bias_shape is None:
        return ""
    for layout in factorings({name: size for name, size in atoms.items() if name in kept}, ours.bias_shape):
        if order(layout, kept) == wanted:
            return written(layout)
    return "?"


def _piece(one: Matrix, axes: str, count: int, per_head: int, head: str, *, bias: bool = False) -> RuleTerm | None:
    """The term for a matrix that may stand for several tensors; None when their names have no pattern."""
    names = one.biases if bias else one.weights
    several = max(count, 1)
    if len(names) == 1:
        return single_term(names[0], axes)
    patterns = [spelled(name) for name in names]
    if per_head:
        groups = [patterns[number * per_head : (number + 1) * per_head] for number in range(several)]
        patterns = [pattern(group, head) for group in groups]
        if not all(f"{{{head}}}" in found for found in patterns):
            return None
    merged = patterns[0] if len(patterns) == 1 else pattern(patterns, "p")
    return RuleTerm(merged, names, axes) if merged else None


def _biases(
    ours: Matrix, theirs: Matrix, source: str, target: str, count: int = 0, per_head: int = 0, head: str = "h"
) -> tuple[CandidateRule, ...] | None:
    """The rule for the biases; nothing when a side has none; None when they do not fit."""
    if not ours.biases or not theirs.biases:
        return ()
    if target == "?":
        return None
    same = ours.bias_shape == theirs.bias_shape and len(ours.biases) == len(theirs.biases) == 1
    if same and source == target:
        source = target = ""
    left = _piece(theirs, source, count, 0, head, bias=True)
    right = _piece(ours, target, -count, per_head, head, bias=True)
    return None if left is None or right is None else (CandidateRule((left,), (right,)),)


def padded(port: Unit, reference: Unit, port_shapes: Shapes, reference_shapes: Shapes) -> Ways:
    """A head with more rows than the reference's: the additional rows belong to no token."""
    ours, theirs = matrix([port], port_shapes), matrix([reference], reference_shapes)
    if len(ours.shape) != 2 or len(theirs.shape) != 2 or ours.summed != theirs.summed or ours.out <= theirs.out:
        return
    sides = [("e o" if theirs.into_first else "o e"), ("e (o|_rest)" if ours.into_first else "(o|_rest) e")]
    moves = [single_rule(theirs.weights[0], ours.weights[0], *sides, fill=0.0)]
    if ours.biases and theirs.biases:
        moves.append(single_rule(theirs.biases[0], ours.biases[0], "o", "(o|_rest)", fill=0.0))
    yield tuple(moves)


def _concatenated(ours: Sequence[Matrix], theirs: Sequence[Matrix]) -> Ways:
    """Parts of different sizes, one after the other."""
    several, one = (theirs, ours[0]) if len(theirs) > 1 else (ours, theirs[0])
    letters = PARTS[: len(several)]
    if any(len(part.weights) > 1 or len(part.shape) != 2 for part in (*several, one)):
        return
    joint, pairs = f"({'|'.join(letters)})", list(zip(several, letters, strict=True))
    for first in [one.into_first] if one.into_first is not None else [False, True]:
        sides = [
            (
                (one.term(joint, into_first=first),),
                [part.term(to, into_first=bool(part.into_first)) for part, to in pairs],
            )
        ]
        if one.biases and all(part.biases for part in several):
            sides.append(
                ((single_term(one.biases[0], joint),), [single_term(part.biases[0], to) for part, to in pairs])
            )
        yield tuple(
            CandidateRule(tuple(each), whole) if several is theirs else CandidateRule(whole, tuple(each))
            for whole, each in sides
        )


# A key's bias cancels in softmax: it adds the same number to all scores of a query.
# Where one side has all of them in one tensor, the key's part of it belongs to nothing: it is zeros, or left out.

UNMOVED = 1e-10
"""Two outputs of a model that differ by less than this, relative to their scale, count as equal."""

SOFTMAX_IGNORES = "softmax cannot see it: it moves all scores of a query by the same number"


def is_ignored_by_softmax(side: TracedModel, biases: Sequence[str], weights: Sequence[str]) -> bool:
    """Whether a model returns the same whatever these biases are, and something else with other weights.

    It is tried out: with keys that are rotated, or that something else reads as well, a bias shows.

    Args:
        side: the model; its values are as before when this returns.
        biases, weights: a matrix's.
    """
    base = [one for one in side.run().outputs if one.is_floating_point()]

    def moves(names: Sequence[str]) -> bool:
        kept = {name: side.leaves[name].detach().clone() for name in names}
        generator = torch.Generator().manual_seed(0)
        try:
            for name, value in kept.items():
                noise = torch.randn(value.shape, dtype=torch.float64, generator=generator)
                side.leaves[name].detach().copy_(value + 0.5 * noise)
            other = [one for one in side.run().outputs if one.is_floating_point()]
        finally:
            for name, value in kept.items():
                side.leaves[name].detach().copy_(value)
        return any(distance(one, two) > UNMOVED for one, two in zip(base, other, strict=True))

    return bool(base and biases and weights) and not moves(biases) and moves(weights)


PARTS = "abfjlmuwx"
"""Indices of parts of different sizes; the other letters have sizes of their own."""

UNSEEN = "softmax cannot see a key's bias"


def is_partial(ours: Sequence[Matrix], theirs: Sequence[Matrix]) -> bool:
    """Whether one of several has no bias, or one side's is made of several tensors."""
    one, several = _sides(ours, theirs)
    if len(several) < 2 or not one.biases:
        return False
    having = [part for part in several if part.biases]
    return len(having) == len(several) - 1 or (bool(one.parts) and len(one.parts) == len(having))


def bare(some: Sequence[Matrix]) -> list[Matrix]:
    """The matrices without their biases."""
    return [replace(one, biases=(), bias_shape=None, parts=()) for one in some]


def biases(ours: Sequence[Matrix], theirs: Sequence[Matrix]) -> tuple[CandidateRule, ...]:
    """The rules for the biases of one fused tensor and of several, block after block in this order."""
    one, several = _sides(ours, theirs)
    having = [part.biases[0] for part in several if part.biases]
    if one.parts:
        pairs = zip(having, one.parts, strict=False) if several is theirs else zip(one.parts, having, strict=False)
        fits = len(one.parts) == len(having)
        return tuple(single_rule(a, b) for a, b in pairs) if fits else ()
    letters = [letter if part.biases else f"_{letter}" for letter, part in zip(PARTS, several, strict=False)]
    whole = single_term(one.biases[0], f"({'|'.join(letters)})")
    each = tuple(
        single_term(name, letter) for name, letter in zip(having, [x for x in letters if x[0] != "_"], strict=True)
    )
    return (
        CandidateRule(each, (whole,), fill=0.0, why=UNSEEN)
        if several is theirs
        else CandidateRule((whole,), each, fill=0.0, why=UNSEEN),
    )


def in_blocks(moves: Sequence[CandidateRule]) -> bool:
    """Whether the weights lie one after the other in the fused tensor."""
    return any("(p o)" in piece.axes for move in moves for piece in (*move.sources, *move.targets))


def _sides(ours: Sequence[Matrix], theirs: Sequence[Matrix]) -> tuple[Matrix, Sequence[Matrix]]:
    return (ours[0], theirs) if len(ours) == 1 else (theirs[0], ours)
