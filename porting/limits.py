"""The budget of a command: what reading untrusted descriptions may cost.

A few bytes of a header, an index, a pickle, a table or a tokenizer can describe something that takes much memory or
time.  Code that reads or expands such a description charges the cost to the open budget *before* it is spent, in one of
the units of :class:`Limits`.  The budget is that of the command, or of the called function of the library.  Weights are
not charged.

The environment variable ``PORTING_LIMITS`` raises a limit, for the command line and for the library alike.
"""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from itertools import product
from threading import Event, Lock, current_thread, main_thread
from types import FrameType
from typing import TypeVar

from porting.errors import COMPARISONS, Code, Comparisons, Fault, PortingError

Value = TypeVar("Value")

VARIABLE = "PORTING_LIMITS"
"""``objects=20000000`` or several, with commas between."""


class LimitError(PortingError):
    """The budget of a command is exceeded."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a command.

    Attributes:
        metadata: bytes of headers, indexes, pickles, configs and tables; a text with characters that take Python two
            or four bytes counts two or three times.
        objects: values in these: names, numbers, lists, dictionaries, steps of a pickle.
        members: names that the patterns of a table expand to, over all patterns.
        made: bytes of tensors beyond the stored ones: repeated elements and names that share a storage, as float64 in a
            reference and a port; tensors that a module makes, such as masks and tables of positions; and what models
            make of inputs that are read from a file, far beyond its bytes.
        parameters: elements of a module's parameters beyond four times the stored ones.
        seconds: processor time of reading descriptions, and of going through small tensors; one second more for each
            :data:`GRANTED` bytes of the checkpoint's files, and :data:`EACH` for each of its tensors.
        waiting: seconds without data from a hub, over all files; beyond them, the time of its bytes at :data:`RATE`.
    """

    metadata: int = 1 << 27
    objects: int = 4_000_000
    members: int = 300_000
    made: int = 1 << 28
    parameters: int = 1 << 22
    seconds: int = 8
    waiting: int = 60


DIGITS = 300
"""Digits of an integer at most; a longer one is beyond every float."""

RATE = 10_000
"""Bytes per second; a server that is slower on average is given up."""

GRANTED = 500_000_000
"""Bytes of a checkpoint's files that extend the time by a second: large checkpoints have many tensors."""

EACH = 0.001
"""Seconds that each tensor extends the time by.

Converting 100,000 tensors of four numbers, the most expensive command, took 0.2 ms (with a header in JSON) to 0.3 ms
(with a pickle) for each on a busy machine.  A file has at most as many tensors as ``objects`` allows, so that this is
bounded too.
"""

SMALL = 1 << 16
"""Bytes; the time of smaller tensors counts, since it does not come from their bytes."""

LONGEST = 1e6
"""Seconds between two checks of the time if there is no limit."""

AGAIN = 1.0
"""Seconds of processor time between two checks of the time left."""

UNITS = {
    "metadata": "bytes of descriptions",
    "objects": "values in descriptions",
    "members": "names from patterns",
    "made": "bytes of tensors beyond those that are stored",
    "parameters": "elements of parameters beyond those that are stored",
    "seconds": "seconds of reading descriptions and of going through small tensors",
    "waiting": "seconds of waiting for the hub",
}


def limits() -> Limits:
    """The limits, with the changes of ``PORTING_LIMITS``.

    >>> limits().members
    300000
    """
    given = os.environ.get(VARIABLE, "")
    known = {field.name for field in fields(Limits)}
    found: dict[str, int] = {}
    for part in filter(None, given.split(",")):
        match = re.fullmatch(r" *([a-z]+) *= *([0-9]{1,18}) *", part)
        if match is None or match[1] not in known:
            message = f"{part[:80]!r} is not a limit, expected one of {', '.join(sorted(known))} and a whole number"
            raise LimitError(Fault(code=Code.LIMIT, where=VARIABLE, message=message, hint=raised("objects", 9_000_000)))
        found[match[1]] = int(match[2])
    return replace(Limits(), **found)


def raised(unit: str, limit: int) -> str:
    """The hint that says how to raise a limit.

    >>> raised("objects", 9_000_000)
    'PORTING_LIMITS=objects=9000000'
    """
    return f"{VARIABLE}={unit}={limit}"


