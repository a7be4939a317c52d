"""How far a search came that found no table."""

from __future__ import annotations

import math

from porting.suggesting.draft.unmapped import Near
from porting.suggesting.search.finding import Found
from porting.suggesting.verdict.proving import Proof
from porting.suggesting.verdict.suggestion import Stop


def stopped(found: Found, proof: Proof) -> Stop:
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
