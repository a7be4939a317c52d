"""Encoder-decoders: what the encoder gives is met in every layer, and tables of distances are added to the scores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from porting import verify
from porting.suggesting import Suggestion, Verdict, pipeline, suggest
from porting.suggesting.verdict.proof import Proof
from porting.verification import cause_search, fixes
from tests.suggesting.oracle import BOUND, Drafted, apart, drafted, source
from tests.suggesting.pairs import (
    T5,
    Bart,
    BothMasks,
    Flat,
    Marian,
    MBart,
    OfTorch,
    OwnMasks,
    T5Blind,
    T5Early,
    T5Scaled,
    TwoTables,
    Unbiased,
    Unfair,
)

pytestmark = pytest.mark.few(1)

BART = {
    "vocab_size": 113, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 52, "decoder_ffn_dim": 52, "max_position_embeddings": 40,
}  # fmt: skip
DISTANCES = {
    "vocab_size": 113, "d_model": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 52,
    "relative_attention_num_buckets": 12, "relative_attention_max_distance": 20,
}  # fmt: skip
FEW = 40
"""So many candidates are enough where each part is settled by itself."""


def given() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    source_ids, target_ids = (torch.randint(3, 100, (4, length), generator=drawn) for length in (20, 14))
    keep = (torch.arange(20) < torch.tensor([20, 15, 9, 20])[:, None]).long()
    theirs = {"input_ids": source_ids, "attention_mask": keep, "decoder_input_ids": target_ids}
    return theirs, {"src": source_ids, "src_mask": keep, "tgt": target_ids}


def oracle(model: Any, folder: Path, build: Callable[..., nn.Module], found: Suggestion | Drafted) -> float:
    theirs, ours = given()
    return apart(model, folder, build, found, theirs, ours, kept=torch.ones(4, 14, dtype=torch.bool))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "fields", "kind"),
    [
        ("BartForConditionalGeneration", {}, Bart),
        ("BartForConditionalGeneration", {"scale_embedding": True, "decoder_layers": 4}, Bart),
        ("MBartForConditionalGeneration", {"scale_embedding": True}, MBart),
    ],
)
def test_bart_and_its_kin(
    tmp_path: Path, architecture: str, fields: dict[str, object], kind: Callable[..., nn.Module]
) -> None:
    model = source(architecture, BART | fields, tmp_path)
    model.final_logits_bias.zero_()  # as every checkpoint has it
    model.save_pretrained(tmp_path)
    found = suggest(tmp_path, kind)
    assert found.verdict is Verdict.EXACT, str(found)
    assert found.trials < FEW
    assert '"model.encoder.embed_positions.weight" = "source_places.weight"' in found.text
    assert (
        '"model.decoder.layers.{i}.encoder_attn.{p:q,k,v}_proj.{w:weight,bias}" = '
        '"writing.{i}.recall.{p:ask,match,tell}.{w:weight,bias}"'
    ) in found.text
    assert oracle(model, tmp_path, kind, found) < BOUND


@pytest.mark.slow
def test_seven_masks_and_both_texts_embedded_first(tmp_path: Path) -> None:
    """Torch's attention gives NaN for a query that sees no key, as in a decoder's row that is padded in front."""
    model = source("BartForConditionalGeneration", BART, tmp_path)
    model.final_logits_bias.zero_()
    model.save_pretrained(tmp_path)
    found = suggest(tmp_path, OfTorch)
    assert found.verdict is Verdict.SOME_INPUTS, str(found)
    assert '"attention_mask" = ["src_padding_mask -> padding", "memory_key_padding_mask -> padding"]' in found.text
    assert '"decoder_causal_mask" = "tgt_mask -> padding"' in found.text
    assert '[arguments]\nsrc_mask = "None"' in found.text
    assert "encoder_attn.{p:q,k,v}_proj.weight [o e]" in found.text
    assert '"model.decoder.embed_positions.weight" = "target_places.weight"' in found.text
    theirs, ours = given()
    hidden = ours["src_mask"] == 0
    masks = {"src_padding_mask": hidden, "memory_key_padding_mask": hidden, "src_mask": None}
    later, own = torch.ones(14, 14).triu(1).bool(), torch.zeros(4, 14, dtype=torch.bool)
    called: Any = {"src": ours["src"], "trg": ours["tgt"], **masks, "tgt_mask": later, "tgt_padding_mask": own}
    assert apart(model, tmp_path, OfTorch, found, theirs, called, kept=~own) < BOUND


@pytest.mark.slow
def test_a_bias_of_the_logits_that_is_not_zero_has_no_place(tmp_path: Path) -> None:
    source("BartForConditionalGeneration", BART, tmp_path)
    found = suggest(tmp_path, Bart)
    assert found.verdict is Verdict.IMPOSSIBLE
    assert found.reasons[0].said == "words.weight has no bias, and the checkpoint's final_logits_bias is not zero"


@pytest.mark.slow
def test_t5_s_tables_of_distances(tmp_path: Path) -> None:
    model = source("T5ForConditionalGeneration", DISTANCES, tmp_path)
    found = suggest(tmp_path, T5)
    assert found.verdict is Verdict.EXACT, str(found)
    assert found.trials < FEW
    assert (
        '"encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight" = "source_distance.table.weight"'
    ) in found.text
    assert oracle(model, tmp_path, T5, found) < BOUND


def test_distances_that_are_looked_up_and_masked_before_the_first_layer(tmp_path: Path) -> None:
    """The encoder's and the decoder's tables have one shape, and what is masked is a very large number in both."""
    model = source("T5ForConditionalGeneration", DISTANCES, tmp_path)
    found = drafted(tmp_path, T5Early)
    for side, ours in (("encoder", "source"), ("decoder", "target")):
        line = f'"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" = "{ours}_distance.table.weight"'
        assert line in found.text
    assert oracle(model, tmp_path, T5Early, found) < BOUND


@pytest.mark.slow
def test_tables_without_which_the_reference_is_the_module_are_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source("T5ForConditionalGeneration", DISTANCES, tmp_path)
    monkeypatch.setattr(cause_search, "REPAIRING", 0.0)  # either would tell it too
    monkeypatch.setattr(fixes, "CHANGING", 0.0)
    found = suggest(tmp_path, T5Blind)
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    shown = [one for one in found.reasons if one.shown]
    assert [one.kind for one in shown] == ["missing table"]
    for side in ("encoder", "decoder"):
        assert f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" in shown[0].said
    assert shown[0].places == ("reading.0.look.c_out.weight",)


@pytest.mark.slow
def test_scores_that_are_scaled_before_distances_are_added_take_queries_that_are_larger(tmp_path: Path) -> None:
    model = source("T5ForConditionalGeneration", DISTANCES, tmp_path)
    found = drafted(tmp_path, T5Scaled)
    assert "d_kv ** 0.5" in found.text
    assert oracle(model, tmp_path, T5Scaled, found) < BOUND


@pytest.mark.slow
def test_a_t5_that_masks_its_distances_is_proven(tmp_path: Path) -> None:
    source("T5ForConditionalGeneration", DISTANCES, tmp_path)
    found = suggest(tmp_path, T5Early)
    assert found.verdict is Verdict.EXACT, str(found)


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bart")
    model = source("BartForConditionalGeneration", BART, folder)
    model.final_logits_bias.zero_()
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "masks"), [(OwnMasks, {"left padding"}), (BothMasks, {"left padding in the decoder"})]
)
def test_masks_that_are_made_of_the_padding_token(bart: Path, kind: Callable[..., nn.Module], masks: set[str]) -> None:
    found = suggest(bart, kind)
    assert found.verdict is Verdict.EXACT, str(found)
    report = verify(bart, kind, found.text, dtypes=())
    assert report.faithful, str(report)
    assert masks <= set(report.scope.masks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Unbiased, "reading.0.look.c_in.weight has no bias, and the checkpoint's"),
    ],
)
def test_what_no_table_can_do_is_said_at_once(bart: Path, kind: Callable[..., nn.Module], said: str) -> None:
    found = suggest(bart, kind)
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    assert said in found.reasons[0].said
    assert found.trials < FEW


@pytest.mark.slow
def test_a_second_table_of_words_is_a_copy_of_the_first(bart: Path) -> None:
    assert '\n"others.weight" = "equals words.weight"\n' in drafted(bart, TwoTables).text.partition("[make]")[2]


@pytest.mark.slow
def test_words_one_after_the_other_have_their_places(bart: Path) -> None:
    text = drafted(bart, Flat).text
    assert '"lm_head [b t e]" = ". [(b t) e]"' in text
    assert '"model.encoder.embed_positions.weight" = "source_places.weight"' in text


@pytest.mark.slow
def test_words_one_after_the_other_are_the_reference_s(bart: Path) -> None:
    found = suggest(bart, Flat)
    assert found.verdict is Verdict.EXACT, str(found)
    assert '"lm_head [b t e]" = ". [(b t) e]"' in found.text


@pytest.mark.slow
def test_positions_that_are_rounded_and_another_eps_come_together(tmp_path: Path) -> None:
    model = source("MarianMTModel", BART | {"pad_token_id": 0, "decoder_start_token_id": 0}, tmp_path)
    model.final_logits_bias.zero_()
    model.save_pretrained(tmp_path)
    found = suggest(tmp_path, Marian)
    assert found.verdict is Verdict.APPROXIMATE, str(found)
    assert {reason.kind for reason in found.reasons} == {"norms", "rounding"}


class Fixed(Bart):
    """One depth for both sides, and the inner width is written into it."""

    def __init__(self, config: Any) -> None:
        depth, wide = config.encoder_layers, 52
        fields = ("d_model", "encoder_attention_heads", "vocab_size", "max_position_embeddings", "scale_embedding")
        sizes = {"encoder_layers": depth, "decoder_layers": depth, "encoder_ffn_dim": wide, "decoder_ffn_dim": wide}
        super().__init__(SimpleNamespace(**{name: getattr(config, name) for name in fields}, **sizes))


@pytest.mark.slow
def test_one_depth_and_an_inner_width_of_its_own(tmp_path: Path) -> None:
    model = source("BartForConditionalGeneration", BART | {"encoder_layers": 3, "decoder_layers": 3}, tmp_path)
    model.final_logits_bias.zero_()
    model.save_pretrained(tmp_path)
    found = suggest(tmp_path, Fixed)
    assert found.verdict is Verdict.EXACT, str(found)


@pytest.mark.slow
def test_nothing_is_said_to_be_small_that_was_not_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = source("PegasusForConditionalGeneration", BART | {"scale_embedding": True}, tmp_path)
    model.final_logits_bias.zero_()
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(pipeline, "prove", lambda *args, **kwargs: Proof(report=None, refused="no reason"))
    found = suggest(tmp_path, Unfair)
    assert found.verdict is Verdict.NOT_FOUND, str(found)
    assert "the float64 proof could not be run: no reason" in {reason.said for reason in found.reasons}


class T5OneDepth(T5):
    """One depth for both sides, by the encoder's name."""

    def __init__(self, config: Any) -> None:
        fields = (
            "d_model", "num_heads", "d_kv", "d_ff", "vocab_size", "relative_attention_num_buckets",
            "relative_attention_max_distance", "num_layers",
        )  # fmt: skip
        super().__init__(
            SimpleNamespace(**{name: getattr(config, name) for name in fields}, num_decoder_layers=config.num_layers)
        )


@pytest.mark.slow
def test_one_depth_by_another_name(tmp_path: Path) -> None:
    source("T5ForConditionalGeneration", DISTANCES | {"num_layers": 3, "num_decoder_layers": 3}, tmp_path)
    found = suggest(tmp_path, T5OneDepth)
    assert found.verdict is Verdict.EXACT, str(found)
