"""Where a token stands, and positions that are computed: a sine and a cosine of each of several frequencies.

Paper: Vaswani et al. 2017, "Attention Is All You Need", section 3.5. ``classifier.py``, ``language_model.py`` and
``seq2seq.py`` add sinusoids to their embeddings. Counting without padding is fairseq's (``fairseq/utils.py``,
``make_positions``), and so RoBERTa's and MPNet's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["counted_positions", "sinusoidal_positions"]


def counted_positions(input_ids: Tensor, padding: int) -> Tensor:
    """The positions of tokens that are counted without padding: 0 for padding, wherever it stands, and 1, 2, ... else.

    Args:
        input_ids: [b s], integer.
        padding: the token that is not counted.

    Returns:
        [b s].

    >>> counted_positions(torch.tensor([[1, 1, 7, 8]]), 1)
    tensor([[0, 0, 1, 2]])
    """
    real = input_ids.ne(padding).long()  # [b s]
    return real.cumsum(-1) * real


def sinusoidal_positions(length: int, hidden_size: int) -> Tensor:
    """The table of section 3.5, [s e]: sin and cos of position / 10000^(2 k / e), side by side for each k.

    >>> sinusoidal_positions(2, 4)
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0100, 0.9999]])
    """
    positions = torch.arange(length, dtype=torch.float64)  # [s]
    frequencies = torch.exp(torch.arange(0, hidden_size, 2, dtype=torch.float64) * (-math.log(10000.0) / hidden_size))
    angles = torch.outer(positions, frequencies)  # [s e/2]
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).to(torch.get_default_dtype())  # [s (e/2 2)]
