"""Convolutions and pooling: stride, padding and dilation (Dumoulin and Visin 2016, sections 2 to 5).

A port may hold the reference's kernels and lay them over other places: with another stride, with zeros on other sides,
as TensorFlow pads, or with what is mirrored at the edge in place of zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from porting.causes.cause import Cause, alter, replace_with
from porting.causes.model_parts import ModelParts
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call, Ref, Tape

CONVOLUTIONS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
"""torch's convolutions, with the number of axes that a kernel is moved along."""

POOLS = {f"{kind}_pool{axes}d": axes for kind in ("max", "avg") for axes in (1, 2, 3)}
"""torch's pooling over windows, likewise."""

MODES = ("constant", "reflect", "replicate", "circular")
"""The values at padded places, as :func:`torch.nn.functional.pad` names them."""

Sides = tuple[tuple[int, int], ...]
"""How many places are added in front of and behind each axis, the first axis first."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The places to which a kernel or a window is applied, one number for each axis that it is moved along.

    Attributes:
        padding: places in front of and behind each axis.
        mode: one of :data:`MODES`.
    """

    stride: tuple[int, ...]
    padding: Sides
    dilation: tuple[int, ...]
    mode: str = "constant"

    def __str__(self) -> str:
        sides = self.padding if all(front == behind for front, behind in self.padding) else ()
        padding = f"padding {_once([front for front, _ in sides])}" if sides else f"padding {_once(self.padding)}"
        padding += f" ({self.mode})" if self.mode != "constant" else ""
        dilated = f", dilation {_once(self.dilation)}" if any(one != 1 for one in self.dilation) else ""
        return f"stride {_once(self.stride)}, {padding}{dilated}"


def _once(values: Sequence[object]) -> str:
    """The value of all axes, or those of each."""
    return str(values[0]) if len(set(values)) == 1 else f"({', '.join(map(str, values))})"


