"""Scripts of transformers that convert the original checkpoints of its models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from scripts.conversions.case import Case, Maker, Script, Sources, Tensors, both, convnext_downsampling, drawn

HIDDEN, INNER, HEADS, CLASSES = 8, 12, 2, 5


def _case(title: str, table: str, lines: int, source: Tensors, made: Tensors, **more: Any) -> Case:
    return Case(project="transformers", title=title, table=table, lines=lines, source=source, made=made, **more)


def _vit(block: str = "blocks.{i}", *, hidden: int = HIDDEN) -> dict[str, Any]:
    """The blocks of timm's vision transformer."""
    shapes = both(f"{block}.norm1", f"{block}.norm2", shape=(hidden,))
    shapes |= both(f"{block}.attn.qkv", shape=(3 * hidden, hidden)) | both(f"{block}.attn.proj", shape=(hidden, hidden))
    return shapes | both(f"{block}.mlp.fc1", shape=(INNER, hidden)) | both(f"{block}.mlp.fc2", shape=(hidden, INNER))


def _embedded(prefix: str = "") -> dict[str, Any]:
    shapes: dict[str, Any] = {f"{prefix}cls_token": (1, 1, HIDDEN), f"{prefix}pos_embed": (1, 10, HIDDEN)}
    return shapes | both(f"{prefix}patch_embed.proj", shape=(HIDDEN, 3, 2, 2)) | both(f"{prefix}norm", shape=(HIDDEN,))


def _renamed(script: Script, source: Tensors, config: Any, *further: Any) -> Tensors:
    """What scripts of the form that vision transformers share do: rename keys, then cut q, k and v."""
    made = dict(source)
    for old, new in script.create_rename_keys(config, *further):
        script.rename_key(made, old, new)
    script.read_in_q_k_v(made, config, *further)
    return made


CONFIG = SimpleNamespace(num_hidden_layers=2, hidden_size=HIDDEN, use_swiglu_ffn=False, decoder_hidden_size=6)
KEYS = ("create_rename_keys", "rename_key", "read_in_q_k_v")


def dino_vit(sources: Sources) -> Case:
    """DINO's vision transformer."""
    script = sources.transformers("vit/convert_dino_to_pytorch.py")
    source = drawn(_vit() | _embedded(), i=2)
    return _case(
        "DINO's ViT", "transformers_dino_vit", script.lines(*KEYS), source, _renamed(script, source, CONFIG, True)
    )


def timm_vit(sources: Sources) -> Case:
    """Timm's vision transformer."""
    script = sources.transformers("vit/convert_vit_timm_to_pytorch.py")
    source = drawn(_vit() | _embedded() | both("head", shape=(CLASSES, HIDDEN)), i=2)
    return _case(
        "timm's ViT", "transformers_timm_vit", script.lines(*KEYS), source, _renamed(script, source, CONFIG, False)
    )


def dinov2(sources: Sources) -> Case:
    """DINOv2."""
    script = sources.transformers("dinov2/convert_dinov2_to_hf.py")
    shapes = _vit() | _embedded() | {"mask_token": (1, HIDDEN)}
    source = drawn(shapes | {f"blocks.{{i}}.ls{n}.gamma": (HIDDEN,) for n in (1, 2)}, i=2)
    return _case("DINOv2", "transformers_dinov2", script.lines(*KEYS), source, _renamed(script, source, CONFIG))


def vit_mae(sources: Sources) -> Case:
    """The masked autoencoder, with its decoder of another width."""
    script = sources.transformers("vit_mae/convert_vit_mae_to_pytorch.py")
    shapes = (
        _vit()
        | _embedded()
        | _vit("decoder_blocks.{i}", hidden=6)
        | {"mask_token": (1, 1, 6), "decoder_pos_embed": (1, 10, 6)}
    )
    shapes |= (
        both("decoder_embed", shape=(6, HIDDEN))
        | both("decoder_norm", shape=(6,))
        | both("decoder_pred", shape=(12, 6))
    )
    source = drawn(shapes, i=2)
    made = script.convert_state_dict(dict(source), CONFIG)
    return _case("MAE of Meta", "transformers_vit_mae", script.lines("rename_key", "convert_state_dict"), source, made)


