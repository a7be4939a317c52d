"""What a forward's inputs change in what it returns: masked tokens, other rows, what stands behind a token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from porting.errors import Code, Fault, VerifyError
from porting.frames import place_of
from porting.printable import dtype_name
from porting.suggesting.subjects.argument_names import ArgumentMapping
from porting.suggesting.subjects.guarded_run import STAY
from porting.suggesting.subjects.operation_trace import numbers_of
from porting.suggesting.subjects.sampler import BATCH, OTHERS, Sampler
from porting.tracing.float64 import forced_float64
from porting.trials.derived_inputs import LENGTHS
from porting.trials.modalities import DECODER, DECODER_IDS, IDS, POSITIONS
from porting.trials.padding import DECODER_MASK, MASK, hides_token

PADDED, ROWS, ALONE, IGNORES_TOKENS, NONE = "padded", "rows", "alone", "ignores tokens", "no numbers"
AHEAD = "sees what stands behind"
GAP = "a masked token changes those behind it"


def is_steady(module: nn.Module, way: ArgumentMapping, sampler: Sampler) -> bool:
    """Whether two calls on one batch give the same."""
    inputs = sampler.batch(way.named)
    return same_numbers(outputs_of(module, way, inputs), outputs_of(module, way, inputs))


def same_numbers(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two calls gave the same; NaN is equal to NaN."""
    return len(some) == len(others) and all(
        one.shape == two.shape and torch.equal(one.nan_to_num(), two.nan_to_num())
        for one, two in zip(some, others, strict=True)
    )


def faults_seen(
    module: Callable[[], nn.Module], way: ArgumentMapping, sampler: Sampler, *, causal: bool = False
) -> set[str]:
    """The faults of a way: masked tokens change others, rows change each other, or tokens change nothing.

    Where the reference is causal, it is wrong as well that a word changes what is computed in front of it: a mask that
    a forward takes may replace the causal one that it makes by itself.  What it does with the mask shows at a token
    between others then.

    Numbers that are none count as wrong in every respect.  Each call is made on what ``module`` gives.
    """
    inputs = sampler.batch(way.named)
    kept = torch.ones(BATCH, sampler.length, dtype=torch.bool)
    kept[0, -2:] = kept[1, -3:] = False
    if MASK in inputs:
        inputs[MASK] = kept.long()

    def changed(where: Tensor) -> list[Tensor]:
        other = torch.where(where, sampler.others(inputs[IDS]), inputs[IDS])
        return outputs_of(module(), way, {**inputs, IDS: other})

    def decoded() -> list[Tensor]:
        ids = inputs[DECODER_IDS].clone()
        ids[:, -1:] = sampler.others(ids)[:, -1:]
        return outputs_of(module(), way, {**inputs, DECODER_IDS: ids})

    def differ(others: list[Tensor], where: Tensor) -> bool:
        return any(_differ(a, b, where, sampler.length) for a, b in zip(base, others, strict=True))

    base = outputs_of(module(), way, inputs)
    first, last, start = (torch.zeros_like(kept) for _ in range(3))
    first[0], last[-1], start[:, sampler.front] = True, True, True
    later = kept & ~start
    found = set()
    if not all(bool(torch.isfinite(one).all()) for one in base) and _differ_any(base, kept):
        return {PADDED, ROWS, NONE}
    if differ(changed(~kept), kept):
        found.add(PADDED)
    if any(differ(changed(row), kept & ~row) for row in (last, first)):  # causal attention over rows spares the first
        found.add(ROWS)
    begun = changed(start)
    if not differ(begun, later):
        found.add(ALONE if differ(begun, kept) else IGNORES_TOKENS)
    end, before = torch.zeros_like(kept), torch.zeros_like(kept)
    end[2, -1] = before[2, :-1] = True
    if causal and differ(changed(end), before):
        found.add(AHEAD)
    if DECODER_IDS in inputs and _looks_ahead(base, decoded()):
        found.add(AHEAD)
    masks = [one for one in (MASK if causal else "", DECODER_MASK) if one in inputs]
    if PADDED not in found and not all(_hides_between(module, way, inputs, one, sampler) for one in masks):
        found.add(GAP)
    return found


