from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from porting.comparing.digests import digest
from porting.errors import PortingError
from tests import own
from tests.comparing.conftest import Pair, columns_first

ONE_TO_ONE = own.TABLE.partition("[[rule]]")[0] + own.TABLE.partition('scale = "n_embd ** -0.5"')[2]
"""The table without its fold and its scale."""


def by_hand(rows: list[tuple[str, str, list[int], bytes]], first: str = "porting hash 1") -> str:
    """The digest as docs/comparing.md defines it."""
    lines = [first]
    for name, dtype, shape, data in sorted(rows):
        lines.append(json.dumps([name, dtype, shape, hashlib.sha256(data).hexdigest()], separators=(",", ":")))
    return "sha256:" + hashlib.sha256("".join(line + "\n" for line in lines).encode()).hexdigest()


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_digest_is_the_one_that_is_documented(tmp_path: Path) -> None:
    source = write(tmp_path / "a", {"b.ä": torch.tensor(3), "a": torch.tensor([[1.0, -2.0]]), "e": torch.zeros(0, 2)})
    expected = by_hand(
        [
            ("a", "float32", [1, 2], struct.pack("<2f", 1, -2)),
            ("b.ä", "int64", [], struct.pack("<q", 3)),
            ("e", "float32", [0, 2], b""),
        ]
    )
    assert str(digest(source)) == expected
    found = digest(source)
    assert str(found) == "sha256:" + hashlib.sha256(found.text.encode()).hexdigest()


def test_vector(tmp_path: Path) -> None:
    """A digest that must never change: a change of the definition is a change of its first line."""
    source = write(tmp_path / "a", {"a": torch.tensor([[1.0, -2.0]]), "b": torch.tensor([True, False])})
    assert str(digest(source)) == "sha256:4cb029575ffea813c3ef9e085d24547c057e9b0e480703d1489ee77889c9b935"
    assert str(digest(source, values=True)) == "sha256:4d1a6510cae98f5267bae96ac248e83449baf80a24ad8903453399bf6b871a0e"


