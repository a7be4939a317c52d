from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from porting.comparing.numbers import Odd, compare_pieces, count_odd

NAN, INF = math.nan, math.inf


def compared(left: Tensor, right: Tensor, **options: float) -> object:
    found = compare_pieces(left, right, start=0, shape=left.shape, **options)
    return found.same_bytes, found.unequal, found.beyond, found.largest, found.at


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), (True, 0, 0, 0.0, None)),
        (torch.tensor([0.0]), torch.tensor([-0.0]), (False, 0, 0, 0.0, None)),
        (torch.tensor([1.5]), torch.tensor([1.5]).bfloat16(), (False, 0, 0, 0.0, None)),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, 2.0]), (False, 1, 1, INF, 1)),
        (torch.tensor([INF, 1.0]), torch.tensor([-INF, 3.0]), (False, 2, 2, INF, 0)),
        (torch.tensor([INF]), torch.tensor([INF]).double(), (False, 0, 0, 0.0, None)),
        (torch.tensor([2**53 + 1]), torch.tensor([2**53]), (False, 1, 1, 1.0, 0)),
        (torch.tensor([2**53 + 1]), torch.tensor([2.0**53]).double(), (False, 1, 1, 1.0, 0)),
        (torch.tensor([True, False]), torch.tensor([1, 0]), (False, 0, 0, 0.0, None)),
        (torch.tensor([3 + 4j]), torch.tensor([0j]), (False, 1, 1, 5.0, 0)),
        (torch.tensor([1.0]).to(torch.float8_e4m3fn), torch.tensor([1.5]), (False, 1, 1, 0.5, 0)),
        (torch.tensor([7, 9]).to(torch.uint64), torch.tensor([7, 12]).to(torch.uint64), (False, 1, 1, 3.0, 1)),
        (torch.zeros(0), torch.zeros(0), (True, 0, 0, 0.0, None)),
        (torch.zeros(0), torch.zeros(0).half(), (False, 0, 0, 0.0, None)),
    ],
)
def test_pieces(left: Tensor, right: Tensor, expected: object) -> None:
    assert compared(left, right) == expected


def test_tolerance_is_measured_against_the_second() -> None:
    left, right = torch.tensor([10.0, 1.0]), torch.tensor([11.0, 2.0])
    assert compared(left, right, atol=1.0) == (False, 2, 0, 1.0, 0)
    assert compared(left, right, rtol=0.1) == (False, 2, 1, 1.0, 0)
    assert compared(torch.tensor([NAN]), torch.tensor([1.0]), atol=1e300) == (False, 1, 1, INF, 0)


def test_where_and_how_much() -> None:
    left = torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(1))
    right = left.clone()
    right[1, 5, 2] += 0.25
    right[3, 2, 2] -= 0.5
    found = compare_pieces(left.view(-1), right.view(-1), start=0, shape=left.shape)
    assert (found.low, found.high) == ((1, 2, 2), (3, 5, 2))
    assert found.at == (3 * 7 + 2) * 3 + 2
    assert found.values == (left[3, 2, 2].item(), right[3, 2, 2].item())
    expected = (left.double() - right.double()).square().mean().sqrt()
    assert math.isclose(found.rms, float(expected), rel_tol=1e-12)


def test_sums_of_pieces_are_the_whole() -> None:
    generator = torch.Generator().manual_seed(2)
    left = torch.randn(60, generator=generator)
    right = torch.where(torch.rand(60, generator=generator) < 0.2, left + torch.randn(60, generator=generator), left)
    right[7], left[40] = NAN, INF
    whole = compare_pieces(left, right, start=0, shape=(6, 10))
    parts = [compare_pieces(left[i : i + 7], right[i : i + 7], start=i, shape=(6, 10)) for i in range(0, 60, 7)]
    total = parts[0]
    for part in parts[1:]:
        total += part
    assert math.isclose(total.squares, whole.squares, rel_tol=1e-12)
    for field in ("numel", "same_bytes", "unequal", "beyond", "largest", "at", "low", "high", "odd"):
        assert getattr(total, field) == getattr(whole, field), field


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_odd_numbers_are_counted(dtype: torch.dtype) -> None:
    assert count_odd(torch.tensor([1.0, NAN, INF, -INF, NAN, 0.0]).to(dtype)) == Odd(nan=2, inf=2)
    assert not count_odd(torch.tensor([1.0, -3.0]).to(dtype))


def test_odd_numbers_of_other_kinds() -> None:
    assert count_odd(torch.tensor([complex(NAN, INF), 1j])) == Odd(nan=1, inf=1)
    assert not count_odd(torch.tensor([1, 2]))
