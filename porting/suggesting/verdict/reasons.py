"""What remains of a difference, by name: the catalogue's entries that turn the reference into the module."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType

from porting.causes.catalogue import CATALOGUE, THEMES
from porting.causes.finding import Finding
from porting.suggesting.draft.layer_patterns import indexed
from porting.suggesting.search.search_result import CLOSE
from porting.suggesting.verdict.proof import Proof
from porting.suggesting.verdict.suggestion import Reason

MOSTLY = 0.99
"""A small difference is put down to the nearest entry if that explains so much of it."""

ALSO = 0.9
"""And so much of it is enough where the entry is named elsewhere and the rest has a cause of its own."""

FINE = 2.0**-24
"""A difference in float64 that float32 cannot tell, of the activation's scale: half of its last digit."""

_THEMES = MappingProxyType({cause.name: theme for theme, causes in THEMES.items() for cause in causes})
_OTHER_FUNCTION = frozenset(cause.name for cause in CATALOGUE if not cause.absorbed_by_weights and not cause.rough)
"""Entries by which another function is computed, whatever the weights are; of the others, other weights might do it."""


def known(proof: Proof, *, guessed: bool = False, but: Collection[str] = ()) -> list[Reason]:
    """Each cause that the catalogue names, with the size of the difference that it makes.

    Args:
        proof: the proof.
        guessed: some places were filled without being sure.  A cause that is found with weights that may be others'
            shows nothing; nor does one behind a place that nobody can explain.
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
            sure = not guessed and one.probes[0] in order[:first]
            reason = _reason(one) if one.name else _mostly(one)
            found.append(reason if sure else replace(reason, shown=False))
        elif _near(one):
            found.append(_mostly(one))
    return found


def unknown(proof: Proof) -> list[Finding]:
    """What has no name."""
    return [one for one in _unnamed(proof) if one.difference > FINE]


def elsewhere(one: Finding, proof: Proof, rounded: float = 0.0) -> bool:
    """Whether a small difference comes mostly from a cause that is named at other places.

    Args:
        one: the difference.
        proof: what else was found.
        rounded: by how much positions are rounded otherwise: what a cause leaves may be about that.
    """
    names = {other.name or other.nearest[0].name for other in _findings(proof) if other.name or _near(other)}
    return one.difference <= CLOSE and any(
        near.name in names and (near.share >= ALSO or near.residual <= 2 * rounded) for near in one.nearest[:1]
    )


def fine(proof: Proof) -> Iterator[Reason]:
    """Differences that float32 cannot tell, as a constant makes that is kept in it or typed by hand."""
    some = [one for one in _findings(proof) if _fine(one)]
    if some:
        size, where = max(one.difference for one in some), several([probe for one in some for probe in one.probes])
        text = f"{where} is rounded otherwise, as with a constant in float32 or in few digits: {_far(size)}"
        yield Reason(kind="rounding", said=text, size=size)


def _fine(one: Finding) -> bool:
    """Whether float32 cannot tell a difference that no entry of the catalogue names; a repair may say at which step.

    Nor does an entry about positions name it: tables that are made otherwise are rounded otherwise, whatever theta is.
    """
    return one.difference <= FINE and _THEMES.get(one.name, "positions") == "positions" and not _near(one)


def _unnamed(proof: Proof) -> list[Finding]:
    return [one for one in _findings(proof) if not (one.name or _near(one) or _dominated(one))]


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
        and near.name in _OTHER_FUNCTION
    )


def _reason(one: Finding) -> Reason:
    kind, final = _THEMES.get(one.name, "several"), one.name in _OTHER_FUNCTION
    detail = f" ({one.detail})" if one.detail else ""
    advice = "" if final or one.difference <= CLOSE else "; weights that are moved or scaled might do it, by hand"
    text = f"{one.name}{detail}, at {several(one.probes)}: {_far(one.difference)}{advice}"
    shown = final and one.difference > CLOSE
    return Reason(kind=kind, said=text, size=one.difference, shown=shown, cause=one.name)


def _mostly(one: Finding) -> Reason:
    near = one.nearest[0]
    detail = f" ({near.detail})" if near.detail else ""
    text = f"{near.name}{detail}, at {several(one.probes)}: {_far(one.difference)}, of which {near.residual:.0e} remain"
    kind = _THEMES.get(near.name, "several")
    return Reason(kind=kind, said=text, size=one.difference, shown=_dominated(one), cause=near.name)


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
    """What nobody can name, with what comes nearest to it."""
    for one in findings[:1]:
        near = "; ".join(
            f"{some.name}{f' ({some.detail})' if some.detail else ''} would explain {100 * some.share:.0f} % of it"
            for some in one.nearest
            if some.share >= 0.1
        )
        text = f"{several(one.probes)} computes something else: {_far(one.difference)}"
        yield Reason(kind="unknown", said=f"{text}{f'; {near}' if near else ''}", size=one.difference)
