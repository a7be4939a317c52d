"""``digest``: a digest of the values of a checkpoint, independent of files and layout.

The digest of a checkpoint is the SHA-256 of a short text: the line ``porting hash 1``, then for each tensor, ordered by
the code points of its name, a line of JSON without spaces, ``["name","float32",[2,3],"9f86…"]``, whose last item is the
SHA-256 of the tensor's elements in row-major order, little-endian.  Files, shards, order and metadata have no part in
it.  Through a table the names and the order of the elements are those of its left side
(:mod:`porting.comparing.canonical`), so that a checkpoint and its port agree.

SHA-256 is not the fastest digest, but nobody can make two different checkpoints with the same one.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import local
from typing import TYPE_CHECKING, Any

from porting.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from porting.comparing.jobs import THREADS, map_jobs, spans
from porting.limits import reading, spending
from porting.printable import dtype_name
from porting.tables import find_table

if TYPE_CHECKING:  # a checkpoint's bytes are digested without torch
    import torch
    from torch import Tensor

    from porting.comparing.canonical import Side
    from porting.comparing.differences import Progress
    from porting.comparing.streaming import Reader
    from porting.notation.table import Table
    from porting.plan.recipe import Recipe

FIRST_LINE = "porting hash 1"


@dataclass(frozen=True, kw_only=True)
class TensorDigest:
    """The digest of a tensor's values.

    Attributes:
        name: its name; through a table, that of the left side.
        dtype: its dtype, ``"float32"``; of values alone their kind, ``"float"``.
        sha256: of its elements in row-major order, little-endian; hexadecimal.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str

    @property
    def line(self) -> str:
        """The tensor's line in the text that the checkpoint's digest is made of."""
        return json.dumps([self.name, self.dtype, list(self.shape), self.sha256], separators=(",", ":"))


@dataclass(frozen=True, kw_only=True)
class Digest:
    """The digest of a checkpoint's values.

    Attributes:
        tensors: its tensors, ordered by name.
        values: whether values count and dtypes do not.
        left_out: tensors on disk that have no part in it, with the table's reason.
        nbytes: how many bytes of elements it names.

    >>> import porting
    >>> source = porting.embedded_checkpoint()
    >>> len(porting.digest(source).tensors)
    62
    """

    tensors: tuple[TensorDigest, ...]
    values: bool
    left_out: Mapping[str, str]
    nbytes: int

    @property
    def text(self) -> str:
        """The text whose SHA-256 is the digest."""
        return "".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The lines of that text."""
        yield f"{FIRST_LINE} values\n" if self.values else f"{FIRST_LINE}\n"
        yield from (f"{tensor.line}\n" for tensor in self.tensors)

    def __str__(self) -> str:
        state = hashlib.sha256()
        for line in self.lines():
            state.update(line.encode("ascii"))
        return f"sha256:{state.hexdigest()}"


@spending()
def digest(
    source: str | os.PathLike[str] | Checkpoint,
    table: Table | str | Path | None = None,
    *,
    side: Side | None = None,
    values: bool = False,
    threads: int = THREADS,
    progress: Progress | None = None,
) -> Digest:
    """Compute the digest of a checkpoint's content.

    Args:
        source: a directory, a weight file, a hub id or an open checkpoint.
        table: name the content as the table's left side has it; None takes it as it is on disk.
        side: the table's side that ``source`` is on; None to see by its names.
        values: name the values alone: bfloat16 and the float32 that it widens to are then the same.
        threads: how many tensors are read at a time.
        progress: called with the progress.

    Raises:
        CheckpointError: it cannot be read.
        TableError: there is no such table, or it has faults.
        PlanError: the table does not fit, or has a rule that adds or multiplies.

    >>> import porting
    >>> source = porting.embedded_checkpoint()
    >>> str(digest(source)) == str(digest(source / "model.safetensors"))
    True
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    checkpoint.allow_time()
    chosen = None if table is None else find_table(table, checkpoint.config, checkpoint.tensors)
    jobs: Sequence[TensorInfo | Recipe]
    left_out: Mapping[str, str] = {}
    if chosen is None and not values:
        work: Callable[[Any], TensorDigest] = _Stored(checkpoint)  # Any: of each job that it is given
        jobs = sorted(checkpoint.tensors.values(), key=lambda info: info.name)
    else:
        from porting.comparing.canonical import canonical  # noqa: PLC0415  # plans need torch
        from porting.comparing.streaming import Readers  # noqa: PLC0415  # as above

        with reading(checkpoint.location):
            recipes, left_out = canonical(checkpoint, chosen, side)
            jobs = sorted(recipes, key=lambda recipe: recipe.name)
        readers = Readers(checkpoint)

        def work(recipe: Recipe) -> TensorDigest:
            return _tensor_digest(recipe, readers.mine, values=values)

    total = sum(job.nbytes for job in jobs)
    done = 0
    tensors: list[TensorDigest] = []
    for job, result in zip(jobs, map_jobs(jobs, work, lambda job: job.nbytes, threads=threads), strict=True):
        tensors.append(result)
        done += job.nbytes
        if progress is not None:
            progress(job.name, done, total)
    checkpoint.require_in_place()
    return Digest(tensors=tuple(tensors), values=values, left_out=left_out, nbytes=total)


