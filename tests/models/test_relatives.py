"""BERT's relatives by themselves; that they compute what transformers does is shown in tests/families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from porting.models.albert import Albert, AlbertConfig
from porting.models.bert_config import BertConfig
from porting.models.distilbert import DistilBert
from porting.models.electra import Electra, ElectraConfig
from porting.models.mpnet import MPNet, RelativeBias
from porting.models.prenorm_bert import MegatronBert, PreNormBert

SIZES: dict[str, Any] = {  # Any: fields of several types
    "vocab_size": 30,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 20,
}
IDS = torch.tensor([[1, 7, 9, 2, 4], [1, 5, 8, 2, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])


MAKE: dict[str, Callable[..., nn.Module]] = {
    "albert": lambda **fields: Albert(config=AlbertConfig(embedding_size=6, **fields)),
    "electra": lambda **fields: Electra(config=ElectraConfig(embedding_size=6, **fields)),
    "distilbert": lambda **fields: DistilBert(config=BertConfig(**fields)),
    "mpnet": lambda **fields: MPNet(config=BertConfig(**fields)),
    "prenorm": lambda **fields: PreNormBert(config=BertConfig(**fields)),
    "megatron": lambda **fields: MegatronBert(config=BertConfig(**fields)),
}


def relative(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MAKE[kind](**SIZES, num_hidden_layers=3, initializer_range=0.3).double().eval()


@pytest.mark.parametrize("kind", MAKE)
def test_what_stands_in_padding_is_seen_by_no_other_token(kind: str) -> None:
    model = relative(kind)
    other = IDS.clone()
    other[1, 4] = 17
    one, two = model(IDS, MASK).last_hidden_state, model(other, MASK).last_hidden_state
    torch.testing.assert_close(one[1, :4], two[1, :4], rtol=0, atol=1e-12)
    assert not torch.allclose(one, model(IDS).last_hidden_state)


@pytest.mark.parametrize("kind", MAKE)
def test_the_fused_kernel_agrees_with_attention_written_out(kind: str) -> None:
    model = relative(kind)
    output = model(IDS, MASK, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(model(IDS, MASK).last_hidden_state, output.last_hidden_state, rtol=0, atol=1e-12)
    assert (len(output.attentions), len(output.hidden_states)) == (3, 4)
    assert all(
        torch.allclose(attention.sum(-1), torch.ones((), dtype=attention.dtype)) for attention in output.attentions
    )


@pytest.mark.parametrize("kind", MAKE)
def test_it_is_initialised_as_bert_is(kind: str) -> None:
    for name, parameter in relative(kind).named_parameters():
        if name.endswith("bias"):
            assert parameter.eq(0).all(), name
        elif "norm" in name:
            assert parameter.eq(1).all(), name
        else:
            assert 0 < parameter.abs().max() <= 0.6, name  # cut off at two standard deviations


@pytest.mark.parametrize("kind", ["distilbert", "mpnet"])
def test_a_model_of_one_kind_of_text_takes_no_token_types(kind: str) -> None:
    with pytest.raises(ValueError, match="token_type_ids were passed, and this model knows one kind of text"):
        relative(kind)(IDS, None, torch.zeros_like(IDS))


def test_a_layer_of_albert_serves_the_depths_of_its_group() -> None:
    albert = Albert(config=AlbertConfig(**SIZES, num_hidden_layers=12, num_hidden_groups=4))
    places = {id(layer): number for number, layer in enumerate(albert.layers)}
    assert [places[id(layer)] for layer in albert.depths()] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    uneven = Albert(config=AlbertConfig(**SIZES, num_hidden_layers=5, num_hidden_groups=2))
    places = {id(layer): number for number, layer in enumerate(uneven.layers)}
    # transformers' formula
    assert [places[id(layer)] for layer in uneven.depths()] == [int(depth / (5 / 2)) for depth in range(5)]


def test_a_config_of_a_relative_tells_all_its_faults() -> None:
    with pytest.raises(ValueError, match="AlbertConfig has 3 faults") as caught:
        AlbertConfig(vocab_size=0, embedding_size=0, num_hidden_groups=0)
    assert [line.split("=")[0].strip() for line in str(caught.value).splitlines()[1:]] == [
        "vocab_size",
        "embedding_size",
        "num_hidden_groups",
    ]
    with pytest.raises(ValueError, match="summary_dropout=2: expected a probability, from 0 to 1"):
        ElectraConfig(summary_dropout=2)


def test_every_distance_has_the_bucket_that_transformers_gives_it() -> None:
    """There the buckets are made of logarithms in float32, here of whole numbers."""
    length = 700
    bias = RelativeBias(config=BertConfig(**SIZES))
    with torch.no_grad():
        bias.buckets.weight.copy_(torch.arange(32)[:, None].expand(32, 2))
    places = torch.arange(length)
    bucket: Any = MPNetEncoder.relative_position_bucket  # it has no types
    meant = bucket(places[None, :] - places[:, None])
    assert torch.equal(bias(length)[0, 0], meant.float())
    assert meant.unique().numel() == 31  # no distance has bucket 16: 0 to the right is 0


def test_the_residual_stream_of_a_pre_norm_model_is_normed_once_at_the_end() -> None:
    model = relative("prenorm")
    output = model(IDS, MASK, output_hidden_states=True)
    norm = model.get_submodule("norm")
    assert torch.equal(output.last_hidden_state, norm(output.hidden_states[-1]))
    assert not torch.allclose(output.last_hidden_state, output.hidden_states[-1])
