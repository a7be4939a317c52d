"""What a tensor is known to hold, against torch's own functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from porting.ops import Content

MADE: dict[str, Callable[[tuple[int, int]], Tensor]] = {
    "zeros": lambda shape: torch.zeros(shape, dtype=torch.float64),
    "ones": lambda shape: torch.ones(shape, dtype=torch.float64),
    "eye": lambda shape: torch.eye(*shape, dtype=torch.float64),
    "arange": lambda shape: torch.arange(shape[-1], dtype=torch.float64).expand(shape),
    "causal": lambda shape: torch.ones(shape, dtype=torch.float64).tril(),
    "rotary 500.0": lambda shape: (
        (1.0 / 500.0 ** (torch.arange(0, 2 * shape[-1], 2).float() / (2 * shape[-1]))).double().expand(shape)
    ),
    "0.1": lambda shape: torch.full(shape, 0.1, dtype=torch.float64),
}


def content(text: str) -> Content:
    found = Content.parse(text)
    assert found is not None
    return found


@pytest.mark.parametrize("word", MADE)
@pytest.mark.parametrize("shape", [(5, 5), (3, 5), (5, 3)])
def test_whole_rows_and_boxes_are_those_of_torch(word: str, shape: tuple[int, int]) -> None:
    expected: Tensor = MADE[word](shape)
    one = content(word)
    assert torch.equal(one.whole(shape, torch.float64), expected)
    assert torch.equal(one.row(shape, 4, 11).double(), expected.reshape(-1)[4:11])
    assert torch.equal(one.box((1, 1), (2, 2), shape).double(), expected[1:3, 1:3])
    assert one.held_by(expected)
    for place in range(expected.numel()):
        other = expected.clone()
        other.view(-1)[place] += 1
        assert not one.held_by(other)


def test_a_scalar_holds_a_number() -> None:
    assert content("ones").whole((), torch.float16).item() == 1
    assert content("ones").held_by(torch.ones(()))


def test_it_is_spelled_as_it_is_read() -> None:
    for word in MADE:
        assert str(content(word)) == word
    assert content(str(Content(number=1 / 3))).number == 1 / 3
    assert Content.parse("zeroes") is None


def test_zero_has_one_sign_and_a_number_may_be_rounded_as_a_dtype_before_had_it() -> None:
    assert not content("zeros").held_by(-torch.zeros(2))
    once = torch.full((2,), 0.1).bfloat16().float()
    assert not content("0.1").held_by(once)
    assert content("0.1").held_by(once, rounded=True)
    assert not content("0.1").held_by(torch.full((2,), 0.1001), rounded=True)


@pytest.mark.parametrize(
    ("word", "shape", "dtype", "said"),
    [
        ("eye", (3,), torch.float32, "the unit matrix has two axes, and this tensor 1"),
        ("arange", (), torch.float32, "it counts along its last axis, and this tensor has none"),
        ("arange", (300,), torch.int8, "int8 cannot hold 299"),
        ("arange", (3,), torch.bool, "a tensor of booleans cannot hold 2"),
        ("0.5", (3,), torch.int64, "int64 cannot hold 0.5"),
        ("1e6", (3,), torch.float16, "float16 cannot hold 1e+06"),
        ("inf", (3,), torch.float32, "float32 cannot hold inf"),
        ("ones", (3,), torch.bool, ""),
        ("eye", (3, 4), torch.int64, ""),
    ],
)
def test_what_a_tensor_cannot_hold(word: str, shape: tuple[int, ...], dtype: torch.dtype, said: str) -> None:
    assert content(word).fault(shape, dtype) == said


def test_masks_and_frequencies_may_have_axes_in_front() -> None:
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    assert torch.equal(content("causal").whole((1, 2, 6, 6), torch.bool), mask.expand(1, 2, 6, 6))
    assert torch.equal(content("causal").row((1, 2, 6, 6), 40, 60).bool(), mask.repeat(2, 1).reshape(-1)[40:60])
    assert content("causal").held_by(mask[None, None].to(torch.uint8))
    dim = 128
    frequencies = 1.0 / (
        10000.0 ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    )  # as transformers has it
    assert torch.equal(content("rotary 10000").whole((dim // 2,), torch.float32), frequencies)
    assert content("rotary 10000").held_by(frequencies)
    assert content("rotary 10000").held_by(frequencies.half().float(), rounded=True)
    assert not content("rotary 10001").held_by(frequencies)
    assert "has two axes at least" in content("causal").fault((3,), torch.bool)
    assert "cannot be int64" in content("rotary 10000").fault((3,), torch.int64)
