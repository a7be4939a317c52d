"""What is written where, and what becomes of an error."""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import signal
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from porting.cli.output import LONGEST_TEXT, Ended, Screen, endable, size
from porting.errors import LONGEST, Code, Fault, Message, Option, PortingError, Wording
from porting.printable import counted, safe

FAULTS = PortingError(
    [
        Fault(code=Code.NO_TABLE, where="a.toml:1:2", message="this is wrong", hint="do that"),
        Fault(code=Code.NO_SOURCE, message="and this\nas well"),
    ]
)


def refused(error: BaseException, *, as_json: bool = False) -> int:
    with pytest.raises(typer.Exit) as caught, Screen("check", as_json=as_json):
        raise error
    return caught.value.exit_code


def test_every_fault_is_a_line_and_the_last_line_is_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(FAULTS) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "error: a.toml:1:2: this is wrong (do that) [no-table]",
        "error: and this\\nas well [no-source]",
        "next: porting tables",
    ]


def test_json_has_the_faults_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(FAULTS, as_json=True) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["faults"][0] == {
        "code": "no-table",
        "where": "a.toml:1:2",
        "message": "this is wrong",
        "hint": "do that",
    }
    assert err.startswith("error: a.toml:1:2: this is wrong")


BACK = Fault(code=Code.OPTION_REFUSED, message="it is ported", hint=Message("pass ", Option("reverse", True)))


def test_an_argument_is_an_option_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(PortingError(BACK), as_json=True) == 2
    out, err = capsys.readouterr()
    assert err.splitlines()[0] == "error: it is ported (pass --reverse) [option-refused]"
    assert json.loads(out)["faults"][0]["hint"] == "pass --reverse"
    assert str(PortingError(BACK)) == "it is ported (pass reverse=True) [option-refused]"
    with Screen("check"):
        warnings.warn(BACK.line, UserWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: it is ported (pass --reverse) [option-refused]\n"


def test_faults_that_are_counted_cut_or_pickled_keep_both_wordings() -> None:
    many = PortingError([replace(BACK, where=f"layers.{number}") for number in range(100)]).faults
    assert [fault.line.command for fault in many] == [
        "layers.0: it is ported (and 99 more like it; pass --reverse) [option-refused]"
    ]
    long = Fault(code=Code.NO_TABLE, message="", hint=Message("x" * LONGEST, Wording(python="a=", command="--a")))
    assert (long.hint[-4:], long.line.command[-16:]) == ("xxa=", "x--a) [no-table]")
    copy = pickle.loads(pickle.dumps(Message("pass ", Option("shard_size", "5GB"))))
    assert (copy, copy.command) == ("pass shard_size='5GB'", "pass --shard-size 5GB")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (OSError(13, "Permission denied", "/a/b"), 2, "error: /a/b: Permission denied (look at it with `ls -ld /a/b`)"),
        (OSError("odd"), 2, "error: a file that the command reads or writes: odd (run it again)"),
        (
            OSError(5, "I/O"),
            2,
            "error: a file that the command reads or writes: I/O (a disk or its connection failed: see `dmesg`)",
        ),
        (MemoryError(), 2, "error: there is not enough memory for this"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"),
            2,
            "error: there is not enough memory for this",
        ),
        (
            ImportError("lib.so: failed to map segment from shared object"),
            2,
            "error: there is not enough memory for this",
        ),
        (RuntimeError("can't start new thread"), 2, "error: no other thread or process can be started"),
        (
            OSError(24, "Too many open files"),
            2,
            "error: too many files are open at once: raise the limit (`ulimit -n`)",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_else_can_end_a_command(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(error) == code
    assert capsys.readouterr().err.splitlines()[0] == line


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("code", "said"), [(0, "0"), (1, "1"), (None, "None"), ("all done", "'all done'"), (Unprintable(), "a Unprintable")]
)
def test_what_ends_the_program_is_named_with_its_line(
    code: object, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(SystemExit(code)) == 2
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith(f"error: code that this command runs ended the program (sys.exit({said}) at ")
    assert f"{Path(__file__).name}:" in line


def test_a_bug_of_ours_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), Screen("check"):
        raise ZeroDivisionError


def test_a_warning_is_a_line_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen("load") as screen:
        warnings.warn("two parameters\nare new", UserWarning, stacklevel=1)
        screen.line("done")
    out, err = capsys.readouterr()
    assert err == "warning: two parameters\\nare new\n"
    assert out == "done\n"


def test_what_an_imported_module_prints_stays_out_of_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen("load", as_json=True) as screen:
        print("hello from a module")  # noqa: T201 - this is what a user's module does
        screen.document({"a": 1})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"a": 1}
    assert err == "hello from a module\n"


def test_json_is_alone_and_strict(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen("verify", as_json=True) as screen:
        screen.line("a line")
        screen.rows(["a"], [["b"]])
        screen.document({"worst": math.inf, "values": (math.nan, 1.5, None, True), 3: Code.NO_TABLE})
        screen.next("verify")
    out, err = capsys.readouterr()
    assert err == ""

    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    assert json.loads(out, parse_constant=refuse) == {
        "worst": "inf",
        "values": ["nan", 1.5, None, True],
        "3": "no-table",
    }


def test_a_pipe_gets_a_row_a_line_without_colours_or_padding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Screen("check") as screen:
        screen.rows(["name", "count"], [("x" * 300, "1"), ("y", "20")], right=["count"])
        screen.line(("bold", "bold red"), " and ", "z" * 300)
        screen.next("check", "a b", "--table", "t")
    assert capsys.readouterr().out.splitlines() == [
        f"name{' ' * 298}count",
        f"{'x' * 300}      1",
        f"y{' ' * 304}20",
        f"bold and {'z' * 300}",
        "next: porting check 'a b' --table t",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_colours_and_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with Screen("verify") as screen:
        with screen.working("verifying") as tell:
            tell("loading", 1, 4)
        screen.line(("faithful", "bold green"))
    assert "\x1b[1;32mfaithful" in out.getvalue()
    assert "verifying: loading" in err.getvalue()
    assert err.getvalue().endswith("\x1b[2K")  # the bar's line is erased at the end


def test_no_bar_in_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Screen("verify") as screen, screen.working("verifying") as tell:
        tell("loading", 1, 4)
    assert capsys.readouterr() == ("", "")


def test_what_a_file_put_into_a_name_cannot_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen("inspect") as screen:
        screen.rows(["name"], [["a\x1b[2J\n\u202eb [red]c[/red] :smile:"]])
        screen.line("\udcff")
        screen.warn("w\rx")
    out, err = capsys.readouterr()
    assert out == "name\na\\x1b[2J\\n\\u202eb [red]c[/red] :smile:\n\\udcff\n"
    assert err == "warning: w\\rx\n"
    assert safe("häuser 漢字") == "häuser 漢字"


def test_a_table_is_drawn_as_far_as_anybody_reads(capsys: pytest.CaptureFixture[str]) -> None:
    """By rows, and by the characters in them; the document has all."""
    with Screen("check", as_json=False) as screen:
        screen.rows(["name"], [[f"row {number}"] for number in range(7_000)])
        screen.rows(["name"], [["x" * 10_000] for _ in range(3_000)])
    lines = capsys.readouterr().out.splitlines()
    assert "row 4999" in lines
    assert "row 5000" not in lines
    assert [line for line in lines if line.startswith("and ")] == ["and 2,000 more rows", "and 2,031 more rows"]


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1536, "1.54 kB"),
        (999_600, "1 MB"),
        (438_012_345, "438 MB"),
        (10**16, "10000 TB"),
    ],
)
def test_sizes(nbytes: int, shown: str) -> None:
    assert size(nbytes) == shown


