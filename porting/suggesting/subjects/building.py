"""Building the user's module from a config that it has never been told about.

A builder asks for what it needs: by the names of its parameters, or by the keys and attributes that it reads from a
config.  What it asks for is looked up by role, and remembered: that is the table's [config].
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import nn

from porting.build import Bounds, bounded, build, refuse_empty
from porting.builder_config import Named, UnknownFieldError, config_class, own_value, parameters_of, typed
from porting.duplicate import duplicate
from porting.errors import Code, Fault, Message, PortingError, Wording
from porting.frames import place_of, users_line
from porting.notation.field import value_of
from porting.printable import text_of
from porting.suggesting.subjects.argument_names import constant_arguments
from porting.suggesting.subjects.config_fields import (
    Role,
    composed_role,
    field_for,
    is_section,
    normal,
    numbers_by_stage,
    role_of,
)
from porting.target import TargetError, in_eval_mode, named_tensors, with_arguments
from porting.tracing.devices import is_device_error

Builder = nn.Module | Callable[..., nn.Module]

SIZES = frozenset({
    Role.HIDDEN, Role.DEPTH, Role.HEADS, Role.GROUPS, Role.HEAD_SIZE, Role.INNER, Role.VOCABULARY, Role.POSITIONS,
    Role.SEGMENTS, Role.CHANNELS, Role.IMAGE, Role.PATCH, Role.EPS,
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BuiltModule:
    """A module of the user's, built.

    Attributes:
        module: it, in eval mode, on the CPU.
        asked: what the builder asked for -> the config's field that it got.
        kept: what the builder has a default of its own for, which it kept.
        given: whether the module was passed built, so that its sizes are what they are.
        constants: arguments of its forward that no batch has, with the values that they are given in each call.
    """

    module: nn.Module
    asked: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, object] = field(default_factory=dict)
    given: bool = False
    constants: Mapping[str, object] = field(default_factory=dict)

    @property
    def read(self) -> dict[str, str]:
        """What the builder asked for, and what the module has read since of a config that it kept."""
        held = (one for part in self.module.modules() for one in vars(part).values() if isinstance(one, Fields))
        return {name: theirs for one in held for name, theirs in one.asked(whole=True).items()} | {**self.asked}


class Fields(Mapping[str, Any]):
    """A config that answers to the names of others, read by key or by attribute, and remembers what was read.

    A name under which a config may hold further fields (``config.attention.heads``) gives a config of its own, which
    remembers what is read of it as ``attention.heads``.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        given: Mapping[str, str],
        only: tuple[str, ...] | None = None,
        into: object = None,
        *,
        within: str = "",
        nested: bool = True,
    ) -> None:
        """Take the checkpoint's config.

        Args:
            given: fields of names that the caller knows.
            only: the names to have, for a builder that is given all as keywords.
            into: what builds the module, whose own files say what the config does not.
            within: the name under which this config stands inside another.
            nested: whether a name may stand for a config of its own.
        """
        self._config = config
        self._into = into
        self._given = given
        self._only = only
        self._within = within
        self._nested = nested
        self._asked: dict[str, str] = {}
        self.kept: dict[str, object] = {}
        self._sections: dict[str, Fields] = {}

    def _find(self, name: str) -> str | None:
        given = self._given.get(f"{self._within}.{name}" if self._within else name)
        found = given or _within_section(self._within, name, self._config, self._only or tuple(self._asked))
        if found is not None:
            self._asked[name] = found
        return found

    def __getitem__(self, name: str) -> Any:  # a config's values are of any type
        found = self._find(name)
        if found is not None:
            return typed(name, _value(self._config, found))
        if name in self._sections:
            return self._sections[name]
        if self._nested and is_section(name):
            path = f"{self._within}.{name}" if self._within else name
            self._sections[name] = Fields(self._config, self._given, into=self._into, within=path)
            return self._sections[name]
        try:
            self.kept[name] = own_value(self._into, name, self._asked, self)
        except LookupError:
            raise UnknownFieldError(f"{self._within}.{name}" if self._within else name) from None
        return self.kept[name]

    def asked(self, *, whole: bool = False) -> dict[str, str]:
        """The fields that were read: their names, after the names of what holds them -> the config's field.

        Args:
            whole: begin the names with what holds this config itself.
        """
        inner = (
            (f"{name}.{ours}", theirs) for name, one in self._sections.items() for ours, theirs in one.asked().items()
        )
        begin = f"{self._within}." if whole and self._within else ""
        return {f"{begin}{name}": theirs for name, theirs in (*self._asked.items(), *inner)}

    def unread(self) -> list[str]:
        """Configs inside this one of which nothing was read."""
        return [name for name, one in self._sections.items() if not one.asked()]

    def __getattr__(self, name: str) -> Any:  # as above
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def to_dict(self) -> dict[str, Any]:  # as above
        """All fields, as a config of transformers gives them."""
        return dict(self._config)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._given or field_for(name, self._config) is not None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._config if self._only is None else self._only)

    def __len__(self) -> int:
        return len(self._config if self._only is None else self._only)


