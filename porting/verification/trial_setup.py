"""The trials of one verification: what they need of its two sides, its table and its batches."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import islice, zip_longest

import torch
from torch import Tensor, nn

from porting.errors import VerifyError
from porting.notation.rule import MASK_KINDS
from porting.notation.table import Table
from porting.tracing.conditions import constants_of
from porting.tracing.measure import LEAKED, MEANING
from porting.tracing.running import Clock, Side
from porting.tracing.trace import ARROW, is_inner, is_returned
from porting.trials.battery import battery
from porting.trials.derived_inputs import LENGTHS, source_of
from porting.trials.derived_inputs import NAMES as DERIVED
from porting.trials.explore import SMALL, Explored, Explorer
from porting.trials.inputs import Case, integers
from porting.trials.modalities import (
    DECODER,
    EMBEDDED,
    IDS,
    POSITIONS,
    SEGMENTS,
    embedding_width,
    parameters_of,
    special_places,
)
from porting.trials.optional_arguments import Found, optional_arguments
from porting.trials.padding import MASK
from porting.trials.run import MakeSide, Working, returned_only
from porting.trials.scope import Kind, Returned, Scope
from porting.trials.signals import first_rows
from porting.trials.trial import Model
from porting.verification.batch_search import omittable
from porting.verification.batches import POSITIONS as LIMIT
from porting.verification.batches import Batches
from porting.verification.compare import END, Comparison
from porting.verification.functions import has_parts
from porting.verification.references import LiveReference, port_points, port_side
from porting.verification.rounding_propagation import rounded_alike, rounding_apart
from porting.verification.subject import cast

COMPILED = 200
"""The fixed cost, in tokens, of a batch for a function that may be compiled again for each shape."""

GROWN = 16.0
"""How much larger than on the first batches the rounding error on other batches may be."""

ROUNDED = 1e-9
"""A difference of outputs in float64 that is larger than this is none of rounding, unless a side computes with less."""

MEASURED = 4
"""On so many batches at most it is measured what roundings that are not alike come to."""

DECIDED = torch.finfo(torch.float32).eps ** 0.5
"""Rounding that moves outputs by more has changed a decision, and does not explain a difference."""


def explore(
    theirs: LiveReference,
    module: nn.Module,
    table: Table,
    batch: Batches,
    returned: Returned,
    port: Side,
    cases: Sequence[Case],
    *,
    comparison: Comparison,
    seed: int,
    clock: Clock,
    given: bool = False,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
) -> Explored:
    """Run the trials, unless what is returned differs on the first batches already.

    Args:
        module: the port as its owner has it.
        returned: how the outputs were paired.
        port: in float64.
        clock: called for every pass.
        given: the batches are somebody's own.
        dtypes: the working dtypes; in float32 each batch is run too if it is one of them.
    """
    if math.isinf(_tolerance(comparison)):
        return Explored(scope=Scope(returned=returned))
    whole = has_parts(theirs)
    double = cast(theirs.module, torch.float64, like=port.module) if whole else theirs.module
    terms = [term for rule in returned_only(table).compared for term in rule.sources]
    wanted = theirs.points(terms, table.prefix)
    mine = [point for point in port_points(port.module, table) if _root(point)]

    def reference(case: Case) -> Side:
        if not whole:
            return theirs.side(torch.float64, terms, table.prefix, [case], clock)
        return theirs.as_it_is([case], theirs.as_loaded(double), torch.float64, wanted=wanted, clock=clock)

    def ours(case: Case) -> Side:
        side = port_side(port.module, torch.float64, table, [theirs.taken(case)], clock, wanted=mine)
        comparison.tried.update(side.arguments[0])
        if comparison.conditions is not None and comparison.conditions.open:
            side.conditions = comparison.conditions
        return side

    @cache
    def singles() -> tuple[nn.Module, nn.Module | None]:
        return cast(module, torch.float32), cast(theirs.module, torch.float32, like=port.module) if whole else None

    def working(case: Case) -> Side:
        return port_side(singles()[0], torch.float32, table, [theirs.taken(case)], clock, wanted=mine)

    def rounded(case: Case) -> Side:
        if (single := singles()[1]) is None:
            return theirs.side(torch.float32, terms, table.prefix, [case], clock)
        return theirs.as_it_is([case], theirs.as_loaded(single), torch.float32, wanted=wanted, clock=clock)

    def plain(several: Sequence[Case]) -> Side:
        side = port_side(
            cast(module, torch.float32), torch.float32, table, [theirs.taken(case) for case in several], clock
        )
        return side if comparison.reference_draws else replace(side, seed=None)

    explorer = Explorer(
        table=table,
        sizes=comparison.sizes,
        reference=reference,
        port=ours,
        plain=plain,
        working=Working(port=working, reference=rounded, dtype=torch.float32) if torch.float32 in dtypes else None,
        dtype=torch.float32,
        differs=_Differs(comparison, reference, ours),
        plainly=not comparison.lifted and not comparison.lowers,
        seed=seed,
        overhead=0 if whole else COMPILED,
        executed=comparison.executed,
        otherwise=partial(_with_sdpa, double) if _has_sdpa(double) else None,
    )
    numbers = comparison.conditions.numbers if comparison.conditions is not None else ()
    model = _model(theirs, module, table, batch, cases)
    places = special_places(batch.fields)
    sizes = integers(batch.fields)
    own = [one for one in constants_of(module) if one not in sizes]
    likely = [one for one in (*numbers, *model.special, *sorted(own, reverse=True)) if one not in places]
    full = _refuses_shorter(cases, ours)
    if not given:
        model = replace(model, further=_further(theirs, module, table, reference, model))
    model = replace(model, given=given, numbers=numbers, likely=likely, never=places, full=full)
    return explorer.explore(model, cases, returned, module)


CONFIRMING, CONFIRMING_LARGE = 12, 3
"""How many batches of other kinds a cause is confirmed on; and of a model of more than 30 million parameters."""

CONFIRMING_TOKENS = 6000
"""How many tokens these have at most, of all that are made."""


def confirming(
    theirs: LiveReference, module: nn.Module, table: Table, batch: Batches, cases: Sequence[Case], seed: int
) -> list[Case]:
    """Batches of as many kinds as there are, to confirm a cause: other masks, segments, positions, rows, embeddings.

    The smallest comes first: most causes that are wrong show so in any of them.

    Args:
        cases: the batches that every probe sees.
    """
    model = _model(theirs, module, table, batch, cases)
    if not cases or batch.more is None:
        return []
    large = sum(one.numel() for one in module.parameters()) > SMALL
    trials = [one for one in battery(model, seed=seed + 1, tokens=CONFIRMING_TOKENS) if not one.past]
    generator = torch.Generator().manual_seed(seed)
    kinds: dict[tuple[Kind, bool], list[Case]] = {}
    for number in torch.randperm(len(trials), generator=generator).tolist():
        trial = trials[number]
        kinds.setdefault((trial.kind, EMBEDDED in trial.case.inputs), []).append(trial.case)
    in_turn = (case for round_ in zip_longest(*kinds.values()) for case in round_ if case is not None)
    chosen = [theirs.taken(case) for case in islice(in_turn, CONFIRMING_LARGE if large else CONFIRMING)]
    return sorted(chosen, key=lambda case: sum(one.numel() for one in case.inputs.values()))


def _further(theirs: LiveReference, module: nn.Module, table: Table, reference: MakeSide, model: Model) -> Found:
    """The optional arguments that no batch has so far and that matter to the reference."""
    named = {source_of(str(rule.sources[0].key)): str(rule.targets[0].key) for rule in table.inputs}
    ours = parameters_of(module)

    def taken(name: str) -> bool:
        target = named.get(name, "" if named else name).partition(ARROW)[0]
        return ours.get(target) is False

    base = first_rows(model.base)
    return optional_arguments(theirs.module, lambda case: reference(case).outputs(0), taken, base, model.config)


def _refuses_shorter(cases: Sequence[Case], port: Callable[[Case], Side]) -> bool:
    """Whether all rows have one length, and the port fails on rows that are shorter by a token."""
    first = cases[0].inputs
    widths = {one.inputs[IDS].shape[-1] for one in cases if IDS in one.inputs}
    if len(widths) != 1 or IDS not in first or (width := widths.pop()) < 2:
        return False
    cut = {name: one[..., :-1] if one.ndim > 1 and one.shape[-1] == width else one for name, one in first.items()}
    try:
        port(Case("a token less", cut)).outputs(0)
    except VerifyError:
        return True
    return False


def _has_sdpa(module: nn.Module) -> bool:
    """Whether a model of transformers runs in fused attention: not where its probabilities are compared."""
    shows = getattr(getattr(module, "config", None), "output_attentions", False)
    return bool(getattr(module, "_supports_sdpa", False)) and not shows


@contextmanager
def _with_sdpa(module: nn.Module) -> Iterator[None]:
    """Within it a model of transformers runs in torch's fused attention, which is what its users get."""
    turn = getattr(module, "set_attn_implementation", None)
    if turn is None:
        yield
        return
    turn("sdpa")
    try:
        yield
    finally:
        turn("eager")


