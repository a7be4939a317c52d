"""Mending the port: a step that leaves the reference is given what the reference has there, until nothing is left.

When what the port then returns is the reference's, the port is wrong in these steps and in nothing else, whatever kind
of mistake they are: no entry of the catalogue is needed.  What distinguishes each step from the reference's is read
off the two calls: another function, another number, another tensor, the same tensor in another order.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, combinations, islice, permutations, takewhile
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from porting.causes.diverging import MASKED, MOVING, Numbers, Region, line_of, moves_weights
from porting.causes.general import named, spelled
from porting.causes.linear import linears
from porting.causes.replay import Around, Values
from porting.causes.tape import Call, Ref, Tape
from porting.tracing.calls import Kind as TraceKind
from porting.tracing.calls import argument_names, kind_of

STEPS = 96
"""So many steps are mended at most."""

LINES = 3
"""A cause is at so many lines of the port; one that leaves the reference at more is another model."""

NEAR = 24
"""A step may stand for so many steps of the reference."""

TRIED = 40
"""So many tensors of the reference are tried in the place of a step's result."""

FRONTIER = 6
"""Of so many steps that are given what the reference has, each is tried."""

PASSED = 4
"""Over so many steps in a row that cannot be mended the search goes on."""

SURE = 4
"""So many tensors are tried before the one that is best so far is taken."""

LAYOUTS = 8
"""In so many layouts each."""


class Kind(StrEnum):
    """What distinguishes a step from the reference's."""

    FUNCTION = "another function"
    NUMBER = "another number"
    TENSOR = "wrong tensor"
    ORDER = "another order"
    CONSTANT = "other constants"
    EXTRA = "a step too many"
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
    Kind.EXTRA: ("a step is done that the reference does not do", "take it out"),
    Kind.SEQUENCE: ("parts of a layer run in another order than the reference's", "run them in the reference's order"),
}
"""What it means and what to do about it, by kind."""


@dataclass(frozen=True)
class Repair:
    """A step of the port that is not the reference's.

    Attributes:
        kind: what distinguishes the two.
        line: ``file:line`` of the user's code.
        operation: the torch function that the port calls there.
        detail: the difference, in words.
        where: the module of the reference whose step it is; empty for a step that the reference does not have.
    """

    kind: Kind
    line: str
    operation: str
    detail: str
    where: str

    @property
    def key(self) -> tuple[Kind, str, str]:
        """What is one mistake, in however many layers."""
        return self.kind, self.line, self.operation


@dataclass(frozen=True)
class Way:
    """A way in which the port becomes the reference.

    Attributes:
        repairs: the steps that have to be mended, in order.
        left: how far what the port returns is then from what the reference returns.
    """

    repairs: tuple[Repair, ...]
    left: float

    @property
    def keys(self) -> set[tuple[Kind, str, str]]:
        """Each mistake once."""
        return {one.key for one in self.repairs}


@dataclass(frozen=True)
class _Given:
    """What a step is given in the place of its result."""

    step: Call
    value: Tensor
    theirs: Ref | None


def mend(
    port: Tape,
    reference: Tape,
    goals: Mapping[Ref, Sequence[Ref]],
    left: Callable[[Values], float],
    *,
    bound: float,
    until: float,
    around: Around = nullcontext,
) -> list[Way]:
    """Give the port's steps what the reference has, from the first that leaves it on, until none is left.

    Args:
        port, reference: the two passes, each end to end; the port's with lines.
        goals: the port's values that are compared, and what they are compared with.
        left: how far what the port returns with these values is from what the reference returns.
        bound: what rounding leaves of that.
        until: when to give up, by ``time.monotonic``.
        around: what the port's calls are made again in.

    Returns:
        The ways in which a few steps account for all, each without the steps that need not be mended.
    """
    # Whether a step of the port may be left out altogether: it fits often where it is not what was done.
    ways = (_Mending(port, reference, goals, left, bound, until, around, extra=extra).done() for extra in (True, False))
    return [way for way in ways if way is not None]


