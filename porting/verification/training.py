"""A few steps of torch's own optimisers on both sides, and what has become of the weights, through the table.

What is compared is how far each weight has moved: its old value would hide it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from porting.printable import dtype_name
from porting.reporting.gradient_results import Steps
from porting.target import named_tensors
from porting.tracing.measure import Anchor, Error, bound, error, luck, ratio
from porting.tracing.running import Side
from porting.verification.counterparts import Counterpart, Counterparts
from porting.verification.gradients import DOUBLE, Compared, Make, Objective, value_of

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
