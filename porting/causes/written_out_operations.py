"""Recognising norms and activations that a model writes out, while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from porting.causes.functions import RMS, activation_of, norm_of
from porting.tracing.calls import Kind, tensors_in

ELEMENTWISE = {
    "add", "sub", "mul", "div", "true_divide", "pow", "square", "sqrt", "rsqrt", "exp", "erf", "tanh", "sigmoid", "neg",
    "reciprocal", "clamp", "clamp_min", "maximum", "where", "relu", "gt", "float", "double", "to", "type_as", "type",
    "mean", "sum", "var", "std", "var_mean", "std_mean", "log", "log1p", "softplus", "getitem", "rsub", "rdiv", "abs",
}  # fmt: skip
"""Functions with which norms and activations are written."""

ROOTS = {"sqrt", "rsqrt", "std", "pow", "std_mean"}
NONLINEAR = {"erf", "tanh", "sigmoid", "exp", "clamp", "clamp_min", "maximum", "where", "gt", "relu"}
"""A norm has at least one of the first among its steps, an activation one of the second."""

FINAL = {"mul", "div", "true_divide", "where", "clamp", "clamp_min", "maximum", "add"}
"""Functions that may be the last step."""

MAX_DEPTH = 14
"""Largest number of steps of a norm or an activation."""


def plain_name(function: Callable[..., Any]) -> str:
    """Return a function's name, the same for a function, a method, an operator and its in-place form."""
    name: str = getattr(function, "__name__", "")
    name = name.strip("_").removesuffix("_")
    return {"truediv": "div", "rmul": "mul", "radd": "add", "imul": "mul", "itruediv": "div", "rtruediv": "rdiv"}.get(
        name, name.removeprefix("i") if name in ("iadd", "isub") else name
    )


@dataclass(frozen=True)
class _Step:
    name: str
    given: tuple[Any, ...]


@dataclass(frozen=True)
class Norm:
    """A norm, as far as its steps have been seen.

    Attributes:
        kind: ``layer`` or ``rms``.
        eps, weight, bias: its parameters; None as far as they have not been applied.
    """

    kind: str
    source: Tensor
    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None

    @property
    def event(self) -> tuple[Kind, Callable[..., Any], tuple[Any, ...]]:
        """The norm as an event: its kind, a function that computes it, and the function's arguments."""
        shape = self.source.shape[-1:]
        if self.kind == RMS:
            return Kind.RMS, rms_norm, (self.source, shape, self.weight, self.bias, self.eps)
        return Kind.NORM, F.layer_norm, (self.source, shape, self.weight, self.bias, self.eps)


def rms_norm(value: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute an RMSNorm with the signature of a layer norm."""
    made = F.rms_norm(value, shape, weight, eps)
    return made if bias is None else made + bias


class WrittenOutOperations:
    """The written-out operations in one pass of a model.

    Args:
        parameters: the ids of the model's parameters.
    """

    def __init__(self, parameters: set[int]) -> None:
        self._parameters = parameters
        self._step_of: dict[int, _Step] = {}
        self._order: dict[int, int] = {}
        self._known_norms: dict[int, Norm] = {}
        self._tensors: list[Any] = []

    def remember(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Note a call."""
        name = plain_name(function)
        if name in ELEMENTWISE:
            step = _Step(name, (*args, *kwargs.values()))
            for tensor in tensors_in(result):
                self._step_of[id(tensor)] = step
                self._order.setdefault(id(tensor), len(self._order))
                self._tensors.append(tensor)

    def norm(self, function: Callable[..., Any], args: tuple[Any, ...], result: Any) -> Norm | None:
        """Return the norm that a result completes: after its division, its gain or its bias. None if it is none."""
        if not isinstance(result, Tensor) or plain_name(function) not in ("mul", "div", "true_divide", "add"):
            return None
        grown = self._extended(plain_name(function), args)
        if grown is not None:
            return grown
        if plain_name(function) == "add":
            return None
        names, sources, numbers, weights = self._steps_before(args)
        if not ROOTS & names:
            return None
        for weight in (None, *weights):  # the gain may have been multiplied before the division
            found = norm_of(result if weight is None else result / weight, sources, numbers)
            if found is not None:
                return Norm(found.kind, sources[found.source], found.eps, weight)
        return None

    def became(self, result: Any, norm: Norm) -> None:
        """Note that a result is a norm's, with or without a mistake."""
        self._known_norms[id(result)] = norm
        self._tensors.append(result)

    def _extended(self, name: str, args: tuple[Any, ...]) -> Norm | None:
        """Return a norm extended by a gain or a bias."""
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        norm = next((self._known_norms[id(tensor)] for tensor in tensors if id(tensor) in self._known_norms), None)
        vector = next((tensor for tensor in tensors if id(tensor) not in self._known_norms and tensor.ndim == 1), None)
        if norm is None or vector is None:
            return None
        if name == "mul" and norm.weight is None and norm.bias is None and self._is_gain(vector):
            return Norm(norm.kind, norm.source, norm.eps, vector)
        if name == "add" and norm.bias is None and id(vector) in self._parameters:
            return Norm(norm.kind, norm.source, norm.eps, norm.weight, vector)
        return None

    def _is_gain(self, vector: Tensor) -> bool:
        """Return whether a vector is a parameter, or one with a number added."""
        step = self._step_of.get(id(vector))
        summands = () if step is None or step.name != "add" else step.given
        return id(vector) in self._parameters or any(id(tensor) in self._parameters for tensor in summands)

    def activation(self, function: Callable[..., Any], args: tuple[Any, ...], result: Any) -> Tensor | None:
        """Return the input of the activation that a result completes; None if it is none."""
        if not isinstance(result, Tensor) or plain_name(function) not in FINAL:
            return None
        names, sources, _, _ = self._steps_before(args)
        if not NONLINEAR & (names | {plain_name(function)}) or id(result) in self._known_norms:
            return None
        found = activation_of(result, sources)
        return None if found is None else sources[found[0]]

    def inside(self, args: tuple[Any, ...], source: Tensor) -> set[int]:
        """Return the ids of the tensors between an activation's input and its last step."""
        ids: set[int] = set()
        pending = tensors_in(args)
        while pending:
            tensor = pending.pop()
            if tensor is not source and id(tensor) not in ids:
                ids.add(id(tensor))
                step = self._step_of.get(id(tensor))
                pending += [] if step is None else tensors_in(step.given)
        return ids

    def _steps_before(self, args: tuple[Any, ...]) -> tuple[set[str], list[Tensor], list[float], list[Tensor]]:
        """Return the steps before a call, the tensors they read (oldest first), numbers, and parameter vectors."""
        names: set[str] = set()
        tensors: dict[int, Tensor] = {}
        numbers: list[float] = []
        pending, depth = list(tree_leaves(args)), 0
        while pending and depth < MAX_DEPTH:
            depth += 1
            next_level: list[Any] = []
            for tensor in pending:
                if isinstance(tensor, Tensor) and id(tensor) not in tensors:
                    tensors[id(tensor)] = tensor
                    step = None if id(tensor) in self._known_norms and depth > 1 else self._step_of.get(id(tensor))
                    if step is not None:
                        names.add(step.name)
                        next_level += tree_leaves(step.given)
                elif isinstance(tensor, float):
                    numbers.append(tensor)
            pending = next_level
        sources = [tensor for tensor in tensors.values() if id(tensor) not in self._parameters]
        sources.sort(key=lambda tensor: self._order.get(id(tensor), -1))
        vectors = [tensor for tensor in tensors.values() if id(tensor) in self._parameters and tensor.ndim == 1]
        return names, sources, numbers, vectors
