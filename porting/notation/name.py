"""Names with placeholders: ``encoder.layer.{i}.attention.self.{p:query,key,value}.weight``.

A :class:`Name` reads a tensor's name into index values and spells it again from them, in linear time: where at most one
spelling can go on, by a regular expression that never has to come back; else by walking over the name once with the set
of all positions that are still possible.  No pattern can make it explode.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from porting.errors import Code
from porting.limits import reading
from porting.notation.faults import NotationError

LONGEST = 1000
"""Characters of a pattern; the names that it reads may be longer."""

LONGEST_NUMBER = 9
"""Digits of an index in a name."""

Value = int | str
Bindings = Mapping[str, Value]

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_DECIMAL = re.compile(r"(?:([1-9][0-9]{0,3})\*)?([A-Za-z][A-Za-z0-9]*)(?:([+-])([0-9]{1,4}))?")
_FORMAT = re.compile(r"(?:0([1-9]))?(?(1)(?:,|$))(?:([0-9]{1,9})\.\.([0-9]{1,9}))?")
"""The text after the colon of a number: ``03``, ``3..60``, or both, ``03,3..60``."""

_NUMBER = rf"(0|[1-9][0-9]{{0,{LONGEST_NUMBER - 1}}})"
_INDEX = re.compile(r"[A-Za-z][A-Za-z0-9]*")
_ESCAPE = re.compile(r"0x([0-9A-Fa-f]{1,6})")
"""A character by its number: ``{0x20}`` is a blank."""


@dataclass(frozen=True)
class Literal:
    """Characters that stand for themselves."""

    text: str

    @property
    def regex(self) -> str:
        """The regular expression of the text that it matches."""
        return re.escape(self.text)

    def read(self, name: str, start: int) -> Iterator[tuple[int, Value | None]]:
        """Read on at ``start``: where the text ends, if it stands here."""
        if name.startswith(self.text, start):
            yield start + len(self.text), None

    def spell(self, bindings: Bindings) -> str:
        """The text."""
        return self.text

    def __str__(self) -> str:
        return spelled(self.text)


@dataclass(frozen=True)
class Output(Literal):
    """Which output of a module is meant, `` -> 1``, behind its name: written as it is."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Decimal:
    """``{i}``: a number; ``{2*i+1}``: an affine spelling of it; ``{i:03}``: padded; ``{i:3..60}``: of a range.

    Attributes:
        factor, shift: the number that is written is ``factor * index + shift``.
        width: it is written with at least so many digits, zeros in front; 0 for no zeros.
        low, high: the least and the largest value of the index, both included; None for no bound.
    """

    index: str
    factor: int = 1
    shift: int = 0
    width: int = 0
    low: int = 0
    high: int | None = None

    def read(self, name: str, start: int) -> Iterator[tuple[int, Value | None]]:
        """Read on at ``start``: where the number ends, and the index's value."""
        stop = start
        while stop < len(name) and stop - start <= LONGEST_NUMBER and "0" <= name[stop] <= "9":
            stop += 1
        digits = name[start:stop]
        if not digits or len(digits) > LONGEST_NUMBER:
            return
        value = self.value(digits)
        if value is not None:
            yield stop, value

    @property
    def regex(self) -> str:
        """The regular expression of the text that it matches."""
        return rf"([0-9]{{{max(self.width, 1)},{LONGEST_NUMBER}}})" if self.width else _NUMBER

    def value(self, text: str) -> int | None:
        """The index's value when it is spelled by these digits."""
        if (text[0] == "0" and len(text) > max(self.width, 1)) or len(text) < self.width:
            return None  # more zeros than are written, or fewer
        value, remainder = divmod(int(text) - self.shift, self.factor)
        return value if remainder == 0 and self.low <= value and (self.high is None or value <= self.high) else None

    def spell(self, bindings: Bindings) -> str:
        """The text under these index values; without a value the placeholder stands for itself."""
        value = bindings.get(self.index)
        return f"{self.factor * value + self.shift:0{self.width}d}" if isinstance(value, int) else str(self)

    @property
    def place(self) -> str:
        """The way in which the number is written, whatever the index is called and however far it goes."""
        return str(replace(self, index="i", low=0, high=None))

    def bounded(self, low: int, high: int | None) -> Decimal:
        """The same with bounds of the index."""
        return replace(self, low=low, high=high)

    def __str__(self) -> str:
        factor = f"{self.factor}*" if self.factor != 1 else ""
        shift = f"{self.shift:+d}" if self.shift else ""
        padded = f"0{self.width}" if self.width else ""
        spelled = [self.factor * one + self.shift for one in (self.low, self.high) if one is not None]
        ranged = f"{spelled[0]}..{spelled[1]}" if len(spelled) > 1 else ""
        more = ",".join(one for one in (padded, ranged) if one)
        return f"{{{factor}{self.index}{shift}{':' if more else ''}{more}}}"


