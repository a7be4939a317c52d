"""Looking for weights that are not numbers: the one check that needs the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from porting.errors import Code, Fault
from porting.limits import moving
from porting.plan.align import Step
from porting.plan.plan import Plan
from porting.plan.recipe import unravel

CHUNK = 1 << 20
"""Elements looked at together: what the scan needs beside the tensor is a few masks of this length."""

KINDS: dict[str, Callable[[Tensor], Tensor]] = {"NaN": torch.isnan, "+Inf": torch.isposinf, "-Inf": torch.isneginf}


def scan(
    plan: Plan, read: Callable[[str], Tensor], progress: Callable[[int, int], None] | None = None
) -> tuple[Fault, ...]:
    """Read every source tensor that is loaded, once, and look for NaN and infinities.

    Args:
        read: gives a source tensor; each is let go before the next is read.
        progress: called with the number of tensors that were read, and of all.

    Returns:
        A warning for each tensor that has such values: how many, and where the first of each kind is.
    """
    names = list(dict.fromkeys(name for step in plan.steps for name in step.sources))
    targets = {name: step.targets for step in plan.steps for name in step.sources}
    faults: list[Fault] = []
    for number, name in enumerate(names, 1):
        info = plan.sources[name]
        with moving(math.prod(info.shape) * info.dtype.itemsize):
            tensor = read(name)
            found = [f"{count} {kind} (the first at {first})" for kind, count, first in _odd(tensor)]
        if found:
            more = f" and {len(targets[name]) - 1} more" if len(targets[name]) > 1 else ""
            message = f"{name!r} {list(tensor.shape)} -> {targets[name][0]!r}{more}: {', '.join(found)}"
            hint = "the file is damaged or its training diverged: look for another copy"
            faults.append(Fault(code=Code.NOT_FINITE, where=name, message=message, hint=hint))
        if progress is not None:
            progress(number, len(names))
    return tuple(faults)


def not_finite(value: Tensor) -> int:
    """The number of elements that are NaN or infinite."""
    if not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return 0
    value = value if value.itemsize > 1 else value.float()  # torch finds no extremes in dtypes of 8 bits
    if value.is_floating_point() and all(map(math.isfinite, value.aminmax())):
        return 0  # nearly always so, and told without memory for each element
    return int((~value.isfinite()).sum())


def may_lose(step: Step, plan: Plan) -> bool:
    """Whether finite values of a step's sources may become infinite or NaN: it computes, or a cast narrows them."""
    if plan.arithmetic(step):
        return True
    return plan.dtype is not None and any(_narrowed(plan.sources[name].dtype, plan.dtype) for name in step.sources)


def _narrowed(stored: torch.dtype, read: torch.dtype) -> bool:
    """Whether a cast makes the range of floating-point numbers smaller."""
    return stored.is_floating_point and torch.finfo(read).max < torch.finfo(stored).max


def _odd(tensor: Tensor) -> Iterator[tuple[str, int, list[int]]]:
    """The kinds of values in a tensor that are not numbers, how many there are and the position of the first."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
    counts = dict.fromkeys(KINDS, 0)
    first: dict[str, int] = {}
    for start in range(0, flat.numel(), CHUNK):
        chunk = flat[start : start + CHUNK]
        chunk = chunk.float() if chunk.itemsize == 1 else chunk  # 8-bit floats have few operations of their own
        total = chunk.sum(dtype=torch.promote_types(chunk.dtype, torch.float32))
        if bool(torch.isfinite(total)):  # only finite values add up to one; much faster than a mask of each
            continue
        for kind, is_kind in KINDS.items():
            mask = is_kind(chunk)
            count = int(mask.sum())
            if count and kind not in first:
                first[kind] = start + int(mask.to(torch.uint8).argmax())
            counts[kind] += count
    parts = 2 if tensor.is_complex() else 1
    for kind, place in first.items():
        yield kind, counts[kind], list(unravel(place // parts, tensor.shape))
