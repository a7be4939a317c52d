"""A report on a terminal: the verdict first, a row for each layer, what was shown and what was not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from io import StringIO
from itertools import islice

from rich.console import Console, Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from porting.causes.diverging import Divergence, Kind, Moved, Step
from porting.causes.finding import Finding, Suspicion
from porting.printable import is_printable, safe
from porting.reporting.gradient_text import gradient_lines
from porting.reporting.outcome import (
    APPROXIMATE,
    DIFFERENT,
    FAITHFUL,
    IMPRECISE,
    MOST_NAMED,
    UNPROVEN,
    Outcome,
    Probe,
    ReportRow,
    listed,
    ranges,
    rows_of,
)
from porting.reporting.scope_text import scope_lines, trial_lines
from porting.tracing.code_coverage import FIXED, RAISES, TRAINING, Branch
from porting.tracing.float64 import ITSELF
from porting.tracing.measure import LEAKED, MEANING, ROUNDING, luck
from porting.trials.scope import KEPT_BETWEEN_CALLS, Impurity

NOTICEABLE = 100 * MEANING
"""Without ``verbose``, only raised tolerances above this are printed."""

MOST_STEPS = 3
"""How many steps of the reference are named, and how many callers of a step of the port."""

_SAID = {
    FAITHFUL: ("bold green", "computes what"),
    IMPRECISE: ("bold yellow", "matches, but with larger rounding errors, what"),
    APPROXIMATE: ("bold yellow", "comes near to what"),
    DIFFERENT: ("bold red", "does not compute what"),
    UNPROVEN: ("bold yellow", "agrees at every probe, but parts of it are compared with nothing, with what"),
}


def render(report: Outcome, *, every_probe: bool = False, verbose: bool = True) -> RenderableType:
    """The report for a rich console.

    Args:
        verbose: everything that is known; without it a row for each layer that differs by its own doing, one for
            what that comes to, and no details of what ran.
    """
    first, *rest = verdict_lines(report, verbose=verbose)
    above = (first, *summary_lines(report), *rest)
    named = [cause for cause in report.causes if cause.name and _kept_between_calls(report) is None]
    summed_up = next(iter(named), None)  # summary_lines has it
    causes = report.causes if verbose else [cause for cause in report.causes if cause is not summed_up]
    below = (
        *culprit_lines(report, verbose=verbose),
        *cause_lines(causes),
        *gradient_lines(report.learned),
        *(shown_lines(report) if verbose else islice(shown_lines(report), 1)),
        *other_lines(report, verbose=verbose),
    )
    grid = _grid(report, every_probe, verbose=verbose)
    middle: list[RenderableType] = [Text(), grid, Text()] if grid.row_count else []
    return Group(*map(_seen, above), *middle, *map(_seen, below))


def _seen(line: Text) -> Text:
    """The line; what a name brought along that moves the cursor or turns the line is spelled out."""
    return line if is_printable(line.plain) else Text(safe(line.plain), line.style)


def as_text(report: Outcome, *, width: int = 120, every_probe: bool = False, verbose: bool = True) -> str:
    """The report as plain text."""
    written = StringIO()
    # In a notebook rich would show the text at once, and write nothing.
    console = Console(file=written, width=width, color_system=None, force_jupyter=False)
    console.print(render(report, every_probe=every_probe, verbose=verbose))
    return "".join(line.rstrip() + "\n" for line in written.getvalue().splitlines())


def verdict_lines(report: Outcome, *, verbose: bool = True) -> Iterator[Text]:
    """The verdict in a sentence, the scope, and the largest difference in each dtype."""
    style, says = _SAID[report.verdict]
    if report.verdict == DIFFERENT and not report.computes_otherwise:
        says = "computes, and does not learn, what"
    sentence = f"{report.port} {says} {report.reference} computes from {report.source}"
    stop = report.scope.returned.stop if report.scope.returned is not None else None
    if report.short and stop is not None:
        sentence = f"{report.port} ends where {report.reference} goes on: it returns what {stop.point} gives"
    if report.approximate and report.verdict in (APPROXIMATE, DIFFERENT):
        allowed = report.approximate.within
        if report.verdict == APPROXIMATE:
            sentence += f", within the {allowed:.0e} of the scale that the table allows"
        elif any(probe.meaning.worst > allowed for probe in report.probes):
            sentence += f", and is off by more than the {allowed:.0e} of the scale that the table allows"
    if report.learned and report.learned.untrained:
        sentence += f"; training leaves {listed(report.learned.untrained)} as it is here"
    yield Text.assemble((report.verdict.upper(), style), "  ", sentence)
    if report.random:
        yield Text(f"new, random and compared with nothing: {listed(report.random)}", "yellow")
    if report.no_numbers:
        yield Text(report.no_numbers, "yellow")
    yield from map(Text, trial_lines(report))
    sizes = list(_size_lines(report, verbose=verbose))
    scope = list(map(Text, scope_lines(report, verbose=verbose)))
    yield from (*scope, *sizes) if verbose else (Text("; ").join(sizes), *scope)


def _size_lines(report: Outcome, *, verbose: bool) -> Iterator[Text]:
    """The largest difference in float64, and the largest rounding error in each working dtype."""
    largest = max((probe.meaning.worst for probe in report.probes), default=0.0)
    raised = max((probe.bound.end_to_end or 0.0 for probe in report.probes if probe.leak or probe.lowered), default=0.0)
    inside = f"; {raised:.0e} behind float32 inside" if largest > MEANING and raised > NOTICEABLE else ""
    off = f"{largest:.1e} of the activations' scale"
    yield Text(f"float64: off by {off}{' at most' if verbose else ''} (tolerance {MEANING:.0e}{inside})")
    for dtype, noise in report.noise.items():
        ratio = max((probe.rounding[dtype].worst for probe in report.probes), default=0.0)
        text = f"{dtype}: {_times(ratio)} the reference's own rounding error{' at most' if verbose else ''}"
        text += f" (tolerance {ROUNDING:.0f}x)"
        yield Text(f"{text}, which is up to {noise:.1e} of the scale" if verbose else text)


def summary_lines(report: Outcome) -> Iterator[Text]:
    """The lines that say what to fix: the first wrong module, its line of code, the cause and the fix, where known."""
    if report.guilty:
        others = len(report.guilty) - 1
        more = f" and {others} more" if others else ""
        yield Text.assemble("  module: ", (listed([report.guilty[0].port]), "bold red"), more)
        found = report.divergence
        if found is not None and found.line:
            yield Text(f"  line: {found.line}{f'   {found.code}' if found.code else ''}")
    elif report.broken:
        others = len(report.broken) - 1
        more = f" and {others} more" if others else ""
        where = Text.assemble("  module: ", (listed([report.broken[0].port]), "bold red"), more)
        yield where.append(", in the working dtype alone")
    named = [cause for cause in report.causes if cause.name]
    kept = _kept_between_calls(report)
    if kept is not None:
        inside = f" in {kept.detail}" if kept.detail else ""
        yield Text(f"  cause: state kept between calls{inside}: your model {kept.kind}")
        yield Text("  fix: let each call depend on its own arguments alone")
    elif named:
        cause, others = named[0], len(named) - 1
        ties = f"; or {', or '.join(cause.ties)}: these inputs do not tell them apart" if cause.ties else ""
        more = f"; and {others} more, below" if others else ""
        yield Text(f"  cause: {cause.name}{f' ({cause.detail})' if cause.detail else ''}{ties}{more}")
        yield Text(f"  fix: {cause.fix}")


def _kept_between_calls(report: Outcome) -> Impurity | None:
    """The finding that a port keeps something from call to call, if any: other causes are unreliable then."""
    found = [one for kind in KEPT_BETWEEN_CALLS for one in report.scope.impurities if one.kind is kind]
    return next((one for one in found if one.detail), found[0] if found else None)


def _grid(report: Outcome, every_probe: bool, *, verbose: bool) -> Grid:
    grid = Grid(box=None, pad_edge=False, header_style="bold")
    grid.add_column("where")
    for title in ("float64", "isolated"):
        grid.add_column(title, justify="right")
    for dtype in report.noise:
        grid.add_column(dtype, justify="right")
        grid.add_column("isolated", justify="right")
    grid.add_column("")
    if every_probe:
        rows = [ReportRow(label=probe.port, columns=(probe.port,), probes=(probe,)) for probe in report.probes]
    else:
        rows = rows_of(report.probes)
    if not verbose:  # what differs by its own doing, and the last row for what that comes to
        own = [row for row in rows if any(probe.guilty or probe.imprecise for probe in row.probes)]
        differing = [row for row in rows if mark(row).plain != SAME]
        rows = [*own, *(row for row in differing[-1:] if row not in own)] if own else differing
    for row in rows:
        probes = row.probes
        end = max(probe.meaning.end_to_end for probe in probes)
        alone = max(probe.meaning.isolated or 0.0 for probe in probes)
        cells = [Text(f"{end:.0e}", _style(any(probe.differs for probe in probes)))]
        cells.append(Text(f"{alone:.0e}", _style(any(probe.guilty for probe in probes))))
        for dtype in report.noise:
            for view in ("end_to_end", "isolated"):
                ratios = [(probe.count, getattr(probe.rounding[dtype], view) or 0.0) for probe in probes]
                bad = any(ratio > luck(count) for count, ratio in ratios)
                cells.append(Text(_times(max(ratio for _, ratio in ratios)), _style(bad)))
        grid.add_row(Text(safe(row.label)), *cells, _seen(mark(row)))
    return grid


def _times(ratio: float) -> str:
    return f"{ratio:.1f}x" if ratio < 100 else f"{ratio:.0f}x" if ratio < 1e6 else f"{ratio:.0e}x"


def mark(row: ReportRow) -> Text:
    """The end of a row: the modules in it that cause a difference, or a note that a difference only passes through."""
    guilty = [name for name, probe in zip(row.columns, row.probes, strict=True) if probe.guilty]
    if guilty:
        return Text(f"<- {listed(guilty)}", "bold red")
    broken = [
        name for name, one in zip(row.columns, row.probes, strict=True) if one.breaks and one.off and one.off.isolated
    ]
    if broken:
        return Text(f"<- differs in the working dtype: {listed(broken)}", "bold red")
    imprecise = [name for name, probe in zip(row.columns, row.probes, strict=True) if probe.imprecise]
    if imprecise:
        return Text(f"<- rounds worse: {listed(imprecise)}", "yellow")
    if any(probe.differs for probe in row.probes):
        return Text("the difference comes from before", "dim")
    if any(probe.drifts for probe in row.probes):
        return Text("the rounding comes from before", "dim")
    return Text(SAME, "green")


SAME = "same"
"""The end of a row in which nothing differs."""


def _style(bad: bool) -> str:
    return "red" if bad else ""


def culprit_lines(report: Outcome, *, verbose: bool = True) -> Iterator[Text]:
    """The lines on the modules at fault, with what is known of them.

    Without ``verbose`` no more than what :func:`summary_lines` does not say: with a named cause, nothing of the first
    module.
    """
    if report.guilty:
        yield from _guilty_lines(report) if verbose else _unexplained_lines(report)
    elif report.first_difference:
        where = report.first_difference.port
        yield Text(f"the first difference shows at {where}, and no probed module makes it by itself:")
        yield Text("  look at what happens between the probes, or add some to [probes]")
    for probe in report.guilty:
        if probe.random:
            yield Text(f"{probe.port} draws random numbers in eval mode: is dropout left on?", "yellow")
    if report.broken:
        names = listed([probe.port for probe in report.broken])
        yield Text(f"right in float64, and off by more than rounding in a working dtype: {names}", "red")
    elif report.imprecise:
        yield Text(f"rounds worse than the reference: {listed([probe.port for probe in report.imprecise])}")
    yield from _leak_lines(report, verbose=verbose)
    if report.shown.differing:
        yield Text(f"weights that are not the checkpoint's: {listed(report.shown.differing)}", "red")


def _guilty_lines(report: Outcome) -> Iterator[Text]:
    """All that is known of the first module at fault, and the names of the others."""
    first = report.guilty[0]
    yield Text.assemble(("first wrong module: ", "bold"), (listed([first.port]), "bold red"))
    if math.isinf(first.meaning.isolated or 0.0):
        yield from _not_a_number_lines()
    else:
        yield Text(f"  given the reference's own inputs it is off by {first.meaning.isolated:.1e} of the scale")
    if report.divergence:
        yield from _divergence_lines(report.divergence)
    yield Text(f"  it is compared with {first.reference}")
    if first.span and list(first.span) != [first.port]:
        yield Text(f"  code run since the last matching probe: {listed(first.span)}")
    if first.rules:
        yield Text(f"  its weights are written by {', '.join(first.rules[:MOST_NAMED])}")
    if len(report.guilty) > 1:
        yield Text(f"  also wrong: {listed([probe.port for probe in report.guilty[1:]])}")


def _unexplained_lines(report: Outcome) -> Iterator[Text]:
    """The place at which the first module at fault leaves the reference, if no cause of the catalogue explains it."""
    if math.isinf(report.guilty[0].meaning.isolated or 0.0):
        yield from _not_a_number_lines()
    if report.divergence and not any(cause.name for cause in report.causes):
        yield from _divergence_lines(report.divergence)


def _not_a_number_lines() -> Iterator[Text]:
    yield Text("  given the reference's own inputs some of its values are NaN or infinite: a softmax over a row")
    yield Text("  with every place masked gives NaN, and so do 0 / 0, inf - inf and the log or root of a negative")


def _divergence_lines(found: Divergence) -> Iterator[Text]:
    """The step at which the port leaves the reference, and what the reference does there."""
    does = listed_steps(found.instead)
    if found.kind == Kind.ORDER:
        yield Text("  it has the reference's numbers in another order: see its axes, rows and channels")
    elif found.kind == Kind.ELSEWHERE:
        behind = f", before {does}" if does else ""
        yield Text(f"  it is what the reference has at another place{behind}")
    elif found.step:
        code = f"   {found.code}" if found.code else ""
        what = (
            f"a step is missing behind {found.behind}"
            if found.behind
            else f"first step that differs: {found.step.operation}"
        )
        yield Text.assemble(f"  {what} at ", (f"{found.line}{code}", "bold"))
        if found.callers:
            yield Text(f"    called from {', '.join(found.callers[:MOST_STEPS])}")
        if found.moved:
            yield Text(f"    it is given numbers of the reference {_moved_text(found.moved)}")
        elif does:
            yield Text(f"    it is given what the reference has; the reference does this with it: {does}")
        if found.also:
            yield Text(f"    see its other operand too, made at {found.also}")


def _moved_text(moved: Moved) -> str:
    same = moved.shape == moved.expected
    how = "in another order" if same else f"as {list(moved.shape)} for {list(moved.expected)}"
    return f"{how}, since {moved.line}: {moved.code}" if moved.line else how


def listed_steps(steps: Sequence[Step]) -> str:
    """Steps of a pass: the operation, and the module that it is in."""
    return ", ".join(f"{step.operation} in {step.module or ITSELF}" for step in steps[:MOST_STEPS])


def _leak_lines(report: Outcome, *, verbose: bool) -> Iterator[Text]:
    """The lines on values computed in less than float64: their rounding error and the tolerances that follow.

    Without ``verbose`` it is one line, where a difference is larger than float64 explains.
    """
    felt = [probe for probe in report.probes if ((probe.leak if verbose else None) or probe.meaning).worst > MEANING]
    felt = [probe for probe in felt if probe.lowered or probe.leak]
    if not verbose:
        raised = [(probe.port, probe.bound.isolated or 0.0) for probe in felt if probe.leak is not None]
        raised = [(port, bound) for port, bound in raised if bound > NOTICEABLE]
        unbounded = [probe.port for probe in felt if probe.leak is None]
        if raised:
            most = max(bound for _, bound in raised)
            names = listed([port for port, _ in raised])
            yield Text(f"computed in less than float64: {names}; tolerance there {most:.0e} at most", "yellow")
        if unbounded:
            yield Text(f"shown to the working dtype's rounding only, not to float64's: {listed(unbounded)}", "yellow")
        return
    alike: dict[tuple[str, str], list[Probe]] = {}
    for probe in felt:
        if probe.leak is not None and (probe.bound.isolated or 0.0) <= MEANING:
            continue  # nothing was raised
        operations = ", ".join(probe.lowered) or "in the reference"
        limit = "" if probe.leak is None else f"{probe.bound.isolated or 0.0:.0e}"
        alike.setdefault((operations, limit), []).append(probe)
    for (operations, limit), probes in islice(alike.items(), MOST_NAMED):
        many = len(probes) > 1
        names = listed([probe.port for probe in probes])
        yield Text(f"{names} compute{'' if many else 's'} in less than float64 ({operations}):", "yellow")
        if not limit:
            yield Text("  what it means is shown to the working dtype's rounding only, and not to float64's", "yellow")
        else:
            moved = max((probe.leak.isolated or 0.0) for probe in probes if probe.leak is not None)
            by = f"its rounding moves it by {'up to ' if many else ''}{moved:.0e} of its scale"
            said = f"  tolerance raised to {limit} here, since {by}"
            yield Text(f"{said}, and behind it to {LEAKED:.0f} times the propagated error", "yellow")


def shown_lines(report: Outcome) -> Iterator[Text]:
    """The lines on how many of the weights the inputs reached."""
    shown = report.shown
    yield Text(f"proven by activation: {len(shown.activation)} of {shown.count} parameters and buffers")
    partial = sorted((share, name) for name, share in shown.activation.items() if share < 1)
    if partial:
        named = [f"{100 * share:.2g} % of {name}" for share, name in partial]
        rest = "equal by copy" if not shown.parts else f"equal by copy, or not shown ({listed(shown.parts)})"
        yield Text(f"  in part: {listed(named)}; the rest of them is {rest}")
    for name, rows in list(shown.rows.items())[:MOST_NAMED]:
        yield Text(f"  nothing of row{'s' if len(rows) > 1 else ''} {ranges(rows)} of {name} was shown at work")
    if shown.made:
        yield Text(f"constants of the table's: {listed([f'{name} = {value}' for name, value in shown.made.items()])}")
    if shown.copy:
        yield Text(f"equal by copy only: {listed(shown.copy)}", "yellow")
    if report.idle:
        yield Text(f"never ran: {listed(report.idle)}", "yellow")
    if shown.nothing:
        yield Text(f"not shown: {listed(shown.nothing)}", "yellow")
    for unseen in report.unseen:
        yield Text(f"not shown: {unseen}", "yellow")
    yield from _code_lines(report)


def _code_lines(report: Outcome) -> Iterator[Text]:
    """The lines on the port's code that never ran, and on the part of it that no input can reach."""
    for branch in report.not_taken[:MOST_NAMED]:
        lines = f"{branch.lines} line{'s' if branch.lines > 1 else ''}"
        yield Text(f"never ran: {branch.where}  {branch.condition}  ({lines}, {branch.function})", "yellow")
    more = len(report.not_taken) - MOST_NAMED
    if more > 0:
        yield Text(f"never ran: {more} more branches", "yellow")
    apart = [f"{count} {what}" for why, what in _APART.items() if (count := _count(report.branches, why))]
    if apart:
        yield Text(f"unreachable for this model: {', '.join(apart)}")


