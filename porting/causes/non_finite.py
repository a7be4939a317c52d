"""Finding the first operation that returned NaN or infinity, with the user's file and line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from porting.frames import current_line
from porting.tracing.calls import Kind, kind_of
from porting.tracing.torch_modes import FunctionMode

HIDDEN = "mask that hides every key"
HIDDEN_WHAT = "some query has no key to attend to: softmax over a row of -inf gives NaN"
HIDDEN_FIX = (
    "check the mask's polarity (which value hides a key) and its axes; show at least one key in every row, or fill "
    "with a large negative number instead of -inf"
)
OTHER = "value that is not finite"
OTHER_WHAT = "an operation returns NaN or infinity from finite numbers"
OTHER_FIX = "check the line's operands for a division by 0, a root or logarithm of a negative number, or an overflow"


@dataclass(frozen=True, kw_only=True)
class Broken:
    """The first operation that returned NaN or infinity.

    Attributes:
        operation: the function's name, ``"softmax"``.
        line: ``file:line`` of the user's code.
        gives: ``NaN`` or ``infinity``.
        hidden: it is a softmax over a row of -inf.
    """

    operation: str
    line: str
    gives: str
    hidden: bool

    def __str__(self) -> str:
        return f"{self.operation} at {self.line} gives {self.gives}"


class FirstBroken(FunctionMode):
    """Watches a pass: ``with FirstBroken() as watch: model(**inputs)``.

    It is a mode of torch functions, and does not read a tape, because values may be overwritten in place later.

    A mask of -inf is intended. So only the first NaN counts, or the first infinity that is computed from finite numbers
    and not filled in.

    Attributes:
        first: the operation, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: Broken | None = None

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        result = func(*args, **kwargs)
        if self.first is not None and self.first.gives == "NaN":
            return result
        results = [leaf for leaf in tree_leaves(result) if _floats(leaf)]
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if _floats(leaf)]
        name = getattr(func, "__name__", "")
        if any(bool(torch.isnan(tensor).any()) for tensor in results):
            if not any(bool(torch.isnan(tensor).any()) for tensor in operands):
                hidden = _hides_all_keys(func, operands)
                name = "softmax" if hidden and name in _SHOWING else name
                self.first = Broken(operation=name, line=current_line(), gives="NaN", hidden=hidden)
        elif self.first is None and not any(filler in name for filler in _FILLS):
            infinite = any(bool(torch.isposinf(tensor).any()) for tensor in results)
            if infinite and operands and all(bool(torch.isfinite(tensor).all()) for tensor in operands):
                self.first = Broken(operation=name, line=current_line(), gives="infinity", hidden=False)
        return result


_FILLS = ("fill", "full", "where", "masked", "tensor", "zeros", "ones", "to", "__setitem__")
_SHOWING = ("amax", "sub", "__sub__")
"""Functions by which scores are made visible, just before the softmax."""


def _floats(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


def _hides_all_keys(func: Callable[..., Any], operands: list[Tensor]) -> bool:
    """Return whether a call is a softmax, or makes its scores visible, and reads a row in which no key is left."""
    softmax = kind_of(func) is Kind.SOFTMAX or getattr(func, "__name__", "") in _SHOWING
    return softmax and any(bool(torch.isneginf(tensor).all(-1).any()) for tensor in operands)
