"""Dropout that is left on in eval mode: found by switching it off, because random draws cannot be repeated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from porting.tracing.calls import Kind, argument, changed, kind_of
from porting.tracing.torch_modes import FunctionMode

NAME = "dropout active"
WHAT = "dropout is applied though the model is in eval mode"
LOOKS = "two runs with the same input differ"
FIX = (
    "model.eval(); F.dropout(x, p, training=self.training), and dropout_p=0.0 for scaled_dot_product_attention in eval"
)


class NoDropout(FunctionMode):
    """Switches dropout off everywhere: ``with NoDropout(): model(**inputs)``.

    It is a mode of torch functions because ``F.dropout`` depends on no module's training mode.

    Attributes:
        rates: the probabilities of the dropout that was switched off.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rates: set[float] = set()

    @property
    def detail(self) -> str:
        """The dropout that was switched off, for a report."""
        rates_text = ", ".join(f"p is {rate:g}" for rate in sorted(self.rates))
        return f"{rates_text}; without it the difference is gone" if rates_text else "without it the difference is gone"

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        name, kind = getattr(func, "__name__", ""), kind_of(func)
        get = partial(argument, func, args, kwargs)
        if "dropout" in name or name.startswith("bernoulli"):
            active = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
            self._note(args[1] if len(args) > 1 else kwargs.get("p", 0.5), active=bool(active))
            return args[0] if "dropout" in name else torch.ones_like(args[0])
        if kind is Kind.ATTENTION:
            self._note(get("dropout_p", 0.0), active=True)
            args, kwargs = changed(func, args, kwargs, dropout_p=0.0)
        elif kind is Kind.MULTI_HEAD:
            self._note(get("dropout_p", 0.0), active=get("training", True))
            args, kwargs = changed(func, args, kwargs, training=False)
        return func(*args, **kwargs)

    def _note(self, rate: object, *, active: bool) -> None:
        if active and isinstance(rate, int | float) and rate > 0:
            self.rates.add(float(rate))
