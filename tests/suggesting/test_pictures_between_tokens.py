"""Models in which a picture stands in the place of tokens: Llava, written anew; and PaliGemma's kinds of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import porting
from porting.suggesting import Verdict, suggest
from porting.suggesting.subjects.sampler import Sampler
from porting.verification import verify
from tests.suggesting.llama import Attention, Block, Feed, Norm
from tests.suggesting.oracle import drafted, source

WORDS, PICTURE, PATCHES = 120, 110, 4

ROUNDED = 1e-6
"""The reference's norms are computed in float32."""
FIELDS: dict[str, Any] = {
    "text_config": {
        "model_type": "llama", "vocab_size": WORDS, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    },
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 28, "patch_size": 14,
    },
    "image_token_index": PICTURE, "image_token_id": PICTURE,
}  # fmt: skip


def quick(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


class Seer(nn.Module):
    """CLIP's encoder of pictures; Llava does not run its last layer and norm."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        e, patch = config["hidden_size"], config["patch_size"]
        self.cls = nn.Parameter(torch.zeros(e))
        self.patches = nn.Conv2d(3, e, patch, patch, bias=False)
        self.places = nn.Parameter(torch.zeros((config["image_size"] // patch) ** 2 + 1, e))
        self.pre_norm, self.post_norm = nn.LayerNorm(e), nn.LayerNorm(e)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                e, config["num_attention_heads"], config["intermediate_size"], 0.0, quick, 1e-5, batch_first=True,
                norm_first=True,
            )
            for _ in range(config["num_hidden_layers"])
        )  # fmt: skip

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patches(pictures).flatten(2).mT
        x = self.pre_norm(torch.cat([self.cls.expand(len(x), 1, -1), x], 1) + self.places)
        for layer in [*self.layers][:-1]:
            x = layer(x)
        seen: Tensor = x[:, 1:]
        return seen


class Llava(nn.Module):
    """``padded``: whether it takes padded rows."""

    padded = True

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        text, e = config["text_config"], config["text_config"]["hidden_size"]
        h, g, eps = text["num_attention_heads"], text["num_key_value_heads"], text["rms_norm_eps"]
        self.size, self.picture = e // h, config["image_token_index"]
        self.vision = Seer(config["vision_config"])
        self.up, self.down = nn.Linear(config["vision_config"]["hidden_size"], e), nn.Linear(e, e)
        self.words = nn.Embedding(text["vocab_size"], e)
        self.layers = nn.ModuleList(
            Block(
                e,
                Attention(e, h, g, lie="apart", rotate="halves", bias=False),
                Feed(e, text["intermediate_size"], "apart"),
                eps,
            )
            for _ in range(text["num_hidden_layers"])
        )
        self.norm, self.head = Norm(e, eps), nn.Linear(e, text["vocab_size"], bias=False)

    def forward(self, tokens: Tensor, images: Tensor, attention_mask: Tensor) -> Tensor:
        """``tokens`` [b s], ``images`` [b c h w], ``attention_mask`` [b s] with 1 for what is kept; logits [b s v]."""
        if not self.padded and not bool(attention_mask.all()):
            raise ValueError("rows of one length, please")
        seen = self.down(F.gelu(self.up(self.vision(images))))
        x = self.words(tokens).masked_scatter((tokens == self.picture)[..., None], seen)
        places = torch.arange(tokens.shape[1])[:, None] / 10000.0 ** (torch.arange(0, self.size, 2) / self.size)
        cos, sin = places.cos()[:, None], places.sin()[:, None]
        kept = torch.ones(2 * (tokens.shape[1],), dtype=torch.bool).tril() & attention_mask.bool()[:, None, None]
        for layer in self.layers:
            x = layer(x, cos, sin, kept)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Strict(Llava):
    padded = False


class LongWrong(Llava):
    """Another model in long rows."""

    def forward(self, tokens: Tensor, images: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = super().forward(tokens, images, attention_mask)
        return out * (1.01 if tokens.shape[1] > 40 else 1.0)


class MaskWrong(Llava):
    """Another model where a row is hidden behind its picture."""

    def forward(self, tokens: Tensor, images: Tensor, attention_mask: Tensor) -> Tensor:
        attention_mask = attention_mask | (torch.arange(tokens.shape[1]) < PATCHES + 2)
        out: Tensor = super().forward(tokens, images, attention_mask)
        return out


def test_a_picture_between_tokens_has_its_table(tmp_path: Path) -> None:
    model = source("LlavaForConditionalGeneration", FIELDS, tmp_path)
    found = drafted(tmp_path, Llava)
    assert '"input_ids" = "tokens"' in found.text
    assert '"pixel_values" = "images"' in found.text
    assert_right(model, tmp_path, found.table)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Llava, Strict], ids=["padded rows", "rows of one length"])
def test_a_picture_between_tokens_is_proven(kind: type[Llava], tmp_path: Path) -> None:
    model = source("LlavaForConditionalGeneration", FIELDS, tmp_path)
    found = suggest(tmp_path, kind)
    assert found.verdict is Verdict.EXACT, str(found)
    assert_right(model, tmp_path, found.table)


def assert_right(model: Any, folder: Path, table: Any) -> None:
    loaded = porting.load(folder, Llava, table).double().eval()
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 100, (2, 9), generator=drawn)
    tokens[:, 2:6] = PICTURE
    images = torch.randn(2, 3, 28, 28, dtype=torch.float64, generator=drawn)
    mask = torch.ones_like(tokens)
    mask[0, -2:] = 0
    with torch.no_grad():
        expected = model(input_ids=tokens, pixel_values=images, attention_mask=mask).logits[mask.bool()]
        assert (
            float((loaded(tokens, images, mask)[mask.bool()] - expected).abs().max() / expected.abs().max()) < ROUNDED
        )


def test_a_port_that_refuses_padding_is_verified_without_and_that_is_said(tmp_path: Path) -> None:
    source("LlavaForConditionalGeneration", FIELDS, tmp_path)
    table = drafted(tmp_path, Llava).table
    report = verify(tmp_path, Strict, table, trials=False, causes=False)
    assert report.faithful, str(report)
    assert not any("padded" in name for name in report.cases)
    assert "ValueError: rows of one length, please" in "".join(report.warnings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LongWrong, MaskWrong])
def test_tokens_behind_a_picture_are_tried(kind: type[Llava], tmp_path: Path) -> None:
    source("LlavaForConditionalGeneration", FIELDS, tmp_path)
    table = drafted(tmp_path, Llava).table
    assert verify(tmp_path, Llava, table, causes=False).faithful
    report = verify(tmp_path, kind, table, causes=False)
    assert report.verdict == "different", str(report)


GEMMA = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14, "vision_use_head": False, "projection_dim": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "fields", "zeros", "extra"),
    [
        (
            "PaliGemmaForConditionalGeneration",
            {
                "text_config": {"model_type": "gemma", **GEMMA},
                "projection_dim": 32,
                "hidden_size": 32,
                "vocab_size": WORDS,
            },
            ("token_type_ids",),
            (),
        ),
        (
            "Gemma3ForConditionalGeneration",
            {"text_config": {"model_type": "gemma3_text", **GEMMA}, "mm_tokens_per_image": 4},
            (),
            ("token_type_ids",),
        ),
    ],
)
def test_the_kinds_of_tokens_are_given_as_processors_give_them(
    architecture: str, fields: dict[str, Any], zeros: tuple[str, ...], extra: tuple[str, ...], tmp_path: Path
) -> None:
    picture = {"image_token_index": PICTURE, "image_token_id": PICTURE}
    fields = {**fields, **picture, "vision_config": {"model_type": "siglip_vision_model", **SIGLIP}}
    model = source(architecture, fields, tmp_path)
    sampler = Sampler.of(model, model.config.to_dict()).of_asked()
    assert sampler is not None
    assert sampler.between is not None
    assert (sampler.between.zeros, sampler.between.extra) == (zeros, extra)
    batch = sampler.batch()
    pictured = (batch["input_ids"] == PICTURE).long()
    assert all(torch.equal(batch[name], torch.zeros_like(pictured)) for name in zeros)
    assert all(torch.equal(batch[name], pictured) for name in extra)
    assert batch["input_ids"].shape[1] == sampler.length == batch["attention_mask"].shape[1]
    assert bool((batch["input_ids"][:, : sampler.front] == PICTURE).any())
    assert not bool((batch["input_ids"][:, sampler.front :] == PICTURE).any())
