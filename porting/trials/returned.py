"""The outputs of both forwards, paired by name, then by value and shape; compared whatever the table's probes are.

A pair is written as a probe of the model itself, ``". -> logits" = ". -> 0"``, so that it is compared, isolated,
rounded and explained as any other probe is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations

import torch
from torch import Tensor

from porting.notation.faults import TableError
from porting.notation.rule import Rule, Term
from porting.notation.table import Table, parse_table
from porting.tracing.running import Side
from porting.tracing.trace import ARROW, INNER, ROOT, Point, module_of, split
from porting.trials.padding import attended
from porting.trials.scope import Returned, Stop

EQUAL = 1e-6
"""Relative to scale: two tensors this close are taken for the same output, to be compared with the real bounds then."""

NEAR = 0.05
"""Two tensors this close are the same output before any other of the same shape."""

MOST_AXES = 5
"""Tensors of more axes are compared in one order of their axes only."""

GENERIC = frozenset({"logits", "output", "outputs", "out", "state", "states", "hidden", "last", "scores", "prediction"})
"""Parts of an output's name that do not tell it from another."""

WHERE = "the returned value"

_NAMED = re.compile("[^0-9]")
"""How a name begins that is not a place in a tuple."""


@dataclass(frozen=True)
class _Match:
    """One way to lay a tensor of the reference out as an output of the port.

    Attributes:
        far: how far the two are apart, relative to scale.
        axes: the axes of both, as the notation has them; empty for the same.
    """

    source: Point
    far: float
    axes: tuple[str, str] = ("", "")


def with_returned(
    table: Table,
    reference: Side,
    port: Side,
    theirs: Mapping[str, Tensor],
    ours: Mapping[str, Tensor],
    random: Collection[str] = (),
) -> tuple[Table, Returned]:
    """The table with probes for what the port returns, inferred from one batch.

    Args:
        table: its [probes] may compare outputs of the model already; these stay as they are. A line whose left side
            the reference does not have, as after ``--architecture``, compares none.
        reference, port: in float64, with at least one case; the first is run.
        theirs, ours: what the reference and the port return in that case, by name; empty for a lone tensor's name.
        random: parameters of the port that hold random values: what depends on them is compared with nothing.

    Returns:
        The table, and how the outputs were paired.

    Raises:
        VerifyError: a side fails on the case.
    """
    ours = {name: one for name, one in ours.items() if one.is_floating_point()}
    theirs = {name: one.double() for name, one in theirs.items() if one.is_floating_point()}
    probes = [rule for rule in table.probes if _has_counterpart(rule, reference, table.prefix, theirs)]
    roots = [one for rule in probes for one in rule.targets if str(one.name) == ROOT and one.output not in INNER]
    given = {one.output for one in roots}
    known = {name for name in ours if name in given or (name in {"", "0"} and given & {"", "0"})}
    loose = _depending(port, ours, random) - known
    open_ = {name: one.detach().double() for name, one in ours.items() if name not in known | loose}
    fits = _Fits(open_, theirs, reference, table, port)
    matches = fits.by_name()
    for more in (fits.by_value, fits.by_probe, fits.inside, fits.by_shape):
        matches |= more({name: one for name, one in open_.items() if name not in matches}, matches)
    rules = dict(_rules(matches))
    matches = {name: one for name, one in matches.items() if name in rules}
    used = {one.source for one in matches.values()}
    made = replace(table, returned=tuple(rules.values()))
    return made, Returned(
        pairs={name or "output": one.source for name, one in matches.items()},
        alone=tuple(_shaped(name, one) for name, one in ours.items() if name not in known | set(matches)),
        missing=tuple(name for name in theirs if _point(name) not in used and name and not given),
        given=tuple(name or "output" for name in ours if name in known),
        stop=None if known else _stop(reference, [one.source for one in matches.values()]),
    )


