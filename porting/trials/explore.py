"""All trials of a port, one after the other, and the scope that they give a verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType

import torch
from torch import Tensor, nn

from porting.errors import VerifyError
from porting.notation.table import Table
from porting.plan.matching import Matcher
from porting.tracing.code_coverage import Executed, exhausted, untaken
from porting.tracing.measure import error
from porting.tracing.running import Side
from porting.tracing.trace import Point, output_of, select
from porting.trials.battery import battery
from porting.trials.inputs import Case
from porting.trials.modalities import DECODER, DECODER_IDS, IDS, PIXELS, SIGNALS
from porting.trials.optional_arguments import PICTURE_AXES
from porting.trials.padding import MASK
from porting.trials.pairing import pair
from porting.trials.purity import Judge, impurities
from porting.trials.run import Differs, MakeSide, Working, is_empty, returned_only, run_trial, to_place
from porting.trials.scope import (
    OTHERWISE,
    Impurity,
    ImpurityKind,
    Kind,
    NotRun,
    Result,
    Returned,
    Scope,
    Status,
    of_kind,
)
from porting.trials.signals import PLACES, places_of, sizes_of_pictures
from porting.trials.token_rows import without
from porting.trials.trial import Model, Trial, field_number

PLACED = 3
"""The number of differing trials for which the place where they begin to differ is searched."""

PASSES = 8
"""The trials take so many times the tokens of the batches that every probe sees."""

OVERHEAD = 40
"""The fixed cost of a pass of a large model, in tokens: its weights are read."""

MANY = 20
"""Among so many batches the one with most arguments is looked for."""

STATES = 6
"""The number of shortest batches that are run, each one after each of the others."""

SMALL, LEAST = 30_000_000, 15_000
"""A model of fewer numbers is tried on so many tokens at least."""


@dataclass(frozen=True, kw_only=True)
class Explored:
    """The result of the trials.

    Attributes:
        cases: batches that differ, to be run again with all probes.
    """

    scope: Scope
    cases: tuple[Case, ...] = ()


@dataclass(kw_only=True)
class Explorer:
    """Runs the trials.

    Attributes:
        sizes: of indices, from the table's [sizes].
        reference, port: make the sides in float64.
        plain: makes the port in a fresh copy in its working dtype.
        working: both sides in that dtype, for each trial; None where the port runs in float64 anyway.
        differs: whether outputs that are so far apart in float64 on a batch, relative to scale, are other ones.
        plainly: neither side cast to less than float64 so far.
        overhead: what each batch costs beside its tokens, in tokens.
        otherwise: within it the reference runs in another implementation of its own attention; None where it has none.
        executed: which of the port's own instructions ran so far; those of trials with equal results are added.
        tell: called with how many trials are done, of how many.
    """

    table: Table
    sizes: Mapping[str, int]
    reference: MakeSide
    port: MakeSide
    plain: Callable[[Sequence[Case]], Side]
    dtype: torch.dtype
    differs: Differs
    plainly: bool
    seed: int
    working: Working | None = None
    overhead: int = 0
    otherwise: Callable[[], AbstractContextManager[object]] | None = None
    executed: Executed | None = None
    tell: Callable[[int, int], None] = field(default=lambda done, total: None)

    def explore(self, model: Model, cases: Sequence[Case], returned: Returned, module: nn.Module) -> Explored:
        """Run all trials.

        Args:
            cases: the batches that every probe sees.
            returned: how the outputs were paired.
        """
        table = returned_only(self.table)
        if not table.compared:
            return Explored(scope=Scope(returned=returned))
        numbers = sum(one.numel() for one in module.parameters())
        large = numbers >= SMALL
        spent = sum(places_of(case.inputs, model.config, signals=large) for case in cases)
        budget = max(PASSES * spent, 0 if large else LEAST)
        overhead = max(self.overhead, OVERHEAD if large else 0)
        trials = battery(model, seed=self.seed, tokens=budget, overhead=overhead, signals=large)
        table_only = replace(self, table=table, working=self._with_usual(cases, table))
        results = []
        open_, besides = self._open(module)
        for number, trial in enumerate(trials):
            self.tell(number, len(trials))
            seen = Executed(module, besides)
            with seen.watched() if open_ else nullcontext():
                result = table_only._tried(trial)
            results.append(result)
            if open_ and self._gained(seen, result, trial):
                open_, besides = self._open(module)
        results = _without_broadcast(model, trials, results)
        found = self._pure(model, trials, results, table)
        known = {one.detail for one in found if one.kind is ImpurityKind.WRITES_INPUTS}
        wrote = dict.fromkeys(name for one in results for name in one.written if name not in known)
        found += [Impurity(kind=ImpurityKind.WRITES_INPUTS, detail=name) for name in wrote]
        scope = _scope(model, cases, trials, results)
        scope = replace(
            scope,
            returned=returned,
            impurities=tuple(found),
            ways=("no_grad", "inference_mode", "gradients on", "called again"),
        )
        cases = to_place(results, trials, PLACED, lambda one: table_only._tried(one).status is Status.DIFFERS)
        return Explored(scope=scope, cases=tuple(cases))

    def _with_usual(self, cases: Sequence[Case], table: Table) -> Working | None:
        """The sides in the working dtype, told how far the port is off in it on the first batches."""
        if self.working is None:
            return None
        judge, side, usual = self._judge(cases, table), self.plain(cases), 0.0
        for number in range(len(cases)):
            with suppress(VerifyError), torch.no_grad():  # the probes of these batches tell what fails
                usual = max(usual, judge(number, side.outputs(number)))
        return replace(self.working, usual=usual)

    def _open(self, module: nn.Module) -> tuple[bool, Sequence[CodeType]]:
        """Whether code of the port has not run that some input may reach; and the code without any of that."""
        if self.executed is None:
            return False, ()
        open_ = untaken(self.executed, module)
        return bool(open_), exhausted(self.executed, open_)

    def _gained(self, seen: Executed, result: Result, trial: Trial) -> bool:
        """Whether code ran in a trial that had not run before; it counts where what it gives was compared."""
        compared = result.status is Status.SAME and not trial.past
        if self.executed is None or not compared or not self.executed.lacks(seen):
            return False
        self.executed.add(seen)
        return True

    def _tried(self, trial: Trial) -> Result:
        """One trial; where a query has no key, the reference's own implementations differ, and either is right."""
        run = partial(
            run_trial,
            trial,
            self.table,
            self.sizes,
            self.reference,
            self.port,
            self.differs,
            plainly=self.plainly,
            working=self.working,
        )
        result = run()
        if result.status is Status.DIFFERS and self.otherwise is not None and not trial.past:
            with self.otherwise():
                again = run()
            if again.status is Status.SAME:
                return replace(again, said=OTHERWISE)
        return result

    def _pure(self, model: Model, trials: Sequence[Trial], results: Sequence[Result], table: Table) -> list[Impurity]:
        """The ways in which the port is impure, on an unpadded batch and on padded ones that both sides take."""
        done = [(trial, one) for trial, one in zip(trials, results, strict=True) if not trial.past]
        taken = [trial.case for trial, one in done if one.status is Status.SAME]
        unpadded = [case for case in taken if bool((case.inputs.get(MASK, torch.ones(1)) != 0).all())]
        plain = unpadded[:1]
        padded = [
            trial.case
            for trial, one in zip(trials, results, strict=True)
            if one.status is Status.SAME and one.what in {"right padding", "left padding"}
        ]
        others = [case for case in taken if plain and case is not plain[0]][:1]
        if not plain:
            return []
        cases = [one for one in (plain[0], _reversed(plain[0]), *(padded or others)) if model.accepts(one)]
        lengths = [trial.case for trial, one in done if trial.kind is Kind.LENGTH and one.status is Status.SAME]
        short = lengths[:STATES] or cases[:1]
        varied = [*_varied(max(short, key=lambda case: _width(case.inputs)))]
        further: list[Case] = []
        plainer: list[Case] = []
        for case in taken:
            (plainer if model.further.values.keys().isdisjoint(case.inputs) else further).append(case)
        usual = max(unpadded[:MANY], key=lambda case: len(case.inputs))
        richest = [usual, *(case for case in further if any(case is one for one in unpadded))]
        whole = max(richest, key=lambda case: len(case.inputs))
        if lengths:  # else it takes rows of one length alone
            varied += _growing(usual)
        varied += [plain[0], _turned_round(plain[0])]  # the same rows in another order have the same sums
        varied.append(_with_another_last_row(plain[0]))  # what is kept of a batch may be found by its first row
        varied = [one for one in varied if model.accepts(one)]
        alone = {len(short) + number: partial(self.plain, [case]) for number, case in enumerate(varied)}
        turned = [case for case in plainer if model.accepts(_reversed(case))]
        largest = max(turned, key=lambda case: _tokens(case.inputs))
        longest = max(unpadded, key=lambda case: _width(case.inputs))
        pairs = [largest, _reversed(largest)]
        others = _of_each_shape(turned, known=[*short, largest])
        pairs += [case for one in (*short, *others) for case in (one, _with_other_tokens(one, longest))]
        optional = {*model.optional, *model.further.values}
        matcher = Matcher(((one.name, one) for one in table.fresh), table.target_prefix)
        return impurities(
            lambda: self.plain(cases),
            self.dtype,
            self._judge(cases, table),
            self.plain([*short, *varied]),
            alone,
            self.plain(pairs),
            lambda name: bool(matcher.read(name)),
            _after_arguments(whole, [name for name in whole.inputs if name in optional], model.further.values),
            self.plain,
        )

    def _judge(self, cases: Sequence[Case], table: Table) -> Judge:
        """Measures what the port returns against the reference in float64."""
        exact: list[tuple[Mapping[Point, Tensor], Mapping[str, Tensor]]] = []
        for case in cases:
            side = self.reference(case)
            exact.append((side.record(0), side.arguments[0]))
        names = {point for rule in table.compared for point in [str(rule.targets[0].key)]}

        def judge(case: int, output: object) -> float:
            theirs, given = exact[case]
            ours = {point: one for point in names if (one := select(output, output_of(point))) is not None}
            shapes = [{point: tuple(one.shape) for point, one in some.items()} for some in (theirs, ours)]
            try:
                pairing = pair(table, shapes[0], shapes[1], self.sizes)
            except VerifyError:
                return 0.0 if is_empty(ours) else torch.inf
            if pairing.other_shapes and not is_empty(ours):
                return torch.inf
            values = {point: ours[point].double() for point in pairing.pairs}
            return max(
                error(values[point], one.anchor(theirs, given, values[point])).largest
                for point, one in pairing.pairs.items()
            )

        return judge


