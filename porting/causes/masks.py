"""Attention masks that differ from the reference's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from porting.causes.attention import Attention
from porting.causes.cause import Alterations, Cause, FreeParameters, alter, free_parameter, run_with
from porting.causes.fitting import FreeParameter, geometric
from porting.causes.model_parts import ModelParts
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call

Masking = Callable[[Tensor, Attention], Tensor]
"""The scores before any mask [b h q k], and the attention -> the masked scores."""

EmptyRows = Callable[[Tensor, Tensor], Tensor]
"""The masked scores, and the scores before the mask -> the masked scores with other rows where every key is hidden."""

FAR = -1e30
"""Score of a hidden key: low enough to get no probability, and finite so that a row without keys has no NaN."""


def masked_attentions(model_parts: ModelParts) -> Iterator[tuple[Attention, Call]]:
    """Yield each attention whose masked scores are [b h q k], with the call that gives these scores."""
    for attention in model_parts.attentions:
        call = model_parts.tape.maker(attention.masked)
        if call is not None and model_parts.tape[attention.masked].ndim == 4:
            yield attention, call


def masked_by(mask: Masking, attention: Attention, fill_empty: EmptyRows | None = None) -> Rewrite:
    """Return a rewrite of the last call before the softmax that masks the scores with ``mask``."""

    def rewrite(values: Values, call: Call) -> Tensor:
        scores = values.run(call) if attention.raw == call.result else values[attention.raw]
        masked = mask(scores, attention)
        return masked if fill_empty is None else fill_empty(masked, scores)

    return rewrite


def _everywhere(attention: Attention) -> bool:
    return True


def other_masks(
    model_parts: ModelParts, mask: Masking, applies: Callable[[Attention], bool] = _everywhere, detail: str = ""
) -> Iterator[Alteration]:
    """Yield the alterations that mask an attention with ``mask``, one for each way to treat rows without keys.

    Args:
        applies: the attentions in which that makes a difference.
    """
    for attention, call in masked_attentions(model_parts):
        if applies(attention):
            for fill_empty in empty_rows(model_parts, mask, attention):
                yield alter(call, masked_by(mask, attention, fill_empty), detail, where=attention.where)


def _masked(mask: Masking, applies: Callable[[Attention], bool]) -> Alterations:
    """Return the alterations with another mask in each attention to which it applies."""
    return lambda model_parts: other_masks(model_parts, mask, applies)


def empty_rows(model_parts: ModelParts, mask: Masking, attention: Attention) -> Iterator[EmptyRows | None]:
    """Yield what a port may make of rows in which every key is hidden: uniform, unmasked, or NaN.

    Unmasked ones are left out where that shows padding in all rows: then the mask is ignored, an entry of its own.
    """
    yield None
    scores = model_parts.tape[attention.raw]
    masked = mask(scores, attention)
    if bool(_is_empty(masked).any()):
        if not torch.equal(_unmasked(masked, scores), ignored(scores, attention)):
            yield _unmasked
        if model_parts.broken:
            yield lambda masked, scores: masked.masked_fill(_is_empty(masked), torch.nan)


def _unmasked(masked: Tensor, scores: Tensor) -> Tensor:
    return torch.where(_is_empty(masked), scores, masked)


def _is_empty(masked: Tensor) -> Tensor:
    """Return where every key of a row is hidden, [... q 1] of bool."""
    return (masked <= FAR / 2).all(-1, keepdim=True)


def padded(attention: Attention) -> bool:
    """Whether any key is padding."""
    return not bool(attention.kept.all())


def hide_others(scores: Tensor, allowed: Tensor) -> Tensor:
    """Hide every key that is not allowed."""
    return scores.masked_fill(~allowed, FAR)


def causal_of(attention: Attention) -> Tensor:
    """Return the lower triangle in the shape of the attention's scores, [b h q k] of bool."""
    return later(attention.allowed).logical_not().expand_as(attention.allowed)


