"""``suggest``: a table for a module that was never seen before, proven, or the reason why there can be none."""

from __future__ import annotations

import math
import os
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from porting.build import bounded as bounded_size
from porting.build import bounds, build
from porting.checkpoint import Checkpoint, open_checkpoint
from porting.errors import Fault, Message, Option, PortingError, PortingWarning, VerifyError
from porting.limits import untimed
from porting.loading import maker
from porting.notation.table import Table, parse_table
from porting.plan.check import check
from porting.suggesting.draft.layer_patterns import Line, fill_slices
from porting.suggesting.draft.probes import NEAR, attention, attention_probes, ordered, prefixed
from porting.suggesting.draft.table_draft import draft, heads_of, onto, scales_of, sizes_of
from porting.suggesting.draft.table_writer import TableDraft, write
from porting.suggesting.search.embedding_candidates import refolded, where_to_fold
from porting.suggesting.search.layouts import CandidateRule
from porting.suggesting.search.search import WeightSearch
from porting.suggesting.search.search_result import GUESS, SearchResult
from porting.suggesting.subjects.building import Builder, build_for, named_fields, with_fields
from porting.suggesting.subjects.config_fields import Role, config_number, stage_field
from porting.suggesting.subjects.fixed_depth import uncut
from porting.suggesting.subjects.guarded_run import Deadline, OutOfTime, bounded, guarded, outside
from porting.suggesting.subjects.model_pair import (
    ModelPair,
    completed_config,
    prepare,
    traced_models,
)
from porting.suggesting.subjects.model_preparation import untrained_adapters
from porting.suggesting.subjects.operation_trace import WeightUse
from porting.suggesting.subjects.questions import Ask, Asker, which_architecture
from porting.suggesting.subjects.sampler import LENGTH, rows_of
from porting.suggesting.subjects.solved_sizes import untold
from porting.suggesting.subjects.traced_model import TracedModel, check_deterministic
from porting.suggesting.subjects.twin import DEEP, SMALL
from porting.suggesting.verdict.extra_checks import ExtraChecks, run_extra_checks, untried_checks
from porting.suggesting.verdict.judgement import Judgement, judge, whatever_the_weights
from porting.suggesting.verdict.proof import LARGE, TRIED, Proof, differing, prove
from porting.suggesting.verdict.reasons import evidence, known, unknown
from porting.suggesting.verdict.suggestion import Reason, Stop, Suggestion, Verdict
from porting.target import TargetError
from porting.tracing.devices import repeated_on_cpu
from porting.tracing.measure import MEANING
from porting.tracing.running import restored_threads
from porting.tracing.trace import ARROW
from porting.verification.compare import Progress
from porting.verification.reference import ReferenceClass, declared, reference_class, usual_classes

TRIALS, LIMIT = 4000, 120.0
"""The search ends after this many candidates, or this many seconds."""

BUILT = 640_000_000
"""A module of at most this many bytes is built with its weights, if it cannot be built without them."""

LOOSE = 0.05
"""How much attention may differ, relative to its scale, in a module that computes something slightly different."""

DOUBTED = 5
"""How many moves before a place that fits nothing may be wrong; one more each time that names are tried."""

GUESSING = 10.0
"""Seconds spent on exchanging names after a place that fits nothing."""

AGAIN = 8
"""How often the module is run again at the end, to see whether it is random: a verdict on that would be wrong."""

DEEPER = 4
"""Layers of a second twin, which is made if the first one's table does not fit the checkpoint's deeper layers."""

RESERVE, CAUSES = 0.15, 16.0
"""The share of the time that is kept for the proof, and the seconds that may be spent on naming causes."""


