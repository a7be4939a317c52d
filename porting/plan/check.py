"""``check``: the static proof.  Headers and a module on the meta device are enough; no weight is read."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from porting.errors import Code, Fault, Message, Option, Wording, alike, nearest
from porting.limits import reading, separately
from porting.notation.rule import MASK_KINDS, Rule
from porting.notation.table import Table
from porting.ops import InexactError
from porting.plan.align import Alignment, Step, align_table
from porting.plan.config import effective, refused, sizes, uncomputable
from porting.plan.fault_grouping import Nearest
from porting.plan.leftovers import leave_out, make_recipes, parted, renew, resolve_ties
from porting.plan.matching import Matcher
from porting.plan.plan import Plan, PlanError
from porting.plan.recipe import Described, Recipe, forward_recipes, made_dtype
from porting.printable import dtype_name
from porting.target import Slot, slots, unsaved_tensors


class Source(Protocol):
    """The description of a checkpoint before its weights are read."""

    @property
    def tensors(self) -> Mapping[str, Described]:
        """Shape and dtype of each tensor, by its name on disk."""

    @property
    def config(self) -> Mapping[str, object]:
        """The contents of ``config.json``."""

    @property
    def shared(self) -> Sequence[frozenset[str]]:
        """Groups of names that share their storage on disk, as far as the format can say so."""


@runtime_checkable
class OnDisk(Protocol):
    """A source with files on this machine, which may take the time that their bytes are worth."""

    def allow_time(self) -> None:
        """Allow it, in the budget that is open."""


def check(
    table: Table,
    source: Source,
    target: nn.Module | Mapping[str, Slot],
    *,
    dtype: torch.dtype | None = None,
    fresh: bool = False,
) -> Plan:
    """Hold a table against a checkpoint and a module.

    Args:
        table: the mapping.
        source: the checkpoint; only names, shapes, dtypes and the config are looked at.
        target: the module, which may be on the meta device; or the places of one that nobody built.
        dtype: what floating-point tensors are cast to; None allows no cast.
        fresh: allow the parameters that the table lists in [fresh] to be missing in the checkpoint.

    Returns:
        The plan: every source tensor is read once or left out with a reason, every target tensor is written once.

    Raises:
        PlanError: it does not fit; carries all faults.

    >>> import porting
    >>> source = porting.embedded_checkpoint()
    >>> checkpoint, module = porting.open_checkpoint(source), porting.load(source)
    >>> table = porting.provenance(module).plan.table
    >>> print(check(table, checkpoint, module).summary)
    62 of 62 tensors fill 62 of 62 places
    """
    with reading(table.where):
        if isinstance(source, OnDisk):
            source.allow_time()
        return _checked(table, source, target, dtype, fresh)


def _checked(
    table: Table, source: Source, target: nn.Module | Mapping[str, Slot], dtype: torch.dtype | None, fresh: bool
) -> Plan:
    places = slots(target) if isinstance(target, nn.Module) else target
    known, faults = sizes(table, source.config)
    faults = [*refused(table, source.config), *faults]
    with separately():  # a search makes thousands of plans
        alignment = align_table(table, source.tensors, places, known, source.config)
        if not alignment.steps and _is_of_another(table, source.tensors):
            raise PlanError([*faults, _of_another(table, source.tensors)])
        near = Nearest()
        searched = "the checkpoint and nothing in the module" if isinstance(target, nn.Module) else "what is converted"
        idle = _idle(table, alignment, near, searched)  # told first: what they meant to fill is missing because of them
        unsaved = dict(unsaved_tensors(target)) if alignment.unplaced and isinstance(target, nn.Module) else {}
        left_out, lost = leave_out(table, alignment, source.tensors, source.config, near, unsaved)
        tied, unshared = resolve_ties(table, alignment, places)
        unfilled = renew(table, alignment, places, tied, source.config, near, allowed=fresh)
    faults += [*alignment.faults, *alignment.gaps, *idle, *lost, *unshared, *unfilled.faults]
    faults += _dtypes(alignment, source.tensors, places, dtype)
    faults += _unfilled(alignment)
    values = effective(table, source.config)
    unusable = [*uncomputable((step.rule for step in alignment.steps), values)]
    faults += unusable or _inexact(alignment, source.tensors, values, dtype)
    working = _working(alignment, source.tensors)
    dtypes = {name: _made_in(places[name], dtype, working) for name in unfilled.made}

    def recipe_of(name: str) -> Recipe | None:
        step = next((one for one in alignment.steps if name in one.targets), None)
        if step is None:
            return None
        arithmetic = step.rule.arithmetic(values)
        recipes = forward_recipes(step, source.tensors, places, arithmetic, dtype)
        return next(one for one in recipes if one.name == name)

    made, impossible = make_recipes(unfilled.made, places, dtypes, values, known, table, recipe_of)
    faults += impossible
    if faults:
        raise PlanError(alike(faults))
    return Plan(
        table=table,
        config=values,
        sources=source.tensors,
        targets=places,
        steps=alignment.steps,
        left_out=left_out,
        fresh=unfilled.new,
        computed=unfilled.computed,
        made=made,
        tied=tied,
        dtype=dtype,
        warnings=tuple(alike([*_approximate(table), *parted(source.shared, alignment, places)])),
    )


MANY = 6
"""The number of rules and of tensors that do not meet, from which on the table is for another checkpoint."""


def _is_of_another(table: Table, tensors: Collection[str]) -> bool:
    """Whether a table that reads nothing is of another checkpoint: no name is its own with something in front."""
    if min(len(table.rules), len(tensors)) < MANY:
        return False
    read = [str(one.name) for rule in table.rules for one in rule.sources if "{" not in str(one.name)]
    return not any(name.endswith(own) or own.endswith(f".{name}") for name in tensors for own in read)


def _of_another(table: Table, tensors: Iterable[str]) -> Fault:
    """The fault of a table that reads nothing of a checkpoint: one, in place of one for each rule and each tensor."""
    names = list(tensors)
    read = table.rules[0].sources[0].name if table.rules[0].sources else table.rules[0]
    message = f"none of its {len(table.rules)} rules reads any of the checkpoint's {len(names)} tensors"
    hint = (
        f"the first rule reads {str(read)!r}, the first tensor is {names[0]!r}: is this the checkpoint that it is for?"
    )
    return Fault(code=Code.NO_SOURCE, where=table.where, message=message, hint=hint)


def _working(alignment: Alignment, sources: Mapping[str, Described]) -> torch.dtype | None:
    """The floating-point dtype that most targets get; None where none gets any."""
    read = (made_dtype(step, sources) for step in alignment.steps for _ in step.targets)
    counts = Counter(one for one in read if one.is_floating_point)
    return counts.most_common(1)[0][0] if counts else None


def _made_in(slot: Slot, cast: torch.dtype | None, working: torch.dtype | None) -> torch.dtype:
    """The dtype of what [make] gives: the one that was asked for; else a module with values keeps its own."""
    if not slot.dtype.is_floating_point:
        return slot.dtype
    return cast or (slot.dtype if slot.built else working) or slot.dtype


def _approximate(table: Table) -> Iterator[Fault]:
    """A warning when the table itself says that it is not exact."""
    if table.approximate is not None:
        message = f"'{table.name}' is approximate by intent: {table.approximate.reason}"
        hint = (
            f"its activations may be off by {table.approximate.within:.0e} of their scale: porting verify measures it"
        )
        yield Fault(code=Code.APPROXIMATE, where=table.where, message=message, hint=hint)


def _idle(table: Table, alignment: Alignment, near: Nearest, searched: str) -> list[Fault]:
    """A fault for each rule that matches nothing in what was searched."""
    free = [*alignment.unread, *(name for lone in alignment.unplaced for name in lone.names)]
    modules: dict[str, list[str]] = {}
    for name in free:
        module, _, leaf = name.rpartition(".")
        for spelled in {module, module.removeprefix(table.prefix)}:
            modules.setdefault(spelled, []).append(leaf)
    faults = []
    for rule in alignment.idle:
        if not rule.optional:
            message = f"'{rule}' matches nothing in {searched}"
            hint = _leaves(rule, modules) if near.left else ""
            hint = hint or near(str(rule.sources[0].key), free)
            if not hint and len(rule.sources) == 1 and not rule.where.startswith(f"{table.where}:"):  # an inherited one
                hint = f'in {table.where}, "{rule.sources[0]}" = false takes it away'
            hint = hint or "take it away, or move it to [optional] if not every checkpoint has it"
            faults.append(Fault(code=Code.RULE_MATCHES_NOTHING, where=rule.where, message=message, hint=hint))
    return faults


def _leaves(rule: Rule, modules: Mapping[str, Sequence[str]]) -> str:
    """The rule with the tensors of the modules that it names, where it names modules."""
    if len(rule.sources) != 1 or len(rule.targets) != 1:
        return ""
    theirs, ours = rule.sources[0].key, rule.targets[0].key
    leaves = next((leaves for module, leaves in modules.items() if theirs.read(module) is not None), ())
    if not leaves:
        return ""
    index = next(letter for letter in "wxyz" if letter not in theirs.indices)
    ending = leaves[0] if len(leaves) == 1 else f"{{{index}:{','.join(leaves)}}}"
    return f'a rule names tensors, and this is a module: write "{theirs}.{ending}" = "{ours}.{ending}"'


def _dtypes(
    alignment: Alignment, sources: Mapping[str, Described], places: Mapping[str, Slot], dtype: torch.dtype | None
) -> Iterator[Fault]:
    """Changes of dtype that nobody asked for.

    A module that has values keeps its dtype.  One on the meta device has floating-point dtypes in name only and takes
    the checkpoint's; what it says of integers and booleans holds.
    """
    for step in alignment.steps:
        found = {sources[name].dtype for name in step.sources}
        if step.layout is not None:  # what it computes has the dtype of the first source, unless the rule says another
            found = {made_dtype(step, sources)}
        theirs = _spell(found)
        for name in step.targets:
            slot = places[name]
            ours = _spell({slot.dtype})
            pair = f"{step.sources[0]!r} -> {name!r}"
            floating = {one.is_floating_point for one in (*found, slot.dtype)}
            if len(found) > 1 and dtype is None:
                message = f"{pair}: the sources are {theirs}, and one tensor has one dtype"
                hint: str = Message("say which: ", Option("dtype"))
            elif len(floating) > 1:
                message = f"{pair}: {theirs} would become {ours}; integers and floats are never cast into each other"
                hint = "a quantised tensor needs its scales; a mask or a table of positions is not a weight: drop it"
            elif floating == {False} and found != {slot.dtype}:
                message = f"{pair}: the checkpoint has {theirs}, the module {ours}"
                hint = f"give the module's buffer the dtype {theirs}, or drop the tensor"
            elif slot.built and dtype is None and found != {slot.dtype}:
                message = f"{pair}: the checkpoint has {theirs}, the module {ours}"
                cast = Wording(python=f"dtype=torch.{ours}, or cast the module first", command=f"--dtype {ours}")
                hint = Message("declare the cast: ", cast)
            else:
                continue
            yield Fault(code=Code.DTYPE_CHANGE, where=step.rule.where, message=message, hint=hint)


def _inexact(
    alignment: Alignment, sources: Mapping[str, Described], values: Mapping[str, object], dtype: torch.dtype | None
) -> Iterator[Fault]:
    """Rules whose result has a dtype that does not hold what they compute, as far as dtypes say so."""
    seen = set()
    for step in alignment.steps:
        key = (id(step.rule), *(sources[name].dtype for name in step.sources))
        if step.rule.operations and key not in seen:
            seen.add(key)
            message, hint = _inexact_step(step, sources, values, dtype)
            if message:
                pair = f"{step.sources[0]!r} -> {step.targets[0]!r}"
                yield Fault(code=Code.DTYPE_CHANGE, where=step.rule.where, message=f"{pair}: {message}", hint=hint)


def _inexact_step(
    step: Step, sources: Mapping[str, Described], values: Mapping[str, object], dtype: torch.dtype | None
) -> tuple[str, str]:
    """The reason why the dtype of a step's target does not hold what is computed, and what to do; empty if it may."""
    made, first = made_dtype(step, sources), sources[step.sources[0]].dtype
    rule, arithmetic = step.rule, step.rule.arithmetic(values)
    if rule.dtype and dtype is None and made != getattr(torch, rule.dtype):
        message = f"dtype = {rule.dtype!r} is for a quantised first source, and this one is {dtype_name(first)}"
        return message, Message("leave it out, or cast all tensors: ", Option("dtype", rule.dtype))
    try:
        if step.layout is None or rule.formula is None:
            arithmetic.wide(made)
            return "", ""
        applied = step.layout.forward(rule, arithmetic.numbers, made, lambda name: sources[name].dtype)
        applied.wide  # noqa: B018  # it raises
    except InexactError as error:
        return str(error), error.hint
    whole = {
        one.name: 8 * kind.itemsize
        for one, kind in zip(applied.operands, applied.dtypes, strict=True)
        if not kind.is_floating_point
    }
    message = rule.formula.narrow_source(whole)
    return message, "give the bits that each number has" if message else ""


