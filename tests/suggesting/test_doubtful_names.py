"""Two names of a builder that the names' list gives one field, where one of them means another size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from porting.build import Bounds
from porting.suggesting.subjects.building import build_for
from porting.suggesting.subjects.solved_sizes import better_sizes, told_apart

CONFIG = {"vocab_size": 53, "hidden_size": 24, "max_position_embeddings": 31, "num_hidden_layers": 2}


def model(words: int, places: int, width: int) -> nn.Module:
    return nn.ModuleList([nn.Embedding(words, width), nn.Embedding(places, width), nn.Linear(width, width)])


def n_token(n_vocab: int, n_embd: int, n_token: int) -> nn.Module:
    return model(n_vocab, n_token, n_embd)


def num_tokens(num_tokens: int, dim: int, vocab_size: int) -> nn.Module:
    return model(vocab_size, num_tokens, dim)


def n_words(vocabulary: int, d_model: int, n_words: int) -> nn.Module:
    return model(vocabulary, n_words, d_model)


def num_embeddings(voc_size: int, num_embeddings: int, width: int) -> nn.Module:
    return model(voc_size, num_embeddings, width)


def two_texts(src_vocab: int, decoder_vocab_size: int, width: int) -> nn.Module:
    return model(src_vocab, decoder_vocab_size, width)


def one_text(vocab_size: int, n_tokens: int, width: int) -> nn.Module:
    """The rows of the position table are the encoder's constant; both names are words of one text."""
    return nn.ModuleList([nn.Embedding(vocab_size, width), nn.Linear(width, n_tokens, bias=False)])


POSITIONS, VOCABULARY = [(53, 24), (31, 24), (24, 24), (24,)], [(53, 24), (53, 24), (24, 24), (24,)]


@pytest.mark.parametrize(
    ("builder", "name"),
    [(n_token, "n_token"), (num_tokens, "num_tokens"), (n_words, "n_words"), (num_embeddings, "num_embeddings")],
)
def test_a_number_of_tokens_beside_a_vocabulary_may_be_the_length_of_rows(
    builder: Callable[..., nn.Module], name: str
) -> None:
    built = build_for(builder, CONFIG)
    assert built.asked[name] == "vocab_size"
    assert better_sizes(builder, built, CONFIG, POSITIONS) == {name: "max_position_embeddings"}
    within = Bounds(parameters=10_000, nbytes=1 << 20)
    assert told_apart(builder, built.asked, CONFIG, POSITIONS, CONFIG, within) == {name: "max_position_embeddings"}
    assert better_sizes(builder, built, CONFIG, VOCABULARY) == {}


@pytest.mark.parametrize(("builder", "shapes"), [(two_texts, POSITIONS), (one_text, [(53, 24), (31, 40), (53, 24)])])
def test_two_names_that_shapes_do_not_tell_apart_keep_the_vocabulary(
    builder: Callable[..., nn.Module], shapes: list[tuple[int, ...]]
) -> None:
    built = build_for(builder, CONFIG)
    assert {*built.asked.values()} == {"vocab_size", "hidden_size"}
    assert better_sizes(builder, built, CONFIG, shapes) == {}
