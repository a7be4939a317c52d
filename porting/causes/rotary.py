"""Rotary embeddings that differ from the reference's: other angles, another part of the head, another pairing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from porting.causes.cause import Alterations, Cause, alter, run_with
from porting.causes.fitting import FreeParameter, geometric
from porting.causes.model_parts import ModelParts
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.rotations import (
    FIELDS,
    THETAS,
    Declared,
    Rotate,
    Rotation,
    Scale,
    Scaling,
    amplitude_of,
    base_of,
    based,
    bind,
    by_attention,
    declared,
    rotated,
    scaling_of,
    smoothed,
)
from porting.causes.tape import Call, Ref

ROTATED_IN = (torch.float64, torch.float32)
"""Angles are computed in the working dtype, or always in float32."""


def rotate_both(pair: list[Rotation], rotate: Rotate) -> dict[int, Rewrite]:
    """Return the rewrites of query and key with another rotation."""
    return {rotation.whole.number: bind(rotate, rotation) for rotation in pair}


Rotations = Callable[[ModelParts, list[Rotation]], Iterable[tuple[Rotate, str]]]
"""The parts of a model and the rotations of query and key -> the other rotations, with their details."""


def _rotated_by(rotations: Rotations) -> Alterations:
    """Return the alterations of each attention with other rotations of query and key."""
    return lambda model_parts: (
        Alteration(where=module, rewrites=rotate_both(pair, rotate), detail=detail)
        for module, pair in by_attention(model_parts)
        for rotate, detail in rotations(model_parts, pair)
    )


def _usual_thetas(model_parts: ModelParts, pair: list[Rotation]) -> Iterator[tuple[Rotate, str]]:
    own, scaling = _plain_theta(model_parts, pair[0]), scaling_of(model_parts, pair[0])
    explained = [own, *(theta for theta, _ in _ntk_bases(model_parts, pair[0], own))] if own else []
    for theta in THETAS:
        if not any(math.isclose(theta, other, rel_tol=1e-3) for other in explained):
            for dtype, scaled in product(ROTATED_IN, _scalings(model_parts, scaling)):
                yield based(theta, dtype, scaled=scaled), _theta_detail(f"{theta:.12g}", own)


def _solved_theta(model_parts: ModelParts) -> Iterator[FreeParameter]:
    """Yield the base of each attention."""
    for module, pair in by_attention(model_parts):
        own, scaling = _plain_theta(model_parts, pair[0]), scaling_of(model_parts, pair[0])
        detail = partial(_theta_detail, known=own)
        calls = frozenset(rotation.whole.number for rotation in pair)
        plain, *scalings = _scalings(model_parts, scaling)
        for dtype, scaled in product(ROTATED_IN, (plain, *scalings)):
            rewrites = partial(_with_theta, pair, dtype, scaled, own if scaled is plain and scalings else None)
            yield FreeParameter(module, calls, rewrites, detail, geometric(2.0, 2e8, 4))


def _plain_theta(model_parts: ModelParts, rotation: Rotation) -> float | None:
    """Return the base of the reference's angles, also where they are scaled."""
    known = base_of(model_parts, rotation)
    source = None if known else declared(model_parts) or scaling_of(model_parts, rotation)
    return source.theta if source else known


def _with_theta(
    pair: list[Rotation], dtype: torch.dtype, scaled: Scale, own: float | None, theta: float
) -> dict[int, Rewrite]:
    """Return the rewrites with a base; with one near the reference's ``own``, where that is given, they refuse.

    What differs then is that the reference's frequencies are scaled, which has an entry of its own.
    """
    turn = based(theta, dtype, scaled=scaled)
    return rotate_both(pair, _refused if own is not None and math.isclose(theta, own, rel_tol=0.05) else turn)


def _refused(*given: object) -> Tensor:
    raise ValueError("the reference's own base")


def _theta_detail(theta: str, known: float | None) -> str:
    if known and math.isclose(float(theta), known, rel_tol=1e-5):
        return f"theta is {known:.6g} on both sides, but for how its angles are rounded"
    return f"theta is {theta} where the reference has {f'{known:.6g}' if known else 'scaled angles'}"


