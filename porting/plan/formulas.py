"""Formulas of rules, applied to tensors: what is read for which elements, and how they come about.

The elements of an operand are brought into a buffer that has an axis for each of its indices, those of the target first
and in its order, by the same moves as everywhere.  So rows of the target need rows of the operands, and a tensor is
computed a few rows at a time: along its slowest index, or along the next where one row is too much.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile

import torch
from torch import Tensor

from porting.errors import Code, Fault, PortingError
from porting.notation.rule import RESULT, Rule
from porting.ops import Formula, FormulaError, wide_dtype, widen
from porting.ops.exactness import wide_bytes
from porting.plan.copies import Copy, make_copy, row_major


@dataclass(frozen=True, slots=True)
class Operand:
    """A term of a formula.

    Attributes:
        indices, sizes: the axes of its buffer.
        copies: the moves that fill the buffer.
    """

    name: str
    indices: tuple[str, ...]
    sizes: tuple[int, ...]
    copies: tuple[Copy, ...]


@dataclass(frozen=True, kw_only=True)
class Applied:
    """A formula and the tensors that it computes one tensor of.

    Attributes:
        numbers: the fields of the config that it reads.
        result: the indices of the tensor, the slowest first.
        place: the move of the result, with an axis for each of its indices, into the tensor.
        dtypes: those of the tensors that the operands read, in the same order.
        dtype: that of the result.
        where: the place of the rule in its table.
    """

    formula: Formula
    operands: tuple[Operand, ...]
    numbers: Mapping[str, float]
    sizes: Mapping[str, int]
    result: tuple[str, ...]
    place: Copy
    dtypes: tuple[torch.dtype, ...]
    dtype: torch.dtype
    where: str = field(default="", compare=False, repr=False)

    @cached_property
    def wide(self) -> torch.dtype:
        """The dtype in which it is computed."""
        return wide_dtype(self.dtypes, self.dtype, whole=self.formula.is_whole(self.numbers))

    @cached_property
    def divisible(self) -> tuple[str, ...]:
        """The slowest indices of the tensor, along which it can be computed in parts."""
        kept = takewhile(self.formula.kept, self.result if self.place.contiguous else ())
        return tuple(kept)

    def nbytes(self, extents: Mapping[str, int]) -> int:
        """Bytes that are held while a part is computed, beside its place: buffers, and values on the way."""
        sizes = {**self.sizes, **extents}
        operands = {one.name: one.indices for one in self.operands}
        buffers = sum(math.prod(sizes[index] for index in one.indices) for one in self.operands)
        return wide_bytes(self.dtypes) * (buffers + self.formula.most_held(operands, sizes))

    def least(self, each: int) -> int:
        """Bytes that are held while the smallest part is computed; ``each`` of its elements takes so many beside."""
        row = math.prod(self.sizes[index] for index in self.result if index not in self.divisible)
        return self.nbytes(dict.fromkeys(self.divisible, 1)) + row * each

    def parts(self, most: int, each: int = 0) -> Iterator[tuple[int, int]]:
        """Divide the tensor into parts, each from one element to another in row-major order.

        Args:
            most: bytes that may be held for a part; where :meth:`least` is more, that is.
            each: bytes that each of its elements takes in its place.
        """
        numel = row = math.prod(self.sizes[index] for index in self.result)
        length, within, single = numel, numel, dict[str, int]()
        for index in self.divisible:
            extent, within = self.sizes[index], row
            row //= max(extent, 1)

            def fits(count: int, index: str = index, row: int = row) -> bool:
                return self.nbytes({**single, index: count}) + count * row * each <= most

            length = row * (bisect_left(range(2, extent + 1), True, key=lambda count: not fits(count)) + 1)
            single[index] = 1
            if length > row or fits(1):
                break
        for begin in range(0, numel, max(within, 1)):
            for start in range(begin, begin + within, max(length, 1)):
                yield start, min(start + length, begin + within)

    def compute(self, start: int, stop: int, read: Callable[[Copy, int, int], Iterator[tuple[Tensor, Copy]]]) -> Tensor:
        """The elements from ``start`` to ``stop`` of the tensor in row-major order, in the dtype of their computation.

        Args:
            read: gives the parts of a move that land in a range of its target, counted from the range's beginning.
        """
        first, row = 0, math.prod(self.sizes[index] for index in self.result)
        offsets: dict[str, int] = {}
        sizes = dict(self.sizes)
        for index in self.divisible if start < stop else ():
            row //= sizes[index]
            low, high = (start - first) // row, -((first - stop) // row)
            offsets[index], sizes[index], first = low, high - low, first + low * row
            if high > low + 1:
                break
        operands = {
            one.name: (self._buffer(one, dtype, offsets, sizes, read), one.indices)
            for one, dtype in zip(self.operands, self.dtypes, strict=True)
        }
        try:
            found = self.formula.evaluate(operands, self.numbers, sizes, self.result, offsets).reshape(-1)
        except FormulaError as error:
            raise FormulaFailedError(_failed(self.where, error)) from error
        if not self.place.contiguous:
            whole = torch.empty(found.numel(), dtype=found.dtype)
            size, strides = self.place.sizes, self.place.source_strides
            _at(whole, size, self.place.target_strides, self.place.target_offset).copy_(
                _at(found.contiguous(), size, strides, self.place.source_offset)
            )
            found = whole
        return found[start - first : stop - first]

    def _buffer(
        self,
        operand: Operand,
        dtype: torch.dtype,
        offsets: Mapping[str, int],
        sizes: Mapping[str, int],
        read: Callable[[Copy, int, int], Iterator[tuple[Tensor, Copy]]],
    ) -> Tensor:
        """Read what a part needs of an operand: one run of its buffer, since the target's slowest indices lead."""
        extents = [sizes[index] for index in operand.indices]
        steps = zip(operand.indices, row_major(operand.sizes), strict=True)
        first = sum(step * offsets.get(index, 0) for index, step in steps)
        wide = torch.float64 if self.wide.is_complex and not dtype.is_complex else self.wide
        buffer = torch.empty(math.prod(extents), dtype=wide)
        for copy in operand.copies:
            for values, part in read(copy, first, first + buffer.numel()):
                widen(values, _at(buffer, part.sizes, part.target_strides, part.target_offset))
        return buffer.view(extents)


