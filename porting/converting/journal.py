"""What a conversion has done so far, written down as it goes, so that the next one can go on.

One file of lines, each a JSON object: first what is being done (a digest of the plan, and size and time of every file
of the input), then each tensor once it is written, with its digest.  Nothing is believed because it stands here: a
tensor is read again, and done again unless its bytes have the digest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from porting.converting.casts import Losses
from porting.converting.kernel import write_at
from porting.converting.making import Made


@dataclass(frozen=True, kw_only=True)
class Past:
    """What earlier processes wrote down.

    Attributes:
        made: tensors of the output by name.
        sources: digests of tensors of the input.
    """

    made: Mapping[str, Made]
    sources: Mapping[str, str]


class Journal:
    """A journal that is being written.

    Args:
        path: its file.
        key: what is being done; a journal of something else is thrown away.
    """

    def __init__(self, path: Path, key: Mapping[str, object]) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._end = os.fstat(self._descriptor).st_size
        self._lock = Lock()
        self._key = key

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def begin(self) -> None:
        """Throw away what stands there, and write the first line."""
        os.ftruncate(self._descriptor, 0)
        self._end = 0
        self._write(self._key)

    def resume(self) -> None:
        """Go on after the last line, on one of its own even when the last one was cut off."""
        self._end += write_line(self._descriptor, b"\n", self._end)

    def made(self, name: str, made: Made) -> None:
        """A tensor of the output is written."""
        losses = {"infinite": made.losses.infinite, "vanished": made.losses.vanished}
        self._write({"tensor": name, "digest": made.digest, **losses, "sources": dict(made.sources)})

    def read(self, name: str, digest: str) -> None:
        """A tensor of the input was read."""
        self._write({"source": name, "digest": digest})

    def _write(self, entry: Mapping[str, object]) -> None:
        raw = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._end += write_line(self._descriptor, raw, self._end)


def write_line(descriptor: int, raw: bytes, at: int) -> int:
    """Write a line at a place; its length."""
    write_at(descriptor, raw, at)
    return len(raw)


def past(path: Path, key: Mapping[str, object]) -> Past | None:
    """What a journal says; None when there is none, or it is of something else."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return None
    entries = [entry for line in lines if isinstance(entry := _entry(line), dict)]
    if not entries or entries[0] != json.loads(json.dumps(key)):
        return None
    made: dict[str, Made] = {}
    sources: dict[str, str] = {}
    for entry in entries[1:]:
        match entry:
            case {"tensor": str(name), "digest": str(digest), "infinite": int(infinite), "vanished": int(vanished),
                  "sources": dict(read)}:  # fmt: skip
                losses = Losses(infinite=infinite, vanished=vanished)
                made[name] = Made(digest=digest, losses=losses, sources=read)
                sources |= read
            case {"source": str(name), "digest": str(digest)}:
                sources[name] = digest
    return Past(made=made, sources=sources)


def _entry(line: bytes) -> object:
    """A line's content; None for one that was cut off when its writer died."""
    try:
        return json.loads(line)
    except ValueError:
        return None
