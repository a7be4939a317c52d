"""The origin of an export: the checkpoint that a module was loaded from, a given one, or an inferred one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from porting.checkpoint import Checkpoint
from porting.errors import Code, Fault, Message, Option, Wording
from porting.loading import choose_architecture, prove_left_out, provenance, recognise_architecture
from porting.notation.faults import TableError
from porting.notation.rule import Rule
from porting.notation.table import Table, read_table
from porting.plan.align import align_table
from porting.plan.check import check
from porting.plan.config import sizes
from porting.plan.fault_grouping import group_alike, listed
from porting.plan.inferred_source import a_like, imagine
from porting.plan.matching import Matcher
from porting.plan.plan import LeftOut, Plan, PlanError
from porting.plan.recipe import Described, TensorSpec
from porting.tables import find_table, shipped
from porting.target import slots

ANY_DTYPE = torch.float32
"""The dtype for :func:`check` if the checkpoint has none that binds the module: it declares a cast."""


@dataclass(frozen=True, kw_only=True)
class PlannedCheckpoint:
    """The checkpoint to be written, inferred from a module."""

    tensors: Mapping[str, Described]
    config: Mapping[str, object]
    shared: tuple[frozenset[str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The checkpoint that an export follows.

    Attributes:
        plan: the plan of the checkpoint to be written, for the module; it has no ``fresh``.
        checkpoint: the one that is followed; None when there is none.
        architecture: what the result is called; empty when nothing says.
        changed: whether the result is another architecture, or has tensors that the followed checkpoint has not.
        new: the names of those tensors.
        left_out: what of the followed checkpoint the module does not hold.
        unnamed: new parameters of the module that no rule gives a name in a checkpoint: they are not written.
    """

    plan: Plan
    checkpoint: Checkpoint | None = None
    architecture: str = ""
    changed: bool = False
    new: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    unnamed: tuple[str, ...] = ()


def table_for(module: nn.Module, table: Table | str | Path | None, like: Checkpoint | None) -> Table:
    """Find the table: the given one, the one that the module was loaded through, or one that names its class.

    Args:
        table: the table that the user gave; None to find it.
        like: the checkpoint to follow; None for none.
    """
    if table is not None:
        return find_table(table, {})
    record = provenance(module)
    if record is not None:
        return record.plan.table
    if like is not None:
        return find_table(None, like.config)
    tables = [read_table(path) for path in shipped()]
    found = [table for table in tables if recognise_architecture(table, module) is not None]
    if len(found) == 1:
        return found[0]
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    choices = f"these name it: {', '.join(table.name for table in found)}" if found else "none names it"
    message = f"load() did not fill this {name}, and of the bundled tables {choices}"
    raise TableError(Fault(code=Code.NO_TABLE, message=message, hint=Message("pass ", Option("table"))))


def follow(
    module: nn.Module, table: Table, checkpoint: Checkpoint, architecture: str | None, *, fresh: bool = False
) -> Origin:
    """Follow a checkpoint: use its names, and its values for what the module does not hold.

    Args:
        architecture: what the result is to be called; None to go by the module's class and by what is written.
        fresh: leave new parameters out that no rule gives a name in a checkpoint.
    """
    record = provenance(module)
    loaded = record is not None and record.checkpoint is checkpoint
    if (
        record is not None
        and loaded
        and record.plan.table.digest == table.digest
        and _has_loaded_tensors(module, record.plan)
    ):
        plan = record.plan
    else:
        plan = _check_against(module, table, checkpoint, loaded=loaded)
    left_out = plan.left_out
    new: tuple[str, ...] = ()
    unnamed = require_named(table, plan.fresh, fresh=fresh)
    if len(plan.fresh) > len(unnamed):
        read = {name: checkpoint.tensors[name] for step in plan.steps for name in step.sources}
        added = [name for name in plan.fresh if name not in unnamed]
        more = respelled(_infer_sources(table, module, added, plan.config), table, read)
        new = tuple(more)
        whole = PlannedCheckpoint(tensors={**read, **more}, config=checkpoint.config)
        plan = check(table, whole, module, dtype=ANY_DTYPE, fresh=bool(unnamed))
    name, other = _architecture(module, table, checkpoint, architecture, plan.sources if new else None)
    return Origin(
        plan=plan,
        checkpoint=checkpoint,
        architecture=name,
        changed=bool(new) or other,
        new=new,
        left_out=left_out,
        unnamed=unnamed,
    )


def require_named(table: Table, names: Iterable[str], *, fresh: bool) -> tuple[str, ...]:
    """Require that every new tensor of the module has a rule that gives it a name in a checkpoint."""
    matcher = Matcher(((term.key, rule) for rule in table.rules for term in rule.targets), table.target_prefix)
    found = tuple(name for name in names if not matcher.read(name))
    if found and not fresh:
        what = "of the module is new, and no rule says what a checkpoint calls it"
        hint = Message("add a rule for it, or leave it out: ", Option("fresh", True))
        raise PlanError(
            Fault(code=Code.FRESH_NOT_ALLOWED, where=table.where, message=f"{listed(group)} {what}", hint=hint)
            for group in group_alike(found)
        )
    return found


