"""An image cut into patches by hand: the convolution's kernel becomes a matrix over them, or has its axes otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from einops import rearrange
from torch import Tensor, nn

from porting.suggesting import Verdict, suggest
from porting.suggesting.search import matrix_candidates
from porting.suggesting.search.layouts import CandidateRule, transformed
from porting.suggesting.subjects.operation_trace import Unit, WeightUse
from porting.suggesting.subjects.twin import draw_parameters
from tests.suggesting.oracle import drafted


class Patched(nn.Module):
    """The embeddings and one layer of a ViT; ``last`` puts a patch's channels behind its pixels."""

    last = False

    def __init__(self, config: Any) -> None:  # it reads what it needs
        super().__init__()
        e, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        self.patch = config.patch_size
        self.proj: nn.Module = nn.Linear(3 * self.patch**2, e)
        self.start: nn.Parameter | None = nn.Parameter(torch.zeros(1, 1, e))
        self.places = nn.Parameter(torch.zeros(1, (config.image_size // self.patch) ** 2 + 1, e))
        self.heads = config.num_attention_heads
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "n1": nn.LayerNorm(e, eps), "qkv": nn.Linear(e, 3 * e), "out": nn.Linear(e, e),
                "n2": nn.LayerNorm(e, eps), "up": nn.Linear(e, inner), "down": nn.Linear(inner, e),
            })
            for _ in range(config.num_hidden_layers)
        )  # fmt: skip
        self.end = nn.LayerNorm(e, eps)

    def joined(self, patches: Tensor) -> Tensor:
        assert self.start is not None
        return torch.cat([self.start.expand(len(patches), 1, -1), patches], 1)

    def cut(self, images: Tensor) -> Tensor:
        cut = F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        if self.last:
            cut = cut.reshape(*cut.shape[:2], 3, -1).transpose(-1, -2).flatten(-2)
        found: Tensor = self.proj(cut)
        return found

    def forward(self, images: Tensor) -> Tensor:
        x = self.joined(self.cut(images)) + self.places
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            q, k, v = (
                one.reshape(*one.shape[:2], self.heads, -1).transpose(1, 2)
                for one in layer["qkv"](layer["n1"](x)).chunk(3, -1)
            )
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + layer["out"](mixed)
            x = x + layer["down"](F.gelu(layer["up"](layer["n2"](x))))
        out: Tensor = self.end(x)
        return out


class PatchedLast(Patched):
    last = True


class PatchedBare(PatchedLast):
    """Its row of positions and its first token have no axes of one element: nothing else is settled before them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        assert self.start is not None
        self.start, self.places = (nn.Parameter(one.detach()[0].squeeze(0)) for one in (self.start, self.places))


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, image_size=12, patch_size=4
    )
    torch.manual_seed(0)
    model: Any = transformers.ViTModel(config)  # transformers does not type it
    draw_parameters(model, 0)
    folder = tmp_path_factory.mktemp("vit")
    model.save_pretrained(folder)
    return folder


LAID_OUT = pytest.mark.parametrize(
    ("kind", "axes"), [(Patched, "(a b f)"), (PatchedLast, "(b f a)"), (PatchedBare, "(b f a)")]
)


@LAID_OUT
def test_the_draft_lays_a_kernel_out_as_the_patches_are(vit: Path, kind: type[nn.Module], axes: str) -> None:
    expected = f'"embeddings.patch_embeddings.projection.weight [o a b f]" = "proj.weight [o {axes}]"'
    assert expected in drafted(vit, kind).text


@pytest.mark.slow
@LAID_OUT
def test_a_kernel_is_laid_out_as_the_patches_are(vit: Path, kind: type[nn.Module], axes: str) -> None:
    found = suggest(vit, kind)
    assert found.verdict is Verdict.TRUNK, str(found)
    assert f'"embeddings.patch_embeddings.projection.weight [o a b f]" = "proj.weight [o {axes}]"' in found.text


class Tokens(Patched):
    """No token in front of the patches, or one more than the checkpoint's model has."""

    more = -1

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        e, patches = config.hidden_size, self.places.shape[1] - 1
        self.start = nn.Parameter(torch.zeros(1, 1, e)) if self.more > 0 else None
        self.register = nn.Parameter(torch.zeros(e)) if self.more > 0 else None
        self.places = nn.Parameter(torch.zeros(patches + 1 + self.more, e))

    def joined(self, patches: Tensor) -> Tensor:
        begin = [one for one in (self.start, self.register) if one is not None]
        return torch.cat([*(one.expand(len(patches), 1, -1) for one in begin), patches], 1)


