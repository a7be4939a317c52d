"""Running a model, seeing the values inside it, and measuring how far they are from a reference."""

from porting.errors import VerifyError
from porting.tracing.measure import MEANING, ROUNDING
from porting.tracing.trace import Point, Trace, Visit, trace

__all__ = ["MEANING", "ROUNDING", "Point", "Trace", "VerifyError", "Visit", "trace"]
