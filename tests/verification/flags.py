"""What no batch of inputs shows of the handwritten BERT: the flags and the places that no table speaks of."""

from __future__ import annotations

from porting.verification import Report
from porting.verification.coverage import NEVER_GIVEN

FLAGS = "the arguments position_ids, output_hidden_states and output_attentions (never given)"


def complete_but_for_flags(report: Report) -> bool:
    """Whether everything was shown but for these arguments and the branches behind them."""
    shown = report.shown
    left = (*shown.copy, *shown.nothing, *shown.parts, *report.skipped)
    asked = ("output_", "hidden_states", "attentions", "Rows)", "self.rows is None", "token_type_ids is None")
    behind = all(any(name in one.condition for name in asked) for one in report.not_taken)
    return tuple(map(str, report.unseen)) == (FLAGS,) and not left and behind


def unseen_but_arguments(report: Report) -> tuple[str, ...]:
    """What was not shown, but for arguments that no table speaks of."""
    return tuple(str(one) for one in report.unseen if one.why != NEVER_GIVEN)