@repeated_on_cpu
def suggest(
    source: str | os.PathLike[str] | Checkpoint,
    into: Builder,
    *,
    architecture: str | None = None,
    inputs: Mapping[str, str] | None = None,
    config: Mapping[str, str | bool] | None = None,
    name: str = "suggested",
    seed: int = 0,
    trials: int = TRIALS,
    limit: float = LIMIT,
    revision: str | None = None,
    progress: Progress | None = None,
    ask: Ask | None = None,
) -> Suggestion:
    """Write the mapping table for a module, and prove it.

    A small random twin of the checkpoint's architecture is made with transformers, and the module is built to its
    size.  Both run; place after place, what flows through the module says which of the twin's weights belong there,
    and what remains open is tried out.  The table is then proven by :func:`porting.verify` in float64, and held
    against the checkpoint's own names and shapes.

    Args:
        source: as in :func:`porting.load`.
        into: the module, which is left as it is; or a class or function that builds it.  A builder is given what it
            asks for: the config, if it has a parameter ``config`` or one parameter only, else the fields that its
            parameters are named after, in anybody's words: ``n_embd``, ``d_model`` and ``width`` are the hidden size.
        architecture: the reference's class, as transformers spells it; by default the one that ``config.json``
            names, where it has a place for every tensor of the checkpoint, else the one that has.
        inputs: [inputs], for a forward that cannot be understood: ``{"attention_mask": "m -> bool"}``.
        config: which field a builder means by a name that is not understood, or whether something is there:
            ``{"D": "hidden_size", "qkv_bias": True}``.
        name: the table's name.
        seed: of the twin's weights and of all inputs.
        trials: the search ends after so many candidates.
        limit: seconds of computing for search and proof together, and by the clock twice as many at most.  The search
            stops early enough to leave time for the proof.  At the limit no further forward pass begins, one that is
            running is waited for, and the report names what is missing.
        revision: for a hub id.
        progress: called with what is done, how many steps are done and how many there are.
        ask: answers what is the user's to decide; by default every :class:`Question` gets its own default.

    Returns:
        The suggestion: the table's text, and the verdict with its reasons.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        TargetError: the module cannot be built.
        VerifyError: the forward fails, is not deterministic, makes parameters while it runs, or takes what nobody
            understands; or transformers cannot run the reference.

    >>> import porting
    >>> source = porting.embedded_checkpoint()
    >>> found = suggest(source, porting.load(source).bert)
    >>> found.proven, found.missing
    (True, ('cls',))
    """
    begun, until = time.monotonic(), Deadline(limit)
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source, revision=revision)
    into = with_fields(into, config or {}, checkpoint.config)
    asker = Asker(None if ask is None else outside(ask))
    stage = "opening the checkpoint"
    report_progress = outside(progress or (lambda what, done, total: None))

    def tell(what: str, done: int, total: int) -> None:
        nonlocal stage
        stage = what
        report_progress(what, done, total)

    against = _against(checkpoint, architecture, asker)
    for one in against.warnings(checkpoint.tensors):
        warnings.warn(one, PortingWarning, stacklevel=3)  # past the decorator
    kind = against.name
    guessed: dict[str, str] = {}
    found: Suggestion | None = None
    subjects: ModelPair | None = None
    with untimed(), guarded(seed), rows_of(LENGTH), tempfile.TemporaryDirectory(prefix="porting-suggest-") as folder:
        try:
            for number, depth in enumerate(_depths(checkpoint, kind)):
                with bounded(until), restored_threads():
                    tell("making a twin", 0, 0)
                    subjects = prepare(
                        checkpoint,
                        into,
                        kind,
                        Path(folder) / str(number),
                        seed=seed,
                        inputs=inputs or {},
                        ask=asker,
                        tell=tell,
                        depth=depth,
                    )
                    searched = _searched(subjects, seed, trials, Deadline(until.left - limit * RESERVE), tell)
                fields = named_fields(subjects.into)
                guessed = {ours: theirs for ours, theirs in fields.items() if ours not in (config or {})}
                prover = _Prover(
                    into=subjects.into, subjects=subjects, until=until, seed=seed, tell=tell, guessed=tuple(guessed)
                )
                proposed = _proposed(checkpoint, prover, searched, asker, name)
                found = proposed.suggestion if found is None or proposed.suggestion.proven else found
                if not proposed.too_shallow:
                    break
        except PortingError:  # a deeper twin may be too large
            if found is None:
                raise
        except OutOfTime:
            shown = () if subjects is None else tuple(one for one in whatever_the_weights(subjects) if one.shown)
            found = found or _nothing(kind, name, f"the limit of {limit:g} s was met while {stage}", shown)
    if found is None:  # the loop has run once at least
        raise AssertionError("no twin was tried")
    if guessed:
        read = ", ".join(f"{ours} = {theirs}" for ours, theirs in guessed.items())
        message = Message(
            f"what is built has the reference's shapes with {read}: ", Option("config"), " says otherwise"
        )
        warnings.warn(message, PortingWarning, stacklevel=3)  # past the decorator
    return replace(found, decisions=tuple(asker.decisions), seconds=time.monotonic() - begun)


