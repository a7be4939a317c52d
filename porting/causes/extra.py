"""Functions of the reference's value that give the port's value: a factor, a constant, another order, one more step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from porting.causes.fitting import as_written
from porting.causes.functions import ACTIVATIONS

ValueFunction = Callable[[Tensor], Tensor]
"""The reference's value -> the port's value."""

ADDED = "a constant added"
"""The least specific entry: a bias that is left out or added twice also adds a constant."""

MAX_PERMUTED = 4096
"""Longest axis along which another order is looked for."""


@dataclass(frozen=True, kw_only=True)
class Extra:
    """A step that turns the reference's value into the port's.

    Attributes:
        name, detail, what, fix: the texts of the report.
    """

    name: str
    detail: str
    what: str
    fix: str
    function: ValueFunction


FUNCTIONS: Mapping[str, ValueFunction] = {
    "softmax": lambda value: value.softmax(-1),
    "log_softmax": lambda value: value.log_softmax(-1),
    "normalize": lambda value: F.normalize(value, dim=-1),
    "a norm without gain": lambda value: F.layer_norm(value, value.shape[-1:]),
    "exp": torch.exp,
    "square": torch.square,
    **ACTIVATIONS,
}


def extras(value: Tensor, target: Tensor, close: Callable[[Tensor], bool]) -> Iterator[Extra]:
    """Yield the functions that may turn one value into another of the same shape, the simplest first.

    Args:
        value: the reference's value.
        target: the port's value.
        close: whether a tensor equals the port's value up to rounding.
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
            function=lambda value: value * number,
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
            function=lambda value: value.clamp(*ends),
        )
    for name, function in FUNCTIONS.items():
        yield Extra(
            name="one more step",
            detail=f"{name} of what the reference gives",
            what="a function is applied to what the reference gives as it is",
            fix="give it on as it is",
            function=function,
        )
    for axis in range(value.ndim):
        order = _order(value, target, axis)
        if order is not None:
            yield _ordered(order, axis, value.ndim)


def _constant(value: Tensor, target: Tensor) -> Tensor | None:
    """Return what is added to every row of channels; None where rows differ or are few."""
    difference = (target - value).flatten(0, -2) if value.ndim > 1 else value[:0]
    if len(difference) < 3 or not bool(torch.isfinite(difference).all()):
        return None
    largest = float(difference.abs().max())
    alike = float((difference - difference[0]).abs().max()) <= 1e-9 * float(value.abs().max())
    return difference.median(0).values if alike and largest else None


def _added(constant: Tensor) -> Extra:
    size = float(constant.abs().max())
    channels = (constant.abs() > 1e-6 * size).nonzero().flatten().tolist()
    shown = ", ".join(f"{float(constant[channel]):.4g} in channel {channel}" for channel in channels[:3])
    more = f" and others in {len(channels) - 3} more channels" if len(channels) > 3 else ""
    return Extra(
        name=ADDED,
        detail=f"{shown}{more}",
        what="every row differs from the reference's by the same numbers, as if a bias were another one",
        fix="see the bias of this part: whether it is added, all of it and once",
        function=lambda value: value + constant,
    )


def _ends(value: Tensor, target: Tensor) -> tuple[float, float] | None:
    """Return the least and the largest number of the target, where it looks clamped to them."""
    least, most = float(target.min()), float(target.max())
    clamped = int((target == least).sum()) > 1 or int((target == most).sum()) > 1
    return (least, most) if clamped and float(value.abs().max()) > max(-least, most) > 0 else None


def _factor(value: Tensor, target: Tensor) -> float | None:
    """Return the factor that fits best; None where it is 1."""
    squares = float(value.square().sum())
    factor = float((value * target).sum()) / squares if squares else 0.0
    return factor if factor and factor != 1 else None


def _order(value: Tensor, target: Tensor, axis: int) -> Tensor | None:
    """Return where each index along an axis of the target comes from; None where that is no permutation."""
    rows, target_rows = (tensor.movedim(axis, 0).flatten(1) for tensor in (value, target))
    if not 1 < len(rows) <= MAX_PERMUTED:
        return None
    order = torch.cdist(target_rows, rows).argmin(1)
    moved = not torch.equal(order, torch.arange(len(rows)))
    return order if moved and len(torch.unique(order)) == len(rows) else None


def _ordered(order: Tensor, axis: int, axes: int) -> Extra:
    count = len(order)
    reverse = torch.equal(order, torch.arange(count).flip(0))
    order_text = "reversed" if reverse else f"in the order {order.tolist()}" if count <= 12 else "in another order"
    last = axis == axes - 1
    return Extra(
        name="labels in another order"
        if last and axes < 3
        else "channels in another order"
        if last
        else "another order",
        detail=f"the last axis is {order_text}" if last else f"axis {axis} is {order_text}",
        what="what the reference gives stands in another order along one axis",
        fix="see the order of the labels or channels: in the head's weights, in the table, or in what is returned",
        function=lambda value: value.index_select(axis, order),
    )
