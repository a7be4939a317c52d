"""Verifying a model that is larger than memory: all passes go through it side by side, one probe at a time.

What a pass needs of a layer is read when it gets there (:mod:`porting.tracing.lazy_weights`), and the others are there
at the same time: each part of the files is read from disk once, and the reference's activations are forgotten as soon
as everybody has been measured by them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from porting.checkpoint import Checkpoint
from porting.errors import Code, Fault, Message, Option, VerifyError
from porting.plan.align import Step
from porting.plan.config import sizes
from porting.plan.move import compute_whole, forward
from porting.plan.plan import Plan
from porting.printable import dtype_name
from porting.reporting.outcome import Cost, Shown, Unseen
from porting.reporting.report import Report
from porting.reporting.scope_text import never_ran
from porting.tables import chosen_for
from porting.target import named_tensors
from porting.tracing.code_coverage import Executed
from porting.tracing.lazy_weights import with_lazy_weights
from porting.tracing.lockstep import Lockstep
from porting.tracing.measure import Anchor, Error, finite, pooled
from porting.tracing.provenance import ProvenanceRecorder
from porting.tracing.running import Clock, Side, peak, versions
from porting.tracing.trace import Point, Visit
from porting.trials.inputs import Case
from porting.trials.pairing import Pairing, pair, refuse_unknown
from porting.trials.returned import with_returned
from porting.trials.scope import Scope
from porting.verification.batches import make_batches
from porting.verification.compare import ALONE, END, Comparison, Errors, Progress, Tier
from porting.verification.compared_models import ComparedModels
from porting.verification.coverage import reached, unseen
from porting.verification.reference import choices, load_reference
from porting.verification.references import LiveReference, port_side
from porting.verification.subject import prepare_lazily, stored_dtype, warned, writers

MakeSide = Callable[[torch.dtype, bool], Side]
"""A side of its own for a pass: its dtype, and whether its weights are hollow, for shapes only."""


class Streamed(Comparison):
    """A comparison in which nothing waits in memory for a later pass."""

    def together(
        self, reference: MakeSide, port: MakeSide, dtypes: Sequence[torch.dtype], tell: Callable[[int, int], None]
    ) -> None:
        """Run every pass that :class:`Comparison` runs one after the other.

        Args:
            tell: called with how many of the reference's probes are done, and how many there are.

        Raises:
            VerifyError: a pass fails, the probes do not fit, or the reference has NaN or infinite values.
        """
        hollow = port(torch.float64, True)
        self._pair(reference(torch.float64, True), hollow)
        convoy = Lockstep()
        views = [(dtype, view) for dtype in dtypes for view in (END, ALONE)]
        ours: dict[tuple[torch.dtype, str], Errors] = {one: {} for one in views}
        theirs: dict[tuple[torch.dtype, str], Errors] = {one: {} for one in views}
        ends: Errors = {}
        ports: list[Side] = []
        self.executed = Executed(hollow.module)
        total, done = sum(len(pairing.compared) for pairing in self.pairings), Counter[str]()

        def told() -> None:
            done["probes"] += 1
            tell(done["probes"], total)

        for case, pairing in enumerate(self.pairings):
            relay = Relay(convoy, pairing, references=len(views), ports=2 + len(views))
            self.exact.append(relay)
            self.anchors.append(Anchors(relay, pairing))
            convoy.add(partial(self._lead, reference(torch.float64, False), case, relay, told), leads=True)
            whole, apart = (relay.followed(port(torch.float64, False), port=True) for _ in range(2))
            ports += [whole, apart]
            convoy.add(partial(self._watched, whole, case, ends))
            convoy.add(partial(self._isolated, apart, case, None))  # gradients would keep every layer's weights
            for dtype, view in views:
                alone, key = view == ALONE, (dtype, view)
                own, other = (
                    relay.followed(port(dtype, False), port=True),
                    relay.followed(reference(dtype, False), port=False),
                )
                convoy.add(partial(self._measure_port, own, case, alone, ours[key]))
                convoy.add(partial(self.measure_reference, other, case, alone, theirs[key]))
        convoy.run()
        self._tell_lowered()
        for side in ports:
            self._told("the port", side)
        self._meaning[END] = {point: pooled(errors).largest for point, errors in ends.items()}
        for dtype in dtypes:
            tier = Tier(dtype)
            for view in (END, ALONE):
                tier.port[view] = _pooled(ours[dtype, view])
                tier.reference[view] = _pooled(theirs[dtype, view])
            self._tiers.append(tier)

    def _watched(self, port: Side, case: int, ends: Errors) -> None:
        """The port in float64, end to end: which of its own instructions run is watched, in this pass's thread."""
        if self.executed is not None:
            with self.executed.watched():
                self._measure_port(port, case, False, ends)

    def _pair(self, reference: Side, port: Side) -> None:
        """Pair the probes by their shapes, which a pass without values gives."""
        for case in range(len(reference.arguments)):
            shapes = _shapes_of(reference, case), _shapes_of(port, case)
            self.pairings.append(pair(self._table, *shapes, self.sizes))

    def _lead(self, reference: Side, case: int, relay: Relay, told: Callable[[], None]) -> None:
        """The reference in float64: its activations go to the others, and it waits until they have gone as far."""
        watch = ProvenanceRecorder()
        wanted = set(self.pairings[case].compared)

        def visit(point: Point, value: Tensor) -> None:
            span = watch.cut()
            if span.lowered:
                self._lowered[point] = span
            if point not in wanted:
                return
            if not finite(value):
                message = f"the reference's {point} has NaN or infinite values"
                hint = Message(
                    "without ", Option("stream", True), " such a probe is left out, and the others are compared"
                )
                raise VerifyError(Fault(code=Code.NO_REFERENCE, where=point, message=message, hint=hint))
            told()
            relay.publish(point, value.detach().clone(memory_format=torch.contiguous_format))
            watch.cut()

        with watch:
            reference.run(case, visit)
        self._told("the reference", reference)


