"""What happens in a model between one point and the next: which modules make it, and what makes it doubtful."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from porting.tracing.lift import Lifted, running, spelled
from porting.tracing.makers import Makers


@dataclass(frozen=True)
class Span:
    """From the point before up to a point.

    Attributes:
        modules: those that made the value at the point out of those at the points before, in order: whose own code
            ran, or which gave it on.
        lowered: what computed with less than float64: modules, each with its operations.
        random: whether random numbers were drawn.
    """

    modules: tuple[str, ...] = ()
    lowered: tuple[str, ...] = ()
    random: bool = False


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type its modes
    """Watches a float64 run and cuts what it sees into spans.

    What computes in float32 whatever its weights are, and is not put right (:mod:`porting.tracing.lift`), agrees
    with the float64 reference to float32's rounding only; that must be known before the difference is called a bug.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._makers = Makers()
        self._lowered: Lifted = {}
        self._state = torch.get_rng_state()
        self._aside = False
        self._thread = 0
        self._hooks = ExitStack()

    def __enter__(self) -> Watch:
        def leave(module: nn.Module, args: Any, output: Any) -> None:  # whatever a module is given and gives
            if threading.get_ident() == self._thread:  # a streamed verification runs several models in turn
                self._makers.gave(running(), output)

        self._thread = threading.get_ident()
        self._hooks.callback(register_module_forward_hook(leave).remove)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch does not type its modes
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]  # as above
        self._hooks.close()

    def cut(self, value: Tensor | None = None) -> Span:
        """What happened since the last cut.

        Args:
            value: which modules made this one is part of it; what happens from here to the next cut without a value, or
                to the next value that is put in, is none of the model's.
        """
        state = torch.get_rng_state()
        lowered = tuple(spelled({name: operations}) for name, operations in self._lowered.items())
        modules = () if value is None else self._makers.of(value)
        span = Span(modules, lowered, not torch.equal(state, self._state))
        self._lowered, self._state, self._aside = {}, state, value is not None
        return span

    def put(self, value: Tensor) -> Tensor:
        """A value that is put into the pass, and that no module made."""
        self._makers.put(value)
        self._aside = False
        return value

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # whatever torch's operation gives
        if isinstance(func, HigherOrderOperator):  # flex_attention, say: what is in it is not looked into
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._aside:
            return result
        self._makers.ran(running(), func, args, kwargs, result)
        if any(_low(one) for one in tree_leaves(result)) and any(
            isinstance(one, Tensor) and one.is_floating_point() for one in tree_leaves((args, kwargs))
        ):
            self._lowered.setdefault(running(), {})[str(func).removesuffix(".default")] = None
        return result


def _low(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 8
