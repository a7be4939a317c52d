"""The evidence against a module, by the catalogue's entries, the evidence for a line, and how far a search came."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType

from porting.causes.catalogue import CATALOGUE, THEMES
from porting.causes.finding import Finding
from porting.causes.step_differences import Kind as Repaired
from porting.reporting.outcome import Probe
from porting.reporting.report import Report
from porting.suggesting.draft.layer_patterns import Line, indexed
from porting.suggesting.draft.table_writer import quoted
from porting.suggesting.draft.unmapped import Near, behind
from porting.suggesting.search.layouts import CandidateRule
from porting.suggesting.search.name_similarity import meanings, numbered
from porting.suggesting.search.search_result import CLOSE, GUESS, SAME, Choice, SearchResult
from porting.suggesting.verdict.proof import Proof
from porting.suggesting.verdict.suggestion import Evidence, Reason, Stop

MOSTLY = 0.99
"""A small difference is put down to the nearest entry if that explains so much of it."""

ALSO = 0.9
"""And so much of it is enough where the entry is named elsewhere and the rest has a cause of its own."""

FINE = 2.0**-24
"""A difference in float64 that float32 cannot tell, of the activation's scale: half of its last digit."""

SLIGHT = 1e-5
"""A difference up to this is that of a constant with few digits, as 1.41421 for the root of 2, or of an eps: an
approximation, also where it has no name."""

_THEMES = MappingProxyType({cause.name: theme for theme, causes in THEMES.items() for cause in causes})
_OTHER_FUNCTION = frozenset(
    (
        *(cause.name for cause in CATALOGUE if not cause.absorbed_by_weights and not cause.rough),
        Repaired.GATED,
        Repaired.MASK,
    )
)
"""Causes that change the function whatever the weights are; for others, other weights might give the same function."""


def _theme(parts: Sequence[str]) -> str:
    """The theme of a cause, or of several that come together: ``masks`` where one of these is about a mask."""
    themes = {"masks" if one == Repaired.MASK else _THEMES.get(one, SEVERAL) for one in parts}
    return "masks" if "masks" in themes else themes.pop() if len(themes) == 1 else SEVERAL


def _is_other_function(parts: Sequence[str]) -> bool:
    """Whether no weights can make up for it.

    Of several that come together one about a mask is enough: what a mask hides does not depend on weights.  Of others
    the small one may be what weights cannot change.
    """
    final = [one in _OTHER_FUNCTION for one in parts]
    return all(final) or (any(final) and _theme(parts) == "masks")


SEVERAL = "several"
"""The theme of a cause that belongs to no theme, or to more than one."""


def known(proof: Proof, *, guessed: bool = False, but: Collection[str] = ()) -> list[Reason]:
    """Each cause that the catalogue names, with the size of the difference that it makes.

    Args:
        guessed: some weights were placed without being sure.  A cause that is found with wrong weights shows nothing,
            nor does one behind a difference without a known cause.  A cause that reproduces the module to the last
            digits, given the reference's own activations, was found with the right weights, and counts.
        but: modules that have no weights of the checkpoint's, for a reason that is known: what they compute has no
            other cause.
    """
    order = [] if proof.report is None else [probe.port for probe in proof.report.probes]
    first = min((order.index(one.probes[0]) for one in unknown(proof) if one.probes[0] in order), default=len(order))
    found = []
    for one in _findings(proof):
        if _fine(one) or {*one.probes} <= {*but}:
            continue
        if one.name or _dominated(one):
            sure = (not guessed and one.probes[0] in order[:first]) or (one.residual <= SAME and bool(one.name))
            reason = _reason(one) if one.name else _mostly(one)
            found.append(reason if sure else replace(reason, shown=False))
        elif _near(one):
            found.append(_mostly(one))
    return found


def unnamed(proof: Proof) -> list[Finding]:
    """The findings without a name, slight or not."""
    return [one for one in _findings(proof) if not (one.name or _near(one) or _dominated(one))]


