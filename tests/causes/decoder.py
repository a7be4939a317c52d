"""A decoder as people write one for Llama and what came after it: the text that mistakes are made in."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a family does.

    Attributes:
        centred: LayerNorms without bias, and no RMSNorms.
        one_added: gains are kept as what is added to 1.
        before, behind: each branch has a norm before it, and one behind it.
        own_norms: queries and keys are normed: each ``head``, each head that was ``turned``, or the whole ``width``.
        rotated: so many channels of each head are.
        neighbours: two neighbours are rotated together, and not one channel of each half.
        stretched, smooth: positions are divided by it; with Llama 3's transition between the speeds.
        known: the length for which there is nothing to stretch.
        slopes: attention with linear biases.
        clip: projections are clipped there.
        score_cap, logit_cap: soft caps.
        window: a query sees so many positions in every other layer, the first one among these; all for 0.
        gated: the feed-forward network is.
        experts: so many networks, of which each token is sent to the ``chosen`` with the highest ``scoring``.
        normed, scaled: the shares of a token's experts sum to 1, and are multiplied by it then.
        corrected: a bias is added to the scores where experts are chosen.
        common: the width of a network that all tokens are sent to as well.
    """

    vocab_size: int = 37
    hidden_size: int = 24
    layers: int = 1
    heads: int = 4
    shared: int = 2
    head_size: int = 8
    inner: int = 40
    eps: float = 1e-5
    theta: float = 10_000.0
    centred: bool = False
    one_added: bool = False
    before: bool = True
    behind: bool = False
    own_norms: str = ""
    rotated: int = 8
    neighbours: bool = False
    stretched: float = 1.0
    smooth: bool = False
    known: float = 1024.0
    slopes: bool = False
    clip: float = 0.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    window: int = 0
    gated: bool = True
    experts: int = 0
    chosen: int = 2
    scoring: str = "softmax"
    normed: bool = True
    scaled: float = 1.0
    corrected: bool = False
    common: int = 0
    activation: str = "silu"
    embedding_scale: float = 1.0


class Norm(nn.Module):
    """Source: Zhang and Sennrich 2019, section 4."""

    def __init__(self, width: int, config: Config) -> None:
        super().__init__()
        self.eps, self.config = config.eps, config
        self.weight = nn.Parameter(torch.zeros(width) if config.one_added else torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True) if self.config.centred else x
        normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)
        gain = 1 + self.weight if self.config.one_added else self.weight
        return normed * gain


