"""``mutate``: the user's own pytest test, run once for each mistake that is planted into the port.

As mutmut and cosmic-ray do for code, but with the mistakes that people make when they port a model, and with those left
out that change nothing.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from porting.causes.catalogue import CATALOGUE
from porting.causes.dropout import LOOKS, NAME
from porting.causes.mutants import PLANTS, truth
from porting.causes.weights import LOOKS as OTHER_LOOKS
from porting.errors import Code, Fault, Message, Option, PortingError, nearest
from porting.mutating.fork_server import ForkClient, SuiteResult, SuiteRun, listen
from porting.mutating.messages import APPLIES, EQUIVALENT, VARIABLE, MutationRequest, MutationResult

CAUGHT, SURVIVED, TIMED_OUT = "caught", "survived", "timed out"
PASSED, FAILED, INTERRUPTED, MISUSED, NO_TESTS = 0, 1, 2, 4, 5
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
        advice: the line that a test lacks which does not see it.
    """

    name: str
    outcome: str
    seconds: float
    looks: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Score:
    """How good a test is.

    Attributes:
        tests, into: what was tested, and what builds the port.
        mutations: the mistakes, in the catalogue's order.
        equivalent: mistakes that change nothing in this port, in float64; left out.
        absent: mistakes that cannot be made in this port.
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
        return tuple(mutation for mutation in self.mutations if mutation.outcome == SURVIVED)

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
    fresh: bool = False,
    progress: Progress | None = None,
) -> Score:
    """Plant each mistake into what ``into`` builds, and run the tests.

    Each run is a process of its own, in the current folder: a copy of one that has imported the tests and has run none
    of them.  No file of the user's is changed.

    Args:
        tests: what pytest is given: files, folders, or names of tests.
        into: what builds the port, ``my_model:build`` or ``my_model.py:build``: a function or a class.
        only: mistakes to plant, by their names; all of them if empty.
        timeout: seconds that each run may take; by default ten times what the tests take without a mistake.
        fresh: let each process import everything anew, for tests that cannot live with being copied.
        progress: called with what is done, how many runs are done and how many there are.

    Raises:
        MutationError: the tests fail as they are, do not run the port, or there is no mistake of that name.
    """
    _refuse_unknown(only)
    tell = progress or (lambda what, done, total: None)
    tell("the tests are imported", 0, 0)
    with tempfile.TemporaryDirectory(prefix="porting-mutate-") as folder, _started(tests, into, folder, fresh) as run:
        tell("the tests as they are", 0, 0)
        first = run.once(MutationRequest(into=into, answer=str(run.answer)), timeout)
        seen = _useful(first, run.seen(), run)
        if run.client is not None:
            run.client.prepare(seen.imports)
        limit = timeout or max(SHORTEST, 10 * first.seconds)
        kinds = {name: mistake.kind for name, mistake in seen.mistakes.items()}
        chosen = [plant.name for plant in PLANTS if kinds[plant.name] == APPLIES and (not only or plant.name in only)]
        found = []
        for number, name in enumerate(chosen):
            tell(name, number, len(chosen))
            request = MutationRequest(
                into=into, mistake=name, roles=seen.roles, inner=seen.inner, answer=str(run.answer)
            )
            ended = run.once(request, limit)
            advice = seen.mistakes[name].advice
            found.append(
                Mutation(name=name, outcome=_outcome(ended), seconds=ended.seconds, looks=_looks(name), advice=advice)
            )
        tell("done", len(chosen), len(chosen))
    rest = {kind: tuple(name for name, status in kinds.items() if status == kind) for kind in (EQUIVALENT, "absent")}
    return Score(
        tests=tuple(tests),
        into=into,
        mutations=tuple(found),
        equivalent=rest[EQUIVALENT],
        absent=rest["absent"],
        seconds=first.seconds,
    )


@dataclass(frozen=True)
class _Run:
    tests: tuple[str, ...]
    into: str
    folder: Path
    client: ForkClient | None = None

    @property
    def answer(self) -> Path:
        """Where the process tells what it saw."""
        return self.folder / "answer.json"

    def seen(self) -> MutationResult | None:
        """What the last process told."""
        return MutationResult.read(self.answer)

    def once(self, request: MutationRequest, timeout: float | None) -> SuiteResult:
        """Run the tests, in a copy of the process that has imported them or in one of their own."""
        self.answer.unlink(missing_ok=True)
        return self.start(request).ended(timeout) if self.client is None else self.client.run(request, timeout)

    def start(self, request: MutationRequest) -> SuiteRun:
        """Begin a process."""
        path = self.folder / "request.json"
        request.write(path)
        words = ["-m", "pytest", "-x", "-q", "--no-header", "-p", "porting.mutating.plugin", *_settings(self.folder)]
        environment = {**os.environ, VARIABLE: str(path), "PYTHONDONTWRITEBYTECODE": "1"}
        if request.socket:  # threads of a process that is copied are not in its copy, which waits for them
            environment.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
        return SuiteRun([sys.executable, *words, *self.tests], environment, self.folder / "printed.txt")


@contextmanager
def _started(tests: Sequence[str], into: str, folder: str, fresh: bool) -> Iterator[_Run]:
    """The process that has imported the tests, unless each run is to import them again."""
    run = _Run(tuple(tests), into, Path(folder))
    if fresh or not hasattr(os, "fork"):
        yield run
        return
    with listen(run.folder) as listening:
        running = run.start(MutationRequest(into=into, answer=str(run.answer), socket=str(run.folder / "request")))
        with running, closing(ForkClient(running, listening)) as client:
            yield replace(run, client=client)


def _settings(folder: Path) -> list[str]:
    """What the user's own settings of pytest may not do here: share the work among processes, or keep anything."""
    alone = ["-n0"] if find_spec("xdist") else []
    uncovered = ["--no-cov"] if find_spec("pytest_cov") else []
    return ["-o", "=".join(("cache_dir", str(folder / "cache"))), *alone, *uncovered]


