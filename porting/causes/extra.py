"""What a port does to a value of the reference once it is there: another order, a factor, one more function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from porting.causes.fitting import as_written
from porting.causes.functions import ACTIVATIONS

Turned = Callable[[Tensor], Tensor]
"""The reference's value -> what the port has there."""

ADDED = "a constant added"
"""The weakest entry: a bias that is left out or added twice is one, too."""

LONGEST = 4096
"""Along an axis that is longer no order is looked for."""


@dataclass(frozen=True, kw_only=True)
class Extra:
    """Something that is done to a value.

    Attributes:
        name, detail, what, fix: what is reported.
        turned: what it does.
    """

    name: str
    detail: str
    what: str
    fix: str
    turned: Turned


FUNCTIONS: Mapping[str, Turned] = {
    "softmax": lambda value: value.softmax(-1),
    "log_softmax": lambda value: value.log_softmax(-1),
    "normalize": lambda value: F.normalize(value, dim=-1),
    "a norm without gain": lambda value: F.layer_norm(value, value.shape[-1:]),
    "exp": torch.exp,
    "square": torch.square,
    **ACTIVATIONS,
}


def extras(value: Tensor, target: Tensor, close: Callable[[Tensor], bool]) -> Iterator[Extra]:
    """What turns a value into another one of its shape: the simplest first.

    Args:
        value: the reference's.
        target: the port's.
        close: whether a value is the port's but for rounding.
    """
    factor = _factor(value, target)
    if factor is not None:
        text, number = as_written(abs(factor), lambda number: close(value * (number if factor > 0 else -number)))
        number, text = (number, text) if factor > 0 else (-number, f"-{text}")
        yield Extra(
            name="scaled by a number",
            detail=f"it is multiplied by {text}",
            what="what the reference gives is multiplied by a number",
            fix="see what multiplies or divides it",
            turned=lambda value: value * number,
        )
    constant = _constant(value, target)
    if constant is not None:
        yield _added(constant)
    ends = _ends(value, target)
    if ends is not None:
        yield Extra(
            name="one more step",
            detail=f"a clamp between {ends[0]:.6g} and {ends[1]:.6g} of what the reference gives",
            what="what the reference gives is clamped",
            fix="give it on as it is",
            turned=lambda value: value.clamp(*ends),
        )
    for name, function in FUNCTIONS.items():
        yield Extra(
            name="one more step",
            detail=f"{name} of what the reference gives",
            what="a function is applied to what the reference gives as it is",
            fix="give it on as it is",
            turned=function,
        )
    for axis in range(value.ndim):
        order = _order(value, target, axis)
        if order is not None:
            yield _ordered(order, axis, value.ndim)


def _constant(value: Tensor, target: Tensor) -> Tensor | None:
    """What is added to every row of channels; None where it is not the same, or where there are few rows."""
    apart = (target - value).flatten(0, -2) if value.ndim > 1 else value[:0]
    if len(apart) < 3 or not bool(torch.isfinite(apart).all()):
        return None
    most = float(apart.abs().max())
    alike = float((apart - apart[0]).abs().max()) <= 1e-9 * float(value.abs().max())
    return apart.median(0).values if alike and most else None


def _added(constant: Tensor) -> Extra:
    size = float(constant.abs().max())
    places = (constant.abs() > 1e-6 * size).nonzero().flatten().tolist()
    shown = ", ".join(f"{float(constant[channel]):.4g} in channel {channel}" for channel in places[:3])
    more = f" and others in {len(places) - 3} more channels" if len(places) > 3 else ""
    return Extra(
        name=ADDED,
        detail=f"{shown}{more}",
        what="every row differs from the reference's by the same numbers, as if a bias were another one",
        fix="see the bias of this part: whether it is added, all of it and once",
        turned=lambda value: value + constant,
    )


def _ends(value: Tensor, target: Tensor) -> tuple[float, float] | None:
    """The least and the largest of the target, where it looks cut off there."""
    least, most = float(target.min()), float(target.max())
    cut = int((target == least).sum()) > 1 or int((target == most).sum()) > 1
    return (least, most) if cut and float(value.abs().max()) > max(-least, most) > 0 else None


def _factor(value: Tensor, target: Tensor) -> float | None:
    squares = float(value.square().sum())
    found = float((value * target).sum()) / squares if squares else 0.0
    return found if found and found != 1 else None


def _order(value: Tensor, target: Tensor, axis: int) -> Tensor | None:
    """Which place along an axis each of the target's comes from; None where they are not the value's, once each."""
    rows, others = (tensor.movedim(axis, 0).flatten(1) for tensor in (value, target))
    if not 1 < len(rows) <= LONGEST:
        return None
    order = torch.cdist(others, rows).argmin(1)
    moved = not torch.equal(order, torch.arange(len(rows)))
    return order if moved and len(torch.unique(order)) == len(rows) else None


def _ordered(order: Tensor, axis: int, axes: int) -> Extra:
    count = len(order)
    reverse = torch.equal(order, torch.arange(count).flip(0))
    said = "reversed" if reverse else f"in the order {order.tolist()}" if count <= 12 else "in another order"
    last = axis == axes - 1
    return Extra(
        name="labels in another order"
        if last and axes < 3
        else "channels in another order"
        if last
        else "another order",
        detail=f"the last axis is {said}" if last else f"axis {axis} is {said}",
        what="what the reference gives stands in another order along one axis",
        fix="see the order of the labels or channels: in the head's weights, in the table, or in what is returned",
        turned=lambda value: value.index_select(axis, order),
    )
