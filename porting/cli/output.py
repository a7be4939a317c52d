"""The output of commands, on a terminal, into a pipe or as JSON, and the reporting of errors.

Results go to standard output, errors, warnings and progress to standard error.  Into a pipe goes the same text without
colours and bars, one row a line however long; ``--json`` gives one JSON document and nothing else.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from threading import Timer, current_thread, main_thread
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, TextIO

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as Grid
from rich.text import Text

from porting.cli.options import flags, misnamed, source_argument
from porting.cli.streams import OutputError
from porting.errors import Code, Fault, PortingError, command_text
from porting.frames import users_line
from porting.limits import LimitError, spending, watched
from porting.printable import counted, safe, safe_lines, shell_word, shortened, told
from porting.users_code import FINDER

if TYPE_CHECKING:
    from porting.answers import Answer

DIFFERENT = 1
"""Exit code: everything worked, and a difference was found."""

WRONG = 2
"""Exit code: what was asked for cannot be done."""

UNEXPECTED = 3
"""Exit code: porting itself has a fault."""

SIGNALLED = 128
"""Exit code of a process that a signal ended, less the number of the signal, by the shells' convention."""

INTERRUPTED, BROKEN_PIPE = SIGNALLED + signal.SIGINT, SIGNALLED + signal.SIGPIPE


class Ended(KeyboardInterrupt):
    """A signal asks the command to end; what it has begun is cleaned up as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


AGAIN = 0.05
"""Seconds until a signal is sent again that a finalizer swallowed."""


@contextmanager
def endable() -> Iterator[None]:
    """Raise :class:`Ended` on SIGTERM and SIGHUP, unless the program handles or ignores them; the first one counts.

    What a signal raises, Ctrl-C too, is lost where a finalizer runs just then: the signal is sent again.
    """
    if current_thread() is not main_thread():
        yield
        return
    taken = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    hook, timers = sys.unraisablehook, list[Timer]()

    def end(number: int, frame: object) -> None:
        handle(signal.SIG_IGN)
        raise Ended(number)

    def handle(handler: Callable[[int, object], None] | signal.Handlers) -> None:
        for one in taken:
            signal.signal(one, handler)

    def unraisable(args: sys.UnraisableHookArgs) -> None:
        if not issubclass(args.exc_type, KeyboardInterrupt):
            hook(args)
            return
        number = args.exc_value.number if isinstance(args.exc_value, Ended) else signal.SIGINT
        handle(end)
        timers.append(Timer(AGAIN, os.kill, (os.getpid(), number)))
        timers[-1].daemon = True
        timers[-1].start()

    handle(end)
    sys.unraisablehook = unraisable
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for timer in timers:
            timer.cancel()
        handle(signal.SIG_DFL)


PIPE_WIDTH = 100_000
"""Columns where the output is not a terminal: no row is folded there."""

TYPED: ContextVar[Mapping[str, object]] = ContextVar("TYPED", default=MappingProxyType({}))
"""The arguments and options of the command that runs, for the advice at its end."""

Tell = Callable[[str, int, int], None]
"""Called with what is being done, how many steps are done, and how many there are (0 if unknown)."""


def console(stream: TextIO) -> Console:
    """A console on ``stream``; plain, and as wide as it takes, when that is not a terminal."""
    terminal = stream.isatty()
    return Console(
        file=stream,
        force_terminal=terminal,
        color_system="auto" if terminal else None,
        width=None if terminal else PIPE_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )


MOST_ROWS, MOST_CHARACTERS = 5_000, 1_000_000
"""Rows of a table that are drawn, and characters in them, with those that pad each column to its width."""

LONGEST = 1_000
"""Characters of a cell, or of a part of a line, that are drawn."""

LONGEST_TEXT = 20_000
"""The same of what a model wrote, and of a command to type."""


SHORTAGES = {
    r"(?i)(cannot|can't|could not|not enough|out of|insufficient) (allocate )?memory|failed to map segment": (
        "there is not enough memory for this"
    ),
    r"can't start new thread|Resource temporarily unavailable": "no other thread or process can be started",
    r"(?i)too many open files": "too many files are open at once: raise the limit (`ulimit -n`)",
}
"""How libraries say that something is short, and the line about it."""


FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""The errors of a full disk."""