def later(scores: Tensor, least: int = 1) -> Tensor:
    """Return where a key comes after the query, by at least so many positions, [q k] of bool."""
    return torch.ones(scores.shape[-2:], dtype=torch.bool).triu(least)


def keep_causal(scores: Tensor, attention: Attention) -> Tensor:
    """Hide later keys if the reference's attention is causal."""
    return hide_others(scores, ~later(scores)) if attention.causal else scores


def ignored(scores: Tensor, attention: Attention) -> Tensor:
    """Show padding."""
    if attention.causal:
        return keep_causal(scores, attention)
    # What is hidden in every row of the batch is not padding, unless it is a key that no query sees.
    shape = attention.allowed.any(0, keepdim=True)
    unseen = ~attention.kept.any(0, keepdim=True)
    if (width := width_of(attention)) is not None:
        unseen = unseen & ~far(scores, width)
    return hide_others(scores, (shape | unseen).expand_as(attention.allowed))


def inverted(scores: Tensor, attention: Attention, *, lowest: float) -> Tensor:
    """Add ``lowest`` to all keys but padding; in a row without padding this changes no probability."""
    return keep_causal(scores + torch.where(attention.kept, lowest, 0.0), attention)


def inverted_whole(scores: Tensor, attention: Attention) -> Tensor:
    """Hide all keys but padding; in a row without padding all keys then get the same probability."""
    width = width_of(attention)
    near = torch.ones_like(attention.allowed) if width is None else ~far(scores, width)
    shown = ~attention.kept & near
    return hide_others(scores, shown & ~later(scores) if attention.causal else shown)


def multiplied(scores: Tensor, attention: Attention) -> Tensor:
    """Multiply the scores by the 0/1 mask, which leaves padding a score of 0."""
    return keep_causal(scores * attention.kept, attention)


def added(scores: Tensor, attention: Attention) -> Tensor:
    """Add the 0/1 mask to the scores."""
    return keep_causal(scores + attention.kept.to(scores), attention)


def on_queries(scores: Tensor, attention: Attention) -> Tensor:
    """Mask the rows of padding instead of the columns."""
    return keep_causal(scores.masked_fill(~attention.kept.mT, FAR), attention)


def with_itself(scores: Tensor, attention: Attention) -> Tensor:
    """Show each token itself."""
    return hide_others(scores, attention.allowed | torch.eye(scores.shape[-1], dtype=torch.bool))


def without_itself(scores: Tensor, attention: Attention) -> Tensor:
    """Hide each token from itself."""
    return hide_others(scores, attention.allowed & ~torch.eye(scores.shape[-1], dtype=torch.bool))


def no_causal(scores: Tensor, attention: Attention) -> Tensor:
    """Show later keys."""
    return hide_others(scores, attention.kept.expand_as(attention.allowed))


def with_causal(scores: Tensor, attention: Attention) -> Tensor:
    """Hide later keys."""
    return hide_others(scores, attention.allowed & ~later(scores))


def no_window(scores: Tensor, attention: Attention) -> Tensor:
    """Show all keys but padding, at any distance."""
    return keep_causal(hide_others(scores, attention.kept.expand_as(attention.allowed)), attention)


def windowed(attention: Attention) -> bool:
    """Whether a query sees only keys near it."""
    return width_of(attention) is not None


