"""Every head of the families that BERT's module and its siblings host: in today's spelling and in older ones."""

from __future__ import annotations

import filecmp
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

import porting
from porting import models
from porting.checkpoint import open_checkpoint
from porting.errors import PortingError
from porting.plan.config import effective
from porting.plan.plan import PlanError
from porting.tables import find_table
from porting.tracing.measure import luck
from porting.trials.inputs import Maker
from porting.verification import verify
from porting.verification.reference import choices
from tests.families.pairs import ALBERT, BERT, BERT_GENERATION, DISTILBERT, ELECTRA, LONG_ROBERTA, MPNET, Fields
from tests.families.ported import draw
from tests.verification.flags import unseen_but_arguments

pytestmark = pytest.mark.few(2)

FAMILIES: dict[str, Fields] = {
    "roberta": LONG_ROBERTA,
    "xlm_roberta": LONG_ROBERTA,
    "data2vec_text": LONG_ROBERTA,
    "camembert": LONG_ROBERTA,
    "roberta_prelayernorm": LONG_ROBERTA,
    "megatron_bert": BERT,
    "distilbert": DISTILBERT,
    "electra": ELECTRA,
    "albert": ALBERT,
    "mpnet": MPNET,
    "bert_generation": BERT_GENERATION,
}
HEADS = [(family, one.name) for family in FAMILIES for one in find_table(family, {}).architectures]
FIRST_HEADS = dict(reversed(HEADS))
"""The head of each family with which the trials are run: the others have the same body, in the same batches."""

Weights = dict[str, Tensor]


@cache
def reference(family: str, architecture: str, **changes: object) -> transformers.PreTrainedModel:
    """A small model with every parameter drawn; each is made once."""
    kind: Any = getattr(transformers, architecture)  # one of transformers' classes
    labels = {"num_labels": 2} if "QuestionAnswering" in architecture else {}
    config = kind.config_class(**{**FAMILIES[family], **labels, **changes})
    model: transformers.PreTrainedModel = kind._from_config(config, attn_implementation="eager").eval()
    draw(model)
    return model


def outputs(model: torch.nn.Module, inputs: dict[str, Tensor], **flags: bool) -> list[Tensor]:
    """The tensors that a model returns, in order; theirs and ours have the same."""
    with torch.no_grad():
        found = model(**inputs, **flags)
    values = found._asdict() if hasattr(found, "_asdict") else dict(found)
    return [value for value in values.values() if isinstance(value, Tensor)]


def batch(family: str, architecture: str) -> dict[str, Tensor]:
    """Padded rows without the padding word: where there are no positions to be counted, every place compares."""
    table = find_table(family, {})
    config = {**effective(table, FAMILIES[family]), "max_position_embeddings": 29, "type_vocab_size": 2}
    case = Maker(config, seed=0, choices=choices(architecture), padding_words=False).first()[0]
    return {
        name: case.inputs[name]
        for name in case.inputs
        if any(str(rule.sources[0].key) == name for rule in table.inputs)
    }


def far(found: list[Tensor], meant: list[Tensor]) -> float:
    """The largest difference, relative to the largest value."""
    assert [one.shape for one in found] == [one.shape for one in meant]
    assert meant
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, meant, strict=True))


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "architecture"), HEADS)
def test_every_head_is_faithful_and_goes_back(family: str, architecture: str, tmp_path: Path) -> None:
    """``verify`` makes its own inputs: the reference finds the positions itself, the longest row is in them."""
    source = tmp_path / "source"
    theirs = reference(family, architecture)
    theirs.save_pretrained(source)
    report = verify(source, trials=None if FIRST_HEADS[family] == architecture else False)
    assert report.verdict == "faithful", str(report)
    assert max(probe.meaning.worst for probe in report.probes) <= 1e-12
    assert all(one.worst <= luck(probe.count) for probe in report.probes for one in probe.rounding.values())
    assert (report.shown.copy, report.shown.nothing, report.skipped) == ((), (), ())
    assert unseen_but_arguments(report) == ()
    target = {one.name: one.target for one in find_table(family, {}).architectures}[architecture]
    assert report.port == target.replace(":", ".")

    ours = porting.load(source)
    porting.export(ours, None, tmp_path / "same")
    for name in ("config.json", "model.safetensors"):
        assert filecmp.cmp(source / name, tmp_path / "same" / name, shallow=False), name

    anew = tmp_path / "anew"
    assert porting.export(ours, family, anew, anew=True, architecture=architecture).architecture == architecture
    kind: Any = type(theirs)  # with output_loading_info it gives a pair
    again, info = kind.from_pretrained(anew, output_loading_info=True, attn_implementation="eager")
    assert {key: found for key, found in info.items() if found} == {}
    inputs = batch(family, architecture)
    for one, other in zip(outputs(again.eval(), inputs), outputs(theirs, inputs), strict=True):
        assert torch.equal(one, other)


