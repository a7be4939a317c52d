"""What every command has in common: help, version, wrong usage."""

from __future__ import annotations

import os
import re

import pytest
import typer

from porting.cli.app import NUMBERS, TERMINAL, _check_environment, app
from porting.cli.convert import parse_size
from porting.errors import PortingError
from tests.cli.conftest import Run

COMMANDS = [command.name for command in app.registered_commands if command.name is not None]


GROUPS = {
    "Start here": ["suggest", "verify", "load", "export"],
    "Look": ["inspect", "attention", "fill-mask", "next-sentence", "generate", "classify", "translate"],
    "Move": ["convert", "diff", "hash", "verify-files"],
    "More": ["check", "tables", "explain", "record", "mutate", "report-bug"],
}


def test_the_commands_are_these_in_these_groups(run: Run) -> None:
    assert [name for names in GROUPS.values() for name in names] == COMMANDS
    _, *shown = run("--help").stdout.split("\n\n")
    lists = [one.splitlines() for one in shown if one.partition(":\n")[0] in GROUPS]
    assert {title.rstrip(":"): [row.split()[0] for row in rows] for title, *rows in lists} == GROUPS


def test_help_names_every_command_and_the_exit_codes(run: Run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in result.stdout
    assert "0 done, or faithful; 1 a difference was found; 2 wrong use" in " ".join(result.stdout.split())


def test_help_fits_a_terminal_of_80_columns(run: Run) -> None:
    """No line of the list of commands is cut off, and none of the rest is folded."""
    shown = run("--help").stdout
    assert "..." not in shown.partition("Start here:")[2]
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_examples_a_line_each(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert result.stderr == ""
    _, _, examples = result.stdout.partition("\n  Examples:\n")
    shown = examples.partition("\n\n")[0].splitlines()
    assert len(shown) >= 2
    assert all(line.startswith(f"    porting {command}") for line in shown)
    assert (
        "SOURCE" in result.stdout
        or "--source" in result.stdout
        or command in {"tables", "explain", "diff", "mutate", "verify-files", "report-bug"}
    )


def test_the_short_help_option_is_the_same(run: Run) -> None:
    assert run("check", "-h").stdout == run("check", "--help").stdout


def test_the_version(run: Run) -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("porting 0.")


def test_no_command_is_wrong_usage_and_shows_the_help(run: Run) -> None:
    result = run()
    assert result.exit_code == 2
    assert "porting verify" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chekc"], "No such command 'chekc'. Did you mean 'check'?"),
        (["fillmask", "a"], "No such command 'fillmask'. Did you mean 'fill-mask'?"),
        (["check", "--tabel", "t"], "No such option '--tabel'. Did you mean '--table'?"),
        (["inspect", "--jsn"], "No such option '--jsn'. Did you mean '--json'?"),
        (["verify", "--zzz"], "No such option '--zzz'."),
        (["convert", "a", "--output", "b"], "No such option '--output'. The destination is the second argument"),
        (["hash", "--checkpoint", "b"], "No such option '--checkpoint'. The source is the first argument"),
        (["check", "a", "b"], "Got unexpected extra argument(s) (b)"),
        (["verify", "--dtype", "flaot32"], "'flaot32' is not one of 'float64', 'float32', 'bfloat16', 'float16'"),
        (["verify", "--seed", "x"], "Invalid value for '--seed'"),
        (["fill-mask"], "Missing argument 'TEXT'"),
        (["fill-mask", "[MASK]", "--top", "0"], "Invalid value for '--top'"),
        (["next-sentence", "a"], "Missing argument 'SECOND'"),
        (["export"], "there is no DESTINATION"),
        (["convert"], "there is no DESTINATION"),
        (["export", "."], "'.' exists, and one path alone is the destination: name both"),
        (["convert", ".", "--overwrite"], "'.' exists, and one path alone"),
    ],
)
def test_wrong_usage_says_what_was_meant_and_where_help_is(run: Run, words: list[str], message: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert " -h' for help." in result.stderr


@pytest.mark.parametrize("size", ["1e400", "9" * 400, "9" * 30 + "TB", "2EB", "²", "-1", "nan", ""])
def test_a_size_that_no_memory_has_is_none(size: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size"):
        parse_size(size)


@pytest.mark.parametrize("words", ["generate a", "record r.safetensors", "verify", "suggest --into a:b"])
@pytest.mark.parametrize("seed", [str(10**30), "-1", str(2**63), "9" * 5000, "1e3"])
def test_a_seed_that_no_generator_takes_is_wrong_usage(run: Run, words: str, seed: str) -> None:
    result = run(*words.split(), "--seed", seed)
    assert result.exit_code == 2
    assert "Invalid value for '--seed'" in result.stderr


@pytest.mark.parametrize("value", ["abc", "²", "-1", "", "9" * 20, "9" * 5000, "1e3"])
def test_numbers_of_the_environment(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    for name in TERMINAL:
        monkeypatch.setenv(name, value)
    _check_environment()
    assert not os.environ.keys() & set(TERMINAL), "an invalid terminal size is ignored"
    for name in NUMBERS:
        monkeypatch.setenv(name, value)
        with pytest.raises(PortingError, match=rf"{name}: .*expected a whole number.*unset {name}.*\[option-refused\]"):
            _check_environment()
        monkeypatch.setenv(name, "12")
        _check_environment()


def numeric_options() -> list[tuple[str, str]]:
    """Each option of each command that takes a number, also one with a unit."""
    found = []
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]  # of a group
        for one in command.params:
            kind = one.type_descriptor
            if re.search("int|float", str(kind.annotation)) or getattr(kind.parameter_info, "parser", None) is not None:
                found.append((name, one.opts[0]))
    return found


@pytest.mark.parametrize(
    ("command", "option"), numeric_options(), ids=[f"{name} {option}" for name, option in numeric_options()]
)
def test_a_number_beyond_all_use_is_refused_before_any_work(run: Run, command: str, option: str) -> None:
    for number in (f"1{'0' * 400}", "9" * 5000, "nan"):
        into = ["--into", "a:b"] if command in {"suggest", "mutate"} else []
        result = run(command, f"{option}={number}", "a", *into)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"Invalid value for '{option}': " in result.stderr
        assert len(result.stderr) < 1000


def test_the_options_that_take_a_number_are_found() -> None:
    """Else the test above would show nothing."""
    found = numeric_options()
    assert {("verify", "--steps"), ("convert", "--memory"), ("record", "--case"), ("diff", "--atol")} <= {*found}
    assert len(found) > 25
