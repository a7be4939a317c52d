"""Whether a forward listens to the mask that it can be given."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from porting.suggesting.subjects.arguments import BATCH, LENGTH, MASK, Way, gives, sample


def heard(module: nn.Module, way: Way, vocabulary: int, padding: int) -> Way:
    """The way without a mask that need not be given and changes nothing: it is the loss's, say."""
    if MASK not in way.named:
        return way
    inputs = sample(way.named, vocabulary, padding)
    holes = torch.ones(BATCH, LENGTH, dtype=torch.long)
    holes[:, 2] = holes[:, LENGTH - 1] = 0
    rules = tuple((theirs, ours) for theirs, ours in way.rules if not theirs.startswith(f"{MASK} ["))
    without = replace(way, rules=rules)
    try:
        given = [gives(module, way, {**inputs, MASK: one}) for one in (inputs[MASK], holes)]
        given.append(gives(module, without, inputs))
    except Exception:  # noqa: BLE001  # a mask of another kind, or one that must be given
        return way
    deaf = all(len(one) == len(given[0]) and all(map(torch.equal, one, given[0])) for one in given[1:])
    return without if deaf else way
