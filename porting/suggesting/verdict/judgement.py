"""The verdict: what was proven, what was shown to be impossible, and where the search merely ended."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from porting.checkpoint import Checkpoint
from porting.errors import Code, Fault
from porting.suggesting.draft.table_writer import patterns
from porting.suggesting.draft.unmapped import NEVER, Unmapped
from porting.suggesting.search.activation_matching import laid_out
from porting.suggesting.search.embedding_candidates import ROW
from porting.suggesting.search.feature_permutation import FeatureOrder
from porting.suggesting.search.layouts import distance, first_columns
from porting.suggesting.search.name_similarity import blank
from porting.suggesting.search.search_result import CLOSE, SAME, DifferingPlace, SearchResult
from porting.suggesting.subjects.argument_names import Unmasked
from porting.suggesting.subjects.config_fields import normal
from porting.suggesting.subjects.model_pair import ModelPair
from porting.suggesting.verdict.architecture import differs
from porting.suggesting.verdict.extra_checks import ExtraChecks, outputs_of_other_weights, unshown
from porting.suggesting.verdict.part_differences import (
    different_parts,
    is_last,
    kernels_elsewhere,
    mapped,
    other_norms,
    surplus,
    tokens_beside,
    unused_parts,
)
from porting.suggesting.verdict.proof import Proof, probed
from porting.suggesting.verdict.reasons import elsewhere, fine, known, met, puzzles, several, stopped, unknown, unnamed
from porting.suggesting.verdict.suggestion import Reason, Stop, Verdict
from porting.tracing.angle_tables import ROUNDED
from porting.tracing.measure import MEANING
from porting.tracing.trace import ROOT
from porting.trials.modalities import IDS
from porting.trials.padding import MASK
from porting.trials.scope import Kind


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict with its reasons.

    Attributes:
        reasons: why it is not *exact*.
        missing: parts of the reference that the module lacks.
        stop: how far it got, where nothing was found.
        difference: the largest difference in the proof.
        shown: how many of the module's tensors the proof saw, of how many.
        limits: what the proof did not see, in words.
    """

    verdict: Verdict
    reasons: tuple[Reason, ...]
    missing: tuple[str, ...]
    stop: Stop | None
    sentence: str
    difference: float | None
    shown: tuple[int, int]
    limits: tuple[str, ...] = ()


