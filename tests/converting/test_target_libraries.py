"""What is converted loads with the target's own library, and computes what the source computes there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import porting
from scripts.conversions.trial import TABLES
from tests.checkpoint.test_gguf import LLAMA as GGUF
from tests.checkpoint.test_gguf import SPECIAL, tokenizer_of

pytestmark = pytest.mark.slow

LLAMA: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 40, "vocab_size": 31, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
}  # fmt: skip


def drawn(model: nn.Module) -> Any:
    """The model with weights, norms and biases that matter."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1 if "norm" in name and name.endswith("weight") else 0, 0.2)
    return model.eval()


def written(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert expected.std() > 0.01
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5), (found - expected).abs().max()


@pytest.fixture
def llama() -> Any:
    return drawn(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, tie_word_embeddings=False)))


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(1))


def converted(source: Path, target: Path, table: str, **options: Any) -> dict[str, Tensor]:
    porting.convert(source, target, TABLES / f"{table}.toml", **options)
    (weights,) = target.glob("*.safetensors")
    return load_file(weights)


def test_litgpt_loads_the_directory(llama: Any, ids: Tensor, tmp_path: Path) -> None:
    """With its model_config.yaml and lit_model.pth, of which litgpt makes the model."""
    litgpt = pytest.importorskip("litgpt", exc_type=ImportError)
    source = written(llama, tmp_path / "a")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_text("{}")
    porting.convert(source, tmp_path / "b", TABLES / "litgpt_llama.toml", derive=True)
    pytest.importorskip("litgpt.utils").check_valid_checkpoint_dir(tmp_path / "b", raise_error=True)
    model = litgpt.GPT(litgpt.Config.from_checkpoint(tmp_path / "b"))
    model.load_state_dict(torch.load(tmp_path / "b" / "lit_model.pth", weights_only=True, mmap=True))
    with torch.no_grad():
        close(model.eval()(ids), llama(ids).logits)


def test_a_directory_of_litgpt_goes_back(llama: Any, ids: Tensor, tmp_path: Path) -> None:
    """One that litgpt wrote, whose config has all of its fields."""
    litgpt = pytest.importorskip("litgpt", exc_type=ImportError)
    porting.convert(written(llama, tmp_path / "a"), tmp_path / "b", TABLES / "litgpt_llama.toml", derive=True)
    model = litgpt.GPT(litgpt.Config.from_checkpoint(tmp_path / "b"))
    drawn(model)
    (tmp_path / "c").mkdir()
    torch.save(model.state_dict(), tmp_path / "c" / "lit_model.pth")
    pytest.importorskip("litgpt.utils").save_config(model.config, tmp_path / "c")
    porting.convert(tmp_path / "c", tmp_path / "d", TABLES / "litgpt_llama.toml", reverse=True)
    loader: Any = transformers.AutoModelForCausalLM
    with torch.no_grad():
        close(loader.from_pretrained(tmp_path / "d")(ids).logits, model(ids))


def test_torchtune(llama: Any, ids: Tensor, tmp_path: Path) -> None:
    models = pytest.importorskip("torchtune.models.llama3", exc_type=ImportError)
    model = models.llama3(
        vocab_size=31, num_layers=2, num_heads=6, num_kv_heads=2, embed_dim=24, max_seq_len=64, intermediate_dim=40,
        norm_eps=1e-5, rope_base=10000,
    )  # fmt: skip
    model.load_state_dict(converted(written(llama, tmp_path / "a"), tmp_path / "b", "torchtune_llama", derive=True))
    with torch.no_grad():
        close(model.eval()(ids), llama(ids).logits)


TIMM = """
[mapping]
name = "vit_of_timm"
model_types = ["vit"]

[config]
hidden_size = "model_args.embed_dim"
num_hidden_layers = "model_args.depth"
num_attention_heads = "model_args.num_heads"
image_size = "model_args.img_size"
patch_size = "model_args.patch_size"
num_labels = "num_classes"

[constants]
architecture = "vit_tiny_patch16_224"
"pretrained_cfg.custom_load" = false

[tensors]
"vit.embeddings.cls_token" = "cls_token"
"vit.embeddings.position_embeddings" = "pos_embed"
"vit.embeddings.patch_embeddings.projection.{w:weight,bias}" = "patch_embed.proj.{w:weight,bias}"
"vit.layernorm.{w:weight,bias}" = "norm.{w:weight,bias}"
"classifier.{w:weight,bias}" = "head.{w:weight,bias}"
"vit.encoder.layer.{i}.layernorm_{n:before,after}.{w:weight,bias}" = "blocks.{i}.{n:norm1,norm2}.{w:weight,bias}"
"vit.encoder.layer.{i}.attention.output.dense.{w:weight,bias}" = "blocks.{i}.attn.proj.{w:weight,bias}"
"vit.encoder.layer.{i}.{p:intermediate,output}.dense.{w:weight,bias}" = "blocks.{i}.mlp.{p:fc1,fc2}.{w:weight,bias}"
"vit.encoder.layer.{i}.attention.attention.{p:query,key,value}.weight [o e]" = "blocks.{i}.attn.qkv.weight [(p o) e]"
"vit.encoder.layer.{i}.attention.attention.{p:query,key,value}.bias [o]" = "blocks.{i}.attn.qkv.bias [(p o)]"
"""


