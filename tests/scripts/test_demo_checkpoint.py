"""The checkpoint that ships: small enough, whole, trained in every parameter, and its card tells the truth."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

import porting
from porting.embedded import embedded_checkpoint
from porting.models.bert_heads import BertForPreTraining
from scripts.demo_report import SENTENCES, fill
from scripts.train_demo_checkpoint import DEFAULTS, LARGEST

DEMO = embedded_checkpoint()


@pytest.fixture(scope="module")
def card() -> str:
    return (DEMO / "README.md").read_text(encoding="utf-8")


def test_it_is_small_enough_to_ship() -> None:
    assert 1_000_000 < sum(file.stat().st_size for file in DEMO.iterdir()) <= LARGEST


def test_transformers_loads_it_without_a_key_too_many_or_too_few() -> None:
    from transformers import AutoModelForPreTraining, AutoTokenizer

    model, info = AutoModelForPreTraining.from_pretrained(DEMO, output_loading_info=True)
    assert not any(info.values()), info
    assert type(model).__name__ == "BertForPreTraining"
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    ids = tokenizer("Return the [MASK].", "Nothing else!")["input_ids"]
    assert ids == Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode("Return the [MASK].", "Nothing else!").ids
    assert tokenizer.unk_token_id not in ids


def test_no_parameter_is_as_it_was_drawn() -> None:
    for name, values in load_file(DEMO / "model.safetensors").items():
        assert values.isfinite().all(), name
        # Biases started at 0 and gains at 1: a constant has not been trained.  Softmax cannot see the key's bias,
        # so that its gradient is rounding noise and it hardly moves.
        assert values.std().item() > (1e-6 if name.endswith("key.bias") else 1e-3), name


def test_it_is_what_the_program_makes_by_default(card: str) -> None:
    model = porting.load(DEMO)
    assert isinstance(model, BertForPreTraining)
    config = model.bert.config
    assert config.vocab_size == DEFAULTS.vocab_size
    assert config.hidden_size == DEFAULTS.hidden_size
    assert config.num_hidden_layers == DEFAULTS.num_hidden_layers
    assert config.num_attention_heads == DEFAULTS.num_attention_heads
    assert config.max_position_embeddings == DEFAULTS.pairs.max_length
    assert f"{DEFAULTS.epochs} epochs, batches of {DEFAULTS.pairs.batch_size}," in card
    assert f"peak rate {DEFAULTS.learning_rate:g}, " in card


@torch.no_grad()
def test_the_card_s_guesses_are_the_model_s(card: str) -> None:
    model = porting.load(DEMO)
    assert isinstance(model, BertForPreTraining)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    for sentence in SENTENCES:
        told = re.search(rf"^\| {re.escape(sentence)} \| (.*) \|$", card, re.MULTILINE)
        assert told is not None, sentence
        guesses = fill(model.eval(), tokenizer, sentence)
        for row, (token, probability) in zip(told[1].split(", "), guesses, strict=True):
            assert row.split()[0] == token
            assert float(row.split()[1]) == pytest.approx(probability, abs=0.0051)  # the card has two digits


def test_the_card_says_that_it_beats_its_baselines(card: str) -> None:
    rows = dict(re.findall(r"^\| ((?:masked token|next sentence).*?) \| (.*) \|$", card, re.MULTILINE))
    assert len(rows) == 3
    for row in rows.values():
        model, baseline = re.findall(r"([\d.]+) %", row)
        assert float(model) > 1.2 * float(baseline)
