"""Tables of cosines and sines that a port rounds otherwise than the reference: where they are, and the reference's.

A rotation by angles that were computed in another precision moves every activation behind it by up to 1e-6.  What else
differs can be told from that where the port runs with the reference's own numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from porting.tracing.torch_modes import DispatchMode

ANGLES = frozenset({"cos", "sin", "polar"})
"""Operations that give cosines or sines."""

ROUNDED = 1e-5
"""Two tables are one if they are no further from each other: one of them is rounded to float32, or its angles are."""

SAME = 1e-10
"""Columns that are no further from each other are not rounded otherwise."""


class AnglesSeen(DispatchMode):
    """Collects the cosines and sines that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`DispatchMode.dispatch`."""
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__ in ANGLES and isinstance(result, Tensor):
            self.found.append(result.detach().clone())
        return result


class AnglesReplaced(DispatchMode):
    """Gives the nearest columns of another table in the place of cosines and sines that are computed."""

    def __init__(self, columns: Tensor) -> None:
        super().__init__()
        self._columns = columns

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`DispatchMode.dispatch`."""
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__ in ANGLES and isinstance(result, Tensor):
            made = with_columns(result, self._columns)
            result = result if made is None else made[0]
        return result


@contextmanager
def buffers_replaced(module: nn.Module, columns: Tensor) -> Iterator[None]:
    """A module's buffers that hold cosines or sines with the nearest columns of another table."""
    before: list[tuple[Tensor, Tensor]] = []
    try:
        for buffer in module.buffers():
            made = with_columns(buffer, columns)
            if made is not None:
                before.append((buffer, buffer.detach().clone()))
                buffer.data.copy_(made[0])
        yield
    finally:
        for buffer, value in before:
            buffer.data.copy_(value)


def angle_columns(values: Iterable[Tensor]) -> Tensor | None:
    """The cosines and sines of a run, [positions, columns]; None where there are none, or for rows of two lengths."""
    tables = [_rows(value) for value in values]
    known = [one for one in tables if one is not None]
    if not known or len({len(one) for one in known}) > 1:
        return None
    columns = torch.cat(known, -1)
    return columns if columns.numel() else None


def with_columns(table: Tensor, columns: Tensor) -> tuple[Tensor, float] | None:
    """A table with the nearest columns of another in the place of its own.

    Args:
        table: cosines, sines or both, [... positions features], also with axes of one element between positions and
            features, as for all heads; it may have more positions.
        columns: the reference's, [positions columns]; of a shorter table the first positions are looked at.

    Returns:
        The table and by how much its columns were off; None where one of them is near no column of the other.
    """
    bare = _without_ones(table)
    if bare.shape != table.shape:
        found = with_columns(bare, columns)
        return None if found is None else (found[0].reshape(table.shape), found[1])
    count = min(len(columns), table.shape[-2] if table.ndim > 1 else 0)
    columns = columns[:count]
    if table.is_complex():
        sides = [with_columns(one, columns) for one in (table.real, table.imag)]
        (real, apart), (imaginary, also) = ((None, 0.0) if one is None else one for one in sides)
        return None if real is None or imaginary is None else (torch.complex(real, imaginary), max(apart, also))
    if not table.is_floating_point() or not count or not table.numel():
        return None
    made = table.detach().clone()
    rows = made[..., :count, :].double()
    flat = rows.movedim(-1, 0).movedim(-1, 1).reshape(rows.shape[-1], count, -1)  # features, positions, copies
    worst = 0.0
    for feature in range(len(flat)):
        far = (flat[feature][:, :, None] - columns[:, None, :]).abs().amax((0, 1))
        nearest = int(far.argmin())
        worst = max(worst, float(far[nearest]))
        if worst > ROUNDED:
            return None
        made[..., :count, feature] = columns[:, nearest].to(made.dtype)
    return made, worst


def _rows(value: Tensor) -> Tensor | None:
    """A table's rows, [positions columns], where all copies of it in a batch are one; both parts of complex ones."""
    if value.is_complex():
        parts = [_rows(one) for one in (value.real, value.imag)]
        found = [one for one in parts if one is not None]
        return torch.cat(found, -1) if len(found) == len(parts) else None
    value = _without_ones(value)
    if value.ndim < 2 or min(value.shape[-2:]) < 2:
        return None
    rows = value.double().reshape(-1, *value.shape[-2:])
    return rows[0] if bool((rows == rows[:1]).all()) else None


def _without_ones(table: Tensor) -> Tensor:
    """A table [... positions features] without its axes of one element, but for one position or one feature."""
    if table.ndim < 3:
        return table
    wide = [size for size in table.shape[:-1] if size != 1]
    return table.reshape(*(wide or [1]), table.shape[-1])


def replacements(angles: Iterable[tuple[int, Tensor]], columns: Tensor) -> tuple[dict[int, Tensor], float]:
    """Return exact replacements for the cosines and sines of a run, and the largest error of the run's own.

    Args:
        angles: what the port's operations gave, with their numbers.

    Returns:
        Place among the angles -> the replacement, where one differs; and the largest error.
    """
    found: dict[int, Tensor] = {}
    worst = 0.0
    for number, (_, value) in enumerate(angles):
        made = with_columns(value, columns)
        if made is not None and made[1] > SAME:
            found[number], worst = made[0], max(worst, made[1])
    return found, worst
