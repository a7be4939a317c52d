"""What speaks for a line of the table, and how far a search came that found none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from porting.reporting.outcome import Probe
from porting.reporting.report import Report
from porting.suggesting.draft.layer_patterns import Line
from porting.suggesting.draft.table_writer import quoted
from porting.suggesting.draft.unmapped import Near, behind
from porting.suggesting.search.layouts import CandidateRule
from porting.suggesting.search.name_similarity import meanings, numbered
from porting.suggesting.search.search_result import GUESS, SAME, Choice, SearchResult
from porting.suggesting.verdict.proof import Proof
from porting.suggesting.verdict.suggestion import Evidence, Stop


def evidence(lines: Sequence[Line], proof: Proof, found: SearchResult) -> Iterator[Evidence]:
    """What speaks for each line.

    Args:
        lines: of the table.
        proof: the table's, on the twin.
        found: what the search came to.
    """
    ours, theirs = behind(found.trace), behind(found.reference)
    for line in lines:
        left = " + ".join(f"{name} [{axes}]" if axes else name for name, axes in line.sources)
        right = " + ".join(f"{name} [{axes}]" if axes else name for name, axes in line.targets)
        choice = _choice(line, found)
        said = [*_place(line, ours, theirs), *_names(line), *_tried(choice), _count(line)]
        if proof.report is not None:
            said += _proven(line, proof.report)
        yield Evidence(line=f"{quoted(left)} = {quoted(right)}", decided=line.why, said="\n".join(said))


def _choice(line: Line, found: SearchResult) -> Choice | None:
    """What was tried for a line, in the layer where most was."""
    written = set(line.writes)
    some = [one for one in found.choices if any(written & set(move.writes) for move in one.moves)]
    return max(some, key=lambda one: (one.far > SAME, one.tried), default=None)


def _place(line: Line, ours: dict[str, str], theirs: dict[str, str]) -> Iterator[str]:
    if not line.reads or not line.writes:
        return
    mine, other = (where.get(name) for where, name in ((ours, line.writes[0]), (theirs, line.reads[0])))
    if mine is not None and other is not None:
        yield f"Place: {numbered(mine) or 'first'}; in the reference {numbered(other) or 'first'}."


def _names(line: Line) -> Iterator[str]:
    if line.reads and line.writes:
        same = sorted(meanings(line.reads[0]) & meanings(line.writes[0]))
        yield f"Names: both say {', '.join(same)}." if same else "Names: nothing in common."


def _tried(choice: Choice | None) -> Iterator[str]:
    if choice is None:
        return
    seen = f"what meets {choice.behind}" if choice.behind else "what is returned"
    if choice.tried == 1:
        shows = "is the reference's own activation" if choice.far <= SAME else f"is off by {choice.far:.0e}"
        yield f"Tried: nothing else; with it, {seen} {shows}."
        return
    shows = f"is the reference's own activation, {_far(choice.far)}"
    if choice.far > SAME:
        shows = f"comes nearest to the reference's, off by {choice.far:.0e}"
    yield f"Tried: {choice.tried} ways that names and shapes leave open; with this one, {seen} {shows}."
    for moves, far in choice.rivals:
        yield f"{'Lost' if choice.far <= SAME else 'Also tried'}: {_other(moves, choice.moves)}, off by {far:.0e}."


def _other(moves: Sequence[CandidateRule], chosen: Sequence[CandidateRule]) -> str:
    """In what a rival differs."""
    texts = [f"{' + '.join(a.term for a in one.sources)} = {' + '.join(b.term for b in one.targets)}" for one in moves]
    known = {f"{' + '.join(a.term for a in one.sources)} = {' + '.join(b.term for b in one.targets)}" for one in chosen}
    apart = [text for text in texts if text not in known]
    return quoted("; ".join(apart[:2])) + (f" and {len(apart) - 2} more" if len(apart) > 2 else "")


def _count(line: Line) -> str:
    first = f"the first {line.reads[0]} into {line.writes[0]}" if line.reads and line.writes else ""
    many = f"{len(line.reads)} of the twin's tensors" if len(line.reads) != 1 else "one of the twin's tensors"
    return f"Stands for: {many}, {first}."


def _proven(line: Line, report: Report) -> Iterator[str]:
    """Where what these weights make was compared, and how far it was off; and how much of them that showed."""
    if line.why == GUESS:
        return
    paths = {name.rpartition(".")[0] for name in line.writes}
    here = [probe for probe in report.probes if probe.port in paths]
    here = here or [probe for probe in report.probes if paths & set(probe.span)]
    if here:
        worst = max(here, key=_off)
        where = f"compared at {_places(here)}"
        yield f"Proof: what it makes is {where}, {_far(_off(worst))}."
    shown = [report.shown.activation[name] for name in line.writes if name in report.shown.activation]
    if len(shown) == len(line.writes):
        yield f"Shown: {100 * min(shown):.0f} % of their elements at work."


def _far(size: float) -> str:
    return f"off by {size:.0e}" if size else "equal to the last bit"


def _off(probe: Probe) -> float:
    return probe.meaning.isolated if probe.meaning.isolated is not None else probe.meaning.end_to_end


def _places(probes: Sequence[Probe]) -> str:
    more = f" and {len(probes) - 1} more" if len(probes) > 1 else ""
    return f"{probes[0].port}{more}"


def stopped(found: SearchResult, proof: Proof) -> Stop:
    """Up to where the proof holds, what comes behind it, and what is nearest there."""
    probes = () if proof.report is None else proof.report.probes
    proven = 0
    while proven < len(probes) and not (probes[proven].differs or probes[proven].guilty):
        proven += 1
    first = next((one for one in found.divergences if one.ends), None)
    if first is not None:
        at, near = first.port, first.near or (((first.reference, math.nan),) if first.reference else ())
    else:
        open_ = (name for unit in found.trace.units for name in unit.names if name in set(found.open))
        later = (one.port for one in probes[proven:])
        at, near = next(open_, next(later, "")), ()
    return Stop(
        proven=proven,
        places=len(probes),
        behind=_named(probes[proven - 1].port) if proven else "",
        at=_named(at),
        near=tuple(Near(name=name, difference=None if math.isnan(far) else far) for name, far in near),
    )


def _named(point: str) -> str:
    """A point in words: ``h.0.attn -> scores`` is the scores of it, and what is ``.`` is the module as a whole."""
    path, arrow, inner = point.partition(" -> ")
    if path == ".":
        return f"its {inner}" if arrow else "what is returned"
    return f"the {inner} of {path}" if arrow else point
