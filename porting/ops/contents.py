"""The contents that a whole tensor can have without being stored: a number, a count, the identity matrix.

The same words stand in ``[make]``, for what the module holds and no checkpoint has, and behind ``equals`` in
``[drop]``, for what the checkpoint holds and the module does not need.  Nothing else makes or checks such values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from porting.printable import dtype_name

if TYPE_CHECKING:  # tables are read without torch, which takes a second to import: those who make tensors have it
    import torch
    from torch import Tensor

NUMBERS = {"zeros": 0.0, "ones": 1.0}
"""The words that stand for one number throughout."""

ROTARY = "rotary"
"""The inverse frequencies of rotary positions along the last axis, ``1 / theta ** (2 i / d)``; theta is a number."""

WORDS = ("arange", "eye", "causal", *NUMBERS)
"""Everything that has a word: ``arange`` counts from 0 along the last axis, ``eye`` is the unit matrix, and ``causal``
over the last two axes 1 where the last index is not larger than the one in front of it, else 0."""

ROUNDED = ("float32", "bfloat16", "float16")
"""A number keeps the rounding of a dtype in which the module once was."""


@dataclass(frozen=True)
class Content:
    """The content of a tensor: the value of each element.

    Attributes:
        word: ``"arange"``, ``"eye"``, ``"causal"``, ``"rotary"``, or empty for one number throughout.
        number: that number, or the theta of ``"rotary"``.

    >>> import torch
    >>> Content.parse("arange").whole((2, 3), torch.int64).tolist()
    [[0, 1, 2], [0, 1, 2]]
    """

    word: str = ""
    number: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Content | None:
        """Parse a word or a number; None for any other text."""
        if text in NUMBERS:
            return cls(number=NUMBERS[text])
        if text in WORDS:
            return cls(word=text)
        rotary = text.startswith(f"{ROTARY} ")
        try:
            return cls(word=ROTARY if rotary else "", number=float(text.removeprefix(f"{ROTARY} ")))
        except ValueError:
            return None

    def __str__(self) -> str:
        if self.word == ROTARY:
            return f"{ROTARY} {self.number!r}"
        return self.word or next((word for word, one in NUMBERS.items() if one == self.number), repr(self.number))

    def fault(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        """Why a tensor of this shape and dtype cannot hold it; empty when it can."""
        import torch  # noqa: PLC0415  # tables are read without it

        wrong = self._shape_fault(shape, dtype)
        if wrong:
            return wrong
        largest = max(shape[-1] - 1, 0) if self.word == "arange" else 1.0 if self.word else self.number
        if dtype == torch.bool:
            return "" if largest in (0.0, 1.0) else f"a tensor of booleans cannot hold {largest:g}"
        if not dtype.is_floating_point and not dtype.is_complex:
            limits = torch.iinfo(dtype)
            if not float(largest).is_integer() or not limits.min <= largest <= limits.max:
                return f"{dtype_name(dtype)} cannot hold {largest:g}"
        elif not math.isfinite(largest) or abs(largest) > torch.finfo(dtype).max:
            return f"{dtype_name(dtype)} cannot hold {largest:g}"
        return ""

    def _shape_fault(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        """Why no tensor of this shape, or this kind of dtype, holds what its word says; empty when one does."""
        if self.word == "eye" and len(shape) != 2:
            return f"the unit matrix has two axes, and this tensor {len(shape)}"
        if self.word in {"arange", ROTARY} and not shape:
            return "it counts along its last axis, and this tensor has none"
        if self.word == "causal" and len(shape) < 2:
            return f"a causal mask has two axes at least, and this tensor {len(shape)}"
        if self.word == ROTARY and (self.number <= 0 or not dtype.is_floating_point):
            return f"frequencies of theta = {self.number:g} cannot be {dtype_name(dtype)}"
        return ""

    def row(self, shape: Sequence[int], start: int, stop: int) -> Tensor:
        """The elements from ``start`` to ``stop`` of a tensor of this shape, in row-major order.

        Returns:
            A tensor ``[stop - start]``, of whole numbers or, for a number throughout, in float64.
        """
        import torch  # noqa: PLC0415  # tables are read without it

        if not self.word:
            return torch.full((stop - start,), self.number, dtype=torch.float64)
        places = torch.arange(start, stop)
        last, rows = max(shape[-1], 1), max(shape[-2] if len(shape) > 1 else 1, 1)
        return self._at(places.remainder(last), places.div(last, rounding_mode="floor").remainder(rows), shape[-1])

    def box(self, starts: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The elements of a box of a tensor of this shape, a start and a size an axis, as a tensor of these sizes."""
        import torch  # noqa: PLC0415  # tables are read without it

        if not self.word:
            return torch.full(tuple(sizes), self.number, dtype=torch.float64)
        last = [torch.arange(start, start + size) for start, size in zip(starts[-2:], sizes[-2:], strict=True)]
        return self._at(last[-1], last[0][:, None], shape[-1]).expand(tuple(sizes))

    def _at(self, across: Tensor, down: Tensor, count: int) -> Tensor:
        """The elements at these places along the last axis, of ``count`` elements, and along the one before it."""
        import torch  # noqa: PLC0415  # tables are read without it

        if self.word == ROTARY:  # the inverse frequencies, computed in float32 as models do
            steps = torch.arange(0, 2 * count, 2).float() / max(2 * count, 1)
            return (1.0 / self.number**steps).double()[across]
        if self.word == "arange":
            return across
        return (down == across if self.word == "eye" else down >= across).long()

    def whole(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A whole tensor of this shape and dtype."""
        return self.box([0] * len(shape), shape, shape).to(dtype).contiguous()

    def held_by(self, value: Tensor, expected: Tensor | None = None, *, rounded: bool = False) -> bool:
        """Whether a tensor holds it, bit for bit.

        Args:
            expected: what :meth:`row` or :meth:`box` gives for that part; None for a whole tensor.
            rounded: a number may be rounded as one of the dtypes has it that the module may have had before.
        """
        import torch  # noqa: PLC0415  # tables are read without it

        value = value.detach().cpu().contiguous()
        expected = self.box([0] * value.ndim, value.shape, value.shape) if expected is None else expected
        names = ROUNDED if rounded and self.word in {"", ROTARY} and value.is_floating_point() else ()
        dtypes = (value.dtype, *(getattr(torch, name) for name in names))
        bits = value.view(-1).view(torch.uint8)
        candidates = (expected.to(dtype).to(value.dtype).contiguous() for dtype in dtypes)
        return any(torch.equal(bits, one.view(-1).view(torch.uint8)) for one in candidates)
