"""Tell the places of an activation that belong to tokens from padding, and whether a model finds padding by itself.

The values at padded places are free as long as no output depends on them: one port sets them to zero, another leaves
them out, a third computes them.  So padded places are measured by themselves, and a difference there is not an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from porting.tracing.torch_modes import DispatchMode
from porting.tracing.trace import PROBABILITIES, SCORES, Point, is_returned, output_of, split

MASK, DECODER_MASK = "attention_mask", "decoder_attention_mask"

TOKENS, QUERIES = 2, 4
"""Axes of a mask [b s], and of what attention computes, [b h q k]."""


FEW_TOKENS = (2, 3, 4)
"""Rows of so many tokens are given every mask that there is."""

EVERY_MASK = "every mask of a short row"

SAME_COUNT = "rows that keep as many tokens at other places"


NO_PADDING, RIGHT_PADDING = "no padding", "right padding"
USUAL_MASKS = (NO_PADDING, RIGHT_PADDING)
"""The names of the masks that every tokenizer makes by default."""

IN_DECODER = " in the decoder"
"""Ends the name of a trial with a mask that is the decoder's."""


def masks(width: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Masks of rows ``[b s]``, 1 = attend, each with what it is; each keeps a place in every row but the last one's."""
    yield NO_PADDING, torch.ones(2, width, dtype=torch.long)
    if width < 3:  # too short to be padded on either side
        return
    places = torch.arange(width)
    lengths = torch.tensor([width, width - 2, max(width // 2, 1), 1])[:, None]
    yield RIGHT_PADDING, (places < lengths).long()
    yield "left padding", (places >= width - lengths).long()
    yield "the last place hidden in every row", (places < width - 1).long().expand(2, -1).clone()
    yield "the first two places hidden in every row", (places > 1).long().expand(2, -1).clone()
    gaps = torch.ones(4, width, dtype=torch.long)
    gaps[0, width // 2] = 0
    gaps[1, 1::2] = 0
    gaps[2, 1:-1] = 0
    gaps[3, 1:-1:2] = 0
    yield "gaps", gaps
    drawn = torch.randint(0, 2, (4, width), generator=generator)
    drawn[torch.arange(4), torch.randint(0, width, (4,), generator=generator)] = 1
    yield "random masks", drawn
    hidden = torch.ones(4, width, dtype=torch.long)
    hidden[1] = 0
    hidden[2, width - 2 :] = 0
    hidden[3, :2] = 0
    yield "a row that is all padding", hidden


def every_mask(width: int) -> Tensor:
    """Every mask of a row that keeps a token, ``[2 ** width - 1, width]``."""
    numbers = torch.arange(1, 2**width)[:, None]
    return (numbers >> torch.arange(width)) & 1


def alike(width: int) -> Tensor:
    """Rows that keep half of their tokens, each at other places: padded on the right, on the left, and with gaps."""
    first = (torch.arange(width) < width // 2).long()
    gaps = torch.zeros_like(first)
    gaps[: 2 * (width // 2) : 2] = 1
    return torch.stack([first, first.flip(0), gaps])


def attended(inputs: Mapping[str, Tensor], point: Point, shape: tuple[int, ...]) -> Tensor | None:
    """The places of one of the reference's activations that the mask keeps.

    Args:
        inputs: what the reference is given; ``attention_mask`` and ``decoder_attention_mask`` are [b s], 1 = attend.
        shape: of its value: [b s ...], or [b h s ...] with heads, as inside of attention, or [b ...].

    Returns:
        True where a place counts, of ``shape``; None where all do.  Nothing of a row that is all padding counts, on
        either side of an encoder-decoder.
    """
    masks = {name: _rows(inputs[name]) for name in _order(point) if name in inputs}
    output = output_of(point)
    inside = output in {SCORES, PROBABILITIES} and len(shape) == QUERIES
    whole = [mask.any(1) for mask in masks.values() if shape and len(mask) == shape[0]]  # a row that is all padding
    rows = torch.stack(whole).all(0) if whole else None
    seen = [mask & rows[:, None] if rows is not None and len(mask) == len(rows) else mask for mask in masks.values()]
    queries_first = inside or (_ATTENTIONS in output and len(shape) == QUERIES)  # never [b s ...], however many heads
    of_tokens = [mask for mask in seen if not queries_first and tuple(shape[:TOKENS]) == tuple(mask.shape)][:1]
    # Heads stand in front of places, [b h s ...], as behind the dropout of probabilities.
    of_queries = [mask for mask in seen if len(shape) == QUERIES and (shape[0], shape[2]) == tuple(mask.shape)][:1]
    places = [_along(mask, 0, 1, shape) for mask in of_tokens] + [_along(mask, 0, 2, shape) for mask in of_queries]
    if not places and is_returned(point) and len(shape) >= QUERIES:  # of stacked layers, [l b s ...] or [l b h s ...]
        places = [_along(mask, 1, axis, shape) for mask in seen for axis in (2, 3) if _lies(mask, 1, axis, shape)][:1]
    if places:  # as many heads as tokens: either axis may be that of tokens
        kept_places = torch.stack(places).all(0) if len(places) > 1 else places[0]
        return None if kept_places.all() else kept_places
    if rows is None or inside or rows.all():
        return None
    return rows.view(-1, *[1] * (len(shape) - 1)).expand(shape)


def _lies(mask: Tensor, rows: int, tokens: int, shape: tuple[int, ...]) -> bool:
    """Whether these axes of a shape have the sizes of a mask [b s]."""
    return len(shape) > tokens + 1 and (shape[rows], shape[tokens]) == tuple(mask.shape)


def _along(mask: Tensor, rows: int, tokens: int, shape: tuple[int, ...]) -> Tensor:
    """A mask [b s] along two axes of a shape."""
    sizes = [1] * len(shape)
    sizes[rows], sizes[tokens] = mask.shape
    return mask.view(sizes).expand(shape)


_ATTENTIONS = "attentions"
"""How the names of attention weights end that a model of transformers returns: ``cross_attentions``."""


def _order(point: Point) -> tuple[str, str]:
    """The masks that may belong to a point, the likelier one first: a decoder's parts and outputs say so."""
    name = split(point)[0]
    of_encoder = "encoder" in name and "decoder" not in name
    return (MASK, DECODER_MASK) if of_encoder else (DECODER_MASK, MASK)


def _rows(mask: Tensor) -> Tensor:
    """The mask as [b s] of bool; one with choices, [b c s], as the rows that the model makes of it."""
    flat = mask.reshape(-1, mask.shape[-1]) if mask.ndim > TOKENS else mask
    return flat != 0 if flat.ndim == TOKENS else torch.ones(1, 1, dtype=torch.bool)


def kept(value: Tensor, inputs: Mapping[str, Tensor], point: Point) -> Tensor:
    """The value at the places that are not padding."""
    seen = attended(inputs, point, tuple(value.shape))
    return value if seen is None else value[seen]


def hides_token(run: Callable[[Mapping[str, Tensor]], Sequence[Tensor]], ids: Mapping[str, Tensor], token: int) -> bool:
    """Whether a model that is given no mask hides a token by itself, as padding is hidden.

    Then it does not matter to any other place what that token's embedding is; what another token's is does matter.

    Args:
        run: gives the model's outputs for token ids.
        ids: the model's inputs that are token ids, [b s], by name; what they hold is replaced.
    """
    used = {int(one) for value in ids.values() for one in value.flatten()} - {token}
    if len(used) < 2 or any(value.shape[-1] <= EVERY for value in ids.values()):
        return False
    other, *rest = sorted(used)
    filled = {name: torch.where((value == token) | (value == other), rest[-1], value) for name, value in ids.items()}
    try:
        return not _matters(run, filled, token) and _matters(run, filled, other)
    except _NotLookedUpError:
        return False


EVERY = 3
"""A token that is looked at stands at each so-manieth place, from the second one on: within rows and at their ends."""


class _NotLookedUpError(Exception):
    """The model looks no embedding up by the token ids as they are given."""


def _matters(run: Callable[[Mapping[str, Tensor]], Sequence[Tensor]], ids: Mapping[str, Tensor], token: int) -> bool:
    """Whether what is computed at other places depends on the embedding of a token that is put between them."""
    placed = {name: value.clone() for name, value in ids.items()}
    for value in placed.values():
        value[..., 1::EVERY] = token
    first, changed = run(placed), _OtherEmbedding(placed.values(), token)
    with changed:
        second = run(placed)
    if not changed.seen:
        raise _NotLookedUpError
    kept = [value.reshape(-1, value.shape[-1]) != token for value in placed.values()]
    pairs = ((one.double(), two.double()) for one, two in zip(first, second, strict=True) if one.is_floating_point())
    return any(_apart(one, two, kept) for one, two in pairs)


def _apart(one: Tensor, other: Tensor, kept: Sequence[Tensor]) -> bool:
    """Whether two outputs differ where tokens stand that are looked at; where they have no places, anywhere."""
    for mask in kept:
        for turned in (False, True):
            if one.shape[:2] == (mask.T if turned else mask).shape:
                where = mask.T if turned else mask
                return not torch.allclose(one[where], other[where], rtol=SAME, atol=SAME, equal_nan=True)
    return not torch.allclose(one, other, rtol=SAME, atol=SAME, equal_nan=True)


SAME = 1e-9
"""Outputs in float64 that are closer were computed from the same."""


class _OtherEmbedding(DispatchMode):
    """Gives one token another embedding wherever it is looked up, whatever module or function does it.

    A mode of torch's operations, because tables are looked up by modules, by functions and by ``table[ids]``.

    Args:
        ids: the token ids that the model is given; a lookup by other numbers, as positions, is left alone.
        token: the token.

    Attributes:
        seen: some embedding was looked up.
    """

    def __init__(self, ids: Iterable[Tensor], token: int) -> None:
        super().__init__()
        self._ids = [one.reshape(-1, one.shape[-1]) for one in ids]
        self._token = token
        self.seen = False

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """Change what a lookup gives."""
        result = func(*args, **kwargs)
        if func is torch.ops.aten.embedding.default:
            numbers = args[1]
        elif func is torch.ops.aten.index.Tensor and len(args[1]) == 1:
            numbers = args[1][0]
        elif func is torch.ops.aten.index_select.default and args[1] == 0:
            numbers = args[2]
        else:
            return result
        if not result.is_floating_point() or not self._given(numbers):
            return result
        self.seen = True
        where = (numbers == self._token).reshape(*numbers.shape, *[1] * (result.ndim - numbers.ndim))
        return torch.where(where, -result.roll(1, -1), result)  # a norm takes away what is added to all features

    def _given(self, numbers: Tensor) -> bool:
        flat = numbers.reshape(-1).long()  # some look up by int32
        return any(torch.equal(flat, turned.reshape(-1)) for one in self._ids for turned in (one, one.T))
