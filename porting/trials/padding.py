"""Which places of an activation belong to tokens, and which to padding that the attention mask hides.

What a model computes at a padded place is nobody's business as long as nothing that counts depends on it: one port
zeroes it, another leaves it out, a third computes on.  So padded places are measured by themselves, and are no fault.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from porting.tracing.trace import ARROW, PROBABILITIES, SCORES, Point, split

MASK, DECODER_MASK = "attention_mask", "decoder_attention_mask"

TOKENS, QUERIES = 2, 4
"""Axes of a mask [b s], and of what attention computes, [b h q k]."""


def attended(inputs: Mapping[str, Tensor], point: Point, shape: tuple[int, ...]) -> Tensor | None:
    """The places of one of the reference's activations that the mask keeps.

    Args:
        inputs: what the reference is given; ``attention_mask`` and ``decoder_attention_mask`` are [b s], 1 = attend.
        point: the reference's.
        shape: of its value: [b s ...], or [b h q k] inside of attention, or [b ...].

    Returns:
        True where a place counts, of ``shape``; None where all do.  Nothing of a row that is all padding counts, on
        either side of an encoder-decoder.
    """
    masks = {name: _rows(inputs[name]) for name in _order(point) if name in inputs}
    inside = _output(point) in {SCORES, PROBABILITIES} and len(shape) == QUERIES
    whole = [mask.any(1) for mask in masks.values() if shape and len(mask) == shape[0]]  # a row that is all padding
    rows = torch.stack(whole).all(0) if whole else None
    for mask in masks.values():
        seen = mask & rows[:, None] if rows is not None and len(mask) == len(rows) else mask
        if inside and (shape[0], shape[2]) == tuple(mask.shape):
            return None if seen.all() else seen[:, None, :, None].expand(shape)
        if not inside and len(shape) >= TOKENS and tuple(shape[:2]) == tuple(mask.shape):
            return None if seen.all() else seen.view(*mask.shape, *[1] * (len(shape) - 2)).expand(shape)
    if rows is None or inside or rows.all():
        return None
    return rows.view(-1, *[1] * (len(shape) - 1)).expand(shape)


def _output(point: Point) -> str:
    return split(point)[0].partition(ARROW)[2]


def _order(point: Point) -> tuple[str, str]:
    """The masks that may belong to a point, the likelier one first: a decoder's parts and outputs say so."""
    name = split(point)[0]
    of_encoder = "encoder" in name and "decoder" not in name
    return (MASK, DECODER_MASK) if of_encoder else (DECODER_MASK, MASK)


def _rows(mask: Tensor) -> Tensor:
    """The mask as [b s] of bool; one with choices, [b c s], as the rows that the model makes of it."""
    flat = mask.reshape(-1, mask.shape[-1]) if mask.ndim > TOKENS else mask
    return flat != 0 if flat.ndim == TOKENS else torch.ones(1, 1, dtype=torch.bool)


def kept(value: Tensor, inputs: Mapping[str, Tensor], point: Point) -> Tensor:
    """The value at the places that are no padding."""
    seen = attended(inputs, point, tuple(value.shape))
    return value if seen is None else value[seen]