def as_of_2019(weights: Weights, prefix: str, longest: int) -> Weights:
    """Tied copies written out, positions saved with the weights, and the names of TensorFlow's norms."""
    stem = prefix if any(name.startswith(prefix) for name in weights) else ""
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in weights.items()
    }
    return {**renamed, f"{stem}embeddings.position_ids": torch.arange(longest)[None]}


def as_other_prefix(weights: Weights, prefix: str, _longest: int) -> Weights:
    """The bare encoder with its prefix, the models with heads without it."""
    if any(name.startswith(prefix) for name in weights):
        return {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return {f"{prefix}{name}": tensor for name, tensor in weights.items()}


SPELLINGS = {"2019": as_of_2019, "other-prefix": as_other_prefix}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("family", "architecture"), HEADS)
def test_every_head_in_older_spellings(family: str, architecture: str, spelling: str, tmp_path: Path) -> None:
    theirs = reference(family, architecture)
    source = tmp_path / "source"
    theirs.config.save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    prefix = find_table(family, {}).prefix
    weights = SPELLINGS[spelling](theirs.state_dict(), prefix, theirs.config.max_position_embeddings)
    torch.save(weights, source / "pytorch_model.bin")

    ours = porting.load(source)
    inputs = batch(family, architecture)
    assert far(outputs(ours, inputs), outputs(theirs, inputs)) <= 1e-5  # in float32; the other test has the exact bound
    porting.export(ours, None, tmp_path / "back")
    back = open_checkpoint(tmp_path / "back")
    assert back.tensors.keys() == weights.keys()
    assert all(torch.equal(back.read(name), tensor) for name, tensor in weights.items())


# Its dropout in front of the span is not in the module.
WITHOUT_DROPOUT = ("distilbert", "DistilBertForQuestionAnswering")


