"""A small encoder whose arguments are optional but for the tokens, and ports that are wrong on some inputs only."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG = {
    "vocab_size": 50,
    "hidden_size": 12,
    "max_position_embeddings": 20,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}


class Encoder(nn.Module):
    """One layer of attention and a head; every weight is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.config = CONFIG
        width = 12
        self.tokens = nn.Embedding(50, width)
        self.segments = nn.Embedding(2, width)
        self.positions = nn.Embedding(20, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 7)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Logits [b s 7] and the first token's features, ``pooled`` [b 12]."""
        length = input_ids.shape[1]
        if length > CONFIG["max_position_embeddings"]:
            raise ValueError(f"a row of {length} tokens is longer than 20")
        places = torch.arange(length)[None] if position_ids is None else position_ids
        kinds = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        x = self.tokens(input_ids) + self.segments(kinds) + self.positions(places)
        query, key, value = self.qkv(x).chunk(3, -1)
        scores = query @ key.transpose(1, 2) / 12**0.5
        if attention_mask is not None:
            scores = scores + (1 - attention_mask.to(x.dtype))[:, None] * -1e9
        x = self.norm(x + scores.softmax(-1) @ value)
        return {"logits": self.head(F.gelu(x)), "pooled": x[:, 0].tanh()}


Change = Callable[[dict[str, Tensor], dict[str, Any], nn.Module], dict[str, Tensor]]
"""What a wrong port makes of the right outputs: the outputs, the arguments by name, and the port itself."""


def wrong(change: Change, before: Callable[[dict[str, Any], nn.Module], None] | None = None) -> Encoder:
    """A port whose outputs are changed; ``before`` may do something to the arguments first."""

    class Wrong(Encoder):
        def forward(
            self,
            input_ids: Tensor,
            attention_mask: Tensor | None = None,
            token_type_ids: Tensor | None = None,
            position_ids: Tensor | None = None,
        ) -> dict[str, Tensor]:
            names = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
            values = (input_ids, attention_mask, token_type_ids, position_ids)
            given: dict[str, Any] = dict(zip(names, values, strict=True))
            if before is not None:
                before(given, self)
            return change(super().forward(**given), given, self)

    return Wrong()


def where(condition: Callable[[dict[str, Any]], bool]) -> Change:
    """Outputs that are off by a thousandth where a condition of the arguments holds."""
    return lambda out, given, port: {name: one * 1.001 for name, one in out.items()} if condition(given) else out


def _left(given: dict[str, Any]) -> bool:
    mask = given["attention_mask"]
    return mask is not None and bool((mask[:, 0] == 0).any())


def _gaps(given: dict[str, Any]) -> bool:
    mask = given["attention_mask"]
    return mask is not None and bool((mask.long().diff(dim=1).ne(0).sum(1) > 1).any())


def _masked(given: dict[str, Any], condition: Callable[[Tensor], bool]) -> bool:
    """Whether there is a mask that hides something, and for which the condition holds."""
    mask = given["attention_mask"]
    return mask is not None and bool((mask == 0).any()) and condition(mask)


def _as_many(given: dict[str, Any]) -> bool:
    """Whether all rows keep as many tokens, and not the same ones."""
    mask = given["attention_mask"]
    counts = None if mask is None else mask.sum(1)
    return counts is not None and bool((counts == counts[0]).all() and (mask != mask[:1]).any())


def _counted(out: dict[str, Tensor], given: dict[str, Any], port: Any) -> dict[str, Tensor]:
    port.calls = getattr(port, "calls", 0) + 1
    return {name: one + 1e-3 * port.calls for name, one in out.items()}


def _kept(out: dict[str, Tensor], given: dict[str, Any], port: Any) -> dict[str, Tensor]:
    """Writes all outputs to one tensor, so that those that somebody holds change."""
    if not hasattr(port, "kept") or port.kept.shape != out["logits"].shape or port.kept.dtype != out["logits"].dtype:
        port.kept = torch.zeros_like(out["logits"])
    port.kept.copy_(out["logits"].detach())
    return {**out, "logits": port.kept}


def _kept_if_single(out: dict[str, Tensor], given: dict[str, Any], port: Any) -> dict[str, Tensor]:
    """As before, where there is one token."""
    return _kept(out, given, port) if given["input_ids"].numel() == 1 else out


def _kept_if_large(out: dict[str, Tensor], given: dict[str, Any], port: Any) -> dict[str, Tensor]:
    """As before, where there are many numbers."""
    return _kept(out, given, port) if out["logits"].numel() > 150 else out  # more than any first batch


def _drawn(out: dict[str, Tensor], given: dict[str, Any], port: Any) -> dict[str, Tensor]:
    return {name: one + 1e-4 * int.from_bytes(os.urandom(1)) for name, one in out.items()}


