"""Where attention shows on both sides: its scores and probabilities, beside what modules return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

import torch
from torch import Tensor

from porting.suggesting.draft.generalise import indexed, joined
from porting.suggesting.search.naming import pattern
from porting.suggesting.subjects.side import Side
from porting.tracing.float64 import forced_float64
from porting.tracing.trace import ARROW, INNER, ROOT, trace

AXES = "b h q k"

Attention = Mapping[str, Mapping[str, Tensor]]
"""``"scores"`` or ``"probabilities"`` -> path of the innermost module -> what its first softmax is given, or gives."""


def attention(side: Side) -> Attention:
    """The scores and probabilities of one run."""
    found: dict[str, dict[str, Tensor]] = {kind: {} for kind in INNER}
    wanted = [f"{path or ROOT}{ARROW}{kind}" for path, _ in side.module.named_modules() for kind in INNER]

    def visit(point: str, value: Tensor) -> None:
        path, _, kind = point.partition(ARROW)
        if kind in found:  # the first call of a module; others have a number
            found[kind][path] = value.detach().clone()

    with torch.no_grad(), forced_float64(side.module):
        trace(side.module, side.call, wanted, visit)
    return found


def attention_probes(port: Attention, reference: Attention, bound: float) -> list[tuple[str, str]]:
    """The lines of [probes] for attention, scores and probabilities of a layer beside each other.

    Args:
        port, reference: of runs with the same weights on the same inputs.
        bound: how far two may be apart, relative to the larger's scale.
    """
    found: list[tuple[str, str]] = []
    for kind in INNER:
        pairs = []
        free = dict(port[kind])
        for theirs, value in reference[kind].items():
            match = next(_matches(value, free, bound), None)
            if match is None:
                continue
            names, left, right = match
            ours = names[0] if len(names) == 1 else pattern(names, "h")
            if not ours or (len(names) > 1 and "{h" not in ours):
                continue
            for name in names:
                del free[name]
            left, right = (f" [{axes}]" if axes else "" for axes in (left, right))
            pairs.append((f"{theirs}{ARROW}{kind}{left}", f"{ours}{ARROW}{kind}{right}"))
        found += [(a, b) for a, b in indexed(pairs)]
    return found


def _matches(value: Tensor, port: Mapping[str, Tensor], bound: float) -> Iterator[tuple[Sequence[str], str, str]]:
    """Which of the port's are this one: their names, and the axes of both sides where these differ."""
    if value.ndim != len(AXES.split()):
        return
    letters = AXES.split()
    layouts: list[tuple[Tensor, str, str]] = [(value, "", "")]
    layouts += [
        (value.permute(order), AXES, " ".join(letters[place] for place in order))
        for order in list(permutations(range(4)))[1:]
    ]
    layouts.append((value.flatten(0, 1), AXES, "(b h) q k"))
    layouts.append((value.transpose(0, 1).flatten(0, 1), AXES, "(h b) q k"))
    if value.shape[1] == 1:
        layouts.append((value[:, 0], "b 1 q k", "b q k"))
    for laid, left, right in layouts:
        for name, other in port.items():
            if _close(laid, other, bound):
                yield (name,), left, right
    heads = [next((name for name, other in port.items() if _close(one, other, bound)), "") for one in value.unbind(1)]
    if len(heads) > 1 and all(heads) and len(set(heads)) == len(heads):
        yield heads, AXES, "b q k"


def _close(one: Tensor, other: Tensor, bound: float) -> bool:
    if one.shape != other.shape or not one.numel():
        return False
    return float((one - other).abs().max()) <= bound * (float(one.abs().max()) or 1.0)


def ordered(lines: Sequence[tuple[str, str]], modules: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """The lines of [probes] in the order in which the reference's modules end, with attention in front of its own.

    Args:
        lines: of [probes].
        modules: path of a module of the reference -> its output, in order.
    """
    places = {path or ROOT: float(number) for number, path in enumerate(modules)}

    def place(line: tuple[str, str]) -> float:
        path, inner, _ = line[0].partition(" [")[0].partition(ARROW)
        path = _first(path)
        return places.get(path, float(len(places))) - (0.5 if inner else 0.0)

    return sorted(joined(lines), key=place)


def _first(path: str) -> str:
    """The path of the first layer, and of the first spelling."""
    found = ""
    while "{" in path:
        before, _, rest = path.partition("{")
        inside, _, path = rest.partition("}")
        name, _, spellings = inside.partition(":")
        number = spellings.partition(",")[0].partition("/")[0] if spellings else _zeroth(name)
        found += before + number
    return found + path


def _zeroth(expression: str) -> str:
    """What ``i``, ``i+1`` or ``2*i+1`` is in the first layer."""
    return expression.rpartition("+")[2] if "+" in expression else "0"
