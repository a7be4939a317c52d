"""NaN and infinities are found where they are, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from porting.errors import Fault
from porting.notation.table import parse_table
from porting.plan import scan as scanning
from porting.plan.check import check
from porting.plan.plan import Plan
from porting.plan.scan import scan
from tests.plan.shapes import Headers, Info, module, put

TABLE = '[tensors]\n"{p:q,k}.weight [o e]" = "qk [(p o) e]"\n"emb" = "emb"\n[drop]\n"old" = "nobody needs it"\n'
SHAPES = {"q.weight": (3, 4), "k.weight": (3, 4), "emb": (5, 2, 3)}


def planned(dtype: torch.dtype = torch.float32) -> Plan:
    """A plan for q, k and emb; one of another kind of numbers is for emb alone."""
    weights = dtype.is_floating_point
    names = (*SHAPES, "old") if weights else ("emb",)
    tensors = {name: Info(shape=SHAPES.get(name, (2,)), dtype=dtype) for name in names}
    into = module({"qk": (6, 4)} if weights else {})
    put(into, "emb", torch.zeros((5, 2, 3), dtype=dtype, device="meta"))
    table = TABLE if weights else '[tensors]\n"emb" = "emb"\n'
    return check(parse_table(table), Headers(tensors=tensors), into)


def values(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}


def test_finite_weights_are_no_warning() -> None:
    assert scan(planned(), values().__getitem__) == ()


def test_what_is_no_number_is_counted_and_placed() -> None:
    tensors = values()
    tensors["k.weight"][1, 2] = torch.nan
    tensors["k.weight"][2, 3] = torch.nan
    tensors["k.weight"][0, 1] = -torch.inf
    tensors["emb"][4, 1, 0] = torch.inf
    assert list(map(str, scan(planned(), tensors.__getitem__))) == [
        (
            "k.weight: 'k.weight' [3, 4] -> 'qk': 2 NaN (the first at [1, 2]), 1 -Inf (the first at [0, 1]) "
            "(the file is damaged or its training diverged: look for another copy) [not-finite]"
        ),
        (
            "emb: 'emb' [5, 2, 3] -> 'emb': 1 +Inf (the first at [4, 1, 0]) "
            "(the file is damaged or its training diverged: look for another copy) [not-finite]"
        ),
    ]


def test_large_values_are_numbers_and_infinities_that_cancel_are_none() -> None:
    tensors = values()
    tensors["q.weight"].fill_(torch.finfo(torch.float32).max)  # their sum is infinite
    assert scan(planned(), tensors.__getitem__) == ()
    tensors["emb"][0, 0, :2] = torch.tensor([torch.inf, -torch.inf])
    (fault,) = scan(planned(), tensors.__getitem__)
    assert "1 +Inf (the first at [0, 0, 0]), 1 -Inf (the first at [0, 0, 1])" in str(fault)


@pytest.mark.parametrize("place", [0, 1, 6, 7, 8, 29])
def test_the_place_does_not_depend_on_the_pieces(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "CHUNK", 7)
    tensors = values()
    tensors["emb"].view(-1)[place:] = torch.nan
    (fault,) = scan(planned(), tensors.__getitem__)
    at = [place // 6, place // 3 % 2, place % 3]
    assert f"{30 - place} NaN (the first at {at})" in fault.message


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn], ids=str
)
def test_every_floating_dtype_is_looked_at(dtype: torch.dtype) -> None:
    tensors = values(dtype)
    assert scan(planned(dtype), tensors.__getitem__) == ()
    bad = tensors["emb"].float()
    bad[0, 0, 2] = torch.nan
    tensors["emb"] = bad.to(dtype)
    (fault,) = scan(planned(dtype), tensors.__getitem__)
    assert "1 NaN (the first at [0, 0, 2])" in fault.message


def test_both_parts_of_a_complex_number_are_looked_at() -> None:
    tensor = torch.zeros((5, 2, 3), dtype=torch.complex64)
    torch.view_as_real(tensor)[3, 0, 1, 1] = torch.inf
    (fault,) = scan(planned(torch.complex64), {"emb": tensor}.__getitem__)
    assert "1 +Inf (the first at [3, 0, 1])" in fault.message


def test_integers_are_finite() -> None:
    assert scan(planned(torch.int64), {"emb": torch.zeros((5, 2, 3), dtype=torch.int64)}.__getitem__) == ()


def test_every_tensor_that_is_loaded_is_read_once_and_no_other() -> None:
    tensors = values()
    read: list[str] = []
    told: list[tuple[int, int]] = []

    def reading(name: str) -> Tensor:
        read.append(name)
        return tensors[name]

    scan(planned(), reading, lambda done, total: told.append((done, total)))
    assert sorted(read) == sorted(SHAPES)
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_what_is_looked_at_together_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "CHUNK", 4)
    seen: list[int] = []

    def is_nan(chunk: Tensor) -> Tensor:
        seen.append(chunk.numel())
        return torch.isnan(chunk)

    monkeypatch.setattr(scanning, "KINDS", {"NaN": is_nan})
    tensors = values()
    tensors["emb"][:] = torch.nan
    faults: tuple[Fault, ...] = scan(planned(), tensors.__getitem__)
    assert len(faults) == 1
    assert max(seen) <= 4
