"""What a model does, as events that a planted mistake may answer."""

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
    """One thing that a model does.

    Attributes:
        kind: what it is; ``scores`` and ``context`` are attention's softmax and its product with the value.
        function, args, kwargs: the call.
        number: how many of its kind came before it in this pass.
        role: of a linear map, what became of its result in the pass that was watched; see :class:`Inventory`.
        scores: of attention, what is known of its scores.
        born: for each tensor of a sum, when it was made; none for a sum of embeddings.
        pass_: what is known of the whole pass.
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
        """The call, with other leading arguments or named ones."""
        return self.function(*(*args, *self.args[len(args) :]), **{**self.kwargs, **kwargs})

    def argument(self, place: int, name: str, default: Any = None) -> Any:  # whatever it is
        """An argument, wherever it stands."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)


SAME: set[Callable[..., Any]] = {
    Tensor.to,
    Tensor.float,
    Tensor.double,
    Tensor.contiguous,
    Tensor.type_as,
    F.dropout,
    F.linear,
}
VIEWS: set[Callable[..., Any]] = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, torch.unflatten}
BEND: set[Callable[..., Any]] = {torch.tanh, Tensor.tanh, F.tanh}


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What is known of attention's scores.

    Attributes:
        query: [... q d].
        key: [... k d].
        scale: what their product is multiplied by.
        bias: what is added to it and is no mask, or None.
        allowed: where a query may look, [... q k] of bool, or None for everywhere.
        cap: the product is capped softly at it; 0 for no cap.
        mixed: bias and mask came as one, so that nobody knows the bias where it is masked.
    """

    query: Tensor
    key: Tensor
    scale: float = 1.0
    bias: Tensor | None = None
    allowed: Tensor | None = None
    cap: float = 0.0
    mixed: bool = False

    def after(self, func: Callable[..., Any], rest: Sequence[Any], result: Tensor) -> Scores | None:
        """What is known after a step that gives ``result``; None when it is no step that attention takes."""
        kind, other = kind_of(func), rest[0] if rest else None
        if kind in (Kind.TIMES, Kind.QUOTIENT) and isinstance(other, int | float):
            return self.times(other if kind is Kind.TIMES else 1 / other)
        if func in BEND and self.bias is None and not self.cap:
            return replace(self, cap=1.0)
        if kind is Kind.SUM and isinstance(other, Tensor):
            return self.added(other)
        if kind is Kind.FILL and isinstance(other, Tensor):
            return self.closed(~other)
        if func in VIEWS and result.shape[-2:] == (self.query.shape[-2], self.key.shape[-2]):
            return self.viewed(result.shape)
        shifts = kind is Kind.DIFFERENCE and isinstance(other, Tensor) and other.shape[-1:] == (1,)  # a row by a number
        return self if shifts or func in SAME else None

    def product(self) -> Tensor:
        """Without any mask, [... q k]."""
        found = self.query @ self.key.mT * self.scale
        found = self.cap * torch.tanh(found / self.cap) if self.cap else found
        return found if self.bias is None else found + self.bias

    def times(self, factor: float) -> Scores:
        """What they are when they are multiplied."""
        return replace(self, scale=self.scale * factor, cap=self.cap * factor)

    def masked(self, scores: Tensor | None = None) -> Tensor:
        """With the mask."""
        found = self.product() if scores is None else scores
        return found if self.allowed is None else found.masked_fill(~self.allowed, torch.finfo(found.dtype).min / 2)

    def added(self, mask: Tensor) -> Scores:
        """With a mask or a bias."""
        if mask.dtype == torch.bool:
            return self.closed(mask)
        soft = mask.masked_fill(mask <= LOWEST, 0.0)
        kept = self.closed(mask > LOWEST) if bool((mask <= LOWEST).any()) else self
        if not bool(soft.any()):
            return kept
        return replace(kept, bias=soft if kept.bias is None else kept.bias + soft, mixed=kept is not self)

    def viewed(self, shape: torch.Size) -> Scores:
        """With the heads and the batch in other axes: [(b h) q k] -> [b h q k]."""

        def laid(tensor: Tensor) -> Tensor:
            return tensor.expand(*self.query.shape[:-2], *shape[-2:]).reshape(shape)

        query, key = (tensor.reshape(*shape[:-2], *tensor.shape[-2:]) for tensor in (self.query, self.key))
        bias, allowed = (None if tensor is None else laid(tensor) for tensor in (self.bias, self.allowed))
        return replace(self, query=query, key=key, bias=bias, allowed=allowed)

    def closed(self, allowed: Tensor) -> Scores:
        """With fewer places to look at."""
        return replace(self, allowed=allowed if self.allowed is None else self.allowed & allowed)


Action = Callable[[Event], Any]
"""What an event gives instead; ``NotImplemented`` where it does not apply."""


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """A mistake.

    Attributes:
        name: the entry of the catalogue.
        actions: by kind of event.
        only: at the events of these numbers alone, counted over those to which it applies; None for all.
        modules: in these modules' own code alone; None for all.
    """

    name: str
    actions: Mapping[str, Action]
    only: frozenset[int] | None = None
    modules: frozenset[str] | None = None


@dataclass
class Inventory:
    """What was seen in a pass without a mistake.

    Attributes:
        roles: for each linear map, in order: ``query``, ``key``, ``value``, ``output`` of attention, or ``""``.
        inner: the events that are steps of an activation that is written out, ``"activation 3"``, ``"sum 7"``.
    """

    roles: list[str] = field(default_factory=list)
    inner: set[str] = field(default_factory=set)


@dataclass
class Pass:
    """One pass of the model.

    Attributes:
        model: the model.
        inputs: its arguments, by name.
        sites: where the mistake was made: the modules that ran.
    """

    model: nn.Module
    inputs: Mapping[str, Tensor]
    inventory: Inventory
    sites: list[str]
    linears: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list)
