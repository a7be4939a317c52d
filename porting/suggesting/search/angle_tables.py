"""Tables of cosines and sines that the module rounds otherwise than the reference: where they are, and the reference's.

A rotation by angles that were computed in another precision moves every activation behind it by about 1e-6.  What else
differs cannot be told from that, so the search runs with the reference's own numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from porting.suggesting.search.feature_permutation import ROUNDED
from porting.suggesting.search.search_result import SAME
from porting.suggesting.subjects.operation_trace import OperationTrace


def angle_columns(trace: OperationTrace) -> Tensor | None:
    """The cosines and sines of a run, [positions, columns]; None where it computes none, or for rows of two lengths."""
    tables = [_rows(value) for _, value in trace.angles]
    known = [one for one in tables if one is not None]
    if not known or len({len(one) for one in known}) > 1:
        return None
    columns = torch.cat(known, -1)
    return columns if columns.numel() else None


def with_columns(table: Tensor, columns: Tensor) -> tuple[Tensor, float] | None:
    """A table with the nearest columns of another in the place of its own.

    Args:
        table: cosines, sines or both, [... positions features]; it may have more positions.
        columns: the reference's, [positions columns].

    Returns:
        The table and by how much its columns were off; None where one of them is near no column of the other.
    """
    count = len(columns)
    if table.is_complex():
        sides = [with_columns(one, columns) for one in (table.real, table.imag)]
        (real, apart), (imaginary, also) = ((None, 0.0) if one is None else one for one in sides)
        return None if real is None or imaginary is None else (torch.complex(real, imaginary), max(apart, also))
    if not table.is_floating_point() or table.ndim < 2 or table.shape[-2] < count or not table.numel():
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
    if value.ndim < 2 or min(value.shape[-2:]) < 2:
        return None
    rows = value.double().reshape(-1, *value.shape[-2:])
    return rows[0] if bool((rows == rows[:1]).all()) else None


def replacements(trace: OperationTrace, columns: Tensor) -> tuple[dict[int, Tensor], float]:
    """What each operation of a run that gives cosines or sines shall give instead, and by how much they are off.

    Args:
        trace: the module's run.
        columns: the reference's.
    """
    found: dict[int, Tensor] = {}
    worst = 0.0
    for number, value in trace.angles:
        made = with_columns(value, columns)
        if made is not None and made[1] > SAME:
            found[number], worst = made[0], max(worst, made[1])
    return found, worst