class Waiting:
    """The time that a command waits for the hub in all requests; concurrent requests count once.

    Args:
        most: seconds for which the hub may give nothing.

    Attributes:
        received: bytes that came.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.received = 0
        self._lock = Lock()
        self._requests = 0
        self._begun = self._before = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of a request."""
        with self._lock:
            if not self._requests:
                self._begun = time.monotonic()
            self._requests += 1
        try:
            yield
        finally:
            with self._lock:
                self._requests -= 1
                if not self._requests:
                    self._before += time.monotonic() - self._begun

    def add(self, count: int) -> None:
        """Add bytes that were received."""
        with self._lock:
            self.received += count

    @property
    def waited(self) -> float:
        """Seconds waited so far."""
        with self._lock:
            return self._before + (time.monotonic() - self._begun if self._requests else 0.0)

    @property
    def left(self) -> float:
        """Seconds left to wait."""
        return self.most + self.received / RATE - self.waited


class Budget:
    """The remaining budget of a command.

    Args:
        outer: the budget that this one is part of: while its time counts, no other does.
        part: how much of the time it has.

    Attributes:
        hub: the time for which the command waits for the hub, of which there is one however many budgets it opens.
    """

    def __init__(self, within: Limits, outer: Budget | None = None, part: float = 1.0) -> None:
        enclosing = _OPEN.get()
        self.within = within
        self.hub: Waiting = Waiting(within.waiting) if enclosing is None else enclosing.hub
        self._part = part
        self._outer = outer
        self._spent = dict.fromkeys(UNITS, 0)
        self._begun: float | None = None
        self._seconds = 0.0
        self._granted: dict[str, float] = {}
        self._tensors: dict[str, int] = {}
        self._where = ""

    def charge(self, unit: str, count: int, where: str) -> None:
        """Spend an amount, before the work is done."""
        self._where = where or self._where
        if self._spent[unit] + count > getattr(self.within, unit):
            raise self.exceeded(unit, where)
        self._spent[unit] += count
        self._clock.require_time(where)

    def grant(self, nbytes: int, where: str) -> None:
        """Add the time that a file of so many bytes may take; once for each file."""
        self._granted[where] = nbytes / GRANTED

    def grant_tensors(self, count: int, where: str) -> None:
        """Add the time that a file with so many tensors may take; once for each file."""
        self._tensors[where] = max(count, self._tensors.get(where, 0))

    def spend(self, seconds: float, where: str = "") -> None:
        """Count processor time of another thread."""
        self._seconds += seconds
        self.require_time(where)

    @property
    def _allowed(self) -> float:
        most = (
            self._part * self.within.seconds if self._part < math.inf else math.inf
        )  # the product with 0 is not a number
        return most + sum(self._granted.values()) + EACH * sum(self._tensors.values())

    @property
    def left(self) -> float:
        """Seconds of processor time that are left."""
        spent = self._seconds + (time.thread_time() - self._begun if self._begun is not None else 0.0)
        return self._allowed - spent

    def require_time(self, where: str = "") -> None:
        """Raises: LimitError if the time is limited and none is left."""
        if self.left < 0:
            raise self.exceeded("seconds", where or self._where)

    def exceeded(self, unit: str, where: str) -> LimitError:
        """The error for a limit that was reached."""
        limit = getattr(self.within, unit)
        most = round(self._allowed) if unit == "seconds" else limit
        message = f"this takes more than {most} {UNITS[unit]}, as much as one command may spend"
        hint = f"if you trust where it comes from, raise the limit: {raised(unit, 10 * limit)}"
        return LimitError(Fault(code=Code.LIMIT, where=where, message=message, hint=hint))

    @property
    def _clock(self) -> Budget:
        """The budget that counts the time."""
        if self._outer is not None and self._outer._clock._begun is not None:
            return self._outer._clock
        return self

    @contextmanager
    def timed(self, where: str = "") -> Iterator[None]:
        """Count the processor time of the block."""
        if self._clock._begun is not None:
            yield
            return
        self._where = where or self._where
        self._begun = time.thread_time()
        _set_timer(min(max(self.left, 0.0), LONGEST) + 0.01)
        try:
            yield
        finally:
            _set_timer(0.0)
            self._seconds += time.thread_time() - self._begun
            self._begun = None
        self.require_time(where)


_watching = Event()
"""Set while a command checks the time by a signal, which the whole process shares."""


def _set_timer(seconds: float) -> None:
    """Set the signal that checks the time after so many seconds, if a command asked for it; 0 for none."""
    if _watching.is_set() and current_thread() is main_thread():
        signal.setitimer(signal.ITIMER_PROF, seconds, AGAIN if seconds else 0.0)


def _check_time(number: int, frame: FrameType | None) -> None:
    budget = _OPEN.get()
    if budget is not None and budget._clock._begun is not None:
        budget._clock.require_time()


