"""Where nothing was found, that is said, and how far it came; nothing is called impossible that was not shown."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.causes import Finding
from porting.suggesting import Verdict, suggest
from porting.suggesting.verdict.proof import Proof, prove
from porting.suggesting.verdict.reasons import fine, known
from porting.verification import cause_search, fixes
from tests.suggesting import oracle
from tests.suggesting.test_verdicts import NormedAgain, Plain, each
from tests.zoo.parts import Config


class Odd(nn.Module):
    """A function that no catalogue has."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x) + 0.3 * torch.sin(3 * x)


class OddActivation(Plain):
    def change(self) -> None:
        for layer in each(self):
            layer.act = Odd()  # type: ignore[assignment]  # the flaw


class Mixed(nn.Module):
    """A function in which features meet features: whether other weights could make up for it is not known."""

    def forward(self, x: Tensor) -> Tensor:
        number = torch.arange(x.shape[-1], device=x.device, dtype=x.dtype)
        return F.gelu(x * torch.sin(3 * (x @ torch.cos(number[:, None] * number))))


class MixedActivation(Plain):
    def change(self) -> None:
        for layer in each(self):
            layer.act = Mixed()  # type: ignore[assignment]  # the flaw


class Slightly(nn.Module):
    """The same, by very little."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x) + 1e-4 * torch.sin(3 * x)


class SlightlyOdd(Plain):
    def change(self) -> None:
        for layer in each(self):
            layer.act = Slightly()  # type: ignore[assignment]  # the flaw


class Typed(nn.Module):
    """The exact GELU with the root of a half as somebody typed it."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(0.70710678 * x))


