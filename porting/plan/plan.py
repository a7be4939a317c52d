"""A plan: a table applied to one checkpoint and one module, with nothing left to be decided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from porting.errors import Code, Fault, PortingError
from porting.notation.rule import Rule
from porting.notation.table import Table
from porting.ops import Arithmetic
from porting.plan.align import Step
from porting.plan.recipe import Described, Recipe

MADE = "the table makes it"
"""The reason why a tensor of the module is not in a checkpoint, when [make] gives its content."""


class PlanError(PortingError):
    """The table, the checkpoint and the module do not fit together; carries every fault."""


def irreversible(rule: Rule) -> Fault:
    """The fault of a formula that has no way back."""
    formula = "" if rule.formula is None else rule.formula.text
    message = f"'{rule}' computes {formula!r}, and nothing says what its sources are made of on the way back"
    hint = "give the rule 'back', a formula over y for each source"
    return Fault(code=Code.IRREVERSIBLE, where=rule.where, message=message, hint=hint)


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A source tensor that is not loaded.

    Attributes:
        reason: why, in the table's words.
        equals: what it has to equal, a word such as ``"arange"`` (:class:`porting.ops.Content`) or a tensor beside it;
            empty by default.
    """

    name: str
    reason: str
    equals: str = ""

    @property
    def made(self) -> bool:
        """Whether it is a tensor of the module that [make] gives."""
        return self.reason == MADE


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The assignment of a checkpoint's tensors to a module's.

    Attributes:
        table: the table.
        config: the checkpoint's config, the table's defaults filled in.
        sources: shape and dtype of every tensor of the checkpoint, by its name on disk.
        targets: shape and dtype of every parameter and persistent buffer of the module.
        steps: the moves.
        left_out: the source tensors that are not loaded.
        fresh: the parameters that the checkpoint does not have, which the table lists and the caller accepted.
        computed: the buffers that it does not have, which the table lists: the module computes them.
        made: the targets that the source does not have and whose content [make] gives.
        tied: target name -> the target name that it shares its storage with and that is written.
        dtype: what floating-point tensors are cast to; None to keep the checkpoint's.
        warnings: what is allowed and should be known.

    >>> import porting
    >>> source = porting.embedded_checkpoint()
    >>> print(porting.provenance(porting.load(source)).plan.summary)
    62 of 62 tensors fill 62 of 62 places
    """

    table: Table
    config: Mapping[str, object]
    sources: Mapping[str, Described]
    targets: Mapping[str, Described]
    steps: tuple[Step, ...]
    left_out: tuple[LeftOut, ...] = ()
    fresh: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    made: tuple[Recipe, ...] = ()
    tied: Mapping[str, str]
    dtype: torch.dtype | None = None
    warnings: tuple[Fault, ...] = ()

    def arithmetic(self, step: Step) -> Arithmetic:
        """The arithmetic of a step; empty for most steps."""
        return step.rule.arithmetic(self.config)

    @property
    def contents(self) -> dict[str, str]:
        """The contents that [make] gives: the name of each target, and its content as the table spells it."""
        return {recipe.name: recipe.made_as for recipe in self.made}

    @property
    def summary(self) -> str:
        """One line: how much is loaded, left out, tied and new."""
        read = len({name for step in self.steps for name in step.sources})
        written = sum(len(step.targets) for step in self.steps)
        parts = [f"{read} of {len(self.sources)} tensors fill {written} of {len(self.targets)} places"]
        parts += [f"{len(self.left_out)} left out"] if self.left_out else []
        parts += [f"{len(self.tied)} tied"] if self.tied else []
        parts += [f"{len(self.made)} made"] if self.made else []
        parts += [f"{len(self.fresh)} new"] if self.fresh else []
        parts += [f"{len(self.computed)} computed"] if self.computed else []
        return ", ".join(parts)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # IPython's own printer
        """Print the plan for IPython on a terminal."""
        printer.text(f"{self.table.where}: {self.summary}")

    def _repr_html_(self) -> str:
        """The HTML for a notebook: a row for each rule, and the tensors that are not simply loaded."""
        from porting.pages.page import render_part  # noqa: PLC0415  # jinja2 is for those who look at a plan

        return render_part("plan_part.html", {"plan": self, "rules": moves_by_rule(self.steps)})


@dataclass(frozen=True, kw_only=True)
class RuleMoves:
    """The moves of one rule of the table.

    Attributes:
        source, target: its two sides, as the table spells them.
        read, written: how many tensors.
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
