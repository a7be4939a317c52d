"""The command line as a process of its own: what a script, a pipe and a terminal get."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from tests.cli.conftest import Run
from tests.cli.modules import write_own
from tests.guards.tree import ROOT
from tests.small_checkpoint import write_checkpoint

pytestmark = pytest.mark.few(4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small BERT called ``c``, a module of a user's own, and files that are none of what they seem."""
    folder = tmp_path_factory.mktemp("process")
    write_checkpoint(folder / "c")
    write_own(folder, bug=("nn.functional.gelu", "nn.functional.relu"))
    (folder / "page.safetensors").write_text("<!doctype html><title>404</title>")
    (folder / "pointer.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3\n")
    (folder / "cut.safetensors").write_bytes((folder / "c" / "model.safetensors").read_bytes()[:5000])
    (folder / "empty").mkdir()
    (folder / "ends.py").write_text("import sys\nprint('hello')\nsys.exit(0)\n")
    (folder / "pipe.py").write_text("def build():\n    raise BrokenPipeError(32, 'Broken pipe')\n")
    np.savez(folder / "in.npz", ids=np.ones((2, 3), np.int64))
    (folder / "bad.toml").write_text('[mapping]\nnmae = "x"\n[tensors]\n"a.{i}" = "b"\n')
    os.mkfifo(folder / "pipe.safetensors")
    return folder


