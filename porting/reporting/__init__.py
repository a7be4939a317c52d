"""What was found, as data and as words: the report, on a terminal, as a page and in a notebook."""

from porting.reporting.outcome import Cost, Probe, Shown, View
from porting.reporting.report import Report

__all__ = ["Cost", "Probe", "Report", "Shown", "View"]
