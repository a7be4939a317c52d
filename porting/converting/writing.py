"""Writing the files of a draft into a temporary directory, with their digests."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from threading import Event, Lock

from porting.atomic import moved_by_others, write_at
from porting.checkpoint.container import Shard
from porting.checkpoint.files import LocalFile
from porting.checkpoint.layout import RECORD
from porting.checkpoint.names import split_sources
from porting.checkpoint.safetensors_file import DTYPE_NAMES
from porting.comparing.jobs import work
from porting.converting.digests import PIECE, of_bytes, of_framed, of_range, sha256_of
from porting.converting.draft import Draft
from porting.converting.journal import Journal, Past, past
from porting.converting.making import Made, Maker, Output
from porting.converting.processes import ProcessGroup, same_everywhere, shares
from porting.converting.progress import Meter
from porting.converting.record import packed, record_bytes, versions
from porting.converting.workplace import Workplace, require_room
from porting.limits import reading
from porting.plan.recipe import Recipe
from porting.printable import dtype_name


def write_files(
    draft: Draft, place: Workplace, group: ProcessGroup, *, threads: int, memory: int, sha256: bool, meter: Meter
) -> tuple[dict[str, Made], dict[str, int]]:
    """Write every file of a draft.

    Args:
        place: where; what an earlier process left there is used as far as it is right.
        group: the processes that share the tensors; the first one does all the rest.

    Returns:
        The tensors, in the order of the output; and the bytes of each file.
    """
    with reading(str(place.root)):
        settled = draft.key
    keys = group.gather(settled)
    same_everywhere(key["plan"] for key in keys)
    key = keys[0]  # the number of a device is that of one machine: all go by what the first one sees
    prepared = (_prepare_files(draft, place, key), place.inode) if group.rank == 0 else (None, 0)
    ((before, inode), *_) = group.gather(prepared)
    if place.inode != inode:  # the folder was exchanged before this process opened it
        raise moved_by_others(place.path)
    group.gather(None)  # the first process, which removes the folder if it fails, goes on when all have opened it
    journal = Journal(place.journals, f"{group.rank}.jsonl", key)
    try:
        with _opened(draft, place) as shards:
            task = _Task(draft, group, shards, journal, meter)
            crc = any(shard.seals for shard in draft.outline.shards)
            make_makers = [lambda: Maker(draft.checkpoint, draft.like, memory, task.wrote, crc=crc)] * threads
            task.make(make_makers, before)
            meter.stage = "reading"
            task.digest_sources(make_makers)
    finally:
        journal.close()
    if group.rank == 0:
        small = _write_small(draft, place)
        for name in {*place.files.names()} - {*draft.files, *(shard.name for shard in draft.outline.shards)}:
            os.unlink(name, dir_fd=place.files.descriptor)
        place.write(RECORD, _record(draft, task, place, small, sha256=sha256))
    made = {recipe.name: task.made[recipe.name] for recipe in draft.recipes.tensors}
    (files, *_) = group.gather({name: place.files.status(name).st_size for name in sorted(place.files.names())})
    return made, files


def _prepare_files(draft: Draft, place: Workplace, key: Mapping[str, object]) -> Past | None:
    """Make files of the right size, reserve their space, and write their headers; returns what was done before."""
    tensors = frozenset(recipe.name for recipe in draft.recipes.tensors)
    before = past(place.journals, key, made=tensors, sources=draft.checkpoint.tensors)
    if before is None:
        place.clear()
    allocated = sum(place.files.status(name).st_blocks * 512 for name in place.files.names())
    require_room(place.files, max(0, draft.outline.size - allocated))
    place.untouched = False
    with _opened(draft, place) as shards:
        for shard in draft.outline.shards:
            for at, raw in shard.frame:
                write_at(shards[shard.name], raw, at)
    return before


@contextmanager
def _opened(draft: Draft, place: Workplace) -> Iterator[dict[str, int]]:
    """Open all shards; yields their descriptors."""
    with ExitStack() as stack:
        found = {}
        for shard in draft.outline.shards:
            found[shard.name] = place.open(shard.name, shard.size)
            stack.callback(os.close, found[shard.name])
        yield found


class _Task:
    """The tensors to be made, and those that are made."""

    def __init__(
        self, draft: Draft, group: ProcessGroup, shards: Mapping[str, int], journal: Journal, meter: Meter
    ) -> None:
        self.made: dict[str, Made] = {}
        self.sources: dict[str, str] = {}
        self._draft = draft
        self._group = group
        self._shards = shards
        self._journal = journal
        self._meter = meter
        self._left: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._lock = Lock()
        self._stop = Event()
        self._reading = {name: Lock() for name in draft.checkpoint.tensors}

    def make(self, make_makers: list[Callable[[], Maker]], before: Past | None) -> None:
        """Make this process's share, except for tensors that an earlier process made and that are still right."""
        recipes = {recipe.name: recipe for recipe in self._draft.recipes.tensors}
        all_jobs = [(shard, recipes[name]) for shard in self._draft.outline.shards for name in shard.tensors]
        share = [all_jobs[job] for job in self._share([recipe.nbytes for _, recipe in all_jobs])]
        self._left.update(shard.name for shard, _ in share)
        self._meter.expect(len(share), sum(recipe.nbytes for _, recipe in share))
        self._waiting.update(name for _, recipe in all_jobs for name in recipe.sources)
        jobs = [(recipe.nbytes, partial(self._make, shard, recipe, before)) for shard, recipe in share]
        work(jobs, make_makers, self._meter.look, self._stop)
        for made, sources in self._group.gather((self.made, self.sources)):
            self.made |= made
            self.sources |= sources

    def wrote(self, count: int) -> None:
        """Count bytes that were written."""
        if self._stop.is_set():
            raise InterruptedError
        self._meter.wrote(count)

    def _share(self, costs: Sequence[int]) -> list[int]:
        """The numbers of the jobs that this process does, in their order."""
        return sorted(shares(costs, self._group.size)[self._group.rank])

    def _make(self, shard: Shard, recipe: Recipe, before: Past | None, maker: Maker) -> None:
        descriptor, at = self._shards[shard.name], shard.offsets[recipe.name]
        made = self._resumed(recipe, before, maker, descriptor, at) if before is not None else None
        if made is not None:
            self._meter.kept(recipe.nbytes)
        else:
            made = maker.make(recipe, descriptor, at)
            self._journal.made(recipe.name, made)
            self._meter.finished()
        seal = shard.seals.get(recipe.name)
        if seal is not None:
            for place in seal.places:
                write_at(descriptor, seal.of(made.crc, recipe.nbytes), place)
        with self._lock:
            self.made[recipe.name] = made
            self.sources.update(made.sources)
            self._left[shard.name] -= 1
            complete = self._left[shard.name] == 0
            self._waiting.subtract(recipe.sources)
            unread = [name for name in recipe.sources if not self._waiting[name] and name not in self.sources]
        for name in unread:  # it has to be read for its digest: now, so that the next process can go by it
            self._digest(name, maker)
        if complete:
            os.fsync(descriptor)

    def _resumed(self, recipe: Recipe, before: Past, maker: Maker, descriptor: int, at: int) -> Made | None:
        """The tensor as an earlier process made it, if its bytes and its sources are unchanged; else None."""
        made = before.made.get(recipe.name)
        if made is None or recipe.base:  # of the followed checkpoint no digests are taken
            return None
        if not before.sources.keys() >= set(recipe.sources):
            return None
        found = maker.sum_at(descriptor, at, recipe.nbytes)
        if found.hexdigest() != made.digest:
            return None
        if any(before.sources[name] != self._digest(name, maker) for name in recipe.sources):
            return None
        return replace(made, crc=found.crc)

    def digest_sources(self, make_makers: list[Callable[[], Maker]]) -> None:
        """Take the digests of those tensors of the input that were not read completely while others were made."""
        left = [info for name, info in self._draft.checkpoint.tensors.items() if name not in self.sources]
        share = [left[job] for job in self._share([info.nbytes for info in left])]
        work([(info.nbytes, partial(self._digest, info.name)) for info in share], make_makers, self._meter.look)
        for sources in self._group.gather(self.sources):
            self.sources |= sources

    def _digest(self, name: str, maker: Maker) -> str:
        """The digest of a tensor of the input; each is read once for it."""
        with self._reading[name]:
            found = self.sources.get(name)
            if found is None:
                found = maker.digest_of(name)
                self._journal.read(name, found)
                with self._lock:
                    self.sources[name] = found
        return found


