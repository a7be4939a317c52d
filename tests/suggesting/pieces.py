"""What the variants are made of: matrices, norms, containers, and tables of positions."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Turned(nn.Module):
    """A matrix [in out]."""

    def __init__(self, into: int, out: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(into, out))
        self.bias = nn.Parameter(torch.zeros(out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight
        return out if self.bias is None else out + self.bias


class Norm(nn.Module):
    """A norm by hand."""

    def __init__(self, width: int, eps: float, gain: str, shift: str, *, unbiased: bool = False) -> None:
        super().__init__()
        self.eps, self.names, self.less = eps, (gain, shift), int(unbiased)
        self.register_parameter(gain, nn.Parameter(torch.ones(width)))
        self.register_parameter(shift, nn.Parameter(torch.zeros(width)))

    def forward(self, x: Tensor) -> Tensor:
        middle = x - x.mean(-1, keepdim=True)
        gain, shift = (getattr(self, name) for name in self.names)
        spread = middle.square().sum(-1, keepdim=True) / (x.shape[-1] - self.less)
        out: Tensor = gain * middle * torch.rsqrt(spread + self.eps) + shift
        return out


class Root(nn.Module):
    """A norm that takes no mean off."""

    def __init__(self, width: int, eps: float, gain: str) -> None:
        super().__init__()
        self.eps, self.name = eps, gain
        self.register_parameter(gain, nn.Parameter(torch.ones(width)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = getattr(self, self.name) * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))
        return out


class Parts(nn.Module):
    """A container whose parts are registered in a drawn order."""

    def __init__(self, parts: Mapping[str, nn.Module | nn.Parameter], shuffle: int) -> None:
        super().__init__()
        named = list(parts.items())
        random.Random(shuffle).shuffle(named)  # noqa: S311  # as above
        for name, part in named:
            setattr(self, name, part)


def computed(sizes: Mapping[str, int], pairs: str) -> Tensor:
    """CTRL's positions, sines before cosines or next to each other."""
    width = sizes["hidden"]
    rates = 1 / torch.pow(10000, 2 * (torch.arange(width).float() // 2) / width)
    turns = torch.arange(sizes["positions"] + 1).float()[:, None] * rates
    parts = [turns[:, 0::2].sin(), turns[:, 1::2].cos()]
    return torch.cat(parts, 1) if pairs == "halves" else torch.stack(parts, -1).flatten(1)


def angles(sizes: Mapping[str, int], share: float, theta: float) -> Tensor:
    """Cosine and sine of Llama's rotation of each pair of features, [2 positions pairs]."""
    size = int(sizes["hidden"] // sizes["heads"] * share)
    frequencies = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)
    turns = torch.outer(torch.arange(sizes["positions"] + 1).float(), frequencies)
    return torch.stack([turns.cos(), turns.sin()])
