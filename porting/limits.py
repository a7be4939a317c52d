"""One budget for each command: how much the descriptions that strangers wrote may cost.

A header, an index, a pickle, a table or a tokenizer says in a few bytes what takes many to hold or long to work out.
Whoever reads or expands such a text charges what it costs *before* it is spent, in one of the units of :class:`Limits`,
to the budget that is open: that of the command, or of the function of the library that was called.  Weights are not
charged: they take what they take.

The environment variable ``PORTING_LIMITS`` raises a limit, for the command line and for the library alike.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import TypeVar

from porting.errors import Code, Fault, PortingError

Value = TypeVar("Value")

VARIABLE = "PORTING_LIMITS"
"""``objects=20000000`` or several, with commas between."""


class LimitError(PortingError):
    """What was asked for costs more than the budget has."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one command may spend.

    Attributes:
        metadata: bytes of headers, indexes, pickles, configs and tables.
        objects: values that these are made of: names, numbers, lists, dictionaries, steps of a pickle.
        members: names that a pattern of a table stands for, over all patterns.
        made: bytes of tensors that are written out from fewer: elements that are repeated, and names that share a
            storage.
        seconds: processor time that reading descriptions takes.
        waiting: seconds for which a hub may give nothing; after that, those that its bytes take at :data:`RATE`.
    """

    metadata: int = 1 << 29
    objects: int = 4_000_000
    members: int = 300_000
    made: int = 1 << 28
    seconds: int = 8
    waiting: int = 60


DIGITS = 300
"""A whole number of more digits has no floating-point number beside it; no config and no table needs one."""

RATE = 10_000
"""Bytes a second: a server that is slower than this on average is left."""

UNITS = {
    "metadata": "bytes of descriptions",
    "objects": "values in descriptions",
    "members": "names from patterns",
    "made": "bytes that repeat others",
    "seconds": "seconds of reading descriptions",
    "waiting": "seconds of waiting for the hub",
}


def limits() -> Limits:
    """The limits: the usual ones, and what ``PORTING_LIMITS`` raises.

    Raises:
        LimitError: the variable is not a list of limits.

    >>> limits().members
    300000
    """
    given = os.environ.get(VARIABLE, "")
    known = {one.name for one in fields(Limits)}
    found: dict[str, int] = {}
    for part in filter(None, given.split(",")):
        match = re.fullmatch(r" *([a-z]+) *= *([0-9]{1,18}) *", part)
        if match is None or match[1] not in known:
            message = f"{part[:80]!r} is no limit, expected one of {', '.join(sorted(known))} and a whole number"
            raise LimitError(Fault(code=Code.LIMIT, where=VARIABLE, message=message, hint=raised("objects", 9_000_000)))
        found[match[1]] = int(match[2])
    return replace(Limits(), **found)


def raised(unit: str, limit: int) -> str:
    """How a limit is raised.

    >>> raised("objects", 9_000_000)
    'PORTING_LIMITS=objects=9000000'
    """
    return f"{VARIABLE}={unit}={limit}"


class Budget:
    """What is left of the limits."""

    def __init__(self, within: Limits) -> None:
        self.within = within
        self._spent = dict.fromkeys(UNITS, 0)
        self._begun: float | None = None
        self._seconds = 0.0

    def charge(self, unit: str, count: int, where: str) -> None:
        """Spend, before it is done.

        Raises:
            LimitError: that is more than is left.
        """
        self._spent[unit] += count
        if self._spent[unit] > getattr(self.within, unit):
            raise self.exceeded(unit, where)
        if self._begun is not None and self._seconds + time.thread_time() - self._begun > self.within.seconds:
            raise self.exceeded("seconds", where)

    def exceeded(self, unit: str, where: str) -> LimitError:
        """The error for a limit that was reached."""
        limit = getattr(self.within, unit)
        message = f"this takes more than {limit} {UNITS[unit]}, as much as one command may spend"
        hint = f"if you trust where it comes from, raise the limit: {raised(unit, 10 * limit)}"
        return LimitError(Fault(code=Code.LIMIT, where=where, message=message, hint=hint))

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the processor time of what is done inside."""
        if self._begun is not None:
            yield
            return
        self._begun = time.thread_time()
        try:
            yield
        finally:
            self._seconds += time.thread_time() - self._begun
            self._begun = None


_OPEN: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextmanager
def spending() -> Iterator[Budget]:
    """Open a budget, or go on with the one that is open.

    Raises:
        LimitError: ``PORTING_LIMITS`` is not a list of limits.
    """
    budget = _OPEN.get()
    if budget is not None:
        yield budget
        return
    token = _OPEN.set(budget := Budget(limits()))
    try:
        yield budget
    finally:
        _OPEN.reset(token)


@contextmanager
def separately() -> Iterator[Budget]:
    """Open a budget of its own for what a search does many times over, each time within the limits.

    Raises:
        LimitError: ``PORTING_LIMITS`` is not a list of limits.
    """
    token = _OPEN.set(budget := Budget(limits()))
    try:
        yield budget
    finally:
        _OPEN.reset(token)


@contextmanager
def reading() -> Iterator[Budget]:
    """The same around what reads a description: its processor time counts."""
    with spending() as budget, budget.timed():
        yield budget


def charge(unit: str, count: int, *, where: str) -> None:
    """Spend of the open budget, before it is done; see :class:`Limits` for the units.

    Raises:
        LimitError: that is more than is left.
    """
    with spending() as budget:
        budget.charge(unit, count, where)


def combinations(parts: Sequence[Sequence[Value]], *, where: str) -> Iterator[tuple[Value, ...]]:
    """Every choice of one value out of each part, the last changing first; charged as members.

    Raises:
        LimitError: there are more than are left.

    >>> list(combinations([range(2), "ab"], where="a table"))
    [(0, 'a'), (0, 'b'), (1, 'a'), (1, 'b')]
    """
    charge("members", math.prod(map(len, parts)), where=where)
    return product(*parts)
