"""Tensors that have no counterpart: which these are, what each may be, and a line for those of all layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from porting.suggesting.search.layouts import Shapes
from porting.suggesting.search.name_similarity import numbered, similarity
from porting.suggesting.search.search_result import SearchResult
from porting.suggesting.subjects.operation_trace import OperationTrace

NEVER = "never"
"""Where a tensor runs that no operation uses."""

MOST = 12
"""How many lines are printed about each side."""


@dataclass(frozen=True, kw_only=True)
class Near:
    """A tensor that may belong to another.

    Attributes:
        where: where it runs, ``"behind layers.0.norm1"``; :data:`NEVER` when it does not.
        difference: of the activations that the two meet, relative to their scale; None where none was measured.
    """

    name: str
    shape: tuple[int, ...] = ()
    where: str = ""
    difference: float | None = None

    def __str__(self) -> str:
        shape = f" {list(self.shape)}" if self.shape else ""
        far = "" if self.difference is None else f" (off by {self.difference:.0e})"
        return f"{self.name}{shape}{far}"


@dataclass(frozen=True, kw_only=True)
class Unmapped:
    """A tensor that has no counterpart.

    Attributes:
        side: ``"module"`` or ``"checkpoint"``.
        where: where it runs, ``"behind layers.0.norm1"``; :data:`NEVER` when it does not.
        near: what it may be, of the other side's tensors that have no counterpart, the nearest first.
        tie: the module's tensor whose values it needs, where the checkpoint has one tensor for both.
    """

    name: str
    shape: tuple[int, ...]
    side: str = "module"
    where: str = ""
    near: tuple[Near, ...] = ()
    tie: str = ""


def listed(unmapped: Sequence[Unmapped]) -> list[str]:
    """The tensors without a counterpart, in words: all of the module's, and the checkpoint's that may be one of these.

    >>> some = [Unmapped(name=f"h.{i}.up.{w}", shape=(3,), where="never") for i in (0, 1) for w in ("weight", "bias")]
    >>> listed(some)
    ['nothing fills h.{i}.up.{weight,bias} [3] (4 tensors), which never run']
    """
    return [line for side in ("module", "checkpoint") for line in _side(side, unmapped)]


def _side(side: str, unmapped: Sequence[Unmapped]) -> list[str]:
    groups: dict[str, list[Unmapped]] = {}
    for one in unmapped:
        if one.side == side and (side == "module" or one.near):
            groups.setdefault(numbered(one.name.rpartition(".")[0] or one.name), []).append(one)
    lines = [_line(side, stem, some) for stem, some in groups.items()]
    more = sum(len(some) for some in list(groups.values())[MOST:])
    return lines[:MOST] + ([f"and {more} more tensors of the {side}"] if more else [])


def _line(side: str, stem: str, some: Sequence[Unmapped]) -> str:
    some = sorted(some, key=lambda one: -len(one.shape))  # a matrix says more than its bias
    first = some[0]
    ends = list(dict.fromkeys(one.name.rpartition(".")[2] for one in some if "." in one.name))
    name = f"{stem}.{{{','.join(ends)}}}" if len(ends) > 1 else f"{stem}.{ends[0]}" if ends else stem
    shapes = " and ".join(dict.fromkeys(str(list(one.shape)) for one in some))
    count = f" ({len(some)} tensors)" if len(some) > max(len(ends), 1) else ""
    what = "nothing fills" if side == "module" else "nothing reads"
    plural = len(some) > 1
    where = f"run{'' if plural else 's'} {numbered(first.where)}"
    runs = f"never run{'' if plural else 's'}" if first.where == NEVER else where
    nearest = list(dict.fromkeys(numbered(str(one)) for one in first.near))
    near = f"; nearest: {', '.join(nearest)}" if nearest else ""
    tie = next((one for one in some if one.tie), None)
    if tie is not None:
        near = f": the checkpoint has one tensor for it and {tie.tie}, so tie them: {tie.name} = {tie.tie}"
    return f"{what} {name} {shapes}{count}, which {runs}{near}"


FEW = 3
"""How many candidates are named."""

ALIKE = 0.3
"""Names that have less than this in common are none where the shapes differ as well."""


def leftover(ours: Shapes, tensors: Mapping[str, Tensor], found: SearchResult, unused: Sequence[str]) -> list[Unmapped]:
    """The tensors that no rule reads or writes.

    Args:
        ours: the module's, name -> shape.
        tensors: the reference's.
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
            where=places.get(name, NEVER),
            near=tuple(
                Near(name=one, shape=others[one], where=elsewhere.get(one, NEVER))
                for one in _nearest(name, shape, others)
            ),
            tie=found.seconds.get(name, "") if side == "module" else "",
        )
        for side, mine, others, places, elsewhere in sides
        for name, shape in mine.items()
    ]


def _nearest(name: str, shape: tuple[int, ...], others: Shapes) -> Iterator[str]:
    """The names of tensors with the same sizes first, then by name."""
    alike = sorted(others, key=lambda one: (sorted(others[one]) != sorted(shape), -similarity(one, name)))
    return (one for one in alike[:FEW] if sorted(others[one]) == sorted(shape) or similarity(one, name) > ALIKE)


def behind(trace: OperationTrace) -> dict[str, str]:
    """The place where each tensor runs: after which other one, or for nothing that is returned."""
    found: dict[str, str] = {}
    before = ""
    for unit in trace.units:
        idle = unit.weights and trace.idle.issuperset(unit.weights)
        for name in unit.names:
            found.setdefault(
                name, "for nothing that is returned" if idle else f"behind {before}" if before else "first"
            )
        before = next(iter(unit.names), before)
    return found