def _depths(checkpoint: Checkpoint, architecture: str) -> Iterator[int]:
    """The depths of the twins: the usual one, a deeper one, and the checkpoint's own.

    Layers may differ from the second one on: the first has no norm, every third sees all positions.
    """
    yield 0
    config = completed_config(checkpoint.config, architecture)
    stages = stage_field(Role.DEPTH, config)
    listed: Any = config[stages] if stages else [config_number(config, Role.DEPTH)]
    own = max(listed)
    if own > DEEPER + 2:
        yield DEEPER
    if own > SMALL.depth:
        yield min(own, DEEP.depth)


def _nothing(architecture: str, name: str, said: str, shown: tuple[Reason, ...]) -> Suggestion:
    """The result if the time was over before anything was found.

    Args:
        shown: reasons that were seen before weights were looked for, which none can take away.
    """
    then = "no table was looked for any longer" if shown else "nothing was found by then: a larger limit gives it more"
    reason = Reason(kind="bound", said=f"{said}, and {then}")
    verdict = Verdict.IMPOSSIBLE if shown else Verdict.NOT_FOUND
    reasons = (*shown, reason)
    head = [f"{architecture}: {verdict}.", *(f"- {one.said}" for one in reasons)]
    text = write(TableDraft(name=name, description=f"{architecture}: {verdict}", head=head))
    stop = None if shown else Stop(proven=0, places=0)
    return Suggestion(verdict=verdict, text=text, reasons=reasons, stop=stop, proof="" if stop is None else stop.said)


@dataclass(frozen=True, kw_only=True)
class _Proposal:
    """The result for one twin.

    Attributes:
        suggestion: the table and the verdict.
        too_shallow: the table is proven on the twin, and does not fit the checkpoint, which has more layers.
    """

    suggestion: Suggestion
    too_shallow: bool


