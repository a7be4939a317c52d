"""Points of the reference and points of the port, paired by the table's [probes]."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor, nn

from porting.errors import Code, Fault, VerifyError, nearest
from porting.notation.rule import Rule, Term
from porting.notation.table import Table
from porting.plan.align import Alignment, Shape, Step, align
from porting.plan.matching import Matcher
from porting.plan.move import gather
from porting.tracing.measure import Anchor
from porting.tracing.trace import INNER, ROOT, Point, is_returned, numbered, points, split
from porting.trials.padding import attended

EQUAL_NAMES = "the table of equal names"
"""The place of a table that nobody wrote: see :func:`porting.verification.same_names.same_names`."""


@dataclass(frozen=True)
class Pair:
    """One point of the port and what it is compared with.

    Attributes:
        step: the move that makes the port's value from the reference's.
        point: the port's point, as the step names it.
        call: the number of the call that both belong to.
        whole: whether the reference fills all of the port's value.
    """

    step: Step
    point: Point
    call: int
    shape: Shape
    whole: bool

    @property
    def sources(self) -> tuple[Point, ...]:
        """The reference's points."""
        copies = [copy for copy in self.step.copies if copy.target == self.point]
        return tuple(dict.fromkeys(numbered(copy.source, self.call) for copy in copies))

    def fits(self, value: Tensor) -> bool:
        """Whether a value has the shape that is compared; with an expert it depends on what the router rounds to."""
        return tuple(value.shape) == tuple(self.shape)

    def carry(self, trace: Mapping[Point, Tensor], own: Tensor | None = None) -> Tensor:
        """The reference's value as the port should have it; a view where the layout allows it.

        Args:
            own: the port's own value, kept in parts that have no counterpart; without it they are zeros.
        """
        copies = [copy for copy in self.step.copies if copy.target == self.point]

        def base(point: Point) -> Tensor:
            return torch.zeros(self.shape, dtype=torch.float64) if own is None else own.detach()

        return gather(copies, self.shape, lambda point: trace[numbered(point, self.call)], None, base)

    def anchor(self, trace: Mapping[Point, Tensor], inputs: Mapping[str, Tensor], own: Tensor | None = None) -> Anchor:
        """The value that the port's is measured against, at the places that are not padding.

        Args:
            inputs: what the reference was given: its masks say what is padding.
            own: the port's own value, kept in parts that have no counterpart.
        """
        anchor = Anchor.of(self.carry(trace), self._attended(trace, inputs))
        if self.whole or own is None:
            return anchor
        return anchor.having(self.carry(trace, own.double()))

    def _attended(self, trace: Mapping[Point, Tensor], inputs: Mapping[str, Tensor]) -> Tensor | None:
        """The places of the port's value that are not padding; None where none is."""
        shapes = {point: tuple(trace[point].shape) for point in self.sources}
        masks = {point: attended(inputs, point, shape) for point, shape in shapes.items()}
        if all(mask is None for mask in masks.values()):
            return None
        whole = {
            point: torch.ones(shapes[point], dtype=torch.uint8) if mask is None else mask.to(torch.uint8).contiguous()
            for point, mask in masks.items()
        }
        return self.carry(whole) != 0

    def compared(self, value: Tensor) -> Tensor:
        """The port's value with zeros in the parts that have no counterpart: nothing is compared there."""
        if self.whole:
            return value
        kept = torch.zeros(self.shape, dtype=value.dtype)
        for copy in self.step.copies:
            if copy.target == self.point:
                kept.as_strided(copy.sizes, copy.target_strides, copy.target_offset).fill_(1.0)
        return value * kept


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """The pairs of points of the port and of the reference, for inputs of one shape.

    Attributes:
        pairs: by the port's point, in the reference's order of execution.
        skipped: points without a counterpart that was reached.
        misfits: lines of the table whose probes do not fit, and how.
        other_shapes: outputs of the port that have another shape than the reference's here, and how.
    """

    pairs: Mapping[Point, Pair]
    skipped: tuple[Point, ...]
    misfits: Mapping[str, str] = field(default_factory=dict)
    other_shapes: tuple[str, ...] = ()

    @property
    def compared(self) -> list[Point]:
        """The reference's points that are compared."""
        return list(dict.fromkeys(point for pair in self.pairs.values() for point in pair.sources))