def judge(
    subjects: ModelPair,
    found: SearchResult,
    proof: Proof,
    own: Proof | None,
    fits: Sequence[Fault],
    checkpoint: Checkpoint,
    unmapped: Sequence[Unmapped],
    behind: ExtraChecks,
    guessed: Sequence[str] = (),
) -> Judgement:
    """The verdict.

    *Exact* and *trunk only* need both: the float64 proof, with nothing found that differs, and a table that fits the
    checkpoint itself.  *Impossible* needs a reason that was shown: a part that one side has and the other has not, at a
    place up to which all is proven; or an entry of the catalogue of causes that turns the reference into the module, to
    the last digits, and that no weights can take away.  *Approximate* needs a cause as well, or
    differences as small as those of a constant with few digits.  *Exact on some inputs* needs the proof on the first
    batches, and outputs that differ on others without a shown reason.  All else was not found.

    Args:
        guessed: names of the builder whose meaning no shape shows.
    """
    reasons = _once([*_all(subjects, found, proof, own, fits, checkpoint, unmapped, behind), *behind.reasons])
    ends = any(is_last(found, one) for one in found.divergences) or any(one.side == "module" for one in unmapped)
    if not reasons and not ends and not (proof.exact and ROOT in probed(proof.report)):
        reasons = [
            *_strange(subjects, found)
        ]  # whatever else was noted on the way: what is returned has to be the reference's
    if not proof.exact and not any(one.shown for one in reasons) and not all(map(_small, reasons)):
        reasons += differs(subjects, found)
    reasons = _unless_guessed(reasons, guessed)
    refused = {one.reference for one in found.divergences if one.what == "shape" and is_last(found, one)}
    lacking = [unit for unit in found.reference.units if unit in found.lacking or refused & set(unit.names)]
    missing = tuple(patterns([name for unit in lacking for name in unit.names], mapped(found)))
    missing = tuple(one.removesuffix(".{*rest}") for one in missing)
    missing += tuple(_rows_left(subjects, found))
    ours = [one for one in unmapped if one.side == "module" and one.where != NEVER]  # an adapter that is merged, say
    small = [one for one in reasons if _small(one)]
    usual = behind.usually_same
    agrees = own is None or own.agrees or own.mostly_same or usual
    agrees = agrees and proof.agrees and ROOT in probed(proof.report)
    same = not (ours or _reordered(found) or _wider(found))  # what both sides have is all of the module
    of_inputs = agrees and same and {one.kind for one in reasons if not _small(one)} <= set(Kind)
    shown = [one for one in reasons if one.shown]
    # A module that is right where rows are padded at their ends, and not where one begins with padding, is on some.
    if shown and not (of_inputs and usual and not missing and all(one in behind.reasons for one in shown)):
        verdict = Verdict.IMPOSSIBLE
    elif len(small) < len(reasons):
        verdict = Verdict.SOME_INPUTS if of_inputs else Verdict.NOT_FOUND
    elif small:
        verdict = Verdict.APPROXIMATE
    elif missing or ours or _reordered(found) or _wider(found):
        verdict = Verdict.TRUNK
    else:
        verdict = Verdict.EXACT
    beside = [f"what it returns as number {one}, which the reference never computes" for one in _unlike(found)[1]]
    limits = (*beside, *unshown(subjects, proof, own, behind))
    report = (own or proof).report
    counts = (0, 0) if report is None else (len(report.shown.activation), report.shown.count)
    stop = stopped(found, proof) if verdict is Verdict.NOT_FOUND else None
    return Judgement(
        verdict=verdict,
        reasons=tuple(sorted(reasons, key=lambda one: (not one.shown, _small(one)))),
        missing=missing,
        stop=stop,
        sentence=_sentence(verdict, proof, own, counts, stop, behind)
        + _order(verdict, found)
        + _without_padding(verdict, subjects),
        difference=max((one for one in ((own or proof).difference, behind.worst) if one is not None), default=None),
        shown=counts,
        limits=limits if verdict in {Verdict.EXACT, Verdict.TRUNK} else (),
    )


def _unless_guessed(reasons: Sequence[Reason], names: Sequence[str]) -> list[Reason]:
    """The reasons where what some of a builder's names mean is a guess: numbers that differ may come from it."""
    shown = [one for one in reasons if one.shown]
    if not names or not shown or any(not one.cause for one in shown):
        return [*reasons]
    said = (
        f"what the builder means by {', '.join(names)} is a guess, which no shape shows: say it with the option config"
    )
    return [Reason(kind="guess", said=said), *(replace(one, shown=False) for one in reasons)]


def _rows_left(subjects: ModelPair, found: SearchResult) -> Iterator[str]:
    """Tables of which the module has the first row, in another table or alone, and no place for the rest."""
    for move in found.moves:
        alone = [piece for piece in move.sources if piece.axes == ROW]
        for name in (piece.names[0] for piece in (*alone, *(move.sources[1:] if move.fold else ()))):
            if len(subjects.twin.tensors[name]) > 1:
                yield f"{name} but for row 0"


def _small(one: Reason) -> bool:
    """Whether a reason is a difference with a cause, and no more than an approximation."""
    return not one.shown and one.size is not None and one.size <= CLOSE and one.kind != "unknown"


