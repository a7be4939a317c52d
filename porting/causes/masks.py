"""Attention masks that are not the reference's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from porting.causes.attention import Attention
from porting.causes.cause import Cause, dial, given_instead, other
from porting.causes.fitting import Dial, geometric
from porting.causes.model_parts import ModelParts
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.tape import Call

Masking = Callable[[Tensor, Attention], Tensor]
"""The scores before any mask, [b h q k], and the attention -> the masked scores."""

FAR = -1e30
"""So far down that nothing is attended to; finite, so that a row that is masked altogether has no NaN."""


@dataclass(frozen=True, kw_only=True)
class Masked(Cause):
    """The scores masked in another way."""

    mask: Masking
    applies: Callable[[Attention], bool]
    detail: str = ""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each attention, and all that are alike at once where the mask is made for all."""
        for attention in model_parts.attentions:
            call = model_parts.tape.maker(attention.masked)
            if call is not None and model_parts.tape[attention.masked].ndim == 4 and self.applies(attention):
                for way in empty_rows(model_parts, self.mask(model_parts.tape[attention.raw], attention)):
                    yield other(call, self.rewrite(attention, way), self.detail, where=attention.where)

    def rewrite(self, attention: Attention, empty: Empty | None = None) -> Rewrite:
        """The last step before the softmax."""

        def rewrite(values: Values, call: Call) -> Tensor:
            scores = values.run(call) if attention.raw == call.result else values[attention.raw]
            masked = self.mask(scores, attention)
            return masked if empty is None else empty(masked, scores)

        return rewrite


Empty = Callable[[Tensor, Tensor], Tensor]
"""Masked scores and the scores before -> the masked scores, with other rows where no key is left."""


def empty_rows(model_parts: ModelParts, masked: Tensor) -> Iterator[Empty | None]:
    """What becomes of rows in which no key is left: all keys alike, as before the mask, or no numbers."""
    yield None
    if bool(_emptied(masked).any()):
        yield lambda masked, scores: torch.where(_emptied(masked), scores, masked)
        if model_parts.broken:
            yield lambda masked, scores: masked.masked_fill(_emptied(masked), torch.nan)


def _emptied(masked: Tensor) -> Tensor:
    return (masked <= FAR / 2).all(-1, keepdim=True)


def padded(attention: Attention) -> bool:
    """Whether some key is padding."""
    return not bool(attention.kept.all())


def closed(scores: Tensor, allowed: Tensor) -> Tensor:
    """Nothing is attended to but what is allowed."""
    return scores.masked_fill(~allowed, FAR)


def causal_of(attention: Attention) -> Tensor:
    """Where no query looks ahead, [b h q k] of bool."""
    return later(attention.allowed).logical_not().expand_as(attention.allowed)


def later(scores: Tensor) -> Tensor:
    """What comes after each query, [q k] of bool."""
    return torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)


def ignored(scores: Tensor, attention: Attention) -> Tensor:
    """Padding is attended to."""
    shape = attention.allowed.any(0, keepdim=True)  # what is closed for every row is no padding
    return closed(scores, later(scores).logical_not() if attention.causal else shape.expand_as(attention.allowed))


def inverted(scores: Tensor, attention: Attention, *, lowest: float) -> Tensor:
    """Only padding is attended to; in a row that has none all scores are lowered alike, and nothing is different."""
    lowered = scores + torch.where(attention.kept, lowest, 0.0)
    return closed(lowered, ~later(scores)) if attention.causal else lowered


def inverted_whole(scores: Tensor, attention: Attention) -> Tensor:
    """Only padding is attended to; in a row that has none all scores are lost, and all keys are attended to alike."""
    near = torch.ones_like(attention.allowed) if (width := width_of(attention)) is None else ~far(scores, width)
    return closed(scores, ~attention.kept & near & ~later(scores) if attention.causal else ~attention.kept & near)


def multiplied(scores: Tensor, attention: Attention) -> Tensor:
    """A score of 0 has still a share."""
    return closed(scores * attention.kept, ~later(scores)) if attention.causal else scores * attention.kept


def added(scores: Tensor, attention: Attention) -> Tensor:
    """1 for what counts, 0 for padding."""
    return (
        closed(scores + attention.kept.to(scores), ~later(scores))
        if attention.causal
        else scores + attention.kept.to(scores)
    )


def on_queries(scores: Tensor, attention: Attention) -> Tensor:
    """Rows of padding are masked and not columns of it."""
    masked = scores.masked_fill(~attention.kept.mT, FAR)
    return closed(masked, ~later(scores)) if attention.causal else masked


