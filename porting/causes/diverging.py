"""Finding the first step of the port whose result does not occur in the reference, by comparing values.

Both passes are recorded. A tensor of the port is *known* if the reference has a tensor with the same numbers in any
layout. If a step reads known tensors, its result is not known, and nothing computed from it is known either, then the
port differs from the reference from this step on. This needs no entry of the catalogue, and no probe in between.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from porting.causes.linear import linears
from porting.causes.replay import Values
from porting.causes.tape import Call, Ref, Tape
from porting.frames import from_here

MASKED = -5e3
"""Attention scores up to this number count as masked, whatever they are."""

CLOSE = 1e-11
"""Largest difference of the moments, relative to their size, of tensors with the same numbers."""

ROUNDED = 1e-6
"""The same where a pass computes something in float32: rounding alone takes its steps so far from the reference's."""

MOVING = frozenset({
    "dropout", "view_as", "tensor_split", "view", "reshape", "transpose", "permute", "expand", "expand_as",
    "contiguous", "clone", "detach", "to", "float", "double", "type_as", "type", "unsqueeze", "squeeze", "flatten",
    "unflatten", "chunk", "split", "unbind", "select", "movedim", "swapaxes", "getitem", "narrow", "flip", "roll",
    "repeat", "repeat_interleave", "cat", "stack", "index_select", "__getitem__", "__get__", "t", "pad",
})  # fmt: skip
"""Functions that rearrange numbers and compute none."""

UNREMARKABLE = frozenset({"amax", "sub", "dropout", "size", "dim"})
"""Steps of the reference that are not reported: how scores are made visible, and what does nothing in eval mode."""

NORMING = frozenset({"pow", "square", "mean", "var", "var_mean", "std", "norm", "layer_norm", "rms_norm", "normalize"})
"""Functions with which a norm begins: it takes a factor, or a number that is added, out again."""

REDUCING = frozenset({
    "mean", "sum", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "std", "var", "var_mean", "std_mean",
    "norm", "topk", "logsumexp", "prod", "median",
})  # fmt: skip
"""Functions with the same result for many inputs: a known result does not show that the input is known."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call of a pass, in a report's terms.

    Attributes:
        operation: the torch function, ``"clamp"``.
        module: the path of the module that was running; ``""`` for the model itself.
    """

    operation: str
    module: str


