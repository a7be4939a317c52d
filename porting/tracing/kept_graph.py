"""A gradient graph that the forward does not cut: ``requires_grad_(False)`` on what was computed from a buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


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
