"""The positions of keys and values in a TOML file, for messages: ``tomllib`` gives values without positions.

The text has been read by ``tomllib`` before, so that this scanner meets well-formed TOML only.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from dataclasses import dataclass

Path = tuple[str | int, ...]
"""Keys, and numbers of array elements: ``("rule", 0, "source", 1)``."""

_BLANK = re.compile(r"(?:[ \t\r\n]|\#[^\n]*)*")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r"""
    \"{3} (?:[^\\]|\\.)*? \"{3,5}  # the last two quotes may belong to the text
  | \'{3} .*? \'{3,5}
  | \" (?:[^\"\\\n]|\\.)* \"
  | \' [^\'\n]* \'
    """,
    re.DOTALL | re.VERBOSE,
)
_SCALAR = re.compile(r"[^,\]}\n\#]*")


@dataclass(frozen=True)
class Place:
    """Line and column, from 1; ``lead`` characters of quotes stand before the text itself."""

    line: int = 1
    column: int = 1
    lead: int = 0

    def at(self, offset: int | None = None) -> str:
        """``line:column`` of the character ``offset`` of the text; of the whole, quotes included, when None."""
        return f"{self.line}:{self.column if offset is None else self.column + self.lead + offset}"


@dataclass(frozen=True)
class Places:
    """The places of keys and of values, by path.  Tables stand where their header or their first key does."""

    keys: dict[Path, Place]
    values: dict[Path, Place]

    def key(self, path: Path) -> Place:
        """The position of a key."""
        return self.keys.get(path, Place())

    def value(self, path: Path) -> Place:
        """The position of a value; that of its key, when it has none of its own."""
        return self.values.get(path, self.key(path))


def locate(text: str) -> Places:
    """The place of everything in a well-formed TOML text.

    >>> places = locate('"a.b" = ["a reason"]')
    >>> places.key(("a.b",))
    Place(line=1, column=1, lead=1)
    >>> places.value(("a.b", 0)).at(2)
    '1:13'
    """
    return _Scanner(text).scan()


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines = [0, *(found.end() for found in re.finditer("\n", text))]
        self.places = Places({}, {})
        self.counts: dict[Path, int] = {}

    def scan(self) -> Places:
        table: Path = ()
        while self._blank() < len(self.text):
            if self.text[self.at] == "[":
                table = self._header()
            else:
                self._pair(table)
        return self.places

    def _blank(self) -> int:
        found = _BLANK.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return self.at

    def _place(self, lead: int = 0) -> Place:
        line = bisect_right(self.lines, self.at)
        return Place(line, self.at - self.lines[line - 1] + 1, lead)

    def _header(self) -> Path:
        place = self._place()
        array = self.text.startswith("[[", self.at)
        self.at += 1 + array
        path = self._keys(())
        self._blank()
        self.at += 1 + array
        if array:
            self.counts[path] = self.counts.get(path, -1) + 1
            path = (*path, self.counts[path])
        self.places.keys[path] = place
        return path

    def _keys(self, table: Path) -> Path:
        """A key, dotted perhaps, under ``table``."""
        path = table
        while True:
            self._blank()
            bare = _BARE.match(self.text, self.at)
            place = self._place(0 if bare else 1)
            path = (*path, bare.group() if bare else self._string())
            self.at = bare.end() if bare else self.at
            self.places.keys.setdefault(path, place)
            self._blank()
            if not self.text.startswith(".", self.at):
                return path
            self.at += 1
            if path in self.counts:
                path = (*path, self.counts[path])  # [rule.part] belongs to the last [[rule]]

    def _string(self) -> str:
        found = _STRING.match(self.text, self.at)
        if found is None:  # tomllib has let it through, so this is a key that it reads in another way
            self.at += 1
            return ""
        self.at = found.end()
        written = found.group()
        if written[0] == "'" or "\\" not in written:
            return written[1:-1]
        return _unescaped(written)

    def _pair(self, table: Path) -> None:
        path = self._keys(table)
        self.at += 1  # the equals sign
        self._value(path)

    def _value(self, path: Path) -> None:
        self._blank()
        opened = self.text[self.at : self.at + 3]
        quotes = 3 if opened in ('"""', "'''") else 1 if opened[:1] in ("'", '"') else 0
        self.places.values[path] = self._place(quotes)
        if quotes:
            self._string()
        elif opened[:1] == "[":
            self._items(path, "]")
        elif opened[:1] == "{":
            self._items(path, "}")
        else:
            found = _SCALAR.match(self.text, self.at)
            self.at = found.end() if found else self.at + 1

    def _items(self, path: Path, closing: str) -> None:
        """The elements of an array, or the pairs of an inline table."""
        self.at += 1
        number = 0
        while self._blank() < len(self.text) and self.text[self.at] != closing:
            if self.text[self.at] == ",":
                self.at += 1
                number += 1
            elif closing == "]":
                self._value((*path, number))
            else:
                self._pair(path)
        self.at += 1


def _unescaped(written: str) -> str:
    """A basic string's text: TOML's escapes are some of Python's."""
    try:
        value = ast.literal_eval(written)
    except (SyntaxError, ValueError):
        return written[1:-1]
    return value if isinstance(value, str) else written[1:-1]
