"""Recipes for the two directions: a checkpoint into the port's layout, and back.

They say the same as :func:`porting.plan.move.forward` and :func:`porting.plan.move.backward` do with whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from porting.converting.recipe import Recipe, Recipes
from porting.errors import Code, Fault, option
from porting.plan.align import Step
from porting.plan.copies import Copy
from porting.plan.imagine import a_like
from porting.plan.move import Described
from porting.plan.plan import LeftOut, Plan, PlanError


def into_port(plan: Plan) -> Recipes:
    """The port's tensors from the checkpoint's."""
    found: dict[str, Recipe] = {}
    for step in plan.steps:
        by_target = _grouped(step.copies, lambda copy: copy.target)
        dtype = _cast(plan.sources[step.sources[0]].dtype, plan.dtype)
        for name in step.targets:
            found[name] = Recipe(
                name=name,
                shape=tuple(plan.targets[name].shape),
                work=dtype,
                dtype=dtype,
                copies=by_target[name],
                fill=step.rule.fill,
                fold=step.rule.fold,
                factor=plan.scale(step),
            )
    return Recipes(
        tensors=tuple(found[name] for name in plan.targets if name in found),
        left_out=plan.left_out,
        tied=plan.tied,
        absent=(*plan.fresh, *plan.computed),
        same=tuple(left for left in plan.left_out if left.equals),
        warnings=tuple(str(fault) for fault in plan.warnings),
    )


def back_from_port(
    plan: Plan, dtype: torch.dtype | None, like: Mapping[str, Described], same: tuple[LeftOut, ...]
) -> Recipes:
    """The checkpoint's tensors from the port's.

    Args:
        plan: the checkpoint that is to be written, held against the port's tensors.
        dtype: what floating-point tensors are cast to, last of all; None to keep the port's.
        like: the tensors of the followed checkpoint, for what the port does not hold.
        same: pairs of the port's tensors that have to be equal.

    Raises:
        PlanError: elements of a tensor are held by nothing.
    """
    found: dict[str, Recipe] = {}
    faults: dict[str, Fault] = {}
    for step in plan.steps:
        by_source = _grouped(step.copies, lambda copy: copy.source)
        for number, name in enumerate(step.sources):
            if name in found:  # a fold's further source that serves several targets: zero in each
                continue
            found[name] = _back(plan, step, name, by_source[name], dtype, emptied=step.rule.fold and number > 0)
            if found[name].covered:
                continue
            if name in like:
                blanks = () if found[name].copies else tuple(copy.inverse for copy in by_source[name])
                found[name] = replace(found[name], base=name, fill=None, blanks=blanks)
            elif found[name].fill is None:
                faults[step.rule.where] = _irreversible(step, name)
    if faults:
        raise PlanError(faults.values())
    not_written = []
    for left in plan.left_out:
        made = _restored(left, plan, found, dtype, like)
        if made is None:
            not_written.append(left)
        else:
            found[left.name] = made
    return Recipes(
        tensors=tuple(found[name] for name in plan.sources if name in found),
        left_out=tuple(not_written),
        same=same,
        warnings=tuple(dict.fromkeys(_moved(step, like) for step in plan.steps if step.rule.fold)),
    )


def _moved(step: Step, like: Mapping[str, Described]) -> str:
    """What a sum that is taken apart does to the values of its terms."""
    first, *others = step.sources
    emptied = ", ".join(repr(name) for name in others)
    how = (
        "where they were added"
        if all(name in like for name in others)
        else f"throughout ({option('like')} keeps other rows)"
    )
    total = f"{first!r} receives the whole sum that {step.targets[0]!r} holds"
    return f"values moved: {total}, and zero stands in {emptied} {how}: the same function, other numbers than before"


def _back(
    plan: Plan, step: Step, name: str, copies: tuple[Copy, ...], dtype: torch.dtype | None, *, emptied: bool
) -> Recipe:
    """A source of a step from its targets: what :func:`into_port` did, undone."""
    work = plan.targets[step.targets[0]].dtype
    return Recipe(
        name=name,
        shape=tuple(plan.sources[name].shape),
        work=work,
        dtype=_cast(work, dtype),
        copies=() if emptied else tuple(copy.inverse for copy in copies),
        fill=0.0 if emptied else step.rule.fill,
        factor=None if emptied else plan.scale(step),
        divide=True,
    )


def _restored(
    left: LeftOut,
    plan: Plan,
    found: Mapping[str, Recipe],
    dtype: torch.dtype | None,
    like: Mapping[str, Described],
) -> Recipe | None:
    """A tensor that the port does not hold: what it is known to equal, or the followed checkpoint's own."""
    if left.equals in found:
        return replace(found[left.equals], name=left.name)
    work = like[left.name].dtype if left.name in like else plan.sources[left.name].dtype
    blank = Recipe(name=left.name, shape=tuple(plan.sources[left.name].shape), work=work, dtype=_cast(work, dtype))
    match left.equals:
        case "arange":
            return replace(blank, arange=True)
        case "zeros":
            return replace(blank, fill=0.0)
    return replace(blank, base=left.name) if left.name in like else None


def _irreversible(step: Step, name: str) -> Fault:
    message = f"'{step.rule}' has a part in {name!r} that no tensor of the port holds"
    return Fault(
        code=Code.IRREVERSIBLE, where=step.rule.where, message=message, hint=f"give the rule a fill, or {a_like()}"
    )


def _grouped(copies: Iterable[Copy], name: Callable[[Copy], str]) -> dict[str, tuple[Copy, ...]]:
    groups: dict[str, list[Copy]] = {}
    for copy in copies:
        groups.setdefault(name(copy), []).append(copy)
    return {key: tuple(group) for key, group in groups.items()}


def _cast(dtype: torch.dtype, to: torch.dtype | None) -> torch.dtype:
    return to if to is not None and dtype.is_floating_point else dtype