def test_files_order_metadata_and_format_have_no_part_in_it(tmp_path: Path) -> None:
    values = own.tensors()
    expected = digest(own.write(tmp_path / "one", values))
    (tmp_path / "bin").mkdir()
    torch.save({name: columns_first(tensor) for name, tensor in values.items()}, tmp_path / "bin/pytorch_model.bin")
    (tmp_path / "shards").mkdir()
    names = list(values)
    index = {name: f"s{number % 2}.safetensors" for number, name in enumerate(names)}
    for shard in ("s0.safetensors", "s1.safetensors"):
        held = {name: values[name] for name in reversed(names) if index[name] == shard}
        save_file(held, tmp_path / "shards" / shard, metadata={"format": "pt"})
    (tmp_path / "shards" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert str(expected) == str(digest(tmp_path / "bin")) == str(digest(tmp_path / "shards", threads=1))


def test_names_dtypes_shapes_and_each_bit_count(tmp_path: Path) -> None:
    base = {"a": torch.randn(3, 4), "b": torch.randn(4)}
    flipped = base["a"].clone()
    flipped.view(torch.int32)[2, 3] ^= 1
    others = [
        {"a": base["a"], "c": base["b"]},
        {"a": base["b"], "b": base["a"]},
        {"a": base["a"].view(4, 3), "b": base["b"]},
        {"a": base["a"].view(torch.int32), "b": base["b"]},
        {"a": flipped, "b": base["b"]},
        {"a": base["a"]},
    ]
    found = {str(digest(write(tmp_path / str(number), tensors))) for number, tensors in enumerate([base, *others])}
    assert len(found) == len(others) + 1


def test_values_alone(tmp_path: Path) -> None:
    half = {
        "a": torch.randn(9).bfloat16(),
        "n": torch.tensor([1, 2], dtype=torch.int8),
        "c": torch.randn(2).to(torch.complex64),
    }
    wide = {"a": half["a"].double(), "n": half["n"].long(), "c": half["c"]}
    first, other = write(tmp_path / "half", half), write(tmp_path / "wide", wide)
    assert str(digest(first)) != str(digest(other))
    assert str(digest(first, values=True)) == str(digest(other, values=True))
    odd = write(tmp_path / "odd", {"a": torch.tensor([-0.0, float("nan"), -float("nan")])})
    plain = write(tmp_path / "plain", {"a": torch.tensor([0.0, float("nan"), float("nan")], dtype=torch.float64)})
    assert str(digest(odd, values=True)) == str(digest(plain, values=True))


def test_without_the_table_the_names_of_a_canonical_checkpoint_are_the_same(tmp_path: Path) -> None:
    """Nothing dropped, nothing lost, the first spellings: then the table adds nothing to the left side's digest."""
    mapping = own.table(
        tmp_path, '[mapping]\nprefix = "m."\n[tensors]\n"m.{p:q,k}.{w:w/g} [o i]" = "qk.{w:x} [i (p o)]"'
    )
    left = write(tmp_path / "left", {"m.q.w": torch.arange(6.0).view(2, 3), "m.k.w": 10 + torch.arange(6.0).view(2, 3)})
    fused = torch.tensor([[0, 3, 10, 13], [1, 4, 11, 14], [2, 5, 12, 15]], dtype=torch.float32)
    right = write(tmp_path / "right", {"qk.x": fused})
    older = write(tmp_path / "older", {"k.g": 10 + torch.arange(6.0).view(2, 3), "q.g": torch.arange(6.0).view(2, 3)})
    bare = write(tmp_path / "bare", {"q.w": torch.arange(6.0).view(2, 3), "k.w": 10 + torch.arange(6.0).view(2, 3)})
    assert str(digest(right, mapping)) == str(digest(left, mapping)) == str(digest(older, mapping)) == str(digest(bare))


@pytest.mark.parametrize("side", ["source", "port"])
def test_a_sum_or_a_factor_has_no_digest_in_common(pair: Pair, side: str) -> None:
    with pytest.raises(PortingError) as caught:
        digest(getattr(pair, side), pair.table)
    assert [fault.code.value for fault in caught.value.faults] == ["irreversible"] * 2
    assert "adds tensors, and the sum does not show them" in str(caught.value)
    assert "multiplies, which rounds" in str(caught.value)


def test_tensors_that_the_table_does_not_know(pair: Pair) -> None:
    mapping = own.table(pair.table.parent, ONE_TO_ONE)
    own.write(pair.source, {**own.tensors(), "layer.0.extra": torch.zeros(1)})
    with pytest.raises(PortingError, match=r"layer.0.extra: no rule reads it"):
        digest(pair.source, mapping)
    with pytest.raises(PortingError, match=r"scaled: no rule of the table writes it"):
        digest(pair.port, mapping)


def test_sides_that_cannot_be_told_apart(tmp_path: Path) -> None:
    mapping = own.table(tmp_path, '[mapping]\n[tensors]\n"x [i o]" = "x [o i]"')
    first = write(tmp_path / "one", {"x": torch.arange(6.0).view(2, 3)})
    other = write(tmp_path / "other", {"x": torch.arange(6.0).view(2, 3).T.contiguous()})
    with pytest.raises(PortingError, match=r"its layout cannot be told \(say which: side='left' or side='right'\)"):
        digest(first, mapping)
    assert str(digest(first, mapping, side="left")) == str(digest(other, mapping, side="right")) == str(digest(first))


def test_checkpoint_and_its_port_have_the_same(pair: Pair) -> None:
    mapping = own.table(pair.table.parent, ONE_TO_ONE)
    values = {name: tensor for name, tensor in own.tensors().items() if name not in ("shift", "model.types", "scaled")}
    own.write(pair.source, values)
    port = ported_plain(values)
    pair.write(port)
    left, right = digest(pair.source, mapping), digest(pair.port, mapping)
    assert left.text == right.text
    assert str(left) == str(right)
    assert left.left_out == {
        "decoder.weight": "equals model.tokens.weight",
        "steps": "a counter of the trainer's",
    }
    port["layers.1.qkv.bias"][3] += 1
    pair.write(port)
    assert str(digest(pair.port, mapping)) != str(left)


def ported_plain(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The port by hand."""
    found = {"tokens.weight": values["model.tokens.weight"], "positions.weight": values["positions.weight"][2:]}
    for number in (0, 1):
        older = number == 1
        parts = ("query", "key", "value")
        weights = [values[f"model.layer.{number}.{part}.weight"] for part in parts]
        found[f"layers.{number}.qkv.weight"] = torch.cat(weights)
        found[f"layers.{number}.qkv.bias"] = torch.cat([values[f"layer.{number}.{part}.bias"] for part in parts])
        found[f"layers.{number}.out.weight"] = values[f"model.layer.{number}.kernel"].T
        found[f"layers.{number}.norm.weight"] = values[f"layer.{number}.norm.{'gamma' if older else 'weight'}"]
        found[f"layers.{number}.norm.bias"] = values[f"layer.{number}.norm.{'beta' if older else 'bias'}"]
    return found


def test_what_no_rule_carries_counts_as_the_fill(tmp_path: Path) -> None:
    text = '[mapping]\n[[rule]]\nsource = "p [(_2|t) e]"\ntarget = "q [t e]"\nfill = 0.5'
    mapping = own.table(tmp_path, text)
    rows = torch.arange(12.0).view(4, 3)
    left, right = write(tmp_path / "left", {"p": rows}), write(tmp_path / "right", {"q": rows[2:].clone()})
    data = struct.pack("<12f", *[0.5] * 6, *range(6, 12))
    assert str(digest(left, mapping)) == str(digest(right, mapping)) == by_hand([("p", "float32", [4, 3], data)])