@dataclass(frozen=True)
class Enumerated:
    """``{p:query,key,value}``: one of some spellings, each perhaps with older ones, ``{w:weight/gamma,bias/beta}``.

    The index's value is the place of the spelling in the list; the first of the spellings of a place is written.
    """

    index: str
    spellings: tuple[tuple[str, ...], ...]

    def read(self, name: str, start: int) -> Iterator[tuple[int, Value | None]]:
        """Read on at ``start``: where each spelling that stands here ends, and its place in the list."""
        for value, alternatives in enumerate(self.spellings):
            for text in alternatives:
                if name.startswith(text, start):
                    yield start + len(text), value

    @property
    def regex(self) -> str:
        """The regular expression of the text that it matches."""
        return f"({'|'.join(re.escape(text) for text in self._values)})"

    @property
    def prefix_free(self) -> bool:
        """Whether no spelling begins another, so that what stands in a name decides between them."""
        spellings = sorted(self._values)
        return not any(longer.startswith(shorter) for shorter, longer in pairwise(spellings))

    @cached_property
    def _values(self) -> dict[str, int]:
        return {text: value for value, place in enumerate(self.spellings) for text in place}

    def value(self, text: str) -> int | None:
        """The index's value when it is spelled so."""
        return self._values.get(text)

    def spell(self, bindings: Bindings) -> str:
        """The text under these index values; without a value the placeholder stands for itself."""
        value = bindings.get(self.index)
        if not isinstance(value, int) or value >= len(self.spellings):
            return str(self)
        return self.spellings[value][0]

    def __str__(self) -> str:
        return f"{{{self.index}:{','.join('/'.join(alternatives) for alternatives in self.spellings)}}}"


@dataclass(frozen=True)
class Rest:
    """``{*rest}``: whatever follows, dots included."""

    index: str

    def read(self, name: str, start: int) -> Iterator[tuple[int, Value | None]]:
        """Read on at ``start``: the end of the name, and all that is left of it."""
        if start < len(name):
            yield len(name), name[start:]

    @property
    def regex(self) -> str:
        """The regular expression of the text that it matches."""
        return "(.+)"

    def value(self, text: str) -> str:
        """The index's value: the text itself."""
        return text

    def spell(self, bindings: Bindings) -> str:
        """The text under these index values; without a value the placeholder stands for itself."""
        return str(bindings.get(self.index, self))

    def __str__(self) -> str:
        return f"{{*{self.index}}}"


Placeholder = Decimal | Enumerated | Rest
Part = Literal | Placeholder