@contextmanager
def watched() -> Iterator[None]:
    """Check the time by a signal as well, which stops work that charges nothing.  For our own command line.

    It stops only what runs within :meth:`Budget.timed`, where nothing is written yet.
    """
    if _watching.is_set() or current_thread() is not main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    before, hook = signal.signal(signal.SIGPROF, _check_time), sys.unraisablehook
    signal.siginterrupt(signal.SIGPROF, False)  # a call of the system that it meets goes on

    def unraisable(args: sys.UnraisableHookArgs) -> None:
        """Repeat the signal a second later if a finalizer swallowed the error."""
        if not issubclass(args.exc_type, LimitError):
            hook(args)

    sys.unraisablehook = unraisable
    _watching.set()
    try:
        yield
    finally:
        _watching.clear()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
        sys.unraisablehook = hook


_OPEN: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextmanager
def _open_budget(budget: Budget) -> Iterator[Budget]:
    """Open a budget, with its budget for hints."""
    token, comparing = _OPEN.set(budget), COMPARISONS.set(Comparisons())
    try:
        yield budget
    finally:
        COMPARISONS.reset(comparing)
        _OPEN.reset(token)


@contextmanager
def spending() -> Iterator[Budget]:
    """Open a budget, or use the one that is open."""
    budget = _OPEN.get()
    if budget is not None:
        yield budget
        return
    with _open_budget(Budget(limits())) as budget:
        yield budget


@contextmanager
def separately() -> Iterator[Budget]:
    """Open a separate budget, for a step that a search repeats within the limits."""
    with _open_budget(Budget(limits(), _OPEN.get())) as budget:
        yield budget


@contextmanager
def untimed() -> Iterator[Budget]:
    """Open a budget without a limit of time, for a search that has its own."""
    with _open_budget(Budget(limits(), part=math.inf)) as budget:
        yield budget


@contextmanager
def reading(where: str = "") -> Iterator[Budget]:
    """Open a budget around reading a description, whose processor time counts."""
    with spending() as budget, budget.timed(where):
        yield budget


@contextmanager
def moving(nbytes: int) -> Iterator[None]:
    """Open a budget around moving a tensor; the processor time of small ones counts."""
    if nbytes >= SMALL:
        yield
        return
    with reading():
        yield


def grant(nbytes: int, *, where: str) -> None:
    """Add the time that a file of so many bytes may take to the open budget; once for each ``where``."""
    with spending() as budget:
        budget.grant(nbytes, where)


def grant_tensors(count: int, *, where: str) -> None:
    """Add the time that a file with so many tensors may take to the open budget; once for each ``where``.

    Args:
        count: of tensors that the file really describes, and not of those that it only claims to have.
    """
    with spending() as budget:
        budget.grant_tensors(count, where)


def charge(unit: str, count: int, *, where: str) -> None:
    """Spend from the open budget, before the work is done; see :class:`Limits` for the units."""
    with spending() as budget:
        budget.charge(unit, count, where)


def charge_text(raw: bytes, *, where: str) -> None:
    r"""Charge the memory of a text in UTF-8 before it is decoded, as bytes of descriptions.

    One wide character makes all of a string wide: two or four bytes for each character, first in the text and then in
    the strings that are read from it.  Four count as three, since large honest vocabularies hold such characters.

    Args:
        raw: the text; ``\\u`` in it counts as a wide character, as JSON means it.
    """
    width = 1
    if not raw.isascii() or b"\\u" in raw:
        width = 3 if _WIDEST.search(raw) or _WIDEST_ESCAPED.search(raw) else 2
    charge("metadata", width * len(raw), where=where)


NAMED = 3
"""How often the bytes of a name count that a file does not spell out: it is copied where it is taken apart."""


def charge_name(name: str, *, where: str) -> None:
    """Charge a name that is put together of parts which a file has once for many names."""
    escaped = 0 if name.isascii() else 12 * len(name)  # as JSON spells characters that take four bytes
    charge("metadata", NAMED * (sys.getsizeof(name) + escaped), where=where)


_WIDEST, _WIDEST_ESCAPED = re.compile(rb"[\xf0-\xff]"), re.compile(rb"\\u[dD][89abAB]")
"""Characters beyond U+FFFF: in UTF-8, and as JSON spells them."""


def combinations(parts: Sequence[Sequence[Value]], *, where: str) -> Iterator[tuple[Value, ...]]:
    """The product of the parts, the last changing first; charged as members.

    >>> list(combinations([range(2), "ab"], where="a table"))
    [(0, 'a'), (0, 'b'), (1, 'a'), (1, 'b')]
    """
    charge("members", math.prod(map(len, parts)), where=where)
    return product(*parts)
