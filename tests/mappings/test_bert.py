"""Every head in every spelling: loaded, compared with transformers in float64, and written back as it was."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import porting
from porting import models
from porting.checkpoint import open_checkpoint
from porting.models.bert_config import ACTIVATIONS
from porting.plan.config import arguments
from porting.plan.plan import PlanError
from porting.tables import find_table
from tests.mappings.spellings import (
    SPELLINGS,
    WITH_MLM,
    WITHOUT_POOLER,
    architecture_fields,
    modern,
    rewrite,
    tensors_of,
)
from tests.models.twins import HEADS, distance, inputs_for, main_outputs

pytestmark = pytest.mark.few(4)

MOST = 1e-12
"""The largest difference of a faithful port in float64, relative to the largest value."""

CASES = [
    (architecture, spelling)
    for architecture in HEADS
    for spelling in SPELLINGS
    if not (spelling == "copies" and architecture not in WITH_MLM)
    if not (spelling == "pooler" and architecture not in WITHOUT_POOLER)
]


def reference(
    directory: Path, architecture: str, dtype: torch.dtype = torch.float64
) -> tuple[transformers.PreTrainedModel, Mapping[str, object]]:
    """transformers' model of a directory, and what it says of the keys."""
    model, info = getattr(transformers, architecture).from_pretrained(directory, dtype=dtype, output_loading_info=True)
    return model.eval(), {key: value for key, value in info.items() if value}


@pytest.mark.parametrize(("architecture", "spelling"), CASES)
def test_every_head_in_every_spelling(architecture: str, spelling: str, tmp_path: Path) -> None:
    source, written = tmp_path / "source", tmp_path / "written"
    SPELLINGS[spelling](source, architecture)

    ours = porting.load(source)
    assert type(ours) is HEADS[architecture]
    assert porting.export(ours, None, written).architecture == architecture
    ours.double()
    theirs, said = reference(source, architecture)
    batch = inputs_for(architecture)
    with torch.no_grad():
        found, meant = main_outputs(ours(**batch)), main_outputs(theirs(**batch))
    assert found.keys() == meant.keys()
    assert max(distance(found[name], meant[name]) for name in meant) <= MOST

    assert (written / "config.json").read_bytes() == (source / "config.json").read_bytes()
    if "bin" in spelling:
        before, after = tensors_of(source), tensors_of(written)
        assert before.keys() == after.keys()
        assert all(after[name].dtype == tensor.dtype for name, tensor in before.items())
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert not list(written.glob("*.bin*"))
    else:
        names = sorted(path.name for path in source.iterdir())
        assert sorted(path.name for path in written.iterdir()) == names
        assert all(filecmp.cmp(source / name, written / name, shallow=False) for name in names)

    again, says = reference(written, architecture)
    assert says == said
    if spelling != "pooler":  # transformers has no use for it, wherever it stands
        assert says == {}
    with torch.no_grad():
        repeated = main_outputs(again(**batch))
    assert all(torch.equal(repeated[name], meant[name]) for name in meant)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_is_the_one_that_transformers_means(activation: str, tmp_path: Path) -> None:
    modern(tmp_path, "BertForMaskedLM", hidden_act=activation)
    theirs, _ = reference(tmp_path, "BertForMaskedLM")
    batch = inputs_for("BertForMaskedLM")
    with torch.no_grad():
        found = porting.load(tmp_path, dtype=torch.float64)(**batch).logits
        assert distance(found, theirs(**batch).logits) <= MOST


def test_the_table_allows_the_activations_that_the_module_has() -> None:
    assert find_table("bert", {}).require["hidden_act"] == tuple(ACTIVATIONS)


@pytest.mark.parametrize(
    ("field", "value", "choices"),
    [
        ("position_embedding_type", "relative_key", "'absolute'"),
        ("is_decoder", True, "False"),
        ("add_cross_attention", True, "False"),
        ("tie_word_embeddings", False, "True"),
        ("hidden_act", "gelu_fast", "'gelu', 'gelu_new', 'gelu_pytorch_tanh', 'relu', 'silu', 'swish', 'tanh'"),
    ],
)
def test_a_config_that_the_module_cannot_represent_is_refused_by_name(
    field: str, value: object, choices: str, tmp_path: Path
) -> None:
    modern(tmp_path, "BertModel")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    into = models.Bert(config=models.BertConfig(**architecture_fields("BertModel")))
    with pytest.raises(PlanError) as caught:
        porting.load(tmp_path, into)
    assert f"config.json has {field} = {value!r}" in str(caught.value)
    assert choices in str(caught.value)


