"""Behind the proof: the trials that ``verify`` runs as well, float32, and a twin with more layers.

A module can be right on the batches of a proof and wrong on others: on rows of one token, on rows that are padded in
front, once it was called before, in float32, in its third layer where the twin has two.  What differs takes the proof
away, and what could not be tried is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from porting.checkpoint import Checkpoint
from porting.errors import PortingError
from porting.notation.table import Table
from porting.reporting.outcome import IMPRECISE
from porting.reporting.report import Report
from porting.suggesting.search.finding import CLOSE
from porting.suggesting.subjects.building import Builder
from porting.suggesting.subjects.fields import Role
from porting.suggesting.subjects.subject import Subjects, number_of
from porting.suggesting.subjects.twin import DEEP, SMALL, make_twin
from porting.suggesting.verdict.calling import defaults, lowered, rounds_by_itself
from porting.suggesting.verdict.proving import Proof, cases, prove
from porting.suggesting.verdict.reasons import met
from porting.suggesting.verdict.suggestion import Reason
from porting.tracing.trace import ROOT
from porting.trials.scope import Kind, Result, Scope
from porting.verification.inputs import Case


class Proven(Protocol):
    """Runs a proof on some batches of a checkpoint."""

    def __call__(self, batches: Sequence[Case] | None, of: Checkpoint, *, trials: bool = False) -> Proof:
        """Prove the table on these batches; None for the usual ones."""


@dataclass(frozen=True, kw_only=True)
class Beyond:
    """What was seen behind the proof.

    Attributes:
        reasons: where the module differs.
        limits: what was not tried, and what a user should know of calls that the table does not make.
        proof: on the other batches; None where none were run.
    """

    reasons: tuple[Reason, ...] = ()
    limits: tuple[str, ...] = ()
    proof: Proof | None = None

    @property
    def worst(self) -> float | None:
        """The largest difference of an output on the batches behind the proof; None where none differed."""
        return max((one.size for one in self.reasons if one.size is not None and one.kind in set(Kind)), default=None)


def untried(own: Proof | None) -> Beyond:
    """What is known where there was no time: what was tried on the checkpoint itself, or that nothing was."""
    if own is None or own.report is None or not own.whole:
        return Beyond(reasons=(met("other rows, masks and calls were tried"),))
    scopes = [own.report.scope]
    reasons = (*_impure(scopes), *_differing(scopes), *_compared([own.report]))
    return Beyond(reasons=reasons, limits=("rows, masks and calls at other sizes: the limit was met",), proof=own)


def beyond(
    into: Builder,
    table: Table,
    subjects: Subjects,
    *,
    seed: int,
    fresh: bool,
    deep: Table | None,
    own: Proof | None = None,
) -> Beyond:
    """Try what the proof did not.

    Args:
        into: the user's module or builder.
        table: the suggested one, proven on the twin.
        subjects: how they were run; the module holds what was found.
        seed: of the inputs.
        fresh: some of the module's parameters have no source.
        deep: where nothing of the checkpoint's own size is run: the table for its depth, of which a twin is.
        own: the proof on the checkpoint itself, with its trials where it is ``verify``'s.
    """
    twin = subjects.twin.checkpoint

    def proven(batches: Sequence[Case] | None, of: Checkpoint, *, trials: bool = False) -> Proof:
        suited = table if of is twin or deep is None else deep
        return prove(of, into, suited, subjects, seed=seed, fresh=fresh, small=True, batches=batches, trials=trials)

    wide = proven(None, twin, trials=True)
    reports = [one.report for one in (own, wide) if one is not None and one.report is not None]
    scopes = [one.scope for one in reports if one.scope.results] or [Scope()]
    reasons = [*_impure(scopes), *_differing(scopes), *_compared(reports), *rounds_by_itself(into, subjects)]
    limits = [*defaults(subjects), *lowered(into, subjects), *_not_run(scopes[0])]
    if deep is not None and subjects.twin.shrunk:
        tall, depth = _deep(subjects, proven, seed)
        if tall is not None and tall.report is not None and not tall.exact:
            said = f"the proof holds on 2 layers and does not on {depth}, of another width: {_far(tall)}"
            reasons.append(Reason(kind="depth", said=said))
        elif tall is None or tall.report is None:
            limits.append("more layers than two: the module could not be built with them at another small size")
    return Beyond(reasons=tuple(reasons), limits=tuple(limits), proof=wide)


def _differing(scopes: Sequence[Scope]) -> Iterator[Reason]:
    """What the output differs on, by the property of the batch; no weights can repair a mask."""
    told: set[Kind] = set()
    for scope in scopes:
        kinds: dict[Kind, list[Result]] = {}
        for one in scope.differing:
            kinds.setdefault(one.kind, []).append(one)
        for kind, results in kinds.items():
            if kind not in told:
                yield _differs(kind, results)
        told |= set(kinds)


def _differs(kind: Kind, results: Sequence[Result]) -> Reason:
    whats = list(dict.fromkeys(one.what for one in results))
    more = f" and {len(whats) - MOST_NAMED} more" if len(whats) > MOST_NAMED else ""
    worst = max((one.difference or 0.0 for one in results), default=0.0)
    said = f"the output differs on {', '.join(whats[:MOST_NAMED])}{more}: off by {worst:.0e} of its scale"
    return Reason(kind=str(kind), said=said, size=worst, shown=kind is Kind.MASK and worst > CLOSE)


def _impure(scopes: Sequence[Scope]) -> Iterator[Reason]:
    for one in {(one.kind, one.detail): one for scope in scopes for one in scope.impure}.values():
        detail = f": {one.detail}" if one.detail else ""
        size = f", off by {one.size:.0e}" if one.size else ""
        yield Reason(kind="state", said=f"the module {one.kind}{detail}{size}")


def _compared(reports: Sequence[Report]) -> Iterator[Reason]:
    """What else takes a verdict of ``verify`` away: larger rounding errors."""
    for report in reports:
        if report.verdict == IMPRECISE:
            probes = [one for one in report.probes if one.imprecise or one.drifts]
            where = "what is returned" if probes[0].port == ROOT else probes[0].port
            said = f"its rounding errors in float32 are larger than the reference's, first at {where}"
            yield Reason(kind="rounding", said=said, size=report.noise.get("float32", 0.0))
            return


def _not_run(scope: Scope) -> Iterator[str]:
    for one in scope.not_run[:MOST_NAMED]:
        yield f"{one.what} ({one.why})"
    returned = scope.returned
    if returned is not None and not returned.compared:
        yield "what the module returns: nothing of the reference's equals it"


MOST_NAMED = 3
"""So many batches are named; then comes how many more there are."""


def _deep(subjects: Subjects, proven: Proven, seed: int) -> tuple[Proof | None, int]:
    """The proof on a twin with as many layers as the checkpoint, more heads and other sizes; and how many layers."""
    kind = subjects.twin.architecture
    with TemporaryDirectory(prefix="porting-deep-") as folder:
        words = number_of(subjects.twin.config, Role.VOCABULARY)
        sizes = DEEP if words == SMALL.vocabulary else replace(DEEP, vocabulary=words)  # the module's own
        try:
            stored = frozenset(subjects.twin.tensors)
            other = make_twin(subjects.config, kind, Path(folder), small=True, seed=seed + 1, to=sizes, stored=stored)
        except PortingError:
            return None, 0
        spare = number_of(subjects.twin.config, Role.POSITIONS, subjects.longest) - subjects.longest
        longest = max(number_of(other.config, Role.POSITIONS, subjects.longest) - max(spare, 0), 1)
        batches = cases(subjects, other.config, seed=seed, longest=longest)
        return proven(batches, other.checkpoint), number_of(other.config, Role.DEPTH)


def _far(proof: Proof) -> str:
    if proof.difference is None:
        return proof.refused.partition("\n")[0]
    return f"off by {proof.difference:.0e} of the activations' scale"
