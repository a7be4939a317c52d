"""Embeddings that differ from the reference's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from porting.causes.cause import Cause, alter, alter_each, free_parameter, map_result, replace_with
from porting.causes.fitting import FreeParameter, geometric
from porting.causes.functions import SCALING
from porting.causes.model_parts import Embedding, ModelParts
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call, Ref


def _of(role: str) -> Callable[[ModelParts], Iterator[Embedding]]:
    return lambda model_parts: model_parts.embeddings_of(role)


def _zeros(embedding: Embedding) -> Rewrite:
    return map_result(torch.zeros_like)


def _first_type(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each token type embedding that is given several types, with the first for all tokens."""
    for embedding in model_parts.embeddings_of("types"):
        ids = model_parts.tape[embedding.ids]
        if bool(ids.any()):
            yield alter(embedding.call, looked_up(embedding, torch.zeros_like(ids)))


def looked_up(embedding: Embedding, ids: Tensor) -> Rewrite:
    """Return the rewrite that looks up other rows; indices beyond the table are moved to its nearest end."""

    def rewrite(values: Values, call: Call) -> Tensor:
        weight = values[embedding.weight]
        return F.embedding(ids.clamp(0, weight.shape[0] - 1), weight)

    return rewrite


OFFSETS = (-2, -1, 1, 2)
"""The usual offsets; any other is searched where none of these fits."""

MAX_OFFSET = 600
"""Largest offset that is searched."""


