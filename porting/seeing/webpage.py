"""Attention as a page: tokens shaded by how much one of them attends to each, and a small map of every head.

The shade is the square root of the share, the same in every head and for every token, so that shades compare.
"""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from porting.answers import Answer
from porting.pages import in_frame, render_page
from porting.seeing.attention_data import Shares, refused

LARGEST = 1 << 24
"""Numbers in a page, two bytes each: more than that no browser likes to open."""

MOST = 65535
"""The whole number that stands for a share of 1 in the page."""

MAP_COLOUR = (0xE0, 0x7B, 0x10)
"""Red, green and blue of the small maps, over light paper and dark; their opacity is the shade."""


@dataclass(frozen=True, kw_only=True)
class ShadedToken:
    """A token as the page shows it.

    Attributes:
        share: how much of the attention it gets, 0 to 1.
        pressed: whether it is the one that attends.
        special: whether the tokenizer added it.
    """

    text: str
    share: float
    pressed: bool
    special: bool = False

    @property
    def shade(self) -> str:
        """The opacity of its colour, 0 to 1."""
        return f"{self.share**0.5:.3f}"

    @property
    def percent(self) -> str:
        """The share in percent, for below the token."""
        return in_percent(self.share)


def in_percent(share: float) -> str:
    """A share in whole percent.

    >>> in_percent(0.126), in_percent(0.0049), in_percent(0.0)
    ('13', '<1', '0')
    """
    return "<1" if 0 < share < 0.005 else f"{100 * share:.0f}"


def attention_page(
    attention: Shares,
    *,
    layer: int | None = None,
    head: int | None = None,
    token: int | str | None = None,
    answer: Answer | None = None,
) -> str:
    """The page."""
    numbers = sum(one.heads.numel() for one in attention.layers)
    if numbers > LARGEST:
        message = f"the page would hold {numbers:,} numbers, and {LARGEST:,} are the most that it may"
        raise refused(message, "shorten the text, or draw a single head (.png)")
    place = attention.place(token)
    layer, head = attention.telling(place, layer=layer, head=head)
    shares = [rounded(share) for share in attention.of(layer, head)[place].tolist()]
    most = max(range(len(shares)), key=shares.__getitem__)
    counts = [len(one.heads) for one in attention.layers]
    values = {
        "model": attention.model,
        "answer": answer,
        "text": " ".join(attention.tokens[:12]) + (" …" if len(attention.tokens) > 12 else ""),
        "tokens": [
            ShadedToken(text=text, share=share, pressed=number == place, special=number in attention.special)
            for number, (text, share) in enumerate(zip(attention.tokens, shares, strict=True))
        ],
        "layer": layer,
        "head": head,
        "place": place,
        "from_token": attention.tokens[place],
        "most_token": attention.tokens[most],
        "most_share": f"{shares[most]:.3f}",
        "layers": [
            {"name": one.name, "maps": [map_address(values) for values in one.heads]} for one in attention.layers
        ],
        "columns": max(counts),
        "counts": ",".join(map(str, counts)),
        "numbers": packed(attention),
        "legend": [ShadedToken(text="", share=share, pressed=False) for share in (0.0, 0.05, 0.25, 0.5, 1.0)],
    }
    return render_page("attention.html", values, styles=["answer.css", "attention.css"], scripts=["attention.js"])


def attention_frame(attention: Shares) -> str:
    """The page in a frame, for a notebook: neither's styles reach the other."""
    wide = sum(max(10 * len(token) + 20, 50) for token in attention.tokens)  # CSS pixels, about
    height = 1030 + 51 * -(-wide // 850) + 74 * len(attention.layers)
    return in_frame(attention_page(attention), title="Attention", height=height)


def rounded(share: float) -> float:
    """A share as the page knows it."""
    return round(share * MOST) / MOST


def packed(attention: Shares) -> str:
    """All shares as base64 of little-endian 16-bit numbers, :data:`MOST` being 1: layer by layer, [h q k] each."""
    whole = torch.cat([one.heads.reshape(-1) for one in attention.layers])
    numbers = (whole.double().clamp(0, 1) * MOST).round().to(torch.int32).tolist()
    return base64.b64encode(struct.pack(f"<{len(numbers)}H", *numbers)).decode()


def map_address(values: Tensor) -> str:
    """A head's probabilities [q k] as a picture of as many pixels, in a ``data:`` address."""
    shades = (values.clamp(0, 1).sqrt() * 255).round().to(torch.uint8).tolist()
    return f"data:image/png;base64,{base64.b64encode(_png(shades)).decode()}"


def _png(shades: list[list[int]]) -> bytes:
    """One colour in 256 opacities (Portable Network Graphics, third edition, sections 5 and 11)."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    pixels = b"".join(b"\0" + bytes(row) for row in shades)  # each row unfiltered
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", len(shades[0]), len(shades), 8, 3, 0, 0, 0),
        b"PLTE": bytes(MAP_COLOUR) * 256,
        b"tRNS": bytes(range(256)),
        b"IDAT": zlib.compress(pixels, 9),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, content) for kind, content in parts.items())
