"""``mutate``: the user's own pytest test, run once for each mistake that is planted into the port.

As mutmut and cosmic-ray do for code, but with the mistakes that people make when they port a model, and with those left
out that change nothing (Jia and Harman 2011, section II.B: equivalent mutants).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from porting.causes.catalogue import CATALOGUE
from porting.causes.dropout import LOOKS, NAME
from porting.causes.planting import PLANTS, truth
from porting.causes.weights import LOOKS as OTHER_LOOKS
from porting.errors import Code, Fault, PortingError, nearest, option
from porting.mutating.orders import APPLIES, EQUIVALENT, VARIABLE, Orders, Seen

CAUGHT, SURVIVED, TIMED_OUT = "caught", "survived", "timed out"
PASSED, FAILED, INTERRUPTED, NO_TESTS = 0, 1, 2, 5
"""Exit codes of pytest; 2 is also what an error while the tests are imported gives."""

SHORTEST = 30.0
"""Seconds that a run with a mistake has at least; ten times what the run without one took, if that is more."""

Progress = Callable[[str, int, int], None]


class MutationError(PortingError):
    """The test cannot be tested: it fails without a mistake, or does not run the port."""


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One mistake.

    Attributes:
        name: the entry of the catalogue.
        outcome: ``caught``, ``survived`` or ``timed out``, which counts as caught.
        seconds: that the run took.
        looks: how the mistake looks from outside.
    """

    name: str
    outcome: str
    seconds: float
    looks: str


@dataclass(frozen=True, kw_only=True)
class Score:
    """How good a test is.

    Attributes:
        tests, into: what was tested, and what builds the port.
        mutations: the mistakes, in the catalogue's order.
        equivalent: mistakes that change nothing in this port, in float64; left out.
        absent: mistakes that have no place in this port.
        seconds: that the test takes by itself.
    """

    tests: tuple[str, ...]
    into: str
    mutations: tuple[Mutation, ...]
    equivalent: tuple[str, ...]
    absent: tuple[str, ...]
    seconds: float

    @property
    def survivors(self) -> tuple[Mutation, ...]:
        """What the test does not see."""
        return tuple(one for one in self.mutations if one.outcome == SURVIVED)

    @property
    def caught(self) -> int:
        """How many it sees."""
        return len(self.mutations) - len(self.survivors)

    @property
    def share(self) -> float:
        """The mutation score, from 0 to 1; 1 when nothing could be planted."""
        return self.caught / len(self.mutations) if self.mutations else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        return {"score": self.share, "caught": self.caught, "survived": len(self.survivors), **asdict(self)}


def mutate(
    tests: Sequence[str],
    into: str,
    *,
    only: Sequence[str] = (),
    timeout: float | None = None,
    progress: Progress | None = None,
) -> Score:
    """Plant each mistake into what ``into`` builds, and run the tests.

    Each run is a process of its own, in the current folder; no file of the user's is changed.

    Args:
        tests: what pytest is given: files, folders, or names of tests.
        into: what builds the port, ``my_model:build`` or ``my_model.py:build``: a function or a class.
        only: mistakes to plant, by their names; all of them if empty.
        timeout: seconds that each run may take; by default ten times what the tests take without a mistake.
        progress: called with what is done, how many runs are done and how many there are.

    Raises:
        MutationError: the tests fail as they are, do not run the port, or there is no mistake of that name.
    """
    _refuse_unknown(only)
    tell = progress or (lambda what, done, total: None)
    tell("the tests as they are", 0, 0)
    with tempfile.TemporaryDirectory(prefix="porting-mutate-") as folder:
        run = _Run(tuple(tests), into, Path(folder))
        first = run.once(Orders(into=into, answer=str(run.answer)), timeout)
        seen = run.seen()
        _refuse(first, seen, run)
        assert seen is not None  # noqa: S101  # refused above
        limit = timeout or max(SHORTEST, 10 * first.seconds)
        chosen = [one.name for one in PLANTS if seen.mistakes[one.name] == APPLIES and (not only or one.name in only)]
        found = []
        for number, name in enumerate(chosen):
            tell(name, number, len(chosen))
            orders = Orders(into=into, mistake=name, roles=seen.roles, answer=str(run.answer))
            ended = run.once(orders, limit)
            found.append(Mutation(name=name, outcome=_outcome(ended), seconds=ended.seconds, looks=_looks(name)))
        tell("done", len(chosen), len(chosen))
    rest = {kind: tuple(name for name, one in seen.mistakes.items() if one == kind) for kind in (EQUIVALENT, "absent")}
    return Score(
        tests=tuple(tests),
        into=into,
        mutations=tuple(found),
        equivalent=rest[EQUIVALENT],
        absent=rest["absent"],
        seconds=first.seconds,
    )


