"""What a model attends to in a text, as data: the shares of every head of every layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from porting.errors import Code, Fault, PortingError, nearest


class AttentionError(PortingError):
    """There is no such attention to be seen."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """The heads of one layer.

    Attributes:
        name: the module that holds them.
        heads: [h q k], float32: how much of its attention the token at q gives to the one at k; rows sum to 1.
    """

    name: str
    heads: Tensor = field(repr=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class Shares:
    """What a model attends to in one text, as numbers.

    Layers, heads and tokens are numbered from 0; negative numbers count from the end.

    Attributes:
        tokens: the word pieces, special tokens included.
        layers: the layers, in the order in which they ran.
        model: what attends, in words.
    """

    tokens: tuple[str, ...]
    layers: tuple[Layer, ...]
    model: str

    def of(self, layer: int, head: int) -> Tensor:
        """One head's probabilities, [q k], float32.

        Raises:
            AttentionError: there is no such layer or head.
        """
        heads = self.layers[self._index("layer", layer, len(self.layers))].heads
        return heads[self._index("head", head, len(heads))]

    def place(self, token: int | str) -> int:
        """The number of a token: its number, or its first place in the text by its spelling.

        Raises:
            AttentionError: there is no such token.
        """
        if isinstance(token, int):
            return self._index("token", token, len(self.tokens))
        if token in self.tokens:
            return self.tokens.index(token)
        hint = nearest(token, self.tokens) or f"it has {', '.join(map(repr, self.tokens[:20]))}"
        raise refused(f"the text has no token {token!r}", hint)

    def _index(self, what: str, number: int, count: int) -> int:
        if not -count <= number < count:
            raise refused(f"there is no {what} {number}", f"there are {count}, from 0 to {count - 1}")
        return number % count


def refused(message: str, hint: str) -> AttentionError:
    """The error that says what there is not."""
    return AttentionError(Fault(code=Code.NO_ATTENTION, message=message, hint=hint))
