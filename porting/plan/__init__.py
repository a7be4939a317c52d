"""Tables held against what is there: the static proof, and the moves that follow from it."""

from porting.plan.align import Alignment, Step, align
from porting.plan.check import check
from porting.plan.plan import Plan, PlanError

__all__ = ["Alignment", "Plan", "PlanError", "Step", "align", "check"]
