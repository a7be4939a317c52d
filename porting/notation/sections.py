"""The raw sections of a table, each entry with its place in its file; :mod:`porting.notation.extends` merges two."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as short

from porting import opening
from porting.errors import CheckpointError, Code, Fault, nearest
from porting.limits import DIGITS, reading
from porting.notation.faults import TableError
from porting.notation.position import Path as KeyPath
from porting.notation.position import Places, locate
from porting.ops import CONSTANTS, Formula, Sum

_DOTTED = re.compile(r"^[^\n=\"'#]*", re.MULTILINE)
"""The part of a line before its value, a quoted name or a comment."""

DEEPEST = 64
"""Parts of a name: each prefix of a key is looked up, so that time and memory grow with their square."""

# As many of them; what stands in quotes is one part.
_CHAIN = re.compile(r"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){64}""")

LARGEST = 4 * 1024 * 1024
"""Bytes of a table's file."""

MOST_RULES = 20_000

KEYS = {
    "approximate": ("reason", "within"),
    "files": ("config", "weights"),
    "mapping": ("by_name", "config", "description", "model_types", "name", "prefix", "target_prefix"),
    "rule": tuple(sorted((*CONSTANTS, Sum.key, Formula.key, "back", "dtype", "fill", "optional", "source", "target"))),
}
"""The keys of the sections that have keys of ours."""

FREE = (
    "architectures", "arguments", "config", "constants", "defaults", "drop", "fresh", "inputs", "make", "optional",
    "probes", "require", "rest", "sizes", "tensors", "ties",
)  # fmt: skip
"""The sections whose keys are names, fields or indices."""

RULES = ("tensors", "optional")
"""The sections of short rules for tensors."""

PLAIN = ("arguments", "constants", "defaults")
"""The sections in which ``false`` is a value; elsewhere it takes away an entry of the extended table."""


@dataclass(frozen=True)
class Entry:
    """A key and its value, with the file and the place that they stand at."""

    key: str
    value: object
    file: str
    places: Places
    path: KeyPath

    def at(self, offset: int | None = None) -> str:
        """``file:line:column`` of the key, or of the character ``offset`` of its text."""
        return f"{self.file}:{self.places.key(self.path).at(offset)}"

    def value_at(self, offset: int | None = None, item: str | int | None = None) -> str:
        """The same of the value, or of an item of it."""
        path = self.path if item is None else (*self.path, item)
        return f"{self.file}:{self.places.value(path).at(offset)}"

    def key_at(self, key: str) -> str:
        """The same of a key of the value, an inline table."""
        return f"{self.file}:{self.places.key((*self.path, key)).at()}"


Body = dict[str, Entry]


@dataclass
class Sections:
    """The contents of a table, by section; ``rules`` holds one body for each ``[[rule]]``.

    Attributes:
        texts: its text, then those of the tables that it extends.
        faults: what is wrong with it as far as its sections go.
    """

    where: str
    texts: list[str] = field(default_factory=list)
    entries: dict[str, Body] = field(default_factory=dict)
    rules: list[Body] = field(default_factory=list)
    extends: Entry | None = None
    faults: list[Fault] = field(default_factory=list)

    def of(self, section: str) -> Iterator[Entry]:
        """The entries of a section."""
        yield from self.entries.get(section, {}).values()

    def word(self, section: str, key: str) -> str:
        """A text of the section, empty when it is missing or no text."""
        entry = self.entries.get(section, {}).get(key)
        return entry.value if entry is not None and isinstance(entry.value, str) else ""


def read_file(path: Path) -> str:
    """The text of a table's file."""
    try:
        raw = opening.read_file(path, limit=LARGEST)
    except CheckpointError as error:
        raise TableError(map(_no_table, error.faults)) from error
    try:
        return raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise TableError(Fault(code=Code.NO_TABLE, where=str(path), message=str(error))) from error


def _no_table(fault: Fault) -> Fault:
    """The fault of a file that is not a table, for somebody who wanted to read one."""
    message = f"{fault.message}, expected a TOML table"
    if fault.code is Code.FILE_TOO_LARGE:
        message = f"{fault.message.partition(',')[0]}, a table has at most {LARGEST}"
    elif fault.code is Code.FILE_MISSING or "null byte" in fault.message:
        message = "not a file, expected a TOML table"
    elif fault.code is Code.FILE_NOT_REGULAR:
        what = "a directory" if "a directory" in fault.message else "not a regular file"
        message = f"{what}, expected a TOML table"
    return Fault(code=Code.NO_TABLE, where=fault.where, message=message)


