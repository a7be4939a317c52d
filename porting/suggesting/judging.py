"""The verdict: what was proven, what is missing, and why a checkpoint cannot live in a module."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from porting.checkpoint import Checkpoint
from porting.suggesting.arguments import IDS, MASK
from porting.suggesting.finding import CLOSE, SAME, Divergence, Found
from porting.suggesting.layouts import distance
from porting.suggesting.proving import Proof
from porting.suggesting.subject import Subjects
from porting.suggesting.suggestion import Reason, Unmapped, Verdict
from porting.suggesting.tracing import Kind
from porting.suggesting.writing import patterns


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict with its reasons.

    Attributes:
        verdict: the word.
        reasons: why it is not *exact*.
        missing: parts of the reference that the module lacks.
        sentence: what was proven.
        difference: the largest difference in the proof.
        shown: how many of the module's tensors the proof saw, of how many.
    """

    verdict: Verdict
    reasons: tuple[Reason, ...]
    missing: tuple[str, ...]
    sentence: str
    difference: float | None
    shown: tuple[int, int]


def judge(
    subjects: Subjects,
    found: Found,
    proof: Proof,
    own: Proof | None,
    fits: Sequence[str],
    checkpoint: Checkpoint,
    unmapped: Sequence[Unmapped],
) -> Judgement:
    """The verdict.

    *Exact* and *trunk only* need both: the float64 proof, with nothing found that differs, and a table that fits the
    checkpoint itself.
    """
    fatal = _once(_fatal(subjects, found, checkpoint, unmapped))
    small = [*_small(found)]
    missing = tuple(patterns([name for unit in found.lacking for name in unit.names], _mapped(found)))
    missing = tuple(one.removesuffix(".{*rest}") for one in missing)
    proven = proof.exact and (own is None or own.exact)
    fatal += [Reason(kind="fit", said=one) for one in fits]
    if own is not None and not own.exact and proof.exact:
        fatal.append(Reason(kind="proof", said=f"the proof on the checkpoint itself does not hold: {_said(own)}"))
    if not proof.exact and not fatal and not small:
        fatal.append(Reason(kind="proof", said=f"the float64 proof does not hold: {_said(proof)}"))
    if found.exhausted:
        fatal.append(Reason(kind="bound", said="the search met its bound on trials or seconds and is not complete"))
    if fatal:
        verdict = Verdict.IMPOSSIBLE
    elif small or not proven:
        verdict = Verdict.APPROXIMATE
    elif missing or unmapped:
        verdict = Verdict.TRUNK
    else:
        verdict = Verdict.EXACT
    report = (own or proof).report
    shown = (0, 0) if report is None else (len(report.shown.activation), report.shown.count)
    return Judgement(
        verdict=verdict,
        reasons=(*fatal, *small),
        missing=missing,
        sentence=_sentence(verdict, proof, own, shown),
        difference=(own or proof).difference,
        shown=shown,
    )


def _once(reasons: Iterator[Reason]) -> list[Reason]:
    """The reasons, one for all layers."""
    found: dict[tuple[str, str], Reason] = {}
    for one in reasons:
        key = (one.kind, re.sub(r"[0-9.e+-]+", "#", one.said))
        found.setdefault(key, one)
    return list(found.values())


def _sentence(verdict: Verdict, proof: Proof, own: Proof | None, shown: tuple[int, int]) -> str:
    where = "the checkpoint itself and a small random twin of it" if own is not None else "a small random twin"
    best = own or proof
    if best.report is None or best.difference is None:
        return ""
    far = f"{best.difference:.0e}"
    if verdict in {Verdict.EXACT, Verdict.TRUNK}:
        seen = f"{shown[0]} of {shown[1]} parameters shown at work, the others equal by copy"
        return f"Proven in float64 on {where}: off by {far} of the activations' scale at most; {seen}."
    return f"In float64, on {where}, it is off by {far} of the activations' scale."


def _said(proof: Proof) -> str:
    if proof.report is None:
        return proof.refused.partition("\n")[0]
    guilty = proof.report.guilty or tuple(one for one in proof.report.probes if one.differs)
    if not guilty:
        return "weights differ after loading"
    return f"off by {guilty[0].meaning.worst:.0e} at {guilty[0].port}"


def _mapped(found: Found) -> list[str]:
    return [name for move in found.moves for name in move.reads]


