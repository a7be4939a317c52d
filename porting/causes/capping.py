"""Recognise soft caps and clamps in the recorded calls of a pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from porting.causes.functions import factor_of
from porting.causes.tape import Call, Ref, Tape


@dataclass(frozen=True, eq=False)
class Cap:
    """A soft cap, ``size * tanh(x / size)``.

    Attributes:
        call: the call that returns its result.
        input: the tensor that is capped.
        size: the largest possible result.
    """

    call: Call
    bend: Call
    input: Ref
    size: float


def caps(tape: Tape) -> Iterator[Cap]:
    """Yield the soft caps of a pass."""
    for bend in tape.calls:
        if bend.name != "tanh" or not bend.reads or not tape.learned(bend.result):
            continue
        before = tape.maker(bend.reads[0])
        users = tape.users(bend.result)
        after = users[0] if len(users) == 1 else None
        if before is None or after is None or len(before.reads) != 1:
            continue
        small, large = factor_of(before), factor_of(after)
        if small and large and abs(small * large - 1) < 1e-6:
            yield Cap(after, bend, before.reads[0], large)


@dataclass(frozen=True, eq=False)
class Clamp:
    """A clamp of activations.

    Attributes:
        call: the call.
        input: the tensor that is clamped.
        least, most: the limits; None for no limit.
    """

    call: Call
    input: Ref
    least: float | None
    most: float | None


def clamps(tape: Tape) -> Iterator[Clamp]:
    """Yield the clamps of activations in a pass."""
    for call in tape.calls:
        if call.name in ("clamp", "clip") and call.reads and tape.learned(call.reads[0]) and len(call.reads) == 1:
            least, most = call.argument(1, "min"), call.argument(2, "max")
            yield Clamp(call, call.args[0], _number(least), _number(most))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