def test_timm_loads_the_directory(tmp_path: Path) -> None:
    """With a config.json of timm, of which timm makes the model."""
    timm = pytest.importorskip("timm", exc_type=ImportError)
    kind: Any = transformers.ViTConfig  # as below
    config = kind(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8,
        layer_norm_eps=1e-6, num_labels=5,
    )  # fmt: skip
    theirs = drawn(transformers.ViTForImageClassification(config))
    (tmp_path / "table.toml").write_text(TIMM)
    porting.convert(written(theirs, tmp_path / "a"), tmp_path / "b", tmp_path / "table.toml", derive=True)
    model = timm.create_model(f"local-dir:{tmp_path / 'b'}", pretrained=True)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        close(model.eval()(images), theirs(images).logits)


def test_timm(tmp_path: Path) -> None:
    """From right to left: transformers' ViT becomes timm's."""
    timm = pytest.importorskip("timm", exc_type=ImportError)
    kind: Any = transformers.ViTConfig  # its labels are an argument of a class above it
    config = kind(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8,
        layer_norm_eps=1e-6, num_labels=5,
    )  # fmt: skip
    theirs = drawn(transformers.ViTForImageClassification(config))
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=4, num_classes=5
    )
    source = written(theirs, tmp_path / "a")
    model.load_state_dict(converted(source, tmp_path / "b", "transformers_timm_vit", reverse=True))
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        close(model.eval()(images), theirs(images).logits)


def test_diffusers(tmp_path: Path) -> None:
    """FLUX.1 to the layout of its authors and back; beside its config diffusers finds the file by its own name."""
    diffusers = pytest.importorskip("diffusers", exc_type=ImportError)
    kind = diffusers.FluxTransformer2DModel
    theirs = drawn(
        kind(
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=12,
            pooled_projection_dim=8,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=True,
        )
    )
    (tmp_path / "a").mkdir()
    save_file({name: one.contiguous() for name, one in theirs.state_dict().items()}, tmp_path / "a/model.safetensors")
    config = json.loads(theirs.to_json_string()) | {"hidden_size": 32}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    converted(tmp_path / "a", tmp_path / "b", "diffusers_flux", reverse=True)
    converted(tmp_path / "b", tmp_path / "c", "diffusers_flux", derive=True)
    loaded, info = kind.from_pretrained(tmp_path / "c", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(1, 6, 4, generator=generator),
        "encoder_hidden_states": torch.randn(1, 5, 12, generator=generator),
        "pooled_projections": torch.randn(1, 8, generator=generator),
        "timestep": torch.tensor([0.5]), "guidance": torch.tensor([3.0]),
        "img_ids": torch.arange(18.0).view(6, 3), "txt_ids": torch.zeros(5, 3),
    }  # fmt: skip
    with torch.no_grad():
        close(loaded.eval()(**inputs).sample, theirs(**inputs).sample)


def test_llama_cpp(tmp_path: Path) -> None:
    """A written GGUF file continues a text in llama.cpp, which gpt4all has inside, as it does in transformers."""
    gpt4all = pytest.importorskip("gpt4all", exc_type=ImportError)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=280, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    made.train_from_iterator(["the table of the tensors of the model"] * 3, trainer)
    tokenizer = tokenizer_of(tokenizer_object=made, **SPECIAL)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": len(tokenizer)}
    config = transformers.LlamaConfig(**{**LLAMA, **sizes}, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1)
    model = drawn(transformers.LlamaForCausalLM(config))
    model.lm_head.weight.data[[0, 1]] = 0  # a special token has no text
    tokenizer.save_pretrained(written(model, tmp_path / "a"))
    porting.convert(tmp_path / "a", tmp_path / "b", porting.parse_table(GGUF), derive=True, to="gguf")
    theirs = gpt4all.GPT4All("model.gguf", model_path=tmp_path / "b", allow_download=False, device="cpu", n_ctx=64)
    text = "the tensors of the"
    found = theirs.generate(text, max_tokens=16, temp=0.0, top_k=1, repeat_penalty=1.0)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=1)
    assert found == tokenizer.decode(expected[0, ids.shape[1] :])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers under an older name
