"""How far the inputs got into the port's own code: branches that no input took, arguments that were never given."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from porting.tracing.code_coverage import Branch, never_ran_in, not_watched
from porting.tracing.running import Side
from porting.verification.compare import Comparison


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What of a port's forward did not come to anything.

    Attributes:
        branches: code of the port that never ran, and conditions on tensors that had one outcome only.
        unseen: what else was not shown, in words.
    """

    branches: tuple[Branch, ...] = ()
    unseen: tuple[str, ...] = ()


def reached(comparison: Comparison, port: Side) -> Reach:
    """How far the float64 passes of the port got."""
    if comparison.executed is None:
        return Reach()
    names = not_watched(comparison.executed, port.module, comparison.ran)
    conditions = comparison.conditions.branches() if comparison.conditions is not None else ()
    hidden = [f"which branches of {', '.join(names)} run (compiled, or without its source)"]
    return Reach(
        branches=(*never_ran_in(comparison.executed, port.module), *conditions),
        unseen=(*(hidden if names else ()), *never_given(port.module, port.arguments)),
    )


def never_given(module: nn.Module, given: Sequence[Mapping[str, Tensor]]) -> Iterator[str]:
    """In words, the arguments of forward that were never given."""
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):  # some callables written in C have no signature
        return
    everything = {name for arguments in given for name in arguments}
    missing = [
        one.name
        for place, one in enumerate(parameters)
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        and one.name not in everything
        and str(place) not in everything
    ]
    if len(missing) == 1:
        yield f"the argument {missing[0]} (never given)"
    elif missing:
        yield f"the arguments {', '.join(missing[:-1])} and {missing[-1]} (never given)"
