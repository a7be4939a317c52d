"""Holding two checkpoints against each other, value by value, and naming what one holds by a digest."""

from porting.comparing.differences import Comparison, diff
from porting.comparing.digests import Digest, TensorDigest, digest
from porting.comparing.numbers import Difference

__all__ = ["Comparison", "Difference", "Digest", "TensorDigest", "diff", "digest"]
