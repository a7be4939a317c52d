"""``record``: what a reference computes, into a file, for verifications where the reference is not."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from porting.architecture import choose
from porting.checkpoint import Checkpoint, open_checkpoint
from porting.comparing import digest
from porting.errors import Code, Fault, option, told
from porting.notation.rule import Term
from porting.notation.table import Table
from porting.plan.config import effective
from porting.tables import find_table
from porting.tracing.environment import undisturbed, versions
from porting.tracing.faults import VerifyError
from porting.tracing.running import Clock, Side
from porting.tracing.span import Watch
from porting.tracing.trace import Point, Trace, Visit
from porting.verification.batches import make_batches
from porting.verification.golden import EXACT, ISOLATED, write_recording
from porting.verification.held import HeldWeights
from porting.verification.inputs import Case
from porting.verification.reference import choices, load_reference
from porting.verification.references import Living, stored
from porting.verification.same_names import same_names
from porting.verification.subject import stored_dtype


def record(
    source: str | os.PathLike[str] | Checkpoint | nn.Module,
    path: str | os.PathLike[str],
    table: Table | str | Path | None = None,
    *,
    architecture: str | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    seed: int = 0,
    longest: int = 512,
    inputs: Sequence[Case] | None = None,
    only: Sequence[str] = (),
    cases: Sequence[int] | None = None,
    revision: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Run a reference and write what it was given and what it computed at the table's probes.

    ``porting.verify(..., reference=path)`` then needs neither the reference nor transformers.  The same call on the
    same machine gives the same bytes.

    Args:
        source: a checkpoint, run by transformers; or a module that holds its weights, run as it is.
        path: the safetensors file to be made.
        table: its [probes] say what is recorded; None for the table of the checkpoint's family, and for every module
            of a module that was given.
        architecture: as in :func:`porting.verify`.
        dtypes: the working dtypes that are recorded as well; none for a file of less than half the size, which shows
            what a port means and not how it rounds.
        seed, longest, inputs, revision: as in :func:`porting.verify`.
        only: record the points that one of these patterns matches, ``"*.layer.0*"``; all when empty.
        cases: the numbers of the cases to record; all when None.
        overwrite: whether a file that stands there may be replaced.

    Returns:
        The path.

    Raises:
        CheckpointError: the checkpoint cannot be read, or the file cannot be written.
        VerifyError: the reference cannot be run, or nothing would be recorded.

    >>> import porting
    >>> source = porting.embedded_checkpoint()
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     made = record(source, f"{folder}/golden.safetensors", longest=8, cases=[0])
    ...     porting.verify(source, reference=made).faithful
    True
    """
    with undisturbed(seed):
        if isinstance(source, nn.Module):
            title = f"{type(source).__module__}.{type(source).__qualname__}"
            opened: Checkpoint = HeldWeights(source, title)
            chosen = same_names(source, source) if table is None else find_table(table, opened.config)
            living, kind = Living.of(source, title), ""
            held = stored(source)
        else:
            opened = source if isinstance(source, Checkpoint) else open_checkpoint(source, revision=revision)
            chosen = find_table(table, opened.config)
            kind = _architecture(chosen, opened, architecture)
            living = Living(load_reference(opened, kind, torch.float64), f"transformers.{kind}")
            held = stored_dtype(opened)
        config = effective(chosen, opened.config)
        batch = make_batches(chosen, opened, config, inputs, seed=seed, longest=longest, choices=choices(kind))
        every = [living.taken(case) for case in batch.cases]
        taken = [every[number] for number in (range(len(every)) if cases is None else cases)]
        terms = [term for rule in chosen.probes for term in rule.sources]
        traces, lowered = _traces(living, terms, chosen.prefix, taken, dtypes, only, held)
        if not taken or not all(traces[EXACT]):
            chosen_by = told(called="only=", typed="--probe")
            message = f"nothing would be recorded: no point of the reference is named by [probes] and {chosen_by}"
            raise VerifyError(Fault(code=Code.NO_PROBES, where=chosen.where, message=message))
        said = {"reference": living.title, "seed": str(seed), **versions()}
        if lowered:
            said["lowered"] = json.dumps(lowered)
        if not isinstance(opened, HeldWeights):
            said["weights"] = str(digest(opened))
        write_recording(Path(path), taken, traces, said, overwrite=overwrite)
    return Path(path)


def _architecture(table: Table, checkpoint: Checkpoint, architecture: str | None) -> str:
    if table.architectures:
        return choose(table, checkpoint.tensors, checkpoint.config, architecture).name
    declared = checkpoint.config.get("architectures")
    names = [architecture] if architecture else list(declared) if isinstance(declared, list) else []
    if not names:
        message = "neither the table nor config.json says which architecture the reference has"
        hint = f"name it: {option('architecture')}, as transformers spells it"
        raise VerifyError(Fault(code=Code.NO_REFERENCE, where=checkpoint.location, message=message, hint=hint))
    return str(names[0])


def _traces(
    living: Living,
    terms: Sequence[Term],
    prefix: str,
    cases: Sequence[Case],
    dtypes: Sequence[torch.dtype],
    only: Sequence[str],
    held: torch.dtype,
) -> tuple[dict[str, list[Trace]], dict[Point, list[str]]]:
    """Every run's activations, by what it is called in the file; and what computed with less than float64."""

    def side(dtype: torch.dtype) -> Side:
        found = living.side(dtype, terms, prefix, cases, Clock())
        found.wanted = [one for one in found.wanted if not only or any(fnmatchcase(one, wish) for wish in only)]
        return found

    numbers = range(len(cases))
    double = side(torch.float64)
    lowered: dict[Point, list[str]] = {}
    exact: list[Trace] = []
    for case in numbers:
        watch = Watch()

        def cut(point: Point, value: Tensor, watch: Watch = watch) -> None:
            span = watch.cut()
            if span.lowered:
                lowered[point] = list(span.lowered)

        with watch:
            exact.append(double.record(case, after=cut))
    traces = {EXACT: exact}
    del double
    living.keep(held)
    for dtype in dict.fromkeys(dtypes):
        working, name = side(dtype), str(dtype).removeprefix("torch.")
        traces[name] = [working.record(case) for case in numbers]
        traces[name + ISOLATED] = [working.record(case, after=_instead(exact[case])) for case in numbers]
    return traces, lowered


def _instead(exact: Mapping[Point, Tensor]) -> Visit:
    """Gives the exact value in the place of a computed one."""
    return lambda point, value: exact[point].to(value.dtype, copy=True)
