"""The lines of a report on gradients and training, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from porting.reporting.gradient_results import GradientResults, Steps, TrainMode
from porting.reporting.outcome import listed
from porting.tracing.dropout import DropoutMask
from porting.tracing.measure import ROUNDING


def gradient_lines(learned: GradientResults | None) -> Iterator[Text]:
    """The lines; none where gradients were not asked for."""
    if learned is None:
        return
    if learned.training is not None:
        yield from _in_training(learned.training)
    if learned.failed:
        yield Text.assemble(("the port's backward pass fails ", "bold red"), learned.failed)
        return
    yield _agreeing(learned)
    yield from _differing(learned)
    if learned.alone:
        yield Text(f"  not compared, without a counterpart in the reference: {listed(learned.alone)}", "yellow")
    if learned.padding:
        yield Text(f"  padding_idx on one side only, and left out of account here: {listed(learned.padding)}")
    for steps in learned.steps:
        yield from _trained(steps)


def _in_training(found: TrainMode) -> Iterator[Text]:
    if found.refused:
        yield Text(f"training mode was not compared: {found.refused}", "yellow")
    elif found.missing or found.added:
        yield Text("dropout differs in training mode:", "bold red")
        yield from _sites("the reference", found.missing)
        yield from _sites("your model", found.added)
    elif found.where:
        yield Text.assemble(
            ("training mode differs: ", "bold red"),
            f"with the same dropout masks it is off by {found.difference:.1e} of the scale, first at {found.where}",
        )
    else:
        said = f"{found.sites} dropout places with the same rates" if found.sites else "no dropout on either side"
        yield Text(f"training mode: {said}; float64: off by {found.difference:.1e} (tolerance {found.bound:.0e})")


MOST_SITES = 3
"""How many places are listed; the rest is counted."""


def _sites(title: str, sites: Sequence[DropoutMask]) -> Iterator[Text]:
    for site in sites[:MOST_SITES]:
        yield Text(f"  {title} drops {100 * site.rate:g} % of {list(site.shape)} in {site.module}")
    if len(sites) > MOST_SITES:
        yield Text(f"  and {title} does so at {len(sites) - MOST_SITES} more places")


def _agreeing(learned: GradientResults) -> Text:
    compared = [gradient for gradient in learned.gradients if not gradient.zero and not gradient.buffer]
    same = [gradient for gradient in compared if not gradient.differs]
    largest = max((gradient.meaning for gradient in same), default=0.0)
    dtypes = dict.fromkeys(dtype for gradient in same for dtype in gradient.rounding)
    worst = {dtype: max(gradient.rounding[dtype] for gradient in same) for dtype in dtypes}
    ratios = "".join(f", {dtype}: {ratio:.1f} x the reference's rounding" for dtype, ratio in worst.items())
    off = " (dropout is off on both sides)" if learned.dropout else ""
    return Text(
        f"gradients of {listed(learned.outputs)}: {len(same)} of {len(compared)} parameters agree{off}; "
        f"float64: off by {largest:.1e}{ratios}"
    )


def _differing(learned: GradientResults) -> Iterator[Text]:
    zero = [
        name
        for gradient in learned.gradients
        if gradient.zero and not gradient.buffer and not gradient.differs
        for name in gradient.port
    ]
    if zero:
        yield Text(f"  zero on both sides but for rounding: {listed(zero)}")
    neither = [name for gradient in learned.gradients if gradient.zero and gradient.buffer for name in gradient.port]
    if neither:
        yield Text(f"  no gradient on either side: {listed(neither)}, a buffer here")
    if learned.untrained:
        said = "has no gradient here, where it is a buffer; the reference trains it"
        yield Text(f"  {listed(learned.untrained)}: {said}", "yellow")
    for reason in dict.fromkeys(gradient.wrong for gradient in learned.differing):
        found = [gradient for gradient in learned.differing if gradient.wrong == reason]
        said = reason or f"off by up to {max(gradient.meaning for gradient in found):.1e} of itself"
        named = [name for gradient in found for name in gradient.port]
        yield Text.assemble(("  wrong gradient: ", "bold red"), f"{listed(named)}: {said}")
    if learned.leaves:
        arrives = f"it is right at {learned.arrives} and wrong at" if learned.arrives else "it is wrong already at"
        yield Text(f"  going back from the outputs, {arrives} {learned.leaves}")
    worse = [name for gradient in learned.gradients if gradient.imprecise for name in gradient.port]
    if worse:
        yield Text(
            f"  gradients that round worse than the reference's (over {ROUNDING:.0f}): {listed(worse)}", "yellow"
        )


def _trained(steps: Steps) -> Iterator[Text]:
    count = f"{steps.taken} step{'s' if steps.taken > 1 else ''} of {steps.optimiser}"
    if steps.differs:
        number, names = next((number, names) for number, names in steps.differing.items() if names)
        yield Text.assemble(
            (f"{count}: ", "bold red"), f"after step {number} these had moved otherwise: {listed(names)}"
        )
    else:
        ratios = "".join(f", {dtype}: {ratio:.1f} x its rounding" for dtype, ratio in steps.rounding.items())
        yield Text(f"{count}: the weights move as the reference's, float64: off by {steps.meaning:.1e} of that{ratios}")
    whole = [name for name, share in steps.undetermined.items() if share == 1]
    if whole:
        yield Text(f"  undetermined, for their gradient is nothing but rounding: {listed(whole)}", "yellow")
    partly = [share for share in steps.undetermined.values() if share < 1]
    if partly:
        yield Text(
            f"  of {len(partly)} others up to {100 * max(partly):.2g} % of the elements are, and were not compared"
        )
    if steps.fixed:
        yield Text(
            f"  held fixed, since the table sums, scales or repeats them, or they are buffers: {listed(steps.fixed)}",
            "yellow",
        )