def _remembered(out: dict[str, Tensor], given: dict[str, Any], port: Any) -> dict[str, Tensor]:
    """Gives the last answer again where the token ids are the same, whatever the mask."""
    ids = given["input_ids"]
    last: tuple[Tensor, dict[str, Tensor]] | None = getattr(port, "last", None)
    if last is not None and torch.equal(last[0], ids) and last[1]["logits"].dtype == out["logits"].dtype:
        return last[1]
    port.last = ids.clone(), out
    return out


def _memory(*names: str) -> Change:
    """Gives any earlier answer again where these arguments are the same, whatever the others."""

    def remembered(out: dict[str, Tensor], given: dict[str, Any], port: Any) -> dict[str, Tensor]:
        known: dict[Any, dict[str, Tensor]] = port.__dict__.setdefault("known", {})
        values = [given[name] for name in names]
        key = (
            out["logits"].dtype,
            *(None if value is None else (value.shape, tuple(value.flatten().tolist())) for value in values),
        )
        return known.setdefault(key, out)

    return remembered


def _behind(token: int, *before: int) -> Change:
    """Wrong at a token that has these before it, chosen without a branch of the code."""

    def changed(out: dict[str, Tensor], given: dict[str, Any], port: Any) -> dict[str, Tensor]:
        ids = given["input_ids"]
        hit = ids == token
        for back, other in enumerate(before, 1):
            hit = hit & (ids.roll(back, 1) == other)
        return {**out, "logits": torch.where(hit[..., None], 1.001 * out["logits"], out["logits"])}

    return changed


def _repeated(out: dict[str, Tensor], given: dict[str, Any], port: Any) -> dict[str, Tensor]:
    """Wrong in rows that hold a token five times."""
    hit = (given["input_ids"] == 23).sum(1, keepdim=True) > 4
    return {**out, "logits": torch.where(hit[..., None], 1.001 * out["logits"], out["logits"])}


def _writes(given: dict[str, Any], port: Any) -> None:
    if given["attention_mask"] is not None:
        given["attention_mask"][:, -1] = 1


def _moves(given: dict[str, Any], port: Any) -> None:
    with torch.no_grad():
        port.head.bias += 1e-4


def _equal_rows(given: dict[str, Any]) -> bool:
    """Whether rows of the same token ids are masked in different ways."""
    ids = given["input_ids"]
    return len(ids) > 1 and bool((ids == ids[:1]).all()) and _masked(given, lambda mask: bool((mask != mask[:1]).any()))


def _counting(given: dict[str, Any]) -> bool:
    ids = given["input_ids"]
    return ids.shape[1] > 2 and bool((ids.diff(dim=1) == 1).all())


def _three_equal(given: dict[str, Any]) -> bool:
    """Whether a row of several tokens holds one three times in a row that no code names."""
    ids = given["input_ids"]
    equal = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 35) & (ids[:, 1:] < 44)
    return ids.shape[1] > 3 and bool(((equal[:, 1:] & equal[:, :-1]).any(1) & (ids != ids[:, :1]).any(1)).any())


