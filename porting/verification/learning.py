"""Beyond the forward pass: the gradients of both sides, and a few steps of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn.modules.dropout import _DropoutNd

from porting.reporting.gradient_results import GradientResults
from porting.verification.compare import Comparison
from porting.verification.counterparts import Counterparts
from porting.verification.gradients import (
    DOUBLE,
    Make,
    Objective,
    Slope,
    blamed,
    boundary,
    compared,
    judged,
    slope,
    with_padding,
)
from porting.verification.train_mode import compare_training, in_training
from porting.verification.training import OPTIMISERS, trained


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
