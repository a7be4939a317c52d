"""Following what a conversion of transformers does to tensors: it is run on tensors that have a layout and no values.

Nothing is known here of any operation of transformers.  Whatever it calls of torch is seen, and what only moves
elements is noted; anything that computes is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from porting.registries.layout import (
    Axis,
    LayoutError,
    Part,
    Source,
    concatenated,
    divided,
    reshaped,
    stacked,
    unify,
)


class FollowedTensor(Tensor):
    """A tensor on the meta device that knows which elements of which source it holds.

    Attributes:
        entire: it is the one source, with nothing done to it yet.
    """

    axes: tuple[Axis, ...]
    sources: tuple[Source, ...]
    entire: bool

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, and note what it did."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        results = list(result) if isinstance(result, tuple | list) else [result]
        if not any(isinstance(one, Tensor) for one in results):
            return result
        name = getattr(func, "__name__", str(func))
        if name in _JOINING:
            return _joined(name, [*args], kwargs, result)
        held = next((one for one in args if isinstance(one, FollowedTensor)), None)
        done = _FOLLOWED.get(name)
        if held is None or done is None or sum(isinstance(one, Tensor) for one in (*args, *kwargs.values())) > 1:
            message = f"torch's {name!r}"
            raise LayoutError(message)
        layouts, entire = done(held, func, args[1:], kwargs, results), name in _AS_IT_IS and held.entire
        made = [
            follow(one.as_subclass(Tensor), axes, held.sources, entire=entire)
            for one, axes in zip(results, layouts, strict=True)
        ]
        return type(result)(made) if isinstance(result, tuple | list) else made[0]


def follow(
    tensor: Tensor, axes: tuple[Axis, ...], sources: tuple[Source, ...], *, entire: bool = False
) -> FollowedTensor:
    """A meta tensor with a layout."""
    made: FollowedTensor = tensor.as_subclass(FollowedTensor)
    made.axes, made.sources, made.entire = axes, sources, entire
    return made


def opened(name: str, shape: Sequence[int], dtype: torch.dtype) -> FollowedTensor:
    """A tensor of a file, every axis an index of its own."""
    axes = tuple((Part(one),) for one in shape)
    source = Source(names=[name], axes=axes)
    return follow(torch.empty(tuple(shape), dtype=dtype, device="meta"), axes, (source,), entire=True)


Layouts = list[tuple[Axis, ...]]


def _kept(held: FollowedTensor, func: Any, args: Sequence[Any], kwargs: Any, results: Sequence[Tensor]) -> Layouts:
    if any(one.dtype != held.dtype or one.shape != held.shape for one in results):
        message = f"a cast from {held.dtype} to {results[0].dtype}"
        raise LayoutError(message)
    return [held.axes for _ in results]


def _reshaped(held: FollowedTensor, func: Any, args: Sequence[Any], kwargs: Any, results: Sequence[Tensor]) -> Layouts:
    return [reshaped(held.axes, one.shape) for one in results]


def _permuted(held: FollowedTensor, func: Any, args: Sequence[Any], kwargs: Any, results: Sequence[Tensor]) -> Layouts:
    """The same on a tensor whose sizes tell its axes apart says where each goes."""
    told = func(torch.empty(tuple(range(held.dim())), device="meta"), *args, **kwargs)
    return [tuple(held.axes[number] for number in told.shape)]


def _cut(held: FollowedTensor, func: Any, args: Sequence[Any], kwargs: Any, results: Sequence[Tensor]) -> Layouts:
    place = next((n for n in range(held.dim()) if results[0].shape[n] != held.shape[n]), 0)
    pieces = divided(held.axes[place], [one.shape[place] for one in results])
    return [(*held.axes[:place], piece, *held.axes[place + 1 :]) for piece in pieces]


Follower = Callable[[FollowedTensor, Any, Sequence[Any], Any, Sequence[Tensor]], Layouts]

_AS_IT_IS = frozenset({"contiguous", "clone", "detach", "to", "cpu"})

_FOLLOWED: dict[str, Follower] = {
    **dict.fromkeys(_AS_IT_IS, _kept),
    **dict.fromkeys(("reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze"), _reshaped),
    **dict.fromkeys(("transpose", "swapaxes", "permute", "t", "movedim"), _permuted),
    **dict.fromkeys(("chunk", "split", "tensor_split", "split_with_sizes"), _cut),
}

_JOINING = ("cat", "concat", "concatenate", "stack")


def _joined(name: str, args: list[Any], kwargs: dict[str, Any], result: Tensor) -> FollowedTensor:
    tensors = list(args[0] if args else kwargs["tensors"])
    if not all(isinstance(one, FollowedTensor) for one in tensors):
        message = f"torch's {name!r} of a constant"
        raise LayoutError(message)
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    sources = tuple(source for one in tensors for source in one.sources)
    place = dim % result.dim()
    plain = result.as_subclass(Tensor)
    if name == "stack":
        count, axes = stacked(
            [one.axes for one in tensors], [one.sources[0] if one.entire else None for one in tensors]
        )
        return follow(plain, (*axes[:place], (count,), *axes[place:]), sources)
    first = tensors[0].axes
    for other in tensors[1:]:
        for number, (mine, theirs) in enumerate(zip(first, other.axes, strict=True)):
            if number != place:
                unify(theirs, mine)
    whole = first[place] if len(tensors) == 1 else (concatenated([one.axes[place] for one in tensors]),)
    return follow(plain, (*first[:place], whole, *first[place + 1 :]), sources)
