"""A proof is not taken for more than it is: what hides from its batches is found out, or said beside the verdict."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from porting.suggesting import pipeline, suggest
from porting.suggesting.verdict.proof import probed
from tests.suggesting import oracle
from tests.suggesting.attacks import LARGE, SAID, SEEN, VERDICTS, ItsOwnGain
from tests.suggesting.styles import drawn
from tests.suggesting.test_verdicts import Plain
from tests.suggesting.variants import builder

pytestmark = pytest.mark.few(1)


def test_scores_and_probabilities_are_no_outputs() -> None:
    points = [".", "layers.0 -> 1", "layers.0.attention -> probabilities", "layers.1 -> scores"]
    report: Any = SimpleNamespace(probes=[SimpleNamespace(port=point) for point in points])
    assert probed(report) == {".", "layers.0"}
    assert probed(None) == set()


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SEEN)
def test_what_hides_from_the_usual_batches_is_not_proven(source: Path, name: str) -> None:
    kind, said = SEEN[name]
    found = suggest(source, kind)
    assert found.verdict in VERDICTS, str(found)
    assert any(said in reason.said for reason in found.reasons), str(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_what_hides_behind_the_twin_s_size_is_not_proven(
    source: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint itself is taken for one that cannot be run here."""
    monkeypatch.setattr(pipeline, "LARGE", 0)
    kind, said = LARGE[name]
    found = suggest(source, kind)
    assert found.verdict in VERDICTS, str(found)
    assert any(said in reason.said for reason in found.reasons), str(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_what_no_batch_can_show_is_said(source: Path, name: str) -> None:
    kind, said = SAID[name]
    found = suggest(source, kind)
    assert found.proven, str(found)
    assert any(said in limit for limit in found.limits), found.limits
    assert said in " ".join(found.text.replace("\n# ", " ").split()), found.text


@pytest.mark.slow
def test_a_gain_that_the_checkpoint_does_not_have_is_filled_with_the_only_value_that_fits(source: Path) -> None:
    """It is not a guess: the table says the value, and the proof runs with it."""
    found = suggest(source, ItsOwnGain)
    assert found.proven, str(found)
    assert "[make]" in found.text
    assert '"gain" = "ones"' in found.text


class Folded(Plain):
    def change(self) -> None:
        del self.seg

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:  # type: ignore[override]  # it has no segments
        x: Tensor = self.norm(self.tok(ids) + self.pe[:, : ids.shape[1]])
        for layer in self.layers:
            x = layer(x, keep)
        return x


@pytest.mark.slow
def test_a_table_of_segments_that_is_folded_is_not_all_there(source: Path) -> None:
    """A module without segments has the first one in its positions, and no place for the others."""
    found = suggest(source, Folded)
    assert found.proven, str(found)
    assert "bert.embeddings.token_type_embeddings.weight but for row 0" in found.missing


@pytest.mark.slow
def test_of_a_module_that_hides_nothing_nothing_is_said(source: Path) -> None:
    found = suggest(source, Plain)
    assert (found.proven, found.limits) == (True, ()), str(found)


@pytest.mark.slow
def test_that_the_checkpoint_s_own_size_was_not_run_is_said(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "LARGE", 0)
    found = suggest(source, Plain)
    assert found.proven, str(found)
    assert [limit for limit in found.limits if "the checkpoint's own sizes" in limit], found.limits


@pytest.mark.slow
def test_a_window_that_no_row_is_longer_than_is_said(tmp_path: Path) -> None:
    """A module that sees all words is right for a checkpoint with a window, up to the window's edge."""
    drawings = (drawn(seed, flawed=False) for seed in range(1000))
    style = next(drawing for drawing in drawings if drawing.family.architecture == "LlamaModel" and not drawing.lazy)
    fields = {**style.family.fields, "max_position_embeddings": 8192, "sliding_window": 4096}
    oracle.source("MistralModel", fields, tmp_path)
    found = suggest(tmp_path, builder(style))
    assert found.proven, str(found)
    assert any(limit.startswith("the window's edge (sliding_window = 4096") for limit in found.limits), found.limits
