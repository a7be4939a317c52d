"""The four layouts against each other, through maps in the notation, and against torch.nn.MultiheadAttention."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn

from porting.models.attention import LAYOUTS
from porting.notation.table import parse_table
from porting.plan.align import align
from porting.plan.move import forward

E, H = 12, 3
Weights = Mapping[str, Tensor]

# How each layout spells its projections' weights, (p h d) rows of e, and their biases.
SPELLED = {
    "separate": ("{p:query,key,value}.weight [(h d) e]", "{p:query,key,value}.bias [(h d)]"),
    "per_head": ("heads.{h}.{p:query,key,value}.weight [d e]", "heads.{h}.{p:query,key,value}.bias [d]"),
    "fused": ("qkv.weight [(p h d) e]", "qkv.bias [(p h d)]"),
    "interleaved": ("qkv.weight [(h p d) e]", "qkv.bias [(h p d)]"),
    "torch": ("in_proj_weight [(p h d) e]", "in_proj_bias [(p h d)]"),
}
OUTPUT = {"torch": "out_proj.{w:weight,bias}"}


def attention(layout: str, dropout: float = 0.0) -> nn.Module:
    if layout == "torch":
        made: nn.Module = nn.MultiheadAttention(E, H, dropout=dropout, batch_first=True)
    else:
        made = LAYOUTS[layout](hidden_size=E, num_attention_heads=H, dropout=dropout)
    return made.to(torch.float64).eval()


def drawn(layout: str, seed: int = 0) -> nn.Module:
    module = attention(layout)
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = 0.6 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    return module


def carried(source: nn.Module, layout: str, other: str) -> nn.Module:
    """The attention ``other`` with the weights of ``source``, through a table of three rules."""
    lines = [*zip(SPELLED[layout], SPELLED[other], strict=True)]
    lines += [(OUTPUT.get(layout, "output.{w:weight,bias}"), OUTPUT.get(other, "output.{w:weight,bias}"))]
    table = parse_table("[tensors]\n" + "\n".join(f'"{left}" = "{right}"' for left, right in lines))
    target = attention(other)
    theirs, ours = source.state_dict(), target.state_dict()
    sizes = {"h": H, "p": 3}
    shapes = [{name: tuple(one.shape) for name, one in side.items()} for side in (theirs, ours)]
    found = align(table.rules, *shapes, sizes=sizes)
    assert (found.faults, found.unread, found.unwritten) == ((), (), ())
    values: dict[str, Tensor] = {}
    for step in found.steps:
        values.update(forward(step, ours, theirs.__getitem__))
    target.load_state_dict(values, strict=True)
    return target


def batch() -> tuple[Tensor, Tensor]:
    """Hidden states [4 7 e] and a mask of rows of 7, 5, 3 and 1 tokens."""
    hidden = torch.randn(4, 7, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return hidden, torch.arange(7) < torch.tensor([[7], [5], [3], [1]])


@pytest.mark.parametrize(("layout", "other"), list(permutations(LAYOUTS, 2)))
def test_every_layout_computes_what_every_other_does(layout: str, other: str) -> None:
    source = drawn(layout)
    target = carried(source, layout, other)
    for mask in (batch()[1], None):
        for found, expected in zip(target(batch()[0], mask), source(batch()[0], mask), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    again = carried(target, other, layout).state_dict()
    assert all(torch.equal(again[name], value) for name, value in source.state_dict().items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_computes_what_torch_computes(layout: str) -> None:
    source = drawn(layout)
    theirs = carried(source, layout, "torch")
    hidden, mask = batch()
    attended, probabilities = theirs(hidden, hidden, hidden, key_padding_mask=~mask, average_attn_weights=False)
    found = source(hidden, mask)
    torch.testing.assert_close(found[0], attended, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(found[1], probabilities, rtol=1e-13, atol=1e-13)
    assert probabilities.shape == (4, H, 7, 7)


def test_the_maps_are_those_of_einops() -> None:
    weights: Weights = drawn("separate").state_dict()
    fused, interleaved, heads = (
        carried(drawn("separate"), "separate", other).state_dict() for other in ("fused", "interleaved", "per_head")
    )
    three = torch.stack([weights[f"{part}.weight"] for part in ("query", "key", "value")])
    assert torch.equal(fused["qkv.weight"], rearrange(three, "p o e -> (p o) e"))
    assert torch.equal(interleaved["qkv.weight"], rearrange(three, "p (h d) e -> (h p d) e", h=H))
    for head, rows in enumerate(rearrange(three, "p (h d) e -> h p d e", h=H)):
        for part, expected in zip(("query", "key", "value"), rows, strict=True):
            assert torch.equal(heads[f"heads.{head}.{part}.weight"], expected)


def test_one_layout_read_as_another_is_something_else() -> None:
    """The two fused layouts have the same names and shapes: nothing but the order of the rows tells them apart."""
    fused, mistaken = drawn("fused"), attention("interleaved")
    mistaken.load_state_dict(fused.state_dict(), strict=True)
    assert float((mistaken(batch()[0])[0] - fused(batch()[0])[0]).detach().abs().max()) > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_is_not_attended_to(layout: str) -> None:
    module = drawn(layout)
    hidden, mask = batch()
    attended, probabilities = module(hidden, mask)
    assert probabilities[~mask[:, None, None, :].expand_as(probabilities)].eq(0).all()
    torch.testing.assert_close(probabilities.sum(-1), torch.ones_like(probabilities[..., 0]))
    other = torch.where(mask[..., None], hidden, 9.0)
    torch.testing.assert_close(module(other, mask)[0][mask], attended[mask], rtol=1e-13, atol=1e-13)
    assert not torch.allclose(module(other)[0][mask], attended[mask])
    for same in (mask.long(), mask.double()):
        assert torch.equal(module(hidden, same)[0], attended)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_is_not_attended_to_however_large_the_scores(layout: str) -> None:
    """A mask of -10000, as is sometimes written, would lose against these."""
    hidden, mask = batch()
    _, probabilities = drawn(layout)(hidden * 300, mask)
    assert probabilities[~mask[:, None, None, :].expand_as(probabilities)].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_of_padding_alone_attends_evenly(layout: str, dtype: torch.dtype) -> None:
    hidden, mask = batch()
    _, probabilities = drawn(layout).to(dtype)(hidden.to(dtype), torch.zeros_like(mask))
    torch.testing.assert_close(probabilities, torch.full_like(probabilities, 1 / 7))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_falls_on_the_probabilities_in_training_alone(layout: str) -> None:
    module = carried(drawn(layout), layout, layout)
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.5
    expected = drawn(layout)(batch()[0])
    assert torch.equal(module(batch()[0])[0], expected[0])
    attended, probabilities = module.train()(batch()[0])
    assert not torch.allclose(attended, expected[0])
    torch.testing.assert_close(probabilities, expected[1])  # those before dropout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_that_do_not_divide_the_width_are_refused(layout: str) -> None:
    with pytest.raises(ValueError, match="hidden_size=12: expected a multiple of num_attention_heads=5"):
        LAYOUTS[layout](hidden_size=12, num_attention_heads=5)
