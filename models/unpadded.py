"""A ragged batch without its padding: where each token goes, and who attends to whom.

Rows of different lengths stand in a rectangle [b s] whose other places hold padding, and a model computes there too: of
16 rows of up to 256 tokens with 1,024 real ones, three quarters of the work is for nothing. Here the n real tokens
stand in one long row [1 n]. Embeddings, linear layers, norms and activations look at one token at a time and do not
notice; only attention mixes tokens, so it has to know which of them belong to one row.

    [b s] -- pack --> [1 n] -- the encoder --> [1 n e] -- unpack --> [b s e], 0 where padding is

Short rows stand first, so that rows of one length are neighbours and attend in one call. Papers: Zeng et al. 2022,
"Boosting Distributed Training Performance of the Unpadded BERT Model"; Zhai et al. 2023, "ByteTransformer" (the zero
padding algorithm).

>>> rows = Rows(torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 1]]))
>>> packed = rows.pack(torch.tensor([[7, 8, 9], [4, 0, 0], [5, 6, 3]]))
>>> packed
tensor([[4, 7, 8, 9, 5, 6, 3]])
>>> rows.groups
[(1, 1), (2, 3)]
>>> rows.unpack(packed)
tensor([[7, 8, 9],
        [4, 0, 0],
        [5, 6, 3]])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Rows"]

Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""Query, key, value [g l e] and what is added to the scores -> the context [g l e], and what is not used here."""


class Rows:
    """Where the rows of a batch stand when its tokens are packed.

    Args:
        attention_mask: [b s], any dtype, 1 or True = a token, 0 or False = padding, anywhere in a row.

    Attributes:
        shape: b and s.
        groups: (g, l) for g rows of l tokens each, in the order of the packed tokens.
    """

    def __init__(self, attention_mask: Tensor) -> None:
        real = attention_mask.to(torch.bool)  # [b s]
        batch, width = self.shape = (real.shape[0], real.shape[1])
        lengths, order = real.sum(dim=-1).sort(stable=True)  # [b] each, shorter rows first
        places = torch.arange(batch * width, device=real.device).view(batch, width)
        self._places = places[order][real[order]]  # [n], where in [(b s)] each packed token stands
        sizes = Counter(lengths.tolist())  # l -> g
        self.groups = [(rows, length) for length, rows in sizes.items() if length]
        self._biases: list[Tensor | None] = [None] * len(self.groups)

    def pack(self, padded: Tensor) -> Tensor:
        """[b s ...] -> [1 n ...], without what stands in padding."""
        return padded.flatten(0, 1).index_select(0, self._places)[None]

    def unpack(self, packed: Tensor) -> Tensor:
        """[1 n ...] -> [b s ...], 0 where padding is."""
        batch, width = self.shape
        empty = packed.new_zeros(batch * width, *packed.shape[2:])  # [(b s) ...]
        return empty.index_copy(0, self._places, packed[0]).view(batch, width, *packed.shape[2:])

    def split(self, packed: Tensor) -> list[Tensor]:
        """[1 n ...] -> [g l ...] for each group: views."""
        parts = torch.split(packed[0], [rows * length for rows, length in self.groups])
        return [part.view(*group, *part.shape[1:]) for part, group in zip(parts, self.groups, strict=True)]

    def add(self, bias: Tensor) -> None:
        """From now on adds to the scores a bias [1 h s s], of the places that query and key have in their row."""
        width = self.shape[1]
        within = [part % width for part in self.split(self._places[None])]  # [g l] each: the place in the row
        self._biases = [bias[0][:, at[:, :, None], at[:, None, :]].transpose(0, 1) for at in within]  # [g h l l] each

    def attend(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Query, key, value [1 n e] -> context [1 n e]: every token attends to those of its own row."""
        if not self.groups:
            return query  # of no token
        parts = zip(self.split(query), self.split(key), self.split(value), self._biases, strict=True)
        contexts = [attention(q, k, v, bias)[0].flatten(0, 1) for q, k, v, bias in parts]  # [(g l) e] each
        return torch.cat(contexts)[None]
