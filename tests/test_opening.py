"""Files of strangers: nothing outside is read, nothing is waited for, and what is checked is what was opened."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import porting
from porting.checkpoint import CheckpointError, open_checkpoint
from porting.converting.conversion import convert
from porting.converting.integrity import verify_files
from porting.generating.settings import read_settings
from porting.notation.table import parse_table
from porting.opening import Folder, open_file, read_file
from porting.trials.inputs import special_tokens
from tests.guards.tree import ROOT, modules, parse
from tests.small_checkpoint import write_checkpoint

SECRET = b"a secret that lies outside"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file, a sub-folder with one, and beside it a secret."""
    root = tmp_path / "folder"
    (root / "sub").mkdir(parents=True)
    (root / "file").write_bytes(b"inside")
    (root / "sub" / "file").write_bytes(b"below")
    (tmp_path / "secret").write_bytes(SECRET)
    return root


def refused(read: Callable[[], object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read()


LEAVING: list[Callable[[Path], str]] = [
    lambda root: "../secret",
    lambda root: str(root.parent / "secret"),
    lambda root: "sub/../../secret",
    lambda root: "../folder/../secret",
    lambda root: "/etc/hostname",
    lambda root: "/proc/self/environ",
    lambda root: f"/proc/self/root{root.parent}/secret",
]


@pytest.mark.parametrize("number", range(len(LEAVING)))
def test_a_link_that_leaves_is_refused(number: int, folder: Path) -> None:
    (folder / "link").symlink_to(LEAVING[number](folder))
    refused(lambda: Folder(folder).read("link", limit=100), "outside the checkpoint")


def test_a_link_through_a_folder_that_is_one_is_refused(folder: Path) -> None:
    (folder / "up").symlink_to("..")
    (folder / "link").symlink_to("up/secret")
    refused(lambda: Folder(folder).read("link", limit=100), "outside the checkpoint")


@pytest.mark.parametrize("target", ["file", "sub/file", "./sub/../file", "other"])
def test_a_link_inside_is_followed(target: str, folder: Path) -> None:
    (folder / "other").symlink_to("sub/file")
    (folder / "link").symlink_to(target)
    assert Folder(folder).read("link", limit=100) in {b"inside", b"below"}
    assert Folder(folder, follow_links=True).read("link", limit=100) in {b"inside", b"below"}


@pytest.mark.parametrize("name", ["", ".", "..", "sub/file", "../secret", "/etc/hostname", "a\0b"])
def test_only_plain_names_are_opened(name: str, folder: Path) -> None:
    refused(lambda: Folder(folder).read(name, limit=100), "is not a plain file name")


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, lambda path: path.symlink_to("gone"), lambda path: None],
    ids=["fifo", "directory", "link", "nothing"],
)
def test_what_is_no_file_is_refused_at_once(make: Callable[[Path], object], folder: Path) -> None:
    make(folder / "it")
    refused(lambda: Folder(folder).read("it", limit=100), r"found a (named pipe|directory)|does not exist|no such file")
    refused(lambda: read_file(folder / "it", limit=100), r"found a (named pipe|directory)|does not exist|no such file")


def test_a_limit_is_looked_at_first(folder: Path) -> None:
    os.truncate(folder / "file", 1 << 40)
    refused(lambda: Folder(folder).read("file", limit=100), "1099511627776 bytes, where at most 100 can be meant")
    refused(lambda: read_file(folder / "file", limit=100), "1099511627776 bytes, where at most 100 can be meant")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system has no /proc")
def test_a_file_whose_size_is_not_that_of_its_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert read_file(tmp_path / "empty", limit=10) == b""
    with pytest.raises(CheckpointError, match="status: its content is made when it is read"):
        read_file(Path("/proc/self/status"), limit=10)


def test_a_folder_stays_the_one_that_was_opened(folder: Path) -> None:
    opened = Folder(folder)
    folder.rename(folder.parent / "moved")
    (folder.parent / "folder").symlink_to("/etc")
    assert opened.read("file", limit=100) == b"inside"
    refused(lambda: opened.read("hostname", limit=100), "no such file")