def _spell(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(dtype_name(one) for one in dtypes))


def _unfilled(alignment: Alignment) -> Iterator[Fault]:
    """Targets with parts that no source fills and for which the rule gives no value."""
    for rule in {id(step.rule): step.rule for step in alignment.steps}.values():
        if rule.formula is None and rule.fill is None and any(None in term.keys() for term in rule.targets):  # noqa: SIM118  # Term.keys is ours
            message = f"'{rule}' has a part on the right that no source fills"
            hint = "write it as a [[rule]] with fill = 0.0, or another value"
            yield Fault(code=Code.IRREVERSIBLE, where=rule.where, message=message, hint=hint)


INSIDE = ("scores", "probabilities")
"""The values that a probe can name inside of an attention, besides a module's outputs."""


def doubtful(table: Table, sources: Collection[str], module: nn.Module) -> Iterator[Fault]:
    """Entries of [arguments], [inputs] and [probes] that name nothing in the module: warnings, loading needs none.

    Args:
        sources: the checkpoint's tensors, which show what parts the reference will have.
    """
    parameters = inspect.signature(module.forward).parameters
    taken = [name for name, one in parameters.items() if one.kind is not one.VAR_KEYWORD]
    for name in table.arguments:
        if name not in taken and len(taken) == len(parameters):
            message = f"[arguments] gives {name!r}, and the module's forward takes {', '.join(taken)}"
            yield Fault(code=Code.NO_INPUTS, where=table.where, message=message, hint=nearest(name, taken))
    for rule in table.inputs:
        name, kind = str(rule.targets[0].name), rule.targets[0].output
        if kind not in ("", *MASK_KINDS):
            message = f"an input can be given as {', '.join(MASK_KINDS)}, not as {kind!r}"
            yield Fault(code=Code.NO_INPUTS, where=rule.where, message=message, hint=nearest(kind, MASK_KINDS))
        if not name.isdigit() and name.partition(".")[0] not in taken and len(taken) == len(parameters):
            message = f"[inputs] gives {name!r}, and the module's forward takes {', '.join(taken)}"
            yield Fault(code=Code.NO_INPUTS, where=rule.where, message=message, hint=nearest(name, taken))
    paths = [path for path, _ in module.named_modules(remove_duplicate=False)]
    for rule in table.probes:
        yield from _doubtful_probe(rule, table, sources, paths)


