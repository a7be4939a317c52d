"""Parts that one side has and the other has not: norms, biases, tables, tokens beside those of the input, shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from porting.checkpoint import Checkpoint
from porting.loading import same_bits
from porting.suggesting.draft.table_writer import patterns
from porting.suggesting.draft.unmapped import NEVER, Unmapped
from porting.suggesting.search.layouts import distance
from porting.suggesting.search.name_similarity import blank
from porting.suggesting.search.search_result import CLOSE, SAME, DifferingPlace, SearchResult
from porting.suggesting.subjects.model_pair import ModelPair
from porting.suggesting.subjects.operation_trace import TABLES, Unit, WeightUse
from porting.suggesting.verdict.architecture import other_axes
from porting.suggesting.verdict.proof import Proof
from porting.suggesting.verdict.reasons import several, unknown
from porting.suggesting.verdict.suggestion import Reason


def surplus(found: SearchResult) -> Iterator[Reason]:
    """The norms that are given an activation of the reference's, which the reference does not norm."""
    for one in found.divergences:
        if one.what == "surplus norm" and not is_last(found, one):
            name = one.port.rpartition(".")[0] or one.port
            said = f"the module norms with {name}, and the checkpoint's model has no norm there"
            yield Reason(kind="surplus norm", said=said, shown=_alone(found, one), places=(one.port,))


def _alone(found: SearchResult, one: DifferingPlace) -> bool:
    """Whether a norm is all that differs there: without it the next place has the reference's own activation.

    A norm right behind it might take away again what it does.
    """
    at = next(number for number, unit in enumerate(found.trace.units) if one.port in unit.names)
    norm, later = found.trace.units[at], [unit for unit in found.trace.units[at + 1 :] if unit.operand is not None]
    behind = later[0] if later else None
    if behind is None or behind.operand is None or norm.operand is None or behind.number not in found.mates:
        return False
    again = behind.kind is WeightUse.NORM and distance(behind.operand, norm.operand, SAME) <= SAME
    return not again and not any(other.port in behind.names for other in found.divergences if other.what != "bias")


def is_last(found: SearchResult, one: DifferingPlace) -> bool:
    """Whether a part that only the module has stands behind all that was found, as a new head does, or reaches nothing.

    What is computed and not returned, as by a pooler in front of an MLM head, changes nothing.
    """
    units = [unit for unit in found.trace.units if one.port in unit.names]
    places = [unit.number for unit in units if found.trace.idle.isdisjoint(unit.weights)]
    return bool(units) and (not places or min(places) > max(found.mates, default=-1))


def mapped(found: SearchResult) -> list[str]:
    """The names of the checkpoint's tensors that a rule reads."""
    return [name for move in found.moves for name in move.reads]


def unused_parts(subjects: ModelPair, found: SearchResult, unmapped: Sequence[Unmapped]) -> list[Reason]:
    """Reasons against a trunk that both sides have: nothing fills most of the module's matrices.

    It is shown where its forward uses none of these, and the reference uses matrices of their shapes.
    """
    matrices = [one for one in subjects.built.module.parameters() if one.ndim > 1]
    empty = [one for one in unmapped if one.side == "module" and len(one.shape) > 1 and not one.tie]
    if 2 * len(empty) <= len(matrices) or found.exhausted:
        return []
    idle = [one for one in empty if one.where == NEVER]
    lacking = Counter(tuple(sorted(subjects.twin.tensors[name].shape)) for unit in found.lacking for name in unit.names)
    known = (Counter(tuple(sorted(one.shape)) for one in idle) & lacking).total()
    if 2 * len(idle) > len(matrices) and 4 * known >= 3 * len(idle):
        names = ", ".join(patterns([one.name for one in idle], mapped(found))[:3])
        said = f"the forward never uses {len(idle)} of the module's {len(matrices)} matrices ({names})"
        return [Reason(kind="idle", said=f"{said}, and the checkpoint's model uses its own", shown=True)]
    return [Reason(kind="idle", said=f"nothing fills {len(empty)} of the module's {len(matrices)} matrices")]


