"""The module to load into: its places for tensors, and filling them."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from porting.errors import Code, Fault, Message, Option, PortingError, nearest
from porting.printable import text_of
from porting.users_code import import_users

DEEPEST = 4
"""Levels of lists and dictionaries that are searched for tensors."""

OURS = "porting.models."
"""The package that a table may name without being trusted."""


class TargetError(PortingError):
    """The module to load into cannot be found or built."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A parameter or persistent buffer of a module.

    Attributes:
        name: its name in ``state_dict``.
        built: whether it has values already (it is not on the meta device).
        same_as: the first name of the same tensor; its own name when it is not tied.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parameter: bool
    built: bool
    same_as: str


def slots(module: nn.Module) -> dict[str, Slot]:
    """Every parameter and persistent buffer of ``module``, tied ones under each of their names."""
    lazy = [name for name, tensor in named_tensors(module) if nn.parameter.is_lazy(tensor)]
    if lazy:
        message = f"{type(module).__name__} has lazy parameters without a shape: {', '.join(lazy[:3])}"
        message += f" and {len(lazy) - 3} more" if len(lazy) > 3 else ""
        hint = "run it once, on any input, and load into the module then"
        raise TargetError(Fault(code=Code.BAD_TARGET, message=message, hint=hint))
    found: dict[str, Slot] = {}
    first: dict[int, str] = {}
    for name, tensor in named_tensors(module):
        same_as = first.setdefault(id(tensor), name)
        found[name] = Slot(
            name=name,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            parameter=isinstance(tensor, nn.Parameter),
            built=not tensor.is_meta,
            same_as=same_as,
        )
    return found


