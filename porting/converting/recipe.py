"""How one tensor of the output is made from tensors of the input: what a plan says, a tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from porting.plan.copies import Copy
from porting.plan.plan import LeftOut


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One tensor of the output.

    Its elements are gathered in ``work`` (every source is cast to that as it is read), summed in float64 in a fold,
    multiplied or divided in float64 where there is a factor, and then cast to ``dtype``.

    Attributes:
        name: its name in the output.
        shape: its extents.
        work: the dtype in which it is gathered.
        dtype: its dtype in the output.
        copies: the moves; disjoint boxes of it, except in a fold.
        fill: the value of elements that no move writes.
        fold: the moves are added up.
        factor: what the elements are multiplied by; None for most tensors.
        divide: they are divided by it instead.
        arange: it counts from 0 along its last axis, and is read from nowhere.
        base: the tensor of the followed checkpoint whose elements stand where no move writes.
        blanks: moves whose targets become zero after ``base`` was copied.
    """

    name: str
    shape: tuple[int, ...]
    work: torch.dtype
    dtype: torch.dtype
    copies: tuple[Copy, ...] = ()
    fill: float | None = None
    fold: bool = False
    factor: float | None = None
    divide: bool = False
    arange: bool = False
    base: str = ""
    blanks: tuple[Copy, ...] = ()

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes in the output."""
        return self.numel * self.dtype.itemsize

    @property
    def sources(self) -> tuple[str, ...]:
        """The tensors of the input that it is made of, each once."""
        return tuple(dict.fromkeys(copy.source for copy in self.copies))

    @property
    def arithmetic(self) -> bool:
        """Whether values are computed and not only moved."""
        return self.fold or self.factor is not None

    @property
    def covered(self) -> bool:
        """Whether its moves write all of it."""
        return self.fold or sum(copy.numel for copy in self.copies) == self.numel


@dataclass(frozen=True, kw_only=True)
class Recipes:
    """Everything that an output holds, and what it does not.

    Attributes:
        tensors: in the order in which the output lists them.
        left_out: the tensors of the input that are not carried over, with the reasons.
        tied: names of the output that are not stored, because they are other names of a tensor that is.
        absent: names of the output that the input has nothing for, by leave of the table.
        same: pairs of tensors of the input that have to be equal, for the output holds one of them only.
        warnings: what is allowed and should be known.
    """

    tensors: tuple[Recipe, ...]
    left_out: tuple[LeftOut, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    same: tuple[LeftOut, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.nbytes for one in self.tensors)
