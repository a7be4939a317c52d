"""The catalogue: every mistake that is searched for, by theme."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from porting.causes import (
    activations,
    alibi,
    convolutions,
    embeddings,
    experts,
    heads,
    limits,
    masks,
    norms,
    outputs,
    positions,
    precision,
    projections,
    rotary,
    structure,
)
from porting.causes.cause import Cause

THEMES: Mapping[str, tuple[Cause, ...]] = MappingProxyType(
    {
        "norms": norms.CAUSES,
        "activations": activations.CAUSES,
        "projections": projections.CAUSES,
        "convolutions": convolutions.CAUSES,
        "heads": heads.CAUSES,
        "masks": masks.CAUSES,
        "embeddings": embeddings.CAUSES,
        "positions": (*positions.CAUSES, *rotary.CAUSES, *alibi.CAUSES),
        "structure": structure.CAUSES,
        "experts": experts.CAUSES,
        "limits": limits.CAUSES,
        "outputs": outputs.CAUSES,
        "precision": precision.CAUSES,
    }
)

CATALOGUE: tuple[Cause, ...] = tuple(cause for causes in THEMES.values() for cause in causes)

ROUNDING: tuple[Cause, ...] = tuple(cause for cause in CATALOGUE if cause.rough)
"""The causes that are searched where a port computes the same function with larger rounding errors."""
