"""A fault of the program itself: what is recorded when one happens, and ``report-bug``, which prepares what to send.

What :func:`unexpected` records stays on the user's machine and is complete: the command as it was typed, and the
traceback.  What ``report-bug`` writes is meant for strangers: paths, names and code of the user's own are left out, and
each is replaced by the same placeholder wherever it stands.  Nothing is sent: whoever sends the file sees it first.
"""

from __future__ import annotations

import ast
import getpass
import os
import platform
import re
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from porting.checkpoint.names import COMPANIONS
from porting.cli import options
from porting.cli.output import Screen, free
from porting.errors import CheckpointError, Code, Fault
from porting.opening import Folder
from porting.printable import counted, package_versions, safe, safe_lines, told

PACKAGES = ("porting", "torch", "transformers", "safetensors", "huggingface_hub", "tokenizers", "numpy", "typer")
SETTINGS = ("PORTING_LIMITS", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "PYTORCH_ENABLE_MPS_FALLBACK")
"""Variables of the environment that change what is computed, and whose values say nothing about their user."""

PREFIX = "porting-report-"
"""How the names of the files begin that are recorded in the folder for temporary files."""

MOST_BYTES = 1 << 20
"""A record is 200 frames at most, so that a larger file is none."""


def unexpected(error: BaseException) -> Fault:
    """The fault for an exception that the library did not raise on purpose; records what happened in a file."""
    try:
        path = _record(error)
    except OSError as failed:
        hint = f"this is a fault of porting, and it could not be recorded: {failed.strerror or failed}"
    else:
        hint = f"this is a fault of porting, recorded in {path}: porting report-bug prepares what to send"
    return Fault(code=Code.UNEXPECTED, message=told(error), hint=hint)


def _record(error: BaseException) -> str:
    """Write what was typed, on which versions, and where it stopped; returns the file, which only its user can read."""
    lines = [f"{name} {found}" for name, found in package_versions(PACKAGES).items()]
    lines += [f"python {platform.python_version()} on {platform.platform()}", f"typed: {sys.argv!r}", ""]
    lines += "".join(traceback.format_exception(error, limit=-200)).splitlines()
    descriptor, path = tempfile.mkstemp(prefix=PREFIX, suffix=".txt")
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write("\n".join(lines))
    return path


ENDINGS = r"\.(?:bin|ckpt|gguf|h5|hdf5|html|index|json|msgpack|npz|ocdbt|onnx|png|pt|pth|py|safetensors|toml)"
"""Kinds of files: which kind it is helps, and says nothing about whose it is."""

LONG, SHORT = (
    re.compile(r"(?P<option>--[a-z][a-z-]*)(?:=(?P<value>.*))?", re.DOTALL),
    re.compile(r"(?P<option>-[A-Za-z])(?P<value>.*)", re.DOTALL),
)
"""Words of a command line that are options, with their values: ``--dtype=float32``, ``-otable.toml``."""

NUMBER = re.compile(r"-?[\d.,]*")

SECRET, SHORTEST_SECRET = re.compile("TOKEN|SECRET|PASSWORD|_KEY"), 8
"""Names of variables of the environment whose values are secret, and the fewest characters of one that is."""

URL, TOKEN = r"[a-z][a-z0-9+.-]*://[^\s'\"<>]+", r"(?<!\w)hf_\w{8,}"
"""Addresses, which may hold passwords, and tokens of the hub."""

QUOTED_PATH = r"""(?<=['"])(?!\s)[^'"\n]*(?:/[^'"\n]*|{ENDINGS})(?<!\s)(?=['"])""".replace("{ENDINGS}", ENDINGS)
PATH = (
    r"""(?<![\w.<>/])(?!\d+/\d+\b)(?:(?:~|\.{1,2})?/[^\s'",:;()\[\]{}<>]+|[\w.@+-]+"""
    rf"(?:(?:/[\w.@+-]+)+/?|{ENDINGS}(?!\w)))"
)
"""A path in a text, relative ones and names of files too; a quoted one may have spaces."""

USUAL = re.compile(r"(?:pytorch_)?model(?:-\d{5}-of-\d{5})?\.(?:bin|safetensors)(?:\.index\.json)?|[a-z_]*config\.json")
"""Names that files of checkpoints have whoever made them, besides those of :data:`COMPANIONS`."""

FRAME = re.compile(r'(?P<before>[ |+]*File )"(?P<file>[^"]*)", line (?P<line>\d+)(?:, in (?P<name>.*))?')
LIBRARY = re.compile(r"^.*/(?:site-packages|dist-packages|lib/python3\.\d+)/")


