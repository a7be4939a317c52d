"""The checkpoint that a module would be saved as, imagined from the module's own names and shapes.

A module that was loaded remembers its checkpoint.  For one that never was, the table is read from right to left: each
rule's targets give its sources' names, in their first spelling, and their shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from porting.errors import Code, Fault, Message, Option
from porting.limits import combinations
from porting.notation.axes import Axis, Concatenation, Index, Mismatch, Row, leaves, size_of, solve_all
from porting.notation.faults import NotationError
from porting.notation.name import Value
from porting.notation.rule import Rule, Term
from porting.notation.table import Table
from porting.plan.config import sizes_under
from porting.plan.fitting import axes_of, sized_by
from porting.plan.members import Astray, Members, count_members, members_under, outer_keys, sort_names
from porting.plan.plan import PlanError, irreversible
from porting.plan.recipe import Described

Shape = tuple[int, ...]


def a_like() -> Message:
    """The hint where the module alone cannot tell."""
    return Message("pass ", Option("like"), " a checkpoint that has it")


def imagine(table: Table, targets: Mapping[str, Described], sizes: Mapping[str, int]) -> dict[str, Shape]:
    """Names and shapes of the checkpoint's tensors, from the module's.

    Rules whose targets the module does not have give nothing, and neither do target tensors that no rule writes:
    :func:`~porting.plan.align.align` reports those.

    Args:
        sizes: the sizes that [sizes] gives (:func:`porting.plan.config.sizes`).

    Returns:
        In the order of the table's rules, then of their outer indices.  The names carry the table's prefix, except
        when all of them do though the table has others: then this is a bare trunk, which is saved without it.
    """
    shapes = {name: tuple(one.shape) for name, one in targets.items()}
    written = sort_names(table.rules, shapes, "target", table.target_prefix)
    faults = list(written.faults)
    astray = Astray(unmatched={"source": (), "target": written.unmatched})
    found: dict[str, Shape] = {}
    for rule, ours in zip(table.rules, written.terms, strict=True):
        for key in outer_keys(rule, ours):
            outer = dict(zip(rule.outer, key, strict=True))
            right = [members_under(rule, *one, key) for one in zip(rule.targets, ours, strict=True)]
            try:
                found.update(_sources(rule, outer, right, shapes, sizes, astray))
            except PlanError as error:
                faults += error.faults
                break  # the other layers have the same faults
    if faults:
        raise PlanError(faults)
    others = any(not term.key.spell({}).startswith(table.prefix) for rule in table.rules for term in rule.sources)
    if others and all(name.startswith(table.prefix) for name in found):
        return {name.removeprefix(table.prefix): shape for name, shape in found.items()}
    return found


def _sources(
    rule: Rule,
    outer: Mapping[str, Value],
    right: list[Members],
    shapes: Mapping[str, Shape],
    sizes: Mapping[str, int],
    astray: Astray,
) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of the sources of one application of a rule."""
    if rule.formula is not None and not rule.back and not rule.turned:
        raise PlanError(irreversible(rule))
    counts: dict[str, int] = {}
    targets = list(zip(rule.targets, right, strict=True))
    faults = [
        fault
        for term, members in targets
        for fault in count_members(rule, term, members, outer, "target", counts, astray)
    ]
    if faults:
        raise PlanError(faults)
    try:
        known = {**sizes_under(sizes, outer, rule.inner), **rule.enumerations, **counts, **rule.fixed_sizes}
    except NotationError as error:
        message = f"[sizes]: {error}, in '{rule}'"
        raise PlanError(Fault(code=error.code, where=rule.where, message=message, hint=error.hint)) from error
    axes: list[tuple[Axis, int]] = []
    rank = 0
    for term, members in targets:
        name = next(iter(members.values()))
        rank = len(shapes[name])
        if term.axes is not None and len(term.axes) != rank:
            message = f"{name!r} has the shape {list(shapes[name])}, '{term}' has {len(term.axes)} axes"
            raise PlanError(Fault(code=Code.SHAPE_MISMATCH, where=rule.where, message=message))
        axes += zip(axes_of(term, rank), shapes[name], strict=True)
    try:
        solve_all(axes, known)
    except Mismatch as error:
        names = ", ".join(f"{name!r} {list(shapes[name])}" for members in right for name in members.values())
        message = f"{names}: {error}, in '{rule}'"
        raise PlanError(Fault(code=Code.SHAPE_MISMATCH, where=rule.where, message=message)) from error
    for term in rule.sources:
        inner = [Index(index) for index in term.name.indices if index not in outer]
        needed = [*axes_of(term, rank), *inner]
        extents = [size for axis in needed if (size := size_of(axis, known)) is not None]
        if len(extents) < len(needed):
            raise PlanError(_unknown(rule, term, next(axis for axis in needed if size_of(axis, known) is None), known))
        shape = tuple(extents[: len(extents) - len(inner)])
        for values in combinations([range(known[index.name]) for index in inner], where=rule.where):
            bindings = {index.name: value for index, value in zip(inner, values, strict=True)}
            yield term.key.spell({**outer, **bindings}), shape


def _instead(rule: Rule) -> Message:
    """Name what else can give sizes besides [sizes]: the module to convert for, or a checkpoint."""
    return Message("pass ", Option("into"), ", the module") if rule.turned else a_like()


def _unknown(rule: Rule, term: Term, axis: Axis, sizes: Mapping[str, int]) -> Fault:
    if isinstance(axis, Row):
        named = f'give it in [sizes]: {axis.index} = "...", or ' if axis.index else ""
        what, hint = (
            f"how many rows the axis {axis} of '{term}' has",
            named + _instead(rule),
        )
    else:
        names = [name for name in leaves((axis,)) if size_of(Index(name), sizes) is None]
        what = f"the size of {', '.join(names)} in '{term}'"
        hint = f"{sized_by(names if isinstance(axis, Concatenation) else names[:1])}, or " + _instead(rule)
    known = "checkpoint" if rule.turned else "right side"
    message = f"{what} cannot be known from the {known} alone, in '{rule}'"
    return Fault(code=Code.SIZE_UNKNOWN, where=rule.where, message=message, hint=hint)
