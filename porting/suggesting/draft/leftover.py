"""What has no counterpart, on both sides, with what it may be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from porting.suggesting.draft.unmapped import Near, Unmapped
from porting.suggesting.search.finding import Found
from porting.suggesting.search.naming import likeness
from porting.suggesting.subjects.tracing import Trace

FEW = 3
"""So many candidates are named."""

ALIKE = 0.3
"""Names that have less than this in common are none where the shapes differ as well."""


def leftover(
    ours: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], found: Found, unused: Sequence[str]
) -> list[Unmapped]:
    """The tensors that no rule reads or writes.

    Args:
        ours: the module's, name -> shape.
        tensors: the reference's.
        found: what the search came to.
        unused: the reference's that no rule reads.
    """
    theirs = {name: tuple(tensors[name].shape) for name in unused}
    sides = (
        ("module", ours, theirs, behind(found.trace), behind(found.reference)),
        ("checkpoint", theirs, ours, behind(found.reference), behind(found.trace)),
    )
    return [
        Unmapped(
            name=name,
            shape=shape,
            side=side,
            where=places.get(name, "never"),
            near=tuple(
                Near(name=one, shape=others[one], where=elsewhere.get(one, "never"))
                for one in _nearest(name, shape, others)
            ),
            tie=found.seconds.get(name, "") if side == "module" else "",
        )
        for side, mine, others, places, elsewhere in sides
        for name, shape in mine.items()
    ]


def _nearest(name: str, shape: tuple[int, ...], others: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Those of the same sizes first, then by name."""
    alike = sorted(others, key=lambda one: (sorted(others[one]) != sorted(shape), -likeness(one, name)))
    return (one for one in alike[:FEW] if sorted(others[one]) == sorted(shape) or likeness(one, name) > ALIKE)


def behind(trace: Trace) -> dict[str, str]:
    """Where each tensor runs: behind which other one."""
    found: dict[str, str] = {}
    before = ""
    for unit in trace.units:
        for name in unit.names:
            found.setdefault(name, f"behind {before}" if before else "first")
        before = next(iter(unit.names), before)
    return found
