"""The trials: batches of every kind that a model's arguments allow, made from one batch, the config and a seed.

They are varied one property at a time: lengths (also around every number that the config holds), rows in a batch,
masks, segments, positions, token ids, and which optional arguments are given; then some properties in pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest

from torch import Tensor

from porting.trials.inputs import Case, lengthened
from porting.trials.modalities import IDS
from porting.trials.scope import Kind
from porting.trials.signals import SignalRows, first_rows, places_of
from porting.trials.token_rows import TokenRows
from porting.trials.trial import Model, Trial, field_number


def battery(model: Model, *, seed: int, tokens: int, overhead: int = 0, signals: bool = False) -> list[Trial]:
    """The trials for a model.

    Args:
        tokens: they hold no more than this many tokens in all; where that is too little, each kind has some.
        signals: patches of pictures and frames of sounds count as tokens, as for a large model they cost as much.
        overhead: a batch counts for so many tokens more than it holds: what reading the weights costs.
    """
    ids = model.base.get(IDS)
    others = [name for name, one in model.base.items() if one.is_floating_point()]
    if model.given:
        made = list(SignalRows(model, seed).rows())
    elif ids is None or ids.is_floating_point() or others:
        rows = SignalRows(model, seed)
        made = [*rows.trials(), *rows.beside_tokens()]
    else:
        made = list(TokenRows(model, seed).trials())
    made += _optional_trials(model)
    made = [trial for trial in made if model.accepts(trial.case)]
    if model.full:
        made = [_lengthened(model, trial) for trial in made if trial.kind is not Kind.LENGTH]
    kinds: dict[Kind, list[int]] = {}
    for number, trial in enumerate(made):
        kinds.setdefault(trial.kind, []).append(number)
    kept, spent = set(), 0
    for number in (one for round_ in zip_longest(*kinds.values()) for one in round_ if one is not None):
        size = places_of(made[number].case.inputs, model.config, signals=signals) + overhead
        if spent + size <= tokens:
            kept.add(number)
            spent += size
    return [made[number] for number in sorted(kept)]


def _optional_trials(model: Model) -> Iterator[Trial]:
    """The first batch with each of these arguments, with each two values of an argument, and with all arguments."""
    base, found = first_rows(model.base), model.further
    rows = max((len(one) for one in base.values() if one.ndim), default=1)
    for name, values in found.values.items():
        for what, value in values.items():
            said = f"with {name}{f', {what}' if what else ''}"
            yield _argument_trial(said, {**base, name: value})
            if rows > 1:
                alone = {key: one[:1] if one.ndim and len(one) == rows else one for key, one in base.items()}
                first = value[:1] if value.ndim and len(value) == rows else value
                yield _argument_trial(f"{said}, in one row", {**alone, name: first})
    if len(found.values) > 1:
        every = {name: next(iter(values.values())) for name, values in found.values.items()}
        yield _argument_trial(f"with {' and '.join(every)}", {**base, **every})


def _argument_trial(what: str, inputs: Mapping[str, Tensor]) -> Trial:
    return Trial(case=Case(what, dict(inputs)), kind=Kind.ARGUMENTS, what=what)


def _lengthened(model: Model, trial: Trial) -> Trial:
    """The trial with rows of the longest length."""
    padding = field_number(model.config, "pad_token_id", 0)
    case = trial.case
    return replace(trial, case=Case(case.name, lengthened(case.inputs, model.longest, padding)))
