from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import porting
from porting import models, origin
from porting.notation.faults import TableError
from porting.plan.plan import PlanError
from tests import own, small_checkpoint
from tests.mappings.spellings import architecture_fields, missing_and_unexpected
from tests.models.twins import HEADS, inputs_for, main_outputs, realistic


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return own.write(tmp_path / "source")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return own.table(tmp_path)


@pytest.fixture
def module(source: Path, table: Path) -> own.Own:
    return own.filled(source, table)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return small_checkpoint.write_checkpoint(tmp_path / "bert")


def test_a_module_from_elsewhere_follows_a_checkpoint(source: Path, table: Path, tmp_path: Path) -> None:
    module = own.Own(own.SIZES)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    result = porting.export(module, table, tmp_path / "again", like=source)
    assert result.follows == str(source)
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert list(after) == list(load_file(source / "model.safetensors"))
    assert torch.equal(after["layer.1.norm.gamma"], module.layer(1).norm.weight)
    assert torch.equal(after["decoder.weight"], module.tokens.weight)
    assert torch.equal(after["positions.weight"][:2], own.tensors()["positions.weight"][:2])
    assert (tmp_path / "again" / "vocab.txt").exists()
    filled = porting.load(tmp_path / "again", own.Own(own.SIZES), table)
    assert all(
        torch.allclose(tensor, filled.state_dict()[name], rtol=1e-6) for name, tensor in module.state_dict().items()
    )


def test_a_class_that_one_table_names_needs_no_other_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Several families may share a handwritten module: then the table has to be passed."""
    text = '[mapping]\nname = "%s"\n[architectures]\nOwn = "tests.own:%s"\n[tensors]\n"a" = "a"\n'
    for name, kind in (("one", "Own"), ("two", "Layer")):
        (tmp_path / f"{name}.toml").write_text(text % (name, kind))
    monkeypatch.setattr(origin, "shipped", lambda: sorted(tmp_path.glob("*.toml")))
    assert origin.table_for(own.Own(own.SIZES), None, None).name == "one"
    (tmp_path / "two.toml").write_text(text % ("two", "Own"))
    with pytest.raises(TableError, match=r"of the bundled tables these name it: one, two \(pass table="):
        porting.export(own.Own(own.SIZES), None, tmp_path / "new")


def test_a_checkpoint_whose_copies_differ_is_not_followed(source: Path, table: Path, tmp_path: Path) -> None:
    values = own.tensors()
    own.write(source, {**values, "decoder.weight": values["decoder.weight"] + 1})
    with pytest.raises(PlanError, match=r"decoder\.weight: was to be dropped because it equals 'model\.tok"):
        porting.export(own.Own(own.SIZES), table, tmp_path / "again", like=source)


@pytest.mark.parametrize("architecture", HEADS)
def test_a_module_that_was_never_loaded_is_written_for_transformers(architecture: str, tmp_path: Path) -> None:
    module = HEADS[architecture](config=models.BertConfig(**architecture_fields(architecture)))
    realistic(module, seed=3)
    result = porting.export(module.eval(), "bert", tmp_path / "new")
    assert result.architecture == architecture
    assert result.follows == ""
    assert missing_and_unexpected(tmp_path / "new", architecture) == {}
    theirs = transformers.AutoModel if architecture == "BertModel" else getattr(transformers, architecture)
    batch = inputs_for(architecture)
    with torch.no_grad():
        meant = main_outputs(theirs.from_pretrained(tmp_path / "new", dtype=torch.float64)(**batch))
        found = main_outputs(module.double()(**batch))
    assert all(torch.allclose(found[name], meant[name], rtol=1e-11, atol=1e-11) for name in meant)
    again = porting.load(tmp_path / "new")
    assert type(again) is HEADS[architecture]
    porting.export(again, None, tmp_path / "newer")
    own.assert_same_files(tmp_path / "new", tmp_path / "newer")


def test_a_new_config_says_what_transformers_says(tmp_path: Path) -> None:
    """Field for field what transformers itself would write, as far as it writes it."""
    fields = {**architecture_fields("BertForTokenClassification"), "hidden_act": "relu", "classifier_dropout": 0.3}
    porting.export(models.BertForTokenClassification(config=models.BertConfig(**fields)), "bert", tmp_path / "new")
    ours = json.loads((tmp_path / "new" / "config.json").read_text())
    theirs = transformers.BertForTokenClassification(transformers.BertConfig(**fields))
    theirs.save_pretrained(tmp_path / "theirs")
    meant = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert {field: meant.get(field, "nothing") for field in ours if field != "position_embedding_type"} == {
        field: value for field, value in ours.items() if field != "position_embedding_type"
    }
    assert ours["position_embedding_type"] == "absolute"
    assert set(meant) - set(ours) == {"transformers_version", "use_cache", "bos_token_id", "eos_token_id"}


def test_a_loaded_module_can_be_written_anew(bert: Path, tmp_path: Path) -> None:
    module = porting.load(bert)
    result = porting.export(module, None, tmp_path / "new", anew=True)
    assert result.follows == ""
    assert not any("gamma" in name or "decoder" in name for name in result.tensors)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["config.json", "model.safetensors"]
    assert missing_and_unexpected(tmp_path / "new", "BertForPreTraining") == {}


def test_a_config_can_be_passed_as_what_is_to_be_written(module: own.Own, tmp_path: Path) -> None:
    porting.export(module, None, tmp_path / "again", config={**own.CONFIG, "note": "ours"}, architecture="OwnModel")
    found = json.loads((tmp_path / "again" / "config.json").read_text())
    assert found == {**own.CONFIG, "note": "ours", "architectures": ["OwnModel"], "dtype": "float32"}


def test_a_field_that_the_module_has_changed_is_written(bert: Path, tmp_path: Path) -> None:
    module = porting.load(bert, lambda config: models.BertForPreTraining(config=replace(config, layer_norm_eps=1e-6)))
    porting.export(module, None, tmp_path / "again")
    found = json.loads((tmp_path / "again" / "config.json").read_text())
    assert found == {**json.loads((bert / "config.json").read_text()), "layer_norm_eps": 1e-6}
