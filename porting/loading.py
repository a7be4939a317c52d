"""``load``: load a checkpoint into a module through a table, without needless copies."""

from __future__ import annotations

import gc
import os
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from porting.build import bounds, build, build_with_values
from porting.builder_config import Named, call, make_config
from porting.checkpoint import Checkpoint, open_checkpoint
from porting.converting.processes import Processes
from porting.errors import Code, Fault, Message, Option, PortingError, PortingWarning, nearest
from porting.limits import moving, spending
from porting.notation.table import Architecture, Table
from porting.plan.check import check
from porting.plan.config import arguments, lacked
from porting.plan.move import compute_whole, forward
from porting.plan.plan import Plan
from porting.plan.scan import may_lose, not_finite
from porting.sharding.filling import Filled, fill, is_sharded, require_equal, stored_not_finite, unequal
from porting.tables import chosen_for, find_table
from porting.target import TargetError, assign, import_path, in_eval_mode, named_tensors, unwrapped

Into = nn.Module | Callable[..., nn.Module] | None


@contextmanager
def _paused_collection() -> Iterator[None]:
    """Pause the garbage collector, which would scan all imported modules; building makes no garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_paused_collection()
def load(
    source: str | os.PathLike[str] | Checkpoint,
    into: Into = None,
    table: Table | str | Path | None = None,
    *,
    architecture: str | None = None,
    dtype: torch.dtype | None = None,
    fresh: bool = False,
    own: bool = False,
    trust: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> nn.Module:
    """Load a checkpoint into a module.

    ``porting.provenance(module).plan`` has the plan afterwards: what went where.

    Args:
        source: a directory, a weight file, a hub id (``org/name`` or ``org/name@revision``) or an open checkpoint.
        into: a module, which keeps its mode, its devices and the identity of its parameters, and may be spread over
            processes (its parameters DTensors: each process then reads the bytes of its own shards); or a class or
            function, called with the config if it has a parameter ``config``, else with the fields that its parameters
            are named after; or None for the handwritten model that the table names.  A module that is built here is in
            eval mode, and where its builder puts it.
        table: a table, its file or its text, the name of a bundled one, or None to choose by the checkpoint's
            ``model_type``.
        architecture: which of the table's architectures to build; None to go by what the checkpoint holds.
        dtype: cast floating-point weights to this; None keeps the checkpoint's dtypes and allows no cast.
        fresh: allow parameters listed in the table's [fresh] to be missing; they keep the module's own initialisation.
        own: copy the weights into memory of their own.  By default they are views of the file, mapped privately:
            loading costs little and writing to them never changes the file, but the file must not be overwritten in
            place or truncated while the module exists.  (Replacing or deleting it is fine.)
        trust: allow the table to name a module outside of this library.
        revision, token, local_files_only: for a hub id, as in huggingface_hub.

    Returns:
        The module.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        TableError: there is no such table, or it has faults.
        PlanError: table, checkpoint and module do not fit; carries all faults.
        TargetError: the module cannot be built or filled.
        RankError: another of the processes over which the module is spread could not load its part; which, and why.

    If an error is raised, a passed module is unchanged.

    >>> import porting
    >>> model = load(porting.embedded_checkpoint())
    >>> type(model).__name__, model.bert.embeddings.word.weight.shape
    ('BertForPreTraining', torch.Size([4096, 128]))
    """
    processes = _processes(source, alone=not (isinstance(into, nn.Module) and is_sharded(into)))
    with processes.step():
        if isinstance(source, Checkpoint):
            checkpoint = source
        else:
            checkpoint = open_checkpoint(source, revision=revision, token=token, local_files_only=local_files_only)
        fitted = fit(checkpoint, into, table, architecture=architecture, dtype=dtype, fresh=fresh, trust=trust)
    module, plan = fitted.module, fitted.plan
    filled = _fill_shards(plan, checkpoint, module)
    if filled is None:
        prove_left_out(plan, checkpoint)
    lost = Counter[str]() if filled is None else Counter(filled.lost)
    values = weights(plan, checkpoint, own=own, lost=lost) if filled is None else dict(filled.values)
    checkpoint.require_in_place()
    if isinstance(into, nn.Module):
        _require_values(module, values)
    else:
        values |= initialised(plan, fitted.make, values)
    if filled is None:
        assign(module, values)
    else:
        filled.put(module)
    for fault in plan.warnings:
        warnings.warn(fault.line, PortingWarning, stacklevel=3)  # past the decorator
    if lost:
        counts = ", ".join(f"{count} of {name}" for name, count in lost.items())
        warnings.warn(f"finite values became infinite or NaN: {counts}", PortingWarning, stacklevel=3)
    if plan.fresh:
        message = f"{len(plan.fresh)} parameters are new and untrained: {', '.join(plan.fresh)}"
        warnings.warn(message, PortingWarning, stacklevel=3)
    nbytes = filled.nbytes if filled is not None else None
    remember(module, Provenance(checkpoint=checkpoint, plan=plan, architecture=fitted.architecture, nbytes_read=nbytes))
    return into if isinstance(into, nn.Module) else module


def _fill_shards(plan: Plan, checkpoint: Checkpoint, module: nn.Module) -> Filled | None:
    """Read this process's part of a sharded module; None if the module is not sharded.

    What one of them cannot read, none of them goes on from: all raise.
    """
    if not is_sharded(module):
        return None
    processes = _processes(checkpoint.location)
    with processes.step():
        wrong, proven = unequal(plan.left_out, checkpoint, processes.rank, processes.count)
        filled = fill(plan, checkpoint, module, processes.rank)
    seen = processes.gather((wrong, filled.not_finite))
    require_equal(chain.from_iterable(found for found, _ in seen), plan.sources)
    after = sum((Counter(counts) for _, counts in seen), start=Counter[int]())
    lost: dict[str, int] = {}
    if after:  # seldom: then each process counts a share of what the sources have of them already
        with processes.step():
            before, counted = stored_not_finite(plan, checkpoint, after, processes.rank, processes.count)
        after.subtract(sum(processes.gather(before), start=Counter[int]()))
        lost = {plan.steps[number].targets[0]: count for number, count in sorted(after.items()) if count > 0}
        proven += counted
    return replace(filled, nbytes=filled.nbytes + proven, lost=lost)


def _processes(source: str | os.PathLike[str] | Checkpoint, *, alone: bool = False) -> Processes:
    """The processes that load together; with ``alone``, this one."""
    where = source.location if isinstance(source, Checkpoint) else os.fspath(source)
    return Processes(where, "nothing was loaded", alone=alone)


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A module that a checkpoint fits into, before it is filled.

    Attributes:
        module: the module; if it was built here, it is in eval mode and its weights are on the meta device.
        architecture: what it stands for, if the table names any.
    """

    module: nn.Module
    plan: Plan
    architecture: Architecture | None
    make: Callable[[], nn.Module]


