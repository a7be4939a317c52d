"""Which modules made an activation: those whose own code ran, or which it passed, on the way from what was given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Geometry = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, sizes and strides: which part of a storage a tensor shows."""


class Makers:
    """Follows what every operation reads and gives.

    A tensor's makers are the module that ran the operation, those that gave the tensor on, and the makers of what the
    operation read.  A weight, an input and a value that is put in from outside have none.  Tensors are known by where
    their values lie, since one may have several objects; what lies there next was made by an operation again.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._places: dict[int, dict[Geometry | None, int]] = {}  # address -> part, or None for all -> bits of numbers

    def ran(
        self,
        module: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: object,
    ) -> None:
        """An operation has run in a module.

        Args:
            module: whose own code asked for it.
            func, args, kwargs, result: the operation, as a dispatch mode sees it.
        """
        given = _tensors((args, kwargs))
        made = 1 << self._numbers.setdefault(module, len(self._numbers))
        for one in given:
            made |= self._bits(one)
        held = {_address(one) for one in given}
        for one in _written(func, args, kwargs):
            self._places[_address(one)] = {None: made}
        for one in _tensors(result):
            if (address := _address(one)) in held:  # a view, or the argument itself
                self._places.setdefault(address, {})[_geometry(one)] = made
            else:
                self._places[address] = {None: made}

    def gave(self, module: str, output: object) -> None:
        """A module has given something: it may have done nothing to it where it should have done something."""
        bit = 1 << self._numbers.setdefault(module, len(self._numbers))
        for one in _tensors(output):
            self._places.setdefault(_address(one), {})[_geometry(one)] = self._bits(one) | bit

    def put(self, value: Tensor) -> None:
        """A value that the model goes on with, and that no module made."""
        self._places[_address(value)] = {}

    def of(self, value: Tensor) -> tuple[str, ...]:
        """The modules that made a value, in the order in which they first ran."""
        bits = self._bits(value)
        return tuple(name for name, number in self._numbers.items() if bits >> number & 1)

    def _bits(self, value: Tensor) -> int:
        known = self._places.get(_address(value) or -1, {})  # what is nowhere yet is a weight
        return known.get(_geometry(value), known.get(None, 0))


def _tensors(tree: object) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):  # an output of another kind, as a model has
        return [one for one in tree_leaves(tree) if isinstance(one, Tensor)]
    return [tensor for one in tree for tensor in _tensors(one)]


def _written(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The arguments that an operation changes in place."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for place, one in enumerate(schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(one.name)
        if one.alias_info is not None and one.alias_info.is_write and isinstance(value, Tensor):
            yield value


def _geometry(tensor: Tensor) -> Geometry | None:
    """Offset, shape and strides; None for a nested or sparse tensor, which has no such."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        return None
    return int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


def _address(tensor: Tensor) -> int:
    """Where its values lie; 0 where that is nowhere yet, as a weight's that is read where it is needed."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0
