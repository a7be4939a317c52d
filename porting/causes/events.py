"""The operations of a model in a pass, as events whose result a planted mistake can replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.causes.functions import LOWEST
from porting.tracing.calls import Kind, kind_of


@dataclass(frozen=True, kw_only=True)
class Event:
    """One call of a torch function that a mistake may replace.

    Attributes:
        kind: the kind of call; ``scores`` and ``context`` are attention's softmax and its product with the value.
        number: the number of earlier calls of its kind in this pass.
        role: the role of a linear layer, as of :class:`Inventory`.
        scores: the parts of attention's scores.
        born: when each tensor of a sum was computed; empty for a sum of embeddings.
    """

    kind: Kind
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    number: int
    role: str = ""
    scores: Scores | None = None
    born: tuple[int, ...] = ()
    pass_: Pass

    def run(self, *args: Any, **kwargs: Any) -> Any:  # what torch's function takes and gives
        """Make the call, with other leading arguments or named ones."""
        return self.function(*(*args, *self.args[len(args) :]), **{**self.kwargs, **kwargs})

    def argument(self, position: int, name: str, default: Any = None) -> Any:  # whatever it is
        """Return an argument, whether it was passed by position or by name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


VALUE_PRESERVING: set[Callable[..., Any]] = {
    Tensor.to,
    Tensor.float,
    Tensor.double,
    Tensor.contiguous,
    Tensor.type_as,
    F.dropout,
    F.linear,
}
VIEWS: set[Callable[..., Any]] = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, torch.unflatten}
TANH: set[Callable[..., Any]] = {torch.tanh, Tensor.tanh, F.tanh}


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The parts of attention's scores, ``scale * query @ key.mT`` with cap, bias and mask.

    Attributes:
        query: [... q d].
        key: [... k d].
        scale: the factor of their product.
        bias: what is added and is no mask, or None.
        allowed: the keys that are not hidden, [... q k] of bool, or None for all.
        cap: the soft cap of the product; 0 for none.
        mixed: bias and mask were added as one tensor, so that the bias of hidden keys is unknown.
    """

    query: Tensor
    key: Tensor
    scale: float = 1.0
    bias: Tensor | None = None
    allowed: Tensor | None = None
    cap: float = 0.0
    mixed: bool = False

    def after(self, func: Callable[..., Any], rest: Sequence[Any], result: Tensor) -> Scores | None:
        """Return the parts after a call on the scores.

        Args:
            func: the torch function.
            rest: its arguments without the scores.

        Returns:
            The parts, or None if it is not a call that attention makes.
        """
        kind, other = kind_of(func), rest[0] if rest else None
        if kind in (Kind.TIMES, Kind.QUOTIENT) and isinstance(other, int | float):
            return self.times(other if kind is Kind.TIMES else 1 / other)
        if func in TANH and self.bias is None and not self.cap:
            return replace(self, cap=1.0)
        if kind is Kind.SUM and isinstance(other, Tensor):
            return self.plus(other)
        if kind is Kind.FILL and isinstance(other, Tensor):
            return self.hiding(~other)
        if func in VIEWS and result.shape[-2:] == (self.query.shape[-2], self.key.shape[-2]):
            return self.viewed(result.shape)
        shifts = (
            kind is Kind.DIFFERENCE and isinstance(other, Tensor) and other.shape[-1:] == (1,)
        )  # subtracts a number per row
        return self if shifts or func in VALUE_PRESERVING else None

    def product(self) -> Tensor:
        """Return the scores without a mask, [... q k]."""
        scores = self.query @ self.key.mT * self.scale
        scores = self.cap * torch.tanh(scores / self.cap) if self.cap else scores
        return scores if self.bias is None else scores + self.bias

    def times(self, factor: float) -> Scores:
        """Return the parts of the multiplied scores."""
        return replace(self, scale=self.scale * factor, cap=self.cap * factor)

    def masked(self, scores: Tensor | None = None) -> Tensor:
        """Return the scores with the mask."""
        unmasked = self.product() if scores is None else scores
        return (
            unmasked
            if self.allowed is None
            else unmasked.masked_fill(~self.allowed, torch.finfo(unmasked.dtype).min / 2)
        )

    def plus(self, mask: Tensor) -> Scores:
        """Return the parts after a mask or a bias was added."""
        if mask.dtype == torch.bool:
            return self.hiding(mask)
        bias = mask.masked_fill(mask <= LOWEST, 0.0)
        masked = self.hiding(mask > LOWEST) if bool((mask <= LOWEST).any()) else self
        if not bool(bias.any()):
            return masked
        return replace(masked, bias=bias if masked.bias is None else masked.bias + bias, mixed=masked is not self)

    def viewed(self, shape: torch.Size) -> Scores:
        """Return the parts with heads and batch in other axes, [(b h) q k] -> [b h q k]."""

        def expanded(tensor: Tensor) -> Tensor:
            return tensor.expand(*self.query.shape[:-2], *shape[-2:]).reshape(shape)

        query, key = (tensor.reshape(*shape[:-2], *tensor.shape[-2:]) for tensor in (self.query, self.key))
        bias, allowed = (None if tensor is None else expanded(tensor) for tensor in (self.bias, self.allowed))
        return replace(self, query=query, key=key, bias=bias, allowed=allowed)

    def hiding(self, allowed: Tensor) -> Scores:
        """Return the parts with more keys hidden."""
        return replace(self, allowed=allowed if self.allowed is None else self.allowed & allowed)


Action = Callable[[Event], Any]
"""An event -> its result with the mistake, or ``NotImplemented`` where the mistake does not apply."""


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """A mistake that can be planted.

    Attributes:
        name: the entry of the catalogue.
        actions: the mistake, by kind of event.
        only: the numbers of the events at which it is made, counted over those to which it applies; None for all.
        modules: the paths of the modules in whose own code it is made; None for all.
    """

    name: str
    actions: Mapping[str, Action]
    only: frozenset[int] | None = None
    modules: frozenset[str] | None = None


@dataclass
class Inventory:
    """The observations in a pass without a mistake.

    Attributes:
        roles: the role of each linear layer, in order: ``query``, ``key``, ``value``, ``output``, or ``""``.
        inner: the events that are steps of a written-out activation, ``"activation 3"``, ``"sum 7"``.
    """

    roles: list[str] = field(default_factory=list)
    inner: set[str] = field(default_factory=set)


@dataclass
class Pass:
    """One forward pass of the model.

    Attributes:
        inputs: the tensors among its arguments, by name.
        sites: the paths of the modules in which the mistake was made.
    """

    model: nn.Module
    inputs: Mapping[str, Tensor]
    inventory: Inventory
    sites: list[str]
    linears: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list)
