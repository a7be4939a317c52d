"""What README.md says of the alternatives, tried: renaming with ``allclose`` stands in ``tests/test_readme.py``.

mergekit is in no list of requirements; ``pip install mergekit`` into an environment of yours runs its test as well.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    conversion_mapping,
)
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming

import porting
from porting.verification import Case

SIZES: dict[str, Any] = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT = BertConfig(**SIZES, intermediate_size=12)
PARTS = "query", "key", "value"


class Block(nn.Module):
    """Query, key and value in one matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)


class Fused(PreTrainedModel):  # type: ignore[no-untyped-call]  # transformers has no types
    """A class of one's own with names of its own; nothing of it is run here."""

    config_class = BertConfig
    base_model_prefix = ""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.tok = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config.hidden_size) for _ in range(config.num_hidden_layers))
        self.post_init()  # type: ignore[no-untyped-call]  # as above

    def _init_weights(self, module: nn.Module) -> None:
        """Leave the weights as they are."""


def test_load_state_dict_lists_keys_and_shapes(original: Any) -> None:
    state = original.state_dict()
    state["pooler.other"] = state.pop("pooler.dense.bias")
    state["embeddings.LayerNorm.weight"] = torch.ones(7)
    with pytest.raises(RuntimeError) as caught:
        original.load_state_dict(state)
    message = str(caught.value)
    assert 'Missing key(s) in state_dict: "pooler.dense.bias"' in message
    assert 'Unexpected key(s) in state_dict: "pooler.other"' in message
    assert "size mismatch for embeddings.LayerNorm.weight" in message


def fused(monkeypatch: pytest.MonkeyPatch, *more: WeightRenaming) -> None:
    """Register the conversions of ``Fused`` for the length of a test."""
    mapping: Any = conversion_mapping  # it has no types
    known = dict(mapping._build_checkpoint_conversion_mapping())
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", known)
    monkeypatch.setattr(conversion_mapping, "USER_REGISTERED_MAPPINGS", set())
    conversions: list[Any] = [
        *more,
        WeightRenaming(r"encoder\.layer\.(\d+)\.attention\.self\.", r"blocks.\1."),
        *(
            WeightConverter([f".{part}.{w}" for part in PARTS], f".qkv.{w}", operations=[Concatenate(dim=0)])
            for w in ("weight", "bias")
        ),
    ]
    conversion_mapping.register_checkpoint_conversion_mapping("Fused", conversions)


@pytest.fixture
def original(tmp_path: Path) -> Any:
    """A BERT, saved as ``bert``."""
    torch.manual_seed(0)
    model: Any = BertModel(BERT)
    model.eval()
    model.save_pretrained(tmp_path / "bert")
    return model


def test_a_weight_converter_fills_a_class_of_one_s_own_and_is_reversible(
    original: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused(monkeypatch, WeightRenaming("embeddings.word_embeddings.weight", "tok.weight"))
    model: Any = Fused.from_pretrained(tmp_path / "bert")
    parts = [getattr(original.encoder.layer[1].attention.self, part).weight for part in PARTS]
    assert torch.equal(model.blocks[1].qkv.weight, torch.cat(parts))
    model.save_pretrained(tmp_path / "again")
    stored, again = (load_file(tmp_path / name / "model.safetensors") for name in ("bert", "again"))
    assert len(again) == 13
    assert all(torch.equal(value, stored[name]) for name, value in again.items())


@pytest.mark.usefixtures("original")
def test_a_weight_converter_reports_missing_and_unexpected_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused(monkeypatch)
    loaded: Any = Fused.from_pretrained(tmp_path / "bert", output_loading_info=True)
    _, found = loaded
    assert found["missing_keys"] == {"tok.weight"}
    assert "embeddings.word_embeddings.weight" in found["unexpected_keys"]


def test_from_pretrained_compares_no_activations(original: Any, tmp_path: Path) -> None:
    loaded: Any = BertModel.from_pretrained(tmp_path / "bert", layer_norm_eps=1e-5, output_loading_info=True)
    other, found = loaded
    assert not any(found.values())
    given = {"input_ids": torch.arange(8).reshape(2, 4), "attention_mask": torch.ones(2, 4, dtype=torch.long)}
    report = porting.verify(reference=original, into=other, loaded=True, inputs=[Case("one", given)], causes=False)
    assert report.verdict == "different"


def test_mergekit_writes_a_checkpoint_from_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other architectures and missing tensors are refused before a tensor is read, other shapes when merging."""
    pytest.importorskip("mergekit", reason="mergekit is not installed")
    config = pytest.importorskip("mergekit.config")
    merge = pytest.importorskip("mergekit.merge")
    yaml = pytest.importorskip("yaml")
    loader = pytest.importorskip("mergekit.io.lazy_tensor_loader").LazyTensorLoader
    models: dict[str, Any] = {
        "first": LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=12)),
        "second": LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=12)),
        "wider": LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=16)),
        "mistral": MistralForCausalLM(MistralConfig(**SIZES, intermediate_size=12, num_key_value_heads=2)),
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    read: list[str] = []
    get = loader.get_tensor

    def seen(self: Any, key: str, *args: Any, **options: Any) -> Any:
        read.append(key)
        return get(self, key, *args, **options)

    monkeypatch.setattr(loader, "get_tensor", seen)
    one = "  - {{model: {}, parameters: {{weight: 0.5}}}}\n"

    def merged(other: str) -> dict[str, Tensor]:
        read.clear()
        listed = "".join(one.format(tmp_path / name) for name in ("first", other))
        recipe = config.MergeConfiguration.model_validate(
            yaml.safe_load(f"merge_method: linear\ndtype: float32\nmodels:\n{listed}")
        )
        merge.run_merge(recipe, str(tmp_path / "merged"), merge.MergeOptions(copy_tokenizer=False))
        return load_file(tmp_path / "merged" / "model.safetensors")

    made = merged("second")
    assert made.keys() == first.keys()
    assert all(torch.allclose(value, (first[name] + second[name]) / 2) for name, value in made.items())
    shutil.copytree(tmp_path / "second", tmp_path / "lacking")
    second.pop("model.layers.1.mlp.up_proj.weight")
    save_file(second, tmp_path / "lacking" / "model.safetensors", metadata={"format": "pt"})
    for other, told in (
        ("lacking", r"Tensor .*up_proj.weight required but not present in model"),
        ("mistral", "attempt to mix different architectures"),
    ):
        with pytest.raises(RuntimeError, match=told):
            merged(other)
        assert not read
    with pytest.raises(ValueError, match="Tensor size mismatch"):
        merged("wider")
    assert read
