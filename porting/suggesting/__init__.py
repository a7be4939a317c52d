"""A mapping table for a module that was never seen before: written, and proven, or the reason why there can be none."""

from porting.suggesting.asking import Ask, Decision, Question
from porting.suggesting.proposing import suggest
from porting.suggesting.suggestion import Evidence, Reason, Stop, Suggestion, Verdict
from porting.suggesting.unmapped import Near, Unmapped

__all__ = [
    "Ask",
    "Decision",
    "Evidence",
    "Near",
    "Question",
    "Reason",
    "Stop",
    "Suggestion",
    "Unmapped",
    "Verdict",
    "suggest",
]