def _has_counterpart(rule: Rule, reference: Side, prefix: str, theirs: Mapping[str, Tensor]) -> bool:
    """Whether the reference has what is on the left of a line of [probes]: an output, or a module if it has such."""
    paths = {path for path, _ in reference.module.named_modules()} - {""}
    for one in rule.sources:
        path, output = str(one.name), one.output
        if path != ROOT:
            known = (
                not paths or "{" in path or not {path, path.removeprefix(prefix), f"{prefix}{path}"}.isdisjoint(paths)
            )
        elif output.isdigit():
            known = int(output) < len(theirs)
        else:
            known = not output or output in INNER or output in theirs
        if not known:
            return False
    return True


def _stop(reference: Side, sources: Sequence[Point]) -> Stop | None:
    """The place where a port ends whose outputs are these points of the reference."""
    paths = {module_of(point) for point in sources}
    weighed = {
        path for path, part in reference.module.named_modules() if any(True for _ in part.parameters(recurse=False))
    }
    if not paths or ROOT in paths or not weighed:
        return None
    stop, behind = "", dict[str, None]()

    def visit(point: Point, value: Tensor) -> None:
        nonlocal stop
        path = module_of(point)
        if path in paths:
            stop = path
            behind.clear()
        elif path in weighed and not any(one.startswith(f"{path}.") for one in paths):
            behind[path] = None

    reference.run(0, visit, wanted=reference.places)
    return Stop(point=stop, weighed=tuple(behind)) if stop else None


