"""The call that was made, as it would be typed again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from porting.checkpoint import Checkpoint
from porting.notation.table import Table


def spelled_call(name: str, function: Callable[..., object], given: Mapping[str, object]) -> str:
    """The call of a function, without the arguments that have their default.

    Args:
        name: what the function is called by its users.
        function: for its signature.
        given: every argument; ``progress`` changes nothing and is left out.
    """
    words = []
    in_order = True  # until one is left out, arguments need no names
    for parameter in inspect.signature(function).parameters.values():
        value = given[parameter.name]
        if parameter.name == "progress" or value is parameter.default or value == parameter.default:
            in_order = False
        else:
            named = not in_order or parameter.kind is parameter.KEYWORD_ONLY
            words.append(f"{parameter.name}={_spelled(value)}" if named else _spelled(value))
    return f"{name}({', '.join(words)})"


def _spelled(value: object) -> str:
    if isinstance(value, Checkpoint | Table | Path):
        return repr(value.location if isinstance(value, Checkpoint) else str(getattr(value, "where", value)))
    if isinstance(value, tuple | list):
        items = [_spelled(one) for one in value]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if value is None or isinstance(value, str | int | float | torch.dtype):
        return repr(value)
    named = value if inspect.isfunction(value) or isinstance(value, type) else type(value)
    module = "" if named.__module__ in ("__main__", "builtins") else f"{named.__module__}."
    return f"{module}{named.__qualname__}" + ("" if named is value else "(...)")
