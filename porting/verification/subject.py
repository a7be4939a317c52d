"""The module that is verified: a separate one that may be changed, so that the user's is left as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from porting.checkpoint import Checkpoint
from porting.duplicate import duplicate
from porting.errors import Code, Fault, Message, Option, PortingWarning, VerifyError
from porting.loading import (
    Into,
    fit,
    initialised,
    load,
    maker,
    prove_left_out,
    provenance,
    same_bits,
)
from porting.notation.table import Architecture, Table
from porting.plan.align import Step, align
from porting.plan.check import check
from porting.plan.move import compute_whole, forward
from porting.plan.plan import Plan
from porting.printable import text_of
from porting.target import assign, in_eval_mode, named_tensors, plain_tensors, unwrapped, with_arguments
from porting.verification.reference import reference_class


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A port with its weights.

    Attributes:
        module: the module, in eval mode, in the checkpoint's dtype.
        plan: what the table loads into it.
        reference: the architecture that transformers runs, as ``config.json`` spells it.
        told: what should be known of the choice of that architecture, in words.
    """

    module: nn.Module
    plan: Plan
    reference: str
    told: tuple[str, ...] = ()


def prepare(
    checkpoint: Checkpoint,
    into: Into,
    table: Table,
    architecture: str | None,
    *,
    loaded: bool,
    fresh: bool,
    trust: bool,
    reference: str = "",
) -> Subject:
    """The module to run: ``into`` as it is when ``loaded``, else what :func:`porting.load` makes of a copy of it.

    Raises:
        PlanError, TargetError: as :func:`porting.load`.
        VerifyError: ``into`` cannot be copied, or nothing says what the reference is.
    """
    named = architecture if table.architectures else None
    into = unwrapped(into) if isinstance(into, nn.Module) else into
    if loaded:
        if not isinstance(into, nn.Module):
            message = "a module that holds its weights was expected, and what builds one was given"
            raise VerifyError(Fault(code=Code.BAD_TARGET, message=message))
        port, (_, kind) = _copied(into).to("cpu"), maker(table, checkpoint, into, named, trust=trust)
        plan = check(table, checkpoint, port, dtype=_cast_of(checkpoint, port), fresh=fresh)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PortingWarning)  # the report says it
            target = _emptied(into, table, checkpoint, fresh=fresh) if isinstance(into, nn.Module) else into
            port = load(checkpoint, target, table, architecture=named, fresh=fresh, trust=trust)
        record = provenance(port)
        if record is None:  # load() keeps it for as long as the module lives
            raise VerifyError(Fault(code=Code.BAD_TARGET, message="the module lost its provenance while it was loaded"))
        plan, kind = record.plan, record.architecture
    module = with_arguments(in_eval_mode(port), table.arguments, table.input_names, table.row_inputs)
    if reference:  # somebody said what it is compared with
        return Subject(module=module, plan=plan, reference=reference)
    return _against(module, plan, checkpoint, kind, architecture)


def prepare_lazily(
    checkpoint: Checkpoint, into: Into, table: Table, architecture: str | None, *, fresh: bool, trust: bool
) -> Subject:
    """The same without the weights that the checkpoint gives: they stay on the meta device.

    Raises:
        PlanError, TargetError: as :func:`porting.load`.
        VerifyError: nothing says what the reference is, or there are parameters that the checkpoint does not give.
    """
    named = architecture if table.architectures else None
    fitted = fit(checkpoint, into, table, architecture=named, fresh=fresh, trust=trust)
    if fitted.plan.fresh:
        message = f"{len(fitted.plan.fresh)} parameters are new, and a streamed run has no place to keep them"
        hint = Message("verify it without ", Option("stream", True))
        raise VerifyError(Fault(code=Code.BAD_TARGET, message=message, hint=hint))
    prove_left_out(fitted.plan, checkpoint)
    assign(fitted.module, initialised(fitted.plan, fitted.make, {}))
    module = with_arguments(fitted.module, table.arguments, table.input_names, table.row_inputs)
    return _against(module, fitted.plan, checkpoint, fitted.architecture, architecture)


def refuse_beside_streaming(*, loaded: bool, gradients: bool, autocast: bool, into: Into, reference: bool) -> None:
    """Refuse what needs a whole model in memory.

    Raises:
        VerifyError: something was asked for that a streamed run cannot do.
    """
    wrong = []
    if loaded or isinstance(into, nn.Module):
        wrong.append("a module that is built already: pass its class, or a function that builds it")
    if gradients:
        wrong.append("gradients and training: they keep every layer's weights")
    if autocast:
        wrong.append("autocast: compare it on a model of the same class with fewer layers")
    if reference:
        wrong.append("another reference than the checkpoint in transformers")
    if wrong:
        raise VerifyError(
            Fault(code=Code.BAD_TARGET, message=Message(Option("stream", True), f" cannot take {one}")) for one in wrong
        )


