"""Gradients of both sides: of one linear function, compared parameter by parameter through the table.

The function is random and linear in what the reference returns, so that its gradient reaches all that training would
reach; it is written in the port's layout, and the reference's value is carried there.  What has no gradient in
mathematics, such as a key bias behind a softmax, has one in floating point: rounding, which shrinks with the unit
roundoff from float32 to float64 where a gradient does not.  That is how it is recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from porting.printable import dtype_name
from porting.reporting.gradient_results import Gradient
from porting.target import named_tensors
from porting.tracing.measure import Anchor, Error, bound, error, ratio
from porting.tracing.running import Side
from porting.tracing.trace import Point, Trace, is_inner
from porting.verification.compare import Comparison
from porting.verification.counterparts import Counterpart, Counterparts

Make = Callable[[torch.dtype], Side]
"""Gives a side with a model of its own in a dtype."""

DOUBLE = torch.float64


@dataclass
class Slope:
    """The gradients of one side in one dtype.

    Attributes:
        weights: name -> gradient, summed over the cases, in float64; zeros where there is none.
        points: for each case, those of the activations.
    """

    weights: dict[str, Tensor]
    points: list[Trace]


class Objective:
    """A random linear function of the outputs, for every case.

    Args:
        comparison: what was compared, and the reference's float64 activations.
    """

    def __init__(self, comparison: Comparison, seed: int) -> None:
        self._comparison = comparison
        self._seed = seed
        self._weights: list[dict[Point, Tensor]] = [{} for _ in comparison.exact]

    @property
    def cases(self) -> range:
        """The numbers of the cases."""
        return range(len(self._weights))

    @property
    def outputs(self) -> tuple[Point, ...]:
        """The points of the port that it is a function of."""
        return tuple(dict.fromkeys(point for weights in self._weights for point in weights))

    def wanted(self, case: int, *, reference: bool, outputs_only: bool = False) -> list[Point]:
        """The points to see on one side."""
        pairs = self._comparison.pairings[case].pairs
        found = list(self._weights[case]) if outputs_only else [point for point in pairs if not is_inner(point)]
        return [source for point in found for source in pairs[point].sources] if reference else found

    def choose(self, case: int, held: Trace, returned: object) -> None:
        """Take as outputs what the reference returns, and every probe that none of the later ones depends on."""
        leaves = {id(one) for one in tree_leaves(returned)}
        chosen = {point for point, value in held.items() if id(value) in leaves} | set(ends(held))
        generator = torch.Generator().manual_seed(self._seed + case)
        anchors = self._comparison.anchors[case]
        known: set[int] = set()  # what a probe compares is often what is returned as well
        for point, pair in self._comparison.pairings[case].pairs.items():
            values = {id(held[one]) for one in pair.sources if one in held}
            if is_inner(point) or not chosen.intersection(pair.sources) or values <= known:
                continue
            known |= values
            weight = torch.randn(pair.shape, dtype=DOUBLE, generator=generator)
            if not pair.whole:  # what has no counterpart has no say
                weight *= pair.carry({one: torch.ones_like(self._comparison.exact[case][one]) for one in pair.sources})
            seen = anchors[point].seen
            weight = weight if seen is None else weight * seen  # nor has padding
            self._weights[case][point] = weight / (anchors[point].scale * max(weight.numel(), 1) ** 0.5)

    def chosen(self, case: int) -> bool:
        """Whether the outputs of a case are known: the reference's first pass says what they are."""
        return bool(self._weights[case])

    def of_port(self, case: int, held: Trace) -> Tensor:
        """The objective's value on the port."""
        values = [(held[point], weight) for point, weight in self._weights[case].items() if point in held]
        return torch.stack([(value * weight.to(value.dtype)).sum() for value, weight in values]).sum()

    def of_reference(self, case: int, held: Trace) -> Tensor:
        """The objective's value on the reference, carried to the port's layout."""
        pairs = self._comparison.pairings[case].pairs
        values = [(pairs[point].carry(held), weight) for point, weight in self._weights[case].items()]
        return torch.stack([(value * weight.to(value.dtype)).sum() for value, weight in values]).sum()


def ends(held: Trace) -> list[Point]:
    """The points that no later one was computed from, by autograd's graph."""
    seen: set[object] = set()
    found = []
    for point in reversed(held):
        node = held[point].grad_fn
        if node is None or node in seen:
            continue
        found.append(point)
        waiting: list[object] = [node]
        while waiting:
            one = waiting.pop()
            if one not in seen:
                seen.add(one)
                waiting += [before for before, _ in getattr(one, "next_functions", ()) if before is not None]
    return found


