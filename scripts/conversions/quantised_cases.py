"""Quantised weights, unpacked as the transformers that porting runs with does."""

from __future__ import annotations

import inspect

import torch
import transformers
from transformers.integrations import finegrained_fp8, mxfp4

from scripts.conversions.case import Case, Maker, Sources, Tensors, drawn

REMARK = "one way: rounding to fewer bits is not undone"


def gpt_oss(sources: Sources) -> Case:
    """The experts of gpt-oss: 4-bit numbers in groups of 32 that share a power of two."""
    source = drawn({"layers.{i}.norm.weight": (4,)}, i=2)
    made = dict(source)
    for name in (f"layers.{i}.experts.{part}_proj" for i in range(2) for part in ("gate_up", "down")):
        blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
        scales = torch.randint(120, 134, (2, 6, 3), dtype=torch.uint8)
        source |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        made[name] = mxfp4.convert_moe_packed_tensors(blocks, scales)
    lines = len(inspect.getsource(mxfp4._convert_moe_packed_tensors).splitlines())  # it does the work
    return _case("gpt-oss of OpenAI, mxfp4 unpacked", "transformers_mxfp4", lines, source, made)


def fp8(sources: Sources) -> Case:
    """Weights of DeepSeek-V3 and others: 8-bit floats with a scale for each block of 128 by 128."""
    source = drawn({"layers.{i}.norm.weight": (4,)}, i=2)
    made = dict(source)
    operation = finegrained_fp8.Fp8Dequantize(None)  # type: ignore[no-untyped-call]  # transformers does not type it
    for name in (f"layers.{i}.{part}_proj.weight" for i in range(2) for part in "qkv"):
        weight = torch.randn(256, 384).to(torch.float8_e4m3fn)
        scale = torch.rand(2, 3) + 0.5
        source |= {name: weight, f"{name}_scale_inv": scale}
        made[name] = operation._dequantize_one(weight, scale, torch.bfloat16)  # as above
    lines = len(inspect.getsource(finegrained_fp8.Fp8Dequantize._dequantize_one).splitlines())  # as above
    return _case("fp8 with block scales, unpacked", "transformers_fp8", lines, source, made)


def _case(title: str, table: str, lines: int, source: Tensors, made: Tensors) -> Case:
    return Case(
        project="transformers",
        title=title,
        table=table,
        lines=lines,
        source=source,
        made=made,
        remark=REMARK,
        version=transformers.__version__,
    )


CASES: tuple[Maker, ...] = (gpt_oss, fp8)
