"""What one may well get wrong in a relative of BERT: the proof catches each and places it where it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import porting
from porting.models.albert import Albert
from porting.models.bert import BertEmbeddings
from porting.models.distilbert import DistilBertPooler, UntypedEmbeddings
from porting.models.electra import ElectraDiscriminatorHead, ElectraPooler
from porting.models.mpnet import RelativeBias
from porting.models.prenorm_bert import PreNormLayer
from porting.models.unpadded import Rows
from porting.verification import verify
from tests.families.pairs import ALBERT, BERT, DISTILBERT, ELECTRA, LONG_ROBERTA, MPNET, Pair
from tests.families.ported import Ported, make

pytestmark = pytest.mark.few(2)


class NoBias(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own signature
        return F.linear(input, self.weight)


class NoNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own signature
        return input


class Alternating(Albert):
    def depths(self) -> Iterator[nn.Module]:
        """0 1 0 1 in the place of 0 0 1 1."""
        return (self.layers[depth % len(self.layers)] for depth in range(self.config.num_hidden_layers))


class SameWayRound(RelativeBias):
    def forward(self, length: int) -> Tensor:
        """Query minus key in the place of key minus query."""
        return super().forward(length).transpose(-1, -2)


class NearSighted(RelativeBias):
    def forward(self, length: int) -> Tensor:
        """From 16 tokens on a distance is 16."""
        bias = super().forward(17)
        places = torch.arange(length)
        distance = (places[None, :] - places[:, None]).clamp(-16, 16)
        return torch.where(distance > 0, bias[..., 0, distance.clamp_min(0)], bias[..., (-distance).clamp_min(0), 0])


class TwoLater(BertEmbeddings):
    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Positions that start two rows later, as if the rows in front had not been cut off."""
        places = (torch.arange(input_ids.shape[-1]) + 2).clamp(max=self.position.num_embeddings - 1)
        return super().forward(input_ids, token_type_ids, places[None])


class PlacedAgain(UntypedEmbeddings):
    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """A thousandth of the positions is added behind the norm."""
        places: Tensor = self.position(torch.arange(input_ids.shape[-1]))
        return super().forward(input_ids, token_type_ids, position_ids) + 1e-3 * places


class TanhPooler(DistilBertPooler):
    def forward(self, hidden: Tensor) -> Tensor:
        """As in BERT."""
        return torch.tanh(self.dense(hidden[:, 0]))


class TanhSummary(ElectraPooler):
    def forward(self, hidden: Tensor) -> Tensor:
        """As in BERT."""
        return torch.tanh(self.dense(hidden[:, 0]))


class Unactivated(ElectraDiscriminatorHead):
    def forward(self, hidden: Tensor) -> Tensor:
        """One linear layer after the other."""
        logits: Tensor = self.output(self.dense(hidden))
        return logits.squeeze(-1)


