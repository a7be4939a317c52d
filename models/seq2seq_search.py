"""Generation with an encoder-decoder: greedy search and beam search.

Papers: Sutskever, Vinyals and Le 2014, "Sequence to Sequence Learning with Neural Networks", section 3.2 (beam search);
Wu et al. 2016, "Google's Neural Machine Translation System", section 7 (normalising by length; here the length to a
power, as most implementations have it). The source is encoded once, and each step computes the newest token alone: the
keys and values of everything before it are in the decoder's caches.

Shapes are in the letters of ``seq2seq.py``, and n is the number of beams.

>>> model = Seq2Seq(config=Seq2SeqConfig(vocab_size=30, hidden_size=8)).eval()
>>> input_ids = torch.tensor([[5, 7, 9, 2], [6, 2, 0, 0]])
>>> written = beam_search(model, input_ids, attention_mask=input_ids != 0, num_beams=3, max_length=6)
>>> tuple(written.token_ids.shape[:2]), written.scores.shape
((2, 3), torch.Size([2, 3]))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from porting.models.seq2seq import Cache, Seq2Seq
from porting.models.seq2seq_config import Seq2SeqConfig

__all__ = ["Hypotheses", "Seq2SeqConfig", "beam_search", "greedy_search"]


@torch.no_grad()
def greedy_search(
    model: Seq2Seq,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_length: int,
    suppress: Sequence[int] = (),
) -> Tensor:
    """Append the likeliest token until every row has ended.

    Args:
        model: the model, in evaluation mode.
        input_ids: [b s], integer; the source.
        attention_mask: [b s], any dtype, 1 or True = attend; None = no padding.
        max_length: the most tokens to generate, the end token included.
        suppress: tokens that are never generated.

    Returns:
        Ids [b t], the start token first, ``pad_token_id`` behind the end.

    Raises:
        ValueError: if the positions do not reach so far, or the end or what is not a token is suppressed.
    """
    _check(model, max_length, suppress)
    config = model.config
    memory = model.encode(input_ids, attention_mask)  # [b s e]
    ids = torch.full_like(input_ids[:, :1], config.decoder_start_token_id)  # [b 1]
    ended = torch.zeros_like(ids, dtype=torch.bool)  # [b 1]
    caches: tuple[Cache, ...] | None = None
    for _ in range(max_length):
        logits, caches = model.decode(ids[:, -1:], memory, attention_mask, caches=caches)  # [b 1 v]
        likeliest = _suppressed(logits[:, -1], suppress).argmax(dim=-1, keepdim=True)  # [b 1]
        ids = torch.cat([ids, likeliest.masked_fill(ended, config.pad_token_id)], dim=1)  # [b t]
        ended = ended | (likeliest == config.eos_token_id)
        if bool(ended.all()):
            break
    return ids


class Hypotheses(NamedTuple):
    """The hypotheses of :func:`beam_search`, the best first."""

    token_ids: Tensor  # [b n t], the start token first, pad_token_id behind the end
    scores: Tensor  # [b n], log-probability / length ** length_penalty; the start token does not count


@torch.no_grad()
def beam_search(
    model: Seq2Seq,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    num_beams: int,
    max_length: int,
    length_penalty: float = 1.0,
    suppress: Sequence[int] = (),
) -> Hypotheses:
    """Keep the ``num_beams`` likeliest prefixes at each step, and the best finished hypotheses.

    A hypothesis of ``max_length`` tokens counts as ended. A row's search is over when it has ``num_beams`` ended
    hypotheses and the best beginning, if it ended now, would be no better than the worst of them.

    Args:
        model: the model, in evaluation mode.
        input_ids: [b s], integer; the source.
        attention_mask: [b s], any dtype, 1 or True = attend; None = no padding.
        num_beams: how many, at most half of the vocabulary.
        max_length: the most tokens to generate, the end token included.
        length_penalty: the power of the length that scores are divided by: 0 compares log-probabilities, which favours
            short hypotheses, 1 their mean over the tokens.
        suppress: tokens that are never generated.

    Raises:
        ValueError: as :func:`greedy_search`, or if there are too few or too many beams.
    """
    _check(model, max_length, suppress)
    config, rows, device = model.config, len(input_ids), input_ids.device
    if not 1 <= num_beams <= config.vocab_size // 2:
        raise ValueError(f"num_beams={num_beams}: expected from 1 to half of the vocabulary, {config.vocab_size // 2}")
    memory = model.encode(input_ids, attention_mask).repeat_interleave(num_beams, dim=0)  # [(b n) s e]
    if attention_mask is not None:
        attention_mask = attention_mask.repeat_interleave(num_beams, dim=0)  # [(b n) s]
    beams = torch.full((rows, num_beams, 1 + max_length), config.pad_token_id, device=device)  # [b n t]
    beams[:, :, 0] = config.decoder_start_token_id
    likely = memory.new_full((rows, num_beams), -torch.inf)  # [b n], each beam's log-probability
    best = Hypotheses(beams, likely)  # none yet
    likely = likely.index_fill(1, torch.tensor([0], device=device), 0.0)  # the beams are still the same: one counts
    over = torch.zeros(rows, 1, dtype=torch.bool, device=device)  # [b 1]
    caches: tuple[Cache, ...] | None = None
    length = 0
    while not bool(over.all()):  # it is, at the latest when every hypothesis is of max_length
        logits, caches = model.decode(beams[:, :, length].view(-1, 1), memory, attention_mask, caches=caches)
        length += 1
        steps = _suppressed(logits[:, -1].log_softmax(dim=-1), suppress)  # [(b n) v]
        every = (likely.view(-1, 1) + steps).view(rows, -1)  # [b (n v)]
        # Twice as many as there are beams: should all of the better half end, the other half goes on.
        likely, places = every.topk(2 * num_beams)  # [b 2n] each, the best first
        parents, tokens = places // config.vocab_size, places % config.vocab_size  # [b 2n] each
        longer = _picked(beams, parents)  # [b 2n t]
        longer[:, :, length] = tokens

        ended = (tokens == config.eos_token_id) | (length == max_length)  # [b 2n]
        scores = (likely / length**length_penalty).masked_fill(~ended | over, -torch.inf)  # [b 2n]
        scores[:, num_beams:] = -torch.inf
        every = torch.cat([best.scores, scores], dim=1)  # [b 3n]
        scores, kept = every.topk(num_beams)  # [b n] each
        best = Hypotheses(_picked(torch.cat([best.token_ids, longer], dim=1), kept), scores)

        likely, kept = likely.masked_fill(ended, -torch.inf).topk(num_beams)  # [b n] each
        beams, parents = _picked(longer, kept), parents.gather(1, kept)  # [b n t], [b n]
        over = over | (likely[:, :1] / length**length_penalty <= best.scores[:, -1:])
        parents = (parents + torch.arange(rows, device=device)[:, None] * num_beams).flatten()  # [(b n)], of all rows'
        caches = tuple(Cache(*(states[parents] for states in cache)) for cache in caches)
    return Hypotheses(best.token_ids[:, :, : length + 1], best.scores)


def _picked(beams: Tensor, which: Tensor) -> Tensor:
    """Of beams [b n t] those whose numbers are in ``which`` [b m]: [b m t]."""
    return beams.gather(1, which[:, :, None].expand(-1, -1, beams.shape[-1]))


def _suppressed(scores: Tensor, suppress: Sequence[int]) -> Tensor:
    """Scores [b v] with those of tokens that are never generated out of the running."""
    return scores.index_fill(-1, torch.tensor(suppress, dtype=torch.long, device=scores.device), -torch.inf)


def _check(model: Seq2Seq, max_length: int, suppress: Sequence[int]) -> None:
    config = model.config
    if not 1 <= max_length <= config.max_position_embeddings:
        raise ValueError(
            f"max_length={max_length}: expected from 1 to max_position_embeddings={config.max_position_embeddings}"
        )
    strange = [token for token in suppress if not 0 <= token < config.vocab_size]
    if strange:
        raise ValueError(f"suppress has {strange[0]}: expected tokens, from 0 to vocab_size - 1")
    if config.eos_token_id in suppress:
        raise ValueError(f"suppress has the end, eos_token_id={config.eos_token_id}: no row could ever end")
