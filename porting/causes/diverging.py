"""The first step of the port whose result the reference does not have: found by values, whatever the two are made of.

Both passes are recorded.  A tensor of the port is *known* when the reference has a tensor with the same numbers, in
any layout; of a step that is given known tensors and gives one that is not, and of whose results none is known later
on, it is certain that the port leaves the reference there.  No entry of the catalogue is needed for that, and no probe
in between.
"""

from __future__ import annotations

import linecache
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from porting.causes.linear import linears
from porting.causes.replay import Values
from porting.causes.tape import Call, Ref, Tape
from porting.frames import from_here

MASKED = -5e3
"""Scores at or below are masked, by whatever number: they count alike."""

CLOSE = 1e-11
"""Two tensors have the same numbers when their moments differ by no more, relative to their size."""

MOVING = frozenset({
    "dropout", "view_as", "tensor_split", "view", "reshape", "transpose", "permute", "expand", "expand_as",
    "contiguous", "clone", "detach", "to", "float", "double", "type_as", "type", "unsqueeze", "squeeze", "flatten",
    "unflatten", "chunk", "split", "unbind", "select", "movedim", "swapaxes", "getitem", "narrow", "flip", "roll",
    "repeat", "repeat_interleave", "cat", "stack", "index_select", "__getitem__", "__get__", "t", "pad",
})  # fmt: skip
"""What moves numbers and computes none."""

SHOWING = frozenset({"amax", "sub", "dropout", "size", "dim"})
"""What is not worth a word of the reference's: steps that show scores, and that change nothing in eval mode."""

REDUCING = frozenset({
    "mean", "sum", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "std", "var", "var_mean", "std_mean",
    "norm", "topk", "logsumexp", "prod", "median",
})  # fmt: skip
"""What gives the same for many inputs: that its result is known says nothing of what it was given."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a pass.

    Attributes:
        operation: the torch function, ``"clamp"``.
        module: the path of the module that was running; ``""`` is the model itself.
    """

    operation: str
    module: str


class Kind(StrEnum):
    """How a value of the port stands to the reference's values."""

    STEP = "step"
    """A step gives what the reference does not have."""

    ORDER = "order"
    """The value has the right numbers in other places."""

    ELSEWHERE = "elsewhere"
    """The value is one that the reference has somewhere else."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A tensor with the numbers of one of the reference's, in another order or shape.

    Attributes:
        shape, expected: the shapes in the port and in the reference; equal where only the order is another.
        line, code: the step since which that is so; empty where it is not known.
    """

    shape: tuple[int, ...]
    expected: tuple[int, ...]
    line: str = ""
    code: str = ""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where the port leaves the reference.

    Attributes:
        probe: the port's point whose value is not the reference's.
        kind: how it differs.
        step: the step of the port; None unless the kind is ``STEP``.
        line: ``file:line`` of the user's code that does it.
        callers: the lines that called it, the innermost first.
        code: that line's text; empty where there is no such file.
        also: an operand of the step that is not computed from weights and that the reference does not have, such as a
            mask or positions, by the ``file:line`` that makes it; empty where there is none.
        moved: the step's input, where it has the reference's numbers in another order or shape.
        instead: what the reference does with the same numbers.
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


class Numbers:
    """The numbers of some tensors, to be recognised in any layout.

    Args:
        tape: their pass.
        weights: of its parameters and buffers, and not of what is computed.
    """

    def __init__(self, tape: Tape, *, weights: bool = False) -> None:
        refs = (ref for ref in map(Ref, range(len(tape.values))) if (ref in tape.weights) == weights)
        found = [(ref, vector) for ref in refs if (vector := moments(tape[ref])) is not None]
        for linear in () if weights else linears(tape):  # a port may add the bias by itself
            if linear.bias is not None:
                before = moments(tape[linear.call.result] - tape[linear.bias])
                found += [(linear.call.result, before)] if before is not None else []
        self._refs = [ref for ref, _ in found]
        self._moments = (
            torch.stack([vector for _, vector in found]) if found else torch.zeros(0, 7, dtype=torch.float64)
        )

    def like(self, value: Tensor) -> list[Ref]:
        """The tensors that have the numbers of this one."""
        wanted = moments(value)
        if wanted is None:
            return []
        size = wanted.abs().clamp_min(1e-300)
        size[:5] = size[:5].amax()  # means and extremes are compared relative to the largest of them
        size[5:] = 1.0
        near = ((self._moments - wanted).abs() <= CLOSE * size).all(1)
        return [self._refs[place] for place in near.nonzero().flatten().tolist()]


