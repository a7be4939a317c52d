"""``verify``: whether a port computes what the reference computes."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from porting.cli import options
from porting.cli.output import DIFFERENT, Screen, free

if TYPE_CHECKING:
    from torch import nn

    from porting.checkpoint import Checkpoint

MOST_STEPS = 100
"""Training steps; after more of them rounding errors have grown to any size."""


def verify(
    source: options.Source = None,
    reference: options.ReferenceName = None,
    inputs: options.Inputs = None,
    dtypes: options.WorkingTypes = None,
    seed: options.Seed = 0,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Compare the gradients of all parameters as well.")
    ] = False,
    training: Annotated[
        bool,
        typer.Option(
            "--training", help="Compare in training mode as well, with the same dropout masks; and gradients."
        ),
    ] = False,
    autocast: Annotated[
        options.Half | None,
        typer.Option("--autocast", help="Compare under torch.autocast with this dtype as well, with float32 weights."),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            "--steps",
            min=0,
            max=MOST_STEPS,
            help="Compare the weights after this many steps of SGD and of AdamW as well.",
        ),
    ] = 0,
    stream: Annotated[
        bool,
        typer.Option("--stream", help="For models larger than memory: read each layer's weights when it is reached."),
    ] = False,
    longest: options.Longest = 512,
    loaded: Annotated[
        bool,
        typer.Option(
            "--loaded", help="--into gives a module that holds its weights: compare these, and load nothing into it."
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="All rows, the code that never ran, the inputs and the versions.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="As --verbose, with a row for each probe.")] = False,
    html: options.HtmlFile = None,
    as_json: options.Json = False,
    *,
    model: options.WeightOptions,
) -> None:
    """Check, module by module, that your model computes what transformers, or another reference, computes.

    Both run on the same inputs: in float64, where a faithful port agrees to 1e-12, and in each working dtype, where
    your model's rounding error is compared with the reference's. Each module also gets the reference's inputs, so
    that only the module with the mistake is named. Exit code 0: faithful, or approximate as the table declares; 1:
    different; 2: your model could not be run.

    \b
    Examples:
      porting verify
      porting verify ./my-checkpoint --dtype float32 --dtype bfloat16
      porting verify ./my-checkpoint --gradients --steps 3
      porting verify ./my-checkpoint --training --autocast bfloat16
      porting verify ./my-checkpoint --into my_model.py:build --reference golden.safetensors
      porting verify --reference old_model.py:build --into new_model.py:build --inputs batch.safetensors
      porting verify ./my-checkpoint --table my_table.toml --into my_model.py:build
      porting verify ./my-checkpoint --table my_table.toml --into my_model.py:filled --loaded
      porting verify ./my-checkpoint --html report.html
      porting verify ./larger-than-memory --stream --longest 64
      porting verify google-bert/bert-base-uncased --json > report.json
    """
    with Screen("verify", as_json=as_json) as screen:
        from porting.atomic import check_page
        from porting.checkpoint import open_checkpoint
        from porting.errors import command_text
        from porting.reporting.terminal import render
        from porting.tables import find_table
        from porting.verification import verify as prove

        check_page(html, ".html")  # before the work, and not after it
        make = model.builder()
        against = options.reference_of(reference, trust=model.trust)
        recorded = isinstance(against, Path)
        has_weights = model.into is not None if recorded else against is not None
        lone = source is None and has_weights
        # Opened before the progress bar starts, since a download has bars of its own.
        checkpoint = None if lone else open_checkpoint(options.checkpoint_source(source))
        own = _holding(make, checkpoint, model) if loaded else None
        with screen.working("verifying") as tell:
            report = prove(
                checkpoint,
                own or make,
                model.table,
                reference=against,
                loaded=own is not None,
                inputs=options.batch_of(inputs),
                architecture=model.architecture,
                dtypes=options.working_dtypes(dtypes),
                seed=seed,
                gradients=gradients,
                training=training,
                autocast=options.dtype_of(autocast),
                steps=steps,
                stream=stream,
                longest=longest,
                fresh=model.fresh,
                trust=model.trust,
                progress=tell,
            )
        against_it = options.flags(reference=reference, inputs=inputs)
        asked = options.flags(
            dtype=[one.value for one in dtypes or []],
            seed=seed or None,
            gradients=gradients,
            training=training,
            autocast=autocast and autocast.value,
            steps=steps or None,
            stream=stream,
            longest=None if longest == 512 else longest,
            loaded=loaded,
        )
        again = shlex.join(["porting", "verify", *options.source_argument(source), *model.flags, *against_it, *asked])
        report = replace(report, call=again, warnings=tuple(map(command_text, report.warnings)))
        screen.document(report.to_dict)
        screen.show(render(report, every_probe=every, verbose=verbose or every))
        if html is not None:
            screen.line(f"the report as a page: {report.save_html(html)}")
            screen.made(html)
        if report.as_claimed and reference is None and not loaded:
            carrying = "convert" if stream else "export"  # export holds all of a model in memory
            table = checkpoint and find_table(model.table, checkpoint.config, checkpoint.tensors)
            built = model if table and table.architectures else replace(model, architecture=None)
            screen.next(carrying, *options.source_argument(source), free("exported"), *built.flags)
            return
        known = every or verbose or report.as_claimed
        closer = ["--html", free("report", ".html")] if known else ["--verbose"]
        same = [*options.source_argument(source), *model.flags, *against_it, *asked, *closer]
        screen.next("verify", *(same if html is None else ["--help"]))
        if report.as_claimed:
            return
        raise typer.Exit(DIFFERENT)


def _holding(
    make: Callable[..., nn.Module] | None,
    checkpoint: Checkpoint | None,
    model: options.WeightOptions,
) -> nn.Module:
    """The module that holds its weights, built as any other one is, or named itself."""
    from torch import nn

    from porting.build import OWN_CODE, bounds, build_with_values
    from porting.errors import Code, Fault
    from porting.loading import maker
    from porting.tables import find_table
    from porting.target import TargetError

    if make is None:
        message = "--loaded compares the weights that a module of your own holds, and none is named"
        raise TargetError(Fault(code=Code.BAD_TARGET, message=message, hint="name what builds it: --into"))
    if isinstance(make, nn.Module):
        return make
    if checkpoint is None:  # what it is compared with has no config either
        return build_with_values(make, OWN_CODE)
    table = find_table(model.table, checkpoint.config, checkpoint.tensors)
    architecture = model.architecture if table.architectures else None
    construct, _ = maker(table, checkpoint, make, architecture, trust=model.trust)
    return build_with_values(construct, bounds(checkpoint.tensors, checkpoint.config))
