"""``verify``: the two tiers of proof, end to end and module by module."""

from __future__ import annotations

import linecache
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from porting.build import one_line
from porting.causes.diverging import Divergence
from porting.causes.finding import Finding
from porting.checkpoint import Checkpoint
from porting.errors import Code, Fault, PortingError, VerifyError
from porting.loading import Into, weights
from porting.notation.table import Table
from porting.plan.config import sizes
from porting.plan.scan import scan
from porting.printable import dtype_name
from porting.reporting.outcome import Cost, Probe, listed
from porting.reporting.report import Report, spelled_call
from porting.reporting.scope_text import never_ran
from porting.tables import chosen_for
from porting.tracing.devices import repeated_on_cpu
from porting.tracing.running import Both, Clock, Side, failure_reason, limit_threads, peak, undisturbed, versions
from porting.tracing.trace import ROOT
from porting.trials.inputs import Case
from porting.trials.modalities import DECODER_IDS, IDS
from porting.trials.padding import DECODER_MASK, MASK, hides_token
from porting.trials.pairing import refuse_unknown
from porting.trials.purity import after_other_calls
from porting.trials.returned import with_returned
from porting.trials.scope import KEPT_BETWEEN_CALLS, Impurity, ImpurityKind, Kind, Result, Returned, Scope, Status
from porting.user_state import UserState
from porting.verification.batches import (
    Batches,
    another,
    make_batches,
    padded_in_front,
    simple_batches,
)
from porting.verification.cause_search import name_causes
from porting.verification.compare import Comparison, Progress
from porting.verification.compared_models import ComparedModels, Given, Inputs, Source, as_cases, resolve_models
from porting.verification.counterparts import counterparts
from porting.verification.coverage import shown, unseen
from porting.verification.float64_tier import anchored, compare_in_float64, in_fitting_rows
from porting.verification.functions import has_parts, possible
from porting.verification.module_checkpoint import share
from porting.verification.reference import PADDING, choices, load_reference
from porting.verification.references import LiveReference, Recorded, Reference, floating, port_side
from porting.verification.rounding_propagation import measure_float64_noise
from porting.verification.streaming import verify_streamed
from porting.verification.subject import (
    Subject,
    cast,
    exactly,
    prepare,
    refuse_beside_streaming,
    renew,
    stored_dtype,
    warned,
    writers,
)
from porting.verification.table_layouts import corrections
from porting.verification.training import learn
from porting.verification.trial_setup import confirming, explore
from porting.verification.working_dtype import computes_in_half

Prove = Callable[..., Report]

SEARCHING, LONGEST_SEARCH = 60.0, 180.0
"""Seconds of processor time for the search for causes: in a small model, and at most in any, unless the caller says
how many."""

SEARCHED_PASSES = 1000
"""The time of the search, in forward passes, between the two limits."""