def moments(value: Tensor) -> Tensor | None:
    """Seven numbers that do not change when elements are moved, or are all repeated as often.

    Mean, root mean square, third moment, least and largest of what is not masked, the share of that, and whether
    the numbers are whole; None for a tensor of a single number, or of none, of which nothing can be told.
    """
    if value.layout != torch.strided or value.is_nested or value.numel() < 2 or value.is_complex():
        return None
    numbers = value.detach().double().flatten()
    kept = numbers[(numbers > MASKED) & torch.isfinite(numbers)]
    if not kept.numel() or bool((kept == kept[0]).all()):
        return None
    cube = kept.pow(3).mean()
    return torch.stack([
        kept.mean(),
        kept.square().mean().sqrt(),
        cube.sign() * cube.abs().pow(1 / 3),
        kept.min(),
        kept.max(),
        torch.tensor(kept.numel() / numbers.numel(), dtype=torch.float64),
        torch.tensor(float(not value.is_floating_point()), dtype=torch.float64),
    ])  # fmt: skip


def divergence(port: Tape, reference: Tape, point: str, own: Ref, wanted: Sequence[Ref]) -> Divergence | None:
    """Where the port leaves the reference on the way to a value.

    Args:
        port, reference: the two passes; the port's with lines, and with the reference's values at the probes before.
        point: the port's probe.
        own: its value on the port's tape.
        wanted: its counterparts on the reference's tape.

    Returns:
        The divergence, or None where no single step can be told.
    """
    numbers = Numbers(reference)
    alike = [ref for ref in numbers.like(port[own]) if reference.learned(ref)]
    if any(ref in wanted for ref in alike):
        return Divergence(probe=point, kind=Kind.ORDER)
    if alike:
        return Divergence(probe=point, kind=Kind.ELSEWHERE, instead=tuple(_instead(reference, alike)))
    return Region(port, reference, numbers, {own: wanted}, Values(port)).divergence(point)