def shortage(error: BaseException) -> str:
    """The resource that ran out, if that is why the error was raised; else an empty text."""
    if isinstance(error, MemoryError):
        return "there is not enough memory for this"
    if not isinstance(error, OSError | RuntimeError | ImportError):
        return ""
    if isinstance(error, OutputError):
        return str(error)
    if isinstance(error, OSError) and error.errno in FULL:
        return _failure(error)
    text = " ".join(part for part in error.args if isinstance(part, str))
    return next((line for pattern, line in SHORTAGES.items() if re.search(pattern, text)), "")


TRY = {
    errno.EIO: "a disk or its connection failed: see `dmesg`",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space: `quota -s` shows your quota",
    errno.EFBIG: "run `ulimit -f`: the largest file that may be written",
    errno.EROFS: "choose a place that can be written to",
    errno.EINTR: "run the same command again",
}
"""The advice for an error of the system; for other errors, the permissions of the file may say more."""


def _failure(error: OSError) -> str:
    """The system's message about a failed call, between the file and what to do.

    Where the system names no file, those that were typed are named: it is one of them, or lies in one.
    """
    named = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    typed = [str(value) for value in TYPED.get().values() if isinstance(value, str | Path)]
    files = named or [name for name in typed if os.path.lexists(name)]
    place = " or ".join(dict.fromkeys(files)) or "a file that the command reads or writes"
    look = f"look at it with `ls -ld {' '.join(map(shell_word, files))}`" if files else "run it again"
    return f"{place}: {error.strerror or error} ({TRY.get(error.errno or 0, look)})"


def ended_by(error: SystemExit) -> str:
    """Which code ended the program: a module that was imported for the command, or a library that it uses."""
    subject = "the imported module" if FINDER.raised(error) else "code that this command runs"
    given: object = error.code  # typed as what it should be
    code = repr(given) if given is None or isinstance(given, int | str) else f"a {type(given).__name__}"
    return f"{subject} ended the program (sys.exit({code[:LONGEST]}) at {users_line(error)})"


