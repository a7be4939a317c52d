"""``suggest``: a table for a module of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from porting.cli import options
from porting.cli.output import DIFFERENT, Screen, free
from porting.cli.progress import Prompt
from porting.errors import CheckpointError, Code, Fault, PortingError
from porting.printable import safe, safe_lines

if TYPE_CHECKING:
    from porting.suggesting import Suggestion

ALL = "all"
"""The text for --explain that stands for every line."""

UNDECIDED = 3
"""Exit code: no table was found, and nothing shows that there is none."""


def suggest(
    into: Annotated[
        str,
        typer.Option(
            "--into",
            metavar="MODULE:NAME",
            help="What builds your own module: my_model:build, or my_model.py:build; a class or a function. "
            "It is imported, so its file runs.",
        ),
    ],
    source: options.Source = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the table to this file.", show_default="standard output"),
    ] = None,
    architecture: options.ArchitectureName = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="REFERENCE=YOURS",
            help="What an argument of your forward is, as in [inputs]: 'attention_mask=m -> bool'.",
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            metavar="YOURS=FIELD",
            help="Which field of config.json an argument of your builder is: D=hidden_size.",
        ),
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(
            "--explain",
            metavar="TEXT",
            help="Show the evidence for the lines that contain this text, and every reason; or: all.",
        ),
    ] = None,
    interactive: Annotated[bool, typer.Option("--interactive", help="Ask you where there is a choice.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="With --interactive: take every default, and print what was asked.")
    ] = False,
    overwrite: options.Overwrite = False,
    limit: Annotated[
        float,
        typer.Option(
            "--limit",
            metavar="SECONDS",
            help="Stop after this much computing time, and report how far the search came.",
            min=1,
            max=options.WEEK,
        ),
    ] = 120.0,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Find the table that loads a checkpoint into your module, and verify it, or say why none can work.

    A small random model of the checkpoint's architecture runs beside your module, and the activations of both show
    which weight belongs where. Exit code 0: what the table maps is proven in float64; 1: the result is approximate,
    or no table can work; 2: your module could not be run; 3: no table was found.

    \b
    Examples:
      porting suggest --into my_model.py:build
      porting suggest ./my-checkpoint --into my_model.py:build -o my_table.toml
      porting suggest ./my-checkpoint --into my_model.py:MyModel --explain query
      porting suggest ./my-checkpoint --into my_model.py:MyModel --input 'attention_mask=m -> bool'
      porting suggest ./my-checkpoint --into my_model.py:MyModel --interactive
    """
    with Screen("suggest", as_json=as_json) as screen:
        from porting.atomic import check_destination
        from porting.checkpoint import open_checkpoint
        from porting.suggesting import suggest as make

        if output is not None:  # before the work, not after it
            check_destination(output, overwrite=overwrite or interactive, file=True)
        wanted = output
        lines = dict(_line("--input", one, "REFERENCE=YOURS") for one in inputs or ())
        fields = dict(_line("--config", one, "YOURS=FIELD") for one in config or ())
        builder = options.builder(into)
        checkpoint = open_checkpoint(options.checkpoint_source(source))
        if output is not None:
            check_destination(output, overwrite=overwrite or interactive, sources=checkpoint.paths)
        name = output.stem if output is not None else into.rpartition(":")[0].rpartition("/")[2].removesuffix(".py")
        dialogue = Prompt(screen, defaults=yes)
        with screen.working("suggesting", limit) as tell:
            found = make(
                checkpoint,
                builder,  # type: ignore[arg-type]  # --into is always given
                architecture=architecture,
                inputs=lines,
                config=fields,
                name=name.replace(".", "_"),
                seed=seed,
                limit=limit,
                progress=tell,
                ask=dialogue.ask if interactive else None,
            )
        screen.document(found.to_dict)
        _show(screen, found, explain, table=output is None and not interactive)
        if not found.evidence:
            output = None  # there is nothing to write
        elif interactive:
            output = _agreed(screen, found, output, dialogue, name, overwrite=overwrite)
        if output is not None:
            found.write(output, overwrite=overwrite or interactive)
            screen.made(output)
        asked = [
            *options.source_argument(source),
            *options.flags(into=into, architecture=architecture, input=inputs, config=config),
        ]
        if output is not None and any(one.tie for one in found.unmapped):  # once they are tied in the module
            screen.next("suggest", *asked, *options.flags(output=output, overwrite=True))
        elif any(one.kind == "bound" for one in found.reasons):
            more = options.flags(output=output or wanted, overwrite=output is not None, limit=f"{5 * limit:g}")
            screen.next("suggest", *asked, *more)
        elif output is not None:
            fresh = any(one.side == "module" for one in found.unmapped)
            shows = found.verdict.value in {"approximate", "exact on some inputs"}  # what verify shows as well
            proving = found.proven or shows
            named = architecture if proving else None  # the reference's class: the table builds no architecture
            same = options.flags(table=output, into=into, architecture=named, fresh=fresh)
            screen.next("verify" if proving else "check", *options.source_argument(source), *same)
        elif not interactive:
            screen.next("suggest", *asked, "--output", free("my_table", ".toml"), aside=True)
        if not found.proven:
            raise typer.Exit(UNDECIDED if found.stop is not None else DIFFERENT)


