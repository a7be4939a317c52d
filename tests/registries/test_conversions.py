"""A checkpoint through an entry of transformers' registry, there and back, against transformers' own loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

import porting
from porting.notation.faults import TableError
from porting.registries.conversions import entries
from porting.registries.wording import imported_text
from porting.tables import find_table

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 3,
    "pad_token_id": None,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mixture of experts as transformers saves it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("mixture") / "disk"
    model: Any = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL))
    model.save_pretrained(folder)
    return folder


def read(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(one, wanted[name]) for name, one in found.items())


def test_what_transformers_holds_in_memory_is_written_and_goes_back(checkpoint: Path, tmp_path: Path) -> None:
    reference: Any = transformers.MixtralForCausalLM
    state = reference.from_pretrained(checkpoint).state_dict()
    done = porting.convert(checkpoint, tmp_path / "ported", "transformers:mixtral")
    assert equal(read(done.path), dict(state))
    back = porting.convert(done.path, tmp_path / "back", "transformers:mixtral", reverse=True)
    assert equal(read(back.path), read(checkpoint))
    (done.path / "provenance.json").unlink()  # without the record, the names are those that transformers would save
    again = porting.convert(done.path, tmp_path / "again", "transformers:mixtral", reverse=True)
    assert equal(read(again.path), read(checkpoint))
    assert porting.diff(checkpoint, done.path, "transformers:mixtral").equal


def test_names_that_transformers_also_reads_come_back_as_they_were(checkpoint: Path, tmp_path: Path) -> None:
    """A base model's file has no prefix: transformers adds it, and the record says that it was not there."""
    plain = tmp_path / "plain"
    plain.mkdir()
    tensors = {name.removeprefix("model."): one for name, one in read(checkpoint).items() if name != "lm_head.weight"}
    tensors["unknown.weight"] = torch.zeros(3)
    save_file(tensors, plain / "model.safetensors")
    (plain / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    done = porting.convert(plain, tmp_path / "ported", "transformers:mixtral")
    assert "model.layers.1.mlp.experts.gate_up_proj" in read(done.path)
    assert [one.name for one in done.left_out] == ["unknown.weight"]
    back = porting.convert(done.path, tmp_path / "back", "transformers:mixtral", reverse=True)
    del tensors["unknown.weight"]
    assert equal(read(back.path), tensors)


def test_the_table_names_layers_once(checkpoint: Path) -> None:
    opened = porting.open_checkpoint(checkpoint)
    table = find_table("transformers:mixtral", opened.config, opened.tensors)
    experts = "model.layers.{i}.block_sparse_moe.experts.{x}.w2.weight [a b] = model.layers.{i}.mlp.experts.down_proj"
    assert f"{experts} [x a b]" in [str(rule) for rule in table.rules]
    assert len(table.rules) == 12
    whole = imported_text("transformers:mixtral", opened.config, opened.tensors)
    assert imported_text("transformers:mixtral", opened.config) == whole


def test_the_registry_is_listed() -> None:
    names = entries()
    assert len(names) > 200
    assert {"mixtral", "ViTModel"} <= set(names)


class Doubled(ConversionOps):
    """An operation that computes."""

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        (tensors,) = input_dict.values()
        return {target_patterns[0]: tensors[0] * 2}


class Failing(ConversionOps):
    """An operation that fails."""

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        message = "no such thing"
        raise KeyError(message)


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (
            Doubled(),
            r"'mixtral' of transformers 5\.\S*: Doubled torch's 'mul', which no rule says",
        ),
        (Failing(), r"Failing fails on the tensors of 'model\.norm\.weight': KeyError: 'no such thing'"),
    ],
)
def test_an_operation_that_no_rule_says_is_refused_by_its_name(
    operation: ConversionOps, message: str, checkpoint: Path, tmp_path: Path
) -> None:
    known: Any = conversion_mapping  # its functions have no types
    before = known.get_checkpoint_conversion_mapping("mixtral")
    extra = WeightConverter("model.norm.weight", "model.norm.weight", operations=[operation])
    known.register_checkpoint_conversion_mapping("mixtral", [*before, extra], overwrite=True)
    try:
        with pytest.raises(TableError, match=message):
            porting.convert(checkpoint, tmp_path / "ported", "transformers:mixtral")
    finally:
        known.register_checkpoint_conversion_mapping("mixtral", before, overwrite=True)
    assert not (tmp_path / "ported").exists()


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("transformers:mixtrl", {}, r"knows no 'mixtrl' \(did you mean 'mixtral'\?\)"),
        ("transformers:mixtral", {"model_type": "llama"}, r"LlamaModel has no 'mixtral' \(pass transformers:llama\)"),
        ("transformers:mixtral", {"model_type": "mixtral", "num_attention_heads": "many"}, "cannot build MixtralModel"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused(name: str, config: dict[str, object], message: str) -> None:
    with pytest.raises(TableError, match=message):
        find_table(name, config)
