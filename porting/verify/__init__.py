"""Proof that a port is faithful: layer by layer, in float64 for meaning and anchored in float64 for rounding."""

from porting.verify.faults import VerifyError
from porting.verify.inputs import Case
from porting.verify.proof import verify
from porting.verify.report import Cost, Probe, Report, Shown, View

__all__ = ["Case", "Cost", "Probe", "Report", "Shown", "VerifyError", "View", "verify"]
