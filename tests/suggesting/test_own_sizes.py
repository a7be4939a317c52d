"""Sizes that are written into a module: its words, and the row at which its positions begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from porting.build import Bounds
from porting.builder_config import Named, call
from porting.notation.field import with_field
from porting.notation.table import parse_table
from porting.plan.config import arguments, original
from porting.suggesting import Verdict, suggest
from porting.suggesting.subjects.argument_names import roles
from porting.suggesting.subjects.building import build_for
from porting.suggesting.subjects.config_fields import field_for
from porting.suggesting.subjects.model_pair import _could
from porting.suggesting.subjects.twin import draw_parameters, is_frequencies
from porting.target import TargetError
from porting.trials.modalities import IDS
from porting.trials.padding import MASK
from porting.verification import verify
from tests.small_checkpoint import write_checkpoint
from tests.suggesting.oracle import drafted
from tests.suggesting.test_softmax_invariance import Gpt
from tests.zoo.position_buffer import PositionBuffer

WORDS = 33


class OwnWords(Gpt):
    """Its alphabet is its own, and nobody is asked for it."""

    def __init__(self, n_embd: int, n_layer: int, n_head: int, n_positions: int) -> None:
        fields = {"n_embd": n_embd, "n_layer": n_layer, "n_head": n_head, "n_positions": n_positions}
        super().__init__(transformers.GPT2Config(vocab_size=WORDS, **fields))  # type: ignore[arg-type]  # as it says


class Later(Gpt):
    """Its positions are counted from 2, as fairseq does it."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]) + 2)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.end(x)
        return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=24, n_layer=2, n_head=3, n_positions=40)
    model: Any = transformers.GPT2Model(config)  # transformers does not type it
    draw_parameters(model, 0)
    folder = tmp_path_factory.mktemp("letters")
    model.save_pretrained(folder)
    return folder


def test_the_draft_follows_the_module_s_own_sizes(source: Path) -> None:
    assert "n_embd" in drafted(source, OwnWords).text
    assert 'source = "wpe.weight [(t|_2) e]"\ntarget = "places.weight [(_2|t) e]"' in drafted(source, Later).text


@pytest.mark.slow
def test_a_module_with_words_of_its_own_is_given_no_others(source: Path) -> None:
    found = suggest(source, OwnWords)
    assert found.verdict is Verdict.EXACT, str(found)
    assert "n_embd" in found.text


@pytest.mark.slow
def test_positions_may_begin_later_in_the_module(source: Path) -> None:
    found = suggest(source, Later)
    assert found.proven, str(found)
    assert 'source = "wpe.weight [(t|_2) e]"\ntarget = "places.weight [(_2|t) e]"' in found.text


class Alone(nn.Module):
    def forward(self, dec_inputs: Tensor, tgt_mask: Tensor) -> None:
        """A decoder that stands alone."""


class Whole(PositionBuffer):
    """Its whole table of positions is added to a row: it takes no shorter ones."""

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        if ids.shape[1] != self.pe.shape[1]:
            raise RuntimeError("the size of tensor a must match the size of tensor b")
        return super().forward(ids, keep, segments)


class WholeButOne(Whole):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        return super().forward(ids, keep, segments) * (1 + 1e-3 * (len(ids) == 1))


def with_40_positions(folder: Path) -> Path:
    positions = "bert.embeddings.position_embeddings.weight"
    drawn = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    return write_checkpoint(folder / "bert", change={"max_position_embeddings": 40}, values={positions: drawn})


@pytest.mark.slow
def test_a_module_that_takes_rows_of_one_length_is_matched_on_these(tmp_path: Path) -> None:
    folder = with_40_positions(tmp_path)
    report = verify(folder, Whole, drafted(folder, Whole).table, dtypes=())
    assert report.faithful, str(report)
    assert report.scope.lengths == (40,)
    assert any("no other rows than those of 40 tokens" in warning for warning in report.warnings)


@pytest.mark.slow
def test_a_module_that_takes_rows_of_one_length_is_proven_on_these(tmp_path: Path) -> None:
    folder = with_40_positions(tmp_path)
    found = suggest(folder, Whole)
    assert found.proven, str(found)
    assert any("rows of any other length than 40, which the module refuses" in limit for limit in found.limits)
    assert not suggest(folder, WholeButOne).proven


