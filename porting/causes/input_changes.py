"""Other inputs with which the reference computes what a wrong port computes from the given ones.

A port that takes the first row's positions for all rows computes what the reference computes from such positions.
Nothing of the reference is changed for that: it is run once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

MASK, IDS, POSITIONS, SEGMENTS, EMBEDDED = (
    "attention_mask",
    "input_ids",
    "position_ids",
    "token_type_ids",
    "inputs_embeds",
)
PIXELS = "pixel_values"
DECODER = "decoder_"
DECODER_MASK = f"{DECODER}{MASK}"

Inputs = Mapping[str, Tensor]

Change = Callable[[Inputs], dict[str, Tensor] | None]
"""The reference's arguments -> others; None where they are as they should be, or have no such argument."""


@dataclass(frozen=True, kw_only=True)
class InputChange:
    """A mistake that acts as other inputs do.

    Attributes:
        name, detail, what, fix: as of a finding.
        change: gives the inputs with which the reference computes what the port does; these themselves by default.
    """

    name: str
    detail: str = ""
    what: str
    fix: str
    change: Change = dict


FIRST_ROW = InputChange(
    name="first row's values for all rows",
    what="each row is computed with an argument of the first row of its batch",
    fix="keep the axis of rows: read x[:, i] and not x[0, i], and do not cut x[:1]",
)
FIRST_PLACE = InputChange(
    name="first token's value for the whole row",
    what="each token of a row is computed with an argument of the first token",
    fix="index the table with all the values of the row, not with those of its first place",
)
IGNORED = InputChange(
    name="argument ignored",
    what="the port computes what the reference computes without an argument",
    fix="pass it on to where the reference uses it",
)
MASK_IGNORED = replace(
    IGNORED,
    name="padding mask ignored",
    what="padding can be attended to",
    fix="pass the attention mask to every attention",
)
SEGMENTS_IGNORED = replace(
    IGNORED,
    name="token types ignored",
    what="every token has the first type, and token_type_ids is ignored",
    fix="pass token_type_ids to the embeddings",
)
MASK_OF_FIRST = replace(
    FIRST_ROW,
    name="padding mask of other rows",
    detail="each row has the mask of the first",
    fix="mask[:, None, None, :] for scores [b h q k]; for scores [(b h) q k], mask.repeat_interleave(heads, dim=0)",
)
AS_LENGTH = InputChange(
    name="padding mask read as a length",
    what="the port counts the tokens of a row by its mask, and takes so many places",
    fix="use the mask itself: padding may stand in front of a row, or within it",
)
OTHER_MASK = InputChange(
    name="mask of another argument",
    what="the mask of the encoder stands where that of the decoder should, or vice versa",
    fix="decoder_attention_mask is for the decoder's own attention, attention_mask for the encoder and cross attention",
)
BY_TOKEN = InputChange(
    name="padding found by its token id",
    what="the port hides the padding token, whatever the mask says",
    fix="use the attention mask; where none is given, nothing is padding",
)
COUNTED = InputChange(
    name="positions counted around padding",
    what="padding is skipped when positions are counted, unlike in the reference, or vice versa",
    fix="check whether the reference counts all tokens, or only those that are not padding",
)
SCALED = InputChange(
    name="given embeddings scaled by another factor",
    what="inputs_embeds are multiplied by a number that the reference does not multiply them by",
    fix="scale what the table of embeddings gives, or what is given in its place, as the reference does",
)
NORMED = InputChange(
    name="given embeddings normalised",
    what="inputs_embeds go through a norm before they take the place of what the table gives",
    fix="put them where the reference does: in the place of word embeddings, and norm the sum once",
)
TURNED = InputChange(
    name="height and width exchanged",
    what="the rows and columns of pictures are exchanged",
    fix="pixels are [b c h w]; check the order of the axes where patches are made and where positions are added",
)


def input_changes(
    names: Collection[str],
    optional: Collection[str],
    taken: Collection[str],
    padding: int | None,
    norms: Mapping[str, Callable[[Tensor], Tensor]],
) -> Iterator[InputChange]:
    """Yield what may be wrong with inputs of these names.

    Args:
        names: the arguments that batches have.
        optional: those of them that both forwards may be called without.
        taken: the arguments that the reference's forward has.
        padding: the token id of padding; None where nothing is known of it.
        norms: the reference's norms that may come first, by their paths.
    """
    yield from _of_rows(names)
    for name in optional:
        base = {MASK: MASK_IGNORED, SEGMENTS: SEGMENTS_IGNORED}.get(name) or replace(IGNORED, detail=name)
        yield replace(base, change=partial(_without, name))
    masks = [name for name in (MASK, DECODER_MASK) if name in names]
    yield from _of_masks(masks, padding)
    for positions in (one for one in (POSITIONS, f"{DECODER}{POSITIONS}") if one in taken):
        for mask, (way, count) in product(masks, _COUNTINGS.items()):
            yield replace(COUNTED, detail=way, change=partial(_counted, positions, mask, count))
    if EMBEDDED in names:
        for text, power in (("the root of the width", 0.5), ("1 / the root of the width", -0.5), ("the width", 1.0)):
            yield replace(SCALED, detail=f"they are multiplied by {text}", change=partial(_scaled, power))
        for path, norm in norms.items():
            yield replace(NORMED, detail=f"by {path}", change=partial(_normed, norm))
    if PIXELS in names:
        yield replace(TURNED, change=_turned)


def _of_rows(names: Collection[str]) -> Iterator[InputChange]:
    """Yield each argument with the values of its first row, and with those of each row's first place."""
    for name in names:
        base = MASK_OF_FIRST if name == MASK else replace(FIRST_ROW, detail=f"{name} of the first row")
        yield replace(base, change=partial(_first_row, name))
    for name in names:
        if name not in (MASK, DECODER_MASK):
            yield replace(FIRST_PLACE, detail=name, change=partial(_first_place, name))