class NormedStream(PreNormLayer):
    def forward(
        self, hidden: Tensor, bias: Tensor | Rows | None = None, *, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """What is added to is the normed state."""
        hidden = self.attention_norm(hidden)
        attended, probabilities = self.attention(hidden, bias, output_attentions=output_attentions)
        hidden = hidden + attended
        return hidden + self.output(self.activation(self.intermediate(self.intermediate_norm(hidden)))), probabilities


def becomes(path: str, kind: type[nn.Module]) -> Callable[[nn.Module], None]:
    """The module at ``path`` runs the code of ``kind`` and keeps all that it holds."""

    def plant(model: nn.Module) -> None:
        model.get_submodule(path).__class__ = kind

    return plant


def replaced(path: str, other: nn.Module) -> Callable[[nn.Module], None]:
    """Another module, without weights, stands at ``path``."""
    parent, _, name = path.rpartition(".")

    def plant(model: nn.Module) -> None:
        setattr(model.get_submodule(parent), name, other)

    return plant


@dataclass(frozen=True)
class Fault:
    """What is planted in which checkpoint's port, and the points that are then guilty: these and no others."""

    name: str
    pair: Pair
    plant: Callable[[nn.Module], None]
    guilty: tuple[str, ...]


ALBERT_PAIR = Pair("albert", "AlbertForPreTraining", ALBERT)
DISCRIMINATOR = Pair("electra", "ElectraForPreTraining", ELECTRA)
CHOICE = Pair("electra", "ElectraForMultipleChoice", ELECTRA)
ELECTRA_CLASSES = Pair("electra", "ElectraForSequenceClassification", ELECTRA)
DISTILBERT_PAIR = Pair("distilbert", "DistilBertForSequenceClassification", DISTILBERT)
MPNET_PAIR = Pair("mpnet", "MPNetForMaskedLM", MPNET)
ROBERTA_PAIR = Pair("roberta", "RobertaForSequenceClassification", LONG_ROBERTA)
PRE_NORM = Pair("roberta_prelayernorm", "RobertaPreLayerNormForMaskedLM", LONG_ROBERTA)
MEGATRON = Pair("megatron_bert", "MegatronBertForPreTraining", BERT)

SCORES = tuple(f"bert.layers.{layer}.attention.core -> scores" for layer in range(2))

GELU_TWICE = ("bert.layers.1.activation", "bert.layers.1.activation #2")  # a layer serves two depths

EMBEDDINGS = ("bert.embeddings",)
PROJECTION = "bert.embeddings.projection"

FAULTS = (
    Fault("projection without bias", ALBERT_PAIR, becomes(PROJECTION, NoBias), EMBEDDINGS),
    Fault("exact GELU", ALBERT_PAIR, replaced("bert.layers.1.activation", nn.GELU()), GELU_TWICE),
    Fault("projection without bias", DISCRIMINATOR, becomes(PROJECTION, NoBias), EMBEDDINGS),
    Fault("no activation", DISCRIMINATOR, becomes("discriminator", Unactivated), ("discriminator",)),
    Fault("tanh for GELU", CHOICE, becomes("bert.pooler", TanhSummary), ("bert.pooler",)),
    Fault("tanh for GELU", ELECTRA_CLASSES, replaced("classifier.activation", nn.Tanh()), ("classifier",)),
    Fault("positions again", DISTILBERT_PAIR, becomes("bert.embeddings", PlacedAgain), EMBEDDINGS),
    Fault("tanh for ReLU", DISTILBERT_PAIR, becomes("bert.pooler", TanhPooler), ("classifier",)),
    Fault("distances the other way", MPNET_PAIR, becomes("bert.relative_bias", SameWayRound), SCORES),
    Fault("far is near", MPNET_PAIR, becomes("bert.relative_bias", NearSighted), SCORES),
    Fault("positions two later", ROBERTA_PAIR, becomes("bert.embeddings", TwoLater), EMBEDDINGS),
    Fault("no tanh", ROBERTA_PAIR, replaced("classifier.activation", nn.Identity()), ("classifier",)),
    Fault(
        "the normed state is added to",
        PRE_NORM,
        becomes("bert.layers.1", NormedStream),
        ("bert.layers.1.intermediate_norm", "bert.layers.1"),  # each is given what was added to it
    ),
    Fault("no last norm", PRE_NORM, becomes("bert.norm", NoNorm), ("bert.norm",)),
    Fault(
        "embeddings normed",
        MEGATRON,
        replaced("bert.embeddings.norm", nn.LayerNorm(24, elementwise_affine=False)),
        EMBEDDINGS,
    ),
)


@pytest.fixture(scope="module")
def ported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Pair], Ported]:
    @cache
    def made(architecture: str) -> Path:
        return tmp_path_factory.mktemp(architecture)

    def find(pair: Pair) -> Ported:
        directory = made(pair.architecture)
        return Ported(pair, directory) if any(directory.iterdir()) else make(pair, directory)

    return find


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.pair.architecture}: {fault.name}")
def test_a_fault_of_a_room_is_caught_and_placed(fault: Fault, ported: Callable[[Pair], Ported]) -> None:
    one = ported(fault.pair)
    module = one.load()
    fault.plant(module)
    report = verify(one.directory, module, fault.pair.table, loaded=True, causes=False)
    assert report.verdict == "different"
    assert tuple(probe.port for probe in report.guilty) == fault.guilty
    assert report.first_difference is report.guilty[0]


@pytest.mark.slow
def test_layers_that_take_turns_are_caught_at_the_first_that_is_not_the_references(
    ported: Callable[[Pair], Ported],
) -> None:
    one = ported(ALBERT_PAIR)
    module = one.load()
    becomes("bert", Alternating)(module)
    report = verify(one.directory, module, "albert", loaded=True, causes=False)
    assert report.verdict == "different"
    assert report.guilty[0].port.startswith("bert.layers.0.attention"), [probe.port for probe in report.guilty]


@pytest.mark.slow
def test_without_a_fault_each_is_faithful(ported: Callable[[Pair], Ported]) -> None:
    """What is guilty above is the fault, not the pair."""
    for pair in {fault.pair.architecture: fault.pair for fault in FAULTS}.values():
        assert porting.verify(ported(pair).directory, dtypes=()).faithful
