"""Public models that look at pictures."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from porting.suggesting import Verdict
from scripts.public.recipe import VISION, Recipe, bare, without

Build = Callable[..., nn.Module]


def clip_vision() -> Build:
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


def open_clip_vision() -> Build:
    """The image tower of OpenCLIP, with the exact GELU."""
    without("torchvision", "torchvision.ops", "torchvision.ops.misc")
    bare("open_clip")
    model = importlib.import_module("open_clip.transformer")

    def build(config: Any) -> nn.Module:
        made: nn.Module = model.VisionTransformer(
            config.image_size, config.patch_size, config.hidden_size, config.num_hidden_layers,
            config.num_attention_heads, config.intermediate_size / config.hidden_size,
            output_dim=config.projection_dim,
        )  # fmt: skip
        return made

    return build


def vit() -> Build:
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


def simple_vit() -> Build:
    """One with computed positions and no word of its own in front; it norms its patches, too."""
    without("torchvision")
    model = importlib.import_module("vit_pytorch.simple_vit")

    def build(
        image_size: int, patch_size: int, dim: int, depth: int, heads: int, mlp_dim: int, num_labels: int
    ) -> nn.Module:
        made: nn.Module = model.SimpleViT(
            image_size=image_size, patch_size=patch_size, num_classes=num_labels, dim=dim, depth=depth, heads=heads,
            mlp_dim=mlp_dim, dim_head=dim // heads,
        )  # fmt: skip
        return made

    return build


def pretrained_vit() -> Build:
    """A ViT whose sizes stand in a table of models."""
    made = importlib.import_module("pytorch_pretrained_vit.model")

    def build(config: Any) -> nn.Module:
        sizes = {
            "patches": (config.patch_size, config.patch_size), "dim": config.hidden_size,
            "ff_dim": config.intermediate_size, "num_heads": config.num_attention_heads,
            "num_layers": config.num_hidden_layers, "attention_dropout_rate": 0.0, "dropout_rate": 0.0,
            "representation_size": None, "classifier": "token",
        }  # fmt: skip
        made.PRETRAINED_MODELS["mine"] = {
            "config": sizes, "image_size": (config.image_size,) * 2, "num_classes": config.num_labels,
        }  # fmt: skip
        model: nn.Module = made.ViT("mine")
        return model

    return build


def jeonsworld() -> Build:
    """A ViT that returns what it attends to as well."""
    without("ml_collections", "scipy", "scipy.ndimage")
    bare("models")
    model = importlib.import_module("models.modeling")

    def build(config: Any) -> nn.Module:
        transformer = {
            "mlp_dim": config.intermediate_size, "num_heads": config.num_attention_heads,
            "num_layers": config.num_hidden_layers, "attention_dropout_rate": 0.0, "dropout_rate": 0.0,
        }  # fmt: skip
        sizes = SimpleNamespace(
            hidden_size=config.hidden_size, classifier="token", patches={"size": (config.patch_size,) * 2},
            transformer=transformer,
        )  # fmt: skip
        made: nn.Module = model.VisionTransformer(sizes, img_size=config.image_size, num_classes=config.num_labels)
        return made

    return build


def dino() -> Build:
    """DINO's ViT, which returns its first position."""
    without("torchvision")
    model = importlib.import_module("vision_transformer")

    def build(config: Any) -> nn.Module:
        made: nn.Module = model.VisionTransformer(
            img_size=[config.image_size], patch_size=config.patch_size, embed_dim=config.hidden_size,
            depth=config.num_hidden_layers, num_heads=config.num_attention_heads, qkv_bias=True,
            mlp_ratio=config.intermediate_size / config.hidden_size,
            norm_layer=partial(nn.LayerNorm, eps=config.layer_norm_eps),
        )  # fmt: skip
        return made

    return build


