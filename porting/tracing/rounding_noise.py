"""Roundings made on purpose: what is computed in less than float64 is moved by as much as its dtype rounds.

Run twice, once with it and once without, a model shows how far such roundings get.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from porting.tracing.float64 import LESS
from porting.tracing.torch_modes import DispatchMode


class RoundingNoise(DispatchMode):
    """Within it every operation in less than float64 has inputs and results that are a rounding away.

    A value moves by at most one unit in its last place, and a zero not at all.  A cast that changes no number is none.
    It is a mode of the dispatcher because each operation rounds, and a call consists of several.

    Args:
        seed: of the roundings.
        exact: move what is computed in float64, and not what is computed in less.
    """

    def __init__(self, seed: int, *, exact: bool = False) -> None:
        super().__init__()
        self._exact = exact
        self._generator = torch.Generator().manual_seed(seed)

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`DispatchMode.dispatch`."""
        floating = [
            leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]
        if func.is_view or func._schema.is_mutable or not floating:
            return func(*args, **kwargs)
        if self._exact:
            args, kwargs = tree_map(self._moved, (args, kwargs))
            return tree_map(self._moved, func(*args, **kwargs))
        result = func(*args, **kwargs)
        low = [leaf for leaf in tree_leaves(result) if _low(leaf)]
        if not low or (len(floating) == 1 and any(_same(floating[0], tensor) for tensor in low)):
            return result
        if any(map(_low, floating)):
            args, kwargs = tree_map(self._moved, (args, kwargs))
            result = func(*args, **kwargs)
        return tree_map(self._moved, result)

    def _moved(self, value: object) -> object:
        if not isinstance(value, Tensor) or not value.is_floating_point() or _low(value) == self._exact:
            return value
        with _disable_current_modes():
            exact = value.detach().double()
            noise = torch.rand(exact.shape, dtype=torch.float64, generator=self._generator).mul_(2).sub_(1)
            # In place, since this is done for each operand of each operation: exact + noise * |exact| * eps.
            moved = noise.mul_(exact.abs()).mul_(torch.finfo(value.dtype).eps).add_(exact).to(value.dtype)
            if math.isfinite(moved.sum()):  # then each element is
                return moved
            return torch.where(torch.isfinite(moved), moved, value.detach())


class WithoutRounding(DispatchMode):
    """Within it what is made in less than float64, out of integers too, is made in float64."""

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`DispatchMode.dispatch`."""
        if kwargs.get("dtype") in LESS:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def _low(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < torch.float64.itemsize


def _same(tensor: Tensor, other: object) -> bool:
    """Whether a tensor was only cast, and no number changed."""
    with _disable_current_modes():
        return (
            isinstance(other, Tensor)
            and tensor.dtype != other.dtype
            and tensor.shape == other.shape
            and torch.equal(tensor.double().nan_to_num(), other.double().nan_to_num())
        )
