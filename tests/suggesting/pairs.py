"""Encoder-decoders in another person's words: BART's kind, and T5's, each with its projections grouped as they like.

Self-attention has one fused matrix, cross-attention one for the queries and one for the keys and values, or three.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def split(x: Tensor, heads: int) -> Tensor:
    """[b s e] -> [b h s d]."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


class SelfAttending(nn.Module):
    """Attention within one sequence, with one fused matrix."""

    def __init__(self, width: int, heads: int, *, inner: int = 0, bias: bool = True, scaled: bool = True) -> None:
        super().__init__()
        inner = inner or width
        self.heads, self.scale = heads, (inner // heads) ** -0.5 if scaled else 1.0
        self.c_in, self.c_out = nn.Linear(width, 3 * inner, bias=bias), nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor, hidden: Tensor, extra: Tensor | float = 0.0) -> Tensor:
        """``hidden``: True where nothing may be seen, [b 1 q k]; ``extra`` is added to the scores."""
        q, k, v = (split(one, self.heads) for one in self.c_in(x).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) * self.scale + extra).masked_fill(hidden, torch.finfo(x.dtype).min)
        out: Tensor = self.c_out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


class CrossAttending(nn.Module):
    """Attention to what the encoder gives, with three matrices."""

    def __init__(self, width: int, heads: int, *, inner: int = 0, bias: bool = True, scaled: bool = True) -> None:
        super().__init__()
        inner = inner or width
        self.heads, self.scale = heads, (inner // heads) ** -0.5 if scaled else 1.0
        self.ask = nn.Linear(width, inner, bias=bias)
        self.match, self.tell = nn.Linear(width, inner, bias=bias), nn.Linear(width, inner, bias=bias)
        self.c_out = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor, memory: Tensor, hidden: Tensor, extra: Tensor | float = 0.0) -> Tensor:
        """``hidden``: True where a word of the source is padding, [b 1 1 k]; ``extra`` is added to the scores."""
        q, k, v = split(self.ask(x), self.heads), split(self.match(memory), self.heads), self.tell(memory)
        scores = (q @ k.transpose(-1, -2) * self.scale + extra).masked_fill(hidden, torch.finfo(x.dtype).min)
        out: Tensor = self.c_out((scores.softmax(-1) @ split(v, self.heads)).transpose(1, 2).flatten(2))
        return out


class OfThree(CrossAttending):
    """Attention within one sequence, with three matrices."""

    def forward(self, x: Tensor, hidden: Tensor, extra: Tensor | float = 0.0) -> Tensor:  # type: ignore[override]  # one sequence
        return super().forward(x, x, hidden, extra)


