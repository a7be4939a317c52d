"""Naming the cause: the reference altered on its tape, and compared with what the port computed in isolation."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice, product

import torch
from torch import Tensor

from porting.causes import non_finite
from porting.causes.catalogue import CATALOGUE, ROUNDING
from porting.causes.cause_matching import Search
from porting.causes.diverging import Divergence
from porting.causes.extra import ADDED
from porting.causes.finding import Candidate, Explained, Finding, Mark, Suspicion
from porting.causes.repairs import RepairSet
from porting.causes.step_differences import WORDS
from porting.causes.step_differences import Kind as Repaired
from porting.errors import VerifyError
from porting.reporting.outcome import Probe
from porting.tracing.activations import Activations
from porting.tracing.code_coverage import never_ran_in
from porting.tracing.running import Both, Side
from porting.tracing.trace import ROOT, Point, is_returned, module_of
from porting.verification.cause_case import END, CauseCase, LazyCases
from porting.verification.compare import Comparison
from porting.verification.experiments import Experiments
from porting.verification.fixes import (
    FEW,
    HELD_OUT,
    SEVERAL,
    Layouts,
    inverted_masks,
    is_explained,
    laid_out_otherwise,
    passing_and_failing,
    special_cases,
    with_edits,
    with_lines,
)
from porting.verification.rounding_propagation import reference_angles
from porting.verification.working_dtype import causes_in_working_dtype

LARGE = 256 << 20
"""A case with more bytes of activations at the probes is large: its whole pass has several times as many."""

END_TO_END = 1e-6
"""A change to the whole model that moves its output by less than this is not told from rounding."""

SECONDS = 20.0
"""The seconds for which one alteration of the whole is searched."""

REPAIRING = 20.0
"""Seconds for the search for the steps that have to be repaired; a small model takes one."""

REPAIRING_EXPLAINED = 4.0
"""The same where entries of the catalogue explain every probe: there, repairs can only be more exact."""

NAMING = 4.0
"""Seconds for finding the catalogue's name of a difference that appears on some inputs only."""

TELLING = {Repaired.MASK, Repaired.ROWS, Repaired.LEFT_OUT, Repaired.NUMBER}
"""Kinds of repairs that say more about a step than that its numbers differ on some inputs."""

READ_OFF = {Repaired.NUMBER, Repaired.EXTRA, Repaired.FUNCTION}
"""Kinds of repairs that are read from the step itself, not inferred from its numbers."""

GENERAL = {Repaired.ROWS, Repaired.SEQUENCE}
"""Kinds of repairs that say how the port differs and not why: a catalogue entry that explains it too is preferred."""

NOISE = 1e-15
"""The least rounding error, relative to the activation's scale."""

PRECISE = 100.0
"""An entry that leaves so many times more than repairing does, and that alters another module, is not what was done."""

COMBINED = 64
"""How many combinations of tied entries are tried end to end."""


