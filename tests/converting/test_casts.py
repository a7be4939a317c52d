"""Casts count what they lose, and give the same bits wherever a tensor is cut."""

from __future__ import annotations

import math

import pytest
import torch

from porting.converting.casts import Losses, settle

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_bits(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Every kind of number, NaN of all payloads among them."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("to", FLOATS[:4], ids=str)
def test_bits_do_not_depend_on_where_a_tensor_is_cut(dtype: torch.dtype, to: torch.dtype) -> None:
    values = random_bits(dtype, 4001)
    values[::7] = torch.tensor(math.nan).to(dtype)
    found = []
    for step, length in ((1, 4001), (1, 1), (1, 37), (3, 500)):
        out = torch.zeros(4001 * step, dtype=to)[::step]
        total = Losses()
        for start in range(0, 4001, length):
            out[start : start + length].copy_(values[start : start + length])
            total += settle(values[start : start + length], out[start : start + length])
        raw = out.contiguous().view(INTEGERS[to.itemsize])
        found.append((raw.tolist(), total))
    assert all(tensor == found[0] for tensor in found)
    nan = (out if to.itemsize > 1 else out.float()).isnan()
    assert len(set(raw[nan].tolist())) == 1, "one NaN for all"


def test_losses_are_counted() -> None:
    tiny, huge = 1e-45, 3.4e38
    values = torch.tensor([0.0, -0.0, tiny, -tiny, huge, -huge, math.inf, math.nan, 1.0])
    for to, expected in (
        (torch.bfloat16, Losses(infinite=2, vanished=2)),
        (torch.float16, Losses(infinite=2, vanished=2)),
        (torch.float64, Losses()),
    ):
        out = values.to(to)
        assert settle(values, out) == expected
    assert settle(values[:0], values[:0].half()) == Losses()


@pytest.mark.parametrize(
    ("dtype", "edge"), [(torch.float8_e4m3fn, 464.0), (torch.float8_e5m2, 61440.0)], ids=["e4m3fn", "e5m2"]
)
def test_values_beyond_8_bits_are_counted_whatever_they_become(dtype: torch.dtype, edge: float) -> None:
    """torch gives the largest number in place of what is too large for E4M3, and infinity for E5M2."""
    largest = torch.finfo(dtype).max
    values = torch.tensor([1.0, -largest, edge - 0.1, -(edge + 0.1), 1e9, math.nan], dtype=torch.float64)
    assert settle(values, values.to(dtype)) == Losses(infinite=2)
    assert settle(values[:3], values[:3].to(dtype)) == Losses()
