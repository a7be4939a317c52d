"""Embeddings that are not the reference's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from porting.causes.anatomy import Anatomy, Embedding
from porting.causes.cause import Cause, after, other, reads
from porting.causes.functions import SCALING
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call


@dataclass(frozen=True, kw_only=True)
class Left(Cause):
    """One kind of embedding is left out of the sum."""

    role: str

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each embedding of that kind."""
        for one in anatomy.embeddings:
            if one.role == self.role:
                yield other(one.call, after(torch.zeros_like))


class TypesIgnored(Cause):
    """All tokens are of the first type."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each embedding of token types, where there are several."""
        for one in anatomy.embeddings:
            if one.role == "types" and bool(anatomy.tape[one.ids].any()):
                yield other(one.call, looked_up(one, torch.zeros_like(anatomy.tape[one.ids])))


def looked_up(one: Embedding, ids: Tensor) -> Rewrite:
    """The embedding of other numbers; beyond the table's end its last row."""

    def rewrite(values: Values, call: Call) -> Tensor:
        weight = values[one.weight]
        return F.embedding(ids.clamp(0, weight.shape[0] - 1), weight)

    return rewrite


class PositionOffset(Cause):
    """Positions that are counted from somewhere else."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each embedding of positions, by up to two."""
        for one in anatomy.embeddings:
            if one.role == "positions":
                for offset in (-2, -1, 1, 2):
                    yield other(one.call, looked_up(one, anatomy.tape[one.ids] + offset), f"off by {offset:+d}")


class PositionsAroundPadding(Cause):
    """Positions that skip padding, or that do not."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each embedding of positions whose rows count otherwise in a padded batch."""
        mask = anatomy.inputs.get("attention_mask")
        for one in anatomy.embeddings:
            ids = anatomy.tape[one.ids]
            if one.role != "positions" or mask is None or ids.ndim != 2 or mask.shape[-1] != ids.shape[-1]:
                continue
            first = int(ids.min())
            for start in dict.fromkeys((first, max(first - 1, 0))):
                yield other(one.call, looked_up(one, start + torch.arange(ids.shape[-1]).expand_as(mask)))
                yield other(one.call, looked_up(one, start + (mask.cumsum(-1) - 1).clamp_min(0) * mask))
                yield other(one.call, looked_up(one, start + mask.cumsum(-1) * mask))


class PositionsFromTheEnd(Cause):
    """The last token has position 0."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each embedding of positions."""
        for one in anatomy.embeddings:
            if one.role == "positions":
                yield other(one.call, looked_up(one, anatomy.tape[one.ids].flip(-1)))


class ScaleMissing(Cause):
    """The embeddings are not scaled."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each embedding that is multiplied by a number."""
        for one in anatomy.embeddings:
            for call in anatomy.tape.users(one.call.result):
                number = next((arg for arg in call.args if isinstance(arg, int | float) and arg != 1), None)
                if call.name in SCALING and number is not None:
                    yield other(call, reads(one.call.result))


class ScaleExtra(Cause):
    """The embeddings are scaled though they should not be."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each embedding of words; where it is scaled already, once more."""
        for one in anatomy.embeddings:
            if one.role == "words":
                yield other(one.call, after(lambda value: value * value.shape[-1] ** 0.5))


class PaddingRow(Cause):
    """The padding word's embedding is zero."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each embedding of words that has a padding word."""
        for one in anatomy.embeddings:
            word = one.call.argument(2, "padding_idx")
            if one.role == "words" and isinstance(word, int) and word >= 0:
                yield other(one.call, self._without(anatomy.tape[one.ids] == word))

    @staticmethod
    def _without(places: Tensor) -> Rewrite:
        return after(lambda value: value.masked_fill(places[..., None], 0.0))


class WordsPermuted(Cause):
    """A special token was put before the vocabulary, so that every word has its neighbour's row."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each embedding of words, by one."""
        for one in anatomy.embeddings:
            if one.role == "words":
                for offset in (-1, 1):
                    rows = anatomy.tape[one.weight].shape[0]
                    ids = (anatomy.tape[one.ids] + offset) % rows
                    yield other(one.call, looked_up(one, ids), f"off by {offset:+d}")


CAUSES: tuple[Cause, ...] = (
    TypesIgnored(
        name="token types ignored",
        what="every token has the first type, whatever token_type_ids says",
        looks="nothing in texts of one segment; the second segment differs",
        fix="pass token_type_ids on to the embeddings",
    ),
    Left(
        name="token types missing",
        what="no token type embedding is added, not even the first type's",
        looks="everything differs by a constant: row 0 is added also when no types are given",
        fix="add token_type(zeros) when none are given, or fold row 0 into the positions",
        role="types",
    ),
    PositionOffset(
        name="position offset",
        what="positions are counted from another number",
        looks="large differences; the shapes fit",
        fix="see where the reference's table begins: at 0, or behind pad_token_id, which is often 2",
    ),
    PositionsAroundPadding(
        name="positions counted around padding",
        what="padding is skipped when positions are counted, or it is not skipped where it should be",
        looks="nothing in a batch without padding",
        fix="see what the reference counts: all tokens, or only those that are no padding",
    ),
    PositionsFromTheEnd(
        name="positions counted from the end",
        what="the last token has the first position",
        looks="large differences",
        fix="arange(s)",
    ),
    Left(
        name="positions missing",
        what="no position embedding is added",
        looks="the model does not see the order of words",
        fix="add the position embedding to the word's",
        role="positions",
    ),
    ScaleMissing(
        name="embedding scale missing",
        what="the word embeddings are not multiplied by sqrt(hidden_size)",
        looks="positions outweigh the words",
        fix="scale_embedding in the config: multiply by sqrt(d_model) before the positions are added",
    ),
    ScaleExtra(
        name="embedding scale that should not be there",
        what="the word embeddings are multiplied by sqrt(hidden_size)",
        looks="words outweigh the positions",
        fix="see scale_embedding in the config; without it nothing is scaled",
    ),
    PaddingRow(
        name="padding word zeroed",
        what="the padding word's embedding is 0, where the checkpoint has another",
        looks="positions of padding differ; the others do not, where padding is masked",
        fix="load the row as it is; padding_idx only keeps it from being trained",
    ),
    WordsPermuted(
        name="vocabulary shifted",
        what="every word has the row of its neighbour",
        looks="everything differs from the embeddings on",
        fix="compare the tokenizer's ids with the table's rows",
    ),
)