class _Mending:
    def __init__(
        self,
        port: Tape,
        reference: Tape,
        goals: Mapping[Ref, Sequence[Ref]],
        left: Callable[[Values], float],
        bound: float,
        until: float,
        around: Around,
        *,
        extra: bool,
    ) -> None:
        self._port, self._reference, self._extra = port, reference, extra
        self._left, self._bound, self._until = left, bound, until
        self._numbers = Numbers(reference)
        self._weights = Numbers(reference, weights=True)
        self._linears = {one.call.number: one for one in linears(reference)}
        self._values = self._unchanged = Values(port, around=around)
        self._region = Region(port, reference, self._numbers, goals, self._values)

    def done(self) -> Way | None:
        given: list[_Given] = []
        while self._left(self._values) > self._bound:
            one = self._next_mended()
            if one is None or len(given) == STEPS:
                return None
            given = self._needed(given, one)
        found = [self._told(one) for one in given]
        turned = self._sequence(given, found)
        found = found if turned is None else [turned]
        few = len({one.line for one in found}) <= LINES
        return Way(tuple(found), self._left(self._values)) if few else None

    def _sequence(self, given: Sequence[_Given], found: Sequence[Repair]) -> Repair | None:
        """Two parts of one module that run in another order than the reference's; None where none do."""
        calls = [(one, told, self._maker(one.theirs)) for one, told in zip(given, found, strict=True) if one.theirs]
        places = [(told, call) for _, told, call in calls if call is not None and told.kind is Kind.TENSOR]
        for (told, ours), (_, theirs) in combinations(places, 2):
            if theirs.number < ours.number:
                one, two = _parts(ours.module, theirs.module)
                if one and two:
                    detail = f"{spelled(one)} runs before {spelled(two)}"
                    return replace(told, kind=Kind.SEQUENCE, detail=detail, where=one)
        return None

    def _next_mended(self) -> _Given | None:
        """The first step that can be mended: one may stand for a part of a step of the reference, which has no such."""
        passed: set[Ref] = set()
        for _ in range(PASSED):
            steps = list(islice(self._region.steps(passed), FRONTIER))
            for step in steps:
                one = self._mend(step)
                if one is not None:
                    return one
            passed.update(ref for step in steps for ref in step.writes)
        return None

    def _needed(self, given: Sequence[_Given], last: _Given) -> list[_Given]:
        """Without those that need not be mended now that another step is: a sum in another order, say.

        What is before the last one on the way to it stays: whether it is needed cannot be seen behind it.
        """
        needed = [*given, last]
        before = {call.number for call in self._port.before(last.step.result)}
        for one in reversed(given):
            if one.step.number in before or time.monotonic() > self._until:
                continue
            rest = [other for other in needed if other is not one]
            values = self._unchanged
            for number, other in enumerate(rest):
                values = self._given(values, other, rest[number + 1].step.number if number + 1 < len(rest) else None)
            region = self._region.with_values(values)
            if self._next(region) >= self._next(self._region):
                needed, self._values, self._region = rest, values, region
        return needed

    def _next(self, region: Region) -> int:
        """The number of the first step that is not the reference's."""
        return next((one.number for one in region.steps()), len(self._port.calls))

    def _mend(self, step: Call) -> _Given | None:
        """Give a step what the reference has in its place, if the port then goes on as the reference does."""
        furthest, best = step.number, None
        for number, (value, theirs) in enumerate(self._instead(step)):
            if time.monotonic() > self._until:
                return None
            one = _Given(step, value, theirs)
            try:
                values = self._given(self._values, one)
            except (RuntimeError, IndexError, ValueError, TypeError):  # it does not fit there
                continue
            region = self._region.with_values(values)
            further = self._next(region)
            if further > furthest:
                furthest, best = further, (one, values, region)
            if best and number >= SURE:
                break
        if best is None:
            return None
        one, self._values, self._region = best
        return one

    def _given(self, values: Values, one: _Given, last: int | None = None) -> Values:
        """The values when a step gives something else, up to a later step or to the end."""
        changed = Values(self._port, {**values.changed, one.step.result: one.value}, around=values.around)
        self._play(changed, one.step, last)
        return changed

    def _play(self, values: Values, step: Call, last: int | None) -> None:
        """Go on from a step."""
        for call in self._port.calls[step.number + 1 : last]:
            if any(one in values.changed for one in call.reads):
                made = [one for one in tree_leaves(values.run(call)) if isinstance(one, Tensor)]
                values.changed.update(zip(call.writes, made, strict=True))

    def _instead(self, step: Call) -> Iterator[tuple[Tensor, Ref | None]]:
        """What may stand in the place of a step's result: tensors of the reference, the likeliest first."""
        shape = tuple(self._values[step.result].shape)
        dtype = self._values[step.result].dtype
        for ref in self._given_to(step) if self._extra else ():  # the step itself may be too much
            if self._values[ref].shape == shape and ref not in self._port.weights:
                yield self._values[ref].to(dtype), None
        for ref in islice(self._theirs(step), TRIED):
            for whole in self._with_and_without_bias(step, ref):
                for value in islice(_laid_out(whole, shape), LAYOUTS):
                    yield value.to(dtype), ref

    def _with_and_without_bias(self, step: Call, ref: Ref) -> Iterator[Tensor]:
        """A result; where a port's product may add the bias in a step of its own, first what it is without."""
        call = self._reference.maker(ref)
        linear = None if call is None else self._linears.get(call.number)
        if linear is not None and linear.bias is not None and _word(step) == "matmul":
            yield self._reference[ref] - self._reference[linear.bias]
        yield self._reference[ref]

    def _theirs(self, step: Call) -> Iterator[Ref]:
        """Results of the reference: of calls with the step's weights, and of what it does with the step's operands."""
        seen: set[Ref] = set()
        numel = self._values[step.result].numel()

        def fresh(ref: Ref) -> bool:
            value = self._reference[ref]
            good = ref not in seen and value.is_floating_point() and value.numel() == numel
            seen.add(ref)
            return good and ref not in self._reference.weights

        by_weight = [call for ref in self._weights_of(step) for call in self._users(ref)]
        by_operand = [call for ref in self._operands(step) for call in self._users(ref)]
        direct = [*by_weight, *by_operand]
        same = [call for call in direct if _word(call) == _word(step)]
        for call in (*same, *direct):
            yield from (ref for ref in call.writes if fresh(ref))
        waiting, steps = list(direct), 0
        while waiting and steps < NEAR * max(len(direct), 1):
            call = waiting.pop(0)
            steps += 1
            for ref in call.writes:
                if fresh(ref):
                    yield ref
                waiting += [user for user in self._users(ref) if user not in waiting]

    def _users(self, ref: Ref) -> Iterator[Call]:
        """The calls that compute something of a tensor, wherever it is moved."""
        for call in self._reference.users(ref):
            if call.name in MOVING:
                for one in call.writes:
                    yield from self._users(one)
            else:
                yield call

    def _weights_of(self, step: Call) -> Iterator[Ref]:
        """The reference's weights that have the numbers of a step's."""
        for ref in step.reads:
            if moves_weights(self._port, ref) and self._port.learned(ref):
                yield from self._weights.like(self._values[ref])

    def _operands(self, step: Call) -> Iterator[Ref]:
        """The reference's tensors that have the numbers of a step's operands."""
        for ref in self._given_to(step):
            yield from self._region.through(ref)

    def _given_to(self, step: Call) -> list[Ref]:
        """The activations that the reference has and that a step is given, at once or by steps that it has not."""
        found, waiting, seen = [], list(step.reads), set(step.reads)
        while waiting:
            ref = waiting.pop(0)
            if not self._port.learned(ref):
                continue
            call = self._port.maker(ref)
            if ref not in self._region.lost or call is None:
                found.append(ref)
                continue
            waiting += [one for one in call.reads if one not in seen]
            seen.update(call.reads)
        return found

    # ------------------------------------------------------------------------------------------------------------ words

    def _told(self, one: _Given) -> Repair:
        call = self._maker(one.theirs) if one.theirs is not None else None
        operation = _word(one.step)
        if call is None:
            detail = f"{operation}, which the reference does not do"
            return Repair(Kind.EXTRA, line_of(one.step), operation, detail, "")
        kind, detail = self._difference(one, call)
        return Repair(kind, line_of(one.step), operation, detail, call.module)

    def _maker(self, ref: Ref) -> Call | None:
        return self._reference.maker(_unmoved(self._reference, ref))

    def _difference(self, one: _Given, call: Call) -> tuple[Kind, str]:
        """What distinguishes two steps."""
        step = one.step
        word, place = _word(step), spelled(call.module)
        constant = self._constant(one)
        if constant is not None:
            return Kind.CONSTANT, f"{word} in {place} takes other numbers than the reference's{constant}"
        if word != _word(call) and not any(ref in call.reads for ref in self._weights_of(step)):
            where = _extent(self._unchanged_at(step), one.value)
            return Kind.FUNCTION, f"{word}, where {place} of the reference has {_word(call)}{where}"
        ours, theirs = _numbers(step), _numbers(call)
        other = [name for name in ours if name in theirs and ours[name] != theirs[name]]
        if other:
            told = (f"{name} is {ours[name]:g} where the reference has {theirs[name]:g}" for name in other)
            return Kind.NUMBER, f"{word} in {place}: {', '.join(told)}"
        kind, is_, expected = self._operand(step, call)
        return kind, f"{word} in {place} {is_}" + (f", where the reference's {expected}" if expected else "")

    def _unchanged_at(self, step: Call) -> Tensor:
        """What the port gives there by itself, the steps before being mended."""
        made: Tensor = tree_leaves(self._values.run(step))[0]
        return made

    def _constant(self, one: _Given) -> str | None:
        """How the numbers differ that a step takes besides an activation and that are made of no weights."""
        step = one.step
        inverses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"add": torch.sub, "mul": torch.div}
        function = inverses.get(_word(step))
        known = [ref for ref in step.reads if self._port.learned(ref) and ref not in self._region.lost]
        made = [ref for ref in step.reads if not self._port.learned(ref)]
        if function is None or len(known) != 1 or len(made) != 1:
            return None
        value = self._values[made[0]].double()
        needed = function(one.value.double(), self._values[known[0]].double())
        while needed.ndim > value.ndim:
            needed = needed[0]
        for axis, extent in enumerate(value.shape):
            needed = needed.narrow(axis, 0, 1) if extent == 1 else needed
        if needed.shape != value.shape:
            return None
        hidden = [~(part > MASKED) for part in (value, needed)]
        if not torch.equal(*hidden):
            return ": a mask hides other places"
        ours, theirs = (part.masked_fill(hidden[0], 0.0) for part in (value, needed))
        if _close(ours, theirs):
            return None
        # What is added to all scores of a query changes no attention.
        shown = ~hidden[0]
        less = [(part - part[..., :1]) * shown for part in (ours, theirs)] if function is torch.sub else []
        return _order(ours, theirs) or (less and _order(*less)) or _extent(ours, theirs)

    def _operand(self, step: Call, call: Call) -> tuple[Kind, str, str]:
        """Which operand is another one: what the port does, and what the reference does."""
        rest = list(dict.fromkeys(call.reads))
        unlike: list[tuple[Ref, list[Ref]]] = []
        turned: list[tuple[Ref, Ref]] = []
        for ref in dict.fromkeys(step.reads):
            like = [*self._numbers.like(self._values[ref]), *self._weights.like(self._values[ref])]
            match = next((one for one in rest if one in like), None)
            if match is None:
                unlike.append((ref, like))
            else:
                rest.remove(match)
            if like and not any(_equal(self._values[ref], self._reference[one]) for one in like):
                turned.append((ref, match or like[0]))
        if turned:
            ref, match = turned[0]
            since = self._region.turning(ref)
            where = f", since {line_of(since)}" if since is not None else ""
            how = _order(self._values[ref], self._reference[match])
            return Kind.ORDER, f"reads {named(self._reference, match)} in another order{how}{where}", ""
        if not unlike or not rest:
            return Kind.ORDER, "gives its numbers in another order", ""
        ref, like = unlike[0]
        learned = self._port.learned(ref)
        rest.sort(key=lambda one: (self._reference.learned(one) != learned, one in self._reference.weights))
        theirs = rest[0]
        source = _unmoved(self._port, ref)
        if source != ref and _unmoved(self._reference, theirs) in self._numbers.like(self._values[source]):
            return Kind.ORDER, f"reads another part of {named(self._reference, theirs)}", ""
        expected = f"reads {named(self._reference, theirs)}"
        if like:
            return Kind.TENSOR, f"reads {named(self._reference, like[0])}", expected
        return Kind.TENSOR, f"reads {named(self._port, ref)} of the port", expected


