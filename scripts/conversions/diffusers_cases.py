"""diffusers' converters of single files."""

from __future__ import annotations

from typing import Any

from scripts.conversions.case import Case, Maker, Sources, Tensors, both, drawn

FILE = "diffusers/loaders/single_file_utils.py"
WIDE, HIDDEN, INNER = 3072, 2, 3


def _case(sources: Sources, function: str, title: str, table: str, source: Tensors, *more: str, **options: Any) -> Case:
    script = sources.script(FILE)
    made = getattr(script, function)(dict(source))
    return Case(
        project="diffusers",
        title=title,
        table=table,
        lines=script.lines(function, *more),
        source=source,
        made=made,
        **options,
    )


def flux(sources: Sources) -> Case:
    """FLUX.1, whose width the function has as a number."""
    shapes: dict[str, Any] = {}
    for one in ("time_in", "vector_in", "guidance_in"):
        shapes |= both(f"{one}.in_layer", f"{one}.out_layer", shape=(HIDDEN, HIDDEN))
    shapes |= both("txt_in", "img_in", "final_layer.linear", shape=(HIDDEN, HIDDEN)) | both(
        "final_layer.adaLN_modulation.1", shape=(2 * HIDDEN, HIDDEN)
    )
    for side in ("img", "txt"):
        block = f"double_blocks.{{i}}.{side}"
        shapes |= both(
            f"{block}_mod.lin", f"{block}_attn.proj", f"{block}_mlp.0", f"{block}_mlp.2", shape=(HIDDEN, HIDDEN)
        )
        shapes |= both(f"{block}_attn.qkv", shape=(3 * HIDDEN, HIDDEN))
        shapes |= {f"{block}_attn.norm.{one}_norm.scale": (HIDDEN,) for one in ("query", "key")}
    single = "single_blocks.{i}"
    shapes |= both(f"{single}.linear1", shape=(7 * WIDE, HIDDEN)) | both(
        f"{single}.linear2", f"{single}.modulation.lin", shape=(HIDDEN, HIDDEN)
    )
    shapes |= {f"{single}.norm.{one}_norm.scale": (HIDDEN,) for one in ("query", "key")}
    function = "convert_flux_transformer_checkpoint_to_diffusers"
    return _case(
        sources,
        function,
        "FLUX.1 of Black Forest Labs",
        "diffusers_flux",
        drawn(shapes, i=2),
        config={"hidden_size": WIDE},
    )


def auraflow(sources: Sources) -> Case:
    """AuraFlow."""
    shapes: dict[str, Any] = {
        "register_tokens": (1, 2, HIDDEN),
        "positional_encoding": (1, 9, HIDDEN),
        "modF.1.weight": (2 * HIDDEN, HIDDEN),
    }
    shapes |= both("t_embedder.mlp.0", "t_embedder.mlp.2", "init_x_linear", shape=(HIDDEN, HIDDEN))
    shapes |= {"cond_seq_linear.weight": (HIDDEN, HIDDEN), "final_linear.weight": (HIDDEN, HIDDEN)}
    for block, parts, attentions in (
        ("double_layers", ("mlpX", "mlpC"), ("w1", "w2")),
        ("single_layers", ("mlp",), ("w1",)),
    ):
        shapes |= {
            f"{block}.{{i}}.{part}.{one}.weight": (INNER, HIDDEN)
            for part in parts
            for one in ("c_fc1", "c_fc2", "c_proj")
        }
        shapes |= {f"{block}.{{i}}.attn.{one}{part}.weight": (HIDDEN, HIDDEN) for one in attentions for part in "qkvo"}
        shapes |= {
            f"{block}.{{i}}.{one}.1.weight": (HIDDEN, HIDDEN)
            for one in (("modX", "modC") if len(parts) > 1 else ("modCX",))
        }
    function = "convert_auraflow_transformer_checkpoint_to_diffusers"
    return _case(sources, function, "AuraFlow of fal", "diffusers_auraflow", drawn(shapes, i=2), "swap_scale_shift")


def sana(sources: Sources) -> Case:
    """Sana, without the two tensors that the function throws away."""
    block = "blocks.{i}"
    shapes: dict[str, Any] = {"attention_y_norm.weight": (HIDDEN,), "final_layer.scale_shift_table": (2, HIDDEN)}
    shapes |= both("x_embedder.proj", "t_embedder.mlp.0", "t_embedder.mlp.2", "t_block.1", shape=(HIDDEN, HIDDEN))
    shapes |= both("y_embedder.y_proj.fc1", "y_embedder.y_proj.fc2", "final_layer.linear", shape=(HIDDEN, HIDDEN))
    shapes |= {f"{block}.scale_shift_table": (6, HIDDEN), f"{block}.attn.qkv.weight": (3 * HIDDEN, HIDDEN)}
    shapes |= both(
        f"{block}.attn.proj", f"{block}.cross_attn.proj", f"{block}.cross_attn.q_linear", shape=(HIDDEN, HIDDEN)
    )
    shapes |= both(f"{block}.cross_attn.kv_linear", shape=(2 * HIDDEN, HIDDEN))
    shapes |= both(f"{block}.mlp.inverted_conv.conv", f"{block}.mlp.depth_conv.conv", shape=(INNER, HIDDEN, 1, 1))
    source = drawn(shapes | {f"{block}.mlp.point_conv.conv.weight": (HIDDEN, INNER, 1, 1)}, i=2)
    script = sources.script(FILE)
    function = "convert_sana_transformer_to_diffusers"
    thrown = drawn({"pos_embed": (1, 4, HIDDEN), "y_embedder.y_embedding": (4, HIDDEN)})
    made = getattr(script, function)({**source, **thrown})
    return Case(
        project="diffusers",
        title="Sana of NVIDIA",
        table="diffusers_sana",
        lines=script.lines(function),
        source=source | thrown,
        made=made,
        remark="two tensors that the function throws away cannot come back",
    )


CASES: tuple[Maker, ...] = (flux, auraflow, sana)