@dataclass(frozen=True)
class Name:
    """A name with placeholders, in order of reading.

    >>> name = Name.parse("layer.{i}.{w:weight/gamma,bias/beta}")
    >>> name.read("layer.11.beta")
    {'i': 11, 'w': 1}
    >>> name.spell({"i": 11, "w": 1})
    'layer.11.bias'
    """

    parts: tuple[Part, ...]

    @classmethod
    def parse(cls, text: str) -> Name:
        """Parse ``text``."""
        if not text or len(text) > LONGEST:
            raise NotationError(Code.BAD_NAME, f"a name has 1 to {LONGEST} characters, this one {len(text)}")
        parts: list[Part] = []
        seen: set[str] = set()
        stop = 0
        for found in _PLACEHOLDER.finditer(text):
            _literal(text, stop, found.start(), parts)
            character = _ESCAPE.fullmatch(found.group(1))
            if character is not None:
                _stands(_character(character.group(1), found.start()), found.start(), parts)
                stop = found.end()
                continue
            part = _placeholder(found.group(1), found.start())
            if part.index in seen:
                raise NotationError(Code.INDEX_TWICE, f"index {part.index!r} stands twice in one name", found.start())
            if parts and _touch(parts[-1], part):
                raise NotationError(Code.BAD_NAME, f"nothing separates {part} from what precedes it", found.start())
            if parts and isinstance(parts[-1], Rest):
                raise NotationError(Code.BAD_NAME, f"{parts[-1]} must be the last part of a name", found.start())
            seen.add(part.index)
            parts.append(part)
            stop = found.end()
        _literal(text, stop, len(text), parts)
        return cls(tuple(parts))

    @cached_property
    def indices(self) -> tuple[str, ...]:
        """The indices of the placeholders, in order."""
        return tuple(part.index for part in self.parts if not isinstance(part, Literal))

    @cached_property
    def enumerations(self) -> dict[str, int]:
        """The size of each enumerated index."""
        return {part.index: len(part.spellings) for part in self.parts if isinstance(part, Enumerated)}

    @property
    def front(self) -> str:
        """The text in front of the first placeholder."""
        return self.parts[0].text if isinstance(self.parts[0], Literal) else ""

    @property
    def rest(self) -> str | None:
        """The index of ``{*rest}``, if the name ends in one."""
        last = self.parts[-1]
        return last.index if isinstance(last, Rest) else None

    def read(self, name: str) -> dict[str, Value] | None:
        """The index values under which this pattern spells ``name``, or None.

        Should several sets of values spell it, as ``{p:a,ab}b{q:x,bx}`` can, the first is meant.
        """
        if not self._placeholders:
            return {} if name == self.spell({}) else None
        if self._decided is None:
            return self._walk(name)
        found = self._decided.fullmatch(name)
        if found is None:
            return None
        bindings: dict[str, Value] = {}
        for part, text in zip(self._placeholders, found.groups(), strict=True):
            value = part.value(text)
            if value is None:
                return None
            bindings[part.index] = value
        return bindings

    def _walk(self, name: str) -> dict[str, Value] | None:
        """Read all ways at once: one spelling of an index begins another, and only what follows can decide."""
        with reading() as budget:
            budget.charge("members", 0, str(self)[:200])  # its time counts: many names and patterns multiply
            return self._walked(name)

    def _walked(self, name: str) -> dict[str, Value] | None:
        states: dict[int, tuple[Value, ...]] = {0: ()}
        for part in self.parts:
            following: dict[int, tuple[Value, ...]] = {}
            for start, values in states.items():
                for stop, value in part.read(name, start):
                    following.setdefault(stop, values if value is None else (*values, value))
            if not following:
                return None
            states = following
        if len(name) not in states:
            return None
        return dict(zip(self.indices, states[len(name)], strict=True))

    @cached_property
    def _placeholders(self) -> tuple[Placeholder, ...]:
        return tuple(part for part in self.parts if not isinstance(part, Literal))

    @cached_property
    def _decided(self) -> re.Pattern[str] | None:
        """The pattern as a regular expression, when at each place at most one way goes on; else None."""
        if not all(part.prefix_free for part in self.parts if isinstance(part, Enumerated)):
            return None
        return re.compile("".join(part.regex for part in self.parts), re.DOTALL)

    def spell(self, bindings: Bindings) -> str:
        """The name under these index values; a placeholder whose index is not bound stands for itself."""
        return "".join(part.spell(bindings) for part in self.parts)

    def padded_as(self, name: str) -> Name | None:
        """This pattern with its numbers padded as those of a name are, if that is all that keeps it from reading it.

        >>> print(Name.parse("layer_{i}/kernel").padded_as("layer_007/kernel"))
        layer_{i:03}/kernel
        """
        if not any(isinstance(part, Decimal) for part in self.parts) or not re.search("[0-9]", name):
            return None
        parts = ("([0-9]+)" if isinstance(part, Decimal) else part.regex for part in self.parts)
        found = re.fullmatch("".join(parts), name, re.DOTALL)
        if found is None:
            return None
        texts = iter(found.groups())
        read = [(part, "" if isinstance(part, Literal) else next(texts)) for part in self.parts]
        again = Name(tuple(
            replace(part, width=len(text) if text[0] == "0" and len(text) > 1 else 0)
            if isinstance(part, Decimal) else part for part, text in read
        ))  # fmt: skip
        return again if again != self and again.read(name) is not None else None

    def without(self, prefix: str) -> Name | None:
        """This name less ``prefix``, or None when it does not begin with it."""
        first = self.parts[0]
        if not prefix or not isinstance(first, Literal) or not first.text.startswith(prefix):
            return None
        rest = first.text[len(prefix) :]
        parts = ((Literal(rest),) if rest else ()) + self.parts[1:]
        return Name(parts) if parts else None

    def __str__(self) -> str:
        return "".join(str(part) for part in self.parts)


def _literal(text: str, start: int, stop: int, parts: list[Part]) -> None:
    if start == stop:
        return
    literal = text[start:stop]
    for offset, character in enumerate(literal):
        if not may_stand(character):
            raise NotationError(Code.BAD_NAME, f"{character!r} cannot stand in a name", start + offset)
    _stands(literal, start, parts)


def _stands(literal: str, start: int, parts: list[Part]) -> None:
    """Add text that stands for itself, as one part with the text in front of it."""
    if parts and isinstance(parts[-1], Rest):
        raise NotationError(Code.BAD_NAME, f"{parts[-1]} must be the last part of a name", start)
    if parts and isinstance(parts[-1], Decimal) and literal[0].isdigit():
        raise NotationError(Code.BAD_NAME, f"nothing separates {parts[-1]} from the digit after it", start)
    last = parts[-1] if parts else None
    if isinstance(last, Literal):
        parts[-1] = Literal(last.text + literal)
    else:
        parts.append(Literal(literal))


