"""Numbers in the code that are not the reference's, wherever they stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from porting.causes.cause import Cause, after, dial, given_instead, other
from porting.causes.fitting import Dial
from porting.causes.functions import SCALING
from porting.causes.general import plain, spelled
from porting.causes.model_parts import Anatomy
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call, Ref

STEPS = ("linear", "conv2d", "addmm", "matmul", "__matmul__", "softmax", "layer_norm", "rms_norm", "embedding", "cat")
"""What computes something new."""

NUMBERED = (*SCALING, "pow", "__pow__", "__rpow__", "add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "clamp")


class Constants(Cause):
    """A number that is another one."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each whole exponent by each other one, and what is multiplied divided."""
        for call, place, number in _numbers(anatomy):
            if "pow" in call.name:
                for exponent in (one for one in (1.0, 2.0, 3.0, 4.0, 0.5, -0.5, -1.0) if one != number):
                    yield other(call, _with_number(place, exponent), self._detail(call, number, f"{exponent:g}"))
            elif number:
                yield other(call, _with_number(place, 1 / number), self._detail(call, number, f"1 / {number:.12g}"))
                yield other(call, _with_number(place, -number), self._detail(call, number, f"{-number:.12g}"))

    def dials(self, anatomy: Anatomy) -> Iterator[Dial]:
        """Each number by any other of its sign."""
        for call, place, number in _numbers(anatomy):
            if number and "pow" not in call.name:
                starts = tuple(abs(number) * 10 ** (step / 4) for step in range(-16, 17))
                detail = partial(self._detail, call, number)
                yield dial(call, partial(_signed, place, number), detail, starts)

    @staticmethod
    def _detail(call: Call, number: float, found: str) -> str:
        found = f"-{found}" if number < 0 and not found.startswith("-") else found
        return f"{plain(call.name)} in {spelled(call.module)} has {found} where the reference has {number:.12g}"


def _signed(place: int, number: float, found: float) -> Rewrite:
    return _with_number(place, -abs(found) if number < 0 else found)


def _numbers(anatomy: Anatomy) -> Iterator[tuple[Call, int, float]]:
    for call in anatomy.called(*NUMBERED):
        if anatomy.tape.learned(call.result):
            for place, one in enumerate(call.args):
                if isinstance(one, int | float) and not isinstance(one, bool):
                    yield call, place, float(one)


def _with_number(place: int, number: float) -> Rewrite:
    def rewrite(values: Values, call: Call) -> object:
        args = (*call.args[:place], number, *call.args[place + 1 :])
        return values.run(replace(call, args=args))

    return rewrite


class Rescaled(Cause):
    """What a step gives, by a factor."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """None: the factor is solved for."""
        del anatomy
        return iter(())

    def dials(self, anatomy: Anatomy) -> Iterator[Dial]:
        """Each step that computes something."""
        tape = anatomy.tape
        for call in tape.calls:
            if len(call.writes) == 1 and tape.learned(call.result) and call.name in STEPS:
                place = spelled(call.module).replace("{", "{{").replace("}", "}}")  # {i} for the layers' numbers
                detail = f"what {plain(call.name)} in {place} gives is multiplied by {{}}".format
                starts = tuple(10 ** (step / 3) for step in range(-9, 10))
                yield dial(call, _by, detail, starts)


def _by(factor: float) -> Rewrite:
    return after(lambda value: value * factor)


MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's pictures, by channel."""


class InputScaled(Cause):
    """Pictures or sound that are normalised again, or otherwise."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each input of floating-point numbers that a learned step reads, by what people do to pictures."""
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "(x - 0.5) / 0.5": lambda value: (value - 0.5) / 0.5,
            "0.5 x + 0.5": lambda value: 0.5 * value + 0.5,
            "x / 255": lambda value: value / 255,
            "255 x": lambda value: value * 255,
            "2 x": lambda value: value * 2,
            "1 - x": lambda value: 1 - value,
            "-x": torch.neg,
            "(x - mean) / deviation of ImageNet": lambda value: _by_channel(value, normal=True),
            "x * deviation + mean of ImageNet": lambda value: _by_channel(value, normal=False),
        }
        tape = anatomy.tape
        for call in tape.calls:
            for ref in call.reads:
                if tape.maker(ref) is None and not tape.learned(ref) and ref not in tape.weights:
                    for detail, way in ways.items() if tape[ref].is_floating_point() else ():
                        yield other(call, self._given(ref, way), detail)

    @staticmethod
    def _given(ref: Ref, way: Callable[[Tensor], Tensor]) -> Rewrite:
        return lambda values, call: given_instead(values, call, ref, way(values[ref]))


def _by_channel(value: Tensor, *, normal: bool) -> Tensor:
    if value.ndim < 3 or value.shape[-3] != len(MEAN):
        raise ValueError("no picture of three colours")
    mean, deviation = (torch.tensor(one, dtype=value.dtype)[:, None, None] for one in (MEAN, DEVIATION))
    return (value - mean) / deviation if normal else value * deviation + mean


CAUSES: tuple[Cause, ...] = (
    Constants(
        name="another constant",
        what="a number in the code is not the reference's",
        looks="differences of any size",
        fix="compare the number, digit by digit",
        general=True,
    ),
    InputScaled(
        name="input normalised otherwise",
        what="the numbers of a picture or a sound are scaled, where the reference takes them as they are",
        looks="everything differs from the first step on",
        fix="normalise once: in the preprocessing or in the model",
        general=True,
    ),
    Rescaled(
        name="scaled by a number",
        what="what a step gives is multiplied by a number that the reference does not have",
        looks="differences of any size",
        fix="see what multiplies or divides it",
        general=True,
    ),
)
