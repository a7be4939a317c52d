"""The results of a verification: as data, on a terminal, as a page and in a notebook."""

from porting.reporting.outcome import Cost, Probe, Shown, Unseen, View
from porting.reporting.report import Report

__all__ = ["Cost", "Probe", "Report", "Shown", "Unseen", "View"]