def _scalings(model_parts: ModelParts, scaling: Scaling | None) -> tuple[Scale, ...]:
    """Return the plain frequencies, and the reference's scaling."""
    plain: Scale = lambda frequencies: frequencies  # noqa: E731  # an annotation that both branches share
    config = declared(model_parts)
    if config is not None:
        return plain, config.scale()
    if scaling is None:
        return (plain,)
    factor = float(f"{scaling.factor:.6g}")
    return plain, (lambda frequencies: frequencies / factor) if scaling.linear else partial(smoothed, factor=factor)


def theta_of(model_parts: ModelParts, rotation: Rotation) -> float | None:
    """Return the base of the reference's angles, scaled or not, as a person would have written it."""
    source = declared(model_parts) or scaling_of(model_parts, rotation)
    theta = source.theta if source else base_of(model_parts, rotation)
    return None if theta is None else float(f"{theta:.5g}")


def _ntk_scaled(model_parts: ModelParts, pair: list[Rotation]) -> Iterator[tuple[Rotate, str]]:
    """Yield the base scaled by each usual factor, in the port alone and in the reference alone (bloc97 2023)."""
    own = base_of(model_parts, pair[0])
    for theta, detail in () if own is None else _ntk_bases(model_parts, pair[0], own):
        yield from ((based(theta, dtype), detail) for dtype in ROTATED_IN)


NTK_FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0)
"""The usual factors by which contexts are extended."""


def _ntk_bases(model_parts: ModelParts, rotation: Rotation, own: float) -> Iterator[tuple[float, str]]:
    """Yield the bases that differ from the reference's by a usual factor of NTK scaling, with their details."""
    count = model_parts.tape[rotation.input].shape[-1]
    for factor in NTK_FACTORS if count > 2 else ():
        ratio = factor ** (count / (count - 2))
        power = f"{factor:g} ** ({count} / {count - 2})"
        more = _as_written(own) * ratio, f"theta is multiplied by {power}; the reference's is {own:.6g}"
        less = _as_written(own / ratio), f"theta is {own / ratio:.6g} where the reference has it multiplied by {power}"
        yield from (variant for variant in (more, less) if not (_is_round(own) and _is_round(variant[0])))


def _is_round(theta: float) -> bool:
    """Return whether a base is a round number, such as 160000, which need not come from a factor."""
    return math.isclose(float(f"{theta:.2g}"), theta, rel_tol=1e-5)


def _as_written(theta: float) -> float:
    """Return a base as a person would have written it, where it was read off angles in float32."""
    short = float(f"{theta:.4g}")
    return short if math.isclose(short, theta, rel_tol=1e-5) else theta


def _known_scaling(model_parts: ModelParts, rotation: Rotation) -> Scaling | Declared | None:
    return scaling_of(model_parts, rotation) or declared(model_parts)


def _unscaled(model_parts: ModelParts, pair: list[Rotation]) -> Iterator[tuple[Rotate, str]]:
    scaling, theta = _known_scaling(model_parts, pair[0]), theta_of(model_parts, pair[0])
    if scaling is not None and theta:
        for dtype, amplitude in product(ROTATED_IN, {1.0, amplitude_of(model_parts, pair[0])}):
            yield based(theta, dtype, amplitude=amplitude), str(scaling)


def _usual_scalings(model_parts: ModelParts, pair: list[Rotation]) -> Iterator[tuple[Rotate, str]]:
    """Yield the angles without the factor of cosine and sine, with mistyped numbers, and with Llama 3's usual ones."""
    theta, amplitude = theta_of(model_parts, pair[0]), amplitude_of(model_parts, pair[0])
    if not math.isclose(amplitude, 1.0):
        detail = f"cosine and sine are not multiplied by {amplitude:.6g}"
        yield partial(_without_amplitude, amplitude=amplitude), detail
    if theta is not None:
        as_llama: Iterator[tuple[Scale, str]] = (
            (partial(smoothed, factor=factor), f"the slow angles are divided by {factor:g}, as Llama 3's are")
            for factor in FACTORS
        )
        for scaled, detail in (*_mistyped_scalings(model_parts), *as_llama):
            yield from ((based(theta, dtype, scaled=scaled), detail) for dtype in ROTATED_IN)


