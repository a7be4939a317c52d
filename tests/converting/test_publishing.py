"""Nothing wrong is ever published: faults at every call of the system, deaths, two at once, what was there before."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from porting.atomic import explained
from porting.checkpoint import CheckpointError, open_checkpoint
from porting.converting.conversion import Converted, convert, prepare
from porting.converting.making import Made, Maker
from porting.converting.progress import Progress
from porting.converting.workplace import root_of, workplace
from porting.errors import PortingError
from porting.notation.table import Table, parse_table
from porting.plan.recipe import Recipe
from tests.converting.drawing import write
from tests.guards.tree import ROOT

TABLE = parse_table(
    '[mapping]\nname = "t"\n[tensors]\n"a.{i} [k o]" = "b.{i} [o k]"\n"c.{i}" = "d.{i}"\n"e.{i}" = "f.{i}"\n'
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {f"{kind}.{i}": torch.randn(30, 40) for kind in "ace" for i in range(3)}
    folder = write(tmp_path / "source", tensors)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def run(
    source: Path,
    destination: str = "out",
    table: Table = TABLE,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    tell: Callable[[Progress], None] | None = None,
) -> Converted:
    return convert(
        source,
        source.parent / destination,
        table,
        shard_size=15_000,
        threads=1,
        memory=1 << 20,
        dtype=dtype,
        overwrite=overwrite,
        tell=tell,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ----------------------------------------------------------------------------------------------- faults of the system

WRITES = ("open", "mkdir", "ftruncate", "posix_fallocate", "pwrite", "fsync", "rename")


def failing(patch: pytest.MonkeyPatch, call: str, number: int, code: int) -> list[int]:
    """Make the n-th use of a call of the system fail; the list counts all of them."""
    real: Callable[..., object] = getattr(os, call)
    count = [0]

    def fail(*arguments: object, **options: object) -> object:
        if call == "open" and not int(str(arguments[1])) & os.O_CREAT:
            return real(*arguments, **options)
        count[0] += 1
        if count[0] == number:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    patch.setattr(os, call, fail)
    return count


@pytest.mark.parametrize("call", WRITES)
def test_a_full_disk_at_any_moment_leaves_nothing(call: str, source: Path) -> None:
    before = contents(source)
    done = run(source, "expected")
    expected = contents(done.path)
    shutil.rmtree(done.path)
    for number in range(1, 1000):
        with pytest.MonkeyPatch.context() as patch:
            count = failing(patch, call, number, errno.ENOSPC)
            try:
                run(source)
            except CheckpointError as error:
                (fault,) = error.faults
                assert contents(source) == before
                if "it is complete, but its name may not survive a power cut" in fault.message:
                    assert call == "fsync"
                    assert contents(source.parent / "out") == expected
                    shutil.rmtree(source.parent / "out")
                    continue
                assert "writing failed, and nothing was left behind: No space left on device; " in fault.message
                assert "bytes are needed" in fault.message
                assert names(source.parent) == ["source"]
                continue
        break
    assert count[0] == number - 1, "every use of the call has failed once"
    assert number > 1, "it is used"
    assert contents(source.parent / "out") == expected


def test_too_little_room_is_seen_before_anything_is_written(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(source)._replace(free=20_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    reserved: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *arguments: reserved.append(1))
    with pytest.raises(CheckpointError, match=r"No space left on device; \d+ bytes are needed and 20000 are free"):
        run(source)
    assert reserved == []
    assert names(source.parent) == ["source"]


def test_a_read_error_is_said_and_leaves_nothing(source: Path) -> None:
    """At any reading of a weight, in the middle of a file or at its end."""
    before = contents(source)
    number = 0
    while True:
        number += 1
        with pytest.MonkeyPatch.context() as patch:
            count = failing(patch, "preadv", number, errno.EIO)
            try:
                run(source)
            except PortingError as error:
                (fault,) = error.faults
                assert fault.where == str(source / "model.safetensors")
                assert fault.message == "reading failed: Input/output error"
                assert names(source.parent) == ["source"]
                assert contents(source) == before
                continue
        break
    assert count[0] == number - 1 == 9, "every reading has failed once"


# --------------------------------------------------------------------------------------------- a source that changes


def change_during(source: Path, change: Callable[[Path], None]) -> None:
    """Convert, and change a file of the source once the first tensor is made."""
    real = Maker.make
    done = [0]

    def make(self: Maker, recipe: Recipe, target: int, at: int) -> Made:
        made = real(self, recipe, target, at)
        done[0] += 1
        if done[0] == 1:
            change(source / "model.safetensors")
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Maker, "make", make)
        run(source)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def rewrite(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("name", ["b.1", "d.1"])
def test_a_change_is_seen_with_the_tensor_that_it_may_be_in(name: str, source: Path, tmp_path: Path) -> None:
    """Whether it is carried or made in blocks."""
    checkpoint = open_checkpoint(source)
    recipes = {tensor.name: tensor for tensor in prepare(checkpoint, tmp_path / "out", TABLE).recipes.tensors}
    maker = Maker(checkpoint, None, 1 << 20, lambda count: None)
    with (tmp_path / "made").open("w+b") as file:
        before = maker.make(recipes[name], file.fileno(), 0)
        assert maker.make(recipes[name], file.fileno(), 0) == before
        touch(source / "model.safetensors")
        with pytest.raises(CheckpointError, match="bytes when it was opened"):
            maker.make(recipes[name], file.fileno(), 0)


@pytest.mark.parametrize("change", [cut, touch, rewrite])
def test_a_source_that_changes_meanwhile_is_not_converted(change: Callable[[Path], None], source: Path) -> None:
    with pytest.raises(CheckpointError, match=r"changed|ended early|had \d+ bytes when it was opened"):
        change_during(source, change)
    assert names(source.parent) == ["source"]


# -------------------------------------------------------------------------------------------------- deaths and resuming


def interrupt_after(source: Path, count: int) -> Path:
    """Convert until ``count`` tensors are made, then be interrupted; the temporary directory."""
    real = Maker.make
    done = [0]

    def make(self: Maker, recipe: Recipe, target: int, at: int) -> Made:
        if done[0] == count:
            raise KeyboardInterrupt
        done[0] += 1
        return real(self, recipe, target, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Maker, "make", make)
        with pytest.raises(KeyboardInterrupt):
            run(source)
    assert names(source.parent)[0] == ".out.porting-convert"
    return root_of(source.parent / "out")


def test_the_same_command_goes_on_where_it_stopped(source: Path) -> None:
    run(source, "expected")
    interrupt_after(source, 4)
    done = run(source)
    assert done.resumed == 4 * 30 * 40 * 4
    assert done.digests.keys() == {f"{kind}.{i}" for kind in "bdf" for i in range(3)}
    assert contents(source.parent / "out") == contents(source.parent / "expected")
    assert names(source.parent) == ["expected", "out", "source"]


def test_what_a_dead_process_wrote_is_believed_by_its_digest_only(source: Path) -> None:
    run(source, "expected")
    root = interrupt_after(source, 6)
    for path in (root / "files").glob("*.safetensors"):
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1  # of the last tensor of each shard
        path.write_bytes(raw)
    journal = root / "journals" / "0.jsonl"
    lines = journal.read_bytes()
    journal.write_bytes(lines[: -len(lines.splitlines()[-1]) // 2])  # and the last line was cut off
    done = run(source)
    assert 0 < done.resumed < 6 * 30 * 40 * 4
    assert contents(source.parent / "out") == contents(source.parent / "expected")


@pytest.mark.parametrize("what", ["dtype", "table", "source"])
def test_another_conversion_begins_anew(what: str, source: Path) -> None:
    interrupt_after(source, 6)
    table, dtype = TABLE, None
    if what == "dtype":
        dtype = torch.float64
    elif what == "table":
        table = parse_table(
            '[mapping]\nname = "t"\n[tensors]\n"a.{i} [k o]" = "b.{i} [o k]"\n"c.{i}" = "d.{i}"\n"e.{i}" = "g.{i}"\n'
        )
    else:
        tensors = load_file(source / "model.safetensors")
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, source / "model.safetensors")
    done = run(source, "out", table, dtype=dtype)
    assert done.resumed == 0
    run(source, "expected", table, dtype=dtype)
    assert contents(source.parent / "out") == contents(source.parent / "expected")


@pytest.mark.slow
def test_kill_at_random_moments() -> None:
    """A few of what ``make crash`` does by the hundred."""
    program = [sys.executable, "-m", "scripts.crash", "--kills", "10", "--seed", "1"]
    done = subprocess.run(program, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.startswith("Tally(killed=10, finished=")


# ------------------------------------------------------------------------------------------------------- two at once


def test_the_second_process_says_who_the_first_one_is(source: Path) -> None:
    out = source.parent / "out"
    with explained(out, 0) as writing, workplace(out, writing) as place:
        (place.files.path / "mine").write_text("unharmed")
        with pytest.raises(CheckpointError, match=rf"process {os.getpid()} is converting into this destination"):
            run(source)
        assert (place.files.path / "mine").read_text() == "unharmed"


@pytest.fixture
def siblings(source: Path) -> Iterator[tuple[Path, Path]]:
    """Temporary siblings of a destination: one of a dead process, one of a living one, which holds a lock."""
    dead, alive = source.parent / ".out.porting-00000000", source.parent / ".out.porting-11111111"
    for sibling in (dead, alive):
        sibling.mkdir()
        (sibling / "model.safetensors").write_bytes(b"half")
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield dead, alive
    os.close(lock)


def test_the_dead_are_swept_and_the_living_are_not(source: Path, siblings: tuple[Path, Path]) -> None:
    run(source)
    assert [sibling.exists() for sibling in siblings] == [False, True]
    assert (siblings[1] / "model.safetensors").read_bytes() == b"half"


def test_a_directory_that_appears_meanwhile_is_left_as_it_is(source: Path) -> None:
    def appear(progress: Progress) -> None:
        place = source.parent / "out"
        if progress.stage == "publishing":
            place.mkdir()
            (place / "theirs").write_text("unharmed")

    with pytest.raises(CheckpointError, match="appeared while this was being written"):
        run(source, tell=appear)
    assert names(source.parent) == ["out", "source"]
    assert contents(source.parent / "out") == {"theirs": b"unharmed"}


# --------------------------------------------------------------------------------------------------------- publishing


def test_everything_is_on_the_disk_before_the_directory_appears(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    real = os.rename

    def fsync(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(f"{source.parent.resolve()}/"))

    def rename(old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        done.append(f"rename to {new}")
        real(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    result = run(source)
    files = {f".out.porting-convert/files/{name}" for name in result.files}
    last = [".out.porting-convert/files", "rename to out", str(source.parent.resolve())]
    assert done[-3:] == last
    assert set(done[:-3]) == files
    mode = (
        (source.parent / "out").stat().st_mode & 0o777,
        (source.parent / "out" / "config.json").stat().st_mode & 0o777,
    )
    umask = os.umask(0)
    os.umask(umask)
    assert mode == (0o777 & ~umask, 0o666 & ~umask)


def test_what_stood_there_is_replaced_only_when_that_is_asked_for(source: Path) -> None:
    run(source)
    before = contents(source.parent / "out")
    with pytest.raises(CheckpointError, match="exists already"):
        run(source, dtype=torch.bfloat16)
    assert contents(source.parent / "out") == before
    run(source, dtype=torch.bfloat16, overwrite=True)
    assert load_file(next((source.parent / "out").glob("*1-of*")))["b.0"].dtype == torch.bfloat16
    assert names(source.parent) == ["out", "source"]


def test_remains_of_a_death_after_the_directory_appeared_are_swept(source: Path) -> None:
    run(source)
    root_of(source.parent / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        run(source)
    assert names(source.parent) == ["out", "source"]


@pytest.mark.parametrize("overwrite", [True, False])
def test_what_was_replaced_is_no_interrupted_conversion(
    source: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    """A process died between the exchange and its tidying up; the old directory may hold links."""
    out = source.parent / "out"
    run(source, "other")
    shutil.copytree(source, out)
    (out / "link").symlink_to("tokenizer.json")
    os.link(out / "tokenizer.json", out / "again")
    with monkeypatch.context() as dying:
        dying.setattr("porting.converting.workplace._remove", lambda *_: None)
        run(source, overwrite=True)
    assert root_of(out).exists()
    if overwrite:
        run(source, overwrite=True)
    else:
        with pytest.raises(CheckpointError, match="exists already"):
            run(source)
    assert not root_of(out).exists()
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.suffix == ".safetensors"} == {
        path.name: path.read_bytes() for path in (source.parent / "other").iterdir() if path.suffix == ".safetensors"
    }


def test_a_death_just_before_the_exchange_costs_nothing_but_time(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = source.parent / "out"
    run(source, "other")
    shutil.copytree(source, out)

    def died(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr("porting.atomic._exchange", died)
        with pytest.raises(KeyboardInterrupt):
            run(source, overwrite=True)
    assert (out / "tokenizer.json").read_text() == "{}"
    run(source, overwrite=True)
    assert not root_of(out).exists()
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.suffix == ".safetensors"} == {
        path.name: path.read_bytes() for path in (source.parent / "other").iterdir() if path.suffix == ".safetensors"
    }
