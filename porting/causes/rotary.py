"""Rotations that are not the reference's: other angles, another part, another pairing, none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from porting.causes.cause import Cause, alter, run_with
from porting.causes.fitting import FreeParameter, geometric
from porting.causes.model_parts import ModelParts
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.rotations import (
    THETAS,
    Rotation,
    Scaling,
    Speeds,
    Turn,
    base_of,
    based,
    bind,
    by_attention,
    declared,
    loudness_of,
    rotated,
    scaling_of,
    smoothed,
)
from porting.causes.tape import Call, Ref

ROTATED_IN = (torch.float64, torch.float32)
"""Angles are computed in the working dtype, or in float32 whatever the model computes in."""


def each(pair: list[Rotation], turn: Turn) -> dict[int, Rewrite]:
    """Query and key in another way."""
    return {rotation.whole.number: bind(turn, rotation) for rotation in pair}


class RotaryTheta(Cause):
    """Another base."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Query and key of each attention with each usual base."""
        for module, pair in by_attention(model_parts):
            known, scaling = base_of(model_parts, pair[0]), scaling_of(model_parts, pair[0])
            said = declared(model_parts)
            own = said.theta if known is None and said else scaling.theta if known is None and scaling else known
            explained = [own, *(theta for theta, _ in _ntk(model_parts, pair[0], own))] if own else []
            for theta in (
                theta for theta in THETAS if not any(math.isclose(theta, two, rel_tol=1e-3) for two in explained)
            ):
                for dtype, scaled in product(ROTATED_IN, _ways(model_parts, scaling)):
                    rewrites = each(pair, based(theta, dtype, scaled=scaled))
                    yield Alteration(where=module, rewrites=rewrites, detail=_theta(f"{theta:.12g}", own))

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """Query and key of each attention with any base."""
        for module, pair in by_attention(model_parts):
            known, scaling = base_of(model_parts, pair[0]), scaling_of(model_parts, pair[0])
            said = declared(model_parts)
            own = said.theta if known is None and said else scaling.theta if known is None and scaling else known
            detail = partial(_theta, known=own)
            calls = frozenset(rotation.whole.number for rotation in pair)
            for dtype, scaled in product(ROTATED_IN, _ways(model_parts, scaling)):
                turned = partial(_with_theta, pair, dtype, scaled)
                yield FreeParameter(module, calls, turned, detail, geometric(2.0, 2e8, 4))


def _with_theta(pair: list[Rotation], dtype: torch.dtype, scaled: Speeds, theta: float) -> dict[int, Rewrite]:
    return each(pair, based(theta, dtype, scaled=scaled))


def _theta(theta: str, known: float | None) -> str:
    if known and math.isclose(float(theta), known, rel_tol=1e-5):
        return f"theta is {known:.6g} on both sides, but for how its angles are rounded"
    return f"theta is {theta} where the reference has {f'{known:.6g}' if known else 'scaled angles'}"


def _ways(model_parts: ModelParts, scaling: Scaling | None) -> tuple[Speeds, ...]:
    """Without the reference's scaling, and with it."""
    plain: Speeds = lambda speeds: speeds  # noqa: E731  # the type of two that are alike
    said = declared(model_parts)
    if said is not None:
        return plain, said.speeds()
    if scaling is None:
        return (plain,)
    factor = float(f"{scaling.factor:.6g}")
    return plain, (lambda speeds: speeds / factor) if scaling.linear else partial(smoothed, factor=factor)


def theta_of(model_parts: ModelParts, rotation: Rotation) -> float | None:
    """The base of the reference's angles, scaled or not, as a person would have written it."""
    scaling, said = scaling_of(model_parts, rotation), declared(model_parts)
    found = said.theta if said else scaling.theta if scaling else base_of(model_parts, rotation)
    return None if found is None else float(f"{found:.5g}")


class NtkScaling(Cause):
    """The base scaled by ``factor ** (d / (d - 2))``, d being the channels that are rotated (bloc97 2023)."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Query and key of each attention with a usual factor: in the port alone, and in the reference alone."""
        for module, pair in by_attention(model_parts):
            own = base_of(model_parts, pair[0])
            for theta, detail in () if own is None else _ntk(model_parts, pair[0], own):
                for dtype in ROTATED_IN:
                    yield Alteration(where=module, rewrites=each(pair, based(theta, dtype)), detail=detail)