def _character(digits: str, offset: int) -> str:
    """The character with this number, in hexadecimal digits."""
    if int(digits, 16) > sys.maxunicode:
        raise NotationError(Code.BAD_NAME, f"{{0x{digits}}} is no character", offset)
    return chr(int(digits, 16))


def spelled(text: str) -> str:
    """A tensor's name as a pattern that matches it alone: ``{0x20}`` for a blank, which cannot stand for itself.

    ``>`` is written so too: after a hyphen it would begin the output of an activation.

    >>> spelled("norm [a]"), spelled("blocks.0/in_b")
    ('norm{0x20}{0x5b}a{0x5d}', 'blocks.0/in_b')
    """
    return "".join(one if may_stand(one) and one != ">" else f"{{0x{ord(one):x}}}" for one in text)


def may_list(text: str) -> bool:
    """Whether a text may be one of the words of ``{p:query,key}``: a comma and a stroke separate these."""
    return bool(text) and spelled(text) == text and not {",", "/"} & {*text}


def may_stand(character: str) -> bool:
    """Whether a character may stand in a name for itself: what is seen, and has no meaning in a table."""
    return character.isprintable() and character not in "{}[] "


def _touch(before: Part, part: Part) -> bool:
    """Whether two neighbours could share a run of digits, so that a name would read in two ways."""
    if isinstance(before, Literal):
        return isinstance(part, Decimal) and before.text[-1].isdigit()
    return not isinstance(part, Literal)


def _placeholder(text: str, offset: int) -> Placeholder:
    if text.startswith("*"):
        if not _INDEX.fullmatch(text[1:]):
            raise NotationError(Code.BAD_NAME, f"{{{text}}} is not a placeholder", offset, "such as {*rest}")
        return Rest(text[1:])
    index, colon, listed = text.partition(":")
    index = index.strip()
    form = _FORMAT.fullmatch(listed.strip()) if colon and listed.strip() else None
    if form is not None:
        return _formatted(_decimal(index, text, offset), form, text, offset)
    if colon and re.fullmatch(r"[0-9]*\.\.[0-9]*", listed.strip()):
        raise NotationError(Code.BAD_NAME, f"{{{text}}} is a range without an end", offset, "such as {i:3..60}")
    if colon:
        if not _INDEX.fullmatch(index):
            raise NotationError(Code.BAD_NAME, f"{index!r} is not an index: letters and digits", offset)
        spellings = tuple(tuple(one.strip() for one in place.split("/")) for place in listed.split(","))
        flat = [spelling for place in spellings for spelling in place]
        if not all(flat):
            raise NotationError(Code.BAD_NAME, f"{{{text}}} has an empty spelling", offset)
        strange = next((one for spelling in flat for one in spelling if not may_stand(one)), None)
        if strange:
            raise NotationError(Code.BAD_NAME, f"{strange!r} cannot stand in a name", offset)
        if len(set(flat)) < len(flat):
            hint = "a stroke separates spellings of one word, so no word has one" if "/" in listed else ""
            raise NotationError(Code.BAD_NAME, f"{{{text}}} has the same spelling twice", offset, hint)
        return Enumerated(index, spellings)
    return _decimal(text, text, offset)


def _decimal(number: str, text: str, offset: int) -> Decimal:
    found = _DECIMAL.fullmatch(number.replace(" ", ""))
    if not found:
        raise NotationError(
            Code.BAD_NAME,
            f"{{{text}}} is not a placeholder",
            offset,
            "write {i}, {i+1}, {2*i+1}, {i:03}, {i:3..60}, {p:query,key,value}, {w:weight/gamma,bias/beta} or {*rest}",
        )
    factor, index, sign, shift = found.groups()
    return Decimal(index, int(factor or 1), int(f"{sign}{shift}") if sign else 0)


def _formatted(number: Decimal, form: re.Match[str], text: str, offset: int) -> Decimal:
    """A number with its width and its bounds, which are those of the number as it is written."""
    width, first, last = form.groups()
    number = replace(number, width=int(width or 0))
    if first is None:
        return number
    low, high = -((number.shift - int(first)) // number.factor), (int(last) - number.shift) // number.factor
    if high < max(low, 0):
        raise NotationError(Code.BAD_NAME, f"{{{text}}} is a range without a number", offset, "such as {i:3..60}")
    return number.bounded(max(low, 0), high)
