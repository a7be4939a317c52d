"""Tables that are added to the scores of attention: a bias for each distance between two words.

They stand between the projections and the place where these show, so they are filled first.  No activation goes into
one, and what comes out of it can be held against the reference's by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from porting.suggesting.search import tables
from porting.suggesting.search.filling import Filling
from porting.suggesting.search.finding import SAME
from porting.suggesting.search.layouts import distance
from porting.suggesting.search.places import explained
from porting.suggesting.subjects.tracing import Kind, Trace, Unit

TABLES = frozenset({Kind.LOOKUP, Kind.TABLE, Kind.OTHER})


class Between(Filling):
    """Fills what stands between a group of weights and the place where that shows."""

    def _fill_between(self, group: Sequence[Unit], following: Unit | None, trace: Trace) -> None:
        """Fill the tables that are used behind a group's first weight and before the place that follows."""
        first = min(trace.units.index(one) for one in group)
        last = len(trace.units) if following is None else trace.units.index(following)
        for unit in trace.units[first:last]:
            if unit.kind in TABLES and self._is_open(unit):
                self._fill_alone(unit)

    def _fill_alone(self, unit: Unit) -> bool:
        """Fill one table with the reference's that gives the same; whether there is one."""
        before = {name: self.port.leaves[name].detach().clone() for name in unit.names}
        for mate in self.found.reference.units:
            if mate.kind not in TABLES or not self._free(mate) or mate.output.numel() != unit.output.numel():
                continue
            ways = tables.candidates([unit], [mate], self.port.shapes, self.reference.shapes, ())
            for number, moves in enumerate(ways):
                values = self._values(moves)
                if values is None:
                    continue
                self.found.trials += 1
                self._put(values)
                again = self.port.run(until=unit.last, forced=self._forced)
                now = next((one for one in again.units if one.number == unit.number), None)
                if now is not None and distance(now.output, mate.output) <= SAME:
                    chosen = [
                        explained(one, "what it computes" if number else "its place", proven=number > 0)
                        for one in moves
                    ]
                    self._accept(chosen, values, [unit], [mate])
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
            if unit.kind is not Kind.LOOKUP or any(_indexed_alike(unit, one) for one in free):
                continue
            used = [
                one for one in self.found.reference.units if one.kind is Kind.LOOKUP and set(one.names) & self._used
            ]
            for mate in used:
                if not _indexed_alike(unit, mate):
                    continue
                for move in self.found.moves:
                    alone = len(move.reads) == len(move.writes) == 1 and move.reads[0] in mate.names
                    if alone and self.port.shapes[move.writes[0]] == self.port.shapes[unit.names[0]]:
                        found[unit.names[0]] = mate, move.writes[0]
        self._put({name: self.port.leaves[other].detach().clone() for name, (_, other) in found.items()})
        return found


def _indexed_alike(one: Unit, other: Unit) -> bool:
    """Whether two tables are looked up at the same places."""
    if one.operand is None or other.operand is None or one.operand.numel() != other.operand.numel():
        return False
    return bool(torch.equal(one.operand.flatten().sort().values, other.operand.flatten().sort().values))