class Kind(StrEnum):
    """How a value of the port relates to the reference's values."""

    STEP = "step"
    """The result of a step does not occur in the reference."""

    ORDER = "order"
    """The value has the right numbers in another order."""

    ELSEWHERE = "elsewhere"
    """The value occurs elsewhere in the reference."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A tensor with the same numbers as one of the reference's, in another order or shape.

    Attributes:
        shape, expected: the shapes in the port and in the reference; equal where only the order differs.
        line, code: the line that rearranged the numbers; empty where it is not known.
    """

    shape: tuple[int, ...]
    expected: tuple[int, ...]
    line: str = ""
    code: str = ""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where the port begins to differ from the reference.

    Attributes:
        probe: the port's probe whose value differs.
        step: the step of the port; None unless ``kind`` is ``STEP``.
        line: ``file:line`` of the user's code that makes the step.
        callers: the calling lines, the innermost first.
        code: the text of that line; empty where the file cannot be read.
        also: ``file:line`` that makes an operand of the step without weights, such as a mask or positions, which the
            reference does not have; empty where there is none.
        moved: the operand of the step that has the reference's numbers in another order or shape, if any.
        instead: the steps of the reference that read the same numbers.
        behind: the function whose result the step reads, where the reference has another step between the two; ``line``
            is where that function is called.
        reader: ``file:line`` of the first step that gives what the reference does not have.
    """

    probe: str
    kind: Kind
    step: Step | None = None
    line: str = ""
    code: str = ""
    callers: tuple[str, ...] = ()
    also: str = ""
    moved: Moved | None = None
    instead: tuple[Step, ...] = ()
    behind: str = ""
    reader: str = ""


SORTED = 1
"""The moment by which an index is sorted: the root mean square."""


class TensorIndex:
    """The tensors of a pass, searchable by their numbers in any layout.

    Args:
        weights: index the parameters and buffers, and not the computed tensors.

    Attributes:
        close: how far moments of the same numbers may be apart, relative to their size.
    """

    def __init__(self, tape: Tape, *, weights: bool = False, close: float = CLOSE) -> None:
        self._tape, self.close = tape, close
        refs = (ref for ref in tape.refs if (ref in tape.weights) == weights)
        kept: list[tuple[Ref, Ref | None]] = [(ref, None) for ref in refs]
        for linear in () if weights else linears(tape):  # a port may add the bias in a call of its own
            kept += [(linear.call.result, linear.bias)] if linear.bias is not None else []
        found = [(one, vector) for one in kept if (vector := moments(self._value(*one))) is not None]
        found.sort(key=lambda one: one[1][SORTED])
        self._kept = [one for one, _ in found]
        self._moments = np.array([vector for _, vector in found]).reshape(-1, 7)

    def like(self, value: Tensor) -> list[Ref]:
        """Return the tensors with the same numbers as this one, in any layout."""
        vector = moments(value)
        if vector is None:
            return []
        reach = self.close * np.abs(vector[:5]).max()
        column, middle = self._moments[:, SORTED], vector[SORTED]
        first, last = 0, len(column)
        if math.isfinite(reach):  # a scan over tokens has thousands of tensors, and asks for thousands
            first = int(np.searchsorted(column, middle - reach, "left"))
            last = int(np.searchsorted(column, middle + reach, "right"))
        near = np.flatnonzero(same_moments(self._moments[first:last], vector, self.close))
        found = [self._kept[first + place] for place in near]
        if self.close > CLOSE:  # the moments of a tensor that is a little wrong in a few places are as near
            found = [one for one in found if same_numbers(value, self._value(*one), self.close)]
        return sorted((ref for ref, _ in found), key=lambda ref: ref.number)

    def _value(self, ref: Ref, bias: Ref | None) -> Tensor:
        """Return a tensor, without the bias that was added to it if one is given."""
        return self._tape[ref] if bias is None else self._tape[ref] - self._tape[bias]


def same_moments(
    some: np.ndarray[Any, np.dtype[np.float64]], vector: np.ndarray[Any, np.dtype[np.float64]], close: float
) -> Any:  # an array of bool, or one of numpy's for the moments of a single tensor
    """Return which moments of some tensors, [... 7], are those of another one, relative to their size."""
    scale = np.ones(7)
    scale[:5] = np.abs(vector[:5]).max()  # means and extremes are compared relative to the largest of them
    with np.errstate(invalid="ignore"):  # statistics of the largest floats may be infinite
        return np.all(np.abs(some - vector) <= close * scale, axis=-1)


def same_numbers(value: Tensor, other: Tensor, close: float) -> bool:
    """Return whether two tensors have the same numbers in any order, but for roundings; True where their sizes differ.

    Args:
        close: how far they may be apart, relative to the largest, of which roundings of single numbers are a multiple.
    """
    if value.numel() != other.numel():
        return True
    ours, theirs = (part.detach().double().flatten() for part in (value, other))
    ours, theirs = (part.masked_fill(~(part > MASKED), 0.0).sort().values for part in (ours, theirs))
    return bool((ours - theirs).abs().max() <= SINGLE * close * theirs.abs().max())


def is_close(value: Tensor, other: Tensor, close: float) -> bool:
    """Return whether two tensors of one shape have the same numbers at the same places, but for roundings."""
    value, other = value.double(), other.double()
    if close <= CLOSE:
        return torch.allclose(other, value, rtol=1e-9, atol=1e-9)
    kept = other[(other > MASKED) & other.isfinite()].abs()
    return torch.allclose(
        other, value, rtol=SINGLE * close, atol=SINGLE * close * float(kept.max() if kept.numel() else 1)
    )


SINGLE = 10.0
"""How many times as far apart as moments the numbers may be of which they are the moments."""


def moments(value: Tensor) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
    """Return seven statistics that do not depend on the order of the elements, or on how often all are repeated.

    They are the mean, root mean square, third moment, minimum and maximum of the elements that are finite and not
    masked, their share, and whether the dtype is integral. None for a tensor without values or with fewer than two
    different elements.
    """
    strange = value.layout != torch.strided or value.is_nested or value.is_complex() or value.is_meta
    if strange or value.numel() < 2:
        return None
    elements = value.detach().double().flatten().numpy()  # of small tensors many times as fast as torch
    kept, low, high = elements, elements.min(), elements.max()
    if not (low > MASKED and math.isfinite(high)):  # neither if one is NaN
        kept = elements[(elements > MASKED) & np.isfinite(elements)]
        low, high = (kept.min(), kept.max()) if kept.size else (0.0, 0.0)
    if low == high:
        return None
    share = kept.size / elements.size
    whole = float(not value.is_floating_point())
    with np.errstate(over="ignore"):  # of the largest float, as it stands in a mask that is capped
        square = kept * kept
        cube = np.cbrt(square.dot(kept) / kept.size)
        return np.array([kept.mean(), np.sqrt(square.mean()), cube, low, high, share, whole])


def divergence(
    port: Tape, reference: Tape, point: str, own: Ref, wanted: Sequence[Ref], *, close: float = CLOSE
) -> Divergence | None:
    """Find where the port begins to differ from the reference on the way to a value.

    Args:
        port, reference: the two tapes; the port's has lines, and the reference's values at earlier probes.
        point: the port's probe.
        own: the probe's value on the port's tape.
        wanted: its counterparts on the reference's tape.
        close: how far results of the same step may be apart, where one is rounded to less than float64.

    Returns:
        The divergence, or None where no single step can be named.
    """
    numbers = TensorIndex(reference, close=close)
    alike = [ref for ref in numbers.like(port[own]) if reference.learned(ref)]
    if any(ref in wanted and not _in_place(port[own], reference[ref]) for ref in alike):
        return _ordered_otherwise(port, reference, point, own, wanted, numbers)
    alike = [ref for ref in alike if ref not in wanted]
    if alike:
        return Divergence(probe=point, kind=Kind.ELSEWHERE, instead=tuple(_reference_steps(reference, alike)))
    return Region(port, reference, numbers, {own: wanted}, Values(port)).divergence(point)


def _ordered_otherwise(
    port: Tape, reference: Tape, point: str, own: Ref, wanted: Sequence[Ref], index: TensorIndex
) -> Divergence:
    """Return that a value has the reference's numbers in another order, with the step that puts them so."""
    maker = port.maker(own)
    if maker is None:
        return Divergence(probe=point, kind=Kind.ORDER)
    origin = Region(port, reference, index, {own: wanted}, Values(port)).origin(maker)
    return Divergence(
        probe=point,
        kind=Kind.ORDER,
        line=line_of(origin),
        code=_code(origin),
        callers=tuple(map(from_here, origin.lines[1:])),
        reader=line_of(maker),
    )


