"""What a whole tensor can be known to hold without being read: a number, a count, the unit matrix.

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

WORDS = ("arange", "eye", *NUMBERS)
"""Everything that has a word: ``arange`` counts from 0 along the last axis, ``eye`` is the unit matrix."""

ROUNDED = ("float32", "bfloat16", "float16")
"""A number keeps the rounding of a dtype in which the module once was."""


@dataclass(frozen=True)
class Content:
    """What every element of a tensor is.

    Attributes:
        word: ``"arange"``, ``"eye"``, or empty for one number throughout.

    >>> import torch
    >>> Content.parse("arange").whole((2, 3), torch.int64).tolist()
    [[0, 1, 2], [0, 1, 2]]
    """

    word: str = ""
    number: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Content | None:
        """What a word or a number says; None for any other text."""
        if text in NUMBERS:
            return cls(number=NUMBERS[text])
        if text in WORDS:
            return cls(word=text)
        try:
            return cls(number=float(text))
        except ValueError:
            return None

    def __str__(self) -> str:
        return self.word or next((word for word, one in NUMBERS.items() if one == self.number), repr(self.number))

    def fault(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        """Why a tensor of this shape and dtype cannot hold it; empty when it can."""
        import torch  # noqa: PLC0415  # tables are read without it

        if self.word == "eye" and len(shape) != 2:
            return f"the unit matrix has two axes, and this tensor {len(shape)}"
        if self.word == "arange" and not shape:
            return "it counts along its last axis, and this tensor has none"
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

    def row(self, shape: Sequence[int], start: int, stop: int) -> Tensor:
        """The elements from ``start`` to ``stop`` of a tensor of this shape, in row-major order.

        Returns:
            A tensor ``[stop - start]``, of whole numbers or, for a number throughout, in float64.
        """
        import torch  # noqa: PLC0415  # tables are read without it

        if not self.word:
            return torch.full((stop - start,), self.number, dtype=torch.float64)
        last = max(shape[-1], 1)
        places = torch.arange(start, stop)
        across = places.remainder(last)
        return across if self.word == "arange" else (places.div(last, rounding_mode="floor") == across).long()

    def box(self, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The elements of a box, one start and one size an axis, as a tensor of these sizes."""
        import torch  # noqa: PLC0415  # tables are read without it

        if not self.word:
            return torch.full(tuple(sizes), self.number, dtype=torch.float64)
        across = torch.arange(starts[-1], starts[-1] + sizes[-1])
        if self.word == "arange":
            return across.expand(tuple(sizes))
        down = torch.arange(starts[0], starts[0] + sizes[0])
        return (down[:, None] == across).long()

    def whole(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A whole tensor of this shape and dtype."""
        return self.box([0] * len(shape), shape).to(dtype).contiguous()

    def held_by(self, value: Tensor, expected: Tensor | None = None, *, rounded: bool = False) -> bool:
        """Whether a tensor holds it, bit for bit.

        Args:
            expected: what :meth:`row` or :meth:`box` gives for that part; None for a whole tensor.
            rounded: a number may be rounded as one of the dtypes has it that the module may have had before.
        """
        import torch  # noqa: PLC0415  # tables are read without it

        value = value.detach().cpu().contiguous()
        expected = self.box([0] * value.ndim, value.shape) if expected is None else expected
        names = ROUNDED if rounded and not self.word and value.is_floating_point() else ()
        dtypes = (value.dtype, *(getattr(torch, name) for name in names))
        bits = value.view(-1).view(torch.uint8)
        candidates = (expected.to(dtype).to(value.dtype).contiguous() for dtype in dtypes)
        return any(torch.equal(bits, one.view(-1).view(torch.uint8)) for one in candidates)