def different_parts(subjects: ModelPair, found: SearchResult, proof: Proof, checkpoint: Checkpoint) -> Iterator[Reason]:
    """Parts that one side has and the other has not, as long as everything in front of them is known."""
    puzzled = bool(unknown(proof)) or proof.report is None
    for one in sorted(found.divergences, key=lambda one: one.what != "shared"):  # what is seen by itself
        places = (one.port, one.reference)
        match one.what:
            case "bias" if not _zero(checkpoint, subjects, one.reference):
                said = f"{one.port} has no bias, and the checkpoint's {one.reference} is not zero"
                yield Reason(kind="bias", said=said, shown=True, places=places)
            case "missing":
                said = f"the module has no {one.reference.rpartition('.')[0] or one.reference} before {one.port}"
                yield Reason(kind="missing norm", said=said, shown=True, places=places)
            case "unloadable":
                said = f"{one.port} is not a parameter in the module's state_dict, so nothing can be loaded into it"
                hint = "nn.Parameter in an nn.ParameterDict or nn.ParameterList"
                yield Reason(kind="unloadable", said=f"{said}: make it one ({hint})", shown=True, places=places)
            case "shared" if not _is_behind_a_guess(found, one):
                first = next((move.reads[0] for move in found.moves if one.port in move.writes), "")
                said = f"{one.port} is used again where the checkpoint's model uses {one.reference}, and not {first}"
                shown = not _equal(checkpoint, subjects, one.reference, first)
                yield Reason(kind="shared", said=said, shown=shown, places=places)
            case "second":
                said = f"{one.port} needs the values of {one.near[0][0]}, since the checkpoint has one tensor for both"
                said += ", which is read once: tie them in the module"
                yield Reason(kind="tie", said=said, shown=True, places=places)
            case "extra" if not is_last(found, one):
                yield Reason(
                    kind="extra", said=f"the module has {one.port}, and nothing of the checkpoint is due there"
                )
                return
            case "shape" if not is_last(found, one):
                yield other_axes(one, found) or _shapes(one, subjects)
                return
            case "activation" | "norm" if puzzled and not one.size <= CLOSE and not one.cause:
                return  # what stands behind is a guess
    for unit in found.lacking:
        if unit.kind in {WeightUse.LOOKUP, WeightUse.TABLE} and _is_used(unit, found) and not found.exhausted:
            said = f"your module has no {unit.names[0]}{_tables(found) if unit.kind is WeightUse.TABLE else ''}"
            yield Reason(kind="table", said=said, shown=True, places=(unit.names[0],))


def other_norms(found: SearchResult) -> Iterator[Reason]:
    """Norms that are given what the reference's are and count over something else: no weights make up for it.

    But for a mean that is left in: weights in front may be centred.  The catalogue of causes has that.
    """
    kinds: dict[str, list[DifferingPlace]] = {}
    for one in found.divergences:
        if one.what == "other norm" and one.cause != "RMSNorm for LayerNorm":
            kinds.setdefault(one.cause, []).append(one)
    for cause, some in kinds.items():
        at = several([one.port.rpartition(".")[0] or one.port for one in some])
        theirs = some[0].reference.rpartition(".")[0] or some[0].reference
        said = f"{cause}, at {at}: the checkpoint's model has another kind of norm there, such as {theirs}"
        yield Reason(kind="other norm", said=said, shown=True, cause=cause, places=(some[0].port, some[0].reference))


def _is_used(unit: Unit, found: SearchResult) -> bool:
    """Whether the module has what a table of the reference stands in front of.

    Where a decoder is missing as a whole, its table of positions is no difference of the encoder.
    """
    units = found.reference.units
    following = next((one for one in units[units.index(unit) + 1 :] if one.kind not in TABLES), None)
    return following is None or any(one is following for one in found.mates.values())


def tokens_beside(subjects: ModelPair, found: SearchResult) -> Iterator[Reason]:
    """Tokens beside those of the input, as a class token or registers, of which one side has more.

    No weights make up for it: softmax gives each token a share.
    """
    leaves = found.models[0].leaves if found.models is not None else {}
    ours, more = _joined(found.trace.units, leaves)
    theirs, others = _joined(found.reference.units, subjects.twin.tensors)
    mine, other = (_usual_rows(one.units) for one in (found.trace, found.reference))
    if found.exhausted or not mine * other or mine == other or mine - more != other - others:
        return
    added = [" and ".join(some) or "none" for some in (theirs, ours)]
    said = f"tokens added to those of the input: the checkpoint's model adds {added[0]}, your module {added[1]}"
    yield Reason(kind="tokens", said=said, shown=True, places=(*ours, *theirs))