class _Differs:
    """Whether an output of a trial that is so far off, relative to scale, is another one than the reference's.

    Attributes:
        apart: how far outputs are moved by roundings that are not the same on the two sides; 0 before it was measured.
    """

    def __init__(self, comparison: Comparison, reference: MakeSide, port: MakeSide) -> None:
        self._comparison, self._reference, self._port = comparison, reference, port
        self._alike: tuple[Case, bool] | None = None
        self._measured = 0
        self.apart = 0.0

    def __call__(self, far: float, case: Case) -> bool:
        if far <= _tolerance(self._comparison):
            return False
        self._comparison.measure_if_needed(differs=True)  # it may be larger then
        if far <= _tolerance(self._comparison):
            return False
        if not self._comparison.rounded_alike or far > DECIDED:
            return True
        try:
            if self._rounded_alike(case):
                return True
            if far > LEAKED * self.apart and self._measured < MEASURED:
                self.apart = max(self.apart, rounding_apart(self._reference(case), self._port(case)))
                self._measured += 1
        except VerifyError:  # one of them takes no single row, say: then nothing is known of its roundings
            return True
        return far > LEAKED * self.apart

    def _rounded_alike(self, case: Case) -> bool:
        """Whether the two sides have the same rounded numbers here too, as they have on the first batches.

        A port that counts positions from the first token has the angles of the reference in rows without padding in
        front only, and the same ones at other places in a batch of both kinds of rows.
        """
        if self._alike is None or self._alike[0] is not case:
            alike = all(rounded_alike(self._reference(row), self._port(row)) for row in _rows(case))
            self._alike = (case, alike)
        return self._alike[1]


