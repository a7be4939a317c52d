"""Modes of torch: what those that see operations have in common, and two with which a backward pass reaches more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_PLACE = 3
"""Where ``embedding_dense_backward`` is given the row that takes no gradient."""


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type its modes
    """A mode in which :meth:`dispatch` sees every operation, but for what is in a higher-order one."""

    supports_higher_order_operators = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]  # as above

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # whatever torch's operation gives
        if isinstance(func, HigherOrderOperator):  # flex_attention, say
            return func(*args, **(kwargs or {}))
        return self.dispatch(func, args, dict(kwargs or {}))

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """Run an operation in the way of this mode.

        Args:
            func: one of torch's operations.
            args, kwargs: what it is given.

        Returns:
            What stands in its result's place.
        """
        raise NotImplementedError


class GradientOfEveryRow(DispatchMode):
    """Within it ``padding_idx`` keeps no row from its gradient, as in ``with GradientOfEveryRow(): loss.backward()``.

    ``padding_idx`` itself stays as it is, since a forward pass may read it: to count positions, say.
    """

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`DispatchMode.dispatch`."""
        if func is torch.ops.aten.embedding_dense_backward.default:
            args = (*args[:_PLACE], -1, *args[_PLACE + 1 :])
        return func(*args, **(kwargs or {}))


class KeptGraph(TorchFunctionMode):
    """Within it a computed tensor that is told to require no gradient stays as it is.

    Torch allows that of leaves only.  A slice of a buffer, as in ``self.pe[:, :n].requires_grad_(False)``, is one as
    long as the buffer requires none; to see which weights are at work all of them do.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # whatever torch's function gives
        if func is Tensor.requires_grad_ and not args[0].is_leaf and not _asked(*args[1:], **(kwargs or {})):
            return args[0]
        return func(*args, **(kwargs or {}))


def _asked(requires_grad: bool = True) -> bool:  # the signature is torch's
    return requires_grad
