"""Tables that are added to the scores of attention: filled before the place where the projections show.

They stand between the projections and that place.  No activation goes into one, and its output can be compared with the
reference's by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from porting.suggesting.search import embedding_candidates
from porting.suggesting.search.activation_matching import explained
from porting.suggesting.search.embedding_candidates import indexed_alike
from porting.suggesting.search.layouts import distance
from porting.suggesting.search.search_result import SAME
from porting.suggesting.search.search_state import SearchState
from porting.suggesting.subjects.operation_trace import TABLES, OperationTrace, Unit, WeightUse


class ScoreTableSearch(SearchState):
    """Fills what stands between a group of weights and the place where that shows."""

    def _fill_between(
        self, group: Sequence[Unit], matches: Sequence[Unit], following: Unit | None, trace: OperationTrace
    ) -> None:
        """Fill the tables that are used behind a group's first weight and before the place that follows.

        Several at one operation, as the four vectors of a batch norm, show nothing one by one.
        """
        theirs = self.found.reference.units
        start = min(theirs.index(mate) for mate in matches)
        first = min(trace.units.index(one) for one in group)
        last = len(trace.units) if following is None else trace.units.index(following)
        open_at = Counter(unit.number for unit in trace.units[first:last] if self._is_open(unit))
        for unit in trace.units[first:last]:
            if unit.kind in TABLES and self._is_open(unit) and open_at[unit.number] == 1:
                _ = self._fill_alone(unit, [*theirs[start:], *theirs[:start]]) or self._fill_as_another(unit, theirs)

    def _fill_alone(self, unit: Unit, mates: Sequence[Unit]) -> bool:
        """Fill one table with the reference's that gives the same, or the same plus a mask; whether there is one.

        Args:
            mates: the reference's units, those that are likely first: tables of one shape all give the same.
        """
        before = {name: self.port.leaves[name].detach().clone() for name in unit.names}
        for mate in mates:
            if mate.kind not in TABLES or not self._free(mate) or unmasked_shape(mate) != unmasked_shape(unit):
                continue
            ways = embedding_candidates.candidates([unit], [mate], self.port.shapes, self.reference.shapes, ())
            for number, moves in enumerate(ways):
                values = self._values(moves)
                if values is None:
                    continue
                self.found.trials += 1
                self._put(values)
                again = self.port.run(until=unit.last, forced=self._forced)
                now = next((one for one in again.units if one.number == unit.number), None)
                if now is not None and differ_by_mask(now.output, mate.output):
                    chosen = [
                        explained(one, "what it computes" if number else "its place", proven=number > 0)
                        for one in moves
                    ]
                    self._accept(chosen, values, [unit], [mate])
                    return True
        self._put(before)
        return False

    def _fill_as_another(self, unit: Unit, mates: Sequence[Unit]) -> bool:
        """Fill one table as another of the module's, if the reference has one for both; whether it has.

        T5's first layer makes a bias of distances that all layers use; a module may have a table in each.
        """
        name = unit.names[0]
        if len(unit.names) != 1 or name not in self.port.loadable:
            return False
        before = {name: self.port.leaves[name].detach().clone()}
        for mate in mates:
            if mate.kind not in TABLES or self._free(mate) or unmasked_shape(mate) != unmasked_shape(unit):
                continue
            first = next(
                (move for move in self.found.moves if move.reads == mate.names and len(move.writes) == 1), None
            )
            if first is None or not self._share(name, first.writes[0]):
                continue
            self.found.trials += 1
            again = self.port.run(until=unit.last, forced=self._forced)
            now = next((one for one in again.units if one.number == unit.number), None)
            if now is not None and differ_by_mask(now.output, mate.output):
                self._filled.add(name)
                self.found.seconds[name] = first.writes[0]
                self._seen_seconds.add(name)
                return True
        self._put(before)
        return False

    def _seconds(self, group: Sequence[Unit], free: Sequence[Unit]) -> dict[str, tuple[Unit, str]]:
        """Tables that have to be one with another that is filled already, since the reference has one for both.

        They are given the values, so that what comes behind can be known; no table can write those into both.

        Returns:
            Name of the tensor -> the reference's unit, and the tensor that has its values.
        """
        found: dict[str, tuple[Unit, str]] = {}
        for unit in group:
            if unit.kind is not WeightUse.LOOKUP or any(indexed_alike(unit, one) for one in free):
                continue
            used = [
                one
                for one in self.found.reference.units
                if one.kind is WeightUse.LOOKUP and set(one.names) & self._used
            ]
            for mate in used:
                if not indexed_alike(unit, mate):
                    continue
                for move in self.found.moves:
                    alone = len(move.reads) == len(move.writes) == 1 and move.reads[0] in mate.names
                    if alone and self.port.shapes[move.writes[0]] == self.port.shapes[unit.names[0]]:
                        found[unit.names[0]] = mate, move.writes[0]
        self._put({name: self.port.leaves[other].detach().clone() for name, (_, other) in found.items()})
        return found


def unmasked_shape(unit: Unit) -> tuple[int, ...]:
    """The shape of what a table of attention adds to the scores: [h q k], without the axis of batches or windows."""
    return tuple(unit.output.shape[-3:]) if unit.output.ndim > 3 else tuple(unit.output.shape)


def differ_by_mask(one: Tensor, other: Tensor) -> bool:
    """Whether two tables added to scores are equal, but for a mask in either: 0, one other number, or a very large one.

    What is masked by a large number may have been filled with it, or have it added.
    """
    if one.numel() == other.numel() and distance(one, other, SAME) <= SAME:
        return True
    try:
        first, second = one.detach() + torch.zeros_like(other), other.detach() + torch.zeros_like(one)
    except RuntimeError:  # their shapes do not fit
        return False
    kept = (first.abs() < MASKED) & (second.abs() < MASKED)
    left = (first - second)[kept]
    hidden = left.abs() > 1.0
    shown = left[~hidden]
    same = bool(shown.numel()) and float(shown.abs().max()) <= SAME * float(first[kept].abs().max().clamp(min=1.0))
    return same and (not bool(hidden.any()) or float(left[hidden].max() - left[hidden].min()) <= SAME * 1e4)


MASKED = 1e3
"""Scores that are larger than this are masked, whatever else is added to them."""
