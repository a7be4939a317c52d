"""Dealing out the rows of an embedding, so that few tokens show as many of them as they can."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Deck:
    """Every word once, those that have to occur first; then words at random.

    Args:
        size: how many words there are, from 0.
        first: the words that have to occur.
        generator: of the order, and of what comes after the last.

    >>> deck = Deck(5, (3,), torch.Generator().manual_seed(0))
    >>> sorted(deck.deal(2).tolist() + deck.deal(3).tolist()), deck.left
    ([0, 1, 2, 3, 4], 0)
    """

    def __init__(self, size: int, first: Sequence[int], generator: torch.Generator) -> None:
        self._size = size
        self._generator = generator
        known = dict.fromkeys(first)
        others = [one for one in torch.randperm(size, generator=generator).tolist() if one not in known]
        self._words = torch.tensor([*known, *others], dtype=torch.long)

    @property
    def left(self) -> int:
        """How many words have not been dealt."""
        return len(self._words)

    def deal(self, count: int) -> Tensor:
        """So many words, [count], in a random order."""
        dealt, self._words = self._words[:count], self._words[count:]
        more = torch.randint(0, self._size, (count - len(dealt),), generator=self._generator)
        return torch.cat([dealt, more])[torch.randperm(count, generator=self._generator)]
