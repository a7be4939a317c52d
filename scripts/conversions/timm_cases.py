"""timm's filters of original checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from scripts.conversions.case import Case, Maker, Sources, Tensors, both, convnext_downsampling, drawn
from scripts.conversions.transformers_cases import CLASSES, HIDDEN, INNER, _vit

VISION = "timm/models/vision_transformer.py"


def _case(title: str, table: str, lines: int, source: Tensors, made: Tensors, **more: Any) -> Case:
    return Case(project="timm", title=title, table=table, lines=lines, source=source, made=made, **more)


def _model(**shapes: tuple[int, ...]) -> Any:
    """A model of which the filters ask for the shapes of parameters alone."""
    state = {name.replace("__", "."): torch.empty(shape) for name, shape in shapes.items()}
    return SimpleNamespace(state_dict=lambda: state, pos_embed=True, cls_attn_blocks=[0, 1])


def openai_clip(sources: Sources) -> Case:
    """CLIP's image tower."""
    script = sources.script(VISION)
    block = "visual.transformer.resblocks.{i}"
    shapes: dict[str, Any] = {"visual.class_embedding": (HIDDEN,), "visual.positional_embedding": (10, HIDDEN)}
    shapes |= {"visual.conv1.weight": (HIDDEN, 3, 2, 2), "visual.proj": (HIDDEN, CLASSES)}
    shapes |= both("visual.ln_pre", "visual.ln_post", f"{block}.ln_1", f"{block}.ln_2", shape=(HIDDEN,))
    shapes |= {f"{block}.attn.in_proj_weight": (3 * HIDDEN, HIDDEN), f"{block}.attn.in_proj_bias": (3 * HIDDEN,)}
    shapes |= both(f"{block}.attn.out_proj", shape=(HIDDEN, HIDDEN))
    shapes |= both(f"{block}.mlp.c_fc", shape=(INNER, HIDDEN)) | both(f"{block}.mlp.c_proj", shape=(HIDDEN, INNER))
    source = drawn(shapes, i=2)
    made = script._convert_openai_clip(dict(source), None)  # the function that converts
    lines = script.lines("_convert_openai_clip")
    return _case(
        "CLIP's image tower of OpenAI", "timm_openai_clip", lines, source, made, config={"projection_dim": CLASSES}
    )


def dinov2_giant(sources: Sources) -> Case:
    """DINOv2 with SwiGLU."""
    script = sources.script(VISION)
    shapes = {name: shape for name, shape in _vit().items() if ".mlp." not in name} | {
        "cls_token": (1, 1, HIDDEN),
        "pos_embed": (1, 10, HIDDEN),
    }
    shapes |= (
        both("blocks.{i}.mlp.w12", shape=(INNER, HIDDEN))
        | both("blocks.{i}.mlp.w3", shape=(HIDDEN, INNER))
        | both("norm", shape=(HIDDEN,))
    )
    source = drawn(shapes, i=2)
    source["mask_token"] = torch.randn(1, HIDDEN)
    made = script._convert_dinov2(dict(source), None)  # as above
    return _case("DINOv2 giant of Meta", "timm_dinov2_giant", script.lines("_convert_dinov2"), source, made)


def dinov2_registers(sources: Sources) -> Case:
    """DINOv2 with registers: the first position is added to the class token."""
    script = sources.script(VISION)
    shapes = _vit() | both("norm", shape=(HIDDEN,)) | {"register_tokens": (1, 4, HIDDEN)}
    source = drawn(shapes | {"cls_token": (1, 1, HIDDEN), "pos_embed": (1, 10, HIDDEN)}, i=2)
    made = script._convert_dinov2(dict(source), None)  # as above
    remark = "the sum of the class token and its position cannot be taken apart"
    lines = script.lines("_convert_dinov2")
    return _case("DINOv2 with registers", "timm_dinov2_registers", lines, source, made, remark=remark)


def aimv2(sources: Sources) -> Case:
    """AIMv2."""
    script = sources.script(VISION)
    block = "trunk.blocks.{i}"
    shapes: dict[str, Any] = {
        "preprocessor.pos_embed": (1, 9, HIDDEN),
        "preprocessor.patchifier.norm.weight": (HIDDEN,),
    }
    shapes |= both("preprocessor.patchifier.proj", shape=(HIDDEN, 3, 2, 2))
    shapes |= {f"{block}.norm_{n}.weight": (HIDDEN,) for n in (1, 2)} | {"trunk.post_trunk_norm.weight": (HIDDEN,)}
    shapes |= {f"{block}.attn.qkv.weight": (3 * HIDDEN, HIDDEN), f"{block}.attn.proj.weight": (HIDDEN, HIDDEN)}
    shapes |= {f"{block}.mlp.fc{n}.weight": (HIDDEN, INNER) if n == 2 else (INNER, HIDDEN) for n in (1, 2, 3)}
    source = drawn(shapes, i=2)
    made = script._convert_aimv2(dict(source), None)  # as above
    return _case("AIMv2 of Apple", "timm_aimv2", script.lines("_convert_aimv2"), source, made)


