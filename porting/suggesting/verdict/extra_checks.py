"""Checks besides the proof: the trials that ``verify`` runs as well, float32, other calls, and a twin with more layers.

A module can be right on the batches of a proof and wrong on others: on rows of one token, on rows that are padded in
front, once it was called before, in float32, in its third layer where the twin has two.  What differs takes the proof
away, and what could not be tried is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from porting.checkpoint import Checkpoint
from porting.duplicate import duplicate
from porting.errors import PortingError
from porting.notation.table import Table
from porting.reporting.outcome import IMPRECISE
from porting.reporting.report import Report
from porting.suggesting.draft.layer_patterns import indexed
from porting.suggesting.search.search_result import CLOSE
from porting.suggesting.subjects.building import Builder, build_for
from porting.suggesting.subjects.config_fields import Role, config_number
from porting.suggesting.subjects.forward_effects import outputs_of
from porting.suggesting.subjects.model_pair import ModelPair, completed_config
from porting.suggesting.subjects.operation_trace import numbers_of
from porting.suggesting.subjects.sampler import LENGTH, row_length
from porting.suggesting.subjects.twin import DEEP, SMALL, draw_parameters, make_twin
from porting.suggesting.verdict.proof import Proof, cases, longest_row, probed, prove
from porting.suggesting.verdict.reasons import met
from porting.suggesting.verdict.suggestion import Reason
from porting.target import named_tensors
from porting.tracing.float64 import forced_float64
from porting.tracing.trace import ROOT
from porting.trials.inputs import Case
from porting.trials.modalities import text_fields
from porting.trials.scope import Kind, Result, Scope

SINGLE, LESS = 1e-3, 0.1
"""In float32 a module is no further than this from itself in float64, and no further than that where it asks for less
than float32: what differs by more is no rounding."""


def in_float32(into: Builder, subjects: ModelPair) -> Iterator[Reason | str]:
    """The differences of a module in float32 from itself in float64 that are larger than rounding.

    Where it asks for less than float32 by itself, which the proof in float64 takes out, that is a limit, in words.
    """
    module, inputs = subjects.built.module, _batch(subjects)
    single = _in_float32(into, subjects, inputs)
    exact, asked = _in_float64(module, subjects.way.given(inputs))
    far = 0.0 if single is None else _apart(exact, single)
    if far > (LESS if asked else SINGLE):
        said = "another one of it, built and loaded in float32, computes something else than in float64"
        yield Reason(kind="precision", said=f"{said}: off by {far:.0e}")
    if asked and far > SINGLE:
        yield f"what it rounds to less than float32 by itself, at {asked[0]}: off by {far:.0e} in float32"


def _batch(subjects: ModelPair) -> dict[str, Tensor]:
    taken = [name for name in subjects.available if name in subjects.way.named]
    return subjects.twin.sampler.batch(taken, seed=1, ended=True)


def outputs_of_other_weights(subjects: ModelPair, seed: int) -> list[Tensor]:
    """The module's outputs, in float64, with newly drawn weights; empty where it does not run."""
    module = duplicate(subjects.built.module)
    draw_parameters(module, seed, buffers=False)
    try:
        return outputs_of(module, subjects.way, _batch(subjects))
    except Exception:  # noqa: BLE001  # the user's own forward may raise anything
        return []


def _in_float32(into: Builder, subjects: ModelPair, inputs: Mapping[str, Tensor]) -> list[Tensor] | None:
    """The outputs of another module of the same builder with the same weights in float32; None if it cannot run so."""
    values = dict(named_tensors(subjects.built.module))
    try:
        config = completed_config(subjects.twin.config, subjects.twin.architecture)
        other = subjects.readied(build_for(into, config).module).float()
        with torch.no_grad():
            for name, tensor in named_tensors(other):
                tensor.copy_(values[name])
            return [one.double() for one in numbers_of(other(**subjects.way.given(inputs, torch.float32)))]
    except (PortingError, RuntimeError, KeyError):
        return None


def _in_float64(module: nn.Module, given: Mapping[str, Tensor]) -> tuple[list[Tensor], list[str]]:
    """The numbers of one call, and the parts that ask for less than float64 whatever their weights are."""
    with torch.no_grad(), forced_float64(module) as asked:
        return [one.detach().clone() for one in numbers_of(module(**given))], list(asked)


def _apart(some: list[Tensor], others: list[Tensor]) -> float:
    """The largest difference, relative to scale; infinite where there are other tensors."""
    if [one.shape for one in some] != [one.shape for one in others]:
        return math.inf
    far = 0.0
    for one, other in zip(some, others, strict=True):
        if one.numel() and not torch.equal(one.nan_to_num(), other.nan_to_num()):
            far = max(far, float((one - other).abs().max() / one.abs().max().clamp_min(1e-30)))
    return math.inf if math.isnan(far) else far