def _unmoved(tape: Tape, ref: Ref) -> Ref:
    """What a tensor was moved from."""
    call = tape.maker(ref)
    while call is not None and call.name in MOVING and call.reads:
        ref = call.reads[0]
        call = tape.maker(ref)
    return ref


def _parts(one: str, two: str) -> tuple[str, str]:
    """The two parts of the module that both are in; empty where one is that module."""
    ours, theirs = one.split("."), two.split(".")
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))))
    return tuple(".".join(path[: shared + 1]) if len(path) > shared else "" for path in (ours, theirs))  # type: ignore[return-value]


def _equal(value: Tensor, theirs: Tensor) -> bool:
    """Whether a tensor is another one in some layout."""
    return any(_close(value, one) for one in islice(_laid_out(theirs, tuple(value.shape)), LAYOUTS))


def _close(value: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(value.double(), theirs.double(), rtol=1e-9, atol=1e-9)


def _order(value: Tensor, theirs: Tensor) -> str:
    """Along which axis the order is another one, and which; empty where it is no such."""
    for one in islice(_laid_out(theirs, tuple(value.shape)), LAYOUTS):
        joined = [(axis, axis) for axis in range(value.ndim)] + [(axis, axis + 1) for axis in range(value.ndim - 1)]
        for first, last in joined:
            ours, other = (_rows(part.double().flatten(first, last), first) for part in (value, one))
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


def _word(call: Call) -> str:
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


def _laid_out(value: Tensor, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """A tensor in each layout that has the shape."""
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
    for order in (*exact, *(one for one in joined if _splits([value.shape[axis] for axis in one], shape))):
        yield value.permute(order).reshape(shape)


def _splits(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether axes of one shape are joined, or taken apart, to give the other."""
    ends = [set(accumulate((number for number in shape if number != 1), mul)) for shape in (one, other)]
    fewer, more = sorted(ends, key=len)
    return fewer <= more
