from __future__ import annotations

import filecmp
import json
import stat
from pathlib import Path

import pytest

import porting
from porting.checkpoint import CheckpointError
from tests import own


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return own.write(tmp_path / "source")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return own.table(tmp_path)


@pytest.fixture
def module(source: Path, table: Path) -> own.Own:
    return own.filled(source, table)


def test_a_header_that_no_library_would_write_is_kept(source: Path, table: Path, tmp_path: Path) -> None:
    """Another order of names than of data, spaces, metadata of its own."""
    path = source / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    del header["__metadata__"]
    names = sorted(header, key=lambda name: name[::-1])
    odd = {**{name: header[name] for name in names}, "__metadata__": {"z": "last", "format": "pt", "a": "first"}}
    text = json.dumps(odd, separators=(" , ", " : ")).encode()
    text += b" " * (-len(text) % 8 + 16)
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    result = porting.export(own.filled(source, table), None, tmp_path / "again")
    own.assert_same_files(source, tmp_path / "again")
    assert result.tensors == tuple(names)


def test_small_files_are_copied_and_weights_are_not(module: own.Own, source: Path, tmp_path: Path) -> None:
    (source / "README.md").write_text("# Own")
    (source / "tf_model.h5").write_bytes(b"old weights")
    (source / "optimizer.pt").write_bytes(b"old state")
    (source / ".hidden").write_text("")
    (source / "1_Pooling").mkdir()
    result = porting.export(module, None, tmp_path / "again")
    assert result.files == ("README.md", "config.json", "model.safetensors", "vocab.txt")
    assert result.not_copied == ("1_Pooling", "optimizer.pt", "tf_model.h5")


def test_beside_a_single_file_only_what_belongs_to_it_is_copied(source: Path, table: Path, tmp_path: Path) -> None:
    (source / "diary.txt").write_text("dear diary")
    (source / "model.safetensors").rename(source / "epoch-3.safetensors")
    module = porting.load(source / "epoch-3.safetensors", own.Own(own.SIZES), table)
    result = porting.export(module, None, tmp_path / "again")
    assert result.files == ("config.json", "model.safetensors", "vocab.txt")
    names = (source / "epoch-3.safetensors", tmp_path / "again" / "model.safetensors")
    assert filecmp.cmp(*names, shallow=False)


def test_a_link_that_leaves_the_checkpoint_is_not_followed(module: own.Own, source: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (source / "notes.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(CheckpointError, match=r"\[link-leaves-checkpoint\]"):
        porting.export(module, None, tmp_path / "again")


def test_files_can_be_read_by_whom_the_umask_lets(module: own.Own, tmp_path: Path) -> None:
    porting.export(module, None, tmp_path / "again")
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "again").iterdir()} == {0o644}


@pytest.mark.parametrize("name", ["out.npz", "out.safetensors", "out.pt", "out.gguf", "out.ckpt", "out.msgpack"])
def test_a_directory_is_not_made_with_the_name_of_a_file(
    source: Path, table: Path, module: own.Own, tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    for write in (
        lambda: porting.export(module, None, path),
        lambda: porting.convert(source, path, table, into=own.Own),
    ):
        with pytest.raises(CheckpointError, match=r"would be a directory with the name of a \.\w+ file") as caught:
            write()
        assert ("to='npz'" in str(caught.value)) == (name == "out.npz")
        assert str(tmp_path / "out") in str(caught.value)
        assert not path.exists()


def test_a_directory_that_has_such_a_name_already_may_be_replaced(module: own.Own, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    path.mkdir()
    porting.export(module, None, path, overwrite=True)
    assert (path / "model.safetensors").is_file()
