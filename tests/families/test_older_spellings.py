"""Every pair of a family and a module, from files as older versions wrote them: the same model, and the same file back.

The heads of BERT and of its relatives have tests of their own, tests/mappings/test_bert.py and test_bert_families.py;
here are the other families, and the other modules of these.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import porting
from porting.checkpoint import open_checkpoint
from porting.plan.plan import PlanError
from tests.families.pairs import PAIRS, Pair
from tests.families.ported import Ported, make
from tests.families.test_bert_families import FAMILIES

pytestmark = pytest.mark.few(4)

Weights = dict[str, Tensor]
OTHERS = [pair for pair in PAIRS if pair.table not in FAMILIES]


@pytest.fixture(scope="module")
def ported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Pair], Ported]:
    """Each checkpoint is made once."""

    @cache
    def made(pair: str) -> Ported:
        return make(next(other for other in OTHERS if str(other) == pair), tmp_path_factory.mktemp("today"))

    return lambda pair: made(str(pair))


def as_written_out(weights: Weights, one: Ported) -> Weights:
    """All that the model of transformers holds, tied copies and decoders included, as .bin files have it."""
    kind: Any = getattr(transformers, one.pair.architecture)  # one of transformers' classes
    held: Weights = kind.from_pretrained(one.directory).state_dict()
    assert held.keys() >= weights.keys()
    return held


def as_other_prefix(weights: Weights, one: Ported) -> Weights:
    """The bare encoder with its prefix, the models with heads without it."""
    prefix = one.table.prefix
    if any(name.startswith(prefix) for name in weights):
        return {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return {f"{prefix}{name}": tensor for name, tensor in weights.items()}


def as_tensorflow_named_norms(weights: Weights, one: Ported) -> Weights:
    """LayerNorm.gamma and LayerNorm.beta, in the files that were converted first: the families that TensorFlow had."""
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in weights.items()
    }
    assert renamed.keys() != weights.keys()
    return renamed


def with_position_numbers(weights: Weights, one: Ported) -> Weights:
    """The numbers of the positions, saved with the weights before version 4.31."""
    (table, *more) = [
        name for name in weights if name.endswith(("position_embeddings.weight", "positions_embed.weight"))
    ]
    assert not more
    stem = table.rpartition(".position")[0]
    return {**weights, (f"{stem}." if stem else "") + "position_ids": torch.arange(len(weights[table]))[None]}


SPELLINGS: dict[str, Callable[[Weights, Ported], Weights]] = {
    "written out": as_written_out,
    "other prefix": as_other_prefix,
    "gamma and beta": as_tensorflow_named_norms,
    "position numbers": with_position_numbers,
}
NEVER = {  # the families that no file of such a spelling was ever written of
    "gamma and beta": ("openai_gpt", "marian", "bart", "pegasus", "roberta", "modern_bert"),
    "position numbers": ("marian", "bart", "pegasus", "modern_bert"),
}
CASES = [
    (pair, spelling)
    for pair in OTHERS
    for spelling in SPELLINGS
    if not pair.table.startswith(NEVER.get(spelling, ()))  # a table's name begins with its family's
]


@pytest.mark.parametrize(("pair", "spelling"), CASES, ids=str)
def test_an_older_file_holds_the_same_model_and_comes_back(
    pair: Pair, spelling: str, ported: Callable[[Pair], Ported], tmp_path: Path
) -> None:
    one = ported(pair)
    older = SPELLINGS[spelling](load_file(one.directory / "model.safetensors"), one)
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(one.directory / "config.json", source)
    torch.save(older, source / "pytorch_model.bin")

    today, found = one.load(), porting.load(source, table=pair.table)
    assert type(found) is type(today)
    assert found.state_dict().keys() == today.state_dict().keys()
    for name, tensor in today.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name

    porting.export(found, pair.table, tmp_path / "back")
    back = open_checkpoint(tmp_path / "back")
    assert back.tensors.keys() == older.keys()
    assert all(torch.equal(back.read(name), tensor) for name, tensor in older.items())


TIED = [pair for pair in OTHERS if pair.architecture.endswith(("LMHeadModel", "MTModel", "Generation", "MaskedLM"))]


@pytest.mark.parametrize("pair", TIED, ids=str)
def test_a_copy_that_is_none_is_refused(pair: Pair, ported: Callable[[Pair], Ported], tmp_path: Path) -> None:
    """What older files have twice is left out only if it is the same twice."""
    one = ported(pair)
    weights = load_file(one.directory / "model.safetensors")
    copies = [name for name in as_written_out(weights, one) if name not in weights and "positions" not in name]
    assert copies
    shutil.copy(one.directory / "config.json", tmp_path)
    for name in copies:
        changed = as_written_out(weights, one)[name].clone()
        changed.view(-1)[-1] += 1
        torch.save({**weights, name: changed}, tmp_path / "pytorch_model.bin")
        with pytest.raises(PlanError, match=r"was to be dropped because it equals"):
            porting.load(tmp_path, table=pair.table)
