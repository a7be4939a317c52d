"""Importing the user's own modules: found only for the user's files, and never in place of installed ones.

The current folder may be a repository that somebody else wrote.  If it were on ``sys.path``, a file ``transformers.py``
or ``numpy.py`` in it would run when this library, or a package that it uses, imports the real one.  A file
``flash_attn.py`` would run even if the folder came last, since packages try to import optional ones.  So the folder is
searched for two kinds of imports only: the module that the user named, and the imports in files that were found so.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from traceback import walk_tb
from types import ModuleType

from porting.errors import Code, Fault, Message, Option, PortingError


class NameClashError(PortingError):
    """A module of the user has the name of an installed one."""


class UsersFinder(MetaPathFinder):
    """Finds modules in the user's folders, for the user's own files."""

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.named = ""
        self._files: set[str] = set()
        self._packages: tuple[str, ...] = ()

    def note(self, spec: ModuleSpec) -> None:
        """Let a module's files import from the user's folders."""
        if spec.origin is not None:
            self._files.add(spec.origin)
        self._packages += tuple(f"{place}{os.sep}" for place in spec.submodule_search_locations or ())

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module, if the user's own code imports it."""
        if path is not None or (fullname != self.named and not self._is_users(_importing_file())):
            return None  # what is inside a package is found through the package
        spec = PathFinder.find_spec(fullname, [str(folder) for folder in self.folders])
        if spec is not None:
            self.note(spec)
        return spec

    def forget(self, name: str, folder: Path) -> None:
        """Unload the modules of other user's folders that this folder has too, so that they are imported again."""
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec is not None and spec.origin in self._files and Path(spec.origin).parent not in (folder, folder / name):
            del sys.modules[name]

    def raised(self, error: BaseException) -> bool:
        """Whether the user's code raised an error; of what is no Exception, whether it only passed through it."""
        files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
        return any(map(self._is_users, files[-1:] if isinstance(error, Exception) else files))

    def _is_users(self, file: str) -> bool:
        return file in self._files or file.startswith(self._packages)


FINDER = UsersFinder()
_MACHINERY = (str(Path(importlib.__file__).parent), "<frozen importlib", __file__)


def _importing_file() -> str:
    """The file whose import is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_MACHINERY):
        frame = frame.f_back
    return frame.f_code.co_filename


def search(folder: Path) -> None:
    """Let the user's modules be found in a folder; the last folder is searched first."""
    folder = Path(os.path.realpath(folder))
    FINDER.folders = [folder, *(other for other in FINDER.folders if other != folder)]
    if FINDER not in sys.meta_path:
        sys.meta_path.append(FINDER)


def import_users(where: str) -> ModuleType:
    """Import a module that the user named: an installed one, or one in a user's folder."""
    top, _, rest = where.partition(".")
    for folder in FINDER.folders:
        found = _in_folder(folder, where)
        if found is None:
            continue
        other = _elsewhere(top, folder)
        if other:
            spelled = found if found.suffix == ".py" else found / "FILE.py"
            raise _clash(where, found, other, Message("for yours write ", Option("into"), f" {spelled}:NAME"))
        if not rest:
            _check_neighbours(found, folder)
        before, FINDER.named = FINDER.named, top
        try:
            return importlib.import_module(where)
        finally:
            FINDER.named = before
    return importlib.import_module(where)


def import_file(path: Path) -> ModuleType:
    """Run a user's file as a module, which replaces no other."""
    path = Path(os.path.realpath(path))
    search(path.parent)
    _check_neighbours(path, path.parent)
    name = path.stem
    if not name.isidentifier() or name in sys.modules or _elsewhere(name, path.parent):
        name = "into_module"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    FINDER.note(spec)
    sys.modules[name] = loaded = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[name]
        raise
    return loaded


def _in_folder(folder: Path, where: str) -> Path | None:
    """The file or folder of a module."""
    base = folder.joinpath(*where.split("."))
    candidates = (base.with_name(f"{base.name}.py"), base / "__init__.py", base)
    return next((candidate for candidate in candidates if candidate.exists()), None)


def _elsewhere(top: str, folder: Path) -> str:
    """The place of another module of this name outside of the folder; empty if there is none."""
    FINDER.forget(top, folder)
    module = sys.modules.get(top)
    try:
        spec = getattr(module, "__spec__", None) or importlib.util.find_spec(top)
    except (ImportError, ValueError):  # a module that was made by hand has no specification
        spec = None
    if spec is None:
        return str(getattr(module, "__file__", "") or "") if module is not None else ""
    places = list(spec.submodule_search_locations or ()) or [spec.origin or "Python itself"]
    own = {str(folder / top), str(folder / f"{top}.py")}
    return "" if {os.path.realpath(place) for place in places} & own else places[0]


def _check_neighbours(file: Path, folder: Path) -> None:
    """Refuse imports of a file that are both beside it and installed: Python would choose another than we do."""
    for name in _imports(file):
        found = _in_folder(folder, name)
        if found is not None and (found.is_file() and found != file):
            other = _elsewhere(name, folder)
            if other:
                raise _clash(name, found, other, f"{file.name} imports {name!r}: rename yours")


def _imports(file: Path) -> Iterator[str]:
    """The top-level modules that a file imports from outside of its package."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # importing it says what is wrong with it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]


def _clash(name: str, found: Path, other: str, hint: str) -> NameClashError:
    message = f"two modules have this name, {found} and {other}"
    return NameClashError(Fault(code=Code.BAD_TARGET, where=name, message=message, hint=hint))