class Relay(Mapping[Point, Tensor]):
    """The reference's activations on their way: who asks for one that is not there yet waits for it.

    Args:
        references, ports: how many passes of each side follow.
    """

    def __init__(self, convoy: Lockstep, pairing: Pairing, *, references: int, ports: int) -> None:
        self._convoy = convoy
        self._pairing = pairing
        self._here: dict[Point, Tensor] = {}
        self._needed = Counter(dict.fromkeys(pairing.compared, references))
        for one in pairing.pairs.values():
            self._needed.update(dict.fromkeys(one.sources, ports))

    def publish(self, point: Point, value: Tensor) -> None:
        """Hand an activation on, and let the others go as far as they can."""
        self._here[point] = value
        self._convoy.wait()

    def __getitem__(self, point: Point) -> Tensor:
        """The activation; the pass that asks waits until it is there."""
        if point not in self._here:
            self._convoy.wait(lambda: point in self._here)
        return self._here[point]

    def __iter__(self) -> Iterator[Point]:
        """The points that are present now."""
        return iter(self._here)

    def __len__(self) -> int:
        """How many are here now."""
        return len(self._here)

    def needs(self, point: Point) -> bool:
        """Whether some pass has still to be measured by it."""
        return self._needed[point] > 0

    def followed(self, side: Side, *, port: bool) -> Side:
        """The same side, which says when it has left a point behind."""
        return Follower(**vars(side), relay=self, port=port)

    def leave(self, point: Point, *, port: bool) -> None:
        """A pass has been measured at a point of the port, or of the reference."""
        for source in self._pairing.pairs[point].sources if port else (point,):
            self._needed[source] -= 1
            if not self._needed[source]:
                self._here.pop(source, None)


class Anchors(Mapping[Point, Anchor]):
    """The values that the port's activations are measured against, made from the relay's and deleted with them."""

    def __init__(self, relay: Relay, pairing: Pairing) -> None:
        self._relay = relay
        self._pairing = pairing
        self._made: dict[Point, Anchor] = {}

    def __getitem__(self, point: Point) -> Anchor:
        """The anchor; the pass that asks waits until the reference has been there."""
        if point not in self._made:
            made = Anchor.of(self._pairing.pairs[point].carry(self._relay))
            for past in [past for past in self._made if not self._needed(past)]:
                del self._made[past]
            self._made[point] = made
        return self._made[point]

    def _needed(self, point: Point) -> bool:
        return any(self._relay.needs(source) for source in self._pairing.pairs[point].sources)

    def __iter__(self) -> Iterator[Point]:
        """The points that have been made."""
        return iter(self._made)

    def __len__(self) -> int:
        """How many are made."""
        return len(self._made)


@dataclass(kw_only=True)
class Follower(Side):
    """A side whose passes tell a relay what they have left behind."""

    relay: Relay
    port: bool

    def visitor(self, visit: Visit) -> Visit:
        """Return a visitor that tells the relay of each value that it has seen."""

        def visited(point: Point, value: Tensor) -> Tensor | None:
            instead = visit(point, value)
            self.relay.leave(point, port=self.port)
            return instead

        return visited


def _shapes_of(side: Side, case: int) -> dict[Point, tuple[int, ...]]:
    found: dict[Point, tuple[int, ...]] = {}

    def visit(point: Point, value: Tensor) -> None:
        found[point] = tuple(value.shape)

    side.run(case, visit)
    return found


def _pooled(errors: Errors) -> dict[Point, Error]:
    return {point: pooled(found) for point, found in errors.items()}