def name_causes(
    comparison: Comparison,
    probes: Sequence[Probe],
    both: Both,
    dtypes: Sequence[torch.dtype],
    *,
    drawn: Both | None = None,
    turned: Both | None = None,
    simple: Sequence[Both] = (),
    wide: Iterable[Both] = (),
    padding: object = None,
    layouts: Layouts | None = None,
    weights_compared: bool = False,
    seconds: float = math.inf,
) -> tuple[tuple[Finding, ...], Divergence | None]:
    """Why the guilty probes differ, where the port leaves the reference, and why the imprecise probes round worse.

    Args:
        both: makes the two sides.
        drawn: makes the two sides on a case that was drawn to confirm a cause; None for a reference that cannot be
            looked into, of which no cause is known.
        turned: makes the two sides on a case whose rows are padded in front: it tells ties apart.
        simple: makes the two sides on small cases, in which the port may be right where it is wrong in all others.
        wide: make the two sides on batches of other kinds, in each of which a cause has to hold; made as they are
            asked for.
        padding: the token id of padding, if the config has one.
        layouts: other lines of the table; None where the weights were not loaded by it.
        weights_compared: the port's weights are the checkpoint's, bit by bit.
        seconds: of this thread's processor time: what else a machine runs decides nothing.  What the search does not
            come to by then stays unknown.

    Returns:
        A finding for each cause, empty when no probe is guilty or imprecise; and the first step of the port whose
        result the reference does not have, where it can be told.
    """
    if drawn is None or seconds <= 0:
        return (), None
    with reference_angles(comparison, probes, both) as same:
        until = time.thread_time() + seconds
        found, diverges = list[Finding](), None
        if any(probe.guilty or probe.differs for probe in probes):
            guilty = _Guilty(
                comparison,
                probes,
                same(both),
                until,
                held_out=_held_out(comparison, same(drawn)),
                turned=_held_out(comparison, turned and same(turned)),
                simple=[partial(_held_out, comparison, same(one)) for one in simple],
                wide=LazyCases(partial(_held_out, comparison, same(one)) for one in wide),
                padding=padding if isinstance(padding, int) else None,
                weights_compared=weights_compared,
            )
            found, diverges = guilty.causes(layouts)
            found = _merged(found)
        imprecise = [probe for probe in probes if probe.imprecise]
        if imprecise and dtypes:
            dtype = min(dtypes, key=lambda one: torch.finfo(one).eps)
            broken = [probe for probe in probes if probe.breaks]
            if broken:
                found += causes_in_working_dtype(comparison, broken, same(both), dtype)
            if found:
                return tuple(found), diverges
            reference, port = same(both)(dtype)
            cause_case = CauseCase.known(comparison, reference, port, _shortest_first(comparison, reference)[0])
            loose = [replace(probe, bound=replace(probe.bound, isolated=0.0)) for probe in imprecise]
            marks = cause_case.marks(loose)
            found += [one.finding for one in cause_case.search(ROUNDING).find(list(marks.values()))]
        return tuple(found), diverges


