"""Comparing two checkpoints value by value, and digests of their content."""

from porting.comparing.differences import Comparison, diff
from porting.comparing.digests import Digest, TensorDigest, digest
from porting.comparing.numbers import Difference

__all__ = ["Comparison", "Difference", "Digest", "TensorDigest", "diff", "digest"]
