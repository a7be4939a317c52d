"""A constant factor that one side multiplies an activation by, and that weights of the other side can take in.

A module that does not multiply its embeddings by the root of the width computes what the reference computes with a
table that holds the product.  Where that table is the head's matrix as well, the norm in front of the head gives the
factor back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, starmap

from torch import Tensor

from porting.suggesting.search.activation_matching import alike, explained, scores_behind
from porting.suggesting.search.layouts import CandidateRule, distance
from porting.suggesting.search.score_tables import ScoreTableSearch
from porting.suggesting.search.search_result import SAME
from porting.suggesting.subjects.config_fields import Role, fields_of
from porting.suggesting.subjects.operation_trace import OperationTrace, Unit, WeightUse

NEAR = 1e-9
"""A factor that comes so near to a formula over the config, relative to it, is that formula."""


def constant_factor(one: Tensor, other: Tensor) -> float | None:
    """The number by which an activation has to be multiplied to be another one; None where there is none.

    Args:
        one, other: two activations, in any layout.
    """
    if one.numel() != other.numel() or not one.is_floating_point() or not other.is_floating_point():
        return None
    sizes = [float(value.double().pow(2).mean().sqrt()) for value in (one, other)]
    if not all(0.0 < size < float("inf") for size in sizes):
        return None
    left, right = (value.double() / size for value, size in zip((one, other), sizes, strict=True))
    apart = float((alike(right, left) - left).abs().max() / left.abs().max())
    if apart > SAME:
        return None
    found = sizes[1] / sizes[0]
    return 1.0 if abs(found - 1) <= SAME else found


def formula(factor: float, config: Mapping[str, object]) -> str:
    """A factor as a table writes it: a field of the config, its root, their inverses, and products of two.

    Only fields that are called a factor count, and the widths of the model and of a head: any other number of a
    config, such as its layers or a token's id, has the value by chance.

    Returns:
        The formula; empty where the config has none.

    >>> formula(8 ** -0.5, {"hidden_size": 8}), formula(3.0, {"hidden_size": 8, "embedding_multiplier": 3.0})
    ('hidden_size ** -0.5', 'embedding_multiplier')
    """
    numbers = {name: float(one) for name, one in config.items() if isinstance(one, int | float) and one > 0}
    called = [name for name in numbers if _CALLED.search(name)]
    named = {text: value for name in called for text, value in _powers(name, numbers[name], (1, -1, 0.5, -0.5))}
    widths = {text: value for name, size in _widths(config) for text, value in _powers(name, size, (0.5, -0.5))}
    joint = {f"{one} * {other}": named[one] * widths[other] for one in named for other in widths}
    plain = {text: value for name in called for text, value in _powers(name, numbers[name], (1, -1))}
    pairs = {f"{one} * {other}": plain[one] * plain[other] for one in plain for other in plain}
    formulas = chain(named.items(), widths.items(), joint.items(), pairs.items())
    return next((text for text, value in formulas if abs(value / factor - 1) <= NEAR), "")


_CALLED = re.compile(r"scal|mult|factor")
"""Words in the names of config fields that are factors."""


def _powers(name: str, value: float, powers: Sequence[float]) -> Iterator[tuple[str, float]]:
    for power in powers:
        yield name if power == 1 else f"{name} ** {power}", value**power


def _widths(config: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """The width of the model and of a head, each as a table writes it."""
    hidden, heads, head = (next(fields_of(role, config), "") for role in (Role.HIDDEN, Role.HEADS, Role.HEAD_SIZE))
    sizes = {name: float(str(config[name])) for name in (hidden, heads, head) if type(config.get(name)) is int}
    yield from ((name, sizes[name]) for name in (hidden, head) if name in sizes)
    if head not in sizes and hidden in sizes and heads in sizes:
        yield f"({hidden} / {heads})", sizes[hidden] / sizes[heads]


def _product(one: str, other: str) -> str:
    """The product of two constants, as a table writes it; an empty one is 1.

    >>> _product("", "hidden_size ** 0.5"), _product("-1", "hidden_size ** 0.5")
    ('hidden_size ** 0.5', '(-1) * hidden_size ** 0.5')
    """
    return other if one in {"", "1"} else f"({one}) * {other}"


class FactorSearch(ScoreTableSearch):
    """Finds constant factors, and multiplies rules by them."""

    def _scaled_behind(self, unit: Unit, trace: OperationTrace, like: Sequence[Unit]) -> OperationTrace | None:
        """Multiply what stands in front of a place where the module differs, if that is all that differs.

        So the scores of attention, or a branch before it is added to the residual stream.

        Args:
            trace: the module's run.
            like: the reference's places that may be due.

        Returns:
            The module's run then; None where nothing was multiplied.
        """
        if self._scores_scaled(unit, trace, like) or self._branch_scaled(unit, trace, like):
            return self.port.run(forced=self._forced)
        return None

    def _branch_scaled(self, unit: Unit, trace: OperationTrace, like: Sequence[Unit]) -> bool:
        """Multiply the last matrix of a branch by what the branch lacks, before it is added to something."""
        behind = [one for one in trace.units if one.number in unit.behind and one.kind is WeightUse.LINEAR]
        factors = ((one, self._branch_factor(one, unit, like)) for one in behind)
        return any(factor is not None and self._multiplied(one.names, factor, unit, like) for one, factor in factors)

    def _branch_factor(self, branch: Unit, unit: Unit, like: Sequence[Unit]) -> float | None:
        """The factor of a branch that makes its sum equal to the reference's.

        Args:
            branch: the last matrix of it.
            like: the reference's places that may be due; the first ones are looked at.
        """
        for mate in like[:2]:
            if unit.given is None or mate.given is None or branch.output.numel() != unit.given.numel():
                continue
            if mate.given.numel() == unit.given.numel():
                more = alike(mate.given, unit.given, self.found.basis) - unit.given
                own = branch.output.reshape(more.shape)
                if (factor := constant_factor(own, own + more)) is not None:
                    return factor
        return None

    def _scores_scaled(self, unit: Unit, trace: OperationTrace, like: Sequence[Unit]) -> bool:
        """Multiply the queries by what the scores of attention lack."""
        if self._projected is None or unit.kind is not WeightUse.LINEAR:
            return False
        group, mates = self._projected
        scores = scores_behind(group, mates, trace, self.found.reference)
        factor = next((one for one in starmap(constant_factor, scores) if one is not None), None)
        return factor is not None and any(self._multiplied(one.names, factor, unit, like) for one in group)

    def _multiplied(self, names: Sequence[str], factor: float, unit: Unit, like: Sequence[Unit]) -> bool:
        """Let the rules of some tensors multiply by a factor; undone where the place is not the reference's then."""
        moves = [one for one in self.found.moves if {*names} & {*one.writes}]
        before = self._values(moves)
        if before is None or not moves or not self._multiply(moves, factor):
            return False
        again = self.port.run(until=unit.last, forced=self._forced)
        now = next((one for one in again.units if one.number == unit.number), None)
        if now is not None and any(self._apart(now, one, SAME) <= SAME for one in like):
            return True
        self._replace(moves, before)
        return False

    def _take_in_factor(self, group: Sequence[Unit], following: Unit | None) -> None:
        """Multiply the tables that are added to the stream if a norm behind them hides that it is too small."""
        if following is None or following.kind is not WeightUse.NORM:
            return
        again = self.port.run(until=following.last, forced=self._forced)
        now = next((one for one in again.units if one.number == following.number), None)
        mates = [one for one in self.found.reference.units if one.kind is WeightUse.NORM and one.given is not None]
        mate = next((one for one in mates if now is not None and self._apart(now, one, SAME) <= SAME), None)
        if now is None or now.given is None or mate is None or mate.given is None:
            return
        factor = constant_factor(now.given, mate.given)
        written = {name for unit in group for name in unit.names}
        moves = [one for one in self.found.moves if written & {*one.writes}]
        if factor is not None and moves:
            self._multiply(moves, factor)

    def _give_back_factor(self) -> None:
        """Multiply a head by what its output lacks: logits that are scaled, or a table of words that is scaled already.

        Where the head's matrix is the table of words, the norm in front of it takes the factor in.
        """
        trace = self.port.run(forced=self._forced)
        heads = [one for one in trace.units if one.kind is WeightUse.LINEAR and len(one.weights) == 1]
        if not heads:
            return
        unit = heads[-1]
        tied = self._tied_to(unit)
        returned = [one for one in self.found.reference.outputs if one.is_floating_point()][:1]
        last = any(distance(one, unit.output, SAME) <= SAME for one in trace.outputs)
        due = returned if last else [] if tied is None else [tied.output]
        factor = next((constant_factor(unit.output, one) for one in due), None)
        names = unit.names if tied is None else self._normed_alone(unit, trace)
        moves = [one for one in self.found.moves if {*names} & {*one.writes}]
        whole = {*names} & self.port.loadable <= {name for one in moves for name in one.writes}
        if factor is not None and moves and whole and self._multiply(moves, factor):
            self.found.trace = self.port.run(forced=self._forced)

    def _normed_alone(self, unit: Unit, trace: OperationTrace) -> tuple[str, ...]:
        """The tensors of the norm in front of a head, where nothing else is given what it gives."""
        norms = [one for one in trace.units if unit.behind == {one.number} and one.kind is WeightUse.NORM]
        others = any(one is not unit and unit.behind & one.behind for one in trace.units)
        return norms[0].names if len(norms) == 1 and not others and not unit.biases else ()

    def _tied_to(self, unit: Unit) -> Unit | None:
        """The reference's head, if a matrix of the module has its values already, as a table of words."""
        filled = {unit.weights[0], self.found.seconds.get(unit.weights[0], "")}
        reads = {name for move in self.found.moves if filled & {*move.writes} for name in move.reads}
        heads = [one for one in self.found.reference.units if one.kind is WeightUse.LINEAR and {*one.weights} & reads]
        lookups = [one for one in self.found.reference.units if one.kind is WeightUse.LOOKUP and {*one.names} & reads]
        return heads[0] if heads and lookups else None

    def _multiply(self, moves: Sequence[CandidateRule], factor: float) -> bool:
        """Let rules multiply by a factor, what they add included; whether the config has a formula for it."""
        text = "" if factor == 1 else formula(factor, self._config)
        if not text or any(one.fold or one.fill is not None for one in moves):
            return False
        made = [
            replace(
                explained(one, "what it computes", proven=True),
                scale=_product(one.scale, text),
                offset=_product(one.offset, text) if one.offset else "",
            )
            for one in moves
        ]
        values = self._values(made)
        if values is None:
            return False
        self.found.trials += 1
        self._replace(made, values)
        return True
