"""A plan's moves by the rule that they come from, as people read them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from porting.plan.align import Step


@dataclass(frozen=True, kw_only=True)
class RuleMoves:
    """What one rule of the table does.

    Attributes:
        source, target: its two sides, as the table spells them.
        read, written: how many tensors.
        where: its place in the table.
    """

    source: str
    target: str
    read: int
    written: int
    where: str


def moves_by_rule(steps: Iterable[Step]) -> list[RuleMoves]:
    """Each rule that moves anything, in the table's order of use."""
    groups: dict[int, list[Step]] = {}
    for step in steps:
        groups.setdefault(id(step.rule), []).append(step)
    return [
        RuleMoves(
            source=" + ".join(map(str, found[0].rule.sources)),
            target=" + ".join(map(str, found[0].rule.targets)),
            read=sum(len(step.sources) for step in found),
            written=sum(len(step.targets) for step in found),
            where=found[0].rule.where,
        )
        for found in groups.values()
    ]
