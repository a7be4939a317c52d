"""``record``: keep what a reference computes; and what ``verify`` takes from files in the place of a reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from porting.cli import options
from porting.cli.screen import Screen, size

if TYPE_CHECKING:
    import torch
    from torch import nn

    from porting.verification import Case

Out = Annotated[str, typer.Option("--out", metavar="FILE", help="The safetensors file to be made.")]
ReferenceName = Annotated[
    str | None,
    typer.Option(
        "--reference",
        metavar="MODULE:NAME|FILE",
        help="What to compare with: what builds a module with its weights, my_model.py:build, or a file that "
        "`porting record` made.",
        show_default="the checkpoint in transformers",
    ),
]
Inputs = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        metavar="FILE",
        help="A safetensors file with the arguments of one batch by their names.",
        show_default="made from the config",
    ),
]
MeaningOnly = Annotated[
    bool, typer.Option("--meaning-only", help="Record float64 alone: less than half the size, nothing on rounding.")
]
Only = Annotated[
    list[str] | None,
    typer.Option("--probe", help="Record the points that this pattern matches; may be given more than once."),
]
CaseNumbers = Annotated[
    list[int] | None,
    typer.Option("--case", help="Record the case of this number; may be given more than once.", show_default="all"),
]
WorkingTypes = Annotated[
    list[options.DType] | None,
    typer.Option("--dtype", help="A working dtype to record; may be given more than once.", show_default="float32"),
]
Seed = Annotated[int, typer.Option("--seed", help="Of the inputs that are made.")]
Longest = Annotated[int, typer.Option("--longest", min=3, help="No row of the inputs that are made is longer.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a file that stands there.")]


def record(
    source: options.Source = None,
    out: Out = "recorded.safetensors",
    table: options.TableName = None,
    reference: ReferenceName = None,
    architecture: options.ArchitectureName = None,
    dtypes: WorkingTypes = None,
    meaning_only: MeaningOnly = False,
    only: Only = None,
    cases: CaseNumbers = None,
    inputs: Inputs = None,
    seed: Seed = 0,
    longest: Longest = 512,
    overwrite: Overwrite = False,
    as_json: options.Json = False,
) -> None:
    """Record what a reference computes, so that a port can be verified where the reference is not.

    The file holds the inputs and the activations at the table's probes, in float64 and in each working dtype. It can be
    kept with a project as its golden file; the same command gives the same bytes.

    \b
    Examples:
      porting record --out golden.safetensors
      porting record ./my-checkpoint --out golden.safetensors --meaning-only --case 0
      porting record --reference my_model.py:build --inputs batch.safetensors --out golden.safetensors
    """
    with Screen("record", as_json=as_json) as screen:
        import torch

        from porting.verification import record as keep

        working: list[torch.dtype] = [getattr(torch, one.value) for one in dtypes or [options.DType.float32]]
        make = options.builder(reference)
        made = keep(
            options.where(source) if make is None else make(),
            out,
            table,
            architecture=architecture,
            dtypes=() if meaning_only else tuple(working),
            only=only or (),
            cases=cases,
            inputs=batch_of(inputs),
            seed=seed,
            longest=longest,
            overwrite=overwrite,
        )
        screen.document({"path": str(made), "bytes": made.stat().st_size})
        screen.line(("recorded ", "bold green"), f"{made}, {size(made.stat().st_size)}")
        screen.next(*_compared(source, table, architecture, reference, str(made)))


def _compared(
    source: str | None, table: str | None, architecture: str | None, reference: str | None, made: str
) -> list[str]:
    """The words of a verification that is run against the recording; the command took no port of the user's own."""
    from porting.checkpoint import open_checkpoint
    from porting.tables import find_table

    if reference is not None:  # a module that holds its weights is compared with what it computed itself
        return ["verify", *options.given(into=reference, table=table, reference=made)]
    builds = find_table(table, open_checkpoint(options.where(source), weights=False).config).architectures
    if not builds or not all(one.target.startswith("porting.") for one in builds):
        return ["inspect", made]
    return ["verify", *options.again(source), *options.given(table=table, architecture=architecture, reference=made)]


def opponent(name: str | None, *, trust: bool) -> Callable[..., nn.Module] | Path | None:
    """What ``--reference`` names: a function that builds a model, or a file."""
    if name is None or name.endswith(".safetensors"):
        return None if name is None else Path(name)
    return options.builder(name, trust=trust)


def batch_of(path: str | None) -> list[Case] | None:
    """The batch in a safetensors file.

    Raises:
        CheckpointError: it cannot be read.
    """
    if path is None:
        return None
    from porting.checkpoint import open_checkpoint
    from porting.verification import Case

    file = open_checkpoint(path)
    return [Case(Path(path).name, {name: file.read(name, own=True) for name in file.tensors})]
