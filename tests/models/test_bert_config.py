"""The hyperparameters: what is refused, in which words, and that nothing about a config can change later."""

from __future__ import annotations

import dataclasses

import pytest

from porting.models import BertConfig

KNOWN = "gelu, gelu_new, gelu_pytorch_tanh, relu, silu, swish, tanh"


def test_the_defaults_are_those_of_bert_base() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertConfig()
    for field in dataclasses.fields(BertConfig):
        if field.name == "padding_position":  # a relative's way to count, which BERT's config has no word for
            continue
        assert getattr(BertConfig(), field.name) == getattr(theirs, field.name), field.name


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BertConfig().hidden_size = 1  # type: ignore[misc]  # that it is read-only is what is tested


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("vocab_size", 0, "vocab_size=0: expected a whole number, 1 or more"),
        ("hidden_size", -768, "hidden_size=-768: expected a whole number, 1 or more"),
        ("num_hidden_layers", 2.0, "num_hidden_layers=2.0: expected a whole number, 1 or more"),
        ("num_attention_heads", "12", "num_attention_heads='12': expected a whole number, 1 or more"),
        ("intermediate_size", True, "intermediate_size=True: expected a whole number, 1 or more"),
        ("max_position_embeddings", 0, "max_position_embeddings=0: expected a whole number, 1 or more"),
        ("type_vocab_size", 0, "type_vocab_size=0: expected a whole number, 1 or more"),
        ("num_labels", None, "num_labels=None: expected a whole number, 1 or more"),
        ("hidden_size", 770, "hidden_size=770: expected a multiple of num_attention_heads=12"),
        ("hidden_dropout_prob", 1.5, "hidden_dropout_prob=1.5: expected a probability, from 0 to 1"),
        ("hidden_dropout_prob", None, "hidden_dropout_prob=None: expected a probability, from 0 to 1"),
        (
            "attention_probs_dropout_prob",
            -0.1,
            "attention_probs_dropout_prob=-0.1: expected a probability, from 0 to 1",
        ),
        ("classifier_dropout", 2, "classifier_dropout=2: expected a probability, from 0 to 1"),
        ("layer_norm_eps", 0.0, "layer_norm_eps=0.0: expected a number above 0"),
        ("layer_norm_eps", float("nan"), "layer_norm_eps=nan: expected a number above 0"),
        ("initializer_range", -0.02, "initializer_range=-0.02: expected a number above 0"),
        ("initializer_range", float("inf"), "initializer_range=inf: expected a number above 0"),
        (
            "pad_token_id",
            30522,
            "pad_token_id=30522: expected None or a token, from 0 to vocab_size - 1",
        ),
        ("pad_token_id", -1, "pad_token_id=-1: expected None or a token, from 0 to vocab_size - 1"),
        (
            "hidden_act",
            "gelu_nwe",
            f"hidden_act='gelu_nwe': did you mean 'gelu_new'? expected {KNOWN}",
        ),
        (
            "hidden_act",
            ["gelu"],
            f"hidden_act=['gelu']: did you mean 'gelu'? expected {KNOWN}",
        ),
    ],
)
def test_a_field_out_of_its_range_is_refused_by_name(field: str, value: object, line: str) -> None:
    with pytest.raises(ValueError, match="BertConfig has 1 fault") as caught:
        BertConfig(**{field: value})  # type: ignore[arg-type]  # wrong types are part of the test
    assert str(caught.value) == f"BertConfig has 1 fault:\n  {line}"


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="BertConfig has 3 faults") as caught:
        BertConfig(vocab_size=0, hidden_act="mish", hidden_dropout_prob=-1.0)
    assert [line.split("=")[0].strip() for line in str(caught.value).splitlines()[1:]] == [
        "vocab_size",
        "hidden_act",
        "hidden_dropout_prob",
    ]


def test_what_is_optional_may_be_none_and_dropout_before_a_classifier_has_a_default() -> None:
    config = BertConfig(pad_token_id=None, classifier_dropout=None, hidden_dropout_prob=0.3)
    assert config.classifier_dropout_prob == 0.3
    assert BertConfig(classifier_dropout=0.0, hidden_dropout_prob=0.3).classifier_dropout_prob == 0.0
