"""What is seen is what the reference computes, in every family and module; and what cannot be seen is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import porting
from porting.errors import PortingError
from porting.seeing import Attention
from porting.seeing.attention_data import AttentionError, Layer
from porting.text import TextError
from porting.trials.inputs import for_port
from tests.families.pairs import PAIRS, Pair
from tests.families.ported import make
from tests.small_checkpoint import WORDS

ONE_EACH = list({pair.table: pair for pair in PAIRS}.values())
SENTENCE = "Return the name of the file."


@pytest.fixture(scope="module")
def seen() -> Attention:
    return porting.attention(SENTENCE)


@pytest.mark.parametrize("pair", ONE_EACH, ids=lambda pair: pair.table)
def test_every_head_is_the_reference_s(pair: Pair, tmp_path: Path) -> None:
    ported = make(pair, tmp_path / "checkpoint")
    ids = torch.tensor([[3, 7, 30, 5, 12, 9, 2]])  # none is padding in any family
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    kind: Any = getattr(transformers, pair.architecture)
    reference = kind.from_pretrained(ported.directory, attn_implementation="eager").eval()
    given = {"input_ids": ids, "attention_mask": inputs["attention_mask"]}
    if reference.config.is_encoder_decoder:
        inputs |= {"decoder_input_ids": ids[:, :1], "decoder_attention_mask": torch.ones_like(ids[:, :1])}
        given |= {"decoder_input_ids": ids[:, :1]}
    with torch.no_grad():
        output = reference(**given, output_attentions=True)
    expected = output.encoder_attentions if reference.config.is_encoder_decoder else output.attentions

    found = porting.attention_of(
        ported.load(), for_port(ported.table.inputs, inputs, torch.float32), [str(one) for one in ids[0].tolist()]
    )
    assert len(found.layers) == len(expected)
    for layer, probabilities in zip(found.layers, expected, strict=True):
        torch.testing.assert_close(layer.heads, probabilities[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "pair", [pair for pair in ONE_EACH if pair.table in {"bart", "marian"}], ids=lambda pair: pair.table
)
def test_of_an_encoder_decoder_the_encoder_is_seen(pair: Pair, tmp_path: Path) -> None:
    directory = make(pair, tmp_path / "checkpoint").directory
    (directory / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS[:36]), encoding="utf-8")
    found = porting.attention("we play soccer at the river", directory)
    assert found.tokens == ("[CLS]", "we", "play", "soccer", "at", "the", "river", "[SEP]")
    assert [tuple(layer.heads.shape) for layer in found.layers] == [(4, 8, 8)] * 2
    assert all("encoder" in layer.name for layer in found.layers)


def test_text_pairs_and_word_pieces(seen: Attention) -> None:
    pieces = porting.attention(list(seen.tokens))
    assert pieces.tokens == seen.tokens
    assert all(torch.equal(one.heads, other.heads) for one, other in zip(pieces.layers, seen.layers, strict=True))
    assert [layer.name for layer in seen.layers] == [f"bert.layers.{number}.attention.core" for number in range(3)]
    two = porting.attention("Open it.", pair="Read it.")
    assert two.tokens == ("[CLS]", "open", "it", ".", "[SEP]", "read", "it", ".", "[SEP]")
    flat = porting.attention(list(two.tokens))  # the same pieces in one segment
    assert not torch.allclose(flat.of(0, 0), two.of(0, 0))


@pytest.mark.parametrize("table", ["bert_into_encoder", "bert_into_torch_encoder", "bert_into_fused"])
def test_the_same_weights_in_another_room_attend_alike(table: str, seen: Attention) -> None:
    other = porting.attention(SENTENCE, table=table)
    for one, layer in zip(seen.layers, other.layers, strict=True):
        torch.testing.assert_close(layer.heads, one.heads, rtol=1e-4, atol=1e-6)


class Own(nn.Module):
    """Somebody's own: two SDPA calls in a loop, one of them causal, and a classifier with a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 24) for _ in range(2)])
        self.mixers = nn.ModuleList([Mixer(causal=causal) for causal in (False, True)])
        self.last = nn.Linear(8, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids)
        for block, mixer in zip(self.blocks, self.mixers, strict=True):
            x = x + mixer(*block(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)).transpose(1, 2).flatten(2)
        return torch.softmax(self.last(x), -1)


