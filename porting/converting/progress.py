"""How far a conversion has come."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a conversion has come.

    Attributes:
        stage: what is being done: ``"checking"``, ``"writing"``, ``"reading"`` or ``"publishing"``.
        tensors, bytes: how much of the output is there.
        all_tensors, all_bytes: how much there will be.
        resumed: bytes of it that an earlier process had written.
        seconds: since the conversion began to write.
    """

    stage: str
    tensors: int
    bytes: int
    all_tensors: int
    all_bytes: int
    resumed: int
    seconds: float

    @property
    def speed(self) -> float:
        """Bytes a second, those that were there already left out."""
        return (self.bytes - self.resumed) / self.seconds if self.seconds > 0 else 0.0

    @property
    def left(self) -> float | None:
        """Seconds to go; None while nobody knows."""
        return (self.all_bytes - self.bytes) / self.speed if self.speed > 0 else None


Tell = Callable[[Progress], None]


class Meter:
    """Counts what several threads do.

    Args:
        tensors, nbytes: how much the output holds.
        tell: told now and then, in the thread that asks with :meth:`look`.
    """

    def __init__(self, tensors: int, nbytes: int, tell: Tell | None) -> None:
        self._all = tensors, nbytes
        self._tell = tell
        self._lock = Lock()
        self._begun = time.monotonic()
        self._tensors = self._bytes = self._resumed = 0
        self.stage = "writing"

    def expect(self, tensors: int, nbytes: int) -> None:
        """How much of the output this process will see to, when several share it."""
        self._all = tensors, nbytes

    def wrote(self, nbytes: int) -> None:
        """Some bytes of the output are written."""
        with self._lock:
            self._bytes += nbytes

    def kept(self, nbytes: int) -> None:
        """A tensor was there already."""
        with self._lock:
            self._bytes += nbytes
            self._resumed += nbytes
            self._tensors += 1

    def finished(self) -> None:
        """A tensor of the output is complete."""
        with self._lock:
            self._tensors += 1

    def look(self) -> None:
        """Tell how far it has come."""
        if self._tell is not None:
            self._tell(self.now)

    @property
    def now(self) -> Progress:
        """How far it has come."""
        with self._lock:
            return Progress(
                stage=self.stage,
                tensors=self._tensors,
                bytes=self._bytes,
                all_tensors=self._all[0],
                all_bytes=self._all[1],
                resumed=self._resumed,
                seconds=time.monotonic() - self._begun,
            )