def _within_section(
    within: str,
    name: str,
    config: Mapping[str, object],
    others: tuple[str, ...] = (),
    staged: bool | None = None,
) -> str | None:
    """The config's field for a name inside a section: ``hidden_dim`` of ``mlp`` is the inner size."""
    section = within.rpartition(".")[2]
    parts = [one for one in within.split(".") if one in ("encoder", "decoder")]
    spelled = [f"{one}_{name}" for one in (section, *parts) if one]
    fields = (field_for(spelling, config, others, staged=staged) for spelling in (*spelled, name))
    return next((found for found in fields if found is not None), None)


def _takes_stages(parameter: inspect.Parameter) -> bool | None:
    """Whether a parameter takes a number for each stage, by its default or its annotation; None if neither tells."""
    if parameter.default is not parameter.empty and parameter.default is not None:
        return isinstance(parameter.default, list | tuple)
    annotated = parameter.annotation
    text = annotated if isinstance(annotated, str) else str(getattr(annotated, "__name__", annotated))
    if annotated is parameter.empty or not text:
        return None
    several = re.search(r"\b(list|tuple|sequence|iterable)\b", text, re.IGNORECASE)
    return bool(several) if several or re.search(r"\b(int|float)\b", text) else None


def _value(config: Mapping[str, object], field: str) -> Any:  # as above
    """The field's value; one that is spelled as arithmetic is computed, and one that holds fields has attributes."""
    if (fixed := fixed_value(field)) is not None:
        return fixed
    value = config[field] if field in config else value_of(config, field)
    return Named(value) if type(value) is dict else value


def fixed_value(field: str) -> bool | int | None:
    """The value that is given in the place of a field: a switch, or a whole number; None for the name of a field.

    >>> fixed_value("true"), fixed_value("1"), fixed_value("hidden_size")
    (True, 1, None)
    """
    return int(field) if field.isdecimal() else {"true": True, "false": False}.get(field)


_GIVEN = "_fields_by_name"

_Made = tuple[Any, dict[str, str], dict[str, object]]
"""The result of a builder, the fields that it read, and its own defaults that it kept."""


class UnknownSizesError(TargetError):
    """A builder asks for what no field of the config is known by.

    Attributes:
        names: what it asks for.
        asked: what else it asks for -> the config's field that it got.
        read: it reads them from a config, so that they may be of any kind and no sizes.
    """

    def __init__(self, fault: Fault, names: Sequence[str], asked: Mapping[str, str], *, read: bool) -> None:
        super().__init__(fault)
        self.names = tuple(names)
        self.asked = dict(asked)
        self.read = read


