"""``convert``: rewrite a checkpoint of any size in fixed memory."""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from porting.cli import options
from porting.cli.output import Screen, file_list, size
from porting.cli.progress import conversion_progress
from porting.printable import counted, first_few

if TYPE_CHECKING:
    from porting.converting.conversion import Converted
    from porting.converting.draft import Draft

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


LARGEST = 1 << 60
"""Bytes; no disk has more."""


MOST_SHARDS = 4
"""Files of weights that are listed each with its size."""

MOST_NAMED = 4
"""Tensors that are named on a line; the rest is counted."""


def parse_size(text: str) -> int:
    """A number of bytes as people write it.

    >>> parse_size("64MB"), parse_size("1.5 GiB"), parse_size("4096")
    (64000000, 1610612736, 4096)
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    size = float(found[1]) * UNITS.get(found[2].upper(), math.inf) if found is not None else math.inf
    if size > LARGEST:
        raise typer.BadParameter(f"{text[:80]!r} is not a size, expected a number and one of kB, MB, GB, KiB, MiB, GiB")
    return int(size)


def convert(
    source: options.Source = None,
    destination: options.Destination = None,
    reverse: Annotated[
        bool, typer.Option("--reverse", help="From the port's layout back to the checkpoint's.")
    ] = False,
    derive: Annotated[
        bool, typer.Option("--derive", help="Build no module: the table's rules alone decide what is written.")
    ] = False,
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            help="With --reverse, the checkpoint to follow: its names, and what the port does not hold.",
            show_default="the record beside the port",
        ),
    ] = None,
    dtype: options.CastDType = None,
    shard_size: Annotated[
        int | None,
        typer.Option(
            "--shard-size",
            parser=parse_size,
            metavar="SIZE",
            help="Largest size of a file, such as 5GB.",
            show_default="as the source is divided",
        ),
    ] = None,
    to: options.To = None,
    threads: options.Threads = 2,
    memory: Annotated[
        int, typer.Option("--memory", parser=parse_size, metavar="SIZE", help="Memory for the buffers of all threads.")
    ] = "64MiB",  # type: ignore[assignment]  # the parser makes a number of it
    sha256: Annotated[bool, typer.Option("--sha256", help="Record the SHA-256 of every file as well.")] = False,
    overwrite: options.Overwrite = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be written and how long it would take; write nothing.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line for each event, and nothing else.")
    ] = False,
    *,
    model: options.WeightOptions,
) -> None:
    """Convert a checkpoint of any size to your module's layout, or back, in fixed memory.

    The directory appears when all of it is written. If the process is killed before, the same command continues where
    it stopped. Digests are written beside the weights, for porting verify-files. Under torchrun (torchrun
    --nproc-per-node 4 --no-python porting convert ...) the processes share the work.

    \b
    Examples:
      porting convert ./ported --table bert
      porting convert ./my-checkpoint ./ported --table bert
      porting convert ./ported ./again --table bert --reverse
      porting convert ./my-checkpoint ./half --dtype bfloat16 --shard-size 5GB --memory 64MB
      porting convert ./my-checkpoint ./start --table bert --to dcp/model
    """
    with Screen("convert", as_json=as_json, lines=True) as screen:
        from porting.converting.conversion import carry_out, prepare
        from porting.converting.draft import ConvertOptions
        from porting.converting.processes import all_or_none, torchrun_group
        from porting.converting.progress import estimate

        with torchrun_group() as group:  # several processes that torchrun started, or this one
            screen.silent = group.rank > 0
            with all_or_none(group):
                origin, path = options.source_and_destination(source, destination)
                wanted = ConvertOptions(
                    reverse=reverse,
                    into=model.builder(),
                    architecture=model.architecture,
                    derive=derive,
                    like=like,
                    dtype=options.dtype_of(dtype),
                    fresh=model.fresh,
                    trust=model.trust,
                    shard_size=shard_size,
                    to=to,
                    overwrite=overwrite,
                )
                draft = prepare(origin, path, model.table, wanted)
            for warning in draft.recipes.warnings:
                screen.warn(warning)
            plan = _plan(draft, path)
            if dry_run:
                seconds = estimate(draft, path, threads=threads)
                screen.document({"event": "plan", **plan, "seconds": seconds})
                _say_plan(screen, draft, plan, seconds)
                return
            screen.document({"event": "begin", **plan})
            with conversion_progress(screen) as tell:
                done = carry_out(
                    draft,
                    path,
                    threads=threads,
                    memory=memory,
                    sha256=sha256,
                    overwrite=overwrite,
                    tell=tell,
                    group=group,
                )
            screen.made(path)
            _say_done(screen, draft, done)
            screen.next("verify-files", str(path))


def _plan(draft: Draft, destination: Path) -> dict[str, object]:
    return {
        "source": draft.checkpoint.location,
        "destination": str(destination),
        "table": draft.table.name,
        "reverse": draft.reverse,
        "tensors": len(draft.recipes.tensors),
        "bytes": draft.recipes.nbytes,
        "files": {shard.name: shard.size for shard in draft.outline.shards},
        "carried": list(draft.files),
        "left_out": [asdict(left) for left in draft.recipes.left_out],
        "tied": dict(draft.recipes.tied),
        "absent": list(draft.recipes.absent),
        "not_copied": list(draft.not_copied),
    }


def _say_plan(screen: Screen, draft: Draft, plan: dict[str, object], seconds: float | None) -> None:
    screen.facts(
        {
            "from": draft.checkpoint.location,
            "table": draft.table.name + (", read backwards" if draft.reverse else ""),
            "would write": f"{counted(len(draft.recipes.tensors), 'tensor')}, {size(draft.outline.size)}",
            "in": _shards(draft),
            "and": file_list(draft.files),
            **_left(draft),
            "time": f"about {seconds:.2g} s, as fast as this disk is now" if seconds is not None else "",
        }
    )
    screen.line("nothing was written")


def _shards(draft: Draft) -> str:
    shards = draft.outline.shards
    if len(shards) > MOST_SHARDS:
        return f"{file_list(shard.name for shard in shards)} of up to {size(max(shard.size for shard in shards))}"
    return ", ".join(f"{shard.name} ({size(shard.size)})" for shard in shards)


def _left(draft: Draft) -> dict[str, str]:
    return {
        "left out": first_few([left.name for left in draft.recipes.left_out], MOST_NAMED),
        "tied": first_few(list(draft.recipes.tied), MOST_NAMED),
        "absent": first_few(list(draft.recipes.absent), MOST_NAMED),
        "not copied": first_few(list(draft.not_copied), MOST_NAMED),
    }


def _say_done(screen: Screen, draft: Draft, done: Converted) -> None:
    nbytes = sum(done.files.values())
    screen.document(
        {
            "event": "done",
            "path": str(done.path),
            "tensors": done.tensors,
            "bytes": nbytes,
            "files": dict(done.files),
            "digests": dict(done.digests),
            "losses": {name: asdict(losses) for name, losses in done.losses.items()},
            "resumed": done.resumed,
            "seconds": done.progress.seconds,
        }
    )
    speed = f", {size(int(done.progress.speed))}/s" if done.progress.speed else ""
    lost = [f"{name}: {one.infinite} to infinity, {one.vanished} to zero" for name, one in done.losses.items()]
    screen.facts(
        {
            "converted to": str(done.path),
            "table": done.table + (", read backwards" if done.reverse else ""),
            "tensors": f"{done.tensors:,}, {size(draft.recipes.nbytes)} in {done.progress.seconds:.3g} s{speed}",
            "resumed": f"{size(done.resumed)} were there already" if done.resumed else "",
            "files": f"{file_list(done.files)}: {size(nbytes)}",
            "lost in the cast": "; ".join(lost[:4]) + (f"; and in {len(lost) - 4} more" if len(lost) > 4 else ""),
            **_left(draft),
        }
    )
