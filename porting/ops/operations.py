"""The operations of rules on the values of elements, other than moving them: one class for each.

A class has all that the library knows of its operation: the key of a ``[[rule]]`` that asks for it, the values that it
gives, the values that undo it, its transpose (through which gradients go back), whether undoing it gives the same bits,
and the words for messages and pages.  Nothing else computes an element.  To add an operation with a constant, write its
class and list it in :data:`CONSTANTS`.

Values are computed in float64, complex ones in complex128.  A sum is rounded to the dtype of the tensor, and so is what
the operations with a constant, one after the other, make of it.  Whole numbers are computed in int64, and refused where
that or the dtype of the tensor does not hold the result (:mod:`porting.ops.exactness`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from porting.ops.exactness import InexactError, is_whole, require_held, require_room, wide_bytes, wide_dtype, widen

if TYPE_CHECKING:  # a table is read without torch, which takes longer to import than all tables to read
    import torch
    from torch import Tensor


class Operation:
    """One operation on elements; what a subclass does not define leaves values as they are.

    Attributes:
        key: the key of a ``[[rule]]`` that asks for it.
        done: what a rule that has it is, in a list: ``"scaled"``.
        effect: what it does that hides the values it was given, after "the rule".
        exact: whether its inverse gives the same bits again.
    """

    key: ClassVar[str]
    done: ClassVar[str]
    effect: ClassVar[str]
    exact: ClassVar[bool] = False

    def forward(self, values: Tensor) -> None:
        """Compute the target's elements in place of the source's, in the dtype in which they are computed."""

    def inverse(self, values: Tensor) -> None:
        """Compute the source's elements in place of the target's, in the dtype in which they are computed."""

    def transpose(self, gradient: Tensor) -> None:
        """Compute the gradient of the source's elements in place of that of the target's, in float64."""


@dataclass(frozen=True)
class Sum(Operation):
    """The target is the sum of several sources; the inverse gives the whole sum to the first, and zero to the others.

    Its terms are added where a move would write them; then nothing is left to be done to single elements.  The gradient
    of each term is that of the sum.
    """

    key = "fold"
    done = "folded"
    effect = "adds tensors, and the sum does not show them"

    def add(self, total: Tensor, term: Tensor) -> None:
        """Add a term to what the terms before it came to."""
        if not is_whole(term.dtype):
            total.add_(term if term.itemsize > 1 else term.to(total.dtype))  # torch adds no numbers of 8 bits
            return
        added = total.new_empty(term.shape)
        widen(term, added)
        total.add_(added)
        if term.itemsize == total.itemsize and bool(((total ^ (total - added)) & (total ^ added) < 0).any()):
            raise InexactError("the sum does not fit int64, in which whole numbers are computed")

    def receives(self, term: int) -> bool:
        """Whether the inverse gives the sum to the term of this number; else it gives it zero."""
        return term == 0


@dataclass(frozen=True)
class Constant(Operation):
    """An operation that has a number, written as one or as an expression over the config.

    Attributes:
        preposition: the word that stands before the number on a page: ``"times"``.
    """

    number: float
    preposition: ClassVar[str]

    @property
    def is_whole(self) -> bool:
        """Whether the number is whole, so that whole numbers are computed in int64."""
        return float(self.number).is_integer()

    def number_for(self, values: Tensor) -> float:
        """The number as values of this dtype are computed with it."""
        return int(self.number) if is_whole(values.dtype) else self.number

    @classmethod
    def fault(cls, number: float) -> str:
        """The reason why a number is not allowed, as a phrase to follow "and"; empty if it is allowed."""
        return ""


class Scale(Constant):
    """``x * c``; the inverse divides."""

    key = "scale"
    done = "scaled"
    effect = "multiplies, which rounds"
    preposition = "times"

    @classmethod
    def fault(cls, number: float) -> str:
        """A product with zero cannot be undone."""
        return "the inverse divides by it" if number == 0 else ""

    def forward(self, values: Tensor) -> None:
        """Multiply."""
        number = self.number_for(values)
        require_room(values, lambda one: int(one * number))
        values.mul_(number)

    def inverse(self, values: Tensor) -> None:
        """Divide: multiplying by the reciprocal would round twice."""
        number = self.number_for(values)
        if not is_whole(values.dtype):
            values.div_(number)
            return
        if bool(values.remainder(number).any()):
            message = f"a division by {number} leaves fractions, which whole numbers lose"
            raise InexactError(message, "no whole numbers give these through the rule")
        require_room(values, lambda one: int(one // number))
        values.div_(number, rounding_mode="trunc")

    def transpose(self, gradient: Tensor) -> None:
        """Multiply: the operation is linear, and its matrix is diagonal."""
        gradient.mul_(self.number)


class Offset(Constant):
    """``x + c``, as for gains that are stored as ``w - 1``; the inverse subtracts, and the gradient is the same."""

    key = "offset"
    done = "offset"
    effect = "adds a constant, which rounds"
    preposition = "plus"

    def forward(self, values: Tensor) -> None:
        """Add."""
        number = self.number_for(values)
        require_room(values, lambda one: int(one + number))
        values.add_(number)

    def inverse(self, values: Tensor) -> None:
        """Subtract."""
        number = self.number_for(values)
        require_room(values, lambda one: int(one - number))
        values.sub_(number)


CONSTANTS: Mapping[str, type[Constant]] = {kind.key: kind for kind in (Scale, Offset)}
"""The operations with a constant, by their keys, in the order in which a rule that has several applies them."""


@dataclass(frozen=True)
class Arithmetic:
    """The operations of a rule, under one config.

    Attributes:
        operations: in the order in which they are applied.
        inverted: they are undone instead, the last one first.
        numbers: the fields of the config that a formula reads.
    """

    operations: tuple[Operation, ...] = ()
    inverted: bool = False
    numbers: Mapping[str, float] = field(default_factory=dict)
    where: str = field(default="", compare=False, repr=False)

    @cached_property
    def sum(self) -> Sum | None:
        """The sum by which elements come about; None where each element comes from one element."""
        if self.inverted:  # what undoes a sum moves it to the first term, and adds nothing
            return None
        return next((one for one in self.operations if isinstance(one, Sum)), None)

    @cached_property
    def constants(self) -> tuple[Constant, ...]:
        """The operations on single elements, in the order in which they are applied, or undone."""
        found = tuple(one for one in self.operations if isinstance(one, Constant))
        return found[::-1] if self.inverted else found

    def __bool__(self) -> bool:
        """Whether values are computed, and not only moved."""
        computes = self.sum is not None or bool(self.constants)
        return bool(self.operations) and (computes or any(one.key == "formula" for one in self.operations))

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of memory that an element of a tensor takes while it is computed, beside its place."""
        return wide_bytes([dtype]) if self else 0

    def wide(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a sum and what follows it are computed, of tensors of one dtype."""
        return wide_dtype([dtype], dtype, whole=all(one.is_whole for one in self.constants))

    @property
    def inverse(self) -> Arithmetic:
        """The same, undone."""
        return replace(self, inverted=not self.inverted)

    def returns_to(self, term: int) -> bool:
        """Whether the inverse gives values to the source of this number; else that becomes zero."""
        return all(one.receives(term) for one in self.operations if isinstance(one, Sum))

    def apply(self, values: Tensor) -> None:
        """Compute single elements in place, in the dtype in which they are computed; a sum is complete by then."""
        for one in self.constants:
            if self.inverted:
                one.inverse(values)
            else:
                one.forward(values)

    def applied(self, values: Tensor) -> Tensor:
        """The same in memory of its own, rounded once to the dtype of ``values``; these if nothing is computed."""
        if not self.constants:
            return values
        import torch  # noqa: PLC0415  # tables are read without it

        wide = torch.empty_like(values, dtype=self.wide(values.dtype))
        widen(values, wide)
        self.apply(wide)
        require_held(wide, values.dtype)
        return wide.to(values.dtype)

    def transpose(self, gradient: Tensor) -> None:
        """Compute the gradient of the sources' elements in place of that of the targets', in float64."""
        for one in reversed(self.operations):
            one.transpose(gradient)


NOTHING = Arithmetic()
"""The arithmetic of a rule that moves elements as they are."""
