"""Mistakes that everybody makes once, made in the text of a handwritten model: an edit of its source file."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from torch import nn

from tests.families.pairs import BERT, MODERN_BERT, OPENAI_GPT, SEQ2SEQ, Pair

BERT_MODEL = Pair("bert", "BertModel", BERT)
BART = Pair("bart", "BartForConditionalGeneration", SEQ2SEQ)
MODERN = Pair("modern_bert", "ModernBertModel", MODERN_BERT, single=True)
GPT = Pair("openai_gpt", "OpenAIGPTLMHeadModel", OPENAI_GPT)

MODELS = {
    "bert": "bert:Bert",
    "bart": "seq2seq:Seq2Seq",
    "modern_bert": "modern_bert:ModernBert",
    "openai_gpt": "language_model:LanguageModel",
}
"""Table -> file and class of its model."""


KEPT = 'self.register_buffer("words", torch.randn(config.vocab_size, config.hidden_size), persistent=False)'


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A mistake in a file.

    Attributes:
        pair: whose port it is made in.
        changes: what stands in the file, and what stands there instead.
        cause: the entry of the catalogue.
        detail: what the finding says of it.
        place: what every guilty probe was made in, among others: how a module's path ends, as a regular expression.
    """

    pair: Pair
    changes: tuple[tuple[str, str], ...]
    cause: str
    detail: str = ""
    place: str


EDITS = {
    "the norm's eps is torch's own": Edit(
        pair=BERT_MODEL,
        changes=(
            (
                "self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)",
                "self.attention_norm = nn.LayerNorm(config.hidden_size)",
            ),
        ),
        cause="LayerNorm eps",
        detail="eps is 1e-05 where the reference has 1e-12",
        place="attention_norm",
    ),
    "the residual is added behind the norm": Edit(
        pair=BERT_MODEL,
        changes=(
            (
                "hidden = self.attention_norm(hidden + self.dropout(attended))",
                "hidden = hidden + self.attention_norm(self.dropout(attended))",
            ),
        ),
        cause="norm before the sum",
        place=r"layers\.\d(\.attention_norm)?",
    ),
    "positions are counted from 1": Edit(
        pair=BERT_MODEL,
        changes=(("torch.arange(input_ids.shape[-1], ", "torch.arange(1, input_ids.shape[-1] + 1, "),),
        cause="position offset",
        place="embeddings.position",
    ),
    "the scores are not scaled": Edit(
        pair=BERT_MODEL,
        changes=(("attn_mask=bias, dropout_p=dropout)", "attn_mask=bias, dropout_p=dropout, scale=1.0)"),),
        cause="1/sqrt(d) missing",
        place="attention.core",
    ),
    "the mask says where padding is": Edit(
        pair=BERT_MODEL,
        changes=(("padded = attention_mask.to(torch.bool).logical_not()", "padded = attention_mask.to(torch.bool)"),),
        cause="padding mask inverted",
        place="attention.core",
    ),
    "the mask says where padding is, with a decoder": Edit(
        pair=BART,
        changes=(("attention_mask.to(torch.bool)[", "attention_mask.logical_not()["),),
        cause="padding mask inverted",
        place="attention",
    ),
    "the decoder looks ahead": Edit(
        pair=BART,
        changes=(("return ones.tril(past)[None, None]", "return ones[None, None]"),),
        cause="causal mask missing",
        place="attention",
    ),
    "the decoder keeps the words that it was born with": Edit(
        pair=BART,
        changes=(
            (
                "self.projection = Projection(config=config)",
                "self.projection = Projection(config=config); " + KEPT,
            ),
            ("self.projection(hidden, self.embedding.weight)", "self.projection(hidden, self.words)"),
        ),
        cause="decoder untied",
        place="projection",
    ),
    "key, query, value": Edit(
        pair=MODERN,
        changes=(("query, key, value = fused.view", "key, query, value = fused.view"),),
        cause="query and key swapped",
        place="attention",
    ),
    "neighbours are rotated": Edit(
        pair=MODERN,
        changes=(
            ("angles = torch.cat((angles, angles), dim=-1)", "angles = angles.repeat_interleave(2, dim=-1)"),
            ("first, second = states.chunk(2, dim=-1)", "first, second = states[..., ::2], states[..., 1::2]"),
            ("torch.cat((-second, first), dim=-1)", "torch.stack((-second, first), dim=-1).flatten(-2)"),
        ),
        cause="rotary pairing",
        place="attention",
    ),
    "theta is the paper's": Edit(
        pair=MODERN,
        changes=(("1.0 / theta**exponents", "1.0 / 10_000.0**exponents"),),
        cause="rotary theta",
        detail="theta is 10000 where the reference",
        place="attention",
    ),
    "the window is one too narrow": Edit(
        pair=MODERN,
        changes=((".abs() > window", ".abs() >= window"),),
        cause="local window of another width",
        place="attention",
    ),
    "the activation is the other GELU": Edit(
        pair=GPT,
        changes=(("activation=ACTIVATIONS[config.hidden_act](),", "activation=nn.GELU(),"),),
        cause="exact GELU for another activation",
        place="activation",
    ),
}


def edited(edit: Edit) -> type[nn.Module]:
    """The model's class, out of its file with the mistake in it."""
    name, _, kind = MODELS[edit.pair.table].partition(":")
    right = importlib.import_module(f"porting.models.{name}")
    module = ModuleType(f"edited_{name}")
    source = _changed(Path(right.__file__ or "").read_text(encoding="utf-8"), edit.changes)
    sys.modules[module.__name__] = module  # where dataclasses look for what an annotation means
    exec(compile(source, module.__name__, "exec"), module.__dict__)  # noqa: S102  # it is our own file
    found: type[nn.Module] = getattr(module, kind)
    return found


def _changed(source: str, changes: Iterable[tuple[str, str]]) -> str:
    for old, new in changes:
        if old not in source:
            raise LookupError(f"the file no longer has {old!r}")
        source = source.replace(old, new)
    return source