def porting(*words: str, cwd: Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **(env or {})}
    command = [sys.executable, "-m", "porting", *words]
    return subprocess.run(
        command, cwd=cwd, env=environment, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


BAD = [
    ("load c --into ends.py:build", "the imported module ended the program (sys.exit(0) at "),
    (
        "record --reference pipe.py:build --inputs in.npz --out r.safetensors",
        "the imported module raised BrokenPipeError",
    ),
    ("check pointer.safetensors", "Git-LFS"),
    ("check c --table bad.toml", "did you mean 'name'?"),
    ("check nowhere/at/all", "no such file or directory"),
    ("inspect page.safetensors", "HTML"),
    ("load cut.safetensors", "cut.safetensors"),
    ("inspect pipe.safetensors", "named pipe"),
    ("verify empty", "holds no weights"),
    ("export c c", "c: "),
    ("fill-mask [MASK] --source empty", "holds no weights"),
]


def assert_refused(words: str, message: str, code: int, out: str, err: str) -> None:
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    *lines, last = [line for line in err.splitlines() if line != "hello"]
    assert all(line.startswith("error: ") for line in lines)
    codes = re.findall(r"\[([a-z-]+)\]$", "\n".join(lines), re.MULTILINE)
    advice = f"explain {' '.join(dict.fromkeys(codes))}" if codes else f"{words.split(maxsplit=1)[0]} --help"
    assert last == f"next: porting {advice}"


@pytest.mark.parametrize(("words", "message"), BAD)
def test_bad_input_is_lines_on_standard_error_and_exit_code_2(
    folder: Path, words: str, message: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = run(*words.split())
    assert_refused(words, message, result.exit_code, result.stdout, result.stderr)


@pytest.mark.few(1)
@pytest.mark.parametrize(("words", "message"), BAD[:4])
def test_a_process_of_its_own_says_the_same(folder: Path, words: str, message: str) -> None:
    result = porting(*words.split(), cwd=folder)
    assert_refused(words, message, result.returncode, result.stdout, result.stderr)


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_a_library_that_ends_the_program_when_it_is_imported_is_no_success(
    library: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / library).mkdir()
    (tmp_path / library / "__init__.py").write_text("import sys\nsys.exit(0)\n")
    run = porting("load", "c", cwd=folder, env={"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])})
    assert (run.returncode, run.stdout) == (2, "")
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: code that this command runs ended the program (sys.exit(0) at ")
    assert line.endswith(f"{library}/__init__.py:2)")


@pytest.mark.slow
def test_a_difference_is_exit_code_1_and_the_json_is_alone(folder: Path) -> None:
    run = porting(
        "verify", "c", "--table", "own.toml", "--into", "own_model.py:build", "--json",
        cwd=folder, env={"FORCE_COLOR": "1"},
    )  # fmt: skip
    assert run.returncode == 1, run.stderr
    report = json.loads(run.stdout)
    assert report["verdict"] == "different"
    assert report["guilty"][0] == "blocks.0"
    assert run.stderr == ""


@pytest.mark.slow
def test_a_pipe_gets_no_colour_and_no_bar(folder: Path) -> None:
    narrow = {"FORCE_COLOR": "1", "COLUMNS": "30", "PYTHONIOENCODING": "ascii"}
    run = porting("check", "c", "--verbose", cwd=folder, env=narrow)
    assert run.returncode == 0
    assert "\x1b" not in run.stdout + run.stderr
    assert run.stderr == ""
    assert run.stdout.splitlines()[-1] == "next: porting verify c"
    assert any(len(line) > 120 for line in run.stdout.splitlines())


@pytest.mark.slow
def test_a_terminal_gets_colours_and_the_next_command_last(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
    for name in ("NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "porting", "check", "c"]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=theirs, stderr=theirs, stdin=theirs) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # the other end was closed
                break
            if not piece:
                break
            shown += piece
    os.close(ours)
    assert process.returncode == 0
    text = shown.decode()
    assert "\x1b[1;32mfits" in text
    assert "checking" in text
    assert text.splitlines()[-1].endswith("porting verify c")
    assert max(len(line) for line in text.splitlines() if "\x1b" not in line) <= 100


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "porting", "inspect", "c"]
    reading, writing = os.pipe()
    os.close(reading)
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=writing, stderr=subprocess.PIPE) as process:
        os.close(writing)
        assert process.stderr is not None
        errors = process.stderr.read()
    assert errors == b""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("words", [["--help"], ["inspect", "nowhere", "--json"]])
def test_nor_is_it_a_difference_where_no_command_writes(folder: Path, words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "porting", *words]
    done = subprocess.run(command, cwd=folder, env=environment, check=False, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert done.returncode == 128 + signal.SIGPIPE
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "words", "library"),
    [
        ("HF_ENDPOINT", "http://[::1", ["inspect", "org/name"], "huggingface_hub"),
        ("HF_ENDPOINT", "http://127.0.0.1:99999", ["inspect", "org/name"], "huggingface_hub"),
        ("TORCH_LOGS", "nonsense", ["check", "c"], "torch"),
    ],
)
def test_a_variable_that_a_library_does_not_take_is_no_fault_of_ours(
    folder: Path, variable: str, value: str, words: list[str], library: str
) -> None:
    done = porting(*words, cwd=folder, env={variable: value, "HF_HUB_OFFLINE": "0"})
    *_, line = done.stderr.splitlines()
    assert line.startswith(f"error: importing {library} failed: ")
    assert line.endswith("HF_ENDPOINT, TORCH_LOGS, PYTHONOPTIMIZE, …)")
    assert done.returncode == 2


NO_MEMORY = """
import sys
from porting.cli import main
from porting.cli.inspect import inspect as command

class Full:
    def find_spec(self, name, path=None, target=None):
        if name == "porting.cli.report_bug":
            raise MemoryError

def inspect(*words, **options):
    sys.modules.pop("porting.cli.report_bug", None)
    sys.meta_path.insert(0, Full())
    raise SystemError("returned NULL without setting an exception")

command.__globals__["Screen"] = inspect
sys.argv = ["porting", "inspect", "c"]
main()
"""


def test_without_memory_to_report_an_error_it_is_a_line_all_the_same(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", NO_MEMORY]
    done = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    assert (done.stderr, done.returncode) == ("error: there is not enough memory for this\n", 2)


full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full to write to")


def lost(folder: Path, *words: str, output: str = "/dev/full", mode: str = "w", errors: str = "") -> tuple[int, str]:
    """The exit code and the lines on standard error of a command whose output goes to a file that takes nothing."""
    command = [sys.executable, "-m", "porting", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with Path(output).open(mode) as out, Path(errors or os.devnull).open("w") as full:
        aside = full if errors else subprocess.PIPE
        run = subprocess.run(command, cwd=folder, env=environment, check=False, stdout=out, stderr=aside, text=True)
    return run.returncode, run.stderr or ""


@pytest.mark.slow
@full_disk
@pytest.mark.parametrize("words", [["inspect", "c"], ["inspect", "c", "--json"], ["suggest", "--help"], ["--version"]])
def test_a_full_disk_is_one_line(folder: Path, words: list[str]) -> None:
    code, errors = lost(folder, *words)
    assert errors.splitlines() == ["error: standard output cannot be written: No space left on device"]
    assert code == 2
    code, errors = lost(folder, *words, output=os.devnull, mode="r")  # which is opened for reading
    assert errors.splitlines() == ["error: standard output cannot be written: Bad file descriptor"]
    assert code == 2


@full_disk
@pytest.mark.parametrize("more", [[], pytest.param(["--json"], marks=pytest.mark.slow)])
def test_what_is_complete_is_named_where_the_output_is_lost(folder: Path, tmp_path: Path, more: list[str]) -> None:
    code, errors = lost(folder, "convert", "c", str(tmp_path / "out"), *more)
    expected = f"error: standard output cannot be written: No space left on device; {tmp_path / 'out'} is complete"
    assert errors.splitlines() == [expected]
    assert code == 2
    assert porting("verify-files", str(tmp_path / "out"), cwd=folder).returncode == 0


@pytest.mark.slow
@full_disk
def test_a_report_that_cannot_be_printed_is_written_all_the_same(folder: Path, tmp_path: Path) -> None:
    """The table of suggest and the page of verify come after the report, which was lost with all the work."""
    words = ["suggest", "c", "--into", "own_model.py:build", "--output", str(tmp_path / "t.toml")]
    code, errors = lost(folder, *words)
    assert errors.splitlines()[-1].endswith(f"No space left on device; {tmp_path / 't.toml'} is complete")
    assert (code, (tmp_path / "t.toml").stat().st_size > 0) == (2, True)
    code, errors = lost(folder, "verify", "c", "--html", str(tmp_path / "p.html"))
    assert errors.splitlines()[-1].endswith(f"No space left on device; {tmp_path / 'p.html'} is complete")


@pytest.mark.slow
@full_disk
def test_an_error_is_said_where_the_document_is_lost(folder: Path) -> None:
    code, errors = lost(folder, "inspect", "nowhere/at/all", "--json")
    assert "no such file or directory" in errors
    assert code == 2


@full_disk
@pytest.mark.parametrize(("words", "expected"), [(["inspect", "c"], 0), (["inspect", "nowhere/at/all"], 2)])
def test_where_standard_error_is_full_the_work_goes_on(folder: Path, words: list[str], expected: int) -> None:
    assert lost(folder, *words, output=os.devnull, errors="/dev/full")[0] == expected


BUG = """
import sys
from porting.cli import main
from porting.cli.inspect import inspect as command

def inspect(*words, **options):
    raise {error}

command.__globals__["Screen"] = inspect
sys.argv = ["porting", "inspect", "c"]
main()
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("ZeroDivisionError('one\\n\\x1b[2Jtwo')", "ZeroDivisionError: one"),
        ("RecursionError('deep')", "RecursionError: deep"),
        ("AssertionError", "AssertionError"),
        ("ValueError('a' * 10000)", "ValueError: aaaa"),
        ("KeyError('\\u202e')", "KeyError: "),
    ],
)
def test_an_unexpected_exception_is_one_line_and_a_report(folder: Path, tmp_path: Path, error: str, said: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", BUG.replace("{error}", error)]
    run = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    assert run.returncode == 3
    assert run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert line.isprintable()
    assert len(line) < 500
    (report,) = tmp_path.glob("porting-report-*.txt")
    assert line.startswith(f"error: {said}")
    said = f"this is a fault of porting, recorded in {report}: porting report-bug prepares what to send"
    assert line.endswith(f"({said}) [unexpected]")
    content = report.read_text(encoding="utf-8")
    assert "Traceback" in content
    assert "porting 0" in content
    assert report.stat().st_mode & 0o077 == 0


SIGNALLED = """
import os, signal, sys
signal.signal({number}, signal.SIG_DFL)  # what runs the tests may ignore it, as nohup does
from porting.cli import main
import {module} as place
real = place.{name}
def signalled(*arguments, **options):
    if not os.path.exists("once"):
        open("once", "w").close()
        os.kill(os.getpid(), {number})
    return real(*arguments, **options)
place.{name} = signalled
main()
"""
"""A command to which a signal comes once something is written."""


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("words", "module", "name", "left"),
    [
        (["export", "out"], "porting.atomic", "publish", []),
        (["convert", "out"], "porting.converting.writing", "_write_small", [".out.porting-convert"]),
        (["attention", "a word", "--html", "out.html"], "porting.atomic", "write_all", []),
    ],
)
def test_a_command_that_is_told_to_end_removes_what_it_made(
    number: signal.Signals, words: list[str], module: str, name: str, left: list[str], tmp_path: Path
) -> None:
    """But for an interrupted conversion, from which the same command goes on."""
    code = SIGNALLED.format(module=module, name=name, number=int(number))
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (tmp_path / "once").exists(), done.stderr
    assert (done.returncode, done.stderr.splitlines()[-1]) == (128 + number, f"ended by {number.name}"), done.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "once") == left
    if left:
        done = porting(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert sorted(path.name for path in tmp_path.iterdir() if path.name != "once") == ["out"]


COMMANDS = {
    "inspect": ["inspect", "c"],
    "tables": ["tables"],
    "check": ["check", "c"],
    "load": ["load", "c"],
    "export": ["export", "c", "exported"],
    "fill-mask": ["fill-mask", "[MASK]", "--source", "c"],
    "next-sentence": ["next-sentence", "a", "b", "--source", "c"],
}


@pytest.mark.slow
class Warning503(BaseHTTPRequestHandler):
    """A hub that is out of order and has a warning, which its client would print."""

    def do_GET(self) -> None:
        self.send_response(503)
        self.send_header("X-HF-Warning", "all; of a hub's own")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815  # the server looks for this name

    def log_message(self, *words: object) -> None:
        """Nothing."""


def test_the_client_of_the_hub_prints_no_line_of_its_own(folder: Path, tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Warning503) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        address = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
        environment = {**os.environ, **address, "PYTHONPATH": str(ROOT)}
        environment.pop("HF_HUB_OFFLINE", None)
        command = [sys.executable, "-m", "porting", "inspect", "some/model"]
        run = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
        server.shutdown()
        thread.join()
    assert run.returncode == 2
    error, advice = run.stderr.splitlines()
    assert error.startswith("error: some/model: the hub answered with status 503")
    assert advice.startswith("next: ")


@pytest.mark.slow
def test_only_verify_imports_transformers(folder: Path) -> None:
    """All the others in one process, since each import of torch takes a second."""
    program = (
        "import sys\n"
        "from porting.cli.app import app\n"
        f"for words in {list(COMMANDS.values())!r}:\n"
        "    try:\n"
        "        app(words, prog_name='porting')\n"
        "    except SystemExit as end:\n"
        "        if end.code: sys.exit(f'{words} ended with {end.code}')\n"
        "    if 'transformers' in sys.modules: sys.exit(f'{words} imported transformers')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, check=False, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_the_command_line_itself_needs_no_torch() -> None:
    """``porting --help`` takes a tenth of a second without torch, and more than one with it."""
    program = (
        "import sys, types\n"
        "package = types.ModuleType('porting')\n"  # only what the command line imports is looked at here
        f"package.__path__ = [{str(ROOT / 'porting')!r}]\n"
        "sys.modules['porting'] = package\n"
        "from porting.cli.app import app\n"
        "try:\n"
        "    app(['check', '--help'], prog_name='porting')\n"
        "except SystemExit as end:\n"
        "    heavy = {'torch', 'transformers', 'huggingface_hub', 'tokenizers'} & set(sys.modules)\n"
        "    sys.exit(f'{heavy} imported' if heavy else end.code)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "Examples:" in run.stdout