class Rotary(nn.Module):
    """Source: Su et al. 2021, section 3.4; the transition is that of Llama 3.1."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        speeds = 1.0 / config.theta ** (torch.arange(0, config.rotated, 2).float() / config.rotated)
        speeds = self.transition(speeds, known=config.known) if config.smooth else speeds / config.stretched
        angles = torch.arange(64).float()[:, None] * speeds
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def transition(self, speeds: Tensor, low: float = 1.0, high: float = 4.0, *, known: float) -> Tensor:
        lengths = 2 * math.pi / speeds
        slow = torch.where(lengths > known / low, speeds / self.config.stretched, speeds)
        share = (known / lengths - low) / (high - low)
        between = (1 - share) * slow / self.config.stretched + share * slow
        return torch.where(~(lengths < known / high) & ~(lengths > known / low), between, slow)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """[b h s d]; positions [1 s] or [b s]."""
        rotated, rest = x[..., : self.config.rotated], x[..., self.config.rotated :]
        cos, sin = (self.get_buffer(name)[positions][:, None] for name in ("cos", "sin"))
        if self.config.neighbours:
            first, second = rotated[..., ::2], rotated[..., 1::2]
            turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)
        else:
            first, second = rotated.chunk(2, -1)
            turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return torch.cat([turned, rest], -1)


def linear_biases(heads: int, length: int, steepest: float = 8.0) -> Tensor:
    """[h 1 k].  Source: Press et al. 2021, section 3."""
    slopes = 2.0 ** -(torch.arange(1, heads + 1) * (steepest / heads))
    return slopes[:, None, None] * torch.arange(1 - length, 1)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, wide, narrow = config, config.heads * config.head_size, config.shared * config.head_size
        self.q = nn.Linear(config.hidden_size, wide, bias=False)
        self.k, self.v = (nn.Linear(config.hidden_size, narrow, bias=False) for _ in range(2))
        self.o = nn.Linear(wide, config.hidden_size, bias=False)
        sizes = (wide, narrow) if config.own_norms == "width" else (config.head_size, config.head_size)
        self.q_norm, self.k_norm = (Norm(size, config) if config.own_norms else None for size in sizes)
        self.rotary = Rotary(config)

    def split(self, x: Tensor, norm: Norm | None) -> Tensor:
        """[b s (h d)] -> [b h s d]."""
        if norm is not None and self.config.own_norms == "width":
            x = norm(x)
        x = x.view(*x.shape[:2], -1, self.config.head_size).transpose(1, 2)
        return norm(x) if norm is not None and self.config.own_norms == "head" else x

    def forward(self, x: Tensor, allowed: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.config.clip:
            q, k, v = (tensor.clamp(-self.config.clip, self.config.clip) for tensor in (q, k, v))
        q, k, v = self.split(q, self.q_norm), self.split(k, self.k_norm), self.split(v, None)
        if self.config.rotated:
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        if self.q_norm is not None and self.k_norm is not None and self.config.own_norms == "turned":
            q, k = self.q_norm(q), self.k_norm(k)
        times = self.config.heads // self.config.shared
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        scores = q @ k.mT / self.config.head_size**0.5
        if self.config.score_cap:
            scores = torch.tanh(scores / self.config.score_cap) * self.config.score_cap
        if self.config.slopes:
            scores = scores + linear_biases(self.config.heads, x.shape[1]).to(x)
        shares = scores.masked_fill(~allowed, -1e30).softmax(-1)
        found: Tensor = self.o((shares @ v).transpose(1, 2).flatten(2))
        return found


class Feed(nn.Module):
    def __init__(self, config: Config, inner: int = 0) -> None:
        super().__init__()
        self.config, inner = config, inner or config.inner
        self.gate = nn.Linear(config.hidden_size, inner, bias=False) if config.gated else None
        self.up = nn.Linear(config.hidden_size, inner, bias=False)
        self.down = nn.Linear(inner, config.hidden_size, bias=False)

    def active(self, x: Tensor) -> Tensor:
        if self.config.activation == "silu":
            return F.silu(x)
        return F.gelu(x, approximate="tanh" if self.config.activation == "gelu_tanh" else "none")

    def forward(self, x: Tensor) -> Tensor:
        wide = self.active(self.up(x)) if self.gate is None else self.active(self.gate(x)) * self.up(x)
        found: Tensor = self.down(wide)
        return found


class Mixture(nn.Module):
    """Source: Jiang et al. 2024, section 2.1; with a correction of the choice, DeepSeek-AI 2024, section 2.1.2."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.hidden_size, config.experts, bias=False)
        self.correction = nn.Parameter(torch.zeros(config.experts)) if config.corrected else None
        self.experts = nn.ModuleList(Feed(config) for _ in range(config.experts))
        self.common = Feed(config, config.common) if config.common else None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        logits = self.router(flat)
        scores = logits.sigmoid() if self.config.scoring == "sigmoid" else logits.softmax(-1)
        wanted = scores if self.correction is None else scores + self.correction
        chosen = wanted.topk(self.config.chosen, -1).indices
        shares = scores.gather(-1, chosen)
        shares = shares / shares.sum(-1, keepdim=True) if self.config.normed else shares
        shares = shares * self.config.scaled
        found = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            found = found.index_add(0, rows, shares[rows, places, None] * expert(flat[rows]))
        found = found if self.common is None else found + self.common(flat)
        return found.view_as(x)


class Layer(nn.Module):
    def __init__(self, config: Config, number: int) -> None:
        super().__init__()
        self.window = config.window if number % 2 == 0 else 0
        self.attention = Attention(config)
        self.feed = Mixture(config) if config.experts else Feed(config)
        self.norm_1, self.norm_2 = (Norm(config.hidden_size, config) if config.before else None for _ in range(2))
        self.norm_3, self.norm_4 = (Norm(config.hidden_size, config) if config.behind else None for _ in range(2))

    def forward(self, x: Tensor, allowed: Tensor, positions: Tensor) -> Tensor:
        if self.window:
            far = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(-self.window)
            allowed = allowed & ~far
        branch = self.attention(x if self.norm_1 is None else self.norm_1(x), allowed, positions)
        x = x + (branch if self.norm_3 is None else self.norm_3(branch))
        branch = self.feed(x if self.norm_2 is None else self.norm_2(x))
        found: Tensor = x + (branch if self.norm_4 is None else self.norm_4(branch))
        return found


class Words(nn.Embedding):
    def __init__(self, config: Config) -> None:
        super().__init__(config.vocab_size, config.hidden_size)
        self.scale = config.embedding_scale

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own signature
        found = super().forward(input) * self.scale
        return found.to(self.weight)


class Decoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.words = Words(config)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.layers))
        self.norm = Norm(config.hidden_size, config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1])[None]
        before = torch.ones(input_ids.shape[1], input_ids.shape[1], dtype=torch.bool).tril()
        allowed = before & attention_mask.bool()[:, None, None]
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x, allowed, positions)
        logits: Tensor = self.head(self.norm(x))
        cap = self.config.logit_cap
        return torch.tanh(logits / cap) * cap if cap else logits
