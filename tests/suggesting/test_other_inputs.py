"""References that take spectrograms or rows of features, as they are asked, and embeddings in the place of tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import porting
from porting.errors import PortingError
from porting.suggesting import Verdict, suggest
from porting.suggesting.subjects.sampler import Sampler, ordinary_tokens
from porting.trials.modalities import embedded, features_of
from tests.suggesting.llama import FIELDS, Llama, builder
from tests.suggesting.oracle import BOUND, drafted, source, uncast

SPECTROGRAM = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "num_mel_bins": 36,
    "max_length": 46, "num_labels": 7,
}  # fmt: skip


class Attention(nn.Module):
    """Attention of ``x`` to ``seen``, with a norm behind the sum."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width, eps=1e-12)

    def mixed(self, x: Tensor, seen: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            one.unflatten(2, (self.heads, -1)).transpose(1, 2) for one in (self.q(x), self.k(seen), self.v(seen))
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores if mask is None else scores + mask
        found: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return found

    def forward(self, x: Tensor, seen: Tensor, mask: Tensor | None = None) -> Tensor:
        found: Tensor = self.norm(x + self.mixed(x, seen, mask))
        return found


class Block(nn.Module):
    """A layer with its norms in front."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention, self.norm = Attention(width, heads), nn.LayerNorm(width, eps=1e-12)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention.norm(x)
        x = x + self.attention.mixed(normed, normed)
        found: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return found


class Listener(nn.Module):
    """The audio spectrogram transformer: spectrograms [b frames bands]."""

    def __init__(
        self, hidden_size: int, num_hidden_layers: int, num_attention_heads: int, intermediate_size: int,
        num_mel_bins: int, max_length: int, num_labels: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.cut = nn.Conv2d(1, hidden_size, 16, stride=10)
        places = ((num_mel_bins - 16) // 10 + 1) * ((max_length - 16) // 10 + 1) + 2
        self.first, self.second = (nn.Parameter(torch.zeros(1, 1, hidden_size)) for _ in range(2))
        self.places = nn.Parameter(torch.zeros(1, places, hidden_size))
        self.blocks = nn.ModuleList(
            Block(hidden_size, num_attention_heads, intermediate_size) for _ in range(num_hidden_layers)
        )
        self.last, self.before = nn.LayerNorm(hidden_size, eps=1e-12), nn.LayerNorm(hidden_size, eps=1e-12)
        self.classes = nn.Linear(hidden_size, num_labels)

    def forward(self, spec: Tensor) -> Tensor:
        x = self.cut(spec.unsqueeze(1).transpose(2, 3)).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), self.second.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        x = self.last(x)
        found: Tensor = self.classes(self.before((x[:, 0] + x[:, 1]) / 2))
        return found


def test_spectrograms_are_drawn_as_the_reference_takes_them(tmp_path: Path) -> None:
    model = source("ASTForAudioClassification", SPECTROGRAM, tmp_path)
    loaded = porting.load(tmp_path, Listener, drafted(tmp_path, Listener).table).double().eval()
    spectrogram = torch.randn(2, 46, 36, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert float((loaded(spectrogram) - model(input_values=spectrogram).logits).abs().max()) < BOUND


LXMERT = {
    "vocab_size": 113, "hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 52, "visual_feat_dim": 20,
    "max_position_embeddings": 31, "l_layers": 1, "r_layers": 1, "x_layers": 1,
}  # fmt: skip


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, inner), nn.Linear(inner, width), nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x + self.down(F.gelu(self.up(x))))
        return found


class TextAndRegions(nn.Module):
    """LXMERT with one layer of each kind: words, and regions of a picture with their features and boxes."""

    def __init__(
        self, vocab_size: int, hidden_size: int, num_attention_heads: int, intermediate_size: int,
        max_position_embeddings: int, type_vocab_size: int, visual_feat_dim: int, visual_pos_dim: int,
    ) -> None:  # fmt: skip
        super().__init__()
        width, heads, inner = hidden_size, num_attention_heads, intermediate_size
        self.words, self.places = nn.Embedding(vocab_size, width), nn.Embedding(max_position_embeddings, width)
        self.kinds, self.norm = nn.Embedding(type_vocab_size, width), nn.LayerNorm(width, eps=1e-12)
        self.region, self.box = nn.Linear(visual_feat_dim, width), nn.Linear(visual_pos_dim, width)
        self.region_norm, self.box_norm = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)
        self.text, self.seen, self.cross, self.text_again, self.seen_again = (Attention(width, heads) for _ in range(5))
        self.text_up, self.seen_up, self.text_last, self.seen_last = (FeedForward(width, inner) for _ in range(4))
        self.pool = nn.Linear(width, width)

    def forward(
        self, input_ids: Tensor, visual_feats: Tensor, boxes: Tensor, attention_mask: Tensor, token_type_ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        places = self.places(torch.arange(input_ids.shape[1]))
        text = self.norm(self.words(input_ids) + places + self.kinds(token_type_ids))
        seen = (self.region_norm(self.region(visual_feats)) + self.box_norm(self.box(boxes))) / 2
        mask = (1.0 - attention_mask[:, None, None].to(text.dtype)) * torch.finfo(text.dtype).min
        text, seen = self.text_up(self.text(text, text, mask)), self.seen_up(self.seen(seen, seen))
        text, seen = self.cross(text, seen), self.cross(seen, text, mask)
        text = self.text_last(self.text_again(text, text, mask))
        seen = self.seen_last(self.seen_again(seen, seen))
        return text, seen, torch.tanh(self.pool(text[:, 0]))


def test_rows_of_features_are_as_wide_as_a_field_of_a_like_name_says() -> None:
    kinds: Any = transformers
    config = kinds.LxmertConfig(**LXMERT)
    model = kinds.LxmertModel(config).eval()
    assert features_of(model, config.to_dict()) == {"visual_feats": (11, 20), "visual_pos": (11, 4)}
    sampler = Sampler.of(model, config.to_dict())
    with torch.no_grad():
        assert model(**{n: x.float() if x.is_floating_point() else x for n, x in sampler.batch().items()})


@pytest.mark.slow
def test_words_and_regions_of_pictures(tmp_path: Path) -> None:
    source("LxmertModel", LXMERT, tmp_path)
    found = suggest(tmp_path, TextAndRegions)
    assert found.verdict is Verdict.EXACT, str(found)
    assert '"visual_pos" = "boxes"' in found.text


@pytest.mark.parametrize("vocabulary", [0, 1, 2, 5, 6, 99])
def test_tokens_are_drawn_from_a_vocabulary_of_any_size(vocabulary: int) -> None:
    low, high = ordinary_tokens(vocabulary)
    assert 0 <= low < high <= max(vocabulary, 1)


def test_a_model_that_takes_no_words_is_refused_in_a_line(tmp_path: Path) -> None:
    """The config of Decision Transformer has a vocabulary of one word, and its inputs are states and actions."""
    config = transformers.DecisionTransformerConfig(
        state_dim=5, act_dim=3, hidden_size=24, n_layer=1, n_head=2, n_positions=32, max_ep_len=9
    )
    transformers.DecisionTransformerModel(config).save_pretrained(tmp_path)
    with pytest.raises(PortingError) as raised:
        suggest(tmp_path, lambda hidden_size: nn.Linear(hidden_size, hidden_size))
    assert "\n" not in str(raised.value)


class TakesEmbeddings(Llama):
    """A decoder that is given its embeddings, as those behind a picture's encoder are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tok_embeddings = nn.Identity()  # type: ignore[assignment]  # an Embedding in the base class

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        return super().forward(inputs_embeds)


class Layers(TakesEmbeddings):
    """The same under a name that says token ids."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Scaled(TakesEmbeddings):
    def forward(self, inputs_embeds: Tensor) -> Tensor:
        return super().forward(2 * inputs_embeds)


@pytest.mark.parametrize("kind", [TakesEmbeddings, Layers])
def test_a_decoder_that_is_given_embeddings(kind: type[Llama], tmp_path: Path) -> None:
    reference = uncast(source("LlamaForCausalLM", FIELDS, tmp_path))
    found = drafted(tmp_path, builder(kind=kind))
    port = porting.load(tmp_path, builder(kind=kind), found.text, fresh=True).double().eval()
    given = embedded(torch.arange(12).view(2, 6), 48).double()
    with torch.no_grad():
        assert torch.allclose(port(given), reference(inputs_embeds=given).logits, atol=BOUND)


@pytest.mark.slow
def test_embeddings_are_proven_and_verified(tmp_path: Path) -> None:
    source("LlamaForCausalLM", FIELDS, tmp_path)
    found = suggest(tmp_path, builder(kind=TakesEmbeddings))
    assert found.verdict is Verdict.EXACT, str(found)
    assert '"inputs_embeds" = "inputs_embeds"' in found.text
    assert suggest(tmp_path, builder(kind=Scaled)).verdict is not Verdict.EXACT
    assert porting.verify(tmp_path, builder(kind=TakesEmbeddings), found.text, fresh=True).faithful
    assert not porting.verify(tmp_path, builder(kind=Scaled), found.text, fresh=True).faithful


class BehindEmbeddings(nn.Module):
    """BERT's layers without what stands in front of them."""

    def __init__(self, hidden_size: int, num_attention_heads: int, intermediate_size: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(hidden_size, num_attention_heads, intermediate_size, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def test_layers_behind_embeddings_of_positions_are_no_wrong_model(tmp_path: Path) -> None:
    """Their input is not what the reference takes as embeddings, so they are refused and not called wrong."""
    fields = {"vocab_size": 99, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    source("BertModel", fields, tmp_path)
    with pytest.raises(PortingError, match="failed on x"):
        suggest(tmp_path, BehindEmbeddings)


def test_numbers_stand_for_the_same_token_wherever_it_is() -> None:
    one, other = embedded(torch.tensor([[5, 7]]), 64), embedded(torch.tensor([[7, 5, 5]]), 64)
    assert torch.equal(one[0, 0], other[0, 1])
    assert torch.equal(one[0, 1], other[0, 0])
    every = embedded(torch.arange(50)[None], 64)[0]
    apart = torch.nn.functional.cosine_similarity(every[:, None], every[None], -1) - torch.eye(50)
    assert apart.abs().max() < 0.6
    assert abs(float(every.std()) - 1) < 0.1
