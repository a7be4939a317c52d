"""Computed positions that are not the reference's: sinusoids and rotations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from porting.causes.anatomy import Anatomy
from porting.causes.cause import Cause, after, other
from porting.causes.fitting import Dial, geometric
from porting.causes.functions import SUM
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call, Ref

THETAS = (100.0, 1000.0, 10_000.0, 160_000.0, 500_000.0, 1_000_000.0)
"""Bases of rotations that models have, and what people write; any other is solved for."""


class SinusoidLayout(Cause):
    """Sines and cosines in halves, or one by one."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Each table of positions that was computed and not learned."""
        for one in anatomy.embeddings:
            values = anatomy.tape[one.call.result]
            if one.role == "positions" and values.shape[-1] % 2 == 0 and sinusoidal(anatomy.tape[one.weight]):
                yield other(one.call, after(halves_to_pairs), "in pairs, not in halves")
                yield other(one.call, after(pairs_to_halves), "in halves, not in pairs")


def sinusoidal(table: Tensor) -> bool:
    """Whether the rows of a table are sines and cosines: each of the same length, and 0s and 1s alone in the first."""
    lengths = table.square().sum(-1)
    first = table[0]
    return bool(torch.allclose(lengths, lengths[:1].expand_as(lengths), rtol=1e-4)) and bool(
        ((first - first.round()).abs() < 1e-6).all()
    )


def halves_to_pairs(value: Tensor) -> Tensor:
    """[... (k d)] -> [... (d k)], k = sine, cosine."""
    return value.reshape(*value.shape[:-1], 2, -1).mT.flatten(-2)


def pairs_to_halves(value: Tensor) -> Tensor:
    """[... (d k)] -> [... (k d)], k = sine, cosine."""
    return value.reshape(*value.shape[:-1], -1, 2).mT.flatten(-2)


@dataclass(frozen=True, eq=False)
class Rotation:
    """``x cos + rotate(x) sin`` (Su et al. 2021, section 3.4).

    Attributes:
        call: the sum.
        input, cos, sin: its tensors; cosine and sine have each angle twice.
        module: where the attention is.
    """

    call: Call
    input: Ref
    cos: Ref
    sin: Ref
    module: str


def rotations(anatomy: Anatomy) -> Iterator[Rotation]:
    """The rotations of queries and keys."""
    tape = anatomy.tape
    for attention in anatomy.attentions:
        for ref in (attention.query, attention.key):
            for call in tape.before(ref, lambda call: call.name in SUM or call.name in ("linear", "addmm")):
                products = [tape.maker(one) for one in call.reads] if call.name in SUM else []
                if len(products) == 2 and all(one is not None and one.name in ("mul", "__mul__") for one in products):
                    sides = [_sides(one, anatomy) for one in products if one is not None]
                    if all(found is not None for found in sides):
                        (value, cos), (_, sin) = (found for found in sides if found is not None)
                        yield Rotation(call, value, cos, sin, attention.where)


def _sides(call: Call, anatomy: Anatomy) -> tuple[Ref, Ref] | None:
    """What is rotated, and the cosine or sine that it is multiplied by."""
    learned = [one for one in call.reads if anatomy.tape.learned(one)]
    rest = [one for one in call.reads if not anatomy.tape.learned(one)]
    return (learned[0], rest[0]) if len(learned) == 1 and len(rest) == 1 else None


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


class RotaryTheta(Cause):
    """Another base."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Query and key of each attention with each usual base."""
        for module, pair in _by_attention(anatomy):
            known = base_of(anatomy, pair[0])
            for theta in (one for one in THETAS if not (known and math.isclose(one, known, rel_tol=1e-3))):
                for dtype in ROTATED_IN:
                    rewrites = _each(pair, dtype, theta)
                    yield Alteration(where=module, rewrites=rewrites, detail=_theta(f"{theta:.12g}", known))

    def dials(self, anatomy: Anatomy) -> Iterator[Dial]:
        """Query and key of each attention with any base."""
        for module, pair in _by_attention(anatomy):
            detail = partial(_theta, known=base_of(anatomy, pair[0]))
            calls = frozenset(one.call.number for one in pair)
            for dtype in ROTATED_IN:
                yield Dial(module, calls, partial(_each, pair, dtype), detail, geometric(2.0, 2e8, 4))


ROTATED_IN = (torch.float64, torch.float32)
"""Angles are computed in the working dtype, or in float32 whatever the model computes in."""


def _each(pair: list[Rotation], dtype: torch.dtype, theta: float) -> dict[int, Rewrite]:
    return {one.call.number: _bind(based(theta, dtype), one) for one in pair}


def _theta(theta: str, known: float | None) -> str:
    return f"theta is {theta} where the reference has {f'{known:.6g}' if known else 'scaled angles'}"