def _write_small(draft: Draft, place: Workplace) -> dict[str, str]:
    """Write the config, tokenizer and index; returns their digests."""
    digests = {}
    for name, content in draft.files.items():
        if isinstance(content, bytes):
            place.write(name, content)
            digests[name] = of_bytes(content)
            continue
        file = LocalFile(content.open())
        descriptor = place.open(name, file.size)
        try:
            out = Output(descriptor, 0, lambda count: None)
            for start in range(0, file.size, PIECE):
                out.put(memoryview(file.pread(start, min(PIECE, file.size - start))))
            file.require_unchanged()
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        digests[name] = out.hexdigest()
    return digests


def _record(draft: Draft, task: _Task, place: Workplace, small: Mapping[str, str], *, sha256: bool) -> bytes:
    """The text of the record; ``small`` has the digests of all files but those of weights."""
    checkpoint = draft.checkpoint
    location, _ = split_sources(checkpoint.location)
    source: dict[str, object] = {
        "name": Path(location).name if checkpoint.commit is None else location,
        "commit": checkpoint.commit,
        "files": {file.name: _source_digest(draft, task, file.name) for file in checkpoint.files},
        "tensors": packed(
            (
                name,
                task.sources[name],
                {
                    "file": info.file,
                    "dtype": DTYPE_NAMES.get(dtype_name(info.dtype), str(info.dtype)),
                    "shape": list(info.shape),
                },
            )
            for name, info in checkpoint.tensors.items()
        ),
    }
    files: dict[str, dict[str, object]] = {}
    for shard in draft.outline.shards:
        digests = [task.made[name].digest for name in shard.offsets if name not in shard.hidden]
        files[shard.name] = {"size": shard.size, "digest": of_framed(_frame(shard, place), digests)}
    for name, digest in small.items():
        files[name] = {"size": place.files.status(name).st_size, "digest": digest}
    if sha256:
        for name, entry in files.items():
            entry["sha256"] = sha256_of(LocalFile(place.files.open(name)))
    losses = {
        recipe.name: asdict(task.made[recipe.name].losses)
        for recipe in draft.recipes.tensors
        if task.made[recipe.name].losses
    }
    with reading(str(place.root)):
        return record_bytes(
            {
                "reverse": draft.reverse,
                "command": _command(draft),
                "versions": versions(),
                "table": {"name": draft.table.name, "digest": draft.table.digest},
                "options": dict(draft.options),
                "source": source,
                "files": dict(sorted(files.items())),
                "tensors": packed((one.name, task.made[one.name].digest, {}) for one in draft.recipes.tensors),
                "losses": losses,
            }
        )


