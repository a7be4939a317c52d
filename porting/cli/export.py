"""``export``: load a checkpoint and write it back through the same table."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from porting.cli import options
from porting.cli.load import _plan
from porting.cli.output import Screen, file_list, size

if TYPE_CHECKING:
    from porting.checkpoint import Checkpoint


def export(
    source: options.Source = None,
    destination: options.Destination = None,
    dtype: options.CastDType = None,
    to: options.To = None,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
    *,
    model: options.WeightOptions,
) -> None:
    """Load a checkpoint through a table, and export it back through the same table.

    transformers loads the directory. Without a cast its tensors equal the checkpoint's byte for byte, which shows
    that the table loses nothing in either direction.

    \b
    Examples:
      porting export ./exported
      porting export ./my-checkpoint ./exported
      porting export ./my-checkpoint ./half --dtype bfloat16
      porting export ./my-checkpoint ./start --to dcp/model
      porting export ./my-checkpoint ./exported --table my_table.toml --into my_model.py:build
    """
    with Screen("export", as_json=as_json) as screen:
        from porting.checkpoint import open_checkpoint
        from porting.checkpoint.registry import writer_of
        from porting.checkpoint.write import check_directory
        from porting.export_files import check_directory_name, protected
        from porting.exporting import export as save
        from porting.loading import load as fill

        origin, path = options.source_and_destination(source, destination)
        container, part = writer_of(to)
        check_directory_name(path)
        given = [Path(origin)] if os.path.exists(origin) else []
        check_directory(path, overwrite=overwrite, sources=given)  # before the work, and not after it
        make = model.builder()
        checkpoint = open_checkpoint(origin)
        check_directory(path, overwrite=overwrite, sources=protected(checkpoint))
        with screen.working("exporting") as tell:
            tell("loading", 0, 0)
            module = fill(
                checkpoint,
                make,
                model.table,
                architecture=model.architecture,
                fresh=model.fresh,
                trust=model.trust,
            )
            tell("writing", 0, 0)
            cast = options.dtype_of(dtype)
            written = save(module, model.table, path, dtype=cast, fresh=model.fresh, to=to, overwrite=overwrite)
            screen.made(path)
            tell("comparing", 0, 0)
            differing = _differing(checkpoint, path)
        nbytes = sum((path / name).stat().st_size for name in written.files)
        verdict = "byte for byte those of the checkpoint"
        if differing:
            other = all(file.format != container.name for file in checkpoint.files)
            kept = f"{container.name} in the place of" if other else "not the same bytes:"
            verdict = f"{kept} {', '.join(differing)}"
        screen.document({**asdict(written), "path": str(written.path), "bytes": nbytes, "differing": differing})
        screen.facts(
            {
                "checkpoint": checkpoint.location,
                "exported to": str(path),
                "architecture": written.architecture,
                "files": f"{file_list(written.files)}: {size(nbytes)}",
                "weights": verdict,
                "new": ", ".join(written.new),
                "not written": ", ".join(left.name for left in written.not_written),
                "not copied": file_list(written.not_copied),
                "left out": ", ".join(written.unnamed),
            }
        )
        again = ["verify" if _plan(module).table.probes else "check", str(path / part), *model.flags]
        screen.next(*(again if differing else ["hash", str(path / part)]))  # the same bytes compute the same


def _differing(checkpoint: Checkpoint, destination: Path) -> list[str]:
    """The checkpoint's files of weights that the destination does not have with the same bytes."""
    from porting.checkpoint.files import LocalFile
    from porting.opening import Folder

    made = Folder(destination)
    if checkpoint.path is None:
        return [file.name for file in checkpoint.files]
    return [
        file.name
        for file in checkpoint.files
        if not made.kind(file.name) or not checkpoint.file(file.name).same_bytes(LocalFile(made.open(file.name)))
    ]
