"""``report-bug``: what is sent of an unexpected error, and what is not."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

from porting.cli.report_bug import Shortened, unexpected
from tests.cli.conftest import Run

THEIRS = """
def build_my_secret():
    raise ValueError("cannot read '/home/ada/a b/plan.toml', weights.bin or ./secret/run-7.safetensors of ada")
"""

PRIVATE = ("ada", "secret", "weights", "run-7", "plan.toml", "a b", "mine.py", "my_")


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for temporary files, and another one to work in, both of a user with a name."""
    folder = tmp_path / "ada" / "temporary"
    folder.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("LOGNAME", "ada")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return folder


def crash(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Path:
    """A record of an error in the user's own file, by a command of these words."""
    (folder.parent / "mine.py").write_text(THEIRS)
    code = compile(THEIRS, str(folder.parent / "mine.py"), "exec")
    names: dict[str, object] = {}
    exec(code, names)  # noqa: S102 - it stands for what --into imports
    monkeypatch.setattr(sys, "argv", ["/home/ada/.venv/bin/porting", *words])
    before = set(folder.iterdir())
    try:
        names["build_my_secret"]()  # type: ignore[operator]  # a function, of the text above
    except ValueError as error:
        unexpected(error)
    (made,) = set(folder.iterdir()) - before
    return made


def test_the_report_has_what_is_needed_and_nothing_of_its_users(
    run: Run, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = "verify ./secret/run-7.safetensors --into mine.py:my_build --table bert --dtype float32 --seed 7"
    record = crash(records, monkeypatch, *typed.split(), "--inputs=weights.bin")
    assert all(one in record.read_text() for one in PRIVATE)  # so that there is something to leave out

    result = run("report-bug")
    text = Path("porting-bug-report.md").read_text()
    command = (
        "porting verify <path 1>.safetensors --into <path 2>.py:<word 1> --table bert --dtype float32 --seed 7 "
        "--inputs=<path 3>.bin"
    )
    message = "ValueError: cannot read '<path 6>.toml', <path 3>.bin or <path 1>.safetensors of <user>"
    for line in (f"typed: {command}", '  File "<path 5>.py", line 3', message, "Traceback (most recent call last):"):
        assert line in text.splitlines()
    assert [one for one in PRIVATE if one in text + result.stdout] == []
    assert "build_my_secret" not in text
    assert f"porting {porting_version()}" in text

    shown = result.stdout.splitlines()
    assert len(shown) <= 11
    assert f"typed      {command}" in shown
    assert f"stopped    {message}" in shown
    assert "left out   6 paths, 1 word, the code of 2 frames" in shown
    assert "written    porting-bug-report.md: look through it before you send it" in shown
    assert shown[-1] == "next: porting explain unexpected"


def porting_version() -> str:
    from importlib.metadata import version

    return version("porting")


@pytest.mark.parametrize(
    ("word", "left"),
    [
        ("-o/home/ada/secret/t.toml", "-o<path 1>.toml"),
        ("-osecret", "-o<word 1>"),
        ("-my secret", "-m<word 1>"),
        ("--my secret", "<word 1>"),
        ("--table=secret", "--table=<word 1>"),
        ("--table=-secret", "--table=<word 1>"),
        ("-1.5", "-1.5"),
        ("--verbose", "--verbose"),
        ("-v", "-v"),
    ],
)
def test_what_begins_like_an_option_is_left_out_with_its_value(word: str, left: str) -> None:
    assert Shortened().words([word]) == [left]


def test_behind_two_dashes_there_are_no_options() -> None:
    typed = ["fill-mask", "--top", "3", "--", "--secret", "-secret", "fill-mask"]
    assert Shortened({"fill-mask"}).words(typed) == [
        *("fill-mask", "--top", "3", "--", "<word 1>", "<word 2>", "fill-mask")
    ]


def test_passwords_and_tokens_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "s3cr3t-of-mine")
    shortened = Shortened()
    said = "GET https://ada:pass@host.org/x?token=abcdefgh failed: 'hf_AbCdEfGhIjKl' and s3cr3t-of-mine are wrong"
    assert shortened.text(said) == "GET <url 1> failed: '<secret>' and <secret> are wrong"
    assert str(shortened) == "1 url"


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("acme/secret/run.safetensors: no such file", "<path 1>.safetensors: no such file"),
        ("[Errno 2] No such file or directory: 'acme/run 7'", "[Errno 2] No such file or directory: '<path 1>'"),
        ("acme-7.bin and 'acme 7.bin' (acme/secret)", "<path 1>.bin and '<path 2>.bin' (<path 3>)"),
        ("typed/secret/acme.toml:5:1: 'a' is no key", "<path 2>.toml:5:1: 'a' is no key"),
        ("typed/secret of ./typed/secret, ../acme/, ~acme/x", "<path 1> of <path 2>, <path 3>, ~<path 4>"),
        ("secret.py: typed", "<path 2>.py: typed"),
        ("config.json, tokenizer.json, model-00001-of-00002.safetensors", None),
        ("a config of 3/4 layers; 2 tokens/s", "a config of 3/4 layers; 2 <path 1>"),
        ("layers.0.attention [h d], 'bert.pooler.dense.weight' = 1e-5", None),
    ],
)
def test_relative_paths_are_left_out(said: str, left: str | None) -> None:
    """Of a file as of a folder, and below a folder that was typed."""
    shortened = Shortened()
    if "typed" in said or said.startswith("secret"):
        shortened.word("typed/secret")
    assert shortened.text(said) == (said if left is None else left)


