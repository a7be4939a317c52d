"""Try the ways in which weights may lie, and take the one with which what comes behind is the reference's own."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from porting.suggesting.search import matrix_candidates
from porting.suggesting.search.activation_matching import (
    apart,
    explained,
    habit,
    has_scores,
    is_other_norm,
    order_of,
    skips,
)
from porting.suggesting.search.feature_permutation import based
from porting.suggesting.search.layouts import CandidateRule, Ways
from porting.suggesting.search.name_similarity import blank
from porting.suggesting.search.norm_search import NormSearch
from porting.suggesting.search.search_result import CLOSE, GUESS, HABITUAL, SAME, Choice
from porting.suggesting.subjects.operation_trace import TABLES, OperationTrace, Unit, WeightUse

CLEARLY = 0.5
"""A later way is nearer than one before it if it leaves no more than so much of what that leaves."""

REPEATED = 2
"""In so many layers all ways are tried where none fits."""


class WaySearch(NormSearch):
    """Chooses among the candidates for a place."""

    def _next(self, group: Sequence[Unit], trace: OperationTrace) -> Unit | None:
        """The first place behind a group that has something to fill, or whose operand can be known."""
        last = max(trace.units.index(one) for one in group)
        inside = {name for one in group for name in one.weights}  # a slice of the same tensor is not a place of its own
        return next(
            (one for one in trace.units[last + 1 :] if not set(one.weights) & inside and one.operand is not None
             and one.kind in {WeightUse.LINEAR, WeightUse.NORM} and set(one.names) & self.port.loadable - self._asleep),
            None,
        )  # fmt: skip

    def _choose(
        self, group: Sequence[Unit], mates: Sequence[Unit], ways: Ways, following: Unit | None, trace: OperationTrace
    ) -> bool:
        """Try ways until one shows the reference's own activation at the next place, and take it or the nearest."""
        best: tuple[float, list[CandidateRule], dict[str, Tensor]] | None = None
        before = {name: self.port.leaves[name].detach().clone() for one in group for name in one.names}
        tried: list[tuple[tuple[CandidateRule, ...], float]] = []
        alone: list[tuple[CandidateRule, ...]] = []  # whose own output is the reference's: what is behind is open yet
        biases = {name for one in group for name in one.biases if self._is_open(one)} - self._filled
        later = list(self.found.reference.units)
        for moves in self._by_habit(self._in_basis(group, mates, ways)):
            values = self._values(moves)
            if values is None:
                continue
            self.found.trials += 1
            self._put(values | self._made_values({name: "zeros" for name in biases if name not in values}))
            far = self._verdict(group, mates, moves, following, later)
            tried.append((moves, far))
            alone += [moves] if self._fits_alone else []
            if best is None or far < best[0] * (
                CLEARLY if mates else 1.0
            ):  # no way of experts is likelier than another
                best = (far, list(moves), values)
            if far <= max(SAME, self._usual(moves)) or len(tried) >= matrix_candidates.MOST:
                break
            if self._until.past:
                break
        self._put(before)
        if best is None:
            return False
        far, chosen, values = best
        likely = next(iter(alone), self._likely_guess(tried, far)) if far > CLOSE else None
        if likely is not None:
            chosen, values = list(likely), self._values(likely) or values
        if far > CLOSE and len(group) == 1 and self._settle_neutral(group[0], trace):
            return True
        why = GUESS if far > CLOSE else "what it computes" if len(tried) > 1 else "its place"
        behind = following.names[0] if following is not None else ""
        rivals = sorted((one for one in tried if list(one[0]) != chosen), key=lambda one: one[1])[:2]
        self.found.choices.append(Choice(moves=chosen, far=far, behind=behind, tried=len(tried), rivals=rivals))
        chosen = [explained(one, one.why or why, proven=any(one not in moves for moves, _ in tried)) for one in chosen]
        custom = tuple(habit(move) for move in chosen)
        self._habits.setdefault(custom, far)
        self._repeats[custom] += 1
        self._accept(chosen, values, group, mates)
        partly = {name for move in chosen if move.fill is not None for name in move.reads} if far <= SAME else set()
        self._uneven_among(group, mates, chosen, partly)
        return True

    def _likely_guess(
        self, tried: Sequence[tuple[tuple[CandidateRule, ...], float]], far: float
    ) -> tuple[CandidateRule, ...] | None:
        """The way of an earlier layer where none fits, or the nearest with the likeliest axes; None for the nearest.

        Behind a place that fits nothing, which way comes a little nearer is chance, and ways that rearrange axes are
        many.  The first that was tried has the likeliest axes.
        """
        close = [(moves, left) for moves, left in tried if left <= HABITUAL * far]
        near = {tuple(habit(move) for move in moves): moves for moves, left in close}
        best: tuple[float, tuple[CandidateRule, ...]] | None = None
        for moves, left in close:
            if _axes(moves) == _axes(tried[0][0]) and (best is None or left < best[0] * CLEARLY):
                best = left, moves
        customary = (near[custom] for custom in self._habits if custom in near)
        return next(customary, None if best is None else best[1])

    def _uneven_among(
        self, group: Sequence[Unit], mates: Sequence[Unit], chosen: Sequence[CandidateRule], partly: set[str]
    ) -> None:
        """Note the biases that one side of each pair lacks, but for those of which a rule takes a part."""
        for ours in group:
            for mate in mates:
                reads = {name for move in chosen if set(move.writes) & set(ours.names) for name in move.reads}
                if set(mate.names) & reads:
                    if not set(mate.biases) & partly:
                        self._uneven(ours, mate)
                    if ours.biases:
                        break

    def _in_basis(self, group: Sequence[Unit], mates: Sequence[Unit], ways: Ways) -> Ways:
        """The ways with what goes in and what comes out in the two sides' orders of the residual stream."""
        basis = self.found.basis
        if not basis.theirs or not mates:
            yield from ways
            return
        if group[0].kind is not WeightUse.LINEAR:
            for moves in ways:
                turned = [based(move, basis, "e", ("t e", "t e")) for move in moves]
                yield tuple(move for move in turned if move is not None)
            return
        inside = order_of(group[0], mates[0], basis) is basis
        for moves in ways:
            given = [self._sided(move, group, mates, "e") for move in moves] if inside else list(moves)
            out = [self._sided(move, group, mates, "o") for move in given if move is not None]
            both = [tuple(move for move in some if move is not None) for some in (given, out)]
            yield from (some for some in both[:: 1 if inside else -1] if len(some) == len(moves))

    def _sided(
        self, move: CandidateRule, group: Sequence[Unit], mates: Sequence[Unit], index: str
    ) -> CandidateRule | None:
        """A matrix's or a bias's move with an index in the two sides' orders."""
        sides = []
        for units, names in ((mates, move.reads), (group, move.writes)):
            bias = any(names[0] in one.biases for one in units)
            first = next((one.into_first for one in units if names[0] in one.weights), False)
            sides.append("o" if bias else "e o" if first else "o e")
        if index == "e" and "o" in sides:
            return move
        return based(move, self.found.basis, index, (sides[0], sides[1]))

    def _verdict(
        self,
        group: Sequence[Unit],
        mates: Sequence[Unit],
        moves: Sequence[CandidateRule],
        following: Unit | None,
        later: Sequence[Unit],
    ) -> float:
        """The distance of the run with these values from the reference's, at the first place where it shows."""
        last = max(one.number for one in group)
        beside = self._beside(group, following)
        until = None if following is None else max([following.number, following.last, *beside])
        again = self.port.run(until=until, forced=self._forced)
        by_number = {one.number: one for one in again.units}
        if not {one.number for one in group} <= by_number.keys():  # with these values other code runs
            return float("inf")
        own, self._fits_alone = 0.0, False
        if (
            len(group) == 1 and len(mates) == 1 and group[0].kind is WeightUse.LINEAR
        ):  # features in another order show later
            own = apart(by_number[group[0].number].output, mates[0].output)
            self._fits_alone = own <= SAME
        if following is not None and following.number in by_number:
            for now in (by_number[number] for number in (following.number, *beside) if number in by_number):
                like = [one for one in later if one.kind is now.kind and one.operand is not None and one not in mates]
                skipped = [0.0 for one in later if one not in mates and skips(now, one)]
                alone = len(mates) == 1 and mates[0].kind in TABLES and now.kind is WeightUse.LINEAR
                skipped += [0.0] if alone and self._is_computed(now) else []
                skipped += [0.0 for one in later if one not in mates and is_other_norm(now, one)]
                own = max(own, min([self._least(now, like)[0], *skipped]))
            # What comes behind may differ for another reason, such as a mask or a constant factor.
            now, free = by_number[following.number], [one for one in later if one.kind is following.kind]
            branch = by_number[group[0].number] if len(group) == 1 and group[0].kind is WeightUse.LINEAR else None
            scaled = branch is not None and self._branch_factor(branch, now, [one for one in free if self._free(one)])
            shown = scaled or has_scores(group, mates, again, self.found.reference)
            return CLOSE if own > CLOSE and shown else own
        if own > SAME:
            return own
        outputs = again.outputs or [by_number[number].output for number in by_number if number >= last]
        theirs = [*self.found.reference.outputs, *(one.output for one in mates), *self.found.reference.modules.values()]
        return max(
            (min((apart(one, other) for other in theirs), default=float("inf")) for one in outputs[:1]),
            default=float("inf"),
        )

    def _beside(self, group: Sequence[Unit], following: Unit | None) -> list[int]:
        """Norms that are given what the group makes and nothing else, besides the next place: of queries, of keys."""
        numbers = {one.number for one in group}
        made = [one for one in self.found.trace.units if one.behind and one.behind <= numbers and one is not following]
        learned = self.port.loadable  # and no table of rotations, which queries are multiplied by as well
        return [one.number for one in made if one.kind is WeightUse.NORM and set(one.names) & learned]

    def _usual(self, moves: Sequence[CandidateRule]) -> float:
        """The distance that is near enough for the best way of an earlier layer: no other is tried then.

        A module with another eps is off a little in every layer, whatever is tried.  Where nothing fits, what was the
        nearest of all in some layers is as good a guess in the others.
        """
        custom = tuple(habit(move) for move in moves)
        far = self._habits.get(custom, math.inf)
        if far <= CLOSE:
            return min(HABITUAL * far, CLOSE)
        return math.inf if self._repeats[custom] >= REPEATED else 0.0

    def _by_habit(self, ways: Ways) -> Ways:
        """The same ways, those chosen in an earlier layer first."""
        listed = []
        for moves in ways:
            listed.append(moves)
            if len(listed) >= matrix_candidates.MOST:
                break
        known = {habit: number for number, habit in enumerate(self._habits)}
        worst = len(known)
        return iter(sorted(listed, key=lambda moves: known.get(tuple(habit(move) for move in moves), worst)))

    def _settle_neutral(self, unit: Unit, trace: OperationTrace) -> bool:
        """Make what the reference has nothing for do nothing, if some content of it does; whether one does.

        Scales, shifts, gates, tables that are added and square matrices are tried.  What comes behind has to be the
        reference's with that content, and must not be with the values that stand there now: else nothing shows what the
        content should be.
        """
        names = [name for name in unit.names if name in self.port.loadable - self._filled]
        fitting, custom = self._neutral(unit, names), tuple(map(blank, names))
        if not names or not fitting or self._never_neutral[custom] >= REPEATED:
            return False
        following = self._next([unit], trace)
        later = [one for one in self.found.reference.units if self._free(one)]
        before = {name: self.port.leaves[name].detach().clone() for name in names}
        if self._verdict([unit], (), (), following, later) <= SAME:
            return False
        for word in fitting:
            words = {name: word if name in unit.weights else "zeros" for name in names}
            self.found.trials += 1
            self._put(self._made_values(words))
            if self._verdict([unit], (), (), following, later) <= SAME:
                self._make(words)
                return True
        self._put(before)
        self._never_neutral[custom] += 1
        return False


def _axes(moves: Sequence[CandidateRule]) -> list[tuple[str, ...]]:
    """The axes of rules, whatever tensors they are of."""
    return sorted(tuple(term.axes for term in (*move.sources, *move.targets)) for move in moves)
