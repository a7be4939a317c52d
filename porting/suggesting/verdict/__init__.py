"""The proof, and what is to be said of it."""

from porting.suggesting.verdict.judgement import judge
from porting.suggesting.verdict.proof import prove
from porting.suggesting.verdict.suggestion import Suggestion, Verdict

__all__ = ["Suggestion", "Verdict", "judge", "prove"]
