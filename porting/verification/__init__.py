"""Proof that a port is faithful: layer by layer, in float64 for meaning and anchored in float64 for rounding."""

from porting.errors import VerifyError
from porting.reporting.outcome import Cost, Probe, Shown, Unseen, View
from porting.reporting.report import Report
from porting.trials.inputs import Case
from porting.verification.proof import verify
from porting.verification.recording import record

__all__ = ["Case", "Cost", "Probe", "Report", "Shown", "Unseen", "VerifyError", "View", "record", "verify"]
