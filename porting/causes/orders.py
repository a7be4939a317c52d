"""Axes in another order: reversed, shifted, or in each other's place, whatever the tensor is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from porting.causes.cause import Cause, after, given_instead, other
from porting.causes.functions import CASTING
from porting.causes.general import named, plain, spelled
from porting.causes.model_parts import Anatomy
from porting.causes.replay import Alteration, Rewrite
from porting.causes.tape import Call, Ref, Tape


@dataclass(frozen=True, kw_only=True)
class Reordered(Cause):
    """A tensor along one axis in another order."""

    order: Callable[[Tensor, int], Tensor]
    says: str

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each tensor that a call gives, and each input, along each of its axes."""
        tape = anatomy.tape
        for call in tape.calls:
            if len(call.writes) == 1 and tape.learned(call.result) and call.name not in CASTING:
                for axis in range(tape[call.result].ndim):
                    if tape[call.result].shape[axis] > 1:
                        yield other(call, after(self._along(axis)), self._detail(call, axis, tape))
            for ref in dict.fromkeys(call.reads):
                if tape.maker(ref) is None and tape[ref].ndim:
                    for axis in range(tape[ref].ndim):
                        if tape[ref].shape[axis] > 1:
                            what = named(tape, ref) if ref in tape.weights else f"an input of {plain(call.name)}"
                            detail = f"axis {axis} of {what} in {spelled(call.module)}"
                            yield other(call, self._given(ref, axis), f"{detail} {self.says}")

    def _along(self, axis: int) -> Callable[[Tensor], Tensor]:
        return lambda value: self.order(value, axis)

    def _detail(self, call: Call, axis: int, tape: Tape) -> str:
        return f"axis {axis} of what {plain(call.name)} in {spelled(call.module)} gives {self.says}"

    def _given(self, ref: Ref, axis: int) -> Rewrite:
        return lambda values, call: given_instead(values, call, ref, self.order(values[ref], axis))


class AxesExchanged(Cause):
    """Two axes of one extent in each other's place."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each tensor that a call gives, and each weight that it reads."""
        tape = anatomy.tape
        for call in tape.calls:
            if len(call.writes) != 1 or not tape.learned(call.result) or call.name in CASTING:
                continue
            for one, two in _alike(tape[call.result]):
                detail = f"axes {one} and {two} of what {plain(call.name)} in {spelled(call.module)} gives"
                yield other(call, after(partial(torch.transpose, dim0=one, dim1=two)), detail)
            for ref in dict.fromkeys(call.reads):
                for one, two in _alike(tape[ref]):
                    detail = f"axes {one} and {two} of {named(tape, ref)}"
                    yield other(call, self._given(ref, one, two), detail)

    @staticmethod
    def _given(ref: Ref, one: int, two: int) -> Rewrite:
        return lambda values, call: given_instead(values, call, ref, values[ref].transpose(one, two))


def _alike(value: Tensor) -> Iterator[tuple[int, int]]:
    for one in range(value.ndim):
        for two in range(one + 1, value.ndim):
            if value.shape[one] == value.shape[two] > 1:
                yield one, two


def flipped(value: Tensor, axis: int) -> Tensor:
    """From the last to the first."""
    return value.flip(axis)


def rolled(value: Tensor, axis: int) -> Tensor:
    """By one, so that the first is the last one's."""
    return value.roll(1, axis)


def rolled_back(value: Tensor, axis: int) -> Tensor:
    """By one, the other way."""
    return value.roll(-1, axis)


def _order(name: str, order: Callable[[Tensor, int], Tensor], says: str) -> Reordered:
    return Reordered(
        name=name,
        what=f"a tensor {says} along one axis, where the reference's is not",
        looks="every shape fits",
        fix="see which axis it is, and what puts it into this order: flip, roll, a slice, an order in the table",
        order=order,
        says=says,
        general=True,
    )


CAUSES: tuple[Cause, ...] = (
    _order("reversed order", flipped, "is reversed"),
    _order("shifted by one", rolled, "is shifted by one"),
    _order("shifted back by one", rolled_back, "is shifted back by one"),
    AxesExchanged(
        name="axes exchanged",
        what="two axes of the same extent are in each other's place",
        looks="every shape fits",
        fix="see the transpose before or behind it",
        general=True,
    ),
)