def _of_masks(masks: Sequence[str], padding: int | None) -> Iterator[InputChange]:
    """Yield each mask read as a length, found by the padding token, and taken for the other one."""
    for name in masks:
        ids = name.replace(MASK, IDS)
        for end, where in ((False, "in front"), (True, "at the end")):
            detail = f"{name}, as if all tokens stood {where}"
            yield replace(AS_LENGTH, detail=detail, change=partial(_length, name, end))
        detail = f"{name} of the first row, read as a length"
        yield replace(FIRST_ROW, detail=detail, change=partial(_first_length, name))
        if padding is not None:
            yield replace(BY_TOKEN, detail=name, change=partial(_by_token, name, ids, padding))
    if len(masks) > 1:
        own, other = masks
        yield replace(OTHER_MASK, detail="the encoder's in the decoder", change=partial(_other, other, own))
        yield replace(OTHER_MASK, detail="the decoder's in the encoder", change=partial(_other, own, other))


def _row_wise(inputs: Inputs, name: str) -> Tensor | None:
    """An argument with several rows."""
    value = inputs.get(name)
    return value if value is not None and value.ndim > 1 and len(value) > 1 else None


def _first_row(name: str, inputs: Inputs) -> dict[str, Tensor] | None:
    value = _row_wise(inputs, name)
    return None if value is None else _with(inputs, name, value[:1].expand_as(value))


def _first_place(name: str, inputs: Inputs) -> dict[str, Tensor] | None:
    value = inputs.get(name)
    if value is None or value.ndim != 2 or value.is_floating_point():
        return None
    return _with(inputs, name, value[:, :1].expand_as(value))


def _without(name: str, inputs: Inputs) -> dict[str, Tensor] | None:
    return {key: one for key, one in inputs.items() if key != name} if name in inputs else None


def _length(name: str, at_end: bool, inputs: Inputs) -> dict[str, Tensor] | None:
    value = inputs.get(name)
    if value is None or value.ndim != 2:
        return None
    front = torch.arange(value.shape[1])[None] < (value != 0).sum(1, keepdim=True)
    return _with(inputs, name, (front.flip(1) if at_end else front).to(value.dtype))


def _first_length(name: str, inputs: Inputs) -> dict[str, Tensor] | None:
    value = _row_wise(inputs, name)
    if value is None or value.ndim != 2:
        return None
    front = torch.arange(value.shape[1])[None] < (value[:1] != 0).sum(1, keepdim=True)
    return _with(inputs, name, front.expand_as(value).to(value.dtype))


def _by_token(name: str, ids: str, padding: int, inputs: Inputs) -> dict[str, Tensor] | None:
    tokens = inputs.get(ids)
    if tokens is None or tokens.ndim != 2 or tokens.is_floating_point():
        return None
    value = inputs.get(name)
    return _with(inputs, name, (tokens != padding).to(torch.long if value is None else value.dtype))


def _other(name: str, source: str, inputs: Inputs) -> dict[str, Tensor] | None:
    value, other = inputs.get(name), inputs.get(source)
    if value is None or other is None or value.shape[0] != other.shape[0] or value.ndim != other.ndim:
        return None
    if value.shape != other.shape:
        return None
    return _with(inputs, name, other.to(value.dtype))


_COUNTINGS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "all places are": lambda kept: torch.arange(kept.shape[1])[None].expand_as(kept),
    "places that the mask keeps are, and padding has the one before it": lambda kept: (kept.cumsum(1) - 1).clamp_min(0),
    "places that the mask keeps are, and padding has position 1": lambda kept: (kept.cumsum(1) - 1).masked_fill(
        kept == 0, 1
    ),
    "places that the mask keeps are, and padding has position 0": lambda kept: (kept.cumsum(1) - 1) * kept,
    "places that the mask of the first row keeps are": lambda kept: (
        (kept.cumsum(1) - 1).clamp_min(0)[:1].expand_as(kept)
    ),
}
"""Ways to count positions by a mask of 0 and 1 [b s], by their words."""


def _counted(name: str, mask: str, count: Callable[[Tensor], Tensor], inputs: Inputs) -> dict[str, Tensor] | None:
    kept = inputs.get(mask)
    start = DECODER if name.startswith(DECODER) else ""
    tokens = inputs.get(f"{start}{IDS}", inputs.get(f"{start}{EMBEDDED}"))
    if kept is None or kept.ndim != 2 or tokens is None or tokens.shape[:2] != kept.shape:
        return None
    return {**inputs, name: count((kept != 0).long()).contiguous()}


def _scaled(power: float, inputs: Inputs) -> dict[str, Tensor] | None:
    value = inputs.get(EMBEDDED)
    return None if value is None else {**inputs, EMBEDDED: value * math.pow(value.shape[-1], power)}


def _normed(norm: Callable[[Tensor], Tensor], inputs: Inputs) -> dict[str, Tensor] | None:
    value = inputs.get(EMBEDDED)
    return None if value is None else {**inputs, EMBEDDED: norm(value)}


def _turned(inputs: Inputs) -> dict[str, Tensor] | None:
    value = inputs.get(PIXELS)
    return None if value is None or value.ndim < 4 else {**inputs, PIXELS: value.mT.contiguous()}


def _with(inputs: Inputs, name: str, value: Tensor) -> dict[str, Tensor] | None:
    """The inputs with another value of an argument; None where it has that value already."""
    before = inputs.get(name)
    if before is not None and torch.equal(before, value):
        return None
    return {**inputs, name: value.contiguous()}