def _all(
    subjects: ModelPair,
    found: SearchResult,
    proof: Proof,
    own: Proof | None,
    fits: Sequence[Fault],
    checkpoint: Checkpoint,
    unmapped: Sequence[Unmapped],
    behind: ExtraChecks,
) -> Iterator[Reason]:
    before = [*whatever_the_weights(subjects)]
    parts = [
        *before,
        *tokens_beside(subjects, found),
        *other_norms(found),
        *different_parts(subjects, found, proof, checkpoint),
        *kernels_elsewhere(subjects, found),
        *surplus(found),
    ]
    parts += unused_parts(subjects, found, unmapped)
    yield from parts
    kinds = {one.kind for one in parts}
    untied = [one.port.rpartition(".")[0] for one in found.divergences if one.what == "second"]
    decided = any(one.kind == "shape" and one.shown for one in parts)  # what comes after it follows from it
    unsure = bool(kinds & {"extra", "shape"}) or any(one.side == "module" and not one.tie for one in unmapped)
    causes = [] if decided else known(proof, guessed=unsure, but=untied)
    norms = {one.cause for one in parts if one.kind == "other norm"}
    causes = [one for one in causes if not _seen(one, kinds) and one.cause not in norms]
    if any(one.kind == "mask" and not one.shown for one in before):  # an argument that was not given may be the mask
        causes = [replace(one, shown=False) if one.kind == "masks" else one for one in causes]
    yield from causes
    yield from _corrected(found)
    left = unknown(proof)
    if any(one.cause for one in found.divergences):  # a norm whose gain takes in what it does otherwise
        left = [one for one in left if one.difference > CLOSE]
    if norms and not any(one.ends for one in found.divergences):  # with the reference's norms nothing else differs
        left = []
    rounded = [*_rounded(found, proof), *_unseen(found, proof)]
    yield from rounded
    yield from () if rounded or decided else puzzles(left)
    tiny = [*fine(proof, rounded=bool(rounded))]
    yield from tiny
    strange = [*_strange(subjects, found)]
    if found.divergences or any(one.side == "module" for one in unmapped):  # they explain what is only unlike
        strange = [one for one in strange if one.shown]
    yield from strange
    kinds |= {one.kind for one in (*causes, *tiny, *strange)}
    explained = bool(kinds) or any(one.cause for one in found.divergences)
    if proof.late:
        yield met("the proof had ended")
    elif proof.report is None or not (proof.exact or explained or left or rounded):
        holds = "could not be run" if proof.report is None else "does not hold"
        yield Reason(kind="proof", said=f"the float64 proof {holds}: {_said(proof)}")
    asked = subjects.built.asked
    for one in fits:
        # Of two names for one field, one may be another size, which the small model has as large by chance.
        shown = one.code is Code.SHAPE_MISMATCH and proof.exact and len({*asked.values()}) == len(asked)
        if shown or not explained:
            yield Reason(kind="fit", said=str(one), shown=shown)
    if own is not None and proof.exact and not (own.exact or own.differs_on_trials or behind.worst):
        yield Reason(kind="proof", said=f"the proof on the checkpoint itself does not hold: {_said(own)}")
    if found.exhausted:
        yield met("the search was complete")


def whatever_the_weights(subjects: ModelPair) -> Iterator[Reason]:
    """Differences that are seen before weights are looked for: which tokens and rows depend on which."""
    yield from _rows(subjects)
    yield from _mask(subjects)
    yield from _later(subjects)


def _rounded(found: SearchResult, proof: Proof) -> Iterator[Reason]:
    """Positions that are rounded otherwise: with the reference's in their place nothing differed.

    Where something did, as little, and has a cause elsewhere, the two come together and neither explains the other.
    """
    if not found.rounded or proof.exact or proof.difference is None:
        return
    parts = set() if known(proof) else {one.port.rpartition(".")[0] for one in found.divergences}
    left = [one for one in unnamed(proof) if one.difference > ROUNDED or parts & set(one.probes)]
    left = [one for one in left if not elsewhere(one, proof, found.rounded)]
    if not left and (unnamed(proof) or proof.difference <= ROUNDED):
        said = f"its positions are the reference's but for their rounding, off by {found.rounded:.0e}"
        if not found.divergences:
            said += "; with the reference's own nothing else differs"
        yield Reason(kind="rounding", said=said, size=found.rounded)