def pair(
    table: Table, reference: Mapping[Point, Shape], port: Mapping[Point, Shape], sizes: Mapping[str, int]
) -> Pairing:
    """Pair what was seen on both sides.

    Args:
        table: its [probes] and prefixes.
        reference, port: the shapes of the activations of one case, in order of execution.
        sizes: sizes of indices, from the table's [sizes].

    Raises:
        VerifyError: shapes do not fit, a probe is claimed twice, or nothing at all is paired.
    """
    pairs: dict[Point, Pair] = {}
    skipped: list[Point] = []
    faults: list[Fault] = []
    misfits: dict[str, str] = {}
    other_shapes: list[str] = []
    first: Alignment | None = None
    roots = [rule for rule in table.probes if _of_root(rule)]
    groups = [table.probes, *((rule,) for rule in table.returned)]  # one of these may read what another reads
    for call, rules in product(sorted({split(point)[1] for point in (*reference, *port)}), groups):
        theirs, ours = _of_call(reference, call), _of_call(port, call)
        ours = {name: shape for name, shape in ours.items() if math.prod(shape) or name in theirs}
        if table.where == EQUAL_NAMES:  # nobody has said that these are the same: parts may do their work otherwise
            parts = [name for name in theirs if not is_returned(name) and name in ours]
            others = [name for name in parts if theirs[name] != ours[name]]
            theirs = {name: shape for name, shape in theirs.items() if name not in others}
            ours = {name: shape for name, shape in ours.items() if name not in others}
            skipped += [numbered(name, call) for name in others]
        found = align(rules, theirs, ours, sizes=sizes, prefix=table.prefix, target_prefix=table.target_prefix)
        if found.faults and rules is table.probes and (roots or table.returned):  # what is returned decides
            inner = {rule.where for rule in table.probes if not _of_root(rule)}
            unfit = {fault.where: fault.message for fault in found.faults if fault.where in inner}
            if unfit:
                misfits = {**unfit, **misfits}
                found, others = _without_misfits(table, theirs, ours, sizes, inner)
                skipped += [numbered(name, call) for name in others]
        first = first or found
        if rules is table.probes:
            faults += found.faults
        else:  # the rule was made from another batch, in which the shapes were the same
            other_shapes += [fault.message for fault in found.faults]
        for step in found.steps:
            for name in step.targets:
                covered = sum(copy.numel for copy in step.copies if copy.target == name)
                whole = covered == torch.Size(ours[name]).numel()
                pairs[numbered(name, call)] = Pair(step, name, call, ours[name], whole)
        lone = [name for one in (*found.unplaced, *found.unsourced) for name in one.names]
        skipped += [numbered(name, call) for name in lone]
    if faults:
        raise VerifyError(dict.fromkeys(faults))
    if not pairs:
        raise VerifyError(_nothing(table, first, list(port)))
    rank = {point: number for number, point in enumerate(reference)}
    order = sorted(pairs, key=lambda point: max(rank[one] for one in pairs[point].sources))
    return Pairing(
        pairs={point: pairs[point] for point in order},
        skipped=tuple(skipped),
        misfits=misfits,
        other_shapes=tuple(dict.fromkeys(other_shapes)),
    )


def _of_root(rule: Rule) -> bool:
    """Whether a probe compares what the port returns."""
    return any(str(term.name) == ROOT and term.output not in INNER for term in rule.targets)


def _without_misfits(
    table: Table,
    reference: Mapping[Point, Shape],
    port: Mapping[Point, Shape],
    sizes: Mapping[str, int],
    inner: Collection[str],
) -> tuple[Alignment, list[Point]]:
    """The probes that fit, one by one, and the port's points of those that do not, as where a port runs row by row.

    ``inner`` are the places in the table of the probes that may be left out.
    """
    left: dict[Point, Shape] = dict(port)
    while True:
        found = align(
            table.probes, reference, left, sizes=sizes, prefix=table.prefix, target_prefix=table.target_prefix
        )
        places = {one.where for one in found.faults if one.where in inner}
        wrong = [rule for rule in table.probes if rule.where in places]
        matcher = Matcher(((rule.targets[0].key, rule) for rule in wrong), table.target_prefix)
        gone = [point for point in left if wrong and matcher.read(point)]
        if not gone:
            return found, [point for point in port if point not in left]
        left = {point: shape for point, shape in left.items() if point not in gone}


def _of_call(points: Mapping[Point, Shape], call: int) -> dict[Point, Shape]:
    named = ((split(point), shape) for point, shape in points.items())
    return {name: shape for (name, number), shape in named if number == call}


def _nothing(table: Table, alignment: Alignment | None, port: list[Point]) -> Fault:
    if not table.probes:
        message = "the table has no [probes], so nothing says which activations to compare"
        hint = 'add some: "encoder.layer.{i}" = "layers.{i}"'
        return Fault(code=Code.NO_PROBES, where=table.where, message=message, hint=hint)
    message = "[probes] pairs no activation of the reference with one of the port"
    expected = [name for lone in alignment.unplaced for name in lone.expected][:1] if alignment else []
    hint = f"it expects {expected[0]!r} in the port" if expected else "none of its names was reached"
    hint = (nearest(expected[0], port) if expected else "") or hint
    return Fault(code=Code.NO_PROBES, where=table.where, message=message, hint=hint)


def refuse_unknown(table: Table, reference: Callable[[Sequence[Term]], list[Point]], port: nn.Module) -> None:
    """Refuse probes of modules that the port does not have: misspelled, they would compare nothing.

    A module that the reference lacks is no fault, since checkpoints of a family differ in their parts: the report says
    that it was not compared.

    Args:
        table: its [probes].

    Raises:
        VerifyError: there are such probes: all of them, with the nearest name.
    """
    faults = []
    for rule in table.probes:
        if points(rule.targets, port, table.target_prefix) or not reference(rule.sources):
            continue
        pattern = rule.targets[0].name
        name = pattern.spell(dict.fromkeys(pattern.indices, 0))
        hint = nearest(name, [path for path, _ in port.named_modules() if path]) or "take the probe out of [probes]"
        message = f"the port has no module '{pattern}' of the probe '{rule}'"
        faults.append(Fault(code=Code.NO_PROBES, where=rule.where, message=message, hint=hint))
    if faults:
        raise VerifyError(faults)
