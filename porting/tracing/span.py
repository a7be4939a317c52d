"""What happens in a model between one point and the next: which modules run, and what makes a result doubtful."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from porting.tracing.lift import Lifted, running, spelled


@dataclass(frozen=True)
class Span:
    """From the point before up to a point.

    Attributes:
        modules: those with weights of their own or without parts that ran, in order.
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

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._modules: list[str] = []
        self._lowered: Lifted = {}
        self._state = torch.get_rng_state()

    def ran(self, module: str) -> None:
        """A module has run."""
        self._modules.append(module)

    def cut(self) -> Span:
        """What happened since the last cut."""
        state = torch.get_rng_state()
        lowered = tuple(spelled({name: operations}) for name, operations in self._lowered.items())
        span = Span(tuple(dict.fromkeys(self._modules)), lowered, not torch.equal(state, self._state))
        self._modules, self._lowered, self._state = [], {}, state
        return span

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # whatever torch's operation gives
        result = func(*args, **(kwargs or {}))
        if any(_low(one) for one in tree_leaves(result)) and any(
            isinstance(one, Tensor) and one.is_floating_point() for one in tree_leaves((args, kwargs))
        ):
            self._lowered.setdefault(running(), {})[str(func).removesuffix(".default")] = None
        return result


def _low(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 8
