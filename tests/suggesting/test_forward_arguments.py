"""What a forward's arguments mean, by their names and their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from porting.suggesting import Verdict, suggest
from porting.suggesting.subjects.argument_names import Unmasked, constant_arguments, roles
from porting.suggesting.subjects.forward_arguments import find_argument_mapping
from porting.suggesting.subjects.forward_effects import PADDED, excused_faults, hides_padding, sees_later
from porting.suggesting.subjects.model_pair import completed_config
from porting.suggesting.subjects.questions import Asker
from porting.suggesting.subjects.sampler import Sampler
from porting.trials.modalities import POSITIONS, SAMPLES, SEGMENTS
from porting.trials.padding import MASK
from tests.suggesting.oracle import source as reference_source

IDS, DECODER = "input_ids", "decoder_input_ids"
BOTH = (IDS, "attention_mask", DECODER, "decoder_attention_mask")


class SourceTarget(nn.Module):
    def forward(self, src_seq: Tensor, trg_seq: Tensor, src_mask: Tensor, trg_mask: Tensor) -> None: ...


class InputsTargets(nn.Module):
    def forward(self, inputs: Tensor, targets: Tensor) -> None: ...


class XY(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> None: ...


class TwoTexts(nn.Module):
    def forward(self, text: Tensor, words: Tensor, labels: Tensor | None = None) -> None: ...


@pytest.mark.parametrize("kind", [SourceTarget, InputsTargets, XY, TwoTexts])
def test_the_second_words_are_the_decoders(kind: type[nn.Module]) -> None:
    found, _ = roles(kind(), BOTH)
    assert list(found.values())[:2] == [IDS, DECODER]
    assert "labels" not in found


class Previous(nn.Module):
    def forward(self, src_tokens: Tensor, prev_words: Tensor) -> None: ...


def test_what_has_to_be_given_and_is_left_is_the_decoder_s() -> None:
    found, _ = roles(Previous(), BOTH)
    assert found == {"src_tokens": IDS, "prev_words": DECODER}


class Listens(nn.Module):
    def forward(self, x: Tensor) -> None: ...


def test_sampled_sounds_are_taken_by_any_name() -> None:
    assert roles(Listens(), (SAMPLES,))[0] == {"x": SAMPLES}


class SegIds(nn.Module):
    def forward(self, ids: Tensor, seg_ids: Tensor, mask: Tensor) -> None: ...


def test_segments_are_taken_by_their_short_name() -> None:
    found, _ = roles(SegIds(), (IDS, MASK, SEGMENTS))
    assert found == {"ids": IDS, "seg_ids": SEGMENTS, "mask": MASK}


class MaskedWords(nn.Module):
    def forward(self, x_masked: Tensor, pad_mask: Tensor | None = None, mask_ratio: float = 0) -> None: ...


def test_masked_words_are_words_and_a_number_is_no_mask() -> None:
    found, loose = roles(MaskedWords(), (IDS, MASK))
    assert found == {"x_masked": IDS, "pad_mask": MASK}
    assert not loose


class Causal(nn.Module):
    """Attention that is causal, unless it is given another mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(97, 8).double()

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.words(ids)
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        seen = causal if mask is None else mask.bool().expand(len(ids), ids.shape[1], ids.shape[1])
        found: Tensor = (x @ x.mT).masked_fill(~seen, -1e9).softmax(-1) @ x
        return found


def test_a_mask_that_replaces_the_causal_one_is_left_at_its_default() -> None:
    found = find_argument_mapping(Causal(), Sampler(available=(IDS, "attention_mask")), causal=True, ask=Asker())
    assert found.named == (IDS,)
    other = find_argument_mapping(Causal(), Sampler(available=(IDS, "attention_mask")), causal=False, ask=Asker())
    assert other.named == (IDS, "attention_mask")


