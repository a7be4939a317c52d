"""Named causes: what people get wrong when they write a model again, and which of it explains a difference."""

from porting.causes.catalogue import CATALOGUE
from porting.causes.cause import Cause
from porting.causes.finding import Finding, Suspicion

__all__ = ["CATALOGUE", "Cause", "Finding", "Suspicion"]