def _solved_scaling(model_parts: ModelParts) -> Iterator[FreeParameter]:
    """Yield the factor of all frequencies of each attention."""
    for module, pair in by_attention(model_parts):
        theta, scaling = theta_of(model_parts, pair[0]), _known_scaling(model_parts, pair[0])
        calls = frozenset(rotation.whole.number for rotation in pair)
        known = str(scaling) if scaling else "the reference does not scale them"
        for dtype in ROTATED_IN if theta is not None else ():
            rewrites = partial(_divided, pair, theta or 0.0, dtype)
            detail = f"all angles are divided by {{}}; {known}".format
            yield FreeParameter(module, calls, rewrites, detail, geometric(0.1, 100, 4))


def _mistyped_scalings(model_parts: ModelParts) -> Iterator[tuple[Scale, str]]:
    """Yield the scaling of the config with one number as people mistype it, with its details."""
    config = declared(model_parts)
    if config is None:
        return
    usual = {"factor": (2.0, 4.0, *FACTORS), "low": (0.5, 2.0), "high": (2.0, 8.0), "known": (2048.0, 4096.0, 8192.0)}
    for (name, own), field in zip(config.numbers.items(), FIELDS[1:], strict=True):
        for value in (number for number in (*usual[name], own / 2, own * 2) if number != own):
            detail = f"{field} is {value:g} where the reference has {own:g}"
            yield config.scale(**{name: value}), detail


FACTORS = (8.0, 16.0, 32.0)
"""The factors of Llama 3.1, Llama 4 and Llama 3.2."""


def _divided(pair: list[Rotation], theta: float, dtype: torch.dtype, factor: float) -> dict[int, Rewrite]:
    return rotate_both(pair, based(theta, dtype, scaled=lambda frequencies: frequencies / factor))


def _without_amplitude(values: Values, rotation: Rotation, amplitude: float) -> Tensor:
    return rotation.in_head(values, lambda channels: rotation.rotate(values, channels) / amplitude)


def _rounded(model_parts: ModelParts, pair: list[Rotation]) -> Iterator[tuple[Rotate, str]]:
    """Yield frequencies, angles, and cosines and sines that are rounded to a half-precision dtype."""
    theta, scaling = _plain_theta(model_parts, pair[0]), scaling_of(model_parts, pair[0])
    for low in (torch.bfloat16, torch.float16):
        yield partial(_by_rounded_table, low=low), f"cosine and sine are rounded to {low}"
        for dtype, scaled in product(ROTATED_IN, _scalings(model_parts, scaling) if theta else ()):
            base = partial(based, _as_written(theta or 0.0), dtype)
            yield base(scaled=partial(_rounded_to, scaled, low)), f"the inverse frequencies are rounded to {low}"
            yield base(scaled=scaled, angles_in=low), f"the angles are rounded to {low}"


def _rounded_to(scaled: Scale, low: torch.dtype, frequencies: Tensor) -> Tensor:
    return scaled(frequencies).to(low).to(frequencies.dtype)


def _by_rounded_table(values: Values, rotation: Rotation, low: torch.dtype) -> Tensor:
    cos, sin = (part.to(low).to(part.dtype) for part in rotation.halves(values))
    return rotation.in_head(values, lambda channels: rotated(channels, cos, sin, pairs=rotation.pairs))


def _part(*parts: float) -> Rotations:
    """Return the rotations of these parts of each head."""

    def rotations(model_parts: ModelParts, pair: list[Rotation]) -> Iterator[tuple[Rotate, str]]:
        theta = base_of(model_parts, pair[0])
        own, size = (model_parts.tape[ref].shape[-1] for ref in (pair[0].input, pair[0].source))
        instead = "" if own == size else f", where the reference rotates {own}"
        for dtype, part, whole in product(ROTATED_IN, parts, (False, True)):
            count = part * size
            if theta is not None and count % 2 == 0 and count >= 2 and count != own:
                rotate = based(float(f"{theta:.6g}"), dtype, part=part, whole=whole)
                yield rotate, f"the first {count:.0f} of {size} channels{instead}"

    return rotations


def _usual_parts(model_parts: ModelParts, pair: list[Rotation]) -> Iterator[tuple[Rotate, str]]:
    """Yield the usual numbers of first channels, and as many last ones as the reference rotates of the first."""
    yield from _part(*PARTS)(model_parts, pair)
    own, size = (model_parts.tape[ref].shape[-1] for ref in (pair[0].input, pair[0].source))
    if own < size:
        yield _last_rotated, f"the last {own} of {size} channels, where the reference rotates the first"


