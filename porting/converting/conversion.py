"""``convert``: a checkpoint into another layout or back, in fixed memory, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from porting.atomic import check_destination, explained, publish, sweep
from porting.checkpoint import Checkpoint, open_checkpoint
from porting.checkpoint.write import check_directory
from porting.converting.casts import Losses
from porting.converting.draft import ConvertOptions, Draft, draft_back, draft_into_port
from porting.converting.making import LEAST, required
from porting.converting.processes import ProcessGroup, all_or_none, shared_failures
from porting.converting.progress import Meter, Progress, Tell
from porting.converting.workplace import FILES, REPLACED, workplace
from porting.converting.writing import write_files
from porting.errors import Code, Fault, Message, Option, Wording
from porting.export_files import check_directory_name, chosen_writer, protected, require_division
from porting.limits import spending
from porting.loading import Into, require_floating
from porting.notation.table import Table
from porting.opening import Folder
from porting.plan.plan import LeftOut
from porting.sharding.filling import require_equal, require_same, unequal
from porting.target import TargetError

MEMORY = 64 << 20
"""The default of ``memory``: bytes for buffers."""

THREADS = 2
"""The default of ``threads``: a disk is rarely faster than two."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """The result of a conversion.

    Attributes:
        path: the directory.
        table: the table's name.
        reverse: whether it went from the port's layout to the checkpoint's.
        tensors: how many tensors the output has.
        files: the files and their bytes.
        digests: the digest of each tensor.
        losses: for each tensor in which values became infinite or zero, how many.
        left_out: the tensors of the input that are not carried over, with the reasons.
        tied: names that are not stored, because they are other names of a tensor that is.
        absent: names of the output that the input has nothing for.
        not_copied: files beside the input's weights that were left where they are.
        warnings: what is allowed and should be known.
        resumed: bytes that an earlier process had written, which died.
        progress: the last state: how much, and how long it took.

    >>> import porting
    >>> source = porting.embedded_checkpoint()
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     made = porting.convert(source, f"{folder}/ported", "bert_into_fused")
    >>> made.tensors, made.table
    (40, 'bert_into_fused')
    """

    path: Path
    table: str
    reverse: bool
    tensors: int
    files: Mapping[str, int]
    digests: Mapping[str, str]
    losses: Mapping[str, Losses]
    left_out: tuple[LeftOut, ...]
    tied: Mapping[str, str]
    absent: tuple[str, ...]
    not_copied: tuple[str, ...]
    warnings: tuple[str, ...]
    resumed: int
    progress: Progress


def convert(
    source: str | os.PathLike[str] | Checkpoint,
    destination: str | os.PathLike[str],
    table: Table | str | Path | None = None,
    *,
    reverse: bool = False,
    into: Into = None,
    architecture: str | None = None,
    derive: bool = False,
    like: str | os.PathLike[str] | Checkpoint | None = None,
    dtype: torch.dtype | None = None,
    fresh: bool = False,
    trust: bool = False,
    shard_size: int | None = None,
    to: str | None = None,
    threads: int = THREADS,
    memory: int = MEMORY,
    sha256: bool = False,
    overwrite: bool = False,
    tell: Tell | None = None,
) -> Converted:
    """Turn a checkpoint into the port's layout, or back.

    The output is a directory of files of weights with the config, the tokenizer and a record of where everything came
    from.  It appears in one step when all of it is on the disk.  When the process dies before, the same call goes on
    where it stopped.  Its bytes depend on nothing but the input, the table and the options that shape it.

    Args:
        source: a directory, a weight file, a hub id or an open checkpoint.
        destination: the directory to be made.
        table: a table, its file, the name of a bundled one, or None to choose by the checkpoint's ``model_type``.
        reverse: from the port's layout, the table's right side, to the left one.
        into: what says which tensors the port has, as in :func:`porting.load`; None for the module that the table
            names or, when it names none, for what the rules make of the checkpoint.
        architecture: which of the table's architectures to hold the checkpoint against.
        derive: ask no module: the port has what the rules make of the checkpoint.
        like: on the way back, the checkpoint to follow: its names, and what the port does not hold.  Without it the
            record that a conversion left beside the port says its names; without that, the table does.
        dtype: cast floating-point tensors to this; None keeps their dtypes.
        fresh: allow the parameters of the table's [fresh] to be missing in the output; on the way back, leave those
            out that no rule gives a name in a checkpoint.
        trust: allow the table to name a module outside of this library.
        shard_size: bytes of tensors that one file may hold; None to divide as the input does.
        to: another container than safetensors (docs/containers.md has all): ``"npz"`` for numpy, ``"dcp"`` for a
            directory that ``torch.distributed.checkpoint`` loads, ``"dcp/model"`` for one in which the tensors are
            nested under ``"model"``.
        threads: how many threads work; at least 1.
        memory: bytes for buffers, of all threads together; at least 1 MiB for each, or what a formula
            needs that cannot be computed in parts.
        sha256: record the SHA-256 of every file as well.
        overwrite: replace an existing checkpoint at ``destination``.
        tell: called with the progress from time to time.

    Returns:
        What was written.

    Raises:
        CheckpointError: the input cannot be read, the destination is refused, or writing failed.
        TableError: there is no such table, or it has faults.
        PlanError: checkpoint, table and module do not fit; carries all faults.
        TargetError: the module cannot be built, or an option does not fit.

    If an error is raised, the destination and the input are unchanged.

    Where ``torch.distributed`` has a group of several processes, all of them have to make this call: they share the
    tensors by their bytes, and each returns the same.

    >>> import porting
    >>> source = porting.embedded_checkpoint()
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     made = convert(source, f"{folder}/ported", "bert_into_fused")
    ...     back = convert(made.path, f"{folder}/back", "bert_into_fused", reverse=True)
    >>> made.tensors, back.tensors
    (40, 53)
    """
    group = ProcessGroup()
    with all_or_none(group):
        options = ConvertOptions(
            reverse=reverse,
            into=into,
            architecture=architecture,
            derive=derive,
            like=like,
            dtype=dtype,
            fresh=fresh,
            trust=trust,
            shard_size=shard_size,
            to=to,
            overwrite=overwrite,
        )
        draft = prepare(source, destination, table, options)
    return carry_out(
        draft, destination, threads=threads, memory=memory, sha256=sha256, overwrite=overwrite, tell=tell, group=group
    )


DEFAULTS = ConvertOptions()


def prepare(
    source: str | os.PathLike[str] | Checkpoint,
    destination: str | os.PathLike[str],
    table: Table | str | Path | None = None,
    options: ConvertOptions = DEFAULTS,
) -> Draft:
    """Do all of :func:`convert` that reads no weights; arguments and errors are the same."""
    path = Path(destination)
    reverse, like, dtype, shard_size = options.reverse, options.like, options.dtype, options.shard_size
    if dtype is not None:
        require_floating(dtype)
    if shard_size is not None and shard_size < 1:
        raise _wrong(Message(Option("shard_size", shard_size), ", expected a positive number of bytes"))
    writer, _ = chosen_writer(options.to)
    check_directory_name(path)
    require_division(writer, shard_size)
    if reverse and (options.into is not None or options.architecture is not None or options.derive):
        raise _wrong(
            Message(Option("reverse", True), " reads the port's tensors from the source: no module is built"),
            "leave the module out",
        )
    if like is not None and not reverse:
        raise _wrong(
            Message(Option("like"), " is for the way back"),
            Message("pass ", Option("reverse", True), ", or leave it out"),
        )
    if os.path.lexists(path) and not options.overwrite:
        # A process may have died between the directory's appearing and its own tidying up.
        sweep(Folder(path.parent), path.name)
    given = [Path(one) for one in (source, like) if isinstance(one, str | os.PathLike) and os.path.exists(one)]
    check_directory(path, overwrite=options.overwrite, sources=given)  # before anything is fetched
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    followed = like if isinstance(like, Checkpoint) or like is None else open_checkpoint(like)
    sources = [place for opened in (checkpoint, followed) if opened is not None for place in protected(opened)]
    check_directory(path, overwrite=options.overwrite, sources=sources)
    if reverse:
        return draft_back(checkpoint, table, followed, options, where=str(path))
    return draft_into_port(checkpoint, table, options, where=str(path))


@spending()
def carry_out(
    draft: Draft,
    destination: str | os.PathLike[str],
    *,
    threads: int = THREADS,
    memory: int = MEMORY,
    sha256: bool = False,
    overwrite: bool = False,
    tell: Tell | None = None,
    group: ProcessGroup | None = None,
) -> Converted:
    """Write the files of a draft.

    Args:
        draft: what to write, from :func:`prepare`.
        group: the processes that share the work, all with the same draft; None for those of ``torch.distributed``.
    """
    _require_resources(draft, threads, memory)
    path, group = Path(destination), group or ProcessGroup()
    draft.checkpoint.allow_time()
    meter = Meter(len(draft.recipes.tensors), draft.recipes.nbytes, tell)
    first = group.rank == 0
    with (
        shared_failures(group),
        explained(path, draft.outline.size) as writing,
        workplace(path, writing, first=first) as place,
        shared_failures(group),  # the others are told before the temporary files are removed
    ):
        if first:
            check_destination(path, overwrite=overwrite)  # another process may have finished since
            require_equal(unequal(draft.recipes.same, draft.checkpoint)[0], draft.checkpoint.tensors)
            require_same(draft.recipes.repeated, draft.checkpoint)
        made, files = write_files(
            draft, place, group, threads=threads, memory=memory // threads, sha256=sha256, meter=meter
        )
        for checkpoint in (draft.checkpoint, draft.like):
            if checkpoint is not None:
                checkpoint.require_in_place()
        meter.stage = "publishing"
        meter.look()
        if first:
            publish(FILES, place.folder, path, overwrite=overwrite, writing=writing, replaced=REPLACED)
        group.gather(None)
    progress = meter.now
    return Converted(
        path=path,
        table=draft.table.name,
        reverse=draft.reverse,
        tensors=len(draft.recipes.tensors),
        files=files,
        digests={name: one.digest for name, one in made.items()},
        losses={name: one.losses for name, one in made.items() if one.losses},
        left_out=draft.recipes.left_out,
        tied=draft.recipes.tied,
        absent=draft.recipes.absent,
        not_copied=draft.not_copied,
        warnings=draft.recipes.warnings,
        resumed=progress.resumed,
        progress=progress,
    )


def _require_resources(draft: Draft, threads: int, memory: int) -> None:
    if threads < 1:
        raise _wrong(Message(Option("threads", threads), ", expected at least 1"))
    least, names = LEAST, ""
    for recipe in draft.recipes.tensors:
        if required(recipe) > least:
            least, names = required(recipe), f" for {recipe.name!r}, of whose formula no less can be computed at once"
    if memory < threads * least:
        enough = -(-threads * least >> 20) << 20
        message = Message(Option("memory", memory), f": each of {threads} threads needs {least} bytes{names}")
        pass_memory = Wording(python=f"pass memory={enough}", command=f"pass --memory {enough >> 20}MiB")
        raise _wrong(message, Message(pass_memory, ", or fewer threads"))


def _wrong(message: str, hint: str = "") -> TargetError:
    return TargetError(Fault(code=Code.OPTION_REFUSED, message=message, hint=hint))
