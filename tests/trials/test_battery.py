"""The batches of the trials: their lengths, rows, masks, tokens and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from torch import Tensor

from porting.trials import Kind
from porting.trials.battery import battery
from porting.trials.combinations import covering, de_bruijn
from porting.trials.inputs import Maker, integers, lengthened
from porting.trials.trial import Model
from tests.trials.small_model import CONFIG

pytestmark = pytest.mark.few(3)


def test_more_rows_than_the_code_takes_at_once_are_tried() -> None:
    model = Model(config=CONFIG, base=dict(verified_case()), longest=20, likely=[23])
    rows = {len(trial.case.inputs["input_ids"]) for trial in battery(model, seed=0, tokens=10**6)}
    assert {24, 26} <= rows


def verified_case() -> Mapping[str, Tensor]:
    ids = torch.arange(1, 19).view(2, 9)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_a_decoder_may_be_given_the_encoder_s_tokens() -> None:
    base = {**verified_case(), "decoder_input_ids": torch.ones(2, 7, dtype=torch.long)}
    model = Model(config=CONFIG, base=base, longest=20)
    pairs = [trial.case.inputs for trial in battery(model, seed=0, tokens=10**6)]
    assert any(torch.equal(one["input_ids"], one.get("decoder_input_ids", one["input_ids"][:1])) for one in pairs)


def test_a_decoder_may_be_given_more_tokens_than_the_encoder_with_each_mask() -> None:
    config = {**CONFIG, "is_encoder_decoder": True, "decoder_start_token_id": 7}
    base = Maker(config, seed=0).first()[0].inputs
    optional = {"attention_mask", "decoder_attention_mask"}
    trials = battery(Model(config=config, base=base, longest=20, optional=optional), seed=0, tokens=10**6)
    given = [trial.case.inputs for trial in trials]
    longer = [
        one
        for one in given
        if "decoder_input_ids" in one and one["decoder_input_ids"].shape[1] > one["input_ids"].shape[1]
    ]
    assert any(not bool(one.get("attention_mask", one["input_ids"]).all()) for one in longer)
    masks = [
        one["decoder_attention_mask"]
        for one in longer
        if "attention_mask" not in one and "decoder_attention_mask" in one
    ]
    assert any(bool((mask.diff(dim=1) > 0).any()) for mask in masks)


def test_a_decoder_s_row_may_be_as_long_as_the_encoder_s() -> None:
    config = {**CONFIG, "is_encoder_decoder": True, "decoder_start_token_id": 7}
    base = Maker(config, seed=0).first()[0].inputs
    trials = battery(
        Model(config=config, base=base, longest=20, optional={"decoder_attention_mask"}), seed=0, tokens=10**6
    )
    found = {trial.what: trial.case.inputs for trial in trials}
    both, left = (
        found[name]
        for name in (
            "a decoder's row as long as the encoder's, padded in front",
            "the same without decoder_attention_mask",
        )
    )
    assert both["decoder_input_ids"].shape == both["input_ids"].shape
    assert not both["attention_mask"][1:, 0].any()
    assert "decoder_attention_mask" in both
    assert {*both} - {*left} == {"decoder_attention_mask"}


def test_pictures_are_tried_half_blank_and_with_their_channels_last_in_memory() -> None:
    base = {"pixel_values": torch.randn(2, 3, 8, 8)}
    found = {
        trial.what: trial.case.inputs["pixel_values"]
        for trial in battery(Model(config={}, base=base, longest=0), seed=0, tokens=10**6)
    }
    last = found["pictures with their channels last in memory"]
    assert torch.equal(last, base["pixel_values"])
    assert last.stride(1) == 1
    half = found["zeros in the first half"]
    assert not half[..., :4].any()
    assert torch.equal(half[..., 4:], base["pixel_values"][..., 4:])


def test_pictures_of_other_shapes_with_as_many_patches_and_of_no_whole_number_of_them() -> None:
    base = {"pixel_values": torch.randn(2, 3, 8, 12)}
    found = {
        trial.what: trial.case.inputs["pixel_values"]
        for trial in battery(Model(config={}, base=base, longest=0), seed=0, tokens=10**6)
    }
    shapes = {what: tuple(one.shape[2:]) for what, one in found.items() if "height" in what or "higher" in what}
    assert shapes == {
        "pictures of 1 patch less in height and 1 patch less in width": (6, 10),
        "pictures of 1 patch less in height and 2 patches less in width": (6, 8),
        "pictures of 2 patches less in height and 1 patch less in width": (4, 10),
        "pictures of 1 patch more in height and 2 patches more in width": (10, 16),
        "pictures of 2 patches more in height and 1 patch more in width": (12, 14),
        "pictures of 1 patch more in height and 1 patch less in width": (10, 10),
        "pictures of 1 patch less in height and 1 patch more in width": (6, 14),
        "pictures of half the height": (4, 12),
        "pictures of half the height and twice the width": (4, 24),
        "pictures of twice the height and half the width": (16, 6),
        "pictures one row higher and three columns wider": (9, 15),
        "pictures four rows higher and twelve columns wider": (12, 24),
        "pictures of 3 times the height and width": (24, 36),
    }
    flat = found["pictures of half the height and twice the width"]
    assert torch.equal(flat[..., 12:], base["pixel_values"][:, :, 4:])


def test_the_battery_keeps_to_its_tokens_and_its_seed() -> None:
    ids = torch.randint(1, 50, (4, 6))
    model = Model(config=CONFIG, base={"input_ids": ids, "attention_mask": torch.ones_like(ids)}, longest=20)
    whole = battery(model, seed=1, tokens=10_000)
    assert sum(one.case.inputs["input_ids"].numel() for one in battery(model, seed=1, tokens=300)) <= 300
    again = battery(model, seed=1, tokens=10_000)
    assert all(
        torch.equal(a.case.inputs["input_ids"], b.case.inputs["input_ids"]) for a, b in zip(whole, again, strict=True)
    )
    others = battery(model, seed=2, tokens=10_000)
    assert any(
        a.case.inputs["input_ids"].ne(b.case.inputs["input_ids"]).any() for a, b in zip(whole, others, strict=True)
    )
    assert {len(one.case.inputs["input_ids"][0]) for one in whole} >= {1, 2, 3, 11, 12, 13, 19, 20}  # around 12, too
    past = replace(model, limit=20)
    assert [one.what for one in battery(past, seed=1, tokens=10_000) if one.past] == ["length 21, one past the limit"]


def test_each_two_values_of_two_properties_meet_in_a_batch() -> None:
    properties = {
        "mask": ["left", "right", "none"],
        "rows": ["1", "3"],
        "segments": ["given", "left out"],
        "one": ["x"],
    }
    chosen = covering(properties, torch.Generator().manual_seed(0))
    assert len(chosen) < 12  # of the product's
    for one, other in combinations(properties, 2):
        met = {(choice[one], choice[other]) for choice in chosen}
        assert met == set(product(properties[one], properties[other]))


def test_images_are_tried_in_the_ranges_that_they_come_in() -> None:
    images = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    made = {one.what: one.case.inputs["pixel_values"] for one in battery(
        Model(config={}, base={"pixel_values": images}, longest=0), seed=0, tokens=10**6
    )}  # fmt: skip
    ranges = {what: (float(one.min()), float(one.max())) for what, one in made.items()}
    assert ranges["new values"][0] < 0
    assert ranges["values that are not negative"][0] >= 0
    least, most = ranges["values from 0 to 1"]
    assert 0 <= least < 0.2
    assert 0.8 < most <= 1
    assert 200 < ranges["values from 0 to 255"][1] <= 255


def test_the_numbers_of_a_config_are_lengths_to_try() -> None:
    assert integers({"window": 8, "flag": True, "rate": 0.5, "inner": {"chunk": 64}, "sizes": [3, 1]}) == [8, 64, 3]


@pytest.mark.parametrize(
    ("letters", "order"), [((5,), 3), ((5, 7), 2), ((3, 1, 4), 3), (tuple(range(9)), 2), ((2, 8), 1)]
)
def test_every_word_of_the_letters_stands_in_the_row(letters: tuple[int, ...], order: int) -> None:
    """Once each, and the row begins with the first letter."""
    row = de_bruijn(letters, order)
    words = [tuple(row[start : start + order]) for start in range(len(row) - order + 1)]
    assert sorted(words) == sorted(product(letters, repeat=order))
    assert row[0] == letters[0]


def test_rows_are_made_longer_at_their_ends() -> None:
    ids, mask = torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": torch.tensor([[0, 1, 2], [2, 1, 0]])}
    found = lengthened({**given, "token_type_ids": mask, "pixel_values": torch.ones(2, 3)}, 5, 4)
    assert found["input_ids"].tolist() == [[5, 6, 7, 4, 4], [8, 9, 0, 4, 4]]
    assert found["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert found["token_type_ids"].tolist() == found["attention_mask"].tolist()
    assert found["position_ids"].tolist() == [[0, 1, 2, 3, 4], [2, 1, 0, 1, 2]]
    assert found["pixel_values"].shape == (2, 3)
    both = lengthened({"input_ids": ids, "decoder_input_ids": ids[:, :2]}, 4, 4)  # nothing hides what is added
    assert both["input_ids"].tolist() == [[5, 6, 7, 5], [8, 9, 0, 8]]
    assert both["decoder_input_ids"].tolist() == [[5, 6, 5, 6], [8, 9, 8, 9]]


def test_lengths_around_the_numbers_of_the_port_s_code_are_tried() -> None:
    base = {"input_ids": torch.ones(2, 9, dtype=torch.long)}
    model = Model(config={"vocab_size": 50}, base=base, longest=90, likely=(37,))
    lengths = {one.case.inputs["input_ids"].shape[1] for one in battery(model, seed=0, tokens=10**6)}
    assert lengths >= {*range(1, 21), 36, 37, 38, 73, 74, 75}


def test_masks_of_a_decoder_are_tried_with_other_properties() -> None:
    ids = torch.ones(2, 9, dtype=torch.long)
    names = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
    model = Model(config={"vocab_size": 50}, base=dict.fromkeys(names, ids), longest=20)
    combined = [one.case.inputs for one in battery(model, seed=0, tokens=10**6) if one.kind is Kind.COMBINED]
    masked = [one for one in combined if bool((one["decoder_attention_mask"] == 0).any())]
    assert {len(one["input_ids"]) for one in masked} == {1, 2, 3, 5}
    assert {one["input_ids"].shape[1] for one in masked} >= {5, 8, 13, 20}


def test_short_rows_of_a_decoder_are_tried_with_every_mask() -> None:
    ids = torch.ones(2, 9, dtype=torch.long)
    names = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
    model = Model(config={"vocab_size": 50}, base=dict.fromkeys(names, ids), longest=20)
    masks = [trial.case.inputs["decoder_attention_mask"] for trial in battery(model, seed=0, tokens=10**6)]
    rows = {tuple(row) for mask in masks for row in mask.tolist()}
    for width in (2, 3, 4):
        assert rows >= {row for row in product((0, 1), repeat=width) if any(row)}


@pytest.mark.parametrize("dim", [-1, -2])
def test_pictures_may_be_the_same_in_a_half(dim: int) -> None:
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = Model(config={}, base={"pixel_values": images}, longest=0)
    given = [trial.case.inputs["pixel_values"] for trial in battery(model, seed=0, tokens=10**6)]
    two = [one for one in given if one.shape == images.shape and not torch.equal(one[0], one[1])]
    assert any(torch.equal(*one.narrow(dim, 0, 4)) and bool(one.any()) for one in two)
