"""Tables checked against names and shapes before anything is read, and the moves that follow from them."""

from porting.plan.align import Alignment, Step, align
from porting.plan.check import check
from porting.plan.plan import Plan, PlanError

__all__ = ["Alignment", "Plan", "PlanError", "Step", "align", "check"]
