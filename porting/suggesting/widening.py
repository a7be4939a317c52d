"""Running a model altogether in float64: its own casts to fewer digits are left out.

A norm that works in float32 whatever its weights are, or a softmax that does, is rounding and not meaning; and with
weights of float64 it may not run at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class Widening(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Casts of a float64 tensor to a narrower floating type give float64.

    Attributes:
        met: whether there was one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.met = False

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # whatever torch's operation takes and gives
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        cast = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in _NARROW
        if cast and isinstance(first, Tensor) and first.dtype == torch.float64:
            self.met = True
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def widened(module: nn.Module) -> nn.Module:
    """The same module, whose forward runs so in float64 from now on, and takes images in its weights' type."""
    kind = type(module)

    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        dtype = next((one.dtype for one in self.parameters() if one.is_floating_point()), torch.float64)

        def fit(one: object) -> object:
            return one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one

        with Widening() if dtype == torch.float64 else nullcontext():
            return kind.forward(self, *map(fit, args), **{name: fit(one) for name, one in kwargs.items()})

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return module
