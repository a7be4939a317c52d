"""The dtype in which values are computed, and whether the dtype of a result holds them exactly.

Floating-point numbers are computed in float64, complex ones in complex128, and both are rounded once.  Whole numbers
are computed in int64 and are never rounded: what cannot be computed so, and what the dtype of the result does not hold,
is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from porting.printable import dtype_name

if TYPE_CHECKING:  # a table is read without torch, which takes longer to import than all tables to read
    import torch
    from torch import Tensor

LEAST, MOST = -(2**63), 2**63 - 1
"""The range of int64, in which whole numbers are computed."""

CONSECUTIVE = 2**53
"""Up to here float64 holds every whole number."""


class InexactError(ArithmeticError):
    """A computed value that the dtype of the result does not hold, or whole numbers that are to be computed as others.

    Attributes:
        hint: what to do about it.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint or 'say the dtype of the result: a rule with a formula takes dtype = "float32"'


def is_whole(dtype: torch.dtype) -> bool:
    """Whether a dtype has whole numbers only; booleans are 0 and 1."""
    return not (dtype.is_floating_point or dtype.is_complex)


def wide_dtype(dtypes: Iterable[torch.dtype], result: torch.dtype, *, whole: bool) -> torch.dtype:
    """The dtype in which a tensor is computed.

    Args:
        dtypes: those of the tensors that it is computed of.
        result: its own.
        whole: whether what is computed of whole numbers is whole again.
    """
    import torch  # noqa: PLC0415  # tables are read without it

    given = tuple(dtypes)
    if is_whole(result):
        foreign = next((one for one in given if not is_whole(one)), None)
        if foreign is not None:
            raise InexactError(f"{dtype_name(result)} would be computed of {dtype_name(foreign)}, and lose fractions")
        if not whole:
            raise InexactError(f"the result has fractions, and {dtype_name(result)} would lose them")
        return torch.int64
    return torch.complex128 if any(one.is_complex for one in given) else torch.float64


def wide_bytes(dtypes: Iterable[torch.dtype]) -> int:
    """Bytes of a value while it is computed of tensors of these dtypes."""
    return 16 if any(one.is_complex for one in dtypes) else 8


def widen(values: Tensor, place: Tensor) -> None:
    """Bring values to a place of the dtype in which they are computed."""
    import torch  # noqa: PLC0415  # tables are read without it

    if values.dtype == torch.uint64 and place.dtype == torch.int64 and (values.view(torch.int64) < 0).any():
        raise InexactError(f"numbers of uint64 above {MOST} are not computed exactly")
    place.copy_(values)


def extremes(values: Tensor) -> tuple[float, float]:
    """The smallest and the largest value, each NaN if there is one; zeros where there are no values."""
    import torch  # noqa: PLC0415  # tables are read without it

    if values.numel() == 0:
        return 0, 0
    least, most = torch.aminmax(values)
    return least.item(), most.item()


def require_room(values: Tensor, change: Callable[[int], int]) -> None:
    """Require that whole numbers stay within int64 under a function that only rises or only falls."""
    import torch  # noqa: PLC0415  # tables are read without it

    if values.dtype == torch.int64:
        require_within(change(int(one)) for one in extremes(values))


def require_within(values: Iterable[int]) -> None:
    """Require that whole numbers are within int64."""
    for one in values:
        if not LEAST <= one <= MOST:
            raise InexactError(f"the result may be {one}, and whole numbers are computed in int64")


def require_held(values: Tensor, dtype: torch.dtype) -> None:
    """Require that a dtype holds computed values; floating-point dtypes round real ones."""
    import torch  # noqa: PLC0415  # tables are read without it

    if values.dtype == dtype or dtype.is_complex:
        return
    if values.is_complex():
        message = f"complex numbers would lose their imaginary part in {dtype_name(dtype)}"
        raise InexactError(message, "take abs(), or name the complex source first and no dtype")
    if dtype.is_floating_point:
        if dtype.itemsize == 1 and torch.finfo(dtype).min > 0 and bool((values <= 0).any()):
            raise InexactError(f"the result is not positive, and {dtype_name(dtype)} has positive numbers only")
        return
    limits = None if dtype == torch.bool else torch.iinfo(dtype)
    lowest, highest = (0, 1) if limits is None else (limits.min, limits.max)
    if values.is_floating_point():
        lowest, highest = max(lowest, -CONSECUTIVE), min(highest, CONSECUTIVE)
    for one in extremes(values):
        if not lowest <= one <= highest:
            raise InexactError(f"the result {one} does not fit {dtype_name(dtype)}")
    if values.is_floating_point() and bool((values != values.trunc()).any()):
        raise InexactError(f"the result has fractions, and {dtype_name(dtype)} would lose them")
