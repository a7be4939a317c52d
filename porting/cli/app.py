"""The command line: its commands, and what they have in common."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from io import TextIOWrapper
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperCommand

from porting.cli.attention import attention
from porting.cli.check import check
from porting.cli.convert import convert
from porting.cli.diff import diff
from porting.cli.explain import explain
from porting.cli.export import export
from porting.cli.fill_mask import fill_mask
from porting.cli.hash import hash_
from porting.cli.inspect import inspect
from porting.cli.load import load
from porting.cli.mutate import mutate
from porting.cli.next_sentence import next_sentence
from porting.cli.output import TYPED, UNEXPECTED, unexpected
from porting.cli.record import record
from porting.cli.suggest import suggest
from porting.cli.tables import tables
from porting.cli.verify import verify
from porting.cli.verify_files import verify_files
from porting.errors import nearest
from porting.printable import safe

app = typer.Typer(
    name="porting",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # help and wrong usage as plain text, the same on a terminal and in a pipe
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Command(TyperCommand):
    """A command that says which option was probably meant, and remembers what was typed."""

    def invoke(self, ctx: Any) -> Any:  # Any: the context's own class is not public
        """As usual, with what was typed at hand for whoever gives advice."""
        token = TYPED.set(ctx.params)
        try:
            return super().invoke(ctx)
        finally:
            TYPED.reset(token)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # Any: the context's own class is not public
        """As usual, but for one name in place of a list of all that look a little alike."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # the class of a wrong option is Typer's own, and not public; it goes on from here
            wrong = getattr(error, "option_name", None)
            if wrong is not None and hasattr(error, "possibilities") and hasattr(error, "message"):  # no such option
                known = [name for parameter in self.params for name in parameter.opts]
                error.possibilities = None
                error.message = f"No such option {wrong!r}. {nearest(wrong, known).capitalize()}".strip()
            raise


app.command("inspect", cls=Command, short_help="What is in a checkpoint: names, shapes, dtypes, bytes.")(inspect)
app.command("tables", cls=Command, short_help="The tables that ship with the library, or one of them.")(tables)
app.command("explain", cls=Command, short_help="What a fault means, and how to mend it.")(explain)
app.command("check", cls=Command, short_help="Prove that table, checkpoint and module fit together.")(check)
app.command("suggest", cls=Command, short_help="Write the table for a module of yours, and prove it.")(suggest)
app.command("load", cls=Command, short_help="Load a checkpoint into a module, and say what was built.")(load)
app.command("verify", cls=Command, short_help="Prove that a port computes what the reference computes.")(verify)
app.command("record", cls=Command, short_help="Keep what a reference computes, to verify without it.")(record)
app.command("mutate", cls=Command, short_help="Test your own test: which mistakes would it miss?")(mutate)
app.command("export", cls=Command, short_help="Carry a checkpoint through a table, and back again.")(export)
app.command("convert", cls=Command, short_help="Rewrite a checkpoint of any size, in fixed memory.")(convert)
app.command("verify-files", cls=Command, short_help="Find what changed in what convert wrote.")(verify_files)
app.command("diff", cls=Command, short_help="Compare two checkpoints value by value.")(diff)
app.command("hash", cls=Command, short_help="One digest for the values of a checkpoint.")(hash_)
app.command("fill-mask", cls=Command, short_help="Guess masked words.")(fill_mask)
app.command("next-sentence", cls=Command, short_help="Judge whether one sentence follows another.")(next_sentence)
app.command("attention", cls=Command, short_help="See what each head attends to in a text.")(attention)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"porting {version('porting')}")
        raise typer.Exit


@app.callback()
def describe(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Load pretrained weights into transformers of your own, and prove that the port is faithful.

    A checkpoint is a directory, a weight file or a model on the hub; without one, commands take the small one that is
    embedded here. Models on the hub go through huggingface_hub: its cache, its token, HF_HUB_OFFLINE=1. Exit codes:
    0 done, or faithful; 1 a difference was found; 2 it cannot be done as asked; 3 a fault of the program itself.

    \b
    Begin with:
      porting verify
      porting inspect ./my-checkpoint
      porting tables
    """


def _writable(stream: TextIO | None) -> TextIO:
    """The stream, made to take every character; one that was closed becomes one that swallows everything."""
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream or open(os.devnull, "w", encoding="utf-8")


def main() -> None:
    """Run the command line; never returns."""
    sys.stdout, sys.stderr = _writable(sys.stdout), _writable(sys.stderr)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when huggingface_hub is imported
    try:
        app(prog_name="porting")
    except Exception as error:  # noqa: BLE001  # a fault of ours: a line, and the rest in a file
        sys.stderr.write(f"error: {safe(str(unexpected(error)))}\n")
        sys.exit(UNEXPECTED)
    finally:
        _let_go(sys.stdout)


def _let_go(stream: TextIO) -> None:
    """What nobody can take is given up: some Pythons try once more when they end, and say so with a traceback."""
    try:
        stream.flush()
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