def test_counts() -> None:
    assert [counted(number, "rule") for number in (0, 1, 12345)] == ["0 rules", "1 rule", "12,345 rules"]


@pytest.mark.parametrize("character", ["a", "\x9b", "\u202e", "\U000e0041"])
def test_the_middle_of_a_text_that_nobody_reads_is_left_out(character: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Laying out a cell of a hundred megabytes, or a column that is as wide as its longest cell, takes minutes.

    An escaped character takes up to ten, and as many are left out more.
    """
    long = character * 1_000_000 + "b"
    with Screen("check") as screen:
        screen.rows(["name", "count"], [(long, "1"), *(("c", "2") for _ in range(4_000))])
        screen.line(("what", "bold"), long)
        screen.line(long, most=LONGEST_TEXT)
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if "left out" in line]
    assert all(re.search(r" … (9[89][0-9]|999),[0-9]{3} characters left out … ", line) for line in lines)
    assert [len(line) // 1_100 for line in lines] == [0, 0, 18]
    assert all(line.rstrip(" 1").endswith("b") for line in lines)
    assert "more rows" in out
    assert len(out) < 1_100_000


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_a_finalizer_swallows_is_sent_again(
    capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(number)
            time.sleep(0)

    def work() -> None:
        Finalized()
        time.sleep(20)

    before = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt) as caught, endable():
            work()
    finally:
        signal.signal(number, before)
    assert not isinstance(caught.value, Ended) or caught.value.number == number
    assert capfd.readouterr().err == ""
