"""What ``--derive`` says when the checkpoint alone does not tell what comes out: rules as the table has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from porting.checkpoint import open_checkpoint
from porting.converting.conversion import convert
from porting.notation.table import parse_table
from porting.plan.plan import PlanError
from tests.converting.drawing import write

SPLIT = '[tensors]\n"{p:q,k}.weight [(h d) e]" = "qk [(h p d) e]"'
FUSED = '[tensors]\n"l.{i}.{p:q,k}.weight [o e]" = "l.{i}.qk [(p o) e]"'
NUMBERED = '[tensors]\n"x.{n}.w [o e]" = "w [n o e]"'


@pytest.mark.parametrize(
    ("table", "shapes", "message"),
    [
        (
            SPLIT,
            {"q.weight": (6, 2), "k.weight": (6, 2)},
            "cannot be known from the checkpoint alone, in '{p:q,k}.weight [(h d) e] = qk [(h p d) e]'",
        ),
        (SPLIT, {"q.weight": (6, 2), "k.weight": (6, 2)}, "or pass into=, the module"),
        (
            '[tensors]\n"w [(a|b) e]" = "v [(b|a) e]"',
            {"w": (8, 3)},
            """give it in [sizes]: b = "...", or, where a has the size of b, write it b', or pass into=""",
        ),
        (
            FUSED,
            {"l.0.q.weight": (2, 2), "l.0.k.wieght": (2, 2)},
            "lacks 'l.0.k.weight' of 'l.{i}.{p:q,k}.weight [o e] = l.{i}.qk [(p o) e]' (did you mean 'l.0.k.wieght'?)",
        ),
        (NUMBERED, {"x.0.w": (2, 2), "x.2.w": (2, 2)}, "has n = 0, 2 in the checkpoint: 1 is missing"),
    ],
)
def test_what_is_missing_is_told_as_the_table_has_it(
    table: str, shapes: Mapping[str, tuple[int, ...]], message: str, tmp_path: Path
) -> None:
    source = write(tmp_path / "a", {name: torch.randn(shape) for name, shape in shapes.items()})
    with pytest.raises(PlanError) as caught:
        convert(source, tmp_path / "b", parse_table(table), derive=True)
    assert message in str(caught.value)
    assert "module lacks" not in str(caught.value)


def test_without_a_module_no_fault_speaks_of_one(tmp_path: Path) -> None:
    source = write(tmp_path / "a", {"w": torch.ones(2)})
    table = parse_table('[mapping]\nname = "t"\n[tensors]\n"v" = "v"\n"w" = "w"\n')
    for reverse in (False, True):
        with pytest.raises(PlanError, match="'v = v' matches nothing in what is converted") as caught:
            convert(source, tmp_path / "b", table, derive=not reverse, reverse=reverse)
        assert "module" not in str(caught.value)
    source = write(tmp_path / "qk", {"qk": torch.ones(12, 2)})
    with pytest.raises(PlanError, match=r"the size of h, d in .* cannot be known from the right side alone") as caught:
        convert(source, tmp_path / "b", parse_table(SPLIT), reverse=True)
    assert "module" not in str(caught.value)


def test_numbers_with_gaps_are_listed(tmp_path: Path) -> None:
    tensors = {f"l.{number}.a": torch.randn(2, 3) for number in (0, 4, 8)}
    table = parse_table('[mapping]\nname = "t"\n[tensors]\n"l.{i:0,4,8}.a [x y]" = "m.{i:0,4,8}.a [y x]"\n')
    convert(write(tmp_path / "a", tensors), tmp_path / "b", table, derive=True)
    found = open_checkpoint(tmp_path / "b")
    assert {name: found.read(name).tolist() for name in found.tensors} == {
        f"m.{number}.a": tensors[f"l.{number}.a"].T.tolist() for number in (0, 4, 8)
    }
