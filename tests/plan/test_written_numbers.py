"""Numbers in names that are padded or bounded, and names with slashes: there, back, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import porting
from porting.notation.faults import TableError
from porting.plan.plan import PlanError

LAYERS = 12
PADDED = '"enc/layer_{i:02}/{p:query,key}/kernel [in out]" = "l.{i}.{p:q,k}.weight [out in]"'
RANGES = '"m.{i:0..1}.w" = "l.{i}.w"\n"m.{i:2..60}.w [a b]" = "l.{i}.w [b a]"'
STACKED = '"m.{i:0..1}.w" = "l.{i}.w"\n"m.{x+2:2..60}.w [a b]" = "stack [x b a]"'


@pytest.fixture
def padded(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    names = [f"enc/layer_{i:02}/{p}/kernel" for i in range(LAYERS) for p in ("query", "key")]
    return written(tmp_path / "padded", {name: torch.randn(3, 4) for name in names})


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return written(tmp_path / "plain", {f"m.{i}.w": torch.randn(3, 4) for i in range(5)})


def written(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "toy"}))
    return folder


def read(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def there(source: Path, rules: str) -> dict[str, Tensor]:
    """The tensors of a conversion, which is also done back, without a record of the names."""
    table = porting.parse_table(f'[mapping]\nname = "toy"\n[tensors]\n{rules}\n')
    porting.convert(source, source.parent / "there", table, derive=True)
    (source.parent / "there" / "provenance.json").unlink()
    porting.convert(source.parent / "there", source.parent / "back", table, reverse=True)
    back, tensors = read(source.parent / "back"), read(source)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], one) for name, one in tensors.items())
    return read(source.parent / "there")


def test_padded_numbers_and_slashes(padded: Path) -> None:
    found, tensors = there(padded, PADDED), read(padded)
    assert len(found) == len(tensors)
    for i in range(LAYERS):
        assert torch.equal(found[f"l.{i}.k.weight"], tensors[f"enc/layer_{i:02}/key/kernel"].T)


def test_ranges_on_one_side_bound_the_other(plain: Path) -> None:
    found, tensors = there(plain, RANGES), read(plain)
    for i in range(5):
        assert torch.equal(found[f"l.{i}.w"], tensors[f"m.{i}.w"] if i < 2 else tensors[f"m.{i}.w"].T)


def test_a_range_becomes_an_axis(plain: Path) -> None:
    found, tensors = there(plain, STACKED), read(plain)
    assert torch.equal(found["stack"], torch.stack([tensors[f"m.{i}.w"].T for i in (2, 3, 4)]))


def test_numbers_are_counted_from_the_lowest_of_the_ranges(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole", {f"m.{i}.w": torch.zeros(2, 3) for i in (2, 3, 4)})
    assert there(whole, '"m.{i:2..60}.w" = "l.{i}.w"').keys() == {f"l.{i}.w" for i in (2, 3, 4)}


def test_a_number_that_a_range_leaves_out_is_named(tmp_path: Path) -> None:
    source = written(tmp_path / "gap", {f"m.{i}.w": torch.zeros(2, 3) for i in (2, 3, 5)})
    with pytest.raises(
        PlanError, match=r"'m\.\{i\}' has i = 2, 3, 5 in the checkpoint: 4 is missing \(every number from 2"
    ):
        there(source, '"m.{i:2..60}.w" = "l.{i}.w"')


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("enc/layer_{i}/", "'enc/layer_00/query/kernel' and 9 more like it"),
        ("enc/layer_{i}/", "and the zeros in front of its numbers are others: write 'enc/layer_{i:02}/{p:query,key}/k"),
        ("enc/layer_{i:03}/", "write 'enc/layer_{i:02}/{p:query,key}/kernel'"),
        ("enc/leyer_{i:02}/", "has 'enc/leyer_00/query/kernel': is it this one?"),
    ],
)
def test_names_that_are_written_otherwise(padded: Path, pattern: str, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        there(padded, PADDED.replace("enc/layer_{i:02}/", pattern))
    assert said in str(caught.value).replace("'enc/layer_00/key/", "'enc/layer_00/query/")


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ('"m.{i:5..2}.w" = "l.{i}.w"', "{i:5..2} is a range without a number (such as {i:3..60})"),
        ('"m.{i:5..}.w" = "l.{i}.w"', "{i:5..} is a range without an end (such as {i:3..60})"),
        ('"m.{i:0..2}.w" = "l.{i:0..3}.w"', "index 'i' goes from 0 to 2 in one name and from 0 to 3 in another"),
        (STACKED.replace("x+2", "x"), "index 'x' begins at 2 in a name, and an axis begins at 0 (write {x+2:2..60})"),
    ],
)
def test_what_shows_without_a_tensor(rules: str, said: str) -> None:
    with pytest.raises(TableError) as caught:
        porting.parse_table(f"[tensors]\n{rules}")
    assert said in str(caught.value)
