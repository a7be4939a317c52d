"""Pairing the tensors of two checkpoints: by their names, or through a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from porting.checkpoint import Checkpoint, TensorInfo
from porting.errors import Code, Fault, Message, Option, nearest
from porting.notation.table import Table
from porting.ops.contents import Content
from porting.plan.align import Alignment, align_table
from porting.plan.config import effective, refused, sizes, source_config, uncomputable
from porting.plan.leftovers import made_by, make_recipes, present
from porting.plan.matching import Matcher
from porting.plan.members import Side, sort_names
from porting.plan.plan import PlanError
from porting.plan.recipe import Recipe, as_it_is, forward_recipes


@dataclass(frozen=True, kw_only=True)
class Counterpart:
    """Two tensors that should be equal.

    Attributes:
        recipe: how the tensor is made of those of ``left``.
        left: the checkpoint that the recipe reads.
        right: the checkpoint that has the tensor as it is.
        note: why two tensors of one checkpoint are compared with each other; empty for most.
    """

    recipe: Recipe
    left: Checkpoint
    right: Checkpoint
    name: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Counterparts:
    """The pairs to compare, and the tensors without a counterpart.

    Attributes:
        pairs: the tensors that should hold the same.
        only_a, only_b: names that the other side has nothing for.
        left_out: names of the first that the table leaves out without saying what they equal, with its reason.
    """

    pairs: tuple[Counterpart, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    left_out: Mapping[str, str]


def by_name(a: Checkpoint, b: Checkpoint) -> Counterparts:
    """Pair tensors of the same name."""
    common = [name for name in a.tensors if name in b.tensors]
    if not common:
        message = f"no tensor of {a.location} has a namesake in {b.location}"
        hint = Message("pass the table that leads from one layout to the other: ", Option("table"))
        raise PlanError(Fault(code=Code.NO_SOURCE, message=message, hint=hint))
    pairs = [Counterpart(recipe=as_it_is(name, a.tensors[name]), left=a, right=b, name=name) for name in common]
    return Counterparts(
        pairs=tuple(pairs),
        only_a=tuple(name for name in a.tensors if name not in b.tensors),
        only_b=tuple(name for name in b.tensors if name not in a.tensors),
        left_out={},
    )


def by_table(table: Table, a: Checkpoint, b: Checkpoint) -> Counterparts:
    """Pair tensors by a table's rules; ``a`` has the names of its left side, ``b`` of its right."""
    a_left, b_left = (count_named(table, one, "source") for one in (a, b))
    a_right, b_right = (count_named(table, one, "target") for one in (a, b))
    if b_left > a_left and a_right > b_right:
        message = f"{a.location} has the names of the right side of '{table.name}', and {b.location} those of the left"
        raise PlanError(Fault(code=Code.NO_SOURCE, where=table.where, message=message, hint="pass them the other way"))
    config = a.config or source_config(table, b.config)
    known, faults = sizes(table, config)
    alignment = align_table(table, a.tensors, b.tensors, known, config)
    values = effective(table, config)
    unusable = uncomputable((step.rule for step in alignment.steps), values)
    faults = [*refused(table, config), *faults, *alignment.faults, *unusable]
    if faults:
        raise PlanError(faults)
    if not alignment.steps:
        message = f"no rule of '{table.name}' leads from a tensor of {a.location} to one of {b.location}"
        hint = nearest(next(iter(a.tensors)), [str(term.key) for rule in table.rules for term in rule.sources])
        raise PlanError(Fault(code=Code.NO_SOURCE, where=table.where, message=message, hint=hint))
    pairs = [
        Counterpart(recipe=recipe, left=a, right=b, name=recipe.name)
        for step in alignment.steps
        for recipe in forward_recipes(step, a.tensors, b.tensors, step.rule.arithmetic(values))
    ]
    dropped, left_out, only_a = _unread(table, alignment, a)
    tied, only_b = _unwritten(table, alignment, b)
    made, only_b = _made(table, only_b, b, values, known)
    fresh, only_b = _fresh(table, only_b)
    left_out |= fresh
    return Counterparts(pairs=(*pairs, *dropped, *tied, *made), only_a=only_a, only_b=only_b, left_out=left_out)