@repeated_on_cpu
def verify(
    source: Source = None,
    into: Into = None,
    table: Table | str | Path | None = None,
    *,
    reference: Given = None,
    architecture: str | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    seed: int = 0,
    longest: int = 512,
    loaded: bool = False,
    fresh: bool = False,
    trust: bool = False,
    revision: str | None = None,
    inputs: Inputs = None,
    gradients: bool = False,
    steps: int = 0,
    training: bool = False,
    autocast: torch.dtype | None = None,
    causes: bool | float = True,
    trials: bool | None = None,
    stream: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Prove that a module computes what transformers computes from the same checkpoint.

    Both run in float64, where a faithful port agrees to 1e-12 of the activation's scale, and then in each working
    dtype, where its rounding error may be 4 times the reference's own.  Every probe of the table is seen end to end,
    and isolated: given the reference's activations, so that the module with the mistake is named and no other.

    Args:
        source, into, table, fresh, trust, revision: as in :func:`porting.load`.  Without a source the port gets the
            weights of the reference, or, with ``loaded``, keeps its own; without a table a model and a reference are
            compared where their modules have the same names.
        reference: what is compared with, in the place of transformers: a module that holds its weights, a function
            that builds one, a function that computes the reference's values from the inputs (numpy, JAX, torch), or the
            file of a trace that :func:`porting.record` or another program made.
        architecture: as in :func:`porting.load`; for a table without [architectures], the reference's class.
        dtypes: the working dtypes.
        seed: of the inputs that are made, and of new parameters.
        longest: no row that is made is longer than this.
        loaded: ``into`` holds its weights already: compare it as it is, and say which weights are not the checkpoint's.
        inputs: batches of your own in place of those made from the config: a dict from arguments to arrays, or a list
            of such batches.
        gradients: compare the parameters' gradients as well.
        steps: compare the weights after this many steps of SGD and of AdamW as well; more than 0 implies gradients.
        training: compare both in training mode as well, with the same dropout masks: where values are dropped, at which
            rates, what comes out, and the gradients; implies gradients.
        autocast: compare both under torch.autocast with this dtype as well, with float32 weights; ``torch.bfloat16`` or
            ``torch.float16``.
        trials: compare what is returned on many other batches, and check that the port is a pure function: see
            :mod:`porting.trials`.  None: of ``inputs`` that are given only other rows are tried, since nothing says
            what else is legal; True: everything.  Without trials the scope of the verdict is the batches.
        causes: look for the cause when a module is guilty, for one to three minutes of processor time at most, by
            the model's size; a number: for so many seconds at most.
        stream: for models larger than memory: all passes go through the model side by side, and the weights of a layer
            are read when it is reached and forgotten behind it.  The numbers are the same; which weights reach a probe,
            gradients and causes are not looked for.
        progress: called with what is done, how many steps are done and how many there are.

    Returns:
        The report.  ``into`` and the random state are left as they were: a copy is loaded and run.

    Raises:
        CheckpointError, TableError, PlanError, TargetError: as :func:`porting.load`.
        VerifyError: the reference or the module cannot be run, or the probes do not fit.

    >>> import porting
    >>> source = porting.embedded_checkpoint()
    >>> verify(source, longest=8).faithful
    True
    """
    given = dict(locals())  # before anything else has a name here
    batches = as_cases(inputs)
    learns = gradients or training or steps > 0
    if stream:
        refuse_beside_streaming(
            loaded=loaded, gradients=learns, autocast=autocast is not None, into=into, reference=reference is not None
        )
        prove: Prove = verify_streamed
    else:
        prove = partial(
            _verify,
            gradients=learns,
            steps=steps,
            training=training,
            autocast=autocast,
            causes=causes,
            trials=trials,
        )
    linecache.checkcache()  # lines of code are shown as they are now: a notebook's reader edits a file and reloads it
    with undisturbed(seed):
        report = prove(
            resolve_models(source, into, table, reference, revision=revision, loaded=loaded, inputs=batches),
            by_default=table is None and reference is None,
            architecture=architecture,
            dtypes=tuple(dict.fromkeys(dtypes)),
            seed=seed,
            longest=longest,
            fresh=fresh,
            trust=trust,
            inputs=batches,
            tell=progress or (lambda what, done, total: None),
        )
    return replace(report, call=spelled_call("porting.verify", verify, given))


def _search_seconds(clock: Clock) -> float:
    """The seconds for which causes are searched, for a model whose passes take as long as those until now."""
    return min(max(SEARCHING, SEARCHED_PASSES * clock.seconds / max(clock.passes, 1)), LONGEST_SEARCH)


def _searched_safely(
    search: Callable[[], tuple[tuple[Finding, ...], Divergence | None]],
) -> tuple[tuple[Finding, ...], Divergence | None, tuple[str, ...]]:
    """Run a search for causes; if it fails, return a warning, and the verdict stays."""
    try:
        return (*search(), ())
    except Exception as error:  # noqa: BLE001  # a fault of this library is no reason to say nothing of the port
        said = one_line(error) if isinstance(error, PortingError) else f"{type(error).__name__}: {one_line(error)}"
        blamed = "" if isinstance(error, PortingError) else ", by a fault of this library"
        return (), None, (f"the search for the cause failed{blamed} ({said}); the verdict stands",)


def _verify(
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
    gradients: bool,
    steps: int,
    training: bool,
    autocast: torch.dtype | None,
    causes: bool | float,
    trials: bool | None,
    tell: Progress,
) -> Report:
    begun = time.perf_counter()
    checkpoint, chosen = given.checkpoint, given.table
    recorded = given.reference.recording if isinstance(given.reference, Recorded) else None
    dtypes, lost = possible(given.reference, dtypes, inputs, gradients=gradients, autocast=autocast is not None)
    stages = 3 + len(dtypes) + (autocast is not None) + gradients
    tell("loading", 0, stages)
    with chosen_for(None if by_default else chosen, given.into, chosen):
        subject = prepare(
            checkpoint,
            given.into,
            chosen,
            architecture,
            loaded=given.loaded,
            fresh=fresh,
            trust=trust,
            reference=given.reference.title if given.reference else "",
        )
    limit_threads(sum(one.numel() for one in subject.module.parameters()))
    theirs, random = _opponent(given, subject)
    running = time.perf_counter()
    inputs = recorded.cases if recorded else inputs
    clock = Clock()
    batch, make, said = _batches(given, subject, theirs, inputs, seed=seed, longest=longest)
    cases = _as_taken(theirs, batch, whole=given.reference is None)

    tell("reference in float64", 1, stages)

    sides = _Sides(theirs, subject, checkpoint, chosen, cases, clock)
    reference, port = sides.reference, sides.port
    doubled = partial(reference, torch.float64)
    batch = in_fitting_rows(theirs, batch, make, cases, lambda: doubled().returned(0))
    batch, make, (chosen, returned), said = _that_the_port_takes(
        theirs,
        batch,
        make,
        cases,
        partial(_with_returned, chosen, theirs, doubled, partial(port, torch.float64), random),
        said,
        longest,
    )
    sides.table = chosen
    comparison = Comparison(chosen, sizes(chosen, checkpoint.config)[0], recorded.lowered if recorded else None)
    batch = anchored(comparison, doubled, theirs, batch, make, cases)
    comparison.warnings += [*lost, *said]
    pairs = None
    if has_parts(theirs):
        pairs = counterparts(chosen, subject.plan.config, comparison.sizes, theirs.module, subject.module)
        if given.reference is None:
            theirs.keep(stored_dtype(checkpoint))  # as exact as the checkpoint, and half as large
            share(theirs.module, checkpoint)

    tell("port in float64", 2, stages)
    trier = (
        partial(
            explore,
            theirs,
            subject.module,
            chosen,
            batch,
            returned,
            comparison=comparison,
            seed=seed,
            clock=clock,
            given=inputs is not None and trials is None,  # no batches but the caller's may be made
            dtypes=dtypes,
        )
        if trials is not False and isinstance(theirs, LiveReference)
        else None
    )
    exact = compare_in_float64(comparison, doubled, theirs, port(torch.float64), chosen, batch, cases, seed, trier)

    _round(comparison, reference, port, dtypes, autocast, lambda what, done: tell(what, 3 + done, stages))
    learned = None
    if gradients and pairs is not None:
        tell("gradients and training" if steps else "gradients", stages - 1, stages)
        learned = learn(reference, port, comparison, pairs, dtypes=dtypes, steps=steps, seed=seed, training=training)
    probes = _told(tuple(comparison.probes()), subject)

    seen = shown(subject.module, exact.shares, exact.rows, weights(subject.plan, checkpoint) if given.weighed else {})
    seen = replace(seen, made=subject.plan.contents)
    scope = _scope(exact.scope, comparison, probes, returned, cases, partial(port, torch.float64), sides.as_new)
    drawn, turned, simple, wide = _drawn(
        theirs,
        sides.both,
        given.table,
        batch,
        cases[0],
        seed,
        partial(_confirming, theirs, subject.module, chosen, batch, cases, probes),
    )
    weighed, seconds = given.weighed and not seen.differing, _search_seconds(clock) if causes is True else float(causes)
    if seconds > 0 and any(probe.guilty or probe.imprecise for probe in probes):
        tell("looking for the cause", stages - 1, stages)
    found, diverges, failed = _searched_safely(
        partial(
            name_causes,
            comparison,
            probes,
            sides.both,
            dtypes,
            drawn=drawn,
            turned=turned,
            simple=simple,
            wide=wide,
            padding=batch.fields.get(PADDING),
            layouts=partial(corrections, subject.plan, checkpoint.read) if weighed and not given.loaded else None,
            weights_compared=weighed,
            # what is solved for has no solution with NaN in it, and what a call gives after others says nothing
            seconds=seconds * (not comparison.no_numbers and not _keeps_between_calls(scope)),
        )
    )
    tell("done", stages, stages)
    ended = time.perf_counter()
    return Report(
        source=checkpoint.location,
        reference=theirs.title,
        port=f"{type(subject.module).__module__}.{type(subject.module).__qualname__}",
        table=chosen.where,
        probes=probes,
        skipped=comparison.skipped,
        shown=seen,
        noise=comparison.noise,
        cases=tuple(case.name for case in cases),
        scope=scope,
        padded=comparison.padded,
        unseen=(*exact.unseen, *unseen(cases, batch.fields, batch.withheld, whole=batch.whole), *exact.reach.unseen),
        seed=seed,
        environment=versions(),
        warnings=(*warned(subject, random), *comparison.warnings, *comparison.misfits, *exact.searched.failed, *failed),
        notes=tuple(comparison.notes),
        idle=never_ran(subject.module, comparison.ran, seen),
        branches=exact.reach.branches,
        search=exact.searched.said,
        random=random,
        no_numbers=_no_numbers(comparison, subject, checkpoint, cases, weighed=given.weighed),
        learned=learned,
        causes=found,
        divergence=diverges,
        cost=Cost(
            loading=running - begun,
            forwards=clock.seconds,
            total=ended - running,
            passes=clock.passes,
            memory=peak(),
        ),
        approximate=chosen.approximate,
    )


def _as_taken(theirs: Reference, batch: Batches, *, whole: bool) -> list[Case]:
    """The batches as the reference takes them; whole ones, for a class that the checkpoint names, are as they are."""
    if not isinstance(theirs, LiveReference):
        return [*batch.cases]
    return [(theirs.known if whole else theirs.taken)(case) for case in batch.cases]


def _keeps_between_calls(scope: Scope) -> bool:
    return any(one.kind in KEPT_BETWEEN_CALLS for one in scope.impurities)


def _no_numbers(
    comparison: Comparison, subject: Subject, checkpoint: Checkpoint, cases: Sequence[Case], *, weighed: bool
) -> str:
    """The sentence on values that were not compared because the reference returns NaN or infinity."""
    if not comparison.no_numbers:
        return ""
    inputs = dict.fromkeys(
        name
        for case in cases
        for name, one in case.inputs.items()
        if one.is_floating_point() and not bool(torch.isfinite(one).all())
    )
    tensors = [fault.where for fault in scan(subject.plan, checkpoint.read)] if weighed else []
    held = [f"the checkpoint's {listed(tensors)}"] if tensors else []
    held += [f"the inputs' {listed(list(inputs))}"] if inputs else []
    where = f"; such values are in {' and in '.join(held)}" if held else ""
    outputs = listed(list(comparison.no_numbers))
    return f"not compared where the reference returns NaN or infinite values: {outputs}{where}"


def _told(probes: Sequence[Probe], subject: Subject) -> tuple[Probe, ...]:
    """The probes, guilty ones with the rules that write their weights; what is wrong in float64 is so in any dtype."""
    told = (replace(one, rules=writers(subject.plan, one.span)) if one.guilty else one for one in probes)
    wrong = any(one.guilty or one.differs for one in probes)
    return tuple(replace(one, off=None) if wrong else one for one in told)


def _round(
    comparison: Comparison,
    reference: Callable[[torch.dtype], Side],
    port: Callable[[torch.dtype], Side],
    dtypes: Sequence[torch.dtype],
    autocast: torch.dtype | None,
    tell: Callable[[str, int], None],
) -> None:
    """Compare both sides in each working dtype, and under autocast with float32 weights; then measure what is noise."""
    for number, dtype in enumerate(dtypes):
        tell(f"both in {dtype_name(dtype)}", number)
        comparison.rounding(reference(dtype), port(dtype), dtype)
    if comparison.breaks():
        comparison.in_half = computes_in_half(port(dtypes[0]))
    if autocast is not None:
        tell("both under autocast", len(dtypes))
        theirs, ours = (replace(make(torch.float32), autocast=autocast) for make in (reference, port))
        comparison.rounding(theirs, ours, autocast)
    if comparison.unsettled():
        measure_float64_noise(comparison, partial(reference, torch.float64))


@dataclass
class _Sides:
    """Makes the two sides, ready to be run.

    Attributes:
        theirs, subject, checkpoint: the reference, the port, and what both were loaded from.
        table: what is compared, and how the port is given its inputs.
        cases: the batches; those that are added to the list later are run as well.
        as_new: makes the context in which the port's files keep what they keep now, before its first pass.
    """

    theirs: Reference
    subject: Subject
    checkpoint: Checkpoint
    table: Table
    cases: list[Case]
    clock: Clock
    _shared: dict[torch.dtype, tuple[Side, Side]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.as_new = UserState(type(self.subject.module)).again

    def reference(self, dtype: torch.dtype) -> Side:
        """The reference in a dtype."""
        terms = [term for rule in self.table.compared for term in rule.sources]
        return self.theirs.side(dtype, terms, self.table.prefix, self.cases, self.clock)

    def port(self, dtype: torch.dtype) -> Side:
        """The port in a dtype."""
        exact = dtype == torch.float64
        own = exactly(self.subject, self.checkpoint) if exact else cast(self.subject.module, dtype)
        return port_side(own, dtype, self.table, self.cases, self.clock)

    def both(self, dtype: torch.dtype, on: Sequence[Case] | None = None) -> tuple[Side, Side]:
        """Both in a dtype, with the same two models at each call: in float64 a copy takes twice what is stored.

        Args:
            on: other batches than :attr:`cases`, for a reference that has parts.
        """
        if dtype not in self._shared:
            self._shared[dtype] = self.reference(dtype), self.port(dtype)
        reference, port = self._shared[dtype]
        if on is None:
            return reference, port
        given = [floating(case.inputs, dtype) for case in on]
        return replace(reference, arguments=given), port_side(port.module, dtype, self.table, on, self.clock)


def _drawn(
    theirs: Reference,
    both: Callable[..., tuple[Side, Side]],
    table: Table,
    batch: Batches,
    case: Case,
    seed: int,
    confirming_cases: Callable[[int], Sequence[Case]],
) -> tuple[Both | None, Both | None, Sequence[Both], Iterable[Both]]:
    """Return functions that run both sides on other cases; there are none for a reference that has no parts.

    These are one more case, the same case padded in front, simple cases, and cases of many kinds.

    Args:
        confirming_cases: makes the last ones from a seed, when the first one is asked for.
    """
    if not has_parts(theirs):
        return None, None, (), ()
    drawn = another(case, batch, seed)
    ways = (drawn, padded_in_front(drawn, table.inputs), *simple_batches(case, batch))
    first, second, *simple = (partial(both, on=[theirs.taken(one)]) for one in ways)

    def wide() -> Iterator[Both]:
        yield from (partial(both, on=[one]) for one in confirming_cases(seed))

    return first, second, simple, wide()


def _confirming(
    theirs: Reference,
    module: nn.Module,
    table: Table,
    batch: Batches,
    cases: Sequence[Case],
    probes: Sequence[Probe],
    seed: int,
) -> Sequence[Case]:
    """Cases of many kinds to confirm a cause on; none where nothing is guilty."""
    if not isinstance(theirs, LiveReference) or not any(probe.guilty for probe in probes):
        return ()
    return confirming(theirs, module, table, batch, cases, seed)


def _batches(
    given: ComparedModels,
    subject: Subject,
    theirs: Reference,
    inputs: Sequence[Case] | None,
    *,
    seed: int,
    longest: int,
) -> tuple[Batches, Callable[[int], Batches], list[str]]:
    """The first batches, what makes them with another longest row, and what is to be reported of them."""
    living = theirs if isinstance(theirs, LiveReference) else None
    make: Callable[..., Batches] = partial(
        make_batches,
        given.table,
        given.checkpoint,
        subject.plan.config,
        inputs,
        seed=seed,
        choices=choices(subject.reference),
        reference=living,
        port=subject.module,
    )
    batch = make(longest)
    padding = batch.fields.get(PADDING, None if "model_type" in batch.fields else 0)
    if living is None or MASK not in batch.withheld or not isinstance(padding, int):
        return batch, make, []  # without a padding token no token id may be hidden
    first, module = make(longest, masks=(MASK, DECODER_MASK)).cases[0].inputs, exactly(subject, given.checkpoint)
    plain = {name: one for name, one in first.items() if name not in (MASK, DECODER_MASK)}

    def run(ids: Mapping[str, Tensor]) -> list[Tensor]:
        case = living.taken(Case("without a mask", {**plain, **ids}))
        return list(port_side(module, torch.float64, given.table, [case], Clock()).returned(0).values())

    try:
        pairs = [(name, mask) for name, mask in ((IDS, MASK), (DECODER_IDS, DECODER_MASK)) if name in plain]
        masks = [mask for name, mask in pairs if hides_token(run, {name: plain[name]}, padding)]
    except VerifyError:  # the first batches say why
        return batch, make, []
    if not masks:
        return batch, make, []
    said = "your model masks the padding token by itself: the reference was given the same mask"
    return make(longest, masks=masks), partial(make, masks=masks), [said]


def _that_the_port_takes(
    theirs: Reference,
    batch: Batches,
    make: Callable[..., Batches],
    cases: list[Case],
    probe: Callable[[], tuple[Table, Returned]],
    said: Sequence[str],
    longest: int,
) -> tuple[Batches, Callable[..., Batches], tuple[Table, Returned], list[str]]:
    """Probe the port; use other batches if it refuses the usual ones and accepts these.

    Many a model adds its whole table of positions to a row, or has a mask for one length; some refuse padding.

    Args:
        make: makes the batches again, in which every row is padded to the longest length, or none is.
        said: what is to be reported of the batches.
        longest: no row is longer.
    """
    try:
        return batch, make, probe(), [*said]
    except VerifyError as error:
        if not isinstance(theirs, LiveReference) or any(one.code is Code.NO_INPUTS for one in error.faults):
            raise  # other batches have the same arguments
        before, why = list(cases), failure_reason(error)
        ways: dict[str, Mapping[str, bool]] = {}
        if batch.more is not None:
            more = f"your model takes no other rows than those of {batch.longest} tokens: every row is padded to that"
            ways[more] = {"full": True}
        if any(not bool(one.all()) for case in cases for name, one in case.inputs.items() if name.endswith(MASK)):
            ways[f"your model fails on padded rows ({why}): in the batches that every probe sees no row is"] = {
                "padded": False
            }
        for more, way in ways.items():
            other = make(batch.longest or longest, **way)
            cases[:] = [theirs.taken(case) for case in other.cases]
            with suppress(VerifyError):
                return other, partial(make, **way), probe(), [*said, more]
        cases[:] = before
        raise


def _with_returned(
    table: Table,
    opponent: Reference,
    reference: Callable[[], Side],
    port: Callable[[], Side],
    random: Collection[str],
) -> tuple[Table, Returned]:
    """The table with probes for what both return; the two models in float64 are made for this alone.

    What the port returns as ``hidden_states`` or ``attentions`` is what the reference returns by these names, one by
    one, where both return as many.
    """
    theirs, ours = reference(), port()
    found, own = theirs.returned(0), ours.returned(0)
    if isinstance(opponent, LiveReference) and (flags := opponent.asked_for(own)):
        asked, more = reference(), dict[str, Tensor]()
        with suppress(VerifyError):
            more = asked.returned(0)
        counts, named = _counts(more), _counts(own)
        if more and all(counts[name] == named[name] for name in counts.keys() & named.keys()):
            theirs, found = asked, more
        else:
            opponent.not_asked(flags)
    return with_returned(table, theirs, ours, found, own, random)


def _counts(returned: Mapping[str, object]) -> Counter[str]:
    """How many outputs there are of each name: of ``hidden_states.0`` and so on."""
    return Counter(name.partition(".")[0] for name in returned)


def _scope(
    scope: Scope,
    comparison: Comparison,
    probes: Sequence[Probe],
    returned: Returned,
    cases: Sequence[Case],
    port: Callable[[], Side],
    as_new: Callable[[], AbstractContextManager[None]],
) -> Scope:
    """The scope with what the passes showed that were run for the probes.

    A trial whose difference rounding explains, by the bound of the returned value, is not a difference: it shrinks with
    the unit roundoff, as the working dtypes show.
    """
    rounded = max((probe.bound.end_to_end or 0.0 for probe in probes if probe.port.startswith(ROOT)), default=0.0)
    results = tuple(
        replace(one, status=Status.SAME)
        if one.status is Status.DIFFERS and one.difference is not None and one.difference <= rounded
        else one
        for one in scope.results
    )
    results += tuple(
        Result(
            kind=Kind.BATCH,
            what=cases[case].name,
            batch=cases[case].name,
            status=Status.DIFFERS,
            difference=math.inf,
            said=how,
        )
        for case, how in comparison.other_shapes.items()
    )
    keeps = _keeps_between_calls(scope)
    kept = after_other_calls(port, as_new) if not keeps and any(probe.differs for probe in probes) else []
    known = {one.detail for one in scope.impurities}
    impure = [*scope.impurities, *kept]
    wrote = [name for name in comparison.written.get("the port", ()) if name not in known]
    return replace(
        scope,
        results=results,
        dtypes=("float64", *comparison.working),
        returned=returned,
        impurities=(
            *impure,
            *(Impurity(kind=ImpurityKind.WRITES_INPUTS, detail=name) for name in wrote),
        ),
    )


def _opponent(given: ComparedModels, subject: Subject) -> tuple[Reference, tuple[str, ...]]:
    """The reference, with the port's new parameters as it has them, and those that it does not have."""
    theirs = given.reference
    if theirs is None:
        module = load_reference(given.checkpoint, subject.reference, torch.float64)
        theirs = LiveReference(module, f"transformers.{subject.reference}")
    random: tuple[str, ...] = ()
    if has_parts(theirs):
        random = renew(subject, theirs.module)
    elif subject.plan.fresh:
        where, what = (
            ("", theirs.title) if isinstance(theirs, LiveReference) else (theirs.recording.where, "the recording")
        )
        message = f"{what} does not say what new parameters hold: {', '.join(subject.plan.fresh)}"
        raise VerifyError(Fault(code=Code.NO_REFERENCE, where=where, message=message))
    refuse_unknown(given.table, lambda terms: theirs.points(terms, given.table.prefix), subject.module)
    return theirs, random
