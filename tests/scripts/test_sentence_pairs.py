"""Sentence pairs and masks: half and half, no shortcut, 15 % of the words, 80/10/10."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from scripts.sentence_pairs import (
    IGNORED,
    Pair,
    PairRecipe,
    SpecialTokens,
    TokenizedDocument,
    collate,
    count_batches,
    draw_batches,
    draw_pairs,
    mask_words,
)

VOCABULARY = 400
TOKENS = SpecialTokens(
    pad=0,
    cls=1,
    sep=2,
    mask=3,
    continues=torch.arange(VOCABULARY) >= 300,
    special=torch.arange(VOCABULARY) < 4,
)


def documents(*, packages: int = 12, sentences: int = 60) -> list[TokenizedDocument]:
    """Each token says which sentence of which package it is from: package * 1000 + sentence, in one token's place."""
    rng = random.Random(7)  # noqa: S311 - repeatable on purpose
    return [
        TokenizedDocument(
            package=f"p{package}",
            sentences=tuple((package * 1000 + sentence,) * rng.randint(2, 20) for sentence in range(sentences)),
        )
        for package in range(packages)
    ]


def drawn(*, lone_fraction: float = 0.2, max_length: int = 64, packages: int = 12) -> list[Pair]:
    rng = random.Random(3)  # noqa: S311 - repeatable on purpose
    return draw_pairs(documents(packages=packages), max_length=max_length, lone_fraction=lone_fraction, rng=rng)


def test_half_of_the_pairs_follow_and_half_come_from_another_package() -> None:
    pairs = [pair for pair in drawn() if pair.second]
    follow = [pair for pair in pairs if pair.is_next]
    assert abs(len(follow) - len(pairs) / 2) <= 1
    for pair in follow:
        assert pair.second is not None
        assert pair.second[0] == pair.first[-1] + 1
    for pair in pairs:
        if not pair.is_next:
            assert pair.second is not None
            assert pair.second[0] // 1000 != pair.first[0] // 1000


def test_neither_label_has_longer_second_segments() -> None:
    pairs = [pair for seed in range(30) for pair in _of_seed(seed) if pair.second]
    lengths = {follows: [len(p.second or ()) for p in pairs if p.is_next is follows] for follows in (True, False)}
    means = {follows: sum(values) / len(values) for follows, values in lengths.items()}
    assert abs(means[True] - means[False]) < 0.5  # the standard error of the difference is 0.15
    assert means[True] > 10


def _of_seed(seed: int) -> list[Pair]:
    rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
    return draw_pairs(documents(), max_length=64, lone_fraction=0.2, rng=rng)


def test_rows_keep_to_the_length_and_segments_to_whole_sentences() -> None:
    for pair in drawn(max_length=30):
        assert 1 <= len(pair.first) <= 13
        assert len(pair.second or ()) <= 13
    counts = Counter(token for document in documents() for sentence in document.sentences for token in sentence)
    for pair in drawn():
        for token, count in Counter(pair.first).items():
            assert count == counts[token]


def test_lone_segments_are_as_many_as_asked() -> None:
    assert all(pair.second for pair in drawn(lone_fraction=0.0) if pair.first[-1] % 1000 < 50)
    many = drawn(lone_fraction=1.0)
    assert all(pair.second is None for pair in many)


@pytest.mark.parametrize("packages", [1, 2, 3])
def test_few_packages_give_fewer_random_pairs_and_no_false_ones(packages: int) -> None:
    pairs = [pair for pair in drawn(packages=packages) if not pair.is_next]
    assert bool(pairs) == (packages > 1)
    for pair in pairs:
        assert pair.second is not None
        assert pair.second[0] // 1000 != pair.first[0] // 1000


def test_a_package_larger_than_all_others_still_gets_another_s_segments() -> None:
    uneven = [*documents(packages=1, sentences=500), *documents(packages=4, sentences=20)[1:]]
    rng = random.Random(0)  # noqa: S311 - repeatable on purpose
    pairs = [pair for pair in draw_pairs(uneven, max_length=64, lone_fraction=0.0, rng=rng) if not pair.is_next]
    assert pairs
    for pair in pairs:
        assert pair.second is not None
        assert pair.second[0] // 1000 != pair.first[0] // 1000


def test_a_batch_is_laid_out_as_bert_reads_it() -> None:
    pairs = [
        Pair(package="a", first=(10, 11), second=(20, 21, 22), is_next=False),
        Pair(package="a", first=(12,), second=None),
    ]
    batch = collate(pairs, tokens=TOKENS, mask_fraction=0.0, generator=torch.Generator().manual_seed(0))
    assert batch.input_ids.tolist() == [[1, 10, 11, 2, 20, 21, 22, 2], [1, 12, 2, 0, 0, 0, 0, 0]]
    assert batch.token_type_ids.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1], [0] * 8]
    assert batch.attention_mask.tolist() == [[1] * 8, [1, 1, 1, 0, 0, 0, 0, 0]]
    assert batch.next_sentence_label.tolist() == [1, IGNORED]
    assert (batch.labels == IGNORED).all()


def test_masks_are_80_10_10_of_the_fraction_and_never_special() -> None:
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(4, 300, (400, 200), generator=generator)
    ids[:, 0], ids[:, -1] = TOKENS.cls, TOKENS.sep
    read, labels = mask_words(ids, tokens=TOKENS, fraction=0.15, generator=generator)
    chosen = labels != IGNORED
    assert not chosen[:, 0].any()
    assert not chosen[:, -1].any()
    assert torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(read[~chosen], ids[~chosen])
    assert chosen[:, 1:-1].float().mean().item() == pytest.approx(0.15, abs=0.005)
    masked = read[chosen] == TOKENS.mask
    kept = read[chosen] == ids[chosen]
    assert masked.float().mean().item() == pytest.approx(0.8, abs=0.015)
    assert kept.float().mean().item() == pytest.approx(0.1, abs=0.015)
    assert not TOKENS.special[read[chosen][~masked]].any()


def test_the_pieces_of_a_word_are_masked_together() -> None:
    generator = torch.Generator().manual_seed(5)
    word = torch.tensor([10, 300, 301, 11, 12, 302])
    ids = torch.cat([torch.tensor([TOKENS.cls]), word.repeat(8), torch.tensor([TOKENS.sep])]).repeat(64, 1)
    _, labels = mask_words(ids, tokens=TOKENS, fraction=0.3, generator=generator)
    chosen = (labels != IGNORED)[:, 1:-1].reshape(64, 8, 6)
    assert torch.equal(chosen[..., 0], chosen[..., 1])
    assert torch.equal(chosen[..., 1], chosen[..., 2])
    assert torch.equal(chosen[..., 4], chosen[..., 5])
    assert not torch.equal(chosen[..., 2], chosen[..., 3])


def test_an_epoch_follows_its_seed_and_is_as_long_as_counted() -> None:
    small = [
        TokenizedDocument(package=str(p), sentences=tuple((p * 20 + s + 4,) * (s % 9 + 1) for s in range(19)))
        for p in range(9)
    ]
    recipe = PairRecipe(max_length=32, batch_size=5)

    def epoch(seed: int) -> list[list[list[int]]]:
        return [batch.input_ids.tolist() for batch in draw_batches(small, tokens=TOKENS, recipe=recipe, seed=seed)]

    assert epoch(0) == epoch(0) != epoch(1)
    for seed in range(5):
        assert len(epoch(seed)) == count_batches(small, recipe=recipe, seed=seed)
