"""One case in one dtype as the search for a cause sees it: the reference's tape, and what the port computed."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count, islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from porting.causes import dropout
from porting.causes.cause import Cause
from porting.causes.cause_matching import Search
from porting.causes.diverging import CLOSE, ROUNDED, Divergence, TensorIndex, divergence
from porting.causes.finding import APART, Candidate, Explained, Finding, Gap, Mark
from porting.causes.model_parts import ModelParts
from porting.causes.non_finite import Broken, FirstBroken
from porting.causes.passing_case import BothTapes, PassingCase
from porting.causes.repairs import RepairSearch, RepairSet
from porting.causes.replay import Rewrite, Stage, Values
from porting.causes.step_differences import describe, generic_path
from porting.causes.tape import Recorder, Ref, Tape
from porting.errors import VerifyError
from porting.reporting.outcome import Probe
from porting.target import assign, named_tensors
from porting.tracing.activations import Activations
from porting.tracing.calls import Kind
from porting.tracing.code_coverage import Executed
from porting.tracing.float64 import force_float64
from porting.tracing.measure import Anchor, error, finite
from porting.tracing.running import Clock, Side
from porting.tracing.torch_modes import FunctionMode
from porting.tracing.trace import EndOfPass, Point, is_inner, is_returned, like, output_of
from porting.trials.pairing import Pairing
from porting.verification.compare import Anchors, Comparison
from porting.verification.dense_experts import dense_experts

T = TypeVar("T")


CHANGED_CODE_FAILS = (
    VerifyError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
)
"""Errors that code with a trial change may raise."""

LARGE = 256 << 20
"""Bytes of a tensor that experts make which take all tokens; they take their own where it would be larger."""

CHANGED_PASS = 4
"""The pass of a changed port may take so many times the calls, and make tensors so many times as large."""


class PassCost(FunctionMode):
    """Counts the calls of torch's functions in a pass, and notes the size of the largest result.

    Args:
        usual: what a pass of the unchanged port takes; one that takes :data:`CHANGED_PASS` times as much is ended.

    Attributes:
        largest: bytes of the largest tensor.
    """

    def __init__(self, usual: PassCost | None = None) -> None:
        super().__init__()
        self._usual = usual
        self.calls = self.largest = 0

    @classmethod
    def most(cls, costs: Iterable[PassCost]) -> PassCost:
        """Return the most of each that some passes take."""
        found = cls()
        for one in costs:
            found.calls, found.largest = max(found.calls, one.calls), max(found.largest, one.largest)
        return found

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`.

        Raises:
            RuntimeError: the pass takes more than it may.
        """
        result = func(*args, **kwargs)
        self.calls += 1
        if type(result) is Tensor:
            self.largest = max(self.largest, result.nbytes)
        usual = self._usual
        if usual is not None and (
            self.calls > CHANGED_PASS * usual.calls or self.largest > CHANGED_PASS * usual.largest
        ):
            raise RuntimeError("a changed port takes far more calls or memory than the port itself")
        return result


