"""Each operation by itself, and through everything that uses it: all give the same bits."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import porting
from porting.checkpoint import open_checkpoint
from porting.converting.conversion import convert
from porting.converting.reverse_table import places_of
from porting.notation.sections import KEYS
from porting.notation.table import parse_table
from porting.ops import CONSTANTS, NOTHING, Arithmetic, Constant, Offset, Scale, Sum
from porting.plan.check import check
from porting.plan.recipe import forward_recipes
from porting.sharding.filling import compute_box
from porting.sharding.layout import Box
from porting.staging import MoveReader
from tests.converting.drawing import bits, write
from tests.plan.carrying import drawn, port, same

BY_HAND = {"scale": lambda x, c: x * c, "offset": lambda x, c: x + c}
"""What an operation is, said once more."""

NUMBERS = [0.3, -7.0, 2**-20]


def operations() -> list[Constant]:
    return [kind(number) for kind in CONSTANTS.values() for number in NUMBERS]


def drawn_values() -> Tensor:
    return torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_every_operation_is_tried_here_and_is_a_key_of_a_rule() -> None:
    assert list(CONSTANTS) == list(BY_HAND)
    assert {*CONSTANTS, Sum.key} <= set(KEYS["rule"])


@pytest.mark.parametrize("one", operations(), ids=str)
def test_forward_is_what_is_done_by_hand_and_the_inverse_undoes_it(one: Constant) -> None:
    values = drawn_values()
    found = values.clone()
    one.forward(found)
    assert torch.equal(found, BY_HAND[one.key](values, one.number))
    assert not torch.equal(found, values)
    one.inverse(found)
    torch.testing.assert_close(found, values, rtol=1e-15, atol=2 * abs(one.number) * 2**-52)


@pytest.mark.parametrize("one", operations(), ids=str)
def test_the_transpose_is_what_autograd_gives(one: Constant) -> None:
    values = drawn_values().requires_grad_()
    given = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    computed = values.clone()
    one.forward(computed)
    (expected,) = torch.autograd.grad(computed, values, given)
    found = given.clone()
    one.transpose(found)
    torch.testing.assert_close(found, expected, rtol=1e-15, atol=0.0)


def test_the_last_operation_is_undone_first_and_the_result_is_rounded_once() -> None:
    both = Arithmetic((Scale(0.3), Offset(0.7)))
    values = drawn_values().float()
    before = values.clone()
    found = both.applied(values)
    assert torch.equal(values, before)
    assert torch.equal(found, (values.double() * 0.3 + 0.7).float())
    assert not torch.equal(found, (values.double() * 0.3).float().double().add(0.7).float())
    assert torch.equal(both.inverse.applied(found), ((found.double() - 0.7) / 0.3).float())
    assert both.inverse.inverse == both


def test_what_is_computed_in_float64_leaves_its_argument() -> None:
    values = drawn_values()
    before = values.clone()
    Arithmetic((Scale(3.0),)).applied(values)
    assert torch.equal(values, before)


def test_a_sum_has_nothing_to_compute_on_the_way_back() -> None:
    total = Arithmetic((Sum(),))
    assert [bool(one) for one in (total, total.inverse, NOTHING)] == [True, False, False]
    assert [total.returns_to(term) for term in range(3)] == [True, False, False]
    assert [one.nbytes(torch.float32) for one in (total, total.inverse)] == [8, 0]


def test_a_scale_of_zero_is_refused_and_an_offset_of_zero_is_not() -> None:
    assert Scale.fault(0) == "the inverse divides by it"
    assert [Scale.fault(2), Offset.fault(0)] == ["", ""]


def combinations() -> list[str]:
    """Keys of a rule: each operation alone and all of them, in the order opposite to that in which they are applied."""
    keys = [*CONSTANTS][::-1]
    chosen = [some for count in (1, len(keys)) for some in itertools.combinations(keys, count)]
    lines = ["\n".join(f'{key} = "(width - 1) / 10"' for key in some) for some in chosen]
    return [line + fold for line in lines for fold in ("", "\nfold = true")]


class Port(nn.Module):
    """A module with one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(6, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keys", combinations())
def test_all_that_read_write_and_compare_agree_to_the_bit(keys: str, dtype: torch.dtype, tmp_path: Path) -> None:
    fold = "fold" in keys
    sources = {"a": (4, 6), "c": (4, 2)} if fold else {"a": (4, 6)}
    named = '["a [i o]", "c [i 0]"]' if fold else '"a [i o]"'
    text = f'[mapping]\nname = "t"\n[[rule]]\nsource = {named}\ntarget = "b [o i]"\n{keys}\n'
    config = {"width": 4}
    torch.manual_seed(3)
    held = drawn(sources, dtype)
    made = port(text, sources, {"b": (6, 4)}, config)
    expected = made.forward(held)
    wide = held["a"].double() + held["c"].double()[:, :1] if fold else held["a"].double()
    wide = wide.to(dtype).double()
    wide = wide * 0.3 if "scale" in keys else wide
    wide = wide + 0.3 if "offset" in keys else wide
    same(expected, {"b": wide.to(dtype).T})

    table = parse_table(text)
    a = write(tmp_path / "a", held, config)
    convert(a, tmp_path / "b", table)
    same(load_file(tmp_path / "b" / "model.safetensors"), expected)
    assert porting.diff(a, tmp_path / "b", table).equal
    with pytest.raises(porting.PortingError, match="no digest in common"):
        porting.digest(a, table)

    checkpoint = open_checkpoint(a)
    plan = check(table, checkpoint, places_of(table, checkpoint.tensors, config))
    for recipe in forward_recipes(plan.steps[0], plan.sources, plan.targets, plan.arithmetic(plan.steps[0])):
        box = compute_box(recipe, Box((1, 2), (3, 2), (0, 0)), MoveReader(checkpoint, sparing=True))
        assert bits(box) == bits(expected["b"][1:4, 2:4])

    module = porting.load(a, Port().to(dtype), table)
    same(dict(module.state_dict()), expected)
    porting.export(module, table, tmp_path / "same")
    same(load_file(tmp_path / "same" / "model.safetensors"), held)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.25)
    porting.export(module, table, tmp_path / "changed")
    back = made.backward(dict(module.state_dict()), base=held)
    same(load_file(tmp_path / "changed" / "model.safetensors"), back)
    convert(tmp_path / "b", tmp_path / "back", table, reverse=True, like=a)
    same(load_file(tmp_path / "back" / "model.safetensors"), made.backward(expected, base=held))