WindowMask = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The scores, the keys that are not padding, and the keys in the window -> the masked scores."""


def hide_alike(scores: Tensor, kept: Tensor, near: Tensor) -> Tensor:
    """Hide distant keys and padding alike: a row that sees neither sees all keys."""
    return hide_others(scores, kept & near)


def hide_far_most(scores: Tensor, kept: Tensor, near: Tensor) -> Tensor:
    """Hide distant keys more than padding: a row that has nothing else sees the padding in its window."""
    return scores.masked_fill(~kept, FAR).masked_fill(~near, 1e5 * FAR)


def hide_padding_most(scores: Tensor, kept: Tensor, near: Tensor) -> Tensor:
    """Hide padding more than distant keys: a row that has nothing else sees distant keys."""
    return scores.masked_fill(~near, FAR).masked_fill(~kept, 1e5 * FAR)


WINDOW_MASKS: tuple[WindowMask, ...] = (hide_alike, hide_far_most, hide_padding_most)


def _solved_width(*, windowed_there: bool) -> FreeParameters:
    """Return the window's width of each self-attention, among all widths that its length can show.

    Args:
        windowed_there: of the attentions that have a window in the reference, or of those that have none.
    """

    def free_parameters(model_parts: ModelParts) -> Iterator[FreeParameter]:
        for attention, call in masked_attentions(model_parts):
            present = width_of(attention)
            if not attention.own or (present is not None) != windowed_there:
                continue
            widths = [width for width in range(attention.allowed.shape[-1] - 1) if width != present]
            expected = f"{present}{_sides(attention)}" if present is not None else "no window"
            for mask in WINDOW_MASKS if widths else ():
                rewrite, detail = partial(_narrowed, attention, mask), partial(_window_detail, attention, expected)
                yield free_parameter(call, rewrite, detail, widths, integer=True)

    return free_parameters


def _usual_windows(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each self-attention without a window, with the widths that other attentions have."""
    for attention, call in masked_attentions(model_parts):
        if attention.own and not windowed(attention):
            for width, mask in product(window_widths(model_parts), WINDOW_MASKS):
                detail = _window_detail(attention, "no window", str(width))
                yield alter(call, _narrowed(attention, mask, width), detail, where=attention.where)


def _narrowed(attention: Attention, window_mask: WindowMask, width: float) -> Rewrite:
    def mask(scores: Tensor, attention: Attention) -> Tensor:
        kept = attention.kept & ~later(scores) if attention.causal else attention.kept
        return window_mask(scores, kept, ~far(scores, int(width)))

    return masked_by(mask, attention)


def _window_detail(attention: Attention, expected: str, width: str) -> str:
    return f"{width.lstrip('+')} positions{_sides(attention)} are seen where the reference has {expected}"


def _sides(attention: Attention) -> str:
    return " before it" if attention.causal else " to each side"


def distances(scores: Tensor) -> Tensor:
    """Return how many positions key and query are apart, [q k]."""
    queries, keys = (torch.arange(size) for size in scores.shape[-2:])
    return (queries[:, None] - keys).abs()


def far(scores: Tensor, width: int) -> Tensor:
    """Return where key and query are more than ``width`` positions apart, [q k] of bool."""
    return distances(scores) > width


def width_of(attention: Attention) -> int | None:
    """Return how many positions a query sees to each side; None where it sees all, or where the batch is too short."""
    unpadded = attention.kept.expand_as(attention.allowed)
    without_window = unpadded & ~later(attention.allowed) if attention.causal else unpadded
    if not attention.own or torch.equal(attention.allowed, without_window):
        return None
    return int((distances(attention.allowed) * attention.allowed).max())


def window_widths(model_parts: ModelParts) -> list[int]:
    """Return the different widths of the windows in a model, in ascending order."""
    return sorted({width for attention in model_parts.attentions if (width := width_of(attention)) is not None})