def _doubtful_probe(rule: Rule, table: Table, sources: Collection[str], paths: Collection[str]) -> Iterator[Fault]:
    for term in rule.targets:
        near = nearest(term.output, INSIDE)
        if near and term.output not in INSIDE:
            message = f"the probe '{rule}' names the output {term.output!r}"
            yield Fault(code=Code.NO_PROBES, where=rule.where, message=message, hint=near)
    suffix = f" -> {rule.targets[0].output}" if rule.targets[0].output else ""
    matcher = Matcher(((term.key, term) for term in rule.targets), table.target_prefix)
    if any(matcher.read((path or ".") + suffix) for path in paths):
        return
    suffix = f" -> {rule.sources[0].output}" if rule.sources[0].output else ""
    matcher = Matcher(((term.key, term) for term in rule.sources), table.prefix)
    parts = {".".join(name.split(".")[:end]) for name in sources for end in range(1, name.count(".") + 1)}
    if not any(matcher.read(part + suffix) for part in parts):
        return  # the checkpoint has no such part either: a head that others have
    pattern = rule.targets[0].name
    hint = nearest(pattern.spell(dict.fromkeys(pattern.indices, 0)), [path for path in paths if path])
    message = f"the module has no part '{pattern}' of the probe '{rule}'"
    yield Fault(code=Code.NO_PROBES, where=rule.where, message=message, hint=hint or "take the probe out of [probes]")
