"""The proof, and what is to be said of it."""

from porting.suggesting.verdict.judging import judge
from porting.suggesting.verdict.proving import prove
from porting.suggesting.verdict.suggestion import Suggestion, Verdict

__all__ = ["Suggestion", "Verdict", "judge", "prove"]
