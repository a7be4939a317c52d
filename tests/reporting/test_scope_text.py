"""A verdict is never stronger than what was shown: inputs that show nothing, modules that never run, half a table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import porting
from porting.models.bert_heads import BertForPreTraining
from porting.notation.table import parse_table
from porting.trials.inputs import Maker, TokenSampler
from porting.verification import Case, Report, verify
from tests.small_checkpoint import CONFIG
from tests.verification.flags import FLAGS, complete_but_for_flags
from tests.verification.planted import Masked, OneSegment, WrongPrecedence, becomes
from tests.verification.user_bert import FUSED_TABLE, MyBert

LENGTH = CONFIG["max_position_embeddings"]


class Ignored(Masked):
    def bias_of(self, mask: Tensor) -> Tensor:
        return mask * 0.0


def batch(*, padded: bool, segments: bool) -> Case:
    torch.manual_seed(0)
    ids = torch.randint(0, CONFIG["vocab_size"], (4, LENGTH))
    lengths = torch.tensor([[LENGTH], [7], [13], [4]]) if padded else torch.tensor([[LENGTH]])
    mask = (torch.arange(LENGTH) < lengths).long().expand(4, -1)
    kinds = (torch.arange(LENGTH) >= lengths // 2).long().expand(4, -1) * mask * segments
    return Case("mine", {"input_ids": ids, "attention_mask": mask.contiguous(), "token_type_ids": kinds})


def not_run(report: Report) -> str:
    return " ".join(report.details().partition("\nnot run: ")[2].partition("\nfloat64:")[0].split())


def with_mask_bug(checkpoint: Path, kind: type[nn.Module], case: Case) -> Report:
    model = porting.load(checkpoint)
    assert isinstance(model, BertForPreTraining)
    becomes("bert", kind)(model)
    return verify(checkpoint, model, loaded=True, inputs=[case], causes=False)


def test_a_mask_bug_that_the_inputs_cannot_show_is_not_called_faithful_without_a_word(checkpoint: Path) -> None:
    report = with_mask_bug(checkpoint, Ignored, batch(padded=False, segments=True))
    assert report.faithful
    assert not report.complete
    assert tuple(map(str, report.unseen)) == ("the attention mask (no row is padded)", FLAGS)
    assert "the attention mask; the arguments " in not_run(report)
    assert with_mask_bug(checkpoint, Ignored, batch(padded=True, segments=True)).verdict == "different"


def test_what_qualifies_is_said_of_an_imprecise_port_too(checkpoint: Path) -> None:
    report = with_mask_bug(checkpoint, WrongPrecedence, batch(padded=True, segments=False))
    assert report.verdict == "imprecise"
    assert "the token types; the arguments " in not_run(report)


def test_a_bug_of_the_token_types_in_one_segment(checkpoint: Path) -> None:
    model = porting.load(checkpoint)
    assert isinstance(model, BertForPreTraining)
    becomes("bert.embeddings", OneSegment)(model)
    report = verify(checkpoint, model, loaded=True, inputs=[batch(padded=False, segments=False)])
    assert report.faithful
    assert report.shown.activation["bert.embeddings.token_type.weight"] == 0.5
    assert "the attention mask; the token types; the arguments " in not_run(report)


def test_an_input_that_is_the_same_everywhere_shows_nothing(checkpoint: Path) -> None:
    case = batch(padded=True, segments=True)
    places = torch.zeros_like(case.inputs["input_ids"])
    text = FUSED_TABLE.replace("[inputs]", '[inputs]\n"position_ids" = "places"')

    class Placed(MyBert):
        def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor, places: Tensor | None = None) -> Tensor:
            x = self.ln(self.tokens(tokens) + self.segments(segments) + self.places[:1, None])
            for block in self.blocks:
                x = block(x, mask)
            return torch.as_tensor(x)

    report = verify(
        checkpoint,
        Placed(),
        parse_table(text),
        architecture="BertModel",
        inputs=[Case("one place", {**case.inputs, "position_ids": places})],
    )
    assert report.faithful, str(report)
    assert "what position_ids does (it is 0 everywhere)" in map(str, report.unseen)


class Idle(nn.Module):
    """Has a second tower, for another branch than the one that is taken."""

    def __init__(self, kind: str = "first") -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out((self.first if self.kind == "first" else self.second)(x))
        return result


def test_modules_of_a_branch_that_was_not_taken_are_named() -> None:
    torch.manual_seed(0)
    report = verify(reference=Idle(), into=Idle, inputs=[Case("points", {"x": torch.randn(5, 3)})])
    assert report.faithful
    assert report.idle == ("second",)
    assert not_run(report).endswith("; second, which never ran")
    assert "\nnever ran: second\n" in report.details()


@pytest.mark.slow
def test_weights_that_are_used_without_their_module_ran(checkpoint: Path) -> None:
    """The decoder of a masked-language head is a product with the embedding's weight."""
    report = verify(checkpoint)
    assert report.idle == ()
    assert complete_but_for_flags(report)


def test_half_a_table_that_no_checkpoint_vouches_for_is_not_shown(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 2))
    ids = torch.tensor([[0, 1, 4]])
    path = porting.record(module, tmp_path / "own.safetensors", inputs=[Case("three words", {"input": ids})])
    report = verify(None, module, reference=path, loaded=True)
    assert report.faithful
    assert report.shown.activation["0.weight"] == 0.5
    assert report.shown.parts == ("0.weight",)
    assert "part of 0.weight" in not_run(report)


@pytest.mark.parametrize("seed", range(5))
def test_every_word_is_dealt_before_any_comes_again(seed: int) -> None:
    sampler = TokenSampler(50, (7, 3, 49), torch.Generator().manual_seed(seed))
    first = sampler.draw(4).tolist()
    assert {7, 3, 49} < set(first)
    assert sorted([*first, *sampler.draw(46).tolist()]) == list(range(50))
    assert sampler.left == 0
    assert all(0 <= one < 50 for one in sampler.draw(20).tolist())


@pytest.mark.parametrize(("vocabulary", "rows"), [(90, None), (300, 5), (95 + 40 + 1024, 26), (95 + 40 + 1025, None)])
def test_small_tables_are_reached_in_every_row(vocabulary: int, rows: int | None) -> None:
    """95 words in the short batch, 40 in the long row, and up to 1024 more in rows of their own."""
    config = {"vocab_size": vocabulary, "max_position_embeddings": 40, "type_vocab_size": 3}
    cases = Maker(config, seed=1, special=range(30)).first()
    seen = {int(one) for case in cases for one in case.inputs["input_ids"][case.inputs["attention_mask"] == 1]}
    assert len(cases) == (2 if rows is None else 3)
    if rows is not None:
        assert cases[2].name == f"{rows} rows of 40 tokens with the remaining token ids"
        assert cases[2].inputs["input_ids"].shape == (rows, 40)
    assert seen == set(range(vocabulary)) if vocabulary <= 95 + 40 + 1024 else len(seen) == 135
    assert set(range(30)) <= seen
    assert {int(one) for one in cases[0].inputs["token_type_ids"].flatten()} == {0, 1, 2}


@pytest.mark.slow
def test_the_embedded_checkpoint_is_shown_in_every_element() -> None:
    report = verify(porting.embedded_checkpoint())
    assert complete_but_for_flags(report)
    assert min(report.shown.activation.values()) == 1.0
