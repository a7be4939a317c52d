"""Changes of the port that mend it: of what its masks mean, of lines of the table, and of lines of the user's code."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import TypeVar

import torch

from porting.causes.catalogue import CATALOGUE
from porting.causes.finding import Finding
from porting.causes.line_edits import NOTHING, condition_edits, line_edits
from porting.causes.step_differences import WORDS, Kind
from porting.reporting.outcome import Probe
from porting.tracing.code_coverage import branches_apart
from porting.tracing.trace import ROOT, Point, module_of
from porting.verification.cause_case import END, CauseCase, PassCost
from porting.verification.table_layouts import WHAT, Correction

Attempt = TypeVar("Attempt")

Layouts = Callable[[Sequence[str]], Iterator[Correction]]
"""Yields other lines of the table for those at some places, :func:`porting.verification.table_layouts.corrections`."""

HELD_OUT = 3
"""In so many other cases an entry is confirmed, where there are so many; one more is drawn for it."""

CHANGING = 8.0
"""Seconds for trying changes of the table, and then of the user's lines."""

EDITS_EXPLAINED = 600
"""How many changes of the user's lines are tried, where entries of the catalogue explain every probe."""

FEW = 3
"""On so many batches of other kinds an entry is confirmed that alters neither masks nor positions nor token ids, and a
line that mends what an entry explains."""

SEVERAL = " + "
"""The separator between the names of several mistakes that are one finding."""


POLARITY = '"-> padding" in [inputs] is True = ignore, as key_padding_mask of torch; "-> bool" is True = attend'


def inverted_masks(known: Sequence[CauseCase], probes: Sequence[Probe]) -> list[Finding]:
    """Whether the port is right in every case when its masks of True and False are inverted: [inputs] says which."""
    guilty = [probe for probe in probes if probe.guilty]
    names = dict.fromkeys(
        name
        for cause_case in known
        for name, one in cause_case.port.arguments[cause_case.case].items()
        if one.dtype == torch.bool
    )
    for name in names:
        left = [cause_case.left_when_inverted(name, probes) for cause_case in known]
        if any(one is not None for one in left) and all(one is None or one <= END for one in left):
            return [
                Finding(
                    name="mask polarity in [inputs]",
                    detail=f"with {name} inverted the port computes what the reference does",
                    probes=tuple(probe.port for probe in guilty),
                    difference=max(probe.meaning.isolated or 0.0 for probe in guilty),
                    residual=max(one for one in left if one is not None),
                    what=f"the port takes True in {name} for what [inputs] gives it as False",
                    fix=POLARITY,
                )
            ]
    return []


SPECIAL = "special case that the reference does not have"
SPECIAL_WHAT = "the port does something else on some inputs, and the reference treats all alike"


def special_cases(
    passing: Sequence[CauseCase],
    failing: Sequence[CauseCase],
    cases: Sequence[CauseCase],
    probes: Sequence[Probe],
    until: float,
    wide: Iterable[CauseCase],
) -> list[Finding]:
    """The condition that the port decides otherwise where it is wrong than where it is right, if that is the mistake.

    It is, if the port is right in every case when the condition is decided the same way in all.

    Args:
        passing, failing: cases in which every guilty probe is right, and such in which one is wrong.
        cases: all of the first ones, a failing one first.
        wide: cases of other kinds, for what is right in those.
    """
    guilty = [probe for probe in probes if probe.guilty]
    if not passing or not failing:
        return []
    module = failing[0].port.module
    apart = branches_apart([one.executed for one in passing], [one.executed for one in failing], module)
    attempts = (
        (edit, lambda case, edit=edit: edit.made()) for edit in condition_edits([branch.where for branch in apart])
    )
    for edit, right in _mended(cases, probes, attempts, until, wide=wide):
        if len(right) == len(guilty):
            detail = f"`{edit.old}`, at {edit.place}: written as `{edit.new}`, your model is right on all inputs"
            return [_finding(right, SPECIAL, detail, SPECIAL_WHAT, edit.fix)]
    return []


def passing_and_failing(known: Sequence[CauseCase], guilty: Sequence[Probe]) -> tuple[list[CauseCase], list[CauseCase]]:
    """The cases in which every one of some probes is right, and those in which one is wrong."""
    passing, failing = list[CauseCase](), list[CauseCase]()
    for cause_case in known:
        marks = cause_case.marks(guilty).values()
        (passing if all(mark.difference <= mark.bound for mark in marks) else failing).append(cause_case)
    return passing, failing