def _architecture(
    module: nn.Module,
    table: Table,
    checkpoint: Checkpoint,
    architecture: str | None,
    written: Mapping[str, Described] | None,
) -> tuple[str, bool]:
    """The architecture of an export that follows a checkpoint, and whether it is another than the checkpoint's.

    Asked for, or known by the module's class; else what the checkpoint is; else, when tensors are ``written`` that the
    checkpoint has not, what these show.
    """
    declared = checkpoint.config.get("architectures")
    declared = declared if isinstance(declared, list) else []
    if not table.architectures:
        return architecture or "", bool(architecture and declared) and architecture not in declared
    fitting = choose_architecture(table, checkpoint.tensors, checkpoint.config)
    kind = recognise_architecture(table, module)
    if architecture is not None:
        kind = choose_architecture(table, (), {}, architecture)
    elif kind is None:
        record = provenance(module)
        loaded = record.architecture if record is not None and record.checkpoint is checkpoint else None
        kind = loaded or fitting
        if written is not None:
            kind = choose_architecture(table, written, checkpoint.config)
    return kind.name, kind != fitting


def infer_origin(module: nn.Module, table: Table, config: Mapping[str, object], architecture: str | None) -> Origin:
    """Follow no checkpoint: use the table's names, in their first spelling.

    Args:
        architecture: what the result is to be called; None to go by the module's class and by what is written.
    """
    tensors = _infer_sources(table, module, slots(module), config)
    plan = check(table, PlannedCheckpoint(tensors=tensors, config=config), module, dtype=ANY_DTYPE)
    kind = recognise_architecture(table, module) if architecture is None else None
    if kind is None and table.architectures:
        kind = choose_architecture(table, tensors, {}, architecture)
    return Origin(plan=plan, architecture=kind.name if kind is not None else architecture or "")


def _check_against(module: nn.Module, table: Table, checkpoint: Checkpoint, *, loaded: bool) -> Plan:
    try:
        plan = check(table, checkpoint, module, dtype=ANY_DTYPE, fresh=True)
    except PlanError as error:
        origin = "the checkpoint that it was loaded from" if loaded else "the checkpoint that it is to follow"
        message = f"the module does not fit {origin}, {checkpoint.location}"
        hint = Message(
            Wording(
                python="anew=True follows none: the table's own names, and a config of the module's",
                command="take the checkpoint that it was loaded from, as it was",
            )
        )
        raise PlanError((*error.faults, Fault(code=Code.MODULE_CHANGED, message=message, hint=hint))) from error
    prove_left_out(plan, checkpoint)
    return plan


def _has_loaded_tensors(module: nn.Module, plan: Plan) -> bool:
    """Whether the module still has the tensors that it was loaded with."""
    now = slots(module)
    same = {name: slot.shape for name, slot in now.items()} == {
        name: target.shape for name, target in plan.targets.items()
    }
    return same and all(now[name].same_as == now[other].same_as for name, other in plan.tied.items())


def _infer_sources(
    table: Table, module: nn.Module, names: Iterable[str], config: Mapping[str, object]
) -> dict[str, Described]:
    """The checkpoint's tensors that the module's tensors of these names are written to."""
    places = slots(module)
    wanted = {name: places[name] for name in names}
    known, faults = sizes(table, config)
    if faults:
        raise PlanError(faults)
    shapes = imagine(table, wanted, known)
    alignment = align_table(table, shapes, wanted, known)
    lacking = {step.rule.where: step.rule for step in alignment.steps if _lacks_values(step.rule)}
    if lacking:
        raise PlanError(_irreversible(rule) for rule in lacking.values())
    dtypes = {name: places[step.targets[0]].dtype for step in alignment.steps for name in step.sources}
    return {name: TensorSpec(shape=shape, dtype=dtypes.get(name, ANY_DTYPE)) for name, shape in shapes.items()}


def _lacks_values(rule: Rule) -> bool:
    if rule.formula is not None:
        return not rule.back
    return rule.fill is None and any(None in term.keys() for term in rule.sources)  # noqa: SIM118  # Term.keys is ours


def _irreversible(rule: Rule) -> Fault:
    message = f"'{rule}' has a part on the left that no tensor of the module holds"
    return Fault(code=Code.IRREVERSIBLE, where=rule.where, message=message, hint="give the rule a fill, or " + a_like())


def respelled(names: Mapping[str, Described], table: Table, others: Iterable[str]) -> dict[str, Described]:
    """Add the table's prefix to names, or remove it, as other names have it."""
    matcher = Matcher(((term.key, rule) for rule in table.rules for term in rule.sources), table.prefix)
    others = list(others)
    bare = bool(others) and not any(name.startswith(table.prefix) for name in others)
    found = {}
    for name, described in names.items():
        stem = name.removeprefix(table.prefix)
        takes_prefix = matcher.read(table.prefix + stem)
        found[name if not takes_prefix else stem if bare else table.prefix + stem] = described
    return found