def _without_broadcast(model: Model, trials: Sequence[Trial], results: Sequence[Result]) -> list[Result]:
    """The results; a picture of one patch does not count if the reference refuses every other number of patches.

    Its table of positions fits one patch as well, by broadcasting, and what comes of it is nothing of a picture.
    """
    own, patch = model.base.get(PIXELS), field_number(model.config, "patch_size", 0)
    if own is None or own.ndim < PICTURE_AXES or not patch:
        return [*results]

    def patches(picture: Tensor) -> int:
        return (picture.shape[-2] // patch) * (picture.shape[-1] // patch)

    counts = [patches(trial.case.inputs.get(PIXELS, own)) for trial in trials]
    plain = [model.further.values.keys().isdisjoint(trial.case.inputs) for trial in trials]
    given = zip(counts, results, plain, strict=True)
    others = [one.status for count, one, bare in given if bare and count not in {1, patches(own)}]
    if not others or any(status is not Status.REFERENCE_FAILED for status in others):
        return [*results]
    return [
        replace(one, status=Status.REFERENCE_FAILED, difference=None, said=REFUSED) if count == 1 and bare else one
        for count, one, bare in zip(counts, results, plain, strict=True)
    ]


REFUSED = "it refuses pictures of each other number of patches"
"""The reason why a size at which the reference runs all the same is not counted."""


MOST_SHAPES = 24
"""Shapes of batches of which an output is held while another one of that shape is run."""


def _of_each_shape(cases: Sequence[Case], known: Sequence[Case]) -> list[Case]:
    """Batches of different shapes, from the smallest to the largest."""
    found = {tuple(one.inputs[IDS].shape): one for one in reversed(cases) if IDS in one.inputs}
    left = [found[shape] for shape in sorted(found) if all(found[shape] is not one for one in known)]
    step = max(-(-len(left) // MOST_SHAPES), 1)
    return left[::step]


def _turned_round(case: Case) -> Case:
    """The rows of a batch in the reverse order."""
    rows = {name: one.flip(0) if one.ndim else one for name, one in case.inputs.items()}
    return Case(f"{case.name}, the last row first", rows)


def _with_another_last_row(case: Case) -> Case:
    """The batch with its last row backwards; of tokens, those of a decoder stay."""
    found = {
        name: one if not one.ndim or name.startswith(DECODER) else torch.cat([one[:-1], _flipped(one[-1:])])
        for name, one in case.inputs.items()
    }
    return Case(f"{case.name}, another last row", found)


def _reversed(case: Case) -> Case:
    """A batch of the same shapes with other contents: its rows, and the tokens in them, in the reverse order."""
    return Case(f"{case.name}, reversed", {name: _flipped(one) for name, one in case.inputs.items()})


def _flipped(value: Tensor) -> Tensor:
    """The rows and tokens backwards, and the pixels of pictures; not the four numbers of a box."""
    axes = value.ndim if value.is_floating_point() else min(value.ndim, 2)
    return value.flip(*range(axes)) if axes else value


def _with_other_tokens(case: Case, longest: Case) -> Case:
    """A batch of the same shapes with the last tokens of another one: also a row of one token has another then."""
    ids = longest.inputs.get(IDS)
    rows, width = case.inputs[IDS].shape if IDS in case.inputs and case.inputs[IDS].ndim == 2 else (0, 0)
    if ids is None or ids.ndim != 2 or ids.shape[1] < width or not rows:
        return _reversed(case)
    other = ids[:1, -width:].flip(1).expand(rows, -1).clone()
    return Case(f"{case.name}, other tokens", {**case.inputs, IDS: other})


def _width(inputs: Mapping[str, Tensor]) -> int:
    return max((value.shape[-1] for name, value in inputs.items() if name.endswith(IDS) and value.ndim), default=0)


def _varied(case: Case) -> Iterator[Case]:
    """The batch with the same token ids and another value of each other argument, as a cache by token ids misses it."""
    for name, one in case.inputs.items():
        if name.endswith(IDS) or one.is_floating_point() or one.ndim < 2 or one.shape[-1] < 2:
            continue
        other = one.clone()
        if name.endswith(MASK):
            other[..., -1] = 0
        else:
            other = one.flip(1)
        yield Case(f"{case.name}, another {name}", {**case.inputs, name: other})


def _after_arguments(
    case: Case, optional: Sequence[str], values: Mapping[str, Mapping[str, Tensor]]
) -> list[list[tuple[Case, Case]]]:
    """A batch with an optional argument and one without it, and so with all of these arguments; then the other order.

    The other order begins without any of them: a port may decide in its first call what it does in all calls.

    Args:
        values: of arguments for which not every value is legal: those that were tried.
    """
    names = [name for name in optional if name != IDS and case.inputs[name].ndim]
    pairs: list[tuple[Case, Case]] = []
    for some in dict.fromkeys([*((name,) for name in names), tuple(names)] if names else []):
        what = " and ".join(some)
        changed = {
            name: [*values[name].values()][-1] if name in values else _hiding(name, case.inputs[name])
            for name in some
            if not name.endswith(IDS)
        }
        having = Case(f"{case.name}, another {what}", {**case.inputs, **changed})
        lacking = Case(f"{case.name}, without {what}", without(some, case.inputs))
        pairs.append((having, lacking))
    return [pairs, [(lacking, having) for having, lacking in reversed(pairs)]] if pairs else []


def _hiding(name: str, value: Tensor) -> Tensor:
    """Another value of an argument: of a mask one that hides every second place, else the same in another order."""
    if not name.endswith("mask"):
        return _flipped(value)
    other = value.clone()
    other[..., ::2] = 0
    return other if other.any() else value


def _growing(case: Case) -> Iterator[Case]:
    """The front half of the rows, then all of them, as generation calls a model.

    And so with each other argument changed where the rows begin: what was kept of a call says nothing of the next then.
    """
    widths = {one.shape[-1] for name, one in case.inputs.items() if name.endswith(IDS) and one.ndim == 2}
    if len(widths) != 1 or (half := next(iter(widths)) // 2) < 2:
        return
    rows = {name: one for name, one in case.inputs.items() if one.ndim > 1 and name not in SIGNALS}
    long = {name: one for name, one in rows.items() if one.shape[1] in widths}
    cut = {name: one[:, :half].clone() for name, one in long.items()}
    yield Case(f"{case.name}, the front half", {**case.inputs, **cut})
    yield case
    for name, one in long.items():
        if not name.endswith(IDS) and not one.is_floating_point():
            other = one.clone()
            other[:, 0] = 0 if name.endswith(MASK) else one[:, 1]
            yield Case(f"{case.name}, begun with another {name}", {**case.inputs, name: other})


def _tokens(inputs: Mapping[str, Tensor]) -> int:
    return max((one.numel() for one in inputs.values() if not one.is_floating_point()), default=0)


def _scope(model: Model, cases: Sequence[Case], trials: Sequence[Trial], results: Sequence[Result]) -> Scope:
    """The scope: the trials with equal results, and those that were not run."""
    same = [(trial, one) for trial, one in zip(trials, results, strict=True) if one.status is Status.SAME]
    ran = [*(case.inputs for case in cases), *(trial.case.inputs for trial, _ in same if not trial.past)]
    name = IDS if any(IDS in inputs for inputs in ran) else DECODER_IDS
    ids = [inputs[name] for inputs in ran if name in inputs and not inputs[name].is_floating_point()]
    seen = {token for one in ids for token in one.flatten().tolist()}
    size = model.config.get("vocab_size")
    failed = [one for one in results if one.status is Status.PORT_FAILED]
    not_run = [NotRun(what=one.what, why=f"your model fails: {one.said}") for one in failed]
    if model.right_padded:
        why = "your model takes the lengths of rows, which cannot say so"
        not_run.append(NotRun(what="padding elsewhere than at the end of rows", why=why))
    past = [one for trial, one in zip(trials, results, strict=True) if trial.past]
    not_run += [
        NotRun(what=one.what, why="the reference refuses it, and your model computes something")
        for one in past
        if one.status is Status.REFERENCE_FAILED
    ]
    shapes = sorted({(one.shape[:-1].numel(), int(one.shape[-1])) for one in ids})
    return Scope(
        lengths=tuple(sorted({length for _, length in shapes})),
        rows=tuple(sorted({rows for rows, _ in shapes} or {len(next(iter(one.values()))) for one in ran})),
        shapes=tuple(shapes),
        pictures=tuple(sorted(sizes_of_pictures(ran), key=lambda size: (size[0] * size[1], size))),
        places=tuple(sorted({one[name].shape[axis] for one in ran for name, axis in PLACES.items() if name in one})),
        masks=of_kind(results, Kind.MASK),
        segments=of_kind(results, Kind.SEGMENTS),
        positions=of_kind(results, Kind.POSITIONS),
        arguments=of_kind(results, Kind.ARGUMENTS),
        values=of_kind(results, Kind.VALUES),
        tokens=(len(seen), size if isinstance(size, int) else 0),
        not_run=tuple(not_run),
        lacking=model.further.lacking,
        results=tuple(results),
    )