def _convolved_elsewhere(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each convolution with the usual other strides, paddings and dilations."""
    tape = model_parts.tape
    for call in model_parts.called(*CONVOLUTIONS):
        axes, weight = CONVOLUTIONS[call.name], call.argument(1, "weight")
        if not isinstance(weight, Ref):
            continue
        kernel, (source, own) = tuple(tape[weight].shape[2:]), _own(tape, call, axes)
        if own is None:
            continue
        sizes = tuple(tape[source].shape[-axes:])
        for other in dict.fromkeys(_others(own, kernel, sizes)):
            if other != own:
                yield alter(call, _convolved(source, other), f"{other} where the reference has {own}")


def _own(tape: Tape, call: Call, axes: int) -> tuple[Ref, Geometry | None]:
    """The input of a convolution before padding, and where its kernel is applied; None where that is not fixed."""
    source: Ref = call.argument(0, "input")
    stride, padding, dilation = (
        call.argument(place, name, default)
        for place, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    padding = 0 if padding == "valid" else padding
    if isinstance(padding, str):
        return source, None
    sides: Sides = tuple((one, one) for one in _each(padding, axes))
    mode, before = "constant", tape.maker(source)
    if before is not None and before.name == "pad" and not any(front for front, _ in sides):
        amounts, value = before.argument(1, "pad"), before.argument(3, "value")
        if isinstance(amounts, tuple | list) and len(amounts) <= 2 * axes and not value:
            pairs = [(int(front), int(behind)) for front, behind in zip(amounts[::2], amounts[1::2], strict=True)]
            sides = ((0, 0),) * (axes - len(pairs)) + tuple(reversed(pairs))
            mode, source = before.argument(2, "mode", "constant"), before.argument(0, "input")
    return source, Geometry(stride=_each(stride, axes), padding=sides, dilation=_each(dilation, axes), mode=mode)


def _each(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """One number for each axis, where one may stand for all."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values


def _others(own: Geometry, kernel: Sequence[int], sizes: Sequence[int]) -> Iterator[Geometry]:
    axes = len(kernel)
    for stride in (own.stride, (1,) * axes, (2,) * axes, tuple(kernel)):
        moved = replace(own, stride=stride)
        yield from (replace(moved, padding=one) for one in (own.padding, *_paddings(moved, kernel, sizes)))
    for dilation in ((1,) * axes, (2,) * axes):
        spread = replace(own, dilation=dilation)
        yield from (replace(spread, padding=one) for one in (own.padding, *_paddings(spread, kernel, sizes)))
    yield from (replace(own, mode=mode) for mode in MODES)


def _paddings(one: Geometry, kernel: Sequence[int], sizes: Sequence[int]) -> Iterator[Sides]:
    """None, half the kernel on both sides, what TensorFlow calls the same, and all of it in front, as for sound."""
    wide = [step * (size - 1) for step, size in zip(one.dilation, kernel, strict=True)]
    yield tuple((0, 0) for _ in wide)
    yield tuple((most // 2, most // 2) for most in wide)
    yield tuple((size // 2, size // 2) for size in kernel)
    missing = [
        max((-(-size // step) - 1) * step + most + 1 - size, 0)
        for size, step, most in zip(sizes, one.stride, wide, strict=True)
    ]
    yield tuple((most // 2, most - most // 2) for most in missing)
    yield tuple((most, 0) for most in wide)


def _convolved(source: Ref, other: Geometry) -> Rewrite:
    def rewrite(values: Values, call: Call) -> Tensor:
        padded, left = _padded(values[source], other)
        weight, bias, groups = (
            call.argument(place, name, default)
            for place, name, default in ((1, "weight", None), (2, "bias", None), (6, "groups", 1))
        )
        args: tuple[Any, ...] = (padded, weight, bias, other.stride, left, other.dilation, groups)
        result: Tensor = values.run(replace(call, args=args, kwargs={}))
        return result

    return rewrite


def _padded(value: Tensor, other: Geometry) -> tuple[Tensor, tuple[int, ...]]:
    """The value, padded where the operation cannot do that by itself, and what is left to the operation."""
    if other.mode == "constant" and all(front == behind for front, behind in other.padding):
        return value, tuple(front for front, _ in other.padding)
    amounts = [amount for sides in reversed(other.padding) for amount in sides]
    return F.pad(value, amounts, mode=other.mode), (0,) * len(other.padding)


def _pooled_nothing(model_parts: ModelParts) -> Iterator[Alteration]:
    for call in model_parts.called(*POOLS):
        yield alter(call, replace_with(call.argument(0, "input")), f"{call.name} is left out")


def _pooled_elsewhere(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each pooling with the usual other windows, strides and paddings, and of the other kind."""
    for call in model_parts.called(*POOLS):
        axes = POOLS[call.name]
        window = _each(call.argument(1, "kernel_size"), axes)
        stride = _each(call.argument(2, "stride") or window, axes)
        padding = _each(call.argument(3, "padding", 0), axes)
        own = (call.name, window, stride, padding)
        for other in product(
            (f"max_pool{axes}d", f"avg_pool{axes}d"),
            dict.fromkeys((window, (2,) * axes, (3,) * axes)),
            dict.fromkeys((stride, (1,) * axes, (2,) * axes)),
            dict.fromkeys((padding, (0,) * axes, (1,) * axes)),
        ):
            if other != own:
                yield alter(call, _pooled(*other), f"{_said(*other)} where the reference has {_said(*own)}")


def _said(name: str, window: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> str:
    return f"{name} with window {_once(window)}, stride {_once(stride)}, padding {_once(padding)}"


def _pooled(name: str, window: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Rewrite:
    def rewrite(values: Values, call: Call) -> Tensor:
        args = (call.argument(0, "input"), window, stride, padding)
        result: Tensor = values.run(replace(call, function=getattr(F, name), args=args, kwargs={}))
        return result

    return rewrite


def _never_transposed(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each transposition of what a convolution gives, with a reshape in its place."""
    tape = model_parts.tape
    for call in model_parts.called("transpose", "permute", "movedim"):
        source = call.argument(0, "input")
        maker = tape.maker(source) if isinstance(source, Ref) else None
        while maker is not None and maker.name in {"flatten", "reshape", "view"}:
            maker = tape.maker(maker.reads[0])
        if maker is not None and maker.name in CONVOLUTIONS:
            yield alter(call, _reshaped(source))


def _reshaped(source: Ref) -> Rewrite:
    return lambda values, call: values[source].reshape(values.run(call).shape)


CAUSES = (
    Cause(
        name="convolution stride, padding or dilation",
        what="a convolution lays the kernel over other places than the reference's",
        looks="another number of places behind it, or a difference that is largest at the edges",
        fix="take stride, padding, dilation and padding mode from the reference's module; TensorFlow pads more behind",
        alterations=_convolved_elsewhere,
    ),
    Cause(
        name="pooling missing",
        what="what the reference pools over windows goes on as it is",
        looks="behind it there are as many times more places as the window is wide",
        fix="add the pooling where the reference has it",
        alterations=_pooled_nothing,
    ),
    Cause(
        name="pooling window, stride or padding",
        what="windows are pooled that are larger or lie elsewhere, or the mean in place of the maximum",
        looks="another number of places behind it, or a difference that is largest at the edges",
        fix="take the kind of pooling, its window, stride and padding from the reference's module",
        alterations=_pooled_elsewhere,
    ),
    Cause(
        name="image reshaped to tokens without transposing",
        what="[b c h w] is reshaped to [b (h w) c] at once, so a token holds numbers of one channel at many places",
        looks="every token differs from there on",
        fix="x.flatten(2).transpose(1, 2)",
        alterations=_never_transposed,
    ),
)
