"""Tables that are added to the scores of attention: a bias for each distance between two words.

They stand between the projections and the place where these show, so they are filled first.  No activation goes into
one, and what comes out of it can be held against the reference's by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from porting.suggesting import tables
from porting.suggesting.filling import Filling
from porting.suggesting.finding import SAME
from porting.suggesting.layouts import distance
from porting.suggesting.places import explained
from porting.suggesting.tracing import Kind, Trace, Unit

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
