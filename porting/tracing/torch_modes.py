"""Modes of torch: what those that see calls or operations have in common, and two that let gradients reach more.

There are two kinds.  A :class:`FunctionMode` sees what a model's code calls, ``F.linear`` or ``Tensor.softmax``, and
can look at the caller's line.  A :class:`DispatchMode` sees what torch makes of it, also inside of torch's own code and
in a backward pass: ``addmm``, ``native_dropout``.  Every mode of this library is one of these two: all of them see the
same calls with their arguments in the same order, and none fails at an operator of higher order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from porting.tracing.calls import in_order

_PLACE = 3
"""Where ``embedding_dense_backward`` is given the row that takes no gradient."""


class FunctionMode(TorchFunctionMode):
    """A mode in which :meth:`call` sees every call of a torch function, its arguments in the order of its signature.

    As it is, it lets them pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rests = False

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Within it nothing is seen: what happens there is none of the model's."""
        self._rests, before = True, self._rests
        try:
            yield
        finally:
            self._rests = before

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # whatever torch's function gives
        args, rest = in_order(func, args, kwargs) if kwargs else (args, {})
        return func(*args, **rest) if self._rests else self.call(func, args, rest)

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """Make a call in the way of this mode.

        Args:
            func: one of torch's functions.
            args, kwargs: what it is given.

        Returns:
            What stands in its result's place.
        """
        return func(*args, **kwargs)


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type its modes
    """A mode in which :meth:`dispatch` sees every operation, but for what is in one of higher order: flex_attention."""

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
        if isinstance(func, HigherOrderOperator):
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

    ``padding_idx`` itself stays as it is, since a forward pass may read it: to count positions, say.  It is a mode of
    the dispatcher because a backward pass calls no function that a :class:`FunctionMode` sees.
    """

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`DispatchMode.dispatch`."""
        if func is torch.ops.aten.embedding_dense_backward.default:
            args = (*args[:_PLACE], -1, *args[_PLACE + 1 :])
        return func(*args, **kwargs)


class KeptGraph(FunctionMode):
    """Within it a computed tensor that is told to require no gradient stays as it is.

    Torch allows that of leaves only.  A slice of a buffer, as in ``self.pe[:, :n].requires_grad_(False)``, is one as
    long as the buffer requires none; to see which weights are at work all of them do.  It is a mode of functions, since
    this one never gets to the dispatcher.
    """

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        if func is Tensor.requires_grad_ and not args[0].is_leaf and not _asked(*args[1:], **kwargs):
            return args[0]
        return func(*args, **kwargs)


def _asked(requires_grad: bool = True) -> bool:  # the signature is torch's
    return requires_grad


def eagerly() -> AbstractContextManager[object]:
    """What was compiled runs as it is written: a compiled graph has its dtypes and constants built in.

    Nothing was compiled where torch's compiler was never imported, and that takes seconds.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    eagerly: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eagerly
