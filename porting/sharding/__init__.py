"""Sharded modules: each process reads and writes only the bytes of its own shards."""

from porting.sharding.filling import (
    Filled,
    fill,
    is_sharded,
    require_equal,
    require_same,
    stored_not_finite,
    unequal,
)
from porting.sharding.processes import Processes
from porting.sharding.writing import moved_dtypes, require_made, write_shards

__all__ = [
    "Filled",
    "Processes",
    "fill",
    "is_sharded",
    "moved_dtypes",
    "require_equal",
    "require_made",
    "require_same",
    "stored_not_finite",
    "unequal",
    "write_shards",
]
