"""Sizes that are written into a module: its words, and the row at which its positions begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from porting.suggesting import Verdict, suggest
from porting.suggesting.subjects.argument_names import IDS, MASK, roles
from porting.suggesting.subjects.twin import draw_parameters, is_frequencies
from tests.suggesting.oracle import drafted
from tests.suggesting.test_softmax_invariance import Gpt

WORDS = 33


class OwnWords(Gpt):
    """Its alphabet is its own, and nobody is asked for it."""

    def __init__(self, n_embd: int, n_layer: int, n_head: int, n_positions: int) -> None:
        fields = {"n_embd": n_embd, "n_layer": n_layer, "n_head": n_head, "n_positions": n_positions}
        super().__init__(transformers.GPT2Config(vocab_size=WORDS, **fields))  # type: ignore[arg-type]  # as it says


class Later(Gpt):
    """Its positions are counted from 2, as fairseq does it."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]) + 2)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.end(x)
        return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=24, n_layer=2, n_head=3, n_positions=40)
    model: Any = transformers.GPT2Model(config)  # transformers does not type it
    draw_parameters(model, 0)
    folder = tmp_path_factory.mktemp("letters")
    model.save_pretrained(folder)
    return folder


def test_the_draft_follows_the_module_s_own_sizes(source: Path) -> None:
    assert "n_embd" in drafted(source, OwnWords).text
    assert 'source = "wpe.weight [(t|_2) e]"\ntarget = "places.weight [(_2|t) e]"' in drafted(source, Later).text


@pytest.mark.slow
def test_a_module_with_words_of_its_own_is_given_no_others(source: Path) -> None:
    found = suggest(source, OwnWords)
    assert found.verdict is Verdict.EXACT, str(found)
    assert "n_embd" in found.text


@pytest.mark.slow
def test_positions_may_begin_later_in_the_module(source: Path) -> None:
    found = suggest(source, Later)
    assert found.proven, str(found)
    assert 'source = "wpe.weight [(t|_2) e]"\ntarget = "places.weight [(_2|t) e]"' in found.text


class Alone(nn.Module):
    def forward(self, dec_inputs: Tensor, tgt_mask: Tensor) -> None:
        """A decoder that stands alone."""


def test_a_decoder_that_stands_alone_is_given_the_words() -> None:
    assert roles(Alone(), (IDS, MASK))[0] == {"dec_inputs": IDS, "tgt_mask": MASK}


def test_rotary_frequencies_are_not_drawn() -> None:
    module = nn.Module()
    module.register_buffer("inv_freq", 10000.0 ** -torch.arange(0, 1, 0.25))
    module.register_buffer("table", torch.randn(5))
    before = {name: one.clone() for name, one in module.named_buffers()}
    draw_parameters(module, 0)
    assert is_frequencies(before["inv_freq"])
    assert not is_frequencies(before["table"])
    assert torch.equal(module.get_buffer("inv_freq"), before["inv_freq"])
    assert not torch.equal(module.get_buffer("table"), before["table"])