def no_causal(scores: Tensor, attention: Attention) -> Tensor:
    """Every query sees what comes after it."""
    return closed(scores, attention.kept.expand_as(attention.allowed))


def with_causal(scores: Tensor, attention: Attention) -> Tensor:
    """No query sees what comes after it."""
    return closed(scores, attention.allowed & ~later(scores))


def no_window(scores: Tensor, attention: Attention) -> Tensor:
    """Every query sees all keys that are no padding, however far away."""
    allowed = attention.kept.expand_as(attention.allowed)
    return closed(scores, allowed & ~later(scores) if attention.causal else allowed)


def windowed(attention: Attention) -> bool:
    """Whether a query sees its neighbourhood only."""
    return width_of(attention) is not None


@dataclass(frozen=True, kw_only=True)
class OtherWindow(Cause):
    """A neighbourhood of another width.

    Attributes:
        instead: of a neighbourhood that the reference has; where it has none if not.
    """

    instead: bool

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each attention without a window, with those that others have; any other width is looked for."""
        for attention in () if self.instead else model_parts.attentions:
            call = model_parts.tape.maker(attention.masked)
            if (
                call is not None
                and attention.own
                and model_parts.tape[attention.masked].ndim == 4
                and not windowed(attention)
            ):
                for width, lowest in product(windows(model_parts), (alike, far_lowest, padding_lowest)):
                    detail = _sees(attention, "no window", str(width))
                    yield other(call, _narrowed(attention, lowest, width), detail, where=attention.where)

    def dials(self, model_parts: ModelParts) -> Iterator[Dial]:
        """Each attention over its own positions, with every width that its rows can show."""
        for attention in model_parts.attentions:
            call, present = model_parts.tape.maker(attention.masked), width_of(attention)
            if (
                call is None
                or not attention.own
                or model_parts.tape[attention.masked].ndim != 4
                or (present is not None) != self.instead
            ):
                continue
            widths = [width for width in range(attention.allowed.shape[-1] - 1) if width != present]
            known = f"{present}{_sides(attention)}" if present is not None else "no window"
            for lowest in (alike, far_lowest, padding_lowest):
                turned, detail = partial(_narrowed, attention, lowest), partial(_sees, attention, known)
                if widths:
                    yield dial(call, turned, detail, widths, whole=True)


Closing = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Closes scores to what is no padding and to what is near."""


def _narrowed(attention: Attention, close: Closing, width: float) -> Rewrite:
    def near(scores: Tensor, attention: Attention) -> Tensor:
        kept = attention.kept & ~later(scores) if attention.causal else attention.kept
        return close(scores, kept, ~far(scores, int(width)))

    return Masked(name="", what="", looks="", fix="", mask=near, applies=lambda attention: True).rewrite(attention)


def alike(scores: Tensor, kept: Tensor, near: Tensor) -> Tensor:
    """What is far and what is padding are closed alike: a row that sees neither sees all."""
    return closed(scores, kept & near)


def far_lowest(scores: Tensor, kept: Tensor, near: Tensor) -> Tensor:
    """A row that sees nothing else sees the padding in its window."""
    return scores.masked_fill(~kept, FAR).masked_fill(~near, 1e5 * FAR)


def padding_lowest(scores: Tensor, kept: Tensor, near: Tensor) -> Tensor:
    """A row that sees nothing else sees what is far and no padding."""
    return scores.masked_fill(~near, FAR).masked_fill(~kept, 1e5 * FAR)


def _sees(attention: Attention, known: str, width: str) -> str:
    return f"{width.lstrip('+')} positions{_sides(attention)} are seen where the reference has {known}"


def _sides(attention: Attention) -> str:
    return " before it" if attention.causal else " to each side"


def far(scores: Tensor, width: int) -> Tensor:
    """What is farther away than so many positions, [q k] of bool."""
    queries, keys = (torch.arange(size) for size in scores.shape[-2:])
    return (queries[:, None] - keys).abs() > width


def width_of(attention: Attention) -> int | None:
    """How far a query sees to each side; None where it sees all, or where these rows do not show it."""
    seen = attention.kept.expand_as(attention.allowed)
    open_ = seen & ~later(attention.allowed) if attention.causal else seen
    if not attention.own or torch.equal(attention.allowed, open_):
        return None
    queries, keys = (torch.arange(size) for size in attention.allowed.shape[-2:])
    return int(((queries[:, None] - keys).abs() * attention.allowed).max())