def _proposed(
    checkpoint: Checkpoint,
    prover: _Prover,
    searched: tuple[SearchResult, list[tuple[str, str]]],
    asker: Asker,
    name: str,
) -> _Proposal:
    """The table of what was found, proven and judged."""
    into, subjects = prover.into, prover.subjects
    found, inner = searched
    fold(found, asker)
    made, lines, unmapped = draft(subjects, found, name, (), close=bool(found.divergences))
    made, plain = with_probes(made, [*made.probes, *inner], found), with_probes(made, made.probes, found)
    fresh = any(one.side == "module" for one in unmapped)
    proof = prover.proven(subjects.twin.checkpoint, made, fresh=fresh)
    unnamed = bool(differing(proof)) and (bool(unknown(proof)) or not known(proof))
    theirs = {key: tuple(one.shape) for key, one in subjects.twin.tensors.items()}
    ours = found.models[0].shapes if found.models is not None else {}
    other = found.in_stored_order(theirs, ours) if unnamed else None
    if other is not None:  # a cause is an alteration of the reference, whose weights lie in the stored order
        drafted, others, left = draft(subjects, other, name, (), close=bool(other.divergences))
        drafted = with_probes(drafted, [*drafted.probes, *inner], other)
        again = prover.proven(subjects.twin.checkpoint, drafted, fresh=fresh)
        if known(again) and not unknown(again):
            found, proof, made, plain, lines, unmapped = other, again, drafted, drafted, others, left
    wrong = differing(proof)
    if inner and wrong and all(ARROW in one for one in wrong):
        made = plain  # attention is written in another way there, and what comes of it is the same
        proof = prover.proven(subjects.twin.checkpoint, made, fresh=fresh)
    final = onto(made, checkpoint, subjects)
    fits = _fits(checkpoint, uncut(into), parse_table(write(final), where="suggested"), subjects, fresh=fresh)
    own = None
    if not fits and proof.exact and _numbers(checkpoint) < LARGE:
        own = prover.proven(checkpoint, final, fresh=fresh, whole=_numbers(checkpoint) < TRIED)
        if own.report is None and not own.late:  # verify's own rows may be longer than the module has positions for
            own = prover.proven(checkpoint, final, fresh=fresh)
        own = None if own.late else own  # the twin's is a proof as well
    deep = replace(made, probes=final.probes, returned=final.returned) if own is None else None
    behind = prover.behind(made, fresh=fresh, deep=deep, own=own) if proof.exact and not fits else ExtraChecks()
    if own is not None and behind.worst and not (own.agrees or own.mostly_same):
        # verify's first batches may hold what the trials on the twin differ on, such as padding without a mask
        shorter = prover.proven(checkpoint, final, fresh=fresh)
        own = shorter if shorter.agrees else own
    guessed = untold(into, prover.guessed, subjects.twin.config, bounds(checkpoint.tensors, checkpoint.config))
    verdict = judge(subjects, found, proof, own, fits, checkpoint, unmapped, behind, guessed)
    if verdict.verdict in {Verdict.EXACT, Verdict.TRUNK}:  # what looked like a guess was confirmed further behind
        lines, of = ([_confirmed(one) for one in some] for some in (lines, final.lines))
        final = replace(final, lines=of)
    text = write(_headed(final, verdict, subjects.twin.architecture, lazy=subjects.lazy))
    suggestion = Suggestion(
        verdict=verdict.verdict,
        text=text,
        reasons=verdict.reasons,
        missing=verdict.missing,
        stop=verdict.stop,
        unmapped=tuple(unmapped),
        limits=verdict.limits,
        evidence=tuple(evidence(lines, own or proof, found)),
        proof=verdict.sentence,
        difference=verdict.difference,
        proven_on="the checkpoint" if own is not None and own.exact else "a small twin",
        shown=verdict.shown,
        trials=found.trials,
    )
    return _Proposal(suggestion=suggestion, too_shallow=bool(fits) and proof.exact and subjects.few_layers)


def fold(found: SearchResult, asker: Asker) -> None:
    """Fold a row that the module has no table for into the table that the user names."""
    tables = {
        name for unit in found.trace.units if unit.kind in {WeightUse.LOOKUP, WeightUse.TABLE} for name in unit.names
    }
    question = where_to_fold(found.moves, tables)
    if question is not None:
        answer = asker(question)
        found.moves = refolded(found.moves, answer)
        for one in {answer, question.default} if answer != question.default else ():
            found.trace.modules.pop(one.rpartition(".")[0] or one, None)  # the table by itself is another one now


def with_probes(made: TableDraft, probes: Sequence[tuple[str, str]], found: SearchResult) -> TableDraft:
    """The table with these probes, in the order in which the reference runs; its own stand in that order already."""
    modules = found.reference.modules
    lines = probes if probes is made.probes else ordered(probes, modules)
    return replace(
        made, probes=prefixed(lines, made.prefix, modules), returned=prefixed(made.returned, made.prefix, modules)
    )


def _confirmed(line: Line) -> Line:
    return replace(line, why="what it computes", proven=True) if line.why == GUESS else line


def _against(checkpoint: Checkpoint, architecture: str | None, ask: Asker) -> ReferenceClass:
    """The reference's class: the one that was asked for, or answered, or that the checkpoint holds."""
    names = declared(checkpoint.config)
    if architecture is not None or len(names) == 1 or not (names or ask.present):
        return reference_class(checkpoint, architecture)
    try:
        held = reference_class(checkpoint)
    except VerifyError:
        held = ReferenceClass(name="")
    question = which_architecture(names, usual_classes(checkpoint.config) if ask.present else (), held.name)
    answer = held.name if question is None else ask(question)
    return held if answer == held.name and held.name else reference_class(checkpoint, answer or None)


