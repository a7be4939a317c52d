"""Filling a module whose parameters are spread over processes: each reads the bytes of its own shards alone."""

from porting.sharding.filling import Filled, fill, is_sharded, require_equal, unequal
from porting.sharding.together import Crew, RankError
from porting.sharding.writing import write_shards

__all__ = ["Crew", "Filled", "RankError", "fill", "is_sharded", "require_equal", "unequal", "write_shards"]
