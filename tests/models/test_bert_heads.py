"""The heads against transformers': logits, gradients, dropout; the tie; and that they learn."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from porting import models
from tests.models.twins import (
    HEADS,
    KINDS,
    TINY,
    UNUSED_WORD,
    distance,
    inputs_for,
    main_outputs,
    our_name,
    twins,
)


def scalar(output: object) -> Tensor:
    """A loss that weighs every logit differently, so that no two can stand in for each other."""
    total = torch.zeros((), dtype=torch.float64)
    for values in main_outputs(output).values():
        weights = torch.linspace(-1, 2, values.numel(), dtype=values.dtype).view(values.shape)
        total = total + (weights * values).sum()
    return total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", HEADS)
def test_every_output_is_that_of_transformers(architecture: str, kind: str) -> None:
    theirs, ours = twins(architecture)
    given = inputs_for(architecture, kind)
    found = ours(**given, output_hidden_states=True, output_attentions=True)
    raw = theirs(**given, output_hidden_states=True, output_attentions=True)
    expected, fused = main_outputs(raw), main_outputs(ours(**given))
    assert expected.keys() == main_outputs(found).keys() == fused.keys()
    for name, value in expected.items():
        assert distance(main_outputs(found)[name], value) <= 1e-12, name
        assert distance(fused[name], value) <= 1e-12, name
    for states in ("hidden_states", "attentions"):
        for mine, other in zip(getattr(found, states), getattr(raw, states), strict=True):
            assert distance(mine, other) <= 1e-12


@pytest.mark.parametrize("written_out", [False, True], ids=["fused", "written out"])
@pytest.mark.parametrize("architecture", HEADS)
def test_every_gradient_is_that_of_transformers(architecture: str, written_out: bool) -> None:
    pair = twins(architecture, attention="eager" if written_out else "sdpa")
    given = inputs_for(architecture)
    torch.autograd.backward(scalar(pair.theirs(**given)))
    torch.autograd.backward(scalar(pair.ours(**given, output_attentions=written_out)))
    mine = {name: parameter.grad for name, parameter in pair.ours.named_parameters()}
    theirs = {our_name(name, bare=pair.bare): parameter.grad for name, parameter in pair.theirs.named_parameters()}
    assert mine.keys() == theirs.keys()
    largest = max(float(gradient.abs().max()) for gradient in theirs.values() if gradient is not None)
    for name, expected in theirs.items():
        found = mine[name]
        assert found is not None, name
        assert expected is not None, name
        if name.endswith("key.bias"):  # softmax cannot see it: its gradient is 0, and what is left is rounding
            assert max(found.abs().max(), expected.abs().max()) <= 1e-12 * largest, name
        else:
            assert distance(found, expected) <= 1e-11, name


@pytest.mark.parametrize("written_out", [False, True], ids=["fused", "written out"])
def test_gradients_are_those_of_finite_differences(written_out: bool) -> None:
    """Against no other implementation: every parameter of a small model, the tied one included."""
    sizes: dict[str, Any] = {
        "hidden_size": 4,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 5,
    }
    _, model = twins("BertForPreTraining", **sizes)
    given = inputs_for("BertForPreTraining")
    names, values = zip(*model.named_parameters(), strict=True)

    def function(*parameters: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(names, parameters, strict=True))
        output = torch.func.functional_call(model, named, kwargs={**given, "output_attentions": written_out})
        return tuple(main_outputs(output).values())

    # The padding word's row has no gradient by definition, so it is held fixed at what the input never reads.
    given["input_ids"] = given["input_ids"].clamp(min=1)
    assert torch.autograd.gradcheck(function, values, fast_mode=True, atol=1e-6)


@pytest.mark.parametrize("architecture", HEADS)
def test_dropout_falls_where_it_falls_in_transformers(architecture: str) -> None:
    """The same seed gives the same masks, if every dropout comes in the same order and in the same shape."""
    theirs, ours = twins(
        architecture, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3, classifier_dropout=0.4
    )
    given = inputs_for(architecture)
    torch.manual_seed(3)
    expected = main_outputs(theirs.train()(**given))
    torch.manual_seed(3)
    found = main_outputs(ours.train()(**given, output_attentions=True))
    for name, value in expected.items():
        assert distance(found[name], value) <= 1e-12, name


@pytest.mark.parametrize(
    "architecture", ["BertForSequenceClassification", "BertForTokenClassification", "BertForMultipleChoice"]
)
def test_classifier_dropout_is_its_own_and_else_that_of_the_hidden_states(architecture: str) -> None:
    given = inputs_for(architecture)
    everything: list[dict[str, Any]] = [{"classifier_dropout": 1.0}, {"hidden_dropout_prob": 1.0}]
    for fields in everything:
        ours = twins(architecture, **fields).ours.train()
        logits = ours(**given).logits
        bias = ours.get_parameter("classifier.bias")
        assert torch.equal(logits, bias.expand(*logits.shape[:-1], -1).expand_as(logits))
    kept = twins(architecture, classifier_dropout=0.0, hidden_dropout_prob=1.0).ours.train()(**given).logits
    assert not torch.equal(kept, bias.expand_as(kept))


@pytest.mark.parametrize("changes", [{"hidden_act": "relu"}, {"hidden_act": "gelu_new"}, {"layer_norm_eps": 0.1}])
@pytest.mark.parametrize("architecture", ["BertForPreTraining", "BertForMaskedLM"])
def test_the_masked_lm_head_has_the_activation_and_the_eps_of_the_config(
    architecture: str, changes: dict[str, Any]
) -> None:
    theirs, ours = twins(architecture, **changes)
    given = inputs_for(architecture)
    expected, found = main_outputs(theirs(**given)), main_outputs(ours(**given))
    for name, value in expected.items():
        assert distance(found[name], value) <= 1e-12, name


@pytest.mark.parametrize("labels", [1, 4])
@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "BertForTokenClassification"])
def test_num_labels_is_the_width_of_the_classifier(architecture: str, labels: int) -> None:
    theirs, ours = twins(architecture, num_labels=labels)
    given = inputs_for(architecture)
    found = ours(**given).logits
    assert found.shape[-1] == labels
    assert distance(found, theirs(**given).logits) <= 1e-12


# ------------------------------------------------------------------------------------------------- the tie

TIED = ["BertForPreTraining", "BertForMaskedLM"]


def mlm_logits(model: nn.Module) -> Tensor:
    return next(iter(main_outputs(model(**inputs_for("BertForMaskedLM"))).values()))


def assert_tied(model: nn.Module) -> None:
    """Doubles the embedding of a word that no input contains: its logits follow, and no others."""
    word = UNUSED_WORD
    before = mlm_logits(model).detach().clone()
    model.get_parameter("bert.embeddings.word.weight").data[word] *= 2
    after = mlm_logits(model)
    bias = model.get_parameter("mlm.bias")[word]
    torch.testing.assert_close(after[..., word], 2 * (before[..., word] - bias) + bias)
    assert not torch.equal(after[..., word], before[..., word])
    assert torch.equal(after[..., :word], before[..., :word])


@pytest.mark.parametrize("architecture", TIED)
def test_the_tie_survives_whatever_is_done_to_the_model(architecture: str) -> None:
    model = twins(architecture).ours
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert len(names) == len(set(names)) == len({id(parameter) for parameter in model.parameters()})
    assert [name for name in names if model.get_parameter(name).shape[0] == TINY["vocab_size"]] == [
        "bert.embeddings.word.weight",
        "mlm.bias",
    ]
    expected = mlm_logits(model)
    assert_tied(copy.deepcopy(model))
    assert torch.equal(mlm_logits(model), expected)  # the copy shares nothing with its original
    assert_tied(copy.deepcopy(model).to(torch.float32).to(torch.float64))

    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    with torch.device("meta"):
        fresh = type(model)(config=model.bert.config).eval()  # type: ignore[union-attr]  # one of ours
    fresh.load_state_dict(torch.load(saved, weights_only=True), assign=True)
    assert torch.equal(mlm_logits(fresh), expected)
    assert_tied(fresh)
    assert_tied(fresh.to_empty(device="cpu").requires_grad_(False).apply(redraw))


def redraw(part: nn.Module) -> None:
    for parameter in part.parameters(recurse=False):
        torch.nn.init.normal_(parameter, std=0.2)


@pytest.mark.parametrize("architecture", TIED)
def test_a_tie_that_is_broken_is_seen(architecture: str) -> None:
    model = twins(architecture).ours
    frozen = model.get_parameter("bert.embeddings.word.weight").detach().clone()
    head = model.get_submodule("mlm")
    tied_forward = head.forward
    head.forward = lambda hidden, _words: tied_forward(hidden, frozen)  # the fault planted
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        assert_tied(model)


# ------------------------------------------------------------------------------------------------- learning


def test_pretraining_learns() -> None:
    config = models.BertConfig(**{**TINY, "initializer_range": 0.1})
    model = models.BertForPreTraining(config=config)
    given = inputs_for("BertForPreTraining")
    words, pairs = given["input_ids"].flip(-1), torch.tensor([0, 1, 0, 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        output = model(**given)
        loss = nn.functional.cross_entropy(output.mlm_logits.flatten(0, 1), words.flatten())
        loss = loss + nn.functional.cross_entropy(output.nsp_logits, pairs)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0], losses


@pytest.mark.parametrize("architecture", HEADS)
def test_fresh_heads_are_initialised_as_the_encoder_is(architecture: str) -> None:
    model = HEADS[architecture](config=models.BertConfig(**TINY))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.eq(0).all(), name
        elif "norm" in name:
            assert parameter.eq(1).all(), name
        else:
            assert 0 < parameter.abs().max() <= 0.04, name


@pytest.mark.few(4)
@pytest.mark.parametrize("architecture", HEADS)
def test_every_head_compiles_as_one_graph(architecture: str) -> None:
    _, ours = twins(architecture, num_hidden_layers=1)
    given = inputs_for(architecture)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    expected = main_outputs(ours(**given))
    found = main_outputs(compiled(**given))
    for name, value in expected.items():
        assert distance(found[name], value) <= 1e-12