def _line(option: str, text: str, form: str) -> tuple[str, str]:
    """The two sides of an option's value."""
    left, sign, right = text.partition("=")
    if not sign or not left.strip() or not right.strip():
        message = f"{option} {text!r} is not of the form {form}"
        hint = f"such as {option} '{'attention_mask=mask -> padding' if option == '--input' else 'D=hidden_size'}'"
        code = Code.NO_INPUTS if option == "--input" else Code.BAD_TARGET
        raise PortingError(Fault(code=code, message=message, hint=hint))
    return left.strip(), right.strip()


def _agreed(
    screen: Screen, found: Suggestion, output: Path | None, dialogue: Prompt, name: str, *, overwrite: bool
) -> Path | None:
    """The path to write the table to; None for nowhere, after it was shown."""
    from porting.atomic import check_destination
    from porting.suggesting import Question

    if not found.exact:
        question = Question(
            about="accept",
            said=f"Write a table that is {found.verdict.value}?",
            why=_WHY.get(found.verdict.value, "it can be mended by hand, and checked"),
            choices={"yes": "", "no": ""},
            default="yes",
        )
        if dialogue.ask(question) == "no":
            return None
    while True:
        if output is None:
            where = Question(
                about="output",
                said="To which file?",
                why="none was named; - writes none and shows it here",
                default=f"{name}.toml",
            )
            answer = dialogue.ask(where)
            if answer == "-":
                screen.show(Text(safe_lines(found.text.rstrip("\n"))), soft_wrap=True)
                return None
            output = Path(answer)
        try:
            check_destination(output, overwrite=True, file=True)
        except CheckpointError as error:  # what was found in minutes is not lost for it
            screen.note(str(error))
            if dialogue.silent:
                screen.show(Text(safe_lines(found.text.rstrip("\n"))), soft_wrap=True)
                return None
            output = None
            continue
        if overwrite or not output.exists():
            return output
        over = Question(
            about="overwrite",
            said=f"{output} exists: write over it?",
            why="what is in it would be lost",
            choices={"no": "", "yes": ""},
            default="no",
        )
        if dialogue.ask(over) == "yes":
            return output
        if dialogue.silent:
            screen.note(f"{output} is left as it is")
            return None
        output = None


_WHY = {
    "trunk only": "what it maps is proven, and some parts have no counterpart",
    "approximate": "it says so in [approximate], with the bound that verify holds it to",
}


def _show(screen: Screen, found: Suggestion, explain: str | None, *, table: bool) -> None:
    style = "bold green" if found.exact else "bold yellow" if found.proven else "bold red"
    if table:
        screen.show(Text(safe_lines(found.text.rstrip("\n"))), soft_wrap=True)
        screen.line()
    screen.line((found.verdict.upper(), style), f"  {found.proof}" if found.proof else "")
    screen.line(found.meaning)
    shown, more = found.brief() if explain is None else (found.details(), 0)
    for line in shown:
        screen.show(Padding(Text(safe(line)), (0, 0, 0, 2), expand=False))  # folded lines keep their left edge
    if more:
        screen.line(f"  and {more} more: --explain {ALL} shows them, and what speaks for each line")
    if explain is not None:
        screen.line()
        wanted = "" if explain == ALL else explain
        screen.show(Text(safe_lines(found.explain(wanted) or f"no line contains {explain!r}")), soft_wrap=True)
