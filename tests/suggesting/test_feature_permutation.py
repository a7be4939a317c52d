"""Features in another order: Marian's sines before its cosines, the module's next to each other; heads in turn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import porting
from porting.models.seq2seq import Seq2Seq
from porting.models.seq2seq_config import Seq2SeqConfig
from porting.suggesting import Suggestion, Verdict, suggest
from porting.suggesting.search.activation_matching import with_heads_in_turn
from tests.suggesting.oracle import BOUND, Drafted, apart, drafted, source

FIELDS = {
    "vocab_size": 113, "d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 52, "decoder_ffn_dim": 52, "max_position_embeddings": 40,
    "pad_token_id": 112, "decoder_start_token_id": 112, "eos_token_id": 0, "activation_function": "gelu",
    "scale_embedding": True,
}  # fmt: skip


def build(config: Any) -> Seq2Seq:  # a config with Marian's fields
    mine = Seq2SeqConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        num_encoder_layers=config.encoder_layers,
        num_decoder_layers=config.decoder_layers,
        encoder_attention_heads=config.encoder_attention_heads,
        decoder_attention_heads=config.decoder_attention_heads,
        encoder_intermediate_size=config.encoder_ffn_dim,
        decoder_intermediate_size=config.decoder_ffn_dim,
        hidden_act="gelu",
        max_position_embeddings=config.max_position_embeddings,
        pad_token_id=config.pad_token_id,
        eos_token_id=0,
    )
    return Seq2Seq(config=mine)


def in_float32(config: Any) -> nn.Module:
    """With angles that are computed in float32, as most people's are."""
    made = build(config)
    width = config.d_model
    frequencies = torch.exp(torch.arange(0, width, 2).float() * (-math.log(10000.0) / width))
    angles = torch.outer(torch.arange(config.max_position_embeddings).float(), frequencies)
    for part in (made.encoder, made.decoder):
        part.positions.table.copy_(torch.stack([angles.sin(), angles.cos()], -1).flatten(1))
    return made


@pytest.fixture
def reference(tmp_path: Path) -> Any:  # one of transformers' models
    return source("MarianMTModel", FIELDS, tmp_path)


@pytest.mark.slow
def test_the_draft_does_what_the_handwritten_table_does(tmp_path: Path, reference: Any) -> None:
    assert_right(tmp_path, reference, drafted(tmp_path, build))


@pytest.mark.slow
def test_the_table_does_what_the_handwritten_one_does(tmp_path: Path, reference: Any) -> None:
    found = suggest(tmp_path, build)
    assert found.verdict is Verdict.EXACT, str(found)
    assert_right(tmp_path, reference, found)


def assert_right(tmp_path: Path, reference: Any, found: Suggestion | Drafted) -> None:
    assert '"model.shared.weight [t (s n)]" = "embedding.weight [t (n s)]"' in found.text
    mine = porting.load(tmp_path, build, found.table, dtype=torch.float64).state_dict()
    theirs = porting.load(tmp_path, table="marian", dtype=torch.float64).state_dict()
    assert [name for name, value in theirs.items() if not torch.equal(value, mine[name])] == []
    generator = torch.Generator().manual_seed(1)
    ids, others = (torch.randint(3, 100, (3, length), generator=generator) for length in (9, 7))
    given = {"input_ids": ids, "decoder_input_ids": others}
    assert apart(reference, tmp_path, lambda config: build(config).double(), found, given, given) < BOUND


@pytest.mark.slow
def test_positions_that_are_rounded_otherwise_are_an_approximation(tmp_path: Path, reference: Any) -> None:
    found = suggest(tmp_path, in_float32)
    assert found.verdict is Verdict.APPROXIMATE, str(found)
    assert "its positions are the reference's but for their rounding, off by " in " ".join(found.details())
    assert found.difference is not None
    assert 1e-10 < found.difference < 1e-5


@pytest.mark.parametrize("heads", [2, 3, 4, 6])
def test_an_activation_is_given_with_its_heads_in_turn(heads: int) -> None:
    value = torch.randn(22, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    turned = value.reshape(22, heads, -1).transpose(-1, -2).flatten(-2)
    assert torch.equal(with_heads_in_turn(value, turned + 1e-3, [5, heads]), turned)
    assert torch.equal(with_heads_in_turn(value, turned + 1e-3, []), value)
    other = torch.randn(22, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert torch.equal(with_heads_in_turn(value, other, [heads]), value), (
        "where none is near, the order is the reference's"
    )
