"""What BERT is pre-trained on: pairs of segments, some of their words masked.

Devlin et al. 2019, section 3.1 and appendix A.2.

``[CLS] segment A [SEP] segment B [SEP]``; in half of the pairs B is what follows A, in the other half it
comes from elsewhere. 15 % of the words are to be predicted: 80 % of their tokens read ``[MASK]``, 10 %
another token, 10 % stay as they are.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100  # the label that torch's cross-entropy passes over


@dataclass(frozen=True, kw_only=True)
class PairRecipe:
    """How documents become batches.

    Attributes:
        max_length: tokens in a row at most, the three special ones among them.
        batch_size: rows in a batch.
        lone_fraction: how many segments stand alone, as a sentence does whose mask is to be filled.
        mask_fraction: how many words are masked.
    """

    max_length: int = 64
    batch_size: int = 24
    lone_fraction: float = 0.15
    mask_fraction: float = 0.15


@dataclass(frozen=True, kw_only=True)
class TokenizedDocument:
    """A document as token ids, without special tokens.

    Attributes:
        package: the part of the library it belongs to; a random B never comes from A's own package.
        sentences: the token ids of each sentence.
    """

    package: str
    sentences: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The ids of ``[PAD]``, ``[CLS]``, ``[SEP]`` and ``[MASK]``, and what whole-word masking must know of the others.

    Attributes:
        continues: bool, shape ``(vocab_size,)``: the token continues a word (``##ing``).
        special: bool, shape ``(vocab_size,)``: the token is never masked and never drawn in another's place.
    """

    pad: int
    cls: int
    sep: int
    mask: int
    continues: Tensor
    special: Tensor


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two segments as token ids, without special tokens.

    A ``second`` of None makes a lone segment, of which nobody asks what follows.
    """

    package: str
    first: tuple[int, ...]
    second: tuple[int, ...] | None
    is_next: bool = True


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one step of the optimiser sees.

    Attributes:
        input_ids, attention_mask (1 = attend), token_type_ids: int64, shape ``(batch, length)``.
        labels: int64, shape ``(batch, length)``: the token that stood at a masked place, and -100 everywhere
            else.
        next_sentence_label: int64, shape ``(batch,)``: 0 = B follows A, 1 = B is from elsewhere, -100 = there
            is no B.
    """

    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor
    labels: Tensor
    next_sentence_label: Tensor


def draw_pairs(
    documents: Sequence[TokenizedDocument], *, max_length: int, lone_fraction: float, rng: random.Random
) -> list[Pair]:
    """Cut every document into segments of random length, and take them two by two.

    For the pairs whose B shall not follow, the Bs of consecutive pairs are dealt out anew among themselves.
    So the Bs of either label are drawn from one distribution, their lengths too, and only reading A *and* B
    can tell the labels apart.

    Args:
        max_length: of A, B and three special tokens; a longer segment is cut.
        lone_fraction: how many of the segments stand alone, as a sentence does whose mask is to be filled.
    """
    longest = (max_length - 3) // 2
    pairs = []
    for document in documents:
        ahead = list(document.sentences[rng.randrange(2) :] or document.sentences)
        while ahead:
            first = _take_segment(ahead, longest=longest, rng=rng)
            lone = not ahead or rng.random() < lone_fraction
            second = None if lone else _take_segment(ahead, longest=longest, rng=rng)
            pairs.append(Pair(package=document.package, first=first, second=second))
    rng.shuffle(pairs)
    alone = [pair for pair in pairs if pair.second is None]
    paired = [pair for pair in pairs if pair.second is not None]
    half = len(paired) // 2
    return [*alone, *paired[half:], *_deal_anew(paired[:half], rng=rng)]


def _take_segment(ahead: list[tuple[int, ...]], *, longest: int, rng: random.Random) -> tuple[int, ...]:
    """Take whole sentences off the front of ``ahead``: one, and more while they fit a length that is drawn."""
    room = rng.randint(1, longest)
    segment = ahead.pop(0)
    while ahead and len(segment) + len(ahead[0]) <= room:
        segment += ahead.pop(0)
    return segment[:longest]