def fit(
    checkpoint: Checkpoint,
    into: Into,
    table: Table | str | Path | None,
    *,
    architecture: str | None = None,
    dtype: torch.dtype | None = None,
    fresh: bool = False,
    trust: bool = False,
) -> Fitted:
    """Do all of :func:`load` that reads no weights; the arguments are the same.

    Returns:
        The module on the meta device, or the passed one, and the plan.
    """
    chosen = find_table(table, checkpoint.config, checkpoint.tensors)
    given = isinstance(into, nn.Module)
    with chosen_for(table, into, chosen):
        make, kind = maker(chosen, checkpoint, into, architecture, trust=trust)
        module = make() if given else in_eval_mode(build(make, bounds(checkpoint.tensors, checkpoint.config)))
        plan = check(chosen, checkpoint, module, dtype=dtype, fresh=fresh)
    if not given:
        kind = kind if architecture is not None else recognise_architecture(chosen, module) or kind
    return Fitted(module=module, plan=plan, architecture=kind, make=make)


@spending()
def weights(
    plan: Plan, checkpoint: Checkpoint, *, own: bool = False, lost: Counter[str] | None = None
) -> dict[str, Tensor]:
    """Read the targets of the plan, by name: views of the checkpoint's files where rules and dtype allow.

    Args:
        lost: for each tensor, how many of its finite values a cast or a computation made infinite or NaN; added here.
    """
    checkpoint.allow_time()
    values: dict[str, Tensor] = {}
    for step in plan.steps:
        with moving(sum(checkpoint.tensors[name].nbytes for name in step.sources)):
            stored = {name: checkpoint.read(name, own=own or step.rule.again) for name in step.sources}
            read = stored if plan.dtype is None else {name: cast(one, plan.dtype) for name, one in stored.items()}
            found = dict(forward(step, plan.targets, read.__getitem__, plan.arithmetic(step)))
            values.update(found)
            if lost is not None and may_lose(step, plan):
                after = sum(map(not_finite, found.values()))
                before = sum(map(not_finite, stored.values())) if after else 0
                lost.update({next(iter(found)): after - before} if after > before else {})
    for recipe in plan.made:
        with moving(recipe.nbytes):
            value = compute_whole(recipe, checkpoint.read)  # a copy of another target has values of its own
            values[recipe.name] = value.to(recipe.dtype, copy=True) if recipe.equals else value
    return values


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a floating-point tensor to ``dtype``; any other is returned as it is."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def require_floating(dtype: torch.dtype) -> None:
    """Raises: TargetError when weights are to be cast to anything but floating-point numbers."""
    if not dtype.is_floating_point:
        message = Message(Option("dtype", dtype), ", expected a floating-point dtype")
        raise TargetError(Fault(code=Code.DTYPE_CHANGE, message=message, hint="integers are never made of floats"))


