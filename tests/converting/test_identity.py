"""What is kept of a conversion that died was made of the checkpoint that is there now, and of no other version."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import porting
from porting.checkpoint import CheckpointError, open_checkpoint
from porting.converting.conversion import convert
from porting.converting.digests import of_bytes
from porting.converting.integrity import verify_files
from porting.converting.making import Made, Maker
from porting.notation.table import parse_table
from porting.plan.recipe import Recipe
from tests.guards.tree import ROOT
from tests.small_checkpoint import write_checkpoint

TABLE = """
[mapping]
name = "t"
[tensors]
"a.{i} [k o]" = "b.{i} [o k]"
"c.{i}" = "d.{i}"
"e.{p:q,k,v}.{i} [h d]" = "f.{i} [(p h) d]"
"""

DYING = """
import os, signal, sys
from porting.converting.conversion import convert
from porting.converting.making import Maker
from porting.notation.table import parse_table
real, made = Maker.make, [0]
def make(self, recipe, target, at):
    if made[0] == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
    made[0] += 1
    return real(self, recipe, target, at)
Maker.make = make
convert(sys.argv[1], sys.argv[2], parse_table(sys.argv[3]), threads=1, memory=1 << 20)
"""
"""A conversion in a process of its own, which is killed before it makes its n-th tensor."""


def write_version(folder: Path, seed: int, *, name: str = "model.safetensors") -> Path:
    """A version of the checkpoint: all have the same names, sizes and times."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    names = [f"{kind}.{i}" for kind in ("a", "c", "e.q", "e.k", "e.v") for i in range(4)]
    tensors = {name: torch.randn(30, 40, generator=generator) for name in names}
    save_file(tensors, folder / name)
    (folder / "config.json").write_text("{}")
    for path in folder.iterdir():
        os.utime(path, ns=(10**18, 10**18))
    return folder


def killed(source: Path, destination: Path, count: int = 7) -> None:
    words = [sys.executable, "-c", DYING, str(source), str(destination), TABLE, str(count)]
    done = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (destination.parent / f".{destination.name}.porting-convert").is_dir()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def run(source: Path, destination: Path, *, table: str = TABLE, where: str = "table") -> int:
    return convert(source, destination, parse_table(table, where=where), threads=1, memory=1 << 20).resumed


def is_like_a_fresh_one(source: Path, destination: Path) -> None:
    """What was made by going on is what would be made anew, and its record says so."""
    fresh = destination.with_name("fresh")
    run(source, fresh)
    assert contents(destination) == contents(fresh)
    assert verify_files(destination).problems == ()


def lead_elsewhere(source: Path, other: Path) -> None:
    source.unlink()
    source.symlink_to(other)


def rename_folder(source: Path, other: Path) -> None:
    source.unlink()
    other.rename(source)


def rename_file(source: Path, other: Path) -> None:
    (other / "model.safetensors").rename(source / "model.safetensors")


