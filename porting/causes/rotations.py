"""Recognising rotations of queries and keys on a tape (Su et al. 2021, section 3.4), and making others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from porting.causes.functions import SUM
from porting.causes.model_parts import ModelParts
from porting.causes.replay import Rewrite, Values
from porting.causes.tape import Call, Ref, Tape

THETAS = (100.0, 1000.0, 10_000.0, 160_000.0, 500_000.0, 1_000_000.0)
"""The usual bases of rotations; any other is solved for."""

Scale = Callable[[Tensor], Tensor]
"""The frequencies of a base [d/2] -> the scaled frequencies."""


@dataclass(frozen=True)
class Rotation:
    """A rotation of a query or key, ``x cos + rotate(x) sin``.

    Attributes:
        input, cos, sin: its tensors; cosine and sine contain each angle twice.
        module: the path of the attention's module.
        pairs: neighbouring channels form a pair, and not one channel of each half.
        source: the whole head; ``input`` if all of it is rotated.
        whole: the call that returns the whole head; ``call`` if all of it is rotated.
        places: the positions that the model was given, [b s] or [1 s]; None where it counts them.
    """

    call: Call
    input: Ref
    cos: Ref
    sin: Ref
    module: str
    pairs: bool
    source: Ref
    whole: Call
    places: Tensor | None = field(default=None, compare=False)

    def angles(self, length: int, frequencies: Tensor) -> Tensor:
        """Return the angles of each position for some frequencies, [s f], or [b 1 s f] where positions were given."""
        if self.places is None or self.places.shape[-1] != length:
            return torch.arange(length, dtype=frequencies.dtype)[:, None] * frequencies
        return self.places.to(frequencies.dtype)[:, None, :, None] * frequencies

    def half(self, value: Tensor) -> Tensor:
        """Return the half of a cosine or sine that contains each angle once."""
        return _half(value, pairs=self.pairs)

    def halves(self, values: Values) -> tuple[Tensor, Tensor]:
        """Return the cosine and sine of each angle once."""
        return self.half(values[self.cos]), self.half(values[self.sin])

    def in_head(self, values: Values, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the whole head with the channels changed that the reference rotates."""
        head, count = values[self.source], values[self.input].shape[-1]
        return torch.cat([change(head[..., :count]), head[..., count:]], -1)

    def rotate(self, values: Values, value: Tensor) -> Tensor:
        """Rotate another tensor by the same angles."""
        return rotated(value, *self.halves(values), pairs=self.pairs)


def rotations(model_parts: ModelParts) -> Iterator[Rotation]:
    """Yield the rotations of queries and keys."""
    tape, places = model_parts.tape, model_parts.inputs.get("position_ids")
    places = places if places is not None and places.ndim == 2 else None
    for attention in model_parts.attentions:
        for ref in (attention.query, attention.key):
            for call in tape.before(ref, lambda call: call.name in SUM or call.name in ("linear", "addmm")):
                products = [tape.maker(read) for read in call.reads] if call.name in SUM else []
                if len(products) == 2 and all(
                    factor is not None and factor.name in ("mul", "__mul__") for factor in products
                ):
                    factors = [_factors(factor, tape) for factor in products if factor is not None]
                    if all(found is not None for found in factors):
                        (value, cos), (_, sin) = (found for found in factors if found is not None)
                        pairs = _pairs_neighbours(tape, call, value, cos, sin)
                        source, whole = _whole_head(tape, call, value)
                        yield Rotation(call, value, cos, sin, attention.where, pairs, source, whole, places)


def _factors(call: Call, tape: Tape) -> tuple[Ref, Ref] | None:
    """Return the rotated tensor and the cosine or sine of a product; None where it is none."""
    learned = [read for read in call.reads if tape.learned(read)]
    constants = [read for read in call.reads if not tape.learned(read)]
    return (learned[0], constants[0]) if len(learned) == 1 and len(constants) == 1 else None


def _pairs_neighbours(tape: Tape, call: Call, value: Ref, cos: Ref, sin: Ref) -> bool:
    """Return whether neighbouring channels form a pair."""
    angles = (_half(tape[tensor], pairs=True) for tensor in (cos, sin))
    result = rotated(tape[value], *angles, pairs=True)
    return result.shape == tape[call.result].shape and torch.allclose(result, tape[call.result], rtol=1e-4, atol=1e-6)