def laid_out_otherwise(
    cases: Sequence[CauseCase], probes: Sequence[Probe], layouts: Layouts, until: float
) -> list[tuple[Correction, Finding]]:
    """The lines of the table that make guilty probes right when they are written otherwise, in every case."""
    rules = tuple(dict.fromkeys(where for probe in probes if probe.guilty for where in probe.rules))
    attempts = ((one, lambda case, one=one: case.with_weights(one.values)) for one in layouts(rules))
    return [
        (one, _finding(right, one.name, one.detail, WHAT[one.name], one.fix))
        for one, right in _mended(cases, probes, attempts, until)
    ]


def _finding(right: Mapping[Point, tuple[float, float]], name: str, detail: str, what: str, fix: str) -> Finding:
    """A change that mends probes as a finding; ``right``: how far each was and is off."""
    return Finding(
        name=name,
        detail=detail,
        probes=tuple(right),
        difference=max(before for before, _ in right.values()),
        residual=max(left for _, left in right.values()),
        what=what,
        fix=fix,
    )


def _mended(
    cases: Sequence[CauseCase],
    probes: Sequence[Probe],
    attempts: Iterable[tuple[Attempt, Callable[[CauseCase], AbstractContextManager[None]]]],
    until: float,
    refused: Callable[[Attempt], bool] = lambda attempt: False,
    together: Sequence[Collection[Point]] = (),
    wide: Iterable[CauseCase] = (),
    most: int | None = None,
) -> list[tuple[Attempt, dict[Point, tuple[float, float]]]]:
    """The changes of the port that make guilty probes right in every case, and none wrong.

    Args:
        cases: the cases; the changes are tried in the first one.
        attempts: the changes, each with what makes the context in which it is made.
        until: the deadline, by ``time.thread_time``.
        refused: whether a change does not count, once it was tried in all cases.
        together: probes that have one cause: a change that leaves one of them wrong is of no use to the others.
        wide: cases in which only what is right in the others is tried.
        most: how many of those; None for all.

    Returns:
        For each change the probes that it alone, of those before it, makes right: how far they were and are off.
    """
    begun = time.thread_time()
    until = begun + min(CHANGING, (until - begun) / 4)
    open_ = {probe.port: probe for probe in probes if probe.guilty}
    limits = {probe.port: probe.bound.isolated or 0.0 for probe in probes}
    before = cases[0].left_with(nullcontext(), probes)
    usual = PassCost.most(case.cost for case in cases)
    wrong = {point for point in open_ if before.get(point, 0.0) > limits[point]}
    found: list[tuple[Attempt, dict[Point, tuple[float, float]]]] = []
    for attempt, made in attempts if wrong else ():
        if time.thread_time() > until:
            break
        left = cases[0].left_with(made(cases[0]), probes, _hopeless(before, limits, wrong, together), usual)
        right = [point for point in wrong if left.get(point, math.inf) <= limits[point]]
        if not right or any(left.get(point, math.inf) > limits[point] >= before[point] for point in before):
            continue
        others = [open_[point] for point in right]
        ways = [case.left_with(made(case), others, usual=usual) for case in cases[1:]]
        right = [point for point in right if all(way and way.get(point, 0.0) <= limits[point] for way in ways)]
        if refused(attempt):
            continue
        for case in islice(wide, most) if right else ():
            ways.append(case.left_with(made(case), others, usual=PassCost.most((usual, case.cost))))
            right = [point for point in right if ways[-1] and ways[-1].get(point, 0.0) <= limits[point]]
            if not right:
                break
        if right:
            off = {point: max(way.get(point, 0.0) for way in (left, *ways)) for point in open_ if point in right}
            found.append((attempt, {point: (before[point], far) for point, far in off.items()}))
        if len(right) == len(wrong):
            break
    result = []
    for attempt, distances in sorted(found, key=lambda one: -len(one[1])):
        mended = {point: far for point, far in distances.items() if point in open_}
        if mended:
            result.append((attempt, mended))
            open_ = {point: probe for point, probe in open_.items() if point not in mended}
    return result


