"""Filling a module whose parameters are spread over processes: each reads the bytes of its own shards alone."""

from porting.sharding.filling import Filled, fill, is_sharded, prove_shares
from porting.sharding.writing import write_shards

__all__ = ["Filled", "fill", "is_sharded", "prove_shares", "write_shards"]