def _deal_anew(pairs: Sequence[Pair], *, rng: random.Random) -> list[Pair]:
    """Each pair gets the B of a pair of another package.

    With the pairs grouped by package, going on by the size of the largest group always leads out of one's
    own.  The pairs that make a package larger than half of all are set aside.
    """
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.package, []).append(pair)
    rest = len(pairs) - max(map(len, groups.values()), default=0)
    grouped = [pair for name in rng.sample(sorted(groups), k=len(groups)) for pair in groups[name][:rest]]
    step = max((min(len(group), rest) for group in groups.values()), default=0)
    shift = rng.randint(step, len(grouped) - step) if grouped else 0
    return [
        Pair(
            package=pair.package, first=pair.first, second=grouped[(index + shift) % len(grouped)].second, is_next=False
        )
        for index, pair in enumerate(grouped)
    ]


def sort_into_batches(pairs: Sequence[Pair], *, batch_size: int, rng: random.Random) -> list[list[Pair]]:
    """Batches of pairs of similar length, so that little is padded, in random order."""
    pairs = rng.sample(pairs, k=len(pairs))
    pool = 50 * batch_size
    batches = []
    for start in range(0, len(pairs), pool):
        by_length = sorted(pairs[start : start + pool], key=lambda pair: len(pair.first) + len(pair.second or ()))
        batches += [by_length[i : i + batch_size] for i in range(0, len(by_length), batch_size)]
    rng.shuffle(batches)
    return batches


def collate(pairs: Sequence[Pair], *, tokens: SpecialTokens, mask_fraction: float, generator: torch.Generator) -> Batch:
    """Pad the pairs to one length and mask their words, anew each time they are seen (RoBERTa's dynamic masking)."""
    rows, types = [], []
    for pair in pairs:
        head = [tokens.cls, *pair.first, tokens.sep]
        tail = [] if pair.second is None else [*pair.second, tokens.sep]
        rows.append(torch.tensor(head + tail))
        types.append(torch.tensor([0] * len(head) + [1] * len(tail)))
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokens.pad)
    token_type_ids = torch.nn.utils.rnn.pad_sequence(types, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    masked_ids, labels = mask_words(input_ids, tokens=tokens, fraction=mask_fraction, generator=generator)
    return Batch(
        input_ids=masked_ids,
        attention_mask=(torch.arange(input_ids.shape[1]) < lengths[:, None]).long(),
        token_type_ids=token_type_ids,
        labels=labels,
        next_sentence_label=torch.tensor([IGNORED if p.second is None else int(not p.is_next) for p in pairs]),
    )


def mask_words(
    input_ids: Tensor, *, tokens: SpecialTokens, fraction: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Choose words, all pieces of a word together (the whole-word masking of BERT's second release), and hide them.

    Returns:
        The ids that the model reads and the labels it shall give, both int64 and shaped as ``input_ids``,
        ``(batch, length)``.
    """

    def draw() -> Tensor:
        return torch.rand(input_ids.shape, generator=generator)

    word = (~tokens.continues[input_ids]).cumsum(dim=1) - 1  # every token's word, counted along the row
    chosen = (draw().gather(1, word.clamp(min=0)) < fraction) & ~tokens.special[input_ids]
    labels = input_ids.masked_fill(~chosen, IGNORED)
    ordinary = (~tokens.special).nonzero().squeeze(1)
    others = ordinary[torch.randint(len(ordinary), input_ids.shape, generator=generator)]
    fate = draw()
    masked = input_ids.masked_fill(chosen & (fate < 0.8), tokens.mask)
    return torch.where(chosen & (fate >= 0.9), others, masked), labels


def draw_batches(
    documents: Sequence[TokenizedDocument], *, tokens: SpecialTokens, recipe: PairRecipe, seed: int
) -> Iterator[Batch]:
    """One pass over the documents: cut, paired and masked in a way of its own for each ``seed``."""
    rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
    generator = torch.Generator().manual_seed(seed)
    pairs = draw_pairs(documents, max_length=recipe.max_length, lone_fraction=recipe.lone_fraction, rng=rng)
    for batch in sort_into_batches(pairs, batch_size=recipe.batch_size, rng=rng):
        yield collate(batch, tokens=tokens, mask_fraction=recipe.mask_fraction, generator=generator)


def count_batches(documents: Sequence[TokenizedDocument], *, recipe: PairRecipe, seed: int) -> int:
    """How many batches :func:`draw_batches` gives for this seed."""
    rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
    pairs = draw_pairs(documents, max_length=recipe.max_length, lone_fraction=recipe.lone_fraction, rng=rng)
    return math.ceil(len(pairs) / recipe.batch_size)