def _depending(port: Side, before: Mapping[str, Tensor], random: Collection[str]) -> set[str]:
    """The outputs that change when these parameters do; the port is a copy that nobody else runs."""
    if not random:
        return set()
    parameters = dict(port.module.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name in random:
            if name in parameters:
                drawn = torch.randn_like(parameters[name])
                parameters[name].data = parameters[name] + drawn  # its memory may be the owner's
    after = port.returned(0)
    return {name for name, one in before.items() if name not in after or not torch.equal(one, after[name])}


def _rules(matches: Mapping[str, _Match]) -> Iterator[tuple[str, Rule]]:
    """A line of [probes] for each output that one can be written for.

    Each is read by itself: several may be one tensor of the reference.
    """
    for name, one in matches.items():
        left = one.source + (f" [{one.axes[0]}]" if one.axes[0] else "")
        right = _point(name) + (f" [{one.axes[1]}]" if one.axes[1] else "")
        text = f'[mapping]\nname = "returned"\n[tensors]\n[probes]\n{json.dumps(left)} = {json.dumps(right)}'
        try:
            (rule,) = parse_table(text, where=WHERE).probes
        except TableError:  # one of several parts, such as a head, of what the reference has in one
            continue
        yield name, replace(rule, where=WHERE)


def _point(name: str) -> Point:
    return f"{ROOT}{ARROW}{name}" if name else ROOT


def _shaped(name: str, value: Tensor) -> str:
    return f"{name or 'output'} {list(value.shape)}"


def _telling(name: str) -> set[str]:
    words = {word for word in re.split(r"[^a-z]+", name.lower()) if word} - GENERIC
    number = ".".join(re.findall(r"\d+", name))
    return {f"{word}{number}" for word in words}


class _Fits:
    """The outputs of the reference that each output of the port may be.

    Args:
        table: its [probes].
    """

    def __init__(
        self, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], reference: Side, table: Table, port: Side
    ) -> None:
        self._reference, self._table, self._port = reference, table, port
        self._inputs = reference.arguments[0]
        self._places = list(theirs)
        self._order = list(ours)
        every = {
            name: {other: self._best(_point(other), one, value) for other, one in theirs.items()}
            for name, value in ours.items()
        }
        self._fitting = {
            name: {other: one for other, one in found.items() if one is not None} for name, found in every.items()
        }

    def by_name(self) -> dict[str, _Match]:
        """Outputs of equal names, or whose names share a telling word with one output of the reference only."""
        found: dict[str, _Match] = {}
        for name, fitting in self._fitting.items():
            words = _telling(name)
            shared = [one for other, one in fitting.items() if words & _telling(other)]
            if name in fitting and name:
                found[name] = fitting[name]
            elif name in self._places and _NAMED.match(name):  # its shape is another: reported as a difference
                found[name] = _Match(_point(name), math.inf)
            elif len(shared) == 1 and shared[0].source not in {one.source for one in found.values()}:
                found[name] = shared[0]
        return found

    def by_value(self, ours: Mapping[str, Tensor], taken: Mapping[str, _Match]) -> dict[str, _Match]:
        """Outputs that are near one of the reference's in value."""
        found: dict[str, _Match] = {}
        used = {one.source for one in taken.values()}
        for name in ours:
            some = [one for one in self._fitting[name].values() if one.far <= NEAR]
            near = min(some, key=lambda one: (one.source in used, one.far), default=None)
            if near is not None:
                found[name] = near
                used.add(near.source)
        return found

    def by_probe(self, ours: Mapping[str, Tensor], taken: Mapping[str, _Match]) -> dict[str, _Match]:
        """Outputs that are what a probed part of the port gives, in another layout that the table states for it."""
        found: dict[str, _Match] = {}
        if not ours or any(one.is_meta for one in ours.values()):
            return found
        rules = [
            rule
            for rule in self._table.probes
            if len(rule.sources) == len(rule.targets) == 1 and _axes(rule.sources[0]) != _axes(rule.targets[0])
        ]

        def visit(point: Point, value: Tensor) -> None:
            for name, one in ours.items():
                if value.shape != one.shape or split(point)[1] > 1 or not torch.equal(value.detach().double(), one):
                    continue
                for rule in rules:
                    for source in self._sources(rule, point):
                        found[name] = _Match(source, 0.0, (_axes(rule.sources[0]), _axes(rule.targets[0])))

        self._port.run(0, visit)
        return found

    def _sources(self, rule: Rule, point: Point) -> Iterator[Point]:
        """The reference's point that a rule pairs with one of the port's."""
        for name in dict.fromkeys((point, f"{self._table.target_prefix}{point}")):
            bound = rule.targets[0].key.read(name)
            if bound is not None:
                yield rule.sources[0].key.spell(bound)

    def inside(self, ours: Mapping[str, Tensor], taken: Mapping[str, _Match]) -> dict[str, _Match]:
        """Outputs that equal what some module of the reference computes, as a list of hidden states does."""
        found: dict[str, _Match] = {}
        sizes = {one.numel() for one in ours.values()}
        if not ours or any(one.is_meta for one in ours.values()):
            return found

        def visit(point: Point, value: Tensor) -> None:
            if split(point)[1] > 1 or not value.is_floating_point() or value.numel() not in sizes:
                return
            for name, one in ours.items():
                best = self._best(point, value.double(), one) if name not in found else None
                if best is not None and best.far <= EQUAL:
                    found[name] = best

        self._reference.run(0, visit, wanted=self._reference.places)
        return found

    def by_shape(self, ours: Mapping[str, Tensor], taken: Mapping[str, _Match]) -> dict[str, _Match]:
        """The others, with the reference's output of their shape: the one at their place, or the nearest."""
        found: dict[str, _Match] = {}
        for name in ours:
            used = {one.source for one in (*taken.values(), *found.values())}
            whole = [one for one in self._fitting[name].values() if "|" not in one.axes[0]]  # a cut has to fit by value
            free = [one for one in whole if one.source not in used]
            place = self._order.index(name)
            at_place = [one for one in free if place < len(self._places) and one.source == _point(self._places[place])]
            if free:
                found[name] = at_place[0] if at_place else min(free, key=lambda one: one.far)
        return found

    def _best(self, point: Point, reference: Tensor, port: Tensor) -> _Match | None:
        """The way to lay the one out as the other that brings them nearest; None where no way fits."""
        best: _Match | None = None
        seen = attended(self._inputs, point, tuple(reference.shape))
        for axes, lay in layouts(reference.shape, port.shape):
            far = _far(lay(reference), port, None if seen is None else lay(seen))
            if best is None or far < best.far:
                best = _Match(point, far, axes)
            if far <= EQUAL:
                break
        return best


def _axes(term: Term) -> str:
    """A term's axes, without the brackets."""
    return "" if term.axes is None else str(term)[str(term).rindex(" [") + 2 : -1]


def _far(expected: Tensor, value: Tensor, seen: Tensor | None) -> float:
    """The largest difference at the places that count, relative to scale; infinite where there are no values."""
    if expected.is_meta or value.is_meta:
        return math.inf
    if seen is not None:
        expected, value = expected[seen], value[seen]
    if not expected.numel():
        return 0.0
    scale = float(expected.abs().max())
    far = float((expected - value).abs().max()) / (scale or 1.0)
    return math.inf if math.isnan(far) else far


