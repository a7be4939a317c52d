"""Copying a module, closures included, so that the copy never calls parts of the original."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType, MethodType

import torch
from torch import Tensor, nn

from porting.frames import users_attribute


def duplicate(module: nn.Module, memo: dict[int, object] | None = None) -> nn.Module:
    """A deep copy of ``module``.

    Functions among its attributes and hooks, such as ``self.mlp = lambda x: down(act(up(x)))``, are made anew over the
    copied parts; :func:`copy.deepcopy` by itself leaves them with the original's.  What cannot be copied, such as a
    lock or an open file, the copy has in common with the original; a tensor that has a history is copied without it.

    Args:
        memo: as for :func:`copy.deepcopy`: id -> what stands for that object in the copy.
    """
    memo = {} if memo is None else memo
    made: list[tuple[CellType, object]] = []
    for part in module.modules():
        for function in _functions(vars(part)):
            if function.__closure__ and id(function) not in memo:
                memo[id(function)] = _rebind(function, made)
    try:
        trial = dict(memo)  # what is begun and not ended must not be taken for a copy
        copied = copy.deepcopy(module, trial)
        memo.update(trial)
    except Exception:  # noqa: BLE001  # a module may hold anything: then part by part
        copied = _copy_module(module, memo)
    for cell, content in made:
        cell.cell_contents = (
            _copy_value(content, memo) if isinstance(content, list | dict | set) else _copied_value(content, memo)
        )
    return copied


def _functions(values: Mapping[str, object]) -> Iterator[FunctionType]:
    """The functions among a module's attributes, and in its lists and dictionaries, where hooks are."""
    for value in list(values.values()):
        within = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        yield from (function for function in within if isinstance(function, FunctionType))


def _rebind(function: FunctionType, made: list[tuple[CellType, object]]) -> FunctionType:
    """The function with new closure cells, which are filled later."""
    cells = []
    for cell in function.__closure__ or ():
        new = CellType()
        try:
            made.append((new, cell.cell_contents))
        except ValueError:  # a variable that was never set
            cells.append(new)
            continue
        cells.append(new)
    again = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    again.__kwdefaults__ = function.__kwdefaults__
    return again


def _copied_value(value: object, memo: Mapping[int, object]) -> object:
    """The copy's value for a value of the original; a method is bound to the copy of its object."""
    if isinstance(value, MethodType) and id(value.__self__) in memo:
        return MethodType(value.__func__, memo[id(value.__self__)])
    return memo.get(id(value), value)


def _copy_module(module: nn.Module, memo: dict[int, object]) -> nn.Module:
    """Copy a module attribute by attribute."""
    made: nn.Module = module.__class__.__new__(module.__class__)
    memo[id(module)] = made
    for name, value in vars(module).items():
        made.__dict__[name] = _copy_value(value, memo)
    return made


def _copy_value(value: object, memo: dict[int, object]) -> object:
    """Copy a value as far as possible; what cannot be copied is shared."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, nn.Module):
        return _copy_module(value, memo)
    trial = dict(memo)
    try:
        made = copy.deepcopy(value, trial)
    except Exception:  # noqa: BLE001  # it holds something that cannot be copied
        memo[id(value)] = made = _copy_content(value, memo)
    else:
        memo.update(trial)
    return made


def _copy_content(value: object, memo: dict[int, object]) -> object:
    """Copy a container or an object, as far as its content can be copied."""
    match value:
        case Tensor():
            return value.detach().clone().requires_grad_(value.requires_grad)
        case torch.Generator():
            return value.clone_state()
        case tuple() if type(value) is tuple:
            return tuple(_copy_value(item, memo) for item in value)
        case dict() | list():
            memo[id(value)] = made = copy.copy(value)
            for place, item in value.items() if isinstance(value, dict) else enumerate(value):
                made[place] = _copy_value(item, memo)
            return made
    if type(value).__new__ is not object.__new__ or not users_attribute(value, "__dict__"):
        return value  # a handle of something that is not Python's
    other = memo[id(value)] = object.__new__(type(value))
    vars(other).update({name: _copy_value(attribute, memo) for name, attribute in vars(value).items()})
    return other
