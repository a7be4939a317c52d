"""Norms of another kind than the checkpoint's, and a table that the module has in each layer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import porting
from porting.suggesting import Verdict, suggest
from porting.suggesting.draft.table_draft import heads_of, sizes_of
from porting.suggesting.search.activation_matching import kind_of_norm
from porting.suggesting.subjects.operation_trace import trace_operations
from tests.suggesting import llama
from tests.suggesting.oracle import drafted, source
from tests.suggesting.test_llama_mistakes import edited
from tests.suggesting.test_norm_gains import GAIN

CENTRED = (
    "x = x - x.mean(-1, keepdim=True); return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * self.weight"
)
GROUPS = "return F.group_norm(x.transpose(1, 2), 4, self.weight).transpose(1, 2)"
FIELDS: dict[str, object] = {"hidden_sizes": [8, 16], "depths": [2, 1], "num_labels": 5, "num_stages": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "said"),
    [
        pytest.param(CENTRED, "LayerNorm for RMSNorm", id="by hand, with another eps"),
        pytest.param(GROUPS, "GroupNorm for RMSNorm", id="over groups of channels"),
    ],
)
def test_another_norm_in_each_layer_is_one_reason(norm: str, said: str, tmp_path: Path) -> None:
    source("LlamaForCausalLM", llama.FIELDS, tmp_path)
    found = suggest(tmp_path, edited({GAIN: norm}).builder())
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    assert [one.cause for one in found.reasons if one.kind == "other norm"] == [said], str(found)
    assert not found.unmapped  # behind each of them the search goes on


class Block(nn.Module):
    """A block of ConvNeXt whose norm is given, with channels second."""

    def __init__(self, width: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.deep = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = norm(width)
        self.up, self.down = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)
        self.scale = nn.Parameter(torch.ones(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.scale * self.down(F.gelu(self.up(self.norm(self.deep(x)))))
        return out


class Whole(nn.GroupNorm):
    """A norm over all channels and places of a picture."""

    def __init__(self, width: int) -> None:
        super().__init__(1, width)


class Net(nn.Module):
    """A small ConvNeXt."""

    def __init__(self, config: Any, norm: type[nn.Module]) -> None:
        super().__init__()
        first, last = config.hidden_sizes
        self.stem, self.stem_norm = nn.Conv2d(3, first, config.patch_size, config.patch_size), norm(first)
        self.one = nn.Sequential(*(Block(first, norm) for _ in range(config.depths[0])))
        self.between, self.smaller = norm(first), nn.Conv2d(first, last, 2, 2)
        self.two = nn.Sequential(*(Block(last, norm) for _ in range(config.depths[1])))
        self.norm, self.head = nn.LayerNorm(last, config.layer_norm_eps), nn.Linear(last, config.num_labels)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.one(self.stem_norm(self.stem(pixels)))
        x = self.two(self.smaller(self.between(x)))
        out: Tensor = self.head(self.norm(x.mean([-2, -1])))
        return out


@pytest.mark.slow
@pytest.mark.parametrize("norm", [Whole, nn.BatchNorm2d])
def test_a_norm_of_another_kind_stands_at_its_place_in_a_picture_model(norm: type[nn.Module], tmp_path: Path) -> None:
    source("ConvNextForImageClassification", FIELDS, tmp_path)
    found = suggest(tmp_path, lambda config: Net(config, norm))
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    kind = "GroupNorm" if norm is Whole else "BatchNorm"
    assert [one.cause for one in found.reasons if one.kind == "other norm"] == [f"{kind} for LayerNorm"], str(found)
    assert not [one for one in found.unmapped if len(one.shape) > 1], str(found)


class OfRows(nn.GroupNorm):
    """LayerNorm over the features [... e], as a GroupNorm of one group over rows [n e]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(1, width, eps)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view_as(x)


@pytest.mark.slow
@pytest.mark.parametrize(("eps", "verdict"), [(1e-6, Verdict.EXACT), (1e-3, Verdict.APPROXIMATE)])
def test_a_norm_of_another_name_that_computes_the_same_is_no_difference(
    eps: float, verdict: Verdict, tmp_path: Path
) -> None:
    """A norm is another one by what it gives, and not by the operation that torch calls."""

    class Channels(nn.LayerNorm):
        def __init__(self, width: int) -> None:
            super().__init__(width, 1e-6)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.movedim(1, -1)).movedim(-1, 1)

    class Pooled(Net):
        def __init__(self, config: Any) -> None:
            super().__init__(config, Channels)
            self.norm: Any = OfRows(config.hidden_sizes[-1], eps)

    source("ConvNextForImageClassification", {**FIELDS, "layer_norm_eps": 1e-6}, tmp_path)
    found = suggest(tmp_path, Pooled)
    assert found.verdict is verdict, str(found)
    assert not any(one.kind == "other norm" for one in found.reasons), str(found)


