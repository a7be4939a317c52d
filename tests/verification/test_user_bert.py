"""Somebody's own BERT with a table of their own: it verifies, and a planted bug is named in their terms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from porting.notation.table import parse_table
from porting.verification import Report, verify
from tests.small_checkpoint import CONFIG
from tests.verification.user_bert import FUSED_TABLE, HEADED_TABLE, TORCH_TABLE, HeadedBert, MyBert, TorchBert

PORTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "fused, sequence first": (lambda: MyBert(vocabulary=CONFIG["vocab_size"]), FUSED_TABLE),
    "a module for each head": (HeadedBert, HEADED_TABLE),
    "torch's own encoder": (TorchBert, TORCH_TABLE),
}


def ported(path: Path, name: str, change: Callable[[nn.Module], None] | None = None) -> Report:
    make, table = PORTS[name]
    module = make()
    if change:
        change(module)
    return verify(path, module, parse_table(table), architecture="BertModel", dtypes=(torch.float32, torch.bfloat16))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PORTS)
def test_it_verifies(checkpoint: Path, name: str) -> None:
    report = ported(checkpoint, name)
    assert report.faithful, str(report)
    assert report.skipped == ()
    assert report.warnings == ()
    assert report.shown.copy == report.shown.nothing == ()
    assert max(probe.meaning.worst for probe in report.probes) <= 1e-12


@pytest.mark.slow
def test_fused_projections_are_compared_with_all_three(checkpoint: Path) -> None:
    report = ported(checkpoint, "fused, sequence first")
    stem = "encoder.layer.0.attention.self"
    (fused,) = [probe for probe in report.probes if probe.port == "blocks.0.attn.qkv"]
    assert fused.reference == f"{stem}.query + {stem}.key + {stem}.value"


class Transposing(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own signature
        return nn.functional.linear(input, self.weight.T, self.bias)


@pytest.mark.slow
def test_a_bug_is_named_in_the_users_terms(checkpoint: Path) -> None:
    def plant(module: nn.Module) -> None:
        module.get_submodule("blocks.2.attn.proj").__class__ = Transposing

    report = ported(checkpoint, "fused, sequence first", plant)
    assert report.verdict == "different"
    assert [probe.port for probe in report.guilty] == ["blocks.2.ln1"]
    assert report.guilty[0].span == ("blocks.2.attn", "blocks.2.attn.proj", "blocks.2", "blocks.2.ln1")
    assert "first wrong module: blocks.2.ln1" in report.details()


@pytest.mark.slow
def test_a_bug_in_one_head_is_placed_in_that_head(checkpoint: Path) -> None:
    def plant(module: nn.Module) -> None:
        head = module.get_submodule("blocks.1.heads.2.k")
        assert isinstance(head, nn.Linear)
        head.register_forward_hook(lambda module, args, output: output - module.bias)

    report = ported(checkpoint, "a module for each head", plant)
    assert [probe.port for probe in report.guilty] == ["blocks.1.heads.2.k"]


def test_a_bug_in_torchs_own_layers_is_seen(checkpoint: Path) -> None:
    def plant(module: nn.Module) -> None:
        norm = module.get_submodule("encoder.layers.1.norm2")
        assert isinstance(norm, nn.LayerNorm)
        norm.eps = 1e-5

    report = ported(checkpoint, "torch's own encoder", plant)
    assert [probe.port for probe in report.guilty] == ["encoder.layers.1"]
    assert report.guilty[0].span[-1] == "encoder.layers.1.norm2"


@pytest.mark.slow
def test_a_table_that_says_the_mask_the_wrong_way_round_is_caught(checkpoint: Path) -> None:
    make, table = PORTS["fused, sequence first"]
    report = verify(
        checkpoint,
        make(),
        parse_table(table.replace("mask -> padding", "mask -> bool")),
        architecture="BertModel",
        causes=False,
    )
    assert report.verdict == "different"
    assert [probe.port for probe in report.guilty] == [f"blocks.{layer}.attn -> scores" for layer in range(3)]


def test_a_persistent_buffer_is_shown_like_a_parameter(checkpoint: Path) -> None:
    def change(module: nn.Module) -> None:
        del module.places
        module.register_buffer("places", torch.zeros(24, 24))

    report = ported(checkpoint, "fused, sequence first", change)
    assert report.shown.activation["places"] == 1.0
    assert report.complete
