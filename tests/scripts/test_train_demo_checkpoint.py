"""The training program: the same bytes each time, what it writes loads everywhere, and the losses fall."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer

from porting.models.bert import BertLayer
from porting.models.bert_heads import BertForPreTraining
from scripts.demo_report import SENTENCES, fill, measure, pretraining_logits
from scripts.docstring_corpus import Document
from scripts.sentence_pairs import IGNORED, PairRecipe, draw_batches
from scripts.train_demo_checkpoint import (
    LARGEST,
    Recipe,
    count_steps,
    mean_cross_entropy,
    run,
    save,
    special_tokens,
    start,
    tokenize,
    train,
    train_tokenizer,
)

TINY = Recipe(
    vocab_size=300,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    epochs=2,
    held_out_fraction=0.3,
    pairs=PairRecipe(max_length=32, batch_size=8, mask_fraction=0.2),
)
THINGS = ("door", "window", "file", "string", "socket", "list", "number", "tree")


def sentences(thing: str) -> list[str]:
    return [
        *(f"Return the {part} of the {thing}." for part in ("name", "size", "first half", "last half", "owner")),
        *(f"Raise an error if the {thing} is not {state}." for state in ("open", "shut", "there", "whole")),
        *(f"The {thing} may be {done} again later." for done in ("opened", "shut", "read", "written")),
    ]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the program itself sets it: so small a model gains nothing by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "library"
    folder.mkdir()
    for thing in THINGS:
        source = "\n".join(f'def f{n}():\n    """{text}"""\n' for n, text in enumerate(sentences(thing)))
        (folder / f"{thing}.py").write_text(source, encoding="utf-8")
    return folder


@pytest.fixture
def tokenizer() -> Tokenizer:
    return train_tokenizer([text for thing in THINGS for text in sentences(thing)], vocab_size=TINY.vocab_size)


@pytest.fixture
def documents() -> list[Document]:
    return [Document(name=f"{thing}.py", package=thing, sentences=tuple(sentences(thing))) for thing in THINGS]


def test_two_runs_give_the_same_bytes_and_another_seed_does_not(library: Path, tmp_path: Path) -> None:
    written = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(dataclasses.replace(TINY, seed=seed), tmp_path / name, library=library, console=Console(quiet=True))
        written.append({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()})
    first, second, third = written
    assert first == second
    assert first["model.safetensors"] != third["model.safetensors"]


@pytest.mark.slow
def test_the_vocabulary_is_the_same_in_every_process(tokenizer: Tokenizer) -> None:
    program = (
        "from scripts.train_demo_checkpoint import train_tokenizer\n"
        "from tests.scripts.test_train_demo_checkpoint import THINGS, TINY, sentences\n"
        "texts = [text for thing in THINGS for text in sentences(thing)]\n"
        "print(train_tokenizer(texts, vocab_size=TINY.vocab_size).to_str())\n"
    )
    root = Path(__file__).parents[2]
    other = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert other.stdout == tokenizer.to_str() + "\n"


def test_the_directory_loads_in_transformers_and_says_the_same(library: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForPreTraining, AutoTokenizer

    path = tmp_path / "made"
    run(TINY, path, library=library, console=Console(quiet=True))
    assert sorted(file.name for file in path.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
    ]
    model, info = AutoModelForPreTraining.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    assert type(model).__name__ == "BertForPreTraining"
    tokenizer = AutoTokenizer.from_pretrained(path)
    encoded = tokenizer("Return the [MASK] of the door.", "The door may be SHUT again.", return_tensors="pt")
    own = Tokenizer.from_file(str(path / "tokenizer.json")).encode(
        "Return the [MASK] of the door.", "The door may be SHUT again."
    )
    assert encoded["input_ids"][0].tolist() == own.ids
    assert encoded["token_type_ids"][0].tolist() == own.type_ids
    assert tokenizer.mask_token == "[MASK]"  # noqa: S105 - a word piece, no password
    assert tokenizer.model_max_length == 32
    words = (path / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert words == tokenizer.convert_ids_to_tokens(list(range(len(words))))


def test_the_card_tells_what_was_measured(library: Path, tmp_path: Path) -> None:
    figures = run(TINY, tmp_path / "made", library=library, console=Console(quiet=True))
    card = (tmp_path / "made" / "README.md").read_text(encoding="utf-8")
    assert f"| masked token, first guess | {100 * figures.top_1:.1f} % | {100 * figures.unigram_top_1:.1f} % |" in card
    assert f"{100 * figures.next_sentence:.1f} % ± {100 * figures.next_sentence_error:.1f}" in card
    assert all(f"| {sentence} | " in card for sentence in SENTENCES)
    assert "2 layers, hidden size 16, 2 heads, 32 positions" in card


def test_training_lowers_the_loss_and_leaves_the_model_ready_for_use(
    documents: list[Document], tokenizer: Tokenizer
) -> None:
    recipe = dataclasses.replace(TINY, epochs=12, learning_rate=4e-3)
    model = start(recipe, vocab_size=tokenizer.get_vocab_size())
    learnt, tokens = tokenize(documents, tokenizer), special_tokens(tokenizer)
    losses = [mlm for mlm, _ in train(model, learnt, tokens=tokens, recipe=recipe)]
    assert len(losses) == count_steps(learnt, recipe=recipe)
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert not model.training
    figures = measure(model, held_out=learnt, learnt=learnt, tokens=tokens, pairing=recipe.pairs)
    assert figures.top_1 > figures.unigram_top_1 > 0.03
    assert figures.top_1 <= figures.top_5


def test_the_start_points_attention_somewhere(tokenizer: Tokenizer) -> None:
    model = start(TINY, vocab_size=tokenizer.get_vocab_size())
    layers = [part for part in model.modules() if isinstance(part, BertLayer)]
    assert len(layers) == 2
    for layer in layers:
        torch.testing.assert_close(layer.attention.key.weight, layer.attention.query.weight, rtol=0, atol=0)
    positions = model.bert.embeddings.position.weight.detach()
    neighbours = positions[0] @ positions[1]
    assert positions[0] @ positions[9] < neighbours < positions[0] @ positions[0]
    torch.testing.assert_close(positions[7] @ positions[8], neighbours, rtol=1e-5, atol=1e-8)  # by distance alone


def test_the_measured_figures_are_those_of_a_plain_loop(documents: list[Document], tokenizer: Tokenizer) -> None:
    model = start(TINY, vocab_size=tokenizer.get_vocab_size()).eval()
    held_out, tokens = tokenize(documents, tokenizer), special_tokens(tokenizer)
    pairing = dataclasses.replace(TINY.pairs, mask_fraction=0.9)  # measured at 15 % all the same
    figures = measure(model, held_out=held_out, learnt=held_out, tokens=tokens, pairing=pairing)

    recipe = dataclasses.replace(pairing, mask_fraction=0.15)
    first, surprise, count = 0, 0.0, 0
    for batch in draw_batches(held_out, tokens=tokens, recipe=recipe, seed=1):
        with torch.no_grad():
            logits = model(batch.input_ids, batch.attention_mask, batch.token_type_ids).mlm_logits
        for row, column in (batch.labels != IGNORED).nonzero().tolist():
            label = int(batch.labels[row, column])
            first += int(logits[row, column].argmax()) == label
            surprise -= torch.log_softmax(logits[row, column], dim=0)[label].item()
            count += 1
    assert figures.masked_tokens == count
    assert figures.top_1 == pytest.approx(first / count)
    assert figures.perplexity == pytest.approx(math.exp(surprise / count), rel=1e-4)
    p = figures.next_sentence
    assert figures.next_sentence_error == pytest.approx(math.sqrt(p * (1 - p) / figures.pairs))


def test_logits_are_the_model_s_own_where_a_word_is_masked(documents: list[Document], tokenizer: Tokenizer) -> None:
    model = start(TINY, vocab_size=tokenizer.get_vocab_size()).eval()
    tokens = special_tokens(tokenizer)
    batch = next(draw_batches(tokenize(documents, tokenizer), tokens=tokens, recipe=TINY.pairs, seed=0))
    mlm_logits, labels, nsp_logits = pretraining_logits(model, batch)
    whole = model(batch.input_ids, batch.attention_mask, batch.token_type_ids)
    masked = batch.labels != IGNORED
    torch.testing.assert_close(mlm_logits, whole.mlm_logits[masked])
    torch.testing.assert_close(nsp_logits, whole.nsp_logits)
    assert torch.equal(labels, batch.labels[masked])


def test_a_loss_that_asks_nothing_is_zero_and_differentiable() -> None:
    logits = torch.randn(3, 2, requires_grad=True)
    loss = mean_cross_entropy(logits, torch.full((3,), IGNORED))
    torch.autograd.backward(loss)
    assert loss.item() == 0.0
    some = mean_cross_entropy(logits, torch.tensor([0, IGNORED, 1]))
    expected = -torch.log_softmax(logits, dim=1)[[0, 2], [0, 1]].mean()
    torch.testing.assert_close(some, expected)


def test_guesses_are_the_likeliest_words(tokenizer: Tokenizer) -> None:
    model = start(TINY, vocab_size=tokenizer.get_vocab_size()).eval()
    guesses = fill(model, tokenizer, "return the [MASK] of the door.")
    encoding = tokenizer.encode("return the [MASK] of the door.")
    logits = model(torch.tensor([encoding.ids])).mlm_logits[0, encoding.tokens.index("[MASK]")]
    probabilities = logits.softmax(dim=0)
    assert len(guesses) == 5
    assert [p for _, p in guesses] == sorted((p for _, p in guesses), reverse=True)
    for token, probability in guesses:
        assert probabilities[tokenizer.token_to_id(token)].item() == pytest.approx(probability, rel=1e-5)
    assert guesses[0][1] == pytest.approx(probabilities.max().item(), rel=1e-5)


def test_what_is_too_large_to_ship_is_not_written(tokenizer: Tokenizer, tmp_path: Path) -> None:
    recipe = dataclasses.replace(TINY, hidden_size=256, num_hidden_layers=3)
    model: BertForPreTraining = start(recipe, vocab_size=tokenizer.get_vocab_size())
    with pytest.raises(ValueError, match=f"at most {LARGEST:,} ship"):
        save(model, tokenizer, tmp_path / "made", card="")
    assert list(tmp_path.iterdir()) == []
