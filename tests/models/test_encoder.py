"""The textbook encoder against torch.nn.TransformerEncoder, and by itself; and the one that wraps PyTorch's own."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from porting.models.attention import LAYOUTS
from porting.models.encoder import Encoder, EncoderConfig, EncoderForSequenceClassification, EncoderLogits
from porting.models.torch_encoder import TorchEncoder, TorchEncoderForSequenceClassification

SIZES: dict[str, Any] = {  # Any: fields of several types
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 11,
}
BLOCKS: list[dict[str, Any]] = [{"norm_first": False}, {"norm_first": True, "final_norm": True}, {"norm_first": True}]


def named(fields: dict[str, Any]) -> str:
    return " ".join(name for name, value in fields.items() if value) or "post-norm"


def drawn(module: nn.Module) -> Any:  # Any: of the module's own class
    """The module in float64 and evaluation mode, every parameter drawn at realistic scale."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        gain = parameter.ndim == 1 and name.endswith("weight")
        noise = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        parameter.data = (1.0 if gain else 0.0) + 0.3 * noise
    return module.to(torch.float64).eval()


def batch() -> tuple[Tensor, Tensor]:
    """Ids [4 11] and a mask of rows of 11, 8, 5 and 2 tokens."""
    ids = torch.randint(1, 23, (4, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(11) < torch.tensor([[11], [8], [5], [2]])
    return ids * mask, mask


def as_torch(encoder: Encoder) -> TorchEncoder:
    """PyTorch's encoder with the weights of ours, which are in the layout that it has itself: fused."""
    renamed = {}
    for name, value in encoder.state_dict().items():
        for ours, theirs in (
            ("attention_norm", "norm1"),
            ("feed_forward_norm", "norm2"),
            ("attention.qkv.", "self_attn.in_proj_"),
            ("attention.output", "self_attn.out_proj"),
            ("feed_forward.intermediate", "linear1"),
            ("feed_forward.output", "linear2"),
        ):
            name = name.replace(ours, theirs)  # noqa: PLW2901  # one name, renamed step by step
        renamed[f"encoder.{name}" if not name.startswith("embeddings") else name] = value
    target = TorchEncoder(config=encoder.config).to(torch.float64).eval()
    target.load_state_dict(renamed, strict=True)
    return target


@pytest.mark.parametrize("fields", BLOCKS, ids=named)
@pytest.mark.parametrize("padded", [True, False])
def test_it_computes_what_torch_computes(fields: dict[str, Any], padded: bool) -> None:
    ours = drawn(Encoder(config=EncoderConfig(**SIZES, **fields, attention="fused")))
    theirs = as_torch(ours)
    ids, mask = batch() if padded else (batch()[0].clamp(min=1), None)
    found = ours(ids, mask).last_hidden_state
    torch.testing.assert_close(found, theirs(ids, mask), rtol=1e-12, atol=1e-12)


def test_pre_norm_post_norm_and_the_final_norm_are_three_things() -> None:
    found = []
    for fields in BLOCKS:
        torch.manual_seed(0)
        ours = drawn(Encoder(config=EncoderConfig(**SIZES, **fields)))
        found.append(ours(*batch()).last_hidden_state)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert float((found[one] - found[other]).detach().abs().max()) > 0.1


@pytest.mark.parametrize("model_class", [Encoder, TorchEncoder])
@pytest.mark.parametrize("fields", BLOCKS, ids=named)
def test_padding_changes_nothing_for_the_tokens(model_class: type[nn.Module], fields: dict[str, Any]) -> None:
    encoder = drawn(model_class(config=EncoderConfig(**SIZES, **fields)))
    ids, mask = batch()
    for row, length in enumerate((11, 8, 5, 2)):
        alone, together = encoder(ids[row : row + 1, :length]), encoder(ids, mask)
        alone, together = (one if isinstance(one, Tensor) else one.last_hidden_state for one in (alone, together))
        torch.testing.assert_close(together[row, :length], alone[0], rtol=1e-12, atol=1e-12)


def test_the_order_of_the_tokens_matters() -> None:
    encoder = drawn(Encoder(config=EncoderConfig(**SIZES)))
    ids = torch.tensor([[3, 4, 5]])
    forwards, backwards = (encoder(one).last_hidden_state for one in (ids, ids.flip(-1)))
    assert not torch.allclose(forwards.flip(1), backwards)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_probabilities_of_every_layer_and_head_can_be_had(layout: str) -> None:
    model = drawn(EncoderForSequenceClassification(config=EncoderConfig(**SIZES, attention=layout, num_labels=3)))
    ids, mask = batch()
    output = model(ids, mask, output_attentions=True)
    assert isinstance(output, EncoderLogits)
    assert output.logits.shape == (4, 3)
    assert [tuple(one.shape) for one in output.attentions or ()] == [(4, 4, 11, 11)] * 2
    for probabilities in output.attentions or ():
        torch.testing.assert_close(probabilities.sum(-1), torch.ones_like(probabilities[..., 0]))
        assert probabilities[~mask[:, None, None, :].expand_as(probabilities)].eq(0).all()
    assert model(ids, mask).attentions is None


@pytest.mark.parametrize("model_class", [EncoderForSequenceClassification, TorchEncoderForSequenceClassification])
def test_the_classifier_reads_the_first_token(model_class: type[nn.Module]) -> None:
    for pooler in (False, True):
        model = drawn(model_class(config=EncoderConfig(**SIZES, pooler=pooler, num_labels=3)))
        output = model(*batch())
        encoded = model.encoder(*batch())
        first = (encoded if isinstance(encoded, Tensor) else encoded.last_hidden_state)[:, 0]
        if pooler:
            first = torch.tanh(first @ model.pooler.weight.T + model.pooler.bias)
        expected = first @ model.classifier.weight.T + model.classifier.bias
        torch.testing.assert_close(output if isinstance(output, Tensor) else output.logits, expected)


@pytest.mark.parametrize("model_class", [Encoder, TorchEncoder])
@pytest.mark.parametrize("place", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
def test_dropout_is_on_in_training_alone(model_class: type[nn.Module], place: str) -> None:
    rates: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, place: 0.3}
    encoder = model_class(config=EncoderConfig(**SIZES, **rates)).eval()
    first, second = encoder(*batch()), encoder(*batch())
    trained = encoder.train()(*batch())
    first, second, trained = (
        one if isinstance(one, Tensor) else one.last_hidden_state for one in (first, second, trained)
    )
    assert torch.equal(first, second)
    read = model_class is Encoder or place == "hidden_dropout_prob"  # PyTorch knows one dropout
    assert torch.allclose(first, trained, atol=1e-5) is not read


@pytest.mark.parametrize("model_class", [Encoder, TorchEncoder])
def test_wrong_inputs_are_refused(model_class: type[nn.Module]) -> None:
    encoder = model_class(config=EncoderConfig(**SIZES))
    with pytest.raises(ValueError, match="input_ids has 12 tokens a row; max_position_embeddings allows 11"):
        encoder(torch.ones(2, 12, dtype=torch.long))
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 4\]; expected that of input_ids, \[2, 5\]"):
        encoder(torch.ones(2, 5, dtype=torch.long), torch.ones(2, 4))


def test_every_fault_of_a_config_is_named() -> None:
    with pytest.raises(ValueError, match="EncoderConfig has 7 faults") as caught:
        EncoderConfig(
            vocab_size=0, hidden_size=10, num_attention_heads=3, attention="per-head", layer_norm_eps=0.0,
            hidden_dropout_prob=float("nan"), pad_token_id=-1, num_labels=True,
        )  # fmt: skip
    assert str(caught.value).splitlines() == [
        "EncoderConfig has 7 faults:",
        "  vocab_size=0: expected a whole number, 1 or more",
        "  num_labels=True: expected a whole number, 1 or more",
        "  hidden_size=10: expected a multiple of num_attention_heads=3",
        "  attention='per-head': did you mean 'per_head'? expected separate, per_head, fused, interleaved",
        "  hidden_dropout_prob=nan: expected a probability, from 0 to 1",
        "  layer_norm_eps=0.0: expected a number above 0",
        "  pad_token_id=-1: expected None or a token, from 0 to vocab_size - 1",
    ]


@pytest.mark.parametrize("model_class", [EncoderForSequenceClassification, TorchEncoderForSequenceClassification])
def test_fresh_weights_are_drawn_and_no_two_layers_are_alike(model_class: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = model_class(config=EncoderConfig(**SIZES, pooler=True, initializer_range=0.05))
    seen: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.eq(0).all(), name
        elif parameter.ndim == 1:
            assert parameter.eq(1).all(), name
        else:
            assert 0.03 < float(parameter.detach().std()) < 0.07, name
            assert not any(torch.equal(parameter, one) for one in seen), name
            seen.append(parameter)
    assert model.get_parameter("encoder.embeddings.token.weight")[0].eq(0).all()


@pytest.mark.parametrize("model_class", [EncoderForSequenceClassification, TorchEncoderForSequenceClassification])
@pytest.mark.parametrize("fields", [BLOCKS[0], BLOCKS[1]], ids=named)
def test_it_learns(model_class: type[nn.Module], fields: dict[str, Any]) -> None:
    """Whether the token after the first comes again: attention has to find it."""
    torch.manual_seed(0)
    config = EncoderConfig(**SIZES, **fields, initializer_range=0.15, hidden_dropout_prob=0.0)
    model = model_class(config=config).train()
    ids = torch.randint(2, 8, (96, 6))
    labels = (ids[:, 1:2] == ids[:, 2:]).any(-1).long()
    ids[:, 0] = 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(60):
        output = model(ids)
        loss = nn.functional.cross_entropy(output if isinstance(output, Tensor) else output.logits, labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0], (losses[0], losses[-1])


def test_it_compiles_as_one_graph() -> None:
    encoder = drawn(Encoder(config=EncoderConfig(**SIZES)))
    compiled: Any = torch.compile(encoder, fullgraph=True, backend="eager")
    expected = encoder(*batch()).last_hidden_state
    torch.testing.assert_close(compiled(*batch()).last_hidden_state, expected, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------- PyTorch's fast path, which no proof sees


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("fields", BLOCKS, ids=named)
def test_the_fast_path_computes_what_the_layers_compute(fields: dict[str, Any], dtype: torch.dtype) -> None:
    """Hooks switch it off, so what a proof sees is the other path."""
    encoder = drawn(TorchEncoder(config=EncoderConfig(**SIZES, **fields))).to(dtype)
    found = {}
    for fast in (True, False):
        torch.backends.mha.set_fastpath_enabled(fast)
        try:
            whole_layer: Any = torch._transformer_encoder_layer_fwd  # it has no types
            with torch.no_grad(), patch.object(torch, whole_layer.__name__, wraps=whole_layer) as taken:
                found[fast] = encoder(*batch())
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        assert taken.call_count == (SIZES["num_hidden_layers"] if fast else 0)
    bound = 64 * torch.finfo(dtype).eps
    torch.testing.assert_close(found[True], found[False], rtol=bound, atol=bound * float(found[False].abs().max()))
