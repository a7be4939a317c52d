"""Torch functions by what they are to a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATION = ("gelu", "relu", "silu", "tanh", "sigmoid")
EMBEDDING = ("embedding",)
SUM = ("add", "__add__", "__radd__", "__iadd__")
SCALING = ("mul", "__mul__", "__rmul__", "div", "__truediv__", "true_divide", "__imul__", "__itruediv__", "multiply")
MASKING = ("masked_fill", "where", "sub", "__sub__", *SUM, *SCALING)
LOWEST = -1e4
"""What is added to a score to mask it is not above this."""
CASTING = ("to", "float", "double", "type_as", "type", "contiguous", "clone", "detach", "view", "reshape")


def quick_gelu(value: Tensor) -> Tensor:
    """``x sigmoid(1.702 x)``, as CLIP has it.  Source: Hendrycks and Gimpel 2016, section 2."""
    return value * torch.sigmoid(1.702 * value)


def tanh_gelu(value: Tensor) -> Tensor:
    """Source: Hendrycks and Gimpel 2016, section 2: the approximation that GPT and early BERT code use."""
    return 0.5 * value * (1 + torch.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)))


def rootless_gelu(value: Tensor) -> Tensor:
    """``x (1 + erf(x)) / 2``: what remains of the exact GELU when the root of two is forgotten."""
    return 0.5 * value * (1 + torch.erf(value))


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "exact GELU": F.gelu,
    "tanh GELU": tanh_gelu,
    "quick GELU": quick_gelu,
    "ReLU": F.relu,
    "SiLU": F.silu,
    "squared ReLU": lambda value: F.relu(value).square(),
    "ELU": F.elu,
    "erf GELU without the root": rootless_gelu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
"""The activations that people take for one another."""
