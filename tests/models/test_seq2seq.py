from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from porting.models.seq2seq import Cache, MultiHeadAttention, Seq2Seq, Seq2SeqConfig, causal_mask, padding_mask
from tests.models.seq2seq_twins import PAD, WORDS, source, target, twins
from tests.models.twins import distance

TINY = Seq2SeqConfig(
    vocab_size=WORDS,
    hidden_size=24,
    num_encoder_layers=2,
    num_decoder_layers=2,
    encoder_attention_heads=3,
    decoder_attention_heads=4,
    encoder_intermediate_size=32,
    decoder_intermediate_size=20,
    max_position_embeddings=19,
)


@pytest.fixture
def model() -> Seq2Seq:
    made = Seq2Seq(config=TINY).to(torch.float64).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return made


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("masks", ["both", "source", "target", "none"])
def test_it_computes_what_bart_computes(scaled: bool, masks: str) -> None:
    theirs, ours = twins(scale_embedding=scaled)
    given = {**source(), **target()}
    if masks in ("target", "none"):
        del given["attention_mask"]
    if masks in ("source", "none"):
        del given["decoder_attention_mask"]
    with torch.no_grad():
        assert distance(ours(**given), theirs(**given).logits) <= 1e-13


def test_a_mask_is_read_alike_in_every_dtype() -> None:
    _, ours = twins()
    with torch.no_grad():
        expected = ours(**source(), **target())
        for dtype in (torch.bool, torch.float32, torch.uint8):
            given = {name: one.to(dtype) if "mask" in name else one for name, one in {**source(), **target()}.items()}
            assert torch.equal(ours(**given), expected)


def test_positions_alternate_sines_and_cosines_as_the_paper_has_them(model: Seq2Seq) -> None:
    table = Seq2Seq(config=TINY).encoder.positions.table
    for place in (0, 1, 7, 18):
        for k in range(12):
            angle = place / 10000 ** (2 * k / 24)
            assert table[place, 2 * k].item() == pytest.approx(math.sin(angle), abs=1e-7)
            assert table[place, 2 * k + 1].item() == pytest.approx(math.cos(angle), abs=1e-7)
    names = set(dict(model.named_parameters()))
    assert not {name for name in names if "positions" in name}  # an optimizer leaves them alone,
    assert {"encoder.positions.table", "decoder.positions.table"} <= model.state_dict().keys()  # and a file has them


def test_masks_combine_by_and() -> None:
    attention_mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    combined = causal_mask(2, past=1) & padding_mask(attention_mask)
    assert combined.shape == (2, 1, 2, 3)
    for row in range(2):
        for query in range(2):
            for key in range(3):
                seen = key <= query + 1 and attention_mask[row, key] == 1
                assert combined[row, 0, query, key].item() is bool(seen)


def test_no_token_sees_what_follows_it_or_what_is_padding(model: Seq2Seq) -> None:
    given = {**source(), **target()}
    with torch.no_grad():
        before = model(**given)
        later = given["decoder_input_ids"].clone()
        later[:, 6:] = (later[:, 6:] + 5) % WORDS
        after = model(**{**given, "decoder_input_ids": later})
        assert torch.equal(after[:, :6], before[:, :6])
        assert not torch.equal(after[:, 6:], before[:, 6:])
        for name in ("input_ids", "decoder_input_ids"):
            mask = given[name.replace("input_ids", "attention_mask")].bool()
            other = torch.where(mask, given[name], 17)
            kept = given["decoder_attention_mask"].bool()
            assert torch.equal(model(**{**given, name: other})[kept], before[kept])


def test_rows_of_padding_alone_give_numbers(model: Seq2Seq) -> None:
    given = {**source(), **target()}
    given["attention_mask"][2] = 0
    given["decoder_attention_mask"][1] = 0
    with torch.no_grad():
        assert bool(model(**given).isfinite().all())
        half = {"attention_mask": given["attention_mask"], "decoder_attention_mask": given["decoder_attention_mask"]}
        assert bool(model.to(torch.float16)(given["input_ids"], given["decoder_input_ids"], **half).isfinite().all())


def test_what_may_attend_to_nothing_attends_evenly_to_all(model: Seq2Seq) -> None:
    attention = model.get_submodule("encoder.layers.0.attention")
    assert isinstance(attention, MultiHeadAttention)
    hidden, states = torch.randn(2, 3, 24, dtype=torch.float64), torch.randn(2, 7, 24, dtype=torch.float64)
    found = attention(hidden, *attention.keys_and_values(states), torch.zeros(2, 1, 1, 7, dtype=torch.bool))
    expected = attention.output(attention.value(states).mean(dim=1, keepdim=True)).expand_as(found)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("pieces", [[1] * 11, [3, 1, 1, 4, 2], [10, 1]])