def signature_parameters(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """The parameters of a function or a class by name; none where it has no signature, as some written in C."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def with_arguments(
    module: nn.Module, values: Mapping[str, object], inputs: Collection[str] = (), rows: Collection[str] = ()
) -> nn.Module:
    """The module with default values for some arguments of its forward, and with arguments that hold several tensors.

    Args:
        values: argument -> the value that it has from now on where it is not given.
        inputs: the names by which [inputs] gives tensors: ``batch.input_ids`` is an item of a dictionary that is the
            argument ``batch``, ``x.0`` the first of a tuple, ``0`` the first argument.
        rows: those of which the forward takes one row at a time: it is called once for each row of a batch.

    Returns:
        A module that shares its parameters, buffers and parts; the module itself where nothing changes.
    """
    grouped = any("." in name or name.isdigit() for name in inputs)
    split = bool(rows) and not _takes_rows(module.forward)
    if not values and not grouped and not split:
        return module
    bound = copy.copy(module)
    if grouped:
        bound.forward = GroupingForward(bound.forward)
    if split:
        bound.forward = RowForward(bound.forward, rows)
    if values:
        bound.forward = partial(bound.forward, **values)
    return bound


class NamedTensors(dict[str, Any]):
    """A batch that gives its tensors by key, as a dictionary does, and by attribute, as a tokenizer's encoding does."""

    def __getattr__(self, name: str) -> Any:  # what a batch holds
        """The tensor of that name."""
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class GroupingForward:
    """A forward that takes each tensor by a name of its own, and passes them on in dictionaries and tuples.

    Of ``{"batch.input_ids": a, "batch.mask": b}`` it makes ``batch={"input_ids": a, "mask": b}``, of
    ``{"x.0": a, "x.1": b}`` it makes ``x=(a, b)``, and a number is a place: ``{"0": a}`` is the first argument.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.__signature__ = inspect.signature(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward with its own arguments."""
        grouped: dict[str, dict[str, Any]] = {}
        args = (*args, *(kwargs.pop(name) for name in sorted((one for one in kwargs if one.isdigit()), key=int)))
        for name in [name for name in kwargs if "." in name]:
            argument, _, key = name.partition(".")
            grouped.setdefault(argument, {})[key] = kwargs.pop(name)
        for argument, items in grouped.items():
            numbered = all(key.isdigit() for key in items)
            kwargs[argument] = tuple(items[key] for key in sorted(items, key=int)) if numbered else NamedTensors(items)
        return self.forward(*args, **kwargs)


class RowForward:
    """A forward that takes a batch, and calls one that takes a single row: once for each, and stacks what it returns.

    Args:
        forward: takes one row.
        rows: its arguments that have an axis for the batch here; each row is given the others as they are.
    """

    def __init__(self, forward: Callable[..., Any], rows: Collection[str]) -> None:
        self.forward, self.rows = forward, frozenset(rows)
        self.__signature__ = inspect.signature(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward for each row."""
        given = {name: value for name, value in kwargs.items() if name in self.rows and value is not None}
        if not given:
            return self.forward(*args, **kwargs)
        count = len(next(iter(given.values())))
        one = [{**kwargs, **{name: value[row] for name, value in given.items()}} for row in range(count)]
        return stacked([self.forward(*args, **row) for row in one])


def _takes_rows(forward: Any) -> bool:
    """Whether a forward is split into rows already."""
    while not isinstance(forward, RowForward):
        inner = forward.func if isinstance(forward, partial) else getattr(forward, "forward", None)
        if inner is None:
            return False
        forward = inner
    return True


def stacked(parts: Sequence[Any]) -> Any:
    """The values of several calls as those of one: tensors get an axis in front, whatever holds them.

    >>> stacked([(torch.zeros(2), None), (torch.ones(2), None)])
    (tensor([[0., 0.],
            [1., 1.]]), None)
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.stack([*parts])
    if isinstance(first, Mapping):
        made = {key: stacked([one[key] for one in parts]) for key in first}
        return made if type(first) is dict else type(first)(**made)
    if isinstance(first, tuple | list):
        items = [stacked(some) for some in zip(*parts, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if is_dataclass(first) and not isinstance(first, type):
        names = [one.name for one in fields(first) if one.init]
        return replace(first, **{name: stacked([getattr(one, name) for one in parts]) for name in names})
    return first


def in_eval_mode(module: nn.Module) -> nn.Module:
    """The module in eval mode; a class of the user's own may have an ``eval`` that returns nothing."""
    module.eval()
    return module


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors as ``state_dict`` lists them: non-persistent buffers are left out.

    A part that was given to ``torch.compile`` is called what it was called before.

    Raises:
        TargetError: what was put where torch keeps tensors is none, or has no name.
    """
    for path, part in _parts(module):
        stem = f"{path}.".replace("_orig_mod.", "") if path else ""
        for name, parameter in part._parameters.items():
            if parameter is not None:
                _require_tensor(part, name, parameter)
                yield stem + name, parameter
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                _require_tensor(part, name, buffer)
                yield stem + name, buffer


def _require_tensor(part: nn.Module, name: object, tensor: object) -> None:
    """Refuse what was put there without ``register_parameter`` or ``register_buffer``, and what has no shape."""
    if isinstance(name, str) and isinstance(tensor, Tensor) and not tensor.is_nested:
        return
    kind = "nested tensor, which has no shape" if isinstance(tensor, Tensor) else type(tensor).__name__
    what = f"is a {kind}" if isinstance(name, str) else f"has a name that is a {type(name).__name__}"
    message = f"{name!r} among the parameters and buffers of {type(part).__name__} {what}"
    hint = "register a tensor with a shape, under a text"
    raise TargetError(Fault(code=Code.BAD_TARGET, message=message, hint=hint))


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules of a module with their paths, under each of their names."""
    try:
        for path, part in module.named_modules(remove_duplicate=False):
            if "_parameters" not in vars(part) and not hasattr(part, "_parameters"):
                message = f"the constructor of {type(part).__name__} does not call super().__init__()"
                raise TargetError(Fault(code=Code.BAD_TARGET, message=message, hint="let it do so first of all"))
            yield path, part
    except RecursionError as error:
        message = f"the modules of {type(module).__name__} lie in each other too deeply to be listed, or one in itself"
        raise TargetError(
            Fault(code=Code.BAD_TARGET, message=message, hint="take it out of its own modules")
        ) from error


def unsaved_tensors(module: nn.Module) -> Iterator[tuple[str, str]]:
    """The tensors of a module that no checkpoint can fill, each with what would change that."""
    for path, part in _parts(module):
        stem = f"{path}.".replace("_orig_mod.", "") if path else ""
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                yield stem + name, f"self.register_buffer({name!r}, ...) in place of self.{name} = ..."
        for name in part._non_persistent_buffers_set:
            yield stem + name, f"register the buffer {name!r} without persistent=False"


def plain_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that ``state_dict`` does not list, by name: in attributes, and in lists and dictionaries of these."""
    for path, part in module.named_modules():
        stem = f"{path}." if path else ""
        for name, value in vars(part).items():
            if not name.startswith("_"):
                yield from tensors_within(stem + name, value)


def tensors_within(name: str, value: object, deep: int = DEEPEST) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a value, in lists and in dictionaries, by name."""
    if isinstance(value, Tensor):
        yield name, value
    elif deep and isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_within(f"{name}.{key}", item, deep - 1)
    elif deep and isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from tensors_within(f"{name}.{number}", item, deep - 1)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of the wrappers of ``torch.compile`` and data parallelism."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def assign(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Replace the tensors of these names by ``values``, wherever the module shares them.

    A tensor that has values keeps its identity and its device (an optimizer that holds it goes on working); a
    parameter on the meta device is replaced by one with the same ``requires_grad``.  All or nothing: when one cannot
    be replaced, those before it are put back.
    """
    old = {name: tensor for name, tensor in named_tensors(module) if name in values}
    replaced: dict[int, Tensor] = {}
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        for name, value in values.items():
            tensor = old[name]
            if not tensor.is_meta:
                before = tensor.data
                tensor.data = value.to(tensor.device)
                kept.append((tensor, before))
            elif isinstance(tensor, nn.Parameter):
                grad = tensor.requires_grad and value.is_floating_point()
                replaced[id(tensor)] = nn.Parameter(value, requires_grad=grad)
            else:
                replaced[id(tensor)] = value
        if replaced:
            _require_replaceable(module)
    except BaseException:
        for tensor, before in kept:
            tensor.data = before
        raise
    for part in module.modules() if replaced else ():
        for table in (part._parameters, part._buffers):
            new = {
                name: replaced[id(tensor)]
                for name, tensor in table.items()
                if tensor is not None and id(tensor) in replaced
            }
            table.update(new)  # type: ignore[arg-type]  # parameters come in the place of parameters
        alike = {
            name: value for name, value in vars(part).items() if isinstance(value, Tensor) and id(value) in replaced
        }
        vars(part).update(
            {name: replaced[id(value)] for name, value in alike.items()}
        )  # a buffer that has another name


def _require_replaceable(module: nn.Module) -> None:
    """Raises: TargetError if TorchScript keeps the parameters of a part, which cannot be replaced there."""
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            message = f"{path or 'the module'} is TorchScript, whose parameters without values cannot be replaced"
            hint = "load into the module that is given to torch.jit, and script it after that"
            raise TargetError(Fault(code=Code.BAD_TARGET, message=message, hint=hint))


def _untrusted(path: str, *, config: bool) -> TargetError:
    message = f"the table names {path!r}, which is not part of this library"
    otherwise = (
        "let what builds the module make its config" if config else Message("pass the module with ", Option("into"))
    )
    hint = Message("pass ", Option("trust", True), " if you know the table, or ", otherwise)
    return TargetError(Fault(code=Code.UNTRUSTED_TARGET, message=message, hint=hint))


def import_path(path: str, *, trust: bool = False, config: bool = False) -> Callable[..., Any]:
    """Import the object that ``package.file:name`` names.

    Args:
        trust: also import what is not part of this library; without it a table can never run foreign code.
        config: it is the class of a module's config, and not a module, for messages.
    """
    where, _, name = path.rpartition(":")
    if (
        not where
        or not name
        or not all(part.isidentifier() for part in (*where.replace("/", ".").split("."), *name.split(".")))
    ):
        message = f"{path!r} is not an import path, expected package.file:name"
        raise TargetError(Fault(code=Code.BAD_TARGET, message=message))
    if where.endswith(".py"):
        message = f"the table names {path!r}, a file, and what a table names is imported"
        hint = f"write {where.removesuffix('.py').replace('/', '.')}:{name}, as in an import"
        raise TargetError(Fault(code=Code.BAD_TARGET, message=message, hint=hint))
    if not trust and not where.startswith(OURS):
        raise _untrusted(path, config=config)
    try:
        found: Any = import_users(where) if trust else importlib.import_module(where)
    except PortingError:
        raise
    except Exception as error:  # importing a file runs it, and it may raise anything
        message = f"importing {where!r} failed: {type(error).__name__}: {text_of(error)}".removesuffix(": ")
        raise TargetError(Fault(code=Code.BAD_TARGET, message=message)) from error
    for part in name.split("."):
        if not hasattr(found, part):
            hint = nearest(
                part, [attribute for attribute in getattr(found, "__dict__", ()) if not attribute.startswith("_")]
            )
            message = f"{where!r} has no {part!r}"
            raise TargetError(Fault(code=Code.BAD_TARGET, message=message, hint=hint))
        found = getattr(found, part)
    if not trust and getattr(found, "__module__", None) != where:
        raise _untrusted(
            path, config=config
        )  # what one of our files imports is not ours: torch, for one, can run anything
    if not callable(found):
        raise TargetError(Fault(code=Code.BAD_TARGET, message=f"{path!r} is not a class or function"))
    return found  # type: ignore[no-any-return]  # an import knows no types