def _unseen(found: SearchResult, proof: Proof) -> Iterator[Reason]:
    """Differences in the search where the proof compares nothing, as at a norm of the first position alone."""
    some = [one for one in found.divergences if one.what in {"activation", "norm"} and not one.cause]
    compared = probed(proof.report)
    some = [one for one in some if one.port.rpartition(".")[0] not in compared]  # within verify's bound
    if ROOT in compared:  # and what is returned as well: what rounding moves by so much is no reason
        some = [one for one in some if one.size > _rounding(proof)]
    for one in some if proof.exact and not found.rounded else ():
        said = f"{one.port.rpartition('.')[0] or one.port} is given or gives something else than the reference's"
        far = f"by {one.size:.0e}" if math.isfinite(one.size) else "of another shape"
        said = f"{said} {one.reference.rpartition('.')[0]}, {far}"
        yield Reason(kind="unseen", said=said, size=one.size, places=(one.port, one.reference))


def _rounding(proof: Proof) -> float:
    """The largest difference that what is computed in less than float64 explains, of the scale where it arrives."""
    bounds = [0.0] if proof.report is None else [probe.bound.end_to_end for probe in proof.report.probes]
    return max(one for one in bounds if math.isfinite(one))


def _seen(one: Reason, kinds: set[str]) -> bool:
    """Whether a cause is a missing part that was seen to be missing."""
    bias, norm = one.cause.endswith("bias missing"), "norm missing" in one.cause
    return ("bias" in kinds and bias) or ("missing norm" in kinds and norm)


def _once(reasons: Sequence[Reason]) -> list[Reason]:
    """The reasons, one for all layers."""
    found: dict[tuple[str, ...], Reason] = {}
    for one in reasons:
        places = tuple(map(blank, one.places)) or (one.said,)
        found.setdefault((one.kind, one.cause, *places), one)
    return list(found.values())


def _sentence(
    verdict: Verdict, proof: Proof, own: Proof | None, shown: tuple[int, int], stop: Stop | None, behind: ExtraChecks
) -> str:
    small = "a small random model of the checkpoint's architecture"
    where = "the checkpoint and on a small random model of its architecture" if own is not None else small
    if behind.worst and proof.agrees:
        far = f"is off by {behind.worst:.0e} of the output's scale" if math.isfinite(behind.worst) else "differs"
        return f"On the first batches it agrees with the reference in float64; on others it {far}."
    if stop is not None:
        return stop.said
    best = own or proof
    if best.report is None or best.difference is None:
        return ""
    far = f"{best.difference:.0e}"
    if verdict in {Verdict.EXACT, Verdict.TRUNK}:
        by_value = len(best.report.shown.copy)
        left = shown[1] - shown[0] - by_value
        others = (
            ", the others are compared by value" if not left else f", {by_value} are compared by value" * (by_value > 0)
        )
        others += f", and {left} are new" if left else ""
        seen = f"{shown[0]} of {shown[1]} parameters reach a compared activation{others}"
        seen = seen if shown[0] < shown[1] else f"all {shown[1]} parameters reach a compared activation"
        if not shown[0]:
            seen = "what each parameter does was not shown, as the forward switches gradients off"
        less = ", which the reference's own rounding explains" if best.difference > MEANING else ""
        return f"Proven in float64 on {where}: off by at most {far} of the activations' scale{less}; {seen}."
    if best.agrees:  # what differs there is rounding, and no reason for anything
        return f"Every activation that was compared agrees in float64 on {where}; the reasons are named below."
    return f"In float64, on {where}, it is off by {far} of the activations' scale."


def _order(verdict: Verdict, found: SearchResult) -> str:
    """A note on a module that returns the residual stream in its own order, or more than is needed."""
    if verdict in NEGATIVE:
        return ""
    if more := _wider(found):
        return f" What it returns has {more} more columns at its end, which are not tokens of the checkpoint."
    if not _reordered(found):
        return ""
    basis = found.basis
    return f" What it returns has its features in the order ({basis.ours}), where the reference's is ({basis.theirs})."


def _reordered(found: SearchResult) -> bool:
    """Whether the module returns the reference's activation with its features in another order."""
    if not found.basis.theirs or not found.outputs:
        return False
    ours = found.outputs[0]
    rows = [one for value in found.reference.outputs if value.ndim == 3 for one in (value, value.transpose(0, 1))]
    alike = [one for one in rows if one.shape == ours.shape and one.shape[-1] % 2 == 0]
    return not any(torch.allclose(one, ours) for one in alike) and any(
        torch.allclose(found.basis.turned(one), ours) for one in alike
    )


