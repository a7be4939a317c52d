"""Any module as the reference: two models of one's own, or two versions of one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import porting
from porting.checkpoint import open_checkpoint
from porting.models.bert_heads import BertForPreTraining
from porting.notation.table import parse_table
from porting.plan import PlanError
from porting.verification import Case, VerifyError, verify
from porting.verification.reference import load_reference
from porting.verification.references import LiveReference
from tests.small_checkpoint import CONFIG
from tests.verification.planted import Swapped, tanh_gelu
from tests.verification.user_bert import FUSED_TABLE, HEADED_TABLE, HeadedBert, MyBert


@dataclass(frozen=True)
class Sizes:
    vocab_size: int = 12
    max_position_embeddings: int = 10


class Old(nn.Module):
    """A tagger with a tied output and a configuration of its own."""

    def __init__(self, config: Sizes | None = None) -> None:
        super().__init__()
        self.config = config or Sizes()
        self.words = nn.Embedding(self.config.vocab_size, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(2)])
        self.out = nn.Linear(8, self.config.vocab_size, bias=False)
        self.out.weight = self.words.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.words(input_ids) * attention_mask[..., None]
        for block in self.blocks:
            hidden = hidden + block(hidden)
        result: Tensor = self.out(hidden)
        return result


class New(Old):
    """Rewritten: the same mathematics."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = torch.where(attention_mask.bool()[..., None], self.words(input_ids), 0.0)
        for block in self.blocks:
            hidden = block(hidden).add(hidden)
        result: Tensor = hidden @ self.out.weight.T
        return result


class Wrong(New):
    def __init__(self, config: Sizes | None = None) -> None:
        super().__init__(config)
        self.set_submodule("blocks.1.1", nn.GELU(approximate="tanh"))


def test_two_versions_of_one_need_neither_table_nor_checkpoint() -> None:
    torch.manual_seed(0)
    old = Old()
    report = verify(reference=old, into=New, steps=2)
    assert report.faithful, str(report)
    assert report.reference == f"{Old.__module__}.Old"
    assert report.source == report.reference
    assert {"words", "blocks.0", "blocks.0.1", "blocks.1.2", "."} <= {probe.port for probe in report.probes}
    assert report.learned is not None
    assert len(report.learned.gradients) == 9
    assert report.shown.activation["words.weight"] == 1.0
    wrong = verify(reference=old, into=Wrong)
    assert [probe.port for probe in wrong.guilty] == ["blocks.1.1"]
    assert wrong.table == "the table of equal names"  # it stands in no file: no line of it is named


@pytest.mark.parametrize("held", ["weights", "inputs"])
def test_values_that_are_no_numbers_prove_nothing_and_hide_no_difference(held: str) -> None:
    """What both sides return as NaN is not compared; the rows beside it are."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
    given = torch.randn(7, 3)
    with torch.no_grad():
        if held == "weights":
            reference.get_parameter("2.weight")[1] = torch.nan
        else:
            given[2] = torch.nan
    made = [
        verify(
            reference=reference,
            into=lambda kind=kind: nn.Sequential(nn.Linear(3, 5), kind(), nn.Linear(5, 4)),
            inputs=[Case("points", {"input": given})],
        )
        for kind in (nn.Tanh, nn.Hardtanh)
    ]
    assert made[0].verdict == "unproven"
    assert not made[0].faithful
    assert "not compared where the reference returns NaN or infinite values: " in str(made[0])
    assert ("such values are in the inputs' input" in str(made[0])) == (held == "inputs")
    assert made[1].verdict == "different"
    with pytest.raises(VerifyError, match="all values of the reference are NaN or infinite, on input"):
        verify(reference=reference, into=reference, inputs=[Case("points", {"input": given * torch.nan})])


def test_a_function_that_builds_the_reference() -> None:
    def build() -> nn.Module:
        torch.manual_seed(3)
        return Old()

    assert verify(reference=build, into=New).faithful
    loaded = New()
    loaded.load_state_dict(build().state_dict())
    assert verify(reference=build, into=loaded, loaded=True).faithful
    with torch.no_grad():
        loaded.get_parameter("blocks.0.0.bias")[2] += 1e-3
    broken = verify(reference=build, into=loaded, loaded=True)
    assert broken.shown.differing == ("blocks.0.0.bias",)


def test_inputs_of_ones_own_are_cast_to_the_dtype_of_the_run() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    batch = [Case("points", {"input": torch.randn(7, 3)})]
    make = lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))  # noqa: E731  # a line
    assert verify(reference=reference, into=make, inputs=batch, dtypes=(torch.float32, torch.bfloat16)).faithful
    with pytest.raises(VerifyError, match="vocab_size = None, inputs cannot be made"):
        verify(reference=reference, into=make)


@pytest.mark.slow
def test_two_scratch_models_through_a_table(checkpoint: Path) -> None:
    """A BERT of one's own against the handwritten one: fused attention against separate projections."""
    handwritten = porting.load(checkpoint)
    assert isinstance(handwritten, BertForPreTraining)
    text = FUSED_TABLE
    names = {
        "bert.encoder.layer.{i}.attention.self.{p:query,key,value}": "layers.{i}.attention.{p:query,key,value}",
        "bert.encoder.layer.{i}.attention.output.dense": "layers.{i}.attention.output",
        "bert.encoder.layer.{i}.attention.output.LayerNorm": "layers.{i}.attention_norm",
        "bert.encoder.layer.{i}.intermediate.dense": "layers.{i}.intermediate",
        "bert.encoder.layer.{i}.output.dense": "layers.{i}.output",
        "bert.encoder.layer.{i}.output.LayerNorm": "layers.{i}.output_norm",
        "bert.encoder.layer.{i}.attention.output [": "layers.{i}.attention_norm [",
        "bert.encoder.layer.{i}.attention.self ->": "layers.{i}.attention.core ->",
        "bert.encoder.layer.{i} [": "layers.{i} [",
        "bert.embeddings.word_embeddings": "embeddings.word",
        "bert.embeddings.position_embeddings": "embeddings.position",
        "bert.embeddings.token_type_embeddings": "embeddings.token_type",
        "bert.embeddings.LayerNorm": "embeddings.norm",
        "bert.embeddings [": "embeddings [",
        "bert.pooler": "pooler",
    }
    for old, new in names.items():
        text = text.replace(f'"{old}', f'"{new}')
    table = parse_table(text.replace('prefix = "bert."', ""))
    report = verify(reference=handwritten.bert, into=MyBert(vocabulary=CONFIG["vocab_size"]), table=table,
                    inputs=[batch()], steps=1)  # fmt: skip
    assert report.faithful, str(report)
    assert len(report.probes) > 15
    tanh_gelu(handwritten)
    other = verify(reference=handwritten.bert, into=MyBert(), table=table, inputs=[batch()])
    assert other.guilty[0].port == "blocks.1"


