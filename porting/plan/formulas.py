"""Formulas of rules, applied to tensors: what is read for which elements, and how they come about.

The elements of an operand are brought into a buffer that has an axis for each of its indices, the target's slowest
index first, by the same moves as everywhere.  So rows of the target need rows of the operands, and a tensor is computed
a few rows at a time; an operand without that index is read as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from porting.errors import Code, Fault
from porting.notation.rule import RESULT, Rule
from porting.ops import Formula
from porting.plan.copies import Copy, make_copy


@dataclass(frozen=True, slots=True)
class Operand:
    """A term of a formula.

    Attributes:
        name: what the formula calls it.
        indices, sizes: the axes of its buffer.
        copies: the moves that fill the buffer.
    """

    name: str
    indices: tuple[str, ...]
    sizes: tuple[int, ...]
    copies: tuple[Copy, ...]

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return math.prod(self.sizes)


HELD = 1 << 22
"""Elements of values that a formula holds at a time, if it can be computed a few rows at a time."""


@dataclass(frozen=True, kw_only=True)
class Applied:
    """A formula and the tensors that it computes one tensor of.

    Attributes:
        formula: the formula.
        operands: its terms.
        numbers: the fields of the config that it reads.
        sizes: the size of each index.
        result: the indices of the tensor, the slowest first.
        place: the move of the result, with an axis for each of its indices, into the tensor.
    """

    formula: Formula
    operands: tuple[Operand, ...]
    numbers: Mapping[str, float]
    sizes: Mapping[str, int]
    result: tuple[str, ...]
    place: Copy

    @property
    def row_index(self) -> str:
        """The index along which it can be computed in parts; empty when it cannot."""
        first = self.result[0] if self.result else ""
        held = any(first in operand.indices for operand in self.operands)
        return first if held and self.formula.kept(first) and self.place.contiguous else ""

    def compute(self, start: int, stop: int, read: Callable[[Copy, int, int], Iterator[tuple[Tensor, Copy]]]) -> Tensor:
        """The elements from ``start`` to ``stop`` of the tensor in row-major order, in float64.

        Args:
            start, stop: the elements.
            read: gives the parts of a move that land in a range of its target, counted from the range's beginning.
        """
        extents = [self.sizes[index] for index in self.result]
        row = math.prod(extents[1:])
        low, high = (start // row, -(-stop // row)) if self.row_index and row else (0, extents[0] if extents else 1)
        indices = {operand.name: operand.indices for operand in self.operands}
        step = high - low
        if self.row_index:
            step = max(HELD // max(self.formula.work(indices, {**self.sizes, self.row_index: 1}), 1), 1)
        parts = [self._rows(first, min(first + step, high), read) for first in range(low, high, max(step, 1))]
        found = parts[0] if len(parts) == 1 else torch.cat(parts or [torch.empty(0, dtype=torch.float64)])
        if not self.place.contiguous:
            whole = torch.empty(found.numel(), dtype=torch.float64)
            size, strides = self.place.sizes, self.place.source_strides
            _at(whole, size, self.place.target_strides, self.place.target_offset).copy_(
                _at(found.contiguous(), size, strides, self.place.source_offset)
            )
            found = whole
        shift = low * row if self.row_index else 0
        return found[start - shift : stop - shift]

    def _rows(self, low: int, high: int, read: Callable[[Copy, int, int], Iterator[tuple[Tensor, Copy]]]) -> Tensor:
        """The elements of rows, or all elements where it is not computed in parts."""
        operands = {operand.name: self._buffer(operand, low, high, read) for operand in self.operands}
        sizes = {**self.sizes, self.row_index: high - low} if self.row_index else self.sizes
        return self.formula.evaluate(operands, self.numbers, sizes, self.result, {self.row_index: low}).reshape(-1)

    def _buffer(
        self, operand: Operand, low: int, high: int, read: Callable[[Copy, int, int], Iterator[tuple[Tensor, Copy]]]
    ) -> tuple[Tensor, tuple[str, ...]]:
        sizes, first, last = list(operand.sizes), 0, operand.numel
        if self.row_index and self.row_index in operand.indices:
            row = math.prod(sizes[1:])
            first, last, sizes[0] = low * row, high * row, high - low
        buffer = torch.empty(last - first, dtype=torch.float64)
        for copy in operand.copies:
            for values, part in read(copy, first, last):
                _at(buffer, part.sizes, part.target_strides, part.target_offset).copy_(values)
        return buffer.view(sizes), operand.indices


def _at(tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + offset)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the tensors of a step lie in the buffers of its rule's formula, whatever is computed.

    Attributes:
        operands: those of the rule's sources.
        result: the target as an operand: its moves read the target.
        sizes: the size of each index.
    """

    operands: tuple[Operand, ...]
    result: Operand
    sizes: Mapping[str, int]

    def forward(self, rule: Rule, numbers: Mapping[str, float]) -> Applied:
        """How the target comes about."""
        if rule.formula is None:
            raise TypeError(f"{rule} has no formula")  # a bug of ours
        return Applied(
            formula=rule.formula,
            operands=self.operands,
            numbers=numbers,
            sizes=self.sizes,
            result=self.result.indices,
            place=self.result.copies[0].inverse,
        )

    def backward(self, rule: Rule, source: str, numbers: Mapping[str, float]) -> Applied | None:
        """How a source comes about from the target; None where the rule does not say or it is no single term."""
        number = next(n for n, one in enumerate(self.operands) if any(copy.source == source for copy in one.copies))
        operand = self.operands[number]
        formula = rule.back.get(operand.name)
        copies = [copy for copy in operand.copies if copy.source == source]
        if formula is None or len(operand.copies) > 1:
            return None
        # the target's buffer with the source's slowest index first, so that rows of one need rows of the other
        shared = [index for index in operand.indices if index in self.result.indices]
        order = (*shared, *(index for index in self.result.indices if index not in shared))
        given = reordered(self.result, RESULT, order)
        return Applied(
            formula=formula,
            operands=(given,),
            numbers=numbers,
            sizes=self.sizes,
            result=operand.indices,
            place=copies[0].inverse,
        )