class TypedShort(nn.Module):
    """The same with four digits less."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / 1.41421))


class FewDigits(Plain):
    def change(self) -> None:
        for layer in each(self):
            layer.act = TypedShort()  # type: ignore[assignment]  # the flaw


class TypedConstant(Plain):
    def change(self) -> None:
        for layer in each(self):
            layer.act = Typed()  # type: ignore[assignment]  # the flaw


class Unclear(Plain):
    def forward(self, ids: Tensor, segments: Tensor, thing: Tensor | None = None) -> Tensor:  # type: ignore[override]
        seen = torch.ones_like(ids, dtype=torch.bool) if thing is None else thing
        return super().forward(ids, seen, segments)


class WithoutUse(Plain):
    def forward(self, ids: Tensor, segments: Tensor, thing: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(ids, torch.ones_like(ids, dtype=torch.bool), segments)


class WithHead(Plain):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        width = self.norm.normalized_shape[0]
        self.pool = nn.Linear(width, width)

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        return super().forward(ids, keep, segments)


@pytest.mark.slow
def test_a_function_that_no_weights_make_up_for_is_impossible(source: Path) -> None:
    found = suggest(source, OddActivation)
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    shown = [reason for reason in found.reasons if reason.shown]
    assert len(shown) == 1, shown
    assert "sin, which the reference does not do" in shown[0].said
    assert shown[0].places[:2] == ("layers.0.act", "layers.1.act")


@pytest.mark.slow
def test_a_function_of_which_nothing_is_shown_is_not_impossible(source: Path) -> None:
    found = suggest(source, MixedActivation)
    assert found.verdict is Verdict.NOT_FOUND, str(found)
    assert found.stop is not None
    assert found.stop.behind == "layers.0.up"
    assert found.stop.at == "layers.0.down.weight"
    assert 0 < found.stop.proven < found.stop.places
    assert found.stop.near[0].name == "bert.encoder.layer.0.output.dense.weight"
    assert found.stop.near[0].difference is not None
    assert 0.02 < found.stop.near[0].difference < 1
    assert found.proof.startswith(f"everything up to layers.0.up is proven ({found.stop.proven} of {found.stop.places}")
    assert not any(reason.shown for reason in found.reasons)
    assert any("sin, which the reference does not do" in reason.said for reason in found.reasons)


@pytest.mark.slow
def test_a_small_difference_without_a_cause_is_not_called_approximate(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cause_search, "REPAIRING", 0.0)  # either would tell the cause
    monkeypatch.setattr(fixes, "CHANGING", 0.0)
    found = suggest(source, SlightlyOdd)
    assert found.verdict is Verdict.NOT_FOUND, str(found)
    assert [reason.kind for reason in found.reasons] == ["unknown"]
    assert found.reasons[0].size is not None
    assert 1e-6 < found.reasons[0].size < 1e-3


@pytest.mark.slow
def test_a_difference_that_float32_cannot_tell_is_rounding(source: Path) -> None:
    found = suggest(source, TypedConstant)
    assert found.verdict is Verdict.APPROXIMATE, str(found)
    assert [reason.kind for reason in found.reasons] == ["rounding"]
    said = "layers.{i}.act is rounded otherwise, as with a constant in float32 or in few digits: off by"
    assert said in found.reasons[0].said
    assert found.difference is not None
    assert 1e-12 < found.difference < 1e-8


@pytest.mark.slow
def test_a_constant_of_few_digits_is_an_approximation_also_without_a_name(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cause_search, "REPAIRING", 0.0)  # as above
    monkeypatch.setattr(fixes, "CHANGING", 0.0)
    found = suggest(source, FewDigits)
    assert found.verdict is Verdict.APPROXIMATE, str(found)
    assert [reason.kind for reason in found.reasons] == ["constant"]
    assert found.reasons[0].size is not None
    assert 1e-7 < found.reasons[0].size < 1e-5


@pytest.mark.slow
def test_all_is_proven_but_what_is_returned(source: Path) -> None:
    found = suggest(source, NormedAgain)
    assert found.verdict is Verdict.NOT_FOUND
    assert found.stop is not None
    assert found.stop.proven == found.stop.places > 5
    assert found.stop.behind == "layers.1"  # of the twin's two


@pytest.mark.slow
def test_a_search_that_meets_its_bound_says_how_far_it_came(source: Path) -> None:
    found = suggest(source, Plain, trials=4)
    assert found.verdict is Verdict.NOT_FOUND
    assert found.reasons[-1].kind == "bound"
    assert "the limit was met before the search was complete" in found.reasons[-1].said
    assert found.stop is not None
    assert (found.stop.behind, found.stop.at) == ("layers.0.act", "layers.0.down.weight")
    assert '"bert.embeddings.LayerNorm.{w:weight,bias}" = "norm.{w:weight,bias}"' in found.text
    at_once = suggest(source, Plain, trials=0)
    assert at_once.verdict is Verdict.NOT_FOUND
    assert at_once.stop is not None
    assert at_once.stop.said.startswith("nothing could be proven; then nothing fits tok.weight")


@pytest.mark.slow
def test_an_argument_whose_name_tells_nothing_is_the_mask_if_it_hides_padding(source: Path) -> None:
    found = suggest(source, Unclear)
    assert found.verdict is Verdict.TRUNK, str(found)
    assert "Without padding" not in " ".join(found.details())
    assert re.search('^"attention_mask.*" = "thing.*"$', found.text, re.MULTILINE)
    told = {"input_ids": "ids", "token_type_ids": "segments", "attention_mask": "thing -> bool"}
    assert suggest(source, Unclear, inputs=told).verdict is Verdict.TRUNK


@pytest.mark.slow
def test_an_argument_that_hides_nothing_may_be_the_mask(source: Path) -> None:
    found = suggest(source, WithoutUse)
    assert found.verdict is Verdict.TRUNK, str(found)
    assert "Without padding: the forward was given no mask; if it is one of 'thing', name it in the inputs" in str(
        found
    )


@pytest.mark.slow
def test_what_has_no_counterpart_is_named_on_both_sides_with_what_it_may_be(source: Path) -> None:
    found = suggest(source, WithHead)
    assert found.verdict is Verdict.TRUNK, str(found)
    ours = {one.name: one for one in found.unmapped if one.side == "module"}
    theirs = {one.name: one for one in found.unmapped if one.side == "checkpoint"}
    assert set(ours) == {"pool.weight", "pool.bias"}
    pool, pooler = ours["pool.weight"], theirs["bert.pooler.dense.weight"]
    assert pool.where == "never"
    assert pool.near[0].name == "bert.pooler.dense.weight"
    assert pool.near[0].shape == pool.shape
    assert pool.near[0].where == pooler.where
    assert pooler.where.startswith("behind bert.encoder.layer.")
    assert pooler.near[0].name == "pool.weight"


def finding(name: str, probe: str, size: float = 0.5, residual: float = 1e-8) -> Finding:
    return Finding(name=name, probes=(probe,), difference=size, residual=residual)


@pytest.mark.slow
def test_a_cause_shows_nothing_where_weights_were_guessed(source: Path) -> None:
    """The same behind a difference without a known cause: the weights that the cause was found with may be wrong.

    A cause that reproduces the module to the last digits was found with the right weights, so it is shown anywhere.
    """
    proof = suggest_proof(source)
    assert proof.report is not None
    order = [probe.port for probe in proof.report.probes]
    early, late = finding("residual missing", order[3]), finding("ReLU for another activation", order[7])
    riddle = finding("", order[5])
    report = replace(proof.report, causes=(early, riddle, late))
    proof = replace(proof, report=report)
    assert [(one.said.split(",")[0], one.shown) for one in known(proof)] == [
        ("residual missing", True),
        ("ReLU for another activation", False),
    ]
    assert not any(one.shown for one in known(proof, guessed=True))
    exact = replace(late, residual=1e-15)
    assert known(replace(proof, report=replace(report, causes=(riddle, exact))), guessed=True)[0].shown
    slight = replace(report, causes=(finding("residual missing", order[3], 1e-4),))
    assert not known(replace(proof, report=slight))[0].shown
    rounded = (finding("rotary theta", order[3], 5e-9), finding("GELU factor", order[3], 5e-9))
    tiny = replace(proof, report=replace(report, causes=rounded))
    assert [one.said.split(",")[0] for one in known(tiny)] == ["GELU factor"]
    assert ["rounded otherwise" in one.said for one in fine(tiny)] == [True]


def suggest_proof(source: Path) -> Proof:
    """A proof, with the activations that were compared."""
    kept: list[Proof] = []

    def proven(*args: Any, **named: Any) -> Proof:  # as the function that it stands for
        kept.append(prove(*args, **named))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("porting.suggesting.pipeline.prove", proven)
        suggest(source, Plain)
    return kept[0]


class NewHead(Plain):
    """As one is fine-tuned: what stands at the pooler's place is no pooler."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.classify = nn.Linear(self.norm.normalized_shape[0], 7)

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        logits: Tensor = self.classify(super().forward(ids, keep, segments)[:, 0])
        return logits