def _hides_between(
    module: Callable[[], nn.Module], way: ArgumentMapping, inputs: Mapping[str, Tensor], mask: str, sampler: Sampler
) -> bool:
    """Whether a token that a mask hides changes none behind it: padding at a row's end shows none of a causal mask.

    Lengths hide no token between others.
    """
    if any(theirs.startswith((LENGTHS, DECODER + LENGTHS)) for theirs, _ in way.rules):
        return True
    ids, at = (DECODER_IDS, 1) if mask == DECODER_MASK else (IDS, sampler.front + 2)  # a token in front of it is seen
    if ids not in inputs:
        return True
    kept, changed = torch.ones_like(inputs[ids]), inputs[ids].clone()
    kept[:, at] = 0
    changed[:, at] = sampler.others(inputs[ids])[:, at]
    try:
        pairs = [outputs_of(module(), way, {**inputs, mask: kept, ids: one}) for one in (inputs[ids], changed)]
    except Exception:  # noqa: BLE001  # the user's own forward may raise anything
        return False
    shape = (len(kept), kept.shape[1])
    rows = [
        [value.transpose(0, 1) if value.shape[:2] == shape[::-1] else value for value in values]
        for values in ([_by_row(one, shape) for one in pair] for pair in zip(*pairs, strict=True))
    ]
    seen = kept.bool()
    return not any(
        _far(one[seen], other[seen]) or not bool(torch.isfinite(one[seen]).all())
        for one, other in rows
        if one.shape[:2] == shape and one.ndim == 3
    )


def is_index(module: Callable[[], nn.Module], way: ArgumentMapping, role: str, sampler: Sampler) -> bool:
    """Whether what a way gives for one of the reference's inputs, [b s], are rows of a table or places in a row.

    Other ones change what is returned for a token, and numbers that are not whole are refused as rows; or they are
    places of which only the distances count.

    Args:
        role: positions or segments.
    """
    inputs = sampler.batch(way.named)
    given, kept = inputs[role], torch.ones(BATCH, sampler.length, dtype=torch.bool)

    def differs(other: Tensor) -> bool:
        outputs = outputs_of(module(), way, {**inputs, role: other})
        return any(_differ(one, two, kept, sampler.length) for one, two in zip(base, outputs, strict=True))

    base = outputs_of(module(), way, inputs)
    if not differs(given.roll(1, -1)):
        return False
    try:
        distances = role == POSITIONS and not differs(given + 2) and differs(2 * given)
    except Exception:  # noqa: BLE001  # a table may have fewer rows
        distances = False
    try:
        outputs_of(module(), way, {**inputs, role: given.double()})
    except Exception:  # noqa: BLE001  # the user's own forward may raise anything
        return True
    return distances


def excused_faults(sampler: Sampler, *, causal: bool = False) -> frozenset[str]:
    """The faults of the reference too: MobileBERT's embeddings of masked tokens' neighbours read these."""
    if sampler.reference is None or not {IDS, MASK} <= {*sampler.available}:
        return frozenset()
    way = ArgumentMapping(rules=tuple((name, name) for name in sampler.available if name != POSITIONS))
    reference = sampler.reference
    try:
        return frozenset(faults_seen(lambda: reference, way, sampler, causal=causal)) & {PADDED, GAP}
    except Exception:  # noqa: BLE001  # what the reference refuses is not an excuse
        return frozenset()


CLEARLY, AT_ALL = 1e-6, 1e-12
"""A token changes an output clearly, or not at all: relative to the output's scale."""


def sees_later(
    run: Callable[[Mapping[str, Tensor]], Sequence[Tensor]],
    inputs: Mapping[str, Tensor],
    *,
    earlier: bool = False,
    front: int = 0,
) -> bool | None:
    """Whether a token changes what is computed in front of it; of a decoder's tokens, where there is one.

    Args:
        run: gives the numbers that a model returns.
        inputs: a batch without padding, [b s].
        earlier: whether it changes what is computed behind it, instead.
        front: how many tokens at the start of a row stand for something else.

    Returns:
        None where no output has a row for each token, or the change is too small to say.
    """
    name = DECODER_IDS if DECODER_IDS in inputs else IDS
    if name not in inputs:
        return None
    ids, other = inputs[name], inputs[name].clone()
    front = front if name == IDS else 0
    at, rest = (front, slice(front + 1, None)) if earlier else (-1, slice(None, -1))
    free = other[:, front + 2 : front + 4]  # of the vocabulary, and one of the two is another one
    other[:, at] = torch.where(other[:, at] == free[:, 0], free[:, 1], free[:, 0])
    changes = []
    pairs = zip(run(inputs), run({**inputs, name: other}), strict=True)
    for before, after in ([_by_row(one, tuple(ids.shape)) for one in pair] for pair in pairs):
        if before.shape[:2] == ids.shape and before.ndim == 3:  # [b t e]; scores may be [b h q k] of as many heads
            scale = float(before.abs().max())
            changes.append(float((before - after)[:, rest].abs().max()) / (scale or 1.0))
    if not changes or not all(map(math.isfinite, changes)):
        return None
    return True if max(changes) > CLEARLY else False if max(changes) <= AT_ALL else None