def _rows(case: Case) -> Iterator[Case]:
    """Each row of a batch by itself."""
    count = max((len(one) for one in case.inputs.values() if one.ndim), default=0)
    for row in range(count):
        inputs = {
            name: one[row : row + 1] if one.ndim and len(one) == count else one for name, one in case.inputs.items()
        }
        yield Case(f"{case.name}, row {row + 1}", inputs)


def _tolerance(comparison: Comparison) -> float:
    """The tolerance for outputs on other batches; infinite where they differ already."""
    far = max((one for point, one in comparison.differences(END).items() if _root(point)), default=0.0)
    leaks = comparison.leaks[END] if comparison.leaks is not None else {}
    leak = LEAKED * max((one for point, one in leaks.items() if _root(point)), default=0.0)
    if far > max(ROUNDED, leak):
        return math.inf
    return max(MEANING, GROWN * far, GROWN * leak if leak <= DECIDED else 0.0)


def _root(point: str) -> bool:
    """Whether a point is what the model returns."""
    return is_returned(point) and not is_inner(point)


def _model(theirs: LiveReference, module: nn.Module, table: Table, batch: Batches, cases: Sequence[Case]) -> Model:
    """The facts about the model's inputs."""
    base: Mapping[str, Tensor] = theirs.taken(cases[0]).inputs
    given = {str(rule.sources[0].key): rule.targets[0].output for rule in table.inputs}
    derived = {source_of(name): MASK_KINDS[0] for name in given if name in DERIVED}  # of any kind of mask
    named = {**given, **derived}
    limit = batch.fields.get(LIMIT)
    given_ids = (one for case in cases for one in case.inputs.values() if one.ndim and not one.is_floating_point())
    widths = [one.shape[-1] for one in given_ids]
    taken = inspect.signature(theirs.module.forward).parameters
    ours = inspect.signature(module.forward).parameters
    both = {name for name in taken if name in (named or ours)}
    replaceable = all(IDS in some and some[IDS].default is None for some in (taken, ours))
    return Model(
        config=batch.fields,
        base=base,
        longest=batch.longest or max(widths, default=0),
        limit=limit if isinstance(limit, int) else None,
        optional=tuple(omittable(table.inputs, base, theirs.module, module)),
        positions=POSITIONS in both,
        segments=SEGMENTS in both,
        embedded=_embedding_width(theirs.module, batch.fields) if EMBEDDED in both and replaceable else 0,
        internal=MASK in base and bool(named) and MASK not in named,
        special=batch.special,
        mask_kinds=named.get(MASK, "") not in MASK_KINDS,
        right_padded=[source_of(name) for name in given if name.removeprefix(DECODER) == LENGTHS],
    )


def _embedding_width(reference: nn.Module, fields: Mapping[str, object]) -> int:
    """The width of the embeddings that a reference takes: of its own table, else what the config says."""
    table = getattr(reference, "get_input_embeddings", lambda: None)()
    width = getattr(table, "embedding_dim", None)
    return width if isinstance(width, int) else embedding_width(fields)
