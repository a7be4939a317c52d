"""Norms and activations that a model writes out, found while it runs: it is known what each tensor was made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from porting.causes.functions import RMS, activation_of, norm_of
from porting.tracing.calls import Kind

ELEMENTWISE = {
    "add", "sub", "mul", "div", "true_divide", "pow", "square", "sqrt", "rsqrt", "exp", "erf", "tanh", "sigmoid", "neg",
    "reciprocal", "clamp", "clamp_min", "maximum", "where", "relu", "gt", "float", "double", "to", "type_as", "type",
    "mean", "sum", "var", "std", "var_mean", "std_mean", "log", "log1p", "softplus", "getitem", "rsub", "rdiv", "abs",
}  # fmt: skip
"""What a norm or an activation is written with."""

ROOTS = {"sqrt", "rsqrt", "std", "pow", "std_mean"}
BENDS = {"erf", "tanh", "sigmoid", "exp", "clamp", "clamp_min", "maximum", "where", "gt", "relu"}
"""A norm has one of the first among its steps, an activation one of the second."""

FINAL = {"mul", "div", "true_divide", "where", "clamp", "clamp_min", "maximum", "add"}
"""What its last step may be."""

DEPTH = 14
"""A norm or an activation has so many steps at most."""


def plain(function: Callable[..., Any]) -> str:
    """A function's name, whether it is a method, an operator or works in place."""
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
    """A norm so far.

    Attributes:
        kind: ``layer`` or ``rms``.
        given: what is normed.
        eps, weight, bias: as far as they have been seen.
    """

    kind: str
    given: Tensor
    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None

    @property
    def event(self) -> tuple[Kind, Callable[..., Any], tuple[Any, ...]]:
        """As an event: its kind, a function that computes it, and the function's arguments."""
        shape = self.given.shape[-1:]
        if self.kind == RMS:
            return Kind.RMS, rms_norm, (self.given, shape, self.weight, self.bias, self.eps)
        return Kind.NORM, F.layer_norm, (self.given, shape, self.weight, self.bias, self.eps)


def rms_norm(value: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """An RMSNorm with the signature of a layer norm."""
    made = F.rms_norm(value, shape, weight, eps)
    return made if bias is None else made + bias


class Written:
    """What is written out in one pass of a model.

    Args:
        parameters: the ids of the model's parameters.
    """

    def __init__(self, parameters: set[int]) -> None:
        self._parameters = parameters
        self._made: dict[int, _Step] = {}
        self._born: dict[int, int] = {}
        self._norms: dict[int, Norm] = {}
        self._kept: list[Any] = []

    def remember(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any
    ) -> None:
        """A call was made."""
        name = plain(function)
        if name in ELEMENTWISE:
            step = _Step(name, (*args, *kwargs.values()))
            for tensor in (leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)):
                self._made[id(tensor)] = step
                self._born.setdefault(id(tensor), len(self._born))
                self._kept.append(tensor)

    def norm(self, function: Callable[..., Any], args: tuple[Any, ...], result: Any) -> Norm | None:
        """The norm that a result is, if it is one: after its division, its gain or its bias."""
        if not isinstance(result, Tensor) or plain(function) not in ("mul", "div", "true_divide", "add"):
            return None
        grown = self._grown(plain(function), args)
        if grown is not None:
            return grown
        if plain(function) == "add":
            return None
        names, sources, numbers, weights = self._behind(args)
        if not ROOTS & names:
            return None
        for weight in (None, *weights):  # the gain may have been multiplied before the division
            found = norm_of(result if weight is None else result / weight, sources, numbers)
            if found is not None:
                return Norm(found.kind, sources[found.source], found.eps, weight)
        return None

    def became(self, result: Any, norm: Norm) -> None:
        """A result is a norm's, as it is or with a mistake in it."""
        self._norms[id(result)] = norm
        self._kept.append(result)

    def _grown(self, name: str, args: tuple[Any, ...]) -> Norm | None:
        """A norm that a gain is multiplied to, or a bias added."""
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        known = next((self._norms[id(tensor)] for tensor in tensors if id(tensor) in self._norms), None)
        other = next((tensor for tensor in tensors if id(tensor) not in self._norms and tensor.ndim == 1), None)
        if known is None or other is None:
            return None
        if name == "mul" and known.weight is None and known.bias is None and self._gains(other):
            return Norm(known.kind, known.given, known.eps, other)
        if name == "add" and known.bias is None and id(other) in self._parameters:
            return Norm(known.kind, known.given, known.eps, known.weight, other)
        return None

    def _gains(self, vector: Tensor) -> bool:
        """Whether a vector is a parameter, or one with a number added."""
        step = self._made.get(id(vector))
        given = () if step is None or step.name != "add" else step.given
        return id(vector) in self._parameters or any(id(tensor) in self._parameters for tensor in given)

    def activation(self, function: Callable[..., Any], args: tuple[Any, ...], result: Any) -> Tensor | None:
        """What an activation was written for whose last step this is."""
        if not isinstance(result, Tensor) or plain(function) not in FINAL:
            return None
        names, sources, _, _ = self._behind(args)
        if not BENDS & (names | {plain(function)}) or id(result) in self._norms:
            return None
        found = activation_of(result, sources)
        return None if found is None else sources[found[0]]

    def inside(self, args: tuple[Any, ...], given: Tensor) -> set[int]:
        """The ids of the tensors between what an activation was given and its last step."""
        found: set[int] = set()
        waiting = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        while waiting:
            tensor = waiting.pop()
            if tensor is not given and id(tensor) not in found:
                found.add(id(tensor))
                step = self._made.get(id(tensor))
                waiting += (
                    [] if step is None else [each for each in tree_leaves(step.given) if isinstance(each, Tensor)]
                )
        return found

    def _behind(self, args: tuple[Any, ...]) -> tuple[set[str], list[Tensor], list[float], list[Tensor]]:
        """The steps behind a call, the tensors that they read, the oldest first, numbers, and vectors of parameters."""
        names: set[str] = set()
        tensors: dict[int, Tensor] = {}
        numbers: list[float] = []
        waiting, depth = list(tree_leaves(args)), 0
        while waiting and depth < DEPTH:
            depth += 1
            further: list[Any] = []
            for tensor in waiting:
                if isinstance(tensor, Tensor) and id(tensor) not in tensors:
                    tensors[id(tensor)] = tensor
                    step = None if id(tensor) in self._norms and depth > 1 else self._made.get(id(tensor))
                    if step is not None:
                        names.add(step.name)
                        further += tree_leaves(step.given)
                elif isinstance(tensor, float):
                    numbers.append(tensor)
            waiting = further
        found = [tensor for tensor in tensors.values() if id(tensor) not in self._parameters]
        found.sort(key=lambda tensor: self._born.get(id(tensor), -1))
        vectors = [tensor for tensor in tensors.values() if id(tensor) in self._parameters and tensor.ndim == 1]
        return names, found, numbers, vectors
