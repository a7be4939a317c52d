"""Comparing two checkpoints value by value, and digests of their content."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from porting.comparing.differences import Comparison, diff
    from porting.comparing.digests import Digest, TensorDigest, digest
    from porting.comparing.numbers import Difference

__all__ = ["Comparison", "Difference", "Digest", "TensorDigest", "diff", "digest"]

_HOMES = {
    "differences": ("Comparison", "diff"),
    "digests": ("Digest", "TensorDigest", "digest"),
    "numbers": ("Difference",),
}  # a checkpoint is digested without torch, which the other modules need


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