class _Guilty:
    """The search for the causes of guilty probes.

    Args:
        comparison, probes, weights_compared: as of :func:`name_causes`.
        both: makes the two sides.
        until: the deadline, by ``time.thread_time``.
        held_out: the case that was drawn to confirm a cause, if both sides take it.
        turned: the same with its rows padded in front.
        simple: make small cases.
        wide: cases of other kinds, in each of which a cause has to hold.
        padding: the token id of padding, if it is known.
    """

    def __init__(
        self,
        comparison: Comparison,
        probes: Sequence[Probe],
        both: Both,
        until: float,
        *,
        held_out: CauseCase | None,
        turned: CauseCase | None,
        simple: Sequence[Callable[[], CauseCase | None]],
        wide: Iterable[CauseCase],
        padding: int | None,
        weights_compared: bool,
    ) -> None:
        reference, port = both(torch.float64)
        guilty = [probe for probe in probes if probe.guilty]
        cases = _searched(comparison, reference, guilty) if guilty else _shortest_first(comparison, reference)
        known = [CauseCase.known(comparison, reference, port, case) for case in cases]
        if not guilty:  # what is returned depends on places that a mask hides
            known = [cause_case.with_hidden_places for cause_case in known]
            probes = _guilty_at_hidden_places(known, probes)
            guilty = [probe for probe in probes if probe.guilty]
        self._comparison, self._both, self._until = comparison, both, until
        self._known, self._probes, self._guilty = known, probes, guilty
        self._passing, self._failing = passing_and_failing(known, guilty)
        if not self._passing:
            more = (one() for one in simple)
            self._passing, _ = passing_and_failing([one for one in more if one is not None], guilty)
        self._wide, self._padding = wide, padding
        self._turned, self._turned_failing = passing_and_failing([] if turned is None else [turned], guilty)
        self._more = [] if held_out is None else [held_out]
        self._searched = known if held_out is None else [held_out, *known]  # the smallest first
        self._trials = _Trials(
            known=known,
            probes=probes,
            until=until,
            held_out=held_out,
            tied=turned,
            passing=self._passing,
            weights_compared=weights_compared,
            wide=wide,
        )

    def causes(self, layouts: Layouts | None) -> tuple[list[Finding], Divergence | None]:
        """The causes, and the first step of the port whose result the reference does not have."""
        diverges = first_divergence(self._comparison, self._probes, self._both)
        found = inverted_masks(self._known, self._probes)
        # No condition on a mask is right that is only so where padding stands behind the tokens.
        cases = [*self._failing, *self._passing, *self._turned, *self._turned_failing]
        searched, probes, until = self._searched, self._probes, self._until
        for passing in (self._passing, self._turned):
            found = found or special_cases(passing, self._failing, cases, probes, until, self._wide)
        if found:
            return found, diverges
        laid_out = [] if layouts is None else laid_out_otherwise(searched, probes, layouts, until)
        experiments = Experiments([*cases, *self._more], self._wide, probes, padding=self._padding)
        found, repaired = experiments.changed_in_place(), None
        if not found:
            found, repaired = self._matched({point for _, one in laid_out for point in one.probes}, experiments)
        found = with_lines(found, laid_out)
        if repaired is not None:
            found = _with_repairs(found, repaired, self._guilty)
        if not laid_out and diverges is not None:
            lines = [
                diverges.line,
                diverges.reader,
                diverges.also,
                *([diverges.moved.line] if diverges.moved else []),
                *diverges.callers,
            ]
            lines = [*(repaired.lines if repaired else ()), *filter(None, lines)]
            edited = [*searched[:1], *self._turned, *searched[1:]]
            found = with_edits(found, edited, probes, lines, until, self._wide)
        return found, diverges

    def _matched(self, in_table: Collection[Point], experiments: Experiments) -> tuple[list[Finding], RepairSet | None]:
        """Return the causes of the catalogue, else those of experiments, and the repairs of the port's steps.

        Args:
            in_table: the probes that other lines of the table make right.
            experiments: those that are made where the catalogue leaves something unexplained.
        """
        trials = self._trials
        departing = None
        if self._passing and not in_table:
            departing = trials.repair(REPAIRING, complete=True, departing=True)
        if departing is not None:  # an entry of the catalogue may say it better
            trials.until = min(self._until, time.thread_time() + NAMING)
        found = trials.why(self._searched, self._guilty, listed=True)
        trials.until = self._until
        named = [one for one in found if one.name]
        explained = all(is_explained(probe, named) for probe in self._guilty)
        shown = [] if explained or in_table else experiments.explaining(self._until)
        if shown:
            return shown, None
        if departing is not None:
            repaired = trials.repair(REPAIRING_EXPLAINED, complete=True)
            told = repaired is not None and _is_one_step(repaired) and _kinds(repaired) <= TELLING
            return found, repaired if told else departing
        repaired = None
        if not in_table:
            seconds = REPAIRING_EXPLAINED if explained else REPAIRING
            repaired = trials.repaired = trials.repair(seconds, complete=explained)
        if not explained:
            found = trials.why(self._searched, self._guilty)
        return found, repaired


def _with_repairs(found: Sequence[Finding], way: RepairSet, guilty: Sequence[Probe]) -> list[Finding]:
    """The findings, and what repairing the port says in the place of what they do not know.

    One step that reads another tensor is a simpler explanation than that branches and norms are put together otherwise.
    An entry that alters another module and leaves visibly more than repairing does is equivalent up to what rounding
    shows: a factor on one side of a sum that is normed, say, for one on the other side.
    """
    repaired, kinds = _repaired(way), _kinds(way)
    wide = {one.name for one in CATALOGUE if one.wide}
    if kinds == {Repaired.TENSOR} and _is_one_step(way) and all(one.name in wide for one in found if one.name):
        found = [one for one in found if one.name not in wide]
    if kinds <= READ_OFF and repaired.where:
        exact = PRECISE * max(way.residual, NOISE)
        found = [one for one in found if one.residual <= exact or not {*one.where}.isdisjoint(repaired.where)]
    named = [one for one in found if one.name]
    open_ = [probe for probe in guilty if not is_explained(probe, named)]
    if not open_:
        return named
    difference = max(probe.meaning.isolated or probe.meaning.end_to_end for probe in open_)
    return [*named, replace(repaired, probes=tuple(probe.port for probe in open_), difference=difference)]


