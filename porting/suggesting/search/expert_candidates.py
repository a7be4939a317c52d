"""Candidates for the experts of a layer, whose products no run of the reference shows.

transformers keeps all experts of a layer in one tensor for each of their matrices, and files have a tensor for each
expert.  A module may have either, run every expert on every token or each on those that chose it, and have the gate and
the up projection in one matrix.  Names and shapes give the candidates; the right one is that with which the next
activation behind the experts is the reference's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

from porting.notation.name import spelled
from porting.suggesting.search.layer_repeats import Layer
from porting.suggesting.search.layouts import CandidateRule, RuleTerm, Shape, Ways, factorings, written
from porting.suggesting.search.name_similarity import similarity

MOST = 48
"""How many ways are tried for the experts of a layer."""

EACH = "j"
"""The index of the expert, in a name or among the axes."""


@dataclass(frozen=True)
class ExpertTensors:
    """The tensors of a layer's experts that stand for one matrix, or for one bias.

    Attributes:
        pattern: the name, with ``{j}`` where each expert has a tensor.
        names: one for each expert, or one for all.
        shape: of each.
    """

    pattern: str
    names: tuple[str, ...]
    shape: Shape

    @property
    def is_list(self) -> bool:
        """Whether each expert has a tensor."""
        return len(self.names) > 1

    def term(self, axes: Sequence[Sequence[str]]) -> RuleTerm:
        """The term of a rule with these axes."""
        return RuleTerm(self.pattern, self.names, written(axes))


def expert_tensors(shapes: Mapping[str, Shape], count: int) -> list[ExpertTensors]:
    """The tensors of a layer that may belong to its experts.

    Args:
        shapes: of the layer's tensors.
        count: how many experts there are.

    >>> found = expert_tensors({"e.0.w": (4, 6), "e.1.w": (4, 6), "down": (2, 6, 4), "norm": (4,)}, 2)
    >>> [(one.pattern, one.shape) for one in found]
    [('e.{j}.w', (4, 6)), ('down', (2, 6, 4))]
    """
    lists: dict[tuple[str, str], dict[int, str]] = {}
    for name in shapes:
        for number in re.finditer(r"(?<![^.])\d+(?![^.])", name):
            lists.setdefault((name[: number.start()], name[number.end() :]), {})[int(number.group())] = name
    found, taken = [], set[str]()
    for (begin, end), named in lists.items():
        names = tuple(named[one] for one in sorted(named))
        alike = {shapes[name] for name in names}
        if sorted(named) == [*range(count)] and len(alike) == 1 and count > 1:
            found.append(ExpertTensors(f"{spelled(begin)}{{{EACH}}}{spelled(end)}", names, alike.pop()))
            taken.update(names)
    for name, shape in shapes.items():
        if name not in taken and len(shape) > 1 and any(size % count == 0 for size in shape):
            found.append(ExpertTensors(spelled(name), (name,), shape))
    return found


def of_sizes(
    ours: Sequence[ExpertTensors], theirs: Sequence[ExpertTensors], count: int
) -> tuple[list[ExpertTensors], list[ExpertTensors]]:
    """Those of either side that hold as many numbers for each expert as one of the other does, or two, or half of one.

    A router has a row for each expert as well: the reference's is neither a list nor a stack of matrices.
    """

    def each(one: ExpertTensors) -> int:
        return math.prod(one.shape) // (1 if one.is_list else count)

    theirs = [one for one in theirs if one.is_list or len(one.shape) > 2 or "bias" in one.pattern]
    known = {size for one in theirs for size in (each(one), 2 * each(one), each(one) / 2)}
    ours = [one for one in ours if each(one) in known]
    held = {size for one in ours for size in (each(one), 2 * each(one), each(one) / 2)}
    return ours, [one for one in theirs if each(one) in held]


@dataclass(frozen=True)
class Experts:
    """The tensors of a layer's experts that are open on either side.

    Attributes:
        layer: the module's; None where the unit is in none with experts.
        count: how many experts there are.
    """

    layer: Layer | None = None
    count: int = 0
    ours: Sequence[ExpertTensors] = ()
    theirs: Sequence[ExpertTensors] = ()

    @property
    def writes(self) -> frozenset[str]:
        """The names of the module's tensors; none where the reference has none for them."""
        return frozenset(name for one in self.ours for name in one.names)

    @property
    def reads(self) -> frozenset[str]:
        """The names of the reference's tensors."""
        return frozenset(name for one in self.theirs for name in one.names)


def candidates(ours: Sequence[ExpertTensors], theirs: Sequence[ExpertTensors], count: int) -> Ways:
    """The ways of filling all of a module's expert tensors from those of the reference.

    First come ways that turn all of the matrices or none, and among these likely names.

    Args:
        ours, theirs: the tensors of one layer.
        count: how many experts there are.
    """
    ways = [*islice((way for way in _ways(ours, theirs, count) if way), MOST)]
    ways.sort(key=lambda way: len({*map(_is_turned, way)} - {None}))
    yield from (tuple(map(_plainer, way)) for way in ways)


