"""Check of config fields: all faults are reported in one error, one line each."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterator


def refuse(config: object, faults: Collection[str]) -> None:
    """Raise one ``ValueError`` that lists the faults of ``config``, if there are any.

    >>> refuse(object(), ["a=1: expected 2", "b=3: expected 4"])
    Traceback (most recent call last):
    ...
    ValueError: object has 2 faults:
      a=1: expected 2
      b=3: expected 4
    """
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise ValueError("\n  ".join([f"{type(config).__name__} has {count}:", *faults]))


def sizes(config: object, *names: str) -> Iterator[str]:
    """A fault for each of these fields that is not a whole number from 1 up."""
    for name in names:
        value = getattr(config, name)
        if not _is_whole(value) or value < 1:
            yield f"{name}={value!r}: expected a whole number, 1 or more"


def divides(config: object, whole: str, part: str) -> Iterator[str]:
    """A fault if the field ``whole`` is not a multiple of ``part``; none if either is not a positive whole number."""
    total, count = getattr(config, whole), getattr(config, part)
    if _is_whole(total) and _is_whole(count) and count > 0 and total % count:
        yield f"{whole}={total}: expected a multiple of {part}={count}"


def at_most(config: object, name: str, limit: str) -> Iterator[str]:
    """A fault if the field ``name`` is larger than ``limit``; none if either is not a positive whole number."""
    value, most = getattr(config, name), getattr(config, limit)
    if _is_whole(value) and _is_whole(most) and 0 < most < value:
        yield f"{name}={value}: expected at most {limit}={most}"


def even(config: object, name: str) -> Iterator[str]:
    """A fault if the field is an odd number, of which sinusoidal positions cannot make pairs."""
    value = getattr(config, name)
    if _is_whole(value) and value % 2:
        yield f"{name}={value}: expected an even number, for a sine and a cosine of each frequency"


def probabilities(config: object, *names: str) -> Iterator[str]:
    """A fault for each of these fields that is not a number from 0 to 1."""
    for name in names:
        value = getattr(config, name)
        if not (_is_number(value) and 0 <= value <= 1):
            yield f"{name}={value!r}: expected a probability, from 0 to 1"


def positive(config: object, *names: str) -> Iterator[str]:
    """A fault for each of these fields that is not a finite number above 0."""
    for name in names:
        value = getattr(config, name)
        if not (_is_number(value) and value > 0):
            yield f"{name}={value!r}: expected a number above 0"


def one_of(config: object, name: str, allowed: Collection[str]) -> Iterator[str]:
    """A fault if the field is none of the names that are allowed."""
    value = getattr(config, name)
    if value not in list(allowed):
        close = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        yield f"{name}={value!r}: {hint}expected {', '.join(allowed)}"


def padding_token(config: object) -> Iterator[str]:
    """A fault if ``pad_token_id`` is neither None nor a token of the vocabulary."""
    pad, size = getattr(config, "pad_token_id"), getattr(config, "vocab_size")  # noqa: B009  # any config that has them
    if pad is not None and not (_is_whole(pad) and pad >= 0 and (not _is_whole(size) or size < 1 or pad < size)):
        yield f"pad_token_id={pad!r}: expected None or a token, from 0 to vocab_size - 1"


def tokens(config: object, *names: str) -> Iterator[str]:
    """A fault for each of these fields that is not a token of the vocabulary."""
    size = getattr(config, "vocab_size")  # noqa: B009  # any config that has it
    for name in names:
        value = getattr(config, name)
        if not (_is_whole(value) and value >= 0 and (not _is_whole(size) or value < size)):
            yield f"{name}={value!r}: expected a token, from 0 to vocab_size - 1"


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
