"""The trials: batches of every kind that a model's arguments allow, made from one batch, the config and a seed.

They are varied one property at a time: lengths (also around every number that the config holds), rows in a batch,
masks, segments, positions, token ids, and which optional arguments are given; then some properties in pairs.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

from porting.trials.inputs import Case, lengthened
from porting.trials.modalities import IDS
from porting.trials.scope import Kind
from porting.trials.signals import SignalRows
from porting.trials.token_rows import TokenRows
from porting.trials.trial import Model, Trial, field_number


def battery(model: Model, *, seed: int, tokens: int, overhead: int = 0) -> list[Trial]:
    """The trials for a model.

    Args:
        tokens: they hold no more than this many tokens in all; where that is too little, each kind has some.
        overhead: a batch counts for so many tokens more than it holds: what reading the weights costs.
    """
    ids = model.base.get(IDS)
    others = [name for name, one in model.base.items() if one.is_floating_point()]
    if model.given:
        made = list(SignalRows(model, seed).rows())
    elif ids is None or ids.is_floating_point() or others:
        signals = SignalRows(model, seed)
        made = [*signals.trials(), *signals.beside_tokens()]
    else:
        made = list(TokenRows(model, seed).trials())
    made = [trial for trial in made if model.accepts(trial.case)]
    if model.full:
        made = [_lengthened(model, trial) for trial in made if trial.kind is not Kind.LENGTH]
    kinds: dict[Kind, list[int]] = {}
    for number, trial in enumerate(made):
        kinds.setdefault(trial.kind, []).append(number)
    kept, spent = set(), 0
    for number in (one for round_ in zip_longest(*kinds.values()) for one in round_ if one is not None):
        inputs = made[number].case.inputs.values()
        size = max((value.numel() for value in inputs if not value.is_floating_point()), default=0) + overhead
        if spent + size <= tokens:
            kept.add(number)
            spent += size
    return [made[number] for number in sorted(kept)]


def _lengthened(model: Model, trial: Trial) -> Trial:
    """The trial with rows of the longest length."""
    padding = field_number(model.config, "pad_token_id", 0)
    case = trial.case
    return replace(trial, case=Case(case.name, lengthened(case.inputs, model.longest, padding)))
