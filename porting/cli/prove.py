"""Commands that prove: ``check`` that a table fits, ``verify`` that the port computes the same."""

from __future__ import annotations

import errno
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from porting.cli import keep, options
from porting.cli.screen import DIFFERENT, Screen, free

if TYPE_CHECKING:
    import torch
    from torch import nn

    from porting.checkpoint import Checkpoint
    from porting.plan.plan import Plan

WorkingTypes = Annotated[
    list[options.DType] | None,
    typer.Option(
        "--dtype",
        help="A working dtype whose rounding is compared; may be given more than once.",
        show_default="float32",
    ),
]
HeadersOnly = Annotated[
    bool, typer.Option("--headers-only", help="Read no weight: neither proof of dropped copies nor search for NaN.")
]
All = Annotated[bool, typer.Option("--all", help="A row for each tensor in place of one for each rule.")]
EveryProbe = Annotated[bool, typer.Option("--all", help="As --verbose, with a row for each probe.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="All rows, the code that never ran, the inputs and the versions.")
]
Training = Annotated[
    bool,
    typer.Option("--training", help="Compare in training mode as well, with the same dropout masks; and gradients."),
]
Autocast = Annotated[
    options.Half | None,
    typer.Option("--autocast", help="Compare under torch.autocast with this dtype as well, with float32 weights."),
]
Gradients = Annotated[bool, typer.Option("--gradients", help="Compare the gradients of all parameters as well.")]
Steps = Annotated[
    int,
    typer.Option("--steps", min=0, help="Compare the weights after this many steps of SGD and of AdamW as well."),
]
Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", dir_okay=False, help="Also write the report as a page for a browser."),
]
Stream = Annotated[
    bool,
    typer.Option("--stream", help="For models larger than memory: read each layer's weights when it is reached."),
]
Loaded = Annotated[
    bool,
    typer.Option(
        "--loaded", help="--into gives a module that holds its weights: compare these, and load nothing into it."
    ),
]
Longest = Annotated[int, typer.Option("--longest", min=3, help="No row of the inputs that are made is longer.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the inputs that are made.")]


def check(
    source: options.Source = None,
    table: options.TableName = None,
    into: options.IntoName = None,
    architecture: options.ArchitectureName = None,
    dtype: options.CastTo = None,
    fresh: options.Fresh = False,
    trust: options.Trust = False,
    headers_only: HeadersOnly = False,
    every: All = False,
    as_json: options.Json = False,
) -> None:
    """Prove that a table, a checkpoint and a module fit together, before anything is loaded.

    Every tensor of the checkpoint is read once or left out for a reason, every parameter of the module is written
    once: all that does not fit is named at once. Then the weights are read: copies that are dropped must be copies,
    and NaN or infinite values are reported.

    \b
    Examples:
      porting check
      porting check ./my-checkpoint --all
      porting check ./my-checkpoint --table my_table.toml --into my_model.py:build
      porting check google-bert/bert-base-uncased --headers-only
    """
    with Screen("check", as_json=as_json) as screen:
        from porting.build import bounds, build
        from porting.checkpoint import open_checkpoint
        from porting.loading import maker, prove_left_out
        from porting.plan.check import check as hold
        from porting.plan.claims import doubtful
        from porting.plan.scan import scan
        from porting.tables import chosen_for, find_table

        make = options.builder(into, trust=trust)
        checkpoint = open_checkpoint(options.where(source), weights=not headers_only)
        chosen = find_table(table, checkpoint.config)
        with screen.working("checking") as tell:
            tell("the plan", 0, 0)
            with chosen_for(table, make, chosen):
                construct, kind = maker(chosen, checkpoint, make, architecture, trust=trust)
                module = build(construct, bounds(checkpoint.tensors, checkpoint.config))
                plan = hold(chosen, checkpoint, module, dtype=options.dtype_of(dtype), fresh=fresh)
            doubts = [*plan.warnings, *doubtful(chosen, checkpoint.tensors, module)]
            warnings = [*map(str, checkpoint.warnings), *map(str, doubts)]
            if not headers_only:
                tell("what is dropped", 0, 0)
                prove_left_out(plan, checkpoint)
                warnings += map(str, scan(plan, checkpoint.read, lambda done, total: tell("values", done, total)))
        built = into or (kind.target if kind else "")
        screen.document(_document(plan, built, warnings, proven=not headers_only))
        screen.facts({"checkpoint": checkpoint.location, "table": chosen.where, "module": built})
        screen.line()
        _show_moves(screen, plan, every)
        _show_rest(screen, plan, checkpoint, proven=not headers_only)
        for warning in warnings:
            screen.warn(warning)
        screen.line(("fits", "bold green"), f": {plan.summary}")
        same = options.given(table=table, into=into, architecture=architecture, fresh=fresh, trust=trust)
        screen.next("verify" if chosen.probes else "load", *options.again(source), *same)