def _looks_ahead(base: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether outputs of a decoder [b t ...] change in front of its last token, which is another one."""
    pairs = ([_by_row(one, (BATCH, OTHERS)) for one in pair] for pair in zip(base, others, strict=True))
    shaped = ((one, other) for one, other in pairs if one.shape[:2] == (BATCH, OTHERS) and one.ndim == 3)
    return any(_far(one[:, :-1], other[:, :-1]) for one, other in shaped)


def _by_row(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An output [b t e], where it has its rows one after the other, [(b t) e]."""
    flat = value.ndim == 2 and len(value) == math.prod(shape)
    return value.reshape(*shape, value.shape[-1]) if flat else value


def _differ_any(values: list[Tensor], where: Tensor) -> bool:
    """Whether some number at these positions is none."""
    return any(not bool(torch.isfinite(one[where]).all()) for one in values if one.shape[:2] == where.shape)


def hides_padding(module: nn.Module, way: ArgumentMapping, sampler: Sampler) -> bool:
    """Whether the module hides the padding token by itself, though it is given no mask."""
    inputs = sampler.batch(way.named)
    if IDS not in inputs or sampler.front:
        return False
    return hides_token(lambda ids: outputs_of(module, way, {**inputs, **ids}), {IDS: inputs[IDS]}, sampler.padding)


def outputs_of(module: nn.Module, way: ArgumentMapping, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """The numbers that a forward returns for the reference's inputs."""
    with torch.no_grad(), forced_float64(module):
        returned = way.adapted(module)(**way.given({name: value.clone() for name, value in inputs.items()}))
    return comparable(module, returned)


def comparable(module: nn.Module, returned: object) -> list[Tensor]:
    """The numbers that a forward returned.

    Raises:
        VerifyError: there are none, or they are elsewhere.
    """
    title, where = f"{type(module).__name__}.forward", place_of(module.forward)
    found = numbers_of(returned)
    away = next((one.device for one in found if one.device.type != "cpu"), None)
    if away is not None:
        message = f"{title} moves data to another device: what it returns is on {away}"
        hint = STAY
        raise VerifyError(Fault(code=Code.FORWARD_FAILED, where=where, message=message, hint=hint))
    if not found:
        message = f"{title} returns no tensor of floating-point numbers, but {_kind(returned)}"
        raise VerifyError(Fault(code=Code.FORWARD_FAILED, where=where, message=message, hint="return its activations"))
    return found


def _kind(returned: object) -> str:
    if isinstance(returned, Tensor):
        return f"one of {dtype_name(returned.dtype)}"
    return "None" if returned is None else type(returned).__name__


def _differ(one: Tensor, other: Tensor, where: Tensor, length: int) -> bool:
    """Whether two outputs differ at these positions, [b s]; an output without positions by its rows.

    Args:
        length: of a row.
    """
    if one.shape != other.shape:
        return True
    for axes in ((0, 1), (1, 0), *(((0, 2),) if one.ndim == 3 else ())):  # tokens last: features are in front of them
        if one.ndim > 1 and tuple(one.shape[axis] for axis in axes) == (BATCH, length):
            return _far(one.movedim(axes, (0, 1))[where], other.movedim(axes, (0, 1))[where])
    if one.ndim == 2 and len(one) in {BATCH * length, BATCH * OTHERS}:  # rows one after the other
        parts = [value.reshape(BATCH, -1, value.shape[-1]) for value in (one, other)]
        turned = [value.reshape(-1, BATCH, value.shape[-1]).transpose(0, 1) for value in (one, other)]
        return _differ(parts[0], parts[1], where, length) and _differ(turned[0], turned[1], where, length)
    rows = where.any(1)
    if one.ndim and one.shape[0] == BATCH and length not in one.shape[1:]:
        return _far(one[rows], other[rows])
    return False


def _far(one: Tensor | None, other: Tensor) -> bool:
    return one is None or not torch.allclose(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)