def maker(
    table: Table, checkpoint: Checkpoint, into: Into, architecture: str | None, *, trust: bool
) -> tuple[Callable[[], nn.Module], Architecture | None]:
    """A function that builds the module, and the architecture that it is.

    That is the one that was asked for; else the one that ``into`` is by its class; else the one that the checkpoint
    holds.

    Args:
        checkpoint: the checkpoint to load; only its names, shapes and config are read.
        into: the user's module, or what builds it; None for the table's own.
    """
    kind = None
    if into is not None and architecture is None:
        inside = unwrapped(into) if isinstance(into, nn.Module) else into
        kind = recognise_architecture(table, inside) if isinstance(inside, nn.Module | type) else None
    if kind is None and (into is None or table.architectures or architecture is not None):
        kind = choose_architecture(table, checkpoint.tensors, checkpoint.config, architecture)
    if isinstance(into, nn.Module):
        module = unwrapped(into)
        return (lambda: module), kind
    if into is None:
        into = import_path(kind.target if kind else "", trust=trust)
    as_stored = not (table.config or table.constants or table.config_class)
    fields = dict(checkpoint.config) if as_stored else arguments(table, checkpoint.config)
    target = into

    def config() -> object:
        if not table.config_class:
            return Named(fields, target)
        where = f"{checkpoint.location}/config.json"
        return make_config(import_path(table.config_class, trust=trust, config=True), fields, where=where)

    within = bounds(checkpoint.tensors, checkpoint.config)

    def make() -> nn.Module:
        try:
            return call(target, config, fields, within, checkpoint.config)
        except PortingError:
            raise
        except Exception as error:  # the user's builder may raise anything; it is raised again with what helps
            if not as_stored and (lacking := lacked(table, checkpoint.config)):
                error.add_note(f"config.json lacks {', '.join(lacking)}")
            raise

    return make, kind


def prove_left_out(plan: Plan, checkpoint: Checkpoint) -> None:
    """Require that the tensors that are dropped have the value that the table states, bit for bit."""
    require_equal(unequal(plan.left_out, checkpoint)[0], plan.sources)


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits, so that a NaN equals itself and 0.0 is not -0.0."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if first.data_ptr() == second.data_ptr() and first.stride() == second.stride():
        return True
    integers = INTEGERS.get(first.itemsize, torch.uint8)
    first, second = (tensor.detach().contiguous().reshape(-1).view(integers) for tensor in (first, second))
    return torch.equal(first, second)


