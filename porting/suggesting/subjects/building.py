"""Building the user's module from a config that it has never been told about.

A builder asks for what it needs: by the names of its parameters, or by the keys and attributes that it reads from a
config.  What it asks for is looked up by role, and remembered: that is the table's [config].
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from porting.duplicate import duplicate
from porting.errors import Code, Fault, PortingError, told
from porting.frames import place_of, users_line
from porting.suggesting.subjects.config_fields import Role, field_for, role_of
from porting.suggesting.subjects.guarded_run import is_device_error
from porting.target import TargetError, named_tensors

Builder = nn.Module | Callable[..., nn.Module]

_SIZES = frozenset({
    Role.HIDDEN, Role.DEPTH, Role.HEADS, Role.GROUPS, Role.HEAD_SIZE, Role.INNER, Role.VOCABULARY, Role.POSITIONS,
    Role.SEGMENTS, Role.CHANNELS, Role.IMAGE, Role.PATCH, Role.EPS,
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BuiltModule:
    """A module of the user's, built.

    Attributes:
        module: it, in eval mode, on the CPU.
        asked: what the builder asked for -> the config's field that it got.
        wished: what it asked for that no field says, and its own default was taken.
        given: whether the module was passed built, so that its sizes are what they are.
    """

    module: nn.Module
    asked: Mapping[str, str] = field(default_factory=dict)
    wished: tuple[str, ...] = ()
    given: bool = False


class Fields(Mapping[str, Any]):
    """A config that answers to the names of others, read by key or by attribute, and remembers what was read."""

    def __init__(self, config: Mapping[str, object], only: tuple[str, ...] | None = None) -> None:
        self._config = config
        self._only = only
        self._asked: dict[str, str] = {}

    def _find(self, name: str) -> str | None:
        found = field_for(name, self._config, self._only or tuple(self._asked))
        if found is not None:
            self._asked[name] = found
        return found

    def __getitem__(self, name: str) -> Any:  # a config's values are of any type
        found = self._find(name)
        if found is None:
            raise KeyError(name)
        return self._config[found]

    def __getattr__(self, name: str) -> Any:  # as above
        if name.startswith("_"):
            raise AttributeError(name)
        found = self._find(name)
        if found is None:
            raise AttributeError(f"the config has no field {name!r}")
        return self._config[found]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and field_for(name, self._config) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._config if self._only is None else self._only)

    def __len__(self) -> int:
        return len(self._config if self._only is None else self._only)


def build_for(into: Builder, config: Mapping[str, object]) -> BuiltModule:
    """The user's module for this config.

    Args:
        into: the module, which is copied; or a class or function that builds it: it is given what it asks for.
        config: the checkpoint's config, or its twin's.

    Raises:
        TargetError: it asks for what no field says, or fails.
    """
    if isinstance(into, nn.Module):
        try:
            copied = duplicate(into)
        except Exception as error:  # a module may hold anything
            message = f"the module cannot be copied: {type(error).__name__}: {error}"
            hint = "pass a function that builds it"
            where = place_of(type(into))
            raise TargetError(Fault(code=Code.BAD_TARGET, where=where, message=message, hint=hint)) from error
        return BuiltModule(module=_module(type(into), copied).to("cpu").eval(), given=True)
    maker: object = into
    if not callable(maker):
        message = f"{into!r} is no module, and nothing that builds one"
        hint = "pass a torch.nn.Module, a class, or a function that builds one"
        raise TargetError(Fault(code=Code.BAD_TARGET, message=message, hint=hint))
    made, asked, wished = _called(into, config)
    module = _module(into, made)
    return BuiltModule(module=module.to("cpu").eval(), asked=asked, wished=wished)


def _module(into: Callable[..., Any], made: object) -> nn.Module:
    """What a builder gave, if it is a module with weights that can be run."""
    message, hint = f"{_title(into)} gave {_said(made)}, expected a torch.nn.Module", ""
    if isinstance(made, type):
        hint = f"call it: return {made.__name__}(...)"
    elif made is None:
        hint = "is a return missing?"
    elif isinstance(made, tuple | list) and made and isinstance(made[0], nn.Module):
        hint = "return its first part alone"
    if isinstance(made, nn.Module):
        hint, message = "", f"{_title(into)} gave {type(made).__name__}, "
        tensors = [(name, one) for name, one in named_tensors(made) if not nn.parameter.is_lazy(one)]
        away = next((name for name, one in tensors if one.is_meta), None)
        empty = next(((name, list(one.shape)) for name, one in tensors if not one.numel()), None)
        if not tensors and not any(nn.parameter.is_lazy(one) for one in made.parameters()):
            message += "which has no weights"
        elif away is not None:
            message, hint = f"{message}whose {away} is on the device meta", "build it with values, on the CPU"
        elif empty is not None:
            message += f"whose {empty[0]} is of no size, {empty[1]}"
            hint = "a size that it was built with is 0"
        else:
            return made
    if inspect.iscoroutine(made):
        made.close()
    raise TargetError(Fault(code=Code.BAD_TARGET, where=place_of(into), message=message, hint=hint))


def _said(made: object) -> str:
    if made is None:
        return "None"
    if isinstance(made, type):
        return f"the class {made.__name__}"
    kind = type(made).__name__
    return f"{'an' if kind[:1] in 'aeiou' else 'a'} {kind}"


def _title(into: object) -> str:
    return str(getattr(into, "__name__", type(into).__name__))


def _called(into: Callable[..., Any], config: Mapping[str, object]) -> tuple[Any, dict[str, str], tuple[str, ...]]:
    """What the builder gives, what it asked for, and what it asked for in vain."""
    parameters = _parameters(into)
    required = [name for name, one in parameters.items() if one.default is one.empty]
    asked, wished = _arguments(parameters, config)
    unknown = [name for name in required if name not in asked]
    if "config" in parameters or (len(required) == 1 and unknown):
        fields = Fields(config)
        name = "config" if "config" in parameters else required[0]
        made = _tried(into, fields, parameters[name])
        return made[0], made[1], ()
    if unknown:
        listed = ", ".join(map(repr, unknown))
        message = f"{_title(into)} asks for {listed}, and no field of config.json is known by that"
        hint = told(
            called="give it a default, or pass a function that builds the module from the config, or the built module",
            typed="give it a default, or name a function with one parameter, config, that builds the module",
        )
        raise TargetError(Fault(code=Code.BAD_TARGET, where=place_of(into), message=message, hint=hint))
    return _guarded(into, **{name: config[theirs] for name, theirs in asked.items()}), asked, wished


def _tried(into: Callable[..., Any], fields: Fields, parameter: inspect.Parameter) -> tuple[Any, dict[str, str]]:
    """Call with a config; should it be handed on as ``**config``, once more with what is asked for behind."""
    positional = parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    try:
        with torch.device("cpu"):
            made = into(fields) if positional else into(**{parameter.name: fields})
    except TypeError as error:
        names = _behind(into, str(error))
        if names is None:
            raise _failed(error) from error
        fields = Fields(fields._config, tuple(_arguments(names, fields._config)[0]))
        made = _guarded(into, fields) if positional else _guarded(into, **{parameter.name: fields})
    except (Exception, SystemExit) as error:
        raise _failed(error) from error
    return made, dict(fields._asked)


def _behind(into: Callable[..., Any], said: str) -> dict[str, inspect.Parameter] | None:
    """The parameters of what ``into`` calls, which refused an argument; None when the error is another one."""
    found = re.match(r"(?:[\w<>]+\.)*?(\w+)(?:\.__init__)?\(\) (?:got an unexpected|missing)", said)
    if found is None:
        return None
    around = {**getattr(into, "__globals__", {}), **vars(inspect.getmodule(into) or object)}
    callee = around.get(found.group(1))
    return _parameters(callee) if callable(callee) else None


def _arguments(
    parameters: Mapping[str, inspect.Parameter], config: Mapping[str, object]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The config's field for each parameter that one is known for, and the sizes that none is known for."""
    found: dict[str, str] = {}
    wished = []
    for name, one in parameters.items():
        required = one.default is one.empty
        role = role_of(name)
        theirs = field_for(name, config, tuple(parameters))
        if theirs is not None and (required or role in _SIZES or type(one.default) is type(config[theirs])):
            found[name] = theirs
        elif not required and role in _SIZES and one.default is not None:
            wished.append(name)
    return found, tuple(wished)


def _parameters(make: Callable[..., object]) -> dict[str, inspect.Parameter]:
    try:
        listed = list(inspect.signature(make).parameters.values())
    except (TypeError, ValueError):  # some callables written in C have none
        return {}
    return {one.name: one for one in listed if one.kind not in {one.VAR_POSITIONAL, one.VAR_KEYWORD}}


def _guarded(into: Callable[..., Any], *args: object, **kwargs: object) -> Any:  # whatever it builds
    try:
        with torch.device("cpu"):
            return into(*args, **kwargs)
    except (Exception, SystemExit) as error:
        raise _failed(error) from error


def _failed(error: BaseException) -> PortingError:
    if isinstance(error, PortingError):
        return error
    said = " ".join(str(error).split())
    message, hint = f"building the module failed: {type(error).__name__}: {said}", f"at {users_line(error)}"
    if is_device_error(error):
        hint += "; leave it on the CPU, where it is run"
    return TargetError(Fault(code=Code.BAD_TARGET, message=message, hint=hint))