class OtherLayers(Cause):
    """The windows in other layers than the reference has them in."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each attention, where some have a window and some have none, with what the others have."""
        own = [
            attention
            for attention in model_parts.attentions
            if attention.own and model_parts.tape[attention.masked].ndim == 4
        ]
        widths = windows(model_parts)
        if len(widths) != 1 or all(windowed(attention) for attention in own):
            return
        for attention in own:
            call = model_parts.tape.maker(attention.masked)
            if call is not None and windowed(attention):
                free = Masked(name="", what="", looks="", fix="", mask=no_window, applies=windowed)
                yield other(call, free.rewrite(attention), where=attention.where)
            elif call is not None:
                for lowest in (alike, far_lowest, padding_lowest):
                    yield other(call, _narrowed(attention, lowest, widths[0]), where=attention.where)


def windows(model_parts: ModelParts) -> list[int]:
    """The widths of the windows that there are."""
    return sorted({width for attention in model_parts.attentions if (width := width_of(attention)) is not None})


class CausalOff(Cause):
    """The diagonal somewhere else."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each causal attention, by a few positions to each side."""
        for offset in (1, -1, 2, -2):
            shown = f"{abs(offset)} position{'s' if abs(offset) > 1 else ''}"
            detail = f"a query sees {shown} after it" if offset > 0 else "a query does not see itself"
            detail = f"a query sees nothing nearer than {shown} before it" if offset < -1 else detail
            way = partial(_diagonal, offset=offset)
            causal: Callable[[Attention], bool] = lambda attention: attention.causal and width_of(attention) is None  # noqa: E731
            yield from Masked(name="", what="", looks="", fix="", mask=way, applies=causal, detail=detail).alterations(
                model_parts
            )


def _diagonal(scores: Tensor, attention: Attention, *, offset: int) -> Tensor:
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + offset)
    return closed(scores, attention.kept & ~ahead)


class TooWeak(Cause):
    """A mask that leaves padding a share."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """None: the number is solved for."""
        del model_parts
        return iter(())

    def dials(self, model_parts: ModelParts) -> Iterator[Dial]:
        """Each attention with padding."""
        for attention in model_parts.attentions:
            call = model_parts.tape.maker(attention.masked)
            if call is not None and padded(attention) and model_parts.tape[attention.masked].ndim == 4:
                detail = "{} is subtracted from the scores of padding".format
                yield dial(call, partial(_lowered, attention), detail, geometric(1e-2, 1e3, 3), where=attention.where)


def _lowered(attention: Attention, number: float) -> Rewrite:
    def raised(scores: Tensor, attention: Attention) -> Tensor:
        return inverted(scores, attention, lowest=0.0) - torch.where(attention.kept, 0.0, number)

    return Masked(name="", what="", looks="", fix="", mask=raised, applies=padded).rewrite(attention)


class Inverted(Cause):
    """Padding and the rest in each other's place."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each attention, by each number that people lower a score by: without padding nothing is left to attend to.

        A port that is given no mask has none to invert.
        """
        if not any(name.endswith("mask") for name in model_parts.inputs):
            return
        for way in (partial(inverted, lowest=-1e4), partial(inverted, lowest=-1e9), inverted_whole):
            yield from Masked(name="", what="", looks="", fix="", mask=way, applies=lambda attention: True).alterations(
                model_parts
            )


class TokenMasked(Cause):
    """Keys of one token id are closed: the port takes it for padding, and the reference does not."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each self-attention, by each token id that may be meant."""
        given = [model_parts.inputs[name] for name in ("input_ids", "decoder_input_ids") if name in model_parts.inputs]
        for ids in (tensor for tensor in given if tensor.ndim == 2):
            for token in _likely_padding(ids):
                detail = f"token id {token}"
                mask, applies = partial(_without, token=token, ids=ids), partial(_over, ids=ids)
                yield from Masked(
                    name="", what="", looks="", fix="", mask=mask, applies=applies, detail=detail
                ).alterations(model_parts)


MOST_TOKENS = 128
"""So many token ids are all tried; of more, those that people take for padding: the first and the last ones."""


def _likely_padding(ids: Tensor) -> list[int]:
    found = sorted({int(number) for number in ids.flatten()})
    return found if len(found) <= MOST_TOKENS else [*found[:4], *found[-4:]]


def _over(attention: Attention, *, ids: Tensor) -> bool:
    """Whether the keys of a self-attention are the positions of these tokens."""
    return attention.own and attention.kept.shape == (len(ids), 1, 1, ids.shape[-1])


def _without(scores: Tensor, attention: Attention, *, token: int, ids: Tensor) -> Tensor:
    return closed(scores, attention.allowed & (ids != token)[:, None, None, :])


