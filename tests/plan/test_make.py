"""[make]: what the module has, no checkpoint has, and the table knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import porting
from porting.comparing.differences import Verdict
from porting.limits import LimitError
from porting.notation.faults import TableError
from porting.plan.plan import PlanError

TABLE = """\
[mapping]
name = "toy"
model_types = ["toy"]
target_prefix = "trunk."
[config]
hidden = "width"
[sizes]
e = "hidden"
f = "hidden"
o = 3
s = 2
t = 5
u = 5
[tensors]
"w.{i}.weight" = "l.{i}.lin.weight"
[optional]
"w.{i}.bias" = "l.{i}.lin.bias"
[make]
"l.{i}.lin.bias [o]" = "zeros"
"l.{i}.gate [1]" = "ones"
"l.{i}.ids [1 t]" = "arange"
"l.{i}.mix [e f]" = "eye"
"l.{i}.mask [1 t u]" = "causal"
"l.{i}.freqs [o]" = "rotary 2500 * hidden"
"l.{i}.scale [s]" = "hidden ** -0.5 / 3"
"l.{i}.again" = "equals l.{i}.lin.weight"
"""
WITHOUT = TABLE.replace('"w.{i}.bias" = "l.{i}.lin.bias"\n', "")
CONFIG = {"model_type": "toy", "hidden": 4}


class Layer(nn.Module):
    ids: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 3)
        self.gate = nn.Parameter(torch.randn(1))
        self.mix = nn.Parameter(torch.randn(4, 4))
        self.scale = nn.Parameter(torch.randn(2))
        self.again = nn.Parameter(torch.randn(3, 4))
        self.freqs = nn.Parameter(torch.randn(3))
        self.register_buffer("ids", torch.zeros(1, 5, dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(1, 5, 5, dtype=torch.bool))


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.ModuleList([Layer(), Layer()])


def expected(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for i in range(2):
        found[f"l.{i}.lin.weight"] = tensors[f"w.{i}.weight"]
        found[f"l.{i}.lin.bias"] = tensors.get(f"w.{i}.bias", torch.zeros(3))
        found[f"l.{i}.gate"] = torch.ones(1)
        found[f"l.{i}.ids"] = torch.arange(5)[None]
        found[f"l.{i}.mix"] = torch.eye(4)
        found[f"l.{i}.mask"] = torch.ones(1, 5, 5, dtype=torch.bool).tril()
        found[f"l.{i}.freqs"] = 1.0 / 10000.0 ** (torch.arange(0, 6, 2).float() / 6)
        found[f"l.{i}.scale"] = torch.full((2,), 4**-0.5 / 3)
        found[f"l.{i}.again"] = tensors[f"w.{i}.weight"]
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=0)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {f"w.{i}.weight": torch.randn(3, 4) for i in range(2)}


@pytest.fixture
def source(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    return written(tmp_path / "source", tensors)


def written(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "toy.toml").write_text(TABLE)
    return tmp_path / "toy.toml"


def test_each_value_is_loaded_with_or_without_values_in_the_module(
    source: Path, table: Path, tensors: dict[str, Tensor]
) -> None:
    for into in (Toy, Toy()):
        module = porting.load(source, into, table, trust=True)
        same(dict(module.state_dict()), expected(tensors))
        record = porting.provenance(module)
        assert record is not None
        assert record.plan.summary == "2 of 2 tensors fill 2 of 18 places, 16 made"
        assert record.plan.contents["l.1.gate"] == "ones"
        assert record.plan.contents["l.1.again"] == "l.1.lin.weight"


def test_made_parameters_take_the_dtype_of_the_others(source: Path, table: Path) -> None:
    module = porting.load(source, Toy, table, dtype=torch.bfloat16, trust=True)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    assert module.get_buffer("l.0.ids").dtype == torch.int64


def test_a_checkpoint_that_has_the_tensor_fills_it(tmp_path: Path, table: Path, tensors: dict[str, Tensor]) -> None:
    tensors |= {f"w.{i}.bias": torch.randn(3) for i in range(2)}
    module = porting.load(written(tmp_path / "more", tensors), Toy, table, trust=True)
    same(dict(module.state_dict()), expected(tensors))


def test_an_export_leaves_them_out(source: Path, table: Path, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    module = porting.load(source, Toy, table, trust=True)
    with torch.no_grad():
        for name in ("l.0.lin.weight", "l.0.again"):
            module.get_parameter(name).add_(1)
    porting.export(module, None, tmp_path / "out")
    back = load_file(tmp_path / "out" / "model.safetensors")
    same(back, tensors | {"w.0.weight": tensors["w.0.weight"] + 1})


@pytest.mark.parametrize("name", ["l.1.lin.bias", "l.1.gate", "l.1.mix", "l.1.scale", "l.1.ids", "l.1.again"])
def test_an_export_refuses_a_value_that_has_changed(source: Path, table: Path, tmp_path: Path, name: str) -> None:
    module = porting.load(source, Toy, table, trust=True)
    with torch.no_grad():
        module.state_dict()[name].view(-1)[0] += 1
    with pytest.raises(PlanError, match=rf"{name}: \[make\] says .*, and its values are others \(no checkpoint has"):
        porting.export(module, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_after_a_cast_is_no_change(source: Path, table: Path, tmp_path: Path) -> None:
    module = porting.load(source, Toy, table, dtype=torch.bfloat16, trust=True).float()
    porting.export(module, None, tmp_path / "out")


def test_a_conversion_there_and_back(source: Path, table: Path, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    there = tmp_path / "port"
    porting.convert(source, there, table, into=Toy, trust=True)
    same(load_file(there / "model.safetensors"), expected(tensors))
    assert porting.diff(source, there, table).equal
    table.write_text(WITHOUT)
    assert porting.digest(source, table).tensors == porting.digest(there, table).tensors
    done = porting.convert(there, tmp_path / "back", table, reverse=True, like=source)
    same(load_file(tmp_path / "back" / "model.safetensors"), tensors)
    assert {one.name for one in done.left_out} == expected(tensors).keys() - {f"l.{i}.lin.weight" for i in range(2)}


def test_without_a_module_the_stated_shapes_are_made(
    source: Path, table: Path, tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    porting.convert(source, tmp_path / "port", table, derive=True)
    same(load_file(tmp_path / "port" / "model.safetensors"), expected(tensors))


def test_without_a_module_a_table_does_not_make_gigabytes(source: Path, table: Path, tmp_path: Path) -> None:
    table.write_text(TABLE.replace("s = 2\n", "s = 100_000_000\n"))
    with pytest.raises(LimitError, match=r"bytes of tensors beyond those that are stored.*PORTING_LIMITS=made="):
        porting.convert(source, tmp_path / "port", table, derive=True)
    assert not (tmp_path / "port").exists()


def test_without_a_module_a_shape_has_to_be_stated(source: Path, table: Path, tmp_path: Path) -> None:
    table.write_text(TABLE.replace(" [s]", "").replace("s = 2\n", ""))
    with pytest.raises(PlanError, match=r"without a module the shape of 'l\.\{i\}\.scale' is not known \(state it: "):
        porting.convert(source, tmp_path / "port", table, derive=True)


def test_without_a_module_a_range_says_how_many_there_are(tmp_path: Path) -> None:
    """Where no other name has the index; else it says which of those that are there."""
    save_file({"a.0": torch.ones(2), "a.1": torch.ones(2)}, tmp_path / "a.safetensors")
    rules = '[sizes]\ns = 2\n[tensors]\n"a.{i}" = "l.{i}.a"\n[make]\n'
    for number, (line, made) in enumerate(
        [('"scale.{k:0..2} [s]" = "ones"', {"scale.0", "scale.1", "scale.2"}), ('"l.{i:1..9}.b [s]" = 0', {"l.1.b"})]
    ):
        porting.convert(
            tmp_path / "a.safetensors", tmp_path / f"{number}", porting.parse_table(rules + line), derive=True
        )
        assert load_file(tmp_path / f"{number}" / "model.safetensors").keys() == {"l.0.a", "l.1.a"} | made
    unsaid = porting.parse_table(rules + '"scale.{k} [s]" = "ones"')
    with pytest.raises(
        PlanError, match=r"nothing says which numbers k has in 'scale\.\{k\} \[s\]' \(give a range, {k:0"
    ):
        porting.convert(tmp_path / "a.safetensors", tmp_path / "none", unsaid, derive=True)


def test_a_port_with_other_values_is_not_taken_for_the_same(source: Path, table: Path, tmp_path: Path) -> None:
    there = tmp_path / "port"
    porting.convert(source, there, table, into=Toy, trust=True)
    tensors = load_file(there / "model.safetensors")
    tensors["l.1.lin.bias"][2] = 1e-3
    save_file(tensors, there / "model.safetensors")
    found = porting.diff(source, there, table)
    assert [tensor.b for tensor in found.tensors if tensor.verdict is not Verdict.EQUAL] == ["l.1.lin.bias"]
    table.write_text(WITHOUT)
    for refused in (
        lambda: porting.digest(there, table),
        lambda: porting.convert(there, tmp_path / "back", table, reverse=True),
    ):
        with pytest.raises(PlanError, match=r"l\.1\.lin\.bias: \[make\] says zeros, and its values are others"):
            refused()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            '"l.{i}.gate" = "zeroes"',
            "'l.{i}.gate' = 'zeroes', expected 'arange', 'eye', 'causal', 'zeros', 'ones', 'rotary THETA', ",
        ),
        ('"l.{i}.gate" = "zeroes"', "did you mean 'zeros'?"),
        ('"l.{i}.gate" = true', "'l.{i}.gate' is True, expected a finite number"),
        ('"l.{*rest}" = "zeros"', "'l.{*rest}' says no single tensor, which [make] needs"),
        ('"l.{i}.gate [" = "zeros"', "a bracket is not closed"),
        ('"l.gate" = "equals l.{i}.gate"', "index 'i' stands in what 'l.gate' equals and not in its own name"),
        ('"l.{i}.gate" = "equals l.{i"', "20:26: '{' cannot stand in a name"),
    ],
)
def test_a_line_that_cannot_be_read(line: str, said: str) -> None:
    with pytest.raises(TableError) as caught:
        porting.parse_table(TABLE.replace('"l.{i}.gate [1]" = "ones"', line))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('gate [1]" = "ones"', 'gate [1]" = "eye"', "cannot be eye: the unit matrix has two axes, and this tensor 1"),
        ('ids [1 t]" = "arange"', 'ids [1 t]" = 0.5', "'l.0.ids' [1, 5] cannot be 0.5: int64 cannot hold 0.5"),
        ("mix [e f]", "mix [f o]", "'l.0.mix' [4, 4]: o is 3 and 4, in 'l.{i}.mix [f o]'"),
        ("gate [1]", "gate [1 1]", "'l.0.gate' [1]: the table states 2 axes, and it has 1"),
        ('"hidden ** -0.5 / 3"', '"hiden ** -0.5"', "the config has no 'hiden'"),
        (
            "equals l.{i}.lin.weight",
            "equals l.{i}.lin.wait",
            "is to equal 'l.0.lin.wait', which the module does not have",
        ),
        ("equals l.{i}.lin.weight", "equals l.{i}.mix", "'l.0.again' [3, 4] is to equal 'l.0.mix', and that is [4, 4]"),
        ('again" = "equals l.{i}.lin.weight"', 'lin.bias" = "equals l.{i}.gate"', "is made by this line and by that"),
        ("l.{i}.gate [1]", "l.{i}.gates [1]", "'l.0.gate' and 1 more like it [1] of the module: nothing writes it"),
        ("l.{i}.gate [1]", "l.{i}.gates [1]", "has 'l.0.gates': is it this one?"),
        ("[make]", '[make]\n"l.0.gate" = 2', "'l.0.gate' is made by this line and by that at"),
    ],
)
def test_a_line_that_does_not_fit_is_named_before_a_weight_is_read(
    source: Path, table: Path, old: str, new: str, said: str
) -> None:
    assert old in TABLE
    text = TABLE.replace(old, new)
    table.write_text(text if "[e f]" in text else text.replace('e = "hidden"\n', ""))
    with pytest.raises(PlanError) as caught:
        porting.load(source, Toy, table, trust=True)
    assert said in str(caught.value)


def test_a_table_that_extends_replaces_and_removes_lines(source: Path, table: Path, tmp_path: Path) -> None:
    child = tmp_path / "child.toml"
    child.write_text('extends = "toy"\n[make]\n"l.{i}.gate" = 2\n"l.{i}.mix" = false\n[fresh]\n"l.{i}.mix" = "new"\n'
                     '[sizes]\ne = false\nf = false\n')  # fmt: skip
    with pytest.warns(porting.PortingWarning, match="2 parameters are new"):
        module = porting.load(source, Toy, child, fresh=True, trust=True)
    assert module.get_parameter("l.0.gate").item() == 2
    assert not torch.equal(module.get_parameter("l.0.mix"), torch.eye(4))


def test_a_dropped_tensor_equals_any_of_the_words(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    tensors |= {"one": torch.ones(2), "unit": torch.eye(3), "half": torch.full((2,), 0.5)}
    text = TABLE + '[drop]\n"one" = "equals ones"\n"unit" = "equals eye"\n"half" = "equals 0.5"\n'
    source = written(tmp_path / "more", tensors)
    module = porting.load(source, Toy, porting.parse_table(text), trust=True)
    porting.export(module, None, tmp_path / "out")
    same(load_file(tmp_path / "out" / "model.safetensors"), tensors)
    written(source, tensors | {"unit": torch.ones(3, 3)})
    with pytest.raises(PlanError, match="unit: was to be dropped because it equals 'eye', and it does not"):
        porting.load(source, Toy, porting.parse_table(text), trust=True)


@pytest.mark.parametrize(
    "lines",
    ['"x" = "equals y"\n"y" = "equals x"', '"x" = "equals x"', '"x" = "equals b"\n"y" = "equals x"'],
    ids=["cycle", "itself", "chain"],
)
def test_what_equals_another_tensor_of_make_is_refused_without_a_module_too(lines: str, tmp_path: Path) -> None:
    """It was left out without a word."""
    source = tmp_path / "s.safetensors"
    save_file({"a": torch.ones(2, 2)}, source)
    table = porting.parse_table(f'[tensors]\n"a" = "b"\n[make]\n{lines}\n')
    with pytest.raises(PlanError, match=r"is to equal '[xy]', which no rule writes"):
        porting.convert(source, tmp_path / "out", table, derive=True)


HEAD = """\
[mapping]
name = "head"
[tensors]
"embed" = "tok"
[optional]
"lm_head" = "head"
[make]
"head" = "equals tok"
"""


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_only_one_side_has_comes_back_as_the_config_says(tmp_path: Path, tied: bool) -> None:
    """Without a record of the checkpoint: that of a tied model has no head, that of another one has its own."""
    words = torch.randn(5, 3)
    tensors = {"embed": words} if tied else {"embed": words, "lm_head": torch.randn(5, 3)}
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    table = porting.parse_table(HEAD)
    porting.convert(tmp_path / "source", tmp_path / "port", table, derive=True)
    port = load_file(tmp_path / "port" / "model.safetensors")
    same(port, {"tok": words, "head": tensors.get("lm_head", words)})
    (tmp_path / "port" / "provenance.json").unlink()
    porting.convert(tmp_path / "port", tmp_path / "back", table, reverse=True)
    same(load_file(tmp_path / "back" / "model.safetensors"), tensors)