NTK_FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0)
"""By which contexts are made longer."""


def _ntk(model_parts: ModelParts, rotation: Rotation, own: float) -> Iterator[tuple[float, str]]:
    """The bases that differ from the reference's by a usual factor of NTK scaling."""
    count = model_parts.tape[rotation.input].shape[-1]
    for factor in NTK_FACTORS if count > 2 else ():
        ratio = factor ** (count / (count - 2))
        power = f"{factor:g} ** ({count} / {count - 2})"
        more = _written(own) * ratio, f"theta is multiplied by {power}; the reference's is {own:.6g}"
        less = _written(own / ratio), f"theta is {own / ratio:.6g} where the reference has it multiplied by {power}"
        yield from (way for way in (more, less) if not (_round(own) and _round(way[0])))


def _round(theta: float) -> bool:
    """Whether a base is one that people choose, as 160000 is, whatever it may be a multiple of."""
    return math.isclose(float(f"{theta:.2g}"), theta, rel_tol=1e-5)


def _written(theta: float) -> float:
    """A base as a person would have written it, where it is read of angles in float32."""
    short = float(f"{theta:.4g}")
    return short if math.isclose(short, theta, rel_tol=1e-5) else theta


class ScalingMissing(Cause):
    """The angles of theta alone."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Query and key of each attention whose angles are scaled."""
        for module, pair in by_attention(model_parts):
            scaling = scaling_of(model_parts, pair[0])
            if scaling is not None and (theta := theta_of(model_parts, pair[0])):
                for dtype, loud in product(ROTATED_IN, {1.0, loudness_of(model_parts, pair[0])}):
                    yield Alteration(
                        where=module, rewrites=each(pair, based(theta, dtype, loud=loud)), detail=str(scaling)
                    )


class ScalingOther(Cause):
    """The angles by another factor."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Llama 3's usual numbers; and cosine and sine that are not multiplied, where the reference's are."""
        for module, pair in by_attention(model_parts):
            theta, loud = theta_of(model_parts, pair[0]), loudness_of(model_parts, pair[0])
            if not math.isclose(loud, 1.0):
                detail = f"cosine and sine are not multiplied by {loud:.6g}"
                yield Alteration(where=module, rewrites=each(pair, partial(_quiet, loud=loud)), detail=detail)
            for rotation, dtype in product(_mistyped(model_parts), ROTATED_IN):
                if theta is not None:
                    turn = based(theta, dtype, scaled=rotation.speeds)
                    yield Alteration(where=module, rewrites=each(pair, turn), detail=rotation.says)
            for factor, dtype in product(FACTORS, ROTATED_IN):
                if theta is not None:
                    turn = based(theta, dtype, scaled=partial(smoothed, factor=factor))
                    detail = f"the slow angles are divided by {factor:g}, as Llama 3's are"
                    yield Alteration(where=module, rewrites=each(pair, turn), detail=detail)

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """All angles by a factor."""
        for module, pair in by_attention(model_parts):
            theta, scaling = theta_of(model_parts, pair[0]), scaling_of(model_parts, pair[0])
            calls = frozenset(rotation.whole.number for rotation in pair)
            known = str(scaling) if scaling else "the reference does not scale them"
            for dtype in ROTATED_IN if theta is not None else ():
                turned = partial(_divided, pair, theta or 0.0, dtype)
                yield FreeParameter(
                    module, calls, turned, f"all angles are divided by {{}}; {known}".format, geometric(0.1, 100, 4)
                )


@dataclass(frozen=True)
class _Mistyped:
    speeds: Speeds
    says: str