def _windows_in_other_layers(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each self-attention with its window taken away, or with the window of the others."""
    own = [(attention, call) for attention, call in masked_attentions(model_parts) if attention.own]
    widths = window_widths(model_parts)
    if len(widths) != 1 or all(windowed(attention) for attention, _ in own):
        return
    for attention, call in own:
        if windowed(attention):
            yield alter(call, masked_by(no_window, attention), where=attention.where)
        else:
            for mask in WINDOW_MASKS:
                yield alter(call, _narrowed(attention, mask, widths[0]), where=attention.where)


def _shifted_diagonal(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each causal attention without a window, shifted by one and two positions to both sides."""
    for offset, detail in (
        (1, "a query sees 1 position after it"),
        (-1, "a query does not see itself"),
        (2, "a query sees 2 positions after it"),
        (-2, "a query sees nothing nearer than 2 positions before it"),
    ):
        yield from other_masks(model_parts, partial(_diagonal, offset=offset), _plainly_causal, detail)


def _plainly_causal(attention: Attention) -> bool:
    return attention.causal and not windowed(attention)


def _diagonal(scores: Tensor, attention: Attention, *, offset: int) -> Tensor:
    return hide_others(scores, attention.kept & ~later(scores, 1 + offset))


def _solved_lowering(model_parts: ModelParts) -> Iterator[FreeParameter]:
    """Yield the number that is subtracted from the scores of padding, in each attention with padding."""
    for attention, call in masked_attentions(model_parts):
        if padded(attention):
            detail, starts = "{} is subtracted from the scores of padding".format, geometric(1e-2, 1e3, 3)
            yield free_parameter(call, partial(_lowered, attention), detail, starts, where=attention.where)


def _lowered(attention: Attention, number: float) -> Rewrite:
    def mask(scores: Tensor, attention: Attention) -> Tensor:
        return inverted(scores, attention, lowest=0.0) - torch.where(attention.kept, 0.0, number)

    return masked_by(mask, attention)


def _inverted(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each attention, with each number that people add to hidden scores.

    A port that is given no mask has none to invert.
    """
    if any(name.endswith("mask") for name in model_parts.inputs):
        for mask in (partial(inverted, lowest=-1e4), partial(inverted, lowest=-1e9), inverted_whole):
            yield from other_masks(model_parts, mask)


FILLED = (0.0, 1.0, -1.0)
"""What hidden scores are set to by those who hide nothing with it."""


def _filled(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each attention with a small number as the score of all hidden keys, and of later keys alone."""
    for number in FILLED:
        every, alone = (partial(filled, number=number, later_alone=alone) for alone in (False, True))
        yield from other_masks(model_parts, every, lambda one: not bool(one.allowed.all()), f"to {number:g}")
        detail = f"those of later keys alone, to {number:g}"
        yield from other_masks(model_parts, alone, lambda one: one.causal and padded(one), detail)


def filled(scores: Tensor, attention: Attention, *, number: float, later_alone: bool) -> Tensor:
    """Set the scores of hidden keys to a number; where those of later keys alone are, padding is hidden."""
    small = attention.kept & later(scores) if later_alone else ~attention.allowed
    return hide_others(torch.where(small, number, scores), attention.allowed | small)


def _token_masked(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each self-attention, by each token id that may be taken for padding."""
    inputs = [model_parts.inputs[name] for name in ("input_ids", "decoder_input_ids") if name in model_parts.inputs]
    for ids in (tensor for tensor in inputs if tensor.ndim == 2):
        for token in _likely_padding(ids):
            mask, applies = partial(_without_token, token=token, ids=ids), partial(_attends_over, ids=ids)
            yield from other_masks(model_parts, mask, applies, f"token id {token}")


MOST_TOKENS = 128
"""Up to so many token ids in a batch are all tried; of more, only the smallest and largest, which padding often has."""


def _likely_padding(ids: Tensor) -> list[int]:
    tokens = sorted({int(number) for number in ids.flatten()})
    return tokens if len(tokens) <= MOST_TOKENS else [*tokens[:4], *tokens[-4:]]


def _attends_over(attention: Attention, *, ids: Tensor) -> bool:
    """Whether the keys of a self-attention are the positions of these tokens."""
    return attention.own and attention.kept.shape == (len(ids), 1, 1, ids.shape[-1])


def _without_token(scores: Tensor, attention: Attention, *, token: int, ids: Tensor) -> Tensor:
    return hide_others(scores, attention.allowed & (ids != token)[:, None, None, :])


def _masks_of_other_rows(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each attention with each choice of rows, where rows of the batch have different padding."""
    for detail, choose in CHOICES_OF_ROWS.items():
        yield from other_masks(model_parts, partial(_by_rows, choose=choose), _rows_differ, detail)


def _tiled(kept: Tensor, heads: int) -> Tensor:
    rows = kept.shape[0]
    return kept[torch.arange(rows * heads) % rows].view(rows, heads, *kept.shape[2:])


CHOICES_OF_ROWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "each row has the mask of the first": lambda kept, heads: kept[:1],
    "each row has the mask of the last": lambda kept, heads: kept[-1:],
    "a position is hidden only where it is padding in each row": lambda kept, heads: kept.any(0, keepdim=True),
    "a position is hidden where it is padding in any row": lambda kept, heads: kept.all(0, keepdim=True),
    "each row has the mask of the one before": lambda kept, heads: kept.roll(1, 0),
    "each row has the mask of the one after": lambda kept, heads: kept.roll(-1, 0),
    "the rows' masks are in the opposite order": lambda kept, heads: kept.flip(0),
    "the rows' masks are repeated as a whole for each head": _tiled,
}
"""A mistake -> a function of the keys that are not padding [b 1 1 k] and the number of heads: those the port keeps."""


def _rows_differ(attention: Attention) -> bool:
    return bool((attention.kept != attention.kept[:1]).any())


def _by_rows(scores: Tensor, attention: Attention, *, choose: Callable[[Tensor, int], Tensor]) -> Tensor:
    width = width_of(attention)
    kept = choose(attention.kept, scores.shape[1])
    near = kept if width is None else kept & ~far(scores, width)
    return keep_causal(hide_others(scores, near.expand_as(scores)), attention)


def _after_softmax(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each attention with padding, with the mask applied to the probabilities."""
    for attention, call in masked_attentions(model_parts):
        if padded(attention):
            rewrites = {call.number: masked_by(ignored, attention), attention.context.number: _kept_only(attention)}
            yield Alteration(where=attention.where, rewrites=rewrites)


def _kept_only(attention: Attention) -> Rewrite:
    """Multiply the probabilities by the 0/1 mask before their product with the value."""
    probabilities = attention.context.reads[0]
    return lambda values, call: run_with(values, call, probabilities, values[probabilities] * attention.kept)


CAUSES: tuple[Cause, ...] = (
    Cause(
        name="padding mask ignored",
        what="padding is attended to like other tokens",
        looks="no difference without padding; in a padded batch all rows but the longest differ",
        fix="pass the attention mask to every attention",
        alterations=_masked(ignored, padded),
    ),
    Cause(
        name="padding mask inverted",
        what="only padding is attended to",
        looks="large differences in every row",
        fix="1 = attend in attention_mask; key_padding_mask of torch.nn.MultiheadAttention has True = ignore",
        alterations=_inverted,
    ),
    Cause(
        name="padding mask multiplied",
        what="the scores are multiplied by the mask, so that padding has a score of 0 and still gets attention",
        looks="padded rows differ, the others do not",
        fix="add a large negative number, or masked_fill with -inf",
        alterations=_masked(multiplied, padded),
    ),
    Cause(
        name="padding mask added as 0 and 1",
        what="the mask of 0 and 1 is added to the scores",
        looks="padded rows differ, the others do not",
        fix="convert it to 0 and a large negative number first: (1 - mask) * min",
        alterations=_masked(added, padded),
    ),
    Cause(
        name="mask added as 0 and 1",
        what="1 is added to the scores of the keys that are seen, 0 to those that are hidden, later ones included",
        looks="every query sees every key",
        fix="masked_fill(mask == 0, -inf), or a mask of True and False for scaled_dot_product_attention",
        alterations=_masked(
            lambda scores, attention: scores + attention.allowed.to(scores),
            lambda attention: attention.causal or windowed(attention),
        ),
    ),
    Cause(
        name="padding mask after the softmax",
        what="probabilities of padding are set to 0 after the softmax, so that a row no longer sums to 1",
        looks="the context of padded rows is too small",
        fix="mask the scores before the softmax",
        alterations=_after_softmax,
    ),
    Cause(
        name="padding mask on the queries",
        what="the mask is applied to the queries: rows of padding are masked instead of columns",
        looks="the probabilities in the columns of padding are not 0",
        fix="mask[:, None, None, :] for scores [b h q k]",
        alterations=_masked(on_queries, lambda attention: padded(attention) and attention.own),
    ),
    Cause(
        name="padding mask of other rows",
        what="the rows of the batch are masked by the padding of other rows",
        looks="a row by itself agrees, and rows of different lengths together do not",
        fix="mask[:, None, None, :] for scores [b h q k]; for scores [(b h) q k], mask.repeat_interleave(heads, dim=0)",
        alterations=_masks_of_other_rows,
    ),
    Cause(
        name="causal mask missing",
        what="a query attends to later positions",
        looks="the last position agrees, the others do not",
        fix="is_causal=True, or a lower triangular mask, in every self-attention of the decoder",
        alterations=_masked(no_causal, lambda attention: attention.causal),
    ),
    Cause(
        name="causal mask off by one",
        what="the diagonal of the causal mask is shifted",
        looks="with triu(0) a query does not attend to itself; with tril(1) it attends to the next token",
        fix="show tril(0), or hide triu(1): each query attends to itself and to earlier positions",
        alterations=_shifted_diagonal,
    ),
    Cause(
        name="hidden tokens see themselves",
        what="each token sees itself, also one that the mask hides",
        looks="only rows at hidden tokens differ, and what is pooled or predicted there",
        fix="hide the keys that the mask hides from every query, their own included",
        alterations=_masked(with_itself, lambda attention: attention.own and padded(attention)),
    ),
    Cause(
        name="tokens do not see themselves",
        what="each token is hidden from itself",
        looks="all rows differ, most where few tokens are seen",
        fix="show the diagonal: no mask of the reference hides a token from itself",
        alterations=_masked(without_itself, lambda attention: attention.own and not _plainly_causal(attention)),
    ),
    Cause(
        name="padding mask too weak",
        what="the number that is added to the scores of padding is not low enough to hide it",
        looks="padded rows differ slightly, the others do not",
        fix="masked_fill with -inf, or add torch.finfo(scores.dtype).min",
        free_parameters=_solved_lowering,
    ),
    Cause(
        name="hidden scores set to a small number",
        what="the scores of hidden keys are replaced by a number that the softmax does not make zero",
        looks="every query sees every key",
        fix="masked_fill with -inf, or with torch.finfo(scores.dtype).min",
        alterations=_filled,
    ),
    Cause(
        name="causal mask that should not be there",
        what="a query does not attend to later positions",
        looks="the last position agrees, the others do not",
        fix="is_causal=False: an encoder attends in both directions",
        alterations=_masked(with_causal, lambda attention: attention.own and not attention.causal),
    ),
    Cause(
        name="local window missing",
        what="a layer with a local window attends everywhere",
        looks="no difference in texts shorter than the window",
        fix="hide positions outside the window in the local layers",
        alterations=_masked(no_window, windowed),
    ),
    Cause(
        name="local window of another width",
        what="a layer has a wider or narrower local window",
        looks="no difference in texts shorter than the window",
        fix="check what the config counts: the whole window or one side of it, with or without the token itself",
        free_parameters=_solved_width(windowed_there=True),
    ),
    Cause(
        name="local window that should not be there",
        what="a layer that should attend everywhere has a local window",
        looks="no difference in texts shorter than the window",
        fix="check in the config which layers are local",
        alterations=_usual_windows,
        free_parameters=_solved_width(windowed_there=False),
    ),
    Cause(
        name="local windows in the wrong layers",
        what="other layers have a local window than in the reference",
        looks="no difference in texts shorter than the window",
        fix="check in the config which layers are local: layer_types, sliding_window_pattern",
        alterations=_windows_in_other_layers,
        wide=True,
    ),
    Cause(
        name="token masked as padding",
        what="a token id is hidden as if it were padding",
        looks="rows that contain the token differ, the others do not",
        fix="hide padding by attention_mask, or by the config's pad_token_id if it has one",
        alterations=_token_masked,
    ),
)