def _kinds(way: RepairSet) -> set[Repaired]:
    return {one.kind for one in way.repairs}


def _is_one_step(way: RepairSet) -> bool:
    """Whether a single step is repaired, in one layer or in each."""
    return len({one.detail for one in way.repairs}) == 1


def first_divergence(comparison: Comparison, probes: Sequence[Probe], both: Both) -> Divergence | None:
    """The first step of the port whose result the reference does not have, on the way to the first guilty probe.

    Args:
        both: makes the two sides.

    Returns:
        The step, or None where nothing is guilty, or no single step can be told.
    """
    first = next((probe for probe in probes if probe.guilty), None)
    if first is None:
        return None
    reference, port = both(torch.float64)
    for case in _shortest_first(comparison, reference):
        cause_case = CauseCase.known(comparison, reference, port, case)
        mark = cause_case.marks([first]).get(first.port)
        if mark is not None and mark.difference > mark.bound:
            return cause_case.divergence(first)
    return None


def _held_out(comparison: Comparison, drawn: Both | None) -> CauseCase | None:
    """The case that was drawn, if both sides take it."""
    if drawn is None:
        return None
    try:
        return CauseCase.new(comparison, *drawn(torch.float64), 0)
    except (VerifyError, RuntimeError):
        return None


def _guilty_at_hidden_places(known: Sequence[CauseCase], probes: Sequence[Probe]) -> list[Probe]:
    """The probes with the largest difference that each makes by itself, also where a mask hides it."""
    marks = [cause_case.marks(probes) for cause_case in known]
    off = {
        probe.port: [of_case[probe.port].difference for of_case in marks if probe.port in of_case] for probe in probes
    }
    return [
        replace(probe, meaning=replace(probe.meaning, isolated=max(off[probe.port], default=None))) for probe in probes
    ]


def _shortest_first(comparison: Comparison, reference: Side) -> list[int]:
    """The cases, those of several rows first, for one row cannot show padding, and those that a search found last."""
    last = len(reference.arguments) if comparison.found_from is None else comparison.found_from

    def weight(case: int) -> tuple[bool, bool, int]:
        given = reference.arguments[case].values()
        lone = all(value.shape[:1] == (1,) for value in given)
        return case >= last, lone, sum(value.numel() for value in given)

    return sorted(range(len(reference.arguments)), key=weight)


def _searched(comparison: Comparison, reference: Side, guilty: Sequence[Probe]) -> list[int]:
    """The cases that are searched, shortest first: without the large ones where others show what is wrong as well."""
    ordered = _shortest_first(comparison, reference)
    small = [case for case in ordered if _nbytes(comparison.exact[case]) <= LARGE]
    shown = [comparison.differs_in(probe.port) for probe in guilty]
    return small if all(not cases.isdisjoint(small) for cases in shown) else ordered


def _nbytes(exact: Mapping[Point, Tensor]) -> int:
    shapes = exact.shapes().values() if isinstance(exact, Activations) else (value.shape for value in exact.values())
    return sum(math.prod(shape) for shape in shapes) * torch.float64.itemsize


