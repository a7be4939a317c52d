"""Private folders for temporary files.  What a process that was killed leaves behind is removed by the next one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType

PREFIX = "porting-scratch-"
"""How the names of the folders begin, in the system's directory for temporary files."""

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Scratch:
    """A private folder, which only this user can enter and which :meth:`close` removes with all that it holds.

    The process that made it holds a lock on it, by which the next one tells a folder in use from one that was left.

    Raises:
        OSError: none can be made.
    """

    def __init__(self) -> None:
        sweep()
        self._open = True
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            self._lock = _locked(self.path)
            if self._lock >= 0 or self.path.exists():  # where nothing can be locked, nothing is swept
                return  # else another process took it for one that was left, before it was locked

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder; a second call does nothing."""
        if self._open:
            self._open = False
            shutil.rmtree(self.path, ignore_errors=True)
            if self._lock >= 0:
                os.close(self._lock)


def sweep() -> None:
    """Remove the folders that processes of this user left, which were killed."""
    parent = Path(tempfile.gettempdir())
    with suppress(OSError):
        for name in os.listdir(parent):
            if name.startswith(PREFIX) and (lock := _locked(parent / name)) >= 0:
                shutil.rmtree(parent / name, ignore_errors=True)
                os.close(lock)


def _locked(path: Path) -> int:
    """Lock a folder of this user; returns the descriptor that holds the lock, or -1 if that is impossible."""
    try:
        descriptor = os.open(path, FOLDER)
    except OSError:
        return -1
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(status, os.stat(path, follow_symlinks=False)):
                return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return -1
