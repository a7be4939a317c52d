"""The reference is what the checkpoint holds, whatever its config says; what it lacks is said, and is not proven."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from porting import verify
from porting.checkpoint import open_checkpoint
from porting.errors import PortingError, VerifyError
from porting.registries.conversions import loading
from porting.suggesting.subjects.model_pair import completed_config
from porting.verification.reference import coverage, load_reference, model_class, reference_class
from tests.models.twins import realistic
from tests.pretraining import SCRATCH, tied, write_base

HEADS = ("bert.pooler.dense", "cls.seq_relationship")


def chosen(folder: Path, **change: object) -> str:
    """The class for a checkpoint whose config says something else."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return reference_class(open_checkpoint(folder)).name


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_the_file_decides_and_not_the_config(tmp_path: Path, file: str) -> None:
    found = reference_class(open_checkpoint(write_base(tmp_path / "c", file=file, decoder="bin" in file)))
    assert found.name == "BertForPreTraining"
    assert not found.lacks
    assert "config.json names BertForMaskedLM, which has no " in found.said
    assert all(name in found.said for name in HEADS)
    assert "architecture='BertForMaskedLM'" in found.said


@pytest.mark.parametrize("architectures", [None, [], ["BertModel"], ["BertForQuestionAnswering"], ["MyBert"]])
def test_whatever_the_config_says(tmp_path: Path, architectures: object) -> None:
    assert chosen(write_base(tmp_path / "c"), architectures=architectures) == "BertForPreTraining"


SMALL: dict[str, Any] = {  # Any: fields of several types
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40, "vocab_size": 37,
    "max_position_embeddings": 19, "pad_token_id": 0,
}  # fmt: skip
MODELS = [
    ("BertConfig", "BertModel"),
    ("BertConfig", "BertForMaskedLM"),
    ("BertConfig", "BertForSequenceClassification"),
    ("RobertaConfig", "RobertaForMaskedLM"),
    ("AlbertConfig", "AlbertForPreTraining"),
    ("ElectraConfig", "ElectraForPreTraining"),
    ("LlamaConfig", "LlamaForCausalLM"),
    ("MixtralConfig", "MixtralForCausalLM"),  # its experts are stacked since they are saved
    ("ViTConfig", "ViTForImageClassification"),
]


@pytest.mark.parametrize(("config", "name"), MODELS)
def test_a_class_that_covers_its_file_is_honoured(tmp_path: Path, config: str, name: str) -> None:
    made = getattr(transformers, config)(**SMALL)
    model = getattr(transformers, name)(made)
    realistic(model, seed=0)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    found = reference_class(checkpoint)
    assert (found.name, found.said, found.lacks) == (name, "", ())
    covered = coverage(checkpoint, name)
    assert covered is not None
    assert covered.complete


def test_what_two_classes_hold_alike_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    config = transformers.GPT2Config(n_embd=24, n_layer=2, n_head=3, vocab_size=37, n_positions=19)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    assert chosen(folder) == "GPT2LMHeadModel"  # a tied head leaves nothing in the file: the config is heard
    with pytest.raises(VerifyError, match="GPT2Model as well as GPT2LMHeadModel"):
        chosen(folder, architectures=None)


