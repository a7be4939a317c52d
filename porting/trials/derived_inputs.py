"""Inputs that a port may take and no reference does, but that follow from what the reference is given.

Many models written by hand take a square mask that hides later tokens too, or the number of tokens of each row. A
table's ``[inputs]`` names such an input on its left, like one of the reference's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from porting.errors import Code, Fault, VerifyError
from porting.trials.modalities import DECODER, IDS
from porting.trials.padding import MASK

CAUSAL = "causal_mask"
"""[q k], 1 where key k does not stand behind query q."""

CAUSAL_ATTENTION = "causal_attention_mask"
"""[b q k], 1 where key k does not stand behind query q and is not padding; padding sees itself."""

SQUARE_ATTENTION = "square_attention_mask"
"""[b q k], 1 where key k is not padding, the same for each query q."""

LENGTHS = "lengths"
"""[b], the tokens of each row that are not padding, which has to be at its end."""


def source_of(name: str) -> str:
    """The reference's input that a derived one is made from; any other name as it is.

    >>> source_of("decoder_lengths"), source_of("causal_mask"), source_of("input_ids")
    ('decoder_attention_mask', 'input_ids', 'input_ids')
    """
    prefix, plain = _taken_apart(name)
    if plain not in _MAKERS:
        return name
    return prefix + (IDS if plain == CAUSAL else MASK)


def with_derived(names: Iterable[str], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reference's inputs, and those of these names that follow from them.

    Args:
        inputs: what the reference is given: token ids and masks [b s]. Without a mask no token is padding.

    Raises:
        VerifyError: lengths are asked for, and the padding of a row is not at its end.
    """
    found = dict(inputs)
    for name in names:
        prefix, plain = _taken_apart(name)
        kept = _kept(inputs.get(prefix + MASK), inputs.get(prefix + IDS))
        if plain in _MAKERS and name not in inputs and kept is not None:
            found[name] = _MAKERS[plain](kept).long()
    return found


def _kept(mask: Tensor | None, ids: Tensor | None) -> Tensor | None:
    """The mask of the places that are not padding, [b s] of bool; None without a mask and token ids."""
    if mask is not None:
        return mask != 0
    return None if ids is None else torch.ones(ids.shape, dtype=torch.bool)


def is_right_padded(mask: Tensor) -> bool:
    """Whether the padding of each row of a mask [b s] is at its end, and each row has a token."""
    kept = mask != 0
    return bool(kept[..., 0].all()) and not bool((kept[..., 1:] & ~kept[..., :-1]).any())


def _taken_apart(name: str) -> tuple[str, str]:
    return (DECODER, name.removeprefix(DECODER)) if name.startswith(DECODER) else ("", name)


def _causal(kept: Tensor) -> Tensor:
    size = kept.shape[-1]
    return torch.ones(size, size, dtype=torch.bool).tril()


def _square(kept: Tensor) -> Tensor:
    return kept.unsqueeze(-2).expand(*kept.shape, kept.shape[-1])


def _causal_attention(kept: Tensor) -> Tensor:
    itself = torch.eye(kept.shape[-1], dtype=torch.bool) & ~kept.unsqueeze(-1)  # softmax over no key at all gives NaN
    return _square(kept) & _causal(kept) | itself


def _lengths(kept: Tensor) -> Tensor:
    if not is_right_padded(kept):
        message = "the length of each row is asked for, and a row has padding elsewhere than at its end"
        raise VerifyError(Fault(code=Code.NO_INPUTS, message=message, hint="pad rows at their end"))
    return kept.sum(-1)


_MAKERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    CAUSAL: _causal,
    CAUSAL_ATTENTION: _causal_attention,
    SQUARE_ATTENTION: _square,
    LENGTHS: _lengths,
}
"""The functions that make each derived input from the mask of the places that are not padding, [b s] of bool."""

NAMES = tuple(prefix + name for prefix in ("", DECODER) for name in _MAKERS)
"""The names of all derived inputs."""
