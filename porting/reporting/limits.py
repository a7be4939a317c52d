"""How far a verdict reaches: what was not shown, in as few words as the verdict's sentence can take."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from porting.reporting.outcome import Outcome, Shown
from porting.target import named_tensors


def clause(report: Outcome) -> str:
    """What qualifies the verdict: ``", as far as was shown (not shown: the attention mask)"``; empty when all was."""
    return "" if report.complete else f", as far as was shown (not shown: {'; '.join(_limits(report))})"


def _limits(report: Outcome) -> Iterator[str]:
    for words in report.unseen:
        yield words.partition(" (")[0]
    if report.idle:
        more = f" and {len(report.idle) - 3} more modules" if len(report.idle) > 3 else ""
        yield f"{', '.join(report.idle[:3])}{more}, which never ran"
    if report.not_taken:
        count, first = len(report.not_taken), report.not_taken[0].where
        yield f"the branch at {first}" if count == 1 else f"{count} branches of its code"
    inside = tuple(f"{path}." for path in report.idle)
    copied = [name for name in report.shown.copy if not name.startswith(inside)] if inside else report.shown.copy
    for names, how in ((copied, " beyond their values"), (report.shown.nothing, ""), (report.shown.parts, "")):
        if names:
            part = "part of " if names is report.shown.parts else ""
            yield f"{part}{names[0]}{how}" if len(names) == 1 else f"{part}{len(names)} parameters{how}"
    if report.skipped:
        yield f"the probe {report.skipped[0]}" if len(report.skipped) == 1 else f"{len(report.skipped)} probes"


def never_ran(module: nn.Module, ran: set[str], shown: Shown) -> tuple[str, ...]:
    """The outermost modules with weights that were never called, nor their weights used by others.

    Args:
        module: the port.
        ran: the modules that ran, of those with weights of their own or without parts.
        shown: what was shown of the weights.
    """
    idle: list[str] = []
    unshown = {*shown.copy, *shown.nothing, *shown.differing}
    for path, part in module.named_modules():
        if not path or any(path.startswith(f"{one}.") for one in idle):
            continue
        names = [f"{path}.{name}" for name, _ in named_tensors(part)]
        called = any(one == path or one.startswith(f"{path}.") for one in ran)
        if names and not called and unshown.issuperset(names):
            idle.append(path)
    return tuple(idle)
