"""``verify``: the two tiers of proof, end to end and module by module."""

from __future__ import annotations

import inspect
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import nn

from porting.checkpoint import Checkpoint, open_checkpoint
from porting.loading import Into, weights
from porting.notation.table import Table
from porting.plan.config import arguments, sizes
from porting.tables import chosen_for, find_table
from porting.verification.call import spelled_call
from porting.verification.compare import Comparison, Progress
from porting.verification.counterparts import counterparts
from porting.verification.culprit import name_causes
from porting.verification.gradients import with_padding
from porting.verification.inputs import Case, for_port, heard, make_cases, special_tokens, withheld
from porting.verification.learning import learn
from porting.verification.observe import Observer, shown, unseen
from porting.verification.pairing import refuse_unknown
from porting.verification.reference import choices, load_reference
from porting.verification.report import Cost, Report
from porting.verification.running import Clock, Side
from porting.verification.subject import Subject, cast, exactly, prepare, renew, stored_dtype, warned, writers
from porting.verification.trace import points

POSITIONS = "max_position_embeddings"


def verify(
    source: str | os.PathLike[str] | Checkpoint,
    into: Into = None,
    table: Table | str | Path | None = None,
    *,
    architecture: str | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    seed: int = 0,
    longest: int = 512,
    loaded: bool = False,
    fresh: bool = False,
    trust: bool = False,
    revision: str | None = None,
    inputs: Sequence[Case] | None = None,
    gradients: bool = False,
    steps: int = 0,
    causes: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Prove that a module computes what transformers computes from the same checkpoint.

    Both run in float64, where a faithful port agrees to 1e-12 of the activation's scale, and then in each working
    dtype, where its rounding error may be 4 times the reference's own.  Every probe of the table is seen end to end,
    and isolated: given the reference's activations, so that a guilty module is named and an innocent one is not.

    Args:
        source, into, table, fresh, trust, revision: as in :func:`porting.load`.
        architecture: as in :func:`porting.load`; for a table without [architectures], the reference's class.
        dtypes: the working dtypes.
        seed: of the inputs that are made, and of new parameters.
        longest: no row that is made is longer than this.
        loaded: ``into`` holds its weights already: compare it as it is, and say which weights are not the checkpoint's.
        inputs: batches of your own in place of those made from the config.
        gradients: compare the parameters' gradients as well.
        steps: compare the weights after this many steps of SGD and of AdamW as well; more than 0 implies gradients.
        causes: look for the cause when a module is guilty.
        progress: called with what is done, how many steps are done and how many there are.

    Returns:
        The report.  ``into`` and the random state are left as they were: a copy is loaded and run.

    Raises:
        CheckpointError, TableError, PlanError, TargetError: as :func:`porting.load`.
        VerifyError: the reference or the module cannot be run, or the probes do not fit.
    """
    given = dict(locals())  # before anything else has a name here
    with _undisturbed(seed):
        report = _verify(
            source if isinstance(source, Checkpoint) else open_checkpoint(source, revision=revision),
            into,
            table,
            architecture=architecture,
            dtypes=tuple(dict.fromkeys(dtypes)),
            seed=seed,
            longest=longest,
            loaded=loaded,
            fresh=fresh,
            trust=trust,
            inputs=inputs,
            gradients=gradients or steps > 0,
            steps=steps,
            causes=causes,
            tell=progress or (lambda what, done, total: None),
        )
    return replace(report, call=spelled_call("porting.verify", verify, given))


def _verify(
    checkpoint: Checkpoint,
    into: Into,
    table: Table | str | Path | None,
    *,
    architecture: str | None,
    dtypes: Sequence[torch.dtype],
    seed: int,
    longest: int,
    loaded: bool,
    fresh: bool,
    trust: bool,
    inputs: Sequence[Case] | None,
    gradients: bool,
    steps: int,
    causes: bool,
    tell: Progress,
) -> Report:
    begun = time.perf_counter()
    stages = 3 + len(dtypes) + gradients
    tell("loading", 0, stages)
    chosen = find_table(table, checkpoint.config)
    with chosen_for(table, into, chosen):
        subject = prepare(checkpoint, into, chosen, architecture, loaded=loaded, fresh=fresh, trust=trust)
    theirs = load_reference(checkpoint, subject.reference, torch.float64)
    renew(subject, theirs)
    refuse_unknown(chosen, theirs, subject.module)
    running = time.perf_counter()
    # The table says what a family calls the usual fields: those of the target's config are the usual ones.
    ours = arguments(chosen, checkpoint.config)
    fields = {**ours, **subject.plan.config}
    # As many positions belong to nobody: the reference counts around padding.
    skips, counted = next(
        ((shift, chosen.config[field]) for field, shift in chosen.shifts.items() if POSITIONS in field.split("/")),
        (0, ""),
    )
    if skips:
        fields[POSITIONS] = ours[counted]
    cases = list(inputs or ())
    silent: tuple[str, ...] = ()
    if not cases:
        made = make_cases(
            fields,
            seed=seed,
            longest=longest,
            special=special_tokens(checkpoint.path, fields),
            choices=choices(subject.reference),
            padding_words=not skips,
        )
        cases = [heard(chosen.inputs, one) for one in made]
        silent = withheld(made, cases)
    clock = Clock()
    comparison = Comparison(chosen, sizes(chosen, checkpoint.config)[0])

    tell("reference in float64", 1, stages)
    comparison.anchor(_reference(theirs, chosen, cases, clock))
    pairs = counterparts(chosen, subject.plan.config, sizes(chosen, checkpoint.config)[0], theirs, subject.module)
    theirs = theirs.to(stored_dtype(checkpoint))  # as exact as the checkpoint, and half as large

    tell("port in float64", 2, stages)
    module = exactly(subject, checkpoint)
    observer = Observer(module, seed)
    comparison.meaning(_port(module, torch.float64, chosen, cases, clock), observer)
    shares = observer.shares()
    if observer.failed:
        silent += (f"the port cannot be differentiated, so what reaches its probes is not known: {observer.failed}",)
    del module, observer

    for number, dtype in enumerate(dtypes):
        tell(f"both in {str(dtype).removeprefix('torch.')}", 3 + number, stages)
        comparison.rounding(
            _reference(cast(theirs, dtype), chosen, cases, clock),
            _port(cast(subject.module, dtype), dtype, chosen, cases, clock),
            dtype,
        )
    learned = None
    if gradients:
        tell("gradients and training" if steps else "gradients", 3 + len(dtypes), stages)

        def reference(dtype: torch.dtype) -> Side:
            return _reference(with_padding(cast(theirs, dtype)), chosen, cases, clock)

        def port(dtype: torch.dtype) -> Side:
            own = exactly(subject, checkpoint) if dtype == torch.float64 else cast(subject.module, dtype)
            return _port(with_padding(own), dtype, chosen, cases, clock)

        learned = learn(reference, port, comparison, pairs, dtypes=dtypes, steps=steps, seed=seed)
    probes = tuple(
        replace(probe, rules=writers(subject.plan, probe.span)) if probe.guilty else probe
        for probe in comparison.probes()
    )
    both = partial(_both, subject, theirs, checkpoint, chosen, cases, clock)
    found = name_causes(comparison, probes, both, dtypes) if causes else ()
    seen = shown(subject.module, shares, weights(subject.plan, checkpoint))
    tell("done", stages, stages)
    ended = time.perf_counter()
    return Report(
        source=checkpoint.location,
        reference=f"transformers.{subject.reference}",
        port=f"{type(subject.module).__module__}.{type(subject.module).__qualname__}",
        table=chosen.where,
        probes=probes,
        skipped=comparison.skipped,
        shown=seen,
        noise=comparison.noise,
        cases=tuple(case.name for case in cases),
        unseen=(*silent, *unseen(cases, fields)),
        seed=seed,
        environment=_environment(),
        warnings=(*warned(subject.plan), *comparison.warnings),
        learned=learned,
        causes=found,
        cost=Cost(
            loading=running - begun,
            forwards=clock.seconds,
            total=ended - running,
            passes=clock.passes,
            memory=_peak(),
        ),
        approximate=chosen.approximate,
    )


@contextmanager
def _undisturbed(seed: int) -> Iterator[None]:
    """Whatever the caller has switched on or off, and with torch's random state as before afterwards."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        torch.manual_seed(seed)
        yield


def _both(
    subject: Subject,
    theirs: nn.Module,
    checkpoint: Checkpoint,
    table: Table,
    cases: Sequence[Case],
    clock: Clock,
    dtype: torch.dtype,
) -> tuple[Side, Side]:
    ours = exactly(subject, checkpoint) if dtype == torch.float64 else cast(subject.module, dtype)
    return _reference(cast(theirs, dtype), table, cases, clock), _port(ours, dtype, table, cases, clock)


def _reference(module: nn.Module, table: Table, cases: Sequence[Case], clock: Clock) -> Side:
    taken = inspect.signature(module.forward).parameters
    return Side(
        title="the reference",
        module=module,
        arguments=[{name: value for name, value in case.inputs.items() if name in taken} for case in cases],
        wanted=points((term for rule in table.probes for term in rule.sources), module, table.prefix),
        clock=clock,
    )


def _port(module: nn.Module, dtype: torch.dtype, table: Table, cases: Sequence[Case], clock: Clock) -> Side:
    return Side(
        title="the port",
        module=module,
        arguments=[for_port(table.inputs, case.inputs, dtype) for case in cases],
        wanted=points((term for rule in table.probes for term in rule.targets), module, table.target_prefix),
        clock=clock,
    )


def _environment() -> dict[str, str]:
    packages = ("porting", "torch", "transformers", "safetensors")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its source, on the path and not installed
        return "not installed"


def _peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
