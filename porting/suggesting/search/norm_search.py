"""Norms: which gain and shift are due, and what a norm does otherwise than the reference's.

A gain may be one less than the reference's, or take in the deviation that is divided by n - 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

from torch import Tensor

from porting.notation.name import spelled
from porting.suggesting.search import activation_matching
from porting.suggesting.search.activation_matching import (
    alike,
    apart,
    explained,
    is_other_norm,
    kind_of_norm,
    laid_as,
    order_of,
    vector,
)
from porting.suggesting.search.constant_factors import FactorSearch
from porting.suggesting.search.feature_permutation import based
from porting.suggesting.search.layouts import CandidateRule, RuleTerm, Shapes, single_rule, single_term
from porting.suggesting.search.name_similarity import pattern
from porting.suggesting.search.search_result import CLOSE, HABITUAL, SAME
from porting.suggesting.subjects.config_fields import Role, fields_of
from porting.suggesting.subjects.operation_trace import OperationTrace, Unit

OFFSET = 0.1
"""The share of a norm's difference that may be left when 1 is added to its gain, or taken from it."""


class NormSearch(FactorSearch):
    """A search that fills norms."""

    def _norm(self, unit: Unit, mate: Unit, trace: OperationTrace) -> None:
        if mate.weights and mate.biases and self._holds_more(unit, mate):
            self._joint(unit, mate)
            return
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
        if far > CLOSE and is_other_norm(unit, mate):
            self._differs_in_norm(unit, mate, far, now, f"{kind_of_norm(unit)} for {kind_of_norm(mate)}", "other norm")
        elif far > SAME and (unit.biases or not mate.biases):
            self._mended_norm(unit, mate, pieces, far, now)

    def _differs_in_norm(
        self, unit: Unit, mate: Unit, far: float, now: Unit | None, cause: str, what: str = "norm"
    ) -> None:
        """Note that a norm gives something else, and look at what stands behind as if it gave what its mate does."""
        self._note(what, unit, mate, far, cause)
        if now is not None:
            self._forced.outputs[unit.last] = alike(mate.output, now.output, self.found.basis, *self._orders)

    def _mended_norm(
        self, unit: Unit, mate: Unit, pieces: Sequence[CandidateRule], far: float, now: Unit | None
    ) -> None:
        """Let the gain take in what a norm does otherwise, an addend or Bessel's correction; note what is left."""
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
            self._differs_in_norm(unit, mate, far, now, cause)

    def _settle_other_norm(self, unit: Unit, trace: OperationTrace, free: Sequence[Unit]) -> bool:
        """Fill a norm from one of another kind that is given the same, as a GroupNorm from a LayerNorm.

        If it gives something else it is noted, and what stands behind is looked at as if it gave the same.
        """
        ours = [one for one in trace.units if one.number == unit.number]
        for mate in free if kind_of_norm(unit) else ():
            output = laid_as(unit, mate) if is_other_norm(unit, mate) else None
            theirs = [one for one in free if one.number == mate.number]
            if output is None:
                continue
            names = [[name for one in side for name in one.names] for side in (ours, theirs)]
            pairs = [*zip(*names, strict=False)][:2]  # gain and shift; the statistics of the data stand behind
            moves = [single_rule(other, one, why="its place") for one, other in pairs]
            values = self._values(moves)
            if values is None:
                moves = [vector(move, self.port.shapes, self.reference.shapes) for move in moves]
                values = self._values(moves)
            if values is None:
                continue
            self._accept(moves, values, ours, theirs)
            self._filled |= {*names[0]}
            self._used |= {*names[1]}
            far, _ = self._normed_apart(unit, mate)  # a GroupNorm of rows [b c] is a LayerNorm
            if far > CLOSE:
                self._note("other norm", unit, mate, far, f"{kind_of_norm(unit)} for {kind_of_norm(mate)}")
            elif far > SAME:
                self._note("norm", unit, mate, far)
            if far > SAME:
                self._forced.outputs[unit.last] = output
            return True
        return False

    def _holds_more(self, unit: Unit, mate: Unit) -> bool:
        """Whether the module has one tensor for a norm, with more elements than a gain: the shift may be in it."""
        one = unit.weights[:1]
        alone = len(unit.weights) == 1 and unit.biases in {(), one} and not {*one} & self._filled
        return alone and math.prod(self.port.shapes[one[0]]) > math.prod(self.reference.shapes[mate.weights[0]])

    def _joint(self, unit: Unit, mate: Unit) -> None:
        """Fill a tensor that holds a gain and a shift, in the way that comes nearest to the reference's norm."""
        order = order_of(unit, mate, *(one for one in (self.found.basis, *self._orders) if one.theirs))
        best: tuple[float, CandidateRule, dict[str, Tensor]] | None = None
        for plain in joint_rules(
            unit.weights[0], mate.weights[0], mate.biases[0], self.port.shapes, self.reference.shapes
        ):
            move = based(plain, order, "e", ("", "")) if order.theirs else plain
            values = None if move is None else self._values([move])
            if move is None or values is None:
                continue
            self.found.trials += 1
            self._put(values)
            far, _ = self._normed_apart(unit, mate)
            if best is None or far < best[0]:
                best = far, move, values
            if far <= SAME:
                break
        if best is None:
            self._give_up(unit, mate)
            return
        self._accept([best[1]], best[2], [unit], [mate])
        far, now = self._normed_apart(unit, mate)
        if far > SAME:
            self._note("norm", unit, mate, far)
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


def joint_rules(target: str, gain: str, shift: str, ours: Shapes, theirs: Shapes) -> Iterator[CandidateRule]:
    """The rules that put a gain and a shift into one tensor: a row of each, a column of each, or one behind the other.

    Args:
        target: the module's tensor.
        gain, shift: the checkpoint's.
        ours, theirs: the shapes of the module's tensors, and of the checkpoint's.

    >>> shapes = {"n.weight": (5,), "n.bias": (5,)}
    >>> [str(one) for one in joint_rules("gb", "n.weight", "n.bias", {"gb": (2, 1, 5)}, shapes)]
    ['n.{p:weight,bias} [e] = gb [p 1 e]', 'n.{p:bias,weight} [e] = gb [p 1 e]']
    """
    features = math.prod(theirs[gain])
    spellings = {1: ["1"], 2: ["p"], features: ["e"], 2 * features: ["(p e)", "(e p)"]}
    if theirs[gain] != (features,) or theirs[shift] != (features,) or math.prod(ours[target]) != 2 * features:
        return
    if features <= len((gain, shift)) or not all(size in spellings for size in ours[target]):
        return
    for texts in product(*(spellings[size] for size in ours[target])):
        for names in ((gain, shift), (shift, gain)):
            listed = pattern([spelled(name) for name in names], "p")
            if listed:
                source = RuleTerm(listed, names, "e")
                yield CandidateRule(
                    (source,), (single_term(target, " ".join(texts)),), why="what it computes", proven=True
                )
