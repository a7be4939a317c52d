"""HDF5 files as a source: what h5py wrote, and files that lie."""

from __future__ import annotations

import builtins
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from porting.checkpoint import open_checkpoint
from tests.checkpoint.hostile import refused, tensors_of, torn
from tests.converting.drawing import bits, values

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
          torch.float64, torch.complex64]  # fmt: skip
STORED = [dtype for dtype in DTYPES if dtype is not torch.bool]


def write(path: Path | io.BytesIO, tensors: Mapping[str, torch.Tensor], **options: object) -> None:
    """A file with these tensors, nested by the slashes of their names."""
    with h5py.File(path, "w") as file:
        for name, tensor in tensors.items():
            file.create_dataset(name, data=tensor.numpy(), **(options if tensor.numel() > 1 else {}))


@pytest.mark.parametrize("options", [{}, {"chunks": (3, 2, 1)}, {"chunks": (4, 3, 2), "compression": "gzip"}])
def test_each_type_is_read_to_the_bit(tmp_path: Path, options: dict[str, object]) -> None:
    tensors = {f"a/{dtype}": values((7, 3, 2), dtype, 1) for dtype in DTYPES}
    tensors |= {"empty": torch.zeros(0, 3), "a/b/scalar": torch.tensor(2.5)}
    write(tmp_path / "tf_model.h5", tensors, **options)
    assert tensors_of(tmp_path) == {name: bits(tensor) for name, tensor in tensors.items()}
    inside = open_checkpoint(f"{tmp_path / 'tf_model.h5'}#a")
    assert bits(inside.read("torch.float32")) == bits(tensors["a/torch.float32"])


def test_big_endian_numbers_and_numbers_that_were_never_written(tmp_path: Path) -> None:
    expected = values((5, 3), torch.float32, 2)
    with h5py.File(tmp_path / "model.weights.h5", "w") as file:
        file["big"] = expected.numpy().astype(">f4")
        file.create_dataset("never", shape=(2, 2), dtype="f4", fillvalue=7)
    found = open_checkpoint(tmp_path)
    assert torch.equal(found.read("big"), expected)
    assert torch.equal(found.read("never"), torch.full((2, 2), 7.0))


def test_nothing_outside_of_the_file_is_read(tmp_path: Path) -> None:
    write(tmp_path / "other.h5", {"secret": torch.ones(3)})
    (tmp_path / "raw").write_bytes(bytes(12))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["kept"] = np.ones(2, "f4")
        file["outside"] = h5py.ExternalLink("other.h5", "/secret")
        file["again"] = h5py.SoftLink("/kept")
        file["text"] = "words"
    assert {*open_checkpoint(tmp_path / "a.h5").tensors} == {"kept"}
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_dataset("outside", shape=(3,), dtype="f4", external=[(tmp_path / "raw", 0, 12)])
        layout = h5py.VirtualLayout((3,), dtype="f4")
        layout[:] = h5py.VirtualSource(tmp_path / "other.h5", "secret", (3,))
        file.create_virtual_dataset("virtual", layout)
    refused(
        tmp_path / "b.h5", "tensor 'outside': its elements lie in other files", "tensor 'virtual': its elements lie"
    )


def test_a_group_in_itself_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["g/w"] = np.ones(2, "f4")
        file["g/again"] = file["g"]
    refused(tmp_path / "a.h5", "a group contains itself, or is in two groups")


def test_a_link_that_is_damaged_is_no_missing_tensor(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["bert/w"], file["x"] = np.ones(2, "f4"), np.zeros(3, "f4")
    raw = bytearray((tmp_path / "a.h5").read_bytes())
    raw[raw.rindex(b"TREE") + 24] = 8  # the first key of the tree of a group, by which a name is looked up
    (tmp_path / "a.h5").write_bytes(raw)
    with h5py.File(tmp_path / "a.h5") as file:
        assert [*file["bert"]] == ["w"]
    refused(tmp_path / "a.h5", "the link of 'bert/w' is damaged (the file is damaged: fetch it again)")


def test_what_is_inflated_is_charged(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("w", shape=(1 << 17, 1 << 10), dtype="f4", chunks=(1 << 10, 1 << 10), compression="gzip")
    refused(tmp_path / "a.h5", "as much as one command may spend")


def test_without_h5py_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.h5", {"w": torch.ones(2)})
    usual = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name == "h5py":
            raise ModuleNotFoundError(name)
        return usual(name, *args, **kwargs)  # type: ignore[arg-type]  # as they were given

    monkeypatch.setattr(builtins, "__import__", without)
    refused(tmp_path / "a.h5", "needs the package h5py, which is not installed (pip install 'porting[hdf5]')")


def test_an_archive_of_keras_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.keras", "w") as archive:
        archive.writestr("metadata.json", "{}")
    refused(tmp_path / "model.keras", "this is a Keras archive, not a checkpoint", "pass its model.weights.h5")


def test_damaged_files_give_errors_of_this_library_alone(tmp_path: Path) -> None:
    write(tmp_path / "good.h5", {f"layer/{number}": torch.rand(3, 4) for number in range(9)}, chunks=(2, 2))
    torn((tmp_path / "good.h5").read_bytes(), tmp_path / "tf_model.h5")
