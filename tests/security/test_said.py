"""What is printed is true, ends, and neither hides nor moves anything on a terminal."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import resource
import shlex
import shutil
import sys
import unicodedata
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.text import Text
from safetensors.torch import load_file, save_file

import porting
from porting.atomic import check_destination, write_file
from porting.checkpoint import CheckpointError, open_checkpoint, write_directory
from porting.checkpoint.files import LocalFile
from porting.cli.output import Screen
from porting.errors import MOST_FAULTS, Code, Fault, PortingError, PortingWarning, command_text, nearest
from porting.opening import Folder, open_error
from porting.printable import is_printable, quote, safe, safe_lines
from tests.cli.conftest import Run, run
from tests.converting.test_identity import run as convert_again
from tests.converting.test_identity import write_version
from tests.small_checkpoint import write_checkpoint

__all__ = ["run"]

UNSEEN = ["\u009b", "\u202e", "\u115f", "\u1160", "\u3164", "\uffa0", "\u2800", "\u034f", "\ufe0f", "\u17b4", "\u180e",
          "\u200b", "\u2066", "\u00ad", "\ufeff", "\U000e0041", "\U000e0100", "\x1b", "\r", "\u2028"]  # fmt: skip


@pytest.mark.parametrize("one", UNSEEN, ids=[f"U+{ord(one):04X}" for one in UNSEEN])
def test_every_message_and_every_table_that_is_printed_is_escaped(one: str, run: Run, tmp_path: Path) -> None:
    """In an error as Python prints it, on the command line, and in a table with its comments."""
    fault = Fault(code=Code.FILE_MISSING, where=f"a{one}b", message=f"c{one}d", hint=f"e{one}f")
    assert is_printable(str(fault))
    assert is_printable(str(PortingError(fault)))
    assert one not in quote(f"a{one}b")
    if one not in "\r\x1b":  # which TOML does not take
        table = tmp_path / "t.toml"
        table.write_text(f'# a comment{one}of theirs\n[mapping]\nname = "t" # b{one}\n[tensors]\n"a" = "b"\n')
        printed = run("tables", str(table))
        assert printed.exit_code == 0, printed.stderr
        assert one not in printed.stdout
        assert f"a comment\\u{ord(one):04x}of" in printed.stdout or f"\\U{ord(one):08x}of" in printed.stdout
        assert printed.stdout.count("\n") == 5
    refused = run("inspect", str(tmp_path / f"no{one}where"))
    assert refused.exit_code == 2
    assert one not in refused.stderr.replace("\r\n", "\n")


@pytest.mark.parametrize("one", UNSEEN, ids=[f"U+{ord(one):04X}" for one in UNSEEN])
def test_what_was_typed_wrongly_is_escaped(one: str, run: Run) -> None:
    for words in (
        ["explain", f"x{one}y"],
        [f"no{one}thing"],
        ["inspect", f"--no{one}thing"],
        [f"--no{one}thing"],
        ["hash", "--threads", f"1{one}x"],
        ["convert", "a", "b", "--shard-size", f"1{one}B"],
        ["tables", f"no{one}thing"],
    ):
        refused = run(*words)
        assert refused.exit_code == 2, words
        assert one not in refused.stderr.replace("\r\n", "\n"), words


def test_no_character_that_is_not_seen_is_printed() -> None:
    """All of Unicode: controls, formatting, separators, surrogates, and what has no glyph of its own."""
    unseen = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    every = [chr(code) for code in range(sys.maxunicode + 1)]
    hidden = {one for one in every if unicodedata.category(one) in unseen or one in UNSEEN}
    assert len(hidden) > 2000
    assert not hidden & {one for one in every if is_printable(one)}
    assert not (hidden - set("\n\t")) & set(safe_lines("".join(every)))


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("one", [*UNSEEN, "\x07", "\x1b]0;title\x07"])
def test_whatever_draws_it_nothing_unseen_is_printed(
    one: str, terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a report as well, whose parts are drawn by others."""
    if terminal:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with Screen("verify") as screen:
        screen.show(Text(f"a{one}b\nc\td", style="red"))
    shown = capsys.readouterr().out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert plain.splitlines()[0].startswith("a")
    assert is_printable(plain.replace("\n", "").replace("\t", ""))
    assert plain.count("\n") == 2


