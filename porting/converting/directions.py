"""The recipes of a conversion: from a checkpoint to the port's layout, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from porting.errors import Code, Fault, Message, Option
from porting.ops import Content
from porting.plan.align import Step
from porting.plan.inferred_source import a_like
from porting.plan.plan import MADE, LeftOut, Plan, PlanError, irreversible
from porting.plan.recipe import Described, Recipe, backward_recipes, cast_to, forward_recipes


@dataclass(frozen=True, kw_only=True)
class Recipes:
    """The tensors of an output, and those that are left out of it.

    Attributes:
        tensors: in the order in which the output lists them.
        left_out: the tensors of the input that are not carried over, with the reasons.
        tied: names of the output that are not stored, because they are other names of a tensor that is.
        absent: names of the output that the input has nothing for, and that the table allows to be absent.
        same: pairs of tensors of the input that have to be equal, for the output holds one of them only.
        repeated: pairs of recipes of one tensor, which have to give the same: the input holds it several times.
        warnings: what is allowed and should be known.
    """

    tensors: tuple[Recipe, ...]
    left_out: tuple[LeftOut, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    same: tuple[LeftOut, ...] = ()
    repeated: tuple[tuple[Recipe, Recipe], ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(recipe.nbytes for recipe in self.tensors)


def into_port(plan: Plan) -> Recipes:
    """The recipes of the port's tensors from the checkpoint's."""
    found = {
        recipe.name: recipe
        for step in plan.steps
        for recipe in forward_recipes(step, plan.sources, plan.targets, plan.arithmetic(step), plan.dtype)
    }
    found |= {recipe.name: recipe for recipe in plan.made}
    return Recipes(
        tensors=tuple(found[name] for name in plan.targets if name in found),
        left_out=plan.left_out,
        tied=plan.tied,
        absent=(*plan.fresh, *plan.computed),
        same=tuple(left for left in plan.left_out if left.equals),
        warnings=tuple(fault.line for fault in plan.warnings),
    )


def back_from_port(
    plan: Plan, dtype: torch.dtype | None, like: Mapping[str, Described], same: tuple[LeftOut, ...]
) -> Recipes:
    """The recipes of the checkpoint's tensors from the port's."""
    found: dict[str, Recipe] = {}
    faults: dict[str, Fault] = {}
    repeated: list[tuple[Recipe, Recipe]] = []
    for step in plan.steps:
        for recipe in backward_recipes(step, plan.sources, plan.targets, plan.arithmetic(step), dtype, kept=like):
            if recipe.name in found:
                if recipe.copies:  # none in a fold's further source that serves several targets: zero in each
                    repeated.append((found[recipe.name], recipe))
                continue
            found[recipe.name] = recipe
            if step.layout is not None and recipe.applied is None:
                faults[step.rule.where] = irreversible(step.rule)
            elif not recipe.covered and not recipe.base and recipe.fill is None:
                faults[step.rule.where] = _irreversible(step, recipe.name)
    if faults:
        raise PlanError(faults.values())
    made = tuple(LeftOut(name=recipe.name, reason=MADE, equals=recipe.made_as) for recipe in plan.made)
    not_written = [*made]
    for left in plan.left_out:
        restored = _restored_recipe(left, plan, found, dtype, like)
        if restored is None:
            not_written.append(left)
        else:
            found[left.name] = restored
    return Recipes(
        tensors=tuple(found[name] for name in plan.sources if name in found),
        left_out=tuple(not_written),
        same=(*same, *made),
        repeated=tuple(repeated),
        warnings=tuple(dict.fromkeys(_moved_values_warning(step, like) for step in plan.steps if step.rule.fold)),
    )


def _moved_values_warning(step: Step, like: Mapping[str, Described]) -> str:
    """The warning that undoing a sum moves the values of its terms."""
    first, *others = step.sources
    emptied = ", ".join(repr(name) for name in others)
    extent = (
        "where they were added"
        if all(name in like for name in others)
        else Message("throughout (", Option("like"), " keeps other rows)")
    )
    total = f"{first!r} receives the whole sum that {step.targets[0]!r} holds"
    return Message(
        f"values moved: {total}, and zero stands in {emptied} ",
        extent,
        ": the same function, other numbers than before",
    )


def _restored_recipe(
    left: LeftOut, plan: Plan, found: Mapping[str, Recipe], dtype: torch.dtype | None, like: Mapping[str, Described]
) -> Recipe | None:
    """The recipe of a tensor that the port does not hold: its known value, or the followed checkpoint's."""
    if left.equals in found:
        return replace(found[left.equals], name=left.name)
    work = like[left.name].dtype if left.name in like else plan.sources[left.name].dtype
    blank = Recipe(name=left.name, shape=tuple(plan.sources[left.name].shape), work=work, dtype=cast_to(work, dtype))
    content = Content.parse(left.equals)
    if content is not None:
        return replace(blank, content=content)
    return replace(blank, base=left.name) if left.name in like else None


def _irreversible(step: Step, name: str) -> Fault:
    message = f"'{step.rule}' has a part in {name!r} that no tensor of the port holds"
    return Fault(
        code=Code.IRREVERSIBLE, where=step.rule.where, message=message, hint="give the rule a fill, or " + a_like()
    )