def _searched(
    subjects: ModelPair, seed: int, trials: int, until: Deadline, tell: Callable[[str, int, int], None]
) -> tuple[SearchResult, list[tuple[str, str]]]:
    """The result of the search, and the lines of [probes] for the inside of attention."""
    found, inner = _found(traced_models(subjects, seed), subjects, trials, until, tell)
    if found.models is None or fill_slices(found.moves, found.models[0].stacked, found.models[0].shapes):
        return found, inner
    return _found(traced_models(subjects, seed, sliced=False), subjects, trials, until, tell)


def _found(
    models: tuple[TracedModel, TracedModel],
    subjects: ModelPair,
    trials: int,
    until: Deadline,
    tell: Callable[[str, int, int], None],
) -> tuple[SearchResult, list[tuple[str, str]]]:
    """See :func:`_searched`."""
    port, reference = models
    searching = partial(
        WeightSearch,
        port,
        reference,
        sizes=sizes_of(subjects.twin.config).values,
        heads=heads_of(subjects.twin.config),
        config=subjects.twin.config,
        scales=scales_of(subjects.twin.config),
        most=trials,
        until=until,
        tell=tell,
        asleep=untrained_adapters(port, reference, subjects.zeros),
        copies=subjects.twin.copies,
        stored=subjects.twin.tensors,
    )
    kept = {name: tensor.detach().clone() for name, tensor in reference.leaves.items()}
    try:
        found = searching().search()
        if any(one.ends for one in found.divergences):
            # The last ones in front of the first place that fits nothing may be what is wrong there.
            sure = found.sure
            counts = dict.fromkeys((0, *(len(sure) - left for left in range(DOUBTED) if len(sure) > left)))
            copies = found.seconds
            guessing = partial(searching, until=Deadline(min(until.left, GUESSING)))
            guesses = (
                _guessed(port, guessing(), sure[:count], seconds=copies, least=found)
                for count in counts
                if not until.past
            )
            found = next((one for one in guesses if one is not None), found)
        found.models = port, reference
        check_deterministic(port, AGAIN)
        bound = LOOSE if found.divergences or found.rounded else NEAR
        inner = [] if subjects.way.by_row else attention_probes(attention(port), attention(reference), bound)
        return found, inner
    finally:
        with torch.no_grad():
            for name, tensor in reference.leaves.items():
                tensor.detach().copy_(kept[name])


@torch.no_grad()
def _guessed(
    port: TracedModel,
    search: WeightSearch,
    known: Sequence[CandidateRule] = (),
    *,
    in_order: bool = False,
    seconds: Mapping[str, str] = MappingProxyType({}),
    least: SearchResult | None = None,
) -> SearchResult | None:
    """Fill the rest by names or by order, if the module then returns what the reference returns; else change nothing.

    Args:
        least: what was found before: what fills less than that is no better, whatever the module then returns, for it
            still has the values of before.
    """
    before = {name: tensor.detach().clone() for name, tensor in port.leaves.items()}
    found = search.guessed(known, in_order=in_order, seconds=seconds)
    if found is not None and least is not None and not {*found.open} <= {*least.open}:
        found = None
    if found is None:
        for name, tensor in port.leaves.items():
            tensor.detach().copy_(before[name])
    return found


