"""``mutate``: run the user's own pytest tests once for each mistake that is planted into the port.

mutmut and cosmic-ray do the same for code in general. Here the mistakes are those that people make when they port a
model, and mistakes that change nothing are left out.
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
from porting.mutating.messages import ABSENT, APPLIES, EQUIVALENT, VARIABLE, MutationRequest, MutationResult

CAUGHT, SURVIVED, TIMED_OUT = "caught", "survived", "timed out"
PASSED, FAILED, INTERRUPTED, MISUSED, NO_TESTS = 0, 1, 2, 4, 5
"""Exit codes of pytest; 2 also stands for an error while the tests are imported."""

SHORTEST = 30.0
"""Smallest timeout of a run with a mistake, in seconds; it is ten times the run without one if that is more."""

Progress = Callable[[str, int, int], None]


class MutationError(PortingError):
    """The tests cannot be tested: they fail without a mistake, or do not run the port."""


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One planted mistake.

    Attributes:
        outcome: ``caught``, ``survived`` or ``timed out``, which counts as caught.
        looks: how the mistake shows in the model's values.
        advice: what a test needs to detect it.
    """

    name: str
    outcome: str
    seconds: float
    looks: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Score:
    """The mutation score of a test.

    Attributes:
        mutations: the mistakes, in the catalogue's order.
        equivalent: mistakes that change nothing in this port, in float64; left out.
        absent: mistakes that cannot be made in this port.
        seconds: the duration of the tests without a mistake.
    """

    tests: tuple[str, ...]
    into: str
    mutations: tuple[Mutation, ...]
    equivalent: tuple[str, ...]
    absent: tuple[str, ...]
    seconds: float

    @property
    def survivors(self) -> tuple[Mutation, ...]:
        """The mistakes that the tests do not detect."""
        return tuple(mutation for mutation in self.mutations if mutation.outcome == SURVIVED)

    @property
    def caught(self) -> int:
        """The number of mistakes that the tests detect."""
        return len(self.mutations) - len(self.survivors)

    @property
    def share(self) -> float:
        """The mutation score, from 0 to 1; 1 if nothing could be planted."""
        return self.caught / len(self.mutations) if self.mutations else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data for JSON."""
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

    Each run is a process of its own in the current folder, forked from one that has imported the tests. No file of the
    user's is changed.

    Args:
        into: what builds the port, ``my_model:build`` or ``my_model.py:build``: a function or a class.
        only: mistakes to plant, by their names; all of them if empty.
        timeout: the limit of each run in seconds; by default ten times the run without a mistake, and at least 30.
        fresh: let each process import everything anew, for tests that do not work in a forked process.
        progress: called with the current step, the number of finished runs and the number of runs.
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
    others = {kind: tuple(name for name, status in kinds.items() if status == kind) for kind in (EQUIVALENT, ABSENT)}
    return Score(
        tests=tuple(tests),
        into=into,
        mutations=tuple(found),
        equivalent=others[EQUIVALENT],
        absent=others[ABSENT],
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
        """The file for the answer of the process."""
        return self.folder / "answer.json"

    def seen(self) -> MutationResult | None:
        """Return what the last process has observed."""
        return MutationResult.read(self.answer)

    def once(self, request: MutationRequest, timeout: float | None) -> SuiteResult:
        """Run the tests, in a fork of the process that has imported them or in a new process."""
        self.answer.unlink(missing_ok=True)
        return self.start(request).ended(timeout) if self.client is None else self.client.run(request, timeout)

    def start(self, request: MutationRequest) -> SuiteRun:
        """Start a process."""
        path = self.folder / "request.json"
        request.write(path)
        words = [
            "-P",
            "-m",
            "pytest",
            "-x",
            "-q",
            "--no-header",
            "-p",
            "porting.mutating.plugin",
            *_settings(self.folder),
        ]
        environment = {**os.environ, VARIABLE: str(path), "PYTHONDONTWRITEBYTECODE": "1"}
        if request.socket:  # threads of a process that is copied are not in its copy, which waits for them
            environment.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
        return SuiteRun([sys.executable, *words, *self.tests], environment, self.folder / "printed.txt")


@contextmanager
def _started(tests: Sequence[str], into: str, folder: str, fresh: bool) -> Iterator[_Run]:
    """Yield the run, with the process that has imported the tests unless each run imports them again."""
    run = _Run(tuple(tests), into, Path(folder))
    if fresh or not hasattr(os, "fork"):
        yield run
        return
    with listen(run.folder) as listening:
        running = run.start(MutationRequest(into=into, answer=str(run.answer), socket=str(run.folder / "request")))
        with running, closing(ForkClient(running, listening)) as client:
            yield replace(run, client=client)


def _settings(folder: Path) -> list[str]:
    """Return options for pytest that turn off parallel runs, coverage and its cache in the user's folder."""
    unparallel = ["-n0"] if find_spec("xdist") else []
    uncovered = ["--no-cov"] if find_spec("pytest_cov") else []
    return ["-o", "=".join(("cache_dir", str(folder / "cache"))), *unparallel, *uncovered]


def _outcome(ended: SuiteResult) -> str:
    if ended.code is None:
        return TIMED_OUT
    return SURVIVED if ended.code == PASSED else CAUGHT


def _useful(first: SuiteResult, seen: MutationResult | None, run: _Run) -> MutationResult:
    """Return what was observed of the port."""
    lines = [line for line in first.output.splitlines() if line.strip()]
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
    """Return how a mistake shows in the model's values."""
    by_name = {cause.name: cause.looks for cause in CATALOGUE} | {NAME: LOOKS}
    return next((by_name[cause_name] for cause_name in truth(name) if cause_name in by_name), OTHER_LOOKS)
