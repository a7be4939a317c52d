"""Provenance of activations: the modules that computed each, the precision, and whether random numbers were drawn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from porting.tracing.calls import tensors_in
from porting.tracing.float64 import LoweredOperations, address_of, is_low_precision, running, spelled_operations
from porting.tracing.torch_modes import DispatchMode

Geometry = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, sizes and strides of a tensor in its storage."""


class Producers:
    """Tracks which modules each tensor was computed by.

    The producers of a tensor are the module that ran the operation, the modules that returned the tensor, and the
    producers of the operands. Weights, inputs and substituted values have none. Tensors are identified by the address
    of their values, since several objects may share one storage; the next operation overwrites a reused address.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._places: dict[
            int, dict[Geometry | None, int]
        ] = {}  # address -> part of the storage, or None for all -> bits

    def ran(
        self,
        module: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: object,
    ) -> None:
        """Note that an operation has run in a module.

        Args:
            module: the path of the module whose own code called it.
            func, args, kwargs, result: the operation, as seen by a dispatch mode.
        """
        operands = _tensors((args, kwargs))
        bits = 1 << self._numbers.setdefault(module, len(self._numbers))
        for tensor in operands:
            bits |= self._bits(tensor)
        addresses = {address_of(tensor) for tensor in operands}
        for tensor in _changed_in_place(func, args, kwargs):
            self._places[address_of(tensor)] = {None: bits}
        for tensor in _tensors(result):
            if (address := address_of(tensor)) in addresses:  # a view, or the argument itself
                self._places.setdefault(address, {})[_geometry(tensor)] = bits
            else:
                self._places[address] = {None: bits}

    def gave(self, module: str, output: object) -> None:
        """Note that a module has returned a tensor; its own code may have missed an operation on it."""
        bit = 1 << self._numbers.setdefault(module, len(self._numbers))
        for tensor in _tensors(output):
            self._places.setdefault(address_of(tensor), {})[_geometry(tensor)] = self._bits(tensor) | bit

    def put(self, value: Tensor) -> None:
        """Note a value that replaces an activation and was computed by no module."""
        self._places[address_of(value)] = {}

    def of(self, value: Tensor) -> tuple[str, ...]:
        """Return the modules that computed a value, in the order in which they first ran."""
        bits = self._bits(value)
        return tuple(name for name, number in self._numbers.items() if bits >> number & 1)

    def _bits(self, value: Tensor) -> int:
        known = self._places.get(address_of(value) or -1, {})  # a tensor without storage is a lazy weight
        return known.get(_geometry(value), known.get(None, 0))


def _tensors(tree: object) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):  # a container of another kind, such as a model output
        return tensors_in(tree)
    return [tensor for branch in tree for tensor in _tensors(branch)]


def _changed_in_place(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the arguments that an operation changes in place."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for place, argument in enumerate(schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
            yield value


def _geometry(tensor: Tensor) -> Geometry | None:
    """Return offset, sizes and strides; None for a nested or sparse tensor."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        return None
    return int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


@dataclass(frozen=True)
class Segment:
    """The computation between two points of a pass.

    Attributes:
        modules: the modules that computed the value at the second point from those at earlier points, in order.
        lowered: the modules that computed in less than float64, each with its operations.
        random: whether random numbers were drawn.
    """

    modules: tuple[str, ...] = ()
    lowered: tuple[str, ...] = ()
    random: bool = False


class ProvenanceRecorder(DispatchMode):
    """Records a float64 run in segments.

    Operations that compute in float32 whatever the weights are, and that :mod:`porting.tracing.float64` cannot correct,
    agree with the float64 reference only up to float32 rounding, which is not a bug.

    It is a mode of the dispatcher because only there it is known which operations return views or write in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self._producers = Producers()
        self._lowered: LoweredOperations = {}
        self._state: Tensor | None = None  # of torch's generator, from the first operation on
        self._paused = False
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
        """Return what happened since the last cut.

        Args:
            value: the tensor whose producers are returned. What happens until the next cut without a value, or until
                the next :meth:`put`, is not recorded.
        """
        state = torch.get_rng_state()
        lowered = tuple(spelled_operations({name: operations}) for name, operations in self._lowered.items())
        modules = () if value is None else self._producers.of(value)
        drew = self._state is not None and not torch.equal(state, self._state)
        segment = Segment(modules, lowered, drew)
        self._lowered, self._state, self._paused = {}, state, value is not None
        return segment

    def put(self, value: Tensor) -> Tensor:
        """Note a value that replaces an activation, and return it."""
        self._producers.put(value)
        self._paused = False
        return value

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`DispatchMode.dispatch`."""
        if self._state is None:
            self._state = torch.get_rng_state()
        result = func(*args, **kwargs)
        if self._paused:
            return result
        self._producers.ran(running(), func, args, kwargs, result)
        if any(is_low_precision(one) for one in tensors_in(result)) and any(
            one.is_floating_point() for one in tensors_in((args, kwargs))
        ):
            self._lowered.setdefault(running(), {})[str(func).removesuffix(".default")] = None
        return result
