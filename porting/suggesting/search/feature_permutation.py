"""The residual stream in another basis: sines before cosines on one side, next to each other on the other.

Positions that are computed cannot be loaded, and everything is added to them.  So where the two sides' tables have
their columns in another order, all that touches the residual stream is brought into that order: its axis is ``(s n)``
on one side and ``(n s)`` on the other, s being sine or cosine and n the frequency.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from porting.suggesting.search.layouts import CandidateRule, RuleTerm
from porting.suggesting.subjects.operation_trace import OperationTrace, WeightUse
from porting.tracing.angle_tables import ROUNDED


@dataclass(frozen=True)
class FeatureOrder:
    """An order of the residual stream's features, or of each head's.

    Attributes:
        theirs, ours: the indices of the axis, ``"s n"`` and ``"n s"``; both empty where the order is one.
        apart: how far the two tables are from each other.
        width: of a head; 0 for an order of all features.
        moved: so many of a head's features have another place, the first ones; 0 for all.
    """

    theirs: str = ""
    ours: str = ""
    apart: float = 0.0
    width: int = 0
    moved: int = 0

    def turned(self, value: Tensor) -> Tensor:
        """An activation of the reference's as the module has it, features last."""
        width = self.width or value.shape[-1]
        if not self.theirs or width % 2 or value.shape[-1] % width:
            return value
        pairs = (2, -1) if self.theirs.strip("(").startswith("s") else (-1, 2)
        heads = value.reshape(*value.shape[:-1], -1, width)
        some, rest = heads.tensor_split([self.moved or width], -1)
        some = some.reshape(*some.shape[:-1], *pairs).transpose(-1, -2).flatten(-2)
        return torch.cat([some, rest], -1).flatten(-2)


@dataclass(frozen=True)
class PositionTables:
    """Tables of positions that both sides compute.

    Attributes:
        basis: the order in which the module has the features.
        values: the module's tables by name, as far as they are used, with the reference's numbers in their place.
    """

    basis: FeatureOrder
    values: Mapping[str, tuple[Tensor, Tensor]]


def positions(port: OperationTrace, reference: OperationTrace, parameters: frozenset[str]) -> PositionTables | None:
    """The order of features that tables computed on both sides show; None where there are none.

    Args:
        parameters: the module's learned tensors.
    """
    theirs = [table for one in reference.constants if (table := _table(one)) is not None]
    named = [
        (one.names, one.output) for one in port.units if one.kind is WeightUse.TABLE and not set(one.names) & parameters
    ]
    ours = [
        (names, table)
        for names, one in [*named, *(((), one) for one in port.constants)]
        if (table := _table(one)) is not None
    ]
    known: dict[tuple[str, str], FeatureOrder] = {}
    values: dict[str, tuple[Tensor, Tensor]] = {}
    for mine, table in ours:
        found = [(order, other) for other in theirs for order in _orders(table, other)]
        near, other = min(found, key=lambda one: one[0].apart, default=(None, table))
        if near is not None and near.apart <= ROUNDED:
            old = known.get((near.theirs, near.ours), near)
            known[near.theirs, near.ours] = max(old, near, key=lambda one: one.apart)
            for name in mine:  # one table may serve rows of two lengths
                if name not in values or len(values[name][0]) < len(table):
                    values[name] = table, near.turned(other)
    return PositionTables(next(iter(known.values())), values) if len(known) == 1 else None


def _table(value: Tensor) -> Tensor | None:
    """A row for each position, [t e]; None for what is no such table."""
    squeezed = value.squeeze()
    return squeezed.double() if squeezed.ndim == 2 and min(squeezed.shape) > 1 else None


def _orders(ours: Tensor, theirs: Tensor) -> Iterator[FeatureOrder]:
    """The orders that are known, each with how far it leaves the two from each other."""
    if ours.shape != theirs.shape:
        return
    for left, right in (("", ""), ("s n", "n s"), ("n s", "s n")):
        if left and ours.shape[-1] % 2:
            continue
        basis = FeatureOrder(left, right)
        yield replace(basis, apart=float((basis.turned(theirs) - ours).abs().max()))


def based(move: CandidateRule, basis: FeatureOrder, index: str, axes: tuple[str, str]) -> CandidateRule | None:
    """The move with an index of the residual stream in the two sides' orders; None where it has no such index.

    Args:
        index: of the axis, in the move's terms.
        axes: of the tensors on either side, for a move that takes them as they are.
    """
    sides = []
    for some, order, plain in ((move.sources, basis.theirs, axes[0]), (move.targets, basis.ours, axes[1])):
        changed = [(one, _replaced(one.axes or plain, index, order)) for one in some]
        if any(text is None for _, text in changed):
            return None
        sides.append(tuple(RuleTerm(one.pattern, one.names, text or "") for one, text in changed))
    return replace(move, sources=sides[0], targets=sides[1])


def _replaced(axes: str, index: str, order: str) -> str | None:
    """The axes with an index spelled in two; in parentheses of its own where it is an axis."""
    deep = 0
    for token in re.finditer(r"[()]|\w+", axes):
        if token.group() == index:
            spelled = order if deep or order.startswith("(") else f"({order})"
            return axes[: token.start()] + spelled + axes[token.end() :]
        deep += {"(": 1, ")": -1}.get(token.group(), 0)
    return None


def replaced(leaf: Tensor, old: Tensor, new: Tensor) -> bool:
    """Put rows of a table in the place of others, wherever in the leaf these are; whether they were found."""
    table = leaf.data.squeeze()
    rows = len(old)
    if table.ndim != old.ndim or table.shape[-1] != old.shape[-1]:
        return False
    for start in range(min(len(table) - rows, 4) + 1):
        if bool((table[start : start + rows] == old).all()):
            table[start : start + rows] = new
            return True
    return False
