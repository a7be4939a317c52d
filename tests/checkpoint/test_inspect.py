from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from porting.checkpoint import inspect_checkpoint
from porting.checkpoint.inspect import group_tensors
from porting.checkpoint.layout import ElementType, TensorInfo


def infos(*names: str, shape: tuple[int, ...] = (2, 3)) -> list[TensorInfo]:
    return [TensorInfo(name=name, shape=shape, element=ElementType.FLOAT32, nbytes=24, file="f") for name in names]


def patterns(*names: str) -> list[str]:
    return [group.pattern for group in group_tensors(infos(*names))]


def test_numbers_that_vary_become_ranges() -> None:
    assert patterns(*(f"encoder.layer.{i}.weight" for i in range(12))) == ["encoder.layer.{0..11}.weight"]
    assert patterns("layer.0.w", "layer.2.w", "layer.1.w", "layer.7.w") == ["layer.{0..2,7}.w"]
    assert patterns("layer.0.conv1d.w", "layer.1.conv1d.w") == ["layer.{0..1}.conv1d.w"]
    assert patterns("h.9.w", "h.10.w") == ["h.{9..10}.w"]
    assert patterns("h.08.w", "h.09.w", "h.10.w") == ["h.{08..10}.w"]
    assert patterns("bias", "weight") == ["bias", "weight"]


def test_two_numbers_are_joined_only_where_they_combine_freely() -> None:
    assert patterns(*(f"l.{i}.e.{x}.w" for i in range(3) for x in range(4))) == ["l.{0..2}.e.{0..3}.w"]
    assert patterns("l.0.e.0.w", "l.1.e.1.w") == ["l.0.e.0.w", "l.1.e.1.w"]


def test_other_shapes_and_dtypes_are_other_groups() -> None:
    groups = group_tensors([*infos("h.0.w", "h.1.w"), *infos("h.2.w", shape=(5,))])
    assert [(group.pattern, group.shape, group.count, group.nbytes) for group in groups] == [
        ("h.{0..1}.w", (2, 3), 2, 48),
        ("h.2.w", (5,), 1, 20),
    ]


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 2)), min_size=1))
def test_patterns_stand_for_exactly_the_tensors(numbers: set[tuple[int, int, int]]) -> None:
    names = [f"a.{i}.b.{j}.c{k}" for i, j, k in sorted(numbers)]
    expanded = [name for pattern in patterns(*names) for name in expand(pattern)]
    assert sorted(expanded) == sorted(names)


def expand(pattern: str) -> list[str]:
    """The names that a pattern stands for, by reading it back."""
    parts = re.split(r"\{(.*?)\}", pattern)
    choices = []
    for number, part in enumerate(parts):
        if number % 2 == 0:
            choices.append([part])
            continue
        values: list[str] = []
        for run in part.split(","):
            low, _, high = run.partition("..")
            values += map(str, range(int(low), int(high or low) + 1))
        choices.append(values)
    return ["".join(choice) for choice in itertools.product(*choices)]


def test_inspection_of_a_directory(tmp_path: Path) -> None:
    weights = {f"layer.{i}.w": torch.zeros(2, 3).half() for i in range(3)} | {"bias": torch.zeros(4)}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    found = inspect_checkpoint(tmp_path)
    assert (found.location, found.commit, found.model_type) == (str(tmp_path), None, "bert")
    assert found.architectures == ("BertModel",)
    assert (found.count, found.parameters, found.nbytes) == (4, 22, 52)
    (file,) = found.files
    assert (file.name, file.format, file.count, file.metadata) == (
        "model.safetensors",
        "safetensors",
        4,
        {"format": "pt"},
    )
    assert {(group.pattern, group.dtype) for group in found.groups} == {
        ("layer.{0..2}.w", "float16"),
        ("bias", "float32"),
    }
    again = json.loads(json.dumps(found.to_dict()))
    assert again["groups"][0]["count"] == found.groups[0].count


def test_ties_of_a_bin_file_are_shown(tmp_path: Path) -> None:
    tied = torch.randn(3, 2)
    torch.save({"decoder": tied, "embeddings": tied, "other": torch.randn(3, 2)}, tmp_path / "pytorch_model.bin")
    assert inspect_checkpoint(tmp_path).shared == (("decoder", "embeddings"),)


def test_values_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.zeros(1000)}, tmp_path / "model.safetensors")
    monkeypatch.setattr("porting.checkpoint.files.mmap.mmap", None)
    monkeypatch.setattr("porting.checkpoint.files.LocalFile.copy", None)
    assert inspect_checkpoint(tmp_path).count == 1