def _last_rotated(values: Values, rotation: Rotation) -> Tensor:
    head, count = values[rotation.source], values[rotation.input].shape[-1]
    return torch.cat([head[..., :-count], rotation.rotate(values, head[..., -count:])], -1)


PARTS = (0.25, 0.4, 0.5, 0.75)
"""The usual parts of a head that are rotated."""


def _together_and_alone(rotate: Rotate) -> Alterations:
    """Return the alterations of each attention with another rotation of query and key together, and of each alone."""

    def alterations(model_parts: ModelParts) -> Iterator[Alteration]:
        for module, pair in by_attention(model_parts):
            yield Alteration(where=module, rewrites=rotate_both(pair, rotate))
            for rotation, name in zip(pair, ("queries", "keys"), strict=False) if len(pair) > 1 else ():
                rewrites = rotate_both([rotation], rotate)
                yield Alteration(where=module, rewrites=rewrites, detail=f"of the {name} alone")

    return alterations


def _not_rotated(values: Values, rotation: Rotation) -> Tensor:
    return values[rotation.source]


def _turned(values: Values, rotation: Rotation, *, pairs: bool = False, back: bool = False) -> Tensor:
    """Rotate by the reference's angles, with channels paired in the other way, or in the opposite direction."""
    cos, sin = rotation.halves(values)
    other, sin = rotation.pairs != pairs, -sin if back else sin
    return rotation.in_head(values, lambda channels: rotated(channels, cos, sin, pairs=other))


def _mixed_pairings(model_parts: ModelParts, pair: list[Rotation]) -> Iterator[tuple[Rotate, str]]:
    """Yield either pairing, with cosines and sines that lie as for the other."""
    for neighbours, paired, laid in ((True, "neighbours", "halves"), (False, "halves", "neighbours")):
        detail = f"pairs of {paired}, with cosines and sines for pairs of {laid}"
        yield partial(_rotated_mixed, neighbours=neighbours), detail


def _rotated_mixed(values: Values, rotation: Rotation, *, neighbours: bool) -> Tensor:
    """Pairs of neighbours with angles that lie as for pairs of one channel of each half, or the reverse."""
    cos, sin = rotation.halves(values)

    def mixed(channels: Tensor) -> Tensor:
        if neighbours:
            turned = torch.stack([-channels[..., 1::2], channels[..., ::2]], -1).flatten(-2)
            return channels * torch.cat([cos, cos], -1) + turned * torch.cat([sin, sin], -1)
        first, second = channels.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return channels * cos.repeat_interleave(2, -1) + turned * sin.repeat_interleave(2, -1)

    return rotation.in_head(values, mixed)