def with_padding(make: Make) -> Make:
    """The same, with the padding word's row of embeddings treated as any other: not every port leaves it out."""

    def made(dtype: torch.dtype) -> Side:
        side = make(dtype)
        for part in side.module.modules():
            if isinstance(part, nn.Embedding):
                part.padding_idx = None
        return side

    return made


def value_of(
    side: Side, case: int, objective: Objective, *, reference: bool, outputs_only: bool = False
) -> tuple[Tensor, Trace]:
    """One forward pass with its graph: the objective, and the activations as the model made them."""
    held: Trace = {}
    versions: dict[Point, int] = {}

    def visit(point: Point, value: Tensor) -> None:
        if point in versions:
            return
        held[point], versions[point] = value, value._version

    returned: list[object] = []
    hook = side.module.register_forward_hook(lambda module, args, output: returned.append(output))
    wanted = objective.wanted(case, reference=reference, outputs_only=outputs_only)
    try:
        side.run(case, visit, wanted=wanted, gradients=True)
    finally:
        hook.remove()
    if reference and not objective.chosen(case):
        objective.choose(case, held, returned)
    total = objective.of_reference(case, held) if reference else objective.of_port(case, held)
    return total, {point: value for point, value in held.items() if value._version == versions[point]}


def slope(side: Side, objective: Objective, *, reference: bool) -> Slope:
    """The gradients of one side.

    Raises:
        RuntimeError: the backward pass fails.
    """
    weights = {
        name: tensor.requires_grad_(True)
        for name, tensor in named_tensors(side.module)
        if tensor.is_floating_point()  # a buffer as well: it may stand for a parameter of the other side
    }
    unique = {id(tensor): tensor for tensor in weights.values()}
    sums = {key: torch.zeros(tensor.shape, dtype=DOUBLE) for key, tensor in unique.items()}
    points: list[Trace] = []
    for case in objective.cases:
        total, held = value_of(side, case, objective, reference=reference)
        seen = {point: value for point, value in held.items() if value.requires_grad}
        found: Sequence[Tensor | None] = [None] * (len(unique) + len(seen))
        if total.requires_grad:
            found = torch.autograd.grad(total, [*unique.values(), *seen.values()], allow_unused=True)
        for key, gradient in zip(unique, found[: len(unique)], strict=True):
            if gradient is not None:
                sums[key] += gradient.double()
        given = zip(seen.items(), found[len(unique) :], strict=True)
        points.append({point: torch.zeros_like(value) if one is None else one for (point, value), one in given})
    return Slope({name: sums[id(tensor)] for name, tensor in weights.items()}, points)


@dataclass
class Compared:
    """One parameter's gradients in every dtype, in the reference's layout.

    Attributes:
        exact: the reference's in float64.
        port: the port's in float64, through the table.
        errors: working dtype -> the errors of the port and of the reference.
        determined: working dtype -> the elements whose gradient is well above the rounding of the reference's own.
    """

    exact: Tensor
    port: Tensor
    errors: dict[torch.dtype, tuple[Error, Error]]
    determined: dict[torch.dtype, Tensor]


CLEAR = 64.0
"""A gradient this many times its rounding error has a sign that no other way of rounding changes."""


def compared(
    one: Counterpart, table: Counterparts, exact: Slope, port: Slope, lower: Mapping[torch.dtype, tuple[Slope, Slope]]
) -> Compared:
    """Everything that is known of one parameter's gradient."""
    theirs, ours = exact.weights[one.name], table.pulled(one, port.weights)
    anchor = Anchor.of(theirs)
    found = Compared(theirs, ours, {}, {})
    for dtype, (reference, other) in lower.items():
        rounded, pulled = reference.weights[one.name], table.pulled(one, other.weights)
        found.errors[dtype] = error(pulled, anchor), error(rounded, anchor)
        noise = float((rounded - theirs).abs().amax()) if theirs.numel() else 0.0
        never = (theirs == 0) & (rounded == 0) & (ours == 0) & (pulled == 0)
        found.determined[dtype] = (theirs.abs() > CLEAR * noise) | never
    return found


