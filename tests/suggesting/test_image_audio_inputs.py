"""A model that listens: two convolutions over the bands of a sound, then an encoder and a decoder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import porting
from porting.errors import VerifyError
from porting.suggesting import Suggestion, Verdict, suggest
from porting.suggesting.subjects.forward_arguments import find_argument_mapping
from porting.suggesting.subjects.questions import Asker
from porting.suggesting.subjects.sampler import Sampler
from porting.suggesting.subjects.signal_arguments import signal_argument_mapping
from tests.suggesting.oracle import BOUND, Drafted, drafted, source
from tests.suggesting.pairs import CrossAttending

FIELDS = {
    "vocab_size": 113, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 52, "decoder_ffn_dim": 52, "num_mel_bins": 10,
    "max_source_positions": 12, "max_target_positions": 16, "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip


class Ear(nn.Module):
    """Whisper, in another person's words; it is given its sounds as [b frames bands]."""

    hearing: Any  # lists of dictionaries of modules
    telling: Any
    times: Tensor

    def __init__(self, config: Any) -> None:  # it reads what it needs
        super().__init__()
        e, h, wide = config.d_model, config.encoder_attention_heads, config.encoder_ffn_dim
        self.stem1 = nn.Conv1d(config.num_mel_bins, e, 3, padding=1)
        self.stem2 = nn.Conv1d(e, e, 3, padding=1, stride=2)
        self.register_buffer("times", torch.zeros(config.max_source_positions, e))
        self.words = nn.Embedding(config.vocab_size, e)
        self.places = nn.Parameter(torch.zeros(config.max_target_positions, e))

        def layer(*names: str) -> nn.Module:
            parts: dict[str, nn.Module] = {
                "up": nn.Linear(e, wide),
                "down": nn.Linear(wide, e),
                "norm": nn.LayerNorm(e),
            }
            for name in names:
                seen = CrossAttending(e, h)
                seen.match.register_parameter("bias", None)  # what softmax cannot see
                parts |= {name: seen, f"{name}_norm": nn.LayerNorm(e)}
            return nn.ModuleDict(parts)

        self.hearing = nn.ModuleList(layer("look") for _ in range(config.encoder_layers))
        self.telling = nn.ModuleList(layer("look", "recall") for _ in range(config.decoder_layers))
        self.heard, self.told = nn.LayerNorm(e), nn.LayerNorm(e)

    def forward(self, mel: Tensor, tokens: Tensor) -> Tensor:
        """``mel`` [b f m], ``tokens`` [b t]; logits [b t v]."""
        return self.run(mel, tokens, torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1))

    def run(self, mel: Tensor, tokens: Tensor, future: Tensor) -> Tensor:
        """The same; ``future`` is True where a key is hidden from a query, [t t]."""
        x = F.gelu(self.stem2(F.gelu(self.stem1(mel.transpose(1, 2))))).transpose(1, 2) + self.times
        everywhere = torch.zeros(1, 1, dtype=torch.bool)
        for layer in self.hearing:
            y = layer["look_norm"](x)
            x = x + layer["look"](y, y, everywhere)
            x = x + layer["down"](F.gelu(layer["up"](layer["norm"](x))))
        memory, x = self.heard(x), self.words(tokens) + self.places[: tokens.shape[1]]
        for layer in self.telling:
            y = layer["look_norm"](x)
            x = x + layer["look"](y, y, future)
            x = x + layer["recall"](layer["recall_norm"](x), memory, everywhere)
            x = x + layer["down"](F.gelu(layer["up"](layer["norm"](x))))
        logits: Tensor = self.told(x) @ self.words.weight.T
        return logits


class Deaf(Ear):
    """Its sounds come in two arguments."""

    def forward(self, mel: Tensor, tokens: Tensor, loudness: Tensor) -> Tensor:  # type: ignore[override]  # one more
        """As above."""
        return super().forward(mel * loudness, tokens)


class Told(Ear):
    """It hides later tokens only by the mask that it is given, True where a query sees a key."""

    def forward(self, mel: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """As above, with ``mask`` [t t]."""
        seen = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool) if mask is None else mask
        return self.run(mel, tokens, ~seen)


def test_a_mask_is_given_to_a_decoder_that_sees_later_tokens_without_one() -> None:
    torch.manual_seed(0)
    module = Told(SimpleNamespace(**FIELDS)).double().eval()
    shapes = {"input_features": (10, 24)}
    sampler = Sampler(available=("input_features", "decoder_input_ids"), vocabulary=113, padding=1, shapes=shapes)
    found = signal_argument_mapping(module, sampler, Asker())
    assert ("decoder_causal_mask [q k]", "mask -> bool [q k]") in found.rules


@pytest.mark.slow
def test_sounds_and_words_have_their_places(tmp_path: Path) -> None:
    model = source("WhisperForConditionalGeneration", FIELDS, tmp_path)
    assert_right(model, tmp_path, drafted(tmp_path, Ear))


@pytest.mark.slow
def test_sounds_and_words(tmp_path: Path) -> None:
    model = source("WhisperForConditionalGeneration", FIELDS, tmp_path)
    found = suggest(tmp_path, Ear)
    assert found.verdict is Verdict.EXACT, str(found)
    assert_right(model, tmp_path, found)


