"""A pytest plugin that plants a mistake into every port that the user's tests build.

It is loaded by pytest's command line, before the user's own files are imported, so that what they import is changed,
whenever and under whatever name they import the function that builds the port.
"""

from __future__ import annotations

import copy
import functools
import importlib.abc
import importlib.machinery
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from porting.causes.events import Inventory
from porting.causes.fault_injection import plant, watch
from porting.causes.mutants import planted
from porting.mutating.equivalence import kinds
from porting.mutating.fork_server import ForkServer
from porting.mutating.messages import VARIABLE, MutationRequest, MutationResult

Change = Callable[[ModuleType], None]


class ImportHook(importlib.abc.MetaPathFinder):
    """Changes a module as soon as it has been executed, before any name is imported from it.

    Args:
        place: the module, ``my_model`` or ``package.my_model``, or its file.
        change: called once for each name under which the module is imported.
    """

    def __init__(self, place: str, change: Change) -> None:
        self.found: list[str] = []
        self._file = os.path.realpath(place) if place.endswith(".py") else None
        self._name = None if self._file else place
        self._change = change

    def start(self) -> None:
        """Begin; a module that is already imported is changed at once."""
        for name, module in list(sys.modules.items()):
            if self._is(name, getattr(module, "__file__", None)):
                self._done(name, module)
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return what the other finders find, with the loader of the module wrapped."""
        for finder in (other for other in sys.meta_path if other is not self):
            spec = finder.find_spec(fullname, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                if spec.loader is not None and self._is(fullname, spec.origin):
                    spec.loader = _Loader(spec.loader, self._done)
                return spec
        return None

    def _is(self, name: str, origin: str | None) -> bool:
        file = os.path.realpath(origin) if origin else None
        if name == self._name and file:
            self._file = self._file or file  # from now on also under other names
        return file is not None and file == self._file

    def _done(self, name: str, module: ModuleType) -> None:
        if name not in self.found:
            self.found.append(name)
            self._change(module)


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, done: Callable[[str, ModuleType], None]) -> None:
        self._loader = loader
        self._done = done

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module as the loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module as the loader does, then change it."""
        self._loader.exec_module(module)
        self._done(module.__name__, module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


def folder_of(place: str) -> Path:
    """The directory to put on ``sys.path`` to import a module: the one that holds the file's outermost package."""
    if not place.endswith(".py"):
        return Path.cwd()
    folder = Path(place).resolve().parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


class Planter:
    """Plants a mistake into the models that are built, and records what is observed of them."""

    def __init__(self, request: MutationRequest) -> None:
        self.request = request
        self.inventory = Inventory(list(request.roles), set(request.inner))
        self.built = 0
        self.code: int | pytest.ExitCode = 0
        self.copied = False
        self._known: set[str] = set()
        self._models: list[weakref.ref[nn.Module]] = []
        self.seen: tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None = None
        place, _, self._name = request.into.rpartition(":")
        self._place = place
        self.watch = ImportHook(place, self._install)

    def start(self) -> None:
        """Begin, after pytest has put its folders on the path and before the user's own files are imported.

        The folders come last: a file ``json.py`` in one of them is no part of the port, and must not replace Python's.
        """
        for folder in (os.getcwd(), str(folder_of(self._place))):
            if folder not in sys.path:
                sys.path.append(folder)
        self.watch.start()

    def _install(self, module: ModuleType) -> None:
        owner, leaf = module, self._name
        while "." in leaf:
            first, _, leaf = leaf.partition(".")
            owner = getattr(owner, first)
        target = getattr(owner, leaf, None)
        if isinstance(target, type):
            self._in_constructor(target)
        elif target is not None:
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

    def copy(self, request: MutationRequest) -> None:
        """Follow a request from now on, also for models that were built while the tests were imported."""
        self.request, self.copied, self._known = request, True, set(sys.modules)
        self.inventory = Inventory(list(request.roles), set(request.inner))
        for reference in self._models:
            if (model := reference()) is not None:
                self._change(model)

    def _change(self, model: nn.Module) -> None:
        self.built += 1
        if self.request.socket:
            self._models.append(weakref.ref(model))
            return

        # A function and no bound method: a deep copy of the model calls this planter, and not a copy of it.
        def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._remember(module, args, kwargs)

        model.register_forward_pre_hook(remember, with_kwargs=True)
        for mutation in planted(self.request.mistake):
            plant(model, mutation, self.inventory)
        if not self.request.mistake:
            watch(model, self.inventory)

    def _remember(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, torch.Tensor)]
        if tensors and not any(tensor.is_meta for tensor in tensors):
            best = 0 if self.seen is None else _size(self.seen[1], self.seen[2])
            if _size(args, kwargs) > best:
                self.seen = (model, copy.deepcopy(args), copy.deepcopy(kwargs))

    def tell(self) -> None:
        """Write what was observed to the answer's file."""
        mistakes = {}
        if self.seen is not None and not self.request.mistake:
            model, args, kwargs = self.seen
            model._forward_pre_hooks.clear()
            model._forward_pre_hooks_with_kwargs.clear()
            mistakes = kinds(model, args, kwargs, self.inventory)
        seen = MutationResult(
            built=self.built,
            imported=bool(self.watch.found),
            ran=self.seen is not None,
            roles=tuple(self.inventory.roles),
            inner=tuple(sorted(self.inventory.inner)),
            mistakes=mistakes,
            imports=tuple(self._imported()) if self.copied and not self.request.mistake else (),
        )
        seen.write(Path(self.request.answer))

    def _imported(self) -> Iterator[str]:
        """Yield the installed modules that a fork has imported."""
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            if name not in self._known and f"{os.sep}site-packages{os.sep}" in file:
                yield name


def _size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return sum(argument.numel() for argument in (*args, *kwargs.values()) if isinstance(argument, torch.Tensor))


PLANTER = Planter(MutationRequest.read(Path(os.environ[VARIABLE]))) if VARIABLE in os.environ else None


def pytest_load_initial_conftests() -> None:
    """Start after pytest has read its settings, before any of the user's files is imported."""
    if PLANTER is not None:
        PLANTER.start()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the collected tests in a fork for each request, and none in this process."""
    if PLANTER is None or not PLANTER.request.socket or session.testsfailed or not session.items:
        return None
    for writer in (sys.stdout, sys.stderr, session.config.get_terminal_writer()):
        writer.flush()
    for request in ForkServer(PLANTER.request.socket).requests():
        PLANTER.copy(request)
        return None
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
    """Write the answer after the tests have run."""
    if PLANTER is not None:
        PLANTER.code = exitstatus
        if not PLANTER.request.socket:
            PLANTER.tell()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End a fork here, without the cleanup that belongs to the other process."""
    if PLANTER is not None and PLANTER.copied:
        for writer in (sys.stdout, sys.stderr):
            writer.flush()
        os._exit(int(PLANTER.code))
