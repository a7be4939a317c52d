"""A conversion into another library's format: its config.json is written from [config], and read back."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

import porting

TABLE = """\
[mapping]
name = "own_llama"
model_types = ["own_llama"]

[config]
dim = "hidden_size"
n_layers = "num_hidden_layers"
n_heads = "num_attention_heads"
n_kv_heads = "num_key_value_heads"
hidden_dim = "intermediate_size"
vocab_size = "vocab_size"
norm_eps = "rms_norm_eps"
positions = "max_position_embeddings - 2"
"rope.theta" = "rope_parameters.rope_theta"

[constants]
model_type = "llama"
architectures = ["LlamaForCausalLM"]
tie_word_embeddings = false

[sizes]
h = "n_heads"
g = "n_kv_heads"
s = 2

[tensors]
"tok_embeddings.weight" = "model.embed_tokens.weight"
"layers.{i}.attention.wq.weight [(h d s) e]" = "model.layers.{i}.self_attn.q_proj.weight [(h s d) e]"
"layers.{i}.attention.wk.weight [(g d s) e]" = "model.layers.{i}.self_attn.k_proj.weight [(g s d) e]"
"layers.{i}.attention.{p:wv,wo}.weight" = "model.layers.{i}.self_attn.{p:v,o}_proj.weight"
"layers.{i}.feed_forward.{p:w1,w2,w3}.weight" = "model.layers.{i}.mlp.{p:gate,down,up}_proj.weight"
"layers.{i}.{p:attention,ffn}_norm.weight" = "model.layers.{i}.{p:input,post_attention}_layernorm.weight"
"norm.weight" = "model.norm.weight"
"output.weight" = "lm_head.weight"
"""
CONFIG = {
    "model_type": "own_llama", "dim": 24, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "hidden_dim": 40,
    "vocab_size": 31, "norm_eps": 1e-3, "positions": 62, "rope": {"theta": 500.0},
}  # fmt: skip


@pytest.fixture
def model() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, intermediate_size=40,
        vocab_size=31, rms_norm_eps=1e-3, max_position_embeddings=64, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    made: transformers.LlamaForCausalLM = transformers.LlamaForCausalLM(config)
    for parameter in made.parameters():
        parameter.data.normal_(0, 0.3)
    made.train(False)
    return made


@pytest.fixture
def source(tmp_path: Path, model: transformers.LlamaForCausalLM) -> Path:
    """The model in the format of its first authors, whose rotary pairs are neighbours."""
    theirs = model.state_dict()
    own = {"tok_embeddings.weight": theirs["model.embed_tokens.weight"], "norm.weight": theirs["model.norm.weight"]}
    own["output.weight"] = theirs["lm_head.weight"]
    for i in range(2):
        for ours, name, heads in (("wq", "q", 6), ("wk", "k", 2), ("wv", "v", 0), ("wo", "o", 0)):
            value = theirs[f"model.layers.{i}.self_attn.{name}_proj.weight"]
            value = value.view(heads, 2, 2, 24).transpose(1, 2).reshape(-1, 24) if heads else value
            own[f"layers.{i}.attention.{ours}.weight"] = value.contiguous()
        for ours, name in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
            own[f"layers.{i}.feed_forward.{ours}.weight"] = theirs[f"model.layers.{i}.mlp.{name}_proj.weight"]
        for ours, name in (("attention", "input"), ("ffn", "post_attention")):
            own[f"layers.{i}.{ours}_norm.weight"] = theirs[f"model.layers.{i}.{name}_layernorm.weight"]
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(own, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def config_of(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "config.json").read_text())
    return found


def test_the_target_s_own_library_loads_what_is_written(
    source: Path, tmp_path: Path, model: transformers.LlamaForCausalLM
) -> None:
    done = porting.convert(source, tmp_path / "there", porting.parse_table(TABLE), derive=True)
    assert done.warnings == ()
    loader: Any = transformers.AutoModelForCausalLM
    loaded, info = loader.from_pretrained(tmp_path / "there", output_loading_info=True)
    assert type(loaded) is transformers.LlamaForCausalLM
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.generation_config.eos_token_id == 3
    assert (tmp_path / "there" / "tokenizer.json").read_text() == "{}"
    words = torch.randint(0, 31, (2, 17))
    torch.testing.assert_close(loaded(words).logits, model(words).logits, rtol=0, atol=0)
    assert loaded.config.max_position_embeddings == 64
    assert config_of(tmp_path / "there")["dtype"] == "float32"


def test_the_way_back_writes_the_checkpoint_s_config(source: Path, tmp_path: Path) -> None:
    table = porting.parse_table(TABLE)
    porting.convert(source, tmp_path / "there", table, derive=True)
    assert porting.diff(source, tmp_path / "there", table).equal
    assert porting.digest(source, table).tensors == porting.digest(tmp_path / "there", table).tensors
    (tmp_path / "there" / "provenance.json").unlink()
    done = porting.convert(tmp_path / "there", tmp_path / "back", table, reverse=True)
    assert done.warnings == ()
    assert config_of(tmp_path / "back") == {**CONFIG, "dtype": "float32"}
    back = load_file(tmp_path / "back" / "model.safetensors")
    first = load_file(source / "model.safetensors")
    assert back.keys() == first.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in first.items())
    porting.convert(tmp_path / "there", tmp_path / "like", table, reverse=True, like=source)
    assert (tmp_path / "like" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_a_checkpoint_that_transformers_wrote_goes_back(
    tmp_path: Path, source: Path, model: transformers.LlamaForCausalLM
) -> None:
    model.save_pretrained(tmp_path / "theirs")
    done = porting.convert(tmp_path / "theirs", tmp_path / "back", porting.parse_table(TABLE), reverse=True)
    assert config_of(tmp_path / "back") == {**CONFIG, "dtype": "float32"}
    (said,) = done.warnings
    assert "no line of [config] names attention_bias, attention_dropout, " in said
    assert "hidden_size" not in said


def test_fields_that_the_table_does_not_know_are_named(source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text(json.dumps({**CONFIG, "multiple_of": 8, "use_biases": False}))
    done = porting.convert(source, tmp_path / "there", porting.parse_table(TABLE), derive=True)
    said = "config.json: no line of [config] names multiple_of, use_biases, so what is written does not say it"
    assert done.warnings == (said,)
    some = {name: value for name, value in CONFIG.items() if name != "positions"}
    (source / "config.json").write_text(json.dumps(some))
    less = porting.convert(source, tmp_path / "less", porting.parse_table(TABLE), derive=True)
    said = "config.json: nothing says max_position_embeddings, so what is written does not: add it by hand"
    assert less.warnings == (said,)
    assert not {"multiple_of", "dim"} & config_of(tmp_path / "there").keys()


def test_fields_that_a_number_was_computed_from_are_named(source: Path, tmp_path: Path) -> None:
    """On the way back; those that another line gives are known."""
    table = porting.parse_table(
        TABLE.replace('dim = "hidden_size"', '"dim // n_heads" = "head_dim"\n"dim * ffn // 3" = "size"')
    )
    (source / "config.json").write_text(json.dumps({**CONFIG, "ffn": 5}))
    porting.convert(source, tmp_path / "there", table, derive=True)
    assert config_of(tmp_path / "there")["head_dim"] == 4
    (tmp_path / "there" / "provenance.json").unlink()
    done = porting.convert(tmp_path / "there", tmp_path / "back", table, reverse=True)
    assert done.warnings == ("config.json: nothing says dim, ffn, so what is written does not: add it by hand",)


def test_a_table_that_names_no_other_model_keeps_the_config(source: Path, tmp_path: Path) -> None:
    porting.convert(
        source, tmp_path / "there", porting.parse_table(TABLE.replace('"llama"', '"own_llama"')), derive=True
    )
    assert config_of(tmp_path / "there") == CONFIG


def test_the_config_lies_in_a_training_checkpoint(
    source: Path, tmp_path: Path, model: transformers.LlamaForCausalLM
) -> None:
    """As fairseq, DeepSpeed's users and Lightning save it: the arguments of the run beside the state dict."""
    fields = {name: value for name, value in CONFIG.items() if name != "model_type"}
    saved = {"args": argparse.Namespace(**fields), "model": load_file(source / "model.safetensors"), "epoch": 3}
    torch.save(saved, tmp_path / "model.pt")
    table = TABLE
    for name in fields:
        table = re.sub(rf'^"?({name}[.\w]*)"? = "', r'"args.\1" = "', table, count=1, flags=re.MULTILINE)
    table = table.replace('h = "n_heads"', 'h = "args.n_heads"').replace('g = "n_kv', 'g = "args.n_kv')
    done = porting.convert(f"{tmp_path}/model.pt#model", tmp_path / "there", porting.parse_table(table), derive=True)
    assert not [one for one in done.warnings if "config.json" in one]
    loader: Any = transformers.AutoModelForCausalLM
    loaded = loader.from_pretrained(tmp_path / "there")
    words = torch.randint(0, 31, (2, 17))
    torch.testing.assert_close(loaded(words).logits, model(words).logits, rtol=0, atol=0)