def _values_rotated(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each attention whose queries and keys are rotated, with its values rotated as well."""
    by_module = {module: pair[-1] for module, pair in by_attention(model_parts)}
    for attention in model_parts.attentions:
        if attention.where in by_module and model_parts.tape[attention.value].ndim == 4:
            rewrite = _with_rotated_value(attention.value, by_module[attention.where])
            yield alter(attention.context, rewrite, where=attention.where)


def _with_rotated_value(ref: Ref, rotation: Rotation) -> Rewrite:
    def rewrite(values: Values, call: Call) -> Tensor:
        value, count = values[ref], values[rotation.input].shape[-1]
        made = torch.cat([rotation.rotate(values, value[..., :count]), value[..., count:]], -1)
        result: Tensor = run_with(values, call, ref, made)
        return result

    return rewrite


def _around_padding(model_parts: ModelParts, pair: list[Rotation]) -> Iterator[tuple[Rotate, str]]:
    """Yield the positions of a padded batch counted without padding."""
    mask, tape = model_parts.inputs.get("attention_mask"), model_parts.tape
    if mask is None or mask.ndim != 2 or bool(mask.all()):
        return
    angles = [tape[ref] for rotation in pair for ref in (rotation.cos, rotation.sin)]
    if all(one.numel() == mask.shape[1] * one.shape[-1] for one in angles):
        position_of = mask.long().cumsum(-1) - 1
        padding = mask == 0
        for positions in (
            position_of.clamp_min(0),
            position_of.masked_fill(padding, 1),
            position_of.masked_fill(padding, 0),
        ):
            yield partial(_at_positions, positions=positions), ""


def _at_positions(values: Values, rotation: Rotation, positions: Tensor) -> Tensor:
    """Rotate by the angles of other positions, [b s]."""
    cos, sin = (half.flatten(0, -2)[positions][:, None] for half in rotation.halves(values))
    return rotation.in_head(values, lambda channels: rotated(channels, cos, sin, pairs=rotation.pairs))


CAUSES: tuple[Cause, ...] = (
    Cause(
        name="rotary theta",
        what="the rotation's angles have a different base",
        looks="the difference grows with the position",
        fix="rope_theta in the config; some models have a different one in local layers",
        alterations=_rotated_by(_usual_thetas),
        free_parameters=_solved_theta,
    ),
    Cause(
        name="rotary angles in half precision",
        what="the rotation's frequencies, angles or their cosines and sines are rounded to float16 or bfloat16",
        looks="a small difference that grows with the position",
        fix="compute inv_freq, angles, cosine and sine in float32 and cast after that; no .half() on their buffers",
        alterations=_rotated_by(_rounded),
    ),
    Cause(
        name="rotary NTK scaling",
        what="the base is scaled by factor ** (d / (d - 2)) only in the port, or only in the reference",
        looks="the difference grows with the position",
        fix="see rope_scaling and rope_parameters in the config; the type dynamic scales only long inputs",
        alterations=_rotated_by(_ntk_scaled),
    ),
    Cause(
        name="rotary scaling missing",
        what="the rotation's angles are not scaled, unlike in the reference",
        looks="the difference grows with the position",
        fix="see rope_scaling and rope_parameters in the config: linear, llama3, yarn",
        alterations=_rotated_by(_unscaled),
    ),
    Cause(
        name="rotary scaling",
        what="the rotation's angles are scaled differently than in the reference",
        looks="the difference grows with the position",
        fix="see rope_scaling and rope_parameters in the config; many models scale nothing",
        alterations=_rotated_by(_usual_scalings),
        free_parameters=_solved_scaling,
    ),
    Cause(
        name="rotary pairing",
        what="neighbouring channels are rotated as pairs and the reference pairs the two halves, or vice versa",
        looks="position 0 agrees, the others do not",
        fix="the paper pairs neighbours, as GPT-J does; GPT-NeoX, LLaMA and most others pair the two halves",
        alterations=_together_and_alone(partial(_turned, pairs=True)),
        absorbed_by_weights=True,
    ),
    Cause(
        name="rotary angles of the other pairing",
        what="cosines and sines lie as for another pairing of channels: the two of a pair turn by different angles",
        looks="position 0 agrees, the others do not, whatever the weights are",
        fix="angles.repeat_interleave(2, -1) for pairs of neighbours, cat([angles, angles], -1) for pairs of halves",
        alterations=_rotated_by(_mixed_pairings),
    ),
    Cause(
        name="rotary direction",
        what="the rotation has the opposite direction",
        looks="position 0 agrees; relative positions have the wrong sign",
        fix="x cos + rotate_half(x) sin, with rotate_half = (-x2, x1)",
        alterations=_together_and_alone(partial(_turned, back=True)),
        absorbed_by_weights=True,
    ),
    Cause(
        name="rotary on a part of the head",
        what="a different number of each head's first channels is rotated, or the last ones are",
        looks="position 0 agrees, the others do not",
        fix="see partial_rotary_factor, rotary_pct and rotary_dim in the config",
        alterations=_rotated_by(_usual_parts),
    ),
    Cause(
        name="rotary on the whole head",
        what="all channels of each head are rotated; the reference rotates only a part",
        looks="position 0 agrees, the others do not",
        fix="see partial_rotary_factor, rotary_pct and rotary_dim in the config",
        alterations=_rotated_by(_part(1.0)),
    ),
    Cause(
        name="rotary positions counted around padding",
        what="padding is skipped when the positions of the rotation are counted, unlike in the reference",
        looks="no difference without padding; with padding on the right only its own positions differ",
        fix="arange(s) for all rows, unless position_ids are given",
        alterations=_rotated_by(_around_padding),
    ),
    Cause(
        name="values rotated",
        what="the values are rotated like queries and keys",
        looks="the probabilities agree, the context does not",
        fix="rotate only queries and keys",
        alterations=_values_rotated,
    ),
    Cause(
        name="rotary missing",
        what="queries or keys are not rotated",
        looks="position 0 agrees, the others do not",
        fix="rotate queries and keys between the projection and their product",
        alterations=_together_and_alone(_not_rotated),
    ),
)
