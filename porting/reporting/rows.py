"""The probes of a report by layer: a row for each layer, and for each probe outside of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from porting.reporting.outcome import Probe
from porting.tracing.trace import ARROW, ROOT

OUTPUT = "output"
"""What a layer gives, or a module outside of the layers: the column of the probes that are named by a row alone."""

_NUMBERED = re.compile(r"(?:(?P<stack>.*?)\.)?(?P<number>\d+)(?=\.|$| )")


@dataclass(frozen=True, kw_only=True)
class Row:
    """The probes of one layer, or one probe outside of the layers.

    Attributes:
        label: ``layer 3``; ``decoder 3`` where there are several stacks of layers; the point of a lone probe.
        columns: what each probe is within the layer, ``attention.query`` or ``output``.
        probes: in the reference's order of execution.
    """

    label: str
    columns: tuple[str, ...]
    probes: tuple[Probe, ...]


def rows_of(probes: Iterable[Probe]) -> list[Row]:
    """The rows, in the reference's order of execution.

    A layer is told by the first number in its point and what stands before it, so that the layers of an encoder and
    of a decoder are rows of their own.
    """
    groups: dict[tuple[str | None, str], list[tuple[str, Probe]]] = {}
    for probe in probes:
        found = _NUMBERED.match(probe.port)
        key = (found["stack"] or "", found["number"]) if found else (None, probe.port)
        within = probe.port[found.end() :].lstrip(". ") if found else ""
        within = f".{within}" if within == OUTPUT else within  # a part of that name is not the layer's own output
        if probe.port.partition(ARROW)[0] == ROOT:  # what the model itself returns
            key = (None, f"{OUTPUT} {probe.port.partition(ARROW)[2]}".rstrip())
        groups.setdefault(key, []).append((within or OUTPUT, probe))
    names = _stack_names(list(dict.fromkeys(stack for stack, _ in groups if stack is not None)))
    return [
        Row(
            label=name if stack is None else f"{names[stack]} {name}",
            columns=tuple(column for column, _ in members),
            probes=tuple(probe for _, probe in members),
        )
        for (stack, name), members in groups.items()
    ]


def _stack_names(stacks: Sequence[str]) -> dict[str, str]:
    """What each stack of layers is called: by what its path has and the others' have not."""
    if len(stacks) == 1:
        return {stacks[0]: "layer"}
    paths = {stack: stack.split(".") for stack in stacks}
    before = _shared(list(paths.values()))
    after = _shared([path[before:][::-1] for path in paths.values()])
    return {stack: ".".join(path[before : len(path) - after]) or stack or "layer" for stack, path in paths.items()}


def _shared(paths: Sequence[Sequence[str]]) -> int:
    """How many parts all of them begin with."""
    count = 0
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        count += 1
    return count
