"""Rotations of queries and keys on a tape (Su et al. 2021, section 3.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from porting.causes.functions import SUM
from porting.causes.model_parts import ModelParts
from porting.causes.replay import Rewrite, Values
from porting.causes.tape import Call, Ref, Tape

THETAS = (100.0, 1000.0, 10_000.0, 160_000.0, 500_000.0, 1_000_000.0)
"""Bases of rotations that models have, and what people write; any other is solved for."""


Speeds = Callable[[Tensor], Tensor]
"""Other speeds for a theta's own."""


@dataclass(frozen=True)
class Rotation:
    """``x cos + rotate(x) sin``.

    Attributes:
        call: the sum.
        input, cos, sin: its tensors; cosine and sine have each angle twice.
        module: where the attention is.
        pairs: neighbours are rotated together, and not one channel of each half.
        source: the whole head; ``input`` where all of it is rotated.
        whole: the call that puts the head together again; ``call`` where all of it is rotated.
    """

    call: Call
    input: Ref
    cos: Ref
    sin: Ref
    module: str
    pairs: bool
    source: Ref
    whole: Call

    def half(self, value: Tensor) -> Tensor:
        """Of a cosine or sine, each angle once."""
        return _half(value, pairs=self.pairs)

    def turned(self, values: Values, value: Tensor) -> Tensor:
        """Another tensor by the same angles."""
        return rotated(value, self.half(values[self.cos]), self.half(values[self.sin]), pairs=self.pairs)


def rotations(model_parts: ModelParts) -> Iterator[Rotation]:
    """The rotations of queries and keys."""
    tape = model_parts.tape
    for attention in model_parts.attentions:
        for ref in (attention.query, attention.key):
            for call in tape.before(ref, lambda call: call.name in SUM or call.name in ("linear", "addmm")):
                products = [tape.maker(read) for read in call.reads] if call.name in SUM else []
                if len(products) == 2 and all(
                    factor is not None and factor.name in ("mul", "__mul__") for factor in products
                ):
                    sides = [_sides(factor, tape) for factor in products if factor is not None]
                    if all(found is not None for found in sides):
                        (value, cos), (_, sin) = (found for found in sides if found is not None)
                        pairs = _pairs(tape, call, value, cos, sin)
                        source, whole = _whole(tape, call, value)
                        yield Rotation(call, value, cos, sin, attention.where, pairs, source, whole)


def _sides(call: Call, tape: Tape) -> tuple[Ref, Ref] | None:
    """What is rotated, and the cosine or sine that it is multiplied by."""
    learned = [read for read in call.reads if tape.learned(read)]
    rest = [read for read in call.reads if not tape.learned(read)]
    return (learned[0], rest[0]) if len(learned) == 1 and len(rest) == 1 else None


def _pairs(tape: Tape, call: Call, value: Ref, cos: Ref, sin: Ref) -> bool:
    """Whether neighbours are rotated together."""
    turn = (_half(tape[tensor], pairs=True) for tensor in (cos, sin))
    made = rotated(tape[value], *turn, pairs=True)
    return made.shape == tape[call.result].shape and torch.allclose(made, tape[call.result], rtol=1e-4, atol=1e-6)


