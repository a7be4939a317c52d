"""What distinguishes a step of the port from the reference's: another function, number, tensor, order, constants."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import accumulate, islice, permutations
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from porting.causes.diverging import MASKED, MOVING, Numbers, Region, line_of, moments, moves_weights
from porting.causes.replay import Values
from porting.causes.tape import Call, Ref, Tape
from porting.tracing.calls import Kind as TraceKind
from porting.tracing.calls import argument_names, kind_of

ARITHMETIC = ("add", "sub", "mul", "div", "pow")
"""Of these a number is worth a word that they are given."""

LAYOUTS = 8
"""In so many layouts a tensor is recognised."""


class Kind(StrEnum):
    """What distinguishes a step from the reference's."""

    FUNCTION = "another function"
    NUMBER = "another number"
    TENSOR = "wrong tensor"
    ORDER = "another order"
    CONSTANT = "other constants"
    MASK = "other mask"
    UNUSED = "parameter not used"
    EXTRA = "a step too many"
    LEFT_OUT = "step left out"
    MOVED = "step in another place"
    EXCHANGED = "steps in the other order"
    SEQUENCE = "parts in another order"


WORDS: Mapping[Kind, tuple[str, str]] = {
    Kind.FUNCTION: ("a step calls another function than the reference's", "call what the reference calls there"),
    Kind.NUMBER: ("a step is given another number than the reference's", "take the number from the config"),
    Kind.TENSOR: (
        "a step reads another tensor of the same shape than the reference's step does",
        "see which variable the line reads",
    ),
    Kind.ORDER: (
        "a step is given the reference's numbers in another order",
        "see how axes are split, transposed and joined on the way to the line",
    ),
    Kind.CONSTANT: (
        "what a step adds or multiplies by, and what is made of no weights, is not what the reference has there",
        "see how it is made: a mask, positions, slopes",
    ),
    Kind.MASK: (
        "a mask hides other places than the reference's",
        "compare what it is made of with the reference's: an index off by one, another axis, another argument",
    ),
    Kind.UNUSED: ("a parameter is not used where the reference uses it", "use it"),
    Kind.EXTRA: ("a step is done that the reference does not do", "take it out"),
    Kind.LEFT_OUT: ("a step of the reference is not done", "do it where the reference does"),
    Kind.MOVED: ("a step is done in another place than the reference's", "do it where the reference does"),
    Kind.EXCHANGED: ("two steps are done in the other order than the reference's", "exchange them"),
    Kind.SEQUENCE: ("parts of a layer run in another order than the reference's", "run them in the reference's order"),
}
"""What it means and what to do about it, by kind."""


