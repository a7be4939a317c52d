"""Norms: which gain and shift are due, and what a norm does otherwise than the reference's.

A gain may be one less than the reference's, or take in the deviation that is divided by n - 1.
"""

from __future__ import annotations

from porting.suggesting.search import activation_matching
from porting.suggesting.search.activation_matching import alike, apart, explained, order_of, vector
from porting.suggesting.search.constant_factors import FactorSearch
from porting.suggesting.search.layouts import CandidateRule, single_rule
from porting.suggesting.search.search_result import CLOSE, HABITUAL, SAME
from porting.suggesting.subjects.config_fields import Role, fields_of
from porting.suggesting.subjects.operation_trace import OperationTrace, Unit

OFFSET = 0.1
"""The share of a norm's difference that may be left when 1 is added to its gain, or taken from it."""


class NormSearch(FactorSearch):
    """A search that fills norms."""

    def _norm(self, unit: Unit, mate: Unit, trace: OperationTrace) -> None:
        sides = ((unit.weights, mate.weights), (unit.biases, mate.biases))
        pieces = [single_rule(other[0], ours[0], why="its place") for ours, other in sides if ours and other]
        self._uneven(unit, mate)
        if unit.weights and not mate.weights:
            self._make(dict.fromkeys(unit.weights, "ones"))
        values = self._values(pieces)
        order = order_of(unit, mate, *(one for one in (self.found.basis, *self._orders) if one.theirs))
        turned = [made for move in pieces if order.theirs and (made := self._ordered(move, order)) is not None]
        if turned:
            pieces, values = turned, self._values(turned)
        if values is None:
            axes = [vector(move, self.port.shapes, self.reference.shapes) for move in pieces]
            values = self._values(axes)
            pieces = axes
        if values is None:
            self._give_up(unit, mate)
            return
        self._accept(pieces, values, [unit], [mate])
        far, now = self._normed_apart(unit, mate)
        if far <= SAME or (mate.biases and not unit.biases):
            return
        offset = mate.weights and not self._without_offset / HABITUAL <= far <= self._without_offset * HABITUAL
        if offset and self._offset(unit, mate, pieces[0], far):
            return
        self._without_offset = far
        gains = pieces[:1] if self.reference.shapes[mate.names[0]] else []  # a single number is no norm's gain
        corrected = [explained(move, "Bessel's correction", proven=True, scale=self._bessel(mate)) for move in gains]
        values = self._values(corrected) if corrected else None
        cause = ""
        if values is not None and activation_matching.is_unbiased(now, mate):
            self._replace(corrected, values)
            far, now = self._normed_apart(unit, mate)
            cause = ": it divides by the unbiased deviation, which the gain takes in, and adds eps elsewhere"
        if far > SAME:
            self._note("norm", unit, mate, far, cause)
            if now is not None:
                self._forced.outputs[unit.last] = alike(mate.output, now.output, self.found.basis, *self._orders)

    def _offset(self, unit: Unit, mate: Unit, gain: CandidateRule, far: float) -> bool:
        """Whether one side stores a gain as what it adds to 1, and the other the gain itself: a rule adds the 1."""
        before = self.port.leaves[gain.writes[0]].detach().clone()
        for offset in ("1", "-1"):
            move = explained(gain, "what it computes", proven=True, offset=offset)
            values = self._values([move])
            if values is None:
                return False
            self.found.trials += 1
            self._put(values)
            left, now = self._normed_apart(unit, mate)
            gained = unit.centred != mate.centred and activation_matching.gains_agree(now, mate, CLOSE)
            if left <= SAME or (left <= CLOSE and left < OFFSET * far) or gained:
                self._replace([move], values)
                if left > SAME:
                    self._note("norm", unit, mate, left)
                return True
        self._put({gain.writes[0]: before})
        return False

    def _normed_apart(self, unit: Unit, mate: Unit) -> tuple[float, Unit | None]:
        again = self.port.run(until=unit.last, forced=self._forced)
        now = next((one for one in again.units if one.number == unit.number), None)
        return (float("inf"), None) if now is None else (apart(now.output, mate.output), now)

    def _bessel(self, mate: Unit) -> str:
        """The factor of a gain that makes up for Bessel's correction, over the config where that has the width."""
        size = self.reference.shapes[mate.names[0]][-1]
        width = next((name for name in fields_of(Role.HIDDEN, self._config) if self._config[name] == size), str(size))
        return f"({width} / ({width} - 1)) ** 0.5"