def with_fields(into: Builder, fields: Mapping[str, object], config: Mapping[str, object]) -> Builder:
    """A builder with the config fields of parameters whose names are not understood.

    Args:
        into: what builds the module.
        fields: the name that it asks for -> the config's field, ``{"D": "hidden_size"}``.
        config: the checkpoint's.

    Returns:
        A builder with the same parameters.

    Raises:
        TargetError: a field that the config does not have, or a module that is built already.
    """
    if not fields:
        return into
    faults = []
    if isinstance(into, nn.Module):
        faults.append(Fault(code=Code.BAD_TARGET, message="a module that is built already takes no config"))
    fields = {ours: str(theirs).lower() if isinstance(theirs, bool) else theirs for ours, theirs in fields.items()}
    for ours, theirs in fields.items():
        if isinstance(theirs, str) and fixed_value(theirs) is not None:
            continue
        if not isinstance(theirs, str):
            message = f"{ours!r} is to be {theirs!r}, where the name of a field of config.json is expected"
            same = sorted(name for name, value in config.items() if value == theirs and type(value) is type(theirs))
            hint = f"{theirs!r} is the value of {', '.join(same)} there" if same else "as config={'D': 'hidden_size'}"
            faults.append(Fault(code=Code.BAD_TARGET, message=message, hint=hint))
        elif theirs not in config and value_of(config, theirs) is None:
            near = difflib.get_close_matches(theirs, list(config), 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(config))}"
            message = f"{ours!r} is to be {theirs!r}, which config.json does not have"
            faults.append(Fault(code=Code.BAD_TARGET, message=message, hint=hint))
    if faults:
        raise TargetError(*faults)
    maker: Callable[..., nn.Module] = into

    @wraps(maker)
    def build(*args: object, **kwargs: object) -> nn.Module:
        return maker(*args, **kwargs)

    setattr(build, _GIVEN, dict(fields))
    return build


def named_fields(into: Builder) -> Mapping[str, str]:
    """The fields that :func:`with_fields` gave a builder."""
    given: Mapping[str, str] = getattr(into, _GIVEN, {})
    return given


def defaults_of(into: Builder) -> dict[str, object]:
    """The defaults of a builder's parameters, or of the fields of the config that it takes."""
    if isinstance(into, nn.Module):
        return {}
    parameters = parameters_of(into)
    name = next((one for one in ("config", *parameters) if one in parameters), "")
    kind = config_class(into, name) if name else None
    taken = parameters if kind is None else parameters_of(kind)
    return {name: one.default for name, one in taken.items() if one.default is not one.empty}


def fields_asked(into: Builder, config: Mapping[str, object]) -> dict[str, str]:
    """The config's field for each parameter of a builder that one is known for, whether it can be built or not."""
    return {} if isinstance(into, nn.Module) else _arguments(parameters_of(into), config, named_fields(into))


def with_own_options(into: Builder, config: Mapping[str, object]) -> Builder | None:
    """A builder that keeps what its parameters have by default for options, such as ``activation="tanh"``.

    A config has words of its own for the same options, which the module may not know; and a dropout of 0, with which a
    module may have no dropout at all and call it nevertheless.

    Args:
        into: what builds the module.
        config: the checkpoint's.

    Returns:
        A builder without these parameters; None where the config gives none of them.
    """
    if isinstance(into, nn.Module):
        return None
    maker: Callable[..., nn.Module] = into
    parameters = parameters_of(maker)
    filled = _arguments(parameters, config, named_fields(into))
    options = {
        name
        for name, field in filled.items()
        if type(parameters[name].default) is str
        or (type(parameters[name].default) is float and role_of(field) is Role.DROPOUT)
    } - named_fields(into).keys()
    if not options:
        return None

    @wraps(maker)
    def build(*args: object, **kwargs: object) -> nn.Module:
        return maker(*args, **kwargs)

    left = [one for name, one in parameters.items() if name not in options]
    build.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]  # inspect reads it
    return build


def _given(into: Builder, config: Mapping[str, object]) -> dict[str, str]:
    """The fields that :func:`with_fields` gave a builder, of those that this config has."""
    given = named_fields(into).items()

    def has(field: str) -> bool:
        return fixed_value(field) is not None or field in config or value_of(config, field) is not None

    return {ours: theirs for ours, theirs in given if has(theirs)}


def build_for(into: Builder, config: Mapping[str, object]) -> BuiltModule:
    """The user's module for this config.

    Args:
        into: the module, which is copied; or a class or function that builds it: it is given what it asks for.
        config: the checkpoint's config, or its twin's.

    Raises:
        TargetError: it asks for what no field says, or fails.
    """
    given = _given(into, config)
    if isinstance(into, nn.Module):
        try:
            copied = duplicate(into)
        except Exception as error:  # a module may hold anything
            message = f"the module cannot be copied: {type(error).__name__}: {text_of(error)}"
            hint = "pass a function that builds it"
            where = place_of(type(into))
            raise TargetError(Fault(code=Code.BAD_TARGET, where=where, message=message, hint=hint)) from error
        return _built(_module(type(into), copied), given=True)
    maker: object = into
    if not callable(maker):
        message = f"{into!r} is neither a module nor something that builds one"
        hint = "pass a torch.nn.Module, a class, or a function that builds one"
        raise TargetError(Fault(code=Code.BAD_TARGET, message=message, hint=hint))
    made, asked, kept = _called(into, config, given)
    return _built(_module(into, made), asked=asked, kept=kept)


