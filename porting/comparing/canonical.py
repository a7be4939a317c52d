"""The tensors of a checkpoint under the names of a table's left side, whichever side's layout it has.

A checkpoint and its port hold the same values under other names and in another order.  What they have in common is the
table's left side in its first spelling: names with the table's prefix (without it, where every name has it: so a bare
trunk is saved), what the table drops left out, parts without a counterpart replaced by the rule's ``fill``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from porting.checkpoint import Checkpoint, TensorInfo
from porting.comparing.counterparts import count_named
from porting.errors import Code, Fault, Message, Option, nearest
from porting.loading import same_bits
from porting.notation.axes import Mismatch, pieces, solve_all
from porting.notation.name import Value
from porting.notation.rule import Rule, Term
from porting.notation.table import Table
from porting.plan.align import align_table
from porting.plan.config import effective, sizes, sizes_under, source_config
from porting.plan.copies import make_copy
from porting.plan.inferred_source import imagine
from porting.plan.leftovers import differs, made_by, make_recipes
from porting.plan.matching import Matcher
from porting.plan.members import sort_names
from porting.plan.plan import MADE, LeftOut, PlanError
from porting.plan.recipe import Recipe, as_it_is
from porting.sharding.filling import require_same

Side = Literal["left", "right"]


Canonical = tuple[Sequence[Recipe], Mapping[str, str]]
"""How each tensor is made of the checkpoint's, and the checkpoint's that are left out, with the reason."""


def canonical(checkpoint: Checkpoint, table: Table | None, side: Side | None = None) -> Canonical:
    """Find the tensors of a checkpoint under the names that it shares with its port.

    Args:
        side: the table's side that the checkpoint is on; None to see by its names.
    """
    if table is None:
        return [as_it_is(name, info) for name, info in checkpoint.tensors.items()], {}
    side = side or _side(checkpoint, table)
    recipes, left_out = _from_left(checkpoint, table) if side == "left" else _from_right(checkpoint, table)
    if all(recipe.name.startswith(table.prefix) for recipe in recipes):
        recipes = [replace(recipe, name=recipe.name.removeprefix(table.prefix)) for recipe in recipes]
    return recipes, left_out


def _side(checkpoint: Checkpoint, table: Table) -> Side:
    """The side whose names the checkpoint has."""
    left, right = count_named(table, checkpoint, "source"), count_named(table, checkpoint, "target")
    if left == right and any(rule.sources != rule.targets for rule in table.rules):
        found = f"{left} of its {len(checkpoint.tensors)} tensors on either side of '{table.name}'"
        message = f"{checkpoint.location}: the table has names for {found}, so that its layout cannot be told"
        hint = Message("say which: ", Option("side", "left"), " or ", Option("side", "right"))
        raise PlanError(Fault(code=Code.NO_SOURCE, where=table.where, message=message, hint=hint))
    return "left" if left >= right else "right"


def _refused(rule: Rule) -> Fault | None:
    """The fault of a rule that changes values."""
    if rule.exact:
        return None
    message = f"'{rule}' {rule.operations[0].effect}: a checkpoint and its port have no digest in common"
    return Fault(code=Code.IRREVERSIBLE, where=rule.where, message=message, hint="`porting diff` compares the two")


def _from_left(checkpoint: Checkpoint, table: Table) -> Canonical:
    terms = [(rule, term) for rule in table.rules for term in rule.sources]
    matcher = Matcher([(term.key, (rule, term)) for rule, term in terms], table.prefix)
    drops = Matcher(((drop.name, drop) for drop in table.drops), table.prefix)
    known, unsized = sizes(table, checkpoint.config)
    filled = any(None in term.keys() for _, term in terms)  # noqa: SIM118  # Term.keys is ours
    faults = unsized if filled else []  # nothing else needs a size here
    found: dict[str, Recipe] = {}
    left_out: dict[str, str] = {}
    for name, info in checkpoint.tensors.items():
        read = matcher.first(name)
        dropped = drops.first(name) if read is None or read.line[0].rest else None
        if read is None or dropped is not None:
            if dropped is not None:
                left_out[name] = dropped.line.reason
            else:
                hint = nearest(name, [str(term.key) for _, term in terms]) or "list it in [drop] with a reason"
                message = "no rule reads it"
                faults.append(Fault(code=Code.UNREAD_TENSOR, where=name, message=message, hint=hint))
            continue
        rule, term = read.line
        fault = _refused(rule)
        if fault is not None:
            faults += [fault] if fault not in faults else []
            continue
        spelled = term.key.spell(read.bindings)
        if spelled in found:
            message = f"it and another tensor are two spellings of {spelled!r}"
            faults.append(Fault(code=Code.SPELLED_TWICE, where=name, message=message, hint="keep one of them"))
            continue
        try:
            found[spelled] = _with_filling(name, spelled, info, rule, term, read.bindings, known)
        except Mismatch as error:
            message = f"{list(info.shape)}: {error}, in '{rule}'"
            faults.append(Fault(code=Code.SHAPE_MISMATCH, where=name, message=message))
    if faults:
        raise PlanError(faults)
    return list(found.values()), left_out


def _with_filling(
    name: str,
    spelled: str,
    info: TensorInfo,
    rule: Rule,
    term: Term,
    bindings: Mapping[str, Value],
    known: Mapping[str, int],
) -> Recipe:
    """The recipe of a tensor in which the elements that the table leaves out are replaced."""
    plain = replace(as_it_is(name, info), name=spelled)
    if term.axes is None or None not in term.keys():  # noqa: SIM118  # Term.keys is ours
        return plain
    if len(term.axes) != len(info.shape):
        raise Mismatch(f"'{term}' has {len(term.axes)} axes")
    extents = {**sizes_under(known, bindings, rule.inner), **rule.enumerations}
    solve_all(list(zip(term.axes, info.shape, strict=True)), extents)
    boxes = [piece for piece in pieces(term.axes, info.shape, extents) if not piece.dropped]
    copies = tuple(
        make_copy(name, spelled, {index: extents[index] for index in box.strides}, *[(box.offset, box.strides)] * 2)
        for box in boxes
    )
    return replace(plain, copies=copies, fill=rule.fill or 0.0)


def _from_right(checkpoint: Checkpoint, table: Table) -> Canonical:
    config = source_config(table, checkpoint.config)
    known, faults = sizes(table, config)
    written = sort_names(table.rules, checkpoint.tensors, "target", table.target_prefix).terms
    applied = [rule for rule, terms in zip(table.rules, written, strict=True) if any(terms)]
    faults += [fault for fault in map(_refused, applied) if fault is not None]
    if faults:
        raise PlanError(faults)
    shapes = imagine(table, checkpoint.tensors, known)
    alignment = align_table(table, shapes, checkpoint.tensors, known, config)
    named = [(tie.name, f"tied to {tie.with_}") for tie in table.ties]
    named += [(fresh.name, fresh.reason) for fresh in table.fresh]
    lines = made_by(table, alignment.unwritten)
    dtypes = {name: checkpoint.tensors[name].dtype for name in lines}
    made, wrong = make_recipes(
        lines,
        checkpoint.tensors,
        dtypes,
        effective(table, config),
        known,
        table,
        lambda name: as_it_is(name, checkpoint.tensors[name]),
    )
    left_out = {recipe.name: f"[make] says {recipe.made_as}" for recipe in made}
    unequal = [
        LeftOut(name=recipe.name, reason=MADE, equals=recipe.made_as)
        for recipe in made
        if not _is_held(recipe, checkpoint)
    ]
    accounted = Matcher(named, table.target_prefix)
    faults = [*alignment.faults, *wrong, *(differs(left, ()) for left in unequal)]
    for name in (unwritten for unwritten in alignment.unwritten if unwritten not in lines):
        reason = accounted.first(name)
        if reason is not None:
            left_out[name] = reason.line
        else:
            message = "no rule of the table writes it"
            hint = "list it in [ties], [make] or [fresh]"
            faults.append(Fault(code=Code.UNWRITTEN_PARAMETER, where=name, message=message, hint=hint))
    if faults:
        raise PlanError(faults)
    spelled = table.prefix if all(not name.startswith(table.prefix) for name in shapes) else ""
    found: dict[str, Recipe] = {}
    repeated: list[tuple[Recipe, Recipe]] = []
    for step in alignment.steps:
        dtype = checkpoint.tensors[step.targets[0]].dtype
        for name in step.sources:
            copies = tuple(copy.inverse for copy in step.copies if copy.source == name)
            lacking = any(None in term.keys() for term in step.rule.sources)  # noqa: SIM118  # Term.keys is ours
            fill = 0.0 if step.rule.fill is None and lacking else step.rule.fill
            recipe = Recipe(name=spelled + name, shape=shapes[name], work=dtype, dtype=dtype, copies=copies, fill=fill)
            repeated += [(found[name], recipe)] if name in found else []
            found.setdefault(name, recipe)
    require_same(repeated, checkpoint)
    return list(found.values()), left_out


def _is_held(made: Recipe, checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has the content that a table states, so that its digest may leave it out."""
    value = checkpoint.read(made.name)
    if made.equals:
        return same_bits(value, checkpoint.read(made.equals))
    return made.content is not None and made.content.held_by(value, rounded=True)