class Placed(Causal):
    """Its positions have a default, with which it fails, as a model whose caller makes them."""

    def forward(self, ids: Tensor, mask: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        turned = self.words.weight[position_ids.reshape(-1)].view(*position_ids.shape, -1)  # type: ignore[union-attr]
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        x = self.words(ids) + turned
        hidden = ~causal if mask is None else ~(causal & (mask[:, None] != 0))
        found: Tensor = (x @ x.mT).masked_fill(hidden, -1e9).softmax(-1) @ x
        return found


def test_positions_are_given_where_the_module_fails_without() -> None:
    available = (IDS, "attention_mask", POSITIONS)
    found = find_argument_mapping(Placed(), Sampler(available=available), causal=True, ask=Asker())
    assert found.named == available
    assert find_argument_mapping(Causal(), Sampler(available=available), causal=True, ask=Asker()).named == (IDS,)


class Square(Causal):
    """Its mask is a square for each row, [b s s]; without one each word sees each other."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.words(ids)
        rows, length = ids.shape
        seen = torch.ones(rows, length, length) if mask is None else mask.reshape(rows, length, length)
        found: Tensor = (x @ x.mT).masked_fill(seen == 0, -1e9).softmax(-1) @ x
        return found


class Windowed(Square):
    """Its mask has a row for each window of two tokens."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(ids, None if mask is None else mask.view(len(ids), 2, -1))


def test_a_mask_of_a_shape_of_its_own_is_left_at_its_default() -> None:
    found = find_argument_mapping(Windowed(), Sampler(available=(IDS, "attention_mask")), causal=False, ask=Asker())
    assert (found.named, found.loose, found.unmasked) == ((IDS,), ("mask",), Unmasked.ABSENT)


def attention(ids: Tensor, words: Tensor, seen: Tensor) -> Tensor:
    """What the modules below compute, with what each token sees [b q k]."""
    x = words[ids]
    return (x @ x.mT).masked_fill(~seen, -1e9).softmax(-1) @ x


class Bool(Causal):
    """True where a token is seen, [b 1 q k]; nothing else hides later tokens."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]  # it has to be given
        assert mask.dtype == torch.bool
        assert mask.shape == (len(ids), 1, ids.shape[1], ids.shape[1])
        return attention(ids, self.words.weight, mask[:, 0])


class Added(Causal):
    """Added to the scores, [b q k]."""

    def forward(self, ids: Tensor, attn_mask: Tensor) -> Tensor:  # type: ignore[override]
        assert attn_mask.is_floating_point()
        assert attn_mask.shape == (len(ids), ids.shape[1], ids.shape[1])
        return attention(ids, self.words.weight, attn_mask == 0)


class Hidden(Causal):
    """True where a token is hidden, [q k]: the same for each row."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        assert mask.shape == (ids.shape[1], ids.shape[1])
        return attention(ids, self.words.weight, ~mask.bool().expand(len(ids), -1, -1))


class Lengths(Causal):
    """The number of tokens of each row."""

    def forward(self, ids: Tensor, valid_lens: Tensor) -> Tensor:  # type: ignore[override]
        seen = torch.arange(ids.shape[1]) < valid_lens[:, None]
        return attention(ids, self.words.weight, seen[:, None].expand(-1, ids.shape[1], -1))


@pytest.mark.parametrize(
    ("kind", "causal", "line"),
    [
        (Bool, True, ("causal_attention_mask [b q k]", "mask -> bool [b 1 q k]")),
        (Bool, False, ("square_attention_mask [b q k]", "mask -> bool [b 1 q k]")),
        (Added, True, ("causal_attention_mask [b q k]", "attn_mask -> additive [b q k]")),
        (Hidden, True, ("causal_mask [q k]", "mask -> padding [q k]")),
        (Lengths, False, ("lengths [b]", "valid_lens [b]")),
    ],
)
def test_a_mask_that_is_made_from_the_reference_s(kind: type[Causal], line: tuple[str, str], *, causal: bool) -> None:
    found = find_argument_mapping(kind(), Sampler(available=(IDS, MASK)), causal=causal, ask=Asker())
    assert found.rules[1] == line
    assert found.causal == (line[1].partition(" ")[0] if causal else "")
    ids = torch.arange(10).view(2, 5)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    module = kind()
    seen = mask[:, None].bool() if line[0] != "causal_mask [q k]" else torch.ones(2, 1, 5, dtype=torch.bool)
    seen = seen & torch.ones(5, 5).tril().bool() if causal else seen.expand(-1, 5, -1)
    theirs = attention(ids, module.words.weight, seen)
    ours = module(**found.given({IDS: ids, MASK: mask}))
    kept = mask.bool()
    assert torch.equal(ours[kept], theirs[kept])


class Visible(Bool):
    def forward(self, ids: Tensor, visible: Tensor) -> Tensor:  # type: ignore[override]  # another name
        return super().forward(ids, visible)


class Bias(Added):
    def forward(self, ids: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]  # another name
        return super().forward(ids, bias)


class Gone(Hidden):
    def forward(self, ids: Tensor, gone: Tensor) -> Tensor:  # type: ignore[override]  # another name
        return super().forward(ids, gone)


class Count(Lengths):
    def forward(self, ids: Tensor, n: Tensor) -> Tensor:  # type: ignore[override]  # another name
        return super().forward(ids, n)


class Maybe(Bool):
    def forward(self, ids: Tensor, visible: Tensor | None = None) -> Tensor:
        rows, length = ids.shape
        return super().forward(ids, torch.ones(rows, 1, length, length).bool() if visible is None else visible)


@pytest.mark.parametrize(
    ("kind", "causal", "line"),
    [
        (Visible, True, ("causal_attention_mask [b q k]", "visible -> bool [b 1 q k]")),
        (Visible, False, ("square_attention_mask [b q k]", "visible -> bool [b 1 q k]")),
        (Bias, True, ("causal_attention_mask [b q k]", "bias -> additive [b q k]")),
        (Bias, False, ("square_attention_mask [b q k]", "bias -> additive [b q k]")),
        (Gone, True, ("causal_mask [q k]", "gone -> padding [q k]")),
        (Count, False, ("lengths [b]", "n [b]")),
        (Maybe, False, ("square_attention_mask [b q k]", "visible -> bool [b 1 q k]")),
    ],
)
def test_an_argument_whose_name_tells_nothing_is_a_mask_by_its_effect(
    kind: type[Causal], line: tuple[str, str], *, causal: bool
) -> None:
    found = find_argument_mapping(kind(), Sampler(available=(IDS, MASK)), causal=causal, ask=Asker())
    assert found.rules[1] == line


class Noise(Causal):
    def forward(self, ids: Tensor, noise: Tensor | None = None) -> Tensor:
        seen = attention(ids, self.words.weight, torch.ones(*ids.shape, ids.shape[1]).bool())
        return seen if noise is None else seen + noise[..., None]


def test_an_argument_that_hides_no_padding_is_no_mask() -> None:
    found = find_argument_mapping(Noise(), Sampler(available=(IDS, MASK)), causal=False, ask=Asker())
    assert (found.named, found.loose, found.unmasked) == ((IDS,), ("noise",), Unmasked.ABSENT)


class Both(nn.Module):
    """An encoder and a decoder; the decoder hides later tokens only where its mask does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(97, 8).double()

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor, tgt_mask: Tensor) -> Tensor:
        x, y = self.words(src), self.words(tgt)
        y = (y @ y.mT).masked_fill(tgt_mask == 0, -1e9).softmax(-1) @ y
        found: Tensor = (y @ x.mT).masked_fill(src_mask == 0, -1e9).softmax(-1) @ x
        return found


def test_a_decoder_s_mask_hides_later_tokens_where_nothing_else_does() -> None:
    found = find_argument_mapping(Both(), Sampler(available=BOTH), causal=False, ask=Asker())
    assert dict(found.rules)["decoder_causal_attention_mask [b q k]"] == "tgt_mask [b q k]"
    assert dict(found.rules)["attention_mask [b s]"] == "src_mask [b 1 s]"


class OwnNames(Both):
    def forward(self, question: Tensor, answer: Tensor, shown: Tensor, earlier: Tensor) -> Tensor:
        return super().forward(question, answer, shown, earlier)


def test_tokens_and_masks_whose_names_tell_nothing_are_found_by_their_effect() -> None:
    found = find_argument_mapping(OwnNames(), Sampler(available=BOTH), causal=False, ask=Asker())
    assert dict(found.rules) == {
        "input_ids [b s]": "question [b s]",
        "decoder_input_ids [b t]": "answer [b t]",
        "decoder_causal_attention_mask [b q k]": "earlier [b q k]",
        "attention_mask [b s]": "shown [b 1 s]",
    }


class SeveralMasks(Both):
    """The same with a causal mask of its own, and one mask of the encoder's padding for each side."""

    def forward(  # type: ignore[override]  # it takes other masks
        self, src: Tensor, tgt: Tensor, attn_mask: Tensor | None, src_pad_mask: Tensor, memory_mask: Tensor
    ) -> Tensor:
        x, y = self.words(src), self.words(tgt)
        x = (x @ x.mT).masked_fill(src_pad_mask[:, None], -1e9).softmax(-1) @ x
        y = (y @ y.mT).masked_fill(torch.ones(y.shape[1], y.shape[1]).triu(1).bool(), -1e9).softmax(-1) @ y
        found: Tensor = (y @ x.mT).masked_fill(memory_mask[:, None], -1e9).softmax(-1) @ x
        return found if attn_mask is None else found * attn_mask.sum()


def test_masks_of_one_text_are_told_apart() -> None:
    found = find_argument_mapping(SeveralMasks(), Sampler(available=BOTH), causal=False, ask=Asker())
    masks = [ours for theirs, ours in found.rules if theirs == "attention_mask [b s]"]
    assert masks == ["src_pad_mask -> padding [b s]", "memory_mask -> padding [b s]"]
    assert found.constants == {"attn_mask": None}


class Padded(Causal):
    """A causal one with a mask for what is behind and another for what is padding."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        seen = torch.ones(len(x), x.shape[1], x.shape[1])
        seen = seen if attn_mask is None else seen * ~attn_mask.view(x.shape[1], x.shape[1])
        return super().forward(x, seen if key_padding_mask is None else seen * ~key_padding_mask[:, None])


def test_a_mask_of_padding_beside_a_causal_one() -> None:
    found = find_argument_mapping(Padded(), Sampler(available=(IDS, MASK)), causal=True, ask=Asker())
    assert ("causal_mask [q k]", "attn_mask -> padding [q k]") in found.rules


class Hiding(Causal):
    """It takes no mask, and hides the token 0."""

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]  # it takes less
        return super().forward(ids, torch.ones(ids.shape[1], ids.shape[1]).tril() * (ids != 0)[:, None])


@pytest.mark.parametrize(("token", "hidden"), [(0, True), (4, False)])
def test_a_causal_module_may_hide_padding_by_itself(token: int, *, hidden: bool) -> None:
    way = find_argument_mapping(Hiding(), Sampler(available=(IDS,), padding=token), causal=True, ask=Asker())
    assert hides_padding(Hiding(), way, Sampler(available=(IDS,), padding=token)) is hidden


def test_each_side_has_its_mask() -> None:
    found, _ = roles(SourceTarget(), BOTH)
    assert found["src_mask"] == "attention_mask"
    assert found["trg_mask"] == "decoder_attention_mask"


class Many(nn.Module):
    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None,
        start: int,
        shift: int | None,
        cached: bool,
        memory: Tensor | None,
        other: Tensor,
        depth: int = 3,
    ) -> None: ...


class Unannotated(nn.Module):
    def forward(self, ids, mask, start_pos, past, targets, state):  # type: ignore[no-untyped-def]
        ...


def test_arguments_that_no_input_stands_for_have_a_value_by_their_type_or_name() -> None:
    assert constant_arguments(Many()) == {"start": 0, "shift": 0, "cached": False, "memory": None}
    assert constant_arguments(Unannotated()) == {"start_pos": 0, "past": None}


class Embeddings(nn.Module):
    """What comes before the layers: no position depends on another."""

    def __init__(self, vocab_size: int, hidden_size: int, max_position_embeddings: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, hidden_size)
        self.places = nn.Embedding(max_position_embeddings, hidden_size)
        self.kinds = nn.Embedding(2, hidden_size)
        self.norm = nn.LayerNorm(hidden_size, eps=1e-12)

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        x: Tensor = self.norm(self.words(ids) + self.places.weight[: ids.shape[1]] + self.kinds(segments))
        return x


def test_a_module_without_attention_is_matched(source: Path) -> None:
    found = suggest(source, Embeddings)
    assert found.verdict is Verdict.TRUNK, str(found)
    assert "encoder" in " ".join(found.missing)
    assert '"embeddings.word_embeddings.weight" = "words.weight"' in found.text.replace("bert.", "")


def test_whether_a_token_changes_what_stands_in_front_of_it() -> None:
    torch.manual_seed(0)
    ids, words = torch.randint(0, 97, (3, 7)), torch.randn(97, 4, dtype=torch.float64)
    batch = {IDS: ids}
    assert sees_later(lambda given: [words[given[IDS]].cumsum(1)], batch) is False
    assert sees_later(lambda given: [words[given[IDS]].cumsum(1)], batch, earlier=True) is True
    assert sees_later(lambda given: [words[given[IDS]]], batch, earlier=True) is False
    assert sees_later(lambda given: [words[given[IDS]].flip(1).cumsum(1)], batch) is True
    assert (
        sees_later(lambda given: [words[given[IDS]].cumsum(1) + 1e-9 * words[given[IDS]].sum(1, True)], batch) is None
    )
    assert sees_later(lambda given: [words[given[IDS]].sum(1)], batch) is None, "no row for each token"
    both = {IDS: ids, DECODER: ids[:, :5]}
    assert sees_later(lambda given: [words[given[DECODER]].cumsum(1) + words[given[IDS]].sum(1, True)], both) is False


class SeesAll(nn.Module):
    """GPT-2 without its causal mask, or with one that the caller gives."""

    def __init__(self, n_embd: int, n_layer: int, n_head: int, n_positions: int, vocab_size: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab_size, n_embd), nn.Embedding(n_positions, n_embd)
        layer = nn.TransformerEncoderLayer(
            n_embd, n_head, 4 * n_embd, activation="gelu", norm_first=True, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, n_layer, nn.LayerNorm(n_embd), enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.layers(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        return found


class MaybeSeesAll(SeesAll):
    def forward(self, ids: Tensor, whatever: Tensor | None = None) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        found: Tensor = self.layers(x, mask=whatever)
        return found


GPT = {"vocab_size": 97, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 40, "activation_function": "gelu"}


@pytest.mark.slow
def test_without_a_causal_mask_it_is_impossible_unless_an_argument_may_be_one(tmp_path: Path) -> None:
    reference_source("GPT2Model", GPT, tmp_path)
    found = suggest(tmp_path, SeesAll)
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    assert "its forward has no causal mask" in found.reasons[0].said
    maybe = suggest(tmp_path, MaybeSeesAll)
    assert maybe.verdict is Verdict.NOT_FOUND, str(maybe)
    assert any("it was called without 'whatever'" in one.said for one in maybe.reasons)


MOBILE = {
    "vocab_size": 60, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2,
    "embedding_size": 8, "intra_bottleneck_size": 12, "num_feedforward_networks": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "fields", "excused"),
    [("MobileBertModel", MOBILE, {PADDED}), ("BertModel", {**MOBILE, "hidden_size": 12}, set())],
)
def test_masked_tokens_may_change_the_others_where_they_do_in_the_reference(
    architecture: str, fields: dict[str, Any], excused: set[str], tmp_path: Path
) -> None:
    model = reference_source(architecture, fields, tmp_path).double()
    assert excused_faults(Sampler.of(model, model.config.to_dict())) == excused


def test_a_config_is_given_no_field_that_its_class_refuses() -> None:
    """XLNet has no limit of its rows and says -1, which it refuses to be given."""
    fields = completed_config({"model_type": "xlnet", "n_layer": 2, "d_model": 8, "n_head": 2}, "XLNetLMHeadModel")
    assert "max_position_embeddings" not in fields
    assert fields["n_layer"] == 2
