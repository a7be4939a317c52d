"""Where in an activation a difference lies: its sizes by position and by channel, few enough to be kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_ROWS, MOST_POSITIONS, MOST_CHANNELS = 16, 64, 128
"""More than these are taken together, neighbours by their largest."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The differences of one activation in one case, relative to the activation's scale.

    The axes are those of the port: the last one is called channels (of attention scores it is the keys), the one
    before it positions, and all others together rows.

    Attributes:
        case: the number of the case, from 0.
        shape: the activation's own.
        positions: the largest difference over the channels, by row and position.
        channels: the largest difference over all rows and positions, by channel.
    """

    case: int
    shape: tuple[int, ...]
    positions: tuple[tuple[float, ...], ...]
    channels: tuple[float, ...]


def spread_of(value: Tensor, exact: Tensor, scale: float, case: int) -> Spread:
    """How ``value - exact`` is spread; both are of one shape, of at least one element.

    Where a value is no number the difference is infinite.
    """
    apart = (value.detach().double() - exact).abs().div(scale).nan_to_num(nan=torch.inf, posinf=torch.inf)
    width = apart.shape[-1] if apart.ndim else 1
    length = apart.shape[-2] if apart.ndim > 1 else 1
    apart = apart.reshape(-1, length, width)
    positions = apart.amax(-1)
    most = (min(len(positions), MOST_ROWS), min(length, MOST_POSITIONS))
    return Spread(
        case=case,
        shape=tuple(value.shape),
        positions=tuple(tuple(row) for row in F.adaptive_max_pool2d(positions[None], most)[0].tolist()),
        channels=tuple(F.adaptive_max_pool1d(apart.amax((0, 1))[None], min(width, MOST_CHANNELS))[0].tolist()),
    )
