"""[rest]: what no other line names is carried over, under its own name or with another prefix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import porting
from porting.errors import Code, PortingError
from porting.notation.faults import TableError
from porting.plan.plan import PlanError

TABLE = """\
[mapping]
name = "toy"
model_types = ["toy"]
[tensors]
"enc.{i}.{p:q,k}.weight [o e]" = "enc.{i}.qk.weight [(p o) e]"
[rest]
"{*rest}" = "{*rest}"
"old.head.{*rest}" = "new.{*rest}"
"old.{*rest}" = "older.{*rest}"
[drop]
"enc.{i}.mask" = "a constant"
"out.weight" = "equals words.weight"
[ties]
"out.weight" = "words.weight"
[make]
"new.bias" = "zeros"
[fresh]
"extra.weight" = "to be trained"
"""


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.ModuleList([nn.ModuleDict({"qk": nn.Linear(3, 4, bias=False)}) for _ in range(2)])
        self.words, self.norm = nn.Embedding(5, 3), nn.LayerNorm(3)
        self.out, self.new = nn.Linear(3, 5, bias=False), nn.Linear(3, 2)
        self.older = nn.ModuleDict({"a": nn.Linear(3, 3)})
        self.out.weight = self.words.weight


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = {f"enc.{i}.{p}.weight": torch.randn(2, 3) for i in range(2) for p in "qk"}
    found |= {"enc.0.mask": torch.ones(2), "words.weight": torch.randn(5, 3)}
    found |= {"norm.weight": torch.randn(3), "norm.bias": torch.randn(3), "old.head.weight": torch.randn(2, 3)}
    found |= {"old.a.weight": torch.randn(3, 3), "old.a.bias": torch.randn(3)}
    return found | {"out.weight": found["words.weight"].clone()}


def expected(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {f"enc.{i}.qk.weight": torch.cat([tensors[f"enc.{i}.{p}.weight"] for p in "qk"]) for i in range(2)}
    found |= {name: tensors[name] for name in ("words.weight", "norm.weight", "norm.bias")}
    found |= {"new.weight": tensors["old.head.weight"], "new.bias": torch.zeros(2)}
    return found | {f"older.a.{w}": tensors[f"old.a.{w}"] for w in ("weight", "bias")}


def written(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "toy"}))
    return folder


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def refused(tensors: dict[str, Tensor], folder: Path, table: str = TABLE) -> str:
    with pytest.raises(PlanError) as caught:
        porting.load(written(folder, tensors), Toy, porting.parse_table(table), trust=True)
    return str(caught.value)


def test_the_longest_text_in_front_decides(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    source, table = written(tmp_path / "a", tensors), porting.parse_table(TABLE)
    module = porting.load(source, Toy, table, trust=True)
    loaded = dict(module.state_dict())
    assert loaded.pop("out.weight") is not None
    same(loaded, expected(tensors))
    porting.export(module, None, tmp_path / "b")
    same(load_file(tmp_path / "b" / "model.safetensors"), tensors)


def test_a_conversion_there_and_back(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    source, table = written(tmp_path / "a", tensors), porting.parse_table(TABLE)
    porting.convert(source, tmp_path / "there", table, into=Toy, trust=True)
    same(load_file(tmp_path / "there" / "model.safetensors"), expected(tensors))
    assert porting.diff(source, tmp_path / "there", table).equal
    assert porting.digest(source, table).tensors == porting.digest(tmp_path / "there", table).tensors
    (tmp_path / "there" / "provenance.json").unlink()
    porting.convert(tmp_path / "there", tmp_path / "back", table, reverse=True)
    kept = {name: one for name, one in tensors.items() if name not in {"enc.0.mask", "out.weight"}}
    same(load_file(tmp_path / "back" / "model.safetensors"), kept)


def test_without_a_module(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    table = porting.parse_table(TABLE.replace('"new.bias" = "zeros"', '"new.bias [a]" = "zeros"\n[sizes]\na = 2'))
    porting.convert(written(tmp_path / "a", tensors), tmp_path / "there", table, derive=True)
    same(load_file(tmp_path / "there" / "model.safetensors"), expected(tensors))


def test_what_has_no_place_is_named_beside_the_nearest(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    tensors["nrom.bias"] = tensors.pop("norm.bias")
    said = refused(tensors, tmp_path / "a")
    assert "'nrom.bias' [3] -> 'nrom.bias': the module does not have it (did you mean 'norm.bias'?)" in said
    assert "'norm.bias' -> 'norm.bias' [3]: the checkpoint does not have it (did you mean 'nrom.bias'?)" in said
    assert len(said.splitlines()) == 2


def test_a_target_that_another_rule_writes_is_told_with_that_rule(tmp_path: Path) -> None:
    source = written(tmp_path / "a", {"x": torch.ones(3), "y": torch.zeros(3)})
    table = porting.parse_table('[tensors]\n"x" = "y"\n[rest]\n"{*rest}" = "{*rest}"\n')
    with pytest.raises(PortingError) as caught:
        porting.convert(source, tmp_path / "there", table, derive=True)
    (fault,) = caught.value.faults
    assert fault.code is Code.WRITTEN_TWICE
    assert "'y' -> 'y', which the rule at " in fault.message


def test_a_misspelled_line_is_no_reason_to_carry_its_tensors_over(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    said = refused(tensors, tmp_path / "a", TABLE.replace('"enc.{i}.{p', '"emc.{i}.{p'))
    assert "'enc.0.k.weight' and 3 more like it" in said or "'enc.0.k.weight' and 1 more like it" in said
    assert "the module does not have it" in said
    assert "did you mean" in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('"a.{i}" = "b.{i}"', "'a.{i} = b.{i}' is a line of [rest], whose two names end in {*rest}"),
        ('"a.{*rest} [x]" = "b.{*rest} [x]"', "{*rest} takes tensors as they are: no axes"),
        ('"a.{*rest}" = "b.{*others}"', "stands on the left and not on the right"),
    ],
)
def test_a_line_that_is_none(line: str, said: str) -> None:
    with pytest.raises(TableError) as caught:
        porting.parse_table(f"[rest]\n{line}")
    assert said in str(caught.value)


def test_a_table_that_extends_replaces_a_line(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    (tmp_path / "toy.toml").write_text(TABLE)
    (tmp_path / "child.toml").write_text('extends = "toy"\n[rest]\n"old.{*rest}" = "older.{*rest}"\n'
                                         '"old.head.{*rest}" = false\n"top.{*rest}" = "new.{*rest}"\n')  # fmt: skip
    tensors["top.weight"] = tensors.pop("old.head.weight")
    module = porting.load(written(tmp_path / "a", tensors), Toy, tmp_path / "child.toml", trust=True)
    assert torch.equal(module.get_parameter("new.weight"), tensors["top.weight"])
