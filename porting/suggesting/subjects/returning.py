"""What a forward returns, whatever it is packed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass

from torch import Tensor
from torch.utils._pytree import tree_leaves


def tensors_of(returned: object) -> list[Tensor]:
    """The tensors in tuples, lists, mappings and dataclasses, in order.

    >>> from types import MappingProxyType
    >>> import torch
    >>> one, two = torch.zeros(1), torch.ones(1)
    >>> tensors_of((one, MappingProxyType({"two": [two], "name": "x"}))) == [one, two]
    True
    """
    match returned:
        case Tensor():
            return [returned]
        case Mapping():
            parts = list(returned.values())
        case list() | tuple():
            parts = list(returned)
        case _ if is_dataclass(returned) and not isinstance(returned, type):
            parts = list(vars(returned).values())
        case _:
            return [one for one in tree_leaves(returned) if isinstance(one, Tensor)]
    return [tensor for part in parts for tensor in tensors_of(part)]


def numbers_of(returned: object) -> list[Tensor]:
    """Those of floating-point numbers."""
    return [one for one in tensors_of(returned) if one.is_floating_point()]
