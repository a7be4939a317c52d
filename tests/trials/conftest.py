"""The same as for the tests of verification."""

from tests.verification.conftest import checkpoint, one_thread

__all__ = ["checkpoint", "one_thread"]