@pytest.mark.parametrize("mark", ["\u0301", "\u0338", "\u0e49", "\u0903", "\u20dd"])  # one of each category, and others
def test_marks_are_not_piled_up(mark: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A thousand of them on one letter would cover the lines above and below; a word of a vocabulary may be that."""
    piled = "a" + 4096 * mark
    spelled = f"a{8 * mark}\\u{ord(mark):04x}"
    assert safe(piled).startswith(spelled)
    assert mark not in quote(piled)
    for text in (safe(piled), safe_lines(piled), str(PortingError(Fault(code=Code.FILE_MISSING, message=piled)))):
        assert 9 * mark not in text
    with Screen("verify") as screen:
        screen.rows(["token", ""], [(piled, "7 %")])
        screen.line(piled)
        screen.note(piled)
    shown = capsys.readouterr()
    assert spelled in shown.out
    assert 9 * mark not in shown.out + shown.err
    assert max(map(len, shown.out.splitlines())) < 1100
    (tmp_path / "t.toml").write_text(f'# {piled}\n[mapping]\nname = "t"\n[tensors]\n"a" = "b"\n')
    assert 9 * mark not in run("tables", str(tmp_path / "t.toml")).stdout


ODD_ERRORS = {
    "no text": """class Odd(Exception):
    def __str__(self):
        return 5
raise Odd""",
    "raises": """class Odd(Exception):
    def __str__(self):
        raise ValueError
raise Odd""",
    "endless": "raise ValueError('A' * 10**7)",
}
"""Errors of a user's own module that cannot say what they are, or do not end."""


@pytest.mark.parametrize("command", ["load", "check", "verify", "suggest"])
@pytest.mark.parametrize("where", ["import", "builder", "forward"])
@pytest.mark.parametrize("kind", ODD_ERRORS)
def test_an_error_of_a_users_module_is_told_whatever_its_class_says(
    kind: str, where: str, command: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "forward" and command in {"load", "check"}:
        pytest.skip("it is not run")
    code = {place: ODD_ERRORS[kind] if place == where else "pass" for place in ("import", "builder", "forward")}
    indented = {place: text.replace("\n", "\n" + 8 * " ") for place, text in code.items()}
    text = f"""{code["import"]}
from torch import nn
class Net(nn.Module):
    def __init__(self, vocab_size, hidden_size):
        super().__init__()
        {indented["builder"]}
        self.tokens = nn.Embedding(vocab_size, hidden_size)
    def forward(self, input_ids, attention_mask=None, token_type_ids=None):
        {indented["forward"]}
        return self.tokens(input_ids)
"""
    table = """[mapping]
name = "net"
[tensors]
"bert.embeddings.word_embeddings.weight" = "tokens.weight"
[drop]
"{*rest}" = "a net of words"
[probes]
". -> last_hidden_state" = "."
"""
    monkeypatch.chdir(write_checkpoint(tmp_path / "c").parent)
    Path("net.py").write_text(text)
    Path("net.toml").write_text(table)
    more = [] if command == "suggest" else ["--table", "net.toml"]
    refused = run(command, "c", "--into", "net.py:Net", *more)
    assert refused.exit_code == 2, refused.output
    assert f"{'ValueError: A' if kind == 'endless' else 'Odd'}" in refused.stderr
    assert "net.py" in refused.stderr
    assert len(refused.stderr) < 10_000


def test_a_table_without_such_characters_is_printed_as_it_is(run: Run, tmp_path: Path) -> None:
    text = '# Zürich, 東京\n[mapping]\n\tname = "t"\n[tensors]\n"a" = "b"\n'
    (tmp_path / "t.toml").write_text(text)
    assert run("tables", str(tmp_path / "t.toml")).stdout == text


def test_what_is_seen_is_not_escaped() -> None:
    text = "Zürich 東京 한국어 עברית «x» 😀 é हिन्दी น้ำ བརྒྱུད e\u0301\u0323\u0330"
    assert safe(text) == text


# ---------------------------------------------------------------------------------------------- what was left behind


def test_nothing_was_left_behind_is_said_only_where_it_is_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk on which nothing more can be written, nor removed."""

    def full(*arguments: object, **options: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def kept(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    source = write_version(tmp_path / "source", 1)
    for name in ("unlink", "rmdir"):
        monkeypatch.setattr(os, name, kept)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError) as caught:
        convert_again(source, tmp_path / "out")
    assert "writing failed, and '.out.porting-convert' was left behind in" in str(caught.value)
    with pytest.raises(CheckpointError) as caught:
        write_directory(tmp_path / "d", {"config.json": b"{}"})
    assert "nothing was left behind" not in str(caught.value)
    assert "was left behind in" in str(caught.value)
    monkeypatch.undo()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match="writing failed, and nothing was left behind"):
        convert_again(source, tmp_path / "out")
    assert [name for name in os.listdir(tmp_path) if name.startswith(".out")] == []


@pytest.mark.parametrize("made", ["conversion", "file"])
def test_what_is_complete_is_not_said_to_be_gone(made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fails once it has its name."""

    def broken(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    source = write_version(tmp_path / "source", 1)
    if made == "conversion":
        monkeypatch.setattr("porting.converting.workplace._remove", broken)
    else:
        monkeypatch.setattr("porting.atomic.sync", broken)
    with pytest.raises(CheckpointError, match="it is complete, but its name may not survive a power cut") as caught:
        convert_again(source, tmp_path / "out") if made == "conversion" else write_file(tmp_path / "out", b"x")
    assert "nothing was left behind" not in str(caught.value)
    assert (tmp_path / "out").exists()


CALLS = ("fstat", "open", "stat", "listdir", "close", "mkdir", "rename", "unlink", "rmdir", "fsync", "flock")
"""What may fail while something is written."""


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("made", ["file", "directory", "conversion"])
def test_what_could_not_be_removed_is_named(made: str, call: str, lasting: bool, tmp_path: Path) -> None:
    """At each use of a call.  A lock that stays held would make a temporary directory seem to be in use."""
    owner: Any = fcntl if call == "flock" else os
    real, number, count = getattr(owner, call), 0, [0]
    source = write_version(tmp_path / "source", 1)

    def fail(*arguments: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] == number or (lasting and count[0] > number):
            if call == "close":
                real(*arguments, **options)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments, **options)

    while count[0] >= number:
        number, count[0], folder = number + 1, 0, tmp_path / str(number)
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            patch.setattr(owner, call, fail)
            error = failure_of(made, source, folder / "d")
        said = [str(one.message) for one in warned if one.category is PortingWarning] + [error]
        left = [name for name in os.listdir(folder) if name.startswith(".")]
        for name in left:
            assert any(f"{name!r} {be} left behind" in one for one in said for be in BE), (number, said)
        assert "nothing was left behind" not in error or os.listdir(folder) == []
        assert not error or "complete" in error or not (folder / "d").exists()
        assert error or (folder / "d").exists()


BE = ("was", "may have been")


def failure_of(made: str, source: Path, path: Path) -> str:
    """The error message when something cannot be written; empty when it was written."""
    try:
        if made == "file":
            write_file(path, b"content")
        elif made == "directory":
            write_directory(path, {"config.json": b"{}"})
        else:
            convert_again(source, path)
    except (CheckpointError, OSError) as error:
        return str(error)
    return ""


def test_a_file_that_cannot_be_closed_prints_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network file system whose server is gone: Python prints what a finalizer raises."""
    printed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    (tmp_path / "file").write_bytes(b"x")
    folder, file = Folder(tmp_path), LocalFile(tmp_path / "file")
    for descriptor in (folder.descriptor, file.fileno()):
        os.close(descriptor)
    del folder, file
    assert printed == []


# ------------------------------------------------------------------------------------- a mapped file that is written to


def overwrite(path: Path) -> None:
    """In place, with the size and the times of before."""
    status, raw = path.stat(), bytearray(path.read_bytes())
    raw[-400:] = bytes(400)
    with path.open("r+b") as file:
        file.write(raw)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [(overwrite, "but it was written to since"), (truncate, "it was truncated"), (grow, "when it was opened and has")],
)
def test_a_module_whose_file_was_written_to_is_not_exported(
    change: Callable[[Path], None], message: str, anew: bool, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "m")
    module = porting.load(source)
    change(source / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        porting.export(module, None, tmp_path / "out", anew=anew)
    assert sorted(os.listdir(tmp_path)) == ["m"]


@pytest.mark.parametrize("how", ["own", "deleted", "replaced", "copied"])
def test_a_module_whose_values_are_its_own_is_exported(how: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    expected = {name: one.clone() for name, one in load_file(source / "model.safetensors").items()}  # it maps
    module, path = porting.load(source, own=how == "own"), source / "model.safetensors"
    if how == "deleted":
        path.unlink()
    elif how == "replaced":
        save_file({"other": torch.zeros(1)}, tmp_path / "other")
        (tmp_path / "other").rename(path)
    else:
        if how == "copied":
            for one in module.parameters():
                one.data = one.data.clone()
            for name, buffer in list(module.named_buffers()):
                module.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer.clone()
        overwrite(path)
    porting.export(module, None, tmp_path / "out", anew=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in found.keys() & expected.keys())
    assert len(found) > 40


# -------------------------------------------------------------------------------------------------- faults without end


def faults(count: int, message: str = "'layers.{}.weight' is missing") -> list[Fault]:
    return [Fault(code=Code.NO_SOURCE, message=message.format(number)) for number in range(count)]


def test_a_few_faults_are_told_one_by_one() -> None:
    assert PortingError(faults(MOST_FAULTS)).faults == tuple(faults(MOST_FAULTS))


def test_many_that_differ_in_numbers_are_one() -> None:
    (fault,) = PortingError(faults(10**5)).faults
    assert str(fault) == "'layers.0.weight' is missing (and 99999 more like it) [no-source]"


def test_many_that_differ_otherwise_are_counted() -> None:
    several = PortingError(iter(faults(10**5, "'x{}' is missing"))).faults
    assert len(several) == MOST_FAULTS + 1
    assert several[-1].message == f"and {10**5 - MOST_FAULTS} more faults, not shown"


@pytest.mark.few(1)
@pytest.mark.parametrize("spelled", ["s{}.safetensors", "s.{}.safetensors"])
def test_a_hundred_thousand_missing_shards_are_told_in_a_few_lines(spelled: str, run: Run, tmp_path: Path) -> None:
    weights = {f"t{number}": spelled.format(number) for number in range(10**5)}
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    refused = run("inspect", str(tmp_path / "m"))
    assert refused.exit_code == 2
    assert len(refused.stderr.splitlines()) <= MOST_FAULTS + 3
    documents = run("inspect", str(tmp_path / "m"), "--json")
    assert len(json.loads(documents.stdout)["faults"]) <= MOST_FAULTS + 1


def test_an_index_that_lies_about_every_tensor_is_told_in_a_few_lines(tmp_path: Path) -> None:
    names = [f"m-{number:04}.safetensors" for number in range(50)]
    for name in names:
        save_file({f"{name}.a": torch.zeros(1)}, tmp_path / name)
    weights = {f"t{number}": names[number % 50] for number in range(10**5)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert len(caught.value.faults) <= MOST_FAULTS
    assert "more faults, not shown" in caught.value.faults[-1].message


def test_the_nearest_of_many_long_names_is_looked_for_in_bounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    import difflib

    compared: list[int] = []
    real = difflib.get_close_matches

    def count(word: str, possibilities: list[str], n: int, cutoff: float) -> list[str]:
        compared.extend(len(one) for one in [word, *possibilities])
        return real(word, possibilities[:3], n, cutoff)

    monkeypatch.setattr(difflib, "get_close_matches", count)
    nearest("x" * 4096, [f"{number}x" * 800 for number in range(20_000)])
    assert len(compared) <= 5001
    assert max(compared) <= 200
    assert nearest("layer.0.wieght", ["layer.0.weight", "pooler.bias"]) == "did you mean 'layer.0.weight'?"


@pytest.mark.parametrize("count", [2, 20, 50, 5000])
def test_an_error_is_no_longer_than_somebody_reads(count: int) -> None:
    """Each of its lines is there, without its middle; faults that are not so long stay as they are."""
    long = PortingError(
        Fault(code=Code.NO_SOURCE, where="t.toml", message=f"{'x' * (4000 + one % 7)}'{one}' is missing", hint="map it")
        for one in range(count)
    )
    lines = str(long).splitlines()
    assert len(lines) == min(count, 51) or count > 50
    assert all("characters left out" in line for line in lines[:50])
    assert len(str(long)) < 40_000
    short = PortingError(Fault(code=Code.NO_SOURCE, message=f"{'x' * 200}{chr(97 + one)}") for one in range(20))
    assert all(fault.message.startswith("x" * 200) for fault in short.faults)


@pytest.mark.parametrize("write", ["convert", "export"])
def test_nothing_is_left_behind_where_few_files_may_be_open(tmp_path: Path, write: str) -> None:
    """With any number of descriptors it is done, or an error, and no temporary directory stays."""
    source = write_version(tmp_path / "source", 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while len(os.listdir("/proc/self/fd")) <= max(taken):  # until none below the last one is free
        taken.append(os.open(os.devnull, os.O_RDONLY))
    done = []
    for more in range(36):
        resource.setrlimit(resource.RLIMIT_NOFILE, (1 + max(taken) + more, hard))
        try:
            if write == "convert":
                convert_again(source, tmp_path / "out")
            else:
                write_directory(tmp_path / "out", {"config.json": b"{}", "more.json": b"{}"})
            done.append(True)
        except (PortingError, OSError) as error:
            done.append("oo many open files" not in str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [name for name in os.listdir(tmp_path) if name.startswith(".out")] == [], more
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    for descriptor in taken:
        os.close(descriptor)
    assert {*done} == {False, True}


@pytest.mark.parametrize("name", ["$(touch pwned)", "a;touch pwned", "x'; touch pwned; '", "`id`", "two words", "-rf"])
def test_a_command_to_type_has_a_name_as_one_word(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger gives files, folders and state dicts their names; what is advised is typed into a shell."""
    monkeypatch.chdir(tmp_path)
    word = f"./{name}" if name[0] == "-" else name
    torch.save({name: {"w": torch.ones(1)}, "epoch": 1}, "m.pt")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint("m.pt")
    command = command_text(caught.value.faults[0].hint).removeprefix("name the one you mean: ")
    assert shlex.split(command) == ["porting", "inspect", f"m.pt#{name}"]
    Path(name).mkdir()
    with pytest.raises(CheckpointError) as caught:
        check_destination(Path(name, "missing", "file"), overwrite=False)
    (command,) = re.findall("(?<=run `)mkdir .*(?=`\\))", str(caught.value))
    assert shlex.split(command) == ["mkdir", "-p", f"{word}/missing"]
    error = open_error(PermissionError(errno.EACCES, "no"), Path(name), where="m.pt")
    (command,) = re.findall("(?<=run `)chmod .*(?=`\\))", str(error))
    assert shlex.split(command) == ["chmod", "u+r", word]
    Path(name, "unet").mkdir()
    save_file({"w": torch.ones(1)}, Path(name, "unet", "model.safetensors"))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(word)
    (path,) = re.findall(r"(?<=the one you mean: ).*(?=\) \[)", str(caught.value))
    assert shlex.split(path) == [f"{word}/unet"]