def _frame(shard: Shard, place: Workplace) -> bytes:
    """The bytes around the tensors of a file, with the checksums that are known after writing."""
    file = LocalFile(place.files.open(shard.name))
    return b"".join(file.pread(at, len(raw)) for at, raw in shard.frame)


def _source_digest(draft: Draft, task: _Task, name: str) -> dict[str, object]:
    """The size and digest of a file of the input; a pickled one is read, since its tensors are only a part of it."""
    file = next(weights for weights in draft.checkpoint.files if weights.name == name)
    if file.header is None:
        local = draft.checkpoint.file(name)
        digest = of_range(local, 0, local.size, memoryview(bytearray(PIECE)))
        return {"size": file.size, "digest": digest}
    front = len(file.header).to_bytes(8, "little") + file.header
    order = sorted(file.names, key=lambda tensor: draft.checkpoint.pieces(tensor)[0].extent.start)
    return {"size": file.size, "digest": of_framed(front, [task.sources[tensor] for tensor in order])}


def _command(draft: Draft) -> str:
    """The command that makes the same output again."""
    words = ["porting", "convert", "SOURCE", "DESTINATION", "--table", draft.table.name]
    words += ["--reverse"] if draft.reverse else []
    for option in ("dtype", "shard_size", "to"):
        value = draft.options.get(option)
        words += [f"--{option.replace('_', '-')}", str(value)] if value is not None else []
    return " ".join(words)
