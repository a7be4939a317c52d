"""The arguments of a user's builder: the config's fields under the builder's names and in its types.

A builder is a class or a function that makes a module. It may take each field as a parameter, or one config that it
reads by key or by attribute, or an object of a class of its own. What a checkpoint's config does not have may stand in
the builder's own file, as the default of that class or as an entry of a dictionary.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import get_args, get_origin, get_type_hints

import torch
from torch import nn

from porting.build import Bounds, bounded, one_line
from porting.errors import Code, Fault, Message, Wording, nearest
from porting.frames import is_users_module, users_attribute, users_line
from porting.target import TargetError, signature_parameters


class UnknownFieldError(AttributeError, KeyError):
    """A builder reads a field that its config does not have."""

    def __init__(self, field: str) -> None:
        super().__init__(f"the config has no field {field!r}")
        self.field = field

    def __str__(self) -> str:
        return f"the config has no field {self.field!r}"


class Named(dict[str, object]):
    """A config whose fields can be read as items and as attributes.

    A field that holds further ones is such a config as well, and the name of a dtype is the dtype.

    >>> Named(width=4).width
    4
    >>> Named({"attention": {"heads": 2}, "dtype": "float32"}).attention.heads
    2
    """

    __slots__ = ("__dict__", "_into")  # a builder may keep what it computes as attributes, and look through them

    def __init__(self, fields: Mapping[str, object] | None = None, into: object = None, **more: object) -> None:
        """Take the fields, and the builder, whose files give the values of other fields."""
        given = {**(fields or {}), **more}
        super().__init__({name: _nested(name, value, into) for name, value in given.items()})
        self._into = into

    def __missing__(self, name: str) -> object:
        try:
            return own_value(self._into, name, self, self)
        except LookupError:
            raise UnknownFieldError(name) from None

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def to_dict(self) -> dict[str, object]:
        """All fields, as a config of transformers gives them.

        >>> Named({"attention": {"heads": 2}}).to_dict()
        {'attention': {'heads': 2}}
        """
        return dict(self)


def _nested(name: str, value: object, into: object) -> object:
    return Named(value, into) if isinstance(value, dict) else typed(name, value)


def typed(name: str, value: object) -> object:
    """Convert a field's value for a builder: the name of a dtype becomes the dtype.

    >>> typed("dtype", "float32"), typed("activation", "float32")
    (torch.float32, 'float32')
    """
    known = isinstance(value, str) and str(name).endswith("dtype")  # a field of a field may be numbered
    named = getattr(torch, str(value), None) if known else None
    return named if isinstance(named, torch.dtype) else value


def call(
    into: Callable[..., nn.Module],
    config: Callable[[], object],
    fields: Mapping[str, object],
    within: Bounds,
    stored: Mapping[str, object] | None = None,
) -> nn.Module:
    """Call a class or function with the arguments that its parameters name.

    One called ``config`` gets the config; otherwise each gets the field of its name; a single one that no field is
    named after gets the config.

    Args:
        stored: the checkpoint's own config, for messages; None where there is none.
    """
    try:
        with bounded(within):
            return _call_with_fields(into, config, fields)
    except KeyError as error:
        field = error.field if isinstance(error, UnknownFieldError) else error.args[0] if error.args else None
        if not isinstance(field, str) or field in fields:
            raise
        if field in (stored or {}):
            hint = f'add "{field}" = "{field}" to [config]'
        elif isinstance(error, UnknownFieldError):
            hint = (
                nearest(field, list(stored or {})) or 'add "the checkpoint\'s name of it" = "' + field + '" to [config]'
            )
        else:  # a dictionary of the builder's own
            raise
        message = (
            f"building the module reads the field {field!r} of the config, which the table's [config] does not give"
        )
        raise TargetError(
            Fault(code=Code.BAD_TARGET, message=message, hint=f"{hint}; at {users_line(error)}")
        ) from error


def config_class(into: Callable[..., object], parameter: str) -> type | None:
    """The class that a builder's parameter is annotated with, if it can be a config.

    Its own defaults are what a checkpoint does not say: ``multiple_of: int = 256``.
    """
    maker = inspect.unwrap(into)
    maker = maker.__init__ if isinstance(maker, type) else maker  # type: ignore[misc]  # of a class, not of an instance
    try:
        found = get_type_hints(maker).get(parameter)
    except Exception:  # noqa: BLE001  # an annotation may be any expression, of names that are nowhere
        return None
    kinds = [member for member in get_args(found) if member is not type(None)] if get_origin(found) else [found]
    kind = kinds[0] if len(kinds) == 1 else None
    if not isinstance(kind, type) or issubclass(kind, (Mapping, nn.Module)) or not parameters_of(kind):
        return None
    foreign = {"builtins", "typing", "types", "argparse", "abc", "transformers"}
    return None if kind.__module__.partition(".")[0] in foreign else kind


def _call_with_fields(
    into: Callable[..., nn.Module], config: Callable[[], object], fields: Mapping[str, object]
) -> nn.Module:
    parameters = parameters_of(into)
    if "config" in parameters:
        positional = parameters["config"].kind is inspect.Parameter.POSITIONAL_ONLY
        made = _as_annotated_class(into, "config", config())
        return into(made) if positional else into(config=made)
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    unknown = [name for name in required if name not in fields]
    if not unknown:
        given = {name: _nested(name, fields[name], into) for name in parameters if name in fields}
        return into(**{name: _as_annotated_class(into, name, value) for name, value in given.items()})
    if len(required) == 1 and parameters[required[0]].kind is not inspect.Parameter.KEYWORD_ONLY:
        return into(_as_annotated_class(into, required[0], config()))
    listed = ", ".join(repr(name) for name in unknown)
    message = f"{getattr(into, '__name__', into)!s} must be given {listed}, which the table's [config] does not have"
    hint = nearest(unknown[0], list(fields)) or Message(
        Wording(
            python="pass a function of the config, or the built module",
            command="name a function with one parameter, config",
        )
    )
    raise TargetError(Fault(code=Code.BAD_TARGET, message=message, hint=hint))


def _as_annotated_class(into: Callable[..., nn.Module], parameter: str, config: object) -> object:
    """Make the class that a parameter is annotated with from the fields, if they are enough."""
    kind = config_class(into, parameter)
    if kind is None or not isinstance(config, Named):
        return config
    needs = parameters_of(kind)
    if any(needed.default is needed.empty and name not in config for name, needed in needs.items()):
        return config
    made: object = kind(**{name: _as_annotated_class(kind, name, config[name]) for name in needs if name in config})
    return made


def own_value(into: object, name: str, known: Collection[str], config: object) -> object:
    """The value in a builder's own files for a field that the checkpoint's config does not have.

    Code that was written after a book keeps it beside the model: ``class Config: drop_rate = 0.1``, an entry of
    ``CONFIG = {"drop_rate": 0.1}``, a property of a config class.

    Args:
        known: the fields that the config has, in the builder's words; what has none of them is not a config of it.
        config: what the builder reads from, of which a property is computed.

    Returns:
        The value.
    """
    found: list[object] = []
    for candidate in _possible_configs(into):
        values = _config_values(candidate)
        if name in values and (not known or values.keys() & set(known)):
            value = values[name]
            found.append(value.fget(config) if isinstance(value, property) and value.fget else value)
    if not found or any(value != found[0] for value in found[1:]):
        raise LookupError(name)
    return found[0]


def _possible_configs(into: object) -> Iterator[object]:
    """Possible configs in the builder's file, and in the user's files that it imports names from."""
    own = sys.modules.get(getattr(inspect.unwrap(into), "__module__", "") if callable(into) else "")
    named = [users_attribute(value, "__module__") for value in vars(own).values()] if own is not None else []
    for module in dict.fromkeys([own, *(sys.modules.get(str(module_name)) for module_name in named)]):
        if module is not None and is_users_module(module):
            for value in vars(module).values():
                yield value
                yield from (inner for inner in value.values() if isinstance(inner, dict)) if type(value) is dict else ()


def _config_values(config: object) -> Mapping[str, object]:
    """The fields and values of a config class, a config or a dictionary."""
    if isinstance(config, dict):
        return {name: value for name, value in config.items() if isinstance(name, str)}
    kind = config if isinstance(config, type) else type(config)
    if issubclass(kind, nn.Module) or not is_users_module(sys.modules.get(kind.__module__)):
        return {}
    defaults = {
        name: parameter.default
        for name, parameter in parameters_of(kind).items()
        if parameter.default is not parameter.empty
    }
    fixed = dict(vars(kind))
    own_attributes = {} if isinstance(config, type) else {**users_attribute(config, "__dict__", {})}
    return {name: value for name, value in {**fixed, **defaults, **own_attributes}.items() if isinstance(value, _PLAIN)}


_PLAIN = (bool, int, float, str, tuple, list, property, type(None))


def make_config(make: Callable[..., object], fields: Mapping[str, object], *, where: str) -> object:
    """Make the target's config from its fields."""
    parameters = parameters_of(make)
    open_ended = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature_parameters(make).values()
    )
    unknown = [] if open_ended else [name for name in fields if name not in parameters]
    if unknown:
        name = getattr(make, "__name__", str(make))
        raise TargetError(
            Fault(
                code=Code.BAD_TARGET,
                message=f"the table's [config] gives {field!r}, and {name} has no such field",
                hint=nearest(field, list(parameters)),
            )
            for field in unknown
        )
    try:
        return make(**fields)
    except (TypeError, ValueError) as error:
        raise TargetError(Fault(code=Code.BAD_TARGET, where=where, message=one_line(error))) from error


def parameters_of(make: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """The parameters of a class or a function by name, except ``*args`` and ``**kwargs``."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: one for name, one in signature_parameters(make).items() if one.kind not in variadic}
