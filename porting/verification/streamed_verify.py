"""``verify`` for a model that is larger than memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from porting.plan.config import sizes
from porting.printable import dtype_name
from porting.reporting.outcome import Cost, Shown, Unseen
from porting.reporting.report import Report
from porting.reporting.scope_text import never_ran
from porting.tables import chosen_for
from porting.tracing.running import Clock, Side, peak, versions
from porting.trials.inputs import Case
from porting.trials.pairing import refuse_unknown
from porting.trials.returned import with_returned
from porting.trials.scope import Scope
from porting.verification.batches import make_batches
from porting.verification.compare import Progress
from porting.verification.compared_models import ComparedModels
from porting.verification.coverage import reached, unseen
from porting.verification.reference import choices, load_reference
from porting.verification.references import LiveReference, floating, port_side
from porting.verification.streaming import Streamed, lazy_port, lazy_reference
from porting.verification.subject import prepare_lazily, stored_dtype, warned, writers


def verify_streamed(
    given: ComparedModels,
    *,
    by_default: bool,
    architecture: str | None,
    dtypes: Sequence[torch.dtype],
    seed: int,
    longest: int,
    fresh: bool,
    trust: bool,
    inputs: Sequence[Case] | None,
    tell: Progress,
) -> Report:
    """Prove a port with every pass side by side; the arguments are those of :func:`porting.verification.verify`.

    Raises:
        CheckpointError, TableError, PlanError, TargetError, VerifyError: as there.
    """
    begun = time.perf_counter()
    tell("loading", 0, 1)
    checkpoint, table = given.checkpoint, given.table
    with chosen_for(None if by_default else table, given.into, table):
        subject = prepare_lazily(checkpoint, given.into, table, architecture, fresh=fresh, trust=trust)
    plan = subject.plan
    stored = load_reference(checkpoint, subject.reference, stored_dtype(checkpoint), untouched=True)
    theirs = LiveReference(stored, f"transformers.{subject.reference}")
    refuse_unknown(table, lambda terms: theirs.points(terms, table.prefix), subject.module)
    running = time.perf_counter()
    batch = make_batches(
        table,
        checkpoint,
        plan.config,
        inputs,
        seed=seed,
        longest=longest,
        choices=choices(subject.reference),
        reference=theirs,
    )
    cases, clock = batch.cases, Clock()

    def reference(dtype: torch.dtype, hollow: bool) -> Side:
        return Side(
            title="the reference",
            module=lazy_reference(stored, dtype, hollow=hollow),
            arguments=[floating(theirs.taken(case).inputs, dtype) for case in cases],
            wanted=theirs.points((term for rule in table.compared for term in rule.sources), table.prefix),
            clock=clock,
            seed=None,  # the passes take turns, and share the generator
        )

    def port(dtype: torch.dtype, hollow: bool) -> Side:
        module = lazy_port(subject.module, plan, checkpoint, dtype, hollow=hollow)
        return replace(port_side(module, dtype, table, cases, clock), seed=None)

    shapes = reference(torch.float64, True)
    ours = port(torch.float64, True)
    table, returned = with_returned(table, shapes, ours, shapes.returned(0), ours.returned(0))
    comparison = Streamed(table, sizes(table, checkpoint.config)[0])
    comparison.together(reference, port, dtypes, partial(tell, "all passes side by side"))
    found = reached(port(torch.float64, True), comparison.executed, comparison.conditions, comparison.ran)
    copied = (*(name for step in plan.steps for name in step.targets), *plan.contents)
    seen = Shown(activation={}, copy=copied, nothing=(), made=plan.contents)
    ended = time.perf_counter()
    return Report(
        source=checkpoint.location,
        reference=theirs.title,
        port=f"{type(subject.module).__module__}.{type(subject.module).__qualname__}",
        table=table.where,
        probes=tuple(
            replace(probe, rules=writers(plan, probe.span)) if probe.guilty else probe for probe in comparison.probes()
        ),
        skipped=comparison.skipped,
        shown=seen,
        noise=comparison.noise,
        cases=tuple(case.name for case in cases),
        scope=Scope(dtypes=("float64", *(dtype_name(one) for one in dtypes)), returned=returned),
        unseen=(
            Unseen("which weights reach a probe", "a streamed run does not measure it"),
            *unseen(cases, batch.fields, batch.withheld),
            *found.unseen,
        ),
        branches=found.branches,
        seed=seed,
        environment=versions(),
        warnings=(*warned(subject), *comparison.warnings),
        notes=tuple(comparison.notes),
        idle=never_ran(subject.module, comparison.ran, seen),
        cost=Cost(
            loading=running - begun,
            forwards=clock.seconds,
            total=ended - running,
            passes=clock.passes,
            memory=peak(),
        ),
        approximate=table.approximate,
    )