class Bart(nn.Module):
    """BART: norms behind the sums, learned positions whose first two rows are nobody's, one word table for all.

    A config's field for words tells whether they are multiplied by the root of the width; ``first`` puts the norms in
    front, as mBART has them, with another at the end of each stack.
    """

    first, biased, learned, eps = False, True, True, 1e-5
    reading: Any  # lists of dictionaries of modules
    writing: Any

    def __init__(self, config: Any) -> None:  # it reads what it needs
        super().__init__()
        e, h, eps, biased = config.d_model, config.encoder_attention_heads, self.eps, self.biased
        self.scale = math.sqrt(e) if config.scale_embedding else 1.0
        self.words = nn.Embedding(config.vocab_size, e)
        if self.learned:
            self.source_places = nn.Embedding(config.max_position_embeddings + 2, e)
            self.target_places = nn.Embedding(config.max_position_embeddings + 2, e)
            self.source_norm, self.target_norm = nn.LayerNorm(e, eps), nn.LayerNorm(e, eps)
        self.reading = nn.ModuleList(
            nn.ModuleDict({
                "look": SelfAttending(e, h, bias=biased), "n1": nn.LayerNorm(e, eps),
                "wide": nn.Linear(e, config.encoder_ffn_dim), "narrow": nn.Linear(config.encoder_ffn_dim, e),
                "n2": nn.LayerNorm(e, eps),
            })
            for _ in range(config.encoder_layers)
        )  # fmt: skip
        self.writing = nn.ModuleList(
            nn.ModuleDict({
                "look": SelfAttending(e, h, bias=biased), "n1": nn.LayerNorm(e, eps),
                "recall": CrossAttending(e, h, bias=biased), "n2": nn.LayerNorm(e, eps),
                "wide": nn.Linear(e, config.decoder_ffn_dim), "narrow": nn.Linear(config.decoder_ffn_dim, e),
                "n3": nn.LayerNorm(e, eps),
            })
            for _ in range(config.decoder_layers)
        )  # fmt: skip
        if self.first:
            self.source_end, self.target_end = nn.LayerNorm(e, eps), nn.LayerNorm(e, eps)

    def around(self, x: Tensor, norm: Any, part: Any) -> Tensor:
        """A part with its norm and its residual."""
        out: Tensor = x + part(norm(x)) if self.first else norm(x + part(x))
        return out

    def begun(self, words: Tensor, places: Any, norm: Any) -> Tensor:
        """The words with their places, [b s e]."""
        out: Tensor = norm(words * self.scale + places(torch.arange(words.shape[1]) + 2))
        return out

    def target(self, tgt: Tensor) -> Tensor:
        """The words of the target, [b t e]."""
        out: Tensor = self.words(tgt)
        return out

    def ahead(self, tgt: Tensor) -> Tensor:
        """True at words of the target that may not be seen, [b 1 t t] or [t t]."""
        return torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)

    def forward(self, src: Tensor, src_mask: Tensor, tgt: Tensor) -> Tensor:
        """``src`` [b s], ``src_mask`` [b s] with 1 at words, ``tgt`` [b t]; logits [b t v]."""
        hidden = src_mask[:, None, None] == 0
        future = self.ahead(tgt)
        parts = [getattr(self, name, None) for name in ("source_places", "source_norm", "target_places", "target_norm")]
        x = self.begun(self.words(src), parts[0], parts[1])
        for layer in self.reading:
            x = self.around(x, layer["n1"], lambda y, layer=layer: layer["look"](y, hidden))
            x = self.around(x, layer["n2"], lambda y, layer=layer: layer["narrow"](F.gelu(layer["wide"](y))))
        memory = self.source_end(x) if self.first else x
        x = self.begun(self.target(tgt), parts[2], parts[3])
        for layer in self.writing:
            x = self.around(x, layer["n1"], lambda y, layer=layer: layer["look"](y, future))
            x = self.around(x, layer["n2"], lambda y, layer=layer: layer["recall"](y, memory, hidden))
            x = self.around(x, layer["n3"], lambda y, layer=layer: layer["narrow"](F.gelu(layer["wide"](y))))
        logits: Tensor = (self.target_end(x) if self.first else x) @ self.words.weight.T
        return logits


class OwnMasks(Bart):
    """It takes no mask: padding of the source is what equals the padding token."""

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:  # type: ignore[override]  # it takes less
        """As in BART."""
        return super().forward(src, (src != 1).long(), tgt)


class BothMasks(OwnMasks):
    """Padding of the target as well."""

    def ahead(self, tgt: Tensor) -> Tensor:
        """As in BART, and padding."""
        return super().ahead(tgt) | (tgt == 1)[:, None, None]


class TwoTables(Bart):
    """A word table of its own for the target."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.others = nn.Embedding(config.vocab_size, config.d_model)

    def target(self, tgt: Tensor) -> Tensor:
        """The words of the target, [b t e]."""
        out: Tensor = self.others(tgt)
        return out


class Unbiased(Bart):
    """No biases in attention."""

    biased = False


class Flat(Bart):
    """Logits of all words one after the other, [(b t) v]."""

    def forward(self, src: Tensor, src_mask: Tensor, tgt: Tensor) -> Tensor:
        """As in BART."""
        return super().forward(src, src_mask, tgt).flatten(0, 1)


class Marian(Bart):
    """Marian: positions are sines next to their cosines, in float32; no norm in front; another eps."""

    learned, eps = False, 1e-6

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width = config.d_model
        angles = torch.arange(64).float()[:, None] / 10000 ** (torch.arange(0, width, 2).float() / width)
        self.table = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)

    def begun(self, words: Tensor, places: Any, norm: Any) -> Tensor:
        """The words with their places, [b s e]."""
        return words * self.scale + self.table[: words.shape[1]]


class Unfair(Marian):
    """Pegasus with norms that divide by the unbiased deviation."""

    first, eps = True, 1e-5

    def around(self, x: Tensor, norm: Any, part: Any) -> Tensor:
        """A part with its norm, taken by hand, and its residual."""
        spread = x.std(-1, keepdim=True) + 1e-6
        out: Tensor = x + part((x - x.mean(-1, keepdim=True)) / spread * norm.weight + norm.bias)
        return out


class MBart(Bart):
    """mBART: norms in front of the parts, and one behind each stack."""

    first = True


class Rms(nn.Module):
    """RMS norm, T5's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[... e] -> [... e]."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain


class Distances(nn.Module):
    """T5's table of biases for each distance between two words, in buckets."""

    def __init__(self, buckets: int, furthest: int, heads: int, *, both: bool) -> None:
        super().__init__()
        self.buckets, self.furthest, self.both = buckets, furthest, both
        self.table = nn.Embedding(buckets, heads)

    def forward(self, length: int) -> Tensor:
        """The biases, [1 h q k]."""
        apart = torch.arange(length)[None] - torch.arange(length)[:, None]
        count = self.buckets // 2 if self.both else self.buckets
        start = (apart > 0).long() * count if self.both else torch.zeros_like(apart)
        away = apart.abs() if self.both else (-apart).clamp_min(0)
        near = count // 2
        far = torch.log(away.clamp_min(1).float() / near) / math.log(self.furthest / near) * (count - near)
        bucket = torch.where(away < near, away, (near + far.long()).clamp_max(count - 1))
        out: Tensor = self.table(start + bucket).permute(2, 0, 1)[None]
        return out


class T5(nn.Module):
    """T5: RMS norms in front, no bias, no scale of the scores, distances in the first layer's table."""

    gated = False
    reading: Any  # as above
    writing: Any

    def __init__(self, config: Any) -> None:  # it reads what it needs
        super().__init__()
        e, h, inner, wide = config.d_model, config.num_heads, config.num_heads * config.d_kv, config.d_ff
        self.words = nn.Embedding(config.vocab_size, e)
        reach = config.relative_attention_num_buckets, config.relative_attention_max_distance
        self.source_distance = Distances(*reach, h, both=True)
        self.target_distance = Distances(*reach, h, both=False)

        def feed() -> dict[str, nn.Module]:
            gate = {"gate": nn.Linear(e, wide, bias=False)} if self.gated else {}
            return {**gate, "wide": nn.Linear(e, wide, bias=False), "narrow": nn.Linear(wide, e, bias=False)}

        def own() -> nn.Module:
            return self.attending(e, h, inner=inner, bias=False)

        def other() -> nn.Module:
            return CrossAttending(e, h, inner=inner, bias=False, scaled=False)

        self.reading = nn.ModuleList(
            nn.ModuleDict({"n1": Rms(e), "look": own(), "n2": Rms(e), **feed()}) for _ in range(config.num_layers)
        )
        self.writing = nn.ModuleList(
            nn.ModuleDict({"n1": Rms(e), "look": own(), "n2": Rms(e), "recall": other(), "n3": Rms(e), **feed()})
            for _ in range(config.num_decoder_layers)
        )
        self.source_end, self.target_end = Rms(e), Rms(e)
        self.head = nn.Linear(e, config.vocab_size, bias=False) if self.gated else None

    def attending(self, width: int, heads: int, *, inner: int, bias: bool) -> nn.Module:
        """The attention within a sequence."""
        return SelfAttending(width, heads, inner=inner, bias=bias, scaled=False)

    def biased(self, apart: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to the scores of each layer, and what of them is hidden there."""
        return apart, hidden

    def feed(self, layer: Any, x: Tensor) -> Tensor:
        """The feed-forward part."""
        if self.gated:
            out: Tensor = layer["narrow"](F.gelu(layer["gate"](x), approximate="tanh") * layer["wide"](x))
        else:
            out = layer["narrow"](F.relu(layer["wide"](x)))
        return out

    def forward(self, src: Tensor, src_mask: Tensor, tgt: Tensor) -> Tensor:
        """``src`` [b s], ``src_mask`` [b s] with 1 at words, ``tgt`` [b t]; logits [b t v]."""
        hidden = src_mask[:, None, None] == 0
        future = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
        x, (apart, unseen) = self.words(src), self.biased(self.source_distance(src.shape[1]), hidden)
        for layer in self.reading:
            x = x + layer["look"](layer["n1"](x), unseen, apart)
            x = x + self.feed(layer, layer["n2"](x))
        memory = self.source_end(x)
        x, (apart, unseen) = self.words(tgt), self.biased(self.target_distance(tgt.shape[1]), future)
        for layer in self.writing:
            x = x + layer["look"](layer["n1"](x), unseen, apart)
            x = x + layer["recall"](layer["n2"](x), memory, hidden)
            x = x + self.feed(layer, layer["n3"](x))
        x = self.target_end(x)
        logits: Tensor = x * x.shape[-1] ** -0.5 @ self.words.weight.T if self.head is None else self.head(x)
        return logits


class T5Early(T5):
    """T5 that hides scores by its biases, before its first layer."""

    def biased(self, apart: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return apart.masked_fill(hidden, torch.finfo(apart.dtype).min), torch.zeros_like(hidden)


class T5Scaled(T5):
    """T5 that divides the scores of a sequence with itself by the root of a head's size, as other models do."""

    def attending(self, width: int, heads: int, *, inner: int, bias: bool) -> nn.Module:
        return OfThree(width, heads, inner=inner, bias=bias)


class NoDistances(nn.Module):
    def forward(self, length: int) -> Tensor:
        """Nothing, [1 1 q k]."""
        return torch.zeros(1, 1, length, length)


class T5Blind(T5):
    """T5 that adds no biases of distances, and has another activation: two differences at once."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.source_distance = self.target_distance = NoDistances()  # type: ignore[assignment]  # the flaw

    def feed(self, layer: Any, x: Tensor) -> Tensor:
        out: Tensor = layer["narrow"](layer["wide"](x).sin())
        return out


class T5Gated(T5):
    """T5 1.1: a gate, and a head of its own."""

    gated = True


class OfTorch(nn.Module):
    """BART of :class:`torch.nn.Transformer`, as its tutorial calls it.

    All seven masks have to be given; both texts are embedded before the encoder runs; a decoder's layer has one matrix
    for its queries, which see its own text, and the keys and values, which are the encoder's; and the number of
    positions is written into it.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        encoder_layers: int,
        decoder_layers: int,
        encoder_attention_heads: int,
        encoder_ffn_dim: int,
    ) -> None:
        super().__init__()
        self.transformer = nn.Transformer(
            d_model=d_model,
            nhead=encoder_attention_heads,
            num_encoder_layers=encoder_layers,
            num_decoder_layers=decoder_layers,
            dim_feedforward=encoder_ffn_dim,
            activation="gelu",
            batch_first=True,
        )
        self.transformer.encoder.norm = self.transformer.decoder.norm = None
        self.words = nn.Embedding(vocab_size, d_model)
        self.source_places, self.target_places = nn.Embedding(42, d_model), nn.Embedding(42, d_model)
        self.source_norm, self.target_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(
        self,
        src: Tensor,
        trg: Tensor,
        src_mask: Tensor,
        tgt_mask: Tensor,
        src_padding_mask: Tensor,
        tgt_padding_mask: Tensor,
        memory_key_padding_mask: Tensor,
    ) -> Tensor:
        """The masks are True at what is not to be seen."""
        x = self.source_norm(self.words(src) + self.source_places(torch.arange(src.shape[1]) + 2))
        y = self.target_norm(self.words(trg) + self.target_places(torch.arange(trg.shape[1]) + 2))
        masks = (src_mask, tgt_mask, None, src_padding_mask, tgt_padding_mask, memory_key_padding_mask)
        out: Tensor = self.transformer(x, y, *masks) @ self.words.weight.T
        return out