Lay = Callable[[Tensor], Tensor]


def layouts(reference: Sequence[int], port: Sequence[int]) -> Iterator[tuple[tuple[str, str], Lay]]:
    """The ways in which the axes of one shape may be those of the other: in another order, merged, or cut.

    Yields:
        The axes of both sides in the notation, empty where they are the same, and what lays a tensor of the one shape
        out as the other.

    >>> [axes for axes, _ in layouts((2, 3, 4), (3, 2, 4))], [axes for axes, _ in layouts((2, 3, 4), (6, 4))]
    ([('a b c', 'b a c')], [('a b c', '(a b) c'), ('a b c', '(b a) c')])
    >>> [axes for axes, _ in layouts((2, 3, 4), (2, 4))]
    [('a (_rest|1) c', 'a c'), ('a (1|_rest) c', 'a c')]
    """
    reference, port = tuple(reference), tuple(port)
    if reference == port:  # exchanged axes of one size, as of attention's queries and keys, are a mistake
        yield ("", ""), lambda one: one
        return
    if len(reference) > MOST_AXES:
        return
    letters = "abcde"[: len(reference)]
    if math.prod(reference) != math.prod(port):
        for axis in range(1, len(reference)):  # a batch is not cut
            yield from _cut(reference, port, axis, letters)
        return
    for order in permutations(range(len(reference))):
        groups = _grouped([reference[place] for place in order], port)
        if groups is None:
            continue
        left = " ".join("1" if size == 1 else letter for letter, size in zip(letters, reference, strict=True))
        right = " ".join(_axis([letters[order[one]] for one in group]) for group in groups)
        yield (left, right), partial(_laid, order=order, shape=port)


def _cut(
    reference: tuple[int, ...], port: tuple[int, ...], axis: int, letters: str
) -> Iterator[tuple[tuple[str, str], Lay]]:
    """The last places of an axis, such as the last position's logits, and the first ones.

    One place may be kept as an axis or without it; of several, the number of those that are left out is the constant.
    """
    before, after = reference[:axis], reference[axis + 1 :]
    size, alone = reference[axis], port == before + after
    kept = 1 if alone else port[axis] if len(port) == len(reference) else 0
    if not 0 < kept < size or not (alone or port == (*before, kept, *after)):
        return
    left = ["1" if one == 1 else letter for letter, one in zip(letters, reference, strict=True)]
    name, rest = ("1", "_rest") if kept == 1 else (letters[axis], f"_{size - kept}")
    right = [*left[:axis], *([] if alone else [name]), *left[axis + 1 :]]
    for part, start in ((f"({rest}|{name})", size - kept), (f"({name}|{rest})", 0)):
        lay = partial(torch.narrow, dim=axis, start=start, length=kept)
        axes = " ".join([*left[:axis], part, *left[axis + 1 :]]), " ".join(right)
        yield axes, partial(_narrowed, lay=lay, shape=port)


def _narrowed(value: Tensor, *, lay: Lay, shape: Sequence[int]) -> Tensor:
    return lay(value).reshape(*shape)


def _laid(value: Tensor, *, order: Sequence[int], shape: Sequence[int]) -> Tensor:
    return value.permute(*order).reshape(*shape) if order else value.reshape(*shape)


def _grouped(sizes: Sequence[int], wanted: Sequence[int]) -> list[list[int]] | None:
    """Group neighbouring axes so that each group has a wanted size; axes of one element are left out."""
    groups: list[list[int]] = []
    place = 0
    for size in wanted:
        group: list[int] = []
        product = 1
        while product < size and place < len(sizes):
            if sizes[place] != 1:
                group.append(place)
            product *= sizes[place]
            place += 1
        if product != size:
            return None
        groups.append(group)
    return groups if all(one == 1 for one in sizes[place:]) else None


def _axis(letters: Sequence[str]) -> str:
    return "1" if not letters else letters[0] if len(letters) == 1 else f"({' '.join(letters)})"
