"""The report: what a verification found, as text, as a page and as what a notebook shows."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from porting.atomic import write_file
from porting.checkpoint import Checkpoint
from porting.notation.table import Table
from porting.reporting.outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class Report(Outcome):
    """The result of :func:`porting.verification.verify`: the fields and numbers of :class:`Outcome`, and their looks.

    >>> import porting
    >>> source = porting.embedded_checkpoint()
    >>> report = porting.verify(source, longest=8)
    >>> report.verdict, report.faithful, report.guilty
    ('faithful', True, ())
    """

    def summary(self, *, width: int = 100_000) -> str:
        """The verdict, the scope and what to fix, as ``porting verify`` prints them; ``print(report)`` prints this.

        Args:
            width: of a line, in characters; longer ones are wrapped.  By default none is.
        """
        from porting.reporting.terminal import as_text  # noqa: PLC0415  # rich is for those who look at a report

        return as_text(self, width=width, verbose=False).rstrip("\n")

    def details(self, *, width: int = 120, every_probe: bool = False) -> str:
        """Everything that was found, as ``porting verify --verbose`` prints it.

        Args:
            width: of a line, in characters; longer ones are wrapped.
            every_probe: a row for each probe in place of one for each layer, as ``--all`` does.
        """
        from porting.reporting.terminal import as_text  # noqa: PLC0415  # as above

        return as_text(self, width=width, every_probe=every_probe)

    def to_html(self) -> str:
        """The report as a page: one HTML file that needs nothing beside itself, for any browser."""
        from porting.reporting.webpage import report_page  # noqa: PLC0415  # it draws, and takes a second to import

        return report_page(self)

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file, replacing what is there.

        Returns:
            The file.

        Raises:
            CheckpointError: it cannot be written, or is a link or no file.
        """
        file = Path(path)
        write_file(file, self.to_html().encode())
        return file

    def _repr_html_(self) -> str:
        """The HTML that a notebook shows."""
        from porting.reporting.webpage import report_part  # noqa: PLC0415  # as above

        return report_part(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # IPython's own printer
        """Print the report for IPython on a terminal."""
        printer.text(str(self).rstrip())

    def __str__(self) -> str:
        return self.summary()


def spelled_call(name: str, function: Callable[..., object], given: Mapping[str, object]) -> str:
    """The call of a function, without the arguments that have their default.

    Args:
        given: every argument; ``progress`` changes nothing and is left out.
    """
    words = []
    in_order = True  # until one is left out, arguments need no names
    for parameter in inspect.signature(function).parameters.values():
        value = given[parameter.name]
        if parameter.name == "progress" or value is parameter.default or value == parameter.default:
            in_order = False
        else:
            named = not in_order or parameter.kind is parameter.KEYWORD_ONLY
            words.append(f"{parameter.name}={_spelled(value)}" if named else _spelled(value))
    return f"{name}({', '.join(words)})"


def _spelled(value: object) -> str:
    if isinstance(value, Checkpoint | Table | Path):
        return repr(value.location if isinstance(value, Checkpoint) else str(getattr(value, "where", value)))
    if isinstance(value, tuple | list):
        items = [_spelled(item) for item in value]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if value is None or isinstance(value, str | int | float | torch.dtype):
        return repr(value)
    named = value if inspect.isfunction(value) or isinstance(value, type) else type(value)
    module = "" if named.__module__ in ("__main__", "builtins") else f"{named.__module__}."
    return f"{module}{named.__qualname__}" + ("" if named is value else "(...)")
