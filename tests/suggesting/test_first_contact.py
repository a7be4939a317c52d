"""Models as public repositories write them: buffers that are computed, one list for all parts, sizes nobody names."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import porting
from porting.errors import PortingWarning
from porting.suggesting import Verdict, suggest
from porting.suggesting.search.name_similarity import namesakes
from porting.suggesting.subjects.building import build_for
from porting.suggesting.subjects.model_pair import completed_config
from porting.suggesting.subjects.twin import draw_parameters
from tests.suggesting.llama import FIELDS, Attention, Feed, Norm


def written(kind: str, folder: Path, **fields: object) -> Path:
    """A checkpoint of this architecture, with every parameter drawn."""
    architecture: Any = getattr(transformers, kind)
    torch.manual_seed(0)
    model = architecture(architecture.config_class(**fields))
    draw_parameters(model, 0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), **FIELDS)


def agrees(found: porting.Suggestion, source: Path, into: Any, architecture: str) -> bool:
    """Whether the loaded module returns what transformers returns, in float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = porting.load(source, into, found.text).double().eval()
    kind: Any = getattr(transformers, architecture)
    reference = kind.from_pretrained(source).double().eval()
    ids = torch.randint(3, 100, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = module(ids), reference(input_ids=ids)[0]
    return bool((ours - theirs).abs().max() <= 1e-6 * theirs.abs().max())


class Rotary(nn.Module):
    """Rotary tables that state_dict lists, one pair for each layer."""

    def __init__(self, size: int, length: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(length).float(), 10000.0 ** -(torch.arange(0, size, 2).float() / size))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        """Neighbours go in, [b s h d], and halves come out."""
        one, other = x[..., 0::2], x[..., 1::2]
        cos, sin = (self.get_buffer(name)[: x.shape[1], None] for name in ("cos", "sin"))
        return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int, groups: int, inner: int, length: int, lie: str) -> None:
        super().__init__()
        self.attention = Attention(dim, heads, groups, lie=lie, rotate="halves", bias=lie == "blocks")
        self.rotary = Rotary(dim // heads, length)
        self.attention.rotate = lambda x, cos, sin: self.rotary(x)
        self.feed, self.first, self.second = Feed(dim, inner, "apart"), Norm(dim, 1e-5), Norm(dim, 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        seen, none = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(), x
        x = x + self.attention(self.first(x), none, none, seen)
        out: Tensor = x + self.feed(self.second(x))
        return out


def in_one_list(
    vocab_size: int, hidden_size: int, n_layers: int, n_heads: int, n_kv_heads: int, intermediate_size: int
) -> nn.Module:
    """Words, layers, the last norm and the head stand in one list."""
    layers = (Layer(hidden_size, n_heads, n_kv_heads, intermediate_size, 64, "blocks") for _ in range(n_layers))
    head = nn.Linear(hidden_size, vocab_size, bias=False)
    return nn.Sequential(nn.Embedding(vocab_size, hidden_size), *layers, Norm(hidden_size, 1e-5), head)


class Apart(nn.Module):
    """The same, with its layers in a stack whose output is the last layer's."""

    def __init__(
        self, vocab_size: int, hidden_size: int, n_layers: int, n_heads: int, n_kv_heads: int, intermediate_size: int
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, hidden_size)
        sizes = (hidden_size, n_heads, n_kv_heads, intermediate_size, 64, "apart")
        self.stack = nn.Sequential(*(Layer(*sizes) for _ in range(n_layers)))
        self.norm, self.head = Norm(hidden_size, 1e-5), nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.stack(self.words(ids))))
        return out


@pytest.mark.slow
@pytest.mark.parametrize("into", [in_one_list, Apart])
def test_computed_tables_that_state_dict_lists_take_no_part(llama: Path, into: Any) -> None:
    found = suggest(llama, into, limit=300)
    assert found.verdict is Verdict.EXACT, str(found)
    assert agrees(found, llama, into, "LlamaForCausalLM")


@dataclass
class Sizes:
    vocab_size: int
    hidden: int
    hidden_ff: int
    n_layers: int
    n_heads: int
    narrow: int = 128
    experts: int | None = None