def _half(value: Tensor, *, pairs: bool) -> Tensor:
    return value[..., ::2] if pairs else value[..., : value.shape[-1] // 2]


def _whole_head(tape: Tape, call: Call, value: Ref) -> tuple[Ref, Call]:
    """Return the head of which a part is rotated, and the call that joins it again."""
    slicing = tape.maker(value)
    joining = next((user for user in tape.users(call.result) if user.name in ("cat", "concat", "concatenate")), None)
    if slicing is None or joining is None or not slicing.reads or joining.reads[0] != call.result:
        return value, call
    fits = tape[slicing.reads[0]].shape == tape[joining.result].shape
    return (slicing.reads[0], joining) if fits else (value, call)


def rotated(value: Tensor, cos: Tensor, sin: Tensor, *, pairs: bool = False) -> Tensor:
    """Rotate each pair of channels by an angle.

    Args:
        value: [b h s d].
        cos, sin: cosine and sine of the angles, [... s d/2].
        pairs: neighbouring channels form a pair, and not one channel of each half.
    """
    first, second = (value[..., ::2], value[..., 1::2]) if pairs else value.chunk(2, -1)
    halves = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(halves, -1).flatten(-2) if pairs else torch.cat(halves, -1)


def by_attention(model_parts: ModelParts) -> Iterator[tuple[str, list[Rotation]]]:
    """Yield the rotations of query and key of each attention, with the path of its module."""
    by_module: dict[str, dict[int, Rotation]] = {}
    for rotation in rotations(model_parts):
        by_module.setdefault(rotation.module, {})[rotation.call.number] = rotation
    return ((module, list(by_call.values())) for module, by_call in by_module.items())


def frequencies_of(model_parts: ModelParts, rotation: Rotation) -> Tensor | None:
    """Return the angle per position of each pair of channels [d/2]; None for a single position."""
    cos, sin = (rotation.half(model_parts.tape[ref]).flatten(0, -2) for ref in (rotation.cos, rotation.sin))
    if len(cos) < 2 or not bool((cos[0] == cos[0, 0]).all()) or bool(sin[0].any()):
        return None
    return torch.atan2(sin[1], cos[1]).double()


def amplitude_of(model_parts: ModelParts, rotation: Rotation) -> float:
    """Return the factor of cosine and sine (Peng et al. 2023, section 3.4)."""
    return float(rotation.half(model_parts.tape[rotation.cos]).flatten(0, -2)[0, 0])


def base_of(model_parts: ModelParts, rotation: Rotation) -> float | None:
    """Return the base (theta) of the reference's frequencies; None where these are not its powers."""
    frequencies = frequencies_of(model_parts, rotation)
    return None if frequencies is None else _base(frequencies)


def _base(frequencies: Tensor) -> float | None:
    if len(frequencies) < 2 or not bool((frequencies > 0).all()):
        return None
    theta = _base_of_second(frequencies)
    return theta if torch.allclose(frequencies, _powers(theta, len(frequencies)), rtol=1e-4) else None


def _powers(theta: float, count: int) -> Tensor:
    return theta ** -(torch.arange(count, dtype=torch.float64) / count)


@dataclass(frozen=True)
class Scaling:
    """The scaling of a reference's frequencies.

    Attributes:
        theta: the base without scaling.
        factor: the divisor of the lowest frequency.
        linear: all frequencies are divided by it.
    """

    theta: float
    factor: float
    linear: bool

    def __str__(self) -> str:
        which = "all" if self.linear else "the slow"
        return f"the reference divides {which} angles by {self.factor:.6g}"


def scaling_of(model_parts: ModelParts, rotation: Rotation) -> Scaling | None:
    """Return the scaling of the reference's frequencies; None where there is none, or an unknown one."""
    frequencies = frequencies_of(model_parts, rotation)
    if (
        frequencies is None
        or len(frequencies) < 2
        or not bool((frequencies > 0).all())
        or _base(frequencies) is not None
    ):
        return None
    linear = not math.isclose(float(frequencies[0]), 1.0, rel_tol=1e-6)
    if linear:
        theta = _base(frequencies / frequencies[0])
        return None if theta is None else Scaling(theta, 1 / float(frequencies[0]), linear)
    ratios = {
        theta: _powers(theta, len(frequencies)) / frequencies
        for theta in (float(f"{_base_of_second(frequencies):.5g}"), *THETAS)
    }
    candidates = [
        candidate
        for candidate in ratios.items()
        if bool((candidate[1].diff() > -1e-3).all()) and float(candidate[1].max()) > 1.001
    ]
    best = min(candidates, key=lambda candidate: _implausibility(candidate[1]), default=None)
    return None if best is None else Scaling(best[0], float(best[1].max()), linear)


def _implausibility(ratio: Tensor) -> tuple[bool, bool]:
    """Return a sort key that is smaller for whole factors, and where neighbours are scaled alike or not at all."""
    alike = any(math.isclose(*pair, rel_tol=1e-4) for pair in (ratio[:2].tolist(), ratio[-2:].tolist()))
    return not math.isclose(float(ratio[-1]), round(float(ratio[-1])), rel_tol=1e-4), not alike


@dataclass(frozen=True)
class Declared:
    """Llama 3's scaling as the reference's config declares it.

    Attributes:
        theta: the base.
        numbers: the named arguments of :func:`smoothed`.
    """

    theta: float
    numbers: Mapping[str, float]

    def __str__(self) -> str:
        return f"the reference divides the slow angles by {self.numbers['factor']:.6g}"

    def scale(self, **others: float) -> Scale:
        """Return the scaling, with some of its numbers changed."""
        numbers = {**self.numbers, **others}
        return lambda frequencies: smoothed(frequencies, **numbers)


FIELDS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
NUMBERS = ("factor", "low", "high", "known")
"""The names of all but the first in :func:`smoothed`."""


def declared(model_parts: ModelParts) -> Declared | None:
    """Return the scaling that the config of one of the modules declares; None where none declares it completely."""
    for part in model_parts.tape.parts:
        config = getattr(part.module, "config", None)
        for name in ("rope_parameters", "rope_scaling"):
            settings = getattr(config, name, None)
            if isinstance(settings, Mapping):
                fields = {"rope_theta": getattr(config, "rope_theta", None), **settings}
                given = (fields.get(name) for name in FIELDS)
                theta, *numbers = (float(number) if isinstance(number, int | float) else None for number in given)
                known = {name: one for name, one in zip(NUMBERS, numbers, strict=True) if one is not None}
                if theta is not None and len(known) == len(NUMBERS):
                    return Declared(theta, known)
    return None


def smoothed(
    frequencies: Tensor, *, factor: float, low: float = 1.0, high: float = 4.0, known: float = 8192.0
) -> Tensor:
    """Scale frequencies as Llama 3 does: high ones are kept, low ones divided, with a transition between.

    Args:
        frequencies: the frequencies of the base, [d/2].
        factor: the divisor of low frequencies.
        low, high: wave lengths above ``known / low`` are divided, those below ``known / high`` are kept.
        known: the context length of pretraining, in tokens.
    """
    lengths = 2 * math.pi / frequencies
    slow = torch.where(lengths > known / low, frequencies / factor, frequencies)
    weight = (known / lengths - low) / (high - low)
    between = (1 - weight) * slow / factor + weight * slow
    return torch.where((lengths < known / high) | (lengths > known / low), slow, between)


def _base_of_second(frequencies: Tensor) -> float:
    """Return the base by the second frequency, which scaling rarely changes."""
    return float(frequencies[1]) ** -len(frequencies)


Rotate = Callable[[Values, Rotation], Tensor]
"""The present values and a rotation -> the whole head, rotated in another way."""


def bind(rotate: Rotate, rotation: Rotation) -> Rewrite:
    """Return the rewrite of the call that returns the whole head."""
    return lambda values, call: rotate(values, rotation)


def based(
    theta: float,
    dtype: torch.dtype,
    *,
    part: float | None = None,
    whole: bool = False,
    scaled: Scale = lambda frequencies: frequencies,
    amplitude: float = 1.0,
    angles_in: torch.dtype | None = None,
) -> Rotate:
    """Return a rotation by the angles of a base.

    Args:
        part: the share of the head's channels that is rotated; None for the reference's.
        whole: the exponents are divided by the width of the head, and not of its rotated part.
        amplitude: the factor of cosine and sine.
        angles_in: the dtype that the angles are rounded to; None for none.
    """

    def rotate(values: Values, rotation: Rotation) -> Tensor:
        value = values[rotation.source]
        length, size = value.shape[-2:]
        count = values[rotation.input].shape[-1] if part is None else round(part * size)
        exponents = torch.arange(0, count, 2, dtype=dtype) / (size if whole else count)
        angles = rotation.angles(length, scaled(1.0 / theta**exponents))
        angles = angles if angles_in is None else angles.to(angles_in).to(angles.dtype)
        cos, sin = ((amplitude * angles.cos()).to(value.dtype), (amplitude * angles.sin()).to(value.dtype))
        return torch.cat([rotated(value[..., :count], cos, sin, pairs=rotation.pairs), value[..., count:]], -1)

    return rotate
