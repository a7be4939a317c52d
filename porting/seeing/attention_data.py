"""The attention of a model in a text, as data: the shares of every head of every layer, always with the same axes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from porting.errors import Code, Fault, PortingError, nearest
from porting.tracing.trace import ARROW, PROBABILITIES


class AttentionError(PortingError):
    """The attention that was asked for does not exist."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """The heads of one layer.

    Attributes:
        heads: [h q k], float32: how much of its attention the token at q gives to the one at k; rows sum to 1.
    """

    name: str
    heads: Tensor = field(repr=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class Shares:
    """The attention of a model in one text, as numbers.

    Layers, heads and tokens are numbered from 0; negative numbers count from the end.

    Attributes:
        tokens: the tokens, special tokens included.
        layers: the layers, in the order in which they ran.
        special: the places of the tokens that the tokenizer added, as far as that is known.
    """

    tokens: tuple[str, ...]
    layers: tuple[Layer, ...]
    model: str
    special: tuple[int, ...] = ()

    def of(self, layer: int, head: int) -> Tensor:
        """One head's probabilities, [q k], float32."""
        heads = self.layers[self._index("layer", layer, len(self.layers))].heads
        return heads[self._index("head", head, len(heads))]

    def place(self, token: int | str | None) -> int:
        """The number of a token: its number, or its first place in the text by its spelling.

        None is token 0; where that attends only to itself, as in a causal model, the last token.
        """
        if token is None:
            alone = all(bool((layer.heads[:, 0, 0] == 1).all()) for layer in self.layers)
            return len(self.tokens) - 1 if alone else 0
        if isinstance(token, int):
            return self._index("token", token, len(self.tokens))
        if token in self.tokens:
            return self.tokens.index(token)
        hint = nearest(token, self.tokens) or f"it has {', '.join(map(repr, self.tokens[:20]))}"
        raise refused(f"the text has no token {token!r}", hint)

    def telling(self, token: int | str | None, *, layer: int | None = None, head: int | None = None) -> tuple[int, int]:
        """The head that shows most for a token: it gives the largest share to one other token of the text.

        Special tokens do not count: many heads give them whatever they give to nothing else.

        Args:
            token: the token that attends; None as in :meth:`place`.
            layer, head: the only layer or number of a head to choose from; None for all.

        Returns:
            The numbers of the layer and of the head.
        """
        place = self.place(token)
        layers = range(len(self.layers)) if layer is None else [self._index("layer", layer, len(self.layers))]
        others = [one for one in range(len(self.tokens)) if one != place and one not in self.special]
        best, most = (layers[0], 0), -1.0
        for number in layers:
            heads = self.layers[number].heads
            for other in range(len(heads)) if head is None else [self._index("head", head, len(heads))]:
                share = float(heads[other, place, others].max()) if others else 0.0
                if share > most:
                    best, most = (number, other), share
        return best

    def _index(self, what: str, number: int, count: int) -> int:
        if not -count <= number < count:
            raise refused(f"there is no {what} {number}", f"there are {count}, from 0 to {count - 1}")
        return number % count


def refused(message: str, hint: str) -> AttentionError:
    """The error with what does not exist, and a hint."""
    return AttentionError(Fault(code=Code.NO_ATTENTION, message=message, hint=hint))


CLOSE = 1e-3
"""A row of probabilities sums to 1 as nearly as this, in the coarsest floating-point type."""


def square(value: Tensor, length: int) -> Tensor | None:
    """Attention probabilities of one text as [h q k], whatever the order of their axes.

    The keys' axis is the one that sums to 1, the queries' the one before it or the last other of that length; what is
    left are heads, and a batch of 1.  (Where there are as many heads as tokens, only the usual orders, [h q k] and
    [q k h], can be told apart.)

    Returns:
        float32 on the CPU; None when this is no attention from the text to itself.

    >>> square(torch.full((1, 4, 3, 3), 1 / 3), 3).shape  # [b h q k]
    torch.Size([4, 3, 3])
    >>> square(torch.full((3, 3, 1), 1 / 3), 3).shape  # [q k b]
    torch.Size([1, 3, 3])
    >>> square(torch.rand(1, 2), 3) is None  # a classifier's
    True
    """
    value = value.detach().to("cpu", torch.float32)
    places = [place for place in range(value.ndim) if value.shape[place] == length]
    for keys in reversed(places):
        others = [place for place in places if place != keys]
        if others and ((value.sum(keys) - 1).abs() < CLOSE * max(length, 10)).all():
            queries = keys - 1 if keys - 1 in others else others[-1]
            return value.movedim((queries, keys), (-2, -1)).reshape(-1, length, length)
    return None


def gather(seen: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Layers of heads [h q k], each with the name of the module that holds it.

    Modules that compute one head each, ``layers.0.heads.3``, make a layer together: those whose names differ in the
    last number only, if an earlier number tells the layers apart, or the last one counts what is called heads.

    Args:
        seen: points and their values [h q k], in order of execution.
    """
    named = [(point.replace(f"{ARROW}{PROBABILITIES}", ""), value) for point, value in seen]
    parts = [_HEAD.fullmatch(name) for name, _ in named]
    last = {part[2] for part in parts if part}
    layers = {part[1] for part in parts if part}
    apart = len(layers) > 1 or any("head" in stem.rpartition(".")[2] for stem in layers)
    if not all(parts) or not apart or len(last) < 2 or any(len(value) > 1 for _, value in named):
        return named
    found: dict[str, list[Tensor]] = {}
    for part, (_, value) in zip(parts, named, strict=True):
        found.setdefault(part[1] if part else "", []).append(value)
    return [(name, torch.cat(values)) for name, values in found.items()]


_HEAD = re.compile(r"((?:.*[.])?\d+[.](?:.*[.])?[^.\d][^.]*)[.](\d+)(?:[.][^\d#]*)?")
"""A layer's number, more, and the number of a head: ``layers.`` 0 ``.attention.heads`` . 3 ``.core``."""