def _built(module: nn.Module, **more: Any) -> BuiltModule:  # the other fields
    refuse_empty(module)
    constants = constant_arguments(module)
    return BuiltModule(module=with_arguments(in_eval_mode(module.to("cpu")), constants), constants=constants, **more)


def shapes_for(into: Callable[..., Any], config: Mapping[str, object], within: Bounds) -> dict[str, tuple[int, ...]]:
    """The shapes of the module that a builder makes for a config, whose parameters are given no values.

    Args:
        into: a class or function that builds it.
        config: with the checkpoint's own sizes.
        within: how large it may become.

    Returns:
        The shape of each parameter and buffer that has one; lazy ones have none yet.

    Raises:
        TargetError: it asks for what no field says, or fails.
    """
    given = _given(into, config)
    try:
        made = build(lambda: _called(into, config, given)[0], within)
    except PortingError:  # it computes with values, or says by itself where its tensors are
        with bounded(within):
            made = _called(into, config, given)[0]
    tensors = ((name, one) for name, one in named_tensors(made) if not nn.parameter.is_lazy(one))
    return {name: tuple(one.shape) for name, one in tensors}


def _module(into: Callable[..., Any], made: object) -> nn.Module:
    """The result of a builder, if it is a module with weights that can be run."""
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


def _called(into: Callable[..., Any], config: Mapping[str, object], given: Mapping[str, str]) -> _Made:
    """Call the builder: its result, the fields that it read, and its defaults for the rest."""
    parameters = parameters_of(into)
    required = [name for name, one in parameters.items() if one.default is one.empty]
    asked = _arguments(parameters, config, given)
    unknown = [name for name in required if name not in asked]
    if "config" in parameters or (len(required) == 1 and unknown):
        fields = Fields(config, given, into=into)
        name = "config" if "config" in parameters else required[0]
        kind = config_class(into, name)
        own = _own_config(kind, config, given)
        if own is not None and kind is not None:
            keyword = parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
            made = _guarded(into, **{name: own[0]}) if keyword else _guarded(into, own[0])
            return made, own[1], {name: one.default for name, one in parameters_of(kind).items() if name not in own[1]}
        return _tried(into, fields, parameters[name])
    if unknown:
        raise _unknown(into, unknown, config, asked)
    kept = {name: one.default for name, one in parameters.items() if name not in asked}
    parts = {name: _Part(into, name, theirs, config, given) for name, theirs in asked.items() if _holds(config, theirs)}
    values = {name: typed(name, _value(config, theirs)) for name, theirs in asked.items() if name not in parts}
    try:
        with _device():
            made = into(**values, **{name: part.made for name, part in parts.items()})
    except UnknownFieldError as error:
        raise _unknown(into, [error.field], config, asked, read=True) from error
    except (Exception, SystemExit) as error:
        raise _failed(error) from error
    for name, part in parts.items():
        asked = {**{one: theirs for one, theirs in asked.items() if one != name}, **part.asked()}
        kept |= {f"{name}.{one}": value for one, value in part.kept().items()}
    return made, asked, kept


def _holds(config: Mapping[str, object], theirs: str) -> bool:
    """Whether a field holds further ones, as ``vision_config`` does."""
    return isinstance(config.get(theirs), dict)