class Region:
    """The steps behind some values whose results the reference does not have.

    Args:
        port, reference: the two passes.
        numbers: of the reference.
        goals: the values, on the port's tape, and what they are compared with on the reference's.
        values: the port's values, some of which may have been replaced.
        like: by value what the reference has with its numbers, where that is known.
    """

    def __init__(
        self,
        port: Tape,
        reference: Tape,
        numbers: Numbers,
        goals: Mapping[Ref, Sequence[Ref]],
        values: Values,
        like: Mapping[Ref, list[Ref]] | None = None,
    ) -> None:
        self._port, self._reference, self._numbers = port, reference, numbers
        self._goals, self._values = goals, values
        self._like = dict(like or {})
        self.lost = self._behind() - self._vouched()

    def with_values(self, values: Values) -> Region:
        """The same steps with other values in the places of some."""
        known = {ref: like for ref, like in self._like.items() if values[ref] is self._values[ref]}
        return Region(self._port, self._reference, self._numbers, self._goals, values, known)

    def steps(self, passed: Collection[Ref] = ()) -> Iterator[Call]:
        """The steps that are given what the reference has and give what it has not, in order.

        Args:
            passed: what counts as something that the reference has.
        """
        lost = self.lost.difference(passed)
        made = {call.number: call for ref in lost if (call := self._port.maker(ref))}
        calls = [call for _, call in sorted(made.items())]
        for call in sorted(calls, key=lambda call: call.name in MOVING):  # a step that only moves numbers last
            learned = [ref for ref in call.reads if self._port.learned(ref)]
            if learned and not any(ref in lost for ref in learned):
                yield call

    def divergence(self, point: str) -> Divergence | None:
        """That step, in a report's terms."""
        call = next(self.steps(), None)
        if call is None:
            return None
        known = [counterpart for ref in call.reads if self._port.learned(ref) for counterpart in self.through(ref)]
        return Divergence(
            probe=point,
            kind=Kind.STEP,
            step=Step(operation=self._operation(call), module=call.module),
            line=line_of(call),
            code=_code(call),
            callers=tuple(map(from_here, call.lines[1:])),
            also=self._unknown_operand(call),
            moved=self._moved(call),
            instead=tuple(_instead(self._reference, known)),
        )

    def _operation(self, call: Call) -> str:
        """The function's name; scores are shown, less their largest, on the way into a softmax."""
        makers = [self._port.maker(ref) for ref in call.reads]
        shown = call.name in ("sub", "__sub__") and any(maker and maker.name == "amax" for maker in makers)
        return "softmax" if shown else call.name.strip("_")

    def _behind(self) -> set[Ref]:
        """What the values are made of, back to what is known."""
        seen = {ref for ref, wanted in self._goals.items() if not self._reached(ref, wanted)}
        waiting = list(seen)
        while waiting:
            call = self._port.maker(waiting.pop())
            for ref in call.reads if call else ():
                made = self._port.maker(ref) is not None and not moves_weights(self._port, ref)
                if ref not in seen and made and not self._known(ref):
                    seen.add(ref)
                    waiting.append(ref)
        return seen

    def _vouched(self) -> set[Ref]:
        """What a known value is computed from: it is right, though the reference computes it in another way."""
        found: set[Ref] = set()
        for call in reversed(self._port.calls):
            known = call.name not in MOVING and any(self._known(ref) for ref in call.writes)
            if call.name not in REDUCING and (known or any(ref in found for ref in call.writes)):
                found.update(call.reads)
        return found

    def _reached(self, ref: Ref, wanted: Sequence[Ref]) -> bool:
        """Whether a goal has the numbers that it should have; of one that is put together of several, any."""
        return self._known(ref) and (len(wanted) != 1 or wanted[0] in self._like[ref])

    def _known(self, ref: Ref) -> bool:
        if ref not in self._like:
            self._like[ref] = self._numbers.like(self._values[ref])
        return bool(self._like[ref])

    def through(self, ref: Ref) -> Iterator[Ref]:
        """The reference's tensors with these numbers, or with those that they were moved from."""
        call = self._port.maker(ref)
        if ref in self._port.weights:
            return
        if self._known(ref):
            yield from (
                counterpart for counterpart in self._like[ref] if not moves_weights(self._reference, counterpart)
            )
        elif call is not None and call.name in MOVING:
            for read in call.reads:
                yield from self.through(read)

    def _moved(self, call: Call) -> Moved | None:
        """An operand that has the numbers of tensors of the reference, and is none of them."""
        for ref in call.reads:
            shape = tuple(self._values[ref].shape)
            if not self._port.learned(ref) or ref in self._port.weights or self._in_order(ref) is not False:
                continue
            theirs = [tuple(self._reference[counterpart].shape) for counterpart in self._like[ref]]
            expected = min(theirs, key=lambda other_shape: (other_shape != shape, len(other_shape) != len(shape)))
            since = self.turning(ref)
            where = {"line": line_of(since), "code": _code(since)} if since else {}
            return Moved(shape=shape, expected=expected, **where)
        return None

    def _in_order(self, ref: Ref) -> bool | None:
        """Whether the reference has a tensor, and not its numbers alone; None where it has not even these."""
        value = self._values[ref]
        alike = [self._reference[counterpart] for counterpart in self._like.get(ref, ())]
        if not alike:
            return None
        same = (value_like for value_like in alike if value_like.shape == value.shape)
        return any(torch.allclose(value_like.to(value.dtype), value, rtol=1e-9, atol=1e-9) for value_like in same)

    def turning(self, ref: Ref) -> Call | None:
        """The step that moved the numbers of a tensor that the reference has."""
        call = self._port.maker(ref)
        if call is None or call.name not in MOVING or not call.reads:
            return None
        before = call.reads[0]
        self._known(before)
        earlier = self._in_order(before)
        return call if earlier or earlier is None else self.turning(before)

    def _unknown_operand(self, call: Call) -> str:
        """Where an operand is made that holds no weights and that the reference does not have."""
        for ref in call.reads:
            made = self._port.maker(ref)
            if ref in self.lost and made is not None and not self._port.learned(ref):
                return line_of(self._earliest(made))
        return ""

    def _earliest(self, call: Call) -> Call:
        """The step that began what a tensor without weights is made of."""
        earlier = [
            made
            for ref in call.reads
            if ref in self.lost and not self._port.learned(ref) and (made := self._port.maker(ref)) is not None
        ]
        return min(
            (self._earliest(earlier_call) for earlier_call in earlier), key=lambda call: call.number, default=call
        )


def _instead(reference: Tape, known: Sequence[Ref]) -> Iterator[Step]:
    """The steps that the reference does with some tensors, each once; what only moves them is followed."""
    seen: set[tuple[str, str]] = set()
    waiting, followed = list(dict.fromkeys(known)), set(known)
    while waiting:
        for call in reference.users(waiting.pop(0)):
            if call.name in MOVING:
                more = [ref for ref in call.writes if ref not in followed]
                followed.update(more)
                waiting += more
            elif call.writes and call.name not in SHOWING and (key := (call.name.strip("_"), call.module)) not in seen:
                seen.add(key)
                yield Step(operation=key[0], module=key[1])


def moves_weights(tape: Tape, ref: Ref) -> bool:
    """Whether a tensor is a weight, or one that was moved."""
    call = tape.maker(ref)
    return ref in tape.weights or (
        call is not None and call.name in MOVING and all(moves_weights(tape, read) for read in call.reads)
    )


def line_of(call: Call) -> str:
    """``file:line`` of the user's code that made a call."""
    return from_here(call.lines[0]) if call.lines else ""


def _code(call: Call) -> str:
    file, _, number = call.lines[0].rpartition(":") if call.lines else ("", "", "")
    return linecache.getline(file, int(number)).strip() if number else ""
