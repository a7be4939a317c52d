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
    """No dropout, wherever it is asked for: ``with Silence(): model(**inputs)``."""

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
            return value if "dropout" in func.__name__ else torch.ones_like(value)
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            given.update({"dropout_p": 0.0} if len(args) <= 4 else {})
        elif func is F.multi_head_attention_forward:
            given["training"] = False
        return func(*args, **given)