class _Part:
    """A config inside the checkpoint's that a builder takes by itself, in its own words.

    Attributes:
        made: what the builder is given: its own class if the parameter is annotated with one.
    """

    def __init__(
        self, into: Callable[..., Any], name: str, theirs: str, config: Mapping[str, object], given: Mapping[str, str]
    ) -> None:
        inner = config[theirs]
        self._name, self._theirs = name, theirs
        self._inner: dict[str, object] = dict(inner) if isinstance(inner, dict) else {}
        fields = {one: value for one, value in config.items() if not isinstance(value, dict)} | self._inner
        own = {one: theirs for one, theirs in given.items() if one.startswith(f"{name}.")}
        kind = config_class(into, name)
        self._own = _own_config(kind, fields, own, name)
        self._kind = kind if self._own is not None else None
        self.made: object = self._own[0] if self._own is not None else Fields(fields, own, into=into, within=name)

    def asked(self) -> dict[str, str]:
        """The fields that were read: the builder's name -> the checkpoint's field."""
        found = self.made.asked() if isinstance(self.made, Fields) else self._own[1] if self._own is not None else {}
        return {f"{self._name}.{ours}": self._spelled(theirs) for ours, theirs in found.items()}

    def _spelled(self, field: str) -> str:
        """A field as a table spells it: ``vision_config.hidden_size // vision_config.num_attention_heads``."""
        return re.sub(
            r"[A-Za-z_]\w*", lambda one: f"{self._theirs}.{one[0]}" if one[0] in self._inner else one[0], field
        )

    def kept(self) -> dict[str, object]:
        """The fields for which the builder's own value was kept."""
        if isinstance(self.made, Fields):
            return self.made.kept
        asked = self._own[1] if self._own is not None else {}
        parameters = parameters_of(self._kind) if self._kind is not None else {}
        return {name: one.default for name, one in parameters.items() if name not in asked}


def _own_config(
    kind: type | None, config: Mapping[str, object], given: Mapping[str, str], within: str = ""
) -> tuple[object, dict[str, str]] | None:
    """A config of the user's class, and what it has of the checkpoint's; None where it needs what nothing says."""
    if kind is None:
        return None
    values: dict[str, object] = {}
    asked: dict[str, str] = {}
    parameters = parameters_of(kind)
    for ours, theirs in _arguments(parameters, config, given, within).items():
        values[ours], asked[ours] = typed(ours, _value(config, theirs)), theirs
    for ours in parameters.keys() - values.keys():
        inner = _own_config(config_class(kind, ours), config, given, f"{within}.{ours}" if within else ours)
        if inner is not None and inner[1]:
            values[ours] = inner[0]
            asked.update({f"{ours}.{name}": theirs for name, theirs in inner[1].items()})
    if any(one.default is one.empty and ours not in values for ours, one in parameters.items()):
        return None
    return _guarded(kind, **values), asked


def _unknown(
    into: Callable[..., Any],
    names: Sequence[str],
    config: Mapping[str, object],
    asked: Mapping[str, str],
    *,
    read: bool = False,
) -> UnknownSizesError:
    """The error for parameters that match no field of the config; names the option that gives them."""
    listed = ", ".join(map(repr, names))
    message = f"{_title(into)} asks for {listed}, and no field of config.json is known by that"
    sizes = [name for name, value in config.items() if isinstance(value, int) and not isinstance(value, bool)]
    example = next((one for one in sizes if role_of(one) is Role.HIDDEN), "hidden_size")
    first = next(iter(names))
    config_option = Wording(
        python=f"config={{{first!r}: {example!r}, ...}}; or give it a default, or pass the built module",
        command=f"{' '.join(f'--config {one}=FIELD' for one in names)}, such as {first}={example}",
    )
    whole = f"; its whole numbers are {', '.join(sorted(sizes))}" if sizes else ""
    hint = Message("say which: ", config_option, whole)
    fault = Fault(code=Code.BAD_TARGET, where=place_of(into), message=message, hint=hint)
    return UnknownSizesError(fault, names, asked, read=read)


def _tried(
    into: Callable[..., Any], fields: Fields, parameter: inspect.Parameter
) -> tuple[Any, dict[str, str], dict[str, object]]:
    """Call with a config; once more without configs inside it, where nothing was read of one."""
    try:
        found = _with_config(into, fields, parameter)
        if not fields.unread():
            return found
    except PortingError:
        if not fields.unread():
            raise
    flat = Fields(fields._config, fields._given, fields._only, into, nested=False)
    return _with_config(into, flat, parameter)


def _with_config(
    into: Callable[..., Any], fields: Fields, parameter: inspect.Parameter
) -> tuple[Any, dict[str, str], dict[str, object]]:
    """Call with a config; should it be handed on as ``**config``, once more with what is asked for behind."""
    positional = parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    try:
        with _device():
            made = into(fields) if positional else into(**{parameter.name: fields})
    except TypeError as error:
        names = _behind(into, text_of(error))
        if names is None:
            raise _failed(error) from error
        asked = _arguments(names, fields._config, fields._given)
        unknown = [name for name, one in names.items() if one.default is one.empty and name not in asked]
        if unknown and _was_given(text_of(error), fields):
            raise _unknown(into, unknown, fields._config, asked) from error
        fields = Fields(fields._config, fields._given, tuple(asked), into)
        made = _guarded(into, fields) if positional else _guarded(into, **{parameter.name: fields})
    except UnknownFieldError as error:
        raise _unknown(into, [error.field], fields._config, fields.asked(), read=True) from error
    except (Exception, SystemExit) as error:
        raise _failed(error) from error
    return made, fields.asked(), fields.kept