_APART = {
    RAISES: "that end in an error",
    TRAINING: "for training",
    FIXED: "that the module's own attributes rule out",
}


def _count(branches: Sequence[Branch], why: str) -> int:
    return sum(branch.why == why for branch in branches)


def other_lines(report: Outcome, *, verbose: bool = True) -> Iterator[Text]:
    """The lines on omissions and warnings; with ``verbose`` also the inputs and the versions."""
    if report.skipped:
        yield Text(f"not compared, for lack of a counterpart: {listed(report.skipped)}", "yellow")
    if report.padded:
        yield Text(f"differs at padded places only, which is not an error: {listed(list(report.padded))}")
    for warning in report.warnings:
        yield Text(f"warning: {warning}", "yellow")
    for note in report.notes if verbose else ():
        yield Text(f"note: {note}")
    cost = report.cost
    if not verbose:
        yield Text(
            f"{cost.passes} forward passes; {cost.loading + cost.total:.1f} s, {cost.memory / 1e9:.1f} GB", "dim"
        )
        return
    yield Text(f"inputs: {'; '.join(report.cases)}; seed {report.seed}")
    if report.search:
        yield Text(f"  {report.search}", "dim")
    yield Text(
        f"{cost.passes} forward passes in {cost.forwards:.1f} s, {cost.total:.1f} s with all comparisons; "
        f"loading {cost.loading:.1f} s; {cost.memory / 1e9:.1f} GB at most",
        "dim",
    )
    yield Text(", ".join(f"{name} {number}" for name, number in report.environment.items()), "dim")


