"""Provenance of activations: which modules produced each, in which precision, and whether random numbers were drawn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from porting.tracing.float64 import LoweredOperations, running, spelled_operations
from porting.tracing.torch_modes import DispatchMode

Geometry = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, sizes and strides: which part of a storage a tensor shows."""


class Producers:
    """Follows what every operation reads and gives.

    A tensor's producers are the module that ran the operation, those that gave the tensor on, and those of what the
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
        for tensor in given:
            made |= self._bits(tensor)
        held = {_values_at(tensor) for tensor in given}
        for tensor in _written(func, args, kwargs):
            self._places[_values_at(tensor)] = {None: made}
        for tensor in _tensors(result):
            if (address := _values_at(tensor)) in held:  # a view, or the argument itself
                self._places.setdefault(address, {})[_geometry(tensor)] = made
            else:
                self._places[address] = {None: made}

    def gave(self, module: str, output: object) -> None:
        """A module has given something: it may have done nothing to it where it should have done something."""
        bit = 1 << self._numbers.setdefault(module, len(self._numbers))
        for tensor in _tensors(output):
            self._places.setdefault(_values_at(tensor), {})[_geometry(tensor)] = self._bits(tensor) | bit

    def put(self, value: Tensor) -> None:
        """A value that the model goes on with, and that no module made."""
        self._places[_values_at(value)] = {}

    def of(self, value: Tensor) -> tuple[str, ...]:
        """The modules that made a value, in the order in which they first ran."""
        bits = self._bits(value)
        return tuple(name for name, number in self._numbers.items() if bits >> number & 1)

    def _bits(self, value: Tensor) -> int:
        known = self._places.get(_values_at(value) or -1, {})  # what is nowhere yet is a weight
        return known.get(_geometry(value), known.get(None, 0))


def _tensors(tree: object) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):  # an output of another kind, as a model has
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [tensor for branch in tree for tensor in _tensors(branch)]


def _written(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The arguments that an operation changes in place."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for place, argument in enumerate(schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
            yield value


def _geometry(tensor: Tensor) -> Geometry | None:
    """Offset, shape and strides; None for a nested or sparse tensor, which has no such."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        return None
    return int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


def _values_at(tensor: Tensor) -> int:
    """Where its values lie; 0 where that is nowhere yet, as a weight's that is read where it is needed."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


@dataclass(frozen=True)
class Segment:
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


class ProvenanceRecorder(DispatchMode):
    """Watches a float64 run and cuts what it sees into spans.

    What computes in float32 whatever its weights are, and is not put right (:mod:`porting.tracing.float64`), agrees
    with the float64 reference to float32's rounding only; that must be known before the difference is called a bug.

    It is a mode of the dispatcher because that tells which operations give views or write in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self._producers = Producers()
        self._lowered: LoweredOperations = {}
        self._state: Tensor | None = None  # of torch's generator; a pass may seed it before its first operation
        self._aside = False
        self._thread = 0
        self._hooks = ExitStack()

    def __enter__(self) -> ProvenanceRecorder:
        def leave(module: nn.Module, args: Any, output: Any) -> None:  # whatever a module is given and gives
            if threading.get_ident() == self._thread:  # a streamed verification runs several models in turn
                self._producers.gave(running(), output)

        self._thread = threading.get_ident()
        self._hooks.callback(register_module_forward_hook(leave).remove)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch does not type its modes
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]  # as above
        self._hooks.close()

    def cut(self, value: Tensor | None = None) -> Segment:
        """What happened since the last cut.

        Args:
            value: which modules made this one is part of it; what happens from here to the next cut without a value, or
                to the next value that is put in, is none of the model's.
        """
        state = torch.get_rng_state()
        lowered = tuple(spelled_operations({name: operations}) for name, operations in self._lowered.items())
        modules = () if value is None else self._producers.of(value)
        drew = self._state is not None and not torch.equal(state, self._state)
        span = Segment(modules, lowered, drew)
        self._lowered, self._state, self._aside = {}, state, value is not None
        return span

    def put(self, value: Tensor) -> Tensor:
        """A value that is put into the pass, and that no module made."""
        self._producers.put(value)
        self._aside = False
        return value

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`DispatchMode.dispatch`."""
        if self._state is None:
            self._state = torch.get_rng_state()
        result = func(*args, **kwargs)
        if self._aside:
            return result
        self._producers.ran(running(), func, args, kwargs, result)
        if any(_low(leaf) for leaf in tree_leaves(result)) and any(
            isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in tree_leaves((args, kwargs))
        ):
            self._lowered.setdefault(running(), {})[str(func).removesuffix(".default")] = None
        return result


def _low(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 8