class AfterSoftmax(Cause):
    """The mask on the probabilities."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Each attention with padding."""
        for attention in model_parts.attentions:
            call = model_parts.tape.maker(attention.masked)
            if call is None or not padded(attention) or model_parts.tape[attention.masked].ndim != 4:
                continue
            free = IGNORED.rewrite(attention)
            yield Alteration(
                where=attention.where, rewrites={call.number: free, attention.context.number: _only(attention)}
            )


def _only(attention: Attention) -> Rewrite:
    """The product with the value, of what is left of the probabilities."""
    shares = attention.context.reads[0]
    return lambda values, call: given_instead(values, call, shares, values[shares] * attention.kept)


IGNORED = Masked(
    name="padding mask ignored",
    what="padding is attended to like any other token",
    looks="nothing in a batch without padding; in a padded one every row differs but the longest",
    fix="pass the attention mask on to every attention",
    mask=ignored,
    applies=padded,
)

CAUSES: tuple[Cause, ...] = (
    IGNORED,
    Inverted(
        name="padding mask inverted",
        what="padding is attended to, and nothing else",
        looks="large differences in every row",
        fix="1 = attend in attention_mask; key_padding_mask of torch.nn.MultiheadAttention has True = ignore",
    ),
    Masked(
        name="padding mask multiplied",
        what="the scores are multiplied by the mask: padding gets a score of 0, and with it a share",
        looks="padded rows differ, the others do not",
        fix="add a large negative number, or masked_fill with -inf",
        mask=multiplied,
        applies=padded,
    ),
    Masked(
        name="padding mask added as 0 and 1",
        what="the mask is added to the scores as it is",
        looks="padded rows differ, the others do not",
        fix="turn it into 0 and a large negative number first: (1 - mask) * min",
        mask=added,
        applies=padded,
    ),
    AfterSoftmax(
        name="padding mask after the softmax",
        what="probabilities of padding are set to 0 after the softmax, so that a row no longer sums to 1",
        looks="padded rows are too small",
        fix="mask the scores before the softmax",
    ),
    Masked(
        name="padding mask on the queries",
        what="the mask is broadcast along the keys: rows of padding are masked and not columns",
        looks="the probabilities' columns of padding are not 0",
        fix="mask[:, None, None, :] for scores [b h q k]",
        mask=on_queries,
        applies=lambda attention: padded(attention) and attention.own,
    ),
    Masked(
        name="causal mask missing",
        what="a query sees what comes after it",
        looks="the last position agrees, the others do not",
        fix="is_causal=True, or a lower triangular mask, in every self-attention of the decoder",
        mask=no_causal,
        applies=lambda attention: attention.causal,
    ),
    CausalOff(
        name="causal mask off by one",
        what="the diagonal of the causal mask is not where the reference has it",
        looks="with triu(0) a query does not see itself, and the first one sees nothing; with tril(1) it sees the next",
        fix="tril(0) of what is seen, or triu(1) of what is hidden: each query sees itself and what comes before it",
    ),
    TooWeak(
        name="padding mask too weak",
        what="the number that is added to the scores of padding is too small to close it",
        looks="padded rows differ a little, the others do not",
        fix="masked_fill with -inf, or add torch.finfo(scores.dtype).min",
    ),
    Masked(
        name="causal mask that should not be there",
        what="a query does not see what comes after it",
        looks="the last position agrees, the others do not",
        fix="is_causal=False: an encoder attends in both directions",
        mask=with_causal,
        applies=lambda attention: attention.own and not attention.causal,
    ),
    Masked(
        name="local window missing",
        what="a layer that should see a neighbourhood only attends everywhere",
        looks="nothing in texts shorter than the window",
        fix="mask what is farther away than half a window in the local layers",
        mask=no_window,
        applies=windowed,
    ),
    OtherWindow(
        name="local window of another width",
        what="a layer that should see a neighbourhood sees a wider or a narrower one",
        looks="nothing in texts shorter than the window",
        fix="see what the config counts: the whole window, or one side of it, with the token itself or without",
        instead=True,
    ),
    OtherWindow(
        name="local window that should not be there",
        what="a layer that should attend everywhere sees a neighbourhood only",
        looks="nothing in texts shorter than the window",
        fix="see which layers are local in the config",
        instead=False,
    ),
    OtherLayers(
        name="local windows in the wrong layers",
        what="the layers with a window are not those of the reference",
        looks="nothing in texts shorter than the window",
        fix="see layer_types and sliding_window_pattern in the config: which layers are local",
        wide=True,
    ),
    TokenMasked(
        name="token masked as padding",
        what="a token id is hidden as padding, and the reference attends to it",
        looks="rows that hold the token differ, the others do not",
        fix="hide what attention_mask says, or the config's pad_token_id; where it has none, no token id is padding",
    ),
)