LEAST = 0.1
"""The smallest share of a difference that a cause has to explain to be shown as a lead."""

WHOLE = 0.995
"""The share of a difference from which on a cause counts as reproducing the probe."""


def cause_lines(causes: Sequence[Finding]) -> Iterator[Text]:
    """The lines on each cause of a report."""
    for cause in causes:
        if cause.name:
            yield from _cause_block(cause)
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for cause in causes:
        if not cause.name:
            alike.setdefault(tuple(near.name for near in _telling(cause)), []).append(cause)
    for group in alike.values():
        yield from _unknown(group)


def _cause_block(cause: Finding) -> Iterator[Text]:
    said = f"{cause.name} ({cause.detail})" if cause.detail else cause.name
    yield Text.assemble(
        ("cause: ", "bold"), (said, "bold red"), f", explains all but {cause.residual:.0e} of {cause.difference:.0e}"
    )
    for tie in cause.ties:
        yield Text(f"  or {tie}: these inputs do not tell them apart")
    yield Text(f"  explains: {listed(cause.probes)}")
    if cause.where:
        yield Text(f"  as if in the reference's {listed(cause.where)}")
    yield Text(f"  {cause.what}")
    yield Text(f"  fix: {cause.fix}")


def _unknown(group: Sequence[Finding]) -> Iterator[Text]:
    """One block for all probes that stay unknown with the same nearest entries, such as those of every layer."""
    probes = [point for finding in group for point in finding.probes]
    yield Text.assemble(("cause: ", "bold"), ("unknown", "yellow"), f", at {listed(probes)}")
    if group[0].detail:
        yield Text(f"  {group[0].detail}, at {listed(group[0].probes[:1])}")
    for number, near in enumerate(_telling(group[0])):
        said = f"{near.name} ({near.detail})" if near.detail else near.name
        shares = sorted({round(100 * _telling(finding)[number].share) for finding in group})
        span = f"{shares[0]}" if len(shares) == 1 else f"{shares[0]} to {shares[-1]}"
        whole = all(_telling(finding)[number].share > WHOLE for finding in group)
        more = ", and does not reproduce the other batches or the output" if whole else ""
        yield Text(f"  nearest: {said} would explain {span} % of it{more}")


def _telling(finding: Finding) -> list[Suspicion]:
    """The nearest entries without those that would explain next to nothing."""
    return [near for near in finding.nearest if near.share >= LEAST]