def reordered(operand: Operand, name: str, order: Sequence[str]) -> Operand:
    """An operand with its axes in another order; it has one move, of all its elements."""
    extents = dict(zip(operand.indices, operand.sizes, strict=True))
    inner = strides_of([extents[index] for index in order])
    steps = dict(zip(order, inner, strict=True))
    (copy,) = operand.copies
    old = dict(zip(operand.indices, strides_of(operand.sizes), strict=True))
    theirs = {index: _stride_in_source(copy, old[index]) for index in order if extents[index] > 1}
    sizes = {index: extents[index] for index in order}
    made = make_copy(copy.source, copy.target, sizes, (copy.source_offset, theirs), (0, steps))
    return Operand(name, tuple(order), tuple(extents[index] for index in order), (made,))


def _stride_in_source(copy: Copy, stride: int) -> int:
    """What a step of so many elements in the buffer is in the tensor that a move reads."""
    for size, theirs, ours in zip(copy.sizes, copy.source_strides, copy.target_strides, strict=True):
        if ours <= stride < ours * size:
            return stride // ours * theirs
    raise ValueError(f"no direction of {copy} has the stride {stride}")  # a bug of ours: buffers are dense


def strides_of(sizes: Sequence[int]) -> list[int]:
    """The strides of a dense tensor in row-major order.

    >>> strides_of((2, 3, 4))
    [12, 4, 1]
    """
    found: list[int] = []
    step = 1
    for size in reversed(sizes):
        found.append(step)
        step *= size
    return found[::-1]


SEED = 1
"""Of the values with which a formula's way back is tried."""


def not_undone(rule: Rule, numbers: Mapping[str, float]) -> Fault | None:
    """The fault of a rule whose ``back`` does not lead to tensors that give the target again.

    It is tried on small random tensors: the target of what ``back`` makes of a target has to be that target.

    Args:
        rule: a rule with a formula and its ``back``.
        numbers: the fields of the config that they read.
    """
    if rule.formula is None or not rule.back:
        return None
    generator = torch.Generator().manual_seed(SEED)
    terms = [rule.indices_of(term) for term in rule.sources]
    target = rule.indices_of(rule.targets[0])
    every = dict.fromkeys(index for term in (*terms, target) for index in term)
    sizes = {index: 2 if index in rule.formula.pair_indices else 3 + place % 3 for place, index in enumerate(every)}
    values = {
        name: (torch.rand([sizes[index] for index in term], generator=generator, dtype=torch.float64) + 0.5, term)
        for name, term in zip(rule.operands, terms, strict=True)
    }
    once = rule.formula.evaluate(values, numbers, sizes, target)
    given = {RESULT: (once, target)}
    back = {
        name: (rule.back[name].evaluate(given, numbers, sizes, term), term)
        for name, term in zip(rule.operands, terms, strict=True)
    }
    twice = rule.formula.evaluate(back, numbers, sizes, target)
    if torch.allclose(once, twice, rtol=1e-9, atol=1e-9):
        return None
    off = (twice - once).abs().max().item()
    message = f"'{rule}': 'back' does not undo formula = {rule.formula.text!r}: the target comes out {off:.1e} off"
    hint = "give each source such that the formula makes the same target of them, or leave 'back' out"
    return Fault(code=Code.IRREVERSIBLE, where=rule.where, message=message, hint=hint)