def test_an_architecture_that_is_asked_for_is_taken_and_what_it_lacks_is_said(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_base(tmp_path / "c"))
    found = reference_class(checkpoint, "BertForMaskedLM")
    assert found.name == "BertForMaskedLM"
    (warning,) = found.warnings(checkpoint.tensors)
    assert all(name in warning for name in HEADS)
    assert "architecture='BertForPreTraining'" in warning
    assert not found.warnings([])  # a table that drops these misses nothing
    assert not reference_class(checkpoint, "BertForPreTraining").warnings(checkpoint.tensors)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Any]:  # Any: a module of its own
    path = tmp_path / "scratch.py"
    path.write_text(SCRATCH)
    spec = importlib.util.spec_from_file_location("scratch_of_the_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.slow
def test_a_wrong_pooler_is_found_with_the_config_of_the_hub(tmp_path: Path, scratch: Any) -> None:
    source = write_base(tmp_path / "c")
    (tmp_path / "t.toml").write_text(tied())
    right = verify(source, scratch.Tied, tmp_path / "t.toml")
    assert right.faithful
    assert right.reference == "transformers.BertForPreTraining"
    assert any("BertForMaskedLM, which has no " in warning for warning in right.warnings)

    wrong = type("NoTanh", (scratch.Tied,), {})
    scratch.torch = _WithoutTanh()
    assert verify(source, wrong, tmp_path / "t.toml", causes=False).verdict == "different"


class _WithoutTanh:
    """torch as a port sees it whose pooler has no tanh."""

    def __getattr__(self, name: str) -> object:
        return (lambda one: one) if name == "tanh" else getattr(torch, name)


@pytest.mark.slow
def test_nothing_is_proven_by_what_was_not_compared(tmp_path: Path, scratch: Any) -> None:
    """The reference has neither pooler nor next-sentence head: their probes have no counterpart and prove nothing."""
    source = write_base(tmp_path / "c")
    (tmp_path / "t.toml").write_text(tied())
    report = verify(source, scratch.Tied, tmp_path / "t.toml", architecture="BertForMaskedLM")
    heads = {f"{name}.{kind}" for name in ("pool", "nsp") for kind in ("weight", "bias")}
    assert {"pool", "nsp"} <= set(report.skipped)
    assert not heads & set(report.shown.activation)
    assert heads <= set(report.shown.copy)
    assert len(report.shown.activation) == report.shown.count - len(heads)
    assert any("what the port makes of them is not compared" in warning for warning in report.warnings)


@pytest.mark.slow
def test_a_part_that_has_no_counterpart_proves_nothing(tmp_path: Path, scratch: Any) -> None:
    """Of two logits only the first is compared: the bias of the other one is not shown at work."""
    source = write_base(tmp_path / "c")
    table = tied().partition("[probes]")[0] + '[probes]\n"cls.seq_relationship [b (o|_1)]" = "nsp [b (o|_1)]"\n'
    (tmp_path / "t.toml").write_text(table)
    shares = verify(source, scratch.Tied, tmp_path / "t.toml", causes=False).shown.activation
    assert shares["nsp.bias"] == 0.5


def test_what_transformers_cannot_import_is_no_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy: Any = sys.modules["transformers"]  # other tests may have imported it anew
    monkeypatch.setitem(lazy._class_to_module, "BrokenModel", "models.nothing_here")
    with pytest.raises(VerifyError, match=r"transformers cannot import BrokenModel: ModuleNotFoundError: No module"):
        model_class("BrokenModel")
    assert model_class("NoSuchModel") is None
    assert model_class("BertConfig") is None
    assert model_class("BertModel") is lazy.BertModel


def generator(folder: Path) -> Path:
    """A small checkpoint of a model that generates, as transformers writes it."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=6)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_transformers_opens_no_file_of_the_checkpoint(tmp_path: Path) -> None:
    """Links, pipes and files of its own choice in the directory are nothing to it."""
    folder = generator(tmp_path / "c")
    checkpoint = open_checkpoint(folder)
    other = {name: checkpoint.read(name) + 1 for name in checkpoint.tensors}
    save_file(other, folder / "shard-00001-model-00001-of-00001.safetensors", {"format": "pt"})
    for name in ("generation_config.json", "adapter_config.json", "custom_generate"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text("[" * 10)
    opened: list[str] = []
    watching = True

    def watch(event: str, given: tuple[object, ...]) -> None:
        if watching and event == "open" and str(given[0]).startswith(str(folder)):
            opened.append(str(given[0]))

    sys.addaudithook(watch)
    module = load_reference(checkpoint, "GPT2LMHeadModel", torch.float32)
    watching = False
    assert opened == []
    found = module.get_parameter("transformer.h.0.attn.c_attn.weight")
    assert torch.equal(found, checkpoint.read("transformer.h.0.attn.c_attn.weight"))


@pytest.mark.parametrize("named", ["other.safetensors", "x.safetensors.index.json", "../model.safetensors", 7])
def test_weights_that_transformers_would_read_from_another_file_are_refused(tmp_path: Path, named: object) -> None:
    folder = generator(tmp_path / "c")
    config = json.loads((folder / "config.json").read_text())
    for value in ("model.safetensors", named):
        (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": value}))
        if value == "model.safetensors":
            load_reference(open_checkpoint(folder), "GPT2LMHeadModel", torch.float32)
    with pytest.raises(VerifyError, match=r"another file of weights for transformers: transformers_weights = "):
        load_reference(open_checkpoint(folder), "GPT2LMHeadModel", torch.float32)


ODD = [{}, {"a": []}, [], [[1]], [{}], [None], float("nan"), 1e308, -1, True, 10**299, "", "a" * 10_000, "\x1b[2J"]


@pytest.mark.parametrize("field", ["model_type", "architectures", "hidden_act", "torch_dtype", "quantization_config"])
@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
def test_a_field_of_any_kind_is_no_fault_of_ours(tmp_path: Path, field: str, value: object) -> None:
    """The class is the one that fits or the one that is named, or the config is refused."""
    with suppress(PortingError):
        assert chosen(write_base(tmp_path / "c"), **{field: value}) in {"BertForPreTraining", "BertForMaskedLM"}


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_no_code_of_the_hub_that_a_config_names_is_fetched(
    tmp_path: Path, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the package ``kernels`` transformers would fetch it and import it."""
    asked: list[object] = []
    hub_kernels: Any = importlib.import_module("transformers.integrations.hub_kernels")
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda *_, **__: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda name, **_: asked.append(name))
    folder = generator(tmp_path / "c")
    path = folder / "config.json"
    named = "org/attention:forward"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: named, "more": [{field: named}]}))
    checkpoint = open_checkpoint(folder)
    assert not reference_class(checkpoint).lacks
    assert coverage(checkpoint, "GPT2LMHeadModel") is not None
    load_reference(checkpoint, "GPT2LMHeadModel", torch.float32)
    assert loading("gpt2", checkpoint.config, checkpoint.tensors).conversions
    assert named not in str(completed_config(checkpoint.config, "GPT2LMHeadModel"))
    assert asked == []
