"""Random numbers that are the same on two models in training mode, so that dropout can be compared.

Dropout in torch draws a mask of zeros and ones (``bernoulli_``), whichever module or function asked for it.  Here each
mask is made from a seed and from its place among the masks of the same size and probability: two models that drop
out the same values in the same order get the same masks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from porting.tracing.float64 import running
from porting.tracing.torch_modes import DispatchMode

aten = torch.ops.aten

DIGITS = 6
"""Probabilities are equal when they agree in so many digits: one may have gone through float32."""


@dataclass(frozen=True)
class DropoutMask:
    """One dropout mask.

    Attributes:
        rate: the share that is dropped, 0 to 1.
        shape: of the mask.
        module: the innermost module that was running.
    """

    rate: float
    shape: tuple[int, ...]
    module: str

    @property
    def kind(self) -> tuple[float, int]:
        """Rate and size: masks of one kind are interchangeable, whatever axes the model has merged."""
        return self.rate, torch.Size(self.shape).numel()


class SameDropout(DispatchMode):
    """Replaces what is drawn within it.

    It is a mode of the dispatcher because all that asks for dropout draws by one of these few operations.

    Args:
        seed: two modes with the same seed give the same masks.

    Attributes:
        drawn: the masks of the last pass, in the order in which they were drawn.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.drawn: list[DropoutMask] = []
        self._seed = seed
        self._count: Counter[tuple[str, object]] = Counter()

    @contextmanager
    def again(self) -> Iterator[None]:
        """One pass, which begins with the first mask."""
        self.drawn, self._count = [], Counter()
        with self:
            yield

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`DispatchMode.dispatch`."""
        if func in (aten.bernoulli_.float, aten.bernoulli.p):
            kept = float(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
            mask = self._mask(1 - kept, args[0].shape).to(args[0].dtype)
            return args[0].copy_(mask) if func is aten.bernoulli_.float else mask
        if func is aten.bernoulli.default and _constant(args[0]) is not None:
            return self._mask(1 - float(_constant(args[0]) or 0.0), args[0].shape).to(args[0].dtype)
        if func is aten.native_dropout.default:
            value, rate = args[0], float(args[1])
            mask = self._mask(rate, value.shape)
            return value * mask.to(value.dtype) / (1 - rate), mask.bool()
        made = func(*args, **kwargs)
        if func in _UNIFORM and isinstance(made, Tensor) and made.is_floating_point():
            low, high = (
                (float(bound) for bound in (*args[1:3], 0.0, 1.0)[:2]) if func is aten.uniform_.default else (0, 1)
            )
            made.copy_(low + (high - low) * self._numbers("uniform", made.numel()).view(made.shape))
        return made

    def _mask(self, rate: float, shape: torch.Size) -> Tensor:
        """Zeros and ones, float64, of this shape."""
        draw = DropoutMask(round(rate, DIGITS), tuple(shape), running())
        self.drawn.append(draw)
        return (self._numbers("dropout", draw.kind) >= draw.rate).double().view(shape)

    def _numbers(self, what: str, kind: tuple[float, int] | int) -> Tensor:
        """Numbers from 0 to 1 for the next draw of a kind."""
        place = self._count[what, kind]
        self._count[what, kind] += 1
        seed = (self._seed * 1_000_003 + place) * 1_000_003 + (kind[1] if isinstance(kind, tuple) else kind)
        generator = torch.Generator().manual_seed(seed % 2**63)
        return torch.rand(kind[1] if isinstance(kind, tuple) else kind, dtype=torch.float64, generator=generator)


_UNIFORM = frozenset({aten.rand.default, aten.rand_like.default, aten.uniform_.default})
"""Numbers that models make masks of by themselves, as for dropped layers and paths."""


def _constant(probabilities: Tensor) -> float | None:
    """The one number that a tensor of probabilities holds; None where they differ."""
    if not probabilities.numel() or bool((probabilities != probabilities.flatten()[0]).any()):
        return None
    return float(probabilities.flatten()[0])