def audio_spectrogram(sources: Sources) -> Case:
    """The Audio Spectrogram Transformer, after the heads that are not used were removed."""
    path = "audio_spectrogram_transformer/convert_audio_spectrogram_transformer_original_to_pytorch.py"
    script = sources.transformers(path)
    shapes = _vit("module.v.blocks.{i}") | _embedded("module.v.") | {"module.v.dist_token": (1, 1, HIDDEN)}
    shapes |= both("module.mlp_head.0", shape=(HIDDEN,)) | both("module.mlp_head.1", shape=(CLASSES, HIDDEN))
    source = drawn(shapes, i=2)
    made = script.convert_state_dict(dict(source), CONFIG)
    return _case(
        "Audio Spectrogram Transformer",
        "transformers_ast",
        script.lines("rename_key", "convert_state_dict"),
        source,
        made,
    )


def whisper(sources: Sources) -> Case:
    """OpenAI's Whisper."""
    script = sources.transformers("whisper/convert_openai_to_hf.py")
    shapes: dict[str, Any] = {"encoder.positional_embedding": (9, HIDDEN), "decoder.positional_embedding": (7, HIDDEN)}
    shapes |= {"decoder.token_embedding.weight": (11, HIDDEN)}
    shapes |= both("encoder.conv1", "encoder.conv2", shape=(HIDDEN, 4, 3)) | both(
        "encoder.ln_post", "decoder.ln", shape=(HIDDEN,)
    )
    for side in ("encoder", "decoder"):
        block = f"{side}.blocks.{{i}}"
        for attention in ("attn", "cross_attn") if side == "decoder" else ("attn",):
            shapes |= both(*(f"{block}.{attention}.{one}" for one in ("query", "value", "out")), shape=(HIDDEN, HIDDEN))
            shapes |= {f"{block}.{attention}.key.weight": (HIDDEN, HIDDEN)}
            shapes |= both(f"{block}.{attention}_ln", shape=(HIDDEN,))
        shapes |= both(f"{block}.mlp_ln", shape=(HIDDEN,))
        shapes |= both(f"{block}.mlp.0", shape=(INNER, HIDDEN)) | both(f"{block}.mlp.2", shape=(HIDDEN, INNER))
    source = drawn(shapes, i=2)
    lines = script.lines("WHISPER_MAPPING", "rename_keys")
    return _case("Whisper of OpenAI", "transformers_whisper", lines, source, script.rename_keys(dict(source)))


def convnext(sources: Sources) -> Case:
    """ConvNeXt."""
    script = sources.transformers("convnext/convert_convnext_to_pytorch.py")
    shapes = convnext_downsampling(HIDDEN)
    block = "stages.{s}.{i}"
    shapes |= both(f"{block}.dwconv", shape=(HIDDEN, 1, 7, 7)) | both(f"{block}.norm", shape=(HIDDEN,))
    shapes |= both(f"{block}.pwconv1", shape=(INNER, HIDDEN)) | both(f"{block}.pwconv2", shape=(HIDDEN, INNER))
    source = drawn(shapes | {f"{block}.gamma": (HIDDEN,)} | both("head", shape=(CLASSES, HIDDEN)), s=4, i=2)
    made = {script.rename_key(name): tensor for name, tensor in source.items()}
    return _case("ConvNeXt of Meta", "transformers_convnext", script.lines("rename_key"), source, made)


def phi(sources: Sources) -> Case:
    """Phi-1.5: q, k and v of each head beside each other."""
    script = sources.transformers("phi/convert_phi_weights_to_hf.py")
    layer = "transformer.h.{i}"
    shapes: dict[str, Any] = {"transformer.embd.wte.weight": (11, HIDDEN)} | both(
        f"{layer}.ln", "lm_head.ln", shape=(HIDDEN,)
    )
    shapes |= both(f"{layer}.mixer.Wqkv", shape=(3 * HIDDEN, HIDDEN)) | both(
        f"{layer}.mixer.out_proj", shape=(HIDDEN, HIDDEN)
    )
    shapes |= both(f"{layer}.mlp.fc1", shape=(INNER, HIDDEN)) | both(f"{layer}.mlp.fc2", shape=(HIDDEN, INNER))
    source = drawn(shapes | both("lm_head.linear", shape=(11, HIDDEN)), i=2)
    config = SimpleNamespace(num_attention_heads=HEADS, hidden_size=HIDDEN)
    made = script.convert_weights(dict(source), script.PHI_MAPPING, config)
    lines = script.lines("PHI_MAPPING", "convert_weights")
    return _case("Phi-1.5 of Microsoft", "transformers_phi", lines, source, made, config={"num_attention_heads": HEADS})


