"""Formulas, against the code that makes the same tensors elsewhere: torch, transformers, and torch by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import fuse_conv_bn_eval
from torch.nn.utils.parametrizations import weight_norm

from porting.checkpoint import open_checkpoint
from porting.converting.conversion import convert
from porting.errors import Code
from porting.notation.faults import TableError
from porting.notation.table import parse_table
from porting.ops import Formula
from porting.plan.config import uncomputable
from porting.plan.copies import Copy
from porting.plan.formulas import FormulaFailedError
from porting.plan.move import Window, compute, pullback
from porting.plan.plan import irreversible
from porting.plan.recipe import forward_recipes
from tests.plan.carrying import Port, drawn, port, same
from tests.plan.shapes import Shape, infos

EXPONENTIAL = """
[[rule]]
source = "A_log"
target = "A"
formula = "-exp(x)"
back = { x = "log(-y)" }
"""
LORA = """
[[rule]]
source = { w = "w [o i]", a = "lora_A [r i]", b = "lora_B [o r]" }
target = "w [i o]"
formula = "w + alpha / rank * sum(b * a, r)"
back = { w = "y", a = "0", b = "0" }
[sizes]
r = 2
"""
WEIGHT_NORM = """
[[rule]]
source = { g = "g [o 1 1]", v = "v [o i k]" }
target = "w [o i k]"
formula = "g * v / sqrt(sum(v * v, i, k))"
back = { g = "sqrt(sum(y * y, i, k))", v = "y" }
"""
CONV_WEIGHT = """
[[rule]]
source = { w = "conv.weight [o i a b]", g = "bn.weight [o]", v = "bn.running_var [o]" }
target = "weight [o i a b]"
formula = "w * g / sqrt(v + eps)"
"""
CONV_BIAS = """
[[rule]]
formula = "(c - m) * g / sqrt(v + eps) + b"
target = "bias [o]"
[rule.source]
c = "conv.bias [o]"
g = "bn.weight [o]"
b = "bn.bias [o]"
m = "bn.running_mean [o]"
v = "bn.running_var [o]"
"""


def made_of(table: str, sources: Mapping[str, Shape], targets: Mapping[str, Shape], **config: object) -> Port:
    return port(table, sources, targets, config)


def close(found: Tensor, expected: Tensor, within: float = 1e-12) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert (found - expected).abs().max() <= within


def test_a_function_of_each_element() -> None:
    made = made_of(EXPONENTIAL, {"A_log": (3, 2)}, {"A": (3, 2)})
    tensors = drawn(made.sources)
    found = made.forward(tensors)
    same(found, {"A": -torch.exp(tensors["A_log"].double()).float()})
    close(made.backward(found)["A_log"], tensors["A_log"], 1e-6)


def test_an_adapter_is_merged() -> None:
    made = made_of(LORA, {"w": (4, 5), "lora_A": (2, 5), "lora_B": (4, 2)}, {"w": (5, 4)}, alpha=8, rank=2)
    tensors = drawn(made.sources, torch.float64)
    found = made.forward(tensors)
    close(found["w"].T, tensors["w"] + 4 * tensors["lora_B"] @ tensors["lora_A"])
    back = made.backward(found)
    same(back, {"w": found["w"].T, "lora_A": torch.zeros(2, 5).double(), "lora_B": torch.zeros(4, 2).double()})
    same(made.forward(back), found)


def test_weight_norm_is_that_of_torch() -> None:
    conv = nn.Conv1d(3, 4, 5, dtype=torch.float64)
    weight_norm(conv, dim=0)
    sizes: dict[str, Shape] = {"g": (4, 1, 1), "v": (4, 3, 5)}
    made = made_of(WEIGHT_NORM, sizes, {"w": (4, 3, 5)})
    tensors = drawn(sizes, torch.float64)
    stored = {f"parametrizations.weight.original{n}": tensors[name] for n, name in enumerate("gv")}
    conv.load_state_dict(stored, strict=False)
    found = made.forward(tensors)
    close(found["w"], conv.weight.detach())
    close(made.forward(made.backward(found))["w"], found["w"])


def test_a_convolution_and_its_batch_norm_are_folded_as_torch_folds_them() -> None:
    conv, norm = nn.Conv2d(3, 4, (2, 3), dtype=torch.float64), nn.BatchNorm2d(4, dtype=torch.float64)
    for tensor in norm.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5)
    state = {f"conv.{name}": tensor for name, tensor in conv.state_dict().items()}
    state |= {f"bn.{name}": tensor for name, tensor in norm.state_dict().items()}
    fused = fuse_conv_bn_eval(conv.eval(), norm.eval())
    sizes = {name: tuple(tensor.shape) for name, tensor in state.items() if "num_batches" not in name}
    made = made_of(CONV_WEIGHT + CONV_BIAS, sizes, {"weight": (4, 3, 2, 3), "bias": (4,)}, eps=norm.eps)
    for name, tensor in made.forward(state).items():
        close(tensor, fused.state_dict()[name])


def test_sources_that_two_formulas_read_come_back_alike() -> None:
    weight = CONV_WEIGHT + 'back = { w = "y", g = "1", v = "1 - eps" }\n'
    bias = CONV_BIAS + '[rule.back]\nc = "y"\ng = "1"\nb = "0"\nm = "0"\nv = "1 - eps"\n'
    sizes: dict[str, Shape] = {"conv.weight": (4, 3, 2, 3)}
    sizes |= dict.fromkeys(("conv.bias", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"), (4,))
    made = made_of(weight + bias, sizes, {"weight": (4, 3, 2, 3), "bias": (4,)}, eps=1e-3)
    tensors = {name: tensor.abs() for name, tensor in drawn(sizes, torch.float64).items()}
    folded = made.forward(tensors)
    back = made.backward(folded)
    assert sorted(back) == sorted(sizes)
    for name, tensor in made.forward(back).items():
        close(tensor, folded[name])
    with pytest.raises(TableError, match="and 'back' gives it '2' and '1'"):
        parse_table(weight + bias.replace('g = "1"', 'g = "2"'))


BLOCKS = """
[[rule]]
source = { w = "w [o i]", s = "s [a b]" }
target = "w [o i]"
formula = "w * blocks(s, 4, a=o, b=i)"
dtype = "bfloat16"
"""


def test_float8_blocks_are_dequantised_as_transformers_does() -> None:
    """The last block of rows and that of columns is not whole."""
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    sizes: dict[str, Shape] = {"w": (6, 8), "s": (2, 2)}
    made = made_of(BLOCKS, sizes, {"w": (6, 8)})
    weight, scale = torch.randn(6, 8).to(torch.float8_e4m3fn), torch.rand(2, 2) + 0.5
    found = made.forward({"w": weight, "s": scale})["w"]
    expected = weight.float() * scale.repeat_interleave(4, 0)[:6].repeat_interleave(4, 1)
    same({"w": found}, {"w": expected.to(torch.bfloat16)})
    theirs = module.Fp8Dequantize(None)._dequantize_one(weight[:4], scale[:1], torch.bfloat16)
    assert torch.equal(found[:4], theirs)


FP4 = """
[[rule]]
source = { x = "blocks [e o g b]", s = "scales [e o g]" }
target = "w [e (g b n) o]"
formula = "fp4(x, n) * 2 ** (s - 127)"
dtype = "bfloat16"
"""


def test_mxfp4_is_unpacked_as_transformers_does() -> None:
    module = pytest.importorskip("transformers.integrations.mxfp4")
    made = made_of(FP4, {"blocks": (2, 6, 3, 16), "scales": (2, 6, 3)}, {"w": (2, 96, 6)})
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(120, 134, (2, 6, 3), dtype=torch.uint8)
    found = made.forward({"blocks": blocks, "scales": scales})["w"]
    assert torch.equal(found, module.convert_moe_packed_tensors(blocks, scales))


GPTQ = """
[sizes]
g = 3
[[rule]]
source = { q = "qweight [(g k) (p m)]", z = "qzeros [g p]", s = "scales [g (p m)]" }
target = "w [(p m) (g k n)]"
formula = "s * (unpack_low(q, 4, n=8) - unpack_low(z, 4, m=8) - 1)"
dtype = "float16"
"""
AWQ = """
[sizes]
a = 4
b = 2
[[rule]]
source = { q = "qweight [i c]", s = "scales [i (c a b)]" }
target = "w [(c a b) i]"
formula = "s * unpack_low(q, 4, b=2, a=4)"
dtype = "float32"
"""
NF4 = """
[sizes]
o = 4
b = 32
[[rule]]
source = { x = "w.weight [(o g b) 1]", s = "w.weight.absmax [(o g)]" }
target = "w [o (g b n)]"
formula = "nf4(unpack_high(x, 4, n=2)) * s"
dtype = "float32"
"""


def packed(numbers: Tensor, width: int = 4) -> Tensor:
    """The last axis packed into one number of 32 bits, the lowest bits first."""
    total = sum((numbers[..., place].long() << width * place for place in range(numbers.shape[-1])), torch.tensor(0))
    return total.to(torch.int32)  # the highest bit is its sign


def test_gptq_is_unpacked() -> None:
    """As AutoGPTQ packs it: along the inputs, lowest first; zeros less one, along the outputs."""
    groups, rows, outputs = 3, 16, 24
    numbers = torch.randint(0, 16, (groups * rows, outputs))
    zeros, scales = torch.randint(0, 16, (groups, outputs)), torch.rand(groups, outputs).half()
    qweight = packed(numbers.view(-1, 8, outputs).transpose(1, 2))
    qzeros = packed(zeros.view(groups, -1, 8))
    assert bool((qweight < 0).any())
    sources = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    made = made_of(GPTQ, {name: tuple(one.shape) for name, one in sources.items()}, {"w": (outputs, groups * rows)})
    expected = (numbers - zeros.repeat_interleave(rows, 0) - 1) * scales.double().repeat_interleave(rows, 0)
    same(made.forward(sources), {"w": expected.T.half()})


ACT_ORDER = """
[[rule]]
source = { q = "qweight [r (p m)]", z = "qzeros [g p]", s = "scales [g (p m)]", j = "g_idx [(r n)]" }
target = "w [(p m) (r n)]"
formula = "take(s, g=j) * (unpack_low(q, 4, n=8) - take(unpack_low(z, 4, m=8), g=j) - 1)"
dtype = "float16"
"""


def test_gptq_with_groups_in_another_order_is_unpacked() -> None:
    """With `desc_act`: w[i, o] = scales[g_idx[i], o] * (q[i, o] - zeros[g_idx[i], o] - 1)."""
    groups, inputs, outputs = 5, 48, 24
    order = torch.randint(0, groups, (inputs,), dtype=torch.int32)
    numbers, zeros = torch.randint(0, 16, (inputs, outputs)), torch.randint(0, 16, (groups, outputs))
    scales = torch.rand(groups, outputs).half()
    qweight, qzeros = packed(numbers.view(-1, 8, outputs).transpose(1, 2)), packed(zeros.view(groups, -1, 8))
    sources = {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": order}
    made = made_of(ACT_ORDER, {name: tuple(one.shape) for name, one in sources.items()}, {"w": (outputs, inputs)})
    expected = (numbers - zeros[order] - 1) * scales.double()[order]
    same(made.forward(sources), {"w": expected.T.half()})
    for wrong in (groups, -1):
        with pytest.raises(FormulaFailedError, match=f"{wrong} is not from 0 to 4"):
            made.forward({**sources, "g_idx": torch.full_like(order, wrong)})


NESTED = """
[sizes]
o = 48
q = 2
[[rule]]
target = "w [o (q k n)]"
source.x = "w.weight [(o q k) 1]"
source.a = "w.weight.absmax [(o q)]"
source.m = "w.weight.nested_quant_map [c]"
source.s = "w.weight.nested_absmax [b]"
source.t = "w.weight.quant_state.bitsandbytes__nf4 [z]"
formula = "nf4(unpack_high(x, 4, n=2)) * (take(m, c=a) * blocks(s, 256, b=(o, q)) + json(t, nested_offset))"
dtype = "float16"
"""


@pytest.mark.parametrize("columns", [128, 1024])
def test_scales_that_are_quantised_themselves_are_unpacked_as_bitsandbytes_does(columns: int, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", exc_type=ImportError)
    weight = torch.randn(48, columns) * torch.rand(48, 1).exp()
    packed_, state = functional.quantize_4bit(weight.half(), quant_type="nf4", compress_statistics=True, blocksize=64)
    expected = functional.dequantize_4bit(packed_, state)
    stored = {"w.weight": packed_} | {f"w.weight.{name}": one for name, one in state.as_dict(packed=True).items()}
    del stored["w.weight.quant_map"]
    table = NESTED.replace("q = 2", f"q = {columns // 64}")
    made = made_of(table, {name: tuple(one.shape) for name, one in stored.items()}, {"w": (48, columns)})
    found = made.forward(stored)["w"]
    assert found.dtype == expected.dtype
    assert (found.double() - expected.double()).abs().max() <= 2**-10 * expected.abs().max()
    assert (found == expected).double().mean() > 0.99
    save_file(stored, tmp_path / "model.safetensors")
    parts = parse_table(f'[mapping]\nname = "t"\n{table}')
    convert(tmp_path / "model.safetensors", tmp_path / "out", parts, derive=True, memory=1 << 20, threads=1)
    assert torch.equal(open_checkpoint(tmp_path / "out").read("w"), found)


def test_indices_whose_elements_need_others_are_not_taken_apart() -> None:
    """Of indices that count together the first may be: the steps of the others have to be whole."""
    nested = Formula.parse("x * blocks(s, 256, b=(o, q))")
    assert [nested.kept(index) for index in "oqk"] == [True, False, True]
    looked_up = Formula.parse("w * take(m, o=j)")
    assert [looked_up.kept(index) for index in "oi"] == [False, True]


def test_json_in_a_tensor_is_read_or_refused() -> None:
    table = """
    [[rule]]
    source = { w = "w [o]", t = "t [z]" }
    target = "y [o]"
    formula = "w * json(t, scale)"
    """
    for text, message in (
        ('{"scale": 2.5}', ""),
        ('{"other": 1}', "the JSON has no finite number 'scale'"),
        ('{"scale": true}', "the JSON has no finite number 'scale'"),
        ("[1", "Expecting ',' delimiter"),
        ("7" * 5000, "5000 bytes of JSON, at most 4096 are read"),
    ):
        tensors = {"w": torch.ones(3), "t": torch.tensor([*text.encode()], dtype=torch.uint8)}
        made = made_of(table, {"w": (3,), "t": (len(text),)}, {"y": (3,)})
        if message:
            with pytest.raises(FormulaFailedError, match=re.escape(message)):
                made.forward(tensors)
        else:
            same(made.forward(tensors), {"y": torch.full((3,), 2.5)})


def test_heads_are_repeated() -> None:
    """What is stored once for a group of heads becomes that of each; no way back is guessed."""
    table = """
    [sizes]
    g = 2
    m = 3
    [[rule]]
    source = "k_proj.weight [(g d) e]"
    target = "key.weight [(g m d) e]"
    formula = "repeat(x, m)"
    """
    made = made_of(table, {"k_proj.weight": (4, 5)}, {"key.weight": (12, 5)})
    tensors = drawn(made.sources)
    expected = tensors["k_proj.weight"].view(2, 1, 2, 5).expand(2, 3, 2, 5).reshape(12, 5)
    same(made.forward(tensors), {"key.weight": expected})


def test_awq_is_unpacked() -> None:
    """As AutoAWQ packs it: the columns 0, 2, 4, 6, 1, 3, 5, 7 of each 8."""
    numbers, scales = torch.randint(0, 16, (6, 16)), torch.rand(6, 16)
    qweight = packed(numbers.view(6, 2, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]])
    made = made_of(AWQ, {"qweight": (6, 2), "scales": (6, 16)}, {"w": (16, 6)})
    same(made.forward({"qweight": qweight, "scales": scales}), {"w": (numbers * scales.double()).T.float()})


def test_4_bit_normal_floats_are_unpacked() -> None:
    """As bitsandbytes packs them: the first of two numbers is the high half; what it makes of -1, 0 and 1 is known."""
    weight = torch.tensor([15, 7, 0, 8]).repeat(64).view(4, 64)
    raw = (weight[:, ::2] * 16 + weight[:, 1::2]).to(torch.uint8).view(-1, 1)
    scales = torch.rand(4) + 0.5
    made = made_of(NF4, {"w.weight": (128, 1), "w.weight.absmax": (4,)}, {"w": (4, 64)})
    found = made.forward({"w.weight": raw, "w.weight.absmax": scales})["w"]
    values = torch.tensor([1.0, 0.0, -1.0, 0.07958029955625534]).repeat(16)
    same({"w": found}, {"w": (values.double() * scales.double()[:, None]).float()})


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "bicubic_antialias"])
def test_a_table_of_positions_is_interpolated_as_torch_does(mode: str) -> None:
    table = f"""
    [[rule]]
    source = "positions [1 (h w) e]"
    target = "positions [1 (H W) e]"
    formula = "{mode}(x, h=H, w=W)"
    [sizes]
    h = 3
    H = 5
    W = 6
    """
    made = made_of(table, {"positions": (1, 12, 2)}, {"positions": (1, 30, 2)})
    tensors = drawn(made.sources, torch.float64)
    picture = tensors["positions"].reshape(1, 3, 4, 2).permute(0, 3, 1, 2)
    name, _, antialias = mode.partition("_")
    sized = nn.functional.interpolate(picture, size=(5, 6), mode=name, align_corners=False, antialias=bool(antialias))
    close(made.forward(tensors)["positions"], sized.permute(0, 2, 3, 1).reshape(1, 30, 2))


EXPERTS = """
[[rule]]
source = { w = "experts.{x}.w [o i]", s = "experts.{x}.s [o]" }
target = "w [x i o]"
formula = "w * s"
"""


def test_an_index_of_the_names_is_one_of_the_formula() -> None:
    sizes: dict[str, Shape] = {f"experts.{x}.w": (3, 2) for x in range(4)} | {f"experts.{x}.s": (3,) for x in range(4)}
    made = made_of(EXPERTS, sizes, {"w": (4, 2, 3)})
    tensors = drawn(sizes, torch.float64)
    each = [(tensors[f"experts.{x}.w"] * tensors[f"experts.{x}.s"][:, None]).T for x in range(4)]
    same(made.forward(tensors), {"w": torch.stack(each)})


@pytest.mark.parametrize("table", [LORA, WEIGHT_NORM, FP4, BLOCKS, EXPERTS])
def test_any_window_is_that_of_the_whole(table: str) -> None:
    """Converting and comparing make a tensor in parts, rows of it and boxes."""
    shapes: dict[str, tuple[Mapping[str, Shape], Mapping[str, Shape]]] = {
        LORA: ({"w": (4, 5), "lora_A": (2, 5), "lora_B": (4, 2)}, {"w": (5, 4)}),
        WEIGHT_NORM: ({"g": (4, 1, 1), "v": (4, 3, 5)}, {"w": (4, 3, 5)}),
        FP4: ({"blocks": (2, 6, 3, 16), "scales": (2, 6, 3)}, {"w": (2, 96, 6)}),
        BLOCKS: ({"w": (6, 8), "s": (2, 2)}, {"w": (6, 8)}),
        EXPERTS: (
            {f"experts.{x}.w": (3, 2) for x in range(4)} | {f"experts.{x}.s": (3,) for x in range(4)},
            {"w": (4, 2, 3)},
        ),
    }
    tensors, targets = shapes[table]
    made = made_of(table, tensors, targets, alpha=8, rank=2)
    values = {name: torch.randint(0, 100, shape).to(torch.float32) for name, shape in tensors.items()}
    (whole,) = made.forward(values).values()
    (step,) = made.steps
    (recipe,) = forward_recipes(step, infos(tensors), infos(targets), made.arithmetic(step))

    def read(copy: Copy, where: Window, into: Tensor | None = None) -> list[tuple[Tensor, Copy]]:
        return [
            (values[part.source].reshape(-1).as_strided(part.sizes, part.source_strides, part.source_offset), part)
            for part in where.clip(copy)
        ]

    for start, stop in ((0, 1), (3, 11), (recipe.numel - 5, recipe.numel)):
        found = compute(recipe, Window.of_row(start, stop), read)
        assert torch.equal(found, whole.reshape(-1)[start:stop])
    starts, sizes = [1] * whole.ndim, [extent - 2 or 1 for extent in whole.shape]
    box = tuple(slice(one, one + size) for one, size in zip(starts, sizes, strict=True))
    found = compute(recipe, Window(whole.shape, starts, sizes), read)
    assert torch.equal(found, whole[box].reshape(-1))


@pytest.mark.parametrize(
    ("table", "sources", "targets"),
    [
        (EXPONENTIAL, {"A_log": (3, 2)}, {"A": (3, 2)}),
        (LORA, {"w": (4, 5), "lora_A": (2, 5), "lora_B": (4, 2)}, {"w": (5, 4)}),
        (WEIGHT_NORM, {"g": (4, 1, 1), "v": (4, 3, 5)}, {"w": (4, 3, 5)}),
    ],
)
def test_gradients_go_back_through_a_formula(
    table: str, sources: Mapping[str, Shape], targets: Mapping[str, Shape]
) -> None:
    """Against the difference of what two nearby values give."""
    made = made_of(table, sources, targets, alpha=8, rank=2)
    tensors = drawn(sources, torch.float64)
    (target,) = targets
    given = torch.randn(targets[target], dtype=torch.float64)
    (step,) = made.steps
    for name in sources:
        found = pullback(
            step, name, sources[name], {target: given}.__getitem__, made.arithmetic(step), tensors.__getitem__
        )
        along, small = torch.randn(sources[name], dtype=torch.float64), 1e-6
        ahead, behind = (
            (made.forward({**tensors, name: tensors[name] + sign * small * along})[target] * given).sum()
            for sign in (1, -1)
        )
        assert abs((ahead - behind) / (2 * small) - (found * along).sum()) < 1e-7
    with pytest.raises(ValueError, match="needs the values of its sources"):
        pullback(step, name, sources[name], {target: given}.__getitem__, made.arithmetic(step))


def test_a_formula_may_read_a_row_and_a_part_of_a_tensor() -> None:
    """The first position goes into the class token, as for DINOv2 with registers, and the others stay."""
    table = """
    [[rule]]
    source = { c = "cls [1 1 e]", p = "positions [1 p=0 e]" }
    target = "cls [1 1 e]"
    formula = "c + p"
    [[rule]]
    source = "positions [1 (_1|t) e]"
    target = "positions [1 t e]"
    formula = "x"
    """
    made = made_of(table, {"cls": (1, 1, 3), "positions": (1, 5, 3)}, {"cls": (1, 1, 3), "positions": (1, 4, 3)})
    tensors = drawn(made.sources)
    first = (tensors["cls"].double() + tensors["positions"][:, :1].double()).float()
    same(made.forward(tensors), {"cls": first, "positions": tensors["positions"][:, 1:]})
    with pytest.raises(TableError, match="is a part of a tensor, which 'back' cannot make whole"):
        parse_table(table.replace('formula = "x"', 'formula = "x"\nback = { x = "y" }'))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('formula = "w * t"\nback = { w = "y", t = "1" }', ""),
        ('formula = "w * t"\nback = { w = "y", t = "2" }', "'back' does not undo formula = 'w * t'"),
        ('formula = "w * t * unknown"', "the config has no 'unknown'"),
    ],
)
def test_a_way_back_is_tried_before_anything_is_read(line: str, message: str) -> None:
    table = parse_table(f'[[rule]]\nsource = {{ w = "w [o i]", t = "t [o]" }}\ntarget = "y [o i]"\n{line}\n')
    faults = [str(fault) for fault in uncomputable(table.rules, {})]
    assert len(faults) == bool(message)
    assert all(message in fault for fault in faults)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ('formula = "w * s"', "formula = 'w * s' does not use 't'"),
        ('formula = "w * t * s["', "'w * t * s[' is not a formula"),
        ('formula = "w * tanh(t)"', "tanh is not a function of formulas; known: abs, exp, log, sqrt, sum"),
        ('formula = "w * (t + w).real"', "Attribute is not allowed in a formula"),
        ('formula = "w * t.real"', "formula = 'w * t.real' does not use 't'"),
        ('formula = "w * sum(t, i)"', "sum(t, i): t has no index 'i'"),
        ('formula = "sum(w * t, i)"', "lacks the index 'i', and 'y [o i]' has it"),
        ('formula = "fp4(w * t, n)"', "has the index 'n', and 'y [o i]' has not"),
        ('formula = "fp4(w * t, i)"', "w * t has the index 'i' already"),
        ('formula = "exp(w, t)"', "exp is written exp(x)"),
        ('formula = "repeat(w * t)"', "repeat is written repeat(x, m), with the indices that are added"),
        ('formula = "repeat(w * t, i)"', "w * t has the index 'i' already"),
        ('formula = "unpack_low(w * t, n=8)"', "unpack_low is written unpack_low(x, 4, n=8)"),
        ('formula = "unpack_high(w * t, 8, n=8)"', "how many there are, of at most 32 bits"),
        ('formula = "unpack_low(w * t, 4, n=8)"', "has the index 'n', and 'y [o i]' has not"),
        ('formula = "unpack_low(w * t, 4, i=8)"', "w * t has the index 'i' already"),
        ('formula = "w * blocks(t, 4, o=3)"', "blocks is written blocks(s, 128, a=o, b=i)"),
        ('formula = "w * take(t, o=x)"', "'x' is not a source of the rule"),
        ('formula = "take(w, i=t)"', "take(w, i=t): w has the index 'o' already"),
        ('formula = "take(w, k=t)"', "take(w, k=t): w has no index 'k'"),
        ('formula = "take(w, t)"', "take is written take(s, g=j)"),
        ('formula = "w * json(t + w, s)"', "json is written json(x, offset)"),
        ('formula = "w * blocks(t, 4, o=(i, 3))"', "blocks is written blocks(s, 128, a=o, b=i)"),
        ('formula = "w * bicubic(t, o=(i, o), i=o)"', "bicubic is written bicubic(x, h=H, w=W)"),
        ('formula = "bicubic(w * t, o=i)"', "bicubic is written bicubic(x, h=H, w=W)"),
        ('formula = "w * t"\nscale = 2', "a rule with a formula has no 'scale': write it in the formula"),
        ('formula = "w * t"\nback = { w = "y" }', "'back' does not say 't': it gives every source or none"),
        ('formula = "w * t"\nback = { w = "y", t = "w" }', "back = 'w' reads 'w'; it has the target, 'y', alone"),
        ('formula = "w * t"\nback = { w = "y", t = "y" }', "back = 'y' has the index 'i', and 't' has not"),
        ('formula = "w * t"\ndtype = "int8"', "expected one of bfloat16, float16, float32, float64"),
        ('scale = 2\nback = { w = "y" }', "belong to a formula, and there is none"),
    ],
)
def test_a_formula_that_does_not_fit_is_refused_at_its_place(rule: str, message: str) -> None:
    text = f'[[rule]]\nsource = {{ w = "w [o i]", t = "t [o]" }}\ntarget = "y [o i]"\n{rule}\n'
    with pytest.raises(TableError) as caught:
        parse_table(text)
    assert message in str(caught.value)


def test_what_has_no_way_back_says_so() -> None:
    made = made_of(FP4, {"blocks": (2, 6, 3, 16), "scales": (2, 6, 3)}, {"w": (2, 96, 6)})
    fault = irreversible(made.steps[0].rule)
    assert fault.code is Code.IRREVERSIBLE
    assert "computes 'fp4(x, n) * 2 ** (s - 127)', and nothing says what its sources are made of" in fault.message