@dataclass
class Shortened:
    """Texts without what may be private: ``<path 1>``, ``<word 2>``; the same thing has the same number everywhere.

    Attributes:
        known: words that stay: commands, options, names that the library itself gives.
        replaced: what was left out, and what stands in its place; never written to a file.
        frames: places of the user's own code in a traceback, whose lines are left out.
    """

    known: Collection[str] = ()
    replaced: dict[str, str] = field(default_factory=dict)
    frames: int = 0

    def __post_init__(self) -> None:
        for kind, found in (("user", _user()), ("host", platform.node())):
            if len(found) > 2 and found not in {"root", "localhost", *self.known}:
                self.replaced[found] = f"<{kind}>"
        for name, found in os.environ.items():
            if SECRET.search(name) and len(found) >= SHORTEST_SECRET:
                self.replaced[found] = "<secret>"

    def words(self, words: Sequence[str]) -> list[str]:
        """The words of a command line: behind a ``--`` there are no options."""
        end = words.index("--") if "--" in words else len(words)
        return [*map(self.word, words[:end]), *words[end : end + 1], *map(self._value, words[end + 1 :])]

    def word(self, word: str) -> str:
        """One word of a command line: an option, with or without its value, or a value."""
        if found := LONG.fullmatch(word):
            return found["option"] if found["value"] is None else f"{found['option']}={self._value(found['value'])}"
        if (found := SHORT.fullmatch(word)) and not NUMBER.fullmatch(word):
            return found["option"] + (self._value(found["value"]) if found["value"] else "")
        return self._value(word)

    def _value(self, word: str) -> str:
        if word in self.known or NUMBER.fullmatch(word):
            return word
        place, colon, name = word.rpartition(":")
        if colon and place:
            return f"{self._value(place)}:{self._placeholder(name, 'word')}"
        return self._placeholder(word, "path" if "/" in word or re.search(f"{ENDINGS}$", word) else "word")

    def text(self, text: str) -> str:
        """Any text: what was replaced before, and every path that is not of an installed package."""
        known = [re.escape(found) for found in sorted(self.replaced, key=len, reverse=True) if len(found) > 2]
        inside = rf"(?<![\w-])(?:{'|'.join(known)})(?![\w-])(?:/[^\s'\",:;]*)?" if known else "(?!)"
        anything = f"(?P<url>{URL})|(?P<secret>{TOKEN})|(?P<path>{QUOTED_PATH}|{inside}|{PATH})"
        return re.sub(anything, self._replacement, text)

    def _replacement(self, found: re.Match[str]) -> str:
        """What stands in the place of an address, a secret, a path or a word that was replaced before."""
        if found[0] in self.replaced:
            return self.replaced[found[0]]
        if found["secret"] is not None:
            return "<secret>"
        return self._placeholder(found[0], "url") if found["url"] is not None else self._place(found[0])

    def traceback(self, text: str) -> str:
        """A traceback: frames of installed packages as they are, those of other files as their line number alone."""
        lines: list[str] = []
        inside, own = False, False  # of a frame's lines of code; of a file of the user's own
        for line in text.splitlines():
            if found := FRAME.match(line):
                inside, own = True, not found["file"].startswith((str(Path(__file__).parents[1]), "<"))
                own = own and LIBRARY.match(found["file"]) is None  # neither of an installed library
                self.frames += own
                name = f", in {found['name']}" if found["name"] and not own else ""
                lines.append(f'{found["before"]}"{self._place(found["file"])}", line {found["line"]}{name}')
                continue
            inside = inside and re.sub(r"^ *\|", "", line).startswith("    ")  # a bar: of an exception group
            if not inside:
                lines.append(self.text(line))
            elif not own:
                lines.append(line)
        return "\n".join(lines)

    def _place(self, path: str) -> str:
        """A path: from the package on where it is installed, and a placeholder elsewhere."""
        here = str(Path(__file__).parents[1])
        if path.startswith(here):
            return f"porting{path.removeprefix(here)}"
        if LIBRARY.match(path):
            return LIBRARY.sub("", path)
        usual = path.startswith("<") or path in COMPANIONS or USUAL.fullmatch(path)
        return path if usual else self._placeholder(path, "path")

    def _placeholder(self, found: str, kind: str) -> str:
        if found not in self.replaced:
            ending = re.search(f"{ENDINGS}$", found)
            number = 1 + sum(one.startswith(f"<{kind} ") for one in self.replaced.values())
            self.replaced[found] = f"<{kind} {number}>{ending[0] if ending else ''}"
        return self.replaced[found]

    def __str__(self) -> str:
        kinds = {
            kind: sum(one.startswith(f"<{kind} ") for one in self.replaced.values()) for kind in ("path", "word", "url")
        }
        parts = [counted(number, kind) for kind, number in kinds.items() if number]
        return ", ".join([*parts, *([f"the code of {counted(self.frames, 'frame')}"] if self.frames else [])])


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a user without a name, as in some containers
        return ""


@dataclass(frozen=True, kw_only=True)
class Crash:
    """The parts of a recorded error that are put into a bug report.

    Attributes:
        when: UTC.
        stopped: the exception's own line, the last of the traceback.
    """

    when: str
    typed: str
    stopped: str
    text: str


RECORD = re.compile(r"porting \S[^\n]*\n(?:[\w-]+ [^\n]*\n)*python \d[^\n]* on [^\n]*\ntyped: \[[^\n]*\]\n\n")
"""How a record begins: the versions, the system and what was typed, as :func:`_record` writes them."""