def test_a_source_without_a_config_is_a_warning(source: Path, tmp_path: Path) -> None:
    (source / "config.json").unlink()
    table = TABLE.replace('h = "n_heads"', "h = 6").replace('g = "n_kv_heads"', "g = 2")
    done = porting.convert(source, tmp_path / "there", porting.parse_table(table), derive=True)
    assert done.warnings == ("no config.json is written: the source has none that [config] could be read from",)


@pytest.mark.parametrize("to", [None, "bin"])
def test_a_model_of_diffusers_has_the_names_that_diffusers_looks_for(
    source: Path, tmp_path: Path, to: str | None
) -> None:
    """Its config names a class, and no model_type; tests/converting/test_target_libraries.py loads one."""
    table = porting.parse_table(
        TABLE.replace('model_type = "llama"\narchitectures = ["LlamaForCausalLM"]', '_class_name = "OwnTransformer"')
    )
    size = 10_000 if to is None else None
    done = porting.convert(source, tmp_path / "there", table, derive=True, to=to, shard_size=size)
    assert done.warnings == ()
    stem = "diffusion_pytorch_model"
    found = {name for name in done.files if name.startswith(stem)}
    if to == "bin":
        assert found == {f"{stem}.bin"}
    else:
        count = len(found) - 1
        shards = {f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)}
        assert count > 1
        assert found == {f"{stem}.safetensors.index.json"} | shards
    config = config_of(tmp_path / "there")
    assert config["_class_name"] == "OwnTransformer"
    assert config["hidden_size"] == CONFIG["dim"]
    assert not config.keys() & {"model_type", "dtype"}
    assert porting.verify_files(tmp_path / "there").same
    (tmp_path / "there" / "provenance.json").unlink()
    done = porting.convert(tmp_path / "there", tmp_path / "back", table, reverse=True)
    assert done.warnings == ()
    assert config_of(tmp_path / "back") == {**CONFIG, "dtype": "float32"}
    assert not [name for name in done.files if name.startswith(stem)]
    assert porting.diff(source, tmp_path / "back").equal


