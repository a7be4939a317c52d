"""``check``: whether a table, a checkpoint and a module fit together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from porting.cli import options
from porting.cli.output import Screen
from porting.printable import dtype_name

if TYPE_CHECKING:
    from porting.checkpoint import Checkpoint
    from porting.plan.plan import Plan

MOST_ROWS = 4
"""Rows of what is not simply loaded that are shown without --verbose."""


def check(
    source: options.Source = None,
    dtype: options.CastDType = None,
    headers_only: Annotated[
        bool, typer.Option("--headers-only", help="Read no weights: do not compare dropped copies or search for NaN.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="A row for each rule of the table, and all that is left out.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="As --verbose, with a row for each tensor in place of each rule.")
    ] = False,
    as_json: options.Json = False,
    *,
    model: options.WeightOptions,
) -> None:
    """Check that a table, a checkpoint and a module fit together, before anything is loaded.

    Every tensor of the checkpoint must be read once or left out for a reason, and every parameter of the module
    written once. All errors are listed at once. Then the weights are read: tensors that are dropped as copies must
    be equal, and NaN or infinite values are reported.

    \b
    Examples:
      porting check
      porting check ./my-checkpoint --verbose
      porting check ./my-checkpoint --table my_table.toml --into my_model.py:build
      porting check google-bert/bert-base-uncased --headers-only
    """
    with Screen("check", as_json=as_json) as screen:
        from porting.build import bounds, build
        from porting.checkpoint import open_checkpoint
        from porting.loading import maker, prove_left_out
        from porting.plan.check import check as hold
        from porting.plan.check import doubtful
        from porting.plan.scan import scan
        from porting.tables import chosen_for, find_table

        make = model.builder()
        checkpoint = open_checkpoint(options.checkpoint_source(source), weights=not headers_only)
        chosen = find_table(model.table, checkpoint.config, checkpoint.tensors)
        with screen.working("checking") as tell:
            tell("the plan", 0, 0)
            with chosen_for(model.table, make, chosen):
                construct, kind = maker(chosen, checkpoint, make, model.architecture, trust=model.trust)
                module = build(construct, bounds(checkpoint.tensors, checkpoint.config))
                plan = hold(chosen, checkpoint, module, dtype=options.dtype_of(dtype), fresh=model.fresh)
            doubts = [*plan.warnings, *doubtful(chosen, checkpoint.tensors, module)]
            warnings = [fault.line for fault in (*checkpoint.warnings, *doubts)]
            if not headers_only:
                tell("what is dropped", 0, 0)
                prove_left_out(plan, checkpoint)
                warnings += [
                    fault.line for fault in scan(plan, checkpoint.read, lambda done, total: tell("values", done, total))
                ]
                checkpoint.require_in_place()
        built = model.into or (kind.target if kind else "")
        screen.document(lambda: _document(plan, built, warnings, proven=not headers_only))
        screen.facts({"checkpoint": checkpoint.location, "table": chosen.where, "module": built})
        if verbose or every:
            screen.line()
            _show_moves(screen, plan, every)
            screen.line()
        rows = _rest(plan, checkpoint, proven=not headers_only)
        if rows:
            screen.rows(["", "", ""], rows if verbose or every else _in_brief(rows))
        if verbose or every:
            screen.line()
        for warning in warnings:
            screen.warn(warning)
        screen.line(("fits", "bold green"), f": {plan.summary}")
        screen.next("verify" if chosen.probes else "load", *options.source_argument(source), *model.flags)


def _show_moves(screen: Screen, plan: Plan, every: bool) -> None:
    from porting.plan.plan import moves_by_rule

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
    held = [(name, getattr(described[name], "shape", ()), getattr(described[name], "dtype", "")) for name in names]
    return [f"{name} {list(shape)} {dtype_name(dtype)}" for name, shape, dtype in held]


def _rest(plan: Plan, checkpoint: Checkpoint, *, proven: bool) -> list[tuple[str, str, str]]:
    """The tensors that are not simply loaded: what is done with each, its name, and why."""
    from porting.checkpoint.inspect import group_tensors
    from porting.plan.leftovers import idle_drops

    seen = "proven" if proven else "not read"
    rows = [("left out", left.name, f"equals {left.equals}, {seen}") for left in plan.left_out if left.equals]
    for reason in dict.fromkeys(left.reason for left in plan.left_out if not left.equals):
        names = [left.name for left in plan.left_out if not left.equals and left.reason == reason]
        groups = group_tensors(checkpoint.tensors[name] for name in names)
        rows += [("left out", group.pattern, reason) for group in groups]
    rows += [("tied", name, f"is {other}") for name, other in plan.tied.items()]
    rows += [("made", name, f"holds {value}, as [make] says") for name, value in plan.contents.items()]
    rows += [(NEW, name, "not in the checkpoint, keeps the module's own initialisation") for name in plan.fresh]
    idle = idle_drops(plan.table, checkpoint.tensors)
    rows += [(ABSENT, str(drop.name), f"{drop.where} would leave it out") for drop in idle]
    return rows


NEW = "new"
"""The label of a parameter that the checkpoint does not have and the table allows to be missing."""

ABSENT = "not there"
"""The label of a tensor that the table would leave out and the checkpoint does not have."""


def _in_brief(rows: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """A row for each reason, what is new first, and no more than :data:`MOST_ROWS`; none for what is not there."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for kind, name, reason in sorted(rows, key=lambda row: row[0] != NEW):
        if kind != ABSENT:
            reasons.setdefault((kind, reason), []).append(name)
    brief = [
        (kind, names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""), reason)
        for (kind, reason), names in reasons.items()
    ]
    more = len(brief) - MOST_ROWS
    return [*brief[:MOST_ROWS], ("", f"{more} more: see --verbose", "")] if more > 0 else brief


def _document(plan: Plan, built: str, warnings: Sequence[str], *, proven: bool) -> dict[str, object]:
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
        "made": plan.contents,
        "new": list(plan.fresh),
        "warnings": warnings,
    }