def persimmon(sources: Sources) -> Case:
    """Persimmon: names alone."""
    script = sources.transformers("persimmon/convert_persimmon_weights_to_hf.py")
    layer = "language_model.encoder.layers.{i}"
    shapes: dict[str, Any] = {
        "language_model.embedding.word_embeddings.weight": (11, HIDDEN),
        "language_model.word_embeddings_for_head.weight": (11, HIDDEN),
    }
    shapes |= both(f"{layer}.self_attention.query_key_value", shape=(3 * HIDDEN, HIDDEN))
    shapes |= both(f"{layer}.self_attention.dense", f"{layer}.mlp.dense_h_to_4h", shape=(HIDDEN, HIDDEN))
    shapes |= both(f"{layer}.self_attention.q_layernorm", f"{layer}.input_layernorm", shape=(HIDDEN,))
    source = drawn(shapes | both("language_model.encoder.final_layernorm", shape=(HIDDEN,)), i=2)
    lines = script.lines("KEYS_TO_MODIFY_MAPPING", "rename_state_dict")
    return _case("Persimmon of Adept", "transformers_persimmon", lines, source, script.rename_state_dict(dict(source)))


def sam(sources: Sources) -> Case:
    """Segment Anything."""
    script = sources.transformers("sam/convert_sam_to_hf.py")
    image, prompt, mask = "image_encoder", "prompt_encoder", "mask_decoder"
    shapes: dict[str, Any] = {f"{image}.pos_embed": (1, 4, 4, HIDDEN)} | both(
        f"{image}.patch_embed.proj", shape=(HIDDEN, 3, 2, 2)
    )
    shapes |= both(f"{image}.blocks.{{i}}.norm1", f"{image}.blocks.{{i}}.norm2", shape=(HIDDEN,))
    shapes |= both(f"{image}.blocks.{{i}}.attn.qkv", shape=(3 * HIDDEN, HIDDEN)) | both(
        f"{image}.blocks.{{i}}.attn.proj", shape=(HIDDEN, HIDDEN)
    )
    shapes |= {f"{image}.blocks.{{i}}.attn.rel_pos_{one}": (7, 4) for one in "hw"}
    shapes |= both(f"{image}.blocks.{{i}}.mlp.lin1", f"{image}.blocks.{{i}}.mlp.lin2", shape=(HIDDEN, HIDDEN))
    shapes |= {f"{image}.neck.0.weight": (4, HIDDEN, 1, 1), f"{image}.neck.2.weight": (4, 4, 3, 3)}
    shapes |= both(f"{image}.neck.1", f"{image}.neck.3", shape=(4,))
    shapes |= {
        f"{prompt}.pe_layer.positional_encoding_gaussian_matrix": (2, 2),
        f"{prompt}.not_a_point_embed.weight": (1, 4),
    }
    shapes |= {f"{prompt}.no_mask_embed.weight": (1, 4), f"{prompt}.point_embeddings.{{i}}.weight": (1, 4)}
    shapes |= both(*(f"{prompt}.mask_downscaling.{n}" for n in (0, 3, 6)), shape=(4, 4, 2, 2)) | both(
        *(f"{prompt}.mask_downscaling.{n}" for n in (1, 4)), shape=(4,)
    )
    shapes |= {f"{mask}.iou_token.weight": (1, 4), f"{mask}.mask_tokens.weight": (4, 4)}
    shapes |= both(*(f"{mask}.iou_prediction_head.layers.{n}" for n in range(3)), shape=(4, 4))
    shapes |= both(*(f"{mask}.output_upscaling.{n}" for n in (0, 3)), shape=(4, 4, 2, 2)) | both(
        f"{mask}.output_upscaling.1", shape=(4,)
    )
    shapes |= both(*(f"{mask}.output_hypernetworks_mlps.{{i}}.layers.{n}" for n in range(3)), shape=(4, 4))
    layer = f"{mask}.transformer.layers.{{i}}"
    shapes |= both(*(f"{layer}.self_attn.{one}_proj" for one in ("q", "k", "v", "out")), shape=(4, 4))
    shapes |= both(*(f"{layer}.norm{n}" for n in (1, 2, 3, 4)), f"{mask}.transformer.norm_final_attn", shape=(4,))
    source = drawn(
        shapes | both(f"{layer}.mlp.lin1", f"{mask}.transformer.final_attn_token_to_image.q_proj", shape=(4, 4)), i=2
    )
    lines = script.lines("KEYS_TO_MODIFY_MAPPING", "replace_keys")
    return _case("Segment Anything of Meta", "transformers_sam", lines, source, script.replace_keys(dict(source)))


