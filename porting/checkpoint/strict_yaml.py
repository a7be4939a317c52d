"""Strict YAML, as a config needs it: mappings with text keys, lists, and the scalars that JSON has too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from porting.limits import DIGITS, charge, charge_text, reading

if TYPE_CHECKING:
    from porting.checkpoint.strict_json import Json


class YamlError(ValueError):
    """A text is no YAML that is read here; the message says where and why."""


LARGEST = 1 << 18
"""Bytes; a config has a few thousand, and YAML is parsed slowly."""

DEEPEST = 20
"""Levels of nested mappings and lists."""

SCALARS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str"))
"""The types of scalars that are read; a date, for one, is none of them."""


def parse_yaml(raw: bytes, *, where: str) -> Json:
    r"""Parse a YAML document in UTF-8.  Anchors, aliases and tags are refused: they are references and classes.

    >>> parse_yaml(b"bias: false\nnorm_eps: 1.0e-05\nrope: {theta: null}\n", where="a text")
    {'bias': False, 'norm_eps': 1e-05, 'rope': {'theta': None}}
    """
    import yaml  # noqa: PLC0415  # few checkpoints have one

    if len(raw) > LARGEST:
        raise YamlError(f"it has {len(raw)} bytes; at most {LARGEST} are read")
    charge_text(raw, where=where)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise YamlError(f"not UTF-8 at byte {error.start}") from error
    with reading(where):
        try:
            return _Document(yaml.SafeLoader(text), where).read()
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            place = f" at line {mark.line + 1}" if mark is not None else ""
            message = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be parsed"
            raise YamlError(f"not YAML{place}: {message}") from error


def yaml_of(fields: Mapping[str, object]) -> bytes:
    """The document of a mapping of plain values, its keys in order, as every reader of YAML 1.1 and 1.2 reads it.

    >>> print(yaml_of({"norm_eps": 1e-5, "bias": False, "name": "yes", "of": [1, None]}).decode())
    bias: false
    name: 'yes'
    norm_eps: 1.0e-05
    of:
    - 1
    - null
    <BLANKLINE>
    """
    import yaml  # noqa: PLC0415  # few tables write one

    return str(yaml.dump(dict(fields), Dumper=_plain_dumper(), allow_unicode=True, width=10_000)).encode()


def _plain_dumper() -> Any:
    """A dumper that writes a value in full each time it occurs, and never refers to an earlier one."""
    import yaml  # noqa: PLC0415  # as above

    class Plain(yaml.SafeDumper):  # type: ignore[misc]  # it has no types
        def ignore_aliases(self, _data: object) -> bool:
            return True

    return Plain


class _Document:
    """Reads the one document of a text from its events."""

    def __init__(self, loader: Any, where: str) -> None:
        self._loader = loader
        self._where = where

    def read(self) -> Json:
        """The document's value; None for an empty text."""
        from yaml import events  # noqa: PLC0415  # as above

        self._next()  # the beginning of the stream
        if isinstance(self._next(), events.StreamEndEvent):
            return None
        value = self._value(self._next(), 0)
        self._next()  # the end of the document
        if not isinstance(self._next(), events.StreamEndEvent):
            raise YamlError("it holds more than one document")
        return value

    def _next(self) -> Any:
        charge("objects", 8, where=self._where)
        return self._loader.get_event()

    def _value(self, event: Any, level: int) -> Json:
        from yaml import events  # noqa: PLC0415  # as above

        line = event.start_mark.line + 1
        if level > DEEPEST:
            raise YamlError("nested too deeply")
        if isinstance(event, events.AliasEvent) or event.anchor is not None:
            raise YamlError(f"an anchor or alias at line {line}; write the value in full")
        if event.tag is not None:
            raise YamlError(f"the tag {event.tag[:100]!r} at line {line}; only plain values are read")
        if isinstance(event, events.ScalarEvent):
            return self._scalar(event, line)
        if isinstance(event, events.SequenceStartEvent):
            return [self._value(one, level + 1) for one in self._until(events.SequenceEndEvent)]
        found: dict[str, Json] = {}
        for one in self._until(events.MappingEndEvent):
            at = one.start_mark.line + 1
            key = self._value(one, level + 1)
            if not isinstance(key, str):
                raise YamlError(f"a key at line {at} that is not text")
            if key in found:
                raise YamlError(f"the key {key[:120]!a} stands twice in one mapping, again at line {at}")
            found[key] = self._value(self._next(), level + 1)
        return found

    def _until(self, end: type) -> Iterator[Any]:
        while not isinstance(event := self._next(), end):
            yield event

    def _scalar(self, event: Any, line: int) -> bool | int | float | str | None:
        from yaml.nodes import ScalarNode  # noqa: PLC0415  # as above

        tag = self._loader.resolve(ScalarNode, event.value, event.implicit)
        if tag not in SCALARS:
            raise YamlError(f"{event.value[:100]!r} at line {line} is not text, number, true, false or null")
        if tag == SCALARS[2] and len(event.value) > DIGITS:
            raise YamlError(f"a whole number of {len(event.value)} digits; at most {DIGITS} are read")
        if tag == SCALARS[-1]:
            return str(event.value)
        try:
            made: bool | int | float | None = self._loader.construct_object(ScalarNode(tag, event.value))
        except ValueError as error:
            raise YamlError(f"{event.value[:100]!r} at line {line} is not a number") from error
        return made