def unknown(proof: Proof) -> list[Finding]:
    """The findings without a name that are more than slight."""
    return [one for one in unnamed(proof) if one.difference > SLIGHT]


def elsewhere(one: Finding, proof: Proof, rounded: float = 0.0) -> bool:
    """Whether a small difference comes mostly from a cause that is named at other places.

    Args:
        rounded: by how much positions are rounded otherwise: what a cause leaves may be about that.
    """
    names = {other.name or other.nearest[0].name for other in _findings(proof) if other.name or _near(other)}
    return one.difference <= CLOSE and any(
        near.name in names and (near.share >= ALSO or near.residual <= 2 * rounded) for near in one.nearest[:1]
    )


def fine(proof: Proof, *, rounded: bool = False) -> Iterator[Reason]:
    """Differences that float32 cannot tell, as a constant makes that is kept in it or typed by hand.

    Args:
        rounded: positions are rounded otherwise, which is why slight differences are there.
    """
    some = [one for one in _findings(proof) if _fine(one)]
    if some:
        size, where = max(one.difference for one in some), several([probe for one in some for probe in one.probes])
        text = f"{where} is rounded otherwise, as with a constant in float32 or in few digits: {_far(size)}"
        yield Reason(kind="rounding", said=text, size=size)
    slight = [one for one in unnamed(proof) if FINE < one.difference <= SLIGHT]
    if slight and not rounded:
        size, where = max(one.difference for one in slight), several([probe for one in slight for probe in one.probes])
        text = f"a small difference, as from a constant with few digits, at {where}: {_far(size)}"
        text += "; no known mistake explains it"
        yield Reason(kind="constant", said=text, size=size)


def _fine(one: Finding) -> bool:
    """Whether float32 cannot tell a difference that no entry of the catalogue names; a repair may say at which step.

    Nor does an entry about positions name it: tables that are made otherwise are rounded otherwise, whatever theta is.
    """
    return one.difference <= FINE and _THEMES.get(one.name, "positions") == "positions" and not _near(one)


def _findings(proof: Proof) -> Sequence[Finding]:
    return () if proof.report is None else proof.report.causes


def _near(one: Finding) -> bool:
    return one.difference <= CLOSE and bool(one.nearest) and one.nearest[0].share >= MOSTLY


def _dominated(one: Finding) -> bool:
    """Whether a large difference is that of one entry and of something small besides, as of another eps.

    Only an entry counts that no weights can take away, and only where it leaves no more than an approximation.
    """
    near = one.nearest[0] if one.nearest and not one.name else None
    return (
        near is not None
        and one.difference > CLOSE
        and near.share >= MOSTLY
        and near.residual <= CLOSE
        and _is_other_function(near.parts)
    )


def _reason(one: Finding) -> Reason:
    kind, final = _theme(one.parts), one.beyond_weights > CLOSE or _is_other_function(one.parts)
    detail = f" ({one.detail})" if one.detail else ""
    advice = "" if final or one.difference <= CLOSE else "; weights that are moved or scaled might do it, by hand"
    text = f"{one.name}{detail}, at {several(one.probes)}: {_far(one.difference)}{advice}"
    shown = final and one.difference > CLOSE
    places = (*one.probes, one.detail)
    return Reason(kind=kind, said=text, size=one.difference, shown=shown, cause=one.name, places=places)


def _mostly(one: Finding) -> Reason:
    near = one.nearest[0]
    detail = f" ({near.detail})" if near.detail else ""
    text = f"{near.name}{detail}, at {several(one.probes)}: {_far(one.difference)}, of which {near.residual:.0e} remain"
    kind = _theme(near.parts)
    places = (*one.probes, near.detail)
    return Reason(kind=kind, said=text, size=one.difference, shown=_dominated(one), cause=near.name, places=places)


def met(before: str) -> Reason:
    """The limit on time was met before something was done."""
    return Reason(kind="bound", said=f"the limit was met before {before}: a larger limit gives it more")