def test_a_model_of_timm_has_a_config_of_timm(source: Path, tmp_path: Path) -> None:
    """Its config names an architecture; tests/converting/test_target_libraries.py loads one."""
    llama, timm = 'model_type = "llama"', 'architecture = "own_vit"\n"pretrained_cfg.num_classes" = 5'
    table = porting.parse_table(TABLE.replace(llama, timm).replace('"hidden_size"', '"model_args.embed_dim"'))
    porting.convert(source, tmp_path / "there", table, derive=True)
    config = config_of(tmp_path / "there")
    assert config["architecture"] == "own_vit"
    assert config["model_args"] == {"embed_dim": CONFIG["dim"]}
    assert config["pretrained_cfg"] == {"num_classes": 5}
    assert (tmp_path / "there" / "model.safetensors").is_file()
    (tmp_path / "there" / "provenance.json").unlink()
    porting.convert(tmp_path / "there", tmp_path / "back", table, reverse=True)
    assert config_of(tmp_path / "back") == {**CONFIG, "dtype": "float32"}
    alone = porting.parse_table(TABLE.replace(llama, 'architecture = "an argument of a module"'))
    porting.convert(source, tmp_path / "alone", alone, derive=True)
    assert config_of(tmp_path / "alone") == CONFIG, "the word alone does not mean timm"


def test_a_model_of_open_clip_has_a_config_of_that_name(source: Path, tmp_path: Path) -> None:
    llama, clip = 'model_type = "llama"', '"model_cfg.quick_gelu" = true'
    table = porting.parse_table(TABLE.replace(llama, clip).replace('"hidden_size"', '"model_cfg.embed_dim"'))
    done = porting.convert(source, tmp_path / "there", table, derive=True)
    assert "config.json" not in done.files
    config = json.loads((tmp_path / "there" / "open_clip_config.json").read_text())
    assert config["model_cfg"] == {"embed_dim": CONFIG["dim"], "quick_gelu": True}
    assert "dtype" not in config
    (tmp_path / "there" / "provenance.json").unlink()
    done = porting.convert(tmp_path / "there", tmp_path / "back", table, reverse=True)
    assert "open_clip_config.json" not in done.files
    assert config_of(tmp_path / "back") == {**CONFIG, "dtype": "float32"}


