"""A mapping table for a module that was never seen before: written, and proven, or the reason why there can be none."""

from porting.suggesting.draft.unmapped import Near, Unmapped
from porting.suggesting.pipeline import suggest
from porting.suggesting.subjects.questions import Ask, Decision, Question
from porting.suggesting.verdict.suggestion import Evidence, Reason, Stop, Suggestion, Verdict

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
