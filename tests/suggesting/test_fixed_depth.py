"""Modules whose sizes are written into them: they are searched with a few of their layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from porting.suggesting import Verdict, suggest
from porting.suggesting.pipeline import _searched
from porting.suggesting.subjects.building import build_for, named_fields, with_fields
from porting.suggesting.subjects.fixed_depth import cut, fewer, stacks, uncut
from porting.suggesting.subjects.model_pair import ModelPair
from tests.suggesting.llama import FIELDS, Block, Llama, builder
from tests.suggesting.oracle import source

LAYERS = 6
DEEP = {**FIELDS, "num_hidden_layers": LAYERS}


def fixed(kind: type[Llama] = Llama) -> nn.Module:
    """A Llama with its sizes written in: it takes no config."""
    return builder(kind=kind)(113, 48, LAYERS, 6, 2, 80, 64, 1e-5)


class ByNumber(Llama):
    """It has to have all of its layers."""

    def forward(self, tokens: Tensor) -> Tensor:
        self.layers = nn.ModuleList([self.layers[layer] for layer in range(LAYERS)])
        return super().forward(tokens)


class Halved(Block):
    """Adds half of what it computes."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        return x + 0.5 * (super().forward(x, cos, sin, seen) - x)


class LastIsOther(Llama):
    """One of its layers computes something else, and not one of the first."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]  # whatever it takes
        self.layers[LAYERS - 1].__class__ = Halved


@pytest.fixture
def depths(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """How many layers the twins had."""
    found: list[object] = []

    def noted(subjects: ModelPair, *args: object) -> object:
        found.append(subjects.twin.config["depths" if "depths" in subjects.twin.config else "num_hidden_layers"])
        return _searched(subjects, *args)  # type: ignore[arg-type]  # whatever it takes

    monkeypatch.setattr("porting.suggesting.pipeline._searched", noted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("into", "twins"),
    [(fixed, [2]), (fixed(), [2]), (partial(fixed, ByNumber), [LAYERS])],
    ids=["built", "given", "all"],
)
def test_a_few_layers_tell_all_where_the_module_runs_with_them(
    tmp_path: Path, depths: list[object], into: nn.Module | Callable[..., nn.Module], twins: list[int]
) -> None:
    source("LlamaForCausalLM", DEEP, tmp_path)
    found = suggest(tmp_path, into)
    assert found.verdict is Verdict.EXACT, str(found)
    assert found.proven_on == "the checkpoint"
    assert depths == twins


STAGED: dict[str, Any] = {
    "num_channels": 3,
    "hidden_sizes": [8, 16, 24, 40],
    "depths": [1, 1, 6, 1],
    "image_size": 64,
    "patch_size": 4,
}


@pytest.mark.slow
def test_only_stages_of_many_layers_are_cut(tmp_path: Path, depths: list[object]) -> None:
    """The module is transformers' own, built without a config: a stage of six blocks is one of two in the twin."""
    source("ConvNextModel", STAGED, tmp_path)
    found = suggest(tmp_path, lambda: transformers.ConvNextModel(transformers.ConvNextConfig(**STAGED)))
    assert found.verdict is Verdict.EXACT, str(found)
    assert found.proven_on == "the checkpoint"
    assert depths == [[1, 1, 2, 1]]


@pytest.mark.slow
def test_a_layer_that_was_cut_off_is_proven_on_the_checkpoint(tmp_path: Path) -> None:
    source("LlamaForCausalLM", DEEP, tmp_path)
    found = suggest(tmp_path, partial(fixed, LastIsOther))
    assert found.verdict not in {Verdict.EXACT, Verdict.TRUNK, Verdict.APPROXIMATE}, str(found)


def test_layers_are_cut_where_they_stand() -> None:
    """Those of a size that was asked for, and not the heads inside of them."""

    def layer() -> nn.Module:
        return nn.ModuleDict({"heads": nn.ModuleList(nn.Linear(4, 4) for _ in range(12)), "norm": nn.LayerNorm(4)})

    def built() -> nn.Module:
        return nn.ModuleDict({
            "layers": nn.ModuleList(layer() for _ in range(12)),
            "decoder": nn.Sequential(*(nn.Linear(4, 4) for _ in range(7))),
            "activations": nn.Sequential(*(nn.ReLU() for _ in range(12))),
        })  # fmt: skip

    short = cut(built, {12: 2, 7: 3})
    made = short()
    assert stacks(built(), {12, 7}) == {"layers": 12, "decoder": 7}
    assert {path: len(part) for path, part in made.items()} == {"layers": 2, "decoder": 3, "activations": 12}  # type: ignore[operator]  # a ModuleDict
    assert len(made["layers"][0]["heads"]) == 12  # type: ignore[index]  # as above
    assert uncut(short) is built
    assert uncut(built) is built


def test_experts_are_no_layers() -> None:
    """A module that follows the depth may have as many experts as the checkpoint has layers."""

    def layer() -> nn.Module:
        return nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(8))})

    follows = nn.ModuleDict({"layers": nn.ModuleList(layer() for _ in range(2))})
    assert stacks(follows, {8}) == {}
    assert stacks(follows, {8}, staged=True) == {"layers.0.experts": 8, "layers.1.experts": 8}
    assert stacks(nn.Sequential(nn.Embedding(4, 4), follows["layers"][0]["experts"]), {8}) == {"1": 8}  # type: ignore[index]  # lists


def test_a_module_that_was_given_stays_whole() -> None:
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))
    made = build_for(cut(module, {9: 2}), {}).module
    assert isinstance(made, nn.Sequential)
    assert len(made) == 2
    assert len(module) == 9
    assert torch.equal(made[0].weight, module[0].weight)  # type: ignore[arg-type]  # tensors


def test_what_was_found_for_the_cut_one_is_told_to_the_whole_one() -> None:
    def build(many: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(many, many) for _ in range(9)))

    short = with_fields(cut(build, {9: 2}), {"many": "hidden_size"}, {"hidden_size": 4})
    every = build_for(uncut(short), {"hidden_size": 4}).module
    assert named_fields(uncut(short)) == {"many": "hidden_size"}
    assert len(list(every.children())) == 9


def test_depths_that_cannot_be_told_apart_are_left() -> None:
    both = {"encoder_layers": 6, "decoder_layers": 6}
    assert fewer(both, {"encoder_layers": 2, "decoder_layers": 2}) == {6: 2}
    assert fewer(both, {"encoder_layers": 2, "decoder_layers": 3}) == {}
    assert fewer(both, both) == {}
