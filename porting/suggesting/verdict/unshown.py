"""What a proof did not see: said beside the verdict, so that nobody takes it for proven."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from porting.reporting.report import Report
from porting.suggesting.draft.generalise import indexed
from porting.suggesting.subjects.fields import Role
from porting.suggesting.subjects.subject import Subjects, number_of
from porting.suggesting.verdict.beyond import Beyond
from porting.suggesting.verdict.proving import Proof
from porting.tracing.code_coverage import Branch

MANY = 3
"""More than so many names or lines of code are counted and not listed."""


def unshown(subjects: Subjects, proof: Proof, own: Proof | None, behind: Beyond) -> Iterator[str]:
    """What was not seen, in words.

    Args:
        subjects: how the models were run.
        proof: on the twin.
        own: on the checkpoint itself; None where that was not run.
        behind: what was tried besides.
    """
    reports = [one.report for one in (proof, behind.proof, own) if one is not None and one.report is not None]
    if subjects.twin.shrunk and own is None:
        yield "the checkpoint's own sizes, which are too large to be run here: sizes are the twin's"
    longest, most = subjects.longest, number_of(subjects.config, Role.POSITIONS)
    if 0 < longest < most:
        yield f"rows of more than {longest} words, of {most} that the checkpoint takes"
    if reports and not any(probe.port.partition(" ")[0] == "." for probe in reports[0].probes):
        yield "what is returned, but for one batch: no rule says how it comes from what the reference returns"
    yield from behind.limits
    whats = [{_what(one) for one in report.unseen} for report in reports]
    if own is not None and own.whole:  # verify's own batches: what these did not show, verify reports as well
        whats = []
    for one in reports[-1].unseen if reports else ():
        if all(_what(one) in some for some in whats) and not one.startswith("position"):
            yield one
    unread = [name for name in (reports[0].shown.copy if reports else ()) if _everywhere(name, reports)]
    if unread:
        listed = [name for (name,) in indexed([(name,) for name in unread])]
        yield f"what {_some(listed)} would do at work: nothing that is compared depends on it"
    branches = [
        branch
        for branch in (reports[0].not_taken if reports else ())
        if all(_key(branch) in {_key(one) for one in report.not_taken} for report in reports)
    ]
    if branches:
        yield f"code that no batch led to: {_some([f'{one.condition} ({one.where})' for one in branches])}"


def _what(text: str) -> str:
    """What was not shown, without the why."""
    return text.partition(" (")[0]


def _everywhere(name: str, reports: Sequence[Report]) -> bool:
    return all(name not in report.shown.activation for report in reports)


def _key(branch: Branch) -> tuple[str, str]:
    return branch.where, branch.condition


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MANY} more" if len(names) > MANY else ""
    return ", ".join(names[:MANY]) + more
