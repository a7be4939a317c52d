"""The report: what a verification found, as text, as a page and as what a notebook shows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    def to_html(self) -> str:
        """The report as a page: one HTML file that needs nothing beside itself, for any browser."""
        from porting.reporting.webpage import report_page  # noqa: PLC0415  # it draws, and takes a second to import

        return report_page(self)

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file, replacing what is there.

        Returns:
            The file.

        Raises:
            OSError: it cannot be written.
        """
        file = Path(path)
        file.write_text(self.to_html(), encoding="utf-8")
        return file

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from porting.reporting.webpage import report_part  # noqa: PLC0415  # as above

        return report_part(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # IPython's own printer
        """What IPython shows on a terminal."""
        printer.text(str(self).rstrip())

    def __str__(self) -> str:
        from porting.reporting.terminal import as_text  # noqa: PLC0415  # rich is for those who look at a report

        return as_text(self)