def _wider(found: SearchResult) -> int:
    """How many columns more the module returns, where the first ones are what the reference returns."""
    for value in found.outputs[:1]:
        for other in (one for one in found.reference.outputs if one.ndim == value.ndim == 3):
            more = value.shape[-1] - other.shape[-1]
            if more > 0 and distance(first_columns(value, other), other, SAME) <= SAME:
                return int(more)
    return 0


def _said(proof: Proof) -> str:
    if proof.report is None:
        return proof.refused.partition("\n")[0]
    guilty = proof.report.guilty or tuple(one for one in proof.report.probes if one.differs)
    if not guilty:
        return "no activation could be compared" if not proof.report.probes else "weights differ after loading"
    return f"off by {guilty[0].meaning.worst:.0e} at {guilty[0].port}"


def _without_padding(verdict: Verdict, subjects: ModelPair) -> str:
    """A note on a forward without an input that says which tokens are padding."""
    if not _unmasked(subjects) or subjects.way.unmasked is not Unmasked.ABSENT or verdict in NEGATIVE:
        return ""
    said = " Without padding: the forward takes no attention mask, and padded rows would differ."
    if not subjects.way.loose:
        return said
    listed = ", ".join(map(repr, subjects.way.loose))
    return f" Without padding: the forward was given no mask; if it is one of {listed}, name it in the inputs."


NEGATIVE = frozenset({Verdict.IMPOSSIBLE, Verdict.NOT_FOUND})


def _unmasked(subjects: ModelPair) -> bool:
    """Whether padding changes what is computed for other words, though the reference's mask hides it."""
    way = subjects.way
    return not (way.unmasked is None or subjects.causal or MASK not in subjects.available or IDS not in way.named)


def _mask(subjects: ModelPair) -> Iterator[Reason]:
    """A forward that takes a mask and does not act on it."""
    way = subjects.way
    if not _unmasked(subjects):
        return
    name = way.argument(MASK)
    match way.unmasked:
        case Unmasked.STALE:
            said = f"the forward takes {name} and keeps the mask of an earlier call: a later call's is not used"
        case Unmasked.IGNORED:
            said = f"the forward takes {name} and ignores it: padding is treated like any other token"
        case Unmasked.PARTLY:
            said = f"the forward takes {name}, but tokens that it masks still change what is computed for the others"
        case Unmasked.ABSENT:  # right without padding, which the first sentence says
            return
    yield Reason(kind="mask", said=said, shown=True)


def _rows(subjects: ModelPair) -> Iterator[Reason]:
    """A forward in which the rows of a batch are not independent: no weights separate them."""
    way = subjects.way
    if not way.mixes_rows:
        return
    said = (
        "a row of the batch depends on the other rows, and none does in the checkpoint's model: look for a step that "
        "works across the batch, as a sum, a limit of tokens for each expert, or batch_first left out"
    )
    if unsure := [*way.constants, *way.loose]:  # one of these may be what separates them
        said += f"; this may be due to {', '.join(map(repr, unsure))}, of which nothing tells what to give"
    yield Reason(kind="rows", said=said, shown=not unsure)


def _later(subjects: ModelPair) -> Iterator[Reason]:
    """One side hides later tokens and the other does not: no weights add a mask or take it away."""
    module, reference = subjects.later
    if module is None or reference is None or module == reference:
        return
    said = (
        "the module's outputs for a token depend on the tokens behind it, and those of the checkpoint's model do not: "
        "its forward has no causal mask"
        if module
        else "the module hides the tokens behind a token (a causal mask), and the checkpoint's model uses them"
    )
    loose = [name for name in subjects.way.loose if "pad" not in normal(name)]  # padding is not what comes later
    if loose:  # one of these may be the mask, or switch it off
        said += f", as it is called here; it was called without {', '.join(map(repr, loose))}"
    yield Reason(kind="mask", said=said, shown=not loose)


