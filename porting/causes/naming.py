"""Which mistake it was: the entries of the catalogue that turn the reference into the port, down to the noise floor."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from porting.causes.anatomy import Anatomy
from porting.causes.cause import Cause
from porting.causes.fitting import Dial, Solution, solved_for
from porting.causes.replay import Alteration, Rewrite, Stage
from porting.causes.weights import solved, words

NEAREST = 3
"""So many are named when none fits."""

PAIRS = 3000
"""So many pairs of alterations are tried at a module that no single one explains."""

SOLVED = 1e-10
"""What solving for a matrix leaves, relative to the activation's scale."""

ROUGH = 0.25
"""A cause of rounding is found when no more than this share of the difference is left: luck moves last digits."""


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """A cause that was tried, and what it leaves.

    Attributes:
        name: the catalogue's entry.
        detail: the parameter that fits, ``"eps is 1e-05 where the reference has 1e-12"``.
        residual: what the port still differs by, relative to the activation's scale.
        share: how much of the difference that explains, from 0 to 1.
    """

    name: str
    detail: str
    residual: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Why some probes of the port differ.

    Attributes:
        name: the catalogue's entry that reproduces the port, ``""`` when none does.
        detail: with which parameter.
        where: the modules of the reference that were altered.
        probes: the points of the port that it explains; one that stays unknown stands by itself.
        difference: what they differ by, relative to the activation's scale, at most.
        residual: what is left of it when the reference is altered.
        what, fix: the catalogue's words.
        ties: other entries that reproduce the same values just as well.
        nearest: when none does, those that leave least.
    """

    name: str = ""
    detail: str = ""
    where: tuple[str, ...] = ()
    probes: tuple[str, ...]
    difference: float
    residual: float
    what: str = ""
    fix: str = ""
    ties: tuple[str, ...] = ()
    nearest: tuple[Suspicion, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The entry and those that are tied with it."""
        return (self.name, *self.ties) if self.name else ()


@dataclass(frozen=True, eq=False)
class Candidate:
    """A cause at one place, or at several at once."""

    causes: tuple[Cause, ...]
    alterations: tuple[Alteration, ...]

    @property
    def key(self) -> tuple[str, str]:
        """What is reported as one when it is found in several places."""
        names = dict.fromkeys(one.name for one in self.causes)
        details = dict.fromkeys(one.detail for one in self.alterations if one.detail)
        return " + ".join(names), "; ".join(details)

    @property
    def rough(self) -> bool:
        """Whether one of them reproduces a rounding error, which it does up to luck."""
        return any(one.rough for one in self.causes)

    @property
    def rewrites(self) -> dict[int, Rewrite]:
        """All that is rewritten."""
        return {number: one for alteration in self.alterations for number, one in alteration.rewrites.items()}


@dataclass(frozen=True)
class Gap:
    """How far two values are apart, relative to the activation's scale: at most, and in the root mean square."""

    largest: float
    rms: float

    def of(self, candidate: Candidate) -> float:
        """What counts for a candidate: a rounding error is reproduced but for a few digits that fell the other way."""
        return self.rms if candidate.rough else self.largest