class Mixer(nn.Module):
    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


def test_the_first_token_is_shown_unless_it_sees_itself_alone() -> None:
    full = torch.rand(2, 4, 4).softmax(-1)
    causal = full.tril() / full.tril().sum(-1, keepdim=True)
    for heads, expected in (((full, full), 0), ((causal, causal), 3), ((causal, full), 0)):
        layers = tuple(Layer(name=str(number), heads=one) for number, one in enumerate(heads))
        seen = Attention(tokens=("a", "b", "c", "d"), layers=layers, model="mine")
        assert seen.place(None) == expected
        assert seen.to_html() == seen.to_html(token=expected)


def test_a_module_of_one_s_own_needs_no_table() -> None:
    torch.manual_seed(3)
    module = Own().train()
    module.last.eval()
    found = porting.attention_of(module, {"0": torch.tensor([[3, 1, 4, 1]])}, ["a", "b", "c", "d"], name="mine")
    assert [(layer.name, tuple(layer.heads.shape)) for layer in found.layers] == [
        ("mixers.0", (2, 4, 4)),
        ("mixers.1", (2, 4, 4)),
    ]
    assert found.of(1, 0).triu(1).abs().max() == 0
    assert found.of(0, 0).triu(1).abs().max() > 0
    assert found.model == "mine"
    assert module.training
    assert not module.last.training  # as before
    assert not any(part._forward_hooks for part in module.modules())


def test_a_user_s_own_module_through_a_table(tmp_path: Path, seen: Attention) -> None:
    from porting.models.bert import Bert

    found = porting.attention(SENTENCE, into=Bert)
    assert found.layers[0].name == "layers.0.attention.core"
    assert torch.equal(found.of(2, 3), seen.of(2, 3))


def test_layers_heads_and_tokens_are_counted_from_either_end(seen: Attention) -> None:
    assert torch.equal(seen.of(-1, -4), seen.of(2, 0))
    assert seen.place("file") == 6
    assert seen.place(-1) == 8
    assert seen.place("the") == 2


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda one: one.of(3, 0), "there is no layer 3 (there are 3, from 0 to 2) [no-attention]"),
        (lambda one: one.of(0, -5), "there is no head -5 (there are 4, from 0 to 3) [no-attention]"),
        (lambda one: one.place(9), "there is no token 9 (there are 9, from 0 to 8) [no-attention]"),
        (lambda one: one.place("fiel"), "the text has no token 'fiel' (did you mean 'file'?) [no-attention]"),
        (lambda one: one.save("x.gif"), "'x.gif' ends in '.gif' (end it in .html or .png) [no-attention]"),
    ],
)
def test_what_is_not_there_is_named(ask: Any, message: str, seen: Attention) -> None:
    with pytest.raises(AttentionError) as caught:
        ask(seen)
    assert str(caught.value) == message


def test_a_module_that_attends_to_nothing_is_said() -> None:
    with pytest.raises(AttentionError, match="no part of this Linear attends from each of the 3 tokens to each"):
        porting.attention_of(nn.Linear(4, 4), {"0": torch.rand(1, 3, 4)}, ["a", "b", "c"])


def test_pieces_that_the_vocabulary_lacks_are_all_named() -> None:
    with pytest.raises(TextError) as caught:
        porting.attention(["[CLS]", "qqq", "return", "zzz", "qqq"])
    assert [fault.message for fault in caught.value.faults] == [
        "the vocabulary has no token 'qqq'",
        "the vocabulary has no token 'zzz'",
    ]
    for wrong, message in (([], "the list of tokens is empty"), (["a"] * 65, "the text has 65 tokens")):
        with pytest.raises(PortingError, match=message):
            porting.attention(wrong)
    with pytest.raises(AttentionError, match="tokens has no second segment"):
        porting.attention(["[CLS]"], pair="more")
