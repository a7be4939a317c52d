"""A mapping table for a module that was never seen before: written, and proven, or the reason why there can be none."""

from porting.suggesting.proposing import suggest
from porting.suggesting.suggestion import Evidence, Reason, Suggestion, Unmapped, Verdict

__all__ = ["Evidence", "Reason", "Suggestion", "Unmapped", "Verdict", "suggest"]