def test_no_descriptor_is_left_open(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to("../secret")
    before = len(os.listdir("/proc/self/fd"))
    for name in ("file", "fifo", "link", "gone", "sub") * 20:
        try:
            Folder(folder).read(name, limit=3)
        except CheckpointError:
            continue
    assert len(os.listdir("/proc/self/fd")) == before


@contextmanager
def flipping(*states: Callable[[], object]) -> Iterator[None]:
    """Another thread brings about one state after the other, again and again."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            for state in states:
                state()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_a_link_that_is_exchanged_between_check_and_opening_reads_nothing_outside(folder: Path) -> None:
    """The name is a file, a link inside and a link outside in turn; so is a folder on the way."""
    folder.joinpath("spare").symlink_to("file")
    folder.joinpath("evil").symlink_to("../secret")
    folder.joinpath("plain").write_bytes(b"inside")
    folder.joinpath("link").symlink_to("way/file")
    folder.joinpath("way").symlink_to("sub")
    (folder.parent / "away").mkdir()
    (folder.parent / "away" / "file").write_bytes(SECRET)

    def become(what: str) -> Callable[[], None]:
        def do() -> None:
            os.link(folder / what, folder / "next", follow_symlinks=False)
            os.rename(folder / "next", folder / "it")

        return do

    def lead(where: str) -> Callable[[], None]:
        def do() -> None:
            os.symlink(where, folder / "next way")
            os.rename(folder / "next way", folder / "way")

        return do

    opened, found = Folder(folder), []
    with flipping(become("plain"), become("evil"), become("spare"), lead("sub"), lead("../away")):
        for _ in range(3000):
            for name in ("it", "link"):
                try:
                    found.append(opened.read(name, limit=100))
                except CheckpointError:
                    continue
    assert {b"inside", b"below"} >= set(found) > set()


def test_there_is_one_way_to_open(tmp_path: Path) -> None:
    """Nobody else in the library opens what a stranger may have made; what is left has a reason."""
    import ast

    own = {
        "porting.cli.app": "the null device",
        "porting.cli.streams": "the null device",
        "porting.cli.attention": "a page that is written",
        "porting.cli.report_bug": "a report that is written, and must not exist",
        "porting.converting.progress": "a file without a name",
        "porting.atomic": "temporary siblings, by descriptors",
        "porting.checkpoint.orbax_file": "arrays by tensorstore, after a look at each of their files",
        "porting.checkpoint.hub": "a note in the cache of the hub's client",
        "porting.checkpoint.hub_guard": "a file that was just downloaded",
        "porting.cli.explain": "a page of this package",
        "porting.mutating.messages": "orders in a temporary folder",
        "porting.mutating.fork_server": "what a process printed, in a temporary folder",
        "porting.opening": "here",
        "porting.pages.page": "files of this package",
        "porting.scratch": "temporary folders, by descriptors",
        "porting.sharding.writing": "a temporary folder of this process",
        "porting.suggesting.subjects.twin": "a twin that was just written",
        "porting.users_code": "a module that the user named, before it runs",
    }
    opening = {"open", "read_bytes", "read_text", "fromfile", "safe_open", "load_file"}
    found = set()
    for module, path in modules().items():
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called not in opening:
                continue
            of = node.func.value if isinstance(node.func, ast.Attribute) else None
            words = ("folder", "content", "container", "place", "root", "made", "files", "model")
            ours = isinstance(of, ast.Name | ast.Attribute | ast.Call) and any(
                word in ast.unparse(of) for word in words
            )
            if not (ours and module not in own):
                found.add(module)
    assert found <= own.keys()


def test_there_is_one_way_to_write() -> None:
    """A path that a user names is written by ``porting.atomic``, which follows no link; what is left has a reason."""
    import ast

    own = {
        "porting.atomic": "here",
        "porting.checkpoint.orbax_file": "a temporary folder of links to descriptors",
        "porting.cli.app": "the null device",
        "porting.cli.report_bug": "a record that mkstemp names",
        "porting.cli.streams": "the null device",
        "porting.converting.journal": "a descriptor that is read",
        "porting.converting.workplace": "folders by their descriptors",
        "porting.checkpoint.gguf_vocabulary": "a temporary folder",
        "porting.checkpoint.hdf5_walk": "its standard output",
        "porting.checkpoint.hub": "folders of the cache of the hub's client",
        "porting.mutating.messages": "orders in a temporary folder",
        "porting.mutating.fork_server": "what a process prints, in a temporary folder",
        "porting.opening": "what is removed, by its descriptor",
        "porting.pytest_plugin": "a folder, and the name of a page that was written whole",
        "porting.reporting.figures": "into memory",
        "porting.seeing.picture": "into memory",
        "porting.sharding.writing": "a temporary folder of this process",
        "porting.suggesting.subjects.twin": "a temporary folder of this process",
        "porting.tokenizer_check": "a temporary file",
    }
    writing = {
        "write_text",
        "write_bytes",
        "mkstemp",
        "NamedTemporaryFile",
        "mkdir",
        "makedirs",
        "save_file",
        "savefig",
    }
    writing |= {"savez", "tofile", "copyfile", "copytree", "fdopen"}
    found = set()
    for module, path in modules().items():
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            modes = [
                one.value
                for one in (*node.args, *(word.value for word in node.keywords))
                if isinstance(one, ast.Constant)
            ]
            opens = called.rpartition(".")[2] == "open" and {"w", "wb", "x", "xb", "a", "ab"} & set(map(str, modes))
            moves = called in {"os.replace", "os.rename", "torch.save", "numpy.save", "np.save", "shutil.move"}
            if opens or moves or called.rpartition(".")[2] in writing:
                found.add(module)
    assert found <= own.keys()


# ------------------------------------------------------------------------------------------------ what uses it


@pytest.mark.parametrize("raw", [b"[" * 10**6, b'{"added_tokens": [{"special": true, "id": 1e400}]}', b"\xff", b"[]",
                                 b"{}", b'{"added_tokens": [7, {"special": 1, "id": "x"}]}'])  # fmt: skip
@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt"])
def test_special_tokens_are_a_hint_and_no_failure(raw: bytes, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(raw)
    assert special_tokens(Folder(tmp_path), {"pad_token_id": 3}) == [3]


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt"])
@pytest.mark.parametrize("how", ["huge", "fifo", "link"])
def test_special_tokens_are_not_read_from_what_is_no_file_of_a_checkpoint(how: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    path = tmp_path / "m" / name
    content = json.dumps({"added_tokens": [{"special": True, "id": 7}]}) if name == "tokenizer.json" else "[CLS]\n"
    if how == "huge":
        path.write_text(content)
        os.truncate(path, 5 << 30)
    elif how == "fifo":
        os.mkfifo(path)
    else:
        (tmp_path / "outside").write_text(content)
        path.symlink_to("../outside")
    assert special_tokens(Folder(tmp_path / "m"), {}) == []


HANGING = """
import sys
from porting.cli.options import batch_of
from porting.errors import PortingError
from porting.notation.table import read_table
from porting.recordings import load_recording
from pathlib import Path
for read in (read_table, load_recording, lambda path: batch_of(str(path))):
    try: read(Path(sys.argv[1]))
    except PortingError as error: print(error)
"""


@pytest.mark.slow
def test_a_table_a_recording_or_a_batch_that_is_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "it.npz")
    words = [sys.executable, "-c", HANGING, str(tmp_path / "it.npz")]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    table, recording, batch = done.stdout.splitlines()
    assert "not a regular file, expected a TOML table" in table
    assert "found a named pipe (FIFO)" in recording
    assert "found a named pipe (FIFO)" in batch


def test_companions_are_copied_from_inside_only(tmp_path: Path) -> None:
    """Exchanged for links between the plan and the copying."""
    from porting.converting.conversion import carry_out, prepare

    source = write_checkpoint(tmp_path / "m")
    (tmp_path / "secret").write_bytes(SECRET)
    draft = prepare(source, tmp_path / "out", "bert_into_fused")
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to("../secret")
    refused(lambda: carry_out(draft, tmp_path / "out"), "outside the checkpoint|is not what it was")
    assert not (tmp_path / "out").exists()


def test_a_directory_that_may_not_be_listed_can_be_read_by_name(folder: Path) -> None:
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    folder.chmod(0o311)
    assert open_checkpoint(folder / "model.safetensors").tensors.keys() == {"a"}
    folder.chmod(0o755)


def test_a_user_may_name_a_link(folder: Path) -> None:
    (folder / "link").symlink_to("../secret")
    opened = open_file(folder / "link")
    assert os.pread(opened.descriptor, 100, 0) == SECRET
    os.close(opened.descriptor)


def test_a_tensor_of_a_conversion_is_read_from_the_file_that_was_opened(tmp_path: Path) -> None:
    save_file({"a": torch.arange(9.0)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("/etc/hostname")
    table = parse_table('[mapping]\nname = "t"\n[tensors]\n"a" = "b"\n')
    made = convert(checkpoint, tmp_path.parent / f"{tmp_path.name}-out", table)
    assert verify_files(made.path).same


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOMEM, errno.EROFS])
def test_a_file_that_cannot_be_looked_at_is_not_taken_for_none(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a config.json on a failing disk is left out without a word."""

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    folder = Folder(tmp_path)
    assert folder.kind("config.json") == ""
    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(CheckpointError, match=f"cannot be opened: {os.strerror(number)}"):
        folder.kind("config.json")


@pytest.mark.parametrize("what", ["text", "settings", "special", "convert", "export"])
def test_what_lies_beside_the_weights_is_read_in_the_directory_that_was_opened(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another checkpoint takes its name, or a link to one, after it was opened: nothing of that is used."""
    folder = write_checkpoint(tmp_path / "c")
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    checkpoint = open_checkpoint(folder)
    module = porting.load(checkpoint)
    expected = {name: (folder / name).read_bytes() for name in ("tokenizer.json", "generation_config.json")}
    folder.rename(tmp_path / "aside")
    other = shutil.copytree(tmp_path / "aside", tmp_path / "other")
    (other / "tokenizer.json").write_text("{}")
    (other / "generation_config.json").write_text('{"eos_token_id": 8}')
    folder.symlink_to(other)
    if what == "text":
        monkeypatch.setattr("porting.text.open_checkpoint", lambda *arguments, **options: checkpoint)
        assert porting.fill_mask("the [MASK]", folder)
    elif what == "settings":
        assert checkpoint.home is not None
        assert read_settings(checkpoint.home, {}, decoder=False, vocabulary=40).ends == {7}
    elif what == "special":
        assert len(special_tokens(checkpoint.home, {})) > 1
    else:
        out = tmp_path / "out"
        convert(checkpoint, out, "bert") if what == "convert" else porting.export(module, None, out)
        assert {name: (out / name).read_bytes() for name in expected} == expected
