"""Twelve ways of writing a BERT, each with its table: it loads, computes the same, goes back, shows a bug."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import nn

import porting
from porting.errors import PortingWarning
from porting.plan.plan import PlanError
from tests.small_checkpoint import CONFIG, write_checkpoint
from tests.zoo.alternating import Alternating
from tests.zoo.interleaved import Interleaved
from tests.zoo.linear_layers import LinearLayers, Unbiased
from tests.zoo.one_table import OneTable
from tests.zoo.parameter_dict import Functional
from tests.zoo.per_head import PerHead
from tests.zoo.position_buffer import PositionAttribute, PositionBuffer
from tests.zoo.raw_heads import RawHeads
from tests.zoo.sequence_first import SequenceFirst
from tests.zoo.three_segments import ThreeSegments
from tests.zoo.type_major import TypeMajor

pytestmark = pytest.mark.few(1)

HERE = Path(__file__).parent
Bug = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Animal:
    """A model of the zoo.

    Attributes:
        table: its table, the name of the file.
        kind: its class.
        bug: a mistake that keeps every shape.
        guilty: the first probe that the mistake is found at.
        unseen: how many parameters no probe shows: what softmax hides, where no probe looks before it.
        approximate: the verdict's float64 difference lies in this range; None where it must be faithful.
    """

    table: str
    kind: type[nn.Module]
    bug: Bug
    guilty: str
    unseen: int = 0
    approximate: tuple[float, float] | None = None

    def __str__(self) -> str:
        return self.table


def swap(one: str, other: str) -> Bug:
    """Two parameters change places."""

    def plant(module: nn.Module) -> None:
        first, second = module.get_parameter(one), module.get_parameter(other)
        first.data, second.data = second.data, first.data

    return plant


def put(path: str, **values: object) -> Bug:
    """Attributes of a part have other values."""

    def plant(module: nn.Module) -> None:
        for name, value in values.items():
            setattr(module.get_submodule(path), name, value)

    return plant


def shift_positions(module: nn.Module) -> None:
    """Positions counted from 1 and not from 0."""
    table = module.get_buffer("pe")
    table.copy_(table.roll(-1, dims=1))


def transpose(name: str) -> Bug:
    """A square matrix is transposed."""

    def plant(module: nn.Module) -> None:
        parameter = module.get_parameter(name)
        parameter.data = parameter.data.transpose(-1, -2).contiguous()

    return plant


TANH = nn.GELU(approximate="tanh")
QK = ("attention.linear_layers.0.weight", "attention.linear_layers.1.weight")

ZOO = (
    Animal("three_segments", ThreeSegments, put("norm", eps=1e-3), "norm"),
    Animal(
        "linear_layers",
        LinearLayers,
        swap(*(f"transformer_blocks.1.{name}" for name in QK)),
        "transformer_blocks.1.attention.linear_layers.0",
    ),
    Animal(
        "unbiased",
        Unbiased,
        put("transformer_blocks.1.output_sublayer.norm", eps=1e-3),
        "transformer_blocks.0.input_sublayer",
        approximate=(1e-8, 1e-5),
    ),
    Animal("raw_heads", RawHeads, swap("layers.1.W_Q", "layers.1.W_K"), "layers.1 -> probabilities", unseen=3),
    Animal("type_major", TypeMajor, transpose("attentions.2.out_lin.weight"), "layer_norm1.2"),
    Animal("alternating", Alternating, put("layers.3.net", **{"1": TANH}), "layers.3"),
    Animal("position_buffer", PositionBuffer, shift_positions, "norm"),
    Animal("one_table", OneTable, put("", vocab=CONFIG["vocab_size"] - 1), "norm"),
    Animal("sequence_first", SequenceFirst, put("layers.0.attn", num_heads=6, head_dim=4), "layers.0.ln1"),
    Animal("interleaved", Interleaved, put("layers.1.mlp", **{"1": TANH}), "layers.1"),
    Animal(
        "per_head",
        PerHead,
        swap("layers.2.heads.0.v.weight", "layers.2.heads.1.v.weight"),
        "layers.2.heads.0.v",
    ),
    Animal("parameter_dict", Functional, transpose("params.wo_1"), ".", unseen=3),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("zoo") / "bert")


@pytest.mark.slow
@pytest.mark.parametrize("animal", ZOO, ids=str)
def test_it_is_bert(animal: Animal, checkpoint: Path, tmp_path: Path) -> None:
    table = HERE / f"{animal.table}.toml"
    report = porting.verify(checkpoint, animal.kind, table)
    worst = max(probe.meaning.worst for probe in report.probes)
    if animal.approximate is None:
        assert report.faithful, str(report)
    else:
        least, most = animal.approximate
        assert (report.verdict, report.faithful, report.as_claimed) == ("approximate", False, True)
        assert least < worst < most
        assert "comes near to" in str(report)
        assert "adds eps to the unbiased deviation" in str(report)
    assert (len(report.shown.copy), report.shown.nothing, report.skipped) == (animal.unseen, (), ())

    expected = nullcontext() if animal.approximate is None else pytest.warns(PortingWarning, match="approximate by")
    with expected:
        module = porting.load(checkpoint, animal.kind, table)
    porting.export(module, table, tmp_path / "back")
    before, after = ((place / "model.safetensors").read_bytes() for place in (checkpoint, tmp_path / "back"))
    assert before == after

    animal.bug(module)
    broken = porting.verify(checkpoint, module, table, loaded=True, causes=False)
    assert broken.verdict == "different"
    assert broken.guilty[0].port == animal.guilty, str(broken)
    if animal.approximate is not None:  # the mistake is larger than what the approximation explains
        assert max(probe.meaning.worst for probe in broken.probes) > 10 * animal.approximate[1]


def test_positions_in_a_plain_attribute_cannot_be_loaded(checkpoint: Path) -> None:
    hint = r"it keeps such a tensor, but not as a part of its state: self\.register_buffer\('pe', \.\.\.\)"
    with pytest.raises(PlanError, match=rf"position_embeddings\.weight.*{hint}"):
        porting.load(checkpoint, PositionAttribute, HERE / "position_buffer.toml")
