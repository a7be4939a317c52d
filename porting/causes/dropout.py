"""Dropout that is left on: found by switching it off in the port, since what it draws cannot be drawn again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

NAME = "dropout active"
WHAT = "dropout is applied though the model is in eval mode"
LOOKS = "two runs with the same input differ"
FIX = (
    "model.eval(); F.dropout(x, p, training=self.training), and dropout_p=0.0 for scaled_dot_product_attention in eval"
)

_DROPOUT = {F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.alpha_dropout, F.feature_alpha_dropout}


class Silence(TorchFunctionMode):
    """No dropout, wherever it is asked for: ``with Silence(): model(**inputs)``.

    Attributes:
        rates: with which probabilities it was asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rates: set[float] = set()

    @property
    def detail(self) -> str:
        """What was switched off."""
        said = ", ".join(f"p is {rate:g}" for rate in sorted(self.rates))
        return f"{said}; without it the difference is gone" if said else "without it the difference is gone"

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # whatever torch's function gives
        given = dict(kwargs or {})
        if func in _DROPOUT or getattr(func, "__name__", "").startswith(("dropout", "bernoulli")):
            value = args[0] if args else given["input"]
            active = given.get("training", given.get("train", args[2] if len(args) > 2 else True))
            self._asked(args[1] if len(args) > 1 else given.get("p", 0.5), active=bool(active))
            return value if "dropout" in func.__name__ else torch.ones_like(value)
        if func is F.scaled_dot_product_attention:
            self._asked(args[4] if len(args) > 4 else given.get("dropout_p", 0.0), active=True)
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            given.update({"dropout_p": 0.0} if len(args) <= 4 else {})
        elif func is F.multi_head_attention_forward:
            given["training"] = False
        return func(*args, **given)

    def _asked(self, rate: object, *, active: bool) -> None:
        if active and isinstance(rate, int | float) and rate > 0:
            self.rates.add(float(rate))
