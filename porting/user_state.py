"""The state of the user's own files: caches, globals, attributes of classes and functions.

A builder runs on the meta device first, for its shapes.  If it caches tensors in that run, they have no values, and
a later run would get them from the cache.  So the state of its files is restored after the run.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import _lru_cache_wrapper, partial
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from porting.frames import is_users_module, users_attribute

_KINDS = (dict, list, set, Tensor, type(None))
"""The types of caches: containers, and None at first."""


class UserState:
    """The state of the user's files as it is now.

    Args:
        make: what builds a module, or calls what does: its own file and those that this imports are looked at.
    """

    def __init__(self, make: Callable[..., object]) -> None:
        self._make, self._places = make, [*_places(make)]
        self._before = [
            (holder, name, value, _content_copy(value))
            for holder, name, value in self._places
            if isinstance(value, _KINDS)
        ]
        self._caches = [(function, function.cache_info().misses) for function in _caches(self._places)]

    def restore(self) -> None:
        """Bring the files back to this state, and clear what functions have cached since."""
        for holder, name, value, contents in self._before:
            if holder is not None and vars(holder).get(name) is not value:
                setattr(holder, name, value)
            _restore_content(value, contents)
        for function, misses in self._caches:  # a full cache keeps its size
            if function.cache_info().misses != misses:
                function.cache_clear()

    def forget_imported(self) -> None:
        """Clear the caches of files that were imported since, and the tensors without values that they keep."""
        known = {id(value) for _, _, value in self._places}
        found = [place for place in _places(self._make) if id(place[2]) not in known]
        for function in _caches(found):
            function.cache_clear()
        for place in found:
            _forget_empty(*place)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Return a context in which the files are in this state; afterwards they are as they were before it."""
        now = UserState(self._make)
        self.restore()
        try:
            yield
        finally:
            now.restore()


@contextmanager
def restored_state(make: Callable[..., object]) -> Iterator[None]:
    """Restore the state of the user's files after the block, and clear what functions have cached in it.

    Args:
        make: as of :class:`UserState`.
    """
    state = UserState(make)
    try:
        yield
    finally:
        state.restore()
        state.forget_imported()


def _places(make: Callable[..., object]) -> Iterator[tuple[Any, str, object]]:
    """The attributes of the user's modules and of their classes and functions, and the functions' defaults."""
    open_ = [*_modules_of(make)]
    seen: set[str] = set()
    while open_:
        module = sys.modules.get(open_.pop())
        if module is None or module.__name__ in seen or not is_users_module(module):
            continue
        seen.add(module.__name__)
        for name, value in [*vars(module).items()]:
            yield module, name, value
            yield from _attributes_of(value, module.__name__)
            open_.append(
                value.__name__ if isinstance(value, ModuleType) else str(users_attribute(value, "__module__", ""))
            )


def _modules_of(make: object) -> Iterator[str]:
    """The modules of a builder, of what it calls by its closure or its arguments, and those that these import."""
    open_, seen = [make], set[int]()
    while open_:
        called = open_.pop()
        if not callable(called) or id(called) in seen:
            continue
        seen.add(id(called))
        if isinstance(called, partial):
            open_ += (called.func, *called.args, *called.keywords.values())
            continue
        function = inspect.unwrap(users_attribute(called, "__func__", called))
        yield str(users_attribute(function, "__module__", ""))
        yield from getattr(users_attribute(function, "__code__"), "co_names", ())
        for cell in users_attribute(function, "__closure__") or ():
            with suppress(ValueError):  # it is empty yet
                open_.append(cell.cell_contents)
        owner = users_attribute(called, "__self__")
        if not isinstance(called, type) and owner is not None:
            open_ += users_attribute(owner, "__dict__", {}).values()


def _attributes_of(value: object, module: str) -> Iterator[tuple[Any, str, object]]:
    """The attributes of a class, a function or an object that a module defines."""
    kind = value if isinstance(value, type | FunctionType) else type(value)
    if getattr(kind, "__module__", "") != module or isinstance(value, nn.Module):
        return
    for name, attribute in [*users_attribute(value, "__dict__", {}).items()]:
        if not name.startswith("__"):
            yield value, name, attribute
            if isinstance(attribute, FunctionType) and attribute is not value:
                yield from _attributes_of(attribute, module)
    if isinstance(value, FunctionType):
        for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            yield None, "", default


def _caches(places: list[tuple[Any, str, object]]) -> Iterator[Any]:
    """Functions behind ``functools.cache`` or ``lru_cache``."""
    for _, _, value in places:
        inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if isinstance(inner, _lru_cache_wrapper):
            yield inner


def _content_copy(value: object) -> object:
    """The content of a container; None for any other value.

    The methods of the builtin type read it: those of a subclass may compute what they return (transformers' ``ACT2FN``
    gives a new module at each access) or refuse to be called.
    """
    if isinstance(value, dict):
        return dict(_type_of(value).items(value))
    if isinstance(value, list):
        return [*list.__iter__(value)]
    return {*set.__iter__(value)} if isinstance(value, set) else None


def _type_of(value: dict[Any, Any]) -> type[dict[Any, Any]]:
    return OrderedDict if isinstance(value, OrderedDict) else dict  # dict's methods would leave an order behind


def _restore_content(value: object, contents: object) -> None:
    """Restore the content of a container, if it has changed."""
    now = _content_copy(value)
    if isinstance(value, dict) and isinstance(contents, dict) and isinstance(now, dict):
        if _entry_ids(now) != _entry_ids(contents):
            kind = _type_of(value)
            kind.clear(value)
            for name, item in contents.items():
                kind.__setitem__(value, name, item)
    elif isinstance(value, list) and isinstance(contents, list) and isinstance(now, list):
        if [*map(id, now)] != [*map(id, contents)]:
            list.__setitem__(value, slice(None), contents)
    elif isinstance(value, set) and isinstance(contents, set) and isinstance(now, set) and now ^ contents:
        set.clear(value)
        set.update(value, contents)


def _entry_ids(value: dict[object, object]) -> list[tuple[int, int]]:
    return [(id(name), id(item)) for name, item in value.items()]


def _forget_empty(holder: Any, name: str, value: object) -> None:  # the holder has any type
    """Take tensors without values out of an attribute whose earlier content is not known."""
    if isinstance(value, Tensor) and value.is_meta and holder is not None:
        setattr(holder, name, None)
    elif isinstance(value, dict):
        for key in [key for key, item in _type_of(value).items(value) if _is_empty(item)]:
            _type_of(value).__delitem__(value, key)
    elif isinstance(value, list) and any(map(_is_empty, list.__iter__(value))):
        list.__setitem__(value, slice(None), [item for item in list.__iter__(value) if not _is_empty(item)])


def _is_empty(item: object) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(item))
