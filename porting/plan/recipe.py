"""How one tensor comes about from others: what a step does, in either direction, a tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch

from porting.ops import NOTHING, Arithmetic, Content
from porting.plan.align import Step
from porting.plan.copies import Copy, grouped, whole, window
from porting.plan.formulas import Applied, Layout


class Described(Protocol):
    """The description of a tensor before it is read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that nothing holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Tensors(Protocol):
    """Descriptions of tensors by their names."""

    def __getitem__(self, name: str, /) -> Described:
        """The description of one tensor."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one tensor comes about; :func:`porting.plan.move.compute` computes any part of it.

    Its elements are gathered in ``work`` (every source is cast to that as it is read), computed in a wider dtype where
    there is something to compute, rounded to ``work``, and then cast to ``dtype``.

    Attributes:
        copies: the moves that bring its elements; disjoint boxes of it, except in a sum.
        arithmetic: what is computed of the elements that moves bring, and of no others.
        fill: the value of elements that no move writes.
        content: what it holds throughout, when it is read from nowhere.
        equals: the target tensor that it is a copy of, as [make] says; empty for none.
        base: the tensor whose elements stand where no move writes, as it was before; empty for none.
        blanks: moves whose targets become zero after ``base`` was copied.
        applied: the formula that gives its elements; the moves then fill the buffers of that.
    """

    name: str
    shape: tuple[int, ...]
    work: torch.dtype
    dtype: torch.dtype
    copies: tuple[Copy, ...] = ()
    arithmetic: Arithmetic = NOTHING
    fill: float | None = None
    content: Content | None = None
    equals: str = ""
    base: str = ""
    blanks: tuple[Copy, ...] = ()
    applied: Applied | None = None

    @property
    def made_as(self) -> str:
        """The content that [make] gives: a word, a number, or the name of the tensor that it equals."""
        return self.equals or str(self.content)

    @property
    def numel(self) -> int:
        """How many elements the tensor has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes, in the last dtype."""
        return self.numel * self.dtype.itemsize

    @property
    def sources(self) -> tuple[str, ...]:
        """The tensors that it is made of, each once."""
        return tuple(dict.fromkeys(copy.source for copy in self.copies))

    @cached_property
    def covered(self) -> bool:
        """Whether its moves write all of it."""
        if self.applied is not None:
            return True
        return self.arithmetic.sum is not None or sum(copy.numel for copy in self.copies) == self.numel

    def in_dtype(self, dtype: torch.dtype) -> Recipe:
        """The same tensor, gathered and left in another dtype."""
        return replace(self, work=dtype, dtype=dtype)

    def origin(self, position: int) -> tuple[str, int] | None:
        """The first tensor, and the place in it, that the element at ``position`` is read from; None for a fill."""
        if self.applied is not None:  # of several elements; the first source, as a whole, stands for them
            return (self.copies[0].source, 0) if self.copies else None
        for copy in self.copies:
            for part in window(copy, position, position + 1):
                return part.source, part.source_offset
        return None


def as_it_is(name: str, described: Described) -> Recipe:
    """The recipe of a tensor that is itself."""
    copy = whole(name, name, math.prod(described.shape))
    return Recipe(name=name, shape=tuple(described.shape), work=described.dtype, dtype=described.dtype, copies=(copy,))


def forward_recipes(
    step: Step,
    sources: Tensors,
    targets: Tensors,
    arithmetic: Arithmetic,
    dtype: torch.dtype | None = None,
) -> Iterator[Recipe]:
    """The recipes of a step's targets.

    Args:
        dtype: what floating-point sources are cast to as they are read; None keeps theirs.
    """
    copies = grouped(step.copies, "target")
    if step.layout is not None:
        (name,) = step.targets
        work = cast_to(made_dtype(step, sources), dtype)
        yield Recipe(
            name=name,
            shape=tuple(targets[name].shape),
            work=work,
            dtype=work,
            copies=step.copies,
            arithmetic=arithmetic,
            applied=step.layout.forward(step.rule, arithmetic.numbers, work, lambda name: sources[name].dtype),
        )
        return
    for name in step.targets:
        work = cast_to(sources[copies[name][0].source].dtype, dtype)
        yield Recipe(
            name=name,
            shape=tuple(targets[name].shape),
            work=work,
            dtype=work,
            copies=copies[name],
            arithmetic=arithmetic,
            fill=step.rule.fill,
        )


def backward_recipes(
    step: Step,
    sources: Tensors,
    targets: Tensors,
    arithmetic: Arithmetic,
    dtype: torch.dtype | None = None,
    kept: Collection[str] = (),
) -> Iterator[Recipe]:
    """The recipes of a step's sources from its targets: :func:`forward_recipes`, undone.

    Args:
        dtype: what floating-point tensors are cast to, last of all; None keeps the targets' dtype.
        kept: sources whose elements are known as they were: they stand where the targets hold nothing, and before the
            rule's ``fill``.
    """
    if step.layout is not None:
        yield from _backward_by_formula(step, step.layout, sources, targets, arithmetic, dtype)
        return
    copies = grouped(step.copies, "source")
    for number, name in enumerate(step.sources):
        back = tuple(copy.inverse for copy in copies[name])
        returned = arithmetic.returns_to(number)
        work = targets[back[0].source].dtype
        recipe = Recipe(
            name=name,
            shape=tuple(sources[name].shape),
            work=work,
            dtype=cast_to(work, dtype),
            copies=back if returned else (),
            arithmetic=arithmetic.inverse if returned else NOTHING,
            fill=step.rule.fill if returned else 0.0,
        )
        if name in kept and not recipe.covered:
            recipe = replace(recipe, base=name, fill=None, blanks=() if returned else back)
        yield recipe


def _backward_by_formula(
    step: Step,
    layout: Layout,
    sources: Tensors,
    targets: Tensors,
    arithmetic: Arithmetic,
    dtype: torch.dtype | None,
) -> Iterator[Recipe]:
    """The recipes of the sources of a formula; one that ``back`` does not give has nothing that brings its elements."""
    work = targets[step.targets[0]].dtype
    for name in step.sources:
        applied = layout.backward(step.rule, name, arithmetic.numbers, work)
        yield Recipe(
            name=name,
            shape=tuple(sources[name].shape),
            work=work,
            dtype=cast_to(work, dtype),
            copies=() if applied is None else applied.operands[0].copies,
            arithmetic=NOTHING if applied is None else arithmetic.inverse,
            applied=applied,
        )


def made_dtype(step: Step, sources: Tensors) -> torch.dtype:
    """The dtype of a step's targets before any cast: the first source's; if that is quantised, what the rule says."""
    first = sources[step.sources[0]].dtype
    if step.rule.dtype and (first.itemsize == 1 or not first.is_floating_point):
        found: torch.dtype = getattr(torch, step.rule.dtype)
        return found
    return first


def cast_to(dtype: torch.dtype, to: torch.dtype | None) -> torch.dtype:
    """The dtype after a cast of floating-point tensors."""
    return to if to is not None and dtype.is_floating_point else dtype


def unravel(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The coordinates of a place in row-major order.

    >>> unravel(7, (2, 5))
    (1, 2)
    """
    return tuple(map(int, torch.unravel_index(torch.tensor(position), tuple(shape))))