def _text(place: Folder, name: str) -> str:
    """The text of a file that may be a record."""
    return place.read(name, limit=MOST_BYTES).decode("utf-8", "replace")


def last_record(folder: Path) -> Path | None:
    """The newest record of the user in a folder that others may write to; None where there is none."""
    place = Folder(folder)
    found: list[tuple[float, str]] = []
    for name in place.names():
        if name.startswith(PREFIX) and place.kind(name) == "a file":
            status = place.status(name)
            if status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                found.append((status.st_mtime, name))
    for _, name in sorted(found, reverse=True):
        with suppress(CheckpointError):
            if RECORD.match(_text(place, name)):
                return folder / name
    return None


def read_record(path: Path, shortened: Shortened) -> Crash:
    """Read the parts of a recorded error that may be put into a bug report."""
    place = Folder(path.parent)
    text = _text(place, path.name)
    if not RECORD.match(text):
        message = "this is not an error that porting recorded"
        hint = f"pass a file named {PREFIX}….txt, which an unexpected error names, or leave --record out"
        raise CheckpointError(Fault(code=Code.RECORD_INVALID, where=str(path), message=message, hint=hint))
    head, _, trace = text.partition("\n\n")
    lines = []
    typed = ""
    for line in head.splitlines():
        if line.startswith("typed: "):
            typed = _command(line.removeprefix("typed: "), shortened)
            lines.append(f"typed: {typed}")
        else:
            lines.append(shortened.text(line))
    trace = shortened.traceback(trace)
    stopped = next((line for line in reversed(trace.splitlines()) if line and not line.startswith(" ")), "")
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(place.status(path.name).st_mtime))
    return Crash(when=when, typed=typed, stopped=stopped, text="\n".join([*lines, "", trace]))


def _command(argv: str, shortened: Shortened) -> str:
    try:
        words = [str(one) for one in ast.literal_eval(argv)]
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return "(it cannot be read)"
    return " ".join(["porting", *shortened.words(words[1:])])


def _known(group: object) -> set[str]:
    """Words of a command line that the library itself made up."""
    from porting.tables import shipped

    commands = getattr(group, "commands", {})
    return {*commands, *(one.value for one in options.DType), *(path.stem for path in shipped())}


Record = Annotated[
    Path | None,
    typer.Option("--record", metavar="FILE", help="The recorded error.", show_default="the last one"),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="The file to write.", show_default="./porting-bug-report.md"),
]


def report_bug(context: typer.Context, record: Record = None, out: Out = None, as_json: options.Json = False) -> None:
    """Prepare a bug report: versions, platform, the last unexpected error.

    It is written to a file and sent nowhere. Paths, words that you typed and lines of your own code are left out;
    messages may still name tensors or modules of yours: look through the file before you send it.

    \b
    Examples:
      porting report-bug
      porting report-bug --out report.md
      porting report-bug --record /tmp/porting-report-x1y2.txt
    """
    with Screen("report-bug", as_json=as_json) as screen:
        shortened = Shortened(_known(context.find_root().command))
        found = record if record is not None else last_record(Path(tempfile.gettempdir()))
        crash = None if found is None else read_record(found.absolute(), shortened)
        packages = package_versions(PACKAGES)
        system = {
            "python": f"{platform.python_version()} ({platform.python_implementation()})",
            "system": shortened.text(platform.platform()),
            "processor": f"{platform.machine()}, {counted(os.cpu_count() or 0, 'core')}",
            "settings": " ".join(f"{name}={safe(os.environ[name])}" for name in SETTINGS if name in os.environ),
        }
        path = out if out is not None else Path(free("porting-bug-report", ".md"))
        text = _report(packages, system, crash)
        with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        screen.made(path)
        screen.document({"file": str(path), "packages": packages, **system, "text": text})
        others = ", ".join(f"{name} {one}" for name, one in packages.items() if name != "porting")
        screen.facts(
            {
                "porting": packages["porting"],
                "packages": others,
                **system,
                "typed": crash.typed if crash else "",
                "stopped": (crash.stopped or "(nothing was recorded of it)")
                if crash
                else "no unexpected error is recorded",
                "left out": str(shortened),
                "written": f"{path}: look through it before you send it",
            }
        )
        screen.next(*(("explain", Code.UNEXPECTED.value) if crash else ("verify",)))


def _report(packages: dict[str, str], system: dict[str, str], crash: Crash | None) -> str:
    """The file: Markdown, to be pasted into the form for bugs as it is."""
    lines = ["**Versions**", "", "```", *(f"{name} {one}" for name, one in packages.items())]
    lines += [f"{name}: {one}" for name, one in system.items() if one]
    lines += ["```", "", "**The last unexpected error**", ""]
    if crash is None:
        return "\n".join([*lines, "None is recorded on this machine.", ""])
    return "\n".join([*lines, f"{crash.when}", "", "````", safe_lines(crash.text), "````", ""])