@dataclass(frozen=True, kw_only=True)
class _Ended:
    code: int | None
    seconds: float
    said: str


@dataclass(frozen=True)
class _Run:
    tests: tuple[str, ...]
    into: str
    folder: Path

    @property
    def answer(self) -> Path:
        """Where the process tells what it saw."""
        return self.folder / "answer.json"

    def seen(self) -> Seen | None:
        """What the last process told."""
        return Seen.read(self.answer)

    def once(self, orders: Orders, timeout: float | None) -> _Ended:
        """Run the tests in a process of their own."""
        self.answer.unlink(missing_ok=True)
        path = self.folder / "orders.json"
        orders.write(path)
        words = ["-m", "pytest", "-x", "-q", "--no-header", "-p", "porting.mutating.plugin", "-p", "no:cacheprovider"]
        environment = {**os.environ, VARIABLE: str(path), "PYTHONDONTWRITEBYTECODE": "1"}
        begun = time.perf_counter()
        try:
            ended = subprocess.run(  # noqa: S603  # pytest, with what the user typed
                [sys.executable, *words, *self.tests],
                env=environment,
                check=False,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            return _Ended(code=None, seconds=time.perf_counter() - begun, said="")
        return _Ended(code=ended.returncode, seconds=time.perf_counter() - begun, said=ended.stdout + ended.stderr)


def _outcome(ended: _Ended) -> str:
    if ended.code is None:
        return TIMED_OUT
    return SURVIVED if ended.code == PASSED else CAUGHT


def _refuse(first: _Ended, seen: Seen | None, run: _Run) -> None:
    """Refuse tests that say nothing about mistakes: they fail already, there are none, or they do not run the port."""
    last = next((line for line in reversed(first.said.splitlines()) if line.strip()), "")
    where = " ".join(run.tests)
    if first.code is None:
        message, hint = "the tests did not end in time as they are", f"give them more: {option('timeout')}"
    elif first.code == NO_TESTS:
        message, hint = "pytest found no tests", "name files, folders or tests as for pytest"
    elif first.code != PASSED:
        message, hint = f"the tests fail as they are: {last}", "they have to pass before a mistake is planted"
    elif seen is None or not seen.ran:
        message = f"the tests never run what {run.into} builds"
        hint = "build the module by that name in them, my_model.build(), and not by a copy of it"
    else:
        return
    raise MutationError(Fault(code=Code.NOTHING_TO_MUTATE, where=where, message=message, hint=hint))


def _refuse_unknown(only: Sequence[str]) -> None:
    known = [one.name for one in PLANTS]
    faults = [
        Fault(code=Code.NOTHING_TO_MUTATE, message=f"there is no mistake called {name!r}", hint=nearest(name, known))
        for name in only
        if name not in known
    ]
    if faults:
        raise MutationError(faults)


def _looks(name: str) -> str:
    """How a mistake looks from outside."""
    known = {one.name: one.looks for one in CATALOGUE} | {NAME: LOOKS}
    return next((known[one] for one in truth(name) if one in known), OTHER_LOOKS)