def _hopeless(
    before: Mapping[Point, float],
    limits: Mapping[Point, float],
    wrong: Collection[Point],
    together: Sequence[Collection[Point]],
) -> Callable[[Point, float], bool]:
    """Return a function, called with each probe of a pass, that says whether the change should not be made.

    Args:
        before: how far each probe is off without the change.
        limits: how far each may be off.
        wrong: the probes that are to become right.
        together: those of them that only count together.
    """
    open_ = {*wrong}

    def is_hopeless(point: Point, far: float) -> bool:
        if far <= limits[point]:
            return False
        if before.get(point, math.inf) <= limits[point]:
            return True
        open_.discard(point)
        open_.difference_update(*(points for points in together if point in points))
        return not open_

    return is_hopeless


def with_edits(
    found: Sequence[Finding],
    cases: Sequence[CauseCase],
    probes: Sequence[Probe],
    lines: Sequence[str],
    until: float,
    wide: Iterable[CauseCase],
) -> list[Finding]:
    """The findings, each with the line of the user's code that mends what it explains, and what should stand there."""
    entries = [one for one in found if one.name and one.name != Kind.VALUES]
    explained = all(is_explained(probe, entries) for probe in probes if probe.guilty)
    edits = islice(line_edits(lines), EDITS_EXPLAINED if explained else None)
    most = FEW if explained else None  # what an entry explains was confirmed on these batches
    attempts = ((edit, lambda case, edit=edit: edit.made()) for edit in edits)
    together = [one.probes for one in found]
    result = list(found)
    for edit, right in _mended(cases, probes, attempts, until, lambda edit: edit.decides_nothing, together, wide, most):
        same = [one for one in result if {*one.probes} & {*right}]
        if not all({*one.probes} <= {*right} for one in same):
            continue  # it mends a part of what has one cause: by chance, or in a roundabout way
        written = f"{edit.place}: {edit.instruction}"
        told = [one for one in same if one.name and SEVERAL not in one.name and one.name != Kind.VALUES]
        named = [replace(one, fix=f"{one.fix}; {written}") for one in told]
        if not named:
            if _leaves_its_module_wrong(right, probes, [one for one in result if one.name]):
                continue  # what is behind may undo it, as a norm that follows a rotation, or make up for another
            what = "one expression of a line differs from what the reference computes"
            detail = edit.instruction if edit.new == NOTHING or edit.moved else f"`{edit.old}` should be `{edit.new}`"
            name = "another expression"
            if edit.moved:
                name, (what, _) = Kind.EXCHANGED, WORDS[Kind.EXCHANGED]
            named = [_finding(right, name, detail, what, edit.fix)]
        result = [*(one for one in result if one not in same), *named]
    return result


def _leaves_its_module_wrong(mended: Collection[Point], probes: Sequence[Probe], entries: Sequence[Finding]) -> bool:
    """Whether a module around what is mended stays wrong, or the first wrong one within it, and nothing says why.

    The lines that are changed lead to the first wrong probe: one that mends what is behind it alone makes up for it.
    """
    around = {point[:end] for point in map(str, mended) for end, letter in enumerate(point) if letter == "."}
    first = next((probe.port for probe in probes if probe.guilty), ROOT)
    within = {first} if any(module_of(first).startswith(f"{module_of(point)}.") for point in mended) else set()
    return any(
        probe.guilty
        and str(probe.port) in {*around, *within}
        and probe.port not in mended
        and not is_explained(probe, entries)
        for probe in probes
    )


def with_lines(found: Sequence[Finding], laid_out: Sequence[tuple[Correction, Finding]]) -> list[Finding]:
    """The findings, with the lines of the table that would mend them; an entry keeps its name."""
    names = {cause.name for cause in CATALOGUE}
    result = list(found)
    for correction, line in laid_out:
        same = [one for one in result if {*one.probes} & {*line.probes}]
        result = [one for one in result if one not in same]
        named = next((one for one in same if one.name in names and not {*line.probes} - {*one.probes}), None)
        if named is not None:
            fix = line.fix if correction.explicit else f"{line.fix}; or, in the module: {named.fix}"
            result.append(replace(named, detail="; ".join(filter(None, (named.detail, line.detail))), fix=fix))
        else:
            result.append(line)
    return result


def is_explained(probe: Probe, found: Sequence[Finding]) -> bool:
    """Whether one of these is of a probe."""
    return any(probe.port in one.probes for one in found)