def _ways(
    ours: Sequence[ExpertTensors], theirs: Sequence[ExpertTensors], count: int
) -> Iterator[tuple[CandidateRule, ...]]:
    if not ours:
        yield ()
        return
    first, *rest = ours
    options = [*_whole(first, theirs, count), *_joined(first, theirs, count), *_parts(first, rest, theirs, count)]
    options.sort(key=lambda option: -_likeness(option[0]))
    for rule, used in options:
        left = [one for one in theirs if one not in used]
        for others in _ways([one for one in rest if one not in used], left, count):
            yield (rule, *others)


Option = tuple[CandidateRule, Collection[ExpertTensors]]
"""A rule, and the tensors of either side that it accounts for."""


def _whole(our: ExpertTensors, theirs: Iterable[ExpertTensors], count: int) -> Iterator[Option]:
    """Rules that fill a tensor from the same one of the reference."""
    for one in theirs:
        for left, right in _arranged(one, our, count):
            yield CandidateRule((one.term(left),), (our.term(right),)), (one, our)


def _joined(our: ExpertTensors, theirs: Sequence[ExpertTensors], count: int) -> Iterator[Option]:
    """Rules that join two tensors of the reference, as a gate and what it opens."""
    for one in theirs:
        for other in theirs:
            if other is one or other.shape != one.shape or other.is_list != one.is_list:
                continue
            for left, right in _arranged(one, our, count, both=True):
                lefts = [_with(left, "o", part) for part in "ab"]
                sources = one.term(lefts[0]), other.term(lefts[1])
                yield CandidateRule(sources, (our.term(_with(right, "o", "(a|b)")),)), (one, other, our)
            if one.is_list and len(our.shape) > 2 and (named := _either(one.pattern, other.pattern)):
                source = ExpertTensors(named, (*one.names, *other.names), one.shape)
                for left, right in _arranged(one, our, count, more={"p": 2}):
                    if any(axis == ("p",) for axis in right):
                        yield CandidateRule((source.term(left),), (our.term(right),)), (one, other, our)


def _either(one: str, other: str) -> str:
    """The pattern of two names that differ in one of their parts; empty for others.

    >>> _either("experts.{j}.gate.weight", "experts.{j}.up.weight")
    'experts.{j}.{p:gate,up}.weight'
    """
    pairs = [*zip(one.split("."), other.split("."), strict=False)]
    apart = [pair for pair in pairs if pair[0] != pair[1]]
    if len(apart) != 1 or one.count(".") != other.count(".") or "{" in "".join(apart[0]):
        return ""
    return ".".join(f"{{p:{a},{b}}}" if a != b else a for a, b in pairs)


def _parts(
    our: ExpertTensors, rest: Sequence[ExpertTensors], theirs: Iterable[ExpertTensors], count: int
) -> Iterator[Option]:
    """Rules that take a tensor of the reference apart into two."""
    for other in (one for one in rest if one.shape == our.shape and one.is_list == our.is_list):
        for one in theirs:
            for right, left in _arranged(our, one, count, both=True):
                for pair in ((our, other), (other, our)):
                    targets = tuple(part.term(_with(right, "o", name)) for part, name in zip(pair, "ab", strict=True))
                    yield CandidateRule((one.term(_with(left, "o", "(a|b)")),), targets), (one, our, other)


def _arranged(
    one: ExpertTensors,
    other: ExpertTensors,
    count: int,
    *,
    both: bool = False,
    more: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[tuple[list[tuple[str, ...]], tuple[tuple[str, ...], ...]]]:
    """The axes of a tensor with those of another that holds the same, or ``both``: twice as much along one axis.

    The axes are ``o`` and ``e``, of which ``o`` is the one that has twice as much.

    Args:
        more: axes that the other has besides, with their sizes.
    """
    sizes = [*one.shape]
    if not one.is_list:
        if count not in sizes:
            return
        sizes.remove(count)
    if len(sizes) > 2:  # the axes of a matrix
        return
    letters = ["oe", "eo"] if both and len(sizes) > 1 else ["oe"]
    for names in letters:
        atoms = dict(zip(names, sizes, strict=False))
        unlike = iter(names)
        places = [
            EACH if not one.is_list and at == one.shape.index(count) else next(unlike) for at in range(len(one.shape))
        ]
        if both:
            atoms["o"] *= 2
        atoms |= more
        if not other.is_list:
            atoms = {EACH: count, **atoms}
        for right in factorings(atoms, other.shape):
            yield [(place,) for place in places], right


def _with(axes: Iterable[Sequence[str]], name: str, instead: str) -> list[tuple[str, ...]]:
    return [tuple(instead if one == name else one for one in axis) for axis in axes]


def _is_turned(rule: CandidateRule) -> bool | None:
    """Whether what goes in stands first on one side and not on the other; None for a bias."""
    first = [re.sub("[^oabe]", "", side[0].axes).startswith("e") for side in (rule.sources, rule.targets)]
    return first[0] != first[1] if "e" in rule.sources[0].axes else None


def _plainer(rule: CandidateRule) -> CandidateRule:
    """The rule without axes where these are the same on both sides."""
    same = len(rule.sources) == len(rule.targets) == 1 and rule.sources[0].axes == rule.targets[0].axes
    return rule.along("", "") if same else rule


def _likeness(rule: CandidateRule) -> float:
    """How much the names of a rule's two sides have in common; parts are expected in the order of their names."""
    return similarity(rule.reads[0], rule.writes[0])