def _half(value: Tensor, *, pairs: bool) -> Tensor:
    return value[..., ::2] if pairs else value[..., : value.shape[-1] // 2]


def _whole(tape: Tape, call: Call, value: Ref) -> tuple[Ref, Call]:
    """The head of which a part is rotated, and the call that puts it together."""
    cut = tape.maker(value)
    joined = next((user for user in tape.users(call.result) if user.name in ("cat", "concat", "concatenate")), None)
    if cut is None or joined is None or not cut.reads or joined.reads[0] != call.result:
        return value, call
    fits = tape[cut.reads[0]].shape == tape[joined.result].shape
    return (cut.reads[0], joined) if fits else (value, call)


def rotated(value: Tensor, cos: Tensor, sin: Tensor, *, pairs: bool = False) -> Tensor:
    """Each pair of channels by an angle.

    Args:
        value: [b h s d].
        cos, sin: of the angles, [... s d/2].
        pairs: a pair is two neighbours, and not one channel of each half.
    """
    first, second = (value[..., ::2], value[..., 1::2]) if pairs else value.chunk(2, -1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(turned, -1).flatten(-2) if pairs else torch.cat(turned, -1)


def by_attention(model_parts: ModelParts) -> Iterator[tuple[str, list[Rotation]]]:
    """Query's and key's rotations, attention by attention."""
    found: dict[str, dict[int, Rotation]] = {}
    for rotation in rotations(model_parts):
        found.setdefault(rotation.module, {})[rotation.call.number] = rotation
    return ((module, list(many.values())) for module, many in found.items())


def speeds_of(model_parts: ModelParts, rotation: Rotation) -> Tensor | None:
    """By what each pair of channels turns from one position to the next [d/2]; None where there is one position."""
    cos, sin = (rotation.half(model_parts.tape[ref]).flatten(0, -2) for ref in (rotation.cos, rotation.sin))
    if len(cos) < 2 or not bool((cos[0] == cos[0, 0]).all()) or bool(sin[0].any()):
        return None
    return torch.atan2(sin[1], cos[1]).double()


def loudness_of(model_parts: ModelParts, rotation: Rotation) -> float:
    """What cosine and sine are multiplied by (Peng et al. 2023, section 3.4)."""
    return float(rotation.half(model_parts.tape[rotation.cos]).flatten(0, -2)[0, 0])


def base_of(model_parts: ModelParts, rotation: Rotation) -> float | None:
    """The theta of the reference's own angles; None where they are no powers of one."""
    speeds = speeds_of(model_parts, rotation)
    return None if speeds is None else _base(speeds)


def _base(speeds: Tensor) -> float | None:
    if len(speeds) < 2 or not bool((speeds > 0).all()):
        return None
    theta = _second(speeds)
    return theta if torch.allclose(speeds, _powers(theta, len(speeds)), rtol=1e-4) else None


def _powers(theta: float, count: int) -> Tensor:
    return theta ** -(torch.arange(count, dtype=torch.float64) / count)


@dataclass(frozen=True)
class Scaling:
    """How a reference's angles are scaled.

    Attributes:
        theta: the base before.
        factor: what the slowest speed is divided by.
        linear: all speeds are.
    """

    theta: float
    factor: float
    linear: bool

    def __str__(self) -> str:
        which = "all" if self.linear else "the slow"
        return f"the reference divides {which} angles by {self.factor:.6g}"


def scaling_of(model_parts: ModelParts, rotation: Rotation) -> Scaling | None:
    """The scaling of the reference's angles; None where there is none, or none that is known."""
    speeds = speeds_of(model_parts, rotation)
    if speeds is None or len(speeds) < 2 or not bool((speeds > 0).all()) or _base(speeds) is not None:
        return None
    linear = not math.isclose(float(speeds[0]), 1.0, rel_tol=1e-6)
    if linear:
        theta = _base(speeds / speeds[0])
        return None if theta is None else Scaling(theta, 1 / float(speeds[0]), linear)
    ratios = {theta: _powers(theta, len(speeds)) / speeds for theta in (float(f"{_second(speeds):.5g}"), *THETAS)}
    rising = [item for item in ratios.items() if bool((item[1].diff() > -1e-3).all()) and float(item[1].max()) > 1.001]
    found = min(rising, key=lambda item: _doubt(item[1]), default=None)
    return None if found is None else Scaling(found[0], float(found[1].max()), linear)


def _doubt(ratio: Tensor) -> tuple[bool, bool]:
    """The smaller the likelier: a whole factor, and speeds beside each other that are scaled alike or not at all."""
    alike = any(math.isclose(*pair, rel_tol=1e-4) for pair in (ratio[:2].tolist(), ratio[-2:].tolist()))
    return not math.isclose(float(ratio[-1]), round(float(ratio[-1])), rel_tol=1e-4), not alike


@dataclass(frozen=True)
class Declared:
    """Llama 3's scaling as the reference's config declares it.

    Attributes:
        theta: the base.
        factor, low, high, known: as of :func:`smoothed`.
    """

    theta: float
    factor: float
    low: float
    high: float
    known: float

    def speeds(self, **others: float) -> Speeds:
        """The scaling, some of whose numbers are others."""
        own = {"factor": self.factor, "low": self.low, "high": self.high, "known": self.known, **others}
        return lambda speeds: smoothed(
            speeds, factor=own["factor"], low=own["low"], high=own["high"], known=own["known"]
        )


FIELDS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def declared(model_parts: ModelParts) -> Declared | None:
    """What a config that one of the modules holds says of the rotation's scaling; None where none says it all."""
    for part in model_parts.tape.parts:
        config = getattr(part.module, "config", None)
        for field in ("rope_parameters", "rope_scaling"):
            said = getattr(config, field, None)
            if isinstance(said, Mapping):
                every = {"rope_theta": getattr(config, "rope_theta", None), **said}
                numbers = [every.get(name) for name in FIELDS]
                if all(isinstance(number, int | float) for number in numbers):
                    return Declared(*(float(number) for number in numbers if isinstance(number, int | float)))
    return None


def smoothed(speeds: Tensor, *, factor: float, low: float = 1.0, high: float = 4.0, known: float = 8192.0) -> Tensor:
    """Llama 3's: the fast ones as they are, the slow ones divided, with a transition between."""
    lengths = 2 * math.pi / speeds
    slow = torch.where(lengths > known / low, speeds / factor, speeds)
    share = (known / lengths - low) / (high - low)
    between = (1 - share) * slow / factor + share * slow
    return torch.where((lengths < known / high) | (lengths > known / low), slow, between)


def _second(speeds: Tensor) -> float:
    """The base by the second speed, which no scaling may have reached."""
    return float(speeds[1]) ** -len(speeds)


Turn = Callable[[Values, Rotation], Tensor]
"""Makes of a rotation what the whole head is otherwise."""


def bind(turn: Turn, rotation: Rotation) -> Rewrite:
    """The rewrite of the call that gives the whole head."""
    return lambda values, call: turn(values, rotation)


def based(
    theta: float,
    dtype: torch.dtype,
    *,
    part: float | None = None,
    whole: bool = False,
    scaled: Speeds = lambda speeds: speeds,
    loud: float = 1.0,
) -> Turn:
    """A rotation by angles of a base.

    Args:
        theta: the base.
        dtype: what the angles are computed in.
        part: of the head's channels is rotated, the first ones; None for those that the reference rotates.
        whole: the speeds are those of the whole head's first channels, and not made for the part.
        scaled: other speeds.
        loud: what cosine and sine are multiplied by.
    """

    def turn(values: Values, rotation: Rotation) -> Tensor:
        value = values[rotation.source]
        length, size = value.shape[-2:]
        count = values[rotation.input].shape[-1] if part is None else round(part * size)
        exponents = torch.arange(0, count, 2, dtype=dtype) / (size if whole else count)
        angles = torch.arange(length, dtype=dtype)[:, None] * scaled(1.0 / theta**exponents)
        cos, sin = ((loud * angles.cos()).to(value.dtype), (loud * angles.sin()).to(value.dtype))
        return torch.cat([rotated(value[..., :count], cos, sin, pairs=rotation.pairs), value[..., count:]], -1)

    return turn