class Screen(AbstractContextManager["Screen"]):
    """The output streams of one command.

    Used as a context: an error that the user can do something about becomes lines on standard error and the exit code
    :data:`WRONG`; warnings become lines there as well, and so does what imported modules print.  Where standard output
    cannot be written, the work goes on, and the command fails at its end: it says what it has made.

    Args:
        as_json: one JSON document takes the place of everything on standard output.
        lines: several documents do, events, each on a line of its own.
    """

    def __init__(self, command: str, *, as_json: bool = False, lines: bool = False) -> None:
        self.command = command
        self.as_json = as_json
        self.lines = lines
        self.silent = False
        self.out = console(sys.stdout)
        self.err = console(sys.stderr)
        self._borrowed = ExitStack()
        self._bar: Progress | None = None
        self._made: list[str] = []
        self._lost: OSError | None = None

    def __enter__(self) -> Screen:
        self._borrowed.enter_context(redirect_stdout(sys.stderr))
        self._borrowed.enter_context(endable())
        try:
            self._borrowed.enter_context(spending())
            self._borrowed.enter_context(watched())
        except LimitError as error:
            self._borrowed.close()
            self._refuse([fault.line for fault in error.faults], error.faults)
        self._borrowed.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = self._show_warning
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._borrowed.close()
        if self._lost is not None and (error is None or isinstance(error, typer.Exit)):
            made = f"; {self._complete}" if self._made else ""
            self._aside("error", f"{OutputError(self._lost.errno, self._lost.strerror)}{made}", "bold red")
            raise typer.Exit(WRONG) from self._lost
        match error:
            case PortingError():
                self._refuse([fault.line for fault in error.faults], error.faults)
            case Ended():
                self.err.print(f"ended by {signal.Signals(error.number).name}", style="red")
                raise typer.Exit(SIGNALLED + error.number) from error
            case KeyboardInterrupt():
                self.err.print("interrupted", style="red")
                raise typer.Exit(INTERRUPTED) from error
            case BrokenPipeError() if not FINDER.raised(error):
                raise typer.Exit(BROKEN_PIPE) from error
            case BaseException() if short := shortage(error):
                self._refuse([short])
            case Exception() if FINDER.raised(error):  # whatever failed there is no file of this command
                self._refuse([f"the imported module raised {told(error)} (at {users_line(error)})"])
            case OSError():
                self._refuse([_failure(error)])
            case SystemExit():
                self._refuse([ended_by(error)])
            case BaseException() if FINDER.raised(error):
                self._refuse([f"the imported module raised {told(error)} (at {users_line(error)})"])

    def _refuse(self, lines: Sequence[str], faults: Sequence[Fault] = ()) -> None:
        typed = TYPED.get()
        if into := misnamed(typed.get("into"), faults):
            faults, lines = [*faults, into], [*lines, into.line]
        fields = [_fields(fault) for fault in faults]
        failed = {"event": "failed"} if self.lines else {}
        self.document({**failed, "faults": fields or [{"message": line} for line in lines]})
        for line in lines if typed.get("verbose") or not faults else _in_brief(faults, "verbose" in typed):
            self._aside("error", line, "bold red")
        if self._made:
            self._aside("note", self._complete, "dim")
        words = next_command(self.command, typed, faults)
        self._aside("next", shlex.join(["porting", *words]), "dim")
        raise typer.Exit(WRONG)

    @property
    def _complete(self) -> str:
        """What was written completely, in words."""
        made = ", ".join(self._made)
        return f"{made} is complete" if len(self._made) == 1 else f"complete are {made}"

    def made(self, path: Path | str) -> None:
        """Note a file that was written completely, in case the command fails after that."""
        self._made.append(str(path))

    def _show_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = message.args[0] if isinstance(message, Warning) and message.args else message
        self.warn(text if isinstance(text, str) else str(message))

    def _aside(self, word: str, line: str, style: str) -> None:
        self.err.print(Text.assemble((f"{word}: ", style), safe(command_text(line))), soft_wrap=True)

    def warn(self, message: str) -> None:
        """Print a warning on standard error: the result is valid, but the user should know this."""
        if not self.silent:
            self._aside("warning", message, "yellow")

    def note(self, line: str) -> None:
        """A line on standard error that says how far something has come."""
        if not self.silent:
            self.err.print(Text(safe(line)), soft_wrap=True)

    def show(self, *renderables: RenderableType, soft_wrap: bool = False) -> None:
        """Anything that rich can draw."""
        if self.as_json or self._lost is not None:  # rich flushes what could not be written before
            return
        with self.out.capture() as captured:
            self.out.print(*renderables, sep="\n", soft_wrap=soft_wrap)
        drawn = _STYLE.sub(lambda found: found[1] or safe_lines(found[2]), captured.get())
        if not self.out.is_terminal:  # columns are padded to their width, the last one too
            drawn = "".join(f"{line.rstrip()}\n" for line in drawn.splitlines())
        self._write(drawn)

    def _write(self, content: str) -> None:
        """Write a part of the result, unless another process says the same."""
        if self.silent or self._lost is not None:
            return
        try:
            self.out.file.write(content)
            self.out.file.flush()  # so that a reader that is gone, or a disk that is full, is noticed here
        except BrokenPipeError:
            raise
        except OSError as error:
            self._lost = error

    def line(self, *parts: str | tuple[str, str], most: int = LONGEST) -> None:
        """A line of the result, of texts and of texts with their style, each of at most so many characters."""
        styled = [(part, "") if isinstance(part, str) else part for part in parts]
        self.show(Text.assemble(*((safe(shortened(text, most)), style) for text, style in styled)), soft_wrap=True)

    def rows(self, titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
        """A table; the columns titled as in ``right`` are set to the right.  Titles may be empty.

        Of more rows than anybody reads the first are drawn: laying out each costs as much as reading a page of names.
        """
        grid = Grid(box=None, pad_edge=False, header_style="bold", show_header=any(titles))
        for title in titles:
            grid.add_column(title, justify="right" if title in right else "left", overflow="fold")
        drawn, widths = 0, [len(title) for title in titles]
        for row in rows[:MOST_ROWS]:
            cells = [safe(shortened(cell, LONGEST)) for cell in row]
            widths = [max(width, len(cell)) for width, cell in zip(widths, cells, strict=True)]
            if drawn and (drawn + 1) * sum(widths) > MOST_CHARACTERS:
                break
            grid.add_row(*map(Text, cells))
            drawn += 1
        self.show(grid)
        if drawn < len(rows):
            self.line(f"and {len(rows) - drawn:,} more rows")

    def facts(self, facts: Mapping[str, str]) -> None:
        """Names and values, one pair a line; empty values are left out."""
        self.rows(["", ""], [(name, value) for name, value in facts.items() if value])

    def document(self, content: object) -> None:
        """The JSON document, where one was asked for; ``content`` may be a function that makes it."""
        if self.as_json:
            content = content() if callable(content) else content
            indent = None if self.lines else 2
            self._write(json.dumps(_strict(content), indent=indent, allow_nan=False) + "\n")

    def text(self, content: str) -> None:
        """A document of another kind, written as it is: nothing else goes to standard output beside it."""
        self._write(content)

    def next(self, *words: str, aside: bool = False) -> None:
        """The last line: the command to type next; ``aside`` puts it on standard error, beside a document."""
        command = shlex.join(["porting", *words])
        if self.as_json:
            return
        if aside:
            self._aside("next", command, "dim")
        else:
            self.line(("next: ", "dim"), command, most=LONGEST_TEXT)

    def page(self, answer: Answer, path: Path | None) -> None:
        """Write an answer's page, where one was asked for, and say so."""
        if path is not None:
            answer.save(path)
            self.made(path)
            self.line(f"written: {path}")

    @property
    def animated(self) -> bool:
        """Whether a progress bar can be drawn on standard error."""
        return self.err.is_terminal and not self.err.is_dumb_terminal

    @contextmanager
    def working(self, title: str, limit: float | None = None) -> Iterator[Tell]:
        """A progress bar, of work that takes ``limit`` seconds at most; nothing where none can be drawn."""
        if not self.animated:
            yield lambda what, done, total: None
            return
        columns: list[ProgressColumn] = [
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
        ]
        columns += [TextColumn(f"of {timedelta(seconds=int(limit))} at most", style="dim")] if limit else []
        with Progress(*columns, console=self.err, transient=True) as bar:
            task = bar.add_task(title, total=None)

            def tell(what: str, done: int, total: int) -> None:
                count = f" {done} of {total}" if limit and total else ""
                bar.update(task, description=f"{title}: {safe(what)}{count}", completed=done, total=total or None)

            self._bar = bar
            try:
                yield tell
            finally:
                self._bar = None

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Take the progress bar away while something is asked."""
        bar = self._bar
        if bar is None:
            yield
            return
        bar.stop()
        try:
            yield
        finally:
            bar.start()


_STYLE = re.compile(r"(\x1b\[[0-9;]*m)|([^\x1b]+|\x1b)")
"""A code that sets a colour, or the text between such codes."""


MOST_FAULTS, OF_EACH = 8, 3
"""The most faults shown without --verbose; of more, those with hints of their own, or this many of each kind."""


def _in_brief(faults: Sequence[Fault], verbose: bool) -> list[str]:
    """The lines of faults; of many that have the same hint the first, and of very many the first of each kind."""
    if len(faults) <= MOST_FAULTS:
        return [fault.line for fault in faults]
    alike: dict[Code, dict[str, list[Fault]]] = {}
    for number, fault in enumerate(faults):
        hints = alike.setdefault(fault.code, {})
        hints.setdefault(fault.hint or str(number), []).append(fault)
    many = sum(map(len, alike.values())) > MOST_FAULTS + OF_EACH
    lines: list[str] = []
    for code, hints in alike.items():
        shown = [some[0] for some in hints.values()][: OF_EACH if many else None]
        left = sum(map(len, hints.values())) - len(shown)
        lines += [fault.line for fault in shown]
        lines += [f"and {counted(left, 'more fault')} of this kind [{code}]"] if left else []
    left = len(faults) > len(lines)
    return [*lines, f"{len(faults)} faults; {'--verbose' if verbose else '--json'} lists all"] if left else lines


def _fields(fault: Fault) -> dict[str, str]:
    return {"code": fault.code.value, "where": fault.where, "message": fault.message, "hint": fault.hint}


def _strict(content: object) -> object:
    """The same in what JSON knows: a number that is none (NaN, an infinity) becomes its name."""
    match content:
        case Mapping():
            return {str(key): _strict(value) for key, value in content.items()}
        case list() | tuple():
            return [_strict(value) for value in content]
        case float() if not math.isfinite(content):
            return str(content)
        case str():
            return command_text(content)
        case int() | float() | None:
            return content
    return str(content)


def free(name: str, ending: str = "") -> str:
    """A path in the current folder at which nothing stands: the name, or else the name with a number."""
    names = (f"{name}{number}{ending}" for number in ("", *(f"-{count}" for count in range(2, 100))))
    return f"./{next((one for one in names if not Path(one).exists()), name + ending)}"


def size(nbytes: int) -> str:
    """Bytes for a reader, in powers of 1000.

    >>> size(438_012_345), size(999)
    ('438 MB', '999 B')
    """
    amount = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 999.5 or unit == "TB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if amount >= 99.5 or unit == "B" else f"{amount:.3g} {unit}"


MOST_FILES = 8
"""The most file names on a line; the rest is counted."""


def file_list(names: Iterable[str]) -> str:
    """Names of files on one line; those that differ only in numbers as one pattern.

    >>> file_list([f"model-{number:05}-of-00158.safetensors" for number in range(1, 159)])
    'model-{00001..00158}-of-00158.safetensors (158 files)'
    """
    from porting.checkpoint.inspect import group_names

    groups = [f"{name} ({count:,} files)" if count > 1 else name for name, count in group_names(names).items()]
    more = [f"{len(groups) - MOST_FILES:,} more names"] if len(groups) > MOST_FILES else []
    return ", ".join([*groups[:MOST_FILES], *more])


MOST_CODES = 3
"""The most kinds of fault that are explained at once."""


def next_command(command: str, typed: Mapping[str, object], faults: Sequence[Fault]) -> list[str]:
    """The words that follow ``porting``."""
    codes = list(dict.fromkeys(fault.code for fault in faults))
    source, into = typed.get("source"), typed.get("into")
    if {Code.NO_TABLE, Code.UNKNOWN_ARCHITECTURE} & set(codes) and into is not None and typed.get("table") is None:
        return ["suggest", *source_argument(source if isinstance(source, str) else None), *flags(into=into)]
    if Code.UNKNOWN_ARCHITECTURE in codes or Code.NO_TABLE in codes:
        return ["tables"]
    return ["explain", *codes[:MOST_CODES]] if codes else [command, "--help"]
