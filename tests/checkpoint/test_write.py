from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from porting import atomic
from porting.checkpoint import (
    CheckpointError,
    TensorFile,
    files_like,
    open_checkpoint,
    write_directory,
    write_safetensors,
)
from porting.opening import Folder
from tests.checkpoint.hostile import entry, index, st_file


def refused(message: str, *arguments: object, directory: bool = False, **options: object) -> None:
    """Writing fails with this message, in one line."""
    write = write_directory if directory else write_safetensors
    with pytest.raises(CheckpointError) as caught:
        write(*arguments, **options)  # type: ignore[arg-type]  # one helper for two functions
    assert message in str(caught.value)
    assert str(caught.value).count("\n") == 0


# ---------------------------------------------------------------------------------------------------------- what it is


def test_same_tensors_give_the_same_bytes_whatever_the_metadata_order(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    contents = set()
    for number, keys in enumerate((("x", "y", "z"), ("z", "x", "y"), ("y", "z", "x"))):
        path = tmp_path / f"{number}.safetensors"
        write_safetensors(path, weights, metadata={key: key * 3 for key in keys})
        contents.add(path.read_bytes())
    (content,) = contents
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    assert content[8:].startswith(b'{"__metadata__":{"x":"xxx","y":"yyy","z":"zzz"},"b":{"dtype":"BF16","shape":[5],')


def test_names_keep_their_order_and_every_tensor_is_aligned(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    mixed = {"mask": torch.tensor([True]), **weights, "double": torch.randn(1).double()}
    write_safetensors(tmp_path / "w.safetensors", mixed)
    checkpoint = open_checkpoint(tmp_path / "w.safetensors")
    assert list(checkpoint.tensors) == list(mixed)
    for name, tensor in mixed.items():
        assert checkpoint.read(name).data_ptr() % tensor.itemsize == 0
        mapped = checkpoint.read(name).untyped_storage()
        assert not mapped.resizable(), "a view of the mapping, not a copy made because of misalignment"


def test_tensors_that_are_not_laid_out_in_a_row(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    tensors = {
        "transposed": base.T,
        "slice": base[1::2, 1:3],
        "expanded": torch.randn(1, 4).expand(3, 4),
        "grad": torch.nn.Parameter(base[0]),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(3.0),
        "nothing": torch.zeros(0, 2),
        "tied": base,
        "tied.again": base,
    }
    write_safetensors(tmp_path / "w.safetensors", tensors)
    for name, tensor in load_file(tmp_path / "w.safetensors").items():
        assert torch.equal(tensor, tensors[name].detach())


def test_untouched_file_is_written_again_byte_for_byte(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Also a file that we would never write: unsorted, with spaces, misaligned, offsets out of order."""
    odd = b'{ "b": {"shape": [2] ,"dtype":"F32","data_offsets":[1,9]},'
    odd += b'\n"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},'
    odd += b'"__metadata__":{"z":"\\u00e9","a":"1"} }   '
    (tmp_path / "odd.safetensors").write_bytes(st_file(odd, b"x12345678"))
    save_file(weights, tmp_path / "usual.safetensors", {"format": "pt", "other": "x"})
    for name in ("odd", "usual"):
        source = tmp_path / f"{name}.safetensors"
        checkpoint = open_checkpoint(source)
        tensors = {key: checkpoint.read(key) for key in reversed(list(checkpoint.tensors))}
        write_safetensors(tmp_path / "again.safetensors", tensors, header=checkpoint.files[0].header, overwrite=True)
        assert (tmp_path / "again.safetensors").read_bytes() == source.read_bytes()


def test_untouched_sharded_checkpoint_is_written_again_byte_for_byte(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file({"a": weights["a"]}, source / "m-1.safetensors", {"format": "pt"})
    save_file({"b": weights["b"], "c": weights["c"]}, source / "m-2.safetensors")
    weight_map = {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-2.safetensors"}
    (source / "model.safetensors.index.json").write_bytes(b" " + index(weight_map, 60))
    checkpoint = open_checkpoint(source)
    files = files_like(checkpoint, {name: checkpoint.read(name) for name in checkpoint.tensors})
    write_directory(tmp_path / "copy", files, sources=[source])
    assert sorted(os.listdir(tmp_path / "copy")) == sorted(os.listdir(source))
    for path in source.iterdir():
        assert (tmp_path / "copy" / path.name).read_bytes() == path.read_bytes()


def test_other_names_or_a_bin_file_become_one_new_file(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    less = {"a": weights["a"]}
    assert files_like(checkpoint, less) == {"model.safetensors": TensorFile(tensors=less, metadata={"format": "pt"})}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    assert list(files_like(open_checkpoint(tmp_path / "pytorch_model.bin"), weights)) == ["model.safetensors"]


def test_mode_comes_from_the_umask(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    before = os.umask(0o027)
    try:
        write_safetensors(tmp_path / "w.safetensors", weights)
        write_directory(tmp_path / "d", {"config.json": b"{}"})
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("w.safetensors", "d", "d/config.json")]
    assert modes == [0o640, 0o750, 0o640]


# ------------------------------------------------------------------------------------------------- what cannot be done


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, dtype=torch.complex128), "the format has no name for its dtype torch.complex128"),
        (torch.zeros(2, device="meta"), "it is on the meta device and has no values"),
    ],
)
def test_tensor_that_cannot_be_stored(tmp_path: Path, tensor: torch.Tensor, message: str) -> None:
    refused(f"tensor 'x': {message}", tmp_path / "w.safetensors", {"x": tensor})
    assert os.listdir(tmp_path) == []


def test_sparse_tensor_cannot_be_stored(tmp_path: Path) -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (2,), check_invariants=True)
    refused("its layout is torch.sparse_coo", tmp_path / "w.safetensors", {"x": sparse})


def test_names_and_metadata_that_could_not_be_read_again(tmp_path: Path) -> None:
    tensor = torch.zeros(1)
    refused("control character U+000A", tmp_path / "w", {"a\nb": tensor})
    refused("control character U+D800", tmp_path / "w", {"\ud800": tensor})
    refused("the empty string for a name", tmp_path / "w", {"": tensor})
    refused("__metadata__ 'n' is a JSON number", tmp_path / "w", {"a": tensor}, metadata={"n": 1})
    assert os.listdir(tmp_path) == []


def test_header_that_does_not_fit(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, tmp_path / "model.safetensors")
    header = open_checkpoint(tmp_path).files[0].header
    new = tmp_path / "new.safetensors"
    refused(
        "tensor 'd': it is given, and the header does not list it", new, weights | {"d": weights["a"]}, header=header
    )
    refused(
        "tensor 'a': the header lists it, and it is not given",
        new,
        {name: weights[name] for name in "bc"},
        header=header,
    )
    refused(
        "the header says (3, 4) of torch.float32, and it is (4, 3)", new, weights | {"a": weights["a"].T}, header=header
    )
    refused("and it is (3, 4) of torch.float64", new, weights | {"a": weights["a"].double()}, header=header)
    refused("the metadata is not the header's", new, weights, header=header, metadata={"format": "tf"})
    refused("the header cannot be read", new, weights, header=b"{")
    holes = st_file({"a": entry([1], 1, 2)})[8:]
    refused(
        "bytes before the first tensor belong to no tensor", new, {"a": torch.zeros(1).to(torch.uint8)}, header=holes
    )
    assert not new.exists()


# --------------------------------------------------------------------------------------------------------- destinations


def test_destinations_that_are_refused(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    source = tmp_path / "source"
    write_directory(source, {"model.safetensors": TensorFile(tensors=weights), "config.json": b"{}"})
    before = snapshot(tmp_path)
    files = {"config.json": b"[]"}
    (tmp_path / "link").symlink_to("source")
    refused("exists already (choose another", source, files, directory=True)
    refused("is or lies inside the source", source, files, directory=True, sources=[source], overwrite=True)
    refused("is or lies inside the source", source / "new", files, directory=True, sources=[source])
    refused("is or lies inside the source", tmp_path / "link" / "new", files, directory=True, sources=[source])
    refused("is or lies inside the source", source, files, directory=True, sources=[tmp_path / "link"], overwrite=True)
    refused("holds the source", tmp_path, files, directory=True, sources=[source], overwrite=True)
    refused("is a link to 'source'", tmp_path / "link", files, directory=True, overwrite=True)
    refused("run `mkdir -p", tmp_path / "no" / "such", files, directory=True)
    refused("is a file", source / "config.json", files, directory=True, overwrite=True)
    refused("is not a plain file name", tmp_path / "new", {"../x": b""}, directory=True)
    refused("exists already", source / "config.json", weights)
    refused("is a directory", source, weights, overwrite=True)
    os.mkfifo(tmp_path / "pipe")
    refused("is a device, a pipe or a socket", tmp_path / "pipe", weights, overwrite=True)
    refused("is a device, a pipe or a socket", tmp_path / "pipe", files, directory=True, overwrite=True)
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").unlink()
    assert snapshot(tmp_path) == before


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_only_a_checkpoint_is_ever_replaced(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "photos").mkdir(parents=True)
    (home / "config.json").write_text("{}")
    refused("holds the folder 'photos', which would be lost", home, {}, directory=True, overwrite=True)
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "diary.txt").write_text("…")
    refused("holds files and no checkpoint", notes, {}, directory=True, overwrite=True)


@pytest.mark.parametrize("exchange", [True, False], ids=["exchanged", "renamed"])
def test_overwriting_replaces_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(atomic, "_exchanged", lambda *arguments: False)
    write_directory(tmp_path / "d", {"config.json": b"{}", "vocab.txt": b"old"})
    write_directory(tmp_path / "d", {"config.json": b"[]"}, overwrite=True)
    assert snapshot(tmp_path) == {"d/config.json": b"[]"}
    assert os.listdir(tmp_path) == ["d"]


def test_what_appears_meanwhile_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor]
) -> None:
    """Between the first look at the destination and the last step; nothing of it is lost, nor is it replaced."""
    real = os.fsync

    def appear(descriptor: int) -> None:
        real(descriptor)
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d" / "theirs").write_bytes(b"unharmed")
        (tmp_path / "f").write_bytes(b"unharmed too")

    monkeypatch.setattr(os, "fsync", appear)
    message = "the destination appeared while this was being written (it was left as it is: "
    refused(message, tmp_path / "d", {"config.json": b"{}"}, directory=True)
    refused("exists already", tmp_path / "f", weights)
    (tmp_path / "f").unlink()
    refused(message, tmp_path / "f", weights)
    assert snapshot(tmp_path) == {"d/theirs": b"unharmed", "f": b"unharmed too"}
    assert sorted(os.listdir(tmp_path)) == ["d", "f"]


def test_where_a_file_has_one_name_only_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor]
) -> None:
    def link(*arguments: object, **options: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    write_safetensors(tmp_path / "f", weights)
    assert os.listdir(tmp_path) == ["f"]


def test_files_are_copied(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(b"x" * 1_000_000)
    write_directory(tmp_path / "d", {"vocab.txt": tmp_path / "vocab.txt"})
    assert (tmp_path / "d" / "vocab.txt").read_bytes() == b"x" * 1_000_000


@pytest.mark.parametrize("failing", ["write", "fsync", "posix_fallocate", "rename"])
@pytest.mark.parametrize("existing", [True, False])
def test_failure_at_any_step_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor], failing: str, existing: bool
) -> None:
    if existing:
        write_directory(tmp_path / "d", {"config.json": b"old"})
        write_safetensors(tmp_path / "f", {"old": torch.zeros(1)})
    before = snapshot(tmp_path)

    def full(*arguments: object, **options: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, failing, full)
    files = {"config.json": b"new", "model.safetensors": TensorFile(tensors=weights)}
    message = "writing failed, and nothing was left behind: No space left on device"
    refused(message, tmp_path / "d", files, directory=True, overwrite=True)
    refused(message, tmp_path / "f", weights, overwrite=True)
    assert snapshot(tmp_path) == before
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_disk_without_room_fails_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor]
) -> None:
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("porting.atomic.shutil.disk_usage", lambda path: usage)
    monkeypatch.setattr(atomic, "_locked_sibling", None)
    files = {"model.safetensors": TensorFile(tensors=weights)}
    refused("bytes are needed and 10 are free (free some space", tmp_path / "d", files, directory=True)


def test_read_only_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*arguments: object, **options: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "mkdir", read_only)
    refused("Read-only file system (choose a destination that can be written to)", tmp_path / "d", {}, directory=True)


# ------------------------------------------------------------------------------------------------------ dying processes


@pytest.mark.parametrize(
    ("patched", "call"),
    [("atomic.sync", "write_directory(sys.argv[1], {'config.json': b'{}'})"),
     ("os.fsync", "write_safetensors(sys.argv[1], {'a': torch.zeros(1)})")],
    ids=["directory", "file"],
)  # fmt: skip
def test_killed_writer_leaves_nothing_half_made_and_the_next_sweeps_up(tmp_path: Path, patched: str, call: str) -> None:
    code = (
        "import os, sys, time, torch\nfrom porting import atomic\n"
        "from porting.checkpoint import write_directory, write_safetensors\n"
        "def hang(path): print('here', flush=True); time.sleep(100)\n"
        f"{patched} = hang\n{call}"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "d")], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"here\n"
    (alive,) = os.listdir(tmp_path)
    assert alive.startswith(".d.porting-")
    atomic.sweep(Folder(tmp_path), "d")
    assert os.listdir(tmp_path) == [alive], "its maker is alive"
    process.send_signal(signal.SIGKILL)
    process.wait()
    write_directory(tmp_path / "d", {"config.json": b"{}"})
    assert os.listdir(tmp_path) == ["d"]


def test_sibling_of_a_writer_in_this_process_is_respected(tmp_path: Path) -> None:
    sibling = tmp_path / ".d.porting-00000000"
    sibling.mkdir()
    handle = os.open(sibling, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    write_directory(tmp_path / "d", {"config.json": b"{}"})
    assert sibling.exists()
    os.close(handle)
    write_directory(tmp_path / "d", {"config.json": b"{}"}, overwrite=True)
    assert not sibling.exists()


def test_clock_going_backwards_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor]
) -> None:
    write_safetensors(tmp_path / "a", weights)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    write_safetensors(tmp_path / "b", weights)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
