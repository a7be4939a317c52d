"""What made a value that is no number: the first operation that gave one, with the user's file and line."""

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
HIDDEN_WHAT = "some query has no key left to attend to: a softmax over a row that is -inf everywhere gives NaN"
HIDDEN_FIX = (
    "check the mask's polarity (which value hides a key) and its axes; keep one key open in every row, or fill with a "
    "large negative number and not with -inf"
)
OTHER = "value that is not finite"
OTHER_WHAT = "an operation gives NaN or infinity from numbers that are finite"
OTHER_FIX = "look at the numbers that this line is given: a division by 0, a root or logarithm below 0, or an overflow"


@dataclass(frozen=True, kw_only=True)
class Broken:
    """The first operation that gave a value that is no number.

    Attributes:
        operation: its name, ``"softmax"``.
        line: ``file:line`` of the user's code.
        gives: ``NaN`` or ``infinity``.
        hidden: a softmax over a row that is -inf everywhere.
    """

    operation: str
    line: str
    gives: str
    hidden: bool

    def __str__(self) -> str:
        return f"{self.operation} at {self.line} gives {self.gives}"


class FirstBroken(FunctionMode):
    """Watches a pass: ``with FirstBroken() as watch: model(**inputs)``.

    It is a mode of its own, and no reader of a tape: it looks at values as they arise, which may be overwritten later.

    A mask of -inf is a value that somebody wrote: what counts is the first NaN, or the first infinity that was made of
    finite numbers by something else than a filling.

    Attributes:
        first: what was found, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: Broken | None = None

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        result = func(*args, **kwargs)
        if self.first is not None and self.first.gives == "NaN":
            return result
        made = [leaf for leaf in tree_leaves(result) if _floats(leaf)]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if _floats(leaf)]
        name = getattr(func, "__name__", "")
        if any(bool(torch.isnan(tensor).any()) for tensor in made):
            if not any(bool(torch.isnan(tensor).any()) for tensor in given):
                hidden = _hidden(func, given)
                name = "softmax" if hidden and name in _SHOWING else name
                self.first = Broken(operation=name, line=current_line(), gives="NaN", hidden=hidden)
        elif self.first is None and not any(filler in name for filler in _FILLS):
            endless = any(bool(torch.isposinf(tensor).any()) for tensor in made)
            if endless and given and all(bool(torch.isfinite(tensor).all()) for tensor in given):
                self.first = Broken(operation=name, line=current_line(), gives="infinity", hidden=False)
        return result


_FILLS = ("fill", "full", "where", "masked", "tensor", "zeros", "ones", "to", "__setitem__")


_SHOWING = ("amax", "sub", "__sub__")
"""By what scores are shown, just before the softmax."""


def _floats(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


def _hidden(func: Callable[..., Any], given: list[Tensor]) -> bool:
    """Whether it is a softmax, or a step by which one is shown, that is given a row in which no key is left."""
    softmax = kind_of(func) is Kind.SOFTMAX or getattr(func, "__name__", "") in _SHOWING
    return softmax and any(bool(torch.isneginf(tensor).all(-1).any()) for tensor in given)