INPUTS = {
    "rows of the same token ids with different masks": where(_equal_rows),
    "token ids that count upwards": where(_counting),
    "the last place hidden in every row": where(
        lambda given: _masked(
            given, lambda mask: mask.shape[1] > 4 and bool((mask[:, -1] == 0).all() and mask[:, :-1].all())
        )
    ),
    "places hidden in front of every row": where(
        lambda given: _masked(
            given, lambda mask: mask.shape[1] > 4 and bool((mask[:, :2] == 0).all() and mask[:, 2:].all())
        )
    ),
    "several rows of one token": where(lambda given: given["input_ids"].shape[1] == 1 < len(given["input_ids"])),
    "a length that is in neither config nor code, padded in front": where(
        lambda given: _left(given) and given["input_ids"].shape[1] == 18
    ),
    "rows of one length": where(lambda given: given["input_ids"].shape[1] == 17),
    "one row": where(lambda given: given["input_ids"].shape[0] == 1),
    "many rows": where(lambda given: given["input_ids"].shape[0] > 16),
    "left padding": where(_left),
    "gaps in the mask": where(_gaps),
    "left padding of a short row": where(lambda given: _left(given) and given["input_ids"].shape[1] < 4),
    "as many tokens at other places": where(_as_many),
    "no mask": where(lambda given: given["attention_mask"] is None),
    "no segments": where(lambda given: given["token_type_ids"] is None),
    "segments that come back": where(
        lambda given: (
            given["token_type_ids"] is not None
            and bool(
                (given["token_type_ids"].diff(dim=1) > 0).any() and (given["token_type_ids"].diff(dim=1) < 0).any()
            )
        )
    ),
    "the last token": where(lambda given: bool((given["input_ids"] == 49).any())),
    "one token again and again": where(lambda given: bool((given["input_ids"] == given["input_ids"][:, :1]).all())),
    "the padding token without a mask": where(
        lambda given: given["attention_mask"] is None and bool((given["input_ids"] == 0).any())
    ),
    "padding in front of rows whose segments are at their default": where(
        lambda given: _left(given) and given["token_type_ids"] is None
    ),
    "padding in front of long rows": where(lambda given: _left(given) and given["input_ids"].shape[1] > 13),
    "positions given with gaps in the mask": where(lambda given: _gaps(given) and given["position_ids"] is not None),
    "a token behind another one": _behind(31, 7),
    "a token behind two others": _behind(31, 7, 44),
    "a token behind a list of others": _behind(8, 21, 35),
    "a token five times in a row of tokens": _repeated,
    "a row that begins with a token and ends with another": where(
        lambda given: bool(((given["input_ids"][:, 0] == 19) & (given["input_ids"][:, -1] == 19)).any())
    ),
    "tensors that do not lie row by row in memory": where(lambda given: not given["input_ids"].is_contiguous()),
    "the padding token near the end of several rows": where(
        lambda given: (
            len(given["input_ids"]) > 2
            and bool((given["input_ids"][:, -3:-1] == 0)[:, 0].any())
            and given["input_ids"].shape[1] > 13
            and bool((given["attention_mask"] == 1).all())
        )
    ),
    "as many rows as tokens": where(lambda given: _masked(given, lambda mask: mask.shape[0] == mask.shape[1])),
    "as many rows as a number of the config": where(lambda given: _masked(given, lambda mask: len(mask) == 12)),
    "one hidden token of hundreds": where(
        lambda given: _masked(given, lambda mask: int((mask == 0).sum()) * 100 < mask.numel())
    ),
    "many rows that are padded in front": where(lambda given: _left(given) and len(given["input_ids"]) == 17),
    "rows of one token that is kept": where(
        lambda given: _masked(given, lambda mask: mask.shape[1] > 9 and int(mask.sum(1).max()) == 1)
    ),
    "a long row of which little is hidden in front": where(
        lambda given: (
            _left(given) and int(given["attention_mask"][given["attention_mask"][:, 0] == 0].sum(1).max()) > 15
        )
    ),
    "a row of padding beside padded ones": where(
        lambda given: _masked(
            given, lambda mask: bool((mask == 0).all(1).any() and ((mask == 0).any(1) & (mask != 0).any(1)).any())
        )
    ),
    "a named token that is hidden": where(
        lambda given: _masked(given, lambda mask: bool(((mask == 0) & (given["input_ids"] == 33)).any()))
    ),
    "three equal tokens in a row": where(_three_equal),
    "eleven rows with gaps": where(lambda given: _gaps(given) and len(given["input_ids"]) == 11),
    "a mask of uint8": where(lambda given: _masked(given, lambda mask: mask.dtype == torch.uint8)),
    "a mask of int32": where(lambda given: _masked(given, lambda mask: mask.dtype == torch.int32)),
    "a mask of bool": where(
        lambda given: given["attention_mask"] is not None and given["attention_mask"].dtype == torch.bool
    ),
}
"""Ports that are wrong on some inputs: what it takes to see it."""

WAYS: dict[str, tuple[Change, Callable[[dict[str, Any], nn.Module], None] | None]] = {
    "counts its calls": (_counted, None),
    "keeps its outputs": (_kept, None),
    "keeps its outputs for single tokens": (_kept_if_single, None),
    "keeps its large outputs": (_kept_if_large, None),
    "draws from the system": (_drawn, None),
    "remembers by token ids": (_remembered, None),
    "remembers all by token ids": (_memory("input_ids"), None),
    "remembers all by token ids and mask": (_memory("input_ids", "attention_mask"), None),
    "remembers all but the positions": (_memory("input_ids", "attention_mask", "token_type_ids"), None),
    "remembers all but the mask": (_memory("input_ids", "token_type_ids", "position_ids"), None),
    "writes to its mask": (lambda out, given, port: out, _writes),
    "moves a weight": (lambda out, given, port: out, _moves),
    "is another with gradients": (
        lambda out, given, port: {name: one * (1.01 if torch.is_grad_enabled() else 1) for name, one in out.items()},
        None,
    ),
    "is another in inference mode": (
        lambda out, given, port: {
            name: one * (1.01 if torch.is_inference_mode_enabled() else 1) for name, one in out.items()
        },
        None,
    ),
}
"""Ports that are no pure functions of their inputs."""