@dataclass(kw_only=True)
class _Trials:
    """The search in one case after the other, each of which confirms what the others suggest."""

    known: Sequence[CauseCase]
    probes: Sequence[Probe]
    until: float
    held_out: CauseCase | None
    tied: CauseCase | None
    passing: Sequence[CauseCase]
    weights_compared: bool
    wide: Iterable[CauseCase]
    repaired: RepairSet | None = None
    _marks: dict[int, dict[Point, Mark]] = field(default_factory=dict)

    @cached_property
    def _untying(self) -> list[CauseCase]:
        return [] if self.tied is None else [self.tied, self.tied.with_hidden_places]

    def why(self, cases: Sequence[CauseCase], guilty: Sequence[Probe], *, listed: bool = False) -> list[Finding]:
        """The causes of the differences, each from the first case that shows it.

        Args:
            listed: entries of the catalogue alone: no function and no weights that are solved for.
        """
        found: list[Finding] = []
        for cause_case in cases:
            found += self._in_case(cause_case, [probe for probe in guilty if not is_explained(probe, found)], listed)
            if all(is_explained(probe, found) for probe in guilty):
                break
        return found

    def _in_case(self, cause_case: CauseCase, guilty: Sequence[Probe], listed: bool) -> list[Finding]:
        """The causes of the differences that a case shows."""
        marks = self._marks_of(cause_case)
        shown = [one for one in guilty if one.port in marks and marks[one.port].difference > marks[one.port].bound]
        random = any(probe.random for probe in shown)
        found = cause_case.silenced([marks[probe.port] for probe in shown]) if random else []
        named = {point for one in found for point in one.probes}
        search = cause_case.search(CATALOGUE)
        search.matching = [marks[probe.port] for probe in self.probes if not probe.guilty and probe.port in marks]
        search.until = self.until
        search.confirms = lambda mark, candidate: self._confirm(cause_case, mark, candidate)
        search.confirms_elsewhere = lambda mark, holds: self._all_others(cause_case, mark, holds)
        search.weights_compared = self.weights_compared
        general = self.repaired is None or not _is_one_step(self.repaired) or _kinds(self.repaired) <= GENERAL
        # What is solved for at a probe fits whatever was done before it.
        search.solving = not listed and self.repaired is None
        asked = [marks[probe.port] for probe in shown if probe.port not in named]
        unlisted = search.unlisted(asked) if general else []
        if unlisted:  # before numbers are solved for at one probe after the other, which takes longest
            whole = self._one_for_all(cause_case, [], unlisted, asked)
            if whole is not None:
                return [*found, whole]
        explained = [self._untied(one) for one in search.find(asked)]
        open_ = [
            one
            for one in explained
            if not one.finding.name or one.finding.name == ADDED or (not one.chosen and len(explained) > 1)
        ]
        known = [Candidate(one.causes, one.alterations) for one in explained if one.chosen and not one.pinned]
        points = {point for one in open_ for point in one.finding.probes}
        if general and open_ and not listed:
            whole = self._one_for_all(cause_case, known, [mark for mark in asked if mark.name in points], asked)
            if whole is not None:
                return [*found, whole]
        broken_there = cause_case.broken if any(not math.isfinite(one.difference) for one in marks.values()) else {}
        return found + [_with_line(one, broken_there) for one in self._whole(cause_case, explained)]

    def repair(self, seconds: float, *, complete: bool, departing: bool = False) -> RepairSet | None:
        """Find what the steps have in common that must equal the reference's for the output to be the reference's.

        It has to be so in each of several cases in which the port returns something else.

        Args:
            seconds: how long to look, of this thread's processor time.
            complete: give nothing where the time ends before each case has been looked at.
            departing: as of :meth:`CauseCase.repaired`.
        """
        begun = time.thread_time()
        until = begun + min(seconds, (self.until - begun) / 4)  # the rest is the catalogue's
        found: list[list[RepairSet]] = []
        rounded = any(probe.leak is not None or probe.lowered for probe in self.probes)
        cause_cases = [*self.known, *([self.held_out] if self.held_out else [])]
        for cause_case in sorted(cause_cases, key=lambda one: one.size):
            near = _nearest(self.passing, cause_case)
            ways = cause_case.repaired(until, rounded=rounded, passing=near, departing=departing)
            if time.thread_time() > until and complete:
                return None
            if time.thread_time() > until or len(found) > HELD_OUT:
                break
            found += [] if ways is None else [ways]
        every = sorted(chain(*found), key=lambda way: len(way.keys))
        common = (one for one in every if all(any(one.keys <= way.keys for way in ways) for ways in found))
        return next(common, None)

    def _untied(self, one: Explained) -> Explained:
        """Without those of its ties that do not reproduce the port where rows are padded in front, if some do.

        Differences at places that the mask hides are not an error, but decide between ties.
        """
        for cause_case in self._untying:
            if one.instead:
                one = self._untied_in(cause_case, one)
        return one

    def _untied_in(self, cause_case: CauseCase, one: Explained) -> Explained:
        """Without those of its ties that do not reproduce the port in a case, if some do.

        Ways of one entry stay together: they differ in what is made of rows without keys, which the whole shows.
        """
        marks, search = self._marks_of(cause_case), cause_case.search(CATALOGUE)
        every = [one, *one.instead]

        def refuted(name: str, chosen: Candidate) -> bool:
            """Whether it can be tried there and does not reproduce the port."""
            tried = name in marks and any(True for _ in search.again(chosen))
            return tried and not search.reproduces(marks[name], chosen)

        entries = {
            (way.finding.name, way.finding.detail)
            for way in every
            if not any(refuted(name, one) for name, one in way.chosen.items())
        }
        passing = [way for way in every if (way.finding.name, way.finding.detail) in entries]
        if not passing or len(passing) == len(every):
            return one
        first, *rest = passing
        return replace(first, instead=(*(() if first is one else first.instead), *rest))

    def _marks_of(self, cause_case: CauseCase) -> dict[Point, Mark]:
        return self._marks.setdefault(id(cause_case), cause_case.marks(self.probes))

    def _confirm(self, cause_case: CauseCase, mark: Mark, candidate: Candidate) -> bool:
        """Whether a candidate reproduces the port in cases that it was not fitted on.

        Where nothing but one output differs, as in batches whose outputs alone are compared, the candidate must return
        what the port returns in the others: their probes hold still what it alters.
        """
        if not self._all_others(cause_case, mark, lambda one, there: one.reproduces(there, candidate)):
            return False
        alone = is_returned(mark.name) and sum(probe.guilty for probe in self.probes) == 1
        if alone and not candidate.rough and not self._returns(cause_case, candidate, mark.bound):
            return False
        return candidate.rough or self._holds_widely(cause_case, mark, candidate)

    def _holds_widely(self, cause_case: CauseCase, mark: Mark, candidate: Candidate) -> bool:
        """Whether no case of another kind refutes a candidate: other masks, segments, positions, rows, embeddings."""
        calls = cause_case.calls_of(candidate)
        probe = next(probe for probe in self.probes if probe.port == mark.name)
        return not any(one.refutes(probe, candidate, calls) for one in self._wide_for(cause_case, candidate))

    def _returns_widely(self, cause_case: CauseCase, candidate: Candidate) -> bool:
        """Whether a candidate makes the reference return what the port does in the cases of other kinds as well."""
        calls = cause_case.calls_of(candidate)
        return not any(one.refutes_returned(candidate, calls, END) for one in self._wide_for(cause_case, candidate))

    def _wide_for(self, cause_case: CauseCase, candidate: Candidate) -> Iterable[CauseCase]:
        """The cases of other kinds that are to confirm a candidate: few where inputs matter only by the activations."""
        return self.wide if cause_case.depends_on_inputs(candidate) else islice(self.wide, FEW)

    def _all_others(self, cause_case: CauseCase, mark: Mark, holds: Callable[[Search, Mark], bool]) -> bool:
        """Whether something holds of a probe in the cases that it was not found in, and that reach the probe."""
        for one in self._others(cause_case):
            there = self._marks_of(one).get(mark.name)
            if there is not None and not holds(one.search(CATALOGUE), there):
                return False
        return True

    def _others(self, cause_case: CauseCase) -> list[CauseCase]:
        """The cases in which a cause of this one is confirmed.

        Among them is the one with rows that are padded in front, if the port is right there: behind causal masks, where
        rows are padded at their ends, no mistake in a padding mask shows.
        """
        others = [one for one in self.known if one is not cause_case][:HELD_OUT]
        found = [one for one in (self.held_out, *others) if one is not None and one is not cause_case]
        if self.tied is not None and self.tied is not cause_case:
            marks = self._marks_of(self.tied).values()
            found += [self.tied] if all(mark.difference <= mark.bound for mark in marks) else []
        return found

    @torch.no_grad()
    def _one_for_all(
        self, cause_case: CauseCase, known: Sequence[Candidate], unexplained: Sequence[Mark], marks: Sequence[Mark]
    ) -> Finding | None:
        """One alteration that makes the reference return what the port returns, though it does not fit each probe.

        A part that is done in another order, or reads something else, computes nothing at a probe that stands between.

        Args:
            known: alterations that explain some of the marks, which are tried first.
            unexplained: the marks that have no explanation of their own.
            marks: all that the alteration is to explain.
        """
        begun, before = time.thread_time(), cause_case.apart({})
        if not END_TO_END < before.largest < math.inf:
            return None
        scopes = {_scope(mark.name) for mark in unexplained}
        search = cause_case.search(CATALOGUE)
        for candidate in chain(known, search.everything(scopes), search.everywhere()):
            if time.thread_time() > min(self.until, begun + SECONDS):
                break
            left = cause_case.apart(candidate.rewrites).largest
            if left <= END and self._returns(cause_case, candidate) and self._returns_widely(cause_case, candidate):
                cause = candidate.causes[0]
                return Finding(
                    name=candidate.key[0],
                    detail=candidate.key[1],
                    where=tuple(dict.fromkeys(one.where for one in candidate.alterations)),
                    probes=tuple(mark.name for mark in marks),
                    difference=max(before.largest, *(mark.difference for mark in marks)),
                    residual=left,
                    what=cause.what,
                    fix=cause.fix,
                )
        return None

    @torch.no_grad()
    def _returns(self, cause_case: CauseCase, candidate: Candidate, bound: float = END) -> bool:
        """Whether a candidate makes the reference return what the port returns in other cases as well, to a bound."""
        for one in self._others(cause_case):
            ways = [way.rewrites for way in one.search(CATALOGUE).again(candidate)] or [{}]
            if not any(one.apart(rewrites).largest <= max(bound, END) for rewrites in ways):
                return False
        return True

    def _whole(self, cause_case: CauseCase, explained: Sequence[Explained]) -> list[Finding]:
        """Test the findings end to end: decide between equal ones, and drop those that do not reproduce the port."""
        named = [one for one in explained if one.chosen]
        unknown = [point for one in explained if not one.finding.name for point in one.finding.probes]
        if unknown:  # what a part computes from the reference's values says little where another part is not known
            return [
                _doubted(one) if one.pinned or _beside(one, unknown) else _tied(one, one.instead) for one in explained
            ]
        solved = any(one.finding.name and not one.chosen for one in explained)
        if not named or solved or any(one.pinned or one.rough for one in named):
            return [_tied(one, one.instead) for one in explained]
        ways = [(one, *(two for tie in one.instead for two in (tie, *tie.instead))) for one in named]
        combined = [way for _, way in zip(range(COMBINED), product(*ways), strict=False)]
        passing = [way for way in combined if cause_case.end_to_end(way, self.probes)]
        if not passing:
            return [_doubted(one) if one.chosen else one.finding for one in explained]
        first = dict(zip(map(id, named), passing[0], strict=True))
        found = []
        for one in explained:
            best = first.get(id(one), one)
            every = [way[named.index(one)] for way in passing] if one in named else []
            found.append(_tied(best, tuple(dict.fromkeys(other for other in every if other is not best))))
        return found


