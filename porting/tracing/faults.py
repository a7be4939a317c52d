"""What can go wrong in a verification that is not a difference."""

from porting.errors import PortingError


class VerifyError(PortingError):
    """The verification cannot be run: no reference, a module that fails, probes that do not fit."""
