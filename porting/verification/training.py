"""Gradients and training of both sides, beyond the forward pass.

Dropout in training mode, with the same masks; the gradients; and a few steps of torch's own optimisers, after which is
compared through the table how far each weight has moved: its old value would hide it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from porting.errors import VerifyError
from porting.printable import dtype_name
from porting.reporting.gradient_results import GradientResults, Steps, TrainMode
from porting.target import named_tensors
from porting.tracing.dropout import DropoutMask, SameDropout
from porting.tracing.measure import MEANING, Anchor, Error, bound, error, luck, ratio
from porting.tracing.running import Side
from porting.tracing.trace import is_inner
from porting.verification.compare import END, Comparison
from porting.verification.counterparts import Counterpart, Counterparts
from porting.verification.gradients import (
    DOUBLE,
    Compared,
    Make,
    Objective,
    Slope,
    blamed,
    boundary,
    compared,
    judged,
    slope,
    value_of,
    with_padding,
)

Optimiser = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]

OPTIMISERS: Mapping[str, Optimiser] = {
    "SGD(lr=0.01, momentum=0.9)": lambda weights: torch.optim.SGD(weights, lr=0.01, momentum=0.9),
    "AdamW(lr=0.001)": lambda weights: torch.optim.AdamW(weights, lr=0.001),
}
"""Each as it is made; what is not said is torch's default, AdamW's weight decay of 0.01 included."""

Moved = list[dict[str, Tensor]]
"""After the first step and after the last: name -> how far each element has moved, in float64."""


def trained(
    name: str,
    make: tuple[Make, Make],
    objective: Objective,
    table: Counterparts,
    gradients: Mapping[str, Compared],
    dtypes: Sequence[torch.dtype],
    steps: int,
    *,
    single: bool,
) -> Steps:
    """Train both sides in float64 and in each working dtype, and compare.

    Args:
        make: give the reference and the port with weights of their own.
        gradients: reference's name -> what is known of its gradient.
        steps: how many steps, at least one.
        single: a side computes in less than float64 somewhere.
    """
    finest = min(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    movable = [one for one in table.found if one.movable]
    exact, port = _both(name, make, objective, movable, DOUBLE, steps)
    errors: dict[torch.dtype, dict[tuple[int, str], tuple[Error, Error]]] = {}
    for dtype in dtypes:
        theirs, ours = _both(name, make, objective, movable, dtype, steps)
        errors[dtype] = {}
        for when in range(len(exact)):
            for one in movable:
                keep = _kept(one, gradients[one.name], dtype)
                anchor = Anchor.of(exact[when][one.name][keep])
                pulled, own = table.pulled(one, ours[when]), theirs[when][one.name]
                errors[dtype][when, one.name] = error(pulled[keep], anchor), error(own[keep], anchor)
        del theirs, ours
    differing: list[list[str]] = [[] for _ in exact]
    largest, limit, ratios = 0.0, 0.0, dict.fromkeys((dtype_name(dtype) for dtype in dtypes), 0.0)
    for when in range(len(exact)):
        for one in movable:
            keep = _kept(one, gradients[one.name], finest)
            far = error(table.pulled(one, port[when])[keep], Anchor.of(exact[when][one.name][keep])).largest
            allowed = bound(*errors[finest][when, one.name], finest, single=single)
            if not far <= allowed:
                differing[when] += one.targets
            if far >= largest:
                largest, limit = far, allowed
            for dtype in dtypes:
                ours_, theirs_ = (replace(found, largest=0.0) for found in errors[dtype][when, one.name])
                if ours_.count:
                    beyond = ratio(ours_, theirs_, dtype) / luck(ours_.count) * luck(1 << 20)
                    ratios[dtype_name(dtype)] = max(ratios[dtype_name(dtype)], beyond)
    shares = [(one, 1 - float(gradients[one.name].determined[finest].double().mean())) for one in movable]
    numbers = (1, steps) if len(exact) > 1 else (1,)
    return Steps(
        optimiser=name,
        taken=steps,
        differing={number: tuple(found) for number, found in zip(numbers, differing, strict=True)},
        meaning=largest,
        bound=limit,
        rounding=ratios,
        undetermined={target: share for one, share in shares if share for target in one.targets},
        fixed=tuple(target for one in table.found if not one.movable for target in one.targets),
    )


def _both(
    name: str, make: tuple[Make, Make], objective: Objective, movable: Sequence[Counterpart], dtype: torch.dtype, k: int
) -> tuple[Moved, Moved]:
    reference, port = make
    theirs = {one.name for one in movable if one.trains[0]}
    ours = {target for one in movable if one.trains[1] for target in one.targets}
    return (
        list(_moved(OPTIMISERS[name], reference(dtype), objective, theirs, k, reference=True)),
        list(_moved(OPTIMISERS[name], port(dtype), objective, ours, k, reference=False)),
    )


def _moved(
    optimiser: Optimiser, side: Side, objective: Objective, names: set[str], steps: int, *, reference: bool
) -> Iterator[dict[str, Tensor]]:
    """Take the steps; how far the weights are from where they were, after the first and after the last."""
    weights = {name: one for name, one in named_tensors(side.module) if one.is_floating_point()}
    for tensor in {id(one): one for one in weights.values()}.values():
        tensor.data = tensor.data.clone()  # what is moved here belongs to nobody else
        tensor.requires_grad_(False)
    for name in names & weights.keys():
        weights[name].requires_grad_(True)
    before = {name: tensor.detach().to(DOUBLE, copy=True) for name, tensor in weights.items()}
    given = {id(one): one for one in weights.values() if one.requires_grad and isinstance(one, nn.Parameter)}
    chosen = list(given.values())
    taking = optimiser(chosen) if chosen else None
    for step in range(steps):
        side.module.zero_grad(set_to_none=True)
        for case in objective.cases:
            total, _ = value_of(side, case, objective, reference=reference, outputs_only=True)
            if total.requires_grad:
                total.backward()  # type: ignore[no-untyped-call]  # torch does not type it
        if taking is not None:
            taking.step()
        if step in {0, steps - 1}:
            yield {name: tensor.detach().double() - before[name] for name, tensor in weights.items()}


def _kept(one: Counterpart, gradient: Compared, dtype: torch.dtype) -> Tensor:
    """The elements that are compared: those that the port has, and whose gradient is more than rounding."""
    return gradient.determined[dtype] & one.covered()


CASES = 2
"""The number of batches that are run in training mode."""

ROUNDED = 1e-6
"""Relative to scale: a difference in eval mode that is larger than this is none of rounding."""

GROWN = 16.0
"""How much larger than in eval mode the rounding error in training mode may be."""


def in_training(make: Make, seed: int) -> Make:
    """The same sides in training mode, with masks that depend on the seed alone."""

    def made(dtype: torch.dtype) -> Side:
        side = make(dtype)
        side.module.train()
        side.draws = SameDropout(seed)
        return side

    return made


def compare_training(reference: Make, port: Make, comparison: Comparison) -> TrainMode:
    """Run both sides in training mode and compare their dropout masks, and then every probe end to end in float64.

    Args:
        reference, port: give sides in training mode: see :func:`in_training`.
    """
    theirs, ours = reference(DOUBLE), port(DOUBLE)
    far = max(comparison.differences(END).values(), default=0.0)
    if far > ROUNDED:
        return TrainMode(refused="your model differs in eval mode already")
    bound, worst, where, sites = max(MEANING, GROWN * far), 0.0, "", 0
    for case, pairing in enumerate(comparison.pairings[:CASES]):
        try:
            exact, found = theirs.record(case), ours.record(case)
        except VerifyError as failure:
            return TrainMode(refused=failure.faults[0].message)
        drawn = [one.draws.drawn if one.draws is not None else [] for one in (theirs, ours)]
        sites = max(sites, len(drawn[0]))
        apart = _apart(drawn[0], drawn[1])
        if apart is not None:
            return apart
        shapes = {point: tuple(value.shape) for point, value in found.items()}
        for point, pair in pairing.pairs.items():
            fits = shapes.get(point) == tuple(pair.shape) and all(one in exact for one in pair.sources)
            if not fits or is_inner(point):
                continue
            anchor = pair.anchor(exact, theirs.arguments[case], found[point])
            size = error(found[point], anchor).largest
            if size > bound and not where:
                where = point
            worst = max(worst, size)
    return TrainMode(sites=sites, difference=worst, bound=bound, where=where)


def _apart(reference: Sequence[DropoutMask], port: Sequence[DropoutMask]) -> TrainMode | None:
    """How the dropout of the two differs; None where both draw the same masks."""
    theirs, ours = Counter(one.kind for one in reference), Counter(one.kind for one in port)
    if theirs == ours:
        return None
    if _shares(reference) == _shares(port):
        return TrainMode(
            sites=len(reference),
            refused="both drop out as many values at the same rates, in tensors of other shapes",
        )
    return TrainMode(sites=len(reference), missing=_sites(reference, theirs - ours), added=_sites(port, ours - theirs))


def _shares(draws: Sequence[DropoutMask]) -> dict[float, int]:
    """Rate -> how many values it is applied to."""
    found: Counter[float] = Counter()
    for one in draws:
        found[one.rate] += one.kind[1]
    return dict(found)


def _sites(draws: Sequence[DropoutMask], wanted: Counter[tuple[float, int]]) -> tuple[DropoutMask, ...]:
    """The draws of these kinds, as many of each as are wanted: the last ones, if there are more."""
    left, found = Counter(wanted), []
    for one in reversed(draws):
        if left[one.kind] > 0:
            left[one.kind] -= 1
            found.append(one)
    return tuple(reversed(found))


def learn(
    reference: Make,
    port: Make,
    comparison: Comparison,
    table: Counterparts,
    *,
    dtypes: Sequence[torch.dtype],
    steps: int,
    seed: int,
    training: bool = False,
) -> GradientResults:
    """Compare the gradients of all parameters, and then the weights after some steps of each optimiser.

    Both models are in eval mode, or with ``training`` in training mode with the same dropout masks on both sides, where
    they drop the same values.

    Args:
        reference, port: give a side with a model of its own in a dtype.
        comparison: what was compared of the forward passes.
        dtypes: the working dtypes; without one float32, since it takes two dtypes to tell a gradient from rounding.
        steps: of each optimiser; 0 for none.
        seed: of the function that is differentiated, and of dropout masks.
        training: compare in training mode as well.
    """
    dtypes = dtypes or (torch.float32,)
    reference, port = with_padding(reference), with_padding(port)
    mode = None
    if training:
        sides = in_training(reference, seed), in_training(port, seed)
        mode = compare_training(*sides, comparison)
        if mode.same_masks:
            reference, port = sides
    objective = Objective(comparison, seed)
    exact = slope(reference(DOUBLE), objective, reference=True)
    double = port(DOUBLE)
    drops = [name for name, part in double.module.named_modules() if isinstance(part, _DropoutNd) and part.p]
    known = {
        "outputs": objective.outputs,
        "alone": table.alone,
        "dropout": () if mode is not None and mode.same_masks else tuple(drops),
        "training": mode,
        "padding": tuple(name for one in table.found if one.padded[0] != one.padded[1] for name in one.targets),
    }
    try:
        ours = slope(double, objective, reference=False)
        lower: Mapping[torch.dtype, tuple[Slope, Slope]] = {
            dtype: (
                slope(reference(dtype), objective, reference=True),
                slope(port(dtype), objective, reference=False),
            )
            for dtype in dtypes
        }
    except RuntimeError as error:
        return GradientResults(**known, failed=blamed(double, objective, error))  # type: ignore[arg-type]  # as named above
    everything = {one.name: compared(one, table, exact, ours, lower) for one in table.found}
    largest = max((float(one.exact.abs().max()) for one in everything.values() if one.exact.numel()), default=0.0)
    single = comparison.lowers
    gradients = [judged(one, everything[one.name], lower, largest, single=single) for one in table.found]
    arrives, leaves = "", ""
    if any(one.meaning > one.bound for one in gradients):
        arrives, leaves = boundary(objective, comparison, exact, ours, max(one.bound for one in gradients))
    return GradientResults(
        **known,  # type: ignore[arg-type]  # as named above
        gradients=tuple(gradients),
        arrives=arrives,
        leaves=leaves,
        steps=tuple(
            trained(name, (reference, port), objective, table, everything, dtypes, steps, single=single)
            for name in OPTIMISERS
        )
        if steps
        else (),
    )