class FormulaFailedError(PortingError):
    """A formula of a table has no value for the numbers that it is given."""


def _failed(where: str, error: FormulaError) -> Fault:
    return Fault(code=Code.BAD_EXPRESSION, where=where, message=str(error))


def _dtype(operand: Operand, dtype_of: Callable[[str], torch.dtype]) -> torch.dtype:
    """The dtype of the tensors that an operand reads; of several that are stacked, the most general."""
    found = [dtype_of(name) for name in dict.fromkeys(copy.source for copy in operand.copies)]
    return max(found, key=lambda one: (one.is_complex, one.is_floating_point))


def _at(tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + offset)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the tensors of a step lie in the buffers of its rule's formula, whatever is computed.

    Attributes:
        result: the target as an operand: its moves read the target.
    """

    operands: tuple[Operand, ...]
    result: Operand
    sizes: Mapping[str, int]

    def forward(
        self, rule: Rule, numbers: Mapping[str, float], dtype: torch.dtype, dtype_of: Callable[[str], torch.dtype]
    ) -> Applied:
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
            dtypes=tuple(_dtype(one, dtype_of) for one in self.operands),
            dtype=dtype,
            where=rule.where,
        )

    def backward(self, rule: Rule, source: str, numbers: Mapping[str, float], dtype: torch.dtype) -> Applied | None:
        """How a source comes about from the target; None where the rule does not say or it is not a single term."""
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
            dtypes=(dtype,),
            dtype=dtype,
            where=rule.where,
        )


def reordered(operand: Operand, name: str, order: Sequence[str]) -> Operand:
    """An operand with its axes in another order; it has one move, of all its elements."""
    extents = dict(zip(operand.indices, operand.sizes, strict=True))
    inner = row_major([extents[index] for index in order])
    steps = dict(zip(order, inner, strict=True))
    (copy,) = operand.copies
    old = dict(zip(operand.indices, row_major(operand.sizes), strict=True))
    theirs = {index: _stride_in_source(copy, old[index]) for index in order if extents[index] > 1}
    sizes = {index: extents[index] for index in order}
    made = make_copy(copy.source, copy.target, sizes, (copy.source_offset, theirs), (0, steps))
    return Operand(name, tuple(order), tuple(extents[index] for index in order), (made,))


def _stride_in_source(copy: Copy, stride: int) -> int:
    """Convert a stride in the buffer to the stride in the tensor that a move reads."""
    for size, theirs, ours in zip(copy.sizes, copy.source_strides, copy.target_strides, strict=True):
        if ours <= stride < ours * size:
            return stride // ours * theirs
    raise ValueError(f"no direction of {copy} has the stride {stride}")  # a bug of ours: buffers are dense


SEED = 1
"""The seed of the values with which a formula's way back is tried."""


def not_undone(rule: Rule, numbers: Mapping[str, float]) -> Fault | None:
    """The fault of a rule whose ``back`` does not lead to tensors that give the target again.

    It is tried on small random tensors: the target of what ``back`` makes of a target has to be that target.
    """
    if rule.formula is None or not rule.back:
        return None
    generator = torch.Generator().manual_seed(SEED)
    terms = [rule.indices_of(term) for term in rule.sources]
    target = rule.indices_of(rule.targets[0])
    every = dict.fromkeys(index for term in (*terms, target) for index in term)
    sizes = {index: 3 + place % 3 for place, index in enumerate(every)} | rule.fixed_sizes
    values = {
        name: (torch.rand([sizes[index] for index in term], generator=generator, dtype=torch.float64) + 0.5, term)
        for name, term in zip(rule.operands, terms, strict=True)
    }
    try:
        once = rule.formula.evaluate(values, numbers, sizes, target)
        given = {RESULT: (once, target)}
        back = {
            name: (rule.back[name].evaluate(given, numbers, sizes, term), term)
            for name, term in zip(rule.operands, terms, strict=True)
        }
        twice = rule.formula.evaluate(back, numbers, sizes, target)
    except FormulaError as error:
        return _failed(rule.where, error)
    if torch.allclose(once, twice, rtol=1e-9, atol=1e-9):
        return None
    off = (twice - once).abs().max().item()
    message = f"'{rule}': 'back' does not undo formula = {rule.formula.text!r}: the target comes out {off:.1e} off"
    hint = "give each source such that the formula makes the same target of them, or leave 'back' out"
    return Fault(code=Code.IRREVERSIBLE, where=rule.where, message=message, hint=hint)
