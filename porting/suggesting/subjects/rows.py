"""Batches on which a module that was proven may still differ: short rows, single rows, other segments, other masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from porting.suggesting.subjects.arguments import DECODER_IDS, DECODER_MASK, IDS, MASK, PIXELS, POSITIONS, SEGMENTS
from porting.suggesting.subjects.fields import Role
from porting.suggesting.subjects.signals import signals
from porting.suggesting.subjects.subject import Subjects, end_of, number_of
from porting.verification.inputs import Case

LENGTHS = (1, 2, 3, 5, 8, 16, 27, 32, 48)
"""So many words: short rows, odd ones, and the usual sizes of a chunk."""


def other_rows(subjects: Subjects, config: Mapping[str, object], *, seed: int) -> Iterator[Case]:
    """Batches of one length each, of one row and of several, with every word, and with segments in any order.

    Nothing is padded.  A mask is given where the module takes one.
    """
    fields = dict(config)
    if IDS not in subjects.available:
        made = signals(subjects.available, fields, 1, seed)
        lengths = [one for one in LENGTHS if one <= number_of(config, Role.POSITIONS, 64)]
        if DECODER_IDS not in subjects.available:
            yield Case("one image" if PIXELS in made else "one sound", made)
        for length in lengths if DECODER_IDS in subjects.available else ():
            name = f"one sound, {length} word{'s' if length > 1 else ''}"
            yield Case(name, made | {DECODER_IDS: _drawn(subjects, config, 1, length, seed + length)})
        return
    for number, length in enumerate(one for one in LENGTHS if one <= subjects.longest):
        rows = 1 if number % 2 else 2
        name = f"{'1 row' if rows == 1 else f'{rows} rows'} of {length} word{'s' if length > 1 else ''}"
        yield Case(name, _given(subjects, _drawn(subjects, config, rows, length, seed + number)))
    words = _every_word(subjects, config)
    yield Case("rows with every word", _given(subjects, words))
    if SEGMENTS in subjects.way.named:
        generator = torch.Generator().manual_seed(seed)
        kinds = torch.randint(0, number_of(config, Role.SEGMENTS, 2), words.shape, generator=generator)
        yield Case("segments in any order", _given(subjects, words) | {SEGMENTS: kinds})


def other_masks(subjects: Subjects, config: Mapping[str, object], *, seed: int) -> Iterator[tuple[Case, str, bool]]:
    """Masks whose zeros do not stand at the end: the batch, what it has, and whether people make such batches."""
    if MASK not in subjects.way.named or DECODER_IDS in subjects.available:
        return
    length = min(12, subjects.longest)
    words = _drawn(subjects, config, 4, length, seed)
    first = torch.arange(length) >= torch.tensor([0, 3, 5, length - 2])[:, None]
    gaps = torch.ones(4, length, dtype=torch.long)
    gaps[1, 2:4] = gaps[2, 1::2] = gaps[3, 1:-1] = 0
    for mask, what, usual in ((first.long(), "padding in front of a row", True), (gaps, "a mask with gaps", False)):
        yield Case(what, _given(subjects, words) | {MASK: mask}), what, usual
    padding = words.clone()
    padding[:, length // 2] = number_of(config, Role.PADDING, 0)
    yield Case("the padding's word", _given(subjects, padding)), "the padding's word where the mask keeps it", False


def _given(subjects: Subjects, words: Tensor) -> dict[str, Tensor]:
    """The reference's arguments for rows without padding, as far as the module hears them."""
    rows, length = words.shape
    others = words[:, : max(3 * length // 4, 1)].flip(0)
    made = {
        IDS: words,
        MASK: torch.ones_like(words),
        SEGMENTS: torch.zeros_like(words),
        POSITIONS: torch.arange(length).expand(rows, -1).clone(),
        DECODER_IDS: others,
        DECODER_MASK: torch.ones_like(others),
    }
    heard = {*subjects.way.named, IDS, DECODER_IDS}
    return {name: value for name, value in made.items() if name in subjects.available and name in heard}


def _drawn(subjects: Subjects, config: Mapping[str, object], rows: int, length: int, seed: int) -> Tensor:
    """Rows of words without the padding's, each with the word that ends one at its end."""
    words = _usual(config)
    chosen = torch.randint(0, len(words), (rows, length), generator=torch.Generator().manual_seed(seed))
    return _ended(words[chosen], config)


def _every_word(subjects: Subjects, config: Mapping[str, object]) -> Tensor:
    """Rows in which each word stands once, but for the padding's."""
    words = _usual(config)
    length = min(24, subjects.longest)
    rows = -(-len(words) // (length - 1))
    filled = torch.cat([words, words])[: rows * length].reshape(rows, length)
    return _ended(filled, config) if end_of(config) is not None else filled


def _usual(config: Mapping[str, object]) -> Tensor:
    padding, end = number_of(config, Role.PADDING, 0), end_of(dict(config))
    every = torch.arange(number_of(config, Role.VOCABULARY, 97))
    return every[(every != padding) & (every != (padding if end is None else end))]


def _ended(words: Tensor, config: Mapping[str, object]) -> Tensor:
    end = end_of(dict(config))
    if end is not None:
        words[:, -1] = end
    return words