def batch() -> Case:
    torch.manual_seed(0)
    mask = (torch.arange(9) < torch.tensor([[9], [4], [6]])).long()
    ids = torch.randint(0, CONFIG["vocab_size"], (3, 9))
    return Case("three rows", {"input_ids": ids, "attention_mask": mask, "token_type_ids": mask.flip(1) * mask})


@pytest.mark.slow
def test_the_reference_of_a_checkpoint_need_not_be_transformers(checkpoint: Path) -> None:
    """A source gives the port its weights, and something else says what they mean."""
    handwritten = porting.load(checkpoint)
    table = parse_table(
        HEADED_TABLE.partition("[probes]")[0]
        + '[probes]\n"bert.embeddings" = "ln"\n"bert.layers.{i}" = "blocks.{i}"\n"bert.pooler" = "."\n'
    )
    assert verify(checkpoint, HeadedBert, table, reference=handwritten).faithful
    handwritten.get_submodule("bert.layers.2.attention").__class__ = Swapped
    report = verify(checkpoint, HeadedBert, table, reference=handwritten)
    assert [probe.port for probe in report.guilty] == ["blocks.2"]


def test_the_users_reference_is_left_as_it_was() -> None:
    old = Old().double().train()
    before = {name: one.clone() for name, one in old.state_dict().items()}
    assert verify(reference=old, into=lambda: New().double(), steps=2).faithful
    assert old.training
    assert all(torch.equal(one, before[name]) for name, one in old.state_dict().items())
    assert all(parameter.grad is None for parameter in old.parameters())


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(VerifyError, match="neither a checkpoint nor a reference was given"):
        verify()
    with pytest.raises(VerifyError, match="there are a reference and nothing that is compared with it"):
        verify(reference=Old())

    class Larger(New):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(2, 2)

    with pytest.raises(PlanError, match=r"more\.weight"):
        verify(reference=Old(), into=Larger)


def test_the_padding_s_row_is_the_checkpoint_s_where_transformers_sets_it_to_zero(tmp_path: Path) -> None:
    small = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    config: Any = transformers.ChineseCLIPConfig(
        text_config={**small, "vocab_size": 20, "pad_token_id": 0},
        vision_config={**small, "image_size": 8, "patch_size": 4},
        projection_dim=6,
    )
    made: Any = transformers.ChineseCLIPModel(config)
    name = "text_model.embeddings.word_embeddings.weight"
    row = torch.linspace(1, 2, 8)
    with torch.no_grad():
        made.get_parameter(name)[0] = row
    made.save_pretrained(tmp_path)
    loaded: Any = transformers.ChineseCLIPModel.from_pretrained(tmp_path)
    assert not loaded.get_parameter(name)[0].any(), "transformers no longer does it: this may go"
    reference = load_reference(open_checkpoint(str(tmp_path)), "ChineseCLIPModel", torch.float64)
    assert torch.equal(reference.get_parameter(name)[0], row.double())
    assert torch.equal(reference.get_parameter(name)[1:], made.get_parameter(name)[1:].double())