def overwrite(source: Path, other: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes((other / "model.safetensors").read_bytes())
    os.utime(path, ns=(10**18, 10**18))


def copy_over(source: Path, other: Path) -> None:
    shutil.copy2(other / "model.safetensors", source / "model.safetensors")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("replace", "count"),
    [(lead_elsewhere, 7), (rename_folder, 1), (rename_file, 11), (overwrite, 7), (copy_over, 10)],
)
def test_another_version_of_the_same_size_and_time_is_not_mixed_in(
    replace: Callable[[Path, Path], None], count: int, tmp_path: Path
) -> None:
    first, other, source = write_version(tmp_path / "1", 1), write_version(tmp_path / "2", 2), tmp_path / "source"
    source.symlink_to(first)
    killed(source, tmp_path / "out", count)
    replace(source, other)
    assert run(source, tmp_path / "out") == 0
    is_like_a_fresh_one(source, tmp_path / "out")


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [4, 11])
def test_digests_decide_where_the_identity_is_the_same(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a clock is set back, or on a file system that has neither inodes nor times of its own."""
    from porting.checkpoint.files import LocalFile

    source, other = write_version(tmp_path / "1", 1), write_version(tmp_path / "2", 2)
    identity = open_checkpoint(source).file("model.safetensors").identity
    killed(source, tmp_path / "out", count)
    overwrite(source, other)
    monkeypatch.setattr(LocalFile, "identity", identity)
    assert run(source, tmp_path / "out") == 0
    monkeypatch.undo()
    is_like_a_fresh_one(source, tmp_path / "out")


@pytest.mark.slow
def test_one_tensor_that_changed_takes_those_that_were_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And these only, also when the second attempt is killed as well, and the first version comes back for a third."""
    from porting.checkpoint.files import LocalFile

    source, path = write_version(tmp_path / "1", 1), tmp_path / "1" / "model.safetensors"
    raw = path.read_bytes()
    changed = raw[:-1] + bytes([raw[-1] ^ 1])  # of the last tensor: whichever that is
    identity = open_checkpoint(source).file("model.safetensors").identity
    killed(source, tmp_path / "out", 11)
    monkeypatch.setattr(LocalFile, "identity", identity)
    for version in (changed, raw, changed):
        path.write_bytes(version)
        os.utime(path, ns=(10**18, 10**18))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("porting.converting.writing._write_small", interrupt)
            with pytest.raises(KeyboardInterrupt):
                run(source, tmp_path / "out")
    assert run(source, tmp_path / "out") == (12 + 4 * 2 - 3) * 30 * 40 * 4, "all but one that three were put into"
    monkeypatch.undo()
    is_like_a_fresh_one(source, tmp_path / "out")


def interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_a_config_with_a_value_that_is_not_equal_to_itself_has_not_changed(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "init": [float("nan")], "far": float("inf")}))
    convert(source, tmp_path / "out", "bert_into_fused")
    assert (tmp_path / "out" / "config.json").read_text().count("NaN") == 1


def test_an_untouched_source_is_gone_on_from(tmp_path: Path) -> None:
    """All that was finished is kept: what was not read in order was read for its digest at once.

    Also where the same table lies in another file now.
    """
    source = write_version(tmp_path / "1", 1)
    killed(source, tmp_path / "out", 10)
    assert run(source, tmp_path / "out", where="moved.toml") == 8 * 30 * 40 * 4 + 2 * 3 * 30 * 40 * 4
    is_like_a_fresh_one(source, tmp_path / "out")


@pytest.mark.parametrize("how", ["overwritten", "touched"])
def test_a_write_whose_time_is_set_back_is_seen(how: str, tmp_path: Path) -> None:
    source, other = write_version(tmp_path / "1", 1), write_version(tmp_path / "2", 2)
    checkpoint = open_checkpoint(source)
    if how == "overwritten":
        overwrite(source, other)
    else:
        os.utime(source / "model.safetensors", ns=(10**18, 10**18 + 1))
    with pytest.raises(CheckpointError, match="but it was written to since"):
        checkpoint.read("a.0")


@pytest.mark.parametrize("how", ["deleted", "replaced", "linked"])
def test_a_file_that_loses_its_name_stays_readable(how: str, tmp_path: Path) -> None:
    source, other = write_version(tmp_path / "1", 1), write_version(tmp_path / "2", 2)
    checkpoint, path = open_checkpoint(source), source / "model.safetensors"
    if how == "deleted":
        path.unlink()
    elif how == "replaced":
        (other / "model.safetensors").rename(path)
    else:
        os.link(path, source / "again")
    assert checkpoint.read("a.0").shape == (30, 40)


def put_in_place(path: Path, raw: bytes) -> None:
    path.with_name("new").write_bytes(raw)
    os.utime(path.with_name("new"), ns=(10**18, 10**18))
    path.with_name("new").rename(path)


