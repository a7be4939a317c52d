"""Matching the catalogue with a port's differences: which entries turn the reference into the port."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from porting.causes.cause import Cause
from porting.causes.extra import ValueFunction, extras
from porting.causes.finding import APART, Candidate, Explained, Finding, Gap, Mark, Place, Suspicion
from porting.causes.fitting import FreeParameter, Solution, solved_for
from porting.causes.model_parts import ModelParts
from porting.causes.replay import Alteration, Rewrite, Stage
from porting.causes.tape import UNFIT
from porting.causes.weights import OTHER, replaced, solve_weights, words

NEAREST = 3
"""Number of entries that are named where none fits."""

MAX_CHOICES = 4
"""Number of combinations of one entry's alterations that are offered for an end-to-end run."""

MAX_PAIRS = 500
"""Number of pairs of alterations that are tried where no single one explains a difference."""

SOLVED = 1e-9
"""Largest difference after solving for a matrix, relative to the activation's scale."""

ROUGH = 0.25
"""A cause of rounding may leave this share of the difference, since last digits are a matter of luck."""

LOOSE, TELLING = 1e-9, 20.0
"""Any other cause may leave ``difference / TELLING`` at most, or LOOSE where that is less."""


_LAYER = re.compile(r".*?\.\d+(?=\.|$)")