def test_peft(llama: Any, ids: Tensor, tmp_path: Path) -> None:
    """An adapter is merged as peft merges it, by the table of the documentation."""
    peft = pytest.importorskip("peft", exc_type=ImportError)
    page = (Path(__file__).parents[2] / "docs/containers.md").read_text(encoding="utf-8")
    (tmp_path / "merge.toml").write_text(
        '[mapping]\nname = "merge_lora"' + page.split('name = "merge_lora"')[1].split("```")[0]
    )
    written(llama, tmp_path / "a")
    model = peft.get_peft_model(llama, peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
    written(model, tmp_path / "lora")
    porting.convert(f"{tmp_path}/a+lora={tmp_path}/lora", tmp_path / "b", tmp_path / "merge.toml", derive=True)
    loader: Any = transformers.AutoModelForCausalLM
    with torch.no_grad():
        merged = model.merge_and_unload()(ids).logits
        close(loader.from_pretrained(tmp_path / "b")(ids).logits, merged)
        assert not torch.allclose(merged, loader.from_pretrained(tmp_path / "a")(ids).logits, atol=1e-2)


CLIP = """
[mapping]
name = "open_clip"

[config]
projection_dim = "model_cfg.embed_dim"
"vision_config.num_hidden_layers" = "model_cfg.vision_cfg.layers"
"vision_config.hidden_size" = "model_cfg.vision_cfg.width"
"vision_config.hidden_size // vision_config.num_attention_heads" = "model_cfg.vision_cfg.head_width"
"vision_config.patch_size" = "model_cfg.vision_cfg.patch_size"
"vision_config.image_size" = "model_cfg.vision_cfg.image_size"
"text_config.max_position_embeddings" = "model_cfg.text_cfg.context_length"
"text_config.vocab_size" = "model_cfg.text_cfg.vocab_size"
"text_config.hidden_size" = "model_cfg.text_cfg.width"
"text_config.num_attention_heads" = "model_cfg.text_cfg.heads"
"text_config.num_hidden_layers" = "model_cfg.text_cfg.layers"

[constants]
"model_cfg.quick_gelu" = true

[tensors]
"logit_scale" = "logit_scale"
"vision_model.embeddings.class_embedding" = "visual.class_embedding"
"vision_model.embeddings.position_embedding.weight" = "visual.positional_embedding"
"vision_model.embeddings.patch_embedding.weight" = "visual.conv1.weight"
"vision_model.{n:pre_layrnorm,post_layernorm}.{w:weight,bias}" = "visual.{n:ln_pre,ln_post}.{w:weight,bias}"
"visual_projection.weight [o e]" = "visual.proj [e o]"
"text_model.embeddings.{n:token,position}_embedding.weight" = "{n:token_embedding.weight,positional_embedding}"
"text_model.final_layer_norm.{w:weight,bias}" = "ln_final.{w:weight,bias}"
"text_projection.weight [o e]" = "text_projection [e o]"
"{t:vision,text}_model.encoder.layers.{i}.layer_norm{n:1,2}.{w:weight,bias}" = "{t:visual.transformer,transformer}.resblocks.{i}.ln_{n:1,2}.{w:weight,bias}"
"{t:vision,text}_model.encoder.layers.{i}.self_attn.{p:q,k,v}_proj.weight [o e]" = "{t:visual.transformer,transformer}.resblocks.{i}.attn.in_proj_weight [(p o) e]"
"{t:vision,text}_model.encoder.layers.{i}.self_attn.{p:q,k,v}_proj.bias [o]" = "{t:visual.transformer,transformer}.resblocks.{i}.attn.in_proj_bias [(p o)]"
"{t:vision,text}_model.encoder.layers.{i}.self_attn.out_proj.{w:weight,bias}" = "{t:visual.transformer,transformer}.resblocks.{i}.attn.out_proj.{w:weight,bias}"
"{t:vision,text}_model.encoder.layers.{i}.mlp.{p:fc1,fc2}.{w:weight,bias}" = "{t:visual.transformer,transformer}.resblocks.{i}.mlp.{p:c_fc,c_proj}.{w:weight,bias}"
"""  # noqa: E501  # a rule is a line


def test_open_clip(tmp_path: Path) -> None:
    open_clip = pytest.importorskip("open_clip", exc_type=ImportError)
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 1, "hidden_act": "quick_gelu"}
    text = {**sizes, "hidden_size": 64, "intermediate_size": 256, "vocab_size": 31, "max_position_embeddings": 9}
    text |= {"eos_token_id": 30, "bos_token_id": 29, "pad_token_id": 0}
    vision = {**sizes, "hidden_size": 64, "intermediate_size": 256, "image_size": 32, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    theirs = drawn(transformers.CLIPModel(config))
    (tmp_path / "table.toml").write_text(CLIP)
    porting.convert(written(theirs, tmp_path / "a"), tmp_path / "b", tmp_path / "table.toml", derive=True)
    model = open_clip.create_model(f"local-dir:{tmp_path / 'b'}")
    generator = torch.Generator().manual_seed(1)
    images, ids = torch.randn(2, 3, 32, 32, generator=generator), torch.randint(1, 29, (2, 9), generator=generator)
    ids[:, -1] = 30  # both take the text's features where its end is
    with torch.no_grad():
        ours = theirs(input_ids=ids, pixel_values=images)
        close(nn.functional.normalize(model.eval().encode_image(images), dim=-1), ours.image_embeds)
        close(nn.functional.normalize(model.encode_text(ids), dim=-1), ours.text_embeds)