def test_a_constant_that_the_weights_dtype_cannot_hold_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    model[1].register_buffer("scale", torch.tensor(24**0.5, dtype=torch.float64))
    model[1].register_buffer("small", torch.tensor(0.5, dtype=torch.float64))
    living = LiveReference.of(model.double())
    living.keep(torch.float32)
    held = dict(living.module.named_buffers())
    assert float(held["1.scale"]) == 24**0.5
    assert held["1.small"].dtype == living.module.get_parameter("0.weight").dtype == torch.float32


class Sampled(nn.Module):
    """Attends to keys that it draws, in eval mode too, as Informer does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def drawn(self, length: int) -> Tensor:
        return torch.randint(length, (4,))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        result: Tensor = self.out(hidden + hidden[:, self.drawn(x.shape[1])].mean(1, keepdim=True))
        return result


class SampledTwice(Sampled):
    def drawn(self, length: int) -> Tensor:
        return torch.cat([torch.randint(length, (1,)) for _ in range(4)])


class SampledOtherwise(Sampled):
    def drawn(self, length: int) -> Tensor:
        return torch.randperm(length)[:4]


class Unsampled(Sampled):
    def drawn(self, length: int) -> Tensor:
        return torch.arange(4)


@pytest.mark.parametrize(
    ("port", "faithful"), [(Sampled, True), (SampledTwice, True), (SampledOtherwise, False), (Unsampled, False)]
)
def test_a_reference_that_draws_random_numbers_and_its_port_start_from_one_state(
    port: type[Sampled], faithful: bool
) -> None:
    torch.manual_seed(0)
    inputs = [Case("x", {"x": torch.randn(3, 40, 8)})]
    reference = Sampled()
    before = torch.get_rng_state()
    report = verify(reference=reference, into=port, inputs=inputs, causes=False)
    assert torch.equal(before, torch.get_rng_state())
    assert report.faithful is faithful, str(report)
    assert any("draws random numbers" in warning for warning in report.warnings)


class Routed(nn.Module):
    """Two experts that share an activation; each is given its tokens one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.act = nn.Linear(8, 2), nn.SiLU()
        self.experts = nn.Parameter(torch.randn(2, 8, 8))

    def order(self, chosen: Tensor) -> Tensor:
        return torch.arange(len(chosen))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chosen = self.gate(tokens).argmax(-1)
        order = self.order(chosen)
        weights = self.experts[chosen[order]]
        made = self.act(torch.einsum("nij,nj->ni", weights, tokens[order]))
        result = torch.empty_like(made)
        result[order] = made
        return result.view_as(x)


class Sorted(Routed):
    def order(self, chosen: Tensor) -> Tensor:
        return chosen.argsort()


class SortedWrongly(Sorted):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flip(1)


@pytest.mark.parametrize(("port", "faithful"), [(Sorted, True), (SortedWrongly, False)])
def test_an_activation_with_its_rows_in_another_order_is_left_out(port: type[Routed], faithful: bool) -> None:
    torch.manual_seed(0)
    report = verify(reference=Routed(), into=port, inputs=[Case("x", {"x": torch.randn(2, 6, 8)})], causes=False)
    assert report.faithful is faithful, str(report)
    said = any(warning.startswith("a probe was skipped: act: it has the rows") for warning in report.warnings)
    assert said is faithful


class Normed(nn.Module):
    """A layer that ends with its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        ended: Tensor = self.norm(self.rounding(x))
        return ended

    def rounding(self, x: Tensor) -> Tensor:
        """So many steps that rounding comes to several units in the last place."""
        branch: Tensor = self.linear(x)
        for _ in range(4):
            branch = branch + (3 * branch).sin()
        return x + branch


class Ending(nn.Module):
    layer: type[nn.Module] = Normed

    def __init__(self) -> None:
        super().__init__()
        self.config = Sizes()
        self.words = nn.Embedding(12, 16)
        self.blocks = nn.ModuleList([self.layer() for _ in range(2)])
        self.out = nn.Linear(16, 5)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        hidden = self.words(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.returned(hidden)

    def returned(self, hidden: Tensor) -> dict[str, Tensor]:
        return {"logits": self.out(hidden)}


class OwnNorm(Normed):
    """Its norm is a call, and not a module that runs."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.rounding(x)
        return nn.functional.layer_norm(x, (16,), self.norm.weight, self.norm.bias, self.norm.eps)


class WithHidden(Ending):
    layer = OwnNorm

    def returned(self, hidden: Tensor) -> dict[str, Tensor]:
        return {"logits": self.out(hidden), "features": hidden}


def test_a_layer_that_hands_on_its_norm_s_output_rounds_as_the_port_s_layer_does() -> None:
    """The features that the port returns are compared with the last norm, whose exact value the layer hands on."""
    report = verify(reference=Ending(), into=WithHidden(), trials=False)
    returned = {probe.port: probe.reference for probe in report.probes if probe.port.startswith(".")}
    assert returned[". -> features"] == "blocks.1.norm"
    last = next(probe for probe in report.probes if probe.port == "blocks.1")
    assert (last.rounding["float32"].isolated or 9.0) < 2.0, str(report)