def _in_place(value: Tensor, other: Tensor) -> bool:
    """Whether two tensors with the same numbers have them at the same places, but for a little."""
    if value.shape != other.shape:
        return False
    apart = (value.double() - other.double()).nan_to_num().abs().max()
    return bool(apart <= ROUNDED * other.double().nan_to_num().abs().max())


class Region:
    """The steps of the port that lead to some values and whose results do not occur in the reference.

    Args:
        port, reference: the two tapes.
        index: the computed tensors of the reference.
        goals: the values, on the port's tape, and their counterparts on the reference's.
        values: the port's values, some of which may have been replaced.
        like: the reference's tensors with the numbers of a tensor of the port, as far as already searched.

    Attributes:
        lost: the tensors on the way to the goals that do not occur in the reference.
    """

    def __init__(
        self,
        port: Tape,
        reference: Tape,
        index: TensorIndex,
        goals: Mapping[Ref, Sequence[Ref]],
        values: Values,
        like: Mapping[Ref, list[Ref]] | None = None,
    ) -> None:
        self._port, self._reference, self._index = port, reference, index
        self._goals, self._values = goals, values
        self._like = dict(like or {})
        self.lost = self._unknown_before_goals() - self._used_for_known()

    def with_values(self, values: Values) -> Region:
        """Return the same steps with some values replaced."""
        known = {ref: like for ref, like in self._like.items() if values[ref] is self._values[ref]}
        return Region(self._port, self._reference, self._index, self._goals, values, known)

    def steps(self, passed: Collection[Ref] = ()) -> Iterator[Call]:
        """Yield the steps that read only known tensors and whose result is not known, in order.

        Args:
            passed: tensors that count as known.
        """
        lost = self.lost.difference(passed)
        makers = {call.number: call for ref in lost if (call := self._port.maker(ref))}
        calls = [call for _, call in sorted(makers.items())]
        for call in sorted(calls, key=lambda call: call.name in MOVING):  # a step that only moves numbers last
            learned = [ref for ref in call.reads if self._port.learned(ref)]
            if learned and not any(ref in lost for ref in learned):
                yield call

    def divergence(self, point: str) -> Divergence | None:
        """Return the first such step as a divergence."""
        found = next(self.steps(), None)
        if found is None:
            return None
        call = self.origin(found)
        counterparts = [
            counterpart for ref in call.reads if self._port.learned(ref) for counterpart in self.counterparts_of(ref)
        ]
        behind = self._left_out_behind(call)
        place = behind or call
        return Divergence(
            probe=point,
            kind=Kind.STEP,
            step=Step(operation=self._operation(call), module=call.module),
            line=line_of(place),
            code=_code(place),
            callers=tuple(map(from_here, place.lines[1:])),
            also=self._unknown_operand(call),
            moved=self._moved(call),
            instead=tuple(_reference_steps(self._reference, counterparts)),
            behind="" if behind is None else behind.name.strip("_"),
            reader=line_of(found),
        )

    def origin(self, call: Call) -> Call:
        """Return the step that made an operand that the reference does not have in this way; else the step itself.

        A norm takes a factor out again and a sum over all pairs does not see their order, so that what is computed
        from a wrong tensor may be right until another step reads it.
        """
        return next((one for ref in call.reads if (one := self._at_fault(ref)) is not None), call)

    def _at_fault(self, ref: Ref) -> Call | None:
        """Return the first step that computes an operand that is amiss; None where it is only rearranged."""
        maker = self._port.maker(ref)
        if maker is None or not self._is_amiss(ref):
            return None
        before = next((one for read in maker.reads if (one := self._at_fault(read)) is not None), None)
        return before if before is not None or maker.name in MOVING else maker

    def _is_amiss(self, ref: Ref) -> bool:
        """Return whether the reference lacks a tensor that is computed, or has it with its numbers at other places."""
        if self._port.maker(ref) is None or is_moved_weight(self._port, ref) or moments(self._values[ref]) is None:
            return False
        if not self._known(ref):
            users = list(_used_by(self._port, ref))  # a product with itself is a square
            readers = {"square" if user.reads[1:] == user.reads[:1] else user.name.strip("_") for user in users}
            return self._is_float(ref) and self._port.learned(ref) and not NORMING.isdisjoint(readers)
        value = self._values[ref]
        alike = [self._reference[known] for known in self._like[ref]]
        return any(one.shape == value.shape for one in alike) and not self._in_order(ref)

    def _left_out_behind(self, call: Call) -> Call | None:
        """Return the step behind which one of the reference is left out: what gave the operand that this step reads.

        The reference's step of the same function reads what another step makes of that operand.
        """
        operation = call.name.strip("_")
        for ref in call.reads:
            maker = self._port.maker(self._port.past(ref, MOVING)[-1])
            if maker is None or not self._port.learned(ref) or not self._known(ref):
                continue
            for known in self._like[ref]:
                users = list(_used_by(self._reference, known))
                if not users or any(user.name.strip("_") == operation for user in users):
                    continue
                behind = [one for user in users for write in user.writes for one in _used_by(self._reference, write)]
                if any(one.name.strip("_") == operation for one in behind):
                    return maker
        return None

    def _operation(self, call: Call) -> str:
        """Return the function's name; ``softmax`` for the calls that make scores visible before it."""
        makers = [self._port.maker(ref) for ref in call.reads]
        shown = call.name in ("sub", "__sub__") and any(maker and maker.name == "amax" for maker in makers)
        return "softmax" if shown else call.name.strip("_")

    def _unknown_before_goals(self) -> set[Ref]:
        """Return the tensors that the goals are computed from, back to known ones."""
        seen = {ref for ref, wanted in self._goals.items() if not self._is_goal_met(ref, wanted)}
        waiting = list(seen)
        while waiting:
            call = self._port.maker(waiting.pop())
            for ref in call.reads if call else ():
                computed = self._port.maker(ref) is not None and not is_moved_weight(self._port, ref)
                if ref not in seen and computed and not self._known(ref):
                    seen.add(ref)
                    waiting.append(ref)
        return seen

    def _used_for_known(self) -> set[Ref]:
        """Return the tensors from which known tensors are computed, which are right even if unknown.

        A comparison that gives what it should, such as where scores are infinite, says little of the floats it reads.
        """
        found: set[Ref] = set()
        for call in reversed(self._port.calls):
            known = [ref for ref in call.writes if call.name not in MOVING and self._known(ref)]
            if call.name in REDUCING or not (known or any(ref in found for ref in call.writes)):
                continue
            proven = any(ref in found for ref in call.writes) or any(map(self._is_float, known))
            found.update(ref for ref in call.reads if proven or not self._is_float(ref))
        return found

    def _is_float(self, ref: Ref) -> bool:
        return self._values[ref].is_floating_point()

    def _is_goal_met(self, ref: Ref, wanted: Sequence[Ref]) -> bool:
        """Return whether a goal has its counterpart's numbers; with several counterparts, any known numbers."""
        return self._known(ref) and (len(wanted) != 1 or wanted[0] in self._like[ref])

    def _known(self, ref: Ref) -> bool:
        if ref not in self._like:
            self._like[ref] = self._index.like(self._values[ref])
        return bool(self._like[ref])

    def counterparts_of(self, ref: Ref) -> Iterator[Ref]:
        """Yield the reference's tensors with the numbers of a tensor, or of what it was rearranged from."""
        call = self._port.maker(ref)
        if ref in self._port.weights:
            return
        if self._known(ref):
            yield from (
                counterpart for counterpart in self._like[ref] if not is_moved_weight(self._reference, counterpart)
            )
        elif call is not None and call.name in MOVING:
            for read in call.reads:
                yield from self.counterparts_of(read)

    def _moved(self, call: Call) -> Moved | None:
        """Return an operand with the numbers of a tensor of the reference in another order or shape."""
        for ref in call.reads:
            shape = tuple(self._values[ref].shape)
            if not self._port.learned(ref) or ref in self._port.weights or self._in_order(ref) is not False:
                continue
            shapes = [tuple(self._reference[counterpart].shape) for counterpart in self._like[ref]]
            expected = min(shapes, key=lambda other_shape: (other_shape != shape, len(other_shape) != len(shape)))
            step = self.reordering_step(ref)
            position = {"line": line_of(step), "code": _code(step)} if step else {}
            return Moved(shape=shape, expected=expected, **position)
        return None

    def _in_order(self, ref: Ref) -> bool | None:
        """Return whether the reference has the tensor itself; None where it does not even have its numbers."""
        value = self._values[ref]
        candidates = [self._reference[known] for known in self._like.get(ref, ())]
        if not candidates:
            return None
        same_shape = (candidate for candidate in candidates if candidate.shape == value.shape)
        return any(is_close(candidate, value, self._index.close) for candidate in same_shape)

    def reordering_step(self, ref: Ref) -> Call | None:
        """Return the call that rearranged the numbers of a known tensor."""
        call = self._port.maker(ref)
        if call is None or call.name not in MOVING or not call.reads:
            return None
        before = max(call.reads, key=lambda one: self._values[one].numel()) if call.name == "cat" else call.reads[0]
        self._known(before)
        in_order = self._in_order(before)
        return call if in_order or in_order is None else self.reordering_step(before)

    def _unknown_operand(self, call: Call) -> str:
        """Return the line that makes an unknown operand without weights, such as a mask; empty where there is none."""
        for ref in call.reads:
            made = self._port.maker(ref)
            if ref in self.lost and made is not None and not self._port.learned(ref):
                return line_of(self._earliest(made))
        return ""

    def _earliest(self, call: Call) -> Call:
        """Return the first call on the way to a tensor without weights that the reference does not have."""
        earlier = [
            made
            for ref in call.reads
            if ref in self.lost and not self._port.learned(ref) and (made := self._port.maker(ref)) is not None
        ]
        return min((self._earliest(maker) for maker in earlier), key=lambda maker: maker.number, default=call)