APART = Gap(float("inf"), float("inf"))


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A place where the port differs.

    Attributes:
        name: the port's point.
        sources: the marks on the reference's tape that make up its counterpart.
        gap: how far the port is off.
        bound: what rounding explains.
    """

    name: str
    sources: tuple[str, ...]
    gap: Gap
    bound: float

    @property
    def difference(self) -> float:
        """How far the port is off at most."""
        return self.gap.largest


@dataclass
class Search:
    """The search on one tape.

    Args:
        anatomy: the reference's.
        stage: its tape, with what the isolated run held still.
        causes: the catalogue.
        distance: how far the altered values of a mark's sources are from the port's value there.
        target: the port's value at a mark, as the reference would have it; None where that is not known.
        innocent: the marks at which the port computes what the reference does.
        until: when it ends (:func:`time.monotonic`); what was not tried by then explains nothing.
    """

    anatomy: Anatomy
    stage: Stage
    causes: Sequence[Cause]
    distance: Callable[[Mark, Mapping[str, Tensor]], Gap]
    target: Callable[[Mark], Tensor | None] = lambda mark: None
    innocent: Sequence[Mark] = ()
    until: float = math.inf
    _all: list[Candidate] = field(default_factory=list)
    _dials: list[tuple[Cause, Dial]] = field(default_factory=list)
    _solved: dict[Cause, dict[Solution, None]] = field(default_factory=dict)
    _dialled: dict[Candidate, Sequence[Dial]] = field(default_factory=dict)
    _left: dict[tuple[Candidate, str], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for cause in self.causes:
            self._all += [Candidate((cause,), (one,)) for one in cause.alterations(self.anatomy)]
            self._dials += [(cause, one) for one in cause.dials(self.anatomy)]

    @torch.no_grad()
    def find(self, guilty: Sequence[Mark]) -> list[Finding]:
        """Why these marks differ: a finding for each cause, in the order of the marks."""
        fitting: dict[str, list[Candidate]] = {mark.name: self._fitting(mark) for mark in guilty}
        fitting = {mark.name: self._shared(mark, fitting[mark.name]) for mark in guilty}
        left = [mark for mark in guilty if fitting[mark.name]]
        found: list[Finding] = []
        while left:
            explained: dict[tuple[str, str], list[Mark]] = {}
            for mark in left:
                for key in dict.fromkeys(one.key for one in fitting[mark.name]):
                    explained.setdefault(key, []).append(mark)
            most = max(len(marks) for marks in explained.values())
            best = [key for key, marks in explained.items() if len(marks) == most]
            key = min(best, key=lambda one: self._simplicity(one, fitting))
            marks = explained[key]
            ties = [one for one in best if one != key and explained[one] == marks]
            ties = [one for one in ties if not self._simplicity(one, fitting)[0] and not self._same_number(one, key)]
            found.append(self._finding(key, marks, fitting, ties))
            left = [mark for mark in left if mark not in marks]
        order = {mark.name: number for number, mark in enumerate(guilty)}
        found += self._rest([mark for mark in guilty if not fitting[mark.name]])
        return sorted(found, key=lambda one: min(order[name] for name in one.probes))

    def _same_number(self, one: tuple[str, str], another: tuple[str, str]) -> bool:
        """Whether two keys are one number, spelled with more digits and with fewer."""
        return one[0] == another[0] in {cause.name for cause in self._solved}

    @staticmethod
    def _simplicity(key: tuple[str, str], fitting: Mapping[str, list[Candidate]]) -> tuple[bool, int]:
        """The smaller the simpler: what shows in one place, by one change."""
        return min(
            (any(cause.wide for cause in one.causes), len(one.alterations))
            for many in fitting.values()
            for one in many
            if one.key == key
        )

    def _fitting(self, mark: Mark) -> list[Candidate]:
        """What reproduces the port at a mark: a candidate, or else one kind in several places, or a pair."""
        near = list(self._near(mark))
        fits = [one for one in near if self._explains(mark, one)]
        exact = [one for one in fits if not one.rough]
        if not exact:  # before a number is solved for, which takes a hundred times as long
            exact = [one for one in self._everywhere(near) if not one.rough and self._explains(mark, one)]
        fits = exact or list(self._fitted(mark)) or fits
        if not fits:
            fits = [one for one in self._everywhere(near) if one.rough and self._explains(mark, one)]
        if not fits:
            apart = sorted((one for one in near if not one.rough), key=lambda one: self._try(mark, one))
            pairs = (two for two in combinations(apart, 2) if not _overlap(*two))
            joined = (Candidate(a.causes + b.causes, a.alterations + b.alterations) for a, b in _first(pairs, PAIRS))
            fits = next(([one] for one in joined if self._explains(mark, one)), [])
        return fits

    def _near(self, mark: Mark) -> Iterator[Candidate]:
        numbers = frozenset().union(*(self.stage.numbers[name] for name in mark.sources))
        return (one for one in self._all if not numbers.isdisjoint(one.rewrites))

    def _fitted(self, mark: Mark) -> Iterator[Candidate]:
        """A number that was solved for, at one place, or the same at all that a mark depends on."""
        numbers = frozenset().union(*(self.stage.numbers[name] for name in mark.sources))
        near: dict[Cause, list[Dial]] = {}
        for cause, dial in self._dials:
            if not numbers.isdisjoint(dial.calls):
                near.setdefault(cause, []).append(dial)
        known = [one for cause, dials in near.items() for one in self._known(mark, cause, dials)]
        if known:  # at another mark: what explains this one as well need not be solved for again
            yield from known
            return
        for cause, dials in near.items():
            for places in _places(dials):
                found = solved_for(places, lambda rewrites: self._apart(mark, rewrites), mark.bound)
                candidate = None if found is None else Candidate((cause,), found.at(places))
                if found and candidate and self._explains(mark, candidate):
                    self._solved.setdefault(cause, {})[found] = None
                    self._dialled[candidate] = places
                    yield candidate
                    break

    def _known(self, mark: Mark, cause: Cause, dials: list[Dial]) -> Iterator[Candidate]:
        """The values that were solved for at other marks, where they explain this one."""
        for value in self._solved.get(cause, ()):
            for places in _places(dials):
                candidate = Candidate((cause,), value.at(places))
                if self._explains(mark, candidate):
                    self._dialled[candidate] = places
                    yield candidate
                    break

    def _shared(self, mark: Mark, fits: Sequence[Candidate]) -> list[Candidate]:
        """What fits, and the values that were solved for at other marks and fit here as well."""
        found, keys = list(fits), {one.key for one in fits}
        for one in (one for one in fits if one in self._dialled):
            for value in self._solved[one.causes[0]]:
                candidate = Candidate(one.causes, value.at(self._dialled[one]))
                if candidate.key not in keys and self._explains(mark, candidate):
                    keys.add(candidate.key)
                    found.append(candidate)
        return found

    def _apart(self, mark: Mark, rewrites: Mapping[int, Rewrite]) -> tuple[float, float]:
        gap = self._distance(mark, rewrites)
        return gap.rms, gap.largest

    def _everywhere(self, near: Sequence[Candidate]) -> Iterator[Candidate]:
        """The same mistake at all places that a mark depends on."""
        kinds: dict[tuple[str, str], list[Candidate]] = {}
        for one in near:
            kinds.setdefault(one.key, []).append(one)
        for many in kinds.values():
            if len(many) > 1:
                yield Candidate(many[0].causes, tuple(alteration for one in many for alteration in one.alterations))

    def _explains(self, mark: Mark, candidate: Candidate) -> bool:
        bound = max(mark.bound, ROUGH * mark.gap.rms) if candidate.rough else mark.bound
        return self._try(mark, candidate) <= bound and not self._accuses(candidate)

    def _accuses(self, candidate: Candidate) -> bool:
        """Whether it would make a difference where there is none."""
        rewrites = candidate.rewrites
        for mark in self.innocent:
            reached = any(not self.stage.numbers[name].isdisjoint(rewrites) for name in mark.sources)
            if reached and self._try(mark, candidate) > max(mark.bound, 2 * mark.difference):
                return True
        return False

    def _try(self, mark: Mark, candidate: Candidate) -> float:
        key = (candidate, mark.name)
        if key not in self._left and time.monotonic() > self.until:
            return math.inf
        if key not in self._left:
            self._left[key] = self._distance(mark, candidate.rewrites).of(candidate)
        return self._left[key]

    def _distance(self, mark: Mark, rewrites: Mapping[int, Rewrite]) -> Gap:
        altered: dict[str, Tensor] = {}
        for name in mark.sources:
            try:
                value = self.stage.play(name, rewrites)
            except (RuntimeError, IndexError, ValueError):  # the alteration does not fit these shapes
                return APART
            if value is not None:
                altered[name] = value
        return self.distance(mark, altered)

    def _finding(
        self,
        key: tuple[str, str],
        marks: Sequence[Mark],
        fitting: Mapping[str, list[Candidate]],
        ties: Sequence[tuple[str, str]],
    ) -> Finding:
        chosen = [one for mark in marks for one in fitting[mark.name] if one.key == key]
        causes = list(dict.fromkeys(cause for cause in chosen[0].causes))
        return Finding(
            name=key[0],
            detail=key[1],
            where=tuple(dict.fromkeys(alteration.where for one in chosen for alteration in one.alterations)),
            probes=tuple(mark.name for mark in marks),
            difference=max(mark.difference for mark in marks),
            residual=max(min(self._try(mark, one) for one in chosen if one in fitting[mark.name]) for mark in marks),
            what="; ".join(one.what for one in causes),
            fix="; ".join(one.fix for one in causes),
            ties=tuple(dict.fromkeys(name if name != key[0] else f"{name} ({detail})" for name, detail in ties)),
        )

    def _rest(self, marks: Sequence[Mark]) -> list[Finding]:
        """What no entry reproduces: other weights, where that is seen; else unknown, once for each module."""
        found: list[Finding] = []
        unknown: dict[str, list[Mark]] = {}
        for mark in marks:
            known = self._weights(mark)
            if known is None:
                unknown.setdefault(mark.name.partition(" -> ")[0], []).append(mark)
            else:
                found.append(known)
        return found + [self._unknown(many) for many in unknown.values()]

    def _weights(self, mark: Mark) -> Finding | None:
        """A linear map with other weights, which the port's own values tell."""
        late = time.monotonic() > self.until
        target = self.target(mark) if len(mark.sources) == 1 and not late else None
        solution = None if target is None else solved(self.anatomy, self.stage, mark.sources[0], target)
        if solution is None:
            return None
        linear, alteration = solution
        left = self._distance(mark, alteration.rewrites).largest
        if left > max(mark.bound, SOLVED):
            return None
        name, what, fix = words(linear, self.anatomy)
        return Finding(
            name=name,
            where=(alteration.where,),
            probes=(mark.name,),
            difference=mark.difference,
            residual=left,
            what=what,
            fix=fix,
        )

    def _unknown(self, marks: Sequence[Mark]) -> Finding:
        first = marks[0]
        nearest: dict[str, Suspicion] = {}
        for one in sorted(self._near(first), key=lambda one: self._try(first, one)):
            left = self._try(first, one)
            whole = first.gap.of(one)
            if left < whole:
                share = 1 - left / whole
                suspicion = Suspicion(name=one.key[0], detail=one.key[1], residual=left, share=share)
                nearest.setdefault(suspicion.name, suspicion)
        difference = max(mark.difference for mark in marks)
        return Finding(
            probes=tuple(mark.name for mark in marks),
            difference=difference,
            residual=difference,
            nearest=tuple(nearest.values())[:NEAREST],
        )


def _places(dials: list[Dial]) -> list[list[Dial]]:
    """Each place alone, and all at once."""
    return [[one] for one in dials] + ([dials] if len(dials) > 1 else [])


def _overlap(one: Candidate, another: Candidate) -> bool:
    return not one.rewrites.keys().isdisjoint(another.rewrites)


def _first(pairs: Iterator[tuple[Candidate, Candidate]], most: int) -> Iterator[tuple[Candidate, Candidate]]:
    return (pair for _, pair in zip(range(most), pairs, strict=False))
