"""Inputs that are made from the reference's: square masks, lengths."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask
from transformers.models.gpt2.configuration_gpt2 import GPT2Config

import porting
from porting.errors import VerifyError
from porting.models.bert_heads import BertForPreTraining, BertPreTrainingOutput
from porting.notation.table import parse_table
from porting.trials.derived_inputs import NAMES, is_right_padded, source_of, with_derived
from porting.trials.inputs import Case, for_port, named_inputs

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]])
IDS = torch.arange(12).view(3, 4)
INPUTS = {"input_ids": IDS, "attention_mask": MASK}


def test_a_causal_mask_is_transformers_own() -> None:
    config = GPT2Config(n_embd=8, n_head=2)
    config._attn_implementation = "eager"
    given = create_causal_mask(
        config=config, inputs_embeds=torch.zeros(3, 4, 8), attention_mask=MASK, past_key_values=None
    )
    assert isinstance(given, Tensor)
    made = with_derived(["causal_attention_mask"], INPUTS)["causal_attention_mask"]
    kept = MASK.bool()
    assert torch.equal((given[:, 0] == 0)[kept], made.bool()[kept])
    assert made.any(-1).all()  # padding in front sees itself, or its softmax would be NaN


@pytest.mark.parametrize("mask", [MASK, MASK.bool(), MASK.double()])
def test_the_others(mask: Tensor) -> None:
    made = with_derived(NAMES, {"input_ids": IDS, "attention_mask": mask[:2].expand(2, 4)})
    assert made["lengths"].tolist() == [4, 2]
    assert made["square_attention_mask"].tolist() == [[[1, 1, 1, 1]] * 4, [[1, 1, 0, 0]] * 4]
    assert made["causal_mask"].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert not any(name.startswith("decoder_") for name in made)


def test_without_a_mask_nothing_is_padding_and_a_decoder_has_its_own() -> None:
    made = with_derived(NAMES, {"decoder_input_ids": IDS})
    assert made["decoder_lengths"].tolist() == [4, 4, 4]
    assert "lengths" not in made


def test_a_length_does_not_say_where_padding_is() -> None:
    assert not is_right_padded(MASK)
    with pytest.raises(VerifyError, match="padding elsewhere than at its end"):
        with_derived(["lengths"], INPUTS)


@pytest.mark.parametrize(
    ("line", "shape"),
    [
        ('"causal_attention_mask [b q k]" = "m -> bool [b 1 q k]"', (3, 1, 4, 4)),
        ('"causal_mask" = "m -> additive"', (4, 4)),
        ('"square_attention_mask" = "m -> padding"', (3, 4, 4)),
    ],
)
def test_inputs_name_them_like_the_reference_s(line: str, shape: tuple[int, ...]) -> None:
    rules = parse_table(f'[inputs]\n"input_ids" = "x"\n{line}').inputs
    case = named_inputs(rules, Case("one", {**INPUTS, "token_type_ids": IDS}))
    assert "token_type_ids" not in case.inputs
    assert ("attention_mask" in case.inputs) is ("causal_mask" not in line)
    given = for_port(rules, case.inputs, torch.float32)
    assert given["m"].shape == shape
    hidden = {"bool": False, "additive": torch.finfo(torch.float32).min, "padding": True}
    first = given["m"].reshape(-1, 4, 4)[0]
    assert bool(first[0, 1] == hidden[line.rpartition("-> ")[2].split()[0].strip('"')]) is ("square" not in line)


def test_a_misspelled_one_is_named() -> None:
    rules = parse_table('[inputs]\n"causal_atention_mask" = "m"').inputs
    with pytest.raises(VerifyError, match="did you mean 'causal_attention_mask'"):
        for_port(rules, INPUTS, torch.float32)


def test_each_is_made_from_one_of_the_reference_s() -> None:
    assert {source_of(name) for name in NAMES} == {
        "input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"
    }  # fmt: skip


class Lengths(BertForPreTraining):
    """BERT that is told how many tokens each row has."""

    late = 0

    def forward(  # type: ignore[override]  # it takes other arguments
        self, input_ids: Tensor, token_type_ids: Tensor, lengths: Tensor
    ) -> BertPreTrainingOutput:
        mask = (torch.arange(input_ids.shape[1]) < lengths[:, None] + self.late).long()
        return super().forward(input_ids, mask, token_type_ids)


class Late(Lengths):
    """It sees one token too many."""

    late = 1


@pytest.mark.slow
def test_a_port_that_takes_lengths_is_tried_with_padding_at_the_end_alone(tmp_path: Path) -> None:
    table = tmp_path / "lengths.toml"
    table.write_text('extends = "bert"\n[inputs]\n"attention_mask" = false\n"lengths" = "lengths"\n')
    report = porting.verify(porting.embedded_checkpoint(), into=Lengths, table=table)
    assert report.faithful
    assert "padding elsewhere than at the end of rows" in [one.what for one in report.scope.not_run]
    assert not {"left padding", "gaps"} & {result.what for result in report.scope.results}
    wrong = porting.verify(porting.embedded_checkpoint(), into=Late, table=table)
    assert not wrong.faithful
    assert [cause.name for cause in wrong.causes] == ["other mask"]