@cache
def spelled(path: str) -> str:
    """A module's path without the numbers of its layers, so that what is alike in all layers has one name."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "{i}", path) or "the model"


def named(tape: Tape, ref: Ref, spelled: Callable[[str], str] = spelled) -> str:
    """What a tensor is, as a report says it; ``spelled`` says how paths are."""
    if ref in tape.weights:
        return spelled(tape.weights[ref])
    call, part = tape.maker(ref), ""
    while call is not None and call.name in MOVING and call.reads:
        part = f"part {call.writes.index(ref)} of " if len(call.writes) > 1 else part
        ref, call = call.reads[0], tape.maker(call.reads[0])
    if ref in tape.weights:
        return spelled(tape.weights[ref])
    if call is None:
        return "an input"
    return f"{part}the output of {call.name.strip('_')} in {spelled(call.module)}"


@dataclass(frozen=True)
class Repair:
    """A step of the port that is not the reference's.

    Attributes:
        kind: what distinguishes the two.
        line: ``file:line`` of the user's code.
        operation: the torch function that the port calls there.
        detail: the difference, in words.
        where: the module of the reference whose step it is; empty for a step that the reference does not have.
        missing: the torch function of the reference that is left out before the step, if one is.
    """

    kind: Kind
    line: str
    operation: str
    detail: str
    where: str
    missing: str = ""

    @property
    def step(self) -> tuple[str, str]:
        """Where it is, and what is done there."""
        return self.line, self.operation

    @property
    def key(self) -> tuple[Kind, str, str]:
        """What is one mistake, in however many layers."""
        return self.kind, self.line, self.operation


class Steps:
    """Compares the steps of two passes.

    Args:
        port, reference: the two passes.
        numbers, weights: of the reference: of what is computed, and of its weights.
        values: the port's values, those before the steps repaired.
        region: what of these the reference does not have.
    """

    def __init__(
        self, port: Tape, reference: Tape, numbers: Numbers, weights: Numbers, values: Values, region: Region
    ) -> None:
        self._port, self._reference = port, reference
        self._numbers, self._weights = numbers, weights
        self._values, self._region = values, region

    def repair(self, step: Call, value: Tensor, theirs: Ref | None) -> Repair:
        """What it means that a step has to be given a value.

        Args:
            step: the step of the port.
            value: what it is given in the place of its result.
            theirs: whose value that is in the reference; None where it is an operand of the step.
        """
        call = self.maker(theirs) if theirs is not None else None
        operation = word(step)
        if call is None:
            given = _numbers(step).values() if operation in ARITHMETIC else ()
            numbers = " and ".join(f"{number:g}" for number in given)
            weight = next((named(self._port, ref) for ref in step.reads if moves_weights(self._port, ref)), "")
            by = f" by {numbers}" if numbers else f" with {weight}" if weight else ""
            detail = f"{operation}{by}, which the reference does not do"
            return Repair(Kind.EXTRA, line_of(step), operation, detail, "")
        kind, detail, missing = self._difference(step, value, call)
        return Repair(kind, line_of(step), operation, detail, call.module, missing)

    def maker(self, ref: Ref) -> Call | None:
        """The reference's step that a tensor comes from, wherever it was moved since."""
        return self._reference.maker(unmoved(self._reference, ref))

    def _difference(self, step: Call, value: Tensor, call: Call) -> tuple[Kind, str, str]:
        """What distinguishes two steps, and what the reference does before its own that the port does not."""
        name, place = word(step), spelled(call.module)
        constant = self._constant(step, value) if name == word(call) else None
        hides = self._hides(step, value)
        if hides or constant is not None:
            detail = hides or f"takes other numbers than the reference's{constant}"
            return Kind.MASK if hides else Kind.CONSTANT, f"{name} in {place} {detail}", ""
        if name != word(call) and not any(ref in call.reads for ref in self.weights_of(step)):
            if word(call) in self._made_by(self._port, step) and name in self._made_by(self._reference, call):
                return Kind.EXCHANGED, f"{name} comes after {word(call)} in {place}", ""
            where = _extent(self._unchanged_at(step), value)
            return Kind.FUNCTION, f"{name}, where {place} of the reference has {word(call)}{where}", ""
        ours, theirs = _numbers(step), _numbers(call)
        other = [name for name in ours if name in theirs and ours[name] != theirs[name]]
        if other:
            told = (f"{name} is {ours[name]:g} where the reference has {theirs[name]:g}" for name in other)
            return Kind.NUMBER, f"{name} in {place}: {', '.join(told)}", ""
        kind, is_, expected = self._operand(step, call)
        if kind is Kind.LEFT_OUT:
            return kind, f"{is_} in {expected} of the reference is left out", is_
        return kind, f"{name} in {place} {is_}" + (f", where the reference's {expected}" if expected else ""), ""

    def has_own_weights(self, step: Call) -> bool:
        """Whether a step reads a tensor that the port holds and the reference does not: no other step replaces it."""
        held = [ref for ref in step.reads if self._port.maker(ref) is None or moves_weights(self._port, ref)]
        values = [self._values[ref] for ref in held]
        matrices = [value for value in values if value.is_floating_point() and moments(value) is not None]
        return any(not self._weights.like(matrix) and not self._numbers.like(matrix) for matrix in matrices)

    def weights_of(self, step: Call) -> Iterator[Ref]:
        """The reference's weights that have the numbers of a step's."""
        for ref in step.reads:
            if moves_weights(self._port, ref) and self._port.learned(ref):
                yield from self._weights.like(self._values[ref])

    @staticmethod
    def _made_by(tape: Tape, call: Call) -> set[str]:
        """The functions that gave what a call reads."""
        makers = (tape.maker(unmoved(tape, ref)) for ref in call.reads)
        return {word(maker) for maker in makers if maker is not None}

    def _unchanged_at(self, step: Call) -> Tensor:
        """What the port gives there by itself, the steps before being repaired."""
        made: Tensor = tree_leaves(self._values.run(step))[0]
        return made

    def _hides(self, step: Call, value: Tensor) -> str:
        """How a mask differs from the reference's, whichever functions apply the two; empty where nothing else does."""
        own = self._unchanged_at(step)
        if own.shape != value.shape or not own.is_floating_point():
            return ""
        ours, theirs = (~(part > MASKED) for part in (own, value))
        shown = ~(ours | theirs)
        if not ours.any() or not theirs.any() or torch.equal(ours, theirs) or not _close(own[shown], value[shown]):
            return ""
        more, less = int((theirs & ~ours).sum()), int((ours & ~theirs).sum())
        parts = [f"shows {more:,} that the reference hides"] if more else []
        parts += [f"hides {less:,} that the reference shows"] if less else []
        return f"{' and '.join(parts)}, of {own.numel():,}"

    def _constant(self, step: Call, value: Tensor) -> str | None:
        """How the numbers differ that a step takes besides an activation and that are made of no weights."""
        inverses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"add": torch.sub, "mul": torch.div}
        function = inverses.get(word(step))
        known = [ref for ref in step.reads if self._port.learned(ref) and ref not in self._region.lost]
        made = [ref for ref in step.reads if not self._port.learned(ref)]
        if function is None or len(known) != 1 or len(made) != 1:
            return None
        own = self._values[made[0]].double()
        needed = function(value.double(), self._values[known[0]].double())
        while needed.ndim > own.ndim:
            needed = needed[0]
        for axis, extent in enumerate(own.shape):
            needed = needed.narrow(axis, 0, 1) if extent == 1 else needed
        if needed.shape != own.shape:
            return None
        hidden = [~(part > MASKED) for part in (own, needed)]
        if not torch.equal(*hidden):
            return ": a mask hides other places"
        ours, theirs = (part.masked_fill(hidden[0], 0.0) for part in (own, needed))
        if _close(ours, theirs):
            return None
        if own.numel() == 1:
            return f": {float(own):g} where the reference has {float(needed):g}"
        # What is added to all scores of a query changes no attention.
        shown = ~hidden[0]
        less = [(part - part[..., :1]) * shown for part in (ours, theirs)] if function is torch.sub else []
        return _order(ours, theirs) or (less and _order(*less)) or _extent(ours, theirs)

    def _operand(self, step: Call, call: Call) -> tuple[Kind, str, str]:
        """Which operand is another one: what the port does, and what the reference does."""
        rest = list(dict.fromkeys(call.reads))
        if word(step) == "matmul" and len(rest) > 2:  # a port may add the bias by itself
            rest = [ref for ref in rest if self._reference[ref].ndim > 1 or ref not in self._reference.weights]
        unlike: list[tuple[Ref, list[Ref]]] = []
        turned: list[tuple[Ref, Ref]] = []
        for ref in dict.fromkeys(step.reads):
            like = [*self._numbers.like(self._values[ref]), *self._weights.like(self._values[ref])]
            match = next((ref for ref in rest if ref in like), None)
            if match is None:
                unlike.append((ref, like))
            else:
                rest.remove(match)
            same = match is not None and self._reference[match].shape == self._values[ref].shape
            held = [match] if same and match is not None else like
            if held and not any(_equal(self._values[ref], self._reference[twin], same=same) for twin in held):
                turned.append((ref, held[0]))
        if turned:
            ref, match = turned[0]
            since = self._region.turning(ref)
            where = f", since {line_of(since)}" if since is not None else ""
            how = _order(self._values[ref], self._reference[match])
            return Kind.ORDER, f"reads {named(self._reference, match)} in another order{how}{where}", ""
        if not unlike and rest:
            kind = Kind.UNUSED if rest[0] in self._reference.weights else Kind.TENSOR
            return kind, f"does not read {named(self._reference, rest[0])}", ""
        if not rest:
            return Kind.ORDER, "gives its numbers in another order", ""
        return self._other_operand(*unlike[0], rest)

    def _other_operand(self, ref: Ref, like: Sequence[Ref], rest: list[Ref]) -> tuple[Kind, str, str]:
        """What an operand is that the reference's step does not have, where that has others."""
        learned = self._port.learned(ref)
        rest.sort(key=lambda ref: (self._reference.learned(ref) != learned, ref in self._reference.weights))
        theirs = rest[0]
        source = unmoved(self._port, ref)
        if source != ref and unmoved(self._reference, theirs) in self._numbers.like(self._values[source]):
            return Kind.ORDER, f"reads another part of {named(self._reference, theirs)}", ""
        expected = f"reads {named(self._reference, theirs)}"
        made = self._reference.maker(unmoved(self._reference, theirs))
        if (
            like
            and made is not None
            and any(known in made.reads for ref in like for known in (ref, unmoved(self._reference, ref)))
        ):
            return Kind.LEFT_OUT, word(made), spelled(made.module)
        if like:
            own = f"reads {named(self._reference, like[0])}"
            if own == expected:  # of two layers
                own, expected = (f"reads {named(self._reference, ref, str)}" for ref in (like[0], theirs))
            return Kind.TENSOR, own, expected
        return Kind.TENSOR, f"reads {named(self._port, ref)} of the port", expected


