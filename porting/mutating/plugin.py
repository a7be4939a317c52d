"""The part that runs with the user's tests: a pytest plugin that makes what builds the port give one with a mistake.

It is named on pytest's command line, before the user's own files are imported, so that whatever they import is changed.
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from porting.causes.events import Inventory
from porting.causes.meddling import plant, watch
from porting.causes.planting import planted
from porting.mutating.equivalence import kinds
from porting.mutating.orders import VARIABLE, Orders, Seen


class Planter:
    """Changes what is built, and remembers what it needs to know of it."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.inventory = Inventory(list(orders.roles))
        self.built = 0
        self.seen: tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None = None
        self._install()

    def _install(self) -> None:
        place, _, name = self.orders.into.rpartition(":")
        folder = Path(place).resolve().parent if place.endswith(".py") else Path.cwd()
        for one in (str(folder), os.getcwd()):
            if one not in sys.path:
                sys.path.insert(0, one)
        module = importlib.import_module(Path(place).stem if place.endswith(".py") else place)
        owner, leaf = module, name
        while "." in leaf:
            first, _, leaf = leaf.partition(".")
            owner = getattr(owner, first)
        target = getattr(owner, leaf)
        if isinstance(target, type):
            self._in_constructor(target)
        else:
            setattr(owner, leaf, self._around(target))

    def _around(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def build(*args: Any, **kwargs: Any) -> Any:  # the user's own
            made = make(*args, **kwargs)
            if isinstance(made, nn.Module):
                self._change(made)
            return made

        return build

    def _in_constructor(self, kind: Any) -> None:  # a class, whose constructor is replaced
        make = kind.__init__

        @functools.wraps(make)
        def construct(made: Any, *args: Any, **kwargs: Any) -> None:
            make(made, *args, **kwargs)
            if type(made) is kind:
                self._change(made)

        kind.__init__ = construct

    def _change(self, model: nn.Module) -> None:
        self.built += 1

        def tell(one: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._remember(one, args, kwargs)  # a function: a copy of the model tells this planter, and no copy of it

        model.register_forward_pre_hook(tell, with_kwargs=True)
        for meddling in planted(self.orders.mistake):
            plant(model, meddling, self.inventory)
        if not self.orders.mistake:
            watch(model, self.inventory)

    def _remember(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        if tensors and not any(one.is_meta for one in tensors):
            best = 0 if self.seen is None else _size(self.seen[1], self.seen[2])
            if _size(args, kwargs) > best:
                self.seen = (model, copy.deepcopy(args), copy.deepcopy(kwargs))

    def tell(self) -> None:
        """Write down what was seen."""
        mistakes = {}
        if self.seen is not None and not self.orders.mistake:
            model, args, kwargs = self.seen
            model._forward_pre_hooks.clear()
            model._forward_pre_hooks_with_kwargs.clear()
            mistakes = kinds(model, args, kwargs, self.inventory)
        roles = tuple(self.inventory.roles)
        seen = Seen(built=self.built, ran=self.seen is not None, roles=roles, mistakes=mistakes)
        seen.write(Path(self.orders.answer))


def _size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return sum(one.numel() for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))


PLANTER = Planter(Orders.read(Path(os.environ[VARIABLE]))) if VARIABLE in os.environ else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The tests have run."""
    if PLANTER is not None:
        PLANTER.tell()