def _reference_steps(reference: Tape, known: Sequence[Ref]) -> Iterator[Step]:
    """Yield the steps that the reference makes with some tensors, each once, past calls that only rearrange them."""
    seen: set[tuple[str, str]] = set()
    pending, followed = list(dict.fromkeys(known)), set(known)
    while pending:
        for call in reference.users(pending.pop(0)):
            if call.name in MOVING:
                moved = [ref for ref in call.writes if ref not in followed]
                followed.update(moved)
                pending += moved
            elif (
                call.writes
                and call.name not in UNREMARKABLE
                and (key := (call.name.strip("_"), call.module)) not in seen
            ):
                seen.add(key)
                yield Step(operation=key[0], module=key[1])


def _used_by(tape: Tape, ref: Ref) -> Iterator[Call]:
    """Yield the calls that compute something from a tensor, past calls that only rearrange it."""
    for call in tape.users(ref):
        if call.name in MOVING:
            for write in call.writes:
                yield from _used_by(tape, write)
        else:
            yield call


def is_moved_weight(tape: Tape, ref: Ref) -> bool:
    """Return whether a tensor is a weight, or a rearranged one."""
    call = tape.maker(ref)
    return ref in tape.weights or (
        call is not None and call.name in MOVING and all(is_moved_weight(tape, read) for read in call.reads)
    )


def line_of(call: Call) -> str:
    """Return the ``file:line`` of the user's code that made a call; empty where it was not recorded."""
    return from_here(call.lines[0]) if call.lines else ""


def _code(call: Call) -> str:
    file, _, number = call.lines[0].rpartition(":") if call.lines else ("", "", "")
    return linecache.getline(file, int(number)).strip() if number else ""
