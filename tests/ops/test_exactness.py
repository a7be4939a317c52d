"""What is computed keeps its imaginary part and its whole numbers, or is refused: nothing is lost without a word."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import porting
from porting.checkpoint import open_checkpoint
from porting.converting.conversion import convert
from porting.errors import Code, PortingError
from porting.notation.table import parse_table
from porting.plan.check import check
from porting.plan.move import pullback
from porting.plan.recipe import forward_recipes
from porting.sharding import filling
from porting.sharding.layout import Box
from porting.staging import MoveReader
from tests.converting.drawing import write
from tests.plan.carrying import port

SAY = 'say the dtype of the result: a rule with a formula takes dtype = "float32"'


def rule(keys: str, source: str = '"x"', target: str = "y") -> str:
    return f'[mapping]\nname = "t"\n[[rule]]\nsource = {source}\ntarget = "{target}"\n{keys}\n'


FOLD = '["x [t]", "z [t]"]'
TWO = '{ x = "x [t]", z = "z [t]" }'
LOOKED_UP = '{ s = "s [g]", j = "j [t]" }'

COMPLEX: dict[str, tuple[str, dict[str, Any], Any]] = {
    "scale": (rule("scale = 2"), {"x": [1 + 2j, 3j]}, [2 + 4j, 6j]),
    "scale and offset": (rule("scale = 0.5\noffset = 1"), {"x": [1 + 2j, 3j]}, [1.5 + 1j, 1 + 1.5j]),
    "fold": (rule("fold = true", FOLD, "y [t]"), {"x": [1 + 2j, 3j], "z": [1j, 1]}, [1 + 3j, 1 + 3j]),
    "formula": (rule('formula = "x * z - 1"', TWO, "y [t]"), {"x": [1 + 2j, 3j], "z": [1j, 2]}, [-3 + 1j, -1 + 6j]),
    "formula of real numbers too": (
        rule('formula = "x * z"', TWO, "y [t]"),
        {"x": [1 + 2j, 3j], "z": [2.0, 4.0]},
        [2 + 4j, 12j],
    ),
    "take": (rule('formula = "take(s, g=j)"', LOOKED_UP, "y [t]"), {"s": [1 + 2j, 3j], "j": [1, 0]}, [3j, 1 + 2j]),
}


def checkpoint(folder: Path, tensors: dict[str, Tensor]) -> Path:
    return write(folder, tensors, {})


class Holder(nn.Module):
    """A module with one tensor."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.register_buffer("y", torch.zeros_like(like))


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_keep_their_imaginary_part(name: str, tmp_path: Path) -> None:
    table, values, expected = COMPLEX[name]
    tensors = {one: torch.tensor(numbers) for one, numbers in values.items()}
    source = checkpoint(tmp_path / "in", tensors)
    convert(source, tmp_path / "out", parse_table(table))
    wanted = torch.tensor(expected, dtype=torch.complex64)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["y"], wanted)
    module = porting.load(source, Holder(wanted), parse_table(table))
    assert torch.equal(module.state_dict()["y"], wanted)


def test_a_complex_way_back_and_gradient(tmp_path: Path) -> None:
    held = port('[[rule]]\nsource = "x"\ntarget = "y"\nscale = 2\noffset = 1', {"x": (3,)}, {"y": (3,)})
    values = {"x": torch.tensor([1 + 2j, 3j, -1.5])}
    made = held.forward(values)
    assert torch.equal(held.backward(made)["x"], values["x"])
    (step,) = held.steps
    given = torch.tensor([1j, 2.0, 1 - 1j])
    found = pullback(step, "x", (3,), {"y": given}.__getitem__, held.arithmetic(step))
    assert torch.equal(found, 2 * given.to(torch.complex128))