def megatron_gpt2(sources: Sources) -> Case:
    """Megatron-LM's GPT-2, checkpoint version 3, the word embeddings padded; without the causal masks that it adds."""
    script = sources.transformers("megatron_gpt2/convert_megatron_gpt2_checkpoint.py")
    layer = "encoder.layers.{i}"
    shapes = both(f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", shape=(HIDDEN,))
    shapes |= both(f"{layer}.self_attention.query_key_value", shape=(3 * HIDDEN, HIDDEN)) | both(
        f"{layer}.self_attention.dense", shape=(HIDDEN, HIDDEN)
    )
    shapes |= both(f"{layer}.mlp.dense_h_to_4h", shape=(INNER, HIDDEN)) | both(
        f"{layer}.mlp.dense_4h_to_h", shape=(HIDDEN, INNER)
    )
    shapes |= both("encoder.final_layernorm", shape=(HIDDEN,))
    shapes |= {"embedding.word_embeddings.weight": (16, HIDDEN), "embedding.position_embeddings.weight": (7, HIDDEN)}
    source = drawn(shapes, i=2)
    source["embedding.word_embeddings.weight"][11:] = 0
    nested: dict[str, Any] = {
        "encoder": {name.removeprefix("encoder."): one for name, one in source.items() if name.startswith("encoder.")}
    }
    nested["embedding"] = {
        one: {"weight": source[f"embedding.{one}.weight"]} for one in ("word_embeddings", "position_embeddings")
    }
    config = SimpleNamespace(n_head=HEADS, n_embd=HIDDEN, n_layer=2, n_positions=7, vocab_size=11)
    made = script.convert_megatron_checkpoint(
        None, {"model": {"language_model": nested}, "checkpoint_version": 3.0}, config
    )
    made = {name: tensor for name, tensor in made.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}
    lines = script.lines("fix_query_key_value_ordering", "convert_megatron_checkpoint")
    remark = (
        "the script adds a causal mask and a constant to every layer, which are left out of the comparison; the rows "
        "of the vocabulary's padding are zero here"
    )
    return _case(
        "Megatron-LM's GPT-2",
        "transformers_megatron_gpt2",
        lines,
        source,
        made,
        config={**vars(config), "padded_vocab_size": 16},
        remark=remark,
    )


def videomae(sources: Sources) -> Case:
    """VideoMAE: q, k and v without biases."""
    script = sources.transformers("videomae/convert_videomae_to_pytorch.py")
    encoder = {
        f"encoder.{name}": shape
        for name, shape in (_vit() | both("norm", shape=(HIDDEN,))).items()
        if "qkv.bias" not in name
    }
    decoder = {
        f"decoder.{name}": shape
        for name, shape in (_vit(hidden=6) | both("norm", shape=(6,))).items()
        if "qkv.bias" not in name
    }
    shapes = (
        encoder | decoder | both("encoder.patch_embed.proj", shape=(HIDDEN, 3, 2, 2, 2)) | {"mask_token": (1, 1, 6)}
    )
    shapes |= {
        f"{side}.blocks.{{i}}.attn.{one}_bias": (size,)
        for side, size in (("encoder", HIDDEN), ("decoder", 6))
        for one in "qv"
    }
    source = drawn(shapes | both("decoder.head", shape=(12, 6)) | {"encoder_to_decoder.weight": (6, HIDDEN)}, i=2)
    made = script.convert_state_dict(dict(source), CONFIG)
    return _case("VideoMAE", "transformers_videomae", script.lines("rename_key", "convert_state_dict"), source, made)


def timesformer(sources: Sources) -> Case:
    """TimeSformer: attention over time and over space."""
    script = sources.transformers("timesformer/convert_timesformer_to_pytorch.py")
    shapes = _vit() | _embedded() | {"time_embed": (1, 4, HIDDEN)} | both("head", shape=(CLASSES, HIDDEN))
    block = "blocks.{i}"
    shapes |= both(f"{block}.temporal_norm1", shape=(HIDDEN,)) | both(f"{block}.temporal_fc", shape=(HIDDEN, HIDDEN))
    shapes |= both(f"{block}.temporal_attn.qkv", shape=(3 * HIDDEN, HIDDEN)) | both(
        f"{block}.temporal_attn.proj", shape=(HIDDEN, HIDDEN)
    )
    source = drawn({f"model.{name}": shape for name, shape in shapes.items()}, i=2)
    made = script.convert_state_dict(dict(source), CONFIG)
    return _case(
        "TimeSformer of Meta",
        "transformers_timesformer",
        script.lines("rename_key", "convert_state_dict"),
        source,
        made,
    )


def rwkv(sources: Sources) -> Case:
    """RWKV-4: names alone."""
    script = sources.transformers("rwkv/convert_rwkv_checkpoint_to_hf.py")
    block = "blocks.{i}"
    shapes: dict[str, Any] = {"emb.weight": (11, HIDDEN), "head.weight": (11, HIDDEN)} | both(
        "blocks.0.ln0", "ln_out", shape=(HIDDEN,)
    )
    shapes |= both(f"{block}.ln1", f"{block}.ln2", shape=(HIDDEN,)) | {
        f"{block}.att.{one}.weight": (HIDDEN, HIDDEN) for one in ("key", "value", "receptance", "output")
    }
    shapes |= {f"{block}.att.time_{one}": (HIDDEN,) for one in ("decay", "first")} | {
        f"{block}.att.time_mix_{one}": (1, 1, HIDDEN) for one in "kvr"
    }
    shapes |= {f"{block}.ffn.time_mix_{one}": (1, 1, HIDDEN) for one in "kr"} | {
        f"{block}.ffn.{one}.weight": (HIDDEN, HIDDEN) for one in ("key", "value", "receptance")
    }
    source = drawn(shapes, i=2)
    return _case(
        "RWKV-4",
        "transformers_rwkv",
        script.lines("convert_state_dict"),
        source,
        script.convert_state_dict(dict(source)),
    )


def segformer(sources: Sources) -> Case:
    """SegFormer: stages of different depths and widths, which lists of the config say."""
    script = sources.transformers("segformer/convert_segformer_original_to_pytorch.py")
    sizes, depths = (4, 6), (1, 2)
    shapes: dict[str, Any] = {}
    for stage, (size, depth) in enumerate(zip(sizes, depths, strict=True)):
        shapes |= both(f"backbone.patch_embed{stage + 1}.proj", shape=(size, 3, 3, 3))
        shapes |= both(f"backbone.patch_embed{stage + 1}.norm", f"backbone.norm{stage + 1}", shape=(size,))
        for layer in range(depth):
            block = f"backbone.block{stage + 1}.{layer}"
            shapes |= both(f"{block}.norm1", f"{block}.norm2", f"{block}.attn.norm", shape=(size,))
            shapes |= both(f"{block}.attn.q", f"{block}.attn.proj", shape=(size, size)) | both(
                f"{block}.attn.kv", shape=(2 * size, size)
            )
            shapes |= both(f"{block}.attn.sr", shape=(size, size, 2, 2)) | both(
                f"{block}.mlp.dwconv.dwconv", shape=(INNER, 1, 3, 3)
            )
            shapes |= both(f"{block}.mlp.fc1", shape=(INNER, size)) | both(f"{block}.mlp.fc2", shape=(size, INNER))
        shapes |= both(f"decode_head.linear_c{stage + 1}.proj", shape=(8, size))
    shapes |= {"decode_head.linear_fuse.conv.weight": (8, 16, 1, 1)} | both("decode_head.linear_fuse.bn", shape=(8,))
    shapes |= {f"decode_head.linear_fuse.bn.running_{one}": (8,) for one in ("mean", "var")} | both(
        "decode_head.linear_pred", shape=(CLASSES, 8, 1, 1)
    )
    source = drawn(shapes)
    made = script.rename_keys(dict(source))
    script.read_in_k_v(made, SimpleNamespace(num_encoder_blocks=2, depths=depths, hidden_sizes=sizes))
    lines = script.lines("rename_keys", "read_in_k_v")
    return _case("SegFormer of NVIDIA", "transformers_segformer", lines, source, made)


def swin(sources: Sources) -> Case:
    """Timm's Swin, whose masks are left out."""
    script = sources.transformers("swin/convert_swin_timm_to_pytorch.py")
    block = "layers.{s}.blocks.{i}"
    shapes = {name.replace("blocks.{i}", block): shape for name, shape in _vit().items()} | both(
        "patch_embed.proj", shape=(HIDDEN, 3, 2, 2)
    )
    shapes |= both("patch_embed.norm", "norm", shape=(HIDDEN,)) | both("head", shape=(CLASSES, HIDDEN))
    shapes |= {
        f"{block}.attn.relative_position_bias_table": (9, HEADS),
        "layers.0.downsample.reduction.weight": (HIDDEN, 4),
    }
    source = drawn(shapes | both("layers.0.downsample.norm", shape=(4,)), s=2, i=2)
    attention = SimpleNamespace(attention=SimpleNamespace(self=SimpleNamespace(all_head_size=HIDDEN)))
    model = SimpleNamespace(
        swin=SimpleNamespace(encoder=SimpleNamespace(layers=[SimpleNamespace(blocks=[attention] * 2)] * 2))
    )
    made = script.convert_state_dict(dict(source), model)
    return _case("timm's Swin", "transformers_swin", script.lines("rename_key", "convert_state_dict"), source, made)


def deit(sources: Sources) -> Case:
    """Timm's DeiT, with the distillation's token and head."""
    script = sources.transformers("deit/convert_deit_timm_to_pytorch.py")
    shapes = _vit() | _embedded() | {"dist_token": (1, 1, HIDDEN)}
    source = drawn(shapes | both("head", "head_dist", shape=(CLASSES, HIDDEN)), i=2)
    return _case(
        "timm's DeiT", "transformers_deit", script.lines(*KEYS), source, _renamed(script, source, CONFIG, False)
    )


def vit_msn(sources: Sources) -> Case:
    """Masked Siamese Networks."""
    script = sources.transformers("vit_msn/convert_msn_to_pytorch.py")
    shapes = {
        f"module.{name}": shape
        for name, shape in (_vit() | _embedded()).items()
        if name not in ("norm.weight", "norm.bias")
    }
    source = drawn(shapes | both("norm", shape=(HIDDEN,)) | both("head", shape=(CLASSES, HIDDEN)), i=2)
    return _case(
        "MSN of Meta", "transformers_vit_msn", script.lines(*KEYS), source, _renamed(script, source, CONFIG, False)
    )


def _beit(*, positions: bool) -> Tensors:
    """A fine-tuned BEiT, whose positions are a table, or an index and a bias in each layer."""
    shapes = {
        name: shape
        for name, shape in (_vit() | _embedded()).items()
        if name not in ("norm.weight", "norm.bias", "blocks.{i}.attn.qkv.bias")
    }
    shapes |= both("fc_norm", shape=(HIDDEN,)) | both("head", shape=(CLASSES, HIDDEN))
    shapes |= {f"blocks.{{i}}.{one}": (HIDDEN,) for one in ("gamma_1", "gamma_2", "attn.q_bias", "attn.v_bias")}
    if not positions:
        del shapes["pos_embed"]
        shapes |= {f"blocks.{{i}}.attn.relative_position_{one}": (9, 2) for one in ("bias_table", "index")}
    return drawn(shapes, i=2)


def beit(sources: Sources) -> Case:
    """BEiT."""
    script = sources.transformers("beit/convert_beit_unilm_to_pytorch.py")
    source = _beit(positions=False)
    return _case(
        "BEiT of Microsoft", "transformers_beit", script.lines(*KEYS), source, _renamed(script, source, CONFIG)
    )


def dit(sources: Sources) -> Case:
    """The Document Image Transformer."""
    script = sources.transformers("dit/convert_dit_unilm_to_pytorch.py")
    source = _beit(positions=True)
    return _case("DiT of Microsoft", "transformers_dit", script.lines(*KEYS), source, _renamed(script, source, CONFIG))


def vilt(sources: Sources) -> Case:
    """ViLT, without a head."""
    script = sources.transformers("vilt/convert_vilt_original_to_pytorch.py")
    shapes = {f"transformer.{name}": shape for name, shape in (_vit() | _embedded()).items()}
    shapes |= {f"text_embeddings.{one}_embeddings.weight": (9, HIDDEN) for one in ("word", "position", "token_type")}
    shapes |= {"text_embeddings.position_ids": (1, 9), "token_type_embeddings.weight": (2, HIDDEN)}
    source = drawn(
        shapes | both("text_embeddings.LayerNorm", shape=(HIDDEN,)) | both("pooler.dense", shape=(HIDDEN, HIDDEN)), i=2
    )
    made = dict(source)
    for old, new in script.create_rename_keys(CONFIG):
        script.rename_key(made, old, new)
    script.read_in_q_k_v(made, CONFIG)
    return _case("ViLT", "transformers_vilt", script.lines(*KEYS), source, made)


def siglip(sources: Sources) -> Case:
    """SigLIP of big_vision: JAX's arrays, one axis for the heads and one for what each has."""
    script = sources.transformers("siglip/convert_siglip_to_hf.py")
    head = HIDDEN // HEADS
    shapes: dict[str, Any] = {"params/t": (1,), "params/b": (1,), "params/txt/Embed_0/embedding": (11, HIDDEN)}

    def attention(prefix: str) -> None:
        for part in ("query", "key", "value"):
            shapes.update({f"{prefix}/{part}/kernel": (HIDDEN, HEADS, head), f"{prefix}/{part}/bias": (HEADS, head)})
        shapes.update({f"{prefix}/out/kernel": (HEADS, head, HIDDEN), f"{prefix}/out/bias": (HIDDEN,)})

    def block(prefix: str, norms: int) -> None:
        for number in range(norms):
            shapes.update({f"{prefix}/LayerNorm_{number}/{one}": (HIDDEN,) for one in ("scale", "bias")})
        for number, (given, made) in enumerate(((HIDDEN, INNER), (INNER, HIDDEN))):
            shapes.update(
                {
                    f"{prefix}/MlpBlock_0/Dense_{number}/kernel": (given, made),
                    f"{prefix}/MlpBlock_0/Dense_{number}/bias": (made,),
                }
            )
        attention(f"{prefix}/MultiHeadDotProductAttention_0")

    for tower in ("params/img/Transformer", "params/txt/Encoder_0"):
        block(f"{tower}/encoderblock_{{i}}", 2)
        shapes |= {f"{tower}/encoder_norm/{one}": (HIDDEN,) for one in ("scale", "bias")}
    block("params/img/MAPHead_0", 1)
    shapes |= {
        "params/img/MAPHead_0/probe": (1, 1, HIDDEN),
        "params/img/embedding/kernel": (2, 2, 3, HIDDEN),
        "params/img/embedding/bias": (HIDDEN,),
    }
    shapes |= {"params/img/pos_embedding": (1, 9, HIDDEN), "params/txt/pos_embedding": (1, 7, HIDDEN)}
    source = drawn(shapes | {"params/txt/head/kernel": (HIDDEN, 5), "params/txt/head/bias": (5,)}, i=2)
    tower_config = SimpleNamespace(num_hidden_layers=2, hidden_size=HIDDEN)
    config = SimpleNamespace(vision_config=tower_config, text_config=tower_config)
    made: dict[str, Any] = {name: tensor.numpy() for name, tensor in source.items()}
    script.read_in_q_k_v_head(made, config)
    for old, new in script.create_rename_keys(config):
        script.rename_key(made, old, new, config)
    lines = script.lines("create_rename_keys", "rename_key", "read_in_q_k_v_head")
    return _case(
        "SigLIP of big_vision", "transformers_siglip", lines, source, made, config={"num_attention_heads": HEADS}
    )


CASES: tuple[Maker, ...] = (
    deit, vit_msn, beit, dit, vilt, siglip,
    videomae, timesformer, rwkv, segformer, swin,
    dino_vit, timm_vit, dinov2, vit_mae, audio_spectrogram, whisper, convnext, phi, persimmon, sam, megatron_gpt2,
)  # fmt: skip