@dataclass(frozen=True, kw_only=True)
class ExtraChecks:
    """The results of the checks after the proof.

    Attributes:
        reasons: where the module differs.
        limits: what was not tried, and what a user should know of calls that the table does not make.
        proof: on the other batches; None where none were run.
        usually_same: the module is right where rows are padded at their ends, or not at all, wherever that was tried.
    """

    reasons: tuple[Reason, ...] = ()
    limits: tuple[str, ...] = ()
    proof: Proof | None = None
    usually_same: bool = False

    @property
    def worst(self) -> float | None:
        """The largest difference of an output on the batches behind the proof; None where none differed."""
        return max((one.size for one in self.reasons if one.size is not None and one.kind in set(Kind)), default=None)


def untried_checks(own: Proof | None) -> ExtraChecks:
    """The checks when there was no time: what was tried on the checkpoint itself, or a note that nothing was."""
    if own is None or own.report is None or not own.whole:
        return ExtraChecks(reasons=(met("other rows, masks and calls were tried"),))
    scopes = [own.report.scope]
    reasons = (*_impure(scopes), *_differing(scopes), *_compared([own.report]))
    limits = ("rows, masks and calls at other sizes: the limit was met",)
    return ExtraChecks(reasons=reasons, limits=limits, proof=own, usually_same=own.usually_same)


def run_extra_checks(
    into: Builder,
    table: Table,
    subjects: ModelPair,
    *,
    seed: int,
    fresh: bool,
    deep: Table | None,
    own: Proof | None = None,
) -> ExtraChecks:
    """Try what the proof did not.

    Args:
        into: the user's module or builder.
        table: the suggested one, proven on the twin.
        subjects: how they were run; the module holds what was found.
        fresh: some of the module's parameters have no source.
        deep: where nothing of the checkpoint's own size is run: the table for its depth, of which a twin is.
        own: the proof on the checkpoint itself, with its trials where it is ``verify``'s.
    """
    twin = subjects.twin.checkpoint

    def proven(batches: Sequence[Case] | None, of: Checkpoint, *, trials: bool = False) -> Proof:
        suited = table if of is twin or deep is None else deep
        return prove(of, into, suited, subjects, seed=seed, fresh=fresh, small=True, batches=batches, trials=trials)

    wide = None if _covers(own, subjects.config) else proven(None, twin, trials=True)
    reports = [one.report for one in (own, wide) if one is not None and one.report is not None]
    scopes = [one.scope for one in reports if one.scope.results] or [Scope()]
    single = [*in_float32(into, subjects)]
    reasons = [*_impure(scopes), *_differing(scopes), *_compared(reports)]
    reasons += [one for one in single if isinstance(one, Reason)]
    limits = [*(one for one in single if isinstance(one, str)), *_not_run(scopes[0])]
    if deep is not None and subjects.twin.shrunk:
        tall, depth = _deep(subjects, proven, seed)
        if tall is not None and tall.report is not None and not tall.exact:
            refused, size = tall.refused.partition("\n")[0], tall.difference
            far = refused if size is None else f"off by {size:.0e} of the activations' scale"
            said = f"the proof holds on 2 layers and does not on {depth}, of another width: {far}"
            reasons.append(Reason(kind="depth", said=said))
        elif tall is None or tall.report is None:
            limits.append("more layers than two: the module could not be built with them at another small size")
    usual = any(one is not None and one.usually_same for one in (own, wide))
    return ExtraChecks(reasons=tuple(reasons), limits=tuple(limits), proof=wide, usually_same=usual)


def _covers(own: Proof | None, config: Mapping[str, object]) -> bool:
    """Whether the trials ran on the checkpoint itself and agree, in rows longer than each distance of its config.

    The twin's shorter windows, and its numbers, show nothing else then.
    """
    if own is None or own.report is None or not (own.whole and own.exact):
        return False
    longest = max(own.report.scope.lengths, default=0)
    fields = text_fields(config)
    return all(config_number(fields, role) < longest for role in (Role.WINDOW, Role.DISTANCE))


def _differing(scopes: Sequence[Scope]) -> Iterator[Reason]:
    """The properties of batches on which the output differs; no weights can repair a mask."""
    told: set[Kind] = set()
    for scope in scopes:
        kinds: dict[Kind, list[Result]] = {}
        for one in scope.differing:
            kinds.setdefault(one.kind, []).append(one)
        for kind, results in kinds.items():
            if kind not in told:
                yield _differs(kind, results)
        told |= set(kinds)


def _differs(kind: Kind, results: Sequence[Result]) -> Reason:
    whats = list(dict.fromkeys(one.what for one in results))
    more = f" and {len(whats) - MOST_NAMED} more" if len(whats) > MOST_NAMED else ""
    worst = max((one.difference or 0.0 for one in results), default=0.0)
    far = f"off by {worst:.0e} of its scale" if math.isfinite(worst) else "it has NaN, infinity or another shape there"
    said = f"the output differs on {', '.join(whats[:MOST_NAMED])}{more}: {far}"
    return Reason(kind=str(kind), said=said, size=worst, shown=kind is Kind.MASK and worst > CLOSE)


