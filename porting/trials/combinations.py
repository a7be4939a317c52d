"""Short lists in which every combination occurs: of the values of properties, and of tokens in a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product

import torch

CANDIDATES = 20
"""Choices that are drawn; the best one is taken."""


def covering(properties: Mapping[str, Sequence[str]], generator: torch.Generator) -> list[dict[str, str]]:
    """Choices of a value for each property, so that each two values of two properties stand together in one of them.

    Most faults of software depend on one or two conditions (Kuhn, Wallace and Gallo, "Software fault interactions and
    implications for software testing", 2004): that takes few choices, where trying all takes the product.

    Args:
        properties: name -> its values.
        generator: draws the choices; of several, the one with the most pairs that are not covered yet is taken.
    """
    values = [[(name, value) for value in some] for name, some in properties.items()]
    missing = {pair for some, others in combinations(values, 2) for pair in product(some, others)}
    found: list[dict[str, str]] = []
    while missing:
        fixed = dict(min(missing))  # this pair is covered whatever is drawn, so that this comes to an end
        drawn = [
            {some[0][0]: some[int(torch.randint(len(some), (), generator=generator))][1] for some in values} | fixed
            for _ in range(CANDIDATES)
        ]
        new = [missing.intersection(combinations(choice.items(), 2)) for choice in drawn]
        best = max(range(CANDIDATES), key=[len(one) for one in new].__getitem__)
        missing -= new[best]
        found.append(drawn[best])
    return found


def de_bruijn(letters: Sequence[int], order: int) -> list[int]:
    """The shortest row in which every word of ``order`` letters stands once, begun with the first letter.

    Built from Lyndon words (Fredricksen and Maiorana, "Necklaces of beads in k colors and k-ary de Bruijn sequences",
    1978); the first letters stand once more at its end.

    >>> de_bruijn([5, 7], 2)
    [5, 5, 7, 7, 5]
    """
    found: list[int] = []
    word = [-1]
    while word:
        word[-1] += 1
        if order % len(word) == 0:
            found += word
        word = (word * order)[:order]
        while word and word[-1] == len(letters) - 1:
            word.pop()
    return [letters[one] for one in [*found, *(found * order)[: order - 1]]]
