"""Rules with a formula through every command: load, export, convert both ways, diff and hash."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from porting.comparing.differences import diff
from porting.comparing.digests import digest
from porting.converting import making
from porting.converting.conversion import convert
from porting.converting.integrity import verify_files
from porting.errors import PortingError
from porting.exporting import export
from porting.loading import load
from porting.notation.table import parse_table
from porting.plan.plan import PlanError
from tests.converting.drawing import bits, write

TABLE = """
[mapping]
name = "merged"
[[rule]]
source = { w = "blocks.{i}.w [o d]", a = "blocks.{i}.a [r d]", b = "blocks.{i}.b [o r]" }
target = "layers.{i}.weight [o d]"
formula = "w + alpha * sum(b * a, r)"
back = { w = "y", a = "0", b = "0" }
[[rule]]
source = "blocks.{i}.A_log [n]"
target = "layers.{i}.A [n]"
formula = "-exp(x)"
back = { x = "log(-y)" }
[[rule]]
source = { w = "head.w [o d]", s = "head.s [p q]" }
target = "head [o d]"
formula = "w * blocks(s, 4, p=o, q=d)"
dtype = "float32"
[sizes]
r = 2
"""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 5))
        self.A = nn.Parameter(torch.zeros(3))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Parameter(torch.zeros(6, 5))


def held() -> dict[str, Tensor]:
    torch.manual_seed(0)
    found: dict[str, Tensor] = {}
    for i in range(2):
        found |= {
            f"blocks.{i}.{name}": torch.randn(shape) for name, shape in (("w", (6, 5)), ("a", (2, 5)), ("b", (6, 2)))
        }
        found[f"blocks.{i}.A_log"] = torch.randn(3)
    return found | {"head.w": torch.randn(6, 5).to(torch.float8_e4m3fn), "head.s": torch.rand(2, 2) + 0.5}


def expected(values: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for i in range(2):
        w, a, b = (values[f"blocks.{i}.{name}"].double() for name in "wab")
        found[f"layers.{i}.weight"] = (w + 4 * b @ a).float()
        found[f"layers.{i}.A"] = (-values[f"blocks.{i}.A_log"].double().exp()).float()
    scale = values["head.s"].double().repeat_interleave(4, 0)[:6].repeat_interleave(4, 1)[:, :5]
    return found | {"head": (values["head.w"].double() * scale).float()}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.allclose(found[name].float(), tensor.float(), rtol=1e-6, atol=1e-6), name


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = write(tmp_path / "a", held())
    (folder / "config.json").write_text(json.dumps({"alpha": 4}))
    return folder


@pytest.mark.parametrize("block", [8, 64, 1 << 20])
def test_it_is_converted_in_blocks_of_any_size(
    block: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "BLOCK", block)
    monkeypatch.setattr(making, "LONG", 0)  # a tensor of a test is small: made in one block otherwise
    convert(source, tmp_path / "b", parse_table(TABLE), memory=2 << 20)
    found = load_file(tmp_path / "b" / "model.safetensors")
    same(found, expected(held()))
    assert verify_files(tmp_path / "b").same
    convert(source, tmp_path / "c", parse_table(TABLE), memory=64 << 20)
    assert {n: bits(t) for n, t in load_file(tmp_path / "c" / "model.safetensors").items()} == {
        n: bits(t) for n, t in found.items()
    }
    assert diff(source, tmp_path / "b", table=parse_table(TABLE)).equal


def test_the_way_back_is_another_checkpoint_of_the_same_function(source: Path, tmp_path: Path) -> None:
    table = parse_table(TABLE.replace('target = "head [o d]"', 'target = "head [o d]"\noptional = true'))
    kept = {name: tensor for name, tensor in held().items() if not name.startswith("head")}
    convert(source, tmp_path / "whole", table)
    write(tmp_path / "kept", kept)
    (tmp_path / "kept" / "config.json").write_text(json.dumps({"alpha": 4}))
    convert(tmp_path / "kept", tmp_path / "b", table)
    convert(tmp_path / "b", tmp_path / "c", table, reverse=True)
    back = load_file(tmp_path / "c" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in back.items()} == {n: tuple(t.shape) for n, t in kept.items()}
    convert(tmp_path / "c", tmp_path / "d", table)
    same(load_file(tmp_path / "d" / "model.safetensors"), load_file(tmp_path / "b" / "model.safetensors"))


def test_what_has_no_way_back_is_refused_in_words(source: Path, tmp_path: Path) -> None:
    table = parse_table(TABLE)
    convert(source, tmp_path / "b", table)
    with pytest.raises(PlanError, match=r"computes 'w \* blocks\(s, 4, p=o, q=d\)', and nothing says what its sources"):
        convert(tmp_path / "b", tmp_path / "c", table, reverse=True)
    (tmp_path / "b" / "provenance.json").unlink()
    with pytest.raises(PlanError, match="and nothing says what its sources are made of on the way back"):
        convert(tmp_path / "b", tmp_path / "c", table, reverse=True)
    assert not (tmp_path / "c").exists()
    with pytest.raises(
        PlanError, match="computes values of others: a checkpoint and its port have no digest in common"
    ):
        digest(source, table=table)


def test_a_module_is_loaded_and_exported(source: Path, tmp_path: Path) -> None:
    """What was loaded and not changed is written as the checkpoint has it; what was changed, by ``back``."""
    table = parse_table(TABLE)
    module = load(source, Model, table=table)
    same(dict(module.state_dict()), expected(held()))
    export(module, table, tmp_path / "same")
    assert {n: bits(t) for n, t in load_file(tmp_path / "same" / "model.safetensors").items()} == {
        n: bits(t) for n, t in held().items()
    }
    with torch.no_grad():
        module.get_parameter("layers.0.weight").add_(1)
    export(module, table, tmp_path / "changed")
    found = load_file(tmp_path / "changed" / "model.safetensors")
    assert torch.equal(found["blocks.0.w"], module.get_parameter("layers.0.weight"))
    assert not found["blocks.0.a"].any()
    assert bits(found["blocks.1.a"]) == bits(held()["blocks.1.a"])
    with torch.no_grad():
        module.get_parameter("head").add_(1)
    with pytest.raises(PlanError, match="give the rule 'back', a formula over y for each source"):
        export(module, table, tmp_path / "refused")


OUTER = {"s [p]": (60_000,), "t [q]": (60_000,)}

HOSTILE = {
    "an outer product": ({"s [p]": (1500,), "t [q]": (1500,), "u [r]": (1500,)}, "s * t * u", "[p q r]", "made"),
    "one that is summed again": (OUTER, "sum(s * t, p)", "[q]", "made"),
    "one that is summed away": ({"w [o]": (4,), **OUTER}, "w * sum(s * t, p, q)", "[o]", "made"),
    "one that is summed many times": (OUTER, " + ".join(["sum(s * t, p)"] * 15), "[q]", "made"),
    "blocks that are too few": (
        {"w [o i]": (6, 4), "s [k]": (2,)},
        "w * blocks(s, 2, k=o)",
        "[o i]",
        "2 blocks of 2 end before the 6 elements of 'o'",
    ),
    "blocks that are too large": (
        {"w [o i]": (6, 4), "s [k]": (3,)},
        "w * blocks(s, 4, k=o)",
        "[o i]",
        "the 6 elements of 'o' fill 2 of 3 blocks of 4",
    ),
    "an index in two ways": (
        {"w [o i]": (6, 4), "s [k]": (3,)},
        "w * blocks(s, 2, k=o, k=i)",
        "[o i]",
        "s has the index 'k' once only",
    ),
    "an index summed twice": ({"w [o i]": (6, 4)}, "sum(w, i, i)", "[o]", "w has the index 'i' once only"),
}


BACK = 'back = { w = "y" }\n'

NO_VALUE = {
    "a number beyond float64": ((4, 4), f"w * 0x{'f' * 280}", "[o i]", ""),
    "such a number in a rule with a way back": ((4, 4), f"w * 0x{'f' * 280}", "[o i]", BACK),
    "blocks of 10^20": ((1, 4), "w * blocks(w, 99999999999999999999, o=p)", "[o i p]", ""),
    "no elements to resize": ((0, 4), "bicubic(w, o=O, i=I)", "[O I]", ""),
    "a division by zero": ((4, 4), "w / 0", "[o i]", ""),
    "a division of numbers by zero": ((4, 4), "w * (3 / (2 - 2))", "[o i]", ""),
    "a power that is too large": ((4, 4), "w * 10 ** 400", "[o i]", ""),
    "a negative power of zero": ((4, 4), "w * 0 ** -1", "[o i]", ""),
    "a root of a negative number": ((4, 4), "w * (-8) ** 0.5", "[o i]", ""),
    "the logarithm of zero": ((4, 4), "w * log(0)", "[o i]", ""),
    "a number beyond float64 by a function": ((4, 4), "w * exp(1000)", "[o i]", ""),
    "a function of tensors of a number": ((4, 4), "nf4(3) * w", "[o i]", ""),
}


@pytest.mark.parametrize(
    ("shape", "formula", "result", "back"), NO_VALUE.values(), ids=[name.replace(" ", "-") for name in NO_VALUE]
)
def test_a_formula_without_a_value_is_refused_at_its_place(
    shape: tuple[int, ...], formula: str, result: str, back: str, tmp_path: Path
) -> None:
    save_file({"w": torch.ones(shape)}, tmp_path / "model.safetensors")
    sizes = "".join(f"{one} = 3\n" for one in "OIp" if one in result)
    text = f'[mapping]\nname = "t"\n[sizes]\n{sizes}[[rule]]\nsource = {{ w = "w [o i]" }}\ntarget = "y {result}"\n'
    text += f'formula = "{formula}"\n{back}'
    with pytest.raises(PortingError, match=re.escape(f"formula = '{formula}' cannot be computed: ")) as caught:
        convert(tmp_path / "model.safetensors", tmp_path / "out", parse_table(text, where="t.toml"))
    assert [fault.code for fault in caught.value.faults] == ["bad-expression"]
    assert caught.value.faults[0].where.startswith("t.toml")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("shapes", "formula", "result", "said"), HOSTILE.values(), ids=[name.replace(" ", "-") for name in HOSTILE]
)
def test_a_formula_that_makes_far_more_than_it_reads_is_refused_in_a_line(
    shapes: dict[str, tuple[int, ...]],
    formula: str,
    result: str,
    said: str,
    tmp_path: Path,
) -> None:
    save_file({term[0]: torch.randn(shape) for term, shape in shapes.items()}, tmp_path / "model.safetensors")
    source = ", ".join(f'{term[0]} = "{term}"' for term in shapes)
    text = f'[mapping]\nname = "t"\n[[rule]]\nsource = {{ {source} }}\ntarget = "y {result}"\nformula = "{formula}"\n'
    with pytest.raises(PortingError, match=re.escape(said)) as caught:
        convert(tmp_path / "model.safetensors", tmp_path / "out", parse_table(text))
    assert len(str(caught.value)) < 1000
    assert not (tmp_path / "out").exists()