class Scaled(nn.Module):
    """A gain without a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        pytest.param(Scaled(6), "", id="a gain"),
        pytest.param(nn.RMSNorm(6, 1e-6), "RMSNorm", id="RMSNorm"),
        pytest.param(nn.RMSNorm(6), "RMSNorm", id="RMSNorm without eps"),
        pytest.param(nn.LayerNorm(6), "LayerNorm", id="LayerNorm"),
        pytest.param(llama.Norm(6, 1e-6), "RMSNorm", id="by hand"),
        pytest.param(nn.GroupNorm(1, 6), "GroupNorm", id="GroupNorm"),
        pytest.param(nn.BatchNorm1d(6).eval(), "BatchNorm", id="BatchNorm"),
    ],
)
def test_a_gain_alone_is_no_norm(module: nn.Module, kind: str) -> None:
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    module = module.double()
    trace = trace_operations(module, lambda one: one(x + 1.0), dict(module.named_parameters()), [x])
    assert kind_of_norm(trace.units[0]) == kind


class Distances(nn.Module):
    """T5's bias of distances: a row for each bucket, a number for each head."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(config.relative_attention_num_buckets, config.num_heads)
        self.smaller, self.most = config.relative_attention_num_buckets // 2, config.relative_attention_max_distance

    def forward(self, length: int) -> Tensor:
        far = torch.arange(length)[None] - torch.arange(length)[:, None]
        near, small = far.abs(), self.smaller // 2
        large = small + (
            torch.log(near.clamp(min=1).float() / small) / math.log(self.most / small) * (self.smaller - small)
        ).long().clamp(max=self.smaller - small - 1)
        bucket = torch.where(near < small, near, large) + self.smaller * (far > 0)
        return self.rows(bucket)

    def rows(self, bucket: Tensor) -> Tensor:
        """A bias [h q k]."""
        bias: Tensor = self.table(bucket).permute(2, 0, 1)
        return bias


class TurnedDistances(Distances):
    """The same with a row for each head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.table: Any = nn.Parameter(torch.zeros(config.num_heads, config.relative_attention_num_buckets))

    def rows(self, bucket: Tensor) -> Tensor:
        bias: Tensor = self.table[:, bucket]
        return bias


class Layer(nn.Module):
    """A layer of T5's encoder with a table of its own."""

    def __init__(self, config: Any, distances: type[Distances]) -> None:
        super().__init__()
        width, inner = config.d_model, config.num_heads * config.d_kv
        self.heads, self.distances = config.num_heads, distances(config)
        self.before = nn.RMSNorm(width, config.layer_norm_epsilon)
        self.between = nn.RMSNorm(width, config.layer_norm_epsilon)
        self.q, self.k, self.v = (nn.Linear(width, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, width, bias=False)
        self.up, self.down = nn.Linear(width, config.d_ff, bias=False), nn.Linear(config.d_ff, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = x.shape
        y = self.before(x)
        q, k, v = (one(y).view(rows, length, self.heads, -1).transpose(1, 2) for one in (self.q, self.k, self.v))
        scores = q @ k.mT + self.distances(length)
        shares = scores.masked_fill(mask[:, None, None] == 0, float("-inf")).softmax(-1)
        x = x + self.o((shares @ v).transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.relu(self.up(self.between(x))))
        return out


class Encoder(nn.Module):
    """T5's encoder."""

    def __init__(self, config: Any, distances: type[Distances] = Distances) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Layer(config, distances) for _ in range(config.num_layers))
        self.last = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask)
        out: Tensor = self.last(x)
        return out


def test_one_table_of_the_checkpoint_fills_those_of_all_layers(tmp_path: Path) -> None:
    fields = {"vocab_size": 97, "d_model": 24, "d_kv": 8, "num_heads": 3, "d_ff": 40, "num_layers": 7}
    reference = source("T5EncoderModel", fields, tmp_path)
    found = suggest(tmp_path, Encoder)
    assert found.verdict is Verdict.EXACT, str(found)
    assert '"layers.{i}.distances.table.weight" = "equals layers.0.distances.table.weight"' in found.text
    words, mask = torch.randint(0, 97, (2, 7)), torch.ones(2, 7)
    filled = porting.load(tmp_path, Encoder, found.text).double()
    with torch.no_grad():
        far = (filled(words, mask) - reference.double()(words, mask).last_hidden_state).abs().max()
    assert float(far) < 1e-5  # transformers' T5 norms in float32


def test_a_table_with_a_row_for_each_head_is_one_weight(tmp_path: Path) -> None:
    """A few rows of a parameter may be weights by themselves, as two gains are; these are used at once."""
    fields = {"vocab_size": 97, "d_model": 24, "d_kv": 8, "num_heads": 3, "d_ff": 40, "num_layers": 1}
    source("T5EncoderModel", fields, tmp_path)
    found = drafted(tmp_path, lambda config: Encoder(config, TurnedDistances))
    assert ".relative_attention_bias.weight [" in found.text
    assert '"layers.0.distances.table' in found.text


def test_words_are_seen_in_an_output_whose_features_are_in_front(tmp_path: Path) -> None:
    source("T5EncoderModel", {"vocab_size": 97, "d_model": 24, "d_kv": 8, "num_heads": 3, "d_ff": 40}, tmp_path)

    class Turned(Encoder):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return super().forward(input_ids, attention_mask).transpose(1, 2)

    found = suggest(tmp_path, Turned)
    assert found.verdict is Verdict.EXACT, str(found)


def test_a_switch_says_that_all_heads_share_a_key() -> None:
    config = {"hidden_size": 40, "num_attention_heads": 5, "num_kv_heads": 5, "multi_query": True}
    cut = heads_of(config)
    assert cut is not None
    assert (cut.groups, sizes_of(config).texts["q"], sizes_of(config).texts["g"]) == (1, "num_attention_heads", "1")
    newer = heads_of({**config, "new_decoder_architecture": True})
    assert newer is not None
    assert newer.groups == 5