def count_named(table: Table, checkpoint: Checkpoint, side: Side) -> int:
    """The number of a checkpoint's tensors that a table's rules name on one side."""
    rules = [rule for rule in table.rules if not rule.rest]  # which names everything on either side
    prefix = table.prefix if side == "source" else table.target_prefix
    return len(checkpoint.tensors) - len(sort_names(rules, checkpoint.tensors, side, prefix).unmatched)


def _unread(
    table: Table, alignment: Alignment, a: Checkpoint
) -> tuple[list[Counterpart], dict[str, str], tuple[str, ...]]:
    """Tensors of the left side that no rule reads: of known values, left out for a reason, or alone."""
    matcher = Matcher(((drop.name, drop) for drop in table.drops), table.prefix)
    copies: list[Counterpart] = []
    left_out: dict[str, str] = {}
    alone: list[str] = []
    for name in (*alignment.unread, *(name for unplaced in alignment.unplaced for name in unplaced.names)):
        found = matcher.first(name)
        if found is None:
            alone.append(name)
            continue
        drop = found.line
        other = "" if drop.equals is None else present(drop.equals, found.bindings, table.prefix, a.tensors)
        if other in a.tensors and a.tensors[other].shape == a.tensors[name].shape:
            recipe = as_it_is(other, a.tensors[other])
            copies.append(Counterpart(recipe=recipe, left=a, right=a, name=name, note=f"left out: equals {other}"))
        elif (constant := _constant(other, name, a.tensors[name])) is not None:
            copies.append(Counterpart(recipe=constant, left=a, right=a, name=name, note=f"left out: equals {other}"))
        else:
            left_out[name] = drop.reason
    return copies, left_out, tuple(alone)


def _constant(text: str, name: str, info: TensorInfo) -> Recipe | None:
    """The recipe of a tensor that [drop] says to equal a constant; None for what is none, or does not fit."""
    content = Content.parse(text)
    if content is None or content.fault(info.shape, info.dtype):
        return None
    return Recipe(name=name, shape=info.shape, work=info.dtype, dtype=info.dtype, content=content)


def _unwritten(table: Table, alignment: Alignment, b: Checkpoint) -> tuple[list[Counterpart], tuple[str, ...]]:
    """Tensors of the right side that no rule writes: tied to others, or alone."""
    matcher = Matcher(((tie.name, tie) for tie in table.ties), table.target_prefix)
    tied: list[Counterpart] = []
    alone: list[str] = []
    for name in (*alignment.unwritten, *(name for unsourced in alignment.unsourced for name in unsourced.names)):
        tie = matcher.first(name)
        other = "" if tie is None else present(tie.line.with_, tie.bindings, table.target_prefix, b.tensors)
        if other in b.tensors and b.tensors[other].shape == b.tensors[name].shape:
            recipe = as_it_is(other, b.tensors[other])
            tied.append(Counterpart(recipe=recipe, left=b, right=b, name=name, note=f"tied to {other}"))
        else:
            alone.append(name)
    return tied, tuple(alone)


def _made(
    table: Table, names: Iterable[str], b: Checkpoint, values: Mapping[str, object], known: Mapping[str, int]
) -> tuple[list[Counterpart], tuple[str, ...]]:
    """Divide the tensors of the right side that no rule writes: those that the table makes, and the rest."""
    lines = made_by(table, names)
    dtypes = {name: b.tensors[name].dtype for name in lines}
    recipes, faults = make_recipes(
        lines, b.tensors, dtypes, values, known, table, lambda name: as_it_is(name, b.tensors[name])
    )
    if faults:
        raise PlanError(faults)
    pairs = [
        Counterpart(recipe=recipe, left=b, right=b, name=recipe.name, note=f"[make] says {recipe.made_as}")
        for recipe in recipes
    ]
    return pairs, tuple(name for name in names if name not in lines)


def _fresh(table: Table, names: Iterable[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Divide tensors that no rule writes: those that the table lists in [fresh], with their reasons, and the rest."""
    matcher = Matcher(((fresh.name, fresh) for fresh in table.fresh), table.target_prefix)
    reasons = {name: found.line.reason for name in names if (found := matcher.first(name)) is not None}
    return reasons, tuple(name for name in names if name not in reasons)
