"""Strict JSON: every key once, text in UTF-8, nesting and numbers bounded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import NoReturn, TypeAlias

from porting.limits import DIGITS, charge, charge_text, reading

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


FLOAT, NOT_FINITE = "__float__", ("NaN", "Infinity", "-Infinity")
"""The key of such an object, as transformers writes it."""


class JsonError(ValueError):
    """A text is not valid JSON; the message says where and why."""


DEEPEST = 100
"""Levels of nested lists and objects: writing or visiting a value recurses."""

VALUES = (b",", b":", b"{", b"[")
"""Characters that begin a value, a key or a container; those inside of strings count too."""


def parse(raw: bytes, *, where: str = "a JSON text", allow_nan: bool = False, signed_zero: bool = False) -> Json:
    """Parse a JSON text in UTF-8.

    Args:
        allow_nan: take ``NaN`` and ``Infinity``, which Python writes and no standard knows, and the objects that
            transformers writes for them, ``{"__float__": "Infinity"}``.
        signed_zero: take ``-0`` for the number -0.0, which is not whole, as the readers of safetensors do.

    >>> parse(b'{"a": [1, 2]}', where="a text")
    {'a': [1, 2]}
    """
    charge_text(raw, where=where)
    charge("objects", sum(map(raw.count, VALUES)), where=where)
    if raw.startswith(b"\xef\xbb\xbf"):
        raise JsonError("it starts with a byte-order mark")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError(f"not UTF-8 at byte {error.start}") from error
    constants: Callable[[str], float] = float if allow_nan else _refuse_constant
    hook = _or_float if allow_nan else _unique
    try:
        with reading():
            value: Json = json.loads(
                text, object_pairs_hook=hook, parse_constant=constants, parse_int=_signed if signed_zero else _whole
            )
            _require_flat(value)
    except json.JSONDecodeError as error:
        raise JsonError(f"not JSON at character {error.pos}: {error.msg}") from error
    except RecursionError as error:
        raise JsonError("nested too deeply") from error
    except JsonError:
        raise
    return value


def _require_flat(value: Json) -> None:
    """Raises: JsonError when more than :data:`DEEPEST` lists and objects lie within each other."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
    if level:
        raise JsonError("nested too deeply")


def _whole(text: str) -> int:
    if len(text) > DIGITS:
        raise JsonError(f"it holds a whole number of {len(text)} digits; at most {DIGITS} are read")
    return int(text)


def _signed(text: str) -> int | float:
    return -0.0 if text == "-0" else _whole(text)


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                shown = key if len(key) <= 120 else f"{key[:60]}…{key[-60:]}"
                raise JsonError(f"the key {shown!a} stands twice in one object")
            seen.add(key)
    return value


def _or_float(pairs: list[tuple[str, Json]]) -> Json:
    """The float that an object stands for; any other object as it is."""
    (key, value), *more = pairs or [("", None)]
    if key == FLOAT and not more and isinstance(value, str) and value in NOT_FINITE:
        return float(value)
    return _unique(pairs)


def encoded(value: object) -> object:
    """Encode NaN and infinities as objects, as transformers writes them.

    >>> encoded({"time_step_limit": [0.0, float("inf")]})
    {'time_step_limit': [0.0, {'__float__': 'Infinity'}]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: next(name for name in NOT_FINITE if str(float(name)) == str(value))}
    if isinstance(value, dict):
        return {name: encoded(item) for name, item in value.items()}
    return [encoded(item) for item in value] if isinstance(value, list | tuple) else value


def _refuse_constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is not JSON")