def split(text: str, file: str) -> Sections:
    """The sections of a text."""
    chain = _CHAIN.search(text)
    if chain is not None:
        where = f"{file}:{text.count(chr(10), 0, chain.start()) + 1}:1"
        message = f"a name of more than {DEEPEST} parts with dots between them"
        raise TableError(Fault(code=Code.NOT_TOML, where=where, message=message))
    try:
        with reading() as budget:
            budget.charge("metadata", len(text), file)
            budget.charge("objects", 8 * sum(map(text.count, ("=", ",", "[", "{", "\n"))), file)
            budget.charge("objects", 8 * sum(key.count(".") for key in _DOTTED.findall(text)), file)  # a table for each
            content = tomllib.loads(text)
            _refuse_large(content, file)
            places = locate(text)
    except tomllib.TOMLDecodeError as error:
        message, line, column = _explained(str(error), text)
        raise TableError(Fault(code=Code.NOT_TOML, where=f"{file}:{line}:{column}", message=message)) from error
    except ValueError as error:
        message = "a number of thousands of digits, or a date that does not exist"
        raise TableError(Fault(code=Code.NOT_TOML, where=f"{file}:1:1", message=message)) from error
    except RecursionError as error:
        raise TableError(Fault(code=Code.NOT_TOML, where=f"{file}:1:1", message="nested too deeply")) from error
    sections = Sections(where=file, texts=[text])
    for name, body in content.items():
        _add(sections, Entry(name, body, file, places, (name,)))
    count = len(sections.rules) + sum(len(sections.entries.get(name, {})) for name in RULES)
    if count > MOST_RULES:
        message = f"{count} rules, a table has at most {MOST_RULES}"
        raise TableError(Fault(code=Code.NO_TABLE, where=file, message=message))
    return sections


def _refuse_large(content: object, file: str) -> None:
    """A whole number can be written in few digits of base 16 and have too many to be printed."""
    waiting = [content]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, int) and abs(one) >= 10**DIGITS:
            message = f"a whole number of more than {DIGITS} digits"
            raise TableError(Fault(code=Code.NOT_TOML, where=f"{file}:1:1", message=message))


def _explained(message: str, text: str) -> tuple[str, int, int]:
    """The error of tomllib, with its line and column."""
    found = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    if found:
        return message[: found.start()], int(found.group(1)), int(found.group(2))
    lines = text.split("\n")
    return message.removesuffix(" (at end of document)"), len(lines), len(lines[-1]) + 1


def _add(sections: Sections, entry: Entry) -> None:
    name, body = entry.key, entry.value
    if name == "extends":
        sections.extends = entry
    elif name == "rule":
        if isinstance(body, list) and all(isinstance(one, dict) for one in body):
            sections.rules += [_body(one, entry, number) for number, one in enumerate(body)]
        else:
            _note(sections, Code.WRONG_TYPE, entry, "a rule is written [[rule]], once for each")
    elif name not in KEYS and name not in FREE:
        known = sorted({*KEYS, *FREE, "extends"})
        hint = nearest(name, known) or f"known: {', '.join(known)}"
        _note(sections, Code.UNKNOWN_KEY, entry, f"unknown section [{name}]", hint)
    elif isinstance(body, dict):
        sections.entries[name] = _body(body, entry)
    else:
        _note(sections, Code.WRONG_TYPE, entry, f"[{name}] is a section, found {short(body)}")
    if isinstance(body, dict) and "extends" in body:
        inside = _body({"extends": body["extends"]}, entry)["extends"]
        _note(sections, Code.UNKNOWN_KEY, inside, f"extends stands in [{name}], expected before the first section")
        sections.entries.get(name, {}).pop("extends", None)


def _body(body: Mapping[str, object], entry: Entry, *number: int) -> Body:
    path = (*entry.path, *number)
    return {key: Entry(key, value, entry.file, entry.places, (*path, key)) for key, value in body.items()}


def _note(sections: Sections, code: Code, entry: Entry, message: str, hint: str = "") -> None:
    sections.faults.append(Fault(code=code, where=entry.at(), message=message, hint=hint))