def assert_right(model: Any, folder: Path, found: Suggestion | Drafted) -> None:
    for line in (
        '"model.encoder.conv{i+1}.{w:weight,bias}" = "stem{i+1}.{w:weight,bias}"',
        '"model.encoder.embed_positions.weight" = "times"',
        '"input_features [b m f]" = "mel [b f m]"',
        '"decoder_input_ids" = "tokens"',
    ):
        assert line in found.text
    drawn = torch.Generator().manual_seed(1)
    mel = torch.randn(3, 10, 24, dtype=torch.float64, generator=drawn)
    tokens = torch.randint(3, 100, (3, 11), generator=drawn)
    loaded = porting.load(folder, Ear, found.table).double().eval()
    with torch.no_grad():
        expected = model(input_features=mel, decoder_input_ids=tokens)[0]
        assert float((loaded(mel.transpose(1, 2), tokens) - expected).abs().max() / expected.abs().max()) < BOUND


def test_what_nobody_knows_of_is_asked_for(tmp_path: Path) -> None:
    source("WhisperForConditionalGeneration", FIELDS, tmp_path)
    with pytest.raises(VerifyError, match=r"takes 'loudness', and nothing tells .* input_features, decoder_input_ids"):
        suggest(tmp_path, Deaf)


VIDEOS = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 52, "image_size": 16,
    "num_frames": 4, "tubelet_size": [2, 8, 8], "num_channels": 3, "layer_norm_eps": 1e-6, "qkv_bias": True,
    "hidden_act": "gelu",
}  # fmt: skip


class Watching(nn.Module):
    """ViViT, in another person's words: videos are [b c t h w]."""

    def __init__(self, width: int, depth: int, heads: int, inner: int, frames: int, img_size: int) -> None:
        super().__init__()
        self.cut = nn.Conv3d(3, width, (2, 8, 8), (2, 8, 8))
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, frames // 2 * (img_size // 8) ** 2 + 1, width))
        self.layers = nn.ModuleList(self.layer(width, heads, inner) for _ in range(depth))
        self.last = nn.LayerNorm(width, eps=1e-6)

    def layer(self, width: int, heads: int, inner: int) -> nn.Module:
        return nn.TransformerEncoderLayer(
            width, heads, inner, 0.0, F.gelu, layer_norm_eps=1e-6, batch_first=True, norm_first=True
        )

    def forward(self, video: Tensor) -> Tensor:
        """``video`` [b c t h w]; the first token's state [b e] of all."""
        x = self.cut(video).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        normed: Tensor = self.last(x)
        return normed


def test_videos_are_turned_where_the_channels_stand_in_front() -> None:
    module = Watching(24, 2, 4, 52, 4, 16).double().eval()
    found = signal_argument_mapping(
        module, Sampler(available=("pixel_values",), shapes={"pixel_values": (4, 3, 16, 16)}), Asker()
    )
    assert found.rules == (("pixel_values [b t c h w]", "video [b c t h w]"),)


class ChannelsLast(nn.Module):
    """Takes pictures as they are stored, [b h w c]."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Linear(3 * 16, 24)

    def forward(self, picture: Tensor) -> Tensor:
        tiles = picture.unfold(1, 4, 4).unfold(2, 4, 4).flatten(3).flatten(1, 2)
        found: Tensor = self.cut(tiles)
        return found


class ChannelsFirst(ChannelsLast):
    def forward(self, picture: Tensor) -> Tensor:
        return super().forward(picture.permute(0, 2, 3, 1))


def test_pictures_are_turned_where_the_channels_stand_behind() -> None:
    sampler = Sampler(available=("pixel_values",), shapes={"pixel_values": (3, 16, 16)})
    found = [
        find_argument_mapping(one.double(), sampler, causal=False, ask=Asker()).rules
        for one in (ChannelsLast(), ChannelsFirst())
    ]
    assert found == [(("pixel_values [b c h w]", "picture [b h w c]"),), (("pixel_values", "picture"),)]


@pytest.mark.slow
def test_videos(tmp_path: Path) -> None:
    model = source("VivitModel", VIDEOS, tmp_path)
    found = suggest(tmp_path, Watching)
    assert found.verdict is Verdict.TRUNK, str(found)  # it has no pooler
    assert found.missing == ("pooler",), str(found)
    loaded: Any = porting.load(tmp_path, Watching, found.table).double().eval()
    video = torch.randn(2, 4, 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        expected = model(pixel_values=video).last_hidden_state
        assert float((loaded(video.transpose(1, 2)) - expected).abs().max() / expected.abs().max()) < BOUND


def test_tokens_are_drawn_from_the_vocabulary_of_the_part_that_reads_them() -> None:
    text = {
        "vocab_size": 11,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    picture = {**text, "image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=picture)
    sampler = Sampler.of(transformers.CLIPModel(config), config.to_dict())
    assert sampler.vocabulary == 11
    assert int(sampler.batch(("input_ids",))["input_ids"].max()) < 11
