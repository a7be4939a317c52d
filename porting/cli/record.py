"""``record``: save what a reference computes, to verify a port without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from porting.cli import options
from porting.cli.output import Screen, size
from porting.errors import Code, Fault

if TYPE_CHECKING:
    from porting.verification import Case


def record(
    source: options.Source = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The safetensors file to write (required).", show_default=False),
    ] = None,
    table: options.TableName = None,
    reference: options.ReferenceName = None,
    architecture: options.ArchitectureName = None,
    dtypes: options.WorkingTypes = None,
    meaning_only: Annotated[
        bool, typer.Option("--meaning-only", help="Record float64 alone: less than half the size, nothing on rounding.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--probe", help="Record the points that this pattern matches; may be given more than once."),
    ] = None,
    cases: Annotated[
        list[int] | None,
        typer.Option(
            "--case",
            min=0,
            max=options.LARGEST,
            help="Record the case of this number; may be given more than once.",
            show_default="all",
        ),
    ] = None,
    inputs: options.Inputs = None,
    inputs_only: Annotated[
        bool,
        typer.Option(
            "--inputs-only",
            help="Record only the inputs, to run a reference in another framework on them.",
        ),
    ] = False,
    weights: Annotated[
        bool, typer.Option("--weights", help="Record the weights as well, for a port elsewhere.")
    ] = False,
    seed: options.Seed = 0,
    longest: options.Longest = 512,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
) -> None:
    """Record a reference's activations, so that a port can be verified without the reference.

    The file holds the inputs and the activations at the table's probes, in float64 and in each working dtype. Keep it
    with your project as a golden file; the same command gives the same bytes.

    \b
    Examples:
      porting record --out golden.safetensors
      porting record ./my-checkpoint --out golden.safetensors --meaning-only --case 0
      porting record --reference my_model.py:build --inputs batch.safetensors --out golden.safetensors
      porting record --reference my_model.py:build --inputs-only --weights --out question.safetensors
    """
    with Screen("record", as_json=as_json) as screen:
        from porting.atomic import check_destination
        from porting.verification import VerifyError
        from porting.verification import record as keep

        if out is None:
            message = "where the recording goes was not said: it may have tens of megabytes"
            hint = "name the file: --out golden.safetensors"
            raise VerifyError(Fault(code=Code.OPTION_REFUSED, message=message, hint=hint))
        if source is not None and reference is not None:
            message = f"there are two references, {source} and {reference}"
            hint = "record one of them; a module or a function holds its weights itself"
            raise VerifyError(Fault(code=Code.OPTION_REFUSED, message=message, hint=hint))
        check_destination(out, overwrite=overwrite, file=True)
        make, batches = options.builder(reference), options.batch_of(inputs)
        made = keep(
            options.checkpoint_source(source) if make is None else make,
            out,
            table,
            architecture=architecture,
            dtypes=() if meaning_only else options.working_dtypes(dtypes),
            only=only or (),
            cases=cases,
            inputs=batches,
            inputs_only=inputs_only,
            weights=weights,
            seed=seed,
            longest=longest,
            overwrite=overwrite,
        )
        screen.made(made)
        nbytes = made.stat().st_size
        screen.document({"path": str(made), "bytes": nbytes})
        screen.line(("recorded ", "bold green"), f"{made}, {size(nbytes)}")
        if nbytes > LARGE and not inputs_only:
            screen.line(
                "smaller: --meaning-only halves it; --probe and --case record a part; --longest 64 has short rows"
            )
        if inputs_only:
            screen.next("inspect", str(made))
            return
        screen.next(*_compared(source, table, architecture, reference, str(made), batches))


LARGE = 10_000_000
"""The size in bytes from which on the output says how to make a smaller recording."""


def _compared(
    source: str | None,
    table: str | None,
    architecture: str | None,
    reference: str | None,
    made: str,
    inputs: Sequence[Case] | None,
) -> list[str]:
    """The words of a verification that is run against the recording; the command took no port of the user's own."""
    from porting.checkpoint import open_checkpoint
    from porting.tables import find_table

    if reference is not None:  # a module that holds its weights is compared with what it computed itself
        from porting.verification.compared_models import names_of
        from porting.verification.functions import computes

        if computes(options.builder(reference), names_of(inputs)):
            return ["inspect", made]
        return ["verify", *options.flags(into=reference, table=table, reference=made)]
    builds = find_table(table, open_checkpoint(options.checkpoint_source(source), weights=False).config).architectures
    if not builds or not all(one.target.startswith("porting.") for one in builds):
        return ["inspect", made]
    return [
        "verify",
        *options.source_argument(source),
        *options.flags(table=table, architecture=architecture, reference=made),
    ]