def test_code_of_the_library_stays_in_a_traceback() -> None:
    here = str(Path(__file__).parents[2] / "porting" / "build.py")
    other = "/home/ada/.venv/lib/python3.12/site-packages/torch/nn/modules/module.py"
    trace = f'  File "{here}", line 3, in build\n    made = build(kind)\n           ^^^^\n'
    trace += f'  File "{other}", line 9, in _call\n    return x\n  File "<frozen runpy>", line 1, in f\nE: build\n'
    shortened = Shortened()
    shortened.word("build")
    assert shortened.traceback(trace).splitlines() == [
        '  File "porting/build.py", line 3, in build',
        "    made = build(kind)",
        "           ^^^^",
        '  File "torch/nn/modules/module.py", line 9, in _call',
        "    return x",
        '  File "<frozen runpy>", line 1, in f',
        "E: <word 1>",
    ]


def test_the_last_record_of_ones_own_is_taken(run: Run, records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others can write to the folder as well: a link, a file that all may write, and a newer one of another user."""
    old = crash(records, monkeypatch, "inspect")
    os.utime(old, (1, 1))
    new = crash(records, monkeypatch, "check")
    (records / "porting-report-link.txt").symlink_to(old)
    shared = crash(records, monkeypatch, "load")
    shared.chmod(0o666)
    (records / "porting-report-folder.txt").mkdir()
    assert "typed      porting check" in run("report-bug").stdout.splitlines()
    assert "typed      porting inspect" in run("report-bug", "--record", old).stdout.splitlines()
    monkeypatch.setattr(os, "geteuid", lambda: new.stat().st_uid + 1)
    assert "no unexpected error is recorded" in run("report-bug").stdout


def test_without_a_record_there_are_the_versions(run: Run, records: Path) -> None:
    del records
    result = run("report-bug", "--out", "report.md")
    assert "stopped    no unexpected error is recorded" in result.stdout
    assert result.stdout.splitlines()[-1] == "next: porting verify"
    assert "None is recorded on this machine." in Path("report.md").read_text()


def test_no_file_is_overwritten(run: Run, records: Path) -> None:
    del records
    assert run("report-bug").exit_code == run("report-bug").exit_code == 0
    assert sorted(path.name for path in Path().iterdir()) == ["porting-bug-report-2.md", "porting-bug-report.md"]
    again = run("report-bug", "--out", "porting-bug-report.md")
    assert (again.exit_code, again.stdout) == (2, "")
    assert "porting-bug-report.md: File exists" in again.stderr


def test_as_json(run: Run, records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash(records, monkeypatch, "check", "x.bin")
    found = json.loads(run("report-bug", "--json").stdout)
    assert found["text"] == Path(found["file"]).read_text()
    assert found["packages"]["porting"] == porting_version()


HEAD = "porting 1.0\ntorch not installed\npython 3.12.1 on Linux\n"

OTHERS = {
    "nothing": "",
    "passwords": "root:x:0:0:root:/root:/bin/bash\nada:x:1000:1000::/home/ada:/bin/sh\n",
    "a table": '[mapping]\nname = "x"\n\n[tensors]\n',
    "a key": "-----BEGIN PRIVATE KEY-----\nporting 1.0\n",
    "no command": HEAD + "\nTraceback\n",
    "a cut record": HEAD,
    "another line": HEAD + "secret\ntyped: ['porting']\n\nE\n",
    "a command of another kind": HEAD + "typed: 7\n\nE\n",
    "bytes": "\x1b[2J\n\nx",
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_file_that_is_no_record_is_refused_and_passed_over(run: Run, records: Path, kind: str) -> None:
    path = records / "porting-report-x.txt"
    path.write_text(OTHERS[kind])
    path.chmod(0o600)
    result = run("report-bug", "--record", path)
    assert result.exit_code == 2
    assert "porting-report-x.txt: this is not an error that porting recorded (pass a file named" in result.stderr
    assert not list(Path().iterdir())
    assert "no unexpected error is recorded" in run("report-bug").stdout


def test_a_file_of_the_system_is_refused(run: Run, records: Path) -> None:
    del records
    for path in ("/etc/passwd", "/dev/null", "/proc/self/environ", "."):
        assert run("report-bug", "--record", path).exit_code == 2
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    "content", ["typed: [\n\nE", "typed: [']\n\n", "typed: []\n\n\x1b[2J\n\nx", "typed: []\n\nE\n"]
)
def test_a_record_that_was_changed_is_taken_as_it_is(run: Run, records: Path, content: str) -> None:
    (records / "porting-report-x.txt").write_text(HEAD + content.replace("typed: [\n", "typed: [x]\n"))
    (records / "porting-report-x.txt").chmod(0o600)
    result = run("report-bug")
    assert result.exit_code == 0
    assert "no unexpected error is recorded" not in result.stdout
    assert "\x1b" not in Path("porting-bug-report.md").read_text()
