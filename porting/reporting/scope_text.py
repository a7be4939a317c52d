"""The scope of a verdict in words: what was run, what of the output was compared, and what was not run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from porting.printable import first_few
from porting.reporting.outcome import Outcome, Shown, stretches
from porting.target import named_tensors
from porting.trials.scope import KEPT, Scope, Status

MOST_FAILED = 3
"""How many batches that the port fails on are named; the rest is counted."""

MOST_UNSEEN = 2
"""Without details so many properties of the inputs that showed nothing are named."""


def scope_lines(report: Outcome, *, verbose: bool = True) -> Iterator[str]:
    """The scope: a line of what ran, one of the outputs that were compared, and one of what did not run."""
    scope = report.scope
    mode = f"{scope.mode} mode, {_listed(scope.dtypes)}" if scope.dtypes else f"{scope.mode} mode"
    batches = report.cases if not scope.results else _batches(scope) if verbose else _counted_batches(scope)
    yield f"ran: {'; '.join([mode, *batches])}"
    returned = scope.returned
    if returned is not None:
        named = [(_counted(ours), _counted(_output(theirs))) for ours, theirs in returned.pairs.items()]
        pairs = [ours if ours == theirs else f"{ours} = {theirs}" for ours, theirs in named]
        probed = [f"{', '.join(map(_counted, returned.given))} (paired in [probes])"] if returned.given else []
        parts = [*([", ".join(pairs)] if pairs else []), *probed] or ["nothing"]
        parts += (
            [f"your model does not return {', '.join(map(_counted, returned.missing))}"] if returned.missing else []
        )
        if returned.stop is not None and returned.stop.weighed:
            parts.append(f"it ends before {first_few(returned.stop.weighed, 3 if verbose else 1)}")
        if returned.alone:
            parts.append(f"your model also returns {', '.join(map(_counted, returned.alone))}, compared with nothing")
        hides = any(mask not in ("no padding", KEPT) for mask in scope.masks)
        where = "output compared, except at padding and in rows without a token" if hides else "output compared"
        yield f"{where}: {'; '.join(parts)}"
    yield f"not run: {'; '.join(_limits(report, verbose=verbose))}"


def trial_lines(report: Outcome) -> Iterator[str]:
    """The batches on which the output differs, those on which it does not, and the ways in which the port is impure."""
    scope = report.scope
    if scope.differing:
        names = [
            f"{trial.what} ({'another shape' if trial.said else f'off by {trial.difference:.1e}'})"
            for trial in scope.differing
            if trial.difference is not None
        ]
        yield f"the output differs on: {first_few(names, MOST_DIFFERING)}"
        shapes = [trial.said for trial in scope.differing if trial.said]
        if shapes:
            yield shapes[0]
        same = len([trial for trial in scope.results if trial.status is Status.SAME])
        yield f"it is the same on {same} of {len(scope.results)} batches that were tried"
    for impurity in scope.impurities:
        size = f", off by {impurity.size:.1e}" if impurity.size else ""
        yield f"your model {impurity.kind}{f': {impurity.detail}' if impurity.detail else ''}{size}"


MOST_DIFFERING = 4
"""How many batches on which the output differs are named."""

MOST_RANGES = 4
"""How many ranges of lengths or batch sizes are named without details; more of them are counted."""

MOST_NAMED = 3
"""How many kinds of values are named on a line of counts."""

MOST_PLACES = 2
"""How many places in code are named, and the others counted."""


def _batches(scope: Scope) -> Iterator[str]:
    """The batches, one line for each, by name."""
    if scope.lengths:
        yield f"rows of {_ranges(scope.lengths)} tokens"
    yield from _signals(scope, every=True)
    if scope.rows:
        yield f"{_ranges(scope.rows)} rows in a batch{_part_of_pairs(scope)}"
    masks = [_MASKS.get(mask, mask) for mask in scope.masks if " in rows of " not in mask]
    if masks:
        yield f"masks: {', '.join(masks)}"
    if scope.segments:
        yield "segments in any order"
    if scope.positions:
        yield "positions given and not"
    left = [
        argument.removeprefix("without ")
        for argument in scope.arguments
        if argument.startswith("without ") and " and " not in argument
    ]
    if left:
        yield f"with and without {', '.join(left)}"
    further = _further(scope)
    if further:
        yield f"with {', '.join(further)}"
    if scope.values:
        yield f"values: {', '.join(scope.values)}"
    seen, size = scope.tokens
    if seen:
        yield f"{seen:,} of {size:,} token ids" if size else f"{seen:,} token ids"
    if scope.ways:
        yield "with and without gradients, in inference mode, and called again"


def _counted_batches(scope: Scope) -> Iterator[str]:
    """The batches in one line: sizes and counts; ``verbose`` has the names."""
    sizes = [f"{_ranges(scope.lengths, 'lengths')} tokens"] if scope.lengths else []
    sizes += list(_signals(scope))
    sizes += [f"batches of {_ranges(scope.rows, 'sizes')}{_part_of_pairs(scope)}"] if scope.rows else []
    masks = [mask for mask in scope.masks if " in rows of " not in mask]
    sizes += [f"{len(masks)} kinds of masks" if len(masks) > 1 else "1 kind of mask"] if masks else []
    if sizes:
        yield ", ".join(sizes)
    further = _further(scope)
    if further:
        yield f"with {', '.join(further)}"
    if len(scope.values) > MOST_NAMED:
        yield f"{len(scope.values)} kinds of values"
    elif scope.values:
        yield f"values: {', '.join(scope.values)}"
    seen, size = scope.tokens
    if seen:
        yield (
            f"all {size:,} token ids"
            if seen == size
            else f"{seen:,} of {size:,} token ids"
            if size
            else f"{seen:,} token ids"
        )


def _further(scope: Scope) -> list[str]:
    """The optional arguments that the usual batches do not have and that were given."""
    given = (one.removeprefix("with ") for one in scope.arguments if one.startswith("with "))
    return list(dict.fromkeys(one.partition(",")[0] for one in given if " and " not in one))


def _signals(scope: Scope, *, every: bool = False) -> Iterator[str]:
    """The sizes of pictures, and the lengths of sounds and series."""
    sizes = [f"{height}x{width}" for height, width in scope.pictures]
    if sizes:
        most = len(sizes) > MOST_RANGES and not every
        yield f"pictures of {f'{len(sizes)} sizes from {sizes[0]} to {sizes[-1]}' if most else _listed(sizes)}"
    if scope.places:
        yield f"sounds or series of {_ranges(scope.places, 'lengths')} places"


_MASKS = {
    "no padding": "none",
    "right padding": "right",
    "left padding": "left",
    "random masks": "random",
    "a row that is all padding": "a row all padding",
    "masked places that hold ordinary tokens": "over ordinary tokens",
    KEPT: "over no padding token",
    "a mask of bool": "as bool",
    "a mask of uint8": "as uint8",
    "a mask of int32": "as int32",
    "a mask of float64": "as float",
}


def _ranges(numbers: Sequence[int], called: str = "") -> str:
    """Ascending numbers as ranges without gaps."""
    found = stretches(numbers)
    if called and len(found) > MOST_RANGES:
        return f"{len(numbers)} {called} from {numbers[0]} to {numbers[-1]}"
    return _listed([name for one in found for name in (map(str, one) if len(one) < 3 else [f"{one[0]} to {one[-1]}"])])


def _part_of_pairs(scope: Scope) -> str:
    """How many combinations of a length and a batch size ran, where not all did."""
    every = len(scope.lengths) * len(scope.rows)
    return f" ({len(scope.shapes)} of {every:,} combinations)" if 0 < len(scope.shapes) < every else ""


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _output(point: str) -> str:
    """A point of the reference as a reader knows it: an output by its name, a module by its path."""
    path, arrow, name = point.partition(" -> ")
    return name if arrow and path == "." else "output" if point == "." else point


def _counted(name: str) -> str:
    """An output that has a number in place of a name is called one: "output 0"."""
    return f"output {name}" if name.partition(".")[0].isdecimal() else name


def _failures(scope: Scope, most: int) -> Iterator[str]:
    """Batches that were not compared, and why."""
    for batch in scope.not_run[:most]:
        yield f"{batch.what} ({batch.why})"
    more = len(scope.not_run) - most
    if more > 0:
        yield f"{more} more batches that your model fails on"
    refused = [result for result in scope.results if result.status is Status.REFERENCE_FAILED]
    if refused:
        yield f"{len(refused)} batches that the reference refuses"


def _limits(report: Outcome, *, verbose: bool) -> Iterator[str]:
    trained = report.learned is not None and report.learned.training is not None and report.learned.training.same_masks
    casts = any(dtype.startswith("autocast") for dtype in report.scope.dtypes)
    known = {"gradients": report.learned is not None, "training mode": trained, "autocast": casts}
    left = [what for what, done in known.items() if not done]
    if left:
        yield f"{_listed(left)}{'' if verbose else ' (not asked for)'}"
    if report.scope.lacking:
        which = "it" if len(report.scope.lacking) == 1 else "them"
        yield f"{', '.join(report.scope.lacking)} (your model does not take {which})"
    if report.scope.returned is None:
        yield "trials beyond the batches above"
    elif verbose:
        yield "other weights, several threads at a time"
    yield from _failures(report.scope, MOST_FAILED if verbose else 1)
    unseen = [unseen.what for unseen in report.unseen]
    most = len(unseen) if verbose else MOST_UNSEEN
    yield from unseen[:most]
    if len(unseen) > most:
        yield f"{len(unseen) - most} more that the inputs do not show"
    if report.idle:
        yield f"{first_few(report.idle, 3, 'more modules')}, which never ran"
    if report.not_taken:
        places = list(dict.fromkeys(branch.where for branch in report.not_taken))
        others = [f"{len(places) - MOST_PLACES} more"] if len(places) > MOST_PLACES else []
        if verbose or len(places) == 1:
            yield f"the branch{'es' if len(places) > 1 else ''} at {_listed([*places[:MOST_PLACES], *others])}"
        else:
            yield f"{len(places)} branches of the code"
    inside = tuple(f"{path}." for path in report.idle)
    copied = [name for name in report.shown.copy if not name.startswith(inside)] if inside else report.shown.copy
    for names, how in ((copied, " (compared by value only)"), (report.shown.nothing, ""), (report.shown.parts, "")):
        if names:
            part = "part of " if names is report.shown.parts else ""
            yield f"{part}{names[0]}{how}" if len(names) == 1 else f"{part}{len(names)} parameters{how}"
    if report.skipped:
        yield f"the probe {report.skipped[0]}" if len(report.skipped) == 1 else f"{len(report.skipped)} probes"


def never_ran(module: nn.Module, ran: set[str], shown: Shown) -> tuple[str, ...]:
    """The outermost modules with weights that were never called, nor their weights used by others.

    Where nothing tells which weights were used, as in a forward without gradients, none is named.

    Args:
        ran: the modules that ran, of those with weights of their own or without parts.
    """
    if not shown.activation:
        return ()
    idle: list[str] = []
    unshown = {*shown.copy, *shown.nothing, *shown.differing}
    for path, part in module.named_modules():
        if not path or any(path.startswith(f"{outer}.") for outer in idle):
            continue
        names = [f"{path}.{name}" for name, _ in named_tensors(part)]
        called = any(name == path or name.startswith(f"{path}.") for name in ran)
        if names and not called and unshown.issuperset(names):
            idle.append(path)
    return tuple(idle)