def judged(
    one: Counterpart, found: Compared, lower: Mapping[torch.dtype, tuple[Slope, Slope]], largest: float, *, single: bool
) -> Gradient:
    """One gradient in the report.

    Args:
        lower: working dtype -> those of the reference and of the port.
        largest: of all gradients in float64, the largest element.
        single: a side computes in less than float64 somewhere, whatever its weights are.
    """
    finest = min(lower, key=lambda dtype: torch.finfo(dtype).eps)
    shrunk = (torch.finfo(DOUBLE).eps / torch.finfo(finest).eps) ** 0.5  # halfway between rounding and gradient
    theirs, ours = _largest(found.exact), _largest(found.port)
    anchor = Anchor.of(found.exact)
    port, reference = found.errors[finest]
    least = torch.finfo(DOUBLE).eps * largest
    named = {"reference": one.name, "port": one.targets, "count": found.exact.numel()}
    if theirs <= max(least, shrunk * anchor.scale * reference.largest):
        wrong = f"it is zero in the reference and up to {ours:.1e} in the port"
        wrong = "" if ours <= max(least, shrunk * anchor.scale * port.largest) else wrong
        zero = Gradient(**named, zero=True, wrong=wrong or _apart(one))  # type: ignore[arg-type]  # as named above
        return replace(zero, wrong="", buffer=True) if one.buffer else zero
    if one.buffer:
        return Gradient(**named, buffer=True)  # type: ignore[arg-type]  # as named above
    allowed = bound(port, reference, finest, single=single)
    return Gradient(
        **named,  # type: ignore[arg-type]  # as named above
        meaning=error(found.port, anchor).largest,
        bound=allowed,
        rounding={dtype_name(dtype): ratio(*pair, dtype) for dtype, pair in found.errors.items()},
        wrong=_apart(one) or _rows(found, allowed * anchor.scale),
    )


def _rows(found: Compared, limit: float) -> str:
    """In words, that few rows of many are wrong; empty when it is otherwise."""
    if found.exact.ndim != 2 or len(found.exact) < 8:
        return ""
    wrong = ((found.exact - found.port).abs().amax(1) > limit).nonzero()[:, 0].tolist()
    if not 0 < len(wrong) <= len(found.exact) // 8:
        return ""
    named = f"row{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong[:4]))}{' ...' if len(wrong) > 4 else ''}"
    return f"it differs in {named} only"


def _apart(one: Counterpart) -> str:
    """Why the gradients of the two parameters cannot be compared; empty if they can."""
    if len(one.steps) > 1:
        return (
            f"it is one parameter in the reference ({', '.join(one.names)}) and several in the port: a tie is missing"
        )
    reference, port = one.trains
    if reference and not port:
        return "it is frozen in the port (requires_grad=False) and trains in the reference"
    if port and not reference:
        return "it trains in the port and is frozen in the reference"
    return ""


def boundary(objective: Objective, comparison: Comparison, exact: Slope, port: Slope, limit: float) -> tuple[str, str]:
    """Going back from the outputs: the last probe at which the gradient is right, the first at which it is wrong.

    Args:
        exact, port: the gradients in float64.
        limit: relative to a gradient's largest element, above this it is wrong.
    """
    for case in objective.cases:
        right = ""
        for point, pair in reversed(list(comparison.pairings[case].pairs.items())):
            theirs, ours = exact.points[case], port.points[case].get(point)
            if is_inner(point) or not pair.whole or any(source not in theirs for source in pair.sources):
                continue
            if any(0 in copy.source_strides for copy in pair.step.copies):
                continue
            anchor = Anchor.of(pair.carry(theirs))
            far = 1.0 if ours is None and anchor.rms else 0.0 if ours is None else error(ours, anchor).largest
            if far > limit:
                return right, point
            right = point
    return "", ""


def blamed(side: Side, objective: Objective, why: RuntimeError) -> str:
    """Why the backward pass failed, and the first probe of the port that cannot be differentiated."""
    said = str(why).strip().partition("\n")[0].partition(". Hint:")[0]
    for case in objective.cases:
        _, held = value_of(side, case, objective, reference=False)
        weights = [one for one in side.module.parameters() if one.requires_grad]
        for point, value in held.items():
            try:
                if value.requires_grad:
                    torch.autograd.grad(value.sum(), weights, retain_graph=True, allow_unused=True)
            except RuntimeError:
                return f"from {point} back: {said}"
    return said


def _largest(value: Tensor) -> float:
    return float(value.abs().amax()) if value.numel() else 0.0