def _show_moves(screen: Screen, plan: Plan, every: bool) -> None:
    from porting.plan.by_rule import moves_by_rule

    if every:
        moves = [
            (" + ".join(_spelled(step.sources, plan.sources)), " + ".join(_spelled(step.targets, plan.targets)))
            for step in plan.steps
        ]
        screen.rows(["from", "to"], moves)
        return
    rows = [
        (rule.source, rule.target, f"{rule.read:,}", f"{rule.written:,}", rule.where)
        for rule in moves_by_rule(plan.steps)
    ]
    screen.rows(["from", "to", "read", "written", "rule"], rows, right=["read", "written"])


def _spelled(names: Iterable[str], described: Mapping[str, object]) -> list[str]:
    return [f"{name} {list(getattr(described[name], 'shape', ()))} {_dtype(described[name])}" for name in names]


def _dtype(described: object) -> str:
    return str(getattr(described, "dtype", "")).removeprefix("torch.")


def _show_rest(screen: Screen, plan: Plan, checkpoint: Checkpoint, *, proven: bool) -> None:
    """What is not simply loaded, and why."""
    from porting.checkpoint.inspect import group_tensors
    from porting.plan.leftovers import idle_drops

    screen.line()
    seen = "proven" if proven else "not read"
    rows = [("left out", left.name, f"equals {left.equals}, {seen}") for left in plan.left_out if left.equals]
    for reason in dict.fromkeys(left.reason for left in plan.left_out if not left.equals):
        names = [left.name for left in plan.left_out if not left.equals and left.reason == reason]
        rows += [("left out", one.pattern, reason) for one in group_tensors(checkpoint.tensors[name] for name in names)]
    rows += [("tied", name, f"is {other}") for name, other in plan.tied.items()]
    rows += [("new", name, "not in the checkpoint, keeps the module's own initialisation") for name in plan.fresh]
    idle = idle_drops(plan.table, checkpoint.tensors)
    rows += [("not there", str(one.name), f"{one.where} would leave it out") for one in idle]
    if rows:
        screen.rows(["", "", ""], rows)
        screen.line()


def _document(plan: Plan, built: str, warnings: list[str], *, proven: bool) -> dict[str, object]:
    return {
        "fits": True,
        "table": plan.table.where,
        "module": built,
        "read": sum(len(step.sources) for step in plan.steps),
        "written": sum(len(step.targets) for step in plan.steps),
        "moves": [
            {"from": list(step.sources), "to": list(step.targets), "rule": str(step.rule), "where": step.rule.where}
            for step in plan.steps
        ],
        "left_out": [
            {"name": left.name, "reason": left.reason, "equals": left.equals, "proven": proven and bool(left.equals)}
            for left in plan.left_out
        ],
        "tied": dict(plan.tied),
        "new": list(plan.fresh),
        "warnings": warnings,
    }