def _outcome(ended: SuiteResult) -> str:
    if ended.code is None:
        return TIMED_OUT
    return SURVIVED if ended.code == PASSED else CAUGHT


def _useful(first: SuiteResult, seen: MutationResult | None, run: _Run) -> MutationResult:
    """What the tests run of the port.

    Raises:
        MutationError: they say nothing about mistakes: they fail already, there are none, or they do not run the port.
    """
    lines = [line for line in first.said.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if line.startswith("ERROR: ")), lines[-1] if lines else "")
    where, hint = " ".join(run.tests), ""
    if first.code is None:
        message = "the tests did not end in time as they are"
        hint = Message("give them more: ", Option("timeout"))
    elif first.code == NO_TESTS:
        message, hint = "pytest found no tests", "name files, folders or tests as for pytest"
    elif first.code == MISUSED:
        message = f"pytest cannot run them: {last.removeprefix('ERROR: ')}"
        hint = "name files, folders or tests as for pytest"
    elif first.code != PASSED:
        message, hint = f"the tests fail as they are: {last}", "they have to pass before a mistake is planted"
    elif seen is not None and not seen.imported:
        message = f"the tests never import {run.into.rpartition(':')[0]}"
        hint = "name the module or the file that builds what they test: my_model:build, src/my_model.py:build"
    elif seen is not None and not seen.built:
        message = f"the tests never call {run.into}"
        hint = "build the port by it, in a test or a fixture: what its own module builds on import is too early"
    elif seen is None or not seen.ran:
        message = f"the tests never run what {run.into} builds"
        hint = "call what it returns with tensors, in the same process"
    else:
        return seen
    raise MutationError(Fault(code=Code.NOTHING_TO_MUTATE, where=where, message=message, hint=hint))


def _refuse_unknown(only: Sequence[str]) -> None:
    known = [plant.name for plant in PLANTS]
    faults = [
        Fault(code=Code.NOTHING_TO_MUTATE, message=f"there is no mistake called {name!r}", hint=nearest(name, known))
        for name in only
        if name not in known
    ]
    if faults:
        raise MutationError(faults)


def _looks(name: str) -> str:
    """How a mistake looks from outside."""
    known = {cause.name: cause.looks for cause in CATALOGUE} | {NAME: LOOKS}
    return next((known[cause_name] for cause_name in truth(name) if cause_name in known), OTHER_LOOKS)