def dinov2() -> Build:
    """DINOv2's ViT, which scales what each layer adds; it takes pictures as ``*args``."""
    without("xformers")
    model = importlib.import_module("dinov2.models.vision_transformer")

    class Dino(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.model = model.DinoVisionTransformer(
                img_size=config.image_size, patch_size=config.patch_size, embed_dim=config.hidden_size,
                depth=config.num_hidden_layers, num_heads=config.num_attention_heads, init_values=1.0, block_chunks=0,
            )  # fmt: skip

        def forward(self, images: Tensor) -> Tensor:
            found: Tensor = self.model(images)
            return found

    return Dino


_TIMM = ("torchvision", *(f"torchvision.{name}" for name in (
    "transforms", "transforms.functional", "ops", "ops.misc", "datasets", "models", "models.feature_extraction",
)))  # fmt: skip


def timm_vit() -> Build:
    """The ViT of timm."""
    without(*_TIMM)
    model = importlib.import_module("timm.models.vision_transformer")

    def build(config: Any) -> nn.Module:
        made: nn.Module = model.VisionTransformer(**_timm(config))
        return made

    return build


def _timm(config: Any) -> dict[str, Any]:
    """What timm calls the fields of a ViT."""
    return {
        "img_size": config.image_size, "patch_size": config.patch_size, "num_classes": config.num_labels,
        "embed_dim": config.hidden_size, "depth": config.num_hidden_layers, "num_heads": config.num_attention_heads,
        "mlp_ratio": config.intermediate_size / config.hidden_size,
    }  # fmt: skip


def timm_deit() -> Build:
    """The distilled ViT of timm, with two words of its own in front and two heads."""
    without(*_TIMM)
    model = importlib.import_module("timm.models.deit")

    def build(config: Any) -> nn.Module:
        made: nn.Module = model.VisionTransformerDistilled(**_timm(config))
        return made

    return build


def timm_beit() -> Build:
    """The BEiT of timm: positions between patches in attention, scales of layers, and no bias of keys."""
    without(*_TIMM)
    model = importlib.import_module("timm.models.beit")

    def build(config: Any) -> nn.Module:
        made: nn.Module = model.Beit(**_timm(config), init_values=0.1, use_abs_pos_emb=False, use_rel_pos_bias=True)
        return made

    return build


def deit() -> Build:
    """DeiT III's ViT, which gives its first word no position."""
    without(*_TIMM)
    model = importlib.import_module("models_v2")

    def build(config: Any) -> nn.Module:
        made: nn.Module = model.vit_models(
            **_timm(config), qkv_bias=True, norm_layer=partial(nn.LayerNorm, eps=config.layer_norm_eps)
        )
        return made

    return build


def mae() -> Build:
    """The ViT that MAE is finetuned as; its encoder is handed over without the head."""
    without(*_TIMM)
    model = importlib.import_module("models_vit")

    class Encoder(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            sizes = {**_timm(config), "num_classes": 0}
            self.model = model.VisionTransformer(
                qkv_bias=True, norm_layer=partial(nn.LayerNorm, eps=config.layer_norm_eps), **sizes
            )

        def forward(self, images: Tensor) -> Tensor:
            found: Tensor = self.model.forward_features(images)
            return found

    return Encoder


def siglip() -> Build:
    """SigLIP's image tower as PaliGemma has it."""
    model = importlib.import_module("modeling_siglip")

    def build(config: Any) -> nn.Module:
        made: nn.Module = model.SiglipVisionModel(
            model.SiglipVisionConfig(
                hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_hidden_layers, num_attention_heads=config.num_attention_heads,
                image_size=config.image_size, patch_size=config.patch_size,
            )
        )  # fmt: skip
        return made

    return build


def labml_vit() -> Build:
    """A ViT that has positions first and rows second, and a head of two layers."""
    without("labml", "labml.tracker")
    package = bare("labml_nn.transformers")
    layers, attention, feed = (
        importlib.import_module(f"labml_nn.transformers.{name}") for name in ("models", "mha", "feed_forward")
    )
    vars(package)["TransformerLayer"] = layers.TransformerLayer
    vit = importlib.import_module("labml_nn.transformers.vit")

    def build(config: Any) -> nn.Module:
        width = config.hidden_size
        layer = layers.TransformerLayer(
            d_model=width, self_attn=attention.MultiHeadAttention(config.num_attention_heads, width), dropout_prob=0.0,
            feed_forward=feed.FeedForward(width, config.intermediate_size, activation=nn.GELU()),
        )  # fmt: skip
        made: nn.Module = vit.VisionTransformer(
            layer, config.num_hidden_layers, vit.PatchEmbeddings(width, config.patch_size, 3),
            vit.LearnedPositionalEmbeddings(width), vit.ClassificationHead(width, 4 * width, 10),
        )  # fmt: skip
        return made

    return build


VIT: Mapping[str, object] = {**VISION, "num_attention_heads": 4, "num_labels": 7}
FINE: Mapping[str, object] = {**VIT, "layer_norm_eps": 1e-6}

RECIPES: Mapping[str, Recipe] = {
    "CLIP-visual": Recipe(
        folder="CLIP", make=clip_vision, architecture="CLIPVisionModelWithProjection",
        fields={**VISION, "projection_dim": 36, "num_attention_heads": 4}, verdict=Verdict.EXACT,
    ),
    "open_clip-visual": Recipe(
        folder="open_clip/src", make=open_clip_vision, architecture="CLIPVisionModelWithProjection",
        fields={**VISION, "projection_dim": 36, "num_attention_heads": 4, "hidden_act": "gelu"}, verdict=Verdict.EXACT,
    ),
    "vit-pytorch": Recipe(
        folder="vit-pytorch", make=vit, architecture="ViTForImageClassification", fields=VIT,
        verdict=Verdict.IMPOSSIBLE, reason="to_patch_embedding",
    ),
    "vit-pytorch-simple": Recipe(
        folder="vit-pytorch", make=simple_vit, architecture="ViTForImageClassification", fields=VIT,
        verdict=Verdict.IMPOSSIBLE, reason="cls_token",
    ),
    "PyTorch-Pretrained-ViT": Recipe(
        folder="PyTorch-Pretrained-ViT", make=pretrained_vit, architecture="ViTForImageClassification", fields=FINE,
        verdict=Verdict.EXACT,
    ),
    "ViT-pytorch": Recipe(
        folder="ViT-pytorch", make=jeonsworld, architecture="ViTForImageClassification", fields=FINE,
        verdict=Verdict.EXACT,
    ),
    "dino": Recipe(folder="dino", make=dino, architecture="ViTModel", fields=FINE, verdict=Verdict.TRUNK),
    "dinov2": Recipe(
        folder="dinov2", make=dinov2, architecture="Dinov2Model", fields={**FINE, "mlp_ratio": 4},
        verdict=Verdict.EXACT,
    ),
    "timm-vit": Recipe(
        folder="pytorch-image-models", make=timm_vit, architecture="ViTForImageClassification", fields=FINE,
        verdict=Verdict.EXACT,
    ),
    "timm-deit": Recipe(
        folder="pytorch-image-models", make=timm_deit, architecture="DeiTForImageClassificationWithTeacher",
        fields=FINE, verdict=Verdict.EXACT,
    ),
    "timm-beit": Recipe(
        folder="pytorch-image-models", make=timm_beit, architecture="BeitForImageClassification",
        fields={**FINE, "use_relative_position_bias": True}, verdict=Verdict.EXACT,
    ),
    "deit": Recipe(
        folder="deit", also=("pytorch-image-models",), make=deit, architecture="ViTForImageClassification",
        fields=FINE, verdict=Verdict.NOT_FOUND,
    ),
    "mae": Recipe(
        folder="mae", also=("pytorch-image-models",), make=mae, architecture="ViTModel", fields=FINE,
        verdict=Verdict.TRUNK,
    ),
    "pytorch-paligemma-siglip": Recipe(
        folder="pytorch-paligemma", make=siglip, architecture="SiglipVisionModel", fields=FINE, verdict=Verdict.TRUNK,
    ),
    "labml-vit": Recipe(
        folder="annotated_deep_learning_paper_implementations", make=labml_vit, architecture="ViTModel",
        fields={**VIT, "layer_norm_eps": 1e-5}, verdict=Verdict.TRUNK,
    ),
}  # fmt: skip
