"""Arguments that no usual batch holds: masks of patches, of pixels and of heads, positions, and flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from porting import verify
from porting.reporting.report import Report
from porting.reporting.scope_text import scope_lines
from porting.tracing.running import Side
from porting.trials.inputs import Case
from porting.trials.optional_arguments import Found, optional_arguments
from tests.families.ported import draw
from tests.trials.small_model import Encoder

VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip


def built(architecture: str, **fields: Any) -> nn.Module:
    """A model of transformers with drawn weights."""
    torch.manual_seed(0)
    kind: Any = getattr(transformers, architecture)  # one of transformers' classes
    model: nn.Module = kind._from_config(kind.config_class(**fields), attn_implementation="eager")
    draw(model)
    return model.eval()


Change = Callable[[dict[str, Any]], dict[str, Any]]


class Masked(nn.Module):
    """A model of pictures with a mask of its patches, or with a flag."""

    def __init__(self, model: nn.Module, change: Change) -> None:
        super().__init__()
        self.model = model
        self.change = change

    def forward(
        self,
        pixel_values: Tensor,
        bool_masked_pos: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
    ) -> dict[str, Tensor]:
        """The features of each patch, or the pictures that are made of them."""
        given = {"bool_masked_pos": bool_masked_pos, "interpolate_pos_encoding": interpolate_pos_encoding}
        given = self.change({"pixel_values": pixel_values, **given})
        found = self.model(**{name: one for name, one in given.items() if one is not None})
        return {name: found[name] for name in ("last_hidden_state", "reconstruction") if name in found}


class Unmasked(Masked):
    """It takes pictures alone."""

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:  # type: ignore[override]  # that is the point
        return super().forward(pixel_values)


def same(given: dict[str, Any]) -> dict[str, Any]:
    return given


def without_mask(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "bool_masked_pos": None}


def inverted(given: dict[str, Any]) -> dict[str, Any]:
    mask = given["bool_masked_pos"]
    return given if mask is None else {**given, "bool_masked_pos": ~mask.bool()}


def as_first_row(given: dict[str, Any]) -> dict[str, Any]:
    mask = given["bool_masked_pos"]
    return given if mask is None else {**given, "bool_masked_pos": mask[:1].expand_as(mask)}


def darker_if_smaller(given: dict[str, Any]) -> dict[str, Any]:
    pixels = given["pixel_values"]
    smaller = pixels.shape[-1] < 16 and pixels.shape[-2] < 16 and pixels.shape[-1] != pixels.shape[-2]
    return {**given, "pixel_values": pixels * (0.99 if smaller else 1.0)}


ARCHITECTURES: Mapping[str, dict[str, Any]] = {
    "Dinov2Model": {name: one for name, one in VISION.items() if name != "intermediate_size"},
    "ViTForMaskedImageModeling": {**VISION, "encoder_stride": 4},
    "BeitModel": {**VISION, "use_mask_token": True, "vocab_size": 30},
}


def verified(architecture: str, change: Change, port: type[Masked] = Masked) -> Report:
    fields = ARCHITECTURES[architecture]
    module = port(built(architecture, **fields), change).eval()
    reference = Masked(built(architecture, **fields), same).eval()
    vars(reference)["config"] = module.model.config
    return verify(reference=reference, into=module, dtypes=(), loaded=True, causes=False)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("change", [same, without_mask, inverted, as_first_row])
def test_a_mask_of_patches_is_given(architecture: str, change: Change) -> None:
    report = verified(architecture, change)
    assert report.faithful == (change is same), str(report)
    named = {one.what.partition(",")[0] for one in report.scope.results}
    assert "with bool_masked_pos" in named
    if change is same:
        assert any("with bool_masked_pos" in line for line in scope_lines(report, verbose=False))


def test_what_the_port_does_not_take_is_not_run() -> None:
    report = verified("Dinov2Model", same, Unmasked)
    assert report.faithful
    assert report.scope.lacking == ("bool_masked_pos",)
    assert "bool_masked_pos (your model does not take it)" in str(report)


@pytest.mark.parametrize("change", [same, darker_if_smaller])
def test_a_flag_that_allows_other_sizes_is_given_with_smaller_and_larger_pictures(change: Change) -> None:
    report = verified("ViTForMaskedImageModeling" if change is same else "BeitModel", change)
    assert report.faithful == (change is same), str(report)


def test_sizes_are_smaller_and_larger_in_both_orientations() -> None:
    sizes = verified("Dinov2Model", same).scope.pictures
    smaller = {(high, wide) for high, wide in sizes if high < 16 and wide < 16}
    larger = {(high, wide) for high, wide in sizes if high > 16 and wide > 16}
    for some in (smaller, larger):
        assert any(high > wide for high, wide in some)
        assert any(high < wide for high, wide in some)


class Headed(Encoder):
    """An encoder with further optional arguments: each of them is multiplied into its output."""

    used: tuple[str, ...] = ("head_mask", "perm_mask", "cache_position", "global_attention_mask", "doubled")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        perm_mask: Tensor | None = None,
        row_position: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        doubled: bool = False,
        labels: Tensor | None = None,
        idle: Tensor | None = None,
    ) -> dict[str, Tensor]:
        found = super().forward(input_ids, attention_mask)
        logits = found["logits"]
        if head_mask is not None and "head_mask" in self.used:
            logits = logits * (1 + head_mask.view(-1, 4).sum())  # four heads
        if perm_mask is not None and "perm_mask" in self.used:
            if perm_mask.shape != (*input_ids.shape, input_ids.shape[1]):
                raise ValueError("a pair of places each")
            logits = logits * (1 + perm_mask.sum(2, keepdim=True))
        if row_position is not None:
            logits = logits + row_position[:, None]
        if global_attention_mask is not None and "global_attention_mask" in self.used:
            logits = logits * (1 + global_attention_mask.view_as(input_ids)[..., None])
        if doubled and "doubled" in self.used:
            logits = 2 * logits
        if labels is not None:
            logits = 3 * logits
        return {"logits": logits}


HEADS = {"num_hidden_layers": 1, "num_attention_heads": 4}
TAKEN = ("head_mask", "perm_mask", "row_position", "global_attention_mask", "doubled")


def headed(*but: str) -> Headed:
    model = Headed()
    model.config = {**model.config, **HEADS}
    model.used = tuple(name for name in Headed.used if name not in but)
    return model


def test_each_optional_argument_that_matters_is_found_and_no_other() -> None:
    base = {"input_ids": torch.arange(12).view(2, 6)}
    model = headed()

    def run(case: Case) -> object:
        return Side(title="the reference", module=model, arguments=[case.inputs], wanted=()).outputs(0)

    found = optional_arguments(model, run, lambda name: name != "perm_mask", base, model.config)
    assert {*found.values, *found.lacking} == {*TAKEN}
    assert found.flags == ("doubled",)
    assert found.lacking == ("perm_mask",)
    assert optional_arguments(Encoder(), run, lambda name: True, base, {}) == Found()


@pytest.mark.parametrize("ignored", ["", "head_mask", "perm_mask", "global_attention_mask", "doubled"])
def test_a_port_that_ignores_an_argument_is_different(ignored: str) -> None:
    report = verify(reference=headed(), into=headed(ignored), dtypes=(), loaded=True, causes=False)
    assert report.faithful == (not ignored), str(report)