def unmoved(tape: Tape, ref: Ref) -> Ref:
    """What a tensor was moved from."""
    call = tape.maker(ref)
    while call is not None and call.name in MOVING and call.reads:
        ref = call.reads[0]
        call = tape.maker(ref)
    return ref


def _equal(value: Tensor, theirs: Tensor, *, same: bool) -> bool:
    """Whether a tensor is another one, as it is or in some layout."""
    return any(_close(value, layout) for layout in islice(laid_out(theirs, tuple(value.shape)), 1 if same else LAYOUTS))


def _close(value: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(value.double(), theirs.double(), rtol=1e-9, atol=1e-9)


def _order(value: Tensor, theirs: Tensor) -> str:
    """Along which axis the order is another one, and which; empty where it is no such."""
    for layout in islice(laid_out(theirs, tuple(value.shape)), LAYOUTS):
        joined = [(axis, axis) for axis in range(value.ndim)] + [(axis, axis + 1) for axis in range(value.ndim - 1)]
        for first, last in joined:
            ours, other = (_rows(part.double().flatten(first, last), first) for part in (value, layout))
            if not 1 < len(ours) <= ALONG:
                continue
            near = torch.cdist(ours, other) <= 1e-7 * float(other.norm() + 1e-300)
            if bool((near.sum(1) == 1).all()):
                return f" (in the order {_listed(near.double().argmax(1).tolist())} along an axis of {len(ours)})"
    return ""


def _rows(value: Tensor, axis: int) -> Tensor:
    """A row for each place of an axis."""
    return value.movedim(axis, 0).reshape(value.shape[axis], -1)


def _extent(value: Tensor, theirs: Tensor) -> str:
    """At which places of an axis two tensors differ, where these are few."""
    if value.shape != theirs.shape:
        return ""
    apart = ~torch.isclose(value.double(), theirs.double(), rtol=1e-9, atol=1e-9)
    for axis, extent in enumerate(value.shape):
        places = _rows(apart, axis).any(1).nonzero().flatten().tolist()
        if 0 < len(places) <= min(MOST, extent // 2):
            return f", at {_listed(places)} of an axis of {extent} only"
    return ""


def _listed(places: Sequence[int]) -> str:
    return " ".join(map(str, places[:MOST])) + (" ..." if len(places) > MOST else "")


ALONG = 512
"""The order along longer axes is not looked at."""

MOST = 16
"""So many places of an axis are listed."""


def _own(port: Tape, ref: Ref) -> str:
    return f"{named(port, ref)} of the port"


def word(call: Call) -> str:
    """The function's name, alike for an operator and a function."""
    name = re.sub(r"^_+[ir]?(?=(add|sub|mul|truediv|matmul|div)_)", "", call.name).strip("_")
    if kind_of(call.function) in (TraceKind.PRODUCT, TraceKind.EINSUM, TraceKind.BIASED_PRODUCT):
        return "matmul"
    return {"truediv": "div", "true_divide": "div", "multiply": "mul", "subtract": "sub"}.get(name, name)


def _numbers(call: Call) -> dict[str, float]:
    """The numbers that a call is given, by the names of the arguments where they are known."""
    names = argument_names(call.function)
    found: dict[str, Any] = {}
    for place, value in enumerate(call.args):
        found[names[place] if place < len(names) else f"argument {place + 1}"] = value
    found |= call.kwargs
    return {name: float(value) for name, value in found.items() if isinstance(value, bool | int | float)}


def laid_out(value: Tensor, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """A tensor in each layout that has the shape; none where it has another number of elements."""
    if value.numel() != math.prod(shape):
        return
    if tuple(value.shape) == shape:
        yield value
    done = {tuple(range(value.ndim))} if tuple(value.shape) == shape else set()
    if value.ndim > 5:
        return
    extents = [number for number in shape if number != 1]
    exact: list[tuple[int, ...]] = []
    joined: list[tuple[int, ...]] = []
    for order in permutations(range(value.ndim)):
        if order in done:
            continue
        turned = [value.shape[axis] for axis in order]
        (exact if [number for number in turned if number != 1] == extents else joined).append(order)
    for order in (*exact, *(axes for axes in joined if _splits([value.shape[axis] for axis in axes], shape))):
        yield value.permute(order).reshape(shape)


def _splits(sizes: Sequence[int], other: Sequence[int]) -> bool:
    """Whether axes of one shape are joined, or taken apart, to give the other."""
    ends = [set(accumulate((number for number in shape if number != 1), mul)) for shape in (sizes, other)]
    fewer, more = sorted(ends, key=len)
    return fewer <= more
