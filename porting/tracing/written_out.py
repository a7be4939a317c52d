"""Operations that torch has no float64 kernel or no gradient for, computed in steps that have both.

A float64 run must not fail where the model is right: ``grouped_mm``, with which a mixture of experts multiplies, takes
float32 and less only, and ``batch_norm`` in eval mode has no gradient for its running statistics, which are weights
like any others.  Within :class:`WrittenOut` both are computed in other words.  An operation that torch refuses since
one of its arguments is a float32 constant of the model's own is given float64 throughout.  Nothing else is changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

_GROUPED = frozenset(one for one in (getattr(torch, "_grouped_mm", None), getattr(F, "grouped_mm", None)) if one)


class WrittenOut(TorchFunctionMode):
    """Within it a model runs in float64, and has gradients, where torch itself refuses."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # whatever torch's function gives
        kwargs = kwargs or {}
        if func in _GROUPED and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            return grouped_mm(*args, **kwargs)
        if func is F.batch_norm:
            found = _batch_norm(*args, **kwargs)
            if found is not None:
                return found
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            every = {one.dtype for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
            if not _MIXED.search(str(error)) or not {torch.float32, torch.float64} <= every:
                raise
            # a constant that the model makes in float32 whatever its weights are: in float32 they would agree
            args, kwargs = tree_map_only(Tensor, _doubled, (args, kwargs))
            return func(*args, **kwargs)


_MIXED = re.compile(r"expected scalar type|same dtype|should be the same|dtype mismatch|to have the same|but got")
"""What torch says of an operation that is given float32 and float64 at once."""


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype == torch.float32 else tensor


def grouped_mm(mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, **others: Any) -> Tensor:
    """What ``torch.nn.functional.grouped_mm`` computes, one matrix product for each group.

    Source: the documentation of that function.

    Args:
        mat_a: [n k], rows sorted by group, or [g m k].
        mat_b: [g k m], or [k m] whose columns are sorted by group.
        offs: [g], where each group ends along the axis that is sorted.
        others: ``bias``, ``out_dtype``.

    >>> a, b = torch.randn(5, 3, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    >>> torch.equal(grouped_mm(a, b, torch.tensor([2, 5])), torch.cat([a[:2] @ b[0], a[2:] @ b[1]]))
    True
    """
    if offs is None:
        found = mat_a @ mat_b
    else:
        ends = [0, *offs.tolist()]
        spans = list(pairwise(ends))
        if mat_a.ndim == 2 and mat_b.ndim == 3:  # axes, as the docstring has them
            parts = [mat_a[start:end] @ one for (start, end), one in zip(spans, mat_b, strict=True)]
            rest = mat_a.new_zeros(mat_a.shape[0] - ends[-1], mat_b.shape[-1])  # rows of no group
            found = torch.cat([*parts, rest])
        elif mat_a.ndim == 3:  # as above
            found = torch.cat([one @ mat_b[:, start:end] for (start, end), one in zip(spans, mat_a, strict=True)], 1)
        else:
            found = torch.stack([mat_a[:, start:end] @ mat_b[start:end] for start, end in spans])
    bias = others.get("bias")
    return found if bias is None else found + bias


def _batch_norm(  # the signature of torch.nn.functional.batch_norm
    input: Tensor,  # noqa: A002  # torch's own name
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """A batch norm with gradients for its running statistics; None where torch's own does."""
    if training or running_mean is None or running_var is None:
        return None
    if not (running_mean.requires_grad or running_var.requires_grad):
        return None
    shape = [1, -1, *[1] * (input.ndim - 2)]
    found = (input - running_mean.view(shape)) / torch.sqrt(running_var.view(shape) + eps)
    found = found if weight is None else found * weight.view(shape)
    return found if bias is None else found + bias.view(shape)