def _impure(scopes: Sequence[Scope]) -> Iterator[Reason]:
    for one in {(one.kind, one.detail): one for scope in scopes for one in scope.impure}.values():
        detail = f": {one.detail}" if one.detail else ""
        size = f", off by {one.size:.0e}" if one.size else ""
        yield Reason(kind="state", said=f"the module {one.kind}{detail}{size}")


def _compared(reports: Sequence[Report]) -> Iterator[Reason]:
    """Other reasons why ``verify`` does not say faithful: larger rounding errors."""
    for report in reports:
        if report.verdict == IMPRECISE:
            probes = [one for one in report.probes if one.imprecise or one.drifts]
            where = "what is returned" if probes[0].port == ROOT else probes[0].port
            said = f"its rounding errors in float32 are larger than the reference's, first at {where}"
            yield Reason(kind="rounding", said=said, size=report.noise.get("float32", 0.0))
            return


def _not_run(scope: Scope) -> Iterator[str]:
    for one in scope.not_run[:MOST_NAMED]:
        yield f"{one.what} ({one.why})"
    returned = scope.returned
    if returned is not None and not returned.compared:
        yield "what the module returns: nothing of the reference's equals it"


MOST_NAMED = 3
"""The most batches that are named; the rest is counted."""


def _deep(
    subjects: ModelPair, proven: Callable[[Sequence[Case], Checkpoint], Proof], seed: int
) -> tuple[Proof | None, int]:
    """The proof on a twin with as many layers as the checkpoint, more heads and other sizes; and how many layers."""
    kind = subjects.twin.architecture
    with TemporaryDirectory(prefix="porting-deep-") as folder:
        words = config_number(subjects.twin.config, Role.VOCABULARY)
        sizes = DEEP if words == SMALL.vocabulary else replace(DEEP, vocabulary=words)  # the module's own
        if subjects.full:
            sizes = replace(sizes, positions=config_number(subjects.twin.config, Role.POSITIONS, subjects.longest))
        try:
            stored = frozenset(subjects.twin.tensors)
            other = make_twin(subjects.config, kind, Path(folder), small=True, seed=seed + 1, to=sizes, stored=stored)
        except PortingError:
            return None, 0
        spare = config_number(subjects.twin.config, Role.POSITIONS, subjects.longest) - subjects.longest
        longest = max(config_number(other.config, Role.POSITIONS, subjects.longest) - max(spare, 0), 1)
        batches = cases(subjects, other.config, seed=seed, longest=longest)
        return proven(batches, other.checkpoint), config_number(other.config, Role.DEPTH)


MANY = 3
"""The most names or lines of code that are listed; the rest is counted."""


def unshown(subjects: ModelPair, proof: Proof, own: Proof | None, behind: ExtraChecks) -> Iterator[str]:
    """Describe what was not tried.

    Args:
        subjects: how the models were run.
        own: on the checkpoint itself; None where that was not run.
        behind: what was tried besides.
    """
    reports = [one.report for one in (proof, behind.proof, own) if one is not None and one.report is not None]
    if subjects.twin.shrunk and own is None:
        yield "the checkpoint's own sizes, which are too large to be run here: sizes are the twin's"
    elif subjects.few_layers and own is None:
        depth = config_number(subjects.twin.config, Role.DEPTH)
        yield f"more than {depth} of the module's layers together: with all of them it is too large to be run here"
    longest, most = subjects.longest, config_number(subjects.config, Role.POSITIONS)
    if subjects.full:
        only = longest_row(subjects, subjects.config, small=False) if row_length() != LENGTH else most
        yield f"rows of any other length than {only}, which the module refuses"
    elif 0 < longest < most:
        yield f"rows of more than {longest} tokens (the checkpoint takes {most})"
    if reports and ROOT not in probed(reports[0]):
        yield "what is returned, but for one batch: no rule says how it comes from what the reference returns"
    if subjects.way.causal:
        name = subjects.way.causal
        yield f"calls without a causal mask as {name!r}: the module hides later tokens only where this mask does"
    yield from behind.limits
    whats = [{one.what for one in report.unseen} for report in reports]
    if own is not None and own.whole:  # verify's own batches: what these did not show, verify reports as well
        whats = []
    for one in reports[-1].unseen if reports else ():
        if all(one.what in some for some in whats) and not one.what.startswith("position"):
            yield str(one)
    unread = [
        name
        for name in (reports[0].shown.copy if reports else ())
        if all(name not in report.shown.activation for report in reports)
    ]
    if unread:
        listed = [name for (name,) in indexed([(name,) for name in unread])]
        yield f"what {_some(listed)} would do at work: nothing that is compared depends on it"
    branches = [
        branch
        for branch in (reports[0].not_taken if reports else ())
        if all((branch.where, branch.condition) in _untaken(report) for report in reports)
    ]
    if branches:
        yield f"code that no batch led to: {_some([f'{one.condition} ({one.where})' for one in branches])}"


def _untaken(report: Report) -> set[tuple[str, str]]:
    return {(one.where, one.condition) for one in report.not_taken}


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MANY} more" if len(names) > MANY else ""
    return ", ".join(names[:MANY]) + more
