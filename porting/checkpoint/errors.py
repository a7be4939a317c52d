"""The errors of reading and writing checkpoints, and how the faults of one file are collected."""

from __future__ import annotations

from porting.errors import CheckpointError, Code, Fault
from porting.printable import quote

FAULTS_SHOWN = 20
"""The number of faults of one file that are spelled out; the rest are counted."""


class HubError(CheckpointError):
    """The hub, or the cache of what came from it, did not give what was asked for."""


def checkpoint_error(code: Code, where: str, message: str, hint: str = "") -> CheckpointError:
    """The error with a single fault of these fields."""
    return CheckpointError(Fault(code=code, where=where, message=message, hint=hint))


class FaultList:
    """The faults of one file: all are reported at once, at most :data:`FAULTS_SHOWN` spelled out."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._faults: list[Fault] = []
        self._unshown = 0

    def __bool__(self) -> bool:
        return bool(self._faults)

    @property
    def full(self) -> bool:
        """Whether further faults are only counted."""
        return len(self._faults) >= FAULTS_SHOWN

    def add(self, code: Code, message: str, *, tensor: str | None = None, hint: str = "") -> None:
        """Add a fault; with ``tensor``, its message names the tensor."""
        if self.full:
            self._unshown += 1
            return
        about = f"tensor {quote(tensor)}: " if tensor is not None else ""
        self._faults.append(Fault(code=code, where=self.where, message=about + message, hint=hint))

    def faults(self) -> tuple[Fault, ...]:
        """All faults; the last one counts those that are not shown."""
        if not self._unshown:
            return tuple(self._faults)
        more = Fault(
            code=self._faults[-1].code, where=self.where, message=f"and {self._unshown} more faults, not shown"
        )
        return (*self._faults, more)

    def raise_if_any(self) -> None:
        """Raises: CheckpointError with every fault, if there is one."""
        if self._faults:
            raise CheckpointError(self.faults())


__all__ = ["FAULTS_SHOWN", "CheckpointError", "FaultList", "HubError", "quote"]
