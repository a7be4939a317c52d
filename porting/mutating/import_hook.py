"""Finding the function that builds the port, whenever and under whatever name the user's tests import it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

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