@dataclass
class Search:
    """The search for causes on the tape of one case.

    Args:
        stage: the reference's tape, with the values that the isolated run kept fixed.
        causes: the entries to try.
        distance: a mark and the altered values of its sources -> the distance from the port's value.
        target: a mark -> the port's value in the reference's layout, or None where that is not known.
        matching: the marks at which the port agrees with the reference.
        confirms: whether a candidate reproduces the port at a mark in cases that it was not fitted on.
        confirms_elsewhere: whether something holds of the searches in those cases, and of the mark there.
        weights_compared: whether the port's weights are known to be those of the checkpoint, bit for bit.
        solving: where no entry fits, solve for a function of the reference's value or for unknown weights.
        until: the deadline (:func:`time.thread_time`); what was not tried by then explains nothing.
    """

    model_parts: ModelParts
    stage: Stage
    causes: Sequence[Cause]
    distance: Callable[[Mark, Mapping[str, Tensor]], Gap]
    target: Callable[[Mark], Tensor | None] = lambda mark: None
    matching: Sequence[Mark] = ()
    confirms: Callable[[Mark, Candidate], bool] = lambda mark, candidate: True
    confirms_elsewhere: Callable[[Mark, Callable[[Search, Mark], bool]], bool] = lambda mark, holds: True
    weights_compared: bool = False
    solving: bool = True
    until: float = math.inf
    _candidates: list[Candidate] = field(default_factory=list)
    _whole: list[Candidate] = field(default_factory=list)
    _free_parameters: list[tuple[Cause, FreeParameter]] = field(default_factory=list)
    _solved: dict[Cause, dict[Solution, None]] = field(default_factory=dict)
    _solved_at_places: dict[Candidate, Sequence[FreeParameter]] = field(default_factory=dict)
    _residuals: dict[tuple[Candidate, str], float] = field(default_factory=dict)
    _fits: dict[tuple[str, int], list[Candidate]] = field(default_factory=dict)
    _listed_at: dict[str, list[Candidate]] = field(default_factory=dict)

    @torch.no_grad()
    def __post_init__(self) -> None:
        parts = self.model_parts
        for cause in self.causes:
            with suppress(*UNFIT):  # without this entry the others are still tried; an error would end the report
                self._candidates += [Candidate((cause,), (alteration,)) for alteration in cause.alterations(parts)]
                self._whole += [Candidate((cause,), (alteration,)) for alteration in cause.whole(parts)]
                self._free_parameters += [(cause, parameter) for parameter in cause.free_parameters(parts)]

    @torch.no_grad()
    def reproduces(self, mark: Mark, candidate: Candidate) -> bool:
        """Return whether a candidate of another case's search reproduces the port in this case.

        Where its alterations do not exist here, as those of a padding mask in a batch without padding, the port must
        agree with the reference.
        """
        candidates = list(self.again(candidate))
        return any(self._small_enough(mark, own) for own in candidates) if candidates else mark.difference <= mark.bound

    def recognises(self, candidate: Candidate) -> bool:
        """Return whether all places of a candidate of another case's search are found on this tape."""
        return all(self._at_place(place) for place in candidate.places)

    def everything(self, scopes: Collection[str]) -> Iterator[Candidate]:
        """Yield the candidates that could make up a whole model: each kind at all places, then each alone."""
        candidates = [
            candidate
            for candidate in self._candidates
            if not candidate.pinned and not candidate.rough and _within(candidate, scopes)
        ]
        yield from self._whole
        yield from self._everywhere(candidates)
        yield from candidates

    def everywhere(self) -> Iterator[Candidate]:
        """Yield each kind at all its places in the model, wherever the port differs by itself.

        A bias that one layer looks up and all layers read is altered where it is read.
        """
        yield from self._everywhere([one for one in self._candidates if not one.pinned and not one.rough])

    def again(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield the candidates on this tape that correspond to one of another case's search."""
        matches = [alterations for place in candidate.places if (alterations := self._at_place(place))]
        for index in range(max(map(len, matches), default=0)):
            yield Candidate(
                candidate.causes, tuple(alterations[min(index, len(alterations) - 1)] for alterations in matches)
            )

    def _at_place(self, place: Place) -> list[Alteration]:
        """Return the alterations on this tape that correspond to one of another case."""
        if place.value is None:
            every = (*self._candidates, *self._whole)
            own = (candidate for candidate in every if candidate.causes[0] is place.cause)
            alterations = [alteration for candidate in own for alteration in candidate.alterations]
            return [
                alteration
                for alteration in alterations
                if (alteration.where, alteration.detail) == (place.where, place.detail)
            ]
        return [
            Alteration(
                where=place.where, rewrites=parameter.rewrites(place.value), detail=place.detail, value=place.value
            )
            for cause, parameter in self._free_parameters
            if cause is place.cause and parameter.where == place.where
        ]

    @torch.no_grad()
    def find(self, differing: Sequence[Mark]) -> list[Explained]:
        """Explain why these marks differ.

        Args:
            differing: the marks at which the port differs from the reference.

        Returns:
            A finding for each cause, in the order of the marks.
        """
        fitting: dict[str, list[Candidate]] = {mark.name: self._known_fitting(mark) for mark in differing}
        fitting = {mark.name: self._shared(mark, fitting[mark.name]) for mark in differing}
        unexplained = [mark for mark in differing if fitting[mark.name]]
        findings: list[Explained] = []
        while unexplained:
            explained: dict[tuple[str, str], list[Mark]] = {}
            for mark in unexplained:
                for key in dict.fromkeys(candidate.key for candidate in fitting[mark.name]):
                    explained.setdefault(key, []).append(mark)
            most = max(len(marks) for marks in explained.values())
            best = [key for key, marks in explained.items() if len(marks) == most]
            key = min(best, key=lambda key: self._simplicity(key, fitting))
            marks = explained[key]
            ties = [other_key for other_key in best if other_key != key and explained[other_key] == marks]
            ties = [tie for tie in ties if not self._simplicity(tie, fitting)[0] and not self._same_number(tie, key)]
            tied_findings = tuple(self._finding(tie, marks, fitting, ()) for tie in ties)
            findings.append(self._finding(key, marks, fitting, tied_findings))
            unexplained = [mark for mark in unexplained if mark not in marks]
        order = {mark.name: number for number, mark in enumerate(differing)}
        findings += self._unmatched([mark for mark in differing if not fitting[mark.name]])
        return sorted(findings, key=lambda match: min(order[name] for name in match.finding.probes))

    def _same_number(self, first: tuple[str, str], second: tuple[str, str]) -> bool:
        """Whether two keys are the same number, written with more and with fewer digits."""
        return first[0] == second[0] in {cause.name for cause in self._solved}

    @staticmethod
    def _simplicity(key: tuple[str, str], fitting: Mapping[str, list[Candidate]]) -> tuple[bool, int]:
        """Return a sort key that is smaller for simpler explanations: in one place, by one change."""
        return min(
            (any(cause.wide for cause in candidate.causes), len(candidate.alterations))
            for candidates in fitting.values()
            for candidate in candidates
            if candidate.key == key
        )

    def _known_fitting(self, mark: Mark) -> list[Candidate]:
        """Fit as :meth:`_fitting` does; a second search repeats only what newly solved numbers may change."""
        key = mark.name, sum(map(len, self._solved.values()))
        if key not in self._fits:
            self._fits[key] = self._fitting(mark)
        return self._fits[key]

    @torch.no_grad()
    def unlisted(self, marks: Sequence[Mark]) -> list[Mark]:
        """Return the marks that no entry reproduces as it is, with no number to be solved for and no second entry."""
        return [mark for mark in marks if not any(not one.rough for one in self._listed(mark))]

    def _listed(self, mark: Mark) -> list[Candidate]:
        """Return the entries that reproduce the port at a mark: alone, else at all places; rough ones as a last way."""
        if mark.name not in self._listed_at:
            near = list(self._near(mark, self._candidates))
            wide = [candidate for candidate in self._everywhere(near) if not candidate.rough]
            several = self._layers_before(mark) > 1  # most mistakes are made in all of them, and all of them are many
            exact = [candidate for candidate in wide if self._holds(mark, candidate)] if several else []
            fitting = [] if exact else [candidate for candidate in near if self._holds(mark, candidate)]
            exact = exact or [candidate for candidate in fitting if not candidate.rough]
            exact = exact or [candidate for candidate in wide if self._holds(mark, candidate)]
            self._listed_at[mark.name] = exact or fitting
        return self._listed_at[mark.name]

    def _fitting(self, mark: Mark) -> list[Candidate]:
        """Return what reproduces the port at a mark: single candidates, else one kind at all places, else a pair."""
        near = list(self._near(mark, self._candidates))
        fitting = self._listed(mark)
        if all(candidate.rough for candidate in fitting):
            fitting = list(self._fitted(mark, self._free_parameters)) or fitting
        if not fitting:
            fitting = [
                candidate for candidate in self._everywhere(near) if candidate.rough and self._holds(mark, candidate)
            ]
        if not fitting and math.isfinite(mark.difference):
            by_residual = sorted(
                (candidate for candidate in near if not candidate.rough),
                key=lambda candidate: self._residual(mark, candidate),
            )
            pairs = (pair for pair in combinations(by_residual, 2) if not _overlap(*pair))
            joined_pairs = (
                Candidate(a.causes + b.causes, a.alterations + b.alterations) for a, b in _first(pairs, MAX_PAIRS)
            )
            fitting = next(([candidate] for candidate in joined_pairs if self._holds(mark, candidate)), [])
        return fitting

    def _layers_before(self, mark: Mark) -> int:
        """Return the number of layers in which a mark is computed from earlier ones."""
        calls = (call for name in mark.sources for call in self.stage.cone(name))
        return len({match.group() for call in calls if (match := _LAYER.search(call.module))})

    def _near(self, mark: Mark, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield the candidates that alter a call on which the mark depends."""
        numbers = frozenset().union(*(self.stage.numbers[name] for name in mark.sources))
        return (candidate for candidate in candidates if not numbers.isdisjoint(candidate.rewrites))

    def _fitted(self, mark: Mark, parameters: Sequence[tuple[Cause, FreeParameter]]) -> Iterator[Candidate]:
        """Yield numbers that were solved for, at one place, or one value at all places that a mark depends on."""
        numbers = frozenset().union(*(self.stage.numbers[name] for name in mark.sources))
        near: dict[Cause, list[FreeParameter]] = {}
        for cause, parameter in parameters:
            if not numbers.isdisjoint(parameter.calls):
                near.setdefault(cause, []).append(parameter)
        known = [candidate for cause, own in near.items() for candidate in self._known(mark, cause, own)]
        if known:  # solved for at another mark, and explains this one as well
            yield from known
            return
        for cause, own in near.items():
            for places in _places(own):
                solution = solved_for(places, lambda rewrites: self._apart(mark, rewrites), mark.bound)
                candidate = None if solution is None else Candidate((cause,), solution.at(places))
                if solution and candidate and self._holds(mark, candidate):
                    self._solved.setdefault(cause, {})[solution] = None
                    self._solved_at_places[candidate] = places
                    yield candidate
                    break

    def _known(self, mark: Mark, cause: Cause, parameters: list[FreeParameter]) -> Iterator[Candidate]:
        """Yield the values that were solved for at other marks and explain this one."""
        for solution in self._solved.get(cause, ()):
            for places in _places(parameters):
                candidate = Candidate((cause,), solution.at(places))
                if self._holds(mark, candidate):
                    self._solved_at_places[candidate] = places
                    yield candidate
                    break

    def _shared(self, mark: Mark, fitting: Sequence[Candidate]) -> list[Candidate]:
        """Return the fitting candidates, with the values that were solved for at other marks and fit here as well."""
        found, keys = list(fitting), {candidate.key for candidate in fitting}
        for earlier in (candidate for candidate in fitting if candidate in self._solved_at_places):
            for solution in self._solved[earlier.causes[0]]:
                candidate = Candidate(earlier.causes, solution.at(self._solved_at_places[earlier]))
                if candidate.key not in keys and self._holds(mark, candidate):
                    keys.add(candidate.key)
                    found.append(candidate)
        return found

    def _apart(self, mark: Mark, rewrites: Mapping[int, Rewrite]) -> tuple[float, float]:
        """Return the distance as a number is solved for; infinite after the deadline."""
        if time.thread_time() > self.until:
            return math.inf, math.inf
        gap = self._distance(mark, rewrites)
        return gap.rms, gap.largest

    def _everywhere(self, near: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield the same mistake at all places that a mark depends on."""
        by_key: dict[tuple[str, str], list[Candidate]] = {}
        for candidate in near:
            by_key.setdefault(candidate.key, []).append(candidate)
        for alike in by_key.values():
            if len(alike) > 1:
                yield Candidate(
                    alike[0].causes, tuple(alteration for candidate in alike for alteration in candidate.alterations)
                )

    def _holds(self, mark: Mark, candidate: Candidate) -> bool:
        """Whether a candidate reproduces the port, in this case and in others, and changes nothing where they agree."""
        return (
            self._small_enough(mark, candidate)
            and not self._breaks_matching(candidate)
            and self.confirms(mark, candidate)
        )

    def _small_enough(self, mark: Mark, candidate: Candidate) -> bool:
        """Whether a candidate leaves no more than rounding."""
        bound = max(mark.bound, ROUGH * mark.gap.rms) if candidate.rough else mark.bound
        if not candidate.rough:  # a bound for float32 inside a float64 run is too generous
            bound = min(bound, max(mark.difference / TELLING, LOOSE))
        residual = self._residual(mark, candidate)
        if not (math.isfinite(residual) and residual <= bound):
            return False
        # Rounding errors are spread over the tensor: a candidate that leaves the largest one has reproduced others.
        largest = mark.gap.largest
        return not candidate.rough or self._distance(mark, candidate.rewrites).largest <= max(mark.bound, largest / 2)

    def _breaks_matching(self, candidate: Candidate) -> bool:
        """Whether a candidate would make a difference at a mark where port and reference agree."""
        rewrites = candidate.rewrites
        for mark in self.matching:
            reached = any(not self.stage.numbers[name].isdisjoint(rewrites) for name in mark.sources)
            if reached and self._residual(mark, candidate) > max(mark.bound, 2 * mark.difference):
                return True
        return False

    def _residual(self, mark: Mark, candidate: Candidate) -> float:
        """Return what a candidate leaves of the difference at a mark; infinite after the deadline."""
        key = (candidate, mark.name)
        if key not in self._residuals and time.thread_time() > self.until:
            return math.inf
        if key not in self._residuals:
            self._residuals[key] = self._distance(mark, candidate.rewrites).of(candidate)
        return self._residuals[key]

    def _distance(self, mark: Mark, rewrites: Mapping[int, Rewrite]) -> Gap:
        """Return the distance between altered reference and port at a mark; infinite where the shapes do not fit."""
        altered: dict[str, Tensor] = {}
        for name in mark.sources:
            try:
                value = self.stage.play(name, rewrites)
            except UNFIT:
                return APART
            if value is not None:
                altered[name] = value
        return self.distance(mark, altered)

    def _finding(
        self,
        key: tuple[str, str],
        marks: Sequence[Mark],
        fitting: Mapping[str, list[Candidate]],
        tied_findings: tuple[Explained, ...],
    ) -> Explained:
        """Return the finding for the marks that one entry explains, with the others that explain them as well."""
        chosen = {mark.name: [candidate for candidate in fitting[mark.name] if candidate.key == key] for mark in marks}
        all_candidates = [candidate for candidates in chosen.values() for candidate in candidates]
        causes = list(dict.fromkeys(cause for cause in all_candidates[0].causes))
        finding = Finding(
            name=key[0],
            detail=key[1],
            where=tuple(
                dict.fromkeys(alteration.where for candidate in all_candidates for alteration in candidate.alterations)
            ),
            probes=tuple(mark.name for mark in marks),
            difference=max(mark.difference for mark in marks),
            residual=max(min(self._residual(mark, candidate) for candidate in chosen[mark.name]) for mark in marks),
            what="; ".join(cause.what for cause in causes),
            fix="; ".join(cause.fix for cause in causes),
        )
        # Of the candidates that reproduce a mark, those that reproduce other marks as well come first.
        shared = {
            id(candidate): sum(candidate in candidates for candidates in chosen.values())
            for candidate in all_candidates
        }
        ordered = {
            name: sorted(candidates, key=lambda candidate: -shared[id(candidate)])
            for name, candidates in chosen.items()
        }
        choices = [
            {name: candidates[min(index, len(candidates) - 1)] for name, candidates in ordered.items()}
            for index in range(min(MAX_CHOICES, max(map(len, ordered.values()))))
        ]
        others = [Explained(finding=finding, chosen=choice) for choice in choices[1:]]
        return Explained(finding=finding, chosen=choices[0], instead=(*others, *tied_findings))

    def _unmatched(self, marks: Sequence[Mark]) -> list[Explained]:
        """Return findings for the marks that no entry reproduces, the unknown ones by module."""
        found: list[Explained] = []
        unknown: dict[str, list[Mark]] = {}
        for mark in marks:
            finding = self._from_target(mark)
            if finding is None:
                unknown.setdefault(mark.name.partition(" -> ")[0], []).append(mark)
            else:
                found.append(Explained(finding=finding))
        return found + [Explained(finding=self._unknown(unknown_marks)) for unknown_marks in unknown.values()]

    def _from_target(self, mark: Mark) -> Finding | None:
        """Return what the port's own value at a mark tells: one more step, or other weights."""
        if len(mark.sources) != 1 or time.thread_time() > self.until:
            return None
        if not math.isfinite(mark.difference):
            return None
        target = self.target(mark)
        if target is None:
            return None
        return (self._extra(mark, target) if self.solving else None) or self._weights(mark, target)

    def _extra(self, mark: Mark, target: Tensor) -> Finding | None:
        """Return the function of the reference's value that gives the port's value."""
        (source,) = mark.sources
        value = self.stage.tape[self.stage.tape.marks[source]].double()
        if value.shape != target.shape:
            return None

        def residual_of(altered: Tensor) -> float:
            return self.distance(mark, {source: altered}).largest

        for extra in extras(value, target, lambda made: residual_of(made) <= mark.bound):
            residual = residual_of(extra.function(value))
            confirmed = partial(Search.is_function_of, function=extra.function)
            if residual <= mark.bound and self.confirms_elsewhere(mark, confirmed):
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
    def is_function_of(self, mark: Mark, function: ValueFunction) -> bool:
        """Return whether a function of the reference's value at a mark gives the port's value in this case."""
        if len(mark.sources) != 1:
            return False
        value = self.stage.tape[self.stage.tape.marks[mark.sources[0]]].double()
        try:
            altered = function(value)
        except UNFIT:  # an axis has another extent here
            return False
        return self.distance(mark, {mark.sources[0]: altered}).largest <= mark.bound

    def _weights(self, mark: Mark, target: Tensor) -> Finding | None:
        """Return the linear map and the weights with which it gives the port's value."""
        solution = solve_weights(self.model_parts, self.stage, mark.sources[0], target)
        if solution is None:
            return None
        linear, matrix = solution
        residual = self._distance(mark, {linear.call.number: replaced(linear, matrix)}).largest
        confirmed = partial(Search.maps, module=linear.call.module, matrix=matrix)
        if residual > max(mark.bound, SOLVED) or not self.confirms_elsewhere(mark, confirmed):
            return None
        name, detail, what, fix = words(linear, self.model_parts, matrix, compared=self.weights_compared)
        if name == OTHER and not detail and not self.solving:
            return None
        return Finding(
            name=name,
            detail=detail,
            where=(linear.call.module,),
            probes=(mark.name,),
            difference=mark.difference,
            residual=residual,
            what=what,
            fix=fix,
        )

    @torch.no_grad()
    def maps(self, mark: Mark, module: str, matrix: Tensor) -> bool:
        """Return whether a module with these weights gives the port's value at a mark in this case."""
        calls = (linear for linear in self.model_parts.linears if linear.call.module == module)
        return any(
            self._distance(mark, {linear.call.number: replaced(linear, matrix)}).largest <= max(mark.bound, SOLVED)
            for linear in calls
        )

    def _unknown(self, marks: Sequence[Mark]) -> Finding:
        """Return the finding for marks that nothing explains, with the entries that leave the least difference."""
        first = marks[0]
        nearest: dict[str, Suspicion] = {}
        for candidate in sorted(
            self._near(first, self._candidates), key=lambda candidate: self._residual(first, candidate)
        ):
            residual = self._residual(first, candidate)
            difference_here = first.gap.of(candidate)
            if residual < difference_here:
                share = 1 - residual / difference_here if math.isfinite(difference_here) else 0.0
                suspicion = Suspicion(name=candidate.key[0], detail=candidate.key[1], residual=residual, share=share)
                nearest.setdefault(suspicion.name, suspicion)
        difference = max(mark.difference for mark in marks)
        return Finding(
            detail=self._places_of(first),
            probes=tuple(mark.name for mark in marks),
            difference=difference,
            residual=difference,
            nearest=tuple(nearest.values())[:NEAREST],
        )

    def _places_of(self, mark: Mark) -> str:
        """Return where the port differs at a mark, in words, if that is not everywhere."""
        target = self.target(mark) if len(mark.sources) == 1 and math.isfinite(mark.difference) else None
        if target is None:
            return ""
        value = self.stage.tape[self.stage.tape.marks[mark.sources[0]]].double()
        return differing_places(value, target, mark.bound)


def differing_places(value: Tensor, other: Tensor, bound: float) -> str:
    """Return at which indices of one axis two tensors differ, in words; empty where that is at all, or at none.

    Args:
        value, other: of one shape: [b s e], or [b h q k] of attention.
        bound: what rounding explains, relative to the largest value.
    """
    if value.shape != other.shape or value.ndim not in AXES:
        return ""
    differs = (value - other).abs() > max(bound, LOOSE) * value.abs().max()
    for axis, name in enumerate(AXES[value.ndim]):
        places = differs.movedim(axis, 0).flatten(1).any(1).nonzero().flatten().tolist()
        extent = value.shape[axis]
        in_turn = places and places == list(range(places[0], places[-1] + 1))
        if not places or len(places) == extent or not (in_turn or len(places) <= MAX_LISTED):
            continue
        listed = f"{places[0]} to {places[-1]}" if in_turn and len(places) > 2 else ", ".join(map(str, places))
        return f"it differs only at {name} {listed} of {extent}"
    return ""


AXES: Mapping[int, tuple[str, ...]] = {
    3: ("rows", "positions", "features"),
    4: ("rows", "heads", "queries", "keys"),
}
"""The axes of activations and of attention's scores, by their number."""

MAX_LISTED = 8
"""How many indices are listed."""


def _within(candidate: Candidate, scopes: Collection[str]) -> bool:
    """Whether a candidate alters a module in one of these parts of a model."""
    return any(
        f"{place.where}.".startswith(f"{scope}." if scope else "")
        for place in candidate.alterations
        for scope in scopes
    )


def _places(parameters: list[FreeParameter]) -> list[list[FreeParameter]]:
    """Return each place alone, and all at once."""
    return [[parameter] for parameter in parameters] + ([parameters] if len(parameters) > 1 else [])


def _overlap(first: Candidate, second: Candidate) -> bool:
    return not first.rewrites.keys().isdisjoint(second.rewrites)


def _first(pairs: Iterator[tuple[Candidate, Candidate]], most: int) -> Iterator[tuple[Candidate, Candidate]]:
    return (pair for _, pair in zip(range(most), pairs, strict=False))
