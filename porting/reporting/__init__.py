"""What was found, as data and as words: the report, on a terminal, as a page and in a notebook."""

from porting.reporting.report import Cost, Probe, Report, Shown, View

__all__ = ["Cost", "Probe", "Report", "Shown", "View"]
