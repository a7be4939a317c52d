"""``record``: what a reference computes, into a file, for verifications where the reference is not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from porting.atomic import check_destination
from porting.build import OWN_CODE
from porting.checkpoint import Checkpoint, open_checkpoint
from porting.comparing.digests import digest
from porting.errors import Code, Fault, Message, VerifyError, Wording
from porting.loading import choose_architecture
from porting.notation.rule import Term
from porting.notation.table import Table
from porting.plan.config import effective
from porting.printable import dtype_name
from porting.recordings import EXACT, ISOLATED
from porting.tables import find_table
from porting.tracing.devices import repeated_on_cpu
from porting.tracing.provenance import ProvenanceRecorder
from porting.tracing.running import Clock, Side, undisturbed, versions
from porting.tracing.trace import ARROW, ROOT, Point, Trace, Visit, like
from porting.trials.inputs import Case
from porting.verification.batches import Batches, make_batches
from porting.verification.compared_models import Inputs, as_cases, built_reference, names_of
from porting.verification.functions import LivingFunction, computes
from porting.verification.module_checkpoint import HeldWeights
from porting.verification.recorded_trace import write_recording
from porting.verification.reference import choices, load_reference, reference_class
from porting.verification.references import LiveReference, stored
from porting.verification.same_names import every_point, same_names
from porting.verification.subject import stored_dtype


@repeated_on_cpu
def record(
    source: str | os.PathLike[str] | Checkpoint | nn.Module | Callable[..., object],
    path: str | os.PathLike[str],
    table: Table | str | Path | None = None,
    *,
    architecture: str | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    seed: int = 0,
    longest: int = 512,
    inputs: Inputs = None,
    only: Sequence[str] = (),
    cases: Sequence[int] | None = None,
    inputs_only: bool = False,
    weights: bool = False,
    revision: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Run a reference and write what it was given and what it computed at the table's probes.

    ``porting.verify(..., reference=path)`` then needs neither the reference nor transformers.  The same call on the
    same machine gives the same bytes.

    Args:
        source: a checkpoint, run by transformers; a module that holds its weights, run as it is; a function that builds
            one; or a function that computes the reference's values.
        path: the safetensors file to be made.
        table: its [probes] say what is recorded; None for the table of the checkpoint's family, and for every module
            of a module that was given.
        architecture: as in :func:`porting.verify`.
        dtypes: the working dtypes that are recorded as well; none for a file of less than half the size, which shows
            what a port means and not how it rounds.
        seed, longest, inputs, revision: as in :func:`porting.verify`.
        only: record the points that one of these patterns matches, ``"*.layer.0*"``; all when empty.
        cases: the numbers of the cases to record; all when None.
        inputs_only: record no activations: the file is for a reference in another framework, which is run on these
            inputs and writes its own recording (:func:`porting.save_recording`).
        weights: record the weights as well, under the reference's names.
        overwrite: whether a file that stands there may be replaced.

    Returns:
        The path.

    Raises:
        CheckpointError: the checkpoint cannot be read, or the file cannot be written.
        TargetError: what builds a module asks for what is not there.
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
        given = as_cases(inputs)
        if isinstance(source, str | os.PathLike | Checkpoint):
            subject = _of_checkpoint(source, table, architecture, revision, given, seed, longest)
        else:
            subject = _of_living(source, table, given, seed, longest)
        sources = [] if isinstance(subject.checkpoint, HeldWeights) else subject.checkpoint.paths
        check_destination(Path(path), overwrite=overwrite, sources=sources, file=True)
        every = [subject.living.taken(case) for case in subject.batch.cases]
        missing = [number for number in cases or () if not -len(every) <= number < len(every)]
        if missing:
            message = f"there is no case {missing[0]}"
            hint = f"the cases are numbered from 0 to {len(every) - 1}"
            raise VerifyError(Fault(code=Code.OPTION_REFUSED, message=message, hint=hint))
        taken = [every[number] for number in (range(len(every)) if cases is None else cases)]
        terms = [term for rule in subject.table.probes for term in rule.sources]
        traces: dict[str, list[Trace]] = {}
        lowered: dict[Point, list[str]] = {}
        if not inputs_only:
            traces, lowered = _traces(subject.living, terms, subject.table.prefix, taken, dtypes, only, subject.stored)
        if not taken or not all(traces.get(EXACT, taken)):
            chosen_by = Wording(python="only=", command="--probe")
            message = Message(
                "nothing would be recorded: no point of the reference is named by [probes] and ", chosen_by
            )
            raise VerifyError(Fault(code=Code.NO_PROBES, where=subject.table.where, message=message))
        said = {"reference": subject.living.title, "seed": str(seed), **versions()}
        if lowered:
            said["lowered"] = json.dumps(lowered)
        if not isinstance(subject.checkpoint, HeldWeights):
            said["weights"] = str(digest(subject.checkpoint))
        held = {name: subject.checkpoint.read(name) for name in subject.checkpoint.tensors} if weights else {}
        write_recording(Path(path), taken, traces, said, weights=held, overwrite=overwrite)
    return Path(path)


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """The model that is recorded, and its table.

    Attributes:
        table: its [probes] name what is recorded.
    """

    living: LiveReference
    checkpoint: Checkpoint
    table: Table
    batch: Batches
    stored: torch.dtype


def _of_checkpoint(
    source: str | os.PathLike[str] | Checkpoint,
    table: Table | str | Path | None,
    architecture: str | None,
    revision: str | None,
    inputs: Sequence[Case] | None,
    seed: int,
    longest: int,
) -> _Subject:
    """A checkpoint as transformers runs it."""
    opened = source if isinstance(source, Checkpoint) else open_checkpoint(source, revision=revision)
    chosen = find_table(table, opened.config, opened.tensors)
    if chosen.architectures:
        kind = choose_architecture(chosen, opened.tensors, opened.config, architecture).name
    else:
        kind = reference_class(opened, architecture).name
    living = LiveReference(load_reference(opened, kind, torch.float64), f"transformers.{kind}")
    return _Subject(
        living=living,
        checkpoint=opened,
        table=chosen,
        batch=_batch(chosen, opened, inputs, seed, longest, choices(kind), living),
        stored=stored_dtype(opened),
    )


def _of_living(
    source: nn.Module | Callable[..., object],
    table: Table | str | Path | None,
    inputs: Sequence[Case] | None,
    seed: int,
    longest: int,
) -> _Subject:
    """A module, what builds one, or a function that computes."""
    if not isinstance(source, nn.Module) and computes(source, names_of(inputs)):
        held = HeldWeights({}, "the function")
        named = None if table is None else find_table(table, {})
        batch = _batch(named or every_point(()), held, inputs, seed, longest, None)
        function = LivingFunction.around(source, batch.cases[0])
        chosen = named or every_point(function.own)
        return _Subject(living=function, checkpoint=held, table=chosen, batch=batch, stored=torch.float64)
    module = built_reference(source, {}, OWN_CODE)
    title = f"{type(module).__module__}.{type(module).__qualname__}"
    opened = HeldWeights(module, title)
    chosen = same_names(module, module) if table is None else find_table(table, opened.config, opened.tensors)
    living = LiveReference.of(module, title)
    return _Subject(
        living=living,
        checkpoint=opened,
        table=chosen,
        batch=_batch(chosen, opened, inputs, seed, longest, choices(""), living),
        stored=stored(module),
    )


def _batch(
    table: Table,
    opened: Checkpoint,
    inputs: Sequence[Case] | None,
    seed: int,
    longest: int,
    several: int | None,
    living: LiveReference | None = None,
) -> Batches:
    config = effective(table, opened.config)
    return make_batches(table, opened, config, inputs, seed=seed, longest=longest, choices=several, reference=living)


def _traces(
    living: LiveReference,
    terms: Sequence[Term],
    prefix: str,
    cases: Sequence[Case],
    dtypes: Sequence[torch.dtype],
    only: Sequence[str],
    held: torch.dtype,
) -> tuple[dict[str, list[Trace]], dict[Point, list[str]]]:
    """Every run's activations, by what it is called in the file; and what computed with less than float64."""
    outputs = living.side(torch.float64, terms, prefix, cases, Clock()).returned(0) if cases else {}
    returned = [f"{ROOT}{ARROW}{name}" if name else ROOT for name in outputs]

    def side(dtype: torch.dtype) -> Side:
        """Return a side for the recording; it records the outputs too, as they are compared whatever the probes are."""
        found = living.side(dtype, terms, prefix, cases, Clock())
        every = dict.fromkeys([*found.wanted, *returned])
        found.wanted = [one for one in every if not only or any(fnmatchcase(one, wish) for wish in only)]
        return found

    numbers = range(len(cases))
    double = side(torch.float64)
    lowered: dict[Point, list[str]] = {}
    exact: list[Trace] = []
    for case in numbers:
        watch = ProvenanceRecorder()

        def cut(point: Point, value: Tensor, watch: ProvenanceRecorder = watch) -> None:
            span = watch.cut()
            if span.lowered:
                lowered[point] = list(span.lowered)

        with watch:
            exact.append(double.record(case, after=cut))
    traces = {EXACT: exact}
    del double
    living.keep(held)
    function = isinstance(living, LivingFunction)
    for dtype in dict.fromkeys(dtypes):
        if isinstance(living, LivingFunction) and not living.computes_in(dtype):
            continue
        working, name = side(dtype), dtype_name(dtype)
        traces[name] = [working.record(case) for case in numbers]
        if function:  # nobody can go on with other values in the middle of it
            continue
        traces[name + ISOLATED] = [working.record(case, after=_instead(exact[case])) for case in numbers]
    return traces, lowered


def _instead(exact: Mapping[Point, Tensor]) -> Visit:
    """Gives the exact value in the place of a computed one."""
    return lambda point, value: like(exact[point], value)