def _mistyped(model_parts: ModelParts) -> Iterator[_Mistyped]:
    """The scaling that the config declares, with one number as people mistype it."""
    said = declared(model_parts)
    if said is None:
        return
    names = {"factor": said.factor, "low": said.low, "high": said.high, "known": said.known}
    usual = {"factor": (2.0, 4.0, *FACTORS), "low": (0.5, 2.0), "high": (2.0, 8.0), "known": (2048.0, 4096.0, 8192.0)}
    field = {"low": "low_freq_factor", "high": "high_freq_factor", "known": "original_max_position_embeddings"}
    for name, own in names.items():
        for value in (number for number in (*usual[name], own / 2, own * 2) if number != own):
            says = f"{field.get(name, name)} is {value:g} where the reference has {own:g}"
            yield _Mistyped(said.speeds(**{name: value}), says)


FACTORS = (8.0, 16.0, 32.0)
"""Of Llama 3.1, of Llama 4, and of Llama 3.2."""


def _divided(pair: list[Rotation], theta: float, dtype: torch.dtype, factor: float) -> dict[int, Rewrite]:
    return each(pair, based(theta, dtype, scaled=lambda speeds: speeds / factor))


def _quiet(values: Values, rotation: Rotation, loud: float) -> Tensor:
    head = values[rotation.source]
    count = values[rotation.input].shape[-1]
    return torch.cat([rotation.turned(values, head[..., :count]) / loud, head[..., count:]], -1)


@dataclass(frozen=True, kw_only=True)
class RotatedPart(Cause):
    """Another part of each head.

    Attributes:
        all: the whole of it.
    """

    all: bool

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Query and key of each attention."""
        for module, pair in by_attention(model_parts):
            theta = base_of(model_parts, pair[0])
            now, size = (model_parts.tape[ref].shape[-1] for ref in (pair[0].input, pair[0].source))
            for dtype, part, whole in product(ROTATED_IN, (1.0,) if self.all else PARTS, (False, True)):
                count = part * size
                if theta is None or count % 2 or count < 2 or count == now:
                    continue
                turn = based(float(f"{theta:.6g}"), dtype, part=part, whole=whole)
                detail = f"the first {count:.0f} of {size} channels"
                detail = detail if now == size else f"{detail}, where the reference rotates {now}"
                yield Alteration(where=module, rewrites=each(pair, turn), detail=detail)


PARTS = (0.25, 0.4, 0.5, 0.75)
"""Of each head, that models rotate."""


@dataclass(frozen=True, kw_only=True)
class Rotated(Cause):
    """The same angles, used in another way."""

    pairs: bool = False
    back: bool = False
    none: bool = False

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Query and key of each attention."""
        for module, pair in by_attention(model_parts):
            yield Alteration(where=module, rewrites=each(pair, self._turned))
            for place, name in enumerate(("queries", "keys")) if len(pair) > 1 else ():
                yield Alteration(
                    where=module, rewrites=each([pair[place]], self._turned), detail=f"of the {name} alone"
                )

    def _turned(self, values: Values, rotation: Rotation) -> Tensor:
        head, count = values[rotation.source], values[rotation.input].shape[-1]
        if self.none:
            return head
        cos, sin = (rotation.half(values[ref]) for ref in (rotation.cos, rotation.sin))
        turned = rotated(head[..., :count], cos, -sin if self.back else sin, pairs=rotation.pairs != self.pairs)
        return torch.cat([turned, head[..., count:]], -1)


class ValuesRotated(Cause):
    """The values as well."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each attention whose queries and keys are rotated."""
        of = {module: pair[-1] for module, pair in by_attention(model_parts)}
        for attention in model_parts.attentions:
            if attention.where in of and model_parts.tape[attention.value].ndim == 4:
                yield alter(
                    attention.context, self._rotated(attention.value, of[attention.where]), where=attention.where
                )

    @staticmethod
    def _rotated(ref: Ref, turn: Rotation) -> Rewrite:
        def rewrite(values: Values, call: Call) -> Tensor:
            value, count = values[ref], values[turn.input].shape[-1]
            made = torch.cat([turn.turned(values, value[..., :count]), value[..., count:]], -1)
            result: Tensor = run_with(values, call, ref, made)
            return result

        return rewrite


