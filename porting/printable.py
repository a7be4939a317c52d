"""Printing untrusted texts: escaped for a terminal, shortened, and names of dtypes."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass

NAME_SHOWN = 120
"""Characters of a name in a message; a hostile header may hold one of 50 MB."""

_UNSEEN = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Invisible characters: Unicode's ``Default_Ignorable_Code_Point``, and the blank pattern of Braille.

Python calls some of them printable: the fillers of Hangul are letters, and variation selectors are marks.
"""


MOST_MARKS = 8
"""Combining marks in a row that are shown: scripts need six at most, and more would cover the lines around them."""

LONGEST_ERROR, LONGEST_TEXT = 200, 3_000
"""Characters of the line that names an error, and of all that it says."""


def dtype_name(dtype: object) -> str:
    """The name of a dtype without the package: ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of packages as they are installed, without importing any of them."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  # slower than many a command

    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def is_printable(text: str) -> bool:
    r"""Whether all characters of a text are visible, and none controls the terminal or covers the lines around it.

    >>> is_printable("layer.0"), is_printable("a\x9b2J"), is_printable("a\u3164b"), is_printable("a" + 9 * "\u0301")
    (True, False, False, False)
    """
    if text.isascii() or not text.isprintable():
        return text.isprintable()
    return _UNSEEN.search(text) is None and not any(escaped for _, escaped in _characters(text))


def _characters(text: str) -> Iterator[tuple[str, bool]]:
    """The characters of a text, and whether each has to be escaped."""
    marks = 0
    for character in text:
        marks = marks + 1 if unicodedata.category(character).startswith("M") else 0
        yield character, marks > MOST_MARKS or not character.isprintable() or _UNSEEN.match(character) is not None


def _backslashed(text: str) -> Iterator[str]:
    """The characters of a text as :func:`safe` spells them."""
    for character, escaped in _characters(text):
        yield character.encode("unicode_escape").decode("ascii") if escaped else character


def safe(text: str) -> str:
    r"""Escape a text for a terminal or a page, so that a name from a file cannot control it.

    Whatever is not seen is spelled out: control characters, line breaks, the marks that set text from right to left,
    and fillers; and so are combining marks behind :data:`MOST_MARKS` others.

    >>> safe("a\x1b[2Jb"), safe("a\u3164b")
    ('a\\x1b[2Jb', 'a\\u3164b')
    """
    return text if is_printable(text) else "".join(_backslashed(text))


def safe_lines(text: str) -> str:
    r"""Escape a document, except for its line breaks and tabs.

    What is not seen is spelled as TOML and JSON spell it in strings.

    >>> safe_lines("# a\x9bb\n\tc")
    '# a\\u009bb\n\tc'
    """
    if is_printable(text.replace("\n", "").replace("\t", "")):
        return text
    return "".join(
        _spelled(character) if escaped and character not in "\n\t" else character
        for character, escaped in _characters(text)
    )


def shortened(text: str, most: int) -> str:
    r"""Leave out the middle of a text that takes more than so many characters when it is escaped.

    >>> shortened("abcdefgh", 8), shortened("abcdefgh", 4)
    ('abcdefgh', 'ab … 4 characters left out … gh')
    >>> safe(shortened("\x9b" * 8, 16))
    '\\x9b\\x9b … 4 characters left out … \\x9b\\x9b'
    """
    if len(text) <= most and len(safe(text)) <= most:
        return text
    half = most // 2
    begin, end = _fitting(text[:half], half), _fitting(text[: -half - 1 : -1], half)
    left = len(text) - begin - end
    return f"{text[:begin]} … {left:,} characters left out … {text[len(text) - end :]}"


def _fitting(text: str, most: int) -> int:
    """How many of the first characters of a text take no more than so many when they are escaped."""
    for place, spelled in enumerate(_backslashed(text)):
        most -= len(spelled)
        if most < 0:
            return place
    return len(text)


def _spelled(character: str) -> str:
    return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"


def text_of(error: BaseException) -> str:
    """What an error says, shortened; nothing where its class, which may be anybody's, fails to say it.

    >>> text_of(ValueError("odd")), len(text_of(ValueError("odd" * 10**6))) < 2 * LONGEST_TEXT
    ('odd', True)
    """
    try:
        return shortened(str(error), LONGEST_TEXT)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  # see above
        return ""


def told(error: BaseException) -> str:
    """The first line of what an error says, behind its class; the class alone where it says nothing.

    >>> told(ValueError("odd")), told(MemoryError())
    ('ValueError: odd', 'MemoryError')
    """
    text = text_of(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:LONGEST_ERROR]}" if text else type(error).__name__


def first_few(names: Sequence[str], most: int, noun: str = "more", between: str = ", ") -> str:
    """The first names on one line, and how many there are beyond them.

    >>> first_few(["a", "b", "c"], 2), first_few(["a"], 2)
    ('a, b and 1 more', 'a')
    """
    return between.join(names[:most]) + (f" and {len(names) - most:,} {noun}" if len(names) > most else "")


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "tensor"), counted(2000, "tensor")
    ('1 tensor', '2,000 tensors')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def quote(name: object) -> str:
    r"""Quote a name for a message: control characters escaped, a long name shortened.

    >>> quote("a\nb")
    "'a\\nb'"
    """
    text = name if isinstance(name, str) else shown(name)
    if len(text) > NAME_SHOWN + 1:
        half = NAME_SHOWN // 2
        text = f"{text[:half]}…{text[-half:]}"
    return repr(text) if is_printable(text) else ascii(text)


def shell_word(path: object) -> str:
    """A path as one word of a command to type, whatever its name is.

    >>> shell_word("runs/one"), shell_word("$(reboot)"), shell_word("-rf")
    ('runs/one', "'$(reboot)'", './-rf')
    """
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def shown(value: object) -> str:
    """``repr`` of an untrusted value, built only up to the length that is shown.

    A few bytes of a pickle make a tuple that holds itself a million times over, and its ``repr`` takes gigabytes.

    >>> shown((1, "a", [None]))
    "(1, 'a', [None])"
    >>> shown([0] * 1_000_000)[-5:]
    ', 0,…'
    """
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > NAME_SHOWN:
            return f"{text[:NAME_SHOWN]}…"
    return text


def _pieces(value: object) -> Iterator[str]:
    """The ``repr`` of a value in short pieces, so that it can be stopped at any depth."""
    if isinstance(value, str | bytes):
        yield repr(value[: NAME_SHOWN + 1])
    elif isinstance(value, int) and value.bit_length() > NAME_SHOWN * 3:
        yield f"a whole number of {value.bit_length()} bits"
    elif isinstance(value, tuple | list):
        yield "(" if isinstance(value, tuple) else "["
        for place, item in enumerate(value):
            yield ", " if place else ""
            yield from _pieces(item)
        yield "," if isinstance(value, tuple) and len(value) == 1 else ""
        yield ")" if isinstance(value, tuple) else "]"
    elif isinstance(value, Mapping):
        yield "{"
        for place, (key, item) in enumerate(value.items()):
            yield ", " if place else ""
            yield from _pieces(key)
            yield ": "
            yield from _pieces(item)
        yield "}"
    elif is_dataclass(value) and not isinstance(value, type):
        yield f"{type(value).__name__}("
        for place, field in enumerate(fields(value)):
            yield f"{', ' if place else ''}{field.name}="
            yield from _pieces(getattr(value, field.name))
        yield ")"
    else:
        yield repr(value)