@pytest.mark.slow
def test_a_new_head_is_no_fault_of_the_trunk(source: Path) -> None:
    found = suggest(source, NewHead)
    assert found.verdict is Verdict.TRUNK, str(found)
    assert found.missing == ("bert.pooler", "cls")
    assert [one.name for one in found.unmapped if one.side == "module"] == ["classify.weight", "classify.bias"]
    assert '"classify.{*rest}" = "the checkpoint has none"' in found.text


class Averaging(Plain):
    """A head over the mean of the tokens, whose first matrix has the shape of the checkpoint's."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        width = self.norm.normalized_shape[0]
        self.classify = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 7))

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        weight = keep[..., None] / keep.sum(1)[:, None, None]
        logits: Tensor = self.classify((super().forward(ids, keep, segments) * weight).sum(1))
        return logits


@pytest.mark.slow
def test_a_head_over_the_mean_of_tokens_is_none_of_a_checkpoint_that_has_one_for_each_token(tmp_path: Path) -> None:
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 40}
    oracle.source("BertForMaskedLM", {**sizes, "vocab_size": 53, "max_position_embeddings": 31}, tmp_path)
    found = suggest(tmp_path, Averaging)
    assert found.verdict is Verdict.TRUNK, str(found)
    ours = {one.name for one in found.unmapped if one.side == "module"}
    assert ours == {f"classify.{number}.{kind}" for number in (0, 2) for kind in ("weight", "bias")}
