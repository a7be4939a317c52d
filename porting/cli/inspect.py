"""``inspect``: what is in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from porting.cli import options
from porting.cli.output import Screen, file_list, size
from porting.printable import counted, first_few

if TYPE_CHECKING:
    from porting.checkpoint import Inspection

INNER_SHOWN = 6
"""Inner paths that are named, of a file that needs none."""

SHARED_SHOWN = 100
"""Storages with several names of which each has a line."""


def inspect(source: options.Source = None, as_json: options.Json = False) -> None:
    """List the tensors of a checkpoint: names, shapes, dtypes and bytes.

    Only headers are read; from the hub only they are downloaded, by range requests. Tensors whose names differ only in
    numbers share a line: layer.{0..11}.weight stands for twelve.

    \b
    Examples:
      porting inspect
      porting inspect ./my-checkpoint
      porting inspect 'training.ckpt#state_dict'
      porting inspect google-bert/bert-base-uncased
      porting inspect google-bert/bert-base-uncased@main --json
    """
    with Screen("inspect", as_json=as_json) as screen:
        from porting.checkpoint import inspect_checkpoint

        with screen.working("reading headers"):
            found = inspect_checkpoint(options.checkpoint_source(source))
        screen.document(found.to_dict)
        if found.inner_paths and not found.groups:
            _show_inner_paths(screen, found)
            return
        _show(screen, found)
        for warning in found.warnings:
            screen.warn(warning)
        headers_only = options.flags(**{"headers-only": found.commit is not None})  # on the hub: no weight is fetched
        if _is_port(source):
            screen.next("verify-files", *options.source_argument(source))
        else:
            screen.next(
                *(["check", *options.source_argument(source), *headers_only] if _has_table(found) else ["tables"])
            )


def _is_port(source: str | None) -> bool:
    """Whether a conversion made it: its names are those of a port, which no table reads."""
    from porting.checkpoint.layout import RECORD

    if source is None or not (Path(source) / RECORD).is_file():
        return False
    from porting.converting.record import read_record  # with all that converts: most checkpoints have no record
    from porting.opening import Folder

    record = read_record(Folder(Path(source)))
    return record is not None and not record.content.get("reverse")


def _has_table(found: Inspection) -> bool:
    from porting.notation.faults import TableError
    from porting.tables import find_table

    try:
        find_table(None, {"model_type": found.model_type})
    except TableError:
        return False
    return True


def _files(found: Inspection) -> str:
    """The files with their containers and their size."""
    kinds = ", ".join(dict.fromkeys(file.format for file in found.files))
    return f"{file_list(file.name for file in found.files)}: {kinds}, {size(sum(file.size for file in found.files))}"


def _show_inner_paths(screen: Screen, found: Inspection) -> None:
    """The state dicts of a file that holds more than one; the next command opens the largest."""
    screen.facts(
        {
            "checkpoint": found.location,
            "files": _files(found),
        }
    )
    screen.line()
    screen.rows(
        ["inner path", "tensors"],
        [(f"#{one.path}" if one.path else "# (all)", f"{one.tensors:,}") for one in found.inner_paths],
        right=["tensors"],
    )
    screen.line()
    for warning in found.warnings:
        screen.warn(warning)
    screen.next("inspect", f"{found.location}#{found.inner_paths[0].path}")


def _show(screen: Screen, found: Inspection) -> None:
    commit = f" at commit {found.commit}" if found.commit else ""
    screen.facts(
        {
            "checkpoint": found.location + commit,
            "model_type": found.model_type or "config.json names none",
            "architectures": ", ".join(found.architectures),
            "files": _files(found),
            "tensors": f"{found.count:,}, {counted(found.parameters, 'element')}, {size(found.nbytes)}",
            "inner paths": first_few([f"#{one.path} ({one.tensors:,})" for one in found.inner_paths], INNER_SHOWN),
        }
    )
    screen.line()
    screen.rows(
        ["tensor", "shape", "dtype", "count", "bytes"],
        [(one.pattern, str(list(one.shape)), one.dtype, f"{one.count:,}", size(one.nbytes)) for one in found.groups],
        right=["count", "bytes"],
    )
    for names in found.shared[:SHARED_SHOWN]:
        screen.line(f"one storage: {', '.join(names)}")
    if len(found.shared) > SHARED_SHOWN:
        screen.line(f"and {len(found.shared) - SHARED_SHOWN:,} more storages with several names")
    screen.line()