class Factorized(nn.Module):
    """Words in a narrower table; its size has a name that says nothing, and a default."""

    def __init__(self, cfg: Sizes) -> None:
        super().__init__()
        self.words, self.wider = nn.Embedding(cfg.vocab_size, cfg.narrow), nn.Linear(cfg.narrow, cfg.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.wider(self.words(ids))
        return out


@contextmanager
def assumed(text: str) -> Iterator[None]:
    with pytest.warns(PortingWarning) as warned:
        yield
    assert any(text in str(one.message) for one in warned)


def test_a_default_that_no_tensor_of_the_checkpoint_has_is_solved_for(tmp_path: Path) -> None:
    sizes = {"vocab_size": 113, "embedding_size": 28, "hidden_size": 48, "num_attention_heads": 6}
    source = written("AlbertModel", tmp_path, **sizes, num_hidden_layers=2, intermediate_size=80)
    with assumed("narrow = embedding_size"):
        suggest(source, Factorized, limit=60)


def staged(config: dict[str, Any]) -> nn.Module:
    """Reads a list of sizes by a name that no config has."""
    first = nn.Conv2d(3, config["breadths"][0], 4, 4)
    convs = (
        nn.Conv2d(one, other, 2, 2) for one, other in zip(config["breadths"], config["breadths"][1:], strict=False)
    )
    return nn.Sequential(first, *convs)


@pytest.mark.slow
def test_a_list_of_sizes_is_solved_for(tmp_path: Path) -> None:
    fields = {"hidden_sizes": [8, 12, 20, 28], "depths": [1, 1, 1, 1], "image_size": 64}
    source = written("ConvNextModel", tmp_path, **fields)
    with assumed("breadths = hidden_sizes"):
        suggest(source, staged, limit=60)


def test_a_default_of_none_is_what_the_checkpoint_says() -> None:
    class Wide(nn.Module):
        def __init__(self, cfg: Sizes) -> None:
            super().__init__()
            self.gate = nn.Linear(cfg.hidden, cfg.experts or 1)

    config = {"hidden_size": 8, "num_experts": 5, "vocab_size": 9, "intermediate_size": 7, "num_hidden_layers": 2}
    Wide.__init__.__annotations__["cfg"] = Sizes
    built = build_for(Wide, config | {"num_attention_heads": 2}).module
    assert built.get_parameter("gate.weight").shape == (5, 8)


def test_a_builder_may_read_what_a_config_of_transformers_computes() -> None:
    config = completed_config({"model_type": "bert", "hidden_size": 24}, "BertModel")
    assert config["name_or_path"] == ""
    assert config["num_labels"] == 2


def test_groups_of_one_shape_are_exchanged() -> None:
    ours = {f"h.{i}.{name}.{j}.weight": (4, 3) for i in (0, 1) for name in ("fc1", "fc2") for j in (0, 1)}
    theirs = {f"l.{i}.experts.{j}.{name}.weight": (4, 3) for i in (0, 1) for j in (0, 1) for name in ("up", "gate")}
    ways = [way["h.1.fc2.0.weight"] for way in namesakes(ours, theirs)]
    assert sorted(ways) == ["l.1.experts.0.gate.weight", "l.1.experts.0.up.weight"]


class Gpt(nn.Module):
    """GPT-2 with SiLU for GELU, and another eps: one entry of the catalogue explains nearly all."""

    def __init__(self, vocab_size: int, n_embd: int, n_layer: int, n_head: int, n_positions: int, n_inner: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab_size, n_embd), nn.Embedding(n_positions, n_embd)
        make = nn.TransformerEncoderLayer
        self.layers = nn.ModuleList(
            make(n_embd, n_head, n_inner, 0.0, nn.functional.silu, 1e-3, batch_first=True, norm_first=True)
            for _ in range(n_layer)
        )
        self.end = nn.LayerNorm(n_embd)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        hidden = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=hidden)
        out: Tensor = self.end(x)
        return out


@pytest.mark.slow
def test_a_cause_that_explains_nearly_all_is_a_reason(tmp_path: Path) -> None:
    fields = {"vocab_size": 113, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64, "n_inner": 80}
    source = written("GPT2Model", tmp_path, **fields)
    found = suggest(source, Gpt, limit=300)
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    assert any("SiLU" in one.said and one.shown for one in found.reasons)


def test_a_config_inside_a_config_has_attributes() -> None:
    def build(config: Any) -> nn.Module:
        return nn.Embedding(config.text_config.vocab_size, config.text_config.hidden_size)

    inner = {"vocab_size": 9, "hidden_size": 4, "id2label": {0: "no"}}
    assert build_for(build, {"text_config": inner, "projection_dim": 3}).module.get_parameter("weight").shape == (9, 4)