class MoreTokens(Tokens):
    more = 1


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Tokens, "your module none"),
        (MoreTokens, "your module start and register"),
    ],
)
def test_another_number_of_tokens_is_impossible(vit: Path, kind: type[nn.Module], said: str) -> None:
    found = suggest(vit, kind)
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    said = f"tokens added to those of the input: the checkpoint's model adds embeddings.cls_token, {said}"
    assert any(said == reason.said and reason.shown for reason in found.reasons), str(found)


class Overlapping(Patched):
    """Patches that begin at each half of one."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        half = self.patch // 2
        count = (config.image_size - self.patch) // half + 1
        self.proj = nn.Conv2d(3, config.hidden_size, self.patch, half)
        self.places = nn.Parameter(torch.zeros(1, count**2 + 1, config.hidden_size))

    def cut(self, images: Tensor) -> Tensor:
        found: Tensor = self.proj(images)
        return found.flatten(2).mT


def test_another_stride_is_impossible(vit: Path) -> None:
    found = suggest(vit, Overlapping)
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    said = [one.said for one in found.reasons if one.shown]
    assert any(one.startswith("the convolution with proj.weight gives ") for one in said), str(found)


@pytest.mark.parametrize(
    ("shape", "ours", "layout"),
    [
        pytest.param((6, 4, 3, 5), (3, 5, 4, 6), "o e a b -> a b e o", id="height, width, in, out"),
        pytest.param((6, 4, 7), (7, 4, 6), "o e a -> a e o", id="of a row"),
        pytest.param((6, 4, 1), (4, 6), "o e 1 -> e o", id="one wide, as a matrix"),
        pytest.param((6, 4, 3, 5), (60, 6), "o e a b -> (a b e) o", id="over patches with channels last"),
        pytest.param((6, 4, 1), (3, 2, 4), "(m o) e 1 -> m o e", id="groups as an axis"),
        pytest.param((6, 4, 5), (3, 4, 2, 5), "(m o) e a -> m e o a", id="groups of wider ones"),
    ],
)
def test_a_kernel_is_found_in_any_order_of_its_axes(shape: tuple[int, ...], ours: tuple[int, ...], layout: str) -> None:
    groups = {"m": 3} if "m" in layout else {}
    shifts = (3, 2) if groups else (6,)
    theirs_shapes, our_shapes = {"c.weight": shape, "c.bias": (6,)}, {"w": ours, "b": shifts}
    summed = math.prod(shape) // 6
    parts: dict[str, Any] = {
        "kind": WeightUse.LINEAR,
        "number": 0,
        "output": torch.zeros(1),
        "scope": "",
        "summed": summed,
    }
    made_of: list[Any] = [(("w",), ("b",)), (("c.weight",), ("c.bias",))]
    sides = [Unit(weights=one, biases=other, **parts) for one, other in made_of]
    generator = torch.Generator().manual_seed(0)
    sources = {name: torch.randn(size, generator=generator) for name, size in theirs_shapes.items()}
    targets = {name: torch.zeros(size) for name, size in our_shapes.items()}
    right = rearrange(sources["c.weight"], layout, **groups), sources["c.bias"].view(shifts)
    ways = matrix_candidates.candidates(sides[:1], sides[1:], our_shapes, theirs_shapes, {"h": 2})
    made = [found for way in ways if (found := all_transformed(way, sources, targets)) is not None]
    assert any(torch.equal(one["w"], right[0]) and torch.equal(one["b"], right[1]) for one in made)


def all_transformed(
    way: Sequence[CandidateRule], sources: dict[str, Tensor], targets: dict[str, Tensor]
) -> dict[str, Tensor] | None:
    found: dict[str, Tensor] = {}
    for rule in way:
        values = transformed(rule, sources, targets, {}, {})
        if values is None:
            return None
        found |= values
    return found