class AroundPadding(Cause):
    """Positions that skip padding, where the reference counts it."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Query and key of each attention, where the batch is padded."""
        mask = model_parts.inputs.get("attention_mask")
        if mask is None or mask.ndim != 2 or bool(mask.all()):
            return
        counted = mask.long().cumsum(-1) - 1
        ways = (counted.clamp_min(0), counted.masked_fill(mask == 0, 1), counted.masked_fill(mask == 0, 0))
        for module, pair in by_attention(model_parts):
            tape = model_parts.tape
            if all(
                tape[ref].numel() == mask.shape[1] * tape[ref].shape[-1]
                for rotation in pair
                for ref in (rotation.cos, rotation.sin)
            ):
                for places in ways:
                    yield Alteration(where=module, rewrites=each(pair, partial(_placed, places=places)))


def _placed(values: Values, rotation: Rotation, places: Tensor) -> Tensor:
    """With the angles of other positions [b s]."""
    head, count = values[rotation.source], values[rotation.input].shape[-1]
    cos, sin = (rotation.half(values[ref]).flatten(0, -2)[places][:, None] for ref in (rotation.cos, rotation.sin))
    return torch.cat([rotated(head[..., :count], cos, sin, pairs=rotation.pairs), head[..., count:]], -1)


CAUSES: tuple[Cause, ...] = (
    RotaryTheta(
        name="rotary theta",
        what="the rotation's angles have another base",
        looks="the first positions agree best, the last ones least",
        fix="rope_theta in the config; some models have another one in local layers",
    ),
    NtkScaling(
        name="rotary NTK scaling",
        what="the base is scaled by factor ** (d / (d - 2)) in the port alone, or in the reference alone",
        looks="the first positions agree best, the last ones least",
        fix="see rope_scaling and rope_parameters in the config; the type dynamic scales long inputs alone",
    ),
    ScalingMissing(
        name="rotary scaling missing",
        what="the rotation's angles are not scaled, where the reference's are",
        looks="the first positions agree best, the last ones least",
        fix="see rope_scaling and rope_parameters in the config: linear, llama3, yarn",
    ),
    ScalingOther(
        name="rotary scaling",
        what="the rotation's angles are scaled in another way than the reference's",
        looks="the first positions agree best, the last ones least",
        fix="see rope_scaling and rope_parameters in the config; many models scale nothing",
    ),
    Rotated(
        name="rotary pairing",
        what="neighbouring channels are rotated together, where the reference pairs the halves, or the other way round",
        looks="position 0 agrees, the others do not",
        fix="the paper pairs neighbours, as GPT-J does; GPT-NeoX, LLaMA and most others pair the two halves",
        pairs=True,
        absorbed_by_weights=True,
    ),
    Rotated(
        name="rotary direction",
        what="the rotation goes the other way round",
        looks="position 0 agrees; what a query sees before it, it should see after it",
        fix="x cos + rotate_half(x) sin, with rotate_half = (-x2, x1)",
        back=True,
        absorbed_by_weights=True,
    ),
    RotatedPart(
        name="rotary on a part of the head",
        what="only the first channels of each head are rotated, and not those that the reference rotates",
        looks="position 0 agrees, the others do not",
        fix="see partial_rotary_factor, rotary_pct and rotary_dim in the config",
        all=False,
    ),
    RotatedPart(
        name="rotary on the whole head",
        what="all channels of each head are rotated, where the reference rotates a part",
        looks="position 0 agrees, the others do not",
        fix="see partial_rotary_factor, rotary_pct and rotary_dim in the config",
        all=True,
    ),
    AroundPadding(
        name="rotary positions counted around padding",
        what="padding is skipped when the positions of the rotation are counted, where the reference counts it",
        looks="nothing in a batch without padding; behind it nothing but the padding's own positions",
        fix="arange(s) for all rows, unless position_ids are given",
    ),
    ValuesRotated(
        name="values rotated",
        what="the values are rotated like queries and keys",
        looks="the probabilities agree, the context does not",
        fix="rotate queries and keys alone",
        absorbed_by_weights=True,
    ),
    Rotated(
        name="rotary missing",
        what="queries or keys are not rotated",
        looks="position 0 agrees, the others do not",
        fix="rotate queries and keys, after the projection and before the product",
        none=True,
    ),
)
