"""Fields of ``config.json``: inside another with dots, and with the other spellings that a family has used.

``rope_parameters.full_attention.rope_theta/global_rope_theta`` is found under whichever of the two a config has, the
first that is there, and written as the first where there is none.  The last spelling may be arithmetic over other
fields: ``head_dim/hidden_size // num_attention_heads`` is computed where ``head_dim`` is missing or null.  A number
after a dot is an element of a list: ``hidden_sizes.0``.  ``[image_size, image_size]`` is a list of fields, for a module
that takes a height and a width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from porting.errors import Code
from porting.notation.expression import Expression
from porting.notation.faults import NotationError

_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.([A-Za-z_][A-Za-z0-9_]*|0|[1-9][0-9]?))*")
LONGEST = 200


def read_field(text: str) -> str:
    """The text, if it names a field."""
    *others, last = spellings(text) if len(text) <= LONGEST else [""]
    if not others and _items(last):
        return text
    if all(map(is_plain, others)) and is_plain(last):
        return text
    if all(map(is_plain, others)) and re.search(r"\w\s*[-+*/]", last):
        Expression.parse(last)
        return text
    message = f"{text[:LONGEST]!r} names no field of the config"
    raise NotationError(
        Code.WRONG_TYPE, message, hint="fields are written name, outer.name, new_name/old_name, or [height, width]"
    )


def spellings(field: str) -> list[str]:
    """The ways in which a field is spelled, the usual one first.

    >>> spellings("head_dim/hidden_size // num_attention_heads")
    ['head_dim', 'hidden_size // num_attention_heads']
    """
    return re.split(r"(?<![/ ])/(?![/ ])", field)


def is_plain(path: str) -> bool:
    """Whether a spelling is the name of a field, and not arithmetic."""
    return _PATH.fullmatch(path) is not None


def computed_from(field: str) -> list[str]:
    """The fields that one is computed from which no config holds; none for any other.

    >>> computed_from("hidden_size // heads"), computed_from("head_dim/hidden_size // heads")
    (['heads', 'hidden_size'], [])
    """
    if _items(field) or any(map(is_plain, spellings(field))):
        return []
    return sorted({name for one in spellings(field) for name in Expression.parse(one).names})


def _items(text: str) -> list[str]:
    """The fields of a list of fields; none for any other text."""
    inside = text.removeprefix("[").removesuffix("]") if text[:1] == "[" and text[-1:] == "]" else ""
    found = [one.strip() for one in inside.split(",")]
    return found if all(map(is_plain, found)) else []


def held(config: Mapping[str, object], field: str) -> str:
    """The spelling under which a config has the field; empty when it has none.

    >>> held({"n_embd": 768}, "hidden_size/n_embd")
    'n_embd'
    """
    paths = spellings(field)
    computed = not is_plain(paths[-1])
    return next((path for path in paths if (found := _found(config, path)) and not (computed and found[0] is None)), "")


def value_of(config: Mapping[str, object], field: str) -> object:
    """The field's value; None when the config does not have it, see :func:`held`.

    >>> value_of({"rope": {"full": {"theta": 1e6}}}, "rope.full.theta/theta")
    1000000.0
    >>> value_of({"image_size": 224}, "[image_size, image_size]")
    [224, 224]
    """
    path = held(config, field)
    return _found(config, path)[0] if path else None


def with_field(config: Mapping[str, object], field: str, value: object) -> dict[str, object]:
    """The config with the field set: under the spelling that it has, else under the first.  The original is untouched.

    A field that is only computed from others is not stored, so nothing is set.

    >>> with_field({"rope": {"type": "default"}}, "rope.theta/theta", 10.0)
    {'rope': {'type': 'default', 'theta': 10.0}}
    >>> with_field({}, "[image_size, image_size]", [224, 224])
    {'image_size': 224}
    """
    if items := _items(field):
        found = dict(config)
        for name, one in zip(items, value if isinstance(value, list | tuple) else (), strict=False):
            found = with_field(found, name, one)
        return found
    names = [path for path in (held(config, field), *spellings(field)) if path and is_plain(path)]
    return _set(config, names[0].split("."), value) if names else dict(config)


def _found(config: Mapping[str, object], path: str) -> tuple[object, ...]:
    """The value in a tuple; an empty one when there is none."""
    if items := _items(path):
        values = [_found(config, one) for one in items]
        return ([one[0] for one in values],) if all(values) else ()
    if not is_plain(path):
        try:
            return (Expression.parse(path).evaluate(config),)
        except NotationError:  # a field is missing, or is not a number
            return ()
    value: object = config
    for name in path.split("."):
        if isinstance(value, list | tuple) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            return ()
    return (value,)


def _set(config: Mapping[str, object], path: list[str], value: object) -> dict[str, object]:
    first, *rest = path
    if not rest:
        return {**config, first: value}
    inner = config.get(first)
    if len(rest) == 1 and rest[0].isdecimal():
        numbers = list(inner) if isinstance(inner, list | tuple) else []
        at = int(rest[0])
        return {**config, first: [*numbers[:at], value, *numbers[at + 1 :]]} if at <= len(numbers) else dict(config)
    return {**config, first: _set(inner if isinstance(inner, Mapping) else {}, rest, value)}