def _far(size: float) -> str:
    return f"off by {size:.0e} of the activation's scale"


def several(probes: Sequence[str]) -> str:
    """A few names for many places.

    >>> several(["h.0.norm", "h.1.norm", "."])
    'h.{i}.norm and what is returned'
    """
    names = ["what is returned" if one == "." else one for (one,) in indexed([(probe,) for probe in probes])]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    names = names[:3]
    return f"{', '.join(names)}{more}" if more else " and ".join(", ".join(names).rsplit(", ", 1))


def puzzles(findings: Sequence[Finding]) -> Iterator[Reason]:
    """Reasons for findings without a name, with the nearest entry of the catalogue."""
    for one in findings[:1]:
        near = "; ".join(
            f"{some.name}{f' ({some.detail})' if some.detail else ''} would explain {100 * some.share:.0f} % of it"
            for some in one.nearest
            if some.share >= 0.1
        )
        places = f"; {one.detail}" if one.detail else ""
        text = f"{several(one.probes)} computes something else: {_far(one.difference)}{places}"
        yield Reason(kind="unknown", said=f"{text}{f'; {near}' if near else ''}", size=one.difference)


def evidence(lines: Sequence[Line], proof: Proof, found: SearchResult) -> Iterator[Evidence]:
    """The evidence for each line.

    Args:
        proof: the table's, on the twin.
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
    """The alternatives that were tried for a line, in the layer where most were."""
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
    shows = f"is the reference's own activation, {_agrees(choice.far)}"
    if choice.far > SAME:
        shows = f"comes nearest to the reference's, off by {choice.far:.0e}"
    yield f"Tried: {choice.tried} ways that names and shapes leave open; with this one, {seen} {shows}."
    for moves, far in choice.rivals:
        yield f"{'Lost' if choice.far <= SAME else 'Also tried'}: {_apart(moves, choice.moves)}, off by {far:.0e}."


def _apart(moves: Sequence[CandidateRule], chosen: Sequence[CandidateRule]) -> str:
    """The difference between a rival and the chosen way."""
    known = set(map(str, chosen))
    apart = [text for text in map(str, moves) if text not in known]
    return quoted("; ".join(apart[:2])) + (f" and {len(apart) - 2} more" if len(apart) > 2 else "")


def _count(line: Line) -> str:
    first = f"the first {line.reads[0]} into {line.writes[0]}" if line.reads and line.writes else ""
    many = f"{len(line.reads)} of the twin's tensors" if len(line.reads) != 1 else "one of the twin's tensors"
    return f"Stands for: {many}, {first}."


def _proven(line: Line, report: Report) -> Iterator[str]:
    """The comparisons that the effect of these weights was part of, their differences, and the share that was seen."""
    if line.why == GUESS:
        return
    paths = {name.rpartition(".")[0] for name in line.writes}
    here = [probe for probe in report.probes if probe.port in paths]
    here = here or [probe for probe in report.probes if paths & set(probe.span)]
    if here:
        worst = max(here, key=_off)
        where = f"compared at {_places(here)}"
        yield f"Proof: what it makes is {where}, {_agrees(_off(worst))}."
    shown = [report.shown.activation[name] for name in line.writes if name in report.shown.activation]
    if len(shown) == len(line.writes):
        yield f"Shown: {100 * min(shown):.0f} % of their elements at work."


def _agrees(size: float) -> str:
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
        behind=_in_words(probes[proven - 1].port) if proven else "",
        at=_in_words(at),
        near=tuple(Near(name=name, difference=None if math.isnan(far) else far) for name, far in near),
    )


def _in_words(point: str) -> str:
    """A point in words: ``h.0.attn -> scores`` is the scores of it, and what is ``.`` is the module as a whole."""
    path, arrow, inner = point.partition(" -> ")
    if path == ".":
        return f"its {inner}" if arrow else "what is returned"
    return f"the {inner} of {path}" if arrow else point
