"""What a builder's names mean by their words: fields of configs, of their parts and of each stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

from porting.suggesting.subjects.building import UnknownSizesError, build_for, with_fields
from porting.suggesting.subjects.config_fields import composed_role, field_for, role_of
from porting.suggesting.subjects.model_pair import completed_config


def test_transformers_own_other_names_for_fields_are_understood() -> None:
    config = completed_config({"num_local_experts": 5}, "MixtralModel")
    assert field_for("num_experts", config) == "num_local_experts"
    assert field_for("hidden_size", completed_config({"d_model": 24}, "BartModel")) == "d_model"
    images = {"hidden_size": 24, "num_channels": 3}
    assert [field_for("channels", images, others) for others in ((), ("dim", "channels"))] == list(images)


STAGES: Mapping[str, object] = {"hidden_sizes": [8, 16], "depths": [2, 6], "num_labels": 3}

SWIN: Mapping[str, object] = {"embed_dim": 8, "hidden_size": 16, "depths": [2, 6], "num_heads": [1, 2], "num_layers": 2}


@pytest.mark.parametrize(
    ("config", "asked", "staged", "field"),
    [
        (STAGES, "dims", True, "hidden_sizes"),
        (STAGES, "widths", None, "hidden_sizes"),
        (STAGES, "layers", None, "depths"),
        (STAGES, "dim", False, "hidden_sizes.0"),
        (SWIN, "dim", False, "embed_dim"),
        (SWIN, "blocks", True, "depths"),
        (SWIN, "num_layers", None, "num_layers"),
        (SWIN, "heads", True, "num_heads"),
        ({"hidden_size": 8, "num_hidden_layers": 2}, "layers", None, "num_hidden_layers"),
        ({"image_size": 224}, "img_size", True, "image_size"),
        ({"state_size": 16, "conv_kernel": 4}, "d_state", False, "state_size"),
        ({"num_channels": 3, "image_size": 224}, "im_channels", None, "num_channels"),
        ({"patch_size": 4, "image_size": 224}, "patch_height", None, "patch_size"),
    ],
)
def test_a_size_of_each_stage_is_found_by_its_name(
    config: Mapping[str, object], asked: str, staged: bool | None, field: str
) -> None:
    assert field_for(asked, config, staged=staged) == field


STATES = {
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "time_step_rank": 8,
    "hidden_size": 64,
    "intermediate_size": 128,
}


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ("expand_factor", "expand"),
        ("ssm_state_dim", "state_size"),
        ("conv_width", "conv_kernel"),
        ("time_step_rank_mamba", "time_step_rank"),
        ("expansion_factor", "intermediate_size // hidden_size"),
    ],
)
def test_sizes_of_state_space_layers_by_their_words(asked: str, field: str) -> None:
    assert field_for(asked, STATES) == field


def test_a_window_is_of_positions_only_where_nothing_has_a_sliding_one() -> None:
    assert field_for("window", {"max_position_embeddings": 64}) == "max_position_embeddings"
    assert field_for("window", {"max_position_embeddings": 64, "local_attention": 8}) == "local_attention"


def test_a_second_width_is_that_of_the_words() -> None:
    config = {"embedding_size": 16, "hidden_size": 64}
    assert field_for("emb_dim", config, ("emb_dim", "hidden_dim")) == "embedding_size"
    assert field_for("emb_dim", config, ("emb_dim", "n_heads")) == "hidden_size"


class OfStages(nn.Module):
    def __init__(self, dims: tuple[int, ...] = (96, 192), depth: int = 1, image: int = 7) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, image) for width in dims for _ in range(depth))


def test_a_builder_gets_a_list_where_it_has_one_and_the_first_stages_number_where_it_has_one() -> None:
    built = build_for(OfStages, {"hidden_sizes": [8, 16], "depths": [3, 3], "image_size": 32})
    assert built.asked == {"dims": "hidden_sizes", "depth": "depths.0", "image": "image_size"}
    assert [tuple(one.shape) for one in built.module.parameters()][::2] == [(32, 8)] * 3 + [(32, 16)] * 3


@dataclass
class Tower:
    width: int
    layers: int = 12
    use_head: bool = True


PARTS: Mapping[str, object] = {
    "text_config": {"hidden_size": 8, "num_hidden_layers": 3},
    "vision_config": {"hidden_size": 6, "num_hidden_layers": 2},
    "projection_dim": 5,
}


def towers(vision_cfg: Tower, text_cfg: Tower, embed_dim: int) -> nn.Module:
    assert type(vision_cfg) is type(text_cfg) is Tower
    layers = [nn.Linear(one.width, embed_dim) for one in (vision_cfg, text_cfg) for _ in range(one.layers)]
    return nn.ModuleList(layers)


def test_a_builder_takes_the_configs_of_two_parts_as_its_own_classes() -> None:
    built = build_for(towers, PARTS)
    assert [tuple(one.shape) for one in built.module.parameters() if one.ndim > 1] == [(5, 6)] * 2 + [(5, 8)] * 3
    assert built.asked == {
        "vision_cfg.width": "vision_config.hidden_size",
        "vision_cfg.layers": "vision_config.num_hidden_layers",
        "text_cfg.width": "text_config.hidden_size",
        "text_cfg.layers": "text_config.num_hidden_layers",
        "embed_dim": "projection_dim",
    }
    assert built.kept == {"vision_cfg.use_head": True, "text_cfg.use_head": True}


def test_a_part_without_a_class_answers_to_other_names() -> None:
    def build(text_config: Any, vision_config: Any) -> nn.Module:
        return nn.Linear(text_config.n_embd, vision_config["dim"])

    built = build_for(build, PARTS)
    assert built.asked == {
        "text_config.n_embd": "text_config.hidden_size",
        "vision_config.dim": "vision_config.hidden_size",
    }


def test_a_field_that_a_part_lacks_is_asked_for_with_its_part() -> None:
    def build(text_config: Any, vision_config: Any) -> nn.Module:
        return nn.Linear(text_config.n_embd, 3 + vision_config.use_pooling)

    with pytest.raises(UnknownSizesError) as raised:
        build_for(build, PARTS)
    assert raised.value.names == ("vision_config.use_pooling",)
    module = build_for(with_fields(build, {"vision_config.use_pooling": "true"}, PARTS), PARTS).module
    assert tuple(module.get_parameter("weight").shape) == (4, 8)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("topk", "experts of a token"),
        ("ffn_dim_per_expert", "inner size of an expert"),
        ("mlp_mid_size", "inner"),
        ("num_att_heads", "heads"),
        ("vocab_sz", "vocabulary"),
        ("forward_mul", "inner size by hidden size"),
        ("fwd_times", "inner size by hidden size"),
    ],
)
def test_names_are_understood_by_their_words(name: str, role: str) -> None:
    assert (role_of(name) or composed_role(name)) == role


def test_one_letter_means_experts_where_another_name_is_the_width() -> None:
    fields = {"hidden_size": 8, "num_experts_per_tok": 2}
    assert field_for("k", fields, ("d_model", "k")) == "num_experts_per_tok"
    assert field_for("k", fields, ("k", "heads")) == "hidden_size"


class WithNorms(nn.Module):
    """Takes the class of its norms, as modules for pictures do."""

    def __init__(self, hidden_size: int, norm_layer: type[nn.Module] | None = None, eps: float | None = None) -> None:
        super().__init__()
        kind = norm_layer or nn.LayerNorm
        self.norm, self.eps = kind(hidden_size), eps


def test_a_parameter_that_may_be_none_has_a_number_if_its_name_says_which() -> None:
    built = build_for(WithNorms, {"hidden_size": 6, "layer_norm_eps": 1e-3})
    assert isinstance(built.module, WithNorms)
    assert built.module.eps == 1e-3
    assert built.asked == {"hidden_size": "hidden_size", "eps": "layer_norm_eps"}


class Rotating(nn.Module):
    def __init__(self, hidden_size: int = 8, rope_theta: float = 100000, scale: int = 2) -> None:
        super().__init__()
        self.up, self.theta, self.scale = nn.Linear(hidden_size, hidden_size), rope_theta, scale


def test_a_whole_number_as_default_takes_the_config_s_fraction() -> None:
    built = build_for(Rotating, {"hidden_size": 24, "rope_theta": 500.0})
    assert (built.asked["rope_theta"], built.kept) == ("rope_theta", {"scale": 2})