@pytest.mark.parametrize("padded", [True, False])
def test_with_caches_every_logit_is_what_it_is_without(model: Seq2Seq, pieces: list[int], padded: bool) -> None:
    given, mine = source(), target()
    ids, mask = mine["decoder_input_ids"], mine["decoder_attention_mask"] if padded else None
    with torch.no_grad():
        whole = model(**given, decoder_input_ids=ids, decoder_attention_mask=mask)
        memory = model.encode(**given)
        caches: tuple[Cache, ...] | None = None
        found: list[Tensor] = []
        past = 0
        for piece in pieces:
            ours = None if mask is None else mask[:, : past + piece]
            new = ids[:, past : past + piece]
            logits, caches = model.decode(new, memory, given["attention_mask"], ours, caches)
            found.append(logits)
            past += piece
    assert distance(torch.cat(found, dim=1), whole) <= 1e-13


def test_with_caches_keys_and_values_are_computed_once(model: Seq2Seq) -> None:
    seen: list[tuple[str, int]] = []
    for name in ("attention.key", "cross_attention.value"):
        part = model.get_submodule(f"decoder.layers.1.{name}")
        part.register_forward_hook(lambda _, args, __, name=name: seen.append((name, args[0].shape[1])))
    with torch.no_grad():
        memory = model.encode(**source())
        caches: tuple[Cache, ...] | None = None
        for place in range(3):
            ids = target()["decoder_input_ids"][:, place : place + 1]
            _, caches = model.decode(ids, memory, source()["attention_mask"], caches=caches)
    assert seen == [("attention.key", 1), ("cross_attention.value", 19), ("attention.key", 1), ("attention.key", 1)]


def test_what_does_not_fit_is_refused(model: Seq2Seq) -> None:
    long, mine, mask = torch.full((1, 20), 5), torch.full((1, 3), 5), torch.ones(1, 4)
    with pytest.raises(ValueError, match="a row has 20 tokens; max_position_embeddings allows 19"):
        model(long, mine)
    with pytest.raises(ValueError, match="a row has 20 tokens; max_position_embeddings allows 19"):
        model(mine, long)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[1, 4\]"):
        model(mine, mine, mask)
    with pytest.raises(ValueError, match=r"decoder_attention_mask has shape \[1, 4\]; expected \[1, 3\]: past and new"):
        model(mine, mine, None, mask)
    _, caches = model.decode(long[:, :18], model.encode(mine))
    with pytest.raises(ValueError, match="a row has 20 tokens"):
        model.decode(long[:, :2], model.encode(mine), caches=caches)


def test_every_fault_of_a_config_is_told_at_once() -> None:
    with pytest.raises(ValueError, match="Seq2SeqConfig has 5 faults") as caught:
        Seq2SeqConfig(hidden_size=25, hidden_act="ge", dropout=2, pad_token_id=-1, encoder_attention_heads=5)
    assert str(caught.value).splitlines()[1:] == [
        "  hidden_size=25: expected a multiple of decoder_attention_heads=8",
        "  hidden_size=25: expected an even number, for a sine and a cosine of each frequency",
        "  hidden_act='ge': did you mean 'gelu'? expected gelu, gelu_new, gelu_pytorch_tanh, relu, silu, swish, tanh",
        "  dropout=2: expected a probability, from 0 to 1",
        "  pad_token_id=-1: expected a token, from 0 to vocab_size - 1",
    ]


def test_dropout_has_its_places_and_its_own_probability_in_each() -> None:
    """One probability at a time, everywhere at once: each changes what the model gives in training, and only there."""
    for field in ("dropout", "attention_dropout", "activation_dropout"):
        off: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
        made = Seq2Seq(config=Seq2SeqConfig(**{**SMALL, **off, field: 0.4}))
        given = {**source(), **target()}
        with torch.no_grad():
            assert not torch.equal(made.train()(**given), made(**given))
            assert torch.equal(made.eval()(**given), made(**given))


SMALL: dict[str, Any] = {  # Any: to be spread over arguments of other types as well
    "vocab_size": WORDS,
    "hidden_size": 16,
    "max_position_embeddings": 19,
    "pad_token_id": PAD,
}


def test_a_new_model_is_drawn_so_that_it_can_learn() -> None:
    torch.manual_seed(0)
    made = Seq2Seq(config=Seq2SeqConfig(vocab_size=500, hidden_size=256))
    assert made.embedding.weight.std().item() == pytest.approx(256**-0.5, rel=0.02)
    bound = math.sqrt(6 / (256 + 2048))  # Glorot and Bengio 2010, equation 16
    weight = made.get_parameter("encoder.layers.5.feed_forward.intermediate.weight")
    assert bound * 0.99 < weight.abs().max().item() <= bound
    assert all(not one.any() for name, one in made.named_parameters() if name.endswith("bias"))
    with torch.device("meta"):
        assert Seq2Seq(config=TINY).embedding.weight.is_meta