def _joined(units: Sequence[Unit], held: Mapping[str, Tensor]) -> tuple[list[str], int]:
    """The weights that stand as rows of their own beside what they meet, and how many rows that makes in a batch."""
    names: list[str] = []
    rows = 0
    for one in units:
        before, after = one.output.shape if one.operand is None else one.operand.shape, one.output.shape
        if (
            one.kind is WeightUse.OTHER
            and len(after) > 2
            and before[-1:] == after[-1:]
            and before.numel() < after.numel()
        ):
            names += one.weights
            rows += after[0] * sum(held[name].numel() // after[-1] for name in one.weights if name in held)
    return names, rows


def kernels_elsewhere(subjects: ModelPair, found: SearchResult) -> Iterator[Reason]:
    """A convolution that gives another number of places, as with another stride, so that layers see as many others."""
    rows = [
        {one.operand.shape[:-1].numel() for one in _of_rows(side.units) if one.operand is not None}
        for side in (found.trace, found.reference)
    ]
    if found.exhausted or not rows[0] - rows[1] or not rows[1] - rows[0]:
        return
    for unit in found.trace.units:
        mate = found.mates.get(unit.number)
        if mate is None or unit.operand is None or mate.operand is None or not (unit.weights and mate.weights):
            continue
        shape = subjects.twin.tensors[mate.weights[0]].shape
        same = unit.operand.shape == mate.operand.shape and unit.operand.ndim == len(shape) > 2
        places = [one.output.shape[2:] for one in (unit, mate)]
        if same and places[0] != places[1]:
            counts = [" x ".join(map(str, sizes)) for sizes in places]
            said = f"the convolution with {unit.weights[0]} gives {counts[0]} positions, and the checkpoint's with "
            said += f"{mate.weights[0]} gives {counts[1]}: compare stride, padding and dilation"
            yield Reason(kind="convolution", said=said, shown=True, places=(unit.weights[0],))
            return


def _of_rows(units: Sequence[Unit]) -> list[Unit]:
    """The matrices that are given rows [... e], and no images."""
    some = (one for one in units if one.kind is WeightUse.LINEAR and one.operand is not None)
    return [one for one in some if one.operand is not None and one.operand.ndim < 4]


def _usual_rows(units: Sequence[Unit]) -> int:
    """How many rows most matrices are given, those of a whole batch; 0 where no matrix is given rows."""
    rows = Counter(one.operand.shape[:-1].numel() for one in _of_rows(units) if one.operand is not None)
    return max(rows, key=rows.__getitem__, default=0)


def _is_behind_a_guess(found: SearchResult, one: DifferingPlace) -> bool:
    """Whether a place is behind one that fits nothing: what is given there may be a guess of the search's."""
    order = {unit.number: number for number, unit in enumerate(found.trace.units)}
    unfit = [order[other.at] for other in found.divergences if other.ends and other.at in order]
    return min(unfit, default=len(order)) < order.get(one.at, len(order))


def _shapes(one: DifferingPlace, subjects: ModelPair) -> Reason:
    """Two that are due at one place, and no layout brings one into the other.

    A kernel that sees less than the checkpoint's cannot hold it.
    """
    ours, theirs = subjects.built.module.state_dict(), subjects.twin.tensors
    sizes = [list(held[name].shape) for held, name in ((ours, one.port), (theirs, one.reference)) if name in held]
    if len(sizes) == 2 and _smaller_kernel(*sizes):
        kernels = [" x ".join(map(str, size[2:])) for size in sizes]
        said = f"{one.port} is a kernel of {kernels[0]}, and the checkpoint's {one.reference} is one of {kernels[1]}"
        others = ([[*value.shape] for value in held.values()] for held in (ours, theirs))
        alone = all(size not in shapes for size, shapes in zip(reversed(sizes), others, strict=True))
        return Reason(kind="shape", said=said, shown=alone)  # else it may be the place that is wrong
    listed = f", {sizes[0]} and {sizes[1]}" if len(sizes) == 2 else ""
    said = f"{one.port} and {one.reference} are due at one place{listed}, and no layout was found that fits"
    return Reason(kind="shape", said=said)


def _smaller_kernel(ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether two kernels [o i ...] of the same channels differ in what they see, and ours sees less somewhere."""
    same = len(ours) == len(theirs) > 2 and [*ours[:2]] == [*theirs[:2]]
    return same and any(one < other for one, other in zip(ours[2:], theirs[2:], strict=True))


def _tables(found: SearchResult) -> str:
    loadable = found.models[0].loadable if found.models is not None else frozenset()
    plain = [name for unit in found.trace.units if unit.kind is WeightUse.TABLE for name in unit.names]
    plain = [name for name in plain if name not in loadable]
    return (
        f": {plain[0]} is neither a parameter nor a persistent buffer, so nothing can be loaded into it"
        if plain
        else ""
    )


def _zero(checkpoint: Checkpoint, subjects: ModelPair, name: str) -> bool:
    """Whether the checkpoint's own tensor is all zeros, and so are those of the other layers."""
    prefix = subjects.twin.prefix
    held = [one for one in checkpoint.tensors if blank(one.removeprefix(prefix)) == blank(name.removeprefix(prefix))]
    return bool(held) and all(not bool(checkpoint.read(one).any()) for one in held)


def _equal(checkpoint: Checkpoint, subjects: ModelPair, name: str, other: str) -> bool:
    """Whether two tensors of the checkpoint hold the same, or are not both there."""
    prefix = subjects.twin.prefix
    held = {one.removeprefix(prefix): one for one in checkpoint.tensors}
    found = [held[one.removeprefix(prefix)] for one in (name, other) if one.removeprefix(prefix) in held]
    return len(found) < 2 or same_bits(*map(checkpoint.read, found))