def test_complex_numbers_are_not_made_real(tmp_path: Path) -> None:
    tensors = {"x": torch.tensor([1.0, 2.0]), "z": torch.tensor([1 + 2j, 3j])}
    source = checkpoint(tmp_path / "in", tensors)
    with pytest.raises(PortingError, match="would lose their imaginary part in float32") as caught:
        convert(source, tmp_path / "out", parse_table(rule('formula = "x * z"', TWO, "y [t]"), where="t.toml"))
    assert [fault.code for fault in caught.value.faults] == [Code.DTYPE_CHANGE]
    assert not (tmp_path / "out").exists()


def test_a_complex_number_that_becomes_infinite_is_counted(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", {"x": torch.tensor([3e38 + 1j, 1 + 1j])})
    done = convert(source, tmp_path / "out", parse_table(rule("scale = 2")))
    assert [lost.infinite for lost in done.losses.values()] == [1]


EXACT = {
    "int8 that fits": (torch.int8, "scale = 3", [-42, 42], [-126, 126]),
    "int64 beyond float64": (torch.int64, "scale = 1", [2**53 + 1, -(2**62) - 1], [2**53 + 1, -(2**62) - 1]),
    "int64, offset": (torch.int64, "offset = 2", [2**62 + 1, 0], [2**62 + 3, 2]),
    "int64 in a formula": (torch.int64, 'formula = "3 * x - 2 * x"', [2**53 + 1, 5], [2**53 + 1, 5]),
    "uint64": (torch.uint64, "scale = 2", [2**61 + 1, 0], [2**62 + 2, 0]),
    "uint8 to its end": (torch.uint8, "offset = 250", [5, 0], [255, 250]),
    "booleans": (torch.bool, "scale = 1", [True, False], [True, False]),
    "bits": (torch.uint8, 'formula = "sum(unpack_low(x, 4, n=2), n)"', [0x21, 0xFF], [3, 30]),
}


@pytest.mark.parametrize("name", EXACT)
def test_whole_numbers_are_computed_exactly(name: str, tmp_path: Path) -> None:
    dtype, keys, values, expected = EXACT[name]
    table = rule(keys, '"x [t]"', "y [t]")
    source = checkpoint(tmp_path / "in", {"x": torch.tensor(values, dtype=dtype)})
    convert(source, tmp_path / "out", parse_table(table))
    found = load_file(tmp_path / "out" / "model.safetensors")["y"]
    assert (found.dtype, found.tolist()) == (dtype, expected)
    module = porting.load(source, Holder(found), parse_table(table))
    assert module.state_dict()["y"].tolist() == expected


REFUSED = {
    "int8 that wraps": (torch.int8, "scale = 3", [100, 2], "the result 300 does not fit int8"),
    "uint8 below zero": (torch.uint8, "offset = -5", [1, 200], "the result -4 does not fit uint8"),
    "a negative uint8": (torch.uint8, 'formula = "-x"', [100, 1], "the result -100 does not fit uint8"),
    "int8 in a formula": (torch.int8, 'formula = "x * 2"', [-100, 100], "the result -200 does not fit int8"),
    "a scale with fractions": (torch.int8, "scale = 0.5", [2, 4], "the result has fractions, and int8 would lose them"),
    "a division": (torch.int8, 'formula = "x / 3"', [3, 6], "the result has fractions, and int8 would lose them"),
    "a function": (torch.bool, 'formula = "exp(x)"', [True, False], "has fractions, and bool would lose them"),
    "normal floats": (torch.uint8, 'formula = "nf4(x)"', [3, 7], "has fractions, and uint8 would lose them"),
    "booleans that are counted": (torch.bool, "scale = 2", [True, False], "the result 2 does not fit bool"),
    "int64 that wraps": (torch.int64, "scale = 4", [2**62, 1], f"the result may be {2**64}"),
    "int64 that wraps in a formula": (torch.int64, 'formula = "x * x"', [2**40, 1], f"the result may be {2**80}"),
    "a sum that wraps": (torch.int64, 'formula = "x + repeat(sum(x, t), t)"', [2**62, 2**62], f"result may be {2**63}"),
    "a number beyond int64": (torch.int64, f'formula = "x * {2**63}"', [0, 1], f"the result may be {2**63}"),
    "uint64 beyond int64": (torch.uint64, "scale = 1", [2**64 - 1, 5], "numbers of uint64 above"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_whole_numbers_that_would_change_are_refused(name: str, tmp_path: Path) -> None:
    dtype, keys, values, message = REFUSED[name]
    table = parse_table(rule(keys, '"x [t]"', "y [t]"), where="t.toml")
    held = checkpoint(tmp_path / "in", {"x": torch.tensor(values, dtype=dtype)})
    for done in (
        lambda: convert(held, tmp_path / "out", table),
        lambda: porting.load(held, Holder(torch.zeros(2, dtype=dtype)), table),
    ):
        with pytest.raises(PortingError, match=re.escape(message)) as caught:
            done()
        assert caught.value.faults[0].where.startswith("t.toml:")
        assert {fault.code for fault in caught.value.faults} == {Code.DTYPE_CHANGE}
        assert caught.value.faults[0].hint == SAY
    assert not (tmp_path / "out").exists()


def test_the_hint_says_what_to_write(tmp_path: Path) -> None:
    tensors = {"x": torch.tensor([100, -3], dtype=torch.int8), "z": torch.tensor([0.01, 0.5])}
    held = checkpoint(tmp_path / "in", tensors)
    with pytest.raises(PortingError) as caught:
        convert(held, tmp_path / "out", parse_table(rule('formula = "x * z"', TWO, "y [t]")))
    assert "int8 would be computed of float32, and lose fractions" in str(caught.value)
    assert caught.value.faults[0].hint == SAY
    convert(held, tmp_path / "out", parse_table(rule('formula = "x * z"\ndtype = "float32"', TWO, "y [t]")))
    found = load_file(tmp_path / "out" / "model.safetensors")["y"]
    assert torch.equal(found, (tensors["x"].double() * tensors["z"].double()).float())


SUMS: dict[str, tuple[torch.dtype, list[Any], list[Any], str]] = {
    "int8": (torch.int8, [100, 1], [100, 1], "the result 200 does not fit int8"),
    "bool": (torch.bool, [True, False], [True, False], "the result 2 does not fit bool"),
    "int64": (torch.int64, [2**62, 1], [2**62, 1], "the sum does not fit int64"),
    "uint64": (torch.uint64, [2**63, 1], [1, 1], "numbers of uint64 above"),
    "int64 that fits": (torch.int64, [2**53 + 1, 2**62], [0, -(2**62) - 1], ""),
    "uint8 that fits": (torch.uint8, [200, 1], [55, 1], ""),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_whole_numbers_are_exact_or_refused(name: str, tmp_path: Path) -> None:
    dtype, first, second, message = SUMS[name]
    tensors = {"x": torch.tensor(first, dtype=dtype), "z": torch.tensor(second, dtype=dtype)}
    held = checkpoint(tmp_path / "in", tensors)
    table = parse_table(rule("fold = true", FOLD, "y [t]"))
    if message:
        with pytest.raises(PortingError, match=message):
            convert(held, tmp_path / "out", table)
    else:
        convert(held, tmp_path / "out", table)
        found = load_file(tmp_path / "out" / "model.safetensors")["y"].tolist()
        assert found == [a + b for a, b in zip(first, second, strict=True)]


def test_the_way_back_of_whole_numbers_is_exact_or_refused() -> None:
    held = port('[[rule]]\nsource = "x"\ntarget = "y"\nscale = 3\noffset = 1', {"x": (2,)}, {"y": (2,)})
    values = {"x": torch.tensor([2**60 + 1, -7])}
    assert torch.equal(held.backward(held.forward(values))["x"], values["x"])
    with pytest.raises(PortingError, match="a division by 3 leaves fractions, which whole numbers lose"):
        held.backward({"y": torch.tensor([3, 4])})


def test_a_part_of_a_sharded_tensor_is_refused_as_the_whole_is(tmp_path: Path) -> None:
    held = open_checkpoint(checkpoint(tmp_path / "in", {"x": torch.tensor([[100, 2], [3, 4]], dtype=torch.int8)}))
    table = parse_table(rule("scale = 3", '"x [a b]"', "y [b a]"))
    made = check(table, held, Holder(torch.zeros(2, 2, dtype=torch.int8)))
    (step,) = made.steps
    (recipe,) = forward_recipes(step, made.sources, made.targets, made.arithmetic(step))
    reader = MoveReader(held, sparing=True)
    assert filling.compute_box(recipe, Box((0, 1), (2, 1), (0, 0)), reader).tolist() == [[9], [12]]
    with pytest.raises(PortingError, match="the result 300 does not fit int8"):
        filling.compute_box(recipe, Box((0, 0), (2, 1), (0, 0)), reader)


@pytest.mark.parametrize(
    ("dtype", "fill", "message"),
    [
        (torch.int8, "0.5", "int8 cannot hold 0.5"),
        (torch.uint8, "300", "uint8 cannot hold 300"),
        (torch.float16, "1e6", "float16 cannot hold 1e+06"),
        (torch.int8, "-3", ""),
    ],
)
def test_a_fill_that_the_dtype_does_not_hold_is_refused(
    dtype: torch.dtype, fill: str, message: str, tmp_path: Path
) -> None:
    table = rule(f"fill = {fill}", '"x [t]"', "y [(t|_2)]")
    held = checkpoint(tmp_path / "in", {"x": torch.ones(3).to(dtype)})
    module = Holder(torch.zeros(5, dtype=dtype))
    if message:
        with pytest.raises(PortingError, match=re.escape(message)):
            porting.load(held, module, parse_table(table))
    else:
        porting.load(held, module, parse_table(table))
        assert module.state_dict()["y"].tolist() == [1, 1, 1, -3, -3]


FITTING: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "an index with a fraction": (LOOKED_UP, "take(s, g=j)", {"s": [1.0, 2.0], "j": [0.0, 0.5]}, "0.5 is not whole"),
    "a negative index": (LOOKED_UP, "take(s, g=j)", {"s": [1.0, 2.0], "j": [0, -1]}, "-1 is not from 0 to 1"),
    "a fraction below zero": (LOOKED_UP, "take(s, g=j)", {"s": [1.0, 2.0], "j": [-0.9, 0]}, "-0.9 is not from 0 to 1"),
    "an index that is not a number": (
        LOOKED_UP,
        "take(s, g=j)",
        {"s": [1.0], "j": [float("nan")]},
        "nan is not from 0",
    ),
    "a complex index": (LOOKED_UP, "take(s, g=j)", {"s": [1.0, 2.0], "j": [1j, 0]}, "these are complex"),
    "nf4 above 15": ('"x [t]"', "nf4(x)", {"x": [17, 3]}, "17 is not from 0 to 15"),
    "nf4 below 0": ('"x [t]"', "nf4(x)", {"x": [-1, 3]}, "-1 is not from 0 to 15"),
    "nf4 of infinity": ('"x [t]"', "nf4(x)", {"x": [float("inf")]}, "inf is not from 0 to 15"),
    "fp4 of more than a byte": ('"x [t]"', "sum(fp4(x, n), n)", {"x": [256, 3]}, "256 is not from -128 to 255"),
    "more bits than are taken": (
        '"x [t]"',
        "sum(unpack_low(x, 4, n=2), n)",
        {"x": [256, 3]},
        "256 is not from -128 to 255",
    ),
    "bits of a fraction": ('"x [t]"', "sum(unpack_low(x, 4, n=2), n)", {"x": [0.5, 3]}, "0.5 is not whole"),
}


@pytest.mark.parametrize("name", FITTING)
def test_what_is_looked_up_is_whole_and_in_range(name: str, tmp_path: Path) -> None:
    source, formula, values, message = FITTING[name]
    held = checkpoint(tmp_path / "in", {one: torch.tensor(numbers) for one, numbers in values.items()})
    dtype = 'dtype = "float32"' if "x" in values and isinstance(values["x"][0], int) else ""
    with pytest.raises(PortingError, match=re.escape(message)) as caught:
        convert(held, tmp_path / "out", parse_table(rule(f'formula = "{formula}"\n{dtype}', source, "y [t]")))
    assert [fault.code for fault in caught.value.faults] == [Code.BAD_EXPRESSION]


def test_no_more_bits_are_taken_than_a_source_has(tmp_path: Path) -> None:
    held = checkpoint(tmp_path / "in", {"x": torch.tensor([255, 1], dtype=torch.uint8)})
    table = rule('formula = "unpack_low(x, 4, n=8)"', '"x [t]"', "y [t n]")
    with pytest.raises(PortingError, match=re.escape("takes 32 bits of each number, and x has 8")):
        convert(held, tmp_path / "out", parse_table(table))


def test_a_size_that_a_formula_gives_is_not_another_in_sizes(tmp_path: Path) -> None:
    held = checkpoint(tmp_path / "in", {"x": torch.tensor([255, 1], dtype=torch.uint8)})
    table = rule('formula = "unpack_low(x, 4, n=2)"\n[sizes]\nn = 1000000000000', '"x [t]"', "y [t n]")
    with pytest.raises(PortingError, match=re.escape("n is 1000000000000 in [sizes] and 2 in the formula")):
        convert(held, tmp_path / "out", parse_table(table))


def test_a_dtype_is_for_quantised_sources(tmp_path: Path) -> None:
    held = checkpoint(tmp_path / "in", {"x": torch.tensor([1e9, 1.0])})
    table = parse_table(rule('formula = "x"\ndtype = "float16"'))
    with pytest.raises(PortingError, match="is for a quantised first source, and this one is float32"):
        convert(held, tmp_path / "out", table)
    convert(held, tmp_path / "cast", table, dtype=torch.float16)
    convert(held, tmp_path / "same", parse_table(rule('formula = "x"\ndtype = "float32"')))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn], ids=str)
def test_what_a_scale_makes_too_large_is_counted(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.tensor([1.0, torch.finfo(dtype).max]).to(dtype)
    held = checkpoint(tmp_path / "in", {"x": values})
    done = convert(held, tmp_path / "out", parse_table(rule("scale = 4")))
    assert [lost.infinite for lost in done.losses.values()] == [1]


@pytest.mark.parametrize("field", ["rank", "alpha"])
def test_an_adapter_of_rank_zero_is_refused(field: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    save_file({"x": torch.ones(2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"rank": 2, "alpha": 4} | {field: 0}))
    table = parse_table(rule('formula = "x * (alpha / rank)"'), where="t.toml")
    if field == "rank":
        with pytest.raises(PortingError, match="cannot be computed: it divides by zero") as caught:
            convert(folder, tmp_path / "out", table)
        assert [fault.code for fault in caught.value.faults] == [Code.BAD_EXPRESSION]
    else:
        convert(folder, tmp_path / "out", table)
        assert load_file(tmp_path / "out" / "model.safetensors")["y"].tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn], ids=str)
def test_numbers_of_8_bits_are_added(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"x": torch.tensor([1.0, 2.0]).to(dtype), "z": torch.tensor([2.0, -0.5]).to(dtype)}
    held = checkpoint(tmp_path / "in", tensors)
    convert(held, tmp_path / "out", parse_table(rule("fold = true", FOLD, "y [t]")))
    assert load_file(tmp_path / "out" / "model.safetensors")["y"].float().tolist() == [3.0, 1.5]


def test_a_dtype_without_negative_numbers_gets_none(tmp_path: Path) -> None:
    """torch drops the sign, and gives the smallest number for zero."""
    held = checkpoint(tmp_path / "in", {"x": torch.tensor([1.0, 2.0]).to(torch.float8_e8m0fnu)})
    for number in (-1, 0.5):
        table = parse_table(rule(f"scale = {number}"))
        if number > 0:
            convert(held, tmp_path / "out", table)
            continue
        with pytest.raises(PortingError, match="float8_e8m0fnu has positive numbers only"):
            convert(held, tmp_path / "out", table)
