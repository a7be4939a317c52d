"""Adding rounding errors on purpose, to measure how far they propagate in a model.

Values in less than float64 are moved by as much as their dtype rounds, and the run is compared with one without noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from porting.tracing.calls import tensors_in, with_leaves
from porting.tracing.float64 import LESS, is_low_precision
from porting.tracing.torch_modes import DispatchMode


class RoundingNoise(DispatchMode):
    """Moves the operands and results of every operation in less than float64 by a rounding error.

    A value moves by at most one unit in its last place. A cast that changes no number is left alone, and so are whole
    numbers: a mask of ones and zeros is not rounded, and ``(1 - mask) * torch.finfo(dtype).min`` would make of a
    rounding another mask. It is a mode of the dispatcher because each operation rounds, and a function calls several.

    Args:
        exact: move float64 values, and not those of lower precision.
    """

    def __init__(self, seed: int, *, exact: bool = False) -> None:
        super().__init__()
        self._exact = exact
        self._generator = torch.Generator().manual_seed(seed)

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`DispatchMode.dispatch`."""
        floating = [one for one in tensors_in((args, kwargs)) if one.is_floating_point()]
        if func.is_view or func._schema.is_mutable or not floating:
            return func(*args, **kwargs)
        if self._exact:
            args, kwargs = with_leaves(self._with_noise, (args, kwargs))
            return with_leaves(self._with_noise, func(*args, **kwargs))
        result = func(*args, **kwargs)
        low = [one for one in tensors_in(result) if is_low_precision(one)]
        if not low or (len(floating) == 1 and any(_only_cast(floating[0], tensor) for tensor in low)):
            return result
        if any(map(is_low_precision, floating)):
            args, kwargs = with_leaves(self._with_noise, (args, kwargs))
            result = func(*args, **kwargs)
        return with_leaves(self._with_noise, result)

    def _with_noise(self, value: object) -> object:
        if not isinstance(value, Tensor) or not value.is_floating_point() or is_low_precision(value) == self._exact:
            return value
        with _disable_current_modes():
            exact = value.detach().double()
            noise = torch.rand(exact.shape, dtype=torch.float64, generator=self._generator).mul_(2).sub_(1)
            # In place, since this is done for each operand of each operation: exact + noise * |exact| * eps.
            eps = torch.finfo(value.dtype).eps
            if not self._exact:
                noise.masked_fill_((exact == exact.round()) & (exact.abs() < 1 / eps), 0.0)
            moved = noise.mul_(exact.abs()).mul_(eps).add_(exact).to(value.dtype)
            if math.isfinite(moved.sum()):  # then each element is
                return moved
            return torch.where(torch.isfinite(moved), moved, value.detach())


class WithoutRounding(DispatchMode):
    """Makes every tensor in float64 that would be made in less, also from integers."""

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`DispatchMode.dispatch`."""
        if kwargs.get("dtype") in LESS:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


class RoundedNumbers(DispatchMode):
    """Collects the numbers that operations in float64 are given in less, such as cosines of a table in float32.

    Whole numbers are left out: they are not rounded, and each side writes its masks with others.

    Attributes:
        complete: whether all were collected; not where a tensor has more than :data:`MOST_ROUNDED` numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: list[Tensor] = []
        self.complete = True

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`DispatchMode.dispatch`."""
        result = func(*args, **kwargs)
        given = [one for one in tensors_in((args, kwargs)) if one.is_floating_point()]
        low = [leaf for leaf in given if is_low_precision(leaf)]
        if low and not func.is_view:
            made = [one for one in tensors_in(result) if one.is_floating_point()]
            if len(low) < len(given) or not made or not all(map(is_low_precision, made)):
                with _disable_current_modes():
                    self._add(low)
        return result

    def _add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.numel() > MOST_ROUNDED:
                self.complete = False
            else:
                numbers = tensor.detach().double().flatten()
                self._found.append(torch.unique(numbers[numbers != numbers.round()]))

    @property
    def numbers(self) -> Tensor:
        """The numbers, each once, in ascending order."""
        return torch.unique(torch.cat(self._found)) if self._found else torch.empty(0, dtype=torch.float64)


MOST_ROUNDED = 1 << 20
"""Numbers of a tensor that are looked at; one with more is a weight, or an activation, and no table."""


def _only_cast(tensor: Tensor, other: object) -> bool:
    """Return whether a tensor was cast and no number changed."""
    with _disable_current_modes():
        return (
            isinstance(other, Tensor)
            and tensor.dtype != other.dtype
            and tensor.shape == other.shape
            and torch.equal(tensor.double().nan_to_num(), other.double().nan_to_num())
        )
