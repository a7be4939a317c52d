"""A twin has sizes with which the reference runs, and the module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from porting.errors import VerifyError
from porting.suggesting import Verdict, suggest
from porting.suggesting.draft.probes import probes
from porting.suggesting.subjects.model_pair import runnable
from porting.suggesting.subjects.twin import SMALL, make_twin, measures, shrink
from tests.suggesting.oracle import source

TIED: Mapping[str, Mapping[str, Any]] = {
    "RwkvModel": {"vocab_size": 113, "hidden_size": 48, "num_hidden_layers": 3, "context_length": 40},
    "Mamba2Model": {
        "vocab_size": 112, "hidden_size": 48, "num_hidden_layers": 3, "expand": 2, "head_dim": 16, "num_heads": 6,
        "n_groups": 1, "state_size": 12, "chunk_size": 8,
    },
    "HubertModel": {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 40,
        "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 16,
    },
}  # fmt: skip
"""Architectures in which sizes depend on one another."""


@pytest.mark.parametrize("architecture", TIED)
def test_a_reference_whose_sizes_depend_on_one_another_has_a_twin(architecture: str, tmp_path: Path) -> None:
    kind: Any = getattr(transformers, architecture)
    config = kind.config_class(**TIED[architecture]).to_dict()
    tried = 0
    for number, to in enumerate(measures(config)):
        tried += 1
        try:
            twin = runnable(make_twin(config, architecture, tmp_path / str(number), small=True, seed=0, to=to))
        except VerifyError:
            continue
        assert twin.config["num_hidden_layers"] == 2
        break
    else:
        pytest.fail("no twin runs")
    assert (tried > 1) == (architecture != "RwkvModel")


def test_what_the_reference_cannot_run_is_an_error_of_the_reference(tmp_path: Path) -> None:
    fields = {**TIED["RwkvModel"], "attention_hidden_size": 24}
    config = transformers.RwkvConfig(**fields).to_dict()
    twin = make_twin(config, "RwkvModel", tmp_path, small=False, seed=0, to=SMALL)
    with pytest.raises(VerifyError, match="RwkvModel does not run on input_ids, attention_mask: RuntimeError"):
        runnable(twin)


def test_a_field_that_is_a_head_s_size_stays_so() -> None:
    config = {
        "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16,
        "num_hidden_layers": 3, "vocab_size": 113,
    }  # fmt: skip
    small = shrink(config)
    assert small["head_dim"] == small["query_pre_attn_scalar"] == SMALL.head_size
    assert small["sliding_window"] == 16


class ChannelNorm(nn.Module):
    """A norm over the channels of an image, [b c h w]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        normed = centred / (centred.pow(2).mean(1, keepdim=True) + self.eps).sqrt()
        found: Tensor = self.weight[:, None, None] * normed + self.bias[:, None, None]
        return found


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        found: Tensor = x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)
        return found


class Convolutions(nn.Module):
    """A ConvNeXt that needs images of a width that sixteen divides."""

    def __init__(self, config: Any) -> None:  # it reads what it needs
        super().__init__()
        first, *widths = config.hidden_sizes
        self.stem = nn.Sequential(nn.Conv2d(3, first, 4, 4), ChannelNorm(first, 1e-6))
        self.stages = nn.ModuleList([Block(first)])
        for before, width in zip((first, *widths), widths, strict=False):
            self.stages.append(nn.Sequential(ChannelNorm(before, 1e-6), nn.Conv2d(before, width, 2, 2)))
            self.stages.append(Block(width))
        self.norm = nn.LayerNorm(config.hidden_sizes[-1], eps=config.layer_norm_eps)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-1] % 16:
            raise ValueError("the windows do not fit")
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        found: Tensor = self.norm(x.mean((2, 3)))
        return found


@pytest.mark.slow
def test_images_are_as_large_as_the_module_needs(tmp_path: Path) -> None:
    source("ConvNextModel", {"hidden_sizes": [8, 12], "depths": [1, 1], "num_stages": 2}, tmp_path)
    found = suggest(tmp_path, Convolutions)
    assert found.verdict is Verdict.EXACT, str(found)


def test_what_has_a_counterpart_is_not_compared_with_what_is_near() -> None:
    torch.manual_seed(0)
    one = torch.randn(3, 7, 8, dtype=torch.float64)
    near = one + 1e-3 * torch.randn_like(one)
    ours = {"down": one, "down.conv": one, "block": near}
    theirs = {"stage": near, "stage.down": one, "stage.block": near}
    lines = dict(probes(ours, theirs, [], loose=True))
    assert lines["stage.down"] in {"down", "down.conv"}
    assert sorted(lines) in (["stage", "stage.down"], ["stage.block", "stage.down"])
    other = probes({"block": near}, {"stage": one}, [], loose=True)
    assert other == [("stage", "block")]
    assert probes({"block": near}, {"stage": one}, []) == []


class Listens(nn.Module):
    """Takes sounds as they were sampled; its convolution over positions has a weight norm."""

    def __init__(self, config: Any) -> None:  # it reads what it needs
        super().__init__()
        fields = {name: getattr(config, name) for name in TIED["HubertModel"]}
        self.net = transformers.HubertModel(transformers.HubertConfig(**fields))

    def forward(self, wave: Tensor) -> Tensor:
        found: Tensor = self.net(wave).last_hidden_state
        return found


@pytest.mark.slow
def test_sampled_sounds_and_a_weight_norm_that_both_have(tmp_path: Path) -> None:
    source("HubertModel", TIED["HubertModel"], tmp_path)
    found = suggest(tmp_path, Listens)
    assert found.verdict is Verdict.EXACT, str(found)
    assert "conv.parametrizations.weight.original{i}" in found.text


@pytest.mark.parametrize(("rank", "small"), [(4, 3), (7, 7)])
def test_the_rank_of_mamba_s_time_step_follows_the_width_if_the_checkpoint_s_does(rank: int, small: int) -> None:
    config = {"hidden_size": 64, "time_step_rank": rank, "num_hidden_layers": 3, "vocab_size": 113, "state_size": 16}
    made = shrink(config)
    assert made["hidden_size"] == 40
    assert made["time_step_rank"] == small
