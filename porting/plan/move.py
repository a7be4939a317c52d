"""Carrying moves out on tensors: a view where the layout allows it, else one copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from porting.plan.align import Step
from porting.plan.copies import Copy

Read = Callable[[str], Tensor]


class Described(Protocol):
    """What is known of a tensor before it is read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extents."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""


def forward(
    step: Step, targets: Mapping[str, Described], read: Read, scale: float | None
) -> Iterator[tuple[str, Tensor]]:
    """The target tensors of a step, in the source's dtype; views of what ``read`` gives where that is possible.

    Args:
        step: the step.
        targets: shapes of its targets.
        read: gives a source tensor.
        scale: what the elements are multiplied by, in float64; None for most steps.
    """
    by_target = _grouped(step.copies, lambda copy: copy.target)
    for name in step.targets:
        copies = by_target[name]
        if step.rule.fold:
            value = _sum(copies, targets[name].shape, read)
        else:
            value = gather(copies, targets[name].shape, read, step.rule.fill)
        yield name, value if scale is None else (value.double() * scale).to(value.dtype)


def backward(
    step: Step,
    sources: Mapping[str, Described],
    read: Read,
    scale: float | None,
    base: Read | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The source tensors of a step from its targets, in the targets' dtype: :func:`forward` read from right to left.

    In a fold the first source receives the sum and what the others added to it becomes zero.

    Args:
        step: the step.
        sources: shapes of its sources.
        read: gives a target tensor.
        scale: what :func:`forward` multiplied by: the elements are divided by it, in float64.
        base: gives a source tensor as it was, for the parts that the targets do not hold; without it these parts are
            the rule's ``fill``, and zero in the sources of a fold that are not the first.
    """
    by_source = _grouped(step.copies, lambda copy: copy.source)
    for number, name in enumerate(step.sources):
        shape = sources[name].shape
        if step.rule.fold and number > 0:
            yield name, _emptied(by_source[name], shape, read(step.targets[0]), base)
            continue
        value = gather([copy.inverse for copy in by_source[name]], shape, read, step.rule.fill, base)
        yield name, value if scale is None else (value.double() / scale).to(value.dtype)


def pullback(step: Step, source: str, shape: tuple[int, ...], read: Read, scale: float | None) -> Tensor:
    """The gradient of one of a step's sources from those of its targets, in float64: the transpose of :func:`forward`.

    A move is carried back, each term of a sum receives the gradient of the sum, what was multiplied is multiplied
    again, and what was broadcast is summed.  An element that no copy reads has none: zero.

    Args:
        step: the step.
        source, shape: one of its sources.
        read: gives the gradient of a target.
        scale: what :func:`forward` multiplies by.
    """
    result = torch.zeros(shape, dtype=torch.float64)
    for copy in step.copies:
        if copy.source != source:
            continue
        given = read(copy.target).to("cpu", torch.float64).contiguous()
        box = given.as_strided(copy.sizes, copy.target_strides, given.storage_offset() + copy.target_offset)
        broadcast = [place for place, stride in enumerate(copy.source_strides) if stride == 0]
        box = box.sum(broadcast) if broadcast else box
        kept = [(size, stride) for size, stride in zip(copy.sizes, copy.source_strides, strict=True) if stride]
        result.as_strided([one[0] for one in kept], [one[1] for one in kept], copy.source_offset).add_(box)
    return result if scale is None else result.mul_(scale)


def _grouped(copies: Iterable[Copy], name: Callable[[Copy], str]) -> dict[str, list[Copy]]:
    groups: dict[str, list[Copy]] = {}
    for copy in copies:
        groups.setdefault(name(copy), []).append(copy)
    return groups


def gather(
    copies: Sequence[Copy],
    shape: tuple[int, ...],
    read: Read,
    fill: float | None = None,
    base: Read | None = None,
) -> Tensor:
    """The tensor that these copies fill; a view when one copy fills all of it and its strides allow that.

    Args:
        copies: they fill disjoint boxes of the tensor.
        shape: the tensor's.
        read: gives the tensors that the copies read.
        fill, base: what stands where no copy writes, as in :func:`backward`; ``base`` goes first.

    Raises:
        ValueError: some elements are written by no copy, and neither fill nor base is given.
    """
    numel = math.prod(shape)
    if len(copies) == 1 and copies[0].numel == numel:
        return _box(copies[0], read(copies[0].source)).reshape(shape)
    first = read(copies[0].source)
    covered = sum(copy.numel for copy in copies)
    if covered == numel:
        result = torch.empty(shape, dtype=first.dtype, device=first.device)
    elif base is not None:
        result = _like(base(copies[0].target), first)
    elif fill is not None:
        result = torch.full(shape, fill, dtype=first.dtype, device=first.device)
    else:  # check() and export() refuse this with a fault before any tensor is read
        raise ValueError(f"{numel - covered} elements of {copies[0].target!r} have no counterpart and no fill")
    for copy in copies:
        _place(copy, result).copy_(_box(copy, read(copy.source)))
    return result


def _sum(copies: Sequence[Copy], shape: tuple[int, ...], read: Read) -> Tensor:
    first = read(copies[0].source)
    result = torch.zeros(shape, dtype=torch.float64, device=first.device)
    for copy in copies:
        _place(copy, result).add_(_box(copy, read(copy.source)))
    return result.to(first.dtype)  # one rounding, that of the result


def _emptied(copies: Sequence[Copy], shape: tuple[int, ...], example: Tensor, base: Read | None) -> Tensor:
    """A further source of a fold: zero where it was added, as it was everywhere else."""
    if base is None:
        return torch.zeros(shape, dtype=example.dtype, device=example.device)
    result = _like(base(copies[0].source), example)
    for copy in copies:
        _box(copy, result).zero_()
    return result


def _like(tensor: Tensor, example: Tensor) -> Tensor:
    """A contiguous copy that may be written to."""
    return tensor.to(example.device, example.dtype, copy=True, memory_format=torch.contiguous_format)


def _box(copy: Copy, tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor.as_strided(copy.sizes, copy.source_strides, tensor.storage_offset() + copy.source_offset)


def _place(copy: Copy, tensor: Tensor) -> Tensor:
    return tensor.as_strided(copy.sizes, copy.target_strides, copy.target_offset)