def verify(
    source: options.Source = None,
    table: options.TableName = None,
    into: options.IntoName = None,
    architecture: options.ArchitectureName = None,
    reference: keep.ReferenceName = None,
    inputs: keep.Inputs = None,
    dtypes: WorkingTypes = None,
    seed: Seed = 0,
    gradients: Gradients = False,
    training: Training = False,
    autocast: Autocast = None,
    steps: Steps = 0,
    stream: Stream = False,
    longest: Longest = 512,
    loaded: Loaded = False,
    fresh: options.Fresh = False,
    trust: options.Trust = False,
    verbose: Verbose = False,
    every: EveryProbe = False,
    html: Html = None,
    as_json: options.Json = False,
) -> None:
    """Prove, module by module, that a port computes what transformers, or another reference, computes.

    Both run on the same inputs: in float64, where a faithful port agrees to the last digits, and in each working
    dtype, where its rounding is held against the reference's own. Each module is also given the reference's inputs,
    so that a guilty one is named and an innocent one is not. Exit code 0: faithful, or approximate as the table
    declares; 1: not; 2: it could not be run.

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
        import torch

        from porting.reporting.terminal import render
        from porting.tables import find_table
        from porting.verification import verify as prove

        if html is not None and not html.parent.is_dir():  # said before the work, and not after it
            raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(html.parent))
        make = options.builder(into, trust=trust)
        working: list[torch.dtype] = [getattr(torch, one.value) for one in dtypes or [options.DType.float32]]
        against = keep.opponent(reference, trust=trust)
        recorded = isinstance(against, Path)
        lone = source is None and (into is not None if recorded else against is not None)  # it has its own weights
        checkpoint = None if lone else _opened(source)
        own = _holding(make, checkpoint, table, architecture, trust=trust) if loaded else None
        with screen.working("verifying") as tell:
            report = prove(
                checkpoint,
                own or make,
                table,
                reference=against,
                loaded=own is not None,
                inputs=keep.batch_of(inputs),
                architecture=architecture,
                dtypes=tuple(dict.fromkeys(working)),
                seed=seed,
                gradients=gradients,
                training=training,
                autocast=None if autocast is None else getattr(torch, autocast.value),
                steps=steps,
                stream=stream,
                longest=longest,
                fresh=fresh,
                trust=trust,
                progress=tell,
            )
        same = options.given(table=table, into=into, architecture=architecture, fresh=fresh, trust=trust)
        against_it = options.given(reference=reference, inputs=inputs)
        asked = options.given(
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
        again = shlex.join(["porting", "verify", *options.again(source), *same, *against_it, *asked])
        report = replace(report, call=again)
        screen.document(report.to_dict())
        screen.show(render(report, every_probe=every, verbose=verbose or every))
        if html is not None:
            screen.line(f"the report as a page: {report.save_html(html)}")
        if report.as_claimed and reference is None and not loaded:
            carrying = "convert" if stream else "export"  # export holds all of a model in memory
            built = architecture if checkpoint and find_table(table, checkpoint.config).architectures else None
            same = options.given(table=table, into=into, architecture=built, fresh=fresh, trust=trust)
            screen.next(carrying, *options.again(source), free("exported"), *same)
            return
        known = every or verbose or report.as_claimed
        closer = ["--html", free("report", ".html")] if known else ["--verbose"]
        screen.next("verify", *options.again(source), *same, *against_it, *asked, *closer)
        if report.as_claimed:
            return
        raise typer.Exit(DIFFERENT)


def _holding(
    make: Callable[..., nn.Module] | None,
    checkpoint: Checkpoint | None,
    table: str | None,
    architecture: str | None,
    *,
    trust: bool,
) -> nn.Module:
    """The module that holds its weights, built as any other one is, or named itself.

    Raises:
        TargetError: there is none, or it cannot be built.
    """
    from torch import nn

    from porting.build import OWN_CODE, bounds, filled
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
        return filled(make, OWN_CODE)
    named = find_table(table, checkpoint.config)
    construct, _ = maker(named, checkpoint, make, architecture if named.architectures else None, trust=trust)
    return filled(construct, bounds(checkpoint.tensors, checkpoint.config))


def _opened(source: str | None) -> Checkpoint:
    """The checkpoint: opened before the progress bar starts, since a download has bars of its own."""
    from porting.checkpoint import open_checkpoint

    return open_checkpoint(options.where(source))