PIECE = 1 << 18
"""Bytes that are read at a time: what a processor's cache holds."""


class _Stored(local):
    """Digests tensors as they are on disk: from their bytes where these lie together, else through torch."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._buffer = memoryview(bytearray(PIECE))
        self._reader: Reader | None = None

    def __call__(self, info: TensorInfo) -> TensorDigest:
        box = self._checkpoint.run(info.name)
        if box is None:
            from porting.comparing.streaming import Reader  # noqa: PLC0415  # only such tensors need torch
            from porting.plan.recipe import as_it_is  # noqa: PLC0415  # as above

            self._reader = self._reader or Reader(self._checkpoint)
            return _tensor_digest(as_it_is(info.name, info), self._reader, values=False)
        state = hashlib.sha256()
        for start in range(box.extent.start, box.extent.stop, PIECE):
            piece = self._buffer[: min(PIECE, box.extent.stop - start)]
            box.file.read_into(piece, start)
            state.update(piece)
        box.file.require_unchanged()
        return TensorDigest(name=info.name, dtype=str(info.element), shape=info.shape, sha256=state.hexdigest())


def _tensor_digest(recipe: Recipe, reader: Reader, *, values: bool) -> TensorDigest:
    state = hashlib.sha256()
    for start, stop in spans(recipe.numel, recipe.dtype.itemsize, reader.length(recipe)):
        piece = reader.window(recipe, start, stop)
        piece = (_values(piece) if values else piece).contiguous()
        if piece.numel():
            state.update((ctypes.c_char * piece.nbytes).from_address(piece.data_ptr()))
    kind = _kind(recipe.dtype) if values else dtype_name(recipe.dtype)
    return TensorDigest(name=recipe.name, dtype=kind, shape=recipe.shape, sha256=state.hexdigest())


def _kind(dtype: torch.dtype) -> str:
    import torch  # noqa: PLC0415  # as above

    if dtype.is_floating_point:
        return "float"
    if dtype.is_complex:
        return "complex"
    return dtype_name(dtype) if dtype in (torch.bool, torch.uint64) else "int"


def _values(piece: Tensor) -> Tensor:
    """The elements in the widest dtype of their kind, with one NaN and without negative zeros."""
    import torch  # noqa: PLC0415  # as above

    if piece.is_complex():
        piece = torch.view_as_real(piece).reshape(-1)
    if not piece.is_floating_point():
        return piece if piece.dtype in (torch.bool, torch.uint64) else piece.to(torch.int64)
    piece = piece.float() if piece.itemsize == 1 else piece
    wide = piece.double() + 0.0  # -0.0 + 0.0 is 0.0
    wide[wide.isnan()] = torch.nan
    return wide