def beit3(sources: Sources) -> Case:
    """BEiT-3: the image's branch of each pair, positions without the two first."""
    script = sources.script(VISION)
    layer = "beit3.encoder.layers.{i}"
    shapes: dict[str, Any] = {
        "beit3.vision_embed.cls_token": (1, 1, HIDDEN),
        "beit3.encoder.embed_positions.A.weight": (12, HIDDEN),
    }
    shapes |= both("beit3.vision_embed.proj", shape=(HIDDEN, 3, 2, 2))
    shapes |= both(
        f"{layer}.self_attn_layer_norm.A",
        f"{layer}.final_layer_norm.A",
        f"{layer}.self_attn.inner_attn_ln.A",
        shape=(HIDDEN,),
    )
    shapes |= both(*(f"{layer}.self_attn.{one}_proj.A" for one in ("q", "k", "v", "out")), shape=(HIDDEN, HIDDEN))
    shapes |= (
        both(f"{layer}.ffn.A.fc1", shape=(INNER, HIDDEN))
        | both(f"{layer}.ffn.A.fc2", shape=(HIDDEN, INNER))
        | both(f"{layer}.ffn.A.ffn_layernorm", shape=(INNER,))
    )
    source = drawn(shapes, i=2)
    source["beit3.encoder.embed_positions.A.weight"][:2] = 0
    made = script._convert_beit3(dict(source), None)  # as above
    remark = "the two rows of positions that are cut off are zero here; other values come back with --like alone"
    return _case("BEiT-3 of Microsoft", "timm_beit3", script.lines("_convert_beit3"), source, made, remark=remark)


def hiera(sources: Sources) -> Case:
    """Hiera."""
    script = sources.script("timm/models/hiera.py")
    source = drawn(
        _vit()
        | both("head.projection", shape=(CLASSES, HIDDEN))
        | both("norm", shape=(HIDDEN,))
        | {"pos_embed_abs": (1, 9, HIDDEN)},
        i=2,
    )
    made = script.checkpoint_filter_fn(dict(source))
    return _case("Hiera of Meta", "timm_hiera", script.lines("checkpoint_filter_fn"), source, made)


def xcit(sources: Sources) -> Case:
    """XCiT: the class attention's q, k and v apart."""
    script = sources.script("timm/models/xcit.py")
    block = "cls_attn_blocks.{i}"
    shapes = (
        _vit() | both("head", shape=(CLASSES, HIDDEN)) | both("pos_embeder.token_projection", shape=(HIDDEN, 4, 1, 1))
    )
    shapes |= both(f"{block}.attn.qkv", shape=(3 * HIDDEN, HIDDEN)) | both(f"{block}.attn.proj", shape=(HIDDEN, HIDDEN))
    source = drawn(shapes, i=2)
    made = script.checkpoint_filter_fn(dict(source), _model(cls_attn_blocks__0__attn__q__weight=(1,)))
    return _case("XCiT of Meta", "timm_xcit", script.lines("checkpoint_filter_fn"), source, made)


def pit(sources: Sources) -> Case:
    """PiT: pools counted from the stage after them."""
    script = sources.script("timm/models/pit.py")
    shapes = {f"transformers.{{s}}.{name}": shape for name, shape in _vit().items()} | both(
        "pools.{i}.conv", shape=(HIDDEN, 1, 3, 3)
    )
    source = drawn(shapes | both("head", "norm", shape=(HIDDEN,)), s=2, i=2)
    made = script.checkpoint_filter_fn(dict(source), None)
    return _case("PiT of Naver", "timm_pit", script.lines("checkpoint_filter_fn"), source, made)


def resmlp(sources: Sources) -> Case:
    """ResMLP."""
    script = sources.script("timm/models/mlp_mixer.py")
    block = "blocks.{i}"
    shapes = (
        both("patch_embed.proj", shape=(HIDDEN, 3, 2, 2))
        | both("head", shape=(CLASSES, HIDDEN))
        | both(f"{block}.attn", shape=(9, 9))
    )
    shapes |= {
        f"{block}.{one}": (HIDDEN,)
        for one in ("gamma_1", "gamma_2", "norm1.alpha", "norm1.beta", "norm2.alpha", "norm2.beta")
    }
    shapes |= both(f"{block}.mlp.fc1", shape=(INNER, HIDDEN)) | both(f"{block}.mlp.fc2", shape=(HIDDEN, INNER))
    source = drawn(shapes | {"norm.alpha": (HIDDEN,), "norm.beta": (HIDDEN,)}, i=2)
    made = script.checkpoint_filter_fn(dict(source), None)
    return _case("ResMLP of Meta", "timm_resmlp", script.lines("checkpoint_filter_fn"), source, made)


def convnext(sources: Sources) -> Case:
    """ConvNeXt V2."""
    script = sources.script("timm/models/convnext.py")
    shapes = convnext_downsampling(HIDDEN)
    block = "stages.{s}.{i}"
    shapes |= (
        both(f"{block}.dwconv", shape=(HIDDEN, 1, 7, 7))
        | both(f"{block}.norm", shape=(HIDDEN,))
        | {f"{block}.grn.{one}": (1, 1, 1, INNER) for one in ("gamma", "beta")}
    )
    shapes |= (
        both(f"{block}.pwconv1", shape=(INNER, HIDDEN))
        | both(f"{block}.pwconv2", shape=(HIDDEN, INNER))
        | both("head", shape=(CLASSES, HIDDEN))
    )
    source = drawn(shapes, s=4, i=2)
    linear = {
        f"stages__{s}__blocks__{i}__mlp__fc{n}__weight": (INNER, HIDDEN) if n == 1 else (HIDDEN, INNER)
        for s in range(4)
        for i in range(2)
        for n in (1, 2)
    }
    made = script.checkpoint_filter_fn(dict(source), _model(**linear))
    return _case("ConvNeXt V2 of Meta", "timm_convnext", script.lines("checkpoint_filter_fn"), source, made)


CASES: tuple[Maker, ...] = (
    openai_clip,
    dinov2_giant,
    dinov2_registers,
    aimv2,
    beit3,
    hiera,
    xcit,
    pit,
    resmlp,
    convnext,
)