@dataclass(frozen=True, kw_only=True)
class _Prover:
    """Runs proofs, as long as there is time.

    Attributes:
        guessed: the builder's names whose fields were found out.
    """

    into: Builder
    subjects: ModelPair
    until: Deadline
    seed: int
    tell: Progress
    guessed: tuple[str, ...] = ()

    def behind(self, made: TableDraft, *, fresh: bool, deep: TableDraft | None, own: Proof | None) -> ExtraChecks:
        """The checks on the twin after the proof."""
        self.tell("proving on other rows", 0, 0)
        table = parse_table(write(made), where="suggested")
        deeper = None if deep is None else parse_table(write(deep), where="suggested")
        try:
            with bounded(self.until):
                return run_extra_checks(
                    self.into, table, self.subjects, seed=self.seed, fresh=fresh, deep=deeper, own=own
                )
        except OutOfTime:
            return untried_checks(own)

    def proven(self, checkpoint: Checkpoint, made: TableDraft, *, fresh: bool, whole: bool = False) -> Proof:
        """The table's proof on the twin, with the causes of what differs, or on the checkpoint itself.

        The whole one is that of ``verify``, trials included.
        """
        small = checkpoint is self.subjects.twin.checkpoint
        stage = f"proving on the {'twin' if small else 'checkpoint'}"
        causes = min(CAUSES, max(self.until.left, 1.0)) if small else 0.0
        try:
            table = parse_table(write(made), where="suggested")
        except PortingError as error:  # what was found cannot be written down: never a proof
            return Proof(report=None, refused=str(error))

        def tell(what: str, done: int, total: int) -> None:
            self.tell(f"{stage}, {what}", done, total)

        tell("loading", 0, 0)
        try:
            with bounded(self.until):
                return prove(
                    checkpoint,
                    self.into if small else uncut(self.into),
                    table,
                    self.subjects,
                    seed=self.seed,
                    fresh=fresh,
                    small=small,
                    causes=causes,
                    tell=tell,
                    whole=whole,
                )
        except OutOfTime:
            return Proof(report=None, refused="the limit was met before it had ended", late=True)


def _numbers(checkpoint: Checkpoint) -> int:
    """How many a checkpoint holds."""
    return sum(math.prod(info.shape) for info in checkpoint.tensors.values())


def _fits(
    checkpoint: Checkpoint, into: Builder, table: Table, subjects: ModelPair, *, fresh: bool
) -> tuple[Fault, ...]:
    """The faults of the table, checked against the checkpoint and a module of its size."""
    try:
        if isinstance(into, nn.Module):
            module: nn.Module = build_for(into, {}).module
        elif subjects.lazy:
            with bounded_size(bounds(checkpoint.tensors, checkpoint.config)):
                module = build_for(into, subjects.config).module
            module = subjects.readied(module)
        else:
            module = _built(table, checkpoint, into, subjects)
        floating = {info.dtype for info in checkpoint.tensors.values() if info.dtype.is_floating_point}
        built = {tensor.dtype for tensor in module.parameters() if not tensor.is_meta}
        cast = next(iter(built)) if len(built) == 1 and built != floating else None
        check(table, checkpoint, module, dtype=cast, fresh=fresh)
    except PortingError as error:
        return error.faults
    return ()


def _built(table: Table, checkpoint: Checkpoint, into: Builder, subjects: ModelPair) -> nn.Module:
    """The module to the checkpoint's size: without memory for its weights, or built as it is where that is small."""
    try:
        return build(
            maker(table, checkpoint, into, None, trust=False)[0], bounds(checkpoint.tensors, checkpoint.config)
        )
    except TargetError:
        if sum(info.nbytes for info in checkpoint.tensors.values()) > BUILT:
            raise
        with bounded_size(bounds(checkpoint.tensors, checkpoint.config)):
            return build_for(into, subjects.config).module


def _headed(made: TableDraft, judged: Judgement, architecture: str, *, lazy: bool) -> TableDraft:
    """The table with what is known of it at its head."""
    head = [
        f"{architecture} into {made.description.rpartition(' into ')[2]}: {judged.verdict}.",
        judged.sentence[:1].upper() + judged.sentence[1:],
    ]
    if lazy:
        head.append("The module has lazy parameters: run it once, and load into it then.")
    head += [f"- {one.said}" for one in judged.reasons]
    head += [f"- Not shown: {one}." for one in judged.limits]
    if judged.missing:
        head.append(f"The module has no {', '.join(judged.missing)}.")
    if any(line.proven and line.why != GUESS for line in made.lines):
        head.append("Lines with a comment were decided by what they compute; the others by where they stand.")
    approximate = None
    far = judged.difference or 0.0
    if judged.verdict is Verdict.APPROXIMATE and far > MEANING:
        within = 10.0 ** math.ceil(math.log10(far) + 0.5)  # the checkpoint's own weights may show it more
        approximate = (judged.reasons[0].said if judged.reasons else judged.sentence, within)
    lines = tuple(line for text in head if text for line in textwrap.wrap(text, 116))
    return replace(made, head=lines, approximate=approximate)
