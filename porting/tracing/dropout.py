"""The same random numbers for two models in training mode, so that dropout can be compared.

All dropout in torch draws a mask of zeros and ones (``bernoulli_``). Here each mask is computed from a seed and its
index among the masks of the same size and probability, so two models that apply dropout in the same order get the same
masks.
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
"""Digits in which equal probabilities agree, as one of them may have been stored in float32."""


@dataclass(frozen=True)
class DropoutMask:
    """A dropout mask that was drawn.

    Attributes:
        rate: the probability of dropping an element.
        module: the path of the innermost module that was running.
    """

    module: str
    rate: float
    shape: tuple[int, ...]

    @property
    def kind(self) -> tuple[float, int]:
        """The rate and the size: masks of one kind are interchangeable, whatever axes the model has merged."""
        return self.rate, torch.Size(self.shape).numel()


class SameDropout(DispatchMode):
    """Replaces the random numbers of dropout by those of a seed.

    It is a mode of the dispatcher because all kinds of dropout draw by one of a few operations.

    Args:
        seed: modes with the same seed draw the same masks.

    Attributes:
        drawn: the masks of the last pass, in order.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.drawn: list[DropoutMask] = []
        self._seed = seed
        self._count: Counter[tuple[str, object]] = Counter()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Return a context for one pass, which begins with the first mask."""
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
        result = func(*args, **kwargs)
        if func in _UNIFORM and isinstance(result, Tensor) and result.is_floating_point():
            low, high = (
                (float(bound) for bound in (*args[1:3], 0.0, 1.0)[:2]) if func is aten.uniform_.default else (0, 1)
            )
            result.copy_(low + (high - low) * self._numbers("uniform", result.numel()).view(result.shape))
        return result

    def _mask(self, rate: float, shape: torch.Size) -> Tensor:
        """Return the next mask of a rate and shape, zeros and ones in float64."""
        mask = DropoutMask(running(), round(rate, DIGITS), tuple(shape))
        self.drawn.append(mask)
        return (self._numbers("dropout", mask.kind) >= mask.rate).double().view(shape)

    def _numbers(self, purpose: str, kind: tuple[float, int] | int) -> Tensor:
        """Return uniform random numbers from 0 to 1 for the next draw of a kind."""
        index = self._count[purpose, kind]
        self._count[purpose, kind] += 1
        seed = (self._seed * 1_000_003 + index) * 1_000_003 + (kind[1] if isinstance(kind, tuple) else kind)
        generator = torch.Generator().manual_seed(seed % 2**63)
        return torch.rand(kind[1] if isinstance(kind, tuple) else kind, dtype=torch.float64, generator=generator)


_UNIFORM = frozenset({aten.rand.default, aten.rand_like.default, aten.uniform_.default})
"""Uniform random numbers, from which some models compute masks, such as those of dropped layers."""


def _constant(probabilities: Tensor) -> float | None:
    """Return the number that all elements of a tensor have; None where they differ."""
    if not probabilities.numel() or bool((probabilities != probabilities.flatten()[0]).any()):
        return None
    return float(probabilities.flatten()[0])