def lazy_port(module: nn.Module, plan: Plan, checkpoint: Checkpoint, dtype: torch.dtype, *, hollow: bool) -> nn.Module:
    """A copy of a port without weights, whose weights the plan makes of the checkpoint's where they are used.

    In float64, what the table computes is computed in float64.
    """
    tensors = dict(named_tensors(module))
    sources: dict[int, Callable[[], Tensor]] = {}
    for step in plan.steps:
        for name in step.targets:
            sources[id(tensors[name])] = partial(_moved, step, name, plan, checkpoint, dtype == torch.float64)
    for recipe in plan.made:
        exact = dtype == torch.float64 and recipe.work.is_floating_point
        made = recipe.in_dtype(dtype) if exact else recipe
        sources[id(tensors[recipe.name])] = partial(compute_whole, made, checkpoint.read)
    return with_lazy_weights(module, dtype, sources, hollow=hollow)


def _moved(step: Step, name: str, plan: Plan, checkpoint: Checkpoint, exact: bool) -> Tensor:
    """One target tensor of a step."""

    def read(source: str) -> Tensor:
        value = checkpoint.read(source)
        return value.double() if exact and not step.rule.exact else value

    return next(value for target, value in forward(step, plan.targets, read, plan.arithmetic(step)) if target == name)


def verify_streamed(
    given: ComparedModels,
    *,
    by_default: bool,
    architecture: str | None,
    dtypes: Sequence[torch.dtype],
    seed: int,
    longest: int,
    fresh: bool,
    trust: bool,
    inputs: Sequence[Case] | None,
    tell: Progress,
) -> Report:
    """Prove a port with every pass side by side; the arguments are those of :func:`porting.verification.verify`.

    Raises:
        CheckpointError, TableError, PlanError, TargetError, VerifyError: as there.
    """
    begun = time.perf_counter()
    tell("loading", 0, 1)
    checkpoint, table = given.checkpoint, given.table
    with chosen_for(None if by_default else table, given.into, table):
        subject = prepare_lazily(checkpoint, given.into, table, architecture, fresh=fresh, trust=trust)
    plan = subject.plan
    stored = load_reference(checkpoint, subject.reference, stored_dtype(checkpoint), untouched=True)
    theirs = LiveReference(stored, f"transformers.{subject.reference}")
    refuse_unknown(table, lambda terms: theirs.points(terms, table.prefix), subject.module)
    running = time.perf_counter()
    batch = make_batches(
        table,
        checkpoint,
        plan.config,
        inputs,
        seed=seed,
        longest=longest,
        choices=choices(subject.reference),
        reference=theirs,
    )
    cases, clock = batch.cases, Clock()
    values = {id(one): one.detach for one in (*stored.parameters(), *stored.buffers())}

    def reference(dtype: torch.dtype, hollow: bool) -> Side:
        wanted = theirs.points((term for rule in table.compared for term in rule.sources), table.prefix)
        module = with_lazy_weights(stored, dtype, values, hollow=hollow)  # cast where they are used
        side = theirs.as_it_is(cases, module, dtype, wanted=wanted, clock=clock)
        return replace(side, seed=None)  # the passes take turns, and share the generator

    def port(dtype: torch.dtype, hollow: bool) -> Side:
        module = lazy_port(subject.module, plan, checkpoint, dtype, hollow=hollow)
        return replace(port_side(module, dtype, table, cases, clock), seed=None)

    shapes = reference(torch.float64, True)
    ours = port(torch.float64, True)
    table, returned = with_returned(table, shapes, ours, shapes.returned(0), ours.returned(0))
    comparison = Streamed(table, sizes(table, checkpoint.config)[0])
    comparison.together(reference, port, dtypes, partial(tell, "all passes side by side"))
    found = reached(port(torch.float64, True), comparison.executed, comparison.conditions, comparison.ran)
    copied = (*(name for step in plan.steps for name in step.targets), *plan.contents)
    seen = Shown(activation={}, copy=copied, nothing=(), made=plan.contents)
    ended = time.perf_counter()
    return Report(
        source=checkpoint.location,
        reference=theirs.title,
        port=f"{type(subject.module).__module__}.{type(subject.module).__qualname__}",
        table=table.where,
        probes=tuple(
            replace(probe, rules=writers(plan, probe.span)) if probe.guilty else probe for probe in comparison.probes()
        ),
        skipped=comparison.skipped,
        shown=seen,
        noise=comparison.noise,
        cases=tuple(case.name for case in cases),
        scope=Scope(dtypes=("float64", *(dtype_name(one) for one in dtypes)), returned=returned),
        unseen=(
            Unseen("which weights reach a probe", "a streamed run does not measure it"),
            *unseen(cases, batch.fields, batch.withheld, whole=batch.whole),
            *found.unseen,
        ),
        branches=found.branches,
        seed=seed,
        environment=versions(),
        warnings=(*warned(subject), *comparison.warnings),
        notes=tuple(comparison.notes),
        idle=never_ran(subject.module, comparison.ran, seen),
        cost=Cost(
            loading=running - begun,
            forwards=clock.seconds,
            total=ended - running,
            passes=clock.passes,
            memory=peak(),
        ),
        approximate=table.approximate,
    )
