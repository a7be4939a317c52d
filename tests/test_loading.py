from __future__ import annotations

import gc
import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import porting
from porting import models
from porting.checkpoint import open_checkpoint
from porting.errors import PortingError, PortingWarning
from porting.loading import same_bits
from porting.notation.table import parse_table
from porting.plan.plan import PlanError
from porting.target import TargetError
from tests import own, small_checkpoint
from tests.mappings.spellings import modern


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return own.write(tmp_path / "source")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return own.table(tmp_path)


def expected(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the table makes of the checkpoint, by hand."""
    found = {
        "tokens.weight": values["model.tokens.weight"],
        "decoder.weight": values["model.tokens.weight"],
        "positions.weight": values["positions.weight"][2:],
        "shift": values["shift"] + values["model.types"][0],
        "scaled": (values["scaled"].double() * 6**-0.5).to(values["scaled"].dtype),
    }
    for number in (0, 1):
        parts = ("query", "key", "value")
        weights = [values[f"model.layer.{number}.{part}.weight"] for part in parts]
        older = number == 1
        layer = {
            "qkv.weight": torch.cat(weights),
            "qkv.bias": torch.cat([values[f"layer.{number}.{part}.bias"] for part in parts]),
            "out.weight": values[f"model.layer.{number}.kernel"].T,
            "norm.weight": values[f"layer.{number}.norm.{'gamma' if older else 'weight'}"],
            "norm.bias": values[f"layer.{number}.norm.{'beta' if older else 'bias'}"],
        }
        found |= {f"layers.{number}.{name}": tensor for name, tensor in layer.items()}
    return found


def assert_holds(module: nn.Module, values: dict[str, Tensor]) -> None:
    meant = expected(values)
    state = module.state_dict()
    assert state.keys() == meant.keys()
    assert [name for name, tensor in state.items() if not same_bits(tensor, meant[name])] == []


# --------------------------------------------------------------------------------------------------------- what into is


@pytest.mark.parametrize(
    "into",
    [
        own.Own,
        lambda: own.Own(own.SIZES),
        lambda config: own.Own(config, head=False),
        lambda width, words, depth: own.Own(own.Config(width, depth, words)),
    ],
    ids=["class", "of nothing", "of the config", "of the fields"],
)
def test_a_class_or_function_is_built_and_filled(into: Callable[..., nn.Module], source: Path, table: Path) -> None:
    module = porting.load(source, into, table, trust=True)
    assert isinstance(module, own.Own)
    assert_holds(module, own.tensors())
    assert not module.training
    assert module.decoder.weight is module.tokens.weight
    assert torch.equal(module.powers, torch.tensor([1.0, 2.0, 4.0, 8.0]))
    assert all(parameter.requires_grad for parameter in module.parameters())


class Words(nn.Embedding):
    """Built of the config's fields as they are stored."""

    def __init__(self, vocab_size: int, rope: dict[str, int]) -> None:
        super().__init__(vocab_size, rope["dim"])


@pytest.mark.parametrize(
    "into",
    [
        Words,
        lambda config: Words(config.vocab_size, config.rope),
        lambda config: Words(config["vocab_size"], {"dim": config.rope.dim}),
        lambda config: Words(**{name: config[name] for name in ("vocab_size", "rope")}),
    ],
    ids=["fields", "attributes", "keys", "keywords"],
)
def test_a_table_without_a_config_gives_the_fields_of_the_checkpoint(
    into: Callable[..., nn.Module], tmp_path: Path
) -> None:
    save_file({"tokens": torch.arange(6.0).view(3, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"vocab_size": 3, "rope": {"dim": 2}}')
    table = parse_table('[mapping]\nname = "words"\n[tensors]\n"tokens" = "weight"\n')
    assert torch.equal(porting.load(tmp_path, into, table).state_dict()["weight"], torch.arange(6.0).view(3, 2))


def test_a_module_is_filled_and_stays_itself(source: Path, table: Path) -> None:
    module = own.Own(own.SIZES)
    module.shift.requires_grad_(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    before = {name: id(parameter) for name, parameter in module.named_parameters()}
    assert porting.load(source, module, table) is module
    assert_holds(module, own.tensors())
    assert module.training
    assert {name: id(parameter) for name, parameter in module.named_parameters()} == before
    assert [name for name, parameter in module.named_parameters() if not parameter.requires_grad] == ["shift"]
    module.layer(0).qkv.bias.grad = torch.ones(18)
    optimizer.step()
    assert torch.equal(module.layer(0).qkv.bias, expected(own.tensors())["layers.0.qkv.bias"] - 1)


def test_a_module_on_the_meta_device_is_filled(tmp_path: Path) -> None:
    modern(tmp_path, "BertModel")
    with torch.device("meta"):
        module = models.Bert(config=models.BertConfig(**{**small_sizes(), "num_labels": 5}))
    porting.load(tmp_path, module)
    assert not any(tensor.is_meta for tensor in module.state_dict().values())


def small_sizes() -> dict[str, Any]:  # Any: fields of several types
    from tests.models.twins import TINY

    return TINY


def test_a_module_on_the_meta_device_that_would_stay_there_in_part_is_refused(source: Path, table: Path) -> None:
    with torch.device("meta"):
        module = own.Own(own.SIZES, head=True)
    with pytest.raises(TargetError) as caught:
        porting.load(source, module, table, fresh=True)
    assert str(caught.value) == (
        "the module is on the meta device, and nothing gives a value to 'head.weight', 'head.bias', 'powers' "
        "(pass the class, or a function that builds the module) [bad-target]"
    )
    assert all(tensor.is_meta for tensor in module.state_dict().values())


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]  # a module stays one


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel])
def test_a_wrapped_module_is_filled(wrap: Callable[[nn.Module], nn.Module], source: Path, table: Path) -> None:
    module = own.Own(own.SIZES)
    wrapped = wrap(module)
    assert porting.load(source, wrapped, table) is wrapped
    assert_holds(module, own.tensors())
    assert porting.provenance(wrapped) is porting.provenance(module)
    assert porting.provenance(module) is not None


def test_a_part_that_is_compiled_is_called_what_it_was_called(source: Path, table: Path) -> None:
    module = own.Own(own.SIZES)
    layer = module.layer(1)
    module.layers[1] = compiled(layer)
    porting.load(source, module, table)
    assert torch.equal(layer.norm.weight, own.tensors()["layer.1.norm.gamma"])


# ----------------------------------------------------------------------------------------------------------- the memory


def mapped(tensor: Tensor, path: Path) -> bool:
    """Whether the tensor's memory is the mapped file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(word, 16) for word in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < stop:
            return line.endswith(str(path))
    return False


def test_weights_are_views_of_the_file_and_writing_to_them_does_not_reach_it(source: Path, table: Path) -> None:
    path = source / "model.safetensors"
    before = path.read_bytes()
    module = porting.load(source, own.Own, table, trust=True)
    views = {name for name, tensor in module.state_dict().items() if mapped(tensor, path)}
    copied = {"shift", "scaled", *(f"layers.{i}.qkv.{w}" for i in (0, 1) for w in ("weight", "bias"))}
    assert views == module.state_dict().keys() - copied  # a sum, a product and what is joined cannot be views
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(9.0)
    assert path.read_bytes() == before


def test_an_owned_copy_does_not_care_what_happens_to_the_file(source: Path, table: Path) -> None:
    path = source / "model.safetensors"
    module = porting.load(source, own.Own, table, trust=True, own=True)
    assert not any(mapped(tensor, path) for tensor in module.state_dict().values())
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
        file.truncate(100)
    assert_holds(module, own.tensors())


# ---------------------------------------------------------------------------------------------------- nothing half done


def tamper(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    def rewrite(source: Path) -> None:
        values = own.tensors()
        change(values)
        own.write(source, values)

    return rewrite


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (tamper(lambda v: v.pop("shift")), "shift"),
    "unknown": (tamper(lambda v: v.update(extra=torch.ones(2))), "'extra' [2] of the checkpoint: no rule reads it"),
    "shape": (tamper(lambda v: v.update(scaled=torch.ones(7))), "'scaled' [7] -> 'scaled' [6]"),
    "gap": (tamper(lambda v: [v.pop(n) for n in list(v) if "layer.0" in n]), "layer.0"),
    "twice": (tamper(lambda v: v.update({"model.scaled": torch.ones(6)})), "two spellings of one tensor"),
    "untied": (tamper(lambda v: v["decoder.weight"][3].add_(1)), "equals 'model.tokens.weight', and it does not"),
    "sign of zero": (
        tamper(lambda v: [v["model.tokens.weight"][3].zero_(), v["decoder.weight"][3].fill_(-0.0)]),
        "equals 'model.tokens.weight', and it does not",
    ),
    "dtype": (tamper(lambda v: v.update(scaled=v["scaled"].half())), "float16"),
    "config": (lambda source: own.write(source, causal=False), "config.json has causal = False"),
    "changed": (
        lambda source: os.truncate(source / "model.safetensors", (source / "model.safetensors").stat().st_size - 4),
        "model.safetensors",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("training", [True, False])
def test_whatever_is_wrong_a_module_is_as_it_was(fault: str, training: bool, source: Path, table: Path) -> None:
    spoil, message = FAULTS[fault]
    spoil(source)
    module = own.Own(own.SIZES).train(training)
    module.shift.grad = torch.ones(6)
    before = {
        name: (id(tensor), tensor.data_ptr(), tensor.detach().clone()) for name, tensor in module.named_parameters()
    }
    with pytest.raises(PortingError, match=re.escape(message)):
        porting.load(source, module, table)
    assert module.training is training
    assert module.shift.grad is not None
    assert {name: (id(tensor), tensor.data_ptr()) for name, tensor in module.named_parameters()} == {
        name: seen[:2] for name, seen in before.items()
    }
    assert all(torch.equal(tensor, before[name][2]) for name, tensor in module.named_parameters())
    assert porting.provenance(module) is None


def test_a_parameter_that_cannot_be_replaced_leaves_the_others_as_they_were(source: Path, table: Path) -> None:
    module = own.Own(own.SIZES)

    class Stubborn(nn.Parameter):
        @property
        def data(self) -> Tensor:
            return self.detach()

        @data.setter
        def data(self, value: Tensor) -> None:
            raise RuntimeError("frozen for good")

    module.layer(1).norm.bias = Stubborn(torch.ones(6))
    before = {name: (tensor.data_ptr(), tensor.detach().clone()) for name, tensor in module.named_parameters()}
    with pytest.raises(RuntimeError, match="frozen for good"):
        porting.load(source, module, table)
    assert {name: tensor.data_ptr() for name, tensor in module.named_parameters()} == {
        n: p for n, (p, _) in before.items()
    }
    assert all(torch.equal(tensor, before[name][1]) for name, tensor in module.named_parameters())


def test_all_faults_are_reported_at_once(source: Path, table: Path) -> None:
    values = own.tensors()
    values.pop("shift")
    own.write(source, {**values, "extra": torch.ones(2), "scaled": torch.ones(7)}, causal=False)
    with pytest.raises(PlanError) as caught:
        porting.load(source, own.Own, table, trust=True)
    assert {str(fault.code) for fault in caught.value.faults} >= {"config-refused", "shape-mismatch", "unread-tensor"}


# ----------------------------------------------------------------------------------------------- new parameters, dtypes


def test_a_new_parameter_is_refused_unless_it_is_allowed(source: Path, table: Path) -> None:
    with pytest.raises(PlanError, match=r"head\.weight.*fresh=True"):
        porting.load(source, own.with_head, table, trust=True)


def test_a_new_parameter_is_initialised_by_the_module_and_reported(source: Path, table: Path) -> None:
    with pytest.warns(PortingWarning, match=r"2 parameters are new and untrained: head\.weight, head\.bias") as seen:
        module = porting.load(source, own.with_head, table, trust=True, fresh=True)
    assert isinstance(module, own.Own)
    assert module.head is not None
    assert not module.head.weight.is_meta
    assert 0 < module.head.weight.std() < 1  # drawn by nn.Linear
    found = porting.provenance(module)
    assert found is not None
    assert found.plan.fresh == ("head.weight", "head.bias")
    assert found.architecture is None
    assert seen[0].filename == __file__
    assert gc.isenabled()


def test_a_new_parameter_of_a_module_keeps_its_value(source: Path, table: Path) -> None:
    module = own.Own(own.SIZES, head=True)
    assert module.head is not None
    before = module.head.weight.detach().clone()
    with pytest.warns(PortingWarning, match="are new and untrained"):
        porting.load(source, module, table, fresh=True)
    assert torch.equal(module.head.weight, before)


def test_a_new_parameter_has_the_dtype_of_the_others(tmp_path: Path, table: Path) -> None:
    own.write(tmp_path / "half", own.tensors(torch.bfloat16))
    with pytest.warns(PortingWarning):
        module = porting.load(tmp_path / "half", own.with_head, table, trust=True, fresh=True)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_cast_that_is_asked_for(dtype: torch.dtype, source: Path, table: Path) -> None:
    built = porting.load(source, own.Own, table, trust=True, dtype=dtype)
    assert_holds(built, {name: t if name == "steps" else t.to(dtype) for name, t in own.tensors().items()})
    filled = porting.load(source, own.Own(own.SIZES), table, dtype=dtype)
    assert {parameter.dtype for parameter in filled.parameters()} == {dtype}


def test_a_cast_that_is_not_asked_for_is_refused(source: Path, table: Path) -> None:
    with pytest.raises(PlanError, match=r"float32.*float64.*dtype=torch\.float64"):
        porting.load(source, own.Own(own.SIZES).double(), table)
    assert_holds(porting.load(source, own.Own, table, trust=True), own.tensors())


@pytest.mark.parametrize(
    ("stored", "scale", "dtype", "told"),
    [
        (torch.tensor([1e5, 1.0, torch.inf]), "1", torch.float16, "1 of v"),
        (torch.tensor([6e4, 1.0, torch.inf]).half(), "2", None, "1 of v"),
        (torch.tensor([6e4, 1.0, torch.inf]), "1", torch.float16, ""),
        (torch.tensor([1e5, 1.0, torch.inf]), "2", None, ""),
        (torch.tensor([1e5, 1.0, 2.0]), "1", torch.float8_e5m2, "1 of v"),
        (torch.tensor([1.0, 2.0, 3.0]).to(torch.float8_e4m3fn), "2", None, ""),
    ],
)
def test_values_that_are_finite_no_longer_are_told(
    tmp_path: Path, stored: Tensor, scale: str, dtype: torch.dtype | None, told: str
) -> None:
    save_file({"w": stored}, tmp_path / "model.safetensors")
    rule = f'[[rule]]\nsource = "w [e]"\ntarget = "v [e]"\nscale = "{scale}"'
    table = parse_table(f'[mapping]\nname = "t"\n{rule}\n')

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v = nn.Parameter(torch.empty(3, dtype=dtype or stored.dtype))

    with warnings.catch_warnings(record=True, category=PortingWarning) as seen:
        warnings.simplefilter("always")
        porting.load(tmp_path / "model.safetensors", One(), table, dtype=dtype)
    said = f"finite values became infinite or NaN: {told}" if told else ""
    assert [str(one.message) for one in seen if "finite" in str(one.message)] == [said] * bool(told)


# ----------------------------------------------------------------------------------------------------------- the choice


def test_a_table_is_found_by_the_config(tmp_path: Path) -> None:
    source = small_checkpoint.write_checkpoint(tmp_path / "source")
    module = porting.load(source)
    assert type(module) is models.BertForPreTraining
    found = porting.provenance(module)
    assert found is not None
    assert found.plan.table.name == "bert"
    assert found.architecture is not None
    assert found.architecture.name == "BertForPreTraining"


def test_an_open_checkpoint_will_do(source: Path, table: Path) -> None:
    checkpoint = open_checkpoint(source)
    module = porting.load(checkpoint, own.Own, table, trust=True)
    found = porting.provenance(module)
    assert found is not None
    assert found.checkpoint is checkpoint


def test_a_table_without_a_module_asks_for_one(source: Path, table: Path) -> None:
    with pytest.raises(TargetError, match=r"table 'own' names no module to build \(pass into=\)"):
        porting.load(source, table=table)
    with pytest.raises(TargetError, match=r"table 'own' has no architecture 'Own' \(it has none\)"):
        porting.load(source, own.Own, table, architecture="Own")


def test_a_table_names_foreign_code_only_if_it_is_trusted(source: Path, table: Path) -> None:
    with pytest.raises(TargetError, match=r"the table names 'tests\.own:Config', which is not part of this library"):
        porting.load(source, own.Own, table)
    porting.load(source, lambda: own.Own(own.SIZES), table)  # and only if it is needed


def test_an_architecture_can_be_asked_for(tmp_path: Path) -> None:
    source = small_checkpoint.write_checkpoint(tmp_path / "source")
    module = porting.load(source, architecture="BertForMaskedLM")
    assert type(module) is models.BertForMaskedLM
    with pytest.raises(TargetError, match=r"no architecture 'BertForMaskedLm' \(did you mean 'BertForMaskedLM'\?\)"):
        porting.load(source, architecture="BertForMaskedLm")


class Mine(models.BertForMaskedLM):
    """A subclass of the user's own."""


def make_masked(config: models.BertConfig) -> nn.Module:
    return models.BertForMaskedLM(config=config)


@pytest.mark.parametrize("into", [models.BertForMaskedLM, Mine, make_masked])
def test_a_class_of_the_table_is_the_architecture_that_it_is(into: Callable[..., nn.Module], tmp_path: Path) -> None:
    source = small_checkpoint.write_checkpoint(tmp_path / "source")
    found = porting.provenance(porting.load(source, into))
    assert found is not None
    assert found.architecture is not None
    assert found.architecture.name == "BertForMaskedLM"
    assert {left.name for left in found.plan.left_out} >= {"bert.pooler.dense.weight", "cls.seq_relationship.bias"}


def test_labels_are_counted_by_their_names(tmp_path: Path) -> None:
    modern(tmp_path, "BertForTokenClassification")
    text = (tmp_path / "config.json").read_text()
    assert '"num_labels"' not in text
    assert '"id2label"' in text
    module = porting.load(tmp_path)
    assert isinstance(module, models.BertForTokenClassification)
    assert module.bert.config.num_labels == 5


def test_a_module_is_not_kept_alive(source: Path, table: Path) -> None:
    from porting.loading import _KNOWN

    gc.collect()
    before = len(_KNOWN)
    module = porting.load(source, own.Own, table, trust=True)
    assert len(_KNOWN) == before + 1
    del module
    gc.collect()
    assert len(_KNOWN) == before


def test_a_copy_that_is_no_number_equals_itself(source: Path, table: Path) -> None:
    values = own.tensors()
    for name in ("model.tokens.weight", "decoder.weight"):
        values[name][2, 2] = float("nan")
    own.write(source, values)
    assert_holds(porting.load(source, own.Own, table, trust=True), values)


def test_copies_that_share_their_storage_are_not_read(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = own.tensors()
    values["decoder.weight"] = values["model.tokens.weight"]
    own.write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(values, tmp_path / "pytorch_model.bin")
    checkpoint = open_checkpoint(tmp_path)
    read: list[str] = []
    original = checkpoint.read

    def note(name: str, *, own: bool = False) -> Tensor:
        read.append(name)
        return original(name, own=own)

    monkeypatch.setattr(checkpoint, "read", note)
    assert_holds(porting.load(checkpoint, own.Own, table, trust=True), values)
    assert "decoder.weight" not in read


def test_a_file_of_its_own_beside_a_config_is_a_checkpoint(source: Path, table: Path) -> None:
    path = source / "other.safetensors"
    save_file(own.tensors(), path)
    assert_holds(porting.load(path, own.Own, table, trust=True), own.tensors())


class Embedded(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.b = nn.Embedding(words, width)


def embedded(config: dict[str, int]) -> nn.Module:
    return Embedded(**config)


def test_a_builder_that_misses_a_field_of_the_config_is_answered_with_it(tmp_path: Path) -> None:
    small_checkpoint.write_checkpoint(tmp_path / "c")
    file = tmp_path / "c" / "config.json"
    fields = json.loads(file.read_text())
    del fields["hidden_size"]
    file.write_text(json.dumps(fields))
    table = '[config]\nhidden_size = "width"\nvocab_size = "words"\n[tensors]\n"a" = "b"\n'
    said = r"building the module failed: .*width.*; config[.]json lacks hidden_size \('width' in \[config\]\)"
    with pytest.raises(TargetError, match=said):
        porting.load(tmp_path / "c", embedded, table)
