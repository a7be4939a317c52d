"""What a conversion has done so far, written down as it goes, so that the next one can go on.

One file of lines for each process, each line a JSON object: first what is being done (a digest of the plan, and the
identity of every file of the input), then each tensor of the output once it is written and each of the input once it is
read, with their digests.  Nothing is believed because it stands here: a tensor is done again unless its bytes have the
digest, and every tensor that it was made of has now the digest that it had then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import Lock

from porting.converting.casts import Losses
from porting.converting.making import Made
from porting.converting.output import write_at
from porting.opening import Folder

LONGEST = 1 << 30
"""Bytes of a journal: a million tensors need less."""


@dataclass(frozen=True, kw_only=True)
class Past:
    """What earlier processes wrote down.

    Attributes:
        made: tensors of the output by name.
        sources: digests of tensors of the input; those that had several are not among them, since nothing says which
            of the output was made of which.
    """

    made: Mapping[str, Made]
    sources: Mapping[str, str]


class Journal:
    """A journal that is being written: one that is there already goes on, if it is of the same conversion.

    Args:
        folder: where it lies.
        name: its file.
        key: what is being done; a journal of something else is thrown away.
    """

    def __init__(self, folder: Folder, name: str, key: Mapping[str, object]) -> None:
        begun = folder.read(name, limit=LONGEST).partition(b"\n")[0] if folder.kind(name) else b""
        self._descriptor = folder.write(name)
        self._end = os.fstat(self._descriptor).st_size
        self._lock = Lock()
        if _is_of(_entry(begun), key):
            self._end += write_line(self._descriptor, b"\n", self._end)  # the last line may have been cut off
        else:
            os.ftruncate(self._descriptor, 0)
            self._end = 0
            self._write(key)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

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


def past(folder: Folder, key: Mapping[str, object]) -> Past | None:
    """What the journals in a folder say; None when there is none, or they are of something else."""
    made: dict[str, Made] = {}
    sources: dict[str, set[str]] = {}
    found = False
    for name in sorted(folder.names()):
        lines = folder.read(name, limit=LONGEST).split(b"\n")
        entries = [one for line in lines if isinstance(one := _entry(line), dict)]
        if entries and _is_of(entries[0], key):
            found = True
            _take(entries[1:], made, sources)
    single = {name: digest for name, digests in sources.items() if len(digests) == 1 for digest in digests}
    return Past(made=made, sources=single) if found else None


def _is_of(entry: object, key: Mapping[str, object]) -> bool:
    """Whether the first line of a journal says that it is of this conversion."""
    return bool(entry == json.loads(json.dumps(key)))


def _take(entries: Iterable[object], made: dict[str, Made], sources: dict[str, set[str]]) -> None:
    for entry in entries:
        match entry:
            case {"tensor": str(name), "digest": str(digest), "infinite": int(infinite), "vanished": int(vanished),
                  "sources": dict(read)}:  # fmt: skip
                made[name] = Made(digest=digest, losses=Losses(infinite=infinite, vanished=vanished))
                for source, of_source in read.items():
                    sources.setdefault(source, set()).add(str(of_source))
            case {"source": str(name), "digest": str(digest)}:
                sources.setdefault(name, set()).add(digest)


def _entry(line: bytes) -> object:
    """A line's content; None for one that was cut off when its writer died."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
