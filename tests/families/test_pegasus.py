"""The encoder of an encoder-decoder by itself, with a new head: Pegasus into the small classifier."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import einops
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import porting
from porting.errors import PortingWarning
from porting.models.classifier import Classifier
from porting.models.positions import sinusoidal_positions
from porting.plan.plan import PlanError
from porting.verification import verify
from tests.families.pairs import PEGASUS, Pair
from tests.families.ported import make

TABLE = "pegasus_into_classifier"
POSITIONS = "model.encoder.embed_positions.weight"
Weights = dict[str, Tensor]


def checkpoint(directory: Path, change: Callable[[Weights], Weights] | None = None) -> Path:
    """A small summarizer, as published ones are written; its tensors rewritten."""
    make(Pair(TABLE, "PegasusForConditionalGeneration", {**PEGASUS, "num_labels": 5}), directory)
    if change is not None:
        path = directory / "model.safetensors"
        weights = {name: one.contiguous() for name, one in change(load_file(path)).items()}
        save_file(weights, path, metadata={"format": "pt"})
    return directory


def new(directory: Path) -> Classifier:
    with pytest.warns(
        PortingWarning, match=r"2 parameters are new and untrained: classifier\.weight, classifier\.bias"
    ):
        module = porting.load(directory, table=TABLE, fresh=True)
    assert isinstance(module, Classifier)
    return module


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, 37, (3, 20), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(20) < torch.tensor([[20], [13], [4]])).long()
    return ids * mask, mask


def test_a_new_head_stands_on_the_encoder(tmp_path: Path) -> None:
    module = new(checkpoint(tmp_path)).double()
    kind: Any = transformers.PegasusForConditionalGeneration  # with this dtype
    encoder = kind.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager").eval().get_encoder()
    ids, mask = batch()
    with torch.no_grad():
        first = einops.rearrange(encoder(ids, mask).last_hidden_state[:, 0], "b (s k) -> b (k s)", s=2)
        expected = first @ module.classifier.weight.T + module.classifier.bias
        found = module(ids, mask).logits
    assert found.shape == (3, 5)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_new_head_is_never_part_of_a_faithful(tmp_path: Path) -> None:
    report = verify(checkpoint(tmp_path), table=TABLE, fresh=True)
    assert report.verdict == "unproven", str(report)
    assert report.random == ("classifier.weight", "classifier.bias")
    assert max(probe.meaning.worst for probe in report.probes) <= 1e-12
    assert report.shown.nothing == ("classifier.weight", "classifier.bias")


def test_without_leave_there_is_no_new_head(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"nothing for 'classifier\.weight', 'classifier\.bias'"):
        porting.load(checkpoint(tmp_path), table=TABLE)


def test_the_table_is_not_chosen_unasked(tmp_path: Path) -> None:
    """A summarizer is not what a classifier is: who wants its encoder says so."""
    with pytest.raises(porting.PortingError, match="asked for: table='pegasus_into_classifier'"):
        porting.load(checkpoint(tmp_path))


def without_positions(weights: Weights) -> Weights:
    return {name: one for name, one in weights.items() if not name.endswith("embed_positions.weight")}


def with_copies(weights: Weights) -> Weights:
    names = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    return {**weights, **{name: weights["model.shared.weight"].clone() for name in names}}


def without_prefix(weights: Weights) -> Weights:
    return {name.removeprefix("model."): one for name, one in weights.items()}


@pytest.mark.parametrize("older", [without_positions, with_copies, without_prefix])
def test_older_files_hold_the_same_model(older: Callable[[Weights], Weights], tmp_path: Path) -> None:
    today, found = new(checkpoint(tmp_path / "today")), new(checkpoint(tmp_path / "older", older))
    for name, tensor in today.state_dict().items():
        assert name.startswith("classifier.") or torch.equal(found.state_dict()[name], tensor), name
    table = found.get_buffer("encoder.embeddings.positions")
    assert torch.equal(table, sinusoidal_positions(29, 24))


def test_positions_that_a_file_has_are_taken_from_it(tmp_path: Path) -> None:
    drawn = torch.randn(29, 24, generator=torch.Generator().manual_seed(3))
    module = new(checkpoint(tmp_path, lambda weights: {**weights, POSITIONS: drawn}))
    table = module.get_buffer("encoder.embeddings.positions")
    assert torch.equal(table, einops.rearrange(drawn, "t (s k) -> t (k s)", s=2))


def test_a_copy_that_is_none_is_refused(tmp_path: Path) -> None:
    def untied(weights: Weights) -> Weights:
        found = with_copies(weights)
        found["model.decoder.embed_tokens.weight"][36, 23] += 1e-6
        return found

    with pytest.raises(PlanError, match=r"model\.decoder\.embed_tokens\.weight: was to be dropped because it equals"):
        porting.load(checkpoint(tmp_path, untied), table=TABLE, fresh=True)


@pytest.mark.parametrize(
    ("field", "value"), [("activation_function", "gelu"), ("scale_embedding", False), ("is_encoder_decoder", False)]
)
def test_what_the_room_cannot_represent_is_refused_by_name(field: str, value: object, tmp_path: Path) -> None:
    path = checkpoint(tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(porting.PortingError) as caught:
        porting.load(tmp_path, table=TABLE, fresh=True)
    assert f"{field} = {value!r}" in str(caught.value)