def initialised(plan: Plan, make: Callable[[], nn.Module], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The module's initial values for tensors that the checkpoint does not have, in the dtype of most others.

    Args:
        plan: says which tensors are new or computed.
        make: builds the module; called only if there are such tensors.

    Returns:
        The tensors by name.
    """
    own = {*plan.fresh, *plan.computed}
    if not own:
        return {}
    counts = Counter(value.dtype for value in values.values() if value.is_floating_point())
    dtype = counts.most_common(1)[0][0] if counts else torch.get_default_dtype()
    made = build_with_values(make, bounds(plan.sources))
    return {name: cast(tensor.detach(), dtype) for name, tensor in named_tensors(made) if name in own}


def _require_values(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Require that a passed module has values for all tensors that the checkpoint does not fill."""
    filled = {id(tensor) for name, tensor in named_tensors(module) if name in values}
    tensors = [*module.named_parameters(), *module.named_buffers()]
    empty = [name for name, tensor in tensors if tensor.is_meta and id(tensor) not in filled]
    if empty:
        message = f"the module is on the meta device, and nothing gives a value to {', '.join(map(repr, empty))}"
        hint = "pass the class, or a function that builds the module"
        raise TargetError(Fault(code=Code.BAD_TARGET, message=message, hint=hint))


def choose_architecture(
    table: Table, tensors: Container[str], config: Mapping[str, object], architecture: str | None = None
) -> Architecture:
    """The given architecture, or the one that covers most of a checkpoint.

    Of those whose witnesses are all there, the one with the most; among equals, the one that the config names.
    """
    names = [entry.name for entry in table.architectures]
    if not names and architecture is None:
        message = f"table '{table.name}' names no module to build"
        raise TargetError(
            Fault(code=Code.BAD_TARGET, where=table.where, message=message, hint=Message("pass ", Option("into")))
        )
    if architecture is not None:
        if architecture not in names:
            hint = nearest(architecture, names) or f"it has {', '.join(names) or 'none'}"
            message = f"table '{table.name}' has no architecture {architecture!r}"
            raise TargetError(Fault(code=Code.UNKNOWN_ARCHITECTURE, where=table.where, message=message, hint=hint))
        return table.architectures[names.index(architecture)]
    declared = config.get("architectures")
    declared = declared if isinstance(declared, list) else []
    fitting = [
        entry
        for entry in table.architectures
        if all(name in tensors or name.removeprefix(table.prefix) in tensors for name in entry.holds)
    ]
    return max(fitting or table.architectures[:1], key=lambda entry: (len(entry.holds), entry.name in declared))


def recognise_architecture(table: Table, module: nn.Module | type[nn.Module]) -> Architecture | None:
    """The architecture of a module or class: one that the table names, or a subclass of one."""
    targets = {entry.target: entry for entry in table.architectures}
    kind = module if isinstance(module, type) else type(module)
    paths = (f"{base.__module__}:{base.__qualname__}" for base in kind.__mro__)
    return next((targets[path] for path in paths if path in targets), None)


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The origin of a module's weights.

    Attributes:
        architecture: the table's architecture that the module is or, for a module of the user's own, that the
            checkpoint holds; None when the table has none.
        nbytes_read: the bytes that this process read for its shards; None for a module that is whole, whose weights
            are views of the mapped files.
    """

    checkpoint: Checkpoint
    plan: Plan
    architecture: Architecture | None
    nbytes_read: int | None = None


_KNOWN: WeakKeyDictionary[nn.Module, Provenance] = WeakKeyDictionary()


def provenance(module: nn.Module) -> Provenance | None:
    """The origin of a module's weights, if :func:`porting.load` filled it in this process.

    A copy of a module has none; one wrapped by ``torch.compile`` or for data parallelism has that of the module inside.

    >>> import porting
    >>> source = porting.embedded_checkpoint()
    >>> provenance(porting.load(source)).plan.table.name
    'bert'
    """
    return _KNOWN.get(unwrapped(module))


def remember(module: nn.Module, record: Provenance) -> None:
    """Record the origin of a module's weights."""
    _KNOWN[unwrapped(module)] = record