def test_a_decoder_that_stands_alone_is_given_the_words() -> None:
    assert roles(Alone(), (IDS, MASK))[0] == {"dec_inputs": IDS, "tgt_mask": MASK}


def test_rotary_frequencies_are_not_drawn() -> None:
    module = nn.Module()
    module.register_buffer("inv_freq", 10000.0 ** -torch.arange(0, 1, 0.25))
    module.register_buffer("table", torch.randn(5))
    before = {name: one.clone() for name, one in module.named_buffers()}
    draw_parameters(module, 0)
    assert is_frequencies(before["inv_freq"])
    assert not is_frequencies(before["table"])
    assert torch.equal(module.get_buffer("inv_freq"), before["inv_freq"])
    assert not torch.equal(module.get_buffer("table"), before["table"])


@dataclass
class Options:
    """A config class of a module's own: two names for one size, and sizes that no checkpoint says."""

    dim: int = 768
    width: int = 768
    vocab_size: int = -1
    multiple_of: int = 16
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inner = -(-self.dim * 8 // 3 // self.multiple_of) * self.multiple_of


class OfOptions(nn.Module):
    def __init__(self, params: Options) -> None:
        super().__init__()
        assert params.width == params.dim
        assert params.names == []
        self.words, self.wide = nn.Embedding(params.vocab_size, params.dim), nn.Linear(params.dim, params.inner)


def of_options(config: Options | None = None) -> nn.Module:
    assert config is not None
    return OfOptions(config)


@pytest.mark.parametrize("into", [OfOptions, of_options])
def test_a_config_class_of_the_module_s_own_gives_what_no_checkpoint_says(into: Any) -> None:
    built = build_for(into, {"hidden_size": 24, "vocab_size": 30})
    assert {name: tuple(one.shape) for name, one in built.module.named_parameters()} == {
        "words.weight": (30, 24), "wide.weight": (64, 24), "wide.bias": (64,),
    }  # fmt: skip
    assert built.asked == {"dim": "hidden_size", "width": "hidden_size", "vocab_size": "vocab_size"}
    table = parse_table('[tensors]\n"a" = "b"\n[config]\nhidden_size = "dim/width"\nvocab_size = "vocab_size"\n')
    fields = arguments(table, {"hidden_size": 24, "vocab_size": 30})
    assert fields == {"dim": 24, "width": 24, "vocab_size": 30}
    made = call(into, lambda: Named(fields), fields, Bounds(parameters=10, nbytes=2**20))
    assert [tuple(parameter.shape) for parameter in made.parameters()] == [(30, 24), (64, 24), (64,)]


OWN = {
    "a class that nothing is annotated with": "class Options:\n    dim: int = 768\n    rate = 1.5\n",
    "a dataclass": "import dataclasses as d\n@d.dataclass\nclass Options:\n    dim: int = 768\n    rate: float = 1.5\n",
    "arguments": "class Options:\n    def __init__(self, dim=768, rate=1.5): self.dim, self.rate = dim, rate\n",
    "a dictionary": 'BASE = {"dim": 768, "rate": 1.5}\nLARGE = {"dim": 1024, "rate": 1.5}\n',
    "an object": "class Options: pass\noptions = Options()\noptions.dim, options.rate = 768, 1.5\n",
    "a property": "class Options:\n    dim: int = 768\n    rate = property(lambda self: self.dim / 16)\n",
}
"""Ways in which a file says what no checkpoint has."""

READING = """
import torch
class Model(torch.nn.Module):
    def __init__(self, given):
        super().__init__()
        self.wide = torch.nn.Linear(given{dim}, int(given{dim} * given{rate}))
"""


@pytest.mark.parametrize("how", [(".dim", ".rate"), ('["dim"]', '["rate"]')])
@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("apart", [False, True])
def test_what_no_checkpoint_says_stands_in_the_builder_s_own_files(
    name: str, how: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, apart: bool
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    config, model = f"own_{tmp_path.name}_config", f"own_{tmp_path.name}_model"
    reading = READING.format(dim=how[0], rate=how[1])
    (tmp_path / f"{config}.py").write_text(OWN[name])
    imported = f"from {config} import *\nfrom {config} import __dict__ as all_of_it\n" if apart else OWN[name]
    (tmp_path / f"{model}.py").write_text(imported + reading)
    into = import_module(model).Model
    built = build_for(into, {"hidden_size": 24})
    assert built.asked == {"dim": "hidden_size"}
    assert built.module.get_parameter("wide.weight").shape == (36, 24)
    made = call(into, lambda: Named({"dim": 24}, into), {"dim": 24}, Bounds(parameters=10, nbytes=2**20))
    assert made.get_parameter("wide.weight").shape == (36, 24)


@pytest.mark.parametrize(
    "text",
    [
        "A = {'dim': 768, 'rate': 1.5}\nB = {'dim': 768, 'rate': 2.5}\n",  # which of them?
        "A = {'lr': 0.1, 'rate': 1.5}\n",  # it has no field that this builder reads
        "import torch.nn as nn\nclass A(nn.Module):\n    dim, rate = 768, 1.5\n",
    ],
)
def test_what_two_say_differently_or_no_config_says_is_asked_for(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(text + READING.format(dim=".dim", rate=".rate"))
    with pytest.raises(TargetError, match="asks for 'rate'"):
        build_for(import_module(name).Model, {"hidden_size": 24})


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("max_context_length", "max_position_embeddings"),
        ("model_hidden", "hidden_size"),
        ("num_q_heads", "num_attention_heads"),
        ("nTransformerBlocks", "num_hidden_layers"),
        ("feed_forward_units", "intermediate_size"),
        ("token_vocab_length", "vocab_size"),
        ("rms_epsilon", "rms_norm_eps"),
        ("head_size", "hidden_size // num_attention_heads"),
        ("num_heads_per_layer", None),
        ("context", "max_position_embeddings"),
        ("position_embedding_type", None),
        ("top_k_experts", "num_experts_per_tok"),
        ("num_routed_experts", "num_local_experts"),
        ("n_mlp", "intermediate_size"),
        ("head_n", "num_attention_heads"),
        ("seqlen", "max_position_embeddings"),
        ("context_window", "max_position_embeddings"),
        ("d_vocab", "vocab_size"),
        ("number_of_layers", "num_hidden_layers"),
        ("activated_experts", "num_experts_per_tok"),
        ("expert_hidden_dim", "intermediate_size"),
        ("ffn_expansion_factor", "intermediate_size // hidden_size"),
        ("n_text_layer", "num_hidden_layers"),
        ("image_path", None),
        ("vit_img_size", "image_size"),
        ("rope_local_base", "rope_local_base_freq"),
        ("rope_base_global", "rope_theta"),
        ("base", "rope_theta"),
    ],
)
def test_a_name_that_is_made_of_usual_words_is_understood(name: str, field: str | None) -> None:
    config = {
        "hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 50,
        "max_position_embeddings": 40, "rms_norm_eps": 1e-6, "num_experts_per_tok": 2, "num_local_experts": 4,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "image_size": 32,
    }  # fmt: skip
    assert field_for(name, config) == field


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("n_audio_layer", "encoder_layers"),
        ("n_text_layer", "decoder_layers"),
        ("dec_heads", "decoder_attention_heads"),
        ("n_text_ctx", "max_target_positions"),
        ("n_audio_ctx", "max_source_positions"),
        ("n_text_state", "d_model"),
        ("n_mels", "num_mel_bins"),
        ("tgt_vocab_size", "vocab_size"),
    ],
)
def test_the_side_that_a_name_speaks_of_decides_between_two_fields(name: str, field: str) -> None:
    config = {
        "vocab_size": 50, "num_mel_bins": 8, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3,
        "encoder_attention_heads": 3, "decoder_attention_heads": 4, "max_source_positions": 30,
        "max_target_positions": 20, "num_hidden_layers": 2,
    }  # fmt: skip
    assert field_for(name, config) == field