def _strange(subjects: ModelPair, found: SearchResult) -> Iterator[Reason]:
    """The outputs of the module that the reference never computes, though all weights are in their places."""
    for number in _unlike(found)[0]:
        value, which = found.outputs[number], f" as number {number}" if len(found.outputs) > 1 else ""
        sides = (found.reference.outputs, found.reference.values)
        theirs = next((same for some in sides if (same := [one for one in some if _as_many(one, value)])), [])
        confined = _confined(value)
        if theirs and confined and confined not in map(_confined, theirs) and _stays(subjects, number, confined):
            said = f"what the module returns{which} {confined}, whatever the weights are"
            yield Reason(kind="output", said=f"{said}, and what the reference returns does not", shown=True)
            continue
        said = f"what the module returns{which} is not one of the reference's activations: it is changed at the end"
        yield Reason(kind="output", said=said)


def _stays(subjects: ModelPair, number: int, confined: str) -> bool:
    """Whether an output is confined as much with other weights: a few numbers may all be positive by chance."""
    outputs = (outputs_of_other_weights(subjects, seed) for seed in range(OTHER_WEIGHTS))
    return all(number < len(some) and _confined(some[number]) == confined for some in outputs)


OTHER_WEIGHTS = 8
"""Weights that are drawn before an output is called confined."""


def _as_many(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs [... e] have as many rows of one length: they may stand one after the other."""
    return one.ndim > 0 < other.ndim and one.shape[-1] == other.shape[-1] and one.numel() == other.numel()


def _confined(value: Tensor) -> str:
    """A property of each row of an output [... e] with any weights, after a last step such as softmax; may be empty."""
    if not value.is_floating_point() or value.shape[-1] < 2 or not bool(torch.isfinite(value).all()):
        return ""
    ones = torch.ones((), dtype=value.dtype)
    holds = {
        "sums to 1, as probabilities do": value.sum(-1),
        "gives logarithms of probabilities": value.logsumexp(-1).exp(),
        "has rows of length 1": value.norm(dim=-1),
    }
    for said, size in holds.items():
        if torch.allclose(size, ones.expand_as(size), rtol=0, atol=1e-9):
            return said
    return "is nowhere below 0" if bool((value >= 0).all()) else ""


def _unlike(found: SearchResult) -> tuple[list[int], list[int]]:
    """The numbers of the outputs that the reference never computes.

    Returns:
        Those that stand where the reference returns something, and those that are returned beside it: scores, parts of
        a loss.  The latter need that the reference's first output is there, and each of their shape.
    """
    values = [*found.reference.values, *found.reference.outputs]

    def is_known(value: Tensor) -> bool:
        return any(_is(value, other, found.basis) for other in values)

    returned = [one for one in found.reference.outputs if one.is_floating_point()]
    left = [other for other in returned if not any(_is(value, other, found.basis) for value in found.outputs)]
    whole = bool(returned) and (_wider(found) or all(other is not returned[0] for other in left))
    changed: list[int] = []
    beside: list[int] = []
    for number, value in enumerate(found.outputs):
        parts = value.unbind(0) if value.ndim > 3 else ()  # several activations in one, as caches have them
        strange = value.ndim > 1 and not is_known(value) and not (parts and all(map(is_known, parts)))
        if not strange or (number == 0 and _wider(found)):
            continue
        (beside if whole and all(other.shape != value.shape for other in left) else changed).append(number)
    return changed, beside


def _is(value: Tensor, other: Tensor, basis: FeatureOrder) -> bool:
    """Whether two activations are one, or the first is the second's at one position: the first, or the last."""
    rows = [other[:, at] for at in (0, -1)] if other.ndim == 3 else []
    return any(distance(value, one, SAME) <= SAME and laid_out(value, one, basis) for one in (other, *rows))


def _corrected(found: SearchResult) -> Iterator[Reason]:
    """Differences that a rule almost accounts for."""
    taken: dict[str, list[DifferingPlace]] = {}
    for one in found.divergences:
        if one.cause and one.what == "norm":
            taken.setdefault(one.cause, []).append(one)
    for cause, some in taken.items():
        size = max(one.size for one in some)
        named = several([one.port.rpartition(".")[0] or one.port for one in some])
        said = f"{named} computes something else than the reference's norm, by {size:.0e}{cause}"
        yield Reason(kind="norm", said=said, size=size)
