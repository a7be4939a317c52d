"""Fields of ``config.json``: inside another with dots, and with the other spellings that a family has used.

``rope_parameters.full_attention.rope_theta/global_rope_theta`` is found under whichever of the two a config has, the
first that is there, and written as the first where there is none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from porting.errors import Code
from porting.notation.faults import NotationError

_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
LONGEST = 200


def read_field(text: str) -> str:
    """The text, if it names a field.

    Raises:
        NotationError: it does not.
    """
    if len(text) <= LONGEST and all(_PATH.fullmatch(path) for path in text.split("/")):
        return text
    message = f"{text[:LONGEST]!r} names no field of the config"
    raise NotationError(Code.WRONG_TYPE, message, hint="fields are written name, outer.name, or new_name/old_name")


def held(config: Mapping[str, object], field: str) -> str:
    """The spelling under which a config has the field; empty when it has none.

    >>> held({"n_embd": 768}, "hidden_size/n_embd")
    'n_embd'
    """
    return next((path for path in field.split("/") if _found(config, path)), "")


def value_of(config: Mapping[str, object], field: str) -> object:
    """The field's value; None when the config does not have it, see :func:`held`.

    >>> value_of({"rope": {"full": {"theta": 1e6}}}, "rope.full.theta/theta")
    1000000.0
    """
    path = held(config, field)
    return _found(config, path)[0] if path else None


def with_field(config: Mapping[str, object], field: str, value: object) -> dict[str, object]:
    """The config with the field set: under the spelling that it has, else under the first.  The original is untouched.

    >>> with_field({"rope": {"type": "default"}}, "rope.theta/theta", 10.0)
    {'rope': {'type': 'default', 'theta': 10.0}}
    """
    return _set(config, (held(config, field) or field.split("/", maxsplit=1)[0]).split("."), value)


def _found(config: Mapping[str, object], path: str) -> tuple[object, ...]:
    """The value in a tuple; an empty one when there is none."""
    value: object = config
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return ()
        value = value[name]
    return (value,)


def _set(config: Mapping[str, object], path: list[str], value: object) -> dict[str, object]:
    first, *rest = path
    if not rest:
        return {**config, first: value}
    inner = config.get(first)
    return {**config, first: _set(inner if isinstance(inner, Mapping) else {}, rest, value)}