def speeds_of(anatomy: Anatomy, one: Rotation) -> Tensor | None:
    """By what each pair of channels turns from one position to the next [d/2]; None where there is one position."""
    cos, sin = (anatomy.tape[ref].flatten(0, -2) for ref in (one.cos, one.sin))
    if len(cos) < 2 or not bool((cos[0] == 1).all()):
        return None
    return torch.atan2(sin[1], cos[1])[: cos.shape[-1] // 2].double()


def base_of(anatomy: Anatomy, one: Rotation) -> float | None:
    """The theta of the reference's own angles; None where they are no powers of one."""
    speeds = speeds_of(anatomy, one)
    if speeds is None or len(speeds) < 2 or not bool((speeds > 0).all()):
        return None
    theta = float(speeds[1]) ** -len(speeds)
    expected = theta ** -(torch.arange(len(speeds), dtype=torch.float64) / len(speeds))
    return theta if torch.allclose(speeds, expected, rtol=1e-4) else None


def _by_attention(anatomy: Anatomy) -> Iterator[tuple[str, list[Rotation]]]:
    found: dict[str, dict[int, Rotation]] = {}
    for one in rotations(anatomy):
        found.setdefault(one.module, {})[one.call.number] = one
    return ((module, list(many.values())) for module, many in found.items())


Turn = Callable[[Values, Rotation], Tensor]
"""Makes of a rotation what it gives otherwise."""


def based(theta: float, dtype: torch.dtype, *, part: float = 1.0, whole: bool = False) -> Turn:
    """A rotation by angles of a base.

    Args:
        theta: the base.
        dtype: what the angles are computed in.
        part: of the head's channels is rotated, the first ones.
        whole: the speeds are those of the whole head's first channels, and not made for the part.
    """

    def rewrite(values: Values, one: Rotation) -> Tensor:
        value = values[one.input]
        length, size = value.shape[-2:]
        turned, rest = value[..., : round(part * size)], value[..., round(part * size) :]
        exponents = torch.arange(0, turned.shape[-1], 2, dtype=dtype) / (size if whole else turned.shape[-1])
        angles = torch.arange(length, dtype=dtype)[:, None] * (1.0 / theta**exponents)
        cos, sin = (angles.cos().to(value.dtype), angles.sin().to(value.dtype))
        return torch.cat([rotated(turned, cos, sin), rest], -1)

    return rewrite


class RotatedPart(Cause):
    """A part of each head only."""

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Query and key of each attention that is rotated as a whole."""
        for module, pair in _by_attention(anatomy):
            size, theta = anatomy.tape[pair[0].input].shape[-1], base_of(anatomy, pair[0])
            for dtype, part, whole in product(ROTATED_IN, PARTS, (False, True)):
                if theta is not None and part * size % 2 == 0 and part * size >= 2:
                    turn = based(float(f"{theta:.6g}"), dtype, part=part, whole=whole)
                    detail = f"the first {part * size:.0f} of {size} channels"
                    rewrites = {one.call.number: _bind(turn, one) for one in pair}
                    yield Alteration(where=module, rewrites=rewrites, detail=detail)


PARTS = (0.25, 0.4, 0.5, 0.75)
"""Of each head, that models rotate."""


def _bind(rewrite: Turn, one: Rotation) -> Rewrite:
    return lambda values, call: rewrite(values, one)


@dataclass(frozen=True, kw_only=True)
class Rotated(Cause):
    """The same angles, used in another way."""

    pairs: bool = False
    back: bool = False
    none: bool = False

    def alterations(self, anatomy: Anatomy) -> Iterator[Alteration]:
        """Query and key of each attention."""
        for module, pair in _by_attention(anatomy):
            yield Alteration(where=module, rewrites={one.call.number: _bind(self._turned, one) for one in pair})

    def _turned(self, values: Values, one: Rotation) -> Tensor:
        value = values[one.input]
        cos, sin = (values[ref][..., : value.shape[-1] // 2] for ref in (one.cos, one.sin))
        return value if self.none else rotated(value, cos, -sin if self.back else sin, pairs=self.pairs)


CAUSES: tuple[Cause, ...] = (
    SinusoidLayout(
        name="sinusoid layout",
        what="sines and cosines stand in halves where the reference has them one by one, or the other way round",
        looks="the position table differs by an order of its channels",
        fix="the paper interleaves them; tensor2tensor and what is descended from it have all sines first",
    ),
    RotaryTheta(
        name="rotary theta",
        what="the rotation's angles have another base",
        looks="the first positions agree best, the last ones least",
        fix="rope_theta in the config; some models have another one in local layers",
    ),
    Rotated(
        name="rotary pairing",
        what="neighbouring channels are rotated together, where the reference pairs the two halves",
        looks="position 0 agrees, the others do not",
        fix="the paper pairs neighbours, as GPT-J does; GPT-NeoX, LLaMA and most others pair the two halves",
        pairs=True,
    ),
    Rotated(
        name="rotary direction",
        what="the rotation goes the other way round",
        looks="position 0 agrees; what a query sees before it, it should see after it",
        fix="x cos + rotate_half(x) sin, with rotate_half = (-x2, x1)",
        back=True,
    ),
    RotatedPart(
        name="rotary on a part of the head",
        what="only the first channels of each head are rotated, where the reference rotates them all",
        looks="position 0 agrees, the others do not",
        fix="see partial_rotary_factor, rotary_pct and rotary_dim in the config",
    ),
    Rotated(
        name="rotary missing",
        what="queries and keys are not rotated",
        looks="position 0 agrees, the others do not",
        fix="rotate queries and keys, after the projection and before the product",
        none=True,
    ),
)
