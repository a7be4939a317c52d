"""``mutate``: which mistakes of a port a test would miss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from porting.cli import options
from porting.cli.output import DIFFERENT, Screen

if TYPE_CHECKING:
    from porting.mutating import Score


def mutate(
    tests: Annotated[
        list[str], typer.Argument(metavar="TESTS...", help="Arguments for pytest: files, folders, tests.")
    ],
    into: Annotated[
        str,
        typer.Option(
            "--into",
            metavar="MODULE:NAME",
            help="What the tests build the port with: my_model:build, or my_model.py:build; a function or a class.",
        ),
    ],
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Try this mistake only; may be given more than once.", show_default="all of them"),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=1.0,
            max=options.WEEK,
            help="Seconds that one run of the tests may take.",
            show_default="ten times what they take as they are, at least 30",
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Import the tests anew for each run: slower, for tests with threads."),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Find the mistakes in a port that your own tests would miss.

    Each mistake of the catalogue is put into the model that your tests build, one at a time, and your tests run. If
    they still pass, the mistake is listed with a line that would catch it. Mistakes that change nothing in this port
    are left out. Every run is a process of its own; your files are not changed. Exit code 0: all are caught; 1: some
    are missed; 2: the tests fail as they are, or never run the port.

    \b
    Examples:
      porting mutate tests/test_my_model.py --into my_model:build
      porting mutate tests/test_my_model.py --into my_model.py:MyBert --only "tanh GELU for another activation"
      porting mutate tests --into my_model:build --json
    """
    with Screen("mutate", as_json=as_json) as screen:
        from porting.mutating import mutate as test

        with screen.working("mutating") as tell:
            score = test(tests, into, only=only or (), timeout=timeout, fresh=fresh, progress=tell)
        screen.document(score.to_dict)
        _show(screen, score)
        if score.survivors:
            again = [*tests, *options.flags(into=into, timeout=timeout), "--only", score.survivors[0].name]
            screen.next("mutate", *(["--help"] if only else again))
            raise typer.Exit(DIFFERENT)


def _show(screen: Screen, score: Score) -> None:
    if score.survivors:
        screen.line(("survived", "bold"))
        for one in score.survivors:
            screen.line((one.name, "bold red"), f"  {one.looks}")
            screen.line(("  would be caught by: ", "dim"), one.advice)
        screen.line()
    slow = [one.name for one in score.mutations if one.outcome == "timed out"]
    if slow:
        screen.line(f"did not end in time, and count as caught: {', '.join(slow)}")
    if score.equivalent:
        screen.line(f"change nothing in this port, and are left out: {', '.join(score.equivalent)}")
    if score.absent:
        screen.line(f"cannot be made in what these tests run: {', '.join(score.absent)}")
    style = "bold green" if not score.survivors else "bold red"
    total = len(score.mutations)
    screen.line((f"{score.caught} of {total} caught", style), f", a mutation score of {100 * score.share:.0f} %")