def _usual_offsets(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each position embedding with the usual offsets, of all tokens or of all but padding."""
    for embedding in model_parts.embeddings_of("positions"):
        ids = model_parts.tape[embedding.ids]
        for offset in OFFSETS:
            for counted in (torch.ones_like(ids), *_not_padding(model_parts, ids)):
                yield alter(embedding.call, looked_up(embedding, ids + offset * counted), f"off by {offset:+d}")


def _solved_offset(model_parts: ModelParts) -> Iterator[FreeParameter]:
    """Yield the offset of each position embedding, as far as the table has rows."""
    for embedding in model_parts.embeddings_of("positions"):
        ids = model_parts.tape[embedding.ids]
        least, most = -int(ids.max()), model_parts.tape[embedding.weight].shape[0] - 1 - int(ids.min())
        offsets = [offset for offset in range(max(least, -MAX_OFFSET), min(most, MAX_OFFSET) + 1) if offset]
        if offsets:
            rewrite = partial(_counted, embedding, partial(torch.add, ids))
            yield free_parameter(embedding.call, rewrite, "off by {}".format, offsets, integer=True)


def _solved_end(model_parts: ModelParts) -> Iterator[FreeParameter]:
    """Yield the last position of each position embedding, below the largest of the batch."""
    for embedding in model_parts.embeddings_of("positions"):
        ids = model_parts.tape[embedding.ids]
        ends = range(max(int(ids.max()) - MAX_OFFSET, 1), int(ids.max()))
        for positions, detail in (
            (ids.clamp_max, "they stop at {}"),
            (partial(_begun_again, ids), "they begin again after {}"),
        ):
            if ends:
                rewrite = partial(_counted, embedding, positions)
                yield free_parameter(embedding.call, rewrite, detail.format, ends, integer=True)


def _begun_again(ids: Tensor, end: int) -> Tensor:
    return ids % (end + 1)


def _counted(embedding: Embedding, positions: Callable[[int], Tensor], number: float) -> Rewrite:
    return looked_up(embedding, positions(int(number)))


def _around_padding(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each position embedding with each other way to count a padded row."""
    for embedding in model_parts.embeddings_of("positions"):
        ids = model_parts.tape[embedding.ids]
        if ids.ndim != 2:
            continue
        first = int(ids.min())
        for not_padding in _not_padding(model_parts, ids):
            unpadded_rows = not_padding.bool().all(-1)
            expected = ids.expand_as(not_padding)[unpadded_rows]
            for start in dict.fromkeys((first, max(first - 1, 0))):
                countings = (
                    torch.arange(ids.shape[-1]).expand_as(not_padding),
                    (not_padding.cumsum(-1) - 1).clamp_min(0) * not_padding,
                    not_padding.cumsum(-1) * not_padding,
                    (not_padding.cumsum(-1) - 1).clamp_min(0),
                )
                for positions in countings:
                    if torch.equal((start + positions)[unpadded_rows], expected):  # else it is another offset
                        yield alter(embedding.call, looked_up(embedding, start + positions))


def _not_padding(model_parts: ModelParts, ids: Tensor) -> Iterator[Tensor]:
    """Yield 1 for tokens and 0 for padding [b s], by the attention mask, and by the padding token of an embedding."""
    masks = [model_parts.inputs.get("attention_mask")]
    for embedding in model_parts.embeddings_of("tokens"):
        padding = embedding.call.argument(2, "padding_idx")
        if isinstance(padding, int):
            masks.append((model_parts.tape[embedding.ids] != padding).long())
    for mask in masks:
        fits = mask is not None and mask.ndim == ids.ndim == 2 and mask.shape[-1] == ids.shape[-1]
        if fits and mask is not None and len(ids) in (1, len(mask)):
            yield mask


def _from_the_end(model_parts: ModelParts) -> Iterator[Alteration]:
    for embedding in model_parts.embeddings_of("positions"):
        yield alter(embedding.call, looked_up(embedding, model_parts.tape[embedding.ids].flip(-1)))


def _unscaled(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each embedding that is multiplied by a number."""
    for embedding in model_parts.embeddings:
        for call in model_parts.tape.users(embedding.call.result):
            number = number_of(model_parts, call)
            if call.name in SCALING and number is not None and number != 1:
                yield alter(call, replace_with(embedding.call.result))


def number_of(model_parts: ModelParts, call: Call) -> float | None:
    """Return the number that a call was given, as a Python number or as a tensor without parameters."""
    for argument in call.args:
        if isinstance(argument, int | float):
            return float(argument)
        if (
            isinstance(argument, Ref)
            and model_parts.tape[argument].ndim == 0
            and not model_parts.tape.learned(argument)
        ):
            return float(model_parts.tape[argument])
    return None


def _by_root_of_width(embedding: Embedding) -> Rewrite:
    return map_result(lambda value: value * value.shape[-1] ** 0.5)


def _solved_scale(model_parts: ModelParts) -> Iterator[FreeParameter]:
    """Yield the scale of each token embedding."""
    for embedding in model_parts.embeddings_of("tokens"):
        number = scale_of(model_parts, embedding)
        expected = scale_text(number, model_parts.tape[embedding.weight].shape[-1])
        detail = f"word embeddings are multiplied by {{}} where the reference has {expected}".format
        yield free_parameter(embedding.call, partial(_scaled_to, number), detail, geometric(1e-3, 1e3, 3))


def scale_of(model_parts: ModelParts, embedding: Embedding) -> float:
    """Return what an embedding is multiplied by; 1 where it is not scaled."""
    for call in model_parts.tape.users(embedding.call.result):
        number = number_of(model_parts, call)
        if call.name in SCALING and number:
            return 1 / number if "div" in call.name else number
    return 1.0


def scale_text(number: float, width: int) -> str:
    """Return a scale as a person would write it."""
    return f"sqrt({width})" if math.isclose(number, width**0.5, rel_tol=1e-6) else f"{number:.6g}"


def _scaled_to(scale: float, new_scale: float) -> Rewrite:
    return map_result(lambda value: value * (new_scale / scale))


def _swapped_types(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each token type embedding with several rows, counted from the last one."""
    for embedding in model_parts.embeddings_of("types"):
        last = model_parts.tape[embedding.weight].shape[0] - 1
        if last:
            yield alter(embedding.call, looked_up(embedding, last - model_parts.tape[embedding.ids]))


def _padding_zeroed(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each token embedding with a padding token."""
    for embedding in model_parts.embeddings_of("tokens"):
        word = embedding.call.argument(2, "padding_idx")
        if isinstance(word, int) and word >= 0:
            padding = (model_parts.tape[embedding.ids] == word)[..., None]
            yield alter(embedding.call, map_result(partial(Tensor.masked_fill, mask=padding, value=0.0)))


def _neighbours(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each token embedding, shifted by one to both sides."""
    for embedding in model_parts.embeddings_of("tokens"):
        rows = model_parts.tape[embedding.weight].shape[0]
        for offset in (-1, 1):
            ids = (model_parts.tape[embedding.ids] + offset) % rows
            yield alter(embedding.call, looked_up(embedding, ids), f"off by {offset:+d}")


CAUSES: tuple[Cause, ...] = (
    Cause(
        name="token types ignored",
        what="every token has the first type, and token_type_ids is ignored",
        looks="no difference in texts of one segment; the second segment differs",
        fix="pass token_type_ids to the embeddings",
        alterations=_first_type,
        absorbed_by_weights=True,
    ),
    Cause(
        name="token types missing",
        what="no token type embedding is added",
        looks="everything differs by a constant, because row 0 is added even without token_type_ids",
        fix="add token_type(zeros) when none are given, or fold row 0 into the positions",
        alterations=alter_each(_of("types"), _zeros),
        absorbed_by_weights=True,
    ),
    Cause(
        name="token types swapped",
        what="the first segment has the type of the last one, and vice versa",
        looks="a constant difference for each segment, also in texts of one segment",
        fix="0 for the first segment and the special tokens before it, 1 for the second",
        alterations=_swapped_types,
        absorbed_by_weights=True,
    ),
    Cause(
        name="position offset",
        what="positions are counted from a different number",
        looks="large differences; the shapes fit",
        fix="check where the reference begins: at 0, or at pad_token_id + 1, which is often 2",
        alterations=_usual_offsets,
        free_parameters=_solved_offset,
        absorbed_by_weights=True,
    ),
    Cause(
        name="positions end too early",
        what="positions stop at a number, or begin again after it",
        looks="no difference in shorter texts",
        fix="take max_position_embeddings from the config",
        free_parameters=_solved_end,
        absorbed_by_weights=True,
    ),
    Cause(
        name="positions counted around padding",
        what="padding is skipped when positions are counted, unlike in the reference, or vice versa",
        looks="no difference in a batch without padding",
        fix="check whether the reference counts all tokens, or only those that are not padding",
        alterations=_around_padding,
        absorbed_by_weights=True,
    ),
    Cause(
        name="positions counted from the end",
        what="the last token has the first position",
        looks="large differences",
        fix="arange(s)",
        alterations=_from_the_end,
        absorbed_by_weights=True,
    ),
    Cause(
        name="positions missing",
        what="no position embedding is added",
        looks="the model does not depend on the order of tokens",
        fix="add the position embedding to the token embedding",
        alterations=alter_each(_of("positions"), _zeros),
        absorbed_by_weights=True,
    ),
    Cause(
        name="embedding scale missing",
        what="the token embeddings are not multiplied by sqrt(hidden_size)",
        looks="the position embeddings are too large relative to the token embeddings",
        fix="scale_embedding in the config: multiply by sqrt(d_model) before the positions are added",
        alterations=_unscaled,
        absorbed_by_weights=True,
    ),
    Cause(
        name="embedding scale that should not be there",
        what="the token embeddings are multiplied by sqrt(hidden_size)",
        looks="the token embeddings are too large relative to the position embeddings",
        fix="scale only if scale_embedding is set in the config",
        alterations=alter_each(_of("tokens"), _by_root_of_width),
        absorbed_by_weights=True,
    ),
    Cause(
        name="embeddings scaled by another factor",
        what="the token embeddings are multiplied by a number that is not the reference's",
        looks="token and position embeddings have the wrong relative size",
        fix="see scale_embedding, embedding_multiplier and the like in the config; sqrt(hidden_size), not hidden_size",
        free_parameters=_solved_scale,
        absorbed_by_weights=True,
    ),
    Cause(
        name="padding word zeroed",
        what="the embedding of the padding token is 0, unlike in the checkpoint",
        looks="only positions of padding differ, if padding is masked",
        fix="load the row unchanged; padding_idx only excludes it from training",
        alterations=_padding_zeroed,
        absorbed_by_weights=True,
    ),
    Cause(
        name="vocabulary shifted",
        what="every token has the embedding of its neighbour in the vocabulary",
        looks="everything differs from the embeddings on",
        fix="compare the tokenizer's ids with the rows of the embedding",
        alterations=_neighbours,
        absorbed_by_weights=True,
    ),
)
