"""Gradients for every row of an embedding, the padding word's too, without a change to the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

_PLACE = 3
"""Where ``embedding_dense_backward`` is given the row that takes no gradient."""


class EveryRow(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type its modes
    """Within it ``padding_idx`` keeps no row from its gradient: ``with EveryRow(): torch.autograd.grad(...)``.

    ``padding_idx`` itself stays as it is, since a forward pass may read it: to count positions, say.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # whatever torch's operation gives
        if isinstance(func, HigherOrderOperator):  # flex_attention, say: what is in it is not looked into
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.embedding_dense_backward.default:
            args = (*args[:_PLACE], -1, *args[_PLACE + 1 :])
        return func(*args, **(kwargs or {}))
