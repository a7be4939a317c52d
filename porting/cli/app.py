"""The command line: its commands, and what they have in common."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from traceback import walk_tb
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from porting.cli import options
from porting.cli.output import BROKEN_PIPE, TYPED, UNEXPECTED, WRONG, ended_by, shortage
from porting.cli.streams import errors, output
from porting.errors import Code, Fault, PortingError, nearest
from porting.printable import safe, told
from porting.users_code import FINDER


@contextmanager
def _escaped() -> Iterator[None]:
    """Escape what a wrong use repeats of what was typed; its class is Typer's own, and not public."""
    try:
        yield
    except Exception as error:  # raised again, whatever it is
        if hasattr(error, "format_message") and isinstance(message := getattr(error, "message", None), str):
            error.message = safe(message)  # type: ignore[attr-defined]  # it has one
        raise


class Commands(TyperGroup):
    """The list of commands, in groups."""

    def invoke(self, ctx: Any) -> Any:  # Any: the context's own class is not public
        """Invoke a command; in errors, unseen characters of its name are escaped."""
        with _escaped():
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # Any: as above
        """Parse the arguments; in errors, unseen characters of an option are escaped."""
        with _escaped():
            return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # Any: their classes are not public
        """One list for each group, in the order of the groups."""
        for group in GROUPS:
            named = [(name, one) for name, one in self.commands.items() if getattr(one, "rich_help_panel", "") == group]
            with formatter.section(group):
                formatter.write_dl([(name, one.get_short_help_str(60)) for name, one in named], col_max=20)


class Command(TyperCommand):
    """A command that says which option was probably meant, and remembers what was typed."""

    def invoke(self, ctx: Any) -> Any:  # Any: the context's own class is not public
        """Invoke a command; the typed words are kept for the advice in errors."""
        token = TYPED.set(ctx.params)
        if self.name not in WITHOUT_TORCH:
            import_torch()
        try:
            return super().invoke(ctx)
        finally:
            TYPED.reset(token)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # Any: the context's own class is not public
        """Parse the arguments; an error suggests one option, not all that look a little alike."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # the class of a wrong option is Typer's own, and not public; it goes on from here
            wrong = getattr(error, "option_name", None)
            if wrong is not None and hasattr(error, "possibilities") and hasattr(error, "message"):  # no such option
                error.possibilities = None
                error.message = f"No such option {wrong!r}. {self._meant(wrong).capitalize()}".strip()
            raise

    def _meant(self, wrong: str) -> str:
        """The likely meaning of an option that does not exist: an argument of that name, or the nearest option."""
        arguments = [one.name for one in self.params if one.param_type_name == "argument"]
        name = wrong.lstrip("-").replace("-", "_")
        name = OTHER_WORDS.get(name, name)
        if name in arguments:
            return f"the {name} is the {ORDINALS[arguments.index(name)]} argument: it has no option"
        return nearest(wrong, [one for parameter in self.params for one in parameter.opts])


OTHER_WORDS = {
    "output": "destination", "out": "destination", "o": "destination", "dest": "destination", "save_to": "destination",
    "checkpoint": "source", "input": "source", "model": "source", "src": "source", "i": "source",
}  # fmt: skip
"""Other words for arguments, which some programs have as options."""

ORDINALS = ("first", "second", "third", "fourth")

START, LOOK, MOVE, MORE = "Start here", "Look", "Move", "More"
GROUPS = (START, LOOK, MOVE, MORE)


class Entry(NamedTuple):
    """A command: its group in the help, its function in the file of its name, and its line in the list."""

    group: str
    function: str
    short_help: str


COMMANDS = {
    "suggest": Entry(START, "suggest", "Find the table for your own module, and verify it."),
    "verify": Entry(START, "verify", "Check that your model computes what the original does."),
    "load": Entry(START, "load", "Load a checkpoint into a module."),
    "export": Entry(START, "export", "Load a checkpoint and export it for transformers."),
    "inspect": Entry(LOOK, "inspect", "List a checkpoint's names, shapes and dtypes."),
    "attention": Entry(LOOK, "attention", "Show what each head attends to in a text."),
    "fill-mask": Entry(LOOK, "fill_mask", "Fill in masked words."),
    "next-sentence": Entry(LOOK, "next_sentence", "Predict whether one sentence follows another."),
    "generate": Entry(LOOK, "generate", "Continue a text, or list the likeliest next tokens."),
    "classify": Entry(LOOK, "classify", "Classify a text."),
    "translate": Entry(LOOK, "translate", "Translate a text with an encoder-decoder."),
    "convert": Entry(MOVE, "convert", "Convert a checkpoint of any size, in fixed memory."),
    "diff": Entry(MOVE, "diff", "Compare two checkpoints value by value."),
    "hash": Entry(MOVE, "hash_", "Compute one digest of a checkpoint's values."),
    "verify-files": Entry(MOVE, "verify_files", "Check the files that convert wrote."),
    "check": Entry(MORE, "check", "Check that table, checkpoint and module agree."),
    "tables": Entry(MORE, "tables", "List the bundled tables, or print one."),
    "explain": Entry(MORE, "explain", "Explain an error code and how to fix it."),
    "record": Entry(MORE, "record", "Record a reference's activations, to verify without it."),
    "mutate": Entry(MORE, "mutate", "Find the mistakes that your own tests would miss."),
    "report-bug": Entry(MORE, "report_bug", "Prepare a bug report; nothing is sent."),
}
"""The commands, by name."""


WITHOUT_TORCH = {"inspect", "hash", "verify-files", "tables", "explain", "report-bug"}
"""Commands that make no tensor."""


def import_torch() -> None:
    """Import torch without garbage collection, which would take a tenth of the time and find nothing."""
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        import torch  # noqa: F401  # the commands import it again
    finally:
        gc.enable()
    gc.freeze()  # what is imported stays, and need not be searched later


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # it takes longer to import than many a command takes

        typer.echo(f"porting {version('porting')}")
        raise typer.Exit


def describe(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Load pretrained weights into a transformer that you wrote, and verify that it computes the same.

    A checkpoint is a directory, a weight file or a model on the hub. Without a checkpoint argument, the bundled
    demo checkpoint is used. Models on the hub are downloaded by huggingface_hub, with its cache, its token and
    HF_HUB_OFFLINE=1. Exit codes: 0 done, or faithful; 1 a difference was found; 2 wrong use; 3 an error in porting.

    \b
    Begin with:
      porting suggest --into my_model.py:build
      porting verify
      porting inspect ./my-checkpoint
      porting tables
    """


