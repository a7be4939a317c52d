"""Which mistake it was: the entries of the catalogue that turn the reference into the port, down to the noise floor."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from porting.causes.cause import Cause
from porting.causes.extra import Turned, extras
from porting.causes.finding import APART, Candidate, Explained, Finding, Gap, Mark, Place, Suspicion
from porting.causes.fitting import Dial, Solution, solved_for
from porting.causes.model_parts import ModelParts
from porting.causes.replay import Alteration, Rewrite, Stage
from porting.causes.weights import OTHER, replaced, solved, words

NEAREST = 3
"""So many are named when none fits."""

WAYS = 4
"""So many ways in which one entry reproduces the same marks are tried end to end."""

PAIRS = 500
"""So many pairs of alterations are tried at a module that no single one explains."""

SOLVED = 1e-9
"""What solving for a matrix leaves, relative to the activation's scale."""

ROUGH = 0.25
"""A cause of rounding is found when no more than this share of the difference is left: luck moves last digits."""


LOOSE, TELLING = 1e-9, 20.0
"""A cause leaves less of the difference than one part in the second, where that is more than the first."""


@dataclass
class Search:
    """The search on one tape.

    Args:
        model_parts: the reference's.
        stage: its tape, with what the isolated run held still.
        causes: the catalogue.
        distance: how far the altered values of a mark's sources are from the port's value there.
        target: the port's value at a mark, as the reference would have it; None where that is not known.
        innocent: the marks at which the port computes what the reference does.
        confirms: whether a candidate reproduces the port at a mark in cases that it was not fitted on.
        confirms_extra, confirms_weights: the same of what was solved for at the mark itself.
        weights_compared: the port's weights are the checkpoint's, bit by bit.
        solving: what no entry explains is solved for: a function of the reference's value, or weights of no known kind.
        until: when it ends (:func:`time.thread_time`); what was not tried by then explains nothing.
    """

    model_parts: ModelParts
    stage: Stage
    causes: Sequence[Cause]
    distance: Callable[[Mark, Mapping[str, Tensor]], Gap]
    target: Callable[[Mark], Tensor | None] = lambda mark: None
    innocent: Sequence[Mark] = ()
    confirms: Callable[[Mark, Candidate], bool] = lambda mark, candidate: True
    confirms_extra: Callable[[Mark, Turned], bool] = lambda mark, turned: True
    confirms_weights: Callable[[Mark, str, Tensor], bool] = lambda mark, module, matrix: True
    weights_compared: bool = False
    solving: bool = True
    until: float = math.inf
    _all: list[Candidate] = field(default_factory=list)
    _dials: list[tuple[Cause, Dial]] = field(default_factory=list)
    _solved: dict[Cause, dict[Solution, None]] = field(default_factory=dict)
    _dialled: dict[Candidate, Sequence[Dial]] = field(default_factory=dict)
    _left: dict[tuple[Candidate, str], float] = field(default_factory=dict)

    @torch.no_grad()
    def __post_init__(self) -> None:
        for cause in self.causes:
            self._all += [Candidate((cause,), (alteration,)) for alteration in cause.alterations(self.model_parts)]
            self._dials += [(cause, dial) for dial in cause.dials(self.model_parts)]

    @torch.no_grad()
    def reproduces(self, mark: Mark, candidate: Candidate) -> bool:
        """Whether a candidate of another case's search reproduces the port in this case.

        Where its alterations do not exist here, as those of a padding mask without padding, the port must not differ.
        """
        here = list(self.again(candidate))
        return any(self._small_enough(mark, suspicion) for suspicion in here) if here else mark.difference <= mark.bound

    def everything(self, scopes: Collection[str]) -> Iterator[Candidate]:
        """The candidates in some parts of a model that make up a whole: each kind at all places at once, and each."""
        whole = [
            candidate
            for candidate in self._all
            if not candidate.pinned and not candidate.rough and _within(candidate, scopes)
        ]
        yield from self._everywhere(whole)
        yield from whole

    def again(self, candidate: Candidate) -> Iterator[Candidate]:
        """The candidates on this tape that say the same as one of another case's search."""
        ways = [way for place in candidate.places if (way := self._again(place))]
        for number in range(max(map(len, ways), default=0)):
            yield Candidate(candidate.causes, tuple(way[min(number, len(way) - 1)] for way in ways))

    def _again(self, place: Place) -> list[Alteration]:
        """The alterations on this tape that say the same."""
        if place.value is None:
            alike = (candidate for candidate in self._all if candidate.causes[0] is place.cause)
            found = [alteration for candidate in alike for alteration in candidate.alterations]
            return [
                alteration
                for alteration in found
                if (alteration.where, alteration.detail) == (place.where, place.detail)
            ]
        alike_dials = (dial for cause, dial in self._dials if cause is place.cause and dial.where == place.where)
        return [
            Alteration(where=dial.where, rewrites=dial.turned(place.value), detail=place.detail, value=place.value)
            for dial in alike_dials
        ]

    @torch.no_grad()
    def find(self, guilty: Sequence[Mark]) -> list[Explained]:
        """Why these marks differ: a finding for each cause, in the order of the marks."""
        fitting: dict[str, list[Candidate]] = {mark.name: self._fitting(mark) for mark in guilty}
        fitting = {mark.name: self._shared(mark, fitting[mark.name]) for mark in guilty}
        left = [mark for mark in guilty if fitting[mark.name]]
        found: list[Explained] = []
        while left:
            explained: dict[tuple[str, str], list[Mark]] = {}
            for mark in left:
                for key in dict.fromkeys(candidate.key for candidate in fitting[mark.name]):
                    explained.setdefault(key, []).append(mark)
            most = max(len(marks) for marks in explained.values())
            best = [key for key, marks in explained.items() if len(marks) == most]
            key = min(best, key=lambda key: self._simplicity(key, fitting))
            marks = explained[key]
            ties = [other_key for other_key in best if other_key != key and explained[other_key] == marks]
            ties = [tie for tie in ties if not self._simplicity(tie, fitting)[0] and not self._same_number(tie, key)]
            instead = tuple(self._finding(tie, marks, fitting, ()) for tie in ties)
            found.append(self._finding(key, marks, fitting, instead))
            left = [mark for mark in left if mark not in marks]
        order = {mark.name: number for number, mark in enumerate(guilty)}
        found += self._rest([mark for mark in guilty if not fitting[mark.name]])
        return sorted(found, key=lambda match: min(order[name] for name in match.finding.probes))

    def _same_number(self, first: tuple[str, str], another: tuple[str, str]) -> bool:
        """Whether two keys are one number, spelled with more digits and with fewer."""
        return first[0] == another[0] in {cause.name for cause in self._solved}

    @staticmethod
    def _simplicity(key: tuple[str, str], fitting: Mapping[str, list[Candidate]]) -> tuple[bool, int]:
        """The smaller the simpler: what shows in one place, by one change."""
        return min(
            (any(cause.wide for cause in entry.causes), len(entry.alterations))
            for many in fitting.values()
            for entry in many
            if entry.key == key
        )

    def _fitting(self, mark: Mark) -> list[Candidate]:
        """What reproduces the port at a mark: a candidate, or else one kind in several places, or a pair."""
        near = list(self._near(mark, self._all))
        fits = [candidate for candidate in near if self._holds(mark, candidate)]
        exact = [candidate for candidate in fits if not candidate.rough]
        if not exact:
            exact = [
                candidate
                for candidate in self._everywhere(near)
                if not candidate.rough and self._holds(mark, candidate)
            ]
        fits = exact or list(self._fitted(mark, self._dials)) or fits
        if not fits:
            fits = [
                candidate for candidate in self._everywhere(near) if candidate.rough and self._holds(mark, candidate)
            ]
        if not fits and math.isfinite(mark.difference):
            apart = sorted(
                (candidate for candidate in near if not candidate.rough),
                key=lambda candidate: self._try(mark, candidate),
            )
            pairs = (two for two in combinations(apart, 2) if not _overlap(*two))
            joined = (Candidate(a.causes + b.causes, a.alterations + b.alterations) for a, b in _first(pairs, PAIRS))
            fits = next(([candidate] for candidate in joined if self._holds(mark, candidate)), [])
        return fits

    def _near(self, mark: Mark, known: Sequence[Candidate]) -> Iterator[Candidate]:
        numbers = frozenset().union(*(self.stage.numbers[name] for name in mark.sources))
        return (candidate for candidate in known if not numbers.isdisjoint(candidate.rewrites))

    def _fitted(self, mark: Mark, dials: Sequence[tuple[Cause, Dial]]) -> Iterator[Candidate]:
        """A number that was solved for, at one place, or the same at all that a mark depends on."""
        numbers = frozenset().union(*(self.stage.numbers[name] for name in mark.sources))
        near: dict[Cause, list[Dial]] = {}
        for cause, dial in dials:
            if not numbers.isdisjoint(dial.calls):
                near.setdefault(cause, []).append(dial)
        known = [candidate for cause, here in near.items() for candidate in self._known(mark, cause, here)]
        if known:  # at another mark: what explains this one as well need not be solved for again
            yield from known
            return
        for cause, here in near.items():
            for places in _places(here):
                found = solved_for(places, lambda rewrites: self._apart(mark, rewrites), mark.bound)
                candidate = None if found is None else Candidate((cause,), found.at(places))
                if found and candidate and self._holds(mark, candidate):
                    self._solved.setdefault(cause, {})[found] = None
                    self._dialled[candidate] = places
                    yield candidate
                    break

    def _known(self, mark: Mark, cause: Cause, dials: list[Dial]) -> Iterator[Candidate]:
        """The values that were solved for at other marks, where they explain this one."""
        for value in self._solved.get(cause, ()):
            for places in _places(dials):
                candidate = Candidate((cause,), value.at(places))
                if self._holds(mark, candidate):
                    self._dialled[candidate] = places
                    yield candidate
                    break

    def _shared(self, mark: Mark, fits: Sequence[Candidate]) -> list[Candidate]:
        """What fits, and the values that were solved for at other marks and fit here as well."""
        found, keys = list(fits), {candidate.key for candidate in fits}
        for dialled in (candidate for candidate in fits if candidate in self._dialled):
            for value in self._solved[dialled.causes[0]]:
                candidate = Candidate(dialled.causes, value.at(self._dialled[dialled]))
                if candidate.key not in keys and self._holds(mark, candidate):
                    keys.add(candidate.key)
                    found.append(candidate)
        return found

    def _apart(self, mark: Mark, rewrites: Mapping[int, Rewrite]) -> tuple[float, float]:
        gap = self._distance(mark, rewrites)
        return gap.rms, gap.largest

    def _everywhere(self, near: Sequence[Candidate]) -> Iterator[Candidate]:
        """The same mistake at all places that a mark depends on."""
        kinds: dict[tuple[str, str], list[Candidate]] = {}
        for candidate in near:
            kinds.setdefault(candidate.key, []).append(candidate)
        for many in kinds.values():
            if len(many) > 1:
                yield Candidate(
                    many[0].causes, tuple(alteration for candidate in many for alteration in candidate.alterations)
                )

    def _holds(self, mark: Mark, candidate: Candidate) -> bool:
        """Whether a candidate reproduces the port, in this case and in others, and makes no difference elsewhere."""
        return self._small_enough(mark, candidate) and not self._accuses(candidate) and self.confirms(mark, candidate)

    def _small_enough(self, mark: Mark, candidate: Candidate) -> bool:
        """Whether what is left is rounding; what is not finite never is."""
        bound = max(mark.bound, ROUGH * mark.gap.rms) if candidate.rough else mark.bound
        if not candidate.rough:  # a bound for float32 inside of float64 lets much pass
            bound = min(bound, max(mark.difference / TELLING, LOOSE))
        left = self._try(mark, candidate)
        if not (math.isfinite(left) and left <= bound):
            return False
        # A rounding error is everywhere: what leaves the largest difference as it is reproduces another one.
        whole = mark.gap.largest
        return not candidate.rough or self._distance(mark, candidate.rewrites).largest <= max(mark.bound, whole / 2)

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
        if key not in self._left and time.thread_time() > self.until:
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
        instead: tuple[Explained, ...],
    ) -> Explained:
        chosen = {mark.name: [candidate for candidate in fitting[mark.name] if candidate.key == key] for mark in marks}
        every = [candidate for many in chosen.values() for candidate in many]
        causes = list(dict.fromkeys(cause for cause in every[0].causes))
        finding = Finding(
            name=key[0],
            detail=key[1],
            where=tuple(dict.fromkeys(alteration.where for candidate in every for alteration in candidate.alterations)),
            probes=tuple(mark.name for mark in marks),
            difference=max(mark.difference for mark in marks),
            residual=max(min(self._try(mark, candidate) for candidate in chosen[mark.name]) for mark in marks),
            what="; ".join(cause.what for cause in causes),
            fix="; ".join(cause.fix for cause in causes),
        )
        # Of ways that reproduce a mark, those that reproduce others as well come first.
        shared = {id(candidate): sum(candidate in many for many in chosen.values()) for candidate in every}
        ordered = {name: sorted(many, key=lambda candidate: -shared[id(candidate)]) for name, many in chosen.items()}
        ways = [
            {name: many[min(number, len(many) - 1)] for name, many in ordered.items()}
            for number in range(min(WAYS, max(map(len, ordered.values()))))
        ]
        others = [Explained(finding=finding, chosen=way) for way in ways[1:]]
        return Explained(finding=finding, chosen=ways[0], instead=(*others, *instead))

    def _rest(self, marks: Sequence[Mark]) -> list[Explained]:
        """What no entry reproduces: other weights, or something more, where that is seen; else unknown by module."""
        found: list[Explained] = []
        unknown: dict[str, list[Mark]] = {}
        for mark in marks:
            known = self._solved_at(mark)
            if known is None:
                unknown.setdefault(mark.name.partition(" -> ")[0], []).append(mark)
            else:
                found.append(Explained(finding=known))
        return found + [Explained(finding=self._unknown(many)) for many in unknown.values()]

    def _solved_at(self, mark: Mark) -> Finding | None:
        """What the port's own value at a mark tells of itself."""
        if len(mark.sources) != 1 or time.thread_time() > self.until:
            return None
        if not math.isfinite(mark.difference):
            return None
        target = self.target(mark)
        if target is None:
            return None
        return (self._extra(mark, target) if self.solving else None) or self._weights(mark, target)

    def _extra(self, mark: Mark, target: Tensor) -> Finding | None:
        """Something that is done to the reference's value."""
        (source,) = mark.sources
        value = self.stage.tape[self.stage.tape.marks[source]].double()
        if value.shape != target.shape:
            return None

        def left(made: Tensor) -> float:
            return self.distance(mark, {source: made}).largest

        for extra in extras(value, target, lambda made: left(made) <= mark.bound):
            residual = left(extra.turned(value))
            if residual <= mark.bound and self.confirms_extra(mark, extra.turned):
                return Finding(
                    name=extra.name,
                    detail=extra.detail,
                    where=(source.partition(" -> ")[0],),
                    probes=(mark.name,),
                    difference=mark.difference,
                    residual=residual,
                    what=extra.what,
                    fix=extra.fix,
                )
        return None

    @torch.no_grad()
    def turns(self, mark: Mark, turned: Turned) -> bool:
        """Whether a function of the reference's value at a mark is the port's in this case, too."""
        if len(mark.sources) != 1:
            return False
        value = self.stage.tape[self.stage.tape.marks[mark.sources[0]]].double()
        try:
            made = turned(value)
        except (RuntimeError, IndexError, ValueError):  # an axis that has another extent here
            return False
        return self.distance(mark, {mark.sources[0]: made}).largest <= mark.bound

    def _weights(self, mark: Mark, target: Tensor) -> Finding | None:
        """A linear map with other weights, which the port's own values tell."""
        solution = solved(self.model_parts, self.stage, mark.sources[0], target)
        if solution is None:
            return None
        linear, matrix = solution
        left = self._distance(mark, {linear.call.number: replaced(linear, matrix)}).largest
        if left > max(mark.bound, SOLVED) or not self.confirms_weights(mark, linear.call.module, matrix):
            return None
        name, what, fix = words(linear, self.model_parts, compared=self.weights_compared)
        if name == OTHER and not self.solving:
            return None
        return Finding(
            name=name,
            where=(linear.call.module,),
            probes=(mark.name,),
            difference=mark.difference,
            residual=left,
            what=what,
            fix=fix,
        )

    @torch.no_grad()
    def maps(self, mark: Mark, module: str, matrix: Tensor) -> bool:
        """Whether a module with these weights gives what the port gives at a mark in this case, too."""
        alike = (linear for linear in self.model_parts.linears if linear.call.module == module)
        return any(
            self._distance(mark, {linear.call.number: replaced(linear, matrix)}).largest <= max(mark.bound, SOLVED)
            for linear in alike
        )

    def _unknown(self, marks: Sequence[Mark]) -> Finding:
        first = marks[0]
        nearest: dict[str, Suspicion] = {}
        for candidate in sorted(self._near(first, self._all), key=lambda candidate: self._try(first, candidate)):
            left = self._try(first, candidate)
            whole = first.gap.of(candidate)
            if left < whole:
                share = 1 - left / whole if math.isfinite(whole) else 0.0
                suspicion = Suspicion(name=candidate.key[0], detail=candidate.key[1], residual=left, share=share)
                nearest.setdefault(suspicion.name, suspicion)
        difference = max(mark.difference for mark in marks)
        return Finding(
            probes=tuple(mark.name for mark in marks),
            difference=difference,
            residual=difference,
            nearest=tuple(nearest.values())[:NEAREST],
        )


def _within(candidate: Candidate, scopes: Collection[str]) -> bool:
    """Whether a candidate alters a module in one of these parts."""
    return any(
        f"{place.where}.".startswith(f"{scope}." if scope else "")
        for place in candidate.alterations
        for scope in scopes
    )


def _places(dials: list[Dial]) -> list[list[Dial]]:
    """Each place alone, and all at once."""
    return [[dial] for dial in dials] + ([dials] if len(dials) > 1 else [])


def _overlap(first: Candidate, another: Candidate) -> bool:
    return not first.rewrites.keys().isdisjoint(another.rewrites)


def _first(pairs: Iterator[tuple[Candidate, Candidate]], most: int) -> Iterator[tuple[Candidate, Candidate]]:
    return (pair for _, pair in zip(range(most), pairs, strict=False))
