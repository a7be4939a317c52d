"""What [inputs] does not name, neither side is given; the report says so."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

from porting.notation.table import parse_table
from porting.reporting.outcome import Unseen
from porting.trials.inputs import Maker, for_port, named_inputs, withheld
from porting.verification import Case, verify
from porting.verification.coverage import unseen
from tests.families.pairs import BERT, Pair
from tests.families.ported import make

CASE = Case("one", {name: torch.ones(1, 2) for name in ("input_ids", "attention_mask", "token_type_ids")})


def test_what_is_not_named_is_left_out() -> None:
    rules = parse_table('[inputs]\n"attention_mask" = "m"\n"input_ids" = "x"\n"position_ids" = "p"').inputs
    assert list(named_inputs(rules, CASE).inputs) == ["input_ids", "attention_mask"]


def test_a_port_of_the_encoder_alone_leaves_the_reference_its_decoders_inputs() -> None:
    case = Case(
        "two", {**CASE.inputs, "decoder_input_ids": torch.ones(1, 3), "decoder_attention_mask": torch.ones(1, 3)}
    )
    encoder = parse_table('[inputs]\n"input_ids" = "x"').inputs
    assert list(named_inputs(encoder, case).inputs) == ["input_ids", "decoder_input_ids", "decoder_attention_mask"]
    assert list(for_port(encoder, named_inputs(encoder, case).inputs, torch.float32)) == ["x"]
    both = parse_table('[inputs]\n"input_ids" = "x"\n"decoder_input_ids" = "y"').inputs
    assert list(named_inputs(both, case).inputs) == ["input_ids", "decoder_input_ids"]


def test_rows_that_nobody_is_told_the_padding_of_are_called_so() -> None:
    (case,) = Maker({"vocab_size": 9, "max_position_embeddings": 5}, seed=0).first()[:1]
    kept = named_inputs(parse_table('[inputs]\n"input_ids" = "x"').inputs, case)
    assert kept.name == "8 rows of 1 to 5 tokens, padded and without a mask"
    assert unseen([kept], {}, withheld([case], [kept])) == [
        Unseen("the argument attention_mask", "[inputs] does not name it: neither side was given it")
    ]
    assert unseen([kept], {}) == [Unseen("the attention mask", "none is given")]


def test_nothing_is_left_out_without_inputs_or_when_they_name_what_is_not_there() -> None:
    assert named_inputs((), CASE) is CASE
    assert named_inputs(parse_table('[inputs]\n"input_idz" = "x"').inputs, CASE) is CASE


def test_a_room_without_token_types_is_compared_on_one_segment_and_the_report_says_so(tmp_path: Path) -> None:
    make(Pair("bert_into_encoder", "BertModel", BERT), tmp_path)
    report = verify(tmp_path, table="bert_into_encoder", dtypes=(), trials=False)
    assert report.faithful
    assert report.unseen[0] == Unseen(
        "the argument token_type_ids", "[inputs] does not name it: neither side was given it"
    )
    assert not any(one.what == "the token types" for one in report.unseen)
    assert report.cases[0] == "8 rows of 1 to 24 tokens, padded"
    assert not any("neither side" in one.why for one in verify(tmp_path, dtypes=(), trials=False).unseen)


class Silent(GPT2LMHeadModel):  # type: ignore[no-untyped-call]  # transformers has no types
    """Segments that are all zero are taken for none; in GPT-2 they are the word 0."""

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        given = token_type_ids if token_type_ids is None or token_type_ids.any() else None
        found: Tensor = super().forward(input_ids, token_type_ids=given, use_cache=False).logits
        return found


def test_segments_that_a_table_names_are_given_where_no_config_counts_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    table = parse_table(
        """
        [config]
        n_embd = "n_embd"
        [rest]
        "{*rest}" = "{*rest}"
        [ties]
        "lm_head.weight" = "transformer.wte.weight"
        [inputs]
        "input_ids" = "input_ids"
        "token_type_ids" = "token_type_ids"
        """
    )

    def build(n_embd: int) -> Silent:
        assert n_embd == config.n_embd
        return Silent(config)

    report = verify(tmp_path, into=build, table=table, causes=False, dtypes=())
    assert not report.faithful
    assert "all of segment 0" in [one.what for one in report.scope.differing]