def _nearest(passing: Sequence[CauseCase], failing: CauseCase) -> CauseCase | None:
    """The passing case in which the port's code runs most like in a failing one; None where there is none."""
    module = failing.port.module
    ran = {*never_ran_in(failing.executed, module)} if passing else set()
    return min(passing, key=lambda one: len(ran ^ {*never_ran_in(one.executed, module)}), default=None)


def _repaired(way: RepairSet) -> Finding:
    """Repairs as a finding: each mistake once, as the layers say it that most say it alike."""
    repairs = way.repairs
    kinds = dict.fromkeys(one.kind for one in repairs)
    details = {key: Counter(one.detail for one in repairs if one.key == key) for key in (one.key for one in repairs)}
    said = (f"{many.most_common(1)[0][0]}, at {line}" for (_, line, _), many in details.items())
    return Finding(
        name=SEVERAL.join(kinds),
        detail="; ".join(said),
        where=tuple(dict.fromkeys(one.where for one in repairs if one.where)),
        probes=(),
        difference=math.nan,
        residual=way.residual,
        what="; ".join(WORDS[kind][0] for kind in kinds),
        fix="; ".join(WORDS[kind][1] for kind in kinds),
        beyond_weights=way.beyond_weights,
    )


def _beside(one: Explained, unknown: Sequence[Point]) -> bool:
    """Whether a named probe and one that is not known are of one layer, or one is within the other's module."""
    for point in one.chosen:
        path = module_of(point)
        for other in unknown:
            there = module_of(other)
            inside = there != ROOT and (path.startswith(f"{there}.") or there.startswith(f"{path}."))
            if inside or (_LAYER.search(path) and _scope(point) == _scope(other)):
                return True
    return False