def _against(
    module: nn.Module, plan: Plan, checkpoint: Checkpoint, kind: Architecture | None, architecture: str | None
) -> Subject:
    """The port, beside the class that transformers runs: the one that its table names, or that the checkpoint holds."""
    if kind is not None:
        return Subject(module=module, plan=plan, reference=kind.name)
    found = reference_class(checkpoint, architecture)
    read = {name for step in plan.steps for name in step.sources}
    return Subject(module=module, plan=plan, reference=found.name, told=tuple(found.warnings(read)))


def _copied(module: nn.Module, memo: dict[int, object] | None = None) -> nn.Module:
    try:
        return duplicate(module, memo)
    except Exception as error:  # a module may hold anything
        message = f"the module cannot be copied: {type(error).__name__}: {text_of(error)}"
        hint = "pass a function that builds it, or keep in it only what can be copied"
        raise VerifyError(Fault(code=Code.BAD_TARGET, message=message, hint=hint)) from error


def _emptied(module: nn.Module, table: Table, checkpoint: Checkpoint, *, fresh: bool) -> nn.Module:
    """A copy without the values of what the checkpoint fills: these are not needed and may be large."""
    memo: dict[int, object] = {}
    for _, tensor in named_tensors(module):
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    copied = _copied(module, memo)
    plan = check(table, checkpoint, copied, fresh=fresh)
    assign(copied, {name: one.detach() for name, one in named_tensors(module) if name in (*plan.fresh, *plan.computed)})
    return copied


def cast(module: nn.Module, dtype: torch.dtype, like: nn.Module | None = None) -> nn.Module:
    """A copy on the CPU whose floating-point parameters and buffers are of ``dtype``.

    Parameters that are of it already are shared with the original; nothing that is run here writes to them.

    Args:
        like: a module of that dtype: the copy shares its parameters that hold the same numbers, to save memory.

    Raises:
        VerifyError: it cannot be copied.
    """
    memo: dict[int, object] = {}
    known = {} if like is None else {_outline(one): one.detach() for one in like.parameters() if one.dtype == dtype}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            value = tensor.detach().to("cpu", dtype)
            if isinstance(tensor, nn.Parameter) and known:
                equal = known.get(_outline(value))
                value = equal if equal is not None and torch.equal(equal, value) else value
            same = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value.clone()
            memo[id(tensor)] = same
    if dtype == torch.float64:  # which changes no number; a cache or a table in an attribute has no other way there
        for _, one in plain_tensors(module):
            if one.dtype == torch.float32 and not one.is_meta:
                value = one.detach().to("cpu", dtype)
                memo[id(one)] = nn.Parameter(value, one.requires_grad) if isinstance(one, nn.Parameter) else value
    return in_eval_mode(_copied(module, memo))


OUTLINE = 8
"""How many of a tensor's first numbers are looked at before all of them are."""


def _outline(tensor: Tensor) -> tuple[object, ...]:
    """A quick fingerprint of a tensor, the same for equal tensors: the shape and the first numbers."""
    return (*tensor.shape, *tensor.detach().flatten()[:OUTLINE].tolist())


def exactly(subject: Subject, checkpoint: Checkpoint) -> nn.Module:
    """The port in float64, and in it, computed in float64, what the table computes.

    When such a weight was loaded it was rounded to the checkpoint's dtype.  That is rounding and not meaning: the port
    in its working dtype has it and is measured with it.  A weight that is no longer what was loaded is taken as it is.

    Raises:
        VerifyError: the module cannot be copied.
    """
    plan, mine = subject.plan, dict(named_tensors(subject.module))
    module = cast(subject.module, torch.float64)
    for step in plan.steps:
        if step.rule.exact:
            continue
        read = {name: checkpoint.read(name) for name in step.sources}
        rounded = read if plan.dtype is None else {name: one.to(plan.dtype) for name, one in read.items()}
        loaded = dict(forward(step, plan.targets, rounded.__getitem__, plan.arithmetic(step)))
        if all(same_bits(value, mine[name].cpu()) for name, value in loaded.items()):
            double = {name: one.double() for name, one in read.items()}
            assign(module, dict(forward(step, plan.targets, double.__getitem__, plan.arithmetic(step))))
    for recipe in plan.made:
        if recipe.equals:
            if same_bits(mine[recipe.name], mine[recipe.equals]):
                assign(module, {recipe.name: dict(named_tensors(module))[recipe.equals].detach().clone()})
        elif recipe.work.is_floating_point and same_bits(
            compute_whole(recipe, checkpoint.read), mine[recipe.name].cpu()
        ):
            assign(module, {recipe.name: compute_whole(recipe.in_dtype(torch.float64), checkpoint.read)})
    return module


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """A dtype that holds every floating-point value of the checkpoint."""
    return widest(info.dtype for info in checkpoint.tensors.values())


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """A dtype that holds the values of all floating-point dtypes among these; float64 without any."""
    floating = {dtype for dtype in dtypes if dtype.is_floating_point}
    return reduce(torch.promote_types, floating) if floating else torch.float64


