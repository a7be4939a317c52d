"""The base classes of all torch modes of this library, and two modes with which more weights get gradients.

A :class:`FunctionMode` sees the functions that a model's code calls, such as ``F.linear`` or ``Tensor.softmax``, and
can find the caller's line. A :class:`DispatchMode` sees the operations below, also those inside torch's own code and in
a backward pass, such as ``addmm`` or ``native_dropout``. Both normalise the order of arguments, and pass operators of
higher order through.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from porting.tracing.calls import in_order

_PLACE = 3
"""Position of the argument ``padding_idx`` of ``embedding_dense_backward``."""


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A torch function with its arguments, by position and by name."""

Redirection = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Call]

_REDIRECTIONS: list[Redirection] = []
"""The changes that are made to a call before a mode sees it."""


class FunctionMode(TorchFunctionMode):
    """A mode in which :meth:`call` sees every call of a torch function, with its arguments in the signature's order."""

    def __init__(self) -> None:
        super().__init__()
        self._resting = False

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Return a context in which the mode sees nothing."""
        self._resting, before = True, self._resting
        try:
            yield
        finally:
            self._resting = before

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # whatever torch's function gives
        for redirect in _REDIRECTIONS:
            func, args, kwargs = redirect(func, args, kwargs or {})
        args, rest = in_order(func, args, kwargs or {})
        return func(*args, **rest) if self._resting else self.call(func, args, rest)

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """Make a call in the way of this mode; without an override, unchanged.

        Returns:
            The result.
        """
        return func(*args, **kwargs)


@contextmanager
def redirecting(redirect: Redirection) -> Iterator[None]:
    """Return a context in which each call of a torch function is made as ``redirect`` says, and modes see that call."""
    _REDIRECTIONS.append(redirect)
    try:
        with FunctionMode():
            yield
    finally:
        _REDIRECTIONS.remove(redirect)


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type its modes
    """A mode in which :meth:`dispatch` sees every operation, except inside operators of higher order."""

    supports_higher_order_operators = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]  # as above

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch then adds no wrapper that hides the mode from torch.compile, which is off here anyway.

        The wrapper takes about as long as the mode itself, for every operation.
        """
        return False

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

        Returns:
            The result.
        """
        raise NotImplementedError


class GradientOfEveryRow(DispatchMode):
    """Gives rows at ``padding_idx`` a gradient: ``with GradientOfEveryRow(): loss.backward()``.

    ``padding_idx`` itself is not changed, because a forward pass may read it, for example to count positions. It is a
    mode of the dispatcher because a backward pass calls no torch functions.
    """

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`DispatchMode.dispatch`."""
        if func is torch.ops.aten.embedding_dense_backward.default:
            args = (*args[:_PLACE], -1, *args[_PLACE + 1 :])
        return func(*args, **kwargs)


class KeptGraph(FunctionMode):
    """Ignores ``requires_grad_(False)`` on computed tensors.

    Torch allows it for leaves only. A slice of a buffer, as in ``self.pe[:, :n].requires_grad_(False)``, is a leaf
    until the buffer requires a gradient, which all buffers do while it is measured which weights matter. It is a mode
    of functions because this call never gets to the dispatcher.
    """

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        if func is Tensor.requires_grad_ and not args[0].is_leaf and not _requested(*args[1:], **kwargs):
            return args[0]
        return func(*args, **kwargs)


def _requested(requires_grad: bool = True) -> bool:  # the signature is torch's
    return requires_grad


@contextmanager
def eagerly() -> Iterator[None]:
    """Return a context in which compiled modules run as written, since a compiled graph has fixed dtypes and constants.

    If torch's compiler was never imported, which takes seconds, nothing was compiled yet. But ``flex_attention``
    imports it when it is called for the first time, and compiles itself.
    """
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    before = getattr(flex, FLEX_SWITCH, False)
    if flex is not None:
        setattr(flex, FLEX_SWITCH, True)
    try:
        with nullcontext() if "torch._dynamo" not in sys.modules else torch.compiler.set_stance("force_eager"):
            yield
    finally:
        if flex is not None:
            setattr(flex, FLEX_SWITCH, before)


FLEX_SWITCH = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
"""The switch of torch's module ``flex_attention`` by which it does not compile itself."""