def written_over(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    os.utime(path, ns=(10**18, 10**18))


@pytest.mark.parametrize("replace", [put_in_place, written_over])
@pytest.mark.parametrize("name", ["vocab.txt", "README.md"])
@pytest.mark.parametrize("count", [0, 5])
def test_what_stands_beside_the_weights_is_of_the_same_version(
    count: int, name: str, replace: Callable[[Path, bytes], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory into which another version is written file by file, while its weights are converted."""
    source, made = write_version(tmp_path / "source", 1), list[str]()
    written_over(source / name, b"first")

    real = Maker.make

    def make(self: Maker, recipe: Recipe, target: int, at: int) -> Made:
        if len(made) == count:
            replace(source / name, b"other")
        made.append(recipe.name)
        return real(self, recipe, target, at)

    monkeypatch.setattr(Maker, "make", make)
    with pytest.raises(CheckpointError, match=f"{name}: the file changed after it was opened"):
        run(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


def test_weights_that_were_replaced_before_the_files_beside_them_were_opened_are_noticed(tmp_path: Path) -> None:
    source, other = write_version(tmp_path / "1", 1), write_version(tmp_path / "2", 2)
    (source / "vocab.txt").write_bytes(b"other")
    checkpoint = open_checkpoint(source)
    rename_file(source, other)
    with pytest.raises(CheckpointError, match=r"model.safetensors: the file changed after it was opened"):
        convert(checkpoint, tmp_path / "out", parse_table(TABLE))
    (source / "vocab.txt").unlink()
    assert convert(checkpoint, tmp_path / "out", parse_table(TABLE)).tensors == 12, "alone it is one version"


def hash_(source: Path, folder: Path) -> str:
    return str(porting.digest(source, threads=1))


def convert_(source: Path, folder: Path) -> str:
    run(source, folder / "out")
    return of_bytes((folder / "out" / "model.safetensors").read_bytes())


def export_(source: Path, folder: Path) -> str:
    """The module holds copies of half of the tensors, and views of the others."""
    checkpoint = open_checkpoint(source)
    tensors = {name: checkpoint.read(name, own=number % 2 == 0) for number, name in enumerate(checkpoint.tensors)}
    moment(tensors)
    checkpoint.require_unchanged(tensors.values())
    return str({name: tensor.sum() for name, tensor in tensors.items()})


def moment(tensors: object) -> None:
    """Between what loads and what exports; replaced by the test."""


LINKS: dict[str, Callable[[Path], object]] = {
    "gains a link": lambda path: os.link(path, path.with_name("again")),
    "loses a link": lambda path: path.parents[1].joinpath("other").unlink(),
    "loses a name": lambda path: path.unlink(),
}


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize(("command", "number"), [(hash_, 9), (convert_, 9), (export_, 0)])
def test_a_write_that_is_hidden_by_a_change_of_links_is_seen(
    command: Callable[[Path, Path], str],
    number: int,
    written: bool,
    links: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And links alone, as `cp -l` makes them while a command reads, change nothing."""
    source, other = write_version(tmp_path / "1", 1), write_version(tmp_path / "2", 2)
    path = source / "model.safetensors"
    os.link(path, tmp_path / "other")
    expected = command(source, tmp_path)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    real, calls = os.preadv, [0]

    def change(*arguments: object) -> None:
        if written:
            overwrite(source, other)
        LINKS[links](path)
        os.utime(tmp_path / "other" if links == "loses a name" else path, ns=(10**18, 10**18))

    def preadv(*arguments: Any) -> int:
        calls[0] += 1
        if calls[0] == number:
            change()
        return real(*arguments)

    monkeypatch.setattr(
        "porting.checkpoint.files.os.preadv" if number else f"{__name__}.moment", preadv if number else change
    )
    if written or not number:  # what was read of a mapped view is not known
        with pytest.raises(CheckpointError, match="written to"):
            command(source, tmp_path)
    else:
        assert command(source, tmp_path) == expected