def _was_given(said: str, fields: Fields) -> bool:
    """Whether what refused an argument was given the config, and not something of its own."""
    found = re.search(r"unexpected keyword argument '(\w+)'", said)
    return found is None or found.group(1) in set(fields)


def _behind(into: Callable[..., Any], said: str) -> dict[str, inspect.Parameter] | None:
    """The parameters of what ``into`` calls, which refused an argument; None when the error is another one."""
    found = re.match(r"(?:[\w<>]+\.)*?(\w+)(?:\.__init__)?\(\) (?:got an unexpected|missing)", said)
    if found is None:
        return None
    around = {**getattr(into, "__globals__", {}), **vars(inspect.getmodule(into) or object)}
    callee = around.get(found.group(1))
    foreign = str(getattr(callee, "__module__", "")).partition(".")[0] == "torch"
    return parameters_of(callee) if callable(callee) and not foreign else None


def _arguments(
    parameters: Mapping[str, inspect.Parameter],
    config: Mapping[str, object],
    given: Mapping[str, str],
    within: str = "",
) -> dict[str, str]:
    """The config's field for each parameter that one is known for."""
    found: dict[str, str] = {}
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty
        role = role_of(name) or composed_role(name)
        path = f"{within}.{name}" if within else name
        staged = _takes_stages(parameter)
        theirs = given.get(path) or _within_section(within, name, config, tuple(parameters), staged)
        if theirs is None and is_section(name) and type(parameter.default) is int:  # a size that is called by its part
            theirs = field_for(f"{name}_size", config, tuple(parameters), staged=False)
        if theirs is None:
            continue
        theirs = _for_each_side(theirs, parameter, config)
        value = _value(config, theirs)
        alike = numbers_by_stage(value) if staged else type(parameter.default) is type(value)
        # None: as the checkpoint has it, if the name says what it is: norm_layer is no layer_norm_eps, but a class. A
        # ratio of two sizes that may be None is a factor that may be left out.
        named = role is not None or normal(name) == normal(theirs.rpartition(".")[2])
        alike = alike or (parameter.default is None and named and "//" not in theirs and type(value) in {int, float})
        numbers = {type(parameter.default), type(value)} == {int, float}  # theta: float = 100000
        alike = alike or (named and numbers and "//" not in theirs)
        if path in given or required or role in SIZES or alike:
            found[name] = theirs
    return found


def _for_each_side(theirs: str, parameter: inspect.Parameter, config: Mapping[str, object]) -> str:
    """The field of an image's or a patch's size, written twice where the builder takes a height and a width."""
    sided = isinstance(parameter.default, list | tuple) and len(parameter.default) == 2
    role = role_of(theirs.rpartition(".")[2])
    return f"[{theirs}, {theirs}]" if sided and role in _SIDED and type(_value(config, theirs)) is int else theirs


_SIDED = frozenset({Role.IMAGE, Role.PATCH})


def _device() -> torch.device:
    """The device on which a builder makes its parameters: the CPU, or meta where only the shapes are wanted."""
    return torch.device("meta" if torch.get_default_device().type == "meta" else "cpu")


def _guarded(into: Callable[..., Any], *args: object, **kwargs: object) -> Any:  # whatever it builds
    try:
        with _device():
            return into(*args, **kwargs)
    except (Exception, SystemExit) as error:
        raise _failed(error) from error


def _failed(error: BaseException) -> PortingError:
    if isinstance(error, PortingError):
        return error
    said = " ".join(text_of(error).split())
    message, hint = f"building the module failed: {type(error).__name__}: {said}", f"at {users_line(error)}"
    if is_device_error(error):
        hint += "; leave it on the CPU, where it is run"
    return TargetError(Fault(code=Code.BAD_TARGET, message=message, hint=hint))
