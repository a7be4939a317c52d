"""What a forward pass gives: modules run side by side and seen from outside, and values measured."""

from porting.errors import VerifyError
from porting.tracing.measure import MEANING, ROUNDING
from porting.tracing.trace import Point, Trace, Visit, trace

__all__ = ["MEANING", "ROUNDING", "Point", "Trace", "VerifyError", "Visit", "trace"]
