"""A norm that only the module has."""

from __future__ import annotations

from collections.abc import Iterator

from porting.suggesting.search.finding import SAME, Divergence, Found
from porting.suggesting.search.layouts import distance
from porting.suggesting.subjects.tracing import Kind
from porting.suggesting.verdict.suggestion import Reason


def surplus(found: Found) -> Iterator[Reason]:
    """The norms that are given an activation of the reference's, which the reference does not norm."""
    for one in found.divergences:
        if one.what == "surplus norm" and not is_last(found, one):
            name = one.port.rpartition(".")[0] or one.port
            said = f"the module norms with {name}, and the checkpoint's model has no norm there"
            yield Reason(kind="surplus norm", said=said, shown=_alone(found, one))


def _alone(found: Found, one: Divergence) -> bool:
    """Whether a norm is all that differs there: without it the next place has the reference's own activation.

    A norm right behind it might take away again what it does.
    """
    at = next(number for number, unit in enumerate(found.trace.units) if one.port in unit.names)
    norm, later = found.trace.units[at], [unit for unit in found.trace.units[at + 1 :] if unit.operand is not None]
    behind = later[0] if later else None
    if behind is None or behind.operand is None or norm.operand is None or behind.number not in found.mates:
        return False
    again = behind.kind is Kind.NORM and distance(behind.operand, norm.operand) <= SAME
    return not again and not any(other.port in behind.names for other in found.divergences if other.what != "bias")


def is_last(found: Found, one: Divergence) -> bool:
    """Whether a part that only the module has stands behind all that was found, as a new head does."""
    places = [unit.number for unit in found.trace.units if one.port in unit.names]
    return bool(places) and min(places) > max(found.mates, default=-1)