@dataclass(frozen=True, kw_only=True)
class CauseCase:
    """One case in one dtype.

    Attributes:
        exact: the reference's float64 activations.
        pairing: which point of the port is compared with what.
        anchors: the exact activations in the port's layout.
    """

    reference: Side
    port: Side
    case: int
    exact: Mapping[Point, Tensor]
    pairing: Pairing
    anchors: Mapping[Point, Anchor]
    _searches: dict[tuple[Cause, ...], Search] = field(default_factory=dict)
    _gaps: dict[Point, Gap] = field(default_factory=dict)

    @classmethod
    def known(cls, comparison: Comparison, reference: Side, port: Side, case: int) -> CauseCase:
        """Make the case from one that was compared."""
        return cls(
            reference=reference,
            port=port,
            case=case,
            exact=comparison.exact[case],
            pairing=comparison.pairings[case],
            anchors=comparison.anchors[case],
        )

    @classmethod
    def new(cls, comparison: Comparison, reference: Side, port: Side, case: int) -> CauseCase:
        """Make a case that no comparison has seen, in float64."""
        exact, ends = reference.keep(case), port.keep(case)
        for point in [point for point, value in exact.items() if not finite(value)]:
            del exact[point]
        pairing = comparison.paired(exact, ends)
        given = reference.arguments[case]
        anchors = Anchors(pairing.pairs, exact, lambda pair: pair.anchor(exact, given))
        found = cls(reference=reference, port=port, case=case, exact=exact, pairing=pairing, anchors=anchors)
        found.__dict__["_ends"] = ends  # it was run just now
        return found

    @property
    def with_hidden_places(self) -> CauseCase:
        """The same case, where the places that a mask hides are compared as well."""
        anchors = {point: replace(anchor, seen=None) for point, anchor in self.anchors.items()}
        return replace(self, anchors=anchors, _searches={}, _gaps={})

    def search(self, causes: Sequence[Cause]) -> Search:
        """The search in this case."""
        key = tuple(causes)
        if key not in self._searches:
            self._searches[key] = Search(
                model_parts=self._anatomy,
                stage=self._stage,
                causes=causes,
                distance=lambda mark, altered: self._distance(mark.name, altered),
                target=lambda mark: self._target(mark.name),
            )
        return self._searches[key]

    def refutes(self, probe: Probe, candidate: Candidate, calls: Collection[tuple[str, str]]) -> bool:
        """Whether a candidate of another case's search fails to reproduce the port at a probe in this case.

        Args:
            calls: the module and the function of each call that the candidate alters in the other case.
        """
        if probe.port not in self._values or not _any_finite(self._values[probe.port]):
            return False
        mark, search = self._mark(probe), self.search(candidate.causes)
        return self._shows(candidate, calls) and not search.reproduces(mark, candidate)

    @torch.no_grad()
    def refutes_returned(self, candidate: Candidate, calls: Collection[tuple[str, str]], bound: float) -> bool:
        """Whether the reference with a candidate of another case's search does not return what the port does here."""
        if not all(point in self._ends and _any_finite(self._ends[point]) for point in self.outputs):
            return False
        ways = [way.rewrites for way in self.search(candidate.causes).again(candidate)] or [{}]
        return self._shows(candidate, calls) and not any(self.apart(way).largest <= max(bound, END) for way in ways)

    def _shows(self, candidate: Candidate, calls: Collection[tuple[str, str]]) -> bool:
        """Whether this case can tell anything of a candidate.

        It cannot if the code that it alters runs here and the entry does not recognise it: one position makes no table
        of sinusoids, for instance.
        """
        if self.search(candidate.causes).recognises(candidate):
            return True
        return {(call.module, call.name) for call in self._stage.tape.calls}.isdisjoint(calls)

    def depends_on_inputs(self, candidate: Candidate) -> bool:
        """Whether a candidate of this case's search alters what is computed from the inputs alone, or what is selected.

        These are masks, positions and token ids: what seems to be one mistake in some batches is another one in others.
        """
        tape = self._stage.tape

        def given(ref: Ref) -> bool:
            return not tape.learned(ref) and ref not in tape.weights and tape[ref].numel() > 1

        calls = [tape.calls[number] for number in candidate.rewrites]
        return any(call.name in SELECTING or any(given(ref) for ref in call.reads) for call in calls)

    def calls_of(self, candidate: Candidate) -> set[tuple[str, str]]:
        """The module and the function of each call that a candidate of this case's search alters."""
        calls = self._stage.tape.calls
        return {(calls[number].module, calls[number].name) for number in candidate.rewrites}

    def marks(self, probes: Sequence[Probe]) -> dict[Point, Mark]:
        """The probes that this case reaches."""
        return {probe.port: self._mark(probe) for probe in probes if probe.port in self._values}

    @torch.no_grad()
    def end_to_end(self, explained: Sequence[Explained], probes: Sequence[Probe]) -> bool:
        """Whether the reference with all these alterations at once gives what the port gives at every probe."""
        rewrites = {number: one for many in explained for number, one in many.rewrites.items()}
        try:
            altered = self._stage.whole(rewrites)
        except (RuntimeError, IndexError, ValueError):
            return False
        for probe in probes:
            own = self._ends.get(probe.port)
            if own is not None and probe.port in self.pairing.pairs and bool(torch.isfinite(own).any()):
                known = set(self.pairing.pairs[probe.port].sources)
                here = {name: value for name, value in altered.items() if name in known}
                far = self._distance(probe.port, here, self._ends).largest
                if not far <= max(probe.bound.end_to_end, END):
                    return False
        return True

    @cached_property
    def executed(self) -> Executed:
        """The part of the port's code that runs in this case."""
        seen = Executed(self.port.module)
        with seen.watched(), suppress(VerifyError):
            self.port.outputs(self.case)
        return seen

    @cached_property
    def outputs(self) -> tuple[Point, ...]:
        """The probes of what the model returns; the last one where there is none."""
        every = list(self.pairing.pairs)
        return tuple(one for one in every if is_returned(one)) or tuple(every[-1:])

    def apart(self, rewrites: Mapping[int, Rewrite]) -> Gap:
        """The distance, end to end, of the altered reference's output from the port's."""
        try:
            altered = self._stage.whole(rewrites)
        except (RuntimeError, IndexError, ValueError):
            return APART
        largest = Gap(0.0, 0.0)
        for point in self.outputs:
            here = {name: altered[name] for name in self.pairing.pairs[point].sources if name in altered}
            largest = max(largest, self._distance(point, here, self._ends), key=lambda one: one.largest)
        return largest

    def returned_elsewhere(self, point: Point, bound: float) -> list[str]:
        """What the port returns at a point, if it is another value of the reference: an output, or within it.

        Args:
            bound: what rounding explains, relative to scale.
        """
        own, tape = self._ends.get(point), self._tape
        if own is None or own.numel() < 2:
            return []
        marked = {ref: name for name, ref in tape.marks.items()}
        wanted = {tape.marks[name] for name in self.pairing.pairs[point].sources if name in tape.marks}
        found, more = list[str](), list[str]()
        for ref in TensorIndex(tape, close=max(bound, CLOSE)).like(own):
            value = tape[ref]
            if ref in wanted or value.shape != own.shape or not _same(own, value, self.anchors[point].seen, bound):
                continue
            users = tape.users(ref)
            read = [f"the input of {call.module}" for call in users if call.name in NORMS]
            more += [f"what {call.name.strip('_')} in {generic_path(call.module)} reads" for call in users]
            names = [str(output_of(marked[ref]))] if ref in marked and is_returned(marked[ref]) else []
            found += [*names, *read, describe(tape, ref, str)]
        return list(dict.fromkeys((*found, *more)))

    @property
    def rows(self) -> int:
        """How many rows each argument has; 0 where they have not as many."""
        counts = {len(one) for one in self.port.arguments[self.case].values() if one.ndim}
        return counts.pop() if len(counts) == 1 else 0

    def reference_given(self, inputs: Mapping[str, Tensor]) -> Mapping[Point, Tensor]:
        """What the reference computes from other inputs.

        Raises:
            VerifyError: it fails on them.
        """
        return replace(self.reference, arguments=[inputs]).keep(0)

    def apart_from(self, altered: Mapping[Point, Tensor]) -> float:
        """The distance, end to end, of the port's outputs from values of the reference."""
        left = 0.0
        for point in self.outputs:
            sources = self.pairing.pairs[point].sources
            if any(name not in altered for name in sources):
                return math.inf
            left = max(left, self._distance(point, {name: altered[name] for name in sources}, self._ends).largest)
        return left

    def moved(self, altered: Mapping[Point, Tensor]) -> float:
        """How far values of the reference are from its usual ones, at what the port returns."""
        pairs = (self.pairing.pairs[point] for point in self.outputs)
        return max(
            (
                float((altered[name].double() - self.exact[name]).abs().max() / self.exact[name].abs().max())
                for pair in pairs
                for name in pair.sources
            ),
            default=0.0,
        )

    def port_in_rows(self) -> Mapping[Point, Tensor]:
        """What the port returns for each row by itself, one after the other.

        Raises:
            VerifyError: it fails on a row.
            RuntimeError: what it returns for a row fits no other.
        """
        given = self.port.arguments[self.case]
        arguments = [
            {name: one[row : row + 1] if one.ndim else one for name, one in given.items()} for row in range(self.rows)
        ]
        side = replace(self.port, arguments=arguments)
        found = [side.record(row) for row in range(self.rows)]
        return {point: torch.cat([one[point] for one in found]) for point in self.outputs if point in found[0]}

    @property
    def size(self) -> int:
        """How many numbers the reference is given."""
        return sum(value.numel() for value in self.reference.arguments[self.case].values())

    @cached_property
    def end_to_end_difference(self) -> float:
        """The distance, end to end, of the port's outputs from the reference's."""
        return self.left_in(self._ends)

    def left_in(self, values: Mapping[Point, Tensor]) -> float:
        """The distance, end to end, of other values of the port's outputs from the reference's."""
        if any(point not in values for point in self.outputs):
            return math.inf
        return max(self._distance(point, {}, values).largest for point in self.outputs)

    def left_when_inverted(self, name: str, probes: Sequence[Probe]) -> float | None:
        """The port's difference end to end when a mask of True and False is inverted; None where it has none."""
        given = self.port.arguments[self.case]
        if name not in given or bool((given[name] == given[name].flatten()[0]).all()):
            return None
        other = replace(self.port, arguments=[{**given, name: given[name].logical_not()}])
        try:
            found = other.record(0)
        except VerifyError:
            return math.inf
        compared = [probe.port for probe in probes if probe.port in found and probe.port in self.pairing.pairs]
        return max((self._distance(point, {}, found).largest for point in compared), default=None)

    @torch.no_grad()
    def left_with(
        self,
        changed: AbstractContextManager[None],
        probes: Sequence[Probe],
        hopeless: Callable[[Point, float], bool] = lambda point, far: False,
        usual: PassCost | None = None,
    ) -> dict[Point, float]:
        """The difference of each probe, in isolation, while the port is altered.

        It may take some times as many calls of torch as the port does, and make tensors some times as large.

        Args:
            hopeless: called with each probe and how far it is off, as soon as that is known; True ends the pass.
            usual: what a pass of the port takes, if not what it takes in this case.

        Returns:
            How far each probe is off that the pass reaches; empty where it fails or was ended.
        """
        uncounted = replace(self, port=replace(self.port, clock=Clock()))
        usual = usual or self.cost
        wanted = {probe.port for probe in probes}
        left: dict[Point, float] = {}

        def note(point: Point, value: Tensor) -> None:
            if point in wanted and point in self._values and value.shape == self._values[point].shape:
                with _disable_current_modes():
                    left[point] = self._distance(point, {}, {point: value}).largest
                if hopeless(point, left[point]):
                    raise EndOfPass

        with changed:
            try:
                uncounted._isolated(PassCost(usual), note, {})
            except (EndOfPass, *CHANGED_CODE_FAILS):
                return {}
        return left

    @contextmanager
    def with_weights(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """A context in which some of the port's weights have other values."""
        own = {name: tensor.data for name, tensor in named_tensors(self.port.module) if name in values}
        assign(self.port.module, {name: value.to(own[name]) for name, value in values.items()})
        try:
            yield
        finally:
            assign(self.port.module, own)

    def silenced(self, marks: Sequence[Mark]) -> list[Finding]:
        """The probes that are right when the port's dropout is off."""
        silence = dropout.NoDropout()
        quiet = self._isolated(silence, _detached, Activations())
        left = {mark.name: self._distance(mark.name, {}, quiet).largest for mark in marks}
        cured = [mark for mark in marks if left[mark.name] <= mark.bound]
        if not cured:
            return []
        return [
            Finding(
                name=dropout.NAME,
                detail=silence.detail,
                probes=tuple(mark.name for mark in cured),
                difference=max(mark.difference for mark in cured),
                residual=max(left[mark.name] for mark in cured),
                what=dropout.WHAT,
                fix=dropout.FIX,
            )
        ]

    @torch.no_grad()
    def divergence(self, probe: Probe) -> Divergence | None:
        """The place where the port leaves the reference on the way to a probe, given the exact values before it."""
        pairs, exact, marks = self.pairing.pairs, self.exact, self._tape.marks
        with Recorder(self.port.module, lines=True) as recorder:

            def visit(point: Point, value: Tensor) -> Tensor | None:
                if point not in pairs:
                    return None
                recorder.mark(point, value)
                with recorder.resting():
                    carried = like(pairs[point].carry(exact, value.double()), value)
                return recorder.stand_in(carried)

            replace(self.port, spelled_out=True).run(self.case, visit, wanted=list(pairs))
        own = recorder.tape.marks.get(probe.port)
        wanted = [marks[name] for name in pairs[probe.port].sources if name in marks]
        if own is None:
            return None
        tapes = recorder.tape, self._tape
        rounded = probe.leak is not None or probe.lowered
        found = divergence(*tapes, probe.port, own, wanted, close=ROUNDED) if rounded else None
        return found or divergence(*tapes, probe.port, own, wanted)

    @torch.no_grad()
    def repaired(
        self, until: float, *, rounded: bool = False, passing: CauseCase | None = None, departing: bool = False
    ) -> list[RepairSet] | None:
        """The steps of the port that have to be the reference's for it to return what the reference returns.

        Args:
            until: when to give up, by ``time.thread_time``.
            rounded: the port rounds something to less than float64, so that nothing behind it is the reference's to
                the last digits.
            passing: a case in which both agree; None where there is none.
            departing: look for steps alone that give the reference's numbers in the passing case, and others in this.

        Returns:
            The ways in which a few steps account for all that the port returns, each in order; None where it returns
            what it should.
        """
        tape = self._own_tape
        exactly = force_float64(self.port.module) if self.port.lifted else None
        around = (lambda: exactly) if exactly else nullcontext
        theirs = self._tape
        goals = {
            ref: [theirs.marks[name] for name in self.pairing.pairs[point].sources if name in theirs.marks]
            for point, ref in tape.marks.items()
        }

        def left(values: Values) -> float:
            ends = {point: values[ref] for point, ref in tape.marks.items()}
            return max(self._distance(point, {}, ends).largest for point in ends)

        if not goals or left(Values(tape)) <= END:
            return None
        if not all(finite(tape[ref]) for ref in goals):  # what gave the first such value is another question
            return []

        def find(bound: float, close: float) -> list[RepairSet] | None:
            there = None if passing is None else PassingCase(passing.tapes, self.tapes, close=close)
            search = partial(RepairSearch, tape, theirs, goals, left, until=until, around=around, passing=there)
            repairs = search(bound=bound, close=close)
            return repairs.departing() if departing else repairs.find()

        found = find(ROUNDED_END, ROUNDED) if rounded and left(Values(tape)) > ROUNDED_END else []
        return found or find(END, CLOSE)

    @property
    def tapes(self) -> BothTapes:
        """The passes of both sides."""
        return BothTapes(self._own_tape, self._tape)

    @cached_property
    def _own_tape(self) -> Tape:
        """The port's pass, call by call, with the lines of its code and its outputs marked."""
        with torch.no_grad(), Recorder(self.port.module, lines=True) as recorder:

            def visit(point: Point, value: Tensor) -> None:
                if point in self.outputs:
                    recorder.mark(point, value)

            replace(self.port, spelled_out=True).run(self.case, visit, wanted=list(self.outputs))
        return recorder.tape

    @cached_property
    def broken(self) -> Mapping[Point, Broken]:
        """The origin of the first value that is NaN or infinite, for each probe of the port that has such values."""
        watch = FirstBroken()

        def first(point: Point, value: Tensor) -> Broken | None:
            found, watch.first = watch.first, None
            return found

        found = self._isolated(watch, first, {}, spelled_out=True)
        return {point: one for point, one in found.items() if one is not None and not finite(self._values[point])}

    def _mark(self, probe: Probe) -> Mark:
        sources = self.pairing.pairs[probe.port].sources
        bound = probe.bound.isolated or 0.0
        if probe.port not in self._gaps:  # each cause that is confirmed in this case asks for all of them
            self._gaps[probe.port] = self._distance(probe.port, {})
        return Mark(name=probe.port, sources=sources, gap=self._gaps[probe.port], bound=bound)

    def _distance(
        self, point: Point, altered: Mapping[str, Tensor], values: Mapping[Point, Tensor] | None = None
    ) -> Gap:
        """The distance of the port's value from the reference's, with some of the reference's activations altered.

        Where the port has NaN or infinite values, the altered reference has to have them in the same places. Places
        that the mask hides say nothing: a query that may see no key gives NaN on one side and a mean on the other.
        """
        own = (values or self._values)[point]
        one, anchor, exact = self.pairing.pairs[point], self.anchors[point], self.exact
        if any(exact[name].shape != value.shape for name, value in altered.items()):
            return APART
        # A chain, and no copy: of a large model the exact values are in a file, and each is read when it is asked for.
        carried = {name: value.double() for name, value in altered.items()}
        changed: Mapping[Point, Tensor] = ChainMap(carried, exact)  # type: ignore[arg-type]  # it is only read
        expected = one.carry(changed, own.double()) if altered or not one.whole else anchor.value
        if own.shape != expected.shape:  # a step in the port's place of another one may give anything
            return APART
        if anchor.seen is not None:
            own, expected = (torch.where(anchor.seen, value, 0.0) for value in (own, expected))
        known = torch.isfinite(own)
        if not bool(known.all()):
            if not bool(known.any()) or not _alike(own, expected):
                return APART
            own, expected = own.masked_fill(~known, 0.0), expected.masked_fill(~known, 0.0)
        far = error(own, replace(anchor, value=expected))
        return Gap(far.largest, far.rms)

    def _target(self, point: Point) -> Tensor | None:
        """The port's value, laid out as the reference's is; None where that has more to it."""
        one, value = self.pairing.pairs[point], self._values[point]
        if len(one.sources) != 1 or not one.whole or value.numel() != self.exact[one.sources[0]].numel():
            return None
        exact = self.exact[one.sources[0]]
        places = torch.arange(exact.numel(), dtype=torch.float64).view_as(exact)
        there = one.carry({one.sources[0]: places}).flatten().long()
        return torch.empty_like(exact).flatten().index_copy(0, there, value.double().flatten()).view_as(exact)

    @property
    def cost(self) -> PassCost:
        """The cost of one pass of the port."""
        return self._values_and_cost[1]

    @property
    def _values(self) -> MutableMapping[Point, Tensor]:
        return self._values_and_cost[0]

    @cached_property
    def _values_and_cost(self) -> tuple[MutableMapping[Point, Tensor], PassCost]:
        cost = PassCost()
        return self._isolated(cost, _detached, Activations()), cost

    @cached_property
    def _ends(self) -> MutableMapping[Point, Tensor]:
        return self.port.keep(self.case)

    def _isolated(
        self,
        around: FunctionMode,
        note: Callable[[Point, Tensor], T],
        found: MutableMapping[Point, T],
        *,
        spelled_out: bool = False,
    ) -> MutableMapping[Point, T]:
        """Add to ``found`` what is noted at each probe when the port is given the exact values at those before."""
        pairs, exact = self.pairing.pairs, self.exact

        def visit(point: Point, value: Tensor) -> Tensor | None:
            if point not in pairs:
                return None
            with around.resting():
                found[point] = note(point, value)
                return like(pairs[point].carry(exact, value.double()), value)

        with around:
            replace(self.port, spelled_out=spelled_out).run(self.case, visit, wanted=list(pairs))
        return found

    @cached_property
    def _tape(self) -> Tape:
        """The reference's pass, call by call."""
        with Recorder(self.reference.module) as recorder:

            def visit(point: Point, value: Tensor) -> Tensor | None:
                recorder.mark(point, value)
                if value.dtype == torch.float64 or is_inner(point):  # the exact values are its own, or as good
                    return None
                return recorder.stand_in(like(self.exact[point], value))

            replace(self.reference, spelled_out=True).run(self.case, visit, wanted=self.pairing.compared)
        return recorder.tape

    @cached_property
    def _stage(self) -> Stage:
        """The reference's pass to be repeated with changes, which may send tokens to other experts."""
        tape = self._tape
        tokens = max((one.numel() for one in self.reference.arguments[self.case].values()), default=0)
        with dense_experts(self.reference.module, tokens, LARGE) as changed:
            if changed:
                tape = replace(self)._tape  # another object of this class: its tape is recorded anew
        # An isolated run cannot replace a returned value where the port goes on with it: nothing is held still there.
        held = {one for point, pair in self.pairing.pairs.items() if not is_returned(point) for one in pair.sources}
        read = {point: _read_for(tape, ref) for point, ref in tape.marks.items() if point in held}
        if not self.reference.lifted:
            return Stage(tape, read)
        exactly = force_float64(self.reference.module)  # as it was recorded
        return Stage(tape, read, lambda: exactly)

    @cached_property
    def _anatomy(self) -> ModelParts:
        broken = any(not finite(value) for value in self._values.values())
        return ModelParts(self._stage.tape, self.reference.arguments[self.case], broken=broken)


class LazyCases(Iterable[CauseCase]):
    """Cases that are made when they are first asked for, and kept.

    Args:
        makers: give a case each, or None where a side does not take it.
    """

    def __init__(self, makers: Iterable[Callable[[], CauseCase | None]]) -> None:
        self._makers = iter(makers)
        self._made: list[CauseCase] = []

    def __iter__(self) -> Iterator[CauseCase]:
        for place in count():
            while place == len(self._made):
                make = next(self._makers, None)
                if make is None:
                    return
                case = make()
                self._made += [] if case is None else [case]
            yield self._made[place]


SELECTING = frozenset({"__getitem__", "select", "narrow", "gather", "index_select", "take_along_dim", "argmax", "max"})
"""Functions that read some places of a tensor."""

NORMS = frozenset({"layer_norm", "rms_norm"})
"""Functions before which a model's states are often taken."""


def _same(value: Tensor, other: Tensor, seen: Tensor | None, bound: float) -> bool:
    """Whether two tensors have the same numbers at the places that a mask does not hide."""
    value, other = value.double(), other.double()
    if seen is not None and seen.shape != value.shape:
        seen = None
    far = (value - other).abs() if seen is None else torch.where(seen, (value - other).abs(), 0.0)
    return bool(far.nan_to_num().max() <= max(bound, END) * other.nan_to_num().abs().max().clamp_min(1e-30))


def _any_finite(value: Tensor) -> bool:
    """Whether there is anything to compare: a mask that hides every key leaves nothing, say."""
    return bool(torch.isfinite(value).any())


def _detached(point: Point, value: Tensor) -> Tensor:
    return value.detach()


END = 1e-10
"""End to end roundings add up, in the altered reference as in the port: what is less than this is none of a mistake."""

ROUNDED_END = 1e-5
"""The same where the port rounds something to less than float64."""


def _alike(own: Tensor, expected: Tensor) -> bool:
    """Whether what is no number stands in the same places."""
    return torch.equal(torch.isnan(own), torch.isnan(expected)) and torch.equal(
        own.nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0)[torch.isinf(own)].double(),
        expected.nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0)[torch.isinf(own)].double(),
    )


def _read_for(tape: Tape, ref: Ref) -> Ref:
    """The value that the model goes on with: a marked value itself, or for returned scores those that softmax reads."""
    if tape.users(ref):
        return ref
    behind = (one for call in islice(tape.before(ref), 4) for one in call.reads)
    return next((one for one in behind if any(user.kind is Kind.SOFTMAX for user in tape.users(one))), ref)
