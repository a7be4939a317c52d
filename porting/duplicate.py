"""Copying a module, with what it keeps in closures: a copy that calls the original's parts is none."""

from __future__ import annotations

import copy
from types import CellType, FunctionType

from torch import nn


def duplicate(module: nn.Module, memo: dict[int, object] | None = None) -> nn.Module:
    """A deep copy of ``module``.

    Functions among its attributes, such as ``self.mlp = lambda x: down(act(up(x)))``, are made anew over the copied
    parts; :func:`copy.deepcopy` by itself leaves them with the original's.

    Args:
        module: what is copied.
        memo: as for :func:`copy.deepcopy`: id -> what stands for that object in the copy.

    Raises:
        Exception: something in it cannot be copied.
    """
    memo = {} if memo is None else memo
    made: list[tuple[CellType, object]] = []
    for part in module.modules():
        for value in list(vars(part).values()):
            if isinstance(value, FunctionType) and value.__closure__ and id(value) not in memo:
                memo[id(value)] = _again(value, made)
    copied = copy.deepcopy(module, memo)
    for cell, content in made:
        cell.cell_contents = memo.get(id(content), content)
    return copied


def _again(function: FunctionType, made: list[tuple[CellType, object]]) -> FunctionType:
    """The function over cells of its own, which are filled when the copy is there."""
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