def test_every_config_field_arrives(tmp_path: Path) -> None:
    values: dict[str, str | float] = {
        "vocab_size": 41,
        "hidden_size": 30,
        "num_hidden_layers": 1,
        "num_attention_heads": 5,
        "intermediate_size": 17,
        "hidden_act": "relu",
        "hidden_dropout_prob": 0.21,
        "attention_probs_dropout_prob": 0.22,
        "classifier_dropout": 0.23,
        "max_position_embeddings": 11,
        "type_vocab_size": 3,
        "initializer_range": 0.24,
        "layer_norm_eps": 0.25,
        "pad_token_id": 6,
        "num_labels": 7,
    }
    modern(tmp_path, "BertForTokenClassification", **values)
    table = find_table("bert", {})
    fields: dict[str, Any] = arguments(table, open_checkpoint(tmp_path).config)  # Any: of several types
    assert fields == values
    counted = {"padding_position": False}  # for relatives that count positions without padding
    assert asdict(models.BertConfig(**fields)) == {**fields, **counted}  # and the module has no other


def test_a_decoder_that_differs_from_the_embedding_is_no_copy(tmp_path: Path) -> None:
    SPELLINGS["copies"](tmp_path, "BertForMaskedLM")

    def untie(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weights["cls.predictions.decoder.weight"][36, 23] += 1e-6
        return weights

    rewrite(tmp_path, untie)
    into = models.BertForMaskedLM(config=models.BertConfig(**architecture_fields("BertForMaskedLM")))
    before = {name: tensor.clone() for name, tensor in into.state_dict().items()}
    with pytest.raises(PlanError) as caught:
        porting.load(tmp_path, into)
    assert str(caught.value) == (
        "cls.predictions.decoder.weight: was to be dropped because it equals 'bert.embeddings.word_embeddings.weight', "
        "and it does not (a module that ties them cannot hold this checkpoint) [drop-differs]"
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in into.state_dict().items())


def test_copies_are_made_anew_of_what_was_trained(tmp_path: Path) -> None:
    SPELLINGS["copies"](tmp_path / "source", "BertForMaskedLM")
    module = porting.load(tmp_path / "source")
    with torch.no_grad():
        module.get_parameter("mlm.bias").mul_(2)
        module.get_parameter("bert.embeddings.word.weight").mul_(3)
    porting.export(module, None, tmp_path / "again")
    before, after = tensors_of(tmp_path / "source"), tensors_of(tmp_path / "again")
    assert torch.equal(after["cls.predictions.decoder.bias"], 2 * before["cls.predictions.bias"])
    word = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(after["cls.predictions.decoder.weight"], 3 * before[word])


def test_a_bias_of_the_decoder_that_differs_is_no_copy(tmp_path: Path) -> None:
    SPELLINGS["copies"](tmp_path, "BertForMaskedLM")
    rewrite(tmp_path, lambda weights: {**weights, "cls.predictions.decoder.bias": weights["cls.predictions.bias"] + 1})
    with pytest.raises(PlanError, match=r"cls\.predictions\.decoder\.bias: was to be dropped because it equals 'cls"):
        porting.load(tmp_path)


def test_position_ids_that_do_not_count_are_no_copy(tmp_path: Path) -> None:
    SPELLINGS["position-ids"](tmp_path, "BertModel")

    def reverse(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**weights, "embeddings.position_ids": weights["embeddings.position_ids"].flip(-1).contiguous()}

    rewrite(tmp_path, reverse)
    with pytest.raises(PlanError, match=r"embeddings\.position_ids: was to be dropped because it equals 'arange'"):
        porting.load(tmp_path)


@pytest.mark.parametrize(
    ("missing", "found"),
    [
        ("cls.seq_relationship", "BertForMaskedLM"),
        ("cls.predictions", "BertForNextSentencePrediction"),
        ("cls.", "BertModel"),
    ],
)
def test_the_heads_that_are_there_decide(missing: str, found: str, tmp_path: Path) -> None:
    modern(tmp_path, "BertForPreTraining")
    rewrite(tmp_path, lambda weights: {n: t for n, t in weights.items() if not n.startswith(missing)})
    assert type(porting.load(tmp_path)) is HEADS[found]


def test_three_heads_look_alike_and_the_config_decides(tmp_path: Path) -> None:
    modern(tmp_path, "BertForMultipleChoice")
    assert type(porting.load(tmp_path)) is models.BertForMultipleChoice
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("BertForMultipleChoice", "BertForTokenClassification"))
    with pytest.raises(PlanError, match=r"'classifier.weight' \[1, 24\].*'classifier.weight' \[5, 24\]"):
        porting.load(tmp_path)
