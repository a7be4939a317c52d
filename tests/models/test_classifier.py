"""The classifier that shows where it looked: against torch's own layers, and whether it learns to look there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from porting.models.classifier import Classifier, ClassifierConfig
from porting.models.positions import sinusoidal_positions

SIZES: dict[str, Any] = {  # Any: fields of several types
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "max_position_embeddings": 11,
    "num_labels": 3,
}


IN_TORCH = {
    "attention_norm": "norm1",
    "attention.output": "self_attn.out_proj",
    "feed_forward_norm": "norm2",
    "intermediate": "linear1",
    "output": "linear2",
}


def drawn(**fields: Any) -> Classifier:  # fields of several types
    model = Classifier(config=ClassifierConfig(**{**SIZES, **fields}))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        gain = parameter.ndim == 1 and name.endswith("weight")
        noise = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        parameter.data = (1.0 if gain else 0.0) + 0.3 * noise
    return model.to(torch.float64).eval()


def batch() -> tuple[Tensor, Tensor]:
    """Ids [4 11] and a mask of rows of 11, 8, 5 and 2 tokens."""
    ids = torch.randint(1, 23, (4, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(11) < torch.tensor([[11], [8], [5], [2]])
    return ids * mask, mask


def by_torch(model: Classifier, ids: Tensor, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The same, written down once more with torch.nn.TransformerEncoderLayer."""
    config = model.config
    angles = torch.tensor(
        [
            [place / 10000 ** (2 * (k // 2) / config.hidden_size) for k in range(config.hidden_size)]
            for place in range(11)
        ],
        dtype=torch.float64,
    )
    positions = torch.where(torch.arange(config.hidden_size) % 2 == 0, angles.sin(), angles.cos()).float().double()
    hidden = model.encoder.embeddings.token.weight[ids] * math.sqrt(config.hidden_size) + positions[: ids.shape[-1]]
    maps = []
    for block in model.encoder.blocks:
        weights = block.state_dict()
        layer = nn.TransformerEncoderLayer(
            config.hidden_size, config.num_attention_heads, config.intermediate_size, activation="relu",
            batch_first=True, norm_first=True,
        )  # fmt: skip
        loaded = {}
        for kind in ("weight", "bias"):
            three = [weights[f"attention.{part}.{kind}"] for part in ("query", "key", "value")]
            loaded[f"self_attn.in_proj_{kind}"] = torch.cat(three)
            loaded |= {f"{theirs}.{kind}": weights[f"{ours}.{kind}"] for ours, theirs in IN_TORCH.items()}
        layer.to(torch.float64).eval().load_state_dict(loaded, strict=True)
        normed = layer.norm1(hidden)
        found = layer.self_attn(normed, normed, normed, key_padding_mask=~mask, average_attn_weights=False)
        maps.append(found[1])
        hidden = layer(hidden, src_key_padding_mask=~mask)
    hidden = hidden if model.encoder.norm is None else model.encoder.norm(hidden)
    return hidden[:, 0] @ model.classifier.weight.T + model.classifier.bias, maps


@pytest.mark.parametrize(
    "fields", [{}, {"num_attention_heads": 4}, {"num_hidden_layers": 3}, {"final_norm": True}], ids=str
)
def test_it_computes_what_torch_computes(fields: dict[str, Any]) -> None:
    model = drawn(**fields)
    ids, mask = batch()
    output = model(ids, mask)
    logits, maps = by_torch(model, ids, mask)
    torch.testing.assert_close(output.logits, logits, rtol=1e-12, atol=1e-12)
    assert len(output.attentions) == len(maps) == fields.get("num_hidden_layers", 2)
    for found, expected in zip(output.attentions, maps, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_positions_are_those_of_the_paper() -> None:
    table = sinusoidal_positions(600, 6)
    for place in (0, 1, 17, 599):
        for k in range(3):
            angle = place / 10000 ** (2 * k / 6)
            assert float(table[place, 2 * k]) == pytest.approx(math.sin(angle), abs=1e-7)
            assert float(table[place, 2 * k + 1]) == pytest.approx(math.cos(angle), abs=1e-7)


def test_the_positions_are_saved_and_not_trained() -> None:
    model = drawn()
    assert [name for name in model.state_dict() if "positions" in name] == ["encoder.embeddings.positions"]
    assert not [name for name, _ in model.named_parameters() if "positions" in name]


def test_padding_changes_nothing() -> None:
    model = drawn()
    ids, mask = batch()
    together = model(ids, mask).logits
    for row, length in enumerate((11, 8, 5, 2)):
        torch.testing.assert_close(together[row], model(ids[row : row + 1, :length]).logits[0], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(model(ids).logits, together)


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="input_ids has 12 tokens a row; max_position_embeddings allows 11"):
        drawn()(torch.ones(2, 12, dtype=torch.long))
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 4\]; expected that of input_ids, \[2, 5\]"):
        drawn()(torch.ones(2, 5, dtype=torch.long), torch.ones(2, 4))


def test_it_learns_and_looks_at_what_it_is_asked_about() -> None:
    """One of three words stands somewhere, and which one it is decides: the first token has to look there."""
    torch.manual_seed(0)
    model = Classifier(config=ClassifierConfig(**{**SIZES, "dropout": 0.0})).train()
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(6, 23, (128, 9), generator=generator)
    labels = torch.randint(0, 3, (128,), generator=generator)
    places = torch.randint(1, 9, (128,), generator=generator)
    ids[:, 0] = 1
    ids[torch.arange(128), places] = 2 + labels
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(80):
        loss = nn.functional.cross_entropy(model(ids[:96]).logits, labels[:96])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0], (losses[0], losses[-1])
    with torch.no_grad():
        output = model.eval()(ids[96:])
    assert float((output.logits.argmax(-1) == labels[96:]).double().mean()) > 0.9
    looked = torch.stack([attention.mean(1)[torch.arange(32), 0, places[96:]] for attention in output.attentions])
    assert float(looked.max(0).values.mean()) > 3 / 9  # three times what looking everywhere would give


def test_dropout_is_on_in_training_alone() -> None:
    model = drawn(dropout=0.3)
    ids, mask = batch()
    assert torch.equal(model(ids, mask).logits, model(ids, mask).logits)
    assert not torch.allclose(model(ids, mask).logits, model.train()(ids, mask).logits)


def test_fresh_weights() -> None:
    model = Classifier(config=ClassifierConfig(**SIZES))
    assert model.encoder.embeddings.token.weight[0].eq(0).all()
    scaled = model.encoder.embeddings.token.weight[1:] * math.sqrt(16)
    assert 0.8 < float(scaled.detach().std()) < 1.2
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.eq(0).all(), name
        elif parameter.ndim == 1:
            assert parameter.eq(1).all(), name