def test_a_config_inside_the_config_has_the_sizes_of_its_part() -> None:
    inner = {"hidden_size": 24, "num_hidden_layers": 2}
    config = {"text_config": inner, "vision_config": {"hidden_size": 40, "image_size": 8}}
    assert field_for("vision_width", config) == "vision_config.hidden_size"
    assert field_for("text_width", config) == "text_config.hidden_size"
    assert field_for("width", config) == "text_config.hidden_size"
    assert field_for("img_size", config) == "vision_config.image_size"


@dataclass
class HeadsConfig:
    count: int = 8
    num_kv_heads: int = 1


@dataclass
class InnerConfig:
    d_model: int
    heads: HeadsConfig
    attention: HeadsConfig = field(default_factory=HeadsConfig)
    mlp_dim: int = 4


class OfParts(nn.Module):
    def __init__(self, width: int, groups: int, inner: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.key, self.up = nn.Linear(width, groups, dtype=dtype), nn.Linear(width, inner)


def from_dictionaries(config: Any) -> nn.Module:
    return OfParts(config["model"]["dim"], config["attn"]["kv_heads"], config["mlp"].hidden_dim, config["dtype"])


def from_classes(config: InnerConfig) -> nn.Module:
    return OfParts(config.d_model, config.attention.num_kv_heads, config.mlp_dim)


def with_a_flag(config: Any) -> nn.Module:
    assert config.get("attention", "full") == "full"
    return OfParts(config["dim"], config["kv_heads"], config["mlp_dim"])


@pytest.mark.parametrize("builder", [from_dictionaries, from_classes, with_a_flag])
def test_configs_inside_a_config_are_made_of_the_checkpoint_s_fields(builder: Callable[[Any], nn.Module]) -> None:
    config = {
        "hidden_size": 24, "num_key_value_heads": 3, "intermediate_size": 40, "dtype": "float32",
        "num_attention_heads": 6,
    }  # fmt: skip
    built = build_for(builder, config)
    assert [tuple(parameter.shape) for parameter in built.module.parameters()] == [(3, 24), (3,), (40, 24), (40,)]
    lines = "\n".join(f'{theirs} = "{ours}"' for ours, theirs in built.asked.items())
    table = parse_table(f'[tensors]\n"a" = "b"\n[config]\n{lines}\n')
    fields = arguments(table, {**config, "hidden_size": 30})
    again = call(builder, lambda: Named(fields, builder), fields, Bounds(parameters=100, nbytes=1 << 20))
    assert [tuple(parameter.shape) for parameter in again.parameters()] == [(3, 30), (3,), (40, 30), (40,)]


def test_the_size_of_a_head_is_computed_where_no_field_has_it() -> None:
    def build(width: int, heads: int, head_size: int) -> nn.Module:
        return nn.Linear(width, heads * head_size)

    config = {"hidden_size": 24, "num_attention_heads": 3, "head_dim": None}
    built = build_for(build, config)
    spelled = "head_dim/hidden_size // num_attention_heads"
    assert built.asked == {"width": "hidden_size", "heads": "num_attention_heads", "head_size": spelled}
    assert built.module.get_parameter("weight").shape == (24, 24)
    text = f'[tensors]\n"a" = "b"\n[config]\n"{spelled}" = "head_size"\nhidden_size = "width"\n'
    table = parse_table(text)
    assert arguments(table, config) == {"head_size": 8, "width": 24}
    assert arguments(table, {**config, "head_dim": 6}) == {"head_size": 6, "width": 24}
    made = SimpleNamespace(head_size=6, width=30)
    assert original(table, made) == {spelled: 6, "hidden_size": 30}
    assert with_field(config, spelled, 6)["head_dim"] == 6
    alone = parse_table(text.replace("head_dim/", ""))
    assert original(alone, made) == {"hidden_size": 30}
    assert with_field(config, "hidden_size // num_attention_heads", 6) == config


def test_a_field_that_nothing_is_known_by_is_named_with_the_option_that_gives_it() -> None:
    def build(config: Any) -> nn.Module:
        return nn.Linear(config.hidden_size, config.blow_up)

    with pytest.raises(TargetError, match=r"asks for 'blow_up'.*config=\{'blow_up'"):
        build_for(build, {"hidden_size": 24})


def test_widths_of_stages_that_a_module_has_fixed_make_it_no_small_one() -> None:
    twin: Any = SimpleNamespace(config={"hidden_sizes": [8, 16], "depths": [1, 1]})
    assert _could(nn.Linear(8, 16), twin)
    assert not _could(nn.Linear(32, 64), twin)
    assert not _could(nn.Linear(8, 64), twin)
