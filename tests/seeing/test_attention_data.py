"""Whatever the order of the axes, and wherever the heads are computed: layers of heads."""

from __future__ import annotations

import pytest
import torch
from einops import rearrange
from torch import Tensor

from porting.seeing.attention_data import gather, square


def drawn(heads: int, length: int) -> Tensor:
    """[h q k]"""
    generator = torch.Generator().manual_seed(heads * 100 + length)
    return torch.randn(heads, length, length, generator=generator).mul(3).softmax(-1)


USUAL = ("h q k -> 1 h q k", "h q k -> h 1 q k", "h q k -> h q k", "h q k -> 1 q k h", "h q k -> q k 1 h")


@pytest.mark.parametrize("order", [*USUAL, "h q k -> 1 q h k", "h q k -> 1 h k q", "h q k -> k q h"])
@pytest.mark.parametrize(("heads", "length"), [(3, 7), (1, 4), (2, 1), (9, 5)])
def test_the_axes_are_found(heads: int, length: int, order: str) -> None:
    expected = drawn(heads, length)
    found = square(rearrange(expected, order), length)
    assert found is not None
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("order", USUAL)
def test_as_many_heads_as_tokens_are_no_trouble_in_the_usual_orders(order: str) -> None:
    found = square(rearrange(drawn(5, 5), order), 5)
    assert found is not None
    torch.testing.assert_close(found, drawn(5, 5))


def test_half_precision_sums_to_one_nearly_enough() -> None:
    found = square(drawn(2, 300).bfloat16(), 300)
    assert found is not None
    assert found.dtype == torch.float32


def test_what_is_no_attention_is_left_out() -> None:
    assert square(torch.rand(1, 3, 6, 6), 6) is None  # rows do not sum to 1
    assert square(drawn(2, 6), 5) is None  # another text
    assert square(drawn(1, 6)[:, :1], 6) is None  # from one token only


def seen(*names: str, heads: int = 1) -> list[tuple[str, Tensor]]:
    return [
        (f"{name} -> probabilities{call}", drawn(heads, 3)) for name, _, call in (name.partition("!") for name in names)
    ]


def grouped(*names: str, heads: int = 1) -> list[tuple[str, int]]:
    return [(name, len(values)) for name, values in gather(seen(*names, heads=heads))]


def test_heads_of_their_own_make_layers() -> None:
    names = [f"encoder.layers.{layer}.attention.heads.{head}.core" for layer in range(2) for head in range(3)]
    assert grouped(*names) == [("encoder.layers.0.attention.heads", 3), ("encoder.layers.1.attention.heads", 3)]
    assert grouped(*names[:3]) == [("encoder.layers.0.attention.heads", 3)]
    bare = [f"blocks.{layer}.attn.{head}" for layer in range(2) for head in range(2)]
    assert grouped(*bare) == [("blocks.0.attn", 2), ("blocks.1.attn", 2)]
    values = gather(
        [(f"b.{layer}.heads.{head} -> probabilities", drawn(1, layer + head + 2)) for layer in (0,) for head in (0,)]
    )
    assert torch.equal(values[0][1], drawn(1, 2))


def test_heads_keep_their_order() -> None:
    points = [
        (f"layers.{layer}.heads.{head} -> probabilities", torch.full((1, 2, 2), 10.0 * layer + head))
        for layer in range(2)
        for head in range(11)
    ]
    for layer, (_, values) in enumerate(gather(points)):
        assert values[:, 0, 0].tolist() == [10.0 * layer + head for head in range(11)]


def test_layers_stay_layers() -> None:
    assert grouped("layers.0.attention", "layers.1.attention") == [("layers.0.attention", 1), ("layers.1.attention", 1)]
    assert grouped("a.0.layers.0.attn", "a.0.layers.1.attn") == [("a.0.layers.0.attn", 1), ("a.0.layers.1.attn", 1)]
    assert grouped("g.0.layers.0.core", "g.1.layers.1.core", heads=4) == [
        ("g.0.layers.0.core", 4),
        ("g.1.layers.1.core", 4),
    ]
    assert grouped("layer", "layer! #2") == [("layer", 1), ("layer #2", 1)]  # shared by all depths
    assert grouped(".") == [(".", 1)]