def build_app(only: str | None = None) -> typer.Typer:
    """The command line, of all commands or of the one that will be run: the others need not be imported."""
    made = typer.Typer(
        name="porting",
        cls=Commands,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,  # help and wrong usage as plain text, the same on a terminal and in a pipe
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(describe)
    for name in COMMANDS if only is None else (only,):
        entry = COMMANDS[name]
        function = getattr(import_module(f"porting.cli.{name.replace('-', '_')}"), entry.function)
        add = made.command(name, cls=Command, short_help=entry.short_help, rich_help_panel=entry.group)
        add(options.spread(function))
    return made


if TYPE_CHECKING:
    app: typer.Typer


def __getattr__(name: str) -> object:
    """``app`` is made when it is asked for: :func:`main` needs one command of it only."""
    if name != "app":
        raise AttributeError(name)
    globals()["app"] = made = build_app()
    return made


def main() -> None:
    """Run the command line; never returns."""
    sys.stdout, sys.stderr = output(sys.stdout), errors(sys.stderr)
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # read when huggingface_hub is imported; our line says the same
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        _check_environment()
        word = next(iter(sys.argv[1:]), None)
        build_app(word if word in COMMANDS else None)(prog_name="porting")
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        if _is_own_exit(error):
            if isinstance(error.__context__, BrokenPipeError):  # Typer's own code for it is that of a difference
                sys.exit(BROKEN_PIPE)
            raise
        sys.stderr.write(f"error: {safe(ended_by(error))}\n")
        sys.exit(WRONG)
    except BaseException as error:  # noqa: BLE001  # libraries raise such that are no Exception
        line, code = _last_words(error)
        sys.stderr.write(f"error: {safe(line)}\n")
        sys.exit(code)
    finally:
        _let_go(sys.stdout)


def _last_words(error: BaseException) -> tuple[str, int]:
    """The line about an error that no command expected, and the exit code."""
    short = shortage(error) or (str(error) if isinstance(error, PortingError) else _failed_import(error))
    if short:
        return short, WRONG
    try:
        from porting.cli.report_bug import unexpected

        return str(unexpected(error)), UNEXPECTED
    except Exception as second:  # noqa: BLE001  # nothing can be imported or written any more, as without memory
        short = shortage(second)
        return short or told(error), WRONG if short else UNEXPECTED


def _failed_import(error: BaseException) -> str:
    """The line about a library that cannot be imported; empty if the error came about otherwise.

    Libraries read their own variables of the environment then, and raise anything about a value that they do not take.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    names = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames]
    last = max((number for number, name in enumerate(names) if name == "porting"), default=len(frames))
    for frame, name in zip(frames[last + 1 :], names[last + 1 :], strict=True):
        if frame.f_code.co_name == "<module>" and not FINDER.raised(error):
            hint = "check its installation, and the variables that it reads: HF_ENDPOINT, TORCH_LOGS, PYTHONOPTIMIZE, …"
            return f"importing {name} failed: {told(error)} ({hint})"
    return ""


def _is_own_exit(error: SystemExit) -> bool:
    """Whether the command line itself ends the program, and not a library that it imports."""
    (*_, (frame, _)) = walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).partition(".")[0] in {"typer", "click", "porting"}


TERMINAL = ("COLUMNS", "LINES", "JUPYTER_COLUMNS", "JUPYTER_LINES")
NUMBERS = ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT")
"""Variables that libraries read as whole numbers: those of the terminal's size, and others."""


def _check_environment() -> None:
    """Ignore terminal sizes that are not numbers, and require that the other variables are numbers."""
    wrong = [name for name in (*TERMINAL, *NUMBERS) if not re.fullmatch("[0-9]{1,5}", os.environ.get(name, "0"))]
    faults = []
    for name in wrong:
        value = os.environ.pop(name) if name in TERMINAL else os.environ[name]
        message = f"{value[:80]!r} in the environment, expected a whole number of at most five digits"
        fault = Fault(code=Code.OPTION_REFUSED, where=name, message=message, hint=f"run `unset {name}`")
        faults += [fault] if name in NUMBERS else []
    if faults:
        raise PortingError(faults)


def _let_go(stream: TextIO) -> None:
    """Discard output that cannot be written: some Pythons try once more at exit and print a traceback."""
    try:
        stream.flush()
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
