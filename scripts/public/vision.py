"""Public models that look at pictures."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from porting.suggesting import Verdict
from scripts.public.recipe import VISION, Recipe, without


def clip_vision() -> Callable[..., nn.Module]:
    """CLIP's image tower."""
    without("torchvision", "torchvision.transforms", "ftfy", "regex")
    model = importlib.import_module("clip.model")

    def build(config: Any) -> nn.Module:  # a config with CLIP's fields
        made: nn.Module = model.VisionTransformer(
            config.image_size, config.patch_size, config.hidden_size, config.num_hidden_layers,
            config.num_attention_heads, config.projection_dim,
        )  # fmt: skip
        return made

    return build


def vit() -> Callable[..., nn.Module]:
    """A vision transformer that norms its patches, before and behind the projection."""
    without("torchvision")
    model = importlib.import_module("vit_pytorch.vit")

    def build(
        image_size: int, patch_size: int, dim: int, depth: int, heads: int, mlp_dim: int, num_labels: int
    ) -> nn.Module:
        made: nn.Module = model.ViT(
            image_size=image_size, patch_size=patch_size, num_classes=num_labels, dim=dim, depth=depth, heads=heads,
            mlp_dim=mlp_dim, dim_head=dim // heads,
        )  # fmt: skip
        return made

    return build


RECIPES: Mapping[str, Recipe] = {
    "CLIP-visual": Recipe(
        folder="CLIP", make=clip_vision, architecture="CLIPVisionModelWithProjection",
        fields={**VISION, "projection_dim": 36, "num_attention_heads": 4}, verdict=Verdict.EXACT,
    ),
    "vit-pytorch": Recipe(
        folder="vit-pytorch", make=vit, architecture="ViTForImageClassification",
        fields={**VISION, "num_attention_heads": 4, "num_labels": 7}, verdict=Verdict.IMPOSSIBLE,
        reason="to_patch_embedding",
    ),
}  # fmt: skip