def _scope(point: Point) -> str:
    """The layer that a probe is in, or the part around its module."""
    path = module_of(point)
    layer = _LAYER.search(path)
    return path[: layer.end()] if layer else path.rpartition(".")[0]


_LAYER = re.compile(r"\.\d+(?=\.|$)")


def _tied(one: Explained, instead: Sequence[Explained]) -> Finding:
    """The finding, with the names of those that are tied with it."""
    finding = one.finding
    keys = [(other.finding.name, other.finding.detail) for other in instead]
    keys = [key for key in keys if key != (finding.name, finding.detail)]
    names = dict.fromkeys(name if name != finding.name else f"{name} ({detail})" for name, detail in keys)
    return replace(finding, ties=tuple(names))


def _doubted(one: Explained) -> Finding:
    """Return the finding as unnamed: it reproduces single probes but not the whole model."""
    finding = one.finding
    near = Suspicion(name=finding.name, detail=finding.detail, residual=finding.residual, share=1.0)
    return Finding(probes=finding.probes, difference=finding.difference, residual=finding.difference, nearest=(near,))


def _merged(found: Sequence[Finding]) -> list[Finding]:
    """The findings, those that say the same of several probes as one."""
    groups: dict[object, list[Finding]] = {}
    for place, one in enumerate(found):
        groups.setdefault((one.name, one.detail, one.ties, one.fix) if one.name else place, []).append(one)
    return [
        replace(
            same[0],
            where=tuple(dict.fromkeys(chain(*(one.where for one in same)))),
            probes=tuple(dict.fromkeys(chain(*(one.probes for one in same)))),
            difference=max(one.difference for one in same),
            residual=max(one.residual for one in same),
        )
        for same in groups.values()
    ]


def _with_line(one: Finding, made: Mapping[Point, non_finite.Broken]) -> Finding:
    """The finding, with what gave the first value that is no number; named after that where it has no name."""
    first = next((made[point] for point in one.probes if point in made), None)
    if first is None:
        return one
    if one.name:
        return replace(one, detail="; ".join(part for part in (one.detail, str(first)) if part))
    name, what, fix = (
        (non_finite.HIDDEN, non_finite.HIDDEN_WHAT, non_finite.HIDDEN_FIX)
        if first.hidden
        else (non_finite.OTHER, non_finite.OTHER_WHAT, non_finite.OTHER_FIX)
    )
    return replace(one, name=name, detail=str(first), what=what, fix=fix, nearest=())
