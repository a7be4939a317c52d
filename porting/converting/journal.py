"""The journal of a conversion: what is done, so that an interrupted conversion can be continued.

Each process writes a file with a JSON object on each line: first the conversion (a digest of the plan, and the identity
of every file of the input), then each tensor of the output when it is written and each of the input when it is read,
with their digests.  The journal is not trusted: a tensor is made again unless its bytes have the recorded digest, and
all tensors that it was made of still have theirs.

A line that cannot be read, such as a truncated last one, costs one tensor, which is made again.  Without the first line
it is unknown which conversion the files belong to.  They may be hours of work, so an error names the journal and
nothing is removed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from threading import Lock
from typing import BinaryIO

from porting.atomic import write_at
from porting.checkpoint.errors import CheckpointError
from porting.checkpoint.strict_json import JsonError, parse
from porting.converting.casts import Losses
from porting.converting.making import Made
from porting.errors import Code, Fault
from porting.limits import reading
from porting.opening import Folder
from porting.printable import shell_word

LONGEST = 1 << 23
"""Bytes of a line at most; that of a tensor that is made of 60,000 others is shorter."""

BEGINS = b'{"plan":'
"""The first line of a journal."""

LONGEST_DIGEST = 128
"""Characters of a digest at most."""

MOST = 1 << 63
"""The largest number of lost elements: no tensor has more."""


@dataclass(frozen=True, kw_only=True)
class Past:
    """The journals of earlier processes.

    Attributes:
        made: tensors of the output by name.
        sources: digests of tensors of the input; those that had several are not among them, since nothing says which
            of the output was made of which.
    """

    made: Mapping[str, Made]
    sources: Mapping[str, str]


class Journal:
    """A journal that is being written; an existing one of the same conversion is continued.

    Args:
        key: what is being done; a journal of something else is thrown away.

    Raises:
        CheckpointError: its first line cannot be read.
    """

    def __init__(self, folder: Folder, name: str, key: Mapping[str, object]) -> None:
        continued = bool(folder.kind(name)) and _is_of(folder, name, key)
        self._descriptor = folder.write(name)
        self._end = os.fstat(self._descriptor).st_size
        self._lock = Lock()
        if continued:
            self._append(b"\n")  # the last line may have been cut off
        else:
            os.ftruncate(self._descriptor, 0)
            self._end = 0
            self._write(key)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def made(self, name: str, made: Made) -> None:
        """Record that a tensor of the output is written."""
        self._write({"tensor": name, "digest": made.digest, **asdict(made.losses), "sources": dict(made.sources)})

    def read(self, name: str, digest: str) -> None:
        """Record the digest of a tensor of the input."""
        self._write({"source": name, "digest": digest})

    def _write(self, entry: Mapping[str, object]) -> None:
        raw = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._append(raw)

    def _append(self, raw: bytes) -> None:
        write_at(self._descriptor, raw, self._end)
        self._end += len(raw)


def past(folder: Folder, key: Mapping[str, object], *, made: Container[str], sources: Container[str]) -> Past | None:
    """Read the journals in a folder.

    Args:
        folder: where they lie.
        key: what is being done.
        made: the names of the output's tensors; entries of others are passed over.
        sources: the names of the input's tensors; as above.

    Returns:
        None when there is no journal, or they are of something else.
    """
    journals = [name for name in sorted(folder.names()) if _is_of(folder, name, key)]
    writing: dict[str, Made] = {}
    digests: dict[str, set[str]] = {}

    def take(name: str, digest: object) -> None:
        several = digests.setdefault(name, set()) if name in sources else set()
        if len(several) < 2:  # of more it is enough to know that they differ
            several.add(digest if isinstance(digest, str) and len(digest) <= LONGEST_DIGEST else "")  # no digest is ""

    for name in journals:
        with reading(str(folder.path / name)):
            for entry in _entries(folder, name):
                match entry:
                    case {"tensor": str(tensor), "digest": str(digest), "infinite": int(infinite),
                          "vanished": int(vanished), "sources": dict(read)}:  # fmt: skip
                        known = tensor in made and len(digest) <= LONGEST_DIGEST
                        if known and 0 <= infinite < MOST and 0 <= vanished < MOST:
                            writing[tensor] = Made(digest=digest, losses=Losses(infinite=infinite, vanished=vanished))
                            for source, of_source in read.items():
                                take(source, of_source)
                    case {"source": str(source), "digest": str(digest)}:
                        take(source, digest)
    single = {name: digest for name, several in digests.items() if len(several) == 1 for digest in several}
    return Past(made=writing, sources=single) if journals else None


def _is_of(folder: Folder, name: str, key: Mapping[str, object]) -> bool:
    """Whether a journal's first line belongs to this conversion.

    It does not when its writer died before the whole of the line was written.
    """
    with _opened(folder, name) as file:
        line = file.readline(LONGEST)
    if not line.endswith(b"\n") and line[: len(BEGINS)] == BEGINS[: len(line)] and len(line) < LONGEST:
        return False
    try:
        header = parse(line, where=str(folder.path / name))
        if isinstance(header, dict) and isinstance(header.get("plan"), str) and isinstance(header.get("sources"), list):
            return bool(header == json.loads(json.dumps(key)))
        reason = "its first line does not say which conversion it is of"
    except JsonError as error:
        reason = f"its first line is refused: {error}"
    again = f"`rm -r {shell_word(folder.path.parent)}`"
    fault = Fault(
        code=Code.DESTINATION_REFUSED,
        where=str(folder.path / name),
        message=f"the journal of an interrupted conversion cannot be read: {reason}",
        hint=f"nothing was removed; to start afresh, run {again} and the same command again",
    )
    raise CheckpointError(fault)


def _entries(folder: Folder, name: str) -> Iterator[object]:
    """The entries of the other lines; truncated and damaged ones are left out."""
    with _opened(folder, name) as file:
        whole = True
        while line := file.readline(LONGEST):
            begins, whole = whole, line.endswith(b"\n")
            if begins and whole:
                with suppress(ValueError, RecursionError):
                    yield json.loads(line.decode())


def _opened(folder: Folder, name: str) -> BinaryIO:
    return os.fdopen(folder.open(name).descriptor, "rb")