@pytest.mark.parametrize(("family", "architecture"), [head for head in HEADS if head != WITHOUT_DROPOUT])
def test_dropout_falls_where_it_falls_in_transformers(family: str, architecture: str, tmp_path: Path) -> None:
    """The same seed gives the same masks, if every dropout comes in the same order and in the same shape."""
    rates: dict[str, object] = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3}
    own: dict[str, dict[str, object]] = {
        # transformers leaves out the dropout behind ALBERT's feed-forward network, which the authors' code has
        "albert": {"classifier_dropout_prob": 0.4, "hidden_dropout_prob": 0.0},
        "electra": {"classifier_dropout": 0.4},
    }
    if family == "distilbert":
        rates = {"dropout": 0.2, "attention_dropout": 0.3, "seq_classif_dropout": 0.4}
    theirs = reference(family, architecture, **{**rates, **own.get(family, {})})
    theirs.save_pretrained(tmp_path)
    ours = porting.load(tmp_path)
    inputs = batch(family, architecture)
    torch.manual_seed(3)
    meant = outputs(theirs.train(), inputs)
    theirs.train(mode=False)
    torch.manual_seed(3)
    found = outputs(ours.train(), inputs, output_attentions=True)
    assert far(found, meant) <= 1e-5


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("roberta", "pad_token_id", 0),
        ("roberta", "hidden_act", "relu"),
        ("roberta", "is_decoder", True),
        ("xlm_roberta", "position_embedding_type", "relative_key"),
        ("camembert", "add_cross_attention", True),
        ("roberta_prelayernorm", "tie_word_embeddings", False),
        ("megatron_bert", "is_decoder", True),
        ("distilbert", "tie_word_embeddings", False),
        ("electra", "hidden_act", "relu"),
        ("electra", "summary_type", "mean"),
        ("electra", "summary_use_proj", False),
        ("electra", "summary_activation", "tanh"),
        ("albert", "inner_group_num", 2),
        ("albert", "tie_word_embeddings", False),
        ("mpnet", "relative_attention_num_buckets", 64),
        ("mpnet", "pad_token_id", 0),
    ],
)
def test_what_a_room_cannot_represent_is_refused_by_name(
    family: str, field: str, value: object, tmp_path: Path
) -> None:
    reference(family, find_table(family, {}).architectures[0].name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(PortingError) as caught:
        porting.load(tmp_path)
    assert f"{field} = {value!r}" in str(caught.value)


@pytest.mark.parametrize("family", [family for family, head in HEADS if "QuestionAnswering" in head])
def test_a_span_of_more_than_two_scores_is_refused(family: str, tmp_path: Path) -> None:
    """transformers makes the span head as wide as num_labels and can only run it with 2."""
    architecture = next(one.name for one in find_table(family, {}).architectures if "QuestionAnswering" in one.name)
    reference(family, architecture).save_pretrained(tmp_path)
    weights = open_checkpoint(tmp_path)
    wide = {name: weights.read(name) for name in weights.tensors}
    wide |= {"qa_outputs.weight": torch.randn(3, 24), "qa_outputs.bias": torch.randn(3)}
    save_file(wide, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PlanError, match=r"'qa_outputs.weight' \[3, 24\].*'span.weight' \[2, 24\]"):
        porting.load(tmp_path)


@pytest.mark.slow
def test_electra_whose_embeddings_are_as_wide_as_its_layers_has_no_projection(tmp_path: Path) -> None:
    reference("electra", "ElectraForMaskedLM", embedding_size=24).save_pretrained(tmp_path)
    report = verify(tmp_path)
    assert report.faithful, str(report)
    assert (report.shown.copy, report.shown.nothing) == ((), ())
    assert not any("projection" in name for name in porting.load(tmp_path).state_dict())


def test_a_tied_copy_that_differs_is_no_copy(tmp_path: Path) -> None:
    theirs = reference("roberta", "RobertaForMaskedLM")
    theirs.save_pretrained(tmp_path)
    weights = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    weights["lm_head.decoder.bias"][36] += 1e-3
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PlanError, match=r"lm_head.decoder.bias: was to be dropped because it equals 'lm_head.bias'"):
        porting.load(tmp_path)


def test_real_checkpoints_carry_more_than_their_head_and_it_comes_back(tmp_path: Path) -> None:
    """RoBERTa's published weights have the masked-language head and a pooler that nothing trained."""
    theirs = reference("roberta", "RobertaForMaskedLM")
    theirs.save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    pooler = {"roberta.pooler.dense.weight": torch.randn(24, 24), "roberta.pooler.dense.bias": torch.randn(24)}
    weights = open_checkpoint(tmp_path / "source")
    save_file({**{name: weights.read(name) for name in weights.tensors}, **pooler}, path, metadata={"format": "pt"})
    ours = porting.load(tmp_path / "source")
    assert type(ours) is models.BertForMaskedLM
    porting.export(ours, None, tmp_path / "back")
    assert filecmp.cmp(path, tmp_path / "back" / "model.safetensors", shallow=False)
    assert type(porting.load(tmp_path / "source", architecture="RobertaModel")) is models.Bert


def test_rows_that_are_nobodys_position_come_back_as_they_were(tmp_path: Path) -> None:
    theirs = reference("roberta", "RobertaModel")
    theirs.save_pretrained(tmp_path / "source")
    ours = porting.load(tmp_path / "source")
    table = theirs.state_dict()["embeddings.position_embeddings.weight"]
    assert torch.equal(ours.state_dict()["embeddings.position.weight"], table[1:])
    with torch.no_grad():
        ours.get_parameter("embeddings.position.weight").zero_()
    porting.export(ours, None, tmp_path / "changed")
    changed = open_checkpoint(tmp_path / "changed").read("embeddings.position_embeddings.weight")
    assert torch.equal(changed[:1], table[:1])
    assert not changed[1:].any()
