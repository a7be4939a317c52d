"""A verdict says how far the inputs got in the port's own code: branches that never ran, arguments never given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from porting.verification import Case, Report, verify
from tests.small_checkpoint import TRUNK, write_checkpoint


class Gated(nn.Module):
    """What it does beyond eight positions, and with a scale, is a branch of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor | None = None, *, loud: bool = False) -> Tensor:
        if scale is not None:
            x = x * scale
        if x.shape[1] > 8:
            x = x[:, :8]  # long
        if self.training:
            x = x + torch.randn_like(x)
        if x.dim() != 3:
            raise ValueError("three axes")
        found: Tensor = self.linear(x)
        return found * 2 if loud else found


def gated(*lengths: int, scale: bool = False) -> Report:
    torch.manual_seed(0)
    cases = [Case(str(length), {"x": torch.randn(2, length, 4)}) for length in lengths]
    if scale:
        cases.append(Case("scaled", {"x": torch.randn(2, 3, 4), "scale": torch.randn(4)}))
    return verify(reference=Gated(), into=Gated, inputs=cases)


def sentence(report: Report) -> str:
    return " ".join(report.details().partition("\nfloat64:")[0].split())


def test_branches_that_never_ran_are_listed_with_their_condition() -> None:
    report, here = gated(5), Path(__file__).name
    assert report.faithful
    assert not report.complete
    assert [one.condition for one in report.not_taken] == [
        "if scale is not None:",
        "if x.shape[1] > 8:",
        "found * 2 if loud else found -> found * 2",
    ]
    assert [branch.why for branch in report.branches if branch not in report.not_taken] == ["training", "raises"]
    one, two, _ = (branch.where for branch in report.not_taken)
    assert sentence(report).endswith(f"; the arguments scale and loud; the branches at {one}, {two} and 1 more")
    text = " ".join(report.details().split())
    line = 1 + Path(__file__).read_text().splitlines().index("        if x.shape[1] > 8:")
    assert f"{here}:{line} if x.shape[1] > 8: (1 line, Gated.forward)" in text
    assert "unreachable for this model: 1 that end in an error, 1 for training" in text


def test_what_ran_in_any_batch_is_shown() -> None:
    report = gated(5, 11, scale=True)
    assert [one.condition for one in report.not_taken] == ["found * 2 if loud else found -> found * 2"]
    assert "the argument loud (never given)" in map(str, report.unseen)
    assert f"the argument loud; the branch at {report.not_taken[0].where}" in sentence(report)


def test_a_machine_reads_the_same() -> None:
    (long,) = [
        branch
        for branch in json.loads(json.dumps(gated(5, scale=True).to_dict()))["branches"]
        if "shape" in branch["condition"]
    ]
    assert (long["why"], long["lines"], long["function"]) == ("inputs", 1, "Gated.forward")
    assert 8 in long["constants"]


def test_the_page_lists_them() -> None:
    page = gated(5).to_html()
    assert "if x.shape[1] &gt; 8:" in page
    assert "it ends in an error" in page
    assert "for training" in page


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_mistake_in_a_branch_that_no_input_takes_is_not_called_faithful_without_a_word(
    tmp_path: Path, stream: bool
) -> None:
    """The library's own BERT writes its attention out when it is asked for it, and nobody asks."""
    report = verify(write_checkpoint(tmp_path / "bert"), stream=stream)
    (core,) = [one for one in report.not_taken if one.function == "ScaledDotProductAttention.forward"]
    assert core.condition == "if output_attentions:"
    assert core.lines == 5
    assert f"the branches at {report.not_taken[0].where}" in sentence(report)


@pytest.mark.slow
def test_the_row_of_the_padding_word_is_shown_like_any_other(tmp_path: Path) -> None:
    """It takes no gradient in training; what it computes at the places of padding is compared all the same."""
    report = verify(write_checkpoint(tmp_path / "bert", parts=(TRUNK,), architecture="BertModel"))
    assert report.shown.activation["embeddings.word.weight"] == 1.0
