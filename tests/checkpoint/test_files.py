from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import porting
from porting.checkpoint import CheckpointError, open_checkpoint
from tests.checkpoint.hostile import refused

INDEX = "model.safetensors.index.json"


def test_fifo_or_directory_in_place_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    """In a process of its own: one that hangs must not take the others with it."""
    expected: list[str] = []
    for kind, make in (("a named pipe (FIFO)", os.mkfifo), ("a directory", os.mkdir)):
        for name in ("model.safetensors", "pytorch_model.bin", INDEX, "config.json"):
            root = tmp_path / str(len(expected))
            root.mkdir()
            if name == "config.json":
                save_file({"a": torch.zeros(1)}, root / "model.safetensors")
            make(root / name)
            expected.append(f"{root / name}: found {kind} where a file of weights or settings should be")
    code = (
        "import sys; from porting.checkpoint import CheckpointError, open_checkpoint\n"
        "for path in sys.argv[1:]:\n"
        "    try: open_checkpoint(path)\n"
        "    except CheckpointError as error: print(error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *(str(tmp_path / str(number)) for number in range(len(expected)))],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    lines = result.stdout.splitlines()
    assert [line.partition(" (put")[0] for line in lines] == expected


def test_devices_are_refused() -> None:
    refused("/dev/zero", "found a character device")
    refused("/dev/null", "found a character device")


def test_link_that_leaves_the_directory_is_refused_unless_asked_for(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    outside, root = tmp_path / "outside", tmp_path / "model"
    outside.mkdir()
    root.mkdir()
    save_file(weights, outside / "w.safetensors")
    (root / "model.safetensors").symlink_to(outside / "w.safetensors")
    refused(root, f"a link to '{outside / 'w.safetensors'}', outside the checkpoint", "follow_links=True")
    assert "a" in open_checkpoint(root, follow_links=True).tensors
    assert "a" in open_checkpoint(root / "model.safetensors").tensors, "the file itself was named"


def test_directory_may_itself_be_a_link(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save_file(weights, tmp_path / "real" / "model.safetensors")
    assert "a" in open_checkpoint(tmp_path / "link").tensors


def test_links_within_the_directory_and_into_the_hub_cache_are_followed(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    root = tmp_path / "models--org--name" / "snapshots" / "0123"
    blobs = tmp_path / "models--org--name" / "blobs"
    root.mkdir(parents=True)
    blobs.mkdir()
    save_file(weights, blobs / "feed")
    (root / "model.safetensors").symlink_to("../../blobs/feed")
    (root / "inner.safetensors").symlink_to("model.safetensors")
    assert "a" in open_checkpoint(root).tensors
    assert "a" in open_checkpoint(root / "inner.safetensors").tensors
    (root / "config.json").symlink_to("/etc/hostname")
    refused(root, "outside the checkpoint")


def test_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("gone")
    refused(tmp_path, "a link to 'gone', which does not exist (mend the link or copy the file)")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor]) -> None:
    """As anyone but root would find it."""
    save_file(weights, tmp_path / "model.safetensors")

    def denied(path: object, *arguments: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "open", denied)
    refused(tmp_path, "cannot be opened: Permission denied", "chmod u+r")


def test_read_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)

    def broken(*arguments: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError, match=r"model.safetensors: reading failed: Input/output error"):
        checkpoint.read("a", own=True)


# ------------------------------------------------------------------------------ files that are replaced, one by one

SHARDS = 4


def two_saves(folder: Path) -> tuple[Path, Path]:
    """A checkpoint of several shards, and another save of the same names and shapes, to be renamed over it."""
    torch.manual_seed(0)
    for name in ("m", "other"):
        (folder / name).mkdir()
        index = {}
        for number in range(SHARDS):
            file = f"s{number}.safetensors"
            save_file({f"layer.{number}": torch.randn(8, 8)}, folder / name / file)
            index[f"layer.{number}"] = file
        (folder / name / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
        (folder / name / "config.json").write_text("{}")
    return folder / "m", folder / "other"


def replaced_when(
    monkeypatch: pytest.MonkeyPatch, opens: str, folder: Path, other: Path, names: Sequence[str]
) -> Callable[[], bool]:
    """When a file is opened, others are renamed over the checkpoint's: what another process may do at any moment."""
    real = os.open
    done: list[str] = []

    def opened(path: Any, *args: Any, **kwargs: Any) -> int:  # Any: as os.open takes them
        descriptor = real(path, *args, **kwargs)
        if Path(os.fsdecode(path)).name == opens and not done:
            done.extend(names)
            for name in names:
                os.replace(other / name, folder / name)
        return descriptor

    monkeypatch.setattr(os, "open", opened)
    return lambda: bool(done)


@pytest.mark.parametrize("opens", [INDEX, "s0.safetensors", "s2.safetensors", "s3.safetensors", "config.json"])
@pytest.mark.parametrize("names", [["s0.safetensors"], ["s1.safetensors", "s3.safetensors"], [INDEX, "s2.safetensors"]])
def test_files_that_are_replaced_while_they_are_opened_make_no_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opens: str, names: list[str]
) -> None:
    """Either all were opened before, or after, or it is refused; whichever file was just opened."""
    folder, other = two_saves(tmp_path)
    kept = {
        root.name: {
            f"layer.{number}": load_file(root / f"s{number}.safetensors")[f"layer.{number}"] for number in range(SHARDS)
        }
        for root in (folder, other)
    }
    happened = replaced_when(monkeypatch, opens, folder, other, names)
    order = [INDEX, *(f"s{number}.safetensors" for number in range(SHARDS)), "config.json"]
    late = [name for name in names if order.index(name) <= order.index(opens)]
    if late:
        with pytest.raises(CheckpointError, match="another file stands there now") as caught:
            open_checkpoint(folder)
        assert {Path(fault.where).name for fault in caught.value.faults} == set(late)
    else:  # a state that the directory had: all that was replaced is opened after that
        checkpoint = open_checkpoint(folder)
        new = {f"layer.{name[1]}" for name in names}
        for name in checkpoint.tensors:
            assert torch.equal(checkpoint.read(name), kept["other" if name in new else "m"][name])
    assert happened()


@pytest.mark.parametrize("how", ["hash", "diff", "load", "convert"])
def test_files_that_are_replaced_while_they_are_read_are_noticed_in_the_end(tmp_path: Path, how: str) -> None:
    folder, other = two_saves(tmp_path)
    checkpoint = open_checkpoint(folder)
    (tmp_path / "t.toml").write_text('[mapping]\nname = "t"\n[tensors]\n"layer.{i}" = "l.{i}"\n')
    os.replace(other / "s3.safetensors", folder / "s3.safetensors")
    work: dict[str, Callable[[], object]] = {
        "hash": lambda: porting.digest(checkpoint),
        "diff": lambda: porting.diff(checkpoint, other),
        "load": lambda: porting.load(checkpoint, Four, tmp_path / "t.toml"),
        "convert": lambda: porting.convert(checkpoint, tmp_path / "out", tmp_path / "t.toml", derive=True),
    }
    if how == "diff":
        save_file({"layer.3": torch.zeros(8, 8)}, other / "s3.safetensors")
    with pytest.raises(CheckpointError, match=r"s3.safetensors: the file changed .* another file stands there now"):
        work[how]()
    assert not (tmp_path / "out").exists()


def test_a_directory_that_is_removed_or_exchanged_as_a_whole_is_read_to_its_end(tmp_path: Path) -> None:
    folder, other = two_saves(tmp_path)
    before = str(porting.digest(folder))
    checkpoint = open_checkpoint(folder)
    folder.rename(tmp_path / "old")
    other.rename(folder)
    assert str(porting.digest(checkpoint)) == before
    shutil.rmtree(tmp_path / "old")
    assert str(porting.digest(checkpoint)) == before
    assert str(porting.digest(folder)) != before


class Four(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = torch.nn.ParameterList(torch.zeros(8, 8) for _ in range(SHARDS))
