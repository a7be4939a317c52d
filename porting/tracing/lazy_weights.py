"""Weights that are read when an operation needs them, and freed afterwards.

A model with such weights needs the memory of one operation's weights only. The files are memory-mapped, so a weight
that is read twice in a short time is read from disk once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

PIECE = 64 * 2**20
"""Bytes of a weight that are cast at once, where an operation can process it by rows."""

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class LazyWeight(Tensor):
    """A tensor of which only shape and dtype are known until an operation needs its values.

    Args:
        read: returns the values, in any dtype; called by each operation that needs them.
        hollow: never read the values, so that results have the right shape and meaningless values.
    """

    read: Callable[[], Tensor]
    hollow: bool

    def __new__(
        cls, read: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype, *, hollow: bool = False
    ) -> LazyWeight:
        """Make a tensor without storage."""
        made: LazyWeight = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=torch.device("cpu")
        )
        made.read, made.hollow = read, hollow
        return made

    def values(self) -> Tensor:
        """Return the values, in this tensor's dtype."""
        if self.hollow:
            return torch.zeros((), dtype=self.dtype).expand(self.shape)
        with _disable_current_modes():
            return self.read().to(self.dtype)

    def stored(self) -> Tensor:
        """Return the values in the dtype of the file; modes do not see the reading."""
        with _disable_current_modes():
            return self.read()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # torch does not type it
        """Return the shape and dtype without reading values."""
        return f"LazyWeight({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:  # whatever torch's function gives
        """Process linear layers and lookups by parts of their weight, everything else in the dispatcher."""
        kwargs = kwargs or {}
        if func is F.linear and isinstance(args[1] if len(args) > 1 else kwargs.get("weight"), LazyWeight):
            return _linear(*args, **kwargs)
        if func is F.embedding and isinstance(args[1] if len(args) > 1 else kwargs.get("weight"), LazyWeight):
            return _embedding(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():  # the result is a plain tensor
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch has no default for args, and calls it with all
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:  # whatever torch's operation gives
        """Run an operation on the values."""
        if func in _SAME:
            (tensor,) = args
            return LazyWeight(tensor.read, tensor.shape, tensor.dtype, hollow=tensor.hollow)
        args, kwargs = tree_map(_plain, (args, kwargs or {}))
        return func(*args, **kwargs)


def _plain(value: object) -> object:
    return value.values() if isinstance(value, LazyWeight) else value


def _linear(input: Tensor, weight: LazyWeight, bias: Tensor | None = None) -> Tensor:  # noqa: A002  # torch's own names
    """Apply a linear layer by pieces of its outputs if the weight has to be cast, so that one piece is in memory."""
    if weight.hollow:
        return input.new_zeros((*input.shape[:-1], weight.shape[0]))
    stored = weight.stored()
    bias = bias.values() if isinstance(bias, LazyWeight) else bias
    rows = max(1, PIECE // (max(1, stored.shape[-1]) * weight.itemsize))
    if stored.dtype == weight.dtype or rows >= len(stored):
        return F.linear(input, weight.values(), bias)
    result = input.new_empty((*input.shape[:-1], len(stored)))
    for start in range(0, len(stored), rows):
        rows_of_piece = slice(start, start + rows)
        with _disable_current_modes():
            piece = stored[rows_of_piece].to(weight.dtype)
        result[..., rows_of_piece] = F.linear(input, piece, None if bias is None else bias[rows_of_piece])
    return result


def _embedding(input: Tensor, weight: LazyWeight, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002  # as above
    """Read and cast only the rows that are looked up."""
    if weight.hollow:
        return torch.zeros((), dtype=weight.dtype).expand(*input.shape, weight.shape[1]).clone()
    with _disable_current_modes():  # exact in any dtype, so nothing that a watcher of the model should see
        return F.embedding(input, weight.read(), *args, **kwargs).to(weight.dtype)


def with_lazy_weights(
    module: nn.Module,
    dtype: torch.dtype,
    sources: Mapping[int, Callable[[], Tensor]],
    *,
    hollow: bool = False,
) -> nn.Module:
    """Copy a module in eval mode, with lazy weights.

    Args:
        module: the module, which may be on the meta device.
        dtype: the dtype of the copy's floating-point weights.
        sources: functions that return the values, by the id of the parameter or buffer. Floating-point buffers that are
            not among them are cast, everything else is copied.
        hollow: as in :class:`LazyWeight`.
    """
    memo: dict[int, object] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        target_dtype = dtype if tensor.is_floating_point() else tensor.dtype
        if id(tensor) in sources:
            lazy = LazyWeight(sources[id(tensor)], tensor.shape, target_dtype, hollow=hollow)
            memo[id(tensor)] = nn.Parameter(lazy, requires_grad=False) if isinstance(tensor, nn.Parameter) else lazy
        elif not isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = tensor.detach().to(target_dtype, copy=True)
    copied = deepcopy(module, memo)
    copied.eval()  # a class of the user's own may have an eval that returns nothing
    return copied