def _cast_of(checkpoint: Checkpoint, module: nn.Module) -> torch.dtype | None:
    """The dtype that the module's owner cast it to after it was loaded, None when it has the checkpoint's."""
    ours = {tensor.dtype for _, tensor in named_tensors(module) if tensor.is_floating_point()}
    theirs = {info.dtype for info in checkpoint.tensors.values() if info.dtype.is_floating_point}
    return next(iter(ours)) if len(ours) == 1 and ours != theirs else None


def renew(subject: Subject, reference: nn.Module) -> tuple[str, ...]:
    """Give the port's new parameters the values that the reference's own initialisation drew, so that they compare.

    Both then hold what fits into the port's dtype.

    Returns:
        The new parameters that the reference does not have.

    Raises:
        VerifyError: one that the reference ties to what the checkpoint fills: what :func:`porting.load` leaves there is
            random, and not the reference's.
    """
    plan, theirs = subject.plan, dict(named_tensors(reference))
    if not plan.fresh:
        return ()
    ours = dict(named_tensors(subject.module))
    table = plan.table
    alignment = align(
        table.rules,
        {name: tuple(tensor.shape) for name, tensor in theirs.items()},
        {name: tuple(tensor.shape) for name, tensor in ours.items()},
        prefix=table.prefix,
        target_prefix=table.target_prefix,
    )
    read: Callable[[str], Tensor] = lambda name: theirs[name].detach()  # noqa: E731  # an adapter of one line
    values: dict[str, Tensor] = {}
    homes = {name.removeprefix(table.prefix): step.targets[0] for step in plan.steps for name in step.sources}
    for step in alignment.steps:
        if set(step.targets) <= set(plan.fresh):
            _refuse_untied(step, theirs, {name: homes.get(name.removeprefix(table.prefix), "") for name in theirs})
            for name, value in forward(step, plan.targets, read, plan.arithmetic(step)):
                values[name] = value.to(ours[name].dtype)
            for name in step.sources:
                theirs[name].data.copy_(theirs[name].data.to(ours[step.targets[0]].dtype))
    assign(subject.module, values)
    return tuple(name for name in plan.fresh if name not in values)


def _refuse_untied(step: Step, theirs: Mapping[str, Tensor], homes: Mapping[str, str]) -> None:
    """Refuse new parameters that are, in the reference, another name of what the checkpoint fills.

    Args:
        step: it would write them.
        homes: the reference's name -> the port's parameter that the checkpoint fills from it; empty for none.
    """
    for source, target in zip(step.sources, step.targets, strict=False):
        same = next((name for name, one in theirs.items() if one is theirs[source] and homes[name]), None)
        if same is not None:
            message = f"{target!r} is new and random, and the reference's {source!r} is {same!r}, one tensor"
            hint = (
                f"tie them in the module: {target} = {homes[same]}; then list it in [ties]; or make it a copy: [make] "
                f'"{target}" = "equals {homes[same]}"'
            )
            raise VerifyError(Fault(code=Code.TIE_MISMATCH, where=step.rule.where, message=message, hint=hint))


def warned(subject: Subject, random: Collection[str] = ()) -> list[str]:
    """Warnings about what was allowed.

    Args:
        random: its new parameters that the reference does not have.
    """
    plan = subject.plan
    found = [*subject.told, *map(str, plan.warnings)]
    names = [name for name in plan.fresh if name not in random]
    if names:
        found.append(f"new and untrained, so compared with the reference's initialisation: {', '.join(names)}")
    return found


def writers(plan: Plan, modules: Collection[str]) -> tuple[str, ...]:
    """The places of the rules that write the weights of these modules, by the modules' names."""
    wanted = set(modules)
    written = [step for step in plan.steps if any(name.rpartition(".")[0] in wanted for name in step.targets)]
    return tuple(dict.fromkeys(step.rule.where for step in written))