def _fatal(subjects: Subjects, found: Found, checkpoint: Checkpoint, unmapped: Sequence[Unmapped]) -> Iterator[Reason]:
    """What no table can bridge."""
    way = subjects.way
    if way.unmasked and not subjects.causal and MASK in subjects.available and IDS in way.named:
        said = "the forward takes no attention mask: padded rows would be computed as if padding were words"
        yield Reason(kind="mask", said=said)
    if not found.divergences and not unmapped:
        yield from _strange(found)
    structural = any(one.what in {"bias", "missing", "extra", "shape"} for one in found.divergences)
    for one in found.divergences:
        yield from _structural(one, subjects, found, checkpoint)
        if one.what in {"activation", "norm"} and not one.size <= CLOSE and (one.cause or not structural):
            yield Reason(kind=one.what, said=_differs(one), size=one.size)
    for unit in found.lacking:
        if unit.kind in {Kind.LOOKUP, Kind.TABLE}:
            said = f"the module has no place for {unit.names[0]}{_tables(found) if unit.kind is Kind.TABLE else ''}"
            yield Reason(kind="table", said=said)


def _structural(one: Divergence, subjects: Subjects, found: Found, checkpoint: Checkpoint) -> Iterator[Reason]:
    """A part that one side has and the other has not."""
    match one.what:
        case "bias" if not _zero(checkpoint, subjects, one.reference):
            said = f"{one.port} has no bias, and the checkpoint's {one.reference} is not zero"
            yield Reason(kind="bias", said=said)
        case "surplus":
            said = f"the module adds {one.port}, which the checkpoint does not have: build it without"
            yield Reason(kind="surplus bias", said=said)
        case "missing":
            yield Reason(kind="missing norm", said=f"the module has no {_of(one.reference)} before {one.port}")
        case "extra" if not _last(found, one):
            said = f"the module has {one.port}, and nothing of the checkpoint is due there"
            yield Reason(kind="extra", said=said)
        case "shape":
            said = f"{one.port} and {one.reference} are due at one place, and their shapes do not fit"
            yield Reason(kind="shape", said=said)


def _strange(found: Found) -> Iterator[Reason]:
    """What the module returns and the reference never computes, though all weights are in their places."""
    for number, value in enumerate(found.outputs):
        known = found.reference.values
        parts = value.unbind(0) if value.ndim > 3 else (value,)  # several activations in one, as caches have them
        if value.ndim > 1 and any(all(distance(part, other) > SAME for other in known) for part in parts):
            said = f"what the module returns{f' as number {number}' if len(found.outputs) > 1 else ''} is none of the"
            yield Reason(kind="output", said=f"{said} reference's activations: something is done to it at the end")


def _tables(found: Found) -> str:
    plain = [name for unit in found.trace.units if unit.kind is Kind.TABLE for name in unit.names]
    plain = [name for name in plain if name not in {one for move in found.moves for one in move.writes}]
    return f": {plain[0]} is no parameter and no persistent buffer, so nothing can be loaded into it" if plain else ""


def _small(found: Found) -> Iterator[Reason]:
    """Differences that a table cannot take away, and that are no more than an approximation."""
    seen: set[tuple[str, str]] = set()
    for one in found.divergences:
        if one.what in {"activation", "norm"} and one.size <= CLOSE:
            key = (one.what, _blank(one.port))
            if key not in seen:
                seen.add(key)
                yield Reason(kind=one.what, said=_differs(one), size=one.size)


def _differs(one: Divergence) -> str:
    size = "" if math.isnan(one.size) else f", by {one.size:.1e} of the activation's scale"
    if one.what == "norm":
        return f"the norm of {one.port} computes something else than the reference's{size}{one.cause}"
    before = f" behind {one.before[-1]}" if one.before else ""
    return f"what reaches {one.port}{before} is not what reaches {one.reference}{size}{one.cause}"


def _blank(name: str) -> str:
    return "".join("#" if character.isdigit() else character for character in name)


def _of(name: str) -> str:
    return name.rpartition(".")[0] or name


def _zero(checkpoint: Checkpoint, subjects: Subjects, name: str) -> bool:
    """Whether the checkpoint's own tensor is all zeros, and so are those of the other layers."""
    prefix = subjects.twin.prefix
    held = [one for one in checkpoint.tensors if _blank(one.removeprefix(prefix)) == _blank(name.removeprefix(prefix))]
    return bool(held) and all(not bool(checkpoint.read(one).any()) for one in held)


def _last(found: Found, one: Divergence) -> bool:
    """Whether a part that only the module has stands behind all that was found, as a new head does."""
    places = [unit.number for unit in found.trace.units if one.port in unit.names]
    return bool(places) and min(places) > max(found.mates, default=-1)