FILES = """
[files]
config = "{}"
weights = "{}"
"""


@pytest.mark.parametrize(
    "names", [("model_config.yaml", "lit_model.pth"), ("arch.yml", "own.pt"), ("own.json", "w.safetensors")]
)
def test_the_target_s_files_have_the_names_that_the_table_gives(
    source: Path, tmp_path: Path, names: tuple[str, str]
) -> None:
    """tests/converting/test_target_libraries.py loads such a directory of litgpt."""
    text = TABLE.replace('model_type = "llama"\narchitectures = ["LlamaForCausalLM"]', 'norm = "RMSNorm"\nname = "yes"')
    table = porting.parse_table(text + FILES.format(*names))
    config, weights = names
    done = porting.convert(source, tmp_path / "there", table, derive=True)
    assert done.warnings == ()
    assert {*done.files} == {*names, "generation_config.json", "tokenizer.json", "provenance.json"}
    fields = {
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
        "intermediate_size": 40, "vocab_size": 31, "rms_norm_eps": 1e-3, "max_position_embeddings": 64,
        "rope_parameters": {"rope_theta": 500.0}, "norm": "RMSNorm", "name": "yes", "tie_word_embeddings": False,
    }  # fmt: skip
    raw = (tmp_path / "there" / config).read_text()
    found = json.loads(raw) if config.endswith(".json") else yaml.safe_load(raw)
    assert found == fields
    assert list(found) == sorted(fields)
    ours = tmp_path / "there" / weights
    tensors = load_file(ours) if weights.endswith(".safetensors") else torch.load(ours, weights_only=True)
    assert tensors.keys() >= {"model.norm.weight", "lm_head.weight"}
    assert porting.verify_files(tmp_path / "there").same
    assert porting.diff(source, tmp_path / "there", table).equal
    porting.convert(tmp_path / "there", tmp_path / "recorded", table, reverse=True)
    (tmp_path / "there" / "provenance.json").unlink()
    place = tmp_path / "there" if weights == "lit_model.pth" else ours
    done = porting.convert(place, tmp_path / "back", table, reverse=True)
    assert done.warnings == ()
    for folder in ("recorded", "back"):
        assert config_of(tmp_path / folder) == {**CONFIG, "dtype": "float32"}
        assert not [one for one in names if (tmp_path / folder / one).exists()]
        assert porting.diff(source, tmp_path / folder).equal


def test_another_container_than_the_table_names_has_its_usual_file(source: Path, tmp_path: Path) -> None:
    table = porting.parse_table(TABLE + FILES.format("config.yaml", "own.pth"))
    assert "own.pth" in porting.convert(source, tmp_path / "bin", table, derive=True, to="bin").files
    assert "model.npz" in porting.convert(source, tmp_path / "npz", table, derive=True, to="npz").files
    with pytest.raises(porting.PortingError, match="has no index, so that all tensors lie in one file"):
        porting.convert(source, tmp_path / "shards", table, derive=True, shard_size=10_000)
    wrong = porting.parse_table(TABLE + FILES.format("config.yaml", "own.npz"))
    with pytest.raises(porting.PortingError, match=r"weights = 'own.npz', expected a name that ends in .safetensors, "):
        porting.convert(source, tmp_path / "wrong", wrong, derive=True)
    table = porting.parse_table(TABLE + FILES.format("config.yaml", "own.safetensors"))
    done = porting.convert(source, tmp_path / "there", table, derive=True, shard_size=10_000)
    assert "own.safetensors.index.json" in done.files
    porting.convert(tmp_path / "there", tmp_path / "back", table, reverse=True)
    assert porting.diff(source, tmp_path / "back").equal


@pytest.mark.parametrize("name", ["params.json", "hparams.json"])
def test_a_config_of_another_name_is_read_and_replaced(source: Path, tmp_path: Path, name: str) -> None:
    (source / "config.json").rename(source / name)
    porting.convert(source, tmp_path / "there", porting.parse_table(TABLE), derive=True)
    assert config_of(tmp_path / "there")["hidden_size"] == CONFIG["dim"]
    assert not (tmp_path / "there" / name).exists()
    (source / "config.json").write_text("{}")
    assert porting.open_checkpoint(source).config == {}
